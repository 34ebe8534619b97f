"""The training of networks: their loss, their start, and their checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax

import jaxspec
from jaxspec.core import Params, token_ids
from jaxspec.nets import encoder_decoder, net_of
from jaxspec.nets.resize import resize
from jaxspec.training import early_exit, mask_filling
from jaxspec.training.data import Batches, Tasks, batches, counts, examples, few
from jaxspec.training.distil import distillation, on_policy, own_texts
from jaxspec.training.divergences import DIVERGENCES, kl
from jaxspec.training.loop import Destination, Objective, TrainingRun, evaluate, mean_loss
from jaxspec.training.losses import LossFunction, cross_entropy, with_fixed
from jaxspec.training.recipes import Distil, Recipe, RecipeError
from jaxspec.vocab import trim
from jaxspec.weights import orbax
from jaxspec.weights.loading import load
from jaxspec.weights.orbax import tokenizer_of

HELDOUT_EXAMPLES = 256  # per task; enough for a loss to two digits


def answered(recipe: Recipe, distil: Distil, tasks: Tasks, work: Path, progress: bool) -> Tasks:
    """Returns the examples of each task: the data's, or the teacher's answers to them."""
    if not distil.answers:
        return tasks
    teacher = load(distil.teacher, dtype=recipe.model.dtype)
    return own_texts(teacher, tasks, distil, recipe.data.longest, work / "answers", progress)


def draft_tokens(recipe: Recipe, folder: Path, work: Path) -> list[int] | None:
    """Returns the ids that a trained drafter's head is trimmed to: the most frequent ones in the
    texts it learnt.
    """
    distil = recipe.distil
    if distil is None or distil.draft_vocab is None:
        return None
    tasks = examples(
        recipe.data, recipe.has_sources, folder, tokenizer_of(folder / recipe.data.tokenizer)
    )
    # The answers are stored.
    tasks = answered(recipe, dataclasses.replace(distil, texts=0), tasks, work, False)
    frequencies = counts(tasks, recipe.model.vocab_size)
    return trim.frequent_ids(load(distil.teacher), distil.draft_vocab, frequencies).tolist()


def loss_of(recipe: Recipe) -> LossFunction:
    """Returns the loss of a recipe's model: of texts, of masks, of early exits, or the divergence
    from a teacher.
    """
    config = _in_training(recipe)
    distil = recipe.distil
    if recipe.early_exit is not None:
        return early_exit.loss(config, recipe.early_exit, recipe.train)
    if distil is None or not distil.weight:  # without a weight the teacher's pass is saved
        if recipe.masks is not None:
            return mask_filling.loss(config, recipe.masks, None, 0.0, kl)
        return cross_entropy(config)
    teacher = load(distil.teacher, dtype=recipe.train.dtype)
    divergence = DIVERGENCES[distil.divergence]
    loss = distillation(config, teacher, distil.weight, divergence)
    if recipe.masks is not None:
        loss = mask_filling.loss(config, recipe.masks, teacher, distil.weight, divergence)
    if not distil.own:
        return loss
    student = net_of(config).language_model(config)
    return on_policy(loss, student, distil.own, prompt=distil.prompt, eos=token_ids.ends(teacher))


def _in_training(recipe: Recipe) -> Any:
    """Returns the model's configuration, in the dtype that it is trained in."""
    return dataclasses.replace(recipe.model, dtype=recipe.train.dtype)


def start(recipe: Recipe) -> Params:
    """Returns the parameters that a run begins with: random ones, or a checkpoint's, brought to the
    recipe's shape.
    """
    key = jax.random.key(recipe.train.seed)
    if not recipe.train.start:
        return net_of(recipe.model).init(recipe.model, key)
    model = trim.untrimmed(load(recipe.train.start))
    if model.config == recipe.model:
        return model.params
    return resize(model.params, model.config, recipe.model, key)


def fixed_parameters(recipe: Recipe) -> dict[str, Any]:
    """Returns the parameters that a recipe takes from its teacher and leaves as they are: its
    encoder's, or none.
    """
    if recipe.distil is None or not recipe.distil.share_encoder:
        return {}
    teacher = trim.untrimmed(load(recipe.distil.teacher))
    if teacher.lm.encoder is None or not encoder_decoder.same_encoder(teacher.config, recipe.model):
        got = (
            f"{recipe.name}: distil.share_encoder, and the teacher {recipe.distil.teacher} is "
            f"{teacher.config}"
        )
        raise RecipeError(
            f"{got}: expected a T5 of the recipe's shape, but for its decoder_layers and its head"
        )
    return teacher.lm.encoder.params(teacher.params)


def prepare(recipe: Recipe, folder: Path, work: Path, progress: bool) -> TrainingRun:
    """Makes the untrained model of a recipe, and its objective on the data in `folder`, as
    `run.train` takes them.
    """
    tokenizer = tokenizer_of(folder / recipe.data.tokenizer)
    tasks = examples(recipe.data, recipe.has_sources, folder, tokenizer)
    if recipe.distil is not None:
        tasks = answered(recipe, recipe.distil, tasks, work, progress)
    others = examples(recipe.data, recipe.has_sources, folder, tokenizer, heldout=True)
    training = batches(recipe, tasks, recipe.data.repeat)
    heldout = batches(recipe, few(others, HELDOUT_EXAMPLES))
    fixed = fixed_parameters(recipe)
    params = {name: value for name, value in start(recipe).items() if name not in fixed}
    report = mean_loss(with_fixed(cross_entropy(recipe.model), fixed))
    objective = Objective(with_fixed(loss_of(recipe), fixed), training, report, heldout)
    if recipe.early_exit is not None:
        objective = objective._replace(inputs=early_exit.numbered)
    return TrainingRun(
        params, fixed, objective, functools.partial(write, recipe, folder, work, heldout)
    )


def beside_teacher(recipe: Recipe, params: Params, heldout: Batches) -> tuple[float, float]:
    """Compares a drafter with its teacher on held-out texts, both reading the same prefixes.

    Returns:
        The acceptance rate at temperature 1, which is one minus the mean total variation distance
        of the two distributions; and the teacher's loss per token in nats.
    """
    assert recipe.distil is not None
    teacher = load(recipe.distil.teacher, dtype=recipe.train.dtype)
    total_variation = DIVERGENCES["total_variation"]
    distance = distillation(_in_training(recipe), teacher, 1.0, total_variation)
    teachers_loss = evaluate(jax.jit(cross_entropy(teacher.config)), teacher.params, heldout.once())
    return 1 - evaluate(jax.jit(distance), params, heldout.once()), teachers_loss


def write(
    recipe: Recipe,
    folder: Path,
    work: Path,
    heldout: Batches,
    params: Params,
    held_out: float,
    to: Destination,
) -> str:
    """Writes a trained model as `jaxspec.load` reads it; returns a line that describes it."""
    provenance: dict[str, Any] = {
        "jaxspec": jaxspec.__version__,
        "heldout_loss": round(held_out, 4),
    }
    provenance["steps"], compared, shares = recipe.train.steps, "", None
    if recipe.distil is not None:
        acceptance, teachers_loss = beside_teacher(recipe, params, heldout)
        provenance |= {"teacher": recipe.distil.teacher, "heldout_acceptance": round(acceptance, 4)}
        compared = (
            f" (its teacher's {teachers_loss:.4f}), acceptance rate {acceptance:.3f} at "
            "temperature 1"
        )
        if recipe.distil.share_encoder and orbax.is_folder(to.out.parent / recipe.distil.teacher):
            shares = recipe.distil.teacher
    manifest = orbax.save(
        to.out,
        params,
        recipe.model,
        folder / recipe.data.tokenizer,
        name=recipe.name,
        dtype=to.dtype,
        description=provenance,
        draft_tokens=draft_tokens(recipe, folder, work),
        shares=shares,
        source=recipe.source,
        overwrite=to.overwrite,
    )
    summary = (
        f"{manifest.parameters:,} parameters as {to.dtype}, held-out loss {held_out:.4f} nats per "
        "token"
    )
    return f"{to.out}: {summary}{compared}"
