"""The gated delta rule's two forms are one function; a pass of a round has the bits of passes over
one token.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import Room, layer_caches
from jaxspec.core import kv_cache as kv
from jaxspec.nets.delta import DeltaRule, DeltaShape, chunked
from jaxspec.nets.shapes import DecoderConfig, FeedForwardShape, LayerShape

# two dimensions: none is taken for the other
SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=12)
CONFIG = DecoderConfig(11, 8, (LayerShape(SHAPE, FeedForwardShape(6)),))
TOKENS, RANDOM = 150, np.random.default_rng(0)  # two chunks and a part of a third


def array(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


ENTRIES = {
    "inputs": array(2, TOKENS, SHAPE.width),
    "decay": -3 * jnp.abs(array(2, TOKENS, 4)),
    "beta": jax.nn.sigmoid(array(2, TOKENS, 4)),
}
RULE = DeltaRule(SHAPE, array(4, SHAPE.width))


def test_chunks_and_single_tokens_give_the_same_outputs_and_states():
    state = {"inputs": array(2, 3, SHAPE.width), "memory": array(2, 4, 8, 12)}
    singly, many = jax.jit(layer_caches._one_by_one(RULE.step)), jax.jit(RULE.many)
    for count in ([0, TOKENS], [64, 128], [1, 63], [65, TOKENS - 1]):
        (outputs, after), (expected, reference) = (
            run(state, ENTRIES, jnp.array(count)) for run in (many, singly)
        )
        np.testing.assert_allclose(outputs, expected, atol=2e-5)
        np.testing.assert_allclose(after["memory"], reference["memory"], atol=2e-5)
        assert (after["inputs"] == reference["inputs"]).all()
    assert np.abs(expected).max() > 1


@functools.partial(jax.jit, static_argnums=2)
def feed(cache, fed, step):
    at = kv.Pass(cache.length, step)
    record = cache.layers[0].read(at, (), RULE.step, fed, RULE.many)
    return record.outputs, cache.grown([cache.layers[0].after(record, at)], at)


def read(passes, rewind=6):
    cache = kv.empty(2, Room(TOKENS, rewind), [SHAPE.cache(CONFIG)])
    outputs = []
    for step in passes:
        start = int(cache.length[0])
        output, cache = feed(
            cache, jax.tree.map(lambda x, n=start, t=step: x[:, n : n + t], ENTRIES), step
        )
        outputs.append(output)
    return np.concatenate(outputs, axis=1), cache


def test_a_rounds_pass_has_the_bits_of_single_tokens():
    """After a prompt in chunks, of which the last tokens are in the log."""
    (together, once), (singly, parts) = read([100, 6, 6]), read([100, *[1] * 12])
    assert (together == singly).all()
    for x, y in zip(jax.tree.leaves(once), jax.tree.leaves(parts), strict=True):
        assert (x == y).all()
    assert once.layers[0].base.tolist() == [106, 106]


@pytest.mark.parametrize("passes", [(64, 64), (128,), (65, 63), (3, 125)])
def test_prompts_in_any_passes_leave_one_state(passes):
    outputs, cache = read(passes)
    expected, reference = read([1] * 128)
    np.testing.assert_allclose(outputs, expected, atol=2e-5)
    np.testing.assert_allclose(
        cache.layers[0].state["memory"], reference.layers[0].state["memory"], atol=2e-5
    )
    assert cache.layers[0].base.tolist() == [122, 122]


def test_a_row_rewound_to_before_its_state_reads_nan():
    """It cannot go on, so that nothing takes its outputs for a text's; other rows go on."""
    _, cache = read([20])
    assert not kv.can_rewind(cache, 13) and kv.can_rewind(cache, 14)
    cache = kv.rewind(cache, jnp.array([13, 14]))
    outputs, _ = feed(cache, jax.tree.map(lambda x: x[:, :3], ENTRIES), 3)
    assert np.isnan(outputs[0]).all() and np.isfinite(outputs[1]).all()
    again, _ = feed(
        kv.rewind(cache, jnp.array([0, 14])), jax.tree.map(lambda x: x[:, :3], ENTRIES), 3
    )
    assert np.isfinite(again).all()


def test_heads_that_no_key_serves_are_refused():
    with pytest.raises(ValueError, match="3 value heads cannot share 2 keys: expected a divisor"):
        DeltaShape(2, 3, 8, 8)


@pytest.mark.parametrize("scale", [0.1, 16.0])
def test_chunks_keep_their_digits_where_decays_are_strong(scale):
    """Against a float64 recurrence: sums of decays reach -1000 within a chunk, and their
    differences are wanted.
    """
    rng, (batch, total, heads, width) = np.random.RandomState(0), (2, 150, 3, 8)
    query, key, value = rng.randn(3, batch, total, heads, width)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    decay = -scale * np.log1p(np.exp(4 * rng.randn(batch, total, heads, 1)))
    beta = 1 / (1 + np.exp(-rng.randn(batch, total, heads, 1)))
    memory, outputs, states = np.zeros((batch, heads, width, width)), [], []
    for t in range(total):
        memory = memory * np.exp(decay[:, t, :, :, None])
        error = value[:, t] - np.einsum("bhkv,bhk->bhv", memory, key[:, t])
        memory = memory + np.einsum("bhk,bhv->bhkv", key[:, t], beta[:, t] * error)
        outputs.append(np.einsum("bhkv,bhk->bhv", memory, query[:, t]))
        states.append(memory)
    tokens = [jnp.asarray(x, jnp.float32) for x in (query, key, value, decay, beta)]
    count = jnp.array([total, 97])
    got, state = jax.jit(chunked)(tokens, jnp.zeros(memory.shape), count)
    np.testing.assert_allclose(got, np.stack(outputs, 1), atol=5e-6)
    np.testing.assert_allclose(state, np.stack([states[total - 1][0], states[96][1]]), atol=2e-6)
