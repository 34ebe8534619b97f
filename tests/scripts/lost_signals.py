"""Counts signals that are lost if they come while jax traces a function.

    python tests/scripts/lost_signals.py bare 200       # Python's handlers alone
    python tests/scripts/lost_signals.py command 200    # a command of jaxspec

A child traces until a signal ends it, says which, and traces again. Its parent sends it so many
SIGTERM and as many SIGINT, at random times, and prints how many the child did not answer. Of
tests/test_interrupts.py.
"""

import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import time

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PATIENCE = {"bare": 0.5, "command": 60.0}  # seconds to wait for an answer, which may be compiling
PAUSE = 0.03  # seconds between the beginning of a trace and the signal, at most
COLLECTED = 300  # objects made between two collections of garbage; by default 700


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def make_trace():
    """Returns a function that traces a program anew at each call."""
    import jax
    import jax.numpy as jnp

    def network(x):
        for _ in range(20):
            x = jnp.tanh(x @ x) + jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
            x, _ = jax.lax.scan(lambda carry, _: (carry * 2 + 1, None), x, None, length=3)
        return x

    square = jnp.ones((4, 4))

    def trace():
        jax.make_jaxpr(lambda x: network(x))(square)

    trace()
    gc.set_threshold(COLLECTED, 10, 10)
    return trace


def bare() -> None:
    """Traces under the handlers that the commands had once."""
    trace = make_trace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    while True:
        try:
            say("tracing")
            while True:
                trace()
        except KeyboardInterrupt:
            say(signal.SIGINT.name)
        except SystemExit:
            say(signal.SIGTERM.name)


def command() -> None:
    """Runs a command of jaxspec's again and again that traces until it is told to end."""
    import typer

    from jaxspec.cli import main, signals

    trace = make_trace()
    names = {signals.INTERRUPTED: signal.SIGINT.name, signals.TERMINATED: signal.SIGTERM.name}

    def work() -> None:
        say("tracing")
        while True:
            trace()

    app = typer.Typer()
    app.command(cls=main.Command)(work)
    typer_command = typer.main.get_command(app)
    while True:
        try:
            code = typer_command.main([], standalone_mode=False)
        except SystemExit as end:
            code = end.code
        say(names.get(code, f"exit code {code}"))


class Child:
    """A process of this script that traces."""

    def __init__(self, mode: str):
        self.patience = PATIENCE[mode]
        self.process = subprocess.Popen(
            [sys.executable, __file__, mode], stdout=subprocess.PIPE, bufsize=0
        )
        self.output = self.process.stdout
        self.wait_until_traced(timeout=100)

    def line(self, timeout: float) -> str | None:
        """Reads a line; None if none comes in time."""
        if not select.select([self.output], [], [], timeout)[0]:
            return None
        return self.output.readline().decode().strip()

    def wait_until_traced(self, timeout: float) -> None:
        assert (line := self.line(timeout)) == "tracing", line

    def answers(self, number: signal.Signals) -> bool:
        """Sends a signal; says whether it ended what the child did."""
        self.process.send_signal(number)
        line = self.line(self.patience)
        if line is None and self.process.poll() is None:
            return False
        assert line == number.name, (
            f"{number.name} was answered by {line!r}, exit code {self.process.poll()}"
        )
        self.wait_until_traced(timeout=100)
        return True


def lost(mode: str, count: int, seed: int = 0) -> dict[str, int]:
    """Sends a child so many of each signal; returns how many it did not answer, by name."""
    draw = random.Random(seed)
    child = Child(mode)
    numbers = {number.name: 0 for number in SIGNALS}
    try:
        for number in count * SIGNALS:
            time.sleep(draw.uniform(0, PAUSE))
            numbers[number.name] += not child.answers(number)
    finally:
        child.process.kill()
        child.process.wait()
        child.output.close()
    return numbers


if __name__ == "__main__":
    mode, *count = sys.argv[1:]
    if count:
        print(json.dumps(lost(mode, int(*count))))
    else:
        {"bare": bare, "command": command}[mode]()
