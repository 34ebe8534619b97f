"""`jaxspec transcribe`."""

import json

import pytest
from scipy.io import wavfile
from typer.testing import CliRunner

import jaxspec
from jaxspec.audio.features import RATE
from jaxspec.cli.main import app
from tests.audio.conftest import sound, whisper  # noqa: F401

runner = CliRunner()


def test_what_is_not_there_is_refused_before_anything_is_loaded(tmp_path):
    result = runner.invoke(app, ["transcribe", str(tmp_path / "a.wav"), "--target", "nowhere"])
    assert result.exit_code == 2 and "a.wav does not exist: expected a .wav file, or a folder" in result.output
    (tmp_path / "a.wav").touch()
    result = runner.invoke(app, ["transcribe", str(tmp_path), "--target", "nowhere"])
    assert result.exit_code == 2 and "no checkpoint at nowhere" in result.output
    result = runner.invoke(app, ["transcribe", str(tmp_path), "--target", "x", "--draft-dtype", "int8"])
    assert result.exit_code == 2 and "plain decoding (no --draft) does not read --draft-dtype" in result.output


@pytest.mark.slow
def test_files_become_text_and_segments(whisper, sound, tmp_path):  # noqa: F811
    _, target, draft = whisper
    parts = {"a.wav": sound[:40_000], "b.wav": sound[100_000:220_000]}
    for name, part in parts.items():
        wavfile.write(tmp_path / name, RATE, part)
    expected = jaxspec.transcribe(jaxspec.load(target), list(parts.values()), language="de")
    command = ["transcribe", str(tmp_path), "--target", str(target), "--language", "de"]
    result = runner.invoke(app, [*command, "--draft", str(draft), "--gamma", "3", "--json"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["file"] for line in lines] == [str(tmp_path / name) for name in parts]
    for line, transcript in zip(lines, expected, strict=True):
        assert line["text"] == transcript.text and line["language"] == "de"
        assert line["num_tokens"] == len(transcript.tokens) and line["rounds"] < transcript.rounds
        segments = [(segment["start"], segment["end"], segment["text"]) for segment in line["segments"]]
        assert segments == [(round(x.start, 2), round(x.end, 2), x.text) for x in transcript.segments]
    (tmp_path / "aa.wav").write_bytes(b"RIFF")
    result = runner.invoke(app, [*command, "--json"])
    (first, damaged, last) = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 1 and [first["text"], last["text"]] == [x.text for x in expected]
    assert "cannot be read as .wav" in damaged["error"] and "aa.wav is left out" in result.stderr
    (tmp_path / "aa.wav").unlink()
    result = runner.invoke(app, command)
    texts = [line for name, x in zip(parts, expected, strict=True) for line in (f"{tmp_path / name}:", x.text)]
    assert result.exit_code == 0 and result.stdout.splitlines() == texts
    result = runner.invoke(app, [*command, "--task", "sing"])
    assert result.exit_code == 2 and "--task is 'sing': expected one of transcribe, translate" in result.output
