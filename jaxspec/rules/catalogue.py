"""Every rule of the family once, with ordinary parameters, for measuring or checking all of them.

Nothing in decoding reads this list, and a rule of your own needs no place in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core import Rule
from jaxspec.rules.block import block
from jaxspec.rules.classical import classical_rejection
from jaxspec.rules.coupled import coupled
from jaxspec.rules.exact_match import exact_match
from jaxspec.rules.k_seq import k_seq
from jaxspec.rules.lenient import lenient
from jaxspec.rules.rejection import rejection
from jaxspec.rules.traversal import traversal
from jaxspec.rules.trusting import trusting
from jaxspec.rules.typical import threshold, typical

TokenBound = Callable[[Float[Array, "*shape V"]], Float[Array, "*shape V"]]

LENIENCE = 0.5
EPSILON = 0.09
DELTA = 0.3
TRUSTED = 0.5


class RuleEntry(NamedTuple):
    """A rule and its guarantees."""

    rule: Rule  # the rule, with ordinary parameters
    # an inexact rule's bound. It maps the target's log probabilities [..., V] to the largest
    # probability of each token in a sampled text, given the text before it. None for an exact rule.
    bound: TokenBound | None = None


def lenient_ceiling(log_p: Float[Array, "*shape V"]) -> Float[Array, "*shape V"]:
    """Bounds each token's probability by p / l.

    >>> lenient_ceiling(jnp.log(jnp.array([0.75, 0.25]))).tolist()
    [1.0, 0.5]
    """
    return jnp.minimum(jnp.exp(log_p) / LENIENCE, 1.0)


def typical_ceiling(log_p: Float[Array, "*shape V"]) -> Float[Array, "*shape V"]:
    """Bounds tokens at or below the threshold by p, and leaves the others free.

    >>> typical_ceiling(jnp.log(jnp.array([0.96875, 0.03125]))).tolist()
    [1.0, 0.03125]
    """
    low = log_p <= threshold(log_p, EPSILON, DELTA)[..., None]
    return jnp.where(low, jnp.exp(log_p), 1.0)


def trusting_ceiling(log_p: Float[Array, "*shape V"]) -> Float[Array, "*shape V"]:
    """Bounds tokens that the target leaves out by 0, and leaves the others free.

    >>> trusting_ceiling(jnp.log(jnp.array([1.0, 0.0]))).tolist()
    [1.0, 0.0]
    """
    return jnp.where(log_p > -jnp.inf, 1.0, 0.0)


# By the name of what makes them.
RULES: dict[str, RuleEntry] = {
    "rejection": RuleEntry(rejection()),
    "block": RuleEntry(block()),
    "traversal": RuleEntry(traversal()),
    "k_seq": RuleEntry(k_seq()),
    "coupled": RuleEntry(coupled()),
    "exact_match": RuleEntry(exact_match()),
    "classical_rejection": RuleEntry(classical_rejection()),
    "lenient": RuleEntry(lenient(LENIENCE), lenient_ceiling),
    "typical": RuleEntry(typical(EPSILON, DELTA), typical_ceiling),
    "trusting": RuleEntry(trusting(TRUSTED), trusting_ceiling),
}
