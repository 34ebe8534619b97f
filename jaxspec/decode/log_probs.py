"""Log probabilities of the tokens that a decoder commits; see `core.LogProbs`.

They are read off the passes that a generation makes anyway: the target's logits after the fed token that a committed
one follows are what teacher forcing would compute there. A state that has no buffers for them costs nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxspec.core import Distribution, Forward, LogProbs, State, Verdict, noise, token_rows
from jaxspec.core.round import fed_before


def empty(batch: int, capacity: int, top: int) -> LogProbs:
    """Buffers for `capacity` new tokens of each row, and the `top` most probable ones beside each."""
    zero, best = jnp.zeros((batch, capacity)), jnp.zeros((batch, capacity, top))
    return LogProbs(zero, zero, best.astype(jnp.int32), best)


def record(
    state: State,
    committed: Int[Array, " B"],
    new: Int[Array, "B step"],
    forward: Forward,
    distribution: Distribution,
    verdict: Verdict | None = None,
) -> State:
    """Writes the log probabilities of what was just committed, if the state has buffers for them.

    Args:
        state: after `state.commit`.
        committed: how many of the new tokens were committed; nothing is kept of the others.
        new: as they were given to `state.commit`.
        forward, distribution: the target's outputs at each position of its pass.
        verdict: of a round. None where there was one position and one token.
    """
    if state.log_probs is None:
        return state
    at = None if verdict is None else fed_before(verdict, new.shape[1] - 1)
    values = of_tokens(new, forward, distribution, state.log_probs.top_tokens.shape[-1], at)
    is_kept = jnp.arange(new.shape[1], dtype=committed.dtype)[None, :] < committed[:, None]
    first = state.length - state.start - committed

    kept = (jnp.where(_like(is_kept, x), x, jnp.zeros_like(x)) for x in values)
    written = (token_rows.append(buffer, first, new) for buffer, new in zip(state.log_probs, kept, strict=True))
    return state._replace(log_probs=LogProbs(*written))


def of_tokens(
    tokens: Int[Array, "B step"],
    forward: Forward,
    distribution: Distribution,
    top: int,
    at: Int[Array, "B step"] | None = None,
) -> LogProbs:
    """Reads off the log probabilities of tokens, each after its position of a pass.

    Args:
        tokens: any.
        forward, distribution: the target's outputs at each position.
        top: how many of the most probable tokens to report.
        at: the position that each token follows; None: 0, 1, 2, ...

    >>> logits = jnp.log(jnp.array([[[0.25, 0.5, 0.25]]]))
    >>> report = of_tokens(jnp.array([[2]]), Forward(logits, None), Distribution(tokens=jnp.array([[1]])), top=1)
    >>> [jnp.exp(x).round(3).tolist() for x in (report.raw, report.sampled, report.top_raw)]
    [[[0.25]], [[0.0]], [[[0.5]]]]
    """

    def at_position(outputs: Shaped[Array, "B T *k"]) -> Shaped[Array, "B step *k"]:
        return outputs if at is None else jnp.take_along_axis(outputs, _like(at, outputs), axis=1, mode="clip")

    def of_token(log_probs: Shaped[Array, "B step V"]) -> Shaped[Array, "B step"]:
        return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1, mode="clip")[..., 0]

    raw = jax.nn.log_softmax(at_position(forward.logits).astype(jnp.float32), axis=-1)
    best = noise.largest(raw, top)
    if distribution.tokens is not None:  # a point mass
        sampled = jnp.where(at_position(distribution.tokens) == tokens, 0.0, -jnp.inf)
    else:
        assert distribution.log_probs is not None
        sampled = of_token(at_position(distribution.log_probs))
    return LogProbs(of_token(raw), sampled, best, jnp.take_along_axis(raw, best, axis=-1))


def forget_cut(state: State) -> State:
    """Clears what follows each row's end, for whoever has moved that to the front."""
    if state.log_probs is None:
        return state
    place = jnp.arange(state.log_probs.raw.shape[1], dtype=state.length.dtype)
    is_kept = place[None, :] < (state.length - state.start)[:, None]
    kept = (jnp.where(_like(is_kept, x), x, jnp.zeros_like(x)) for x in state.log_probs)
    return state._replace(log_probs=LogProbs(*kept))


def window(log_probs: LogProbs | None, start: int, end: int) -> LogProbs | None:
    """Takes the log probabilities of the tokens from `start` to `end`, if there are any."""
    return log_probs if log_probs is None else LogProbs(*(x[:, start:end] for x in log_probs))


def _like(of_step: Shaped[Array, "B step"], values: Shaped[Array, "B T *k"]) -> Shaped[Array, "B step *1"]:
    return of_step if values.ndim == 2 else of_step[..., None]
