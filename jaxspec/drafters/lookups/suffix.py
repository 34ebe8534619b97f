"""What followed the row's last tokens before, with how often it did, and as many tokens as that makes likely
(SuffixDecoding, Oliaro et al., arXiv 2411.04975).

Shapes: B batch, N tokens that are searched, C places that vote (and their lengths of match), G gamma.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import BoundDrafter, Caches, Draft, DraftContext, Drafter, Forward, Prompt, TreeSize, Weights
from jaxspec.core.checks import integers, number
from jaxspec.drafters.common import no_commit, same_state, searched
from jaxspec.drafters.lookups import continuations
from jaxspec.drafters.lookups.prompt_lookup import NO_TOKEN, match_lengths, text_of


class SuffixOptions(NamedTuple):
    """`suffix`'s arguments; static."""

    longest: int
    places: int
    factor: float
    least_probability: float
    least_score: float
    share: bool
    tree: TreeSize | None


class Path(NamedTuple):
    """What follows most often after matches of some length, from most of the places token by token.

    Attributes:
        tokens: for each length of match.
        real: whether a token is drafted: it is as probable as wanted, and the match long enough.
        score: expected number of accepted tokens: the sum of the tokens' probabilities.
        voter: which places have matches of that length.
    """

    tokens: Int[Array, "B C G"]
    real: Bool[Array, "B C G"]
    score: Float[Array, "B C"]
    voter: Bool[Array, "B C C"]


def suffix(
    longest: int = 16,
    *,
    places: int = 16,
    factor: float = 1.0,
    least_probability: float = 0.1,
    least_score: float = 0.0,
    share: bool = False,
    candidates: int = 1,
    length: int = 8,
) -> BoundDrafter:
    """Proposes, as point masses, what followed the row's last tokens most often, for as long as that is likely.

    `prompt_lookup` copies gamma tokens after the longest match. This one compares all lengths of match. After each, the
    `places` where so many of the last tokens occur vote for the next token, those with it for the one after, and so on;
    the share of the votes is the token's probability. The draft of a length of match ends when the product of these
    falls below `least_probability`, or after `factor` tokens for each token that matched: long matches draft far, short
    ones little. The draft with the largest sum of probabilities, which is how many tokens are expected to be accepted,
    is proposed; none, where that is below `least_score`: the next drafter of a `fallback` then has its turn.

    Searched are the prompt and the row, the newest places first, and, if asked, the rows of the same call of
    `generate` that have come to their end. Everything happens on the device: O((P + S) longest) comparisons a round.

    Args:
        longest: tokens to match, at most.
        places: most that vote; those with the longest matches.
        factor: draft tokens for each token that matched.
        least_probability: of a draft token with all before it.
        least_score: of a draft.
        share: whether rows that have ended are searched, too, with their prompts. Other users' texts may be among them,
            and so a row's draft, its speed and, at temperatures above 0, its very text (though not its distribution)
            depend on the other rows: off unless asked.
        candidates: continuations to propose. Above 1 they make a tree of at most candidates x length nodes of what
            followed those places most often, and gamma is not read.
        length: of each, in such a tree.

    Raises:
        ValueError: a number below 1, or none at all; factor <= 0; a probability outside [0, 1]; a score below 0.

    Example:
        >>> drafter = suffix().functions
        >>> row = Prompt(jnp.array([[5, 6, 7, 8, 9, 4, 6, 7, 8, 1, 3, 6, 7, 0]]), jnp.array([13]))
        >>> context = DraftContext(None, row, jnp.array([4]), 4, False, None)
        >>> caches = Caches(None, drafter.init(None, Prompt(row.tokens[:, :2], jnp.array([2])), 0, None))
        >>> draft, _ = drafter.propose(None, caches, context)
        >>> draft.tokens.tolist(), draft.length.tolist()  # 6 7 was followed by 8 twice, and 2 tokens matched
        ([[8, 1, 0, 0]], [2])

    Reference: Oliaro et al., SuffixDecoding, arXiv 2411.04975.
    """
    longest, places = integers(longest=longest, places=places)
    factor = number(factor, "factor", "a finite number, the draft tokens for each token that matched")
    least_probability = number(least_probability, "least_probability", "a number from 0 to 1")
    least_score = number(least_score, "least_score", "a finite number, 0 or more")
    if longest < 1 or places < 1:
        raise ValueError(f"longest is {longest} and places {places}: expected at least 1 of each")
    if not factor > 0:
        raise ValueError(f"factor is {factor}: expected more than 0 draft tokens for each token that matched")
    if not 0 <= least_probability <= 1 or least_score < 0:
        raise ValueError(
            f"least_probability is {least_probability} and least_score {least_score}: expected 0 to 1, and 0 or more"
        )
    continuations.check(candidates, length)
    tree = TreeSize(candidates * length, length) if candidates > 1 else None
    options = SuffixOptions(longest, places, factor, least_probability, least_score, share, tree)
    return BoundDrafter(_suffix(options), name="suffix" if tree is None else f"suffix({tree.nodes} nodes)")


@functools.lru_cache
def _suffix(options: SuffixOptions) -> Drafter:
    def init(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> Prompt:
        return prompt

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        return searched(lambda: search(caches.draft, context), context), caches

    def search(prompt: Prompt, context: DraftContext) -> Draft:
        text = text_of(prompt, context.row)
        if options.share and context.finished is not None:
            text = jnp.concatenate([_ended(text, context.finished), text], axis=1)
        match = match_lengths(text, context.row, options.longest)
        place = jnp.arange(text.shape[1], dtype=match.dtype)[None]
        followed = jnp.pad(text[:, 1:] >= 0, ((0, 0), (0, 1)))
        score = jnp.where(jnp.logical_and(followed, match > 0), match * text.shape[1] + place, -1)
        best, at = jax.lax.top_k(score, min(options.places, score.shape[1]))
        match = jnp.where(best >= 0, jnp.take_along_axis(match, at, axis=1), 0)
        index = at[:, :, None] + 1 + jnp.arange(context.gamma, dtype=at.dtype)[None, None]
        tokens = jnp.take_along_axis(text[:, None], jnp.minimum(index, text.shape[1] - 1), axis=2)
        real = jnp.logical_and(tokens >= 0, index < text.shape[1])
        real = jnp.cumprod(jnp.logical_and(real, (match > 0)[:, :, None]).astype(jnp.int32), axis=2) > 0
        paths = _follow(tokens, real, match, options)
        chosen = jnp.argmax(paths.score, axis=1)  # of equals the longest match
        enough = jnp.max(paths.score, axis=1) >= max(options.least_score, 1e-9)

        def of_chosen(x: Array) -> Array:
            return jnp.take_along_axis(x, chosen.reshape(-1, 1, *[1] * (x.ndim - 2)), axis=1)[:, 0]

        drafted = jnp.logical_and(of_chosen(paths.real), enough[:, None])
        if options.tree is None:
            length = jnp.sum(drafted, axis=1, dtype=context.row.length.dtype)
            return Draft(jnp.where(drafted, of_chosen(paths.tokens), 0), length)
        near = jnp.arange(context.gamma)[None] < _longest(of_chosen(match), options.factor)[:, None]
        voter = jnp.logical_and(of_chosen(paths.voter), enough[:, None])
        real = jnp.logical_and(jnp.logical_and(real, voter[:, :, None]), near[:, None])
        return continuations.as_tree(jnp.maximum(tokens, 0), real, jnp.ones(voter.shape), options.tree.nodes)

    return Drafter(init, propose, no_commit, may_be_empty=True, tree=options.tree, rollback=same_state)


def _ended(text: Int[Array, "B N"], finished: Bool[Array, " B"]) -> Int[Array, "B B*(N+1)"]:
    """The texts of the rows that have ended, for every row."""
    ended = jnp.where(finished[:, None], text, NO_TOKEN)
    flat = jnp.pad(ended, ((0, 0), (0, 1)), constant_values=NO_TOKEN).reshape(1, -1)
    return jnp.broadcast_to(flat, (text.shape[0], flat.shape[1]))


def _longest(match: Int[Array, "*shape"], factor: float) -> Int[Array, "*shape"]:
    """Most draft tokens after so many that matched.

    >>> _longest(jnp.array([0, 1, 3]), 0.5).tolist()
    [0, 1, 2]
    """
    return jnp.ceil(factor * match.astype(jnp.float32)).astype(jnp.int32)


def _follow(
    tokens: Int[Array, "B C G"], real: Bool[Array, "B C G"], match: Int[Array, "B C"], options: SuffixOptions
) -> Path:
    """For each length of match the most frequent continuation, as far as it is likely.

    Args:
        tokens: what follows each place.
        real: whether there is such a token.
        match: how many tokens match up to each place; 0: it is none.
        options: of the drafter.
    """
    voter = jnp.logical_and(match[:, None, :] >= match[:, :, None], (match > 0)[:, None, :])
    longest = _longest(match, options.factor)

    def choose(carry: tuple[Array, Array, Array], step: tuple[Array, Array, Array]):
        alive, probability, going = carry
        token, here, index = step
        same = jnp.logical_and(token[:, :, None] == token[:, None, :], here[:, None, :])  # B C C
        votes = jnp.einsum("bjc,bic->bji", alive.astype(jnp.float32), same.astype(jnp.float32))
        votes = jnp.where(jnp.logical_and(alive, here[:, None, :]), votes, 0.0)
        best = jnp.argmax(votes, axis=2)  # of equals the longest match, or the newest
        winner = jnp.take_along_axis(token, best, axis=1)
        share = jnp.max(votes, axis=2) / jnp.maximum(jnp.sum(alive, axis=2, dtype=jnp.float32), 1.0)
        probability = probability * share
        going = jnp.logical_and(going, jnp.logical_and(index < longest, probability >= options.least_probability))
        going = jnp.logical_and(going, probability > 0)
        agreed = jnp.logical_and(here[:, None, :], token[:, None, :] == winner[:, :, None])
        carry = jnp.logical_and(alive, agreed), probability, going
        return carry, (winner, going, jnp.where(going, probability, 0.0))

    start = voter, jnp.ones(match.shape, jnp.float32), match > 0
    steps = tokens.transpose(2, 0, 1), real.transpose(2, 0, 1), jnp.arange(tokens.shape[2])
    _, (path, drafted, probability) = jax.lax.scan(choose, start, steps)
    return Path(path.transpose(1, 2, 0), drafted.transpose(1, 2, 0), jnp.sum(probability, axis=0), voter)
