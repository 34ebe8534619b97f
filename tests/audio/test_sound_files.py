"""Reading .wav files."""

import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from scipy.io import wavfile

from jaxspec.audio import features, sound_files

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
    waveform = sound_files.read(tmp_path / "a.wav")
    assert waveform.dtype == np.float32
    np.testing.assert_allclose(waveform, TONE, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_another_rate_is_resampled(rate, tmp_path):
    tone = 0.5 * np.sin(2 * np.pi * 200.0 * np.arange(rate) / rate)
    wavfile.write(tmp_path / "a.wav", rate, tone.astype(np.float32))
    waveform = sound_files.read(tmp_path / "a.wav")
    assert len(waveform) == features.RATE
    np.testing.assert_allclose(waveform[400:-400], TONE[400:-400], rtol=0, atol=5e-3)


UNKNOWN = 2**32 - 1
SAMPLES = np.round(TONE * 2**15).astype("<i2")
DEEP = b"".join((int(x) * 256).to_bytes(3, "little", signed=True) for x in SAMPLES)  # of 24 bits


def wav(data, *, riff=None, size=None, bits=16, kind=b"RIFF", tags=b"", after=b""):
    """A file's bytes with sizes of its own for the whole and for the samples; None: the right
    ones.
    """
    order = ">" if kind == b"RIFX" else "<"
    form = struct.pack(
        f"{order}IHHIIHH", 16, 1, 1, features.RATE, features.RATE * bits // 8, bits // 8, bits
    )
    content = b"WAVEfmt " + form + tags + b"data"
    content += struct.pack(f"{order}I", len(data) if size is None else size) + data + after
    return kind + struct.pack(f"{order}I", len(content) if riff is None else riff) + content


TAGS = b"LIST" + struct.pack("<I", 5) + b"INFOx\0"  # a chunk of odd length is padded
STREAMED = {
    "no sizes": wav(SAMPLES.tobytes(), riff=0, size=0),
    "no size of the whole": wav(SAMPLES.tobytes(), riff=0),
    "ffmpeg to a pipe": wav(SAMPLES.tobytes(), riff=UNKNOWN, size=UNKNOWN, tags=TAGS),
    "sox to a pipe": wav(SAMPLES.tobytes(), riff=2**31 - 1, size=2**31 - 37),
    "a recorder that was killed": wav(SAMPLES.tobytes(), riff=36, size=0),
    "half a sample at the end": wav(SAMPLES.tobytes() + b"\0", riff=UNKNOWN, size=UNKNOWN),
    "24 bits": wav(DEEP, bits=24),
    "24 bits to a pipe": wav(DEEP, bits=24, riff=UNKNOWN, size=UNKNOWN),
    "large numbers first": wav(SAMPLES.astype(">i2").tobytes(), kind=b"RIFX", riff=0, size=0),
    "tags after it": wav(SAMPLES.tobytes(), after=TAGS),
}


@pytest.mark.parametrize("name", STREAMED)
def test_the_length_of_a_sound_is_that_of_its_samples(name, tmp_path):
    (tmp_path / "a.wav").write_bytes(STREAMED[name])
    np.testing.assert_allclose(sound_files.read(tmp_path / "a.wav"), TONE, rtol=0, atol=2e-5)
    assert sound_files.seconds_of(tmp_path / "a.wav") == 1.0


def test_a_pipe_is_read_once(tmp_path):
    os.mkfifo(tmp_path / "a.wav")
    assert sound_files.seconds_of(tmp_path / "a.wav") is None
    content = STREAMED["ffmpeg to a pipe"]
    writer = threading.Thread(target=(tmp_path / "a.wav").write_bytes, args=(content,), daemon=True)
    writer.start()
    np.testing.assert_allclose(sound_files.read(tmp_path / "a.wav"), TONE, rtol=0, atol=2e-5)
    writer.join(timeout=10)


def test_what_has_no_samples_says_so(tmp_path):
    whole = wav(SAMPLES.tobytes())
    for content, message in (
        (wav(b"", after=TAGS), "holds no samples"),
        (whole[:44], "holds no samples"),
        (whole[:30], "it ends before its samples begin"),
        (whole[:12], "it ends before its samples begin"),
        (b"", "it begins with b''"),
        (whole[:24] + bytes(4) + whole[28:], "0 a second"),
        (whole[:12] + whole[36:], "before it says what they are"),
    ):
        (tmp_path / "a.wav").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            sound_files.read(tmp_path / "a.wav")
        assert sound_files.seconds_of(tmp_path / "a.wav") == 0.0


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "a.mp3").write_bytes(b"ID3")
    with pytest.raises(ValueError, match=r"a\.mp3 is no \.wav file: convert it, with ffmpeg"):
        sound_files.read(tmp_path / "a.mp3")
    (tmp_path / "a.wav").write_bytes(b"not sound at all")
    with pytest.raises(ValueError, match=r"a\.wav cannot be read"):
        sound_files.read(tmp_path / "a.wav")
    wavfile.write(tmp_path / "b.wav", features.RATE, np.zeros(0, np.int16))
    with pytest.raises(ValueError, match="holds no samples"):
        sound_files.read(tmp_path / "b.wav")
    with pytest.raises(FileNotFoundError):
        sound_files.read(tmp_path / "c.wav")
    with pytest.raises(ValueError, match=r"~nobody-here/a\.wav is not found"):
        sound_files.read("~nobody-here/a.wav")


def test_folders_mean_their_sound_files_in_order(tmp_path):
    for name in ("b.wav", "a.WAV", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    named = sound_files.find([tmp_path / "notes.txt", tmp_path])
    assert [listed.path.name for listed in named] == ["notes.txt", "a.WAV", "b.wav"]
    with pytest.raises(ValueError, match="empty has no sounds"):
        sound_files.find([tmp_path / "empty"])
    with pytest.raises(ValueError, match="does not exist"):
        sound_files.find([tmp_path / "none.wav"])


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{}", r"has no 'audio', but \[\]: expected"),
        ('{"audio": 3}', "has {'audio': 3}: expected"),
        ('{"audio": "a.wav", "audio_filepath": "b.wav"}', "expected .*, the path of a .wav file"),
        ('{"audio": "a.wav", "language": 7}', "has 'language': 7"),
        ('{"audio": "a.wav", "offset": 1.5}', "'offset' is not obeyed: cut the sound"),
        (
            '{"audio": "a.wav", "task": "translate"}',
            "'task' is not obeyed: it holds for all sounds",
        ),
        ('{"audio": "a.wav", "score": 1e999}', "the field 'score' cannot be written"),
        ('{"audio": "a.wav", "top_k": 5}', "'top_k' is not obeyed"),
        ('{"audio": "a.wav", "num_beams": 5}', "'num_beams' is not obeyed"),
        ('{"audio": "a.wav"', "is not JSON"),
    ],
)
def test_lines_name_sounds_or_are_refused(line, wrong, tmp_path):
    listed = tmp_path / "sounds.jsonl"
    listed.write_text('{"audio": "b.wav", "offset": 0}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"sounds\.jsonl: line 3.*" + wrong):
        sound_files.find([listed])
    listed.write_text('{"audio": "b.wav", "speaker": "x"}\n{"audio": "/c.wav", "id": 3}\n')
    first, second = sound_files.find([listed])
    assert first == sound_files.Listed(tmp_path / "b.wav", fields={"speaker": "x"})
    assert second == sound_files.Listed(Path("/c.wav"), id=3)
    listed.write_text(
        '{"audio": "b.wav", "id": null, "language": null, "task": null, "speaker": null, '
        '"num_beams": 1}\n'
    )
    assert sound_files.find([listed]) == [
        sound_files.Listed(tmp_path / "b.wav", fields={"speaker": None, "num_beams": 1})
    ]
    listed.write_text("\n")
    with pytest.raises(ValueError, match="has no sounds"):
        sound_files.find([listed])


def test_sizes_are_those_of_files_that_are_there(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    paths = [
        tmp_path / "a.wav",
        tmp_path / "b.wav",
        tmp_path / ("x" * 300),
        Path("~nobody-here/a.wav"),
        Path("a\0"),
    ]
    assert [sound_files.bytes_of(path) for path in paths] == [4, None, None, None, None]
