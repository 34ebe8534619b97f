"""Tokens drawn at random: the paper's theoretical drafter, which costs nothing (section 3.6 of arXiv 2211.17192)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import (
    BoundDrafter,
    Caches,
    Distribution,
    Draft,
    DraftContext,
    Drafter,
    DraftStart,
    Weights,
)
from jaxspec.drafters.common import no_commit, same_state
from jaxspec.drafters.sequential import Logits, sequential


def uniform() -> BoundDrafter:
    """Draws each draft token uniformly from the target's vocabulary, whatever the temperature.

    Its acceptance rate is the sum of min(p, 1/V): between 1/V, where the target is sure, and 1, where all tokens are
    alike. For theory and tests: it shows that any drafter leaves the target's distribution as it is. State: the uniform
    distribution.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=3)
        >>> from jaxspec.core import Prompt
        >>> prompt, key = Prompt(jnp.array([[1]]), jnp.array([1])), jax.random.key(0)
        >>> options = dict(gamma=2, max_new_tokens=50, temperature=1.0, key=key)
        >>> out = jaxspec.generate(target, prompt, drafter=uniform(), **options)
        >>> bool(out.stats.tokens_per_round[0] > 1.5)
        True
    """
    return BoundDrafter(_uniform(), name="uniform")


@functools.lru_cache
def _uniform() -> Drafter:
    def init(start: DraftStart) -> Float[Array, "B V"]:
        batch, _, vocab = start.prefilled.logits.shape
        return jnp.full((batch, vocab), -jnp.log(vocab))

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        def following(i: Int[Array, ""], last: Int[Array, " B"], carry: tuple[()]) -> Logits:
            return caches.draft, None, carry

        unchanged = context._replace(to_distribution=lambda logits, *_: Distribution(logits))
        draft, _ = sequential(lambda carry: (caches.draft, None, carry), following, (), unchanged)
        return draft, caches

    return Drafter(init, propose, no_commit, rollback=same_state)
