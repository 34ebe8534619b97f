"""The share of the memory's bandwidth that decoding reaches, if each weight is read once per token.

    python -m benchmarks.read_bandwidth gemma-3-270m-q4_k_m.gguf

Any CPU; a minute or two.

Reading is timed as the maximum of the largest matrix by numpy, one thread a core; then the product
of one row with that matrix, the products of all other matrices (one after the other, as many as the
model has), a step, and a generation.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.core import Room
from jaxspec.nets import dense

NEW, REPEATS = 64, 15


def report(what: str, size: int, run: Callable[[], object]) -> None:
    """Prints the median and the best of some runs, in bytes of weights per second."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    rates = size / np.median(seconds) / 1e9, size / min(seconds) / 1e9
    print(
        f"{what:38} {size / 1e6:7.0f} MB  {rates[0]:5.1f} GB/s (best {rates[1]:5.1f})", flush=True
    )


def main(source: str) -> None:
    model = jaxspec.load(source)
    matrices = [x for x in jax.tree.leaves(model.params) if x.ndim == 2]
    largest = max(matrices, key=lambda x: x.nbytes)
    rest = [x for x in matrices if x is not largest]
    cores = os.cpu_count() or 1
    parts = np.array_split(np.asarray(largest), cores)

    with ThreadPoolExecutor(cores) as pool:
        report("reading, numpy", largest.nbytes, lambda: list(pool.map(np.max, parts)))

    @jax.jit
    def products(weights):
        total = jnp.zeros((1, 1, 1))
        for weight in weights:  # each waits for the one before it, as in a network
            total = jnp.max(
                dense.product(jnp.ones((1, 1, weight.shape[1])) * total, weight), keepdims=True
            )
        return total

    report("one row with the largest matrix", largest.nbytes, lambda: products([largest]))
    report(
        f"one row with the {len(rest)} others", sum(x.nbytes for x in rest), lambda: products(rest)
    )

    size = sum(x.nbytes for x in jax.tree.leaves(model.params))
    token, prompt = (
        jnp.ones((1, 1), jnp.int32),
        jaxspec.Prompt(jnp.ones((1, 8), jnp.int32), jnp.full((1,), 8, jnp.int32)),
    )
    _, cache = jax.jit(model.lm.prefill)(model.params, prompt, Room(128))
    step = jax.jit(
        lambda params, cache: jnp.argmax(model.lm.extend(params, cache, token)[0].logits, axis=-1)
    )
    report("a step", size, lambda: step(model.params, cache))
    out = jaxspec.generate(model, prompt, max_new_tokens=NEW, eos_ids=())
    assert int(out.lengths[0]) == NEW
    report(
        f"{NEW} tokens, per token",
        NEW * size,
        lambda: jaxspec.generate(model, prompt, max_new_tokens=NEW, eos_ids=()),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
