"""The markup is well formed whatever the text is, and shows the fate of each token."""

import pytest

from jaxspec import trace
from jaxspec.trace import TracedRound


def test_accepted_rejected_and_own_tokens_look_different(read, spelling):
    steps = [TracedRound([], [*b"A"], [], 0), TracedRound([*b"A"], [*b"bcX"], [*b"bcd"], 2)]
    reader = read(trace.html(steps, spelling))
    assert reader.tags.count("div") == 1 + 1 + 2  # the box, the legend, a line a round
    after_legend = reader.spans[4:]
    assert [text for text, _ in after_legend] == ["A", "A", "bc", "d", "X"]
    target, before, accepted, rejected, _ = (style for _, style in after_legend)
    assert "line-through" in rejected and "line-through" not in accepted + target + before
    assert len({target, before, accepted, rejected}) == 4


@pytest.mark.parametrize(
    "text",
    ["<script>alert(1)</script>", "a & b &amp; c", "\"quoted\" 'too'", "</span></div>", "<!--"],
)
def test_text_is_no_markup(text, read, spelling):
    markup = trace.page([TracedRound([], [*text.encode()], [], 0)], spelling, title=text)
    assert ("".join(t for t, _ in read(markup).spans[4:])) == text
    assert "<script" not in markup


def test_control_characters_are_shown(read, spelling):
    reader = read(trace.html([TracedRound([], [*b"a\nb\tc\0\x1b\x7f"], [], 0)], spelling))
    assert reader.spans[4][0] == "a⏎b⇥c␀␛␡"


def test_a_tree_unfolds(read, spelling):
    step = TracedRound([*b"A"], [*b"bX"], [*b"abcd"], 1, parent=[0, 0, 2, 2], path=[1])
    markup = trace.html([step], spelling)
    reader = read(markup)
    assert reader.tags.count("details") == 1
    drawn = dict(reader.spans[-5:])
    assert (
        "line-through" in drawn["a"]
        and "line-through" in drawn["c"]
        and "line-through" not in drawn["b"]
    )
    assert drawn["X"] == read(trace.html([TracedRound([], [*b"X"], [], 0)], spelling)).spans[-1][1]


def test_long_context_is_cut_on_the_left(read, spelling):
    steps = [TracedRound([*b"0123456789"], [*b"x"], [], 0)]
    assert [text for text, _ in read(trace.html(steps, spelling, context=4)).spans[4:]] == [
        "…6789",
        "x",
    ]
    assert [text for text, _ in read(trace.html(steps, spelling, context=0)).spans[4:]] == [
        "…",
        "x",
    ]


def test_nothing_comes_from_elsewhere():
    markup = trace.page([TracedRound([], [1], [], 0)])
    assert not any(word in markup for word in ("http", "src=", "<link", "class="))
