"""Loading a large model: how much host memory a fresh process takes, against the largest file of the folder.

    python -m benchmarks.loading /tmp/t5-xxl --dtype bfloat16

Wants a device that holds the model (--shape, T5-XXL by default: 22 GB in bfloat16) and twice as much disk; some
minutes. Random weights are saved as a Hugging Face folder, in files of at most 5 GB, unless it is there, and read with
`jaxspec.load`. Both sum up the bits of every parameter as it is stored, on the device, so that it is known that the
same came back.
"""

from __future__ import annotations

import functools
import multiprocessing
import shutil
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil
from jaxtyping import Array, UInt32
from rich import filesize

import jaxspec
from benchmarks.options import parser_of
from jaxspec.analysis.memory import process_bytes
from jaxspec.analysis.random_model import random_model
from jaxspec.weights import huggingface

SPARE = 2 * 10**9  # bytes of the disk to leave


class Loaded(NamedTuple):
    """The time and memory of loading a folder.

    Attributes:
        files, largest: how many, and bytes of the largest.
        size: bytes of the parameters.
        extra: bytes of host memory at the peak, beyond what was there before and what the parameters take.
        how: that peak is known, as `Peak` has it.
        seconds: of loading.
        bits: the sum of the parameters' bits.
    """

    files: int
    largest: int
    size: int
    extra: int
    how: str
    seconds: float
    bits: int


class Peak:
    """The most memory of this process inside a `with` block, in bytes, and how much it had before.

    Attributes:
        before, bytes: resident memory when the block began, and its peak inside.
        how: "peak", by the system's account of the process, if that grew; else "samples" of resident memory.

    >>> import mmap
    >>> with Peak() as peak, mmap.mmap(-1, 1 << 26) as pages:  # which no free memory of this process can serve
    ...     _ = pages.write(bytes(1 << 26))
    >>> peak.bytes - peak.before > 1 << 25
    True
    """

    before = bytes = 0
    how = "samples"

    def __enter__(self) -> Peak:
        self._process, self._over, self._mark = psutil.Process(), threading.Event(), process_bytes() or 0
        self.before = self.bytes = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if (peak := process_bytes() or 0) > self._mark:
            self.bytes, self.how = peak, "peak"

    def _sample(self) -> None:
        while not self._over.wait(0.005):
            self.bytes = max(self.bytes, self._process.memory_info().rss)


def in_fresh_processes(shape: str, dtype: str, folder: Path) -> str:
    """Writes random weights as a sharded folder, unless it is there; what loading it takes of the host's memory."""
    written, loaded = apart(write, shape, dtype, folder), apart(load, dtype, folder)
    size, extra, largest = map(filesize.decimal, (loaded.size, loaded.extra, loaded.largest))
    same = "the same parameters" if written == loaded.bits else "OTHER PARAMETERS THAN WRITTEN"
    share = loaded.extra / loaded.largest
    return (
        f"Loading {size} from {loaded.files} files took {loaded.seconds:.0f} s and {extra} of host memory: {share:.2f} "
        f"of the largest file ({largest}; {loaded.how}), {'within one file' if share <= 1 else 'MORE THAN ONE FILE'}; "
        f"{same}."
    )


def apart(function: Any, *arguments: Any) -> Any:
    """Calls a function in a new process, which ends with it and lets go of the device, and returns its result."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def write(shape: str, dtype: str, folder: Path) -> int:
    """Saves a model of random weights, unless the folder is there; the sum of its bits."""
    model = random_model(shape, dtype, seed=0)
    size = sum(x.nbytes for x in jax.tree.leaves(model.params))
    if not huggingface.is_folder(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < size + SPARE:
            raise OSError(
                f"{folder.parent} has {filesize.decimal(free)} left, but {shape} takes {filesize.decimal(size)}: give "
                "another folder"
            )
        huggingface.save(model, folder)
    return bits(model.params, model.config.dtype)


def load(dtype: str, folder: Path) -> Loaded:
    """Loads such a folder, and measures. To be called in a process that has done nothing else."""
    if not huggingface.is_folder(folder):
        raise FileNotFoundError(f"no folder at {folder}: write it first")
    bits(jax.random.normal(jax.random.key(0), (4,)), "float32")  # the device's libraries are not to be measured
    files = [path.stat().st_size for path in folder.glob("*.safetensors")]
    with Peak() as peak:
        start = time.perf_counter()
        model = jaxspec.load(folder, dtype=dtype)
        jax.block_until_ready(model.params)
        seconds = time.perf_counter() - start
    size = sum(x.nbytes for x in jax.tree.leaves(model.params))
    on_host = jax.devices()[0].platform == "cpu"  # whose memory holds the model, too
    extra = peak.bytes - peak.before - (size if on_host else 0)
    stored = bits(model.params, model.config.dtype)
    return Loaded(len(files), max(files), size, extra, peak.how, seconds, stored)


def bits(params: Any, dtype: str) -> int:
    """The sum of all parameters' bits as integers, floats in the dtype of the file (norms are float32 in memory).

    >>> bits({"a": jnp.ones(2)}, "bfloat16") == 2 * 0x3F80
    True
    """
    return sum(int(_bits(x, dtype)) for x in jax.tree.leaves(params))


@functools.partial(jax.jit, static_argnames="dtype")
def _bits(x: Array, dtype: str) -> UInt32[Array, ""]:
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    x = x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jnp.sum(jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]).astype(jnp.uint32), dtype=jnp.uint32)


def main() -> None:
    """Parses the command line, writes and loads."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="t5-v1_1-xxl")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    print(in_fresh_processes(options.shape, options.dtype, options.folder))


if __name__ == "__main__":
    main()
