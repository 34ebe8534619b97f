"""`jaxspec compile`: memory and reads of a generation on TPUs or GPUs that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich import filesize
from rich.text import Text

from jaxspec.cli import console, drafter_names, options
from jaxspec.cli.console import Console
from jaxspec.cli.options import Json, number, text

if TYPE_CHECKING:
    from jaxspec.analysis.aot import Programs
    from jaxspec.core import Model
    from jaxspec.decode.request import Prepared


PADDING = 0.01  # heads that differ by at most this share of rows have one vocabulary


class CompileInputs(NamedTuple):
    """The options of `compile`."""

    target: Annotated[
        str,
        text("SHAPE", "A published shape (`jaxspec models`), its hub id, a folder, a config.json."),
    ] = "llama-3.1-8b"
    draft: Annotated[
        str,
        text(
            "SHAPE",
            "The drafter: likewise, or tree=8x1x1:SHAPE, ...; none: plain.",
            "--draft",
            "-d",
        ),
    ] = "none"
    topology: Annotated[
        str, text("CHIPS", "v4, v5e, v5p, v6e: v5p:2x2x1; a100, l4, h100, h200, b200: h100:8.")
    ] = "v5p:2x2x1"
    mesh: Annotated[str, text("AXES", "Split over chips, such as model=4; default: one chip.")] = ""
    gamma: Annotated[int, number("Draft tokens a round.", "--gamma", "-g")] = 5
    batch: Annotated[int, number("Rows.")] = 1
    prompt: Annotated[int, number("Tokens of a prompt.")] = 64
    max_new_tokens: Annotated[
        int, number("Most new tokens.", "--max-new-tokens", "-n", least=2)
    ] = 128
    temperature: Annotated[
        float, text("T", "Sampling temperature; 0 is greedy.", "--temperature", "-t")
    ] = 0.0
    dtype: Annotated[str, text("DTYPE", "float32, bfloat16, int8 or int4.")] = "bfloat16"
    save: Annotated[Path | None, text("FOLDER", "Keep the compiled programs there.")] = None
    as_json: Json = False


@options.group_of("inputs", CompileInputs)
def compile(inputs: CompileInputs, context: typer.Context) -> None:
    """Compile for TPUs or GPUs that are not here: does it fit?

    It also tells the least bytes that a round reads. The program is the one that `generate` runs,
    made from shapes: no weights are loaded, nothing runs. The compilers, libtpu and jax's CUDA
    plugin, need no TPU and no GPU. Sizes and collectives are exact. Plain decoding is compiled,
    too. Large models take minutes. In a checkout, `python -m benchmarks.estimates` takes the same
    options and adds the compiler's estimates of time.

    \b
        jaxspec compile --target llama-3.1-8b --draft llama-3.2-1b
        jaxspec compile --target t5-v1_1-xxl --topology v6e:2x2 --mesh model=4
        jaxspec compile --target llama-3.1-8b --topology h100 --dtype int8
    """
    from jaxspec.analysis import aot

    prepared = start(inputs)
    with console.counting("compile", 1 + (prepared.drafter is not None)) as advance:
        programs = aot.compile_for(
            prepared, inputs.topology, mesh=inputs.mesh or None, advance=advance
        )
    if inputs.save is not None:
        aot.save(programs.compiled, inputs.save)
    if inputs.as_json:
        return console.print_json(
            aot.to_dict(programs) | {"about": pair(inputs), "dtype": inputs.dtype}
        )
    out = Console(highlight=False)
    show_sizes(out, inputs, programs, "What the compiler made")
    view = console.table(["reads at least", "ms, at the memory's\nbandwidth"], first="of each chip")
    for name, size in programs.reads.items():
        view.add_row(
            name, filesize.decimal(int(size)), f"{1e3 * size / programs.machine.bandwidth:.3f}"
        )
    console.show(out, view)
    show_fit(out, inputs, prepared, programs)


def start(inputs: CompileInputs) -> Prepared:
    """Prepares a generation of shapes, on the CPU even if a TPU compiler is installed."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxspec.analysis import aot, chips
    from jaxspec.core import Prompt
    from jaxspec.decode import request
    from jaxspec.nets import net_of
    from jaxspec.vocab.remap import map_vocabulary

    # With a TPU's or GPU's compiler installed, jax would look for the device.
    jax.config.update("jax_platforms", "cpu")
    chips.devices_of(inputs.topology)  # fails first on a wrong name or a missing compiler

    def drafting(name: str) -> Model:
        model = aot.shape_model(name, inputs.dtype)
        draft_ids = np.arange(model.lm.vocab_size)
        ids = np.arange(target.lm.vocab_size)
        if len(draft_ids) == len(ids) or abs(len(draft_ids) - len(ids)) > PADDING * len(ids):
            return model
        # Shapes have no tokenizers: pretend that one head only has more padding than the other.
        both = min(len(draft_ids), len(ids))
        return map_vocabulary(
            model,
            np.where(draft_ids < both, draft_ids, -1),
            len(ids),
            np.minimum(ids, both - 1)[:, None].tolist(),
        )

    target = aot.shape_model(inputs.target, inputs.dtype)
    drafter = None
    if inputs.draft != "none":
        drafter = drafter_names.drafter(inputs.draft, drafting, target)
    tokens = jnp.zeros((inputs.batch, inputs.prompt), jnp.int32)
    lengths = jnp.full(inputs.batch, inputs.prompt, jnp.int32)
    rows = Prompt(tokens, lengths, net_of(target.config).source(target.config, inputs.batch))
    return request.prepare(
        target,
        rows,
        drafter=drafter,
        gamma=inputs.gamma,
        temperature=inputs.temperature,
        max_new_tokens=inputs.max_new_tokens,
        key=jax.random.key(0),
    )


def pair(inputs: CompileInputs) -> str:
    """Names the models."""
    if inputs.draft == "none":
        return inputs.target
    return f"{inputs.target} with {inputs.draft}"


def show_sizes(out: Console, inputs: CompileInputs, programs: Programs, source: str) -> None:
    """Prints a heading, and the sizes and collectives of both programs."""
    chips = f"{programs.chips} of {programs.topology}"
    sizes = (
        f"batch {programs.batch}, {inputs.prompt} + {inputs.max_new_tokens} tokens, {inputs.dtype}"
    )
    out.print(Text(f"{pair(inputs)}: {chips}, {sizes}. {source}, no measurement", "bold"))
    heads = "arguments", "temporaries", "code", "all, per chip", "of", "collectives", "compiled in"
    view = console.table(heads, first="program")
    room = programs.machine.memory
    for name, compiled in programs.compiled.items():
        program = compiled.program
        moved = [
            f"{n} {operation} ({filesize.decimal(size)})"
            for operation, (n, size) in program.collectives.items()
        ]
        # a GPU's compiler does not report it
        code = filesize.decimal(program.code) if program.code else "?"
        view.add_row(
            name,
            filesize.decimal(program.arguments),
            filesize.decimal(program.temporaries),
            code,
            filesize.decimal(program.memory),
            "?" if room is None else filesize.decimal(int(room)),
            "\n".join(moved) or "none",
            f"{program.compile_seconds:.0f} s",
        )
    console.show(out, view)


def show_fit(out: Console, inputs: CompileInputs, prepared: Prepared, programs: Programs) -> None:
    """Prints whether the programs fit, and where they were saved."""
    from jaxspec.analysis import aot

    if programs.fits:
        out.print(
            Text("It fits: arguments, results, temporaries and code take no more than a chip has.")
        )
    else:
        out.print(
            Text(
                "Does not fit: a chip has less memory than arguments, results, temporaries and "
                "code take."
            )
        )
        out.print(Text(f"{aot.what_fits(prepared, programs.machine, programs.chips)}."))
    if inputs.save is not None:
        out.print(Text(f"Programs in {inputs.save}: {', '.join(programs.compiled)}"))
