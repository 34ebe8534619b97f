"""From a recipe to a trained checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec import files
from jaxspec.core import Params, token_ids
from jaxspec.files import folders
from jaxspec.nets import net_of
from jaxspec.nets.resize import resize
from jaxspec.training import early_exit, heads, ngrams
from jaxspec.training.distil import distillation, own_texts
from jaxspec.training.divergences import DIVERGENCES
from jaxspec.training.loop import Objective, fit
from jaxspec.training.losses import LossFunction, cross_entropy, with_fixed
from jaxspec.training.on_policy import on_policy
from jaxspec.training.recipes import AnyRecipe, Distil, HeadRecipe, Recipe, RecipeError, TableRecipe
from jaxspec.training.tasks import Tasks, batches, examples
from jaxspec.vocab import trim
from jaxspec.weights import orbax, vocabulary
from jaxspec.weights.loading import load
from jaxspec.weights.orbax import tokenizer_of

RECORD = "recipe.json"  # beside a run's state: whose it is
HELDOUT_EXAMPLES = 256  # per task; enough for a loss to two digits


def teach(recipe: Recipe, distil: Distil, tasks: Tasks, work: Path, progress: bool) -> tuple[LossFunction, Tasks]:
    """The distillation loss, and the examples of each task: the data's, or the teacher's answers to their sources."""
    if distil.answers:
        longest = max(t for _, t in recipe.data.shapes)
        teacher = load(distil.teacher, dtype=recipe.model.dtype)
        tasks = own_texts(teacher, tasks, distil, longest, work / "answers", progress)
    return distillation_of(recipe, distil), tasks


def draft_tokens(recipe: Recipe, folder: Path, work: Path) -> list[int] | None:
    """The ids that a trained drafter's head is trimmed to: the most frequent ones of what it has learnt to write."""
    distil = recipe.distil
    if distil is None or distil.draft_vocab is None:
        return None
    tokenizer = tokenizer_of(folder / recipe.data.tokenizer)
    asked = dataclasses.replace(distil, texts=0, weight=0.0, own=0.0)  # the answers, which are stored
    _, tasks = teach(recipe, asked, examples(recipe.data, recipe.family == "t5", folder, tokenizer), work, False)
    counts = np.zeros(recipe.model.vocab_size, np.int64)
    for example in (example for some in tasks.values() for example in some):
        np.add.at(counts, example.target, 1)
    return trim.frequent_ids(load(distil.teacher), distil.draft_vocab, counts).tolist()


def distillation_of(recipe: Recipe, distil: Distil) -> LossFunction:
    """What a recipe's model is trained to lessen."""
    config = _in_training(recipe)
    if not distil.weight:  # a pass is saved
        return cross_entropy(config)
    teacher = load(distil.teacher, dtype=recipe.train.dtype)
    loss = distillation(config, teacher, distil.weight, DIVERGENCES[distil.divergence])
    if not distil.own:
        return loss
    student = net_of(config).language_model(config)
    return on_policy(loss, student, distil.own, prompt=distil.prompt, eos=token_ids.ends(teacher))


def _in_training(recipe: Recipe) -> Any:
    """The model's configuration, in the dtype that it is trained in."""
    return dataclasses.replace(recipe.model, dtype=recipe.train.dtype)


def start(recipe: Recipe) -> Params:
    """The parameters that a run begins with: random ones, or those of a checkpoint, brought to the recipe's shape."""
    key = jax.random.key(recipe.train.seed)
    if not recipe.train.start:
        return net_of(recipe.model).init(recipe.model, key)
    model = trim.untrimmed(load(recipe.train.start))
    return model.params if model.config == recipe.model else resize(model.params, model.config, recipe.model, key)


def fixed_parameters(recipe: Recipe) -> dict[str, Any]:
    """Those that a recipe takes from its teacher and leaves as they are: its encoder's, or none.

    Raises:
        RecipeError: the teacher has no encoder of that shape.
    """
    if recipe.distil is None or not recipe.distil.share_encoder:
        return {}
    teacher = trim.untrimmed(load(recipe.distil.teacher))
    own = ("decoder_layers", "tied_head", "scaled_head", "max_positions", "end_tokens", "dtype")
    if (
        teacher.lm.encoder is None
        or dataclasses.replace(teacher.config, **{name: getattr(recipe.model, name) for name in own}) != recipe.model
    ):
        raise RecipeError(
            f"{recipe.name}: distil.share_encoder, and the teacher {recipe.distil.teacher} is {teacher.config}: "
            "expected a T5 of the recipe's shape, but for the number of decoder_layers and the head"
        )
    return teacher.lm.encoder.params(teacher.params)


def train(recipe: Recipe, folder: Path, work: Path, log: Callable[[str], None] = print, progress: bool = True):
    """Trains a recipe's model on the data in `folder`, keeping its state in `work`.

    Returns:
        The parameters, and the held-out negative log likelihood per token in nats.
    """
    tokenizer = tokenizer_of(folder / recipe.data.tokenizer)
    likelihood, encoder = cross_entropy(recipe.model), recipe.family == "t5"
    tasks = examples(recipe.data, encoder, folder, tokenizer)
    loss = cross_entropy(_in_training(recipe))
    if recipe.distil is not None:
        loss, tasks = teach(recipe, recipe.distil, tasks, work, progress)
    if recipe.early_exit is not None:
        loss = early_exit.loss(_in_training(recipe), recipe.early_exit, recipe.train)
    held = examples(recipe.data, encoder, folder, tokenizer, held=True)
    few = {task: some[:: max(1, len(some) // HELDOUT_EXAMPLES)] for task, some in held.items()}
    training, heldout = batches(recipe, tasks, recipe.data.repeat), batches(recipe, few)
    params, fixed = start(recipe), fixed_parameters(recipe)
    params = {name: value for name, value in params.items() if name not in fixed}
    loss, likelihood = with_fixed(loss, fixed), with_fixed(likelihood, fixed)
    count = sum(x.size for x in jax.tree.leaves(params))
    log(f"{recipe.name}: {count:,} parameters to learn; {training.per_epoch} steps an epoch")
    objective = Objective(loss, early_exit.Steps(training) if recipe.early_exit else training, likelihood, heldout)
    learnt, loss = fit(params, objective, recipe.train, work / "state", log=log, progress=progress)
    return learnt | fixed, loss


def check_run(recipe: Recipe | HeadRecipe, work: Path) -> None:
    """Refuses a folder that holds the run of another recipe, and writes down whose the run is; steps may differ.

    Raises:
        ValueError: it is another one's.
    """
    record, table = work / RECORD, dataclasses.asdict(recipe)
    for name in ("steps", "evaluate_every", "save_every"):
        del table["train"][name]
    mine = {name: json.dumps(value) for name, value in _flat(table)}
    if record.is_file():
        theirs = files.json_object(files.read_text(record), str(record))
        if differ := [name for name in sorted(mine | theirs) if mine.get(name) != theirs.get(name)]:
            named = [f"{name} is {theirs.get(name)} there and {mine.get(name)} here" for name in differ]
            raise ValueError(
                f"{work} holds the run of another recipe ({folders.some(named)}): give another --work, or remove it"
            )
    elif not (work / "state").exists():  # else it was begun before this was written down, by whatever recipe
        files.write_text(record, [json.dumps(mine), "\n"])


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, by their paths."""
    for name, value in table.items():
        yield from _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


def checkpoint(
    recipe: AnyRecipe,
    folder: Path,
    out: Path,
    work: Path,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
) -> str:
    """Trains a recipe's model, or counts its tables, and saves what comes out.

    Args:
        recipe: what to make.
        folder: holds the data.
        out: where the checkpoint goes.
        work: where the state of a training run is kept.
        dtype: how matrices are stored.
        overwrite: whether a checkpoint at `out` may be replaced.

    Returns:
        What was made, in a line.

    Raises:
        FileNotFoundError: the data is not there.
        OSError: another process trains with its state in `work`, or the disk is full.
        ValueError: there is something at `out`, another recipe's run in `work`, or another dtype.
    """
    for place in (out, work / "state"):
        files.check_writable(place)
    counted = isinstance(recipe, TableRecipe)
    wanted = [recipe.data.train, recipe.data.heldout]
    if not isinstance(recipe, TableRecipe) and recipe.data.tokenizer:
        wanted.append(f"{recipe.data.tokenizer}/tokenizer.json")
    if not isinstance(recipe, TableRecipe):
        wanted += recipe.data.also
    if missing := [file for file in wanted if not (folder / file).is_file()]:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}: in a checkout `python -m data_prep.debian --data {folder}` makes "
            "the data of the recipes that come with jaxspec"
        )
    if out.exists() and not overwrite:
        raise ValueError(f"{out} is there already: choose another --out, or --overwrite it")
    if counted and dtype != "float32":
        raise ValueError(f"dtype is {dtype!r}: tables are integers and have none")
    if isinstance(recipe, HeadRecipe):
        with folders.locked(work, "another training run"):
            check_run(recipe, work)
            return heads.checkpoint(recipe, folder, out, work, dtype=dtype, overwrite=overwrite)
    if dtype not in orbax.DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(orbax.DTYPES)}")
    about: dict[str, Any] = {"jaxspec": jaxspec.__version__}
    how: dict[str, Any] = {"name": recipe.name, "family": recipe.family, "dtype": dtype, "overwrite": overwrite}
    if isinstance(recipe, TableRecipe):
        found = ngrams.train(recipe, folder)
        with vocabulary.tokenizer_folder(found.vocabulary) as words:
            manifest = orbax.save(out, found.tables, found.config, words, about=found.about | about, **how)
        contexts = ", ".join(f"{n:,} of {length} tokens" for length, n in enumerate(found.config.contexts, 1))
        size = sum(entry[0] for entry in manifest.files.values())
        hits = f"the first draft token is right for {found.about['heldout_hits']:.1%} of held-out tokens"
        return f"{out}: {size:,} bytes; contexts: {contexts or 'none'}; {hits}"
    with folders.locked(work, "another training run"):
        check_run(recipe, work)
        params, loss = train(recipe, folder, work)
    about |= {"heldout_loss": round(float(loss), 4), "steps": recipe.train.steps}
    about |= {} if recipe.distil is None else {"teacher": recipe.distil.teacher}
    how["draft_tokens"] = draft_tokens(recipe, folder, work)
    manifest = orbax.save(out, params, recipe.model, folder / recipe.data.tokenizer, about=about, **how)
    return f"{out}: {manifest.parameters:,} parameters as {dtype}, held-out loss {loss:.4f} nats per token"
