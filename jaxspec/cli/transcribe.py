"""`jaxspec transcribe`: files of sound in, text out."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from jaxspec.audio import sound_files
from jaxspec.audio.sound_files import Listed
from jaxspec.audio.transcribe import Recording, Transcribing, Transcript, checked, iterate
from jaxspec.cli import console, signals
from jaxspec.cli import pair as pairs
from jaxspec.cli.batch import ROWS_FAILED, say_interrupted
from jaxspec.cli.console import Record
from jaxspec.cli.old_names import new_manifest
from jaxspec.cli.options import (
    DraftDtype,
    Dtype,
    Mesh,
    Resume,
    flag,
    group_of,
    number,
    refuse,
    text,
)
from jaxspec.cli.pair import Pair
from jaxspec.decode.options import OPTIONS
from jaxspec.jobs.resume import Chunks, InputShard, Output, manifest_of

CHUNK = 1024  # sounds to a file of results
OF_MODELS = ("target", "draft", "gamma", "dtype", "draft_dtype")  # options that a `Pair` has, too


class TranscribeSettings(NamedTuple):
    """The options of `transcribe` that texts depend on."""

    target: Annotated[str, text("MODEL", "A Whisper: a folder or a hub id.")]
    draft: Annotated[
        str | None, text("NAME", "What drafts: a Whisper, prompt_lookup; none.", "--draft", "-d")
    ] = None
    gamma: Annotated[int, OPTIONS["gamma"]] = OPTIONS["gamma"].default
    language: Annotated[
        str | None, text("NAME", "The language spoken, such as de; else each sound's own.")
    ] = None
    task: Annotated[str | None, text("TASK", "transcribe, or translate (to English).")] = None
    no_timestamps: Annotated[
        bool, flag("No times, for sound of at most 30 seconds.", "--no-timestamps")
    ] = False
    dtype: Dtype = "float32"
    draft_dtype: DraftDtype = ""


@group_of("settings", TranscribeSettings)
def transcribe(
    sounds: Annotated[
        list[Path], typer.Argument(metavar="FILE", help=".wav files, folders of them, or .jsonl.")
    ],
    settings: TranscribeSettings,
    batch: Annotated[int, number("Windows of 30 seconds decoded at a time.")] = 16,
    mesh: Mesh = None,
    output: Annotated[
        Path | None, text("FOLDER", "Where the results are written, as JSON lines.")
    ] = None,
    resume: Resume = False,
    as_json: Annotated[
        bool, flag("Print JSON: an object a sound, or what was done.", "--json")
    ] = False,
) -> None:
    """Transcribe sound with a Whisper model, faster with a drafter.

    Each text is printed as soon as it and those before it are done. With --output it is written to
    a folder, and a job that was stopped goes on with --resume. A sound that cannot be read is
    named, and the others go on; the exit code is then 3. Longer sound is read in windows of 30
    seconds. A drafter with the target's encoder, such as distil-whisper, does not run it again. A
    line of .jsonl has a sound's path as "audio", and may have an "id" and a "language".

    \b
        jaxspec transcribe talk.wav --target openai/whisper-small
        jaxspec transcribe talks --output texts --target openai/whisper-large-v3 \\
            --draft distil-whisper/distil-large-v3
    """
    listed = sound_files.find(sounds)
    models = {name: getattr(settings, name) for name in OF_MODELS}
    pair, _ = pairs.checked(Pair(**models, mesh=mesh), {}, default=pairs.NONE)
    settings = settings._replace(draft=pair.draft)
    shared = Transcribing(settings.language, settings.task, not settings.no_timestamps)
    if output is None:
        refuse(["resume"] if resume else [], "a command without --output")
    else:
        folder = Output(output, InputShard(), CHUNK)
        folder.check(resume=resume)
    model, drafter = pairs.load(pair)
    checked(model, shared)  # before a manifest is written

    def rows(done: Container[int] = ()) -> Iterator[Record]:
        remaining = [(i, sound) for i, sound in enumerate(listed) if i not in done]
        recordings = [Recording(i, sound.path, sound.language) for i, sound in remaining]
        options: dict[str, Any] = {"drafter": drafter, "gamma": settings.gamma}
        batch_size = max(1, min(batch, len(recordings)))
        with console.progress(remaining=True) as bar:
            total = _seconds(sound for _, sound in remaining)
            task = bar.add_task("seconds of sound", total=total)
            advance = functools.partial(bar.advance, task)
            results = iterate(model, recordings, batch_size, shared, options, advance)
            yield from _rows(results, listed)

    if output is None:
        failed = _print(rows(), as_json, named=len(listed) > 1)
    else:
        with console.status("reading the models' files"):
            manifest = manifest_of(
                folder,
                pairs.described_models(pair),
                settings._asdict(),
                sounds=[_described(sound) for sound in listed],
            )
        with (
            signals.leaving_soon(say_interrupted),
            folder.begun(manifest, len(listed), resume=resume, renewed=new_manifest) as chunks,
        ):
            for row in rows(chunks):
                chunks.add(row)
            summary = _summary(chunks)
            folder.finish(summary)
        failed = summary["failed"]
        if as_json:
            console.print_json({"output": str(output)} | summary)
        else:
            counts = (
                f"{summary['sounds']:,} sounds of {summary['seconds']:,.0f} s; {failed:,} failed"
            )
            console.note(f"{output}: {counts}")
    if failed:
        raise typer.Exit(ROWS_FAILED)


def _seconds(sounds: Iterable[Listed]) -> int | None:
    """Adds up the lengths of sounds; None with a pipe, whose length is unknown until it is read."""
    lengths = [sound_files.seconds_of(sound.path) for sound in sounds]
    if None in lengths:
        return None
    return round(sum(filter(None, lengths)))


def _described(sound: Listed) -> Record:
    """Describes a sound for a job's manifest."""
    path = sound.path
    file = {"file": str(path), "bytes": sound_files.bytes_of(path)}
    return file | {"fields": dict(sound.fields), "language": sound.language, "id": sound.id}


def _rows(
    results: Iterable[tuple[int, Transcript | Exception]], listed: Sequence[Listed]
) -> Iterator[Record]:
    """Turns results into rows of plain values; reports sounds that failed."""
    for index, result in results:
        sound = listed[index]
        named = {"id": sound.id, "language": sound.language, "fields": sound.fields or None}
        row = {"number": index, "file": str(sound.path)}
        row |= {name: value for name, value in named.items() if value is not None}
        if isinstance(result, Exception):
            reason = console.message(result).removeprefix(f"{sound.path}: ")
            console.note(f"{sound.path} is left out: {reason}")
            yield row | {"error": reason}
        else:
            yield row | _report(result)


def _print(rows: Iterator[Record], as_json: bool, named: bool) -> int:
    """Prints texts in the order of their sounds; returns the number of errors."""
    waiting = dict[int, Record]()
    next_number = 0
    failed = 0
    for done in rows:
        waiting[done["number"]] = done
        while next_number in waiting:
            row = waiting.pop(next_number)
            next_number += 1
            failed += "error" in row
            if as_json:
                console.print_json(row)
            elif "text" in row:
                if named:
                    print(f"{row['file']}:")
                print(row["text"].strip(), flush=True)
    return failed


def _report(transcript: Transcript) -> Record:
    """Returns a transcript as plain values."""
    segments = [
        segment._replace(start=round(segment.start, 2), end=round(segment.end, 2))._asdict()
        for segment in transcript.segments
    ]
    counts = {"num_tokens": len(transcript.tokens)}
    return transcript._asdict() | counts | {"segments": segments}


def _summary(chunks: Chunks) -> Record:
    """Adds up the rows of a whole job."""
    counts = {"sounds": 0, "failed": 0, "seconds": 0, "num_tokens": 0, "rounds": 0}
    for row in chunks.rows():
        counts["sounds"] += 1
        if "error" in row:
            counts["failed"] += 1
        else:
            for name in ("seconds", "num_tokens", "rounds"):
                counts[name] += row[name]
    return counts
