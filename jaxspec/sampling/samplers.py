"""Samplers, which turn logits into the distribution that tokens are drawn from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import (
    Distribution,
    Draft,
    Follower,
    LogitsProcessor,
    Preceding,
    Processor,
    Prompt,
    RoundResult,
    Sampler,
    State,
    noise,
)
from jaxspec.sampling.truncate import (
    apply_temperature,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical_p,
)


class SamplingParams(NamedTuple):
    """The traced values of a sampler, one entry per row; None for those that it does not read.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens (all that tie with the k-th); a value >= the
            vocabulary keeps all.
        top_p: keep the fewest tokens, most probable first, whose mass reaches this; 1 keeps all.
        min_p: keep the tokens that are at least this many times as probable as the most probable
            one; 0 keeps all.
        typical_p: keep the fewest tokens, most typical first, whose mass reaches this; 1 keeps all.
        bias: added to the logits; -inf bans a token.
        repetition: logits of tokens in the row are divided by this if positive, multiplied if
            negative; 1 has no effect.
        presence: subtracted from the logits of tokens that were generated; 0 has no effect.
        frequency: subtracted from a token's logit once for each time it was generated; 0 has no
            effect.
        processors: the values of each of the caller's own logits processors.
        structured: the values of structured output, `structured.processor.Values`.
    """

    temperature: Float[Array, " batch"]
    top_k: Int[Array, " batch"] | None = None
    top_p: Float[Array, " batch"] | None = None
    min_p: Float[Array, " batch"] | None = None
    typical_p: Float[Array, " batch"] | None = None
    bias: Float[Array, "batch vocab"] | None = None
    repetition: Float[Array, " batch"] | None = None
    presence: Float[Array, " batch"] | None = None
    frequency: Float[Array, " batch"] | None = None
    processors: tuple[Any, ...] | None = None
    structured: Any = None


@functools.lru_cache
def greedy() -> Sampler:
    """The distribution at temperature 0: a point mass on the largest logit, without a softmax.

    >>> greedy()(None, jnp.array([[[1.0, 3.0, 3.0]]])).tokens.tolist()
    [[1]]
    """

    def sampler(
        sampling_params, logits: Float[Array, "B T V"], preceding: Preceding | None = None
    ) -> Distribution:
        best = jnp.where(jnp.max(logits, axis=-1) > -jnp.inf, noise.first_largest(logits), -1)
        return Distribution(tokens=best, logits=logits.astype(jnp.float32))

    return sampler


@functools.lru_cache
def at_temperature(
    top_k: int | None = None, top_p: bool = False, min_p: bool = False, typical_p: bool = False
) -> Sampler:
    """The distribution at any temperature, 0 included: temperature, then truncations in the order
    of the arguments.

    Args:
        top_k: an upper bound of every row's top_k, or None for a program without that processor.
        top_p, min_p, typical_p: whether the program has these.

    >>> one = SamplingParams(jnp.ones(1), jnp.array([2]))
    >>> found = at_temperature(top_k=2)(one, jnp.log(jnp.array([[[0.3, 0.6, 0.1]]])))
    >>> [round(p, 2) for p in jnp.exp(found.log_probs[0, 0]).tolist()]
    [0.33, 0.67, 0.0]
    """

    def sampler(
        sampling_params: SamplingParams,
        logits: Float[Array, "B T V"],
        preceding: Preceding | None = None,
    ):
        before = logits.astype(jnp.float32)
        logits = apply_temperature(before, sampling_params.temperature)
        if top_k is None:
            bound = logits.shape[-1]
        else:
            bound = min(top_k, logits.shape[-1])
        if top_k is not None or top_p:
            largest = jax.lax.top_k(logits, bound)[0]
        if top_k is not None:
            assert sampling_params.top_k is not None
            logits = keep_top_k(logits, largest, sampling_params.top_k)
        if top_p:
            assert sampling_params.top_p is not None
            logits = keep_top_p(logits, largest, sampling_params.top_p)
        if min_p:
            assert sampling_params.min_p is not None
            logits = keep_min_p(logits, sampling_params.min_p)
        if typical_p:
            assert sampling_params.typical_p is not None
            logits = keep_typical_p(logits, sampling_params.typical_p)
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        return Distribution(log_probs, logits=before, greedy=sampling_params.temperature <= 0)

    return sampler


@dataclasses.dataclass(frozen=True)
class Chain:
    """A sampler that puts logits through processors first; `chain` makes it."""

    processors: tuple[Processor, ...]  # in their order
    to: Sampler  # the sampler that makes a distribution of the logits

    def __call__(
        self,
        sampling_params: Any,
        logits: Float[Array, "B T V"],
        preceding: Preceding | None = None,
    ) -> Distribution:
        return self.to(sampling_params, self.process(sampling_params, logits, preceding), preceding)

    def process(
        self, sampling_params: Any, logits: Float[Array, "B T V"], preceding: Preceding | None
    ) -> Float[Array, "B T V"]:
        """Puts logits through all processors."""
        logits = logits.astype(jnp.float32)
        for index, process in enumerate(self.processors):
            if preceding is None or preceding.memory is None:
                memory = None
            else:
                memory = preceding.memory[index]
            of_process = None
            if preceding is not None:
                of_process = preceding._replace(memory=memory)
            logits = process(sampling_params, logits, of_process)
        return logits


@functools.lru_cache
def chain(*processors: LogitsProcessor | Processor, to: Sampler) -> Sampler:
    """The sampler that puts logits through each processor in order, and then through `to`.

    A processor is any function (sampling_params, logits, preceding) -> logits, see
    `core.LogitsProcessor`; or a `core.Processor`, which remembers tokens. What `jaxspec.generate`
    uses is `chain(logit_bias, repetition_penalty, presence_and_frequency_penalties,
    to=at_temperature(...))`, without the processors that are not needed. Chains of the same
    functions are the same sampler, and share programs: define a processor once.

    >>> def shout(sampling_params, logits, preceding):
    ...     return 2 * logits
    >>> one = SamplingParams(jnp.ones(1))
    >>> distribution = chain(shout, to=at_temperature())(one, jnp.log(jnp.array([[[0.25, 0.75]]])))
    >>> [round(p, 2) for p in jnp.exp(distribution.log_probs[0, 0]).tolist()]
    [0.1, 0.9]
    """
    if not processors:
        return to
    in_order = [
        process if isinstance(process, Processor) else Processor(process) for process in processors
    ]
    if isinstance(to, Chain):
        in_order = [*in_order, *to.processors]
        to = to.to
    return Chain(tuple(in_order), to)


def processed(
    sampler: Sampler, sampling_params: Any, logits: Float[Array, "B T V"], preceding: Preceding
) -> Float[Array, "B T V"]:
    """The logits that a sampler makes its distribution of, after its processors, if it has any."""
    if isinstance(sampler, Chain):
        return sampler.process(sampling_params, logits, preceding)
    return logits


def follower(sampler: Sampler, vocab: int) -> Follower | None:
    """The follower that keeps the memories of a sampler's processors, a tuple; None: no processor
    has one.
    """
    if not isinstance(sampler, Chain) or all(
        process.init is None for process in sampler.processors
    ):
        return None
    processors = sampler.processors

    def init(state: State, headroom: int) -> tuple[Any, ...]:
        row = Prompt(state.tokens, state.length)
        return memories(processors, state.request.sampling_params, row, state.start, vocab)

    def update(
        state: State, memory: tuple[Any, ...], result: RoundResult, committed: Int[Array, " B"]
    ) -> tuple[Any, ...]:
        return advanced(processors, state.request.sampling_params, memory, result.tokens, committed)

    return Follower(init, update)


def memories(
    processors: tuple[Processor, ...],
    sampling_params: Any,
    row: Prompt,
    start: Int[Array, " B"],
    vocab: int,
) -> tuple[Any, ...]:
    """Makes the memory of each processor after whole rows; None for a processor that remembers
    nothing.
    """
    inits = (process.init for process in processors)
    return tuple(
        None if init is None else init(sampling_params, row, start, vocab) for init in inits
    )


def advanced(
    processors: tuple[Processor, ...],
    sampling_params: Any,
    memory: tuple[Any, ...],
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
) -> tuple[Any, ...]:
    """Takes the first `count` tokens of each row into the memories of the processors."""
    pairs = zip(processors, memory, strict=True)
    return tuple(process.commit(sampling_params, old, tokens, count) for process, old in pairs)


def ahead(
    sampler: Sampler, sampling_params: Any, preceding: Preceding
) -> Callable[[Draft], Draft] | None:
    """Makes `DraftContext.ahead` of a sampler's processors; None: none of them knows of tokens to
    come.
    """
    if isinstance(sampler, Chain):
        processors = sampler.processors
    else:
        processors = ()
    index = next(
        (index for index, process in enumerate(processors) if process.ahead is not None), None
    )
    if index is None or preceding.memory is None:
        return None
    advance = processors[index].advance
    look_ahead = processors[index].ahead
    memory = preceding.memory[index]
    assert advance is not None and look_ahead is not None

    def run(draft: Draft) -> Draft:
        def step(
            carry: tuple[Any, Any, Any], entry: tuple[Int[Array, ""], Int[Array, " B"]]
        ) -> Any:
            memory, goes_on, follows = carry
            slot, drafted = entry
            likely, is_ruled_out = look_ahead(sampling_params, memory, drafted)
            # The drafter's own token stands if all before it do, and if it may.
            follows = follows & (slot < draft.length) & ~is_ruled_out
            token = jnp.where(follows, drafted, likely).astype(drafted.dtype)
            goes_on = goes_on & (token >= 0)
            token = jnp.maximum(token, 0)
            return (advance(sampling_params, memory, token), goes_on, follows), (token, goes_on)

        everywhere = jnp.ones(draft.length.shape, bool)
        slots = jnp.arange(draft.tokens.shape[1], dtype=draft.length.dtype)
        _, (tokens, real) = jax.lax.scan(
            step, (memory, everywhere, everywhere), (slots, draft.tokens.T)
        )
        return draft._replace(
            tokens=tokens.T, length=jnp.sum(real, axis=0, dtype=draft.length.dtype)
        )

    return run


@functools.lru_cache
def mask_padding_ids(inner: Sampler, ids: int) -> Sampler:
    """`inner` with every id at or past `ids` removed first: the rows that pad a vocabulary to a
    round number.

    >>> mask_padding_ids(greedy(), 2)(None, jnp.array([[[1.0, 2.0, 9.0]]])).tokens.tolist()
    [[1]]
    """

    def remove(
        sampling_params, logits: Float[Array, "B T V"], preceding: Preceding | None
    ) -> Float[Array, "B T V"]:
        return jnp.where(jnp.arange(logits.shape[-1])[None, None, :] < ids, logits, -jnp.inf)

    return chain(remove, to=inner)


def match_vocab(
    logits: Float[Array, "B T W"], vocab: int, ids: Int[Array, " W"] | None = None
) -> Float[Array, "B T V"]:
    """Logits of another model over a vocabulary of `vocab` ids: -inf for ids it lacks, none for ids
    it has too many.

    Args:
        logits: the model's.
        vocab: the number of ids.
        ids: the number among them of each of the model's; `vocab` for one that has none. By default
            the same number.

    >>> match_vocab(jnp.zeros((1, 1, 2)), 3).tolist(), match_vocab(jnp.zeros((1, 1, 3)), 2).tolist()
    ([[[0.0, 0.0, -inf]]], [[[0.0, 0.0]]])
    >>> match_vocab(jnp.array([[[5.0, 6.0, 7.0]]]), 3, jnp.array([2, 3, 0])).tolist()
    [[[7.0, -inf, 5.0]]]
    """
    if ids is not None:
        impossible = jnp.full((*logits.shape[:-1], vocab), -jnp.inf, logits.dtype)
        return impossible.at[..., ids].set(logits, mode="drop")
    missing = vocab - logits.shape[-1]
    if missing > 0:
        return jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
    return logits[..., :vocab]
