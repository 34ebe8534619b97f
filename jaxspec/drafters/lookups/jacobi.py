"""Jacobi decoding: the target's own last predictions, position by position, are the next draft."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec import core
from jaxspec.core import noise
from jaxspec.core.checks import integers


class JacobiState(NamedTuple):
    """The last iterate."""

    tokens: Int[Array, "B G"]  # for the positions from `start` on
    start: Int[Array, " B"]  # the row's length when they were made; -1: of no positions, the prompt's tokens


def jacobi(longest: int = 16) -> core.BoundDrafter:
    """Proposes, as point masses, what the target found most probable at each position when it last read this far.

    Greedy text is the fixed point of a system of equations, token i being the most probable one after tokens 0 to
    i - 1. Jacobi's iteration solves all of them at once from the last iterate: each pass of the target reads a draft of
    gamma tokens, wrong ones included, and its predictions after these are the next draft. At least one more token is
    right after every pass, more where the target corrects itself in the same way whatever precedes. Networks that were
    not trained for it gain next to nothing (`lookahead` remembers what iterations have seen, and gains more).

    Exact at every temperature: a draft token is a function of earlier rounds. State: `longest` tokens a row. The first
    draft is the first tokens of the prompt. As `then` of a `horizontal_cascade` it continues the draft from the iterate
    at the next positions.

    Args:
        longest: the most draft tokens of a round, whatever gamma.

    Raises:
        ValueError: longest is no integer, or below 1.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=9, sharpness=9.0)
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=jacobi(), gamma=4, max_new_tokens=20)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=20).tokens).all())
        True

    Reference: Santilli et al., ACL 2023, arXiv 2305.10427.
    """
    (longest,) = integers(1, longest=longest)
    return core.BoundDrafter(_jacobi(longest), name="jacobi")


@functools.lru_cache
def _jacobi(longest: int) -> core.Drafter:
    def init(start: core.DraftStart) -> JacobiState:
        return JacobiState(prompt_tokens(start.prompt.text, longest), jnp.full_like(start.prompt.length, -1))

    def propose(weights: core.Weights, caches: core.Caches, context: core.DraftContext) -> core.Proposal:
        state = caches.draft
        # In a horizontal cascade the row has draft tokens, which stand at the first positions of the iterate.
        drafted = jnp.where(state.start < 0, 0, jnp.maximum(context.row.length - state.start, 0))
        index = drafted[:, None] + jnp.arange(context.gamma, dtype=drafted.dtype)[None, :]
        tokens = jnp.take_along_axis(state.tokens, jnp.minimum(index, longest - 1), axis=1)
        # Another drafter's rounds may be longer.
        return core.Draft(tokens, jnp.minimum(context.max_draft, jnp.maximum(longest - drafted, 0))), caches

    def commit(end: core.RoundEnd) -> core.Caches:
        # After n accepted tokens and the one after them, the next position is the one after fed token n + 1.
        best = noise.first_largest(end.forward.logits)
        following = end.verdict.num_accepted[:, None] + jnp.arange(1, longest + 1, dtype=jnp.int32)[None, :]
        last = jnp.asarray(best.shape[1] - 1, following.dtype)
        tokens = jnp.take_along_axis(best, jnp.minimum(following, last), axis=1)
        return end.caches._replace(draft=JacobiState(tokens, end.row.length))

    return core.Drafter(init, propose, commit, longest=longest)


def prompt_tokens(prompt: core.Prompt, count: int) -> Int[Array, "B count"]:
    """Returns the first tokens of each prompt, over and over: a first draft, before anything is known.

    >>> prompt_tokens(core.Prompt(jnp.array([[5, 6, 0]]), jnp.array([2])), 5).tolist()
    [[5, 6, 5, 6, 5]]
    """
    index = jnp.arange(count, dtype=prompt.length.dtype)[None, :] % prompt.length[:, None]
    return jnp.take_along_axis(prompt.tokens, index, axis=1)
