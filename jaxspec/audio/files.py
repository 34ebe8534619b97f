"""Files of sound, read as the waveforms that `features.log_mel` takes."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.io import wavfile

from jaxspec import files
from jaxspec.audio.features import RATE
from jaxspec.decode.option_names import OTHER_NAMES, asks_for_nothing
from jaxspec.sampling.params import NAMES

ENDING = ".wav"
PATHS = ("audio", "audio_filepath")  # fields of a line that name its sound
# Options of all sounds, which a line cannot have: ours, and other libraries' names.
OF_ALL = {"task", "timestamps", "drafter", "gamma", "rule", "policy", "max_new_tokens", "stop", *NAMES, *OTHER_NAMES}


def read(path: str | Path) -> Float[np.ndarray, " N"]:
    """Reads a .wav file as a waveform of one channel at 16 kHz, from -1 to 1.

    Several channels are averaged. Another sampling rate is resampled by `scipy.signal.resample_poly`.

    Args:
        path: a file of integers of 8, 16, 24 or 32 bits, or of floats.

    Raises:
        ValueError: it is no such file, or holds no samples.
        OSError: it cannot be opened.
    """
    try:
        path = Path(path).expanduser()
    except RuntimeError as error:  # of "~somebody"
        raise ValueError(f"{path} is not found: {error}") from error
    if path.suffix.lower() != ENDING:
        raise ValueError(f"{path} is no {ENDING} file: convert it, with ffmpeg -i {path.name} {path.stem}{ENDING}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # of chunks beside the sound, such as tags
            rate, samples = wavfile.read(path)
    except OSError:
        raise
    except Exception as error:  # the reader raises whatever a damaged header leads to
        raise ValueError(f"{path} cannot be read as {ENDING}: {error}") from error
    if not samples.size:
        raise ValueError(f"{path} holds no samples: expected at least 1")
    return _resampled(_floats(samples), rate)


def _floats(samples: np.ndarray) -> Float[np.ndarray, " N"]:
    """Returns samples [N] or [N, channels] of any type as one channel, from -1 to 1.

    >>> _floats(np.array([[-32768, 0], [16384, 16384]], np.int16)).tolist()
    [-0.5, 0.5]
    """
    if samples.dtype == np.uint8:  # 8 bits alone are unsigned
        floats = (samples.astype(np.float32) - 128.0) / 128.0
    elif np.issubdtype(samples.dtype, np.integer):
        floats = samples / -float(np.iinfo(samples.dtype).min)
    else:
        floats = samples
    return (floats if floats.ndim == 1 else floats.mean(axis=1)).astype(np.float32)


def _resampled(waveform: Float[np.ndarray, " N"], rate: int) -> Float[np.ndarray, " n"]:
    """Returns a waveform at 16 kHz."""
    if rate == RATE:
        return waveform
    from scipy.signal import resample_poly  # takes a second to import

    common = math.gcd(rate, RATE)
    return resample_poly(waveform, RATE // common, rate // common).astype(np.float32)


class Listed(NamedTuple):
    """A sound of those to transcribe."""

    path: Path
    language: str | None = None  # the language spoken in it; None for that of all
    id: Any = None  # the caller's name for it; None if it has none
    fields: Mapping[str, Any] = MappingProxyType({})  # the caller's own fields


def find(paths: Iterable[Path]) -> list[Listed]:
    """Lists the sounds that paths mean: a .wav file, a folder's, in the order of their names, or those that lines name.

    A line of a file of JSON lines is an object with the path of a sound as "audio" (or, as NeMo's manifests have it,
    "audio_filepath"), from the file's folder on. It may have an "id" and a "language". Other fields are the caller's.

    Raises:
        ValueError: a path does not exist, a folder or a file holds none, or a line is wrong.
    """
    sounds = list[Listed]()
    for path in paths:
        if path.is_dir():
            inside = [Listed(file) for file in sorted(path.iterdir()) if file.suffix.lower() == ENDING]
        elif not path.exists():
            raise ValueError(f"{path} does not exist: expected a {ENDING} file, a folder of them, or JSON lines")
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

    >>> _listed("a.jsonl: line 1", '{"audio": "x.wav", "language": "de", "speaker": 7}', Path("sounds"))[1:]
    ('de', None, {'speaker': 7})
    """
    row = files.json_object(line, where, optional=("language",))
    row = {name: value for name, value in row.items() if value is not None or name not in OF_ALL}
    paths = {name: row.pop(name) for name in PATHS if name in row}
    if len(paths) != 1 or not isinstance(path := next(iter(paths.values())), str):
        got = paths or f"no {PATHS[0]!r}, but {sorted(row)}"
        raise ValueError(f'{where} has {got}: expected {{"audio": "..."}}, the path of a {ENDING} file')
    if row.get("offset"):  # 0 is the whole sound
        raise ValueError(f"{where}: the field 'offset' is not obeyed: cut the sound, and name the part's file")
    for name in [name for name in row if name in OF_ALL]:
        if name not in OTHER_NAMES or not asks_for_nothing(name, row[name]):
            raise ValueError(f"{where}: the field {name!r} is not obeyed: it holds for all sounds: leave it out")
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:  # 1e999 is read as infinity, which JSON has not
            raise ValueError(f"{where}: the field {name!r} cannot be written ({error})") from None
    return Listed(folder / path, row.pop("language", None), row.pop("id", None), row)


def seconds_of(path: Path) -> float:
    """Returns the length of a .wav file in seconds, by its header; 0 if it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)
            rate, samples = wavfile.read(path, mmap=True)
        return len(samples) / rate
    except Exception:  # `read` says what is wrong
        return 0.0


def bytes_of(path: Path) -> int | None:
    """Returns the size of a file; None if there is none that can be read."""
    try:
        return path.expanduser().stat().st_size
    except (OSError, ValueError, RuntimeError):  # such as a name that is too long; `read` says what is wrong
        return None
