"""Every exact rule on chains and trees: the whole round is a black box, the construction of the tree included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxspec import accept, drafters
from jaxspec.accept import catalogue
from jaxspec.base import Prompt
from jaxspec.decode.request import prepare
from jaxspec.testing import (
    certify,
    decoder_distribution,
    excess,
    plain_distribution,
    table_model,
    total_variation,
)

EXACT = 1e-5  # total variation; float32 comes to some 1e-7
TARGET = table_model(jax.random.key(1), vocab=3, order=1)
DRAFT = table_model(jax.random.key(2), vocab=3, order=1)
PROMPT = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
DRAWS = ("without_replacement", "replacement", "top", "mixed")
SHAPES = ((3,), (1, 2), (2, 2))


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rejection_is_exact_on_trees(shape, draw):
    for end_tokens in ([], [1]):  # one program
        drafter = drafters.tree(DRAFT, shape, draw=draw)
        assert certify(TARGET, drafter=drafter, steps=3, eos_ids=end_tokens) < EXACT


@pytest.mark.parametrize("draw", DRAWS)
def test_rejection_is_exact_on_trees_of_truncated_distributions(draw):
    options = dict(temperature=0.7, top_k=2, draft_temperature=1.5)
    assert certify(TARGET, drafter=drafters.tree(DRAFT, (2, 1), draw=draw), steps=3, **options) < EXACT


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=[pytest.mark.slow] if shape != (2, 1) else []) for shape in (*SHAPES, (2, 1))],
    ids=str,
)
def test_traversal_is_exact_on_trees(shape, draw):
    """Also with an end token in the tree, in one program."""
    for end_tokens in ([], [1]):
        drafter = drafters.tree(DRAFT, shape, draw=draw)
        assert certify(TARGET, drafter=drafter, accept=accept.traversal(), steps=3, eos_ids=end_tokens) < EXACT


@pytest.mark.parametrize(
    "draw", ["without_replacement", *(pytest.param(draw, marks=pytest.mark.slow) for draw in DRAWS[1:])]
)
def test_traversal_is_exact_on_trees_of_truncated_distributions(draw):
    options = dict(accept=accept.traversal(), temperature=0.7, top_k=2, draft_temperature=1.5)
    assert certify(TARGET, drafter=drafters.tree(DRAFT, (2, 1), draw=draw), steps=3, **options) < EXACT


@pytest.mark.parametrize("options", [{}, pytest.param(dict(temperature=0.7, top_k=2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("shape", [(2, 1), *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES)], ids=str)
@pytest.mark.parametrize(
    "draw", ["replacement", *(pytest.param(draw, marks=pytest.mark.slow) for draw in DRAWS if draw != "replacement")]
)
def test_k_seq_is_exact_on_trees(shape, draw, options):
    """Paths of the same tokens are one, whose candidates are those of all; of other siblings only the first counts."""
    drafter = drafters.tree(DRAFT, shape, draw=draw)
    assert certify(TARGET, drafter=drafter, accept=accept.k_seq(), steps=3, eos_ids=[1], **options) < EXACT


@pytest.mark.parametrize("name", ["lenient", "typical"])
def test_inexact_rules_keep_their_bound_on_trees(name):
    entry = catalogue.RULES[name]
    job = prepare(
        TARGET,
        PROMPT,
        drafter=drafters.tree(DRAFT, (2, 1)),
        accept=entry.rule,
        temperature=1.0,
        key=jax.random.key(0),
        eos_ids=(),
    )
    found = decoder_distribution(job, steps=3)
    plain = plain_distribution(TARGET, job.prompt, job.sampler, job.request.sampling_params, 3)
    assert excess(found, plain, entry.ceiling, 3) < EXACT
    assert total_variation(found, plain) > 1e-2


@pytest.mark.parametrize("rule", [accept.coupled(), accept.exact_match()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("draw", ["without_replacement", "top"])
def test_other_rules_are_exact_on_trees(rule, draw):
    drafter = drafters.tree(DRAFT, (2, 2), draw=draw)
    assert certify(TARGET, drafter=drafter, accept=rule, steps=3, eos_ids=[1]) < EXACT


def test_a_tree_whose_draws_are_called_something_else_is_caught():
    """Siblings without replacement that claim to be independent: the certificate can fail."""
    honest = drafters.tree(DRAFT, (2,)).functions

    def propose(weights, caches, context):
        draft, caches = honest.propose(weights, caches, context)
        return draft._replace(draws=2 * draft.draws), caches  # Draw.WITH_REPLACEMENT

    drafter = drafters.tree(DRAFT, (2,))._replace(functions=honest._replace(propose=propose))
    assert certify(TARGET, drafter=drafter, steps=2) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAWS)
def test_rejection_is_exact_on_a_tree_of_twelve(draw):
    assert certify(TARGET, drafter=drafters.tree(DRAFT, (3, 3), draw=draw), steps=2) < EXACT
