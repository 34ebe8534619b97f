"""Compiles a generation for TPUs or GPUs that are not here: does it fit?

    python -m benchmarks.estimates.compile --target llama-3.1-8b --draft llama-3.2-1b
    python -m benchmarks.estimates.compile --target t5-v1_1-xxl --topology v6e:2x2 --mesh model=4
    python -m benchmarks.estimates.compile --target llama-3.1-8b --topology h100 --dtype int8

It also tells the least bytes that a round reads. The program is the one that `generate` runs, made
from shapes: no weights are loaded, nothing runs. The compilers, libtpu and jax's CUDA plugin, need
no TPU and no GPU. Sizes and collectives are exact. Plain decoding is compiled, too. Large models
take minutes.

--target is a published shape (`jaxspec models`), its hub id, a folder or a config.json, and --draft
likewise, or a drafter such as tree('SHAPE', (8, 1, 1)). --topology is v4, v5e, v5p or v6e, as v5p:2x2x1, or
a100, l4, h100, h200 or b200, as h100:8. --mesh splits over chips, as model=4. --save FOLDER keeps
the programs for `jaxspec.analysis.aot.load`. `python -m benchmarks.estimates` takes the same
options and adds the compiler's estimates of time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import filesize
from rich.text import Text

from benchmarks.estimates import absent, chips
from benchmarks.estimates.absent import Programs
from benchmarks.options import grouped, parser_of
from jaxspec import drafters
from jaxspec.analysis import aot
from jaxspec.cli import console, old_names
from jaxspec.cli.console import Console
from jaxspec.core import BoundDrafter, Model, Prompt, checks
from jaxspec.decode import request
from jaxspec.decode.request import Prepared
from jaxspec.nets import net_of
from jaxspec.vocab.remap import map_vocabulary

PADDING = 0.01  # heads that differ by at most this share of rows have one vocabulary


class CompileInputs(NamedTuple):
    """The options of the command."""

    target: str = "llama-3.1-8b"  # a published shape, its hub id, a folder or a config.json
    draft: str = "none"  # the drafter: likewise, or tree('SHAPE', (8, 1, 1)); none: plain
    topology: str = "v5p:2x2x1"
    mesh: str = ""  # how to split over chips, such as model=4; empty: one chip
    gamma: int = 5  # draft tokens a round
    batch: int = 1  # rows
    prompt: int = 64  # tokens of a prompt
    max_new_tokens: int = 128
    temperature: float = 0.0
    dtype: str = "bfloat16"
    save: Path | None = None  # a folder for the compiled programs
    as_json: bool = False

    def check(self) -> None:
        """Raises ValueError if a number is out of its range."""
        checks.integers(1, gamma=self.gamma, batch=self.batch, prompt=self.prompt)
        checks.integers(2, max_new_tokens=self.max_new_tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, and ends with one line where they cannot be used."""
    parser = parser_of(__doc__)
    inputs, _ = grouped(CompileInputs, parser, arguments)
    checked(parser, lambda: run(inputs))


def checked(parser: argparse.ArgumentParser, run: Callable[[], object]) -> None:
    """Runs a command, and ends it with one line if its options cannot be used."""
    try:
        run()
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, ImportError) and "pip install" not in str(error):
            raise  # a bug of ours
        parser.error(console.message(error))


def run(inputs: CompileInputs) -> None:
    """Compiles a generation and plain decoding, and prints what they take."""
    prepared = start(inputs)
    with console.counting("compile", 1 + (prepared.drafter is not None)) as advance:
        programs = absent.compile_for(
            prepared, inputs.topology, mesh=inputs.mesh or None, advance=advance
        )
    if inputs.save is not None:
        aot.save(programs.compiled, inputs.save)
    if inputs.as_json:
        return console.print_json(
            absent.to_dict(programs) | {"about": pair(inputs), "dtype": inputs.dtype}
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


def start(
    inputs: CompileInputs,
    head_of: Callable[[str], Callable[[Model], BoundDrafter] | None] = lambda name: None,
) -> Prepared:
    """Prepares a generation of shapes, on the CPU even if a TPU compiler is installed.

    `head_of` returns a function that makes the head of a name for a target, or None for a model's.
    """
    inputs.check()
    # With a TPU's or GPU's compiler installed, jax would look for the device.
    jax.config.update("jax_platforms", "cpu")
    chips.devices_of(inputs.topology)  # fails first on a wrong name or a missing compiler

    def drafting(name: str) -> Model:
        model = absent.shape_model(name, inputs.dtype)
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

    def load(name: str, target: Model) -> Model | BoundDrafter:
        head = head_of(name)
        return drafting(name) if head is None else head(target)

    target = absent.shape_model(inputs.target, inputs.dtype)
    drafter = None
    if inputs.draft != "none":
        name = old_names.translated(inputs.draft)
        drafter = drafters.by_name(name, target, load=load)
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
    for name, kept in programs.compiled.items():
        program = kept.program
        moved = [
            f"{n} {operation} ({filesize.decimal(size)})"
            for operation, (n, size) in programs.collectives.get(name, {}).items()
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
        out.print(Text(f"{absent.what_fits(prepared, programs.machine, programs.chips)}."))
    if inputs.save is not None:
        out.print(Text(f"Programs in {inputs.save}: {', '.join(programs.compiled)}"))


if __name__ == "__main__":
    main()
