"""The `jaxspec` command: which commands there are, and what they share (errors, start-up, --version)."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

COMMANDS = {  # each in a file of its name, imported when it is called: `jaxspec --help` needs neither them nor jax
    "generate": "Generate text with speculative decoding, and show what it took.",
    "train": "Train a model by a recipe, or make the data that the recipes train on.",
    "datastore": "Build a datastore of texts such as the target writes, to draft from (retrieval).",
    "models": "List the shipped checkpoints, and every size of the networks with the memory it takes.",
    "convert": "Write a model in the other format, or in another dtype.",
    "bench": "Compare the speed of drafters, gammas, policies, rules, batch sizes, dtypes and libraries.",
    "measure": "Measure a pair: α, c and v, the speed-up as predicted and as it is, and what rules cost.",
    "plan": "Choose γ: the best one for each batch size, its speed-up, and when not to speculate.",
    "figures": "Draw the paper's Figures 2 to 5, and a pair's place among them, as PNG and SVG.",
    "verify": "Compute how far each acceptance rule's text is from the target's distribution.",
}
INTERRUPTED, TERMINATED, REFUSED = 130, 143, 2  # exit codes: Ctrl-C and kill, as shells have them; unusable input


class Command(TyperCommand):
    """A command whose errors are one line and whose compiled programs are stored for the next call."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Runs the command. Not reached by --help, which therefore needs no jax."""
        try:
            _start(os.environ)
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # the reader of our output has gone; typer ends quietly
        except (ValueError, OSError, FloatingPointError) as error:
            if _debugging(ctx):
                raise
            Console(stderr=True, highlight=False).print(Text(f"error: {_message(error)}", "red"), soft_wrap=True)
            raise typer.Exit(REFUSED) from None


class _Loaded(MutableMapping[str, Any]):
    """The commands by name, each imported when it is looked up."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            if name not in COMMANDS:
                raise KeyError(name)
            home = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
            home.command(name, cls=Command)(getattr(importlib.import_module(f"jaxspec.cli.{name}"), name))
            home.callback()(lambda: None)  # so that it stays a command of a group
            self._made[name] = typer.main.get_command(home).commands[name]  # type: ignore[attr-defined]
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Commands(TyperGroup):
    """All commands; their own help is asked of them, the list of them is here."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.commands = _Loaded()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name], rich_markup_mode="markdown")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else self.commands[name], rest


app = typer.Typer(
    name="jaxspec",
    cls=Commands,
    help="Speculative decoding in JAX: the target model's text, sooner.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where compiled programs are stored, unless JAX_COMPILATION_CACHE_DIR names a place.

    >>> cache_folder({"XDG_CACHE_HOME": "/tmp/cache"}).as_posix()
    '/tmp/cache/jaxspec/programs'
    """
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "jaxspec" / "programs"


def _start(environment: Mapping[str, str]) -> None:
    if threading.current_thread() is threading.main_thread():
        # so that what is half written is cleared away
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    # transformers, imported for its tokenizers only, would otherwise recommend PyTorch on every call.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import jax

    keep_programs(jax.config, environment)


def keep_programs(config: Any, environment: Mapping[str, str]) -> None:
    """Turns on the persistent compilation cache, unless its place has been chosen already."""
    if "JAX_COMPILATION_CACHE_DIR" not in environment and not config.jax_compilation_cache_dir:
        config.update("jax_compilation_cache_dir", str(cache_folder(environment)))
        config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _debugging(ctx: typer.Context) -> bool:
    return bool(ctx.find_root().params.get("debug")) or os.environ.get("JAXSPEC_DEBUG", "") not in ("", "0")


def _message(error: Exception) -> str:
    """An error in words; the operating system's own are put as `file: what is wrong`."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
