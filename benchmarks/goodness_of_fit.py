"""Tests of fit: a pair's samples have the target's distribution, or keep the bound of an inexact
rule.

    python -m benchmarks.goodness_of_fit --target debian-t5-base --draft debian-t5-small

Two cores, some 10 minutes. For models too large to enumerate (`jaxspec verify`) this is the next
best: fixed keys, and a p-value. Every rule samples two tokens after a few prompts, many times each,
at temperatures 0.7 and 1; plain decoding is tested in the same way, to show what chance does. A
right pair fails once in a thousand seeds. Ends with 1 if a rule is not what it promises.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks import samples
from benchmarks.options import parser_of
from benchmarks.samples import EXPECTED, Context
from jaxspec import rules
from jaxspec.cli import console, names
from jaxspec.cli.options import TARGET
from jaxspec.cli.prompts import prepared_pair
from jaxspec.decode import batches
from jaxspec.decode.request import Prepared
from jaxspec.rules import catalogue

UNLIKELY = 1e-3  # a corrected p-value below this is hardly chance
UNSURE = 0.05  # how often any of the intervals may miss
FREQUENT = 3  # tokens whose probability gets an interval, in each test
TEMPERATURES = (0.7, 1.0)


class Fit(NamedTuple):
    """The result of one test.

    Attributes:
        test: "chi-square", of the target's distribution, or "bound".
        cells: pairs of tokens, or groups of rare ones; of a bound, single tokens after one prefix.
        draws: how many pairs were looked at.
        pvalue: how likely it is that draws are as far off, or farther, if the distribution or the
            bound is right. Below 0.001 it is hardly chance.
        statistic: chi-square, the sum over cells of (observed - expected)^2 / expected.
    """

    test: str
    cells: int
    draws: int
    pvalue: float
    statistic: float | None = None


class LikelyToken(NamedTuple):
    """One of the likeliest first tokens of a test.

    Attributes:
        token: its id.
        target: its probability, by the target.
        drawn: the number of times that it was drawn.
        low, high: the Clopper-Pearson interval of its probability by the draws. All intervals of a
            `RuleFits` together hold what they are of with 95% confidence (Bonferroni).
    """

    token: int
    target: float
    drawn: int
    low: float = 0.0
    high: float = 1.0


class RuleFit(NamedTuple):
    """The test of a rule after one prompt, at one temperature.

    Attributes:
        rule, exact, temperature, prompt: the tested case; prompts are counted from the shortest.
        acceptance_rate: the share of draft tokens that were accepted.
        test, cells, draws, pvalue, statistic: the fields of `Fit`.
        frequent: the likeliest first tokens, but for those that are too rare.
        corrected: the p-value for how many tests there are (Holm).
        as_stated: whether that is likely enough.
    """

    rule: str
    exact: bool
    temperature: float
    prompt: int
    acceptance_rate: float
    test: str
    cells: int
    draws: int
    pvalue: float
    statistic: float | None
    frequent: tuple[LikelyToken, ...]
    corrected: float = 1.0
    as_stated: bool = True


class RuleFits(NamedTuple):
    """The tests of all rules.

    Attributes:
        draws, prompts, temperatures: how many draws after each of how many prompts, at which
            temperatures.
        false_alarm: the corrected p-value below which a test is not as stated.
        confidence: the probability that all intervals hold their values.
        tests: by prompt, temperature and rule.
    """

    draws: int
    prompts: int
    temperatures: tuple[float, ...]
    false_alarm: float
    confidence: float
    tests: tuple[RuleFit, ...]


class Draws(NamedTuple):
    """The number of prompts (the shortest) to sample after, of draws after each, and the seed."""

    prompts: int
    count: int
    seed: int = 0


def fit(context: Context, tokens: Int[np.ndarray, "N 2"]) -> Fit:
    """Compares what was drawn with the target's own distribution there.

    Cells are pairs of tokens that should be drawn five times or more, the rest after each first
    token of which there is as much, and all that is left; so both tokens are tested, and how they
    go together. A token that the target never generates is found for certain. With one cell only,
    as where the distribution is nearly certain, nothing is tested: p is 1.

    Example:
        >>> context = Context(
        ...     0, np.array([0.5, 0.5]), {0: np.array([0.5, 0.5]), 1: np.array([1.0, 0.0])}
        ... )
        >>> found = fit(context, np.repeat([[0, 0], [0, 1], [1, 0]], [30, 20, 50], axis=0))
        >>> found.statistic, found.cells, round(found.pvalue, 3)
        (2.0, 3, 0.368)
    """
    numbers, second = expected(context, len(tokens)), context.second_probs
    if any(
        context.next_probs[x] == 0 or (x in second and second[x][y] == 0)
        for x, y in tokens.tolist()
    ):
        return Fit("chi-square", len(numbers), len(tokens), 0.0, float("inf"))
    names = {cell: index for index, cell in enumerate(numbers)}
    which = [
        next(names[cell] for cell in ((x, y), (x,), ()) if cell in names)
        for x, y in tokens.tolist()
    ]
    counts = np.bincount(which, minlength=len(numbers)).astype(np.float64)
    observed, wanted = merge_last(counts, np.array(list(numbers.values())))
    if len(observed) < 2:
        return Fit("chi-square", 1, len(tokens), 1.0, 0.0)
    test = stats.chisquare(observed, wanted)
    return Fit("chi-square", len(observed), len(tokens), float(test.pvalue), float(test.statistic))


def expected(context: Context, draws: int) -> dict[tuple[int, ...], float]:
    """Computes the draws that each cell should have: a pair of tokens, a token and any other after
    it, or (): all else.

    >>> context = Context(0, np.array([0.75, 0.25]), {0: np.array([0.5, 0.5])})
    >>> expected(context, 40)
    {(0, 0): 15.0, (0, 1): 15.0, (1,): 10.0, (): 0.0}
    >>> expected(context, 12)
    {(0,): 9.0, (): 3.0}
    """
    cells: dict[tuple[int, ...], float] = {}
    for x in np.flatnonzero(draws * context.next_probs >= EXPECTED).tolist():
        with_first = float(draws * context.next_probs[x])
        pairs = with_first * context.second_probs[x] if x in context.second_probs else np.zeros(0)
        frequent = {(x, y): float(pairs[y]) for y in np.flatnonzero(pairs >= EXPECTED).tolist()}
        cells |= frequent
        left = with_first - sum(frequent.values())
        if left >= EXPECTED:
            cells[(x,)] = left
    return cells | {(): max(draws - sum(cells.values()), 0.0)}


def merge_last(observed: Float[np.ndarray, " cells"], wanted: Float[np.ndarray, " cells"]):
    """The last cell, if too little is expected of it, goes to the smallest of the others.

    >>> [x.tolist() for x in merge_last(np.array([6.0, 9.0, 1.0]), np.array([5.0, 9.0, 2.0]))]
    [[7.0, 9.0], [7.0, 9.0]]
    """
    if wanted[-1] >= EXPECTED or len(wanted) == 1:
        return observed, wanted
    to = np.arange(len(wanted))
    to[-1] = np.argmin(wanted[:-1])
    return np.bincount(to, observed), np.bincount(to, wanted)


def bound_test(
    context: Context, tokens: Int[np.ndarray, "N 2"], bound: Callable[[Array], Array]
) -> Fit:
    """Compares how often tokens were drawn with how often they may be: exact binomial tests, the
    least of whose p-values is multiplied by their number (Bonferroni).

    The first token of the pairs is tested, and the second one after each frequent first one. Which
    cells there are depends on the ceilings alone: tokens that may have five draws or more by
    themselves, the others together.

    Example:
        >>> context = Context(0, np.array([0.9, 0.1]), {})
        >>> twice = lambda log_p: jnp.minimum(2 * jnp.exp(log_p), 1.0)
        >>> for count in (19, 40):
        ...     drawn = np.repeat([[0, 0], [1, 0]], [100 - count, count], axis=0)
        ...     print(bound_test(context, drawn, twice).pvalue < 0.001)
        False
        True
    """
    pvalues = _tails(context.next_probs, tokens[:, 0], bound)
    for x, probs in context.second_probs.items():
        pvalues += _tails(probs, tokens[tokens[:, 0] == x, 1], bound)
    return Fit(
        "bound",
        len(pvalues),
        len(tokens),
        min(1.0, len(pvalues) * min(pvalues)) if pvalues else 1.0,
    )


def _tails(
    probs: Float[np.ndarray, " V"], drawn: Int[np.ndarray, " n"], bound: Callable[[Array], Array]
) -> list[float]:
    """P(as many draws or more) of each cell after one prefix, if its probability is the bound."""
    if not len(drawn):
        return []
    most = np.asarray(bound(jnp.log(jnp.asarray(probs, jnp.float32))), np.float64)
    counts, bounded = np.bincount(drawn, minlength=len(probs)), most < 1
    alone = bounded & (most * len(drawn) >= EXPECTED)
    cells = list(zip(counts[alone].tolist(), most[alone].tolist(), strict=True))
    rest = bounded & ~alone
    if rest.any() and most[rest].sum() < 1:
        cells.append((int(counts[rest].sum()), float(most[rest].sum())))
    return [float(stats.binom.sf(n - 1, len(drawn), probability)) for n, probability in cells]


def of_rules(
    prepared: Prepared, draws: Draws, doing: Callable[[str], object] = lambda what: None
) -> RuleFits:
    """Tests the samples of plain decoding, which shows what chance does, and of every rule of
    `rules.catalogue`.
    """
    shortest = batches.take(
        prepared, np.argsort(np.asarray(prepared.prompt.length), kind="stable")[: draws.prompts]
    )
    key, results = jax.random.key(draws.seed), []
    plain = catalogue.RuleEntry(rules.exact_match()._replace(name="plain decoding"))
    for row in range(len(shortest.prompt.length)):
        first, after = jax.random.split(jax.random.fold_in(key, row))
        for temperature in TEMPERATURES:
            prompt = batches.take(shortest, [row]).replace(temperature=temperature, key=first)
            context = samples.context(prompt, draws.count)
            for number, entry in enumerate((plain, *catalogue.RULES.values())):
                doing(f"{entry.rule.name}, T = {temperature:g}")
                variant = prompt.replace(rule=entry.rule) if number else prompt.plain()
                drawn = samples.draw(
                    variant, context.first, jax.random.fold_in(after, number), draws.count
                )
                labels = entry.rule.name, entry.rule.exact, temperature, row, drawn.acceptance_rate
                fitted, likely = (
                    _tested(context, drawn.tokens, entry),
                    _likeliest(context, drawn.tokens),
                )
                results.append(RuleFit(*labels, *fitted, likely))
    error = UNSURE / max(sum(len(result.frequent) for result in results), 1)
    tests = []
    for result, pvalue in zip(
        results, holm_adjust([result.pvalue for result in results]), strict=True
    ):
        frequent = tuple(_with_interval(token, result.draws, error) for token in result.frequent)
        tests.append(
            result._replace(frequent=frequent, corrected=pvalue, as_stated=pvalue > UNLIKELY)
        )
    effort = tests[0].draws, len(shortest.prompt.length), TEMPERATURES
    return RuleFits(*effort, false_alarm=UNLIKELY, confidence=1 - UNSURE, tests=tuple(tests))


def _tested(context: Context, tokens: Int[np.ndarray, "N 2"], entry: catalogue.RuleEntry) -> Fit:
    if entry.rule.exact:
        return fit(context, tokens)
    if entry.bound is not None:
        return bound_test(context, tokens, entry.bound)
    raise ValueError(
        f"{entry.rule.name} is inexact and states no bound: give its catalogue.RuleEntry a bound"
    )


def _likeliest(context: Context, tokens: Int[np.ndarray, "N 2"]) -> tuple[LikelyToken, ...]:
    likeliest = np.argsort(-context.next_probs, kind="stable")[:FREQUENT]
    often = [x for x in likeliest.tolist() if context.next_probs[x] * len(tokens) >= EXPECTED]
    counts = np.bincount(tokens[:, 0], minlength=len(context.next_probs))
    return tuple(LikelyToken(x, float(context.next_probs[x]), int(counts[x])) for x in often)


def _with_interval(token: LikelyToken, draws: int, error: float) -> LikelyToken:
    interval = stats.binomtest(token.drawn, draws).proportion_ci(1 - error, "exact")
    return token._replace(low=float(interval.low), high=float(interval.high))


def table_of(fits: RuleFits) -> Table:
    """A line for each rule and temperature: its worst p-value, and how many likely tokens are where
    they should be.
    """
    size = f"{fits.prompts} prompts, {fits.draws} draws each"
    heads = ["T", "accepted", "p", "intervals\nthat hold", "verdict"]
    table = console.table(
        heads, first="rule", title=f"Samples against the target's distribution: {size}"
    )
    for temperature, rule in dict.fromkeys((test.temperature, test.rule) for test in fits.tests):
        group = [
            test for test in fits.tests if (test.temperature, test.rule) == (temperature, rule)
        ]
        tokens = list(itertools.chain(*(test.frequent for test in group)))
        held = sum(token.low <= token.target <= token.high for token in tokens)
        accepted = sum(test.acceptance_rate for test in group) / len(group)
        least, right = min(test.corrected for test in group), all(test.as_stated for test in group)
        name = rule if group[0].exact else f"{rule}*"
        cells = [
            f"{temperature:g}",
            f"{accepted:.0%}",
            f"{least:.2g}",
            f"{held} of {len(tokens)}" if tokens else "–",
        ]
        table.add_row(name, *cells, "as stated" if right else "WRONG")
    return table


def about(fits: RuleFits) -> str:
    """Describes the table of samples."""
    return (
        "Of two tokens after each prompt; * marks rules that are inexact. p: the least p-value of "
        f"a rule, corrected for all {len(fits.tests)} tests (Holm): χ² tests of fit, or of an "
        f"inexact rule binomial tests of its bound. Below {fits.false_alarm:g} is hardly chance. "
        f"Intervals (Clopper and Pearson) are for the probability of each test's {FREQUENT} "
        f"likeliest first tokens; all together hold it with {fits.confidence:.0%} confidence."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and tests a pair."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", default="")
    parser.add_argument("--gamma", type=int, default=2)
    parser.add_argument(
        "--prompts",
        type=int,
        default=3,
        help="of the held-out ones, the shortest are sampled after",
    )
    parser.add_argument(
        "--draws", type=int, default=1024, help="samples per rule, temperature and prompt"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    draft = options.draft or names.default_draft_model(options.target)
    prepared = prepared_pair(options.target, draft, "float32", None, 16, gamma=options.gamma)
    draws = Draws(options.prompts, options.draws, options.seed)
    fits = of_rules(prepared, draws, lambda what: print(what, file=sys.stderr, flush=True))
    out = Console(highlight=False)
    out.print(table_of(fits), about(fits), sep="\n")
    if not all(test.as_stated for test in fits.tests):
        raise SystemExit(1)


def holm_adjust(pvalues: Sequence[float]) -> list[float]:
    """Returns Holm's p-values: rejecting below a level errs, over all tests together, no more often
    than the level.

    The smallest of m is multiplied by m, the next one by m - 1, and so on; none is below one before
    it. No test need be independent of another.

    >>> [round(p, 3) for p in holm_adjust([0.02, 0.001, 0.9])]
    [0.04, 0.003, 0.9]

    Reference: Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    order = np.argsort(pvalues, kind="stable")
    count = len(order)
    raised = np.asarray(pvalues, np.float64)[order] * (count - np.arange(count))
    adjusted = np.empty(count)
    adjusted[order] = np.minimum(np.maximum.accumulate(raised), 1.0)
    return adjusted.tolist()


if __name__ == "__main__":
    main()
