"""Stochastic speculative execution: running g on a guess of what f will say, while f is still at work.

Nothing here is about language: f is any slow function that yields a distribution, and g any slow function of a draw
from it (a policy and the world that its action changes, a proposal and the simulation that weighs it).

Shapes: V outcomes of f, K guesses.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from numpy.typing import ArrayLike

from jaxspec import accept, noise
from jaxspec.accept import Choice, Proposals
from jaxspec.base import Keys, Law

Input = TypeVar("Input")
Result = TypeVar("Result")


class Speculated(NamedTuple, Generic[Result]):
    """What `speculate` returns.

    Attributes:
        value: g(token).
        token: the draw; its law is softmax(f(x)), whatever was guessed.
        accepted: whether it had been guessed, so that nobody waited for g after f.
        runs: how many times g was started.
    """

    value: Result
    token: int
    accepted: bool
    runs: int


def speculate(
    f: Callable[[Input], ArrayLike],
    g: Callable[[int], Result],
    x: Input,
    *,
    approximation: Callable[[Input], ArrayLike],
    key: Key[Array, ""],
    guesses: int = 1,
    executor: concurrent.futures.Executor | None = None,
) -> Speculated[Result]:
    """Draws a token from softmax(f(x)) and returns g(token); the same law as doing so one after the other.

    A cheap approximation of f says which tokens are likely. g is started on guesses drawn from it, without
    replacement, while f runs. Speculative sampling then keeps one of the guesses, and its g is done or well on its
    way; or it draws another token from what the guesses left of f's law, and g starts over. The token was guessed with
    probability sum min(p, q) (p and q being the laws of f and the approximation), and more often with more guesses.

    Args:
        f: x -> logits of the V outcomes [V].
        g: token -> anything. Runs in a thread; may run for nothing, so it should change nothing. What it raises is
            raised here, unless it was for a guess that was not kept.
        x: what f and the approximation are given.
        approximation: x -> logits [V], quickly.
        key: of all that is drawn here; a new one for every call.
        guesses: K, how many guesses g is started on.
        executor: runs f and g; threads of its own by default. One of processes serves pure Python that holds the
            interpreter's lock.

    Raises:
        ValueError: guesses < 1, or logits that are not one row of V, or of different V.
        FloatingPointError: logits with NaN in them, or that allow nothing.

    Example, a policy that chooses a push, and a world that carries it out:
        >>> def policy(speed):  # the slow one
        ...     return jnp.array([speed, 0.0, -speed])
        >>> def habit(speed):
        ...     return jnp.array([0.5, 0.0, -0.5])
        >>> move = speculate(policy, lambda push: 2.0 + (push - 1), 2.0, approximation=habit, key=jax.random.key(0))
        >>> move.value == 2.0 + (move.token - 1), move.runs in (1, 2)
        (True, True)

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, sections 2.3 and 6; several guesses as in
    SpecInfer, arXiv 2305.09781.
    """
    if guesses < 1:
        raise ValueError(f"guesses is {guesses}: expected at least 1")
    submitted: list[concurrent.futures.Future] = []
    with _threads(executor, guesses + 1, submitted) as pool:
        said = pool.submit(f, x)  # first, since it takes longest; the approximation runs here
        submitted.append(said)
        q_logits = _checked(approximation(x), "approximation")
        proposals = _propose(key, q_logits, min(guesses, len(q_logits)))
        tokens = np.asarray(proposals.tokens)[0, : int(proposals.length[0])].tolist()
        started = [pool.submit(g, token) for token in tokens]
        submitted += started
        p_logits = _checked(said.result(), "f")
        if p_logits.shape != q_logits.shape:
            raise ValueError(f"f has {len(p_logits)} outcomes and its approximation {len(q_logits)}: expected as many")
        choice = _choose(key, proposals, p_logits)
        index, token = int(choice.index[0]), int(choice.token[0])
        for other in started[:index] + started[index + 1 :]:
            other.cancel()  # what has not begun need not
        if index < len(tokens):
            return Speculated(started[index].result(), token, True, len(tokens))
        return Speculated(pool.submit(g, token).result(), token, False, len(tokens) + 1)


def propose(keys: Keys, position: Int[Array, " B"], log_q: Float[Array, "B V"], count: int) -> Proposals:
    """Guesses of one draw of each row, without replacement.

    Args:
        keys, position: address of the noise; see `noise`.
        log_q: logarithms of the approximation's law.
        count: how many guesses; a row whose law allows fewer gets fewer.

    >>> found = propose(noise.row_keys(jax.random.key(0), 1), jnp.array([0]), jnp.log(jnp.array([[0.5, 0.0, 0.5]])), 3)
    >>> sorted(found.tokens[0, :2].tolist()), found.length.tolist()
    ([0, 2], [2])
    """
    at, tokens, laws = noise.at(keys, position, noise.Purpose.DRAFT), [], []
    length = jnp.zeros(position.shape, jnp.int32)
    for index in range(count):
        length = length + jnp.any(log_q > -jnp.inf, axis=-1).astype(jnp.int32)
        laws.append(jax.nn.log_softmax(log_q, axis=-1))
        tokens.append(noise.categorical(jax.vmap(lambda key, i=index: jax.random.fold_in(key, i))(at), log_q))
        log_q = jnp.where(jnp.arange(log_q.shape[1])[None, :] == tokens[-1][:, None], -jnp.inf, log_q)
    return Proposals(jnp.stack(tokens, axis=1), jnp.stack(laws, axis=1), length)


def _address(key: Key[Array, ""]) -> tuple[Keys, Int[Array, " B"]]:
    """Of the noise: every call has a key of its own, and so one place in it is enough."""
    return noise.row_keys(key, 1), jnp.zeros(1, jnp.int32)


@functools.partial(jax.jit, static_argnames=("count",))
def _propose(key: Key[Array, ""], logits: Float[Array, " V"], count: int) -> Proposals:
    return propose(*_address(key), jax.nn.log_softmax(logits)[None], count)


@jax.jit
def _choose(key: Key[Array, ""], proposals: Proposals, logits: Float[Array, " V"]) -> Choice:
    target = Law(jax.nn.log_softmax(logits)[None, None])
    return accept.iterated(*_address(key), proposals, target)


def _checked(logits: ArrayLike, who: str) -> Float[np.ndarray, " V"]:
    """Logits, once they make a law."""
    values = np.asarray(logits, np.float32)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"{who} gave logits of shape {values.shape}: expected one row of them, [V]")
    if np.isnan(values).any() or np.isposinf(values).any() or np.isneginf(values).all():
        raise FloatingPointError(f"{who} gave logits that are no law: NaN, +inf, or -inf everywhere")
    return values


@contextlib.contextmanager
def _threads(
    executor: concurrent.futures.Executor | None, count: int, submitted: list[concurrent.futures.Future]
) -> Iterator[concurrent.futures.Executor]:
    """The caller's executor, or threads for one call; nobody waits for what runs in vain, or leaves it waiting."""
    if executor is not None:
        try:
            yield executor
        finally:
            for future in submitted:
                future.cancel()
        return
    own = concurrent.futures.ThreadPoolExecutor(count)
    try:
        yield own
    finally:
        own.shutdown(wait=False, cancel_futures=True)
