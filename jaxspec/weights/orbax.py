"""Checkpoints: a folder with params/ (Orbax), manifest.toml and the tokenizer's files.

The manifest holds the model's shape, and size and SHA-256 of every other file: a damaged or half-copied
checkpoint is refused, by the name of the file, before anything is loaded. Matrices are stored as float32,
bfloat16, int8 or int4 (`jaxspec.weights.quantisation`); all other leaves stay float32, and integers of
n-gram tables integers.
A checkpoint says nothing of the devices that it was saved on, and loads on any. Arrays go into it and out of it a few
at a time (`jaxspec.weights.orbax_arrays`), so that the host never holds a copy of the model.
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
import numpy as np
from jax.sharding import Mesh

from jaxspec import nets, optional_imports, sharding
from jaxspec.core import Params, token_ids
from jaxspec.core.checks import suggest
from jaxspec.files import folders
from jaxspec.files.folders import MANIFEST, some
from jaxspec.files.strict_tables import RecipeError, build
from jaxspec.nets import FORMS, axes_of, quantised
from jaxspec.weights import orbax_arrays, parameters, quantisation, tokenizers
from jaxspec.weights.reader import ModelFormat, Reader
from jaxspec.weights.tensors import CheckpointError

VERSION = 1  # of the folder's layout
DTYPES = ("float32", "bfloat16", *quantisation.DTYPES)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
DRAFT_TOKENS = "draft_tokens.json"  # the ids that a drafter's head computes, where these are not all
BYTES = ("added_tokens.json", "tokenizer_config.json")  # ByT5's, which knows bytes without a file


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of manifest.toml.

    Attributes:
        format: version of the folder's layout.
        name, family: of the model; the family ("t5", "gpt", "decoder", "ngram") says which network it is, or that it is
            tables.
        dtype: how matrices are stored: "float32", "bfloat16", "int8" or "int4".
        parameters: number of weights or table entries (scales of quantised matrices not counted).
        model: the network's configuration; the file holds the family's form of it (`nets.form_of`).
        files: [size in bytes, SHA-256] of every other file, by its path in the folder.
        about: where the weights come from and what was measured; plain values.
        shares: the `folder` of a checkpoint beside this one, the `digest` of its parameters, and the `modules` that are
            read from there. Empty: this checkpoint holds all of its parameters.
    """

    format: int
    name: str
    family: str
    dtype: str
    parameters: int
    model: Any
    files: dict
    about: dict
    shares: dict = dataclasses.field(default_factory=dict)


def save(
    folder: str | Path,
    params: Params,
    config: Any,
    tokenizer_folder: str | Path,
    *,
    name: str,
    family: str,
    dtype: str,
    description: dict[str, Any],
    overwrite: bool = False,
    draft_tokens: Sequence[int] | None = None,
    shares: str | None = None,
) -> Manifest:
    """Writes a checkpoint: the whole folder, or nothing.

    Everything is written beside `folder` and renamed into place at the end: a crash leaves what was there. Under
    `jax.distributed` all processes call this, with the same arguments and a folder that all of them see; each writes
    what lies on its own devices.

    Args:
        folder: where to; its name is usually the model's.
        params: the tree that `init` of the family's network makes, on any devices; its matrices may be quantised.
        config: the network's configuration.
        tokenizer_folder: holds tokenizer.json (or ByT5's added_tokens.json) and tokenizer_config.json, which are
            copied.
        name, family: see `Manifest`.
        dtype: how to store matrices. What is stored is the model: "int8" and "int4" round it once and for all.
        description: provenance and measurements, such as {"licence": "...", "heldout_loss": 2.9}: strings, numbers,
            booleans and lists of these.
        overwrite: whether a checkpoint that is there already may be replaced.
        draft_tokens: of a drafter: the ids that its head is trimmed to when it is loaded (`jaxspec.trim_vocabulary`);
            None: to none. What is stored is the whole model.
        shares: the name of a checkpoint in the same folder as this one. Modules that it stores with the same values,
            such as a drafter's encoder, are not stored again: they are read from there, and the two stay together.

    Raises:
        CheckpointError: there is something at `folder` already, no room, the parameters are not those of `config`
            or not finite, or an argument is not as described.
    """
    folder, tokenizer_folder = Path(folder).expanduser().resolve(), Path(tokenizer_folder).expanduser()
    _check_arguments(config, tokenizer_folder, family, dtype)
    needed = quantisation.count(params) * quantisation.bits(dtype) // 8
    if complaint := folders.occupied(folder, "checkpoint", overwrite) or folders.no_room(folder, needed):
        raise CheckpointError(complaint)
    drafted = None if draft_tokens is None else [int(token) for token in draft_tokens]
    if drafted is not None and (complaint := _ill_formed_tokens(drafted, config.vocab_size)):
        raise CheckpointError(f"draft_tokens {complaint}")
    wide = jax.eval_shape(lambda tree: jax.tree.map(_as_float32, quantisation.dequantise(tree)), params)
    if complaint := _differences(_abstract(config), wide):
        raise CheckpointError(f"{name}: the parameters are not those of its configuration:{complaint}")
    if bad := [
        path for path, x in parameters.flat(params, is_leaf=quantisation.is_quantised).items() if not _is_finite(x)
    ]:
        raise CheckpointError(f"{name}: NaN or infinity in {some(bad)}: nothing was saved")
    shared = {} if shares is None else _shares(params, folder.parent / shares, dtype)
    stored = {name: x for name, x in params.items() if name not in shared["modules"]} if shared else params
    with parameters.beside(folder) as beside:
        _write_params(beside / "params", stored, dtype)
        if jax.process_index() == 0:
            for file in tokenizer_files(path.name for path in tokenizer_folder.iterdir()):
                _copy_compact(tokenizer_folder / file, beside / file)
            if drafted is not None:
                (beside / DRAFT_TOKENS).write_text(json.dumps(drafted) + "\n", encoding="utf-8")
            count, files = quantisation.count(params), folders.fingerprints(beside)
            _write_manifest(
                beside / MANIFEST, Manifest(VERSION, name, family, dtype, count, config, files, description, shared)
            )
    return read_manifest(folder)


def restore(folder: str | Path, dtype: str = "float32", mesh: Mesh | None = None) -> tuple[Params, Any, Manifest]:
    """Reads a checkpoint, having checked every file of it.

    Args:
        folder: the checkpoint.
        dtype: of the matrices: "float32", "bfloat16", "int8" or "int4": these two as `weights.quantisation` says, and
            those that are stored so are taken as they are.
        mesh: what to place the parameters on, as `jaxspec.sharding` says: each device is sent its own part of what is
            stored, whatever it was saved from. None for the default device.

    Returns:
        The parameters (other leaves float32, tables integers), the network's configuration, whose dtype is that of the
        computation, and the manifest.

    Raises:
        CheckpointError: there is none, it is damaged, or its parameters are not those of its configuration.
    """
    folder = Path(folder).expanduser().absolute()
    manifest = read_manifest(folder)
    abstract = _abstract(manifest.model)
    config = dataclasses.replace(manifest.model, dtype=quantisation.computation(dtype))
    read = functools.partial(_restored, dtype=dtype, mesh=mesh)
    if not manifest.shares:
        return _in_the_shape_of(abstract, read(folder, manifest)), config, manifest
    beside, modules = _beside(folder, manifest), manifest.shares["modules"]
    params = read(folder, manifest, [name for name in abstract if name not in modules])
    return _in_the_shape_of(abstract, params | read(beside, read_manifest(beside), modules)), config, manifest


def _restored(
    folder: Path, manifest: Manifest, modules: Sequence[str] | None = None, *, dtype: str, mesh: Mesh | None
) -> Params:
    """Reads a checkpoint's own parameters, or some modules of these, having checked every file of it."""
    if complaint := folders.damage(folder, manifest.files):
        raise CheckpointError(f"{folder} is damaged: {complaint}. Copy or build the checkpoint again")
    expected = _abstract(manifest.model)
    if modules is not None:
        expected = {name: expected[name] for name in modules}

    def place(path: tuple[Any, ...], x: np.ndarray) -> Any:
        if mesh is None:
            placed = jnp.asarray(x)
        else:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            placed = sharding.put(x, sharding.of(name, x.shape, axes_of(manifest.model), mesh))
        # A quantised matrix is several leaves, and waits for all of them.
        return placed if manifest.dtype in quantisation.DTYPES else _as_dtype(path, placed, dtype)

    params = _read_params(folder, jax.eval_shape(lambda params: cast(params, manifest.dtype), expected), place, modules)
    if manifest.dtype in quantisation.DTYPES:
        leaves, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=quantisation.is_quantised)
        del params  # so that each leaf is let go of when its parameter is made
        mixed = manifest.dtype == "int4"
        params = jax.tree.unflatten(tree, [_as_dtype(*leaves.pop(0), dtype, mixed) for _ in range(len(leaves))])
    return params


def _digest(folder: Path) -> str:
    """Returns a digest of a checkpoint's stored parameters, from its manifest."""
    entries = {path: entry for path, entry in read_manifest(folder).files.items() if path.startswith("params/")}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _beside(folder: Path, manifest: Manifest) -> Path:
    """Returns the checkpoint beside this one that holds the modules which it shares."""
    name, digest = manifest.shares["folder"], manifest.shares["digest"]
    beside = folder.parent / name
    if not (beside / MANIFEST).is_file():
        raise CheckpointError(f"{folder} has parameters of the checkpoint {name}, which is not at {beside}: copy both")
    if _digest(beside) != digest:
        raise CheckpointError(
            f"{folder} has parameters of another {name} than the one at {beside}: copy both from the same source"
        )
    return beside


def _shares(params: Params, beside: Path, dtype: str) -> dict[str, Any]:
    """Returns the entry of a manifest that says which modules the checkpoint `beside` stores with the same values."""
    if not is_folder(beside):
        raise CheckpointError(f"shares is {beside.name!r}, and there is no checkpoint at {beside}")
    theirs, _, manifest = restore(beside, dtype)
    names = [name for name in params if name in theirs and _is_stored_as(params[name], theirs[name], name, dtype)]
    if manifest.dtype != dtype or manifest.shares or not names:
        raise CheckpointError(
            f"shares is {beside.name!r}, which is stored as {manifest.dtype} and has {len(names)} modules with the "
            f"same values: expected one of {dtype} that holds all of its parameters, some of this model's among them"
        )
    return {"folder": beside.name, "digest": _digest(beside), "modules": names}


def _is_stored_as(module: Params, other: Params, name: str, dtype: str) -> bool:
    """Tells whether a module has the values of another one, once it is stored in `dtype`."""
    path = (jax.tree_util.DictKey(name),)
    stored = jax.tree_util.tree_map_with_path(
        lambda rest, x: _as_dtype((*path, *rest), x, dtype), module, is_leaf=quantisation.is_quantised
    )
    if jax.tree.structure(stored) != jax.tree.structure(other):
        return False
    return all(bool(jnp.array_equal(a, b)) for a, b in zip(*map(jax.tree.leaves, (stored, other)), strict=True))


def read_manifest(folder: str | Path) -> Manifest:
    """Reads what a checkpoint says about itself, and no weights.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged or of another version.
    """
    folder = Path(folder)
    folders.recover(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        siblings = {p.parent.name for p in folder.parent.glob(f"*/{MANIFEST}")}
        problem = "a file, not a folder" if folder.exists() else "nothing there"
        raise CheckpointError(f"no checkpoint at {folder}: {problem}{suggest(folder.name, siblings)}")
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no jaxspec checkpoint: it has no {MANIFEST}. "
            "Expected a folder that jaxspec.weights.orbax.save wrote, a Hugging Face folder, with its config.json, or "
            "a checkpoint of T5X's"
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if table.get("format") != VERSION:
            raise RecipeError(f"format is {table.get('format')!r}, this version of jaxspec reads format {VERSION}")
        if table.get("family") not in FORMS:
            raise RecipeError(f"family is {table.get('family')!r}, expected one of {sorted(FORMS)}")
        model = nets.from_table(table["family"], table.get("model", {}), "[model]")
        manifest = build(Manifest, {**table, "model": model}, "it")
        _check_manifest(manifest)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecipeError, RecursionError) as error:
        raise CheckpointError(
            f"the manifest {path} cannot be used: {error}. Copy or build the checkpoint again"
        ) from error
    return manifest


def read_draft_tokens(folder: Path, manifest: Manifest) -> list[int] | None:
    """Reads the ids that a checkpoint's head is to be trimmed to; None: its manifest lists none.

    Raises:
        CheckpointError: the file holds something else.
    """
    if DRAFT_TOKENS not in manifest.files:
        return None
    try:
        ids = json.loads((folder / DRAFT_TOKENS).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / DRAFT_TOKENS} cannot be read: {error}") from error
    if complaint := _ill_formed_tokens(ids, manifest.model.vocab_size):
        raise CheckpointError(f"{folder / DRAFT_TOKENS} {complaint}")
    return ids


def tokenizer_of(folder: Path) -> Any:
    """Loads the tokenizer of a checkpoint."""
    optional_imports.import_transformers()
    from transformers import PreTrainedTokenizerFast

    if not (folder / TOKENIZER[0]).is_file():
        return tokenizers.load(folder)
    # AutoTokenizer would give the same, but imports torch where that is installed: seconds.
    return tokenizers.read(PreTrainedTokenizerFast, folder)


def cast(params: Params, dtype: Any) -> Params:
    """Casts matrices to `dtype`, quantised ones with their scales; other leaves, computed in float32, are left alone.

    >>> params = {"norm": {"scale": jnp.ones(4)}, "head": {"weight": jnp.ones((8, 4))}}
    >>> {name: str(x.dtype) for name, x in parameters.flat(cast(params, jnp.bfloat16)).items()}
    {'head/weight': 'bfloat16', 'norm/scale': 'float32'}
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: quantisation.as_dtype(path, x, dtype), params)


def tokenizer_files(present: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of a tokenizer's files, by what is in its folder.

    >>> tokenizer_files(["tokenizer.json", "added_tokens.json", "params"])
    ('tokenizer.json', 'tokenizer_config.json')
    >>> tokenizer_files(["tokenizer_config.json", "added_tokens.json"])
    ('added_tokens.json', 'tokenizer_config.json')
    """
    present = set(present)
    return BYTES if present.issuperset(BYTES) and TOKENIZER[0] not in present else TOKENIZER


def _copy_compact(source: Path, copy: Path) -> None:
    """Copies a JSON file without its white space, which is half of a tokenizer's; what is no JSON as it is."""
    try:
        table = json.loads(source.read_bytes())
        copy.write_text(json.dumps(table, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    except ValueError:
        shutil.copyfile(source, copy)


def _check_arguments(config: Any, tokenizer_folder: Path, family: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype is {dtype!r}, expected one of {DTYPES}")
    if family not in FORMS:
        raise CheckpointError(f"family is {family!r}, expected one of {sorted(FORMS)}")
    expected = "" if nets.find(config) is None else nets.form_of(config)[0]
    if family != expected:
        raise CheckpointError(
            f"config is a {type(config).__name__} of family {expected!r}, and family is {family!r}: expected the same"
        )
    present = {path.name for path in tokenizer_folder.glob("*") if path.is_file()}
    if absent := [file for file in tokenizer_files(present) if file not in present]:
        raise CheckpointError(f"the tokenizer folder {tokenizer_folder} lacks {' and '.join(absent)}")


def _ill_formed_tokens(ids: Any, vocab: int) -> str:
    """Says what is wrong with the ids that a head is to be trimmed to; empty if nothing."""
    if isinstance(ids, list) and ids and all(type(x) is int and 0 <= x < vocab for x in ids):
        return ""
    return f"is {repr(ids)[:60]}: expected a list of ids from 0 to {vocab - 1}"


def _check_manifest(manifest: Manifest) -> None:
    if manifest.dtype not in DTYPES:
        raise RecipeError(f"dtype is {manifest.dtype!r}, expected one of {DTYPES}")
    if complaint := folders.ill_formed(manifest.files):
        raise RecipeError(complaint)
    if manifest.shares and sorted(manifest.shares) != ["digest", "folder", "modules"]:
        raise RecipeError(f"[shares] has {sorted(manifest.shares)}, expected digest, folder and modules")
    needed = ("params/_METADATA", *tokenizer_files(manifest.files))
    if absent := [file for file in needed if file not in manifest.files]:
        raise RecipeError(f"[files] does not list {' and '.join(absent)}")


def _write_manifest(path: Path, manifest: Manifest) -> None:
    table = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    table["model"] = without_none(dataclasses.asdict(nets.form_of(manifest.model)[1]))
    if not manifest.shares:
        del table["shares"]
    try:
        text = folders.to_toml(table)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    path.write_text(text, encoding="utf-8", newline="\n")


def without_none(value: Any) -> Any:
    """Leaves out what TOML has no null for: each field that may be None has it as its default."""
    if isinstance(value, dict):
        return {key: without_none(x) for key, x in value.items() if x is not None}
    return [without_none(x) for x in value] if isinstance(value, list | tuple) else value


def _write_params(folder: Path, params: Params, dtype: str) -> None:
    """Writes parameters; each matrix is made what it is stored as when its turn comes, on its own devices."""

    mixed = quantisation.dtype_of(params, "float32") == "int4"

    def later(path: tuple[Any, ...], x: Any) -> Any:
        def make() -> Any:
            return _as_dtype(path, jax.tree.map(parameters.apart, x), dtype, mixed)

        abstract = jax.eval_shape(functools.partial(_as_dtype, path, dtype=dtype, mixed=mixed), x)
        if not isinstance(abstract, dict):
            return orbax_arrays.Later(abstract.shape, abstract.dtype, make)
        kinds = {kind: functools.partial(lambda kind: make()[kind], kind) for kind in abstract}
        return {
            kind: orbax_arrays.Later(abstract[kind].shape, abstract[kind].dtype, part) for kind, part in kinds.items()
        }

    orbax_arrays.write(folder, jax.tree_util.tree_map_with_path(later, params, is_leaf=quantisation.is_quantised))
    # It says where the folder was written, which is nobody's business; no local file system needs it.
    (folder / "commit_success.txt").unlink(missing_ok=True)


def _read_params(
    folder: Path,
    expected: Params,
    place: Callable[[tuple[Any, ...], np.ndarray], Any],
    modules: Sequence[str] | None,
) -> Params:
    def check(tree: Params) -> None:
        if complaint := _differences(expected, tree):
            raise CheckpointError(
                f"{folder}: the stored parameters are not those that {MANIFEST} describes:{complaint}"
            )

    return orbax_arrays.read(folder / "params", check, place, modules)


@functools.lru_cache
def _abstract(config: Any) -> Params:
    """Shapes and types of the network's parameters."""
    return nets.net_of(config).shapes(config)


def _as_dtype(path: tuple[Any, ...], x: Any, dtype: str, mixed: bool = False) -> Any:
    """Casts a parameter from whichever dtype it has; quantised matrices that are to be so stay as they are.

    In a `mixed` model, which has int4 matrices, int8 ones are those that were to stay finer: they stay in int4, too.
    """
    if mixed and dtype == "int4" and quantisation.is_quantised(x) and "int8" in x:
        return x
    return quantisation.as_dtype(path, x if quantisation.is_quantised(x) else _as_float32(x), dtype)


@jax.jit
def _all_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


def _is_finite(x: Any) -> bool:
    return bool(_all_finite(x["scale"] if quantisation.is_quantised(x) else x))


def _as_float32(x: Any) -> Any:
    """Integers are what tables hold, and stay."""
    return x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(jnp.float32)


def _in_the_shape_of(abstract: Params, params: Params) -> Params:
    """Puts the leaves of Orbax's dicts and lists, quantised matrices among them, into the containers of `abstract`."""
    leaves = parameters.flat(params, is_leaf=quantisation.is_quantised)
    return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[path] for path in parameters.flat(abstract)])


def _differences(expected: Params, got: Params) -> str:
    """Says what is missing, what is unexpected, what has another shape or type; empty if nothing.

    Quantised matrices may have other groups, or zero points: they are compared by what they stand for.
    """
    wanted, held = (parameters.flat(tree, is_leaf=quantisation.is_quantised) for tree in (expected, got))
    return parameters.differences(wanted, held, _shape)


def _shape(x: Any) -> str:
    """Writes a dtype and a shape.

    >>> _shape(jnp.ones((2, 3)))
    'float32[2, 3]'
    >>> _shape({"int4": jnp.ones((2, 8, 32), jnp.int4), "scale": jnp.ones((8, 2))})
    'quantised[8, 64]'
    """
    if quantisation.is_quantised(x):
        if not quantised.is_whole(x):
            return " with ".join(f"{name} {_shape(part)}" for name, part in x.items())
        return f"quantised{list(quantised.shape(x))}"
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"


def is_folder(folder: Path) -> bool:
    """Tells whether there is a checkpoint: a folder with a manifest."""
    return (folder / MANIFEST).is_file()


def open_model(folder: Path) -> Reader:
    """Opens a checkpoint."""
    folder = folder.expanduser().absolute()
    manifest = read_manifest(folder)

    def tokenizer() -> Any:
        loaded, size = tokenizer_of(folder), manifest.model.vocab_size
        if (ids := token_ids.size(loaded)) > size:
            raise CheckpointError(
                f"{folder}: the tokenizer has ids up to {ids - 1}, but the model only up to {size - 1}: "
                "save the checkpoint again, with the tokenizer that the model was trained with"
            )
        return loaded

    return Reader(
        folder,
        manifest.name,
        config=lambda: manifest.model,
        tokenizer=tokenizer,
        params=lambda dtype, mesh: restore(folder, dtype, mesh)[:2],
        stored_dtype=lambda: manifest.dtype,
        draft_tokens=lambda: read_draft_tokens(folder, manifest),
    )


FORMAT = ModelFormat("jaxspec", is_folder, open_model)
"""A checkpoint of jaxspec: how it is recognised and opened."""
