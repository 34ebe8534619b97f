"""The markup is well formed whatever the text is, and says what became of each token."""

import html.parser

import pytest

from jaxspec import trace
from jaxspec.trace import Round


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(map(chr, tokens))

    def convert_ids_to_tokens(self, token):
        return f"<{token}>"


def ids(text):
    return [ord(letter) for letter in text]


class Reader(html.parser.HTMLParser):
    """Collects text by the style of its span, and checks that tags are closed in order."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.found, self.lines = [], [], 0

    def handle_starttag(self, tag, attributes):
        if tag == "meta":
            return
        self.open.append((tag, dict(attributes).get("style", "")))
        self.lines += tag == "div"

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "span":
            self.found.append((data, self.open[-1][1]))


def read(markup):
    reader = Reader()
    reader.feed(markup)
    reader.close()
    assert reader.open == []
    return reader


def test_colours():
    steps = [Round([], ids("A"), [], 0), Round(ids("A"), ids("bcX"), ids("bcd"), 2)]
    reader = read(trace.html(steps, Letters()))
    assert reader.lines == 1 + 1 + 2  # the box, the legend, a line a round
    after_legend = reader.found[4:]
    assert [text for text, _ in after_legend] == ["A", "A", "bc", "d", "X"]
    own, before, accepted, rejected, _ = (style for _, style in after_legend)
    assert "line-through" in rejected and "line-through" not in accepted + own + before
    assert len({own, before, accepted, rejected}) == 4


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "a & b &amp; c", "\"quoted\" 'too'", "</span></div>", "<!--"]
)
def test_text_is_no_markup(text):
    markup = trace.page([Round([], ids(text), [], 0)], Letters(), title=text)
    assert ("".join(t for t, _ in read(markup).found[4:])) == text
    assert "<script" not in markup


def test_control_characters_are_shown():
    reader = read(trace.html([Round([], ids("a\nb\tc\0\x1b\x7f"), [], 0)], Letters()))
    assert reader.found[4][0] == "a⏎b⇥c␀␛␡"


def test_long_context_is_cut_on_the_left():
    steps = [Round(ids("0123456789"), ids("x"), [], 0)]
    assert [text for text, _ in read(trace.html(steps, Letters(), context=4)).found[4:]] == ["…6789", "x"]
    assert [text for text, _ in read(trace.html(steps, Letters(), context=0)).found[4:]] == ["…", "x"]


def test_nothing_comes_from_elsewhere():
    markup = trace.page([Round([], [1], [], 0)])
    assert not any(word in markup for word in ("http", "src=", "<link", "class="))
