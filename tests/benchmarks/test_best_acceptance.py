"""The bound against a search of all sets of tokens, and rules against it, by formulas that
`tests/rules` holds to theirs.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.best_acceptance import best_acceptance, rule_acceptance

DRAWS = ("replacement", "without_replacement", "top", "mixed")
ROUNDING = 1e-9


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def pairs(count, vocab):
    random = np.random.default_rng(0)
    for case in range(count):
        logits = random.normal(size=vocab) * random.choice([0.5, 2, 5])
        p, q = (
            softmax(logits),
            softmax(logits + random.normal(size=vocab) * random.choice([0.3, 1, 3])),
        )
        if case % 4 == 0:  # a token that the drafter lacks
            q = np.where(np.arange(vocab) == 0, 0, q)
        yield p, q / q.sum()


def drafts(q, count, draw):
    """(the set of draft tokens, its probability); sets may come more than once."""
    vocab, ranked = range(len(q)), np.argsort(-q, kind="stable")
    if draw == "replacement":
        return [
            (set(tokens), np.prod(q[list(tokens)]))
            for tokens in itertools.product(vocab, repeat=count)
        ]
    if draw == "without_replacement":
        all_drafts = []
        for tokens in itertools.permutations(np.flatnonzero(q), count):
            left = 1 - np.concatenate([[0], np.cumsum(q[list(tokens)])[:-1]])
            all_drafts.append((set(tokens), np.prod(q[list(tokens)] / left)))
        return all_drafts
    if draw == "top":
        return [(set(ranked[:count]), 1.0)]
    fixed, rest = set(ranked[: count - 1]), q[ranked[count - 1 :]]
    return [
        (fixed | {token}, x / rest.sum())
        for token, x in zip(ranked[count - 1 :], rest, strict=True)
    ]


@pytest.mark.parametrize("draw", DRAWS)
def test_the_bound_is_the_minimum_over_all_sets_of_tokens(draw):
    for p, q in pairs(24, 6):
        for count in (1, 2, 3):
            all_drafts = drafts(q, count, draw)
            least = 0.0
            for bits in itertools.product([False, True], repeat=len(p)):
                inside = set(np.flatnonzero(bits))
                least = min(
                    least,
                    p[list(inside)].sum() - sum(x for tokens, x in all_drafts if tokens <= inside),
                )
            assert best_acceptance(p, q, count, draw) == pytest.approx(1 + least, abs=ROUNDING)


@pytest.mark.parametrize("draw", DRAWS)
def test_no_rule_beats_the_bound(draw):
    """And mixed draft tokens reach it, whatever p and q."""
    for p, q in pairs(40, 6):
        for count in (1, 2, 4):
            best = best_acceptance(p, q, count, draw)
            reached = {
                rule: rule_acceptance(rule, p, q, count, draw)
                for rule in ("rejection", "k_seq", "coupled")
            }
            assert max(reached.values()) <= best + ROUNDING
            assert (
                count > 1
                or draw == "top"
                or reached["rejection"] == pytest.approx(best, abs=ROUNDING)
            )
            if draw == "mixed":
                assert reached["rejection"] == pytest.approx(best, abs=ROUNDING)


def test_more_draft_tokens_are_accepted_more_often_and_without_replacement_more_than_with():
    for p, q in pairs(20, 8):
        for fewer, more in itertools.pairwise(range(1, 6)):
            for draw in DRAWS[:2]:
                assert (
                    best_acceptance(p, q, fewer, draw)
                    <= best_acceptance(p, q, more, draw) + ROUNDING
                )
        assert (
            best_acceptance(p, q, 3) <= best_acceptance(p, q, 3, "without_replacement") + ROUNDING
        )
        assert best_acceptance(p, p, 2) == pytest.approx(1)


def test_a_vocabulary_of_thousands():
    """Draws without replacement from many tokens are nearly independent."""
    logits = np.random.default_rng(1).normal(size=3000)
    p, q = softmax(logits), softmax(logits + 0.5 * np.random.default_rng(2).normal(size=3000))
    first, second = (best_acceptance(p, q, 4, draw) for draw in DRAWS[:2])
    assert first < second < first + 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count is 0: expected 1 to 3"),
        ({"count": 4}, "count is 4: expected 1 to 3"),
        (
            {"draw": "greedy"},
            "draw is 'greedy': expected one of without_replacement, replacement, top, mixed",
        ),
        ({"p": [1.0, 2.0, 3.0]}, "p of shape .* is not a distribution"),
        ({"p": [[0.5, 0.3, 0.2]]}, "expected one of each"),
    ],
)
def test_bad_input_is_refused(changes, message):
    arguments = {"p": [0.5, 0.3, 0.2], "q": [0.2, 0.2, 0.6], "count": 2} | changes
    with pytest.raises(ValueError, match=message):
        best_acceptance(**arguments)
    with pytest.raises(
        ValueError, match="expected one of rejection, traversal, k_seq, coupled, exact_match"
    ):
        rule_acceptance("block", [1.0], [1.0], 1)
    with pytest.raises(ValueError, match="too many to enumerate"):
        rule_acceptance(
            "rejection", np.full(100, 0.01), np.full(100, 0.01), 4, "without_replacement"
        )
