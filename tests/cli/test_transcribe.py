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
    assert (
        result.exit_code == 2
        and "a.wav does not exist: expected a .wav file, a folder" in result.output
    )
    (tmp_path / "a.wav").touch()
    result = runner.invoke(app, ["transcribe", str(tmp_path), "--target", "nowhere"])
    assert result.exit_code == 2 and "no checkpoint at nowhere" in result.output
    result = runner.invoke(
        app, ["transcribe", str(tmp_path), "--target", "a/hub-id", "--draft-dtype", "int8"]
    )
    assert (
        result.exit_code == 2
        and "plain decoding (no --draft) does not read --draft-dtype" in result.output
    )


@pytest.mark.needs_torch
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
        segments = [
            (segment["start"], segment["end"], segment["text"]) for segment in line["segments"]
        ]
        assert segments == [
            (round(x.start, 2), round(x.end, 2), x.text) for x in transcript.segments
        ]
    (tmp_path / "aa.wav").write_bytes(b"RIFF")
    result = runner.invoke(app, [*command, "--json"])
    (first, damaged, last) = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 3 and [first["text"], last["text"]] == [x.text for x in expected]
    assert "cannot be read as .wav" in damaged["error"] and "aa.wav is left out" in result.stderr
    (tmp_path / "aa.wav").unlink()
    result = runner.invoke(app, command)
    texts = [
        line
        for name, x in zip(parts, expected, strict=True)
        for line in (f"{tmp_path / name}:", x.text)
    ]
    assert result.exit_code == 0 and result.stdout.splitlines() == texts
    result = runner.invoke(app, [*command, "--task", "sing"])
    assert (
        result.exit_code == 2
        and "--task is 'sing': expected one of transcribe, translate" in result.output
    )


@pytest.mark.needs_torch
@pytest.mark.slow
def test_a_job_of_sounds_goes_on_where_it_was(whisper, sound, tmp_path):  # noqa: F811
    _, target, draft = whisper
    parts = {
        "a.wav": sound[:40_000],
        "b.wav": sound[100_000:330_000],
        "c.wav": sound[50_000:90_000],
    }
    for name, part in parts.items():
        wavfile.write(tmp_path / name, RATE, part)
    lines = [
        {"audio": "b.wav", "id": "long", "speaker": 7},
        {"audio_filepath": "a.wav", "language": "fr"},
        {"audio": "none.wav"},
        {"audio": "c.wav", "language": "xx"},
        {"audio": "c.wav"},
    ]
    listed, output = tmp_path / "sounds.jsonl", tmp_path / "texts"
    listed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sounds = [str(listed), str(tmp_path / "c.wav")]
    command = [
        "transcribe",
        *sounds,
        "--target",
        str(target),
        "--language",
        "de",
        "--draft",
        str(draft),
    ]
    result = runner.invoke(app, [*command, "--json"])
    printed = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 3 and [row["number"] for row in printed] == list(range(6))
    model = jaxspec.load(target)
    (german, other), (french,) = (
        jaxspec.transcribe(model, [parts[name] for name in group], language=language)
        for group, language in ((["b.wav", "c.wav"], "de"), (["a.wav"], "fr"))
    )
    assert [row.get("text") for row in printed] == [
        german.text,
        french.text,
        None,
        None,
        *[other.text] * 2,
    ]
    assert (printed[0]["id"], printed[0]["fields"], printed[1]["language"]) == (
        "long",
        {"speaker": 7},
        "fr",
    )
    assert "No such file" in printed[2]["error"] and "language is 'xx'" in printed[3]["error"]

    result = runner.invoke(app, [*command, "--task", "sing", "--output", str(output)])
    assert result.exit_code == 2 and not output.exists()
    result = runner.invoke(app, [*command, "--output", str(output), "--json"])
    assert result.exit_code == 3, result.output
    (part,) = output.glob("part-*")
    summary, whole = json.loads(result.stdout), part.read_text()
    assert [json.loads(line) for line in whole.splitlines()] == printed
    assert summary == {"output": str(output)} | json.loads(
        (output / "summary-00000-of-00001.json").read_text()
    )
    assert (summary["sounds"], summary["failed"]) == (6, 2)

    # What a kill leaves: some rows in the journal, and half of one.
    rows = [f"[{line}]\n" for line in whole.splitlines()]
    (output / "journal-00000-of-00001-000000").write_text(rows[0] + rows[3] + rows[4][:30])
    part.unlink()
    assert "holds a job already" in runner.invoke(app, [*command, "--output", str(output)]).output
    other = runner.invoke(app, [*command, "--output", str(output), "--resume", "--gamma", "2"])
    assert (
        other.exit_code == 2
        and "is of another job (options: gamma is 5 there and 2 here)" in other.output
    )
    result = runner.invoke(app, [*command, "--output", str(output), "--resume"])
    assert result.exit_code == 3 and "6 sounds of" in result.stderr and part.read_text() == whole
    # What failed is not tried again; a sound that has changed is named, and is for another job.
    wavfile.write(tmp_path / "none.wav", RATE, parts["a.wav"])
    other = runner.invoke(app, [*command, "--output", str(output), "--resume"])
    changed = "is of another job (sounds: number 2: bytes is None there and 1600"
    assert other.exit_code == 2 and changed in other.output and part.read_text() == whole
    (tmp_path / "none.wav").unlink()
    result = runner.invoke(app, [*command, "--resume"])
    assert (
        result.exit_code == 2
        and "a command without --output does not read --resume" in result.output
    )
