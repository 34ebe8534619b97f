"""A round by the fates of its tokens, and spelt."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import trace
from jaxspec.decode import loop
from jaxspec.testing import table_model
from jaxspec.trace import RoundText, TokenFates, TracedRound


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (TracedRound([], [7], [], 0), TokenFates([], [], [7])),  # off the prompt, or plain decoding
        (TracedRound([7], [1, 2, 9], [1, 2, 3, 4], 2), TokenFates([1, 2], [3], [9])),
        (TracedRound([7], [9], [1, 2], 0), TokenFates([], [1], [9])),
        # all accepted: a bonus token
        (TracedRound([7], [1, 2, 9], [1, 2], 2), TokenFates([1, 2], [], [9])),
        # cut at an end token or the limit
        (TracedRound([7], [1], [1, 2, 3], 2), TokenFates([1], [], [])),
        (TracedRound([7], [1, 2], [1, 2, 3], 2), TokenFates([1, 2], [], [])),
    ],
)
def test_a_round_is_split_by_what_became_of_its_tokens(step, expected):
    assert trace.judge(step) == expected


@pytest.mark.parametrize(
    ("new", "path", "expected"),
    [
        # of the last node's children none was accepted
        ([5, 8, 9], [1, 3], TokenFates([5, 8], [6], [9])),
        ([5, 9], [1], TokenFates([5], [8, 2], [9])),
        ([9], [], TokenFates([], [4, 5], [9])),
        ([5, 8, 6, 9], [1, 3, 5], TokenFates([5, 8, 6], [], [9])),  # down to a leaf
        ([5], [1, 3], TokenFates([5], [], [])),  # cut at an end token or the limit
    ],
)
def test_a_tree_is_split_by_its_path(new, path, expected):
    """4 and 5 follow the last token, 8 and 2 follow 5, 7 and 6 were cut off or follow the 8."""
    step = TracedRound(
        [1], new, [4, 5, 7, 8, 2, 6], len(path), parent=[0, 0, -1, 2, 2, 4], path=path
    )
    assert trace.judge(step) == expected


def test_tokens_are_spelt_in_context(spelling):
    assert trace.spell(spelling, [*b"Ab"], [*b"c", spelling.end]) == ["c", "<end>"]
    assert trace.spell(spelling, [], []) == []


def test_half_a_character_is_completed_by_the_next_token(spelling):
    first, second = "ä".encode()
    assert trace.spell(spelling, [*b"B"], [first, second, *b"r"]) == ["\ufffd", "ä", "r"]
    assert trace.spell(spelling, [*b"B", first], [second]) == ["ä"]


def test_a_round_is_spelt_part_by_part(spelling):
    step = TracedRound([*b"x"], [*b"ab", spelling.end], [*b"abc"], 2)
    assert trace.spelt(spelling, step) == RoundText("x", "ab", "c", "<end>")
    assert trace.spelt(None, TracedRound([5], [6, 2], [6, 7], 1)) == RoundText(
        " 5", " 6", " 7", " 2"
    )


def test_a_trace_is_as_large_as_its_text():
    """Each round holds its own tokens, and where it begins; what precedes it is one list for
    all.
    """

    def size(count):
        ones = np.ones((1, count), np.int32)
        arrays = loop.Trace(ones[..., None], ones, ones, 2 * ones, ones)
        rounds = trace.of_row(range(1000, 1001 + 2 * count), arrays, 0)
        assert list(rounds[-1].before) == list(range(1000, 999 + 2 * count)) and rounds[
            2
        ].before == [1000, 1001, 1002]
        return len(pickle.dumps(rounds))

    assert size(400) < 2.2 * size(200)


def test_only_the_end_of_a_long_text_is_spelt(spelling, monkeypatch):
    decoded = []
    monkeypatch.setattr(
        type(spelling),
        "decode",
        lambda self, tokens, **_: decoded.append(len(tokens)) or "x" * len(tokens),
    )
    text = [*b"x"] * 5000
    step = TracedRound(trace.TokensView(text, 5000), [*b"ab"], [*b"ac"], 1, parent=[0, 0], path=[0])
    assert trace.spelt(spelling, step).before.startswith("…x")
    trace.spelt_branches(spelling, step)
    assert max(decoded) < 300
    assert "".join(trace.spelt(None, step, context=2)) == "… 120 120 97 98"


def test_rounds_of_a_generation_make_its_tokens():
    model, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
    prompt = jaxspec.Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))
    out = jaxspec.generate(model, prompt, drafter=draft, gamma=3, max_new_tokens=9)
    for row in range(2):
        tokens = out.tokens[row, : out.lengths[row]].tolist()
        rounds = trace.of_row(tokens, out.trace, row)
        assert [token for step in rounds for token in step.new] == tokens
        assert len(rounds) == 1 + out.stats.rounds[row]
        assert sum(len(step.draft) for step in rounds) == out.stats.drafted[row]
        for step in rounds:
            accepted, rejected, target = trace.judge(step)
            assert accepted + target == step.new and (not rejected or rejected != target[:1])
