"""Speculative sampling emits the target's distribution: proved, not sampled, for the first four
tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import drafters, rules
from jaxspec.core import Draft, Drafter, Model
from jaxspec.decode.request import prepare
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import (
    certify,
    decoder_distribution,
    plain_distribution,
    table_model,
    table_model_from,
    total_variation,
    with_sampler,
)
from tests.drafters.cases import EVERYTHING, EXACT, PLAIN, PROMPT, TARGET
from tests.drafters.cases import MODEL as DRAFT
from tests.marks import marked
from tests.small import tiny_gpt

SMALL, LARGE = table_model(jax.random.key(3), 2), table_model(jax.random.key(4), 5)
TOY = table_model_from(jnp.log(jnp.array([0.5, 0.3, 0.2])))
SAMPLING = {
    "plain": PLAIN,
    "temperature 0.7": SamplingParams(jnp.array([0.7]), jnp.array([3]), jnp.ones(1)),
    "temperature 0": SamplingParams(jnp.zeros(1), jnp.array([3]), jnp.ones(1)),
    "top-k": SamplingParams(jnp.ones(1), jnp.array([2]), jnp.ones(1)),
    "top-p": SamplingParams(jnp.ones(1), jnp.array([3]), jnp.array([0.7])),
    "all": SamplingParams(jnp.array([1.3]), jnp.array([2]), jnp.array([0.9])),
}


def check(target, drafter, gamma, sampling_params="plain", **options):
    options = dict(prompt=PROMPT, sampler=EVERYTHING, steps=4) | options
    off = certify(
        target, drafter=drafter, gamma=gamma, sampling_params=SAMPLING[sampling_params], **options
    )
    assert off < EXACT


def proposes(draft_token, ragged):
    """A deterministic drafter of draft_token(last token, i) for i < gamma: of all of them, or of
    any number.
    """

    def propose(weights, caches, context):
        row, gamma = context.row, context.gamma
        last = jnp.take_along_axis(row.tokens, row.length[:, None] - 1, axis=1)
        length = (
            (row.length + last[:, 0]) % (gamma + 1) if ragged else jnp.full_like(row.length, gamma)
        )
        return Draft(
            draft_token(last, jnp.arange(gamma, dtype=last.dtype)[None, :]), length
        ), caches

    return Drafter(lambda *_: (), propose, lambda end: end.caches)


@pytest.mark.parametrize("sampling_params", marked(SAMPLING, slow={"plain", "temperature 0.7"}))
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_another_models_drafts_leave_the_distribution(gamma, sampling_params):
    check(TARGET, DRAFT, gamma, sampling_params)


@pytest.mark.parametrize("eos", [(2,), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_a_round_with_an_end_token_inside(eos):
    check(TARGET, DRAFT, 3, eos_ids=eos)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rules.rejection(), rules.block()], ids=lambda rule: rule.name)
def test_drafts_that_the_limit_cuts_short(rule):
    sampling_params = SAMPLING["plain"]
    prepared = with_sampler(
        prepare(TARGET, PROMPT, drafter=DRAFT, rule=rule, gamma=3), EVERYTHING, sampling_params
    )
    distribution = decoder_distribution(prepared, steps=4, limit=4)
    assert (
        total_variation(
            distribution, plain_distribution(TARGET, PROMPT, EVERYTHING, sampling_params, 4)
        )
        < EXACT
    )


@pytest.mark.parametrize("length", marked([1, 2], slow={1}))
def test_short_prompts_leave_the_distribution(length):
    check(TARGET, DRAFT, 2, prompt=PROMPT._replace(length=jnp.array([length])))


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_the_target_drafts_for_itself(gamma):
    check(TARGET, TARGET, gamma, "temperature 0.7")


def of_another_vocabulary(draft):
    """`generate` would ask for tokenizers, to know that the shared ids mean the same."""
    return drafters.model(draft)._replace(models=())


@pytest.mark.slow
@pytest.mark.parametrize("sampling_params", ["plain", "top-k"])
def test_the_drafter_has_a_smaller_vocabulary(sampling_params):
    check(TARGET, of_another_vocabulary(SMALL), 2, sampling_params)


@pytest.mark.slow
def test_the_drafter_has_a_larger_vocabulary():
    check(TARGET, of_another_vocabulary(LARGE), 2, sampler=at_temperature())


@pytest.mark.slow
def test_a_deterministic_drafter_with_drafts_of_any_length():
    check(
        TARGET,
        proposes(lambda last, step: (last + 1 + step) % 3, ragged=True),
        3,
        sampler=at_temperature(),
    )


@pytest.mark.slow
def test_a_drafter_that_always_proposes_one_token():
    check(
        TOY,
        proposes(lambda last, step: 1 + 0 * (last + step), ragged=False),
        2,
        sampler=at_temperature(),
    )


def test_distributions_without_a_common_token():
    nothing = -jnp.inf
    target = table_model_from(TARGET.params.at[..., 2].set(nothing))
    draft = table_model_from(jnp.zeros((3, 3, 3)).at[..., :2].set(nothing))
    check(target, draft, 2)
    check(target, target, 2)


def test_nearly_deterministic_distributions_are_left():
    target, draft = (table_model(jax.random.key(seed), 3, sharpness=8.0) for seed in (5, 6))
    check(target, draft, 2)


@pytest.mark.slow
def test_greedy_text_equals_plain_decodings():
    for draft in (DRAFT, TARGET):
        assert certify(TARGET, drafter=draft, gamma=3, prompt=PROMPT, temperature=0.0, steps=6) == 0


@pytest.mark.slow
def test_an_encoder_decoder_samples_from_the_targets_distribution():
    target, draft = (table_model(jax.random.key(seed), 3, encoder=True) for seed in (7, 8))
    for length in (2, 3):
        check(
            target,
            draft,
            2,
            prompt=PROMPT._replace(length=jnp.array([length])),
            sampler=at_temperature(),
        )


@pytest.mark.slow
def test_a_network_with_a_cache():
    from jaxspec.nets import decoder

    config = tiny_gpt(3)
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), shapes)
    check(Model(decoder.language_model(config), params), DRAFT, 2, sampler=at_temperature())
