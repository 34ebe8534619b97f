"""Helpers of acceptance rules: uniform draws, probabilities of draft tokens, the residual, matching
against tokens.

Axis letters as in `jaxspec.core`: B batch, G draft tokens of a chain, N nodes of a tree, V
vocabulary, T any number of positions.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import (
    Distribution,
    Draft,
    Keys,
    Rule,
    Trials,
    TrialsOf,
    Verdict,
    Verify,
    noise,
    tree,
)

# float32 sums of a residual that is exactly zero come out near 1e-7; a true residual this small is
# never reached, because its mass is the probability of getting there.
MIN_MASS = 1e-6
LARGEST = 80.0  # of a logarithm whose exponential float32 holds

LogProbRows = Float[Array, "B T V"]
"""Log probabilities of every token at each of some positions."""


def is_real(draft: Draft) -> Bool[Array, "B N"]:
    """Says which draft tokens of each row are real, and not padding."""
    return (
        jnp.arange(draft.tokens.shape[1], dtype=draft.length.dtype)[None, :] < draft.length[:, None]
    )


def rule_of(name: str, chain: Verify, tree: Verify | None = None, **facts: Any) -> Rule:
    """Makes a rule of how it judges chains and trees; None: it refuses trees. If the target is
    certain, it matches.

    Args:
        name: the rule's name.
        chain, tree: they judge drafts by `Distribution.log_probs`.
        facts: the other fields of `core.Rule`; a rule is exact unless they say otherwise.
    """

    def verify(
        keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
    ) -> Verdict:
        judge = chain if draft.parent is None else tree
        if judge is None:
            raise ValueError(
                f"the rule {name} judges chains only, and got a tree: use rules.rejection() or "
                "rules.traversal(), or another rule with Rule.trees"
            )
        if draft.other_log_probs and not facts.get("sources"):
            raise ValueError(
                f"the rule {name} judges children of one distribution only, and got a tree whose "
                f"nodes were drawn from {1 + len(draft.other_log_probs)}: use rules.rejection() or "
                "rules.traversal(), or another rule with Rule.sources"
            )
        if target.tokens is not None:
            return exact_match(draft, target.tokens)
        return judge(keys, position, draft, target)

    return Rule(verify, name, **{"exact": True, "trees": tree is not None, **facts})


def of_chains(trials: TrialsOf) -> TrialsOf:
    """Makes the trials of a rule that judges trees jointly, without a test for each node: NaN
    there.
    """

    def trials_of(
        keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
    ) -> Trials:
        if draft.parent is None:
            return trials(keys, position, draft, target)
        return no_trials(draft)

    return trials_of


def no_trials(draft: Draft) -> Trials:
    """The trials of a draft whose tokens are judged without numbers: NaN."""
    not_numbers = jnp.full(draft.tokens.shape, jnp.nan, jnp.float32)
    return Trials(not_numbers, not_numbers, not_numbers)


def count_accepted(accepted: Bool[Array, "B G"], length: Int[Array, " B"]) -> Int[Array, " B"]:
    """Counts the draft tokens of a chain that precede the first that is not accepted, or not real.

    >>> count_accepted(
    ...     jnp.array([[True, False, True], [True, True, True]]), jnp.array([3, 2])
    ... ).tolist()
    [1, 2]
    """
    real = jnp.arange(accepted.shape[1], dtype=length.dtype)[None, :] < length[:, None]
    run = jnp.cumprod((accepted & real).astype(length.dtype), axis=1)
    return jnp.sum(run, axis=1).astype(length.dtype)


def chain_verdict(draft: Draft, count: Int[Array, " B"], next_token: Int[Array, " B"]) -> Verdict:
    """Makes the verdict on a chain whose first `count` tokens are accepted: these were tested, and
    the next one.
    """
    return Verdict(count, next_token, jnp.minimum(count + 1, draft.length))


def exact_match(draft: Draft, tokens: Int[Array, "B N+1"]) -> Verdict:
    """Accepts draft tokens while they are the given ones. Every rule does this if the target is
    certain.

    Args:
        draft: a chain or a tree.
        tokens: the token that must follow each fed token.

    >>> chain = Draft(jnp.array([[4, 9, 6]]), jnp.array([3]))
    >>> verdict = exact_match(chain, jnp.array([[4, 5, 6, 7]]))
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist(), verdict.num_tested.tolist()
    ([1], [5], [2])
    >>> fork = Draft(jnp.array([[9, 4, 5]]), jnp.array([3]), parent=jnp.array([[0, 0, 2]]))
    >>> verdict = exact_match(fork, jnp.array([[4, 0, 5, 7]]))
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist(), verdict.path[:, :2].tolist()
    ([2], [7], [[1, 2]])
    """
    if draft.parent is None:
        count = count_accepted(draft.tokens == tokens[:, :-1], draft.length)
        return chain_verdict(draft, count, take_position(tokens, count))
    parent = real_parent(draft)
    parent_tokens = jnp.take_along_axis(tokens, jnp.maximum(parent, 0), axis=1)
    count, path = follow(parent, draft.tokens == parent_tokens)
    return tree_verdict(parent, count, path, take_position(tokens, last_of(path, count)))


def real_parent(draft: Draft) -> Int[Array, "B N"]:
    """`Draft.parent` of a tree, -1 for padding."""
    assert draft.parent is not None
    return jnp.where(is_real(draft), draft.parent, -1)


def at_nodes(values: Float[Array, "B T V"], draft: Draft) -> Float[Array, "B N"]:
    """Reads for each node of a tree the value of its token at its parent: its probability there, of
    log probabilities.

    >>> star = Draft(jnp.array([[2, 0]]), jnp.array([2]), parent=jnp.array([[0, 1]]))
    >>> at_nodes(jnp.array([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]]), star).tolist()
    [[3.0, 4.0]]
    """
    assert draft.parent is not None
    row = jnp.arange(len(draft.tokens), dtype=jnp.int32)[:, None]
    return values.at[row, jnp.maximum(draft.parent, 0), draft.tokens].get(mode="clip")


def follow(
    parent: Int[Array, "B N"], passes: Bool[Array, "B N"]
) -> tuple[Int[Array, " B"], Int[Array, "B N"]]:
    """Finds the path from the last committed token whose nodes are each the first sibling that
    passes.

    Returns:
        As `tree.path_of`.

    >>> count, path = follow(
    ...     jnp.array([[0, 0, 1, 2, 2]]), jnp.array([[False, True, True, True, True]])
    ... )
    >>> count.tolist(), path[:, :2].tolist()
    ([2], [[1, 3]])
    """
    # [B, N, N]: the siblings of each node that pass; the eldest of them is the one that is
    # followed.
    siblings = (parent[:, :, None] == parent[:, None, :]) & passes[:, None, :]
    elder = jnp.any(siblings & jnp.tri(parent.shape[1], k=-1, dtype=bool)[None], axis=-1)
    return tree.path_of(parent, passes & ~elder)


def tree_verdict(
    parent: Int[Array, "B N"],
    count: Int[Array, " B"],
    path: Int[Array, "B N"],
    next_token: Int[Array, " B"],
) -> Verdict:
    """Makes the verdict on a tree from its accepted path.

    Siblings are tested in order, up to the one that is accepted; all children of the last node are.
    """
    last = last_of(path, count)
    # The fed token that each step of the path began at: 0, then the accepted nodes.
    current = jnp.concatenate([jnp.zeros_like(path[:, :1]), path[:, :-1] + 1], axis=1)
    step = jnp.arange(path.shape[1], dtype=count.dtype)[None, :]
    visited = (parent[:, :, None] == current[:, None, :]) & (step < count[:, None])[:, None, :]
    before = jnp.arange(parent.shape[1], dtype=path.dtype)[None, :, None] <= path[:, None, :]
    tested = jnp.any(visited & before, axis=-1) | (parent == last[:, None])
    return Verdict(count, next_token, jnp.sum(tested, axis=1, dtype=count.dtype), path)


def last_of(path: Int[Array, "B N"], count: Int[Array, " B"]) -> Int[Array, " B"]:
    """The fed token at the end of a path: 0 where nothing was accepted.

    >>> last_of(jnp.array([[1, 3, 0], [2, 0, 1]]), jnp.array([2, 0])).tolist()
    [4, 0]
    """
    node = take_position(path, jnp.maximum(count - 1, 0)) + 1
    return jnp.where(count > 0, node, 0)


def residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """max(p - q, 0), unnormalised; p itself where that is (nearly) nothing, and so where q is 0
    (the bonus token).

    >>> residual(jnp.array([[0.5, 0.5]]), jnp.array([[0.25, 0.75]])).tolist()
    [[0.25, 0.0]]
    """
    difference = jnp.maximum(p - q, 0.0)
    return jnp.where(jnp.sum(difference, axis=-1, keepdims=True) > MIN_MASS, difference, p)


def sample_residual(
    keys: Keys, position: Int[Array, " B"], log_probs: Float[Array, "B V"]
) -> Int[Array, " B"]:
    """The token after the accepted draft tokens, from a distribution that need not be
    normalised.
    """
    return noise.categorical(noise.at(keys, position, noise.Purpose.RESIDUAL), log_probs)


def uniforms(keys: Keys, position: Int[Array, " B"], draft: Draft) -> Float[Array, "B N"]:
    """A uniform draw for each draft token; fresh each round, since `position` only grows."""
    return noise.uniform(noise.at(keys, position, noise.Purpose.ACCEPT), draft.tokens.shape[1])


def probability_of_passing(
    p: Float[Array, "*shape"], q: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The probability that u q < p for a uniform draw u: min(1, p / q), 0 where p is 0.

    >>> probability_of_passing(jnp.array([0.25, 0.5, 0.0]), jnp.array([0.5, 0.0, 0.0])).tolist()
    [0.5, 1.0, 0.0]
    """
    certain = p >= q
    return jnp.where(certain, (p > 0).astype(p.dtype), p / jnp.where(certain, 1.0, q))


def draft_probs(draft: Draft) -> Float[Array, "B G"]:
    """q(x) of each token of a chain; 1 if the proposal is deterministic."""
    if draft.log_probs is None:
        return jnp.ones(draft.tokens.shape, jnp.float32)
    return gather_probs(draft.log_probs, draft.tokens)


def draft_distributions(draft: Draft, vocab: int) -> Float[Array, "B G V"]:
    """q at each token of a chain; one-hot if the proposal is deterministic."""
    if draft.log_probs is None:
        return (jnp.arange(vocab)[None, None, :] == draft.tokens[..., None]).astype(jnp.float32)
    return jnp.exp(draft.log_probs)


def draft_distribution_at(draft: Draft, count: Int[Array, " B"], vocab: int) -> Float[Array, "B V"]:
    """q at a chain's first rejected token; 0 where all real ones were accepted, so that the
    residual is p.
    """
    gamma = draft.tokens.shape[1]
    if gamma == 0:
        return jnp.zeros((draft.tokens.shape[0], vocab), jnp.float32)
    index = jnp.minimum(count, gamma - 1)
    if draft.log_probs is None:
        # A deterministic draft is a point mass on its token.
        q = (jnp.arange(vocab)[None, :] == take_position(draft.tokens, index)[:, None]).astype(
            jnp.float32
        )
    else:
        q = jnp.exp(take_position(draft.log_probs, index))
    return jnp.where((count < draft.length)[:, None], q, 0.0)


def take_position(rows: Array, index: Int[Array, " B"]) -> Array:
    """rows[b, index[b]] for each b."""
    index = index.reshape(-1, *([1] * (rows.ndim - 1)))
    return jnp.take_along_axis(rows, index, axis=1)[:, 0]


def gather_probs(
    log_probs: Float[Array, "B T V"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """The probability of one token at each position."""
    return jnp.exp(jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0])


def likelihood_ratio(
    log_p: LogProbRows, log_q: LogProbRows, tokens: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """q(x) / p(x) of each token; 0 where p(x) is 0.

    >>> p, q = (
    ...     jnp.log(jnp.array([[[0.5, 0.5, 0.0]] * 2])),
    ...     jnp.log(jnp.array([[[0.25, 0.25, 0.5]] * 2])),
    ... )
    >>> likelihood_ratio(p, q, jnp.array([[1, 2]])).tolist()
    [[0.5, 0.0]]
    """
    p, q = (
        jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
        for log_probs in (log_p, log_q)
    )
    possible = p > -jnp.inf
    return jnp.where(possible, jnp.exp(jnp.minimum(q - jnp.where(possible, p, 0.0), LARGEST)), 0.0)
