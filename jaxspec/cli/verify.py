"""`jaxspec verify`: the certificate of exactness for every rule, and a real pair's greedy texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from jaxspec.cli import console, drafter_names, names, options
from jaxspec.cli.options import Json, NewTokens, Seed

if TYPE_CHECKING:
    from jaxspec.decode.request import Prepared

DTYPES = ("float32", "bfloat16")  # of a pair's greedy texts; in the first there should be no difference
MOST = 5  # draft tokens; with one more a rule takes minutes


def verify(
    gamma: options.Gamma = 2,
    steps: Annotated[int, options.number("Tokens whose joint distribution is enumerated.", least=2)] = 3,
    seed: Seed = 0,
    target: Annotated[str, options.text("MODEL", "Also test a real pair: its target,")] = "",
    draft: Annotated[str, options.text("MODEL", "and its drafter.", "--draft", "-d")] = "",
    count: Annotated[int, options.number("Held-out prompts of a pair's greedy texts.")] = 16,
    max_new_tokens: NewTokens = 48,
    as_json: Json = False,
) -> None:
    """Compute how far each acceptance rule's text is from the target's distribution.

    The joint distribution of the first tokens is enumerated on small table models, with drafters of three kinds; the
    distance is the total variation, the most by which any event's probability is off. An inexact rule is tested for its
    bound. Of a real pair, greedy texts are compared with plain decoding's in float32 and bfloat16. The exit code is 1
    if a rule is not what it promises, or a pair's float32 texts differ.

    \b
        jaxspec verify
        jaxspec verify --target debian-t5-large --draft debian-t5-draft
    """
    if gamma > MOST:
        raise ValueError(f"--gamma is {gamma}: expected at most {MOST}, for what a round may draw is enumerated")
    if draft and not target:
        raise ValueError("a pair has two models: give --target, too, or neither")
    draft = draft or (drafter_names.default_model(target) if target else "")
    from jaxspec.analysis import exactness, numerics
    from jaxspec.cli import verify_tables as tables
    from jaxspec.rules import catalogue

    def load(dtype: str) -> Prepared:
        return names.prepared_pair(target, draft, dtype, None, count, gamma=gamma, max_new_tokens=max_new_tokens)

    dtypes = DTYPES if target else ()
    ready = {dtype: load(dtype) for dtype in dtypes[:1]}  # a wrong name is told before all else
    entries, rules, texts = catalogue.RULES.values(), [], {}
    with console.counting("enumerating", len(entries) + len(dtypes)) as doing:
        for entry in entries:
            doing(f"enumerating {entry.rule.name}")
            rules.append(exactness.certificate(entry, gamma=gamma, steps=steps, seed=seed))
        for dtype in dtypes:
            doing(f"greedy, {dtype}")
            texts[dtype] = numerics.summary(ready.pop(dtype, None) or load(dtype))
    if as_json:
        described = {"target": target, "draft": draft, "numerics": texts} if target else None
        console.print_json({"gamma": gamma, "steps": steps, "rules": rules, "pair": described})
    else:
        out = Console(highlight=False)
        out.print(tables.of_rules(rules), tables.about_rules(steps, gamma), sep="\n")
        if target:
            out.print(Text(f"\n{target} with {draft}:", "bold"), tables.of_texts(texts), sep="\n")
    if not all(rule.as_stated for rule in rules) or (target and texts[DTYPES[0]].mismatches):
        raise typer.Exit(1)
