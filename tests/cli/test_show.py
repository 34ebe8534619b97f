"""Decoding in front of a reader: growing text, a line for each round, a prompt and its answer."""

import pytest

from jaxspec.cli import show
from jaxspec.core import Stats
from jaxspec.trace import terminal


@pytest.mark.parametrize("mode", [(), ("--batch", "2")])
def test_a_trace_has_a_line_for_each_round(mode, zoo, report, run):
    reported, lines = report("--trace"), run("--trace", *mode).splitlines()
    numbered = [line for line in lines if line[:3].strip().isdigit()]
    steps = [(n, step) for row in reported["rounds"] for n, step in enumerate(row)]
    assert len(numbered) == len(steps)
    done: list[int] = []
    for line, (n, step) in zip(numbered, steps, strict=True):
        done = [] if n == 0 else done
        told = terminal.TracedRound(done, step["tokens"], step["draft"], step["accepted"])
        words = zoo["debian-t5-large"].tokenizer
        assert line == terminal.trace(words, n, told, width=160, colour=False).plain
        done = done + step["tokens"]


def test_a_trace_with_numbers_has_those_of_each_draft_token(report, run, refused):
    options = ("--trace", "--numbers", "--gamma", "3", "-t", "1", "--seed", "2")
    rounds = [step for row in report(*options)["rounds"] for step in row if "numbers" in step]
    assert rounds and all(len(step["numbers"]["q"]) == len(step["draft"]) for step in rounds)
    printed = run(*options).splitlines()
    lines = [
        line.split()[-8:]
        for line in printed
        if line.endswith((" accepted", " rejected", " not tried"))
    ]
    q = [f"{q:.3f}" for step in rounds for q in step["numbers"]["q"]]
    assert len(lines) == len(q) > 3
    assert sum(f"{x}" in line for x, line in zip(q, lines, strict=True) if float(x) > 0) > 3
    assert "add --trace" in refused("--numbers")
    assert "needs a --draft" in refused("--trace", "--numbers", "--draft", "none")


def test_a_terminal_gets_colours_and_growing_text(run):
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "160"}
    assert "\x1b[34m" in run("--trace", env=terminal)
    assert run(env=terminal).count("\x1b[2K") > 5  # lines drawn again


def test_a_translation_is_labelled_by_its_languages(shown):
    text = shown(
        show.exchange("translate English to German: A [b]cat[/b].", "Eine", " Katze", False)
    )
    lines = [line.split() for line in text.splitlines()]
    assert lines == [["English", "A", "[b]cat[/b]."], ["German", "Eine", "Katze"]]


def test_a_continuation_follows_its_prompt(shown):
    assert "Once upon a time" in shown(show.exchange("Once upon", " a", " time", True))


def record(*counts, seconds):
    return dict(zip(Stats._fields, counts, strict=True)) | {"seconds": seconds}


def test_counts_add_up_and_give_rates():
    total = show.total([record(4, 20, 12, 17, seconds=0.5), record(2, 10, 3, 6, seconds=0.5)])
    assert total == record(6, 30, 15, 23, seconds=1.0) | {
        "prompts": 2, "acceptance_rate": 0.5, "tokens_per_round": 21 / 6, "tokens_per_second": 23.0,
    }  # fmt: skip
    assert show.total([record(0, 0, 0, 1, seconds=0.0)])["tokens_per_second"] == 0


def test_the_counts_explain_themselves():
    """The first token of each prompt is of no round: 308 tokens in 143 rounds are 2.10 a round."""
    records = [record(20, 60, 30, 43, seconds=1.0)] * 7 + [record(3, 9, 4, 7, seconds=0.5)]
    said = show.totals_sentence(show.total(records), "big", "small")
    assert said.startswith(
        "308 tokens at 41.1 tokens/s: 8 of them, each prompt's first, by reading the prompts; "
    )
    assert (
        "300 in 143 rounds, 2.10 tokens a round" in said
        and "of 429 drafted, 214 were accepted (49.9%)" in said
    )
    plain = record(20, 0, 0, 21, seconds=1.0)
    sentence = show.totals_sentence(show.total([plain]), "big", None)
    assert sentence.endswith("the other 20 by one pass of big each (plain decoding).")
    assert "accepted" not in show.note(plain).plain
