"""Plans: whether to speculate, with which gamma or tree, and what it promises, by a pair's own numbers.

`plan` takes numbers, `of_sizes` a machine's data sheet, and `of_pair` and `tree_of_pair` measure: `Plan` is of chains,
and `TreePlan` of trees, a chain being a tree with one child a node.

Shapes: M tokens of a pass at most, K children of a node at most, L levels.

References: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, section 3.5; Chen et al., Sequoia, arXiv 2402.12374.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from rich import filesize

from jaxspec import rules
from jaxspec.analysis import acceptance, aot, cost, formulas, memory, replay, roofline
from jaxspec.analysis.optimal_tree import DEEPEST, PlannedTree, best_of_size
from jaxspec.analysis.statistics import Rate, Spread
from jaxspec.decode import batches as batching
from jaxspec.decode.request import Prepared, prepare
from jaxspec.drafters.trees.children import DrawName
from jaxspec.drafters.trees.shape import Choices, shape_of

# Gammas whose verify pass is timed: those over 2, 3, 4, 5, 6, 8, 12, 16, ... tokens, where v has its steps, and over 9
# and 17, after two of them. It is taken to be linear between them.
TIMED = (1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 23, 31, 47, 63)
COMPILED = 5  # of the two gammas whose rounds are compiled for a TPU, the lesser; the other is the largest in question
TOLERANCE = (
    0.03  # a speed is near the best if it is less by no more than this part; a chain is preferred to such a tree
)
SHARE = (0.8, 1.0)  # speeds of whole texts over a measured pair's promise: the least and the largest median in docs/
TREE_PASSES = 2  # of the dynamic program: the second knows where rounds with the tree of the first come to judge it
TREE_SIZES = 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64  # nodes of the trees that are tried
GREEDY: tuple[DrawName, ...] = ("top",)
SAMPLED: tuple[DrawName, ...] = ("without_replacement", "mixed")


class Measured(NamedTuple):
    """The measurements that a pair's plan rests on.

    Attributes:
        alpha: over all positions of the target's own texts.
        c, v: over the repeats; v by the gammas that were timed.
    """

    alpha: Rate
    c: Spread
    v: dict[int, Spread]


class PairMemory(NamedTuple):
    """The memory of a pair on a machine, in bytes.

    Attributes:
        target, draft: weights, and the caches of all rows.
        machine: the machine's memory.
    """

    target: float
    draft: float
    machine: float

    fits = property(lambda self: self.target + self.draft <= self.machine, doc="Whether there is room for both.")


class Plan(NamedTuple):
    """The gamma to take at one batch size, and what it promises.

    Tokens per round, and so the speed, are those of a row. A batch goes on until its slowest row is done: the more
    rows, and the less alike they are, the further its own speed falls short of this.

    Attributes:
        batch: rows.
        gamma: the best number of draft tokens a round; 0: do not speculate.
        tokens_per_round: expected, of a row; 1 at gamma 0.
        improvement: speed over plain decoding, at most: whole texts have `SHARE` of it.
        operations: arithmetic operations over those of plain decoding.
        v: the verify pass, at gamma or, if that is 0, at `best`.
        break_even: the alpha above which speculation would pay.
        obstacles: why not, if gamma is 0: "memory", if the machine has no room for both models; as in
            `formulas.obstacles`; or, where measured tokens per round are fewer than in Equation 1, "short texts", if
            those of independent draft tokens would be fewer, too, else "clustered draft tokens".
        best, best_improvement: the best gamma above 0, and its speed, where speculation does not pay, too.
        near: the other gammas whose speed is within 3% of this one's.
        measured: the measurements behind alpha, c and v, of a pair; None of numbers and sizes.
        memory: of sizes on a machine whose memory is known; None of others.
    """

    batch: int
    gamma: int
    tokens_per_round: float
    improvement: float
    operations: float
    alpha: float
    c: float
    v: float
    break_even: float
    obstacles: tuple[str, ...]
    best: int
    best_improvement: float
    near: tuple[int, ...] = ()
    measured: Measured | None = None
    memory: PairMemory | None = None


def plan(
    alpha: float,
    c: float,
    v: Sequence[float] | np.ndarray,
    *,
    c_hat: float | None = None,
    batch: int = 1,
    tokens: Sequence[float] | np.ndarray | None = None,
    independent: Sequence[float] | np.ndarray | None = None,
) -> Plan:
    """Finds the best gamma and what it promises.

    Args:
        v: v(gamma) at index gamma; the gammas that are tried end with it.
        c_hat: operations of the drafter over the target's; c by default.
        batch: rows, for the record.
        tokens: measured tokens per round at index gamma, which need no independence; by default Equation 1.
        independent: tokens per round of independent draft tokens in texts as long (`formulas.independent_tokens`),
            which tell short texts from clustered draft tokens; `tokens` by default.

    Raises:
        ValueError: a number out of range, or `tokens`, `independent` and `v` of different lengths.

    Example, then a machine with no compute to spare:
        >>> best = plan(0.75, 0.02, [1.0] * 17)
        >>> best.gamma, round(best.improvement, 2), round(best.operations, 2), best.near
        (9, 3.2, 2.7, (7, 8, 10, 11, 12, 13))
        >>> busy = plan(0.75, 0.02, [1 + gamma for gamma in range(17)])
        >>> busy.gamma, busy.obstacles, busy.best, round(busy.best_improvement, 2)
        (0, ('no spare compute',), 1, 0.87)
    """
    costs, gammas = np.array(v, np.float64), np.arange(len(v))
    for counts in (tokens, independent):
        if counts is not None and len(counts) != len(costs):
            raise ValueError(f"got tokens per round for {len(counts)} gammas and v for {len(costs)}: expected as many")
    expected = formulas.expected_tokens(alpha, gammas) if tokens is None else np.array(tokens, np.float64)
    costs[0] = expected[0] = 1.0
    times = gammas * c + costs
    speed = expected / times
    gamma, best = (
        first + int(np.argmax(speed[first:] >= speed[first:].max() * (1 - formulas.TIE)))
        for first in (0, min(1, len(costs) - 1))
    )
    obstacles: tuple[str, ...] = ()
    if gamma == 0:  # by Equation 1 some gamma may pay all the same
        if_independent = expected if independent is None else np.array(independent)
        shortfall = "clustered draft tokens" if bool((if_independent > times)[1:].any()) else "short texts"
        obstacles = formulas.obstacles(alpha, c, costs) or (shortfall,)
    return Plan(
        batch,
        gamma,
        tokens_per_round=float(expected[gamma]),
        improvement=float(speed[gamma]),
        operations=float((gamma * (c if c_hat is None else c_hat) + gamma + 1) / expected[gamma]),
        alpha=float(alpha),
        c=float(c),
        v=float(costs[best if gamma == 0 else gamma]),
        break_even=formulas.break_even(c, costs),
        obstacles=obstacles,
        best=best,
        best_improvement=float(speed[best]),
        near=tuple(int(g) for g in gammas[speed >= speed[gamma] * (1 - TOLERANCE)] if g != gamma),
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
) -> Plan:
    """Plans for a machine of the table in `roofline`, by its memory, bandwidth and peak; real passes are slower.

    Args:
        alpha: acceptance rate.
        target, draft: published shapes, or parameters that decode, as "11B".
        device, dtype, row_tokens: as `roofline.machine` and `roofline.load_of_size` take them.
        batch, most: rows, and the largest gamma to consider.
        c, c_hat: in place of those that follow from bytes, and from parameters.

    >>> of_sizes(0.75, "11B", "77M", "tpu-v4").gamma
    12
    """
    chip = roofline.machine(device)
    target_load, draft_load = (roofline.load_of_size(size, dtype, row_tokens) for size in (target, draft))
    c = float(roofline.draft_cost(chip, draft_load, target_load, batch)) if c is None else c
    c_hat = draft_load.parameters / target_load.parameters if c_hat is None else c_hat
    best = plan(alpha, c, roofline.verify_cost(chip, target_load, range(most + 1), batch), c_hat=c_hat, batch=batch)
    if chip.memory is None:
        return best
    target_bytes, draft_bytes = (
        _weight_bytes(size, load) + batch * load.cache_bytes
        for size, load in ((target, target_load), (draft, draft_load))
    )
    best = best._replace(memory=PairMemory(target_bytes, draft_bytes, chip.memory))
    if target_bytes + draft_bytes <= chip.memory:
        return best
    plain = {"gamma": 0, "tokens_per_round": 1.0, "improvement": 1.0, "operations": 1.0, "near": ()}
    return best._replace(**plain, obstacles=("memory", *best.obstacles))


def of_compiled(
    alpha: float,
    prepared: Prepared,
    topology: str,
    *,
    most: int = 16,
    advance: Callable[[str], object] = lambda doing: None,
) -> Plan:
    """Plans for a TPU that is not here, by what its compiler estimates of the very programs (`aot`): some minutes.

    Plain decoding and rounds with two gammas are compiled; v is taken to be linear between them.

    Args:
        alpha: acceptance rate.
        prepared: of a target and a model that drafts; shapes will do (`aot.shape_model`).
        topology: as `aot.estimate` takes it, for one chip.
        most: the largest gamma to consider.
        advance: called before each of the programs, `compiled_programs(most)` of them.

    Raises:
        ImportError: libtpu, the compiler, is not installed.
        ValueError: no such topology, or the pair does not fit it.
    """
    gammas, estimates = sorted({min(COMPILED, most), most}), list[aot.Estimate]()
    for gamma in gammas:
        plain = estimates[0].compiled["plain"] if estimates else None
        estimates.append(aot.estimate(prepared.replace(gamma=gamma), topology, plain=plain, advance=advance))
    v = np.interp(np.arange(most + 1), [0, *gammas], [1.0, *(estimate.v for estimate in estimates)])
    c_hat = cost.operations_ratio(prepared.target, acceptance.drafting_model(prepared))
    return plan(alpha, estimates[0].c, v, c_hat=c_hat, batch=estimates[0].batch)


def compiled_programs(most: int) -> int:
    """Counts the programs that `of_compiled` compiles.

    >>> compiled_programs(4), compiled_programs(16)
    (2, 3)
    """
    return 1 + len({min(COMPILED, most), most})


def _weight_bytes(size: str, load: roofline.Load) -> float:
    """Returns the bytes of all weights of a published shape, those of prefill alone too; of a number, of so many."""
    shapes = roofline.published_shapes()
    return memory.of_config(size, shapes[size]).memory_bytes[load.dtype] if size in shapes else load.weight_bytes


def of_pair(
    prepared: Prepared,
    *,
    batches: Sequence[int] = (1,),
    most: int = 16,
    repeats: int = cost.REPEATS,
    advance: Callable[[str], object] = lambda doing: None,
) -> Iterator[Plan]:
    """Measures a pair of models on prompts, and yields a plan for each batch size.

    Tokens per round are those of replaying the rejection rule along the target's own texts (`replay`), for each gamma;
    of another rule, or with more sampling options, those of independent draft tokens in texts as long. c and v are
    timed at each batch size, v at some gammas. `Plan.measured` has how sure these numbers are.

    Args:
        prepared: of a target and a model that drafts; its prompts begin again where a batch needs more.
        batches: batch sizes.
        most: the largest gamma to consider.
        repeats: of each timing.
        advance: called with what was done, `steps` times.

    Example:
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table(max_new_tokens=8)
        >>> [plan.alpha for plan in of_pair(prepared.replace(drafter=prepared.target), most=1, repeats=1)]
        [1.0]
    """
    if most < 1:
        raise ValueError(f"most is {most}: expected at least 1 draft token a round")
    tokens = None
    if _can_be_replayed(prepared):
        trace = replay.collect(prepared)
        rate, counts = replay.acceptance_rate(trace, rules.rejection()), trace.counts
        tokens = tokens_by_gamma(trace, most)
    else:
        measured = acceptance.measure(prepared)
        rate, counts = measured.rate, measured.counts
    alpha = min(rate.value, 1.0)
    independent = [1.0, *(formulas.independent_tokens(alpha, counts, gamma) for gamma in range(1, most + 1))]
    tokens = independent if tokens is None else tokens
    advance("alpha")
    c_hat = cost.operations_ratio(prepared.target, acceptance.drafting_model(prepared))
    for batch in batches:
        (group,) = batching.whole_batches(prepared, batch, batch)

        def compiled(gamma: int, batch: int = batch) -> None:
            advance(f"batch {batch}, passes of gamma {gamma}")

        costs = cost.measure_all(group, timed_gammas(most), repeats=repeats, advance=compiled)
        advance(f"batch {batch}")
        c, v = interpolate_costs(costs, most)
        best = plan(alpha, c, v, c_hat=c_hat, batch=batch, tokens=tokens, independent=independent)
        spreads = {timed.gamma: Spread.of(timed.v_each) for timed in costs}
        yield best._replace(measured=Measured(Rate.of(rate), Spread.of(costs[0].c_each), spreads))


def tokens_by_gamma(trace: replay.LogitTrace, most: int) -> list[float]:
    """Replays the rejection rule along texts, for the tokens per round at gamma = 0, 1, ..., most."""
    ratios = replay.chain_ratios(trace, rules.rejection())
    rates = (replay.tokens_per_round(replay.chain(gamma), ratios, trace.counts) for gamma in range(1, most + 1))
    return [1.0, *(rate.value for rate in rates)]


def _can_be_replayed(prepared: Prepared) -> bool:
    """Tells whether a generation is by the rejection rule, with no other sampling option than a temperature."""
    rule = prepared.options["rule"]
    return (rule is None or rule.lenience == 1) and replay.has_temperature_alone(prepared)


def interpolate_costs(costs: Sequence[cost.Cost], most: int) -> tuple[float, np.ndarray]:
    """Returns c, and v by gamma, linear between those that were timed.

    >>> passes = np.ones(1)
    >>> costs = [cost.Cost(gamma, 1, passes, v * passes, 0.1 * passes) for gamma, v in ((1, 1.5), (3, 2.0))]
    >>> interpolate_costs(costs, 4)[1].tolist()
    [1.0, 1.5, 1.75, 2.0, 2.0]
    """
    gammas, v = zip(*sorted((timed.gamma, timed.v) for timed in costs), strict=True)
    return costs[0].c, np.interp(np.arange(most + 1), [0, *gammas], [1.0, *v])


def timed_gammas(most: int) -> tuple[int, ...]:
    """Lists the gammas at which v is timed, up to `most`.

    >>> timed_gammas(9)
    (1, 2, 3, 4, 5, 7, 8, 9)
    """
    return (*(gamma for gamma in TIMED if gamma < most), most)


def steps(batches: Sequence[int], most: int) -> int:
    """Counts the calls of `advance` by `of_pair`."""
    return 1 + len(batches) * (len(timed_gammas(most)) + 1)


class TreePlan(NamedTuple):
    """The draft to take, if it may be a tree.

    Attributes:
        tree, chain: the best of each kind; a chain's shape is a tree's with one child a node.
        acceptance: of each draw, by number of children and rank [K, K].
        c, v: costs of passes: the drafter's, by the number of tokens it is fed, and the target's, by the number of
            draft tokens (0: 1.0).
    """

    tree: PlannedTree
    chain: PlannedTree
    acceptance: dict[DrawName, Float[np.ndarray, "K K"]]
    c: Float[np.ndarray, " M"]
    v: Float[np.ndarray, " M"]

    @property
    def best(self) -> PlannedTree:
        """The tree, unless it is hardly faster than the chain, or neither is than plain decoding."""
        best = self.tree if self.tree.improvement > self.chain.improvement * (1 + TOLERANCE) else self.chain
        return best if best.improvement > 1 else PlannedTree((), 1.0, 1.0, self.tree.draw)


def tree_of_pair(
    prepared: Prepared, *, nodes: int = 32, children: int = 8, batch: int = 1, repeats: int = cost.REPEATS
) -> TreePlan:
    """Measures a pair on prompts, and plans its tree.

    For each draw and each number of nodes and levels the dynamic program of `optimal_tree` gives the best shape, for
    acceptance by rank and then for acceptance by depth, too; of these the one counts whose replayed tokens per round
    cost least.

    Args:
        prepared: of a target and a model that drafts, with a temperature and no other sampling options.
        nodes: most draft tokens.
        children: most of one node.
        batch: rows of the passes that are timed.
        repeats: of each timing.

    Example:
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table(max_new_tokens=8)
        >>> plan = tree_of_pair(prepared.replace(drafter=prepared.target), nodes=3, children=2, repeats=1)
        >>> plan.acceptance["top"].tolist()  # its own argmax is always right
        [[1.0, 0.0], [1.0, 0.0]]
    """
    (group,) = batching.whole_batches(prepared, batch, batch)
    c, v = tree_costs(group, nodes, repeats)
    trace = replay.collect(prepared)
    counts, ratios, trees = trace.counts, dict[DrawName, np.ndarray](), list[PlannedTree]()
    for draw in SAMPLED if trace.temperature else GREEDY:
        ratios[draw] = replay.tree_ratios(trace, draw, children)
        rates = ratios[draw].mean(axis=0)  # first as if all positions were alike
        for _ in range(TREE_PASSES):
            tried = []
            for shape in shapes(rates, nodes):
                tokens = replay.tokens_per_round(shape, ratios[draw], counts).value
                tried.append(PlannedTree(shape, tokens, round_cost(shape, c, v), draw))
            trees += tried
            # Then as rounds with the best tree meet them.
            rates = replay.by_depth(_fastest(tried).shape, ratios[draw], counts)
    chains = [tree for tree in trees if len(tree.shape) == tree.depth]
    trees = [tree for tree in trees if len(tree.shape) > tree.depth] or chains
    by_rank: dict[DrawName, np.ndarray] = {draw: values.mean(axis=0) for draw, values in ratios.items()}
    return TreePlan(_fastest(trees), _fastest(chains), by_rank, c, v)


def _fastest(trees: Sequence[PlannedTree]) -> PlannedTree:
    return max(trees, key=lambda tree: tree.improvement)


def shapes(acceptance: Float[np.ndarray, "*L K K"], nodes: int) -> list[Choices]:
    """Lists the best tree of each of a number of sizes, the chains among them.

    >>> shapes(np.array([[0.5, 0.0], [0.5, 0.2]]), 2)
    [((0,),), ((0,), (0, 0)), ((0,), (1,))]
    """
    longest = min(nodes, DEEPEST)
    trees = [replay.chain(n) for n in range(1, longest + 1)]
    for size in (*(n for n in TREE_SIZES if n < nodes), nodes):
        for depth in range(1, min(size, longest + 1)):
            shape = best_of_size(np.clip(acceptance, 0, 1), size, depth)
            trees += [shape] if (len(shape), max(map(len, shape))) == (size, depth) else []
    return list(dict.fromkeys(trees))


def tree_costs(
    prepared: Prepared, most: int, repeats: int = cost.REPEATS
) -> tuple[Float[np.ndarray, " M"], Float[np.ndarray, " M"]]:
    """Measures the costs of passes over several tokens, in passes of the target over one token.

    Returns:
        The drafter's over 1, 2, .. most + 1 tokens (from index 0), and the target's with 0, 1, .. most draft tokens;
        timed at some widths, and linear between them.
    """
    draft = acceptance.drafting_model(prepared)
    widths = timed_gammas(most)
    c, v = interpolate_costs(cost.measure_all(prepared, widths, repeats=repeats), most)
    # The drafter's own v: it takes the target's place.
    by_itself = prepare(draft, prepared.prompt, **dict(prepared.options) | {"drafter": draft, "policy": None})
    return c * interpolate_costs(cost.measure_all(by_itself, widths, repeats=repeats), most)[1], v


def round_cost(choices: Sequence[Sequence[int]], c: Float[np.ndarray, " M"], v: Float[np.ndarray, " M"]) -> float:
    """Adds up a round with a tree: a pass of the drafter for each level (the first reads two tokens), and the target's.

    >>> round_cost(((0,), (1,), (0, 0)), np.array([0.1, 0.11, 0.12]), np.array([1.0, 1.1, 1.2, 1.3]))
    1.51
    """
    shape = shape_of(choices)
    fed = [2, *(len(level.parents) for level in shape.levels[1:])]
    return float(v[len(shape.parents)] + sum(c[min(n, len(c)) - 1] for n in fed))


def to_dict(plan: Plan | TreePlan) -> dict[str, Any]:
    """Returns a report of a plan, for JSON, with the advice in words."""
    if isinstance(plan, Plan):
        return plan._asdict() | {"advice": sentence(plan)}
    trees = {
        name: tree._asdict() | {"depth": tree.depth, "improvement": tree.improvement}
        for name, tree in (("tree", plan.tree), ("chain", plan.chain), ("best", plan.best))
    }
    return {**trees, "acceptance": plan.acceptance, "c": plan.c, "v": plan.v, "advice": sentence(plan)}


def sentence(plan: Plan | TreePlan) -> str:
    """Says whether to speculate, and why.

    >>> sentence(plan(0.9, 0.1, [1.0] * 17))[:85]
    'Speculate with γ = 10: 6.86 tokens a round, in the time of 2.00 passes over one token'
    >>> sentence(plan(0.75, 0.02, [1 + gamma for gamma in range(17)])).partition(", because ")[0]
    'Do not speculate: the best γ, 1, would have 0.87 times the speed of plain decoding'
    """
    if isinstance(plan, TreePlan):
        return _sentence_of_tree(plan)
    if plan.gamma:
        rows = " (for each row; the batch waits for its slowest)" if plan.batch > 1 else ""
        near = [f"γ = {_runs([gamma for gamma in plan.near if gamma])}"] if any(plan.near) else []
        near = ", ".join([*["plain decoding"] * (0 in plan.near), *near])
        return (
            f"Speculate with γ = {plan.gamma}: {plan.tokens_per_round:.2f} tokens a round, in the time of "
            f"{plan.gamma * plan.c + plan.v:.2f} passes over one token, are at most {plan.improvement:.2f} times "
            f"the speed of plain decoding{rows}{f'; within {TOLERANCE:.0%} of that: {near}' if near else ''}."
            + ("" if plan.measured is None else f" {_of_whole_texts(plan.improvement)}")
        )
    if plan.memory is not None and not plan.memory.fits:
        return _no_room(plan, plan.memory)
    pays_from = math.ceil(100 * plan.break_even - 1e-4) / 100 if plan.break_even < 1 else None
    pays = f"it would pay from α = {pays_from:.2f} on" if pays_from is not None else "not even α = 1 would pay"
    fewer = f"rounds yield fewer tokens than α = {plan.alpha:.2f} promises"
    why = {
        "low alpha": f"draft tokens are accepted too rarely (α = {math.floor(100 * plan.alpha) / 100:.2f}; {pays})",
        "expensive draft": f"the drafter takes too long (c = {plan.c:.2f} passes of the target for each draft token)",
        "no spare compute": f"checking {plan.best + 1} tokens takes the time of {plan.v:.2f} passes over one (v)",
        "clustered draft tokens": f"right draft tokens cluster, so that {fewer}",
        "short texts": f"texts are short, so that {fewer}",
    }
    return (
        f"Do not speculate: the best γ, {plan.best}, would have {plan.best_improvement:.2f} times the speed of plain "
        f"decoding, because {', and '.join(why[name] for name in plan.obstacles)}."
    )


def _sentence_of_tree(plan: TreePlan) -> str:
    best, tree, chain = plan.best, plan.tree, plan.chain
    if not best.shape:
        return (
            f"Do not speculate: the best tree ({len(tree.shape)} nodes) would be at most {tree.improvement:.2f} times "
            f"as fast as plain decoding, the best chain (γ = {chain.depth}) {chain.improvement:.2f} times."
        )
    if best is not chain:
        return (
            f"Take a tree of {len(best.shape)} nodes, {best.depth} deep, draw {best.draw!r}: "
            f"{best.tokens_per_round:.2f} tokens in the time of {best.cost:.2f} passes, at most "
            f"{best.improvement:.2f} times the speed of plain decoding; the best chain, γ = {chain.depth}, "
            f"{chain.improvement:.2f} times.\ndrafter = drafters.tree(draft, shape={best.shape}, draw={best.draw!r})"
        )
    advice = (
        f"Take a chain, γ = {chain.depth}: {chain.tokens_per_round:.2f} tokens in the time of {chain.cost:.2f} passes, "
        f"at most {chain.improvement:.2f} times the speed of plain decoding."
    )
    if tree is chain:
        return advice
    return (
        f"{advice} The best tree ({len(tree.shape)} nodes, {tree.depth} deep) gains no more than {TOLERANCE:.0%} over "
        f"it ({tree.tokens_per_round:.2f} tokens, {tree.improvement:.2f} times)."
    )


def _of_whole_texts(improvement: float) -> str:
    """Qualifies a measured pair's promise by the pairs of docs/results.md.

    >>> _of_whole_texts(1.5)
    'Whole texts had 0.8 to 1 of what passes promised: 1.20 to 1.50 times.'
    """
    least, most = (share * improvement for share in SHARE)
    range_ = f"{least:.2f} to {most:.2f} times" + (", so plain decoding may be as fast" if least < 1 else "")
    return f"Whole texts had {SHARE[0]:g} to {SHARE[1]:g} of what passes promised: {range_}."


def _no_room(plan: Plan, memory: PairMemory) -> str:
    """Says that a pair does not fit a machine, and how fast it would be where it fits."""
    target, draft, machine = map(filesize.decimal, map(int, memory))
    alone = ", where not even the target fits" if memory.target > memory.machine else ""
    return (
        f"Do not speculate: weights and caches take {target} (target) and {draft} (drafter), and the machine has "
        f"{machine}{alone}. With room for both, γ = {plan.best} would have at most {plan.best_improvement:.2f} times "
        "the speed of plain decoding."
    )


def _runs(numbers: Sequence[int]) -> str:
    """Writes rising integers, three or more without a gap as the first and the last.

    >>> _runs([1, 2, 4, 5, 6, 9])
    '1, 2, 4..6, 9'
    """
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(
        f"{a}..{b}" if b > a + 1 else ", ".join(map(str, range(a, b + 1))) for a, b in zip(starts, ends, strict=True)
    )
