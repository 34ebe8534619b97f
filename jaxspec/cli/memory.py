"""Memory of a generation, of the process and of the device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxspec.base import Model
    from jaxspec.decode.request import Job


def account(job: Job, models: Sequence[Model]) -> dict[str, int | None]:
    """Bytes of the program of one generation, and of what it cannot do without.

    Args:
        job: the generation.
        models: target, and drafter if there is one.

    Returns:
        "program": arguments, results and temporaries by the compiler's own account (None if it gives none);
        "weights"; "caches", the drafter's too; "logits", one block [batch, gamma + 1, vocab] of each model.
    """
    import jax

    from jaxspec import buffers
    from jaxspec.decode import loop

    def begin():
        room = buffers.room(job.max_new_tokens, job.decoder.gamma)
        state = job.decoder.init(job.keys, job.weights, job.prompt, job.request, room)
        return state.cache, state.drafter

    stats = loop.run.lower(*job).compile().memory_analysis()
    program = None
    if stats is not None:
        program = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
        program -= stats.alias_size_in_bytes
    positions = len(job.prompt.length) * (job.decoder.gamma + 1)
    logits = 4 * positions * sum(model.lm.vocab_size for model in models)
    return {
        "program": program,
        "weights": _bytes(job.weights),
        "caches": _bytes(jax.eval_shape(begin)),
        "logits": logits,
    }


def process_bytes() -> int | None:
    """Peak memory of this process so far; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_bytes() -> int | None:
    """Peak memory of the device so far; None on a CPU, whose memory is the process's."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _bytes(tree: Any) -> int:
    import jax

    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
