"""`generate_many`: any number of prompts, in a batch whose finished rows are replaced while it runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec import sharding
from jaxspec.core import Failure, Finish, LogProbs, Model, Prompt
from jaxspec.core.checks import integer, one_of
from jaxspec.decode import display, inputs, stopping
from jaxspec.decode.request import Prepared, prepare
from jaxspec.jobs.prompts import Reader, Request, limits_of
from jaxspec.jobs.slots import Report, Rounds, Slots
from jaxspec.sampling.params import OPTIONS

ROUNDS = 64  # between two looks of the host at the slots, at most
STOP_ROUNDS = 8  # the same where it looks for stop strings: what is decoded past one is thrown away
BLOCKS = 4  # prompts that are read ahead, in multiples of the slots
AHEAD = 64  # prompts that may be begun after the first that is not done, in multiples of the slots
ON_ERROR = ("raise", "yield")
FAILURES = {
    Failure.LOGITS: "the target's logits are not finite, or all tokens are ruled out",
    Failure.RULE: "the acceptance rule accepted more than was drafted, or chose what is no token",
}


@dataclasses.dataclass(frozen=True)
class Completion:
    """One prompt's result.

    Attributes:
        id: of the prompt: what the caller gave, or its number.
        number: of the prompt in the job; its random key is folded from it.
        text: without the prompt, cut before a stop string; None if the target has no tokenizer.
        tokens: the new tokens.
        finish: "eos" (an end token, the last of `tokens`), "stop" (a stop string), "length" (the limit), or "failure".
        prompt_tokens: how many the prompt has; 0 if it was not decoded.
        truncated: how many more the prompt had before it was cut, with too_long="truncate"; 0 if it was not.
        rounds, drafted, accepted: as in `core.Stats`.
        acceptance_histogram: at n how many of the rounds emitted n draft tokens; empty where nothing is drafted.
        error: what went wrong; None if nothing did.
        log_probs: of the tokens, if they were asked for; see `core.LogProbs`.
    """

    id: Any
    number: int
    text: str | None
    tokens: list[int]
    finish: str
    prompt_tokens: int
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    error: str | None = None
    log_probs: LogProbs | None = None
    truncated: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON; log probabilities are named as in `Generation.records`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        log_probs, histogram = fields.pop("log_probs"), fields.pop("acceptance_histogram")
        fields |= {"acceptance_histogram": list(histogram)} if histogram else {}
        return fields | ({} if log_probs is None else display.log_probs(log_probs))


class Progress(NamedTuple):
    """The state of a job, for whoever shows it.

    Attributes:
        done, failed: prompts that are done, and those of them that have an error.
        tokens, rounds: the new tokens of the prompts that are done, and the rounds that made them.
        live: rows that are being decoded.
        idle: rounds of slots in which they had no row to decode.
        drafted, accepted: draft tokens of these rounds, and those of them that were emitted.
        acceptance_histogram: of these rounds, as in `Completion`.
    """

    done: int = 0
    failed: int = 0
    tokens: int = 0
    rounds: int = 0
    live: int = 0
    idle: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_histogram: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON, with the `metrics` of `Generation.to_dict` in place of the histogram.

        >>> progress = Progress(done=1, tokens=6, rounds=2, drafted=6, accepted=3, acceptance_histogram=(1, 0, 0, 1))
        >>> progress.to_dict()["metrics"]["speculative_decoding"]["mean_acceptance_length"]
        2.5
        """
        fields = self._asdict()
        return fields | {"metrics": display.metrics_of(fields.pop("acceptance_histogram"), self.drafted)}


def generate_many(
    target: Model,
    prompts: Iterable[Any],
    *,
    slots: int = 16,
    in_order: bool = False,
    max_ahead: int | None = None,
    stop: Sequence[str] = (),
    max_new_tokens: int = 128,
    max_prompt_tokens: int | None = None,
    too_long: str = "error",
    on_error: str = "raise",
    group: int | None = None,
    progress: Callable[[Progress], Any] | None = None,
    skipped: Callable[[int], Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Completion]:
    """Generates from any number of prompts, and yields each text when it is done.

    `slots` rows are decoded together by one program; when some are done, others take their places, prefilled while the
    program ran. So a batch does not wait for its longest row, and nothing is compiled after the first prompts of each
    width. A prompt's text depends on the key, its number and the prompt alone, whatever else is in the job: it is that
    of `generate` with the same key, where the prompt has that number among the prompts.

    Args:
        target: the model whose distribution the texts have.
        prompts: any iterable, read as it is needed: texts, rows of token ids, chats (lists of messages, written in the
            model's chat template), or dicts with "prompt" or "messages", and perhaps "id", "max_new_tokens" (at most
            the job's), and "number" in place of the prompt's place in the iterable. Four prompts a slot are waited for
            before the first is decoded, and then always read ahead; rows stand still while the iterable is waited for.
            An error that it raises is raised when the results of all prompts before it were yielded.
        slots: rows that are decoded together; those that no prompt is left for stay idle.
        in_order: whether texts are yielded in the order of the prompts; by default as they are done.
        max_ahead: with `in_order`, how far after the first prompt that is not done others may be begun, and so how many
            results may wait for it; by default 64 times the slots. Slots are idle while all that may be begun are done.
        stop: strings that end a row, cut from its text.
        max_new_tokens: most new tokens of a prompt.
        max_prompt_tokens: the longest prompt to accept. By default what the models can read; then a prompt that is
            wider than all before waits until the slots are empty, which are then made wider.
        too_long: what happens to longer prompts: "error", "truncate" or "skip" (there is no result). "truncate" cuts
            the beginning of the text, for an encoder-decoder its end. What the tokenizer puts around the text stays.
        on_error: "raise" raises the error of a prompt that cannot be decoded; "yield" yields it as a result.
        group: rows that are prefilled together, and slots that must be free for it; by default a quarter of the slots.
        progress: called with a `Progress` whenever the host looks at the slots.
        skipped: called with the number of each prompt that is skipped.
        chat_template_kwargs: values for the template of chats, such as {"enable_thinking": False}.
        **options: `drafter`, `gamma`, `rule`, `policy`, `prefix`, `key`, `eos_ids`, `log_probs`, `top_log_probs`, and
            options of sampling, as `generate` has them, with one value for all prompts. Prompts that follow a `prefix`
            count its tokens as theirs, and are cut after it.

    Raises:
        ValueError, TypeError: as `generate`; also for a prompt, if `on_error` is "raise".
        FloatingPointError: a row has failed, and `on_error` is "raise".

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> prompts = ({"id": f"row {n}", "prompt": [3, n]} for n in range(5))
        >>> rows = jaxspec.generate_many(model, prompts, drafter=model, gamma=3, max_new_tokens=9, slots=2)
        >>> sorted((row.id, len(row.tokens), row.finish) for row in rows)[:2]
        [('row 0', 9, 'length'), ('row 1', 9, 'length')]
    """
    slots = integer(slots, "slots", "an integer, 1 or more")
    group = max(1, slots // 4) if group is None else integer(group, "group", "an integer, 1 or more")
    if slots < 1 or not 1 <= group <= slots:
        raise ValueError(f"slots is {slots} and group {group}: expected at least 1, and no larger group than slots")
    one_of(on_error, "on_error", ON_ERROR)
    if isinstance(prompts, str):
        prompts = [prompts]
    is_one = isinstance(prompts, Mapping | Prompt | bytes) or hasattr(prompts, "columns")  # or a table: yields names
    if is_one or not hasattr(prompts, "__iter__"):
        kind = type(prompts).__name__
        raise TypeError(f"the prompts are of type {kind}: expected an iterable of prompts, such as a list of dicts")
    max_ahead = integer(AHEAD * slots if max_ahead is None else max_ahead, "max_ahead", "an integer, 1 or more")
    if max_ahead < 1:
        raise ValueError(f"max_ahead is {max_ahead}: expected at least 1")
    _check_single(options)
    options["max_new_tokens"] = integer(max_new_tokens, "max_new_tokens", "an integer, 1 or more: dicts have their own")
    prepared = prepare(target, [[0]], **options)  # the prompts come later
    limits = limits_of(prepared, options["max_new_tokens"], max_prompt_tokens, too_long)
    reader = Reader(target, prompts, limits, BLOCKS * slots, options.get("prefix"), chat_template_kwargs, skipped)
    stopper = stopping.checked(stop, target)
    width = limits.prompt if max_prompt_tokens else None
    job = _Job(prepared, reader, stopper, slots, group, width, max_ahead if in_order else None, progress)
    return _checked(job.run(), on_error)


def _check_single(options: dict[str, Any]) -> None:
    """Refuses what would have to differ from prompt to prompt."""
    if options.get("num_samples", 1) != 1:
        raise ValueError(f"num_samples is {options['num_samples']}: give a prompt as often as texts of it are wanted")
    for name in ("key", *OPTIONS):
        of_all_rows = 1 if name in ("logit_bias", "banned") else 0  # dimensions of a value that is the same for all
        if options.get(name) is None:
            continue
        value = inputs.key_of(options[name]) if name == "key" else options[name]  # of PRNGKey an array
        if np.ndim(value) > of_all_rows:
            raise ValueError(f"{name} has a value for each of several prompts: expected one for all of the job")


class _Live(NamedTuple):
    """A row that is being decoded."""

    request: Request
    searched: int = 0  # of its tokens, those that are known to hold no stop string
    rounds: tuple[np.ndarray, ...] = ()  # drafted, accepted and committed tokens of its rounds, to cut at a stop


class _Job:
    """The host's side of a job."""

    def __init__(
        self,
        prepared: Prepared,
        reader: Reader,
        stop: stopping.Stop,
        slots: int,
        group: int,
        width: int | None,
        max_ahead: int | None,
        report: Callable[[Progress], Any] | None,
    ):
        self._prepared, self._reader, self._stop = prepared, reader, stop
        self._slots, self._group = slots, group
        self._width = 0 if width is None else prepared.widths(width)[0]
        self._report = report
        self._progress = Progress()
        self._max_ahead = max_ahead  # None: results are yielded as they are done
        self._nodes = prepared.decoder.nodes
        self._emitted = np.zeros((slots, self._nodes + 1), int)  # a histogram of the rounds of each slot's row
        self._finished = dict[int, Completion]()  # by place; not yielded yet
        self._first = 0  # of the places, the first that is not done, if results are yielded in order

    def run(self) -> Iterator[Completion]:
        """Yields every prompt's result."""
        while self._reader.peek(1):
            if slots := self._slots_for(self._ahead()):
                yield from self._until_wider(slots)
            yield from self._ready()
        if self._reader.error is not None:
            raise self._reader.error

    def _slots_for(self, ahead: list[Request]) -> Slots | None:
        """Makes slots as wide as the next prompts; of these, the ones that memory has no room for are finished."""
        rounds = STOP_ROUNDS if self._stop.strings else ROUNDS
        slots_of = functools.partial(Slots, self._prepared, slots=self._slots, group=self._group, rounds=rounds)
        while ahead:
            widest = max(map(self._width_of, ahead))
            try:
                slots = slots_of(max(self._width, widest))
            except inputs.NotEnoughMemory as error:
                slots_of(max(self._width, self._prepared.widths(1)[0]))  # too many slots for any prompt: raises
                too_wide = [request for request in ahead if self._width_of(request) == widest]
                self._reader.take(too_wide)
                self._refuse([request._replace(error=str(error)) for request in too_wide])
                ahead = self._ahead()
            else:
                self._width = slots.width
                return slots
        return None

    def _ready(self) -> Iterator[Completion]:
        """Takes out the results to yield: all there are, or in order those before the first that is not done."""
        for place in sorted(place for place in self._finished if self._max_ahead is None or place < self._first):
            yield self._finished.pop(place)

    def _until_wider(self, slots: Slots) -> Iterator[Completion]:
        """Decodes until all prompts are done, or the next one is wider than the slots."""
        live, free = dict[int, _Live](), list(range(slots.slots))
        group, new = list[Request](), None
        while True:
            while True:
                group = group or self._next_group(slots)
                if not group or len(free) < len(group):
                    break
                places = [free.pop() for _ in group]
                new = slots.prefill([request.row for request in group]) if new is None else new
                slots.insert(new, places)
                self._emitted[places] = 0
                live |= {place: _Live(request) for place, request in zip(places, group, strict=True)}
                group, new = [], None
            if live:
                report = slots.run(len(group) or min(len(free) + slots.group, slots.slots))
                if group and new is None:
                    new = slots.prefill([request.row for request in group])  # while the rounds are run
            yield from self._ready()
            if not live:
                return
            free += self._collect(slots, live, sharding.fetch(report))

    def _next_group(self, slots: Slots) -> list[Request]:
        """Takes the next prompts to prefill together: the first, and others of its width.

        So what prefill computes of a prompt, to the last bit, does not depend on the others.
        """
        ahead = self._ahead()
        width = self._width_of(ahead[0]) if ahead else 0
        if not ahead or width > slots.width:
            return []
        group = [request for request in ahead if self._width_of(request) == width][: slots.group]
        self._reader.take(group)
        return group

    def _ahead(self) -> list[Request]:
        """Reads prompts ahead, and finishes those of them that cannot be decoded."""
        ahead = self._reader.peek(BLOCKS * self._slots)
        if self._max_ahead is not None:
            ahead = [request for request in ahead if request.place < self._first + self._max_ahead]
        wrong = [request for request in ahead if request.error is not None]
        self._reader.take(wrong)
        self._refuse(wrong)
        return [request for request in ahead if request.error is None]

    def _refuse(self, wrong: list[Request]) -> None:
        """Finishes prompts that cannot be decoded."""
        for request in wrong:
            self._finish(request, _refused(request))
        if wrong:
            self._tell()

    def _width_of(self, request: Request) -> int:
        return self._prepared.widths(len(request.row.tokens))[0]

    def _collect(self, slots: Slots, live: dict[int, _Live], report: Report) -> list[int]:
        """Takes out the rows that are done, and returns their slots."""
        free = []
        rounds = np.any(report.rounds.committed > 0, axis=1)
        self._emitted += _histograms(report.rounds, self._nodes)
        for place, row in list(live.items()):
            tokens = report.tokens[place, : report.length[place]].tolist()
            needed = None
            if self._stop.strings:
                columns = zip(row.rounds or [np.zeros(0, np.int32)] * 3, report.rounds, strict=True)
                counts = tuple(np.concatenate([old, new[rounds, place]]) for old, new in columns)
                needed = stopping.tokens_needed(self._stop, tokens, row.searched)
                live[place] = row = _Live(row.request, len(tokens), counts)
            if needed is not None or report.finish[place]:
                del live[place]
                free.append(place)
                stats = {name: int(counts[place]) for name, counts in report.stats._asdict().items()}
                stats |= {"acceptance_histogram": tuple(self._emitted[place].tolist())}
                self._finish(row.request, self._completion(row, tokens, needed, stats, report, place))
        slots.end(free)
        idle = int(np.sum(report.rounds.committed[rounds] == 0))
        self._progress = self._progress._replace(live=len(live), idle=self._progress.idle + idle)
        self._tell()
        return free

    def _tell(self) -> None:
        """Tells the caller how far the job is."""
        if self._report is not None:
            self._report(self._progress)

    def _completion(
        self, row: _Live, tokens: list[int], needed: int | None, stats: dict[str, Any], report: Report, place: int
    ) -> Completion:
        failed, finish = int(report.failed[place]), int(report.finish[place])
        if needed is not None:  # a round that fails commits nothing, so it came after the string
            stats = _until(row.rounds, needed, self._nodes)
            tokens, finish, failed = tokens[:needed], Finish.STOP, 0
        log_probs = report.log_probs
        if log_probs is not None:
            log_probs = LogProbs(*(values[place, : len(tokens)].copy() for values in log_probs))
        tokenizer, request = self._prepared.target.tokenizer, row.request
        return Completion(
            id=request.id,
            number=request.row.number,
            text=None if tokenizer is None else stopping.text_of(self._stop, tokens),
            tokens=tokens,
            finish=Finish(finish).name.lower(),
            prompt_tokens=len(request.row.tokens),
            rounds=stats["rounds"],
            drafted=stats["drafted"],
            accepted=stats["accepted"],
            acceptance_histogram=stats["acceptance_histogram"] if self._nodes else (),
            error=FAILURES[Failure(failed)] if failed else None,
            log_probs=log_probs,
            truncated=request.truncated,
        )

    def _finish(self, request: Request, completion: Completion) -> None:
        self._finished[request.place] = completion
        while self._first in self._finished:
            self._first += 1
        p, counts = self._progress, completion.acceptance_histogram
        self._progress = p._replace(
            done=p.done + 1,
            failed=p.failed + (completion.error is not None),
            tokens=p.tokens + len(completion.tokens),
            rounds=p.rounds + completion.rounds,
            drafted=p.drafted + completion.drafted,
            accepted=p.accepted + completion.accepted,
            acceptance_histogram=tuple(map(sum, itertools.zip_longest(p.acceptance_histogram, counts, fillvalue=0))),
        )


def _histograms(rounds: Rounds, nodes: int) -> np.ndarray:
    """Counts for each slot, of those of the rounds in which it had a row, how many emitted how many draft tokens.

    >>> committed = np.array([[3, 1], [2, 0]])
    >>> _histograms(Rounds(np.full((2, 2), 2), np.array([[2, 1], [1, 0]]), committed), nodes=2).tolist()
    [[0, 1, 1], [0, 1, 0]]
    """
    emitted, slots = np.minimum(rounds.accepted, rounds.committed), rounds.committed.shape[1]
    at = np.arange(slots) * (nodes + 1) + np.minimum(emitted, nodes)
    return np.bincount(at[rounds.committed > 0], minlength=slots * (nodes + 1)).reshape(slots, nodes + 1)


def _until(rounds: tuple[np.ndarray, ...], needed: int, nodes: int) -> dict[str, Any]:
    """Counts what the first tokens of a row took, of which prefill has made one.

    >>> drafted, accepted, committed = np.array([3, 3]), np.array([2, 1]), np.array([3, 2])
    >>> _until((drafted, accepted, committed), 3, nodes=3)  # the third token is the second one of the first round
    {'rounds': 1, 'drafted': 3, 'accepted': 2, 'acceptance_histogram': (0, 0, 1, 0)}
    """
    drafted, accepted, committed = rounds
    before = 1 + np.cumsum(committed) - committed
    ran = before < needed
    emitted = np.minimum(accepted, np.minimum(committed, needed - before))[ran]
    return {
        "rounds": int(ran.sum()),
        "drafted": int(drafted[ran].sum()),
        "accepted": int(emitted.sum()),
        "acceptance_histogram": tuple(np.bincount(emitted, minlength=nodes + 1).tolist()),
    }


def _refused(request: Request) -> Completion:
    """The result of a prompt that cannot be decoded."""
    return Completion(request.id, request.row.number, None, [], "failure", 0, error=request.error)


def _checked(results: Iterable[Completion], on_error: str) -> Iterator[Completion]:
    """Yields results, and raises the error of the first that has one, if it is to be raised."""
    for completion in results:
        if completion.error is not None and on_error == "raise":
            kind = FloatingPointError if completion.error in FAILURES.values() else ValueError
            raise kind(f"prompt {completion.id}: {completion.error}")
        yield completion
