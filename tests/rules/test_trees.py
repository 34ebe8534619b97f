"""Rules on token trees: worked by hand, and against a walk in numpy on random trees, a different
one in each row.
"""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import rules
from jaxspec.core import Distribution, Draft, Draw, noise, tree
from jaxspec.rules import catalogue, residual_tree
from jaxspec.rules.common import exact_match, rule_of
from jaxspec.rules.rejection import verify_chain, verify_tree
from tests.marks import marked

RULES = {entry.rule.name: entry.rule for entry in catalogue.RULES.values() if entry.rule.trees}
OFTEN_TRIED = {
    name for name in RULES if name != "coupled" and not name.startswith("typical")
}  # their programs are long
FIXED, WITHOUT, WITH = Draw.FIXED, Draw.WITHOUT_REPLACEMENT, Draw.WITH_REPLACEMENT
VOCAB = 5


def scripted(rule, draft, target, uniforms):
    """A verdict by given uniforms, and the distribution of the token after the accepted ones,
    normalised.
    """
    verdict, left = jax.device_get(by_script(rule)(draft, target, np.asarray(uniforms, np.float32)))
    left = np.exp(left, dtype=np.float64)
    return verdict, left / left.sum(axis=-1, keepdims=True)


@functools.cache
def by_script(rule):
    """The same, compiled once for all tests."""

    def verify(draft, target, uniforms):
        draws = []

        def categorical(keys, log_probs, *_):
            draws.append(log_probs)
            return jnp.argmax(log_probs, axis=-1).astype(jnp.int32)

        uniform, rows = mock.patch.object(noise, "uniform", lambda *_: uniforms), len(draft.length)
        with uniform, mock.patch.object(noise, "categorical", categorical):
            verdict = rule.verify(
                noise.row_keys(jax.random.key(0), rows), jnp.zeros(rows, jnp.int32), draft, target
            )
        (left,) = draws
        return verdict, left

    return jax.jit(verify)


@functools.cache
def compiled(rule):
    """A rule's verdict, compiled once for all tests."""
    verify = jax.jit(rule.verify)
    return lambda *arguments: jax.device_get(verify(*arguments))


def path_of(verdict, row=0):
    return verdict.path[row, : verdict.num_accepted[row]].tolist()


# --- by hand

P, Q = [0.5, 0.3, 0.2], [0.25, 0.25, 0.5]


@pytest.mark.parametrize(
    ("tokens", "draws", "uniforms", "path", "tested", "left"),
    [
        # 2 is accepted with probability 0.2 / 0.5, and leaves (5/6, 1/6, 0)
        ([2, 1], [WITHOUT, WITHOUT], [0.39, 0.0], [0], 1, None),
        # drawn from (1/2, 1/2, 0): min(1, 5/3)
        ([2, 0], [WITHOUT, WITHOUT], [0.41, 0.99], [1], 2, None),
        ([2, 1], [WITHOUT, WITHOUT], [0.41, 0.32], [1], 2, None),  # 1/3
        ([2, 1], [WITHOUT, WITHOUT], [0.41, 0.34], [], 2, [1, 0, 0]),
        ([2, 1], [WITH, WITH], [0.41, 0.66], [1], 2, None),  # drawn from q itself: 2/3
        ([2, 1], [WITH, WITH], [0.41, 0.67], [], 2, [1, 0, 0]),
        # the same token again: nothing is left of it
        ([2, 2], [WITH, WITH], [0.41, 0.0], [], 2, [1, 0, 0]),
        ([1, 1], [WITH, WITH], [0.99, 0.0], [0], 1, None),
        ([2, 1], [FIXED, FIXED], [0.19, 0.0], [0], 1, None),  # p(2)
        ([2, 1], [FIXED, FIXED], [0.21, 0.37], [1], 2, None),  # 0.3 / 0.8
        ([2, 1], [FIXED, FIXED], [0.21, 0.38], [], 2, [1, 0, 0]),
        ([2, 1], [FIXED, WITHOUT], [0.21, 0.74], [1], 2, None),  # 0.375 / 0.5
        ([2, 1], [FIXED, WITHOUT], [0.21, 0.76], [], 2, [1, 0, 0]),
        ([2, 1], [FIXED, WITH], [0.21, 0.99], [1], 2, None),  # 0.375 / 0.25
        ([2, 0], [WITHOUT, FIXED], [0.41, 0.83], [1], 2, None),  # 5/6
        ([2, 0], [WITHOUT, FIXED], [0.41, 0.84], [], 2, [0, 1, 0]),
        ([2], [WITHOUT], [0.41], [], 1, [5 / 6, 1 / 6, 0]),
    ],
)
def test_siblings_have_their_trials_in_order(tokens, draws, uniforms, path, tested, left):
    """p and q as above; after an accepted child the token is from the target's distribution after
    that child.
    """
    count = len(tokens)
    target = jnp.log(jnp.array([P, *([0.1, 0.1, 0.8] for _ in tokens)]))
    log_q, parent = jnp.log(jnp.array([[Q]])), jnp.zeros((1, count), jnp.int32)
    draft = Draft(
        jnp.array([tokens]), jnp.array([count]), parent, log_q, jnp.array([draws], jnp.int32)
    )
    verdict, residual = scripted(rules.rejection(), draft, Distribution(target[None]), [uniforms])
    assert (path_of(verdict), verdict.num_tested.tolist()) == (path, [tested])
    np.testing.assert_allclose(residual[0], [0.1, 0.1, 0.8] if left is None else left, atol=1e-6)


def test_a_deeper_tree_step_by_step():
    """0 and 1 follow the last token, 2 and 3 follow node 1, 4 follows node 3; certain of nothing
    but the last step.
    """
    tokens, parent = jnp.array([[2, 0, 1, 2, 0]]), jnp.array([[0, 0, 2, 2, 4]])
    p = jnp.array([P, [1, 0, 0], P, [1, 0, 0], [0.6, 0.2, 0.2], [0.0, 1.0, 0.0]])
    log_q = jnp.log(jnp.array([Q, Q, Q, Q, [0.8, 0.1, 0.1]]))[None]
    draft, target = Draft(tokens, jnp.array([5]), parent, log_q), Distribution(jnp.log(p)[None])
    # Node 0 is rejected (0.4) and node 1 accepted; after it node 2, a 1 from q, at 1.2 / 1; its
    # elder sibling's coin decides nothing for node 3.
    verdict, left = scripted(rules.rejection(), draft, target, [[0.5, 0.9, 0.9, 0.0, 0.0]])
    assert (path_of(verdict), verdict.num_tested.tolist()) == ([1, 2], [3])
    np.testing.assert_allclose(left[0], [1, 0, 0], atol=1e-6)
    # With q (0.2, 0.6, 0.2) there node 2 is accepted below 0.3 / 0.6, and a rejection leaves (1, 0,
    # 0).
    draft = draft._replace(log_probs=log_q.at[0, 2].set(jnp.log(jnp.array([0.2, 0.6, 0.2]))))
    for uniforms, path, tested, after in [
        ([0.5, 0.9, 0.49, 0.9, 0.9], [1, 2], 3, [1, 0, 0]),
        ([0.5, 0.9, 0.51, 0.0, 0.74], [1], 4, [1, 0, 0]),  # nothing is left of 2: 0.2 - 0.2
        ([0.5, 0.9, 0.51, 0.9, 0.0], [1], 4, [1, 0, 0]),
    ]:
        verdict, left = scripted(rules.rejection(), draft, target, [uniforms])
        assert (path_of(verdict), verdict.num_tested.tolist()) == (path, [tested]), uniforms
        np.testing.assert_allclose(left[0], after, atol=1e-6)
    draft = draft._replace(log_probs=log_q.at[0, 2].set(jnp.log(jnp.array([0.3, 0.6, 0.1]))))
    for uniforms, path, tested, after in [  # leaves (2/3, 0, 1/3); 2 was drawn from (3/4, 0, 1/4)
        ([0.5, 0.9, 0.51, 0.99, 0.74], [1, 3, 4], 5, [0, 1, 0]),
        ([0.5, 0.9, 0.51, 0.99, 0.76], [1, 3], 5, [0, 0.5, 0.5]),
    ]:
        verdict, left = scripted(rules.rejection(), draft, target, [uniforms])
        assert (path_of(verdict), verdict.num_tested.tolist()) == (path, [tested]), uniforms
        np.testing.assert_allclose(left[0], after, atol=1e-6)


@pytest.mark.parametrize("draw", Draw)
def test_a_coin_of_zero_does_not_accept_a_token_of_probability_zero(draw):
    p = jnp.log(jnp.array([[[0.5, 0.5, 0.0]] * 3]))
    log_q = jnp.log(jnp.array([[[0.1, 0.1, 0.8]]]))
    draft = Draft(
        jnp.array([[2, 2]]),
        jnp.array([2]),
        jnp.zeros((1, 2), jnp.int32),
        log_q,
        jnp.full((1, 2), draw),
    )
    verdict, left = scripted(rules.rejection(), draft, Distribution(p), [[0.0, 0.0]])
    assert verdict.num_accepted.tolist() == [0] and verdict.num_tested.tolist() == [2]
    assert left[0, 2] == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("draw", marked([WITHOUT, WITH], slow={WITHOUT}))
def test_where_p_is_q_the_first_child_is_accepted_at_every_depth(dtype, draw):
    rows = 300
    logits = (
        (3 * jax.random.normal(jax.random.key(5), (rows, 7, VOCAB)))
        .astype(dtype)
        .astype(jnp.float32)
    )
    log_p = jax.nn.log_softmax(logits)
    parent = jnp.broadcast_to(jnp.array([0, 0, 1, 1, 3, 3]), (rows, 6))
    entry = jnp.take_along_axis(log_p, parent[..., None], axis=1)
    tokens = jax.random.categorical(jax.random.key(6), entry).astype(jnp.int32)
    draft = Draft(tokens, jnp.full(rows, 6), parent, log_p, jnp.full((rows, 6), draw))
    verdict = compiled(rules.rejection())(
        noise.row_keys(jax.random.key(7), rows),
        jnp.zeros(rows, jnp.int32),
        draft,
        Distribution(log_p),
    )
    assert (verdict.num_accepted == 3).all() and (verdict.num_tested == 3).all()
    assert (verdict.path[:, :3] == jnp.array([[0, 2, 4]])).all()


@pytest.mark.parametrize("draw", [WITHOUT, WITH])
def test_a_drafter_that_yields_nan_cannot_harm(draw):
    """Nothing is accepted that NaN was drawn from, as in a chain, and the token is the target's."""
    nan, draws = jnp.full((1, 1, 3), jnp.nan), jnp.full((1, 2), draw)
    draft = Draft(jnp.array([[0, 1]]), jnp.array([2]), jnp.zeros((1, 2), jnp.int32), nan, draws)
    verdict, left = scripted(
        rules.rejection(), draft, Distribution(jnp.log(jnp.array([[P, P, P]]))), [[0.0, 0.0]]
    )
    assert verdict.num_accepted.tolist() == [0]
    np.testing.assert_allclose(left[0], P, atol=1e-6)


def test_siblings_that_use_up_what_q_allows_are_point_masses():
    """q allows one token; a second draw without it is no draw, and its node is judged as a fixed
    one.
    """
    draft = Draft(
        jnp.array([[2, 1]]),
        jnp.array([2]),
        jnp.zeros((1, 2), jnp.int32),
        jnp.log(jnp.array([[[0.0, 0, 1]]])),
    )
    target = Distribution(jnp.log(jnp.array([[P, P, P]])))
    for coin, accepted in [(0.37, 1), (0.38, 0)]:  # p without 2 is (0.625, 0.375, 0)
        verdict, _ = scripted(rules.rejection(), draft, target, [[0.21, coin]])
        assert verdict.num_accepted.tolist() == [accepted]


# --- against a walk


def log_distributions(random, *shape):
    """Some probabilities are 0."""
    weights = random.integers(0, 9, (*shape, VOCAB)) * (random.random((*shape, VOCAB)) < 0.7)
    weights[..., 0] += weights.sum(axis=-1) == 0
    with np.errstate(divide="ignore"):
        return np.log(weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


def random_trees(rows, nodes=7, seed=0, kinds=tuple(Draw)):
    """A tree a row, drawn as it says of each node: siblings of any kind, some cut off, some rows
    with fewer nodes.
    """
    random = np.random.default_rng(seed)
    parent = np.stack(
        [[random.integers(0, node + 1) for node in range(nodes)] for _ in range(rows)]
    )
    parent[random.random(parent.shape) < 0.1] = -1
    length = random.integers(0, nodes + 1, rows)
    draws = random.choice([int(kind) for kind in kinds], parent.shape)
    log_p, log_q = (
        log_distributions(random, rows, nodes + 1),
        log_distributions(random, rows, nodes),
    )
    tokens = np.zeros((rows, nodes), int)
    for row, node in np.ndindex(rows, nodes):
        q = np.exp(log_q[row, max(parent[row, node], 0)], dtype=np.float64)
        siblings = tokens[row, :node][parent[row, :node] == parent[row, node]]
        if draws[row, node] == WITHOUT and q[np.setdiff1d(range(VOCAB), siblings)].sum() > 0:
            q[siblings] = 0
        tokens[row, node] = (
            random.integers(VOCAB)
            if draws[row, node] == FIXED
            else random.choice(VOCAB, p=q / q.sum())
        )
    draft = Draft(
        *(x.astype(np.int32) for x in (tokens, length, parent)), log_q, draws.astype(np.int32)
    )
    return draft, Distribution(log_p)  # in numpy, whose rows cost nothing to take


def walk(draft, target, uniforms, row):
    """The rule in float64, for one row: the path, the number of trials, what is left of p."""
    tokens, parent, draws = (np.asarray(x[row]) for x in (draft.tokens, draft.parent, draft.draws))
    p_of = np.exp(np.asarray(target.log_probs[row], np.float64))
    q_of = None if draft.log_probs is None else np.exp(np.asarray(draft.log_probs[row], np.float64))
    current, path, tested = 0, [], 0
    while True:
        left, tried = p_of[current], []
        for child in np.flatnonzero(parent[: int(draft.length[row])] == current):
            x, tested = tokens[child], tested + 1
            q = np.eye(VOCAB)[x]
            if q_of is not None and draws[child] != FIXED:
                q = q_of[current].copy()
                if draws[child] == WITHOUT:
                    q[tried] = 0
                    q = q / q.sum() if q.sum() > 0 else np.eye(VOCAB)[x]
            if uniforms[row][child] * q[x] < left[x]:
                break
            rest = np.maximum(left - q, 0)
            left = rest / rest.sum() if rest.sum() > 1e-6 else left
            tried.append(x)
        else:
            return path, tested, left
        current, path = child + 1, [*path, int(child)]


@pytest.mark.parametrize("kinds", [tuple(Draw), (WITHOUT,), (WITH,), (FIXED,), None], ids=str)
def test_the_rejection_rule_is_a_walk_down_the_tree(kinds):
    rows = 400
    draft, target = random_trees(rows, kinds=kinds or (FIXED,), seed=len(kinds or ()))
    if kinds is None:  # of point masses alone
        draft = draft._replace(log_probs=None)
    uniforms = np.random.default_rng(1).random(draft.tokens.shape).astype(np.float32)
    verdict, left = scripted(rules.rejection(), draft, target, uniforms)
    if kinds == (WITHOUT,):
        unsaid, _ = scripted(rules.rejection(), draft._replace(draws=None), target, uniforms)
        assert (unsaid.path == verdict.path).all() and (
            unsaid.num_tested == verdict.num_tested
        ).all()
    depths = set()
    for row in range(rows):
        path, tested, rest = walk(draft, target, uniforms, row)
        assert (path_of(verdict, row), int(verdict.num_tested[row])) == (path, tested), row
        np.testing.assert_allclose(left[row], rest, atol=1e-4)
        depths.add(len(path))
    assert depths >= {0, 1, 2}


def climb(draft, target, uniforms, row):
    """Traversal in float64, for one row: the accepted fed token and what is left of p after it."""
    tokens, parent, draws = (np.asarray(x[row]) for x in (draft.tokens, draft.parent, draft.draws))
    p_of, q_of = (
        np.exp(np.asarray(x[row], np.float64)) for x in (target.log_probs, draft.log_probs)
    )
    children = {
        at: list(np.flatnonzero(parent[: int(draft.length[row])] == at))
        for at in range(len(tokens) + 1)
    }
    weights, left, gone = {0: 1.0}, dict(enumerate(p_of)), {at: [] for at in children}

    def drawn_from(at, child):
        if draws[child] == FIXED:
            return np.eye(VOCAB)[tokens[child]]
        q = q_of[at].copy()
        if draws[child] == WITHOUT:
            q[gone[at]] = 0
            q = q / q.sum() if q.sum() > 0 else np.eye(VOCAB)[tokens[child]]
        return q

    def accepted_below(at):
        while children[at]:
            child = children[at][0]
            x, q = tokens[child], drawn_from(at, child)
            weights[child + 1] = (
                min(1, weights[at] * left[at][x] / q[x]) if q[x] > 0 else float(left[at][x] > 0)
            )
            below = accepted_below(child + 1)
            if below is not None:
                return below
            rest = np.maximum(weights[at] * left[at] - q, 0)
            gone[at].append(x)
            children[at].pop(0)
            mass = rest.sum()
            weights[at] = mass / (mass + 1 - weights[at]) if mass + 1 - weights[at] > 0 else 1.0
            left[at] = rest / mass if mass > 1e-6 else left[at]
        return at if at == 0 or uniforms[row][at - 1] < weights[at] else None

    at = accepted_below(0)
    return at, left[at]


@pytest.mark.parametrize("kinds", [tuple(Draw), (WITHOUT,), (WITH,), (FIXED,)], ids=str)
def test_traversal_is_a_walk_up_from_the_leaves(kinds):
    rows = 400
    draft, target = random_trees(rows, kinds=kinds, seed=len(kinds))
    uniforms = np.random.default_rng(1).random(draft.tokens.shape).astype(np.float32)
    verdict, left = scripted(rules.traversal(), draft, target, uniforms)
    depths = set()
    for row in range(rows):
        last, rest = climb(draft, target, uniforms, row)
        path = path_of(verdict, row)
        assert (path[-1] + 1 if path else 0) == last, row
        np.testing.assert_allclose(left[row], rest, atol=1e-4)
        depths.add(len(path))
    assert depths >= {0, 1, 2}


def matching(draft, target, uniforms, row):
    """K-SEQ in float64, for one row: the tokens that are accepted, the number of trials, what is
    left of p.
    """
    tokens, parent, draws = (np.asarray(x[row]) for x in (draft.tokens, draft.parent, draft.draws))
    p_of, q_of = (
        np.exp(np.asarray(x[row], np.float64)) for x in (target.log_probs, draft.log_probs)
    )
    paths, accepted, tested = {0: ()}, (), 0
    for node in range(int(draft.length[row])):
        if parent[node] in paths:
            paths[node + 1] = (*paths[parent[node]], tokens[node])
    while True:
        nodes = [at for at, path in paths.items() if path == accepted]
        children = [at - 1 for at, path in paths.items() if path[:-1] == accepted and path]
        if not children:
            return accepted, tested, p_of[nodes[0]]
        if any(draws[child] != WITH for child in children):
            children = children[:1]
        p, q = p_of[nodes[0]], q_of[parent[children[0]]]
        q = np.eye(VOCAB)[tokens[children[0]]] if draws[children[0]] == FIXED else q
        low, high = 1.0, float(len(children))
        for _ in range(50):
            r = (low + high) / 2
            b = np.minimum(p / r, q).sum()
            low, high = (low, r) if 1 - (1 - b) ** len(children) <= r * b else (r, high)
        b = np.minimum(p / high, q).sum()
        for child in children:
            tested += 1
            if uniforms[row][child] * high * q[tokens[child]] < p[tokens[child]]:
                accepted = (*accepted, tokens[child])
                break
        else:
            a = 1 - (1 - b) ** len(children)
            rest = np.maximum(p - (a / b if b > 0 else 1) * np.minimum(p / high, q), 0)
            return accepted, tested, rest / rest.sum() if rest.sum() > 1e-6 else p


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [(WITH,), tuple(Draw)], ids=str)
def test_k_seq_gives_all_candidates_for_a_token_one_chance(kinds):
    """Nodes with the same tokens above them are one: their distributions are, too."""
    rows, nodes = 400, 7
    draft, target = random_trees(rows, nodes, kinds=kinds, seed=12)
    first = tree.same_prefix(draft.parent, draft.tokens)
    log_p, log_q = (
        jnp.take_along_axis(x, first[:, : x.shape[1], None], axis=1)
        for x in (target.log_probs, draft.log_probs)
    )
    draft = draft._replace(log_probs=log_q)
    uniforms = np.random.default_rng(1).random(draft.tokens.shape).astype(np.float32)
    verdict, left = scripted(rules.k_seq(), draft, Distribution(log_p), uniforms)
    depths, merged = set(), 0
    for row in range(rows):
        accepted, tested, rest = matching(draft, Distribution(log_p), uniforms, row)
        path = path_of(verdict, row)
        assert (
            tuple(draft.tokens[row, jnp.array(path, int)].tolist()),
            int(verdict.num_tested[row]),
        ) == (
            accepted,
            tested,
        )
        np.testing.assert_allclose(left[row], rest, atol=2e-4)
        depths.add(len(path))
        merged += int((first[row] != jnp.arange(nodes + 1)).any())
    assert depths >= {0, 1, 2} and merged > 100


@pytest.mark.parametrize("name", ["block", "classical_rejection"])
def test_rules_of_chains_say_which_judge_trees(name):
    draft = Draft(jnp.array([[0, 1]]), jnp.array([2]), jnp.array([[0, 0]]))
    with pytest.raises(
        ValueError, match=f"the rule {name} judges chains only, and got a tree: use"
    ) as caught:
        getattr(rules, name)().verify(
            None, None, draft, Distribution(tokens=jnp.zeros((1, 3), jnp.int32))
        )
    assert "use rules.rejection() or rules.traversal(), or another rule with Rule.trees" in str(
        caught.value
    )


def test_typical_accepts_the_likeliest_of_the_longest_plausible_paths():
    """0 and 1 follow the last token, 2 and 3 follow node 1, 4 follows node 0; all distributions are
    the same.
    """
    p = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))  # the threshold is 0.3 exp(-1.142) = 0.096
    parent = jnp.array([[0, 0, 2, 2, 1]])
    for tokens, path in [
        ([0, 1, 3, 3, 3], [0]),  # 0 is likelier than 1
        ([0, 1, 3, 2, 3], [1, 3]),  # a second token
        ([0, 1, 1, 0, 2], [1, 3]),  # 0.3 * 0.5 is more than 0.5 * 0.15
        ([3, 3, 0, 0, 0], []),
    ]:
        draft = Draft(jnp.array([tokens]), jnp.array([5]), parent)
        target = Distribution(jnp.broadcast_to(p, (1, 6, 4)))
        verdict, _ = scripted(rules.typical(), draft, target, None)
        assert path_of(verdict) == path, tokens


@pytest.mark.slow
def test_lenience_in_a_tree():
    """A trial with q halved; the residual is the rejection rule's. At temperature 0 the first child
    that is near the best one.
    """
    log_q, parent = jnp.log(jnp.array([[Q]])), jnp.zeros((1, 2), jnp.int32)
    target = Distribution(jnp.log(jnp.array([[P, [0.1, 0.1, 0.8], [0.1, 0.1, 0.8]]])))
    draft = Draft(jnp.array([[2, 1]]), jnp.array([2]), parent, log_q)
    # 0.2 / 0.25 and (1/6) / 0.25
    for uniforms, path in [([0.79, 0.0], [0]), ([0.81, 0.65], [1]), ([0.81, 0.67], [])]:
        verdict, left = scripted(rules.lenient(0.5), draft, target, [uniforms])
        assert path_of(verdict) == path
        np.testing.assert_allclose(left[0], [0.1, 0.1, 0.8] if path else [1, 0, 0], atol=1e-6)
    logits = jnp.broadcast_to(jnp.log(jnp.array(P)), (1, 3, 3))
    for lenience, path in [(0.7, []), (0.5, [1]), (0.3, [0])]:
        greedy = Distribution(tokens=jnp.zeros((1, 3), jnp.int32), logits=logits)
        mixed = Distribution(
            jnp.log(jnp.array([[[1.0, 0, 0]] * 3])), logits=logits, greedy=jnp.array([True])
        )
        rule = rules.lenient(lenience)
        assert path_of(compiled(rule)(None, None, draft, greedy)) == path
        verdict, left = scripted(rule, draft, mixed, [[0.9, 0.9]])
        assert path_of(verdict) == path and left[0].tolist() == [1, 0, 0]


@pytest.mark.parametrize("name", [name for name in RULES if not name.startswith("lenient")])
def test_of_a_certain_target_children_are_accepted_that_are_its_tokens(name):
    """In the one program that all rules have for it; of two siblings with one token the first
    counts.
    """
    rows, nodes = 400, 7
    draft, target = random_trees(rows, nodes, seed=3)
    wanted = np.random.default_rng(4).integers(0, VOCAB, (rows, nodes + 1))
    # two: many agree
    best = np.concatenate([wanted[:, :-2], draft.tokens[:, -1:]], axis=1).astype(np.int32) % 2
    draft, wanted = draft._replace(tokens=best, log_probs=None), wanted.astype(np.int32) % 2
    verdict = compiled(RULES[name])(None, None, draft, Distribution(tokens=wanted))
    with np.errstate(divide="ignore"):
        certain = target._replace(log_probs=np.log(np.eye(VOCAB, dtype=np.float32)[wanted]))
    depths = set()
    for row in range(rows):
        path, tested, rest = walk(draft, certain, np.full((rows, nodes), 0.5), row)
        assert (path_of(verdict, row), int(verdict.num_tested[row])) == (path, tested), row
        assert int(verdict.next_token[row]) == int(np.argmax(rest))
        depths.add(len(path))
    assert depths >= {0, 1, 2, 3}


def test_a_certain_target_that_allows_nothing_accepts_nothing():
    """Its token is -1, which no draft token is; the decoder ends the row."""
    draft = Draft(jnp.array([[0, 1]]), jnp.array([2]), jnp.array([[0, 0]]))
    verdict = exact_match(draft, jnp.array([[-1, 0, 0]]))
    assert verdict.num_accepted.tolist() == [0] and verdict.num_tested.tolist() == [2]


def test_coupled_follows_plain_sampling_down_the_tree():
    rows = 300
    draft, target = random_trees(rows, seed=5)
    keys, position = noise.row_keys(jax.random.key(8), rows), 3 + jnp.arange(rows, dtype=jnp.int32)
    drawn = jnp.stack(
        [
            jnp.stack(
                [
                    noise.categorical(
                        noise.at(keys, position + depth, noise.Purpose.TOKEN),
                        target.log_probs[:, entry],
                    )
                    for entry in range(8)
                ],
                axis=1,
            )
            for depth in range(8)
        ],
        axis=1,
    )  # rows, depth, fed token
    verdict = compiled(rules.coupled())(keys, position, draft, target)
    tokens, parent, drawn, depths = (
        *(np.asarray(x) for x in (draft.tokens, draft.parent, drawn)),
        set(),
    )
    for row in range(rows):
        current, path, tested = 0, [], 0
        while True:
            children = np.flatnonzero(parent[row, : int(draft.length[row])] == current)
            token = drawn[row, len(path), current]
            same = children[tokens[row, children] == token]
            tested += len(children) if not len(same) else int((children <= same[0]).sum())
            if not len(same):
                break
            current, path = same[0] + 1, [*path, int(same[0])]
        assert (path_of(verdict, row), int(verdict.num_tested[row])) == (path, tested), row
        assert int(verdict.next_token[row]) == token
        depths.add(len(path))
    assert depths >= {0, 1, 2}


@pytest.mark.slow
def test_exact_match_is_the_rejection_rule_for_point_masses():
    draft, target = random_trees(200, seed=6)
    keys, position = noise.row_keys(jax.random.key(9), 200), jnp.zeros(200, jnp.int32)
    # which it does not read
    told = draft._replace(log_probs=jnp.full_like(draft.log_probs, jnp.nan))
    ours = compiled(rules.exact_match())(keys, position, told, target)
    theirs = compiled(rules.rejection())(
        keys, position, draft._replace(log_probs=None, draws=None), target
    )
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), ours, theirs))


# --- chains, rows


@pytest.mark.parametrize("certain", [False, True], ids=["model", "point mass"])
@pytest.mark.parametrize("name", marked(RULES, slow=OFTEN_TRIED))
def test_a_tree_that_is_a_chain_is_judged_as_the_chain(name, certain):
    """With the same keys: number accepted, number tested and the token after, row by row."""
    rows, nodes = 1000, 5
    draft, target = random_trees(rows, nodes, seed=7, kinds=(WITHOUT,))
    log_q = draft.log_probs
    tokens = jax.random.categorical(jax.random.key(3), log_q).astype(jnp.int32)
    chain = Draft(tokens, draft.length, log_probs=None if certain else log_q)
    keys, position = noise.row_keys(jax.random.key(10), rows), 2 + jnp.arange(rows, dtype=jnp.int32)
    as_tree = chain._replace(
        parent=jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), tokens.shape)
    )
    of_chain = compiled(RULES[name])(keys, position, chain, target)
    other = compiled(RULES[name])(keys, position, as_tree, target)
    assert of_chain.path is None
    for field in ("num_accepted", "num_tested", "next_token"):
        assert getattr(of_chain, field).tolist() == getattr(other, field).tolist(), field
    slot = np.arange(nodes)[None, :]
    assert ((other.path == slot) | (slot >= other.num_accepted[:, None])).all()
    assert len(set(of_chain.num_accepted.tolist())) >= 3


@pytest.mark.parametrize("name", marked(RULES, slow=OFTEN_TRIED))
def test_rows_do_not_depend_on_mates_or_padding(name):
    """Rows alone, padded by two garbage nodes with a garbage parent."""
    rows = 12
    draft, target = random_trees(rows, seed=8)
    keys, position = noise.row_keys(jax.random.key(11), rows), jnp.arange(rows, dtype=jnp.int32)
    together = compiled(RULES[name])(keys, position, draft, target)
    nan = dict(constant_values=jnp.nan)
    wide = Draft(
        jnp.pad(draft.tokens, ((0, 0), (0, 2)), constant_values=1),
        draft.length,
        jnp.pad(draft.parent, ((0, 0), (0, 2))),
        jnp.pad(draft.log_probs, ((0, 0), (0, 2), (0, 0)), **nan),
        jnp.pad(draft.draws, ((0, 0), (0, 2))),
    )
    padded = Distribution(jnp.pad(target.log_probs, ((0, 0), (0, 2), (0, 0)), **nan))
    verify = compiled(RULES[name])
    for i in range(rows):
        alone = verify(*jax.tree.map(lambda x, i=i: x[i : i + 1], (keys, position, wide, padded)))
        assert path_of(alone) == path_of(together, i)
        assert (
            alone.num_tested[0] == together.num_tested[i]
            and alone.next_token[0] == together.next_token[i]
        )


@pytest.mark.slow
def test_of_a_tree_that_is_all_padding_nothing_is_tried():
    draft, target = random_trees(12, seed=9)
    keys, position = noise.row_keys(jax.random.key(12), 12), jnp.zeros(12, jnp.int32)
    for nothing in (
        draft._replace(length=np.zeros_like(draft.length)),
        draft._replace(parent=np.full_like(draft.parent, -1)),
    ):
        for rule in RULES.values():
            verdict = compiled(rule)(keys, position, nothing, target)
            assert verdict.num_accepted.tolist() == verdict.num_tested.tolist() == [0] * 12


@pytest.mark.parametrize("name", ["rejection", "traversal", "coupled", "typical"])
def test_no_array_of_all_nodes_and_tokens_is_made(name):
    """Beyond what a rule is given: the target's distributions, and the drafter's."""
    rows, nodes, vocab = 2, 16, 4096

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    logits, ids = shape(rows, nodes + 1, vocab), shape(rows, nodes, dtype=jnp.int32)
    draft = Draft(ids, shape(rows, dtype=jnp.int32), ids, shape(rows, nodes, vocab), ids)
    keys = jax.eval_shape(lambda: noise.row_keys(jax.random.key(0), rows))
    rule = catalogue.RULES[name].rule
    program = jax.jit(rule.verify).lower(keys, draft.length, draft, Distribution(logits)).compile()
    assert program.memory_analysis().temp_size_in_bytes < logits.size * 4 / 2


# --- children of several distributions

P_FOUR, Q_FIRST, Q_SECOND = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.4, 0.3], [0.2, 0.6, 0.1, 0.1]


@functools.cache
def two_drafters(draw):
    """One of two siblings is accepted so often, and the text's distribution: over all pairs that
    two drafters draw.
    """
    pairs = np.array(list(np.ndindex(4, 4)), np.int32)
    count, first = len(pairs), jnp.zeros(len(pairs), jnp.int32)

    def rows(values):
        return jnp.log(jnp.broadcast_to(jnp.array(values), (count, 1, 4)))

    draft = Draft(
        jnp.asarray(pairs),
        first + 2,
        jnp.zeros((count, 2), jnp.int32),
        rows(Q_FIRST),
        jnp.full((count, 2), draw),
    )._replace(
        sources=jnp.broadcast_to(jnp.array([0, 1]), (count, 2)), other_log_probs=(rows(Q_SECOND),)
    )
    nodes = residual_tree.read(draft, Distribution(jnp.repeat(rows(P_FOUR), 3, axis=1)))
    residual, one = residual_tree.initial(nodes), jnp.ones(count)
    still, text, accepted = np.outer(Q_FIRST, Q_SECOND).reshape(-1), np.zeros(4), 0.0
    for child in range(2):
        p, q = (
            np.asarray(x, np.float64)
            for x in residual_tree.trial_probs(nodes, residual, first + child)
        )
        passes = still * np.minimum(p / q, 1)
        text += np.bincount(pairs[:, child], passes, minlength=4)
        accepted += passes.sum()
        still = still - passes
        _, residual = residual_tree.after_rejection(nodes, residual, first + child, one, one > 0)
    left = np.exp(residual_tree.log_left(nodes, residual, first), dtype=np.float64)
    return accepted, text + still @ (left / left.sum(axis=1, keepdims=True))


@pytest.mark.parametrize(("draw", "accepted"), [(WITH, 0.78), (FIXED, 0.445)])
def test_each_of_two_children_is_judged_by_its_own_distribution(draw, accepted):
    """By hand: the first with 0.6, which leaves (.75 .25 0 0), and the second with 0.45 of the
    rest; point masses with the probability that the target's token is one of them.
    """
    share, text = two_drafters(draw)
    np.testing.assert_allclose(share, accepted, atol=1e-6)
    np.testing.assert_allclose(text, P_FOUR, atol=1e-6)


def test_a_rule_of_one_distribution_refuses_children_of_two():
    log_q = jnp.log(jnp.array([[Q]]))
    draft = Draft(
        jnp.array([[0, 1]]),
        jnp.array([2]),
        jnp.zeros((1, 2), jnp.int32),
        log_q,
        sources=jnp.array([[0, 1]]),
    )
    target = Distribution(jnp.log(jnp.array([[P, P, P]])))
    rule = rule_of("mine", verify_chain, verify_tree)
    with pytest.raises(
        ValueError, match=r"the rule mine judges children of one distribution only, .* from 2: use"
    ):
        rule.verify(None, jnp.array([3]), draft._replace(other_log_probs=(log_q,)), target)
