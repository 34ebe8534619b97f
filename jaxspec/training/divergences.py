"""Divergences of a draft distribution q from its target's p, per token, which training a draft
model lessens.

The acceptance rate at a position is alpha = sum_x min(p(x), q(x)) = 1 - TV(p, q) (Corollary 3.6 of
arXiv 2211.17192), so the total variation decides. But its gradient vanishes where p and q hardly
overlap: it is for a draft model that has already learnt something. `blend` begins as KL and becomes
total variation as alpha grows.

Shapes: B batch, T step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Divergence = Callable[
    # log p, log q, 1.0 for real positions
    [Float[Array, "B T V"], Float[Array, "B T V"], Float[Array, "B T"]],
    Float[Array, "B T"],
]

BLEND_DECAY = 3.0  # how fast `blend` leaves KL for total variation as alpha grows
SMALLEST = 1e-6  # an acceptance rate whose logarithm is still taken


def kl(log_p, log_q, real):
    """Computes the forward KL, sum p log(p / q): the gradient of cross-entropy with soft
    targets.
    """
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def reverse_kl(log_p, log_q, real):
    """Computes sum q log(q / p)."""
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)


def jensen_shannon(log_p, log_q, real):
    """Computes (KL(p, m) + KL(q, m)) / 2, with m = (p + q) / 2."""
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return 0.5 * (kl(log_p, log_m, real) + kl(log_q, log_m, real))


def total_variation(log_p, log_q, real):
    """Computes 1 - alpha."""
    return 1.0 - _alpha(log_p, log_q)


def minus_log_alpha(log_p, log_q, real):
    """Computes -log alpha: as total variation, with a larger gradient where alpha is small."""
    return -jnp.log(jnp.maximum(_alpha(log_p, log_q), SMALLEST))


def blend(log_p, log_q, real):
    """Computes w KL + (1 - w) (1 - alpha), with w = exp(-BLEND_DECAY alpha) by the batch's mean
    alpha.
    """
    alpha = _alpha(log_p, log_q)
    mean = jnp.sum(alpha * real) / jnp.maximum(jnp.sum(real), 1.0)
    weight = jnp.exp(-BLEND_DECAY * jax.lax.stop_gradient(mean))
    return weight * kl(log_p, log_q, real) + (1 - weight) * (1 - alpha)


DIVERGENCES: dict[str, Divergence] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "minus_log_alpha": minus_log_alpha,
    "blend": blend,
}


def _alpha(log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)
