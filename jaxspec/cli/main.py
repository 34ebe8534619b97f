"""The `jaxspec` command: which commands there are, and what they share (errors, start-up, --version)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from jaxspec.cli import (
    bench,
    convert,
    datastore,
    drafts,
    figures,
    generate,
    measure,
    models,
    plan,
    rules,
    train,
    verify,
)

INTERRUPTED, TERMINATED, REFUSED = 130, 143, 2  # exit codes: Ctrl-C and kill, as shells have them; unusable input


class Command(TyperCommand):
    """A command whose errors are one line and whose compiled programs are kept for the next call."""

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


app = typer.Typer(
    name="jaxspec",
    help="Speculative decoding in JAX: what the target model would have said, sooner.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Command)(generate.generate)
app.command(cls=Command)(train.train)
app.command(cls=Command)(datastore.datastore)
app.command(cls=Command)(models.models)
app.command(cls=Command)(convert.convert)
app.command(cls=Command)(bench.bench)
app.command(cls=Command)(measure.measure)
app.command(cls=Command)(plan.plan)
app.command(cls=Command)(figures.figures)
app.command(cls=Command)(verify.verify)
app.command(cls=Command)(rules.rules)
app.command(cls=Command)(drafts.drafts)


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
    """Where compiled programs are kept, unless JAX_COMPILATION_CACHE_DIR says otherwise.

    >>> cache_folder({"XDG_CACHE_HOME": "/tmp/cache"}).as_posix()
    '/tmp/cache/jaxspec/programs'
    """
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "jaxspec" / "programs"


def _start(environment: Mapping[str, str]) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that what is half written is cleared away
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
    """What to say of an error; the operating system's own are put as `file: what is wrong`."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
