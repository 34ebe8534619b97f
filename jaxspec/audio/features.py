"""Log-mel features for Whisper's encoder (Radford et al., arXiv 2212.04356, section 2.2).

Shapes: N samples, F frames (one for each 10 ms), M mel bands.
"""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Float
from numpy.lib.stride_tricks import sliding_window_view

RATE = 16_000  # samples per second
HOP = 160  # samples from frame to frame
SPECTRUM = 400  # samples of a frame's spectrum
FRAMES = 30 * RATE // HOP  # frames of a published model's window, 30 seconds
# frames per FFT, so that an hour of audio takes megabytes, not gigabytes
PART = 30_000


def log_mel(
    waveform: Float[np.ndarray, " N"], mels: int = 80, least: int = FRAMES
) -> Float[np.ndarray, "M F"]:
    """Computes log-mel features of a waveform, padded with silence to at least one window.

    A frame's power spectrum, under a Hann window, is summed in bands of the mel scale. Their
    logarithms are clamped to 8 below the maximum over the whole waveform. The values match
    transformers' `WhisperFeatureExtractor`.

    Args:
        waveform: 16,000 samples for each second, from -1 to 1.
        mels: bands, 80 or 128 (large-v3 and turbo).
        least: frames of a window.

    Raises:
        ValueError: the waveform is empty, has several channels, or has values that are not finite.
        TypeError: its samples are integers.

    >>> (
    ...     log_mel(np.zeros(RATE, np.float32)).shape,
    ...     log_mel(np.zeros(40 * RATE, np.float32), mels=128).shape,
    ... )
    ((80, 3000), (128, 4000))
    """
    waveform = checked(waveform)
    silence = max(0, least * HOP - len(waveform))
    padded = np.pad(np.pad(waveform, (0, silence)), SPECTRUM // 2, mode="reflect")
    # [F, 400]; like Whisper, without the last frame
    frames = sliding_window_view(padded, SPECTRUM)[::HOP][:-1]
    hann = np.hanning(SPECTRUM + 1)[:-1]  # periodic
    bands = mel_bands(mels).T  # [201, M]
    energies = []
    for start in range(0, len(frames), PART):
        spectrum = np.fft.rfft(frames[start : start + PART] * hann)  # [part, 201]
        energies.append(np.square(np.abs(spectrum)) @ bands)
    logs = np.log10(np.maximum(np.concatenate(energies), 1e-10)).T  # [M, F]
    return ((np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0).astype(np.float32)


def checked(waveform: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Returns a waveform in float32. Raises ValueError or TypeError if it is not one."""
    waveform = np.asarray(waveform)
    if waveform.dtype == object:
        raise TypeError("the waveform is no array of numbers: expected floats from -1 to 1")
    if not np.issubdtype(waveform.dtype, np.floating):
        raise TypeError(
            f"the waveform's dtype is {waveform.dtype}: expected floats from -1 to 1 (int16 / "
            "32768)"
        )
    if waveform.ndim != 1 or not len(waveform):
        raise ValueError(
            f"the waveform's shape is {waveform.shape}: expected one axis of at least 1 sample "
            "(mono)"
        )
    if not np.all(np.isfinite(waveform)):
        raise ValueError(
            "the waveform has values that are not finite: expected samples from -1 to 1"
        )
    return waveform.astype(np.float32)


@functools.lru_cache
def mel_bands(mels: int) -> Float[np.ndarray, "M 201"]:
    """Makes triangular filters of area 1, from a power spectrum to mel bands (Slaney's scale).

    >>> mel_bands(80).shape, bool((mel_bands(80).sum(axis=1) > 0).all())
    ((80, 201), True)
    """
    edges = _hertz(np.linspace(0.0, _mel(RATE / 2), mels + 2))
    frequency = np.linspace(0.0, RATE / 2, SPECTRUM // 2 + 1)[None, :]
    low, centre, right = (edges[i : mels + i, None] for i in range(3))
    triangles = np.minimum(
        (frequency - low) / (centre - low), (right - frequency) / (right - centre)
    )
    return np.maximum(triangles, 0.0) * 2.0 / (right - low)


LINEAR = 3 / 200  # mels per hertz below 1 kHz, which is 15 mels
LOGARITHMIC = 27 / np.log(6.4)  # mels above it per factor e


def _mel(hertz: float) -> float:
    """Converts a frequency of at least 1 kHz to mels on Slaney's scale.

    >>> float(_mel(1000.0)), round(float(_hertz(np.array([_mel(8000.0)]))[0]))
    (15.0, 8000)
    """
    return 15.0 + LOGARITHMIC * np.log(hertz / 1000.0)


def _hertz(mel: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Converts mels on Slaney's scale to frequencies."""
    return np.where(mel < 15.0, mel / LINEAR, 1000.0 * np.exp((mel - 15.0) / LOGARITHMIC))
