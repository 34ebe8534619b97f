"""The drafter of the paper: a smaller language model, one token at a time (arXiv 2211.17192, Algorithm 1)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import buffers, noise
from jaxspec.base import Cache, Draft, Drafter, Forward, Keys, LanguageModel, Law, Params, Prompt, ToLaw, Verdict


@functools.cache
def model(lm: LanguageModel, coupled: bool = False) -> Drafter:
    """Drafts gamma tokens from `lm`, in a `lax.scan`, sampling from its own law (the argmax if that is greedy).

    Its law is warped as the target's, each guess behind those before it, or by `Request.draft_controls` of its own.

    Its state is its cache. After a round in which every guess was accepted the cache lacks two committed tokens (the
    last guess was never fed, and the bonus token came from the target), otherwise one; so every round begins by
    reading the last two committed tokens again, from wherever the last round left off. With committed [a b c d e]:
    rewind to 3 tokens, feed [d e], draw x1; feed x1, draw x2; and so on. gamma guesses cost gamma passes.

    With `coupled`, the guess for a position is drawn with the noise that plain sampling has for that position, and so
    is likely to be what plain sampling says there: what `accept.coupled` rewards. Given that noise the guess is
    certain, so it is proposed as a point mass, and every exact rule stays exact, although a position that is drafted
    again meets the same noise again.

    Args:
        lm: the model that drafts.
        coupled: whether guesses are drawn with plain sampling's noise.
    """

    def init(params: Params, prompt: Prompt, room: int, forward: Forward):
        del forward
        _, cache = lm.prefill(params, prompt, buffers.row_width(lm, prompt) + room)
        return cache

    def propose(
        keys: Keys, params: Params, state: Cache, context: Prompt, gamma: int, to_law: ToLaw
    ) -> tuple[Draft, Cache]:
        fresh = noise.at(keys, context.length, noise.Purpose.DRAFT)

        def draw(i: int | Int[Array, ""], law: Law):
            if not coupled:
                return sample(jax.vmap(lambda key: jax.random.fold_in(key, i))(fresh), law)
            position = context.length + jnp.asarray(i, context.length.dtype)
            return sample(noise.at(keys, position, noise.Purpose.TOKEN), law)[0], None

        last_two = buffers.window(context.tokens, context.length - 2, 2)
        cache = lm.rewind(state, context.length - 2)
        forward, cache = lm.extend(params, cache, _known(lm, last_two))
        first, first_law = draw(0, to_law(forward.logits[:, -1:]))

        def guess(carry, i: Int[Array, ""]):
            cache, tokens = carry
            last = jax.lax.dynamic_slice_in_dim(tokens, i - 1, 1, axis=1)
            forward, cache = lm.extend(params, cache, _known(lm, last))
            token, log_probs = draw(i, to_law(forward.logits, tokens, (jnp.arange(gamma) < i)[None, :]))
            return (cache, jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], i, axis=1)), log_probs

        tokens = jnp.pad(first[:, None], ((0, 0), (0, gamma - 1)))
        (cache, tokens), rest_laws = jax.lax.scan(guess, (cache, tokens), jnp.arange(1, gamma))
        log_probs = None
        if first_law is not None and rest_laws is not None:
            log_probs = jnp.concatenate([first_law[None], rest_laws]).transpose(1, 0, 2)
        return Draft(tokens, log_probs, jnp.full_like(context.length, gamma)), cache

    def commit(params: Params, state: Cache, context: Prompt, verdict: Verdict, forward: Forward) -> Cache:
        del params, context, verdict, forward
        return state  # the next round rewinds it

    return Drafter(init, propose, commit, lm)


def sample(keys: Keys, law: Law) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
    """One guess of each row, and the log probabilities that it was drawn from (None: a point mass)."""
    if law.tokens is not None:
        return jnp.maximum(law.tokens[:, 0], 0), None  # -1, where nothing is allowed, could not be fed
    assert law.log_probs is not None
    log_probs = law.log_probs[:, 0]
    return noise.categorical(keys, log_probs), log_probs


def _known(lm: LanguageModel, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Ids that the drafter lacks (the target's vocabulary is larger) read as its last one."""
    return jnp.minimum(tokens, lm.vocab_size - 1)
