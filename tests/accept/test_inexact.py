"""Inexact rules keep what they promise, and are not exact: both by enumeration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import accept, drafters, noise, policies
from jaxspec.base import Draft, Law, Prompt, Request, Weights
from jaxspec.decode import loop, speculative
from jaxspec.decode.request import prepare
from jaxspec.decode.warping import plan
from jaxspec.testing import certify, decoder_law, table_model
from jaxspec.warp import Controls, greedy, sampling

TARGET, DRAFT = table_model(jax.random.key(1), 3, sharpness=1.5), table_model(jax.random.key(2), 3, sharpness=1.5)
PLAIN = Controls(jnp.ones(1), jnp.array([3]), jnp.ones(1))
PROMPT = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))
STEPS = 3


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
    decoder = speculative(TARGET.lm, drafters.model(DRAFT.lm), accept.lenient(lenience), warp, 3)
    table, shares = np.exp(np.asarray(TARGET.params)), []
    for start in range(9):  # one path each, since nothing is drawn
        prompt = Prompt(jnp.array([[1, start // 3, start % 3]]), jnp.array([3]))
        (text,) = decoder_law(decoder, Weights(TARGET.params, DRAFT.params), prompt, None, steps=STEPS)
        row = [start // 3, start % 3, *text]
        for before, last, token in zip(row, row[1:], row[2:], strict=False):
            shares.append(table[before, last, token] / table[before, last].max())
    assert lenience - 1e-5 < min(shares) < 1
    assert certify(TARGET, drafter=DRAFT, accept=accept.lenient(1.0), gamma=3, warp=warp, steps=4) == 0


OPTIONS = dict(drafter=DRAFT, gamma=3, max_new_tokens=20, key=jax.random.key(0))
ROWS = Prompt(jnp.array([[1, 0, 2], [2, 1, 0], [0, 0, 1], [1, 2, 2]]), jnp.full(4, 3, jnp.int32))


def test_lenience_at_temperature_0_from_the_front_door():
    strict = jaxspec.generate(TARGET, PROMPT, accept=accept.lenient(1.0), **OPTIONS)
    loose = jaxspec.generate(TARGET, PROMPT, accept=accept.lenient(0.01), **OPTIONS)
    assert loose.stats.accepted.sum() > strict.stats.accepted.sum()


@pytest.fixture(scope="module")
def strict():
    return jaxspec.generate(TARGET, ROWS, **OPTIONS)


@pytest.mark.parametrize(
    "options",
    [{}, {"policy": policies.confidence(0.5), "drafter": drafters.argmax(DRAFT)}],
    ids=["model", "a policy and point masses"],
)
def test_a_row_at_temperature_0_is_judged_alike_in_any_company(options, strict):
    """Alone, beside rows that sample, and in a program that does not; its draft may depend on how sure the model is."""
    options = OPTIONS | {"accept": accept.lenient(0.4)} | options
    with jax.debug_nans(True):
        greedy = jaxspec.generate(TARGET, ROWS, **options)
        mixed = jaxspec.generate(TARGET, ROWS, temperature=[0.0, 1.0, 0.0, 0.7], top_k=2, **options)
        alone = [
            jaxspec.generate(TARGET, jax.tree.map(lambda x, i=i: x[i : i + 1], ROWS), temperature=[0.0], **options)
            for i in (0, 2)
        ]
    for i, one in zip((0, 2), alone, strict=True):
        rows = [(greedy, i), (mixed, i), (one, 0)]
        assert len({tuple(out.tokens[row].tolist()) for out, row in rows}) == 1
        assert len({tuple(int(count[row]) for count in out.stats) for out, row in rows}) == 1
        assert greedy.tokens[i].tolist() != strict.tokens[i].tolist()


def test_lenience_at_temperature_0_takes_no_softmax_and_no_sort():
    decoder = speculative(TARGET.lm, drafters.model(DRAFT.lm), accept.lenient(0.4), greedy(soft=True), 3)
    keys, weights = noise.row_keys(jax.random.key(0), 4), Weights(TARGET.params, DRAFT.params)
    request = Request(None, jnp.full(4, 16), jnp.array([-1]))
    program = str(jax.make_jaxpr(lambda *a: loop.run(decoder, *a, 16))(keys, weights, ROWS, request))
    assert "while[" in program
    assert not [word for word in ("exp ", "log ", "sort[", "top_k[", "random_bits") if word in program]


def test_only_what_reads_it_gets_soft():
    """And a row's law does not change with it."""
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]] * 2))
    controls = Controls(jnp.array([0.0, 1.0]), jnp.array([2, 2]), jnp.ones(2))
    bare, told = sampling(2)(controls, logits), sampling(2, soft=True)(controls, logits)
    assert bare.soft is None and bare.greedy is None and greedy()(None, logits).soft is None
    np.testing.assert_array_equal(bare.log_probs, told.log_probs)
    assert told.greedy.tolist() == [True, False]
    np.testing.assert_array_equal(told.soft, jnp.stack([logits[0], bare.log_probs[1]]))
    for rule in (accept.lenient(0.4), accept.lenient(1.0), accept.typical(), accept.rejection()):
        for temperature in (0.0, [0.0]):
            warp = plan(TARGET, 1, rule.name == "lenient(0.4)", temperature=temperature).warp
            job = prepare(TARGET, PROMPT, drafter=DRAFT, gamma=3, accept=rule, temperature=temperature)
            assert job.decoder is speculative(TARGET.lm, drafters.model(DRAFT.lm), rule, warp, 3, None)
            law = warp(PLAIN._replace(temperature=jnp.zeros(1)), logits[:1])
            assert (law.soft is not None) == (rule.name == "lenient(0.4)")


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
