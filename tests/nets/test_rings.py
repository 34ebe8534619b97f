"""Layers with a window that keep a ring of their last entries, against the same layers with caches of full length."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Prompt, chunks, token_rows
from jaxspec.core import kv_cache as kv
from jaxspec.draft_heads import block
from jaxspec.nets import decoder
from jaxspec.testing import certify, word_tokenizer
from tests.draft_heads.test_drafters import noisy
from tests.marks import marked
from tests.nets.test_trees import CONFIGS

VOCAB, WINDOW, SLACK, CAPACITY = 11, 4, 8, 64
FULL = 10**6  # a slack with which no cache is large enough for a ring
GEMMA = dataclasses.replace(CONFIGS["Gemma"], vocab_size=VOCAB, layers=3, window=WINDOW)
MISTRAL = dataclasses.replace(CONFIGS["Mistral"], vocab_size=VOCAB, window=WINDOW)
SHAPES = {"Gemma": GEMMA, "Mistral": MISTRAL}
ROWS = jnp.array(np.random.default_rng(0).integers(0, VOCAB, (3, 41)))
LENGTH = jnp.array([41, 18, 5])
DRAFT = dataclasses.replace(MISTRAL, layers=1)


@functools.cache
def params_of(config, seed=0):
    return noisy(decoder.init(config, jax.random.key(seed)), seed + 1, 0.2)


@pytest.fixture
def model_with(monkeypatch):
    """Makes a model of functions that no other test has compiled, after setting the slack of rings and the chunks."""

    def make(config, slack=SLACK, chunk=SLACK - 2, seed=0):
        monkeypatch.setattr(kv, "SLACK", slack)
        monkeypatch.setattr(chunks, "LONGEST", chunk)
        monkeypatch.setattr(chunks, "MULTIPLE", 1)
        return jaxspec.Model(decoder._language_model.__wrapped__(config, ()), params_of(config, seed), config=config)

    return make


def outcome(out):
    return out.tokens.tolist(), jax.tree.map(np.ndarray.tolist, out.stats)


# --- the same numbers


@pytest.mark.parametrize("name", marked(SHAPES, exhaustive={"Mistral"}))
@pytest.mark.parametrize("chunk", [1, 7])
def test_logits_are_those_of_full_caches(name, chunk, model_with):
    """Of prompts longer than a ring, ragged; and of what is fed to them, by ones and more."""
    more = jnp.array(np.random.default_rng(1).integers(0, VOCAB, (3, 8)))

    def run(slack, chunk):
        model = model_with(SHAPES[name], slack, chunk)

        @jax.jit
        def read(params):
            forward, cache = model.lm.prefill(params, Prompt(ROWS, LENGTH), CAPACITY)
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


def test_more_tokens_than_a_ring_has_slots(model_with):
    """At once: of an empty cache, then of one that goes round the ring; single tokens follow."""

    def run(slack):
        model = model_with(GEMMA, slack, 64)
        cache = decoder.empty_cache(GEMMA, 1, CAPACITY)
        logits, start = [], 0
        for count in (3, 9, 15, 1, 8, 1):  # up to 8 fit into the ring, 12 slots long
            forward, cache = jax.jit(model.lm.extend)(model.params, cache, ROWS[:1, start : start + count])
            logits.append(forward.logits)
            start += count
        return jnp.concatenate(logits, axis=1)

    np.testing.assert_allclose(run(SLACK), run(FULL), rtol=2e-4, atol=2e-5)


def test_rewinds_of_every_length(model_with):
    """Up to the slack, and one more, all is as in a full cache; beyond, it would not be, and `can_rewind` says so."""
    length, more = 30, ROWS[:1, :3]

    def run(slack):
        model = model_with(GEMMA, slack, 7)
        prompt = Prompt(ROWS[:1, :length], jnp.array([length]))
        _, cache = jax.jit(model.lm.prefill, static_argnums=2)(model.params, prompt, CAPACITY)
        back = jnp.arange(SLACK + 5)
        rows = token_rows.repeat_rows(cache, len(back))
        forward, _ = jax.jit(model.lm.extend)(
            model.params, model.lm.rewind(rows, length - back), jnp.tile(more, (len(back), 1))
        )
        return forward.logits, [kv.can_rewind(cache, length, length - n) for n in back.tolist()]

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

    def run(slack, length):
        model = model_with(GEMMA, slack, 7)

        @jax.jit
        def read(params):
            _, cache = model.lm.prefill(params, Prompt(ROWS, length), CAPACITY)
            first, cache = model.lm.extend(params, cache, nodes, parent)
            # Node 0 is the last committed token; draft tokens 1, 2, ... are nodes.
            cache = model.lm.rewind(model.lm.select(cache, length + 1, path), length + 1 + count)
            return jnp.concatenate([first.logits, model.lm.extend(params, cache, nodes[:, :3])[0].logits], axis=1)

        return read(model.params)

    for length in (jnp.array([41, 18, 5]), jnp.array([34, 20, 7])):
        np.testing.assert_allclose(run(SLACK, length), run(FULL, length), rtol=2e-4, atol=2e-5)


def test_short_generations_run_the_program_that_they_had(model_with):
    def program(slack):
        model = model_with(GEMMA, slack, 512)
        return str(jax.make_jaxpr(lambda p: model.lm.prefill(p, Prompt(ROWS, LENGTH), CAPACITY))(model.params))

    assert program(CAPACITY - WINDOW + 1) == program(FULL) != program(SLACK)


def test_a_chunk_and_what_drafters_read_again_fit_the_slack():
    assert kv.SLACK >= chunks.LONGEST + 16
    config = dataclasses.replace(GEMMA, window=1024)
    caches = jax.eval_shape(lambda: [decoder.empty_cache(config, 1, n) for n in (1500, 1664, 5000)])
    assert [[k.shape[2] for k in cache.keys] for cache in caches] == [[1500] * 3, [1664, 1665, 1664], [1664, 5000, 1664]]


# --- the same texts


def cases(draft):
    return {
        "plain": None,
        "a model": drafters.model(draft),
        "a tree": drafters.tree(draft, (2, 1)),
        "a dynamic tree": drafters.dynamic_tree(draft, nodes=5, depth=3, width=2),
        "a cascade": drafters.cascade(draft, drafters.prompt_lookup(), gamma=2),
    }


KINDS = ("plain", "a model", "a tree", "a dynamic tree", "a cascade")


@pytest.mark.parametrize("kind", marked(KINDS, slow={"a dynamic tree"}))
def test_texts_and_counts_are_those_of_full_caches(kind, model_with):
    """Rows at temperatures 0 and 1; prompts and texts go round the rings of both models."""

    def run(slack):
        target, draft = model_with(GEMMA, slack), model_with(DRAFT, slack, seed=5)
        options = dict(temperature=[0.0, 1.0, 0.8], key=jax.random.key(2), max_new_tokens=20, eos_ids=())
        return outcome(jaxspec.generate(target, Prompt(ROWS, LENGTH), drafter=cases(draft)[kind], gamma=4, **options))

    tokens, stats = run(SLACK)
    assert (tokens, stats) == run(FULL)
    assert kind == "plain" or 0 < sum(stats.accepted) < sum(stats.drafted)
