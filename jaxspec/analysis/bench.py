"""Decodes settings, interleaved with plain decoding on the same prompts, and yields a result for each.

Its parts are in other modules:

- `setting`: a setting, and products of axes
- `result`: the results, and finished ones on disk
- `table`: tables for a screen, markdown and CSV
- `predict`: the promise of acceptance rates and costs
- `plan`: the gamma to take

Settings of one task, batch size and sampling are a group. All of a group are compiled and warmed up, then run one
after the other, generation by generation, `repeats` times; between the repeats what their passes cost is timed. So
whatever else the machine does falls on all of them alike, and speeds and predictions are of one machine at one time.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.analysis import acceptance, environment, memory, numerics, predict, timing
from jaxspec.analysis.predict import PassTimer, Predictor
from jaxspec.analysis.result import (
    BenchResult,
    Difference,
    Drafts,
    Latency,
    Predicted,
    Rate,
    Spread,
    Store,
    from_json,
    over,
    ratio,
    to_json,
)
from jaxspec.analysis.setting import (
    PLANNED,
    Backend,
    Digests,
    Setting,
    Task,
    describe,
    product,
    summary,
)
from jaxspec.analysis.statistics import Ratio
from jaxspec.core import Model
from jaxspec.decode import batches
from jaxspec.decode.loop import Outcome
from jaxspec.decode.request import Prepared, prepare

__all__ = [
    "Backend",
    "BenchResult",
    "Config",
    "Setting",
    "Spread",
    "Store",
    "Task",
    "groups",
    "product",
    "run",
    "run_groups",
    "to_json",
]

QUANTITIES = {
    "speed": "whole generations are timed; without it all prompts are decoded in batches, and nothing is timed",
    "latency": "of the first token, and of the others",
    "compile": "the first call of each program, which compiles it",
    "memory": "of the program, and what it needs at least",
    "alpha": "over all positions of the target's own texts",
    "costs": "c and v, and what a look-up's search takes",
}
TOGETHER = 64  # most programs at a time: they take memory maps, and a process that runs out of these crashes
PLANNING = 9  # timings, at least, of each pass that a plan or a policy is made of
SCHEMA = 13  # of a result: changes when what it means does, so that a store's older ones are measured again
MACHINE = ("device", "devices", "cpu", "cpus", "jax", "jaxlib", "jaxspec", "cuda_plugin", "xla_flags")
LONGEST = 16  # tokens of a text that are kept from where it differs


class Config(NamedTuple):
    """The quantities that are measured of each setting, and the effort.

    Attributes:
        num_prompts: how many a timed run decodes, in whole batches; they begin again where there are too few.
        repeats: timed runs.
        seed: the seed of sampled texts.
        quantities: some of `QUANTITIES`.
    """

    num_prompts: int = 8
    repeats: int = 5
    seed: int = 0
    quantities: tuple[str, ...] = ("speed",)


_USUAL = Config()


def run(
    target: Model,
    settings: Sequence[Setting],
    store: Store | None = None,
    config: Config = _USUAL,
    *,
    doing: Callable[[str, float], object] = lambda what, share: None,
) -> Iterator[BenchResult]:
    """Yields a result for each setting, group by group, after plain decoding by each target and backend of a group.

    `run_groups` yields the groups instead, each as soon as it is measured.

    Results in the store are not measured again. Missing ones are measured group by group, interleaved with plain
    decoding, and added to the store. A group that fails (logits that are not finite, too little memory) has results
    with an error, which are not stored; other groups go on. So they do if a setting's gamma cannot be planned.

    Args:
        target: the model to decode from.
        settings: any; `setting.product` makes combinations.
        store: keeps finished results; None keeps none.
        config: the quantities to measure, and the effort.
        doing: called with what is being done, and the share of everything that is done before.

    Raises:
        ValueError: an unknown quantity, or a store for a drafter without a name.

    Example:
        >>> from jaxspec import drafters
        >>> from jaxspec.analysis.setting import Task, product
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table()
        >>> task, model = Task("ids", prepared.prompt, new_tokens=9), prepared.target
        >>> settings = product(task=task, drafter={"itself": model, "copy": drafters.prompt_lookup()}, gamma=3)
        >>> for result in run(model, settings, config=Config(num_prompts=2, repeats=1)):
        ...     print(result.setting.drafter or "plain", result.setting.gamma, result.tokens, result.same_text)
        plain 0 18 2
        itself 3 18 2
        copy 3 18 2
    """
    return itertools.chain.from_iterable(run_groups(target, settings, store, config, doing=doing))


def run_groups(
    target: Model,
    settings: Sequence[Setting],
    store: Store | None = None,
    config: Config = _USUAL,
    *,
    doing: Callable[[str, float], object] = lambda what, share: None,
) -> Iterator[list[BenchResult]]:
    """Yields the results of a group at a time, as `run`; the next group is measured when it is asked for."""
    if unknown := set(config.quantities) - set(QUANTITIES):
        raise ValueError(f"no quantity {min(unknown)!r}: expected some of {', '.join(QUANTITIES)}")
    if store and any(not (setting.is_plain or setting.is_named) for setting in settings):
        raise ValueError("the store needs a name for each drafter: give its Setting name=")
    machine, programs, grouped = environment.current(), 0, groups(settings)
    digests: Digests = {}
    shared = {"schema": SCHEMA, **to_json(config)} | {name: getattr(machine, name) for name in MACHINE}
    for number, group in enumerate(grouped):
        plain = list({(id(setting.target), setting.backend_name): setting.plain() for setting in group}.values())
        group = plain + [setting for setting in group if not setting.is_plain]
        keys = [shared | describe(setting, target, digests) if store else {} for setting in group]
        results = [_stored(store, key) for key in keys]
        # Plain decoding's results are those of the run that stored the first of the others.
        name = next((result.group for result in results[len(plain) :] if result), "")
        results[: len(plain)] = [_stored(store, key, name) for key in keys[: len(plain)]]
        # What is missing is measured, and all plain decoding beside it.
        todo = [i for i, result in enumerate(results) if result is None or (i < len(plain) and None in results)]
        if programs + len(todo) > TOGETHER:
            jax.clear_caches()
            programs = 0
        programs += len(todo)
        if todo:
            steps = 2 * len(todo) + config.repeats * ("speed" in config.quantities)
            count = itertools.count(number * steps)
            step = functools.partial(_step, doing, _title(group[0]), count, len(grouped) * steps)
            measured = _measure_or_fail(target, [group[i] for i in todo], config, step)
            for i, result in zip(todo, measured, strict=True):
                results[i] = result
                if store and result.error is None:
                    store.put(keys[i], to_json(result), to_json(result.environment))
        yield [result for result in results if result is not None]


def _stored(store: Store | None, key: dict[str, Any], group: str = "") -> BenchResult | None:
    stored = store.get(key, group) if store else None
    return None if stored is None else from_json(stored)


Step = Callable[[str], object]


def _step(doing: Callable[[str, float], object], title: str, count: Iterator[int], steps: int, what: str) -> None:
    doing(f"{title}: {what}", next(count) / steps)


def groups(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Splits settings into groups to interleave, each with one task, batch size and sampling, and not too many."""
    alike: dict[tuple[Any, ...], list[Setting]] = {}
    for setting in settings:
        task = setting.task.name, id(setting.task.prompts), setting.task.new_tokens, setting.task.ends
        alike.setdefault((*task, setting.batch, repr(setting.sampling)), []).append(setting)
    return [group[i : i + TOGETHER] for group in alike.values() for i in range(0, len(group), TOGETHER)]


class Run(NamedTuple):
    """A setting that was prepared and decoded, and how long it took.

    Attributes:
        setting: the setting.
        prepared: all of its prompts, with the gamma and the policy that are used.
        parts: the batches that are decoded.
        real: how many rows of each part count; the others fill its shape.
        pays: the plan's advice, where gamma is the plan's choice.
        calls: one for each part, which decodes it and waits for it.
        texts: the new tokens of all rows.
        passes: how many passes the target takes, prefill's included.
        outcomes: the outcome of each part, from the compiled program; empty for another backend.
        first_call: seconds of the first call, which compiles the program; None of another backend.
        seconds: the seconds of each repeat, all parts together [repeats].
        prefill: seconds of all prefills in a repeat, the median; NaN of another backend.
    """

    setting: Setting
    prepared: Prepared
    parts: Sequence[Prepared]
    real: Sequence[int]
    pays: bool = True
    calls: Sequence[Callable[[], object]] = ()
    texts: Sequence[list[int]] = ()
    passes: int = 0
    outcomes: Sequence[Outcome] = ()
    first_call: float | None = None
    seconds: np.ndarray = np.zeros(0)
    prefill: float = float("nan")

    @property
    def is_compiled(self) -> bool:
        """True if the compiled program runs it, and no other backend."""
        return self.setting.backend is None

    @property
    def tokens(self) -> int:
        """The number of new tokens of all rows."""
        return sum(map(len, self.texts))

    @property
    def later_tokens(self) -> int:
        """The number of new tokens but for each row's first, which prefill yields."""
        return self.tokens - len(self.texts)


def _measure_or_fail(target: Model, settings: Sequence[Setting], config: Config, step: Step) -> list[BenchResult]:
    """Measures a group; where that fails, its results have the error in place of numbers."""
    try:
        return _measure(target, settings, config, step)
    except predict.NoPlanError as error:  # of this setting alone
        unfit = error.setting
        others = [setting for setting in settings if setting is not unfit]
        results = iter(_measure_or_fail(target, others, config, step))
        return [_failed(setting, target, error) if setting is unfit else next(results) for setting in settings]
    except (FloatingPointError, MemoryError, jax.errors.JaxRuntimeError) as error:
        return [_failed(setting, target, error) for setting in settings]


def _failed(setting: Setting, target: Model, error: Exception) -> BenchResult:
    why = f"{type(error).__name__}: {error}"
    return BenchResult(summary(setting, setting.target or target), environment=environment.current(), error=why)


def _measure(target: Model, settings: Sequence[Setting], config: Config, step: Step) -> list[BenchResult]:
    """Measures a group, plain decoding first."""
    quantities, results = set(config.quantities), []
    machine, group, timed = environment.current(), uuid.uuid4().hex[:12], "speed" in quantities
    with tempfile.TemporaryDirectory() as folder:
        predictor = Predictor(max(config.repeats, PLANNING))
        runs = [_prepare(target, setting, config, predictor, step) for setting in settings]
        runs = [_decode(run, Path(folder), step) for run in runs]
        timers = _pass_timers(runs) if timed and "costs" in quantities else {}
        if timed:
            runs = _time(runs, list(timers.values()), config.repeats, step)
        latencies = _latencies(runs, config.repeats) if "latency" in quantities else [None] * len(runs)
        for run, latency in zip(runs, latencies, strict=True):
            described = summary(run.setting, run.prepared.target)._replace(pays=run.pays)
            result = BenchResult(described, group=group, environment=machine, latency=latency)
            result = _with_times(_with_text(result, run), run)
            if "compile" in quantities:
                result = result._replace(first_call=run.first_call)
            if "memory" in quantities and run.is_compiled:
                result = result._replace(memory=memory.account(run.parts[0]))
            result = _with_speed(result, run, runs)
            if not run.setting.is_plain and quantities & {"alpha", "costs"}:
                timer = timers.get(_pair(run)) if run.is_compiled else None
                result = _with_promises(result, run, runs, predictor, timer, "alpha" in quantities)
            results.append(result)
    first = results[0]
    return [
        result._replace(speed_over_first=None if _how(result) == _how(first) else over(result, first))
        for result in results
    ]


def _how(result: BenchResult) -> tuple[str, str, str]:
    """Returns the dtype, mesh and backend: a result with the first one's is compared with its plain decoding anyhow."""
    return result.setting.dtype, result.setting.mesh, result.setting.backend


def _prepare(target: Model, setting: Setting, config: Config, predictor: Predictor, step: Step) -> Run:
    """Prepares a setting's prompts; a gamma or a policy that is to be planned is planned first."""
    task, pays = setting.task, True
    step(f"preparing {setting.drafter_name or 'plain decoding'}")
    ends, key = None if task.ends else (), jax.random.key(config.seed)
    options = {"max_new_tokens": task.new_tokens, "key": key, "eos_ids": ends, **setting.sampling}
    prepared = prepare(setting.target or target, task.prompts, **options)
    if not setting.is_plain:
        gamma = 1 if setting.gamma == PLANNED else setting.gamma
        prepared = prepared.replace(drafter=setting.drafter, gamma=gamma, rule=setting.rule)
        if setting.gamma == PLANNED:
            plan = predictor.plan(setting, prepared)
            gamma, pays = plan.chain.gamma, plan.gamma > 0
        (example,) = batches.whole_batches(prepared.replace(gamma=gamma), setting.batch, setting.batch)
        prepared = prepared.replace(gamma=gamma, policy=predictor.policy(setting, example))
    if "speed" in config.quantities:
        parts = batches.whole_batches(prepared, setting.batch, config.num_prompts)
        return Run(setting, prepared, parts, [setting.batch] * len(parts), pays)
    parts = list(batches.in_batches(prepared, acceptance.BATCH))
    return Run(setting, prepared, [part.prepared for part in parts], [part.real for part in parts], pays)


def _decode(run: Run, folder: Path, step: Step) -> Run:
    """Compiles what a prepared run needs, and decodes its parts once."""
    setting = run.setting
    step(f"compiling {setting.drafter_name or 'plain decoding'}")
    if setting.backend is not None:
        calls, texts, passes = setting.backend.decode(setting, run.parts, folder)
        return run._replace(calls=calls, texts=texts, passes=passes)
    started = time.perf_counter()
    first = jax.block_until_ready(batches.run(run.parts[0]))
    first_call = time.perf_counter() - started
    outcomes = [
        jax.tree.map(lambda rows, real=real: rows[:real], outcome)
        for outcome, real in zip([first, *map(batches.run, run.parts[1:])], run.real, strict=True)
    ]
    if any(outcome.failed.any() for outcome in outcomes):
        raise FloatingPointError(f"the logits of {run.prepared.target.name or 'the target'} were not finite")
    return run._replace(
        calls=[functools.partial(timing.run_all, (part,)) for part in run.parts],
        texts=batches.texts(outcomes),
        passes=sum(1 + int(outcome.stats.rounds.max()) for outcome in outcomes),
        outcomes=outcomes,
        first_call=first_call,
    )


def _pair(run: Run) -> tuple[int, int]:
    return id(run.setting.target), id(run.setting.drafter)


def _pass_timers(runs: Sequence[Run]) -> dict[tuple[int, int], PassTimer]:
    """Makes a timer of the passes of every pair of a target and a drafter."""
    examples: dict[tuple[int, int], tuple[Prepared, set[int]]] = {}
    for run in runs:
        if run.is_compiled and not run.setting.is_plain:
            _, draft_lengths = examples.setdefault(_pair(run), (run.parts[0], set()))
            draft_lengths |= set(predict.draft_lengths(run.parts[0], run.setting.policy is not None))
    return {pair: PassTimer(prepared, list(lengths)) for pair, (prepared, lengths) in examples.items()}


def _time(runs: Sequence[Run], timers: Sequence[PassTimer], repeats: int, step: Step) -> list[Run]:
    """Times every run and its prefill, interleaved part by part; and between the repeats, what passes cost."""
    calls = [call for part in zip(*(run.calls for run in runs), strict=True) for call in part]
    compiled = [i for i, run in enumerate(runs) if run.is_compiled]
    prefills = [functools.partial(timing.run_all, (timing.only_first(runs[i].parts[0]),)) for i in compiled]
    seconds, prefill = np.zeros((len(runs), repeats)), np.full((len(runs), repeats), np.nan)
    timing.interleave(prefills, 1)  # compiles
    for repeat in range(repeats):
        step(f"run {repeat + 1} of {repeats}")
        by_part = timing.interleave(calls, 1).reshape(-1, len(runs))  # [parts, runs]
        seconds[:, repeat] = by_part.sum(axis=0)
        prefill[compiled, repeat] = timing.interleave(prefills, 1)[:, 0] * len(by_part)
        for timer in timers:
            timer.time()
    medians = np.median(prefill, axis=1)
    return [run._replace(seconds=seconds[i], prefill=float(medians[i])) for i, run in enumerate(runs)]


def _latencies(runs: Sequence[Run], repeats: int) -> list[Latency | None]:
    """Times the first token and the others of every run; None of another backend."""
    compiled = [run for run in runs if run.is_compiled]
    starts = [functools.partial(timing.start_all, run.parts[:1]) for run in compiled]
    first_seconds = timing.interleave(starts, repeats + 1)[:, 1:]  # the first repeat compiles
    later = timing.latency([run.parts for run in compiled], repeats)
    latencies = (
        Latency(Spread.of(1e3 * seconds), *(percentiles or (None, None)))
        for seconds, percentiles in zip(first_seconds, later, strict=True)
    )
    return [next(latencies) if run.is_compiled else None for run in runs]


def _with_times(result: BenchResult, run: Run) -> BenchResult:
    """Adds the times of a setting by themselves, where it was timed."""
    if not len(run.seconds):
        return result
    return result._replace(
        seconds=tuple(run.seconds.tolist()),
        prefill_seconds=None if np.isnan(run.prefill) else run.prefill,
        tokens_per_second=Spread.of(result.tokens / run.seconds),
    )


def _with_text(result: BenchResult, run: Run) -> BenchResult:
    """Adds how much text there is, and what became of the draft tokens."""
    result = result._replace(texts=len(run.texts), tokens=run.tokens, passes=run.passes)
    if run.setting.is_plain:
        return result
    result = result._replace(setting=result.setting._replace(gamma=run.prepared.decoder.gamma))
    if not run.outcomes:
        return result
    count = len(run.prepared.prompt.length)  # beyond, prompts are the same, and intervals want independent texts
    stats, traces = [outcome.stats for outcome in run.outcomes], [outcome.trace for outcome in run.outcomes]
    rounds = np.concatenate([part.rounds for part in stats])[:count]
    emitted = np.concatenate([part.emitted for part in stats])[:count]
    # Rounds with a draft: a round after the row's end has a draft length, too, but commits nothing.
    drafted = [(trace.draft_length * (trace.num_committed > 0) > 0).sum(axis=1) for trace in traces]
    longest = np.concatenate([predict.longest_drafts(outcome) for outcome in run.outcomes])
    drafts = Drafts(
        share_of_rounds=Rate.of(Ratio(np.concatenate(drafted)[:count], rounds, probability=True)),
        tokens_per_round=sum(int(part.drafted.sum()) for part in stats)
        / max(sum(int(part.rounds.sum()) for part in stats), 1),
        longest_per_round=float(longest.mean()) if len(longest) else 0.0,
    )
    if not run.prepared.decoder.trees:
        tested = acceptance.conditional(*traces).first(count)
        by_place = tuple(Rate.of(rate) for rate in tested.by_draft_token)
        drafts = drafts._replace(conditional=Rate.of(tested.overall), conditional_by_draft_token=by_place)
    return result._replace(tokens_per_round=Rate.of(Ratio(emitted - 1, rounds)), drafts=drafts)


def _with_speed(result: BenchResult, run: Run, runs: Sequence[Run]) -> BenchResult:
    """Adds speeds over plain decoding by the same target and backend, and texts beside those of the same target."""
    setting, plain = run.setting, _plain_of(run, runs)
    if not setting.temperature and result.setting.exact:
        pairs = list(zip(run.texts, plain.texts, strict=True))
        places = [numerics.first_difference(*pair) for pair in pairs]
        result = result._replace(same_text=places.count(None))
        for text, place in [(text, place) for text, place in enumerate(places) if place is not None][:1]:
            endings = tuple(tuple(tokens[max(0, place - LONGEST) : place + 1]) for tokens in pairs[text])
            result = result._replace(difference=Difference(text, place, *endings))
    if not len(run.seconds) or setting.is_plain:
        return result
    plain = _plain_of(run, runs, setting.backend_name)
    after_prefill = ratio(
        plain.seconds - plain.prefill, run.seconds - run.prefill, run.later_tokens / max(plain.later_tokens, 1)
    )
    speed = ratio(plain.seconds, run.seconds, run.tokens / max(plain.tokens, 1))
    return result._replace(speed=speed, speed_after_prefill=after_prefill)


def _plain_of(run: Run, runs: Sequence[Run], backend: str = "") -> Run:
    """Finds plain decoding by a run's target: the first, or the one on a backend."""
    alike = (other for other in runs if other.setting.is_plain and other.setting.target is run.setting.target)
    return next(other for other in alike if backend in ("", other.setting.backend_name))


def _with_promises(
    result: BenchResult, run: Run, runs: Sequence[Run], predictor: Predictor, timer: PassTimer | None, with_alpha: bool
) -> BenchResult:
    """Adds alpha, costs, and the speeds that they promise."""
    setting, prepared, plain = run.setting, run.prepared, _plain_of(run, runs)
    policy, costs, predicted = setting.policy is not None, None, Predicted()
    if timer is not None:
        costs = timer.costs(predict.draft_lengths(prepared, policy)[-1])
    if with_alpha:
        alpha = predictor.alpha(setting, prepared)
        result = result._replace(alpha=None if alpha is None else Rate.of(alpha))
        predicted = predicted._replace(theorem=predictor.theorem(setting, prepared, costs))
    passes = None if timer is None else timer.passes(prepared, run.outcomes, policy)
    if passes and plain.outcomes:
        plain_passes = plain.passes - len(plain.parts)
        speed = run.later_tokens / max(plain.later_tokens, 1) * plain_passes / passes
        predicted = predicted._replace(rounds=speed)
    is_known = any(promise is not None for promise in predicted)
    return result._replace(costs=costs, predicted=predicted if is_known else None)


def _title(setting: Setting) -> str:
    batch = f", batch {setting.batch}" if setting.batch > 1 else ""
    return f"{setting.task.name}, T = {setting.temperature:g}{batch}"
