"""Draft tokens that the drafter is sure of are not judged (Leviathan et al., arXiv 2211.17192,
footnote 4). Inexact.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.core import Distribution, Draft, Keys, Rule, Verdict
from jaxspec.core.checks import number
from jaxspec.rules.rejection import rejection


def trusting(threshold: float) -> Rule:
    """Inexact: accept draft token x unseen if q(x) >= threshold; judge the others by rejection.

    Footnote 4 of the paper: where a calibrated predictor is sure enough, the target need not be
    asked. With `drafters.early_exit` this is confident adaptive language modelling (CALM, Schuster
    et al., arXiv 2207.07061), whose texts come from an early layer where that is sure. Here the
    target is asked all the same, in the pass that verifies the other tokens. So the rule measures
    what such a shortcut does to the text, and its speed is a lower bound.

    Guarantee: none. A token of any probability p(x) above 0 passes, if the drafter is sure of it. A
    token that the target's truncation leaves out (top_k, top_p) does not pass.

    A draft token without a distribution (a look-up's) has no q(x), and is judged by rejection. At
    temperature 0 no draft token has one, so such rows are refused (`Rule.needs_sampling`).

    Args:
        threshold: from above 0 to 1. Above every q(x) the rule is `rejection`.

    Raises:
        ValueError: a threshold outside (0, 1].

    Example:
        >>> import jax
        >>> from jaxspec.core import noise
        >>> p, q = jnp.log(jnp.array([[[0.01, 0.99]] * 2])), jnp.log(jnp.array([[[0.9, 0.1]]]))
        >>> draft = Draft(jnp.array([[0]]), jnp.array([1]), log_probs=q)
        >>> arguments = (
        ...     noise.row_keys(jax.random.key(0), 1),
        ...     jnp.array([3]),
        ...     draft,
        ...     Distribution(log_probs=p),
        ... )
        >>> [trusting(t).verify(*arguments).num_accepted.tolist() for t in (0.8, 0.95)]
        [[1], [0]]
    """
    return _trusting(number(threshold, "threshold", "a number in (0, 1]", above=0, at_most=1))


@functools.lru_cache
def _trusting(threshold: float) -> Rule:
    def verify(
        keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
    ) -> Verdict:
        judge = rejection().verify
        if draft.log_probs is None or target.tokens is not None:
            return judge(keys, position, draft, target)
        tokens = draft.tokens[..., None]
        is_trusted = jnp.take_along_axis(draft.log_probs, tokens, axis=-1) >= math.log(threshold)
        # With q(x) = 0 the rejection rule accepts x. What a rejected token leaves over does not
        # change: such a token was not trusted, and its q stays.
        is_drafted = (
            jnp.arange(draft.log_probs.shape[-1], dtype=tokens.dtype)[None, None, :] == tokens
        )
        log_q = jnp.where(is_drafted & is_trusted, -jnp.inf, draft.log_probs)
        return judge(keys, position, draft._replace(log_probs=log_q), target)

    return Rule(verify, f"trusting({threshold:g})", exact=False, needs_sampling=True)
