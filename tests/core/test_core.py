"""The core without models: noise, trees, cache, buffers, samplers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec import sampling
from jaxspec.core import Caches, Room, layer_caches, noise, token_rows, tree
from jaxspec.core import kv_cache as kv
from tests.marks import marked

# --- noise
# -----------------------------------------------------------------------------------------------------------


def test_adding_rows_keeps_the_earlier_ones():
    key = jax.random.key(7)
    few, many = noise.row_keys(key, 2), noise.row_keys(key, 5)
    assert (jax.random.key_data(few) == jax.random.key_data(many)[:2]).all()


def test_callers_keys_are_used_and_checked():
    keys = jax.random.split(jax.random.key(0), 3)
    assert (jax.random.key_data(noise.row_keys(keys, 3)) == jax.random.key_data(keys)).all()
    with pytest.raises(ValueError, match=r"shape \(3,\) for 2 rows"):
        noise.row_keys(keys, 2)


def test_draws_differ_by_row_position_and_purpose():
    keys = noise.row_keys(jax.random.key(0), 4)
    seen = {
        tuple(data)
        for position in range(5)
        for purpose in noise.Purpose
        for data in np.asarray(
            jax.random.key_data(noise.at(keys, jnp.full(4, position), purpose))
        ).tolist()
    }
    assert len(seen) == 4 * 5 * len(noise.Purpose)


@pytest.mark.slow
def test_draws_are_independent():
    """Draft, coin and residual draws of neighbouring positions: pairwise independent by
    chi-square.
    """
    keys = noise.row_keys(jax.random.key(1), 100_000)
    third = jnp.log(jnp.full((keys.shape[0], 3), 1 / 3))

    @jax.jit
    def draw(keys, position):
        at = jnp.full(keys.shape, position)
        tokens = [
            noise.categorical(noise.at(keys, at, p), third)
            for p in noise.Purpose
            if p != noise.Purpose.ACCEPT
        ]
        coin = noise.uniform(noise.at(keys, at, noise.Purpose.ACCEPT), 2)
        return [*tokens, (coin[:, 0] * 3).astype(jnp.int32), (coin[:, 1] * 3).astype(jnp.int32)]

    draws = [np.asarray(d) for position in (4, 5) for d in draw(keys, position)]
    pairs = [(a, b) for i, a in enumerate(draws) for b in draws[:i]]
    for a, b in pairs:
        counts = np.zeros((3, 3))
        np.add.at(counts, (a, b), 1)
        assert stats.chisquare(counts.ravel(), np.full(9, len(a) / 9)).pvalue > 1e-4 / len(pairs)


def test_categorical_has_its_distribution():
    probs = jnp.array([0.5, 0.3, 0.2, 0.0])
    count = 20_000
    keys = noise.row_keys(jax.random.key(2), count)
    drawn = (
        np.bincount(
            noise.categorical(keys, jnp.broadcast_to(jnp.log(probs), (count, 4))), minlength=4
        )
        / count
    )
    bound = 4 * np.sqrt(np.asarray(probs) * (1 - np.asarray(probs)) / count)  # four standard errors
    assert (np.abs(drawn - np.asarray(probs)) <= bound).all()


# --- cache
# -----------------------------------------------------------------------------------------------------------


def test_ragged_write_and_rewind():
    cache = kv.empty(2, Room(5), [kv.whole(1, 1)])
    first = jnp.arange(1.0, 7.0).reshape(2, 1, 3, 1)
    at = kv.Pass(cache.length, step=3)
    (layer,) = cache.layers
    cache = kv.rewind(
        cache.grown([layer.after(layer.read(at, (), first, first), at)], at), jnp.array([1, 3])
    )
    keys = layer_caches.write(cache.keys[0], jnp.array([[[[8.0], [9.0]]]] * 2), cache.length)
    assert keys[:, 0, :, 0].tolist() == [[1, 8, 9, 0, 0], [4, 5, 6, 8, 9]]


@pytest.mark.parametrize("batch", [1, 3])
def test_write_ends_exactly_at_capacity(batch):
    buffer = jnp.zeros((batch, 2, 6, 3))
    new = jnp.ones((batch, 2, 2, 3))
    written = layer_caches.write(buffer, new, jnp.full((batch,), 4))
    assert (written[:, :, 4:] == 1).all()
    assert (written[:, :, :4] == 0).all()


@pytest.mark.slow
def test_a_chain_written_as_a_tree_has_a_chains_positions_and_mask():
    chain = jnp.broadcast_to(jnp.array([-1, 0, 1]), (2, 3))

    @jax.jit
    def of_pass(length, parent=None):
        return (
            kv.mask(length, 3, 6, parent),
            kv.positions(length, 3, parent),
            kv.key_positions(length, 3, 6, parent),
        )

    length = jnp.array([0, 2])
    mask, positions, key_positions = jax.device_get(of_pass(length))
    of_tree = jax.device_get(of_pass(length, chain))
    assert (of_tree[0] == mask).all() and (of_tree[1] == positions).all()
    assert (of_tree[2] == key_positions)[mask.any(axis=1)].all()


def numbered(lengths, capacity=7):
    """A cache whose entries say where they are."""
    entries = jnp.broadcast_to(
        jnp.arange(float(capacity))[None, None, :, None], (len(lengths), 1, capacity, 1)
    )
    return kv.KVCache((layer_caches.Attended(entries, 10 + entries),), jnp.array(lengths), None)


def test_select_moves_each_rows_path_and_nothing_before_it():
    """Rows of every length, the shortest included: paths of any length, up to all nodes."""
    paths = jnp.array([[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1]])
    start = jnp.array([1, 1, 3, 4])
    moved = kv.select(numbered([4, 5, 6, 7]), start, paths)
    expected = [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 2, 3, 1, 4, 5, 6],
        [0, 1, 2, 5, 3, 4, 6],
        [0, 1, 2, 3, 4, 6, 5],
    ]
    assert moved.keys[0][:, 0, :, 0].tolist() == expected
    assert (moved.values[0] == 10 + moved.keys[0]).all()
    assert moved.length.tolist() == [4, 5, 6, 7]


def test_a_path_counted_back_from_the_end_would_be_lost_in_a_short_row():
    """Why `select` is given the row's start: `dynamic_update_slice` takes a negative start from the
    end.

    A row of one token, whose tree of three nodes was fed; the path is its last node. Counted back
    from the row's new end (2 tokens, a path as long as the tree is deep: 3) the move would begin at
    -1, and leave the rejected node.
    """
    cache = numbered([4])
    back = kv.select(cache, jnp.array([-1]), jnp.array([[3, 3, 3]]))
    assert back.keys[0][0, 0, 1, 0] == 1  # the first node's, which was rejected
    right = kv.select(cache, jnp.array([1]), jnp.array([[2, 0, 0]]))
    assert right.keys[0][0, 0, 1, 0] == 3


def test_a_cache_that_is_full_to_the_last_entry_can_be_selected_from():
    moved = kv.select(numbered([7]), jnp.array([4]), jnp.array([[1, 2, 2]]))
    assert moved.keys[0][0, 0, :, 0].tolist() == [0, 1, 2, 3, 5, 6, 6]


# --- trees
# -----------------------------------------------------------------------------------------------------------


def ancestors_by_walking(parent):
    ancestors = np.zeros((len(parent), len(parent)), bool)
    for node in range(len(parent)):
        at = node
        while at >= 0:
            ancestors[node, at] = True
            at = parent[at]
    return ancestors


def random_parents(rows, nodes, seed=0):
    """Trees as `extend` takes them, with several first nodes here and there."""
    random = np.random.default_rng(seed)
    return np.stack(
        [
            [random.integers(-1, max(node, 1)) if node else -1 for node in range(nodes)]
            for _ in range(rows)
        ]
    )


@jax.jit
def ancestors_and_depths(parent):
    return tree.ancestors(parent), tree.depth(parent)


@pytest.mark.parametrize("nodes", marked([1, 2, 5, 8, 9, 17], slow={2, 5, 8, 9, 17}))
def test_ancestors_and_depths_are_those_of_a_walk_to_the_root(nodes):
    parent = random_parents(20, nodes)
    expected = np.stack([ancestors_by_walking(row) for row in parent])
    ancestors, depth = jax.device_get(ancestors_and_depths(parent))
    assert (ancestors == expected).all() and (depth == expected.sum(-1) - 1).all()


@pytest.mark.slow
def test_a_branch_that_is_cut_off_takes_its_descendants_with_it():
    parent = jnp.array([[0, 1, 2, 0, 4], [0, -1, 2, 3, 0]])
    assert jax.jit(tree.in_tree)(parent).tolist() == [[True] * 5, [True, False, False, False, True]]


@pytest.mark.slow
def test_a_path_ends_where_no_child_is_chosen():
    """A chosen node counts only if its whole path is chosen."""
    parent = jnp.array([[0, 0, 1, 2, 4]] * 4)
    chosen = jnp.array([[1, 0, 1, 1, 1], [0, 1, 1, 0, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]], bool)
    count, path = jax.jit(tree.path_of)(parent, chosen)
    assert [row[:n] for row, n in zip(path.tolist(), count.tolist(), strict=True)] == [
        [0, 2],
        [1],
        [1, 3, 4],
        [],
    ]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_last_nodes_of_a_path_are_those_of_a_walk(count):
    parent = random_parents(10, 7, seed=1)
    last_nodes = np.asarray(jax.jit(tree.last_on_path, static_argnums=1)(parent, count))
    for row, nodes_of_row in zip(parent, last_nodes, strict=True):
        for node in range(7):
            walk, at = [], node
            while len(walk) < count:
                walk.append(at)
                at = row[at] if at >= 0 else at - 1
            assert nodes_of_row[node].tolist() == walk[::-1]


def test_static_choices_are_sorted_and_checked():
    parent, rank = tree.of_choices([(1,), (0,), (1, 0), (0, 1), (0, 0), (1, 0, 2)])
    assert (parent, rank) == ((0, 0, 1, 1, 2, 5), (0, 1, 0, 1, 0, 2))
    for choices, message in [
        ([(0, 0)], r"the node \(0, 0\) and not its parent \(0,\)"),
        ([(0,), (0,)], "each node once"),
        ([()], "none that is empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            tree.of_choices(choices)


# --- buffers
# ---------------------------------------------------------------------------------------------------------


def test_buckets_are_few_and_never_too_small():
    sizes = [token_rows.bucket(n) for n in range(1, 3000)]
    assert all(size >= n for n, size in enumerate(sizes, start=1))
    assert all(size <= max(16, 2 * n) for n, size in enumerate(sizes, start=1))
    assert all(size <= 1.25 * n for n, size in enumerate(sizes, start=1) if n > 1024)
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 18  # a program each


@pytest.mark.parametrize(
    ("new", "count", "left", "eos", "committed", "ended"),
    [
        ([1, 2, 9, 3], 4, 8, [9], 3, True),  # cut after the first end token
        ([1, 2, 9, 3], 2, 8, [9], 2, False),  # the end token was not accepted
        ([9, 9, 9, 9], 4, 8, [9], 1, True),
        ([1, 2, 3, 4], 4, 3, [9], 3, True),  # never past the limit
        ([1, 2, 9, 4], 4, 2, [9], 2, True),  # the limit comes first
        ([1, 2, 9, 4], 4, 3, [9], 3, True),  # both at once
        ([1, 7, 9, 4], 4, 8, [9, 7], 2, True),  # several end tokens
        ([1, 2, 3, 4], 4, 8, [-1], 4, False),  # none
    ],
)
def test_tokens_are_committed_up_to_the_first_end_and_the_limit(
    new, count, left, eos, committed, ended
):
    got = token_rows.num_to_commit(
        jnp.array([new]), jnp.array([count]), jnp.array([left]), jnp.array([eos])
    )
    assert (int(got[0][0]), bool(got[1][0])) == (committed, ended)


def test_rows_have_end_tokens_of_their_own():
    new = jnp.array([[1, 2, 3]] * 3)
    got = token_rows.num_to_commit(
        new, jnp.full(3, 3), jnp.full(3, 9), jnp.array([[2, -1], [-1, 3], [-1, -1]])
    )
    assert got[0].tolist() == [2, 3, 3] and got[1].tolist() == [True, True, False]


@pytest.mark.slow
def test_rows_of_a_state_are_taken_and_put_back_leaf_by_leaf():
    """Whatever is in it, nested tuples, keys and None included."""
    keys = jax.random.split(jax.random.key(0), 4)
    state = Caches({"k": jnp.arange(8).reshape(4, 2), "none": None}, (keys, jnp.arange(4.0)))
    take_rows, put_rows = jax.jit(token_rows.take_rows), jax.jit(token_rows.put_rows)
    two_rows = take_rows(state, np.array([3, 1]))
    assert two_rows.target["k"].tolist() == [[6, 7], [2, 3]] and two_rows.target["none"] is None
    assert (
        jax.random.key_data(two_rows.draft[0]) == jax.random.key_data(keys)[jnp.array([3, 1])]
    ).all()
    moved = put_rows(state, np.array([0, 2]), two_rows)
    assert moved.target["k"].tolist() == [[6, 7], [2, 3], [2, 3], [6, 7]]
    assert moved.draft[1].tolist() == [3, 1, 1, 3]
    again = put_rows(moved, np.array([0, 2]), take_rows(state, np.array([0, 2])))
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), again, state))


def test_pad_names_the_empty_prompt():
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        token_rows.pad([[1], []])
    with pytest.raises(ValueError, match="no prompts"):
        token_rows.pad([])


# --- samplers
# ---------------------------------------------------------------------------------------------------------

LOGITS = jax.random.normal(jax.random.key(3), (3, 2, 9)) * 2
TRUNCATED = jax.jit(sampling.at_temperature(top_k=9, top_p=True))


def sampling_params(temperature, top_k=9, top_p=1.0, batch=3):
    spread = lambda x, dtype: jnp.broadcast_to(jnp.asarray(x, dtype), (batch,))  # noqa: E731
    return sampling.SamplingParams(
        spread(temperature, jnp.float32), spread(top_k, jnp.int32), spread(top_p, jnp.float32)
    )


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
def test_temperature_then_top_k_then_top_p(temperature, top_k, top_p):
    logits = np.asarray(LOGITS)
    probs = np.exp(TRUNCATED(sampling_params(temperature, top_k, top_p), LOGITS).log_probs)
    for b in range(3):
        for t in range(2):
            np.testing.assert_allclose(
                probs[b, t], reference(logits[b, t], temperature, top_k, top_p), atol=1e-6
            )


def test_processors_that_are_off_change_nothing():
    plain = jax.jit(sampling.at_temperature())(sampling_params(0.7), LOGITS).log_probs
    on = TRUNCATED(sampling_params(0.7), LOGITS).log_probs
    np.testing.assert_allclose(plain, on, atol=1e-6)


@pytest.mark.slow
def test_temperature_zero_is_the_argmax_with_ties_to_the_lowest_id():
    logits = jnp.array([[[1.0, 5.0, 5.0, 2.0]]])
    distribution = jax.jit(sampling.at_temperature())(sampling_params(0.0, 4, batch=1), logits)
    assert jnp.exp(distribution.log_probs).tolist() == [[[0, 1, 0, 0]]]
    assert sampling.greedy()(None, logits).tokens.tolist() == [[1]]


@pytest.mark.slow
def test_rows_have_their_own_sampling_params():
    mixed = sampling.SamplingParams(
        jnp.array([0.0, 1.0, 2.0]), jnp.array([9, 2, 9]), jnp.array([1.0, 1.0, 0.5])
    )
    distribution = TRUNCATED(mixed, LOGITS)
    for b, (temperature, top_k, top_p) in enumerate(zip(*mixed[:3], strict=True)):
        alone = TRUNCATED(
            sampling_params(temperature, top_k, top_p, 1), np.asarray(LOGITS)[b : b + 1]
        )
        np.testing.assert_allclose(distribution.log_probs[b], alone.log_probs[0], atol=1e-6)


@pytest.mark.slow
def test_minus_infinity_and_bfloat16_logits():
    logits = jnp.array([[[0.0, -jnp.inf, 1.0]]], jnp.bfloat16)
    distribution = jax.jit(sampling.at_temperature(top_k=2, top_p=True))(
        sampling_params(1.0, 2, 0.99, 1), logits
    )
    assert distribution.log_probs.dtype == jnp.float32
    assert jnp.exp(distribution.log_probs)[0, 0, 1] == 0
    assert jnp.isfinite(jnp.exp(distribution.log_probs)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["temperature 0", "sampling"])
def test_where_nothing_is_allowed_there_is_no_distribution(temperature):
    nothing = jnp.full((1, 2, 9), -jnp.inf).at[0, 1, 4].set(0.0)
    params = sampling_params(temperature, batch=1)._replace(min_p=jnp.zeros(1))
    distribution = jax.jit(sampling.at_temperature(9, True, True))(params, nothing)
    assert jnp.isnan(distribution.log_probs[0, 0]).all() and distribution.log_probs[0, 1, 4] == 0
    assert sampling.greedy()(None, nothing).tokens.tolist() == [[-1, 4]]


def test_greedy_program_has_no_softmax_and_no_sort():
    text = str(jax.make_jaxpr(lambda x: sampling.greedy()(None, x))(LOGITS))
    assert "exp" not in text and "sort" not in text and "top_k" not in text
    assert "sort" not in str(
        jax.make_jaxpr(lambda x: sampling.at_temperature()(sampling_params(1.0), x))(LOGITS)
    )
