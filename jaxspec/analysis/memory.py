"""The memory of a network, of a pair, of a generation, of the process and of the device."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any, NamedTuple

import jax

from jaxspec.core import Prompt, State, token_rows
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared, readers
from jaxspec.nets import net_of
from jaxspec.weights import quantisation
from jaxspec.weights.loading import DTYPES


class MemoryUse(NamedTuple):
    """The bytes of the program of one generation, and of the arrays that it cannot do without."""

    # arguments, results and temporaries, by the compiler's own account; None where it gives none
    program: int | None
    temporaries: int | None  # a part of these
    weights: int  # both models' parameters
    caches: int  # both models' caches
    logits: int  # both models' logits: one block [batch, nodes + 1, vocab] of each

    needed = property(
        lambda self: self.weights + self.caches + self.logits, doc="Weights, caches and logits."
    )


def account(prepared: Prepared) -> MemoryUse:
    """Adds up the memory of a generation."""
    compiled = loop.generation.lower(
        prepared.decoder,
        prepared.weights,
        prepared.prompt,
        prepared.request,
        prepared.max_new_tokens,
    ).compile()
    stats = compiled.memory_analysis()
    program = None
    if stats is not None:
        program = (
            stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
        )
        program -= stats.alias_size_in_bytes
    target, *drafting = (lm for _, lm in readers(prepared.target, prepared.drafter))
    lms = [target, *dict.fromkeys(drafting)]
    positions = len(prepared.prompt.length) * (prepared.decoder.nodes + 1)
    caches = quantisation.nbytes(state_shapes(prepared, prepared.prompt).caches)
    logits = 4 * positions * sum(lm.vocab_size for lm in lms)
    return MemoryUse(
        program,
        stats and stats.temp_size_in_bytes,
        quantisation.nbytes(prepared.weights),
        caches,
        logits,
    )


def state_shapes(prepared: Prepared, prompt: Prompt) -> State:
    """Returns the shapes of what a generation holds beside weights, for some prompts."""
    headroom = token_rows.headroom(prepared.max_new_tokens, prepared.decoder.nodes)
    init = functools.partial(prepared.decoder.init, headroom=headroom)
    return jax.eval_shape(init, prepared.weights, prompt, prepared.request)


class PairMemory(NamedTuple):
    """The memory of a pair on a machine, in bytes."""

    target: float  # its weights, and the caches of all rows
    draft: float  # likewise
    machine: float  # the machine's memory

    fits = property(
        lambda self: self.target + self.draft <= self.machine, doc="Whether there is room for both."
    )


class NetSize(NamedTuple):
    """The size of a network of some configuration, in bytes by dtype."""

    name: str
    parameters: int  # how many there are
    memory_bytes: dict[str, int]  # bytes of all parameters
    # bytes of each row; layers with sliding windows stop at their windows
    cache_bytes_per_token: dict[str, int]
    config: Any


def of_config(name: str, config: Any) -> NetSize:
    """Counts parameters, memory and cache of a network or of n-gram tables, without making it.

    >>> from jaxspec.weights.hf_families.gpt import SIZES
    >>> size = of_config("gpt-6m", SIZES["gpt-6m"])
    >>> (
    ...     size.parameters,
    ...     size.cache_bytes_per_token["float32"],
    ... )  # 2 layers x (key, value) x 256 x 4 bytes
    (6036480, 4096)
    """
    network = net_of(config)

    def cache_of_token(dtype: str) -> int:
        computed = dataclasses.replace(config, dtype=quantisation.computation(dtype, "float32"))
        return network.cache_bytes(computed, 2) - network.cache_bytes(computed, 1)

    count = network.total(config, lambda piece: quantisation.count(network.shapes(piece)))
    memory_bytes = {dtype: weight_bytes(config, dtype) for dtype in DTYPES}
    return NetSize(
        name, count, memory_bytes, {dtype: cache_of_token(dtype) for dtype in DTYPES}, config
    )


def weight_bytes(config: Any, dtype: str) -> int:
    """Counts the bytes of a network's parameters in some dtype, without making them."""
    network = net_of(config)
    stored = functools.partial(quantisation.quantise, dtype=dtype)
    return network.total(
        config, lambda piece: quantisation.nbytes(jax.eval_shape(stored, network.shapes(piece)))
    )


def process_bytes() -> int | None:
    """Asks for the peak memory of this process so far; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def device_bytes() -> int | None:
    """Asks for the peak memory of the device so far; None on a CPU, whose memory is the
    process's.
    """
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
