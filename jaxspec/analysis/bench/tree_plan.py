"""Which tree a pair should draft on this machine: acceptance by rank and costs, measured; then Sequoia's program.

The tokens per round of a tree are not those that the program expects, which takes all positions of a text for alike.
They are replayed, as those of chains are (`analysis.measure.replay`): given the text, a round that begins at some token
follows it down the tree with a probability that p and q along the text determine, child by child, so the mean number of
rounds is that of a Markov chain.

Shapes: N positions of all texts in a row, V vocabulary, K children of a node at most, G depth of the tree.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxspec.analysis.bench import plan as planning
from jaxspec.analysis.measure import cost, jobs, replay
from jaxspec.analysis.measure.statistics import Ratio
from jaxspec.analysis.theory import text_rounds
from jaxspec.analysis.tree import DEEPEST, best_of_size
from jaxspec.decode.request import Job, prepare
from jaxspec.drafters.children import DrawName, check
from jaxspec.drafters.shape import Choices, shape_of

SAMPLES = 4  # draws of siblings at each position, where their acceptance is averaged over those before them
PASSES = 2  # of the program
NEAR = 0.03  # a simpler one is preferred if it is slower by no more than this part
GREEDY: tuple[DrawName, ...] = ("top",)
SAMPLED: tuple[DrawName, ...] = ("without_replacement", "mixed")


class Prediction(NamedTuple):
    """A chain or a tree, with what it promises.

    Attributes:
        shape: of the draft, as `drafters.tree` takes it; empty: plain decoding.
        draw: how children are chosen.
        tokens_per_round: replayed along the target's texts.
        cost: of a round, in passes of the target over one token.
    """

    shape: Choices
    draw: DrawName
    tokens_per_round: float
    cost: float

    @property
    def improvement(self) -> float:
        """Speed over plain decoding."""
        return self.tokens_per_round / self.cost

    @property
    def depth(self) -> int:
        """Levels, each of which costs a pass of the drafter."""
        return max(map(len, self.shape), default=0)


class TreePlan(NamedTuple):
    """What to draft.

    Attributes:
        tree, chain: the best of each kind; a chain's shape is a tree's with one child a node.
        acceptance: of each draw, by number of children and rank [K, K].
        c, v: what passes cost: of the drafter, by the number of tokens it is fed, and of the target, by the number of
            draft tokens (0: 1.0).
    """

    tree: Prediction
    chain: Prediction
    acceptance: dict[DrawName, Float[np.ndarray, "K K"]]
    c: Float[np.ndarray, " M"]
    v: Float[np.ndarray, " M"]

    @property
    def best(self) -> Prediction:
        """The tree, unless it is hardly faster than the chain, or neither is than plain decoding."""
        plain = Prediction((), self.tree.draw, 1.0, 1.0)
        found = self.tree if self.tree.improvement > self.chain.improvement * (1 + NEAR) else self.chain
        return found if found.improvement > 1 else plain


def of_job(job: Job, *, nodes: int = 32, children: int = 8, batch: int = 1, repeats: int = cost.REPEATS) -> TreePlan:
    """Measures a pair and plans its tree.

    For each draw and each number of nodes and levels the dynamic program gives the best shape, for acceptance by rank
    and then for acceptance by depth, too; of these the one counts whose replayed tokens per round cost least.

    Args:
        job: of a target and a model that drafts, with a temperature and no other sampling options.
        nodes: most draft tokens.
        children: most of one node.
        batch: rows of the passes that are timed.
        repeats: of each timing.

    Raises:
        TypeError, ValueError: as `replay.collect` and `cost.measure`; a vocabulary of fewer tokens than `children`.

    Example:
        >>> from jaxspec import Prompt
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))
        >>> found = of_job(prepare(model, prompt, drafter=model, max_new_tokens=8), nodes=3, children=2, repeats=1)
        >>> found.acceptance["top"].tolist()  # its own argmax is always right
        [[1.0, 0.0], [1.0, 0.0]]
    """
    (group,) = jobs.whole_batches(job, batch, batch)
    c, v = costs(group, nodes, repeats)
    with tempfile.TemporaryDirectory() as folder:
        trace = replay.collect(Path(folder) / "trace", job)
        draws = SAMPLED if trace.temperature else GREEDY
        ratios: dict[DrawName, np.ndarray] = {draw: ratios_of(trace, draw, children) for draw in draws}
        counts = np.asarray(trace.counts)
    acceptance: dict[DrawName, np.ndarray] = {draw: found.mean(axis=0) for draw, found in ratios.items()}
    tried: list[Prediction] = []
    for draw, found in ratios.items():
        known = acceptance[draw]
        for _ in range(PASSES):  # first as if all positions were alike, then as rounds with the best tree meet them
            mine = [
                Prediction(shape, draw, tokens_per_round(shape, found, counts).value, round_cost(shape, c, v))
                for shape in shapes(known, nodes)
            ]
            tried += mine
            known = by_depth(max(mine, key=lambda one: one.improvement).shape, found, counts)
    chains = [one for one in tried if len(one.shape) == one.depth]
    trees = [one for one in tried if len(one.shape) > one.depth] or chains
    tree, line = (max(some, key=lambda one: one.improvement) for some in (trees, chains))
    return TreePlan(tree, line, acceptance, np.asarray(c), v)


def shapes(acceptance: Float[np.ndarray, "*L K K"], nodes: int) -> list[Choices]:
    """The best tree of each of some sizes, the chains among them.

    >>> shapes(np.array([[0.5, 0.0], [0.5, 0.2]]), 2)
    [((0,),), ((0,), (0, 0)), ((0,), (1,))]
    """
    some = [n for n in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n < nodes] + [nodes]
    longest = min(nodes, DEEPEST)
    found = [tuple((0,) * (depth + 1) for depth in range(n)) for n in range(1, longest + 1)]
    for size in some:
        for depth in range(1, min(size, longest + 1)):
            shape = best_of_size(np.clip(acceptance, 0, 1), size, depth)
            found += [shape] if (len(shape), max(map(len, shape))) == (size, depth) else []
    return list(dict.fromkeys(found))


def ratios_of(trace: replay.LogitTrace, draw: DrawName, children: int) -> Float[np.ndarray, "N K K"]:
    """At each token x of the texts and of each of k siblings: P(it is x and is accepted) / p(x), rank after rank.

    Their mean over the positions is the acceptance by rank. Exact for "top" (1 where x is the drafter's r-th token),
    "mixed" (which accepts all that p has of its fixed children) and "replacement" (each sibling meets what the ones
    before it leave of p); "without_replacement" is averaged over some draws of the siblings before. At temperature 0
    children are the most probable tokens, whatever the draw.

    Args:
        trace: of `replay.collect`.
        draw: as in `drafters.tree`.
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

    Args:
        choices, ratios, counts: as in `tokens_per_round`.

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


def costs(job: Job, most: int, repeats: int = cost.REPEATS) -> tuple[Float[np.ndarray, " M"], Float[np.ndarray, " M"]]:
    """What passes cost, in passes of the target over one token: the drafter's over 1, 2, .. most tokens (from index 0),
    and the target's with 0, 1, .. most draft tokens; timed at some widths, and linear between them.
    """
    draft = jobs.drafting_model(job)
    widths = planning.timed_gammas(most)
    found = cost.measure_all(job, widths, repeats=repeats)
    own = prepare(draft, job.prompt, **dict(job.options) | {"drafter": draft, "policy": None})
    small = cost.measure_all(own, widths, repeats=repeats)
    c, v = planning.interpolate_costs(found, most)
    return c * planning.interpolate_costs(small, most)[1], v


def round_cost(choices: Sequence[Sequence[int]], c: Float[np.ndarray, " M"], v: Float[np.ndarray, " M"]) -> float:
    """What a round with a tree costs: a pass of the drafter for each level (the first reads two tokens), one of the
    target.

    >>> round_cost(((0,), (1,), (0, 0)), np.array([0.1, 0.11, 0.12]), np.array([1.0, 1.1, 1.2, 1.3]))
    1.51
    """
    shape = shape_of(tuple(tuple(map(int, node)) for node in choices))
    fed = [2, *(len(level.parents) for level in shape.levels[1:])]
    return float(v[len(shape.parents)] + sum(c[min(n, len(c)) - 1] for n in fed))


def sentence(plan: TreePlan) -> str:
    """A plan in words."""
    best, other = plan.best, plan.chain
    if not best.shape:
        return (
            f"Do not speculate: the best tree ({len(plan.tree.shape)} nodes) would be {plan.tree.improvement:.2f} "
            f"times as fast as plain decoding, the best chain (γ = {other.depth}) {other.improvement:.2f} times."
        )
    if best is other:
        return (
            f"Take a chain, γ = {other.depth}: {other.tokens_per_round:.2f} tokens in the time of {other.cost:.2f} "
            f"passes, {other.improvement:.2f} times the speed of plain decoding. The best tree "
            f"({len(plan.tree.shape)} nodes, {plan.tree.depth} deep) gains no more than {NEAR:.0%} over it "
            f"({plan.tree.improvement:.2f} times)."
        )
    return (
        f"Take a tree of {len(best.shape)} nodes, {best.depth} deep, draw {best.draw!r}: {best.tokens_per_round:.2f} "
        f"tokens in the time of {best.cost:.2f} passes, {best.improvement:.2f} times the speed of plain decoding; the "
        f"best chain, γ = {other.depth}, {other.improvement:.2f} times.\nshape = {best.shape}"
    )


def to_dict(plan: TreePlan) -> dict[str, Any]:
    """For JSON."""
    tried = {
        name: one._asdict() | {"depth": one.depth, "improvement": one.improvement}
        for name, one in (("tree", plan.tree), ("chain", plan.chain), ("best", plan.best))
    }
    acceptance = {draw: found.tolist() for draw, found in plan.acceptance.items()}
    return {**tried, "acceptance": acceptance, "c": plan.c.tolist(), "v": plan.v.tolist(), "advice": sentence(plan)}
