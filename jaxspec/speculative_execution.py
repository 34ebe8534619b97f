"""Stochastic speculative execution: g runs on candidates for a draw from f, beside f.

f is any slow function that returns a distribution, and g any slow function of a draw from it: a
policy and a simulated world, or a proposal and the simulation that weighs it.

Shapes: V outcomes of f, K candidates.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from numpy.typing import ArrayLike

from jaxspec import rules
from jaxspec.core import Distribution, Draft, Keys, Verdict, noise
from jaxspec.core.checks import at_least

Input = TypeVar("Input")
Result = TypeVar("Result")


class Speculated(NamedTuple, Generic[Result]):
    """The result of `speculate`.

    Attributes:
        value: g(token).
        token: the draw; its distribution is softmax(f(x)), whatever was drafted.
        accepted: whether it had been drafted, so that g ran beside f.
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
    candidates: int = 1,
    executor: concurrent.futures.Executor | None = None,
) -> Speculated[Result]:
    """Draws a token from softmax(f(x)) and returns g(token), distributed as if run in sequence.

    A cheap approximation of f says which tokens are likely. g is started on candidates drawn from
    it, without replacement, while f runs. Speculative sampling then accepts a candidate, whose g is
    done or well on its way. Otherwise it draws another token from the rest of f's distribution, and
    g starts over. A single candidate is accepted with probability sum min(p, q), where p and q are
    the distributions of f and the approximation; more candidates raise it.

    Args:
        f: x -> logits of the V outcomes [V].
        g: token -> anything. It runs in a thread, perhaps for nothing, so it should change nothing.
            Its errors are raised here, except those for rejected candidates.
        x: the argument of f and of the approximation.
        approximation: x -> logits [V], quickly.
        key: the random key; a new one for every call.
        candidates: K, how many candidates g is started on.
        executor: runs f and g; by default, new threads. Pass a process pool for pure Python that
            holds the interpreter's lock.

    Raises:
        ValueError: candidates < 1; logits are not one row of V, or f and the approximation differ
            in V.
        FloatingPointError: logits contain NaN, or allow no token.

    Example, a policy that chooses a push, and a world that carries it out:
        >>> def policy(speed):  # the slow one
        ...     return jnp.array([speed, 0.0, -speed])
        >>> def habit(speed):
        ...     return jnp.array([0.5, 0.0, -0.5])
        >>> move = speculate(
        ...     policy,
        ...     lambda push: 2.0 + (push - 1),
        ...     2.0,
        ...     approximation=habit,
        ...     key=jax.random.key(0),
        ... )
        >>> move.value == 2.0 + (move.token - 1), move.runs in (1, 2)
        (True, True)

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, sections 2.3 and 6; several
    candidates as in SpecInfer, arXiv 2305.09781.
    """
    at_least(1, candidates=candidates)
    pool = executor
    if pool is None:
        pool = concurrent.futures.ThreadPoolExecutor(candidates + 1)
    submitted: list[concurrent.futures.Future] = []
    try:
        logits = pool.submit(f, x)  # first, since it takes longest; the approximation runs here
        submitted.append(logits)
        q_logits = _checked(approximation(x), "approximation")
        draft = _propose(key, q_logits, min(candidates, len(q_logits)))
        tokens = np.asarray(draft.tokens)[0, : int(draft.length[0])].tolist()
        started = [pool.submit(g, token) for token in tokens]
        submitted += started
        p_logits = _checked(logits.result(), "f")
        if p_logits.shape != q_logits.shape:
            raise ValueError(
                f"f has {len(p_logits)} outcomes and its approximation {len(q_logits)}: expected "
                "as many"
            )
        verdict = _verify(key, draft, p_logits)
        accepted = int(verdict.path[0, 0]) if verdict.num_accepted[0] else None
        for index, candidate in enumerate(started):
            if index != accepted:
                candidate.cancel()  # stops the ones that have not begun
        if accepted is not None:
            return Speculated(
                value=started[accepted].result(),
                token=tokens[accepted],
                accepted=True,
                runs=len(tokens),
            )
        token = int(verdict.next_token[0])
        value = pool.submit(g, token).result()
        return Speculated(value, token, accepted=False, runs=len(tokens) + 1)
    finally:  # cancel useless work without waiting for it
        for future in submitted:
            future.cancel()
        if executor is None:
            pool.shutdown(wait=False, cancel_futures=True)


def propose(key: Key[Array, ""], logits: Float[Array, " V"], count: int) -> Draft:
    """Draws candidates without replacement, as children of one node; fewer if fewer are possible.

    >>> found = propose(jax.random.key(0), jnp.log(jnp.array([0.5, 0.0, 0.5])), 3)
    >>> sorted(found.tokens[0, :2].tolist()), found.length.tolist()
    ([0, 2], [2])
    """
    keys, position = _address(key)
    log_q = jax.nn.log_softmax(logits)[None]
    tokens = noise.without_replacement(noise.at(keys, position, noise.Purpose.DRAFT), log_q, count)
    possible = jnp.sum(log_q > -jnp.inf, axis=-1, dtype=jnp.int32)
    return Draft(
        tokens,
        jnp.minimum(possible, count),
        parent=jnp.zeros_like(tokens),
        log_probs=log_q[:, None],
    )


def _address(key: Key[Array, ""]) -> tuple[Keys, Int[Array, " B"]]:
    """Returns the address of the noise: every call has a new key, so one position is enough."""
    return noise.row_keys(key, 1), jnp.zeros(1, jnp.int32)


_propose = jax.jit(propose, static_argnames=("count",))


@jax.jit
def _verify(key: Key[Array, ""], draft: Draft, logits: Float[Array, " V"]) -> Verdict:
    """Applies the rejection rule to a root and its children."""
    p = jax.nn.log_softmax(logits)[None, None]
    target = Distribution(jnp.broadcast_to(p, (1, draft.tokens.shape[1] + 1, p.shape[-1])))
    return rules.rejection().verify(*_address(key), draft, target)


def _checked(logits: ArrayLike, owner: str) -> Float[np.ndarray, " V"]:
    """Returns logits as float32. Raises an error if they do not make a distribution."""
    values = np.asarray(logits, np.float32)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"{owner} returned logits of shape {values.shape}: expected one row, [V]")
    if np.isnan(values).any() or np.isposinf(values).any() or np.isneginf(values).all():
        raise FloatingPointError(
            f"{owner} returned logits that make no distribution: NaN, +inf, or -inf everywhere"
        )
    return values
