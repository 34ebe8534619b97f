"""Files of sound, read as the waveforms that `features.log_mel` takes."""

from __future__ import annotations

import io
import json
import math
import struct
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.io import wavfile

from jaxspec import files
from jaxspec.audio.features import RATE
from jaxspec.decode.option_names import OTHER_NAMES, asks_for_nothing
from jaxspec.decode.options import OPTIONS

ENDING = ".wav"
PATHS = ("audio", "audio_filepath")  # fields of a line that name its sound
# Options that hold for all sounds and cannot be in a line: ours, and other libraries' names. A
# "key" is a sound's name in many lists.
OF_ALL = {"task", "timestamps", *OPTIONS, *OTHER_NAMES} - {"key"}


def read(path: str | Path) -> Float[np.ndarray, " N"]:
    """Reads a .wav file as a waveform of one channel at 16 kHz, from -1 to 1.

    Several channels are averaged. Another sampling rate is resampled by
    `scipy.signal.resample_poly`. Programs that write to a pipe leave out the length; then
    everything after the header is sound.

    Args:
        path: a file of integers of 8, 16, 24 or 32 bits, or of floats; or a pipe of one.

    Raises:
        ValueError: it is not such a file, or has no samples.
        OSError: it cannot be opened.
    """
    try:
        path = Path(path).expanduser()
    except RuntimeError as error:  # "~somebody", an unknown user
        raise ValueError(f"{path} is not found: {error}") from error
    if path.suffix.lower() != ENDING:
        raise ValueError(
            f"{path} is no {ENDING} file: convert it, with ffmpeg -i {path.name} "
            f"{path.stem}{ENDING}"
        )
    try:
        content = path.read_bytes()
        header = _header(io.BytesIO(content), len(content))
        with warnings.catch_warnings():
            # about chunks beside the sound, such as tags
            warnings.simplefilter("ignore", wavfile.WavFileWarning)
            rate, samples = wavfile.read(io.BytesIO(header.with_sizes(content)))
    except OSError:
        raise
    except Exception as error:  # the reader raises whatever a damaged header leads to
        raise ValueError(f"{path} cannot be read as {ENDING}: {error}") from error
    if not samples.size:
        raise ValueError(f"{path} holds no samples: expected at least 1")
    return _resampled(_floats(samples), rate)


class _Header(NamedTuple):
    """Describes the sound of a .wav file, as far as its bytes exist."""

    order: str  # order of bytes, as `struct` writes it: "<" or ">"
    has_wide_sizes: bool  # RF64: the sizes are in a separate chunk
    rate: int
    block: int  # bytes of one sample of all channels
    begin: int  # offset of the first sample
    size: int  # bytes of the samples, whole blocks

    def with_sizes(self, content: bytes) -> bytes:
        """Returns a file's bytes up to its last sample, with the sizes in its header corrected."""
        if self.has_wide_sizes:
            return content
        sized = bytearray(content[: self.begin + self.size])
        struct.pack_into(f"{self.order}I", sized, 4, len(sized) - 8)
        struct.pack_into(f"{self.order}I", sized, self.begin - 4, self.size)
        return bytes(sized)


def _header(file: BinaryIO, end: int) -> _Header:
    """Reads the chunks of a .wav file of `end` bytes up to its samples.

    Raises:
        ValueError: the file does not begin as a .wav file, or has no samples.
    """
    first = file.read(12)
    container = first[:4]
    if container not in (b"RIFF", b"RIFX", b"RF64") or first[8:] != b"WAVE":
        raise ValueError(
            f"it begins with {first!r}: expected b'RIFF' (or RIFX, RF64), four bytes, and b'WAVE'"
        )
    order = ">" if container == b"RIFX" else "<"
    (riff_size,) = struct.unpack(f"{order}I", first[4:8])
    rate = 0
    block = 0
    wide_size = None
    while True:
        chunk = file.read(8)  # each chunk begins with its name and size
        if len(chunk) < 8:
            break
        name, size = struct.unpack(f"{order}4sI", chunk)
        begin = file.tell()
        if name == b"data":
            if not block:
                raise ValueError("it has samples before it says what they are")
            if wide_size is not None:
                size = wide_size
            # A program that writes to a pipe cannot know the length, and writes a size of 0 or a
            # huge one. A size of 0 is real if the file ends where its header says, or has further
            # chunks up to there.
            available = end - begin
            is_unknown = size == 0 and wide_size is None and 8 + riff_size < end
            size = available if is_unknown else min(size, available)
            return _Header(
                order=order,
                has_wide_sizes=container == b"RF64",
                rate=rate,
                block=block,
                begin=begin,
                size=size - size % block,
            )
        if name in (b"ds64", b"fmt "):
            described = file.read(16)
            if len(described) < 16:
                break
            if name == b"ds64":
                _, wide_size = struct.unpack(f"{order}QQ", described)
            else:
                _, _, rate, _, block, _ = struct.unpack(f"{order}HHIIHH", described)
                if rate < 1 or block < 1:
                    raise ValueError(
                        f"its samples have {block} bytes, {rate} a second: expected at least 1"
                    )
        file.seek(begin + size + size % 2)  # chunks have an even length
    raise ValueError("it ends before its samples begin: expected a chunk 'data'")


def _floats(samples: np.ndarray) -> Float[np.ndarray, " N"]:
    """Converts samples [N] or [N, channels] of any dtype to one channel, from -1 to 1.

    >>> _floats(np.array([[-32768, 0], [16384, 16384]], np.int16)).tolist()
    [-0.5, 0.5]
    """
    if samples.dtype == np.uint8:  # 8 bits alone are unsigned
        floats = (samples.astype(np.float32) - 128.0) / 128.0
    elif np.issubdtype(samples.dtype, np.integer):
        floats = samples / -float(np.iinfo(samples.dtype).min)
    else:
        floats = samples
    if floats.ndim == 2:
        floats = floats.mean(axis=1)
    return floats.astype(np.float32)


def _resampled(waveform: Float[np.ndarray, " N"], rate: int) -> Float[np.ndarray, " n"]:
    """Returns a waveform at 16 kHz."""
    if rate == RATE:
        return waveform
    from scipy.signal import resample_poly  # takes a second to import

    common = math.gcd(rate, RATE)
    return resample_poly(waveform, RATE // common, rate // common).astype(np.float32)


class Listed(NamedTuple):
    """A sound to transcribe, with the fields of its line."""

    path: Path
    language: str | None = None  # the language spoken in it; None for the default
    id: Any = None  # the caller's name for it; None if it has none
    fields: Mapping[str, Any] = MappingProxyType({})  # the caller's own fields


def find(paths: Iterable[Path]) -> list[Listed]:
    """Lists sounds: .wav files, the sorted files of folders, or the paths in JSON lines.

    A JSON line has the path of a sound, relative to the file's folder, as "audio" (or
    "audio_filepath", as in NeMo's manifests). It may have an "id" and a "language". Other fields
    are the caller's.

    Raises:
        ValueError: a path does not exist or has no sounds, or a line is invalid.
    """
    sounds = list[Listed]()
    for path in paths:
        if path.is_dir():
            inside = [
                Listed(file) for file in sorted(path.iterdir()) if file.suffix.lower() == ENDING
            ]
        elif not path.exists():
            raise ValueError(
                f"{path} does not exist: expected a {ENDING} file, a folder of them, or JSON lines"
            )
        elif files.is_json_lines(path.name):
            inside = [_listed(where, line, path.parent) for where, line in files.read_lines(path)]
        else:
            inside = [Listed(path)]
        if not inside:
            raise ValueError(f"{path} has no sounds: expected at least one, as a {ENDING} file")
        sounds += inside
    return sounds


def _listed(where: str, line: str, folder: Path) -> Listed:
    """Reads a line.

    >>> _listed(
    ...     "a.jsonl: line 1", '{"audio": "x.wav", "language": "de", "speaker": 7}', Path("sounds")
    ... )[1:]
    ('de', None, {'speaker': 7})
    """
    row = files.json_object(line, where, optional=("language",))
    row = {name: value for name, value in row.items() if value is not None or name not in OF_ALL}
    paths = {name: row.pop(name) for name in PATHS if name in row}
    path = next(iter(paths.values()), None)
    if len(paths) != 1 or not isinstance(path, str):
        got = paths or f"no {PATHS[0]!r}, but {sorted(row)}"
        raise ValueError(
            f'{where} has {got}: expected {{"audio": "..."}}, the path of a {ENDING} file'
        )
    if row.get("offset"):  # 0 is the whole sound
        raise ValueError(
            f"{where}: the field 'offset' is not obeyed: cut the sound, and name the part's file"
        )
    for name in [name for name in row if name in OF_ALL]:
        if name not in OTHER_NAMES or not asks_for_nothing(name, row[name]):
            raise ValueError(
                f"{where}: the field {name!r} is not obeyed: it holds for all sounds: leave it out"
            )
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:  # 1e999 is read as infinity, which JSON has not
            raise ValueError(f"{where}: the field {name!r} cannot be written ({error})") from None
    return Listed(folder / path, row.pop("language", None), row.pop("id", None), row)


def seconds_of(path: Path) -> float | None:
    """Returns the seconds of a .wav file by its header; 0 if it cannot be read, None for a pipe."""
    try:
        if path.exists() and not path.is_file():
            return None  # reading a pipe would consume it
        with path.open("rb") as file:
            header = _header(file, path.stat().st_size)
        return header.size / header.block / header.rate
    except Exception:  # `read` reports the error
        return 0.0


def bytes_of(path: Path) -> int | None:
    """Returns the size of a file; None if it cannot be read."""
    try:
        return path.expanduser().stat().st_size
    except (OSError, ValueError, RuntimeError):
        # such as a name that is too long; `read` reports the error
        return None
