"""The paper's Tables 2, 3 and 5 for a pair of one's own: one cell after the other, each a pair on a task with settings.

A cell's acceptance rate is that of the target's own text (`measure.acceptance`); its speed is that of whole
generations, plain decoding and all gammas of a setting interleaved; between the repeats its costs are timed, as in
`measure.cost`, so that speeds and predictions are of one machine at one time. A cell is predicted three times. By
Theorem 3.8, from alpha alone: draft tokens are accepted independently of each other in an endless text ("theorem"). The
same in texts as long as these, whose last rounds are cut short ("predicted"). And from the tokens a round that these
very texts would yield, replayed along them (see `measure.replay`), if the rule is exact ("replayed").
Where tokens are sampled each gamma generates another text, and some texts yield more tokens a round than others. So a
sampled speed is also given "on average": the rounds as timed, each with the tokens of a replayed one. That is what
gammas are compared by: their replayed texts are the same.
Beside alpha, and not to be mistaken for it, stands the conditional rate of the timed runs' own rounds: accepted over
tested.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import accept
from jaxspec.analysis import planning
from jaxspec.analysis.bench import throughput
from jaxspec.analysis.bench.store import Store
from jaxspec.analysis.measure import acceptance, cost, environment, jobs, replay, timing
from jaxspec.analysis.measure.statistics import Ratio, median_min_max
from jaxspec.analysis.theory import formulas, text_rounds
from jaxspec.base import Model, Rule
from jaxspec.decode.request import Job, prepare

PLANNED = "plan"  # in the place of a gamma: the one that the plan chooses
MOST = 16  # the largest gamma that a plan considers
SCHEMA_VERSION = 9  # of a cell: changes when its contents do, so that a store's older cells are measured again
SPEED_FIELDS = (
    "c",
    "v",
    "c_spread",
    "v_spread",
    "theorem",
    "predicted",
    "replayed",
    "tokens_per_round",
    "speed",
    "speed_after_prefill",
    "speed_on_average",
    "conditional",
    "conditional_by_draft_token",
)

Gamma = int | str  # a number of draft tokens, or `PLANNED`


class Task(NamedTuple):
    """A name, and its prompts."""

    name: str
    prompts: list[str]


class Settings(NamedTuple):
    """What all cells share.

    Attributes:
        temperatures, leniences: a cell for each of both.
        gammas: draft tokens a round, or `PLANNED`; a cell for each.
        new_tokens: most new tokens per prompt.
        rows: prompts that a timed run decodes, in whole batches.
        batch: prompts at a time in timed runs.
        repeats: timed runs.
        seed: of the texts.
        dtype: of the computation.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    leniences: tuple[float, ...] = (1.0,)
    gammas: tuple[Gamma, ...] = (PLANNED,)
    new_tokens: int = 64
    rows: int = 8
    batch: int = 1
    repeats: int = 5
    seed: int = 0
    dtype: str = "float32"


def count(tasks: Sequence[Task], drafters: Sequence[Model], settings: Settings) -> int:
    """How many cells `measure` yields."""
    cells = len(settings.temperatures) * len(settings.leniences) * len(settings.gammas)
    return len(tasks) * len(drafters) * cells


def measure(
    target: Model,
    drafters: Sequence[Model],
    tasks: Sequence[Task],
    settings: Settings,
    store: Store,
    *,
    doing: Callable[[str], object] = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Every cell: its settings and what was found; cells that the store has are not measured again.

    Args:
        target: the model to decode from.
        drafters: the models that draft.
        tasks: prompts by task.
        settings: which cells.
        store: of finished cells.
        doing: called with what is being done.

    Raises:
        ValueError: as `jaxspec.generate`.
    """
    machine = environment.current()
    shared = {"target": identity(target), "contents": SCHEMA_VERSION}
    shared |= {name: getattr(settings, name) for name in ("new_tokens", "rows", "batch", "repeats", "seed", "dtype")}
    shared |= {name: machine.get(name) for name in ("device", "cpu", "cpus", "jax", "jaxlib", "jaxspec", "xla_flags")}
    names = [identity(drafter) for drafter in drafters]
    for task, (drafter, name) in itertools.product(tasks, zip(drafters, names, strict=True)):
        prompts = hashlib.sha256(json.dumps(task.prompts).encode()).hexdigest()[:16]
        pair = {"task": task.name, "prompts": prompts, "prompt_count": len(task.prompts), "draft": name}
        key = jax.random.key(settings.seed)
        job = prepare(target, task.prompts, drafter=drafter, max_new_tokens=settings.new_tokens, key=key)
        with tempfile.TemporaryDirectory() as folder:
            cells = Cells(job, settings, Path(folder))
            for temperature, lenience in itertools.product(settings.temperatures, settings.leniences):
                setting = shared | pair | {"temperature": temperature, "lenience": lenience}
                known = {gamma: store.get(setting | {"gamma": gamma}) for gamma in settings.gammas}
                missing = [gamma for gamma, result in known.items() if result is None]
                if missing:
                    doing(f"{task.name}, {drafter.name}, T = {temperature:g}, l = {lenience:g}")
                    for gamma, result in cells.measure(temperature, lenience, missing).items():
                        known[gamma] = result
                        store.put(setting | {"gamma": gamma}, result, environment.current())
                for gamma, result in known.items():
                    assert result is not None
                    yield {"draft_name": drafter.name, **setting, "gamma": gamma, **result}
        jax.clear_caches()  # each program takes memory maps, and a process that runs out of these crashes


def identity(model: Model) -> str:
    """A model's name, and a digest of its parameters: two models of one name are not the same."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(model.params):
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).tobytes())
    return f"{model.name} {digest.hexdigest()[:12]}"


class Cells:
    """Measures the cells of a pair on a task; texts and costs are made when first needed, and serve all cells.

    Args:
        job: of the pair, on the task's prompts.
        settings: as in `measure`.
        folder: for the texts' logits; the caller deletes it.
    """

    def __init__(self, job: Job, settings: Settings, folder: Path):
        self.job, self.settings, self.folder = job, settings, folder
        self.texts, self.costs = functools.cache(self._texts), functools.cache(self._costs)

    def measure(self, temperature: float, lenience: float, gammas: Sequence[Gamma]) -> dict[Gamma, dict[str, Any]]:
        """What is found with each gamma, and when: those of one "id" were interleaved.

        Without a speed, where the plan is not to speculate.
        """
        rate = replay.lenient_alpha(self.texts(temperature), lenience)
        numbers, alpha = rate.to_dict(), min(rate.value, 1.0)
        about = environment.current()
        together = {"id": uuid.uuid4().hex[:12]} | {name: about.get(name) for name in ("date", "load", "commit")}
        both: dict[str, Any] = {"alpha": alpha, "alpha_low": numbers["low"], "alpha_high": numbers["high"]}
        both |= {"positions": int(rate.counts.sum()), "measured": together}
        chosen = {g: g if isinstance(g, int) else self._planned(temperature, lenience, alpha) for g in gammas}
        used = sorted({gamma for gamma in chosen.values() if gamma})
        job = self.job.replace(temperature=temperature, accept=rule_of(lenience))
        found: dict[int, dict[str, Any]] = {}
        for gamma, timed in zip(used, speeds(job, used, self.settings), strict=True):
            found[gamma] = timed | self._predicted(job, alpha, gamma, timed)
        plain: dict[str, Any] = dict.fromkeys(SPEED_FIELDS)
        return {asked: both | {"chosen_gamma": gamma} | found.get(gamma, plain) for asked, gamma in chosen.items()}

    def _texts(self, temperature: float) -> replay.LogitTrace:
        return replay.collect(self.folder / f"{temperature:g}", self.job.replace(temperature=temperature))

    def _costs(self, sampled: bool) -> tuple[float, np.ndarray]:
        group = jobs.whole_batches(
            self.job.replace(temperature=float(sampled)), self.settings.batch, self.settings.rows
        )[0]
        return planning.costs(group, MOST, repeats=max(self.settings.repeats, cost.REPEATS))

    def _timed_texts(self, temperature: float) -> replay.LogitTrace:
        """The texts that timed runs generate, where these are known; else all there are."""
        rows = self.settings.batch * max(1, self.settings.rows // self.settings.batch)
        return self.texts(temperature) if temperature else self.texts(temperature).first(rows)

    def _tokens_per_round(self, temperature: float, alpha: float, gamma: int) -> float:
        """Of draft tokens that are accepted independently of each other, in texts of these lengths."""
        return text_rounds.independent_tokens(alpha, self._timed_texts(temperature).counts, gamma)

    def _planned(self, temperature: float, lenience: float, alpha: float) -> int:
        if lenience == 1:
            tokens = planning.tokens_by_gamma(self.texts(temperature), MOST)
        else:
            gammas = range(1, MOST + 1)
            tokens = [1.0, *(self._tokens_per_round(temperature, alpha, gamma) for gamma in gammas)]
        return planning.plan(alpha, *self.costs(temperature > 0), tokens=tokens).gamma

    def _predicted(self, job: Job, alpha: float, gamma: int, timed: dict[str, Any]) -> dict[str, Any]:
        c, v, speed = timed["c"], timed["v"], timed["speed_after_prefill"]
        temperature, rule = job.options["temperature"], job.options["accept"]
        found: dict[str, Any] = {"theorem": float(formulas.improvement(alpha, gamma, c, v))}
        found["predicted"] = known(self._tokens_per_round(temperature, alpha, gamma) / (gamma * c + v))
        found["replayed"], found["speed_on_average"] = None, None
        if rule.exact:  # otherwise decoding generates something else than these texts, and its rounds are not known
            again = replay.evaluate(self._timed_texts(temperature), rule, gamma=gamma)
            found["replayed"] = known(again.improvement(c, v))
            own, mean = timed["tokens_per_round"], again.tokens_per_round.value
            alone = self.settings.batch == 1  # a batch waits for a row
            if temperature > 0 and alone and speed is not None and own > 0 < mean:
                found["speed_on_average"] = {name: x / own * mean for name, x in speed.items()}
        return found


def known(number: float) -> float:
    """For JSON, which has no NaN: texts of one token yield nothing.

    >>> known(1.5), known(float("nan"))
    (1.5, 0.0)
    """
    return float(np.nan_to_num(number))


def with_count(rate: Ratio) -> dict[str, float | None]:
    """A conditional rate with its interval, and how many draft tokens were tested."""
    return rate.to_dict() | {"tested": int(rate.counts.sum())}


def rule_of(lenience: float) -> Rule:
    """The paper's rule, exact at lenience 1."""
    return accept.rejection() if lenience == 1 else accept.lenient(lenience)


def speeds(job: Job, gammas: Sequence[int], settings: Settings) -> list[dict[str, Any]]:
    """Costs, and whole generations with each gamma, interleaved, plain decoding among them."""
    if not gammas:
        return []
    groups = jobs.whole_batches(job, settings.batch, settings.rows)
    variants = [[group.replace(gamma=gamma) if gamma else group.plain() for group in groups] for gamma in (0, *gammas)]
    outcomes = [[jobs.run(one) for one in some] for some in variants]  # compiles
    starts = [functools.partial(timing.start_all, some[:1]) for some in variants]
    timing.interleave(starts, 1)  # compiles
    whole, begun, passes = [], [], []
    for _ in range(settings.repeats):
        whole.append(timing.interleave_jobs(variants, 1))
        begun.append(timing.interleave(starts, 1))
        passes.append(cost.measure_all(groups[0], gammas, repeats=3))
    seconds, first = np.concatenate(whole, axis=1), np.concatenate(begun, axis=1)
    after = seconds - len(groups) * np.median(first, axis=1, keepdims=True)
    tokens = [sum(int((o.stats.emitted - 1).sum()) for o in some) for some in outcomes]
    greedy = not jobs.is_sampled(job) and job.decoder.exact
    results = []
    for index in range(1, len(variants)):
        found = throughput.against_plain(outcomes[0], outcomes[index], seconds[0], seconds[index])
        traces = (outcome.trace for outcome in outcomes[index])
        tested = acceptance.conditional(*traces).first(len(job.prompt.length))
        c, v = (median_min_max(np.array([getattr(one[index - 1], name) for one in passes])) for name in "cv")
        results.append(
            {
                "c": c["median"],
                "v": v["median"],
                "c_spread": c,
                "v_spread": v,
                "tokens_per_round": found["tokens_per_round"],
                "speed": found["ratio"],
                "speed_after_prefill": throughput.ratio(after[0], after[index], tokens[index] / max(tokens[0], 1)),
                "same_text": found["same_text"] if greedy else None,
                "texts": sum(len(o.length) for o in outcomes[0]),
                "conditional": with_count(tested.overall),
                "conditional_by_draft_token": [with_count(rate) for rate in tested.by_draft_token],
            }
        )
    return results
