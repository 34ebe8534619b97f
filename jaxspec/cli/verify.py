"""`jaxspec verify`: the certificate of exactness for every rule, and the evidence for a real pair."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from jaxspec.cli import evidence, tables

if TYPE_CHECKING:
    from jaxspec.accept.catalogue import Entry, Step

EXACT = 1e-5  # a total variation below this is rounding
VOCAB = 3  # token ids of the table models
KINDS = "model", "fixed guess"  # of drafters


def verify(
    gamma: Annotated[int, typer.Option("--gamma", "-g", help="Guesses a round.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Tokens whose joint law is enumerated.", min=2)] = 3,
    seed: Annotated[int, typer.Option(help="Of the table models, and of the samples from a pair.")] = 0,
    target: Annotated[str, typer.Option(help="Also test a real pair: its target,")] = "",
    draft: Annotated[str, typer.Option(help="and its drafter.")] = "",
    count: Annotated[int, typer.Option(help="Held-out prompts to compare a pair's greedy texts on.", min=1)] = 16,
    new_tokens: Annotated[int, typer.Option(help="Most tokens of these texts.", min=1)] = 48,
    sampled: Annotated[int, typer.Option(help="How many of the prompts (the shortest) to sample behind.", min=1)] = 3,
    draws: Annotated[int, typer.Option(help="Samples per rule, temperature and prompt.", min=1)] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compute how far each acceptance rule's text is from the target's law.

    For every rule the joint law of the first tokens is enumerated on small table models, with a model and with a
    fixed guess as drafter. The distance is the total variation: the most by which any event's probability is off. An
    inexact rule is held to the bound that it states.

    For a real pair, greedy texts are compared with plain decoding's in float32 and bfloat16 (where they part, the
    margin between the two largest logits says whether it was a near tie), and every rule's samples at temperatures 0.7
    and 1 with the target's law, or with the rule's bound.

    Ends with code 1 if a rule is not what it says, or a pair's float32 texts or samples are off.

        jaxspec verify

        jaxspec verify --target debian-t5-base --draft debian-t5-small
    """
    if bool(target) != bool(draft):
        raise ValueError("a pair has two models: give --target and --draft, or neither")
    from jaxspec.accept import catalogue

    found: dict[str, Any] = {"gamma": gamma, "steps": steps, "rules": [], "pair": None}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        total = len(catalogue.CHAINS) + len(catalogue.STEPS) + (evidence.steps_of(sampled) if target else 0)
        shown = bar.add_task("enumerating", total=total)
        for entry in catalogue.CHAINS.values():
            bar.update(shown, description=f"enumerating {entry.rule.name}")
            found["rules"].append(certificate(entry, gamma, steps, seed))
            bar.advance(shown)
        for name, judge in catalogue.STEPS.items():
            bar.update(shown, description=f"enumerating {name}")
            found["rules"] += certificates(name, judge, steps, seed)
            bar.advance(shown)
        if target:
            sizes: dict[str, Any] = dict(gamma=gamma, count=count, new_tokens=new_tokens, sampled=sampled, draws=draws)
            doing = lambda what: bar.update(shown, description=what, advance=1)  # noqa: E731
            found["pair"] = evidence.of_pair((target, draft), **sizes, seed=seed, doing=doing)
    if as_json:
        print(json.dumps(found))
    else:
        _show(found, Console(highlight=False))
    if not (all(row["as_stated"] for row in found["rules"]) and (found["pair"] is None or found["pair"]["as_stated"])):
        raise typer.Exit(1)


def certificate(entry: Entry, gamma: int, steps: int, seed: int) -> dict[str, Any]:
    """How far a rule's text is from the target's law, and from its bound, with two kinds of drafters."""
    import jax
    import jax.numpy as jnp

    from jaxspec import drafters
    from jaxspec.base import Draft, Drafter, Prompt, Weights
    from jaxspec.decode import speculative
    from jaxspec.testing import decoder_law, excess, plain_law, table_model, total_variation
    from jaxspec.warp import Controls, sampling

    rule, ceiling = entry
    target, draft = (table_model(jax.random.fold_in(jax.random.key(seed), i), vocab=VOCAB) for i in range(2))

    def init(params, prompt, room, forward):
        return ()

    def propose(keys, params, state, context, gamma, to_law, budget=None):
        batch = context.length.shape[0]
        return Draft(jnp.ones((batch, gamma), jnp.int32), None, jnp.full((batch,), gamma, jnp.int32)), state

    def commit(params, state, context, verdict, forward):
        return state

    made = (drafters.model(draft.lm, rule.plain_noise), draft.params), (Drafter(init, propose, commit), None)
    prompt = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    controls = Controls(jnp.ones(1), jnp.full(1, VOCAB), jnp.ones(1))
    plain, distances, above = plain_law(target, prompt, sampling(), controls, steps), {}, {}
    for kind, (drafter, params) in zip(KINDS, made, strict=True):
        decoder = speculative(target.lm, drafter, rule, sampling(), gamma)
        law = decoder_law(decoder, Weights(target.params, params), prompt, controls, steps=steps)
        distances[kind] = total_variation(law, plain)
        if ceiling is not None:
            above[kind] = excess(law, plain, ceiling, VOCAB)
    if not rule.exact and ceiling is None:
        raise ValueError(f"the rule {rule.name} is inexact and states no bound: give its catalogue.Entry a ceiling")
    off = distances if rule.exact else above
    row = {"rule": rule.name, "exact": rule.exact, "total_variation": distances, "above_bound": above or None}
    return row | {"as_stated": max(off.values()) < EXACT}


def certificates(name: str, judge: Step, steps: int, seed: int) -> list[dict[str, Any]]:
    """The same of a step that judges several proposals for one position, a row for each way to make them."""
    import jax

    from jaxspec.testing import certify_iterated, independent, likeliest, table_model

    target, *drafters = (table_model(jax.random.fold_in(jax.random.key(seed), i), vocab=VOCAB) for i in range(3))
    ways = {
        "2 samples": ("model", drafters[:1], independent(2)),
        "3 samples": ("model", drafters[:1], independent(3)),
        "2 drafters": ("model", drafters, independent(2)),
        "top 2": ("fixed guess", drafters[:1], likeliest(2)),
    }
    rows = []
    for way, (kind, some, propose) in ways.items():
        off = certify_iterated(target, drafters=some, propose=propose, judge=judge, steps=steps)
        row: dict[str, Any] = {"rule": f"{name}, {way}", "exact": True, "total_variation": {kind: off}}
        rows.append(row | {"above_bound": None, "as_stated": off < EXACT})
    return rows


def _show(found: dict[str, Any], out: Console) -> None:
    table = tables.table([*KINDS, "above its bound", "says it is", "verdict"], first="total variation, drafter:")
    for row in found["rules"]:
        off, above = row["total_variation"], row["above_bound"]
        cells = [f"{off[kind]:.1e}" if kind in off else "–" for kind in KINDS]
        over = "–" if above is None else f"{max(*above.values(), 0.0):.1e}"
        verdict = Text("as stated", "green") if row["as_stated"] else Text("WRONG", "bold red")
        table.add_row(row["rule"], *cells, over, "exact" if row["exact"] else "inexact", verdict)
    out.print(table)
    out.print(
        f"By enumeration: {found['steps']} tokens of {VOCAB}, γ = {found['gamma']}. Below {EXACT:g} is rounding. "
        "Inexact rules need only keep their bound."
    )
    for part in evidence.shown(found["pair"]) if found["pair"] else []:
        out.print(part)
