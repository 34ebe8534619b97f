"""The JSON files that a model was read from. Its configuration is read from them, and folders and
checkpoints that it is saved in hold them again.

A model keeps them as tables by the files' names: config.json, and perhaps generation_config.json.
A configuration that was made in code has no such tables; a few families can write them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.files.strict_tables import RecipeError, build
from jaxspec.weights import generation_config, hf_families
from jaxspec.weights.hf_families import Family, FamilyError
from jaxspec.weights.hf_families.common import read_object
from jaxspec.weights.tensors import CheckpointError

CONFIG = "config.json"
GENERATION = generation_config.FILE
SourceFiles = Mapping[str, Mapping[str, Any]]
START = "decoder_start_token_id"
# Fields of a configuration that may have changed since it was read, and their keys. A T5's first
# key counts for the second field, too, where a file lacks the second.
MAY_CHANGE = {
    "tied_head": "tie_word_embeddings",
    "scaled_head": "scale_decoder_outputs",
    "start_token": START,
}
# fields that are read from generation_config.json
GENERATED = {"end_tokens", "begin_tokens", "banned_tokens", "speech"}
# of tables that describe no network
ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)
TABLES = ("model", "generation", "fields")  # of a manifest
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of other files: of code that is not copied, and of tensors as they were stored.
DROPPED = ("auto_map", "dtype", "quantization_config", "torch_dtype")


def read_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads the tables of a Hugging Face folder.

    Raises:
        CheckpointError: one of them cannot be read; the message names it.
    """
    tables = {}
    for name in (CONFIG, GENERATION):
        path = folder / name
        if name == GENERATION and not path.is_file():
            continue
        try:
            tables[name] = read_object(path)
        except (OSError, ValueError, RecursionError) as error:
            if name == CONFIG:
                raise _refused(path, error) from error
            raise CheckpointError(
                f"{path} cannot be used: {error}. Download it again, or remove it"
            ) from error
    return tables


def configured(source: SourceFiles, path: Path = Path(CONFIG)) -> tuple[Family, Any]:
    """Reads the family that config.json names, and the configuration of its network.

    Args:
        source: the tables.
        path: the place of config.json, for messages.

    Raises:
        CheckpointError: a value of generation_config.json is impossible.
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError: jaxspec cannot load the
            model, or a value of config.json is impossible.
    """
    table = dict(source[CONFIG])
    family = hf_families.of(table)
    generation = generation_config.read(path, table, source.get(GENERATION))
    config = dataclasses.replace(family.read(table | generation.starts), end_tokens=generation.ends)
    try:
        return family, family.read_generation(config, generation.table)
    except ERRORS as error:
        raise _refused(generation.path, error) from error


def read(source: SourceFiles, path: Path) -> tuple[Family, Any]:
    """Reads a folder's tables as `configured` does.

    Raises:
        CheckpointError: jaxspec cannot load the model, or a value is impossible.
    """
    try:
        return configured(source, path)
    except CheckpointError:
        raise
    except ERRORS as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} describes no model that can be loaded: {reason(error)}")


def reason(error: Exception) -> str:
    """Puts an error of ours in its words; any other with its kind, which says more than its words
    alone.
    """
    if type(error) in (FamilyError, ValueError, OSError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def written(
    config: Any, source: SourceFiles | None, ids: Mapping[str, int]
) -> tuple[Family, dict[str, dict[str, Any]]]:
    """Returns the family and the tables of a configuration: those that it was read from, with the
    changes since then.

    Args:
        config: the configuration.
        source: the tables that it was read from; None: it was made otherwise.
        ids: the tokenizer's special ids by their keys, for a config.json that lacks them.

    Raises:
        FamilyError: the tables cannot express the configuration, and no family writes others.
    """
    tables = None if source is None else _changed(config, source)
    if tables is None:
        _, table = hf_families.describe(config)
        tables = _with_beginnings(config, {CONFIG: table})
    family = hf_families.of(tables[CONFIG])
    table = tables[CONFIG]
    table |= {key: value for key, value in ids.items() if table.get(key) is None}
    if GENERATION in tables:
        tables[GENERATION] = _ids(table) | tables[GENERATION]
    return family, tables


def _changed(config: Any, source: SourceFiles) -> dict[str, dict[str, Any]] | None:
    """Returns the tables with the changes of a configuration; None if they cannot express it."""
    family = hf_families.of(dict(source[CONFIG]))
    kept = {key: x for key, x in family.text(source[CONFIG]).items() if key not in DROPPED}
    table = {"model_type": family.model_types[0]} | kept
    # The text half of a model that also sees may be of another family.
    family = hf_families.of(table)
    if table["model_type"] != family.model_types[0]:
        table |= {"model_type": family.model_types[0], "architectures": [family.architecture]}
    table = {"architectures": [family.architecture]} | table
    for field, key in MAY_CHANGE.items():
        value = vars(config).get(field)
        if field not in family.unwritten and vars(family.read(table)).get(field) != value:
            table[key] = value
    generation = source.get(GENERATION)
    tables = {CONFIG: table} | ({} if generation is None else {GENERATION: dict(generation)})
    tables = _with_beginnings(config, tables)
    read = configured(tables)[1]
    if dataclasses.replace(read, dtype=config.dtype, **beside(family, read, config)) != config:
        return None
    return tables


def to_toml(source: SourceFiles, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tables of a manifest: "model" is config.json, "generation" generation_config.json.

    TOML has no null, which a config.json may tell from a missing key: it is written as "null".

    >>> to_toml({"config.json": {"model_type": "mistral", "sliding_window": None}}, {})
    {'model': {'model_type': 'mistral', 'sliding_window': 'null'}}
    """
    tables = {"model": source[CONFIG], "generation": source.get(GENERATION), "fields": fields}
    return {name: _replaced(table, None, "null") for name, table in tables.items() if table}


def from_toml(manifest: dict[str, Any]) -> tuple[SourceFiles, Any]:
    """Takes the tables of `to_toml` out of a manifest, and returns them with their configuration.

    >>> manifest = to_toml({"config.json": {"model_type": "gpt2", "n_embd": 8}}, {})
    >>> from_toml(manifest)
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: it lacks 'vocab_size'
    """
    read = {name: _replaced(manifest.pop(name, {}), "null", None) for name in TABLES}
    source = {CONFIG: read["model"]}
    if read["generation"]:
        source[GENERATION] = read["generation"]
    family, config = configured(source)
    fields = read["fields"]
    elsewhere = sorted(set(fields) - set(family.unwritten))
    if elsewhere:
        raise RecipeError(
            f"[fields] has {', '.join(elsewhere)}: expected some of {', '.join(family.unwritten)}, "
            "for which config.json has no key"
        )
    return source, build(type(config), vars(config) | fields, "[fields]")


def unread(source: SourceFiles) -> Iterator[str]:
    """Yields the keys of config.json that its family does not read.

    >>> gpt = {"model_type": "gpt2", "vocab_size": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
    >>> gpt |= {"n_positions": 16, "n_inner": None, "n_heads": 4}
    >>> list(unread({"config.json": gpt}))
    ['n_heads']
    """
    _, expected = configured(source)

    def without_effect(table: Mapping[str, Any], outer: Callable[[Any], dict]) -> Iterator[str]:
        for key, value in table.items():

            def changed(new: Any, key: str = key) -> dict:
                return outer({**table, key: new})

            try:
                # A key that is read does not take an object that nothing is known of.
                is_read = configured({**source, CONFIG: changed(object())})[1] != expected
            except ERRORS:
                is_read = True
            if not is_read:
                yield key
            elif isinstance(value, Mapping):
                yield from without_effect(value, changed)

    return without_effect(source[CONFIG], dict)


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """Replaces a value wherever it is in a table."""
    if isinstance(value, Mapping):
        return {key: _replaced(x, old, new) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(x, old, new) for x in value]
    return new if value == old else value


def beside(family: Family, read: Any, config: Any) -> dict[str, Any]:
    """Returns the fields of a configuration that config.json has no key for, and that differ from
    those that were read.
    """
    names = set(family.unwritten) - GENERATED - {"dtype"}
    return {name: vars(config)[name] for name in names if vars(config)[name] != vars(read)[name]}


def _with_beginnings(config: Any, tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adds the tokens that begin and end a text, as far as the tables have others."""
    family, before = configured(tables)
    was = family.write_generation(before)
    now = family.write_generation(config)
    changes = {key: now.get(key) for key in was | now if now.get(key) != was.get(key)}
    if before.end_tokens != config.end_tokens:
        changes |= {"eos_token_id": list(config.end_tokens)}
    if vars(before).get("start_token") != vars(config).get("start_token"):
        changes |= {START: config.start_token}
    if not changes:
        return tables
    return tables | {GENERATION: {**tables.get(GENERATION, _ids(tables[CONFIG])), **changes}}


def _ids(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ids of config.json, which transformers takes from generation_config.json alone
    where that exists.
    """
    return {key: table[key] for key in (*IDS, START) if key in table}
