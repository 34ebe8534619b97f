"""`jaxspec generate` on table models, commands on a terminal, and what is printed as text, for
several files.
"""

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxspec.cli.main import app

SMALL = ("-n", "12")  # few shapes: every test shares the same few programs


@pytest.fixture
def invoke(loading):
    """Runs `jaxspec generate` on the zoo, on small shapes."""

    def invoke(*arguments, **options):
        has_prompt = bool(arguments) and not arguments[0].startswith("-")
        count = () if has_prompt else ("--count", "2")
        command = ["generate", *SMALL, *count, *arguments]
        return CliRunner().invoke(app, command, **{"env": {"COLUMNS": "160"}, **options})

    return invoke


@pytest.fixture
def run(invoke):
    """Returns what a command that succeeds prints."""

    def run(*arguments, **options):
        result = invoke(*arguments, **options)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


@pytest.fixture
def refused(invoke):
    """The one line that a command prints when it cannot use its input."""

    def refused(*arguments, **options):
        result = invoke(*arguments, **options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        return result.stderr

    return refused


@pytest.fixture
def report(run):
    """Reads what a command that succeeds reports as JSON."""
    return lambda *arguments, **options: json.loads(run(*arguments, "--json", **options))


@pytest.fixture
def shown():
    """Renders as text."""

    def shown(renderable, width=100):
        console = Console(file=io.StringIO(), width=width, highlight=False)
        console.print(renderable)
        return console.file.getvalue()

    return shown


class Terminal:
    """A `jaxspec` command on a terminal of its own, with nothing compiled beforehand.

    Attributes:
        printed: what it has printed so far.
    """

    def __init__(self, folder, arguments):
        environment = os.environ | {"XDG_CACHE_HOME": str(folder), "TERM": "xterm"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        # The first terminal that a new session opens is the one whose Ctrl-C it hears.
        opening = ["sh", "-c", f'exec "$@" <{os.ttyname(theirs)} >{os.ttyname(theirs)} 2>&1', "sh"]
        command = [*opening, sys.executable, "-m", "jaxspec", *arguments]
        self._process = subprocess.Popen(
            command, env=environment, cwd=folder, start_new_session=True
        )
        os.close(theirs)
        self._terminal, self._seen, self.printed = ours, 0, ""

    def until(self, text, timeout=60):
        """Waits until a text is printed, after what earlier calls have waited for; returns what
        precedes it.
        """
        before, end = self._seen, time.monotonic() + timeout
        while (at := self.printed.find(text, before)) < 0:
            assert select.select([self._terminal], [], [], max(0, end - time.monotonic()))[0], (
                self.printed
            )
            self.printed += self._read()
        self._seen = at + len(text)
        return self.printed[before:at]

    def write(self, text):
        """Types."""
        os.write(self._terminal, text.encode() if isinstance(text, str) else text)

    def end(self, timeout=60):
        """Waits until the command ends; returns its exit code."""
        while data := self._read():
            self.printed += data
        return self._process.wait(timeout)

    def _read(self):
        try:
            return os.read(self._terminal, 65536).decode(errors="replace")
        except OSError:  # the command has ended
            return ""

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


@pytest.fixture
def terminal(tmp_path):
    """Runs a command on a terminal."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(
            contextlib.closing(Terminal(tmp_path, arguments))
        )
