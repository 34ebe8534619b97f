"""Generations of few large layers, compiled for TPUs that are not here: what tests/test_tpu.py asserts things of.

Nothing runs, and no weights are needed; `jaxspec compile` prints the same of published shapes. libtpu must be installed
(a folder on PYTHONPATH will do), and jax be kept from looking for a TPU:

    JAX_PLATFORMS=cpu python tests/scripts/tpu_programs.py             # all: a few minutes
    JAX_PLATFORMS=cpu python tests/scripts/tpu_programs.py T5 tree     # those whose names have these words
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import drafters
from jaxspec.analysis import aot
from jaxspec.core import Prompt
from jaxspec.decode.request import prepare
from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.t5 import T5Config

VOCAB = 4096  # small: the head would hide what layers take


class Case(NamedTuple):
    """A pair to compile, for which chips, and the shape of the draft: children by level; none is a chain of 5."""

    name: str
    target: Any
    draft: Any
    topology: str
    mesh: str | None = None
    branching: tuple[int, ...] = ()
    batch: int = 1
    temperature: float = 0.0
    dtype: str = "bfloat16"


# The layers of T5-XXL with those of T5-small, and of Llama 3.1 8B with those of Llama 3.2 1B.
T5 = T5Config(VOCAB, 4096, 10240, 64, 64, 2, 2), T5Config(VOCAB, 512, 1024, 6, 64, 2, 2)
LLAMA = DecoderConfig(VOCAB, 4096, 14336, 2, 32, 8, 128), DecoderConfig(VOCAB, 2048, 8192, 2, 32, 8, 64)
SMALL = T5Config(VOCAB, 256, 512, 4, 64, 2, 2)
CASES = [
    Case("T5, chain", *T5, "v5p:2x2x1"),
    Case("Llama, chain", *LLAMA, "v5p:2x2x1"),
    Case("T5, tree", *T5, "v5p:2x2x1", branching=(4, 2, 1, 1)),
    Case("Llama, chain, mesh", *LLAMA, "v6e:2x2", "model=4", batch=4, temperature=1.0),
    Case("Llama, tree, mesh", *LLAMA, "v6e:2x2", "model=4", (4, 2, 1, 1), batch=4, temperature=1.0),
    Case("T5 in float32, chain", SMALL, dataclasses.replace(SMALL, dim=128), "v5p:2x2x1", dtype="float32"),
]


def estimate(case: Case) -> aot.Estimate:
    """Compiles a case."""
    target, draft = (aot.shape_model(config, case.dtype) for config in (case.target, case.draft))
    prompt = Prompt(np.zeros((case.batch, 64), np.int32), np.full(case.batch, 64, np.int32))
    drafter = drafters.tree(draft, case.branching) if case.branching else draft
    sampling = {"temperature": case.temperature, "key": jax.random.key(0)}
    return aot.estimate(prepare(target, prompt, drafter=drafter, **sampling), case.topology, mesh=case.mesh)


def main() -> None:
    """Compiles the cases, and prints a line of JSON of each."""
    for case in CASES:
        if all(word in case.name for word in sys.argv[1:]):
            found = estimate(case)
            text = found.compiled["speculative"].executable.as_text()
            report = {"name": case.name, "mesh": case.mesh, "bf16": "bf16" in text}
            print("compiled", json.dumps(report | _numbers(found)), flush=True)


def _numbers(found: aot.Estimate) -> dict[str, Any]:
    assert found.speculative is not None
    cycles = [program.parts["target"].cycles for program in (found.speculative, found.plain)]
    programs = {name: made.program._asdict() for name, made in found.compiled.items()}
    floors = {name: size / 1e6 for name, size in found.floors.items()}
    return {"programs": programs, "verify over plain": cycles[0] / cycles[1], "floors, MB": floors, "c": found.c}


if __name__ == "__main__":
    main()
