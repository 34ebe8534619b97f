"""`jaxspec verify`: the certificate of exactness for every rule, and a real pair's greedy texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from jaxspec.cli import console, names, options
from jaxspec.cli.options import Json, NewTokens, Seed, number, text
from jaxspec.cli.prompts import prepared_pair

if TYPE_CHECKING:
    from jaxspec.analysis.numerics import Summary
    from jaxspec.decode.request import Prepared
    from jaxspec.rules.catalogue import RuleEntry
    from jaxspec.testing.exactness import Certificate

# dtypes of a pair's greedy texts; in the first they must not differ
DTYPES = ("float32", "bfloat16")
MOST = 5  # draft tokens; one more takes minutes a rule


def verify(
    context: typer.Context,
    gamma: Annotated[int, number("Draft tokens a round.", "--gamma", "-g")] = 2,
    steps: Annotated[int, number("Tokens whose joint distribution is enumerated.", least=2)] = 3,
    rule: Annotated[str, text("NAMES", "Acceptance rules: block,traversal.")] = "all",
    seed: Seed = 0,
    target: Annotated[str, text("MODEL", "Also test a real pair: its target,")] = "",
    draft: Annotated[str, text("MODEL", "and its drafter.", "--draft", "-d")] = "",
    count: Annotated[int, number("Held-out prompts of a pair's greedy texts.")] = 16,
    max_new_tokens: NewTokens = 48,
    as_json: Json = False,
) -> None:
    """Compute how far each acceptance rule's text is from the target's distribution.

    The joint distribution of the first tokens is enumerated on small table models, with drafters of
    three kinds; the distance is the total variation, the most by which any event's probability is
    off. An inexact rule is tested for its bound. Of a real pair, greedy texts are compared with
    plain decoding's in float32 and bfloat16. The exit code is 1 if a rule is not what it promises,
    or a pair's float32 texts differ.

    \b
        jaxspec verify
        jaxspec verify --rule block,traversal
        jaxspec verify --target debian-t5-large --draft debian-t5-draft
    """
    if not target:
        options.refuse(options.typed(context, ("count", "max_new_tokens")), "verify without a pair")
    if gamma > MOST:
        raise ValueError(
            f"--gamma is {gamma}: expected at most {MOST}, for what a round may draw is enumerated"
        )
    if draft and not target:
        raise ValueError("a pair has two models: give --target, too, or neither")
    entries = _entries(rule)
    draft = draft or (names.default_draft_model(target) if target else "")
    from jaxspec.analysis import numerics
    from jaxspec.testing import exactness

    def load(dtype: str) -> Prepared:
        return prepared_pair(
            target, draft, dtype, None, count, gamma=gamma, max_new_tokens=max_new_tokens
        )

    dtypes = DTYPES if target else ()
    # The first pair is loaded before the enumeration, so that a wrong name fails at once.
    loaded = {dtype: load(dtype) for dtype in dtypes[:1]}
    certificates = []
    texts = {}
    with console.counting("enumerating", len(entries) + len(dtypes)) as doing:
        for entry in entries:
            doing(f"enumerating {entry.rule.name}")
            certificates.append(exactness.certificate(entry, gamma=gamma, steps=steps, seed=seed))
        for dtype in dtypes:
            doing(f"greedy, {dtype}")
            texts[dtype] = numerics.summary(loaded.pop(dtype, None) or load(dtype))
    pair = {"target": target, "draft": draft, "numerics": texts} if target else None
    if as_json:
        console.print_json({"gamma": gamma, "steps": steps, "rules": certificates, "pair": pair})
    else:
        out = console.out()
        console.show(out, _rules_table(certificates))
        out.print(
            f"By enumeration: {steps} tokens of {exactness.VOCAB}, γ = {gamma}, a tree of "
            f"{exactness.TREE[0]} branches that go on for {len(exactness.TREE)} tokens. Below "
            f"{exactness.ROUNDING:g} is rounding. Inexact rules need only keep to their bound."
        )
        if pair is not None:
            out.print(Text(f"\n{target} with {draft}:", "bold"))
            console.show(out, _texts_table(texts))
    has_failed = not all(certificate.as_stated for certificate in certificates)
    has_failed |= pair is not None and bool(texts[DTYPES[0]].mismatches)
    if has_failed:
        raise typer.Exit(1)


def _entries(names: str) -> list[RuleEntry]:
    """Returns the named rules, with the parameters that their bounds are stated for."""
    from jaxspec.rules import catalogue

    if names == "all":
        return [*catalogue.RULES.values()]
    chosen = options.values(names, "--rule")
    unknown = [name for name in chosen if name not in catalogue.RULES]
    if unknown:
        expected = f"all, or some of {', '.join(catalogue.RULES)}, without numbers"
        raise ValueError(f"--rule has {unknown[0]!r}: expected {expected}")
    return [catalogue.RULES[name] for name in chosen]


def _rules_table(certificates: Sequence[Certificate]) -> Table:
    """Tabulates total variations, and by how much they exceed bounds."""
    from jaxspec.testing.exactness import DRAFTERS

    table = console.table(
        [*DRAFTERS, "above\nits bound", "verdict"],
        first="rule",
        title="Total variation, by drafter",
    )
    for certificate in certificates:
        distances = certificate.total_variation
        cells = [f"{distances[name]:.1e}" if name in distances else "–" for name in DRAFTERS]
        bounds = certificate.above_bound
        cells.append("–" if bounds is None else f"{max(*bounds.values(), 0.0):.1e}")
        verdict = Text("WRONG", "bold red")
        if certificate.as_stated:
            verdict = Text("as stated", "green")
        table.add_row(certificate.rule, *cells, verdict)
    return table


def _texts_table(summaries: Mapping[str, Summary]) -> Table:
    """Tabulates greedy texts beside plain decoding's, by dtype."""
    heads = [
        "same\ntext",
        "first mismatch:\nprompt, token",
        "top-two\nmargin there",
        "largest\nsuch margin",
    ]
    table = console.table(
        heads, first="greedy", title="Greedy texts against plain decoding's, margins in nats"
    )
    for dtype, summary in summaries.items():
        first = summary.first
        cells = ["none", "–", "–"]
        if first is not None:
            cells = [
                f"{first.row}, {first.position}",
                f"{first.top_two_margin:.3g}",
                f"{summary.largest_top_two_margin:.3g}",
            ]
        table.add_row(dtype, f"{summary.same} of {summary.prompts}", *cells)
    return table
