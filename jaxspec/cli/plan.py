"""`jaxspec plan`: which gamma to take, how much faster that will be, and when not to speculate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from jaxspec.cli import console, options
from jaxspec.cli.options import DRAFT, TARGET, Json, NewTokens, Prompts, Repeats, Seed, Temperature, integers

if TYPE_CHECKING:
    from jaxspec.analysis.bench.plan import Plan
    from jaxspec.analysis.theory.roofline import Load
    from jaxspec.decode.request import Job


def plan(
    target: Annotated[str, options.text("MODEL", "The target; with --device a size (11B) or shape.")] = TARGET,
    draft: Annotated[str, options.text("MODEL", "The drafter, likewise.")] = DRAFT,
    alpha: Annotated[float | None, options.text("RATE", "Acceptance rate, if it is known.")] = None,
    c: Annotated[float | None, options.text("COST", "A pass of the drafter, in passes of the target.", "--c")] = None,
    v: Annotated[float, options.text("COST", "What each further token adds to a pass of the target.", "--v")] = 0.0,
    c_hat: Annotated[float | None, options.text("RATIO", "Operations of the drafter over the target's.")] = None,
    device: Annotated[str, options.text("NAME", "Compute it for a machine: h200, a100, tpu-v5e, ...")] = "",
    row_tokens: Annotated[int, options.number("With shapes: tokens in the cache.", least=0)] = 256,
    batch: options.Batches = "1",
    most: Annotated[int, options.number("The largest γ to consider.")] = 16,
    temperature: Temperature = 0.0,
    prompts: Prompts = None,
    count: options.Count = 32,
    new_tokens: NewTokens = 64,
    repeats: Repeats = 25,
    seed: Seed = 0,
    tree: Annotated[bool, typer.Option("--tree", help="The token tree that a pair should draft here.")] = False,
    nodes: Annotated[int, options.number("With --tree: most draft tokens.")] = 32,
    figure: Annotated[Path | None, options.text("FILE", "With --tree: a .svg or .png to draw it in.")] = None,
    dtype: Annotated[str, options.text("DTYPE", "Default: float32 of a pair that is measured, else bfloat16.")] = "",
    as_json: Json = False,
) -> None:
    """Choose γ: the best one for each batch size, its speed-up, and when not to speculate.

    For a pair, measured on prompts on this machine; for an acceptance rate and costs that are known; or for sizes on a
    machine that is not here, by its bandwidth and peak:

    \b
        jaxspec plan --batch 1,8
        jaxspec plan --tree --nodes 32 --figure tree.svg
        jaxspec plan --alpha 0.75 --c 0.02 --v 0.05
        jaxspec plan --alpha 0.75 --target t5-v1_1-xxl --draft t5-v1_1-small --device tpu-v4 --batch 1,32
    """
    from jaxspec.analysis.bench import plan as planning
    from jaxspec.analysis.theory import roofline

    batches = integers(batch, "--batch")
    _check(alpha, c, v, device, batches)
    if tree and (alpha is not None or device or len(batches) > 1):
        raise ValueError("--tree is for a pair, which it measures, at one batch size: leave out --alpha and --device")
    if device:
        assert alpha is not None
        big, small = (roofline.load_of_size(size, dtype or "bfloat16", row_tokens) for size in (target, draft))
        plans = [of_loads(alpha, c, c_hat, big, small, device, rows, most) for rows in batches]
        about = f"{target} with {draft} on {device}, by bandwidth and peak; real passes are slower"
    elif alpha is not None and c is not None:
        plans = [planning.plan(alpha, c, [1 + v * gamma for gamma in range(most + 1)], c_hat=c_hat)]
        about = f"α = {alpha:g}, c = {c:g}, a pass over γ + 1 tokens taking {'1' if not v else f'1 + {v:g} γ'}"
    else:
        asked = {"max_new_tokens": new_tokens, "temperature": temperature, "seed": seed}
        job = options.pair_job(target, draft, dtype or "float32", prompts, count, **asked)
        if tree:
            return _show_tree(job, min(batches), nodes, repeats, figure, as_json)
        with console.counting("plan", planning.steps(batches, most)) as advance:
            plans = list(planning.of_pair(job, batches=batches, most=most, repeats=repeats, advance=advance))
        about = f"{target} with {draft}, temperature {temperature:g}, measured here"
    _show(about, plans, as_json)


def of_loads(
    alpha: float, c: float | None, c_hat: float | None, target: Load, draft: Load, device: str, batch: int, most: int
) -> Plan:
    """A plan by the roofline; of c and c_hat, those that are given are taken."""
    from jaxspec.analysis.bench import plan as planning
    from jaxspec.analysis.theory import roofline

    chip = roofline.machine(device)
    v = roofline.verify_cost(chip, target, range(most + 1), batch)
    each = float(roofline.draft_cost(chip, draft, target, batch)) if c is None else c
    ratio = draft.parameters / target.parameters if c_hat is None else c_hat
    return planning.plan(alpha, each, v, c_hat=ratio, batch=batch)


def _show_tree(job: Job, batch: int, nodes: int, repeats: int, figure: Path | None, as_json: bool) -> None:
    from jaxspec.analysis.bench import tree_plan
    from jaxspec.analysis.measure import environment

    with Console(stderr=True).status("measuring acceptance by rank, and passes"):
        found = tree_plan.of_job(job, nodes=nodes, batch=batch, repeats=repeats)
    if figure is not None:
        from jaxspec.analysis import figures

        drawn = figures.tree_diagram(found.tree.shape, found.acceptance[found.tree.draw])
        figures.save(drawn, figure.parent, figure.stem, [figure.suffix.removeprefix(".")])
    if as_json:
        print(json.dumps({"environment": environment.current(), **tree_plan.to_dict(found)}, ensure_ascii=False))
    else:
        Console(highlight=False, soft_wrap=True).print(tree_plan.sentence(found))


def _show(about: str, plans: Sequence[Plan], as_json: bool) -> None:
    from jaxspec.analysis.bench import plan as planning
    from jaxspec.analysis.measure import environment

    if as_json:
        rows = []
        for found in plans:
            pays = found.break_even if found.break_even < 1 else None  # JSON has no infinity
            rows.append(found._asdict() | {"break_even": pays, "advice": planning.sentence(found)})
        print(json.dumps({"environment": environment.current(), "about": about, "plans": rows}, ensure_ascii=False))
        return
    heads = ["batch", "α", "c", "v", "γ", "tokens\nper round", "speed-up", "operations"]
    out, table = Console(highlight=False), console.table(heads)
    for found in plans:
        numbers = f"{found.alpha:.3f}", f"{found.c:.3f}", f"{found.v:.2f}", f"{found.gamma or 'plain'}"
        gains = f"{found.tokens_per_round:.2f}", f"{found.improvement:.2f}×", f"{found.operations:.2f}×"
        table.add_row(f"{found.batch}", *numbers, *gains)
    out.print(Text(about, "bold"), table, sep="\n")
    for found in plans:
        out.print(Text((f"Batch {found.batch}: " if len(plans) > 1 else "") + planning.sentence(found)))


def _check(alpha: float | None, c: float | None, v: float, device: str, batches: Sequence[int]) -> None:
    """Refuses options that do not go together."""
    if device and alpha is None:
        raise ValueError("sizes do not tell the acceptance rate: add an --alpha (the paper has 0.5 to 0.9)")
    if not device and (alpha is None) != (c is None):
        given, other = ("--alpha", "--c") if c is None else ("--c", "--alpha")
        raise ValueError(f"{given} needs an {other}, or sizes as --target and --draft, and a --device")
    if v and (c is None or device):
        raise ValueError("--v goes with --alpha and --c: for a pair it is measured, for sizes it is computed")
    if c is not None and not device and batches != (1,):
        raise ValueError("--batch is for a pair or for sizes: --alpha, --c and --v are of one batch size")
    if v < 0:
        raise ValueError(f"--v is {v:g}: expected 0 or more")
