"""Which tree a pair should draft on this machine: acceptance by rank and costs, measured; then Sequoia's program.

Shapes: M tokens of a pass at most, K children of a node at most, L levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxspec import drafters
from jaxspec.analysis import cost, replay
from jaxspec.analysis import plan as planning
from jaxspec.analysis.acceptance import drafting_model
from jaxspec.analysis.optimal_tree import DEEPEST, best_of_size
from jaxspec.analysis.setting import Setting, setting_of
from jaxspec.decode import batches
from jaxspec.decode.request import Prepared, prepare
from jaxspec.drafters.trees.children import DrawName
from jaxspec.drafters.trees.shape import Choices, shape_of

PASSES = 2  # of the program
TOLERANCE = 0.03  # a simpler one is preferred if it is slower by no more than this part
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
        found = self.tree if self.tree.improvement > self.chain.improvement * (1 + TOLERANCE) else self.chain
        return found if found.improvement > 1 else plain


def of_prepared(
    prepared: Prepared, *, nodes: int = 32, children: int = 8, batch: int = 1, repeats: int = cost.REPEATS
) -> TreePlan:
    """Measures a pair and plans its tree.

    For each draw and each number of nodes and levels the dynamic program gives the best shape, for acceptance by rank
    and then for acceptance by depth, too; of these the one counts whose replayed tokens per round cost least.

    Args:
        prepared: of a target and a model that drafts, with a temperature and no other sampling options.
        nodes: most draft tokens.
        children: most of one node.
        batch: rows of the passes that are timed.
        repeats: of each timing.

    Example:
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table(max_new_tokens=8)
        >>> found = of_prepared(prepared.replace(drafter=prepared.target), nodes=3, children=2, repeats=1)
        >>> found.acceptance["top"].tolist()  # its own argmax is always right
        [[1.0, 0.0], [1.0, 0.0]]
    """
    (group,) = batches.whole_batches(prepared, batch, batch)
    c, v = costs(group, nodes, repeats)
    trace = replay.collect(prepared)
    draws, counts = SAMPLED if trace.temperature else GREEDY, trace.counts
    ratios: dict[DrawName, np.ndarray] = {draw: replay.tree_ratios(trace, draw, children) for draw in draws}
    acceptance: dict[DrawName, np.ndarray] = {draw: found.mean(axis=0) for draw, found in ratios.items()}
    tried: list[Prediction] = []
    for draw, found in ratios.items():
        known = acceptance[draw]
        for _ in range(PASSES):  # first as if all positions were alike, then as rounds with the best tree meet them
            mine = [
                Prediction(shape, draw, replay.tokens_per_round(shape, found, counts).value, round_cost(shape, c, v))
                for shape in shapes(known, nodes)
            ]
            tried += mine
            known = replay.by_depth(max(mine, key=lambda one: one.improvement).shape, found, counts)
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
    found = [replay.chain(n) for n in range(1, longest + 1)]
    for size in some:
        for depth in range(1, min(size, longest + 1)):
            shape = best_of_size(np.clip(acceptance, 0, 1), size, depth)
            found += [shape] if (len(shape), max(map(len, shape))) == (size, depth) else []
    return list(dict.fromkeys(found))


def costs(
    prepared: Prepared, most: int, repeats: int = cost.REPEATS
) -> tuple[Float[np.ndarray, " M"], Float[np.ndarray, " M"]]:
    """What passes cost, in passes of the target over one token: the drafter's over 1, 2, .. most tokens (from index 0),
    and the target's with 0, 1, .. most draft tokens; timed at some widths, and linear between them.
    """
    draft = drafting_model(prepared)
    widths = planning.timed_gammas(most)
    found = cost.measure_all(prepared, widths, repeats=repeats)
    own = prepare(draft, prepared.prompt, **dict(prepared.options) | {"drafter": draft, "policy": None})
    small = cost.measure_all(own, widths, repeats=repeats)
    c, v = planning.interpolate_costs(found, most)
    return c * planning.interpolate_costs(small, most)[1], v


def round_cost(choices: Sequence[Sequence[int]], c: Float[np.ndarray, " M"], v: Float[np.ndarray, " M"]) -> float:
    """What a round with a tree costs: a pass of the drafter for each level (the first reads two tokens), one of the
    target.

    >>> round_cost(((0,), (1,), (0, 0)), np.array([0.1, 0.11, 0.12]), np.array([1.0, 1.1, 1.2, 1.3]))
    1.51
    """
    shape = shape_of(choices)
    fed = [2, *(len(level.parents) for level in shape.levels[1:])]
    return float(v[len(shape.parents)] + sum(c[min(n, len(c)) - 1] for n in fed))


def settings(plan: TreePlan, prepared: Prepared, batch: int) -> list[Setting]:
    """The chain and the tree of a plan, to be compared by `bench.run`."""
    draft, own = drafting_model(prepared), setting_of(prepared, "prompts", batch)
    chain = own._replace(drafter=draft, gamma=plan.chain.depth, name=f"chain of {plan.chain.depth}")
    if plan.tree is plan.chain:
        return [chain]
    tree = drafters.tree(draft, shape=plan.tree.shape, draw=plan.tree.draw)
    return [chain, own._replace(drafter=tree, gamma=plan.tree.depth, name=f"tree of {len(plan.tree.shape)}")]


def sentence(plan: TreePlan) -> str:
    """A plan in words."""
    best, other = plan.best, plan.chain
    if not best.shape:
        return (
            f"Do not speculate: the best tree ({len(plan.tree.shape)} nodes) would be at most "
            f"{plan.tree.improvement:.2f} times as fast as plain decoding, the best chain (γ = {other.depth}) "
            f"{other.improvement:.2f} times."
        )
    if best is other:
        chain = (
            f"Take a chain, γ = {other.depth}: {other.tokens_per_round:.2f} tokens in the time of {other.cost:.2f} "
            f"passes, at most {other.improvement:.2f} times the speed of plain decoding."
        )
        if plan.tree is other:
            return chain
        return (
            f"{chain} The best tree ({len(plan.tree.shape)} nodes, {plan.tree.depth} deep) gains no more than "
            f"{TOLERANCE:.0%} over it ({plan.tree.tokens_per_round:.2f} tokens, {plan.tree.improvement:.2f} times)."
        )
    return (
        f"Take a tree of {len(best.shape)} nodes, {best.depth} deep, draw {best.draw!r}: {best.tokens_per_round:.2f} "
        f"tokens in the time of {best.cost:.2f} passes, at most {best.improvement:.2f} times the speed of plain "
        f"decoding; the best chain, γ = {other.depth}, {other.improvement:.2f} times.\n"
        f"drafter = drafters.tree(draft, shape={best.shape}, draw={best.draw!r})"
    )


def to_dict(plan: TreePlan) -> dict[str, Any]:
    """A report of a plan, for JSON: what follows from it, too."""
    tried = {
        name: one._asdict() | {"depth": one.depth, "improvement": one.improvement}
        for name, one in (("tree", plan.tree), ("chain", plan.chain), ("best", plan.best))
    }
    return {**tried, "acceptance": plan.acceptance, "c": plan.c, "v": plan.v, "advice": sentence(plan)}
