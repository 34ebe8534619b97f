"""Lenience (Leviathan et al., arXiv 2211.17192, appendix A.5): more draft tokens are accepted than
exactness allows. Inexact.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Distribution, Draft, Keys, Rule, Trials, Verdict
from jaxspec.core.checks import number
from jaxspec.rules import common
from jaxspec.rules.rejection import rejection, verify_chain, verify_tree
from jaxspec.rules.rejection import trials as rejection_trials


def lenient(lenience: float) -> Rule:
    r"""Inexact: the rejection rule with q scaled down by a lenience l, so that unlikely draft
    tokens are accepted, too.

    Sampling: accept draft token x with probability min(1, p(x) / (l q(x))); at the first rejection
    draw from norm(max(0, p - q)), as ever. A draft token is accepted with probability sum_x
    min(p(x) / l, q(x)). Guarantee: given the text before it, a token has a probability of at most
    p(x) / l (without a lower bound).

    Temperature 0: accept draft token x if p(x) >= l max(p), with p as it is before all its mass
    moves to the argmax; the next token is the argmax. (The paper prints <=, with which l = 1 would
    not be exact match.) Guarantee: no token is emitted whose probability is below l times the
    likeliest token's. This reads the target's logits (`Distribution.logits`); a row at temperature
    0 is judged alike, whatever the temperatures of the others.

    In a tree siblings are tested one after the other, as under `rejection`; at temperature 0 the
    first of them that passes is accepted. Both guarantees hold there, too.

    With l = 1 the rule is `rejection`, and exact.

    Args:
        lenience: l, in (0, 1].

    Returns:
        A rule that also reads target.logits [B, N + 1, V], and with target.log_probs target.greedy
        [B].

    Raises:
        ValueError: a lenience outside (0, 1].

    Example:
        >>> logits = jnp.log(jnp.array([[[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]]]))
        >>> greedy = Distribution(tokens=jnp.array([[0, 0]]), logits=logits)
        >>> draft = Draft(jnp.array([[1]]), jnp.array([1]))
        >>> [
        ...     lenient(l).verify(None, None, draft, greedy).num_accepted.tolist()
        ...     for l in (1.0, 0.6, 0.4)
        ... ]
        [[0], [0], [1]]
        >>> lenient(0.4).exact, lenient(1.0).exact
        (False, True)
    """
    lenience = number(lenience, "lenience", "a number in (0, 1], 1 being none", above=0, at_most=1)
    if lenience == 1:
        return rejection()
    return _lenient(lenience)


@functools.lru_cache
def _lenient(lenience: float) -> Rule:
    def verify(
        keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
    ) -> Verdict:
        if target.tokens is not None:
            if draft.parent is not None:
                parent = common.real_parent(draft)
                count, path = common.follow(parent, near_best(target, draft))
                return common.tree_verdict(
                    parent,
                    count,
                    path,
                    common.take_position(target.tokens, common.last_of(path, count)),
                )
            count = common.count_accepted(near_best(target, draft), draft.length)
            return common.chain_verdict(draft, count, common.take_position(target.tokens, count))
        # Rows of temperature 0 have one-hot distributions, of which no lenience accepts anything
        # more: they compare logits.
        forced = None
        if target.greedy is not None:
            forced = (target.greedy, near_best(target, draft))
        if draft.parent is None:
            verify_draft = verify_chain
        else:
            verify_draft = verify_tree
        return verify_draft(keys, position, draft, target, lenience, forced)

    def near_best(target: Distribution, draft: Draft) -> Bool[Array, "B N"]:
        """p(x) >= l max(p); in logarithms, because small probabilities do not underflow there and
        constants cancel.
        """
        if target.logits is None:
            raise ValueError(
                "this rule reads logits, but the sampler returns none: set Distribution.logits in "
                "it"
            )
        least = jnp.max(target.logits, axis=-1) + math.log(lenience)
        if draft.parent is None:
            chosen = jnp.take_along_axis(target.logits[:, :-1], draft.tokens[..., None], axis=-1)[
                ..., 0
            ]
            return chosen >= least[:, :-1]
        return common.at_nodes(target.logits, draft) >= jnp.take_along_axis(
            least, jnp.maximum(draft.parent, 0), axis=1
        )

    def acceptance_ratio(
        log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"], tokens: Int[Array, "B T"]
    ):
        """min(p / l, q) / p."""
        return jnp.minimum(common.likelihood_ratio(log_p, log_q, tokens), 1 / lenience)

    def trials(
        keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
    ) -> Trials:
        numbers = rejection_trials(keys, position, draft, target, lenience)
        if target.greedy is None:
            return numbers
        # Rows at temperature 0 are judged by their logits, without a draw.
        return Trials(*(jnp.where(target.greedy[:, None], jnp.nan, values) for values in numbers))

    name = f"lenient({lenience:g})"
    facts = {"acceptance_ratio": acceptance_ratio, "lenience": lenience, "trials": trials}
    return Rule(verify, name, exact=False, trees=True, sources=True, **facts)
