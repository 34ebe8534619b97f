"""The training loop: one jitted step, held-out loss, Orbax checkpoints, exact resume."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Float

from jaxspec import progress as bars
from jaxspec.files import folders
from jaxspec.training import optimizer
from jaxspec.training.data import Batch
from jaxspec.training.losses import LossFunction
from jaxspec.training.recipes import Train


class TrainState(NamedTuple):
    """The state that a run resumes from; `average` is the moving average of the parameters, if there is one."""

    step: Array
    params: Any
    optimizer: Any
    average: Any = None

    @property
    def best(self) -> Any:
        """The parameters that are evaluated and kept: the average, if there is one."""
        return self.params if self.average is None else self.average


def make_step(loss: LossFunction, optimizer: optax.GradientTransformation, average: float = 0.0) -> Callable:
    """Makes a jitted optimizer step, (state, batch) -> (state, loss per token); `average` decays the state's."""

    @jax.jit
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Float[Array, ""]]:
        def mean(params):
            total, count = loss(params, batch)
            return total / jnp.maximum(count, 1.0)

        value, gradient = jax.value_and_grad(mean)(state.params)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        averaged = None
        if state.average is not None:
            done = state.step.astype(jnp.float32)
            decay = jnp.minimum(average, (1.0 + done) / (10.0 + done))  # the start is soon forgotten
            averaged = optax.incremental_update(params, state.average, 1 - decay)
        return TrainState(state.step + 1, params, optimizer_state, averaged), value

    return step


def evaluate(loss: Callable, params: Any, batches: Iterable[Batch]) -> float:
    """Computes the loss per token over all batches, in nats."""
    sums = [loss(params, batch) for batch in batches]
    return float(sum(float(t) for t, _ in sums) / max(1.0, sum(float(c) for _, c in sums)))


class Objective(NamedTuple):
    """The loss to minimise, and the report.

    Attributes:
        loss, batches: the training loss, and the batches.
        heldout_loss, heldout: the loss for evaluation in nats per token, and its batches.
        later: a step, and the loss from that step on.
        report: (parameters, batches) -> a report, in place of the held-out loss.
    """

    loss: LossFunction
    batches: Source
    heldout_loss: LossFunction
    heldout: Source
    later: tuple[int, LossFunction] | None = None
    report: Callable[[Any, Iterable[Any]], Any] | None = None


class Source(Protocol):
    """A source of batches: `data.Batches`, or batches with something beside them."""

    @property
    def per_epoch(self) -> int:
        """Steps an epoch."""
        ...

    def at(self, step: int) -> Any:
        """Returns the batch of a step."""
        ...

    def once(self) -> Iterable[Any]:
        """Yields every example once."""
        ...


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

    Orbax renames a complete checkpoint into place, so a run killed at any moment resumes from its last checkpoint. It
    then computes exactly what it would have computed: batches depend on the step alone.

    Returns:
        The trained parameters (their moving average, if the recipe wants one), and their held-out loss in nats per
        token, or what the objective reports.

    Raises:
        FloatingPointError: the loss is no longer finite; the last checkpoint stays.
        OSError: the disk is full; the last checkpoint stays.
        ValueError: `folder` holds the state of another model.
    """
    rule, evaluation = optimizer.make(train), jax.jit(objective.heldout_loss)
    steps = [(0, make_step(objective.loss, rule, train.average))]
    if objective.later is not None:
        steps.append((objective.later[0], make_step(objective.later[1], rule, train.average)))

    def heldout(state: TrainState) -> Any:
        report = objective.report or functools.partial(evaluate, evaluation)
        return report(state.best, objective.heldout.once())

    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    handler = ocp.StandardCheckpointHandler()  # named, so that what is stored can be looked at before it is read
    with ocp.CheckpointManager(folder.absolute(), item_handlers=handler, options=options) as manager:
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
            for step in range(int(state.step), train.steps):
                step_fn = [step_fn for start, step_fn in steps if step >= start][-1]
                state, value = step_fn(state, objective.batches.at(step))
                recent.append(float(value))
                if not np.isfinite(recent[-1]):
                    raise FloatingPointError(f"the loss is {recent[-1]} at step {step}: lower the learning rate")
                bar.update(task, advance=1, description=f"loss {np.mean(recent[-50:]):.3f}")
                done = step + 1
                if done % train.evaluate_every == 0 or done == train.steps:
                    report = heldout(state)
                    shown = f"{report:.4f}" if isinstance(report, float) else report
                    log(f"step {done}: loss {np.mean(recent):.4f}, held-out {shown}")
                    recent = []
                if done % train.save_every == 0 or done == train.steps:
                    _save(manager, done, state, folder)
    return state.best, heldout(state)


def _save(manager: ocp.CheckpointManager, step: int, state: TrainState, folder: Path) -> None:
    """Writes a checkpoint; of one that finds no room nothing stays."""
    last = manager.latest_step()
    stays = "the run has no saved state" if last is None else f"the last saved state is that of step {last}"
    _check_room(state, folder, stays)  # Orbax's threads would print at length what stops them
    try:
        with folders.full_disk(folder, stays):
            manager.save(step, args=ocp.args.StandardSave(state))
    except OSError:
        for unfinished in folder.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _check_state(stored: Any, params: Any, folder: Path) -> None:
    """Refuses parameters of another model; a restore that fails inside Orbax leaves its threads behind."""
    stored_shapes, shapes = (
        {jax.tree_util.keystr(path): tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (stored, params)
    )
    if stored_shapes == shapes:
        return
    name = next(name for name in stored_shapes | shapes if stored_shapes.get(name) != shapes.get(name))
    stored_shape, shape = (
        f"of shape {sizes[name]}" if name in sizes else "missing" for sizes in (stored_shapes, shapes)
    )
    raise ValueError(
        f"{folder} holds the state of another model's training ({name} is {stored_shape} there and {shape} here): "
        "choose another folder for the state, or remove this one"
    )


def _check_room(state: TrainState, folder: Path, stays: str) -> None:
    if complaint := folders.no_room(folder, sum(x.nbytes for x in jax.tree.leaves(state))):
        raise OSError(f"{complaint}: {stays}")
