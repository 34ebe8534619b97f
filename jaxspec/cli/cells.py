"""What `jaxspec measure` measures: one cell after the other, each a pair on a task with one way to decode.

A cell's acceptance rate is that of the target's own text (see `analysis.acceptance`); its speed is that of whole
generations, plain decoding and all gammas of a setting in turn; between the repeats its costs are timed, as in
`analysis.cost`, so that speeds and predictions are of one machine at one time. A cell is predicted three times. By
Theorem 3.8, from alpha alone: guesses are kept independently of each other in an endless text ("theorem"). The same in
texts as long as these, whose last rounds are cut short ("predicted"). And from the tokens a round that these very texts
would yield, replayed along them (see `analysis.replay`), if the rule is exact ("replayed").
Where tokens are sampled each gamma says another text, and some texts yield more tokens a round than others. So a
sampled speed is also given "on average": the rounds as timed, each with the tokens of a replayed one. That is what
gammas are compared by: their replayed texts are the same.
Beside alpha, and not to be taken for it, stands the censored rate of the timed runs' own rounds: kept over tried.
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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.cli import speeds, timing
from jaxspec.cli.ledger import Ledger

if TYPE_CHECKING:
    from jaxspec.accept import Rule
    from jaxspec.analysis.estimate import Ratio
    from jaxspec.analysis.replay import Store
    from jaxspec.base import Model, Prompt

PLANNED = "plan"  # in the place of a gamma: the one that the plan chooses
MOST = 16  # the largest gamma that a plan considers
CONTENTS = 8  # of what is found of a cell: changes when that does, so that a ledger's older cells are made again
OF_SPEED = (
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
)
OF_SPEED += ("speed_on_average", "censored", "censored_by_guess")

Gamma = int | str  # a number of guesses, or `PLANNED`


class Task(NamedTuple):
    """A name, and its prompts."""

    name: str
    prompts: list[str]


class Ask(NamedTuple):
    """What all cells share.

    Attributes:
        temperatures, leniences: a cell for each of both.
        gammas: guesses a round, or `PLANNED`; a cell for each.
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


def count(tasks: Sequence[Task], drafters: Sequence[Model], ask: Ask) -> int:
    """How many cells `measure` yields."""
    return len(tasks) * len(drafters) * len(ask.temperatures) * len(ask.leniences) * len(ask.gammas)


def measure(
    target: Model,
    drafters: Sequence[Model],
    tasks: Sequence[Task],
    ask: Ask,
    ledger: Ledger,
    *,
    doing: Callable[[str], object] = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Every cell: its settings and what was found; cells that the ledger has are not measured again.

    Args:
        target: the model to decode from.
        drafters: the models that guess.
        tasks: prompts by task.
        ask: which cells.
        ledger: of finished cells.
        doing: told what is being done.

    Raises:
        ValueError: as `jaxspec.generate`.
    """
    import jax

    from jaxspec.analysis import environment

    machine = environment.current()
    shared = {"target": identity(target), "contents": CONTENTS}
    shared |= {name: getattr(ask, name) for name in ("new_tokens", "rows", "batch", "repeats", "seed", "dtype")}
    shared |= {name: machine.get(name) for name in ("device", "cpu", "cpus", "jax", "jaxlib", "jaxspec", "xla_flags")}
    names = [identity(drafter) for drafter in drafters]
    for task, (drafter, name) in itertools.product(tasks, zip(drafters, names, strict=True)):
        prompts = hashlib.sha256(json.dumps(task.prompts).encode()).hexdigest()[:16]
        pair = {"task": task.name, "prompts": prompts, "prompt_count": len(task.prompts), "draft": name}
        with tempfile.TemporaryDirectory() as folder:
            cells = cells_of(target, drafter, task, ask, Path(folder))
            for temperature, lenience in itertools.product(ask.temperatures, ask.leniences):
                setting = shared | pair | {"temperature": temperature, "lenience": lenience}
                known = {gamma: ledger.get(setting | {"gamma": gamma}) for gamma in ask.gammas}
                missing = [gamma for gamma, result in known.items() if result is None]
                if missing:
                    doing(f"{task.name}, {drafter.name}, T = {temperature:g}, l = {lenience:g}")
                    for gamma, result in cells(temperature, lenience, missing).items():
                        known[gamma] = result
                        ledger.put(setting | {"gamma": gamma}, result, environment.current())
                for gamma, result in known.items():
                    assert result is not None
                    yield {"draft_name": drafter.name, **setting, "gamma": gamma, **result}
        jax.clear_caches()  # each program takes memory maps, and a process that runs out of these crashes


def identity(model: Model) -> str:
    """A model's name, and a digest of its parameters: two models of one name are not the same."""
    import jax

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(model.params):
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).tobytes())
    return f"{model.name} {digest.hexdigest()[:12]}"


def cells_of(
    target: Model, drafter: Model, task: Task, ask: Ask, folder: Path
) -> Callable[[float, float, Sequence[Gamma]], dict[Gamma, dict[str, Any]]]:
    """What measures cells of a pair on a task; texts and costs are made when first asked for, and kept.

    Args:
        target, drafter, task, ask: as in `measure`.
        folder: for the texts' logits; the caller deletes it.

    Returns:
        (temperature, lenience, gammas) -> what was found with each, and when: those of one "id" took turns. Without a
        speed, if the plan says not to speculate.
    """
    from jaxspec.analysis import chain, cost, environment, lenience, planning, replay, theory
    from jaxspec.decode import request

    prompt = request.encode(target, task.prompts)
    groups = speeds.groups_of(prompt, ask.batch, ask.rows)

    @functools.cache
    def texts(temperature: float) -> Store:
        asked: dict[str, Any] = dict(temperature=temperature, key=_key(ask, temperature))
        where = folder / f"{temperature:g}"
        return replay.record(where, target, drafter, prompt, max_new_tokens=ask.new_tokens, **asked)

    @functools.cache
    def costs(sampled: bool) -> tuple[float, np.ndarray]:
        timed: dict[str, Any] = dict(repeats=max(ask.repeats, cost.REPEATS), max_new_tokens=ask.new_tokens)
        return planning.costs(target, drafter, groups[0], MOST, sampled=sampled, **timed)

    def timed_texts(temperature: float) -> Store:
        """The texts that timed runs say, where these are known; else all there are."""
        return texts(temperature) if temperature else replay.first(texts(temperature), len(groups) * ask.batch)

    def tokens_per_round(temperature: float, alpha: float, gamma: int) -> float:
        """Of guesses that are kept independently of each other, in texts of these lengths."""
        return chain.independent_tokens(alpha, timed_texts(temperature).counts, gamma)

    def planned(temperature: float, share: float, alpha: float) -> int:
        if share == 1:
            tokens = planning.tokens_by_gamma(texts(temperature), MOST)
        else:
            tokens = [1.0, *(tokens_per_round(temperature, alpha, gamma) for gamma in range(1, MOST + 1))]
        return planning.plan(alpha, *costs(temperature > 0), tokens=tokens).gamma

    def foretold(temperature: float, share: float, alpha: float, gamma: int, timed: dict[str, Any]) -> dict[str, Any]:
        c, v, speed = timed["c"], timed["v"], timed["speed_after_prefill"]
        found: dict[str, Any] = {"theorem": float(theory.improvement(alpha, gamma, c, v))}
        found["predicted"] = known(tokens_per_round(temperature, alpha, gamma) / (gamma * c + v))
        rule, found["replayed"], found["speed_on_average"] = rule_of(share), None, None
        if rule.exact:  # otherwise decoding says something else than these texts, and its rounds are not known
            again = replay.evaluate(timed_texts(temperature), rule, gamma=gamma)
            found["replayed"] = known(again.improvement(c, v))
            own, mean = timed["tokens_per_round"], again.tokens_per_round.value
            if temperature > 0 and ask.batch == 1 and speed is not None and own > 0 < mean:  # a batch waits for a row
                found["speed_on_average"] = {name: x / own * mean for name, x in speed.items()}
        return found

    def cells(temperature: float, share: float, gammas: Sequence[Gamma]) -> dict[Gamma, dict[str, Any]]:
        rate = lenience.alpha(texts(temperature), share)
        said, alpha = rate.to_dict(), min(rate.value, 1.0)
        about = environment.current()
        together = {"id": uuid.uuid4().hex[:12]} | {name: about.get(name) for name in ("date", "load", "commit")}
        both: dict[str, Any] = {"alpha": alpha, "alpha_low": said["low"], "alpha_high": said["high"]}
        both |= {"positions": int(rate.counts.sum()), "measured": together}
        chosen = {g: g if isinstance(g, int) else planned(temperature, share, alpha) for g in gammas}
        used = sorted({gamma for gamma in chosen.values() if gamma})
        found: dict[int, dict[str, Any]] = {}
        for gamma, timed in zip(used, _speeds(target, drafter, prompt, ask, temperature, share, used), strict=True):
            found[gamma] = timed | foretold(temperature, share, alpha, gamma, timed)
        plain: dict[str, Any] = dict.fromkeys(OF_SPEED)
        return {asked: both | {"chosen_gamma": gamma} | found.get(gamma, plain) for asked, gamma in chosen.items()}

    return cells


def known(number: float) -> float:
    """For JSON, which has no NaN: texts of one token yield nothing.

    >>> known(1.5), known(float("nan"))
    (1.5, 0.0)
    """
    return float(np.nan_to_num(number))


def stated(rate: Ratio) -> dict[str, float | None]:
    """A censored rate with its interval, and how many guesses were tried."""
    return rate.to_dict() | {"tried": int(rate.counts.sum())}


def rule_of(lenience: float) -> Rule:
    """The paper's rule, exact at lenience 1."""
    from jaxspec import accept

    return accept.rejection() if lenience == 1 else accept.lenient(lenience)


def _key(ask: Ask, temperature: float) -> Any:
    import jax

    return jax.random.key(ask.seed) if temperature else None


def _speeds(
    target: Model, drafter: Model, prompt: Prompt, ask: Ask, temperature: float, lenience: float, gammas: Sequence[int]
) -> list[dict[str, Any]]:
    """Costs, and whole generations with each gamma, in turn, plain decoding among them."""
    import jax

    from jaxspec.analysis import acceptance, cost
    from jaxspec.analysis.estimate import spread
    from jaxspec.decode import request

    if not gammas:
        return []
    rule, key = rule_of(lenience), _key(ask, temperature)
    groups, jobs = speeds.groups_of(prompt, ask.batch, ask.rows), []
    for gamma in (0, *gammas):
        options: dict[str, Any] = dict(drafter=drafter if gamma else None, gamma=gamma, accept=rule)
        options |= dict(temperature=temperature, max_new_tokens=ask.new_tokens)
        keyed = [(group, None if key is None else jax.random.fold_in(key, i)) for i, group in enumerate(groups)]
        jobs.append([request.prepare(target, group, key=own, **options) for group, own in keyed])
    outcomes = [[timing.run(job) for job in some] for some in jobs]  # compiles
    starts = [functools.partial(cost.start_all, some[:1]) for some in jobs]
    cost.take_turns(starts, 1)  # compiles
    timed: dict[str, Any] = dict(gammas=gammas, repeats=3, sampled=temperature > 0, max_new_tokens=ask.new_tokens)
    whole, begun, passes = [], [], []
    for _ in range(ask.repeats):
        whole.append(cost.decode_in_turn(jobs, 1))
        begun.append(cost.take_turns(starts, 1))
        passes.append(cost.measure_all(target, drafter, groups[0], **timed))
    seconds, first = np.concatenate(whole, axis=1), np.concatenate(begun, axis=1)
    after = seconds - len(jobs[0]) * np.median(first, axis=1, keepdims=True)
    tokens = [sum(int((o.stats.emitted - 1).sum()) for o in some) for some in outcomes]
    results = []
    for way in range(1, len(jobs)):
        found = speeds.against_plain(outcomes[0], outcomes[way], seconds[0], seconds[way])
        tried = acceptance.censored(*(outcome.trace for outcome in outcomes[way])).first(len(prompt.length))
        c, v = (spread(np.array([getattr(one[way - 1], name) for one in passes])) for name in "cv")
        results.append(
            {
                "c": c["median"],
                "v": v["median"],
                "c_spread": c,
                "v_spread": v,
                "tokens_per_round": found["tokens_per_round"],
                "speed": found["ratio"],
                "speed_after_prefill": speeds.ratio(after[0], after[way], tokens[way] / max(tokens[0], 1)),
                "same_text": found["same_text"] if temperature == 0 and rule.exact else None,
                "texts": sum(len(o.length) for o in outcomes[0]),
                "censored": stated(tried.overall),
                "censored_by_guess": [stated(rate) for rate in tried.by_guess],
            }
        )
    return results
