"""Every sampling option is exact in speculative decoding: the decoder's distribution, enumerated,
is numpy's.

In numpy each sequence is walked token by token, with the options' formulas; nothing of
`jaxspec.sampling` is used.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import sampling
from jaxspec.core import Prompt
from jaxspec.decode.request import prepare
from jaxspec.sampling import SamplingParams, at_temperature, chain
from jaxspec.testing import (
    certify,
    decoder_distribution,
    plain_distribution,
    table_model,
    total_variation,
    with_sampler,
)
from tests.marks import marked

EXACT, VOCAB, STEPS = 1e-5, 3, 4
TARGET, DRAFT = (
    table_model(jax.random.key(1), VOCAB),
    table_model(jax.random.key(2), VOCAB, sharpness=1.5),
)
PROMPT = Prompt(jnp.array([[1, 0, 1, 2]]), jnp.array([3]))  # 2 is padding
PROCESSORS = (
    sampling.logit_bias,
    sampling.repetition_penalty,
    sampling.presence_and_frequency_penalties,
)
WHOLE = chain(
    *PROCESSORS, to=at_temperature(VOCAB, True, True, True)
)  # one program for everything here
ONE, ZERO = jnp.ones(1), jnp.zeros(1)
OFF = SamplingParams(
    temperature=ONE,
    top_k=jnp.array([VOCAB]),
    top_p=ONE,
    min_p=ZERO,
    typical_p=ONE,
    bias=jnp.zeros((1, VOCAB)),
    repetition=ONE,
    presence=ZERO,
    frequency=ZERO,
)
SAMPLING = {
    "min-p": OFF._replace(min_p=0.4 * ONE),
    "typical-p": OFF._replace(typical_p=0.6 * ONE),
    "bias": OFF._replace(bias=jnp.array([[1.0, 0.0, -2.0]])),
    "a ban": OFF._replace(bias=jnp.array([[0.0, -jnp.inf, 0.0]])),
    "repetition": OFF._replace(repetition=1.8 * ONE),
    "presence": OFF._replace(presence=1.2 * ONE),
    "frequency": OFF._replace(frequency=0.9 * ONE),
    "temperature 0": OFF._replace(temperature=ZERO, repetition=1.5 * ONE, frequency=0.5 * ONE),
    "all": SamplingParams(
        temperature=1.3 * ONE,
        top_k=jnp.array([VOCAB]),
        top_p=0.95 * ONE,
        min_p=0.1 * ONE,
        typical_p=0.9 * ONE,
        bias=jnp.array([[0.5, 0.0, -0.5]]),
        repetition=1.2 * ONE,
        presence=-0.5 * ONE,
        frequency=0.7 * ONE,
    ),
}


def next_distribution(tokens, start, sampling_params):
    """Return the distribution [vocab] after the tokens; those from `start` on are new."""
    temperature, _, top_p, min_p, typical_p, bias, repetition, presence, frequency = (
        np.asarray(x)[0] for x in sampling_params[:9]
    )
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
    probs /= probs.sum()
    information = -np.log(probs, where=probs > 0, out=np.full(VOCAB, -np.inf))
    entropy = np.sum(probs[probs > 0] * information[probs > 0])
    order = np.argsort(np.abs(information - entropy))  # the most typical first
    probs[order[np.cumsum(probs[order]) - probs[order] >= typical_p]] = 0
    return probs / probs.sum()


def numpy_distribution(sampling_params, steps=STEPS):
    length, distribution = int(PROMPT.length[0]), {}
    row = PROMPT.tokens[0, :length].tolist()
    for new in itertools.product(range(VOCAB), repeat=steps):
        distributions = [
            next_distribution(row + list(new[:i]), length, sampling_params) for i in range(steps)
        ]
        distribution[new] = float(
            np.prod([probs[token] for probs, token in zip(distributions, new, strict=True)])
        )
    return distribution


def off_by(gamma, sampling_params, draft_sampling_params):
    prepared = prepare(TARGET, PROMPT, drafter=DRAFT, gamma=gamma)
    distribution = decoder_distribution(
        with_sampler(prepared, WHOLE, sampling_params, draft_sampling_params), steps=STEPS
    )
    return total_variation(distribution, numpy_distribution(sampling_params))


@pytest.mark.parametrize("name", marked(SAMPLING, slow={*SAMPLING} - {"temperature 0"}))
def test_every_sampling_option_leaves_the_distribution(name):
    assert off_by(3, SAMPLING[name], SAMPLING[name]) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1, 2])
def test_shorter_drafts_leave_the_distribution(gamma):
    for name in ("repetition", "all"):
        assert off_by(gamma, SAMPLING[name], SAMPLING[name]) < EXACT


@pytest.mark.parametrize(
    "temperature", marked([0.0, 0.3, 3.0], slow={3.0}), ids=["greedy", "sharper", "hotter"]
)
def test_a_drafter_with_a_temperature_of_its_own(temperature):
    assert (
        off_by(3, SAMPLING["all"], SAMPLING["all"]._replace(temperature=temperature * ONE)) < EXACT
    )


def test_a_drafter_with_sampling_parameters_of_its_own():
    """Neither penalised nor truncated as the target is, so that each allows what the other rules
    out.
    """
    draft_params = SAMPLING["a ban"]._replace(min_p=0.3 * ONE, repetition=0.6 * ONE)
    assert off_by(3, SAMPLING["bias"]._replace(presence=ONE), draft_params) < EXACT


@pytest.mark.parametrize("name", SAMPLING)
def test_the_distribution_of_plain_sampling_knows_them_too(name):
    plain = plain_distribution(TARGET, PROMPT, WHOLE, SAMPLING[name], STEPS)
    assert total_variation(plain, numpy_distribution(SAMPLING[name])) < EXACT


@pytest.mark.slow
def test_a_processor_that_forgets_the_draft_tokens_is_caught():
    def blind(sampling_params, logits, preceding):
        return sampling.repetition_penalty(
            sampling_params, logits, preceding._replace(draft_tokens=None, seen=None)
        )

    sampling_params = SAMPLING["repetition"]._replace(repetition=3.0 * ONE)
    options = dict(drafter=DRAFT, gamma=1, prompt=PROMPT, sampling_params=sampling_params, steps=3)
    assert certify(TARGET, sampler=chain(blind, to=at_temperature()), **options) > 1e-2


def test_typical_p_keeps_other_tokens_than_the_most_probable_and_nothing_changes_greedy_text():
    """The most probable token is taken away where its information is far from the entropy."""
    probs = np.exp(jax.nn.log_softmax(TARGET.params)).reshape(-1, VOCAB)
    kept = sampling.truncate.keep_typical_p(TARGET.params.reshape(-1, 1, VOCAB), 0.2 * np.ones(9))
    is_kept = np.isfinite(kept[:, 0])
    assert any(not row[p.argmax()] for row, p in zip(is_kept, probs, strict=True))
    options = dict(drafter=DRAFT, gamma=2, max_new_tokens=8)
    plain = jaxspec.generate(TARGET, PROMPT, **options)
    rows = jaxspec.generate(TARGET, PROMPT, typical_p=0.2, **options)
    mixed = dict(temperature=[0.0], key=jax.random.key(0))  # a program that draws in other rows
    assert plain.tokens.tolist() == rows.tokens.tolist()
    assert (
        plain.tokens.tolist()
        == jaxspec.generate(TARGET, PROMPT, typical_p=0.2, **mixed, **options).tokens.tolist()
    )


@pytest.mark.parametrize("mass", [0.2, 0.6, 0.95, 1.0])
@pytest.mark.needs_torch
def test_typical_p_keeps_the_tokens_of_transformers(mass):
    import torch
    from transformers.generation import TypicalLogitsWarper

    logits = np.array(2 * jax.random.normal(jax.random.key(3), (50, 1, 11)))
    logits[::2, :, 4] = -np.inf  # taken away before
    kept = sampling.truncate.keep_typical_p(jnp.asarray(logits), jnp.full(50, mass))
    expected = logits[:, 0]
    if mass < 1:
        expected = TypicalLogitsWarper(mass)(None, torch.tensor(logits[:, 0])).numpy()
    np.testing.assert_array_equal(kept[:, 0], expected)


@pytest.mark.parametrize("mass", [0.0, 1.5, "x"])
def test_typical_p_is_a_mass(mass):
    with pytest.raises(ValueError, match=f"typical_p is {mass!r}: expected "):
        prepare(TARGET, PROMPT, typical_p=mass)
