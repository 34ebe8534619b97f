"""Ways to draft, each timed in turn beside plain decoding, prompt by prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.analysis.estimate import spread
from jaxspec.cli import timing

if TYPE_CHECKING:
    from jaxspec.base import Drafter, Model, Policy, Prompt
    from jaxspec.decode.loop import Outcome
    from jaxspec.decode.request import Job


class Task(NamedTuple):
    """What is decoded: prompts, and how.

    Attributes:
        name: of the table.
        prompts: a Prompt of one row each, all of one shape.
        temperatures: of each.
    """

    name: str
    prompts: list[Prompt]
    temperatures: list[float]

    @property
    def sampled(self) -> bool:
        """Whether any of it is."""
        return any(self.temperatures)


class Way(NamedTuple):
    """A way to draft.

    Attributes:
        name: of the drafter, and of the policy or the gamma.
        drafter: None is plain decoding.
        gamma: guesses a round, at most.
        policy: what chooses among them; None makes all of them.
        c: what a guess costs, in passes of the target.
        v: what the pass costs that judges 0, 1, .. gamma guesses.
    """

    name: tuple[str, str]
    drafter: Model | Drafter | None
    gamma: int
    policy: Policy | None = None
    c: float = 0.0
    v: np.ndarray = np.ones(1)


def compare(target: Model, ways: list[Way], task: Task, new_tokens: int, repeats: int) -> dict[str, Any]:
    """Every way on every prompt of a task, in turn."""
    import jax

    from jaxspec.analysis import cost
    from jaxspec.decode import request

    jobs: list[list[Job]] = []
    for way in ways:
        options: dict[str, Any] = dict(drafter=way.drafter, gamma=way.gamma, policy=way.policy)
        options["max_new_tokens"] = new_tokens
        each = zip(task.prompts, task.temperatures, strict=True)
        jobs.append(
            [
                # As an array, so that greedy and sampled prompts of a task share a program.
                request.prepare(target, p, temperature=[t] if task.sampled else 0.0, key=jax.random.key(i), **options)
                for i, (p, t) in enumerate(each)
            ]
        )
    outcomes = [[timing.run(job) for job in some] for some in jobs]  # compiles
    seconds = cost.decode_in_turn(jobs, repeats)
    results = [_result(ways[i], outcomes[i], outcomes[0], seconds[i], seconds[0]) for i in range(len(ways))]
    results = [result | {"sampled": task.sampled, "prompts": len(task.prompts)} for result in results]
    for result in results:
        fixed = [r["ratio"]["median"] for r in results if r["fixed"] and r["drafter"] == result["drafter"]]
        result["of_best_fixed"] = result["ratio"]["median"] / max(fixed) if fixed else None
    return {"task": task.name, "prompts": len(task.prompts), "results": results}


def abstains(way: Way) -> bool:
    """Whether its drafter may have no guess."""
    return getattr(way.drafter, "abstains", False)


def _result(
    way: Way,
    ours: list[Outcome],
    plain: list[Outcome],
    seconds: np.ndarray,
    plain_seconds: np.ndarray,
) -> dict[str, Any]:
    tokens, before = (sum(int(o.length.sum()) for o in some) for some in (ours, plain))
    rounds = sum(int(o.stats.rounds.sum()) for o in ours)
    guessed = np.concatenate([o.trace.draft_length[0, : o.stats.rounds[0]] for o in ours])
    accepted = np.concatenate([o.trace.num_accepted[0, : o.stats.rounds[0]] for o in ours])
    trials = int((accepted + (accepted < guessed)).sum())
    # A policy's draft is as long as it says. Without one it is drawn whole, though what a row can no longer say is cut;
    # or not at all, by a drafter that knows nothing (of `first_of`, this charges the model where a look-up answered).
    drawn = guessed if way.policy is not None else np.where(guessed > 0, way.gamma, 0 if abstains(way) else way.gamma)
    passes = way.v[drawn].sum() + way.c * drawn.sum()
    per_round = (tokens - len(ours)) / max(rounds, 1)
    return {
        "drafter": way.name[0],
        "way": way.name[1],
        "fixed": way.policy is None and way.gamma > 0,
        "tokens_per_second": spread(tokens / seconds),
        "ratio": spread(tokens / before * plain_seconds / seconds),
        "alpha": int(accepted.sum()) / trials if trials else None,
        "tokens_per_round": per_round,
        "guesses_per_round": float(guessed.mean()) if len(guessed) else 0.0,
        "predicted": per_round * rounds / passes if passes else None,
        "same_text": sum(a == b for a, b in zip(timing.tokens(ours), timing.tokens(plain), strict=True)),
    }
