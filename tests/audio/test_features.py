"""Log-mel features against transformers' extractor."""

import numpy as np
import pytest

from jaxspec.audio import features

SECONDS = np.arange(3 * features.RATE) / features.RATE
WINDOW = features.FRAMES * features.HOP
RNG = np.random.RandomState(0)
SOUNDS = {
    "noise": RNG.uniform(-0.5, 0.5, 5 * features.RATE),
    "quiet noise": 1e-4 * RNG.normal(size=2 * features.RATE),
    "tone": 0.3 * np.sin(2 * np.pi * 440.0 * SECONDS),
    "chirp": np.sin(2 * np.pi * (100.0 + 900.0 * SECONDS) * SECONDS),
    "silence": np.zeros(features.RATE),
    "click": np.eye(1, 1000, 500)[0],
    "exactly 30 seconds": RNG.uniform(-0.5, 0.5, WINDOW),
    "43 seconds and a bit": RNG.uniform(-0.5, 0.5, 43 * features.RATE + 77),
}


@pytest.mark.needs_torch
@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("sound", SOUNDS)
def test_features_are_those_of_transformers(sound, mels):
    """Its NumPy path has float64 spectra, as ours; PyTorch's float32 ones are off by 5e-5 in bands
    next to a tone.
    """
    import transformers

    whisper = transformers.WhisperFeatureExtractor(feature_size=mels)
    waveform = SOUNDS[sound].astype(np.float32)
    ours = features.log_mel(waveform, mels)
    filled = np.pad(waveform, (0, max(0, WINDOW - len(waveform))))[None]
    by_numpy = whisper._np_extract_fbank_features(filled, "cpu")[0]
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, by_numpy, rtol=0, atol=1e-6)
    options = {"truncation": False, "padding": "longest"} if len(waveform) > WINDOW else {}
    theirs = whisper(waveform, sampling_rate=features.RATE, return_tensors="np", **options)[
        "input_features"
    ][0]
    np.testing.assert_allclose(
        ours, theirs, rtol=0, atol=1e-4 if sound in ("tone", "chirp") else 2e-5
    )


@pytest.mark.parametrize(
    ("waveform", "message"),
    [
        (np.zeros(10, np.int16), "int16: expected floats"),
        (np.zeros((2, 10)), r"\(2, 10\): expected one axis"),
        (np.zeros(0), "at least 1 sample"),
        (np.array([0.0, np.nan]), "not finite"),
    ],
)
def test_what_is_no_waveform_is_refused(waveform, message):
    with pytest.raises((TypeError, ValueError), match=message):
        features.log_mel(waveform)
