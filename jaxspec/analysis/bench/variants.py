"""Drafters and policies, each timed interleaved with plain decoding, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.analysis.measure import jobs, timing
from jaxspec.analysis.measure.statistics import median_min_max
from jaxspec.base import Bound, Model
from jaxspec.decode.loop import Outcome
from jaxspec.decode.request import Job


class Variant(NamedTuple):
    """A way to draft.

    Attributes:
        name: of the drafter, and of the policy or the gamma.
        drafter: None is plain decoding.
        gamma: draft tokens a round, at most.
        policy: what chooses among them; None makes all of them.
        c: what a draft token costs, in passes of the target.
        v: what the pass costs that judges 0, 1, .. gamma draft tokens (of each row).
    """

    name: tuple[str, str]
    drafter: Model | Bound | None
    gamma: int
    policy: Bound | None = None
    c: float = 0.0
    v: np.ndarray = np.ones(1)

    @property
    def may_be_empty(self) -> bool:
        """Whether its drafter may have no draft."""
        return isinstance(self.drafter, Bound) and getattr(self.drafter.functions, "may_be_empty", False)


def compare(job: Job, variants: Sequence[Variant], name: str, *, batch: int, repeats: int) -> dict[str, Any]:
    """Every variant on every prompt of a task, interleaved, so many prompts at a time.

    Args:
        job: the prompts of a task, and how to sample.
        variants: plain decoding first.
        name: of the task.
        batch: prompts at a time.
        repeats: of everything.
    """
    groups = []
    for index, group in enumerate(jobs.whole_batches(job, batch, len(job.prompt.length))):
        groups.append(group.replace(key=jax.random.key(index)))
    prepared = [[of_variant(group, variant) for group in groups] for variant in variants]
    outcomes = [[jobs.run(one) for one in some] for some in prepared]  # compiles
    seconds = timing.interleave_jobs(prepared, repeats)
    results = [_result(variants[i], outcomes[i], outcomes[0], seconds[i], seconds[0]) for i in range(len(variants))]
    about = {"sampled": jobs.is_sampled(job), "prompts": batch * len(groups)}
    return {"task": name, "prompts": about["prompts"], "results": _ranked([r | about for r in results])}


def of_variant(job: Job, variant: Variant) -> Job:
    """The same prompts, drafted for in this way."""
    return job.replace(drafter=variant.drafter, gamma=variant.gamma, policy=variant.policy)


def together(tasks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All tasks as one workload: every variant generates, of each task, as much text as plain decoding does.

    >>> one = {"drafter": "", "variant": "", "fixed": True, "sampled": False, "prompts": 1, "same_text": 1}
    >>> one |= {"alpha": 0.5, "tokens_per_round": 1.5, "draft_tokens_per_round": 1, "longest_per_round": 1}
    >>> one |= {"predicted": 2.0}
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
        predicted = [text / r["predicted"] for text, r in zip(texts, each, strict=True) if r["predicted"]]
        means = ("tokens_per_round", "draft_tokens_per_round", "longest_per_round")
        found.append(
            {name: each[0][name] for name in ("drafter", "variant", "fixed")}
            | {name: float(np.mean([r[name] for r in each])) for name in means}
            | {name: sum(r[name] for r in each) for name in ("tokens", "prompts", "same_text")}
            | {
                "sampled": any(r["sampled"] for r in each),
                "alpha": None,
                "seconds": np.sum(parts, axis=0).tolist(),
                "tokens_per_second": median_min_max(sum(texts) / np.sum(parts, axis=0)),
                "ratio": median_min_max(plain / np.sum(parts, axis=0)),
                "predicted": sum(texts) / sum(predicted) if len(predicted) == len(texts) else None,
            }
        )
    return {"task": "all together", "prompts": sum(task["prompts"] for task in tasks), "results": _ranked(found)}


def _ranked(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, each with its speed over that of its drafter's best fixed gamma."""
    for result in results:
        fixed = [r["ratio"]["median"] for r in results if r["fixed"] and r["drafter"] == result["drafter"]]
        result["of_best_fixed"] = result["ratio"]["median"] / max(fixed) if fixed else None
    return results


def _result(
    variant: Variant,
    ours: list[Outcome],
    plain: list[Outcome],
    seconds: np.ndarray,
    plain_seconds: np.ndarray,
) -> dict[str, Any]:
    tokens, before = (sum(int(o.length.sum()) for o in some) for some in (ours, plain))
    later, plain_later = (count - sum(len(o.length) for o in ours) for count in (tokens, before))  # after prefill
    drafted, accepted, tested, longest = (np.concatenate(parts) for parts in zip(*map(_rounds, ours), strict=True))
    trials = int(tested.sum())
    # A policy's draft has the length it chose. Without one it is drawn whole, though what a row can no longer emit is
    # cut; or not at all, by a drafter without a draft (of `fallback`, this charges the model where a look-up answered).
    drawn = longest
    if variant.policy is None:
        drawn = np.where(longest > 0, variant.gamma, 0 if variant.may_be_empty else variant.gamma)
    passes = variant.v[drawn].sum() + variant.c * drawn.sum()
    plain_passes = sum(int(o.stats.rounds.max()) for o in plain)
    return {
        "drafter": variant.name[0],
        "variant": variant.name[1],
        "fixed": variant.policy is None and variant.gamma > 0,
        "tokens": tokens,
        "seconds": seconds.tolist(),
        "tokens_per_second": median_min_max(tokens / seconds),
        "ratio": median_min_max(tokens / before * plain_seconds / seconds),
        "alpha": int(accepted.sum()) / trials if trials else None,
        "tokens_per_round": later / max(len(drafted), 1),
        "draft_tokens_per_round": float(drafted.mean()) if len(drafted) else 0.0,
        "longest_per_round": float(longest.mean()) if len(longest) else 0.0,
        "predicted": later / plain_later * plain_passes / passes if passes and plain_later else None,
        "same_text": sum(a == b for a, b in zip(jobs.texts(ours), jobs.texts(plain), strict=True)),
    }


def _rounds(outcome: Outcome) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each row's rounds the tokens drafted, accepted and tested; of each round of the batch the longest draft."""
    trace, rounds = outcome.trace, np.asarray(outcome.stats.rounds)
    made, accepted, tested = map(np.asarray, (trace.draft_length, trace.num_accepted, trace.num_tested))
    live = np.arange(made.shape[1])[None, :] < rounds[:, None]
    longest = np.where(live, made, 0).max(axis=0)[: rounds.max()]
    return made[live], accepted[live], tested[live], longest
