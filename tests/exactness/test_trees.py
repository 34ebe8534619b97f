"""Every exact rule on chains and trees: the whole round is a black box, the construction of the
tree included.

The tests are the cheap part of a grid: rule × chain or 1 to 3 children at each of two levels × how
they are drawn × plain and truncated distributions × no end token and one inside.
`tests/scripts/certify_grid.py` goes through all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import pytest

from jaxspec import drafters, rules
from jaxspec.core import BoundDrafter, Model, Prompt, Rule
from jaxspec.decode.request import prepare
from jaxspec.drafters.trees.tree import DrawName
from jaxspec.rules import catalogue
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import (
    certify,
    certify_prepared,
    decoder_distribution,
    excess,
    plain_distribution,
    table_model,
    total_variation,
    with_sampler,
)

EXACT = 1e-5  # total variation; float32 comes to some 1e-7
VOCAB, STEPS = 3, 3
TARGET, DRAFT = (table_model(jax.random.key(seed), VOCAB, order=1) for seed in (1, 2))
# what a node's parent is matters
FAR = [table_model(jax.random.key(seed), VOCAB, order=2) for seed in (1, 2)]
PROMPT = Prompt(jnp.array([[0]]), jnp.array([1]))
SHAPES = (None, *itertools.product((1, 2, 3), repeat=2))  # None: a chain of two
DRAWS = get_args(DrawName)
RULES = tuple(entry.rule for entry in catalogue.RULES.values() if entry.rule.exact)
DISTRIBUTIONS = {  # temperature, top-k, and the drafter's temperature
    "plain": (1.0, VOCAB, 1.0),
    "warped": (0.7, 2, 1.5),
}
END_TOKENS = {"no end token": (), "an end token": (1,)}


class Case(NamedTuple):
    """One program, for all distributions and end tokens."""

    rule: Rule
    shape: tuple[int, ...] | None
    draw: str

    def __str__(self) -> str:
        return f"{self.rule.name} {'chain' if self.shape is None else self.shape} {self.draw}"


def grid(
    all_rules: Iterable[Rule] = RULES, shapes: Iterable = SHAPES, draws: Iterable[str] = DRAWS
) -> Iterator[Case]:
    for shape, rule in itertools.product(shapes, all_rules):
        if shape is None:
            yield from (
                Case(rule, shape, draw)
                for draw in ("sampled", "top", *["coupled"] * rule.shares_noise)
            )
        elif rule.trees:
            yield from (Case(rule, shape, draw) for draw in draws)


def drafter_of(case: Case, draft: Model) -> BoundDrafter:
    if case.shape is not None:
        return drafters.tree(draft, case.shape, draw=case.draw)
    return (
        drafters.greedy(draft)
        if case.draw == "top"
        else drafters.model(draft, coupled=case.draw == "coupled")
    )


def deviation(
    case: Case,
    distribution: str,
    end_tokens: str,
    pair: Sequence[Model] = (TARGET, DRAFT),
    steps: int = STEPS,
) -> float:
    """The total variation between the first tokens' distribution and plain sampling's."""
    target, draft = pair
    temperature, top_k, draft_temperature = DISTRIBUTIONS[distribution]
    params = SamplingParams(jnp.array([temperature]), jnp.array([top_k]))
    options = dict(
        drafter=drafter_of(case, draft),
        rule=case.rule,
        gamma=2,
        temperature=1.0,
        key=jax.random.key(0),
    )
    prepared = prepare(
        target, PROMPT, eos_ids=END_TOKENS[end_tokens], max_new_tokens=steps, **options
    )
    draft_params = params._replace(temperature=jnp.array([draft_temperature]))
    return certify_prepared(
        with_sampler(prepared, at_temperature(VOCAB), params, draft_params), steps
    )


CHEAP = [  # chains: test_enumeration.py, and the conformance tables of rules and drafters
    *grid([rules.rejection()], [(2, 2)]),
    *grid([rules.rejection()], [(1, 2)], ["replacement"]),
    *grid([rules.rejection()], [(3, 1)], ["without_replacement", "mixed"]),
    *grid([rules.coupled(), rules.exact_match()], [(2, 2)], ["without_replacement", "top"]),
    *grid([rules.traversal()], [(2, 1)]),
    *grid([rules.traversal()], [(2, 2)], ["mixed"]),
    *grid([rules.k_seq()], [(2, 1)], ["replacement", "mixed"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CHEAP, ids=str)
def test_text_has_the_distribution_of_plain_sampling(case):
    for distribution, end_tokens in itertools.product(DISTRIBUTIONS, END_TOKENS):
        assert deviation(case, distribution, end_tokens) < EXACT, (distribution, end_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(rule, (2, 1), draw), id=f"{rule.name} {draw}")
        for rule, draw in (
            (rules.rejection(), "without_replacement"),
            (rules.traversal(), "mixed"),
            (rules.coupled(), "top"),
            (rules.k_seq(), "replacement"),
        )
    ],
)
def test_the_token_after_a_whole_path_has_its_distribution(case):
    """Four tokens: prefill's, a path of two, and the target's own after it. What follows depends on
    two tokens.
    """
    assert deviation(case, "plain", "no end token", FAR, steps=4) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenient", "typical"])
def test_inexact_rules_keep_their_bound_on_trees(name):
    entry, key = catalogue.RULES[name], jax.random.key(0)
    options = dict(
        drafter=drafters.tree(DRAFT, (2, 1)), rule=entry.rule, temperature=1.0, key=key, eos_ids=()
    )
    prepared = prepare(TARGET, PROMPT, **options)
    distribution = decoder_distribution(prepared, steps=STEPS)
    plain = plain_distribution(
        TARGET, prepared.prompt, prepared.sampler, prepared.request.sampling_params, STEPS
    )
    assert excess(distribution, plain, entry.bound, VOCAB) < EXACT
    assert total_variation(distribution, plain) > 1e-2


def called_with_replacement(draft):
    """Siblings without replacement that claim to be independent."""
    return draft._replace(draws=2 * draft.draws)


def without_a_token(draft):
    """Nodes are left out for the token that was drawn: what remains is not drawn from the
    distribution it claims.
    """
    return draft._replace(parent=jnp.where(draft.tokens == 1, -1, draft.parent))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [called_with_replacement, without_a_token])
def test_a_tree_that_is_not_drawn_as_it_claims_is_caught(mistake):
    honest = drafters.tree(DRAFT, (2,)).functions

    def propose(weights, caches, context):
        draft, caches = honest.propose(weights, caches, context)
        return mistake(draft), caches

    drafter = drafters.tree(DRAFT, (2,))._replace(functions=honest._replace(propose=propose))
    with pytest.raises(
        ValueError, match="does not draw its tokens from the distributions that its draft declares"
    ):
        certify(TARGET, drafter=drafter, steps=2)
