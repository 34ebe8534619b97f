"""Files of sound, read as the waveforms that `features.log_mel` takes."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
from jaxtyping import Float
from scipy.io import wavfile

from jaxspec.audio.features import RATE

ENDING = ".wav"


def read(path: str | Path) -> Float[np.ndarray, " N"]:
    """Reads a .wav file as a waveform of one channel at 16 kHz, from -1 to 1.

    Several channels are averaged. Another sampling rate is resampled by `scipy.signal.resample_poly`.

    Args:
        path: a file of integers of 8, 16, 24 or 32 bits, or of floats.

    Raises:
        ValueError: it is no such file, or holds no samples.
        OSError: it cannot be opened.
    """
    path = Path(path).expanduser()
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


def find(paths: list[Path]) -> list[Path]:
    """Lists the .wav files that paths mean: a folder's, in the order of their names, or the file itself.

    Raises:
        ValueError: a path does not exist, or a folder holds none.
    """
    files = list[Path]()
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix.lower() == ENDING)
            if not inside:
                raise ValueError(f"{path} has no {ENDING} files: expected at least 1")
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise ValueError(f"{path} does not exist: expected a {ENDING} file, or a folder of them")
    return files


def seconds_of(path: Path) -> float:
    """Returns the length of a .wav file in seconds, by its header; 0 if it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)
            rate, samples = wavfile.read(path, mmap=True)
        return len(samples) / rate
    except Exception:  # `read` says what is wrong
        return 0.0
