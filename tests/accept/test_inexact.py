"""Inexact rules keep what they promise, and are not exact: both by enumeration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import accept
from jaxspec.accept.typical import entropy
from jaxspec.base import Draft, Law, Prompt, Weights
from jaxspec.decode import speculative
from jaxspec.drafters import model
from jaxspec.testing import certify, decoder_law, plain_law, table_model
from jaxspec.warp import Controls, greedy, sampling

TARGET, DRAFT = table_model(jax.random.key(1), 3, sharpness=1.5), table_model(jax.random.key(2), 3, sharpness=1.5)
PLAIN = Controls(jnp.ones(1), jnp.array([3]), jnp.ones(1))
PROMPT = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))
STEPS = 3


def conditionals(law):
    """What follows each prefix that has a probability: {prefix: probabilities [V]}."""
    found = {}
    for at in range(STEPS):
        for tokens, probability in law.items():
            found.setdefault(tokens[:at], np.zeros(3))[tokens[at]] += probability
    return {prefix: probs / probs.sum() for prefix, probs in found.items()}


def next_laws(rule, gamma=3):
    """(law under the rule, law under plain sampling) of what follows each prefix."""
    decoder = speculative(TARGET.lm, model(DRAFT.lm), rule, sampling(), gamma)
    got = decoder_law(decoder, Weights(TARGET.params, DRAFT.params), PROMPT, PLAIN, steps=STEPS)
    true = conditionals(plain_law(TARGET, PROMPT, sampling(), PLAIN, STEPS))
    return [(probs, true[prefix]) for prefix, probs in conditionals(got).items()]


def test_lenience_bounds_what_a_token_gains():
    """No token has more than p(x) / l, and some have more than p(x)."""
    lenience = 0.4
    gain = [(got / p).max() for got, p in next_laws(accept.lenient(lenience))]
    assert len(gain) == 13
    assert 1.2 < max(gain) < 1 / lenience + 1e-4


def test_lenience_accepts_what_the_paper_says():
    """alpha = sum_x min(p(x) / l, q(x)), by the length of the first round."""
    p, q, count = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.1, 0.1, 0.8]), 20_000
    keys, position = jax.random.split(jax.random.key(0), count), jnp.zeros(count, jnp.int32)
    guess = jax.random.categorical(jax.random.key(1), jnp.log(q), shape=(count, 1)).astype(jnp.int32)
    draft = Draft(guess, jnp.broadcast_to(jnp.log(q), (count, 1, 3)), jnp.ones(count, jnp.int32))
    law = Law(log_probs=jnp.broadcast_to(jnp.log(p), (count, 2, 3)))
    rate = float(jnp.mean(accept.lenient(0.5)(keys, position, draft, law).num_accepted))
    assert abs(rate - 0.6) < 4.5 * np.sqrt(0.6 * 0.4 / count)


def test_no_lenience_is_rejection():
    rule = accept.lenient(1.0)
    assert rule.exact and not rule.reads_soft and not accept.lenient(0.9).exact
    draft = Draft(jnp.array([[1, 0]]), None, jnp.array([2]))
    tied = greedy(soft=True)(None, jnp.zeros((1, 3, 3)))  # three equal logits: the lowest id is the argmax
    assert rule(jax.random.split(jax.random.key(0), 1), jnp.array([3]), draft, tied).num_accepted.tolist() == [0]
    for wrong in (0.0, -1.0, 1.5):
        with pytest.raises(ValueError, match="lenience is"):
            accept.lenient(wrong)


def test_lenience_at_temperature_0_bounds_how_unlikely_a_token_is():
    lenience, warp = 0.3, greedy(soft=True)
    decoder = speculative(TARGET.lm, model(DRAFT.lm), accept.lenient(lenience), warp, 3)
    true = conditionals(plain_law(TARGET, PROMPT, sampling(), PLAIN, STEPS))
    shares = []
    for start in range(9):  # one path each, since nothing is drawn
        prompt = Prompt(jnp.array([[1, start // 3, start % 3]]), jnp.array([3]))
        true = conditionals(plain_law(TARGET, prompt, sampling(), PLAIN, STEPS))
        (text,) = decoder_law(decoder, Weights(TARGET.params, DRAFT.params), prompt, None, steps=STEPS)
        shares += [true[text[:at]][text[at]] / true[text[:at]].max() for at in range(STEPS)]
    assert lenience - 1e-5 < min(shares) < 1
    assert certify(TARGET, drafter=DRAFT, accept=accept.lenient(1.0), gamma=3, warp=warp, steps=4) == 0


def test_lenience_at_temperature_0_from_the_front_door():
    options = dict(drafter=DRAFT, gamma=3, max_new_tokens=20)
    strict = jaxspec.generate(TARGET, PROMPT, accept=accept.lenient(1.0), **options)
    loose = jaxspec.generate(TARGET, PROMPT, accept=accept.lenient(0.01), **options)
    assert loose.stats.accepted.sum() > strict.stats.accepted.sum()


def test_typical_acceptance_never_favours_an_untypical_token():
    epsilon, delta = 0.3, 0.5
    above, below = [], []
    for got, p in next_laws(accept.typical(epsilon, delta)):
        threshold = min(
            epsilon, delta * np.exp(-float(entropy(jnp.log(jnp.asarray(p, jnp.float32))[None, None])[0, 0]))
        )
        below += (got / p)[p <= threshold].tolist()
        above += (got / p)[p > threshold].tolist()
    assert len(below) > 3 and max(below) < 1 + 1e-4
    assert max(above) > 1.2


def test_typical_acceptance_has_no_coins():
    """Whether a guess is kept depends on p and the guess alone: p(x) > min(epsilon, delta exp(-H))."""
    p = jnp.array([0.5, 0.25, 0.125, 0.125])  # H = 1.75 ln 2: exp(-H) = 0.297
    draft = Draft(jnp.arange(4, dtype=jnp.int32)[:, None], None, jnp.ones(4, jnp.int32))
    law = Law(log_probs=jnp.broadcast_to(jnp.log(p), (4, 2, 4)))
    kept = {}
    for thresholds in [(0.3, 0.5), (0.2, 1.0), (0.05, 1.0)]:
        verdicts = [accept.typical(*thresholds)(jax.random.split(jax.random.key(seed), 4), jnp.arange(4), draft, law)
                    for seed in range(2)]  # fmt: skip
        kept[thresholds] = verdicts[0].num_accepted.tolist()
        assert kept[thresholds] == verdicts[1].num_accepted.tolist()
    assert kept == {(0.3, 0.5): [1, 1, 0, 0], (0.2, 1.0): [1, 1, 0, 0], (0.05, 1.0): [1, 1, 1, 1]}
    with pytest.raises(ValueError, match="epsilon is 0"):
        accept.typical(0, 0.3)
