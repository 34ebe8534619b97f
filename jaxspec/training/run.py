"""Training by a recipe, from its data to a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jaxspec
from jaxspec import files
from jaxspec.core import Params, token_ids
from jaxspec.files import folders
from jaxspec.nets import form_of, net_of, t5
from jaxspec.nets.resize import resize
from jaxspec.training import early_exit, heads, ngrams
from jaxspec.training.data import Batches
from jaxspec.training.distil import distillation, own_texts
from jaxspec.training.divergences import DIVERGENCES
from jaxspec.training.loop import Objective, evaluate, fit
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
    """Returns the distillation loss, and the examples of each task: the data's, or the teacher's answers to them."""
    if distil.answers:
        longest = max(target_tokens for _, target_tokens in recipe.data.shapes)
        teacher = load(distil.teacher, dtype=recipe.model.dtype)
        tasks = own_texts(teacher, tasks, distil, longest, work / "answers", progress)
    return distillation_of(recipe, distil), tasks


def draft_tokens(recipe: Recipe, folder: Path, work: Path) -> list[int] | None:
    """Returns the ids that a trained drafter's head is trimmed to: the most frequent ones in the texts it learnt."""
    distil = recipe.distil
    if distil is None or distil.draft_vocab is None:
        return None
    tokenizer = tokenizer_of(folder / recipe.data.tokenizer)
    answers = dataclasses.replace(distil, texts=0, weight=0.0, own=0.0)  # which are stored
    _, tasks = teach(recipe, answers, examples(recipe.data, recipe.has_sources, folder, tokenizer), work, False)
    counts = heads.counts(tasks, recipe.model.vocab_size)
    return trim.frequent_ids(load(distil.teacher), distil.draft_vocab, counts).tolist()


def distillation_of(recipe: Recipe, distil: Distil) -> LossFunction:
    """Returns the loss of a recipe's model."""
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
    """Returns the model's configuration, in the dtype that it is trained in."""
    return dataclasses.replace(recipe.model, dtype=recipe.train.dtype)


def start(recipe: Recipe) -> Params:
    """Returns the parameters that a run begins with: random ones, or a checkpoint's, brought to the recipe's shape."""
    key = jax.random.key(recipe.train.seed)
    if not recipe.train.start:
        return net_of(recipe.model).init(recipe.model, key)
    model = trim.untrimmed(load(recipe.train.start))
    return model.params if model.config == recipe.model else resize(model.params, model.config, recipe.model, key)


def fixed_parameters(recipe: Recipe) -> dict[str, Any]:
    """Returns the parameters that a recipe takes from its teacher and leaves as they are: its encoder's, or none.

    Raises:
        RecipeError: the teacher has no encoder of that shape.
    """
    if recipe.distil is None or not recipe.distil.share_encoder:
        return {}
    teacher = trim.untrimmed(load(recipe.distil.teacher))
    if teacher.lm.encoder is None or not t5.same_encoder(teacher.config, recipe.model):
        raise RecipeError(
            f"{recipe.name}: distil.share_encoder, and the teacher {recipe.distil.teacher} is {teacher.config}: "
            "expected a T5 of the recipe's shape, but for the number of decoder_layers and the head"
        )
    return teacher.lm.encoder.params(teacher.params)


class Network(NamedTuple):
    """A model in training: the parameters that are learnt, and those that stay as they are."""

    params: Params
    fixed: dict[str, Any]


def prepare(recipe: Recipe, folder: Path, work: Path, progress: bool) -> tuple[Network, Objective]:
    """Makes the untrained model of a recipe, and its objective on the data in `folder`, as `train` takes them."""
    tokenizer = tokenizer_of(folder / recipe.data.tokenizer)
    likelihood, encoder = cross_entropy(recipe.model), recipe.has_sources
    tasks = examples(recipe.data, encoder, folder, tokenizer)
    loss = cross_entropy(_in_training(recipe))
    if recipe.distil is not None:
        loss, tasks = teach(recipe, recipe.distil, tasks, work, progress)
    if recipe.early_exit is not None:
        loss = early_exit.loss(_in_training(recipe), recipe.early_exit, recipe.train)
    training, heldout = batches(recipe, tasks, recipe.data.repeat), heldout_batches(recipe, folder, tokenizer)
    fixed = fixed_parameters(recipe)
    params = {name: value for name, value in start(recipe).items() if name not in fixed}
    source = early_exit.Steps(training) if recipe.early_exit else training
    objective = Objective(with_fixed(loss, fixed), source, with_fixed(likelihood, fixed), heldout)
    return Network(params, fixed), objective


def heldout_batches(recipe: Recipe, folder: Path, tokenizer: Any) -> Batches:
    """Makes batches of some held-out examples of each task."""
    held = examples(recipe.data, recipe.has_sources, folder, tokenizer, held=True)
    few = {task: rows[:: max(1, len(rows) // HELDOUT_EXAMPLES)] for task, rows in held.items()}
    return batches(recipe, few)


def beside_teacher(recipe: Recipe, network: Network, folder: Path) -> tuple[float, float]:
    """Compares a drafter with its teacher on held-out texts, both reading the same prefixes.

    Returns:
        The acceptance rate at temperature 1, which is one minus the mean total variation distance of the two
        distributions; and the teacher's loss per token in nats.
    """
    assert recipe.distil is not None
    heldout = heldout_batches(recipe, folder, tokenizer_of(folder / recipe.data.tokenizer))
    teacher, total_variation = load(recipe.distil.teacher, dtype=recipe.train.dtype), DIVERGENCES["total_variation"]
    apart = with_fixed(distillation(_in_training(recipe), teacher, 1.0, total_variation), network.fixed)
    teachers_loss = evaluate(jax.jit(cross_entropy(teacher.config)), teacher.params, heldout.once())
    return 1 - evaluate(jax.jit(apart), network.params, heldout.once()), teachers_loss


def train(
    recipe: Recipe | HeadRecipe,
    folder: Path,
    work: Path,
    log: Callable[[str], None] = print,
    progress: bool = True,
) -> tuple[Network | heads.Head, Any]:
    """Trains the network of a recipe on the data in `folder`, keeping its state in `work`.

    Returns:
        The network with what it has learnt; and its held-out negative log likelihood per token in nats, or of a drafter
        on hidden states its held-out acceptance (`head_loss.HeldOutAcceptance`).
    """
    if isinstance(recipe, HeadRecipe):
        network, objective = heads.prepare(recipe, folder, work, progress)
    else:
        network, objective = prepare(recipe, folder, work, progress)
    per_epoch, report = objective.batches.per_epoch, objective.report
    log(f"{recipe.name}: {_count(network.params):,} parameters to learn; {per_epoch} steps an epoch")
    if report is not None:
        log(f"untrained: {report(network.params, objective.heldout.once())}")
    params, held_out = fit(network.params, objective, recipe.train, work / "state", log=log, progress=progress)
    return network._replace(params=params), held_out


def _count(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def check_run(recipe: Recipe | HeadRecipe, work: Path) -> None:
    """Refuses a folder that holds the run of another recipe, and records the recipe; steps may differ.

    Raises:
        ValueError: the folder holds the run of another recipe.
    """
    record, table = work / RECORD, dataclasses.asdict(recipe)
    if isinstance(recipe, Recipe):
        table["model"] = dataclasses.asdict(form_of(recipe.model)[1])
    for name in ("steps", "evaluate_every", "save_every"):
        del table["train"][name]
    fields = {name: json.dumps(value) for name, value in _flat(table)}
    if record.is_file():
        recorded = files.json_object(files.read_text(record), str(record))
        if differ := [name for name in sorted(fields | recorded) if fields.get(name) != recorded.get(name)]:
            named = [f"{name} is {recorded.get(name)} there and {fields.get(name)} here" for name in differ]
            raise ValueError(
                f"{work} holds the run of another recipe ({folders.some(named)}): give another --work, or remove it"
            )
    elif not (work / "state").exists():  # else it was begun before this was written down, by whatever recipe
        files.write_text(record, [json.dumps(fields), "\n"])


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested tables, by their paths."""
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
        ValueError: there is something at `out`, another recipe's run in `work`, or another dtype.
    """
    for place in (out, work / "state"):
        files.check_writable(place)
    wanted = [recipe.data.train, recipe.data.heldout]
    if not isinstance(recipe, TableRecipe):
        wanted += [f"{recipe.data.tokenizer}/tokenizer.json"] if recipe.data.tokenizer else []
        wanted += recipe.data.also
    if missing := [file for file in wanted if not (folder / file).is_file()]:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}: in a checkout `python -m data_prep.debian --data {folder}` makes "
            "the data of the recipes that come with jaxspec"
        )
    if out.exists() and not overwrite:
        raise ValueError(f"{out} is there already: choose another --out, or --overwrite it")
    _check_dtype(recipe, dtype)
    options = {"name": recipe.name, "family": recipe.family, "dtype": dtype, "overwrite": overwrite}
    provenance: dict[str, Any] = {"jaxspec": jaxspec.__version__}
    if isinstance(recipe, TableRecipe):
        counted = ngrams.train(recipe, folder)
        provenance = counted.provenance | provenance
        with vocabulary.tokenizer_folder(counted.vocabulary) as words:
            manifest = orbax.save(out, counted.tables, counted.config, words, description=provenance, **options)
        contexts = ", ".join(f"{n:,} of {length} tokens" for length, n in enumerate(counted.config.contexts, 1))
        size = sum(entry[0] for entry in manifest.files.values())
        hits = f"the first draft token is right for {provenance['heldout_hits']:.1%} of held-out tokens"
        return f"{out}: {size:,} bytes; contexts: {contexts or 'none'}; {hits}"
    with folders.locked(work, "another training run"):
        check_run(recipe, work)
        network, held_out = train(recipe, folder, work)
        if isinstance(network, heads.Head):
            heads.write(network, out, dtype, overwrite)
            return f"{out}: {_count(network.params):,} parameters as {dtype}. On held-out texts at {held_out}"
    assert isinstance(recipe, Recipe)
    provenance |= {"heldout_loss": round(float(held_out), 4), "steps": recipe.train.steps}
    compared = ""
    if recipe.distil is not None:
        acceptance, teachers_loss = beside_teacher(recipe, network, folder)
        provenance |= {"teacher": recipe.distil.teacher, "heldout_acceptance": round(acceptance, 4)}
        compared = f" (its teacher's {teachers_loss:.4f}), acceptance rate {acceptance:.3f} at temperature 1"
    options["draft_tokens"] = draft_tokens(recipe, folder, work)
    if (
        recipe.distil is not None
        and recipe.distil.share_encoder
        and orbax.is_folder(out.parent / recipe.distil.teacher)
    ):
        options["shares"] = recipe.distil.teacher
    params, tokenizer = network.params | network.fixed, folder / recipe.data.tokenizer
    manifest = orbax.save(out, params, recipe.model, tokenizer, description=provenance, **options)
    return (
        f"{out}: {manifest.parameters:,} parameters as {dtype}, held-out loss {held_out:.4f} nats per token{compared}"
    )


def _check_dtype(recipe: AnyRecipe, dtype: str) -> None:
    """Refuses a dtype that networks of a recipe's kind are not stored in."""
    if isinstance(recipe, TableRecipe) and dtype != "float32":
        raise ValueError(f"dtype is {dtype!r}: tables hold integers, so leave dtype out")
    if isinstance(recipe, HeadRecipe) and dtype not in heads.DTYPES:
        expected = " or ".join(heads.DTYPES)
        raise ValueError(f"dtype is {dtype!r}: drafters that read hidden states are stored as {expected}")
    if dtype not in orbax.DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(orbax.DTYPES)}")
