"""Whether to speculate, with which gamma, and what it promises: theory with a pair's own numbers in it.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, section 3.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from rich import filesize

from jaxspec import rules
from jaxspec.analysis import acceptance, cost, expected_rounds, formulas, memory, replay, roofline
from jaxspec.analysis.statistics import Rate, Spread
from jaxspec.core import Model
from jaxspec.decode import batches as batching
from jaxspec.decode.request import Prepared
from jaxspec.drafters.lookups.ngram_model import NGramConfig
from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import int8
from jaxspec.weights.hf_families import FAMILIES

# Gammas whose verify pass is timed: those over 2, 3, 4, 5, 6, 8, 12, 16, ... tokens, where v has its steps, and over 9
# and 17, after two of them. It is taken to be linear between them.
TIMED = (1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 23, 31, 47, 63)
TOLERANCE = 0.03  # the speed of a gamma is near the best if it is less by no more than this part
SHARE = (0.8, 1.0)  # of a measured pair's promise, what whole texts had: from the least to the largest median in docs/


class Measured(NamedTuple):
    """What the numbers of a pair's plan rest on.

    Attributes:
        alpha: over all positions of the target's own texts.
        c, v: over the repeats; v by the gammas that were timed.
    """

    alpha: Rate
    c: Spread
    v: dict[int, Spread]


class Memory(NamedTuple):
    """What a pair takes of a machine's memory, in bytes.

    Attributes:
        target, draft: weights, and the caches of all rows.
        machine: what there is.
    """

    target: float
    draft: float
    machine: float

    fits = property(lambda self: self.target + self.draft <= self.machine, doc="Whether there is room for both.")


class Plan(NamedTuple):
    """What to do at one batch size.

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
        best, best_improvement: the best gamma above 0, and its speed: what speculation comes to where it does not pay.
        near: the other gammas whose speed is within 3% of this one's.
        measured: of a pair, what alpha, c and v rest on; None of given numbers.
        memory: of sizes on a machine, what they take of it; None of others.
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
    memory: Memory | None = None


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
    """The best gamma and what it promises.

    Args:
        v: v(gamma) at index gamma; the gammas that are tried end with it.
        c_hat: operations of the drafter over the target's; c by default.
        batch: rows, for the record.
        tokens: measured tokens per round at index gamma, which need no independence; by default Equation 1.
        independent: those of independent draft tokens in texts of the same lengths, as of
            `expected_rounds.independent_tokens`; they tell short texts from clustered draft tokens; default `tokens`.

    Raises:
        ValueError: a number out of range, or `tokens`, `independent` and `v` of different lengths.

    Example, then a machine with no compute to spare:
        >>> found = plan(0.75, 0.02, [1.0] * 17)
        >>> found.gamma, round(found.improvement, 2), round(found.operations, 2), found.near
        (9, 3.2, 2.7, (7, 8, 10, 11, 12, 13))
        >>> found = plan(0.75, 0.02, [1 + gamma for gamma in range(17)])
        >>> found.gamma, found.obstacles, found.best, round(found.best_improvement, 2)
        (0, ('no spare compute',), 1, 0.87)
    """
    costs, gammas = np.array(v, np.float64), np.arange(len(v))
    for given in (tokens, independent):
        if given is not None and len(given) != len(costs):
            raise ValueError(f"got tokens per round for {len(given)} gammas and v for {len(costs)}: expected as many")
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
        alone = expected if independent is None else np.array(independent)
        shortfall = "clustered draft tokens" if bool((alone > times)[1:].any()) else "short texts"
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
    """A plan for a machine that is not here, by its memory, bandwidth and peak; real passes are slower.

    Args:
        alpha: acceptance rate.
        target, draft: published shapes, or parameters that decode, as "11B".
        device, dtype, row_tokens: as `roofline.machine` and `roofline.load_of_size` take them.
        batch, most: rows, and the largest gamma to consider.
        c, c_hat: if they are known; else by bytes, and by parameters.

    >>> of_sizes(0.75, "11B", "77M", "tpu-v4").gamma
    12
    """
    chip = roofline.machine(device)
    big, small = (roofline.load_of_size(size, dtype, row_tokens) for size in (target, draft))
    each = float(roofline.draft_cost(chip, small, big, batch)) if c is None else c
    ratio = small.parameters / big.parameters if c_hat is None else c_hat
    found = plan(alpha, each, roofline.verify_cost(chip, big, range(most + 1), batch), c_hat=ratio, batch=batch)
    if chip.memory is None:
        return found
    taken, drafting = (
        _weight_bytes(size, load) + batch * load.cache_bytes for size, load in ((target, big), (draft, small))
    )
    room = Memory(taken, drafting, chip.memory)
    found = found._replace(memory=room)
    if room.fits:
        return found
    plain = {"gamma": 0, "tokens_per_round": 1.0, "improvement": 1.0, "operations": 1.0, "near": ()}
    return found._replace(**plain, obstacles=("memory", *found.obstacles))


def _weight_bytes(size: str, load: roofline.Load) -> float:
    """Bytes of all weights of a published shape, those that only prefill reads too; of a number, of so many."""
    shapes = {name: config for family in FAMILIES for name, config in family.sizes.items()}
    return memory.of_config(size, shapes[size]).memory_bytes[load.dtype] if size in shapes else load.weight_bytes


def of_pair(
    prepared: Prepared,
    *,
    batches: Sequence[int] = (1,),
    most: int = 16,
    repeats: int = cost.REPEATS,
    advance: Callable[[str], object] = lambda doing: None,
) -> Iterator[Plan]:
    """Plans for a pair of models, from what is measured on prompts.

    Tokens per round are those of replaying the rejection rule along the target's own texts (`replay`), for each gamma;
    of another rule, or with more sampling options, those of independent draft tokens in texts as long. c and v are
    timed at each batch size, v at some gammas. `Plan.measured` has how sure these numbers are.

    Args:
        prepared: of a target and a model that drafts; its prompts
            begin again where a batch needs more.
        batches: batch sizes.
        most: the largest gamma to consider.
        repeats: of each timing.
        advance: called with what was done, `steps` times.

    Example:
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table(max_new_tokens=8)
        >>> [found.alpha for found in of_pair(prepared.replace(drafter=prepared.target), most=1, repeats=1)]
        [1.0]
    """
    if most < 1:
        raise ValueError(f"most is {most}: expected at least 1 draft token a round")
    tokens = None
    if _can_be_replayed(prepared):
        trace = replay.collect(prepared)
        rate, tokens, counts = (
            replay.acceptance_rate(trace, rules.rejection()),
            tokens_by_gamma(trace, most),
            trace.counts,
        )
    else:
        measured = acceptance.measure(prepared)
        rate, counts = measured.rate, measured.counts
    alpha = min(rate.value, 1.0)
    independent = [1.0, *(expected_rounds.independent_tokens(alpha, counts, gamma) for gamma in range(1, most + 1))]
    advance("alpha")
    ratio = operations_ratio(prepared.target, acceptance.drafting_model(prepared))
    for batch in batches:
        (group,) = batching.whole_batches(prepared, batch, batch)

        def compiled(gamma: int, batch: int = batch) -> None:
            advance(f"batch {batch}, passes of gamma {gamma}")

        found = cost.measure_all(group, timed_gammas(most), repeats=repeats, advance=compiled)
        advance(f"batch {batch}")
        known = {"tokens": independent if tokens is None else tokens, "independent": independent}
        made = plan(alpha, *interpolate_costs(found, most), c_hat=ratio, batch=batch, **known)
        v = {one.gamma: Spread.of(one.v_each) for one in found}
        yield made._replace(measured=Measured(Rate.of(rate), Spread.of(found[0].c_each), v))


def tokens_by_gamma(trace: replay.LogitTrace, most: int) -> list[float]:
    """Replays the rejection rule along texts: tokens per round at gamma = 0, 1, ..., most."""
    ratios = replay.chain_ratios(trace, rules.rejection())
    rates = (replay.tokens_per_round(replay.chain(gamma), ratios, trace.counts) for gamma in range(1, most + 1))
    return [1.0, *(rate.value for rate in rates)]


def _can_be_replayed(prepared: Prepared) -> bool:
    """Whether a generation is by the rejection rule, with no other sampling option than a temperature."""
    rule, sampling_params = prepared.options["rule"], prepared.request.sampling_params._asdict()
    options = [name for name, value in sampling_params.items() if value is not None]
    is_rejection = rule is None or rule.lenience == 1
    return is_rejection and options == ["temperature"] and prepared.request.draft_sampling_params is None


def interpolate_costs(found: Sequence[cost.Cost], most: int) -> tuple[float, np.ndarray]:
    """c, and v by gamma.

    >>> passes = np.ones(1)
    >>> found = [cost.Cost(gamma, 1, passes, v * passes, 0.1 * passes) for gamma, v in ((1, 1.5), (3, 2.0))]
    >>> interpolate_costs(found, 4)[1].tolist()
    [1.0, 1.5, 1.75, 2.0, 2.0]
    """
    gammas, v = zip(*sorted((one.gamma, one.v) for one in found), strict=True)
    return found[0].c, np.interp(np.arange(most + 1), [0, *gammas], [1.0, *v])


def timed_gammas(most: int) -> tuple[int, ...]:
    """Gammas at which v is timed, up to `most`.

    >>> timed_gammas(9)
    (1, 2, 3, 4, 5, 7, 8, 9)
    """
    return (*(gamma for gamma in TIMED if gamma < most), most)


def steps(batches: Sequence[int], most: int) -> int:
    """How often `of_pair` calls `advance`."""
    return 1 + len(batches) * (len(timed_gammas(most)) + 1)


def sentence(found: Plan) -> str:
    """Whether to speculate, and why.

    >>> sentence(plan(0.9, 0.1, [1.0] * 17))[:85]
    'Speculate with γ = 10: 6.86 tokens a round, in the time of 2.00 passes over one token'
    >>> sentence(plan(0.75, 0.02, [1 + gamma for gamma in range(17)])).partition(", because ")[0]
    'Do not speculate: the best γ, 1, would have 0.87 times the speed of plain decoding'
    """
    if found.gamma:
        rows = " (for each row; the batch waits for its slowest)" if found.batch > 1 else ""
        near = [f"γ = {_runs([gamma for gamma in found.near if gamma])}"] if any(found.near) else []
        near = ", ".join([*["plain decoding"] * (0 in found.near), *near])
        return (
            f"Speculate with γ = {found.gamma}: {found.tokens_per_round:.2f} tokens a round, in the time of "
            f"{found.gamma * found.c + found.v:.2f} passes over one token, are at most {found.improvement:.2f} times "
            f"the speed of plain decoding{rows}{f'; within {TOLERANCE:.0%} of that: {near}' if near else ''}."
            + ("" if found.measured is None else f" {_of_whole_texts(found.improvement)}")
        )
    if found.memory is not None and not found.memory.fits:
        return _no_room(found, found.memory)
    enough = math.ceil(100 * found.break_even - 1e-4) / 100 if found.break_even < 1 else None
    pays = f"it would pay from α = {enough:.2f} on" if enough is not None else "not even α = 1 would pay"
    fewer = f"rounds yield fewer tokens than α = {found.alpha:.2f} promises"
    why = {
        "low alpha": f"draft tokens are accepted too rarely (α = {math.floor(100 * found.alpha) / 100:.2f}; {pays})",
        "expensive draft": f"the drafter takes too long (c = {found.c:.2f} passes of the target for each draft token)",
        "no spare compute": f"checking {found.best + 1} tokens takes the time of {found.v:.2f} passes over one (v)",
        "clustered draft tokens": f"right draft tokens cluster, so that {fewer}",
        "short texts": f"texts are short, so that {fewer}",
    }
    return (
        f"Do not speculate: the best γ, {found.best}, would have {found.best_improvement:.2f} times the speed of plain "
        f"decoding, because {', and '.join(why[name] for name in found.obstacles)}."
    )


def _of_whole_texts(improvement: float) -> str:
    """What a measured pair's promise has come to, over the pairs of docs/results.md.

    >>> _of_whole_texts(1.5)
    'Whole texts had 0.8 to 1 of what passes promised: 1.20 to 1.50 times.'
    """
    least, most = (share * improvement for share in SHARE)
    range_ = f"{least:.2f} to {most:.2f} times" + (", so plain decoding may be as fast" if least < 1 else "")
    return f"Whole texts had {SHARE[0]:g} to {SHARE[1]:g} of what passes promised: {range_}."


def _no_room(found: Plan, taken: Memory) -> str:
    """Why a pair that does not fit a machine is not to be used there, and what it would be where it fits."""
    target, draft, machine = map(filesize.decimal, map(int, taken))
    alone = ", where not even the target fits" if taken.target > taken.machine else ""
    return (
        f"Do not speculate: weights and caches take {target} (target) and {draft} (drafter), and the machine has "
        f"{machine}{alone}. With room for both, γ = {found.best} would have at most {found.best_improvement:.2f} times "
        "the speed of plain decoding."
    )


def _runs(numbers: Sequence[int]) -> str:
    """Rising integers, three or more without a gap as the first and the last.

    >>> _runs([1, 2, 4, 5, 6, 9])
    '1, 2, 4..6, 9'
    """
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(
        f"{a}..{b}" if b > a + 1 else ", ".join(map(str, range(a, b + 1))) for a, b in zip(starts, ends, strict=True)
    )


def operations_ratio(target: Model, drafter: Model) -> float:
    """Operations per token of the drafter over the target's (c_hat of Theorem 3.11), by their weights."""
    return _weights(drafter) / _weights(target)


def _weights(model: Model) -> float:
    """How many weights each token is multiplied with."""
    if isinstance(model.config, NGramConfig):
        return 0.0  # look-ups
    if isinstance(model.config, T5Config | GPTConfig | DecoderConfig):
        return roofline.load_of(model.config).parameters
    return int8.count(model.params)
