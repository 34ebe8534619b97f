"""Copy what followed the last tokens most often, for as long as it is likely (SuffixDecoding, arXiv
2411.04975).

Shapes: B batch, N tokens that are searched, C places that vote (and their lengths of match), G
gamma.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.core import (
    BoundDrafter,
    Draft,
    DraftContext,
    Drafter,
    Prompt,
    TreeSize,
    Weights,
    token_rows,
)
from jaxspec.core.checks import at_least, in_range, integers, number
from jaxspec.core.token_rows import NO_TOKEN
from jaxspec.drafters.common import lookup_drafter
from jaxspec.drafters.lookups import vote
from jaxspec.drafters.lookups.prompt_lookup import best_matches, keep_prompt, text_of
from jaxspec.rules.common import take_position


class SuffixOptions(NamedTuple):
    """The arguments of `suffix`, and whether it stores texts; static."""

    longest: int
    places: int
    factor: float
    least_probability: float
    least_score: float
    share: bool
    stored: bool
    tree: TreeSize | None


def suffix(
    longest: int = 16,
    *,
    places: int = 16,
    factor: float = 1.0,
    least_probability: float = 0.1,
    least_score: float = 0.0,
    share: bool = False,
    texts: Sequence[Sequence[int]] | None = None,
    room: int = 0,
    candidates: int = 1,
    length: int = 8,
) -> BoundDrafter:
    """Proposes, as point masses, what followed the row's last tokens most often, for as long as
    that is likely.

    `prompt_lookup` copies gamma tokens after the longest match. This one makes a draft for every
    length of match. At most `places` matches of that length vote for the next token. The places
    that agree with the winner vote for the token after it, and so on. A token's share of the votes
    is its probability. A draft ends when the product of these falls below `least_probability`, or
    after `factor` tokens for each token that matched: long matches draft far, short ones little.
    The score of a draft is the sum of its tokens' probabilities, which is how many are expected to
    be accepted. The best draft is proposed. If its score is below `least_score`, nothing is
    drafted, and the next drafter of a `fallback` takes over.

    Searched are the prompt and the row, the newest places first, and, if asked, the rows of the
    same call of `generate` that have come to their end, and `texts`: earlier texts, such as the
    answers of the last epoch. Everything happens on the device: O((P + S + M) longest) comparisons
    a round and row, with M stored tokens.

    Args:
        longest: tokens to match, at most.
        places: most that vote; those with the longest matches.
        factor: draft tokens for each token that matched.
        least_probability: the least probability of a draft token with all before it.
        least_score: the least score of a draft.
        share: whether rows that have ended are searched, too, with their prompts. Other users'
            texts may be among them, and so a row's draft, its speed and, at temperatures above 0,
            its very text (though not its distribution) depend on the other rows: off unless asked.
        texts: rows of token ids that all rows search, too. They are values: other texts compile
            nothing, as long as they fit in the room of the first. For more than some ten thousand
            tokens take `retrieval`, which bisects.
        room: tokens, and one more for each text, to make room for; by default enough for `texts`,
            rounded up to a bucket.
        candidates: continuations to propose. Above 1 they make a tree of at most candidates x
            length nodes of what followed those places most often, and gamma is not read.
        length: tokens of each continuation in such a tree.

    Raises:
        ValueError: a number below 1 or missing; factor <= 0; a probability outside [0, 1]; a score
            below 0; texts other than rows of ids.

    Example:
        >>> from jaxspec.core import Caches, DraftStart
        >>> drafter = suffix().functions
        >>> row = Prompt(jnp.array([[5, 6, 7, 8, 9, 4, 6, 7, 8, 1, 3, 6, 7, 0]]), jnp.array([13]))
        >>> context = DraftContext(None, row, jnp.array([4]), 4, False, None)
        >>> start = DraftStart(None, Prompt(row.tokens[:, :2], jnp.array([2])), None, None)
        >>> caches = Caches(None, drafter.init(start))
        >>> draft, _ = drafter.propose(None, caches, context)
        >>> (
        ...     draft.tokens.tolist(),
        ...     draft.length.tolist(),
        ... )  # 6 7 was followed by 8 twice, and 2 tokens matched
        ([[8, 1, 0, 0]], [2])

    Reference: Oliaro et al., SuffixDecoding, arXiv 2411.04975.
    """
    longest, places = integers(1, longest=longest, places=places)
    (room,) = integers(room=room)
    factor = number(
        factor,
        "factor",
        "a finite number of more than 0, draft tokens for each that matched",
        above=0,
    )
    least_probability = number(least_probability, "least_probability", "a number from 0 to 1")
    least_score = number(least_score, "least_score", "a finite number, 0 or more")
    in_range(0, 1, least_probability=least_probability)
    at_least(0, least_score=least_score)
    tree = vote.tree_size(candidates, length)
    options = SuffixOptions(
        longest, places, factor, least_probability, least_score, share, texts is not None, tree
    )
    stored = None
    if texts is not None:
        stored = jnp.asarray(_joined(texts, room))
    return BoundDrafter(
        _suffix(options), stored, name="suffix" if tree is None else f"suffix({tree.nodes} nodes)"
    )


def _joined(texts: Sequence[Sequence[int]], room: int) -> Int[np.ndarray, " M"]:
    """Joins texts, with a gap after each; gaps also fill the room.

    >>> _joined([[5, 6], [7]], room=0).tolist()[:6]
    [5, 6, -1, 7, -1, -1]
    """
    rows = [np.asarray(text) for text in texts]
    for index, row in enumerate(rows):
        if row.ndim != 1 or (
            row.size and (not np.issubdtype(row.dtype, np.integer) or row.min() < 0)
        ):
            raise ValueError(
                f"text {index} is {texts[index]!r:.60}: expected a row of token ids, as "
                "Completion.tokens"
            )
    parts = [np.append(row.astype(np.int32), NO_TOKEN) for row in rows]
    joined = np.concatenate([*parts, np.zeros(0, np.int32)])
    size = token_rows.bucket(max(room, len(joined), 1))
    return np.pad(joined, (0, size - len(joined)), constant_values=NO_TOKEN).astype(np.int32)


@functools.lru_cache
def _suffix(options: SuffixOptions) -> Drafter:
    def search(weights: Weights, prompt: Prompt, context: DraftContext) -> Draft:
        text = text_of(prompt, context.row)
        if options.share and context.finished is not None:
            text = jnp.concatenate([_ended_rows(text, context.finished), text], axis=1)
        if options.stored:
            text = jnp.concatenate([_for_each(weights.draft[None], text.shape[0]), text], axis=1)
        # B C, longest first
        match, position = best_matches(text, context.row, options.longest, 1, options.places)
        step = jnp.arange(context.gamma, dtype=position.dtype)[None, None]
        index = position[:, :, None] + 1 + step
        # B C G
        tokens = jnp.take_along_axis(text[:, None], jnp.minimum(index, text.shape[1] - 1), axis=2)
        is_place = match > 0
        real = (tokens >= 0) & (index < text.shape[1]) & is_place[:, :, None]
        # Group i are the places where at least as much matches as at place i. Each group makes a
        # draft.
        voters = (match[:, None, :] >= match[:, :, None]) & is_place[:, None, :]  # B C C
        path, probability = vote.likeliest(tokens, real, voters)  # B C G

        limit = _most_tokens(match, options.factor)
        likely = (probability >= options.least_probability) & (probability > 0)
        likely = likely & (step < limit[:, :, None]) & is_place[:, :, None]
        drafted = jnp.cumprod(likely.astype(jnp.int32), axis=2) > 0
        # A draft token is accepted if all before it are: the sum is how many are expected to be.
        score = jnp.sum(jnp.where(drafted, probability, 0.0), axis=2)
        best = jnp.argmax(score, axis=1)  # of equals the longest match
        enough = jnp.max(score, axis=1) >= max(options.least_score, 1e-9)

        if options.tree is None:
            drafted = take_position(drafted, best) & enough[:, None]
            length = jnp.sum(drafted, axis=1, dtype=context.row.length.dtype)
            return Draft(jnp.where(drafted, take_position(path, best), 0), length)
        # Of the best group all continuations, likely or not, up to the most tokens for its match.
        voter = take_position(voters, best) & enough[:, None]
        within = step < take_position(limit, best)[:, None, None]
        real = real & voter[:, :, None] & within
        return vote.as_tree(
            jnp.maximum(tokens, 0), real, jnp.ones(voter.shape, jnp.float32), options.tree.nodes
        )

    return lookup_drafter(search, keep_prompt, options.tree)


def _ended_rows(text: Int[Array, "B N"], finished: Bool[Array, " B"]) -> Int[Array, "B B*(N+1)"]:
    """Repeats the texts of the rows that have ended for every row, with a gap after each."""
    ended = jnp.where(finished[:, None], text, NO_TOKEN)
    flat = jnp.pad(ended, ((0, 0), (0, 1)), constant_values=NO_TOKEN).reshape(1, -1)
    return _for_each(flat, text.shape[0])


def _for_each(shared: Int[Array, "1 M"], batch: int) -> Int[Array, "B M"]:
    """Repeats what all rows share for each of them."""
    return jnp.broadcast_to(shared, (batch, shared.shape[1]))


def _most_tokens(match: Int[Array, "B C"], factor: float) -> Int[Array, "B C"]:
    """Returns the most draft tokens after so many that matched.

    >>> _most_tokens(jnp.array([[0, 1, 3]]), 0.5).tolist()
    [[0, 1, 2]]
    """
    return jnp.ceil(factor * match.astype(jnp.float32)).astype(jnp.int32)
