"""The time of a pass if nothing but memory and arithmetic counts, from bytes, operations and a
machine.

A pass reads every weight once, whatever it is fed, and each row's cache; it multiplies every weight
with every token of every row. It reads the experts that any token chose, and multiplies each token
with the experts that it chose. Recurrent layers read and write a state for each token, and for
those that a round may take back (`Load.row_bytes`). A pass takes as long as the slower of memory
and arithmetic. So a verify pass is free while its batch (gamma + 1) tokens leave arithmetic idle.
Beyond that it costs up to gamma + 1 passes, and speculation loses. Real passes are slower than
this, small ones by much.

For GPUs two measured numbers are added, so that times are estimates and no floors: the share of its
bandwidth that a product reaches, and the time of a small kernel. A pass of a small model is made of
small kernels.

Reference: Williams, Waterman, Patterson, CACM 52(4), 2009 (the roofline). Leviathan, Kalman,
Matias, ICML 2023, arXiv 2211.17192, section 3.4 (memory against arithmetic in speculative
decoding).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxspec.core.checks import one_of, suggest
from jaxspec.nets import net_of
from jaxspec.nets.network import BYTES, KERNELS_AROUND_LAYERS, KERNELS_OF_LAYER, Load


class Machine(NamedTuple):
    """One accelerator, or one CPU socket."""

    bandwidth: float  # the main memory's bandwidth, bytes/s
    # these two: peak of dense matrix products, operations/s (a multiplication and an addition are
    # two); None where the maker gives no figure
    bfloat16: float | None
    float32: float | None
    memory: float | None = None  # its bytes; None where machines of one kind differ
    # cycles/s of a TPU, which estimates of its compiler are in; None of others
    clock: float | None = None
    reached: float = 1.0  # the share of the bandwidth that products reach
    kernel: float = 0.0  # seconds that a kernel takes at least; 0 where kernels are not counted

    def kernel_seconds(self, read: ArrayLike) -> Any:
        """Computes the seconds of a kernel that reads so many bytes.

        >>> [round(1e6 * float(machine("h100").kernel_seconds(read)), 1) for read in (1e3, 117.4e6)]
        [1.7, 41.7]
        """
        return np.maximum(
            self.kernel, np.asarray(read, np.float64) / (self.reached * self.bandwidth)
        )

    def peak(self, dtype: str) -> float:
        """Returns the operations per second in "bfloat16" or "float32".

        >>> MACHINES["a100"].peak("bfloat16")
        312000000000000.0
        """
        peak = None
        if dtype in ("bfloat16", "float32"):
            peak = getattr(self, dtype)
        if peak is None:
            raise ValueError(
                f"no peak is published in {dtype!r} for this machine: give one, or use bfloat16"
            )
        return peak


# Measured in traces of an H100: Llama 8B and 1B, T5-XXL and T5-small (docs/gpu.md). Other GPUs are
# taken to be alike.
_MEASURED: dict[str, float] = {"reached": 0.84, "kernel": 1.7e-6}
# Per chip, without structured sparsity. float32 is that of the general cores: TPUs have no such
# figure (they build a float32 product of several bfloat16 ones).
MACHINES = {
    # bfloat16 of the data sheets from Hopper on is with sparsity, and here half of it.
    # NVIDIA HGX B200 data sheet, an eighth of its board
    "b200": Machine(7.7e12, 2250e12, 75e12, 180e9, **_MEASURED),
    "h200": Machine(4.8e12, 989e12, 67e12, 141e9, **_MEASURED),  # NVIDIA H200 data sheet, SXM
    "h100": Machine(3.35e12, 989e12, 67e12, 80e9, **_MEASURED),  # NVIDIA H100 data sheet, SXM
    # NVIDIA A100 data sheet, 80 GB SXM
    "a100": Machine(2.039e12, 312e12, 19.5e12, 80e9, **_MEASURED),
    "l4": Machine(0.3e12, 121e12, 30.3e12, 24e9, **_MEASURED),  # NVIDIA L4 data sheet
    # Cloud TPU documentation, as the next three; the v4 is the paper's machine. Clocks are peaks
    # over the operations of a cycle: 2 per multiplier, of which a chip has 8 x 128 x 128 (v4, v5p),
    # 4 x 128 x 128 (v5e) or 4 x 256 x 256 (v6e).
    "tpu-v4": Machine(1.2e12, 275e12, None, 32 * 2**30, 1.05e9),
    "tpu-v5e": Machine(0.819e12, 197e12, None, 16e9, 1.5e9),
    "tpu-v5p": Machine(2.765e12, 459e12, None, 95e9, 1.75e9),
    "tpu-v6e": Machine(1.638e12, 918e12, None, 32e9, 1.75e9),
    # AMD's page for the EPYC 9654: 460.8 GB/s per socket, 96 cores of 2.4 GHz; a Zen 4 core retires
    # two 256-bit multiply-adds a cycle (32 operations in float32, twice that in bfloat16).
    "epyc-9654": Machine(0.4608e12, 14.7e12, 7.4e12),
}


def machine(name: str) -> Machine:
    """Returns a machine by its name.

    >>> machine("tpu-v5e").bandwidth
    819000000000.0
    """
    if name not in MACHINES:
        hint = suggest(name, MACHINES) or ":"
        raise ValueError(f"no machine {name!r}{hint} expected one of {', '.join(MACHINES)}")
    return MACHINES[name]


UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}  # of parameters


def load_of(config: Any, *, row: int = 0, prompt: int = 0) -> Load:
    """Computes the load of a decoding pass of one of our networks; see `nets.network.Network.load`.

    Args:
        config: the network's configuration, with its dtype.
        row: tokens in the cache.
        prompt: tokens that an encoder has read.

    Example, T5-XXL, of whose 11.1 billion parameters a decoding pass reads half:
        >>> from jaxspec.nets.t5 import SIZES
        >>> f"{load_of(SIZES['t5-v1_1-xxl']).parameters:.3g}"
        '5.57e+09'
    """
    return net_of(config).load(config, row=row, prompt=prompt)


def load_of_size(size: str, dtype: str, row_tokens: int = 0) -> Load:
    """Computes the load of a decoding pass from a size: a published shape, or a number of
    parameters, without a cache.

    Args:
        size: a shape, as `shape_of` takes it, or parameters that decode, as "11B" or "77M"; "76M:4"
            tells their layers, too, whose kernels take time on a GPU.
        dtype: "bfloat16" or "float32": arithmetic, whose peak counts, is never int8.
        row_tokens: with a shape, tokens in the cache: of the row, and of a prompt that an encoder
            has read.

    >>> load_of_size("1.5B", "bfloat16").parameters
    1500000000.0
    """
    one_of(dtype, "dtype", ("bfloat16", "float32"))
    config = shape_of(size)
    if config is not None:
        return load_of(dataclasses.replace(config, dtype=dtype), row=row_tokens, prompt=row_tokens)
    number, has_layers, layers = size.partition(":")
    unit = UNITS.get(number[-1:].upper())
    try:
        if unit:
            parameters = float(number[:-1]) * unit
        else:
            parameters = float(number)
        depth = int(layers) if has_layers else 0
    except ValueError:
        parameters = depth = 0
    if not 0 < parameters < float("inf") or depth < 0:
        expected = f"parameters, such as 11B, or with layers 76M:4, or {shapes_there_are(size)}"
        raise ValueError(f"size is {size!r}: expected {expected}")
    kernels = 0
    if has_layers:
        kernels = depth * KERNELS_OF_LAYER + KERNELS_AROUND_LAYERS
    return Load(parameters, dtype=dtype, small_kernels=kernels)


def published_shapes() -> dict[str, Any]:
    """Returns the configurations of all published shapes, by their names."""
    from jaxspec.analysis import lamda
    from jaxspec.weights.hf_families import FAMILIES

    return {
        name: config for family in FAMILIES for name, config in family.sizes.items()
    } | lamda.sizes()


def shape_of(name: str) -> Any:
    """Returns the configuration of a shape; None for an unknown name.

    Args:
        name: a published shape, the hub id of a model that has one, a checkpoint's folder, a
            config.json of Hugging Face's, or the name of a shipped checkpoint.

    >>> shape_of("google/gemma-4-E4B-it") == published_shapes()["gemma-4-e4b"]
    True
    """
    from jaxspec.weights import huggingface, loading
    from jaxspec.weights.hf_families import names

    if not name:  # which would be the current folder
        return None
    shapes = published_shapes()
    try:
        path = Path(name).expanduser()
        is_there = path.exists()
    except (OSError, RuntimeError, ValueError):
        # not a path here, such as one that begins with ~nobody
        return None
    size = names.size_of(name, shapes)
    if size is not None and not is_there:
        return shapes[size]
    if path.is_file() and path.name == huggingface.CONFIG:
        return huggingface.read_config(path.parent)[1]
    folder = loading.local(name, loading.shipped())
    if folder is None:
        return None
    return loading.format_of(folder).open(folder).config()


def shapes_there_are(name: str) -> str:
    """Ends an error message with the ways to name a shape; `name` is of none."""
    from jaxspec.weights import loading

    ways = (
        "a shape that `jaxspec models --all` lists, the hub id of a model that has one, or the "
        "path of a config.json"
    )
    if loading.is_hub_id(name):
        further = f" (hf download {name} config.json)"
    else:
        further = suggest(name, published_shapes())
    return ways + further


def pass_time(
    machine: Machine,
    load: Load,
    batch: ArrayLike = 1,
    tokens: ArrayLike = 1,
    undone: ArrayLike | None = None,
) -> np.ndarray:
    """Computes the seconds of a pass over `tokens` tokens of each of `batch` rows: the slower of
    memory and arithmetic.

    Attention's own arithmetic is left out: it is small beside the weights' unless rows are very
    long.

    Args:
        batch, tokens: arrays broadcast.
        undone: tokens that recurrent layers do again in the pass; see `Load.row_bytes`.

    Example, 11 billion parameters on the paper's TPU v4: memory rules at 1 and 8 tokens, arithmetic
    at 512:
        >>> (1e3 * pass_time(machine("tpu-v4"), Load(11e9), tokens=[1, 8, 512])).round(1).tolist()
        [18.3, 18.3, 41.0]

    On an H100 6.05 ms were measured for a plain step of Llama 3.1 8B, 1.18 for Llama 3.2 1B:
        >>> loads = [load_of_size(size, "bfloat16") for size in ("llama-3.1-8b", "llama-3.2-1b")]
        >>> [round(1e3 * float(pass_time(machine("h100"), load)), 2) for load in loads]
        [6.0, 1.25]
    """
    batch = np.asarray(batch, np.float64)
    tokens = np.asarray(tokens, np.float64)
    if not (np.all(batch >= 1) and np.all(tokens >= 1)):
        raise ValueError(f"batch is {batch} and tokens is {tokens}: expected at least 1 of each")
    read = load.bytes_read(batch * tokens) + batch * load.row_bytes(tokens, undone)
    small = load.small_kernels * machine.kernel
    # a product with a small matrix takes as long as any small kernel
    for numbers, count in load.matrices:
        weights = numbers * BYTES[load.dtype]
        small += count * (
            machine.kernel_seconds(weights) - weights / (machine.reached * machine.bandwidth)
        )
    memory = read / (machine.reached * machine.bandwidth) + small
    arithmetic = 2 * load.per_token * batch * tokens / machine.peak(load.dtype)
    return np.maximum(memory, arithmetic)


def verify_cost(machine: Machine, load: Load, gamma: ArrayLike, batch: ArrayLike = 1) -> np.ndarray:
    """Computes v, the pass over gamma + 1 tokens in one-token passes; 1 is the paper's assumption.

    Example, free at batch 1 and not at batch 128:
        >>> verify_cost(machine("tpu-v4"), Load(11e9), gamma=7, batch=[1, 16, 128]).round(
        ...     2
        ... ).tolist()
        [1.0, 1.0, 4.47]
    """
    gamma = np.asarray(gamma, np.float64)
    return pass_time(machine, load, batch, gamma + 1) / pass_time(machine, load, batch)


def draft_cost(
    machine: Machine, draft: Load, target: Load, batch: ArrayLike = 1, gamma: ArrayLike = 1
) -> np.ndarray:
    """Computes c, the cost of a one-token pass of the drafter over the target's.

    In recurrent layers a drafter's pass does gamma + 2 tokens again: its round may take back a
    whole draft.

    Example, T5-small against T5-XXL by their sizes (the paper measured 0.02, of which most is
    overhead):
        >>> round(float(draft_cost(machine("tpu-v4"), Load(77e6), Load(11e9))), 3)
        0.007
    """
    undone = np.asarray(gamma, np.float64) + 2
    return pass_time(machine, draft, batch, undone=undone) / pass_time(machine, target, batch)


def spare_tokens(machine: Machine, load: Load) -> float:
    """Computes the largest number of tokens (rows times gamma + 1) whose pass takes no longer than
    a pass over one.

    Where caches are read too, memory rules longer; this counts the weights alone, and all experts
    as read.

    >>> round(spare_tokens(machine("tpu-v4"), Load(11e9)))
    229
    """
    return machine.peak(load.dtype) * load.weight_bytes / (2 * load.per_token * machine.bandwidth)
