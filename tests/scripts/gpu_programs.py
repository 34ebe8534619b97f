"""Generations of few large layers, compiled for GPUs that are not here: what tests/test_gpu.py
asserts things of.

As tests/scripts/tpu_programs.py, whose cases these are cut from; jax's CUDA plugin must be
installed (a folder on PYTHONPATH will do), and jax be kept from looking for a GPU:

    JAX_PLATFORMS=cpu python tests/scripts/gpu_programs.py            # all: some minutes
    JAX_PLATFORMS=cpu python tests/scripts/gpu_programs.py int8       # those whose names have this word
    JAX_PLATFORMS=cpu python tests/scripts/gpu_programs.py kernel=attention  # with that kernel
"""

from __future__ import annotations

import dataclasses
import json
import sys

from tpu_programs import LLAMA, SMALL, SMALL_LLAMA, T5, Case, compiled, matrices, report

from benchmarks.estimates import program_text
from benchmarks.kernels import triton
from jaxspec import nets, policies
from jaxspec.nets import kernels

ONE_LLAMA = tuple(nets.replace(config, layers=1) for config in LLAMA)
THREE_T5 = tuple(dataclasses.replace(config, encoder_layers=1, decoder_layers=3) for config in T5)
CASES = [
    Case("T5, chain", *THREE_T5, "h100"),
    Case("Llama, chain", *ONE_LLAMA, "h100", compares=True),
    Case("Llama, chain, int8", *ONE_LLAMA, "h100", dtype="int8"),
    Case("Llama, chain, int4", *ONE_LLAMA, "h100", dtype="int4"),
    Case("small Llama, chain, mesh", *SMALL_LLAMA, "a100:2", "model=2", compares=True),
    Case(
        "Llama, policy",
        *ONE_LLAMA,
        "h100",
        batch=16,
        policy=policies.adaptive(together="slots"),
        new_tokens=2048,
    ),
]


def main() -> None:
    """Compiles the cases, and prints a line of JSON of each."""
    program_text.LARGE = SMALL
    names = [word.removeprefix("kernel=") for word in sys.argv[1:] if word.startswith("kernel=")]
    words = [word for word in sys.argv[1:] if not word.startswith("kernel=")]
    with kernels.replaced(**triton.replacements(*names)):
        run(words)


def run(words: list[str]) -> None:
    """Compiles the cases with these words in their names."""
    named = [case for case in CASES if case.name in words]
    for case in named or CASES:
        if named or all(word in case.name for word in words):
            about = {"name": case.name, "mesh": case.mesh, "matrices": matrices(case)}
            programs = {name: report(kept) for name, kept in compiled(case).items()}
            print("compiled", json.dumps(about | {"programs": programs}), flush=True)


if __name__ == "__main__":
    main()
