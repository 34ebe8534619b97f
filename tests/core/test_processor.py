"""Logits processors with a memory: it follows committed rows, and draft tokens along every path of
a tree.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import drafters, sampling
from jaxspec.core import BoundProcessor, Preceding, Processor, Prompt, tree
from jaxspec.core.processor import fold
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.sampling import SamplingParams, chain, greedy, samplers
from jaxspec.testing import table_model

ROWS = Prompt(jnp.array([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]]), jnp.array([5, 2]))
START = jnp.array([2, 1])
TARGET, DRAFT = table_model(jax.random.key(1), 5), table_model(jax.random.key(2), 5)


def add_digit(values, memory, token):  # depends on the order of tokens
    return memory * values + token


@pytest.mark.parametrize(
    "parents", [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 0, 2]], ids=["chain", "two branches", "mixed"]
)
def test_memories_follow_every_path_of_a_tree(parents):
    tokens, parent = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]]), jnp.array([parents] * 2)
    seen = tree.ancestors(tree.fed(parent))[:, :, 1:]
    folded = fold(
        add_digit, jnp.array([10, 10]), jnp.array([9, 8]), Preceding(ROWS, START, tokens, seen), 5
    )
    for row, memory in enumerate([9, 8]):
        expected = [memory]
        for token, above in zip(tokens[row].tolist(), parents, strict=True):
            expected.append(10 * expected[above] + token)
        assert folded[row].tolist() == expected


@pytest.mark.parametrize(
    "process", [sampling.repetition_penalty, sampling.presence_and_frequency_penalties]
)
def test_counts_that_are_carried_are_those_of_the_row(process):
    memory = process.init(None, ROWS._replace(length=START), START, 9)
    rest = jnp.stack([ROWS.tokens[row, n : n + 3] for row, n in enumerate(START.tolist())])
    carried = process.commit(None, memory, rest, ROWS.length - START)
    np.testing.assert_array_equal(carried, process.init(None, ROWS, START, 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter", [None, DRAFT, drafters.tree(DRAFT, (2, 1))], ids=["plain", "chain", "tree"]
)
def test_after_every_round_the_memory_is_that_of_the_row(drafter):
    options = dict(repetition_penalty=1.3, frequency_penalty=0.4, max_new_tokens=np.array([11, 6]))
    prepared = prepare(TARGET, [[3, 1, 4, 1], [2]], drafter=drafter, gamma=3, **options)
    rounds = 0
    for state, _ in loop.iterate_rounds(prepared):
        expected = samplers.follower(prepared.sampler, 5).init(state, 0)
        jax.tree.map(np.testing.assert_array_equal, state.memory.sampler, expected)
        rounds += 1
    assert rounds > 2


def test_without_options_that_remember_a_state_has_no_memory():
    state, _ = next(loop.iterate_rounds(prepare(TARGET, [[3, 1]], max_new_tokens=4)))
    assert not jax.tree.leaves(state.memory)


def test_a_chain_before_a_chain_is_one_chain():
    process = Processor(lambda values, logits, preceding: logits)
    inner = chain(sampling.repetition_penalty, to=greedy())
    assert chain(process, to=inner) == chain(process, sampling.repetition_penalty, to=greedy())
    assert samplers.follower(inner, 5) and not samplers.follower(chain(process, to=greedy()), 5)


def test_values_are_those_of_each_row():
    process = Processor(
        lambda values, logits, preceding: (
            logits + values["bias"][:, None, None] * preceding.memory[..., None]
        ),
        lambda values, row, start, vocab: row.length.astype(jnp.float32),
        lambda values, memory, token: memory + 1,
    )
    bound = BoundProcessor(process, {"bias": np.array([1.0, 2.0], np.float32)})
    prepared = prepare(TARGET, [[3, 1], [2]], logits_processors=bound)
    distribution = prepared.sampler(
        prepared.request.sampling_params,
        jnp.zeros((2, 1, 5)),
        Preceding(prepared.prompt, prepared.prompt.length),
    )
    assert distribution.logits[:, 0, 0].tolist() == [2.0, 2.0]


KEEP = Processor(lambda values, logits, preceding: logits)
NOTHING = dict(
    init=lambda values, row, start, vocab: row.length, advance=lambda values, memory, token: memory
)
BAD = {
    "text": ("banned", TypeError, "is 'banned': expected a tuple of core.Processor"),
    "a number in it": ((KEEP, 3), TypeError, r"logits_processors\[1\] is 3: expected core.Processor"),
    "one function of two": (Processor(KEEP.apply, NOTHING["init"]), ValueError, "one of init and advance"),
    "other logits": (lambda values, logits, preceding: logits[..., :2], ValueError, r"logits of float32\[2, 1, 2\]"),
    "a memory of one row": (
        Processor(KEEP.apply, lambda values, row, start, vocab: row.length[:1], NOTHING["advance"]),
        ValueError, r"makes a memory of int32\[1\]: expected 2 rows",
    ),
    "a memory that grows": (
        Processor(KEEP.apply, NOTHING["init"], lambda values, memory, token: memory[:, None]),
        ValueError, r"advance returns int32\[2, 1\]: expected the same shapes",
    ),
    "values of other rows": (BoundProcessor(KEEP, np.ones(3)), ValueError, "a value for each of 3 rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_processor_that_cannot_run_is_refused_before_anything_is_compiled(name):
    processors, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        prepare(TARGET, [[3, 1], [2]], logits_processors=processors)


def test_a_memory_needs_to_know_what_precedes_each_position():
    with pytest.raises(ValueError, match="the tokens before each position"):
        sampling.repetition_penalty(
            SamplingParams(jnp.ones(1), repetition=jnp.ones(1)), jnp.zeros((1, 1, 3)), None
        )
