"""For mkdocstrings: examples become blocks of code, and comments on a record's fields its table of
attributes.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example\b(.*):$")
# a comment on several fields, from this one on
TOGETHER = re.compile(r"these (two|three|four)(?:, (.*?))?: ")
COUNTS = {"two": 2, "three": 3, "four": 4}


class Doctests(griffe.Extension):
    """Rewrites docstrings as they are loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(flat(obj.docstring.value))
        if obj.path == "jaxspec.core":  # whose `__all__` is derived of what it imports
            obj.exports = [name for name in obj.members if name[0].isupper()]

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        lines = cls.lines_collection[cls.filepath] if isinstance(cls.filepath, Path) else []
        fields = {
            name: member
            for name, member in cls.members.items()
            if isinstance(member, griffe.Attribute)
        }
        texts = {
            name: comment(lines, x.lineno, x.endlineno)
            for name, x in fields.items()
            if x.lineno and x.endlineno
        }
        names = list(texts)
        for i, name in enumerate(names):
            if several := TOGETHER.match(texts[name]):
                texts[name] = f"{several[2]}: " * bool(several[2]) + texts[name][several.end() :]
                texts |= dict.fromkeys(names[i + 1 : i + COUNTS[several[1]]], f"see `{name}`")
        entries = [f"    {name}: {text}" for name, text in texts.items() if text]
        if entries and cls.docstring is not None and "Attributes:" not in cls.docstring.value:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(entries)


def comment(lines: list[str], first: int, last: int) -> str:
    """The comment at the end of a field, or in the lines before it; `doc` of a property in one
    line; else empty.
    """
    field = " ".join(line.strip() for line in lines[first - 1 : last])
    if doc := re.search(r'= property\(.*doc="(.+?)"', field):
        return doc[1]
    if at_end := re.search(r"  # (?!type: |pyright: |noqa)(.+)$", lines[last - 1]):
        return at_end[1]
    above = list(
        itertools.takewhile(
            lambda line: line.lstrip().startswith("# "), reversed(lines[: first - 1])
        )
    )
    return " ".join(line.strip().removeprefix("# ") for line in reversed(above))


def flat(text: str) -> str:
    """The text with its "Example:" sections as plain paragraphs, so that they may hold code."""
    lines, inside = [], False
    for line in text.splitlines():
        inside = inside and (not line or line.startswith("    "))
        title = EXAMPLE.match(line)
        lines.append(
            f"**Example**{title[1]}:\n" if title else line.removeprefix("    ") if inside else line
        )
        inside = inside or title is not None
    return "\n".join(lines)


def fenced(text: str) -> str:
    """The text with each run of `>>>` lines and what they print in a fence."""
    return re.sub(r"^>>> .*(?:\n.+)*", "```pycon\n\\g<0>\n```", text, flags=re.MULTILINE)
