"""Rounds that are timed for a policy have as many draft tokens as is said, and c and v are what
rounds take.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import drafters
from jaxspec.analysis import cost
from jaxspec.analysis.cost import policy_costs
from jaxspec.core import Prompt
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.drafters.common import as_drafter
from jaxspec.testing import table_model
from tests.marks import marked

PROMPT = Prompt(jnp.array([[3, 1, 2], [2, 0, 0]], jnp.int32), jnp.array([3, 1], jnp.int32))
TARGET, DRAFT = (table_model(jax.random.key(seed), 5) for seed in (1, 2))
DRAFTERS = {
    "a model": as_drafter(DRAFT),
    "prompt_lookup": drafters.prompt_lookup(),  # finds nothing in these prompts
    "a tree": drafters.tree(DRAFT, (2, 1, 1)),
    "token_recycling": drafters.token_recycling(),
}


@pytest.fixture
def seconds(monkeypatch):
    """Rounds that take what the test says, by the number of their draft tokens; those that were
    timed are kept.
    """

    def install(of_round):
        timed = []
        monkeypatch.setattr(cost, "_round_loops", lambda *_: lambda count: count)

        def seconds_per_pass(counts, repeats):
            timed.extend(counts)
            return np.array([[of_round(count)] * repeats for count in counts])

        monkeypatch.setattr(cost, "seconds_per_pass", seconds_per_pass)
        return timed

    return install


def prepared(drafter, gamma=7, **options):
    return prepare(
        TARGET, PROMPT, drafter=drafter, gamma=gamma, **dict(max_new_tokens=16) | options
    )


def test_a_chain_costs_its_width_and_its_draft_tokens(seconds):
    """Widths of 2, 4 and 8 tokens, and 0.1 for each draft token: rounds of 2 tokens and of 3 tell
    them apart.
    """
    timed = seconds(lambda n: 2.0 * (0.1 * n + {0: 1.0, 1: 1.5, 2: 2.0, 3: 2.0}.get(n, 4.0)))
    costs = policy_costs(prepared(DRAFT))
    assert timed == [0, 1, 2, 3, 4, 7]
    np.testing.assert_allclose(costs.c, 0.1)
    np.testing.assert_allclose(costs.v, [1.0, 1.5, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0])


def test_a_tree_costs_what_each_depth_does(seconds):
    timed = seconds(lambda depth: [1.0, 2.0, 2.5, 2.25][depth])
    costs = policy_costs(prepared(DRAFTERS["a tree"]))
    assert timed == [0, 1, 2, 3]
    assert costs.c == 0 and costs.v.tolist() == [1.0, 2.0, 2.5, 2.5]  # never falling


@pytest.mark.parametrize(
    ("new", "expected"), [(9, [0, 1, 2, 3, 4, 7]), (8, [0, 1, 2, 3]), (3, [0, 1]), (2, [])]
)
def test_drafts_that_no_row_has_room_for_are_not_timed(seconds, new, expected):
    """The first token is prefill's, and the last one no draft's."""
    timed = seconds(lambda n: 1.0 + n)
    costs = policy_costs(prepared(DRAFT)._replace(max_new_tokens=new))
    assert timed == expected
    assert (costs.v < cost.FAR).tolist() == [n <= max(expected, default=0) for n in range(8)]


@pytest.mark.parametrize(("drafter", "gamma"), [(None, 3), (DRAFT, 0)])
def test_a_generation_that_drafts_nothing_has_no_costs(drafter, gamma):
    with pytest.raises(
        ValueError, match="expected a generation with a drafter, and at least 1 draft token"
    ):
        policy_costs(prepared(drafter, gamma))


@functools.partial(jax.jit, static_argnums=0)
def step(decoder, weights, state):
    return decoder.step(weights, state)


@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_have_as_many_draft_tokens_as_is_said(name):
    bound, gamma = DRAFTERS[name], 3
    full = bound._replace(functions=cost._full(bound.functions))
    depth = prepared(bound, gamma).decoder.gamma
    for count in range(depth + 1):
        forced = prepared(full, gamma, policy=cost._always(count, depth), eos_ids=())
        _, info = step(forced.decoder, forced.weights, loop.prefill(forced))
        if bound.functions.tree is None:
            assert info.draft_length.tolist() == [count] * 2
        else:  # a tree's nodes: none, or those of so many levels
            assert (info.draft_length.min() > 0) == (count > 0)


def test_rounds_never_end():
    """Rows that are full begin again; until then they go on as they do when they generate."""
    generation = prepared(DRAFT, 3, policy=cost._always(3, 3), eos_ids=())
    policy, begun = generation.request.policy, loop.prefill(generation)
    place = jnp.copy(begun.tokens), jnp.copy(begun.length)

    def after(count):
        arguments = generation.decoder, generation.weights, loop.prefill(generation), place, policy
        return cost.rounds(*arguments, jnp.asarray(count, jnp.int32))

    expected, _ = step(generation.decoder, generation.weights, begun)
    assert (after(1).tokens == expected.tokens).all()
    states = [after(count) for count in (2, 20, 21)]
    # none is done, and counts as live
    assert [int(state.stats.rounds[0]) for state in states] == [2, 20, 21]
    for state in states:
        assert (state.length > place[1]).all() and (
            state.length - place[1] <= generation.max_new_tokens
        ).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "temperature"),
    marked(
        itertools.product(DRAFTERS, (0.0, 1.0)),
        exhaustive={(name, 0.0 if name in ("a model", "a tree") else 1.0) for name in DRAFTERS},
    ),
)
def test_costs_are_measured_for_every_drafter(name, temperature):
    options = dict(temperature=temperature, key=jax.random.key(0))
    costs = policy_costs(prepared(DRAFTERS[name], 3, **options), repeats=1, inner=1)
    assert costs.c >= 0 and costs.v[0] == 1 and np.all(np.diff(costs.v) >= 0)
