"""Patterns that a text has to match: a choice among strings, a regular expression, a JSON
schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxspec.core import token_ids
from jaxspec.structured import schemas

NAMES = ("choices", "regex", "json_schema")
"""The options that ask for structured output."""


class Pattern(NamedTuple):
    """A pattern, hashable: the same pattern is compiled once."""

    # the strings that are allowed; None: `regex` says what is
    choices: tuple[str, ...] | None = None
    regex: str | None = None  # a regular expression that the whole text matches, in Python's syntax
    # the JSON text of the schema that the expression was made of; None: it was given as it is
    schema: str | None = None

    def __str__(self) -> str:
        """The pattern in an error, short."""
        if self.choices is not None:
            return f"choices={list(self.choices)!r:.80}"
        if self.schema is None:
            return f"regex={self.regex!r:.80}"
        return f"json_schema={self.schema:.80}"


def patterns_of(options: Mapping[str, Any], batch: int) -> list[Pattern | None]:
    """Reads the options of structured output: a pattern for each row, None for one whose text is
    free.

    Raises:
        ValueError, TypeError: an option has another type, or values for another number of rows; a
            row has two patterns; or a schema has an unsupported keyword.

    >>> patterns_of({"choices": ["yes", "no"], "regex": None}, 2)[1].choices
    ('yes', 'no')
    >>> patterns_of({"regex": ["[0-9]+", None]}, 2)
    [Pattern(choices=None, regex='[0-9]+', schema=None), None]
    """
    rows: list[Pattern | None] = [None] * batch
    names = [name for name in NAMES if options.get(name) is not None]
    differ = batch > 1 and any(is_per_row(name, options[name]) for name in names)
    for name in names:
        for index, value in enumerate(rows_of(name, options[name], batch)):
            if value is None:
                continue
            earlier = rows[index]
            if earlier is not None:
                if differ:
                    fault = f"row {index} has {name} and {earlier}"
                else:
                    fault = f"{name} is given with {earlier}"
                raise ValueError(f"{fault}: expected one of {', '.join(NAMES)}")
            rows[index] = _READERS[name](value)
    return rows


def pattern_of(options: Mapping[str, Any]) -> Pattern | None:
    """Reads the pattern of a single row among its options; a list of choices is one value.

    >>> pattern_of({"choices": ["a", "b"], "seed": 3}), pattern_of({"seed": 3})
    (Pattern(choices=('a', 'b'), regex=None, schema=None), None)
    """
    return patterns_of(
        {name: [options[name]] for name in NAMES if options.get(name) is not None}, 1
    )[0]


def rows_of(name: str, value: Any, batch: int) -> list[Any]:
    """Returns an option's value for each row: one value holds for all of them.

    >>> rows_of("choices", ["a", "b"], 2), rows_of("choices", [["a"], None], 2)
    ([['a', 'b'], ['a', 'b']], [['a'], None])
    """
    if not is_per_row(name, value):
        return [value] * batch
    if len(value) != batch:
        raise ValueError(
            f"{name} has {len(value)} values for {batch} rows: expected one, or one for each row"
        )
    return list(value)


def is_per_row(name: str, value: Any) -> bool:
    """Tells whether an option has a value for each row. Choices then are lists of lists of
    strings.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return name != "choices" or (
        len(value) > 0 and not any(isinstance(entry, str) for entry in value)
    )


def _choices(value: Any) -> Pattern:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError(f"choices is {value!r:.80}: expected a list of strings, at least one")
    wrong = [choice for choice in value if not isinstance(choice, str) or not choice]
    if wrong:
        raise ValueError(f"choices has {wrong[0]!r:.80}: expected strings that are not empty")
    token_ids.check_unicode(value, "choices")
    return Pattern(choices=tuple(value))


def _regex(value: Any) -> Pattern:
    if not isinstance(value, str):
        raise TypeError(f"regex is {value!r:.80}: expected a string")
    token_ids.check_unicode(value, "regex")
    return Pattern(regex=value)


def _json_schema(value: Any) -> Pattern:
    text = schemas.as_text(value)
    return Pattern(regex=schemas.regex_of(text), schema=text)


_READERS = {"choices": _choices, "regex": _regex, "json_schema": _json_schema}
