"""Several proposals for one position: the law of the token, by enumeration, and each row for itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import accept, noise
from jaxspec.accept import Proposals, iterated, rejection
from jaxspec.accept.common import draw
from jaxspec.base import Draft, Law, Prompt
from jaxspec.testing import certify_iterated, distinct, independent, likeliest, table_model, table_model_from
from jaxspec.warp import Controls, greedy, sampling

EXACT = 1e-5
TARGET, *THREE = (table_model(jax.random.key(seed), 3, 1, sharpness=1.5) for seed in range(4))
NO_TWO = table_model_from(TARGET.params.at[..., 2].set(-jnp.inf))
ONLY_TWO = table_model_from(jnp.zeros((3, 3)).at[..., :2].set(-jnp.inf))
NEVER_ZERO = table_model_from(THREE[0].params.at[..., 0].set(-jnp.inf))
SURE = table_model(jax.random.key(5), 3, 1, sharpness=20.0)
ALL = sampling(3, True)  # one program for every warping
PLAIN = Controls(jnp.ones(1), jnp.array([3]), jnp.ones(1))
WARPED = {
    "plain": PLAIN,
    "temperature": PLAIN._replace(temperature=jnp.array([0.7])),
    "temperature 0": PLAIN._replace(temperature=jnp.zeros(1)),
    "top-k": PLAIN._replace(top_k=jnp.array([2])),
    "top-p": PLAIN._replace(top_p=jnp.array([0.7])),
    "all": Controls(jnp.array([1.3]), jnp.array([2]), jnp.array([0.9])),
}
WAYS = {  # how many drafters, and what they propose
    "1 sample": (1, independent(1)),
    "2 samples": (1, independent(2)),
    "3 samples": (1, independent(3)),
    "2 without replacement": (1, distinct(2)),
    "3 without replacement": (1, distinct(3)),
    "2 drafters": (2, independent(2)),
    "3 drafters": (3, independent(3)),
    "top 1": (1, likeliest(1)),
    "top 2": (1, likeliest(2)),
    "top 3": (1, likeliest(3)),
}


def off_by(way, target=TARGET, drafters=THREE, controls=PLAIN, **options):
    count, propose = WAYS[way]
    options = dict(propose=propose, warp=ALL, controls=controls, steps=2) | options
    return certify_iterated(target, drafters=drafters[:count], **options)


@pytest.mark.parametrize("way", WAYS)
def test_the_token_has_the_targets_law(way):
    """However proposals were made, and however laws were warped."""
    off = {name: off_by(way, controls=controls) for name, controls in WARPED.items()}
    assert max(off.values()) < EXACT, off


LAWS = {
    "p is q": (TARGET, [TARGET, TARGET]),
    "p is one of the laws": (TARGET, [THREE[0], TARGET]),
    "disjoint": (NO_TWO, [ONLY_TWO, ONLY_TWO]),
    "p is certain": (ONLY_TWO, THREE),
    "q is certain": (TARGET, [ONLY_TWO, ONLY_TWO]),
    "a zero of p": (NO_TWO, THREE),
    "a zero of q": (TARGET, [NEVER_ZERO, THREE[1]]),
    "zeros of both": (NO_TWO, [NEVER_ZERO, ONLY_TWO]),
    "nearly certain": (SURE, [THREE[0], SURE]),
}


@pytest.mark.parametrize("way", ["2 samples", "2 drafters", "2 without replacement", "top 2"])
def test_corners_of_the_laws(way):
    off = {name: off_by(way, *models) for name, models in LAWS.items()}
    assert max(off.values()) < EXACT, off


def test_rounds_follow_each_other():
    assert off_by("2 drafters", steps=3, eos=(1,), prompt=Prompt(jnp.array([[1, 2, 0]]), jnp.array([2]))) < EXACT


def test_every_row_has_its_own_number_of_proposals():
    """None at some positions, one or two at others; what lies behind them is garbage."""

    def ragged(keys, position, laws):
        full, length = independent(2)(keys, position, laws), position % 3
        real = jnp.arange(2)[None, :] < length[:, None]
        return Proposals(jnp.where(real, full.tokens, -7), jnp.where(real[..., None], full.log_probs, jnp.nan), length)

    assert certify_iterated(TARGET, drafters=THREE[:1], propose=ragged, warp=ALL, controls=PLAIN, steps=4) < EXACT


def test_a_greedy_target():
    assert off_by("2 drafters", warp=greedy(), controls=None, steps=3) == 0


def test_the_defaults_are_certified_too():
    assert certify_iterated(TARGET, drafters=THREE[:2], steps=2) < EXACT
    with pytest.raises(ValueError, match="got no drafters"):
        certify_iterated(TARGET, drafters=[])


def others(keys):
    """Keys of draws that `iterated` does not make."""
    return jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)


def judges_by_p_alone(keys, position, proposals, target):
    """The mistake that one would make: after a rejection p stays as it is."""
    choice = iterated(keys, position, proposals, target)
    p, first = jnp.exp(target.log_probs[:, 0]), proposals.tokens[:, 0]
    coin = noise.uniform(noise.at(others(keys), position, noise.Purpose.COIN), 2)[:, 1]
    second = jnp.take_along_axis(p, proposals.tokens[:, 1:], 1) / jnp.exp(
        jnp.take_along_axis(proposals.log_probs[:, 1], proposals.tokens[:, 1:], 1)
    )
    again = jnp.logical_and(choice.index > 0, coin < second[:, 0])
    return choice._replace(
        token=jnp.where(choice.index == 0, first, jnp.where(again, proposals.tokens[:, 1], choice.token))
    )


def draws_from_p(keys, position, proposals, target):
    choice = iterated(keys, position, proposals, target)
    fresh = draw(others(keys), position, target.log_probs[:, 0])
    return choice._replace(token=jnp.where(choice.index == proposals.length, fresh, choice.token))


@pytest.mark.parametrize("judge", [judges_by_p_alone, draws_from_p])
def test_a_wrong_judge_is_caught(judge):
    assert off_by("2 samples", judge=judge) > 1e-2


weights = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)
PROPOSALS = {"2 drafters": independent(2), "2 without replacement": distinct(2), "top 2": likeliest(2)}


@settings(max_examples=15)
@given(weights, weights, weights, st.sampled_from(sorted(PROPOSALS)))
def test_any_laws(p, q, r, way):
    """The emitted law is p, whatever p and the laws of the proposals, zeros included: every outcome is counted."""
    target, *drafters = (table_model_from(jnp.log(jnp.asarray(x, jnp.float32) / sum(x))) for x in (p, q, r))
    drafters = drafters if way == "2 drafters" else drafters[:1]
    assert certify_iterated(target, drafters=drafters, propose=PROPOSALS[way], steps=2) < EXACT


# --- by itself, many rows at once

JUDGE = jax.jit(iterated)
ROWS, COUNT, VOCAB = 24, 3, 5


def some(seed, rows=ROWS, count=COUNT, vocab=VOCAB, certain=False):
    """keys, positions, proposals of any number that were drawn from their laws, and a target; a third are zeros."""
    p, x, n, k, z = jax.random.split(jax.random.key(seed), 5)
    shape = rows, count + 1, vocab
    keep = jax.random.bernoulli(z, 0.67, shape).at[..., 0].set(True)
    laws = jax.nn.log_softmax(jnp.where(keep, 2 * jax.random.normal(p, shape), -jnp.inf), axis=-1)
    tokens = jax.random.categorical(x, laws[:, 1:]).astype(jnp.int32)
    length = jax.random.randint(n, (rows,), 0, count + 1)
    proposals = Proposals(tokens, None if certain else laws[:, 1:], length)
    return noise.row_keys(k, rows), 3 + jnp.arange(rows, dtype=jnp.int32), proposals, Law(log_probs=laws[:, :1])


def pairs(choice):
    return list(zip(choice.index.tolist(), choice.token.tolist(), strict=True))


@pytest.mark.parametrize("certain", [False, True], ids=["laws", "point masses"])
def test_rows_do_not_depend_on_mates_order_or_padding(certain):
    keys, position, proposals, target = some(0, certain=certain)
    together = pairs(JUDGE(keys, position, proposals, target))
    assert {index for index, _ in together} == {0, 1, 2, 3}
    order = jnp.array([(7 * i + 3) % ROWS for i in range(ROWS)])
    moved = pairs(JUDGE(*jax.tree.map(lambda x: x[order], (keys, position, proposals, target))))
    assert [moved[order.tolist().index(i)] for i in range(ROWS)] == together
    laws = None if certain else jnp.pad(proposals.log_probs, ((0, 0), (0, 2), (0, 0)), constant_values=jnp.nan)
    wide = Proposals(jnp.pad(proposals.tokens, ((0, 0), (0, 2)), constant_values=1), laws, proposals.length)
    assert pairs(JUDGE(keys, position, wide, target)) == together
    alone = [
        pairs(JUDGE(*jax.tree.map(lambda x, i=i: x[i : i + 1], (keys, position, wide, target))))
        for i in range(0, ROWS, 5)
    ]
    assert [one for (one,) in alone] == together[::5]


def test_jit_and_vmap():
    batches = [some(seed) for seed in range(3)]
    stacked = jax.jit(jax.vmap(iterated))(*jax.tree.map(lambda *x: jnp.stack(x), *batches))
    for i, each in enumerate(batches):
        assert pairs(jax.tree.map(lambda x, i=i: x[i], stacked)) == pairs(JUDGE(*each))
    assert pairs(JUDGE(*batches[0])) == pairs(iterated(*batches[0]))


@given(st.integers(0, 2**31 - 1), st.booleans())
def test_what_the_target_never_says_is_never_said(seed, certain):
    keys, position, proposals, target = some(seed, certain=certain)
    index, token = (np.asarray(x) for x in JUDGE(keys, position, proposals, target))
    assert ((index >= 0) & (index <= proposals.length)).all()
    assert np.isfinite(np.take_along_axis(np.asarray(target.log_probs)[:, 0], token[:, None], 1)).all()
    kept = index < np.asarray(proposals.length)
    assert (np.asarray(proposals.tokens)[kept, index[kept]] == token[kept]).all()


def test_a_proposal_from_the_targets_own_law_is_accepted():
    """In float32, and after logits in bfloat16."""
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = (3 * jax.random.normal(jax.random.key(5), (ROWS, 1, VOCAB))).astype(dtype)
        law = sampling()(Controls(jnp.ones(ROWS), jnp.full(ROWS, VOCAB), jnp.ones(ROWS)), logits)
        assert law.log_probs.dtype == jnp.float32
        laws = jnp.repeat(law.log_probs, COUNT, axis=1)
        tokens = jax.random.categorical(jax.random.key(6), laws).astype(jnp.int32)
        keys, position, drawn, _ = some(1)
        choice = JUDGE(keys, position, Proposals(tokens, laws, jnp.maximum(drawn.length, 1)), law)
        assert (choice.index == 0).all() and (choice.token == tokens[:, 0]).all()


def test_logits_in_bfloat16_are_judged_exactly():
    coarse = [table_model_from(model.params.astype(jnp.bfloat16).astype(jnp.float32)) for model in (TARGET, *THREE)]
    assert off_by("2 drafters", coarse[0], coarse[1:]) < EXACT


def test_a_law_of_nan_is_never_accepted():
    keys, position, proposals, target = some(2)
    broken = proposals._replace(log_probs=proposals.log_probs.at[:, 0].set(jnp.nan), length=jnp.full(ROWS, COUNT))
    choice = JUDGE(keys, position, broken, target)
    assert (choice.index > 0).all()
    assert jnp.isfinite(jnp.take_along_axis(target.log_probs[:, 0], choice.token[:, None], axis=1)).all()


def rows(count, proposals, seed=0):
    """As many rows, each with its own noise, of proposals drawn from q for a target p."""
    p, q = jnp.log(jnp.array([0.5, 0.3, 0.2])), jnp.log(jnp.array([0.1, 0.2, 0.7]))
    tokens = jax.random.categorical(jax.random.key(seed), q, shape=(count, proposals)).astype(jnp.int32)
    laws = jnp.broadcast_to(q, (count, proposals, 3))
    keys, full = noise.row_keys(jax.random.key(seed + 1), count), jnp.full(count, proposals, jnp.int32)
    return keys, jnp.arange(count, dtype=jnp.int32), Proposals(tokens, laws, full), jnp.broadcast_to(p, (count, 2, 3))


def test_one_proposal_is_the_rejection_rule():
    keys, position, proposals, p = rows(2000, 1)
    choice = JUDGE(keys, position, proposals, Law(log_probs=p[:, :1]))
    verdict = rejection()(keys, position, Draft(*proposals), Law(log_probs=p))
    accepted = verdict.num_accepted == 1
    np.testing.assert_array_equal(choice.index == 0, accepted)
    np.testing.assert_array_equal(choice.token[~accepted], verdict.next_token[~accepted])
    np.testing.assert_array_equal(choice.token[accepted], proposals.tokens[accepted, 0])


def test_more_proposals_are_accepted_more_often():
    """p = (.5, .3, .2), q = (.1, .2, .7): .5 by the first; p becomes (.8, .2, 0), of which q covers .3."""
    count = 20_000
    for proposals, rate in [(1, 0.5), (2, 0.5 + 0.5 * 0.3)]:
        keys, position, drawn, p = rows(count, proposals)
        choice = JUDGE(keys, position, drawn, Law(log_probs=p[:, :1]))
        assert abs(float(jnp.mean(choice.index < proposals)) - rate) < 4.5 * np.sqrt(rate * (1 - rate) / count)


def test_corners():
    keys, position, _, _ = rows(3, 1)
    three = jnp.full(3, 3, jnp.int32)
    tokens = jnp.array([[0, 2, 2], [2, 1, 0], [0, 0, 1]])
    certain = iterated(keys, position, Proposals(tokens, None, jnp.array([3, 3, 1])), Law(tokens=jnp.full((3, 1), 2)))
    assert (certain.index.tolist(), certain.token.tolist()) == ([1, 0, 1], [2, 2, 2])
    law = Law(log_probs=jnp.log(jnp.broadcast_to(jnp.array([0.0, 0.0, 1.0]), (3, 1, 3))))
    same = iterated(keys, position, Proposals(tokens, None, jnp.array([3, 3, 1])), law)
    assert (same.index.tolist(), same.token.tolist()) == ([1, 0, 1], [2, 2, 2])
    none = iterated(keys, position, Proposals(tokens[:, :0], None, 0 * three), law)
    assert (none.index.tolist(), none.token.tolist()) == ([0, 0, 0], [2, 2, 2])


def test_a_vocabulary_of_one():
    keys, position, _, _ = rows(3, 1)
    tokens, three = jnp.zeros((3, 3), jnp.int32), jnp.full(3, 3, jnp.int32)
    for laws in (jnp.zeros((3, 3, 1)), None):
        one = iterated(keys, position, Proposals(tokens, laws, three), Law(log_probs=jnp.zeros((3, 1, 1))))
        assert (one.index.tolist(), one.token.tolist()) == ([0, 0, 0], [0, 0, 0])
    assert accept.iterated is iterated
