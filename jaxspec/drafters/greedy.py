"""A drafter's most probable token as a point mass, at any temperature: nothing is drawn from its
distributions.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jaxspec.core import (
    BoundDrafter,
    Caches,
    Distribution,
    Draft,
    DraftContext,
    Drafter,
    Model,
    Weights,
    noise,
)
from jaxspec.drafters.common import as_drafter, name_of


def greedy(draft: Model | BoundDrafter) -> BoundDrafter:
    """Proposes a model's most probable continuation, one token at a time, as a point mass.

    At temperature 0 that is what `drafters.model` does. At others a draft token x is accepted with
    probability p(x), less often than a sample of a good q (sum of min(p, q)), and the rule reads no
    distribution of the size of the vocabulary: worth trying where a drafter is sure and its
    probabilities are not.

    Args:
        draft: a model, or a drafter that samples from one (`drafters.without_backoff`).

    Raises:
        ValueError: a drafter that has no distributions: its draft tokens are point masses already.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.drafters import bigram
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=3)
        >>> drafter = greedy(bigram([[0, 1, 2, 1, 2, 0]], target))
        >>> prompt, key = jaxspec.Prompt(jnp.array([[1]]), jnp.array([1])), jax.random.key(0)
        >>> options = dict(gamma=2, max_new_tokens=5, temperature=1.0, key=key)
        >>> jaxspec.generate(target, prompt, drafter=drafter, **options).lengths.tolist()
        [5]
    """
    drafter = as_drafter(draft)
    if drafter.functions.lm is None and drafter.target is None:
        raise ValueError(
            "greedy got a drafter without a model: expected a model, or a drafter that samples "
            "from one"
        )
    return drafter._replace(
        functions=_greedy(drafter.functions), name=f"greedy({name_of(drafter)})"
    )


@functools.lru_cache
def _greedy(drafter: Drafter) -> Drafter:
    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        def point_mass(*arguments) -> Distribution:
            sampled = context.to_distribution(*arguments)
            if sampled.log_probs is None:
                return sampled
            # for a policy, which reads the distribution that was not drawn from
            logits = sampled.log_probs
            if sampled.greedy is not None and sampled.logits is not None:
                logits = jnp.where(sampled.greedy[:, None, None], sampled.logits, logits)
            return Distribution(tokens=noise.first_largest(sampled.log_probs), logits=logits)

        return drafter.propose(weights, caches, context._replace(to_distribution=point_mass))

    # Trees are made of `steps`, which know nothing of point masses: without them they are refused.
    return drafter._replace(propose=propose, steps=None)
