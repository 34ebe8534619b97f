"""Random tokens: the drafter of section 3.6 of Leviathan et al., arXiv 2211.17192, which costs
nothing.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec import core
from jaxspec.drafters.common import no_commit, same_state
from jaxspec.drafters.stepwise import NodeLogits, sequential


def uniform() -> core.BoundDrafter:
    """Draws each draft token uniformly from the target's vocabulary, whatever the temperature.

    Its acceptance rate is the sum of min(p, 1/V): between 1/V, where the target is sure, and 1,
    where all tokens are alike. It is the least that any drafter with a use has to beat, and it
    shows that no drafter changes the text's distribution. State: the uniform distribution.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=3)
        >>> prompt, key = core.Prompt(jnp.array([[1]]), jnp.array([1])), jax.random.key(0)
        >>> options = dict(gamma=2, max_new_tokens=50, temperature=1.0, key=key)
        >>> out = jaxspec.generate(target, prompt, drafter=uniform(), **options)
        >>> bool(out.stats.tokens_per_round[0] > 1.5)
        True
    """
    return core.BoundDrafter(_uniform(), name="uniform")


@functools.lru_cache
def _uniform() -> core.Drafter:
    def init(start: core.DraftStart) -> Float[Array, "B V"]:
        batch, _, vocab = start.prefilled.logits.shape
        return jnp.full((batch, vocab), -math.log(vocab), jnp.float32)

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> tuple[core.Draft, core.Caches]:
        def nodes(*arguments: Any) -> NodeLogits:
            return caches.draft[:, None], ()

        unchanged = context._replace(to_distribution=lambda logits, *_: core.Distribution(logits))
        draft, *_ = sequential(core.Reading((), nodes, nodes), unchanged)
        return draft, caches

    return core.Drafter(init, propose, no_commit, rollback=same_state)
