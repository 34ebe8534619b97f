"""A round by the fates of its tokens, spelt, in colours or marks."""

import pytest

from jaxspec.trace import TracedRound, terminal


def styles(text):
    """The parts of a Text by the style that they have."""
    return {str(span.style): text.plain[span.start : span.end] for span in text.spans}


def test_a_trace_line_has_the_colours_of_the_papers_figure():
    line = terminal.trace_line(4, "Das ist", " ein", " Haus", " Hund", width=60, colour=True)
    assert line.plain == "  4  Das ist ein Haus Hund"
    spans = [(line.plain[s.start : s.end], str(s.style)) for s in line.spans]
    assert spans[1:] == [
        ("Das ist", "dim"),
        ("ein", "green"),
        ("Haus", "red strike"),
        ("Hund", "blue"),
    ]


def test_a_trace_line_without_colour_marks_the_same_things():
    bonus = terminal.trace_line(4, "Das ist", " ein Hund", "", ".", width=60, colour=False)
    assert bonus.plain == "  4  Das ist| ein Hund{+.+}"
    assert not [span for span in bonus.spans if str(span.style) != "dim"]


@pytest.mark.parametrize("text", ["ein langer Satz " * 20, "長い文" * 40])
def test_a_trace_line_fits_its_width_and_keeps_the_end(text):
    line = terminal.trace_line(12, text, " a", " b", " c\nd", width=40, colour=True)
    assert 38 <= line.cell_len <= 40
    assert line.plain.startswith(" 12  …")
    assert line.plain.endswith(text[-3:] + " a b c⏎d")


def test_a_trace_spells_the_rejected_token_after_the_accepted_ones(spelling):
    step = TracedRound([*b"x"], [*b"ab", spelling.end], [*b"abc"], 2)
    assert (
        terminal.trace(spelling, 1, step, width=80, colour=False).plain == "  1  x|ab[-c-]{+<end>+}"
    )


@pytest.mark.slow
def test_a_tree_is_drawn_below_its_line(spelling):
    step = TracedRound([*b"x"], [*b"bdZ"], [*b"abcde"], 2, parent=[0, 0, 1, 2, 2], path=[1, 3])
    drawn = terminal.trace(spelling, 1, step, width=80, colour=False).plain.split("\n")
    assert drawn[0] == "  1  x|bd{+Z+}"
    assert [line.strip() for line in drawn[1:]] == ["├─ [-a-]c", "└─ |b", "├─ |d{+Z+}", "└─ e"]
    coloured = terminal.trace(spelling, 1, step, width=80, colour=True)
    spans = {(coloured.plain[s.start : s.end], str(s.style)) for s in coloured.spans}
    assert {("a", "red strike"), ("d", "green"), ("Z", "blue"), ("e", "dim")} <= spans


def test_the_legend_explains_the_colours():
    assert styles(terminal.legend(True))["red strike"] == "rejected draft token"
    assert "[-rejected draft token-]" in terminal.legend(False).plain
