"""The core without models: noise, cache, buffers, warps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec import buffers, noise, warp
from jaxspec import cache as kv
from jaxspec.base import Tree

# --- noise -----------------------------------------------------------------------------------------------------------


def test_adding_rows_keeps_the_earlier_ones():
    key = jax.random.key(7)
    few, many = noise.row_keys(key, 2), noise.row_keys(key, 5)
    assert (jax.random.key_data(few) == jax.random.key_data(many)[:2]).all()


def test_callers_keys_are_used_and_checked():
    keys = jax.random.split(jax.random.key(0), 3)
    assert (jax.random.key_data(noise.row_keys(keys, 3)) == jax.random.key_data(keys)).all()
    with pytest.raises(ValueError, match=r"shape \(3,\) for 2 prompts"):
        noise.row_keys(keys, 2)


def test_draws_differ_by_row_position_and_purpose():
    keys = noise.row_keys(jax.random.key(0), 4)
    seen = {
        tuple(data)
        for position in range(5)
        for purpose in noise.Purpose
        for data in np.asarray(jax.random.key_data(noise.at(keys, jnp.full(4, position), purpose))).tolist()
    }
    assert len(seen) == 4 * 5 * len(noise.Purpose)


@pytest.mark.slow
def test_draws_are_independent():
    """Draft, coin and residual draws of neighbouring positions: pairwise independent by chi-square."""
    keys = noise.row_keys(jax.random.key(1), 100_000)
    third = jnp.log(jnp.full((keys.shape[0], 3), 1 / 3))

    @jax.jit
    def draw(keys, position):
        at = jnp.full(keys.shape, position)
        tokens = [noise.categorical(noise.at(keys, at, p), third) for p in noise.Purpose if p != noise.Purpose.COIN]
        coin = noise.uniform(noise.at(keys, at, noise.Purpose.COIN), 2)
        return [*tokens, (coin[:, 0] * 3).astype(jnp.int32), (coin[:, 1] * 3).astype(jnp.int32)]

    draws = [np.asarray(d) for position in (4, 5) for d in draw(keys, position)]
    pairs = [(a, b) for i, a in enumerate(draws) for b in draws[:i]]
    for a, b in pairs:
        counts = np.zeros((3, 3))
        np.add.at(counts, (a, b), 1)
        assert stats.chisquare(counts.ravel(), np.full(9, len(a) / 9)).pvalue > 1e-4 / len(pairs)


def test_categorical_has_its_law():
    probs = jnp.array([0.5, 0.3, 0.2, 0.0])
    count = 20_000
    keys = noise.row_keys(jax.random.key(2), count)
    drawn = np.bincount(noise.categorical(keys, jnp.broadcast_to(jnp.log(probs), (count, 4))), minlength=4) / count
    bound = 4 * np.sqrt(np.asarray(probs) * (1 - np.asarray(probs)) / count)  # four standard errors
    assert (np.abs(drawn - np.asarray(probs)) <= bound).all()


# --- cache -----------------------------------------------------------------------------------------------------------


def test_ragged_write_and_rewind():
    cache = kv.empty(2, 1, 1, 5, 1)
    first = jnp.arange(1.0, 7.0).reshape(2, 1, 3, 1)
    cache = cache._replace(keys=(kv.write(cache.keys[0], first, cache.length),), length=jnp.array([3, 3]))
    cache = kv.rewind(cache, jnp.array([1, 3]))
    keys = kv.write(cache.keys[0], jnp.array([[[[8.0], [9.0]]]] * 2), cache.length)
    assert keys[:, 0, :, 0].tolist() == [[1, 8, 9, 0, 0], [4, 5, 6, 8, 9]]


@pytest.mark.parametrize("batch", [1, 3])
def test_write_ends_exactly_at_capacity(batch):
    buffer = jnp.zeros((batch, 2, 6, 3))
    new = jnp.ones((batch, 2, 2, 3))
    written = kv.write(buffer, new, jnp.full((batch,), 4))
    assert (written[:, :, 4:] == 1).all()
    assert (written[:, :, :4] == 0).all()


def test_tree_mask_of_a_chain_is_the_chain_mask():
    chain = Tree(jnp.arange(3), jnp.tril(jnp.ones((3, 3), bool)))
    length = jnp.array([0, 2])
    assert (kv.mask(length, 3, 6, chain) == kv.mask(length, 3, 6)).all()
    assert (kv.positions(length, 3, chain) == kv.positions(length, 3)).all()


# --- buffers ---------------------------------------------------------------------------------------------------------


def test_buckets_are_few_and_never_too_small():
    sizes = [buffers.bucket(n) for n in range(1, 3000)]
    assert all(size >= n for n, size in enumerate(sizes, start=1))
    assert all(size <= max(16, 2 * n) for n, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 16


@pytest.mark.parametrize(
    ("new", "count", "room", "eos", "kept", "ended"),
    [
        ([1, 2, 9, 3], 4, 8, [9], 3, True),  # cut behind the first end token
        ([1, 2, 9, 3], 2, 8, [9], 2, False),  # the end token was not accepted
        ([9, 9, 9, 9], 4, 8, [9], 1, True),
        ([1, 2, 3, 4], 4, 3, [9], 3, True),  # never past the limit
        ([1, 2, 9, 4], 4, 2, [9], 2, True),  # the limit comes first
        ([1, 2, 9, 4], 4, 3, [9], 3, True),  # both at once
        ([1, 7, 9, 4], 4, 8, [9, 7], 2, True),  # several end tokens
        ([1, 2, 3, 4], 4, 8, [-1], 4, False),  # none
    ],
)
def test_count_kept(new, count, room, eos, kept, ended):
    got = buffers.count_kept(jnp.array([new]), jnp.array([count]), jnp.array([room]), jnp.array(eos))
    assert (int(got[0][0]), bool(got[1][0])) == (kept, ended)


def test_pad_names_the_empty_prompt():
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        buffers.pad([[1], []])
    with pytest.raises(ValueError, match="no prompts"):
        buffers.pad([])


# --- warps -----------------------------------------------------------------------------------------------------------

LOGITS = jax.random.normal(jax.random.key(3), (3, 2, 9)) * 2


def controls(temperature, top_k=9, top_p=1.0, batch=3):
    spread = lambda x, dtype: jnp.broadcast_to(jnp.asarray(x, dtype), (batch,))  # noqa: E731
    return warp.Controls(spread(temperature, jnp.float32), spread(top_k, jnp.int32), spread(top_p, jnp.float32))


def reference(logits, temperature, top_k, top_p):
    """The same order in float64, one row at a time, by sorting."""
    logits = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-logits, kind="stable")
    keep = np.zeros(len(logits), bool)
    keep[order[:top_k]] = True
    probs = np.where(keep, np.exp(logits - logits.max()), 0)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    needed = np.cumsum(probs[order]) - probs[order] < top_p
    keep = np.zeros(len(logits), bool)
    keep[order[needed]] = True
    probs = np.where(keep, probs, 0)
    return probs / probs.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [1, 3, 9])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_order_of_warps(temperature, top_k, top_p):
    law = warp.sampling(top_k=9, top_p=True)(controls(temperature, top_k, top_p), LOGITS)
    for b in range(3):
        for t in range(2):
            expected = reference(LOGITS[b, t], temperature, top_k, top_p)
            np.testing.assert_allclose(jnp.exp(law.log_probs[b, t]), expected, atol=1e-6)


def test_stages_that_are_off_change_nothing():
    plain = warp.sampling()(controls(0.7), LOGITS).log_probs
    on = warp.sampling(top_k=9, top_p=True)(controls(0.7), LOGITS).log_probs
    np.testing.assert_allclose(plain, on, atol=1e-6)


def test_temperature_zero_is_the_argmax_with_ties_to_the_lowest_id():
    logits = jnp.array([[[1.0, 5.0, 5.0, 2.0]]])
    law = warp.sampling()(controls(0.0, 4, batch=1), logits)
    assert jnp.exp(law.log_probs).tolist() == [[[0, 1, 0, 0]]]
    assert warp.greedy()(None, logits).tokens.tolist() == [[1]]


def test_rows_have_their_own_controls():
    mixed = warp.Controls(jnp.array([0.0, 1.0, 2.0]), jnp.array([9, 2, 9]), jnp.array([1.0, 1.0, 0.5]))
    law = warp.sampling(top_k=9, top_p=True)(mixed, LOGITS)
    for b, (temperature, top_k, top_p) in enumerate(zip(*mixed[:3], strict=True)):
        alone = warp.sampling(top_k=9, top_p=True)(controls(temperature, top_k, top_p, 1), LOGITS[b : b + 1])
        np.testing.assert_allclose(law.log_probs[b], alone.log_probs[0], atol=1e-6)


def test_minus_infinity_and_bfloat16_logits():
    logits = jnp.array([[[0.0, -jnp.inf, 1.0]]], jnp.bfloat16)
    law = warp.sampling(top_k=2, top_p=True)(controls(1.0, 2, 0.99, 1), logits)
    assert law.log_probs.dtype == jnp.float32
    assert jnp.exp(law.log_probs)[0, 0, 1] == 0
    assert jnp.isfinite(jnp.exp(law.log_probs)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["temperature 0", "sampling"])
def test_where_nothing_is_allowed_there_is_no_law(temperature):
    nothing = jnp.full((1, 2, 9), -jnp.inf).at[0, 1, 4].set(0.0)
    law = jax.jit(warp.sampling(9, True, True))(controls(temperature, batch=1)._replace(min_p=jnp.zeros(1)), nothing)
    assert jnp.isnan(law.log_probs[0, 0]).all() and law.log_probs[0, 1, 4] == 0
    assert warp.greedy()(None, nothing).tokens.tolist() == [[-1, 4]]


def test_greedy_program_has_no_softmax_and_no_sort():
    text = str(jax.make_jaxpr(lambda x: warp.greedy()(None, x))(LOGITS))
    assert "exp" not in text and "sort" not in text and "top_k" not in text
    assert "sort" not in str(jax.make_jaxpr(lambda x: warp.sampling()(controls(1.0), x))(LOGITS))
