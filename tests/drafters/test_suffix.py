"""The proposals of `drafters.suffix`, by hand: votes, lengths, scores; sharing; bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Caches, Draft, DraftContext, DraftStart, Prompt, Weights
from jaxspec.testing import certify, table_model


@functools.partial(jax.jit, static_argnames=("functions", "gamma"))
def propose(functions, params, row, limit, finished, gamma):
    """The draft after rows of which nothing was read before, as one program."""
    nothing = Prompt(jnp.zeros((len(row.length), 1), jnp.int32), jnp.zeros_like(row.length))
    state = functions.init(DraftStart(None, nothing, None, None))
    context = DraftContext(None, row, limit, gamma, False, None, finished=finished)
    return functions.propose(Weights(None, params), Caches(None, state), context)[0]


def draft_of(rows, limits=None, gamma=4, finished=None, **options):
    width = max(map(len, rows))
    tokens = jnp.array([[*row, *[0] * (width + 1 - len(row))] for row in rows])
    row = Prompt(tokens, jnp.array([len(tokens_of_row) for tokens_of_row in rows]))
    limit = jnp.array([gamma] * len(rows) if limits is None else limits)
    finished = None if finished is None else jnp.array(finished)
    draft = propose(drafters.suffix(**options).functions, None, row, limit, finished, gamma)
    if draft.parent is not None:
        real = np.asarray(draft.parent[0]) >= 0
        return np.asarray(draft.tokens[0])[real].tolist(), np.asarray(draft.parent[0])[
            real
        ].tolist()
    return [
        tokens[:n].tolist()
        for tokens, n in zip(np.asarray(draft.tokens), draft.length, strict=True)
    ]


# after 5 1 came 8 (2 of 3) and 7; after 8, 2 or 3
TWICE = [5, 1, 8, 2, 5, 1, 8, 3, 5, 1, 7, 4, 5, 1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[8, 3]]),  # 2/3, and the newer of 1/3: two tokens matched, so two are drafted
        ({"factor": 2.0}, [[8, 3, 5, 1]]),
        ({"factor": 0.5}, [[8]]),
        ({"least_probability": 0.5}, [[8]]),
        ({"least_score": 1.5}, [[]]),  # 2/3 + 1/3 are expected
        ({"longest": 1}, [[8]]),
        ({"places": 1}, [[7, 4]]),  # the newest
    ],
)
def test_the_draft_is_as_long_as_it_is_likely(options, expected):
    assert draft_of([TWICE], **options) == expected


def draft_with(texts, row, **options):
    """The draft for one row that a drafter with stored texts makes."""
    drafter = drafters.suffix(texts=texts, **options)
    given = Prompt(jnp.array([[*row, 0]]), jnp.array([len(row)]))
    draft = propose(drafter.functions, drafter.params, given, jnp.array([4]), None, 4)
    return draft.tokens[0, : draft.length[0]].tolist()


def test_stored_texts_are_searched_too():
    """A draft ends where the text does; places in the row are newer, and so win where as much
    matches.
    """
    assert draft_with([[6, 7, 8, 9, 4], [3]], [2, 6, 7]) == [8, 9]
    assert draft_with([[6, 7, 8], [9, 4]], [2, 6, 7], factor=4.0) == [8]
    assert draft_with([[6, 7, 8]], [6, 7, 5, 6, 7], places=1) == [5, 6]
    assert draft_with([], [2, 6, 7]) == draft_with([[]], [2, 6, 7]) == []
    assert drafters.suffix(texts=[[1] * 20], room=70).params.shape == (96,)
    assert drafters.suffix(texts=[[1] * 2]).functions is drafters.suffix(texts=[]).functions


@pytest.mark.quick
def test_text_with_stored_texts_is_the_targets():
    target = table_model(jax.random.key(1), vocab=3)
    answers = jaxspec.generate(target, [[1], [2]], max_new_tokens=16).tokens.tolist()
    assert (
        certify(target, drafter=drafters.suffix(texts=answers), gamma=2, steps=3, temperature=1.0)
        < 1e-6
    )
    options = dict(gamma=8, max_new_tokens=16)
    stored = jaxspec.generate(target, [[1]], drafter=drafters.suffix(texts=answers), **options)
    assert stored.tokens.tolist() == answers[:1]
    assert (
        stored.stats.rounds
        < jaxspec.generate(target, [[1]], drafter=drafters.suffix(), **options).stats.rounds
    )


@pytest.mark.parametrize("texts", ["a text", [["a"]], [[1.5]], [[-1]], [3]])
def test_stored_texts_are_rows_of_ids(texts):
    with pytest.raises(ValueError, match="expected a row of token ids"):
        drafters.suffix(texts=texts)


@pytest.mark.slow
def test_a_tree_of_what_the_places_have():
    tokens, parents = draft_of([TWICE], candidates=2, length=2, gamma=2)
    above = [None, *tokens]
    edges = {(token, above[parent]) for token, parent in zip(tokens, parents, strict=True)}
    assert edges == {(8, None), (7, None), (4, 7), (3, 8)}  # of five nodes (2, 8) is the oldest


@pytest.mark.slow
def test_rows_that_have_ended_are_searched_if_asked():
    rows, limits = [[6, 7, 8, 9, 4], [3, 6, 7]], [0, 4]
    ended = [True, False]
    assert draft_of(rows, limits, finished=ended)[1] == []
    assert draft_of(rows, limits, finished=ended, share=True)[1] == [8, 9]
    # not from a row that goes on
    assert draft_of(rows, [4, 4], finished=[False, False], share=True)[1] == []
    # nor from one that drafts nothing now
    assert draft_of(rows, limits, finished=[False, False], share=True)[1] == []


def beside_an_ended_row(drafter, text):
    """The drafter in a batch of two, whose other row has ended with `text`."""
    functions = drafter.functions

    def propose(weights, caches, context):
        def draft_row(prompt, row, limit):
            other = jnp.pad(jnp.array(text), (0, row.tokens.shape[0] - len(text)))
            rows = Prompt(jnp.stack([row.tokens, other]), jnp.stack([row.length, len(text)]))
            prompts = Prompt(jnp.stack([prompt.tokens] * 2), jnp.stack([prompt.length, 0]))
            both = context._replace(
                row=rows, max_draft=jnp.stack([limit, 0]), finished=jnp.array([False, True])
            )
            draft, _ = functions.propose(weights, Caches(None, prompts), both)
            return draft.tokens[0], draft.length[0]

        return Draft(*jax.vmap(draft_row)(caches.draft, context.row, context.max_draft)), caches

    return drafter._replace(functions=functions._replace(propose=propose))


@pytest.mark.slow
def test_text_is_exact_whatever_the_other_rows_have_generated():
    """By enumeration, at temperatures 1 and 0: the store changes drafts, and no distribution."""
    drafter = beside_an_ended_row(drafters.suffix(3, places=4, share=True), [0, 2, 1, 1, 0, 2])
    prompt = Prompt(jnp.array([[1, 0]]), jnp.array([2]))
    options = dict(drafter=drafter, gamma=2, steps=3, prompt=prompt)
    off = [
        certify(table_model(jax.random.key(1), 3), temperature=heat, **options)
        for heat in (1.0, 0.0)
    ]
    assert max(off) < 1e-5, off
    out = jaxspec.generate(
        table_model(jax.random.key(1), 3), prompt, drafter=drafter, gamma=2, max_new_tokens=6
    )
    assert out.stats.drafted[0] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest": 0}, "longest is 0"),
        ({"places": 0}, "places is 0"),
        ({"factor": 0}, "factor is 0"),
        ({"least_probability": 1.5}, "least_probability is 1.5"),
        ({"candidates": 0}, "candidates is 0"),
        ({"longest": 1.5}, "longest is 1.5: expected an integer"),
        ({"places": 2.5}, "places is 2.5: expected an integer"),
        ({"factor": "1"}, "factor is '1': expected a finite number"),
        ({"factor": float("inf")}, "factor is inf: expected a finite number"),
        ({"least_probability": None}, "least_probability is None: expected a number from 0 to 1"),
        ({"least_score": float("nan")}, "least_score is nan: expected a finite number"),
        ({"least_score": True}, "least_score is True: expected a finite number"),
    ],
)
def test_bad_input_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        drafters.suffix(**options)
