"""Log probabilities of the tokens that a decoder commits; see `core.LogProbs`.

They are read off the passes that a generation makes anyway: the target's logits after the fed token
that a committed one follows are what teacher forcing would compute there. Where nobody asks for
them they cost nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxspec.core import (
    Distribution,
    Follower,
    Forward,
    LogProbs,
    RoundResult,
    State,
    noise,
    token_rows,
)
from jaxspec.core.round import fed_before


def follower(top: int) -> Follower:
    """Remembers the log probabilities of committed tokens and of the `top` most probable tokens
    beside each.
    """

    def init(state: State, headroom: int) -> LogProbs:
        zero = jnp.zeros((len(state.length), headroom), jnp.float32)
        best = jnp.zeros((*zero.shape, top), jnp.float32)
        return LogProbs(zero, zero, best.astype(jnp.int32), best)

    def update(
        state: State, memory: LogProbs, result: RoundResult, committed: Int[Array, " B"]
    ) -> LogProbs:
        new = result.tokens
        fed = fed_before(result.verdict, result.tokens.shape[1] - 1)
        values = of_tokens(new, result.target.forward, result.target.distribution, top, fed)
        # Slots past the committed tokens are cleared, so that a buffer's tail is zeros whatever was
        # drafted.
        is_kept = jnp.arange(new.shape[1], dtype=committed.dtype)[None, :] < committed[:, None]
        first = state.length - state.start - committed
        pairs = zip(memory, where(is_kept, values), strict=True)
        return LogProbs(*(token_rows.append(buffer, first, new) for buffer, new in pairs))

    return Follower(init, update)


def of_tokens(
    tokens: Int[Array, "B step"],
    forward: Forward,
    distribution: Distribution,
    top: int,
    position: Int[Array, "B step"] | None = None,
) -> LogProbs:
    """Reads off the log probabilities of tokens, each after its `position` of a pass; None: after
    0, 1, 2, ...

    `top` of the most probable tokens are reported beside each.

    >>> logits = jnp.log(jnp.array([[[0.25, 0.5, 0.25]]]))
    >>> report = of_tokens(
    ...     jnp.array([[2]]), Forward(logits, None), Distribution(tokens=jnp.array([[1]])), top=1
    ... )
    >>> [jnp.exp(x).round(3).tolist() for x in (report.raw, report.sampled, report.top_raw)]
    [[[0.25]], [[0.0]], [[[0.5]]]]
    """

    def at_position(outputs: Shaped[Array, "B T *k"]) -> Shaped[Array, "B step *k"]:
        if position is None:
            return outputs
        return jnp.take_along_axis(outputs, _like(position, outputs), axis=1, mode="clip")

    logits = at_position(forward.logits)
    if distribution.tokens is not None:
        read_off = Distribution(tokens=at_position(distribution.tokens))
    else:
        assert distribution.log_probs is not None
        read_off = Distribution(at_position(distribution.log_probs))
    best = noise.largest(jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1), top)
    return at_tokens(tokens, logits, read_off, best)


def at_tokens(
    tokens: Int[Array, "B step"],
    logits: Float[Array, "B step V"],
    distribution: Distribution,
    top_tokens: Int[Array, "B step top"],
) -> LogProbs:
    """Reads off the log probabilities of a token at each position, and the raw ones of `top_tokens`
    beside it.
    """

    def of_token(log_probs: Shaped[Array, "B step V"]) -> Shaped[Array, "B step"]:
        return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1, mode="clip")[..., 0]

    # Raw means before temperature, penalties and bans: as teacher forcing would give it.
    raw = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    if distribution.tokens is not None:
        # At temperature 0 the distribution is a point mass: log 1 or log 0.
        sampled = jnp.where(distribution.tokens == tokens, 0.0, -jnp.inf).astype(jnp.float32)
    else:
        assert distribution.log_probs is not None
        sampled = of_token(distribution.log_probs)
    return LogProbs(
        of_token(raw), sampled, top_tokens, jnp.take_along_axis(raw, top_tokens, axis=-1)
    )


def where(is_kept: Bool[Array, "B step"], values: LogProbs) -> LogProbs:
    """Clears the entries that are not kept."""
    return LogProbs(*(jnp.where(_like(is_kept, x), x, jnp.zeros_like(x)) for x in values))


def forget_cut(state: State) -> State:
    """Clears what follows each row's end, for whoever has moved that to the front."""
    memory = state.memory.log_probs
    if memory is None:
        return state
    column = jnp.arange(memory.raw.shape[1], dtype=state.length.dtype)
    is_kept = column[None, :] < (state.length - state.start)[:, None]
    return _remember(state, where(is_kept, memory))


def cut(state: State, headroom: int) -> State:
    """Takes room for `headroom` new tokens from larger buffers, if reported."""
    memory = state.memory.log_probs
    if memory is None:
        return state
    return _remember(state, memory.window(0, headroom))


def _remember(state: State, log_probs: LogProbs) -> State:
    return state._replace(memory=state.memory._replace(log_probs=log_probs))


def _like(
    of_step: Shaped[Array, "B step"], values: Shaped[Array, "B T *k"]
) -> Shaped[Array, "B step *1"]:
    if values.ndim == 2:
        return of_step
    return of_step[..., None]
