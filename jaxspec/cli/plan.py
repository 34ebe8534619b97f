"""`jaxspec plan`: which gamma to take, how much faster that will be, and when not to speculate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxspec.cli import console
from jaxspec.cli.options import DRAFT, TARGET, Draft, Json, Seed, Target, integers
from jaxspec.cli.prompts import from_file, heldout_for

if TYPE_CHECKING:
    from jaxspec.analysis.planning import Plan
    from jaxspec.analysis.roofline import Load
    from jaxspec.decode.request import Job

UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def plan(
    target: Target = TARGET,
    draft: Draft = DRAFT,
    alpha: Annotated[float | None, typer.Option(help="Instead of a pair: its acceptance rate.")] = None,
    c: Annotated[
        float | None, typer.Option("--c", help="A pass of the drafter, in those of the target; with --alpha.")
    ] = None,
    v: Annotated[
        float, typer.Option("--v", help="What each further token adds to a pass of the target; with --alpha and --c.")
    ] = 0.0,
    c_hat: Annotated[
        float | None, typer.Option("--c-hat", help="Operations of the drafter over the target's, if they are not --c.")
    ] = None,
    target_size: Annotated[
        str,
        typer.Option(help="Instead of --c and --v: parameters that decode, as 11B, or a shape of `jaxspec models`."),
    ] = "",
    draft_size: Annotated[str, typer.Option(help="The same for the drafter.")] = "",
    device: Annotated[str, typer.Option(help="The machine for the sizes, such as h200, a100 or tpu-v5e.")] = "",
    row_tokens: Annotated[
        int, typer.Option(help="With shapes: tokens of a row, and of an encoder's prompt, in the cache.", min=0)
    ] = 256,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1",
    most: Annotated[int, typer.Option(help="The largest γ to consider.", min=1)] = 16,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Of a pair's texts.")] = 0.0,
    prompts: Annotated[
        Path | None,
        typer.Option(help="For a pair: a file of prompts, one a line, or .jsonl with inputs; else held-out ones."),
    ] = None,
    count: Annotated[int, typer.Option(help="For a pair: prompts to measure on.", min=1)] = 32,
    new_tokens: Annotated[int, typer.Option(help="For a pair: most tokens per prompt.", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="For a pair: timings of each pass.", min=1)] = 25,
    seed: Seed = 0,
    tree: Annotated[
        bool, typer.Option("--tree", help="For a pair: the token tree to draft, or whether a chain does as well.")
    ] = False,
    nodes: Annotated[int, typer.Option(help="With --tree: most draft tokens.", min=1)] = 32,
    figure: Annotated[Path | None, typer.Option(help="With --tree: a .svg or .png to draw it in.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Default: float32 for a pair, which may be int8, too; bfloat16 else.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Choose γ: the best one for each batch size, its speed-up, and when not to speculate.

    For a pair of models (measured on prompts, on this machine), for an acceptance rate and costs that are known,
    or for sizes on a machine that you have not got, by its bandwidth and peak:

    jaxspec plan --batch 1,8

    jaxspec plan --tree --nodes 32 --figure tree.svg

    jaxspec plan --alpha 0.75 --c 0.02 --v 0.05

    jaxspec plan --alpha 0.75 --target-size t5-v1_1-xxl --draft-size t5-v1_1-small --device tpu-v4 --batch 1,32,128
    """
    sizes = {"--target-size": target_size, "--draft-size": draft_size, "--device": device}
    batches = integers(batch, "--batch")
    if tree and (alpha is not None or any(sizes.values())):
        raise ValueError("--tree is for a pair, which it measures: leave out --alpha and the sizes")
    _check(alpha, c, v, sizes, batches)
    if any(sizes.values()):
        assert alpha is not None
        loads = [load(size, dtype or "bfloat16", row_tokens) for size in (target_size, draft_size)]
        plans = list(of_sizes(alpha, (loads[0], loads[1]), device, batches, most, c, c_hat))
        about = f"{target_size} with {draft_size} on {device}, by bandwidth and peak; real passes are slower"
    elif alpha is not None and c is not None:
        from jaxspec.analysis import planning

        costs = [1 + v * gamma for gamma in range(most + 1)]
        plans = [planning.plan(alpha, c, costs, c_hat=c_hat)]
        about = f"α = {alpha:g}, c = {c:g}, a pass over γ + 1 tokens taking {'1' if not v else f'1 + {v:g} γ'}"
    else:
        import jax

        from jaxspec import model
        from jaxspec.decode.request import prepare

        big, small = (model.load(name, dtype=dtype or "float32") for name in (target, draft))
        texts = heldout_for(big, count) if prompts is None else from_file(prompts, count)
        job = prepare(big, texts, drafter=small, max_new_tokens=new_tokens, key=jax.random.key(seed))
        job = job.replace(temperature=temperature)
        if tree:
            return _show_tree(job, batches, nodes, repeats, figure, as_json)
        plans = of_pair(job, batches, most, repeats)
        about = f"{target} with {draft}, temperature {temperature:g}, measured here"
    _show(about, plans, as_json)


def of_sizes(
    alpha: float,
    loads: tuple[Load, Load],
    device: str,
    batches: Sequence[int],
    most: int,
    c: float | None,
    c_hat: float | None,
) -> Iterator[Plan]:
    """Plans by the roofline, for the loads of target and drafter."""
    import numpy as np

    from jaxspec.analysis import planning, roofline
    from jaxspec.analysis.machines import machine

    chip, (big, small) = machine(device), loads
    for batch in batches:
        costs = roofline.verify_cost(chip, big, np.arange(most + 1), batch)
        ratio = small.parameters / big.parameters if c_hat is None else c_hat
        taken = float(roofline.draft_cost(chip, small, big, batch)) if c is None else c
        yield planning.plan(alpha, taken, costs, c_hat=ratio, batch=batch)


def load(size: str, dtype: str, row_tokens: int) -> Load:
    """What a pass of a model of some size needs: of a published shape, or of so many parameters without a cache.

    >>> load("1.5B", "bfloat16", 0).parameters
    1500000000.0
    """
    import dataclasses

    from jaxspec.analysis.roofline import BYTES, Load, load_of
    from jaxspec.families import FAMILIES

    known = [name for name in BYTES if name != "int8"]  # no arithmetic is int8, and peaks are those of arithmetic
    if dtype not in known:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(known)}")
    shapes = {name: config for family in FAMILIES for name, config in family.sizes.items()}
    if size in shapes:
        return load_of(dataclasses.replace(shapes[size], dtype=dtype), row=row_tokens, prompt=row_tokens)
    number, unit = (size[:-1], UNITS[size[-1:].upper()]) if size[-1:].upper() in UNITS else (size, 1.0)
    try:
        parameters = float(number) * unit
    except ValueError:
        parameters = 0.0
    if not 0 < parameters < float("inf"):
        raise ValueError(f"size is {size!r}: expected parameters, such as 11B or 77M, or one of {', '.join(shapes)}")
    return Load(parameters, dtype=dtype)


def of_pair(job: Job, batches: Sequence[int], most: int, repeats: int) -> list[Plan]:
    """Plans by measurement, with a progress bar."""
    from jaxspec.analysis import planning

    with console.progress() as bar:
        task = bar.add_task("plan", total=planning.steps(batches, most))

        def advance(doing: str) -> None:
            bar.update(task, advance=1, description=doing)

        return list(planning.of_pair(job, batches=batches, most=most, repeats=repeats, advance=advance))


def _show_tree(job: Job, batches: Sequence[int], nodes: int, repeats: int, figure: Path | None, as_json: bool) -> None:
    """The tree that a pair should draft on this machine, at one batch size."""
    from jaxspec.analysis import environment, tree_plan

    if len(batches) > 1:
        raise ValueError(f"--tree plans for one batch size: got --batch {','.join(map(str, batches))}")
    with Console(stderr=True).status("measuring acceptance by rank, and passes"):
        found = tree_plan.of_job(job, nodes=nodes, batch=batches[0], repeats=repeats)
    if figure is not None:
        from jaxspec.analysis import figures

        drawn = figures.tree_diagram(found.tree.shape, found.acceptance[found.tree.draw])
        figures.save(drawn, figure.parent, figure.stem, [figure.suffix.removeprefix(".")])
    if as_json:
        report = {"environment": environment.current(), **tree_plan.to_dict(found)}
        print(json.dumps(report, ensure_ascii=False))
        return
    Console(highlight=False, soft_wrap=True).print(tree_plan.sentence(found))


def table(plans: Sequence[Plan]) -> Table:
    """A line for each batch size."""
    made = console.table(["batch", "α", "c", "v", "γ", "tokens\nper round", "speed-up", "operations"])
    for found in plans:
        cells = [
            f"{found.batch}",
            f"{found.alpha:.3f}",
            f"{found.c:.3f}",
            f"{found.v:.2f}",
            f"{found.gamma or 'plain'}",
        ]
        cells += [f"{found.tokens_per_round:.2f}", f"{found.improvement:.2f}×", f"{found.operations:.2f}×"]
        made.add_row(*cells)
    return made


def _show(about: str, plans: Sequence[Plan], as_json: bool) -> None:
    from jaxspec.analysis import environment, planning

    if as_json:
        rows = []
        for found in plans:
            pays = found.break_even if found.break_even < 1 else None  # JSON has no infinity
            rows.append(found._asdict() | {"break_even": pays, "advice": planning.sentence(found)})
        print(json.dumps({"environment": environment.current(), "about": about, "plans": rows}, ensure_ascii=False))
        return
    out = Console(highlight=False)
    out.print(Text(about, "bold"), table(plans), sep="\n")
    for found in plans:
        where = f"Batch {found.batch}: " if len(plans) > 1 else ""
        out.print(Text(where + planning.sentence(found)))


def _check(alpha: float | None, c: float | None, v: float, sizes: Mapping[str, str], batches: Sequence[int]) -> None:
    """Refuses options that do not go together."""
    absent = [name for name, value in sizes.items() if not value]
    if 0 < len(absent) < len(sizes):
        raise ValueError(f"sizes need a target, a drafter and a machine: {' and '.join(absent)} missing")
    if not absent and alpha is None:
        raise ValueError(
            "sizes do not determine how often draft tokens are accepted: add an --alpha (the paper's: 0.5 to 0.9)"
        )
    if absent and (alpha is None) != (c is None):
        given, other = ("--alpha", "--c") if c is None else ("--c", "--alpha")
        raise ValueError(f"{given} needs an {other}, or a --target-size, a --draft-size and a --device")
    if v and (c is None or not absent):
        raise ValueError("--v goes with --alpha and --c: for a pair it is measured, for sizes it is computed")
    if absent and c is not None and batches != (1,):
        raise ValueError("--batch is for a pair or for sizes: --alpha, --c and --v are of one batch size")
    if v < 0:
        raise ValueError(f"--v is {v:g}: expected 0 or more")
