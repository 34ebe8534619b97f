"""The planned tree: the dynamic program against all trees, acceptance by rank against enumeration,
replay against decoding.
"""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.analysis import plan as planning
from jaxspec.analysis import replay
from jaxspec.analysis.plan import Candidate, best_trees, price
from jaxspec.core import token_rows
from jaxspec.decode.request import prepare
from jaxspec.testing import table_model
from tests.small import between


@functools.cache
def every_tree(nodes, depth, children):
    """Every tree of `nodes` nodes, as sets of ranks on the way to each."""
    if nodes == 0:
        return [()]
    trees = []
    for count in range(1, children + 1):
        for shares in itertools.product(range(1, nodes + 1), repeat=count):
            if sum(shares) == nodes and (depth > 1 or max(shares) == 1):
                for below in itertools.product(
                    *(every_tree(share - 1, depth - 1, children) for share in shares)
                ):
                    nodes_of = [
                        (rank, *path) for rank, paths in enumerate(below) for path in ((), *paths)
                    ]
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
    random, v, c = np.random.default_rng(5), [1.0, 1.1, 1.15, 1.4, 1.45, 1.6], [0.11, 0.12, 0.14]
    by_rank, by_count, by_depth = (
        random.dirichlet(np.ones(4))[:2],
        random.random((2, 2)) / 2,
        random.random((5, 2, 2)),
    )
    acceptance = {"by rank": by_rank, "by count": by_count, "by depth": by_depth}[kind]
    full = {
        "by rank": np.broadcast_to(by_rank, (1, 2, 2)),
        "by count": by_count[None],
        "by depth": by_depth,
    }[kind]
    for nodes, depth in ((3, 4), (5, 3), (5, 5)):
        found = dict(best_trees(acceptance, nodes, [nodes], depth))
        best = max(accepted_by_hand(tree, full) for tree in every_tree(nodes, depth, 2))
        assert max(found.values()) == pytest.approx(1 + best)
        for tree, tokens in found.items():
            assert len(tree) == nodes and 1 + accepted_by_hand(tree, full) == pytest.approx(tokens)

    def speed(tree, c=0.12):
        return price(tree, 1 + accepted_by_hand(tree, full), c, v, 0).improvement

    trees = [tree for nodes in range(1, 6) for tree in every_tree(nodes, 5, 2)]
    plan = planning.plan(acceptance, 0.12, v)
    assert max(plan.tree.improvement, plan.chain.improvement) == pytest.approx(
        max(map(speed, trees))
    )
    for draft in (plan.tree, plan.chain):
        assert draft.improvement == pytest.approx(speed(draft.shape))
    by_width = planning.plan(acceptance, c, v)
    assert by_width.c == c[0] and by_width.tree.improvement == pytest.approx(
        speed(by_width.tree.shape, c)
    )


def test_a_round_is_a_pass_for_each_level_and_one_of_the_target():
    """The first pass is fed two tokens, the others the nodes with children; a chain with one cost
    is gamma c + v.
    """
    c, v = [0.1, 0.2, 0.4], [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    tree = price(((0,), (1,), (2,), (0, 0), (1, 0)), 2.0, c, v, c_hat=0.5)
    assert (
        tree.drafting == pytest.approx(0.2 + 0.2)
        and tree.verifying == 1.5
        and tree.improvement == 2.0 / tree.cost
    )
    # the root, and two nodes of the first level
    assert tree.operations == pytest.approx((6 + 0.5 * 3) / 2.0)
    assert price(replay.chain(3), 2.0, c, v, 0).drafting == pytest.approx(0.2 + 0.1 + 0.1)
    assert price(replay.chain(3), 2.0, 0.1, v, 0).cost == pytest.approx(3 * 0.1 + 1.3)
    assert price((), 1.0, 0.1, v, 0)[1:5] == (1.0, 0.0, 1.0, 1.0)


def test_more_children_than_tokens():
    with pytest.raises(ValueError, match="children is 9: expected a number from 1 to 4"):
        replay.tree_ratios(trace_of(np.eye(4)[0], np.eye(4)[0]), "top", 9)


# --- acceptance by rank

P, Q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.35, 0.15, 0.4])
SAME = 600  # positions of each token, over which draws are averaged


def trace_of(p, q):
    """A text in which every token follows the same two distributions."""
    tokens = np.tile(np.arange(4, dtype=np.int32), SAME)
    logits = [
        np.broadcast_to(np.log(np.maximum(x, 1e-30)), (len(tokens), 4)).astype(np.float32)
        for x in (p, q)
    ]
    return replay.LogitTrace(1.0, np.array([len(tokens)]), tokens, *logits)


def by_enumeration(children, sample, fixed=()):
    """P(child r is x and accepted) by multi-round rejection, for each rank and token; `sample`:
    what draws are of.
    """
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
    acceptance = (
        replay.tree_ratios(trace_of(P, Q), draw, children)
        .reshape(SAME, 4, children, children)
        .mean(axis=0)
    )
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
        np.testing.assert_allclose(
            mine[:count], expected, atol=0.01 if draw == "without_replacement" else 1e-5
        )


# --- replay


@pytest.mark.slow
def test_replayed_tokens_per_round_are_those_of_greedy_decoding():
    target = table_model(jax.random.key(1), 7, sharpness=2.0)
    other = table_model(jax.random.key(2), 7, sharpness=2.0)
    draft = between(target, other, 0.6)
    prompts = token_rows.pad([[3, 1, 4], [1], [5, 2, 6], [0, 0]], 4)
    shape = ((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0))
    out = jaxspec.generate(
        target, prompts, drafter=drafters.tree(draft, shape=shape), max_new_tokens=24
    )
    measured = (out.stats.emitted - 1).sum() / out.stats.rounds.sum()
    texts = [row[:n] for row, n in zip(out.tokens, out.lengths, strict=True)]
    logits = [np.asarray(model.params)[before(prompts, texts)] for model in (target, draft)]
    counts = np.array([len(text) for text in texts])
    trace = replay.LogitTrace(0.0, counts, np.concatenate(texts).astype(np.int32), *logits)
    again = replay.tokens_per_round(shape, replay.tree_ratios(trace, "top", 3), counts)
    assert again.value == pytest.approx(float(measured))


def test_acceptance_by_depth_is_that_of_the_rounds():
    """Right draft tokens cluster: rounds begin where they are rare, so the mean over all positions
    is too much.
    """
    random, counts = np.random.default_rng(3), np.array([240, 240])
    easy = np.repeat(random.random(60) < 0.5, 8)  # runs of 8 easy tokens, and of hard ones
    right = random.random(480) < np.where(easy, 0.95, 0.1)
    ratios = right[:, None, None] * np.array([[[1.0, 0.0], [1.0, 0.0]]])
    shape = ((0,), (0, 0), (0, 0, 0))
    replayed = replay.tokens_per_round(shape, ratios, counts).value
    alike, by_depth = (
        1 + accepted_by_hand(shape, x)
        for x in (ratios.mean(axis=0)[None], replay.by_depth(shape, ratios, counts))
    )
    assert by_depth == pytest.approx(replayed, rel=0.01)
    assert abs(alike - replayed) > 0.03 * replayed


def before(prompts, texts):
    """The rows of a table of two tokens that each new token follows."""
    first, second = [], []
    for tokens, length, text in zip(
        np.asarray(prompts.tokens), np.asarray(prompts.length), texts, strict=True
    ):
        row = [0, *tokens[:length].tolist(), *text.tolist()]
        for at in range(len(row) - len(text), len(row)):
            first.append(row[at - 2])
            second.append(row[at - 1])
    return np.array(first), np.array(second)


def test_of_equally_fast_ones_the_chain_is_preferred():
    """A tree has to be more than 3% faster than the best chain, and faster than plain decoding."""
    branching, numbers = ((0,), (1,)), {"c": 0.5, "v": [1.0, 1.0, 1.0], "tokens": [1.0, 1.97, 1.9]}

    def plan(of_tree, **changes):
        return planning.plan(
            0.9,
            **numbers | changes,
            trees=[Candidate(branching, of_tree, 0.5, 1.0, 2.0, draw="top")],
        )

    same, wins, slow = plan(2.0), plan(2.1), plan(1.4, tokens=[1.0, 1.3, 1.3])
    assert (
        same.best == same.chain != same.tree
        and "The best tree (2 nodes, 1 deep) gains" in planning.sentence(same)
    )
    assert (
        wins.best == wins.tree
        and "Speculate with a tree of 2 nodes, 1 deep" in planning.sentence(wins)
    )
    assert "drafters.tree(draft, shape=((0,), (1,)), draw='top')" in planning.sentence(wins)
    report = planning.to_dict(wins)
    assert report["improvement"] == report["tree"]["improvement"] == pytest.approx(2.1 / 1.5)
    assert (len(report["chains"]), len(report["trees"])) == (3, 1) and report["chain"]["gamma"] == 1
    assert slow.gamma == 0 and "the best tree, 2 nodes, 1 deep, 0.93 times" in planning.sentence(
        slow
    )


@pytest.mark.slow
def test_trees_of_a_pair_are_planned_beside_its_chains():
    """With acceptance of the second child and passes that cost little, some tree promises more than
    any chain.
    """
    target = table_model(jax.random.key(1), 7, sharpness=2.0)
    draft = between(target, table_model(jax.random.key(2), 7, sharpness=2.0), 0.6)
    prepared = prepare(
        target, [[3, 1, 4], [1], [5, 2, 6], [0, 0]], drafter=draft, max_new_tokens=24
    )
    done = []
    chains, both = (
        next(
            planning.of_pair(
                prepared, most=4, trees=trees, children=3, repeats=1, advance=done.append
            )
        )
        for trees in (False, True)
    )
    assert len(done) == planning.steps((1,), 4) + planning.steps((1,), 4, trees=True)
    assert (
        chains.tree is None
        and not chains.measured.acceptance
        and both.measured.acceptance["top"].shape == (3, 3)
    )
    for draft in (*both.chains[1:], both.tree):
        out = jaxspec.generate(**shaped(prepared, draft))
        assert (out.stats.emitted - 1).sum() / out.stats.rounds.sum() == pytest.approx(
            draft.tokens_per_round
        )
    assert (
        both.tree.tokens_per_round > both.chains[1].tokens_per_round
        and 1 < len(both.tree.shape) <= 4
    )
    assert [a.tokens_per_round for a in chains.chains] == [b.tokens_per_round for b in both.chains]


def shaped(prepared, draft):
    """Returns the arguments of a generation with a candidate."""
    drafter = drafters.tree(prepared.options.drafter, shape=draft.shape, draw=draft.draw or "top")
    return {
        "target": prepared.target,
        "prompts": prepared.prompt,
        "drafter": drafter,
        "max_new_tokens": 24,
    }
