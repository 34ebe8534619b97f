"""How far rounds with a tree get, replayed along the target's texts: acceptance by rank and depth, tokens per round.

Given the text, a round that begins at some token follows it down the tree with a probability that p and q along the
text determine, child by child (as for chains: `measure.replay`), so the mean number of rounds is that of a Markov
chain. At temperature 0 it is the number itself. Of siblings drawn with replacement, what twins share is left out.

Shapes: N positions of all texts in a row, T tokens of one text, V vocabulary, K children of a node at most, G depth of
the tree.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxspec.analysis.measure import replay
from jaxspec.analysis.measure.statistics import Ratio
from jaxspec.analysis.theory import text_rounds
from jaxspec.drafters.children import DrawName, check

SAMPLES = 4  # draws of siblings at each position, where their acceptance is averaged over those before them


def ratios_of(trace: replay.LogitTrace, draw: DrawName, children: int) -> Float[np.ndarray, "N K K"]:
    """At each token x of the texts and of each of k siblings: P(it is x and is accepted) / p(x), rank after rank.

    Their mean over the positions is the acceptance by rank. Exact for "top" (1 where x is the drafter's r-th token),
    "mixed" (which accepts all that p has of its fixed children) and "replacement" (each sibling meets what the ones
    before it leave of p); "without_replacement" is averaged over some draws of the siblings before. At temperature 0
    children are the most probable tokens, whatever the draw.

    Args:
        trace: of `replay.collect`.
        children: K.

    Raises:
        ValueError: no such draw; more children than tokens.

    Reference: Chen et al., Sequoia, arXiv 2402.12374, whose acceptance vector the mean is.
    """
    check(draw)
    vocab = trace.target.shape[1]
    if not 1 <= children <= vocab:
        raise ValueError(f"children is {children}: expected 1 to {vocab}, the vocabulary")
    found, temperature = np.zeros((len(trace.tokens), children, children)), trace.temperature
    for chunk, start in enumerate(range(0, len(found), replay.CHUNK)):
        index = np.minimum(np.arange(start, start + replay.CHUNK), len(found) - 1)
        part = (jnp.asarray(x[index]) for x in (trace.tokens, trace.target, trace.draft))
        key = jax.random.fold_in(jax.random.key(0), chunk)
        here = _ratios("top" if temperature == 0 else draw, children, temperature or 1.0, key, *part)
        found[index] = np.asarray(here)
    return found


@functools.partial(jax.jit, static_argnames=("draw", "children"))
def _ratios(
    draw: DrawName,
    children: int,
    temperature: Float[Array, ""],
    key: Key[Array, ""],
    tokens: Int[Array, " N"],
    target: Float[Array, "N V"],
    draft: Float[Array, "N V"],
) -> Float[Array, "N K K"]:
    p, q = (jax.nn.softmax(logits / temperature, axis=-1) for logits in (target, draft))
    at, count = tokens[:, None], len(tokens)
    counts, ranks = jnp.arange(1, children + 1)[None, :, None], jnp.arange(children)[None, None, :]
    p_x, q_x, draft_x = (jnp.take_along_axis(values, at, axis=1) for values in (p, q, draft))
    lower = jnp.arange(draft.shape[1])[None, :] < at
    rank = jnp.sum(jnp.logical_or(draft > draft_x, jnp.logical_and(draft == draft_x, lower)), axis=1)[:, None, None]
    if draw == "top":
        return jnp.logical_and(rank == ranks, ranks < counts).astype(jnp.float32)
    if draw == "mixed":
        best = jnp.pad(jnp.cumsum(jax.lax.top_k(q, children)[0], axis=1), ((0, 0), (1, 0)))[:, None, :children]
        rest = jnp.moveaxis(1 - best, 1, 2)  # what the first k - 1 leave
        drawn = jnp.minimum(1.0, q_x[:, :, None] / jnp.maximum(rest * p_x[:, :, None], 1e-30))
        drawn = jnp.where(jnp.logical_and(ranks == 0, rank >= counts - 1), drawn, 0.0)
        fixed = jnp.logical_and(rank == ranks - 1, ranks < counts)
        return jnp.where(fixed, 1.0, drawn)

    def one(key: Key[Array, ""]) -> Float[Array, "N K"]:
        gumbel = jax.random.gumbel(key, q.shape)
        order = jax.lax.top_k(jnp.log(q) + gumbel, children)[1]
        left, own, weight, found = p, q, jnp.ones((count, 1)), []
        for child in range(children):
            left_x, own_x = (jnp.take_along_axis(values, at, axis=1) for values in (left, own))
            found.append(weight * jnp.minimum(left_x, own_x) / jnp.maximum(p_x, 1e-30))
            if draw == "replacement":  # what is left does not depend on which token was drawn
                weight = weight * (1 - jnp.sum(jnp.minimum(left, own), axis=1, keepdims=True))
            else:
                y = order[:, child : child + 1]
                left_y, own_y = (jnp.take_along_axis(values, y, axis=1) for values in (left, own))
                weight = weight * jnp.maximum(1 - left_y / jnp.maximum(own_y, 1e-30), 0.0)
            after = jnp.maximum(left - own, 0.0)
            mass = jnp.sum(after, axis=1, keepdims=True)
            left = jnp.where(mass > 1e-6, after / jnp.maximum(mass, 1e-30), left)
            if draw == "without_replacement":
                own = jnp.where(jnp.arange(q.shape[1])[None, :] == y, 0.0, own)
                own = own / jnp.maximum(jnp.sum(own, axis=1, keepdims=True), 1e-30)
        return jnp.concatenate(found, axis=1)

    samples = SAMPLES if draw == "without_replacement" else 1
    by_rank = jnp.mean(jax.lax.map(one, jax.random.split(key, samples)), axis=0)
    return jnp.where(ranks < counts, by_rank[:, None, :], 0.0)


def tokens_per_round(
    choices: Sequence[Sequence[int]], ratios: Float[np.ndarray, "N K K"], counts: Int[np.ndarray, " rows"]
) -> Ratio:
    """Tokens per round of a tree along the texts, as `Stats.tokens_per_round` over all rows.

    Args:
        choices: the tree.
        ratios: of `ratios_of`.
        counts: how many tokens each text has.

    >>> always = np.zeros((9, 2, 2))
    >>> always[:, :, 0] = 1  # the first child is always right: 8 tokens in 3 rounds, then in 4
    >>> [round(tokens_per_round(some, always, np.array([9])).value, 2) for some in (((0,), (0, 0)), ((0,), (1,)))]
    [2.67, 2.0]
    """
    rounds = [text_rounds.expected_rounds(survives) for survives, _ in _by_text(choices, ratios, counts)]
    return Ratio(np.asarray(counts) - 1, np.array(rounds))


def by_depth(
    choices: Sequence[Sequence[int]], ratios: Float[np.ndarray, "N K K"], counts: Int[np.ndarray, " rows"]
) -> Float[np.ndarray, "G K K"]:
    """Acceptance by depth, number of children and rank, where rounds with a tree really come to judge them.

    Rounds begin after a token that was not drafted, go on where those before were accepted, and are cut where the text
    ends, so that the mean over all positions promises too much.

    >>> always = np.zeros((9, 2, 2))
    >>> always[1::2, :, 0] = 1  # every second token is right: a chain of 2 always begins with a right one
    >>> by_depth(((0,), (0, 0)), always, np.array([9]))[:, 0, 0].tolist()
    [1.0, 0.0]
    """
    depth = max(map(len, choices))
    found, mass = np.zeros((depth, *ratios.shape[1:])), np.zeros((depth, 1, 1))
    for survives, later in _by_text(choices, ratios, counts):
        tokens = len(survives)
        exactly = -np.diff(np.pad(survives, ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0))), axis=1)
        begins = np.zeros(tokens + depth + 1)
        begins[:1] = 1
        for t in range(tokens):
            begins[t + 1 : t + depth + 2] += begins[t] * exactly[t]
        for level in range(depth):
            here = begins[:tokens] * (survives[:, level - 1] if level else 1.0)
            found[level] += np.tensordot(here, later[level : level + tokens], 1)
            mass[level] += here.sum()
    return found / np.maximum(mass, 1e-12)


def _by_text(
    choices: Sequence[Sequence[int]], ratios: Float[np.ndarray, "N K K"], counts: Int[np.ndarray, " rows"]
) -> Iterator[tuple[Float[np.ndarray, "T G"], Float[np.ndarray, "TG K K"]]]:
    """Of each text: how probably a round that begins at each token but the first accepts 1, 2, .. of them, and the
    ratios there, with zeros after its end.
    """
    nodes = sorted((tuple(map(int, node)) for node in choices), key=len)
    depth = len(nodes[-1])
    children = {node: sum(other[:-1] == node for other in nodes) for node in ((), *nodes)}
    for end, count in zip(np.cumsum(counts), counts, strict=True):
        later = np.pad(ratios[end - count + 1 : end], ((0, depth), (0, 0), (0, 0)))
        reached: dict[tuple[int, ...], np.ndarray] = {(): np.ones(count - 1)}
        survives = np.zeros((count - 1, depth))
        for node in nodes:
            level = len(node) - 1
            step = later[level : level + count - 1, children[node[:-1]] - 1, node[-1]]
            reached[node] = reached[node[:-1]] * step
            survives[:, level] += reached[node]
        yield np.minimum(np.minimum.accumulate(survives, axis=1), 1.0), later
