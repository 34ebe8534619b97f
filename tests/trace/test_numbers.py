"""TraceNumbers of draft tokens in pictures: on a terminal, as HTML."""

from __future__ import annotations

from jaxspec import trace
from jaxspec.trace import TracedRound, terminal
from jaxspec.trace.numbers import LEGEND, numbered, of_whole_round

NUMBERS = {
    "q": [0.5, 0.75, 0.25],
    "p": [0.25, 0.125, 0.5],
    "r": [0.375, 0.625, None],
    "acceptance": [0.5, 0.1875, 1.0],
    "residual_mass": [0.25, 0.625, 0.5],
    "entropy": [0.875, 0.5, None],
}
CHAIN = TracedRound([5], [6, 2], [6, 7, 8], 1, numbers=NUMBERS)


def test_a_line_for_each_draft_token_and_one_for_the_round():
    lines = numbered(None, CHAIN)
    assert [line.fate for line in lines] == ["accepted", "rejected", "untried"]
    assert lines[0].numbers == ["0.500", "0.250", "0.500", "0.375", "0.500", "0.875"]
    assert lines[2].numbers == ["0.250", "0.500", "2.000", "–", "1.000", "–"]
    assert of_whole_round(CHAIN) == "γ 3 · entropy 0.875 · Z 0.625"
    assert of_whole_round(CHAIN._replace(num_accepted=3, new=[6, 7, 8, 2])) == "γ 3 · entropy 0.875"
    assert (
        numbered(None, CHAIN._replace(numbers=None)) == []
        and of_whole_round(CHAIN._replace(numbers=None)) == ""
    )


def test_a_tree_leaves_out_nodes_that_were_not_verified(spelling):
    tree = {"draft": [*b"abc"], "parent": [0, -1, 1], "path": [0]}
    lines = numbered(
        spelling, TracedRound([*b"x"], [*b"ad"], num_accepted=1, numbers=NUMBERS, **tree)
    )
    assert [(line.token, line.fate) for line in lines] == [("a", "accepted"), ("c", "rejected")]


def test_the_terminal_and_html_show_them():
    plain = terminal.trace(None, 3, CHAIN, width=80, colour=False).plain
    head, heading, *rows, whole_round = plain.splitlines()
    assert (
        head == terminal.trace(None, 3, CHAIN._replace(numbers=None), width=80, colour=False).plain
    )
    assert (
        heading.split()[:5] == ["q", "p", "p/q", "r", "r"]
        and whole_round.strip() == "γ 3 · entropy 0.875 · Z 0.625"
    )
    assert [row.split()[0] for row in rows] == ["|6", "[-7-]", "8"] and max(
        map(len, plain.splitlines())
    ) < 80
    assert len({row.index(" 0.", 19) for row in rows}) == 1  # columns stand below each other
    assert rows[1].split()[1:] == ["0.750", "0.125", "0.167", "0.625", "0.188", "0.500", "rejected"]
    assert (
        LEGEND in terminal.legend(False, with_numbers=True).plain
        and LEGEND not in terminal.legend(True).plain
    )
    markup = trace.html([CHAIN])
    assert markup.count("<tr") == 4 and ">0.625</td>" in markup and "Z 0.625" in markup
    plain_markup = trace.html([CHAIN._replace(numbers=None)])
    assert (
        "<table" not in plain_markup
        and "uniform draw" in markup
        and "uniform draw" not in plain_markup
    )
