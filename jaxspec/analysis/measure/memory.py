"""Memory of a generation, of the process and of the device."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from jaxspec import buffers
from jaxspec.decode import loop
from jaxspec.decode.request import Job, drafter_lms


def account(job: Job) -> dict[str, int | None]:
    """Bytes of the program of one generation, and of what it cannot do without.

    Returns:
        "program": arguments, results and temporaries by the compiler's own account, and "temporaries" alone (None if
        it gives none);
        "weights"; "caches", the drafter's too; "logits", one block [batch, nodes + 1, vocab] of each model.
    """

    def begin():
        headroom = buffers.headroom(job.max_new_tokens, job.decoder.nodes)
        return job.decoder.init(job.weights, job.prompt, job.request, headroom).caches

    stats = program_stats(job)
    program = None
    if stats is not None:
        program = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
        program -= stats.alias_size_in_bytes
    lms = [job.target.lm] + ([] if job.drafter is None else list(dict.fromkeys(drafter_lms(job.drafter))))
    positions = len(job.prompt.length) * (job.decoder.nodes + 1)
    return {
        "program": program,
        "temporaries": None if stats is None else stats.temp_size_in_bytes,
        "weights": _bytes(job.weights),
        "caches": _bytes(jax.eval_shape(begin)),
        "logits": 4 * positions * sum(lm.vocab_size for lm in lms),
    }


def program_stats(job: Job) -> Any:
    """The compiler's account of the memory of a job's program; None where it gives none."""
    program = loop.generation.lower(job.decoder, job.weights, job.prompt, job.request, job.max_new_tokens)
    return program.compile().memory_analysis()


def process_bytes() -> int | None:
    """Peak memory of this process so far; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_bytes() -> int | None:
    """Peak memory of the device so far; None on a CPU, whose memory is the process's."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _bytes(tree: Any) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
