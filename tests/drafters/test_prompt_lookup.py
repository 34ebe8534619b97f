"""Copying from the context: what is found, and that only the number of rounds changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Caches, DraftContext, DraftStart, Prompt
from jaxspec.testing import table_model


def drafted(prompt, row, gamma, **options):
    """The real draft tokens of each row, by a drafter that was given a prompt."""
    draft = propose(drafters.prompt_lookup(**options).functions, prompt, row, gamma)
    return [
        tokens[:n].tolist()
        for tokens, n in zip(np.asarray(draft.tokens), draft.length, strict=True)
    ]


@functools.partial(jax.jit, static_argnames=("functions", "gamma"))
def propose(functions, prompt, row, gamma):
    caches = Caches(None, functions.init(DraftStart(None, prompt, None, None)))
    return functions.propose(None, caches, DraftContext(None, row, None, gamma, False, None))[0]


def proposal(prompt, row, gamma=3, **options):
    source = Prompt(jnp.array([prompt]), jnp.array([len(prompt)]))
    return drafted(
        source, Prompt(jnp.array([[*row, 0, 0]]), jnp.array([len(row)])), gamma, **options
    )[0]


@pytest.mark.parametrize(
    ("prompt", "row", "expected"),
    [
        # what followed the last time
        pytest.param([9], [1, 2, 3, 4, 1, 2], [3, 4, 1], marks=pytest.mark.slow),
        pytest.param(
            [9], [1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2], marks=pytest.mark.slow
        ),  # of equal matches the most recent
        ([9], [5, 2, 3, 7, 2, 4, 5, 2], [3, 7, 2]),  # but a longer one goes first
        ([9], [1, 2, 1, 2], [1, 2, 1]),  # a loop goes on
        ([9], [7, 7], [7, 7, 7]),
        ([1, 2, 3, 4], [0, 1, 2], [3, 4]),  # the prompt ends, and so does the draft
        ([1, 2, 3, 4, 5, 6], [0, 1, 2], [3, 4, 5]),
        ([1, 2], [0, 1, 2], []),  # nothing after the match
        ([1, 2, 3], [4, 5, 6], []),
        ([0, 8], [0, 0], [0, 0, 0]),  # id 0 is a token like any other, padding is not
        ([5, 0], [5], [0]),
    ],
)
def test_the_tokens_after_the_last_match_are_proposed(prompt, row, expected):
    assert proposal(prompt, row) == expected


def test_a_match_must_be_long_enough():
    row = [1, 2, 9, 3, 2]
    assert proposal([8], row, shortest=1) == [9, 3, 2]
    assert proposal([8], row, shortest=2, longest=2) == []


@pytest.mark.slow
def test_rows_are_looked_up_each_in_its_own_text():
    rows = Prompt(
        jnp.array([[1, 2, 3, 1, 0, 0], [3, 1, 0, 0, 0, 0], [4, 5, 4, 5, 4, 0]]),
        jnp.array([4, 2, 5]),
    )
    assert drafted(rows, rows, 2) == [[2, 3], [], [5, 4]]


def test_a_round_without_draft_tokens_feeds_one_token():
    """The verification is there twice, for gamma + 1 tokens and for one; a callback tells which of
    them ran.
    """
    model = table_model(jax.random.key(1), 50)
    target, fed = model.lm, []

    def extend(params, cache, tokens, parent=None, real=None):
        jax.debug.callback(lambda: fed.append(tokens.shape[1]))
        return target.extend(params, cache, tokens, parent, real)

    watched = model._replace(lm=target._replace(extend=extend))
    prompt = Prompt(jnp.array([[7]]), jnp.array([1]))
    out = jaxspec.generate(
        watched, prompt, drafter=drafters.prompt_lookup(), gamma=4, max_new_tokens=30
    )
    jax.effects_barrier()
    widths = np.array(fed[-int(out.stats.rounds[0]) :])
    assert set(widths) == {1, 5}
    np.testing.assert_array_equal(
        widths == 1, np.asarray(out.trace.draft_length)[0, : len(widths)] == 0
    )


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="longest is 2: expected at least 3"):
        drafters.prompt_lookup(longest=2, shortest=3)


def test_the_input_is_the_first_draft_of_an_encoder_decoder():
    """Shallow aggressive decoding: nothing is written yet, so nothing matches, and the input is
    proposed.
    """
    keep, copy = (drafters.prompt_lookup(copy_from=start).functions for start in (None, 1))
    prompt = Prompt(
        jnp.array([[9, 4, 5, 6, 7], [9, 3, 0, 0, 0], [9, 0, 0, 0, 0]]), jnp.array([5, 2, 1])
    )
    row = Prompt(jnp.full((3, 8), 2), jnp.ones(3, jnp.int32))  # the start token alone
    keys = jax.random.split(jax.random.key(0), 3)
    context = DraftContext(keys, row, jnp.full(3, 3), 3, True, None)
    drafts = [drafter.propose(None, Caches(None, prompt), context)[0] for drafter in (keep, copy)]
    assert drafts[0].length.tolist() == [0, 0, 0]
    assert drafts[1].length.tolist() == [3, 1, 0]
    assert drafts[1].tokens[0].tolist() == [4, 5, 6] and drafts[1].tokens[1, 0] == 3
    written = context._replace(row=Prompt(jnp.array([[2, 4, 5, 0]] * 3), jnp.full(3, 3)))
    later = [drafter.propose(None, Caches(None, prompt), written)[0] for drafter in (keep, copy)]
    assert later[0].tokens.tolist() == later[1].tokens.tolist() and later[1].tokens[0].tolist()[
        :2
    ] == [6, 7]


def test_the_first_draft_is_a_chain():
    with pytest.raises(
        ValueError, match="copy_from is 0 and candidates is 2: expected 1 candidate with it"
    ):
        drafters.prompt_lookup(candidates=2, copy_from=0)
