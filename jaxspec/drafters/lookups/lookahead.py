"""Lookahead decoding: Jacobi iterations whose n-grams are remembered and verified (Fu et al., arXiv
2402.02057).

`jacobi` is the iteration by itself: one iterate, a chain, and no n-grams.

Shapes: B batch, W columns of the window, L = N - 1 levels, N tokens of an n-gram, M n-grams in the
pool, C candidates.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec import core
from jaxspec.core import noise, token_rows
from jaxspec.core.checks import integers
from jaxspec.core.token_rows import NO_TOKEN
from jaxspec.drafters.lookups import vote


class LookaheadState(NamedTuple):
    """The memory of each row."""

    # the last iterates, the oldest first: level i of column j is what stood i + j + 1 positions
    # ahead
    window: Int[Array, "B L W"]
    # n-grams that iterations have seen, a ring; NO_TOKEN where there is none
    pool: Int[Array, "B M N"]
    entered: Int[Array, " B"]  # how many there have been
    limit: Int[Array, " B"]  # how deep the last draft was verified


def lookahead(
    window: int = 7, ngram: int = 4, candidates: int = 7, *, pool: int = 512
) -> core.BoundDrafter:
    """Proposes, as point masses, n-grams that the target itself produced further ahead, while it
    produces more of them.

    Each pass of the target reads, besides the last token, a tree of two parts. The window holds
    `ngram` - 1 Jacobi iterates, its levels, of the next `window` positions, its columns. The tokens
    of the first level follow each other; tokens of later levels follow the token above them. The
    target's most probable tokens after the last level are the next iterate. A column read downwards
    is then an n-gram, which enters the row's pool. The other part holds the latest n-grams of the
    pool that begin with the last token, at most `candidates`, merged where they begin alike. All
    nodes are judged, since an iterate may be right, too.

    It needs no draft model and no training. Its price is a pass over 1 + (`window` + `candidates`)
    (`ngram` - 1) tokens, so it pays where such a pass costs little more than one over a single
    token. Exact at every temperature: the draft is a function of earlier rounds. State: 4 `ngram`
    `pool` bytes a row. The first iterates are the prompt's tokens; the pool begins empty.

    Args:
        window: columns of the window.
        ngram: tokens of an n-gram. Its first token is the last committed one.
        candidates: n-grams that are verified.
        pool: n-grams that a row remembers, the latest ones.

    Raises:
        ValueError: no columns or candidates, n-grams of fewer than 2 tokens, a pool smaller than
            the yield of a pass.

    Example:
        >>> import jaxspec
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=9, sharpness=9.0)
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7, 8, 5, 6]]), jnp.array([6]))
        >>> out = jaxspec.generate(target, prompt, drafter=lookahead(3, 3, 2), max_new_tokens=40)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=40).tokens).all())
        True
        >>> bool(out.stats.tokens_per_round[0] > 2)
        True

    Reference: Fu et al., ICML 2024, arXiv 2402.02057.
    """
    window, candidates = integers(1, window=window, candidates=candidates)
    (ngram,), (pool,) = integers(2, ngram=ngram), integers(max(window, candidates), pool=pool)
    return core.BoundDrafter(_lookahead(window, ngram - 1, candidates, pool), name="lookahead")


@functools.lru_cache
def _lookahead(window: int, levels: int, candidates: int, pool: int) -> core.Drafter:
    # The tree: first the nodes of the candidates, then those of the window, level by level.
    candidate_nodes = candidates * levels
    nodes = candidate_nodes + window * levels
    depth = window + levels - 1
    column = np.arange(window)
    # `Draft.parent` of the window's nodes. Its first level is a chain, which begins after the last
    # committed token; in the levels below each node follows the one above it. Fed token n is draft
    # token n - 1.
    chain = np.where(column == 0, 0, candidate_nodes + column)
    above = [candidate_nodes + 1 + (level - 1) * window + column for level in range(1, levels)]
    window_parent = jnp.asarray(np.concatenate([chain, *above]), jnp.int32)

    def init(start: core.DraftStart) -> LookaheadState:
        batch = start.prompt.text.tokens.shape[0]
        offset = np.add.outer(np.arange(levels), column)
        empty = jnp.full((batch, pool, levels + 1), NO_TOKEN, jnp.int32)
        zero = jnp.zeros((batch,), jnp.int32)
        return LookaheadState(prompt_tokens(start.prompt.text, depth)[:, offset], empty, zero, zero)

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> core.Proposal:
        state = caches.draft
        row = context.row
        last = token_rows.window(row.tokens, row.length - 1, 1)[:, 0]
        tokens, in_pool = latest(state, last, candidates)  # B C L; B C
        real = jnp.broadcast_to(in_pool[:, :, None], tokens.shape)
        newest_first = jnp.broadcast_to(
            jnp.arange(candidates, 0, -1, dtype=jnp.float32)[None, :], in_pool.shape
        )
        branches = vote.as_tree(tokens, real, newest_first, candidate_nodes)
        assert branches.parent is not None
        iterates = state.window.reshape(len(row.length), -1)  # B L*W
        draft = core.Draft(
            jnp.concatenate([jnp.maximum(branches.tokens, 0), iterates], axis=1),
            jnp.full_like(row.length, nodes),
            jnp.concatenate(
                [branches.parent, jnp.broadcast_to(window_parent[None, :], iterates.shape)], axis=1
            ),
        )
        return draft, caches._replace(draft=state._replace(limit=context.max_draft))

    def commit(end: core.RoundEnd) -> core.Caches:
        state = end.caches.draft
        # The last level was fed last: what the target predicts after its nodes is the next iterate,
        # B W. A column whose last node lies below the limit was not verified, and keeps its token.
        predicted = noise.first_largest(end.forward.logits[:, -window:])
        was_read = jnp.asarray(column + levels)[None, :] <= state.limit[:, None]
        newest = jnp.where(was_read, predicted, state.window[:, -1])
        # B L+1 W: a column is an n-gram
        iterates = jnp.concatenate([state.window, newest[:, None]], axis=1)
        entered = enter(state, jnp.swapaxes(iterates, 1, 2), was_read)
        # The next level of a column stands one position further ahead, and n accepted tokens
        # further behind.
        order = (jnp.asarray(column)[None, :] + end.verdict.num_accepted[:, None]) % window
        return end.caches._replace(draft=entered._replace(window=_columns(iterates[:, 1:], order)))

    return core.Drafter(init, propose, commit, tree=core.TreeSize(nodes, depth))


def latest(
    state: LookaheadState, last: Int[Array, " B"], count: int
) -> tuple[Int[Array, "B C L"], Bool[Array, "B C"]]:
    """Finds the tokens after a given one in the pool's n-grams, the latest first, and which of them
    are real.
    """
    size = state.pool.shape[1]
    slot = jnp.arange(size, dtype=jnp.int32)[None, :]
    recency = size - 1 - (state.entered[:, None] - 1 - slot) % size
    score = jnp.where(state.pool[:, :, 0] == last[:, None], recency, -1)
    best, index = jax.lax.top_k(score, count)
    return jnp.take_along_axis(state.pool[:, :, 1:], index[:, :, None], axis=1), best >= 0


def enter(
    state: LookaheadState, grams: Int[Array, "B W N"], real: Bool[Array, "B W"]
) -> LookaheadState:
    """Enters n-grams into the pool, the latest last. N-grams that the pool already holds move up.

    >>> state = LookaheadState(None, jnp.array([[[1, 2], [3, 4], [-1, -1]]]), jnp.array([2]), None)
    >>> state = enter(state, jnp.array([[[1, 2], [5, 6]]]), jnp.array([[True, True]]))
    >>> state.pool.tolist(), state.entered.tolist()
    ([[[5, 6], [3, 4], [1, 2]]], [4])
    """
    size = state.pool.shape[1]
    count = grams.shape[1]
    grams = jnp.where(real[:, :, None], grams, NO_TOKEN)
    # Of equal new ones the last stays; of a new one and an equal one in the pool the new one.
    same = jnp.all(grams[:, :, None] == grams[:, None, :], axis=-1)  # B W W
    comes_again = jnp.any(same & jnp.triu(jnp.ones((count, count), bool), 1)[None], axis=2)
    is_old = jnp.any(jnp.all(state.pool[:, :, None] == grams[:, None, :], axis=-1), axis=2)  # B M
    pool = jnp.where(is_old[:, :, None], NO_TOKEN, state.pool)
    slot = (state.entered[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]) % size
    entries = jnp.where(comes_again[:, :, None], NO_TOKEN, grams)
    pool = jax.vmap(lambda pool, slot, entries: pool.at[slot].set(entries))(pool, slot, entries)
    return state._replace(pool=pool, entered=state.entered + count)


def _columns(levels: Int[Array, "B L W"], order: Int[Array, "B W"]) -> Int[Array, "B L W"]:
    return jnp.take_along_axis(levels, jnp.broadcast_to(order[:, None, :], levels.shape), axis=2)


class JacobiState(NamedTuple):
    """The last iterate."""

    tokens: Int[Array, "B G"]  # for the positions from `start` on
    # the row's length when they were made; -1: of no positions, the prompt's tokens
    start: Int[Array, " B"]


def jacobi(longest: int = 16) -> core.BoundDrafter:
    """Proposes, as point masses, the target's most probable token at each position when it last
    read this far.

    Greedy text is the fixed point of a system of equations, token i being the most probable one
    after tokens 0 to i - 1. Jacobi's iteration solves all of them at once from the last iterate:
    each pass of the target reads a draft of gamma tokens, wrong ones included, and its predictions
    after these are the next draft. At least one more token is right after every pass, more where
    the target corrects itself in the same way whatever precedes. Networks that were not trained for
    it gain next to nothing (`lookahead` remembers what iterations have seen, and gains more).

    Exact at every temperature: a draft token is a function of earlier rounds. State: `longest`
    tokens a row. The first draft is the first tokens of the prompt. As `then` of a
    `horizontal_cascade` it continues the draft from the iterate at the next positions.

    Args:
        longest: the most draft tokens of a round, whatever gamma.

    Raises:
        ValueError: longest is not an integer of 1 or more.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=9, sharpness=9.0)
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=jacobi(), gamma=4, max_new_tokens=20)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=20).tokens).all())
        True

    Reference: Santilli et al., ACL 2023, arXiv 2305.10427.
    """
    (longest,) = integers(1, longest=longest)
    return core.BoundDrafter(_jacobi(longest), name="jacobi")


@functools.lru_cache
def _jacobi(longest: int) -> core.Drafter:
    def init(start: core.DraftStart) -> JacobiState:
        return JacobiState(
            prompt_tokens(start.prompt.text, longest), jnp.full_like(start.prompt.length, -1)
        )

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> core.Proposal:
        state = caches.draft
        # In a horizontal cascade the row has draft tokens, which stand at the first positions of
        # the iterate.
        drafted = jnp.where(state.start < 0, 0, jnp.maximum(context.row.length - state.start, 0))
        index = drafted[:, None] + jnp.arange(context.gamma, dtype=drafted.dtype)[None, :]
        tokens = jnp.take_along_axis(state.tokens, jnp.minimum(index, longest - 1), axis=1)
        # Another drafter's rounds may be longer.
        return core.Draft(
            tokens, jnp.minimum(context.max_draft, jnp.maximum(longest - drafted, 0))
        ), caches

    def commit(end: core.RoundEnd) -> core.Caches:
        # After n accepted tokens and the one after them, the next position is the one after fed
        # token n + 1.
        best = noise.first_largest(end.forward.logits)
        following = (
            end.verdict.num_accepted[:, None] + jnp.arange(1, longest + 1, dtype=jnp.int32)[None, :]
        )
        last = jnp.asarray(best.shape[1] - 1, following.dtype)
        tokens = jnp.take_along_axis(best, jnp.minimum(following, last), axis=1)
        return end.caches._replace(draft=JacobiState(tokens, end.row.length))

    return core.Drafter(init, propose, commit, longest=longest)


def prompt_tokens(prompt: core.Prompt, count: int) -> Int[Array, "B count"]:
    """Returns the first tokens of each prompt, over and over: a first draft, before anything is
    known.

    >>> prompt_tokens(core.Prompt(jnp.array([[5, 6, 0]]), jnp.array([2])), 5).tolist()
    [[5, 6, 5, 6, 5]]
    """
    index = jnp.arange(count, dtype=prompt.length.dtype)[None, :] % prompt.length[:, None]
    return jnp.take_along_axis(prompt.tokens, index, axis=1)
