"""Whether a decoder's samples have the target's distribution, or keep the bound of an inexact rule: tests of fit.

For models too large to enumerate (`jaxspec.testing.certify`) this is the next best: fixed keys, and a p-value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy import special

from jaxspec.accept import catalogue
from jaxspec.analysis.measure import jobs, numerics, samples
from jaxspec.analysis.measure.samples import EXPECTED, Context, Samples
from jaxspec.analysis.measure.statistics import binomial_interval, holm_adjust
from jaxspec.decode.request import Job


class ChiSquare(NamedTuple):
    """A test of fit.

    Attributes:
        statistic: sum over cells of (observed - expected)^2 / expected.
        cells: pairs of tokens, or groups of rare ones.
        draws: how many pairs were looked at.
        pvalue: how likely a statistic this large is if the distribution is right; below 0.001 it is hardly chance.
    """

    statistic: float
    cells: int
    draws: int
    pvalue: float


class BoundTest(NamedTuple):
    """A test of a bound.

    Attributes:
        cells: tokens after one prefix, or groups of those that are rarely allowed, whose frequency was tested.
        draws: how many pairs of tokens were looked at.
        pvalue: how likely it is that any of the cells is as far above its ceiling, or farther, if the bound holds: the
            least of their p-values times their number (Bonferroni).
    """

    cells: int
    draws: int
    pvalue: float


def fit(context: Context, tokens: Int[np.ndarray, "N 2"]) -> ChiSquare:
    """Compares what was drawn with the target's own distribution there.

    Cells are pairs of tokens that should be drawn five times or more, the rest after each first token of which there
    is as much, and all that is left; so both tokens are tested, and how they go together. A token that the target never
    generates is found for certain. With one cell only, as where the distribution is nearly certain, nothing is tested:
    p is 1.

    Args:
        context: the target's distributions.
        tokens: draws after its first token.

    Example:
        >>> context = Context(0, np.array([0.5, 0.5]), {0: np.array([0.5, 0.5]), 1: np.array([1.0, 0.0])})
        >>> drawn = np.repeat([[0, 0], [0, 1], [1, 0]], [30, 20, 50], axis=0)
        >>> found = fit(context, drawn)
        >>> found.statistic, found.cells, round(found.pvalue, 3)
        (2.0, 3, 0.368)
    """
    due, second = expected(context, len(tokens)), context.second_probs
    if any(context.next_probs[x] == 0 or (x in second and second[x][y] == 0) for x, y in tokens.tolist()):
        return ChiSquare(float("inf"), len(due), len(tokens), 0.0)
    names = {cell: index for index, cell in enumerate(due)}
    which = [next(names[cell] for cell in ((x, y), (x,), ()) if cell in names) for x, y in tokens.tolist()]
    counts = np.bincount(which, minlength=len(due)).astype(np.float64)
    observed, wanted = merge_last(counts, np.array(list(due.values())))
    if len(observed) < 2:
        return ChiSquare(0.0, 1, len(tokens), 1.0)
    statistic = float(np.sum((observed - wanted) ** 2 / wanted))
    return ChiSquare(statistic, len(observed), len(tokens), float(special.chdtrc(len(observed) - 1, statistic)))


def expected(context: Context, draws: int) -> dict[tuple[int, ...], float]:
    """How many draws each cell should have: a pair of tokens, a token and any other after it, or (): all else.

    >>> context = Context(0, np.array([0.75, 0.25]), {0: np.array([0.5, 0.5])})
    >>> expected(context, 40)
    {(0, 0): 15.0, (0, 1): 15.0, (1,): 10.0, (): 0.0}
    >>> expected(context, 12)
    {(0,): 9.0, (): 3.0}
    """
    due: dict[tuple[int, ...], float] = {}
    for x in np.flatnonzero(draws * context.next_probs >= EXPECTED).tolist():
        whole = float(draws * context.next_probs[x])
        pairs = whole * context.second_probs[x] if x in context.second_probs else np.zeros(0)
        frequent = {(x, y): float(pairs[y]) for y in np.flatnonzero(pairs >= EXPECTED).tolist()}
        due |= frequent
        left = whole - sum(frequent.values())
        if left >= EXPECTED:
            due[(x,)] = left
    return due | {(): max(draws - sum(due.values()), 0.0)}


def merge_last(observed: Float[np.ndarray, " cells"], due: Float[np.ndarray, " cells"]):
    """The last cell, if too little is expected of it, goes to the smallest of the others.

    >>> [x.tolist() for x in merge_last(np.array([6.0, 9.0, 1.0]), np.array([5.0, 9.0, 2.0]))]
    [[7.0, 9.0], [7.0, 9.0]]
    """
    if due[-1] >= EXPECTED or len(due) == 1:
        return observed, due
    smallest = int(np.argmin(due[:-1]))
    observed, due = observed.copy(), due.copy()
    for values in (observed, due):
        values[smallest] += values[-1]
    return observed[:-1], due[:-1]


def bound_test(context: Context, tokens: Int[np.ndarray, "N 2"], ceiling: Callable[[Array], Array]) -> BoundTest:
    """Compares how often tokens were drawn with how often they may be: exact binomial tests.

    The first token of the pairs is tested, and the second one after each frequent first one. Which cells there are
    depends on the ceilings alone: tokens that may have five draws or more by themselves, the others together.

    Args:
        context: the target's distributions.
        tokens: draws after its first token.
        ceiling: log probabilities [V] -> the most that each token's probability may be (`accept.catalogue`).

    Example:
        >>> context = Context(0, np.array([0.9, 0.1]), {})
        >>> twice = lambda log_p: jnp.minimum(2 * jnp.exp(log_p), 1.0)
        >>> for count in (19, 40):
        ...     drawn = np.repeat([[0, 0], [1, 0]], [100 - count, count], axis=0)
        ...     print(bound_test(context, drawn, twice).pvalue < 0.001)
        False
        True
    """
    found = _tails(context.next_probs, tokens[:, 0], ceiling)
    for x, probs in context.second_probs.items():
        found += _tails(probs, tokens[tokens[:, 0] == x, 1], ceiling)
    return BoundTest(len(found), len(tokens), min(1.0, len(found) * min(found)) if found else 1.0)


def _tails(
    probs: Float[np.ndarray, " V"], drawn: Int[np.ndarray, " n"], ceiling: Callable[[Array], Array]
) -> list[float]:
    """P(as many draws or more) of each cell after one prefix, if its probability is the ceiling."""
    if not len(drawn):
        return []
    most = np.asarray(ceiling(jnp.log(jnp.asarray(probs, jnp.float32))), np.float64)
    counts, bounded = np.bincount(drawn, minlength=len(probs)), most < 1
    alone = bounded & (most * len(drawn) >= EXPECTED)
    cells = list(zip(counts[alone].tolist(), most[alone].tolist(), strict=True))
    rest = bounded & ~alone
    if rest.any() and most[rest].sum() < 1:
        cells.append((int(counts[rest].sum()), float(most[rest].sum())))
    return [1.0 if not n else float(special.bdtrc(n - 1, len(drawn), probability)) for n, probability in cells]


UNLIKELY = 1e-3  # a corrected p-value below this is hardly chance
UNSURE = 0.05  # how often any of the intervals may miss
FREQUENT = 3  # tokens whose probability gets an interval, in each test
TEMPERATURES = (0.7, 1.0)


class Variant(NamedTuple):
    """A way to decode whose samples are tested.

    Attributes:
        name: of the rule.
        exact: what it promises.
        ceiling: its bound, if it is inexact and states one.
        job: with the rule.
    """

    name: str
    exact: bool
    ceiling: catalogue.Ceiling | None
    job: Job


class Draws(NamedTuple):
    """How much to sample: the prompts (the shortest) to sample after, how often after each, and the seed."""

    prompts: int
    count: int
    seed: int = 0


def of_pair(by_dtype: Mapping[str, Job], draws: Draws, *, doing: Callable[[str], object]) -> dict[str, Any]:
    """Greedy texts in each dtype, and samples of every rule in float32.

    Args:
        by_dtype: the same greedy job for "float32" and other dtypes.
        draws: of the samples.
        doing: called with what comes next, once for each dtype and each test.

    Returns:
        "numerics" by dtype, "samples", and "as_stated": whether every test passed and float32 texts are the same.
    """
    greedy = {}
    for dtype, job in by_dtype.items():
        doing(f"greedy, {dtype}")
        greedy[dtype] = numerics_of(job)
    tested = samples_of(shortest(by_dtype["float32"], draws.prompts), draws, doing)
    right = all(test["as_stated"] for test in tested["tests"]) and not greedy["float32"]["mismatches"]
    return {"numerics": greedy, "samples": tested, "as_stated": right}


def steps_of(dtypes: int, draws: Draws) -> int:
    """How often `of_pair` calls `doing`."""
    return dtypes + len(TEMPERATURES) * draws.prompts * (1 + len(catalogue.RULES))


def shortest(job: Job, count: int) -> Job:
    """The rows with the shortest prompts, which are the cheapest to sample after."""
    return jobs.take(job, np.argsort(np.asarray(job.prompt.length), kind="stable")[:count])


def numerics_of(job: Job) -> dict[str, Any]:
    """Where greedy texts differ from plain decoding's, and by what margin."""
    found, prompts = numerics.mismatches(job), len(job.prompt.length)
    first = numerics.first(found)
    return {
        "prompts": prompts,
        "same": prompts - len(found),
        "first": None if first is None else first._asdict(),
        "largest_top_two_margin": max((mismatch.top_two_margin for mismatch in found), default=None),
        "mismatches": [mismatch._asdict() for mismatch in found],
    }


def variants(job: Job) -> Iterator[Variant]:
    """Plain decoding, which shows what chance does, and every rule of the catalogue."""
    yield Variant("plain decoding", True, None, job.plain())
    for rule, ceiling in catalogue.RULES.values():
        yield Variant(rule.name, rule.exact, ceiling, job.replace(accept=rule))


def samples_of(job: Job, draws: Draws, doing: Callable[[str], object]) -> dict[str, Any]:
    """A test for each variant, temperature and prompt; p-values corrected for how many tests there are."""
    key, tests = jax.random.key(draws.seed), []
    for row in range(len(job.prompt.length)):
        first, after = jax.random.split(jax.random.fold_in(key, row))
        for temperature in TEMPERATURES:
            one = jobs.take(job, [row]).replace(temperature=temperature, key=first)
            context = samples.context(one, draws.count)
            for number, variant in enumerate(variants(one)):
                doing(f"{variant.name}, T = {temperature:g}")
                drawn = samples.draw(variant.job, context.first, jax.random.fold_in(after, number), draws.count)
                about = {"rule": variant.name, "exact": variant.exact, "temperature": temperature, "prompt": row}
                tests.append(about | _tested(context, drawn, variant))
    for test, pvalue in zip(tests, holm_adjust([test["pvalue"] for test in tests]), strict=True):
        test |= {"corrected": pvalue, "as_stated": pvalue > UNLIKELY}
    about = {"draws": tests[0]["draws"], "prompts": len(job.prompt.length), "temperatures": list(TEMPERATURES)}
    about |= {"false_alarm": UNLIKELY, "confidence": 1 - UNSURE}
    return about | {"tests": with_intervals(tests)}


def _tested(context: Context, drawn: Samples, variant: Variant) -> dict[str, Any]:
    if variant.exact:
        found = {"test": "chi-square"} | fit(context, drawn.tokens)._asdict()
    elif variant.ceiling is not None:
        found = {"test": "bound"} | bound_test(context, drawn.tokens, variant.ceiling)._asdict()
    else:
        raise ValueError(f"the rule {variant.name} is inexact and states no bound: give its catalogue.Entry a ceiling")
    likeliest = np.argsort(-context.next_probs, kind="stable")[:FREQUENT]
    often = [x for x in likeliest.tolist() if context.next_probs[x] * len(drawn.tokens) >= EXPECTED]
    counts = np.bincount(drawn.tokens[:, 0], minlength=len(context.next_probs))
    frequent = [{"token": x, "target": float(context.next_probs[x]), "drawn": int(counts[x])} for x in often]
    return found | {"acceptance_rate": drawn.acceptance_rate, "frequent": frequent}


def with_intervals(tests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Intervals for how probable frequent tokens are, which all together hold it with 95% confidence (Bonferroni)."""
    error = UNSURE / max(sum(len(test["frequent"]) for test in tests), 1)
    for test in tests:
        for token in test["frequent"]:
            token["low"], token["high"] = binomial_interval(token["drawn"], test["draws"], error)
    return tests
