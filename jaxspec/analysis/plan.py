"""Plans: whether to speculate, with which gamma or tree, and what it promises, by a pair's own
numbers.

`plan` takes numbers, `of_sizes` a machine's data sheet, and `of_pair` measures. Drafts are chains
and trees, and are priced alike (`price`): a chain is a tree with one child a node. Trees are
`optimal_tree`'s.

Shapes: K children of a node at most, L levels.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, section 3.5.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from rich import filesize

from jaxspec import rules
from jaxspec.analysis import acceptance, cost, formulas, memory, replay, roofline, table
from jaxspec.analysis.memory import PairMemory
from jaxspec.analysis.optimal_tree import best_trees, by_count
from jaxspec.analysis.statistics import Rate, Spread
from jaxspec.core.checks import at_least
from jaxspec.decode import batches as batching
from jaxspec.decode.request import Prepared, prepare
from jaxspec.drafters.trees.children import DrawName
from jaxspec.drafters.trees.shape import Choices
from jaxspec.nets import net_of
from jaxspec.sampling.params import KEEPS_ALL

# a speed is near the best if no more than this part is missing; a chain is preferred to such a tree
TOLERANCE = 0.03
# speeds of whole texts over a measured pair's promise: the least and the largest median in docs/
SHARE = (0.8, 1.0)
# of the dynamic program: the second knows where rounds with the tree of the first come to judge it
TREE_PASSES = 2
TREE_SIZES = 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64  # nodes of the trees that are tried
# where tokens are sampled; greedily all are "top"
DRAWS: tuple[DrawName, ...] = "without_replacement", "mixed"


class Candidate(NamedTuple):
    """A draft, and what rounds with it promise.

    >>> pair = Candidate(((0,), (1,)), 1.8, drafting=0.1, verifying=1.1, operations=2.0)
    >>> pair.gamma, pair.is_tree, round(pair.improvement, 3)
    (1, True, 1.5)
    """

    # for `drafters.tree(model, shape=...)`, of a chain with one child a node; empty: plain decoding
    shape: Choices
    tokens_per_round: float  # expected, of a row
    drafting: float  # cost of the drafter's passes, one a level, in one-token passes of the target
    verifying: float  # cost of the target's pass, in one-token passes of it
    operations: float  # arithmetic operations over those of plain decoding
    # memory accesses: the bytes of weights and caches that are read, over plain decoding's
    accesses: float = 0.0
    # how `drafters.tree` is to choose children; empty of chains, and where that is not planned
    draw: str = ""

    gamma = property(
        lambda self: max(map(len, self.shape), default=0),
        doc="Draft tokens of a chain, levels of a tree.",
    )
    is_tree = property(
        lambda self: len(self.shape) > self.gamma, doc="Whether some node has several children."
    )
    cost = property(lambda self: self.drafting + self.verifying, doc="Of a round.")
    improvement = property(
        lambda self: self.tokens_per_round / self.cost, doc="Speed over plain decoding, at most."
    )


class Measured(NamedTuple):
    """The measurements that a pair's plan rests on."""

    alpha: Rate  # over all positions of the target's own texts
    c: Spread  # over the repeats
    v: dict[int, Spread]  # by the gammas that were timed, over the repeats
    # the acceptance of each draw of trees, by number of children and rank [K, K]
    acceptance: dict[str, np.ndarray]


class Plan(NamedTuple):
    """The draft to take at one batch size, and what it and the others promise.

    Tokens per round, and so the speed, are those of a row. A batch goes on until its slowest row is
    done: the more rows, and the less alike they are, the further its speed falls short of this.
    Whole texts have `SHARE` of it.
    """

    batch: int  # rows
    alpha: float  # acceptance rate
    c: float  # cost of a pass of the drafter over one token
    chains: tuple[Candidate, ...]  # plain decoding and a chain of each gamma, at its index
    break_even: float  # the alpha above which chains would pay
    # the reasons not to speculate: "memory" (no room for both models), those of
    # `formulas.obstacles`, and, where measured tokens per round are fewer than in Equation 1,
    # "short texts" (if those of independent draft tokens are fewer, too) or "clustered draft
    # tokens"
    obstacles: tuple[str, ...] = ()
    trees: tuple[Candidate, ...] = ()  # if they were asked for, some of each size and depth
    # the measurements behind the costs, of a pair; None of numbers and sizes
    measured: Measured | None = None
    # what sizes take on a machine of known memory; None without one
    memory: PairMemory | None = None
    # time of a step of plain decoding, of sizes: of GPUs an estimate, else a floor
    plain_seconds: float | None = None

    @property
    def best(self) -> Candidate:
        """The draft to take: a tree if no chain is as fast; plain decoding, if neither is faster or
        has room.
        """
        tree = self.tree
        best = self.chain
        if tree is not None and tree.improvement > best.improvement * (1 + TOLERANCE):
            best = tree
        if self.fits and best.improvement * (1 - formulas.TIE) > 1:
            return best
        return self.chains[0]

    @property
    def near(self) -> tuple[int, ...]:
        """The gammas of other chains, 0 being plain decoding, whose speed is within 3% of the best
        one's.
        """
        if self.fits:
            least = self.improvement * (1 - TOLERANCE)
        else:
            least = math.inf
        return tuple(
            draft.gamma
            for draft in self.chains
            if draft != self.best and draft.improvement >= least
        )

    @property
    def at_cap(self) -> bool:
        """Says whether the best draft is the longest chain that was tried, so that a longer one may
        be better.
        """
        return bool(self.gamma) and not self.best.is_tree and self.gamma == len(self.chains) - 1

    chain = property(
        lambda self: _fastest(self.chains[1:] or self.chains),
        doc="The best, if it does not pay, too.",
    )
    tree = property(
        lambda self: _fastest(self.trees) if self.trees else None,
        doc="The best, if trees were tried.",
    )
    fits = property(
        lambda self: self.memory is None or self.memory.fits,
        doc="Whether the machine has room for both.",
    )
    gamma = property(
        lambda self: self.best.gamma,
        doc="Draft tokens a round (levels of a tree); 0: do not speculate.",
    )
    improvement = property(
        lambda self: self.best.improvement, doc="Speed over plain decoding, at most."
    )
    v = property(
        lambda self: (self.best if self.gamma else self.chain).verifying, doc="Of the best draft."
    )


def _fastest(drafts: Sequence[Candidate]) -> Candidate:
    least = max(draft.improvement for draft in drafts) * (1 - formulas.TIE)
    return next(draft for draft in drafts if draft.improvement >= least)


def plan(
    alpha: float | Sequence[float] | np.ndarray,
    c: ArrayLike,
    v: ArrayLike,
    *,
    c_hat: float | None = None,
    c_bytes: float | None = None,
    batch: int = 1,
    tokens: ArrayLike | None = None,
    independent: ArrayLike | None = None,
    trees: Sequence[Candidate] = (),
) -> Plan:
    """Finds the best draft and what it promises.

    Args:
        alpha: acceptance rate; or acceptance by rank, as `best_trees` takes it: then trees are
            planned.
        c: the cost of a pass of the drafter; or costs by the number of tokens that a pass is fed,
            from one.
        v: v(gamma) at index gamma; the gammas and the trees that are tried end with it.
        c_hat: operations of the drafter over the target's; c by default.
        c_bytes: bytes that a pass of the drafter reads over the target's; c_hat by default, the
            ratio of weights.
        batch: rows, for the record.
        tokens: measured tokens per round of chains at index gamma, which need no independence; by
            default Equation 1.
        independent: tokens per round of independent draft tokens in texts as long
            (`formulas.independent_tokens`), which tell short texts from clustered draft tokens;
            `tokens` by default.
        trees: other candidates; chains among them are left out.

    Raises:
        ValueError: a number out of range, or `tokens`, `independent` and `v` of different lengths.

    Example, then a machine with no compute to spare, and a tree by acceptance of the first and the
    second child:
        >>> best = plan(0.75, 0.02, [1.0] * 17)
        >>> best.gamma, round(best.improvement, 2), round(best.best.operations, 2), best.near
        (9, 3.2, 2.7, (7, 8, 10, 11, 12, 13))
        >>> busy = plan(0.75, 0.02, [1 + gamma for gamma in range(17)])
        >>> busy.gamma, busy.obstacles, busy.chain.gamma, round(busy.chain.improvement, 2)
        (0, ('no spare compute',), 1, 0.87)
        >>> plan([0.6, 0.2], 0.1, [1.0] * 7).best.shape
        ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
    """
    rates = np.asarray(alpha, np.float64)
    v = np.array(v, np.float64)
    by_width = np.array(c, np.float64, ndmin=1)
    if by_width.min() < 0 or v.min() <= 0:
        raise ValueError(
            f"c is {c} and v is {v}: expected costs, those of the target's passes above 0"
        )
    v[0], first_c, gammas = 1.0, float(by_width[0]), range(len(v))
    if c_hat is None:
        c_hat = first_c
    prices: dict[str, Any] = {"c": by_width, "v": v, "c_hat": c_hat, "c_bytes": c_bytes}
    if rates.ndim:
        first_child = by_count(rates)[:, 0, 0]
        trees = [
            *trees,
            *(
                price(shape, accepted, **prices)
                for shape, accepted in best_trees(rates, len(v) - 1)
            ),
        ]
        rates = first_child[0]
        expected = np.cumsum(
            np.cumprod([1.0, *first_child[np.minimum(gammas[:-1], len(first_child) - 1)]])
        )
    else:
        expected = formulas.expected_tokens(float(rates), gammas)
    expected = np.array(expected if tokens is None else tokens, np.float64)
    if independent is None:
        independent = expected
    else:
        independent = np.asarray(independent)
    if not len(expected) == len(independent) == len(v):
        counts = f"{len(expected)} and {len(independent)}"
        raise ValueError(
            f"got tokens per round for {counts} gammas and v for {len(v)}: expected as many"
        )
    expected[0] = 1.0
    chains = [price(replay.chain(gamma), expected[gamma], **prices) for gamma in gammas]
    planned = Plan(batch, float(rates), first_c, tuple(chains), formulas.break_even(first_c, v))
    planned = planned._replace(trees=tuple(draft for draft in trees if draft.is_tree))
    if planned.gamma:
        return planned
    pays = any(n > chain.cost for n, chain in zip(independent[1:], chains[1:], strict=True))
    # By Equation 1 some gamma may pay all the same.
    if pays:
        shortfall = "clustered draft tokens"
    else:
        shortfall = "short texts"
    return planned._replace(obstacles=formulas.obstacles(planned.alpha, first_c, v) or (shortfall,))


def price(
    shape: Choices,
    tokens_per_round: float,
    c: ArrayLike,
    v: Sequence[float] | np.ndarray,
    c_hat: float,
    draw: str = "",
    c_bytes: float | None = None,
) -> Candidate:
    """Adds up a round with a draft: a pass of the drafter for each level, and the target's over all
    nodes.

    Args:
        c: the cost of a pass of the drafter; or costs by the number of tokens that a pass is fed,
            from one. The first pass is fed two tokens, a later one the nodes of the level before
            that have children.
        v: the cost of the target's pass by the number of draft tokens, from none.
        c_hat: operations of the drafter over the target's.
        c_bytes: bytes that a pass of the drafter reads over the target's; c_hat by default.

    >>> price(
    ...     ((0,), (1,), (0, 0)), 2.0, c=[0.1, 0.11, 0.12], v=[1.0, 1.1, 1.2, 1.3], c_hat=0.1
    ... ).cost
    1.51
    """
    by_width = np.atleast_1d(c)
    depth = max(map(len, shape), default=0)
    parents = [
        len({node[:-1] for node in shape if len(node) == level}) for level in range(1, depth + 1)
    ]
    drafting = sum(
        float(by_width[min(fed, len(by_width)) - 1]) for fed in [2, *parents[1:]][:depth]
    )
    operations = (c_hat * sum(parents) + len(shape) + 1) / tokens_per_round
    # A level is one pass of the drafter, and the verify pass reads the target once (section 3.4).
    accesses = (depth * (c_hat if c_bytes is None else c_bytes) + 1) / tokens_per_round
    return Candidate(
        shape,
        float(tokens_per_round),
        drafting,
        verifying=float(v[len(shape)]),
        operations=float(operations),
        accesses=float(accesses),
        draw=draw,
    )


def of_sizes(
    alpha: float,
    target: str,
    draft: str,
    device: str,
    *,
    dtype: str = "bfloat16",
    row_tokens: int = 256,
    batch: int = 1,
    most: int = 16,
    c: float | None = None,
    c_hat: float | None = None,
    at_once: bool = False,
) -> Plan:
    """Plans for a machine of the table in `roofline`, by its memory, bandwidth and peak.

    Times of GPUs are estimates, from kernels that were measured on an H100. Those of others are
    floors.

    Args:
        alpha: acceptance rate.
        target, draft: published shapes, or parameters that decode, as "11B", with layers "76M:4".
        batch, most: rows, and the largest gamma to consider.
        c, c_hat: in place of those that follow from bytes, and from parameters.
        at_once: whether one pass of the drafter drafts all tokens, as a block drafter's does: c is
            its share of one.

    Raises:
        ValueError: unknown machine or size; or the two make no pair, because one has an encoder.

    >>> of_sizes(0.75, "11B", "77M", "tpu-v4").gamma
    12
    """
    chip = roofline.machine(device)
    check_pair(target, draft)
    target_load, draft_load = (
        roofline.load_of_size(size, dtype, row_tokens) for size in (target, draft)
    )
    if c_hat is None:
        c_hat = draft_load.parameters / target_load.parameters
    v = roofline.verify_cost(chip, target_load, range(most + 1), batch)
    gammas = np.maximum(range(most + 1), 1)
    if c is not None:
        by_gamma = 0.0 * gammas + c
    elif at_once:
        by_gamma = roofline.pass_time(chip, draft_load, batch, gammas + 1) / gammas
        by_gamma /= roofline.pass_time(chip, target_load, batch)
    else:
        by_gamma = roofline.draft_cost(chip, draft_load, target_load, batch, gammas)
    # c of one-token passes that only read memory
    draft_bytes_read = draft_load.bytes_read(batch) + batch * draft_load.row_bytes(1)
    target_bytes_read = target_load.bytes_read(batch) + batch * target_load.row_bytes(1)
    c_bytes = float(draft_bytes_read / target_bytes_read)
    # A recurrent drafter's passes cost more where drafts are longer, so each chain is priced by its
    # own c.
    plans = [
        plan(
            alpha,
            float(its_c),
            v,
            c_hat=c_hat,
            c_bytes=c_bytes / gamma if at_once else c_bytes,
            batch=batch,
        )
        for its_c, gamma in zip(by_gamma, gammas.tolist(), strict=True)
    ]
    chains = tuple(its_plan.chains[gamma] for gamma, its_plan in enumerate(plans))
    best = plans[plans[0]._replace(chains=chains).chain.gamma]
    best = best._replace(
        chains=chains, plain_seconds=float(roofline.pass_time(chip, target_load, batch))
    )
    if chip.memory is None:
        return best
    pair = (target, target_load), (draft, draft_load)
    target_bytes, draft_bytes = (
        _weight_bytes(size, load) + batch * load.cache_bytes for size, load in pair
    )
    best = best._replace(memory=PairMemory(target_bytes, draft_bytes, chip.memory))
    if best.fits:
        return best
    return best._replace(obstacles=("memory", *best.obstacles))


PADDED = 256  # ids by which vocabularies of one tokenizer may differ


def check_pair(target: str, draft: str) -> str:
    """Raises ValueError if `generate` cannot pair two shapes; the message names the requirement.
    Sizes such as "11B" say nothing.

    >>> check_pair("llama-3.1-8b", "t5-small")
    Traceback (most recent call last):
    ValueError: llama-3.1-8b is decoder-only and t5-small an encoder-decoder: expected two models of one kind
    >>> check_pair("llama-3.1-8b", "llama-3.2-1b"), check_pair("11B", "t5-small")
    ('', '')
    """
    configs = [roofline.shape_of(size) for size in (target, draft)]
    if any(config is None for config in configs):
        return ""
    models = [net_of(config).language_model(config) for config in configs]
    kinds = [
        "decoder-only" if lm.limits.start_token is None else "an encoder-decoder" for lm in models
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{target} is {kinds[0]} and {draft} {kinds[1]}: expected two models of one kind"
        )
    vocabularies = [lm.vocab_size for lm in models]
    if abs(vocabularies[0] - vocabularies[1]) <= PADDED:
        return ""
    return (
        f"{target} has {vocabularies[0]:,} tokens and {draft} {vocabularies[1]:,}: such a pair "
        "needs jaxspec.share_vocabulary, drafts only what both tokenizers have, and accepts less "
        "than one of a family"
    )


def _weight_bytes(size: str, load: roofline.Load) -> float:
    """Returns the bytes of all weights of a shape, including weights that prefill alone uses, or of
    a number of weights.
    """
    config = roofline.shape_of(size)
    if config is None:
        return load.weight_bytes
    # The shapes in this dtype are kept from the load.
    return memory.weight_bytes(dataclasses.replace(config, dtype=load.dtype), load.dtype)


def of_pair(
    prepared: Prepared,
    *,
    batches: Sequence[int] = (1,),
    most: int = 16,
    trees: bool = False,
    children: int = 8,
    repeats: int = cost.REPEATS,
    advance: Callable[[str], object] = lambda doing: None,
) -> Iterator[Plan]:
    """Measures a pair of models on prompts, and yields a plan for each batch size.

    Tokens per round come from replaying the rejection rule along the target's own texts (`replay`),
    for each draft. Another rule and truncations are not replayed: then draft tokens count
    as independent, in texts as long. c and v are timed at each batch size, v at some gammas.
    `Plan.measured` has their intervals. Trees come from `best_trees` for each draw, for acceptance
    by rank and then for acceptance by depth, too.

    Args:
        prepared: a generation with a target and a draft model. Its prompts begin again where a
            batch needs more.
        batches: batch sizes.
        most: the largest gamma to consider, and most nodes of a tree.
        trees: whether to plan trees, too; then the drafter's passes are timed over several tokens.
        children: most of a node.
        repeats: repeats of each timing.
        advance: called with what was done, `steps` times.

    Raises:
        ValueError: no draft tokens, or trees of a generation that cannot be replayed.

    Example, a drafter whose argmax is always right:
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table(max_new_tokens=8)
        >>> prepared = prepared.replace(drafter=prepared.target)
        >>> (plan,) = of_pair(prepared, most=3, trees=True, children=2, repeats=1)
        >>> plan.alpha, plan.measured.acceptance["top"].tolist()
        (1.0, [[1.0, 0.0], [1.0, 0.0]])
    """
    at_least(1, most=most)
    tokens = None
    ratios = dict[str, np.ndarray]()
    rule = prepared.options.rule
    draft = acceptance.drafting_model(prepared)
    if rule.lenience == 1 and replay.can_replay(prepared):
        trace = replay.collect(prepared)
        rate = replay.acceptance_rate(trace, rules.rejection())
        counts = trace.counts
        chain_ratios = replay.chain_ratios(trace, rules.rejection())
        chains = map(replay.chain, range(1, most + 1))
        tokens = [
            1.0,
            *(replay.tokens_per_round(chain, chain_ratios, counts).value for chain in chains),
        ]
        draws: Sequence[DrawName] = (DRAWS if trace.temperature else ("top",)) if trees else ()
        ratios = {draw: replay.tree_ratios(trace, draw, children) for draw in draws}
    elif trees:
        raise ValueError(
            f"trees are planned for the rejection rule, without {', '.join(KEEPS_ALL)}: leave "
            "these out"
        )
    else:
        measured = acceptance.measure(prepared)
        rate = measured.rate
        counts = measured.counts
    alpha = min(rate.value, 1.0)
    by_rank = {draw: by_position.mean(axis=0) for draw, by_position in ratios.items()}
    independent = [
        1.0,
        *(formulas.independent_tokens(alpha, counts, gamma) for gamma in range(1, most + 1)),
    ]
    if tokens is None:
        tokens = independent
    advance("alpha")
    c_hat = cost.operations_ratio(prepared.target, draft)
    for batch in batches:

        def timed(rows: Prepared, batch: int = batch) -> list[cost.Cost]:
            def compiled(gamma: int) -> object:
                return advance(f"batch {batch}, passes of gamma {gamma}")

            return cost.measure_all(
                rows, cost.gammas_up_to(most), repeats=repeats, advance=compiled
            )

        (group,) = batching.whole_batches(prepared, batch, batch)
        costs = timed(group)
        c = costs[0].c
        v = cost.interpolated_v(costs, most)
        if trees:  # c by width: the drafter's own v, where it takes the target's place
            alone = prepare(
                draft, group.prompt, **group.options.keywords() | {"drafter": draft, "policy": None}
            )
            c = c * cost.interpolated_v(timed(alone), most)
        prices: dict[str, Any] = {"c": c, "v": v, "c_hat": c_hat}
        tried = [
            tree
            for draw in ratios
            for tree in replayed_trees(ratios[draw], counts, most, draw, prices)
        ]
        advance(f"batch {batch}")
        best = plan(
            alpha, **prices, batch=batch, tokens=tokens, independent=independent, trees=tried
        )
        spreads = {passes.gamma: Spread.of(passes.v_each) for passes in costs}
        yield best._replace(measured=Measured(rate, Spread.of(costs[0].c_each), spreads, by_rank))


def replayed_trees(
    ratios: Float[np.ndarray, "N K K"],
    counts: Int[np.ndarray, " rows"],
    nodes: int,
    draw: str,
    prices: Mapping[str, Any],
) -> list[Candidate]:
    """Finds the best trees of some sizes up to `nodes`, by their tokens per round along texts.

    >>> often = np.broadcast_to(
    ...     [[0.5, 0.0], [0.5, 0.4]], (30, 2, 2)
    ... )  # the second child nearly as often as the first
    >>> candidates = replayed_trees(
    ...     often, np.array([30]), 2, "top", {"c": 0.1, "v": [1.0] * 3, "c_hat": 0.1}
    ... )
    >>> max(candidates, key=lambda draft: draft.improvement).shape
    ((0,), (1,))
    """
    # first as if all positions were alike
    rates = ratios.mean(axis=0)
    candidates = list[Candidate]()
    for _ in range(TREE_PASSES):
        tried = [
            price(shape, replay.tokens_per_round(shape, ratios, counts).value, **prices, draw=draw)
            for shape, _ in best_trees(
                np.clip(rates, 0, 1), nodes, cost.gammas_up_to(nodes, TREE_SIZES)
            )
        ]
        candidates += tried
        # then as rounds with the best tree meet them
        rates = replay.by_depth(_fastest(tried).shape, ratios, counts)
    return candidates


def steps(batches: Sequence[int], most: int, trees: bool = False) -> int:
    """Counts the calls of `advance` by `of_pair`."""
    return 1 + len(batches) * (len(cost.gammas_up_to(most)) * (2 if trees else 1) + 1)


def to_dict(plan: Plan) -> dict[str, Any]:
    """Returns a report of a plan, for JSON: the draft to take, the others, what they rest on, the
    advice in words.
    """

    def report(draft: Candidate) -> dict[str, Any]:
        return {"gamma": draft.gamma, "improvement": draft.improvement, **draft._asdict()}

    drafts: dict[str, Any] = {
        name: [report(draft) for draft in getattr(plan, name)] for name in ("chains", "trees")
    }
    drafts |= {"chain": report(plan.chain), "tree": plan.tree and report(plan.tree)}
    return (
        report(plan.best)
        | plan._asdict()
        | {"v": plan.v, "near": plan.near, "advice": sentence(plan)}
        | drafts
    )


def sentence(plan: Plan) -> str:
    """Says whether to speculate, and why.

    >>> sentence(plan(0.9, 0.1, [1.0] * 17))[:85]
    'Speculate with γ = 10: 6.86 tokens a round, in the time of 2.00 passes over one token'
    >>> sentence(plan(0.8, 0.0, [1.0] * 17)).partition("within 3% of that: ")[
    ...     2
    ... ]  # the longest draft is the best
    'γ = 13..15; larger γ were not tried.'
    >>> sentence(plan(0.75, 0.02, [1 + gamma for gamma in range(17)])).partition(", because ")[0]
    'Do not speculate: the best γ, 1, would have 0.87 times the speed of plain decoding'
    """
    best = plan.best
    chain = plan.chain
    tree = plan.tree
    size = ""
    if tree is not None:
        size = f"{len(tree.shape)} nodes, {tree.gamma} deep"
    if not plan.fits:
        return _no_room(plan)
    if not best.shape:
        tree_note = ""
        if tree is not None:
            tree_note = f" (the best tree, {size}, {tree.improvement:.2f} times)"
        return (
            f"Do not speculate: the best γ, {chain.gamma}, would have {chain.improvement:.2f} "
            f"times the speed of plain decoding{tree_note}, because "
            f"{', and '.join(map(_reasons(plan).__getitem__, plan.obstacles))}."
        )
    rows = ""
    if plan.batch > 1:
        rows = " (for each row; the batch waits for its slowest)"
    choices = ["plain decoding"] * (0 in plan.near)
    choices += (
        [f"γ = {table.runs([gamma for gamma in plan.near if gamma])}"] if any(plan.near) else []
    )
    also = ""
    if choices:
        also = f"; within {TOLERANCE:.0%} of that: {', '.join(choices)}"
    also += "; larger γ were not tried" if plan.at_cap else ""
    if best == tree:
        also = f"; the best chain, γ = {chain.gamma}, {chain.improvement:.2f} times"
    text = (
        f"Speculate with {f'a tree of {size}' if best == tree else f'γ = {best.gamma}'}: "
        f"{best.tokens_per_round:.2f} tokens a round, in the time of {best.cost:.2f} passes over "
        f"one token, are at most {best.improvement:.2f} times the speed of plain "
        f"decoding{rows}{also}."
    )
    if best == tree:
        draw = f", draw={best.draw!r}" if best.draw else ""
        return f"{text}\ndrafter = drafters.tree(draft, shape={best.shape}{draw})"
    if tree is not None:
        text += (
            f" The best tree ({size}) gains no more than {TOLERANCE:.0%} over it "
            f"({tree.improvement:.2f} times)."
        )
    if plan.measured is None:
        return text
    least, highest = (share * best.improvement for share in SHARE)
    perhaps = ""
    if least < 1:
        perhaps = ", so plain decoding may be as fast"
    of_texts = f"Whole texts had {SHARE[0]:g} to {SHARE[1]:g} of what passes promised"
    return f"{text} {of_texts}: {least:.2f} to {highest:.2f} times{perhaps}."


def _reasons(plan: Plan) -> dict[str, str]:
    alpha = plan.alpha
    chain = plan.chain
    pays_from = None
    if plan.break_even < 1:
        pays_from = math.ceil(100 * plan.break_even - 1e-4) / 100
    if pays_from is not None:
        pays = f"it would pay from α = {pays_from:.2f} on"
    else:
        pays = "not even α = 1 would pay"
    fewer = f"rounds yield fewer tokens than α = {alpha:.2f} promises"
    return {
        "low alpha": "draft tokens are accepted too rarely (α = "
        f"{math.floor(100 * alpha) / 100:.2f}; {pays})",
        "expensive draft": f"the drafter takes too long (c = {plan.c:.2f} passes of the target "
        "for each draft token)",
        "no spare compute": f"checking {chain.gamma + 1} tokens takes the time of "
        f"{chain.verifying:.2f} passes over "
        "one (v)",
        "clustered draft tokens": f"right draft tokens cluster, so that {fewer}",
        "short texts": f"texts are short, so that {fewer}",
    }


def _no_room(plan: Plan) -> str:
    """Says that a pair does not fit a machine, and how fast it would be where it fits."""
    assert plan.memory is not None
    target, draft, machine = map(filesize.decimal, map(int, plan.memory))
    alone = ""
    if plan.memory.target > plan.memory.machine:
        alone = ", where not even the target fits"
    return (
        f"Do not speculate: weights and caches take {target} (target) and {draft} (drafter), and "
        f"the machine has {machine}{alone}. With room for both, γ = {plan.chain.gamma} would have "
        f"at most {plan.chain.improvement:.2f} times the speed of plain decoding."
    )
