"""Generation inside other programs: what `generate` says there, and what `rollout` takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.core import Weights
from jaxspec.nets import decoder
from jaxspec.testing import table_model
from tests.small import tiny_gpt

MODEL, PROMPT = (
    table_model(jax.random.key(1), vocab=5),
    jaxspec.Prompt(jnp.array([[3, 1]]), jnp.array([2])),
)
OPTIONS = dict(drafter=MODEL, gamma=2, max_new_tokens=8, temperature=1.0, key=jax.random.key(0))


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.vmap, jax.grad], ids=lambda function: function.__name__
)
def test_generate_says_what_to_use_inside_a_transformation(transform):
    def call(params):
        out = jaxspec.generate(MODEL._replace(params=params), PROMPT, max_new_tokens=4)
        return out.tokens.sum().astype(jnp.float32)

    params = MODEL.params[None] if transform is jax.vmap else MODEL.params
    with pytest.raises(
        TypeError,
        match=r"decoding was prepared inside jit, vmap .* jaxspec\.prepare.*jaxspec\.rollout",
    ):
        transform(call)(params)


@pytest.mark.slow
def test_under_jit_and_vmap_it_is_the_text_of_generate():
    prepared = jaxspec.prepare(MODEL, PROMPT, **OPTIONS)
    keys = jax.random.split(jax.random.key(5), 3)
    rollouts = jax.jit(jax.vmap(lambda key: jaxspec.rollout(prepared, key=key).tokens[0, :8]))(keys)
    for key, tokens in zip(jax.random.clone(keys), rollouts, strict=True):
        np.testing.assert_array_equal(
            tokens, jaxspec.generate(MODEL, PROMPT, **OPTIONS | {"key": key}).tokens[0]
        )


def test_other_prompts_must_fit_what_was_prepared():
    prepared = jaxspec.prepare(MODEL, PROMPT, **OPTIONS)
    two = jaxspec.Prompt(jnp.zeros((2, 2), jnp.int32), jnp.array([2, 2]))
    with pytest.raises(ValueError, match=r"tokens of shape \(2, 2\): expected 1 rows"):
        jax.eval_shape(lambda: jaxspec.rollout(prepared, prompt=two))
    shape = tiny_gpt(max_positions=48)
    short = jaxspec.Model(
        decoder.language_model(shape), decoder.init(shape, jax.random.key(0)), config=shape
    )
    prepared = jaxspec.prepare(short, PROMPT, max_new_tokens=8)
    assert jax.eval_shape(lambda: jaxspec.rollout(prepared)).length.shape == (1,)
    wide = jaxspec.Prompt(jnp.zeros((1, 47), jnp.int32), jnp.array([3]))
    with pytest.raises(
        ValueError,
        match="a prompt of 47 tokens, padding included, and 8 new ones need 55 positions, but the "
        "target has 48",
    ):
        jax.eval_shape(lambda: jaxspec.rollout(prepared, prompt=wide))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(key=0), "key is 0: expected a key"),
        (dict(prompt="hi"), "prompt is of type str: expected a jaxspec.Prompt"),
        (
            dict(prompt=jaxspec.Prompt(jnp.array([[9, 1]]), jnp.array([2]))),
            "token id 9: expected ids from 0 to 4",
        ),
        (dict(prompt=jaxspec.Prompt(jnp.array([[1, 1]]), jnp.array([0]))), "prompt 0 is empty"),
        (
            dict(prompt=jaxspec.Prompt(jnp.array([[1.0, 1.0]]), jnp.array([2]))),
            "prompt tokens have dtype float32",
        ),
        (dict(weights=Weights(None)), "weights have the structure"),
        (dict(weights={"a": 1}), "weights is of type dict: expected prepared.weights._replace"),
        (
            dict(prepared="generation"),
            "the generation is of type str: expected what jaxspec.prepare returned",
        ),
    ],
)
def test_what_is_no_argument_is_refused(options, message):
    model = table_model(jax.random.key(1), vocab=5)
    prepared = jaxspec.prepare(model, [[3, 1]], max_new_tokens=4)
    with pytest.raises((TypeError, ValueError), match=message):
        jaxspec.rollout(**({"prepared": prepared} | options))


def test_a_legacy_key_is_taken():
    model = table_model(jax.random.key(1), vocab=5)
    prepared = jaxspec.prepare(
        model, [[3, 1]], max_new_tokens=4, temperature=1.0, key=jax.random.key(0)
    )
    new, old = (
        jaxspec.rollout(prepared, key=key) for key in (jax.random.key(7), jax.random.PRNGKey(7))
    )
    assert new.tokens.tolist() == old.tokens.tolist()
