"""The distance of an acceptance rule's text from the target's distribution: by enumeration on table
models.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec import drafters
from jaxspec.core import Caches, Draft, DraftContext, Drafter, Prompt
from jaxspec.decode.request import prepare
from jaxspec.drafters.common import no_commit, no_state
from jaxspec.rules.catalogue import RuleEntry
from jaxspec.testing.bounds import excess
from jaxspec.testing.certificate import decoder_distribution, total_variation
from jaxspec.testing.tables import plain_distribution, table_model

ROUNDING = 1e-5  # a total variation below this is rounding
VOCAB = 3  # token ids of the table models
TREE = (2, 1)  # branches at each depth of the tree
# draft tokens drawn by a model, or always the same; a model's tree; a tree whose first nodes two
# models draw
DRAFTERS = "model", "fixed", "tree", "two models"


class Certificate(NamedTuple):
    """The distance of a rule's text from the target's distribution."""

    # these two: its name, and whether it promises that distribution
    rule: str
    exact: bool
    total_variation: dict[str, float]  # by kind of drafter, of `DRAFTERS`
    # for an inexact rule, the excess of its text over its bound, by kind of drafter
    above_bound: dict[str, float] | None
    as_stated: bool  # whether the rule keeps its promise but for rounding


def certificate(entry: RuleEntry, *, gamma: int = 2, steps: int = 3, seed: int = 0) -> Certificate:
    """Enumerates the total variation between a rule's first tokens and plain sampling's, by kind of
    drafter.

    Args:
        entry: a rule, with its bound if it is inexact.
        gamma: draft tokens a round.
        steps: tokens whose joint distribution is enumerated.
        seed: the seed of the table models.

    Raises:
        ValueError: the rule is inexact and states no bound.

    Example:
        >>> from jaxspec.rules import catalogue
        >>> block = certificate(catalogue.RULES["block"], gamma=1, steps=2)
        >>> sorted(block.total_variation), block.as_stated
        (['fixed', 'model'], True)
    """
    rule, bound = entry
    if not rule.exact and bound is None:
        raise ValueError(
            f"{rule.name} is inexact and states no bound: give its catalogue.RuleEntry a bound"
        )
    target, draft, second_draft = (
        table_model(jax.random.fold_in(jax.random.key(seed), i), vocab=VOCAB) for i in range(3)
    )
    kinds: dict[str, Any] = dict(
        zip(DRAFTERS, (draft, Drafter(no_state, _ones, no_commit)), strict=False)
    )
    if rule.trees:
        kinds[DRAFTERS[2]] = drafters.tree(draft, TREE)
    if rule.sources:
        kinds[DRAFTERS[3]] = drafters.tree([draft, second_draft], (2,), draw="replacement")
    prompt = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    prepared = prepare(
        target, prompt, rule=rule, gamma=gamma, temperature=1.0, key=jax.random.key(0), eos_ids=()
    )
    plain = plain_distribution(
        target, prepared.prompt, prepared.sampler, prepared.request.sampling_params, steps
    )
    texts = {
        name: decoder_distribution(
            prepared.replace(drafter=drafter, max_new_tokens=steps), steps=steps
        )
        for name, drafter in kinds.items()
    }
    distances = {name: total_variation(text, plain) for name, text in texts.items()}
    above = None
    if bound is not None:
        above = {name: excess(text, plain, bound, VOCAB) for name, text in texts.items()}
    if rule.exact or above is None:
        errors = distances
    else:
        errors = above
    return Certificate(
        rule.name, rule.exact, distances, above, bool(max(errors.values()) < ROUNDING)
    )


def _ones(weights: Any, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
    tokens = jnp.ones((context.max_draft.shape[0], context.gamma), jnp.int32)
    return Draft(tokens, jnp.full_like(context.max_draft, context.gamma)), caches
