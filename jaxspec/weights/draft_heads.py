"""Folders of drafters that read hidden states: published ones in, and the format of `speculators` (vLLM, SGLang) out.

`jaxspec.published` says what a folder's config.json means and what its tensors are called.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import folders, published, sharding
from jaxspec.base import Model, Params
from jaxspec.families import FamilyError, common, describe
from jaxspec.published import TargetShape
from jaxspec.published.common import VOCABULARY, Format
from jaxspec.published.medusa import MAP
from jaxspec.weights import huggingface, int8, parameters, tensors
from jaxspec.weights.huggingface import CONFIG
from jaxspec.weights.orbax import CheckpointError
from jaxspec.weights.parameters import FLOATS


def restore(folder: Path, target: Model, taps: tuple[int, ...] | None = None) -> tuple[Any, Params]:
    """Reads a drafter's folder.

    Args:
        folder: holds config.json and weights; for a module for multi-token prediction, the model's own folder.
        target: the model that it drafts for; the drafter's matrices get the dtype of its computation, and its mesh.
        taps: the layers to read, if the folder is wrong or silent about them.

    Returns:
        The configuration of the network, one of `jaxspec.published`'s, and its parameters.

    Raises:
        CheckpointError: it is of no format that can be read, it was made for another target, or its files are absent,
            damaged, or those of another drafter. No weights are read before that is known.
    """
    files = tensors.shards(folder, tensors.OF_DRAFTERS)
    try:
        table = huggingface.read_object(folder / CONFIG)
        common.check(table)
        form, held = _recognised(folder, table, files)
        shapes = {name: shape for name, (shape, _) in held.items()}
        config = form.read(table, shapes, _shape_of(target, taps))
        config = in_dtype(config, getattr(target.config, "dtype", "float32"))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder} holds no drafter that can be loaded: {error}") from error
    prefix = form.prefix(shapes)
    where = {f"{prefix}{name}": path for path, name in form.names(config).items()}
    expected = abstract(config)
    have = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
    have = {name: shape for name, shape in have.items() if name != VOCABULARY or VOCABULARY in where}
    if complaint := parameters.differences({name: expected[path].shape for name, path in where.items()}, have):
        raise CheckpointError(f"{folder}: the weights are not those of the {form.title} of its {CONFIG}:{complaint}")
    return config, parameters.nested(dict(_placed(files, held, where, config, target)))


def _recognised(
    folder: Path, table: dict, files: list[tensors.Shard]
) -> tuple[Format, dict[str, tuple[tuple[int, ...], str]]]:
    """The format, and for each tensor, as that calls it, its shape and what it is called in the file."""
    for form in published.FORMATS:
        held: dict[str, tuple[tuple[int, ...], str]] = {}
        for shard in files:
            for name, shape in shard.shapes.items():
                if (known := form.canonical(name)) is None:
                    continue
                if known in held:
                    raise CheckpointError(f"{folder} holds {known} twice, as {held[known][1]} and as {name}")
                held[known] = shape, name
        if form.matches(table, {name: shape for name, (shape, _) in held.items()}):
            return form, held
    known = ", ".join(form.title for form in published.FORMATS)
    raise FamilyError(f"its tensors are of no format that is known, expected one of {known}")


def _shape_of(target: Model, taps: tuple[int, ...] | None) -> TargetShape:
    config = target.config
    layers = getattr(config, "decoder_layers", getattr(config, "layers", 0))
    return TargetShape(config, target.lm.vocab_size, target.lm.feature_size, layers, taps)


def in_dtype(config: Any, dtype: str) -> Any:
    """A network's configuration with another dtype of its computation."""
    if hasattr(config, "layer"):
        return dataclasses.replace(config, layer=dataclasses.replace(config.layer, dtype=dtype))
    return dataclasses.replace(config, dtype=dtype)


def abstract(config: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each parameter, by path."""
    net = published.net_of(config)
    return parameters.flat(jax.eval_shape(lambda: net.init(config, jax.random.key(0))))


def _placed(
    files: list[tensors.Shard], held: dict[str, Any], where: dict[str, str], config: Any, target: Model
) -> Iterator[tuple[str, jax.Array]]:
    known = {name: canonical for canonical, (_, name) in held.items()}
    wanted = {name for name, canonical in known.items() if canonical in where}
    mesh, layer = sharding.mesh_of(target.params), getattr(config, "layer", config)
    dtype = int8.computation(layer.dtype)
    for shard in files:
        for name, x in shard.read(wanted):
            path = where[known[name]]
            if path == "vocabulary":
                ids = _ids(shard.path, known[name], np.asarray(x), target_vocab(config))
                yield path, parameters.put(path, ids, layer, mesh)
                continue
            if x.dtype.name not in FLOATS:
                raise CheckpointError(f"{shard.path}: {name} is {x.dtype.name}, expected one of {', '.join(FLOATS)}")
            yield path, parameters.place(path, x, layer, mesh, dtype)


def target_vocab(config: Any) -> int:
    """Size of the target's vocabulary."""
    return getattr(config, "layer", config).vocab_size


def _ids(path: Path, name: str, x: np.ndarray, vocab: int) -> np.ndarray:
    """The target's id of each of a drafter's: d2t holds what is to be added to each of these."""
    if not np.issubdtype(x.dtype, np.integer):
        raise CheckpointError(f"{path}: {name} is {x.dtype.name}, expected integers")
    ids = x if name == MAP else x + np.arange(len(x))
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != len(ids):
        raise CheckpointError(
            f"{path}: {name} gives ids from {ids.min()} to {ids.max()}, {len(np.unique(ids))} different ones of "
            f"{len(ids)}: expected different ids from 0 to {vocab - 1}"
        )
    return ids.astype(np.int32)


def save(
    config: Any, params: Params, folder: str | Path, *, target: Model, tokens: int = 5, overwrite: bool = False
) -> Path:
    """Writes a drafter as vLLM and SGLang read it: EAGLE-3, DFlash, DSpark and MTP in the format of `speculators`.

    That has no EAGLE-1, which is written as its authors publish it, and no Medusa, which is written as vLLM has it,
    with tensors of our own for blockwise and Hydra's heads.

    Args:
        config: of the network, as `restore` returns it.
        params: its parameters.
        folder: where to.
        target: the model that it drafts for, whose name becomes the verifier's.
        tokens: draft tokens a round, for who serves it.
        overwrite: whether a Hugging Face folder that is there already may be replaced.

    Raises:
        CheckpointError: there is something at `folder` already, or the format has no such drafter.
    """
    folder = Path(folder).expanduser().resolve()
    if complaint := folders.occupied(folder, "Hugging Face folder", overwrite, marker=CONFIG):
        raise CheckpointError(complaint)
    form = published.format_of(config)
    try:
        table = form.write(config, _verifier(target), tokens)
    except FamilyError as error:
        raise CheckpointError(f"the drafter cannot be written: {error}") from error
    dtype = getattr(config, "layer", config).dtype
    with parameters.beside(folder) as beside:
        named = _theirs(config, params, form, dtype)
        if jax.process_index() > 0:
            collections.deque(named, maxlen=0)
            return folder
        text = json.dumps(table | {"torch_dtype": dtype}, indent=2)
        (beside / CONFIG).write_text(text + "\n", encoding="utf-8")
        huggingface.write_weights(beside, named)
    return folder


def _verifier(target: Model) -> dict[str, Any]:
    try:
        _, table = describe(target.config)
    except FamilyError:
        table = {"architectures": []}
    layers = _shape_of(target, None).layers
    return {"name_or_path": target.name, "architectures": table["architectures"], "layers": layers}


def _theirs(config: Any, params: Params, form: Format, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    flat = parameters.flat(params)
    for path, name in form.names(config).items():
        x = sharding.fetch(parameters.apart(flat[path]))
        if name == MAP:
            yield MAP, x.astype(np.int64)
            continue
        if name != VOCABULARY:
            yield form.spelled(name), np.ascontiguousarray(x, jnp.dtype(dtype))
            continue
        yield VOCABULARY, x.astype(np.int64) - np.arange(len(x))
        known = np.zeros(target_vocab(config), bool)
        known[x] = True
        yield "t2d", known
