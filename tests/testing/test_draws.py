"""Draws wherever they are made: in scans, loops, conds, switches and jitted functions, without
replacement, in any number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import Draft, Drafter, Prompt, Rule, Verdict, noise
from jaxspec.decode.request import prepare
from jaxspec.testing import certify, decoder_distribution, outcomes, table_model, table_model_from

TARGET, DRAFT = table_model(jax.random.key(1), 3), table_model(jax.random.key(2), 3)
P = np.array([0.5, 0.3, 0.2])
TOY = table_model_from(jnp.log(jnp.asarray(P, jnp.float32)))
PROMPT = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))


def folded(keys, index):
    return jax.vmap(lambda key: jax.random.fold_in(key, index))(keys)


def at_row(rows, index):
    return jnp.take_along_axis(rows, index.reshape(-1, *[1] * (rows.ndim - 1)), axis=1)[:, 0]


def walk(loop, keys, position, draft, target, bias):
    """Speculative sampling token by token, every draw in a loop of the given kind; `bias`
    multiplies q's claim.
    """
    count, nodes = jnp.zeros_like(position), draft.tokens.shape[1]
    coins, residual = (
        noise.at(keys, position, purpose)
        for purpose in (noise.Purpose.ACCEPT, noise.Purpose.RESIDUAL)
    )

    def going(state):
        i, _, live = state
        return jnp.logical_and(i < nodes, jnp.any(live))

    def trial(state):
        i, count, live = state
        token, where = draft.tokens[:, i][:, None], jnp.broadcast_to(i, position.shape)
        p, q = (
            jnp.exp(jnp.take_along_axis(at_row(x, where), token, axis=1))[:, 0]
            for x in (target.log_probs, draft.log_probs)
        )
        coin = noise.uniform(folded(coins, i), 1)[:, 0]
        accepted = jnp.logical_and(live, jnp.logical_and(bias * coin * q < p, i < draft.length))
        return i + 1, count + accepted.astype(jnp.int32), accepted

    start = jnp.zeros((), jnp.int32), count, jnp.ones(position.shape, bool)
    if loop == "while_loop":
        _, count, _ = jax.lax.while_loop(going, trial, start)
    elif loop == "fori_loop":
        _, count, _ = jax.lax.fori_loop(0, nodes, lambda _, state: trial(state), start)
    else:
        (_, count, _), _ = jax.lax.scan(
            lambda state, _: (trial(state), None), start, None, length=nodes
        )

    def bonus(count):
        return noise.categorical(residual, target.log_probs[:, nodes])

    def replacement(count):
        p, q = (
            jnp.exp(at_row(x, jnp.minimum(count, nodes - 1)))
            for x in (target.log_probs, draft.log_probs)
        )
        left = jnp.maximum(p - q, 0.0)
        left = jnp.where(jnp.sum(left, axis=1, keepdims=True) > 1e-6, left, p)
        # Rows that have the bonus token draw here, too, where others do not: nobody reads it.
        return noise.categorical(folded(residual, 7), jnp.log(left))

    is_complete = count == nodes
    if loop == "scan":
        token = jax.lax.cond(
            jnp.any(is_complete), bonus, lambda count: jnp.zeros_like(count), count
        )
    else:
        token = jax.lax.switch(
            jnp.any(is_complete).astype(jnp.int32), [jnp.zeros_like, bonus], count
        )
    return Verdict(count, jnp.where(is_complete, token, replacement(count)), count)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["scan", "while_loop", "fori_loop"])
def test_draws_in_loops_and_branches(loop):
    """A biased rule is caught there as anywhere."""
    for bias, right in [(1.0, True), (0.7, False)]:
        rule = Rule(
            lambda *judged, bias=bias: walk(loop, *judged, bias), f"in a {loop}", exact=True
        )
        off = certify(TARGET, drafter=DRAFT, rule=rule, gamma=2, prompt=PROMPT, steps=3)
        assert off < 1e-6 if right else off > 1e-2


@jax.jit
def jitted_draw(keys, log_probs):
    return noise.categorical(keys, log_probs)


def scanned_draw(carry, index):
    """A function that jax may keep a trace of."""
    keys, log_probs = carry
    return carry, noise.categorical(
        jax.vmap(lambda key: jax.random.fold_in(key, index))(keys), log_probs
    )


def by_scan(keys, log_probs):
    return jax.lax.scan(scanned_draw, (keys, log_probs), jnp.arange(2))[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("draw", [jitted_draw, by_scan])
def test_traces_of_real_and_of_scripted_draws_are_never_mixed_up(draw):
    def verify(keys, position, draft, target):
        token = draw(noise.at(keys, position, noise.Purpose.RESIDUAL), target.log_probs[:, 0])
        return Verdict(jnp.zeros_like(position), token, jnp.zeros_like(position))

    def propose(weights, caches, context):
        shape = context.max_draft.shape[0], context.gamma
        return Draft(
            jnp.zeros(shape, jnp.int32), jnp.full(shape[:1], context.gamma, jnp.int32)
        ), caches

    drafter = Drafter(lambda *_: (), propose, lambda end: end.caches)

    def real(draw):
        # the shapes that the certificate has
        keys = noise.row_keys(jax.random.key(3), outcomes.CHUNK)
        return draw(keys, jnp.broadcast_to(TOY.params, (outcomes.CHUNK, 3))).tolist()

    before = real(draw)
    assert set(before) == {0, 1, 2}
    for name in ("draws elsewhere", "again"):
        assert (
            certify(TOY, drafter=drafter, rule=Rule(verify, name, exact=True), gamma=1, steps=3)
            < 1e-6
        )
        assert real(jax.jit(lambda *args: draw(*args))) == before and real(draw) == before


def second_token(draw, target=TOY, steps=2):
    """The distribution of what draw(keys, log_probs) makes of the second token."""

    def propose(weights, caches, context):
        empty = jnp.zeros((context.max_draft.shape[0], context.gamma), jnp.int32)
        return Draft(empty, jnp.zeros_like(context.max_draft)), caches

    def verify(keys, position, draft, target):
        at = noise.at(keys, position, noise.Purpose.RESIDUAL)
        zero = jnp.zeros_like(position)
        return Verdict(zero, draw(at, target.log_probs[:, 0]), zero)

    drafter = Drafter(lambda *_: (), propose, lambda end: end.caches)
    options = dict(temperature=1.0, key=jax.random.key(0), gamma=1)
    prepared = prepare(
        target, PROMPT, drafter=drafter, rule=Rule(verify, "drawn", exact=True), **options
    )
    distribution = decoder_distribution(prepared, steps=steps)
    return np.array(
        [sum(p for tokens, p in distribution.items() if tokens[1:] == (last,)) for last in range(3)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.exhaustive), 1, 2])
def test_without_replacement_is_one_draw_after_the_other(place):
    got = second_token(
        lambda keys, log_probs: noise.without_replacement(keys, log_probs, 3)[:, place]
    )
    first, second = P, sum(P[x] * np.where(np.arange(3) == x, 0, P) / (1 - P[x]) for x in range(3))
    np.testing.assert_allclose(got, [first, second, 1 - first - second][place], atol=1e-6)


@pytest.mark.slow
def test_without_replacement_has_the_distribution_of_the_real_noise():
    """20,000 samples of pairs: 4.5 standard deviations."""
    count = 20_000
    keys = noise.row_keys(jax.random.key(11), count)
    real = noise.without_replacement(keys, jnp.broadcast_to(TOY.params, (count, 3)), 2)
    for place in range(2):
        scripted = second_token(
            lambda keys, log_probs, place=place: noise.without_replacement(keys, log_probs, 2)[
                :, place
            ]
        )
        often = np.bincount(np.asarray(real[:, place]), minlength=3) / count
        assert (np.abs(often - scripted) < 4.5 * np.sqrt(scripted * (1 - scripted) / count)).all()


@pytest.mark.slow
def test_without_replacement_where_nothing_is_left():
    """Then tokens of probability 0, those with the lowest numbers first, as in reality."""
    log_probs = jnp.log(jnp.array([0.0, 0.0, 1.0]))

    def draw(keys, _):
        return noise.without_replacement(keys, jnp.broadcast_to(log_probs, (*keys.shape, 3)), 3)

    real = draw(noise.row_keys(jax.random.key(0), 1), None)[0].tolist()
    assert real == [2, 0, 1]
    for place in range(3):
        np.testing.assert_allclose(
            second_token(lambda *x, place=place: draw(*x)[:, place]), np.eye(3)[real[place]]
        )


@pytest.mark.slow
def test_several_keys_of_a_row_in_one_draw():
    """Keys [batch, nodes]: as many draws, independent of each other."""

    def draw(keys, log_probs):
        many = noise.split(keys, 0, 3)
        wide = jnp.broadcast_to(log_probs[:, None], (*many.shape, 3))
        tokens = noise.categorical(many, wide)
        pairs = noise.without_replacement(noise.split(keys, 3, 2), wide[:, :2], 2)
        return (jnp.sum(tokens, axis=1) + pairs[:, 1, 1]) % 3

    total = [1.0, 0, 0]
    pair = sum(P[x] * np.where(np.arange(3) == x, 0, P) / (1 - P[x]) for x in range(3))
    for probs in (P, P, P, pair):
        total = [sum(total[a] * probs[(b - a) % 3] for a in range(3)) for b in range(3)]
    np.testing.assert_allclose(second_token(draw), total, atol=1e-6)


@pytest.mark.slow
def test_a_row_may_draw_more_often_than_was_reckoned_with():
    def draw(keys, log_probs):
        at = noise.split(keys, 0, 40)
        tokens = noise.categorical(at, jnp.broadcast_to(log_probs[:, None], (*at.shape, 3)))
        return jnp.max(tokens[:, :3], axis=1)

    got = second_token(draw)
    np.testing.assert_allclose(got, np.diff(np.cumsum(P) ** 3, prepend=0), atol=1e-6)


def test_a_drafter_with_more_tokens_than_the_target():
    def draw(keys, log_probs):
        wide = jnp.log(jnp.array([0.1, 0.2, 0.3, 0.4]))
        token = noise.categorical(keys, jnp.broadcast_to(wide, (*keys.shape, 4)))
        return token % 3

    np.testing.assert_allclose(second_token(draw), [0.5, 0.2, 0.3], atol=1e-6)


@pytest.mark.slow
def test_draws_that_are_not_wanted_are_none():
    def draw(keys, log_probs):
        wanted = noise.uniform(keys, 1)[:, 0] < 0.25
        return noise.categorical(folded(keys, 9), log_probs, wanted)

    np.testing.assert_allclose(second_token(draw), 0.25 * P + 0.75 * np.eye(3)[0], atol=1e-6)


@pytest.mark.slow
def test_rows_whose_mates_make_a_loop_run_longer():
    """The draws of a row after it has ended shift none of its draws after the loop."""

    def draw(keys, log_probs):
        def going(state):
            return jnp.any(state[1] > 0)

        def body(state):  # every row ends with its first 0, at the latest after two draws
            i, live, token = state
            drawn = noise.categorical(folded(keys, i), log_probs)
            token = jnp.where(live > 0, drawn, token)
            return i + 1, jnp.where(jnp.logical_and(drawn > 0, i < 1), live, 0), token

        start = (
            jnp.zeros((), jnp.int32),
            jnp.ones_like(log_probs[:, 0], jnp.int32),
            jnp.zeros(keys.shape, jnp.int32),
        )
        _, _, token = jax.lax.while_loop(going, body, start)
        return (token + noise.categorical(folded(keys, 5), log_probs)) % 3

    walked = P[0] * np.eye(3)[0] + (1 - P[0]) * P
    expected = [sum(walked[a] * P[(b - a) % 3] for a in range(3)) for b in range(3)]
    np.testing.assert_allclose(second_token(draw), expected, atol=1e-6)
