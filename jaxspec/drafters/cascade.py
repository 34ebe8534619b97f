"""A drafter that is a speculative decoder: a model whose own drafts are drafted (CS Drafting's
vertical cascade).

Axis letters as in `jaxspec.core`; G the draft's tokens, I those of an inner draft, W = G + I + 1
(the width of buffers, so that no write is cut).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core, rules
from jaxspec.core import noise, token_rows
from jaxspec.core.checks import integers, number
from jaxspec.core.round import bucket_widths, check_trees, run_round, size_of
from jaxspec.drafters.common import after, as_drafter, check_model, name_of, shown, with_taps_of
from jaxspec.drafters.hidden_states import inside_of
from jaxspec.drafters.model import ModelState, catch_up, known, prefill, take_back_to


class CascadeState(NamedTuple):
    """The model's cache, how many tokens of each row it holds for certain, and the inner drafter's
    state.
    """

    cache: core.Cache
    num_cached: Int[Array, " B"]
    inner: Any


class Drafting(NamedTuple):
    """A draft in the making."""

    row: core.Prompt  # the committed tokens, and the draft tokens after them
    # the model's distribution of each draft token; None: point masses
    log_probs: Float[Array, "B W V"] | None
    # the confidences of `Draft.aux`; None where no policy asks
    confidence: Float[Array, "B W"] | None
    going: Bool[Array, " B"]  # rows that draft on
    # the model's cache, one token behind the row, and the inner drafter's state
    caches: core.Caches


def cascade(
    draft: core.Model,
    inner: core.Model | core.Drafter | core.BoundDrafter,
    *,
    gamma: int = 3,
    rule: core.Rule | None = None,
    inner_temperature: float = 1.0,
) -> core.BoundDrafter:
    """Drafts from a model that another drafter speeds up: speculative decoding inside speculative
    decoding.

    Round after round `inner` drafts for `draft`, which verifies in one pass, until every row has
    its draft tokens; then the target verifies these. It pays where `draft` generates faster with
    `inner` than alone: `jaxspec bench` measures both. `inner` may be a look-up, n-gram tables, a
    smaller model, another cascade, or layers of `draft` itself (`early_exit`); with trees, too.

    The inner rounds are exact, so the draft tokens have the model's own distribution, which the
    outer rule is given. A lenient rule inside leaves their distribution unknown, so they are
    proposed as point masses. The text stays exact, but at temperatures above 0 fewer tokens are
    accepted.

    Args:
        draft: the model that drafts for the target.
        inner: the drafter of `draft`, in the same vocabulary.
        gamma: draft tokens of an inner round; a drafter of trees defines its size.
        rule: the rule that accepts them for `draft`; `rules.rejection()` by default.
        inner_temperature: the temperature of the inner drafter's distributions divided by
            `draft`'s.

    Raises:
        TypeError: draft is not a model, inner is not a drafter, or rule is not from
            `jaxspec.rules`.
        ValueError: the levels differ in vocabulary, or a decoder meets an encoder-decoder. `inner`
            reads hidden states of another model, or its state cannot go back. It drafts trees, and
            `draft` or the rule takes chains only. gamma < 1. inner_temperature <= 0.

    Example:
        >>> import jaxspec
        >>> from jaxspec.drafters import prompt_lookup
        >>> from jaxspec.testing import table_model
        >>> target, large, small = (
        ...     table_model(jax.random.key(seed), vocab=5) for seed in (1, 2, 3)
        ... )
        >>> prompt = jaxspec.Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> drafter = cascade(large, cascade(small, prompt_lookup(), gamma=2), gamma=2)
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=4, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Chen et al., Cascade Speculative Drafting, NeurIPS 2024, arXiv 2312.11462; Spector,
    Ré, Staged Speculative Decoding, arXiv 2308.04623.
    """
    (gamma,) = integers(1, gamma=gamma)
    check_model(draft, "draft")
    expected = "a finite number of more than 0; drafters.greedy drafts at 0"
    inner_temperature = number(inner_temperature, "inner_temperature", expected, above=0)
    drafter = as_drafter(inner, "inner")
    if rule is None:
        rule = rules.rejection()
    if not isinstance(rule, core.Rule):
        raise TypeError(
            f"rule is {shown(rule)}: expected a rule, such as jaxspec.rules.rejection()"
        )
    for model in drafter.models:
        _check_levels(draft, model)
    if drafter.functions.rollback is None:
        raise ValueError(
            "the inner drafter's state cannot take back what the target rejects of a draft "
            "(Drafter.rollback is None): expected a model, a look-up, n-gram tables, "
            "drafters.early_exit of the drafting model, or another cascade"
        )
    if drafter.target is not None:
        draft = with_taps_of(draft, drafter.target)
    check_trees(draft.lm, drafter.functions, rule)
    functions = _cascade(draft.lm, drafter.functions, rule, gamma, inner_temperature)
    # Where the drafting model catches up with a row, nobody keeps the hidden states that an adapter
    # would read.
    reads_taps = drafter.target is not None and bool(inside_of(drafter.target).taps)
    functions = functions._replace(resumes=drafter.functions.resumes and not reads_taps)
    name = f"cascade({name_of(draft)}, {name_of(drafter)})"
    return core.BoundDrafter(
        functions, (draft.params, drafter.params), (draft, *drafter.models), name=name
    )


def _check_levels(draft: core.Model, inner: core.Model) -> None:
    """Raises ValueError if vocabularies cannot be the same; `generate` compares tokenizers with the
    target's.
    """
    names = draft.name or "the drafting model", inner.name or "the inner model"
    if (draft.lm.limits.start_token is None) != (inner.lm.limits.start_token is None):
        raise ValueError(
            f"{names[0]} and {names[1]} are not both decoder-only, or both encoder-decoders"
        )
    known_to_match = draft.tokenizer is not None and inner.tokenizer is not None
    if draft.lm.vocab_size != inner.lm.vocab_size and not known_to_match:
        raise ValueError(
            f"the levels of a cascade share one vocabulary: {names[0]} has {draft.lm.vocab_size} "
            f"token ids and {names[1]} {inner.lm.vocab_size}. jaxspec.map_vocabulary makes the ids "
            "of one the other's"
        )


@functools.lru_cache
def _cascade(
    lm: core.LanguageModel,
    inner: core.Drafter,
    rule: core.Rule,
    inner_gamma: int,
    inner_temperature: float,
) -> core.Drafter:
    functions = CascadeFunctions(
        lm, inner, rule, *size_of(inner, inner_gamma)[:2], inner_temperature
    )
    init = functions.init
    propose = functions.propose
    commit = functions.commit
    rollback = functions.rollback
    return core.Drafter(init, propose, commit, lm, rollback=rollback, spare=functions.spare)


class CascadeFunctions(NamedTuple):
    """The functions of a cascade.

    Inside, the model is the target and `inner` its drafter: the weights and caches of that decoder
    are made of the cascade's parameters (the model's, the inner drafter's) and of its state.
    """

    lm: core.LanguageModel
    inner: core.Drafter
    rule: core.Rule
    nodes: int  # draft tokens of an inner round, and how many of them may be accepted
    depth: int
    temperature: float  # the inner drafter's, over the model's

    spare = property(
        lambda self: self.nodes + 1 + self.inner.spare,
        doc="Tokens that a row is fed beyond its draft.",
    )

    def init(self, start: core.DraftStart) -> CascadeState:
        """Reads the prompt with the model and with the inner drafter."""
        weights = core.Weights(*start.weights.draft)
        before = start.before
        forward, cache = prefill(self.lm, weights.target, start)
        inner_before = None
        if before is not None:
            inner_before = before.of(before.state.inner)
        inner_state = self.inner.init(
            start._replace(weights=weights, prefilled=forward, before=inner_before)
        )
        return CascadeState(
            cache, token_rows.decoder_prompt(self.lm, start.prompt).length, inner_state
        )

    def propose(
        self, weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> core.Proposal:
        """Runs inner rounds until every row has its draft."""
        inner_weights = core.Weights(*weights.draft)
        state = caches.draft
        start = context.row.length
        rounds = context._replace(keys=noise.at(context.keys, start, noise.Purpose.DRAFT))

        def unfinished(drafting: Drafting) -> Bool[Array, ""]:
            return jnp.any(drafting.going & (drafting.row.length - start < context.max_draft))

        one_round = functools.partial(self.one_round, inner_weights, rounds)
        drafting = jax.lax.while_loop(
            unfinished, one_round, self.begin(inner_weights, state, context)
        )
        length = drafting.row.length - start
        aux = None
        if drafting.confidence is not None:
            length = jnp.minimum(length, _stopped_after(context, drafting, start))
            aux = {"confidence": drafting.confidence[:, : context.gamma]}
        if drafting.log_probs is None:
            log_probs = None
        else:
            log_probs = drafting.log_probs[:, : context.gamma]
        tokens = token_rows.window(drafting.row.tokens, start, context.gamma)
        num_cached = jnp.where(context.max_draft > 0, drafting.row.length - 1, state.num_cached)
        state = CascadeState(drafting.caches.target, num_cached, drafting.caches.draft)
        return core.Draft(tokens, length, log_probs=log_probs, aux=aux), caches._replace(
            draft=state
        )

    def begin(
        self, weights: core.Weights, state: CascadeState, context: core.DraftContext
    ) -> Drafting:
        """Makes a draft of no tokens; the model has read all of the row but its last token."""
        lm = self.lm
        start = context.row.length
        drafts = context.max_draft > 0
        row = core.Prompt(known(lm, jnp.pad(context.row.tokens, ((0, 0), (0, self.spare)))), start)
        width = context.gamma + 1 if context.adaptive else 1
        model_state = ModelState(state.cache, state.num_cached)
        caught_up = catch_up(
            lm, weights.target, model_state, row._replace(length=start - 1), drafts, width
        )
        logits = jax.ShapeDtypeStruct((start.shape[0], 1, lm.vocab_size), jnp.float32)
        distribution: core.Distribution = jax.eval_shape(context.to_distribution, logits)
        # B W
        shape = (start.shape[0], context.gamma + self.depth + 1)
        log_probs = None
        if distribution.log_probs is not None and self.rule.exact:
            log_probs = jnp.zeros((*shape, distribution.log_probs.shape[-1]), jnp.float32)
        if context.confidence is None:
            confidence = None
        else:
            confidence = jnp.zeros(shape, jnp.float32)
        return Drafting(
            row,
            log_probs,
            confidence,
            drafts,
            core.Caches(lm.rewind(caught_up.cache, start - 1), state.inner),
        )

    def one_round(
        self, weights: core.Weights, context: core.DraftContext, drafting: Drafting
    ) -> Drafting:
        """Runs an inner round, and adds its tokens to the drafts of the rows that still want
        some.
        """
        start = context.row.length
        # Draft tokens so far; the rest of gamma is still to be drafted.
        count = drafting.row.length - start
        live = drafting.going & (count < context.max_draft)
        drafted = token_rows.window(drafting.row.tokens, start, context.gamma)
        to_distribution = after(context.to_distribution, drafted, count)
        # Of the inner round's tokens one is the model's own, so that the inner draft has one less
        # than is wanted.
        inner_context = context._replace(
            row=drafting.row,
            max_draft=jnp.where(live, jnp.clip(context.max_draft - count - 1, 0, self.depth), 0),
            gamma=self.depth,
            adaptive=True,
            to_distribution=_at_temperature(to_distribution, self.temperature),
            confidence=None,
            should_continue=None,
            entropy=None,
            ahead=None,
        )
        widths = bucket_widths(self.nodes, adaptive=False, may_be_empty=True)
        result = run_round(
            self.lm,
            self.inner,
            self.rule,
            weights,
            drafting.caches,
            inner_context,
            to_distribution,
            widths,
        )
        drafting = self.committed(weights, drafting, result, live)
        fed = _fed_before(result)
        if drafting.log_probs is not None:
            assert result.target.distribution.log_probs is not None
            # B I+1 V: the distribution after the token before each; into B W V from the row's own
            # place on
            log_probs = jnp.take_along_axis(
                result.target.distribution.log_probs, fed[:, :, None], axis=1
            )
            drafting = drafting._replace(
                log_probs=token_rows.append(drafting.log_probs, count, log_probs)
            )
        if drafting.confidence is None:
            return drafting
        assert context.confidence is not None
        positions = [
            _at_position(result.target.distribution, fed[:, i : i + 1])
            for i in range(self.depth + 1)
        ]
        confidence = jnp.stack([context.confidence(position) for position in positions], axis=1)
        confidence = token_rows.append(drafting.confidence, count, confidence.astype(jnp.float32))
        drafting = drafting._replace(confidence=confidence)
        return drafting._replace(
            going=_stopped_after(context, drafting, start) > drafting.row.length - start
        )

    def committed(
        self,
        weights: core.Weights,
        drafting: Drafting,
        result: core.RoundResult,
        live: Bool[Array, " B"],
    ) -> Drafting:
        """Adds a round's tokens to the rows that are live.

        The inner drafter takes in what every row has made; those that wanted nothing then take it
        back.
        """
        full = core.Prompt(
            token_rows.append(drafting.row.tokens, drafting.row.length, result.tokens),
            drafting.row.length + result.verdict.num_accepted + 1,
        )
        row = full._replace(length=jnp.where(live, full.length, drafting.row.length))
        caches = result.caches._replace(
            target=self.lm.rewind(result.caches.target, full.length - 1)
        )
        caches = self.inner.commit(
            core.RoundEnd(weights, caches, full, result.verdict, result.target.forward)
        )
        assert self.inner.rollback is not None
        target = self.lm.rewind(caches.target, row.length - 1)
        return drafting._replace(
            row=row, caches=core.Caches(target, self.inner.rollback(caches.draft, row))
        )

    def commit(self, end: core.RoundEnd) -> core.Caches:
        """Takes back the tokens that the target rejected."""
        return end.caches._replace(draft=self.rollback(end.caches.draft, end.row))

    def rollback(self, state: CascadeState, row: core.Prompt) -> CascadeState:
        """Takes tokens back: all that the rows do not hold, and their last one."""
        assert self.inner.rollback is not None
        return take_back_to(state, row.length - 1)._replace(
            inner=self.inner.rollback(state.inner, row)
        )


def _at_temperature(
    to_distribution: core.ToDistribution, temperature: float
) -> core.ToDistribution:
    if temperature == 1:
        return to_distribution
    return lambda logits, draft_tokens=None, seen=None: to_distribution(
        logits / temperature, draft_tokens, seen
    )


def _fed_before(result: core.RoundResult) -> Int[Array, "B I+1"]:
    """Returns the fed token that each of a round's tokens follows: the last committed one, then the
    accepted ones.
    """
    step = jnp.arange(result.tokens.shape[1], dtype=jnp.int32)[None]
    if result.verdict.path is None:
        return jnp.broadcast_to(step, result.tokens.shape)
    path = jnp.pad(result.verdict.path + 1, ((0, 0), (1, 0)))
    return jnp.where(step <= result.verdict.num_accepted[:, None], path, 0)


def _at_position(distribution: core.Distribution, position: Int[Array, "B 1"]) -> core.Distribution:
    """Returns a distribution at one position of each row; a number for each row stays."""
    return jax.tree.map(
        lambda values: values if values.ndim < 2 else token_rows.take(values, position),
        distribution,
    )


def _stopped_after(
    context: core.DraftContext, drafting: Drafting, start: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Returns after how many draft tokens the policy ends each row's draft; one more than gamma
    where it does not.
    """
    assert drafting.confidence is not None and context.should_continue is not None
    stop = jnp.full_like(start, context.gamma + 1)
    count = drafting.row.length - start
    step = jnp.arange(drafting.confidence.shape[1], dtype=start.dtype)[None]
    confidence = jnp.where(step < count[:, None], drafting.confidence, 0.0)[:, : context.gamma]
    for i in range(context.gamma):
        # As the draft loop asks it: after draft token i, with the confidences up to there.
        so_far = jnp.where(step[:, : context.gamma] <= i, confidence, 0.0)
        ends = (i < count) & ~context.should_continue(i, so_far)
        stop = jnp.where(ends, jnp.minimum(stop, i + 1), stop)
    return stop
