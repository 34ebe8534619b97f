"""Retrieval: what followed the last tokens in a datastore of texts (REST, He et al., arXiv 2311.08252).

Shapes: B batch, K lengths of match, W tokens of the longest match, C occurrences, G gamma; N and M as in `datastore`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.core import BoundDrafter, Caches, Draft, DraftContext, Drafter, Model, Prompt, TreeSize, Weights
from jaxspec.core.checks import integers
from jaxspec.drafters.common import no_commit, no_state, same_state, searched
from jaxspec.drafters.lookups import continuations, datastore
from jaxspec.drafters.lookups.datastore import Datastore, DatastoreError

BEFORE = -1  # what stands before a row's first token: equal to nothing in a datastore
LONGEST = 31  # tokens of a match: a comparison has a bit for each


class Store(NamedTuple):
    """A datastore on the device: what the drafter has for parameters."""

    tokens: Int[Array, " N"]
    suffixes: Int[Array, " M"]


def retrieval(
    store: Datastore | str | Path,
    target: Model | None = None,
    *,
    longest: int = 8,
    shortest: int = 2,
    occurrences: int = 32,
    candidates: int = 1,
    length: int = 5,
) -> BoundDrafter:
    """Proposes, as point masses, how a datastore's texts go on most often after the last few tokens.

    The last `longest` tokens of the row are sought in the datastore, then fewer, down to `shortest`, all at once, by
    bisection in its suffix array. Of the places where the longest match occurs at most `occurrences`, evenly spread
    over their order, vote for the next token, those with that token for the one after, and so on; a tie goes to the
    lowest id. The draft ends where none goes on, and is empty where nothing matches. Everything happens on the device:
    the datastore lies there, 4 bytes for each token and 2 (4, if there are 2^16 ids or more) for the token.

    Args:
        store: what `datastore.load` gives, or the folder.
        target: if given, the datastore must have been built with its vocabulary; where either has no tokenizer to
            compare, the datastore may have no more ids than it.
        longest, shortest: tokens to match, at most (31) and at least. 1 drafts most often, more
            draft better.
        occurrences: most places that vote.
        candidates: continuations to propose. Above 1 they make a tree of what follows most often, of at most
            candidates x length nodes, and gamma is not read.
        length: of each, in such a tree.

    Raises:
        ValueError: not 1 <= shortest <= longest <= 31, no occurrences or candidates, or a datastore that is damaged or
            the target's tokens are not those it was built with.

    Example:
        >>> drafter = retrieval(datastore.build([[5, 6, 7, 8], [6, 7, 9], [4, 6, 7, 8, 5]], vocab_size=10))
        >>> row = Prompt(jnp.array([[3, 6, 7, 0]]), jnp.array([3]))
        >>> context = DraftContext(None, row, jnp.array([3]), 3, False, None)
        >>> draft, _ = drafter.functions.propose(Weights(None, drafter.params), Caches(None), context)
        >>> draft.tokens.tolist(), draft.length.tolist()
        ([[8, 5, 0]], [2])
    """
    shortest, longest, occurrences = integers(shortest=shortest, longest=longest, occurrences=occurrences)
    if not 1 <= shortest <= longest:
        raise ValueError(f"shortest is {shortest} and longest {longest}: expected 1 <= shortest <= longest")
    if longest > LONGEST:
        raise ValueError(f"longest is {longest}: expected at most {LONGEST}")
    if occurrences < 1:
        raise ValueError(f"occurrences is {occurrences}: expected at least 1")
    continuations.check(candidates, length)
    if not isinstance(store, Datastore):
        store = datastore.load(store)
    if target is not None:
        _check(store, target)
    params = Store(jnp.asarray(store.tokens), jnp.asarray(store.suffixes))
    tree = TreeSize(candidates * length, length) if candidates > 1 else None
    name = "retrieval" if tree is None else f"retrieval({candidates} candidates)"
    return BoundDrafter(_retrieval(longest, shortest, occurrences, tree), params, name=name)


def _check(store: Datastore, target: Model) -> None:
    """Where both know their tokens these count, and not the widths: of models with one tokenizer some pad their logits.

    An id that the target's logits lack is none of its tokenizer's, and decoders cut a draft before it.
    """
    if store.vocabulary and target.tokenizer is not None:
        if store.vocabulary != datastore.vocabulary_of(target.tokenizer):
            raise DatastoreError(
                f"the datastore was built with another vocabulary than that of {target.name or 'the target'}: build "
                "one with the target's tokenizer"
            )
    elif store.vocab_size > target.lm.vocab_size:
        raise DatastoreError(f"the datastore has {store.vocab_size} token ids and the target {target.lm.vocab_size}")


@functools.lru_cache
def _retrieval(longest: int, shortest: int, occurrences: int, tree: TreeSize | None) -> Drafter:
    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        return searched(lambda: search(weights.draft, context.row, context.gamma), context), caches

    def search(store: Store, context: Prompt, gamma: int) -> Draft:
        sizes = jnp.arange(longest, shortest - 1, -1, dtype=jnp.int32)
        low, high = _ranges(store, _wanted(context, sizes, longest), sizes)
        best = jnp.argmax(high > low, axis=1)[:, None]  # the first, which is the longest, that occurs
        low, high = (jnp.take_along_axis(bound, best, axis=1) for bound in (low, high))
        voter = jnp.arange(occurrences, dtype=jnp.int32)[None, :]
        count = jnp.minimum(high - low, occurrences)
        # The i-th of n among m is i * m // n, in an order in which nothing exceeds 32 bits.
        each, left = (high - low) // jnp.maximum(count, 1), (high - low) % jnp.maximum(count, 1)
        chosen = low + voter * each + voter * left // jnp.maximum(count, 1)
        found = store.suffixes[jnp.minimum(chosen, store.suffixes.shape[0] - 1)] + sizes[best]
        follow = _read(store, found[..., None] + jnp.arange(gamma, dtype=jnp.int32)[None, None, :])
        if tree is None:
            tokens, length = _vote(follow, voter < count)
            return Draft(tokens, length.astype(context.length.dtype))
        real = jnp.cumprod(jnp.logical_and(follow > 0, (voter < count)[..., None]).astype(jnp.int32), axis=-1) > 0
        return continuations.as_tree(jnp.maximum(follow - 1, 0), real, jnp.ones(voter.shape), tree.nodes)

    return Drafter(no_state, propose, no_commit, may_be_empty=True, tree=tree, rollback=same_state)


def _wanted(row: Prompt, sizes: Int[Array, " K"], longest: int) -> Int[Array, "B K W"]:
    """The last few tokens of each row, as the datastore has them, for each number of tokens; 0 after them.

    >>> _wanted(Prompt(jnp.array([[4, 5, 6]]), jnp.array([3])), jnp.array([2, 1]), 2).tolist()
    [[[6, 7], [7, 0]]]
    """
    step = jnp.arange(longest, dtype=row.length.dtype)[None, None, :]
    at = row.length[:, None, None] - sizes[None, :, None] + step
    flat = jnp.maximum(at, 0).reshape(at.shape[0], -1)
    known = jnp.take_along_axis(row.tokens, flat, axis=1, mode="clip").reshape(at.shape) + 1
    return jnp.where(step < sizes[None, :, None], jnp.where(at >= 0, known, BEFORE), 0)


def _read(store: Store, at: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """What stands at some positions; the last one, which ends a document, beyond the end."""
    return store.tokens[jnp.minimum(at, store.tokens.shape[0] - 1)].astype(jnp.int32)


def _ranges(
    store: Store, wanted: Int[Array, "B K W"], sizes: Int[Array, " K"]
) -> tuple[Int[Array, "B K"], Int[Array, "B K"]]:
    """Where, in the order of suffixes, those lie that begin with each of the wanted runs: from the first to the second.

    Both ends in one bisection: the first suffix that is not below a run, and the first that is above.
    """
    count = store.suffixes.shape[0]
    step = jnp.arange(wanted.shape[-1], dtype=jnp.int32)
    # The sign of the first difference outweighs those of all after it: a comparison in one sum.
    weight = jnp.where(step[None, :] < sizes[:, None], 1 << step[::-1][None, :], 0)[None, None]
    least = jnp.array([0, 1], jnp.int32)[:, None, None]

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        suffix = store.suffixes[jnp.minimum(middle, count - 1)]
        there = _read(store, suffix[..., None] + step[None, None, None, :])
        order = jnp.sum(jnp.sign(there - wanted[None]) * weight, axis=-1)
        right = jnp.logical_and(order < least, low < high)
        return jnp.where(right, middle + 1, low), jnp.where(right, high, jnp.minimum(middle, high))

    zero = jnp.zeros((2, *wanted.shape[:2]), jnp.int32)
    low, _ = jax.lax.fori_loop(0, count.bit_length(), halve, (zero, jnp.full_like(zero, count)))
    return low[0], low[1]


def _vote(follow: Int[Array, "B C G"], voter: Bool[Array, "B C"]) -> tuple[Int[Array, "B G"], Int[Array, " B"]]:
    """The continuation on which most candidates agree, one token after the other, and how far one goes on.

    >>> follow = jnp.array([[[4, 2, 9], [4, 3, 8], [5, 3, 8], [4, 3, 0]]])
    >>> _vote(follow, jnp.ones((1, 4), bool))
    (Array([[3, 2, 7]], dtype=int32), Array([3], dtype=int32))
    """

    def choose(voter: Bool[Array, "B C"], token: Int[Array, "B C"]):
        voter = jnp.logical_and(voter, token > 0)
        same = jnp.logical_and(token[:, :, None] == token[:, None, :], voter[:, None, :])
        votes = jnp.where(voter, jnp.sum(same, axis=-1), 0)
        best = jnp.argmax(votes, axis=1)[:, None]  # candidates are in order: of equal ones the lowest id
        winner = jnp.take_along_axis(token, best, axis=1)
        voter = jnp.logical_and(voter, token == winner)
        goes_on = jnp.any(voter, axis=1)
        return voter, (jnp.where(goes_on, winner[:, 0] - 1, 0), goes_on)

    _, (tokens, goes_on) = jax.lax.scan(choose, voter, follow.transpose(2, 0, 1))
    return tokens.T, jnp.sum(goes_on, axis=0, dtype=jnp.int32)
