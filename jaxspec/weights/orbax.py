"""Checkpoints: a folder with params/ (Orbax), manifest.toml and the tokenizer's files.

The manifest holds the model's shape, and size and SHA-256 of every other file: a damaged or
half-copied checkpoint is refused, by the name of the file, before anything is loaded. Matrices are
stored as float32, bfloat16, int8 or int4 (`jaxspec.weights.quantisation`); all other leaves stay
float32, and integers of n-gram tables integers. A checkpoint says nothing of the devices that it
was saved on, and loads on any. Arrays go into it and out of it a few at a time
(`jaxspec.weights.orbax_arrays`), so that the host never holds a copy of the model.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import shutil
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec import nets, optional_imports, sharding
from jaxspec.core import Params
from jaxspec.core.checks import suggest
from jaxspec.files import folders
from jaxspec.files.folders import MANIFEST, some
from jaxspec.files.strict_tables import RecipeError, build
from jaxspec.nets import axes_of, net_of, quantised
from jaxspec.weights import (
    old_manifests,
    orbax_arrays,
    orbax_layouts,
    parameters,
    quantisation,
    tokenizers,
)
from jaxspec.weights.hf_families import FamilyError
from jaxspec.weights.reader import ModelFormat, Reader
from jaxspec.weights.source import (
    ERRORS,
    SourceFiles,
    beside,
    configured,
    from_toml,
    to_toml,
    written,
)
from jaxspec.weights.tensors import CheckpointError

VERSION = 1  # of the folder's layout
DTYPES = ("float32", "bfloat16", *quantisation.DTYPES)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
# the ids that a drafter's head computes, where these are not all
DRAFT_TOKENS = "draft_tokens.json"
BYTES = ("added_tokens.json", "tokenizer_config.json")  # ByT5's, which knows bytes without a file


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of manifest.toml."""

    format: int  # version of the folder's layout
    name: str  # the model's
    family: str  # its network's name: "t5", "decoder", "ngram", ...; "gpt" in older ones
    dtype: str  # how matrices are stored: "float32", "bfloat16", "int8" or "int4"
    parameters: int  # number of weights or table entries (scales of quantised matrices not counted)
    # the network's configuration; the file holds the config.json that it was read from
    # (`weights.source`), or the configuration's fields (`weights.old_manifests`)
    model: Any
    files: dict  # [size in bytes, SHA-256] of every other file, by its path in the folder
    about: dict  # where the weights come from and what was measured; plain values
    # the `folder` of a checkpoint beside this one, the `digest` of its parameters, and the
    # `modules` that are read from there; empty: this checkpoint holds all of its parameters
    shares: dict = dataclasses.field(default_factory=dict)
    # the tables that the configuration was read from; None: the file holds its fields
    source: Any = None


def save(
    folder: str | Path,
    params: Params,
    config: Any,
    tokenizer_folder: str | Path,
    *,
    name: str,
    dtype: str,
    description: dict[str, Any],
    overwrite: bool = False,
    draft_tokens: Sequence[int] | None = None,
    shares: str | None = None,
    source: SourceFiles | None = None,
) -> Manifest:
    """Writes a checkpoint: the whole folder, or nothing.

    Everything is written beside `folder` and renamed into place at the end: a crash leaves the old
    contents. Under `jax.distributed` all processes call this, with the same arguments and a folder
    that all of them see; each writes the parts on its devices.

    Args:
        folder: where to; its name is usually the model's.
        params: the tree that `init` of the family's network makes, on any devices; its matrices may
            be quantised.
        tokenizer_folder: holds tokenizer.json (or ByT5's added_tokens.json) and
            tokenizer_config.json, which are copied.
        name: the model's name.
        dtype: how to store matrices. What is stored is the model: "int8" and "int4" round it once
            and for all.
        description: provenance and measurements, such as {"licence": "...", "heldout_loss": 2.9}:
            strings, numbers, booleans and lists of these.
        overwrite: whether a checkpoint that is there already may be replaced.
        draft_tokens: the ids that a drafter's head is trimmed to when it is loaded
            (`jaxspec.trim_vocabulary`); None: to none. What is stored is the whole model.
        shares: the name of a checkpoint in the same folder as this one. Modules that it stores with
            the same values, such as a drafter's encoder, are not stored again: they are read from
            there, and the two stay together.
        source: the tables that `config` was read from: `Model.source`.

    Raises:
        CheckpointError: `folder` exists already, the disk is full, the parameters do not match
            `config` or are not finite, or an argument is not as described.
    """
    folder = Path(folder).expanduser().resolve()
    tokenizer_folder = Path(tokenizer_folder).expanduser()
    _check_arguments(config, tokenizer_folder, dtype)
    _tables_of(config, source)  # raises if no manifest can hold it
    needed = quantisation.count(params) * quantisation.bits(dtype) // 8
    complaint = folders.occupied(folder, "checkpoint", overwrite) or folders.no_room(folder, needed)
    if complaint:
        raise CheckpointError(complaint)
    drafted = None
    if draft_tokens is not None:
        drafted = [int(token) for token in draft_tokens]
    if drafted is not None:
        _check_tokens(drafted, "draft_tokens", config.vocab_size)
    # Quantised matrices are compared by their values: each may be stored in any dtype.
    wide = jax.eval_shape(
        lambda tree: jax.tree.map(_as_float32, quantisation.dequantise(tree)), params
    )
    complaint = parameters.differences(
        parameters.flat(net_of(config).shapes(config)), parameters.flat(wide), _shape
    )
    if complaint:
        raise CheckpointError(
            f"{name}: the parameters are not those of its configuration:{complaint}"
        )
    by_path = parameters.flat(params, is_leaf=quantisation.is_quantised)
    bad = [path for path, x in by_path.items() if not _is_finite(x)]
    if bad:
        raise CheckpointError(f"{name}: NaN or infinity in {some(bad)}: nothing was saved")
    shared = {}
    if shares is not None:
        shared = _shares(params, folder.parent / shares, dtype)
    if shared:
        stored = {name: x for name, x in params.items() if name not in shared["modules"]}
    else:
        stored = params
    with parameters.beside(folder) as beside:
        mixed = quantisation.dtype_of(params, "float32") == "int4"
        orbax_arrays.write(
            beside / "params", stored, functools.partial(_as_dtype, dtype=dtype, mixed=mixed)
        )
        if jax.process_index() == 0:
            for file in tokenizer_files(path.name for path in tokenizer_folder.iterdir()):
                _copy_compact(tokenizer_folder / file, beside / file)
            if drafted is not None:
                (beside / DRAFT_TOKENS).write_text(json.dumps(drafted) + "\n", encoding="utf-8")
            count = quantisation.count(params)
            files = folders.fingerprints(beside)
            _write_manifest(
                beside / MANIFEST,
                Manifest(
                    format=VERSION,
                    name=name,
                    family=net_of(config).name,
                    dtype=dtype,
                    parameters=count,
                    model=config,
                    files=files,
                    about=description,
                    shares=shared,
                    source=source,
                ),
            )
    return read_manifest(folder)


def restore(
    folder: str | Path, dtype: str = "float32", mesh: Mesh | None = None
) -> tuple[Params, Any, Manifest]:
    """Reads a checkpoint, having checked every file of it.

    Args:
        dtype: the matrices' dtype, "float32", "bfloat16", "int8" or "int4". Quantised ones are
            taken as they are stored.
        mesh: the devices to place the parameters on (`jaxspec.sharding`): each gets its part,
            whatever mesh they were saved from. None for the default device.

    Returns:
        The parameters (other leaves float32, tables integers), the network's configuration, with
        the computation's dtype, and the manifest.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or its parameters do not match its
            configuration.
    """
    folder = Path(folder).expanduser().absolute()
    manifest = read_manifest(folder)
    shared = manifest.shares.get("modules", ())
    read = functools.partial(_read, dtype=dtype, mesh=mesh)
    by_path = read(folder, manifest, lambda path: path.partition("/")[0] not in shared)
    if shared:
        beside = _beside(folder, manifest)
        by_path |= read(
            beside, read_manifest(beside), lambda path: path.partition("/")[0] in shared
        )
    # Orbax has dicts and lists for the network's own containers.
    abstract = net_of(manifest.model).shapes(manifest.model)
    params = jax.tree.unflatten(
        jax.tree.structure(abstract), [by_path[path] for path in parameters.flat(abstract)]
    )
    return (
        params,
        dataclasses.replace(manifest.model, dtype=quantisation.computation(dtype)),
        manifest,
    )


def _read(
    folder: Path,
    manifest: Manifest,
    chosen: Callable[[str], bool],
    *,
    dtype: str,
    mesh: Mesh | None,
) -> dict[str, Any]:
    """Reads the parameters of some paths, having checked every file of the checkpoint."""
    complaint = folders.damage(folder, manifest.files)
    if complaint:
        raise CheckpointError(
            f"{folder} is damaged: {complaint}. Copy or build the checkpoint again"
        )
    axes = axes_of(manifest.model)
    mixed = manifest.dtype == "int4"

    def check(stored: dict[str, Any]) -> None:
        shapes = net_of(manifest.model).shapes(manifest.model)
        expected = jax.eval_shape(
            lambda params: quantisation.quantise(params, manifest.dtype), shapes
        )
        by_path = parameters.flat(expected, quantisation.is_quantised)
        complaint = parameters.differences(
            {path: by_path[path] for path in by_path if chosen(path)}, stored, _shape
        )
        if complaint:
            raise CheckpointError(
                f"{folder}: the parameters are not those that {MANIFEST} describes:{complaint}"
            )

    def place(path: str, x: Any) -> Any:
        if quantisation.is_quantised(x):
            x = {name: parameters.put(f"{path}/{name}", x[name], axes, mesh) for name in x}
        else:
            x = parameters.put(path, x, axes, mesh)
        x = _as_dtype(path, x, dtype, mixed)
        if mesh is None or quantisation.is_quantised(x):
            return x
        # Groups of columns are an axis of their own; putting them together makes the matrix whole
        # on every device.
        return jax.device_put(x, sharding.of(path, x.shape, axes, mesh))

    return orbax_arrays.read(folder / "params", chosen, check, place)


def _digest(folder: Path) -> str:
    """Returns a digest of a checkpoint's stored parameters, from its manifest."""
    # The manifest has a digest of each file, so no weights are read for this.
    entries = {
        path: entry
        for path, entry in read_manifest(folder).files.items()
        if path.startswith("params/")
    }
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _beside(folder: Path, manifest: Manifest) -> Path:
    """Returns the checkpoint beside this one that holds the modules which it shares."""
    name = manifest.shares["folder"]
    digest = manifest.shares["digest"]
    beside = folder.parent / name
    if not (beside / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} has parameters of the checkpoint {name}, which is not at {beside}: copy both"
        )
    if _digest(beside) != digest:
        mismatch = f"{folder} has parameters of another {name} than the one at {beside}"
        raise CheckpointError(f"{mismatch}: copy both from the same source")
    return beside


def _shares(params: Params, beside: Path, dtype: str) -> dict[str, Any]:
    """Returns the entry of a manifest that says which modules the checkpoint `beside` stores with
    the same values.
    """
    if not is_folder(beside):
        raise CheckpointError(f"shares is {beside.name!r}, and there is no checkpoint at {beside}")
    # Values are compared after rounding: two float32 matrices may be one in int8.
    shared, _, manifest = restore(beside, dtype)
    names = [
        name
        for name in params
        if name in shared and _is_stored_as(params[name], shared[name], name, dtype)
    ]
    if manifest.dtype != dtype or manifest.shares or not names:
        stored = (
            f"shares is {beside.name!r}, stored as {manifest.dtype} with {len(names)} modules with "
            "the same values"
        )
        raise CheckpointError(
            f"{stored}: expected one of {dtype} that holds all of its parameters, some of these, "
            "too"
        )
    return {"folder": beside.name, "digest": _digest(beside), "modules": names}


def _is_stored_as(module: Params, reference: Params, name: str, dtype: str) -> bool:
    """Tells whether a module has the values of another one, once it is stored in `dtype`."""
    store = functools.partial(_as_dtype, dtype=dtype)
    stored = parameters.map_by_path(store, {name: module}, is_leaf=quantisation.is_quantised)[name]
    return jax.tree.structure(stored) == jax.tree.structure(reference) and all(
        bool(jnp.array_equal(a, b))
        for a, b in zip(*map(jax.tree.leaves, (stored, reference)), strict=True)
    )


def read_manifest(folder: str | Path) -> Manifest:
    """Reads a checkpoint's manifest without its weights.

    Raises:
        CheckpointError: the checkpoint is missing, or its manifest is damaged or of another
            version.
    """
    folder = Path(folder)
    folders.recover(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        siblings = {p.parent.name for p in folder.parent.glob(f"*/{MANIFEST}")}
        if folder.exists():
            problem = "a file, not a folder"
        else:
            problem = "nothing there"
        raise CheckpointError(
            f"no checkpoint at {folder}: {problem}{suggest(folder.name, siblings)}"
        )
    if not path.is_file():
        complaint = orbax_layouts.complaint(folder)
        if complaint is not None:
            raise CheckpointError(complaint)
        expected = (
            "a folder that jaxspec.weights.orbax.save wrote, a Hugging Face folder, or a "
            "checkpoint of T5X's or Gemma's"
        )
        raise CheckpointError(
            f"{folder} is not a jaxspec checkpoint: it has no {MANIFEST}. Expected {expected}"
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if table.get("format") != VERSION:
            raise RecipeError(
                f"format is {table.get('format')!r}, this version of jaxspec reads format {VERSION}"
            )
        for key, expected in (("family", sorted(old_manifests.FAMILIES)), ("dtype", DTYPES)):
            complaint = _unknown(key, table.get(key), expected)
            if complaint:
                raise RecipeError(complaint)
        # The family of an older one says what its table holds, so it is checked first.
        source = None
        if "model_type" in table.get("model", {}):
            source, model = from_toml(table)
        else:
            model = old_manifests.network(table["family"], table.get("model", {}))
        manifest = build(Manifest, {**table, "model": model, "source": source}, "it")
        _check_manifest(manifest)
    except ERRORS as error:  # TOML's, Unicode's and recipes' are such
        # Experts whose gates did not lie beside their partners.
        older = "'interleaved'" in str(error)
        if older:
            advice = "It is of an older jaxspec: convert the model again"
        else:
            advice = "Copy or build the checkpoint again"
        raise CheckpointError(f"the manifest {path} cannot be used: {error}. {advice}") from error
    return manifest


def read_draft_tokens(folder: Path, manifest: Manifest) -> list[int] | None:
    """Reads the ids that a checkpoint's head is to be trimmed to; None: its manifest lists none."""
    if DRAFT_TOKENS not in manifest.files:
        return None
    try:
        ids = json.loads((folder / DRAFT_TOKENS).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / DRAFT_TOKENS} cannot be read: {error}") from error
    _check_tokens(ids, folder / DRAFT_TOKENS, manifest.model.vocab_size)
    return ids


def tokenizer_of(folder: Path) -> Any:
    """Loads the tokenizer of a checkpoint."""
    optional_imports.import_transformers()
    from transformers import PreTrainedTokenizerFast

    if not (folder / TOKENIZER[0]).is_file():
        return tokenizers.load(folder)
    # AutoTokenizer would give the same, but imports torch where that is installed: seconds.
    return tokenizers.read(PreTrainedTokenizerFast, folder)


def tokenizer_files(present: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of a tokenizer's files in its folder.

    >>> tokenizer_files(["tokenizer.json", "added_tokens.json", "params"])
    ('tokenizer.json', 'tokenizer_config.json')
    >>> tokenizer_files(["tokenizer_config.json", "added_tokens.json"])
    ('added_tokens.json', 'tokenizer_config.json')
    """
    present = set(present)
    if present.issuperset(BYTES) and TOKENIZER[0] not in present:
        return BYTES
    return TOKENIZER


def _copy_compact(source: Path, copy: Path) -> None:
    """Copies a JSON file without its white space, half of a tokenizer's bytes; any other file as it
    is.
    """
    try:
        table = json.loads(source.read_bytes())
        copy.write_text(
            json.dumps(table, ensure_ascii=False, separators=(",", ":")), encoding="utf-8"
        )
    except ValueError:
        shutil.copyfile(source, copy)


def _check_arguments(config: Any, tokenizer_folder: Path, dtype: str) -> None:
    complaint = _unknown("dtype", dtype, DTYPES)
    if complaint:
        raise CheckpointError(complaint)
    if nets.find(config) is None:
        raise CheckpointError(
            f"config is a {type(config).__name__}: expected the configuration of a network of "
            "jaxspec.nets"
        )
    present = {path.name for path in tokenizer_folder.glob("*") if path.is_file()}
    absent = [file for file in tokenizer_files(present) if file not in present]
    if absent:
        raise CheckpointError(
            f"the tokenizer folder {tokenizer_folder} lacks {' and '.join(absent)}"
        )


def _unknown(key: str, value: Any, expected: Iterable[str]) -> str:
    names = list(expected)
    return "" if value in names else f"{key} is {value!r}: expected one of {names}"


def _check_tokens(ids: Any, name: Any, vocab: int) -> None:
    """Raises CheckpointError for anything but the ids that a head can be trimmed to."""
    if not (isinstance(ids, list) and ids and all(type(x) is int and 0 <= x < vocab for x in ids)):
        raise CheckpointError(
            f"{name} is {repr(ids)[:60]}: expected a list of ids from 0 to {vocab - 1}"
        )


def _check_manifest(manifest: Manifest) -> None:
    complaint = folders.ill_formed(manifest.files)
    if complaint:
        raise RecipeError(complaint)
    if manifest.shares and sorted(manifest.shares) != ["digest", "folder", "modules"]:
        raise RecipeError(
            f"[shares] has {sorted(manifest.shares)}, expected digest, folder and modules"
        )
    needed = ("params/_METADATA", *tokenizer_files(manifest.files))
    absent = [file for file in needed if file not in manifest.files]
    if absent:
        raise RecipeError(f"[files] does not list {' and '.join(absent)}")


def _tables_of(config: Any, source: SourceFiles | None) -> dict[str, Any]:
    """Returns the tables of a manifest that describe a network: config.json's. The tables of
    n-grams have none: theirs are the configuration's fields.
    """
    if net_of(config).name == "ngram":
        # TOML has no null: it is the default of the field that may be None.
        fields = dataclasses.asdict(config).items()
        return {"model": {name: x for name, x in fields if x is not None}}
    try:
        family, tables = written(config, source, {})
    except FamilyError as error:
        raise CheckpointError(f"no manifest can hold this model: {error}") from None
    return to_toml(tables, beside(family, configured(tables)[1], config))


def _write_manifest(path: Path, manifest: Manifest) -> None:
    table = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    del table["source"]
    if not manifest.shares:
        del table["shares"]
    table |= _tables_of(manifest.model, manifest.source)
    try:
        text = folders.to_toml(table)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    path.write_text(text, encoding="utf-8", newline="\n")


def _as_dtype(path: str, x: Any, dtype: str, mixed: bool = False) -> Any:
    """Casts a parameter from whichever dtype it has; quantised matrices that are to be so stay as
    they are.

    In a `mixed` model, which has int4 matrices, int8 ones are those that were to stay finer: they
    stay in int4, too.
    """
    if mixed and dtype == "int4" and quantisation.is_quantised(x) and "int8" in x:
        return x
    # Rounded from float32 always: by way of bfloat16 it would be rounded twice.
    if not quantisation.is_quantised(x):
        x = _as_float32(x)
    return quantisation.as_dtype(parameters.keys(path), x, dtype)


@jax.jit
def _is_finite(x: Any) -> jax.Array:
    return jnp.isfinite(x["scale"] if quantisation.is_quantised(x) else x).all()


def _as_float32(x: Any) -> Any:
    """Integers are what tables hold, and stay."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x
    return x.astype(jnp.float32)


def _shape(x: Any) -> str:
    """Writes a dtype and a shape. Quantised matrices may have other groups, or zero points: both
    are not shown.

    >>> _shape(jnp.ones((2, 3)))
    'float32[2, 3]'
    >>> _shape({"int4": jnp.ones((2, 8, 32), jnp.int4), "scale": jnp.ones((8, 2))})
    'quantised[8, 64]'
    """
    if quantisation.is_quantised(x):
        if not quantised.is_whole(x):
            return " with ".join(f"{name} {_shape(array)}" for name, array in x.items())
        return f"quantised{list(quantised.shape(x))}"
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"


def is_folder(folder: Path) -> bool:
    """Tells whether a folder is a checkpoint: it has a manifest."""
    return (folder / MANIFEST).is_file()


def open_model(folder: Path) -> Reader:
    """Opens a checkpoint."""
    folder = folder.expanduser().absolute()
    manifest = read_manifest(folder)

    def tokenizer() -> Any:
        loaded = tokenizer_of(folder)
        tokenizers.check_size(folder, loaded, manifest.model.vocab_size)
        return loaded

    return Reader(
        folder,
        manifest.name,
        config=lambda: manifest.model,
        tokenizer=tokenizer,
        params=lambda dtype, mesh: restore(folder, dtype, mesh)[:2],
        stored_dtype=lambda: manifest.dtype,
        draft_tokens=lambda: read_draft_tokens(folder, manifest),
        source=lambda: manifest.source,
    )


FORMAT = ModelFormat("jaxspec", is_folder, open_model)
"""A checkpoint of jaxspec: how it is recognised and opened."""
