"""Decoding in front of a reader: growing text, a line for each round, a prompt and its answer."""

import pytest

from jaxspec.cli import show
from jaxspec.trace import terminal


@pytest.mark.parametrize("mode", [(), ("--batch",)])
def test_a_trace_has_a_line_for_each_round(mode, zoo, report, run):
    found, lines = report("--trace"), run("--trace", *mode).splitlines()
    numbered = [line for line in lines if line[:3].strip().isdigit()]
    steps = [(n, step) for row in found["rounds"] for n, step in enumerate(row)]
    assert len(numbered) == len(steps)
    done: list[int] = []
    for line, (n, step) in zip(numbered, steps, strict=True):
        done = [] if n == 0 else done
        told = terminal.Round(done, step["tokens"], step["draft"], step["accepted"])
        words = zoo["debian-t5-base"].tokenizer
        assert line == terminal.trace(words, n, told, width=160, colour=False).plain
        done = done + step["tokens"]


def test_a_terminal_gets_colours_and_growing_text(run):
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "160"}
    assert "\x1b[34m" in run("--trace", env=terminal)
    assert run(env=terminal).count("\x1b[2K") > 5  # lines drawn again


def test_a_translation_is_labelled_by_its_languages(shown):
    text = shown(show.exchange("translate English to German: A [b]cat[/b].", "Eine", " Katze", False))
    lines = [line.split() for line in text.splitlines()]
    assert lines == [["English", "A", "[b]cat[/b]."], ["German", "Eine", "Katze"]]


def test_a_continuation_follows_its_prompt(shown):
    assert "Once upon a time" in shown(show.exchange("Once upon", " a", " time", True))
