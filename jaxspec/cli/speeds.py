"""What `jaxspec bench` measures: plain and speculative decoding in turn, beside what theory predicts.

All ways to decode run in one process on the same prompts, compiled and warmed up, taking turns; what is timed
is the jitted program, from prompt ids to the last token (text in and text out are the tokenizer's business).
Latency is that of the same generations a round at a time, as a reader of the stream sees them.
Every speed comes with its spread, and the report with the machine, the versions and the command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.analysis.estimate import spread
from jaxspec.cli import memory, timing

if TYPE_CHECKING:  # jax takes a second to import, and --help does not need it
    from jaxspec.base import Model, Prompt
    from jaxspec.decode.loop import Outcome


class Ask(NamedTuple):
    """What to measure.

    Attributes:
        gammas: guesses a round, one measurement each (none: plain decoding only).
        batches: batch sizes, one measurement each.
        new_tokens: most new tokens per prompt.
        rows: prompts that one timed run decodes, rounded to whole batches.
        repeats: timed runs of each way to decode.
    """

    gammas: tuple[int, ...] = (1, 4, 7)
    batches: tuple[int, ...] = (1,)
    new_tokens: int = 64
    rows: int = 8
    repeats: int = 5

    @property
    def steps(self) -> int:
        """Measurements: for each batch size one per way to decode, and one of alpha for all."""
        return len(self.batches) * (1 + len(self.gammas)) + bool(self.gammas)


def collect(
    target: Model,
    drafter: Model | None,
    prompt: Prompt,
    ask: Ask,
    *,
    eos_ids: Sequence[int] | None = None,
    advance: Callable[[str], object] = lambda doing: None,
) -> dict[str, Any]:
    """All measurements, greedy.

    Args:
        target: the model to decode from.
        drafter: the model that drafts; None if `ask.gammas` is empty.
        prompt: at least one row; used in turn where a batch needs more.
        ask: what to measure.
        eos_ids: as in `jaxspec.generate`; () makes every row `ask.new_tokens` long.
        advance: called with what has been measured, for a progress bar.

    Returns:
        "environment", "target", "draft", "alpha" (None without a drafter) and "results", one per batch size
        and gamma (0 is plain decoding); times in milliseconds, memory in bytes, spreads as median, min, max.
        "alpha" is of the first `ask.rows` prompts, or as many as there are: its error is over those, each once.
    """
    from jaxspec.analysis import acceptance, environment

    found: dict[str, Any] = {"environment": environment.current(), "target": _describe(target)}
    found |= {"draft": None if drafter is None else _describe(drafter), **ask._asdict(), "alpha": None}
    if drafter is not None and ask.gammas:
        there = prompt._replace(tokens=prompt.tokens[: ask.rows], length=prompt.length[: ask.rows])
        found["alpha"] = acceptance.measure(target, drafter, there, max_new_tokens=ask.new_tokens).to_dict()
        advance("alpha")
    found["results"] = []
    for batch in ask.batches:
        found["results"] += _of_batch(target, drafter, prompt, batch, ask, found["alpha"], eos_ids, advance)
    return found


def _of_batch(
    target: Model,
    drafter: Model | None,
    prompt: Prompt,
    batch: int,
    ask: Ask,
    alpha: dict[str, Any] | None,
    eos_ids: Sequence[int] | None,
    advance: Callable[[str], object],
) -> list[dict[str, Any]]:
    """Plain decoding and every gamma at one batch size."""
    from jaxspec.analysis import cost
    from jaxspec.decode import request

    groups, gammas = groups_of(prompt, batch, ask.rows), (0, *ask.gammas)
    models = [model for model in (target, drafter) if model is not None]
    options: dict[str, Any] = dict(temperature=0.0, top_k=None, top_p=None, key=None, accept=None, eos_ids=eos_ids)
    options["max_new_tokens"] = ask.new_tokens
    jobs = [
        [request.prepare(target, group, drafter=drafter, gamma=gamma, **options) for group in groups]
        for gamma in gammas
    ]
    outcomes = [[timing.run(job) for job in some] for some in jobs]  # compiles
    seconds = cost.decode_in_turn(jobs, ask.repeats)
    first = cost.take_turns([functools.partial(cost.start_all, some[:1]) for some in jobs], ask.repeats + 1)[:, 1:]
    latencies = timing.latency(jobs, ask.repeats)
    results = []
    for index, gamma in enumerate(gammas):
        tokens = sum(int(outcome.length.sum()) for outcome in outcomes[index])
        result: dict[str, Any] = {
            "batch": batch,
            "gamma": gamma,
            "prompts": batch * len(groups),
            "tokens": tokens,
        }
        result["tokens_per_second"] = spread(tokens / seconds[index])
        result["first_token_ms"] = spread(1e3 * first[index])
        result["token_ms"] = latencies[index]
        result["memory"] = memory.account(jobs[index][0], models if gamma else models[:1])
        if gamma and drafter is not None and alpha is not None:
            measured = cost.measure(
                target, drafter, groups[0], gamma=gamma, repeats=ask.repeats, max_new_tokens=ask.new_tokens
            )
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
    same = [a == b for a, b in zip(timing.tokens(plain), timing.tokens(ours), strict=True)]
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


def _predict(passes_saved: float, gamma: int, alpha: float, measured: Any) -> dict[str, Any]:
    """What Theorem 3.8 promises: from the passes that were really saved, and from alpha alone."""
    from jaxspec.analysis import theory

    names = ("target_ms", "verify_ms", "draft_ms", "c", "v")
    return {name: getattr(measured, name) for name in names} | {
        "predicted": passes_saved / (gamma * measured.c + measured.v),
        "predicted_from_alpha": float(theory.improvement(min(alpha, 1.0), gamma, measured.c, measured.v)),
    }


def ratio(plain: np.ndarray, ours: np.ndarray, tokens: float = 1.0) -> dict[str, float] | None:
    """How many times as fast as plain decoding, repeat by repeat; None if noise leaves no time at all."""
    return spread(tokens * plain / ours) if (plain > 0).all() and (ours > 0).all() else None


def groups_of(prompt: Prompt, batch: int, rows: int) -> list[Prompt]:
    """About `rows` prompts in whole batches, beginning again where there are too few."""
    have = len(prompt.length)
    index = np.arange(batch * max(1, rows // batch)).reshape(-1, batch) % have
    return [prompt._replace(tokens=prompt.tokens[some], length=prompt.length[some]) for some in index]


def _describe(model: Model) -> dict[str, Any]:
    import jax

    from jaxspec.weights import int8

    computed = getattr(model.config, "dtype", str(jax.tree.leaves(model.params)[0].dtype))
    dtype = int8.dtype_of(model.params, computed)
    return {"name": model.name, "parameters": int8.count(model.params), "dtype": dtype}
