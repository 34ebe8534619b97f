"""The planned tree: the dynamic program against all trees, acceptance by rank against enumeration, replay against
decoding."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.analysis import plan as planning
from jaxspec.analysis import replay
from jaxspec.analysis.optimal_tree import PlannedTree, best_of_size, optimal
from jaxspec.core import token_rows
from jaxspec.testing import table_model, table_model_from


@functools.cache
def every_tree(nodes, depth, children):
    """Every tree of `nodes` nodes, as sets of ranks on the way to each."""
    if nodes == 0:
        return [()]
    trees = []
    for count in range(1, children + 1):
        for shares in itertools.product(range(1, nodes + 1), repeat=count):
            if sum(shares) == nodes and (depth > 1 or max(shares) == 1):
                for below in itertools.product(*(every_tree(share - 1, depth - 1, children) for share in shares)):
                    nodes_of = [(rank, *path) for rank, paths in enumerate(below) for path in ((), *paths)]
                    trees.append(tuple(sorted(nodes_of, key=lambda node: (len(node), node))))
    return trees


def accepted_by_hand(tree, acceptance):
    """Expected accepted nodes: the sum of the probabilities of all of them."""
    total = 0.0
    for node in tree:
        reached = 1.0
        for depth in range(len(node)):
            count = sum(other[:-1] == node[:depth] and len(other) == depth + 1 for other in tree)
            reached *= acceptance[depth % len(acceptance)][count - 1][node[depth]]
        total += reached
    return total


@pytest.mark.parametrize("kind", ["by rank", "by count", "by depth"])
def test_the_program_finds_the_best_of_all_trees(kind):
    random, width_cost, depth_cost = np.random.default_rng(5), [1.0, 1.1, 1.15, 1.4, 1.45, 1.6], 0.12
    by_rank, by_count, by_depth = random.dirichlet(np.ones(4))[:2], random.random((2, 2)) / 2, random.random((4, 2, 2))
    acceptance = {"by rank": by_rank, "by count": by_count, "by depth": by_depth}[kind]
    full = {"by rank": np.broadcast_to(by_rank, (1, 2, 2)), "by count": by_count[None], "by depth": by_depth}[kind]
    depth = 4
    trees = [tree for nodes in range(1, 6) for tree in every_tree(nodes, depth, 2)]
    for nodes in (3, 5):
        tree = best_of_size(acceptance, nodes, depth)
        best = max(accepted_by_hand(tree, full) for tree in trees if len(tree) == nodes)
        assert len(tree) == nodes and accepted_by_hand(tree, full) == pytest.approx(best)

    def speed(tree):
        return (1 + accepted_by_hand(tree, full)) / (max(map(len, tree)) * depth_cost + width_cost[len(tree)])

    plan = optimal(acceptance, depth_cost, width_cost, nodes=5)
    assert plan.improvement == pytest.approx(max(1.0, *map(speed, trees)))
    if plan.shape:
        assert plan.improvement == pytest.approx(speed(plan.shape))


def test_numbers_that_make_no_plan():
    with pytest.raises(ValueError, match="nodes is 3 and there are 3 costs"):
        optimal([0.5], 0.1, [1.0, 1.0, 1.0], nodes=3)
    with pytest.raises(ValueError, match="expected positive costs"):
        optimal([0.5], -0.1, [1.0, 1.0], nodes=1)
    with pytest.raises(ValueError, match="expected probabilities by rank"):
        optimal([1.5], 0.1, [1.0, 1.0], nodes=1)
    with pytest.raises(ValueError, match="children is 9: expected 1 to 4, the vocabulary"):
        replay.tree_ratios(trace_of(np.eye(4)[0], np.eye(4)[0]), "top", 9)


# --- acceptance by rank

P, Q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.35, 0.15, 0.4])
SAME = 600  # positions of each token, over which draws are averaged


def trace_of(p, q):
    """A text in which every token follows the same two distributions."""
    tokens = np.tile(np.arange(4, dtype=np.int32), SAME)
    logits = [np.broadcast_to(np.log(np.maximum(x, 1e-30)), (len(tokens), 4)).astype(np.float32) for x in (p, q)]
    return replay.LogitTrace(1.0, np.array([len(tokens)]), tokens, *logits)


def by_enumeration(children, sample, fixed=()):
    """P(child r is x and accepted) by multi-round rejection, for each rank and token; `sample`: what draws are of."""
    accepted = np.zeros((children, 4))

    def go(rank, left, drawn, weight):
        if rank == children:
            return
        probs = sample(rank, drawn)
        for x in np.flatnonzero(probs):
            accept = min(1.0, left[x] / probs[x])
            accepted[rank, x] += weight * probs[x] * accept
            after = np.maximum(left - probs, 0)
            if accept < 1:
                go(rank + 1, after / after.sum(), [*drawn, x], weight * probs[x] * (1 - accept))

    go(0, P, [], 1.0)
    return accepted


def without(drawn):
    left = np.where(np.isin(np.arange(4), drawn), 0, Q)
    return left / left.sum()


def mixed_law(children):
    top = np.argsort(-Q, kind="stable")[: children - 1]
    return lambda rank, drawn: without(top) if rank == 0 else np.eye(4)[top[rank - 1]]


@pytest.mark.parametrize("draw", ["without_replacement", "replacement", "top", "mixed"])
def test_acceptance_by_rank_is_that_of_multi_round_rejection(draw):
    children = 3
    acceptance = replay.tree_ratios(trace_of(P, Q), draw, children).reshape(SAME, 4, children, children).mean(axis=0)
    for count in range(1, children + 1):
        distributions = {
            "without_replacement": lambda rank, drawn: without(drawn),
            "replacement": lambda rank, drawn: Q,
            "top": lambda rank, drawn: np.eye(4)[np.argsort(-Q, kind="stable")[rank]],
            "mixed": mixed_law(count),
        }
        expected = by_enumeration(count, distributions[draw])
        mine = acceptance[:, count - 1].T * P[None, :]
        assert (mine[count:] == 0).all()
        np.testing.assert_allclose(mine[:count], expected, atol=0.01 if draw == "without_replacement" else 1e-5)


# --- replay


@pytest.mark.slow
def test_replayed_tokens_per_round_are_those_of_greedy_decoding():
    target = table_model(jax.random.key(1), 7, sharpness=2.0)
    other = table_model(jax.random.key(2), 7, sharpness=2.0)
    draft = table_model_from(0.6 * target.params + 0.4 * other.params)
    prompts = token_rows.pad([[3, 1, 4], [1], [5, 2, 6], [0, 0]], 4)
    shape = ((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0))
    out = jaxspec.generate(target, prompts, drafter=drafters.tree(draft, shape=shape), max_new_tokens=24)
    measured = (out.stats.emitted - 1).sum() / out.stats.rounds.sum()
    texts = [row[:n] for row, n in zip(out.tokens, out.lengths, strict=True)]
    logits = [np.asarray(model.params)[before(prompts, texts)] for model in (target, draft)]
    counts = np.array([len(text) for text in texts])
    trace = replay.LogitTrace(0.0, counts, np.concatenate(texts).astype(np.int32), *logits)
    again = replay.tokens_per_round(shape, replay.tree_ratios(trace, "top", 3), counts)
    assert again.value == pytest.approx(float(measured))


def test_acceptance_by_depth_is_that_of_the_rounds():
    """Right draft tokens cluster: rounds begin where they are rare, so the mean over all positions is too much."""
    random, counts = np.random.default_rng(3), np.array([240, 240])
    easy = np.repeat(random.random(60) < 0.5, 8)  # runs of 8 easy tokens, and of hard ones
    right = random.random(480) < np.where(easy, 0.95, 0.1)
    ratios = right[:, None, None] * np.array([[[1.0, 0.0], [1.0, 0.0]]])
    shape = ((0,), (0, 0), (0, 0, 0))
    replayed = replay.tokens_per_round(shape, ratios, counts).value
    alike, by_depth = (
        1 + accepted_by_hand(shape, x) for x in (ratios.mean(axis=0)[None], replay.by_depth(shape, ratios, counts))
    )
    assert by_depth == pytest.approx(replayed, rel=0.01)
    assert abs(alike - replayed) > 0.03 * replayed


def before(prompts, texts):
    """The rows of a table of two tokens that each new token follows."""
    first, second = [], []
    for tokens, length, text in zip(np.asarray(prompts.tokens), np.asarray(prompts.length), texts, strict=True):
        row = [0, *tokens[:length].tolist(), *text.tolist()]
        for at in range(len(row) - len(text), len(row)):
            first.append(row[at - 2])
            second.append(row[at - 1])
    return np.array(first), np.array(second)


def test_of_equally_fast_ones_the_chain_is_preferred():
    tree, chain = (PlannedTree(shape, tokens, 1.5, "top") for shape, tokens in ((((0,), (1,)), 2.0), (((0,),), 1.97)))
    plan = planning.TreePlan(tree, chain, {}, jnp.ones(2), jnp.ones(2))
    assert plan.best is chain and planning.sentence(plan).startswith("Take a chain, γ = 1")
    wins = plan._replace(chain=chain._replace(cost=2.0))
    assert wins.best is tree and "Take a tree of 2 nodes, 1 deep" in planning.sentence(wins)
    assert planning.to_dict(wins)["best"]["improvement"] == pytest.approx(2.0 / 1.5)
    slow = plan._replace(tree=tree._replace(cost=3.0), chain=chain._replace(cost=2.5))
    assert not slow.best.shape and planning.sentence(slow).startswith("Do not speculate")
