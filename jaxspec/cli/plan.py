"""`jaxspec plan`: whether to speculate, with which gamma or tree, and how much faster that will be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from jaxspec.cli import console, drafter_names, lists, names, options, tree_plan
from jaxspec.cli.options import TARGET, Batches, Json, NewTokens, Prompts, Repeats, Seed, Temperature

if TYPE_CHECKING:
    from jaxspec.analysis.plan import Plan

IGNORED = {  # options that would be, by what is asked for
    "a plan for --alpha and --c": (
        *("target", "draft", "temperature", "prompts", "count", "max_new_tokens", "repeats", "seed", "dtype"),
        *("nodes", "row_tokens"),
    ),
    "a plan for a --device": ("temperature", "prompts", "count", "max_new_tokens", "repeats", "seed", "nodes"),
    "--tree": ("gamma", "c_hat", "row_tokens"),
    "a plan for a pair": ("nodes", "c_hat", "row_tokens"),
}


def plan(
    target: Annotated[str, options.text("MODEL", "The target; with --device a size (11B) or shape.")] = TARGET,
    draft: Annotated[str, options.text("MODEL", "The drafter, likewise.", "--draft", "-d")] = "",
    gamma: Annotated[int, options.number("The largest γ to consider.", "--gamma", "-g")] = 16,
    temperature: Temperature = 0.0,
    batch: Batches = "1",
    prompts: Prompts = None,
    count: options.Count = 32,
    max_new_tokens: NewTokens = 64,
    repeats: Repeats = 25,
    seed: Seed = 0,
    dtype: Annotated[str, options.text("DTYPE", "Default: float32 of a pair that is measured, else bfloat16.")] = "",
    tree: Annotated[bool, typer.Option("--tree", help="The token tree that a pair should draft here.")] = False,
    nodes: Annotated[int, options.number("With --tree: most draft tokens.")] = 32,
    timed: Annotated[bool, options.flag("With --tree: time it, and the best chain.", "--timed")] = False,
    alpha: Annotated[float | None, options.text("RATE", "Acceptance rate, if it is known.")] = None,
    c: Annotated[float | None, options.text("COST", "A pass of the drafter, in passes of the target.", "--c")] = None,
    v: Annotated[float, options.text("COST", "What each further token adds to a pass of the target.", "--v")] = 0.0,
    c_hat: Annotated[float | None, options.text("RATIO", "Operations of the drafter over the target's.")] = None,
    device: Annotated[str, options.text("NAME", "Compute it for a machine: h200, a100, tpu-v5e, ...")] = "",
    row_tokens: Annotated[int, options.number("With shapes: tokens in the cache.", least=0)] = 256,
    as_json: Json = False,
) -> None:
    """Whether to speculate, with which γ at each batch size, and how much faster that will be at most.

    For a pair, measured on prompts on this machine; for an acceptance rate and costs that are known; or for sizes on a
    machine that is not here, by its memory, bandwidth and peak:

    \b
        jaxspec plan --batch 1,8
        jaxspec plan --tree --nodes 32 --timed
        jaxspec plan --alpha 0.75 --c 0.02 --v 0.05
        jaxspec plan --alpha 0.75 --target t5-v1_1-xxl --draft t5-v1_1-small --device tpu-v4 --batch 1,32
    """
    from jaxspec.analysis import environment
    from jaxspec.analysis import plan as planning

    batches, note = lists.integers(batch, "--batch"), ""
    _check(alpha, c, v, device, batches)
    if not tree and timed:
        raise ValueError("--timed is of --tree: add it, or leave it out")
    if tree and (alpha is not None or device or len(batches) > 1):
        raise ValueError("--tree is for a pair, which it measures, at one batch size: leave out --alpha and --device")
    known = "a plan for a --device" if device else "a plan for --alpha and --c" if alpha is not None else ""
    mode = known or ("--tree" if tree else "a plan for a pair")
    options.refuse([name for name in options.given.get() if name in IGNORED[mode]], mode)
    if device or alpha is None:
        draft = draft or drafter_names.default_model(target)
    if device:
        assert alpha is not None
        sizes = {"dtype": dtype or "bfloat16", "row_tokens": row_tokens, "most": gamma, "c": c, "c_hat": c_hat}
        plans = [planning.of_sizes(alpha, target, draft, device, batch=some, **sizes) for some in batches]
        about = f"{target} with {draft} on {device}, by memory, bandwidth and peak; real passes are slower"
    elif alpha is not None and c is not None:
        plans = [planning.plan(alpha, c, [1 + v * drafted for drafted in range(gamma + 1)], c_hat=c_hat)]
        about = f"α = {alpha:g}, c = {c:g}, a pass over γ + 1 tokens taking {'1' if not v else f'1 + {v:g} γ'}"
    else:
        asked = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        prepared = names.prepared_pair(target, draft, dtype or "float32", prompts, count, **asked)
        if tree:
            return tree_plan.show(prepared, min(batches), nodes, repeats, timed, as_json)
        with console.counting("plan", planning.steps(batches, gamma)) as advance:
            plans = list(planning.of_pair(prepared, batches=batches, most=gamma, repeats=repeats, advance=advance))
        machine = environment.current()
        about = f"{target} with {draft}, temperature {temperature:g}, measured here"
        note = f"{environment.line(machine)}, load {machine.load}\n"
        note += "Passes are timed one after the other; in a round they share caches: `jaxspec bench` times whole texts."
    if as_json:
        return console.print_measured(
            about=about, plans=[found._asdict() | {"advice": planning.sentence(found)} for found in plans]
        )
    _show(about, plans, note)


def _show(about: str, plans: Sequence[Plan], note: str) -> None:
    from jaxspec.analysis import plan as planning

    heads = ["batch", "α", "c", "v", "γ", "tokens\nper round", "speed-up,\nat most", "operations"]
    out, table = Console(highlight=False), console.table(heads)
    for found in plans:
        numbers = f"{found.alpha:.3f}", f"{found.c:.3f}", f"{found.v:.2f}", f"{found.gamma or 'plain'}"
        gains = f"{found.tokens_per_round:.2f}", f"{found.improvement:.2f}×", f"{found.operations:.2f}×"
        table.add_row(f"{found.batch}", *numbers, *gains)
    out.print(Text(about, "bold"), table, sep="\n")
    for found in plans:
        out.print(Text((f"Batch {found.batch}: " if len(plans) > 1 else "") + planning.sentence(found)))
    if note:
        out.print(Text(note))


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
