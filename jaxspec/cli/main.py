"""The `jaxspec` command: subcommands, errors, --version, signals, stored programs."""

from __future__ import annotations

import functools
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from jaxspec.cli import console, options, signals
from jaxspec.cli.signals import INTERRUPTED, READER_GONE, TERMINATED

# Each is in a module of its name, imported when called, so `jaxspec --help` works without jax.
COMMANDS = {
    "generate": "Generate text with speculative decoding, and show what it took.",
    "chat": "Talk with a model that keeps what it has read.",
    "batch": "Decode a file of prompts; a stopped job goes on where it was.",
    "transcribe": "Transcribe sound with a Whisper model and a drafter.",
    "score": "Compute the log probabilities of a file of texts.",
    "bench": "Measure drafters, gammas, policies, rules: speed, α, c and v.",
    "plan": "Tell whether to speculate here, with which γ, how much faster.",
    "verify": "Compute how far each rule's text is from the target's.",
    "compare": "Tell where the texts of two models part, and why.",
    "models": "List models: shipped, in this folder, published sizes.",
    "convert": "Write a model in the other format, or in another dtype.",
    "train": "Train a model, or a head on a model, by a recipe.",
    "datastore": "Build a datastore of texts such as the target writes.",
}
HELP_COLUMN = 28  # characters of an option before its help begins
COMPILES_NOTHING = {"models"}  # commands that work without jax
# commands of earlier versions, with what to type today
GONE = {
    "measure": "it is a part of `jaxspec bench` now: `bench --gamma plan --temperature 0,1 --count "
    "16 --repeats 3` is what it did, and --no-speed is --measure alpha",
}
# the metavars of options and arguments that are paths
PATHS = {"FILE", "FOLDER", "FROM", "TO", "TEXTS"}
REFUSED = 2  # exit code: unusable input


class Command(TyperCommand):
    """A command whose errors are one line, and whose compiled programs are stored."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Runs the command. --help ends before this, so it works without jax."""
        try:
            with signals.ending():
                if self.name not in COMPILES_NOTHING:
                    prepare(os.environ)
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output has gone
            raise typer.Exit(READER_GONE) from None
        except (ValueError, OSError, FloatingPointError, ImportError) as error:
            # A missing extra is the user's error; other failed imports are our bugs.
            is_bug = isinstance(error, ImportError) and "pip install" not in str(error)
            if is_bug or _is_debugging(ctx):
                raise
            console.note(f"error: {_message(error, ctx.command)}", "red")
            raise typer.Exit(REFUSED) from None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments. Rejects an empty path, as from an unset shell variable."""
        written, *_ = self.make_parser(ctx).parse_args(args=list(args))
        for param in self.get_params(ctx):
            if param.metavar not in PATHS:
                continue
            value = written.get(str(param.name))
            paths = value if isinstance(value, list | tuple) else [value]
            if "" in paths:
                is_option = param.param_type_name == "option"
                name = max(param.opts, key=len) if is_option else param.metavar
                ctx.fail(f"{name} is empty: expected a path")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the help of the options, many of them in groups."""
        params = self.get_params(ctx)
        is_many = len(params) > options.MANY
        if is_many:  # in the order of their groups' tables
            params = sorted(params, key=lambda param: options.place(str(param.name))[1:])
        sections = dict[str, list[tuple[str, str]]]()
        for param in params:
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                title = "Arguments"
            elif is_many:
                title = options.place(str(param.name))[0]
            else:
                title = "Options"
            sections.setdefault(title, []).append(record)
        width = min(HELP_COLUMN, max(len(name) for rows in sections.values() for name, _ in rows))
        for title in ("Arguments", "Options", *options.GROUPS, "Other"):
            if title in sections:
                with formatter.section(title):
                    formatter.write_dl(
                        [(f"{name:{width}}", text) for name, text in sections[title]], width
                    )


class Commands(TyperGroup):
    """The commands: names and first lines until one is called, which imports its module."""

    def __init__(self, **options: Any):
        stubs = {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}
        super().__init__(**options)
        self.commands = stubs

    def main(self, *arguments: Any, **options: Any) -> Any:
        # escape characters that a terminal cannot show: \u03b3 for γ in ASCII
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*arguments, **options)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands with the whole of their lines."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in GONE:
            ctx.fail(f"No such command {args[0]!r}: {GONE[args[0]]}.")
        name, stub, arguments = super().resolve_command(ctx, args)
        return name, stub if name is None else command(name), arguments


@functools.lru_cache
def command(name: str) -> TyperCommand:
    """Imports a command's module, and returns the command with its options."""
    home = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    module = importlib.import_module(f"jaxspec.cli.{name}")
    home.command(name, cls=Command)(getattr(module, name))
    typer_command = typer.main.get_command(home)
    assert isinstance(typer_command, TyperCommand)
    return typer_command


class App(typer.Typer):
    """The command as a shell calls it; ends at once after a signal."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Runs a command and ends the process.

        jax may crash while the interpreter ends, if a program was being compiled when Ctrl-C came.
        So the process skips the interpreter's shutdown. By then all blocks have been left and have
        deleted unfinished files.
        """
        try:
            return super().__call__(*arguments, **options)
        except KeyboardInterrupt:
            signals.leave(INTERRUPTED)
        except SystemExit as end:
            if end.code in (INTERRUPTED, TERMINATED, READER_GONE):
                signals.leave(end.code)
            try:
                sys.stdout.flush()
            except BrokenPipeError:  # the reader went away before the last output was flushed
                signals.leave(READER_GONE)
            raise


app = App(
    name="jaxspec",
    cls=Commands,
    help="Speculative decoding in JAX: the target model's text, sooner.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help is half as long
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(shows: bool) -> None:
    if shows:
        import jaxspec

        print(f"jaxspec {jaxspec.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error (also: JAXSPEC_DEBUG=1)."),
    ] = False,
) -> None:
    """Options of all commands; their values are read from the context."""


def _is_debugging(ctx: typer.Context) -> bool:
    """Returns whether errors should show their tracebacks."""
    is_set = os.environ.get("JAXSPEC_DEBUG", "") not in ("", "0")
    return is_set or bool(ctx.find_root().params.get("debug"))


def _message(error: Exception, command: Any) -> str:
    """Returns an error's message, with the command's option in place of the library's argument.

    The library begins an error about an argument with its name: "gamma is -1: expected ...".
    """
    from jaxspec.files import folders  # here, since it imports NumPy, which --help does without

    flags = {
        param.name: next((flag for flag in param.opts if flag.startswith("--")), param.name)
        for param in command.params
    }
    if "ban" in flags:
        flags["banned"] = "--ban"
    advice = folders.REPLACING.replace("overwrite", "--overwrite")
    text = console.message(error).replace(folders.REPLACING, advice)
    argument, _, fault = text.partition(" ")
    if argument in flags and fault.startswith(("is ", "are ", "has ")):
        return f"{flags[argument]} {fault}"
    return text


def prepare(environment: Mapping[str, str]) -> None:
    """Silences libraries, and sets up the cache of compiled programs; skipped for --help."""
    # transformers, imported for its tokenizers only, would otherwise recommend PyTorch on every
    # call.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from absl import logging as absl

    from jaxspec.core import programs

    # orbax logs errors that it also raises
    absl.set_verbosity(absl.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # Ctrl-C leaves its loop unfinished
    warnings.formatwarning = _warning
    why = programs.keep(environment)
    if why:
        console.note(why, "yellow")


def _warning(message: Any, *_: Any, **__: Any) -> str:
    """Formats a warning of any library as one line, without the source line."""
    return f"warning: {message}\n"
