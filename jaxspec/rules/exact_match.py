"""Exact match: a draft token is accepted if the target would have generated the same token."""

from __future__ import annotations

import functools

from jaxtyping import Array, Float, Int

from jaxspec.core import Distribution, Draft, Keys, Rule, Trials, Verdict
from jaxspec.rules.common import LogProbRows, gather_probs
from jaxspec.rules.rejection import rejection
from jaxspec.rules.rejection import trials as rejection_trials


@functools.lru_cache
def exact_match() -> Rule:
    """Accept draft tokens while they equal the target's own choice: its argmax at temperature 0,
    otherwise its sample.

    What is emitted is always the target's choice, so the output has the target's distribution,
    whatever the drafter. This is what servers do that know no draft probabilities; a draft token is
    accepted with probability p(x) (siblings with the sum of theirs), where the rejection rule
    accepts it with min(1, p(x) / q(x)).

    To sample t from p and compare it with the draft token x is to accept x with probability p(x),
    and otherwise to draw from p without x: the rejection rule (arXiv 2211.17192, Algorithm 1) for a
    point mass at x. So the rule is that one, without the draft's distributions, and costs one draw
    from a vocabulary and not one for each draft token. For the target's literal own sample, the
    very token of plain decoding with the same key, see `coupled`.

    Returns:
        A rule that does not read `draft.log_probs`.

    Example:
        >>> import jax.numpy as jnp
        >>> draft = Draft(jnp.array([[4, 9]]), jnp.array([2]))
        >>> verdict = exact_match().verify(
        ...     None, None, draft, Distribution(tokens=jnp.array([[4, 5, 6]]))
        ... )
        >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
        ([1], [5])
    """

    def verify(
        keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
    ) -> Verdict:
        return rejection().verify(keys, position, _as_point_masses(draft), target)

    def trials(
        keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
    ) -> Trials:
        return rejection_trials(keys, position, _as_point_masses(draft), target)

    facts = {"acceptance_ratio": acceptance_ratio, "trials": trials}
    return Rule(verify, "exact_match", exact=True, trees=True, sources=True, **facts)


def _as_point_masses(draft: Draft) -> Draft:
    return draft._replace(log_probs=None, draws=None, sources=None, other_log_probs=())


def acceptance_ratio(
    log_p: LogProbRows, log_q: LogProbRows, tokens: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """p q / p."""
    return gather_probs(log_q, tokens)
