"""For mkdocstrings: the examples of a docstring become blocks of code, which Markdown would make quotations of."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example\b(.*):$")


class Doctests(griffe.Extension):
    """Rewrites docstrings as they are loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(flat(obj.docstring.value))
        if obj.path == "jaxspec.core":  # whose `__all__` is derived of what it imports
            obj.exports = [name for name in obj.members if name[0].isupper()]


def flat(text: str) -> str:
    """The text with its "Example:" sections as plain paragraphs, so that they may hold code."""
    lines, inside = [], False
    for line in text.splitlines():
        inside = inside and (not line or line.startswith("    "))
        title = EXAMPLE.match(line)
        lines.append(f"**Example**{title[1]}:\n" if title else line.removeprefix("    ") if inside else line)
        inside = inside or title is not None
    return "\n".join(lines)


def fenced(text: str) -> str:
    """The text with each run of `>>>` lines and what they print in a fence."""
    return re.sub(r"^>>> .*(?:\n.+)*", "```pycon\n\\g<0>\n```", text, flags=re.MULTILINE)
