"""`jaxspec compile`: what a TPU's or GPU's compiler makes of a generation, without either and without weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich import filesize
from rich.console import Console
from rich.text import Text

from jaxspec.cli import console, drafter_names, options
from jaxspec.cli.options import Json, number, text

if TYPE_CHECKING:
    from jaxspec.analysis.aot import Estimate, Program
    from jaxspec.core import Model
    from jaxspec.decode.request import Prepared


PADDING = 0.01  # of a head's rows, by which those of models with one vocabulary may differ


class Inputs(NamedTuple):
    """The options of `compile`."""

    target: Annotated[str, text("SHAPE", "A published shape (`jaxspec models`), a folder or a config.json.")] = (
        "llama-3.1-8b"
    )
    draft: Annotated[
        str, text("SHAPE", "The drafter: likewise, or tree=8x1x1:SHAPE, ...; none: plain.", "--draft", "-d")
    ] = "none"
    topology: Annotated[str, text("CHIPS", "v4, v5e, v5p, v6e: v5p:2x2x1; a100, l4, h100, h200, b200: h100:8.")] = (
        "v5p:2x2x1"
    )
    mesh: Annotated[str, text("AXES", "Split over chips, such as model=4; default: one chip.")] = ""
    gamma: Annotated[int, number("Draft tokens a round.", "--gamma", "-g")] = 5
    batch: Annotated[int, number("Rows.")] = 1
    prompt: Annotated[int, number("Tokens of a prompt.")] = 64
    max_new_tokens: Annotated[int, number("Most new tokens.", "--max-new-tokens", "-n", least=2)] = 128
    temperature: Annotated[float, text("T", "Of sampling; 0 is greedy.", "--temperature", "-t")] = 0.0
    dtype: Annotated[str, text("DTYPE", "float32, bfloat16, int8 or int4.")] = "bfloat16"
    alpha: Annotated[float | None, text("RATE", "Acceptance rate, for tokens/s and the speed-up.")] = None
    save: Annotated[Path | None, text("FOLDER", "Keep the compiled programs there.")] = None
    as_json: Json = False


@options.group_of("inputs", Inputs)
def compile(inputs: Inputs, context: typer.Context) -> None:
    """Compile a generation for TPUs or GPUs that are not here, and estimate its times.

    The program is the one that `generate` runs, made from shapes: no weights are loaded, nothing runs, and the
    compilers, libtpu and jax's CUDA plugin, need no TPU and no GPU. Sizes and collectives are exact, times are the
    TPU compiler's estimates; of GPUs, only bytes and kernels are counted. Plain decoding is compiled, too. Large models
    take minutes.

    \b
        jaxspec compile --target llama-3.1-8b --draft llama-3.2-1b --alpha 0.8
        jaxspec compile --target t5-v1_1-xxl --topology v6e:2x2 --mesh model=4
        jaxspec compile --target llama-3.1-8b --topology h100 --dtype int8
    """
    import jax

    from jaxspec.analysis import aot

    if inputs.alpha is not None and not 0 <= inputs.alpha <= 1:
        raise ValueError(f"--alpha is {inputs.alpha:g}: expected a rate from 0 to 1")
    if inputs.alpha is not None and inputs.draft == "none":
        raise ValueError("--alpha is of a drafter: add a --draft")
    jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU or a GPU, as their compiler is there
    if inputs.alpha is not None and inputs.topology.partition(":")[0] in aot.GPUS:
        raise ValueError(f"--alpha is of TPUs, and --topology is {inputs.topology}: of GPUs no times are estimated")
    aot.devices_of(inputs.topology)  # a wrong name, or no compiler, is told before all else
    prepared = prepare(inputs)
    if inputs.alpha is not None and prepared.decoder.trees:
        raise ValueError(f"--alpha is of a chain, and {inputs.draft} drafts trees: leave it out")
    with console.counting("compile", 1 + (prepared.drafter is not None)) as advance:
        estimated = aot.estimate(prepared, inputs.topology, mesh=inputs.mesh or None, advance=advance)
    if inputs.save is not None:
        aot.save(estimated.compiled, inputs.save)
    expected = None if inputs.alpha is None else estimated.expected(inputs.alpha)
    heading = f"{inputs.target} with {inputs.draft}" if prepared.drafter is not None else inputs.target
    if inputs.as_json:
        report = aot.to_dict(estimated) | {"about": heading, "dtype": inputs.dtype, "expected": expected}
        return console.print_json(report)
    show(heading, inputs, estimated)
    if not estimated.fits:
        print(aot.what_fits(prepared, estimated.machine, estimated.chips) + ".")


def prepare(inputs: Inputs) -> Prepared:
    """Prepares the generation of shapes."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxspec.analysis import aot
    from jaxspec.core import Prompt
    from jaxspec.decode import request
    from jaxspec.vocab.remap import map_vocabulary

    def shapes(name: str) -> Model:
        return aot.shape_model(name, inputs.dtype)

    def drafting(name: str) -> Model:
        model = shapes(name)
        draft_ids, ids = np.arange(model.lm.vocab_size), np.arange(target.lm.vocab_size)
        if len(draft_ids) == len(ids) or abs(len(draft_ids) - len(ids)) > PADDING * len(ids):
            return model
        # There are no tokenizers: as if one model's head had more rows of padding than the other's.
        both = min(len(draft_ids), len(ids))
        return map_vocabulary(
            model, np.where(draft_ids < both, draft_ids, -1), len(ids), np.minimum(ids, both - 1)[:, None].tolist()
        )

    target = shapes(inputs.target)
    drafter = None if inputs.draft == "none" else drafter_names.drafter(inputs.draft, drafting, target)
    rows = Prompt(jnp.zeros((inputs.batch, inputs.prompt), jnp.int32), jnp.full(inputs.batch, inputs.prompt, jnp.int32))
    key = jax.random.key(0)
    generation: dict[str, Any] = {"gamma": inputs.gamma, "temperature": inputs.temperature, "key": key}
    return request.prepare(target, rows, drafter=drafter, max_new_tokens=inputs.max_new_tokens, **generation)


def show(heading: str, inputs: Inputs, estimated: Estimate) -> None:
    """Prints an estimate as tables and sentences."""
    from jaxspec.analysis import table
    from jaxspec.core import chunks
    from jaxspec.nets import attention

    out, chips = Console(highlight=False), f"{estimated.chips} of {estimated.topology}"
    sizes = f"batch {estimated.batch}, {inputs.prompt} + {inputs.max_new_tokens} tokens, {inputs.dtype}"
    what = "What the compiler made" if estimated.on_gpus else "Estimates of the compiler"
    out.print(Text(f"{heading}: {chips}, {sizes}. {what}, no measurement", "bold"))
    programs: dict[str, Program] = {"plain": estimated.plain}
    if estimated.speculative is not None:
        programs["speculative"] = estimated.speculative
    heads = "arguments", "temporaries", "code", "all, per chip", "of", "collectives", "compiled in"
    view = console.table(heads, first="program")
    for name, program in programs.items():
        moved = [f"{n} {kind} ({filesize.decimal(size)})" for kind, (n, size) in program.collectives.items()]
        cells = [*map(filesize.decimal, (program.arguments, program.temporaries, program.code, program.memory))]
        if estimated.on_gpus:
            cells[2] = "?"
        cells += ["?" if estimated.machine.memory is None else filesize.decimal(int(estimated.machine.memory))]
        view.add_row(name, *cells, "\n".join(moved) or "none", f"{program.compile_seconds:.0f} s")
    console.show(out, view)
    heads = ["cycles,\nmillions", "ms", "reads", "floor, ms", "over\nthe floor"]
    if estimated.on_gpus:
        heads = ["kernels", "the host\nwaits", "ms, by\nreads alone", *heads[2:]]
    view = console.table(heads, first="part")
    for row in table.estimate_rows(estimated):
        floor = ("", "") if row.floor is None else (f"{1e3 * row.floor:.3f}", f"{row.over_floor:.2f}")
        counted = [f"{row.kernels}", f"{row.host_reads}"] if estimated.on_gpus else [f"{row.cycles / 1e6:.3f}"]
        view.add_row(row.name, *counted, f"{1e3 * row.seconds:.3f}", filesize.decimal(row.reads), *floor)
    console.show(out, view)
    for sentence in table.estimate_notes(estimated, inputs.alpha):
        out.print(Text(sentence))
    if inputs.prompt > chunks.LONGEST:
        out.print(Text(f"Prefill is a loop over {chunks.LONGEST} tokens, and a loop's body counts once."))
    if inputs.prompt + inputs.max_new_tokens >= attention.MANY_KEYS:
        out.print(Text(f"Attention is one over {attention.KEYS} keys, with the time of so short a cache."))
    if inputs.save is not None:
        out.print(Text(f"Programs in {inputs.save}: {', '.join(estimated.compiled)}"))
