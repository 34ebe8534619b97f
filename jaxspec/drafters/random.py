"""Tokens drawn at random: the paper's theoretical drafter, which costs nothing (section 3.6 of arXiv 2211.17192).

Shapes: B batch, V vocabulary, G gamma.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import noise
from jaxspec.base import Budget, Draft, Drafter, Forward, Keys, Params, Prompt, ToLaw, Verdict


@functools.cache
def random() -> Drafter:
    """Draws each guess uniformly from the target's vocabulary, whatever the temperature, and says so.

    Its acceptance rate is sum of min(p, 1/V): between 1/V, where the target is sure, and 1, where all tokens are alike.
    For theory and tests: it shows that any drafter keeps the target's law. State: the uniform law.

    Example:
        >>> import jaxspec
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=3)
        >>> prompt, key = Prompt(jnp.array([[1]]), jnp.array([1])), jax.random.key(0)
        >>> options = dict(gamma=2, max_new_tokens=50, temperature=1.0, key=key)
        >>> out = jaxspec.generate(target, prompt, drafter=random(), **options)
        >>> bool(out.stats.tokens_per_round[0] > 1.5)
        True
    """

    def init(params: Params, prompt: Prompt, room: int, forward: Forward) -> Float[Array, "B V"]:
        del params, prompt, room
        vocab = forward.logits.shape[-1]
        return jnp.full((forward.logits.shape[0], vocab), -jnp.log(vocab))

    def propose(
        keys: Keys,
        params: Params,
        state: Float[Array, "B V"],
        context: Prompt,
        gamma: int,
        to_law: ToLaw,
        budget: Budget | None = None,
    ) -> tuple[Draft, Float[Array, "B V"]]:
        del params, to_law, budget
        fresh = noise.at(keys, context.length, noise.Purpose.DRAFT)

        def draw(_, i: Int[Array, ""]):
            return None, noise.categorical(jax.vmap(lambda key: jax.random.fold_in(key, i))(fresh), state)

        _, tokens = jax.lax.scan(draw, None, jnp.arange(gamma))
        law = jnp.broadcast_to(state[:, None, :], (state.shape[0], gamma, state.shape[1]))
        return Draft(tokens.T, law, jnp.full_like(context.length, gamma)), state

    def commit(
        params: Params, state: Float[Array, "B V"], context: Prompt, verdict: Verdict, forward: Forward
    ) -> Float[Array, "B V"]:
        del params, context, verdict, forward
        return state

    return Drafter(init, propose, commit)
