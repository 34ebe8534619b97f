"""Checkpoints of compressed-tensors (llm-compressor) with int8 matrices, "W8A16": what they store is what we compute.

Such a file has, for a matrix `NAME.weight` [out, in], `NAME.weight_packed` [out, ceil(in / 4)] of int32, each with the
entries of four columns plus 128, the first in its lowest byte, `NAME.weight_scale` [out, 1] and `NAME.weight_shape`.
In int8 both are taken as they are (but where a family's tensor is not one of our matrices as it lies, as GPT-2's: that
is rounded anew); in another dtype the matrix is that which they stand for. Other quantisations are refused by name:
those that round activations, too (W8A8, fp8), compute another function, and there is no arithmetic for int4 here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np

from jaxspec.weights.hf_families.common import FamilyError
from jaxspec.weights.tensors import CheckpointError, Shard, Stored

CONFIG = "quantization_config"
PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"


@dataclasses.dataclass(frozen=True)
class Quantised(Stored):
    """A float32 matrix that lies in its file as int8 entries [out, in] and scales [out, 1]."""

    entries: Stored
    scale: np.ndarray


def check(table: Mapping[str, Any]) -> None:
    """Refuses a config.json with weights in a quantisation that is not read.

    Raises:
        FamilyError: the message names it.

    >>> check({"quantization_config": {"quant_method": "awq", "bits": 4}})
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: its weights are quantised (quantization_config): awq, 4 bits. \
Expected none, or compressed-tensors' int8 matrices alone, symmetric, a scale per channel (W8A16): load the model that \
it was made of, with dtype="int8", or a GGUF file of it
    """
    if table.get(CONFIG) is None:
        return
    config = table[CONFIG] if isinstance(table[CONFIG], dict) else {}
    groups = config.get("config_groups") or {}
    kinds = [_kind(group) for group in (groups.values() if isinstance(groups, dict) else ())]
    method, form = config.get("quant_method", "of no method that it names"), config.get("format")
    if method == "compressed-tensors" and form == "pack-quantized" and kinds and set(kinds) == {"int, 8 bits, channel"}:
        if not config.get("kv_cache_scheme"):
            return
        kinds.append("a quantised cache")
    bits = config.get("bits") or (4 if config.get("load_in_4bit") else 8 if config.get("load_in_8bit") else None)
    description = [
        str(method),
        *([str(form)] if form else []),
        *([f"{bits} bits"] if bits else []),
        *dict.fromkeys(kinds),
    ]
    raise FamilyError(
        f"its weights are quantised ({CONFIG}): {', '.join(description)}. Expected none, or compressed-tensors' int8 "
        "matrices alone, symmetric, a scale per channel (W8A16): load the model that it was made of, with "
        'dtype="int8", or a GGUF file of it'
    )


def _kind(group: Any) -> str:
    """Describes a group of matrices: "int, 8 bits, channel" is the one that is read."""
    weights = (group.get("weights") if isinstance(group, dict) else None) or {}
    words = [str(weights.get("type")), f"{weights.get('num_bits')} bits", str(weights.get("strategy"))]
    words += [] if weights.get("symmetric") else ["asymmetric"]
    words += ["in another order"] if weights.get("actorder") else []
    words += ["activations, too"] if group.get("input_activations") or group.get("output_activations") else []
    return ", ".join(words)


def unpacked(files: list[Shard]) -> list[Shard]:
    """Returns files whose packed matrices are read as matrices, by the names that these have without quantisation.

    Raises:
        CheckpointError: a packed matrix is without scales or a shape, or of others than they say.
    """
    beside = {name for shard in files for name in shard.shapes if name.endswith((SCALE, SHAPE))}
    if not any(name.endswith(PACKED) for shard in files for name in shard.shapes):
        return files
    small = {name: np.asarray(x) for shard in files for name, x in shard.read(beside)}  # perhaps in another file
    return [_unpacked(shard, small) for shard in files]


def _unpacked(shard: Shard, small: Mapping[str, np.ndarray]) -> Shard:
    def shape_of(name: str) -> tuple[int, ...]:
        if not name.endswith(PACKED):
            return shard.shapes[name]
        layer = name.removesuffix(PACKED)
        if layer + SCALE not in small or layer + SHAPE not in small:
            raise CheckpointError(f"{shard.path}: {name} is without {SCALE[1:]} or {SHAPE[1:]}: download it again")
        rows, columns = map(int, small[layer + SHAPE].reshape(-1))
        if shard.shapes[name] != (rows, -(-columns // 4)) or small[layer + SCALE].shape != (rows, 1):
            raise CheckpointError(
                f"{shard.path}: {name} is {shard.shapes[name]} and its scales {small[layer + SCALE].shape}: expected "
                f"{(rows, -(-columns // 4))} and {(rows, 1)}, of a matrix {(rows, columns)}"
            )
        return rows, columns

    shapes = {
        name.removesuffix(PACKED) + ".weight" if name.endswith(PACKED) else name: shape_of(name)
        for name in shard.shapes
        if name not in small
    }

    def read(only: Container[str] | None = None) -> Iterator[tuple[str, np.ndarray | Stored]]:
        for name in shapes:
            packed = name.removesuffix(".weight") + PACKED
            if only is not None and name not in only:
                continue
            if packed not in shard.shapes:
                yield from shard.read([name])
                continue
            for _, x in shard.read([packed]):
                scale = small[packed.removesuffix(PACKED) + SCALE].astype(np.float32)
                yield name, _matrix(x, scale, shapes[name])

    return Shard(shard.path, shapes, read)


def _matrix(packed: np.ndarray | Stored, scale: np.ndarray, shape: tuple[int, ...]) -> Quantised:
    def entries(start: int, stop: int) -> np.ndarray:
        bytes_of_rows = np.ascontiguousarray(packed[start:stop], "<i4").view(np.uint8)[:, : shape[1]]
        return (bytes_of_rows ^ np.uint8(128)).view(np.int8)  # less 128

    def rows(start: int, stop: int) -> np.ndarray:
        return entries(start, stop).astype(np.float32) * scale[start:stop]

    return Quantised(shape, np.dtype(np.float32), rows, Stored(shape, np.dtype(np.int8), entries), scale)
