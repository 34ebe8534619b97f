"""Tables that grow: what is entered, what is not, and what a draft makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import drafters
from jaxspec.core import Caches, DraftContext, DraftStart, Forward, Prompt, RoundEnd, Verdict
from jaxspec.drafters.lookups.online_ngram import _slot

VOCAB, WIDTH, GAMMA = 12, 20, 4
FOUR = drafters.online_ngram(4, top=2, slots=1000).functions


def rows(*lists):
    tokens = np.zeros((len(lists), WIDTH), np.int32)
    for i, row in enumerate(lists):
        tokens[i, : len(row)] = row
    return Prompt(jnp.asarray(tokens), jnp.array([len(row) for row in lists]))


def answers(*best):
    """A pass of the target that finds these tokens best at each position, the first of each list
    the very best.
    """
    scores = np.zeros((len(best), GAMMA + 1, VOCAB), np.float32)
    for i, row in enumerate(best):
        for j, ranks in enumerate(row):
            scores[i, j, ranks] = 1 / np.arange(1, len(ranks) + 1)
    return Forward(jnp.asarray(scores), None)


@functools.partial(jax.jit, static_argnames="drafter")
def begun(row, drafter=FOUR):
    return drafter.init(DraftStart(None, row, None, None))


@functools.partial(jax.jit, static_argnames="drafter")
def propose(state, row, drafter):
    context = DraftContext(None, row, None, GAMMA, False, None)
    return drafter.propose(None, Caches(None, state), context)


def drafted(state, row, drafter=FOUR):
    draft, _ = propose(state, row, drafter)
    return [row[:n].tolist() for row, n in zip(draft.tokens, draft.length, strict=True)]


def first(state, *row):
    """The first draft token after a row, None if there is none."""
    (draft_token,) = drafted(state, rows(row))
    return draft_token[0] if draft_token else None


@jax.jit
def committed(state, row, accepted, forward):
    return FOUR.commit(
        RoundEnd(None, Caches(None, state), row, Verdict(accepted, None, None), forward)
    ).draft


def after(state, row, new, accepted, forward):
    """The state after a round in which so many draft tokens were accepted, and `row` grew by the
    `new` tokens.
    """
    grown = rows(*[r[:n].tolist() + x for r, n, x in zip(row.tokens, row.length, new, strict=True)])
    return committed(state, grown, jnp.array(accepted), forward), grown


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        ([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 2, 4]),  # the longest context decides
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # of what was entered twice the last remains
        ([7, 7], [7, 7, 7, 7]),
        ([1, 2, 3], []),
        ([5], []),
        ([0, 8, 0], [8, 0, 8, 0]),  # id 0 is a token like any other, padding is not
        ([0, 0, 3], []),
    ],
)
def test_the_prompts_own_ngrams_are_known(prompt, expected):
    assert drafted(begun(rows(prompt)), rows(prompt)) == [expected]


def test_a_draft_ends_where_nothing_is_known():
    assert drafted(begun(rows([1, 2, 3, 4])), rows([0, 1, 2])) == [[3, 4]]


def test_what_is_verified_is_entered_and_what_was_rejected_is_not():
    """Draft tokens x y z, of which x is accepted: the target's tokens after the last one and after
    x count.
    """
    state, _ = after(
        begun(rows([1, 2])), rows([1, 2]), [[5, 6]], [1], answers([[5], [6], [7], [8]])
    )
    followers = {last: first(state, 0, last) for last in range(1, 9)}
    assert followers == {1: 2, 2: 5, 5: 6, **dict.fromkeys((3, 4, 6, 7, 8))}


def test_how_rounds_fall_does_not_matter():
    """The same tokens in one round, and in a round each, with a context that comes twice."""
    text, ranks = [3, 4, 3, 4, 9], [[3, 1], [4, 2], [3, 5], [6, 4], [7, 9]]
    at_once, _ = after(begun(rows([1, 2])), rows([1, 2]), [text], [4], answers(ranks))
    state, row = begun(rows([1, 2])), rows([1, 2])
    for token, best in zip(text, ranks, strict=True):
        state, row = after(state, row, [[token]], [0], answers([best]))
    np.testing.assert_array_equal(at_once, state)
    assert first(state, 8, 3) == 6  # the later of two entries


def test_a_collision_is_detected():
    """Contexts share one slot here: the last one is known, and no other is taken for it."""
    drafter = drafters.online_ngram(2, slots=1).functions
    state = begun(rows([1, 2, 3, 4]), drafter)
    assert [drafted(state, rows([t]), drafter)[0] for t in (1, 2, 3, 4)] == [[], [], [4], []]


def test_slots_are_used_evenly():
    """Neighbouring ids and neighbouring pairs, half as many as slots: about 39% of the slots are
    taken.
    """
    ids = jnp.arange(500)
    for context in (jnp.stack([ids * 0 - 1, ids], axis=1), jnp.stack([ids, ids + 1], axis=1)):
        assert 360 < len(np.unique(_slot(context, 1000))) < 430


def test_second_choices_count():
    """After 1 2 3 the target wavered between 5 and 6; after 2 3 and after 3 it has generated 6
    since.
    """
    state, row = after(begun(rows([1, 2])), rows([1, 2]), [[3, 5]], [1], answers([[3, 0], [5, 6]]))
    assert first(state, 1, 2, 3) == 5
    state, row = after(state, row, [[4, 2, 3, 6]], [3], answers([[4, 0], [2, 0], [3, 0], [6, 0]]))
    assert first(state, 1, 2, 3) == 6
    assert first(state, 4, 2, 3) == 6


def test_rows_learn_for_themselves():
    row = rows([1, 2, 1], [1, 3, 1])
    state = begun(row)
    assert [draft_token[0] for draft_token in drafted(state, row)] == [2, 3]
    state, row = after(state, row, [[2], [4]], [0, 0], answers([[2]], [[4]]))
    assert [draft_token[0] for draft_token in drafted(state, rows([1], [1]))] == [2, 4]


def test_one_scatter_enters_a_round():
    """No two entries of the scatter may therefore have one slot."""
    state = begun(rows([1, 2]))
    args = state, rows([1, 2, 3]), jnp.array([0]), answers([[3], [4]])
    assert str(jax.make_jaxpr(committed)(*args)).count("= scatter[") == 1


def test_bad_arguments_are_refused():
    with pytest.raises(
        ValueError,
        match="n is 1, top 3 and slots 1024: expected 2 to 16, at least 1 and at least 1",
    ):
        drafters.online_ngram(1)
