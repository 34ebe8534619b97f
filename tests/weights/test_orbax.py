"""Checkpoints: what is saved is what is restored, damage is named, and a crash destroys nothing."""

import dataclasses
import functools
import json
import math
import shutil
import tomllib
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxspec.drafters.lookups import ngram_model
from jaxspec.drafters.lookups.ngram import count
from jaxspec.files import folders
from jaxspec.nets import decoder, net_of, t5
from jaxspec.nets.shapes import (
    AttentionShape,
    DecoderConfig,
    FeedForwardShape,
    LayerShape,
    NormShape,
)
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import orbax, orbax_arrays, quantisation
from jaxspec.weights.orbax import CheckpointError, read_manifest, restore, save
from tests.small import tiny_gpt, tiny_t5

T5 = tiny_t5(48, max_positions=9)
GPT = tiny_gpt(48)
NET = {"t5": (t5, T5), "gpt": (decoder, GPT)}
ABOUT = {
    "licence": 'as "Debian" \\ packages\n\tü 😀 \x7f',
    "steps": 4000,
    "heldout_loss": 2.875,
    "tiny": 1e-05,
    "distilled": True,
    "tasks": ["translation", "synopsis"],
    "odd key": [0.1, 2.0],
    "none": [],
}


@functools.cache
def params_of(family: str) -> dict:
    net, config = NET[family]
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), shapes)


def equal(a, b) -> bool:
    return jax.tree.all(
        jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b)
    )


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    for file in orbax.TOKENIZER:
        (folder / file).write_text("{}")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny-t5"
    save(
        folder,
        params_of("t5"),
        T5,
        tokenizer,
        name="tiny-t5",
        dtype="float32",
        description=ABOUT,
    )
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A checkpoint that a test may damage, at another place than it was saved at."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-t5"))


# ---- round trips


@pytest.mark.parametrize("family", ["t5", "gpt"])
@pytest.mark.parametrize("dtype", orbax.DTYPES)
def test_what_is_saved_is_restored(family, dtype, tokenizer, tmp_path):
    params, config = params_of(family), NET[family][1]
    folder = tmp_path / "tiny"
    written = save(
        folder,
        params,
        config,
        tokenizer,
        name="tiny",
        dtype=dtype,
        description=ABOUT,
    )
    got, got_config, manifest = restore(folder)

    expected = {
        "float32": params,
        "bfloat16": jax.tree.map(
            lambda x: x.astype(jnp.float32), quantisation.quantise(params, jnp.bfloat16)
        ),
        "int8": quantisation.dequantise(quantisation.quantise(params)),
        "int4": quantisation.dequantise(quantisation.quantise(params, "int4")),
    }[dtype]
    assert jax.tree.structure(got) == jax.tree.structure(params)
    assert equal(got, expected)
    assert all(isinstance(x, jax.Array) and x.dtype == jnp.float32 for x in jax.tree.leaves(got))
    assert got_config == config
    assert manifest == written
    assert manifest.about == ABOUT
    assert (manifest.name, manifest.dtype) == ("tiny", dtype)
    assert manifest.family == {"t5": "t5", "gpt": "decoder"}[family]
    assert manifest.parameters == sum(x.size for x in jax.tree.leaves(params))


def test_a_tokenizers_files_are_stored_without_white_space(tmp_path):
    folder, written = (
        tmp_path / "words",
        {"model": {"vocab": [["▁ü b", -1.5], ["\n", 2]]}, "x": None},
    )
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(written, indent=2))
    (folder / "tokenizer_config.json").write_text("no JSON\n")
    out, shape = tmp_path / "tiny", dict(name="tiny", dtype="float32")
    save(out, params_of("t5"), T5, folder, description={}, **shape)
    assert (
        out / "tokenizer.json"
    ).read_text() == '{"model":{"vocab":[["▁ü b",-1.5],["\\n",2]]},"x":null}'
    assert (out / "tokenizer_config.json").read_text() == "no JSON\n"


def test_tables_stay_integers_in_their_own_tuples(tokenizer, tmp_path):
    config, counted = count([[1, 2, 3, 1, 2, 4], [2, 2]], vocab_size=5, order=3, followers=2)
    save(
        tmp_path / "tri",
        counted,
        config,
        tokenizer,
        name="tri",
        dtype="float32",
        description={},
    )
    got, got_config, manifest = restore(tmp_path / "tri")
    assert jax.tree.structure(got) == jax.tree.structure(counted) and equal(got, counted)
    assert all(x.dtype == jnp.int32 for x in jax.tree.leaves(got))
    assert got_config == config and manifest.family == "ngram"
    assert equal(jax.tree.map(jnp.zeros_like, counted), ngram_model.init(config, jax.random.key(0)))


def test_what_was_restored_is_saved_as_itself(tokenizer, tmp_path):
    """Rounding happens once: an int8 checkpoint that is read and written again is the same
    model.
    """
    options = {"name": "tiny", "dtype": "int8", "description": {}}
    save(tmp_path / "once", params_of("gpt"), GPT, tokenizer, **options)
    once, _, _ = restore(tmp_path / "once")
    save(tmp_path / "twice", once, GPT, tokenizer, **options)
    twice, _, _ = restore(tmp_path / "twice")
    assert equal(once, twice)


@pytest.mark.parametrize("stored", orbax.DTYPES)
def test_restored_as_int8(stored, tokenizer, tmp_path):
    """Whatever is stored, matrices are int8 in memory; these are saved as themselves."""
    options = {"name": "tiny", "description": {}}
    save(tmp_path / "once", params_of("t5"), T5, tokenizer, dtype=stored, **options)
    once, _, _ = restore(tmp_path / "once", dtype="int8")
    wide = restore(tmp_path / "once")[0]
    assert jax.tree.structure(once) == jax.tree.structure(quantisation.quantise(wide))
    # Entries of four bits are not rounded anew, but kept as they are.
    assert (
        equal(quantisation.dequantise(once), wide)
        if stored == "int4"
        else equal(once, quantisation.quantise(wide))
    )
    manifest = save(tmp_path / "twice", once, T5, tokenizer, dtype="int8", **options)
    assert equal(restore(tmp_path / "twice", dtype="int8")[0], once)
    assert (
        manifest.parameters
        == quantisation.count(once)
        == sum(x.size for x in jax.tree.leaves(wide))
    )


@pytest.mark.parametrize("dtype", orbax.DTYPES)
def test_a_few_arrays_at_a_time(dtype, tokenizer, tmp_path, monkeypatch):
    """Arrays are made for writing, and let go of, a few at a time; in parts or not, the same bits
    are read.
    """
    alive, most, total = {}, 0, 0
    intact = orbax_arrays._global

    def watched(x):
        nonlocal most, total
        alive[id(x)] = x.nbytes
        weakref.finalize(x, alive.pop, id(x))
        most, total = max(most, sum(alive.values())), total + x.nbytes
        return intact(x)

    options = {"name": "tiny", "description": {}, "dtype": dtype}
    save(tmp_path / "whole", params_of("t5"), T5, tokenizer, **options)
    expected = restore(tmp_path / "whole")[0]
    monkeypatch.setattr(orbax_arrays, "BATCH_BYTES", 600)
    monkeypatch.setattr(orbax_arrays, "_global", watched)
    save(tmp_path / "parts", params_of("t5"), T5, tokenizer, **options)
    largest = 48 * 16 * {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 1}[dtype]
    assert most <= 2 * max(600, largest) < total / 2
    assert equal(restore(tmp_path / "parts")[0], expected)
    monkeypatch.undo()
    assert equal(restore(tmp_path / "parts")[0], expected)


def test_a_none_in_the_configuration_survives(tokenizer, tmp_path):
    config = dataclasses.replace(T5, max_positions=None)
    save(
        tmp_path / "a",
        params_of("t5"),
        config,
        tokenizer,
        name="a",
        dtype="int8",
        description={},
    )
    assert read_manifest(tmp_path / "a").model == config


SHIPPED = sorted(
    path.parent for path in Path(__file__).parents[2].glob("checkpoints/*/manifest.toml")
)


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_shipped_manifests_hold_a_config_json(folder, tmp_path):
    """They are read layer by layer, with as many parameters as the folder has, and written as they
    were.
    """
    written = tomllib.loads((folder / "manifest.toml").read_text())
    table, manifest = written["model"], read_manifest(folder)
    if written["family"] == "gpt":
        heads, dim = table["n_head"], table["n_embd"]
        attention = AttentionShape(heads, heads, dim // heads, qkv_bias=True, out_bias=True)
        ff = FeedForwardShape(table["n_inner"], "gelu", gated=False, bias=True)
        expected = DecoderConfig(
            *(8192, dim, (LayerShape(attention, ff),) * table["n_layer"], NormShape("layer", 1e-5)),
            tied_head=True,
            positions="learned",
            max_positions=512,
        )
    else:
        expected = T5Config(
            *(8192, table["d_model"], table["d_ff"], table["num_heads"], table["d_kv"]),
            *(table["num_layers"], table["num_decoder_layers"]),
            tied_head=table["tie_word_embeddings"],
            scaled_head=table["scale_decoder_outputs"],
            max_positions=512,
            end_tokens=tuple(written.get("generation", {}).get("eos_token_id", ())),
        )
    assert manifest.model == expected and table["vocab_size"] == 8192
    shapes = jax.tree.leaves(net_of(expected).shapes(expected))
    assert sum(math.prod(leaf.shape) for leaf in shapes) == manifest.parameters
    orbax._write_manifest(tmp_path / "manifest.toml", manifest)
    again = tomllib.loads((tmp_path / "manifest.toml").read_text())
    # with options that are younger than the manifest
    assert {**again["model"], **table} == again["model"]
    assert {**again, "model": table} == written


def test_the_folder_holds_little_else_and_no_paths(saved):
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert {path.name for path in saved.iterdir()} == {"params", "manifest.toml", *orbax.TOKENIZER}
    assert len(files) < 30
    assert sum(path.stat().st_size for path in files) < 4 * 18_000 + 80_000
    assert not any(str(saved.parent).encode() in path.read_bytes() for path in files)
    assert not any("sharding" in path.name for path in files)


def test_plain_orbax_reads_the_parameters(saved):
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert equal(
            jax.tree.map(jnp.asarray, checkpointer.restore(saved / "params")), params_of("t5")
        )


def test_restores_on_the_default_device(saved):
    device = jax.devices()[-1]
    with jax.default_device(device):
        params, _, _ = restore(saved)
    assert {d for x in jax.tree.leaves(params) for d in x.devices()} == {device}


# ---- errors of restore


def test_no_folder_offers_the_nearest(saved):
    with pytest.raises(
        CheckpointError, match=r"no checkpoint at .*tiny-t6: nothing there: did you mean 'tiny-t5'"
    ):
        restore(saved.with_name("tiny-t6"))
    with pytest.raises(CheckpointError, match=r"elsewhere: nothing there$"):
        restore(saved.with_name("elsewhere"))


def test_a_file_is_no_checkpoint(copy):
    with pytest.raises(CheckpointError, match="a file, not a folder"):
        restore(copy / "manifest.toml")


def test_a_folder_without_a_manifest_is_named(copy):
    (copy / "manifest.toml").unlink()
    with pytest.raises(
        CheckpointError, match=r"not a jaxspec checkpoint: it has no manifest\.toml"
    ):
        restore(copy)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[model]", "[model", "cannot be used: .*line"),
        ("format = 1", "format = 2", "format is 2, this version of jaxspec reads format 1"),
        ("format = 1\n", "", "format is None"),
        (
            'family = "t5"',
            'family = "rnn"',
            r"family is 'rnn': expected one of \['bart', 'decoder', ",
        ),
        (
            'dtype = "float32"\nparameters',
            'dtype = "int3"\nparameters',
            "dtype is 'int3': expected one of",
        ),
        ("d_model = 16", 'd_model = "16"', "d_model is '16': expected a positive integer"),
        ("num_heads = 2", "num_headz = 2", "it lacks 'num_heads'"),
        ('name = "tiny-t5"\n', "", "lacks the key 'name'"),
        ("[about]", "[abouts]", "unknown key 'abouts': did you mean 'about'"),
        (
            '"tokenizer.json" = [\n    2,',
            '"tokenizer.json" = ["2",',
            r"tokenizer\.json must be \[size, sha256\]",
        ),
        ('"tokenizer.json" = ', '"token.json" = ', r"does not list tokenizer\.json"),
        ("steps = 4000", "steps = \udc80", "cannot be used"),
    ],
)
def test_a_damaged_manifest_is_named(copy, old, new, message):
    path = copy / "manifest.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(CheckpointError, match=message):
        restore(copy)


OWN = """[model]
vocab_size = 48
dim = 16
ff_dim = 24
heads = 2
head_dim = 4
encoder_layers = 1
decoder_layers = 1
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dim = 16\nff", 'dim = "16"\nff', r"\[model\] dim must be of type int, got '16'"),
        ("heads = 2", "headz = 2", r"\[model\] has an unknown key 'headz': did you mean 'heads'"),
        (
            "heads = 2\n",
            "heads = 2\ninterleaved = true\n",
            "'interleaved'.* older jaxspec: convert the model again",
        ),
        ("heads = 2\n", "", r"\[model\] lacks the key 'heads'"),
    ],
)
def test_an_old_manifest_is_read(copy, old, new, message):
    """It has the fields of a configuration; a mistake in one is named."""
    path = copy / "manifest.toml"
    text = path.read_text(encoding="utf-8")
    before = text[: text.index("[model]")]
    after = text[text.index("[files]") : text.index("[fields]")]
    path.write_text(f"{before}{OWN}\n{after}", encoding="utf-8")
    manifest = read_manifest(copy)
    assert manifest.source is None
    assert manifest.model == T5Config(48, 16, 24, 2, 4, 1, 1)
    edit(path, old, new)
    with pytest.raises(CheckpointError, match=message):
        restore(copy)


def largest(folder: Path) -> Path:
    files = [path for path in (folder / "params").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def test_a_missing_file_is_named(copy):
    file = largest(copy)
    file.unlink()
    with pytest.raises(
        CheckpointError, match=rf"is damaged: params/.*{file.name} is missing\. Copy"
    ):
        restore(copy)


def test_a_truncated_file_is_named(copy):
    file = largest(copy)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(
        CheckpointError, match=rf"{file.name} has {size - 7} bytes, expected {size}\."
    ):
        restore(copy)


def test_an_altered_file_is_named(copy):
    file = largest(copy)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=rf"{file.name} is altered \(SHA-256 [0-9a-f]{{12}}\.\.\., exp"
    ):
        restore(copy)


def test_an_altered_tokenizer_is_named(copy):
    (copy / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is altered"):
        restore(copy)


def test_tree_mismatch_lists_all_differences(copy):
    edit(copy / "manifest.toml", "num_decoder_layers = 1", "num_decoder_layers = 2")
    edit(copy / "manifest.toml", '"gated-gelu"', '"gelu"')
    edit(copy / "manifest.toml", "vocab_size = 48", "vocab_size = 50")
    with pytest.raises(CheckpointError) as caught:
        restore(copy)
    intro, missing, unexpected, wrong = str(caught.value).splitlines()
    assert "not those that manifest.toml describes" in intro
    assert missing.startswith(
        "  missing (13): decoder_1/attention/key/weight, "
    ) and missing.endswith("more")
    assert unexpected == "  unexpected (2): decoder_0/ff/gate/weight, encoder_0/ff/gate/weight"
    assert "embedding/embedding is float32[48, 16], expected float32[50, 16]" in wrong


def test_stored_type_mismatch(copy):
    edit(copy / "manifest.toml", 'dtype = "float32"\nparameters', 'dtype = "bfloat16"\nparameters')
    with pytest.raises(
        CheckpointError, match=r"weight is float32\[16, 16\], expected bfloat16\[16, 16\]"
    ):
        restore(copy)


# ---- errors of save


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int3"}, "dtype is 'int3': expected one of"),
        ({"config": GPT.norm}, "config is a NormShape: expected the configuration of a network"),
        ({"description": {"loss": np.float32(1.0)}}, r"a manifest holds strings.*float32"),
    ],
)
def test_save_refuses_bad_arguments(change, message, tokenizer, tmp_path):
    options = {"name": "a", "config": T5, "dtype": "float32", "description": {}} | change
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "a", params_of("t5"), tokenizer_folder=tokenizer, **options)
    assert list(tmp_path.iterdir()) == []


def test_save_refuses_bad_parameters(tokenizer, tmp_path):
    options = {"name": "a", "dtype": "int8", "description": {}}
    params = params_of("t5")
    headless = {name: tree for name, tree in params.items() if name != "head"}
    with pytest.raises(
        CheckpointError, match=r"a: the parameters are not .*:\n  missing \(1\): head/weight"
    ):
        save(tmp_path / "a", headless, T5, tokenizer, **options)
    bad = params | {"head": {"weight": params["head"]["weight"].at[0, 0].set(jnp.nan)}}
    with pytest.raises(CheckpointError, match="NaN or infinity in head/weight: nothing was saved"):
        save(tmp_path / "a", bad, T5, tokenizer, **options)
    with pytest.raises(
        CheckpointError, match=r"folder .* lacks tokenizer\.json and tokenizer_config\.json"
    ):
        save(tmp_path / "a", params, T5, tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


# ---- modules of a checkpoint beside


def drafter_of(target: dict) -> dict:
    """A drafter that has the target's encoder and embedding."""
    shared = {
        name: x for name, x in target.items() if name.startswith("encoder") or name == "embedding"
    }
    return jax.tree.map(lambda x: 2 * x, params_of("t5")) | shared


def stored_modules(folder: Path) -> set[str]:
    with ocp.PyTreeCheckpointer() as checkpointer:
        return set(checkpointer.metadata(folder).item_metadata.tree)


@pytest.mark.parametrize("dtype", orbax.DTYPES)
def test_modules_of_the_checkpoint_beside_are_stored_once(dtype, tokenizer, tmp_path):
    options = {"dtype": dtype, "description": {}}
    save(tmp_path / "target", params_of("t5"), T5, tokenizer, name="target", **options)
    params = drafter_of(params_of("t5"))
    save(tmp_path / "whole", params, T5, tokenizer, name="whole", **options)
    manifest = save(
        tmp_path / "part", params, T5, tokenizer, name="part", shares="target", **options
    )
    assert manifest.shares["modules"] == ["embedding", "encoder_0", "encoder_bias", "encoder_norm"]
    assert manifest.parameters == read_manifest(tmp_path / "whole").parameters
    for wanted in ("float32", dtype):
        part, whole = restore(tmp_path / "part", wanted)[0], restore(tmp_path / "whole", wanted)[0]
        assert jax.tree.structure(part) == jax.tree.structure(whole) and equal(part, whole)
    whole, part = (stored_modules(tmp_path / name / "params") for name in ("whole", "part"))
    assert part == whole - set(manifest.shares["modules"])


def test_a_checkpoint_beside_that_is_missing_or_another_is_named(tokenizer, tmp_path):
    options = {"dtype": "int8", "description": {}}
    params = params_of("t5")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*target"):
        save(tmp_path / "part", params, T5, tokenizer, name="part", shares="target", **options)
    save(tmp_path / "target", params, T5, tokenizer, name="target", **options)
    other = jax.tree.map(lambda x: -x, params)
    with pytest.raises(CheckpointError, match="0 modules with the same values"):
        save(tmp_path / "part", other, T5, tokenizer, name="part", shares="target", **options)
    assert not (tmp_path / "part").exists()
    save(
        tmp_path / "part",
        drafter_of(params),
        T5,
        tokenizer,
        name="part",
        shares="target",
        **options,
    )
    save(tmp_path / "target", other, T5, tokenizer, name="target", overwrite=True, **options)
    with pytest.raises(CheckpointError, match=r"has parameters of another target .* copy both"):
        restore(tmp_path / "part")
    shutil.rmtree(tmp_path / "target")
    with pytest.raises(CheckpointError, match=r"which is not at .*target: copy both"):
        restore(tmp_path / "part")


# ---- replacement


def save_other(folder: Path, tokenizer: Path, **options) -> None:
    manifest = {"name": "other", "dtype": "int8", "description": {}}
    save(folder, params_of("gpt"), GPT, tokenizer, **(manifest | options))


def test_overwriting_needs_permission_and_a_checkpoint_to_overwrite(copy, tokenizer):
    with pytest.raises(CheckpointError, match="exists: give overwrite"):
        save_other(copy, tokenizer)
    assert read_manifest(copy).name == "tiny-t5"
    save_other(copy, tokenizer, overwrite=True)
    assert restore(copy)[2].name == "other"
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]

    home = copy.with_name("home")
    (home / "work").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"is not a checkpoint .* will not be overwritten"):
        save_other(home, tokenizer, overwrite=True)
    assert (home / "work").is_dir()


def test_its_own_tokenizer_may_be_used(copy):
    save_other(copy, copy, overwrite=True)
    assert restore(copy)[2].name == "other"


@pytest.mark.parametrize("broken", ["write", "_write_manifest", "put_in_place"])
def test_a_crash_leaves_the_old_checkpoint(copy, tokenizer, monkeypatch, broken):
    where = {"put_in_place": folders, "write": orbax_arrays}.get(broken, orbax)
    intact = getattr(where, broken)

    def crash(*args):
        if broken != "put_in_place":
            intact(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(where, broken, crash)
    with pytest.raises(KeyboardInterrupt):
        save_other(copy, tokenizer, overwrite=True)
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
    assert equal(restore(copy)[0], params_of("t5"))


def test_a_failed_rename_puts_the_old_checkpoint_back(copy, tokenizer, monkeypatch):
    rename = Path.rename

    def fail(self, target):
        if self.suffix == ".partial":
            raise OSError("disk on fire")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="disk on fire"):
        save_other(copy, tokenizer, overwrite=True)
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
    assert equal(restore(copy)[0], params_of("t5"))
