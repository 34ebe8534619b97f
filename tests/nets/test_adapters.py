"""A model of one's own, in the ways that the documentation promises."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspec
from jaxspec.core import Room
from jaxspec.core import kv_cache as kv
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
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def linen(seed):
    module = LinenModel()
    params = module.init(jax.random.key(seed), PROMPT.tokens)["params"]
    return jaxspec.Model(adapters.from_linen(module, VOCAB), jax.tree.map(lambda x: 3 * x, params))


class NNXInTraining(NNXModel):
    def __init__(self, layer):
        super().__init__(nnx.Rngs(0))
        self.layer = layer

    def __call__(self, tokens):
        return self.head(self.layer(self.embed(tokens)))


def nnx_in_training(layer):
    module = NNXInTraining(layer)
    module.eval()
    model = jaxspec.Model(*adapters.from_nnx(module, VOCAB))
    jaxspec.prepare(model, [[3, 1]], max_new_tokens=2)  # which is right
    module.train()
    return jaxspec.Model(*adapters.from_nnx(module, VOCAB))


class LinenInTraining(nn.Module):
    layer: nn.Module

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(VOCAB)(self.layer(nn.Embed(VOCAB, 8)(tokens)))


def linen_in_training(layer):
    module, keys = (
        LinenInTraining(layer),
        {"params": jax.random.key(0), "dropout": jax.random.key(1)},
    )
    params = module.init(keys, jnp.ones((1, 2), jnp.int32))["params"]
    return jaxspec.Model(adapters.from_linen(module, VOCAB), params)


def nnx_model(seed):
    return jaxspec.Model(*adapters.from_nnx(NNXModel(nnx.Rngs(seed)), VOCAB))


def plain_function(seed):
    return jaxspec.Model(adapters.from_function(full_attention, VOCAB), attention_params(seed))


def with_cache(seed):
    def empty(batch, capacity):
        return jnp.zeros((batch, capacity, 8))

    lm = adapters.from_function(cached_attention, VOCAB, empty_cache=empty)
    return jaxspec.Model(lm, attention_params(seed))


@pytest.mark.slow
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
    lm = adapters.from_function(
        lambda params, cache, tokens, positions: (params[tokens], cache), 9, empty_cache=_none
    )
    with pytest.raises(ValueError, match=r"logits of shape \(8, 16, 5\).*expected"):
        jaxspec.generate(
            jaxspec.Model(lm, jnp.zeros((5, 5))), jaxspec.Prompt(jnp.array([[1]]), jnp.array([1]))
        )


def of_function(apply, **options):
    return jaxspec.Model(adapters.from_function(apply, VOCAB, **options), jnp.zeros((VOCAB, VOCAB)))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: of_function(lambda p, x: p[x][:, -1]),
            ValueError,
            r"logits of shape \(8, 11\) for tokens of shape",
        ),
        (
            lambda: of_function(lambda p, x: p[x[0, 0]]),
            ValueError,
            r"shape \(11,\).*expected \[batch, step, vo",
        ),
        (
            lambda: of_function(lambda p, x: (p[x], 1)),
            TypeError,
            "gave a tuple of array, int in place of its logits",
        ),
        (
            lambda: of_function(lambda p, x: x[..., None] + jnp.arange(VOCAB)[None, None]),
            ValueError,
            "of dtype int32",
        ),
        (
            lambda: of_function(lambda p, c, x, at: p[x], empty_cache=_none),
            TypeError,
            r"returned one array: expected \(logits, cache\)",
        ),
        (
            lambda: jaxspec.Model(LinenModel(), {}),
            TypeError,
            r"is Model\(LinenModel, .*adapters.from_linen\(module",
        ),
        (
            lambda: jaxspec.Model(NNXModel(nnx.Rngs(0)), {}),
            TypeError,
            r"not a LanguageModel.* Model\(\*adapters.from_nnx\(module",
        ),
        (
            lambda: jaxspec.Model(full_attention, {}),
            TypeError,
            r"is Model\(function, .*from_function\(function",
        ),
        (
            lambda: jaxspec.Model(None, {}),
            TypeError,
            r"Model\(NoneType, .*adapters.from_function\(apply",
        ),
        (
            lambda: with_params({}),
            ValueError,
            r"they hold nothing: expected what LinenModel.init\(key, tokens\)",
        ),
        (
            lambda: with_params({"Embed_0": {}}),
            ValueError,
            "not its own, they hold Embed_0: expected",
        ),
        (lambda: with_params(None), TypeError, "parameters of LinenModel are of type NoneType"),
        (
            lambda: with_params({"params": linen(0).params}),
            ValueError,
            r"all of its variables, \{.params.: \.\.\.\}",
        ),
        (
            lambda: with_params({}, adapters.from_linen_cache),
            ValueError,
            r'LinenModel has nothing in its collection "cache": expected cache_index, .*from_linen takes one without',
        ),
        (
            lambda: nnx_model(0)._replace(params={}),
            ValueError,
            r"not its own: .*Model\(\*from_nnx\(module",
        ),
        (
            lambda: nnx_model(0)._replace(params=linen(0).params),
            ValueError,
            "NNXModel are not its own",
        ),
        (
            lambda: adapters.from_linen(LinenModel, VOCAB),
            TypeError,
            "is the class LinenModel: expected a Linen module",
        ),
        (
            lambda: adapters.from_linen_cache(LinenModel, VOCAB),
            TypeError,
            "is the class LinenModel",
        ),
        (
            lambda: nnx_in_training(nnx.Dropout(0.5, rngs=nnx.Rngs(1))),
            ValueError,
            r"call module\.eval\(\) before",
        ),
        (
            lambda: nnx_in_training(nnx.BatchNorm(8, rngs=nnx.Rngs(1))),
            ValueError,
            r"call module\.eval\(\) before",
        ),
        (
            lambda: linen_in_training(nn.Dropout(0.5, deterministic=False)),
            ValueError,
            "with deterministic=True",
        ),
        (
            lambda: adapters.from_linen(NNXModel(nnx.Rngs(0)), VOCAB),
            TypeError,
            "of NNX, which adapters.from_nnx takes",
        ),
        (
            lambda: adapters.from_nnx(LinenModel(), VOCAB),
            TypeError,
            "of Linen, which adapters.from_linen takes",
        ),
        (
            lambda: adapters.from_nnx(3, VOCAB),
            TypeError,
            "the module is of type int: expected an NNX module",
        ),
    ],
)
def test_what_is_no_model_is_said_in_the_users_words(make, error, message):
    with pytest.raises(error, match=message):
        jaxspec.generate(make(), PROMPT, max_new_tokens=2)


def with_params(params, adapter=adapters.from_linen):
    return jaxspec.Model(adapter(LinenModel(), VOCAB), params)


def test_a_drafter_that_is_no_model_is_said_in_the_users_words():
    with pytest.raises(TypeError, match=r"drafter is Model\(LinenModel, "):
        jaxspec.generate(
            plain_function(0), PROMPT, drafter=jaxspec.Model(LinenModel(), {}), max_new_tokens=2
        )


def _none(batch, capacity):
    return jnp.zeros((batch,))


@pytest.mark.slow
def test_a_tree_is_refused_by_a_model_of_chains():
    lm, params = with_cache(0)[:2]
    assert lm.select is None and lm.inside is None
    _, cache = lm.prefill(params, PROMPT, Room(8))
    with pytest.raises(
        ValueError, match=r"takes chains, not token trees: make it with .*select=\.\.\."
    ):
        lm.extend(params, cache, PROMPT.tokens, jnp.array([[-1, 0, 0], [-1, 0, 1]]))
    with pytest.raises(ValueError, match="got select without empty_cache"):
        adapters.from_function(full_attention, VOCAB, select=lambda cache, start, path: cache)


@pytest.mark.parametrize(
    ("empty", "message"),
    [
        (
            lambda batch, capacity: {"k": jnp.zeros((capacity, batch, 8))},
            r"the cache\['k'\] has the shape \[8, 2, 8\]",
        ),
        (
            lambda batch, capacity: jnp.zeros(()),
            r"the cache has the shape \[\]: expected \[batch, \.\.\.\] = \[2, ",
        ),
    ],
)
def test_a_cache_without_the_batch_first_is_named(empty, message):
    lm = adapters.from_function(cached_attention, VOCAB, empty_cache=empty)
    with pytest.raises(ValueError, match=message):
        lm.prefill(attention_params(0), PROMPT, Room(8))


def test_a_cache_that_loses_its_batch_is_named():
    def apply(params, cache, tokens, positions):
        return params[tokens], cache[0]

    lm = adapters.from_function(
        apply, VOCAB, empty_cache=lambda batch, capacity: jnp.zeros((batch, capacity))
    )
    with pytest.raises(ValueError, match=r"the cache has the shape \[8\]: expected \[batch"):
        lm.prefill(jnp.zeros((VOCAB, VOCAB)), PROMPT, Room(8))


class LinenTrees(nn.Module):
    """A module that takes trees: it attends to whatever `jaxspec.core.kv_cache.mask` allows."""

    @nn.compact
    def __call__(self, cache, tokens, positions, *, length, parent):
        x = nn.Embed(VOCAB, 8)(tokens) + nn.Embed(16, 8)(positions)
        # not the positions, which siblings share
        at = length[:, None] + jnp.arange(tokens.shape[1])[None]
        cache = cache.at[jnp.arange(tokens.shape[0])[:, None], at].set(x)
        mask = kv.mask(length, tokens.shape[1], cache.shape[1], parent)
        scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", nn.Dense(8)(x), cache), -1e9)
        return nn.Dense(VOCAB)(x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), cache)), cache


class NNXTrees(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.head = nnx.Embed(VOCAB, 8, rngs=rngs), nnx.Linear(8, VOCAB, rngs=rngs)

    def __call__(self, cache, tokens, positions, *, length, parent):
        x = self.embed(tokens)
        at = length[:, None] + jnp.arange(tokens.shape[1])[None]
        cache = cache.at[jnp.arange(tokens.shape[0])[:, None], at].set(x)
        seen = kv.mask(length, tokens.shape[1], cache.shape[1], parent).astype(x.dtype)
        return self.head(jnp.einsum("bts,bsd->btd", seen, cache)), cache


def move(cache, start, path):
    moved = jnp.take_along_axis(cache, (start[:, None] + path)[..., None], axis=1)
    return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at, 0)))(
        cache, moved, start
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_module_that_takes_trees(kind):
    """Two siblings, the second of which is committed (a plain function is in test_trees.py)."""
    options = dict(empty_cache=lambda batch, capacity: jnp.zeros((batch, capacity, 8)), select=move)
    if kind == "nnx":
        lm, params = adapters.from_nnx(NNXTrees(nnx.Rngs(0)), VOCAB, **options)
    else:
        module, length = LinenTrees(), jnp.zeros(2, jnp.int32)
        lm = adapters.from_linen(module, VOCAB, **options)
        keywords = dict(length=length, parent=None)
        params = module.init(
            jax.random.key(0), jnp.zeros((2, 8, 8)), PROMPT.tokens, PROMPT.tokens, **keywords
        )["params"]
    _, cache = lm.prefill(params, PROMPT, Room(12))
    nodes, parent = jnp.array([[7, 8, 9], [3, 2, 1]]), jnp.array([[-1, 0, 0]] * 2)
    tree, grown = lm.extend(params, cache, nodes, parent)
    chain, expected = lm.extend(params, cache, nodes[:, jnp.array([0, 2])])
    np.testing.assert_allclose(tree.logits[:, 2], chain.logits[:, 1], atol=1e-5)
    kept = lm.rewind(lm.select(grown, cache.length, jnp.array([[0, 2]] * 2)), cache.length + 2)
    got, after = (
        lm.extend(params, cache_of, jnp.array([[4], [5]]))[0].logits
        for cache_of in (kept, expected)
    )
    np.testing.assert_allclose(got, after, atol=1e-5)
