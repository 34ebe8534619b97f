"""Block verification accepts more draft tokens than the rejection rule: computed, not sampled, on
hundreds of pairs.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core import Distribution, Draft
from jaxspec.rules.block import joint_ratio, pass_probability
from jaxspec.rules.common import draft_probs, gather_probs


@functools.partial(jax.jit, static_argnames="gamma")
def expected_accepted(p, q, gamma):
    """E[accepted] of block, by its passing probabilities and by its theorem, and of rejection; p, q
    [pairs, V, V].

    Row t of a table is the log distribution of what follows the token t; the first draft token
    follows a 0.
    """
    vocab = p.shape[-1]
    tokens = jnp.array(list(itertools.product(range(vocab), repeat=gamma)), jnp.int32)
    before = jnp.pad(tokens, ((0, 0), (1, 0)))

    def expected_accepted(p, q):
        draft = Draft(tokens, jnp.full(len(tokens), gamma), log_probs=q[before[:, :-1]])
        target = Distribution(log_probs=p[before])
        passing = pass_probability(draft, target)
        fails = jnp.cumprod((1 - passing)[:, ::-1], axis=1)[:, ::-1]  # i and all longer prefixes
        weight = jnp.prod(draft_probs(draft), axis=1)
        ratios = jnp.minimum(
            1.0, gather_probs(target.log_probs[:, :-1], tokens) / draft_probs(draft)
        )
        accepted = jnp.sum(1 - fails, axis=1), jnp.sum(joint_ratio(draft, target), axis=1)
        return tuple(
            jnp.sum(weight * x) for x in (*accepted, jnp.sum(jnp.cumprod(ratios, axis=1), axis=1))
        )

    return jax.vmap(expected_accepted)(p, q)


def test_never_fewer_accepted_than_by_rejection():
    first, second = jax.random.split(jax.random.key(0))
    scale = jnp.linspace(0.2, 4.0, 300)[:, None, None]
    p, q = (
        jax.nn.log_softmax(scale * jax.random.normal(key, (300, 3, 3))) for key in (first, second)
    )
    block, theorem, rejection = (np.asarray(x) for x in expected_accepted(p, q, 3))
    assert (block >= rejection - 1e-5).all()
    assert (block > rejection + 1e-3).mean() > 0.9
    np.testing.assert_allclose(block, theorem, atol=2e-5)
    same = np.asarray(expected_accepted(p, p, 3))
    np.testing.assert_allclose(same, 3.0, atol=1e-4)


def test_the_published_toy():
    """Two context-independent models over two tokens (arXiv 2403.10444, section 3): 11/9 against
    10/9.
    """
    p, q = (
        jnp.log(jnp.broadcast_to(jnp.array(x), (1, 2, 2))) for x in ([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    )
    block, theorem, rejection = (float(x[0]) for x in expected_accepted(p, q, 2))
    np.testing.assert_allclose([block, theorem, rejection], [11 / 9, 11 / 9, 10 / 9], rtol=1e-6)


def test_a_later_prefix_passes_though_an_earlier_one_failed():
    """And the token after a prefix that passed is drawn from the residual of the joint ratio."""
    p, q = (jnp.log(jnp.array(x)) for x in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    draft = Draft(
        jnp.array([[0, 1], [0, 0], [1, 0]]),
        jnp.full(3, 2),
        log_probs=jnp.broadcast_to(q, (3, 2, 2)),
    )
    target = Distribution(log_probs=jnp.broadcast_to(p, (3, 3, 2)))
    np.testing.assert_allclose(
        joint_ratio(draft, target), [[0.5, 1.0], [0.5, 0.25], [1.0, 0.5]], rtol=1e-6
    )
    # r_1 = 1/2: max(0, (1/6, 1/3) - (2/3, 1/3)) is nothing; r_1 = 1: 1/3 of (1/3 + 0).
    np.testing.assert_allclose(
        pass_probability(draft, target), [[0, 1], [0, 0.25], [1, 0.5]], atol=1e-6
    )


def test_the_last_real_draft_token_is_the_one_without_a_continuation():
    p, q = (jnp.log(jnp.array(x)) for x in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    draft = Draft(
        jnp.array([[0, 1]] * 3), jnp.array([0, 1, 2]), log_probs=jnp.broadcast_to(q, (3, 2, 2))
    )
    passing = pass_probability(draft, Distribution(log_probs=jnp.broadcast_to(p, (3, 3, 2))))
    np.testing.assert_allclose(passing, [[0, 0], [0.5, 0], [0, 1]], atol=1e-6)
