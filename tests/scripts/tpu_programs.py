"""Generations of few large layers, compiled for TPUs that are not here: what tests/test_tpu.py
asserts things of.

Nothing runs, and no weights are needed; `python -m benchmarks.estimates` prints the same of
published shapes. libtpu must be installed (a folder on PYTHONPATH will do), and jax be kept from
looking for a TPU:

    JAX_PLATFORMS=cpu python tests/scripts/tpu_programs.py             # all: a few minutes
    JAX_PLATFORMS=cpu python tests/scripts/tpu_programs.py T5 tree     # those whose names have these words
    JAX_PLATFORMS=cpu python tests/scripts/tpu_programs.py Llama, chain --dtype int8 --topology v5e:2x2
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.estimates import absent, chips, program_text
from jaxspec import drafters, policies
from jaxspec.analysis import aot, roofline
from jaxspec.core import Prompt
from jaxspec.decode.request import prepare
from jaxspec.nets.decoder import decoder_config
from jaxspec.nets.t5 import T5Config

VOCAB = 4096  # small: the head would hide what layers take
SMALL = 1 << 15  # bytes from which copies are reported, and the least matrix has


class Case(NamedTuple):
    """A pair to compile, for which chips, and the shape of the draft: children by level; none is a
    chain of 5.
    """

    name: str
    target: Any
    draft: Any
    topology: str
    mesh: str | None = None
    branching: tuple[int, ...] = ()
    batch: int = 1
    temperature: float = 0.0
    dtype: str = "bfloat16"
    compares: bool = False  # whether plain decoding is compiled, too
    policy: Any = None
    new_tokens: int = 128


# Two layers of T5-XXL with two of T5-small, of Llama 3.1 8B with two of Llama 3.2 1B, and layers
# that compile sooner.
T5 = T5Config(VOCAB, 4096, 10240, 64, 64, 2, 2), T5Config(VOCAB, 512, 1024, 6, 64, 2, 2)
LLAMA = (
    decoder_config(VOCAB, 4096, 14336, 2, 32, 8, 128),
    decoder_config(VOCAB, 2048, 8192, 2, 32, 8, 64),
)
SMALL_T5 = [T5Config(512, dim, 2 * dim, 4, 32, 2, 2) for dim in (256, 128)]
SMALL_LLAMA = [decoder_config(512, dim, 2 * dim, 2, 8, 4, 32) for dim in (256, 128)]
CASES = [
    Case("T5, chain", *T5, "v5p:2x2x1", compares=True),
    Case("Llama, chain", *LLAMA, "v5p:2x2x1", compares=True),
    Case("Llama, chain, mesh", *LLAMA, "v6e:2x2", "model=4", batch=4, temperature=1.0),
    Case("small T5, tree", *SMALL_T5, "v5p:2x2x1", branching=(4, 2, 1, 1)),
    Case(
        "small Llama, tree, mesh",
        *SMALL_LLAMA,
        "v6e:2x2",
        "model=4",
        (4, 2, 1, 1),
        batch=4,
        temperature=1.0,
    ),
    Case("small T5 in float32, chain", *SMALL_T5, "v5p:2x2x1", dtype="float32"),
    Case(
        "Llama, policy",
        *LLAMA,
        "v5p:2x2x1",
        batch=16,
        policy=policies.adaptive(together="slots"),
        new_tokens=2048,
    ),
]


def compiled(case: Case) -> dict[str, aot.Compiled]:
    """Compiles a case, and plain decoding if the two are to be compared."""
    target, draft = (absent.shape_model(config, case.dtype) for config in (case.target, case.draft))
    prompt = Prompt(np.zeros((case.batch, 64), np.int32), np.full(case.batch, 64, np.int32))
    drafter = drafters.tree(draft, case.branching) if case.branching else draft
    options = {"temperature": case.temperature, "key": jax.random.key(0), "policy": case.policy}
    prepared = prepare(target, prompt, drafter=drafter, max_new_tokens=case.new_tokens, **options)
    _, devices = chips.devices_of(case.topology)
    programs = {"plain": prepared.plain()} if case.compares else {}
    programs["speculative"] = prepared
    return {
        name: aot.compile_generation(request, devices, case.mesh)
        for name, request in programs.items()
    }


def matrices(case: Case) -> list[int]:
    """Lists the bytes of both models' matrices, whole and, on a mesh, as a chip holds them."""
    models = [absent.shape_model(config, case.dtype) for config in (case.target, case.draft)]
    leaves = [
        leaf for model in models for leaf in jax.tree.leaves(model.params) if len(leaf.shape) == 2
    ]
    chips = int(case.mesh.removeprefix("model=")) if case.mesh else 1
    sizes = {leaf.size * leaf.dtype.itemsize // parts for leaf in leaves for parts in (1, chips)}
    return sorted(size for size in sizes if size >= SMALL)  # not tables of relative biases


def main() -> None:
    """Compiles the cases, and prints a line of JSON of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--dtype", help="another one for all cases: of the matrices")
    parser.add_argument("--topology", help="another one for all cases")
    options = parser.parse_args()
    others = {
        name: getattr(options, name) for name in ("dtype", "topology") if getattr(options, name)
    }
    program_text.LARGE = SMALL
    for case in CASES:
        if all(word in case.name for word in options.words):
            case = case._replace(**others)
            made = compiled(case)
            about: dict[str, Any] = {"name": case.name, "mesh": case.mesh}
            about |= {"read by a pass": roofline.load_of(case.target).weight_bytes / 2}  # bfloat16
            about |= {"matrices": matrices(case)}
            about |= {"bf16": "bf16" in made["speculative"].executable.as_text()}
            programs = {name: report(kept) for name, kept in made.items()}
            print("compiled", json.dumps(about | {"programs": programs}), flush=True)


def report(kept: aot.Compiled) -> dict[str, Any]:
    """Returns the sizes of a program, and the counts that are read from its text."""
    text = kept.executable.as_text()
    contents = program_text.read(text)
    parts = {name: part._asdict() for name, part in contents.parts.items()}
    read_from_text = contents._asdict() | {"parts": parts, "collectives": absent.collectives(text)}
    return kept.program._asdict() | read_from_text


if __name__ == "__main__":
    main()
