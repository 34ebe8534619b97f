"""Exact match: a guess is kept if it is what the target itself would have said."""

from __future__ import annotations

import functools

from jaxtyping import Array, Float, Int

from jaxspec.accept.common import Rule, probs_at
from jaxspec.accept.rejection import rejection
from jaxspec.base import Draft, Keys, Law, Verdict


@functools.cache
def exact_match() -> Rule:
    """Keep guesses while they equal the target's own choice: its argmax at temperature 0, otherwise its own sample.

    What is emitted is always the target's choice, so the output has the target's law, whatever the drafter. This is
    what servers do that know no draft probabilities; a guess is kept with probability p(x), where the rejection rule
    keeps it with min(1, p(x) / q(x)).

    To sample t from p and compare it with the guess x is to accept x with probability p(x), and otherwise to draw
    from p without x: the rejection rule (arXiv 2211.17192, Algorithm 1) for a point mass at x. So the rule is that
    one, with the draft's law forgotten, and costs one draw from a vocabulary and not one for each guess. For the
    target's literal own sample, the very token of plain decoding with the same key, see `coupled`.

    Returns:
        A rule (keys, position, draft, target) -> Verdict; see `base.AcceptRule`. With B rows, G guesses and V tokens:
        draft.tokens [B, G], draft.log_probs is not read, target.log_probs [B, G + 1, V] or target.tokens [B, G + 1].

    Example:
        >>> import jax.numpy as jnp
        >>> draft = Draft(jnp.array([[4, 9]]), None, jnp.array([2]))
        >>> verdict = exact_match()(None, None, draft, Law(tokens=jnp.array([[4, 5, 6]])))
        >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
        ([1], [5])
    """

    def judge(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Law) -> Verdict:
        return rejection().judge(keys, position, draft._replace(log_probs=None), target)

    return Rule(judge, "exact_match", exact=True, kept_ratio=kept_ratio)


def kept_ratio(
    log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """p q / p."""
    del log_p
    return probs_at(log_q, tokens)
