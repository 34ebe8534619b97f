"""GGUF files, llama.cpp's format: sizes, tokenizer and weights, which are often quantised.

The `gguf` package (extra "gguf") has the names of tensors and undoes quantisations. Weights are
converted by rows, so that the host holds little besides the model. What is quantised in the file is
of the dtype that the model is loaded in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import optional_imports
from jaxspec.nets import net_of, rotary
from jaxspec.weights import gguf_tokenizer, hf_families, huggingface
from jaxspec.weights.gguf_header import Header, TensorEntry, is_file, name_of, read
from jaxspec.weights.hf_families import Family, FamilyError, Tensor, llama_cpp
from jaxspec.weights.reader import ModelFormat, Reader
from jaxspec.weights.tensors import CheckpointError, Shard, Stored

__all__ = ["FORMAT", "is_file", "name_of", "open_file", "package", "read"]

HEAD = "output.weight"
EMBEDDING = "token_embd.weight"
# rows of both, and how far they may be apart, each quantised in its way: 4 bits lose 0.1
COMPARED = 1024
ALIKE = 0.2
# what each frequency is divided by, of models whose positions are scaled
ROPE = "rope_freqs.weight"
FACTORS = (ROPE, llama_cpp.LONGROPE, "rope_factors_long.weight")  # no tensors of the network
EXPERTS = re.compile(r"layers_(\d+)/ff/experts/(inwards|outwards)/(weight|bias)")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_json(path: Path, header: Header) -> tuple[Family, Any, dict[str, Any]]:
    """Returns the family of the model in a file, its configuration, and the config.json that says
    the same.
    """
    try:
        table = llama_cpp.config_json(
            header.metadata, {name: x.shape for name, x in header.tensors.items()}
        )
        if ROPE in header.tensors and table.get("rope_scaling"):
            raise FamilyError(
                f"it has the tensor {ROPE} and keys rope.scaling.*: expected one of them"
            )
        if ROPE in header.tensors:
            table["rope_scaling"] = _llama3(header, table)
        short = llama_cpp.LONGROPE
        if short in header.tensors:
            if table["model_type"] != "phi3":
                raise FamilyError(f"it has the tensor {short}, which is supported only with phi3")
            table["rope_scaling"]["short_factor"] = np.asarray(
                _stored(short, header.tensors[short])
            ).tolist()
        if table["model_type"] == "t5" and HEAD in header.tensors:
            # Tied, so that `huggingface.assemble` leaves out an exact copy; one quantised otherwise
            # it keeps as a head.
            table["tie_word_embeddings"] = table["scale_decoder_outputs"] = _repeats_embedding(
                header
            )
        family = hf_families.of(table)
        config = family.read(table)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(f"{path} holds no model that can be loaded: {error}") from error
    ends = tuple(i for i in gguf_tokenizer.end_ids(header.metadata) if i < config.vocab_size)
    config = dataclasses.replace(config, end_tokens=ends)
    return family, config, table | {"eos_token_id": list(ends)}


def open_file(path: Path, header: Header) -> tuple[Family, Any, list[Shard]]:
    """Returns the family of the model in a file, its configuration, and its tensors as the family
    names them.
    """
    family, config, table = config_json(path, header)
    heads = table.get("num_attention_heads", 0), table.get("num_key_value_heads", 0)
    family = family._replace(
        names=functools.partial(_names, family.names), apart=(), alternate=False
    )
    return family, config, [_shard(path, header, family, config, heads)]


def _names(names: Callable[[Any], dict[str, Tensor]], config: Any) -> dict[str, Tensor]:
    """Says where each parameter lies: all are [out, in], and stacks of experts are as ours, by our
    names.
    """
    return {
        path: Tensor(path) if EXPERTS.fullmatch(path) else tensor._replace(transposed=False)
        for path, tensor in names(config).items()
    }


def _repeats_embedding(header: Header) -> bool:
    """Tells whether the head is the embedding, but for how both are quantised: a T5's was then
    tied, and is scaled.
    """
    head, embedding = (_stored(name, header.tensors[name]) for name in (HEAD, EMBEDDING))
    if head.shape != embedding.shape:
        return False
    # A few rows tell: two matrices that were trained apart differ by more than what either lost.
    head, embedding = (np.asarray(x[:COMPARED], np.float32) for x in (head, embedding))
    return bool(np.linalg.norm(head - embedding) <= ALIKE * np.linalg.norm(embedding))


def _llama3(header: Header, table: dict[str, Any]) -> dict[str, Any]:
    """Returns the scaling of a Llama 3's positions, which the file has as a divisor for each
    frequency.
    """
    divisors = np.asarray(_stored(ROPE, header.tensors[ROPE])[:])
    head_dim = table.get("head_dim") or table["hidden_size"] // table["num_attention_heads"]
    factor = float(divisors.max())
    plain = rotary.frequencies(head_dim, table["rope_theta"])
    scaled = rotary.frequencies(
        head_dim, table["rope_theta"], rotary.RopeScaling("llama3", factor, *LLAMA3.values())
    )
    if divisors.shape != plain.shape or not np.allclose(plain / divisors, scaled, rtol=1e-4):
        raise FamilyError(
            f"{ROPE} does not scale frequencies as Llama 3 does: expected a factor, blended from 1 "
            "to 4"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _shard(
    path: Path, header: Header, family: Family, config: Any, head_counts: tuple[int, int]
) -> Shard:
    architecture = header.metadata["general.architecture"]
    named = huggingface.traced(path, "header", family.names, config)
    called, (experts, used) = _called(architecture, named, config), _experts(path, header, named)
    by_name = {
        called.get(name, name): name for name in header.tensors if name not in (*FACTORS, *used)
    }
    heads = dict(zip((".attn_q.", ".attn_k."), head_counts, strict=True))

    def convert(canonical: str, x: Stored) -> np.ndarray | Stored:
        name = by_name[canonical]
        # llama.cpp's converter added 1 to these, and interleaved the halves that are rotated
        # together.
        if architecture in llama_cpp.NORMS_FROM_ONE and name.endswith("norm.weight"):
            return np.asarray(x) - np.float32(1)
        if architecture in llama_cpp.INTERLEAVED:
            for infix, count in heads.items():
                if infix in name:
                    return _halves(np.asarray(x), count)
        return x

    stored = {canonical: _stored(name, header.tensors[name]) for canonical, name in by_name.items()}
    shapes = {canonical: x.shape for canonical, x in (stored | experts).items()}

    def load(names: Collection[str]) -> Iterator[tuple[str, np.ndarray | Stored]]:
        return (
            (name, experts[name] if name in experts else convert(name, stored[name]))
            for name in names
        )

    return Shard(path, shapes, load)


def _experts(
    path: Path, header: Header, named: Iterable[str]
) -> tuple[dict[str, Stored], list[str]]:
    """Presents stacks of experts, whose two projections inwards take turns; returns the tensors
    that they are of.
    """
    stacks = dict[str, Stored]()
    used = list[str]()
    for name in named:
        match = EXPERTS.fullmatch(name)
        if not match:
            continue
        layer, side, leaf = match.groups()
        names = [
            f"blk.{layer}.ffn_{x}_exps.{leaf}"
            for x in (("gate", "up") if side == "inwards" else ("down",))
        ]
        parts = [_stored(x, header.tensors[x]) for x in names if x in header.tensors]
        used += names
        if not parts:
            experts = f"{' and '.join(names)}, the experts of layer {layer}"
            raise CheckpointError(f"{path} lacks {experts}. Download it again")
        if len({x.shape for x in parts}) != 1 or len(parts) != len(names):
            pair = f"blk.{layer}.ffn_(gate|up)_exps.{leaf}"
            shapes = [list(x.shape) for x in parts]
            raise CheckpointError(
                f"{path}: {pair} have the shapes {shapes}: expected two alike. Download it again"
            )
        stacks[name] = _in_turn(parts)
    return stacks, used


def _in_turn(parts: list[Stored]) -> Stored:
    """Makes one stack of several, whose entries take turns."""

    def rows(start: int, stop: int) -> np.ndarray:
        # [gate 0, up 0, gate 1, ...]: one matrix is read at a time, however large the stack is.
        turns = (divmod(i, len(parts)) for i in range(start, stop))
        return np.concatenate([parts[index][i : i + 1] for i, index in turns])

    return Stored((len(parts) * parts[0].shape[0], *parts[0].shape[1:]), parts[0].dtype, rows)


def _halves(x: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows of queries or keys, from pairs that are rotated together to halves that are.

    >>> _halves(np.array([0, 2, 1, 3, 4, 6, 5, 7]), heads=2).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _called(architecture: str, named: Mapping[str, Tensor], config: Any) -> dict[str, str]:
    gguf = package()
    # The package maps transformers' names to llama.cpp's; here that is turned round.
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = max(net_of(config).stacks(config).values())
    tensor_names = gguf.get_tensor_name_map(arch, layers)
    called = {HEAD: "lm_head.weight"}  # a head of its own, or a copy of the embedding
    for canonical in {tensor.name for tensor in named.values()}:
        name = tensor_names.get_name(canonical, try_suffixes=(".weight", ".bias"))
        if name is not None:
            # Vectors that transformers calls without ".weight" have it here.
            called[name if name.endswith((".weight", ".bias")) else f"{name}.weight"] = canonical
    return called


@functools.lru_cache
def _quantisation(number: int) -> tuple[Any, int, int] | str:
    """Returns the package's type of a number, and a block's entries and bytes; the name of a type
    it cannot undo.
    """
    gguf = package()
    called = f"type {number}"
    try:
        ggml_type = gguf.GGMLQuantizationType(number)
        called = ggml_type.name
        block, size = gguf.GGML_QUANT_SIZES[ggml_type]
        _dequantised(ggml_type, np.zeros((1, size), np.uint8))
    except (ValueError, KeyError, NotImplementedError):
        return called
    return ggml_type, block, size


def _dequantised(ggml_type: Any, packed: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # what a block does not use may be anything
        return package().dequantize(packed, ggml_type)


def _stored(name: str, entry: TensorEntry) -> Stored:
    path, shape, number, offset = entry
    quantisation = _quantisation(number)
    if isinstance(quantisation, str):
        expected = (
            "F32, F16, BF16, Q8_0, Q4_K or another quantisation that the gguf package can undo"
        )
        raise CheckpointError(f"{path}: {name} is quantised as {quantisation}: expected {expected}")
    ggml_type, block, size = quantisation
    # Blocks of entries run along the last axis; a row is all that has one index of the first.
    *outer, last = shape
    if last % block:
        raise CheckpointError(
            f"{path}: rows of {name} have {last} entries, expected a multiple of {block}"
        )
    if outer:
        per_row = math.prod(outer[1:]) * (last // block) * size
    else:
        per_row = size
    count = shape[0] if outer else last // block
    if offset + count * per_row > path.stat().st_size:
        raise CheckpointError(
            f"{path} is incomplete: it ends before {name} does. Download it again"
        )

    def rows(start: int, stop: int) -> np.ndarray:
        # A vector's blocks are not cut.
        if not outer and (start, stop) != (0, last):
            return rows(0, last)[start:stop]
        n = (stop - start) if outer else count
        packed = np.fromfile(path, np.uint8, n * per_row, offset=offset + start * per_row)
        return _dequantised(ggml_type, packed.reshape(-1, (last // block) * size)).reshape(
            stop - start, *shape[1:]
        )

    return Stored(shape, np.dtype(np.float32), rows)


def package() -> Any:
    """Imports the `gguf` package."""
    with contextlib.suppress(ImportError):
        import gguf

        return gguf
    raise CheckpointError(optional_imports.missing("gguf, which reads GGUF files,", "gguf"))


def open_model(path: Path) -> Reader:
    """Opens a file, whose header is read once: a vocabulary of 262,144 takes seconds."""
    header = read(path)
    return Reader(
        path,
        name_of(path),
        config=lambda: config_json(path, header)[1],
        tokenizer=lambda: gguf_tokenizer.tokenizer(path, header.metadata),
        params=lambda dtype, mesh: huggingface.assemble(
            path, *open_file(path, header), dtype, mesh, "header"
        ),
        stored_dtype=lambda: "float32",
        source=lambda: {huggingface.CONFIG: config_json(path, header)[2]},
    )


FORMAT = ModelFormat("gguf", is_file, open_model)
"""A GGUF file: how it is recognised and opened."""
