"""What `jaxspec measure` measures: one cell after the other, each a pair on a task with one way to decode.

A cell's acceptance rate is that of the target's own text (see `analysis.acceptance`); its costs are timed as in
`analysis.cost`; its speed is that of whole generations, plain and speculative in turn.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.cli import speeds, timing
from jaxspec.cli.ledger import Ledger

if TYPE_CHECKING:
    from jaxspec.analysis.replay import Store
    from jaxspec.base import Model, Prompt

PLANNED = "plan"  # in the place of a gamma: the one that the plan chooses
MOST = 16  # the largest gamma that a plan considers


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
    from jaxspec.analysis import cost

    machine = cost.environment()
    kept = ("device", "cpu", "cpus", "jax", "jaxlib", "jaxspec")
    for task in tasks:
        prompts = hashlib.sha256(json.dumps(task.prompts).encode()).hexdigest()[:16]
        shared = {"target": identity(target), "task": task.name, "prompts": prompts, "prompt_count": len(task.prompts)}
        shared |= {name: getattr(ask, name) for name in ("new_tokens", "rows", "batch", "repeats", "seed", "dtype")}
        shared |= {name: machine[name] for name in kept}
        for drafter in drafters:
            bench = _Bench(target, drafter, task, ask)  # keeps what cells have in common
            for temperature in ask.temperatures:
                for lenience in ask.leniences:
                    for gamma in ask.gammas:
                        own = {"draft": identity(drafter), "temperature": temperature, "lenience": lenience}
                        settings = shared | own | {"gamma": gamma}
                        result = ledger.get(settings)
                        if result is None:
                            rule = f"temperature {temperature:g}, l = {lenience:g}, γ = {gamma}"
                            doing(f"{task.name}, {drafter.name}, {rule}")
                            result = bench.cell(temperature, lenience, gamma)
                            ledger.put(settings, result, cost.environment())
                        yield {"task": task.name, "draft_name": drafter.name, **settings, **result}
            bench.close()


def identity(model: Model) -> str:
    """A model's name, and a digest of its parameters: two models of one name are not the same."""
    import jax

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(model.params):
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).tobytes())
    return f"{model.name} {digest.hexdigest()[:12]}"


class _Bench:
    """A target and a drafter on a task; texts, costs and plain runs are made when first asked for, and kept."""

    def __init__(self, target: Model, drafter: Model, task: Task, ask: Ask):
        from jaxspec.decode import request

        self._target, self._drafter, self._ask = target, drafter, ask
        self._prompt = request.encode(target, task.prompts)
        self._folder = tempfile.TemporaryDirectory()
        self._costs: dict[int, Any] = {}

    def close(self) -> None:
        """Deletes the texts' logits."""
        self._folder.cleanup()

    def cell(self, temperature: float, lenience: float, gamma: int | str) -> dict[str, Any]:
        """Everything about one cell."""
        from jaxspec.analysis import lenience as lenient
        from jaxspec.analysis import theory

        store = self._store(temperature)
        alpha = lenient.alpha(store, lenience)
        low, high = alpha.interval
        found: dict[str, Any] = {"alpha": alpha.value, "alpha_low": low, "alpha_high": high}
        found["positions"] = int(alpha.counts.sum())
        chosen = self._planned(store, alpha.value, lenience) if gamma == PLANNED else int(gamma)
        found["chosen_gamma"] = chosen
        if not chosen:  # the plan says: do not speculate
            return found | dict.fromkeys(("c", "v", "predicted", "speed", "speed_after_prefill", "tokens_per_round"))
        costs = self._cost(chosen)
        found |= {"c": costs.c, "v": costs.v}
        found["predicted"] = float(theory.improvement(min(alpha.value, 1.0), chosen, costs.c, costs.v))
        return found | self._speed(temperature, lenience, chosen)

    def _key(self, temperature: float) -> Any:
        import jax

        return jax.random.key(self._ask.seed) if temperature else None

    @functools.cache  # noqa: B019 - lives as long as its bench, which is short
    def _store(self, temperature: float) -> Store:
        from jaxspec.analysis import replay

        asked: dict[str, Any] = dict(temperature=temperature, key=self._key(temperature))
        where = Path(self._folder.name) / f"{temperature:g}"
        return replay.record(
            where, self._target, self._drafter, self._prompt, max_new_tokens=self._ask.new_tokens, **asked
        )

    def _planned(self, store: Store, alpha: float, lenience: float) -> int:
        from jaxspec.analysis import planning

        c, v = self._all_costs()
        tokens = planning.tokens_by_gamma(store, MOST) if lenience == 1 else None
        return planning.plan(min(alpha, 1.0), c, v, tokens=tokens).gamma

    @functools.cache  # noqa: B019
    def _all_costs(self) -> tuple[float, np.ndarray]:
        from jaxspec.analysis import planning

        options: dict[str, Any] = dict(repeats=self._ask.repeats, max_new_tokens=self._ask.new_tokens)
        return planning.costs(self._target, self._drafter, self._group(), MOST, **options)

    @functools.cache  # noqa: B019
    def _cost(self, gamma: int) -> Any:
        from jaxspec.analysis import cost

        options: dict[str, Any] = dict(repeats=self._ask.repeats, max_new_tokens=self._ask.new_tokens)
        return cost.measure(self._target, self._drafter, self._group(), gamma=gamma, **options)

    def _group(self) -> Prompt:
        return speeds.groups_of(self._prompt, self._ask.batch, self._ask.rows)[0]

    def _speed(self, temperature: float, lenience: float, gamma: int) -> dict[str, Any]:
        """Whole generations, plain and speculative in turn."""
        from jaxspec import accept
        from jaxspec.analysis import cost
        from jaxspec.decode import request

        ask, jobs = self._ask, []
        rule = accept.rejection() if lenience == 1 else accept.lenient(lenience)
        for drafter in (None, self._drafter):
            asked: dict[str, Any] = dict(drafter=drafter, gamma=gamma, accept=rule, key=self._key(temperature))
            groups = speeds.groups_of(self._prompt, ask.batch, ask.rows)
            options: dict[str, Any] = dict(temperature=temperature, max_new_tokens=ask.new_tokens, **asked)
            jobs.append([request.prepare(self._target, group, **options) for group in groups])
        outcomes = [[timing.run(job) for job in some] for some in jobs]  # compiles
        seconds = cost.take_turns([functools.partial(timing.run_all, some) for some in jobs], ask.repeats)
        first = cost.take_turns([functools.partial(timing.start, some[0]) for some in jobs], ask.repeats + 1)[:, 1:]
        found = speeds.against_plain(outcomes[0], outcomes[1], seconds[0], seconds[1])
        after = seconds - len(jobs[0]) * np.median(first, axis=1, keepdims=True)
        tokens = [sum(int((o.stats.emitted - 1).sum()) for o in some) for some in outcomes]
        return {
            "tokens_per_round": found["tokens_per_round"],
            "speed": found["ratio"],
            "speed_after_prefill": speeds.ratio(after[0], after[1], tokens[1] / max(tokens[0], 1)),
            "same_text": found["same_text"] if temperature == 0 and rule.exact else None,
            "texts": sum(len(o.length) for o in outcomes[0]),
        }
