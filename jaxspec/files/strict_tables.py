"""Builds frozen dataclasses from TOML tables, strictly: keys and types must match."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from jaxspec.core.checks import suggest


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names the key and the expected value."""


def build(kind: type, table: dict[str, Any], where: str) -> Any:
    """Builds a frozen dataclass from a table, or raises a RecipeError that names the key."""
    if not isinstance(table, dict):
        raise RecipeError(f"{where} must be a table, got {table!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key in table:
        if key not in fields:
            raise RecipeError(f"{where} has an unknown key {key!r}{suggest(key, fields)}")
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if name not in table and required:
            raise RecipeError(f"{where} lacks the key {name!r}")
    values = {key: _convert(value, hints[key], f"{where} {key}") for key, value in table.items()}
    try:
        return kind(**values)
    except RecipeError:
        raise
    except ValueError as error:  # raised by the dataclass's checks
        raise RecipeError(f"{where} {error}") from error


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Converts a value to a field's type. Raises RecipeError if it does not have that type."""
    if dataclasses.is_dataclass(value):
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return build(typing.cast(type, hint), value, where)
    hint = typing.cast(Any, hint)
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is types.UnionType:  # X | None
        if value is None:
            return value
        return _convert(value, args[0], where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise RecipeError(f"{where} must be a list, got {value!r}")
        item_hints = args
        if args[1:] == (Ellipsis,):  # tuple[X, ...]
            item_hints = args[:1] * len(value)
        if len(item_hints) != len(value):
            raise RecipeError(f"{where} must have {len(item_hints)} entries, got {value!r}")
        return tuple(
            _convert(item, item_hint, where)
            for item, item_hint in zip(value, item_hints, strict=True)
        )
    if hint is Any:
        return value
    # In Python a bool is an int, in TOML it is not.
    is_bool = isinstance(value, bool)
    if hint is float and isinstance(value, int) and not is_bool:
        return float(value)
    if not isinstance(value, hint) or (is_bool and hint is not bool):
        raise RecipeError(f"{where} must be of type {hint.__name__}, got {value!r}")
    return value
