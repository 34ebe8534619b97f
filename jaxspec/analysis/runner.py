"""The runner: decodes every setting, interleaved with plain decoding on the same prompts, and yields a row for each.

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
import jax.numpy as jnp
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
    SettingSummary,
    Spread,
    from_json,
    over,
    ratio,
    to_json,
)
from jaxspec.analysis.setting import PLANNED, Digests, Setting, describe, dtype_of, mesh_name
from jaxspec.analysis.statistics import Ratio
from jaxspec.analysis.store import Store
from jaxspec.core import Model
from jaxspec.decode import batches
from jaxspec.decode.loop import Outcome
from jaxspec.decode.request import Prepared, prepare

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
SCHEMA = 12  # of a row: changes when what it means does, so that a store's older rows are measured again
MACHINE = ("device", "devices", "cpu", "cpus", "jax", "jaxlib", "jaxspec", "cuda_plugin", "xla_flags")
LONGEST = 16  # tokens of a text that are kept from where it differs


class Config(NamedTuple):
    """What is measured of each setting, and how much is done for it.

    Attributes:
        num_prompts: those that a timed run decodes, in whole batches; they begin again where there are too few.
        repeats: timed runs.
        seed: of sampled texts.
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

    What the store has is not measured again; what it lacks is added to it, group by group, and is interleaved with
    plain decoding anew. A group that fails (logits that are not finite, memory that does not suffice) has rows with an
    error, which are not stored, and takes no other with it; nor does a setting whose gamma cannot be planned.

    Args:
        target: the model to decode from.
        settings: any; `setting.product` makes combinations.
        store: of finished rows; None stores none.
        config: what is measured.
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
        >>> for row in run(model, settings, config=Config(num_prompts=2, repeats=1)):
        ...     print(row.setting.drafter or "plain", row.setting.gamma, row.tokens, row.same_text)
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
    if odd := set(config.quantities) - set(QUANTITIES):
        raise ValueError(f"no quantity {min(odd)!r}: expected some of {', '.join(QUANTITIES)}")
    if store and any(not (one.is_plain or one.is_named) for one in settings):
        raise ValueError("a drafter has no name to be found by in the store: give its Setting one, as name=")
    about, programs, every = environment.current(), 0, groups(settings)
    digests: Digests = {}
    shared = {"schema": SCHEMA, **to_json(config)} | {name: getattr(about, name) for name in MACHINE}
    for number, group in enumerate(every):
        plain = list({(id(one.target), one.backend_name): one.plain() for one in group}.values())
        some = plain + [one for one in group if not one.is_plain]
        keys = [shared | describe(one, target, digests) if store else {} for one in some]
        rows = [_stored(store, key) for key in keys]
        measured = next((row.group for row in rows[len(plain) :] if row), "")  # whose plain decoding is beside them
        rows[: len(plain)] = [_stored(store, key, measured) for key in keys[: len(plain)]]
        todo = [i for i, found in enumerate(rows) if found is None or (i < len(plain) and None in rows)]
        if programs + len(todo) > TOGETHER:
            jax.clear_caches()
            programs = 0
        programs += len(todo)
        if todo:
            steps = 2 * len(todo) + config.repeats * ("speed" in config.quantities)
            step = functools.partial(_step, doing, _title(some[0]), itertools.count(number * steps), len(every) * steps)
            for i, row in zip(todo, _measure_or_fail(target, [some[i] for i in todo], config, step), strict=True):
                rows[i] = row
                if store and row.error is None:
                    store.put(keys[i], to_json(row), to_json(row.environment))
        yield [row for row in rows if row is not None]


def _stored(store: Store | None, key: dict[str, Any], group: str = "") -> BenchResult | None:
    found = store.get(key, group) if store else None
    return None if found is None else from_json(found)


Step = Callable[[str], object]


def _step(doing: Callable[[str, float], object], title: str, count: Iterator[int], steps: int, what: str) -> None:
    doing(f"{title}: {what}", next(count) / steps)


def groups(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Settings that are interleaved: of one task, batch size and sampling, and not too many."""
    found: dict[tuple[Any, ...], list[Setting]] = {}
    for one in settings:
        task = one.task.name, id(one.task.prompts), one.task.new_tokens, one.task.ends
        found.setdefault((*task, one.batch, repr(one.sampling)), []).append(one)
    return [some[i : i + TOGETHER] for some in found.values() for i in range(0, len(some), TOGETHER)]


class Decoded(NamedTuple):
    """What decoding a setting yields.

    Attributes:
        calls: one for each batch: a whole generation, and waits for it.
        texts: the new tokens of all rows.
        passes: of the target, prefill's included.
        outcomes: of the compiled program; none of another backend.
        first_call: seconds of the first one, which compiles the program; None of another backend.
    """

    calls: Sequence[Callable[[], object]]
    texts: list[list[int]]
    passes: int
    outcomes: list[Outcome]
    first_call: float | None


class Variant(NamedTuple):
    """A setting, ready to run: its prompts, the parts of them that are decoded, and how many of their rows count."""

    setting: Setting
    prepared: Prepared
    parts: list[Prepared]
    real: list[int]
    pays: bool  # what the plan says, where gamma is its choice


def _measure_or_fail(target: Model, settings: Sequence[Setting], config: Config, step: Step) -> list[BenchResult]:
    try:
        return _measure(target, settings, config, step)
    except predict.NoPlanError as error:  # of this setting alone
        unfit = error.setting
        found = iter(_measure_or_fail(target, [one for one in settings if one is not unfit], config, step))
        return [_failed(one, target, error) if one is unfit else next(found) for one in settings]
    except (FloatingPointError, MemoryError, jax.errors.JaxRuntimeError) as error:
        return [_failed(one, target, error) for one in settings]


def _failed(setting: Setting, target: Model, error: Exception) -> BenchResult:
    why = f"{type(error).__name__}: {error}"
    return BenchResult(_summary(setting, setting.target or target), environment=environment.current(), error=why)


def _measure(target: Model, settings: Sequence[Setting], config: Config, step: Step) -> list[BenchResult]:
    """Measures a group, plain decoding first."""
    asked = set(config.quantities)
    machine, group, timed = environment.current(), uuid.uuid4().hex[:12], "speed" in asked
    with tempfile.TemporaryDirectory() as folder:
        predictor = Predictor(max(config.repeats, PLANNING))
        variants = [_variant(target, setting, config, predictor, step) for setting in settings]
        decoded = [_decode(variant, Path(folder), step) for variant in variants]
        timers = _timers(variants) if timed and "costs" in asked else {}
        seconds, first = _times(variants, decoded, list(timers.values()), config.repeats if timed else 0, step)
        latencies = _latencies(variants, config.repeats) if "latency" in asked else {}
        results = []
        for i, variant in enumerate(variants):
            setting, compiled = variant.setting, variant.setting.backend is None
            summary = _summary(setting, variant.prepared.target)._replace(pays=variant.pays)
            result = _decoding(BenchResult(summary, group=group, environment=machine), variant, decoded[i])
            result = result._replace(latency=latencies.get(i))
            if timed:
                result = _timed(result, seconds[i], first[i])
            if "compile" in asked:
                result = result._replace(first_call=decoded[i].first_call)
            if "memory" in asked and compiled:
                result = result._replace(memory=memory.account(variant.parts[0]))
            result = _against_plain(result, i, variants, decoded, seconds, first)
            if not setting.is_plain and asked & {"alpha", "costs"}:
                timer = timers.get(_pair(variant)) if compiled else None
                result = _expectations(result, i, predictor, timer, variants, decoded, asked)
            results.append(result)
    return [
        result._replace(speed_over_first=None if _is_own(result, results) else over(result, results[0]))
        for result in results
    ]


def _is_own(result: BenchResult, results: Sequence[BenchResult]) -> bool:
    """Whether the group's first plain decoding is the one that this is compared with anyhow."""
    first, second = ((x.setting.dtype, x.setting.mesh, x.setting.backend) for x in (result, results[0]))
    return first == second


def _variant(target: Model, setting: Setting, config: Config, predictor: Predictor, step: Step) -> Variant:
    task, pays = setting.task, True
    step(f"preparing {setting.drafter_name or 'plain decoding'}")
    ends, key = None if task.ends else (), jax.random.key(config.seed)
    own = setting.target or target
    prepared = prepare(own, task.prompts, max_new_tokens=task.new_tokens, key=key, eos_ids=ends, **setting.sampling)
    if not setting.is_plain:
        gamma = 1 if setting.gamma == PLANNED else setting.gamma
        prepared = prepared.replace(drafter=setting.drafter, gamma=gamma, rule=setting.rule)
        if setting.gamma == PLANNED:
            plan = predictor.plan(setting, prepared)
            gamma, pays = plan.best, plan.gamma > 0
        (example,) = batches.whole_batches(prepared.replace(gamma=gamma), setting.batch, setting.batch)
        prepared = prepared.replace(gamma=gamma, policy=predictor.policy(setting, example))
    if "speed" in config.quantities:
        parts = batches.whole_batches(prepared, setting.batch, config.num_prompts)
        return Variant(setting, prepared, parts, [setting.batch] * len(parts), pays)
    parts = list(batches.in_batches(prepared, acceptance.BATCH))
    return Variant(setting, prepared, [part.prepared for part in parts], [part.real for part in parts], pays)


def _decode(variant: Variant, folder: Path, step: Step) -> Decoded:
    """Compiles and runs a variant once."""
    setting = variant.setting
    step(f"compiling {setting.drafter_name or 'plain decoding'}")
    started = time.perf_counter()
    if setting.backend is not None:
        return Decoded(*setting.backend.decode(setting, variant.parts, folder), [], None)
    done = jax.block_until_ready(batches.run(variant.parts[0]))
    first_call = time.perf_counter() - started
    done = [done, *map(batches.run, variant.parts[1:])]
    outcomes = [jax.tree.map(lambda x, real=real: x[:real], one) for one, real in zip(done, variant.real, strict=True)]
    if any(outcome.failed.any() for outcome in outcomes):
        raise FloatingPointError(f"the logits of {variant.prepared.target.name or 'the target'} were not finite")
    calls: list[Callable[[], object]] = [functools.partial(timing.run_all, (part,)) for part in variant.parts]
    passes = sum(1 + int(outcome.stats.rounds.max()) for outcome in outcomes)
    return Decoded(calls, batches.texts(outcomes), passes, outcomes, first_call)


def _pair(variant: Variant) -> tuple[int, int]:
    return id(variant.setting.target), id(variant.setting.drafter)


def _timers(variants: Sequence[Variant]) -> dict[tuple[int, int], PassTimer]:
    """Makes what times the passes of every drafter."""
    found: dict[tuple[int, int], tuple[Prepared, set[int]]] = {}
    for one in variants:
        if not one.setting.is_plain and one.setting.backend is None:
            _, drafts = found.setdefault(_pair(one), (one.parts[0], set()))
            drafts |= set(predict.drafts_of(one.parts[0], one.setting.policy is not None))
    return {pair: PassTimer(prepared, list(drafts)) for pair, (prepared, drafts) in found.items()}


def _times(
    variants: Sequence[Variant], decoded: Sequence[Decoded], timers: Sequence[PassTimer], repeats: int, step: Step
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of every variant [variants, repeats], and of its prefill, all batches' (NaN of other backends)."""
    calls = [call for group in zip(*(one.calls for one in decoded), strict=True) for call in group]
    ours = [i for i, one in enumerate(variants) if one.setting.backend is None]
    starts = [functools.partial(timing.run_all, (only_first(variants[i].parts[0]),)) for i in ours]
    seconds, first = np.zeros((len(variants), repeats)), np.full((len(variants), repeats), np.nan)
    if repeats:
        timing.interleave(starts, 1)
    for repeat in range(repeats):
        step(f"run {repeat + 1} of {repeats}")
        each = timing.interleave(calls, 1).reshape(-1, len(variants))
        seconds[:, repeat] = each.sum(axis=0)
        first[ours, repeat] = timing.interleave(starts, 1)[:, 0] * len(each)
        for timer in timers:
            timer.time()
    return seconds, np.repeat(np.median(first, axis=1, keepdims=True), repeats, axis=1) if repeats else first


def only_first(prepared: Prepared) -> Prepared:
    """The same program, which ends with the token that prefill yields."""
    return prepared._replace(
        request=prepared.request._replace(max_new_tokens=jnp.ones_like(prepared.request.max_new_tokens))
    )


def _latencies(variants: Sequence[Variant], repeats: int) -> dict[int, Latency]:
    ours = [i for i, one in enumerate(variants) if one.setting.backend is None]
    first = timing.interleave([functools.partial(timing.start_all, variants[i].parts[:1]) for i in ours], repeats + 1)
    found = {}
    for i, start, each in zip(ours, first, timing.latency([variants[i].parts for i in ours], repeats), strict=True):
        found[i] = Latency(Spread.of(1e3 * start[1:]), *(each or (None, None)))
    return found


def _timed(result: BenchResult, seconds: np.ndarray, first: np.ndarray) -> BenchResult:
    """Adds the times of a setting by themselves."""
    prefill = float(np.median(first))
    return result._replace(
        seconds=tuple(seconds.tolist()),
        prefill_seconds=None if np.isnan(prefill) else prefill,
        tokens_per_second=Spread.of(result.tokens / seconds),
    )


def _summary(setting: Setting, target: Model) -> SettingSummary:
    """Describes a setting in words and numbers; its gamma is not known before it is prepared."""
    return SettingSummary(
        target=target.name,
        task=setting.task.name,
        drafter=setting.drafter_name,
        policy=setting.policy_label,
        rule="" if setting.is_plain else setting.rule.name,
        exact=setting.is_plain or setting.rule.exact,
        planned=setting.gamma == PLANNED,
        temperature=setting.temperature,
        sampling=", ".join(f"{name}={value}" for name, value in setting.sampling.items() if name != "temperature"),
        dtype=dtype_of(target),
        mesh=mesh_name(target),
        batch=setting.batch,
        new_tokens=setting.task.new_tokens,
        backend=setting.backend_name,
    )


def _decoding(result: BenchResult, variant: Variant, decoded: Decoded) -> BenchResult:
    """Adds how much text there is, and what became of the draft tokens."""
    tokens = sum(map(len, decoded.texts))
    result = result._replace(texts=len(decoded.texts), tokens=tokens, passes=decoded.passes)
    if variant.setting.is_plain:
        return result
    result = result._replace(setting=result.setting._replace(gamma=variant.prepared.decoder.gamma))
    if not decoded.outcomes:
        return result
    count = len(variant.prepared.prompt.length)  # beyond, prompts are the same, and intervals want independent texts
    stats = [outcome.stats for outcome in decoded.outcomes]
    rounds, emitted = (np.concatenate([getattr(x, name) for x in stats])[:count] for name in ("rounds", "emitted"))
    traces = [outcome.trace for outcome in decoded.outcomes]
    drafted = np.concatenate([(t.draft_length * (t.num_committed > 0) > 0).sum(axis=1) for t in traces])[:count]
    longest = np.concatenate([predict.longest_drafts(outcome) for outcome in decoded.outcomes])
    drafts = Drafts(
        share_of_rounds=Rate.of(Ratio(drafted, rounds, probability=True)),
        tokens_per_round=sum(int(x.drafted.sum()) for x in stats) / max(sum(int(x.rounds.sum()) for x in stats), 1),
        longest_per_round=float(longest.mean()) if len(longest) else 0.0,
    )
    if not variant.prepared.decoder.trees:
        tested = acceptance.conditional(*traces).first(count)
        by_place = tuple(Rate.of(rate) for rate in tested.by_draft_token)
        drafts = drafts._replace(conditional=Rate.of(tested.overall), conditional_by_draft_token=by_place)
    return result._replace(tokens_per_round=Rate.of(Ratio(emitted - 1, rounds)), drafts=drafts)


def _against_plain(
    result: BenchResult,
    i: int,
    variants: Sequence[Variant],
    decoded: Sequence[Decoded],
    seconds: np.ndarray,
    first: np.ndarray,
) -> BenchResult:
    """Adds speeds over plain decoding by the same target and backend, and texts beside those of the same target."""
    setting, j = variants[i].setting, _plain_of(i, variants)
    if not setting.temperature and result.setting.exact:
        pairs = list(zip(decoded[i].texts, decoded[j].texts, strict=True))
        differences = [(text, numerics.first_difference(*pair)) for text, pair in enumerate(pairs)]
        result = result._replace(same_text=sum(at is None for _, at in differences))
        for text, at in [(text, at) for text, at in differences if at is not None][:1]:
            ends = tuple(tuple(tokens[max(0, at - LONGEST) : at + 1]) for tokens in pairs[text])
            result = result._replace(difference=Difference(text, at, *ends))
    if not seconds.shape[1] or setting.is_plain:
        return result
    j = _plain_of(i, variants, setting.backend_name)
    plain_tokens = sum(map(len, decoded[j].texts))
    speed = ratio(seconds[j], seconds[i], result.tokens / max(plain_tokens, 1))
    # Without the first tokens, which prefill yields.
    later, plain_later = result.tokens - result.texts, plain_tokens - result.texts
    after = ratio(seconds[j] - first[j], seconds[i] - first[i], later / max(plain_later, 1))
    return result._replace(speed=speed, speed_after_prefill=after)


def _plain_of(i: int, variants: Sequence[Variant], backend: str = "") -> int:
    """Finds plain decoding by a variant's target: the first, or that on a backend."""
    target, settings = variants[i].setting.target, [variant.setting for variant in variants]
    alike = (j for j, setting in enumerate(settings) if setting.is_plain and setting.target is target)
    return next(j for j in alike if backend in ("", settings[j].backend_name))


def _expectations(
    result: BenchResult,
    i: int,
    predictor: Predictor,
    timer: PassTimer | None,
    variants: Sequence[Variant],
    decoded: Sequence[Decoded],
    asked: set[str],
) -> BenchResult:
    """Adds alpha, costs, and the speeds that they promise."""
    setting, prepared, j = variants[i].setting, variants[i].prepared, _plain_of(i, variants)
    policy, costs, predicted = setting.policy is not None, None, Predicted()
    if timer is not None:
        costs = timer.costs(predict.drafts_of(prepared, policy)[-1])
    if "alpha" in asked:
        alpha = predictor.alpha(setting, prepared)
        result = result._replace(alpha=None if alpha is None else Rate.of(alpha))
        predicted = predicted._replace(theorem=predictor.theorem(setting, prepared, costs))
    passes = None if timer is None else timer.passes(prepared, decoded[i].outcomes, policy)
    if passes and decoded[j].outcomes:
        plain_later = sum(map(len, decoded[j].texts)) - len(decoded[j].texts)
        plain_passes = decoded[j].passes - len(variants[j].parts)
        later = result.tokens - result.texts
        predicted = predicted._replace(rounds=later / max(plain_later, 1) * plain_passes / passes)
    return result._replace(costs=costs, predicted=predicted if any(x is not None for x in predicted) else None)


def _title(setting: Setting) -> str:
    batch = f", batch {setting.batch}" if setting.batch > 1 else ""
    return f"{setting.task.name}, T = {setting.temperature:g}{batch}"
