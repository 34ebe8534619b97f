"""Interrupts: exceptions of signal handlers are repeated until they are seen."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

AGAIN = 0.01  # seconds until a check whether an exception was lost
SIGNALS = (signal.SIGINT, signal.SIGTERM)

Handler = Callable[[int, Any], Any]


class _Block:
    """The block of `raised_until_seen` that runs."""

    def __init__(self) -> None:
        self.former_hook = sys.unraisablehook
        self.error: BaseException | None = None  # the last one that a handler has raised
        self.is_look = False  # whether `look_again` sent the next signal
        self.is_over = False
        self.sending = threading.Lock()  # held from a look at `is_over` until the signal is sent

    def handle(self, handler: Handler, number: int, frame: Any) -> None:
        """Answers a signal: calls its handler, or raises a lost exception again."""
        is_look = self.is_look
        self.is_look = False
        if is_look:
            if self.is_over or self.error is None or _contains(sys.exc_info()[1], self.error):
                return
            raise self.error  # it was lost
        former = self.error
        try:
            handler(number, frame)
        except BaseException as error:
            self.error = error
            if self.is_over:
                return  # the end of the block raises it
            if former is None:
                # Not `threading.Thread`, which takes a lock that the interrupted code may hold.
                _thread.start_new_thread(self.look_again, (number,))
            raise

    def look_again(self, number: int) -> None:
        """Repeats the signal while the block runs; `handle` decides whether to raise."""
        while True:
            time.sleep(AGAIN)
            with self.sending:
                if self.is_over:
                    return
                self.is_look = True
                _send(number)

    def hook(self, ignored: Any) -> None:
        """Replaces `sys.unraisablehook`: does not report an exception that will be raised again."""
        if ignored.exc_value is None or ignored.exc_value is not self.error:
            self.former_hook(ignored)


class Repeated:
    """A handler of signals whose exception the block that runs keeps; see `raised_until_seen`."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        if _running is None:
            self.handler(number, frame)
        else:
            _running.handle(self.handler, number, frame)


_running: _Block | None = None


@contextlib.contextmanager
def raised_until_seen() -> Iterator[None]:
    """Repeats an exception from a handler of SIGINT or SIGTERM until it leaves the block.

    Python calls a handler between any two steps of the main thread. An exception goes no further in
    a callback of the garbage collector (jax has one), in `__del__`, and in a `try` with a bare
    `except` (jax has several). So a process that traces would lose some 5 % of the signals that are
    to end it.

    In this block a handler's exception is kept. Every 10 ms a thread has the main thread look: if
    the exception is neither handled at the moment nor the context of one that is, it was lost, and
    is raised again. So a `finally` or an `except` that clears away is not disturbed, however long
    it takes. The block's end raises what nobody has seen.

    Nothing inside of the block may catch such an exception and go on. Handlers are called as
    before: this works with Ctrl-C in a notebook as with a handler of the user's. Blocks may be
    nested, and then the outermost one counts. Outside of the main thread, where no handler runs,
    the block does nothing. `@raised_until_seen()` makes a function such a block.

    Example:
        >>> with raised_until_seen():
        ...     answer = 42
    """
    global _running
    if _running is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    block = _Block()
    hook = block.hook
    replaced = dict[int, tuple[Handler, Repeated]]()
    try:
        _running = block
        sys.unraisablehook = hook
        for number in SIGNALS:
            former = signal.getsignal(number)
            if callable(former) and not isinstance(former, Repeated):
                replaced[number] = (former, Repeated(former))
                signal.signal(number, replaced[number][1])
        yield
    finally:
        # from here on handlers raise nothing; a call before this could be interrupted
        block.is_over = True
        leaving = sys.exc_info()[1]
        with block.sending:
            pass  # a signal that is being sent is answered by the block's own handler
        for number, (former, handler) in replaced.items():
            if signal.getsignal(number) is handler:  # else somebody has set another since
                signal.signal(number, former)
        if sys.unraisablehook == hook:
            sys.unraisablehook = block.former_hook
        _running = None
        # the exception came between the block and its end
        is_closed = isinstance(leaving, GeneratorExit)
        if block.error is not None and not is_closed and not _contains(leaving, block.error):
            raise block.error


def _contains(error: BaseException | None, sought: BaseException) -> bool:
    """Returns whether an exception is `sought`, or was raised while `sought` was handled."""
    passed = set[int]()
    while error is not None and id(error) not in passed:
        if error is sought:
            return True
        passed.add(id(error))
        error = error.__context__
    return False


def _send(number: int) -> None:
    """Sends the main thread a signal."""
    thread = threading.main_thread().ident
    if thread is not None and hasattr(signal, "pthread_kill"):
        # also ends a blocking system call of the main thread
        signal.pthread_kill(thread, number)
    else:  # Windows
        _thread.interrupt_main(signal.Signals(number))
