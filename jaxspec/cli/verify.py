"""`jaxspec verify`: the certificate of exactness for every rule, and the evidence for a real pair."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from jaxspec.cli import console
from jaxspec.cli.options import Json
from jaxspec.cli.prompts import heldout_for

if TYPE_CHECKING:
    from jaxspec.accept.catalogue import Entry

EXACT = 1e-5  # a total variation below this is rounding
VOCAB = 3  # token ids of the table models
SHAPE = (2, 1)  # branches at each depth of the certified tree
KINDS = "model", "fixed", "tree"  # of drafters: draft tokens drawn by a model, or always the same; a model's tree
DTYPES = ("float32", "bfloat16")  # of a pair's greedy texts


def verify(
    gamma: Annotated[int, typer.Option("--gamma", "-g", help="Draft tokens a round.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Tokens whose joint distribution is enumerated.", min=2)] = 3,
    seed: Annotated[int, typer.Option(help="Of the table models, and of the samples from a pair.")] = 0,
    target: Annotated[str, typer.Option(help="Also test a real pair: its target,")] = "",
    draft: Annotated[str, typer.Option(help="and its drafter.")] = "",
    count: Annotated[int, typer.Option(help="Held-out prompts to compare a pair's greedy texts on.", min=1)] = 16,
    new_tokens: Annotated[int, typer.Option(help="Most tokens of these texts.", min=1)] = 48,
    sampled: Annotated[int, typer.Option(help="How many of the prompts (the shortest) to sample after.", min=1)] = 3,
    draws: Annotated[int, typer.Option(help="Samples per rule, temperature and prompt.", min=1)] = 1024,
    as_json: Json = False,
) -> None:
    """Compute how far each acceptance rule's text is from the target's distribution.

    For every rule the joint distribution of the first tokens is enumerated on small table models, with a model as
    drafter, with fixed draft tokens, and (rules that judge trees) with a model's tree. The distance is the total
    variation: the most by which any event's probability is off. An inexact rule is tested for its bound.

    For a real pair, greedy texts are compared with plain decoding's in float32 and bfloat16 (where they differ, the
    margin between the two largest logits shows whether it was a near tie), and every rule's samples at temperatures 0.7
    and 1 with the target's distribution, or with the rule's bound.

    Ends with code 1 if a rule is not what it promises, or a pair's float32 texts or samples are off.

        jaxspec verify

        jaxspec verify --target debian-t5-base --draft debian-t5-small
    """
    if bool(target) != bool(draft):
        raise ValueError("a pair has two models: give --target and --draft, or neither")
    from jaxspec.accept import catalogue
    from jaxspec.analysis.measure import fits

    found: dict[str, Any] = {"gamma": gamma, "steps": steps, "rules": [], "pair": None}
    amount = fits.Draws(sampled, draws, seed)
    with console.progress() as bar:
        total = len(catalogue.RULES) + (fits.steps_of(len(DTYPES), amount) if target else 0)
        shown = bar.add_task("enumerating", total=total)
        for entry in catalogue.RULES.values():
            bar.update(shown, description=f"enumerating {entry.rule.name}")
            found["rules"].append(certificate(entry, gamma, steps, seed))
            bar.advance(shown)
        if target:

            def doing(what: str) -> None:
                bar.update(shown, description=what, advance=1)

            jobs = {dtype: pair_job(target, draft, dtype, gamma, count, new_tokens) for dtype in DTYPES}
            found["pair"] = {"target": target, "draft": draft} | fits.of_pair(jobs, amount, doing=doing)
    if as_json:
        print(json.dumps(found))
    else:
        _show(found, Console(highlight=False))
    if not (all(row["as_stated"] for row in found["rules"]) and (found["pair"] is None or found["pair"]["as_stated"])):
        raise typer.Exit(1)


def pair_job(target: str, draft: str, dtype: str, gamma: int, count: int, new_tokens: int) -> Any:
    """A pair on held-out prompts, greedy."""
    from jaxspec import model
    from jaxspec.decode.request import prepare

    big, small = (model.load(name, dtype=dtype) for name in (target, draft))
    return prepare(big, heldout_for(big, count), drafter=small, gamma=gamma, max_new_tokens=new_tokens)


def certificate(entry: Entry, gamma: int, steps: int, seed: int) -> dict[str, Any]:
    """How far a rule's text is from the target's distribution, and from its bound, with each kind of drafter."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxspec import drafters
    from jaxspec.base import Caches, Draft, DraftContext, Drafter, Prompt
    from jaxspec.decode.request import prepare
    from jaxspec.drafters.common import no_commit, no_state
    from jaxspec.testing import decoder_distribution, excess, plain_distribution, table_model, total_variation

    rule, ceiling = entry
    target, draft = (table_model(jax.random.fold_in(jax.random.key(seed), i), vocab=VOCAB) for i in range(2))

    def propose(weights: Any, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        tokens = jnp.ones((context.limit.shape[0], context.gamma), jnp.int32)
        return Draft(tokens, jnp.full_like(context.limit, context.gamma)), caches

    made = {KINDS[0]: draft, KINDS[1]: Drafter(no_state, propose, no_commit)}
    if rule.trees:
        made[KINDS[2]] = drafters.tree(draft, SHAPE)
    prompt = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    job = prepare(target, prompt, accept=rule, gamma=gamma, temperature=1.0, key=jax.random.key(0), eos_ids=())
    plain = plain_distribution(target, job.prompt, job.sampler, job.request.sampling_params, steps)
    distances, above = {}, {}
    for kind, drafter in made.items():
        found = decoder_distribution(job.replace(drafter=drafter, max_new_tokens=steps), steps=steps)
        distances[kind] = total_variation(found, plain)
        if ceiling is not None:
            above[kind] = excess(found, plain, ceiling, VOCAB)
    if not rule.exact and ceiling is None:
        raise ValueError(f"the rule {rule.name} is inexact and states no bound: give its catalogue.Entry a ceiling")
    off = distances if rule.exact else above
    row = {"rule": rule.name, "exact": rule.exact, "total_variation": distances, "above_bound": above or None}
    return row | {"as_stated": bool(np.max(list(off.values())) < EXACT)}


def _show(found: dict[str, Any], out: Console) -> None:
    heads = [*KINDS, "above\nits bound", "verdict"]
    table = console.table(heads, first="rule", title="Total variation, by drafter")
    for row in found["rules"]:
        off, above = row["total_variation"], row["above_bound"]
        cells = [f"{off[kind]:.1e}" if kind in off else "–" for kind in KINDS]
        over = "–" if above is None else f"{max(*above.values(), 0.0):.1e}"
        verdict = Text("as stated", "green") if row["as_stated"] else Text("WRONG", "bold red")
        table.add_row(row["rule"], *cells, over, verdict)
    out.print(table)
    out.print(
        f"By enumeration: {found['steps']} tokens of {VOCAB}, γ = {found['gamma']}, a tree of {SHAPE[0]} branches that "
        f"go on for {len(SHAPE)} tokens. Below {EXACT:g} is rounding. Inexact rules need only keep to their bound."
    )
    for part in pair_tables(found["pair"]) if found["pair"] else []:
        out.print(part)


def pair_tables(pair: dict[str, Any]) -> list[RenderableType]:
    """What to print of a pair."""
    from jaxspec.analysis.measure.fits import FREQUENT

    samples = pair["samples"]
    about = f"{samples['prompts']} prompts, {samples['draws']} draws of two tokens after each"
    return [
        Text(f"\n{pair['target']} with {pair['draft']}:", "bold"),
        _numerics_table(pair["numerics"]),
        _samples_table(samples["tests"], f"samples against the target's distribution: {about}"),
        Text(
            f"p is the least of a rule's p-values, all {len(samples['tests'])} corrected for their number (Holm): χ² "
            "tests of fit, and for inexact rules binomial tests of their bound. Below "
            f"{samples['false_alarm']:g} is hardly chance. Intervals are Clopper and Pearson's, for the probability of "
            f"the {FREQUENT} likeliest first tokens of each test; all of them together hold it with "
            f"{samples['confidence']:.0%} confidence (Bonferroni)."
        ),
    ]


def _numerics_table(numerics: dict[str, Any]) -> RenderableType:
    heads = ["same text", "first mismatch: prompt", "new token", "top-two margin there", "largest such margin"]
    table = console.table(heads, first="greedy", title="greedy texts against plain decoding's, margins in nats")
    for dtype, found in numerics.items():
        same, first = f"{found['same']} of {found['prompts']}", found["first"]
        if first is None:
            table.add_row(dtype, same, "none", "–", "–", "–")
            continue
        margins = f"{first['top_two_margin']:.3g}", f"{found['largest_top_two_margin']:.3g}"
        table.add_row(dtype, same, str(first["row"]), str(first["position"]), *margins)
    return table


def _samples_table(tests: list[dict[str, Any]], title: str) -> RenderableType:
    heads = [
        "T",
        "draft tokens accepted",
        "p",
        "farthest token: target",
        "interval",
        "intervals that hold it",
        "verdict",
    ]
    table = console.table(heads, first="rule", title=title)
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for test in tests:
        groups.setdefault((test["rule"] + ("" if test["exact"] else ", inexact"), test["temperature"]), []).append(test)
    for (name, temperature), group in sorted(groups.items(), key=lambda item: item[0][1]):
        accepted = sum(test["acceptance_rate"] for test in group) / len(group)
        tokens = [(token, test["draws"]) for test in group for token in test["frequent"]]
        cells = ["–", "–", "–"]
        if tokens:
            far, _ = max(tokens, key=lambda pair: abs(pair[0]["drawn"] / pair[1] - pair[0]["target"]))
            held = sum(token["low"] <= token["target"] <= token["high"] for token, _ in tokens)
            cells = [f"{far['target']:.3f}", f"{far['low']:.3f}..{far['high']:.3f}", f"{held} of {len(tokens)}"]
        right = all(test["as_stated"] for test in group)
        verdict = Text("as stated", "green") if right else Text("WRONG", "bold red")
        least = min(test["corrected"] for test in group)
        table.add_row(name, f"{temperature:g}", f"{accepted:.0%}", f"{least:.3g}", *cells, verdict)
    return table
