"""The `jaxspec` command: which commands there are, and what they share (errors, --version)."""

from __future__ import annotations

import functools
import importlib
import os
import re
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from jaxspec.cli import options, startup

COMMANDS = {  # each in a file of its name, imported when it is called: `jaxspec --help` needs neither them nor jax
    "generate": "Generate text with speculative decoding, and show what it took.",
    "bench": "Compare the speed of drafters, gammas, policies, rules and dtypes.",
    "measure": "Measure a pair: α, c and v, the speed-up as predicted and as it is.",
    "plan": "Whether to speculate here, with which γ or tree, and how much faster that will be.",
    "verify": "Compute how far each acceptance rule's text is from the target's distribution.",
    "models": "List the shipped checkpoints, and the sizes of networks with their memory.",
    "convert": "Write a model in the other format, or in another dtype.",
    "train": "Train a model, or a head on a model, by a recipe.",
    "datastore": "Build a datastore of texts such as the target writes, to draft from.",
}
INTERRUPTED, REFUSED = 130, 2  # exit codes: Ctrl-C, as shells have it; unusable input


class Command(TyperCommand):
    """A command whose errors are one line and whose compiled programs are stored for the next call."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Runs the command. Not reached by --help, which therefore needs no jax."""
        try:
            startup.prepare(os.environ)
            options.given.set([p.name for p in ctx.command.params if p.name and _typed(ctx, p.name)])
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # the reader of our output has gone; typer ends quietly
        except (ValueError, OSError, FloatingPointError, ImportError) as error:
            extra = not isinstance(error, ImportError) or "pip install" in str(error)  # other imports are bugs of ours
            if _debugging(ctx) or not extra:
                raise
            Console(stderr=True, highlight=False).print(
                Text(f"error: {_message(error, ctx.command)}", "red"), soft_wrap=True
            )
            raise typer.Exit(REFUSED) from None


class Commands(TyperGroup):
    """All commands. What lists them sees their names and first lines; a file is imported when its command is called."""

    def __init__(self, **options: Any):
        stubs = {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}
        super().__init__(**options)
        self.commands = stubs

    def main(self, *arguments: Any, **options: Any) -> Any:
        startup.show_anything()
        return super().main(*arguments, **options)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub if name is None else command(name), rest


@functools.lru_cache
def command(name: str) -> TyperCommand:
    """A command, with its options, from the file of its name."""
    home = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    home.command(name, cls=Command)(getattr(importlib.import_module(f"jaxspec.cli.{name}"), name))
    found = typer.main.get_command(home)
    assert isinstance(found, TyperCommand)
    return found


app = typer.Typer(
    name="jaxspec",
    cls=Commands,
    help="Speculative decoding in JAX: the target model's text, sooner.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help is half as long
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(asked: bool) -> None:
    if asked:
        import jaxspec

        print(f"jaxspec {jaxspec.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (also: JAXSPEC_DEBUG=1).")
    ] = False,
) -> None:
    """Options of all commands; their values are read from the context."""


def _typed(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _debugging(ctx: typer.Context) -> bool:
    return bool(ctx.find_root().params.get("debug")) or os.environ.get("JAXSPEC_DEBUG", "") not in ("", "0")


def _message(error: Exception, command: Any) -> str:
    """An error in words, which names the command's options; the operating system's own as `file: what is wrong`."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    flags = {p.name: next((one for one in p.opts if one.startswith("--")), p.name) for p in command.params}
    flags |= {"banned": "--ban"} if "ban" in flags else {}
    text = (str(error) or type(error).__name__).replace("pass overwrite=True", "pass --overwrite")
    text = re.sub(r", or None( to .*)?$", "", text)  # an option is left out instead
    return re.sub(r"^\w+(?= (?:is|are|has) )", lambda found: flags.get(found[0], found[0]), text)
