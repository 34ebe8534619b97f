"""The drafter of the paper: a smaller language model, one token at a time (arXiv 2211.17192, Algorithm 1)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import buffers, loops, noise
from jaxspec.base import (
    Budget,
    Cache,
    Draft,
    Drafter,
    Forward,
    Keys,
    LanguageModel,
    Law,
    Params,
    Prompt,
    ToLaw,
    Verdict,
)


class Memory(NamedTuple):
    """The drafter's state: its cache, and how many tokens of each row the cache holds for certain."""

    cache: Cache
    seen: Int[Array, " B"]


class Guesses(NamedTuple):
    """A draft in the making.

    Attributes:
        cache: the drafter's.
        tokens, log_probs, gumbel, signals, length: as in `base.Draft`.
        going: rows that make another guess.
        fed: guesses that the cache holds.
    """

    cache: Cache
    tokens: Int[Array, "B G"]
    log_probs: Float[Array, "B G V"] | None
    gumbel: Float[Array, "B G V"] | None
    signals: Float[Array, "B G"] | None
    length: Int[Array, " B"]
    going: Bool[Array, " B"]
    fed: Int[Array, ""]


Knows = Callable[[Forward], Bool[Array, "B T"]]  # whether a guess may follow each position


def model(lm: LanguageModel, coupled: bool = False, knows: Knows | None = None) -> Drafter:
    """Drafts gamma tokens from `lm`, in one loop, sampling from its own law (the argmax if that is greedy).

    Its law is warped as the target's, each guess behind those before it, or by `Request.draft_controls` of its own.

    Its state is its cache. After a round in which every guess was accepted the cache lacks two committed tokens (the
    last guess was never fed, and the bonus token came from the target), otherwise one; so every round begins by
    reading the last two committed tokens again, from wherever the last round left off. With committed [a b c d e]:
    rewind to 3 tokens, feed [d e], draw x1; feed x1, draw x2; and so on. gamma guesses cost gamma passes.

    With a budget the loop ends when no row may go on, and there is no pass at all where none may begin. What was
    committed in rounds without a draft is read, gamma + 1 tokens a pass, when the next draft begins.

    With `coupled`, the guess for a position is drawn with the noise that plain sampling has for that position, and so
    is likely to be what plain sampling says there: what `accept.coupled` rewards. Given that noise the guess is
    certain, so it is proposed as a point mass, and every exact rule stays exact, although a position that is drafted
    again meets the same noise again.

    Args:
        lm: the model that drafts.
        coupled: whether guesses are drawn with plain sampling's noise.
        knows: of a pass of the model, where it has something to say: a row's draft ends where it has not. By default it
            has everywhere. It must not depend on what is drawn next, or the text is biased.

    Returns:
        The drafter, whose params are the model's and yet to be given; `jaxspec.generate(..., drafter=a_model)` does all
        of this by itself.

    Example:
        >>> import jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> drafter = model(draft.lm)._replace(params=draft.params, models=(draft,))
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Algorithm 1.
    """
    return _model(lm, coupled, knows)


@functools.cache
def _model(lm: LanguageModel, coupled: bool, knows: Knows | None) -> Drafter:
    def init(params: Params, prompt: Prompt, room: int, forward: Forward) -> Memory:
        del forward
        _, cache = lm.prefill(params, prompt, buffers.row_width(lm, prompt) + room)
        return Memory(cache, prompt.length if lm.start_token is None else jnp.ones_like(prompt.length))

    def propose(
        keys: Keys,
        params: Params,
        state: Memory,
        context: Prompt,
        gamma: int,
        to_law: ToLaw,
        budget: Budget | None = None,
    ) -> tuple[Draft, Memory]:
        fresh = noise.at(keys, context.length, noise.Purpose.DRAFT)
        limit = jnp.full_like(context.length, gamma) if budget is None else budget.limit
        always = budget is None and knows is None  # every row makes gamma guesses, in every round

        def begin(state: Memory) -> tuple[Float[Array, "B 1 V"], Bool[Array, " B"], Cache]:
            cache = state.cache if always else _catch_up(lm, params, state, context, limit > 0, gamma + 1)
            last_two = buffers.window(context.tokens, context.length - 2, 2)
            forward, cache = lm.extend(params, lm.rewind(cache, context.length - 2), _known(lm, last_two))
            if lm.head is None:
                return forward.logits[:, -1:], known_at(forward), cache
            logits = lm.head(params, forward.features[:, -1:])  # the first one's logits are never computed
            return logits, known_at(forward), cache

        def known_at(forward: Forward) -> Bool[Array, " B"]:
            return jnp.ones(limit.shape, bool) if knows is None else knows(forward)[:, -1]

        def draw(
            i: int | Int[Array, ""], logits: Float[Array, "B 1 V"], known: Bool[Array, " B"], guesses: Guesses
        ) -> Guesses:
            law = to_law(logits, guesses.tokens, (jnp.arange(gamma, dtype=jnp.int32) < i)[None, :])
            going, signals = jnp.logical_and(jnp.logical_and(guesses.going, i < limit), known), guesses.signals
            if coupled and law.log_probs is not None:
                at = noise.at(keys, context.length + jnp.asarray(i, context.length.dtype), noise.Purpose.TOKEN)
                gumbel = noise.gumbel(at, law.log_probs.shape[-1])
                token = noise.categorical(at, law.log_probs[:, 0], drawn=gumbel)
                guesses = guesses._replace(gumbel=_put(guesses.gumbel, gumbel, i))
            else:
                token, log_probs = sample(jax.vmap(lambda key: jax.random.fold_in(key, i))(fresh), law, going)
                if log_probs is not None:
                    guesses = guesses._replace(log_probs=_put(guesses.log_probs, log_probs, i))
            length = guesses.length + going.astype(guesses.length.dtype)
            if budget is not None and budget.signal is not None and budget.go_on is not None:
                signals = _put(signals, jnp.where(going, budget.signal(law), 0.0), i)
                going = jnp.logical_and(going, budget.go_on(i, signals))
            return guesses._replace(
                tokens=_put(guesses.tokens, token, i),
                signals=signals,
                length=length,
                going=going,
            )

        def next_guess(i: Int[Array, ""], guesses: Guesses) -> Guesses:
            last = jax.lax.dynamic_slice_in_dim(guesses.tokens, i, 1, axis=1)
            forward, cache = lm.extend(params, guesses.cache, _known(lm, last))
            return draw(i + 1, forward.logits, known_at(forward), guesses._replace(cache=cache, fed=i + 1))

        if budget is None:
            logits, known, cache = begin(state)
        else:
            nothing = jnp.zeros((context.length.shape[0], 1, lm.vocab_size), jnp.float32)
            logits, known, cache = jax.lax.cond(
                jnp.any(limit > 0), begin, lambda state: (nothing, limit < 0, state.cache), state
            )
        guesses = draw(0, logits, known, _none_yet(cache, context, gamma, to_law, logits, budget, coupled))

        def unfinished(i: Int[Array, ""], guesses: Guesses) -> Bool[Array, ""]:
            return jnp.any(jnp.logical_and(guesses.going, i + 1 < limit))

        guesses = loops.up_to(gamma - 1, next_guess, guesses, None if always else unfinished)
        # What was fed for a row behind its last guess is garbage.
        seen = jnp.where(limit > 0, context.length + jnp.minimum(guesses.fed, guesses.length), state.seen)
        draft = Draft(guesses.tokens, guesses.log_probs, guesses.length, guesses.signals, guesses.gumbel)
        return draft, Memory(guesses.cache, seen)

    def commit(params: Params, state: Memory, context: Prompt, verdict: Verdict, forward: Forward) -> Memory:
        del params, verdict, forward
        # Of n kept guesses the cache holds at least n - 1, and the token behind them came from the target.
        return state._replace(seen=jnp.minimum(state.seen, context.length - 2))

    return Drafter(init, propose, commit, lm, abstains=knows is not None)


def sample(
    keys: Keys, law: Law, wanted: Bool[Array, " B"] | None = None
) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
    """One guess of each row, and the log probabilities that it was drawn from (None: a point mass)."""
    if law.tokens is not None:
        return jnp.maximum(law.tokens[:, 0], 0), None  # -1, where nothing is allowed, could not be fed
    assert law.log_probs is not None
    log_probs = law.log_probs[:, 0]
    return noise.categorical(keys, log_probs, wanted), log_probs


def _none_yet(
    cache: Cache,
    context: Prompt,
    gamma: int,
    to_law: ToLaw,
    logits: Float[Array, "B 1 V"],
    budget: Budget | None,
    coupled: bool,
) -> Guesses:
    """A draft of no guesses, with room for gamma."""
    batch, zero = context.length.shape[0], jnp.zeros_like(context.length)
    law = jax.eval_shape(to_law, logits)
    wide = None if law.log_probs is None else jnp.zeros((batch, gamma, law.log_probs.shape[-1]), jnp.float32)
    return Guesses(
        cache,
        tokens=jnp.zeros((batch, gamma), jnp.int32),
        log_probs=None if coupled else wide,
        gumbel=wide if coupled else None,
        signals=None if budget is None or budget.signal is None else jnp.zeros((batch, gamma), jnp.float32),
        length=zero,
        going=zero == 0,
        fed=jnp.zeros((), zero.dtype),
    )


def _put(rows: Array | None, new: Array, i: int | Int[Array, ""]) -> Array:
    """Entry i of each row, replaced."""
    assert rows is not None
    return jax.lax.dynamic_update_slice_in_dim(rows, new[:, None].astype(rows.dtype), i, axis=1)


def _catch_up(
    lm: LanguageModel, params: Params, state: Memory, context: Prompt, wanted: Bool[Array, " B"], width: int
) -> Cache:
    """A cache that holds all but the last two tokens of the rows that are wanted.

    Each pass reads `width` tokens of every row; what it reads past a row's end is garbage, and rewound.
    """
    goal = context.length - 2

    def behind(state: Memory) -> Bool[Array, ""]:
        return jnp.any(jnp.logical_and(wanted, state.seen < goal))

    def read(state: Memory) -> Memory:
        at = jnp.minimum(state.seen, goal)
        tokens = buffers.window(context.tokens, at, width)
        _, cache = lm.extend(params, lm.rewind(state.cache, at), _known(lm, tokens))
        return Memory(cache, jnp.minimum(at + width, goal))

    return jax.lax.while_loop(behind, read, state).cache


def _known(lm: LanguageModel, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Ids that the drafter lacks (the target's vocabulary is larger) read as its last one."""
    return jnp.minimum(tokens, lm.vocab_size - 1)
