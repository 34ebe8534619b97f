"""A model's best guess as a point mass, at any temperature: no law is drawn from, kept, or read by the rule."""

from __future__ import annotations

import functools
from typing import Any

from jaxtyping import Array, Float, Int

from jaxspec import noise
from jaxspec.base import Budget, Draft, Drafter, Keys, Law, Model, Params, Prompt, ToLaw
from jaxspec.drafters.common import as_drafter


def argmax(model: Model | Drafter) -> Drafter:
    """Proposes a model's most probable continuation, one token at a time, with certainty.

    At temperature 0 that is what `drafters.model` does. At others a guess x is kept with probability p(x), less often
    than a sample of a good q (sum of min(p, q)), and the rule reads no law of the size of the vocabulary: worth trying
    where a drafter is sure and its probabilities are not.

    Args:
        model: a model, or a drafter that samples from one (`drafters.abstaining`).

    Raises:
        ValueError: a drafter that has no laws: its guesses are point masses already.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.drafters import bigram
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=3)
        >>> drafter = argmax(bigram([[0, 1, 2, 1, 2, 0]], target))
        >>> prompt, key = jaxspec.Prompt(jax.numpy.array([[1]]), jax.numpy.array([1])), jax.random.key(0)
        >>> options = dict(gamma=2, max_new_tokens=5, temperature=1.0, key=key)
        >>> jaxspec.generate(target, prompt, drafter=drafter, **options).lengths.tolist()
        [5]
    """
    drafter = as_drafter(model)
    if drafter.lm is None:
        raise ValueError("argmax got a drafter without a model: expected a model, or a drafter that samples from one")
    bare = _argmax(drafter._replace(params=None, models=()))
    return bare._replace(params=drafter.params, models=drafter.models)


@functools.cache
def _argmax(drafter: Drafter) -> Drafter:

    def propose(
        keys: Keys,
        params: Params,
        state: Any,
        context: Prompt,
        gamma: int,
        to_law: ToLaw,
        budget: Budget | None = None,
    ) -> tuple[Draft, Any]:
        def certain(
            logits: Float[Array, "B T W"], guesses: Int[Array, "B F"] | None = None, seen: Array | None = None
        ) -> Law:
            law = to_law(logits, guesses, seen)
            if law.log_probs is None:
                return law
            soft = law.log_probs if law.soft is None else law.soft
            return Law(tokens=noise.first_largest(law.log_probs), soft=soft)

        return drafter.propose(keys, params, state, context, gamma, certain, budget)

    return drafter._replace(propose=propose)
