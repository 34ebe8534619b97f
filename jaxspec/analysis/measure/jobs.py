"""Jobs in parts: some of a job's rows, its batches, the model that drafts for it; what running one yields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxspec import buffers, drafters, sharding
from jaxspec.base import Bound, Model
from jaxspec.decode import loop
from jaxspec.decode.request import Job
from jaxspec.warp.options import OPTIONS


class Batch(NamedTuple):
    """Some rows of a job: as a job, as numbers of rows of the whole, and how many are not there just to fill it."""

    job: Job
    rows: Int[np.ndarray, " batch"]
    real: int


def take(job: Job, rows: Sequence[int] | Int[np.ndarray, " batch"]) -> Job:
    """Some rows of a job, in the given order, with their own keys and options: a row's text is the same in any batch.

    Raises:
        ValueError: a job of several samples of each prompt.

    >>> from jaxspec.testing import table_job
    >>> job = table_job(max_new_tokens=[4, 7])
    >>> take(job, [1]).prompt.length.tolist(), take(job, [1]).plain().request.limit.tolist()
    ([1], [7])
    """
    if (samples := job.options["num_samples"]) > 1:
        raise ValueError(
            f"the job has num_samples={samples}: measure one sample of each prompt, job.replace(num_samples=1)"
        )
    index = jnp.asarray(np.asarray(rows, np.int32))
    prompt, request = buffers.take_rows((job.prompt, job.request), index)
    if (mesh := sharding.mesh_of(job.weights)) is not None:
        prompt, request = sharding.place((prompt, request), len(index), mesh)
    options = {name: _of_rows(name, value, np.asarray(rows)) for name, value in job.options.items()}
    if job.options["key"] is not None:
        options["key"] = request.keys
    if isinstance(policy := options["policy"], Bound):
        options["policy"] = policy._replace(params=request.policy)
    return job._replace(prompt=prompt, request=request, options=options)


def _of_rows(name: str, value: Any, rows: np.ndarray) -> Any:
    """An option that has one value for each row, for some of them; others as they are."""
    per_row = name == "max_new_tokens" or (name in OPTIONS and name != "banned")
    return np.asarray(value)[rows] if per_row and np.ndim(value) == 1 + (name == "logit_bias") else value


def in_batches(job: Job, batch: int) -> Iterator[Batch]:
    """All rows in batches of one shape, which share a program; a short last one is filled with copies of the last row.

    Raises:
        ValueError: batch < 1.

    >>> from jaxspec.testing import table_job
    >>> [part.rows.tolist() for part in in_batches(take(table_job(), [0, 0, 1, 0, 1]), 2)]
    [[0, 1], [2, 3], [4, 4]]
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}: expected at least 1")
    total = len(job.prompt.length)
    batch = min(batch, total)
    for start in range(0, total, batch):
        rows = np.minimum(np.arange(start, start + batch), total - 1)
        yield Batch(take(job, rows), rows, min(batch, total - start))


def whole_batches(job: Job, batch: int, rows: int) -> list[Job]:
    """About `rows` rows in whole batches; where there are too few they begin again, with other keys."""
    have = len(job.prompt.length)
    found = []
    for numbers in np.arange(batch * max(1, rows // batch)).reshape(-1, batch):
        part, lap = take(job, numbers % have), jnp.asarray(numbers // have)
        if job.options["key"] is not None and numbers[-1] >= have:
            keys = part.request.keys
            keys = jnp.where(lap > 0, jax.vmap(jax.random.fold_in)(jax.random.clone(keys), lap), keys)
            part = part._replace(request=part.request._replace(keys=keys), options=dict(part.options) | {"key": keys})
        found.append(part)
    return found


def drafting_model(job: Job) -> Model:
    """The model that a job samples its draft tokens from.

    Raises:
        TypeError: its drafter is something else, whose distribution is not known everywhere.
    """
    if job.drafter is not None and len(job.drafter.models) == 1:
        (model,) = job.drafter.models
        if job.drafter.functions in [drafters.model(model, coupled=coupled).functions for coupled in (False, True)]:
            return model
    given = job.options["drafter"]
    kind = "no model" if isinstance(given, Bound) else f"of type {type(given).__name__}"
    raise TypeError(f"drafter is {kind}: expected a jaxspec.Model, whose distribution is known")


def is_sampled(job: Job) -> bool:
    """Whether tokens of some row are drawn."""
    return bool(np.any(np.asarray(job.request.sampling_params.temperature) > 0))


def run(job: Job) -> loop.Outcome:
    """One whole generation, on the host."""
    return jax.tree.map(np.asarray, loop.run(job))


def texts(outcomes: Iterable[loop.Outcome]) -> list[list[int]]:
    """The new tokens of every row of some generations, without their padding."""
    return [row for outcome in outcomes for row in buffers.to_lists(outcome.tokens, outcome.length)]
