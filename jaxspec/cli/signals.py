"""Signals: how Ctrl-C and SIGTERM end a command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jaxspec import interrupts

# Exit codes as shells report them: Ctrl-C, kill, and a closed pipe (`| head`).
INTERRUPTED = 130
TERMINATED = 143
READER_GONE = 141
PATIENCE = 0.5  # seconds that Python gets to handle Ctrl-C itself


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code, without the interpreter's own end."""
    with contextlib.suppress(ValueError):  # another thread than the main one ends the process
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has gone, or it is closed
            stream.flush()
    os._exit(code)


def is_main_thread() -> bool:
    """Returns whether this is the main thread, the only one that may handle signals."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def answered(number: int, answer: Callable[[], Any], also: bool = True) -> Iterator[None]:
    """Answers a signal with a function while the block runs, if `also`, on the main thread."""
    if not (also and is_main_thread()):
        yield
        return
    former = signal.signal(number, interrupts.Repeated(lambda *_: answer()))
    try:
        yield
    finally:
        # None: a handler that was not set from Python, such as an embedding program's.
        signal.signal(number, signal.SIG_DFL if former is None else former)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Makes SIGTERM end the block like `sys.exit`, so that unfinished files are deleted.

    Neither SIGTERM nor Ctrl-C is lost, whatever the block is doing; see
    `interrupts.raised_until_seen`.
    """
    # The handler is there before the block begins and after it ends: the block may send the signal
    # again.
    with answered(signal.SIGTERM, lambda: sys.exit(TERMINATED)), interrupts.raised_until_seen():
        yield


@contextlib.contextmanager
def leaving_soon(say: Callable[[], Any]) -> Iterator[None]:
    """Ends the process soon after Ctrl-C, even during a compilation; calls `say` first.

    Only the main thread answers signals, and only between two steps of Python. The operating
    system's own handler writes them to a pipe at once. A thread reads it, gives the main thread
    some time, and ends the process itself.
    """
    if not is_main_thread():
        yield
        return
    source, sink = os.pipe()
    os.set_blocking(sink, False)  # `signal.set_wakeup_fd` requires it
    has_left = threading.Event()

    def watch() -> None:
        # Each byte that is read is the number of a signal; closing the pipe ends the loop.
        while numbers := os.read(source, 64):
            if signal.SIGINT in numbers and not has_left.wait(PATIENCE):
                say()
                leave(INTERRUPTED)

    watcher = threading.Thread(target=watch, daemon=True)
    former = signal.set_wakeup_fd(sink)
    watcher.start()
    try:
        yield
    except KeyboardInterrupt:
        has_left.set()
        say()
        raise
    finally:
        has_left.set()
        signal.set_wakeup_fd(former)
        os.close(sink)  # ends the thread
        watcher.join()
        os.close(source)
