"""Bias, penalties and truncation, position by position, against transformers and against their formulas in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import warp
from jaxspec.base import Prefix, Prompt
from jaxspec.warp import Controls, chain, greedy, sampling

VOCAB, BATCH, STEP = 9, 3, 4
LOGITS = 2 * jax.random.normal(jax.random.key(0), (BATCH, STEP, VOCAB))
TOKENS = np.array([[3, 1, 4, 1, 8, 8], [5, 0, 99, 0, 5, 5], [2, 7, 1, 7, 7, -1]])
LENGTH, START = np.array([4, 2, 5]), np.array([2, 1, 4])
GUESSES = np.array([[1, 6, 1], [5, 5, 5], [0, 8, 3]])  # known and new tokens, once or more often
CHAIN = np.tri(STEP, STEP - 1, -1, bool)
TREE = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1]], bool)  # the root, two children, a child of the first
WHOLE = chain(
    warp.logit_bias, warp.repetition_penalty, warp.presence_and_frequency_penalties, to=sampling(VOCAB, True, True)
)
OFF = Controls(
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


def prefix(seen=CHAIN):
    return Prefix(*jax.tree.map(jnp.asarray, (Prompt(TOKENS, LENGTH), START, GUESSES, seen)))


@jax.jit
def whole(controls, prefix):
    return WHOLE(controls, LOGITS, prefix).log_probs


def before(row, position, seen=CHAIN):
    """The tokens that precede a position: all of them, and those behind the prompt."""
    tokens = TOKENS[row, : LENGTH[row]].tolist() + GUESSES[row][seen[position]].tolist()
    return tokens, tokens[START[row] :]


@pytest.mark.parametrize("name", SETTINGS)
def test_agrees_with_transformers(name):
    """The same tokens are kept, with the same probabilities, each position behind its own prefix."""
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers.generation.logits_process")
    controls = SETTINGS[name]
    for seen in (CHAIN, TREE):
        ours = np.asarray(whole(controls, prefix(seen)))
        for row, position in np.ndindex(BATCH, STEP):
            own = jax.tree.map(lambda x, row=row: np.asarray(x[row]), controls)
            bias = {(i,): float(x) for i, x in enumerate(own.bias) if x}
            stages = [hf.SequenceBiasLogitsProcessor(bias)] if bias else []
            stages += [
                hf.RepetitionPenaltyLogitsProcessor(float(own.repetition)),
                hf.TemperatureLogitsWarper(float(own.temperature)),
                hf.TopKLogitsWarper(int(own.top_k)),
                hf.TopPLogitsWarper(float(own.top_p)),
                hf.MinPLogitsWarper(float(own.min_p)),
            ]
            ids = torch.tensor([before(row, position, seen)[0]])
            scores = hf.LogitsProcessorList(stages)(ids, torch.tensor(np.asarray(LOGITS[row, position])[None]))
            expected = torch.log_softmax(scores, -1)[0].numpy()
            np.testing.assert_array_equal(np.isneginf(ours[row, position]), np.isneginf(expected))
            np.testing.assert_allclose(np.exp(ours[row, position]), np.exp(expected), atol=1e-6)


@pytest.mark.parametrize("seen", [CHAIN, TREE], ids=["chain", "tree"])
def test_presence_and_frequency_count_what_was_generated(seen):
    presence, frequency = np.array([0.5, -0.3, 2.0]), np.array([0.25, 0.7, -0.4])
    controls = OFF._replace(presence=jnp.asarray(presence), frequency=jnp.asarray(frequency))
    ours = np.exp(whole(controls, prefix(seen)))
    for row, position in np.ndindex(BATCH, STEP):
        count = np.bincount(before(row, position, seen)[1], minlength=VOCAB)
        logits = np.asarray(LOGITS[row, position]) - presence[row] * (count > 0) - frequency[row] * count
        np.testing.assert_allclose(ours[row, position], np.exp(logits) / np.exp(logits).sum(), atol=1e-6)


def test_without_guesses_every_position_sees_the_row():
    controls = SETTINGS["repetition"]
    alone = jax.jit(WHOLE)(controls, LOGITS[:, :1], prefix()._replace(guesses=None, seen=None)).log_probs
    np.testing.assert_allclose(alone[:, 0], whole(controls, prefix())[:, 0], atol=1e-6)


def test_stages_run_in_order_and_may_be_anybodys():
    def double(controls, logits, prefix):
        return 2 * logits

    def shift(controls, logits, prefix):
        return logits + controls.bias[:, None, :]

    controls = OFF._replace(bias=BIAS)
    for stages, expected in [
        ((double, shift), 2 * LOGITS + BIAS[:, None]),
        ((shift, double), 2 * (LOGITS + BIAS[:, None])),
    ]:
        law = chain(*stages, to=sampling())(controls, LOGITS, None)
        np.testing.assert_allclose(law.log_probs, jax.nn.log_softmax(expected), atol=1e-6)
    assert chain(double, to=greedy()) is chain(double, to=greedy()) and chain(to=greedy()) is greedy()


def test_a_penalty_without_a_prefix_is_refused():
    with pytest.raises(ValueError, match="what precedes each position"):
        WHOLE(OFF, LOGITS)


def test_a_greedy_chain_has_no_softmax_no_sort_and_no_counts_per_position():
    stages = (warp.logit_bias, warp.repetition_penalty, warp.presence_and_frequency_penalties)
    program = str(jax.make_jaxpr(lambda p: chain(*stages, to=greedy())(OFF, LOGITS, p))(prefix()))
    assert not any(word in program for word in ("exp ", "log ", "sort[", "top_k"))
    assert f"i32[{BATCH},{VOCAB}]" in program
    added = [line for line in program.splitlines() if "scatter-add" in line or "cumsum" in line]
    assert added and not any(f"[{BATCH},{STEP},{VOCAB}]" in line for line in added)
