"""A drafter that draws from other distributions than its draft declares is found out by a
certificate.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxspec.core import Draft, Drafter, Draw, TreeSize, noise
from jaxspec.decode.request import prepare
from jaxspec.drafters.common import no_commit, no_state
from jaxspec.testing import certify, table_model_from
from jaxspec.testing.certificate import decoder_distribution
from jaxspec.testing.declared import check_declared

P = jnp.array([0.4, 0.3, 0.2, 0.1])
FIRST = jnp.log(jnp.array([0.1, 0.2, 0.4, 0.3]))
SECOND = jnp.log(jnp.array([0.2, 0.6, 0.1, 0.1]))
TARGET = table_model_from(jnp.log(P))
SIZE = TreeSize(nodes=2, depth=1)


def siblings(*drawn_from, sources=False):
    """Two draft tokens for the next position, each from another distribution; declared are the
    first one or all.
    """

    def propose(weights, caches, context):
        keys = noise.at(context.keys, context.row.length, noise.Purpose.DRAFT)
        batch = context.row.length.shape[0]
        tokens = jnp.stack(
            [
                noise.categorical(
                    noise.split(keys, number, 1)[:, 0], jnp.broadcast_to(log_probs, (batch, 4))
                )
                for number, log_probs in enumerate(drawn_from)
            ],
            axis=1,
        )
        declared = jnp.broadcast_to(drawn_from[0], (batch, 1, 4))
        draws = jnp.full_like(tokens, int(Draw.WITH_REPLACEMENT))
        parent = jnp.zeros_like(tokens)
        draft = Draft(tokens, jnp.full_like(context.row.length, 2), parent, declared, draws)
        if sources:
            second = jnp.broadcast_to(drawn_from[1], (batch, 1, 4))
            numbers = jnp.broadcast_to(jnp.array([[0, 1]]), tokens.shape)
            draft = draft._replace(sources=numbers, other_log_probs=(second,))
        return draft, caches

    return Drafter(no_state, propose, no_commit, tree=SIZE._replace(sources=1 + sources))


@pytest.mark.quick
def test_children_of_several_drafters_are_found_out():
    """0.254 where the target's probability is 0.4: no round can tell, and the certificate names the
    cause.
    """
    prepared = prepare(
        TARGET, [[0]], drafter=siblings(FIRST, SECOND), temperature=1.0, key=jax.random.key(0)
    )
    second = decoder_distribution(prepared, steps=2)
    wrong = sum(share for tokens, share in second.items() if tokens[1] == 0)
    assert round(wrong, 3) == 0.254
    with pytest.raises(
        ValueError,
        match=r"draft token 1 is .* Tokens of several drafters at one node have no common",
    ):
        certify(TARGET, drafter=siblings(FIRST, SECOND), steps=2)


def test_children_of_one_distribution_are_right():
    assert certify(TARGET, drafter=siblings(FIRST, FIRST), steps=2) < 1e-6


def test_children_of_several_drafters_are_right_where_each_distribution_is_declared():
    drafter = siblings(FIRST, SECOND, sources=True)
    assert certify(TARGET, drafter=drafter, steps=2) < 1e-6
    check_declared(prepare(TARGET, [[0]], drafter=drafter, temperature=1.0, key=jax.random.key(0)))
    with pytest.raises(
        ValueError,
        match=r"2 distributions for the children of a node and announces 1: set TreeSize",
    ):
        certify(TARGET, drafter=drafter._replace(tree=SIZE), steps=2)
    with pytest.raises(
        ValueError, match=r"draft token 1 is .* declare each drafter's distribution \(Draft.sources"
    ):
        certify(TARGET, drafter=siblings(FIRST, SECOND), steps=2)


def test_a_chain_that_is_drawn_from_elsewhere_is_found_out():
    def propose(weights, caches, context):
        keys = noise.at(context.keys, context.row.length, noise.Purpose.DRAFT)
        batch = context.row.length.shape[0]
        token = noise.categorical(keys, jnp.broadcast_to(SECOND, (batch, 4)))
        declared = jnp.broadcast_to(FIRST, (batch, 1, 4))
        return Draft(token[:, None], jnp.ones_like(context.row.length), None, declared), caches

    with pytest.raises(
        ValueError, match=r"does not draw its tokens from the distributions .* draft token 0 is"
    ):
        certify(TARGET, drafter=Drafter(no_state, propose, no_commit), gamma=1, steps=2)
