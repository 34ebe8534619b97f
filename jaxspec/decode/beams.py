"""The bookkeeping of beam search: running beams, finished hypotheses, and when a prompt is done.

Nothing here knows where logits come from, so that plain and speculative search take the same steps.
Candidates, scores and stopping match transformers' beam search. Ties go to the lower (beam, token).

Shapes: B prompts, K beams, T most new tokens, E end tokens, C candidates, V vocabulary, n nodes, k
best tokens.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxspec.core import noise
from jaxspec.core.token_rows import take, where
from jaxspec.structured.processor import RowState, after, allowed

EarlyStopping = bool | Literal["never"]
MODES: tuple[EarlyStopping, ...] = (False, True, "never")  # of which `Goal.stops` is a number


class TokenLogProbs(NamedTuple):
    """Log probabilities of the candidates' tokens [B, C] and of the beams' [B, K, T]."""

    raw: Float[Array, "*tokens"]  # the log probability of each, after the node that it follows
    # these two: the k most probable tokens there, the best first, and their log probabilities
    top_tokens: Int[Array, "*tokens k"]
    top_raw: Float[Array, "*tokens k"]


class Beams(NamedTuple):
    """The beams and hypotheses of each prompt. All of its running beams have the same number of
    tokens.
    """

    # these two: the running beams, the best first: their new tokens, and the sum of their log
    # probabilities; -inf where there are fewer
    tokens: Int[Array, "B K T"]
    scores: Float[Array, "B K"]
    steps: Int[Array, " B"]  # how many tokens each running beam has
    # these three: the finished ones, the best first: their new tokens, how many, the end token
    # included, and the sum of their log probabilities over length ** penalty; -inf where there are
    # fewer
    hypotheses: Int[Array, "B K T"]
    lengths: Int[Array, "B K"]
    final_scores: Float[Array, "B K"]
    done: Bool[Array, " B"]  # whether the search is over
    # these two: the tokens' log probabilities in running beams and in hypotheses, [B, K, T]; None
    # where nobody asked for them
    log_probs: TokenLogProbs | None = None
    final_log_probs: TokenLogProbs | None = None


class Goal(NamedTuple):
    """The end tokens and limits of hypotheses, and how they are scored; all traced."""

    max_new_tokens: Int[Array, " B"]  # the most tokens of each row
    eos: Int[Array, "B E"]  # end tokens; -1 where there is none
    length_penalty: Float[Array, ""]  # exponent of the length that scores are divided by
    # when to stop looking, a number of `MODES`. False: when the best running beam, at its own
    # length, is no better than the worst of K hypotheses. "never": when it could not be, at the
    # greatest length. True: with K hypotheses.
    stops: Int[Array, ""]
    # the patterns of hypotheses, `structured.processor.Values`; None: they are free
    structured: Any = None


class Candidates(NamedTuple):
    """Continuations of some nodes by one token, the best first.

    Attributes:
        scores: the node's score plus the log probability of the token; -inf for padding.
        origins: the node.
        tokens: the token.
        log_probs: the token's log probability, [B, C].
    """

    scores: Float[Array, "B C"]
    origins: Int[Array, "B C"]
    tokens: Int[Array, "B C"]
    log_probs: TokenLogProbs


def start(batch: int, beams: int, width: int, top: int | None) -> Beams:
    """Starts with one beam of no tokens for each prompt; `top` is that of
    `beam_search.SearchPlan`.
    """
    tokens = jnp.zeros((batch, beams, width), jnp.int32)
    none = jnp.full((batch, beams), -jnp.inf, jnp.float32)
    zero = jnp.zeros((batch,), jnp.int32)
    reported = None
    if top is not None:
        best = jnp.zeros((*tokens.shape, top), jnp.float32)
        reported = TokenLogProbs(jnp.zeros(tokens.shape, jnp.float32), best.astype(jnp.int32), best)
    return Beams(
        tokens,
        none.at[:, 0].set(0.0),
        zero,
        tokens,
        tokens[..., 0],
        none,
        zero > 0,
        reported,
        reported,
    )


def num_candidates(beams: int, ends: int) -> int:
    """Counts the continuations that a step looks at: so many that K of them do not end, whatever
    ends.
    """
    return max(2, 1 + ends) * beams


def best_tokens(
    logits: Float[Array, "B n V"],
    count: int,
    without: Int[Array, "B E"] | None = None,
    allowed: Bool[Array, "B n V"] | None = None,
) -> tuple[Float[Array, "B n k"], Int[Array, "B n k"]]:
    """The log probabilities of the most probable tokens after each node, and the tokens.

    There are `count`, or as many as there can be; those of `without` are left out, and those that
    are not `allowed`. Their probability counts nonetheless, as in transformers.

    >>> best_tokens(jnp.log(jnp.array([[[0.25, 0.5, 0.25]]])), 2)[1].tolist()
    [[[1, 0]]]
    """
    # Only the normaliser of the whole vocabulary is needed, [B, n, 1]: log_softmax would write V
    # numbers a node.
    largest = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
    if without is not None:
        token = jnp.arange(logits.shape[-1], dtype=without.dtype)[None, None, :]
        logits = jnp.where(jnp.any(token == without[:, :, None], axis=1)[:, None], -jnp.inf, logits)
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    tokens = noise.largest(logits, min(count, logits.shape[-1]))
    return jnp.take_along_axis(logits, tokens, axis=-1) - largest - total, tokens


def best_candidates(
    scores: Float[Array, "B n"],
    log_probs: Float[Array, "B n C"],
    tokens: Int[Array, "B n C"],
    count: int,
    top: int = 0,
) -> Candidates:
    """The `count` best continuations of all nodes together, of the tokens that `best_tokens`
    returns.

    `top` of these tokens are reported beside each.

    >>> log_probs, tokens = (
    ...     jnp.log(jnp.array([[[0.6, 0.4], [0.9, 0.1]]])),
    ...     jnp.array([[[7, 8], [5, 6]]]),
    ... )
    >>> found = best_candidates(jnp.log(jnp.array([[0.5, 0.4]])), log_probs, tokens, 2, top=2)
    >>> found.origins.tolist(), found.tokens.tolist()  # 0.36 and 0.3
    ([[1, 0]], [[5, 7]])
    >>> found.log_probs.top_tokens.tolist()  # after the second node, and after the first
    [[[5, 6], [7, 8]]]
    """
    width = log_probs.shape[-1]
    # [B, n C]: candidates of all nodes compete with each other.
    flat = (scores[:, :, None] + log_probs).reshape(scores.shape[0], -1)
    # A small vocabulary has fewer candidates than a step wants; -inf never becomes a beam.
    missing = max(count - flat.shape[1], 0)
    flat = jnp.pad(flat, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    best, index = jax.lax.top_k(flat, count)  # of equals the first
    index = jnp.minimum(index, flat.shape[1] - missing - 1).astype(jnp.int32)
    origins = index // width
    token, raw = (
        jnp.take_along_axis(x.reshape(scores.shape[0], -1), index, axis=1)
        for x in (tokens, log_probs)
    )
    of_node = (take(x[..., :top], origins) for x in (tokens, log_probs))
    return Candidates(best, origins, token, TokenLogProbs(raw, *of_node))


def advance(
    beams: Beams, candidates: Candidates, goal: Goal
) -> tuple[Beams, Int[Array, "B K"], Int[Array, "B K"]]:
    """Makes one step: candidates that end become hypotheses, and the best of the others go on.

    Of the K best candidates those that end are compared with the hypotheses so far, and the K best
    of all stay. A prompt that is done stays as it is.

    There are `num_candidates` candidates. Returns the beams after the step, and for each running
    beam the beam that it continues and the token that it adds.
    """
    beam_count = beams.tokens.shape[1]
    length = beams.steps + 1
    last = length >= goal.max_new_tokens
    ends = jnp.any(candidates.tokens[:, :, None] == goal.eos[:, None, :], axis=-1)
    ends = ends | last[:, None]

    first = slice(0, beam_count)
    best: Candidates = jax.tree.map(lambda x: x[:, first], candidates)
    extended = _extend(beams.tokens, best.origins, best.tokens, beams.steps)
    # As in transformers, only the K best candidates may end; an end token further down is lost.
    worth = best.scores / _penalty(length, goal)[:, None]
    worth = jnp.concatenate(
        [beams.final_scores, jnp.where(ends[:, first], worth, -jnp.inf)], axis=1
    )
    final_scores, chosen = jax.lax.top_k(worth, beam_count)  # of equals the earlier one
    new_length = jnp.broadcast_to(length[:, None], beams.lengths.shape)
    lengths = take(jnp.concatenate([beams.lengths, new_length], axis=1), chosen)

    # A stable sort by "ends" brings the best that go on to the front, in their order.
    stay = jnp.argsort(ends, axis=1, stable=True)[:, first]
    scores, origins, tokens, log_probs = jax.tree.map(lambda x: take(x, stay), candidates)
    # Where fewer than K go on, the rest of the beams is dead.
    scores = jnp.where(take(ends, stay), -jnp.inf, scores)

    longest = (goal.stops == MODES.index("never")) & (goal.length_penalty > 0)
    # "never" divides by the longest length that there may be, since the penalty then helps longer
    # hypotheses.
    at_best = jnp.where(longest, goal.max_new_tokens, length)
    # Log probabilities only fall, so the best running beam bounds what is still to come.
    cannot_improve = ~(scores[:, 0] / _penalty(at_best, goal) > final_scores[:, -1])
    full = (final_scores[:, -1] > -jnp.inf) & (goal.stops == MODES.index(True))
    done = last | cannot_improve | full
    after = Beams(
        tokens=_extend(beams.tokens, origins, tokens, beams.steps),
        scores=scores,
        steps=length,
        hypotheses=take(jnp.concatenate([beams.hypotheses, extended], axis=1), chosen),
        lengths=jnp.where(final_scores > -jnp.inf, lengths, 0),
        final_scores=final_scores,
        done=done,
    )
    if beams.log_probs is not None:

        def extend(
            of_beams: TokenLogProbs, origins: Int[Array, "B n"], new: TokenLogProbs
        ) -> TokenLogProbs:
            return jax.tree.map(lambda x, y: _extend(x, origins, y, beams.steps), of_beams, new)

        extended = extend(beams.log_probs, best.origins, best.log_probs)
        after = after._replace(
            log_probs=extend(beams.log_probs, origins, log_probs),
            final_log_probs=jax.tree.map(
                lambda x, y: take(jnp.concatenate([x, y], axis=1), chosen),
                beams.final_log_probs,
                extended,
            ),
        )
    return where(beams.done, beams, after), origins, tokens


def least_taken(candidates: Candidates, stepped: Beams, goal: Goal) -> Float[Array, " B"]:
    """Returns the score of the last candidate that a step takes.

    A step takes the K best candidates, which may end, and the K best of those that go on. It is the
    same whatever candidates come after these. -inf: it takes all there are.

    >>> goal = Goal(jnp.array([9]), jnp.array([[7]]), jnp.float32(1.0), jnp.int32(0))
    >>> scores, tokens = jnp.array([[-1.0, -2.0, -3.0, -4.0]]), jnp.array([[5, 7, 6, 8]])
    >>> origins = jnp.zeros_like(tokens)
    >>> log_probs = TokenLogProbs(scores, origins[..., None], scores[..., None])
    >>> candidates = Candidates(scores, origins, tokens, log_probs)
    >>> stepped, _, _ = advance(start(1, 2, 9, None), candidates, goal)
    >>> least_taken(candidates, stepped, goal).tolist()  # 5 and 7, which ends, and in its place 6
    [-3.0]
    """
    beam_count = stepped.scores.shape[1]
    is_last = stepped.steps >= goal.max_new_tokens  # in the last step all candidates end
    return jnp.where(is_last, candidates.scores[:, beam_count - 1], stepped.scores[:, -1])


def pattern_states(beams: Beams, goal: Goal) -> RowState | None:
    """Follows the patterns over the running beams' tokens [B, K]; None where hypotheses are
    free.
    """
    if goal.structured is None:
        return None
    automata = goal.structured.tables.value
    shape = beams.scores.shape

    def step(index: Int[Array, ""], states: RowState) -> RowState:
        token = jax.lax.dynamic_index_in_dim(beams.tokens, index, axis=2, keepdims=False)
        real = (index < beams.steps)[:, None]
        return jax.tree.map(
            functools.partial(jnp.where, real), after(automata, states, token), states
        )

    start = (
        jnp.broadcast_to(x[:, None], shape) for x in (goal.structured.state, goal.structured.limit)
    )
    return jax.lax.fori_loop(0, jnp.max(beams.steps), step, RowState(*start))


def allowed_tokens(goal: Goal, states: RowState | None, vocab: int) -> Bool[Array, "B n V"] | None:
    """Returns the tokens that may follow each node; None where all may."""
    if states is None:
        return None
    return allowed(goal.structured.tables.value, states, vocab)


def last_tokens(beams: Beams) -> Int[Array, "B K"]:
    """The last token of each running beam."""
    index = jnp.broadcast_to((beams.steps - 1)[:, None, None], (*beams.scores.shape, 1))
    return jnp.take_along_axis(beams.tokens, index, axis=2)[..., 0]


def _extend(
    tokens: Shaped[Array, "B K T *k"],
    origins: Int[Array, "B n"],
    new: Shaped[Array, "B n *k"],
    length: Int[Array, " B"],
) -> Shaped[Array, "B n T *k"]:
    """Appends a token, or its reported numbers, to each of some beams."""
    # A comparison in place of a scatter: prompts are at different lengths, and all beams of one at
    # the same.
    is_place = (
        jnp.arange(tokens.shape[2], dtype=length.dtype)[None, None, :] == length[:, None, None]
    )
    is_place = is_place.reshape(*is_place.shape, *[1] * (tokens.ndim - 3))
    return jnp.where(is_place, new[:, :, None], take(tokens, origins))


def _penalty(length: Int[Array, " B"], goal: Goal) -> Float[Array, " B"]:
    return jnp.power(length.astype(jnp.float32), goal.length_penalty)
