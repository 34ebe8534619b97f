"""Long texts: prompts in chunks, queries in chunks, keys in blocks, against one pass with whole
scores.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import jaxspec
from jaxspec import drafters, nets
from jaxspec.core import Forward, LanguageModel, Prompt, Room, chunks, token_rows
from jaxspec.draft_heads import block, eagle, kangaroo, kind_of
from jaxspec.draft_heads.target import zeros
from jaxspec.draft_heads.training import DraftStarts
from jaxspec.nets import attention, decoder, encoder_decoder, t5
from jaxspec.testing import certify, tables
from tests.draft_heads.test_drafters import CONFIGS as CONFIGS_OF_HEADS
from tests.marks import marked
from tests.nets.test_trees import CONFIGS
from tests.small import random_params

VOCAB, WIDTH, CAPACITY = 37, 17, 20  # no number of chunks but 1 and 17 fills the width
PROMPT = Prompt(jax.random.randint(jax.random.key(5), (3, WIDTH), 0, VOCAB), jnp.array([17, 8, 1]))
NETS = {"T5": t5}


def net_of(name):
    return NETS.get(name[:2], decoder)


def fresh(name, taps=()):
    """A network's functions that no other test has compiled."""
    if net_of(name) is t5:
        return encoder_decoder._language_model.__wrapped__(t5.T5, CONFIGS[name], taps)
    return decoder._language_model.__wrapped__(CONFIGS[name], taps)


@pytest.fixture
def make_small(monkeypatch):
    """Makes everything small: chunks of so many tokens, and blocks of 5 keys, as if texts were
    long.
    """

    def change(chunk):
        monkeypatch.setattr(chunks, "LONGEST", chunk)
        monkeypatch.setattr(chunks, "MULTIPLE", 1)
        monkeypatch.setattr(attention, "KEYS", 5)
        monkeypatch.setattr(attention, "MANY_SCORES", 30)
        monkeypatch.setattr(attention, "MANY_KEYS", 8)

    return change


# --- the same numbers
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    marked(
        ["Llama", "Gemma", "LaMDA", "GPT", "T5 gated"], slow={"GPT"}, exhaustive={"Llama", "LaMDA"}
    ),
)
def test_a_prompt_in_chunks_is_read_as_in_one_pass(name, make_small):
    params, new = (
        random_params(net_of(name).init, CONFIGS[name]),
        jnp.array([[1, 2], [3, 4], [5, 6]]),
    )

    def run(lm: LanguageModel):
        def read(params, prompt):
            forward, cache = lm.prefill(params, prompt, Room(CAPACITY))
            after, cache = lm.extend(params, cache, new)
            decoder_cache = cache if lm.limits.start_token is None else cache.decoder
            return forward, after, decoder_cache.length

        forward, after, length = jax.jit(read)(params, PROMPT)
        row, kept = token_rows.decoder_prompt(lm, PROMPT), [forward.features, forward.taps]
        real = np.arange(row.tokens.shape[1])[None] < np.array(row.length)[:, None]
        encoded = (
            []
            if forward.encoded is None
            else [forward.encoded[np.arange(WIDTH)[None] < PROMPT.length[:, None]]]
        )
        return [forward.logits, *(x[real] for x in kept), *encoded, *after[:3]], length

    expected, expected_length = run(fresh(name, (1, 0)))
    for chunk in (1, 7, 64):
        make_small(chunk)
        got, length = run(fresh(name, (1, 0)))
        assert length.tolist() == expected_length.tolist()
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "name", marked(["Gemma", "LaMDA", "GPT", "T5 gated"], exhaustive={"LaMDA", "GPT"})
)
def test_a_long_text_has_the_loss_and_the_gradient_of_whole_scores(name, make_small):
    net, config = net_of(name), CONFIGS[name]
    params, tokens = random_params(net.init, config), PROMPT.tokens
    module = {t5: t5.T5, decoder: decoder.DecoderNet}[net](config)
    inputs = (PROMPT, tokens) if net is t5 else (tokens,)

    def loss(params):
        logits = module.apply({"params": params}, *inputs)
        return jnp.mean(jax.nn.log_softmax(logits)[..., 3])

    expected = jax.jit(jax.value_and_grad(loss))(params)
    make_small(4)
    got = jax.jit(jax.value_and_grad(lambda params: loss(params)))(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), got, expected)


@pytest.mark.parametrize("sinks", [None, jnp.array([2.0, -1.0])])
def test_only_blocks_of_keys_that_may_be_read_are_read(make_small, sinks):
    make_small(4)
    query, keys = (
        jax.random.normal(jax.random.key(seed), (1, 2, size, 4)) for seed, size in ((0, 3), (1, 18))
    )
    slot = jnp.arange(18)
    # in the blocks 5..9 and 10..14
    mask = jnp.logical_and(slot >= 6, slot < 14)[None, None, None, :]
    unread = jnp.logical_or(slot < 5, slot >= 15)[None, None, :, None]
    expected = attention._whole(0.5, None, query, keys, keys, mask, None, sinks)
    got = attention._by_keys(
        0.5, None, query, *[jnp.where(unread, jnp.nan, keys)] * 2, mask, None, sinks
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_sink_is_a_key_whose_value_is_nothing(make_small):
    """In all three ways: whole, by keys, by queries; each head has its own."""
    make_small(4)
    query, keys = (
        jax.random.normal(jax.random.key(seed), (1, heads, 10, 4))
        for seed, heads in ((0, 4), (1, 2))
    )
    mask, sinks = jnp.tril(jnp.ones((10, 10), bool))[None, None], jnp.array([1.0, -2.0, 0.5, 3.0])
    scores = jnp.einsum("bhtd,bhsd->bhts", query, jnp.repeat(keys, 2, axis=1)) * 0.5
    weights = jnp.where(mask, jnp.exp(scores), 0)
    weights = weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks)[None, :, None, None])
    expected = jnp.einsum("bhts,bhsd->bhtd", weights, jnp.repeat(keys, 2, axis=1))
    whole = attention._whole(0.5, None, query, keys, keys, mask, None, sinks)
    by_keys = attention._by_keys(0.5, None, query, keys, keys, mask, None, sinks)

    def make(first, count):
        return jax.lax.dynamic_slice_in_dim(mask, first, count, 2), None

    by_queries = attention._by_queries(query, keys, keys, make, 0.5, None, sinks)
    for got in (whole, by_keys, by_queries):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_chunks_of_padding_are_not_read(make_small):
    make_small(4)
    config = CONFIGS["Llama"]
    lm, params = fresh("Llama"), decoder.init(config, jax.random.key(0))
    _, cache = lm.prefill(params, PROMPT._replace(length=jnp.array([5, 2, 1])), Room(CAPACITY))
    assert (
        float(jnp.abs(cache.keys[0][:, :, 8:]).max()) == 0
        and float(jnp.abs(cache.keys[0][0, :, 4]).max()) > 0
    )


# --- the same texts
# --------------------------------------------------------------------------------------------------

SHAPE = decoder.decoder_config(VOCAB, dim=16, ff_dim=24, layers=3, heads=2, kv_heads=1, head_dim=8)
ONE = nets.replace(SHAPE, layers=1)


def drafter_of(kind, target):
    if kind == "model":
        model = jaxspec.Model(
            decoder._language_model.__wrapped__(ONE, ()), decoder.init(ONE, jax.random.key(1))
        )
        return drafters.model(model)
    net, config = {
        "eagle": (eagle, eagle.EagleConfig(ONE, 16, taps=(0, 1), own_head=True)),
        "block": (block, block.BlockConfig(ONE, 16, taps=(0, 1), block=4, mask_token=3)),
        "exit_adapter": (kangaroo, kangaroo.ExitAdapterConfig(ONE, exit=1)),
    }[kind]
    head = jaxspec.DraftHead(net.head.__wrapped__(config), net.init(config, jax.random.key(2)))
    return net.KIND.drafter(head, target)


def target_of(taps):
    return jaxspec.Model(
        decoder._language_model.__wrapped__(SHAPE, taps), decoder.init(SHAPE, jax.random.key(0))
    )


@pytest.fixture(scope="module")
def plain():
    return jaxspec.generate(target_of(()), PROMPT, max_new_tokens=8).tokens.tolist()


@pytest.mark.parametrize(
    "kind",
    marked(
        ["model", "eagle", "block", "exit_adapter"],
        slow={"eagle", "exit_adapter"},
        exhaustive={"block"},
    ),
)
def test_drafters_read_long_prompts_and_give_the_plain_text(plain, kind, make_small):
    def generate():
        target = target_of({"model": (), "exit_adapter": (0,)}.get(kind, (0, 1)))
        return jaxspec.generate(
            target, PROMPT, drafter=drafter_of(kind, target), gamma=3, max_new_tokens=8
        )

    expected = generate()
    make_small(6)
    got = generate()
    assert got.tokens.tolist() == plain == expected.tokens.tolist()
    # The drafter has read what it reads in one pass: its draft tokens are the same.
    assert got.stats.accepted.tolist() == expected.stats.accepted.tolist()


def behind_chunks(model):
    """A table model whose prefill is that of `chunks.prefill`."""

    def empty(batch, room):
        zeros = jnp.zeros((batch,), jnp.int32)
        return tables.TableCache(jnp.zeros((batch, room.tokens), jnp.int32), zeros, zeros)

    lm = model.lm
    return model._replace(lm=lm._replace(prefill=chunks.prefill(lm.extend, lm.rewind, empty)))


def test_the_certificate_holds_behind_a_chunked_prefill(make_small):
    make_small(2)
    target, draft = (
        behind_chunks(tables.table_model(jax.random.key(seed), vocab=3)) for seed in (1, 2)
    )
    prompt = Prompt(jnp.array([[1, 2, 0, 1, 2]]), jnp.array([5]))
    assert certify(target, drafter=draft, prompt=prompt, gamma=2, steps=3) < 1e-6


# --- memory
# ----------------------------------------------------------------------------------------------------------


def shapes_in(jaxpr):
    """The shape of each array of a program, inner ones included."""
    for equation in jaxpr.eqns:
        yield from (x.aval.shape for x in equation.outvars if hasattr(x.aval, "shape"))
        for inner in jaxprs_in_params(equation.params):
            yield from shapes_in(inner)


LONG = 1600


def programs(name):
    """Functions of parameters that read a prompt and train on a text of LONG tokens, as (prefill,
    gradient).
    """
    config = CONFIGS[name]
    if name == "GPT":
        config = dataclasses.replace(config, max_positions=2 * LONG)
    net, tokens = net_of(name), jnp.ones((1, LONG), jnp.int32)
    prompt = Prompt(tokens, jnp.array([LONG - 3]))
    lm = net.language_model(config, (0,))
    module = {t5: t5.T5, decoder: decoder.DecoderNet}[net](config)
    inputs = (prompt, tokens) if net is t5 else (tokens,)
    params = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))

    def loss(params):
        return jnp.mean(jax.nn.log_softmax(module.apply({"params": params}, *inputs))[..., 0])

    return params, lambda params: lm.prefill(params, prompt, Room(LONG + 20)), jax.grad(loss)


@pytest.mark.parametrize("name", ["Gemma", "LaMDA", "GPT", "T5 gated"])
def test_no_array_is_as_long_as_the_text_on_two_axes(name):
    params, *functions = programs(name)
    for function in functions:
        shapes = set(shapes_in(jax.make_jaxpr(function)(params).jaxpr))
        assert (1, LONG) in shapes or any(LONG in shape for shape in shapes)
        assert [shape for shape in shapes if sum(size >= LONG for size in shape) > 1] == []


def training_of(name, length):
    """The loss of a draft head's hidden states, for drafts of three tokens at every fourth
    position, and arguments.
    """
    config = CONFIGS_OF_HEADS[name]
    kind, places = kind_of(config), jnp.arange(0, length, 4)
    shared = zeros(config.layer.dim, config.layer.vocab_size)
    keys, width = (
        jax.random.split(jax.random.key(0), 3),
        getattr(config, "hidden_size", config.layer.dim),
    )
    hidden, taps = (
        jax.random.normal(key, (1, length, size))
        for key, size in ((keys[0], width), (keys[1], width * len(getattr(config, "taps", ()))))
    )
    tokens = jnp.arange(length + 2)[None] % config.layer.vocab_size

    def loss(params, features, taps):
        starts = DraftStarts(Forward(None, features, taps), tokens, places, 3, None)
        return jnp.sum(jnp.sin(kind.training.hidden_states(config, params, shared, starts)))

    return loss, (random_params(kind.init, config, 1, 0.3), hidden, taps)


HEADS = ("eagle 3", "mtp", "dflash", "dflash, windows")


@pytest.mark.parametrize("name", HEADS)
def test_nor_is_any_in_the_training_of_a_head(name):
    loss, arguments = training_of(name, LONG)
    shapes = {*shapes_in(jax.make_jaxpr(jax.grad(loss, allow_int=True))(*arguments).jaxpr)}
    assert any(LONG in shape for shape in shapes)
    assert [shape for shape in shapes if sum(size >= LONG for size in shape) > 1] == []


@pytest.mark.parametrize("name", marked(HEADS, slow={*HEADS} - {"eagle 3"}))
def test_which_is_that_of_whole_masks(name, make_small):
    loss, arguments = training_of(name, 14)
    read = 2 if arguments[2].size else 1  # taps or features

    def run():
        def of_read(x):
            return loss(*arguments[:read], x, *arguments[read + 1 :])

        return jax.jit(jax.value_and_grad(of_read))(arguments[read])

    expected = run()
    make_small(4)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=5e-4), run(), expected
    )


def test_logits_of_a_long_prompt_are_made_at_its_last_token_only():
    params, prefill, _ = programs("Gemma")
    heads = [
        shape
        for shape in shapes_in(jax.make_jaxpr(prefill)(params).jaxpr)
        if shape[-1:] == (VOCAB,)
    ]
    # a product of one row is one of 8 on some backends
    assert heads and all(max(shape[:-1]) <= 8 for shape in heads)


def test_memory_of_prefill_grows_as_the_prompt():
    lm, config = fresh("Llama"), CONFIGS["Llama"]
    params = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))

    def temporaries(width):
        prompt = Prompt(
            jax.ShapeDtypeStruct((1, width), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        )

        def read(params, prompt):
            forward, cache = lm.prefill(params, prompt, Room(width + 16))
            return forward.logits, cache

        return jax.jit(read).lower(params, prompt).compile().memory_analysis().temp_size_in_bytes

    small, large = temporaries(2048), temporaries(4096)
    # bytes of those of one layer in one pass
    scores = 4 * config.layers[0].attention.heads * 4096**2
    assert large < scores / 10
    assert large <= 2.1 * small
