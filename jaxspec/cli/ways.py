"""Ways to draft, each timed in turn beside plain decoding, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.analysis.estimate import spread
from jaxspec.cli import speeds, timing

if TYPE_CHECKING:
    from jaxspec.base import Drafter, Model, Policy, Prompt
    from jaxspec.decode.loop import Outcome
    from jaxspec.decode.request import Job


class Task(NamedTuple):
    """What is decoded: prompts, and how.

    Attributes:
        name: of the table.
        prompt: its prompts.
        temperature: of all of them.
    """

    name: str
    prompt: Prompt
    temperature: float

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0


class Way(NamedTuple):
    """A way to draft.

    Attributes:
        name: of the drafter, and of the policy or the gamma.
        drafter: None is plain decoding.
        gamma: guesses a round, at most.
        policy: what chooses among them; None makes all of them.
        c: what a guess costs, in passes of the target.
        v: what the pass costs that judges 0, 1, .. gamma guesses (of each row).
    """

    name: tuple[str, str]
    drafter: Model | Drafter | None
    gamma: int
    policy: Policy | None = None
    c: float = 0.0
    v: np.ndarray = np.ones(1)


def compare(
    target: Model, ways: Sequence[Way], task: Task, *, batch: int, new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Every way on every prompt of a task, in turn, so many prompts at a time."""
    import jax

    from jaxspec.analysis import cost
    from jaxspec.decode import request

    groups = speeds.groups_of(task.prompt, batch, len(task.prompt.length))
    jobs: list[list[Job]] = []
    for way in ways:
        options: dict[str, Any] = dict(drafter=way.drafter, gamma=way.gamma, policy=way.policy)
        options |= dict(max_new_tokens=new_tokens, temperature=task.temperature)
        jobs.append([request.prepare(target, some, key=jax.random.key(i), **options) for i, some in enumerate(groups)])
    outcomes = [[timing.run(job) for job in some] for some in jobs]  # compiles
    seconds = cost.decode_in_turn(jobs, repeats)
    results = [_result(ways[i], outcomes[i], outcomes[0], seconds[i], seconds[0]) for i in range(len(ways))]
    about = {"sampled": task.sampled, "prompts": batch * len(groups)}
    return {"task": task.name, "prompts": about["prompts"], "results": _ranked([r | about for r in results])}


def together(tasks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All tasks as one workload: every way says, of each task, as much text as plain decoding does.

    >>> one = {"drafter": "", "way": "", "fixed": True, "sampled": False, "prompts": 1, "same_text": 1}
    >>> one |= {"alpha": 0.5, "tokens_per_round": 1.5, "guesses_per_round": 1, "longest_per_round": 1, "predicted": 2.0}
    >>> plain, fast = one | {"tokens": 10, "seconds": [4.0]}, one | {"tokens": 20, "seconds": [2.0]}
    >>> task = {"task": "a", "prompts": 1, "results": [plain, fast]}
    >>> together([task, task])["results"][1]["ratio"]["median"]
    4.0
    """
    found = []
    for each in zip(*(task["results"] for task in tasks), strict=True):
        texts = [task["results"][0]["tokens"] for task in tasks]
        plain = sum(np.array(task["results"][0]["seconds"]) for task in tasks)
        parts = [text * np.array(r["seconds"]) / r["tokens"] for text, r in zip(texts, each, strict=True)]
        foretold = [text / r["predicted"] for text, r in zip(texts, each, strict=True) if r["predicted"]]
        means = ("tokens_per_round", "guesses_per_round", "longest_per_round")
        found.append(
            {name: each[0][name] for name in ("drafter", "way", "fixed")}
            | {name: float(np.mean([r[name] for r in each])) for name in means}
            | {name: sum(r[name] for r in each) for name in ("tokens", "prompts", "same_text")}
            | {
                "sampled": any(r["sampled"] for r in each),
                "alpha": None,
                "seconds": np.sum(parts, axis=0).tolist(),
                "tokens_per_second": spread(sum(texts) / np.sum(parts, axis=0)),
                "ratio": spread(plain / np.sum(parts, axis=0)),
                "predicted": sum(texts) / sum(foretold) if len(foretold) == len(texts) else None,
            }
        )
    return {"task": "all together", "prompts": sum(task["prompts"] for task in tasks), "results": _ranked(found)}


def abstains(way: Way) -> bool:
    """Whether its drafter may have no guess."""
    return getattr(way.drafter, "abstains", False)


def _ranked(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, each with its speed over that of its drafter's best fixed gamma."""
    for result in results:
        fixed = [r["ratio"]["median"] for r in results if r["fixed"] and r["drafter"] == result["drafter"]]
        result["of_best_fixed"] = result["ratio"]["median"] / max(fixed) if fixed else None
    return results


def _result(
    way: Way,
    ours: list[Outcome],
    plain: list[Outcome],
    seconds: np.ndarray,
    plain_seconds: np.ndarray,
) -> dict[str, Any]:
    tokens, before = (sum(int(o.length.sum()) for o in some) for some in (ours, plain))
    later, plain_later = (count - sum(len(o.length) for o in ours) for count in (tokens, before))  # after prefill
    guessed, accepted, longest = (np.concatenate(parts) for parts in zip(*map(_rounds, ours), strict=True))
    trials = int((accepted + (accepted < guessed)).sum())
    # A policy's draft is as long as it says. Without one it is drawn whole, though what a row can no longer say is cut;
    # or not at all, by a drafter that knows nothing (of `first_of`, this charges the model where a look-up answered).
    drawn = longest if way.policy is not None else np.where(longest > 0, way.gamma, 0 if abstains(way) else way.gamma)
    passes = way.v[drawn].sum() + way.c * drawn.sum()
    plain_passes = sum(int(o.stats.rounds.max()) for o in plain)
    return {
        "drafter": way.name[0],
        "way": way.name[1],
        "fixed": way.policy is None and way.gamma > 0,
        "tokens": tokens,
        "seconds": seconds.tolist(),
        "tokens_per_second": spread(tokens / seconds),
        "ratio": spread(tokens / before * plain_seconds / seconds),
        "alpha": int(accepted.sum()) / trials if trials else None,
        "tokens_per_round": later / max(len(guessed), 1),
        "guesses_per_round": float(guessed.mean()) if len(guessed) else 0.0,
        "longest_per_round": float(longest.mean()) if len(longest) else 0.0,
        "predicted": later / plain_later * plain_passes / passes if passes and plain_later else None,
        "same_text": sum(a == b for a, b in zip(timing.tokens(ours), timing.tokens(plain), strict=True)),
    }


def _rounds(outcome: Outcome) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Guesses, and kept ones, of each row's rounds; and the most guesses that a row had in each round of the batch."""
    rounds, made, kept = map(np.asarray, (outcome.stats.rounds, outcome.trace.draft_length, outcome.trace.num_accepted))
    live = np.arange(made.shape[1])[None, :] < rounds[:, None]
    longest = np.where(live, made, 0).max(axis=0)[: rounds.max()]
    return made[live], kept[live], longest
