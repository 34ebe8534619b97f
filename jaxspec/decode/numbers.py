"""The numbers of a round's draft tokens, for a trace that has them; see `core.TraceNumbers`.

They are computed again from the distributions of the round and from its noise, which is addressed,
so the rule is not disturbed. Where nobody asks for them they cost nothing.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Distribution, Draft, Draw, Keys, RoundResult, Rule, TraceNumbers, tree
from jaxspec.policies.common import log_probs
from jaxspec.rules import common, residual_tree
from jaxspec.rules.typical import entropy as entropy_in_nats


def of_round(
    rule: Rule, keys: Keys, position: Int[Array, " B"], result: RoundResult
) -> TraceNumbers:
    """Computes the numbers of a round's draft tokens; NaN for those that were not verified.

    Args:
        rule: the rule that judged the draft.
        keys, position: the rows' keys, and their lengths before the round, as `Rule.verify` gets
            them.
        result: the round's result.
    """
    draft = result.draft
    target = result.target.distribution
    # a certain target is matched, and nothing is drawn
    if rule.trials is None or target.tokens is not None:
        trials = common.no_trials(draft)
    else:
        trials = rule.trials(keys, position, draft, target)
    numbers = TraceNumbers(
        _of_drafter(draft), _of_target(draft, target), *trials, _entropies(draft), _layers(draft)
    )
    if draft.parent is None:
        is_verified = common.is_real(draft)
    else:
        is_verified = tree.in_tree(common.real_parent(draft))
    return TraceNumbers(*(jnp.where(is_verified, values, jnp.nan) for values in numbers))


def entropy(distribution: Distribution) -> Float[Array, " B"]:
    """Computes the entropy of one position's distribution over log V; rows at temperature 0 use
    temperature 1.

    NaN for a point mass without logits.

    >>> even = jnp.log(jnp.full((1, 1, 4), 0.25))
    >>> (
    ...     entropy(Distribution(even)).tolist(),
    ...     entropy(Distribution(tokens=jnp.array([[2]]), logits=even)).tolist(),
    ... )
    ([1.0], [1.0])
    """
    if distribution.logits is None and (
        distribution.log_probs is None or distribution.greedy is not None
    ):
        if distribution.log_probs is None:
            rows = distribution.tokens
        else:
            rows = distribution.log_probs[..., 0]
        assert rows is not None
        return jnp.full(rows.shape[0], jnp.nan, jnp.float32)
    return _normalised(log_probs(distribution))


def _normalised(rows: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    return entropy_in_nats(rows) / jnp.log(float(max(rows.shape[-1], 2)))


def _of_drafter(draft: Draft) -> Float[Array, "B N"]:
    """q of each draft token."""
    if draft.parent is None or draft.log_probs is None:
        return common.draft_probs(draft._replace(parent=None))
    every_q = tuple(
        common.at_nodes(log_probs, draft) for log_probs in (draft.log_probs, *draft.other_log_probs)
    )
    q = jnp.exp(residual_tree.of_source(every_q, draft.sources))
    if draft.draws is None:
        return q
    return jnp.where(_is_fixed(draft), 1.0, q)


def _of_target(draft: Draft, target: Distribution) -> Float[Array, "B N"]:
    """p of each draft token."""
    if target.log_probs is not None:
        if draft.parent is None:
            return common.gather_probs(target.log_probs[:, :-1], draft.tokens)
        return jnp.exp(common.at_nodes(target.log_probs, draft))
    assert target.tokens is not None
    certain = target.tokens[:, :-1]
    if draft.parent is not None:
        certain = jnp.take_along_axis(target.tokens, jnp.maximum(draft.parent, 0), axis=1)
    return (draft.tokens == certain).astype(jnp.float32)


def _entropies(draft: Draft) -> Float[Array, "B N"]:
    """The entropy of the distribution that each draft token was drawn from, over log V; NaN where
    none is kept.
    """
    if draft.aux is not None and "entropy" in draft.aux:
        return draft.aux["entropy"]
    if draft.log_probs is None:
        return jnp.full(draft.tokens.shape, jnp.nan, jnp.float32)
    entropies = [_normalised(log_probs) for log_probs in (draft.log_probs, *draft.other_log_probs)]
    if draft.parent is None:
        return entropies[0]
    entry = jnp.clip(draft.parent, 0, draft.log_probs.shape[1] - 1)
    at_parents = tuple(jnp.take_along_axis(values, entry, axis=1) for values in entropies)
    of_parent = residual_tree.of_source(at_parents, draft.sources)
    if draft.draws is None:
        return of_parent
    return jnp.where(_is_fixed(draft), jnp.nan, of_parent)


def _layers(draft: Draft) -> Float[Array, "B N"]:
    """The target's layers behind each draft token; NaN where a drafter does not say."""
    if draft.aux is not None and "layers" in draft.aux:
        return draft.aux["layers"]
    return jnp.full(draft.tokens.shape, jnp.nan, jnp.float32)


def _is_fixed(draft: Draft) -> Bool[Array, "B N"]:
    assert draft.draws is not None
    return draft.draws == int(Draw.FIXED)
