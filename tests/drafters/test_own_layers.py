"""Targets that draft for themselves: early exit and layer skipping, as chains and trees, with tiny networks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import Model, buffers, drafters, policies
from jaxspec.base import Prompt
from jaxspec.nets import decoder, gpt, t5
from jaxspec.testing import certify
from jaxspec.warp import SamplingParams, sampling

V, D = 3, 8
LLAMA = decoder.DecoderConfig(V, D, ff_dim=8, layers=3, heads=2, kv_heads=1, head_dim=4)
TARGETS = {
    "decoder": (decoder, LLAMA),
    "gpt": (gpt, gpt.GPTConfig(V, D, 8, layers=3, heads=2, max_positions=64)),
    "t5": (t5, t5.T5Config(V, D, 8, 2, 4, encoder_layers=1, decoder_layers=3, buckets=4, max_distance=6)),
}


@functools.cache
def target_of(name):
    net, config = TARGETS[name]
    leaves, structure = jax.tree.flatten(net.init(config, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.6 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return Model(net.language_model(config), jax.tree.unflatten(structure, noisy), None, config, name)


def early(name="decoder", **options):
    return drafters.early_exit(target_of(name), layers=1, **options)


def skipping(name="decoder"):
    return drafters.skip_layers(target_of(name), attention=[1, 2], mlp=[2])


TREE = [(0,), (1,), (0, 0), (1, 0)]
MAKE = {
    "early exit": early,
    "early exit, trimmed": lambda name="decoder": early(
        name, head=jaxspec.trim_vocabulary(target_of(name), ids=[0, 2])
    ),
    "layers skipped": skipping,
    "early exit, a tree": lambda name="decoder": drafters.tree(early(name), shape=TREE),
    "layers skipped, a tree": lambda name="decoder": drafters.tree(skipping(name), (2, 1), draw="mixed"),
    "early exit, sequences": lambda name="decoder": drafters.sequences(early(name), k=2, length=2),
    "early exit, a dynamic tree": lambda name="decoder": drafters.dynamic_tree(early(name), nodes=3, depth=2, width=2),
}
PLAIN = SamplingParams(jnp.ones(1), jnp.array([3]), jnp.ones(1))
COLD = PLAIN._replace(temperature=jnp.zeros(1))
SELDOM = ("layers skipped, a tree", "early exit, sequences", "early exit, a dynamic tree")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x in SELDOM else ()) for x in MAKE])
def test_the_distribution_of_the_text_is_the_targets(name):
    """At temperatures 1 and 0."""
    prompt = Prompt(jnp.array([[1, 0]]), jnp.array([2]))
    options = dict(drafter=MAKE[name](), gamma=2, steps=3, sampler=sampling(3, True), prompt=prompt)
    off = [certify(target_of("decoder"), sampling_params=params, **options) for params in (PLAIN, COLD)]
    assert max(off) < 1e-5, off


@pytest.mark.parametrize(("name", "target", "policy"), [
    ("early exit", "t5", None),
    ("early exit, trimmed", "gpt", policies.adaptive(0.1, 0.1, pause=1)),
    ("layers skipped", "gpt", policies.heuristic(start=1, grow=1)),
    ("early exit, a tree", "t5", policies.adaptive(0.1, 0.1, pause=1)),
    ("early exit, sequences", "gpt", None),
])  # fmt: skip
def test_greedy_text_is_plain_decodings(name, target, policy):
    """Rows that accept, end and stop by themselves."""
    rows, options = buffers.pad([[1, 2], [0], [2, 2, 1]], 4), dict(max_new_tokens=np.array([9, 4, 11]))
    plain = jaxspec.generate(target_of(target), rows, **options)
    out = jaxspec.generate(target_of(target), rows, drafter=MAKE[name](target), gamma=3, policy=policy, **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert (np.asarray(out.stats.accepted) > 0).any()
