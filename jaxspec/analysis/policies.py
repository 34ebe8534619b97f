"""What a draft-length policy could gain at most: how many guesses are kept from every position of a greedy text.

Shapes: B batch, N new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxspec.analysis import acceptance
from jaxspec.base import Model, Prompt


def runs(
    target: Model, drafter: Model, prompts: Sequence[str] | str | Prompt, *, max_new_tokens: int, batch: int = 16
) -> Int[np.ndarray, "B N"]:
    """How many guesses in a row the target keeps, greedily, in a round that begins behind each token of its text.

    What `policies.oracle` needs.

    Args:
        target, drafter: two models with one vocabulary.
        prompts, max_new_tokens: as in `jaxspec.generate`.
        batch: rows at a time.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> runs(model, model, Prompt(jnp.array([[3, 1]]), jnp.array([2])), max_new_tokens=5).tolist()
        [[4, 3, 2, 1, 0]]
    """
    found = []
    for text in acceptance.texts(target, drafter, prompts, max_new_tokens=max_new_tokens, key=None, batch=batch):
        parties = (target.lm, drafter.lm, text.warp, target.params, drafter.params)
        same = np.asarray(acceptance.overlap(*parties, text.controls, text.group.prompt, text.tokens)) > 0
        same[np.arange(same.shape[1])[None, :] >= text.lengths[:, None]] = False
        same = np.pad(same, ((0, 0), (0, max_new_tokens - same.shape[1])))
        found.append(run_lengths(same)[: text.group.real])
    return np.concatenate(found)


def run_lengths(same: Bool[np.ndarray, "B N"]) -> Int[np.ndarray, "B N"]:
    """How many entries behind each are true without a gap.

    >>> run_lengths(np.array([[True, True, False, True]])).tolist()
    [[1, 0, 1, 0]]
    """
    lengths = np.zeros(same.shape, np.int32)
    for t in range(same.shape[1] - 2, -1, -1):
        lengths[:, t] = np.where(same[:, t + 1], lengths[:, t + 1] + 1, 0)
    return lengths
