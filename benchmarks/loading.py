"""Loading a large model: how much host memory a fresh process takes, against the largest file of
the folder.

    python -m benchmarks.loading /tmp/t5-xxl --dtype bfloat16
    python -m benchmarks.loading /tmp/kinds --kinds

Wants a device that holds the model (--shape, T5-XXL by default: 22 GB in bfloat16) and twice as
much disk; some minutes. Random weights are saved as a Hugging Face folder, in files of at most 5
GB, unless it is there, and read with `jaxspec.load`. Both sum up the bits of every parameter as it
is stored, on the device, so that it is known that the same came back.

With --kinds a folder of 0.5 to 4 GB for each kind of network is written (`KINDS`: published
configurations, narrower) and loaded, on a CPU in a quarter of an hour. The table has the peak of
all memory that loading took, parameters among it, and CPU seconds. The peak is compared with the
bytes of the folder or of the parameters, whichever are more.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jaxtyping import Array, UInt32
from rich import filesize

import jaxspec
from benchmarks.options import parser_of
from jaxspec.analysis.memory import process_bytes
from jaxspec.analysis.random_model import random_model
from jaxspec.weights import huggingface, parameters, quantisation, stacks

SPARE = 2 * 10**9  # bytes of the disk to leave
CONFIGS = Path(__file__).parents[1] / "tests" / "pairs" / "configs"
FILE = 60 * 10**6  # bytes of a file of weights of `KINDS`
NARROW = {  # sizes of published configurations in `KINDS`, by the keys that they have
    **{
        "vocab_size": 65536,
        "vocab_size_per_layer_input": 65536,
        "hidden_size": 1024,
        "intermediate_size": 3072,
    },
    **{"moe_intermediate_size": 256, "num_experts": 32, "num_local_experts": 16, "d_model": 768},
    **{"hidden_size_per_layer_input": 64, "linear_num_value_heads": 16, "linear_num_key_heads": 8},
}


class Kind(NamedTuple):
    """A kind of folder: a published configuration, how its tensors are called and stored, and the
    dtype to load.

    Attributes:
        name: its name in the table.
        config: a hub id in tests/pairs/configs.
        dtype: the dtype that it is loaded in.
        changed: keys of its config.json beside `NARROW`, or of its text_config.
        prefix: the beginning of a wrapper's names in place of "model.", the head's excepted.
        beside: the beginning of a wrapper's names that are not read.
    """

    name: str
    config: str
    dtype: str = "bfloat16"
    changed: Mapping[str, Any] = MappingProxyType({})
    prefix: str = "model."
    beside: str = ""


_SMALL_EXPERTS = {"intermediate_size": 1024}
_FULL = {**_SMALL_EXPERTS, "quantization_config": None}
KINDS = (
    Kind(
        "Gemma 4, per-layer embeddings",
        "google/gemma-4-E2B-it",
        prefix="model.language_model.",
        beside="model.vision_tower",
    ),
    Kind(
        "Gemma 4, experts",
        "google/gemma-4-26B-A4B-it",
        prefix="model.language_model.",
        changed={"intermediate_size": 1024},
    ),
    Kind(
        "Qwen 3.5, recurrent layers",
        "Qwen/Qwen3.5-9B",
        prefix="model.language_model.",
        beside="model.visual",
    ),
    Kind("Qwen 3, experts apart", "Qwen/Qwen3-30B-A3B"),
    Kind("Qwen 3, experts apart", "Qwen/Qwen3-30B-A3B", "int8"),
    Kind(
        "Mixtral, experts apart",
        "Qwen/Qwen3-30B-A3B",
        changed={"model_type": "mixtral", **_SMALL_EXPERTS, "num_local_experts": 8},
    ),
    Kind("gpt-oss, experts in stacks", "openai/gpt-oss-20b", changed=_FULL),
    Kind("gpt-oss, mxfp4 kept", "openai/gpt-oss-20b", "int4", _SMALL_EXPERTS),
    Kind("gpt-oss, mxfp4 kept", "openai/gpt-oss-20b", "int8", _SMALL_EXPERTS),
    Kind("gpt-oss, mxfp4 dequantised", "openai/gpt-oss-20b", changed=_SMALL_EXPERTS),
    Kind(
        "Gemma 3, a wrapper",
        "google/gemma-3-4b-it",
        prefix="language_model.model.",
        beside="vision_tower",
    ),
    Kind("BART", "facebook/bart-large-cnn"),
    Kind("Whisper", "openai/whisper-medium"),
    Kind("T5Gemma", "google/t5gemma-2b-2b-ul2"),
)


class Loaded(NamedTuple):
    """The time and memory of loading a folder.

    Attributes:
        files, largest: how many, and bytes of the largest.
        size: bytes of the parameters.
        extra: bytes of host memory at the peak, beyond what was there before and what the
            parameters take.
        how: the way that peak was measured, as in `Peak`.
        seconds: the time of loading.
        bits: the sum of the parameters' bits.
        busy: seconds of a CPU.
    """

    files: int
    largest: int
    size: int
    extra: int
    how: str
    seconds: float
    bits: int
    busy: float


class Peak:
    """The most memory of this process inside a `with` block, in bytes, and how much it had before.

    Attributes:
        before, bytes: resident memory when the block began, and its peak inside.
        how: "peak", by the system's account of the process, if that grew; else "samples" of
            resident memory.

    >>> import mmap
    >>> with (
    ...     mmap.mmap(-1, 1 << 26) as pages,
    ...     Peak() as peak,
    ... ):  # which no free memory of this process can serve
    ...     _ = pages.write(bytes(1 << 26))
    >>> peak.bytes - peak.before > 1 << 25
    True
    """

    before = bytes = 0
    how = "samples"

    def __enter__(self) -> Peak:
        self._process, self._over, self._mark = (
            psutil.Process(),
            threading.Event(),
            process_bytes() or 0,
        )
        self.before = self.bytes = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        # a busy machine takes few samples
        self.bytes = max(self.bytes, self._process.memory_info().rss)
        if (peak := process_bytes() or 0) > self._mark:
            self.bytes, self.how = peak, "peak"

    def _sample(self) -> None:
        while not self._over.wait(0.005):
            self.bytes = max(self.bytes, self._process.memory_info().rss)


def in_fresh_processes(shape: str, dtype: str, folder: Path) -> str:
    """Writes random weights as a sharded folder, unless it is there; what loading it takes of the
    host's memory.
    """
    written, loaded = apart(write, shape, dtype, folder), apart(load, dtype, folder)
    size, extra, largest = map(filesize.decimal, (loaded.size, loaded.extra, loaded.largest))
    same = "the same parameters" if written == loaded.bits else "OTHER PARAMETERS THAN WRITTEN"
    share = loaded.extra / loaded.largest
    return (
        f"Loading {size} from {loaded.files} files took {loaded.seconds:.0f} s and {extra} of host "
        f"memory: {share:.2f} of the largest file ({largest}; {loaded.how}), "
        f"{'within one file' if share <= 1 else 'MORE THAN ONE FILE'}; {same}."
    )


def apart(function: Any, *arguments: Any) -> Any:
    """Calls a function in a new process, which ends with it and lets go of the device, and returns
    its result.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def of_kinds(root: Path) -> Iterator[tuple[str, ...]]:
    """Yields a row for each of `KINDS`: what loading it took."""
    for kind in KINDS:
        folder = root / re.sub(r"\W+", "-", f"{kind.name}-{kind.dtype}")
        apart(write_kind, kind, folder)
        loaded = apart(load, kind.dtype, folder)
        files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        shutil.rmtree(folder)
        size, peak = max(files, loaded.size), loaded.extra + loaded.size
        bytes_ = map(filesize.decimal, (files, loaded.size, peak))
        yield kind.name, kind.dtype, *bytes_, f"{peak / size:.2f}", f"{loaded.busy:.1f}"


def write_kind(kind: Kind, folder: Path) -> None:
    """Writes a folder of random weights as transformers has them, in bfloat16 and in many files."""
    folder.mkdir(parents=True)
    table = json.loads(
        (CONFIGS / kind.config.replace("/", "__") / "config.json").read_text("utf-8")
    )
    for part in (table, *(table.get(key) or {} for key in ("text_config", "encoder", "decoder"))):
        part |= {
            key: value
            for key, value in NARROW.items()
            if isinstance(part.get(key), int) and part[key] > value
        }
        part |= {
            key: value
            for key, value in kind.changed.items()
            if key in part or "model_type" in kind.changed
        }
    (folder / huggingface.CONFIG).write_text(json.dumps(table), "utf-8")
    family, config = huggingface.read_config(folder)
    expected, rng = parameters.shapes(config), np.random.default_rng(0)
    random = lambda shape: rng.integers(0x3C00, 0x3D00, shape, np.uint16).view(jnp.bfloat16)  # noqa: E731

    def named() -> Iterator[tuple[str, np.ndarray]]:
        for name, parts in huggingface._by_tensor(family.names(config)).items():
            tensor = random(huggingface._shape(expected, parts))
            for called, x in stacks.unstacked(name, tensor, family.apart, family.alternate):
                called = (
                    kind.prefix + called.removeprefix("model.")
                    if called.startswith("model.")
                    else called
                )
                if table.get("quantization_config") and re.search(
                    r"experts\.(gate_up|down)_proj$", called
                ):
                    experts, width, rows = x.shape
                    yield (
                        f"{called}_blocks",
                        rng.integers(0, 255, (experts, rows, width // 32, 16), np.uint8),
                    )
                    yield f"{called}_scales", np.full((experts, rows, width // 32), 120, np.uint8)
                else:
                    yield called, x
        if kind.beside:
            yield f"{kind.beside}.encoder.weight", random((4096, 4096))

    huggingface.SHARD_BYTES = FILE
    huggingface.write_weights(folder, named())


def write(shape: str, dtype: str, folder: Path) -> int:
    """Saves a model of random weights, unless the folder is there; the sum of its bits."""
    model = random_model(shape, dtype, seed=0)
    size = sum(x.nbytes for x in jax.tree.leaves(model.params))
    if not huggingface.is_folder(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < size + SPARE:
            raise OSError(
                f"{folder.parent} has {filesize.decimal(free)} left, but {shape} takes "
                f"{filesize.decimal(size)}: give another folder"
            )
        huggingface.save(model, folder)
    return bits(model.params, model.config.dtype)


def load(dtype: str, folder: Path) -> Loaded:
    """Loads such a folder, and measures. To be called in a process that has done nothing else."""
    if not huggingface.is_folder(folder):
        raise FileNotFoundError(f"no folder at {folder}: write it first")
    # the device's libraries are not to be measured
    bits(jax.random.normal(jax.random.key(0), (4,)), "float32")
    files = [path.stat().st_size for path in folder.glob("*.safetensors")]
    with Peak() as peak:
        start, used = time.perf_counter(), time.process_time()
        model = jaxspec.load(folder, dtype=dtype)
        jax.block_until_ready(model.params)
        seconds, busy = time.perf_counter() - start, time.process_time() - used
    size = quantisation.nbytes(model.params)
    on_host = jax.devices()[0].platform == "cpu"  # whose memory holds the model, too
    extra = peak.bytes - peak.before - (size if on_host else 0)
    stored = bits(model.params, model.config.dtype)
    return Loaded(len(files), max(files), size, extra, peak.how, seconds, stored, busy)


def bits(params: Any, dtype: str) -> int:
    """The sum of all parameters' bits as integers, floats in the dtype of the file (norms are
    float32 in memory).

    >>> bits({"a": jnp.ones(2)}, "bfloat16") == 2 * 0x3F80
    True
    """
    return sum(int(_bits(x, dtype)) for x in jax.tree.leaves(params))


@functools.partial(jax.jit, static_argnames="dtype")
def _bits(x: Array, dtype: str) -> UInt32[Array, ""]:
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    x = x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jnp.sum(
        jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]).astype(jnp.uint32),
        dtype=jnp.uint32,
    )


def main() -> None:
    """Parses the command line, writes and loads."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="t5-v1_1-xxl")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kinds", action="store_true")
    options = parser.parse_args()
    if not options.kinds:
        return print(in_fresh_processes(options.shape, options.dtype, options.folder))
    print(
        "| folder | loaded in | files | parameters | peak | over the larger | CPU, s "
        "|\n|---|---|---|---|---|---|---|"
    )
    for row in of_kinds(options.folder):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
