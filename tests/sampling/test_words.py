"""Words of several tokens that are ruled out, and forced ends: transformers' processors, and exact
under drafters.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, sampling
from jaxspec.core import Preceding, Prompt
from jaxspec.decode.request import prepare
from jaxspec.testing import certify_prepared, table_model

WORDS = [[3], [1, 4], [0, 2, 1], [4, 4, 4, 0]]
TARGET, DRAFT = (table_model(jax.random.key(seed), 5, sharpness=1.0) for seed in (1, 2))


@pytest.mark.needs_torch
def test_logits_are_those_of_transformers():
    import torch
    import transformers

    process = transformers.NoBadWordsLogitsProcessor(WORDS)
    random = np.random.default_rng(0)
    for length in (1, 2, 3, 7):
        rows, logits = (
            random.integers(0, 5, (64, length)),
            random.normal(size=(64, 5)).astype(np.float32),
        )
        theirs = process(torch.tensor(rows), torch.tensor(logits)).numpy()
        # The rows are padded: tokens beyond a row are none of it.
        padded = Prompt(
            jnp.asarray(np.pad(rows, ((0, 0), (0, 3)), constant_values=4)), jnp.full(64, length)
        )
        preceding = Preceding(padded, jnp.zeros(64, jnp.int32))
        ours = sampling.banned_words(WORDS)(None, jnp.asarray(logits)[:, None], preceding)
        np.testing.assert_array_equal(ours[:, 0], theirs)
    assert np.isneginf(theirs).sum() > 64


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [DRAFT, drafters.tree(DRAFT, (2, 1)), drafters.prompt_lookup()])
def test_drafted_text_has_the_law_without_these_words(drafter):
    """And ends where it would be cut: every text of three tokens, by enumeration."""
    process = sampling.banned_words([[1, 4], [0], [4, 4, 3]]), sampling.forced_end(2, 3)
    options = dict(
        max_new_tokens=3,
        eos_ids=[2],
        logits_processors=process,
        temperature=1.0,
        key=jax.random.key(0),
    )
    prepared = prepare(TARGET, [[4, 4]], drafter=drafter, gamma=2, **options)
    assert certify_prepared(prepared, steps=3) < 1e-5


def test_texts_have_no_such_words_and_end():
    limits = [5, 3] * 16
    process = sampling.banned_words([[1, 4], [0], [4, 4, 3]]), sampling.forced_end(2, limits)
    options = dict(
        max_new_tokens=limits,
        eos_ids=[2],
        temperature=1.0,
        key=jax.random.key(0),
        logits_processors=process,
    )
    out = jaxspec.generate(TARGET, [[4, 4]] * 32, drafter=DRAFT, gamma=3, **options)
    texts = [[4, 4, *row[:n].tolist()] for row, n in zip(out.tokens, out.lengths, strict=True)]
    pairs = {pair for text in texts for pair in itertools.pairwise(text)}
    assert (1, 4) not in pairs and not any(0 in pair for pair in pairs) and len(pairs) > 8
    assert all(text[-1] == 2 for text in texts) and not any(text[:3] == [4, 4, 3] for text in texts)
    assert {3 + 2, 5 + 2} <= {len(text) for text in texts}


def test_bad_words_are_refused():
    with pytest.raises(ValueError, match=r"got no words: expected at least one, such as"):
        sampling.banned_words([])
    with pytest.raises(ValueError, match=r"words\[1\] is empty"):
        sampling.banned_words([[1], []])
    with pytest.raises(ValueError, match=r"words\[0\]\[1\] is -1: expected at least 0"):
        sampling.banned_words([[1, -1]])
    with pytest.raises(ValueError, match=r"words\[0\]\[0\] is 'a'"):
        sampling.banned_words([["a"]])
    for word in (5, "ab"):
        with pytest.raises(TypeError, match=r"words\[0\] is .*: expected a list of ids"):
            sampling.banned_words([word])
    with pytest.raises(ValueError, match="max_new_tokens is 0: expected at least 1"):
        sampling.forced_end(2, 0)
    for process, wrong in (
        (sampling.banned_words([[5]]), "a banned word has"),
        (sampling.forced_end(5, 3), "the forced"),
    ):
        with pytest.raises(ValueError, match=f"{wrong}.* 5: expected .*from 0 to 4"):
            jaxspec.generate(TARGET, [[1]], max_new_tokens=3, logits_processors=process)
