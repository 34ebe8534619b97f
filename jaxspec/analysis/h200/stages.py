"""The stages: their order, what each is for, how long it should take, and running them in processes of their own.

The most wanted numbers come first. Times are estimates for an H200 with nothing compiled; most of them is compiling.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxspec.analysis.h200 import decoding, training
from jaxspec.analysis.h200.decoding import KINDS, TABLE_2, Bench
from jaxspec.analysis.h200.results import Found, Results
from jaxspec.analysis.measure import environment, loading, profile
from jaxspec.decode.request import prepare

CHEAP = 0.02  # the paper's c of T5-small; above it, a profile is made
MACHINE = ("device", "devices", "jax", "jaxlib", "cuda_plugin", "xla_flags")  # with others of these, results differ
UNFINISHED = "it did not end: its process crashed or was killed"


class Stage(NamedTuple):
    """One part of the work.

    Attributes:
        name: as on the command line.
        minutes: about how long it takes.
        about: what it measures.
        group: "models" (they share a process, and T5-XXL), "profile", "training" or "loading".
    """

    name: str
    minutes: float
    about: str
    group: str


STAGES = (
    Stage("copy", 0.5, "the bandwidth of a large copy", "models"),
    Stage("plain", 2.5, "plain greedy decoding against the memory's floor", "models"),
    Stage("passes-greedy", 2.0, "c and v", "models"),
    Stage("translation-greedy", 1.5, "speed-up at alpha 0.75, gamma 7 (the paper's: 3.4)", "models"),
    Stage("summarization-greedy", 1.5, "speed-up at alpha 0.65, gamma 5 (3.1)", "models"),
    Stage("passes-sampled", 2.0, "c and v where a token is drawn", "models"),
    Stage("translation-sampled", 2.5, "speed-up at alpha 0.62, gamma 7 (2.6)", "models"),
    Stage("summarization-sampled", 1.5, "speed-up at alpha 0.53, gamma 5 (2.3)", "models"),
    Stage("profile", 2.0, f"why c is above {CHEAP}, where it is: kernels, gaps, and a plan", "profile"),
    Stage("train-target", 5.0, "trains debian-gpt-97m (--train-minutes holds for both)", "training"),
    Stage("train-draft", 5.0, "trains debian-gpt-6m, its drafter", "training"),
    Stage("measure", 4.0, "real alpha and speed-up of these two", "training"),
    Stage("write", 2.0, "writes the target to --work as a sharded folder", "loading"),
    Stage("load", 1.5, "host memory of loading it, against its largest file", "loading"),
)
NAMES = {stage.name: stage for stage in STAGES}
GROUPS = tuple(dict.fromkeys(stage.group for stage in STAGES))


class Plan(NamedTuple):
    """What to do, and where things are.

    Attributes:
        models, pair: what to measure.
        data: of the training.
        work: holds what is compiled, trained and written.
        out: the results.
        until: no stage begins that should not end by this time (of `time.time`).
    """

    models: decoding.Settings
    pair: training.Settings
    data: Path
    work: Path
    out: Path
    until: float = float("inf")


def chosen(names: str) -> list[Stage]:
    """Stages by their names and those of groups, separated by commas, in their own order.

    Raises:
        ValueError: there is no such stage.

    >>> [stage.name for stage in chosen("loading,copy")]
    ['copy', 'write', 'load']
    """
    wanted = [name.strip() for name in names.split(",")]
    if odd := [name for name in wanted if name not in (*NAMES, *GROUPS, "all")]:
        raise ValueError(f"no stage {odd[0]!r}: expected all, {', '.join(GROUPS)}, or some of {', '.join(NAMES)}")
    return [stage for stage in STAGES if {stage.name, stage.group, "all"} & set(wanted)]


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a new process, which ends with it and lets go of the device.

    Raises:
        RuntimeError: the process crashed. What the function raises is raised here.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            raise RuntimeError(f"the process crashed: {error}") from None


def run(stages: Sequence[Stage], plan: Plan, apart: Callable[..., Any] = apart) -> None:
    """Does what is not done yet, and stores it in `plan.out`. A group has one process, and after a crash another.

    What was found on another device, by another jax or under other flags (`MACHINE`) is not done yet. The environment,
    as it is when this begins, goes with every result.

    Args:
        stages: in their order.
        plan: what to do.
        apart: as the function of that name.

    Raises:
        RuntimeError: a process that only asks for the environment crashed.
    """
    about = apart(environment.current)  # this process leaves the device to others
    for group in GROUPS:
        left = [stage for stage in stages if stage.group == group and _due(stage, plan, about)]
        if group in ("training", "loading"):
            for stage in left:
                _do(stage, plan, about, _in_processes(stage, plan, apart))
        while left and group in ("models", "profile"):
            try:
                apart(_group, [stage.name for stage in left], plan, about)
                break
            except RuntimeError as error:
                _log(str(error))
                results = Results(plan.out)
                ended = [results.error(stage.name) == UNFINISHED for stage in left]
                left = left[ended.index(True) + 1 :] if any(ended) else []


def settings_of(stage: Stage, plan: Plan, about: Found) -> Found:
    """What a stage's result depends on: the settings, and what it was measured with.

    Args:
        stage, plan: which settings.
        about: of `environment.current`.
    """
    machine = {"machine": {name: about.get(name) for name in MACHINE}}
    if stage.group == "training":
        return plan.pair._asdict() | machine
    if stage.group == "loading":
        return {"shape": plan.models.shape, "dtype": plan.models.dtype} | machine
    return plan.models._asdict() | machine


def _due(stage: Stage, plan: Plan, about: Found) -> bool:
    """Whether a stage is not done yet, and there is time for it."""
    if Results(plan.out).done(stage.name, settings_of(stage, plan, about)):
        _log(f"{stage.name}: done before")
        return False
    if time.time() + 60 * stage.minutes > plan.until:
        _log(f"{stage.name}: left for another time, since it takes about {stage.minutes:g} minutes")
        return False
    return True


def _do(stage: Stage, plan: Plan, about: Found, work: Callable[[], Found | None]) -> None:
    """One stage, if there still is time for it; what it raises is a result, too."""
    if not _due(stage, plan, about):
        return
    results, settings = Results(plan.out), settings_of(stage, plan, about)
    _log(f"{stage.name}: {stage.about} ...")
    results.put(stage.name, settings, {"error": UNFINISHED})  # so that a crash, or a kill, is on record
    start = time.perf_counter()
    try:
        found = work()
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    if found is None:
        results.drop(stage.name)
        return _log(f"{stage.name}: not needed")
    took = {"took": round(time.perf_counter() - start, 1)}
    results.put(stage.name, settings, {"environment": about} | found | took)  # `jaxspec measure` has its own
    _log(f"{stage.name}: {'FAILED' if 'error' in found else 'done'} after {time.perf_counter() - start:.0f} s")


def _group(names: Sequence[str], plan: Plan, about: Found) -> None:
    """Stages on the device, in a process of their own."""
    bench = Bench(plan.models)
    for name in names:
        _do(NAMES[name], plan, about, lambda name=name: _on_device(name, bench, plan))


def _on_device(name: str, bench: Bench, plan: Plan) -> Found | None:
    kinds = {kind: temperature for temperature, kind in KINDS.items()}
    rows = {row.stage: row for row in TABLE_2}
    if name in rows:
        return bench.speedup(rows[name])
    if name.startswith("passes-"):
        return bench.passes(kinds[name.removeprefix("passes-")])
    if name == "profile":
        return profiles(bench, plan)
    return {"copy": bench.copy, "plain": bench.plain}[name]()


def profiles(bench: Bench, plan: Plan) -> Found | None:
    """Profiles of the drafter's passes and of the target's; None where c, as found by an earlier stage, is small."""
    results = Results(plan.out)
    costs = {kind: results.get(f"passes-{kind}") for kind in KINDS.values()}
    dear = {kind: found for kind, found in costs.items() if found is not None and found["c"] > CHEAP}
    if not dear and any(costs.values()):
        return None
    kind = next(iter(dear), "greedy")
    found: Found = {"kind": kind}
    for side, model in (("draft", bench.draft), ("target", bench.target)):
        where = plan.work / "profile" / side
        job = prepare(model, bench.prompt, max_new_tokens=bench.settings.new_tokens, key=jax.random.key(0))
        found[side] = profile.passes(job.replace(temperature=float(kind == "sampled")), where)
    copied, plain = results.get("copy"), results.get("plain")
    if dear and copied and plain:
        floor = 1e6 * plain["draft_bytes_per_token"] / copied["bytes_per_second"]["median"]
        found["advice"] = profile.advice(found["draft"], floor, 1e3 * dear[kind]["target_ms"], dear[kind]["c"])
    return found


def _in_processes(stage: Stage, plan: Plan, apart: Callable[..., Any]) -> Callable[[], Found]:
    """A stage that leaves the device to processes that it starts."""
    folder = plan.work / plan.models.shape

    def work() -> Found:
        if stage.name == "write":
            return apart(loading.write, plan.models.shape, plan.models.dtype, folder)
        if stage.name == "load":
            return apart(loading.load, plan.models.dtype, folder)
        if stage.name == "measure":
            return training.measure(plan.pair, plan.work)
        return training.train(plan.pair, stage.name.removeprefix("train-"), plan.data, plan.work, apart)

    return work


def _log(doing: str) -> None:
    print(doing, file=sys.stderr, flush=True)
