"""Keys, values and positions that a layer has cached, for other networks: what its own next pass
attends to.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import Parts, Prompt, Room
from jaxspec.core import kv_cache as kv
from jaxspec.nets import decoder, t5
from jaxspec.nets.rotary import Rotary
from jaxspec.nets.shapes import AttentionShape, DecoderConfig, FeedForwardShape, LayerShape
from tests.small import random_params

RING = AttentionShape(heads=2, kv_heads=1, head_dim=4, window=3, rotary=Rotary(10.0))
WHOLE = AttentionShape(heads=4, kv_heads=2, head_dim=8, rotary=Rotary(100.0), head_norms=True)
SOURCES = {2: 1, 3: 0}
ATTENTION = (
    RING,
    WHOLE,
    *(AttentionShape(**(vars((RING, WHOLE)[s]) | {"shares": s})) for s in SOURCES.values()),
)
CONFIG = DecoderConfig(
    11, 8, tuple(LayerShape(attention, FeedForwardShape(8)) for attention in ATTENTION)
)
ROWS = jax.random.randint(jax.random.key(0), (3, 12), 0, 11)
LENGTH = jnp.array([12, 1, 5], jnp.int32)


@pytest.mark.slow
def test_reading_what_a_layer_has_cached_is_the_layers_own_attention():
    """Ragged rows, after a rewind, in rings that have gone round: of a window, of all, and of
    layers that share.
    """
    lm, module = decoder.language_model(CONFIG), decoder.DecoderNet(CONFIG)
    params = random_params(decoder.init, CONFIG)

    def attended(net, layer, source, cache, x, y):
        """The layer's output for one token, x [B, 1, M], of keys that another layer may have, which
        has read y.
        """
        shape, position = CONFIG.layers[layer].attention, cache.length[:, None]
        rotation, block, owner = (
            shape.rotary.at(position, shape.head_dim),
            net.layers[layer],
            net.layers[source],
        )
        keys, values, positions = lm.inside.keys_values(cache, layer)
        new = owner.attention.keys_values(owner.attention_norm(y), rotation)  # of the token itself
        keys, values = (
            jnp.concatenate(pair, axis=2) for pair in zip((keys, values), new, strict=True)
        )
        # B 1 1 S+1
        mask = jnp.pad(positions >= 0, ((0, 0), (0, 1)), constant_values=True)[:, None, None]
        return x + block.attention(block.attention_norm(x), keys, values, mask, None, rotation)

    @jax.jit
    def both(params, rows, length):
        _, cache = lm.prefill(params, Prompt(rows, length), Room(24, rewind=4))
        _, cache = lm.extend(params, cache, rows[:, :4])
        cache = lm.rewind(cache, length + 2)
        x, apply = jax.random.normal(jax.random.key(2), (3, 1, 8)), nn.apply
        pairs = []
        for layer in range(4):
            source = SOURCES.get(layer, layer)
            parts = Parts(tuple(sorted({source, layer})), ())
            expected = lm.inside.layers.run(params, cache, x, parts)[0]

            def read(net, layer=layer, source=source):
                stream = x if layer == source else attended(net, source, source, cache, x, x)
                return attended(net, layer, source, cache, stream, x)

            pairs.append((apply(read, module)({"params": params}), expected))
        return cache, x, pairs

    cache, x, pairs = both(params, ROWS, LENGTH)
    assert cache.layers[0].wraps
    for attended_to, expected in pairs:
        np.testing.assert_allclose(attended_to, expected, rtol=1e-5, atol=1e-6)
        assert float(jnp.abs(expected - x).min(axis=(1, 2)).max()) > 0


@pytest.mark.parametrize("slots", ["a ring", "all entries"])
def test_positions_are_those_of_the_window_before_the_next_token(slots):
    """Each entry names its token, which is another one after each rewind; a ring goes round several
    times.
    """
    random, batch, window = np.random.default_rng(0), 4, 3
    cache = kv.empty(
        batch, Room(40, rewind=5), [kv.window(1, 1, window, ring=slots == "a ring"), kv.shared(0)]
    )
    assert cache.layers[0].wraps == (slots == "a ring")
    tokens = [[] for _ in range(batch)]
    for number in range(7):
        step = int(random.integers(1, 6))
        new = 100.0 * number + np.arange(step)[None] + 10 * np.arange(batch)[:, None]  # B T
        at = kv.Pass(cache.length, step)
        layer = cache.layers[0]
        record = layer.read(at, (), *[jnp.asarray(new, jnp.float32)[:, None, :, None]] * 2)
        cache = cache.grown([layer.after(record, at), cache.layers[1]], at)
        left = random.integers(1, step + 1, batch)  # of each row's new tokens
        cache = kv.rewind(cache, jnp.asarray([len(row) for row in tokens] + left, jnp.int32))
        for row, more, count in zip(tokens, new, left, strict=True):
            row.extend(more[:count].tolist())
        for index in (0, 1):
            keys, values, positions = map(np.asarray, kv.keys_values(cache, index))
            for row, k, v, place in zip(
                tokens, keys[:, 0, :, 0], values[:, 0, :, 0], positions, strict=True
            ):
                first = max(0, len(row) + 1 - window)
                assert sorted(place[place >= 0]) == list(range(first, len(row)))
                assert (
                    k[place >= 0].tolist()
                    == v[place >= 0].tolist()
                    == [row[i] for i in place[place >= 0]]
                )


def test_a_layer_with_a_state_has_no_keys():
    state = jax.ShapeDtypeStruct((2,), jnp.float32)
    cache = kv.empty(1, Room(8), [kv.recurrent(state, state), kv.whole(1, 4)])
    assert (kv.keys_values(cache, 1)[2] == -1).all()
    with pytest.raises(
        ValueError,
        match="layer 0 has a recurrent state, and no keys: expected a layer with attention",
    ):
        kv.keys_values(cache, 0)


def test_keys_of_an_encoder_decoder_are_its_decoders():
    config = t5.T5Config(11, 8, 8, 2, 4, encoder_layers=1, decoder_layers=2)
    lm, params = t5.language_model(config), random_params(t5.init, config)

    @jax.jit
    def cached(params, rows, length):
        _, cache = lm.prefill(params, Prompt(rows, length), Room(6))
        _, cache = lm.extend(params, cache, rows[:, :2])

        def keys_values(net):
            layer = net.decoder[0]
            return layer.attention.keys_values(layer.attention_norm(net.embedding(rows[:, :2])))

        return lm.inside.keys_values(cache, 0), nn.apply(keys_values, t5.T5(config))(
            {"params": params}
        )

    (keys, values, positions), expected = cached(params, ROWS, LENGTH)
    assert positions.tolist() == [[0, 1, 2, -1, -1, -1]] * 3  # the start token, and two more
    for array, part in zip((keys, values), expected, strict=True):
        np.testing.assert_allclose(array[:, :, 1:3], part, rtol=1e-5, atol=1e-6)
