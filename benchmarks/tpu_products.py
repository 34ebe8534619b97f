"""Asks a TPU's compiler for estimates of products of few rows with a large matrix, in some forms
and with some options.

    python -m benchmarks.tpu_products [v5p:2x2x1]    # a minute; libtpu on PYTHONPATH, no TPU

Each line is one product that is compiled alone: matrix [out, in], rows, what one operation may take
of the chip's own memory (the compiler's option xla_tpu_scoped_vmem_limit_kib), the layout of the
matrix, estimated cycles, how often that is the memory's floor, and into how many blocks the
compiler cuts the matrix. A star stands where the matrix was prefetched into the chip's own memory,
whose time is not in the estimate.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from benchmarks.estimates import chips
from benchmarks.estimates.program_text import read
from jaxspec.core.programs import COMPILER_OPTIONS

MATRICES = {
    "Llama 8B, gate": (14336, 4096),
    "gate and wi as one": (28672, 4096),
    "Llama 8B, ff/out": (4096, 14336),
    "Llama 8B, query": (4096, 4096),
    "Llama 8B, key": (1024, 4096),
    "query, key and value as one": (6144, 4096),
    "T5-XXL, gate": (10240, 4096),
    "Llama 1B, gate": (8192, 2048),
}
OPTION = "xla_tpu_scoped_vmem_limit_kib"
LIMITS = (8192, 16384, 32768, int(COMPILER_OPTIONS["TPU v5p"][OPTION]), 49152)
LAYOUTS = {"[out, in]": (0, 1), "[in, out]": (1, 0)}


class Estimate(NamedTuple):
    """The compiler's estimate of a product: cycles, over the memory's floor, blocks, and whether it
    was prefetched.
    """

    cycles: int
    over_floor: float
    blocks: int
    prefetched: bool


def estimate(shape: tuple[int, int], rows: int, limit: int, layout: str, topology: str) -> Estimate:
    """Compiles one product in bfloat16."""
    name, devices = chips.devices_of(topology)
    machine, place = chips.machine_of(name, devices), SingleDeviceSharding(devices[0])
    few = jax.ShapeDtypeStruct((rows, shape[1]), jnp.bfloat16, sharding=place)
    laid_out: Any = Format(Layout(LAYOUTS[layout]), place)
    matrix = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=laid_out)

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())))

    text = (
        jax.jit(product).lower(few, matrix).compile(compiler_options={OPTION: str(limit)}).as_text()
        or ""
    )
    cycles = sum(part.cycles for part in read(text).parts.values())
    assert machine.clock is not None
    floor = 2 * math.prod(shape) / machine.bandwidth * machine.clock
    bounds = [json.loads(found) for found in re.findall(r'"iteration_bounds":(\[[^\]]*\])', text)]
    blocks = max((math.prod(map(int, bound)) for bound in bounds), default=1)
    return Estimate(
        cycles,
        cycles / floor,
        blocks,
        "copy-start(%weight" in text or "slice-start(%weight" in text,
    )


def cases() -> Iterator[tuple[str, int, int, str]]:
    """Lists what to compile: matrix, rows, limit, layout."""
    for matrix in MATRICES:
        yield from ((matrix, 8, limit, layout) for limit in LIMITS for layout in LAYOUTS)
    yield from (("Llama 8B, gate", rows, LIMITS[3], "[out, in]") for rows in (2, 6, 32, 64, 128))


def main() -> None:
    """Prints a line of each product."""
    jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU, as libtpu is there
    topology = (sys.argv[1:] or ["v5p:2x2x1"])[0]
    print(f"{topology}, bfloat16: estimates of the compiler, no measurement")
    for matrix, rows, limit, layout in cases():
        found = estimate(MATRICES[matrix], rows, limit, layout, topology)
        about = f"{matrix:28} {rows:4} rows {limit // 1024:3} MiB {layout}"
        star = " *" if found.prefetched else ""
        print(
            f"{about} {found.cycles:11,} ×{found.over_floor:.2f} {found.blocks:4} blocks{star}",
            flush=True,
        )


if __name__ == "__main__":
    main()
