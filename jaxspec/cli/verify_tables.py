"""What `jaxspec verify` prints: certificates of rules, a pair's greedy texts and its samples."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from jaxspec.analysis.measure.exactness import DRAFTERS, ROUNDING, TREE, VOCAB, Certificate
from jaxspec.analysis.measure.fits import FREQUENT, RuleFits
from jaxspec.analysis.measure.numerics import Summary
from jaxspec.cli import console


def of_rules(rules: Sequence[Certificate]) -> Table:
    """Total variations, and by how much bounds are exceeded."""
    table = console.table([*DRAFTERS, "above\nits bound", "verdict"], first="rule", title="Total variation, by drafter")
    for one in rules:
        off = [f"{one.total_variation[kind]:.1e}" if kind in one.total_variation else "–" for kind in DRAFTERS]
        over = "–" if one.above_bound is None else f"{max(*one.above_bound.values(), 0.0):.1e}"
        table.add_row(one.rule, *off, over, _verdict(one.as_stated))
    return table


def about_rules(steps: int, gamma: int) -> str:
    """What the table of rules is of."""
    return (
        f"By enumeration: {steps} tokens of {VOCAB}, γ = {gamma}, a tree of {TREE[0]} branches that "
        f"go on for {len(TREE)} tokens. Below {ROUNDING:g} is rounding. Inexact rules need only keep to their bound."
    )


def of_texts(numerics: Mapping[str, Summary]) -> Table:
    """Greedy texts beside plain decoding's, by dtype."""
    heads = ["same\ntext", "first mismatch:\nprompt, token", "top-two\nmargin there", "largest\nsuch margin"]
    table = console.table(heads, first="greedy", title="Greedy texts against plain decoding's, margins in nats")
    for dtype, found in numerics.items():
        first, cells = found.first, ["none", "–", "–"]
        if first is not None:
            margins = f"{first.top_two_margin:.3g}", f"{found.largest_top_two_margin:.3g}"
            cells = [f"{first.row}, {first.position}", *margins]
        table.add_row(dtype, f"{found.same} of {found.prompts}", *cells)
    return table


def of_samples(samples: RuleFits) -> Table:
    """A line for each rule and temperature: its worst p-value, and how many likely tokens are where they should be."""
    about = f"{samples.prompts} prompts, {samples.draws} draws each"
    heads = ["T", "accepted", "p", "intervals\nthat hold", "verdict"]
    table = console.table(heads, first="rule", title=f"Samples against the target's distribution: {about}")
    for temperature, rule in dict.fromkeys((test.temperature, test.rule) for test in samples.tests):
        group = [test for test in samples.tests if (test.temperature, test.rule) == (temperature, rule)]
        tokens = list(itertools.chain(*(test.frequent for test in group)))
        held = sum(token.low <= token.target <= token.high for token in tokens)
        accepted = sum(test.acceptance_rate for test in group) / len(group)
        least, right = min(test.corrected for test in group), all(test.as_stated for test in group)
        name = rule if group[0].exact else f"{rule}*"
        cells = [f"{temperature:g}", f"{accepted:.0%}", f"{least:.2g}", f"{held} of {len(tokens)}" if tokens else "–"]
        table.add_row(name, *cells, _verdict(right))
    return table


def about_samples(samples: RuleFits) -> str:
    """What the table of samples is of."""
    return (
        "Of two tokens after each prompt; * marks rules that are inexact. "
        f"p: the least p-value of a rule, corrected for all {len(samples.tests)} tests (Holm): χ² tests of fit, or of "
        f"an inexact rule binomial tests of its bound. Below {samples.false_alarm:g} is hardly chance. Intervals "
        f"(Clopper and Pearson) are for the probability of each test's {FREQUENT} likeliest first tokens; all together "
        f"hold it with {samples.confidence:.0%} confidence."
    )


def _verdict(right: bool) -> Text:
    return Text("as stated", "green") if right else Text("WRONG", "bold red")
