"""Inexact rules keep what they promise, and are not exact: both by enumeration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, policies, rules
from jaxspec.core import Distribution, Draft, Prompt
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.sampling import SamplingParams, at_temperature, greedy
from jaxspec.testing import certify, decoder_distribution, table_model

TARGET, DRAFT = (
    table_model(jax.random.key(1), 3, sharpness=1.5),
    table_model(jax.random.key(2), 3, sharpness=1.5),
)
PROMPT = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))
STEPS = 3


@pytest.mark.slow
def test_lenience_accepts_what_the_paper_says():
    """alpha = sum_x min(p(x) / l, q(x)), by the length of the first round."""
    p, q, count = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.1, 0.1, 0.8]), 20_000
    keys, position = jax.random.split(jax.random.key(0), count), jnp.zeros(count, jnp.int32)
    draft_token = jax.random.categorical(jax.random.key(1), jnp.log(q), shape=(count, 1)).astype(
        jnp.int32
    )
    draft = Draft(
        draft_token,
        jnp.ones(count, jnp.int32),
        log_probs=jnp.broadcast_to(jnp.log(q), (count, 1, 3)),
    )
    distribution = Distribution(log_probs=jnp.broadcast_to(jnp.log(p), (count, 2, 3)))
    rate = float(
        jnp.mean(rules.lenient(0.5).verify(keys, position, draft, distribution).num_accepted)
    )
    assert abs(rate - 0.6) < 4.5 * np.sqrt(0.6 * 0.4 / count)


def test_no_lenience_is_rejection():
    rule = rules.lenient(1.0)
    assert rule.exact and not rules.lenient(0.9).exact
    draft = Draft(jnp.array([[1, 0]]), jnp.array([2]))
    tied = greedy()(None, jnp.zeros((1, 3, 3)))  # three equal logits: the lowest id is the argmax
    assert rule.verify(
        jax.random.split(jax.random.key(0), 1), jnp.array([3]), draft, tied
    ).num_accepted.tolist() == [0]
    for wrong in (0.0, -1.0, 1.5):
        with pytest.raises(ValueError, match="lenience is"):
            rules.lenient(wrong)


@pytest.mark.slow
def test_lenience_at_temperature_0_bounds_how_unlikely_a_token_is():
    lenience, table, shares = 0.3, np.exp(np.asarray(TARGET.params)), []
    for start in range(9):  # one path each, since nothing is drawn
        prompt = Prompt(jnp.array([[1, start // 3, start % 3]]), jnp.array([3]))
        prepared = prepare(TARGET, prompt, drafter=DRAFT, gamma=3, rule=rules.lenient(lenience))
        (text,) = decoder_distribution(prepared, steps=STEPS)
        row = [start // 3, start % 3, *text]
        for before, last, token in zip(row, row[1:], row[2:], strict=False):
            shares.append(table[before, last, token] / table[before, last].max())
    assert lenience - 1e-5 < min(shares) < 1
    assert (
        certify(TARGET, drafter=DRAFT, rule=rules.lenient(1.0), gamma=3, temperature=0.0, steps=4)
        == 0
    )


OPTIONS = dict(drafter=DRAFT, gamma=3, max_new_tokens=20, key=jax.random.key(0))
ROWS = Prompt(jnp.array([[1, 0, 2], [2, 1, 0], [0, 0, 1], [1, 2, 2]]), jnp.full(4, 3, jnp.int32))


@pytest.mark.slow
def test_lenience_at_temperature_0_from_the_front_door():
    strict = jaxspec.generate(TARGET, PROMPT, rule=rules.lenient(1.0), **OPTIONS)
    loose = jaxspec.generate(TARGET, PROMPT, rule=rules.lenient(0.01), **OPTIONS)
    assert loose.stats.accepted.sum() > strict.stats.accepted.sum()


@pytest.fixture(scope="module")
def strict():
    return jaxspec.generate(TARGET, ROWS, **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"policy": policies.confidence(0.5), "drafter": drafters.greedy(DRAFT)}],
    ids=["model", "a policy and point masses"],
)
def test_a_row_at_temperature_0_is_judged_alike_in_any_company(options, strict):
    """Alone, beside rows that sample, and in a program that does not; its draft may depend on how
    sure the model is.
    """
    options = OPTIONS | {"rule": rules.lenient(0.4)} | options
    with jax.debug_nans(True):
        greedy = jaxspec.generate(TARGET, ROWS, **options)
        mixed = jaxspec.generate(TARGET, ROWS, temperature=[0.0, 1.0, 0.0, 0.7], top_k=2, **options)
        alone = [
            jaxspec.generate(
                TARGET,
                jax.tree.map(lambda x, i=i: x[i : i + 1], ROWS),
                temperature=[0.0],
                **options,
            )
            for i in (0, 2)
        ]
    for i, verdict in zip((0, 2), alone, strict=True):
        rows = [(greedy, i), (mixed, i), (verdict, 0)]
        assert len({tuple(out.tokens[row].tolist()) for out, row in rows}) == 1
        assert len({tuple(int(count[row]) for count in out.stats) for out, row in rows}) == 1
        assert greedy.tokens[i].tolist() != strict.tokens[i].tolist()


def test_lenience_at_temperature_0_takes_no_softmax_and_no_sort():
    prepared = prepare(
        TARGET, ROWS, drafter=DRAFT, gamma=3, rule=rules.lenient(0.4), max_new_tokens=16
    )
    program = str(
        jax.make_jaxpr(lambda *a: loop.generation(prepared.decoder, *a, 16))(
            prepared.weights, prepared.prompt, prepared.request
        )
    )
    assert "while[" in program
    assert not [
        word for word in ("exp ", "log ", "sort[", "top_k[", "random_bits") if word in program
    ]


def test_distributions_hold_their_logits_and_say_which_rows_are_greedy():
    """Before temperature and truncation: how far a token is from the best one is asked of these."""
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]] * 2))
    mixed = at_temperature(2)(SamplingParams(jnp.array([0.0, 0.5]), jnp.array([2, 2])), logits)
    assert mixed.greedy.tolist() == [True, False]
    for distribution in (mixed, greedy()(None, logits)):
        np.testing.assert_array_equal(distribution.logits, logits)
    assert greedy()(None, logits).greedy is None


def test_a_sampler_of_ones_own_that_gives_no_logits_is_refused():
    bare = Distribution(tokens=jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(
        ValueError,
        match=r"this rule reads logits, but the sampler returns none: set Distribution\.logits",
    ):
        rules.lenient(0.4).verify(None, None, Draft(jnp.array([[1, 0]]), jnp.array([2])), bare)


def test_typical_acceptance_has_no_coins():
    """Acceptance depends on p and the token alone: p(x) > min(epsilon, delta exp(-H))."""
    p = jnp.array([0.5, 0.25, 0.125, 0.125])  # H = 1.75 ln 2: exp(-H) = 0.297
    draft = Draft(jnp.arange(4, dtype=jnp.int32)[:, None], jnp.ones(4, jnp.int32))
    distribution = Distribution(log_probs=jnp.broadcast_to(jnp.log(p), (4, 2, 4)))
    accepted = {}
    for thresholds in [(0.3, 0.5), (0.2, 1.0), (0.05, 1.0)]:
        verify = rules.typical(*thresholds).verify
        first, other = (
            verify(jax.random.split(jax.random.key(seed), 4), jnp.arange(4), draft, distribution)
            for seed in range(2)
        )
        accepted[thresholds] = first.num_accepted.tolist()
        assert accepted[thresholds] == other.num_accepted.tolist()
    assert accepted == {
        (0.3, 0.5): [1, 1, 0, 0],
        (0.2, 1.0): [1, 1, 0, 0],
        (0.05, 1.0): [1, 1, 1, 1],
    }
    with pytest.raises(ValueError, match="epsilon is 0"):
        rules.typical(0, 0.3)
