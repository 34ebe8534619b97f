"""Checkpoints of Hugging Face's form whose matrices somebody quantised: GPTQ, AWQ, compressed-tensors and fp8.

A quantised layer has several tensors in the place of `NAME.weight` [out, in]. They are one matrix w = s (q - z), with q
of b bits less 2**(b - 1) and G groups of neighbouring columns:

    GPTQ                 .qweight int32 [in b / 32, out], the first of a word's columns in its lowest bits; .scales
                         [G, out]; .qzeros int32 [G, out b / 32], words of an unsigned z, less 1 in each field as one
                         number of 32 bits, so that a z of 0 borrows (z itself in "gptq_v2"); .g_idx [in], the group of
                         each column
    AWQ ("gemm")         .qweight int32 [in, out / 8], outputs 0 2 4 6 1 3 5 7 of eight from the lowest bits on; .scales
                         [G, out]; .qzeros int32 [G, out / 8], packed alike
    compressed-tensors,  .weight_packed int32 [out, in b / 32], lowest bits first, 2**(b - 1) added; .weight_scale
    "pack-quantized"     [out, G]; .weight_shape; perhaps .weight_zero_point int32 [out b / 32, G], packed alike
    fp8; compressed-     .weight float8_e4m3fn [out, in] with one scale, one per output, or one per block of (as a rule)
    tensors, "float-     128 x 128 entries: .weight_scale_inv, by whose entries, its name notwithstanding, one
    quantized"           multiplies, or .weight_scale

Integers of 4 bits are taken as they are in int4 and int8, those of 8 bits in int8. In another dtype the matrix is that
which they stand for; so are fp8 matrices always, which are kept in the dtype that the model is loaded in: twice the
file's bytes in bfloat16. Matrices that the maker left in full are rounded to int8 at most, also in int4. Activations
are never rounded here: a file whose maker rounds them, too (fp8, as a rule), is read as its weights say. Integer
formats that round activations are refused, and so is whatever else has another arithmetic, by name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.files.folders import some
from jaxspec.weights.hf_families.common import FamilyError
from jaxspec.weights.tensors import CheckpointError, Shard, Stored

CONFIG = "quantization_config"
WORD = 32  # bits
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where output i of eight lies in a word
FP8 = "float8_e4m3fn"
IGNORED = (".input_scale", ".output_scale", ".k_scale", ".v_scale")  # of activations

ENDS = (  # of the names of quantised tensors, in any method's words
    *("qweight", "qzeros", "scales", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_packed"),
    *("input_scale", "absmax", "quant_map", "SCB", "W_q", "q_weight", "._data", "._scale", "_blocks"),
)
ELSEWHERE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # ModelOpt's; of old GPTQ and AWQ
EXPECTED = (
    "Expected none, GPTQ or AWQ of 4 bits (GPTQ also of 8), compressed-tensors' integers of 4 or 8 bits around "
    'activations in full (W4A16, W8A16), or fp8 (e4m3): load the model that it was made of, with dtype="int4" or '
    'dtype="int8", or a GGUF file of it'
)

Array = np.ndarray | Stored


@dataclasses.dataclass(frozen=True)
class Quantised(Stored):
    """A float32 matrix that lies in its file as integers with scales.

    Attributes:
        entries: [out, in], of `bits` bits as int8.
        scale: [out, G], float32.
        zero: [out, G], int8; None: all are 0.
        bits: 4 or 8.
        columns: the group of each column, where these are no neighbours ("desc_act"); None: they are.
    """

    entries: Stored
    scale: np.ndarray
    zero: np.ndarray | None = None
    bits: int = 8
    columns: np.ndarray | None = None

    def part(self, i: int, n: int) -> Quantised:
        """Returns the i-th of n equal parts of its rows."""
        count = self.shape[0] // n
        start, shape = i * count, (count, self.shape[1])

        def of(x: Stored) -> Stored:
            return Stored(shape, x.dtype, lambda a, b: x.rows(start + a, start + b))

        scale, zero = (None if x is None else x[start : start + count] for x in (self.scale, self.zero))
        assert scale is not None
        return Quantised(shape, self.dtype, of(self).rows, of(self.entries), scale, zero, self.bits, self.columns)


class Scheme(NamedTuple):
    """The form in which a file's layers are stored.

    Attributes:
        dtype: in which `load` takes them as they are.
        main: the end of the name of the tensor that holds the entries.
        needed, perhaps: those of the tensors beside it.
        shape: of the matrix, by the parts of a layer.
        matrix: makes it of them.
    """

    dtype: str
    main: str
    needed: tuple[str, ...]
    perhaps: tuple[str, ...]
    shape: Callable[[Mapping[str, Array]], tuple[int, int]]
    matrix: Callable[[Mapping[str, Array], tuple[int, int]], Stored]


def check(table: Mapping[str, Any]) -> None:
    """Refuses a config.json with weights in a quantisation that is not read.

    Raises:
        FamilyError: the message names it.

    >>> check({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: its weights are quantised (quantization_config): bitsandbytes, 4 \
bits. Expected none, GPTQ or AWQ of 4 bits (GPTQ also of 8), compressed-tensors' integers of 4 or 8 bits around \
activations in full (W4A16, W8A16), or fp8 (e4m3): load the model that it was made of, with dtype="int4" or \
dtype="int8", or a GGUF file of it
    """
    scheme_of(table)


def scheme_of(table: Mapping[str, Any]) -> Scheme | None:
    """Returns how the layers of a config.json's model are stored; None: in full. Raises what `check` raises."""
    if table.get(CONFIG) is None:
        return None
    config = table[CONFIG] if isinstance(table[CONFIG], dict) else {}
    method, bits = config.get("quant_method", "of no method that it names"), config.get("bits")
    form = config.get("checkpoint_format") or config.get("format") or config.get("version")
    if method == "compressed-tensors":
        return _of_compressed_tensors(config)
    if config.get("dynamic"):
        _refuse(str(method), "other options for some layers (dynamic)")
    version = str(form or {"gptq": "gptq", "awq": "gemm"}.get(method, "")).lower()
    width = config.get("group_size", -1)
    if method == "gptq" and bits in (4, 8) and version in ("gptq", "gptq_v2") and isinstance(width, int):
        return _gptq(bits, width, 1 if version == "gptq" else 0)
    bits = bits if bits is not None else config.get("w_bit")
    if method == "awq" and bits == 4 and version == "gemm":
        return _awq(config.get("group_size", config.get("q_group_size", -1)))
    block = config.get("weight_block_size")
    if method == "fp8" and config.get("fmt", "e4m3") == "e4m3":
        return _fp8(tuple(block) if block else None)
    bits = bits or (4 if config.get("load_in_4bit") else 8 if config.get("load_in_8bit") else None)
    _refuse(str(method), str(form or ""), f"{bits} bits" if bits else "", str(config.get("fmt") or ""))


def _refuse(*description: str) -> Any:
    raise FamilyError(f"its weights are quantised ({CONFIG}): {', '.join(filter(None, description))}. {EXPECTED}")


def unread(folder: Path, names: Iterable[str]) -> str:
    """Says that tensors which nobody reads are those of a quantisation, where their names show it; else it is empty.

    >>> unread(Path(), ["fc.weight"]), unread(Path(), ["fc.qweight"])[:55]
    ('', 'its weights are quantised (fc.qweight), and config.json')
    """
    shown = [name for name in names if name.endswith(ENDS)]
    beside = [f"{file} is not read. " for file in ELSEWHERE if (folder / file).is_file()]
    says = f"its weights are quantised ({some(shown)}), and config.json does not say how. {''.join(beside)}{EXPECTED}"
    return says if shown else ""


def _of_compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    groups, form = config.get("config_groups") or {}, config.get("format")
    tables = list(groups.values()) if isinstance(groups, dict) else []
    weights = [(group.get("weights") if isinstance(group, dict) else None) or {} for group in tables]
    kinds = list(dict.fromkeys(map(_kind, tables)))
    numbers = {number for w in weights if type(number := w.get("num_bits")) is int}
    unmoved = numbers and not config.get("kv_cache_scheme") and {w.get("actorder") for w in weights} <= UNMOVED
    inner = all(not (group.get("input_activations") or group.get("output_activations")) for group in tables)
    strategies = {w.get("strategy") for w in weights}
    types = {w.get("type") for w in weights}
    packed = form == "pack-quantized" and types == {"int"} and strategies <= {"channel", "group"}
    if unmoved and inner and packed and len(numbers) == 1 and numbers <= {4, 8}:
        return _packed(numbers.pop())
    if unmoved and form == "float-quantized" and numbers == {8} and types == {"float"}:
        blocks = {tuple(w.get("block_structure") or ()) for w in weights}
        if strategies <= {"tensor", "channel", "block"} and len(blocks) == 1:
            return _fp8(blocks.pop() or None)
    cache = ["a quantised cache"] if config.get("kv_cache_scheme") else []
    return _refuse("compressed-tensors", str(form or ""), *kinds, *cache)


UNMOVED = {None, False, "static", "weight"}  # values of "actorder" that leave groups of neighbouring columns


def _kind(group: Any) -> str:
    """Describes a group of matrices, such as "int, 8 bits, channel"."""
    weights = (group.get("weights") if isinstance(group, dict) else None) or {}
    words = [str(weights.get("type")), f"{weights.get('num_bits')} bits", str(weights.get("strategy"))]
    words += [] if weights.get("symmetric") else ["asymmetric"]
    words += ["in another order"] if weights.get("actorder") not in UNMOVED else []
    words += ["activations, too"] if group.get("input_activations") or group.get("output_activations") else []
    return ", ".join(words)


# --- the formats


def _gptq(bits: int, group_size: int, less: int) -> Scheme:
    def matrix(parts: Mapping[str, Array], shape: tuple[int, int]) -> Stored:
        words, half = np.asarray(parts[".qweight"]), 2 ** (bits - 1)
        groups = _check_groups(shape, group_size, parts[".scales"].shape[0])
        # The makers subtracted from whole words, so a field of all ones carries into the next.
        ones = np.uint32(less * sum(1 << i for i in range(0, WORD, bits)))
        zeros = np.asarray(parts[".qzeros"]).astype(np.uint32) + ones
        zero = _fields(zeros.view(np.int32), bits).astype(np.int16)[:, : shape[0]].T - half
        columns = np.asarray(parts.get(".g_idx", np.arange(shape[1]) * groups // shape[1])).astype(np.int64)

        def entries(start: int, stop: int) -> np.ndarray:
            return _signed(_fields(words[:, start:stop].T, bits), half)

        moved = bool((columns != np.arange(shape[1]) * groups // shape[1]).any())
        return _quantised(shape, entries, np.asarray(parts[".scales"]).T, zero, bits, columns if moved else None)

    def shape(parts: Mapping[str, Array]) -> tuple[int, int]:
        rows, columns = parts[".scales"].shape[-1], parts[".qweight"].shape[0] * (WORD // bits)
        groups = parts[".scales"].shape[0]
        _expect(parts, {".qweight": (columns * bits // WORD, rows), ".qzeros": (groups, -(-rows * bits // WORD))})
        _expect(parts, {".g_idx": (columns,)} if ".g_idx" in parts else {})
        return rows, columns

    return Scheme(f"int{bits}", ".qweight", (".qzeros", ".scales"), (".g_idx",), shape, matrix)


def _awq(group_size: int) -> Scheme:
    def ordered(words: np.ndarray) -> np.ndarray:
        """[n, out / 8] -> [n, out], unsigned."""
        return _fields(words, 4).reshape(len(words), -1, 8)[:, :, AWQ_ORDER].reshape(len(words), -1)

    def matrix(parts: Mapping[str, Array], shape: tuple[int, int]) -> Stored:
        words = np.asarray(parts[".qweight"])
        _check_groups(shape, group_size, parts[".scales"].shape[0])
        zero = ordered(np.asarray(parts[".qzeros"])).astype(np.int16).T - 8

        def entries(start: int, stop: int) -> np.ndarray:
            first = start // 8
            return _signed(ordered(words[:, first : -(-stop // 8)]).T[start - 8 * first : stop - 8 * first], 8)

        return _quantised(shape, entries, np.asarray(parts[".scales"]).T, zero, 4)

    def shape(parts: Mapping[str, Array]) -> tuple[int, int]:
        columns, rows = parts[".qweight"].shape[0], parts[".scales"].shape[-1]
        _expect(parts, {".qweight": (columns, rows // 8), ".qzeros": (parts[".scales"].shape[0], rows // 8)})
        return rows, columns

    return Scheme("int4", ".qweight", (".qzeros", ".scales"), (), shape, matrix)


def _packed(bits: int) -> Scheme:
    half = 2 ** (bits - 1)

    def matrix(parts: Mapping[str, Array], shape: tuple[int, int]) -> Stored:
        words, scale = parts[".weight_packed"], np.asarray(parts[".weight_scale"])
        zero = np.asarray(parts.get(".weight_zero_point", np.zeros(scale.shape, np.int8)))
        if zero.dtype == np.int32:
            zero = _fields(zero.T, bits)[:, : shape[0]].T.astype(np.int16) - half

        def entries(start: int, stop: int) -> np.ndarray:
            return _signed(_fields(words[start:stop], bits)[:, : shape[1]], half)

        return _quantised(shape, entries, scale, zero, bits)

    def shape(parts: Mapping[str, Array]) -> tuple[int, int]:
        rows, columns = map(int, np.asarray(parts[".weight_shape"]).reshape(-1))
        _expect(parts, {".weight_packed": (rows, -(-columns * bits // WORD))})
        groups = parts[".weight_scale"].shape[-1]
        _expect(parts, {".weight_scale": (rows, groups if columns % groups == 0 else 1)})
        return rows, columns

    needed, perhaps = (".weight_scale", ".weight_shape"), (".weight_zero_point",)
    return Scheme(f"int{bits}", ".weight_packed", needed, perhaps, shape, matrix)


def _fp8(block: tuple[int, ...] | None) -> Scheme:
    def scale_of(parts: Mapping[str, Array]) -> np.ndarray:
        scale = np.asarray(next(x for name, x in parts.items() if name != ".weight"), np.float32)
        return scale.reshape(1, 1) if scale.size == 1 else scale.reshape(len(scale), -1)

    def shape(parts: Mapping[str, Array]) -> tuple[int, int]:
        rows, columns = parts[".weight"].shape
        scale, (high, wide) = scale_of(parts).shape, block or (1, columns)
        if scale != (1, 1) and scale != (-(-rows // high), -(-columns // wide)):
            raise ValueError(f"scales {list(scale)} of a matrix {[rows, columns]}, of blocks {[high, wide]}")
        return rows, columns

    def matrix(parts: Mapping[str, Array], shape: tuple[int, int]) -> Stored:
        if parts[".weight"].dtype.name != FP8:
            raise ValueError(f"entries of {parts['.weight'].dtype.name} beside scales: expected {FP8}")
        scale, (high, wide) = scale_of(parts), block or (1, shape[1])
        high, wide = shape if scale.size == 1 else (high, wide)

        def rows(start: int, stop: int) -> np.ndarray:
            of_rows = scale[np.arange(start, stop) // high]
            return parts[".weight"][start:stop].astype(np.float32) * np.repeat(of_rows, wide, axis=1)[:, : shape[1]]

        return Stored(shape, np.dtype(np.float32), rows)

    return Scheme("bfloat16", ".weight", (), (".weight_scale_inv", ".weight_scale"), shape, matrix)


def _fields(words: np.ndarray | Stored, bits: int) -> np.ndarray:
    """Splits int32 words into unsigned fields, the lowest bits first: [n, words] -> [n, fields].

    >>> _fields(np.array([[0x76543210, 0x0000000F]], np.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7, 15, 0, 0, 0, 0, 0, 0, 0]]
    """
    content = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)  # [n, 4 words]
    if bits == 8:
        return content
    return np.stack([content & 15, content >> 4], axis=-1).reshape(len(content), -1)


def _signed(fields: np.ndarray, half: int) -> np.ndarray:
    return (fields.astype(np.int16) - half).astype(np.int8)


def _check_groups(shape: tuple[int, int], group_size: int, groups: int) -> int:
    width = group_size if group_size > 0 else shape[1]
    if groups * width != shape[1]:
        raise ValueError(f"{groups} groups of {width} for {shape[1]} columns")
    return groups


def _expect(parts: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if tuple(parts[name].shape) != shape:
            raise ValueError(f"{name[1:]} is {list(parts[name].shape)}: expected {list(shape)}")


def _quantised(
    shape: tuple[int, int],
    entries: Callable[[int, int], np.ndarray],
    scale: np.ndarray,
    zero: np.ndarray,
    bits: int,
    columns: np.ndarray | None = None,
) -> Quantised:
    if np.abs(zero + 0.5).max() > 128:
        raise ValueError(f"a zero point is {zero.flat[np.abs(zero + 0.5).argmax()]}: expected -128 to 127")
    scale, zero = (np.ascontiguousarray(x, dtype) for x, dtype in ((scale, np.float32), (zero, np.int8)))
    of_column = np.arange(shape[1]) * scale.shape[1] // shape[1] if columns is None else columns

    def rows(start: int, stop: int) -> np.ndarray:
        values = entries(start, stop).astype(np.float32) - zero[start:stop, of_column]
        return values * scale[start:stop, of_column]

    as_stored = Stored(shape, np.dtype(np.int8), entries)
    return Quantised(shape, np.dtype(np.float32), rows, as_stored, scale, zero if zero.any() else None, bits, columns)


# --- the files


def unpacked(files: list[Shard], scheme: Scheme | None, wanted: Callable[[str], bool]) -> list[Shard]:
    """Returns files whose quantised layers are read as matrices, by the names that these have without quantisation.

    Args:
        files: as they are.
        scheme: how layers are stored.
        wanted: whether the network has a tensor of a name. AutoGPTQ wrote biases of zeros where there had been none:
            these are left out.

    Raises:
        CheckpointError: a layer lacks a tensor, or has one of another shape than the others say.
    """
    if scheme is None:
        return files
    ends = (*scheme.needed, *scheme.perhaps, *IGNORED)
    # They may lie in another file than the entries.
    beside = {name: x for file in files for name, x in file.read({n for n in file.shapes if n.endswith(ends)})}
    layers = {name.removesuffix(scheme.main) for file in files for name in file.shapes if name.endswith(scheme.main)}
    biases = {f"{layer}.bias" for layer in layers}
    added = {name for file in files for name in file.shapes if name in biases and not wanted(name)}
    left_out = {name for file in files for name, x in file.read(added) if not np.asarray(x).any()} if added else set()
    return [_unpacked(shard, scheme, beside, left_out) for shard in files]


def _unpacked(shard: Shard, scheme: Scheme, beside: Mapping[str, Array], left_out: Container[str]) -> Shard:
    def parts_of(layer: str, main: Array) -> dict[str, Array]:
        ends = (*scheme.needed, *scheme.perhaps)
        return {scheme.main: main} | {end: beside[layer + end] for end in ends if layer + end in beside}

    def attempt(name: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except (ValueError, TypeError, LookupError) as error:
            raise CheckpointError(f"{shard.path}: the quantised layer {name} cannot be read: {error}") from error

    shapes, layers = {}, {}
    for name in shard.shapes:
        layer = name.removesuffix(scheme.main)
        if name in beside or name in left_out:
            continue
        if layer == name or not (scheme.needed or any(layer + end in beside for end in scheme.perhaps)):
            shapes[name] = shard.shapes[name]
            continue
        if absent := [end for end in scheme.needed if layer + end not in beside]:
            raise CheckpointError(f"{shard.path}: {name} is without {absent[0][1:]}: download it again")
        layers[layer + ".weight"] = name, layer

    for name, (main, layer) in layers.items():
        unread = Stored(shard.shapes[main], np.dtype(np.int32), _unread)
        parts = parts_of(layer, unread)
        shapes[name] = attempt(layer, functools.partial(scheme.shape, parts))

    def read(only: Container[str] | None = None) -> Iterator[tuple[str, Array]]:
        for name in shapes:
            if only is not None and name not in only:
                continue
            if name not in layers:
                yield from shard.read([name])
                continue
            main, layer = layers[name]
            for _, x in shard.read([main]):
                yield name, attempt(layer, functools.partial(scheme.matrix, parts_of(layer, x), shapes[name]))

    return Shard(shard.path, shapes, read, in_full=frozenset(shapes.keys() - layers.keys()))


def _unread(start: int, stop: int) -> np.ndarray:
    raise AssertionError("only the shape is known")
