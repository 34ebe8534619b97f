"""Whether a real pair is exact: greedy texts by dtype, and a test of every rule's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.accept import catalogue
from jaxspec.analysis import jobs, numerics, sample_tests, samples
from jaxspec.analysis.samples import EXPECTED, Context, Samples
from jaxspec.analysis.statistics import binomial_interval, holm_adjust
from jaxspec.decode.request import Job

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
        found = {"test": "chi-square"} | sample_tests.fit(context, drawn.tokens)._asdict()
    elif variant.ceiling is not None:
        found = {"test": "bound"} | sample_tests.bound_test(context, drawn.tokens, variant.ceiling)._asdict()
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
