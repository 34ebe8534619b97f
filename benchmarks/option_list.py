"""Writes the list of options of docs/front-door.md, by the table of `jaxspec.decode.options`.

    python -m benchmarks.option_list       seconds

It replaces what lies between two comments of the page. A test compares the page with the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks import pairs
from jaxspec.core.options import Option
from jaxspec.decode.options import OPTIONS

PAGE = Path(__file__).parents[1] / "docs" / "front-door.md"
BEGIN = "<!-- python -m benchmarks.option_list writes what follows -->\n"


def sections() -> Iterator[str]:
    """Yields the list, a line for each option."""
    rows = (f"| {' | '.join(cells(option))} |\n" for option in OPTIONS.values())
    yield (
        f"| option | | default | in a job | command line |\n|---|---|---|---|---|\n{''.join(rows)}"
    )


def cells(option: Option) -> tuple[str, str, str, str, str]:
    """Returns the cells of an option's line.

    >>> cells(OPTIONS["gamma"])[2:], cells(OPTIONS["top_k"])[2:]
    (('`5`', 'for all prompts', '`--gamma`'), ('', 'for each prompt', '`--top-k`'))
    """
    help = option.help
    if option.page:
        help = f"[{help.removesuffix('.')}]({option.page})."
    default = ""
    if option.default not in (None, ()):
        default = f"`{getattr(option.default, 'name', option.default)}`"
    flag = f"`--{option.name.replace('_', '-')}`" if option.flag is not None else ""
    per = "for each prompt" if option.per == "prompt" else "for all prompts"
    return f"`{option.name}`", help, default, per, flag


if __name__ == "__main__":
    PAGE.write_text(pairs.updated(PAGE.read_text("utf-8"), BEGIN, sections()), "utf-8")
