"""A decoder that says one token a round by several proposals for it, small enough to enumerate.

What a verifier of token trees does at one node, made a decoder: so `accept.iterated`, which judges no chain and is no
rule for `jaxspec.speculative`, is proved exact as the rules are. Axis letters as in `jaxspec.base`; D drafters, K
proposals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import buffers, execution, noise
from jaxspec import warp as warps
from jaxspec.accept import Choice, Proposals, iterated
from jaxspec.base import (
    Decoder,
    DecodeState,
    Keys,
    LanguageModel,
    Law,
    Model,
    Prompt,
    Request,
    RoundInfo,
    Verdict,
    Warp,
    Weights,
)
from jaxspec.decode import rounds
from jaxspec.testing.enumerate import decoder_law, total_variation
from jaxspec.testing.tables import plain_law

Propose = Callable[[Keys, Int[Array, " B"], Float[Array, "B D V"]], Proposals]  # keys, position, log laws of D drafters
Judge = Callable[[Keys, Int[Array, " B"], Proposals, Law], Choice]


def certify_iterated(
    target: Model,
    *,
    drafters: Sequence[Model],
    propose: Propose | None = None,
    judge: Judge = iterated,
    warp: Warp | None = None,
    controls: Any = None,
    prompt: Prompt | None = None,
    steps: int = 3,
    eos: Sequence[int] = (),
) -> float:
    """How far tokens that were chosen among proposals are from plain sampling's: `certify`, for `accept.iterated`.

    The first token comes from prefill, as ever, so of `steps` tokens all but one are judged.

    Args:
        target: a model with few tokens, such as `table_model(key, vocab=3)`.
        drafters: whose laws the proposals are drawn from, at least one.
        propose: `independent`, `distinct` or `likeliest`, or your own; by default as many draws as drafters, or two.
        judge: what is certified.
        warp, controls: of `jaxspec.warp`, controls with one row, for target and drafters; by default their own laws.
        prompt: one row; by default the token 0.
        steps: how many tokens the laws are over.
        eos: tokens that end a sequence.

    Returns:
        The total variation of the two laws: some 1e-7, in float32, if the judge is exact.

    Raises:
        ValueError: no drafters, and as `decoder_law`.

    Example:
        >>> from jaxspec.testing import table_model
        >>> target, one, two = (table_model(jax.random.key(seed), vocab=3) for seed in range(3))
        >>> certify_iterated(target, drafters=[one, two], steps=2) < 1e-6
        True
    """
    if not drafters:
        raise ValueError("got no drafters: give at least one model whose law proposals are drawn from")
    propose = independent(max(2, len(drafters))) if propose is None else propose
    warp = warps.sampling() if warp is None else warp
    if controls is None:
        controls = warps.Controls(jnp.ones(1), jnp.full(1, target.lm.vocab_size), jnp.ones(1))
    prompt = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)) if prompt is None else prompt
    decoder = proposing(target.lm, tuple(drafter.lm for drafter in drafters), propose, warp, judge)
    weights = Weights(target.params, tuple(drafter.params for drafter in drafters))
    law = decoder_law(decoder, weights, prompt, controls, steps=steps, eos=eos)
    return total_variation(law, plain_law(target, prompt, warp, controls, steps, eos))


@functools.cache
def independent(count: int) -> Propose:
    """K independent draws, one from each drafter in turn: with one drafter K samples of it, with K one of each.

    >>> laws = jnp.log(jnp.array([[[1.0, 0.0], [0.0, 1.0]]]))  # two drafters, sure of themselves
    >>> independent(3)(noise.row_keys(jax.random.key(0), 1), jnp.array([4]), laws).tokens.tolist()
    [[0, 1, 0]]
    """

    def propose(keys: Keys, position: Int[Array, " B"], laws: Float[Array, "B D V"]) -> Proposals:
        at = noise.at(keys, position, noise.Purpose.DRAFT)
        from_each = [laws[:, k % laws.shape[1]] for k in range(count)]
        keyed = (jax.vmap(lambda key, k=k: jax.random.fold_in(key, k))(at) for k in range(count))
        tokens = [noise.categorical(key, law) for key, law in zip(keyed, from_each, strict=True)]
        return Proposals(jnp.stack(tokens, axis=1), jnp.stack(from_each, axis=1), jnp.full_like(position, count))

    return propose


@functools.cache
def distinct(count: int) -> Propose:
    """K draws from the first drafter without replacement, as `execution.propose` makes them; fewer where it has fewer.

    >>> laws = jnp.log(jnp.array([[[0.5, 0.5, 0.0]]]))
    >>> found = distinct(3)(noise.row_keys(jax.random.key(0), 1), jnp.array([4]), laws)
    >>> sorted(found.tokens[0, :2].tolist()), found.length.tolist()
    ([0, 1], [2])
    """

    def propose(keys: Keys, position: Int[Array, " B"], laws: Float[Array, "B D V"]) -> Proposals:
        return execution.propose(keys, position, laws[:, 0], count)

    return propose


@functools.cache
def likeliest(count: int) -> Propose:
    """The first drafter's K likeliest tokens, as point masses: nothing is drawn.

    >>> laws = jnp.log(jnp.array([[[0.2, 0.5, 0.3]]]))
    >>> likeliest(2)(noise.row_keys(jax.random.key(0), 1), jnp.array([4]), laws).tokens.tolist()
    [[1, 2]]
    """

    def propose(keys: Keys, position: Int[Array, " B"], laws: Float[Array, "B D V"]) -> Proposals:
        tokens = jax.lax.top_k(laws[:, 0], count)[1].astype(jnp.int32)
        return Proposals(tokens, None, jnp.full_like(position, count))

    return propose


@functools.cache
def proposing(
    target: LanguageModel, drafters: tuple[LanguageModel, ...], propose: Propose, warp: Warp, judge: Judge = iterated
) -> Decoder:
    """A decoder whose every round commits one token, judged among proposals for it.

    Its drafters read what is committed, one token behind, as the target does. Its `weights.draft` are their parameters,
    in a tuple. Proposals count as drafted, and one that is kept as accepted.
    """

    def init(keys: Keys, weights: Weights, prompt: Prompt, request: Request, room: int) -> DecodeState:
        width = buffers.row_width(target, prompt) + room
        state = rounds.begin(keys, target, prompt, request, room, target.prefill(weights.target, prompt, width), warp)
        both = zip(drafters, weights.draft, strict=True)
        return state._replace(drafter=tuple(lm.prefill(params, prompt, width)[1] for lm, params in both))

    def step(keys: Keys, weights: Weights, state: DecodeState) -> tuple[DecodeState, RoundInfo]:
        live, none, controls = jnp.logical_not(state.done), rounds.no_draft(state.length), state.request.controls
        last, before = rounds.last_token(state), rounds.prefix(state)
        forward, cache = target.extend(weights.target, state.cache, last)
        law, laws, caches = warp(controls, forward.logits, before), [], []
        for lm, params, own in zip(drafters, weights.draft, state.drafter, strict=True):
            said, own = lm.extend(params, own, last)
            theirs = warp(controls, warps.fit(said.logits, target.vocab_size), before)
            laws.append(_log_probs(theirs, target.vocab_size))
            caches.append(own)
        proposals = propose(keys, state.length, jnp.concatenate(laws, axis=1))
        choice = judge(keys, state.length, proposals, law)
        bad = rounds.hopeless(forward, law, none.length)
        state, kept = rounds.commit(state, choice.token[:, None], none.length + 1, bad)
        state = state._replace(
            cache=target.rewind(cache, state.length - 1),
            drafter=tuple(lm.rewind(own, state.length - 1) for lm, own in zip(drafters, caches, strict=True)),
        )
        tried = none._replace(length=proposals.length)
        found = (choice.index < proposals.length).astype(jnp.int32)
        return rounds.count(state, live, tried, Verdict(found, choice.token), kept)

    return Decoder(init, step, gamma=0)


def _log_probs(law: Law, vocab: int) -> Float[Array, "B T V"]:
    if law.log_probs is not None:
        return law.log_probs
    assert law.tokens is not None
    return jnp.log(jax.nn.one_hot(law.tokens, vocab))
