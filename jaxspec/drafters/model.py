"""The drafter of the paper: a smaller language model, one token at a time (arXiv 2211.17192,
Algorithm 1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec import core
from jaxspec.core import chunks, token_rows
from jaxspec.drafters.stepwise import NodeLogits, Parent, chain

CachedState = TypeVar("CachedState", bound=Any)  # a state with a field `num_cached`
# whether each row's draft may go on after what the cache holds
CanContinue = Callable[[core.Cache], Bool[Array, " B"]]


class ModelState(NamedTuple):
    """The drafter's cache, and where the last tree lies in it: its fed nodes, in order, after the
    committed row.
    """

    cache: core.Cache  # the model's
    num_cached: Int[Array, " B"]  # how many tokens of each row it holds for certain
    # how long each row was when its tree was drafted, the first node's place; None: chains are
    # drafted
    start: Int[Array, " B"] | None = None
    # each draft token's place after `start`; -1: it was not fed
    slots: Int[Array, "B N"] | None = None


def model(
    draft: core.Model, *, coupled: bool = False, can_continue: CanContinue | None = None
) -> core.BoundDrafter:
    """Drafts gamma tokens from a language model, sampled from its distribution (the argmax at
    temperature 0).

    Its distributions are made as the target's are, each after the draft tokens before it, or with
    `draft_temperature`.

    Its state is its cache. The cache lacks one committed token after a round. It lacks two where
    every draft token was accepted: the last draft token was never fed, and the bonus token came
    from the target. So every round begins by reading the last two committed tokens again. For
    committed tokens [a b c d e] it rewinds to 3 tokens, feeds [d e], draws x1, feeds x1, draws x2,
    and so on. gamma draft tokens cost gamma passes.

    With a policy the loop ends when no row may go on. If no row may begin, no pass is made. What
    was committed in rounds without a draft is read, gamma + 1 tokens a pass, when the next draft
    begins.

    In a tree (`drafters.tree`) the cache holds the nodes of a round that have children, and follows
    the accepted path.

    Args:
        draft: the model.
        coupled: whether draft tokens are drawn with the noise that plain sampling has for their
            positions, and so are likely to be what plain sampling generates there: what
            `rules.coupled` rewards. Given that noise a token is certain, so it is proposed as a
            point mass, and every exact rule stays exact, although a position that is drafted again
            meets the same noise again.
        can_continue: a function of the model's cache after each pass; a row's draft ends where it
            is False. It must not depend on the next drawn token, or the text is biased. None:
            drafts never end by themselves.

    Example:
        >>> import jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     table_model(jax.random.key(2), vocab=5),
        ... )
        >>> prompt = core.Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> out = jaxspec.generate(target, prompt, drafter=model(draft), gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Algorithm 1.
    """
    name = draft.name or "a model"
    return core.BoundDrafter(
        _model(draft.lm, coupled, can_continue), draft.params, (draft,), name=name
    )


@functools.lru_cache
def _model(lm: core.LanguageModel, coupled: bool, can_continue: CanContinue | None) -> core.Drafter:
    def init(start: core.DraftStart, nodes: int) -> ModelState:
        _, cache = prefill(lm, start.weights.draft, start)
        length = token_rows.decoder_prompt(lm, start.prompt).length
        if not nodes:
            return ModelState(cache, length)
        return ModelState(cache, length, length, jnp.full((len(length), nodes), -1, jnp.int32))

    def begin(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int | None
    ) -> core.Reading:
        state = caches.draft
        row = context.row
        drafts = context.max_draft > 0
        if state.slots is None:
            longest = context.gamma
        else:
            longest = state.slots.shape[1]
        width = 0
        if context.adaptive or can_continue is not None:
            width = longest + 1

        def root(cache: core.Cache) -> NodeLogits:
            before = state._replace(cache=cache)  # by way of the carry, which is updated in place
            forward, cache = read_last_two(lm, weights.draft, before, row, drafts, width)
            # Where there is a head, no logits but those of the last token are computed.
            if lm.inside is None:
                return forward.logits[:, -1:], cache
            return lm.inside.head(weights.draft, forward.features[:, -1:]), cache

        def nodes(
            tokens: Int[Array, "B n"], parent: Parent, level: Any, cache: core.Cache
        ) -> NodeLogits:
            forward, cache = lm.extend(weights.draft, cache, known(lm, tokens), parent)
            return forward.logits, cache

        def end(cache: core.Cache, draft: core.Draft, slots: Int[Array, "#B N"]) -> core.Caches:
            length = row.length
            after = state._replace(cache=cache)
            if state.slots is None:  # what was fed for a row after its last draft token is garbage
                length = length + jnp.minimum(jnp.max(slots) + 1, draft.length)
            else:  # rows that may not draft keep the place of their last tree
                slots = jnp.where(drafts[:, None], slots, state.slots)
                start = jnp.where(drafts, length, state.start)
                after = after._replace(start=start, slots=slots)
            return caches._replace(
                draft=after._replace(num_cached=jnp.where(drafts, length, state.num_cached))
            )

        return core.Reading(state.cache, root, nodes, end, can_continue)

    def commit(end: core.RoundEnd) -> core.Caches:
        # Of n accepted tokens of a chain the cache holds at least n - 1; the token after them came
        # from the target.
        state = end.caches.draft
        path = end.verdict.path
        if (
            path is not None
            and state.slots is not None
            and lm.select is not None
            and path.shape[1] > 1
        ):
            # The accepted nodes that were fed move to the front: from start + slot to start + step.
            path = path[:, :-1]  # the deepest are never fed
            step = jnp.arange(path.shape[1], dtype=path.dtype)[None, :]
            slot = jnp.take_along_axis(state.slots, path, axis=1)
            fed = (slot >= 0) & (step < end.verdict.num_accepted[:, None])
            # Nothing else moves: in a round without a draft `start` lies in what is committed.
            cache = lm.select(state.cache, state.start, jnp.where(fed, slot, step))
            num_cached = state.num_cached + jnp.sum(fed, axis=1, dtype=state.num_cached.dtype)
            state = state._replace(cache=cache, num_cached=num_cached)
        return end.caches._replace(draft=take_back(state, end.row))

    steps = core.Steps(init, begin, commit, lm.vocab_size, rollback=take_back)
    drafter = chain(steps, coupled=coupled, trees=lm.select is not None and can_continue is None)
    return drafter._replace(lm=lm, may_be_empty=can_continue is not None)


def prefill(
    lm: core.LanguageModel, params: core.Params, start: core.DraftStart
) -> tuple[core.Forward, core.Cache]:
    """Prefills a draft model, whose encoder may be the target's.

    `start.before` is a state with the fields of `ModelState`. It may lack some of the
    `before.start` tokens where a policy kept it from reading them, so it has no features and taps.
    """
    prompt = start.prompt
    room = start.room
    if start.before is not None:
        return _read_on(lm, params, prompt, room, start.before)
    if lm.encoder is None or not lm.encoder.is_shared:
        return lm.prefill(params, prompt, room)
    return lm.encoder.prefill(params, prompt, room, start.prefilled.encoded)


def _read_on(
    lm: core.LanguageModel,
    params: core.Params,
    prompt: core.Prompt,
    room: core.Room,
    before: core.Before,
) -> tuple[core.Forward, core.Cache]:
    """Reads the prompt tokens that a cache lacks, and the last one for its outputs."""
    batch = len(prompt.length)
    last = prompt.length - 1
    empty = functools.partial(chunks.empty_cache, lm, params)
    state = ModelState(
        chunks.enlarged(before.state.cache, empty, batch, room), before.state.num_cached
    )
    state = take_back_to(state, before.start)
    width = chunks.split(before.width)[0]
    cache = catch_up(lm, params, state, prompt._replace(length=last), last >= 0, width).cache
    forward, cache = lm.extend(
        params, lm.rewind(cache, last), known(lm, token_rows.window(prompt.tokens, last, 1))
    )
    return core.Forward(forward.logits), cache


def take_back(state: CachedState, row: core.Prompt) -> CachedState:
    """Takes tokens back: the row's last token is new to the state. The last two are read again
    anyway.
    """
    return take_back_to(state, row.length - 2)


def take_back_to(state: CachedState, length: Int[Array, " B"]) -> CachedState:
    """Counts at most `length` tokens of each row as cached."""
    return state._replace(num_cached=jnp.minimum(state.num_cached, length))


def read_last_two(
    lm: core.LanguageModel,
    params: core.Params,
    state: ModelState,
    row: core.Prompt,
    runs: Bool[Array, " B"],
    width: int,
) -> tuple[core.Forward, core.Cache]:
    """Reads a row's last two tokens: the outputs after them, and a cache that holds the whole row.

    With a `width` it first reads the tokens that rounds without a draft committed to the rows that
    `runs` marks, `width` tokens a pass. What it reads past a row's end is garbage, and is rewound.
    """
    goal = row.length - 2
    cache = state.cache
    if width:
        cache = catch_up(lm, params, state, row._replace(length=goal), runs, width).cache
        # Where nothing was caught up with, nothing is written far ahead: layers with a window could
        # not take it back.
        goal = jnp.where(runs, goal, jnp.minimum(goal, state.num_cached))
    return lm.extend(
        params, lm.rewind(cache, goal), known(lm, token_rows.window(row.tokens, goal, 2))
    )


def catch_up(
    lm: core.LanguageModel,
    params: core.Params,
    state: ModelState,
    row: core.Prompt,
    runs: Bool[Array, " B"],
    width: int,
) -> ModelState:
    """Reads the tokens that the cache lacks, up to `row.length`, of the rows that `runs` marks;
    garbage follows them.

    `width` tokens a pass; nothing is read where nothing is missing.
    """
    goal = row.length

    def incomplete(state: ModelState) -> Bool[Array, ""]:
        return jnp.any(runs & (state.num_cached < goal))

    def read(state: ModelState) -> ModelState:
        begin = jnp.minimum(state.num_cached, goal)
        end = jnp.minimum(begin + width, goal)
        # The pass before the last one ends early enough for the last one to fit the buffer.
        end = jnp.where(end < goal, jnp.minimum(end, row.tokens.shape[1] - width), end)
        tokens = token_rows.window(row.tokens, begin, width)
        column = jnp.arange(width, dtype=begin.dtype)[None, :]
        # What follows is no token, so that a model of another vocabulary does not read it as
        # several.
        tokens = jnp.where(begin[:, None] + column < end[:, None], tokens, token_rows.NO_TOKEN)
        real = jnp.where(runs, end - begin, 0)
        _, cache = lm.extend(params, lm.rewind(state.cache, begin), known(lm, tokens), real=real)
        return state._replace(cache=cache, num_cached=jnp.where(runs, end, state.num_cached))

    return jax.lax.while_loop(incomplete, read, state)


def known(lm: core.LanguageModel, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Replaces ids that the drafter lacks (the target's vocabulary is larger) by its last one."""
    return jnp.minimum(tokens, lm.vocab_size - 1)
