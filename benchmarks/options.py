"""Options of `jaxspec bench`, parsed for a script, and the end of a script, for several scripts."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from jaxspec.cli import workload as workloads
from jaxspec.cli.workload import Workload


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Makes a parser whose help is the header of a script."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def workload(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, defaults: dict[str, Any]
) -> tuple[Workload, argparse.Namespace]:
    """Parses options of `jaxspec bench` and those that a script has added."""
    usual = Workload(**defaults)
    hints = typing.get_type_hints(Workload)
    for field, default in usual._asdict().items():
        flag = "--json" if field == "as_json" else f"--{field.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, dest=field, action="store_true", default=default)
        else:
            kinds = [kind for kind in (Path, int, float) if kind in (hints[field], *typing.get_args(hints[field]))]
            parser.add_argument(flag, dest=field, type=kinds[0] if kinds else str, default=default)
    options = parser.parse_args(arguments)
    return Workload(**{field: getattr(options, field) for field in Workload._fields}), options


def run(*arguments: Any, **options: Any) -> list[Any]:
    """Measures and prints as `jaxspec bench` does (`workload.run`); ends the process with 1 where a setting failed."""
    try:
        return workloads.run(*arguments, **options)
    except typer.Exit as end:
        raise SystemExit(end.exit_code) from None
