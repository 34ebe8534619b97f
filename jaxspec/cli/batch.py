"""`jaxspec batch`: a file of prompts in, chunks of texts out."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import typer
from rich.console import Console
from rich.text import Text

from jaxspec import progress as bars
from jaxspec.cli import console, names, pair
from jaxspec.cli.generate import COST_REPEATS
from jaxspec.cli.main import INTERRUPTED, TERMINATED, leave
from jaxspec.cli.options import (
    PREFIX,
    TARGET,
    ChatTemplate,
    Draft,
    DraftDType,
    DType,
    Gamma,
    MeshShape,
    Policy,
    Rule,
    Stop,
    flag,
    group_of,
    number,
    sampling_options,
    seed_number,
    text,
)
from jaxspec.core import Model, State, token_rows
from jaxspec.decode import inputs
from jaxspec.decode.request import Prepared, prepare
from jaxspec.jobs import Completion, Progress, generate_many, openai
from jaxspec.jobs.chunks import Chunks
from jaxspec.jobs.files import Output, Shard, Source, Survey, check_paths, manifest_of
from jaxspec.jobs.prompts import Line, Reader, limits_of
from jaxspec.jobs.slots import Row, Slots

DESCRIBED = (  # options that a job's results depend on
    *("gamma", "policy", "rule", "max_new_tokens", "max_prompt_tokens", "too_long", "stop", "seed"),
    *("dtype", "draft_dtype", "tokens", "log_probs", "top_log_probs", "num_samples", "openai"),
)


ROWS_FAILED = 3  # exit code: some prompts have errors
PATIENCE = 0.5  # seconds in which Ctrl-C may be answered in an orderly way
GO_ON = "give the same command with --resume to go on; the rows that are done are kept"


class Settings(NamedTuple):
    """The options of `batch`, but for those of sampling."""

    input: Annotated[list[Path], text("FILE", "Prompts, one a line, or .jsonl; also .gz; repeatable.")]
    output: Annotated[Path, text("FOLDER", "Where the results are written.")]
    target: Annotated[str, text("MODEL", "A shipped model, a folder or a hub id.")] = TARGET
    draft: Draft = None
    gamma: Gamma = 3
    policy: Policy = ""
    rule: Rule = ""
    field: Annotated[str, text("NAME", "The field of a JSON line that has the prompt.")] = "prompt"
    chat: Annotated[bool, flag("Use the model's chat template.", "--chat")] = False
    prefix: Annotated[str | None, text("TEXT|FILE", PREFIX)] = None
    slots: Annotated[int, number("Rows decoded at a time.")] = 16
    max_new_tokens: Annotated[int, number("Most new tokens of each prompt.", "--max-new-tokens", "-n")] = 128
    max_prompt_tokens: Annotated[int | None, number("Longest prompt; by default what models read.")] = None
    too_long: Annotated[str, text("WHAT", "What becomes of longer prompts: error, truncate, skip.")] = "error"
    stop: Stop = None
    chunk: Annotated[int, number("Lines of the input to a file of results.")] = 1024
    shard: Annotated[int, number("Which part of the input to decode.", least=0)] = 0
    num_shards: Annotated[int, number("Parts that the input is decoded in.")] = 1
    log_probs: Annotated[bool, flag("Write log probabilities of tokens.", "--log-probs")] = False
    top_log_probs: Annotated[int | None, number("Also write the N best tokens at each place.", least=0)] = None
    tokens: Annotated[bool, flag("Write ids of tokens.", "--tokens")] = False
    num_samples: Annotated[int, number("Texts of each prompt; they need a temperature.")] = 1
    openai: Annotated[bool, flag("Write lines in the form of OpenAI's batches.", "--openai")] = False
    seed: Annotated[int, seed_number("Seed of sampling.")] = 0
    dtype: DType = "float32"
    draft_dtype: DraftDType = ""
    mesh: MeshShape = None
    chat_template: ChatTemplate = None


@group_of("settings", Settings)
@sampling_options
def batch(
    settings: Settings,
    resume: Annotated[bool, flag("Go on with the job that the folder holds.", "--resume")] = False,
    max_errors: Annotated[int | None, number("End the job when more than N texts are errors.", least=0)] = None,
    as_json: Annotated[bool, flag("Print what was done as JSON.", "--json")] = False,
    *,
    sampling: dict[str, Any],
) -> None:
    """Decode files of prompts, many prompts at a time.

    Each prompt has a line in the output, with its text or its error; where some have errors the exit code is 3. A job
    that was stopped, or killed, goes on with the same command and --resume, decodes no row again that was done, and
    writes what it would have written.

    \b
        jaxspec batch --input prompts.jsonl --output results
        jaxspec batch --input prompts.jsonl --output results --resume
    """
    if settings.shard >= settings.num_shards:
        raise ValueError(
            f"--shard is {settings.shard} of {settings.num_shards}: expected 0 to {settings.num_shards - 1}"
        )
    check_paths(settings.input)
    draft = pair.draft_name(settings)
    generation = pair.checked_options(settings, draft, sampling)
    generation |= {name: getattr(settings, name) for name in ("log_probs", "top_log_probs", "num_samples")}
    shard = Shard(settings.shard, settings.num_shards)
    shared = None if settings.prefix is None else pair.prefix_text(settings.prefix)
    system = shared if settings.chat else None
    source = Source(settings.input, settings.field, settings.chat, shard, system)
    output = Output(settings.output, shard, settings.chunk)
    err = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_leaving_soon(err))
        if output.manifest.exists():
            stack.enter_context(output.locked())
        output.check(resume=resume)
        with err.status("looking through the lines"):
            survey = source.survey()
        total = source.count(survey.lines)
        if survey.twice and settings.openai:
            raise ValueError(f"{survey.twice}: expected each custom_id once")
        if survey.twice:
            err.print(Text(survey.twice, "yellow"), soft_wrap=True)
        is_exact = generation["rule"] is None or generation["rule"].exact
        if not is_exact:
            said = f"The rule {settings.rule} is inexact: the texts need not have the target's distribution."
            err.print(Text(said, "yellow"), soft_wrap=True)
        with err.status("loading the models"):
            target, drafter = pair.load(settings, draft)
            if settings.chat:
                inputs.check_template(target)
            prefix = None if shared is None else pair.read_prefix(target, drafter, shared, settings.chat)
        generation |= {"drafter": drafter, "prefix": prefix}
        run = functools.partial(
            generate_many,
            target,
            slots=settings.slots,
            stop=settings.stop or (),
            max_prompt_tokens=settings.max_prompt_tokens,
            too_long=settings.too_long,
            on_error="yield",
            varying=survey.varying,
        )
        run([], **generation)  # refuses what is wrong while there is no manifest yet
        is_new = not output.manifest.exists()
        if is_new:
            with err.status("looking for a line that can be decoded"):
                _check_some_line(settings, source._replace(shard=Shard()).prompts(), survey, target, generation)
            stack.enter_context(output.locked())
            output.check(resume=resume)  # another process may have been faster
        models = {"target": (settings.target, target)} | ({} if drafter is None else {"draft": (str(draft), drafter)})
        described = {name: getattr(settings, name) for name in DESCRIBED} | sampling | {"prefix": shared}
        output.begin(manifest_of(source, output, models, described))
        if settings.policy.partition("=")[0] == "adaptive":
            from jaxspec.analysis.cost import agreement

            costs = output.costs(lambda: _costs(settings, source.prompts(), target, generation, err))
            is_sampled = bool(sampling.get("temperature"))
            together = agreement("slots", settings.slots, is_sampled, generation["rule"])
            generation["policy"] = names.policy(settings.policy, **costs, together=together)
        with err.status("reading the rows that are there"):
            chunks, totals = Chunks(output, total), _Totals(max_errors)
            for line in chunks.rows():
                totals.add(openai.rows_of(line))
        before, feed = chunks.num_done, _Feed(source.prompts(chunks))
        with (
            contextlib.closing(chunks),
            _Bar(total, chunks) as bar,
            _saying_how_to_go_on(err),
            feed.until_terminated(),
        ):
            for rows in _by_prompt(run(feed, progress=bar.update, skipped=chunks.skip, **generation)):
                totals.add(rows)
                chunks.add(*_lines(rows, settings))
                if totals.has_too_many_errors:
                    break
        if chunks.is_complete:
            output.finish(totals.counts.to_dict())
    is_over = totals.has_too_many_errors and not chunks.is_complete
    if as_json:
        counts = totals.counts.to_dict() | {"lines": chunks.num_done, "complete": chunks.is_complete, "exact": is_exact}
        console.print_measured(output=str(settings.output), whole=counts, run=bar.report())
    if before:
        err.print(Text(f"{settings.output}: {before:,} of {total:,} lines were done before"), soft_wrap=True)
    if chunks.is_complete and (skipped := total - totals.prompts):
        err.print(f"{skipped:,} of {total:,} prompts are too long, and were skipped")
    if totals.counts.truncated:
        cut = f"{totals.counts.truncated:,} of {total:,} prompts are too long, and were cut"
        err.print(f"{cut} (see `truncated` in their lines)")
    if totals.first_error is not None:
        err.print(Text(f"the first error: {totals.first_error[1]}"), soft_wrap=True)
    if is_over:
        err.print(f"ended, since more than {max_errors} texts are errors: raise --max-errors, and {GO_ON}")
    err.print(Text(bar.sentence(settings.output, totals.counts)), soft_wrap=True)
    if feed.is_terminated and not chunks.is_complete:
        err.print(f"terminated: {GO_ON}")
        raise typer.Exit(TERMINATED)
    if not chunks.is_complete and not is_over:
        raise ValueError(
            f"the input had {total:,} lines when they were counted, and {chunks.num_done:,} when they were read: put "
            f"back what it was, and {GO_ON}"
        )
    if totals.counts.failed:
        raise typer.Exit(ROWS_FAILED)


class _Totals:
    """The counts of the whole job, wherever it was stopped: they are those of all rows, in any order.

    Args:
        max_errors: most texts that may be errors; None for any number.

    Attributes:
        counts: the counts of texts.
        prompts: how many prompts they are of.
        first_error: number and error of the first prompt that has one; None if none has.
    """

    def __init__(self, max_errors: int | None):
        self.counts, self.prompts, self._max_errors = Progress(), 0, max_errors
        self.first_error: tuple[int, str] | None = None

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Counts the rows of a prompt."""
        for row in rows:
            self.counts = self.counts.plus(row)
            self.prompts += row.get("sample", 0) == 0
            if row["error"] is not None:
                error = row["number"], row["error"]
                self.first_error = min(self.first_error or error, error)

    @property
    def has_too_many_errors(self) -> bool:
        """Says whether the job is to end."""
        return self._max_errors is not None and self.counts.failed > self._max_errors


def _by_prompt(results: Iterable[Completion]) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of each prompt when all of its texts are done."""
    waiting = collections.defaultdict[int, list[Completion]](list)
    for completion in results:
        texts = waiting[completion.number]
        texts.append(completion)
        if len(texts) == completion.samples:
            yield [text.to_dict() for text in sorted(waiting.pop(completion.number), key=lambda text: text.sample)]


def _lines(rows: list[dict[str, Any]], settings: Settings) -> list[dict[str, Any]]:
    """Returns the lines to write for a prompt."""
    if not (settings.tokens or settings.log_probs or settings.top_log_probs is not None):
        rows = [{name: value for name, value in row.items() if name != "tokens"} for row in rows]
    return [openai.response(rows, settings.target)] if settings.openai else rows


def _check_some_line(
    settings: Settings, prompts: Iterator[Line], survey: Survey, target: Model, generation: dict[str, Any]
) -> None:
    """Refuses an input of which no line can be decoded, whatever the reason: a field, a template, a length.

    Raises:
        ValueError: what is wrong with the first line.
    """
    prepared = prepare(target, [[0]], **{name: value for name, value in generation.items() if name != "num_samples"})
    limits = limits_of(prepared, settings.max_new_tokens, settings.max_prompt_tokens, settings.too_long)
    reader, first = Reader(target, prompts, limits, settings.slots, generation), None
    while ahead := reader.peek(settings.slots):
        if any(request.error is None for request in ahead):
            return
        first = first or ahead[0].error
        reader.take(ahead)
    if reader.error is not None:
        raise reader.error
    raise ValueError(
        f"none of the {survey.lines:,} lines can be decoded, and nothing was written. "
        + ("All prompts are too long" if first is None else f"The first: {first}")
    )


@contextlib.contextmanager
def _leaving_soon(err: Console) -> Iterator[None]:
    """Ends the process soon after Ctrl-C, also while the interpreter waits for a compiler or a device.

    Only the main thread answers signals, and only between two steps of Python. The operating system's own handler
    writes them to a pipe at once. A thread reads it, and gives the main thread some time. Rows that are done are on the
    disk by then, and what is half-written is dropped when the job goes on.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    has_left = threading.Event()

    def watch() -> None:
        while numbers := os.read(source, 64):
            if signal.SIGINT in numbers and not has_left.wait(PATIENCE):
                err.show_cursor()
                err.print(f"interrupted: {GO_ON}")
                leave(INTERRUPTED)

    watcher, former = threading.Thread(target=watch, daemon=True), signal.set_wakeup_fd(sink)
    watcher.start()
    try:
        yield
    finally:
        has_left.set()
        signal.set_wakeup_fd(former)
        os.close(sink)  # which ends the thread
        watcher.join()
        os.close(source)


@contextlib.contextmanager
def _saying_how_to_go_on(err: Console) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"interrupted: {GO_ON}")
        raise


def _costs(
    settings: Settings, prompts: Iterator[Any], target: Model, options: dict[str, Any], err: Console
) -> dict[str, Any]:
    """Measures what rounds cost when the slots are full of the job's first prompts."""
    from jaxspec.analysis.cost import policy_costs

    prefix = options["prefix"]
    fixed: dict[str, Any] = {name: value for name, value in options.items() if name not in ("policy", "num_samples")}
    prepared = prepare(target, [[0]] * settings.slots, **fixed)
    limits = limits_of(prepared, settings.max_new_tokens, settings.max_prompt_tokens, settings.too_long)
    ahead = Reader(target, prompts, limits, settings.slots, options).peek(settings.slots)
    rows = [request.row._replace(max_new_tokens=prepared.max_new_tokens) for request in ahead if not request.error]
    if not rows:
        rows = [Row(0, [*(prefix.tokens if prefix else ()), 0], prepared.max_new_tokens)]

    def width_of(tokens: int) -> int:
        return prepared.widths(tokens)[0]

    most = limits.prompt if settings.max_prompt_tokens else None

    def begin(prepared: Prepared) -> State:
        of_a_row = token_rows.take_rows(prepared.request, jnp.zeros(1, jnp.int32))
        width = width_of(most or max(len(row.tokens) for row in rows))
        return Slots(prepared._replace(request=of_a_row), width, settings.slots, group=1, rounds=1).fill(rows)

    while True:
        try:
            with err.status("measuring what passes cost"):
                costs = policy_costs(prepared, repeats=COST_REPEATS, begin=begin)
            break
        except inputs.NotEnoughMemory:  # of the widest prompts, which will be errors of the job
            widest = max(width_of(len(row.tokens)) for row in rows)
            narrower = [row for row in rows if width_of(len(row.tokens)) < widest]
            if most or not narrower:
                raise
            rows = narrower
    return {"c": float(costs.c), "v": [float(v) for v in costs.v]}


class _Feed:
    """The prompts of a job, which end once the process is told to end."""

    def __init__(self, prompts: Iterator[Line]):
        self._prompts, self.is_terminated = prompts, False

    def __iter__(self) -> Iterator[Line]:
        for prompt in self._prompts:
            yield prompt
            if self.is_terminated:
                return

    @contextlib.contextmanager
    def until_terminated(self) -> Iterator[None]:
        """Has SIGTERM end the prompts, while the block runs."""

        def terminate(*_: Any) -> None:
            self.is_terminated = True

        if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
            yield
            return
        former = signal.signal(signal.SIGTERM, terminate)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, former)


class _Bar:
    """The progress of a job, on standard error."""

    def __init__(self, total: int, chunks: Chunks):
        self._bar, self._warnings = bars.bar(remaining=True), warnings.catch_warnings()
        self._total, self._chunks, self._began, self._progress = total, chunks, time.perf_counter(), Progress()

    def __enter__(self) -> _Bar:
        self._warnings.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: self._warn(str(message))
        self._bar.start()
        self._task = self._bar.add_task("starting", total=self._total, completed=self._chunks.num_done)
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.update(self._task, completed=self._chunks.num_done)
        self._bar.stop()
        self._warnings.__exit__(None, None, None)

    def _warn(self, message: str) -> None:
        """Prints a warning of the library's, with the option for its argument."""
        spelt = message.replace("max_prompt_tokens", "--max-prompt-tokens")
        self._bar.console.print(Text(spelt, "yellow"), soft_wrap=True)

    def update(self, progress: Progress) -> None:
        """Shows how far the job is."""
        self._progress = progress
        failed = f", {progress.failed:,} failed" if progress.failed else ""
        described = f"{self._rate:,.0f} tokens/s, {self._per_round:.2f} a round, {progress.live} live{failed}"
        self._bar.update(self._task, completed=self._chunks.num_done, description=described)

    @property
    def _rate(self) -> float:
        return self._progress.new_tokens / (time.perf_counter() - self._began)

    @property
    def _per_round(self) -> float:
        p = self._progress  # of a prompt that is no error, prefill has made one token
        return (p.new_tokens - (p.done - p.failed)) / max(1, p.rounds)

    def report(self) -> dict[str, Any]:
        """Returns what was done as plain values, with the seconds that it took."""
        return self._progress.to_dict() | {
            "seconds": time.perf_counter() - self._began,
            "tokens_per_second": self._rate,
        }

    def sentence(self, folder: Path, totals: Progress) -> str:
        """Says what was done, and how much of the whole job has failed."""
        p = self._progress
        idle = p.idle / max(1, p.idle + p.rounds)
        return (
            f"{folder}: {p.done:,} text{'s' * (p.done != 1)}, {p.new_tokens:,} tokens ({self._rate:,.0f} a second, "
            f"{self._per_round:.2f} a round); slots were idle in {idle:.0%} of their rounds; "
            f"{totals.failed:,} of {totals.done:,} failed"
        )
