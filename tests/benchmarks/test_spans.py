"""Blocks that follow each other without gaps, as many as the generation has passes."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.figures import spans
from jaxspec import Prompt, generate
from jaxspec.decode.request import prepare
from jaxspec.testing import table_model

PROMPT = Prompt(jnp.array([[3, 1]]), jnp.array([2]))
TARGET, DRAFT = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)


def without_gaps(spans):
    ends = [span.start + span.duration for span in spans]
    return [span.start for span in spans] == pytest.approx([0.0, *ends[:-1]]) and all(
        s.duration >= 0 for s in spans
    )


@pytest.mark.slow
def test_blocks_of_a_speculative_generation_follow_each_other_without_gaps():
    blocks = spans.record(
        prepare(TARGET, PROMPT, drafter=DRAFT, gamma=2, max_new_tokens=9), repeats=2
    )
    rounds = int(generate(TARGET, PROMPT, drafter=DRAFT, gamma=2, max_new_tokens=9).stats.rounds[0])
    kinds = [span.kind for span in blocks]
    assert kinds == ["target prefill", "draft prefill", *(["draft", "draft", "target"] * rounds)]
    assert without_gaps(blocks)


def test_blocks_of_plain_decoding_are_one_pass_a_token():
    blocks = spans.record(prepare(TARGET, PROMPT, max_new_tokens=9), repeats=1)
    assert [span.kind for span in blocks] == ["target prefill", *(["target"] * 8)]
    assert without_gaps(blocks)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(repeats=0), "repeats is 0"),
        (
            dict(prompt=Prompt(jnp.array([[3], [1]]), jnp.array([1, 1]))),
            "got 2 prompts: expected one",
        ),
    ],
)
def test_bad_arguments_are_refused(changed, message):
    options = dict(prompt=PROMPT, repeats=1) | changed
    prepared = prepare(TARGET, options["prompt"], drafter=DRAFT, gamma=1, max_new_tokens=4)
    with pytest.raises(ValueError, match=message):
        spans.record(prepared, repeats=options["repeats"])
