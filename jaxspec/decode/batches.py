"""Prepared generations in parts: some of their rows, their batches, and running them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxspec import sharding
from jaxspec.core import token_rows
from jaxspec.core.checks import at_least
from jaxspec.core.options import Option
from jaxspec.decode import loop
from jaxspec.decode.options import OPTIONS, gathered
from jaxspec.decode.request import Prepared
from jaxspec.sampling.params import bound_processors
from jaxspec.structured import patterns


class Batch(NamedTuple):
    """Some rows of a prepared generation, their numbers in the whole, and how many of them are not
    padding.
    """

    prepared: Prepared
    rows: Int[np.ndarray, " batch"]
    real: int


def take(prepared: Prepared, rows: Sequence[int] | Int[np.ndarray, " batch"]) -> Prepared:
    """Returns some rows of a generation, in the given order, with their keys and options.

    A row's text is the same in any batch.

    >>> from jaxspec.testing import prepared_table
    >>> prepared = prepared_table(max_new_tokens=[4, 7])
    >>> (
    ...     take(prepared, [1]).prompt.length.tolist(),
    ...     take(prepared, [1]).plain().request.max_new_tokens.tolist(),
    ... )
    ([1], [7])
    """
    samples = prepared.options.num_samples
    if samples > 1:
        raise ValueError(
            f"the generation has num_samples={samples}: measure one sample of each, "
            "prepared.replace(num_samples=1)"
        )
    index = token_rows.on_device(np.asarray(rows, np.int32))
    prompt, request = token_rows.take_rows((prepared.prompt, prepared.request), index)
    mesh = sharding.mesh_of(prepared.weights)
    if mesh is not None:
        prompt, request = sharding.place((prompt, request), len(index), mesh)
    of_rows = {
        name: _of_rows(OPTIONS[name], value, np.asarray(rows))
        for name, value in prepared.options.keywords().items()
    }
    if prepared.options.key is not None:
        of_rows["key"] = request.keys
    if prepared.options.policy is not None:
        of_rows["policy"] = prepared.options.policy._replace(params=request.policy)
    processors = of_rows.get("logits_processors")
    if processors:
        pairs = zip(
            bound_processors(processors, "logits_processors"),
            request.sampling_params.processors,
            strict=True,
        )
        of_rows["logits_processors"] = tuple(
            bound._replace(params=values) for bound, values in pairs
        )
    return prepared._replace(prompt=prompt, request=request, options=gathered(of_rows))


def _of_rows(option: Option, value: Any, rows: np.ndarray) -> Any:
    """Takes some rows of an option that has one value for each; others stay as they are."""
    if option.name in patterns.NAMES and patterns.is_per_row(option.name, value):
        return [value[row] for row in rows]
    if option.ndim is not None and np.ndim(value) > option.ndim:
        return value[rows] if isinstance(value, jax.Array) else np.asarray(value)[rows]
    return value


def in_batches(prepared: Prepared, batch: int) -> Iterator[Batch]:
    """Splits all rows into batches of one shape, which share a program.

    A short last batch is filled with copies of the last row.

    >>> from jaxspec.testing import prepared_table
    >>> [part.rows.tolist() for part in in_batches(take(prepared_table(), [0, 0, 1, 0, 1]), 2)]
    [[0, 1], [2, 3], [4, 4]]
    """
    at_least(1, batch=batch)
    total = len(prepared.prompt.length)
    batch = min(batch, total)
    for start in range(0, total, batch):
        # The last batch repeats its last row: another shape would be another program.
        rows = np.minimum(np.arange(start, start + batch), total - 1)
        yield Batch(take(prepared, rows), rows, min(batch, total - start))


def whole_batches(prepared: Prepared, batch: int, rows: int) -> list[Prepared]:
    """Takes about `rows` rows in whole batches. If too few exist, they begin again with other keys."""
    num_rows = len(prepared.prompt.length)
    parts = []
    for numbers in np.arange(batch * max(1, rows // batch)).reshape(-1, batch):
        repeated = take(prepared, numbers % num_rows)
        lap = token_rows.on_device(numbers // num_rows)
        if prepared.options.key is not None and numbers[-1] >= num_rows:
            # Keys of repeated rows are folded by their lap, or the same texts would be measured
            # twice.
            keys = repeated.request.keys
            keys = jnp.where(
                lap > 0, jax.vmap(jax.random.fold_in)(jax.random.clone(keys), lap), keys
            )
            repeated = repeated._replace(
                request=repeated.request._replace(keys=keys),
                options=repeated.options._replace(key=keys),
            )
        parts.append(repeated)
    return parts


def run(prepared: Prepared) -> loop.Outcome:
    """Runs one whole generation, and takes its outcome to the host."""
    return jax.tree.map(np.asarray, loop.run(prepared))


def texts(outcomes: Iterable[loop.Outcome]) -> list[list[int]]:
    """The new tokens of every row of some generations, without their padding."""
    return [
        row for outcome in outcomes for row in token_rows.to_lists(outcome.tokens, outcome.length)
    ]
