"""Training by a recipe, from its data to a checkpoint: networks, drafters on hidden states, and
tables.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from jaxspec import files
from jaxspec.core.checks import one_of
from jaxspec.files import folders
from jaxspec.nets import short_form
from jaxspec.training import heads, networks, ngrams
from jaxspec.training.loop import Destination, TrainingRun, fit
from jaxspec.training.recipes import AnyRecipe, HeadRecipe, Recipe, TableRecipe
from jaxspec.weights import orbax

RECORD = "recipe.json"  # beside a run's state: whose it is
# two values, as JSON, that mean one: the target's vocabulary
SAME = {("head.draft_vocab", "0"): "null"}


def train(
    recipe: Recipe | HeadRecipe,
    folder: Path,
    work: Path,
    log: Callable[[str], None] = print,
    progress: bool = True,
) -> tuple[TrainingRun, Any]:
    """Trains the network of a recipe on the data in `folder`, keeping its state in `work`.

    Returns:
        The run with what was learnt; and its held-out negative log likelihood per token in nats, or
        for a drafter on hidden states its held-out acceptance (`head_loss.HeldOutAcceptance`).
    """
    is_head = isinstance(recipe, HeadRecipe)
    prepare: Any = heads.prepare if is_head else networks.prepare
    run = prepare(recipe, folder, work, progress)
    objective = run.objective
    size = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    log(
        f"{recipe.name}: {size:,} parameters to learn; {objective.batches.per_epoch} steps an epoch"
    )
    if is_head:
        log(f"untrained: {objective.report(run.params, objective.heldout.once())}")
    params, held_out = fit(
        run.params, objective, recipe.train, work / "state", log=log, progress=progress
    )
    return run._replace(params=params), held_out


def check_run(recipe: Recipe | HeadRecipe, work: Path) -> None:
    """Raises ValueError for a folder that holds the run of another recipe, and records the recipe;
    steps may differ.

    A field that the record lacks is newer than the run, which had its default.
    """
    record = work / RECORD
    table = dataclasses.asdict(recipe)
    defaults = dict(_defaults(recipe))
    if isinstance(recipe, Recipe):
        del table["source"]  # which says the same
        form = short_form(recipe.model)
        table["model"] = dataclasses.asdict(form)
        defaults |= _defaults(form, "model.")
    for name in ("steps", "evaluate_every", "save_every"):
        del table["train"][name]
    fields = {name: json.dumps(value) for name, value in flatten_dict(table, sep=".").items()}
    if record.is_file():
        recorded = files.json_object(files.read_text(record), str(record))
        if isinstance(recipe, Recipe):
            recorded.pop("family", None)  # of older records; the configuration says it
        earlier = {
            name: json.dumps(value, default=str) for name, value in defaults.items()
        } | recorded
        differ = [
            name
            for name in sorted(fields | recorded)
            if _meaning(name, fields) != _meaning(name, earlier)
        ]
        if differ:
            named = [
                f"{name} is {earlier.get(name)} there and {fields.get(name)} here"
                for name in differ
            ]
            other_run = f"{work} holds the run of another recipe ({folders.some(named)})"
            raise ValueError(f"{other_run}: give another --work, or remove it")
    elif not (work / "state").exists():
        # else it was begun before this was written down, by whatever recipe
        files.write_text(record, [json.dumps(fields), "\n"])


def _meaning(name: str, texts: dict[str, str]) -> str:
    text = texts.get(name, "")
    return SAME.get((name, text), text)


def _defaults(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the defaults of a dataclass' fields, and of those nested in it, by their paths."""
    for field in dataclasses.fields(options):
        if dataclasses.is_dataclass(value := getattr(options, field.name)):
            yield from _defaults(value, f"{prefix}{field.name}.")
        elif field.default is not dataclasses.MISSING:
            yield prefix + field.name, field.default


def checkpoint(
    recipe: AnyRecipe,
    folder: Path,
    out: Path,
    work: Path,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
) -> str:
    """Trains a recipe's network, or counts its tables, and saves it.

    Args:
        recipe: the recipe of a model, of tables or of a drafter on hidden states.
        folder: holds the data.
        out: where the checkpoint goes.
        work: where the state of a training run is kept.
        dtype: the dtype of stored matrices.
        overwrite: whether a checkpoint at `out` may be replaced.

    Returns:
        A line that describes the checkpoint.

    Raises:
        FileNotFoundError: the data is not there.
        OSError: another process trains with its state in `work`, or the disk is full.
        ValueError: `out` exists already, `work` holds another recipe's run, or the dtype differs.
    """
    for written in (out, work / "state"):
        files.check_writable(written)
    needed = [recipe.data.train, recipe.data.heldout]
    if not isinstance(recipe, TableRecipe):
        needed += [f"{recipe.data.tokenizer}/tokenizer.json"] if recipe.data.tokenizer else []
        needed += recipe.data.also
    missing = [file for file in needed if not (folder / file).is_file()]
    if missing:
        advice = (
            f"in a checkout `python -m data_prep.debian --data {folder}` makes the data of "
            "jaxspec's own recipes"
        )
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: {advice}")
    if out.exists() and not overwrite:
        raise ValueError(f"{out} is there already: choose another --out, or --overwrite it")
    _check_dtype(recipe, dtype)
    destination = Destination(out, dtype, overwrite)
    if isinstance(recipe, TableRecipe):
        return ngrams.write(recipe, folder, destination)
    with folders.locked(work, "another training run"):
        check_run(recipe, work)
        run, held_out = train(recipe, folder, work)
    return run.write({**run.params, **run.fixed}, held_out, destination)


def _check_dtype(recipe: AnyRecipe, dtype: str) -> None:
    """Raises ValueError for a dtype that networks of a recipe's kind are not stored in."""
    if isinstance(recipe, TableRecipe) and dtype != "float32":
        raise ValueError(f"dtype is {dtype!r}: tables hold integers, so leave dtype out")
    if isinstance(recipe, HeadRecipe) and dtype not in heads.DTYPES:
        expected = " or ".join(heads.DTYPES)
        raise ValueError(
            f"dtype is {dtype!r}: drafters that read hidden states are stored as {expected}"
        )
    one_of(dtype, "dtype", orbax.DTYPES)
