"""A draft model that reads what its target's encoder has made of the prompt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxspec
from jaxspec import Model, drafters, training
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.nets import encoder_decoder, t5
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import certify, table_model
from jaxspec.vocab.remap import MappedParams
from jaxspec.weights import quantisation
from tests.marks import marked
from tests.small import random_params

V = 12
DEEP = t5.T5Config(V, 8, 8, 2, 4, encoder_layers=2, decoder_layers=2, buckets=4, max_distance=6)
PROMPT = jaxspec.Prompt(jnp.array([[3, 1, 4, 1, 5], [2, 7, 0, 0, 0]]), jnp.array([5, 2]))


def t5_of(config, seed, encoder=None):
    """A T5 with noise on every parameter; `encoder`: parameters to take over."""
    params = random_params(t5.init, config, seed, 0.4) | (encoder or {})
    return Model(t5.language_model(config), params, config=config, name=f"t5 {seed}")


TARGET = t5_of(DEEP, 0)
DRAFT = t5_of(
    dataclasses.replace(DEEP, decoder_layers=1), 1, encoder_decoder.encoder_params(TARGET.params)
)
OTHER = t5_of(DRAFT.config, 2)


def without_encoder(params):
    """A drafter's parameters, of which those of T5 encoders are NaN, but for the embedding."""
    if isinstance(params, MappedParams):
        return params._replace(model=without_encoder(params.model))
    if isinstance(params, tuple):
        return tuple(map(without_encoder, params))
    if not isinstance(params, dict):
        return params
    layers = {
        name: x for name, x in encoder_decoder.encoder_params(params).items() if name != "embedding"
    }
    return params | jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), layers)


MAKE = {
    "chain": drafters.model,
    "tree": lambda draft: drafters.tree(draft, (2, 1)),
    "dynamic tree": lambda draft: drafters.dynamic_tree(draft, nodes=3, depth=2, width=2),
    "sequences": lambda draft: drafters.sequences(draft, k=2, length=2),
    "cascade": lambda draft: drafters.cascade(draft, drafters.prompt_lookup(2, 1), gamma=2),
    "inner level of a cascade": lambda draft: drafters.cascade(draft, draft, gamma=2),
    "horizontal cascade": lambda draft: drafters.horizontal_cascade(
        draft, drafters.prompt_lookup(2, 1), tokens=1
    ),
    "trimmed": lambda draft: drafters.model(
        jaxspec.vocab.remap.with_head(draft, *half_head(draft))
    ),
}


def half_head(draft):
    """A head over half of the vocabulary."""
    small = jaxspec.trim_vocabulary(draft, size=V // 2)
    return (
        t5.language_model(dataclasses.replace(DRAFT.config, vocab_size=V // 2)).inside.head,
        small.params.head,
        range(V // 2),
    )


# made of a model as the others are
SELDOM = ("dynamic tree", "sequences", "cascade", "horizontal cascade")


@pytest.mark.quick
@pytest.mark.parametrize("kind", marked(MAKE, slow={*MAKE} - {"chain", *SELDOM}, exhaustive=SELDOM))
def test_the_targets_encoder_gives_the_draft_that_its_own_would(kind):
    shared = drafters.share_encoder(DRAFT, TARGET)
    options = dict(gamma=2, max_new_tokens=8, temperature=1.0, key=jax.random.key(3))
    unshared, prepared = (
        prepare(TARGET, PROMPT, drafter=MAKE[kind](draft), **options) for draft in (DRAFT, shared)
    )

    without = prepared._replace(
        weights=prepared.weights._replace(draft=without_encoder(prepared.weights.draft))
    )
    expected, *others = (
        jax.tree.map(np.asarray, loop.run(generation))
        for generation in (unshared, prepared, without)
    )
    assert expected.stats.drafted.sum() > 0
    for result in others:
        jax.tree.map(
            np.testing.assert_array_equal,
            (result.tokens, result.trace),
            (expected.tokens, expected.trace),
        )


def test_generate_shares_an_equal_encoder_by_itself_and_no_other():
    def lm(draft):
        return prepare(
            TARGET, PROMPT, drafter=draft, gamma=2, max_new_tokens=4
        ).drafter.functions.lm

    assert lm(DRAFT).encoder.is_shared
    assert lm(jaxspec.trim_vocabulary(DRAFT, size=5)).encoder.is_shared
    assert not lm(OTHER).encoder.is_shared
    assert not lm(t5_of(dataclasses.replace(DRAFT.config, encoder_layers=1), 1)).encoder.is_shared
    one_changed = DRAFT.params["encoder_1"]["ff"]["out"]["weight"].at[0, 0].add(1e-2)
    changed = jax.tree.map(lambda x: x, DRAFT.params)
    changed["encoder_1"]["ff"]["out"]["weight"] = one_changed
    assert not lm(DRAFT._replace(params=changed)).encoder.is_shared


def test_parameters_are_the_targets_arrays_though_int8_scales_differ():
    shared = drafters.share_encoder(DRAFT, TARGET)
    assert shared.params["encoder_0"] is TARGET.params["encoder_0"]
    target, draft = (m._replace(params=quantisation.quantise(m.params)) for m in (TARGET, DRAFT))
    rounded = jax.tree.map(lambda x: x * (1 + 1e-7) if x.dtype == jnp.float32 else x, draft.params)
    shared = drafters.share_encoder(draft._replace(params=rounded), target)
    leaves = [jax.tree.leaves(encoder_decoder.encoder_params(m.params)) for m in (shared, target)]
    assert all(a is b for a, b in zip(*leaves, strict=True))


@pytest.mark.parametrize(
    "draft, target, said",
    [
        (
            OTHER,
            TARGET,
            "t5 2 cannot read the encoder of the target: their encoders have different parameters",
        ),
        (t5_of(dataclasses.replace(DEEP, dim=16), 1), TARGET, "of other names, shapes or dtypes"),
        (table_model(jax.random.key(0), V, encoder=True), TARGET, "it has no encoder"),
        (
            DRAFT,
            table_model(jax.random.key(0), V, encoder=True),
            "table-12 has no encoder whose output can be had",
        ),
    ],
)
def test_encoders_that_cannot_be_shared(draft, target, said):
    with pytest.raises(ValueError, match=said):
        drafters.share_encoder(draft, target)


def test_a_drafter_with_the_encoder_of_another_target_is_refused():
    other = t5_of(DEEP, 5)
    with pytest.raises(ValueError, match="was given the encoder of another target"):
        jaxspec.generate(
            other, PROMPT, drafter=drafters.tree(drafters.share_encoder(DRAFT, TARGET), (2,))
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_exact_by_enumeration(kind):
    config = dataclasses.replace(DEEP, vocab_size=3)
    target = t5_of(config, 0)
    draft = t5_of(
        dataclasses.replace(config, decoder_layers=1),
        1,
        encoder_decoder.encoder_params(target.params),
    )
    prompt = jaxspec.Prompt(jnp.array([[1, 2, 2]]), jnp.array([3]))
    drafter = MAKE[kind](drafters.share_encoder(draft, target))
    # one program
    options = dict(
        drafter=drafter, gamma=2, steps=3, prompt=prompt, sampler=at_temperature(3, True)
    )
    off = [
        certify(
            target,
            sampling_params=SamplingParams(jnp.array([heat]), jnp.array([3]), jnp.ones(1)),
            **options,
        )
        for heat in (0.0, 1.0)
    ]
    assert max(off) < 1e-5, off


@pytest.mark.slow
def test_a_draft_that_learns_online_keeps_the_encoder():
    shared = drafters.share_encoder(DRAFT, TARGET)
    learner = training.online(
        shared, optimizer=optax.adam(1e-2), max_prompt=5, max_new_tokens=8, rows=2, size=4
    )
    state = learner.init()
    for _ in range(2):
        out = jaxspec.generate(
            TARGET, PROMPT, drafter=learner.drafter(state), gamma=2, max_new_tokens=8
        )
        state, _ = learner.update(state, TARGET, PROMPT, out)
    for name, was in DRAFT.params.items():
        same = jax.tree.all(
            jax.tree.map(lambda a, b: bool((a == b).all()), was, state.params[name])
        )
        assert same == (name in encoder_decoder.encoder_params(DRAFT.params)), name
