"""What a decoder samples behind a prompt, many times over, and the target's own law there.

For models too large to enumerate (`jaxspec.testing.certify`). All rows of a batch have one prompt and one first token
(which comes from prefill, whatever the rule), and each its own key; the shipped decoder carries them on. Two tokens of
each are looked at: the first that a round decides, and the one behind it, which is of the same round where a guess was
kept, and of the next one otherwise.

Shapes: N draws, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxspec import buffers, noise
from jaxspec.base import Cache, LanguageModel, Model, Params, Prompt, Warp
from jaxspec.decode import loop, request
from jaxspec.decode.request import Job
from jaxspec.decode.warping import plan

EXPECTED = 5  # draws that a cell of a test must expect
BATCH = 256  # draws at a time
TOKENS = 2  # of each draw


class Place(NamedTuple):
    """Where is sampled, and what the target says there.

    Attributes:
        first: the token behind the prompt, which all draws share.
        after: the law of the token behind it [V].
        then: of tokens that are drawn often enough, the law of what follows them [V].
    """

    first: int
    after: Float[np.ndarray, " V"]
    then: dict[int, Float[np.ndarray, " V"]]


class Samples(NamedTuple):
    """What was drawn.

    Attributes:
        tokens: the two tokens behind the first.
        acceptance_rate: of the guesses, 0 without a drafter; near 0 or 1 only one way through a rule was tested.
    """

    tokens: Int[np.ndarray, "N 2"]
    acceptance_rate: float


def job(
    target: Model, prompt: Prompt, key: Key[Array, ""], *, temperature: float, gamma: int = 2, **options: Any
) -> Job:
    """A request of many rows with one prompt, that no end token and no limit cuts short.

    Args:
        target: the model.
        prompt: one row.
        key: of the first tokens.
        temperature: of the law; positive.
        gamma: guesses per round.
        **options: as in `jaxspec.generate`: drafter, accept.

    Raises:
        ValueError: more than one prompt, or a temperature that is not positive.
    """
    if prompt.tokens.shape[0] != 1:
        raise ValueError(f"got {prompt.tokens.shape[0]} prompts: expected one")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: expected a positive number, since at 0 nothing is drawn")
    many = jax.tree.map(lambda x: jnp.repeat(x, BATCH, axis=0), prompt)
    room: dict[str, Any] = dict(gamma=gamma, max_new_tokens=1 + TOKENS * (gamma + 1), eos_ids=())
    return request.prepare(target, many, key=key, temperature=temperature, **room, **options)


def place(target: Model, prompt: Prompt, key: Key[Array, ""], *, temperature: float, draws: int) -> Place:
    """The target's laws behind a prompt and a first token, by passes over one token, as plain decoding's.

    Args:
        target, prompt, key, temperature: as in `job`.
        draws: how many there will be: what follows a token is asked for if that many draws should have it five times.

    Raises:
        ValueError: as `job`.
    """
    state = loop.start(*job(target, prompt, key, temperature=temperature))
    warp, controls, _ = plan(target, BATCH, temperature=temperature)
    first = int(state.tokens[0, state.start[0]])
    shared = target.lm, warp, target.params, controls
    after, cache = _law(*shared, state.cache, np.full(BATCH, first, np.int32))
    order = np.argsort(-after[0], kind="stable")[:BATCH].astype(np.int32)
    then, _ = _law(*shared, cache, np.resize(order, BATCH))
    often = order[after[0, order] * draws >= EXPECTED].tolist()
    return Place(first, after[0], dict(zip(often, then[: len(often)], strict=True)))


def draw(asked: Job, first: int, key: Key[Array, ""], draws: int) -> Samples:
    """Runs the decoder from the prompt and a first token, many times.

    Args:
        asked: see `job`; with another decoder and its weights, if you like.
        first: the first token, that of a `Place`.
        key: of all draws.
        draws: how many, rounded up to whole batches of 256.

    Example:
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt, key = Prompt(jnp.array([[3, 1]]), jnp.array([2])), jax.random.key(0)
        >>> found = draw(job(target, prompt, key, temperature=1.0, drafter=draft), 4, jax.random.key(1), draws=200)
        >>> found.tokens.shape, 0 < found.acceptance_rate < 1
        ((256, 2), True)
    """
    begun = loop.start(*asked)
    begun = begun._replace(tokens=begun.tokens.at[:, begun.start[0]].set(first))  # committed, and not yet fed
    found, kept = [], []
    for start in range(0, draws, BATCH):
        keys, state = noise.row_keys(jax.random.fold_in(key, start), BATCH), jax.tree.map(jnp.copy, begun)
        for _ in range(TOKENS):  # a round commits at least one
            state, _ = loop.advance(asked.decoder, keys, asked.weights, state)
        if bool(jnp.any(state.failed)):
            raise FloatingPointError("the target's logits were not finite behind the prompt: check its parameters")
        found.append(np.asarray(buffers.window(state.tokens, state.start + 1, TOKENS)))
        kept.append((int(jnp.sum(state.stats.accepted)), int(jnp.sum(state.stats.drafted))))
    accepted, drafted = np.sum(kept, axis=0)
    return Samples(np.concatenate(found), float(accepted / max(drafted, 1)))


@functools.partial(jax.jit, static_argnames=("lm", "warp"))
def _warped(
    lm: LanguageModel, warp: Warp, params: Params, controls: Any, cache: Cache, tokens: Int[Array, " B"]
) -> tuple[Float[Array, "B V"], Cache]:
    forward, cache = lm.extend(params, cache, tokens[:, None])
    law = warp(controls, forward.logits, None).log_probs
    assert law is not None
    return law[:, 0], cache


def _law(*arguments: Any) -> tuple[Float[np.ndarray, "B V"], Cache]:
    """The law behind each row and a token, in float64, and the cache with that token."""
    log_probs, cache = _warped(*arguments)
    probs = np.exp(np.asarray(log_probs, np.float64))
    return probs / probs.sum(axis=-1, keepdims=True), cache
