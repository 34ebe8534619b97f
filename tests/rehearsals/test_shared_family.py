"""A family whose layers differ in head size, and in part attend to the keys of earlier ones, is one file: this one.

Local layers have small heads and a window, global ones large heads with rotary bases of their own. The last two layers
have no keys: they attend to what the last layer of their kind attends to.
"""

import functools

import flax.linen as nn
import jax
import jax.flatten_util
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec import Model, drafters
from jaxspec.core import kv_cache as kv
from jaxspec.nets import rotary, stack
from jaxspec.nets.attention import Attention, RMSNorm
from tests.marks import marked

VOCAB, DIM, HEADS, WINDOW = 11, 8, 2, 3
HEAD_DIM, BASE = {True: 4, False: 8}, {True: 10.0, False: 100.0}  # of local layers, of global ones
LOCAL, SOURCE = (True, False, True, False, True), (None, None, None, 1, 2)


class Layer(nn.Module):
    local: bool
    shares: bool

    @nn.compact
    def __call__(self, x, read, masks, rotations):
        size = HEAD_DIM[self.local]
        attention, y = Attention(HEADS, 1, size, DIM, size**-0.5), RMSNorm()(x)
        own = () if self.shares else attention.keys_values(y, rotations[self.local])
        keys, values = read(*own)
        x = x + attention(y, keys, values, masks[self.local], None, rotations[self.local])
        return x, keys, values


class Network(nn.Module):
    def setup(self):
        self.embedding = nn.Embed(VOCAB, DIM)
        self.layers = [Layer(local, source is not None) for local, source in zip(LOCAL, SOURCE, strict=True)]
        self.norm, self.head = RMSNorm(), nn.Dense(VOCAB)

    def __call__(self, tokens):
        """The logits of whole rows, without a cache."""
        size = tokens.shape[1]
        past = jnp.arange(size)[:, None] - jnp.arange(size)[None]
        masks = {local: ((past >= 0) & (past < (WINDOW if local else size)))[None, None] for local in (True, False)}
        x, records = self.embedding(tokens), []
        layers = self._layers(masks, jnp.arange(size, dtype=jnp.int32)[None])
        for layer, source in zip(layers, SOURCE, strict=True):
            x, *record = layer(x, lambda *own, source=source: own if source is None else records[source])
            records.append(record)
        return self.logits(self.features(x))

    def embed(self, cache, tokens, parent=None):
        return self.embedding(tokens)

    def run(self, cache, x, parent=None, parts=None, real=None):
        at = kv.Pass(cache.length, x.shape[1], parent, real)
        views = cache.views(at)
        assert views[3] is views[1] and views[4] is views[2] is views[0]
        masks = {local: views[LOCAL.index(local)].mask()[:, None] for local in (True, False)}
        return stack.with_cache(self._layers(masks, at.positions()), x, cache, parts=parts, at=at)

    def _layers(self, masks, position):
        rotations = {
            local: rotary.rotation(position, rotary.frequencies(HEAD_DIM[local], BASE[local]))
            for local in (True, False)
        }
        return [functools.partial(layer, masks=masks, rotations=rotations) for layer in self.layers]

    def features(self, x):
        return self.norm(x)

    def logits(self, features):
        return self.head(features)


def empty(batch, room):
    kinds = [kv.window(1, 4, WINDOW), kv.whole(1, 8), kv.window(1, 4, WINDOW), kv.shared(1), kv.shared(2)]
    return kv.empty(batch, room, kinds)


def init(config, key):
    return Network().init(key, jnp.zeros((1, 2), jnp.int32))["params"]


def network(seed=0):
    """The family's language model, and its parameters."""
    lm = stack.decoder_only(Network(), init, None, empty, len(LOCAL), VOCAB, None, DIM)
    flat, unravel = jax.flatten_util.ravel_pytree(init(None, jax.random.key(seed)))
    return lm, unravel(flat + 0.5 * jax.random.normal(jax.random.key(seed + 1), flat.shape))


def whole_rows(params, rows):
    return Network().apply({"params": params}, rows)


@functools.cache
def model(seed=0):
    return Model(*network(seed), name=f"shared-{seed}")


ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7], [1, 8, 2, 8, 1, 8]]


def test_layers_without_keys_hold_nothing():
    cache = jax.eval_shape(lambda: empty(2, jaxspec.core.Room(20, rewind=4)))
    assert [keys.shape for keys in cache.keys] == [(2, 1, 7, 4), (2, 1, 20, 8), (2, 1, 7, 4)]
    params = jax.eval_shape(lambda: init(None, jax.random.key(0)))
    assert ["key" in params[f"layers_{i}"]["Attention_0"] for i in range(5)] == [source is None for source in SOURCE]


@pytest.mark.parametrize("kind", marked(["itself", "a tree"], slow=["a tree"]))
def test_drafted_text_is_plain_text(kind):
    drafter = model() if kind == "itself" else drafters.tree(model(5), (2, 1))
    options = dict(max_new_tokens=14, eos_ids=())
    out = jaxspec.generate(model(), ROWS, drafter=drafter, gamma=3, **options)
    assert out.tokens.tolist() == jaxspec.generate(model(), ROWS, **options).tokens.tolist()
    assert out.stats.accepted.sum() > 0
