"""`jaxspec verify`: the certificate of exactness for every rule, and tests of a real pair's samples."""

from __future__ import annotations

import itertools
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxspec.cli import console, names, options
from jaxspec.cli.options import Json, NewTokens, Seed

DTYPES = ("float32", "bfloat16")  # of a pair's greedy texts


def verify(
    gamma: options.Gamma = 2,
    steps: Annotated[int, options.number("Tokens whose joint distribution is enumerated.", least=2)] = 3,
    seed: Seed = 0,
    target: Annotated[str, options.text("MODEL", "Also test a real pair: its target,")] = "",
    draft: Annotated[str, options.text("MODEL", "and its drafter.", "--draft", "-d")] = "",
    count: Annotated[int, options.number("Held-out prompts of a pair's greedy texts.")] = 16,
    max_new_tokens: NewTokens = 48,
    sampled: Annotated[int, options.number("How many of the prompts (the shortest) to sample after.")] = 3,
    draws: Annotated[int, options.number("Samples per rule, temperature and prompt.")] = 1024,
    as_json: Json = False,
) -> None:
    """Compute how far each acceptance rule's text is from the target's distribution.

    The joint distribution of the first tokens is enumerated on small table models, with drafters of three kinds; the
    distance is the total variation, the most by which any event's probability is off. An inexact rule is tested for its
    bound. Of a real pair, greedy texts are compared with plain decoding's in float32 and bfloat16, and every rule's
    samples at temperatures 0.7 and 1 with the target's distribution, or the rule's bound. The exit code is 1 if a rule
    is not what it promises, or a pair's float32 texts or samples are off.

    \b
        jaxspec verify
        jaxspec verify --target debian-t5-base --draft debian-t5-small
    """
    if bool(target) != bool(draft):
        raise ValueError("a pair has two models: give --target and --draft, or neither")
    from jaxspec.accept import catalogue
    from jaxspec.analysis.measure import exactness, fits

    amount, entries = fits.Draws(sampled, draws, seed), catalogue.RULES.values()
    found: dict[str, Any] = {"gamma": gamma, "steps": steps, "rules": [], "pair": None}
    with console.counting("enumerating", len(entries) + (len(DTYPES) + fits.steps(amount) if target else 0)) as doing:
        for entry in entries:
            doing(f"enumerating {entry.rule.name}")
            found["rules"].append(exactness.certificate(entry, gamma=gamma, steps=steps, seed=seed))
        if target:
            asked = {"gamma": gamma, "max_new_tokens": max_new_tokens}
            found["pair"] = of_pair(target, draft, amount, doing, count=count, **asked)
    if as_json:
        print(json.dumps(found))
    else:
        _show(found, Console(highlight=False))
    if not all(part["as_stated"] for part in (*found["rules"], *filter(None, [found["pair"]]))):
        raise typer.Exit(1)


def of_pair(target: str, draft: str, amount: Any, doing: Any, *, count: int, **asked: Any) -> dict[str, Any]:
    """Greedy texts of a pair in each dtype, and samples of every rule in float32."""
    from jaxspec.analysis.measure import fits, numerics

    greedy, jobs = {}, {}
    for dtype in DTYPES:
        jobs[dtype] = names.pair_job(target, draft, dtype, None, count, **asked)
        doing(f"greedy, {dtype}")
        greedy[dtype] = numerics.summary(jobs[dtype])
    samples = fits.of_rules(jobs["float32"], amount, doing)
    right = all(test["as_stated"] for test in samples["tests"]) and not greedy["float32"]["mismatches"]
    return {"target": target, "draft": draft, "numerics": greedy, "samples": samples, "as_stated": right}


def _show(found: dict[str, Any], out: Console) -> None:
    from jaxspec.analysis.measure.exactness import DRAFTERS, ROUNDING, TREE, VOCAB
    from jaxspec.analysis.measure.fits import FREQUENT

    table = console.table([*DRAFTERS, "above\nits bound", "verdict"], first="rule", title="Total variation, by drafter")
    for row in found["rules"]:
        off, above = row["total_variation"], row["above_bound"]
        cells = [f"{off[kind]:.1e}" if kind in off else "–" for kind in DRAFTERS]
        over = "–" if above is None else f"{max(*above.values(), 0.0):.1e}"
        table.add_row(row["rule"], *cells, over, _verdict(row["as_stated"]))
    out.print(table)
    out.print(
        f"By enumeration: {found['steps']} tokens of {VOCAB}, γ = {found['gamma']}, a tree of {TREE[0]} branches that "
        f"go on for {len(TREE)} tokens. Below {ROUNDING:g} is rounding. Inexact rules need only keep to their bound."
    )
    if pair := found["pair"]:
        samples = pair["samples"]
        about = f"{samples['prompts']} prompts, {samples['draws']} draws of two tokens after each"
        out.print(Text(f"\n{pair['target']} with {pair['draft']}:", "bold"))
        out.print(_numerics_table(pair["numerics"]))
        out.print(_samples_table(samples["tests"], f"Samples against the target's distribution: {about}"))
        out.print(
            f"p: the least p-value of a rule, corrected for all {len(samples['tests'])} tests (Holm): χ² tests of fit, "
            "or of an inexact rule binomial tests of its bound. "
            f"Below {samples['false_alarm']:g} is hardly chance. Intervals (Clopper and Pearson) are for the "
            f"probability of each test's {FREQUENT} likeliest first tokens; all together hold it with "
            f"{samples['confidence']:.0%} confidence."
        )


def _verdict(right: bool) -> Text:
    return Text("as stated", "green") if right else Text("WRONG", "bold red")


def _numerics_table(numerics: dict[str, Any]) -> Table:
    heads = ["same\ntext", "first mismatch:\nprompt, token", "top-two\nmargin there", "largest\nsuch margin"]
    table = console.table(heads, first="greedy", title="Greedy texts against plain decoding's, margins in nats")
    for dtype, found in numerics.items():
        first, cells = found["first"], ["none", "–", "–"]
        if first is not None:
            margins = f"{first['top_two_margin']:.3g}", f"{found['largest_top_two_margin']:.3g}"
            cells = [f"{first['row']}, {first['position']}", *margins]
        table.add_row(dtype, f"{found['same']} of {found['prompts']}", *cells)
    return table


def _samples_table(tests: list[dict[str, Any]], title: str) -> Table:
    """A line for each rule and temperature: its worst p-value, and its likely token that is farthest off."""
    heads = ["T", "accepted", "p", "farthest\ntoken", "its\ninterval", "hold it", "verdict"]
    table = console.table(heads, first="rule", title=title)
    key = lambda test: (test["temperature"], test["rule"] + ("" if test["exact"] else ", inexact"))  # noqa: E731
    groups: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for test in sorted(tests, key=lambda test: test["temperature"]):
        groups.setdefault(key(test), []).append(test)
    for (temperature, name), group in groups.items():
        accepted = sum(test["acceptance_rate"] for test in group) / len(group)
        tokens = list(itertools.chain(*(test["frequent"] for test in group)))
        cells = ["–", "–", "–"]
        if tokens:
            far = max(tokens, key=lambda token: abs(token["drawn"] / group[0]["draws"] - token["target"]))
            held = sum(token["low"] <= token["target"] <= token["high"] for token in tokens)
            cells = [f"{far['target']:.3f}", f"{far['low']:.3f}..{far['high']:.3f}", f"{held} of {len(tokens)}"]
        least, right = min(test["corrected"] for test in group), all(test["as_stated"] for test in group)
        table.add_row(name, f"{temperature:g}", f"{accepted:.0%}", f"{least:.3g}", *cells, _verdict(right))
    return table
