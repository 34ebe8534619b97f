"""JSON schemas as regular expressions. A keyword that is not obeyed is refused by its place; none
is passed over.

The texts are JSON on one line, with at most one space after a comma or a colon. Properties stand in
the order of the schema, and only those that it names. Whole numbers have at most 19 digits, unless
a bound has more.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.core import token_ids
from jaxspec.structured import byte_dfa, ecma

NOTES = {  # keywords that allow and forbid nothing
    *(
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
    ),
    *("$schema", "$id", "$comment", "$defs", "definitions", "contentMediaType", "contentEncoding"),
}
LONGEST = 2**20  # characters of an expression
SPACE = "[ ]?"
COMMA = f",{SPACE}"
CHARACTER = r'(?:[^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])'
STRING = f'"{CHARACTER}*"'
WHOLE = "(?:0|[1-9][0-9]{0,18})"
FRACTION = r"(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,2})?"
SCALAR = f"(?:{STRING}|-?{WHOLE}{FRACTION}|true|false|null)"
DATE = (
    "[12][0-9]{3}-"
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
TIME = rf"{CLOCK}(?:\.[0-9]{{1,6}})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# A last label of digits would be a number's end, as in 1.999, which URL parsers read as an IPv4
# address and refuse. With two labels of at most 61 letters before it a name has at most 148, where
# DNS ends at 253, an address 254.
LABEL = "[a-z0-9]{1,30}(?:-[a-z0-9]{1,30})?"
HOST = rf"{LABEL}(?:\.{LABEL})?\.[a-z]{{2,24}}"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": rf"[a-z0-9_+-]{{1,30}}(?:\.[a-z0-9_+-]{{1,30}})?@{HOST}",
    "uri": rf"https?://{HOST}(?:/[A-Za-z0-9._~-]*)*",
    "ipv4": rf"(?:{OCTET}\.){{3}}{OCTET}",
}


def as_text(schema: Any) -> str:
    """Returns the JSON text of a schema: a dict, JSON text, or a class of pydantic.

    >>> as_text({"type": "integer"}), as_text('{"type":  "null"}')
    ('{"type": "integer"}', '{"type": "null"}')
    """
    expected = "a dict, the JSON text of an object, or a class of pydantic"
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json_schema is not JSON ({error}): expected {expected}") from None
        if not isinstance(schema, dict):
            raise ValueError(f"json_schema is {schema!r:.80}: expected {expected}")
    if not isinstance(schema, Mapping):
        raise TypeError(f"json_schema is {schema!r:.80}: expected {expected}")
    token_ids.check_unicode(schema, "json_schema")
    return json.dumps(schema)


@functools.lru_cache(maxsize=256)
def regex_of(text: str) -> str:
    """Returns the regular expression of a schema's texts.

    Raises:
        ValueError: a keyword that is not supported, by its place in the schema; or an expression
            that is too long.

    >>> regex_of('{"const": "a"}')
    '(?:"a")'
    >>> regex_of('{"type": "object", "properties": {"age": {"type": "integer", "multipleOf": 5}}}')
    Traceback (most recent call last):
    ValueError: json_schema has multipleOf at #/properties/age, which is not supported there: leave it out, or use regex
    """
    root = json.loads(text)
    try:
        expression = _Part(root, root).expression()
    except (AttributeError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"json_schema is {text:.80}, which is not JSON schema ({error}): check its keywords"
        ) from None
    if len(expression) > LONGEST:
        raise ValueError(
            f"json_schema makes an expression of {len(expression):,} characters: {_largest(text)}"
        )
    return expression


class _Part:
    """A part of a schema: its keywords, its path in the whole for errors, and the references that
    lead to it.
    """

    def __init__(self, root: Any, schema: Any, path: str = "#", seen: tuple[str, ...] = ()):
        self._root = root
        self._path = path
        self._seen = seen
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise self._refused(f"has {schema!r:.40}", ": expected an object of keywords")
        self._unread = {name: value for name, value in schema.items() if name not in NOTES}

    def expression(self) -> str:
        """Returns the expression of the part's texts. Readers take out the keywords that they
        obey.
        """
        expression = self._read()
        if self._unread:
            supported = ", which is not supported there: leave it out, or use regex"
            raise self._refused(f"has {min(self._unread)}", supported)
        return expression

    def _refused(self, fault: str, advice: str) -> ValueError:
        return ValueError(f"json_schema {fault} at {self._path}{advice}")

    def _inner(self, schema: Any, *steps: Any) -> str:
        """Reads a part of this part."""
        path = "/".join([self._path, *map(str, steps)])
        return _Part(self._root, schema, path, self._seen).expression()

    def _read(self) -> str:
        unread = self._unread
        if "$ref" in unread:
            name = unread.pop("$ref")
            if name in self._seen:
                raise self._refused(
                    "refers to itself", f" ({name}): its texts are no regular language"
                )
            return _Part(self._root, self._referred(name), name, (*self._seen, name)).expression()
        if "const" in unread:
            return self._one_of([unread.pop("const")])
        if "enum" in unread:
            return self._one_of(unread.pop("enum"))
        for name in ("anyOf", "oneOf", "allOf"):
            if name in unread:
                return self._combined(name, unread.pop(name))
        implied = {"properties": "object", "items": "array", "prefixItems": "array"}
        types = self._types() or [implied[name] for name in implied if name in unread][:1]
        if not types:
            lists = self._listed(r"\[", SCALAR, r"\]", 0, None)
            return _any_of(
                [SCALAR, lists, self._listed(r"\{", f"{STRING}:{SPACE}{SCALAR}", r"\}", 0, None)]
            )
        constant = {"null": "null", "boolean": "(?:true|false)"}
        return _any_of(constant.get(name) or getattr(self, f"_{name}")() for name in types)

    def _one_of(self, values: Any) -> str:
        """Returns the expression of `const` and `enum`: the values of an allowed type."""
        if not isinstance(values, list):
            raise self._refused(f"has enum {values!r:.40}", ": expected a list of values")
        types = self._types()
        fitting = [
            value for value in values if not types or any(_is_a(value, name) for name in types)
        ]
        if not fitting:
            raise self._refused("allows no value", ": none is of the type that it asks for")
        return _any_of(map(_literal, fitting))

    def _combined(self, name: str, parts: Any) -> str:
        """Returns the expression of `anyOf`, `oneOf` or `allOf`."""
        if not isinstance(parts, list) or not parts:
            raise self._refused(f"has {name} {parts!r:.40}", ": expected a list of schemas")
        if name == "allOf" and len(parts) != 1:
            raise self._refused(f"has allOf of {len(parts)} schemas", ": merge them into one")
        if name == "oneOf" and not self._are_disjoint(parts):
            raise self._refused("has oneOf", ", of which two may hold for one text: use anyOf")
        return _any_of(self._inner(schema, name, n) for n, schema in enumerate(parts))

    def _string(self) -> str:
        unread = self._unread
        if "pattern" in unread:
            return f'"(?:{self._pattern(unread.pop("pattern"))})"'
        if "format" in unread:
            name = unread.pop("format")
            if name not in FORMATS:
                formats = f": expected one of {', '.join(FORMATS)}; or use pattern"
                raise self._refused(f"has the format {name!r}", formats)
            return f'"{FORMATS[name]}"'
        return (
            f'"{CHARACTER}{self._times(unread.pop("minLength", 0), unread.pop("maxLength", None))}"'
        )

    def _integer(self) -> str:
        unread = self._unread
        from_below = []
        if "minimum" in unread:
            from_below = [self._whole(unread.pop("minimum"))]
        if "exclusiveMinimum" in unread:
            from_below.append(self._whole(unread.pop("exclusiveMinimum")) + 1)
        from_above = []
        if "maximum" in unread:
            from_above = [self._whole(unread.pop("maximum"))]
        if "exclusiveMaximum" in unread:
            from_above.append(self._whole(unread.pop("exclusiveMaximum")) - 1)
        least = max(from_below, default=None)
        largest = min(from_above, default=None)
        if least is not None and largest is not None and least > largest:
            raise self._refused("allows no integer", f": from {least} to {largest}")
        return integers(least, largest)

    def _number(self) -> str:
        least = self._unread.get("minimum")
        positive = least == 0 and not isinstance(least, bool)
        if positive:  # other bounds are refused
            del self._unread["minimum"]
        return f"{'' if positive else '-?'}{WHOLE}{FRACTION}"

    def _array(self) -> str:
        unread = self._unread
        least = unread.pop("minItems", 0)
        limit = unread.pop("maxItems", None)
        if unread.get("uniqueItems") is False:
            del unread["uniqueItems"]
        items = unread.pop("items", True)
        if "prefixItems" in unread:
            parts = unread.pop("prefixItems")
            if least > len(parts) or (limit is not None and limit < len(parts)):
                raise self._refused(f"has {len(parts)} prefixItems", ": expected as many items")
            expressions = [self._inner(schema, "prefixItems", n) for n, schema in enumerate(parts)]
            return rf"\[{COMMA.join(expressions)}\]"
        return self._listed(
            r"\[", SCALAR if items is True else self._inner(items, "items"), r"\]", least, limit
        )

    def _object(self) -> str:
        unread = self._unread
        additional = unread.pop("additionalProperties", True)
        properties = unread.pop("properties", {})
        required = list(unread.pop("required", ()))
        missing = [name for name in required if name not in properties]
        if missing:
            raise self._refused(
                f"requires {missing[0]!r}", " and does not describe it: add a property"
            )
        if properties:
            pairs = [
                (
                    f"{_literal(name)}:{SPACE}{self._inner(schema, 'properties', name)}",
                    name in required,
                )
                for name, schema in properties.items()
            ]
            return rf"\{{{_first(pairs)}\}}"
        if additional is False:
            return r"\{\}"
        least = unread.pop("minProperties", 0)
        if least > 1:  # the same name might come twice
            raise self._refused(
                f"has minProperties {least}", ": expected at most 1, or named properties"
            )
        if additional is True:
            value = SCALAR
        else:
            value = self._inner(additional, "additionalProperties")
        return self._listed(
            r"\{", f"{STRING}:{SPACE}{value}", r"\}", least, unread.pop("maxProperties", None)
        )

    def _referred(self, name: str) -> Any:
        schema: Any = self._root
        for step in name.removeprefix("#").split("/")[1:] if name.startswith("#") else [name]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(schema, Mapping) or step not in schema:
                raise self._refused(
                    f"refers to {name!r}", ": expected a place in it, such as #/$defs/x"
                )
            schema = schema[step]
        return schema

    def _are_disjoint(self, parts: Sequence[Any]) -> bool:
        """Says whether at most one schema can hold: their types differ, or a constant that all of
        them require.
        """
        resolved = [
            self._referred(schema["$ref"]) if "$ref" in schema else schema for schema in parts
        ]
        types = [schema.get("type") for schema in resolved]
        kinds = {"number" if name == "integer" else name for name in types if isinstance(name, str)}
        if len(kinds) == len(parts):
            return True
        constants: dict[str, set[str]] = {}
        for schema in resolved:
            for name in schema.get("required", ()):
                described = schema.get("properties", {}).get(name, {})
                if "const" in described:
                    values = [described["const"]]
                else:
                    values = described.get("enum", ())
                if len(values) == 1:
                    constants.setdefault(name, set()).add(
                        json.dumps(_comparable(values[0]), sort_keys=True)
                    )
        return any(len(values) == len(parts) for values in constants.values())

    def _types(self) -> list[str]:
        """Takes out the types that a schema allows."""
        types = self._unread.pop("type", None)
        if types is None:
            return []
        types = [types] if isinstance(types, str) else list(types)
        if not types:
            raise self._refused("allows no type", ": expected at least one")
        json_types = ("null", "boolean", "string", "integer", "number", "array", "object")
        unknown = [name for name in types if name not in json_types]
        if unknown:
            raise self._refused(
                f"has the type {unknown[0]!r}", f": expected one of {', '.join(json_types)}"
            )
        # An integer is a number; a bound must hold for both, and is read once.
        return [name for name in types if not (name == "integer" and "number" in types)]

    def _listed(self, opening: str, entry: str, closing: str, least: Any, limit: Any) -> str:
        """Returns the expression of a list of so many entries."""
        self._times(least, limit)
        if limit == 0:
            return opening + closing
        further = self._times(max(least - 1, 0), None if limit is None else limit - 1)
        entries = f"{entry}(?:,{SPACE}{entry}){further}"
        return f"{opening}{entries if least else f'(?:{entries})?'}{closing}"

    def _times(self, least: Any, limit: Any) -> str:
        """Returns a quantifier.

        >>> _Part({}, {})._times(0, None), _Part({}, {})._times(2, 5)
        ('*', '{2,5}')
        """
        for bound in (least, limit):
            if bound is not None and (
                isinstance(bound, bool) or not isinstance(bound, int) or bound < 0
            ):
                raise self._refused(
                    f"has a bound of {bound!r}", ": expected a whole number, 0 or more"
                )
        if limit is not None and limit < least:
            raise self._refused(
                f"has bounds of {least} and {limit}", ": expected the second to be no less"
            )
        if (least, limit) == (0, None):
            return "*"
        return f"{{{least},{'' if limit is None else limit}}}"

    def _whole(self, bound: Any) -> int:
        if isinstance(bound, bool) or not isinstance(bound, int | float) or bound != int(bound):
            raise self._refused(
                f"has a bound of {bound!r} for an integer", ": expected a whole number"
            )
        return int(bound)

    def _pattern(self, pattern: Any) -> str:
        """Returns the inside of a string's pattern, without characters that JSON would escape."""
        is_whole = (
            isinstance(pattern, str)
            and pattern.startswith("^")
            and byte_dfa.ends_in_anchor(pattern)
        )
        if not is_whole:
            raise self._refused(
                f"has the pattern {pattern!r}", ": expected ^...$, for the whole string"
            )
        if "(?P" in pattern:
            raise self._refused(
                f"has the pattern {pattern!r}", ", with a named group: leave out its name"
            )
        try:
            re.compile(pattern)  # by itself: a group around it could close its brackets
            inside = f"(?:{ecma.as_python(pattern[1:-1])})"
            dfa = byte_dfa.from_regex(inside, shown=pattern)
        except (ValueError, re.error, OverflowError, RecursionError) as error:
            raise self._refused(f"has the pattern {pattern!r:.200}", f": {error}") from None
        reads = dfa.step[:, [*range(32), ord('"'), ord("\\")]] >= 0
        if reads.any():
            allowed = (
                ", which allows a quotation mark, a backslash or a control character. Leave them "
                "out: "
            )
            raise self._refused(
                f"has the pattern {pattern!r}", allowed + r'[^"\\\x00-\x1f] in place of .'
            )
        return inside


def _comparable(value: Any) -> Any:
    """Returns a constant as schemas compare it: 1.0 is 1.

    >>> _comparable({"a": [1.0, True]})
    {'a': [1, True]}
    """
    if isinstance(value, Mapping):
        return {name: _comparable(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(x) for x in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _is_a(value: Any, name: str) -> bool:
    """Says whether a value is of a type of JSON's."""
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    kinds = {"string": str, "integer": int, "number": int | float, "array": list, "object": dict}
    return name in kinds and isinstance(value, kinds[name])


def _any_of(expressions: Any) -> str:
    return f"(?:{'|'.join(expressions)})"


def _first(pairs: Sequence[tuple[str, bool]]) -> str:
    """Returns the expression of an object's first properties: each may be required, and needs no
    comma before it.
    """
    if not pairs:
        return ""
    (entry, required), *others = pairs
    begun = entry + "".join(f"{COMMA}{e}" if r else f"(?:{COMMA}{e})?" for e, r in others)
    if required:
        return begun
    return _any_of([begun, _first(others)])


def _literal(value: Any) -> str:
    """Returns the expression of a constant.

    >>> _literal({"a": [1, None]})
    '\\\\{"a":[ ]?\\\\[1,[ ]?null\\\\]\\\\}'
    """
    if isinstance(value, Mapping):
        entries = [f"{_literal(name)}:{SPACE}{_literal(x)}" for name, x in value.items()]
        return rf"\{{{COMMA.join(entries)}\}}"
    if isinstance(value, list):
        return rf"\[{COMMA.join(map(_literal, value))}\]"
    try:
        return re.escape(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError:
        raise ValueError(f"json_schema has the constant {value}, which JSON cannot write") from None


def integers(least: int | None, most: int | None) -> str:
    """Returns the expression of the whole numbers from `least` to `most`; None: without a bound.

    Without a bound a number has at most 19 digits, or as many as the other bound has.

    >>> all(
    ...     bool(re.fullmatch(integers(-12, 131), str(n))) == (-12 <= n <= 131)
    ...     for n in range(-300, 300)
    ... )
    True
    >>> [
    ...     bool(re.fullmatch(integers(10**19, None), str(n)))
    ...     for n in (10**19 - 1, 10**19, 10**20 - 1, 10**20)
    ... ]
    [False, True, True, False]
    """
    num_digits = max([19, *(len(str(abs(bound))) for bound in (least, most) if bound is not None)])
    largest: int = 10**num_digits - 1
    if least is None:
        least = -largest
    if most is None:
        most = largest
    parts = []
    if least < 0:
        parts.append("-" + _between(max(1, -most), -least))
    if most >= 0:
        parts.append(_between(max(0, least), most))
    return _any_of(parts)


def _between(least: int, largest: int) -> str:
    """Returns the expression of the numbers from one to another, both at least 0.

    >>> _between(7, 120)
    '(?:[7-9]|[1-9][0-9]|1[0-1][0-9]|120)'
    """
    parts = list[str]()
    low = least
    while low <= largest:  # numbers of one length after the other
        high = min(largest, 10 ** len(str(low)) - 1)
        for steps in byte_dfa.between(str(low).encode(), str(high).encode(), b"0", b"9"):
            parts.append(
                "".join(_digits(*digits, len([*same])) for digits, same in itertools.groupby(steps))
            )
        low = high + 1
    return _any_of(parts)


def _digits(first: int, last: int, count: int) -> str:
    if first == last:
        digit = chr(first)
    else:
        digit = f"[{first:c}-{last:c}]"
    if count == 1:
        return digit
    return f"{digit}{{{count}}}"


def _largest(text: str) -> str:
    """Names the property of a schema that makes it large."""
    sizes = {name: len(regex_of(schema)) for name, schema in parts_of(text).items()}
    if sizes:
        return f"bound its part {max(sizes, key=lambda name: sizes[name])!r}"
    return "bound its parts"


def parts_of(text: str) -> dict[str, str]:
    """Returns the schema of each property of an object, as JSON text that stands for itself."""
    root = json.loads(text)
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    properties = root.get("properties", {})
    return {
        name: json.dumps({**shared, **schema})
        for name, schema in properties.items()
        if isinstance(schema, Mapping)
    }
