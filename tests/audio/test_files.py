"""Reading .wav files."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import wavfile

from jaxspec.audio import features, files

TONE = 0.5 * np.sin(2 * np.pi * 200.0 * np.arange(features.RATE) / features.RATE)


@pytest.mark.parametrize(
    ("samples", "tolerance"),
    [
        (np.round(TONE * 2**15).astype(np.int16), 2e-5),
        (np.round(TONE * 2**31).astype(np.int32), 1e-7),
        (np.round(TONE * 128 + 128).astype(np.uint8), 4e-3),
        (TONE.astype(np.float32), 1e-7),
        (TONE, 1e-7),
        (np.stack([2 * TONE, 0 * TONE], axis=1).astype(np.float32), 1e-7),
    ],
    ids=["int16", "int32", "uint8", "float32", "float64", "stereo"],
)
def test_every_kind_of_samples_is_read_as_one_waveform(samples, tolerance, tmp_path):
    wavfile.write(tmp_path / "a.wav", features.RATE, samples)
    waveform = files.read(tmp_path / "a.wav")
    assert waveform.dtype == np.float32
    np.testing.assert_allclose(waveform, TONE, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_another_rate_is_resampled(rate, tmp_path):
    tone = 0.5 * np.sin(2 * np.pi * 200.0 * np.arange(rate) / rate)
    wavfile.write(tmp_path / "a.wav", rate, tone.astype(np.float32))
    waveform = files.read(tmp_path / "a.wav")
    assert len(waveform) == features.RATE
    np.testing.assert_allclose(waveform[400:-400], TONE[400:-400], rtol=0, atol=5e-3)


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "a.mp3").write_bytes(b"ID3")
    with pytest.raises(ValueError, match=r"a\.mp3 is no \.wav file: convert it, with ffmpeg"):
        files.read(tmp_path / "a.mp3")
    (tmp_path / "a.wav").write_bytes(b"not sound at all")
    with pytest.raises(ValueError, match=r"a\.wav cannot be read"):
        files.read(tmp_path / "a.wav")
    wavfile.write(tmp_path / "b.wav", features.RATE, np.zeros(0, np.int16))
    with pytest.raises(ValueError, match="holds no samples"):
        files.read(tmp_path / "b.wav")
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "c.wav")
    with pytest.raises(ValueError, match=r"~nobody-here/a\.wav is not found"):
        files.read("~nobody-here/a.wav")


def test_folders_mean_their_sound_files_in_order(tmp_path):
    for name in ("b.wav", "a.WAV", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    named = files.find([tmp_path / "notes.txt", tmp_path])
    assert [listed.path.name for listed in named] == ["notes.txt", "a.WAV", "b.wav"]
    with pytest.raises(ValueError, match="empty has no sounds"):
        files.find([tmp_path / "empty"])
    with pytest.raises(ValueError, match="does not exist"):
        files.find([tmp_path / "none.wav"])


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{}", r"has no 'audio', but \[\]: expected"),
        ('{"audio": 3}', "has {'audio': 3}: expected"),
        ('{"audio": "a.wav", "audio_filepath": "b.wav"}', "expected .*, the path of a .wav file"),
        ('{"audio": "a.wav", "language": 7}', "has 'language': 7"),
        ('{"audio": "a.wav", "offset": 1.5}', "'offset' is not obeyed: cut the sound"),
        ('{"audio": "a.wav", "task": "translate"}', "'task' is not obeyed: it holds for all sounds"),
        ('{"audio": "a.wav", "score": 1e999}', "the field 'score' cannot be written"),
        ('{"audio": "a.wav", "top_k": 5}', "'top_k' is not obeyed"),
        ('{"audio": "a.wav", "num_beams": 5}', "'num_beams' is not obeyed"),
        ('{"audio": "a.wav"', "is no JSON"),
    ],
)
def test_lines_name_sounds_or_are_refused(line, wrong, tmp_path):
    listed = tmp_path / "sounds.jsonl"
    listed.write_text('{"audio": "b.wav", "offset": 0}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"sounds\.jsonl: line 3.*" + wrong):
        files.find([listed])
    listed.write_text('{"audio": "b.wav", "speaker": "x"}\n{"audio": "/c.wav", "id": 3}\n')
    first, second = files.find([listed])
    assert first == files.Listed(tmp_path / "b.wav", fields={"speaker": "x"})
    assert second == files.Listed(Path("/c.wav"), id=3)
    listed.write_text(
        '{"audio": "b.wav", "id": null, "language": null, "task": null, "speaker": null, "num_beams": 1}\n'
    )
    assert files.find([listed]) == [files.Listed(tmp_path / "b.wav", fields={"speaker": None, "num_beams": 1})]
    listed.write_text("\n")
    with pytest.raises(ValueError, match="has no sounds"):
        files.find([listed])


def test_sizes_are_those_of_files_that_are_there(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    paths = [tmp_path / "a.wav", tmp_path / "b.wav", tmp_path / ("x" * 300), Path("~nobody-here/a.wav"), Path("a\0")]
    assert [files.bytes_of(path) for path in paths] == [4, None, None, None, None]
