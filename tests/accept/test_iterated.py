"""Several proposals for one position: the law of the token, by enumeration, and how often a proposal is accepted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import accept, noise
from jaxspec.accept import Proposals, iterated, rejection
from jaxspec.base import Draft, Law, Prompt, Verdict, Weights
from jaxspec.decode import autoregressive, rounds
from jaxspec.testing import decoder_law, plain_law, table_model, total_variation
from jaxspec.warp import Controls, sampling

TARGET = table_model(jax.random.key(1), 3, 1)
WARP, PLAIN = sampling(), Controls(jnp.ones(1), jnp.array([3]), jnp.ones(1))
PROMPT = Prompt(jnp.array([[1]]), jnp.array([1]))
TABLES = jax.random.normal(jax.random.key(2), (3, 3, 3))  # three drafters: [drafter, last token, V]


def decoder(propose, warp):
    """Decodes one token a round, by proposals for it; how many were tried counts as accepted, to be seen."""
    plain = autoregressive(TARGET.lm, warp)

    def step(keys, weights, state):
        live, none = jnp.logical_not(state.done), rounds.no_draft(state.length)
        forward, cache = TARGET.lm.extend(weights.target, state.cache, rounds.last_token(state))
        law = warp(state.request.controls, forward.logits)
        choice = iterated(keys, state.length, propose(keys, weights.draft, state), law)
        bad = rounds.not_finite(forward, none.length)
        state, kept = rounds.commit(state, choice.token[:, None], none.length + 1, bad)
        state = state._replace(cache=TARGET.lm.rewind(cache, state.length - 1))
        return rounds.count(state, live, none, Verdict(*choice), kept)

    return plain._replace(step=step)


def proposer(kind, count):
    """`count` proposals from the tables that follow the last token."""

    def propose(keys, tables, state):
        last = rounds.last_token(state)[:, 0]
        at = noise.at(keys, state.length, noise.Purpose.DRAFT)
        tokens, laws = [], []
        for k in range(count):
            law = tables[k if kind == "drafters" else 0, last]
            for earlier in tokens if kind == "without replacement" else []:
                law = jnp.where(jax.nn.one_hot(earlier, 3) > 0, -jnp.inf, law)
            laws.append(jax.nn.log_softmax(law))
            tokens.append(noise.categorical(jax.vmap(jax.random.fold_in, (0, None))(at, k), laws[-1]))
        length = (state.length + last) % (count + 1) if kind == "ragged" else jnp.full_like(last, count)
        return Proposals(jnp.stack(tokens, axis=1), jnp.stack(laws, axis=1), length)

    def best(keys, tables, state):
        order = jnp.argsort(-tables[0, rounds.last_token(state)[:, 0]], axis=-1).astype(jnp.int32)
        return Proposals(order[:, :count], None, jnp.full_like(state.length, count))

    return best if kind == "top" else propose


KINDS = [("drafters", 3), ("samples of one", 2), ("without replacement", 2), ("top", 2), ("ragged", 2)]


@pytest.mark.parametrize(("kind", "count"), KINDS)
def test_the_token_has_the_targets_law(kind, count):
    request = PROMPT, PLAIN
    got = decoder_law(decoder(proposer(kind, count), WARP), Weights(TARGET.params, TABLES), *request, steps=2)
    assert total_variation(got, plain_law(TARGET, PROMPT, WARP, PLAIN, 2)) < 1e-5


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
