"""Gemma's Orbax folders, written by Orbax, give the models of Hugging Face folders with the same
weights.
"""

import dataclasses
import logging
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import sentencepiece
from orbax.checkpoint import v1
from safetensors.numpy import load_file

import jaxspec
from jaxspec.weights import gemma_orbax, huggingface, loading
from jaxspec.weights.hf_families import gemma
from jaxspec.weights.tensors import CheckpointError
from tests.marks import other_library
from tests.nets import test_end_index as networks
from tests.weights.folders import assert_same, model_of

VOCAB, DIM, FF, HEADS, KV_HEADS, HEAD_DIM = 112, 32, 48, 4, 2, 8
TABLE = {
    "vocab_size": 100,  # published; gemma's embeddings have more rows
    "hidden_size": DIM,
    "intermediate_size": FF,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "sliding_window": 4,
}
SECOND = {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3}
THIRD = {"query_pre_attn_scalar": 12, "sliding_window_pattern": 2}
CONFIGS = {
    "GEMMA1": gemma.read_gemma(TABLE),
    "GEMMA2": gemma.read_gemma2(TABLE | SECOND),
    "GEMMA3": gemma.read_gemma3(TABLE | THIRD),
}
NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    """Publishes the small sizes of these tests, beside the others."""
    for name, config in CONFIGS.items():
        version = getattr(gemma_orbax, name)
        published = {**version.family.sizes, "gemma-tiny": config}
        family = version.family._replace(sizes=published)
        monkeypatch.setattr(gemma_orbax, name, version._replace(family=family))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Hugging Face folders of random models, by version; their weights are exact in bfloat16."""
    folders = {}
    for name, config in CONFIGS.items():
        ends = getattr(gemma_orbax, name).end_tokens
        model = model_of(dataclasses.replace(config, vocab_size=VOCAB, end_tokens=ends))
        model = model._replace(params=rounded(model.params))
        folders[name] = huggingface.save(model, tmp_path_factory.mktemp("saved") / "gemma")
    return folders


def rounded(tree):
    if isinstance(tree, dict):
        return {name: rounded(x) for name, x in tree.items()}
    return (tree / 4).astype(jnp.bfloat16).astype(jnp.float32)


def tree_of(folder, dtype: Any = np.float32, together=False, transposed=False) -> dict[str, Any]:
    """The parameters of a Hugging Face folder as gemma nests them.

    Args:
        together: whether queries, keys and values are one array, as in Gemma 1's 7B.
        transposed: whether the gate is [dim, ff], as in Gemma 1 and the 2B of Gemma 2.
    """
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: x.astype(np.float32).astype(dtype) for name, x in tensors.items()}
    is_first = "model.layers.0.pre_feedforward_layernorm.weight" not in tensors

    def heads(x):  # [N * H, D] -> [N, D, H], for gemma's "BTD,NDH->BTNH"
        return x.reshape(-1, HEAD_DIM, DIM).swapaxes(1, 2)

    tree: dict[str, Any] = {
        "embedder": {"input_embedding": tensors["model.embed_tokens.weight"]},
        "final_norm": {"scale": tensors["model.norm.weight"]},
    }
    for i in range(2):
        at = f"model.layers.{i}."
        q, k, v, o = (tensors[f"{at}self_attn.{n}_proj.weight"] for n in "qkvo")
        gate, up, down = (tensors[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        # "BTNH,NHD->BTD"
        attention: dict[str, Any] = {"attn_vec_einsum": {"w": o.T.reshape(HEADS, HEAD_DIM, DIM)}}
        if together:
            attention["qkv_einsum"] = {"w": np.stack([heads(x) for x in (q, k, v)])}
        else:
            attention["q_einsum"] = {"w": heads(q)}
            attention["kv_einsum"] = {"w": np.stack([heads(k), heads(v)])}
        if f"{at}self_attn.q_norm.weight" in tensors:
            attention["_query_norm"] = {"scale": tensors[f"{at}self_attn.q_norm.weight"]}
            attention["_key_norm"] = {"scale": tensors[f"{at}self_attn.k_norm.weight"]}
        gating = np.stack([gate, up])
        mlp = {"gating_einsum": gating.swapaxes(1, 2) if transposed else gating, "linear": down.T}
        norms = NORMS
        if is_first:  # a Llama's places
            norms = {
                "pre_attention_norm": "input_layernorm",
                "pre_ffw_norm": "post_attention_layernorm",
            }
        scales = {n: {"scale": tensors[f"{at}{name}.weight"]} for n, name in norms.items()}
        tree[f"layer_{i}"] = {"attn": attention, "mlp": mlp, **scales}
    return tree


def flat_of(tree):
    """The same parameters with the names of the published files."""
    flat = {}
    for module, members in tree.items():
        for name, x in members.items():
            if not isinstance(x, dict):
                flat.setdefault(f"transformer/{module}", {})[name] = x
            elif name in ("attn", "mlp"):
                for part, leaf in x.items():
                    leaf = leaf if isinstance(leaf, dict) else {"w": leaf}
                    flat[f"transformer/{module}/{name}/{part}"] = leaf
            else:
                flat[f"transformer/{module}/{name}"] = x
    return flat


def standard(folder, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def with_options(**options):
    def write(folder, tree):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(folder, tree)

    return write


def step(folder, tree):
    with ocp.CheckpointManager(folder.parent / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave(tree))
    (folder.parent / "run" / "3").rename(folder)


def state(folder, tree):
    standard(folder, {"params": tree, "opt_state": {"mu": tree}, "step": np.int32(1)})


WRITERS = {
    "save_params": standard,
    "files": with_options(use_ocdbt=False),
    "zarr3": with_options(use_zarr3=True),
    "files of zarr3": with_options(use_ocdbt=False, use_zarr3=True),
    "v1": lambda folder, tree: v1.save(folder, tree),
    "a step": step,
    "a training state": state,
}


@pytest.mark.parametrize("form", [lambda tree: tree, flat_of], ids=["nested", "flat"])
@pytest.mark.parametrize("writer", WRITERS)
def test_each_layout_is_the_model_of_the_hugging_face_folder(saved, writer, form, tmp_path):
    WRITERS[writer](tmp_path / "gemma", form(tree_of(saved["GEMMA3"], ml_dtypes.bfloat16)))
    expected = jaxspec.load(saved["GEMMA3"])
    loaded = jaxspec.load(tmp_path / "gemma")
    assert_same(loaded.params, expected.params)
    assert (loaded.config, loaded.lm) == (expected.config, expected.lm)
    assert (loaded.name, loaded.tokenizer) == ("gemma", None)
    reader = loading.format_of(tmp_path / "gemma").open(tmp_path / "gemma")
    assert reader.stored_dtype() == "bfloat16"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_generations_and_dtypes(saved, name, dtype, tmp_path):
    standard(tmp_path / "gemma", tree_of(saved[name], transposed=name != "GEMMA3"))
    expected = jaxspec.load(saved[name], dtype=dtype)
    loaded = jaxspec.load(tmp_path / "gemma", dtype=dtype)
    assert_same(loaded.params, expected.params)
    assert (loaded.config, loaded.lm) == (expected.config, expected.lm)
    assert loaded.config.end_tokens == (1, 106 if name == "GEMMA3" else 107)
    if dtype == "float32":
        prompts = [[2, 7, 1, 8, 5, 9, 11], [2, 30]]
        text = jaxspec.generate(loaded, prompts, max_new_tokens=8).tokens
        same = jaxspec.generate(expected, prompts, max_new_tokens=8).tokens
        np.testing.assert_array_equal(text, same)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", ["GEMMA2", "GEMMA3"])
def test_save_params_of_gemma(name, tmp_path, monkeypatch):
    """gemma writes the folder, and its own network gives the text of the loaded model."""
    checkpoints = other_library("gemma", "gemma.gm.ckpts")
    sizes = {"vocab_size": networks.VOCAB, "head_dim": 16, "query_pre_attn_scalar": 16}
    if name == "GEMMA2":
        sizes |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        config = gemma.read_gemma2(TABLE | sizes)
    else:
        config = gemma.read_gemma3(TABLE | sizes | {"sliding_window_pattern": 2})
    version = getattr(gemma_orbax, name)
    family = version.family._replace(sizes={"gemma-tiny": config})
    monkeypatch.setattr(gemma_orbax, name, version._replace(family=family))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        network = networks.gemma(name == "GEMMA3")(0, 2)
        folder = tmp_path / "gemma"
        checkpoints.save_params(network.model.params, folder, wait_until_finished=True)
        own = [networks.greedy(network.logits, row, networks.NEW) for row in networks.PROMPTS]
    options = {"max_new_tokens": networks.NEW, "eos_ids": ()}
    out = jaxspec.generate(jaxspec.load(folder), networks.PROMPTS, **options)
    assert [row.tolist() for row in out.tokens] == own


def test_queries_keys_and_values_in_one_array(tmp_path, monkeypatch):
    """Gemma 1's 7B has as many keys as queries, in one array."""
    config = gemma.read_gemma(TABLE | {"num_key_value_heads": HEADS, "vocab_size": VOCAB})
    family = gemma.GEMMA._replace(sizes={"gemma-tiny": config})
    monkeypatch.setattr(gemma_orbax, "GEMMA1", gemma_orbax.GEMMA1._replace(family=family))
    folder = huggingface.save(model_of(config), tmp_path / "saved")
    standard(tmp_path / "gemma", flat_of(tree_of(folder, together=True)))
    assert_same(jaxspec.load(tmp_path / "gemma").params, jaxspec.load(folder).params)


@pytest.mark.parametrize("form", [lambda tree: tree, flat_of], ids=["nested", "flat"])
def test_what_sees_is_left_out_with_a_warning(saved, form, tmp_path, caplog):
    tree = tree_of(saved["GEMMA3"])
    tree["embedder"]["mm_input_projection"] = {"w": np.ones((3, DIM), np.float32)}
    tower = {"kernel": np.ones((3, 3), np.float32)}
    if form is flat_of:
        tree = flat_of(tree) | {"SigLiPFromPatches_0/siglip_encoder/embedding": tower}
        part = "SigLiPFromPatches_0"
    else:
        tree["vision_encoder"] = {"siglip_encoder": {"embedding": tower}}
        part = "vision_encoder"
    standard(tmp_path / "gemma", tree)
    with caplog.at_level(logging.WARNING):
        loaded = jaxspec.load(tmp_path / "gemma")
    assert_same(loaded.params, jaxspec.load(saved["GEMMA3"]).params)
    assert f"the text half is read, and not {part} (2 tensors)" in caplog.text


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A model of sentencepiece's like Gemma's: pieces by bytes, defined tokens, no space in front."""
    prefix = tmp_path_factory.mktemp("pieces") / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat\n\nand ran after the dog"] * 30),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=300,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>", "\n", "▁▁"],
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


@pytest.mark.parametrize("around", [False, True], ids=["in it", "around it"])
def test_the_tokenizer_is_that_of_sentencepiece(saved, pieces, around, tmp_path, monkeypatch):
    tree = tree_of(saved["GEMMA3"])
    tree["embedder"]["input_embedding"] = np.zeros((320, DIM), np.float32)
    folder = tmp_path / "kaggle" / "gemma3-tiny"
    standard(folder, tree)
    place = folder.parent if around else folder
    (place / "tokenizer.model").write_bytes(pieces.read_bytes())
    model = jaxspec.load(folder)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    for text in ("the cat", " a  mat\n", "<start_of_turn>user\nthe dog<end_of_turn>\n", "é ☃", ""):
        ids = model.tokenizer(text)["input_ids"]
        assert ids == [2, *reference.encode(text)]
        assert model.tokenizer.decode(ids[1:]) == text
    if around:  # what Kaggle's client returns is the path of the folder around it
        outer = jaxspec.load(folder.parent)
        assert_same(outer.params, model.params)
        assert outer.name == model.name == "gemma3-tiny"
    small = CONFIGS["GEMMA3"].vocab_size
    assert reference.get_piece_size() > small
    (tmp_path / "other").mkdir()
    standard(tmp_path / "other" / "gemma", tree_of(saved["GEMMA3"]))
    (tmp_path / "other" / "tokenizer.model").write_bytes(pieces.read_bytes())
    with pytest.raises(CheckpointError, match="the tokenizer has ids up to"):
        jaxspec.load(tmp_path / "other" / "gemma")
    (place / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is not a model of sentencepiece"):
        jaxspec.load(folder)


PUBLISHED = [(name, size) for name in CONFIGS for size in getattr(gemma_orbax, name).family.sizes]


@pytest.mark.parametrize(("name", "size"), PUBLISHED)
def test_published_sizes_are_told_by_their_shapes(name, size, tmp_path):
    version = getattr(gemma_orbax, name)
    config = version.family.sizes[size]
    attention = config.layers[0].attention
    dim, ff, head_dim = config.dim, config.layers[0].ff.dim, attention.head_dim
    shapes = {"embedder/input_embedding": (256_128, dim), "final_norm/scale": (dim,)}
    for i in range(len(config.layers)):
        shapes |= {f"layer_{i}/{norm}/scale": (dim,) for norm in version.norms}
        shapes |= {
            f"layer_{i}/attn/q_einsum": (attention.heads, dim, head_dim),
            f"layer_{i}/attn/kv_einsum": (2, attention.kv_heads, dim, head_dim),
            f"layer_{i}/attn/attn_vec_einsum": (attention.heads, head_dim, dim),
            f"layer_{i}/mlp/gating_einsum": (2, ff, dim),
            f"layer_{i}/mlp/linear": (ff, dim),
        }
    found, network = gemma_orbax.identify(tmp_path, shapes)
    assert found == version
    ends = version.end_tokens
    assert network == dataclasses.replace(config, vocab_size=256_128, end_tokens=ends)


def changed(tree, **layer):
    return tree | {"layer_0": {**tree["layer_0"], **layer}}


REFUSED = {
    "a size": (
        lambda tree: tree | {"layer_2": tree["layer_1"]},
        "holds a Gemma 3 of an unknown size: 3 layers of 32, 48 inside, 4 heads of 8, 2 key-value "
        r"heads\. Expected a published one \(gemma-3-270m: 18 layers of 640, .*jaxspec\.from_arrays",
    ),
    "an adapter": (
        lambda tree: changed(tree, lora={"a": np.ones(2)}),
        r"holds arrays that no Gemma 3 has: layer_0/lora/a\. Expected .* without adapters",
    ),
    "a further part": (
        lambda tree: flat_of(tree) | {"audio_encoder/conv": {"w": np.ones(2)}},
        r"holds arrays that no Gemma 3 has: audio_encoder/conv\.",
    ),
    "stacked layers": (
        lambda tree: {
            "embedder": tree["embedder"],
            "stacked_layers": {"attention_type_0": tree["layer_0"]},
        },
        "but not layer_0/attn/q_einsum: it has embedder/input_embedding, stacked_layers/attention",
    ),
    "an array less": (
        lambda tree: {name: x for name, x in tree.items() if name != "final_norm"},
        r"not those of the Gemma 3, text of its names and shapes:[\s\S]*missing.*model\.norm\.weight",
    ),
    "other axes": (
        lambda tree: (
            tree | {"layer_1": changed(tree, attn={"kv_einsum": np.ones((2, 3))})["layer_0"]}
        ),
        r"layer_1/attn/kv_einsum is \[2, 3\]: it has other axes than in a Gemma",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_trees_are_refused_by_name(saved, name, tmp_path):
    change, message = REFUSED[name]
    standard(tmp_path / "gemma", change(tree_of(saved["GEMMA3"])))
    with pytest.raises(CheckpointError, match=message):
        jaxspec.load(tmp_path / "gemma")


def test_several_in_one_folder_are_refused(saved, tmp_path):
    for name in ("gemma3-1b", "gemma3-1b-it"):
        standard(tmp_path / name, tree_of(saved["GEMMA3"]))
    with pytest.raises(CheckpointError, match="several Gemmas: gemma3-1b, gemma3-1b-it"):
        jaxspec.load(tmp_path)


def test_an_absent_array(saved, tmp_path):
    WRITERS["files"](tmp_path / "gemma", tree_of(saved["GEMMA3"]))
    (tmp_path / "gemma" / "final_norm.scale" / ".zarray").unlink()
    with pytest.raises(CheckpointError, match=r"1 are not there \(final_norm\.scale\)"):
        jaxspec.load(tmp_path / "gemma")


def test_zeros_that_orbax_left_out(saved, tmp_path, monkeypatch):
    """Earlier versions wrote no chunks of zeros in zarr3; the scales of new norms are zero."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    monkeypatch.setattr(tensorstore_utils, "STORE_ARRAY_DATA_EQUAL_TO_FILL_VALUE", False)
    tree = tree_of(saved["GEMMA3"])
    tree["final_norm"] = {"scale": np.zeros(DIM, np.float32)}
    WRITERS["zarr3"](tmp_path / "gemma", tree)
    loaded = jaxspec.load(tmp_path / "gemma")
    assert not np.any(loaded.params["norm"]["scale"])
    index = tmp_path / "gemma" / "_METADATA"
    key = '"store_array_data_equal_to_fill_value": '
    assert f"{key}false" in index.read_text()
    # A writer that leaves nothing out has lost what is not there.
    index.write_text(index.read_text().replace(f"{key}false", f"{key}true"))
    with pytest.raises(CheckpointError, match=r"final_norm\.scale"):
        jaxspec.load(tmp_path / "gemma")
    # So has a folder of files: a file may not have been downloaded.
    WRITERS["files of zarr3"](tmp_path / "files", tree)
    with pytest.raises(CheckpointError, match=r"final_norm\.scale"):
        jaxspec.load(tmp_path / "files")


def test_the_host_holds_an_array_at_a_time(saved, tmp_path, monkeypatch):
    standard(tmp_path / "gemma", tree_of(saved["GEMMA3"]))
    alive, most = set(), [0]
    open_arrays = gemma_orbax.open_arrays

    def watched(name, stored):
        def rows(start, stop):
            x = stored[start:stop]
            alive.add(name)
            weakref.finalize(x, alive.discard, name)
            most[0] = max(most[0], len(alive))
            return x

        return dataclasses.replace(stored, rows=rows)

    def opened(*args):
        return {
            name: x if "norm" in name else watched(name, x)
            for name, x in open_arrays(*args).items()
        }

    monkeypatch.setattr(gemma_orbax, "open_arrays", opened)
    jaxspec.load(tmp_path / "gemma")
    assert 1 <= most[0] <= 2
