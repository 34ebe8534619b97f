"""Progress: a bar on a terminal, and lines, not too many of them, elsewhere."""

import pytest
from rich.progress import Progress

from jaxspec.progress import bar


class Clock:
    """Time that passes when the test says so."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Clock()


def test_a_log_has_a_line_every_half_minute_and_one_in_the_end(clock, capsys):
    with bar(remaining=True, get_time=clock) as shown:
        task = shown.add_task("starting", total=2_000)
        for step in range(1, 96):
            clock.seconds += 1
            shown.update(task, advance=20, description=f"[step {step}]")
    assert capsys.readouterr().err.splitlines() == [
        "[step 30]: 600 of 2,000, 0:00:30, 0:01:10 left",
        "[step 60]: 1,200 of 2,000, 0:01:00, 0:00:40 left",
        "[step 90]: 1,800 of 2,000, 0:01:30, 0:00:10 left",
        "[step 95]: 1,900 of 2,000, 0:01:35, 0:00:05 left",
    ]


def test_lines_are_of_what_has_changed(clock, capsys):
    """Of several tasks; what was printed last is not printed again in the end."""
    with bar(get_time=clock) as shown:
        texts, orders = shown.add_task("texts", total=4), shown.add_task("orders", total=None)
        for _ in shown.track("abc", task_id=texts, total=3):
            clock.seconds += 10
        clock.seconds += 30
        shown.advance(orders)
    assert capsys.readouterr().err.splitlines() == ["texts: 3 of 3, 0:00:30", "orders: 1, 0:01:00"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [(dict(shown=False), 0), (dict(transient=True), 1), (dict(), 2), (dict(remaining=True), 2)],
)
def test_no_lines_are_printed_that_are_not_wanted(clock, capsys, options, expected):
    with bar(**options, get_time=clock) as shown:
        task = shown.add_task("reading", total=9)
        shown.advance(task)
        clock.seconds += 30
        shown.advance(task)
        shown.advance(task)
    assert len(capsys.readouterr().err.splitlines()) == expected
    with bar(**options, get_time=clock) as shown:
        shown.add_task("nothing", total=9)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar(monkeypatch, clock):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert type(bar(get_time=clock)) is Progress
