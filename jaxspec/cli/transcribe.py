"""`jaxspec transcribe`: files of sound in, text out."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxspec.audio import files
from jaxspec.audio.transcribe import Transcribing, Transcript, iterate
from jaxspec.cli import console, names
from jaxspec.cli import pair as pairs
from jaxspec.cli.options import flag, number, refuse, text
from jaxspec.cli.pair import Pair


def transcribe(
    sounds: Annotated[list[Path], typer.Argument(metavar="FILE", help="Sound: .wav files, or folders of them.")],
    target: Annotated[str, text("MODEL", "A Whisper: a folder or a hub id.")],
    draft: Annotated[str | None, text("NAME", "What drafts: a Whisper, prompt_lookup; none.", "--draft", "-d")] = None,
    gamma: Annotated[int, text("N", "Draft tokens a round.", "--gamma", "-g")] = 5,
    language: Annotated[str | None, text("NAME", "The language spoken, such as de; else each file's own.")] = None,
    task: Annotated[str | None, text("TASK", "transcribe, or translate (to English).")] = None,
    no_timestamps: Annotated[bool, flag("No times, for files of at most 30 seconds.", "--no-timestamps")] = False,
    batch: Annotated[int, number("Windows of 30 seconds decoded at a time.")] = 16,
    dtype: Annotated[str, text("DTYPE", "float32, bfloat16, int8, int4, or int8/bfloat16.")] = "float32",
    draft_dtype: Annotated[str, text("DTYPE", "The drafter's dtype, if it is another.")] = "",
    mesh: Annotated[str | None, text("MESH", "Devices to split the models over: data=2,model=4.")] = None,
    as_json: Annotated[bool, flag("Print a JSON object a file, with its segments.", "--json")] = False,
) -> None:
    """Transcribe sound with a Whisper model, faster with a drafter.

    Each file's text is printed as soon as it and those before it are done. A file that cannot be read is named, and the
    others go on; the exit status is then 1. Longer sound is read in windows of 30 seconds. A drafter with the target's
    encoder, such as distil-whisper, does not run it again.

    \b
        jaxspec transcribe talk.wav --target openai/whisper-small
        jaxspec transcribe talks --json --target openai/whisper-large-v3 \\
            --draft distil-whisper/distil-large-v3
    """
    paths = files.find(sounds)
    draft = None if draft == pairs.NONE else draft
    if draft is None:
        refuse(["draft_dtype"] if draft_dtype else [], "plain decoding (no --draft)")
    names.check_model(target, dtype)
    pair = Pair(target, draft, gamma, dtype=dtype, draft_dtype=draft_dtype, mesh=mesh)
    pairs.checked_options(pair, {})
    model, drafter = pairs.load(pair)
    shared = Transcribing(language, task, not no_timestamps)
    options: dict[str, Any] = {"drafter": drafter, "gamma": gamma}
    seconds, num_errors, err = sum(map(files.seconds_of, paths)), 0, Console(stderr=True, highlight=False)
    with console.progress(remaining=True) as bar:
        shown = bar.add_task("seconds of sound", total=round(seconds))
        advance = functools.partial(bar.advance, shown)
        results = iterate(model, paths, min(batch, len(paths)), shared, options, advance)
        for path, result in zip(paths, results, strict=True):
            if isinstance(result, Exception):
                num_errors, wrong = num_errors + 1, console.message(result).removeprefix(f"{path}: ")
                console.say(err, f"{path} is left out: {wrong}")
                report = {"error": wrong}
            else:
                report = _report(result)
            if as_json:
                console.print_json({"file": str(path), **report})
            elif isinstance(result, Transcript):
                print(*[f"{path}:"][: len(paths) > 1], result.text.strip(), sep="\n", flush=True)
    if num_errors:
        raise typer.Exit(1)


def _report(transcript: Transcript) -> dict[str, Any]:
    """Returns a transcript as plain values."""
    segments = [segment._asdict() for segment in transcript.segments]
    times = ({name: round(segment[name], 2) for name in ("start", "end")} for segment in segments)
    tokens = {"num_tokens": len(transcript.tokens)}
    return transcript._asdict() | tokens | {"segments": [a | b for a, b in zip(segments, times, strict=True)]}
