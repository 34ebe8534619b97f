"""The policy that knows how many draft tokens will be accepted: no draft-length policy can gain more."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.analysis import acceptance
from jaxspec.core import BoundPolicy, Draft, Policy, Prompt, Verdict
from jaxspec.decode.request import Prepared


class Params(NamedTuple):
    accepted: Any


def oracle(accepted: Int[np.ndarray, "B N"]) -> BoundPolicy:
    """Drafts as many tokens as will be accepted, so that none is rejected: the upper bound of section 3.5 of the paper.

    It needs the decoded text, so it is for measurements: the gain that any policy could have on that text.

    Args:
        accepted: entry [b, t] is how many draft tokens would be accepted in a round that begins after token t of row
            b's new text (t = 0: after the first token). For greedy text `accepted_after` returns it.

    Raises:
        ValueError: an array that is not of two dimensions, or holds a negative number.

    Example:
        >>> policy = oracle(np.array([[2, 1, 0, 3]]))
        >>> memory = policy.functions.init(policy.params, Prompt(jnp.zeros((1, 1), jnp.int32), jnp.array([1])))
        >>> draft, two = Draft(jnp.zeros((1, 8), jnp.int32), jnp.array([2])), jnp.array([2])
        >>> later = policy.functions.update(policy.params, memory, draft, Verdict(two, two, two), jnp.array([3]))
        >>> [policy.functions.max_draft(policy.params, at, 8, two).tolist() for at in (memory, later)]
        [[2], [3]]
    """
    array = np.asarray(accepted)
    if array.ndim != 2 or array.dtype.kind not in "iu" or (array < 0).any():
        raise ValueError(
            f"accepted has shape {array.shape} and dtype {array.dtype}: expected counts, [prompts, positions]"
        )
    return BoundPolicy(_oracle(), Params(array.astype(np.int32)), name="oracle")


@functools.lru_cache
def _oracle() -> Policy:
    def init(params: Params, prompt: Prompt) -> Int[Array, " B"]:
        return jnp.zeros_like(prompt.length)

    def max_draft(params: Params, state: Int[Array, " B"], gamma: int, left: Int[Array, " B"]) -> Int[Array, " B"]:
        at = jnp.minimum(state, params.accepted.shape[1] - 1)
        return jnp.take_along_axis(params.accepted, at[:, None], axis=1)[:, 0]

    def update(
        params: Params, state: Int[Array, " B"], draft: Draft, verdict: Verdict, num_committed: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        return state + num_committed

    return Policy(init, max_draft, update)


def accepted_after(prepared: Prepared) -> Int[np.ndarray, "B N"]:
    """Counts the draft tokens in a row that a greedy round accepts which begins after each token of the text.

    Args:
        prepared: a generation with a target and a draft model, at temperature 0.

    Example:
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table(max_new_tokens=5)
        >>> accepted_after(prepared.replace(drafter=prepared.target)).tolist()
        [[4, 3, 2, 1, 0], [4, 3, 2, 1, 0]]
    """
    is_right = acceptance.measure(prepared).overlaps > 0
    counts = np.zeros(is_right.shape, np.int32)
    for t in range(is_right.shape[1] - 2, -1, -1):
        counts[:, t] = np.where(is_right[:, t + 1], counts[:, t + 1] + 1, 0)
    return counts
