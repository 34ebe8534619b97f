"""Prints the memory of a process that loads a model, as JSON; `tests/weights/test_tensors.py` runs
it.

python host_memory.py FOLDER   bytes of the parameters, and how much more than before was resident at most: while
                               loading them, and, as a control, while reading all tensors first and placing them then
"""

import ctypes
import gc
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np

from jaxspec.weights import huggingface, parameters, tensors


def resident(kind):
    """VmRSS, or VmHWM, the most since the last reset."""
    return 1024 * int(re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def peak(work):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS now
    before = resident("VmRSS")
    kept = jax.block_until_ready(work())
    return resident("VmHWM") - before, sum(x.nbytes for x in jax.tree.leaves(kept))


def everything_first(folder):
    _, config = huggingface.read_config(folder)
    read = {name: np.array(x) for shard in tensors.shards(folder) for name, x in shard.read()}
    return {name: parameters.place(name, x, config, None, "float32") for name, x in read.items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    # What is imported, traced and set up on the way is not counted: some 7 MB, more or less of it
    # from run to run.
    huggingface.restore(folder)
    loaded, size = peak(lambda: huggingface.restore(folder)[0])
    control, _ = peak(lambda: everything_first(folder))
    print(json.dumps({"parameters": size, "loaded": loaded, "control": control}))
