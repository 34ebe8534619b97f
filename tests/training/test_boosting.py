"""Weights are what earlier drafters miss of the target's distribution, and tables are counted with
them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.lookups.ngram import count
from jaxspec.testing import table_model, table_model_from
from jaxspec.training import boosting

P, FIRST, SECOND = ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.4, 0.3], [0.2, 0.6, 0.1, 0.1])
TARGET, *BOTH = (table_model_from(jnp.log(jnp.array(probs))) for probs in (P, FIRST, SECOND))
ROWS = [[3, 0, 1, 2], [0, 0, 1]]


def test_weights_are_what_is_left_of_p_over_p():
    """By hand: q1 leaves (.3 .1 0 0), and q2 takes .4 times (.2 .6 .1 .1) of that."""
    first, other = boosting.missed(ROWS, TARGET, BOTH[:1])
    np.testing.assert_allclose(first, [0, 0.3 / 0.4, 0.1 / 0.3, 0], atol=1e-6)
    np.testing.assert_allclose(other, [0, 0.3 / 0.4, 0.1 / 0.3], atol=1e-6)
    np.testing.assert_allclose(
        boosting.missed(ROWS, TARGET, BOTH)[0], [0, 0.22 / 0.4, 0, 0], atol=1e-6
    )
    # At temperature 0 the text is the target's best token, which the first drafter has not, and the
    # target itself has.
    assert boosting.missed([[3, 0, 0]], TARGET, BOTH[:1], temperature=0)[0].tolist() == [0, 1, 1]
    assert boosting.missed([[3, 0, 0]], TARGET, [TARGET], temperature=0)[0].tolist() == [0, 0, 0]


def test_each_table_learns_what_those_before_it_miss():
    rows = [np.random.default_rng(0).choice(4, size=400, p=P).astype(np.int32)]
    second, third = boosting.boosted_ngrams(rows, TARGET, order=1, count=2, after=BOTH[:1])
    follower, times = (
        np.asarray(x)[0] for x in (second.params.levels[0].follower, second.params.levels[0].times)
    )
    # the only tokens of which the first drafter has too little
    assert follower[times > 0].tolist() == [0, 1]
    q = times / times.sum()
    np.testing.assert_allclose(q[:2], [0.75, 0.25], atol=0.05)
    # Which is the rest of p nearly: nothing much is left for a third, but what sampling has left.
    weight = sum(row.sum() for row in boosting.missed(rows, TARGET, [BOTH[0], second])) / 400
    assert weight < 0.04 and third.name == "1-gram"
    with pytest.raises(
        ValueError, match="1 drafters miss nothing of the texts: leave the next one out"
    ):
        boosting.boosted_ngrams([[3, 0, 0]], TARGET, order=1, after=[TARGET], temperature=0)


def test_weights_count_tokens_and_whole_contexts():
    rows = [[0, 1, 0, 2, 0, 1, 3, 1]]
    weights = [np.array([0, 1, 0, 5, 0, 1, 0, 0])]
    _, tables = count(rows, vocab_size=4, order=2, weights=weights)
    assert tables.levels[0].follower[0, :2].tolist() == [2, 1] and tables.levels[0].times[
        0, :3
    ].tolist() == [5, 2, 0]
    assert tables.levels[1].token.tolist() == [0]  # what follows 1, 2 and 3 counts nothing
    assert tables.levels[1].times[0, :2].tolist() == [5, 2]
    ones = [np.ones(8, np.int64)]
    same, plain = (
        count(rows, vocab_size=4, order=3, weights=ones),
        count(rows, vocab_size=4, order=3),
    )
    assert same[0] == plain[0]
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), same[1], plain[1]))
    for wrong, message in (
        ([np.ones(7, np.int64)], "expected a whole number for each token of each row"),
        ([np.full(8, 0.5)], "expected whole numbers of 0 or more"),
        ([np.zeros(8, np.int64)], "all weights are 0"),
    ):
        with pytest.raises(ValueError, match=message):
            count(rows, vocab_size=4, order=2, weights=wrong)
    encoder = table_model(jax.random.key(1), 4, order=1, encoder=True)
    with pytest.raises(
        ValueError, match="is an encoder-decoder: expected language models without an encoder"
    ):
        boosting.missed(ROWS, encoder, BOTH)
