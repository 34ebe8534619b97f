"""Retrieval against a search of lists; drafts that are empty, and what is refused."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Caches, DraftContext, Prompt, Weights
from jaxspec.drafters.lookups import datastore
from jaxspec.testing import table_model

RANDOM = np.random.default_rng(0)
VOCAB = 5
ROWS = [RANDOM.integers(VOCAB, size=n).tolist() for n in (40, 1, 25, 2, 60)]
ROW = Prompt(jnp.array([[1, 2]]), jnp.array([2]))


def by_search(rows, row, gamma, longest, shortest):
    """Return the tokens that follow the longest match, by majority, one after the other."""
    for size in range(min(longest, len(row)), shortest - 1, -1):
        wanted = row[-size:]
        follow = [
            r[i + size :]
            for r in rows
            for i in range(len(r) - size + 1)
            if r[i : i + size] == wanted
        ]
        if follow:
            break
    else:
        return []
    draft = []
    while len(draft) < gamma:
        follow = [rest for rest in follow if len(rest) > len(draft)]
        if not follow:
            break
        seen = collections.Counter(rest[len(draft)] for rest in follow)
        draft.append(min(seen, key=lambda token: (-seen[token], token)))
        follow = [rest for rest in follow if rest[len(draft) - 1] == draft[-1]]
    return draft


def drafted(drafter, row, gamma):
    """The real draft tokens of each row."""

    @jax.jit
    def propose(params, row):
        context = DraftContext(None, row, None, gamma, False, None)
        return drafter.functions.propose(Weights(None, params), Caches(None, ()), context)[0]

    draft = propose(drafter.params, row)
    return [tokens[:n].tolist() for tokens, n in zip(draft.tokens, draft.length, strict=True)]


@pytest.mark.parametrize(("longest", "shortest"), [(4, 1), (6, 3), (2, 2), (31, 2)])
def test_what_is_proposed_is_what_a_search_finds(longest, shortest):
    drafter = drafters.retrieval(
        datastore.build(ROWS, vocab_size=VOCAB), longest=longest, shortest=shortest, occurrences=200
    )
    queries = [RANDOM.integers(VOCAB, size=n).tolist() for n in RANDOM.integers(1, 9, size=40)]
    queries += [ROWS[0][3:20], ROWS[4][-7:], ROWS[2][:3], [*ROWS[0][:5], 4, 4, 4, 4]]
    width = max(map(len, queries)) + 2
    tokens = np.full((len(queries), width), 3, np.int32)
    for i, row in enumerate(queries):
        tokens[i, : len(row)] = row
    context = Prompt(jnp.asarray(tokens), jnp.array([len(row) for row in queries]))
    got = drafted(drafter, context, 4)
    assert got == [by_search(ROWS, row, 4, longest, shortest) for row in queries]
    assert {len(draft) for draft in got} >= ({0, 4} if shortest > 1 else {4})


def test_of_many_occurrences_some_vote_from_all_over():
    """9 of 10 documents go on with 3; the few that vote are spread over all."""
    rows = [[1, 2, 0]] * 10 + [[1, 2, 3]] * 90
    for occurrences in (1, 3, 20):
        drafter = drafters.retrieval(datastore.build(rows, vocab_size=4), occurrences=occurrences)
        assert drafted(drafter, ROW, 1) == [[0 if occurrences == 1 else 3]]


@pytest.mark.slow
def test_greedy_text_takes_few_rounds_where_the_datastore_has_it(tmp_path):
    target = table_model(jax.random.key(3), 6)
    prompts = Prompt(jnp.array([[1, 2, 3], [4, 5, 0], [0, 0, 0]]), jnp.array([3, 2, 1]))
    plain = jaxspec.generate(target, prompts, max_new_tokens=30)
    texts = [
        [*np.array(p)[:n], *np.array(t)] for p, n, t in zip(*prompts[:2], plain.tokens, strict=True)
    ]
    datastore.save(tmp_path / "texts", datastore.build(texts[:2], vocab_size=6), {})
    drafter = drafters.retrieval(tmp_path / "texts", target)
    out = jaxspec.generate(target, prompts, drafter=drafter, gamma=5, max_new_tokens=30)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert (np.asarray(out.stats.rounds)[:2] <= 7).all()


def test_a_second_datastore_of_the_same_size_compiles_nothing():
    first, second = (
        drafters.retrieval(datastore.build([rows], vocab_size=4)) for rows in ([1, 2, 3], [3, 2, 1])
    )
    assert first.functions is second.functions
    assert jax.tree.map(jnp.shape, first.params) == jax.tree.map(jnp.shape, second.params)


class Words:
    """Enough of a tokenizer for its vocabulary to be compared."""

    def __init__(self, words):
        self.words = words

    def __len__(self):
        return len(self.words)

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}

    def convert_ids_to_tokens(self, ids):
        return [self.words[i] for i in ids]


def test_bad_arguments_are_refused():
    store = datastore.build(
        [[1, 2]], vocab_size=3, vocabulary=datastore.vocabulary_of(Words(["a", "b", "c"]))
    )
    with pytest.raises(
        ValueError, match="longest is 2: expected at least 3, the shortest, and at most 31"
    ):
        drafters.retrieval(store, longest=2, shortest=3)
    with pytest.raises(ValueError, match=r"longest is 32: .*at most 31"):
        drafters.retrieval(store, longest=32)
    with pytest.raises(ValueError, match="candidates is 0: expected at least 1"):
        drafters.retrieval(store, candidates=0)
    with pytest.raises(ValueError, match="no datastore at nowhere"):
        drafters.retrieval("nowhere")
    target = table_model(jax.random.key(1), 3)._replace(name="ours")
    drafters.retrieval(store, target._replace(tokenizer=Words(["a", "b", "c"])))
    with pytest.raises(
        ValueError, match="built with another vocabulary than that of ours: build one with"
    ):
        drafters.retrieval(store, target._replace(tokenizer=Words(["a", "c", "b"])))
    with pytest.raises(ValueError, match="the datastore has 3 token ids and the target 2"):
        drafters.retrieval(store, table_model(jax.random.key(1), 2))


def test_models_with_one_tokenizer_may_pad_their_logits_to_other_widths():
    """Models of one family do. Where a side does not know its tokens only the widths can be
    compared.
    """
    target, words = table_model(jax.random.key(1), 5), Words(["a", "b", "c"])
    with_tokenizer, vocabulary = target._replace(tokenizer=words), datastore.vocabulary_of(words)
    plain = jaxspec.generate(target, ROW, max_new_tokens=9)
    for width in (3, 5, 8):
        store = datastore.build(
            [[1, 2, width - 1], [2, 1]], vocab_size=width, vocabulary=vocabulary
        )
        drafter = drafters.retrieval(store, with_tokenizer, shortest=1)
        out = jaxspec.generate(target, ROW, drafter=drafter, gamma=2, max_new_tokens=9)
        assert out.tokens.tolist() == plain.tokens.tolist()
    for wide, model in ((store, target), (store._replace(vocabulary=""), with_tokenizer)):
        with pytest.raises(ValueError, match="the datastore has 8 token ids and the target 5"):
            drafters.retrieval(wide, model)
