"""Bias, penalties and truncation, position by position, against transformers and against their
formulas in numpy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import sampling
from jaxspec.core import Preceding, Prompt
from jaxspec.sampling import SamplingParams, at_temperature, chain, greedy

VOCAB, BATCH, STEP = 9, 3, 4
LOGITS = 2 * jax.random.normal(jax.random.key(0), (BATCH, STEP, VOCAB))
TOKENS = np.array([[3, 1, 4, 1, 8, 8], [5, 0, 99, 0, 5, 5], [2, 7, 1, 7, 7, -1]])
LENGTH, START = np.array([4, 2, 5]), np.array([2, 1, 4])
# known and new tokens, once or more often
DRAFT_TOKENS = np.array([[1, 6, 1], [5, 5, 5], [0, 8, 3]])
CHAIN = np.tri(STEP, STEP - 1, -1, bool)[None]
TREE = np.array(  # a tree a row: two children and a child of the first; three children; a chain
    [
        [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1]],
        [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]],
        [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]],
    ],
    bool,
)
WHOLE = chain(
    sampling.logit_bias,
    sampling.repetition_penalty,
    sampling.presence_and_frequency_penalties,
    to=at_temperature(VOCAB, True, True),
)
OFF = SamplingParams(
    temperature=jnp.ones(BATCH),
    top_k=jnp.full(BATCH, VOCAB),
    top_p=jnp.ones(BATCH),
    min_p=jnp.zeros(BATCH),
    bias=jnp.zeros((BATCH, VOCAB)),
    repetition=jnp.ones(BATCH),
    presence=jnp.zeros(BATCH),
    frequency=jnp.zeros(BATCH),
)
BIAS = jnp.zeros((BATCH, VOCAB)).at[0, 1].set(3.0).at[:, 4].set(-jnp.inf).at[2, 7].set(-1.5)
SETTINGS = {
    "nothing": OFF,
    "min-p": OFF._replace(min_p=jnp.array([0.05, 0.3, 1.0])),
    "bias": OFF._replace(bias=BIAS),
    "repetition": OFF._replace(repetition=jnp.array([1.3, 2.0, 0.7])),
    "all": OFF._replace(
        temperature=jnp.array([0.7, 1.0, 2.0]),
        top_k=jnp.array([5, 9, 7]),
        top_p=jnp.array([0.95, 0.8, 1.0]),
        min_p=jnp.array([0.1, 0.0, 0.2]),
        bias=BIAS,
        repetition=jnp.array([1.3, 1.0, 0.7]),
    ),
}


def preceding(seen=CHAIN):
    return Preceding(
        *jax.tree.map(jnp.asarray, (Prompt(TOKENS, LENGTH), START, DRAFT_TOKENS, seen))
    )


@jax.jit
def log_probs_of(sampling_params, before):
    return WHOLE(sampling_params, LOGITS, before).log_probs


def before(row, position, seen=CHAIN):
    """The tokens that precede a position: all of them, and those after the prompt."""
    tokens = (
        TOKENS[row, : LENGTH[row]].tolist()
        + DRAFT_TOKENS[row][seen[row % len(seen), position]].tolist()
    )
    return tokens, tokens[START[row] :]


@pytest.mark.needs_torch
@pytest.mark.parametrize("name", SETTINGS)
def test_agrees_with_transformers(name):
    """The same tokens are kept, with the same probabilities, each position after its own prefix."""
    import torch
    from transformers.generation import logits_process as hf

    sampling_params = SETTINGS[name]
    for seen in (CHAIN, TREE):
        ours = np.asarray(log_probs_of(sampling_params, preceding(seen)))
        for row, position in np.ndindex(BATCH, STEP):
            params = jax.tree.map(lambda x, row=row: np.asarray(x[row]), sampling_params)
            bias = {(i,): float(x) for i, x in enumerate(params.bias) if x}
            processors = [hf.SequenceBiasLogitsProcessor(bias)] if bias else []
            processors += [
                hf.RepetitionPenaltyLogitsProcessor(float(params.repetition)),
                hf.TemperatureLogitsWarper(float(params.temperature)),
                hf.TopKLogitsWarper(int(params.top_k)),
                hf.TopPLogitsWarper(float(params.top_p)),
                hf.MinPLogitsWarper(float(params.min_p)),
            ]
            ids = torch.tensor([before(row, position, seen)[0]])
            scores = hf.LogitsProcessorList(processors)(
                ids, torch.tensor(np.asarray(LOGITS[row, position])[None])
            )
            expected = torch.log_softmax(scores, -1)[0].numpy()
            np.testing.assert_array_equal(np.isneginf(ours[row, position]), np.isneginf(expected))
            np.testing.assert_allclose(np.exp(ours[row, position]), np.exp(expected), atol=1e-6)


@pytest.mark.parametrize("seen", [CHAIN, TREE], ids=["chain", "tree"])
def test_presence_and_frequency_count_what_was_generated(seen):
    presence, frequency = np.array([0.5, -0.3, 2.0]), np.array([0.25, 0.7, -0.4])
    sampling_params = OFF._replace(presence=jnp.asarray(presence), frequency=jnp.asarray(frequency))
    ours = np.exp(log_probs_of(sampling_params, preceding(seen)))
    for row, position in np.ndindex(BATCH, STEP):
        count = np.bincount(before(row, position, seen)[1], minlength=VOCAB)
        logits = (
            np.asarray(LOGITS[row, position]) - presence[row] * (count > 0) - frequency[row] * count
        )
        np.testing.assert_allclose(
            ours[row, position], np.exp(logits) / np.exp(logits).sum(), atol=1e-6
        )


def test_without_draft_tokens_every_position_sees_the_row():
    sampling_params = SETTINGS["repetition"]
    alone = jax.jit(WHOLE)(
        sampling_params, LOGITS[:, :1], preceding()._replace(draft_tokens=None, seen=None)
    ).log_probs
    np.testing.assert_allclose(
        alone[:, 0], log_probs_of(sampling_params, preceding())[:, 0], atol=1e-6
    )


def test_processors_run_in_order_and_may_be_of_ones_own():
    def double(sampling_params, logits, preceding):
        return 2 * logits

    def shift(sampling_params, logits, preceding):
        return logits + sampling_params.bias[:, None, :]

    sampling_params = OFF._replace(bias=BIAS)
    for processors, expected in [
        ((double, shift), 2 * LOGITS + BIAS[:, None]),
        ((shift, double), 2 * (LOGITS + BIAS[:, None])),
    ]:
        distribution = chain(*processors, to=at_temperature())(sampling_params, LOGITS, None)
        np.testing.assert_allclose(distribution.log_probs, jax.nn.log_softmax(expected), atol=1e-6)
    assert (
        chain(double, to=greedy()) is chain(double, to=greedy()) and chain(to=greedy()) is greedy()
    )


def test_a_penalty_without_a_prefix_is_refused():
    with pytest.raises(ValueError, match="the tokens before each position"):
        WHOLE(OFF, LOGITS)


def test_a_greedy_chain_has_no_softmax_no_sort_and_no_counts_per_position():
    processors = (
        sampling.logit_bias,
        sampling.repetition_penalty,
        sampling.presence_and_frequency_penalties,
    )
    program = str(
        jax.make_jaxpr(lambda p: chain(*processors, to=greedy())(OFF, LOGITS, p))(preceding())
    )
    assert not any(word in program for word in ("exp ", "log ", "sort[", "top_k"))
    assert f"i32[{BATCH},{VOCAB}]" in program
    added = [line for line in program.splitlines() if "scatter-add" in line or "cumsum" in line]
    assert added and not any(f"[{BATCH},{STEP},{VOCAB}]" in line for line in added)
