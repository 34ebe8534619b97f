"""Checkpoints of Hugging Face's form whose matrices somebody quantised: GPTQ, AWQ,
compressed-tensors, fp8 and mxfp4.

A quantised layer has several tensors in the place of `NAME.weight` [out, in]. They are one matrix w
= s (q - z), with q of b bits less 2**(b - 1) and G groups of neighbouring columns:

    GPTQ                 .qweight int32 [in b / 32, out], the first of a word's columns in its lowest bits; .scales
                         [G, out]; .qzeros int32 [G, out b / 32], words of an unsigned z, less 1 in each field as one
                         number of 32 bits, so that a z of 0 borrows (z itself in "gptq_v2"); .g_idx [in], the group of
                         each column
    AWQ ("gemm")         .qweight int32 [in, out / 8], outputs 0 2 4 6 1 3 5 7 of eight from the lowest bits on; .scales
                         [G, out]; .qzeros int32 [G, out / 8], packed alike
    compressed-tensors,  .weight_packed int32 [out, in b / 32], lowest bits first, 2**(b - 1) added; .weight_scale
    "pack-quantized"     [out, G]; .weight_shape; perhaps .weight_zero_point int32 [out b / 32, G], packed alike
    fp8; compressed-     .weight float8_e4m3fn [out, in]; .weight_scale or .weight_scale_inv, which both multiply: one
    tensors, "float-     scale, one per output, or one per block of (as a rule) 128 x 128 entries
    quantized"
    mxfp4 (experts)      _blocks uint8 [E, out, in / 32, 16], two numbers of 4 bits a byte, the lower one first;
                         _scales uint8 [E, out, in / 32], powers of two with 127 added

Loading as int4 or int8 keeps integers of 4 bits and mxfp4's numbers as they are; int8 keeps
integers of 8 bits, too. In every other dtype the matrix becomes the floats that they stand for, and
fp8 always does: in bfloat16 it takes twice the file's bytes. Matrices that the maker left in full
are rounded to int8 at most, also in int4. Activations are never rounded here, even if the maker
rounds them beside fp8 weights. Integer formats that round activations are refused by name, and so
is every other arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.files.folders import some
from jaxspec.weights.hf_families.common import FamilyError
from jaxspec.weights.tensors import ArrayShape, CheckpointError, Shard, Stored

CONFIG = "quantization_config"
WORD = 32  # bits
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where output i of eight lies in a word
FP8 = "float8_e4m3fn"
IGNORED = (".input_scale", ".output_scale", ".k_scale", ".v_scale")  # of activations

ENDS = (  # of the names of quantised tensors, in any method's words
    *(
        "qweight",
        "qzeros",
        "scales",
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_packed",
    ),
    *(
        "input_scale",
        "absmax",
        "quant_map",
        "SCB",
        "W_q",
        "q_weight",
        "._data",
        "._scale",
        "_blocks",
    ),
)
# values of "actorder" that leave groups of neighbouring columns
UNMOVED = {None, False, "static", "weight"}
# ModelOpt's; of old GPTQ and AWQ
ELSEWHERE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
EXPECTED = (
    "Expected none, GPTQ or AWQ of 4 bits (GPTQ also of 8), compressed-tensors' integers of 4 or 8 "
    "bits around "
    "activations in full (W4A16, W8A16), mxfp4 or fp8 (e4m3): load the model that it was made of, "
    'with dtype="int4" or '
    'dtype="int8", or a GGUF file of it'
)

FLOAT32 = np.dtype(np.float32)
Array = np.ndarray | Stored


@dataclasses.dataclass(frozen=True)
class Quantised(Stored):
    """A float32 matrix, or a stack, that lies in its file as integers with scales.

    Entries and scales are [out, in] and [out, G] in a file whose matrices are [in, out], too.
    """

    entries: Stored  # [out, in], of `bits` bits as int8
    scale: np.ndarray  # [out, G], float32
    zero: np.ndarray | None = None  # [out, G], int8; None: all are 0
    bits: int = 8  # or 4
    # [in], the group of each column ("desc_act"); None: neighbours have one
    columns: np.ndarray | None = None
    floats: bool = False  # whether entries are twice the numbers of mxfp4, which "float4" holds

    def part(self, start: int, end: int) -> Quantised:
        """Returns its rows from `start` to `end`."""
        shape = (end - start, self.shape[1])

        def of(x: Stored) -> Stored:
            return Stored(shape, x.dtype, lambda a, b: x.rows(start + a, start + b))

        zero = None if self.zero is None else self.zero[start:end]
        stored = {"rows": of(self).rows}
        stored |= {"entries": of(self.entries), "scale": self.scale[start:end], "zero": zero}
        return dataclasses.replace(self, shape=shape, **stored)


class Scheme(NamedTuple):
    """The stored form of a file's layers: the parts of a layer, by the ends of tensors' names."""

    dtype: str  # in which `load` takes them as they are
    main: str  # the end of the name of the tensor that holds the entries
    needed: tuple[str, ...]  # ends of the tensors beside it, and of such as may be there
    perhaps: tuple[str, ...]
    shape: Callable[[Mapping[str, Array]], ArrayShape]  # parts -> the shape of the matrix
    matrix: Callable[[Mapping[str, Array], Any], Stored]  # parts, shape -> the matrix
    end: str = ".weight"  # end of the matrix's name


def scheme_of(table: Mapping[str, Any]) -> Scheme | None:
    """Returns how the layers of a config.json's model are stored; None: in full.

    >>> scheme_of(
    ...     {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    ... ).dtype
    'int4'
    """
    if table.get(CONFIG) is None:
        return None
    config = {}
    if isinstance(table[CONFIG], dict):
        config = table[CONFIG]
    # GPTQModel: other bits, or none, for layers by the patterns of their names.
    if config.get("dynamic") and config.get("quant_method") != "compressed-tensors":
        _refuse(_method(config), "other options for some layers (dynamic)")
    read = METHODS.get(_method(config))
    scheme = None
    if read is not None:
        scheme = read(config)
    if scheme is not None:
        return scheme
    bits = config.get("bits") or config.get("w_bit")
    if not bits and config.get("load_in_4bit"):
        bits = 4
    elif not bits and config.get("load_in_8bit"):
        bits = 8
    _refuse(
        _method(config),
        str(_form(config) or ""),
        f"{bits} bits" if bits else "",
        str(config.get("fmt") or ""),
    )


def _method(config: Mapping[str, Any]) -> str:
    return str(config.get("quant_method", "of no method that it names"))


def _form(config: Mapping[str, Any]) -> Any:
    """Returns the name of a method's form, under any key that writers give it."""
    return config.get("checkpoint_format") or config.get("format") or config.get("version")


def _of_gptq(config: Mapping[str, Any]) -> Scheme | None:
    form = str(_form(config) or "gptq").lower()
    bits = config.get("bits")
    width = config.get("group_size", -1)
    if bits not in (4, 8) or form not in ("gptq", "gptq_v2") or not isinstance(width, int):
        return None
    return _integers(_GPTQ, bits, width, less=int(form == "gptq"))


def _of_awq(config: Mapping[str, Any]) -> Scheme | None:
    bits = config.get("bits")
    if bits is None:
        bits = config.get("w_bit")
    if bits != 4 or str(_form(config) or "gemm").lower() != "gemm":
        return None
    return _integers(_AWQ, 4, config.get("group_size", config.get("q_group_size", -1)))


def _of_fp8(config: Mapping[str, Any]) -> Scheme | None:
    if config.get("fmt", "e4m3") != "e4m3":
        return None
    # DeepSeek and Qwen: blocks of rows and columns, each with a scale.
    block = config.get("weight_block_size")
    return _fp8(tuple(block) if block else None)


def _refuse(*description: str) -> Any:
    raise FamilyError(
        f"its weights are quantised ({CONFIG}): {', '.join(filter(None, description))}. {EXPECTED}"
    )


def unread(folder: Path, names: Iterable[str]) -> str:
    """Explains unread tensors if their names show a quantisation; otherwise empty.

    >>> unread(Path(), ["fc.weight"]), unread(Path(), ["fc.qweight"])[:55]
    ('', 'its weights are quantised (fc.qweight), and config.json')
    """
    shown = [name for name in names if name.endswith(ENDS)]
    beside = [f"{file} is not read. " for file in ELSEWHERE if (folder / file).is_file()]
    says = (
        f"its weights are quantised ({some(shown)}), and config.json does not say how. "
        f"{''.join(beside)}{EXPECTED}"
    )
    if shown:
        return says
    return ""


def _of_compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    groups = config.get("config_groups") or {}
    form = config.get("format")
    tables = []
    if isinstance(groups, dict):
        tables = [x if isinstance(x, dict) else {} for x in groups.values()]
    kinds = list(dict.fromkeys(map(_kind, tables)))
    if config.get("kv_cache_scheme"):
        cache = ["a quantised cache"]
    else:
        cache = []

    def are(pattern: str) -> bool:
        return bool(kinds) and not cache and all(re.fullmatch(pattern, text) for text in kinds)

    for bits in (4, 8):
        if form == "pack-quantized" and are(rf"int, {bits} bits, (channel|group)(, asymmetric)?"):
            return _integers(_PACKED, bits)
    blocks = {tuple((table.get("weights") or {}).get("block_structure") or ()) for table in tables}
    of_floats = "float, 8 bits, (tensor|channel|block)(, asymmetric)?(, activations, too)?"
    if form == "float-quantized" and len(blocks) == 1 and are(of_floats):
        return _fp8(blocks.pop() or None)
    return _refuse("compressed-tensors", str(form or ""), *kinds, *cache)


def _kind(group: dict) -> str:
    """Describes a group of matrices, such as "int, 8 bits, channel"."""
    weights = group.get("weights") or {}
    words = [
        str(weights.get("type")),
        f"{weights.get('num_bits')} bits",
        str(weights.get("strategy")),
    ]
    words += [] if weights.get("symmetric") else ["asymmetric"]
    words += ["in another order"] if weights.get("actorder") not in UNMOVED else []
    words += (
        ["activations, too"]
        if group.get("input_activations") or group.get("output_activations")
        else []
    )
    return ", ".join(words)


# --- the formats


class PackedLayout(NamedTuple):
    """A format's layout of integers [out, in] in words, and of scales and zero points [out, G]."""

    # these three: the ends of their tensors' names
    words: str
    scales: str
    zeros: str  # always in words of outputs (int32), or not packed
    more: tuple[str, ...] = ()  # further tensors that there must be
    perhaps: tuple[str, ...] = ()  # and those that may be there
    is_turned: bool = True  # whether all of them are stored [in, out] and [G, out]
    of_outputs: bool = False  # whether a word holds neighbouring outputs, not neighbouring columns
    # where each of the entries of a word lies in it; None: one after the other
    order: tuple[int, ...] | None = None

    def turned(self, x: np.ndarray) -> np.ndarray:
        """Turns a matrix as it is in a file into ours, or back."""
        if self.is_turned:
            return x.T
        return x

    def unpacked(self, words: np.ndarray, bits: int, axis: int) -> np.ndarray:
        """Unpacks the words along an axis of a file's matrix."""
        fields = _fields(words if axis else words.T, bits)
        if self.order is not None:
            fields = fields.reshape(len(fields), -1, len(self.order))[:, :, self.order].reshape(
                len(fields), -1
            )
        if axis:
            return fields
        return fields.T

    def sizes(self, parts: Mapping[str, Array], in_word: int) -> tuple[int, int, int]:
        """Returns the numbers of outputs, columns and groups of parts with matching shapes."""
        if self.is_turned:
            groups, rows = parts[self.scales].shape
            columns = parts[self.words].shape[0]
            if not self.of_outputs:
                columns *= in_word
        else:
            rows, columns = map(int, np.asarray(parts[".weight_shape"]).reshape(-1))
            groups = parts[self.scales].shape[-1]
        # The last word of an output or a column may be filled in part.
        packed_rows = math.ceil(rows / in_word)
        packed_columns = math.ceil(columns / in_word)
        zeros = parts.get(self.zeros)
        are_zeros_packed = zeros is None or zeros.dtype == np.int32
        shapes = {
            self.words: (packed_rows, columns) if self.of_outputs else (rows, packed_columns),
            self.scales: (rows, groups),
            self.zeros: (packed_rows if are_zeros_packed else rows, groups),
        }
        if self.is_turned:
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        shapes[".g_idx"] = (columns,)
        for name, expected in shapes.items():
            if name in parts and tuple(parts[name].shape) != expected:
                raise ValueError(
                    f"{name[1:]} is {list(parts[name].shape)}: expected {list(expected)}"
                )
        return rows, columns, groups


_GPTQ = PackedLayout(".qweight", ".scales", ".qzeros", (".qzeros",), (".g_idx",))
_AWQ = PackedLayout(
    ".qweight", ".scales", ".qzeros", (".qzeros",), of_outputs=True, order=AWQ_ORDER
)
_PACKED = PackedLayout(
    ".weight_packed", ".weight_scale", ".weight_zero_point", (".weight_shape",), is_turned=False
)
_PACKED = _PACKED._replace(perhaps=(_PACKED.zeros,))


def _integers(
    layout: PackedLayout, bits: int, group_size: int | None = None, less: int = 0
) -> Scheme:
    """Makes the scheme of integers in words.

    Args:
        bits: 4 or 8.
        group_size: columns of a group; -1 for all of a row, None where only the scales say it.
        less: a number that the makers subtracted from each zero point.
    """
    in_word = WORD // bits
    half = 2 ** (bits - 1)
    # They subtracted from whole words, so a field of all ones carries into the next.
    ones = np.uint32(less * sum(1 << i for i in range(0, WORD, bits)))
    row_axis = int(layout.is_turned)
    word_axis, per_word = (row_axis, in_word) if layout.of_outputs else (1 - row_axis, 1)

    def shape(parts: Mapping[str, Array]) -> tuple[int, int]:
        rows, columns, groups = layout.sizes(parts, in_word)
        if group_size is None:
            width = columns // groups
        elif group_size > 0:
            width = group_size
        else:
            width = columns
        if groups * width != columns:
            raise ValueError(f"{groups} groups of {width} for {columns} columns")
        return rows, columns

    def zero_points(zeros: np.ndarray | None, scale: np.ndarray) -> np.ndarray:
        """Returns zero points [out, G], signed; int8 unless a file's are out of its range."""
        if zeros is None:
            return np.zeros(scale.shape, np.int8)
        if zeros.dtype != np.int32:  # not packed
            return layout.turned(zeros)
        unsigned = layout.unpacked((zeros.astype(np.uint32) + ones).view(np.int32), bits, row_axis)
        return layout.turned(unsigned)[: len(scale)].astype(np.int64) - half

    def matrix(parts: Mapping[str, Array], shape: tuple[int, int]) -> Stored:
        arrays = {name: np.asarray(x) for name, x in parts.items()}
        words = arrays[layout.words]
        scale = np.ascontiguousarray(layout.turned(arrays[layout.scales]), np.float32)
        # Fields are unsigned, our entries and zero points signed: w = s (q - z) is the same where
        # both lose `half`.
        wide = zero_points(arrays.get(layout.zeros), scale)
        zero = np.ascontiguousarray(wide, np.int8)
        if (zero != wide).any():
            raise ValueError(f"zero points are {wide.min()} to {wide.max()}: expected -128 to 127")
        # [in], the group of each column
        neighbours = np.arange(shape[1]) * scale.shape[1] // shape[1]
        columns = np.asarray(arrays.get(".g_idx", neighbours), np.int64)

        def signed(start: int, stop: int) -> np.ndarray:
            # Whole words are unpacked; the rows before `start` that share one with it are cut off.
            first = start // per_word * per_word
            in_words = slice(start // per_word, -(-stop // per_word))
            fields = layout.unpacked(
                words[:, in_words] if layout.is_turned else words[in_words], bits, word_axis
            )
            fields = layout.turned(fields)
            return (
                fields[start - first : stop - first, : shape[1]].astype(np.int16) - half
            ).astype(np.int8)

        def rows(start: int, stop: int) -> np.ndarray:
            # [n, G] -> [n, in]: every column gets the scale and the zero point of its group.
            values = signed(start, stop).astype(np.float32) - zero[start:stop, columns]
            return values * scale[start:stop, columns]

        moved = bool((columns != neighbours).any())
        stored = Stored(shape, np.dtype(np.int8), signed)
        points = zero if zero.any() else None
        return Quantised(
            shape, FLOAT32, rows, stored, scale, points, bits, columns if moved else None
        )

    return Scheme(
        f"int{bits}", layout.words, (layout.scales, *layout.more), layout.perhaps, shape, matrix
    )


def _fp8(block: tuple[int, ...] | None) -> Scheme:
    def scale_of(parts: Mapping[str, Array]) -> np.ndarray:
        scale = np.asarray(next(x for name, x in parts.items() if name != ".weight"), np.float32)
        if scale.size == 1:
            return scale.reshape(1, 1)
        return scale.reshape(len(scale), -1)

    def shape(parts: Mapping[str, Array]) -> tuple[int, int]:
        rows, columns = parts[".weight"].shape
        scale, (high, wide) = scale_of(parts).shape, block or (1, columns)
        if scale != (1, 1) and scale != (-(-rows // high), -(-columns // wide)):
            raise ValueError(
                f"scales {list(scale)} of a matrix {[rows, columns]}, of blocks {[high, wide]}"
            )
        return rows, columns

    def matrix(parts: Mapping[str, Array], shape: tuple[int, int]) -> Stored:
        entries = parts[".weight"]
        scale = scale_of(parts)
        if entries.dtype.name != FP8:
            raise ValueError(f"entries of {entries.dtype.name} beside scales: expected {FP8}")
        high, wide = shape if scale.size == 1 else block or (1, shape[1])

        def rows(start: int, stop: int) -> np.ndarray:
            # [blocks of rows, blocks of columns] -> [n, in]; the last block of a row may be cut
            # off.
            of_rows = scale[np.arange(start, stop) // high]
            return (
                entries[start:stop].astype(np.float32)
                * np.repeat(of_rows, wide, axis=1)[:, : shape[1]]
            )

        return Stored(shape, FLOAT32, rows)

    return Scheme("bfloat16", ".weight", (), (".weight_scale_inv", ".weight_scale"), shape, matrix)


# What the 16 numbers of 4 bits stand for, twice over: integers from -12 to 12.
MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
MXFP4_PAIRS = np.stack([np.tile(MXFP4, 16), np.repeat(MXFP4, 16)], axis=1)  # [256, 2], of each byte


def _mxfp4() -> Scheme:
    def shape(parts: Mapping[str, Array]) -> ArrayShape:
        experts, rows, groups, size = parts["_blocks"].shape
        if tuple(parts["_scales"].shape) != (experts, rows, groups) or size != 16:
            raise ValueError(
                f"scales {list(parts['_scales'].shape)} of blocks {list(parts['_blocks'].shape)}"
            )
        # As the same matrices are stored in full: [in, out], of each expert.
        return experts, 2 * size * groups, rows

    def matrix(parts: Mapping[str, Array], shape: ArrayShape) -> Stored:
        blocks, (experts, width, rows) = parts["_blocks"], shape
        if blocks.dtype != np.uint8 or parts["_scales"].dtype != np.uint8:
            raise ValueError(
                f"blocks of {blocks.dtype}, scales of {parts['_scales'].dtype}: expected uint8"
            )
        # Half of 2^(x - 127), for entries that are twice the numbers.
        # [E, out, G]
        scale = np.ldexp(np.float32(1.0), np.asarray(parts["_scales"]).astype(np.int32) - 128)

        def entries(start: int, stop: int) -> np.ndarray:
            return MXFP4_PAIRS[blocks[start:stop]].reshape(stop - start, rows, width)

        def turned(start: int, stop: int) -> np.ndarray:
            values = (
                entries(start, stop).reshape(stop - start, rows, -1, 32)
                * scale[start:stop, :, :, None]
            )
            return values.reshape(stop - start, rows, width).swapaxes(1, 2)

        stored = Stored((experts, rows, width), np.dtype(np.int8), entries)
        return Quantised(shape, FLOAT32, turned, stored, scale, floats=True)

    return Scheme("bfloat16", "_blocks", ("_scales",), (), shape, matrix, end="")


# quant_method -> the reader of its options, which returns None for a form that is not read
METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme | None]] = {
    "awq": _of_awq,
    "compressed-tensors": _of_compressed_tensors,
    "fp8": _of_fp8,
    "gptq": _of_gptq,
    "mxfp4": lambda config: _mxfp4(),
}


def _fields(words: np.ndarray | Stored, bits: int) -> np.ndarray:
    """Splits int32 words into unsigned fields, the lowest bits first: [n, words] -> [n, fields].

    >>> _fields(np.array([[0x76543210, 0x0000000F]], np.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7, 15, 0, 0, 0, 0, 0, 0, 0]]
    """
    # Little-endian bytes of a word are its fields of 8 bits in order, and a byte's low half comes
    # first.
    content = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)  # [n, 4 words]
    if bits == 8:
        return content
    return np.stack([content & 15, content >> 4], axis=-1).reshape(len(content), -1)


# --- the files


def unpacked(
    files: list[Shard], scheme: Scheme | None, is_read: Callable[[str], bool]
) -> list[Shard]:
    """Returns files whose quantised layers are read as matrices, by the names that these have
    without quantisation.

    Args:
        is_read: whether the network has a tensor of a name. AutoGPTQ wrote biases of zeros where
            there had been none: these are left out.
    """
    if scheme is None:
        return files
    ends = (*scheme.needed, *scheme.perhaps, *IGNORED)
    # They may lie in another file than the entries.
    beside = {
        name: x
        for file in files
        for name, x in file.read({n for n in file.shapes if n.endswith(ends)})
    }
    layers = {
        name.removesuffix(scheme.main)
        for file in files
        for name in file.shapes
        if name.endswith(scheme.main)
    }
    # A bias that the network lacks is left out only if it is zero: else names differ, and that is
    # reported.
    biases = {f"{layer}.bias" for layer in layers}
    added = {name for file in files for name in file.shapes if name in biases and not is_read(name)}
    if added:
        left_out = {
            name for file in files for name, x in file.read(added) if not np.asarray(x).any()
        }
    else:
        left_out = set()
    return [_unpacked(shard, scheme, beside, left_out) for shard in files]


def _unpacked(
    shard: Shard, scheme: Scheme, beside: Mapping[str, Array], left_out: Container[str]
) -> Shard:
    def parts_of(layer: str, main: Array) -> dict[str, Array]:
        ends = (*scheme.needed, *scheme.perhaps)
        return {scheme.main: main} | {
            end: beside[layer + end] for end in ends if layer + end in beside
        }

    def attempt(name: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except (ValueError, TypeError, LookupError) as error:
            raise CheckpointError(
                f"{shard.path}: the quantised layer {name} cannot be read: {error}"
            ) from error

    shapes = {}
    layers = {}
    for name in shard.shapes:
        layer = name.removesuffix(scheme.main)
        if name in beside or name in left_out:
            continue
        if layer == name or not (
            scheme.needed or any(layer + end in beside for end in scheme.perhaps)
        ):
            shapes[name] = shard.shapes[name]
            continue
        absent = [end for end in scheme.needed if layer + end not in beside]
        if absent:
            raise CheckpointError(
                f"{shard.path}: {name} is without {absent[0][1:]}: download it again"
            )
        # Of the entries the shape is enough here; the small tensors beside them are at hand.
        parts = parts_of(layer, Stored(shard.shapes[name], np.dtype(np.int32), _unread))
        shapes[layer + scheme.end] = attempt(layer, functools.partial(scheme.shape, parts))
        layers[layer + scheme.end] = name, layer

    def load(names: Collection[str]) -> Iterator[tuple[str, Array]]:
        for name in names:
            if name not in layers:
                yield from shard.read([name])
                continue
            main, layer = layers[name]
            for _, x in shard.read([main]):
                yield (
                    name,
                    attempt(
                        layer, functools.partial(scheme.matrix, parts_of(layer, x), shapes[name])
                    ),
                )

    return Shard(shard.path, shapes, load, in_full=frozenset(shapes.keys() - layers.keys()))


def _unread(start: int, stop: int) -> np.ndarray:
    raise AssertionError("only the shape is known")
