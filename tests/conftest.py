"""What tests of more than one package share."""

import html.parser

import pytest

from jaxspec import accept, noise
from jaxspec.base import Rule

collect_ignore = ["scripts"]  # they are run by tests, in processes of their own, or by hand


class Bytes:
    """As much of a tokenizer as spelling needs: a token is a byte, and there is one special token."""

    end = 256

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return bytes(token for token in tokens if token != self.end).decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, token):
        return "<end>" if token == self.end else f"<{token}>"


@pytest.fixture
def spelling():
    """A tokenizer of bytes."""
    return Bytes()


class Markup(html.parser.HTMLParser):
    """What HTML says: all of it, its tags, and the text of each span with its style. Tags must be closed in order."""

    def __init__(self, markup):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.spans, self.said = [], [], [], ""
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append((tag, dict(attributes).get("style", "")))
            self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.said += data
        if self.open and self.open[-1][0] == "span":
            self.spans.append((data, self.open[-1][1]))


@pytest.fixture
def read():
    """Reads HTML."""
    return Markup


@pytest.fixture
def wrong_rule():
    """The rejection rule with the mistake that is made most often: after a rejection it draws from p."""

    def verify(keys, position, draft, target):
        verdict = accept.rejection().verify(keys, position, draft, target)
        again = noise.at(keys, position, noise.Purpose.RESIDUAL)
        return verdict._replace(next_token=noise.categorical(again, target.log_probs[:, 0]))

    return Rule(verify, "wrong", exact=True)  # or so it states
