"""Several proposals for one position: the law of the token, by enumeration, and how often a proposal is accepted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import accept, noise
from jaxspec.accept import Proposals, iterated, rejection
from jaxspec.base import Draft, Drafter, Law, Verdict
from jaxspec.testing import certify, table_model

TARGET = table_model(jax.random.key(1), 3, 1)
TABLES = jax.random.normal(jax.random.key(2), (3, 3, 3))  # three drafters: [drafter, last token, V]


def one_token_a_round(keys, position, draft, target):
    """The proposals of a round, all for its first position, travel as a draft, of which nothing is ever kept."""
    law = Law(log_probs=target.log_probs[:, :1])
    return Verdict(jnp.zeros_like(position), iterated(keys, position, Proposals(*draft), law).token)


def proposer(kind):
    def propose(keys, params, state, context, gamma, to_law):
        last = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)[:, 0]
        at = noise.at(keys, context.length, noise.Purpose.DRAFT)
        tokens, log_probs = [], []
        law = params[0, last]
        for k in range(gamma):
            if kind == "drafters":
                law = params[k, last]
            if kind == "without replacement" and k:
                law = jnp.where(jax.nn.one_hot(tokens[-1], 3) > 0, -jnp.inf, law)
            log_probs.append(jax.nn.log_softmax(law))
            tokens.append(noise.categorical(jax.vmap(jax.random.fold_in, (0, None))(at, k), log_probs[-1]))
        if kind == "top":
            tokens = list(jnp.argsort(-law, axis=-1)[:, :gamma].T.astype(jnp.int32))
        laws = None if kind == "top" else jnp.stack(log_probs, axis=1)
        length = (context.length + last) % (gamma + 1) if kind == "ragged" else jnp.full_like(last, gamma)
        return Draft(jnp.stack(tokens, axis=1), laws, length), state

    return Drafter(lambda *_: (), propose, lambda params, state, *_: state)


@pytest.mark.parametrize("kind", ["drafters", "samples of one", "without replacement", "top", "ragged"])
def test_the_token_has_the_targets_law(kind):
    gamma = 2 if kind in ("without replacement", "top") else 3
    options = dict(gamma=gamma, steps=2, draft_params=TABLES)
    assert certify(TARGET, drafter=proposer(kind), accept=one_token_a_round, **options) < 1e-5


def rows(count, proposals, seed=0):
    """As many rows, each with its own noise, of proposals drawn from q for a target p."""
    p, q = jnp.log(jnp.array([0.5, 0.3, 0.2])), jnp.log(jnp.array([0.1, 0.2, 0.7]))
    tokens = jax.random.categorical(jax.random.key(seed), q, shape=(count, proposals)).astype(jnp.int32)
    laws = jnp.broadcast_to(q, (count, proposals, 3))
    keys, full = noise.row_keys(jax.random.key(seed + 1), count), jnp.full(count, proposals, jnp.int32)
    return keys, jnp.arange(count, dtype=jnp.int32), Proposals(tokens, laws, full), jnp.broadcast_to(p, (count, 2, 3))


def test_one_proposal_is_the_rejection_rule():
    keys, position, proposals, p = rows(2000, 1)
    choice = iterated(keys, position, proposals, Law(log_probs=p[:, :1]))
    verdict = rejection()(keys, position, Draft(*proposals), Law(log_probs=p))
    accepted = verdict.num_accepted == 1
    np.testing.assert_array_equal(choice.index == 0, accepted)
    np.testing.assert_array_equal(choice.token[~accepted], verdict.next_token[~accepted])
    np.testing.assert_array_equal(choice.token[accepted], proposals.tokens[accepted, 0])


def test_more_proposals_are_accepted_more_often():
    """p = (.5, .3, .2), q = (.1, .2, .7): .5 by the first; p becomes (.8, .2, 0), of which q covers .3."""
    count = 20_000
    for proposals, rate in [(1, 0.5), (2, 0.5 + 0.5 * 0.3)]:
        keys, position, drawn, p = rows(count, proposals)
        choice = iterated(keys, position, drawn, Law(log_probs=p[:, :1]))
        assert abs(float(jnp.mean(choice.index < proposals)) - rate) < 4.5 * np.sqrt(rate * (1 - rate) / count)


def test_corners():
    keys, position, _, _ = rows(3, 1)
    three = jnp.full(3, 3, jnp.int32)
    tokens = jnp.array([[0, 2, 2], [2, 1, 0], [0, 0, 1]])
    certain = iterated(keys, position, Proposals(tokens, None, jnp.array([3, 3, 1])), Law(tokens=jnp.full((3, 1), 2)))
    assert (certain.index.tolist(), certain.token.tolist()) == ([1, 0, 1], [2, 2, 2])
    law = Law(log_probs=jnp.log(jnp.broadcast_to(jnp.array([0.0, 0.0, 1.0]), (3, 1, 3))))
    same = iterated(keys, position, Proposals(tokens, None, jnp.array([3, 3, 1])), law)
    assert (same.index.tolist(), same.token.tolist()) == ([1, 0, 1], [2, 2, 2])
    none = iterated(keys, position, Proposals(tokens[:, :0], None, 0 * three), law)
    assert (none.index.tolist(), none.token.tolist()) == ([0, 0, 0], [2, 2, 2])
    single = Law(log_probs=jnp.zeros((3, 1, 1)))
    one = iterated(keys, position, Proposals(0 * tokens, jnp.zeros((3, 3, 1)), three), single)
    assert (one.index.tolist(), one.token.tolist()) == ([0, 0, 0], [0, 0, 0])
    assert accept.iterated is iterated
