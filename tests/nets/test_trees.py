"""Every network, its cache and token trees: a node is what its path is as a chain, and a committed
path a fresh row.

One table of networks, one set of properties. Rows have one token and more, each row has a tree of
its own, and local layers attend to three positions, so that trees lie across a window's edge.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import nets
from jaxspec.core import LanguageModel, Prompt, Room, layer_caches, token_rows
from jaxspec.core import kv_cache as kv
from jaxspec.nets import adapters, decoder, t5
from jaxspec.nets.decoder import decoder_config, gpt_config
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import quantisation
from tests.marks import marked
from tests.nets.test_layer_shapes import CONFIGS as LAYER_SHAPES
from tests.small import random_params

VOCAB, CAPACITY, WIDTH = 37, 20, 12
T5_GATED = T5Config(
    VOCAB,
    24,
    32,
    heads=3,
    head_dim=8,
    encoder_layers=1,
    decoder_layers=2,
    buckets=6,
    max_distance=8,
)
T5_PLAIN = dataclasses.replace(
    T5_GATED, activation="relu", gated=False, tied_head=True, scaled_head=True
)
GPT = gpt_config(VOCAB, dim=24, ff_dim=32, layers=2, heads=3, max_positions=CAPACITY)
LLAMA = decoder_config(VOCAB, dim=24, ff_dim=32, layers=2, heads=4, kv_heads=2, head_dim=8)
GEMMA = nets.replace(
    LLAMA,
    qkv_bias=True,
    head_norms=True,
    post_norms=True,
    norms_from_one=True,
    scale_embedding=True,
    attention_cap=5.0,
    logits_cap=8.0,
    window=3,
    local=(True, False),
    rope_scaling="linear",
    rope_factor=2.0,
    local_rope_base=100.0,
    tied_head=True,
)
CONFIGS: dict[str, Any] = {
    "T5 gated": T5_GATED,
    "T5 1.0": T5_PLAIN,
    "GPT": GPT,
    "Llama": LLAMA,
    "Mistral": nets.replace(LLAMA, window=3, local=(True,)),
    "Gemma": GEMMA,
    "LaMDA": nets.replace(
        LLAMA, positions="relative", buckets=6, max_distance=5, activation="gelu"
    ),
    "T5 int8": T5_GATED,
    "GPT int8": GPT,
    "Gemma int8": GEMMA,
    "T5 bfloat16": dataclasses.replace(T5_GATED, dtype="bfloat16"),
    "Gemma bfloat16": dataclasses.replace(GEMMA, dtype="bfloat16"),
}
FUNCTION = "a function"
NAMES = (*CONFIGS, *LAYER_SHAPES, FUNCTION)
# Rounded weights: a network of each number format. Of level by level none: it is the arithmetic of
# positions and masks.
ROUNDED = ("T5 int8", "GPT int8", "T5 bfloat16")
LONG = ("T5 gated", "T5 1.0", "GPT", "T5 int8", "Gemma int8", "T5 bfloat16", "Gemma bfloat16")
SLOW = (*LONG, *LAYER_SHAPES)

ROWS = np.random.RandomState(0).randint(1, VOCAB, (4, WIDTH))
ROWS[:, 0] = T5_GATED.start_token
LENGTH = np.array([1, 2, 4, 6])  # a T5's rows all begin with one token
PROMPT = Prompt(
    jnp.array([[5, 6, 7, 8], [4, 3, 0, 0], [9, 2, 6, 0], [8, 0, 0, 0]]), jnp.array([4, 2, 3, 1])
)
PARENT = np.array(
    [
        # node 5 is three deeper than node 2: outside of a window of three, though near by slots
        [-1, 0, 0, 2, 3, 4],
        [-1, 0, 1, 2, 3, 4],  # a chain
        [-1, 0, 0, 1, 2, 3],
        [-1, -1, 1, 1, 3, 4],  # two first tokens
    ]
)
NODES = np.random.RandomState(1).randint(1, VOCAB, PARENT.shape)
BATCH, COUNT = PARENT.shape


class Network(NamedTuple):
    lm: LanguageModel
    params: Any
    config: Any
    tolerance: float


def net_of(config):
    return t5 if isinstance(config, T5Config) else decoder


def params_of(config, seed=0):
    return random_params(net_of(config).init, config, seed, 0.1)


def attend(params, cache, tokens, positions, *, length, parent):
    """A layer with a sinusoid of the position, and a window of three, written as a user would."""
    at = length[:, None] + jnp.arange(tokens.shape[1])[None]
    angle = positions[..., None].astype(jnp.float32) * jnp.array([1.0, 0.5, 0.25, 0.1])[None, None]
    x = params["embed"][tokens] + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    cache = cache.at[jnp.arange(tokens.shape[0])[:, None], at].set(x)
    mask = kv.mask(length, tokens.shape[1], cache.shape[1], parent)
    key = kv.key_positions(length, tokens.shape[1], cache.shape[1], parent)
    near = key[:, None, :] > positions[:, :, None] - 3
    scores = jnp.einsum("btd,bsd->bts", x @ params["query"], cache)
    weights = jax.nn.softmax(jnp.where(jnp.logical_and(mask, near), scores, -1e9), axis=-1)
    return (x + jnp.einsum("bts,bsd->btd", weights, cache)) @ params["head"], cache


def move(cache, start, path):
    source = jnp.take_along_axis(cache, (start[:, None] + path)[..., None], axis=1)
    return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at, 0)))(
        cache, source, start
    )


def function() -> tuple[LanguageModel, Any]:
    shapes = {"embed": (VOCAB, 8), "query": (8, 8), "head": (8, VOCAB)}
    params = {
        name: jax.random.normal(jax.random.key(i), shape)
        for i, (name, shape) in enumerate(shapes.items())
    }
    lm = adapters.from_function(
        attend,
        VOCAB,
        empty_cache=lambda batch, capacity: jnp.zeros((batch, capacity, 8)),
        select=move,
    )
    return lm, params


@pytest.fixture(scope="module")
def networks(compiled):
    @functools.cache
    def make(name):
        if name == FUNCTION:
            lm, params = function()
            return Network(compiled(lm), params, None, 1e-5)
        config = (CONFIGS | LAYER_SHAPES)[name]
        params = params_of(config)
        params = quantisation.quantise(params) if "int8" in name else params
        return Network(
            compiled(net_of(config).language_model(config)),
            params,
            config,
            0.1 if "16" in name else 3e-5,
        )

    return make


@pytest.fixture(params=marked(NAMES, exhaustive=ROUNDED))
def network(request, networks):
    return networks(request.param)


def holding(network, rows, length):
    """A cache that holds the first `length` tokens of each of BATCH rows."""
    lm, params = network.lm, network.params
    rows, length = jnp.array(rows), jnp.array(length, jnp.int32)
    if lm.limits.start_token is None:
        return lm.prefill(params, Prompt(rows, length), Room(CAPACITY))[1]
    _, cache = lm.prefill(params, PROMPT, Room(CAPACITY))
    return lm.rewind(lm.extend(params, cache, rows[:, 1:])[1], length)


def entries(cache) -> list[np.ndarray]:
    """Whatever grows with a row, as [batch, capacity, ...]."""
    cache = getattr(cache, "decoder", cache)
    if isinstance(cache, kv.KVCache):
        return [np.asarray(x, np.float32).swapaxes(1, 2) for x in (*cache.keys, *cache.values)]
    return [np.asarray(cache.inner)]


def length_of(cache):
    return getattr(cache, "decoder", cache).length


def path_to(parent, node) -> list[int]:
    path = [node]
    while parent[path[-1]] >= 0:
        path.append(parent[path[-1]])
    return path[::-1]


def assert_logits(got, expected, network):
    scale = 1.0 if network.tolerance < 0.01 else np.abs(np.asarray(expected)).max()
    np.testing.assert_allclose(got, expected, atol=network.tolerance * scale)


def by_chains(network, cache):
    """The logits of each node, of its path fed as a chain to a copy of its row."""
    path = [path_to(PARENT[b], n) for b in range(BATCH) for n in range(COUNT)]
    row = np.repeat(np.arange(BATCH), COUNT)
    tokens = np.zeros((BATCH * COUNT, COUNT), np.int32)
    for i, nodes in enumerate(path):
        tokens[i, : len(nodes)] = NODES[row[i], nodes]
    forward, _ = network.lm.extend(
        network.params, token_rows.take_rows(cache, jnp.array(row)), jnp.array(tokens)
    )
    ends = np.array([len(nodes) - 1 for nodes in path])
    return np.asarray(forward.logits)[np.arange(BATCH * COUNT), ends].reshape(BATCH, COUNT, VOCAB)


@pytest.mark.slow
def test_a_node_is_what_its_path_is_as_a_chain(network):
    cache = holding(network, ROWS, LENGTH)
    forward, _ = network.lm.extend(network.params, cache, jnp.array(NODES), jnp.array(PARENT))
    assert_logits(forward.logits, by_chains(network, cache), network)
    assert float(jnp.ptp(forward.logits)) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "network",
    marked(NAMES, exhaustive=(*ROUNDED, *LAYER_SHAPES, "T5 1.0", "Llama", "LaMDA", "Gemma int8")),
    indirect=True,
)
def test_a_tree_fed_level_by_level(network):
    """The nodes that were fed before lie at the end of the cache."""
    lm, params = network.lm, network.params
    cache = holding(network, ROWS, LENGTH)
    expected, _ = lm.extend(params, cache, jnp.array(NODES), jnp.array(PARENT))
    said = []
    for start, stop in ((0, 3), (3, COUNT)):
        forward, cache = lm.extend(
            params, cache, jnp.array(NODES[:, start:stop]), jnp.array(PARENT[:, :stop])
        )
        said.append(forward.logits)
    assert_logits(jnp.concatenate(said, axis=1), expected.logits, network)


@pytest.mark.parametrize("network", marked(NAMES, slow=SLOW, exhaustive=ROUNDED), indirect=True)
def test_a_committed_path_is_a_fresh_row(network):
    """Each node in turn, so paths of all lengths, in rows that are shorter than the path and
    longer.
    """
    lm, params = network.lm, network.params
    before = holding(network, ROWS, LENGTH)
    _, grown = lm.extend(params, before, jnp.array(NODES), jnp.array(PARENT))
    for node in range(COUNT):
        rows = np.zeros((BATCH, WIDTH), np.int32)
        path = np.zeros((BATCH, COUNT), np.int32)
        length = np.zeros(BATCH, np.int32)
        for b in range(BATCH):
            nodes = path_to(PARENT[b], (node + b) % COUNT)
            path[b] = [*nodes, *[COUNT - 1] * (COUNT - len(nodes))]  # garbage after the path
            length[b] = LENGTH[b] + len(nodes)
            rows[b, : length[b]] = [*ROWS[b, : LENGTH[b]], *NODES[b, nodes]]
        kept = lm.rewind(lm.select(grown, length_of(before), jnp.array(path)), jnp.array(length))
        fresh = holding(network, rows, length)
        np.testing.assert_array_equal(length_of(kept), length)
        for got, expected in zip(entries(kept), entries(fresh), strict=True):
            for b in range(BATCH):
                scale = 1.0 if network.tolerance < 0.01 else np.abs(expected[b]).max()
                atol = network.tolerance * scale
                np.testing.assert_allclose(got[b, : length[b]], expected[b, : length[b]], atol=atol)
    fed = jnp.array(NODES)
    after, expected = (lm.extend(params, cache, fed)[0].logits for cache in (kept, fresh))
    assert_logits(after, expected, network)


@pytest.mark.parametrize(
    "network", marked(NAMES, slow=LONG, exhaustive=(*ROUNDED, *LAYER_SHAPES)), indirect=True
)
def test_rows_may_be_permuted_and_replaced(network):
    """A model's state has the batch first: taken out, carried on and put back, rows are what they
    were.
    """
    lm, params = network.lm, network.params
    cache = holding(network, ROWS, LENGTH)
    assert {x.shape[0] for x in jax.tree.leaves(cache)} == {BATCH}
    order, back = jnp.array([2, 0, 3, 1]), jnp.array([1, 3, 0, 2])
    expected, grown = lm.extend(params, cache, jnp.array(NODES), jnp.array(PARENT))
    forward, permuted = lm.extend(
        params,
        token_rows.take_rows(cache, order),
        jnp.array(NODES)[order],
        jnp.array(PARENT)[order],
    )
    assert_logits(forward.logits[back], expected.logits, network)
    jax.tree.map(
        np.testing.assert_array_equal,
        length_of(token_rows.take_rows(permuted, back)),
        length_of(grown),
    )

    # Rows 0 and 2 are given to others in mid-generation; rows 1 and 3 do not notice.
    mixed = token_rows.put_rows(
        grown, jnp.array([0, 2]), token_rows.take_rows(cache, jnp.array([3, 1]))
    )
    tokens = jnp.array(NODES)
    got = lm.extend(params, mixed, tokens)[0].logits
    old, new = (lm.extend(params, state, tokens)[0].logits for state in (grown, cache))
    assert_logits(got[jnp.array([1, 3])], old[jnp.array([1, 3])], network)
    # row 3 fed row 0's, row 1 row 2's
    again = lm.extend(params, cache, tokens[jnp.array([0, 2, 2, 0])])[0].logits
    assert_logits(got[jnp.array([0, 2])], again[jnp.array([3, 1])], network)
    assert not np.allclose(got[0], new[0], atol=1e-2)


@pytest.mark.parametrize("name", ["T5 gated", "GPT"])
def test_a_path_moved_to_a_right_aligned_place_goes_wrong(name, networks):
    """Paths were once written to end at the row's length: in a short row, to a negative start.

    `dynamic_update_slice` counts that from the end of the buffer, and rejected nodes stay where
    they were.
    """

    def right_aligned(cache, length, slots):
        start = length - slots.shape[1]

        def compact(buffer):
            return layer_caches.write(
                buffer, jnp.take_along_axis(buffer, slots[:, None, :, None], axis=2), start
            )

        layers = (
            layer_caches.Attended(compact(layer.keys), compact(layer.values))
            for layer in cache.layers
        )
        return cache._replace(layers=tuple(layers), length=length)

    network = networks(name)
    lm, params = network.lm, network.params
    short = np.ones(BATCH, np.int32)  # rows of one token
    before = holding(network, ROWS, short)
    _, grown = lm.extend(params, before, jnp.array(NODES), jnp.array(PARENT))
    path = [0, 2]  # of row 0
    length = short + len(path)
    rows = np.concatenate([ROWS[:, :1], NODES[:, path]], axis=1)
    expected = entries(holding(network, np.pad(rows, ((0, 0), (0, WIDTH - 3))), length))

    # four, since another row has accepted four
    slots = np.array([[0, 0, *[1 + node for node in path]]] * BATCH)
    inner = getattr(grown, "decoder", grown)
    wrong = right_aligned(inner, jnp.array(length), jnp.array(slots))
    assert (
        max(
            np.abs(x[0, :3] - y[0, :3]).max() for x, y in zip(entries(wrong), expected, strict=True)
        )
        > 0.1
    )

    padded = jnp.array([[*path, 0, 0]] * BATCH)
    kept = lm.rewind(lm.select(grown, jnp.array(short), padded), jnp.array(length))
    for x, y in zip(entries(kept), expected, strict=True):
        np.testing.assert_allclose(x[0, :3], y[0, :3], atol=1e-5)


TAPPED = ("T5 gated", "T5 1.0", "GPT", "Llama", "Gemma", "LaMDA", "GPT int8", "Gemma bfloat16")
# taps are of the stack, which GPT's and Gemma's are, too
TAPPED_SELDOM = ("T5 1.0", "Llama", "LaMDA", "GPT int8")


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(TAPPED, exhaustive=TAPPED_SELDOM))
def test_taps_and_features(name, networks):
    """A tap after layer l, normed, is what a network of l + 1 layers gives to its head."""
    network = networks(name)
    config, params = network.config, network.params
    layers = "decoder_layers" if isinstance(config, T5Config) else "layers"
    net, prompt = net_of(config), PROMPT
    lm = net.language_model(config, taps=(1, 0))
    kind = {t5: t5.T5, decoder: decoder.DecoderNet}[net]

    def run(lm, params=params):
        forward, cache = lm.prefill(params, prompt, Room(CAPACITY))
        wide, _ = lm.extend(params, cache, jnp.array(NODES), jnp.array(PARENT))
        return forward, wide

    features = jax.jit(
        lambda x: nn.apply(lambda net: net.features(x), kind(config))({"params": params})
    )
    plain, tapped = jax.jit(lambda: run(network.lm))(), jax.jit(lambda: run(lm))()
    shallow = {
        part: x for part, x in params.items() if not re.fullmatch(r"(decoder|layers)_[1-9]", part)
    }
    first = jax.jit(lambda: run(net.language_model(nets.replace(config, **{layers: 1})), shallow))()
    width = prompt.tokens.shape[1] if lm.limits.start_token is None else 1
    for with_taps, without, truncated, step in zip(
        tapped, plain, first, (width, COUNT), strict=True
    ):
        assert without.taps is None and lm.inside.width == config.dim
        assert with_taps.features.shape == (BATCH, step, config.dim) and with_taps.taps.shape == (
            BATCH,
            step,
            2 * config.dim,
        )
        np.testing.assert_array_equal(with_taps.logits, without.logits)
        after, early = jnp.split(with_taps.taps, 2, axis=-1)
        close = functools.partial(np.testing.assert_allclose, atol=0.1 if "16" in name else 1e-5)
        close(np.asarray(features(after), np.float32), np.asarray(with_taps.features, np.float32))
        close(np.asarray(features(early), np.float32), np.asarray(truncated.features, np.float32))


@pytest.mark.parametrize("name", marked(NAMES, slow=LAYER_SHAPES))
def test_prefill_gives_features_of_every_position_and_logits_of_the_last(name, networks):
    """Features of position i are those that the row gives when it ends there."""
    network = networks(name)
    lm, params = network.lm, network.params
    if lm.limits.start_token is not None or lm.inside is None:
        forward, _ = lm.prefill(params, PROMPT, Room(CAPACITY))
        width = PROMPT.tokens.shape[1] if lm.limits.start_token is None else 1
        assert forward.logits.shape == (BATCH, 1, VOCAB)
        assert lm.inside is None or forward.features.shape == (BATCH, width, lm.inside.width)
        return
    forward, cache = lm.prefill(params, Prompt(jnp.array(ROWS), jnp.array(LENGTH)), Room(CAPACITY))
    again, _ = lm.extend(params, lm.rewind(cache, jnp.zeros(BATCH, jnp.int32)), jnp.array(ROWS))
    features = [np.asarray(x.features, np.float32) for x in (forward, again)]
    for b in range(BATCH):
        np.testing.assert_allclose(
            features[0][b, : LENGTH[b]],
            features[1][b, : LENGTH[b]],
            atol=max(network.tolerance, 1e-4),
        )
        assert_logits(forward.logits[b, 0], again.logits[b, LENGTH[b] - 1], network)
    assert_logits(lm.inside.head(params, again.features), again.logits, network)


@pytest.mark.parametrize("config", [T5_GATED, GPT, LLAMA], ids=lambda config: type(config).__name__)
@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ((2,), "taps has layer 2: expected numbers from 0 to 1"),
        ((0, -1), "taps has layer -1: expected numbers from 0 to 1"),
        ((1, 1), r"taps is \(1, 1\): expected each layer once"),
    ],
)
def test_layers_that_cannot_be_tapped(config, taps, message):
    with pytest.raises(ValueError, match=message):
        net_of(config).language_model(config, taps)
