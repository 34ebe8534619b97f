"""Retrieval: tokens that followed the row's last tokens in a datastore of texts (REST, He et al.,
arXiv 2311.08252).

Shapes: B batch, K lengths of match, W tokens of the longest match, C occurrences, G gamma; N and M
as in `datastore`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec import core
from jaxspec.core import token_rows
from jaxspec.core.checks import integers
from jaxspec.drafters.common import lookup_drafter, no_state
from jaxspec.drafters.lookups import datastore, vote
from jaxspec.drafters.lookups.datastore import Datastore, DatastoreError
from jaxspec.drafters.lookups.ngram import CountedTexts, rows_of

LONGEST = 31  # tokens of a match: a comparison has a bit for each


class Store(NamedTuple):
    """A datastore on the device, in the place of the drafter's parameters."""

    tokens: Int[Array, " N"]
    suffixes: Int[Array, " M"]


def retrieval(
    store: Datastore | str | Path | CountedTexts,
    target: core.Model | None = None,
    *,
    longest: int = 8,
    shortest: int = 2,
    occurrences: int = 32,
    candidates: int = 1,
    length: int = 5,
) -> core.BoundDrafter:
    """Proposes, as point masses, how a datastore's texts go on most often after the last few
    tokens.

    The last `longest` tokens of the row are sought in the datastore, then fewer, down to
    `shortest`, all at once, by bisection in its suffix array. At most `occurrences` of the places
    of the longest match, evenly spaced, vote for the next token. Those that agree with the winner
    vote for the token after it, and so on. A tie goes to the lowest id. The draft ends where no
    place goes on, and is empty where nothing matches. Everything happens on the device, where each
    token of the datastore takes 6 bytes (8, with 2^16 ids or more).

    Args:
        store: the result of `datastore.load`, or the folder; or texts such as the target writes, as
            `drafters.ngram` takes them, to build one of.
        target: the model to draft for, whose vocabulary is compared with the datastore's. If either
            has no tokenizer, the datastore may not have more ids than the target. Texts need it.
        longest, shortest: tokens to match, at most (31) and at least. 1 drafts most often, more
            draft better.
        occurrences: most places that vote.
        candidates: continuations to propose. Above 1 they make a tree of what follows most often,
            of at most candidates x length nodes, and gamma is not read.
        length: tokens of each continuation in such a tree.

    Raises:
        ValueError: not 1 <= shortest <= longest <= 31, no occurrences or candidates, or a datastore
            that is damaged or the target's tokens are not those it was built with.

    Example:
        >>> from jaxspec.core import Caches, DraftContext, Prompt, Weights
        >>> drafter = retrieval(
        ...     datastore.build([[5, 6, 7, 8], [6, 7, 9], [4, 6, 7, 8, 5]], vocab_size=10)
        ... )
        >>> row = Prompt(jnp.array([[3, 6, 7, 0]]), jnp.array([3]))
        >>> context = DraftContext(None, row, jnp.array([3]), 3, False, None)
        >>> draft, _ = drafter.functions.propose(
        ...     Weights(None, drafter.params), Caches(None), context
        ... )
        >>> draft.tokens.tolist(), draft.length.tolist()
        ([[8, 5, 0]], [2])
    """
    shortest, longest, occurrences = integers(
        1, shortest=shortest, longest=longest, occurrences=occurrences
    )
    if not shortest <= longest <= LONGEST:
        raise ValueError(
            f"longest is {longest}: expected at least {shortest}, the shortest, and at most "
            f"{LONGEST}"
        )
    tree = vote.tree_size(candidates, length)
    if isinstance(store, str | Path):
        store = datastore.load(store)
    elif not isinstance(store, Datastore):
        store = _of_texts(store, target)
    if target is not None:
        _check(store, target)
    params = Store(jnp.asarray(store.tokens), jnp.asarray(store.suffixes))
    if tree is None:
        name = "retrieval"
    else:
        name = f"retrieval({candidates} candidates)"
    return core.BoundDrafter(_retrieval(longest, shortest, occurrences, tree), params, name=name)


def _of_texts(texts: CountedTexts, target: core.Model | None) -> Datastore:
    """Builds a datastore of texts in the target's vocabulary."""
    if target is None:
        raise ValueError("got texts, and no target to read them as: give the target, too")
    rows = rows_of(texts, target)
    vocabulary = "" if target.tokenizer is None else datastore.vocabulary_of(target.tokenizer)
    return datastore.build(
        rows,
        vocab_size=target.lm.vocab_size,
        begin=target.lm.limits.first_tokens,
        vocabulary=vocabulary,
    )


def _check(store: Datastore, target: core.Model) -> None:
    """Raises DatastoreError for a datastore of another vocabulary than the target's.

    Where both know their tokens these count, and not the widths: of models with one tokenizer some
    pad their logits. The target's tokenizer never produces ids that its logits lack, and decoders
    cut a draft before one.
    """
    if store.vocabulary and target.tokenizer is not None:
        if store.vocabulary != datastore.vocabulary_of(target.tokenizer):
            raise DatastoreError(
                "the datastore was built with another vocabulary than that of "
                f"{target.name or 'the target'}: build "
                "one with the target's tokenizer"
            )
    elif store.vocab_size > target.lm.vocab_size:
        raise DatastoreError(
            f"the datastore has {store.vocab_size} token ids and the target {target.lm.vocab_size}"
        )


@functools.lru_cache
def _retrieval(
    longest: int, shortest: int, occurrences: int, tree: core.TreeSize | None
) -> core.Drafter:
    def search(weights: core.Weights, state: Any, context: core.DraftContext) -> core.Draft:
        store: Store = weights.draft
        sizes = jnp.arange(longest, shortest - 1, -1, dtype=jnp.int32)
        low, high = _ranges(store, _wanted(context.row, sizes, longest), sizes)
        # the first, which is the longest, that occurs
        best = jnp.argmax(high > low, axis=1)[:, None]
        low, high = (jnp.take_along_axis(bound, best, axis=1) for bound in (low, high))  # B 1
        chosen, votes = _evenly_spaced(low, high, occurrences)  # B C
        chosen = jnp.minimum(chosen, store.suffixes.shape[0] - 1)
        position = store.suffixes[chosen] + sizes[best]  # B C; where each continuation begins
        step = jnp.arange(context.gamma, dtype=jnp.int32)[None, None, :]
        stored = _read(store, position[..., None] + step)  # B C G
        real = (stored > 0) & votes[..., None]  # a document ends with 0
        tokens = jnp.maximum(stored - 1, 0)
        if tree is not None:
            return vote.as_tree(tokens, real, jnp.ones(votes.shape, jnp.float32), tree.nodes)
        # Suffixes are in order: of equal votes the lowest id wins.
        path, probability = vote.likeliest(tokens, real, votes[:, None])
        drafted = probability[:, 0] > 0
        length = jnp.sum(drafted, axis=1, dtype=context.row.length.dtype)
        return core.Draft(jnp.where(drafted, path[:, 0], 0), length)

    return lookup_drafter(search, no_state, tree)


def _evenly_spaced(
    low: Int[Array, "B 1"], high: Int[Array, "B 1"], limit: int
) -> tuple[Int[Array, "B C"], Bool[Array, "B C"]]:
    """Spreads at most `limit` indices evenly over those from `low` to `high` - 1.

    The i-th of n indices among m is low + i * m // n. That product may exceed 32 bits in a large
    datastore, so m is split: with m = q * n + r, i * m // n is i * q + i * r // n, and r < n.

    Returns:
        The indices, and which of them count: ranges of fewer than `limit` have no others.

    >>> index, counts = _evenly_spaced(jnp.array([[10], [20]]), jnp.array([[17], [22]]), 3)
    >>> index.tolist(), counts.tolist()
    ([[10, 12, 14], [20, 21, 22]], [[True, True, True], [True, True, False]])
    """
    rank = jnp.arange(limit, dtype=jnp.int32)[None, :]
    size = high - low
    count = jnp.minimum(size, limit)
    divisor = jnp.maximum(count, 1)  # an empty range has no indices that count
    index = low + rank * (size // divisor) + rank * (size % divisor) // divisor
    return index, rank < count


def _wanted(row: core.Prompt, sizes: Int[Array, " K"], longest: int) -> Int[Array, "B K W"]:
    """Returns the last few tokens of each row, as the datastore has them, for each number of
    tokens; 0 after them.

    >>> _wanted(core.Prompt(jnp.array([[4, 5, 6]]), jnp.array([3])), jnp.array([2, 1]), 2).tolist()
    [[[6, 7], [7, 0]]]
    """
    step = jnp.arange(longest, dtype=row.length.dtype)[None, None, :]
    position = row.length[:, None, None] - sizes[None, :, None] + step
    # Stored ids are one larger, so what stands before the row is below all of them.
    stored = token_rows.tokens_at(row.tokens, position, token_rows.BEFORE_ROW) + 1
    return jnp.where(step < sizes[None, :, None], stored, 0)


def _read(store: Store, position: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Reads the tokens at some positions; positions past the end read the last entry, which ends a
    document.
    """
    return store.tokens[jnp.minimum(position, store.tokens.shape[0] - 1)].astype(jnp.int32)


def _ranges(
    store: Store, endings: Int[Array, "B K W"], sizes: Int[Array, " K"]
) -> tuple[Int[Array, "B K"], Int[Array, "B K"]]:
    """Finds the suffixes that begin with each wanted run: in their order, those from the first to
    the second bound.

    Both ends in one bisection: the first suffix that is not below a run, and the first that is
    above.
    """
    count = store.suffixes.shape[0]
    step = jnp.arange(endings.shape[-1], dtype=jnp.int32)
    # The sign of the first difference outweighs those of all after it: a comparison in one sum.
    weight = jnp.where(step[None, :] < sizes[:, None], 1 << step[::-1][None, :], 0)[None, None]
    least = jnp.array([0, 1], jnp.int32)[:, None, None]

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        suffix = store.suffixes[jnp.minimum(middle, count - 1)]
        stored = _read(store, suffix[..., None] + step[None, None, None, :])  # 2 B K W
        order = jnp.sum(jnp.sign(stored - endings[None]) * weight, axis=-1)
        right = (order < least) & (low < high)
        return jnp.where(right, middle + 1, low), jnp.where(right, high, jnp.minimum(middle, high))

    zero = jnp.zeros((2, *endings.shape[:2]), jnp.int32)
    low, _ = jax.lax.fori_loop(0, count.bit_length(), halve, (zero, jnp.full_like(zero, count)))
    return low[0], low[1]
