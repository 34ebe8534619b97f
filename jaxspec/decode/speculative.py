"""Speculative decoding (Leviathan, Kalman, Matias, arXiv 2211.17192): draft, verify in one pass,
accept, roll back.
"""

from __future__ import annotations

import functools

import jax

from jaxspec import core
from jaxspec.core import token_rows
from jaxspec.core.round import bucket_widths, check_trees, committed_caches, run_round, size_of
from jaxspec.decode import numbers
from jaxspec.decode import state as states
from jaxspec.decode.autoregressive import autoregressive


@functools.lru_cache
def speculative(
    target: core.LanguageModel,
    drafter: core.Drafter,
    rule: core.Rule,
    sampler: core.Sampler,
    gamma: int,
    policy: core.Policy | None = None,
    top_log_probs: int | None = None,
    trace_numbers: bool = False,
) -> core.Decoder:
    """Makes a decoder whose rounds commit 1 to gamma + 1 tokens of each unfinished row, for one
    pass of the target. (A tree commits up to its depth plus 1.)

    A round, for a row [a b c] (the cache holds a b) and gamma = 2:
        draft   x y            from the drafter
        verify  c x y          fed to the target: distributions after c, x and y
        accept  1, then t      by the rule: x is accepted, y is not, t replaces it
        commit  [a b c x t]    and the cache is rewound to a b c x: one token behind, as before

    The same with a tree, x and z after c, y after x:
        draft   x z y          parents 0 0 1, which count fed tokens: c is 0, x is 1
        verify  c x z y        each attends to its ancestors; z and x are at one position
        accept  z, then t      by the rule: path (1,), which counts draft tokens: x is 0, z is 1
        commit  [a b c z t]    z's cache entry moves to x's slot; the cache is rewound to a b c z

    The distribution of the output is the target's if the rule is exact, whatever the drafter does.
    A chain of gamma 0 is plain decoding.

    With a policy gamma is the most draft tokens of a round, and the policy chooses how many each
    row makes. The drafter stops where no row goes on, and the target reads little more than the
    longest draft (`bucket_widths`).

    Args:
        target: the model whose distribution the text has.
        drafter: drafts chains, or trees: a tree's drafter defines its size, and gamma is not read.
        rule: the acceptance rule.
        sampler: logits to distributions.
        gamma: draft tokens a round.
        policy: chooses the length of drafts.
        top_log_probs: how many of the most probable tokens of each position `core.LogProbs`
            reports, besides the emitted one. None: it reports nothing, and the program computes
            nothing for it.
        trace_numbers: whether rounds report `core.TraceNumbers` of their draft tokens. If not, the
            program computes nothing for them.

    Raises:
        ValueError: gamma is negative; a drafter of trees with a model or a rule that takes chains
            only.
    """
    if gamma < 0:
        raise ValueError(
            f"gamma is {gamma}: expected 0 (plain decoding) or more draft tokens a round"
        )
    nodes, depth, _ = size_of(drafter, gamma)
    if not nodes:
        return autoregressive(target, sampler, top_log_probs)
    check_trees(target, drafter, rule)
    if drafter.tree is not None and policy is not None and policy.should_continue is not None:
        raise ValueError(
            "the policy stops a draft token by token, and the drafter drafts trees: use a policy "
            "that sets a limit beforehand, such as policies.adaptive() or policies.constant(n)"
        )
    followed_by = states.followers(sampler, target.vocab_size, top_log_probs, policy)
    entropy = numbers.entropy if trace_numbers else None
    numbers_of = None
    if trace_numbers:
        numbers_of = functools.partial(numbers.of_round, rule)
    widths = bucket_widths(nodes, adaptive=policy is not None, may_be_empty=drafter.may_be_empty)

    def init(
        weights: core.Weights,
        prompt: core.Prompt,
        request: core.Request,
        headroom: int,
        before: core.Before | None = None,
        spare: int = 0,
    ) -> core.State:
        prompt, before = token_rows.with_row(target, prompt), states.of_each(before, prompt)
        room = token_rows.room(target, prompt, headroom, nodes, spare).larger(drafter.spare)
        with jax.named_scope("prefill"):
            prefilled = states.read_prompt(target, weights.target, prompt, room, before)
        with jax.named_scope("draft"):
            draft_before = None
            if before is not None:
                draft_before = before.of(before.state.draft)
            draft = drafter.init(core.DraftStart(weights, prompt, room, prefilled[0], draft_before))
        prompt, prefilled, draft = token_rows.repeat_rows(
            (prompt, prefilled, draft), states.samples(prompt, request)
        )
        state = states.init_state(
            target, prompt, request, headroom, prefilled, sampler, followed_by
        )
        return state._replace(caches=state.caches._replace(draft=draft))

    def step(weights: core.Weights, state: core.State) -> tuple[core.State, core.RoundInfo]:
        of_target, of_drafter = states.distributions(state, sampler, target.vocab_size)
        context = states.draft_context(policy, state, depth, of_drafter, sampler, entropy)
        limit = states.shorten(policy, state)
        # Draft, verify in one pass, accept:
        result = run_round(
            target, drafter, rule, weights, state.caches, context, of_target, widths, limit
        )
        with jax.named_scope("commit"):
            state, info = states.end_round(
                state, result, followed_by, target.vocab_size, numbers_of
            )
            # An end token or the limit may cut what was accepted; the target's cache follows the
            # committed row.
            caches = result.caches._replace(
                target=target.rewind(result.caches.target, state.length - 1)
            )
            row = core.Prompt(state.tokens, state.length)
            end = core.RoundEnd(weights, caches, row, result.verdict, result.target.forward)
            return state._replace(caches=committed_caches(drafter.commit(end))), info

    return core.Decoder(
        init,
        step,
        depth,
        nodes,
        trees=drafter.tree is not None,
        exact=rule.exact,
        numbers=trace_numbers,
    )
