"""Draft token far where the drafter's distribution is narrow: gamma from its entropy (EGAG)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import BoundPolicy, Distribution, Draft, Policy, Prompt, Verdict
from jaxspec.policies.common import Counts, PerRow, as_length, checked, log_probs


class EntropyParams(NamedTuple):
    least: Any
    most: Any
    beta: Any


def entropy(least: Any = 1, most: Any = 8, beta: Any = 0.5) -> BoundPolicy:
    """Between `least` and `most` draft tokens, linearly in the entropy of the drafter's
    distribution at the first draft token.

    Let H be that entropy over log V, and h = beta h + (1 - beta) H its smoothed value from round to
    round. A round makes least + (1 - h) (most - least) draft tokens. h begins at 0, so that first
    drafts are longer. This is the entropy-adaptive gamma ("EGAG") of the notes on n-gram-assisted
    speculative decoding that this project began with. At temperature 0 the distribution is the
    drafter's at temperature 1; a drafter without distributions makes `most` draft tokens.

    Args:
        least, most: draft tokens, from 1; gamma is the most in any case.
        beta: 0 looks at this round alone.

    Raises:
        ValueError: a bound below 1, or least > most; beta outside [0, 1].

    Example:
        >>> policy = entropy(least=1, most=5, beta=0.0)
        >>> confidences = jnp.array([[0.0, 0.0], [0.5, 0.0], [1.0, 0.0]])
        >>> [
        ...     policy.functions.should_continue(
        ...         policy.params, jnp.zeros(3), i, confidences
        ...     ).tolist()
        ...     for i in (0, 2)
        ... ]
        [[True, True, False], [True, False, False]]
    """
    if np.any(np.asarray(least) > np.asarray(most)):
        raise ValueError(f"least is {least!r} and most {most!r}: expected least <= most")
    bounds = checked(least, "least", 1, float("inf")), checked(most, "most", 1, float("inf"))
    return BoundPolicy(
        _entropy(), EntropyParams(*bounds, checked(beta, "beta", 0, 1)), name="entropy"
    )


@functools.lru_cache
def _entropy() -> Policy:
    def init(params: EntropyParams, prompt: Prompt) -> Float[Array, " B"]:
        return jnp.zeros(prompt.length.shape, jnp.float32)

    def max_draft(params: EntropyParams, state: PerRow, gamma: int, remaining: Counts) -> Counts:
        return as_length(jnp.minimum(params.most, gamma))

    def confidence(distribution: Distribution) -> Float[Array, " B"]:
        log_p = log_probs(distribution)
        terms = jnp.where(log_p > -jnp.inf, -jnp.exp(log_p) * log_p, 0.0)
        return jnp.sum(terms, axis=-1) / jnp.log(float(max(log_p.shape[-1], 2)))

    def smoothed(params: EntropyParams, state: PerRow, confidences: Float[Array, "B G"]) -> PerRow:
        return params.beta * state + (1.0 - params.beta) * confidences[:, 0]

    def should_continue(
        params: EntropyParams,
        state: PerRow,
        index: int | Int[Array, ""],
        confidences: Float[Array, "B G"],
    ) -> Bool[Array, " B"]:
        certainty = 1.0 - smoothed(params, state, confidences)
        return index + 1 < as_length(params.least + certainty * (params.most - params.least))

    def update(
        params: EntropyParams, state: PerRow, draft: Draft, verdict: Verdict, num_committed: Counts
    ) -> PerRow:
        if draft.aux is None or "confidence" not in draft.aux:
            return state
        read = draft.aux["confidence"]
        is_read = (draft.length > 0) & ~jnp.isnan(read[:, 0])
        return jnp.where(is_read, smoothed(params, state, read), state)

    return Policy(init, max_draft, update, confidence, should_continue)
