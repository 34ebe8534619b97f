"""Properties of every rule on distributions that hypothesis makes up: what one round emits,
computed and not sampled.

All drafts there can be are judged side by side, a row for each. The coins of a row are integrated:
a rule compares each with a threshold, which is found by bisection, and the outcome of every pattern
of coins below and above theirs is weighed by its probability. The draw after the accepted draft
tokens becomes a row for each token. Shapes are fixed: a smaller vocabulary is tokens of probability
0, a shorter draft is padding. So there are few programs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import rules
from jaxspec.core import Distribution, Draft, noise
from jaxspec.rules.catalogue import LENIENCE
from jaxspec.rules.catalogue import RULES as LISTED
from jaxspec.rules.typical import entropy
from jaxspec.sampling import SamplingParams, at_temperature

TYPICAL = (0.3, 0.5)  # more of a bound to hit than the usual numbers
RULES = tuple(  # of chains, on which the others are two of these
    rules.typical(*TYPICAL) if name == "typical" else entry.rule
    for name, entry in LISTED.items()
    if name not in ("traversal", "k_seq")
)
EXACT = 1e-5
# a coin is one of the multiples of 1 / COINS below 1, as `jax.random.uniform`'s are
COINS = 1 << 23
TOP = 1 - 1 / COINS
# to compile, not to run
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


# --- one round


class Outcome(NamedTuple):
    """The outcome of each draft.

    Attributes:
        first: the distribution of the round's first token.
        accepted: expected number of accepted draft tokens, of a rule that draws once at most.
        sound: whether the rule did with random coins what it does with coins on the same side of
            their thresholds.
    """

    first: jax.Array
    accepted: jax.Array
    sound: jax.Array


def judged(rule, draft, target, coins, token):
    """The verdict with these coins, [N, G], and `token` as what is drawn first; and what that was
    drawn from.
    """
    distributions = []

    def categorical(keys, log_probs, *_, **__):
        distributions.append(log_probs)
        return token if len(distributions) == 1 else jnp.zeros_like(token)

    def while_loop(unfinished, step, carry):
        for _ in range(draft.tokens.shape[1] + 1):  # a row that has ended changes nothing more
            carry = step(carry)
        return carry

    with contextlib.ExitStack() as stack:
        stand_ins = [(noise, "categorical", categorical), (noise, "uniform", lambda *_: coins)]
        stand_ins += [(jax.lax, "while_loop", while_loop)]  # its draws come out into the open
        for home, name, stand_in in stand_ins:
            stack.callback(setattr, home, name, getattr(home, name))
            setattr(home, name, stand_in)
        count = len(draft.length)
        verdict = rule.verify(
            noise.row_keys(jax.random.key(0), count), jnp.zeros(count, jnp.int32), draft, target
        )
    return verdict, distributions[0]


def thresholds(rule, draft, target):
    """Return how many of its COINS values make each coin pass; 0 for a coin that decides nothing.

    Seen at the number accepted, with the earlier coins at their bottom and the later ones at their
    top.
    """
    rows, gamma = draft.tokens.shape
    zero = jnp.zeros(rows, jnp.int32)

    def count(i, value):
        at = jnp.arange(gamma)
        others = jnp.where(at < i, 0.0, jnp.float32(TOP))[None, :]
        coin = (value.astype(jnp.float32) / COINS)[:, None]
        return judged(rule, draft, target, jnp.where((at == i)[None, :], coin, others), zero)[
            0
        ].num_accepted

    def threshold(i):
        top = jnp.full(rows, COINS - 1, jnp.int32)
        end = count(i, top)

        def halve(_, bounds):
            low, high = bounds  # differs from the end at low, not at high
            middle = (low + high) // 2
            same = count(i, middle) == end
            return jnp.where(same, low, middle), jnp.where(same, middle, high)

        _, high = jax.lax.fori_loop(0, 23, halve, (zero, top))
        return jnp.where(count(i, zero) == end, 0, high)

    return jax.lax.map(threshold, jnp.arange(gamma)).T


def outcome(rule, draft, target, seed):
    rows, gamma = draft.tokens.shape
    vocab = target.log_probs.shape[-1]
    bounds = thresholds(rule, draft, target)
    passing = bounds.astype(jnp.float32) / COINS
    # whether each coin is below
    sides = jnp.array(list(itertools.product([True, False], repeat=gamma)))
    many = len(sides) * vocab

    def repeated(leaf):
        return jnp.repeat(leaf, many, axis=0)

    below = jnp.tile(jnp.repeat(sides, vocab, axis=0), (rows, 1))
    token = jnp.tile(jnp.arange(vocab, dtype=jnp.int32), rows * len(sides))
    wide, distribution = jax.tree.map(repeated, (draft, target))
    verdict, drawn = judged(
        rule, wide, distribution, jnp.where(below, 0.0, jnp.float32(TOP)), token
    )
    weight = jnp.prod(jnp.where(below, repeated(passing), 1 - repeated(passing)), axis=1)
    weight = (
        weight * jnp.take_along_axis(jax.nn.softmax(drawn, axis=-1), token[:, None], axis=1)[:, 0]
    )
    first = jnp.where(verdict.num_accepted > 0, wide.tokens[:, 0], verdict.next_token)
    mass = jnp.where(first[:, None] == jnp.arange(vocab)[None, :], weight[:, None], 0.0)
    coins = jax.random.randint(jax.random.key(seed), (rows, gamma), 0, COINS)
    nothing = jnp.zeros(rows, jnp.int32)
    free, _ = judged(rule, draft, target, coins.astype(jnp.float32) / COINS, nothing)
    side, _ = judged(rule, draft, target, jnp.where(coins < bounds, 0.0, jnp.float32(TOP)), nothing)
    return Outcome(
        mass.reshape(rows, many, vocab).sum(axis=1),
        (weight * verdict.num_accepted.astype(jnp.float32)).reshape(rows, many).sum(axis=1),
        free.num_accepted == side.num_accepted,
    )


@functools.partial(
    jax.jit, static_argnames=("all_rules", "gamma", "certain"), compiler_options=QUICKLY
)
def rounds(all_rules, p, q, length, seed, gamma, certain):
    """The outcome of every draft, by rule, and the probability of each draft.

    Args:
        p, q: log distributions; row t of a table is what follows the token t. The first draft token
            follows a 0.
        length: of a draft, by its first draft token; after it lie tokens 0.
        certain: whether drafts are point masses.
    """
    vocab = p.shape[-1]
    tokens = jnp.array(list(itertools.product(range(vocab), repeat=gamma)), jnp.int32)
    before = jnp.pad(tokens, ((0, 0), (1, 0)))
    log_q = q[before[:, :-1]]
    probability = jnp.exp(
        jnp.sum(jnp.take_along_axis(log_q, tokens[..., None], axis=-1)[..., 0], axis=1)
    )
    real = jnp.arange(gamma)[None, :] < length[tokens[:, 0]][:, None]
    draft = Draft(
        jnp.where(real, tokens, 0), length[tokens[:, 0]], log_probs=None if certain else log_q
    )
    return {
        rule.name: outcome(rule, draft, Distribution(p[before]), seed) for rule in all_rules
    }, probability


# --- made-up distributions


class Pair(NamedTuple):
    """Log distributions, float32 [V, V]; row t is what follows the token t."""

    p: np.ndarray
    q: np.ndarray


@st.composite
def pairs(draw, largest, smallest=1):
    """Tables with zeros, ties and one-token supports; equal or disjoint; by way of logits of two
    types.
    """
    vocab = draw(st.integers(smallest, largest))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = random.integers(1, 10, (2, largest, vocab)) ** draw(st.sampled_from([1, 3]))
    keep = random.random(weights.shape) >= draw(st.sampled_from([0.0, 0.3, 0.6, 1.0]))
    kind = draw(st.sampled_from(["any", "p is q", "disjoint"]))
    if kind == "p is q":
        weights[1], keep[1] = weights[0], keep[0]
    if kind == "disjoint" and vocab > 1:
        keep[0] = np.arange(vocab) < random.integers(1, vocab, (largest, 1))
        keep[1] = ~keep[0]
    certain = np.arange(vocab) == random.integers(0, vocab, (2, largest, 1))
    weights = np.where(keep | (certain & ~keep.any(axis=-1, keepdims=True)), weights, 0)
    weights = np.pad(weights, ((0, 0), (0, 0), (0, largest - vocab))).astype(np.int32)
    p, q = np.asarray(distribution_of(weights, draw(st.sampled_from([jnp.float32, jnp.bfloat16]))))
    return Pair(p, q)


@functools.partial(jax.jit, static_argnames="dtype")
def distribution_of(weights, dtype):
    """Log distributions of weights, by way of logits of a type."""
    logits = jnp.log(weights.astype(jnp.float32)).astype(dtype)
    ones = jnp.ones(len(logits))
    return at_temperature()(SamplingParams(ones), logits).log_probs


def lengths(gamma, vocab):
    """Draw the lengths of all drafts, or of each by its first draft token, which is always
    judged.
    """
    same = st.integers(0, gamma).map(lambda length: [length] * vocab)
    rows = st.one_of(same, st.lists(st.integers(1, gamma), min_size=vocab, max_size=vocab))
    return rows.map(lambda row: np.array(row, np.int32))


# --- what holds


def normalised(log_probs):
    probs = np.exp(np.asarray(log_probs, np.float64))
    return probs / probs.sum(axis=-1, keepdims=True)


def check_distribution(rule, got, log_p):
    """The distribution [.., V] of a token is p, or as near to it as an inexact rule promises."""
    p = normalised(log_p)
    np.testing.assert_allclose(got.sum(axis=-1), 1, atol=EXACT)
    assert (got[..., p == 0] == 0).all(), (rule.name, got, p)
    if rule.exact:
        assert np.abs(got - p).max() < EXACT, (rule.name, got, p)
    elif rule.name.startswith("lenient"):
        assert (got <= p / LENIENCE + EXACT).all(), (rule.name, got, p)
    else:
        epsilon, delta = TYPICAL
        threshold = min(
            epsilon, delta * np.exp(-float(entropy(jnp.asarray(log_p)[None, None])[0, 0]))
        )
        untypical = p < threshold * (1 - 1e-5)  # on the very threshold rounding decides
        assert (got <= p + EXACT)[..., untypical].all(), (rule.name, got, p)


@pytest.mark.slow
@pytest.mark.parametrize("certain", [False, True], ids=["samples", "point masses"])
@settings(max_examples=60)
@given(pairs(6), lengths(3, 6), st.integers(0, 2**31 - 1))
def test_the_first_token_of_a_round(certain, pair, length, seed):
    """Draft tokens drawn from q; and every point mass for itself."""
    outcomes, probability = rounds(RULES, pair.p, pair.q, length, seed, gamma=3, certain=certain)
    probability = np.asarray(probability)
    real = probability > 0
    np.testing.assert_allclose(probability.sum(), 1, atol=EXACT)
    for rule in RULES:
        first, _, sound = (np.asarray(x) for x in outcomes[rule.name])
        if certain:
            assert sound.all(), rule.name
            check_distribution(rule, first, pair.p[0])
        else:
            assert sound[real].all(), rule.name
            check_distribution(rule, (probability[real, None] * first[real]).sum(axis=0), pair.p[0])


BOTH = (rules.block(), rules.rejection())


@pytest.mark.slow
@settings(max_examples=50)
@given(pairs(5, 2), st.integers(1, 4), st.integers(0, 2**31 - 1))
def test_block_accepts_no_fewer_draft_tokens_than_rejection(pair, gamma, seed):
    """In expectation; by the verdicts themselves, as `test_block` has it by the passing
    probabilities.
    """
    length = np.full(5, gamma, np.int32)
    outcomes, probability = rounds(BOTH, pair.p, pair.q, length, seed, gamma=4, certain=False)
    probability, accepted_by = np.asarray(probability), []
    real = probability > 0
    for rule in BOTH:
        _, accepted, sound = (np.asarray(x)[real] for x in outcomes[rule.name])
        assert sound.all(), rule.name
        accepted_by.append(float((probability[real] * accepted).sum()))
    assert accepted_by[0] >= accepted_by[1] - EXACT
    if np.array_equal(pair.p, pair.q):
        np.testing.assert_allclose(accepted_by, gamma, atol=1e-4)
