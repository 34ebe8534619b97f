"""Interrupts: no exception of a signal's handler is lost, wherever the signal comes."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxspec import interrupts

SCRIPT = Path(__file__).parent / "scripts" / "lost_signals.py"


class Preempted(Exception):
    """What a user's handler may raise."""


def preempted(*_):
    raise Preempted


class Deleted:
    """An object that is signalled when it is freed."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def free():
    Deleted()


def collect():
    def callback(phase, _):
        if phase == "start":
            signal.raise_signal(signal.SIGTERM)

    gc.callbacks.append(callback)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(callback)


def catch():
    with contextlib.suppress(BaseException):  # as a bare `except` does, of which jax has some
        signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def handled(monkeypatch):
    """Has SIGTERM raise `Preempted`."""
    former = signal.signal(signal.SIGTERM, preempted)
    yield
    assert signal.getsignal(signal.SIGTERM) is preempted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize("lose", [free, collect, catch])
def test_an_exception_that_was_lost_is_raised_again(handled, monkeypatch, lose):
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", reports.append)
    start = time.monotonic()
    with pytest.raises(Preempted), interrupts.raised_until_seen():
        lose()
        time.sleep(60)
    assert time.monotonic() - start < 30
    with pytest.raises(Preempted), interrupts.raised_until_seen():
        lose()  # and the block ends before anybody has looked
    assert reports == [], "it is raised, and so not reported"
    lose()
    assert [report.exc_type for report in reports] == [Preempted] * (lose is not catch), (
        "the hook is as it was"
    )


def test_an_exception_is_lost_again_and_again(handled):
    """Of each look the exception is lost, too, until there were five."""
    times = []
    with pytest.raises(Preempted), interrupts.raised_until_seen():
        catch()
        while len(times) < 5:
            try:
                time.sleep(60)
            except Preempted:
                times.append(time.monotonic())
        time.sleep(60)
    assert len(times) == 5


def test_what_is_cleared_away_is_not_disturbed(handled):
    """Looks do nothing while the exception is handled, in a `finally`, in the end of a `with`, in a
    generator.
    """
    steps = []

    def cleaned():
        try:
            yield
        finally:
            try:
                raise KeyError("something else")
            except KeyError:
                time.sleep(5 * interrupts.AGAIN)
            steps.append("generator")

    with pytest.raises(SystemExit), interrupts.raised_until_seen():
        try:
            generator = cleaned()
            next(generator)
            try:
                signal.raise_signal(signal.SIGTERM)
            except Preempted as error:
                generator.throw(error)
        except Preempted:
            time.sleep(5 * interrupts.AGAIN)
            steps.append("except")
            sys.exit(143)
        finally:
            time.sleep(5 * interrupts.AGAIN)
            steps.append("finally")
    time.sleep(5 * interrupts.AGAIN)
    assert steps == ["generator", "except", "finally"]


def test_a_second_signal_is_an_exception_of_its_own(handled):
    """Who presses Ctrl-C while things are cleared away is heard."""
    with pytest.raises(KeyboardInterrupt) as raised, interrupts.raised_until_seen():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)
    assert isinstance(raised.value.__context__, Preempted)


def test_blocks_are_nested_and_functions_are_blocks(handled):
    @interrupts.raised_until_seen()
    def inner():
        catch()
        return "went on"

    with pytest.raises(Preempted):
        inner()
    with pytest.raises(Preempted), interrupts.raised_until_seen():
        assert inner() == "went on"
        time.sleep(60)


def test_other_exceptions_and_threads_are_as_before(handled, monkeypatch):
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reports.append(report.exc_type))

    class Faulty:
        def __del__(self):
            raise ValueError

    with interrupts.raised_until_seen():
        Faulty()
        try:
            raise KeyboardInterrupt  # no signal's
        except KeyboardInterrupt:
            pass
    assert reports == [ValueError]

    def block():
        with interrupts.raised_until_seen():
            handlers.append(signal.getsignal(signal.SIGTERM))

    handlers = []
    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert handlers == [preempted]


def test_a_handler_that_was_set_in_a_block_stays(handled):
    with interrupts.raised_until_seen():
        former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert isinstance(former, interrupts.Repeated) and former.handler is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_importing_sets_no_handlers():
    code = (
        "import gc, signal, sys; before = [*map(signal.getsignal, signal.valid_signals())], "
        "sys.unraisablehook\n"
        "import jaxspec.interrupts, jaxspec.cli.main\n"
        "assert before == ([*map(signal.getsignal, signal.valid_signals())], sys.unraisablehook)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def lost(mode: str, count: int) -> dict[str, int]:
    """Sends a process that traces some SIGTERM and SIGINT; returns how many of each it lost."""
    environment = os.environ | {"PYTHONPATH": str(Path(interrupts.__file__).parents[1])}
    command = [sys.executable, str(SCRIPT), mode, str(count)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=500
    )
    return json.loads(ended.stdout)


def test_a_command_that_traces_loses_no_signal():
    """At random times of tracing. One in fifteen was lost."""
    assert lost("command", 20) == {"SIGTERM": 0, "SIGINT": 0}


@pytest.mark.slow
def test_no_signal_of_two_hundred_is_lost():
    """Python's handlers alone lose some: so the signals do come where exceptions are ignored."""
    assert sum(lost("bare", 100).values()) > 0
    assert lost("command", 200) == {"SIGTERM": 0, "SIGINT": 0}
