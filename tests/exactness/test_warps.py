"""Every warp is exact in speculative decoding: the decoder's law, enumerated, is the one computed in numpy.

In numpy each sequence is walked token by token, with the formulas of the stages; nothing of `jaxspec.warp` is used.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import accept, drafters, warp
from jaxspec.base import Prompt, Weights
from jaxspec.decode import speculative
from jaxspec.testing import certify, decoder_law, plain_law, table_model, total_variation
from jaxspec.warp import Controls, chain, sampling

EXACT, VOCAB, STEPS = 1e-5, 3, 4
TARGET, DRAFT = table_model(jax.random.key(1), VOCAB), table_model(jax.random.key(2), VOCAB, sharpness=1.5)
PROMPT = Prompt(jnp.array([[1, 0, 1, 2]]), jnp.array([3]))  # 2 is padding
STAGES = (warp.logit_bias, warp.repetition_penalty, warp.presence_and_frequency_penalties)
WHOLE = chain(*STAGES, to=sampling(VOCAB, True, True))  # one program for everything here
ONE, ZERO = jnp.ones(1), jnp.zeros(1)
OFF = Controls(ONE, jnp.array([VOCAB]), ONE, ZERO, jnp.zeros((1, VOCAB)), ONE, ZERO, ZERO)
CONTROLS = {
    "min-p": OFF._replace(min_p=0.4 * ONE),
    "bias": OFF._replace(bias=jnp.array([[1.0, 0.0, -2.0]])),
    "a ban": OFF._replace(bias=jnp.array([[0.0, -jnp.inf, 0.0]])),
    "repetition": OFF._replace(repetition=1.8 * ONE),
    "presence": OFF._replace(presence=1.2 * ONE),
    "frequency": OFF._replace(frequency=0.9 * ONE),
    "temperature 0": OFF._replace(temperature=ZERO, repetition=1.5 * ONE, frequency=0.5 * ONE),
    "all": Controls(
        temperature=1.3 * ONE,
        top_k=jnp.array([VOCAB]),
        top_p=0.95 * ONE,
        min_p=0.1 * ONE,
        bias=jnp.array([[0.5, 0.0, -0.5]]),
        repetition=1.2 * ONE,
        presence=-0.5 * ONE,
        frequency=0.7 * ONE,
    ),
}


def next_law(tokens, start, controls):
    """What follows the tokens, of which those from `start` on are new."""
    temperature, _, top_p, min_p, bias, repetition, presence, frequency = (np.asarray(x)[0] for x in controls)
    logits = np.asarray(TARGET.params, np.float64)[tokens[-2], tokens[-1]] + bias
    for token in set(tokens):
        logits[token] *= repetition if logits[token] < 0 else 1 / repetition
    for token in tokens[start:]:
        logits[token] -= frequency
    for token in set(tokens[start:]):
        logits[token] -= presence
    if temperature == 0:
        return np.eye(VOCAB)[np.argmax(logits)]
    probs = np.exp((logits - logits.max()) / temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)
    probs[order[np.cumsum(probs[order]) - probs[order] >= top_p]] = 0
    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


def numpy_law(controls, steps=STEPS):
    length, law = int(PROMPT.length[0]), {}
    row = PROMPT.tokens[0, :length].tolist()
    for new in itertools.product(range(VOCAB), repeat=steps):
        laws = [next_law(row + list(new[:i]), length, controls) for i in range(steps)]
        law[new] = float(np.prod([probs[token] for probs, token in zip(laws, new, strict=True)]))
    return law


def off_by(gamma, controls, draft_controls, law=WHOLE, steps=STEPS):
    decoder = speculative(TARGET.lm, drafters.model(DRAFT.lm), accept.rejection(), law, gamma)
    weights = Weights(TARGET.params, DRAFT.params)
    found = decoder_law(decoder, weights, PROMPT, controls, draft_controls=draft_controls, steps=steps)
    return total_variation(found, numpy_law(controls, steps))


@pytest.mark.parametrize("name", CONTROLS)
def test_every_stage(name):
    assert off_by(3, CONTROLS[name], CONTROLS[name]) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1, 2])
def test_shorter_drafts(gamma):
    for name in ("repetition", "all"):
        assert off_by(gamma, CONTROLS[name], CONTROLS[name]) < EXACT


@pytest.mark.parametrize("temperature", [0.0, 0.3, 3.0], ids=["greedy", "sharper", "hotter"])
def test_a_drafter_with_a_temperature_of_its_own(temperature):
    assert off_by(3, CONTROLS["all"], CONTROLS["all"]._replace(temperature=temperature * ONE)) < EXACT


def test_a_drafter_with_a_warping_of_its_own():
    """Neither penalised nor truncated as the target is, so that each says what the other would not."""
    own = CONTROLS["a ban"]._replace(min_p=0.3 * ONE, repetition=0.6 * ONE)
    assert off_by(3, CONTROLS["bias"]._replace(presence=ONE), own) < EXACT


@pytest.mark.parametrize("name", CONTROLS)
def test_the_law_of_plain_sampling_knows_them_too(name):
    assert total_variation(plain_law(TARGET, PROMPT, WHOLE, CONTROLS[name], STEPS), numpy_law(CONTROLS[name])) < EXACT


def test_a_warp_that_forgets_the_guesses_is_caught():
    def blind(controls, logits, prefix):
        return warp.repetition_penalty(controls, logits, prefix._replace(guesses=None, seen=None))

    controls = CONTROLS["repetition"]._replace(repetition=3.0 * ONE)
    options = dict(drafter=DRAFT, gamma=1, prompt=PROMPT, controls=controls, steps=3)
    assert certify(TARGET, warp=chain(blind, to=sampling()), **options) > 1e-2
