"""`jaxspec batch`: a file of prompts in, chunks of texts out."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import typer
from rich.text import Text

from jaxspec import progress as bars
from jaxspec.cli import console, names, options, signals
from jaxspec.cli import pair as pairs
from jaxspec.cli.console import Record
from jaxspec.cli.old_names import new_manifest
from jaxspec.cli.options import Resume, flag, generation_options, group_of, number, text
from jaxspec.cli.pair import COST_REPEATS, Pair
from jaxspec.core import Model, State, token_rows
from jaxspec.core.checks import in_range
from jaxspec.decode import device_memory
from jaxspec.decode.chat_templates import check_template
from jaxspec.decode.options import OPTIONS, gathered
from jaxspec.decode.request import Prepared, prepare
from jaxspec.files import digests
from jaxspec.jobs import Completion, Progress, generate_many, openai
from jaxspec.jobs.fields import JOB_OPTIONS, JobOptions
from jaxspec.jobs.input_files import PROMPT, Source, Survey, check_paths
from jaxspec.jobs.many import WidePrompt
from jaxspec.jobs.prompts import Line, PromptReader, limits_of
from jaxspec.jobs.resume import Chunks, InputShard, Output, manifest_of
from jaxspec.jobs.slots import Row, Slots

# Options that may change when a job is resumed, since its results do not depend on them. The
# manifest has every other option, so a new option is part of the job unless it is named here.
INDEPENDENT = {
    *("output", "mesh"),
    *(name for name, option in (OPTIONS | JOB_OPTIONS).items() if not option.changes_results),
}
DESCRIBED_APART = (  # options that the manifest stores under another name, or as digests of files
    *("target", "draft", "adapter", "chat_template", "prefix"),
    *("input", "field", "chat", "shard", "num_shards", "chunk"),
)
ROWS_FAILED = 3  # exit code: some prompts have errors
GO_ON = "give the same command with --resume to go on; the rows that are done are kept"


class BatchSettings(NamedTuple):
    """The options of `batch` that define a job, with those of the table of `decode.options`."""

    input: Annotated[
        list[Path], text("FILE", "Prompts, one a line, or .jsonl; also .gz; repeatable.")
    ]
    output: Annotated[Path, text("FOLDER", "Where the results are written.")]
    pair: Pair = Pair()
    field: Annotated[str, text("NAME", "The field of a JSON line that has the prompt.")] = "prompt"
    chat: Annotated[bool, flag("Use the model's chat template.", "--chat")] = False
    prefix: Annotated[str | None, OPTIONS["prefix"]] = None
    options: JobOptions = JobOptions()
    chunk: Annotated[int, number("Lines of the input to a file of results.")] = 1024
    shard: Annotated[int, number("Which part of the input to decode.", least=0)] = 0
    num_shards: Annotated[int, number("Parts that the input is decoded in.")] = 1
    tokens: Annotated[bool, flag("Write ids of tokens.", "--tokens")] = False
    openai: Annotated[bool, flag("Write lines in the form of OpenAI's batches.", "--openai")] = (
        False
    )


@group_of("settings", BatchSettings)
@generation_options
def batch(
    settings: BatchSettings,
    resume: Resume = False,
    max_errors: Annotated[
        int | None, number("End the job when more than N texts are errors.", least=0)
    ] = None,
    as_json: Annotated[bool, flag("Print what was done as JSON.", "--json")] = False,
    *,
    generation: dict[str, Any],
) -> None:
    """Decode files of prompts, many prompts at a time.

    Each prompt has a line in the output, with its text or its error; where some have errors the
    exit code is 3. A job that was stopped, or killed, goes on with the same command and --resume,
    decodes no row again that was done, and writes what it would have written.

    \b
        jaxspec batch --input prompts.jsonl --output results
        jaxspec batch --input prompts.jsonl --output results --resume
    """
    in_range(0, settings.num_shards - 1, shard=settings.shard)
    check_paths(settings.input)
    if not resume:  # when resuming, the manifest is compared instead
        options.check_json_lines(settings.input, field=(settings.field, PROMPT))
    with signals.leaving_soon(say_interrupted), contextlib.ExitStack() as stack:
        job, chunks = _begun(settings, generation, resume, stack)
        # A resumed job counts the rows on disk, and goes on with the others.
        with console.status("reading the rows that are there"):
            rows = itertools.chain.from_iterable(map(openai.rows_of, chunks.rows()))
            done_before = chunks.num_done
            totals = functools.reduce(Progress.plus, rows, Progress())
        # SIGTERM only ends the feed, so that the rows in the slots are still finished.
        is_terminated = threading.Event()
        feed = _until(is_terminated, job.source.prompts(chunks))
        ending = signals.answered(signal.SIGTERM, is_terminated.set)
        with _Bar(job.total, chunks) as bar, ending:
            totals = _decode(job, feed, chunks, totals, bar, max_errors)
        if chunks.is_complete:
            job.output.finish(totals.to_dict())
    if as_json:
        counts = {"lines": chunks.num_done, "complete": chunks.is_complete, "exact": job.is_exact}
        console.print_measured(
            output=str(settings.output), whole=totals.to_dict() | counts, run=bar.report()
        )
    is_over = max_errors is not None and totals.failed > max_errors and not chunks.is_complete
    for sentence in _sentences(job, totals, done_before, chunks.is_complete):
        console.note(sentence)
    if is_over:
        console.note(
            f"ended, since more than {max_errors} texts are errors: raise --max-errors, and {GO_ON}"
        )
    console.note(bar.sentence(settings.output, totals))
    if is_terminated.is_set() and not chunks.is_complete:
        console.note(f"terminated: {GO_ON}")
        raise typer.Exit(signals.TERMINATED)
    if not chunks.is_complete and not is_over:  # the input has become shorter since the survey
        raise ValueError(
            f"the input had {job.total:,} lines, and then {chunks.num_done:,}: put it back, and "
            f"{GO_ON}"
        )
    if totals.failed:
        raise typer.Exit(ROWS_FAILED)


class _BatchJob(NamedTuple):
    """A job that was checked, with its models."""

    settings: BatchSettings  # the command's options
    source: Source  # the prompts
    output: Output  # the folder of the results
    survey: Survey  # the input, looked through once
    target: Model  # the model
    # options of `generate_many` that `prepare` takes, plus `num_samples`
    generation: dict[str, Any]

    @property
    def total(self) -> int:
        """Counts the lines of this part."""
        return self.source.count(self.survey.lines)

    @property
    def is_exact(self) -> bool:
        """Says whether texts have the target's distribution."""
        return self.generation["rule"] is None or self.generation["rule"].exact

    def results(self, prompts: Iterable[Any], **calls: Callable[..., Any]) -> Iterator[Completion]:
        """Decodes prompts; `calls` are callbacks: `progress`, and `skipped` for skipped lines."""
        s = self.settings
        return generate_many(
            self.target,
            prompts,
            on_error="yield",
            stop=s.pair.stop or (),
            varying=self.survey.varying,
            **s.options._asdict(),
            **calls,
            **self.generation,
        )

    def prepared(self, rows: int, without: tuple[str, ...] = ()) -> Prepared:
        """Prepares a generation of `rows` rows, without the options named in `without`."""
        fixed = {
            name: value
            for name, value in self.generation.items()
            if name not in ("num_samples", *without)
        }
        return prepare(self.target, [[0]] * rows, **fixed)

    def reader(self, prepared: Prepared, prompts: Iterator[Line]) -> PromptReader:
        """Makes a reader like the job's, which reads a block of `slots` prompts at a time."""
        o = self.settings.options
        new = self.settings.pair.max_new_tokens
        limits = limits_of(prepared, new, o.max_prompt_tokens, o.too_long)
        return PromptReader(self.target, prompts, limits, o.slots, self.generation)


def _begun(
    settings: BatchSettings,
    chosen: dict[str, Any],
    resume: bool,
    stack: contextlib.ExitStack,
) -> tuple[_BatchJob, Chunks]:
    """Checks a whole job before its first row, and begins it or goes on with it.

    `stack` keeps the folder's lock and the chunks' files.
    """
    pair, generation = pairs.checked(settings.pair, chosen)
    shared = pairs.prefix_text(settings.prefix)
    shard = InputShard(settings.shard, settings.num_shards)
    source = Source(
        settings.input,
        settings.field,
        settings.chat,
        shard,
        system=shared if settings.chat else None,
    )
    output = Output(settings.output, shard, settings.chunk)
    output.check(resume=resume)
    with console.status("looking through the lines"):
        survey = source.survey()
    if survey.twice and settings.openai:
        raise ValueError(f"{survey.twice}: expected each custom_id once")
    if survey.twice:
        console.note(survey.twice, "yellow")
    with console.status("loading the models"):
        target, drafter = pairs.load(pair)
        if settings.chat:
            check_template(target)
        prefix = None
        if shared is not None:
            prefix = pairs.read_prefix(target, drafter, shared, settings.chat)
    job = _BatchJob(
        settings,
        source,
        output,
        survey,
        target,
        generation | {"drafter": drafter, "prefix": prefix},
    )
    if not job.is_exact:
        inexact = (
            f"The rule {pair.rule} is inexact: the texts need not have the target's distribution."
        )
        console.note(inexact, "yellow")
    job.results([])  # raises on wrong options before the manifest is written
    # A new job makes its folder only once all options and a line are checked.
    if not output.manifest.exists():
        with console.status("looking for a line that can be decoded"):
            _check_some_line(job)
    with console.status("reading the models' files"):
        description = _description(settings, pair, shared, chosen)
        manifest = manifest_of(output, *description, **source.description())
    with console.status("looking for rows that are there"):
        chunks = stack.enter_context(
            output.begun(manifest, job.total, resume=resume, renewed=new_manifest)
        )
    # The policy needs measured costs. They are stored, since the texts depend on them.
    if pair.policy.partition("=")[0] == "adaptive":
        from jaxspec.analysis.cost import agreement

        costs = output.costs(lambda: _costs(job))
        together = agreement(
            "slots", settings.options.slots, bool(chosen.get("temperature")), generation["rule"]
        )
        job = job._replace(
            generation=job.generation
            | {"policy": names.policy(pair.policy, **costs, together=together)}
        )
    return job, chunks


def _description(
    settings: BatchSettings, pair: Pair, shared: str | None, chosen: dict[str, Any]
) -> tuple[Record, Record]:
    """Returns a job's models, each with the digests of its files, and its options."""
    excluded = (*INDEPENDENT, *DESCRIBED_APART)
    options_of_job = {
        name: value
        for name, value in (options.flat(settings) | chosen).items()
        if name not in excluded
    }
    template = None
    if pair.chat_template is not None:
        template = digests.of_file(Path(pair.chat_template))
    return pairs.described_models(pair), options_of_job | {
        "prefix": shared,
        "chat_template": template,
    }


def _decode(
    job: _BatchJob,
    feed: Iterator[Line],
    chunks: Chunks,
    totals: Progress,
    bar: _Bar,
    max_errors: int | None,
) -> Progress:
    """Decodes the missing prompts and writes their rows; returns the totals of the whole job."""
    for rows in _by_prompt(job.results(feed, progress=bar.update, skipped=chunks.skip)):
        totals = functools.reduce(Progress.plus, rows, totals)
        # All texts of a prompt go to the journal together: a prompt is done or not.
        chunks.add(*_lines(rows, job))
        if max_errors is not None and totals.failed > max_errors:
            break
    return totals


def _by_prompt(results: Iterable[Completion]) -> Iterator[list[Record]]:
    """Yields the rows of each prompt when all of its texts are done."""
    waiting = collections.defaultdict[int, list[Completion]](list)
    for completion in results:
        texts = waiting[completion.number]
        texts.append(completion)
        if len(texts) == completion.samples:
            yield [
                text.to_dict()
                for text in sorted(waiting.pop(completion.number), key=lambda text: text.sample)
            ]


def _lines(rows: list[Record], job: _BatchJob) -> list[Record]:
    """Returns the lines to write for the rows of one prompt."""
    settings = job.settings
    if not settings.tokens and gathered(job.generation).reported is None:
        rows = [{name: value for name, value in row.items() if name != "tokens"} for row in rows]
    if settings.openai:
        return [openai.response(rows, settings.pair.target)]
    return rows


def _sentences(
    job: _BatchJob, totals: Progress, done_before: int, is_complete: bool
) -> Iterator[str]:
    """Yields sentences about a job that has ended: skipped lines, cut prompts, the first error."""
    if done_before:
        yield f"{job.settings.output}: {done_before:,} of {job.total:,} lines were done before"
    skipped = job.total - totals.prompts
    if is_complete and skipped:
        yield f"{skipped:,} of {job.total:,} prompts are too long, and were skipped"
    if totals.truncated:
        cut = f"{totals.truncated:,} of {job.total:,} prompts are too long, and were cut"
        yield f"{cut} (see `truncated` in their lines)"
    if totals.first_error is not None:
        yield f"the first error: {totals.first_error[1]}"


def _check_some_line(job: _BatchJob) -> None:
    """Raises ValueError if no line can be decoded: a wrong field, template or length."""
    reader = job.reader(job.prepared(1), job.source._replace(shard=InputShard()).prompts())
    first_error = None
    while requests := reader.peek(job.settings.options.slots):
        if any(request.error is None for request in requests):
            return
        first_error = first_error or requests[0].error
        reader.take(requests)
    if reader.error is not None:
        raise reader.error
    # Without errors, every prompt was skipped.
    why = "All prompts are too long" if first_error is None else f"The first: {first_error}"
    raise ValueError(
        f"none of the {job.survey.lines:,} lines can be decoded, and nothing was written. {why}"
    )


def say_interrupted() -> None:
    """Tells the user how to resume, and shows the cursor that the bar had hidden."""
    console.err().show_cursor()
    console.note(f"interrupted: {GO_ON}")


def _costs(job: _BatchJob) -> Record:
    """Measures the costs of rounds on the job's first prompts, except unusually wide ones."""
    slots = job.settings.options.slots
    prefix = job.generation["prefix"]
    prepared = job.prepared(slots, without=("policy",))
    reader = job.reader(prepared, job.source.prompts())
    rows = [
        request.row._replace(max_new_tokens=prepared.max_new_tokens)
        for request in reader.peek(slots)
        if not request.error
    ]
    if not rows:  # any prompt will do
        first_tokens = prefix.tokens if prefix else ()
        rows = [Row(0, [*first_tokens, 0], prepared.max_new_tokens)]
    widths = [prepared.widths(len(row.tokens))[0] for row in rows]
    longest = reader.limits.prompt if job.settings.options.max_prompt_tokens else None
    if longest is not None:
        candidates = [prepared.widths(longest)[0]]
    else:  # from the median down: wider prompts may not fit in memory, and fail in the job, too
        median = sorted(widths)[(len(rows) - 1) // 2]
        candidates = sorted({width for width in widths if width <= median}, reverse=True)
    *wider, narrowest = candidates
    with console.status("measuring what passes cost"):
        for width in wider:
            with contextlib.suppress(device_memory.NotEnoughMemory):  # narrower slots may fit
                return _costs_at(prepared, rows, slots=slots, width=width)
        return _costs_at(prepared, rows, slots=slots, width=narrowest)


def _costs_at(prepared: Prepared, rows: list[Row], *, slots: int, width: int) -> Record:
    """Measures the costs of rounds in slots of one width, filled with the rows that fit them.

    Raises NotEnoughMemory if the slots would not fit in memory.
    """
    from jaxspec.analysis.cost import policy_costs

    narrow = [row for row in rows if prepared.widths(len(row.tokens))[0] <= width]

    def begin(prepared: Prepared) -> State:
        request = token_rows.take_rows(prepared.request, jnp.zeros(1, jnp.int32))
        of_one_row = prepared._replace(request=request)
        return Slots(of_one_row, width, slots, group=1, rounds=1).fill(narrow)

    costs = policy_costs(prepared, repeats=COST_REPEATS, begin=begin)
    return {"c": float(costs.c), "v": [float(v) for v in costs.v]}


def _until(is_terminated: threading.Event, prompts: Iterator[Line]) -> Iterator[Line]:
    """Yields prompts until SIGTERM; the prompts read by then are still decoded."""
    for prompt in prompts:
        yield prompt
        if is_terminated.is_set():
            return


class _Bar:
    """The progress bar of a run, which also prints warnings above itself."""

    def __init__(self, total: int, chunks: Chunks):
        self._bar = bars.bar(remaining=True)
        self._warnings = warnings.catch_warnings()
        self._total = total
        self._chunks = chunks
        self._began = time.perf_counter()
        self._progress = Progress()

    def __enter__(self) -> _Bar:
        self._warnings.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: self._warn(message)
        self._bar.start()
        self._task = self._bar.add_task(
            "starting", total=self._total, completed=self._chunks.num_done
        )
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.update(self._task, completed=self._chunks.num_done)
        self._bar.stop()
        self._warnings.__exit__(None, None, None)

    def _warn(self, warning: Any) -> None:
        """Prints a library warning, naming the command's option instead of the argument."""
        if isinstance(warning, WidePrompt):
            text = warning.advise("--max-prompt-tokens")
        else:
            text = str(warning)
        self._bar.console.print(Text(text, "yellow"), soft_wrap=True)

    def update(self, progress: Progress) -> None:
        """Shows how far the job is."""
        self._progress = progress
        doing = f"{self._rate:,.0f} tokens/s, {self._per_round:.2f} a round, {progress.live} live"
        if progress.failed:
            doing += f", {progress.failed:,} failed"
        self._bar.update(self._task, completed=self._chunks.num_done, description=doing)

    @property
    def _rate(self) -> float:
        return self._progress.new_tokens / (time.perf_counter() - self._began)

    @property
    def _per_round(self) -> float:
        p = self._progress  # prefill made the first token of every text that did not fail
        return (p.new_tokens - (p.done - p.failed)) / max(1, p.rounds)

    def report(self) -> Record:
        """Returns the counts of this run as plain values, with its seconds."""
        return self._progress.to_dict() | {
            "seconds": time.perf_counter() - self._began,
            "tokens_per_second": self._rate,
        }

    def sentence(self, folder: Path, totals: Progress) -> str:
        """Returns a sentence with the counts of this run, and the failures of the whole job."""
        p = self._progress
        idle = p.idle / max(1, p.idle + p.rounds)
        return (
            f"{folder}: {p.done:,} text{'s' * (p.done != 1)}, {p.new_tokens:,} tokens "
            f"({self._rate:,.0f} a second, {self._per_round:.2f} a round); slots were idle in "
            f"{idle:.0%} of their rounds; {totals.failed:,} of {totals.done:,} failed"
        )
