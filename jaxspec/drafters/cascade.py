"""A drafter that is a speculative decoder: a model whose own drafts are drafted (CS Drafting's vertical cascade).

Axis letters as in `jaxspec.core`; G the draft's tokens, I those of an inner draft, W = G + I + 1 (buffers, so that no
write is cut).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import rules
from jaxspec.core import (
    BoundDrafter,
    Cache,
    Caches,
    Distribution,
    Draft,
    DraftContext,
    Drafter,
    Forward,
    LanguageModel,
    Model,
    Prompt,
    Rule,
    ToDistribution,
    Verdict,
    Weights,
    noise,
    token_rows,
)
from jaxspec.core.checks import integer, number
from jaxspec.core.round import RoundResult, bucket_widths, check_trees, run_round, size_of
from jaxspec.drafters.common import after, as_drafter, name_of, put, shown, with_taps_of
from jaxspec.drafters.model import ModelState, catch_up, known, prefill, take_back_to


class CascadeState(NamedTuple):
    """The model's cache, how many tokens of each row it holds for certain, and the inner drafter's state."""

    cache: Cache
    num_cached: Int[Array, " B"]
    inner: Any


class Drafting(NamedTuple):
    """A draft in the making.

    Attributes:
        row: what is committed, and what was drafted after it.
        log_probs: the model's distribution of each draft token; None: they are proposed as point masses.
        confidence: as in `Draft.aux`; None where no policy asks.
        going: rows that draft on.
        caches: the model's cache, one token behind the row, and the inner drafter's state.
    """

    row: Prompt
    log_probs: Float[Array, "B W V"] | None
    confidence: Float[Array, "B W"] | None
    going: Bool[Array, " B"]
    caches: Caches


def cascade(
    draft: Model,
    inner: Model | Drafter | BoundDrafter,
    *,
    gamma: int = 3,
    rule: Rule | None = None,
    inner_temperature: float = 1.0,
) -> BoundDrafter:
    """Drafts from a model that is sped up by a drafter of its own: speculative decoding inside of speculative decoding.

    Round after round `inner` drafts for `draft`, which verifies in one pass, until every row has its draft tokens; then
    the target verifies these. It pays where `draft` generates faster with `inner` than alone: `jaxspec bench`
    measures both. `inner` may be a look-up, n-gram tables, a smaller model, another cascade, or layers of
    `draft` itself (`early_exit`); with trees, too.

    The inner rounds are exact, so the draft tokens have the model's own distribution, which the outer rule is given.
    With a lenient rule inside their distribution is not known, and they are proposed as point masses: the text is exact
    all the same, but at temperatures above 0 fewer tokens are accepted.

    Args:
        draft: the model that drafts for the target.
        inner: what drafts for it, in the same vocabulary.
        gamma: draft tokens of an inner round; one of trees has its own size.
        rule: which of them `draft` accepts; `rules.rejection()` by default.
        inner_temperature: the temperature of the inner drafter's distributions over that of `draft`'s.

    Raises:
        TypeError: draft is no model, inner no drafter or rule none of `jaxspec.rules`.
        ValueError: levels with different vocabularies or of different kinds, a drafter that reads hidden states of
            another model or whose state cannot go back, trees where `draft` or the rule takes chains only, gamma < 1 or
            inner_temperature <= 0.

    Example:
        >>> import jaxspec
        >>> from jaxspec.drafters import prompt_lookup
        >>> from jaxspec.testing import table_model
        >>> target, large, small = (table_model(jax.random.key(seed), vocab=5) for seed in (1, 2, 3))
        >>> prompt = Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> drafter = cascade(large, cascade(small, prompt_lookup(), gamma=2), gamma=2)
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=4, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Chen et al., Cascade Speculative Drafting, NeurIPS 2024, arXiv 2312.11462; Spector, Ré, Staged
    Speculative Decoding, arXiv 2308.04623.
    """
    gamma = integer(gamma, "gamma", "an integer, the draft tokens of each inner round")
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}: expected at least 1 draft token for each inner round")
    if not isinstance(draft, Model):
        raise TypeError(f"draft is of type {type(draft).__name__}: expected a jaxspec.Model, for which inner drafts")
    expected = "a finite number of more than 0; drafters.greedy drafts at 0"
    inner_temperature = number(inner_temperature, "inner_temperature", expected)
    if not inner_temperature > 0:
        raise ValueError(f"inner_temperature is {inner_temperature}: expected {expected}")
    made, rule = as_drafter(inner, "inner"), rules.rejection() if rule is None else rule
    if not isinstance(rule, Rule):
        raise TypeError(f"rule is {shown(rule)}: expected a rule, such as jaxspec.rules.rejection()")
    for model in made.models:
        _check_levels(draft, model)
    if made.functions.rollback is None:
        raise ValueError(
            "the inner drafter's state cannot take back what the target rejects of a draft (Drafter.rollback is None): "
            "expected a model, a look-up, n-gram tables, drafters.early_exit of the drafting model, or another cascade"
        )
    if made.target is not None:
        draft = with_taps_of(draft, made.target)
    check_trees(draft.lm, made.functions, rule)
    functions = _cascade(draft.lm, made.functions, rule, gamma, inner_temperature)
    name = f"cascade({name_of(draft)}, {name_of(made)})"
    return BoundDrafter(functions, (draft.params, made.params), (draft, *made.models), name=name)


def _check_levels(draft: Model, inner: Model) -> None:
    """Refuses what cannot be one vocabulary; tokenizers are compared with the target's, by `generate`."""
    names = draft.name or "the drafting model", inner.name or "the inner model"
    if (draft.lm.start_token is None) != (inner.lm.start_token is None):
        raise ValueError(f"{names[0]} and {names[1]} are not both decoder-only, or both encoder-decoders")
    known_to_match = draft.tokenizer is not None and inner.tokenizer is not None
    if draft.lm.vocab_size != inner.lm.vocab_size and not known_to_match:
        raise ValueError(
            f"the levels of a cascade share one vocabulary: {names[0]} has {draft.lm.vocab_size} token ids and "
            f"{names[1]} {inner.lm.vocab_size}. jaxspec.map_vocabulary makes the ids of one the other's"
        )


@functools.lru_cache
def _cascade(lm: LanguageModel, inner: Drafter, rule: Rule, inner_gamma: int, inner_temperature: float) -> Drafter:
    nodes, depth = size_of(inner, inner_gamma)
    spare = nodes + 1  # that a row is fed beyond its draft
    widths = bucket_widths(nodes, adaptive=False, may_be_empty=True)

    def levels(weights: Weights) -> Weights:
        """Of the inner speculative decoder, whose target is the model."""
        return Weights(*weights.draft)

    def init(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> CascadeState:
        own, room = levels(weights), headroom + spare
        forward, cache = prefill(lm, own.target, prompt, room, prefilled)
        length = prompt.length if lm.start_token is None else jnp.ones_like(prompt.length)
        return CascadeState(cache, length, inner.init(own, prompt, room, forward))

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        own, state, gamma, start = levels(weights), caches.draft, context.gamma, context.row.length
        wanted, keys = context.max_draft > 0, noise.at(context.keys, start, noise.Purpose.DRAFT)
        row = Prompt(known(lm, jnp.pad(context.row.tokens, ((0, 0), (0, spare)))), start)
        width = gamma + 1 if context.adaptive else 1
        read = catch_up(lm, own.target, ModelState(state.cache, state.num_cached), row, wanted, width, start - 1)

        def one_round(made: Drafting) -> Drafting:
            count = made.row.length - start
            live = jnp.logical_and(made.going, count < context.max_draft)
            limit = jnp.where(live, jnp.clip(context.max_draft - count - 1, 0, depth), 0)
            drafted = token_rows.window(made.row.tokens, start, gamma)
            to_distribution = after(context.to_distribution, drafted, count)
            within = context._replace(
                keys=keys,
                row=made.row,
                max_draft=limit,
                gamma=depth,
                adaptive=True,
                to_distribution=_at_temperature(to_distribution, inner_temperature),
                confidence=None,
                should_continue=None,
            )
            done = run_round(lm, inner, rule, own, made.caches, within, to_distribution, widths)
            at = _fed(done)
            # The inner drafter takes in what every row has made; those that wanted nothing then take it back.
            every = Prompt(
                token_rows.append(made.row.tokens, made.row.length, done.tokens),
                made.row.length + done.verdict.num_accepted + 1,
            )
            row = every._replace(length=jnp.where(live, every.length, made.row.length))
            cache = lm.rewind(done.caches.target, every.length - 1)
            moved = inner.commit(own, done.caches._replace(target=cache), every, done.verdict, done.forward)
            assert inner.rollback is not None
            back = Caches(lm.rewind(moved.target, row.length - 1), inner.rollback(moved.draft, row))
            made = made._replace(row=row, caches=back)
            if made.log_probs is not None:
                assert done.distribution.log_probs is not None
                new = jnp.take_along_axis(done.distribution.log_probs, at[:, :, None], axis=1)
                made = made._replace(log_probs=put(made.log_probs, count, new))
            if made.confidence is None:
                return made
            assert context.confidence is not None
            each = [context.confidence(_one(done.distribution, at[:, i : i + 1])) for i in range(depth + 1)]
            made = made._replace(confidence=put(made.confidence, count, jnp.stack(each, axis=1)))
            return made._replace(going=_stopped_after(context, made, start) > row.length - start)

        def unfinished(made: Drafting) -> Bool[Array, ""]:
            return jnp.any(jnp.logical_and(made.going, made.row.length - start < context.max_draft))

        logits = jax.ShapeDtypeStruct((start.shape[0], 1, lm.vocab_size), jnp.float32)
        kind: Distribution = jax.eval_shape(context.to_distribution, logits)
        shape, wide = (start.shape[0], gamma + depth + 1), None
        if kind.log_probs is not None and rule.exact:
            wide = jnp.zeros((*shape, kind.log_probs.shape[-1]), jnp.float32)
        confidence = None if context.confidence is None else jnp.zeros(shape, jnp.float32)
        caches_within = Caches(lm.rewind(read.cache, start - 1), state.inner)
        made = Drafting(row, wide, confidence, wanted, caches_within)
        made = jax.lax.while_loop(unfinished, one_round, made)
        length, num_cached = made.row.length - start, jnp.where(wanted, made.row.length - 1, state.num_cached)
        aux = None
        if made.confidence is not None:
            length, aux = jnp.minimum(length, _stopped_after(context, made, start)), made.confidence[:, :gamma]
        draft = Draft(
            token_rows.window(made.row.tokens, start, gamma),
            length,
            log_probs=None if made.log_probs is None else made.log_probs[:, :gamma],
            aux=None if aux is None else {"confidence": aux},
        )
        return draft, caches._replace(draft=CascadeState(made.caches.target, num_cached, made.caches.draft))

    def commit(weights: Weights, caches: Caches, row: Prompt, verdict: Verdict, forward: Forward) -> Caches:
        return caches._replace(draft=rollback(caches.draft, row))

    def rollback(state: CascadeState, row: Prompt) -> CascadeState:
        assert inner.rollback is not None
        return take_back_to(state, row.length - 1)._replace(inner=inner.rollback(state.inner, row))

    return Drafter(init, propose, commit, lm, rollback=rollback, nested=True)


def _at_temperature(to_distribution: ToDistribution, temperature: float) -> ToDistribution:
    if temperature == 1:
        return to_distribution

    def warmer(
        logits: Float[Array, "B T V"],
        draft_tokens: Int[Array, "B N"] | None = None,
        seen: Bool[Array, "#B T N"] | None = None,
    ) -> Distribution:
        return to_distribution(logits / temperature, draft_tokens, seen)

    return warmer


def _fed(done: RoundResult) -> Int[Array, "B I+1"]:
    """The fed token that each of a round's tokens follows: the last committed one, then the accepted ones."""
    step = jnp.arange(done.tokens.shape[1], dtype=jnp.int32)[None]
    if done.verdict.path is None:
        return jnp.broadcast_to(step, done.tokens.shape)
    path = jnp.pad(done.verdict.path[:, : done.tokens.shape[1] - 1] + 1, ((0, 0), (1, 0)))
    return jnp.where(step <= done.verdict.num_accepted[:, None], path, 0)


def _one(distribution: Distribution, at: Int[Array, "B 1"]) -> Distribution:
    """A distribution at one position of each row."""

    def pick(x: Array) -> Array:
        return x if x.ndim < 2 else jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1)

    return jax.tree.map(pick, distribution)


def _stopped_after(context: DraftContext, made: Drafting, start: Int[Array, " B"]) -> Int[Array, " B"]:
    """After how many draft tokens the policy ends each row's draft; one more than gamma where it does not."""
    assert made.confidence is not None and context.should_continue is not None
    stop = jnp.full_like(start, context.gamma + 1)
    step = jnp.arange(made.confidence.shape[1], dtype=start.dtype)[None]
    real = jnp.where(step < (made.row.length - start)[:, None], made.confidence, 0.0)[:, : context.gamma]
    for i in range(context.gamma):
        so_far = jnp.where(step[:, : context.gamma] <= i, real, 0.0)
        ends = jnp.logical_and(i < made.row.length - start, jnp.logical_not(context.should_continue(i, so_far)))
        stop = jnp.where(ends, jnp.minimum(stop, i + 1), stop)
    return stop
