"""For analysis: the policy that knows how many guesses will be kept."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.base import Draft, Policy, Prompt, Verdict


class Values(NamedTuple):
    kept: Any


def oracle(kept: Int[np.ndarray, "B N"]) -> Policy:
    """As many guesses as will be kept, so that none is made in vain: the upper bound of section 3.5 of the paper.

    Not a way to decode, as one must have decoded before: it measures what any policy could gain on a text.

    Args:
        kept: how many guesses of a round that begins behind token t of row b's new text (t = 0: behind the first one)
            are kept, as many as they are. `analysis.policies.runs` computes it for greedy text.

    Raises:
        ValueError: an array that is not of two dimensions, or holds a negative number.

    Example:
        >>> policy = oracle(np.array([[2, 1, 0, 3]]))
        >>> memory = policy.init(policy.params, Prompt(jnp.zeros((1, 1), jnp.int32), jnp.array([1])))
        >>> draft, verdict = Draft(jnp.zeros((1, 8), jnp.int32), None, jnp.array([2])), Verdict(*2 * [jnp.array([2])])
        >>> later = policy.update(policy.params, memory, draft, verdict, jnp.array([3]))
        >>> policy.limit(policy.params, memory, 8).tolist(), policy.limit(policy.params, later, 8).tolist()
        ([2], [3])
    """
    array = np.asarray(kept)
    if array.ndim != 2 or array.dtype.kind not in "iu" or (array < 0).any():
        raise ValueError(f"kept has shape {array.shape} and dtype {array.dtype}: expected counts, [prompts, positions]")
    return _oracle()._replace(params=Values(array.astype(np.int32)))


@functools.cache
def _oracle() -> Policy:
    def init(params: Values, prompt: Prompt) -> Int[Array, " B"]:
        del params
        return jnp.zeros_like(prompt.length)

    def limit(params: Values, state: Int[Array, " B"], gamma: int) -> Int[Array, " B"]:
        del gamma
        at = jnp.minimum(state, params.kept.shape[1] - 1)
        return jnp.take_along_axis(params.kept, at[:, None], axis=1)[:, 0]

    def update(
        params: Values, state: Int[Array, " B"], draft: Draft, verdict: Verdict, kept: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        del params, draft, verdict
        return state + kept

    return Policy(init, limit, update)
