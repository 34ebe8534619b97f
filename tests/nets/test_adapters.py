"""A model of one's own, in the ways that the documentation promises."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspec
from jaxspec.nets import adapters

VOCAB = 11
PROMPT = jaxspec.Prompt(jnp.array([[3, 1, 4], [1, 5, 0]]), jnp.array([3, 2]))


def causal_mean(x):
    """Mean of a row up to each position: a stand-in for attention."""
    return jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(VOCAB)(causal_mean(nn.Embed(VOCAB, 8)(tokens)))


class NNXModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.head = nnx.Embed(VOCAB, 8, rngs=rngs), nnx.Linear(8, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.head(causal_mean(self.embed(tokens)))


def full_attention(params, tokens):
    """One attention layer over whole rows."""
    x = params["embed"][tokens]
    scores = jnp.einsum("btd,bsd->bts", x @ params["query"], x)
    visible = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))[None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1)
    return jnp.einsum("bts,bsd->btd", weights, x) @ params["head"]


def cached_attention(params, cache, tokens, positions):
    """The same layer with a cache of its own."""
    x = params["embed"][tokens]
    cache = cache.at[jnp.arange(tokens.shape[0])[:, None], positions].set(x)
    scores = jnp.einsum("btd,bsd->bts", x @ params["query"], cache)
    visible = jnp.arange(cache.shape[1])[None, None, :] <= positions[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1)
    return jnp.einsum("bts,bsd->btd", weights, cache) @ params["head"], cache


def attention_params(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = {"embed": (VOCAB, 8), "query": (8, 8), "head": (8, VOCAB)}
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def linen(seed):
    module = LinenModel()
    params = module.init(jax.random.key(seed), PROMPT.tokens)["params"]
    return jaxspec.Model(adapters.from_linen(module, VOCAB), jax.tree.map(lambda x: 3 * x, params))


def nnx_model(seed):
    return jaxspec.Model(*adapters.from_nnx(NNXModel(nnx.Rngs(seed)), VOCAB))


def plain_function(seed):
    return jaxspec.Model(adapters.from_function(full_attention, VOCAB), attention_params(seed))


def with_cache(seed):
    def empty(batch, capacity):
        return jnp.zeros((batch, capacity, 8))

    lm = adapters.from_function(cached_attention, VOCAB, empty_cache=empty)
    return jaxspec.Model(lm, attention_params(seed))


@pytest.mark.parametrize("make", [linen, nnx_model, plain_function, with_cache])
def test_own_model_speculates_exactly(make):
    target, draft = make(0), make(1)
    plain = jaxspec.generate(target, PROMPT, max_new_tokens=12)
    fast = jaxspec.generate(target, PROMPT, drafter=draft, gamma=3, max_new_tokens=12)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    itself = jaxspec.generate(target, PROMPT, drafter=target, gamma=3, max_new_tokens=12)
    assert itself.stats.acceptance_rate.min() == 1.0


def test_cached_function_equals_the_full_one():
    full = jaxspec.generate(plain_function(2), PROMPT, max_new_tokens=10)
    cached = jaxspec.generate(with_cache(2), PROMPT, max_new_tokens=10)
    np.testing.assert_array_equal(full.tokens, cached.tokens)


def test_wrong_logits_shape_is_named():
    lm = adapters.from_function(lambda params, cache, tokens, positions: (params[tokens], cache), 9, empty_cache=_none)
    with pytest.raises(ValueError, match=r"logits of shape \(1, 16, 5\).*expected"):
        jaxspec.generate(jaxspec.Model(lm, jnp.zeros((5, 5))), jaxspec.Prompt(jnp.array([[1]]), jnp.array([1])))


def _none(batch, capacity):
    return jnp.zeros((batch,))
