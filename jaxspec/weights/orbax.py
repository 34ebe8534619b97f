"""Checkpoints: a folder with params/ (Orbax), manifest.toml, tokenizer.json and tokenizer_config.json.

The manifest holds the model's shape, and size and SHA-256 of every other file: a damaged or half-copied
checkpoint is refused, by the name of the file, before anything is loaded. Matrices are stored as float32,
bfloat16 or int8 (`jaxspec.weights.int8`); all other leaves stay float32. Orbax is handed NumPy arrays, so
that a checkpoint says nothing of the devices it was saved on and loads on any, without a warning.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import re
import shutil
import tomllib
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.base import Params
from jaxspec.recipes import CONFIGS, NETS, RecipeError, build
from jaxspec.weights import int8

FORMAT = 1
DTYPES = ("float32", "bfloat16", "int8")
MANIFEST = "manifest.toml"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
LISTED = 8  # of many similar complaints, as many are printed


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message says what was found and what was expected."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What manifest.toml says.

    Attributes:
        format: version of the folder's layout.
        name, family: of the model; the family ("t5", "gpt", "decoder") says which network it is.
        dtype: how matrices are stored: "float32", "bfloat16" or "int8".
        parameters: number of weights (scales of int8 matrices not counted).
        model: the configuration of the family.
        files: [size in bytes, SHA-256] of every other file, by its path in the folder.
        about: where the weights come from and what was measured; plain values.
    """

    format: int
    name: str
    family: str
    dtype: str
    parameters: int
    model: Any
    files: dict
    about: dict


def save(
    folder: str | Path,
    params: Params,
    config: Any,
    tokenizer_folder: str | Path,
    *,
    name: str,
    family: str,
    dtype: str,
    about: dict[str, Any],
    overwrite: bool = False,
) -> Manifest:
    """Writes a checkpoint: the whole folder, or nothing.

    Everything is written beside `folder` and renamed into place at the end: a crash leaves what was there.

    Args:
        folder: where to; its name is usually the model's.
        params: the tree that `init` of the family's network makes.
        config: the network's configuration.
        tokenizer_folder: holds tokenizer.json and tokenizer_config.json, which are copied.
        name, family: see `Manifest`.
        dtype: how to store matrices. What is stored is the model: "int8" rounds it once and for all.
        about: provenance and measurements, such as {"licence": "...", "heldout_loss": 2.9}: strings, numbers,
            booleans and lists of these.
        overwrite: whether a checkpoint that is there already may be replaced.

    Raises:
        CheckpointError: there is something at `folder` already, the parameters are not those of `config` or
            not finite, or an argument is not as described.
    """
    folder, tokenizer_folder = Path(folder).expanduser().resolve(), Path(tokenizer_folder).expanduser()
    _check_arguments(config, tokenizer_folder, family, dtype)
    _check_free(folder, overwrite)
    params = jax.tree.map(lambda x: np.asarray(x).astype(np.float32, copy=False), params)
    if complaint := _differences(_abstract(config, family), params):
        raise CheckpointError(f"{name}: the parameters are not those of its configuration:{complaint}")
    if bad := [path for path, x in _by_path(params).items() if not np.isfinite(x).all()]:
        raise CheckpointError(f"{name}: NaN or infinity in {_some(bad)}: nothing was saved")
    beside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    beside.mkdir(parents=True)
    try:
        _write_params(beside / "params", _stored(params, dtype))
        for file in TOKENIZER:
            shutil.copyfile(tokenizer_folder / file, beside / file)
        count = sum(x.size for x in jax.tree.leaves(params))
        manifest = Manifest(FORMAT, name, family, dtype, count, config, _fingerprints(beside), about)
        _write_manifest(beside / MANIFEST, manifest)
        put_in_place(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return manifest


def restore(folder: str | Path) -> tuple[Params, Any, Manifest]:
    """Reads a checkpoint, having checked every file of it.

    Returns:
        The parameters (float32, on the default device), the network's configuration, and the manifest.

    Raises:
        CheckpointError: there is none, it is damaged, or its parameters are not those of its configuration.
    """
    folder = Path(folder).expanduser().absolute()
    manifest = read_manifest(folder)
    _check_files(folder, manifest.files)
    abstract = _abstract(manifest.model, manifest.family)
    stored = _read_params(folder, jax.eval_shape(lambda params: _stored(params, manifest.dtype), abstract))
    params = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float32), int8.dequantise(stored))
    return params, manifest.model, manifest


def read_manifest(folder: str | Path) -> Manifest:
    """What a checkpoint says about itself; reads no weights.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged or of another version.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        siblings = {p.parent.name for p in folder.parent.glob(f"*/{MANIFEST}")}
        found = "a file, not a folder" if folder.exists() else "nothing there"
        raise CheckpointError(f"no checkpoint at {folder}: {found}{suggest(folder.name, siblings)}")
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no jaxspec checkpoint: it has no {MANIFEST}. "
            "Expected a folder that jaxspec.weights.orbax.save wrote, or a Hugging Face folder, with its config.json"
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if table.get("format") != FORMAT:
            raise RecipeError(f"format is {table.get('format')!r}, this version of jaxspec reads format {FORMAT}")
        if table.get("family") not in CONFIGS:
            raise RecipeError(f"family is {table.get('family')!r}, expected one of {sorted(CONFIGS)}")
        model = build(CONFIGS[table["family"]], table.get("model", {}), "[model]")
        manifest = build(Manifest, {**table, "model": model}, "it")
        _check_manifest(manifest)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecipeError) as error:
        raise CheckpointError(
            f"the manifest {path} cannot be used: {error}. Copy or build the checkpoint again"
        ) from error
    return manifest


def cast(params: Params, dtype: Any) -> Params:
    """Matrices as `dtype`; other leaves are left alone, since norms and position biases compute in float32.

    >>> params = {"norm": {"scale": jnp.ones(4)}, "head": {"weight": jnp.ones((8, 4))}}
    >>> {name: str(x.dtype) for name, x in _by_path(cast(params, jnp.bfloat16)).items()}
    {'head/weight': 'bfloat16', 'norm/scale': 'float32'}
    """

    def leaf(path: tuple[Any, ...], x: Any) -> Any:
        return x.astype(dtype) if int8.is_matrix(path, x) else x

    return jax.tree_util.tree_map_with_path(leaf, params)


def suggest(wanted: str, names: Iterable[str]) -> str:
    """The end of an error message that offers the nearest of several names.

    >>> suggest("debian-t5-bass", ["debian-t5-base", "gpt-6m"])
    ": did you mean 'debian-t5-base'?"
    >>> suggest("elsewhere", ["gpt-6m"])
    ''
    """
    near = difflib.get_close_matches(wanted, sorted(names), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def to_toml(table: dict[str, Any]) -> str:
    """A table of plain values, and of tables of plain values, as TOML.

    >>> table = {"name": 'a "b"', "model": {"dim": 4, "rates": [0.5, 1e-05], "tied head": True}}
    >>> print(to_toml(table), end="")
    name = "a \\"b\\""
    <BLANKLINE>
    [model]
    dim = 4
    rates = [0.5, 1e-05]
    "tied head" = true
    """
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"{_key(key)} = {_value(value, key)}" for key, value in plain.items()]
    for name, inner in table.items():
        if isinstance(inner, dict):
            lines += ["", f"[{_key(name)}]"]
            lines += [f"{_key(key)} = {_value(value, f'{name}.{key}')}" for key, value in inner.items()]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quoted(key)


def _value(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):  # float.__repr__: a NumPy float64 is one too, but prints its type
        return float.__repr__(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item, where) for item in value)}]"
    raise CheckpointError(f"{where} is {value!r}: a manifest holds strings, ints, floats, booleans and lists of these")


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which only TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_arguments(config: Any, tokenizer_folder: Path, family: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype is {dtype!r}, expected one of {DTYPES}")
    if family not in CONFIGS:
        raise CheckpointError(f"family is {family!r}, expected one of {sorted(CONFIGS)}")
    if not isinstance(config, CONFIGS[family]):
        expected = CONFIGS[family].__name__
        raise CheckpointError(f"config is a {type(config).__name__}, family {family!r} expects a {expected}")
    if absent := [file for file in TOKENIZER if not (tokenizer_folder / file).is_file()]:
        raise CheckpointError(f"the tokenizer folder {tokenizer_folder} lacks {' and '.join(absent)}")


def _check_free(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{folder} exists: pass overwrite=True to replace it, or choose another name")
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} is no checkpoint (it has no {MANIFEST}): it will not be overwritten")


def _check_manifest(manifest: Manifest) -> None:
    if manifest.dtype not in DTYPES:
        raise RecipeError(f"dtype is {manifest.dtype!r}, expected one of {DTYPES}")
    for file, entry in manifest.files.items():
        if not (isinstance(entry, list) and [type(item) for item in entry] == [int, str]):
            raise RecipeError(f"[files] {file} must be [size, sha256], got {entry!r}")
    if absent := [file for file in ("params/_METADATA", *TOKENIZER) if file not in manifest.files]:
        raise RecipeError(f"[files] does not list {' and '.join(absent)}")


def _check_files(folder: Path, files: dict[str, list[Any]]) -> None:
    complaints = []
    for file, (size, digest) in files.items():
        path = folder / file
        if not path.is_file():
            complaints.append(f"{file} is missing")
        elif (got := path.stat().st_size) != size:
            complaints.append(f"{file} has {got} bytes, expected {size}")
        elif (got := _sha256(path)) != digest:
            complaints.append(f"{file} is altered (SHA-256 {got[:12]}..., expected {digest[:12]}...)")
    if complaints:
        raise CheckpointError(f"{folder} is damaged: {_some(complaints)}. Copy or build the checkpoint again")


def _fingerprints(folder: Path) -> dict[str, list[Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): [path.stat().st_size, _sha256(path)] for path in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(path: Path, manifest: Manifest) -> None:
    table = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    model = dataclasses.asdict(manifest.model)
    # TOML has no null: a None is left out, and is the default of each field that may be None.
    table["model"] = {key: value for key, value in model.items() if value is not None}
    path.write_text(to_toml(table), encoding="utf-8", newline="\n")


def put_in_place(new: Path, folder: Path) -> None:
    """Renames a folder that is complete; what was there goes only when that has worked."""
    if not folder.exists():
        new.rename(folder)
        return
    old = new.with_suffix(".old")
    folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old)


def _write_params(folder: Path, params: Params) -> None:
    import orbax.checkpoint as ocp  # here and below: slow to import, and needed only where files are touched

    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder, ocp.args.PyTreeSave(jax.tree.map(np.asarray, params)))
    # It says where the folder was written, which is nobody's business; no local file system needs it.
    (folder / "commit_success.txt").unlink(missing_ok=True)


def _read_params(folder: Path, expected: Params) -> Params:
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(folder / "params").item_metadata.tree
        if complaint := _differences(expected, tree):
            raise CheckpointError(
                f"{folder}: the stored parameters are not those that {MANIFEST} describes:{complaint}"
            )
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return checkpointer.restore(folder / "params", ocp.args.PyTreeRestore(restore_args=arguments))


@functools.cache
def _abstract(config: Any, family: str) -> Params:
    """Shapes and types of the network's parameters."""
    return jax.eval_shape(lambda: NETS[family].init(config, jax.random.key(0)))


def _stored(params: Params, dtype: str) -> Params:
    """The parameters as they lie in the file."""
    return int8.quantise(params) if dtype == "int8" else cast(params, jnp.dtype(dtype))


def _by_path(tree: Params) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in flat}


def _differences(expected: Params, got: Params) -> str:
    """What is missing, what is unexpected, what has another shape or type; empty if nothing."""
    want, have = _by_path(expected), _by_path(got)
    parts = {
        "missing": [path for path in want if path not in have],
        "unexpected": [path for path in have if path not in want],
        "wrong": [
            f"{path} is {_shape(have[path])}, expected {_shape(x)}"
            for path, x in want.items()
            if path in have and _shape(have[path]) != _shape(x)
        ],
    }
    return "".join(f"\n  {what}: {_some(paths)}" for what, paths in parts.items() if paths)


def _shape(x: Any) -> str:
    """
    >>> _shape(jnp.ones((2, 3)))
    'float32[2, 3]'
    """
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
