"""Beam search, and speculative beam search: the same hypotheses in fewer passes (appendix A.4 of
arXiv 2211.17192).

All beams of a prompt lie in one row of the cache, as a tree. They share their common tokens, and an
encoder's keys and values are there once. Reordering beams copies no entry of the cache. A round,
with two beams `a b` and `a c` (the cache holds a) and a drafter:

    feed    b c              the beams' last tokens, which follow a
    and     d e  f           draft tokens: d follows b, e follows c, f follows d
    step    b d, c e         the target's two best continuations are both in the tree, so the next step is known, too
    step    b d f, b d g     g is in no tree: these are the round's last tokens, and are fed next
    keep    b c d e          their entries move to where b was; f's is forgotten

Without a drafter a round is one step. Slots of the cache, after each prompt: H for retained entries
(one for each beam and step suffices), then K for the beams' last tokens, then D for draft tokens.
`parent` counts from the first.

Shapes: B prompts, K beams, U draft beams, G gamma, D = U G draft tokens, F = K + D fed tokens, H =
K T retained ones, T most new tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core, sampling, sharding
from jaxspec.core import branches, programs, token_rows
from jaxspec.core.checks import check_type, in_range, integers, number
from jaxspec.core.round import check_takes_trees
from jaxspec.core.token_rows import decoder_prompt
from jaxspec.decode import beams as bookkeeping
from jaxspec.decode import device_memory, option_names, stopping
from jaxspec.decode.beams import MODES, Beams, EarlyStopping, Goal
from jaxspec.decode.options import OPTIONS
from jaxspec.decode.output import BeamSearch
from jaxspec.decode.prompts import Prompts
from jaxspec.decode.request import Prepared, named, prepare
from jaxspec.drafters.model import known
from jaxspec.structured import patterns
from jaxspec.structured.processor import RowState, after


def beam_search(
    target: core.Model,
    prompts: Prompts,
    *,
    beams: int = 4,
    drafter: core.Model | str | None = None,
    gamma: int = 3,
    draft_beams: int | None = None,
    max_new_tokens: Any = None,
    eos_ids: Sequence[int | str] | int | str | None = None,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    log_probs: bool = False,
    top_log_probs: int | None = None,
    **options: Any,
) -> BeamSearch:
    """Beam search: the `beams` most probable continuations that a search of that width finds, as
    transformers' does.

    Hypotheses, their order and their scores match `model.generate(num_beams=beams,
    num_return_sequences=beams)` there. The whole search is one jitted program, and each prompt of a
    batch ends by itself.

    With a drafter the hypotheses are the same, in fewer passes of the target. In each round the
    draft model continues the running beams by a beam search. The target verifies all these
    tokens, a tree, in one pass. The search then takes steps for as long as the target's best (beam,
    token) pairs are all in the tree, or those that are missing cannot matter. In float32 the result
    is equal up to ties between scores: passes over other numbers of tokens round differently.

    Args:
        target: the model; it must take token trees (`LanguageModel.select`), as all networks of
            jaxspec do.
        prompts: the prompts, in any of the forms that `generate` takes.
        beams: hypotheses of each prompt, and beams that run.
        drafter: a smaller model (n-gram tables too) with the same tokenizer, or None.
        gamma: steps that the drafter looks ahead.
        draft_beams: beams of the draft model's search, at least `beams`; by default twice as many.
            A pass of the target is over beams + gamma x draft_beams tokens.
        max_new_tokens, eos_ids: the limit and the end tokens, as in `generate`. A hypothesis
            without an end token ends at max_new_tokens.
        length_penalty: scores are sums of log probabilities over length ** length_penalty (traced).
        early_stopping: when to stop once `beams` hypotheses have finished. True: at once. False:
            when no running beam, scored at its present length, beats the worst of them. "never":
            when none can come to beat it.
        log_probs: whether to report the log probability of every token. Such programs are compiled
            apart.
        top_log_probs: at the place of each token report, too, so many of the most probable ones; 0
            is log_probs=True.
        **options: choices, regex and json_schema, as in `generate`; scores stay under the model's
            distribution without them. A search does not sample: other sampling options are refused
            by name.

    Raises:
        ValueError, TypeError: input that cannot be searched from, sampling options, more beams than
            the vocabulary has tokens, fewer draft beams than beams, a model that takes chains only.
        FloatingPointError: the target's logits were not finite.

    Example:
        >>> import jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     table_model(jax.random.key(2), vocab=5),
        ... )
        >>> plain = beam_search(target, [[3, 1]], beams=2, max_new_tokens=8)
        >>> fast = beam_search(target, [[3, 1]], beams=2, drafter=draft, max_new_tokens=8)
        >>> bool((plain.tokens == fast.tokens).all()), plain.passes.tolist(), fast.passes.tolist()
        (True, [7], [6])

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, appendix A.4.
    """
    unread = [name for name in options if name in OPTIONS and name not in patterns.NAMES]
    if unread:
        raise ValueError(
            f"beam search does not sample, and got {', '.join(unread)}: use jaxspec.generate for "
            "that"
        )
    option_names.check_names(options, [*(beam_search.__kwdefaults__ or ()), *patterns.NAMES])
    shared: dict[str, Any] = dict(
        options, max_new_tokens=max_new_tokens, eos_ids=eos_ids, log_probs=log_probs
    )
    drafter = named(drafter, target)
    prepared = prepare(
        target, prompts, drafter=drafter, gamma=gamma, top_log_probs=top_log_probs, **shared
    )
    if drafter is not None:
        check_type(drafter, core.Model, "drafter", "a jaxspec.Model, whose own beams are the draft")
    (beams,) = integers(1, beams=beams)
    in_range(1, target.lm.vocab_size, beams=beams)
    (draft_beams,) = integers(beams, draft_beams=2 * beams if draft_beams is None else draft_beams)
    if not any(early_stopping is mode or early_stopping == mode == "never" for mode in MODES):
        raise ValueError(f"early_stopping is {early_stopping!r}: expected True, False or 'never'")
    length_penalty = number(length_penalty, "length_penalty", "a finite number")
    draft = None
    if prepared.drafter is not None:
        draft = prepared.drafter.functions.lm
    gamma = prepared.decoder.gamma
    for name, lm in (("the target", target.lm), ("the drafter", draft)):
        if lm is not None:
            check_takes_trees(lm, name, "beams are a token tree")
    goal = Goal(
        prepared.request.max_new_tokens,
        prepared.request.eos,
        jnp.asarray(length_penalty, jnp.float32),
        jnp.asarray(MODES.index(early_stopping), jnp.int32),
        prepared.request.sampling_params.structured,
    )
    if draft is None:
        draft_beams = 0
    search = SearchPlan(
        target.lm,
        draft,
        beams,
        draft_beams,
        gamma,
        prepared.max_new_tokens,
        prepared.options.reported,
    )
    _check_fits(search, prepared)
    final = sharding.fetch(_search(search, prepared.weights, prepared.prompt, goal))
    if final.failed.any():
        raise FloatingPointError(
            f"the target's logits were not finite for prompts {np.flatnonzero(final.failed)}"
        )
    return _result(target, final, np.asarray(prepared.request.eos))


class SearchPlan(NamedTuple):
    """The static part of a search: the models' functions, and sizes."""

    target: core.LanguageModel
    draft: core.LanguageModel | None
    beams: int
    draft_beams: int
    gamma: int  # steps that are drafted
    new: int  # most new tokens
    # how many of the most probable tokens are reported beside each; None: nothing is reported
    top: int | None = None

    @property
    def retained(self) -> int:
        """Entries that the cache must hold after the prompt."""
        return self.beams * self.new

    @property
    def best(self) -> int:
        """The most probable tokens at each place that are reported."""
        return self.top or 0

    @property
    def fed(self) -> int:
        """Tokens of a pass."""
        return self.beams + self.draft_beams * self.gamma

    def num_candidates(self, goal: Goal) -> int:
        """Counts the continuations that a step looks at."""
        return bookkeeping.num_candidates(self.beams, goal.eos.shape[1])

    def prefill(
        self, lm: core.LanguageModel, params: Any, prompt: core.Prompt
    ) -> tuple[core.Forward, core.Cache]:
        """Reads the prompts, with room for H retained entries and behind them the F tokens of one
        pass.
        """
        capacity = token_rows.prefill_length(lm, prompt) + self.retained + self.fed
        # beams come back to entries of any age
        return lm.prefill(params, prompt, core.Room(capacity))

    def best_tokens(
        self, logits: Float[Array, "B n V"], goal: Goal, states: RowState | None
    ) -> tuple[Float[Array, "B n C"], Int[Array, "B n C"]]:
        """Returns the log probabilities of the target's best tokens after each node, and these
        tokens.
        """
        mask = bookkeeping.allowed_tokens(goal, states, self.target.vocab_size)
        return bookkeeping.best_tokens(
            logits, max(self.num_candidates(goal), self.best), allowed=mask
        )


class SearchState(NamedTuple):
    """The state of a search from round to round; every leaf has the prompts as its first axis."""

    beams: Beams  # see `Beams`
    # the retained entries' parents, -1 for the prompt, and where there is none
    parent: Int[Array, "B H"]
    count: Int[Array, " B"]  # how many there are
    above: Int[Array, "B K"]  # the entry that each running beam's last token follows
    caches: core.Caches  # the caches of target and draft, which hold the prompt and these entries
    passes: Int[Array, " B"]  # the target's passes so far
    failed: Bool[Array, " B"]  # prompts whose logits were not finite


class DraftTree(NamedTuple):
    """The draft model's beams: their tokens, level by level, and the slot that each follows."""

    tokens: Int[Array, "B D"]
    parent: Int[Array, "B D"]
    # of the patterns after each fed token [B, F], the beams' last tokens first; None where
    # hypotheses are free
    states: RowState | None


def _check_fits(search: SearchPlan, prepared: Prepared) -> None:
    """Raises NotEnoughMemory for a search whose caches do not fit the memory."""
    weights, (rows, width) = prepared.weights, prepared.prompt.tokens.shape
    if not search.best and not device_memory.is_large(rows, width, search.retained + search.fed):
        return

    def caches(weights: core.Weights, prompt: core.Prompt) -> list[core.Cache]:
        pairs = (search.target, weights.target), (search.draft, weights.draft)
        return [search.prefill(lm, params, prompt)[1] for lm, params in pairs if lm is not None]

    cache_bytes, largest = device_memory.sizes_of(caches, weights, prepared.prompt)
    parts = {
        "weights": device_memory.size_of(weights),
        "caches": cache_bytes,
        "what prefill makes": largest,
    }
    beams = jax.eval_shape(lambda: bookkeeping.start(rows, search.beams, search.new, search.top))
    parts["beams and what is reported"] = device_memory.size_of(beams)
    purpose = (
        f"beams={search.beams} with max_new_tokens={search.new} for {rows} prompts of up to "
        f"{width} tokens"
    )
    device_memory.check_memory(parts, purpose, "one of these", device_memory.devices(weights))


@programs.jit(static_argnames=("search",))
def _search(
    search: SearchPlan, weights: core.Weights, prompt: core.Prompt, goal: Goal
) -> SearchState:
    """The whole search, but for the caches that it ends with."""
    base = decoder_prompt(search.target, prompt).length

    def unfinished(state: SearchState) -> Bool[Array, ""]:
        return ~jnp.all(state.beams.done)

    state = _first_step(search, weights, prompt, goal)
    one_round = functools.partial(_round, search, weights, base, goal)
    return jax.lax.while_loop(unfinished, one_round, state)._replace(caches=core.Caches(()))


def _first_step(
    search: SearchPlan, weights: core.Weights, prompt: core.Prompt, goal: Goal
) -> SearchState:
    """Makes the state after prefill: every running beam has one token, and nothing is retained
    yet.
    """
    batch = prompt.tokens.shape[0]
    draft = search.draft
    with jax.named_scope("prefill"):
        forward, cache = search.prefill(search.target, weights.target, prompt)
        caches = core.Caches(
            cache, () if draft is None else search.prefill(draft, weights.draft, prompt)[1]
        )
    scores = jnp.zeros((batch, 1), jnp.float32)
    zero = jnp.zeros((batch,), jnp.int32)
    beams = bookkeeping.start(batch, search.beams, search.new, search.top)
    # one beam, without a token
    first = beams._replace(scores=beams.scores[:, :1], tokens=beams.tokens[:, :1])
    log_probs, tokens = search.best_tokens(
        forward.logits, goal, bookkeeping.pattern_states(first, goal)
    )
    candidates = bookkeeping.best_candidates(
        scores, log_probs, tokens, search.num_candidates(goal), search.best
    )
    beams, _, _ = bookkeeping.advance(beams, candidates, goal)
    # One number of a prompt's row tells: normalising logits that are not finite makes all of them
    # NaN.
    failed = jnp.isnan(log_probs[:, 0, 0])
    beams = beams._replace(done=beams.done | failed)
    parent, above = (jnp.full((batch, n), -1, jnp.int32) for n in (search.retained, search.beams))
    return SearchState(beams, parent, zero, above, caches, zero, failed)


def _round(
    search: SearchPlan,
    weights: core.Weights,
    base: Int[Array, " B"],
    goal: Goal,
    state: SearchState,
) -> SearchState:
    """Drafts, reads the draft in one pass, and makes the steps that it allows."""
    # Slots of the cache after the prompt: H retained entries (-1: not used yet); then what is fed,
    # the K last tokens of the beams and the D draft tokens by level.
    last = bookkeeping.last_tokens(state.beams)
    live = ~state.beams.done
    target = search.target
    states = bookkeeping.pattern_states(state.beams, goal)
    drafted = DraftTree(last[:, :0], last[:, :0], states)
    draft_cache = state.caches.draft
    if search.draft is not None:
        with jax.named_scope("draft"):
            cache = search.draft.rewind(draft_cache, base + search.retained)
            drafted, draft_cache = _draft(
                search, search.draft, weights.draft, cache, state, states, goal
            )
    fed = jnp.concatenate([last, drafted.tokens], axis=1)
    parent = jnp.concatenate([state.parent, state.above, drafted.parent], axis=1)
    with jax.named_scope("target"):
        # Fed tokens are written behind all H entries, used or not, so that their slots are the same
        # in every round.
        cache = target.rewind(state.caches.target, base + search.retained)
        forward, cache = target.extend(weights.target, cache, fed, parent)
        log_probs, tokens = search.best_tokens(forward.logits, goal, drafted.states)
    with jax.named_scope("steps"):
        beams, walk = _steps(search, state.beams, log_probs, tokens, drafted, goal)
    with jax.named_scope("commit"):
        # Fed tokens that some beam went through move to the end of the retained ones.
        order, retained, above = _keep(search, state, parent, walk)
        # Slots as `select` counts them: from the first one after the entries that stay, [B, F].
        path = search.retained - state.count[:, None] + order

        def keep(lm: core.LanguageModel, cache: core.Cache) -> core.Cache:
            assert lm.select is not None
            return lm.select(cache, base + state.count, path)

        draft = search.draft
        if draft is not None:
            level = slice(-search.draft_beams, None)

            def read(cache: core.Cache) -> core.Cache:
                return draft.extend(weights.draft, cache, known(draft, fed[:, level]), parent)[1]

            # The draft model has not read its last level: it does where one of these tokens is
            # retained.
            draft_cache = keep(
                draft, branches.run_if(jnp.any(walk.retained[:, level]), read, draft_cache)
            )
        caches = core.Caches(keep(target, cache), draft_cache)
    failed = state.failed | walk.failed
    beams = beams._replace(done=beams.done | failed)
    num_retained = state.count + jnp.sum(walk.retained, axis=1, dtype=jnp.int32)
    passes = state.passes + live.astype(jnp.int32)
    return SearchState(beams, retained, num_retained, above, caches, passes, failed)


def _draft(
    search: SearchPlan,
    lm: core.LanguageModel,
    params: Any,
    cache: core.Cache,
    state: SearchState,
    states: RowState | None,
    goal: Goal,
) -> tuple[DraftTree, core.Cache]:
    """The draft model's beam search from the running beams, without end tokens, which no beam goes
    on after.

    `states`: the patterns' states after the beams' last tokens.

    Its last level is not fed: nothing after those tokens is drafted, and they are seldom all
    accepted.
    """
    scores = state.beams.scores
    fed = bookkeeping.last_tokens(state.beams)
    first = search.retained
    # The parents of all slots before the draft: of H retained entries, and of the K last tokens.
    tokens = []
    parents = [jnp.concatenate([state.parent, state.above], axis=1)]
    all_states = [states]
    vocab = search.target.vocab_size
    for level in range(search.gamma):
        # A level of the tree a pass: its K or D tokens follow nodes of the level before.
        forward, cache = lm.extend(params, cache, known(lm, fed), jnp.concatenate(parents, axis=1))
        logits = sampling.match_vocab(forward.logits, vocab)
        mask = bookkeeping.allowed_tokens(goal, states, vocab)
        log_probs, best = bookkeeping.best_tokens(
            logits, search.draft_beams, without=goal.eos, allowed=mask
        )
        candidates = bookkeeping.best_candidates(scores, log_probs, best, search.draft_beams)
        scores = candidates.scores
        fed = candidates.tokens
        tokens.append(fed)
        if states is not None:
            before = RowState(*(jnp.take_along_axis(x, candidates.origins, axis=1) for x in states))
            states = after(goal.structured.tables.value, before, fed)
            all_states.append(states)
        # Origins count the tokens of a level; slots count from the beginning of the cache's tree.
        parents.append(first + candidates.origins)
        first = search.retained + search.beams + level * search.draft_beams
    tree_states = None
    if states is not None:
        tree_states = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *all_states)
    return DraftTree(
        jnp.concatenate(tokens, axis=1), jnp.concatenate(parents[1:], axis=1), tree_states
    ), cache


class Walk(NamedTuple):
    """The nodes that the steps of a round went through."""

    retained: Bool[Array, "B F"]  # the fed tokens that some beam went through
    above: Int[Array, "B K"]  # the fed token that each running beam's last token follows
    was_active: Bool[Array, " B"]  # prompts for which a step was taken
    failed: Bool[Array, " B"]  # prompts with logits that were not finite, at a node that was read


def _steps(
    search: SearchPlan,
    beams: Beams,
    log_probs: Float[Array, "B F C"],
    tokens: Int[Array, "B F C"],
    draft: DraftTree,
    goal: Goal,
) -> tuple[Beams, Walk]:
    """Makes as many steps as the verified tree allows.

    The first step is always known. A later step is known if the tree holds the last tokens of all
    running beams. It is also known if a beam is missing whose continuations cannot matter. A
    continuation is never more probable than its beam. So no continuation of a missing beam belongs
    to the step if all that the step takes are more probable than that beam itself. This is the
    "more elaborate procedure" of the paper's appendix A.4.
    """
    count = search.num_candidates(goal)
    node = jnp.broadcast_to(jnp.arange(search.beams, dtype=jnp.int32)[None, :], beams.scores.shape)
    has_node = jnp.ones(beams.scores.shape, bool)  # whether the tree holds a beam's last token
    all_fed = jnp.arange(search.fed, dtype=jnp.int32)[None, None, :]
    was_active = ~beams.done
    goes_on = was_active
    retained = jnp.zeros((len(goes_on), search.fed), bool)
    walk = Walk(retained, above=node, was_active=was_active, failed=jnp.zeros_like(goes_on))
    for depth in range(search.gamma + 1):
        # The C best continuations of each beam, after the node where it is [B, K, C], and plain
        # beam search's step.
        at_node, best = (
            jnp.take_along_axis(x, node[:, :, None], axis=1) for x in (log_probs, tokens)
        )
        alive = beams.scores > -jnp.inf
        is_read = alive & has_node
        bad = jnp.any(jnp.isnan(at_node[..., 0]) & is_read, axis=1)
        at_node = jnp.where(is_read[:, :, None], at_node, -jnp.inf)
        # The same step as plain beam search's, on logits of the verified tree: hypotheses cannot
        # differ from its.
        candidates = bookkeeping.best_candidates(beams.scores, at_node, best, count, search.best)
        stepped, origins, chosen = bookkeeping.advance(beams, candidates, goal)
        least = bookkeeping.least_taken(candidates, stepped, goal)
        bound = jnp.max(jnp.where(alive & ~has_node, beams.scores, -jnp.inf), axis=1)
        # At equal scores a missing continuation could come first.
        goes_on = goes_on & ((bound == -jnp.inf) | (least > bound))
        above = jnp.take_along_axis(node, origins, axis=1)
        # [B, K, F] to [B, F]: a fed token is retained if some live beam stands on it.
        on_way = jnp.any((node[:, :, None] == all_fed) & is_read[:, :, None], axis=1)
        walk = Walk(
            walk.retained | (on_way & goes_on[:, None]),
            jnp.where(goes_on[:, None], above, walk.above),
            was_active,
            walk.failed | (bad & goes_on),
        )
        # Prompts that left the tree, or are done, keep the beams of their last step.
        beams = token_rows.where(goes_on, stepped, beams)
        goes_on = goes_on & ~beams.done
        if depth < search.gamma:
            follows = draft.parent[:, None, :] == search.retained + above[:, :, None]
            # [B, K, D]: the draft node that has a beam's new token, after the node where the beam
            # was.
            same = follows & (draft.tokens[:, None, :] == chosen[:, :, None])
            has_node = jnp.any(same, axis=-1)
            node = search.beams + jnp.argmax(same, axis=-1).astype(jnp.int32)
    return beams, walk


def _keep(
    search: SearchPlan, state: SearchState, parent: Int[Array, "B H+F"], walk: Walk
) -> tuple[Int[Array, "B F"], Int[Array, "B H"], Int[Array, "B K"]]:
    """Finds the places of the retained tokens: after those that are there, in order.

    Returns:
        The fed tokens, the retained ones first; the parents of all retained entries; what each
        beam's last token follows.
    """
    # Retained tokens first, in the order in which they were fed: parents stay before children.
    order = jnp.argsort(~walk.retained, axis=1, stable=True).astype(jnp.int32)
    # The slot of each retained token.
    slot = state.count[:, None] + jnp.cumsum(walk.retained, axis=1, dtype=jnp.int32) - 1
    # A parent is a slot: below H a retained entry, which keeps its number; from H on a fed token,
    # which gets a place.
    fed_parent = parent[:, search.retained :]
    is_retained = fed_parent < search.retained
    slot_of_parent = jnp.take_along_axis(slot, jnp.maximum(fed_parent - search.retained, 0), axis=1)
    new_parent = jnp.where(is_retained, fed_parent, slot_of_parent)
    new_parent = jnp.take_along_axis(new_parent, order, axis=1)
    # The rest of the order is tokens that no beam went through: they get no parent.
    count = jnp.sum(walk.retained, axis=1, dtype=jnp.int32)
    is_kept = jnp.arange(search.fed, dtype=jnp.int32)[None, :] < count[:, None]
    padded = jnp.pad(state.parent, ((0, 0), (0, search.fed)), constant_values=-1)
    entry_parent = token_rows.append(padded, state.count, jnp.where(is_kept, new_parent, -1))
    last_slot = jnp.take_along_axis(slot, walk.above, axis=1)
    above = jnp.where(walk.was_active[:, None], last_slot, state.above)
    return order, entry_parent[:, : search.retained], above


def _result(target: core.Model, final: SearchState, eos: np.ndarray) -> BeamSearch:
    b, passes = jax.device_get((final.beams, final.passes))
    width = int(b.lengths.max())
    real = np.arange(width)[None, None, :] < b.lengths[:, :, None]
    tokens = np.where(real, b.hypotheses[:, :, :width], 0)
    texts = []
    if target.tokenizer is not None:
        texts = [
            [
                stopping.decode(target.tokenizer, row[:n].tolist())
                for row, n in zip(rows, lengths, strict=True)
                if n
            ]
            for rows, lengths in zip(tokens, b.lengths, strict=True)
        ]
    # Why a hypothesis ended follows from its last token: end tokens are kept in it.
    last = np.take_along_axis(tokens, np.maximum(b.lengths - 1, 0)[:, :, None], axis=2)
    is_end = np.any(last == eos[:, None, :], axis=-1)
    finish = [
        ["eos" if ends else "length" for ends, n in zip(row, lengths, strict=True) if n]
        for row, lengths in zip(is_end, b.lengths, strict=True)
    ]
    reported = []
    if b.final_log_probs is not None:
        is_shown = (real, real[..., None], real[..., None])
        reported = [
            np.where(shown, x[:, :, :width], 0)
            for shown, x in zip(is_shown, b.final_log_probs, strict=True)
        ]
        if not reported[1].shape[-1]:
            reported = reported[:1]
    return BeamSearch(texts, tokens, b.lengths, b.final_scores, b.steps, passes, finish, *reported)
