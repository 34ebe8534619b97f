"""Compiled loops of passes and of drafts, timed interleaved, so that other load falls on all of
them alike.

Shapes: B batch, T step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import core
from jaxspec.core import kv_cache, noise, programs, token_rows
from jaxspec.core.token_rows import decoder_prompt
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared
from jaxspec.sampling import match_vocab

WARMUP = 4  # passes, to learn how long one takes
# The least duration of a timed loop. Short loops see the same other work of the machine.
MIN_SECONDS = 0.03


def interleave(calls: Sequence[Callable[[], object]], repeats: int) -> np.ndarray:
    """Times calls, interleaved as a b c a b c, in seconds [calls, repeats]. Each call waits for its
    result.
    """
    seconds = np.zeros((len(calls), repeats))
    for repeat in range(repeats):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            seconds[index, repeat] = time.perf_counter() - start
    return seconds


@programs.jit(static_argnames=("lm",), donate_argnames=("cache",))
def passes(
    lm: core.LanguageModel,
    params: core.Params,
    cache: core.Cache,
    length: Int[Array, " B"],
    tokens: Int[Array, "B T"],
    inner: Int[Array, ""],
    keys: core.Keys | None = None,
) -> tuple[Int[Array, "B T"], core.Cache]:
    """Makes `inner` passes over T tokens, each at `length`: extend, argmax of all logits, rewind.

    With keys, one per row, the noise of one position is added before the argmax. That takes as long
    as a draw, or as a rule that looks at T distributions and draws one token. The number of passes
    is traced, so that the compiler, too, sees a loop. The cache is consumed.
    """

    def one_pass(index, carry):
        tokens, cache = carry
        forward, cache = lm.extend(params, cache, tokens)
        values = forward.logits  # [B, T, V]
        if keys is not None:
            position_keys = noise.at(keys, jnp.full_like(length, index), noise.Purpose.TOKEN)
            values = (
                jax.nn.log_softmax(values) + noise.gumbel(position_keys, lm.vocab_size)[:, None]
            )
        return noise.first_largest(values), lm.rewind(cache, length)

    return jax.lax.fori_loop(0, inner, one_pass, (tokens, lm.rewind(cache, length)))


@programs.jit(
    static_argnames=("drafter", "target", "gamma", "sampled"), donate_argnames=("caches",)
)
def drafts(
    drafter: core.Drafter,
    target: core.LanguageModel,
    gamma: int,  # draft tokens of each draft
    sampled: bool,  # whether they are drawn, at temperature 1
    weights: core.Weights,
    caches: core.Caches,
    row: core.Prompt,
    verified: core.Forward,  # zeros, in place of the target's outputs at every fed token
    inner: Int[Array, ""],
) -> tuple[core.Caches, core.Prompt]:
    """Drafts `inner` times, commits each draft whole, and puts its first token in the place of the
    last one.
    """

    def to_distribution(
        logits: Float[Array, "B T W"], draft_tokens: Any = None, seen: Any = None
    ) -> core.Distribution:
        logits = match_vocab(logits, target.vocab_size)
        if sampled:
            return core.Distribution(log_probs=jax.nn.log_softmax(logits), logits=logits)
        return core.Distribution(tokens=noise.first_largest(logits), logits=logits)

    keys = noise.row_keys(jax.random.key(0), row.length.shape[0])
    limit = jnp.full_like(row.length, gamma)
    # A tree's first gamma nodes stand for its accepted path: which entries of caches move does not
    # change the time.
    first_path = jnp.broadcast_to(jnp.arange(gamma, dtype=jnp.int32), (*row.length.shape, gamma))

    def draft_once(_, carry: tuple[core.Caches, core.Prompt]) -> tuple[core.Caches, core.Prompt]:
        caches, row = carry
        context = core.DraftContext(keys, row, limit, gamma, False, to_distribution)
        draft, caches = drafter.propose(weights, caches, context)
        first = draft.tokens[:, :1]
        logits = jnp.broadcast_to(jax.nn.one_hot(first, target.vocab_size), verified.logits.shape)
        length = jnp.minimum(draft.length, gamma)
        verdict = core.Verdict(
            length, first[:, 0], draft.length, None if draft.parent is None else first_path
        )
        caches = drafter.commit(
            core.RoundEnd(weights, caches, row, verdict, verified._replace(logits=logits))
        )
        return caches, row._replace(tokens=token_rows.append(row.tokens, row.length - 1, first))

    return jax.lax.fori_loop(0, inner, draft_once, (caches, row))


class TimedLoop(NamedTuple):
    """A call that makes a number of passes and waits for them, and that number."""

    call: Callable[[], None]
    passes: int


def timed_loops(
    model: core.Model, prompt: core.Prompt, headroom: int, inner: int | None, sampled: bool
) -> Callable[..., TimedLoop]:
    """Returns a function from a number of tokens to a warm loop of passes over so many; the loops
    share a cache.

    The prompt is in the cache, with room for `headroom` tokens more. If `sampled`, each pass also
    draws a token. A recurrent layer does again in each pass what a round may take back. So its
    loops have caches of their own, made for drafts of one token less than a pass reads, or of
    `nodes` tokens.
    """
    lm = model.lm

    def read(nodes: int) -> tuple[core.Forward, core.Cache]:
        return _prefill(lm, model.params, prompt, token_rows.room(lm, prompt, headroom, nodes))

    has_states = bool(kv_cache.states(jax.eval_shape(lambda: read(headroom))[1]))
    # The log of `headroom` tokens would be the largest of all, and no loop reads it where there are
    # states.
    forward, cache = read(1 if has_states else headroom)
    shared = None if has_states else [cache]
    length = decoder_prompt(lm, prompt).length
    first = jnp.argmax(forward.logits, axis=-1).astype(jnp.int32)
    keys = None
    if sampled:
        keys = noise.row_keys(jax.random.key(0), len(prompt.length))

    def loop_over(step: int, nodes: int | None = None) -> TimedLoop:
        tokens = jnp.repeat(first, step, axis=1)
        caches = shared or [read(step - 1 if nodes is None else nodes)[1]]
        return timed_loop(
            lambda cache, n: passes(lm, model.params, cache, length, tokens, n, keys)[1],
            caches,
            inner,
        )

    return loop_over


def seconds_per_pass(
    loops: Sequence[TimedLoop], repeats: int
) -> Float[np.ndarray, "loops repeats"]:
    """Times loops, interleaved, and divides by their passes."""
    return interleave([loop.call for loop in loops], repeats) / np.array(
        [[loop.passes] for loop in loops]
    )


def draft_loop(prepared: Prepared, inner: int | None) -> TimedLoop:
    """Makes a warm loop of whole drafts by a generation's drafter, which go on from the state after
    prefill.
    """
    assert prepared.drafter is not None and isinstance(prepared.drafter.functions, core.Drafter)
    lm = prepared.target.lm
    weights = prepared.weights
    state = loop.prefill(prepared)
    # caches are donated
    caches, row = jax.tree.map(jnp.copy, (state.caches, core.Prompt(state.tokens, state.length)))
    fed = jax.ShapeDtypeStruct((len(row.length), prepared.decoder.nodes + 1), jnp.int32)
    forward, _ = jax.eval_shape(lm.extend, weights.target, caches.target, fed)
    verified = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), forward)
    static = prepared.drafter.functions, lm, prepared.decoder.gamma, prepared.is_sampled
    return timed_loop(
        lambda carry, n: drafts(*static, weights, *carry, verified, n), [(caches, row)], inner
    )


def timed_loop(
    advance: Callable[[Any, Int[Array, ""]], Any],
    carry: list[Any],
    inner: int | None,
    least: float | None = None,
) -> TimedLoop:
    """Compiles and warms up a loop of passes, and settles on as many as take `least` seconds, or
    `MIN_SECONDS`.

    Args:
        advance: (state, number of passes) -> the state after them. It may consume the state that it
            is given.
        carry: the state, alone in a list that loops may share.
        inner: the number of passes, if it is fixed.
    """

    def call(count: int) -> None:
        carry[0] = jax.block_until_ready(advance(carry[0], jnp.asarray(count, jnp.int32)))

    call(inner or WARMUP)
    if inner is None:
        seconds = float(np.median(interleave([functools.partial(call, WARMUP)], 3))) / WARMUP
        inner = int(np.clip(round((least or MIN_SECONDS) / seconds), 1, 1000))
    return TimedLoop(functools.partial(call, inner), inner)


@programs.jit(static_argnames=("lm",))
def _prefill(lm: core.LanguageModel, params: core.Params, prompt: core.Prompt, room: core.Room):
    return lm.prefill(params, prompt, room)
