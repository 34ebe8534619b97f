"""A family with recurrent layers is one file: this one. A gated delta rule with a convolution, beside attention.

It is a target, and the drafter of itself: drafted text is plain text in ragged batches, in chunks of prompts, after a
prefix and in refilled slots. (Yang et al., gated delta networks, arXiv 2412.06464.)
"""

import functools

import flax.linen as nn
import jax
import jax.flatten_util
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec import Model, drafters
from jaxspec.core import chunks
from jaxspec.core import kv_cache as kv
from jaxspec.nets import stack
from jaxspec.nets.attention import Attention, RMSNorm
from tests.marks import marked

VOCAB, DIM, HEADS, KEY, VALUE, KERNEL = 11, 8, 2, 3, 4, 3
WIDTH = HEADS * (2 * KEY + VALUE)  # of what the convolution reads


class DeltaLayer(nn.Module):
    """A state [KEY, VALUE] for each head, which forgets by a gate and is corrected towards each token's value."""

    @nn.compact
    def __call__(self, x, read):
        y = RMSNorm()(x)
        kernel = self.param("kernel", nn.initializers.normal(0.5), (KERNEL, WIDTH))
        gates = nn.Dense(2 * HEADS)(y)
        entry = {
            "u": nn.Dense(WIDTH, use_bias=False)(y),
            "decay": -jax.nn.softplus(gates[..., :HEADS]),  # a logarithm
            "beta": jax.nn.sigmoid(gates[..., HEADS:]),
        }

        def step(state, entry):
            window = jnp.concatenate([state["u"], entry["u"][:, None]], axis=1)  # B KERNEL WIDTH
            mixed = jax.nn.silu(jnp.sum(window * kernel[None], axis=1)).reshape(-1, HEADS, 2 * KEY + VALUE)
            query, key, value = jnp.split(mixed, (KEY, 2 * KEY), axis=-1)
            key = key * jax.lax.rsqrt(jnp.sum(key**2, axis=-1, keepdims=True) + 1e-6)
            memory = state["memory"] * jnp.exp(entry["decay"])[..., None, None]  # B H KEY VALUE
            error = value - jnp.einsum("bhkv,bhk->bhv", memory, key)
            memory = memory + jnp.einsum("bhk,bhv->bhkv", key, entry["beta"][..., None] * error)
            return {"u": window[:, 1:], "memory": memory}, jnp.einsum("bhkv,bhk->bhv", memory, query)

        record = read(step, entry)
        output = record.outputs.reshape(*x.shape[:2], HEADS * VALUE)
        return x + nn.Dense(DIM)(output), record


class AttentionLayer(nn.Module):
    @nn.compact
    def __call__(self, x, read, mask):
        attention, y = Attention(HEADS, 1, 4, DIM, 0.5), RMSNorm()(x)
        keys, values = read(*attention.keys_values(y))
        return x + attention(y, keys, values, mask), keys, values


class Network(nn.Module):
    def setup(self):
        self.embedding = nn.Embed(VOCAB, DIM)
        self.layers = [DeltaLayer(), AttentionLayer(), DeltaLayer()]
        self.norm, self.head = RMSNorm(), nn.Dense(VOCAB)

    def __call__(self, tokens):
        """The logits of whole rows, without a cache."""
        mask = jnp.tri(tokens.shape[1], dtype=bool)[None, None]
        reads = _whole_rows, lambda k, v: (k, v), _whole_rows
        x = self.embedding(tokens)
        for layer, read in zip(self._layers(mask), reads, strict=True):
            x, *_ = layer(x, read)
        return self.logits(self.features(x))

    def embed(self, cache, tokens, parent=None):
        return self.embedding(tokens)

    def run(self, cache, x, parent=None, parts=None, real=None):
        at = kv.Pass(cache.length, x.shape[1], parent, real)
        mask = cache.views(at)[1].mask()[:, None]
        return stack.with_cache(self._layers(mask), x, cache, parts=parts, at=at)

    def _layers(self, mask):
        return [self.layers[0], functools.partial(self.layers[1], mask=mask), self.layers[2]]

    def features(self, x):
        return self.norm(x)

    def logits(self, features):
        return self.head(features)


def _whole_rows(step, entry):
    """Runs a recurrence from its first token on; see `kv_cache.Recurrent`."""
    batch = entry["u"].shape[0]
    state = {"u": jnp.zeros((batch, KERNEL - 1, WIDTH)), "memory": jnp.zeros((batch, HEADS, KEY, VALUE))}
    _, outputs = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), entry))
    return kv.RecurrentRecord(jnp.moveaxis(outputs, 0, 1), after=None)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def empty(batch, room):
    state = {"u": shape(KERNEL - 1, WIDTH), "memory": shape(HEADS, KEY, VALUE)}
    delta = kv.recurrent(state, {"u": shape(WIDTH), "decay": shape(HEADS), "beta": shape(HEADS)})
    return kv.empty(batch, room, [delta, kv.whole(1, 4), delta])


def init(config, key):
    return Network().init(key, jnp.zeros((1, 2), jnp.int32))["params"]


def network(seed=0):
    """The family's language model, and its parameters."""
    lm = stack.decoder_only(Network(), init, None, empty, 3, VOCAB, DIM)
    params = init(None, jax.random.key(seed))
    noise = jax.random.normal(jax.random.key(seed + 1), (sum(x.size for x in jax.tree.leaves(params)),))
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    return lm, unravel(flat + 0.4 * noise)


def whole_rows(params, rows):
    return Network().apply({"params": params}, rows)


@functools.cache
def model(seed=0):
    return Model(*network(seed), name=f"recurrent-{seed}")


ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7], [1, 8, 2, 8, 1, 8]]
OPTIONS = dict(gamma=3, max_new_tokens=14, eos_ids=())


@functools.cache
def plain():
    """Greedy texts by the network over whole rows, without a cache."""
    logits, texts = jax.jit(whole_rows), []
    for row in ROWS:
        row = list(row)
        for _ in range(OPTIONS["max_new_tokens"]):
            padded = jnp.asarray([row + [0] * (32 - len(row))])
            row.append(int(jnp.argmax(logits(model().params, padded)[0, len(row) - 1])))
        texts.append(row[-OPTIONS["max_new_tokens"] :])
    return texts


@pytest.fixture(params=["in one pass", pytest.param("in chunks", marks=pytest.mark.slow)])
def make(request, monkeypatch):
    """Makes models whose prompts are read in one pass, or in chunks of five tokens."""
    if request.param == "in one pass":
        return model
    monkeypatch.setattr(chunks, "LONGEST", 5)
    monkeypatch.setattr(chunks, "MULTIPLE", 1)
    return functools.cache(lambda seed=0: Model(*network(seed)))  # whose functions nothing has compiled


SLOW = ("another", "prompt_lookup", "fallback")


@pytest.mark.parametrize("kind", marked([None, "itself", *SLOW], slow=SLOW))
def test_drafted_text_is_plain_text(kind, make):
    drafter = {
        None: lambda: None,
        "itself": make,
        "another": lambda: make(5),
        "prompt_lookup": drafters.prompt_lookup,
        "fallback": lambda: drafters.fallback(drafters.prompt_lookup(2, 2), make(5)),
    }[kind]()
    out = jaxspec.generate(make(), ROWS, drafter=drafter, **OPTIONS)
    assert out.tokens.tolist() == plain()
    if kind == "itself":
        assert (out.stats.accepted == out.stats.drafted).all() and out.stats.drafted.sum() > 0


def test_a_prefix_goes_on_from_its_state():
    prefix = jaxspec.prefix(model(), ROWS[0][:7], drafter=model(5))
    out = jaxspec.generate(model(), [ROWS[0][7:]], prefix=prefix, drafter=model(5), **OPTIONS)
    assert out.tokens.tolist() == plain()[:1]


@pytest.mark.slow
def test_refilled_slots_begin_with_an_empty_state():
    rows = [ROWS[0], ROWS[1], ROWS[2], ROWS[1], ROWS[0]]
    job = jaxspec.generate_many(model(), rows, slots=2, in_order=True, drafter=model(5), **OPTIONS)
    assert [list(row.tokens) for row in job] == [plain()[ROWS.index(row)] for row in rows]


def test_trees_and_beams_are_refused():
    lm = model().lm
    assert lm.select is None
    with pytest.raises(ValueError, match="the target takes chains only"):
        jaxspec.generate(model(), ROWS, drafter=drafters.token_recycling(), **OPTIONS)
    with pytest.raises(ValueError, match="takes chains only"):
        drafters.tree(model(), (2, 1))
    with pytest.raises(ValueError, match="takes chains only: its LanguageModel has no select"):
        jaxspec.beam_search(model(), ROWS, beams=2, max_new_tokens=4)
