"""A family with recurrent layers is one file: this one. A gated delta rule with a convolution,
beside attention.

The configuration is `nets.decoder`'s: a layer's mixer is another value, which has a state in place
of keys and values. It is a target, and the drafter of itself: drafted text is plain text in ragged
batches, in chunks of prompts, after a prefix and in refilled slots. (Yang et al., gated delta
networks, arXiv 2412.06464.)
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec import Model, drafters, nets
from jaxspec.analysis import acceptance, numerics, plan, roofline
from jaxspec.core import chunks, layer_caches
from jaxspec.core import kv_cache as kv
from jaxspec.decode import causality, request
from jaxspec.nets import decoder
from jaxspec.nets.network import Load
from jaxspec.nets.rotary import Rotary
from jaxspec.nets.shapes import AttentionShape, DecoderConfig, FeedForwardShape, LayerShape
from jaxspec.testing import tables, word_tokenizer
from jaxspec.training import head_loss, top_tokens
from tests.decode import test_chat
from tests.marks import marked
from tests.small import random_params

VOCAB, DIM, KERNEL = 11, 8, 3


@dataclasses.dataclass(frozen=True)
class DeltaShape:
    """A state [key, value] for each head, which forgets by a gate and is corrected towards each
    token's value.
    """

    heads: int
    key: int
    value: int
    parts: ClassVar = {}
    layouts: ClassVar = {}
    rotation: ClassVar = None
    window: ClassVar = None
    shares: ClassVar = None

    @property
    def width(self):
        """What the convolution reads."""
        return self.heads * (2 * self.key + self.value)

    def share(self, path):
        return 1.0

    def module(self, config):
        return Delta(self, config.dim, parent=None)

    def cache(self, config):
        state = {
            "u": shape(KERNEL - 1, self.width),
            "memory": shape(self.heads, self.key, self.value),
        }
        return kv.recurrent(
            state, {"u": shape(self.width), "decay": shape(self.heads), "beta": shape(self.heads)}
        )


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


class Delta(nn.Module):
    shape: DeltaShape
    dim: int

    @nn.compact
    def mix(self, x, read, inputs):
        heads, key_dim, value_dim = self.shape.heads, self.shape.key, self.shape.value
        kernel = self.param("kernel", nn.initializers.normal(0.5), (KERNEL, self.shape.width))
        gates = nn.Dense(2 * heads)(x)
        entry = {
            "u": nn.Dense(self.shape.width, use_bias=False)(x),
            "decay": -jax.nn.softplus(gates[..., :heads]),  # a logarithm
            "beta": jax.nn.sigmoid(gates[..., heads:]),
        }

        def step(state, entry):
            window = jnp.concatenate([state["u"], entry["u"][:, None]], axis=1)  # B KERNEL width
            mixed = jax.nn.silu(jnp.sum(window * kernel[None], axis=1)).reshape(
                -1, heads, 2 * key_dim + value_dim
            )
            query, key, value = jnp.split(mixed, (key_dim, 2 * key_dim), axis=-1)
            key = key * jax.lax.rsqrt(jnp.sum(key**2, axis=-1, keepdims=True) + 1e-6)
            memory = state["memory"] * jnp.exp(entry["decay"])[..., None, None]  # B H key value
            error = value - jnp.einsum("bhkv,bhk->bhv", memory, key)
            memory = memory + jnp.einsum("bhk,bhv->bhkv", key, entry["beta"][..., None] * error)
            return {"u": window[:, 1:], "memory": memory}, jnp.einsum(
                "bhkv,bhk->bhv", memory, query
            )

        record = read(step, entry)
        return nn.Dense(self.dim)(record.outputs.reshape(*x.shape[:2], heads * value_dim)), record


DELTA, ATTENTION = (
    DeltaShape(2, 3, 4),
    AttentionShape(heads=2, kv_heads=1, head_dim=4, rotary=Rotary(10.0)),
)
CONFIG = DecoderConfig(
    VOCAB, DIM, tuple(LayerShape(mixer, FeedForwardShape(6)) for mixer in (DELTA, ATTENTION, DELTA))
)


def network(seed=0):
    """The family's language model, and its parameters."""
    lm = decoder._language_model.__wrapped__(CONFIG, ())  # whose functions nothing has compiled
    return lm, random_params(decoder.init, CONFIG, seed, 0.4)


def whole_rows(params, rows):
    """The logits of whole rows, without a cache."""
    return decoder.DecoderNet(CONFIG).apply({"params": params}, rows)


def test_amounts_are_those_of_its_arrays():
    network, lm = nets.net_of(CONFIG), decoder.language_model(CONFIG)
    prompt, room = (
        jaxspec.Prompt(jnp.ones((1, 4), jnp.int32), jnp.array([4])),
        jaxspec.core.Room(9, rewind=0),
    )
    params = network.shapes(CONFIG)
    _, cache = jax.eval_shape(lambda params: lm.prefill(params, prompt, room), params)
    assert network.cache_bytes(CONFIG, 9, 4) == sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)
    )
    assert network.total(CONFIG, lambda small: len(jax.tree.leaves(network.shapes(small)))) == len(
        jax.tree.leaves(params)
    )


@functools.cache
def model(seed=0):
    return Model(*network(seed), name=f"recurrent-{seed}")


PROMPT, NEW = (
    jaxspec.Prompt(jnp.ones((1, 4), jnp.int32), jnp.array([4])),
    jnp.ones((1, 40), jnp.int32),
)
LINES = SimpleNamespace(target=NEW, target_length=jnp.array([40]))
READERS = {
    "teacher forcing": lambda target: acceptance.teacher_forced(
        target.lm, target.params, PROMPT, NEW
    ),
    "distillation": lambda target: top_tokens.most_probable(
        target.lm, target.params, PROMPT, NEW, 2
    ),
    "training of heads": lambda target: head_loss.read(
        target.lm, head_loss.Lesson(LINES, target.params)
    ),
    "checks of causality": lambda target: causality.look_ahead.__wrapped__(
        target.lm, target.params
    ),
    "checks of shapes": causality.check_shapes,
    "certificates": lambda target: tables._network.__wrapped__(
        target.lm, target.params, PROMPT, NEW
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_only_read_logs_a_token_whatever_the_length(reader):
    """A log of whole rows would take as much memory as keys and values, in every layer."""
    lm, params = network()
    sizes = []

    def prefill(params, prompt, room):
        forward, cache = lm.prefill(params, prompt, room)
        sizes.extend(
            layer.size for layer in cache.layers if isinstance(layer, layer_caches.Recurrent)
        )
        return forward, cache

    target = Model(lm._replace(prefill=prefill), params)
    jax.eval_shape(lambda params: READERS[reader](target._replace(params=params)), params)
    assert sizes and set(sizes) == {1}


def test_comparing_two_texts_logs_what_plain_decoding_logs(monkeypatch):
    prepared, rooms = request.prepare(model(), [[3, 1, 4]], max_new_tokens=5), []
    lm = model().lm
    spied = lm._replace(
        prefill=lambda params, prompt, room: (rooms.append(room), lm.prefill(params, prompt, room))[
            1
        ]
    )
    prepared = prepared._replace(target=prepared.target._replace(lm=spied))
    assert len(numerics._margins(prepared, [1, 2], 3, 4)) == 2
    assert [room.rewind for room in rooms] == [2]


def test_plans_count_what_rounds_do_again():
    """Each token reads and writes every state, those of a rejected draft in the next round
    again.
    """
    load = nets.net_of(CONFIG).load(CONFIG, row=9)
    assert load.state_bytes == 2 * 4 * (2 * 3 * 4 + 2 * DELTA.width)  # two layers, float32
    machine = roofline.Machine(1.0, 1e9, 1e9)
    without = load._replace(state_bytes=0.0)
    for gamma in (0, 3):
        # once, they are among the cache's bytes
        moved = (2 * (gamma + 2 + gamma + 1) - 1) * load.state_bytes
        one, other = (
            float(roofline.pass_time(machine, x, tokens=gamma + 1)) for x in (load, without)
        )
        assert one - other == pytest.approx(moved)
    assert roofline.verify_cost(machine, load, 3) > roofline.verify_cost(machine, without, 3) == 1.0
    assert Load(10, cache_bytes=3.0).row_bytes(7) == 3.0


def test_plans_count_what_a_recurrent_drafter_does_again():
    """Each of its passes does gamma + 2 tokens again: each chain has a c of its own."""
    load, target, machine = (
        Load(10, cache_bytes=8.0, state_bytes=8.0),
        Load(1000),
        roofline.Machine(1.0, 1e9, 1e9),
    )
    costs = roofline.draft_cost(machine, load, target, gamma=[1, 4])
    assert costs.tolist() == pytest.approx(
        [(20 + 8 + 8 * (2 * (gamma + 3) - 1)) / 2000 for gamma in (1, 4)]
    )
    small, large = "qwen3.5-0.8b", "qwen3.5-4b"
    planned = plan.of_sizes(0.8, large, small, "tpu-v5e", most=4)
    chip, loads = (
        roofline.machine("tpu-v5e"),
        [roofline.load_of_size(x, "bfloat16", 256) for x in (small, large)],
    )
    for gamma in range(1, 5):
        c = roofline.draft_cost(chip, *loads, gamma=gamma)
        assert planned.chains[gamma].drafting == pytest.approx(gamma * c)
    assert planned.c == pytest.approx(planned.best.drafting / planned.gamma)


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
    # whose functions nothing has compiled
    return functools.cache(lambda seed=0: Model(*network(seed)))


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
def test_a_chat_logs_a_round_and_no_answer():
    """What a template rewrites is read again: to take an answer back, each pass would do all of it
    again.
    """
    words = [*test_chat.WORDS, "five"]
    target = model()._replace(tokenizer=word_tokenizer(words, chat_template=test_chat.FORGETS))
    talk, _ = test_chat.talk_through(target, None, test_chat.MESSAGES[:3])
    layers = jax.tree.leaves(
        talk._state.caches, is_leaf=lambda x: isinstance(x, layer_caches.Recurrent)
    )
    assert {x.size for x in layers if isinstance(x, layer_caches.Recurrent)} == {2}


@pytest.mark.slow
def test_refilled_slots_begin_with_an_empty_state():
    rows = [ROWS[0], ROWS[1], ROWS[2], ROWS[1], ROWS[0]]
    job = jaxspec.generate_many(model(), rows, slots=2, in_order=True, drafter=model(5), **OPTIONS)
    assert [list(row.tokens) for row in job] == [plain()[ROWS.index(row)] for row in rows]


def test_trees_and_beams_are_refused():
    """In the words of one check: who takes chains only, who needs trees, and what to do."""
    assert model().lm.select is None
    target = r"the target takes chains only \(LanguageModel.select is None\), and"
    instead = r"use another model \(recurrent layers take no trees\)"
    with pytest.raises(ValueError, match=f"{target} the drafter drafts token trees: {instead}"):
        jaxspec.generate(model(), ROWS, drafter=drafters.token_recycling(), **OPTIONS)
    with pytest.raises(ValueError, match=f"{target} beams are a token tree: {instead}"):
        jaxspec.beam_search(model(), ROWS, beams=2, max_new_tokens=4)
    for make in (drafters.tree, drafters.dynamic_tree):
        with pytest.raises(
            ValueError,
            match=r"recurrent-0 takes chains only .*LanguageModel\.select.* tree is made of",
        ):
            make(model())
