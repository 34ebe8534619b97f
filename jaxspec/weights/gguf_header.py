"""The header of a GGUF file: its metadata, and where its tensors lie.

    magic, version, counts | metadata: key, type, value | tensors: name, shape, type, offset | data,
    aligned

It is read here, since the `gguf` package's own reader makes several NumPy arrays for each of a
vocabulary's tokens: minutes and gigabytes for 262,144.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.weights.tensors import CheckpointError, damaged

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Codes of struct, by the format's number.
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
WIDTHS = {number: struct.calcsize(f"<{form}") for number, form in SCALARS.items()}
STRING = 8
ARRAY = 9
MOST_AXES = 4
PART = "-{:05}-of-{:05}.gguf"  # how the name of a part of a split file ends; counted from 1


class TensorEntry(NamedTuple):
    """The place of a tensor."""

    path: Path
    shape: tuple[int, ...]  # rows first
    kind: int  # the number of its type
    offset: int  # from the file's beginning, in bytes


class Header(NamedTuple):
    """The part of a file before its data; of a split file, of all its parts together."""

    metadata: dict[str, Any]  # an array is a list
    tensors: dict[str, TensorEntry]


def is_file(path: Path) -> bool:
    """Tells whether a path is a file that begins with the format's magic bytes, or is called
    .gguf.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC or path.suffix == ".gguf"


def name_of(path: Path) -> str:
    """Returns the name of the model in a file, without the number of a part.

    >>> name_of(Path("folder/model-00001-of-00003.gguf"))
    'model'
    """
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)


def read(path: Path) -> Header:
    """Reads the header of a file; for a part of a split file, the headers of all parts, which lie
    beside it.
    """
    header = _read(path)
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or count < 2:
        return header
    number = header.metadata.get("split.no", 0) + 1
    ending = PART.format(number, count)
    which_part = f"{path} is part {number} of {count} of a model"
    if not path.name.endswith(ending):
        raise CheckpointError(
            f"{which_part}: its name must end in {ending}, so that the others are found beside it"
        )
    paths = [
        path.with_name(path.name.removesuffix(ending) + PART.format(i + 1, count))
        for i in range(count)
    ]
    missing = [file.name for file in paths if not file.is_file()]
    if missing:
        absent = ", ".join(missing)
        raise CheckpointError(
            f"{which_part}, and beside it there is no {absent}: put all parts into one folder"
        )
    parts = [header if file == path else _read(file) for file in paths]
    # Each part has its own tensors and offsets; only the first has the metadata of the model.
    tensors: dict[str, TensorEntry] = {}
    for i, (name, piece) in enumerate(zip(paths, parts, strict=True)):
        if (piece.metadata.get("split.no"), piece.metadata.get("split.count")) != (i, count):
            raise CheckpointError(
                f"{name} is not part {i + 1} of {count}, as its name says: download it again"
            )
        both = tensors.keys() & piece.tensors.keys()
        if both:
            raise CheckpointError(
                f"{name} and a part before it both hold {min(both)}: they are not of the same model"
            )
        tensors |= piece.tensors
    expected = parts[0].metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise CheckpointError(
            f"{which_part}, whose parts hold {len(tensors)} tensors, expected {expected}"
        )
    return Header(parts[0].metadata, tensors)


def _read(path: Path) -> Header:
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return _header(path, content)
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise damaged(path, error) from error


class _Cursor:
    """Takes values from a file, one after the other. Numbers are little-endian."""

    def __init__(self, content: mmap.mmap, offset: int):
        self.content = content
        self.offset = offset

    def take(self, form: str) -> Any:
        """Takes one number, or several in a tuple."""
        values: tuple[Any, ...] = struct.unpack_from(f"<{form}", self.content, self.offset)
        self.offset += struct.calcsize(f"<{form}")
        if len(values) == 1:
            return values[0]
        return values

    def block(self, count: int, name: str) -> bytes:
        """Takes the bytes of something that has a name."""
        start = self.offset
        self.offset = self.offset + count
        if self.offset > len(self.content):
            raise ValueError(f"it ends within {name}")
        return self.content[start : self.offset]

    def text(self) -> str:
        """Takes a text: its length in 64 bits, and its bytes."""
        return self.block(self.take("Q"), "a text").decode()

    def value(self, number: int) -> Any:
        """Takes a value of the format's type of that number."""
        if number == STRING:
            return self.text()
        if number != ARRAY:
            scalar = self.take(SCALARS[number])
            # 1e-06, not 9.99999997e-07
            if SCALARS[number] == "f":
                return float(str(np.float32(scalar)))
            return scalar
        number, count = self.take("IQ")
        if number == STRING:
            return [self.text() for _ in range(count)]
        return list(
            struct.unpack(
                f"<{count}{SCALARS[number]}", self.block(count * WIDTHS[number], "an array")
            )
        )


def _header(path: Path, content: mmap.mmap) -> Header:
    if content[:4] != MAGIC:
        raise ValueError("it is not a GGUF file")
    cursor = _Cursor(content, 4)
    take = cursor.take
    text = cursor.text
    version = take("I")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}: expected one of {VERSIONS}")
    tensors, keys = take("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = text()
        number = take("I")
        if number not in (STRING, ARRAY) and number not in WIDTHS:
            raise ValueError(f"{key!r} is of an unknown type, {number}")
        try:
            metadata[key] = cursor.value(number)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{key!r} is an array of an unknown type ({error})") from error
    entries: dict[str, TensorEntry] = {}
    for _ in range(tensors):
        name = text()
        axes = take("I")
        if not 1 <= axes <= MOST_AXES:
            raise ValueError(f"tensor {name!r} has {axes} axes")
        # Sizes are those of the innermost axis first, the other way round than ours.
        shape = tuple(take("Q") for _ in range(axes))[::-1]
        if name in entries:
            raise ValueError(f"it holds {name!r} twice")
        entries[name] = TensorEntry(path, shape, *take("IQ"))
    step = metadata.get("general.alignment", 32)
    if not isinstance(step, int) or step < 1:
        raise ValueError(f"its alignment is {step!r}")
    # Offsets count from where the data begin, which is aligned.
    data = -(-cursor.offset // step) * step
    return Header(
        metadata, {name: x._replace(offset=data + x.offset) for name, x in entries.items()}
    )
