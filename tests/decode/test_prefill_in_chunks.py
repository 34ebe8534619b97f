"""Prompts that the host reads chunk by chunk: the texts, counts and rounds of those that are read
at once.
"""

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import BoundDrafter, chunks
from jaxspec.decode import loop
from jaxspec.decode.generate import complete, pieces
from jaxspec.decode.request import prepare
from tests.decode.test_prefix import pair_of
from tests.draft_heads.test_drafters import target_of
from tests.drafters.cases import CASES, TARGET
from tests.marks import marked

RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, 3, size).tolist() for size in (5, 61, 23)]
OPTIONS = dict(
    gamma=2, max_new_tokens=9, temperature=[0.0, 1.0, 0.8], key=jax.random.key(5), log_probs=True
)
NAMES = ("none", "a look-up", "a model", "a cascade", "a tree", "eagle 3", "dflash", "kangaroo")


def prepared_for(name, prompts):
    """The generation of a drafter of `NAMES`."""
    target, drafter = pair_of("none" if name == "a look-up" else name)
    return prepare(
        target,
        prompts,
        drafter=drafters.prompt_lookup(2) if name == "a look-up" else drafter,
        **OPTIONS,
    )


@pytest.fixture
def short_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "LONGEST", 16)


def same(left, right):
    assert left.tokens.tolist() == right.tokens.tolist() and left.finish == right.finish
    jax.tree.map(np.testing.assert_array_equal, left.stats, right.stats)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), left.log_probs, right.log_probs
    )


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    "name", marked(NAMES, slow={*NAMES} - {"a look-up", "a model"}, exhaustive=("dflash",))
)
def test_texts_are_those_of_prompts_that_are_read_at_once(name):
    """Ragged rows, some of which end in the first chunk; the prompts are still there afterwards."""
    prepared = prepared_for(name, PROMPTS)
    assert loop.goes_in_chunks(prepared)
    seen = []
    in_chunks = complete(prepared, begin=lambda p: loop.prefill_in_chunks(p, seen.append))
    same(in_chunks, complete(prepared, begin=loop.prefill))
    assert seen == [16, 31, 46, 61]


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("name", marked(["a model", "eagle 3"], slow={"eagle 3"}))
@pytest.mark.parametrize("size", [62, 64])
def test_the_last_chunk_ends_with_the_buffer(name, size):
    """Prompts that nearly fill their bucket of 64: a fifth chunk from where the fourth ended would
    pass the end.
    """
    prompts = [
        PROMPTS[0],
        RANDOM.integers(0, 3, size).tolist(),
        RANDOM.integers(0, 3, size - 1).tolist(),
    ]
    prepared = prepared_for(name, prompts)
    assert prepared.prompt.tokens.shape[1] == 64
    in_chunks = complete(prepared, begin=lambda p: loop.prefill_in_chunks(p, lambda read: None))
    same(in_chunks, complete(prepared, begin=loop.prefill))


@pytest.mark.usefixtures("short_chunks")
def test_they_follow_a_prefix_and_are_streamed():
    """And the texts are those of one program."""
    target, drafter = pair_of("a model")
    prefix, seen = jaxspec.prefix(target, PROMPTS[2], drafter=drafter), []
    options = OPTIONS | dict(drafter=drafter, prefix=prefix, temperature=1.0)
    prepared = prepare(target, PROMPTS[1], **options)
    streamed = pieces(prepared, begin=lambda p: loop.prefill_in_chunks(p, seen.append))
    (text,) = complete(prepared).tokens.tolist()
    assert [token for piece in streamed for token in piece.tokens] == text
    assert seen == [38, 53, 68, 81, 84]  # the last chunk is whole, and ends with the buffer of 96


@pytest.mark.usefixtures("short_chunks")
def test_any_number_of_chunks_takes_two_programs():
    prepared = [prepare(TARGET, [[0] * size], max_new_tokens=4) for size in (100, 128, 200, 256)]
    for part in prepared[::2]:
        loop.prefill_in_chunks(part, lambda read: None)
    programs = loop.start.num_programs(), loop.go_on.num_programs()
    for part in prepared[1::2]:
        loop.prefill_in_chunks(part, lambda read: None)
    assert (loop.start.num_programs(), loop.go_on.num_programs()) == programs


def test_what_cannot_be_resumed_is_not_read_in_chunks():
    stateless = CASES["a model"].drafter.functions
    old = stateless._replace(resumes=False)
    assert not loop.goes_in_chunks(
        prepare(TARGET, [[0]], drafter=BoundDrafter(old, CASES["a model"].drafter.params))
    )
    assert not loop.goes_in_chunks(prepare(target_of("t5"), [[1]]))
