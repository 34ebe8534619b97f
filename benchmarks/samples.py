"""Samples of a decoder after a prompt, many times over, and the target's own distribution there.

For models too large to enumerate (`jaxspec.testing.certify`). All draws have one prompt and one
first token (which comes from prefill, whatever the rule), and each its own key; the shipped decoder
goes on from there. Two tokens of each are looked at: the first that a round decides, and the one
after it, which is of the same round where a draft token was accepted, and of the next one
otherwise. `benchmarks.goodness_of_fit` compares them.

Shapes: N draws, V vocabulary.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxspec.core import (
    Cache,
    LanguageModel,
    Params,
    RoundInfo,
    Sampler,
    State,
    noise,
    programs,
    token_rows,
)
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared
from jaxspec.sampling import SamplingParams

EXPECTED = 5  # draws that a cell of a test must expect
BATCH = 256  # draws at a time
TOKENS = 2  # of each draw


class Context(NamedTuple):
    """The place where tokens are drawn, and the target's distributions there.

    Attributes:
        first: the token after the prompt, which all draws share.
        next_probs: the distribution of the token after it [V].
        second_probs: for tokens that are drawn often enough, the distribution of what follows them
            [V].
    """

    first: int
    next_probs: Float[np.ndarray, " V"]
    second_probs: dict[int, Float[np.ndarray, " V"]]


class Samples(NamedTuple):
    """The drawn tokens.

    Attributes:
        tokens: the two tokens after the first.
        acceptance_rate: the share of accepted draft tokens, 0 without a drafter. Near 0 or 1 only
            one branch of a rule was tested.
    """

    tokens: Int[np.ndarray, "N 2"]
    acceptance_rate: float


def context(prepared: Prepared, draws: int) -> Context:
    """The target's distributions after a generation's prompt and its first token, by passes over
    one token.
    """
    plain = _unlimited(prepared.plain())
    state, _ = next(loop.iterate_rounds(plain))
    first = int(state.tokens[0, state.start[0]])
    params = SamplingParams(jnp.repeat(plain.request.sampling_params.temperature, BATCH))
    cache = token_rows.take_rows(state.caches.target, jnp.zeros(BATCH, jnp.int32))

    def distributions(cache: Cache, tokens: np.ndarray) -> tuple[Float[np.ndarray, "B V"], Cache]:
        """The distribution after each row and a token, in float64, and the cache with that
        token.
        """
        static = plain.target.lm, plain.sampler
        log_probs, cache = _distributions(
            *static, plain.target.params, params, cache, jnp.asarray(tokens)
        )
        probs = np.exp(np.asarray(log_probs, np.float64))
        return probs / probs.sum(axis=-1, keepdims=True), cache

    after, cache = distributions(cache, np.full(BATCH, first, np.int32))
    order = np.argsort(-after[0], kind="stable")[:BATCH].astype(np.int32)
    then, _ = distributions(cache, np.resize(order, BATCH))
    often = order[after[0, order] * draws >= EXPECTED].tolist()
    return Context(first, after[0], dict(zip(often, then[: len(often)], strict=True)))


def draw(prepared: Prepared, first: int, key: Key[Array, ""], draws: int) -> Samples:
    """Runs a generation's decoder from its prompt and a first token, many times.

    Example:
        >>> from jaxspec.decode import batches
        >>> from jaxspec.testing import prepared_table
        >>> prepared = batches.take(
        ...     prepared_table(gamma=2, temperature=1.0, key=jax.random.key(0)), [0]
        ... )
        >>> found = draw(prepared, 4, jax.random.key(1), draws=200)
        >>> found.tokens.shape, 0 < found.acceptance_rate < 1
        ((256, 2), True)
    """
    prepared, drawn, counts = _unlimited(prepared), [], []
    for start in range(0, draws, BATCH):
        keys = noise.row_keys(jax.random.fold_in(key, start), BATCH)

        def many(state: State, info: RoundInfo | None, keys=keys) -> tuple[State, RoundInfo | None]:
            """After prefill: a row for each draw, with its own key, and with the given first token,
            not yet fed.
            """
            if info is None:
                state = token_rows.take_rows(state, jnp.zeros(BATCH, jnp.int32))
                tokens = state.tokens.at[:, state.start[0]].set(first)
                state = state._replace(tokens=tokens, request=state.request._replace(keys=keys))
            return state, info

        *_, (state, _) = itertools.islice(
            loop.iterate_rounds(prepared, many), 1 + TOKENS
        )  # a round commits at least one
        if bool(jnp.any(state.failed)):
            raise FloatingPointError(
                "the target's logits were not finite after the prompt: check its parameters"
            )
        drawn.append(np.asarray(token_rows.window(state.tokens, state.start + 1, TOKENS)))
        counts.append((int(jnp.sum(state.stats.accepted)), int(jnp.sum(state.stats.drafted))))
    accepted, drafted = np.sum(counts, axis=0)
    return Samples(np.concatenate(drawn), float(accepted / max(drafted, 1)))


def _unlimited(prepared: Prepared) -> Prepared:
    """A generation of one row whose two tokens no end token and no limit cuts short."""
    if len(prepared.prompt.length) != 1:
        raise ValueError(f"got {len(prepared.prompt.length)} prompts: expected one")
    temperature = float(prepared.request.sampling_params.temperature[0])
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature:g}: expected a positive number, since at 0 nothing is "
            "drawn"
        )
    return prepared.replace(eos_ids=(), max_new_tokens=1 + TOKENS * (prepared.decoder.gamma + 1))


@programs.jit(static_argnames=("lm", "sampler"))
def _distributions(
    lm: LanguageModel,
    sampler: Sampler,
    params: Params,
    sampling_params: SamplingParams,
    cache: Cache,
    tokens: Int[Array, " B"],
) -> tuple[Float[Array, "B V"], Cache]:
    forward, cache = lm.extend(params, cache, tokens[:, None])
    log_probs = sampler(sampling_params, forward.logits, None).log_probs
    assert log_probs is not None
    return log_probs[:, 0], cache
