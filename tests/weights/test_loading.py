"""Loading by path and by name, in either dtype, and the errors on the way."""

import dataclasses
import functools
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jaxspec import drafters, generate, load_drafter, nets, with_taps
from jaxspec.cli.main import app
from jaxspec.core import Prompt, Room
from jaxspec.files import folders
from jaxspec.nets import decoder, t5
from jaxspec.testing import table_model, word_tokenizer
from jaxspec.vocab import trim
from jaxspec.weights import loading, orbax, parameters, quantisation, tokenizers
from jaxspec.weights import shipped as shipped_models
from jaxspec.weights.loading import Model, load, shipped
from jaxspec.weights.orbax import CheckpointError
from tests.marks import marked
from tests.small import prefill, tiny_gpt, tiny_t5

WORDS = ["<pad>", "</s>", "<unk>", "the", "old", "dog", "saw", "a", "new", "cat"]
T5 = tiny_t5(len(WORDS))
GPT = tiny_gpt(16)  # more ids than words
PROMPT = Prompt(jnp.array([[3, 4, 5, 1]], jnp.int32), jnp.array([4], jnp.int32))


def save_model(folder: Path, net, config, tokenizer: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), shapes)
    orbax.save(
        folder,
        params,
        config,
        tokenizer,
        name=folder.name,
        dtype="float32",
        description={},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder of checkpoints: tiny-t5 and tiny-gpt."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = root / "tokenizer"
    word_tokenizer(WORDS, pad_token="<pad>").save_pretrained(tokenizer)
    save_model(root / "checkpoints" / "tiny-t5", t5, T5, tokenizer)
    save_model(root / "checkpoints" / "tiny-gpt", decoder, GPT, tokenizer)
    return root / "checkpoints"


@pytest.fixture
def shipping(folder, monkeypatch, tmp_path):
    """Patches the shipped checkpoints: those of a folder that is not below the working
    directory.
    """
    monkeypatch.setattr(shipped_models, "FOLDERS", (tmp_path / "none", folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize(
    ("name", "config"), marked([("tiny-t5", T5), ("tiny-gpt", GPT)], slow={("tiny-t5", T5)})
)
def test_load_gives_a_model_that_runs(folder, name, config):
    loaded = load(str(folder / name))
    assert isinstance(loaded, Model)
    assert (loaded.name, loaded.config) == (name, config)
    assert loaded.lm.vocab_size == config.vocab_size
    assert loaded.tokenizer("the old dog")["input_ids"] == [3, 4, 5]
    assert loaded.tokenizer.decode([7, 9]) == "a cat"
    assert loaded.tokenizer.eos_token_id == 1
    forward, _ = jax.eval_shape(
        functools.partial(loaded.lm.prefill, room=Room(8)), loaded.params, PROMPT
    )
    assert forward.logits.shape == (1, 1, config.vocab_size)


@pytest.mark.parametrize("name", marked(["tiny-t5", "tiny-gpt"], slow={"tiny-t5"}))
def test_bfloat16_is_the_computation_of_the_float32_parameters(folder, name):
    """Casting matrices beforehand saves memory and changes no bit; what is not a matrix stays
    float32.
    """
    wide, narrow = load(folder / name), load(folder / name, dtype="bfloat16")
    assert (wide.config.dtype, narrow.config.dtype) == ("float32", "bfloat16")
    types = {
        path.rsplit("/", 1)[-1]: x.dtype.name for path, x in parameters.flat(narrow.params).items()
    }
    assert types["weight"] == types["embedding"] == "bfloat16"
    assert types["scale"] == "float32"
    read = jax.jit(functools.partial(narrow.lm.prefill, room=Room(8)))
    # Linen's LayerNorm promotes bfloat16 to float32 by itself
    with jax.numpy_dtype_promotion("standard"):
        (forward, cache), (expected, _) = read(narrow.params, PROMPT), read(wide.params, PROMPT)
    assert forward.logits.dtype == jnp.float32
    assert (forward.logits == expected.logits).all()
    assert jax.tree.leaves(cache)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("name", marked(["tiny-t5", "tiny-gpt"], slow={"tiny-t5"}))
def test_int8_is_the_rounding_of_the_float32_parameters(folder, name):
    """Matrices stay int8, in a float32 computation; what is not a matrix stays float32."""
    wide, narrow = load(folder / name), load(folder / name, dtype="int8")
    assert narrow.config == wide.config and narrow.config.dtype == "float32"
    expected = quantisation.quantise(wide.params)
    assert jax.tree.structure(narrow.params) == jax.tree.structure(expected)
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: a.dtype == b.dtype and bool((a == b).all()), narrow.params, expected
        )
    )
    assert {x.dtype.name for x in jax.tree.leaves(narrow.params)} == {"int8", "float32"}
    assert quantisation.count(narrow.params) == quantisation.count(wide.params)
    read = functools.partial(narrow.lm.prefill, room=Room(8))
    forward, _ = jax.eval_shape(read, narrow.params, PROMPT)
    assert forward.logits.shape == (1, 1, wide.config.vocab_size)


def test_int8_is_computed_in_bfloat16_where_asked_for_and_by_default_off_a_cpu(folder, monkeypatch):
    """The same parameters; caches of half the size, and logits that are those of float32 but for
    the rounding.
    """
    exact, narrow = (
        load(folder / "tiny-gpt", dtype="int8", compute=compute)
        for compute in ("float32", jnp.bfloat16)
    )
    assert (exact.config.dtype, narrow.config.dtype) == ("float32", "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, narrow.params, exact.params)
    # Linen's LayerNorm promotes bfloat16 to float32 by itself
    with jax.numpy_dtype_promotion("standard"):
        (ours, cache), (theirs, _) = (prefill(m, PROMPT, Room(8)) for m in (narrow, exact))
    assert jax.tree.leaves(cache)[0].dtype == jnp.bfloat16 and ours.logits.dtype == jnp.float32
    assert 0 < jnp.abs(ours.logits - theirs.logits).max() < 0.05 * jnp.abs(theirs.logits).max()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert load(folder / "tiny-gpt", dtype="int8").config.dtype == "bfloat16"
    assert load(folder / "tiny-gpt", dtype="int8", compute="float32").config.dtype == "float32"


@pytest.mark.parametrize(
    ("dtype", "compute", "message"),
    [
        ("bfloat16", "float32", 'expected dtype="int8" or dtype="int4" with it'),
        ("int8", "int8", "compute is 'int8': expected one of"),
    ],
)
def test_what_computes_with_no_int8_matrices_is_refused(folder, dtype, compute, message):
    with pytest.raises(ValueError, match=message):
        load(folder / "tiny-gpt", dtype=dtype, compute=compute)


@pytest.mark.slow
def test_what_is_stored_as_int8_is_the_same_function_in_memory():
    """A shipped checkpoint, which was rounded when it was saved: float32 undoes nothing of it, int8
    adds nothing.
    """
    if "debian-t5-small" not in shipped():
        pytest.skip("the shipped pairs are not there")
    wide, narrow = load("debian-t5-small"), load("debian-t5-small", dtype="int8")
    assert orbax.read_manifest(loading.find("debian-t5-small")).dtype == "int8"
    read = quantisation.dequantise(narrow.params)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), read, wide.params))
    half = load("debian-t5-small", dtype="bfloat16").params
    matrices, ours = (
        [x for x in jax.tree.leaves(params) if x.ndim == 2] for params in (half, narrow.params)
    )
    # half, and a scale per channel
    assert sum(x.nbytes for x in ours) < 0.53 * sum(x.nbytes for x in matrices)
    read = jax.jit(functools.partial(wide.lm.prefill, room=Room(8)))
    (ours, _), (theirs, _) = (read(m.params, PROMPT) for m in (narrow, wide))
    np.testing.assert_allclose(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)


def test_int8_on_a_mesh(folder):
    """Entries and scales lie where the table has them."""
    placed = load(folder / "tiny-t5", dtype="int8", mesh="data=1,model=1")
    wi = placed.params["decoder_0"]["ff"]["wi"]["weight"]
    assert [tuple(wi[kind].sharding.spec) for kind in ("int8", "scale")] == [("model", None)] * 2


FEW = [1, 3, 5]


@pytest.fixture(scope="module")
def trimmed(folder, tmp_path_factory) -> Path:
    """tiny-t5 as a drafter of three tokens."""
    to, manifest = (
        tmp_path_factory.mktemp("trimmed") / "few",
        dict(dtype="float32", description={}),
    )
    params = load(folder / "tiny-t5").params
    orbax.save(
        to, params, T5, folder.parent / "tokenizer", name="few", draft_tokens=FEW, **manifest
    )
    return to


def test_a_drafters_head_is_trimmed_to_the_tokens_of_its_checkpoint(folder, trimmed):
    untrimmed, few = load(folder / "tiny-t5"), load(trimmed)
    (ours, _), (theirs, _) = (prefill(m, PROMPT, Room(8)) for m in (few, untrimmed))
    np.testing.assert_allclose(ours.logits[..., FEW], theirs.logits[..., FEW], rtol=1e-5)
    assert (jnp.isfinite(ours.logits[0, 0]).nonzero()[0] == jnp.array(FEW)).all()
    assert (
        few.name == "few"
        and trim.draft_tokens(few).tolist() == FEW
        and trim.draft_tokens(untrimmed) is None
    )
    again = trim.untrimmed(few)
    assert again.lm is untrimmed.lm and trim.untrimmed(untrimmed) is untrimmed
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), again.params, untrimmed.params)
    )


def test_a_trimmed_drafter_on_a_mesh_in_int8(trimmed):
    placed = load(trimmed, dtype="int8", mesh="data=1,model=1").params
    head = placed.head["head"]["weight"]
    assert [tuple(head[kind].sharding.spec) for kind in ("int8", "scale")] == [("model", None)] * 2
    assert placed.to_target.sharding.mesh.shape == {"data": 1, "model": 1}


def test_a_trimmed_drafter_is_converted_with_its_tokens(trimmed, tmp_path):
    assert (
        CliRunner()
        .invoke(app, ["convert", str(trimmed), str(tmp_path / "again"), "--format", "jaxspec"])
        .exit_code
        == 0
    )
    assert trim.draft_tokens(load(tmp_path / "again")).tolist() == FEW


@pytest.mark.parametrize("content", ["[99]", "[1, 3", '{"a": 1}', "[]"])
def test_tokens_of_a_head_that_are_none_are_refused(trimmed, tmp_path, content):
    """Such tokens may still have the hash that the manifest says."""
    bad = tmp_path / "bad"
    shutil.copytree(trimmed, bad)
    (bad / orbax.DRAFT_TOKENS).write_text(content)
    with pytest.raises(CheckpointError, match=r"is damaged: draft_tokens\.json"):
        load(bad)
    said = orbax.read_manifest(bad)
    (bad / orbax.MANIFEST).unlink()
    orbax._write_manifest(
        bad / orbax.MANIFEST, dataclasses.replace(said, files=folders.fingerprints(bad))
    )
    with pytest.raises(
        CheckpointError, match=r"draft_tokens\.json (is .*: expected a list of ids|cannot be read)"
    ):
        load(bad)


def test_tokens_of_a_head_that_are_none_are_not_saved(folder, tmp_path):
    manifest = dict(name="few", dtype="float32", description={}, draft_tokens=[10])
    with pytest.raises(
        CheckpointError, match=r"draft_tokens is \[10\]: expected a list of ids from 0 to 9"
    ):
        orbax.save(
            tmp_path / "few",
            load(folder / "tiny-t5").params,
            T5,
            folder.parent / "tokenizer",
            **manifest,
        )


def test_an_unknown_dtype_is_refused(folder):
    with pytest.raises(
        ValueError, match="dtype is 'float16': expected one of float32, bfloat16, int8, int4"
    ):
        load(folder / "tiny-t5", dtype="float16")
    with pytest.raises(ValueError, match="dtype is 'float16'"):
        load(folder / "tiny-t5", dtype=np.float16)
    assert load(folder / "tiny-t5", dtype=jnp.bfloat16).config.dtype == "bfloat16"


def test_a_drafter_is_no_model_and_a_model_no_drafter(shipping):
    (shipping / "tiny-eagle").mkdir()
    (shipping / "tiny-eagle" / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"tiny-eagle is a drafter, .* load it by jaxspec.load_drafter"
    ):
        load("tiny-eagle")
    target = load("tiny-gpt")
    with pytest.raises(
        CheckpointError,
        match=r"tiny-t5 is a model: load it by jaxspec.load, and pass it as the draf",
    ):
        load_drafter("tiny-t5", target=target)
    with pytest.raises(TypeError, match=r"target is .tiny-gpt.: expected a jaxspec.Model"):
        load_drafter("tiny-eagle", target="tiny-gpt")
    with pytest.raises(
        TypeError, match=r"source is of type int: expected a folder, a file, or the name of a model"
    ):
        load(5)
    with pytest.raises(TypeError, match=r"draft is None: expected a jaxspec.Model"):
        drafters.tree(None)


def test_shipped_by_name_and_by_a_path_that_is_not_there(shipping):
    assert shipped() == {"tiny-gpt": shipping / "tiny-gpt", "tiny-t5": shipping / "tiny-t5"}
    for source in (
        "tiny-gpt",
        "checkpoints/tiny-gpt",
        "./checkpoints/tiny-gpt/",
        "../checkpoints/tiny-gpt",
    ):
        assert loading.find(source) == loading.find(Path(source)) == shipping / "tiny-gpt"
    assert load("tiny-gpt").name == "tiny-gpt"


def test_working_directory_goes_before_package_and_package_before_checkout(
    shipping, tmp_path, monkeypatch
):
    packaged = tmp_path / "package"
    shutil.copytree(shipping / "tiny-t5", packaged / "tiny-t5")
    monkeypatch.setattr(shipped_models, "FOLDERS", (packaged, shipping))
    assert shipped() == {"tiny-gpt": shipping / "tiny-gpt", "tiny-t5": packaged / "tiny-t5"}
    shutil.copytree(shipping / "tiny-t5", tmp_path / "tiny-t5")
    assert loading.find("tiny-t5").resolve() == tmp_path / "tiny-t5"


@pytest.mark.parametrize(
    "source", ["runs/tiny-t5", "/nowhere/checkpoints/tiny-t5", "google/tiny-t5"]
)
def test_any_other_path_that_is_not_there_is_an_error(shipping, source):
    """A mistyped path must not load other weights that happen to have the same name."""
    with pytest.raises(
        CheckpointError, match=rf"no checkpoint at {source}: did you mean 'tiny-t5'\?"
    ):
        load(source)


def test_unknown_name_lists_the_shipped_ones(shipping):
    with pytest.raises(
        CheckpointError, match=r"at tiny-t6: did you mean 'tiny-t5'\?.*\(tiny-gpt, tiny-t5\)"
    ):
        load("tiny-t6")
    with pytest.raises(
        CheckpointError, match=r"at some where\. Expected a folder with a manifest\.toml"
    ):
        load("some where")


def test_an_installation_without_checkpoints_has_none_to_offer(monkeypatch, tmp_path):
    monkeypatch.setattr(shipped_models, "FOLDERS", (tmp_path,))
    with pytest.raises(CheckpointError, match=r"\(none in this installation\)"):
        load("tiny-t5")


def test_a_manifest_goes_before_a_hugging_face_config(folder, tmp_path):
    """A folder that is both is jaxspec's own, whose files are checked against its manifest."""
    shutil.copytree(folder / "tiny-t5", tmp_path / "both")
    (tmp_path / "both" / "config.json").write_text("{}")
    assert load(tmp_path / "both").config == T5


def test_names_that_can_be_no_hub_id_are_not_asked_for(shipping, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    for source in ("tiny-t6", "checkpoints/tiny-t6", "/google/t5", "some where/else"):
        with pytest.raises(
            CheckpointError,
            match=r"no checkpoint at .*or the id of a model of the Hugging Face hub",
        ):
            load(source)


@pytest.mark.parametrize("name", ["openai-community/gpt2", "google-t5/t5-small"])
def test_models_whose_owner_the_hub_knows_are_named_in_full(shipping, monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    with pytest.raises(CheckpointError, match=f"did you mean '{name}'"):
        load(name.partition("/")[2])


def test_only_models_of_the_hub_have_revisions(shipping):
    for source in ("tiny-t5", shipping / "tiny-t5"):
        with pytest.raises(
            ValueError,
            match=r"revision is 'v1', but .*tiny-t5: only models of the hub have revisions",
        ):
            load(source, revision="v1")


def test_a_folder_without_a_manifest(tmp_path):
    with pytest.raises(CheckpointError, match=r"it has no manifest\.toml"):
        load(tmp_path)


def test_a_tokenizer_with_more_ids_than_the_model(folder, tmp_path):
    small = tiny_gpt(8)
    save_model(tmp_path / "small", decoder, small, folder / "tiny-gpt")
    with pytest.raises(
        CheckpointError, match="the tokenizer has ids up to 9, but the model only up to 7"
    ):
        load(tmp_path / "small")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(torch_dtype="auto"), "no option 'torch_dtype': it is called dtype"),
        (
            dict(device_map="auto"),
            "no option 'device_map': it is called mesh, such as mesh=\"model=8\"",
        ),
        (
            dict(trust_remote_code=True),
            "no option 'trust_remote_code': code that a model brings is never run",
        ),
        (dict(revison="v2"), r"no option 'revison': did you mean revision\?"),
        (dict(dtype=None), "dtype is 'None': expected one of"),
        (dict(mesh=2), "the mesh is 2: expected sizes such as 'data=2,model=4'"),
    ],
)
def test_options_of_other_libraries_are_told_what_they_are_here(folder, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        load(folder / "tiny-gpt", **options)


def test_a_dtype_may_be_another_librarys(folder):
    class Dtype:
        def __str__(self):
            return "torch.bfloat16"

    assert (
        load(folder / "tiny-gpt", dtype=Dtype()).params["embedding"]["embedding"].dtype
        == jnp.bfloat16
    )


@pytest.mark.parametrize("config", [None, "{}"], ids=["alone", "beside a config.json"])
def test_an_adapter_is_no_model(tmp_path, config):
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "some/llama"}'
    )
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(
        CheckpointError,
        match=r"is an adapter \(LORA, .*\) of some/llama, not a model: load that with adapter=",
    ):
        load(tmp_path)


def test_models_pickle(folder):
    """Multiprocessing sends them so: functions are made anew, and are those that this process
    has.
    """
    model = load(folder / "tiny-t5")
    tapped = with_taps(load(folder / "tiny-gpt", dtype="int8"), [0])
    counted = drafters.ngram([[1, 2, 1]], model, order=2)
    for loaded in (model, tapped, counted, trim.trim_vocabulary(model, ids=[1, 4, 5])):
        again = pickle.loads(pickle.dumps(loaded))
        assert again.name == loaded.name and again.config == loaded.config
        assert again.lm == loaded.lm
        assert jax.tree.structure(again.params) == jax.tree.structure(loaded.params)
        jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
        assert (
            again.tokenizer("the old dog")["input_ids"]
            == loaded.tokenizer("the old dog")["input_ids"]
        )


def test_a_model_of_other_functions_says_what_to_send():
    target = Model(t5.language_model(T5), t5.init(T5, jax.random.key(0)), config=T5)
    trimmed = trim.trim_vocabulary(target, ids=[1, 4, 5])
    with pytest.raises(TypeError, match="does not pickle"):  # it reads the target's encoder
        pickle.dumps(drafters.share_encoder(trimmed, target))
    table = table_model(jax.random.key(0), 5)
    with pytest.raises(TypeError, match=r"table-5 does not pickle, .*: send what it is made of"):
        pickle.dumps(table)
    by_value = pytest.importorskip("cloudpickle")  # ray's way, which stores functions
    assert pickle.loads(by_value.dumps(table)).lm.vocab_size == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layers=2), "layers_1/attention/key/bias is unexpected, .*, and 13 more"),
        (
            dict(dim=8),
            r"embedding/embedding is \[16, 8\], expected \[16, 16\], layers_0/attention/key/bias is \[8\], ex",
        ),
        (
            dict(vocab_size=24),
            r"embedding/embedding is \[24, 16\], expected \[16, 16\]\. A model's lm, params and",
        ),
    ],
)
def test_parameters_of_another_network_are_named(change, message):
    other = nets.replace(GPT, **change)
    wrong = Model(decoder.language_model(GPT), decoder.init(other, jax.random.key(0)), config=GPT)
    with pytest.raises(ValueError, match=message):
        generate(wrong, PROMPT, max_new_tokens=2)


def test_parameters_that_are_none_are_named():
    for net, config in ((t5, T5), (decoder, GPT)):
        with pytest.raises(
            ValueError, match=r"the parameters are not those of the model's network: .* is missing"
        ):
            generate(
                Model(net.language_model(config), None, config=config), PROMPT, max_new_tokens=2
            )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tokenizer.json is damaged, Expecting value"),
        (
            "[]",
            "tokenizer.json is damaged, it is of type list, expected an object; copy or download "
            "it again",
        ),
        ("{}", "tokenizer.json lacks its model or its added_tokens"),
    ],
)
def test_a_broken_tokenizer_is_named(tmp_path, text, message):
    (tmp_path / "tokenizer.json").write_text(text)
    for read in (tokenizers.load, orbax.tokenizer_of):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path)


def test_transformers_without_torch_gives_no_advice():
    """In a process of its own, whose transformers finds no PyTorch; other lines are logged as
    ever.
    """
    script = Path(__file__).parents[1] / "scripts" / "without_torch.py"
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMERS_")
    }  # as a user has it
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, env=env
    )
    assert (
        done.stdout == "imported\n"
        and "PyTorch" not in done.stderr
        and "another line" in done.stderr
    )


def test_an_empty_name_is_not_this_folder():
    with pytest.raises(
        CheckpointError, match="the name of the model is empty: expected a folder, a file, or"
    ):
        loading.load("")
