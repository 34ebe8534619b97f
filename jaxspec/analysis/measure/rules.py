"""Acceptance rules side by side: how much each accepts on a pair, and what each costs.

Axis letters as in `jaxspec.base`; K independent candidates for one token.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec import accept, noise
from jaxspec import warp as warps
from jaxspec.analysis.measure import acceptance, jobs, replay
from jaxspec.analysis.measure.statistics import Ratio
from jaxspec.analysis.measure.timing import interleave
from jaxspec.base import Distribution, Draft, Draw, Keys, Rule
from jaxspec.decode.generate import complete
from jaxspec.decode.request import Job


class Sizes(NamedTuple):
    """V, B and G of one verdict."""

    vocab: int
    batch: int
    gamma: int


def acceptance_of(job: Job, rules: Sequence[Rule], *, candidates: Sequence[int] = ()) -> list[dict[str, Any]]:
    """The acceptance rate and the tokens per round of each rule.

    Exact rules are replayed on one set of texts (`measure.replay`), so they are compared on the same positions. For
    inexact ones tokens per round come from decoding with them, whose text is their own; alpha is about the target's.

    Args:
        job: of a target and a model that drafts, without other sampling options than a temperature; its rows are the
            unit of the errors.
        rules: to compare.
        candidates: numbers K of independent candidates for one token: a row each for the rejection rule on such a tree,
            whose alpha is the probability that one of the K is accepted.

    Returns:
        By rule: "rule", "exact", "gamma", "temperature", "alpha" (None for a rule that at temperature 0 accepts
        draft tokens which differ from the text) and "tokens_per_round" (None for candidates, of one position), the
        last two as value, stderr, low and high (95%).

    Example:
        >>> from jaxspec import Prompt
        >>> from jaxspec.decode.request import prepare
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))
        >>> options = dict(gamma=3, temperature=1.0, key=jax.random.key(0), max_new_tokens=9)
        >>> job = prepare(model, prompt, drafter=model, **options)
        >>> acceptance_of(job, [accept.rejection()])[0]["tokens_per_round"]["value"]
        4.0
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = replay.collect(Path(folder) / "trace", job)
        about = {"gamma": job.decoder.gamma, "temperature": trace.temperature}
        rows = []
        for rule in rules:
            found = None
            if trace.temperature > 0 or replay.matches_when_greedy(rule):
                found = replay.evaluate(trace, rule, gamma=job.decoder.gamma)
            own_text = found is not None and found.own_text
            tokens = found.tokens_per_round if found and own_text else _decoded(job.replace(accept=rule))
            alpha = None if found is None else found.alpha.to_dict()
            rows.append({"rule": rule.name, "exact": rule.exact} | about)
            rows[-1] |= {"alpha": alpha, "tokens_per_round": tokens.to_dict()}
        alphas = replay.alpha_of_candidates(trace, max(candidates)) if candidates else []
    for count in candidates:
        row = {"rule": candidates_name(count), "exact": True} | about
        rows.append(row | {"alpha": alphas[count - 1].to_dict(), "tokens_per_round": None})
    return rows


def costs(
    rules: Sequence[Rule], sizes: Sizes, *, repeats: int, alike: bool = False, candidates: Sequence[int] = ()
) -> dict[str, np.ndarray]:
    """Seconds of one verdict of each rule, compiled and called by itself, by name; "distributions": a softmax.

    Args:
        rules: interleaved.
        sizes: of the draft.
        repeats: of each.
        alike: whether draft and target are one, so that the rule may accept all; otherwise their
            logits differ by noise.
        candidates: numbers K of independent candidates for one token: a row each for the rejection rule on such a tree,
            of one position, where a rule judges gamma draft tokens at gamma positions.

    Example:
        >>> taken = costs([accept.rejection()], Sizes(vocab=9, batch=2, gamma=3), repeats=4)
        >>> {name: seconds.shape for name, seconds in taken.items()}
        {'distributions': (4,), 'rejection': (4,)}
    """
    keys, position = noise.row_keys(jax.random.key(0), sizes.batch), jnp.full(sizes.batch, 9, jnp.int32)
    logits, draft_logits = _logits(jax.random.key(1), sizes, jnp.array(alike))
    sampling_params = warps.SamplingParams(jnp.ones(sizes.batch))
    to_distribution = jax.jit(warps.sampling())
    target, q = to_distribution(sampling_params, logits), to_distribution(sampling_params, draft_logits).log_probs
    assert q is not None and target.log_probs is not None
    calls: dict[str, Callable[[], object]] = {"distributions": _call(to_distribution, sampling_params, logits)}
    for rule in rules:
        draft = _draft(keys, position, q, rule.shares_noise)
        calls[rule.name] = _call(jax.jit(rule.verify), keys, position, draft, target)
    for count in candidates:
        draft = _star(keys, position, q[:, :1], count)
        calls[candidates_name(count)] = _call(_judge_star, keys, position, draft, target.log_probs[:, :1])
    return dict(zip(calls, interleave(list(calls.values()), repeats), strict=True))


def candidates_name(count: int) -> str:
    """What a row of the rejection rule on K candidates is called.

    >>> candidates_name(1), candidates_name(4)
    ('rejection, 1 candidate', 'rejection, 4 candidates')
    """
    return f"rejection, {count} candidate{'s' if count > 1 else ''}"


def _decoded(job: Job) -> Ratio:
    """Tokens per round of decoding."""
    stats = []
    for part in jobs.in_batches(job, acceptance.BATCH):
        out = complete(part.job)
        stats.append(jax.tree.map(lambda x, real=part.real: x[:real], out.stats))
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *stats)
    return Ratio(whole.emitted - 1, whole.rounds)


def _call(function: Callable[..., object], *arguments: Any) -> Callable[[], object]:
    """A call that waits for its result; compiled."""

    def call() -> object:
        return jax.block_until_ready(function(*arguments))

    call()
    return call


@functools.partial(jax.jit, static_argnames=("sizes",))
def _logits(
    key: Key[Array, ""], sizes: Sizes, alike: Bool[Array, ""]
) -> tuple[Float[Array, "B G+1 V"], Float[Array, "B G V"]]:
    ours, theirs = jax.random.split(key)
    target = 3 * jax.random.normal(ours, (sizes.batch, sizes.gamma + 1, sizes.vocab))
    off = 0.7 * jax.random.normal(theirs, (sizes.batch, sizes.gamma, sizes.vocab))
    return target, target[:, :-1] + jnp.where(alike, 0.0, off)


@functools.partial(jax.jit, static_argnames=("shares_noise",))
def _draft(keys: Keys, position: Int[Array, " B"], log_probs: Float[Array, "B G V"], shares_noise: bool) -> Draft:
    """As of `drafters.model`: draft tokens with their distributions, or with the noise that they were drawn with."""
    purpose, gamma = noise.Purpose.TOKEN if shares_noise else noise.Purpose.DRAFT, log_probs.shape[1]

    def one(i: Int[Array, ""]) -> Float[Array, "B V"]:
        return noise.gumbel(noise.at(keys, position + i, purpose), log_probs.shape[2])

    gumbel = jnp.moveaxis(jax.lax.map(one, jnp.arange(gamma, dtype=jnp.int32)), 0, 1)
    tokens, length = noise.first_largest(log_probs + gumbel), jnp.full_like(position, gamma)
    if shares_noise:
        return Draft(tokens, length, aux={"gumbel": gumbel})
    return Draft(tokens, length, log_probs=log_probs)


@functools.partial(jax.jit, static_argnames=("count",))
def _star(keys: Keys, position: Int[Array, " B"], log_probs: Float[Array, "B 1 V"], count: int) -> Draft:
    """K independent draws from one distribution, as the children of the last committed token."""
    at = noise.at(keys, position, noise.Purpose.DRAFT)
    each = [jax.vmap(lambda key, k=k: jax.random.fold_in(key, k))(at) for k in range(count)]
    tokens = jnp.stack([noise.categorical(key, log_probs[:, 0]) for key in each], axis=1)
    parent, length = jnp.zeros_like(tokens), jnp.full_like(position, count)
    return Draft(tokens, length, parent, log_probs, jnp.full_like(tokens, int(Draw.WITH_REPLACEMENT)))


@jax.jit
def _judge_star(keys: Keys, position: Int[Array, " B"], draft: Draft, log_p: Float[Array, "B 1 V"]):
    """The distributions after the candidates are never asked for."""
    rows, nodes = draft.tokens.shape
    target = jnp.broadcast_to(log_p, (rows, nodes + 1, log_p.shape[-1]))
    return accept.rejection().verify(keys, position, draft, Distribution(target))
