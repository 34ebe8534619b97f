"""Estimates how long the parts of a generation take on TPUs and GPUs that are not here.

    python -m benchmarks.estimates --target llama-3.1-8b --draft llama-3.2-1b --alpha 0.8    # minutes; libtpu, no TPU
    python -m benchmarks.estimates --target llama-3.1-8b --draft llama-3.2-1b --alpha 0.8 --gamma 16 --plan

    python -m benchmarks.estimates --target llama-3.1-8b --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    --topology h100

The options are those of `benchmarks.estimates.compile`, whose programs are read here. --draft takes more: the
published heads of docs/pairs.md, and the recipe of a head (debian-t5-block, or a .toml file) for an
untrained one of its sizes. dynamic_tree('HEAD', 60, 7, 10) is a dynamic tree of 60 nodes, 7
deep, 10 wide. Times of TPUs are the compiler's estimates, those of GPUs follow from measured kernels. --plan
finds the best γ, up to --gamma, for the acceptance rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich import filesize
from rich.console import Console
from rich.text import Text

from benchmarks import options, pairs
from benchmarks.estimates import compile as compiling
from benchmarks.estimates import estimate as estimating
from benchmarks.estimates.compile import CompileInputs
from jaxspec.analysis import aot, cost
from jaxspec.analysis import plan as planning
from jaxspec.cli import console
from jaxspec.core import BoundDrafter, Model, Params, chunks
from jaxspec.draft_heads import check
from jaxspec.draft_heads.kind import in_dtype
from jaxspec.nets import attention, dtype_of
from jaxspec.training import recipes


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, and ends with one line where they cannot be used."""
    parser = options.parser_of(__doc__)
    parser.add_argument(
        "--alpha", type=float, help="acceptance rate, for tokens/s, the speed-up and plans"
    )
    parser.add_argument("--plan", action="store_true")
    inputs, chosen = options.grouped(CompileInputs, parser, arguments)
    if refusal := refused(inputs, chosen.alpha, chosen.plan):
        parser.error(refusal)
    compiling.checked(parser, lambda: run(inputs, chosen.alpha, chosen.plan))


def run(inputs: CompileInputs, alpha: float | None, plans: bool) -> None:
    """Compiles a generation as `benchmarks.estimates.compile` does, and prints its estimate or a plan.

    Raises:
        ValueError, OSError: options that cannot be used together, or name nothing.
        ImportError: the compiler is not installed.
    """
    prepared = compiling.start(inputs, head_of)
    if alpha is not None and prepared.decoder.trees:
        raise ValueError(f"--alpha is of a chain, and {inputs.draft} drafts trees: leave it out")
    if plans and alpha is not None:
        programs = 1 + len(cost.gammas_up_to(inputs.gamma, estimating.COMPILED))
        with console.counting("compile", programs) as advance:
            best = estimating.plan(
                alpha, prepared, inputs.topology, most=inputs.gamma, advance=advance
            )
        if inputs.as_json:
            return console.print_json(planning.to_dict(best))
        return print(
            f"{compiling.pair(inputs)} on {inputs.topology}, by estimates: "
            f"{planning.sentence(best)}"
        )
    with console.counting("compile", 1 + (prepared.drafter is not None)) as advance:
        estimated = estimating.estimate(
            prepared, inputs.topology, mesh=inputs.mesh or None, advance=advance
        )
    if inputs.save is not None:
        aot.save(estimated.programs.compiled, inputs.save)
    if inputs.as_json:
        expected = None if alpha is None else estimated.expected(alpha)
        about = {"about": compiling.pair(inputs), "dtype": inputs.dtype, "expected": expected}
        return console.print_json(estimating.to_dict(estimated) | about)
    out = Console(highlight=False)
    source = "Estimates from kernels" if estimated.on_gpus else "Estimates of the compiler"
    compiling.show_sizes(out, inputs, estimated.programs, source)
    show(out, inputs, estimated, alpha)
    compiling.show_fit(out, inputs, prepared, estimated.programs)


def head_of(name: str) -> Callable[[Model], BoundDrafter] | None:
    """Returns what makes a head of shapes for a target, a published one's or a recipe's; None for
    another name.

    Raises:
        FileNotFoundError: there is no such .toml file.
        ValueError: raised by the returned function if the target's width does not suit the recipe's
            heads.
    """
    pair, recipe = pairs.heads().get(name), recipe_of(name)
    if pair is None and recipe is None:
        return None

    def shapes(config: Any) -> Params:
        return pairs.in_dtype(pairs.abstract_params(config), "bfloat16")

    def head(target: Model) -> BoundDrafter:
        if pair is not None:
            return pairs.head(pair, target, shapes)
        assert recipe is not None
        try:
            config = in_dtype(recipe.head.config(target), dtype_of(target.config))
        except ValueError as error:
            raise ValueError(
                f"{name} cannot draft for {target.name}: in [head], {error}"
            ) from error
        return check.bound(config, shapes(config), target)

    return head


def recipe_of(name: str) -> recipes.HeadRecipe | None:
    """Reads the recipe of a head: one that comes with jaxspec, or a file; None for another name."""
    if name not in recipes.shipped() and not name.endswith(".toml"):
        return None
    recipe = recipes.load(name)
    return recipe if isinstance(recipe, recipes.HeadRecipe) else None


def refused(inputs: CompileInputs, alpha: float | None, plans: bool) -> str:
    """Says why options cannot be used together; empty if they can."""
    if alpha is None:
        return "--plan needs an --alpha" if plans else ""
    if not 0 <= alpha <= 1:
        return f"--alpha is {alpha:g}: expected a rate from 0 to 1"
    if inputs.draft == "none":
        return "--alpha is of a drafter: add a --draft"
    return "--plan is of one chip: leave --mesh out" if plans and inputs.mesh else ""


def show(
    out: Console, inputs: CompileInputs, estimated: estimating.Estimate, alpha: float | None
) -> None:
    """Prints the parts of an estimate, and sentences."""
    heads = ["cycles,\nmillions", "ms", "reads", "floor, ms", "over\nthe floor"]
    if estimated.on_gpus:
        heads = ["kernels", "the host\nwaits", *heads[1:]]
    view = console.table(heads, first="part")
    for row in estimating.rows(estimated):
        floor = (
            ("", "") if row.floor is None else (f"{1e3 * row.floor:.3f}", f"{row.over_floor:.2f}")
        )
        counted = (
            [f"{row.kernels}", f"{row.host_reads}"]
            if estimated.on_gpus
            else [f"{row.cycles / 1e6:.3f}"]
        )
        view.add_row(
            row.name, *counted, f"{1e3 * row.seconds:.3f}", filesize.decimal(row.reads), *floor
        )
    console.show(out, view)
    for sentence in estimating.notes(estimated, alpha):
        out.print(Text(sentence))
    if inputs.prompt > chunks.LONGEST:
        out.print(
            Text(f"Prefill is a loop over {chunks.LONGEST} tokens, and a loop's body counts once.")
        )
    if inputs.prompt + inputs.max_new_tokens >= attention.MANY_KEYS:
        out.print(
            Text(f"Attention is one over {attention.KEYS} keys, with the time of so short a cache.")
        )


if __name__ == "__main__":
    main()
