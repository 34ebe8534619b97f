"""Layers with a window that keep a ring of their last entries, against the same layers with caches
of full length.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from benchmarks.oracle import oracle
from jaxspec import drafters, nets
from jaxspec.core import Prompt, Room, chunks, token_rows
from jaxspec.core import kv_cache as kv
from jaxspec.decode import loop
from jaxspec.decode.generate import complete
from jaxspec.decode.request import prepare
from jaxspec.draft_heads import block
from jaxspec.nets import decoder
from jaxspec.testing import certify, word_tokenizer
from jaxspec.vocab.remap import map_vocabulary
from tests.marks import marked
from tests.nets.test_trees import CONFIGS
from tests.small import random_params

VOCAB, WINDOW, SLACK, CAPACITY = 11, 4, 8, 64
FULL = None  # no cache is a ring
GEMMA = nets.replace(CONFIGS["Gemma"], vocab_size=VOCAB, layers=3, window=WINDOW)
MISTRAL = nets.replace(CONFIGS["Mistral"], vocab_size=VOCAB, window=WINDOW)
SHAPES = {"Gemma": GEMMA, "Mistral": MISTRAL}
ROWS = jnp.array(np.random.default_rng(0).integers(0, VOCAB, (3, 41)))
LENGTH = jnp.array([41, 18, 5])
DRAFT = nets.replace(MISTRAL, layers=1)
WITHOUT = nets.replace(MISTRAL, window=None, local=())
DEEP = nets.replace(MISTRAL, layers=3, window=16)  # the last position depends on 46 before it


@functools.cache
def params_of(config, seed=0):
    return random_params(decoder.init, config, seed, 0.2)


@pytest.fixture
def model_with(monkeypatch):
    """Makes a model of functions that no other test has compiled, with rings or without, after
    setting the chunks.
    """
    window = kv.window

    def full(*sizes, ring):
        return window(*sizes, ring=False)

    def make(config, slack=SLACK, chunk=SLACK - 2, seed=0):
        monkeypatch.setattr(kv, "window", full if slack is FULL else window)
        monkeypatch.setattr(chunks, "LONGEST", chunk)
        monkeypatch.setattr(chunks, "MULTIPLE", 1)
        return jaxspec.Model(
            decoder._language_model.__wrapped__(config, ()), params_of(config, seed), config=config
        )

    return make


# --- the same numbers


@pytest.mark.parametrize(
    ("name", "chunk"),
    marked([("Gemma", 7), ("Gemma", 1), ("Mistral", 7)], slow=[("Gemma", 1), ("Mistral", 7)]),
)
def test_logits_are_those_of_full_caches(name, chunk, model_with):
    """Of prompts longer than a ring, ragged; and of what is fed to them, by ones and more."""
    more = jnp.array(np.random.default_rng(1).integers(0, VOCAB, (3, 8)))

    def run(slack, chunk):
        model = model_with(SHAPES[name], slack, chunk)

        @jax.jit
        def read(params):
            forward, cache = model.lm.prefill(params, Prompt(ROWS, LENGTH), Room(CAPACITY, SLACK))
            logits = [forward.logits]
            for step in (slice(0, 1), slice(1, 4), slice(4, 8)):
                after, cache = model.lm.extend(params, cache, more[:, step])
                logits.append(after.logits)
            return forward.features, jnp.concatenate(logits, axis=1), cache

        return read(model.params)

    features, logits, cache = run(SLACK, chunk)
    expected_features, expected, full = run(FULL, 41)
    assert {k.shape[2] for k in cache.keys} == ({12, 64} if name == "Gemma" else {12})
    assert {k.shape[2] for k in full.keys} == {64} and cache.length.tolist() == full.length.tolist()
    real = np.arange(41)[None] < np.array(LENGTH)[:, None]
    np.testing.assert_allclose(features[real], expected_features[real], rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_more_tokens_than_a_ring_has_slots(model_with):
    """At once: of an empty cache, then of one that goes round the ring; single tokens follow."""

    def run(slack):
        model = model_with(GEMMA, slack, 64)
        cache = decoder.empty_cache(GEMMA, 1, Room(CAPACITY, SLACK))
        logits, start = [], 0
        for count in (3, 9, 15, 1, 8, 1):  # up to 8 fit into the ring, 12 slots long
            forward, cache = jax.jit(model.lm.extend)(
                model.params, cache, ROWS[:1, start : start + count]
            )
            logits.append(forward.logits)
            start += count
        return jnp.concatenate(logits, axis=1)

    np.testing.assert_allclose(run(SLACK), run(FULL), rtol=2e-4, atol=2e-5)


def test_rewinds_of_every_length(model_with):
    """Up to the slack, and one more, all is as in a full cache; beyond, it would not be, and
    `can_rewind` says so.
    """
    length, more = 30, ROWS[:1, :3]

    def run(slack):
        model = model_with(GEMMA, slack, 7)
        prompt = Prompt(ROWS[:1, :length], jnp.array([length]))
        _, cache = jax.jit(model.lm.prefill)(model.params, prompt, Room(CAPACITY, SLACK))
        back = jnp.arange(SLACK + 5)
        rows = token_rows.repeat_rows(cache, len(back))
        forward, _ = jax.jit(model.lm.extend)(
            model.params, model.lm.rewind(rows, length - back), jnp.tile(more, (len(back), 1))
        )
        return forward.logits, [kv.can_rewind(cache, length - n) for n in back.tolist()]

    got, possible = run(SLACK)
    expected, always = run(FULL)
    right = np.abs(np.asarray(got - expected)).max(axis=(1, 2)) < 1e-4
    assert all(always) and possible == [True] * (SLACK + 1) + [False] * 4
    assert right[: SLACK + 2].all() and not right[SLACK + 2 :].any()


def test_the_path_of_a_tree_moves_within_a_ring(model_with):
    """Trees that lie across the ring's end; three rows at places of their own."""
    parent = jnp.array([[-1, 0, 0, 2, 3, 1]] * 3)
    nodes, path = ROWS[:, :6], jnp.array([[1, 2, 0], [0, 4, 0], [1, 2, 3]])
    count = jnp.array([2, 2, 3])

    lengths = jnp.array([[41, 18, 5], [34, 20, 7]])

    def run(slack):
        model = model_with(GEMMA, slack, 7)

        @jax.jit
        def read(params, length):
            _, cache = model.lm.prefill(params, Prompt(ROWS, length), Room(CAPACITY, SLACK))
            first, cache = model.lm.extend(params, cache, nodes, parent)
            # Node 0 is the last committed token; draft tokens 0, 1, ... are the nodes after it.
            cache = model.lm.rewind(model.lm.select(cache, length + 1, path), length + 1 + count)
            return first.logits, model.lm.extend(params, cache, nodes[:, :3])[0].logits

        return [logits for length in lengths for logits in read(model.params, length)]

    for got, expected in zip(run(SLACK), run(FULL), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)


def test_short_generations_run_the_program_that_they_had(model_with):
    def program(rewind):
        model, room = model_with(GEMMA, chunk=512), Room(CAPACITY, rewind)
        jaxpr = jax.make_jaxpr(lambda p: model.lm.prefill(p, Prompt(ROWS, LENGTH), room))(
            model.params
        )
        return re.sub("0x[0-9a-f]+", "", str(jaxpr))

    assert program(CAPACITY - WINDOW + 1) == program(10**6) != program(SLACK)


def test_a_ring_has_the_window_and_what_is_taken_back():
    """A round feeds 8 tokens, so a window of 512 takes 521 slots, however many tokens a chunk of a
    prompt has.
    """
    config = nets.replace(GEMMA, window=512)
    row = jax.ShapeDtypeStruct((1, 5000), jnp.int32)
    room = token_rows.room(
        decoder.language_model(config), Prompt(row, jnp.ones(1, jnp.int32)), headroom=136, nodes=7
    )
    rooms = (room, Room(500, 9), Room(521, 9))
    caches = jax.eval_shape(lambda: [decoder.empty_cache(config, 1, room) for room in rooms])
    sizes = [[keys.shape[2] for keys in cache.keys] for cache in caches]
    assert sizes == [[521, 5136, 521], [500] * 3, [521] * 3]


# --- the same texts


def drafter_of(kind, draft):
    return {
        "plain": lambda: None,
        "a model": lambda: drafters.model(draft),
        "a tree": lambda: drafters.tree(draft, (2, 1)),
        "a dynamic tree": lambda: drafters.dynamic_tree(draft, nodes=5, depth=3, width=2),
        # which feeds 10 tokens
        "a wide tree": lambda: drafters.dynamic_tree(draft, nodes=4, depth=3, width=5),
        "a cascade": lambda: drafters.cascade(draft, drafters.prompt_lookup(), gamma=2),
    }[kind]()


KINDS = ("plain", "a model", "a tree", "a dynamic tree", "a wide tree", "a cascade")


@pytest.mark.parametrize("kind", marked(KINDS, slow={*KINDS} - {"a model"}))
def test_texts_and_counts_are_those_of_full_caches(kind, model_with):
    """Rows at temperatures 0 and 1; prompts and texts go round the rings of both models."""

    def run(slack):
        target, draft = model_with(GEMMA, slack), model_with(DRAFT, slack, seed=5)
        options = dict(
            temperature=[0.0, 1.0, 0.8], key=jax.random.key(2), max_new_tokens=20, eos_ids=()
        )
        drafter = drafter_of(kind, draft)
        return jaxspec.generate(target, Prompt(ROWS, LENGTH), drafter=drafter, gamma=4, **options)

    got, expected = run(SLACK), run(FULL)
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert jax.tree.map(np.ndarray.tolist, got.stats) == jax.tree.map(
        np.ndarray.tolist, expected.stats
    )
    assert kind == "plain" or 0 < got.stats.accepted.sum() < got.stats.drafted.sum()


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["prefix", "chunks"])
def test_a_model_of_another_vocabulary_drafts_in_its_rings(begin, model_with):
    """Some tokens are five of its own, so that a chunk of six is up to thirty, and a rewind of five
    up to 25.
    """
    spelled = [[token] if token < 6 else [token - 6, 3, 1, 2, 4] for token in range(VOCAB)]
    own = dataclasses.replace(DEEP, vocab_size=6)

    def run(slack):
        target, draft = model_with(WITHOUT), model_with(own, slack, seed=5)
        drafter = drafters.model(map_vocabulary(draft, range(6), VOCAB, spelled, first=(2,)))
        options = dict(drafter=drafter, gamma=3, max_new_tokens=16, eos_ids=())
        if begin == "prefix":
            shared, rows = ROWS[0, :9].tolist(), [ROWS[0, 9:].tolist(), ROWS[1, :9].tolist(), [4]]
            return jaxspec.generate(
                target, rows, prefix=jaxspec.prefix(target, shared, drafter=drafter), **options
            )
        prepared = prepare(target, Prompt(ROWS, LENGTH), **options)
        return complete(prepared, begin=lambda p: loop.prefill_in_chunks(p, lambda read: None))

    got, expected = run(SLACK), run(FULL)
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert got.trace.draft.tolist() == expected.trace.draft.tolist()


def test_a_cache_of_another_vocabulary_is_rewound_in_its_own_tokens():
    inner = kv.empty(1, Room(64, rewind=3), [kv.window(1, 8, width=4)])._replace(
        written=jnp.array([40])
    )
    cache = kv.MappedCache(inner, jnp.array([20]), 2 * jnp.arange(33)[None])
    assert [kv.can_rewind([cache], length) for length in (0, 17, 18, 19)] == [
        True,
        False,
        False,
        True,
    ]


@pytest.mark.slow
def test_rows_that_a_policy_keeps_from_drafting_write_nothing_ahead(model_with):
    """A row drafts again after more tokens than its ring takes back, in which the other one
    drafted.
    """

    def run(slack):
        target, draft = model_with(WITHOUT), model_with(DEEP, slack, seed=5)
        policy = oracle(np.array([[2] * 40, [0] * 24 + [2] * 16]))
        options = dict(drafter=draft, gamma=2, policy=policy, max_new_tokens=40, eos_ids=())
        return jaxspec.generate(
            target, Prompt(ROWS[:2], LENGTH[:2]), **options
        ).trace.draft.tolist()

    assert run(SLACK) == run(FULL)


@pytest.mark.slow
def test_the_targets_own_layers_draft_in_its_rings(model_with):
    def run(slack):
        target = model_with(GEMMA, slack)
        drafter = drafters.skip_layers(target, attention=(1,), mlp=(1,))
        return jaxspec.generate(
            target, Prompt(ROWS, LENGTH), drafter=drafter, gamma=3, max_new_tokens=12, eos_ids=()
        )

    got, expected = run(SLACK), run(FULL)
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert got.stats.accepted.tolist() == expected.stats.accepted.tolist()


@pytest.mark.parametrize("kind", [pytest.param("a model", marks=pytest.mark.slow), "a tree"])
def test_rows_of_a_job_take_each_others_rings(kind, model_with):
    """Slots are refilled: rows of caches are taken and put."""
    target, draft = model_with(GEMMA), model_with(DRAFT, seed=5)
    prompts = [*token_rows.to_lists(ROWS, LENGTH), [3, 1, 2] * 9, [5]]
    options = dict(drafter=drafter_of(kind, draft), gamma=3, max_new_tokens=12, eos_ids=())
    job = jaxspec.generate_many(target, prompts, slots=2, in_order=True, **options)
    texts = [list(completion.tokens) for completion in job]
    assert texts == jaxspec.generate(target, prompts, max_new_tokens=12, eos_ids=()).tokens.tolist()


@pytest.mark.slow
def test_beams_come_back_to_old_entries(model_with):
    def run(slack):
        target, draft = model_with(GEMMA, slack), model_with(DRAFT, slack, seed=5)
        options = dict(beams=3, drafter=draft, gamma=2, max_new_tokens=9, eos_ids=())
        return jaxspec.beam_search(target, Prompt(ROWS, LENGTH), **options)

    got, expected = run(SLACK), run(FULL)
    assert got.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(got.scores, expected.scores, rtol=1e-4)


def test_prompts_after_a_prefix_longer_than_a_ring(model_with):
    target, draft = model_with(GEMMA), model_with(DRAFT, seed=5)
    shared, rows = ROWS[0, :30].tolist(), [[4], ROWS[1, :21].tolist(), [2, 2]]
    options = dict(drafter=draft, gamma=3, max_new_tokens=10, eos_ids=())
    got = jaxspec.generate(
        target, rows, prefix=jaxspec.prefix(target, shared, drafter=draft), **options
    )
    whole = jaxspec.generate(target, [shared + row for row in rows], **options)
    assert (
        got.tokens.tolist() == whole.tokens.tolist()
        and got.stats.accepted.tolist() == whole.stats.accepted.tolist()
    )


WORDS = ["<unk>", "</s>", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def test_a_chat_reads_again_what_its_rings_have_lost(model_with):
    """It goes on from the end of the last turn, and from a little before; from further back only
    all of it.
    """
    target, draft = model_with(GEMMA), model_with(DRAFT, seed=5)
    template = "{% for m in messages %}{{ m['content'] }} </s> {% endfor %}"
    target = target._replace(tokenizer=word_tokenizer(WORDS, chat_template=template))
    options = dict(drafter=draft, gamma=3, max_new_tokens=8, eos_ids=())
    talk, reused = jaxspec.chat(target, **options), []
    talk._capacity = 128
    for content in ("one two " * 12, "three", "four five"):
        text = "".join(piece.text for piece in talk.send(content))
        reused.append(talk.reused_tokens)
        conversation = [dict(message) for message in talk.messages[:-1]]
        assert text == jaxspec.generate(target, [conversation], **options).texts[0]
    assert reused[0] == 0 and 23 < reused[1] < reused[2]
    # the last answer is changed, then the first question
    for place, is_lost in ((5, False), (0, True)):
        talk.messages[place]["content"] += " nine"
        text = "".join(piece.text for piece in talk.send("six"))
        assert (talk.reused_tokens == 0) == is_lost
        conversation = [dict(message) for message in talk.messages[:-1]]
        assert text == jaxspec.generate(target, [conversation], **options).texts[0]


@pytest.mark.slow
def test_a_block_drafters_rings(model_with):
    """Its layers with windows read prompts in chunks, and blocks at a ring's edge; drafts are those
    of full caches.
    """
    shape = nets.replace(MISTRAL, window=None, local=())
    layer = nets.replace(shape, layers=2, window=3, local=(True, False))
    config = block.BlockConfig(layer, shape.dim, taps=(0, 1), block=4, mask_token=3)
    params = random_params(block.init, config, 3, 0.2)

    def run(slack):
        target = model_with(shape, slack, chunk=6)
        target = target._replace(lm=decoder._language_model.__wrapped__(shape, (0, 1)))
        drafter = block.KIND.drafter(
            jaxspec.DraftHead(block.head.__wrapped__(config), params), target
        )
        out = jaxspec.generate(
            target, Prompt(ROWS, LENGTH), drafter=drafter, max_new_tokens=12, eos_ids=()
        )
        return out.tokens.tolist(), out.stats.accepted.tolist()

    assert run(SLACK) == run(FULL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a model", "a tree"])
def test_the_distribution_of_the_text_is_the_targets(kind, model_with):
    """Of a network of three tokens whose prompt has gone round the ring."""
    small = nets.replace(
        MISTRAL, vocab_size=3, window=2, dim=8, ff_dim=8, heads=2, kv_heads=1, head_dim=4
    )
    target, draft = model_with(small, chunk=4), model_with(small, chunk=4, seed=5)
    prompt = Prompt(ROWS[:1, :9] % 3, jnp.array([9]))
    assert certify(target, drafter=drafter_of(kind, draft), prompt=prompt, gamma=2, steps=3) < 1e-5
