"""The training loop: one jitted step, held-out loss, Orbax checkpoints, exact resume."""

from __future__ import annotations

import functools
import os
import shutil
import types
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Float

from jaxspec import progress as bars
from jaxspec.files import folders
from jaxspec.nets.mismatch import differences
from jaxspec.training import optimizer, regularise
from jaxspec.training.data import Batches, TrainingBatch
from jaxspec.training.losses import LossFunction
from jaxspec.training.recipes import Train


class TrainState(NamedTuple):
    """The state that a run resumes from; `average` is the moving average of the parameters, if the
    recipe wants one.
    """

    step: Array
    params: Any
    optimizer: Any
    average: Any = None

    best = property(
        lambda self: self.params if self.average is None else self.average,
        doc="The parameters to keep.",
    )


COMPILED_AHEAD = 50  # batches whose shapes are compiled before the first step, all at once


def make_step(
    loss: LossFunction, optimizer: optax.GradientTransformation, train: Train, stored: str = ""
) -> Callable:
    """Makes a jitted optimizer step, (state, batch) -> (state, loss per token).

    Args:
        loss: a sum over tokens, and their number.
        optimizer: makes updates of gradients.
        train: has the decay of the average, the dropout and the seed of its noise.
        stored: the dtype that parameters are rounded to before the loss is computed; empty for
            none.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: TrainingBatch) -> tuple[TrainState, Float[Array, ""]]:
        noise = jax.random.fold_in(jax.random.key(train.seed), state.step)

        def mean(params):
            with regularise.dropout(train.dropout, noise):
                total, count = loss(regularise.rounded(params, stored) if stored else params, batch)
            return total / jnp.maximum(count, 1.0)

        value, gradient = jax.value_and_grad(mean)(state.params)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        averaged = None
        if state.average is not None:
            done = state.step.astype(jnp.float32)
            # the start is soon forgotten
            decay = jnp.minimum(train.average, (1.0 + done) / (10.0 + done))
            averaged = optax.incremental_update(params, state.average, 1 - decay)
        return TrainState(state.step + 1, params, optimizer_state, averaged), value

    return step


def evaluate(loss: Callable, params: Any, batches: Iterable[TrainingBatch]) -> float:
    """Computes the loss per token over all batches, in nats."""
    sums = [loss(params, batch) for batch in batches]
    return float(sum(float(t) for t, _ in sums) / max(1.0, sum(float(c) for _, c in sums)))


def mean_loss(loss: LossFunction) -> Callable[[Any, Iterable[TrainingBatch]], float]:
    """Returns a report: the loss per token over all batches, in nats."""
    return functools.partial(evaluate, jax.jit(loss))


class Objective(NamedTuple):
    """The loss to minimise, and the report."""

    loss: LossFunction  # the training loss, a function of parameters and `inputs` of a batch
    batches: Batches  # the training batches
    # (parameters, batches) -> the report on held-out batches, such as `mean_loss`
    report: Callable[[Any, Iterable[TrainingBatch]], Any]
    heldout: Batches  # the held-out batches
    # steps in their order, and the loss from each of them on
    later: tuple[tuple[int, LossFunction], ...] = ()
    # (batch, step) -> the batch with what the loss reads beside it
    inputs: Callable[[TrainingBatch, int], Any] = lambda batch, step: batch
    # shares of the learning rate, by the first name of a parameter's path; others have all of it
    rates: Mapping[str, float] = types.MappingProxyType({})

    def at(self, step: int) -> Any:
        """Returns the argument that the loss takes in a step, beside the parameters."""
        return self.inputs(self.batches.at(step), step)


class Destination(NamedTuple):
    """The place of a checkpoint, the dtype of its matrices, and whether it may replace an existing
    one.
    """

    out: Path
    dtype: str
    overwrite: bool


class TrainingRun(NamedTuple):
    """A training run that is ready to begin, or that has ended."""

    params: Any  # the parameters that are learnt
    fixed: dict[str, Any]  # the parameters that stay as they are
    objective: Objective  # the loss, the batches and the report
    # writes all parameters, given what the run reported at its end; returns a line that describes
    # the checkpoint
    write: Callable[[Any, Any, Destination], str]


def fit(
    params: Any,
    objective: Objective,
    train: Train,
    folder: Path,
    *,
    log: Callable[[str], None] = print,
    progress: bool = True,
) -> tuple[Any, Any]:
    """Trains as a recipe says, or the rest of it if `folder` holds an earlier, interrupted run.

    Orbax renames a complete checkpoint into place, so a run killed at any moment resumes from its
    last checkpoint. The result is exactly the same as without the interruption: batches depend on
    the step alone.

    Returns:
        The trained parameters (their moving average, if the recipe wants one), and their held-out
        loss in nats per token, or the objective's report.

    Raises:
        FloatingPointError: the loss became infinite or NaN; the last checkpoint stays.
        OSError: the disk is full; the last checkpoint stays.
        ValueError: `folder` holds the state of another model.
    """
    rule = optimizer.make(train, objective.rates)
    phases = _phases(objective, rule, train)
    # a step reuses its state's memory, and these may be the teacher's, too
    params = jax.tree.map(jnp.copy, params)

    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    # named, so that what is stored can be looked at before it is read
    handler = ocp.StandardCheckpointHandler()
    with ocp.CheckpointManager(
        folder.absolute(), item_handlers=handler, options=options
    ) as manager:
        state = TrainState(jnp.zeros((), jnp.int32), params, rule.init(params))
        if train.average:
            state = state._replace(average=jax.tree.map(jnp.copy, params))
        if manager.latest_step() is not None:
            metadata: Any = manager.item_metadata(manager.latest_step())
            _check_state(metadata.tree["params"], params, folder)
            state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))
            log(f"resumed at step {int(state.step)} from {folder}")
        _check_room(state, folder, "nothing was trained")
        with bars.bar(progress, remaining=True) as bar:
            task = bar.add_task("training", total=train.steps, completed=int(state.step))
            recent: list[float] = []
            step_of = _compiled(phases, objective, state, train.steps)
            # A loss is read one step late, so that the next batch is made while the device
            # computes.
            pending: list[tuple[int, Array]] = []
            for step in range(int(state.step), train.steps):
                batch = objective.at(step)
                state, value = step_of(step, batch)(state, batch)
                done = step + 1
                pauses = (
                    done % train.evaluate_every == 0
                    or done % train.save_every == 0
                    or done == train.steps
                )
                pending.append((step, value))
                while len(pending) > (0 if pauses else 1):
                    recent.append(_finite(*pending.pop(0)))
                if recent:
                    latest = f"loss {np.mean(recent[-50:]):.3f}"
                else:
                    latest = "training"
                bar.update(task, advance=1, description=latest)
                if done % train.evaluate_every == 0 or done == train.steps:
                    report = objective.report(state.best, objective.heldout.once())
                    if isinstance(report, float):
                        shown = f"{report:.4f}"
                    else:
                        shown = report
                    log(f"step {done}: loss {np.mean(recent):.4f}, held-out {shown}")
                    recent = []
                if done % train.save_every == 0 or done == train.steps:
                    _save(manager, done, state, folder)
    return state.best, objective.report(state.best, objective.heldout.once())


def _finite(step: int, value: Array) -> float:
    loss = float(value)
    if not np.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at step {step}: lower the learning rate")
    return loss


def _phases(
    objective: Objective, rule: optax.GradientTransformation, train: Train
) -> list[tuple[int, Callable]]:
    """Returns the step functions of a run, each with the step that it begins at."""
    phases = [(0, make_step(objective.loss, rule, train))]
    phases += [(step, make_step(loss, rule, train)) for step, loss in objective.later]
    if train.stored:
        if objective.later:
            loss = objective.later[-1][1]
        else:
            loss = objective.loss
        phases.append((optimizer.decay_start(train), make_step(loss, rule, train, train.stored)))
    return sorted(phases, key=lambda phase: phase[0])


def _compiled(
    phases: list[tuple[int, Callable]], objective: Objective, state: TrainState, steps: int
) -> Callable[[int, Any], Callable]:
    """Compiles the steps for the shapes of the next batches, side by side; returns which function a
    step's batch takes.

    Each shape of a batch compiles a program. Shapes that come later are compiled when they come.
    """
    first = int(state.step)
    shapes = {
        _shape(batch): batch
        for batch in map(objective.at, range(first, min(steps, first + COMPILED_AHEAD)))
    }

    def phase_of(step: int) -> int:
        return max(index for index, (start, _) in enumerate(phases) if step >= start)

    needed = [
        (index, shape)
        for index in range(phase_of(first), phase_of(steps - 1) + 1)
        for shape in shapes
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        lowered = [phases[index][1].lower(state, shapes[shape]) for index, shape in needed]
        programs = dict(
            zip(needed, pool.map(lambda program: program.compile(), lowered), strict=True)
        )

    def step_of(step: int, batch: Any) -> Callable:
        return programs.get((phase_of(step), _shape(batch))) or phases[phase_of(step)][1]

    return step_of


def _shape(batch: Any) -> tuple[Any, ...]:
    # A lesson carries the target's parameters: they must not be copied to the host.
    return tuple((np.shape(leaf), str(leaf.dtype)) for leaf in jax.tree.leaves(batch))


def _save(manager: ocp.CheckpointManager, step: int, state: TrainState, folder: Path) -> None:
    """Writes a checkpoint; of one that finds no room nothing stays."""
    last = manager.latest_step()
    if last is None:
        stays = "the run has no saved state"
    else:
        stays = f"the last saved state is that of step {last}"
    _check_room(state, folder, stays)  # Orbax's threads would print at length what stops them
    try:
        with folders.full_disk(folder, stays):
            manager.save(step, args=ocp.args.StandardSave(state))
    except OSError:
        for unfinished in folder.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _check_state(stored: Any, params: Any, folder: Path) -> None:
    """Raises ValueError for parameters of another model; a restore that fails inside Orbax leaves
    its threads behind.
    """
    wrong = differences(params, stored)
    if wrong:
        state = f"{folder} holds the state of another model's training ({folders.some(wrong)})"
        raise ValueError(f"{state}: choose another folder for the state, or remove this one")


def _check_room(state: TrainState, folder: Path, stays: str) -> None:
    complaint = folders.no_room(folder, sum(x.nbytes for x in jax.tree.leaves(state)))
    if complaint:
        raise OSError(f"{complaint}: {stays}")
