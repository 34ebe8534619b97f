"""What `jaxspec measure` measures: one cell after the other, each a pair on a task with one way to decode.

A cell's acceptance rate is that of the target's own text (see `analysis.acceptance`); its costs are timed as in
`analysis.cost`; its speed is that of whole generations, plain and speculative in turn. It is predicted twice: from
alpha alone, by Theorem 3.8, which takes guesses to be kept independently of each other in an endless text; and from the
tokens a round that these texts would yield, replayed along them (see `analysis.replay`), if the rule is exact.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.cli import speeds, timing
from jaxspec.cli.ledger import Ledger

if TYPE_CHECKING:
    from jaxspec.accept import Rule
    from jaxspec.analysis.cost import Cost
    from jaxspec.analysis.replay import Store
    from jaxspec.base import Model, Prompt

PLANNED = "plan"  # in the place of a gamma: the one that the plan chooses
MOST = 16  # the largest gamma that a plan considers
CONTENTS = 2  # of what is found of a cell: changes when that does, so that a ledger's older cells are made again
OF_SPEED = ("c", "v", "predicted", "replayed", "tokens_per_round", "speed", "speed_after_prefill")


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
    gammas: tuple[int | str, ...] = (PLANNED,)
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

    from jaxspec.analysis import cost

    machine = cost.environment()
    shared = {"target": identity(target), "contents": CONTENTS}
    shared |= {name: getattr(ask, name) for name in ("new_tokens", "rows", "batch", "repeats", "seed", "dtype")}
    shared |= {name: machine[name] for name in ("device", "cpu", "cpus", "jax", "jaxlib", "jaxspec")}
    names = [identity(drafter) for drafter in drafters]
    for task, (drafter, name) in itertools.product(tasks, zip(drafters, names, strict=True)):
        prompts = hashlib.sha256(json.dumps(task.prompts).encode()).hexdigest()[:16]
        pair = {"task": task.name, "prompts": prompts, "prompt_count": len(task.prompts), "draft": name}
        with tempfile.TemporaryDirectory() as folder:
            cell = cell_of(target, drafter, task, ask, Path(folder))
            for temperature, lenience, gamma in itertools.product(ask.temperatures, ask.leniences, ask.gammas):
                settings = shared | pair | {"temperature": temperature, "lenience": lenience, "gamma": gamma}
                result = ledger.get(settings)
                if result is None:
                    doing(f"{task.name}, {drafter.name}, T = {temperature:g}, l = {lenience:g}, γ = {gamma}")
                    result = cell(temperature, lenience, gamma)
                    ledger.put(settings, result, cost.environment())
                yield {"draft_name": drafter.name, **settings, **result}
        jax.clear_caches()  # each program takes memory maps, and a process that runs out of these crashes


def identity(model: Model) -> str:
    """A model's name, and a digest of its parameters: two models of one name are not the same."""
    import jax

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(model.params):
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).tobytes())
    return f"{model.name} {digest.hexdigest()[:12]}"


def cell_of(
    target: Model, drafter: Model, task: Task, ask: Ask, folder: Path
) -> Callable[[float, float, int | str], dict[str, Any]]:
    """What measures a cell of a pair on a task; texts and costs are made when first asked for, and kept.

    Args:
        target, drafter, task, ask: as in `measure`.
        folder: for the texts' logits; the caller deletes it.

    Returns:
        (temperature, lenience, gamma) -> what was found. Without a speed, if the plan says not to speculate.
    """
    from jaxspec.analysis import cost, lenience, planning, replay, theory
    from jaxspec.decode import request

    prompt = request.encode(target, task.prompts)
    group = speeds.groups_of(prompt, ask.batch, ask.rows)[0]
    timed: dict[str, Any] = dict(repeats=max(ask.repeats, cost.REPEATS), max_new_tokens=ask.new_tokens)

    @functools.cache
    def texts(temperature: float) -> Store:
        asked: dict[str, Any] = dict(temperature=temperature, key=_key(ask, temperature))
        where = folder / f"{temperature:g}"
        return replay.record(where, target, drafter, prompt, max_new_tokens=ask.new_tokens, **asked)

    @functools.cache
    def costs(sampled: bool) -> tuple[float, np.ndarray]:
        return planning.costs(target, drafter, group, MOST, sampled=sampled, **timed)

    @functools.cache
    def cost_at(gamma: int, sampled: bool) -> Cost:
        return cost.measure(target, drafter, group, gamma=gamma, sampled=sampled, **timed)

    def planned(temperature: float, share: float, alpha: float) -> int:
        tokens = planning.tokens_by_gamma(texts(temperature), MOST) if share == 1 else None
        return planning.plan(alpha, *costs(temperature > 0), tokens=tokens).gamma

    def replayed(temperature: float, share: float, costs: Cost) -> float | None:
        """None where decoding would say something else than these texts, so that its rounds are not known."""
        if not rule_of(share).exact:
            return None
        return replay.evaluate(texts(temperature), rule_of(share), gamma=costs.gamma).improvement(costs.c, costs.v)

    def cell(temperature: float, share: float, gamma: int | str) -> dict[str, Any]:
        rate = lenience.alpha(texts(temperature), share)
        (low, high), alpha = rate.interval, min(rate.value, 1.0)
        chosen = gamma if isinstance(gamma, int) else planned(temperature, share, alpha)
        found: dict[str, Any] = {"alpha": alpha, "alpha_low": low, "alpha_high": high}
        found |= {"positions": int(rate.counts.sum()), "chosen_gamma": chosen}
        if not chosen:
            return found | dict.fromkeys(OF_SPEED)
        taken = cost_at(chosen, temperature > 0)
        found |= {"c": taken.c, "v": taken.v}
        found["predicted"] = float(theory.improvement(alpha, chosen, taken.c, taken.v))
        found["replayed"] = replayed(temperature, share, taken)
        return found | _speed(target, drafter, prompt, ask, temperature, share, chosen)

    return cell


def rule_of(lenience: float) -> Rule:
    """The paper's rule, exact at lenience 1."""
    from jaxspec import accept

    return accept.rejection() if lenience == 1 else accept.lenient(lenience)


def _key(ask: Ask, temperature: float) -> Any:
    import jax

    return jax.random.key(ask.seed) if temperature else None


def _speed(
    target: Model, drafter: Model, prompt: Prompt, ask: Ask, temperature: float, lenience: float, gamma: int
) -> dict[str, Any]:
    """Whole generations, plain and speculative in turn."""
    import jax

    from jaxspec.analysis import cost
    from jaxspec.decode import request

    rule, key = rule_of(lenience), _key(ask, temperature)
    jobs = []
    for side in (None, drafter):
        options: dict[str, Any] = dict(drafter=side, gamma=gamma, accept=rule, temperature=temperature)
        groups = enumerate(speeds.groups_of(prompt, ask.batch, ask.rows))
        keyed = [(group, None if key is None else jax.random.fold_in(key, index)) for index, group in groups]
        jobs.append(
            [request.prepare(target, group, key=own, max_new_tokens=ask.new_tokens, **options) for group, own in keyed]
        )
    outcomes = [[timing.run(job) for job in some] for some in jobs]  # compiles
    seconds = cost.take_turns([functools.partial(cost.run_all, some) for some in jobs], ask.repeats)
    first = cost.take_turns([functools.partial(cost.start_all, some[:1]) for some in jobs], ask.repeats + 1)[:, 1:]
    after = seconds - len(jobs[0]) * np.median(first, axis=1, keepdims=True)
    tokens = [sum(int((o.stats.emitted - 1).sum()) for o in some) for some in outcomes]
    found = speeds.against_plain(outcomes[0], outcomes[1], seconds[0], seconds[1])
    return {
        "tokens_per_round": found["tokens_per_round"],
        "speed": found["ratio"],
        "speed_after_prefill": speeds.ratio(after[0], after[1], tokens[1] / max(tokens[0], 1)),
        "same_text": found["same_text"] if temperature == 0 and rule.exact else None,
        "texts": sum(len(o.length) for o in outcomes[0]),
    }
