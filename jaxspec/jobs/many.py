"""`generate_many`: any number of prompts, in a batch whose finished rows are replaced."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich import filesize

from jaxspec import sharding
from jaxspec.core import Failure, Finish, LogProbs, Model, Prompt, programs
from jaxspec.core.checks import integer, integers, one_of
from jaxspec.decode import device_memory, stopping
from jaxspec.decode.options import NEW_TOKENS, check_shared
from jaxspec.decode.prompts import check_reads_text
from jaxspec.decode.request import Prepared, prepare
from jaxspec.jobs import fields as job_fields
from jaxspec.jobs.prompts import JobPrompt, PromptReader, limits_of
from jaxspec.jobs.results import Completion, Progress
from jaxspec.jobs.slots import Report, Rounds, Slots
from jaxspec.sampling.params import is_set

ROUNDS = 64  # most rounds between two looks of the host at the slots
STOP_ROUNDS = 8  # likewise with stop strings; tokens decoded past one are thrown away
BLOCKS = 4  # prompts to read ahead, in multiples of the slots
AHEAD = 64  # how far to go past the first unfinished prompt, in multiples of the slots
# A prompt is long if it is wider than LONG_TIMES the usual width, and than LONG tokens.
LONG_TIMES = 4
LONG = 2048
NOTED = 2**28  # bytes; warn if wider slots take more
LONGEST_PAUSE = 2e-3  # seconds between checks whether a program has ended
ON_ERROR = ("raise", "yield")
FAILURES = {
    Failure.LOGITS: "the target's logits are not finite, or all tokens are ruled out",
    Failure.RULE: (
        "the acceptance rule accepted more than was drafted, or chose a number that is not a token"
    ),
}


@programs.outside_context_mesh
def generate_many(
    target: Model,
    prompts: Iterable[Any],
    *,
    slots: int = 16,
    in_order: bool = False,
    max_ahead: int | None = None,
    stop: Sequence[str] = (),
    max_new_tokens: int = NEW_TOKENS,
    max_prompt_tokens: int | None = None,
    too_long: str = "error",
    on_error: str = "raise",
    group: int | None = None,
    progress: Callable[[Progress], Any] | None = None,
    skipped: Callable[[int], Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_samples: int = 1,
    varying: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Completion]:
    """Generates from any number of prompts, and yields each text when it is done.

    One program decodes `slots` rows together; as rows end, new ones, prefilled meanwhile, take
    their places. So a batch does not wait for its longest row, and nothing is compiled after the
    first prompts of each width. A prompt's text depends only on the key, its number and the prompt.
    `generate` writes the same text with the same key, if the prompt has that number there.

    Args:
        target: the model whose distribution the texts have.
        prompts: any iterable, read as it is needed: texts, rows of token ids, chats (lists of
            messages, written in the model's chat template), or dicts with "prompt" or "messages". A
            dict may also have an "id", and a "number" in place of the prompt's place in the
            iterable. These settings of a prompt override the job's: all options of sampling,
            "max_new_tokens" (at most the job's), "stop", "seed", "n" (texts of this prompt),
            "tools" and "chat_template_kwargs". Options that cannot differ from prompt to prompt are
            errors; fields with other names come back in `Completion.fields`. The job reads four
            prompts per slot before it decodes the first, and keeps reading ahead; decoding waits
            while the iterable blocks. If the iterable raises, the error is raised after the results
            of all earlier prompts.
        slots: rows that are decoded together. Slots without a prompt are idle.
        in_order: whether to yield texts in the order of the prompts; by default, as they are done.
        max_ahead: with `in_order`, how far past the first unfinished prompt the job may go, and so
            how many results may wait; by default 64 times the slots. At this limit slots are idle.
        stop: strings that end a row, cut from its text.
        max_new_tokens: most new tokens of a prompt.
        max_prompt_tokens: the longest prompt to accept; it sets the size of the slots. By default
            the longest that the models can read. Then a prompt that is wider than all before waits
            until the slots are empty, which are then made wider. Prompts that are much longer than
            others get fewer, separate slots, after a warning.
        too_long: the treatment of longer prompts: "error", "truncate" or "skip" (no result).
            "truncate" cuts the beginning of the text, for an encoder-decoder its end. Special
            tokens around the text stay.
        on_error: "raise" raises the error of a prompt that cannot be decoded; "yield" yields it as
            a result.
        group: rows that are prefilled together, and slots that must be free for it; by default a
            quarter of the slots.
        progress: called with a `Progress` whenever the host looks at the slots.
        skipped: called with the number of each prompt that is skipped.
        chat_template_kwargs: values for the template of chats, such as {"enable_thinking": False}.
        num_samples: texts of each prompt. Their keys are folded from the prompt's; the first text
            is the same as with `num_samples=1`. A job yields each as it is done, with its
            `Completion.sample`.
        varying: options of sampling that some prompts set, each with the largest value, such as
            {"temperature": 1.0, "top_k": 50}. The job then compiles for them at once, instead of at
            the first such prompt.
        **options: the other options of `generate`, with one value for all prompts. Prompts that
            follow a `prefix` count its tokens as theirs, and are cut after it.

    Raises:
        ValueError, TypeError: the reasons of `generate`; also a prompt, if `on_error` is "raise".
        FloatingPointError: a row has failed, and `on_error` is "raise".

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> prompts = ({"id": f"row {n}", "prompt": [3, n]} for n in range(5))
        >>> rows = jaxspec.generate_many(
        ...     model, prompts, drafter=model, gamma=3, max_new_tokens=9, slots=2
        ... )
        >>> sorted((row.id, len(row.tokens), row.finish) for row in rows)[:2]
        [('row 0', 9, 'length'), ('row 1', 9, 'length')]
    """
    slots, num_samples = integers(1, slots=slots, num_samples=num_samples)
    (group,) = integers(1, group=max(1, slots // 4) if group is None else group)
    (max_ahead,) = integers(1, max_ahead=AHEAD * slots if max_ahead is None else max_ahead)
    if group > slots:
        raise ValueError(f"group is {group}: expected at most {slots}, the slots")
    one_of(on_error, "on_error", ON_ERROR)
    if isinstance(prompts, str):
        prompts = [prompts]
    # These would iterate over names or bytes, not prompts; a table has columns.
    is_iterable = hasattr(prompts, "__iter__") and not hasattr(prompts, "columns")
    if not is_iterable or isinstance(prompts, Mapping | Prompt | bytes):
        raise TypeError(
            f"the prompts are of type {type(prompts).__name__}: expected an iterable of prompts, "
            "such as a list of dicts"
        )
    check_shared(options, "give it in the dicts of the prompts")
    check_reads_text(target)
    options["max_new_tokens"] = integer(
        max_new_tokens, "max_new_tokens", "an integer, 1 or more: dicts have their own"
    )
    prepared = prepare(target, [[0]], **options)  # the prompts come later
    if num_samples > 1 and not prepared.is_sampled:
        raise ValueError(
            f"num_samples is {num_samples}: expected 1, or more at a temperature above 0"
        )
    # Compile at once for the options that some prompts set.
    prepared = prepared.replace(
        **job_fields.missing(prepared, varying or {}, is_set(options.get("top_k")))
    )
    limits = limits_of(prepared, options["max_new_tokens"], max_prompt_tokens, too_long)
    reader = PromptReader(
        target,
        prompts,
        limits,
        block=BLOCKS * slots,
        options=options | {"num_samples": num_samples},
        template=chat_template_kwargs,
        skipped=skipped,
    )
    job = _Job(
        prepared,
        reader,
        stopping.checked(stop, target),
        progress,
        slots=slots,
        group=group,
        width=limits.prompt if max_prompt_tokens else None,
        max_ahead=max_ahead if in_order else None,
    )
    return _checked(job.run(), on_error)


class _Live(NamedTuple):
    """A row that is being decoded."""

    request: JobPrompt
    rounds: tuple[Rounds, ...] = ()  # the counts of each call of the program, each [rounds]
    searched: int = 0  # tokens already searched for stop strings


class _Stage(NamedTuple):
    """Prompts that are decoded in the same slots, and the size of these."""

    prompts: list[JobPrompt]
    widest: JobPrompt  # prompt with the most tokens
    is_long: bool  # whether the prompts are much longer than others
    least: int  # tokens of the narrowest slots that may be made for such prompts
    width: int  # tokens of the slots
    slots: int  # number of slots


class _Job:
    """The host's side of a job.

    It goes through stages, each with new slots, which empty before the next stage. A stage ends
    when the next prompt is too wide for its slots, or needs a sampling option that their program
    lacks. Prompts that are much longer than others wait for a stage of fewer slots.
    """

    def __init__(
        self,
        prepared: Prepared,
        reader: PromptReader,
        stop: stopping.Stop,
        report: Callable[[Progress], Any] | None,
        *,
        slots: int,
        group: int,
        width: int | None,  # tokens of the longest prompt; None: as long as prompts come
        max_ahead: int | None,  # None: results are yielded as they are done
    ):
        self._prepared = prepared
        self._reader = reader
        self._stop = stop
        self._slots = slots
        self._group = group
        self._max_ahead = max_ahead
        self._bounded = "top_k" in reader.defaults
        self._is_fixed = width is not None  # the caller has said how long prompts are
        # tokens of slots for ordinary prompts; 0 until it is known
        self._width = 0 if width is None else prepared.widths(width)[0]
        self._usual = self._width  # width of most prompts, beside which others are long
        self._report = report
        self._progress = Progress()
        self._nodes = prepared.decoder.nodes
        self._finished = dict[int, Completion]()  # results to yield, by the place of their prompts
        self._first = 0  # the place of the first unfinished prompt

    def run(self) -> Iterator[Completion]:
        """Yields every prompt's result."""
        while self._reader.peek(1):
            slots = self._slots_for(self._ahead())
            if slots:
                yield from self._until_empty(slots)
            yield from self._ready()
        if self._reader.error is not None:
            raise self._reader.error

    def _slots_for(self, upcoming: list[JobPrompt]) -> Slots | None:
        """Makes slots for the next prompts; fails prompts that do not fit in memory."""
        while upcoming:
            stage = self._next_stage(upcoming)
            for request in stage.prompts:
                missing = self._missing(request)
                if missing:
                    self._prepared = self._prepared.replace(**missing)
            try:
                return self._allocate(stage)
            except device_memory.NotEnoughMemory as error:
                # If even the narrowest prompt does not fit, this raises.
                self._make_slots(max(stage.least, self._prepared.widths(1)[0]), stage.slots)
                needed = self._width_of(stage.widest)
                too_wide = [
                    request for request in stage.prompts if self._width_of(request) == needed
                ]
                self._reader.take(too_wide)
                self._refuse(
                    [request._replace(error=request.at + str(error)) for request in too_wide]
                )
                upcoming = self._ahead()
        return None

    def _next_stage(self, upcoming: list[JobPrompt]) -> _Stage:
        """Plans slots for the ordinary prompts among the next ones, or for long ones if all are."""
        self._usual = self._width
        if not self._usual:  # the lower median: few long prompts must not make all slots wide
            widths = sorted(map(self._width_of, upcoming))
            self._usual = widths[(len(widths) - 1) // 2]
        ordinary = [request for request in upcoming if not self._is_long(self._width_of(request))]
        prompts = ordinary or upcoming
        widest = max(prompts, key=self._width_of)
        needed = self._width_of(widest)
        if ordinary:
            least = self._width  # slots for ordinary prompts never become narrower
            width = max(least, needed)
            slots = self._slots
        else:
            least = 0
            width = needed
            slots = max(1, self._slots * self._usual // width)
        return _Stage(prompts, widest, not ordinary, least=least, width=width, slots=slots)

    def _allocate(self, stage: _Stage) -> Slots:
        """Makes the slots of a stage, and warns if long prompts make them large.

        Raises NotEnoughMemory if they do not fit.
        """
        slots = self._make_slots(stage.width, stage.slots)
        if stage.is_long or (stage.width > self._usual and slots.needed > NOTED):
            note = _note(stage.widest, slots, self._usual, stage.is_long)
            warnings.warn(note, stacklevel=2)
        if not stage.is_long:
            self._width = stage.width
            self._usual = stage.width
        return slots

    def _make_slots(self, width: int, count: int) -> Slots:
        group = self._group
        if count < self._slots:
            group = min(group, max(1, count // 4))
        return Slots(
            self._prepared,
            width,
            slots=count,
            group=group,
            rounds=ROUNDS,
            sampling=self._reader.defaults,
        )

    def _is_long(self, width: int) -> bool:
        """Returns whether a width is so large that its prompts get separate slots."""
        return not self._is_fixed and width > max(LONG_TIMES * self._usual, LONG)

    def _missing(self, request: JobPrompt) -> dict[str, Any]:
        return job_fields.missing(self._prepared, request.needs, self._bounded)

    def _ready(self) -> Iterator[Completion]:
        """Yields finished results: all, or in order those before the first unfinished one."""
        is_unordered = self._max_ahead is None
        for index in sorted(self._finished):
            if is_unordered or index < self._first:
                yield self._finished.pop(index)

    def _until_empty(self, slots: Slots) -> Iterator[Completion]:
        """Decodes until the slots are empty and the next prompt does not fit them."""
        live = dict[int, _Live]()  # rows by their slots
        free = list(range(slots.slots))
        group = list[JobPrompt]()  # taken from the reader, not inserted yet
        prefilled = None  # the state of the group, once it is being computed
        while True:
            # Insert as many groups as fit. The next group waits, perhaps prefilled, until enough
            # rows end.
            while True:
                group = group or self._next_group(slots)
                if not group or len(free) < len(group):
                    break
                indices = [free.pop() for _ in group]
                if prefilled is None:
                    prefilled = slots.prefill([request.row for request in group])
                slots.insert(prefilled, indices)
                live |= {slot: _Live(request) for slot, request in zip(indices, group, strict=True)}
                group = []
                prefilled = None
            if live:
                # The call ends as soon as the waiting group fits; without one, when another group
                # would fit.
                finished = len(group) or min(len(free) + slots.group, slots.slots)
                has_stop = any(self._stop_of(row).strings for row in live.values())
                report = slots.run(finished, STOP_ROUNDS if has_stop else ROUNDS)
                if group and prefilled is None:  # while the rounds run
                    prefilled = slots.prefill([request.row for request in group])
            yield from self._ready()
            if not live:
                return
            _wait_for(report.length)
            free += self._collect(slots, live, sharding.fetch(report))

    def _next_group(self, slots: Slots) -> list[JobPrompt]:
        """Takes the next prompts to prefill together: the first for these slots, and others of its
        width. A prompt's prefill is thus bitwise independent of the other prompts.
        """
        are_long = self._is_long(slots.width)
        upcoming = [
            request
            for request in self._ahead()
            if self._is_long(self._width_of(request)) == are_long
        ]
        if not upcoming or not self._fits(upcoming[0], slots):
            return []
        width = self._width_of(upcoming[0])
        alike = [
            request
            for request in upcoming
            if self._width_of(request) == width and self._fits(request, slots)
        ]
        group = alike[: slots.group]
        self._reader.take(group)
        return group

    def _fits(self, request: JobPrompt, slots: Slots) -> bool:
        return (
            self._width_of(request) <= slots.width
            and not self._missing(request)
            and slots.takes(request.row)
        )

    def _ahead(self) -> list[JobPrompt]:
        """Reads prompts ahead, and finishes the ones that cannot be decoded."""
        upcoming = self._reader.peek(BLOCKS * self._slots)
        if self._max_ahead is not None:
            upcoming = [
                request for request in upcoming if request.place < self._first + self._max_ahead
            ]
        wrong = [request for request in upcoming if request.error is not None]
        self._reader.take(wrong)
        self._refuse(wrong)
        return [request for request in upcoming if request.error is None]

    def _refuse(self, wrong: list[JobPrompt]) -> None:
        for request in wrong:
            self._finish(request, _result(request, error=request.error))
        if wrong:
            self._tell()

    def _width_of(self, request: JobPrompt) -> int:
        return self._prepared.widths(len(request.row.tokens))[0]

    def _stop_of(self, row: _Live) -> stopping.Stop:
        stop = self._stop if row.request.stop is None else row.request.stop
        return stop._replace(joins=row.request.row.pattern is not None)

    def _collect(self, slots: Slots, live: dict[int, _Live], report: Report) -> list[int]:
        """Finishes the rows that are done, and returns their slots."""
        free = []
        for slot, row in list(live.items()):
            new_rounds = Rounds(*(counts[:, slot] for counts in report.rounds))  # each [rounds]
            tokens = report.tokens[slot, : report.length[slot]].tolist()
            stop = self._stop_of(row)
            needed = None  # tokens up to a stop string, if one was found
            if stop.strings:
                needed = stopping.tokens_needed(stop, tokens, row.searched)
            row = _Live(row.request, (*row.rounds, new_rounds), searched=len(tokens))
            live[slot] = row
            if needed is not None or report.finish[slot]:
                del live[slot]
                free.append(slot)
                self._finish(row.request, self._completion(row, tokens, needed, report, slot))
        slots.end(free)
        # In a round that ran, some row committed tokens; slots that committed nothing were idle.
        committed = report.rounds.committed  # [rounds, slots]
        has_run = np.any(committed > 0, axis=1)
        idle = int(np.sum(committed[has_run] == 0))
        self._progress = self._progress._replace(live=len(live), idle=self._progress.idle + idle)
        self._tell()
        return free

    def _tell(self) -> None:
        if self._report is not None:
            self._report(self._progress)

    def _completion(
        self, row: _Live, tokens: list[int], needed: int | None, report: Report, slot: int
    ) -> Completion:
        failed = int(report.failed[slot])
        finish = int(report.finish[slot])
        if needed is not None:  # a failed round commits nothing, so it came after the string
            tokens = tokens[:needed]
            finish = Finish.STOP
            failed = 0
        log_probs = report.log_probs
        if log_probs is not None:
            log_probs = LogProbs(*(values[slot, : len(tokens)].copy() for values in log_probs))
        tokenizer = self._prepared.target.tokenizer
        request = row.request
        return _result(
            request,
            text=None if tokenizer is None else stopping.text_of(self._stop_of(row), tokens),
            tokens=tokens,
            finish=Finish(finish).name.lower(),
            prompt_tokens=len(request.row.tokens),
            error=request.at + FAILURES[Failure(failed)] if failed else None,
            log_probs=log_probs,
            truncated=request.truncated,
            **_counts(row.rounds, len(tokens), self._nodes),
        )

    def _finish(self, request: JobPrompt, completion: Completion) -> None:
        self._finished[request.place] = completion
        while self._first in self._finished:
            self._first += 1
        self._progress = self._progress.plus(
            vars(completion) | {"new_tokens": len(completion.tokens)}
        )


class WidePrompt(UserWarning):
    """A warning that names the prompt that makes slots wide, and their memory.

    Attributes:
        fact: the sentences about the prompt and its slots, without advice.
    """

    def __init__(self, fact: str):
        super().__init__(fact)
        self.fact = fact

    def advise(self, option: str) -> str:
        """Returns the message, with the name of the option that bounds the width of slots."""
        return f"{self.fact} {option} bounds how long a prompt may be"

    def __str__(self) -> str:
        return self.advise("max_prompt_tokens")


def _note(widest: JobPrompt, slots: Slots, usual: int, is_long: bool) -> WidePrompt:
    """Makes the warning about a prompt that is wider than most."""
    name = widest.where or f"prompt {widest.id}"
    size = filesize.decimal(slots.needed)
    count = f"{slots.slots} slot{'s' * (slots.slots != 1)}"
    memory = f"All {count} are made as wide, and take {size}"
    if is_long:
        memory = f"It gets {count} of its own, of {size}"
    tokens = len(widest.row.tokens)
    return WidePrompt(
        f"{name} has {tokens:,} tokens, and most prompts have at most {usual:,}. {memory} of "
        "memory."
    )


def _wait_for(array: Any) -> None:
    """Waits for a computation in Python, which can be interrupted; the runtime could not be."""
    pause = 1e-4
    while hasattr(array, "is_ready") and not array.is_ready():
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _counts(rounds: Sequence[Rounds], needed: int, nodes: int) -> dict[str, Any]:
    """Counts the rounds behind the first `needed` tokens of a row; prefill made the first token.

    >>> drafted, accepted, committed = np.array([3, 3]), np.array([2, 1]), np.array([3, 2])
    >>> _counts(
    ...     [Rounds(drafted, accepted, committed)], 3, nodes=3
    ... )  # the second round's first token is the fifth
    {'rounds': 1, 'drafted': 3, 'accepted': 2, 'acceptance_histogram': (0, 0, 1, 0)}
    """
    # [rounds] each, over all calls of the program
    drafted, accepted, committed = (np.concatenate(counts) for counts in zip(*rounds, strict=True))
    first = 1 + np.cumsum(committed) - committed  # index of each round's first token
    counts_here = (committed > 0) & (first < needed)
    # The end of the text may cut off accepted draft tokens.
    emitted = np.minimum(accepted, np.minimum(committed, needed - first))[counts_here]
    histogram = ()
    if nodes:
        histogram = tuple(np.bincount(emitted, minlength=nodes + 1).tolist())
    return {
        "rounds": int(counts_here.sum()),
        "drafted": int(drafted[counts_here].sum()),
        "accepted": int(emitted.sum()),
        "acceptance_histogram": histogram,
    }


def _result(request: JobPrompt, **result: Any) -> Completion:
    """Makes the result of a prompt; by default, of a prompt that cannot be decoded."""
    failure = {
        "text": None,
        "tokens": [],
        "finish": Finish.FAILURE.name.lower(),
        "prompt_tokens": 0,
    }
    return Completion(
        id=request.id,
        number=request.row.number,
        sample=request.row.sample,
        samples=request.samples,
        fields=request.fields,
        **failure | result,
    )


def _checked(results: Iterable[Completion], on_error: str) -> Iterator[Completion]:
    """Yields results; with `on_error="raise"`, raises the first error instead."""
    for completion in results:
        if completion.error is not None and on_error == "raise":
            has_failed = completion.error.endswith(tuple(FAILURES.values()))
            error_type = FloatingPointError if has_failed else ValueError
            raise error_type(f"prompt {completion.id}: {completion.error}")
        yield completion
