"""Compiles a generation with quantised matrices for a TPU that is not here, and prints which large
arrays it makes.

A line of JSON for plain decoding and one for speculative: what tests/test_tpu.py asserts things of.
One layer of Llama 3.1 8B, a tiny draft model.

    JAX_PLATFORMS=cpu python tests/scripts/tpu_int8.py [v5p:2x2x1] [float32] [int4]
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jaxspec.core import Model, Prompt, programs
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared, prepare
from jaxspec.nets import decoder
from jaxspec.weights import quantisation

# of a vocabulary that hides nothing
TARGET = decoder.decoder_config(4096, 4096, 14336, 1, 32, 8, 128)
DRAFT = decoder.decoder_config(4096, 128, 256, 1, 2, 1, 64)
NO_ARRAYS = (
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "while",
    "conditional",
    "copy-start",
    "copy-done",
)


def model(config: decoder.DecoderConfig, computed: str, dtype: str) -> Model:
    config = dataclasses.replace(config, dtype=computed)
    params = jax.eval_shape(
        lambda: quantisation.quantise(decoder.init(config, jax.random.key(0)), dtype)
    )
    return Model(decoder.language_model(config), params, config=config)


def large_arrays(text: str, least: int) -> dict[str, int]:
    """Counts the arrays of at least so many entries that a program writes to memory, by kind: not
    those in fusions.

    Prefetches (copy-start), which leave an array as it is, are not among them.
    """
    fused, name, found = set(re.findall(r"\bcalls=%([\w.\-]+)", text)), "", dict[str, int]()
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = head[1]
        operation = re.match(r"\s+(?:ROOT )?%[\w.\-]+ = (.*?) ([\w\-]+)\(", line)
        if operation is None or name in fused or operation[2] in NO_ARRAYS:
            continue
        for kind, sizes in re.findall(r"\b([a-z]+\d*)\[([\d,]+)\]", operation[1]):
            if math.prod(map(int, sizes.split(","))) >= least:
                found[f"{operation[2]} {kind}[{sizes}]"] = (
                    found.get(f"{operation[2]} {kind}[{sizes}]", 0) + 1
                )
    return found


def compiled(prepared: Prepared, topology: str) -> jax.stages.Compiled:
    place = SingleDeviceSharding(
        topologies.get_topology_desc(topology_name=topology, platform="tpu").devices[0]
    )
    arguments = prepared.weights, prepared.prompt, prepared.request
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
    )
    lowered = loop.generation.lower(prepared.decoder, *shapes, prepared.max_new_tokens)
    return lowered.compile(
        compiler_options=programs.COMPILER_OPTIONS.get(next(iter(place.device_set)).device_kind)
    )


def main() -> None:
    """Compiles both, and prints."""
    topology, computed, dtype = [
        *sys.argv[1:],
        *["v5p:2x2x1", "bfloat16", "int8"][len(sys.argv) - 1 :],
    ]
    target, draft = model(TARGET, computed, dtype), model(DRAFT, computed, dtype)
    prompt = Prompt(np.zeros((1, 64), np.int32), np.full(1, 64, np.int32))
    speculative = prepare(target, prompt, drafter=draft, gamma=5, max_new_tokens=64)
    for name, prepared in (("plain", speculative.plain()), ("speculative", speculative)):
        executable = compiled(prepared, topology)
        memory = executable.memory_analysis()
        arrays = large_arrays(executable.as_text(), 1024 * 4096)  # the least of the matrices: keys
        sizes = {
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        }
        print("compiled", json.dumps({"name": name, "large arrays": arrays} | sizes), flush=True)


if __name__ == "__main__":
    main()
