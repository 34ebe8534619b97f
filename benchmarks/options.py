"""Options of `jaxspec bench`, parsed for a script, and the end of a script, for several scripts."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from jaxspec.cli import bench
from jaxspec.cli.bench import Workload


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Makes a parser whose help is the header of a script."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def workload(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, defaults: dict[str, Any]
) -> tuple[Workload, argparse.Namespace]:
    """Parses options of `jaxspec bench` and those that a script has added."""
    work, others = grouped(Workload, parser, arguments, defaults)
    return work._replace(count=max(work.count, work.rows)), others


def grouped(
    kind: Any,
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    defaults: Mapping[str, Any] = {},
) -> tuple[Any, argparse.Namespace]:
    """Parses an option for each field of a command's NamedTuple, and those that a script has
    added.
    """
    usual, hints = kind(**defaults), typing.get_type_hints(kind)
    for field, default in usual._asdict().items():
        flag = "--json" if field == "as_json" else f"--{field.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, dest=field, action="store_true", default=default)
        else:
            types = [
                cls
                for cls in (Path, int, float)
                if cls in (hints[field], *typing.get_args(hints[field]))
            ]
            parser.add_argument(flag, dest=field, type=types[0] if types else str, default=default)
    options = parser.parse_args(arguments)
    return kind(**{field: getattr(options, field) for field in kind._fields}), options


def run(*arguments: Any, **options: Any) -> list[Any]:
    """Measures and prints as `jaxspec bench` does (`cli.bench.run`); ends the process with 1 where
    a setting failed.
    """
    try:
        return bench.run(*arguments, **options)
    except typer.Exit as end:
        raise SystemExit(end.exit_code) from None
