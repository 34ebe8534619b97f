"""The hits of tables: against their logits, and without an array as wide as a large vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import Prompt, Room
from jaxspec.drafters.lookups.ngram import count
from jaxspec.drafters.lookups.ngram_model import language_model
from jaxspec.training import ngrams

RANDOM = np.random.default_rng(0)
TEXTS = [RANDOM.integers(6, size=n).astype(np.int32) for n in (40, 1, 25)]
HELD = [RANDOM.integers(7, size=n).astype(np.int32) for n in (9, 3, 1)]  # 6 was never seen


@pytest.mark.slow
@pytest.mark.parametrize(("order", "begin"), [(1, ()), (3, ()), (2, [0]), (3, [0, 6])])
def test_hits_are_where_the_largest_logit_is(order, begin):
    config, tables = count(TEXTS, vocab_size=7, order=order, begin=begin)
    lm, right = language_model(config), 0
    for row in HELD:
        fed = jnp.asarray([*begin, *row.tolist()])[None]
        _, cache = lm.prefill(tables, Prompt(fed, jnp.array([1])), Room(fed.shape[1]))
        forward, _ = lm.extend(tables, lm.rewind(cache, jnp.array([0])), fed)
        draft_tokens = np.asarray(forward.logits)[0].argmax(axis=-1)[:-1]
        draft_tokens = draft_tokens[max(0, len(begin) - 1) :]
        right += int((draft_tokens == row[-len(draft_tokens) :]).sum()) if len(draft_tokens) else 0
        if not begin:  # a row's first token is drafted from nothing
            right += int(row[0] == tables.levels[0].follower[0, 0])
    assert ngrams.hits(config, tables, HELD, begin) == pytest.approx(right / 13)


def test_a_large_vocabulary_takes_no_more_memory():
    """No array of the program has it for an axis; logits of 2,048 positions would have 2 GB."""
    vocab = 262_139
    config, tables = count([[vocab - 1, 5, vocab - 1, 5]], vocab_size=vocab, order=2)
    tokens = (
        jnp.full((ngrams.ROWS, ngrams.WIDTH), -1, jnp.int32)
        .at[0, :2]
        .set(jnp.array([vocab - 1, 5]))
    )
    program = jax.make_jaxpr(
        lambda tables, tokens: ngrams._right(config, tables, tokens, tokens[0, :1])
    )(tables, tokens)
    assert str(vocab) not in str(program)
    assert ngrams.hits(config, tables, [np.array([5, vocab - 1, 5])]) == pytest.approx(1.0)
