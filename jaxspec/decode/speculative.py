"""Speculative decoding (Leviathan, Kalman, Matias, arXiv 2211.17192): draft, verify in one pass, accept, roll back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import buffers, tree
from jaxspec import warp as warps
from jaxspec.accept.common import JUDGE_TREES
from jaxspec.base import (
    Cache,
    Decoder,
    Distribution,
    Draft,
    Drafter,
    Failure,
    Forward,
    LanguageModel,
    Policy,
    Prompt,
    Request,
    RoundInfo,
    Rule,
    Sampler,
    State,
    Verdict,
    Weights,
)
from jaxspec.decode import state as rounds
from jaxspec.decode.autoregressive import autoregressive

Outputs = TypeVar("Outputs", Forward, Distribution)


@functools.cache
def speculative(
    target: LanguageModel,
    drafter: Drafter,
    rule: Rule,
    sampler: Sampler,
    gamma: int,
    policy: Policy | None = None,
) -> Decoder:
    """A decoder whose every round commits between 1 and gamma + 1 tokens per row, for one pass of the target.

    A round, for a row [a b c] (the cache holds a b) and gamma = 2:
        draft   x y            from the drafter
        verify  c x y          fed to the target: distributions after c, x and y
        accept  1, then t      by the rule: x is accepted, y is not, t replaces it
        commit  [a b c x t]    and the cache is rewound to a b c x: one token behind, as before

    The same with a tree, x and z after c, y after x:
        draft   x z y          parents 0 0 1
        verify  c x z y        each attends to its ancestors; z and x are at one position
        accept  z, then t      by the rule: path (1,)
        commit  [a b c z t]    the cache's entry of z moves to where x's is, and is then rewound: a b c z

    The distribution of the output is the target's if the rule is exact, whatever the drafter does. With gamma 0 this is
    plain decoding.

    With a policy gamma is the most draft tokens of a round, and the policy chooses how many each row makes. The drafter
    stops where no row goes on, and the target reads little more than the longest draft (`bucket_widths`).

    Args:
        target: the model whose distribution the text has.
        drafter: of chains, or of trees: these have a size of their own, and gamma is not read.
        rule: which draft tokens are accepted.
        sampler: logits to distributions.
        gamma: draft tokens a round.
        policy: chooses the length of drafts.

    Raises:
        ValueError: gamma is negative; a drafter of trees with a model or a rule that takes chains only.
    """
    if gamma < 0:
        raise ValueError(f"gamma is {gamma}: expected 0 (plain decoding) or more draft tokens a round")
    if gamma == 0:
        return autoregressive(target, sampler)
    if drafter.longest is not None:
        gamma = min(gamma, drafter.longest)
    nodes, depth = (gamma, gamma) if drafter.tree is None else drafter.tree
    if drafter.tree is not None:
        if target.select is None:
            raise ValueError(
                "the drafter drafts trees, and the target takes chains only: its LanguageModel has no select"
            )
        if not rule.trees:
            raise ValueError(
                f"the drafter drafts trees, and the rule {rule.name} judges chains only: use {JUDGE_TREES}"
            )
        if policy is not None and policy.should_continue is not None:
            raise ValueError(
                "the policy stops a draft token by token, and the drafter drafts trees: use a policy that "
                "sets a limit beforehand, such as policies.adaptive() or policies.constant(n)"
            )
    widths = bucket_widths(nodes, adaptive=policy is not None, may_be_empty=drafter.may_be_empty)

    def init(weights: Weights, prompt: Prompt, request: Request, headroom: int) -> State:
        with jax.named_scope("prefill"):
            capacity = buffers.prefill_length(target, prompt) + headroom
            prefilled = target.prefill(weights.target, prompt, capacity)
        with jax.named_scope("draft"):
            draft = drafter.init(weights, prompt, headroom, prefilled[0])
        prompt, prefilled, draft = buffers.repeat_rows((prompt, prefilled, draft), rounds.samples(prompt, request))
        state = rounds.init_state(target, prompt, request, headroom, prefilled, sampler)
        if policy is not None:
            state = state._replace(memory=policy.init(request.policy, prompt))
        return state._replace(caches=state.caches._replace(draft=draft))

    def step(weights: Weights, state: State) -> tuple[State, RoundInfo]:
        live, start = jnp.logical_not(state.done), state.length

        def to_distribution(
            sampling_params: Any,
            logits: Float[Array, "B T W"],
            draft_tokens: Int[Array, "B N"] | None = None,
            seen: Bool[Array, "#B T N"] | None = None,
        ) -> Distribution:
            prefix = rounds.prefix(state)._replace(draft_tokens=draft_tokens, seen=seen)
            return sampler(sampling_params, warps.match_vocab(logits, target.vocab_size), prefix)

        params, own = state.request.sampling_params, state.request.draft_sampling_params
        drafts_from = functools.partial(to_distribution, params if own is None else own)
        with jax.named_scope("draft"):
            context = rounds.draft_context(policy, state, depth, drafts_from)
            draft, caches = drafter.propose(weights, state.caches, context)
            _check_shape(draft, drafter, nodes)
            draft = rounds.truncate(draft, context.limit, target.vocab_size)
        fed = jnp.concatenate([rounds.last_token(state), draft.tokens], axis=1)
        parent = None if draft.parent is None else tree.fed(draft.parent)

        def forward_over(width: int, cache: Cache) -> Verification:
            branch = None if parent is None else parent[:, :width]
            forward, cache = target.extend(weights.target, cache, fed[:, :width], branch)
            if width == 1:
                return Verification(forward, cache, to_distribution(params, forward.logits))
            chain = jnp.tri(width, width - 1, -1, bool)[None]
            seen = chain if branch is None else tree.ancestors(branch)[:, :, 1:]
            return Verification(
                forward, cache, to_distribution(params, forward.logits, draft.tokens[:, : width - 1], seen)
            )

        with jax.named_scope("target"):
            needed = jnp.max(jnp.where(live, draft.length, 0))
            cache = target.rewind(caches.target, start - 1)  # a drafter may have used it
            forward, cache, distribution = verify(forward_over, cache, needed, widths)
        with jax.named_scope("accept"):
            verdict = rule.verify(state.request.keys, start, draft, distribution)
            _check_verdict(verdict, rule, start.shape)
        with jax.named_scope("commit"):
            new = rounds.committed_tokens(draft, verdict, depth)
            invalid = rounds.is_invalid(forward, distribution, rounds.visited(verdict, fed.shape[1]))
            impossible = rounds.is_impossible(draft, verdict, target.vocab_size)
            bad = jnp.where(invalid, int(Failure.LOGITS), jnp.where(impossible, int(Failure.RULE), 0))
            state, committed = rounds.commit(state, new, verdict.num_accepted + 1, bad)
            if verdict.path is not None and target.select is not None:
                cache = target.select(cache, start, verdict.path[:, :depth])
            caches = caches._replace(target=target.rewind(cache, state.length - 1))
            row = Prompt(state.tokens, state.length)
            state = state._replace(caches=drafter.commit(weights, caches, row, verdict, forward))
            if policy is not None:
                memory = policy.update(state.request.policy, state.memory, draft, verdict, committed)
                state = state._replace(memory=memory)
        return rounds.update_stats(state, live, draft, verdict, committed)

    return Decoder(init, step, depth, nodes, trees=drafter.tree is not None, exact=rule.exact)


def _check_shape(draft: Draft, drafter: Drafter, nodes: int) -> None:
    """Refuses a draft that is not what its drafter has announced."""
    kinds = ["a chain" if chain else "a tree" for chain in (draft.parent is None, drafter.tree is None)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"the drafter proposed {kinds[0]} and announces {kinds[1]}: set Drafter.tree to match")
    if draft.tokens.shape[1] != nodes:
        width = draft.tokens.shape[1]
        raise ValueError(f"the drafter proposed {width} tokens a row: expected {nodes}, some of which may be padding")


def _check_verdict(verdict: Verdict, rule: Rule, shape: tuple[int, ...]) -> None:
    """Refuses what no rule may return."""
    if not isinstance(verdict, Verdict):
        raise TypeError(f"the rule {rule.name} returned a {type(verdict).__name__}: expected a base.Verdict")
    for name in ("num_accepted", "next_token", "num_tested"):
        x = getattr(verdict, name)
        if jnp.shape(x) != shape or not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            found = f"shape {jnp.shape(x)} and dtype {jnp.result_type(x)}"
            raise ValueError(f"the rule {rule.name} returned {name} of {found}: expected integers of shape {shape}")


class Verification(NamedTuple):
    """The target's pass over a draft: its outputs, the cache after it, and the distribution at each position."""

    forward: Forward
    cache: Cache
    distribution: Distribution


def bucket_widths(nodes: int, *, adaptive: bool, may_be_empty: bool) -> tuple[int, ...]:
    """Tokens that the target's pass may be over: each is a program of its own, so there are few.

    Args:
        nodes: most draft tokens.
        adaptive: whether a policy chooses the length of drafts; passes over 1, 2, 4, 8, ... and nodes + 1 tokens are
            then programs of their own (matrix units work on powers of two, so 3 tokens cost what 4 do).
        may_be_empty: whether there may be no draft token at all.

    >>> bucket_widths(7, adaptive=True, may_be_empty=False), bucket_widths(7, adaptive=False, may_be_empty=True)
    ((1, 2, 4, 8), (1, 8))
    """
    if adaptive:
        return (*(1 << i for i in range(nodes.bit_length()) if 1 << i <= nodes), nodes + 1)
    return (1, nodes + 1) if may_be_empty else (nodes + 1,)


def verify(
    forward_over: Callable[[int, Cache], Verification],
    cache: Cache,
    needed: Int[Array, ""],
    widths: tuple[int, ...],
) -> Verification:
    """The narrowest pass that reads each row's last token and all draft tokens.

    Args:
        forward_over: makes a pass over so many tokens.
        cache: of the target.
        needed: the number of the last draft token, counted from 1, that any row has; what follows need not be read.
            There is a position for each token of the widest pass nonetheless, zeros where nothing was read.
        widths: of `bucket_widths`.
    """
    if len(widths) == 1:
        return forward_over(widths[0], cache)

    def padded(width: int, cache: Cache) -> Verification:
        forward, cache, distribution = forward_over(width, cache)
        return Verification(_pad(forward, widths[-1]), cache, _pad(distribution, widths[-1]))

    index = jnp.sum(jnp.asarray(widths[:-1]) < needed + 1)
    return jax.lax.switch(index, [functools.partial(padded, width) for width in widths], cache)


def _pad(outputs: Outputs, width: int) -> Outputs:
    """The same with `width` positions [B, T, ..]; what has none stays.

    >>> _pad(Distribution(jnp.ones((1, 2, 3)), greedy=jnp.array([True])), 5).log_probs.shape
    (1, 5, 3)
    """

    def pad(x: Array) -> Array:
        return x if x.ndim < 2 else jnp.pad(x, [(0, 0), (0, width - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

    return jax.tree.map(pad, outputs)
