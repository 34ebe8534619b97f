"""Devices that are not here, for the compilers that need none: libtpu's of TPUs, and jax's CUDA
plugin's of GPUs.

Both are packages that run on any Linux machine. A TPU's topology is a name that libtpu knows; a GPU
is described to its compiler by its numbers, of which this file has what `roofline.MACHINES` has
not.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxspec.analysis import roofline
from jaxspec.analysis.aot import plugin

# shapes of the smallest hosts
SMALLEST = {"v4": "2x2x1", "v5p": "2x2x1", "v5e": "2x2", "v6e": "2x2"}


class Gpu(NamedTuple):
    """The numbers that a GPU's compiler asks for; bandwidth and memory are those of
    `roofline.MACHINES`.
    """

    name: str  # the driver's name for it, `jax.Device.device_kind`
    capability: tuple[int, int]  # CUDA's compute capability
    multiprocessors: int  # their number
    l2: int  # bytes of the L2 cache
    clock: float  # GHz, the highest that the driver reports


GPUS = {
    # NVIDIA A100 architecture whitepaper
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40 << 20, 1.41),
    # NVIDIA L4 data sheet: 7,424 cores; Ada whitepaper: 128 each
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 48 << 20, 2.04),
    # NVIDIA H100 architecture whitepaper, SXM5
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 50 << 20, 1.98),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 50 << 20, 1.98),  # the same chip
    # as XLA's own description of it has them
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 126 << 20, 1.965),
}

# Of each compute capability, from the CUDA C++ Programming Guide: threads of a multiprocessor, its
# float32 results a cycle, KiB of its shared memory. A block can have all of the latter but one KiB.
_CAPABILITIES = {
    (8, 0): (2048, 64, 164),
    (8, 9): (1536, 128, 100),
    (9, 0): (2048, 128, 228),
    (10, 0): (2048, 128, 228),
}


def devices_of(topology: str) -> tuple[str, list[Any]]:
    """Returns the full name of a topology, and its devices, of which none is here."""
    chip = topology.partition(":")[0]
    if chip not in SMALLEST and chip not in GPUS:
        raise ValueError(
            f"topology is {topology!r}: no chip {chip!r} is in the table. {_expected()}"
        )
    if chip in GPUS:
        return _gpus(topology)
    return _tpus(topology)


def _expected() -> str:
    names = [f"{chip}:{shape}" for chip, shape in SMALLEST.items()]
    return f"Expected one such as {', '.join(names)}, or {', '.join(GPUS)}, several as h100:8"


def _tpus(topology: str) -> tuple[str, list[Any]]:
    chip, _, shape = topology.partition(":")
    name = f"{chip}:{shape or SMALLEST[chip]}"
    if importlib.util.find_spec("libtpu") is None:
        pins = [
            r.partition(";")[0].strip()
            for r in importlib.metadata.requires("jax") or ()
            if "libtpu" in r
        ]
        raise ImportError(
            "libtpu, the compiler of TPUs, is not installed (it needs no TPU): "
            f"pip install --no-deps '{(pins or ['libtpu'])[0]}' brings the one that this jax names"
        )
    # libtpu would look for a TPU, and let only one process use it; none is used here.
    usual = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    for variable, value in usual.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    try:
        return name, list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
    except Exception as error:  # of several kinds, from libtpu
        raise ValueError(f"topology is {topology!r}. {_expected()} ({error})") from error


def _gpus(topology: str) -> tuple[str, list[Any]]:
    chip, _, written = topology.partition(":")
    if not (written or "1").isdecimal() or int(written or "1") < 1:
        raise ValueError(
            f"topology is {topology!r}: expected how many GPUs of one host, as {chip}:8"
        )
    if plugin() is None:
        raise ImportError(
            "the compiler of GPUs, a plugin of jax, is not installed (it needs no GPU): "
            f"{how_to_get()}"
        )
    from jax.experimental import topologies

    # One process with so many devices. JAX_PLATFORMS=cpu keeps jax from looking for a GPU, not from
    # finding the plugin.
    shape = f"1x1x{written or 1}"
    described = description(chip)
    devices = topologies.get_topology_desc(
        platform="cuda", topology=shape, target_config=described
    ).devices
    return f"{chip}:{written or 1}", list(devices)


def how_to_get() -> str:
    """Says how the compiler of GPUs is installed, with the assembler and the library that it
    calls.
    """
    version = importlib.metadata.version("jax")
    return (
        f"pip install --no-deps --target ~/cuda jax-cuda13-pjrt=={version} "
        f"jax-cuda13-plugin=={version} 'nvidia-cuda-nvcc==13.*' 'nvidia-nvvm==13.*', and export "
        "PYTHONPATH=~/cuda (0.7 GB; in a folder of its own it does not make other programs look "
        "for a GPU)"
    )


def description(kind: str) -> str:
    """Describes a GPU to XLA, as the text of a GpuTargetConfigProto.

    Example:
        >>> "core_count: 132" in description("h100")
        True
    """
    gpu = GPUS[kind]
    machine = roofline.machine(kind)
    assert machine.memory is not None
    major, minor = gpu.capability
    threads, results, kibibytes = _CAPABILITIES[gpu.capability]
    # From 9.0 on, the instructions of this capability alone, as sm_90a has them: the products of
    # the tensor cores.
    if major >= 9:
        features = "ACCELERATED_FEATURES"
    else:
        features = "NONE"
    numbers = {
        "core_count": gpu.multiprocessors,
        "l2_cache_size": gpu.l2,
        "memory_bandwidth": int(machine.bandwidth),
        "device_memory_size": int(machine.memory),
        "clock_rate_ghz": gpu.clock,
        "threads_per_core_limit": threads,
        "fpus_per_core": results,
        "shared_memory_per_core": kibibytes << 10,
        "shared_memory_per_block_optin": (kibibytes - 1) << 10,
        # The same of all these capabilities.
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "registers_per_core_limit": 1 << 16,
        "registers_per_block_limit": 1 << 16,
        **{
            f"block_dim_limit_{axis}": limit
            for axis, limit in (("x", 2**31 - 1), ("y", 65535), ("z", 65535))
        },
        **{
            f"thread_dim_limit_{axis}": limit
            for axis, limit in (("x", 1024), ("y", 1024), ("z", 64))
        },
    }
    lines = "\n".join(f"  {name}: {number}" for name, number in numbers.items())
    capability = (
        f"cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}"
    )
    return (
        f'gpu_device_info {{\n{lines}\n  {capability}\n}}\nplatform_name: "CUDA"\n'
        f'dnn_version_info {{ major: 9 minor: 10 }}\ndevice_description_str: "{gpu.name}"\n'
    )


def machine_of(topology: str, devices: Sequence[Any]) -> roofline.Machine:
    """Returns a device of a topology as a machine. If a chip is two devices, each has half of
    it.
    """
    name = topology.partition(":")[0]
    chip = roofline.machine(name if name in GPUS else f"tpu-{name}")
    halved = {
        f: getattr(chip, f) / cores(devices)
        for f in ("bandwidth", "bfloat16", "memory")
        if getattr(chip, f)
    }
    return chip._replace(**halved)


def cores(devices: Sequence[Any]) -> int:
    """Counts the devices that make up a chip: two of a v4, one of all later chips, and of GPUs."""
    places = {tuple(device.coords) for device in devices if hasattr(device, "coords")}
    if places:
        return len(devices) // len(places)
    return 1
