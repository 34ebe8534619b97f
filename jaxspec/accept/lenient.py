"""Lenience (Leviathan et al., arXiv 2211.17192, appendix A.5): more guesses are kept than exactness allows. Inexact."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.accept.common import Rule, coins, count_accepted, likelihood_ratio, match, pick, probs_at, probs_of
from jaxspec.accept.rejection import after
from jaxspec.base import Draft, Keys, Law, Verdict


@functools.cache
def lenient(lenience: float) -> Rule:
    r"""Inexact: the rejection rule with q scaled down by a lenience l, so that unlikely guesses are kept, too.

    Sampling: keep guess x with probability min(1, p(x) / (l q(x))); at the first rejection draw from
    norm(max(0, p - q)), as ever. A guess is kept with probability sum_x min(p(x) / l, q(x)).
    Guarantee: given what precedes it, no token has a probability above p(x) / l (there is no lower bound).

    Temperature 0: keep guess x if p(x) >= l max(p), with p as it is before all its mass moves to the argmax; the next
    token is the argmax. (The paper prints <=, with which l = 1 would not be exact match.)
    Guarantee: no token is emitted whose probability is below l times the likeliest token's.
    For this the target's law must say what p is (`Law.soft`), as it does in `jaxspec.generate`; a row at temperature 0
    is judged alike, whatever the temperatures of the others. Under a warp without (see `warp.greedy` and
    `warp.sampling`) a certain law has no room for lenience: the rule is exact match.

    With l = 1 the rule is `rejection`, and exact.

    Args:
        lenience: l, in (0, 1].

    Returns:
        A rule (keys, position, draft, target) -> Verdict; see `base.AcceptRule`. With B rows, G guesses and V tokens:
        draft.tokens [B, G], draft.log_probs [B, G, V] or None, target.log_probs [B, G + 1, V] or target.tokens
        [B, G + 1], perhaps target.soft [B, G + 1, V], and beside target.log_probs then target.greedy [B].

    Raises:
        ValueError: a lenience outside (0, 1].

    Example:
        >>> soft = jnp.log(jnp.array([[[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]]]))
        >>> greedy, draft = Law(tokens=jnp.array([[0, 0]]), soft=soft), Draft(jnp.array([[1]]), None, jnp.array([1]))
        >>> [lenient(l)(None, None, draft, greedy).num_accepted.tolist() for l in (1.0, 0.6, 0.4)]
        [[0], [0], [1]]
        >>> lenient(0.4).exact, lenient(1.0).exact
        (False, True)
    """
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience is {lenience}: expected a number in (0, 1], 1 being none")

    def judge(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Law) -> Verdict:
        if target.tokens is not None:
            if target.soft is None or lenience == 1:
                return match(draft, target.tokens)
            count = count_accepted(near_best(target.soft[:, :-1], draft.tokens), draft.length)
            return Verdict(count, pick(target.tokens, count))
        assert target.log_probs is not None
        scaled = coins(keys, position, draft) * (lenience * probs_of(draft))
        accepted = scaled < probs_at(target.log_probs[:, :-1], draft.tokens)
        if target.soft is not None and target.greedy is not None and lenience < 1:
            accepted = jnp.where(target.greedy[:, None], near_best(target.soft[:, :-1], draft.tokens), accepted)
        count = count_accepted(accepted, draft.length)
        return Verdict(count, after(keys, position, draft, target, count))

    def near_best(soft: Float[Array, "B G V"], tokens: Int[Array, "B G"]):
        """p(x) >= l max(p); in logarithms, where small probabilities are no zeros, and constants do not matter."""
        guess = jnp.take_along_axis(soft, tokens[..., None], axis=-1)[..., 0]
        return guess >= jnp.max(soft, axis=-1) + math.log(lenience)

    def kept_ratio(log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"], tokens: Int[Array, "B T"]):
        """min(p / l, q) / p."""
        return jnp.minimum(likelihood_ratio(log_p, log_q, tokens), 1 / lenience)

    name = f"lenient({lenience:g})"
    return Rule(judge, name, exact=lenience == 1, reads_soft=lenience < 1, kept_ratio=kept_ratio)
