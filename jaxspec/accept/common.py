"""What acceptance rules share: the type they return, laws at the guesses, the residual.

Axis letters as in `jaxspec.base`: B batch, G gamma, V vocabulary; T is any number of positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import noise
from jaxspec.base import AcceptRule, Draft, Keys, Law, Verdict

# float32 sums of a residual that is exactly zero come out near 1e-7; a true residual this small is never reached,
# because its mass is the probability of getting there.
NOTHING = 1e-6
LARGEST = 80.0  # of a logarithm whose exponential float32 holds

# (log_p [B, T, V], log_q [B, T, V], tokens [B, T]) -> [B, T]
KeptRatio = Callable[[Float[Array, "B T V"], Float[Array, "B T V"], Int[Array, "B T"]], Float[Array, "B T"]]


class Rule(NamedTuple):
    """An acceptance rule that says what it is; it is called like any other `base.AcceptRule`.

    Attributes:
        judge: what decides.
        name: what it is called, with its parameters.
        exact: whether the text has the target's law whatever the drafter does; if not, the docstring of the rule's
            factory says what is guaranteed instead.
        plain_noise: whether guesses drawn with plain sampling's own noise are accepted more often.
        reads_soft: whether it reads `Law.soft`, and so must be given it.
        kept_ratio: of each token x of a text, the probability that x is guessed and kept, over p(x), so that products
            of it say how many guesses are kept (see `analysis.replay`); None where that is not known. Under a rule
            that judges guesses together their probabilities multiply before they are cut.

    >>> rule = Rule(lambda keys, position, draft, target: match(draft, target.tokens), "mine", exact=True)
    >>> draft = Draft(jnp.array([[4, 9]]), None, jnp.array([2]))
    >>> rule(None, None, draft, Law(tokens=jnp.array([[4, 5, 6]]))).num_accepted.tolist()
    [1]
    """

    judge: AcceptRule
    name: str
    exact: bool
    plain_noise: bool = False
    reads_soft: bool = False
    kept_ratio: KeptRatio | None = None

    def __call__(self, keys: Keys, position: Int[Array, " B"], draft: Draft, target: Law) -> Verdict:
        return self.judge(keys, position, draft, target)


def count_accepted(accepted: Bool[Array, "B G"], length: Int[Array, " B"]) -> Int[Array, " B"]:
    """How many guesses precede the first that is not accepted, or not real.

    >>> count_accepted(jnp.array([[True, False, True], [True, True, True]]), jnp.array([3, 2])).tolist()
    [1, 2]
    """
    real = jnp.arange(accepted.shape[1], dtype=length.dtype)[None, :] < length[:, None]
    run = jnp.cumprod(jnp.logical_and(accepted, real).astype(length.dtype), axis=1)
    return jnp.sum(run, axis=1).astype(length.dtype)


def match(draft: Draft, tokens: Int[Array, "B G+1"]) -> Verdict:
    """Guesses are kept while they are the given tokens; what every rule comes to where the target's law is certain.

    >>> match(Draft(jnp.array([[4, 9, 6]]), None, jnp.array([3])), jnp.array([[4, 5, 6, 7]]))._asdict()
    {'num_accepted': Array([1], dtype=int32), 'next_token': Array([5], dtype=int32)}
    """
    count = count_accepted(draft.tokens == tokens[:, :-1], draft.length)
    return Verdict(count, pick(tokens, count))


def residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """max(p - q, 0), unnormalised; p itself where that is (nearly) nothing, and so where q is 0 (the bonus token).

    >>> residual(jnp.array([[0.5, 0.5]]), jnp.array([[0.25, 0.75]])).tolist()
    [[0.25, 0.0]]
    """
    left = jnp.maximum(p - q, 0.0)
    return jnp.where(jnp.sum(left, axis=-1, keepdims=True) > NOTHING, left, p)


def draw(keys: Keys, position: Int[Array, " B"], log_probs: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The token after the kept guesses, from a law that need not be normalised."""
    return noise.categorical(noise.at(keys, position, noise.Purpose.RESIDUAL), log_probs)


def coins(keys: Keys, position: Int[Array, " B"], draft: Draft) -> Float[Array, "B G"]:
    """A uniform draw for each guess; fresh each round, since `position` only grows."""
    return noise.uniform(noise.at(keys, position, noise.Purpose.COIN), draft.tokens.shape[1])


def probs_of(draft: Draft) -> Float[Array, "B G"]:
    """q(x) of each guess; 1 if the proposal is deterministic."""
    if draft.log_probs is None:
        return jnp.ones(draft.tokens.shape, jnp.float32)
    return probs_at(draft.log_probs, draft.tokens)


def proposals(draft: Draft, vocab: int) -> Float[Array, "B G V"]:
    """q at each guess; one-hot if the proposal is deterministic."""
    if draft.log_probs is None:
        return (jnp.arange(vocab)[None, None, :] == draft.tokens[..., None]).astype(jnp.float32)
    return jnp.exp(draft.log_probs)


def proposal_at(draft: Draft, count: Int[Array, " B"], vocab: int) -> Float[Array, "B V"]:
    """q at the first rejected guess; 0 where all real guesses were accepted, so that the residual is p."""
    gamma = draft.tokens.shape[1]
    if gamma == 0:
        return jnp.zeros((draft.tokens.shape[0], vocab), jnp.float32)
    index = jnp.minimum(count, gamma - 1)
    if draft.log_probs is None:
        q = (jnp.arange(vocab)[None, :] == pick(draft.tokens, index)[:, None]).astype(jnp.float32)
    else:
        q = jnp.exp(pick(draft.log_probs, index))
    return jnp.where((count < draft.length)[:, None], q, 0.0)


def pick(rows: Array, index: Int[Array, " B"]) -> Array:
    """rows[b, index[b]] for each b."""
    index = index.reshape(-1, *([1] * (rows.ndim - 1)))
    return jnp.take_along_axis(rows, index, axis=1)[:, 0]


def probs_at(log_probs: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The probability of one token at each position."""
    return jnp.exp(jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0])


def likelihood_ratio(
    log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """q(x) / p(x) of each token; 0 where p(x) is 0.

    >>> p, q = jnp.log(jnp.array([[[0.5, 0.5, 0.0]] * 2])), jnp.log(jnp.array([[[0.25, 0.25, 0.5]] * 2]))
    >>> likelihood_ratio(p, q, jnp.array([[1, 2]])).tolist()
    [[0.5, 0.0]]
    """
    p, q = (jnp.take_along_axis(law, tokens[..., None], axis=-1)[..., 0] for law in (log_p, log_q))
    possible = p > -jnp.inf
    return jnp.where(possible, jnp.exp(jnp.minimum(q - jnp.where(possible, p, 0.0), LARGEST)), 0.0)
