"""Helpers of policies: checks of their values, states that never change, probabilities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Distribution, Draft, Params, Prompt, Verdict, tree

PerRow = Float[Array, " B"]
Counts = Int[Array, " B"]


def checked(value: Any, name: str, low: float, high: float, dtype: Any = np.float32) -> np.ndarray:
    """A number, or one per prompt.

    >>> checked(0.5, "threshold", 0, 1).dtype
    dtype('float32')
    """
    # infinity makes NaN of an average
    array = np.asarray(value)
    largest = float(np.finfo(np.float32).max)
    if np.issubdtype(dtype, np.floating):
        kinds = "iuf"
    else:
        kinds = "iu"
    if (
        array.dtype.kind not in kinds
        or array.ndim > 1
        or not np.all((array >= low) & (array <= min(high, largest)))
    ):
        if np.isfinite(high):
            expected = f"a number from {low} to {high}"
        else:
            expected = f"a finite number of at least {low}"
        raise ValueError(f"{name} is {value!r}: expected {expected}, or one for each prompt")
    return array.astype(dtype)


def stateless_init(params: Params, prompt: Prompt) -> tuple[()]:
    """The state of a policy that remembers nothing."""
    return ()


def no_update(
    params: Params, state: Any, draft: Draft, verdict: Verdict, num_committed: Int[Array, " B"]
) -> Any:
    """An update that changes nothing."""
    return state


def log_probs(distribution: Distribution) -> Float[Array, "B V"]:
    """The distribution of one position; rows at temperature 0 use temperature 1."""
    if distribution.log_probs is not None and distribution.greedy is None:
        return distribution.log_probs[:, 0]
    if distribution.logits is None:
        raise ValueError(
            "this policy reads logits, but the sampler returns none: set Distribution.logits in it"
        )
    logits = distribution.logits[:, 0]
    if distribution.log_probs is not None and distribution.greedy is not None:
        logits = jnp.where(distribution.greedy[:, None], logits, distribution.log_probs[:, 0])
    return jax.nn.log_softmax(logits, axis=-1)


def sureness(distribution: Distribution) -> Float[Array, " B"]:
    """Returns the drafter's own estimate that its token is accepted, or else the probability of its
    likeliest token.

    >>> sureness(Distribution(jnp.log(jnp.array([[[0.75, 0.25]]])))).tolist()
    [0.75]
    """
    if distribution.estimate is not None:
        return distribution.estimate
    return jnp.exp(jnp.max(log_probs(distribution), axis=-1))


def is_sure(
    confidences: Float[Array, "B G"], index: int | Int[Array, ""], threshold: PerRow
) -> Bool[Array, " B"]:
    """Marks rows whose draft token at an index reaches the threshold; NaN does not.

    >>> is_sure(jnp.array([[0.9, 0.2], [0.9, 0.6]]), 1, jnp.array([0.5, 0.5])).tolist()
    [False, True]
    """
    return jax.lax.dynamic_index_in_dim(confidences, index, axis=1, keepdims=False) >= threshold


def draft_depth(draft: Draft) -> Int[Array, " B"]:
    """Tokens on the longest path of each row's draft: of a chain its length.

    >>> fork = Draft(jnp.array([[7, 8, 9]]), jnp.array([3]), parent=jnp.array([[0, 0, 1]]))
    >>> draft_depth(fork).tolist(), draft_depth(fork._replace(parent=None)).tolist()
    ([2], [3])
    """
    if draft.parent is None:
        return draft.length
    node = jnp.arange(draft.tokens.shape[1], dtype=draft.length.dtype)[None, :]
    real = (node < draft.length[:, None]) & tree.in_tree(draft.parent)
    depth = tree.depth(tree.fed(draft.parent))[:, 1:]
    return jnp.max(jnp.where(real, depth, 0), axis=1).astype(draft.length.dtype)


def as_length(draft_tokens: Float[Array, " B"]) -> Int[Array, " B"]:
    """A number of draft tokens, rounded.

    >>> as_length(jnp.array([1.4, 2.6])).tolist()
    [1, 3]
    """
    return jnp.round(draft_tokens).astype(jnp.int32)
