"""Tokens drawn at random: the paper's theoretical drafter, which costs nothing (section 3.6 of arXiv 2211.17192).

Shapes: B batch, V vocabulary, G gamma.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import loops, noise
from jaxspec.base import Budget, Draft, Drafter, Forward, Keys, Law, Params, Prompt, ToLaw, Verdict


@functools.cache
def random() -> Drafter:
    """Draws each guess uniformly from the target's vocabulary, whatever the temperature, and says so.

    Its acceptance rate is sum of min(p, 1/V): between 1/V, where the target is sure, and 1, where all tokens are alike.
    For theory and tests: it shows that any drafter keeps the target's law. With a budget it draws no more than that
    allows, and a policy reads the uniform law. State: that law.

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
        del params, to_law
        fresh = noise.at(keys, context.length, noise.Purpose.DRAFT)
        limit = jnp.full_like(context.length, gamma) if budget is None else budget.limit
        signal = None if budget is None or budget.signal is None else budget.signal(Law(log_probs=state[:, None, :]))

        def draw(i: Int[Array, ""], made: tuple[Draft, Bool[Array, " B"]]) -> tuple[Draft, Bool[Array, " B"]]:
            draft, going = made
            going = jnp.logical_and(going, i < limit)
            token = noise.categorical(jax.vmap(lambda key: jax.random.fold_in(key, i))(fresh), state, going)
            length = draft.length + going.astype(draft.length.dtype)
            draft = draft._replace(tokens=draft.tokens.at[:, i].set(token), length=length)
            if signal is not None and budget is not None and budget.go_on is not None:
                assert draft.signals is not None
                signals = draft.signals.at[:, i].set(jnp.where(going, signal, 0.0))
                draft, going = draft._replace(signals=signals), jnp.logical_and(going, budget.go_on(i, signals))
            return draft, going

        def unfinished(i: Int[Array, ""], made: tuple[Draft, Bool[Array, " B"]]) -> Bool[Array, ""]:
            return jnp.any(jnp.logical_and(made[1], i < limit))

        shape = context.length.shape[0], gamma
        none_yet = Draft(
            jnp.zeros(shape, jnp.int32), None, jnp.zeros_like(limit), None if signal is None else jnp.zeros(shape)
        )
        start = none_yet, limit >= 0
        draft, _ = loops.up_to(gamma, draw, start, None if budget is None else unfinished)
        law = jnp.broadcast_to(state[:, None, :], (*shape, state.shape[1]))
        return draft._replace(log_probs=law), state

    def commit(
        params: Params, state: Float[Array, "B V"], context: Prompt, verdict: Verdict, forward: Forward
    ) -> Float[Array, "B V"]:
        del params, context, verdict, forward
        return state

    return Drafter(init, propose, commit)
