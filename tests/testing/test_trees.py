"""Rounds that draft trees, as black boxes: how the tree is made, how it is judged, and what the
decoder makes of it.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import (
    BoundDrafter,
    Caches,
    Decoder,
    Draft,
    Drafter,
    Draw,
    Prompt,
    Rule,
    TreeSize,
    Verdict,
    noise,
)
from jaxspec.decode.request import prepare
from jaxspec.testing import (
    certify,
    decoder_distribution,
    outcomes,
    table_model,
    table_model_from,
    total_variation,
)
from tests.marks import marked

TARGET = table_model(jax.random.key(1), 3)
TABLE = jax.random.normal(jax.random.key(5), (3, 3))  # of a drafter: logits after each token
PROMPT = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))
DRAWS = ("with", "without", "top", "mixed")


def children(keys, log_probs, count, how):
    """Tokens of a node's children, and how each was chosen."""
    if how == "with":
        child_keys = noise.split(keys, 0, count)
        wide = jnp.broadcast_to(log_probs[:, None], (*child_keys.shape, log_probs.shape[1]))
        return noise.categorical(child_keys, wide), [Draw.WITH_REPLACEMENT] * count
    if how == "without":
        return noise.without_replacement(keys, log_probs, count), [Draw.WITHOUT_REPLACEMENT] * count
    fixed = noise.largest(log_probs, count if how == "top" else count - 1)
    if how == "top":
        return fixed, [Draw.FIXED] * count
    is_fixed = jnp.any(fixed[:, :, None] == jnp.arange(log_probs.shape[1])[None, None, :], axis=1)
    drawn = noise.categorical(keys, jnp.where(is_fixed, -jnp.inf, log_probs))
    return jnp.concatenate([fixed, drawn[:, None]], axis=1), [Draw.FIXED] * (count - 1) + [
        Draw.WITHOUT_REPLACEMENT
    ]


@functools.cache
def tree_drafter(branching, how, said=None):
    """Every node of depth d has branching[d] children; `said`: how it claims to have chosen
    them.
    """

    def propose(weights, caches, context):
        keys = noise.at(context.keys, context.row.length, noise.Purpose.DRAFT)
        last = jnp.take_along_axis(context.row.tokens, context.row.length[:, None] - 1, axis=1)[
            :, 0
        ]
        nodes, parent, draws, log_probs, level = [], [], [], [], [(0, last)]
        for count in branching:
            below = []
            for number, token in level:
                log_probs.append(
                    context.to_distribution(weights.draft[token][:, None]).log_probs[:, 0]
                )
                level_keys = noise.split(keys, len(log_probs), 1)[:, 0]
                tokens, chosen = children(level_keys, log_probs[-1], count, how)
                for child in range(count):
                    nodes.append(tokens[:, child])
                    parent.append(number)
                    draws.append(chosen[child] if said is None else said)
                    below.append((len(nodes), nodes[-1]))
            level = below
        static = (
            jnp.broadcast_to(jnp.array(x, jnp.int32)[None], (len(last), len(x)))
            for x in (parent, draws)
        )
        parents, kinds = static
        length = jnp.full_like(context.max_draft, len(nodes))
        return Draft(
            jnp.stack(nodes, axis=1), length, parents, jnp.stack(log_probs, axis=1), kinds
        ), caches

    size = TreeSize(sum(itertools.accumulate(branching, int.__mul__)), len(branching))
    return Drafter(lambda *_: (), propose, lambda end: end.caches, tree=size)


def off_by(branching, how, said=None, **options):
    return certify(
        TARGET,
        drafter=BoundDrafter(tree_drafter(branching, how, said), TABLE),
        prompt=PROMPT,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["without", "mixed", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("with", "top"))],
)
def test_the_rejection_rule_is_exact_on_a_tree(how):
    assert off_by((2, 2), how, steps=3) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("how", marked(DRAWS, exhaustive=("with", "top")))
def test_large_trees_are_feasible(how):
    """Twelve nodes: with replacement 3^12 trees, most of whose tokens are never read."""
    assert off_by((3, 3), how, steps=3) < 1e-6


@pytest.mark.slow
def test_end_tokens_truncation_and_all_of_a_round():
    assert (
        off_by((2, 1), "without", steps=4, temperature=1.3, top_k=2, top_p=0.9, eos_ids=(1,)) < 1e-6
    )


@pytest.mark.slow
def test_nothing_is_taken_for_granted_without_merging():
    drafter = BoundDrafter(tree_drafter((2,), "without"), TABLE)
    prepared = prepare(TARGET, PROMPT, drafter=drafter, temperature=1.0, key=jax.random.key(0))
    unmerged, merged = (
        decoder_distribution(prepared, steps=3, merge=merge) for merge in (False, True)
    )
    assert total_variation(unmerged, merged) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("without", Draw.WITH_REPLACEMENT),
        ("with", Draw.WITHOUT_REPLACEMENT),
        ("top", Draw.WITH_REPLACEMENT),
    ],
)
def test_a_drafter_that_says_the_wrong_thing_of_its_draws_is_caught(how, said):
    with pytest.raises(
        ValueError, match="does not draw its tokens from the distributions that its draft declares"
    ):
        off_by((2, 1), how, int(said), steps=2)


@pytest.mark.slow
def test_siblings_that_share_their_noise_are_refused():
    drafter = tree_drafter((2,), "without")

    def propose(weights, caches, context):
        draft, caches = drafter.propose(weights, caches, context)
        at = noise.at(context.keys, context.row.length, noise.Purpose.DRAFT)
        both = [noise.categorical(at, draft.log_probs[:, 0]) for _ in range(2)]
        draws = jnp.full_like(draft.draws, int(Draw.WITH_REPLACEMENT))
        return draft._replace(tokens=jnp.stack(both, axis=1), draws=draws), caches

    with pytest.raises(ValueError, match="share their noise"):
        certify(
            TARGET,
            drafter=BoundDrafter(drafter._replace(propose=propose), TABLE),
            prompt=PROMPT,
            steps=3,
        )


# --- a known bias

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
TOY, LOG_Q = (
    table_model_from(jnp.log(jnp.asarray(P, jnp.float32))),
    jnp.log(jnp.asarray(Q, jnp.float32)),
)


def two_siblings(keys, position):
    at = noise.at(keys, position, noise.Purpose.DRAFT)
    return noise.without_replacement(at, jnp.broadcast_to(LOG_Q, (*position.shape, 3)), 2)


def judged_by_p_alone(keys, position, tokens):
    """Two siblings, the second one judged by p as if the first had not been rejected: which is
    accepted, if any, and the token.
    """
    first, second = tokens.T
    p, q = (jnp.asarray(x, jnp.float32) for x in (P, Q))
    u = noise.uniform(noise.at(keys, position, noise.Purpose.ACCEPT), 2)
    accepts_first, accepts_second = (
        u[:, 0] * q[first] < p[first],
        u[:, 1] * (q[second] / (1 - q[first])) < p[second],
    )
    p_again = jnp.broadcast_to(jnp.log(p), (*position.shape, 3))
    last = noise.categorical(noise.at(keys, position, noise.Purpose.RESIDUAL), p_again)
    which = jnp.where(accepts_first, 0, jnp.where(accepts_second, 1, 2))
    return which, jnp.where(accepts_first, first, jnp.where(accepts_second, second, last))


def biased():
    """The distribution of a token under that rule, by hand."""
    out = np.zeros(3)
    for x in range(3):
        accept = min(1, P[x] / Q[x])
        out[x] += Q[x] * accept
        for y in {0, 1, 2} - {x}:
            conditional = Q[y] / (1 - Q[x])
            again = min(1, P[y] / conditional)
            out[y] += Q[x] * (1 - accept) * conditional * again
            out += Q[x] * (1 - accept) * conditional * (1 - again) * P
    return out


@pytest.mark.slow
def test_a_rule_whose_bias_is_known():
    def verify(keys, position, draft, target):
        which, token = judged_by_p_alone(keys, position, draft.tokens)
        accepted = which < 2
        after = jnp.where(
            accepted,
            noise.categorical(
                noise.at(keys, position, noise.Purpose.TOKEN), target.log_probs[:, 0]
            ),
            token,
        )
        path = jnp.stack([jnp.minimum(which, 1), jnp.zeros_like(which)], axis=1)
        return Verdict(accepted.astype(jnp.int32), after, jnp.minimum(which + 1, 2), path)

    def propose(weights, caches, context):
        tokens = two_siblings(context.keys, context.row.length)
        return Draft(tokens, jnp.full_like(context.max_draft, 2), jnp.zeros_like(tokens)), caches

    drafter = Drafter(lambda *_: (), propose, lambda end: end.caches, tree=TreeSize(2, 1))
    rule = Rule(verify, "judges by p alone", exact=True, trees=True)
    expected = np.abs(biased() - P).sum() / 2
    assert expected > 0.01
    assert certify(TOY, drafter=drafter, rule=rule, steps=2) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_a_decoder_of_ones_own_whose_bias_is_known():
    """Written by hand, with a cache of its own making: nothing of `speculative`."""
    prepared = prepare(TOY, PROMPT, temperature=1.0, key=jax.random.key(0))

    def step(weights, state):
        plain, info = prepared.decoder.step(weights, state)
        _, token = judged_by_p_alone(
            state.request.keys, state.length, two_siblings(state.request.keys, state.length)
        )
        row = jnp.arange(token.shape[0])
        tokens = plain.tokens.at[row, state.length].set(
            jnp.where(state.done, plain.tokens[row, state.length], token)
        )
        return plain._replace(tokens=tokens), info

    distribution = decoder_distribution(
        prepared._replace(decoder=Decoder(prepared.decoder.init, step)), steps=3
    )
    by_hand = {
        x: float(np.prod([P[x[0]], *biased()[list(x[1:])]]))
        for x in itertools.product(range(3), repeat=3)
    }
    assert total_variation(distribution, by_hand) < 1e-6


@pytest.mark.slow
def test_a_drafter_that_threads_the_targets_cache():
    """It feeds the target's own cache, and leaves garbage there, which the decoder forgets."""
    lm = TARGET.lm

    def propose(weights, caches, context):
        last = jnp.take_along_axis(context.row.tokens, context.row.length[:, None] - 1, axis=1)
        forward, cache = lm.extend(weights.target, caches.target, last)
        distribution = context.to_distribution(0.5 * forward.logits)
        token = noise.categorical(
            noise.at(context.keys, context.row.length, noise.Purpose.DRAFT),
            distribution.log_probs[:, 0],
        )
        _, cache = lm.extend(weights.target, cache, token[:, None])
        draft = Draft(
            token[:, None], jnp.ones_like(context.max_draft), log_probs=distribution.log_probs
        )
        return draft, Caches(cache, caches.draft)

    drafter = Drafter(lambda *_: (), propose, lambda end: end.caches)
    assert certify(TARGET, drafter=drafter, gamma=1, steps=3, prompt=PROMPT) < 1e-6


@pytest.mark.slow
def test_more_completions_change_nothing(monkeypatch):
    """The end of a path is tried, not proved; here with ten times as many completions."""
    few = off_by((2, 1), "with", steps=2)
    for name in ("LEAST", "MOST", "ALL_TRIED", "EVERY"):
        monkeypatch.setattr(outcomes, name, 10 * getattr(outcomes, name))
    assert abs(off_by((2, 1), "with", steps=2) - few) < 1e-9
