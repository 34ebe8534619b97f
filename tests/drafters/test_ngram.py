"""N-gram tables against counts in dictionaries."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Prompt, Room
from jaxspec.drafters.lookups.ngram import count
from jaxspec.drafters.lookups.ngram_model import language_model
from jaxspec.testing import table_model

RANDOM = np.random.default_rng(0)
VOCAB = 7
ROWS = [
    RANDOM.choice(VOCAB - 1, size=n, p=[0.4, 0.25, 0.15, 0.1, 0.06, 0.04]).tolist()
    for n in (60, 1, 35, 2, 90)
]


def compiled(config):
    """The model, each of whose functions is one program: by itself every operation would be one."""
    lm = language_model(config)
    return lm._replace(prefill=jax.jit(lm.prefill, static_argnums=2), extend=jax.jit(lm.extend))


def by_dictionary(rows, order, followers, least):
    """context (a tuple) -> its most frequent followers and their shares."""
    counts = collections.defaultdict(collections.Counter)
    for row in rows:
        for i, token in enumerate(row):
            for length in range(min(order, i + 1)):
                counts[tuple(row[i - length : i])][token] += 1
    tables = {}
    for context, seen in counts.items():
        longer = [context[i:] for i in range(len(context))]  # a context is kept if all its ends are
        if all(sum(counts[c].values()) >= least for c in longer):
            best = sorted(seen, key=lambda token: (-seen[token], token))[:followers]
            total = sum(seen[token] for token in best)
            tables[context] = {token: seen[token] / total for token in best}
    return tables


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "followers", "least"), [(1, 3, 1), (2, 8, 1), (3, 2, 2), (4, 3, 1)]
)
def test_tables_are_the_counts_with_back_off(order, followers, least):
    config, tables = count(ROWS, vocab_size=VOCAB, order=order, followers=followers, least=least)
    expected = by_dictionary(ROWS, order, followers, least)
    assert config.contexts == tuple(sum(len(c) == n for c in expected) for n in range(1, order))
    lm, row = compiled(config), [0, 1, 0, 0, 6, 1, 2, 0, 0]  # 6 was never seen
    prompt = Prompt(jnp.array([row[:1]]), jnp.array([1]))
    first, cache = lm.prefill(tables, prompt, Room(len(row)))
    rest, cache = lm.extend(tables, cache, jnp.array([row[1:]]))
    assert cache.length.tolist() == [len(row)]
    got = np.exp(np.concatenate([first.logits, rest.logits], axis=1))[0]
    for i in range(len(row)):
        longest = next(
            c
            for n in range(order - 1, -1, -1)
            if (c := tuple(row[max(0, i + 1 - n) : i + 1])) in expected
        )
        np.testing.assert_allclose(
            got[i], [expected[longest].get(t, 0.0) for t in range(VOCAB)], rtol=1e-5
        )


@pytest.mark.slow
def test_a_row_that_was_rewound_reads_only_what_it_holds():
    config, tables = count(ROWS, vocab_size=VOCAB, order=3)
    lm = compiled(config)
    _, cache = lm.prefill(tables, Prompt(jnp.array([[0, 1]]), jnp.array([2])), Room(8))
    _, wrong = lm.extend(tables, cache, jnp.array([[5, 5]]))
    again, _ = lm.extend(tables, lm.rewind(wrong, jnp.array([2])), jnp.array([[2]]))
    fresh, _ = lm.prefill(tables, Prompt(jnp.array([[0, 1, 2]]), jnp.array([3])), Room(8))
    np.testing.assert_array_equal(again.logits, fresh.logits)


def test_a_node_of_a_tree_is_read_after_its_path():
    """All nodes at once, and level by level."""
    config, tables = count(ROWS, vocab_size=VOCAB, order=3)
    lm, nodes, parent = compiled(config), np.array([[0, 1, 2, 3]]), np.array([[-1, 0, 0, 2]])
    _, cache = lm.prefill(tables, Prompt(jnp.array([[1, 0]]), jnp.array([2])), Room(8))
    at_once = np.asarray(lm.extend(tables, cache, nodes, parent)[0].logits)
    for path in ([0], [0, 1], [0, 2], [0, 2, 3]):
        chain = np.zeros_like(nodes)
        chain[0, : len(path)] = nodes[0, path]
        logits = np.asarray(lm.extend(tables, cache, chain)[0].logits)
        np.testing.assert_array_equal(at_once[0, path[-1]], logits[0, len(path) - 1])
    first, cache = lm.extend(tables, cache, nodes[:, :1], parent[:, :1])
    rest, _ = lm.extend(tables, cache, nodes[:, 1:], parent)
    np.testing.assert_array_equal(np.concatenate([first.logits, rest.logits], axis=1), at_once)
    assert len(np.unique(at_once, axis=1)[0]) == 4  # nodes differ


@pytest.mark.slow
def test_the_text_of_an_encoder_decoder_begins_with_its_start_token():
    config, tables = count([[3, 4], [3, 5], [3, 4]], vocab_size=6, order=2, begin=[0])
    assert config.contexts == (2,)  # after 0 and after 3; what ends a text has no followers
    first, _ = compiled(config).prefill(
        tables, Prompt(jnp.array([[5, 5]]), jnp.array([2])), Room(4)
    )
    np.testing.assert_allclose(jnp.exp(first.logits[0, 0]), [0, 0, 0, 1, 0, 0])


@pytest.mark.slow
def test_what_a_row_begins_with_is_context_and_never_drafted():
    """A language after the start token, as NLLB's rows have it."""
    config, tables = count([[3, 4], [3, 5], [4]], vocab_size=6, order=3, begin=[0, 1])
    assert (
        config.start_token == 0
        and 1 not in tables.levels[0].follower[0][tables.levels[0].times[0] > 0]
    )
    row = Prompt(
        jnp.array([[0, 1]]), jnp.array([2]), encoder=Prompt(jnp.array([[5]]), jnp.array([1]))
    )
    first, cache = compiled(config).prefill(tables, row, Room(4))
    np.testing.assert_allclose(jnp.exp(first.logits[0, 0]), [0, 0, 0, 2 / 3, 1 / 3, 0], rtol=1e-6)
    assert cache.context.tolist() == [2]


@pytest.mark.slow
def test_a_longer_context_drafts_better():
    """Texts of a table model: its bigram is right more often than its unigram, and the text stays
    the same.
    """
    target = table_model(jax.random.key(5), 6, sharpness=3.0)
    prompts = Prompt(jnp.tile(jnp.array([[1, 2]]), (8, 1)), jnp.full(8, 2))
    plain = jaxspec.generate(
        target, prompts, temperature=1.0, key=jax.random.key(0), max_new_tokens=60
    )
    texts = [row[:n].tolist() for row, n in zip(plain.tokens, plain.lengths, strict=True)]
    accepted = []
    for order in (1, 3):
        drafter = drafters.ngram(texts, target, order=order)
        out = jaxspec.generate(target, prompts, drafter=drafter, gamma=3, max_new_tokens=40)
        np.testing.assert_array_equal(
            out.tokens, jaxspec.generate(target, prompts, max_new_tokens=40).tokens
        )
        accepted.append(float(np.sum(out.stats.accepted)))
    assert accepted[1] > 1.5 * accepted[0]


def test_texts_are_read_with_the_targets_tokenizer():
    """And each ends with the end-of-sequence token, as what the target writes does."""

    class Letters:
        eos_token_id = 0

        def __call__(self, words, **options):
            return {
                "input_ids": [[ord(letter) - ord("a") + 1 for letter in word] for word in words]
            }

    target = table_model(jax.random.key(1), 4)._replace(tokenizer=Letters())
    from_texts, from_rows = (
        drafters.bigram(x, target) for x in (["ab", "abc"], [[1, 2, 0], [1, 2, 3, 0]])
    )
    for a, b in zip(
        jax.tree.leaves(from_texts.params), jax.tree.leaves(from_rows.params), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert drafters.unigram(["ab"], target).config.contexts == ()
    with pytest.raises(ValueError, match="got texts, and the target has no tokenizer"):
        drafters.bigram(["ab"], target._replace(tokenizer=None))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="order is 0: expected at least 1"):
        count([[1]], vocab_size=2, order=0)
    with pytest.raises(ValueError, match="got no rows"):
        count([], vocab_size=2, order=1)
    with pytest.raises(ValueError, match="ids range from 1 to 5: expected 0 to 4"):
        count([[1, 5]], vocab_size=5, order=1)


@pytest.mark.parametrize(
    "make", [drafters.unigram, drafters.bigram, functools.partial(drafters.ngram, order=3)]
)
def test_one_string_is_no_list_of_texts(make):
    """It is a sequence of strings, too: its letters would be counted."""
    with pytest.raises(
        TypeError,
        match="texts is one string, 'abc': expected a list of strings, or of rows of token",
    ):
        make("abc", table_model(jax.random.key(1), 4))
