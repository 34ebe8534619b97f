"""Acceptance rates by lenience, along one set of the target's texts: Table 5 (Leviathan et al., arXiv 2211.17192, A.5).

Axis letters: N positions of all texts in a row, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float

from jaxspec.analysis import replay
from jaxspec.analysis.estimate import Ratio

Logits = Float[np.ndarray, "N V"]


def alpha(store: replay.Store, lenience: float) -> Ratio:
    """How often a guess is kept, over all positions of a store's texts.

    Sampling: E[sum_x min(p(x) / l, q(x))]. At temperature 0: the share of positions where the drafter's likeliest token
    has p(x) >= l max(p), p being the target's law at temperature 1.

    Args:
        store: see `replay.record`; says at which temperature.
        lenience: l, in (0, 1]; 1 is none.

    Raises:
        ValueError: a lenience outside (0, 1].

    Example:
        >>> import tempfile
        >>> import jax, jax.numpy as jnp
        >>> from jaxspec import Prompt
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = replay.record(f"{folder}/store", target, draft, prompt, temperature=0.0, max_new_tokens=20)
        ...     rates = [alpha(store, l).value for l in (1.0, 0.5, 1e-9)]
        >>> rates == sorted(rates), rates[-1]
        (True, 1.0)
    """
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience is {lenience}: expected a number in (0, 1], 1 being none")
    temperature, kept = float(store.manifest["temperature"]), np.zeros(len(store.tokens))
    for start in range(0, len(kept), replay.CHUNK):  # the logits are on disk
        part = slice(start, start + replay.CHUNK)
        sides = store.target[part].astype(np.float64), store.draft[part].astype(np.float64)
        kept[part] = _near_best(*sides, lenience) if temperature == 0 else _overlap(*sides, temperature, lenience)
    ends = np.cumsum(store.counts)
    sums = np.array([kept[end - n : end].sum() for end, n in zip(ends, store.counts, strict=True)])
    return Ratio(sums, store.counts, probability=True)


def _overlap(target: Logits, draft: Logits, temperature: float, lenience: float) -> Float[np.ndarray, " N"]:
    """sum_x min(p(x) / l, q(x))."""
    p, q = (_law(logits / temperature) for logits in (target, draft))
    return np.minimum(p / lenience, q).sum(axis=-1)


def _near_best(target: Logits, draft: Logits, lenience: float) -> Bool[np.ndarray, " N"]:
    """Whether p(x) >= l max(p) for the drafter's likeliest x."""
    guess = np.argmax(draft, axis=-1)
    return np.take_along_axis(target, guess[:, None], axis=-1)[:, 0] >= target.max(axis=-1) + math.log(lenience)


def _law(logits: Logits) -> Logits:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
