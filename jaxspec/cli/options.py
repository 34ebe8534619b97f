"""Options that commands share, each declared once: one spelling everywhere, and groups that arrive as one argument."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer

TARGET, DRAFT = "debian-t5-large", "debian-t5-draft"  # the default pair
given: ContextVar[Sequence[str]] = ContextVar("given", default=())  # names of the options that a user typed


def number(help: str, *names: str, least: int = 1, most: int | None = None) -> Any:
    """What typer should know of an option that is a whole number."""
    return typer.Option(*names, help=help, min=least, max=most, metavar="N")


def seed_number(help: str) -> Any:
    """What typer should know of a seed: `jax.random.key` reads 32 bits of it, and would take others for these."""
    return number(help, least=0, most=2**32 - 1)


def text(metavar: str, help: str, *names: str) -> Any:
    """What typer should know of any other option that takes a value."""
    return typer.Option(*names, help=help, metavar=metavar)


def flag(help: str, *names: str) -> Any:
    """What typer should know of an option without a value."""
    return typer.Option(*names, help=help)


Target = Annotated[str, text("MODEL", "A shipped model, a folder, or a hub id.")]
Draft = Annotated[str, text("MODEL", "Model that drafts. Default: the target's sibling.", "--draft", "-d")]
Gamma = Annotated[int, number("Draft tokens a round.", "--gamma", "-g")]
Count = Annotated[int, number("Prompts to measure on.")]
NewTokens = Annotated[int, number("Most new tokens of each prompt.", "--max-new-tokens", "-n", least=2)]
Repeats = Annotated[int, number("Timings of each pass.")]
Temperature = Annotated[float, text("T", "Of sampling; 0 is greedy.", "--temperature", "-t")]
Batches = Annotated[str, text("N,N", "Prompts decoded at a time.")]
Prompts = Annotated[Path | None, text("FILE", "Prompts, one a line, or .jsonl with inputs; else held-out ones.")]
Seed = Annotated[int, seed_number("Of the random numbers.")]
Overwrite = Annotated[bool, flag("Replace what is there.", "--overwrite")]
Markdown = Annotated[bool, flag("Print tables for a document.", "--markdown")]
Json = Annotated[bool, flag("Print one JSON object and nothing else.", "--json")]
JsonLines = Annotated[bool, flag("Print JSON; of a file, a line a prompt.", "--json")]


def refuse(names: Sequence[str], mode: str) -> None:
    """Refuses options, by the names of their values, that would be ignored in a mode of a command.

    Raises:
        ValueError: there are such options.
    """
    if names:
        spelt = ", ".join("--json" if name == "as_json" else f"--{name.replace('_', '-')}" for name in names)
        raise ValueError(f"{mode} does not read {spelt}: leave {'it' if len(names) == 1 else 'them'} out")


def refuse_others(read: Collection[str], mode: str) -> None:
    """Refuses options that were given and that a mode of a command does not read.

    Args:
        read: names of the options that the mode reads.
        mode: the option that asks for it.

    Raises:
        ValueError: there are such options.
    """
    own = mode.removeprefix("--").replace("-", "_")
    refuse([name for name in given.get() if name not in (own, *read)], mode)


def group(name: str, members: Sequence[inspect.Parameter], made: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Adds options to a command, which reach it as one argument: what `made` makes of their values.

    Args:
        name: of the argument.
        members: the options; what is not given has its default.
        made: of a dict of the values.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != name]

        @functools.wraps(command)
        def wrapper(**options: Any) -> None:
            values = {member.name: options.pop(member.name, member.default) for member in members}
            command(**options, **{name: made(values)})

        del wrapper.__wrapped__  # typer reads what this one takes
        keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*members, *own)]
        wrapper.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in keywords}
        return wrapper

    return decorate


def group_of(name: str, kind: Any, **defaults: Any) -> Callable[..., Any]:
    """As `group`, with an option for each field of a NamedTuple, whose annotations say what typer should know."""
    hints, usual = typing.get_type_hints(kind, include_extras=True), kind._field_defaults | defaults
    return group(name, [_option(field, hints[field], usual[field]) for field in kind._fields], lambda v: kind(**v))


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option to a command for each entry of `sampling.options.OPTIONS` that has a place on the command line.

    Those given reach the command as one argument, `sampling`: a dict of arguments for `jaxspec.generate`.

    >>> @sampling_options
    ... def command(prompt: str, sampling: dict) -> None:
    ...     print(prompt, sampling)
    >>> command(prompt="a", top_k=5, min_p=None, temperature=None)
    a {'top_k': 5}
    """
    from jaxspec.sampling.params import OPTIONS

    short = {"temperature": ("--temperature", "-t")}
    added = [
        _option(name, Annotated[typing.Optional[one.kind], typer.Option(*short.get(name, ()), help=one.help)], None)  # noqa: UP045
        for name, one in OPTIONS.items()
        if one.kind is not None
    ]
    return group("sampling", added, lambda v: {name: value for name, value in v.items() if value is not None})(command)


def _option(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
