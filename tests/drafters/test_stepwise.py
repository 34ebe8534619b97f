"""The draft loop: how many passes it makes, what it draws, where it stops, and what it tells the
policy.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import Distribution, DraftContext, Prompt, Reading, noise
from jaxspec.drafters.stepwise import sequential

ROWS, GAMMA, VOCAB = 3, 5, 6
KEYS = noise.row_keys(jax.random.key(0), ROWS)
ROW = Prompt(jnp.array([[1, 2, 0], [3, 0, 0], [4, 5, 2]]), jnp.array([2, 1, 3]))
TABLE = jax.random.normal(jax.random.key(1), (VOCAB, VOCAB))
LAST = jnp.array([2, 3, 2])  # of each row


def to_distribution(logits, draft_tokens=None, seen=None):
    return Distribution(jax.nn.log_softmax(logits), logits=logits)


def greedy(logits, draft_tokens=None, seen=None):
    return Distribution(tokens=jnp.argmax(logits, axis=-1).astype(jnp.int32), logits=logits)


class Drafter:
    """A table that looks at the last token; it counts the passes that were made."""

    def __init__(self, ends=None):
        self.passes, self.ends = [], ends

    def read(self, tokens, carry):
        jax.debug.callback(lambda: self.passes.append(1))
        return TABLE[tokens], (carry[0] + 1, tokens)

    def draft(self, limit, *, adaptive=True, options=None, **context_fields):
        """A draft in a program of its own, and the number of passes."""
        self.passes.clear()

        @jax.jit
        def propose(limit):
            context = DraftContext(KEYS, ROW, limit, GAMMA, adaptive, to_distribution)._replace(
                **context_fields
            )
            root = functools.partial(self.read, LAST[:, None])
            nodes = lambda tokens, parent, level, carry: self.read(tokens, carry)  # noqa: E731
            going = None if self.ends is None else lambda carry: self.ends(carry[1][:, 0])
            reading = Reading(
                (jnp.zeros((), jnp.int32), LAST[:, None]), root, nodes, lambda *_: None, going
            )
            return sequential(reading, context, **options or {})

        draft, (count, _), slots = propose(jnp.array(limit, jnp.int32))
        jax.block_until_ready(draft)
        jax.effects_barrier()
        assert int(count) == len(self.passes) and int(jnp.sum(slots >= 0)) == max(
            len(self.passes) - 1, 0
        )
        return draft, len(self.passes)


@pytest.mark.parametrize(
    ("limit", "passes"),
    [([5, 5, 5], 5), ([0, 0, 0], 0), ([0, 2, 1], 2), ([1, 1, 1], 1), ([0, 0, 4], 4)],
)
def test_a_pass_for_each_draft_token_of_the_longest_row_and_no_other(limit, passes):
    draft, num_passes = Drafter().draft(limit)
    assert draft.length.tolist() == limit and num_passes == passes


def test_without_a_policy_all_passes_are_made():
    """Limits are then below gamma in the last rounds alone, and the decoder cuts the draft."""
    draft, num_passes = Drafter().draft([5, 0, 2], adaptive=False)
    assert num_passes == GAMMA and (draft.length >= jnp.array([5, 0, 2])).all()


@pytest.mark.slow
def test_each_token_is_drawn_from_the_distribution_that_is_told():
    draft, _ = Drafter().draft([5, 5, 5])
    before = jnp.concatenate([LAST[:, None], draft.tokens[:, :-1]], axis=1)
    np.testing.assert_allclose(draft.log_probs, jax.nn.log_softmax(TABLE[before]), atol=1e-6)
    at = noise.at(KEYS, ROW.length, noise.Purpose.DRAFT)
    for i in range(GAMMA):
        keys = jax.vmap(lambda key, i=i: jax.random.fold_in(key, i))(at)
        assert (
            draft.tokens[:, i].tolist() == noise.categorical(keys, draft.log_probs[:, i]).tolist()
        )


@pytest.mark.slow
def test_what_a_row_drafts_does_not_depend_on_the_limits_of_others():
    unlimited, _ = Drafter().draft([5, 5, 5])
    for adaptive in (True, False):
        for limit in ([5, 0, 0], [0, 3, 5], [1, 2, 3]):
            draft, _ = Drafter().draft(limit, adaptive=adaptive)
            for row, n in enumerate(limit):
                assert draft.tokens[row, :n].tolist() == unlimited.tokens[row, :n].tolist()
                assert (draft.log_probs[row, :n] == unlimited.log_probs[row, :n]).all()


def test_where_nothing_is_drawn_the_draft_is_of_point_masses():
    draft, _ = Drafter().draft([5, 5, 5], to_distribution=greedy)
    assert draft.log_probs is None and draft.aux is None and draft.parent is None
    before = jnp.concatenate([LAST[:, None], draft.tokens[:, :-1]], axis=1)
    assert (draft.tokens == jnp.argmax(TABLE[before], axis=-1)).all()


def test_coupled_tokens_are_plain_samplings_and_point_masses():
    draft, _ = Drafter().draft([5, 5, 5], options=dict(coupled=True))
    assert draft.log_probs is None
    last = LAST
    for i in range(GAMMA):
        gumbel = noise.gumbel(noise.at(KEYS, ROW.length + i, noise.Purpose.TOKEN), VOCAB)
        assert (draft.aux["gumbel"][:, i] == gumbel).all()
        last = noise.first_largest(jax.nn.log_softmax(TABLE[last]) + gumbel)
        assert draft.tokens[:, i].tolist() == last.tolist()


def test_the_distribution_is_asked_for_after_the_tokens_drafted_so_far():
    seen_by = []

    def recorded(logits, draft_tokens=None, seen=None):
        if draft_tokens is not None:  # and not just its shape is asked for
            jax.debug.callback(lambda *read: seen_by.append(read), draft_tokens, seen, ordered=True)
        return greedy(logits)

    draft, _ = Drafter().draft([5, 5, 5], to_distribution=recorded)
    assert len(seen_by) == GAMMA
    for i, (tokens, seen) in enumerate(seen_by):
        assert seen[0, 0].tolist() == [j < i for j in range(GAMMA)]
        assert (tokens[:, :i] == draft.tokens[:, :i]).all()


def test_a_policy_ends_the_draft_after_the_token_in_question():
    """The token in question is judged; rows end by themselves, and the loop with the last one."""
    stop_after = jnp.array([1, 3, 0])  # tokens
    read = dict(
        confidence=lambda distribution: jnp.exp(jnp.max(distribution.log_probs[:, 0], axis=-1)),
        should_continue=lambda i, confidences: i + 1 < stop_after,
    )
    draft, num_passes = Drafter().draft([5, 5, 5], **read)
    assert draft.length.tolist() == [1, 3, 1] and num_passes == 3
    confidences = jnp.exp(jnp.max(draft.log_probs, axis=-1))
    real = jnp.arange(GAMMA)[None, :] < draft.length[:, None]
    np.testing.assert_allclose(
        draft.aux["confidence"], jnp.where(real, confidences, 0.0), atol=1e-6
    )


def test_a_row_ends_before_a_token_that_has_no_distribution():
    """After token 3 this one has nothing: a row that ends in it drafts nothing, another ends where
    3 was drafted.
    """
    unlimited, _ = Drafter().draft([5, 5, 5], to_distribution=greedy)
    ending = Drafter(lambda tokens: tokens != 3)
    draft, num_passes = ending.draft([5, 5, 5], adaptive=False, to_distribution=greedy)
    expected = []
    for last, tokens in zip(LAST.tolist(), unlimited.tokens.tolist(), strict=True):
        row = [last, *tokens]
        expected.append(min(row.index(3), GAMMA) if 3 in row else GAMMA)
    assert draft.length.tolist() == expected and expected[1] == 0
    assert num_passes == min(max(expected) + 1, GAMMA)
