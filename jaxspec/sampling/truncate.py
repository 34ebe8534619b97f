"""Temperature, and truncation to the most probable tokens.

Each function takes logits and returns logits, -inf where a token was taken away.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import noise


def apply_temperature(
    logits: Float[Array, "B T V"], temperature: Float[Array, " B"]
) -> Float[Array, "B T V"]:
    """Divides by the temperature; at 0, leaves only the largest logit (the lowest id among equals;
    -inf stays -inf).

    The largest one is made 0 before, so that no temperature is too small for what comes after.
    """
    temperature = temperature[:, None, None]
    positive = temperature > 0
    best = noise.first_largest(logits)[..., None]
    allowed = (jnp.arange(logits.shape[-1])[None, None, :] == best) & (logits > -jnp.inf)
    point = jnp.where(allowed, 0.0, -jnp.inf)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    below = logits - jnp.where(jnp.isfinite(largest), largest, 0.0)
    return jnp.where(positive, below / jnp.where(positive, temperature, 1.0), point)


def keep_top_k(
    logits: Float[Array, "B T V"], largest: Float[Array, "B T bound"], top_k: Int[Array, " B"]
) -> Float[Array, "B T V"]:
    """Sets all but the k largest logits, and what ties with the k-th, to -inf; a k past the bound
    keeps all.

    `largest` holds the largest logits in descending order.
    """
    bound = largest.shape[-1]
    index = jnp.broadcast_to(
        jnp.clip(top_k - 1, 0, bound - 1)[:, None, None], (*logits.shape[:2], 1)
    )
    kth = jnp.take_along_axis(largest, index, axis=-1)
    return jnp.where((logits >= kth) | (top_k > bound)[:, None, None], logits, -jnp.inf)


def keep_top_p(
    logits: Float[Array, "B T V"], largest: Float[Array, "B T bound"], top_p: Float[Array, " B"]
) -> Float[Array, "B T V"]:
    """Sets to -inf every logit that is not needed to reach a mass of `top_p`; what ties with the
    last stays.

    `largest` holds, in descending order, at least all logits that are not -inf.

    >>> logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
    >>> jnp.isfinite(keep_top_p(logits, logits, jnp.array([0.6]))).tolist()
    [[[True, True, False]]]
    """
    probs = jnp.exp(largest - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    before = jnp.cumsum(probs, axis=-1) - probs  # mass of the more probable ones
    top_p = top_p[:, None, None]
    last = jnp.maximum(jnp.sum(before < top_p, axis=-1, keepdims=True) - 1, 0)
    enough = logits >= jnp.take_along_axis(largest, last, axis=-1)
    return jnp.where(enough | (top_p >= 1.0), logits, -jnp.inf)


def keep_min_p(logits: Float[Array, "B T V"], min_p: Float[Array, " B"]) -> Float[Array, "B T V"]:
    """Sets to -inf every logit whose probability is below `min_p` times the largest; 0 keeps all, 1
    the likeliest.

    The ratio does not depend on what else was taken away, so nothing is normalised.

    >>> logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
    >>> jnp.isfinite(keep_min_p(logits, jnp.array([0.5]))).tolist()
    [[[True, True, False]]]

    Reference: Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM
    Outputs", arXiv 2407.01082.
    """
    least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)[:, None, None]
    return jnp.where(logits >= least, logits, -jnp.inf)


def keep_typical_p(
    logits: Float[Array, "B T V"], typical_p: Float[Array, " B"]
) -> Float[Array, "B T V"]:
    """Keeps the fewest tokens, most typical first, whose mass reaches `typical_p`; 1 keeps all.

    A token is typical if its information content -log p(x) is near the entropy H of the
    distribution: tokens are ordered by |-log p(x) - H|. Very probable tokens may be taken away, not
    only improbable ones. What ties with the last token stays. The other logits become -inf.

    >>> logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))  # H is 1.03, and -log p 0.69, 1.20, 1.61
    >>> jnp.isfinite(keep_typical_p(logits, jnp.array([0.3]))).tolist()
    [[[False, True, False]]]

    Reference: Meister, Pimentel, Wiher, Cotterell, "Locally Typical Sampling", TACL 2023, arXiv
    2202.00666.
    """
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    probs = jnp.exp(log_probs)
    information = jnp.where(probs > 0, -probs * log_probs, 0.0)
    entropy = jnp.sum(information, axis=-1, keepdims=True)  # [B, T, 1]
    distance = jnp.abs(-log_probs - entropy)
    # [B, T, V] each, the most typical token first
    sorted_distance, sorted_probs = jax.lax.sort((distance, probs), num_keys=1)
    before = jnp.cumsum(sorted_probs, axis=-1) - sorted_probs  # mass of the more typical ones
    typical_p = typical_p[:, None, None]
    last = jnp.maximum(jnp.sum(before < typical_p, axis=-1, keepdims=True) - 1, 0)
    enough = distance <= jnp.take_along_axis(sorted_distance, last, axis=-1)
    return jnp.where(enough | (typical_p >= 1.0), logits, -jnp.inf)
