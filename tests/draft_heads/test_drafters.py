"""Drafters that read the target's hidden states: exact, right after every acceptance count, with
any kind of target.

Targets are tiny networks. The drafters' parameters are random, so that what they draft is often
wrong.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import Model, drafters, nets
from jaxspec.analysis import cost
from jaxspec.core import (
    Caches,
    DraftContext,
    DraftStart,
    Prompt,
    Room,
    RoundEnd,
    Verdict,
    Weights,
    token_rows,
)
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.draft_heads import (
    assistant,
    block,
    dflash2,
    eagle,
    kangaroo,
    kind_of,
    lookahead_embeddings,
    medusa,
    mtp,
)
from jaxspec.draft_heads.load import read_head
from jaxspec.draft_heads.save import save
from jaxspec.drafters.hidden_states import DraftHead
from jaxspec.nets import decoder, t5
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import certify, certify_prepared, table_model, word_tokenizer
from jaxspec.training import head_loss
from jaxspec.training.data import TrainingBatch
from jaxspec.training.recipes import Learn
from tests.marks import marked
from tests.small import random_params

V, D = 3, 8
LLAMA = decoder.decoder_config(V, D, ff_dim=8, layers=3, heads=2, kv_heads=1, head_dim=4)
LAYER = nets.replace(LLAMA, layers=1)
TARGETS = {
    "decoder": (decoder, LLAMA),
    "gpt": (decoder, decoder.gpt_config(V, D, 8, layers=3, heads=2, max_positions=64)),
    "t5": (
        t5,
        t5.T5Config(V, D, 8, 2, 4, encoder_layers=1, decoder_layers=3, buckets=4, max_distance=6),
    ),
}


@functools.cache
def target_of(name, taps=()):
    net, config = TARGETS[name]
    # seeds with which texts vary
    params = random_params(net.init, config, 1 if name == "decoder" else 4, 0.6)
    return Model(net.language_model(config, taps), params, None, config, name)


EAGLE1 = eagle.EagleConfig(LAYER, D, fc_bias=True)
EAGLE3 = eagle.EagleConfig(
    LAYER, D, (0, 1), draft_vocab=2, own_head=True, own_embedding=True, norm_before_residual=True
)
DFLASH = block.BlockConfig(LAYER, D, (0, 1), block=4, mask_token=2)


def second(config, **options):
    """DFlash 2's options added to those of DFlash."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return dflash2.DFlash2Config(**{**fields, "group": 4, "rank": 4, "candidates": 2, **options})


def each_its_own():
    """Three layers: one attends to everything, the others to a window and with a rotation of their
    own.
    """
    (layer,), shapes = LAYER.layers, [(None, 10_000.0), (2, 100.0), (1, 3.0)]
    rotary = layer.attention.rotary
    attentions = [
        dataclasses.replace(
            layer.attention, window=window, rotary=dataclasses.replace(rotary, base=base)
        )
        for window, base in shapes
    ]
    return dataclasses.replace(
        LAYER, layers=tuple(dataclasses.replace(layer, attention=x) for x in attentions)
    )


CONFIGS = {
    "eagle 1": EAGLE1,
    "eagle 3": EAGLE3,
    "eagle 3, windows": dataclasses.replace(EAGLE3, layer=each_its_own()),
    "p-eagle": dataclasses.replace(EAGLE3, layer=each_its_own(), mask_token=1),
    "mtp": mtp.MTPConfig(LAYER, feeds_normed=False, zero_first=True),
    "medusa": medusa.HeadsConfig(V, D, heads=3),
    "blockwise": medusa.HeadsConfig(V, D, heads=3, block="feed_forward", ff_dim=6, own_head=False),
    "hydra": medusa.HeadsConfig(V, D, heads=3, reads_tokens=True, draft_vocab=2),
    "dflash": DFLASH,
    "dflash, windows": dataclasses.replace(DFLASH, layer=each_its_own()),
    "jetspec": dataclasses.replace(DFLASH, causal_full=True, from_anchor=True, block=3),
    "dflash 2": second(DFLASH, layer=each_its_own()),
    "dspark": dataclasses.replace(
        DFLASH, from_anchor=True, block=3, markov_rank=2, markov="gated", confidence=True
    ),
    # not from the anchor
    "dspark, memory": dataclasses.replace(DFLASH, markov_rank=2, markov="rnn"),
    "block, source": dataclasses.replace(
        DFLASH, from_anchor=True, markov_rank=2, markov="gated", reads_source=True
    ),
    "kangaroo": kangaroo.ExitAdapterConfig(LAYER, exit=2),
    "pass": lookahead_embeddings.LookAheadConfig(V, D, vectors=2),
    "assistant": assistant.AssistantConfig(
        dataclasses.replace(LAYER, tied_head=True), D, (2,), centroids=3, nearest=2
    ),
}
# the target's head, of two tokens of three
TRIMMED = ("eagle 1, trimmed", "blockwise, trimmed", "pass, trimmed")
NAMES = (*(name for name in CONFIGS if name != "block, source"), *TRIMMED)  # those for the decoder


@functools.cache
def drafter_of(name, target):
    config = CONFIGS[name.removesuffix(", trimmed")]
    kind = kind_of(config)
    params = random_params(kind.init, config, 4, 0.3)
    if getattr(config, "draft_vocab", None) is not None:
        params["vocabulary"] = jnp.array([2, 0])
    network = DraftHead(kind.head(config), params)
    model = target_of(target, network.network.requirements.taps)
    return kind.drafter(
        network, model, jaxspec.trim_vocabulary(model, ids=[0, 2]) if name in TRIMMED else None
    )


# --- exact

PLAIN = SamplingParams(jnp.ones(1), jnp.array([3]), jnp.ones(1))
COLD = PLAIN._replace(temperature=jnp.zeros(1))
SELDOM = (
    "blockwise",
    "dflash",
    "dflash, windows",
    "jetspec",
    "dspark, memory",
    "assistant",
)  # others have the same loop


@pytest.mark.parametrize(
    "name",
    marked(
        [*NAMES, "block, source"],
        slow={*CONFIGS, *TRIMMED[1:]} - {*SELDOM},
        exhaustive=(*SELDOM, "eagle 3, windows"),
    ),
)
def test_the_distribution_of_the_text_is_the_targets(name):
    """At temperatures 1 and 0; heads with a vocabulary of two tokens of three among them."""
    drafter = drafter_of(name, "t5" if name == "block, source" else "decoder")
    options = dict(
        drafter=drafter,
        gamma=2,
        steps=3,
        sampler=at_temperature(3, True),
        prompt=Prompt(jnp.array([[1, 0]]), jnp.array([2])),
    )
    off = [certify(drafter.target, sampling_params=params, **options) for params in (PLAIN, COLD)]
    assert max(off) < 1e-5, off


IN_TREES = (
    *("eagle 3", "medusa", "dspark", "dflash 2", "jetspec", "p-eagle", "eagle 3, windows"),
    *("pass", "dflash", "kangaroo", "eagle 1", "mtp", "blockwise"),
)


def tree_of(name):
    """A static tree, whose children are drawn or partly drawn, or one that grows."""
    if name in ("dflash", "jetspec"):
        return drafters.dynamic_tree(drafter_of(name, "decoder"), nodes=3, depth=2, width=2)
    draw = "mixed" if name == "medusa" else "without_replacement"
    return drafters.tree(drafter_of(name, "decoder"), shape=[(0,), (1,), (0, 0)], draw=draw)


WORDS = word_tokenizer(["</s>", "a", "b"], unknown="</s>")
MASKED = ("eagle 3", "hydra", "dflash 2", "kangaroo", "eagle 1, trimmed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", marked([*NAMES, "block, source"], exhaustive={*NAMES, "block, source"} - {*MASKED})
)
def test_the_distribution_of_structured_text_is_the_masked_targets(name):
    """Each draft token is masked after its own prefix, whatever made it: also in a draft vocabulary
    of two tokens.
    """
    _check_masked(drafter_of(name, "t5" if name == "block, source" else "decoder"))


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(IN_TREES, exhaustive={*IN_TREES} - {"eagle 3", "dflash"}))
def test_the_distribution_of_structured_trees_is_the_masked_targets(name):
    _check_masked(tree_of(name))


def _check_masked(drafter):
    target, prompt = (
        drafter.target._replace(tokenizer=WORDS),
        Prompt(jnp.array([[1, 2]]), jnp.array([2])),
    )
    for temperature in (1.0, 0.0):
        options = dict(
            temperature=temperature, key=jax.random.key(0), max_new_tokens=4, eos_ids=(0,)
        )
        prepared = prepare(target, prompt, drafter=drafter, gamma=2, regex="a( b| a a)*", **options)
        assert certify_prepared(prepared, steps=3) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(NAMES, exhaustive=(*SELDOM, *TRIMMED, "eagle 3, windows")))
def test_rows_may_be_permuted_in_mid_generation(name, permuted):
    drafter = drafter_of(name, "decoder")
    as_it_is, on_the_way = permuted(drafter.target, drafter)
    assert on_the_way == as_it_is


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(IN_TREES, exhaustive=IN_TREES[6:]))
def test_the_distribution_of_the_text_of_trees_is_the_targets(name):
    options = dict(
        steps=3, sampler=at_temperature(3, True), prompt=Prompt(jnp.array([[1, 0]]), jnp.array([2]))
    )
    drafter = tree_of(name)
    off = [
        certify(drafter.target, drafter=drafter, sampling_params=params, **options)
        for params in (PLAIN, COLD)
    ]
    assert max(off) < 1e-5, off


WIDE = decoder.decoder_config(64, 16, ff_dim=24, layers=3, heads=4, kv_heads=2, head_dim=4)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", marked([63, 127, 255], exhaustive={127}))
def test_trees_of_causal_blocks_have_up_to_256_nodes_and_greedy_text_is_the_plain_one(nodes):
    """As JetSpec drafts them: blocks of 16, 7 children of a node, and the committed token counts
    among the nodes.
    """
    config = block.BlockConfig(
        nets.replace(WIDE, layers=1), 16, (0, 1), block=16, mask_token=63, causal_full=True
    )
    target = Model(
        decoder.language_model(WIDE, config.taps),
        random_params(decoder.init, WIDE, 3, 0.5),
        None,
        WIDE,
    )
    network = DraftHead(block.head(config), random_params(block.init, config, 4, 0.5))
    drafter = drafters.dynamic_tree(drafters.block(network, target), nodes=nodes, depth=15, width=7)
    rows = token_rows.pad([[3, 1, 4, 1, 5], [9, 2]], 5)
    plain = jaxspec.generate(target, rows, max_new_tokens=10)
    out = jaxspec.generate(target, rows, drafter=drafter, max_new_tokens=10)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.drafted.max() >= nodes
    assert out.stats.accepted.sum() > 0


# --- what the next draft is made of

GAMMA, WIDTH, ROOM = 2, 6, 16
LENGTH = np.array([1, 2, 4, 6])
TEXT = np.random.default_rng(5).integers(0, V, (4, WIDTH + ROOM)).astype(np.int32)
TEXT[:, 0] = 0  # what a T5's rows begin with
ROUNDS = np.array([[0, 1, 2, 1], [2, 0, 1, 2]])


@functools.cache
def programs_of(name, target):
    """What a decoder does in a round, each a program, so that rounds share them: its start, a
    draft, and its commit.
    """
    drafter = drafter_of(name, target)
    functions, lm = drafter.functions, drafter.target.lm

    def row_of(text, length):
        return Prompt(jnp.where(jnp.arange(text.shape[1])[None] < length[:, None], text, 1), length)

    @jax.jit
    def start(weights, prompt):
        forward, cache = lm.prefill(weights.target, prompt, Room(WIDTH + ROOM))
        room = Room(prompt.tokens.shape[1] + ROOM, GAMMA + 2)
        return Caches(cache, functions.init(DraftStart(weights, prompt, room, forward)))

    @jax.jit
    def propose(weights, caches, text, length):
        every, limit = SamplingParams(jnp.ones(len(length))), jnp.full_like(length, GAMMA)
        context = DraftContext(
            jax.random.split(jax.random.key(7), len(length)), row_of(text, length), limit, GAMMA, False,
            lambda logits, *_: at_temperature()(every, _wide(logits), None),
        )  # fmt: skip
        return functions.propose(
            weights, caches._replace(target=lm.rewind(caches.target, length - 1)), context
        )

    @functools.partial(jax.jit, static_argnames="gamma")
    def commit(weights, caches, text, length, accepted, gamma):
        fed = token_rows.window(text, length - 1, gamma + 1)
        wrong = jnp.arange(gamma + 1)[None] > accepted[:, None]
        forward, cache = lm.extend(
            weights.target,
            lm.rewind(caches.target, length - 1),
            jnp.where(wrong, (fed + 1) % V, fed),
        )
        row, verdict = row_of(text, length + accepted + 1), Verdict(accepted, accepted, accepted)
        end = RoundEnd(weights, caches._replace(target=cache), row, verdict, forward)
        return Caches(cache, functions.commit(end).draft), row.length

    return start, propose, commit


def draft_after(name, target, rounds, prompt, length, gamma):
    """The draft after rounds with so many accepted draft tokens, of rows whose text is `TEXT`.

    Rejected draft tokens are others than the text's, so that nothing of them may be left.
    """
    drafter, (start, propose, commit) = drafter_of(name, target), programs_of(name, target)
    weights = Weights(drafter.target.params, drafter.params)
    caches, length = start(weights, prompt), jnp.asarray(length)
    for accepted in rounds:
        _, caches = propose(weights, caches, TEXT, length)
        caches, length = commit(weights, caches, TEXT, length, jnp.asarray(accepted), gamma=gamma)
    return jax.device_get(propose(weights, caches, TEXT, length)[0])


def is_encoder(target):
    return target == "t5"


def prompt_of(target, length):
    """A T5's source, or the beginning of a decoder's row."""
    return Prompt(
        jnp.asarray(TEXT[:, : WIDTH + (0 if is_encoder(target) else 8)]), jnp.asarray(length)
    )


def _wide(logits):
    return jnp.pad(logits, ((0, 0), (0, 0), (0, V - logits.shape[-1])), constant_values=-jnp.inf)


FRESH = [
    ("eagle 1", "gpt"),
    ("eagle 3", "t5"),
    ("mtp", "decoder"),
    ("medusa", "t5"),
    ("block, source", "t5"),
]
FRESH += [("eagle 3, windows", "decoder"), ("p-eagle", "t5"), ("assistant", "decoder")]
FRESH_SELDOM = [
    ("dspark", "decoder"),
    ("pass", "t5"),
    ("kangaroo", "t5"),
    ("dflash, windows", "decoder"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"), marked([*FRESH, *FRESH_SELDOM], exhaustive=FRESH_SELDOM)
)
def test_the_next_draft_is_the_one_of_a_fresh_start(name, target):
    """After two rounds with all acceptance counts, from rows of one token and more: as if the whole
    text were read at once (of an encoder-decoder: in one round in which everything is accepted).
    """
    encoder = is_encoder(target)
    # length of the rows, the token after all included
    end = 2 + (0 if encoder else LENGTH - 1) + (ROUNDS + 1).sum(0)
    prompt, start = prompt_of(target, LENGTH), np.full(4, 2) if encoder else LENGTH + 1
    gamma = int((end - 3).max()) if encoder else GAMMA
    draft = draft_after(name, target, ROUNDS, prompt, start, gamma)
    if encoder:
        fresh = draft_after(name, target, (end - 3)[None], prompt, start, gamma)
    else:
        fresh = draft_after(name, target, [], prompt_of(target, end - 1), end, gamma)
    np.testing.assert_allclose(draft.log_probs, fresh.log_probs, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(draft.tokens, fresh.tokens)
    assert np.ptp(np.asarray(draft.log_probs)[:, :, 0]) > 0.05  # rows and tokens differ


TREES_SLOW, TREES_SELDOM = ["assistant"], ["mtp", "medusa", "kangaroo"]


@pytest.mark.quick
@pytest.mark.parametrize(
    "name",
    marked(["eagle 3", *TREES_SLOW, *TREES_SELDOM], slow=TREES_SLOW, exhaustive=TREES_SELDOM),
)
def test_the_draft_after_rounds_of_trees_is_the_one_of_a_fresh_start(name):
    """A chain is drafted after three rounds of sampled trees: hidden states have followed the
    paths.
    """
    drafter = drafter_of(name, "decoder")
    functions, lm = drafter.functions, drafter.target.lm
    tree, rows = (
        drafters.tree(drafter, (2, 2), draw="without_replacement"),
        token_rows.pad([[1, 2], [0], [2, 2, 1], [0, 1]], 4),
    )
    prepared = prepare(
        drafter.target,
        rows,
        drafter=tree,
        max_new_tokens=14,
        temperature=1.0,
        key=jax.random.key(3),
    )
    state = loop.start(
        prepared.decoder,
        prepared.weights,
        prepared.prompt,
        prepared.request,
        prepared.max_new_tokens,
    )
    for _ in range(3):
        state, _ = loop.advance(prepared.decoder, prepared.weights, state)
    row = Prompt(state.tokens, state.length)
    # rows accepted other numbers of tokens
    assert len(set(np.asarray(row.length - rows.length).tolist())) > 1

    @jax.jit
    def draft(weights, cache, state, row):
        every, limit = SamplingParams(jnp.ones(4)), jnp.full_like(row.length, GAMMA)
        context = DraftContext(
            jax.random.split(jax.random.key(7), 4), row, limit, GAMMA, False,
            lambda logits, *_: at_temperature()(every, _wide(logits), None),
        )  # fmt: skip
        return functions.propose(weights, Caches(lm.rewind(cache, row.length - 1), state), context)[
            0
        ]

    @jax.jit
    def start(weights, row):
        read = row._replace(length=row.length - 1)
        forward, cache = lm.prefill(weights.target, read, Room(40))
        return cache, functions.init(DraftStart(weights, read, Room(40, 20), forward))

    fresh = draft(prepared.weights, *start(prepared.weights, row), row)
    continued = draft(prepared.weights, state.caches.target, state.caches.draft, row)
    np.testing.assert_allclose(continued.log_probs, fresh.log_probs, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(continued.tokens, fresh.tokens)


# --- in generation


@pytest.mark.parametrize("name", NAMES)
def test_a_round_asks_nothing_of_the_host(name):
    drafter = drafter_of(name, "decoder")
    prepared = prepare(
        drafter.target, token_rows.pad([[1, 2]]), drafter=drafter, gamma=2, max_new_tokens=4
    )
    start = functools.partial(loop.start, prepared.decoder, max_new_tokens=prepared.max_new_tokens)
    state = jax.eval_shape(start, prepared.weights, prepared.prompt, prepared.request)
    program = loop.advance.lower(prepared.decoder, prepared.weights, state).as_text()
    calls = [word for word in ("callback", "infeed", "outfeed", "send", "recv") if word in program]
    assert "dot_general" in program and not calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"), [("eagle 3", "t5"), ("dflash", "decoder"), ("block, source", "t5")]
)
def test_greedy_text_is_plain_decodings(name, target):
    """Rows that accept, end and stop by themselves; gamma beyond what the drafter has; a policy."""
    drafter = drafter_of(name, target)
    rows = token_rows.pad([[1, 2], [0], [2, 2, 1]], 4)
    options = dict(max_new_tokens=np.array([9, 4, 11]))
    plain = jaxspec.generate(target_of(target), rows, **options)
    for policy in (None, jaxspec.policies.adaptive(0.1, 0.1, pause=1)):
        out = jaxspec.generate(
            target_of(target), rows, drafter=drafter, gamma=5, policy=policy, **options
        )
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        assert out.stats.drafted.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    marked(
        [("eagle 3", "t5"), ("medusa", "gpt"), ("kangaroo", "gpt")],
        exhaustive={("kangaroo", "gpt")},
    ),
)
def test_a_tree_that_is_a_chain_is_accepted_as_the_chain_is(name, target):
    """Hidden states follow the path: rounds and accepted tokens are the same; a bushy tree has no
    fewer accepted.
    """
    drafter, rows = drafter_of(name, target), token_rows.pad([[1, 2], [0], [2, 2, 1]], 4)
    chain = jaxspec.generate(target_of(target), rows, drafter=drafter, gamma=2, max_new_tokens=14)
    trees = [drafters.tree(drafter, counts) for counts in ((1, 1), (3, 3))]
    tree, bushy = (
        jaxspec.generate(target_of(target), rows, drafter=tree, max_new_tokens=14) for tree in trees
    )
    np.testing.assert_array_equal(tree.tokens, chain.tokens)
    np.testing.assert_array_equal(tree.stats.rounds, chain.stats.rounds)
    np.testing.assert_array_equal(tree.stats.accepted, chain.stats.accepted)
    np.testing.assert_array_equal(bushy.tokens, chain.tokens)
    assert (np.asarray(bushy.stats.rounds) <= np.asarray(chain.stats.rounds)).all()
    assert np.asarray(chain.stats.accepted).sum() > 0


@pytest.mark.slow
def test_a_head_that_copies_its_target_is_always_right():
    """Its layers and its head are those that the target itself has after the tap: all draft tokens
    are accepted.

    The target has one layer, which adds nothing; so its features are its embedding's, normalised,
    and a layer that adds nothing to a projection that takes the token's half of the pair gives the
    next ones.
    """
    config = nets.replace(LLAMA, layers=1, ff_dim=2)
    params = random_params(decoder.init, config, 1, 0.6)
    silent = jax.tree.map(jnp.zeros_like, params["layers_0"])
    params = params | {"layers_0": silent}
    target = Model(decoder.language_model(config), params, None, config, "silent")
    module = mtp.MTPConfig(config)
    head_params = random_params(mtp.init, module, 1)
    head_params["layer"] = jax.tree.map(jnp.zeros_like, head_params["layer"])
    head_params["embedding_norm"]["scale"] = jnp.ones(D)
    head_params["norm"] = params["norm"]
    head_params["fc"]["weight"] = jnp.concatenate([jnp.eye(D), jnp.zeros((D, D))], axis=1)
    drafter = drafters.mtp(DraftHead(mtp.head(module), head_params), target)
    out = jaxspec.generate(
        target, token_rows.pad([[1], [2, 0]], 2), drafter=drafter, gamma=3, max_new_tokens=9, temperature=1.0,
        key=jax.random.key(2),
    )  # fmt: skip
    assert (np.asarray(out.stats.accepted) == np.asarray(out.stats.drafted)).all()
    assert (np.asarray(out.stats.rounds) == 2).all()


# --- what does not fit


@pytest.mark.quick
def test_a_draft_of_one_token():
    """A drafter of one pass feeds no slot for it."""
    rows = token_rows.pad([[1, 2], [0]], 2)
    plain = jaxspec.generate(target_of("decoder"), rows, max_new_tokens=5)
    out = jaxspec.generate(
        target_of("decoder"),
        rows,
        drafter=drafter_of("p-eagle", "decoder"),
        gamma=1,
        max_new_tokens=5,
    )
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert (out.stats.drafted > 0).all()


@pytest.mark.slow
def test_a_head_for_another_target():
    def bound(name, **changes):
        kind = kind_of(CONFIGS[name])
        return kind.drafter, DraftHead(kind.head(dataclasses.replace(CONFIGS[name], **changes)), {})

    wide = dataclasses.replace(LAYER, dim=16)
    words = dataclasses.replace(LAYER, vocab_size=9)
    plain, tapped = target_of("decoder"), target_of("decoder", (0, 1))
    for (make, head), target, complaint in (
        (
            bound("eagle 3"),
            plain,
            r"layers \[0, 1\], and decoder was built without taps: give it jaxspec.with_taps",
        ),
        (
            bound("dflash"),
            target_of("decoder", (0, 2)),
            r"reads the outputs of layers \[0, 1\], and decoder has",
        ),
        (
            bound("eagle 1", layer=wide, hidden_size=16),
            plain,
            "expects hidden states of width 16 and 3 token ids, and decoder has 8 and 3",
        ),
        (
            bound("eagle 3", layer=words),
            tapped,
            "of width 8 and 9 token ids, and decoder has 8 and 3",
        ),
        (
            bound("dspark", reads_source=True),
            tapped,
            "output of an encoder, and decoder has none: it was made for",
        ),
        (
            bound("medusa", vocab_size=4),
            plain,
            "4 token ids, and decoder has 8 and 3: it was made for another target",
        ),
        (
            bound("pass"),
            plain._replace(lm=plain.lm._replace(inside=None)),
            "vectors reads hidden states, and decoder",
        ),
        (
            bound("medusa"),
            table_model(jax.random.key(0), 3),
            "the heads reads hidden states, and table-3 gives none",
        ),
    ):
        with pytest.raises(ValueError, match=complaint):
            make(head, target, None)


@pytest.mark.slow
def test_trees_that_a_drafter_cannot_draft():
    with pytest.raises(ValueError, match=r"heads takes chains only \(Drafter.steps is None"):
        drafters.tree(drafter_of("hydra", "gpt"), (2, 1))
    with pytest.raises(
        ValueError, match="the tree has depth 4, and the drafter drafts 3 tokens ahead"
    ):
        drafters.dynamic_tree(drafter_of("medusa", "gpt"), nodes=5, depth=4, width=2)


@pytest.mark.slow
def test_a_drafter_is_for_the_target_that_it_was_made_for():
    other = target_of("gpt")
    with pytest.raises(
        ValueError, match=r"the drafter reads the hidden states of decoder .*, and drafts for gpt"
    ):
        jaxspec.generate(other, token_rows.pad([[1]]), drafter=drafter_of("eagle 3", "decoder"))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (
            lambda: eagle.EagleConfig(dataclasses.replace(LAYER, dim=16), D),
            "without taps this is EAGLE-1",
        ),
        (
            lambda: eagle.EagleConfig(dataclasses.replace(LAYER, dim=16), D, (0,)),
            "expected own_embedding",
        ),
        (lambda: dataclasses.replace(EAGLE3, own_head=False), "expected own_head"),
        (
            lambda: dataclasses.replace(EAGLE3, norm_before_fc=True, norm_each_tap=True),
            "expected one of them at most",
        ),
        (
            lambda: dataclasses.replace(EAGLE1, layer=nets.replace(LAYER, post_norms=True)),
            "Llama's kind of layers",
        ),
        (
            lambda: dataclasses.replace(EAGLE3, mask_token=3),
            "mask_token is 3: expected a number from 0 to below 3",
        ),
        (lambda: dataclasses.replace(EAGLE1, mask_token=1), "mask_token is 1 without taps"),
        (lambda: mtp.MTPConfig(LLAMA), "expected one layer"),
        (lambda: medusa.HeadsConfig(V, D, 0), "heads is 0"),
        (lambda: medusa.HeadsConfig(V, D, 1, block="none"), "block is 'none'"),
        (lambda: medusa.HeadsConfig(V, D, 1, block="feed_forward"), "ff_dim is 0"),
        (lambda: medusa.HeadsConfig(V, D, 1, draft_vocab=2, own_head=False), "expected own_head"),
        (lambda: dataclasses.replace(DFLASH, taps=()), "taps is empty"),
        (lambda: dataclasses.replace(DFLASH, markov="none"), "markov is 'none'"),
        (
            lambda: dataclasses.replace(DFLASH, confidence=True),
            "confidence_reads_token is True, and markov_rank is 0",
        ),
        (lambda: dataclasses.replace(DFLASH, block=1), "block is 1: expected at least 2"),
        (lambda: dataclasses.replace(DFLASH, mask_token=3), "mask_token is 3"),
        (
            lambda: dataclasses.replace(DFLASH, layer=dataclasses.replace(LAYER, dim=16)),
            "own_embedding and own_head",
        ),
        (lambda: dataclasses.replace(DFLASH, draft_vocab=2), "expected own_head"),
        (lambda: second(DFLASH, candidates=4), "candidates is 4: expected a number from 1 to 3"),
        (lambda: second(DFLASH, group=3), "group is 3: expected a divisor of the layers' width, 8"),
        (lambda: second(DFLASH, reach=5), "reach is 5: expected a number from 1 to 4"),
        (
            lambda: second(DFLASH, markov_rank=2),
            "markov_rank is 2 and draft_vocab None: expected 0 and None",
        ),
    ],
)
def test_shapes_that_make_no_drafter(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


def test_a_block_drafter_that_reads_the_source_comes_back_from_its_folder(tmp_path):
    drafter, config = drafter_of("block, source", "t5"), CONFIGS["block, source"]
    config = dataclasses.replace(config, layer=nets.replace(LAYER, head_norms=True))
    params = random_params(block.init, config, 4, 0.3)
    save(config, params, tmp_path / "block", target=drafter.target)
    back, same = read_head(tmp_path / "block", target=drafter.target)
    assert back == config
    jax.tree.map(np.testing.assert_array_equal, same, params)


def test_independent_sequences_are_as_long_as_there_are_heads():
    """By default; the error of a length that was asked for is about lengths, not about trees."""
    drafter = drafters.sequences(drafter_of("medusa", "decoder"), k=2)
    assert drafter.functions.tree.depth == 3
    with pytest.raises(
        ValueError,
        match="length is 4: expected at most 3 tokens, as many as the drafter drafts ahead",
    ):
        drafters.sequences(drafter_of("medusa", "decoder"), k=2, length=4)


# --- in training


TRAINED_FAST = [("dspark, memory", "decoder"), ("pass", "t5")]
TRAINED_SLOW = [
    ("dflash, windows", "decoder"),
    ("dflash 2", "decoder"),
    ("p-eagle", "decoder"),
    ("eagle 3, windows", "decoder"),
    ("eagle 3", "decoder"),
    ("block, source", "t5"),
    ("hydra", "gpt"),
    ("kangaroo", "gpt"),
]
TRAINED_SELDOM = [("pass", "gpt"), ("eagle 1", "gpt"), ("mtp", "decoder")]  # as EAGLE-3


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "target"),
    marked(
        [*TRAINED_FAST, *TRAINED_SLOW, *TRAINED_SELDOM],
        slow=TRAINED_SLOW,
        exhaustive=TRAINED_SELDOM,
    ),
)
def test_training_sees_the_distributions_of_decoding(name, target):
    """A draft's distributions are those of training where it begins, on a text that holds the
    draft.
    """
    drafter, config = drafter_of(name, target), CONFIGS[name]
    lm, encoder = drafter.target.lm, is_encoder(target)
    # committed: the prompt, or a start token, and one token more
    length = np.full(4, 2) if encoder else LENGTH + 1
    decoded = draft_after(name, target, [], prompt_of(target, LENGTH), length, GAMMA)
    rows = np.concatenate([TEXT[:, : WIDTH + 1], np.zeros((4, GAMMA + 1), np.int32)], axis=1)
    for row, end, tokens in zip(rows, length, np.asarray(decoded.tokens), strict=True):
        row[end : end + GAMMA] = tokens
    none = np.zeros((4, 0), np.int32), np.zeros(4, np.int32)
    source = (TEXT[:, :WIDTH], LENGTH.astype(np.int32)) if encoder else none
    target_rows, ends = (rows[:, 1:], length + GAMMA) if encoder else (rows, length + GAMMA + 1)
    lesson = head_loss.Lesson(
        TrainingBatch(*source, target_rows, ends.astype(np.int32)), drafter.target.params
    )
    head_params = drafter.params.adapter if name == "kangaroo" else drafter.params
    frozen = {name: x for name, x in head_params.items() if name == "vocabulary"}
    trained = {name: x for name, x in head_params.items() if name != "vocabulary"}
    task = head_loss.HeadTask(lm, config, frozen, Learn(depths=GAMMA))

    @jax.jit
    def run(params, lesson):
        drafted = head_loss.draft(task, params, lesson)
        part = jax.tree.map(lambda x: x[0], drafted.parts)  # all places are in one
        return [
            x.log_q for x in head_loss.compare(task, lesson.target, params, drafted.hidden[0], part)
        ], part.real

    log_q, real = run(trained, lesson)
    for row, end in enumerate(length):
        for depth in range(GAMMA):
            expected = np.asarray(decoded.log_probs)[
                row, depth, frozen.get("vocabulary", slice(None))
            ]
            np.testing.assert_allclose(log_q[depth][row, end - 2], expected, rtol=1e-4, atol=1e-4)
        # and then the text is at its end
        assert real[row, end - 2].all() and not real[row, end].all()


# --- measured


# By steps, with no pass of its own; at once, by heads, and on the target's cache.
MEASURED, MEASURED_SLOW = ("pass",), ("eagle 3", "dflash", "medusa", "assistant")


@pytest.mark.quick
@pytest.mark.parametrize(
    "name", marked(NAMES, slow=MEASURED_SLOW, exhaustive={*NAMES} - {*MEASURED, *MEASURED_SLOW})
)
def test_what_a_draft_costs_is_measured_as_a_whole(name):
    drafter = drafter_of(name, "t5" if name == "eagle 3" else "decoder")
    prompt = Prompt(jnp.asarray(TEXT[:, :WIDTH]), jnp.asarray(LENGTH))
    prepared = prepare(drafter.target, prompt, drafter=drafter, gamma=2, max_new_tokens=6)
    assert cost.draft_cost(prepared, repeats=1, inner=1) > 0
    assert cost.drafts_as_a_whole(prepared) and cost.paid_model(prepared) is None
