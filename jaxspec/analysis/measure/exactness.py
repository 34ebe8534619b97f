"""How far an acceptance rule's text is from the target's distribution: by enumeration on table models; and a pair's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec import drafters
from jaxspec.analysis.measure import fits, numerics
from jaxspec.analysis.measure.fits import Draws, RuleFits
from jaxspec.analysis.measure.numerics import Summary
from jaxspec.core import Caches, Draft, DraftContext, Drafter, Prompt
from jaxspec.decode.request import Prepared, prepare
from jaxspec.drafters.common import no_commit, no_state
from jaxspec.rules.catalogue import Entry
from jaxspec.testing import decoder_distribution, excess, plain_distribution, table_model, total_variation

ROUNDING = 1e-5  # a total variation below this is rounding
VOCAB = 3  # token ids of the table models
TREE = (2, 1)  # branches at each depth of the tree
DTYPES = ("float32", "bfloat16")  # of a pair's greedy texts; in the first there should be no difference
DRAFTERS = "model", "fixed", "tree"  # draft tokens drawn by a model, or always the same; a model's tree


class Certificate(NamedTuple):
    """How far a rule's text is from the target's distribution.

    Attributes:
        rule, exact: its name, and whether it promises that distribution.
        total_variation: by kind of drafter, of `DRAFTERS`.
        above_bound: of an inexact rule, by how much its text goes above its bound, by kind of drafter.
        as_stated: whether what the rule promises is so but for rounding.
    """

    rule: str
    exact: bool
    total_variation: dict[str, float]
    above_bound: dict[str, float] | None
    as_stated: bool


def certificate(entry: Entry, *, gamma: int = 2, steps: int = 3, seed: int = 0) -> Certificate:
    """The total variation between the distribution of a rule's first tokens and plain sampling's, by kind of drafter.

    Args:
        entry: a rule, with its bound if it is inexact.
        gamma: draft tokens a round.
        steps: tokens whose joint distribution is enumerated.
        seed: of the table models.

    Raises:
        ValueError: the rule is inexact and states no bound.

    Example:
        >>> from jaxspec.rules import catalogue
        >>> found = certificate(catalogue.RULES["block"], gamma=1, steps=2)
        >>> sorted(found.total_variation), found.as_stated
        (['fixed', 'model'], True)
    """
    rule, bound = entry
    if not rule.exact and bound is None:
        raise ValueError(f"{rule.name} is inexact and states no bound: give its catalogue.Entry a bound")
    target, draft = (table_model(jax.random.fold_in(jax.random.key(seed), i), vocab=VOCAB) for i in range(2))
    made: dict[str, Any] = dict(zip(DRAFTERS, (draft, Drafter(no_state, _ones, no_commit)), strict=False))
    if rule.trees:
        made[DRAFTERS[2]] = drafters.tree(draft, TREE)
    prompt = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    prepared = prepare(target, prompt, rule=rule, gamma=gamma, temperature=1.0, key=jax.random.key(0), eos_ids=())
    plain = plain_distribution(target, prepared.prompt, prepared.sampler, prepared.request.sampling_params, steps)
    found = {
        kind: decoder_distribution(prepared.replace(drafter=drafter, max_new_tokens=steps), steps=steps)
        for kind, drafter in made.items()
    }
    off = distances = {kind: total_variation(one, plain) for kind, one in found.items()}
    above = None if bound is None else {kind: excess(one, plain, bound, VOCAB) for kind, one in found.items()}
    if not rule.exact and above is not None:
        off = above
    return Certificate(rule.name, rule.exact, distances, above, bool(max(off.values()) < ROUNDING))


class PairCheck(NamedTuple):
    """Whether a real pair decodes as it should.

    Attributes:
        numerics: greedy texts beside plain decoding's, by dtype.
        samples: of every rule, in float32.
        as_stated: whether the greedy texts are the same in float32, and the samples are what their rules promise.
    """

    numerics: dict[str, Summary]
    samples: RuleFits
    as_stated: bool


def of_pair(
    load: Callable[[str], Prepared], draws: Draws, doing: Callable[[str], object] = lambda what: None
) -> PairCheck:
    """Compares a pair's greedy texts in each of `DTYPES`, and tests its samples in float32.

    Args:
        load: the pair on some prompts, in a dtype.
        draws: how many samples.
        doing: called with what comes next, `fits.steps` times and once for each dtype.
    """
    greedy, generations = {}, {}
    for dtype in DTYPES:
        generations[dtype] = load(dtype)
        doing(f"greedy, {dtype}")
        greedy[dtype] = numerics.summary(generations[dtype])
    samples = fits.of_rules(generations[DTYPES[0]], draws, doing)
    right = all(test.as_stated for test in samples.tests) and not greedy[DTYPES[0]].mismatches
    return PairCheck(greedy, samples, right)


def _ones(weights: Any, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
    tokens = jnp.ones((context.limit.shape[0], context.gamma), jnp.int32)
    return Draft(tokens, jnp.full_like(context.limit, context.gamma)), caches
