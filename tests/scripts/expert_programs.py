"""Compiles a loop of layers of experts for chips that are not here, and prints its temporaries: a
line of JSON each.

    python tests/scripts/expert_programs.py v6e 64 72       a topology, and rows of tokens in a pass

Four layers of 32 experts, 768 hidden units, 8 for each token, in bfloat16, are read again in each
step of a loop, as in decoding. A program that copies experts out of the loop has temporaries of the
size of the weights.
"""

from __future__ import annotations

import json
import math
import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.estimates import chips
from jaxspec.nets.experts import Experts, ExpertsShape

LAYERS, DIM, SHAPE = 4, 2048, ExpertsShape(count=32, top=8, dim=768)


def main() -> None:
    """Compiles for each number of rows."""
    topology, *rows = sys.argv[1:]
    place = SingleDeviceSharding(chips.devices_of(topology)[1][0])
    module = Experts(SHAPE, DIM, jnp.dtype("bfloat16"))

    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    sizes = {
        "inwards": (2 * SHAPE.count, SHAPE.dim, DIM),
        "outwards": (SHAPE.count, DIM, SHAPE.dim),
    }
    layer = {name: {"weight": array("bfloat16", *size)} for name, size in sizes.items()}
    for count in map(int, rows):

        def loop(layers, x, ids, weights):
            def step(_, x):
                for params in layers:
                    x = x + module.apply({"params": params}, x, ids, weights)
                return x

            return jax.lax.fori_loop(0, 8, step, x)

        tokens = (
            array("bfloat16", 1, count, DIM),
            array("int32", 1, count, 8),
            array("float32", 1, count, 8),
        )
        memory = jax.jit(loop).lower([layer] * LAYERS, *tokens).compile().memory_analysis()
        weights = 2 * LAYERS * sum(map(math.prod, sizes.values()))
        about = {
            "name": f"{count} rows",
            "temporaries": memory.temp_size_in_bytes,
            "weights": weights,
        }
        print("compiled", json.dumps(about), flush=True)


if __name__ == "__main__":
    main()
