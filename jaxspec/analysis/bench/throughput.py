"""How fast a model decodes, plainly and speculatively, interleaved, beside what theory predicts.

All variants run in one process on the same prompts, compiled and warmed up; what is timed is the jitted program, from
prompt ids to the last token (text in and text out are the tokenizer's business). Latency is that of the same
generations a round at a time, as a reader of the stream sees them. Every speed comes with its median, min and max, and
the report with the machine, the versions and the command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.analysis.measure import acceptance, cost, environment, jobs, memory, timing
from jaxspec.analysis.measure.statistics import median_min_max
from jaxspec.analysis.theory import formulas
from jaxspec.base import Model
from jaxspec.decode.loop import Outcome
from jaxspec.decode.request import Job
from jaxspec.weights import int8


class Settings(NamedTuple):
    """What to measure.

    Attributes:
        gammas: draft tokens a round, one measurement each (none: plain decoding only).
        batches: batch sizes, one measurement each.
        rows: prompts that one timed run decodes, rounded to whole batches.
        repeats: timed runs of each variant.
    """

    gammas: tuple[int, ...] = (1, 4, 7)
    batches: tuple[int, ...] = (1,)
    rows: int = 8
    repeats: int = 5

    @property
    def steps(self) -> int:
        """Measurements: for each batch size one per variant, and one of alpha for all."""
        return len(self.batches) * (1 + len(self.gammas)) + bool(self.gammas)


def measure(job: Job, settings: Settings, *, advance: Callable[[str], object] = lambda doing: None) -> dict[str, Any]:
    """All measurements.

    Args:
        job: greedy, with a model that drafts, or plain if there are no gammas; its prompts begin again where a batch
            needs more.
        settings: what to measure.
        advance: called with what has been measured, for a progress bar.

    Returns:
        "environment", "target", "draft", the settings, "alpha" (None without a drafter) and "results", one per batch
        size and gamma (0 is plain decoding); times in milliseconds, memory in bytes, as median, min and max. "alpha" is
        of the first `settings.rows` prompts, or as many as there are: its error is over those, each once.
    """
    draft = jobs.drafting_model(job) if settings.gammas else None
    found: dict[str, Any] = {"environment": environment.current(), "target": describe(job.target)}
    found |= {"draft": None if draft is None else describe(draft), **settings._asdict()}
    found |= {"new_tokens": int(np.max(job.request.limit)), "alpha": None}
    if settings.gammas:
        first = jobs.take(job, range(min(settings.rows, len(job.prompt.length))))
        found["alpha"] = acceptance.measure(first).to_dict()
        advance("alpha")
    found["results"] = []
    for batch in settings.batches:
        found["results"] += _of_batch(job, batch, settings, found["alpha"], advance)
    return found


def _of_batch(
    job: Job, batch: int, settings: Settings, alpha: dict[str, Any] | None, advance: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Plain decoding and every gamma at one batch size."""
    groups, gammas = jobs.whole_batches(job, batch, settings.rows), (0, *settings.gammas)
    variants = [[group.replace(gamma=gamma) if gamma else group.plain() for group in groups] for gamma in gammas]
    outcomes = [[jobs.run(job) for job in some] for some in variants]  # compiles
    seconds = timing.interleave_jobs(variants, settings.repeats)
    starts = [functools.partial(timing.start_all, some[:1]) for some in variants]
    first = timing.interleave(starts, settings.repeats + 1)[:, 1:]
    latencies = timing.latency(variants, settings.repeats)
    results = []
    for index, gamma in enumerate(gammas):
        tokens = sum(int(outcome.length.sum()) for outcome in outcomes[index])
        result: dict[str, Any] = {"batch": batch, "gamma": gamma, "prompts": batch * len(groups), "tokens": tokens}
        result["tokens_per_second"] = median_min_max(tokens / seconds[index])
        result["first_token_ms"] = median_min_max(1e3 * first[index])
        result["token_ms"] = latencies[index]
        result["memory"] = memory.account(variants[index][0])
        if gamma and alpha is not None:
            measured = cost.measure(variants[index][0], repeats=settings.repeats)
            after = seconds - len(groups) * np.median(first, axis=1, keepdims=True)  # without prefill
            result |= against_plain(outcomes[0], outcomes[index], seconds[0], seconds[index])
            result["ratio_after_prefill"] = ratio(after[0], after[index])
            result |= _predict(result["passes_saved"], gamma, alpha["alpha"], measured)
        results.append(result)
        advance(f"batch {batch}, " + (f"gamma {gamma}" if gamma else "plain"))
    return results


def against_plain(
    plain: Sequence[Outcome], ours: Sequence[Outcome], plain_seconds: np.ndarray, our_seconds: np.ndarray
) -> dict[str, Any]:
    """Speculative runs against plain ones: speeds (of tokens, should their numbers differ), texts, rounds."""
    same = [a == b for a, b in zip(jobs.texts(plain), jobs.texts(ours), strict=True)]
    tokens = [sum(int(outcome.length.sum()) for outcome in outcomes) for outcomes in (plain, ours)]
    rounds = sum(int(outcome.stats.rounds.sum()) for outcome in ours)
    emitted = sum(int((outcome.stats.emitted - 1).sum()) for outcome in ours)
    passes = [sum(int(outcome.stats.rounds.max()) for outcome in outcomes) for outcomes in (plain, ours)]
    return {
        "ratio": ratio(plain_seconds, our_seconds, tokens[1] / tokens[0]),
        "same_text": sum(same),
        "tokens_per_round": emitted / max(rounds, 1),
        "passes_saved": passes[0] / max(passes[1], 1),
    }


def _predict(passes_saved: float, gamma: int, alpha: float, measured: cost.Cost) -> dict[str, Any]:
    """What Theorem 3.8 predicts: from the passes that were really saved, and from alpha alone."""
    names = ("target_ms", "verify_ms", "draft_ms", "c", "v")
    return {name: getattr(measured, name) for name in names} | {
        "predicted": passes_saved / (gamma * measured.c + measured.v),
        "predicted_from_alpha": float(formulas.improvement(min(alpha, 1.0), gamma, measured.c, measured.v)),
    }


def ratio(plain: np.ndarray, ours: np.ndarray, tokens: float = 1.0) -> dict[str, float] | None:
    """How many times as fast as plain decoding, repeat by repeat; None if noise leaves no time at all."""
    return median_min_max(tokens * plain / ours) if (plain > 0).all() and (ours > 0).all() else None


def describe(model: Model) -> dict[str, Any]:
    """A model's name, size and dtype."""
    computed = getattr(model.config, "dtype", str(jax.tree.leaves(model.params)[0].dtype))
    dtype = int8.dtype_of(model.params, computed)
    return {"name": model.name, "parameters": int8.count(model.params), "dtype": dtype}
