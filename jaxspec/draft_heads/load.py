"""Loading drafters of a target, published ones and those that were trained here: EAGLE, Medusa,
MTP, DFlash, PARD.

What a folder's config.json means, and what its tensors are called, the kinds say
(`jaxspec.draft_heads.KINDS`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import nets, sharding
from jaxspec.core import BoundDrafter, Model, Params, Prompt
from jaxspec.decode.request import first_difference
from jaxspec.draft_heads import KINDS, kind_of, mtp, shapes_of
from jaxspec.draft_heads.check import bound, check_acceptance
from jaxspec.draft_heads.formats import D2T, FamilyError, Format, target_shape
from jaxspec.draft_heads.kind import in_dtype, shape_of
from jaxspec.draft_heads.training import VOCABULARY
from jaxspec.drafters.hidden_states import inside_of
from jaxspec.drafters.parallel import parallel
from jaxspec.nets import decoder_layers, stack
from jaxspec.weights import (
    hub,
    huggingface,
    orbax,
    parameters,
    quantised_files,
    tensors,
    tokenizers,
)
from jaxspec.weights import loading as models
from jaxspec.weights.hf_families import common
from jaxspec.weights.huggingface import CONFIG
from jaxspec.weights.tensors import CheckpointError

PARD = "pard_token"  # the key of the mask token of whole models that draft in parallel
# The algorithms of speculators that are read here.
SPECULATORS = ("eagle", "eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp")


def load_drafter(
    source: str | Path,
    *,
    target: Model,
    taps: Sequence[int] | None = None,
    head: Model | None = None,
    revision: str | None = None,
    check: bool | Sequence[str] | Prompt = False,
) -> BoundDrafter:
    """Loads a published drafter that reads a target's hidden states, ready for `generate(target,
    ..., drafter=...)`.

        target = jaxspec.load("Qwen/Qwen3-8B", dtype="bfloat16")
        drafter = jaxspec.load_drafter("AngelSlim/Qwen3-8B_eagle3", target=target)
        out = jaxspec.generate(target, prompts, drafter=drafter, gamma=4)

    The kind follows from config.json and the names of the tensors:

    - EAGLE, EAGLE-3 and P-EAGLE, in the spelling of their authors, SGLang and vLLM
    - the `speculators` format: eagle3, peagle, dflash, dflash2, dspark, mtp
    - Medusa, DFlash, DFlash 2, DSpark, Kangaroo, PaSS
    - PARD, whole models that draft in parallel (`drafters.parallel`)
    - modules for multi-token prediction in a model's own folder; `source` is then the target's

    `generate` runs the target with the taps that the drafter reads; you need not ask for them.

    Args:
        source: a folder, a hub id, owner/name, or the name of a shipped drafter.
        target: the model that it was made for. Its matrices get the dtype of the target's
            computation, and lie on its mesh.
        taps: the layers to read, counted from 0 for the output of the first one, if the folder is
            wrong or silent about them. Numbers that are off by one cost acceptance, never
            exactness.
        head: `jaxspec.trim_vocabulary(target, size=...)`, for a drafter that uses the target's
            head: it then computes the logits of so many tokens, and drafts no others (FR-Spec).
        revision: a branch, a tag or a commit, for a hub id.
        check: whether to measure how often its first draft token is accepted, on a few texts or on
            prompts that are given, and to warn if that is too seldom for a drafter of this target.
            Nothing else shows that weights are another's: the text stays exact. Takes as long as
            generating 32 tokens. The warning has a table of the tried alternatives (taps, norms,
            scales, positions and tokens) and names the settings to look at.

    Returns:
        The drafter, for this target.

    Raises:
        CheckpointError: the folder is missing, damaged, in another format, or for another target.
        ValueError: a revision was given for a source that is not on the hub, or a head for a
            drafter that has one.

    Warns:
        UserWarning: the folder names another model of the same shapes than this target.
    """
    folder = _folder_of(source, target, revision)
    mask_token = _mask_token(folder, _table(folder))
    if mask_token is not None:
        for option, value in (("taps", taps), ("head", head)):
            if value is not None:
                raise ValueError(
                    f"{option} is of draft heads, and {folder} is a whole model: leave it out"
                )
        mesh = sharding.mesh_of(target.params)
        dtype = nets.dtype_of(target.config)
        network = None
        draft = models.load(folder, dtype=dtype, mesh=mesh)
        try:
            drafter = parallel(draft, mask_token)
        except ValueError as error:
            raise CheckpointError(f"{folder / CONFIG}, of whose {PARD}: {error}") from None
    else:
        network = read_head(folder, target=target, taps=taps)
        drafter = bound(*network, target, head)
    if check is not False:
        read = None if network is None else lambda: network
        check_acceptance(drafter, None if check is True else check, name=str(source), network=read)
    return drafter._replace(name=str(source) if models.is_hub_id(source) else Path(source).name)


def read_head(
    source: str | Path,
    *,
    target: Model,
    taps: Sequence[int] | None = None,
    revision: str | None = None,
) -> tuple[Any, Params]:
    """Reads the configuration and the parameters of a drafter, to be trained further, say, or to be
    written.

    Arguments and errors as in `load_drafter`. `draft_heads.save.save` writes them.
    """
    if taps is not None:
        stack.check_numbers(taps)
    folder = _folder_of(source, target, revision)
    inside_of(target, str(source))
    tokenizer = tokenizers.load(folder)
    both = tokenizer is not None and target.tokenizer is not None
    if both and (first := first_difference(target.tokenizer, tokenizer)) is not None:
        differs = "id {} is {!r} for the target and {!r} there".format(*first)
        raise CheckpointError(
            f"{folder} has another tokenizer than the target: {differs}. It is another target's"
        )
    _check_name(folder, _table(folder), target)
    config, params = restore(folder, target, None if taps is None else tuple(taps))
    if taps is not None and not kind_of(config).head(config).requirements.taps:
        raise ValueError(
            f"taps is {list(taps)}, and {folder} reads the last layer's output only: leave it out"
        )
    return config, params


def _folder_of(source: str | Path, target: Model, revision: str | None) -> Path:
    """Returns the folder of a drafter, as `find`, once the target is known to be a model."""
    if not isinstance(target, Model):
        raise TypeError(
            f"target is {target!r}: expected a jaxspec.Model, as jaxspec.load returns it"
        )
    return find(source, revision)


def _table(folder: Path) -> dict[str, Any]:
    """Reads a folder's config.json; of one that cannot be read, `describe` says so."""
    try:
        return common.read_object(folder / CONFIG)
    except (OSError, ValueError):
        return {}


def _mask_token(folder: Path, table: dict[str, Any]) -> int | None:
    """Returns the mask token of a whole model that drafts in parallel (PARD's); None of other
    drafters.
    """
    mask_token = table.get(PARD)
    if mask_token is None:
        return None
    names = {name for file in tensors.shards(folder, tensors.OF_DRAFTERS) for name in file.shapes}
    if any("mask_hidden" in name for name in names):  # P-EAGLE's heads have both
        return None
    if type(mask_token) is not int:
        raise CheckpointError(
            f"{folder / CONFIG}: {PARD} is {mask_token!r}: expected the id of the mask token"
        )
    return mask_token


def _check_name(folder: Path, table: dict[str, Any], target: Model) -> None:
    """Compares the target's name with the name of the model that a folder was made for.

    Only names that mean one model are compared: ids of the hub, and names of shipped models. A
    folder may be called anything, and a name that holds the other is a copy's, as a rule:
    quantised, or fine-tuned.
    """
    try:
        verifier = (table.get("speculators_config") or {}).get("verifier") or {}
        named = table.get("base_model_name_or_path") or verifier.get("name_or_path")
    except AttributeError:  # `restore` says so
        return
    shipped_models = models.shipped()
    if not isinstance(named, str) or not all(
        models.is_hub_id(x) or x in shipped_models for x in (named, target.name)
    ):
        return
    file_name, target_name = (
        re.sub(r"[^a-z0-9]", "", x.rpartition("/")[2].lower()) for x in (named, target.name)
    )
    if not file_name or not target_name or file_name in target_name or target_name in file_name:
        return
    if named in shipped_models:
        layers = decoder_layers(orbax.read_manifest(shipped_models[named]).model)
        target_layers = decoder_layers(target.config)
        if target_layers and layers != target_layers:
            others = (
                f"{folder} was made for {named}, a model of {layers} layers, and {target.name} has "
                f"{target_layers}"
            )
            raise CheckpointError(f"{others}: load it with target=jaxspec.load({named!r})")
    warnings.warn(
        f"{folder} was made for {named}, and the target is {target.name}: the text stays exact, "
        "but few draft tokens may be accepted; check=True measures how many",
        stacklevel=4,
    )


def shipped() -> dict[str, Path]:
    """Lists the drafters that come with jaxspec, by name."""
    return models.shipped(CONFIG)


def find(source: str | Path, revision: str | None = None) -> Path:
    """Returns the folder of a drafter that reads hidden states, downloaded first if it is on the
    hub.
    """
    path = models.local(source, shipped(), revision)
    if path is not None:
        return path
    if Path(source).name in models.shipped():
        raise CheckpointError(
            f"{source} is a model: load it by jaxspec.load, and pass it as the drafter"
        )
    if not models.is_hub_id(source):
        names = ", ".join(shipped()) or "none in this installation"
        expected = f"a folder, the name of a shipped one ({names}), or a hub id (owner/name)"
        raise CheckpointError(f"no drafter at {source}: expected {expected}")
    return hub.download(str(source), revision, hub.DRAFTER_FILES)


def find_any(source: str) -> Path:
    """Returns the path of a model or a drafter, downloaded first if it is on the hub."""
    path = models.local(source, models.shipped() | shipped())
    if path is not None:
        return path
    if models.is_hub_id(source):
        return hub.download(source, files=hub.DRAFTER_FILES)
    return models.find(source)  # raises, with names that are near


def is_head(source: str) -> bool:
    """Tells whether a name, folder or hub id is a drafter that `load_drafter` loads, not a model.

    A module for multi-token prediction lies beside its model: such a folder is the model's.

    >>> is_head("debian-gpt-eagle"), is_head("debian-gpt-base"), is_head("random:gpt2")
    (True, False, False)
    """
    if models.local(source, models.shipped() | shipped()) is None and not models.is_hub_id(source):
        return False
    folder = find_any(source)
    if models.format_of(folder) is not huggingface.FORMAT:
        return False
    table = _table(folder)
    if "speculators_model_type" in table:
        return True
    try:
        if _mask_token(folder, table) is not None:
            return True
        files = tensors.shards(folder, tensors.OF_DRAFTERS)
        form, _ = _recognised(folder, table, files)
    except ValueError:  # loading the model says what is wrong
        return False
    return form is not mtp.KIND.format


class FileTensor(NamedTuple):
    """A tensor of a folder: its shape, and its name in the file."""

    shape: tuple[int, ...]
    name: str


def restore(folder: Path, target: Model, taps: tuple[int, ...] | None = None) -> tuple[Any, Params]:
    """Reads a drafter's folder: the configuration of its network, which has one of `KINDS`, and its
    parameters.

    Matrices get the dtype of the target's computation, and its mesh.
    """
    files = [file.under(file.repeats) for file in tensors.shards(folder, tensors.OF_DRAFTERS)]
    description = describe(folder, files, target, taps)
    return description.config, parameters.nested(dict(_placed(files, description, target)))


class Description(NamedTuple):
    """The facts of a drafter that are known before its weights are read."""

    form: Format  # how its files are read
    config: Any  # the configuration of its network
    # by a tensor's name in the files, its canonical name, and our parameter's path
    paths: dict[str, tuple[str, str]]


def describe(
    folder: Path, files: list[tensors.Shard], target: Model, taps: tuple[int, ...] | None = None
) -> Description:
    """Reads a drafter's config.json, and compares it with the shapes of its tensors and with the
    target.

    Only names and shapes are read of the files, so a drafter of another target is refused before
    weights are read.
    """
    try:
        table = common.read_object(folder / CONFIG)
        form, by_name = _recognised(folder, table, files)
        common.check(table, form.keys)
        shapes = {name: tensor.shape for name, tensor in by_name.items()}
        config = form.read(table, shapes, target_shape(target, taps))
        config = in_dtype(config, nets.dtype_of(target.config))
        expected = shapes_of(config)
        prefix = form.root(shapes)
        named = common.named(expected, form.modules(config))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder} holds no drafter that can be loaded: {error}") from error
    paths = {f"{prefix}{tensor.name}": path for path, tensor in named.items()}
    read_shapes = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
    # A drafter with the whole vocabulary needs no map, though some files have one.
    read_shapes = {
        name: shape for name, shape in read_shapes.items() if name != D2T or D2T in paths
    }
    complaint = parameters.differences(
        {name: expected[path].shape for name, path in paths.items()}, read_shapes
    )
    if complaint:
        wrong = f"the weights are not those of the {form.title} of its {CONFIG}:{complaint}"
        raise CheckpointError(f"{folder}: {quantised_files.unread(folder, read_shapes) or wrong}")
    return Description(
        form, config, {by_name[name].name: (name, path) for name, path in paths.items()}
    )


def _recognised(
    folder: Path, table: dict, files: list[tensors.Shard]
) -> tuple[Format, dict[str, FileTensor]]:
    """Returns the first format that matches, and the tensors by its spelling of their names."""
    algorithm = table.get("speculators_model_type", "eagle3")
    if algorithm not in SPECULATORS:
        raise FamilyError(
            f"speculators_model_type is {algorithm!r}: expected one of {', '.join(SPECULATORS)}"
        )
    for form in (head_kind.format for head_kind in KINDS):
        by_name: dict[str, FileTensor] = {}
        for name, shape in (
            (name, shape) for shard in files for name, shape in shard.shapes.items()
        ):
            canonical = form.canonical(name)
            if canonical is None:
                continue
            if canonical in by_name:
                raise CheckpointError(
                    f"{folder} holds {canonical} twice, as {by_name[canonical].name} and as {name}"
                )
            by_name[canonical] = FileTensor(shape, name)
        if form.matches(table, {name: tensor.shape for name, tensor in by_name.items()}):
            return form, by_name
    quantised = quantised_files.unread(folder, (name for shard in files for name in shard.shapes))
    if quantised:
        raise FamilyError(quantised)
    titles = ", ".join(head_kind.format.title for head_kind in KINDS)
    raise FamilyError(f"its tensors match no known format: expected one of {titles}")


def _placed(
    files: list[tensors.Shard], description: Description, target: Model
) -> Iterator[tuple[str, jax.Array]]:
    """Yields parameters by path."""
    form, config, tensor_paths = description
    mesh = sharding.mesh_of(target.params)
    shape = shape_of(config)
    # Drafters are split over a mesh by the same table of axes as their targets.
    axes = nets.axes_of(shape)
    for shard in files:
        for name, x in shard.read(set(tensor_paths)):
            canonical, path = tensor_paths[name]
            if path == VOCABULARY:
                ids = _ids(np.asarray(x), form, shape.vocab_size, f"{shard.path}: {canonical}")
                yield path, parameters.put(path, ids, axes, mesh)
                continue
            parameters.check_float(shard.path, name, x.dtype.name)
            yield path, parameters.place(path, x, axes, mesh, shape.dtype)


def _ids(x: np.ndarray, form: Format, vocab: int, where: str) -> np.ndarray:
    """Returns the target's id of each of a drafter's."""
    if not np.issubdtype(x.dtype, np.integer):
        raise CheckpointError(f"{where} is {x.dtype.name}, expected integers")
    # EAGLE's files hold offsets: d2t[i] = id - i.
    ids = x if form.stores_ids else x + np.arange(len(x))
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != len(ids):
        got = (
            f"ids from {ids.min()} to {ids.max()}, {len(np.unique(ids))} different ones of "
            f"{len(ids)}"
        )
        raise CheckpointError(f"{where} gives {got}: expected different ids from 0 to {vocab - 1}")
    return ids.astype(np.int32)
