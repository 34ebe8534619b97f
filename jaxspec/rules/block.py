"""Block verification (Sun et al., ICLR 2025, arXiv 2403.10444): the draft tokens of a round are
judged together.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import Distribution, Draft, Keys, Rule, Trials, Verdict
from jaxspec.rules import common


@functools.lru_cache
def block() -> Rule:
    r"""Accept the longest prefix that passes, where prefixes are tested by the ratio of their joint
    probabilities.

    The joint ratio is r_0 = 1, r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i)). Of n real draft tokens,
    each prefix of i < n passes its test, a uniform draw, with probability

        h_i = s_i / (s_i + 1 - r_i),    s_i = sum_x max(0, r_i p_{i+1}(x) - q_{i+1}(x)),

    and all n pass with probability h_n = r_n. The *last* passing prefix is accepted, even if
    shorter ones failed. The next token is drawn from norm(max(0, r_i p_{i+1} - q_{i+1})), or from
    p_{n+1} if i = n. So at least i draft tokens are accepted with probability r_i, which makes the
    output exactly the target's distribution. No other rule that looks at one draft accepts more
    draft tokens in expectation. The rejection rule's probabilities are products of min(1, p / q),
    at most r_i.

    Verdicts depend on draft tokens after the accepted ones. So all draws must be fresh each round,
    as `noise.at` makes them from a row's length. With deterministic proposals the rule gains
    nothing over `rejection`.

    Example:
        The published toy: p = (1/3, 2/3) and q = (2/3, 1/3) at every position, and two draft
        tokens, "a b". The first is as likely as not to be accepted by itself, but together they are
        as likely under p as under q: both are accepted.

        >>> import jax
        >>> from jaxspec.core import noise
        >>> p, q = (jnp.log(jnp.array(x)) for x in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
        >>> draft = Draft(jnp.array([[0, 1]]), jnp.array([2]), log_probs=jnp.stack([q, q])[None])
        >>> target = Distribution(log_probs=jnp.stack([p, p, p])[None])
        >>> [round(h, 3) for h in pass_probability(draft, target)[0].tolist()]
        [0.0, 1.0]
        >>> block().verify(
        ...     noise.row_keys(jax.random.key(0), 1), jnp.array([5]), draft, target
        ... ).num_accepted.tolist()
        [2]
    """
    return common.rule_of(
        "block", verify_chain, acceptance_ratio=common.likelihood_ratio, trials=trials
    )


def verify_chain(
    keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
) -> Verdict:
    """Judges a chain as a whole."""
    assert target.log_probs is not None
    draft = sound(draft)
    # Each prefix has a test of its own. The longest that passes is accepted, though shorter ones
    # may have failed.
    passed = common.uniforms(keys, position, draft) < pass_probability(draft, target)
    prefix = jnp.arange(1, draft.tokens.shape[1] + 1, dtype=draft.length.dtype)[None, :]
    count = jnp.max(jnp.where(passed, prefix, 0), axis=1, initial=0).astype(draft.length.dtype)
    ratio = jnp.pad(joint_ratio(draft, target), ((0, 0), (1, 0)), constant_values=1.0)
    p = jnp.exp(common.take_position(target.log_probs, count))
    q = common.draft_distribution_at(draft, count, p.shape[-1])
    # The residual after a prefix of ratio r is max(r p - q, 0): r = 1 after none is the rejection
    # rule's.
    residual = common.residual(common.take_position(ratio, count)[:, None] * p, q)
    return common.chain_verdict(
        draft, count, common.sample_residual(keys, position, jnp.log(residual))
    )


def trials(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution) -> Trials:
    """The numbers by which `verify_chain` judges: each draft token has the numbers of the prefix
    that ends with it.

    The residual after the prefix before it is max(r p - q, 0), where r is that prefix's joint
    ratio.
    """
    assert target.log_probs is not None
    log_p = target.log_probs[:, :-1]
    u = common.uniforms(keys, position, draft)
    draft = sound(draft)
    ratio = jnp.pad(joint_ratio(draft, target), ((0, 0), (1, 0)), constant_values=1.0)[:, :-1]
    difference = ratio[..., None] * jnp.exp(log_p) - common.draft_distributions(
        draft, log_p.shape[-1]
    )
    mass = jnp.sum(jnp.maximum(difference, 0.0), axis=-1)
    return Trials(u, pass_probability(draft, target), mass)


def sound(draft: Draft) -> Draft:
    """Ends each row's draft before its first token that the drafter's distribution excludes (a
    distribution of NaN, for example).
    """
    return draft._replace(length=common.count_accepted(common.draft_probs(draft) > 0, draft.length))


def joint_ratio(draft: Draft, target: Distribution) -> Float[Array, "B G"]:
    """r_1 .. r_G of `block`: how much likelier each prefix is under p than under q, cut at 1 on the
    way.
    """
    assert target.log_probs is not None
    p = common.gather_probs(target.log_probs[:, :-1], draft.tokens)
    q = common.draft_probs(draft)
    ratio = jnp.ones(q.shape[:1], q.dtype)
    ratios = []
    for i in range(q.shape[1]):
        ratio = jnp.minimum(ratio * p[:, i] / q[:, i], 1.0)
        ratios.append(ratio)
    if ratios:
        return jnp.stack(ratios, axis=1)
    return q


def pass_probability(draft: Draft, target: Distribution) -> Float[Array, "B G"]:
    """h_1 .. h_G of `block`; 0 after a row's real draft tokens."""
    assert target.log_probs is not None
    ratio = joint_ratio(draft, target)
    length = draft.length[:, None]
    following = (
        jnp.exp(target.log_probs[:, 1:-1]) * ratio[:, :-1, None]
        - common.draft_distributions(draft, target.log_probs.shape[-1])[:, 1:]
    )
    mass = jnp.pad(
        jnp.sum(jnp.maximum(following, 0.0), axis=-1), ((0, 0), (0, min(1, ratio.shape[1])))
    )
    total = mass + 1.0 - ratio
    # Nothing over nothing: what follows has one distribution under both, and longer prefixes pass
    # as surely as this one.
    inner = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)
    prefix = jnp.arange(1, ratio.shape[1] + 1, dtype=draft.length.dtype)[None, :]
    return jnp.where(prefix < length, inner, jnp.where(prefix == length, ratio, 0.0))
