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

from jaxspec.analysis.bench import expected
from jaxspec.analysis.bench.expected import Expected, Passes
from jaxspec.analysis.bench.row import (
    Difference,
    Latency,
    Predicted,
    Rate,
    Row,
    Spread,
    from_json,
    over,
    ratio,
    to_json,
)
from jaxspec.analysis.bench.setting import (
    GENERATE,
    JAXSPEC,
    PLANNED,
    TRANSFORMERS,
    Digests,
    Setting,
    describe,
    dtype_of,
    mesh_name,
)
from jaxspec.analysis.bench.store import Store
from jaxspec.analysis.measure import acceptance, batching, environment, memory, numerics, replay, timing
from jaxspec.analysis.measure.statistics import Ratio
from jaxspec.core import Model
from jaxspec.decode import generate
from jaxspec.decode.loop import Outcome
from jaxspec.decode.request import Prepared, prepare

QUANTITIES = {
    "speed": "whole generations are timed; without it all prompts are decoded in batches, and nothing is timed",
    "latency": "of the first token, and of the others",
    "compile": "the first call of each program, which compiles it",
    "memory": "of the program, and what it needs at least",
    "alpha": "over all positions of the target's own texts",
    "costs": "c and v",
    "search": "what a look-up takes, which must draw nothing",
    "replay": "rules are replayed along the target's own texts",
    "candidates": "the probability that one of several candidates for a token is accepted, by replay",
    "overlap": "of a target and the first one",
}
CANDIDATES = 4
TOGETHER = 64  # most programs at a time: they take memory maps, and a process that runs out of these crashes
PLANNING = 9  # timings, at least, of each pass that a plan or a policy is made of
SCHEMA = 11  # of a row: changes when what it means does, so that a store's older rows are measured again
MACHINE = ("device", "devices", "cpu", "cpus", "jax", "jaxlib", "jaxspec", "cuda_plugin", "xla_flags")
LONGEST = 16  # tokens of a text that are kept from where it differs


class Config(NamedTuple):
    """What is measured of each setting, and how much is done for it.

    Attributes:
        rows: prompts that a timed run decodes, in whole batches; they begin again where there are too few.
        repeats: timed runs.
        seed: of sampled texts.
        quantities: some of `QUANTITIES`.
    """

    rows: int = 8
    repeats: int = 5
    seed: int = 0
    quantities: tuple[str, ...] = ("speed",)


USUAL = Config()


def run(
    target: Model,
    settings: Sequence[Setting],
    store: Store | None = None,
    config: Config = USUAL,
    *,
    doing: Callable[[str, float], object] = lambda what, share: None,
) -> Iterator[Row]:
    """A row for each setting, group by group, after one for plain decoding by each target and backend of a group.

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
        >>> from jaxspec.analysis.bench.setting import Task, product
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table()
        >>> task, model = Task("ids", prepared.prompt, new_tokens=9), prepared.target
        >>> settings = product(task=task, drafter={"itself": model, "copy": drafters.prompt_lookup()}, gamma=3)
        >>> for row in run(model, settings, config=Config(rows=2, repeats=1)):
        ...     print(row.drafter or "plain", row.gamma, row.tokens, row.same_text)
        plain 0 18 2
        itself 3 18 2
        copy 3 18 2
    """
    return itertools.chain.from_iterable(run_groups(target, settings, store, config, doing=doing))


def run_groups(
    target: Model,
    settings: Sequence[Setting],
    store: Store | None = None,
    config: Config = USUAL,
    *,
    doing: Callable[[str, float], object] = lambda what, share: None,
) -> Iterator[list[Row]]:
    """As `run`, the rows of a group at a time; the next group is measured when it is asked for."""
    if odd := set(config.quantities) - set(QUANTITIES):
        raise ValueError(f"no quantity {min(odd)!r}: expected some of {', '.join(QUANTITIES)}")
    if store and any(not (one.is_plain or one.is_named) for one in settings):
        raise ValueError("a drafter has no name to be found by in the store: give its Setting one, as name=")
    about, programs, every = environment.current(), 0, groups(settings)
    digests: Digests = {}
    shared = {"schema": SCHEMA, **to_json(config)} | {name: getattr(about, name) for name in MACHINE}
    for number, group in enumerate(every):
        plain = list({(id(one.target), one.backend): one.plain() for one in group}.values())
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


def _stored(store: Store | None, key: dict[str, Any], group: str = "") -> Row | None:
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
    """What a backend made of a setting.

    Attributes:
        calls: one for each batch: a whole generation, and waits for it.
        texts: the new tokens of all rows.
        passes: of the target, prefill's included.
        outcomes: of the compiled program; none of another library.
        first_call: seconds of the first one, which compiles the program.
    """

    calls: list[Callable[[], object]]
    texts: list[list[int]]
    passes: int
    outcomes: list[Outcome]
    first_call: float


class Variant(NamedTuple):
    """A setting, ready to run: its prompts, the parts of them that are decoded, and how many of their rows count."""

    setting: Setting
    prepared: Prepared
    parts: list[Prepared]
    real: list[int]
    pays: bool  # what the plan says, where gamma is its choice


def _measure_or_fail(target: Model, settings: Sequence[Setting], config: Config, step: Step) -> list[Row]:
    try:
        return _measure(target, settings, config, step)
    except expected.NoPlanError as error:  # of this setting alone
        unfit = error.setting
        found = iter(_measure_or_fail(target, [one for one in settings if one is not unfit], config, step))
        return [_failed(one, target, error) if one is unfit else next(found) for one in settings]
    except (FloatingPointError, MemoryError, jax.errors.JaxRuntimeError) as error:
        return [_failed(one, target, error) for one in settings]


def _failed(setting: Setting, target: Model, error: Exception) -> Row:
    about, why = environment.current(), f"{type(error).__name__}: {error}"
    return _about(setting, setting.target or target)._replace(environment=about, error=why)


def _measure(target: Model, settings: Sequence[Setting], config: Config, step: Step) -> list[Row]:
    """Rows of a group, plain decoding first."""
    asked = set(config.quantities)
    about, group, timed = environment.current(), uuid.uuid4().hex[:12], "speed" in asked
    with tempfile.TemporaryDirectory() as folder:
        hopes = Expected(bool(asked & {"replay", "candidates"}), max(config.repeats, PLANNING))
        variants = [_variant(target, one, config, hopes, step) for one in settings]
        decoded = [_decode(one, Path(folder) / "transformers", step) for one in variants]
        costs = _passes(variants, asked) if timed else {}
        seconds, first = _times(variants, decoded, list(costs.values()), config.repeats if timed else 0, step)
        latencies = _latencies(variants, config.repeats) if "latency" in asked else {}
        rows = []
        for i, one in enumerate(variants):
            setting, ours = one.setting, one.setting.backend == JAXSPEC
            row = _about(setting, one.prepared.target)._replace(pays=one.pays, group=group, environment=about)
            row = _decoding(row, one, decoded[i])._replace(latency=latencies.get(i))
            if timed:
                row = _timed(row, seconds[i], first[i])
            if "compile" in asked and setting.backend != TRANSFORMERS:
                row = row._replace(first_call=decoded[i].first_call)
            if "memory" in asked and ours:
                row = row._replace(memory=memory.account(one.parts[0]))
            row = _against_plain(row, i, variants, decoded, seconds, first)
            if not setting.is_plain and asked & {"alpha", "replay", "costs"}:
                row = _expectations(row, i, hopes, costs.get(_pair(one)) if ours else None, variants, decoded, asked)
            if "overlap" in asked and one.prepared.target is not target:
                row = row._replace(overlap=expected.overlap(one.prepared, target))
            rows.append(row)
    return [row._replace(speed_over_first=None if _is_own(row, rows) else over(row, rows[0])) for row in rows]


def _is_own(row: Row, rows: Sequence[Row]) -> bool:
    """Whether the group's first plain decoding is the one that this is compared with anyhow."""
    return (row.dtype, row.mesh, row.backend) == (rows[0].dtype, rows[0].mesh, rows[0].backend)


def _variant(target: Model, setting: Setting, config: Config, hopes: Expected, step: Step) -> Variant:
    task, pays = setting.task, True
    step(f"preparing {setting.drafter_name or 'plain decoding'}")
    ends, key = None if task.ends else (), jax.random.key(config.seed)
    own = setting.target or target
    prepared = prepare(own, task.prompts, max_new_tokens=task.new_tokens, key=key, eos_ids=ends, **setting.sampling)
    if not setting.is_plain:
        gamma = 1 if setting.gamma == PLANNED else setting.gamma
        prepared = prepared.replace(drafter=setting.drafter, gamma=gamma, rule=setting.rule)
        example = batching.whole_batches(prepared, setting.batch, setting.batch)[0]
        if setting.gamma == PLANNED:
            gamma, pays = hopes.plan(setting, prepared, example)
        prepared = prepared.replace(gamma=gamma, policy=hopes.policy(setting, example.replace(gamma=gamma)))
    if "speed" in config.quantities:
        parts = batching.whole_batches(prepared, setting.batch, config.rows)
        return Variant(setting, prepared, parts, [setting.batch] * len(parts), pays)
    batches = list(batching.in_batches(prepared, acceptance.BATCH))
    return Variant(setting, prepared, [part.prepared for part in batches], [part.real for part in batches], pays)


def _decode(variant: Variant, folder: Path, step: Step) -> Decoded:
    """Compiles and runs a variant once."""
    setting = variant.setting
    step(f"compiling {setting.drafter_name or 'plain decoding'}")
    started = time.perf_counter()
    if setting.backend == TRANSFORMERS:
        from jaxspec.analysis.bench import transformers

        return Decoded(*transformers.decode(setting, variant.parts, folder), [], 0.0)
    if setting.backend not in (JAXSPEC, GENERATE):
        raise ValueError(f"no backend {setting.backend!r}: expected {JAXSPEC}, {GENERATE} or {TRANSFORMERS}")
    done = jax.block_until_ready(batching.run(variant.parts[0]))
    first_call = time.perf_counter() - started
    done = [done, *map(batching.run, variant.parts[1:])]
    outcomes = [jax.tree.map(lambda x, real=real: x[:real], one) for one, real in zip(done, variant.real, strict=True)]
    if any(outcome.failed.any() for outcome in outcomes):
        raise FloatingPointError(f"the logits of {variant.prepared.target.name or 'the target'} were not finite")
    calls: list[Callable[[], object]] = [functools.partial(timing.run_all, (part,)) for part in variant.parts]
    if setting.backend == GENERATE:
        calls = [functools.partial(_generate, part) for part in variant.parts]
        for call in calls:
            call()
    passes = sum(1 + int(outcome.stats.rounds.max()) for outcome in outcomes)
    return Decoded(calls, batching.texts(outcomes), passes, outcomes, first_call)


def _generate(part: Prepared) -> None:
    """The front door, from token ids to token ids."""
    eos = [int(token) for token in np.asarray(part.request.eos)[0] if token >= 0]
    options: dict[str, Any] = dict(part.options) | {"eos_ids": eos}
    generate(part.target._replace(tokenizer=None), part.prompt, **options)


def _pair(variant: Variant) -> tuple[int, int]:
    return id(variant.setting.target), id(variant.setting.drafter)


def _passes(variants: Sequence[Variant], asked: set[str]) -> dict[tuple[int, int], Passes]:
    """What times the passes of every drafter."""
    found: dict[tuple[int, int], tuple[Prepared, set[int]]] = {}
    for one in variants:
        if "costs" in asked and not one.setting.is_plain and one.setting.backend == JAXSPEC:
            _, drafts = found.setdefault(_pair(one), (one.parts[0], set()))
            drafts |= set(expected.drafts_of(one.parts[0], one.setting.policy is not None))
    return {pair: Passes(prepared, list(drafts), "search" in asked) for pair, (prepared, drafts) in found.items()}


def _times(
    variants: Sequence[Variant], decoded: Sequence[Decoded], passes: Sequence[Passes], repeats: int, step: Step
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of every variant [variants, repeats], and of its prefill, all batches' (NaN of other backends)."""
    calls = [call for group in zip(*(one.calls for one in decoded), strict=True) for call in group]
    ours = [i for i, one in enumerate(variants) if one.setting.backend == JAXSPEC]
    starts = [functools.partial(timing.run_all, (only_first(variants[i].parts[0]),)) for i in ours]
    seconds, first = np.zeros((len(variants), repeats)), np.full((len(variants), repeats), np.nan)
    if repeats:
        timing.interleave(starts, 1)
    for repeat in range(repeats):
        step(f"run {repeat + 1} of {repeats}")
        each = timing.interleave(calls, 1).reshape(-1, len(variants))
        seconds[:, repeat] = each.sum(axis=0)
        first[ours, repeat] = timing.interleave(starts, 1)[:, 0] * len(each)
        for one in passes:
            one.time()
    return seconds, np.repeat(np.median(first, axis=1, keepdims=True), repeats, axis=1) if repeats else first


def only_first(prepared: Prepared) -> Prepared:
    """The same program, which ends with the token that prefill yields."""
    return prepared._replace(request=prepared.request._replace(limit=jnp.ones_like(prepared.request.limit)))


def _latencies(variants: Sequence[Variant], repeats: int) -> dict[int, Latency]:
    ours = [i for i, one in enumerate(variants) if one.setting.backend == JAXSPEC]
    first = timing.interleave([functools.partial(timing.start_all, variants[i].parts[:1]) for i in ours], repeats + 1)
    found = {}
    for i, start, each in zip(ours, first, timing.latency([variants[i].parts for i in ours], repeats), strict=True):
        found[i] = Latency(Spread.of(1e3 * start[1:]), *(each or (None, None)))
    return found


def _timed(row: Row, seconds: np.ndarray, first: np.ndarray) -> Row:
    """Speeds by themselves."""
    after = 1e3 * (seconds - first) / max(row.tokens - row.texts, 1)
    row = row._replace(token_ms=Spread.of(after) if (after > 0).all() else None)
    return row._replace(seconds=tuple(seconds.tolist()), tokens_per_second=Spread.of(row.tokens / seconds))


def _about(setting: Setting, target: Model) -> Row:
    """A row without numbers."""
    return Row(
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
        backend=setting.backend,
    )


def _decoding(row: Row, variant: Variant, decoded: Decoded) -> Row:
    """Texts, and what became of the draft tokens."""
    row = row._replace(texts=len(decoded.texts), tokens=sum(map(len, decoded.texts)), passes=decoded.passes)
    if variant.setting.is_plain:
        return row
    row = row._replace(gamma=variant.prepared.decoder.gamma)
    if not decoded.outcomes:
        return row
    own = len(variant.prepared.prompt.length)  # beyond, the prompts are the same, and intervals want independent texts
    rounds, emitted = (
        np.concatenate([getattr(o.stats, name) for o in decoded.outcomes])[:own] for name in ("rounds", "emitted")
    )
    traces = [outcome.trace for outcome in decoded.outcomes]
    drafted = np.concatenate([(t.draft_length * (t.num_committed > 0) > 0).sum(axis=1) for t in traces])[:own]
    every = sum(int(o.stats.rounds.sum()) for o in decoded.outcomes)
    longest = np.concatenate([expected.longest_drafts(outcome) for outcome in decoded.outcomes])
    row = row._replace(
        tokens_per_round=Rate.of(Ratio(emitted - 1, rounds)),
        drafted=Rate.of(Ratio(drafted, rounds, probability=True)),
        draft_tokens_per_round=sum(int(o.stats.drafted.sum()) for o in decoded.outcomes) / max(every, 1),
        longest_per_round=float(longest.mean()) if len(longest) else 0.0,
    )
    if variant.prepared.decoder.trees:
        return row
    tested = acceptance.conditional(*traces).first(own)
    by_place = tuple(Rate.of(rate) for rate in tested.by_draft_token)
    return row._replace(conditional=Rate.of(tested.overall), conditional_by_draft_token=by_place)


def _against_plain(
    row: Row,
    i: int,
    variants: Sequence[Variant],
    decoded: Sequence[Decoded],
    seconds: np.ndarray,
    first: np.ndarray,
) -> Row:
    """Speeds over plain decoding by the same target and backend, and texts beside those of the same target."""
    setting, j = variants[i].setting, _plain_of(i, variants)
    if not setting.temperature and row.exact:
        pairs = list(zip(decoded[i].texts, decoded[j].texts, strict=True))
        differ = [(at, numerics.first_difference(*pair)) for at, pair in enumerate(pairs)]
        row = row._replace(same_text=sum(at is None for _, at in differ))
        for text, at in [(text, at) for text, at in differ if at is not None][:1]:
            ends = tuple(tuple(tokens[max(0, at - LONGEST) : at + 1]) for tokens in pairs[text])
            row = row._replace(difference=Difference(text, at, *ends))
    if not seconds.shape[1] or setting.is_plain:
        return row
    j = _plain_of(i, variants, setting.backend)
    before, ours = sum(map(len, decoded[j].texts)), row.tokens
    # Without the first tokens, which prefill yields.
    later, plain_later = ours - row.texts, before - row.texts
    after = ratio(seconds[j] - first[j], seconds[i] - first[i], later / max(plain_later, 1))
    return row._replace(speed=ratio(seconds[j], seconds[i], ours / max(before, 1)), speed_after_prefill=after)


def _plain_of(i: int, variants: Sequence[Variant], backend: str = "") -> int:
    """Plain decoding by a variant's target: the first, or that on a backend."""
    target, settings = variants[i].setting.target, [one.setting for one in variants]
    alike = (j for j, one in enumerate(settings) if one.is_plain and one.target is target)
    return next(j for j in alike if backend in ("", settings[j].backend))


def _expectations(
    row: Row,
    i: int,
    hopes: Expected,
    passes: Passes | None,
    variants: Sequence[Variant],
    decoded: Sequence[Decoded],
    asked: set[str],
) -> Row:
    """Alpha, costs, predictions, and the speed on average."""
    setting, prepared, j = variants[i].setting, variants[i].prepared, _plain_of(i, variants)
    lengths, policy = np.array([len(text) for text in decoded[j].texts]), setting.policy is not None
    costs = passes and passes.costs(expected.drafts_of(prepared, policy)[-1])
    found, replayed = Predicted(), None
    if asked & {"alpha", "replay"}:
        alpha, trace = hopes.alpha(setting, prepared), hopes.trace(setting, prepared)
        row = row._replace(alpha=None if alpha is None else Rate.of(alpha))
        if trace is not None and "candidates" in asked and setting.rule.lenience == 1:
            each = replay.alpha_of_candidates(trace, CANDIDATES)
            row = row._replace(candidates=tuple(Rate.of(one) for one in each))
        found, replayed = hopes.predicted(setting, prepared, prepared.decoder.gamma, lengths, costs)
    taken = passes and passes.passes(prepared, decoded[i].outcomes, policy)
    if taken and decoded[j].outcomes:
        later, plain_later = row.tokens - row.texts, int(lengths.sum()) - len(lengths)
        plain_passes = decoded[j].passes - len(variants[j].parts)
        found = found._replace(rounds=later / max(plain_later, 1) * plain_passes / taken)
    row = row._replace(costs=costs or None, predicted=found if any(x is not None for x in found) else None)
    row = row._replace(replayed_tokens=None if replayed is None else Rate.of(replayed))
    after, alone = row.speed_after_prefill, setting.batch == 1  # a batch waits for a row
    if replayed is not None and after is not None and alone and setting.temperature:
        every = [outcome.stats for outcome in decoded[i].outcomes]
        own = sum(int((s.emitted - 1).sum()) for s in every) / max(sum(int(s.rounds.sum()) for s in every), 1)
        if own > 0 < replayed.value:
            row = row._replace(speed_on_average=Spread(*(x / own * replayed.value for x in after)))
    return row


def _title(setting: Setting) -> str:
    batch = f", batch {setting.batch}" if setting.batch > 1 else ""
    return f"{setting.task.name}, T = {setting.temperature:g}{batch}"
