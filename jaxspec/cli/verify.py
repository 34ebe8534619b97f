"""`jaxspec verify`: the certificate of exactness for every rule, and the evidence for a real pair."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from jaxspec.cli import tables
from jaxspec.cli.prompts import heldout_for

if TYPE_CHECKING:
    from jaxspec.accept import Rule
    from jaxspec.base import Model, Prompt

EXACT = 1e-5  # a total variation below this is rounding
UNLIKELY = 1e-3  # a p-value below this is no accident


def verify(
    gamma: Annotated[int, typer.Option("--gamma", "-g", help="Guesses a round.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Tokens whose joint law is enumerated.", min=2)] = 3,
    seed: Annotated[int, typer.Option(help="Of the table models, and of the samples from a pair.")] = 0,
    target: Annotated[str, typer.Option(help="Also test a real pair: its target,")] = "",
    draft: Annotated[str, typer.Option(help="and its drafter.")] = "",
    count: Annotated[int, typer.Option(help="Held-out prompts to compare a pair's texts on.", min=1)] = 16,
    new_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=1)] = 48,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compute how far each acceptance rule's text is from the target's law.

    For every rule the joint law of the first tokens is enumerated on small table models, with a model and with a
    fixed guess as drafter. The distance is the total variation: the most by which any event's probability is off.

    For a real pair, greedy texts are compared with plain decoding's in float32 and bfloat16 (where they part, the
    margin between the two tokens says whether it was a near tie), and samples with the target's law.

    Ends with code 1 if a rule that calls itself exact is not, or a pair's float32 texts or samples are off.

        jaxspec verify

        jaxspec verify --target debian-t5-base --draft debian-t5-small
    """
    if bool(target) != bool(draft):
        raise ValueError("a pair has two models: give --target and --draft, or neither")
    err, out = Console(stderr=True), Console(highlight=False)
    found: dict[str, Any] = {"gamma": gamma, "steps": steps, "rules": [], "pair": None}
    with err.status("enumerating") as status:
        for rule in rules():
            status.update(f"enumerating {rule.name}")
            found["rules"].append(certificate(rule, gamma, steps, seed))
        if target:
            status.update(f"decoding with {target} and {draft}")
            found["pair"] = evidence(target, draft, gamma, count, new_tokens, seed)
    if as_json:
        print(json.dumps(found))
    else:
        _show(found, out)
    if not (all(row["as_stated"] for row in found["rules"]) and (found["pair"] is None or found["pair"]["exact"])):
        raise typer.Exit(1)


def rules() -> list[Rule]:
    """Every rule for a chain of guesses, the inexact ones with ordinary parameters."""
    from jaxspec import accept

    exact = [accept.rejection(), accept.block(), accept.coupled(), accept.exact_match(), accept.rejection_sampling()]
    return [*exact, accept.lenient(0.5), accept.typical()]


def certificate(rule: Rule, gamma: int, steps: int, seed: int) -> dict[str, Any]:
    """The total variation of a rule's text from the target's law, with two kinds of drafters."""
    import jax
    import jax.numpy as jnp

    from jaxspec import drafters
    from jaxspec.base import Draft, Drafter
    from jaxspec.testing import certify, table_model

    models = [table_model(jax.random.fold_in(jax.random.key(seed), i), vocab=3) for i in range(2)]

    def init(params, prompt, room, forward):
        return ()

    def propose(keys, params, state, context, gamma, to_law, budget=None):
        batch = context.length.shape[0]
        return Draft(jnp.ones((batch, gamma), jnp.int32), None, jnp.full((batch,), gamma, jnp.int32)), state

    def commit(params, state, context, verdict, forward):
        return state

    fixed = Drafter(init, propose, commit)
    drafts = {"model": (drafters.model(models[1].lm, rule.plain_noise), models[1].params), "fixed guess": (fixed, None)}
    distances = {
        kind: certify(models[0], drafter=drafter, accept=rule, gamma=gamma, steps=steps, draft_params=params)
        for kind, (drafter, params) in drafts.items()
    }
    worst = max(distances.values())
    return {
        "rule": rule.name,
        "exact": rule.exact,
        "total_variation": distances,
        "as_stated": not rule.exact or worst < EXACT,  # an inexact rule may happen to be right
    }


def evidence(target: str, draft: str, gamma: int, count: int, new_tokens: int, seed: int) -> dict[str, Any]:
    """How a real pair's texts and samples compare with plain decoding's."""
    import jax

    from jaxspec import model
    from jaxspec.analysis import chisquare, numerics

    pairs = {dtype: [model.load(name, dtype=dtype) for name in (target, draft)] for dtype in ("float32", "bfloat16")}
    big, small = pairs["float32"]
    prompts, greedy = prompts_of(big, count), {}
    for dtype, models in pairs.items():
        parted = numerics.divergences(models[0], models[1], prompts, gamma=gamma, max_new_tokens=new_tokens)
        greedy[dtype] = {"prompts": len(prompts.length), "parted": [p._asdict() for p in parted]}
    one = jax.tree.map(lambda x: x[:1], prompts)
    sampled = chisquare.second_token(big, small, one, jax.random.key(seed), gamma=gamma, temperature=0.7)
    exact = not greedy["float32"]["parted"] and sampled.pvalue > UNLIKELY
    return {"target": target, "draft": draft, "greedy": greedy, "sampled": sampled._asdict(), "exact": exact}


def prompts_of(target: Model, count: int) -> Prompt:
    """The first held-out prompts, as token ids."""
    from jaxspec.decode import request

    return request.encode(target, heldout_for(target, count))


def _show(found: dict[str, Any], out: Console) -> None:
    kinds = list(found["rules"][0]["total_variation"])
    table = tables.table([*kinds, "says it is", "verdict"], first="total variation, drafter:")
    for row in found["rules"]:
        cells = [f"{row['total_variation'][kind]:.1e}" for kind in kinds]
        verdict = Text("as stated", "green") if row["as_stated"] else Text("WRONG", "bold red")
        table.add_row(row["rule"], *cells, "exact" if row["exact"] else "inexact", verdict)
    out.print(table)
    out.print(f"By enumeration: {found['steps']} tokens of 3, γ = {found['gamma']}. Below {EXACT:g} is rounding.")
    if found["pair"]:
        for line in _pair_lines(found["pair"]):
            out.print(line)


def _pair_lines(pair: dict[str, Any]) -> list[Text]:
    lines = [Text(f"\n{pair['target']}, drafted for by {pair['draft']}:", "bold")]
    for dtype, found in pair["greedy"].items():
        margins = [abs(parting["margin"]) for parting in found["parted"]]
        same = found["prompts"] - len(margins)
        where = f"; where they part, the two tokens' logits differ by at most {max(margins):.3g}" if margins else ""
        lines.append(Text(f"greedy, {dtype}: {same} of {found['prompts']} texts as plain decoding has them{where}"))
    test = pair["sampled"]
    about = f"χ² = {test['statistic']:.1f} over {test['cells']} cells, {test['draws']} draws, p = {test['pvalue']:.3f}"
    return [*lines, Text(f"sampled, temperature 0.7: {about}; {test['acceptance_rate']:.0%} of guesses kept")]
