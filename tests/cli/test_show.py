"""Decoding in front of a reader: growing text, a line for each round, a prompt and its answer."""

import pytest

from jaxspec.cli import counts, exchange
from jaxspec.cli.counts import Counts, Decoded
from jaxspec.trace import terminal


@pytest.mark.parametrize("mode", [(), ("--batch", "2")])
def test_a_trace_has_a_line_for_each_round(mode, zoo, report, run):
    found, lines = report("--trace"), run("--trace", *mode).splitlines()
    numbered = [line for line in lines if line[:3].strip().isdigit()]
    steps = [(n, step) for row in found["rounds"] for n, step in enumerate(row)]
    assert len(numbered) == len(steps)
    done: list[int] = []
    for line, (n, step) in zip(numbered, steps, strict=True):
        done = [] if n == 0 else done
        told = terminal.Round(done, step["tokens"], step["draft"], step["accepted"])
        words = zoo["debian-t5-large"].tokenizer
        assert line == terminal.trace(words, n, told, width=160, colour=False).plain
        done = done + step["tokens"]


def test_a_terminal_gets_colours_and_growing_text(run):
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "160"}
    assert "\x1b[34m" in run("--trace", env=terminal)
    assert run(env=terminal).count("\x1b[2K") > 5  # lines drawn again


def test_a_translation_is_labelled_by_its_languages(shown):
    text = shown(exchange.exchange("translate English to German: A [b]cat[/b].", "Eine", " Katze", False))
    lines = [line.split() for line in text.splitlines()]
    assert lines == [["English", "A", "[b]cat[/b]."], ["German", "Eine", "Katze"]]


def test_a_continuation_follows_its_prompt(shown):
    assert "Once upon a time" in shown(exchange.exchange("Once upon", " a", " time", True))


def test_counts_add_up_and_give_rates():
    one, two = Counts(1, 4, 20, 12, 17, 0.5), Counts(1, 2, 10, 3, 6, 0.5)
    both = Counts.total([one, two])
    assert both == Counts(2, 6, 30, 15, 23, 1.0)
    assert (both.acceptance_rate, both.tokens_per_round, both.tokens_per_second) == (0.5, 21 / 6, 23.0)
    assert Counts(1, 0, 0, 0, 1, 0.0).tokens_per_second == 0


def test_the_counts_explain_themselves():
    """The first token of each prompt is of no round: 308 tokens in 143 rounds are 2.10 a round."""
    each = [Counts(1, 20, 60, 30, 43, 1.0)] * 7 + [Counts(1, 3, 9, 4, 7, 0.5)]
    said = counts.totals([Decoded("", [], [], one) for one in each], "big", "small")
    assert said.startswith("308 tokens at 41.1 tokens/s: 8 of them, each prompt's first, by reading the prompts; ")
    assert "300 in 143 rounds, 2.10 tokens a round" in said and "of 429 drafted, 214 were accepted (49.9%)" in said
    plain = counts.totals([Decoded("", [], [], Counts(1, 20, 0, 0, 21, 1.0))], "big", None)
    assert plain.endswith("the other 20 by one pass of big each (plain decoding).")
    assert "accepted" not in counts.note(Counts(1, 20, 0, 0, 21, 1.0)).plain
