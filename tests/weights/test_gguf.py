"""GGUF files, written here as llama.cpp's converter writes them, and read by jaxspec and by transformers."""

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec import families, model
from jaxspec.families import llama_cpp
from jaxspec.nets import rotary
from jaxspec.weights import gguf as reader
from jaxspec.weights import gguf_tokenizer, huggingface, parameters
from jaxspec.weights.orbax import CheckpointError

gguf = pytest.importorskip("gguf")

WORDS = [f"w{i}" for i in range(53)]
TOKENS = ["<pad>", "</s>", "<s>", "<unk>", "▁", "a", "b", "ab", "▁ab", "<tool>", "<mark>", *WORDS]
TYPES = [3, 3, 3, 2, 1, 1, 1, 1, 1, 3, 4, *[1] * 53]
SHAPE = {"embedding_length": 64, "feed_forward_length": 96, "block_count": 2, "context_length": 128}
HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
WIDTH = {"attention.key_length": 16, "attention.value_length": 16}
DECODER = SHAPE | HEADS | {"rope.freq_base": 5e5}
GEMMA = DECODER | WIDTH | {"attention.sliding_window": 4}
LAYER_NORM = {"attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5}
T5 = SHAPE | {"attention.head_count": 4, "attention.head_count_kv": 4, "attention.layer_norm_epsilon": 1e-6}
CASES = {  # name: architecture, metadata, and whether it has biases on queries, keys and values, and a head
    "gpt2": ("gpt2", SHAPE | LAYER_NORM | {"context_length": 1024, "feed_forward_length": 256}, False, False),
    "llama": ("llama", DECODER | {"rope.dimension_count": 16}, False, True),
    "qwen2": ("qwen2", DECODER, True, False),
    "qwen3": ("qwen3", DECODER | {"attention.key_length": 128, "attention.value_length": 128}, False, False),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, False, False),
    "gemma3": ("gemma3", GEMMA, False, False),
    "t5": ("t5", T5 | WIDTH | {"attention.relative_buckets_count": 32, "decoder_start_token_id": 0}, False, True),
}
KINDS = ("F16", "Q8_0", "Q5_0", "BF16", "Q4_1", "F32")  # of matrices, in turn


def write(
    path: Path, case: str, changes: dict | None = None, tokenizer: dict | None = None, copied: str = "no"
) -> dict[str, np.ndarray]:
    """A file of random weights; returns its tensors as transformers has them, after their quantisation.

    Where the head is copied, it is the embedding: "exactly", or "requantised" in another way.
    """
    architecture, keys, biases, head = CASES[case]
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": x for key, x in keys.items()}
    shapes = {"token_embd.weight": (len(TOKENS), 64)} | ({"output.weight": ()} if head else {})
    shapes |= {"blk.0.attn_q.bias": ()} if biases else {}
    shapes |= {"enc.blk.0.ffn_gate.weight": ()} if case == "t5" else {}
    table = llama_cpp.config_json(metadata, shapes)
    family = families.of(table)
    config = family.read(table)
    named, sizes = family.names(config), parameters.shapes(config)
    layers = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), 2)
    rng, tensors, writer = np.random.RandomState(0), {}, gguf.GGUFWriter(path, architecture)
    for name, parts in sorted(huggingface._by_tensor(named).items()):
        x = rng.normal(0, 0.3, huggingface._shape(sizes, parts)).astype(np.float32)
        copy = copied != "no" and name in ("lm_head.weight", "shared.weight")
        if copy:
            x = np.random.RandomState(1).normal(0, 0.3, x.shape).astype(np.float32)
        theirs = layers.get_name(name, try_suffixes=(".weight", ".bias")) or "output.weight"
        stored = x.T if parts[0][1].transposed else x
        if architecture.startswith("gemma") and theirs.endswith("norm.weight"):
            stored = x + 1
            x = stored - 1
        count = next((n for part, n in ((".attn_q.", 4), (".attn_k.", 2)) if part in theirs), 0)
        if architecture == "llama" and count:
            stored = x.reshape(count, 2, -1, 64).swapaxes(1, 2).reshape(x.shape)
        called = "Q8_0" if copy and copied == "exactly" else KINDS[len(tensors) % len(KINDS)]
        kind = gguf.GGMLQuantizationType[called if x.ndim == 2 and count == 0 else "F32"]
        packed = np.ascontiguousarray(stored) if kind.name == "F32" else gguf.quantize(stored, kind)
        if kind.name != "F32":
            x = gguf.dequantize(packed, kind)
            x = x.T if parts[0][1].transposed else x
        writer.add_tensor(theirs, packed, raw_dtype=None if kind.name == "F32" else kind)
        tensors[name] = x
    vocabulary = {
        "model": "llama",
        "tokens": TOKENS,
        "scores": [-float(i) for i in range(len(TOKENS))],
        "token_type": TYPES,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "unknown_token_id": 3,
        "padding_token_id": 0,
    }
    metadata |= {f"tokenizer.ggml.{key}": x for key, x in (tokenizer or vocabulary).items()} | (changes or {})
    for key, value in metadata.items():
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, list: writer.add_array}
        if key != "general.architecture" or changes:
            add.get(type(value), writer.add_uint32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def ours(model: jaxspec.Model) -> dict[str, np.ndarray]:
    """A model's parameters as transformers has them."""
    return dict(huggingface._theirs(model, families.describe(model.config)[0]))


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_that_transformers_reads(case, tmp_path):
    tensors = write(tmp_path / "model.gguf", case)
    model = jaxspec.load(tmp_path / "model.gguf")
    found = ours(model)
    assert model.name == "model"
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")  # transformers reads GGUF with it only
    auto = transformers.AutoModelForSeq2SeqLM if case == "t5" else transformers.AutoModelForCausalLM
    state = auto.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    for name, x in tensors.items():
        np.testing.assert_array_equal(state[name].float().numpy(), x, err_msg=name)


@pytest.mark.parametrize(
    ("copied", "tied", "scaled"), [("exactly", True, True), ("requantised", False, True), ("no", False, False)]
)
def test_a_t5_whose_head_repeats_its_embedding_is_scaled(copied, tied, scaled, tmp_path):
    """llama.cpp's files do not say it; a T5 1.0 that is not scaled would have logits 8 times too large here.

    A copy is left out if it is exact: else it is what the file has as its head.
    """
    tensors = write(tmp_path / "model.gguf", "t5", copied=copied)
    head, embedding = tensors["lm_head.weight"], tensors["shared.weight"]
    assert (np.array_equal(head, embedding), np.allclose(head, embedding, atol=0.2)) == (tied, scaled)
    model = jaxspec.load(tmp_path / "model.gguf")
    assert (model.config.tied_head, model.config.scaled_head) == (tied, scaled)
    if tied:
        del tensors["lm_head.weight"]
    found = ours(model)
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_the_tokenizer_is_the_one_that_transformers_makes(tmp_path):
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    letters = ["a", "b", "c", "Ġ", "1", "ab", "Ġab", "<end>"]
    bytewise = {"model": "gpt2", "pre": "llama-bpe", "tokens": letters, "merges": ["a b", "Ġ ab"]}
    bytewise |= {"token_type": [1] * 7 + [3], "eos_token_id": 7, "bos_token_id": 7}
    spelled = {"model": "llama", "tokens": TOKENS, "scores": [-float(i) for i in range(len(TOKENS))]}
    spelled |= {"token_type": TYPES, "eos_token_id": 1, "bos_token_id": 2, "unknown_token_id": 3}
    expected = {  # ids of each text
        ("llama", ("ab a<tool>b <mark>", "")): spelled,
        ("gemma3", ("ab a<tool>b <mark>", " ab")): spelled | {"padding_token_id": 0, "add_bos_token": True},
        ("llama", ("ab abc111<end>a", "1 ab")): bytewise,
    }
    for number, ((case, texts), tokenizer) in enumerate(expected.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / "model.gguf", case, tokenizer=tokenizer)
        made = gguf_tokenizer.tokenizer(folder, reader.read(folder / "model.gguf").metadata)
        theirs = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        for text in texts:
            assert made(text)["input_ids"] == theirs(text)["input_ids"], (case, text)
            assert made.decode(made(text)["input_ids"]) == theirs.decode(theirs(text)["input_ids"])
        assert (made.eos_token_id, made.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)


def test_scaled_positions_of_llama_3_are_read_from_their_tensor(tmp_path):
    scaled = rotary.frequencies(16, 5e5, rotary.RopeScaling("llama3", 32.0, 1.0, 4.0, 8192))
    divisors = rotary.frequencies(16, 5e5) / scaled
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = reader.read(tmp_path / "x.gguf")
    table = {"head_dim": 16, "rope_theta": 5e5}
    assert reader._llama3(tmp_path / "x.gguf", header, table)["factor"] == 32.0
    with pytest.raises(ValueError, match="not scale frequencies as Llama 3"):
        reader._llama3(tmp_path / "x.gguf", header, table | {"rope_theta": 1e4})


def with_number(whole, key, value):
    """A file with another value of a key, a 32-bit integer after its type's number."""
    at = whole.index(key) + len(key) + 4
    return whole[:at] + struct.pack("<I", value) + whole[at + 4 :]


def test_files_that_cannot_be_read_are_refused_in_words(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, "llama")
    whole = path.read_bytes()
    name = whole.index(b"blk.0.attn_norm.weight")
    kind = name + len(b"blk.0.attn_norm.weight") + 4 + 8  # after the number of axes and the only one
    cut = {
        "no GGUF file": b"x" * 99,
        "version is 9": b"GGUF" + struct.pack("<I", 9) + whole[8:],
        "is no file of weights, or damaged": whole[:90],
        "ends within": whole[:16] + struct.pack("<Q", 1) + struct.pack("<Q", 2**60) + b"x" * 99,
        "ends before": whole[:-99],
        "the architecture is 'xlama'": whole.replace(b"llama", b"xlama", 1).replace(b"llama.", b"xlama."),
        "quantised as type 77": whole[:kind] + struct.pack("<I", 77) + whole[kind + 4 :],
        "quantised as I8": whole[:kind] + struct.pack("<I", 24) + whole[kind + 4 :],
        "missing \\(1\\): model.layers.0.input_layernorm": whole.replace(b"0.attn_norm", b"0.attn_nxrm"),
        "expected at most 10,000": with_number(whole, b"llama.block_count", 10**6),
        "it lacks 'embedding_length'": whole.replace(b"embedding_length", b"embedding_longth"),
    }
    for words, content in cut.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            jaxspec.load(path)
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*none\.gguf"):
        jaxspec.load("owner/none.gguf")


def test_dtypes_that_are_slower_on_a_cpu_are_told_from_a_size_on(tmp_path, monkeypatch, caplog):
    write(tmp_path / "model.gguf", "qwen2")
    jaxspec.load(tmp_path / "model.gguf", dtype="bfloat16")
    assert not caplog.records
    monkeypatch.setattr(model, "SLOW_FROM", 1000)
    jaxspec.load(tmp_path / "model.gguf")
    assert not caplog.records
    jaxspec.load(tmp_path / "model.gguf", dtype="int8")
    assert "model is loaded as int8, which on a CPU saves memory, but not time" in caplog.text


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r'gguf, .*is not installed: pip install "\.\[gguf\]"'):
        reader.package()
