"""GGUF files, written here as llama.cpp's converter writes them, and read by jaxspec and by
transformers.
"""

import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec import nets
from jaxspec.nets import rotary
from jaxspec.weights import gguf as reader
from jaxspec.weights import gguf_tokenizer, hf_families, huggingface, loading, parameters, source
from jaxspec.weights.hf_families import llama_cpp
from jaxspec.weights.orbax import CheckpointError

gguf = pytest.importorskip("gguf")

WORDS = [f"w{i}" for i in range(53)]
TOKENS = ["<pad>", "</s>", "<s>", "<unk>", "▁", "a", "b", "ab", "▁ab", "<tool>", "<mark>", *WORDS]
TYPES = [3, 3, 3, 2, 1, 1, 1, 1, 1, 3, 4, *[1] * 53]
SHAPE = {"embedding_length": 64, "feed_forward_length": 96, "block_count": 2, "context_length": 128}
HEADS = {
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
WIDTH = {"attention.key_length": 16, "attention.value_length": 16}
DECODER = SHAPE | HEADS | {"rope.freq_base": 5e5}
GEMMA = DECODER | WIDTH | {"attention.sliding_window": 4}
LAYER_NORM = {"attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5}
T5 = SHAPE | {
    "attention.head_count": 4,
    "attention.head_count_kv": 4,
    "attention.layer_norm_epsilon": 1e-6,
}
# name: architecture, metadata, and whether it has biases on queries, keys and values, and a head
CASES = {
    "gpt2": (
        "gpt2",
        SHAPE | LAYER_NORM | {"context_length": 1024, "feed_forward_length": 256},
        False,
        False,
    ),
    "llama": ("llama", DECODER | {"rope.dimension_count": 16}, False, True),
    "qwen2": ("qwen2", DECODER, True, False),
    "qwen3": (
        "qwen3",
        DECODER | {"attention.key_length": 128, "attention.value_length": 128},
        False,
        False,
    ),
    "gemma2": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        False,
        False,
    ),
    "gemma3": ("gemma3", GEMMA, False, False),
    "t5": (
        "t5",
        T5 | WIDTH | {"attention.relative_buckets_count": 32, "decoder_start_token_id": 0},
        False,
        True,
    ),
}
KINDS = ("F16", "Q8_0", "Q5_0", "BF16", "Q4_1", "F32")  # of matrices, in turn


def write(
    path: Path,
    case: str,
    changes: dict | None = None,
    tokenizer: dict | None = None,
    copied: str = "no",
) -> dict[str, np.ndarray]:
    """A file of random weights; returns its tensors as transformers has them, after their
    quantisation.

    Where the head is copied, it is the embedding: "exactly", or "requantised" in another way.
    """
    architecture, keys, biases, head = CASES[case]
    metadata = {"general.architecture": architecture} | {
        f"{architecture}.{key}": x for key, x in keys.items()
    }
    shapes = {"token_embd.weight": (len(TOKENS), 64)} | ({"output.weight": ()} if head else {})
    shapes |= {"blk.0.attn_q.bias": ()} if biases else {}
    shapes |= {"enc.blk.0.ffn_gate.weight": ()} if case == "t5" else {}
    table = llama_cpp.config_json(metadata, shapes)
    family = hf_families.of(table)
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
    metadata |= {f"tokenizer.ggml.{key}": x for key, x in (tokenizer or vocabulary).items()} | (
        changes or {}
    )
    for key, value in metadata.items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        if key != "general.architecture" or changes:
            add.get(type(value), writer.add_uint32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def ours(model: jaxspec.Model) -> dict[str, np.ndarray]:
    """A model's parameters as transformers has them."""
    return dict(huggingface._theirs(model, source.written(model.config, model.source, {})[0]))


@pytest.mark.needs_torch
@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_that_transformers_reads(case, tmp_path):
    tensors = write(tmp_path / "model.gguf", case)
    model = jaxspec.load(tmp_path / "model.gguf")
    weights = ours(model)
    assert model.name == "model"
    assert weights.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(weights[name], x, err_msg=name)
    import transformers

    pytest.importorskip("accelerate")  # transformers reads GGUF with it only
    auto = transformers.AutoModelForSeq2SeqLM if case == "t5" else transformers.AutoModelForCausalLM
    state = auto.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    for name, x in tensors.items():
        np.testing.assert_array_equal(state[name].float().numpy(), x, err_msg=name)


@pytest.mark.parametrize(
    ("copied", "tied", "scaled"),
    [("exactly", True, True), ("requantised", False, True), ("no", False, False)],
)
def test_a_t5_whose_head_repeats_its_embedding_is_scaled(copied, tied, scaled, tmp_path):
    """llama.cpp's files do not say it; a T5 1.0 that is not scaled would have logits 8 times too
    large here.

    A copy is left out if it is exact: else it is what the file has as its head.
    """
    tensors = write(tmp_path / "model.gguf", "t5", copied=copied)
    head, embedding = tensors["lm_head.weight"], tensors["shared.weight"]
    assert (np.array_equal(head, embedding), np.allclose(head, embedding, atol=0.2)) == (
        tied,
        scaled,
    )
    model = jaxspec.load(tmp_path / "model.gguf")
    assert (model.config.tied_head, model.config.scaled_head) == (tied, scaled)
    if tied:
        del tensors["lm_head.weight"]
    weights = ours(model)
    assert weights.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(weights[name], x, err_msg=name)


@pytest.mark.needs_torch
def test_the_tokenizer_is_the_one_that_transformers_makes(tmp_path):
    from transformers import AutoTokenizer

    letters = ["a", "b", "c", "Ġ", "1", "ab", "Ġab", "<end>"]
    bytewise = {"model": "gpt2", "pre": "llama-bpe", "tokens": letters, "merges": ["a b", "Ġ ab"]}
    bytewise |= {"token_type": [1] * 7 + [3], "eos_token_id": 7, "bos_token_id": 7}
    spelled = {
        "model": "llama",
        "tokens": TOKENS,
        "scores": [-float(i) for i in range(len(TOKENS))],
    }
    spelled |= {"token_type": TYPES, "eos_token_id": 1, "bos_token_id": 2, "unknown_token_id": 3}
    # Elsewhere transformers differs from llama.cpp: BOS where no key asks for it, a space after a
    # special token.
    bytewise |= {"add_bos_token": False}
    expected = {
        ("llama", ("ab a b", "ab <tool>", "<mark>", "")): spelled,
        ("gemma3", ("ab a<tool>b <mark>", " ab")): spelled
        | {"padding_token_id": 0, "add_space_prefix": False},
        ("llama", ("ab abc111<end>a", "1 ab")): bytewise,
    }
    for number, ((case, texts), tokenizer) in enumerate(expected.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / "model.gguf", case, tokenizer=tokenizer)
        read_back = gguf_tokenizer.tokenizer(folder, reader.read(folder / "model.gguf").metadata)
        theirs = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        for text in texts:
            assert read_back(text)["input_ids"] == theirs(text)["input_ids"], (case, text)
            assert read_back.decode(read_back(text)["input_ids"]) == theirs.decode(
                theirs(text)["input_ids"]
            )
        assert (read_back.eos_token_id, read_back.bos_token_id) == (
            theirs.eos_token_id,
            theirs.bos_token_id,
        )


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
    assert reader._llama3(header, table)["factor"] == 32.0
    with pytest.raises(ValueError, match="not scale frequencies as Llama 3"):
        reader._llama3(header, table | {"rope_theta": 1e4})


def test_positions_that_are_scaled_twice_are_refused(tmp_path):
    """llama.cpp would apply both; the tensor alone is what its converter writes for Llama 3."""
    write(tmp_path / "x.gguf", "llama")
    header = reader.read(tmp_path / "x.gguf")
    tensors = header.tensors | {"rope_freqs.weight": next(iter(header.tensors.values()))}
    metadata = {**header.metadata, "llama.rope.scaling.factor": 4.0}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight and keys rope\.scaling"):
        reader.open_file(tmp_path / "x.gguf", header._replace(tensors=tensors, metadata=metadata))


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        ({}, 0),
        ({"t5.decoder_start_token_id": 4, "tokenizer.ggml.bos_token_id": 5}, 4),
        ({"tokenizer.ggml.bos_token_id": 5}, 5),
    ],
)
def test_rows_of_a_t5_begin_as_in_llama_cpp(keys, start):
    """With the token that is named for it, else with BOS, else, where llama.cpp has none, as T5's
    do.
    """
    architecture, shape, *_ = CASES["t5"]
    metadata = {
        f"t5.{key}": value for key, value in shape.items() if key != "decoder_start_token_id"
    }
    table = llama_cpp.config_json(
        {"general.architecture": architecture, **metadata, **keys}, {"token_embd.weight": (64, 64)}
    )
    assert hf_families.of(table).read(table).start_token == start


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
FULL, LOCAL = "full_attention", "sliding_attention"


def described(case: str, changes: dict) -> dict:
    """The config.json of a case with other keys, of a model with four layers; None leaves a key
    out.
    """
    architecture, keys, *_ = CASES[case]
    keys = {**keys, "block_count": 4, **changes}
    metadata = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    shapes = {"token_embd.weight": (64, 64)}
    return llama_cpp.config_json({"general.architecture": architecture, **metadata}, shapes)


@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        (
            "llama",
            YARN | {"rope.scaling.attn_factor": 0.878},
            {"rope_scaling": "yarn", "rope_magnitude": 0.99971},
        ),
        ("qwen2", YARN, {"rope_magnitude": 1.13863, "rope_original": 128}),
        ("qwen3", YARN | {"rope.scaling.original_context_length": 32}, {"rope_original": 32}),
        ("llama", {"rope.scaling.factor": 4.0}, {"rope_scaling": "linear", "rope_factor": 4.0}),
        ("llama", {"rope.scale_linear": 2.0}, {"rope_scaling": "linear", "rope_factor": 2.0}),
        ("llama", {"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, {"rope_factor": 4.0}),
        (
            "llama",
            {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
            {"rope_scaling": "default"},
        ),
        ("llama", {"rope.scaling.type": "linear"}, {"rope_scaling": "default"}),
        (
            "llama",
            {"attention.head_count_kv": [2] * 4, "feed_forward_length": [96] * 4},
            {"kv_heads": 2, "ff_dim": 96},
        ),
        (
            "llama",
            {
                "attention.key_length": 32,
                "attention.value_length": 32,
                "rope.dimension_count": None,
            },
            {"head_dim": 32},
        ),
        (
            "gemma2",
            {"attention.key_length": None, "attention.value_length": None},
            {"head_dim": 16, "query_scalar": 16},
        ),
        (
            "gemma2",
            {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            {"attention_cap": 50, "logits_cap": 30},
        ),
        ("gemma2", {}, {"window": 4, "local": (True, False)}),
        ("gemma2", {"attention.sliding_window": None}, {"window": 4096}),
        ("gemma2", {"attention.sliding_window_pattern": 3}, {"local": (True, True, False)}),
        (
            "gemma3",
            {"attention.sliding_window_pattern": [False, True, True, False]},
            {"local": (False, True, True)},
        ),
        ("gemma3", {"attention.sliding_window_pattern": 0}, {"window": 4, "local": (True,)}),
        ("gemma3", {"attention.sliding_window": None}, {"window": None, "local": ()}),
        ("gemma3", {"attention.sliding_window": 0}, {"window": None, "local": ()}),
        (
            "gemma3",
            {"rope.freq_base_swa": 5e3, "attention.sliding_window_pattern": 2},
            {"local_rope_base": 5e3, "rope_base": 5e5},
        ),
        ("gemma3", {"final_logit_softcapping": 5.0}, {"logits_cap": 5.0}),
        ("gemma3", {"final_logit_softcapping": 0.0}, {"logits_cap": None}),
        (
            "gemma3",
            {"block_count": 62, "attention.key_length": 32, "attention.value_length": 32},
            {"query_scalar": 16},
        ),
    ],
)
def test_keys_are_obeyed_as_by_llama_cpp(case, changes, expected):
    """The logits of such files were compared with llama.cpp's: equal to 2e-6, of Gemma to 2e-4 of
    the largest.
    """
    table = described(case, changes)
    form = nets.short_form(hf_families.of(table).read(table))
    assert {key: pytest.approx(getattr(form, key), abs=1e-4) for key in expected} == expected


def test_architectures_that_are_not_read_are_refused_by_name():
    """All that the gguf package knows: the families of 2024 to 2026 among them."""
    names = set(gguf.MODEL_ARCH_NAMES.values()) - set(llama_cpp.ARCHITECTURES)
    assert names >= {
        "gemma4",
        "qwen35",
        "apertus",
        "mistral3",
        "chatglm",
        "deepseek2",
        "granitehybrid",
        "gemma3n",
    }
    for name in names:
        with pytest.raises(
            hf_families.FamilyError,
            match=f"^the architecture is '{re.escape(name)}': expected one of gpt2, ",
        ):
            llama_cpp.config_json({"general.architecture": name}, {})


# a key that llama.cpp obeys, in these architectures or others, and a value that the networks do not
# have
ODD = {
    "attention.causal": False,
    "attention.scale": 0.1,
    "attention.clamp_kqv": 8.0,
    "attention.max_alibi_bias": 8.0,
    "attention.sliding_window": 64,
    "attention.value_length": 8,
    "attention.temperature_scale": 0.1,
    "attention.head_count_kv": [2, 1],
    "expert_group_count": 8,
    "nextn_predict_layers": 1,
    "logit_scale": 16.0,
    "embedding_scale": 12.0,
    "residual_scale": 0.2,
    "final_logit_softcapping": 30.0,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [4, 4, 0, 0],
    "rope.freq_base_swa": 1e4,
    "rope.scaling.type": "longrope",
    "rope.scaling.alpha": 1000.0,
    "rope.scaling.attn_factor": 0.5,  # without YaRN
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "rope.a_new_one": 1,
}


@pytest.mark.parametrize("key", ODD)
def test_keys_that_would_change_the_result_are_refused_by_name(key):
    with pytest.raises(hf_families.FamilyError, match=re.escape(key)):
        described("llama", {key: ODD[key]})


@pytest.mark.parametrize("architecture", ["phi3", "stablelm", "glm4", "nemotron"])
@pytest.mark.parametrize("dims", [0, 3, 18, -2, 4.0])
def test_rotated_dimensions_are_an_even_number_of_a_heads(architecture, dims):
    norm = "layer_norm_rms_epsilon" if architecture in ("phi3", "glm4") else "layer_norm_epsilon"
    sizes = {
        "embedding_length": 64,
        "attention.head_count": 4,
        "block_count": 1,
        "feed_forward_length": 96,
    }
    keys = {
        f"{architecture}.{key}": value
        for key, value in (sizes | {f"attention.{norm}": 1e-5}).items()
    }
    keys |= {"general.architecture": architecture, f"{architecture}.rope.dimension_count": dims}
    expected = rf"^rope.dimension_count is {dims}: expected an even number from 2 to 16, a head's dimensions$"
    with pytest.raises(hf_families.FamilyError, match=expected):
        llama_cpp.config_json(keys, {"token_embd.weight": (64, 64)})


def test_a_granites_factor_of_zero_is_none_and_of_logits_is_refused():
    """llama.cpp divides logits by theirs, and leaves the other factors out where they are 0."""
    sizes = {
        "embedding_length": 64,
        "attention.head_count": 4,
        "block_count": 1,
        "feed_forward_length": 96,
    }
    sizes |= {"attention.layer_norm_rms_epsilon": 1e-5, "logit_scale": 8.0}
    shapes = {"token_embd.weight": (64, 64)}

    def read(**factors):
        keys = {f"granite.{key}": value for key, value in (sizes | factors).items()}
        table = llama_cpp.config_json({"general.architecture": "granite", **keys}, shapes)
        return hf_families.of(table).read(table)

    assert read(embedding_scale=0.0, residual_scale=0.0) == read()
    with pytest.raises(
        hf_families.FamilyError,
        match="logit_scale is 0, and logits are divided by it: expected a pos",
    ):
        read(logit_scale=0.0)


def test_every_key_of_the_format_is_obeyed_or_refused():
    """Each key that the gguf package knows of an architecture, with a value that none of ours
    has.
    """
    without_effect = {  # a limit or default that another key goes before, or that only YaRN reads
        "t5": {"context_length", "attention.layer_norm_epsilon"},
        **{
            case: {"rope.scaling.original_context_length"}
            for case in CASES
            if case not in ("gpt2", "t5")
        },
    }
    # what does not fit them is named
    sizes = ("embedding_length", "attention.head_count", "attention.key_length")
    tables = [table for table in vars(gguf.Keys).values() if isinstance(table, type)]
    handled = {
        value for table in tables for value in vars(table).values() if isinstance(value, str)
    }
    keys = sorted(key.removeprefix("{arch}.") for key in handled if key.startswith("{arch}."))
    assert len(keys) > 100
    for case in CASES:
        plain = described(case, {})
        for key in sorted(set(keys) - llama_cpp.UNREAD - without_effect.get(case, set())):
            try:
                assert described(case, {key: 3}) != plain, (case, key)
            except hf_families.FamilyError as error:
                assert key in str(error) or key in sizes, (case, key)


@pytest.mark.parametrize(
    ("key", "values"),
    [(key, values) for key, values in llama_cpp.NEUTRAL.items()]
    + [(key, (3,)) for key in sorted(llama_cpp.UNREAD)],
)
def test_values_that_change_nothing_are_read(key, values):
    for value in values:
        assert described("llama", {key: value}) == described("llama", {})


def with_number(content, key, value, form="I"):
    """A file with another value of a key, an integer after its type's number."""
    at = content.index(key) + len(key) + 4
    return content[:at] + struct.pack(f"<{form}", value) + content[at + struct.calcsize(form) :]


def test_files_that_cannot_be_read_are_refused_in_words(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, "llama")
    complete = path.read_bytes()
    name = complete.index(b"blk.0.attn_norm.weight")
    # after the number of axes and the only one
    kind = name + len(b"blk.0.attn_norm.weight") + 4 + 8
    cut = {
        "not a GGUF file": b"x" * 99,
        "version is 9": b"GGUF" + struct.pack("<I", 9) + complete[8:],
        "is not a file of weights, or damaged": complete[:90],
        "ends within": complete[:16] + struct.pack("<Q", 1) + struct.pack("<Q", 2**60) + b"x" * 99,
        "ends before": complete[:-99],
        "the architecture is 'xlama'": complete.replace(b"llama", b"xlama", 1).replace(
            b"llama.", b"xlama."
        ),
        "quantised as type 77": complete[:kind] + struct.pack("<I", 77) + complete[kind + 4 :],
        "quantised as I8": complete[:kind] + struct.pack("<I", 24) + complete[kind + 4 :],
        "missing \\(1\\): model.layers.0.input_layernorm": complete.replace(
            b"0.attn_norm", b"0.attn_nxrm"
        ),
        "expected at most 10,000": with_number(complete, b"llama.block_count", 10**6),
        "it lacks 'embedding_length'": complete.replace(b"embedding_length", b"embedding_longth"),
    }
    for words, content in cut.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            jaxspec.load(path)
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*none\.gguf"):
        jaxspec.load("owner/none.gguf")


def split(path: Path, parts: int = 3) -> list[Path]:
    """Writes the tensors of a file into several, as llama.cpp's gguf-split does."""
    reading = gguf.GGUFReader(path)
    share = -(-len(reading.tensors) // parts)
    writer = gguf.GGUFWriter(path, "qwen2", split_max_tensors=share)
    for field in reading.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(
                field.name, field.contents(), kind, sub_type=inner[0] if inner else None
            )
    for tensor in reading.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    del reading
    path.unlink()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.iterdir())


def test_a_split_file_is_read_by_any_of_its_parts(tmp_path):
    tensors = write(tmp_path / "model.gguf", "qwen2")
    paths = split(tmp_path / "model.gguf")
    assert [path.name for path in paths] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in paths:
        model = jaxspec.load(path)
        assert model.name == "model"
        weights = ours(model)
        for name, x in tensors.items():
            np.testing.assert_array_equal(weights[name], x, err_msg=name)


def test_missing_and_foreign_parts_of_a_split_file_are_named(tmp_path):
    write(tmp_path / "model.gguf", "qwen2")
    first, second, third = split(tmp_path / "model.gguf")
    aside = third.rename(tmp_path / "aside")
    with pytest.raises(
        CheckpointError,
        match=r"is part 1 of 3 of a model.*no model-00003-of-00003\.gguf: put all parts",
    ):
        jaxspec.load(first)
    third.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.gguf is not part 3 of 3"):
        jaxspec.load(first)
    third.write_bytes(with_number(second.read_bytes(), b"split.no", 2, "H"))
    with pytest.raises(CheckpointError, match="and a part before it both hold"):
        jaxspec.load(first)
    third.write_bytes(aside.read_bytes())
    content = first.read_bytes()
    first.write_bytes(with_number(content, b"split.tensors.count", 99))
    with pytest.raises(CheckpointError, match="parts hold 26 tensors, expected 99"):
        jaxspec.load(first)
    first.write_bytes(content)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"name must end in -00001-of-00003\.gguf"):
        jaxspec.load(renamed)


def test_files_of_other_kinds_and_lists_of_banned_tokens_are_refused(tmp_path):
    for key, value in (("general.type", "adapter"), ("tokenizer.ggml.suppress_tokens", [5])):
        write(tmp_path / "model.gguf", "llama", {key: value})
        with pytest.raises(CheckpointError, match=key):
            jaxspec.load(tmp_path / "model.gguf")


def test_a_text_ends_where_llama_cpp_ends_it(tmp_path):
    """At the token of a chat's end that no key names, and whose type does not tell it from
    others.
    """
    write(tmp_path / "model.gguf", "llama")
    plain = jaxspec.load(tmp_path / "model.gguf")
    assert plain.config.end_tokens == (1,)
    tokens = jaxspec.generate(plain, ["ab"], max_new_tokens=8).tokens[0]
    named = int(tokens[3])
    assert named not in tokens[:3]
    texts = ["<end_of_turn>" if i == named else token for i, token in enumerate(TOKENS)]
    write(tmp_path / "model.gguf", "llama", {"tokenizer.ggml.tokens": texts})
    model = jaxspec.load(tmp_path / "model.gguf")
    assert model.config.end_tokens == (1, named)
    assert jaxspec.generate(model, ["ab"], max_new_tokens=8).lengths[0] == 4


def test_dtypes_that_are_slower_on_a_cpu_are_told_from_a_size_on(tmp_path, monkeypatch, caplog):
    write(tmp_path / "model.gguf", "qwen2")
    jaxspec.load(tmp_path / "model.gguf", dtype="bfloat16")
    assert not caplog.records
    monkeypatch.setattr(loading, "SLOW_FROM", 1000)
    jaxspec.load(tmp_path / "model.gguf")
    assert not caplog.records
    jaxspec.load(tmp_path / "model.gguf", dtype="int8")
    assert "model is loaded as int8, which on a CPU saves memory, but not time" in caplog.text


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        CheckpointError, match=r'gguf, .*is not installed: pip install "\.\[gguf\]"'
    ):
        reader.package()
