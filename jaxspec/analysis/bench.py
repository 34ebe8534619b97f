"""Decodes settings, interleaved with plain decoding on the same prompts, and yields a result for
each.

`result` has settings and results, `table` prints them, `plan` chooses gamma.

Settings of one task, batch size and sampling are a group. All of a group are compiled and warmed
up, then run one after the other, generation by generation, `repeats` times; between the repeats
what their passes cost is timed. So whatever else the machine does falls on all of them alike, and
speeds and predictions are of one machine at one time.
"""

from __future__ import annotations

import functools
import itertools
import operator
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import policies
from jaxspec.analysis import acceptance, cost, environment, formulas, memory, numerics
from jaxspec.analysis import plan as planning
from jaxspec.analysis import result as records
from jaxspec.analysis.cost import PassTimer, draft_lengths, longest_drafts
from jaxspec.analysis.result import ADAPTIVE, PLANNED, BenchResult, Setting
from jaxspec.analysis.statistics import Rate, Spread
from jaxspec.core import BoundPolicy, Model
from jaxspec.core.checks import one_of
from jaxspec.decode import batches
from jaxspec.decode.loop import Outcome
from jaxspec.decode.request import Prepared, prepare

QUANTITIES = {
    "speed": "whole generations are timed; without it all prompts are decoded in batches, and "
    "nothing is timed",
    "latency": "of the first token, and of the others",
    "compile": "the first call of each program, which compiles it",
    "memory": "of the program, and what it needs at least",
    "alpha": "over all positions of the target's own texts",
    "costs": "c and v, and what a look-up's search takes",
}
# most programs at a time: they take memory maps, and a process that runs out of these crashes
TOGETHER = 64
PLANNING = 9  # timings, at least, of each pass that a plan or a policy is made of
LONGEST = 16  # tokens of a text that are kept from where it differs
MOST = 16  # the largest gamma that a plan considers


class Config(NamedTuple):
    """The quantities that are measured of each setting, and the effort."""

    # how many a timed run decodes, in whole batches; they begin again where there are too few
    num_prompts: int = 8
    repeats: int = 5  # timed runs
    seed: int = 0  # the seed of sampled texts
    quantities: tuple[str, ...] = ("speed",)  # some of `QUANTITIES`


_USUAL = Config()


def run(
    target: Model,
    settings: Sequence[Setting],
    config: Config = _USUAL,
    *,
    doing: Callable[[str, float], object] = lambda title, share: None,
) -> Iterator[BenchResult]:
    """Yields a result for each setting, group by group, after plain decoding by each target and
    backend of a group.

    `run_groups` yields the groups instead, each as soon as it is measured.

    A group that fails (logits that are not finite, too little memory) has results with an error;
    other groups go on.

    Args:
        target: the model to decode from.
        settings: any; `result.product` makes combinations.
        config: the quantities to measure, and the effort.
        doing: called with what is being done, and the share of everything that is done before.

    Raises:
        ValueError: an unknown quantity; one of timed runs without speed; a gamma to be planned for
            a setting without an acceptance rate.

    Example:
        >>> from jaxspec import drafters
        >>> from jaxspec.analysis.result import Task, product
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table()
        >>> task, model = Task("ids", prepared.prompt, new_tokens=9), prepared.target
        >>> settings = product(
        ...     task=task, drafter={"itself": model, "copy": drafters.prompt_lookup()}, gamma=3
        ... )
        >>> for result in run(model, settings, Config(num_prompts=2, repeats=1)):
        ...     print(
        ...         result.setting.drafter or "plain",
        ...         result.setting.gamma,
        ...         result.tokens,
        ...         result.same_text,
        ...     )
        plain 0 18 2
        itself 3 18 2
        copy 3 18 2
    """
    return itertools.chain.from_iterable(run_groups(target, settings, config, doing=doing))


def run_groups(
    target: Model,
    settings: Sequence[Setting],
    config: Config = _USUAL,
    *,
    doing: Callable[[str, float], object] = lambda title, share: None,
) -> Iterator[list[BenchResult]]:
    """Yields the results of a group at a time, as `run`; the next group is measured when it is
    asked for.
    """
    check_quantities(config.quantities)
    for setting in settings:
        if setting.gamma == PLANNED and not (setting.is_plain or has_alpha(setting)):
            raise ValueError(
                f"gamma is {PLANNED!r}, but no acceptance rate is known of {setting.drafter_name} "
                f"with the rule {setting.rule.name}: give a number"
            )
    programs = 0
    grouped = groups(settings)
    for number, group in enumerate(grouped):
        group = _plain_settings(group) + [setting for setting in group if not setting.is_plain]
        if programs + len(group) > TOGETHER:
            jax.clear_caches()
            programs = 0
        programs += len(group)
        steps = 2 * len(group) + config.repeats * ("speed" in config.quantities)
        step = _steps(doing, group[0], itertools.count(number * steps), len(grouped) * steps)
        yield _measure_or_fail(target, group, config, step)


def check_quantities(quantities: Sequence[str], name: str = "quantity") -> None:
    """Raises ValueError for an unknown quantity, or one of timed runs where nothing is timed.

    >>> check_quantities(["alpha", "costs"])
    Traceback (most recent call last):
    ValueError: costs is measured in timed runs: add speed to alpha, costs
    """
    for quantity in quantities:
        one_of(quantity, name, QUANTITIES)
    timed = [quantity for quantity in quantities if quantity not in ("speed", "alpha")]
    if timed and "speed" not in quantities:
        raise ValueError(
            f"{timed[0]} is measured in timed runs: add speed to {', '.join(quantities)}"
        )


def _plain_settings(group: Sequence[Setting]) -> list[Setting]:
    """Makes the settings of plain decoding for a group, one for each target and backend."""
    plain = {(id(setting.target), setting.backend_name): setting.plain() for setting in group}
    return list(plain.values())


Step = Callable[[str], object]  # is called with what is done next


def _steps(
    doing: Callable[[str, float], object], setting: Setting, count: Iterator[int], steps: int
) -> Step:
    if setting.batch > 1:
        batch = f", batch {setting.batch}"
    else:
        batch = ""
    title = f"{setting.task.name}, T = {setting.temperature:g}{batch}"
    return lambda step: doing(f"{title}: {step}", next(count) / steps)


def groups(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Splits settings into groups to interleave, each with one task, batch size and sampling, and
    not too many.
    """
    alike: dict[tuple[Any, ...], list[Setting]] = {}
    for setting in settings:
        task = (
            setting.task.name,
            id(setting.task.prompts),
            setting.task.new_tokens,
            setting.task.ends,
        )
        alike.setdefault((*task, setting.batch, repr(setting.sampling)), []).append(setting)
    return [
        group[i : i + TOGETHER] for group in alike.values() for i in range(0, len(group), TOGETHER)
    ]


class Run(NamedTuple):
    """A setting that is measured."""

    setting: Setting
    result: BenchResult  # what is known so far
    prepared: Prepared  # all of its prompts, with the gamma and the policy that are used
    parts: Sequence[Prepared]  # the batches that are decoded
    real: Sequence[int]  # how many rows of each part count; the others fill its shape
    # one for each part, which decodes it and waits for it
    calls: Sequence[Callable[[], object]] = ()
    texts: Sequence[list[int]] = ()  # the new tokens of all rows
    # one of each part, from the compiled program; empty for another backend
    outcomes: Sequence[Outcome] = ()

    is_compiled = property(
        lambda self: self.setting.backend is None, doc="True if no other backend runs it."
    )
    pair = property(
        lambda self: (id(self.setting.target), id(self.setting.drafter)), doc="Tells pairs apart."
    )

    def plain_of(self, runs: Sequence[Run], backend: str = "") -> Run:
        """Finds plain decoding by the same target: the first, or the one on a backend."""
        alike = (
            run
            for run in runs
            if run.setting.is_plain and run.setting.target is self.setting.target
        )
        return next(run for run in alike if backend in ("", run.setting.backend_name))


def _measure_or_fail(
    target: Model, settings: Sequence[Setting], config: Config, step: Step
) -> list[BenchResult]:
    """Measures a group; where that fails, its results have the error in place of numbers."""

    def failed(setting: Setting, error: str) -> BenchResult:
        described = records.summary(setting, setting.target or target)
        return BenchResult(described, environment=environment.current(), error=error)

    try:
        return _measure(target, settings, config, step)
    except (FloatingPointError, MemoryError, jax.errors.JaxRuntimeError) as error:
        return [failed(setting, f"{type(error).__name__}: {error}") for setting in settings]


def _measure(
    target: Model, settings: Sequence[Setting], config: Config, step: Step
) -> list[BenchResult]:
    quantities = set(config.quantities)
    results = list[BenchResult]()
    shared: dict[str, Any] = {"environment": environment.current(), "group": uuid.uuid4().hex[:12]}
    with tempfile.TemporaryDirectory() as folder:
        predictor = Predictor(max(config.repeats, PLANNING))
        runs = [_prepare(target, setting, config, predictor, step) for setting in settings]
        runs = [_decode(run, Path(folder), step) for run in runs]
        timers = {}
        if {"speed", "costs"} <= quantities:
            timers = _pass_timers(runs)
        if "speed" in quantities:
            runs = _time(runs, list(timers.values()), config.repeats, step)
        if "latency" in quantities:
            latencies = _latencies(runs, config.repeats)
        else:
            latencies = [None] * len(runs)
        for run, latency in zip(runs, latencies, strict=True):
            plain = run.plain_of(runs)
            result = _with_speeds(
                _with_texts(run, plain), run.plain_of(runs, run.setting.backend_name).result
            )
            if "compile" not in quantities:
                result = result._replace(first_call=None)
            if "memory" in quantities and run.is_compiled:
                result = result._replace(memory=memory.account(run.parts[0]))
            if not run.setting.is_plain and quantities & {"alpha", "costs"}:
                timer = timers.get(run.pair) if run.is_compiled else None
                result = result._replace(
                    **_promises(run, plain, predictor, timer, "alpha" in quantities)
                )
            results.append(result._replace(latency=latency, **shared))
    first = results[0]
    # A result with the dtype, mesh and backend of the first is compared with its plain decoding
    # anyhow.
    where = operator.attrgetter("setting.dtype", "setting.mesh", "setting.backend")
    return [
        result._replace(
            speed_over_first=None if where(result) == where(first) else records.over(result, first)
        )
        for result in results
    ]


def _prepare(
    target: Model, setting: Setting, config: Config, predictor: Predictor, step: Step
) -> Run:
    """Prepares a setting's prompts; a gamma or a policy that is to be planned is planned first."""
    task = setting.task
    pays = True
    step(f"preparing {setting.drafter_name or 'plain decoding'}")
    ends = None if task.ends else ()
    key = jax.random.key(config.seed)
    options = {"max_new_tokens": task.new_tokens, "key": key, "eos_ids": ends, **setting.sampling}
    prepared = prepare(setting.target or target, task.prompts, **options)
    if not setting.is_plain:
        gamma = 1 if setting.gamma == PLANNED else setting.gamma
        prepared = prepared.replace(drafter=setting.drafter, gamma=gamma, rule=setting.rule)
        if setting.gamma == PLANNED:
            plan = predictor.plan(setting, prepared)
            pays = plan.gamma > 0
            gamma = plan.chain.gamma
        (example,) = batches.whole_batches(
            prepared.replace(gamma=gamma), setting.batch, setting.batch
        )
        prepared = prepared.replace(gamma=gamma, policy=predictor.policy(setting, example))
    gamma = 0 if setting.is_plain else prepared.decoder.gamma
    described = records.summary(setting, prepared.target)._replace(pays=pays, gamma=gamma)
    if "speed" in config.quantities:
        parts = batches.whole_batches(prepared, setting.batch, config.num_prompts)
        real = [setting.batch] * len(parts)
    else:
        parts, _, real = zip(*batches.in_batches(prepared, acceptance.BATCH), strict=True)
    return Run(setting, BenchResult(described), prepared, parts, real)


def _decode(run: Run, folder: Path, step: Step) -> Run:
    """Compiles what a prepared run needs, and decodes its parts once."""
    setting = run.setting
    outcomes = list[Outcome]()
    first_call = None
    step(f"compiling {setting.drafter_name or 'plain decoding'}")
    if setting.backend is not None:
        calls, texts, passes = setting.backend.decode(setting, run.parts, folder)
    else:
        started = time.perf_counter()
        first = jax.block_until_ready(batches.run(run.parts[0]))
        first_call = time.perf_counter() - started
        for outcome, real in zip([first, *map(batches.run, run.parts[1:])], run.real, strict=True):
            outcomes.append(jax.tree.map(lambda rows, real=real: rows[:real], outcome))
        if any(outcome.failed.any() for outcome in outcomes):
            raise FloatingPointError(
                f"the logits of {run.prepared.target.name or 'the target'} were not finite"
            )
        calls = [functools.partial(cost.run_all, (prepared,)) for prepared in run.parts]
        texts = batches.texts(outcomes)
        passes = sum(1 + int(outcome.stats.rounds.max()) for outcome in outcomes)
    counts = {"texts": len(texts), "tokens": sum(map(len, texts)), "passes": passes}
    result = run.result._replace(first_call=first_call, **counts)
    return run._replace(result=result, calls=calls, texts=texts, outcomes=outcomes)


def _pass_timers(runs: Sequence[Run]) -> dict[tuple[int, int], PassTimer]:
    """Makes a timer of the passes of every pair of a target and a drafter."""
    lengths = dict[tuple[int, int], tuple[Prepared, set[int]]]()
    for run in runs:
        if run.is_compiled and not run.setting.is_plain:
            _, of_pair = lengths.setdefault(run.pair, (run.parts[0], set()))
            of_pair |= set(draft_lengths(run.parts[0], run.setting.policy is not None))
    return {
        pair: PassTimer(prepared, list(of_pair)) for pair, (prepared, of_pair) in lengths.items()
    }


def _time(runs: Sequence[Run], timers: Sequence[PassTimer], repeats: int, step: Step) -> list[Run]:
    """Times every run and its prefill, interleaved part by part; and between the repeats, what
    passes cost.
    """
    calls = [call for group in zip(*(run.calls for run in runs), strict=True) for call in group]
    compiled = [i for i, run in enumerate(runs) if run.is_compiled]
    prefills = [
        functools.partial(cost.run_all, (cost.only_first(runs[i].parts[0]),)) for i in compiled
    ]
    seconds = np.zeros((len(runs), repeats))
    prefill = np.full((len(runs), repeats), np.nan)
    cost.interleave(prefills, 1)  # compiles
    for repeat in range(repeats):
        step(f"run {repeat + 1} of {repeats}")
        by_part = cost.interleave(calls, 1).reshape(-1, len(runs))  # [parts, runs]
        seconds[:, repeat] = by_part.sum(axis=0)
        prefill[compiled, repeat] = cost.interleave(prefills, 1)[:, 0] * len(by_part)
        for timer in timers:
            timer.time()
    timed = list[Run]()
    for run, times, median in zip(
        runs, seconds.tolist(), np.median(prefill, axis=1).tolist(), strict=True
    ):
        result = run.result._replace(
            seconds=tuple(times), prefill_seconds=median if run.is_compiled else None
        )
        timed.append(run._replace(result=result))
    return timed


def _latencies(runs: Sequence[Run], repeats: int) -> list[records.Latency | None]:
    """Times tokens as a reader of the stream gets them, interleaved part by part; None of another
    backend.

    A round's milliseconds are divided by the tokens that it brought. Each row's first token is
    prefill's.
    """
    compiled = [run for run in runs if run.is_compiled]
    for run in compiled:
        list(cost.timed_rounds(run.parts[0]))  # compiles
    first = np.zeros((len(compiled), repeats))  # milliseconds, of the first part
    # seconds of each token
    later: list[list[list[float]]] = [[[] for _ in range(repeats)] for _ in compiled]
    for repeat in range(repeats):
        for index, group in enumerate(zip(*(run.parts for run in compiled), strict=True)):
            for i, prepared in enumerate(group):
                for took, info in cost.timed_rounds(prepared):
                    if info is not None:
                        counts = np.asarray(info.num_committed).tolist()
                        later[i][repeat] += [took / n for n in counts for _ in range(n)]
                    elif index == 0:
                        first[i, repeat] = took

    def latency(i: int) -> records.Latency:
        percentiles = np.array([np.percentile(ms, (50, 95)) for ms in later[i] if ms]).T
        if len(percentiles):
            spreads = map(Spread.of, percentiles)
        else:
            spreads = (None, None)
        return records.Latency(Spread.of(first[i]), *spreads)

    latencies = map(latency, range(len(compiled)))
    return [next(latencies) if run.is_compiled else None for run in runs]


def _with_speeds(result: BenchResult, plain: BenchResult) -> BenchResult:
    """Adds the speeds of a run that was timed, by itself and over plain decoding on the same
    backend.
    """
    if not result.seconds:
        return result
    seconds = np.array(result.seconds)
    result = result._replace(tokens_per_second=Spread.of(result.tokens / seconds))
    if result.setting.is_plain:
        return result
    result = result._replace(speed=records.over(result, plain))
    if result.prefill_seconds is None or plain.prefill_seconds is None:
        return result
    later = result.later_tokens / max(plain.later_tokens, 1)
    plain_seconds = np.array(plain.seconds) - plain.prefill_seconds
    return result._replace(
        speed_after_prefill=records.ratio(plain_seconds, seconds - result.prefill_seconds, later)
    )


def _with_texts(run: Run, plain: Run) -> BenchResult:
    """Compares a run's texts with plain decoding's, and reports the fates of the draft tokens."""
    result = run.result
    if not run.setting.temperature and (run.setting.is_plain or run.setting.rule.exact):
        pairs = list(zip(run.texts, plain.texts, strict=True))
        places = [numerics.first_difference(*pair) for pair in pairs]
        result = result._replace(same_text=places.count(None))
        for text, index in [
            (text, index) for text, index in enumerate(places) if index is not None
        ][:1]:
            endings = tuple(
                tuple(tokens[max(0, index - LONGEST) : index + 1]) for tokens in pairs[text]
            )
            result = result._replace(difference=records.Difference(text, index, *endings))
    if run.setting.is_plain or not run.outcomes:
        return result
    # beyond, prompts are the same, and intervals want independent texts
    count = len(run.prepared.prompt.length)
    stats = [outcome.stats for outcome in run.outcomes]
    traces = [outcome.trace for outcome in run.outcomes]
    rounds = np.concatenate([counts.rounds for counts in stats])
    emitted = np.concatenate([counts.emitted for counts in stats])[:count]
    # Rounds with a draft: a round after the row's end has a draft length, too, but commits nothing.
    drafted = [(trace.draft_length * (trace.num_committed > 0) > 0).sum(axis=1) for trace in traces]
    longest = np.concatenate([longest_drafts(outcome) for outcome in run.outcomes])
    drafts = records.Drafts(
        share_of_rounds=Rate.of(np.concatenate(drafted)[:count], rounds[:count], probability=True),
        tokens_per_round=sum(int(counts.drafted.sum()) for counts in stats)
        / max(int(rounds.sum()), 1),
        longest_per_round=float(longest.mean()) if len(longest) else 0.0,
    )
    if not run.prepared.decoder.trees:
        tested = acceptance.conditional(*traces).first(count)
        drafts = drafts._replace(
            conditional=tested.overall, conditional_by_draft_token=tuple(tested.by_draft_token)
        )
    return result._replace(tokens_per_round=Rate.of(emitted - 1, rounds[:count]), drafts=drafts)


def _promises(
    run: Run, plain: Run, predictor: Predictor, timer: PassTimer | None, with_alpha: bool
) -> dict[str, Any]:
    """Measures alpha and costs, and computes the speeds that they promise."""
    setting = run.setting
    prepared = run.prepared
    has_policy = setting.policy is not None
    chains = not prepared.decoder.trees
    if timer is None:
        costs = None
    else:
        costs = timer.costs(draft_lengths(prepared, has_policy)[-1])
    if with_alpha:
        alpha = predictor.alpha(setting, prepared)
    else:
        alpha = None
    predicted = records.Predicted()
    if alpha is not None and costs is not None and chains and not has_policy:
        cv = costs.c.median, costs.v.median
        speed = formulas.improvement(min(alpha.value, 1.0), prepared.decoder.gamma, *cv)
        predicted = predicted._replace(theorem=float(speed))
    if timer is not None and chains:
        passes = timer.passes(prepared, run.outcomes, has_policy)
    else:
        passes = None
    if passes and plain.outcomes:
        plain_passes = plain.result.passes - len(plain.parts)
        saved = run.result.later_tokens / max(plain.result.later_tokens, 1) * plain_passes / passes
        predicted = predicted._replace(rounds=saved)
    return {
        "alpha": alpha,
        "costs": costs,
        "predicted": None if predicted == records.Predicted() else predicted,
    }


def has_alpha(setting: Setting) -> bool:
    """Tells whether a setting has an acceptance rate: its drafter is a model, its rule exact or of
    a known lenience.
    """
    return isinstance(setting.drafter, Model) and (
        setting.rule.exact or setting.rule.lenience is not None
    )


class Predictor:
    """Measures rates, plans and costs of a group's settings, each once for all settings that it
    serves.
    """

    def __init__(self, repeats: int):
        self._repeats = repeats
        self._measured: dict[tuple[Any, ...], Any] = {}

    def alpha(self, setting: Setting, prepared: Prepared) -> Rate | None:
        """Measures the acceptance rate, over all positions of the target's text; None if it cannot
        be measured.
        """
        if not has_alpha(setting):
            return None
        key = "alpha", setting.rule.lenience or 1.0
        return self._once(key, setting, lambda: acceptance.measure(prepared).rate)

    def plan(self, setting: Setting, prepared: Prepared) -> planning.Plan:
        """Plans gamma for a setting that has an acceptance rate."""
        options = {"batches": (setting.batch,), "most": MOST, "repeats": self._repeats}
        key = "plan", setting.rule.lenience or 1.0
        return self._once(key, setting, lambda: next(planning.of_pair(prepared, **options)))

    def policy(self, setting: Setting, part: Prepared) -> BoundPolicy | None:
        """Returns the setting's policy; in the place of `ADAPTIVE` one with c and v as measured,
        searches included.
        """
        if setting.policy != ADAPTIVE:
            return setting.policy  # type: ignore[return-value]
        key = "policy", part.decoder.gamma
        costs = self._once(key, setting, lambda: cost.policy_costs(part, repeats=self._repeats))
        rows = len(part.request.max_new_tokens)
        return policies.adaptive(
            *costs, together=cost.agreement("batch", rows, part.is_sampled, part.options.rule)
        )

    def _once(self, key: Any, setting: Setting, measure: Callable[[], Any]) -> Any:
        key = (key, id(setting.target), id(setting.drafter))
        if key not in self._measured:
            self._measured[key] = measure()
        return self._measured[key]
