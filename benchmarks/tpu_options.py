"""Asks a TPU's compiler what its options do to the first layers of Llama: a pass over one token and
one over six.

    python -m benchmarks.tpu_options [v5e] [int8] [llama-3.1-8b] [12]    # minutes; libtpu on PYTHONPATH, no TPU

Each line is one set of options: with libtpu's own, without its optimiser of loops, and that with
other limits of what one operation may take of the chip's own memory, in MiB. Cycles are the
compiler's estimate; what is read, in cycles of the memory's time, is the least that a pass can
take. The vocabulary is small: the head would hide what layers take.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from benchmarks.estimates import absent, chips
from benchmarks.estimates.program_text import read
from jaxspec import nets
from jaxspec.analysis import aot, roofline
from jaxspec.core import Prompt, programs
from jaxspec.decode.request import Prepared, prepare

VOCAB = 4096
LIMITS = (None, 12, 16, 24, 32, 40, 48)
NO_LOOPS = {"xla_tpu_memory_bound_loop_optimizer_options": "enabled: false"}


def cut(shape: str, layers: int, dtype: str) -> Prepared:
    """Prepares a chat-sized generation of a shape's first layers, for which two layers of Llama 3.2
    1B draft.
    """
    shapes = roofline.published_shapes()
    target, draft = (
        absent.shape_model(nets.replace(shapes[name], layers=count, vocab_size=VOCAB), dtype)
        for name, count in ((shape, layers), ("llama-3.2-1b", 2))
    )
    prompt = Prompt(jnp.zeros((1, 64), jnp.int32), jnp.array([64]))
    return prepare(target, prompt, drafter=draft, gamma=5, max_new_tokens=128)


def options() -> Iterator[dict[str, str]]:
    """Lists the sets of options."""
    yield {}
    for limit in LIMITS:
        yield NO_LOOPS | (
            {} if limit is None else {"xla_tpu_scoped_vmem_limit_kib": str(1024 * limit)}
        )


def cycles(prepared: Prepared, topology: str, chosen: Mapping[str, str]) -> tuple[int, int]:
    """Compiles a generation with some options for one chip; returns the target's cycles, and those
    of what it reads.
    """
    name, devices = chips.devices_of(topology)
    machine, kind = chips.machine_of(name, devices), devices[0].device_kind
    usual = dict(programs.COMPILER_OPTIONS)
    programs.COMPILER_OPTIONS[kind] = dict(chosen)
    try:
        part = read(aot.compile_generation(prepared, devices).executable.as_text()).parts["target"]
    finally:
        programs.COMPILER_OPTIONS.clear()
        programs.COMPILER_OPTIONS.update(usual)
    assert machine.clock is not None
    return part.cycles, int(part.bytes_read / machine.bandwidth * machine.clock)


def main() -> None:
    """Prints a line of each set of options."""
    jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU, as libtpu is there
    defaults = ["v5e", "int8", "llama-3.1-8b", "12"]
    topology, dtype, shape, layers = [*sys.argv[1:], *defaults[len(sys.argv) - 1 :]]
    speculative = cut(shape, int(layers), dtype)
    print(
        f"{layers} layers of {shape}, {dtype}, {topology}: estimates of the compiler, no "
        "measurement"
    )
    for chosen in options():
        one, six = (cycles(which, topology, chosen) for which in (speculative.plain(), speculative))
        about = ", ".join(f"{name}={value}" for name, value in chosen.items()) or "libtpu's own"
        print(
            f"one token {one[0]:11,} (reads {one[1]:,}), six {six[0]:11,} (reads {six[1]:,}): "
            f"{about}",
            flush=True,
        )


if __name__ == "__main__":
    main()
