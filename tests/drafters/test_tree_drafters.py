"""Drafters of trees: which nodes they propose, that their caches follow the accepted path, and what
they refuse.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, policies, rules, trace
from jaxspec.core import (
    Caches,
    Distribution,
    DraftContext,
    DraftStart,
    Draw,
    Forward,
    Prompt,
    Reading,
    Room,
    RoundEnd,
    TreeSize,
    Verdict,
    Weights,
    token_rows,
    tree,
)
from jaxspec.core.noise import row_keys
from jaxspec.drafters.trees import children
from jaxspec.drafters.trees import shape as shapes
from jaxspec.drafters.trees.dynamic_tree import candidates, grow
from jaxspec.testing import table_model
from tests.small import between

VOCAB, NEW = 7, 20
TARGET = table_model(jax.random.key(1), VOCAB, sharpness=2.0)
BLEND = between(TARGET, table_model(jax.random.key(2), VOCAB, sharpness=2.0), 0.6)
PROMPTS = token_rows.pad([[3, 1, 4], [1], [5, 2, 6, 5, 3], [0, 0]], 8)
# deep under a second child's second
RAGGED = [(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0), (1, 1, 0, 0)]
MADE = {
    "ragged": drafters.tree(BLEND, shape=RAGGED),
    "sequences": drafters.sequences(BLEND, k=3, length=4),
    "dynamic": drafters.dynamic_tree(BLEND, nodes=8, depth=4, width=3),
    "recycling": drafters.token_recycling(),
    "lookup": drafters.prompt_lookup(candidates=2, length=4),
    "lookahead": drafters.lookahead(window=4, ngram=3, candidates=3),
}


def tokens_of(out):
    return [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]


@pytest.fixture(scope="module")
def plain():
    return tokens_of(jaxspec.generate(TARGET, PROMPTS, max_new_tokens=NEW))


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_greedy_text_is_plain_decodings(name, plain):
    out = jaxspec.generate(TARGET, PROMPTS, drafter=MADE[name], max_new_tokens=NEW)
    assert tokens_of(out) == plain
    assert out.stats.accepted.sum() > 10
    assert (out.trace.draft_length <= MADE[name].functions.tree.nodes).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ragged", "dynamic", "recycling"])
def test_a_policy_limits_the_depth(name, plain):
    limits = [0, 1, 2, 3]
    out = jaxspec.generate(
        TARGET, PROMPTS, drafter=MADE[name], policy=policies.constant(limits), max_new_tokens=NEW
    )
    assert tokens_of(out) == plain
    assert (out.trace.num_accepted.max(axis=1) <= limits).all()


def itself(name):
    """The target drafts for itself: whether its cache follows the path shows in what it proposes
    next.
    """
    if name == "dynamic":
        return drafters.dynamic_tree(TARGET, nodes=5, depth=3, width=2)
    return drafters.tree(TARGET, shape=[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynamic", "ragged"])
def test_its_own_target_accepts_the_most_probable_path(name):
    out = jaxspec.generate(TARGET, PROMPTS, drafter=itself(name), max_new_tokens=NEW)
    # but for the last round
    committed = out.trace.num_committed[:, :-1][out.trace.num_committed[:, 1:] > 0]
    assert (committed >= (4 if name == "ragged" else 2)).all() and committed.max() == 4


def context_of(row, limit, to_distribution=None, gamma=9):
    keys = row_keys(jax.random.key(0), len(row.length))
    return DraftContext(keys, row, jnp.asarray(limit, jnp.int32), gamma, False, to_distribution)


class Compiled:
    """A drafter's functions, each of them one program: by itself every operation would be one."""

    def __init__(self, functions, weights=None, to_distribution=None):
        self.weights, self.commit = weights, jax.jit(functions.commit)
        self._init = jax.jit(lambda weights, row, forward: functions.init(
            DraftStart(weights, row, Room(row.tokens.shape[1] + 20, 20), forward)
        ))  # fmt: skip
        self._propose = jax.jit(
            lambda weights, caches, row, limit, gamma: functions.propose(
                weights, caches, context_of(row, limit, to_distribution, gamma)
            ),
            static_argnames="gamma",
        )

    def init(self, row, forward=None):
        return Caches(None, self._init(self.weights, row, forward))

    def propose(self, caches, row, limit, gamma=9):
        return self._propose(self.weights, caches, row, jnp.asarray(limit, jnp.int32), gamma)


# --- static shapes


@pytest.mark.parametrize(
    "choices",
    [
        RAGGED,
        shapes.branching((2, 1, 3)),
        shapes.by_rank((0.5, 0.3, 0.1), 20, 5),
        [(0,)],
        [(0,), (1,), (2,)],
    ],
)
def test_a_shape_is_the_tree_that_its_ranks_say(choices):
    shape = shapes.shape_of(tuple(map(tuple, choices)))
    parents = np.array(shape.parents)
    assert (parents <= np.arange(len(parents))).all()
    # A node's children, in order, and so the ranks that lead to each node.
    path = {0: ()}
    for node, parent in enumerate(shape.parents):
        path[node + 1] = (*path[parent], list(shape.parents[:node]).count(parent))
    assert sorted(list(path.values())[1:]) == sorted(map(tuple, choices))
    assert shape.depths == tuple(len(path[node + 1]) for node in range(len(parents)))
    assert set(shape.parents) - {0} <= set(range(1, shape.fed + 1)), "whoever has children is fed"
    assert list(shape.depths[: shape.fed]) == sorted(shape.depths[: shape.fed])
    fed_parents = jnp.asarray(shape.parents)[None]
    expected = np.asarray(tree.ancestors(tree.fed(fed_parents)))[0, : shape.fed + 1, 1:]
    np.testing.assert_array_equal(shapes.seen(shape), expected)


def test_a_chain_and_a_branching_are_shapes():
    assert (
        drafters.tree(BLEND, (1, 1)).functions
        == drafters.tree(BLEND, shape=[(0, 0), (0,)]).functions
    )
    assert (
        drafters.tree(BLEND, (2, 1)).functions
        == drafters.tree(BLEND, shape=shapes.branching((2, 1))).functions
    )


@pytest.mark.slow
def test_the_children_of_a_ragged_tree_are_the_most_probable_tokens():
    """At temperature 0, node by node, against the table."""
    row = Prompt(PROMPTS.tokens[:1], PROMPTS.length[:1])
    greedy = lambda logits, *_: Distribution(tokens=jnp.argmax(logits, axis=-1), logits=logits)  # noqa: E731
    drafter = Compiled(
        drafters.tree(TARGET, shape=RAGGED).functions, Weights(None, TARGET.params), greedy
    )
    draft, _ = drafter.propose(drafter.init(row), row, [9])
    shape, table, texts = shapes.shape_of(tuple(RAGGED)), np.asarray(TARGET.params), {0: [1, 4]}
    for node, parent in enumerate(shape.parents):
        rank = list(shape.parents[:node]).count(parent)
        before = texts[parent]
        best = np.argsort(-table[before[-2], before[-1]], kind="stable")[rank]
        assert draft.tokens[0, node] == best
        texts[node + 1] = [*before, int(best)]
    assert draft.parent.tolist() == [list(shape.parents)]


@pytest.mark.slow
def test_what_follows_a_repeated_token_follows_its_twin():
    """Some of 16 rows draw twins; everything hangs on the first of them, and nothing on the
    others.
    """
    rows = Prompt(jnp.zeros((16, 2), jnp.int32), jnp.full(16, 2))
    softmax = lambda logits, *_: Distribution(jax.nn.log_softmax(logits))  # noqa: E731
    drafter = Compiled(
        drafters.sequences(BLEND, k=3, length=3).functions, Weights(None, BLEND.params), softmax
    )
    draft, _ = drafter.propose(drafter.init(rows), rows, [9] * 16)
    assert (draft.draws == Draw.WITH_REPLACEMENT).all()
    twins = 0
    for tokens, parent in zip(draft.tokens.tolist(), draft.parent.tolist(), strict=True):
        for first, second in itertools.combinations(range(len(tokens)), 2):
            if (tokens[first], parent[first]) == (tokens[second], parent[second]):
                twins += 1
                assert second + 1 not in parent
    assert twins > 3


def test_a_tree_of_point_masses_is_refused():
    with pytest.raises(ValueError, match=r"greedy\(.*takes chains only|greedy\("):
        drafters.tree(drafters.greedy(BLEND), (2, 1))


# --- several drafters of one tree

SECOND = table_model(jax.random.key(3), VOCAB, sharpness=2.0)
# which of two drafters draws each node of the tree (2, 2): the node's own drafter first
TURNS = [0, 1, 0, 1, 1, 0]


@pytest.mark.parametrize("draw", ["without_replacement", "replacement", "mixed"])
def test_two_drafters_take_turns_and_each_declares_its_own_distribution(draw):
    rows = Prompt(jnp.tile(jnp.array([[1, 4]]), (8, 1)), jnp.full(8, 2))
    softmax = lambda logits, *_: Distribution(jax.nn.log_softmax(logits))  # noqa: E731
    together = drafters.tree([BLEND, SECOND], (2, 2), draw=draw)
    drafter = Compiled(together.functions, Weights(None, (BLEND.params, SECOND.params)), softmax)
    draft, _ = drafter.propose(drafter.init(rows), rows, [9] * 8)
    assert draft.sources.tolist() == [TURNS] * 8
    for entries, model in zip(
        (draft.log_probs, *draft.other_log_probs), (BLEND, SECOND), strict=True
    ):
        table = jax.nn.log_softmax(model.params)
        np.testing.assert_allclose(entries[:, 0], jnp.tile(table[1, 4], (8, 1)), atol=1e-5)
        np.testing.assert_allclose(entries[:, 1], table[4, draft.tokens[:, 0]], atol=1e-5)
    pairs = [(0, 1), (2, 3), (4, 5)]
    different = [draft.tokens[:, first] != draft.tokens[:, second] for first, second in pairs]
    assert draw == "replacement" or jnp.all(jnp.stack(different))
    if draw == "mixed":  # the second child is the other drafter's best but for the first
        left = np.where(
            np.arange(VOCAB) == np.asarray(draft.tokens[:, :1]),
            -np.inf,
            np.asarray(SECOND.params[1, 4]),
        )
        assert (draft.tokens[:, 1] == np.argmax(left, axis=1)).all()


@pytest.mark.parametrize("draw", ["without_replacement", "replacement", "mixed", "top"])
def test_children_that_several_drafters_choose_at_temperature_0_are_different(draw):
    """Both drafters say 2, then 1; the third child is the first drafter's again."""
    logits = jnp.array([[[0.0, 2.0, 3.0, 1.0]]] * 2)
    greedy = jnp.array([True, False])
    log_probs = jnp.where(
        greedy[:, None, None], jnp.log(jnp.array([0.0, 0, 1, 0])), jax.nn.log_softmax(logits)
    )
    both = [Distribution(log_probs=log_probs, logits=logits, greedy=greedy)] * 2
    keys = jax.random.split(jax.random.key(0), (2, 1))
    chosen, drawn_from = children.in_turn(both, keys, np.array([[0, 1, 0]]), draw)
    assert chosen.tokens[0].tolist() == [[2, 1, 3]] and chosen.live[0].all()
    assert (chosen.draws[0] == int(Draw.FIXED)).all()
    assert [x is log_probs for x in drawn_from] == ([] if draw == "top" else [True, True])


@pytest.mark.slow
def test_each_of_several_drafters_follows_the_path_that_another_drew(plain):
    """One of two is the target itself: unless its cache follows, it soon proposes something
    else.
    """
    for first, second in ([TARGET, SECOND], [SECOND, TARGET]):
        out = jaxspec.generate(
            TARGET, PROMPTS, drafter=drafters.tree([first, second], (2, 2)), max_new_tokens=NEW
        )
        assert tokens_of(out) == plain
        # but for the last round
        committed = out.trace.num_committed[:, :-1][out.trace.num_committed[:, 1:] > 0]
        assert (committed == 3).all()


@pytest.mark.exhaustive
def test_sequences_of_several_drafters_are_plain_decodings_text(plain):
    counted = drafters.ngram([[3, 1, 4, 1, 5, 2, 6, 5, 3]], TARGET, order=2)
    drafter = drafters.sequences([BLEND, SECOND, counted], k=3, length=3)
    assert drafter.name.startswith("sequences(3 of 3 tokens, ") and drafter.name.endswith(
        "+2-gram)"
    )
    assert (
        tokens_of(jaxspec.generate(TARGET, PROMPTS, drafter=drafter, max_new_tokens=NEW)) == plain
    )


def test_what_several_drafters_refuse():
    options = dict(max_new_tokens=4, temperature=1.0, key=jax.random.key(0))
    rule = rules.k_seq()._replace(sources=False)
    with pytest.raises(
        ValueError, match=r"the rule k_seq takes children of one distribution only .* from 2 dist"
    ):
        jaxspec.generate(
            TARGET, PROMPTS, drafter=drafters.tree([BLEND, SECOND]), rule=rule, **options
        )
    with pytest.raises(
        ValueError,
        match=r"draft\[1\] would draw no node of the tree: expected fewer than 2 drafters",
    ):
        drafters.tree([BLEND, SECOND], (1, 1))
    with pytest.raises(
        ValueError, match="k is 1 and there are 2 drafters: expected at least one sequence of each"
    ):
        drafters.sequences([BLEND, SECOND], k=1)
    with pytest.raises(ValueError, match="draft is empty: expected a model or a drafter"):
        drafters.tree([])
    with pytest.raises(TypeError, match=r"draft\[1\] is 'small': expected a jaxspec.Model"):
        drafters.tree([BLEND, "small"])


# --- dynamic trees


@pytest.mark.slow
def test_a_dynamic_tree_is_the_best_of_what_was_expanded():
    """Against a search by hand over the drafter's distributions, which here depend on the last
    token alone.
    """
    table = jax.nn.log_softmax(3 * jax.random.normal(jax.random.key(4), (VOCAB, VOCAB)))
    log_q, row = np.asarray(table, np.float64), Prompt(jnp.array([[2], [5]]), jnp.array([1, 1]))
    nodes, depth, width = 9, 4, 3

    def nodes_of(tokens, parent, level, carry):
        assert parent.shape[1] == level * width
        return table[tokens], carry

    def grown(row):
        context = context_of(row, [4, 2], lambda logits, *_: Distribution(logits))
        reading = Reading(None, lambda carry: (table[row.tokens], carry), nodes_of)
        return grow(reading, context, nodes=nodes, depth=depth, width=width)

    draft, _, fed = jax.device_get(jax.jit(grown)(row))
    for b, limit in enumerate([4, 2]):
        seen, frontier = {}, {(): 0.0}
        for _ in range(min(depth, limit)):
            new = {}
            for path, score in frontier.items():
                last = path[-1] if path else int(row.tokens[b, 0])
                for token in np.argsort(-log_q[last], kind="stable")[:width]:
                    new[(*path, int(token))] = score + log_q[last, token]
            seen |= new
            frontier = dict(sorted(new.items(), key=lambda item: -item[1])[:width])
        best = {path for path, _ in sorted(seen.items(), key=lambda item: -item[1])[:nodes]}
        path = {0: ()}
        for node, parent in enumerate(draft.parent[b].tolist()):
            if parent >= 0:
                assert parent <= node
                path[node + 1] = (*path[parent], int(draft.tokens[b, node]))
        assert set(path.values()) - {()} == best
        inner = {parent - 1 for parent in draft.parent[b].tolist() if parent > 0}
        assert all(fed[b, node] >= 0 for node in inner), "whoever has children was fed"


@pytest.mark.slow
def test_ties_do_not_separate_children_from_their_parents():
    """A drafter that is sure: a child's score is its parent's."""
    certain = jnp.log(jnp.eye(VOCAB))[jnp.array([1, 2, 3, 4, 5, 6, 0])]
    row = Prompt(jnp.array([[2]]), jnp.array([1]))

    def grown(row):
        context = context_of(row, [9], lambda logits, *_: Distribution(logits))
        reading = Reading(
            None,
            lambda carry: (certain[row.tokens], carry),
            lambda tokens, *_: (certain[tokens], None),
        )
        return grow(reading, context, nodes=6, depth=4, width=2)

    draft, _, _ = jax.jit(grown)(row)
    assert draft.tokens[0, :4].tolist() == [3, 4, 5, 6]
    assert draft.parent.tolist() == [[0, 1, 2, 3, -1, -1]]
    assert candidates(4, 2) == 14


# --- what is looked up


@pytest.mark.slow
def test_recycling_proposes_what_the_target_found_after_each_token():
    drafter = Compiled(drafters.token_recycling([(0,), (1,), (0, 0)]).functions)
    row = Prompt(jnp.array([[4, 2, 4, 3]]), jnp.array([4]))
    prefilled = Forward(jnp.zeros((1, 1, VOCAB)), jnp.zeros((1, 4, 0)))
    caches = drafter.init(row, prefilled)
    draft, caches = drafter.propose(caches, row, [9])
    assert draft.parent.tolist() == [[-1, -1, -1]]  # nothing followed 3 yet
    logits = jnp.full((1, 4, VOCAB), -9.0).at[0, 0, 5].set(2.0).at[0, 0, 4].set(1.0)
    verdict = Verdict(*[jnp.array([0])] * 3, jnp.zeros((1, 3), jnp.int32))
    row = Prompt(jnp.array([[4, 2, 4, 3, 5, 3]]), jnp.array([6]))
    caches = drafter.commit(RoundEnd(None, caches, row, verdict, Forward(logits, None)))
    draft, caches = drafter.propose(caches, row, [9])
    # after 3: 5, then 4
    assert draft.tokens.tolist()[0][1] == 4 and draft.parent.tolist() == [[0, 0, -1]]
    assert draft.tokens.tolist()[0][0] == 5  # after which nothing is known
    # A token that was read twice has what came last; one that was no node is not entered.
    again = (
        jnp.full((1, 4, VOCAB), -9.0).at[0, 1, 1].set(2.0).at[0, 2, 6].set(2.0).at[0, 3, 0].set(9.0)
    )
    caches = drafter.commit(RoundEnd(None, caches, row, verdict, Forward(again, None)))
    assert caches.draft.table[0, 5, 0] == 1 and caches.draft.table[0, 4, 0] == 6
    assert caches.draft.table[0, 0].tolist() == [-1, -1]


@pytest.mark.slow
def test_lookahead_remembers_what_a_window_has_made():
    """Two columns of two levels, r s above t u: after r comes s, after r t, after s u."""
    drafter = Compiled(drafters.lookahead(window=2, ngram=3, candidates=1, pool=3).functions)
    row = Prompt(jnp.array([[5, 3, 4, 0, 0]]), jnp.array([3]))
    caches = drafter.init(row)
    assert caches.draft.window.tolist() == [[[5, 3], [3, 4]]]  # the prompt, from each place on
    draft, caches = drafter.propose(caches, row, [9])
    assert draft.tokens.tolist() == [[0, 0, 5, 3, 3, 4]] and draft.parent.tolist() == [
        [-1, -1, 0, 3, 3, 4]
    ]
    # One draft token was accepted, and after the window's columns the target would go on with 1 and
    # 2.
    forward = Forward(jax.nn.one_hot(jnp.array([[0, 0, 0, 0, 0, 1, 2]]), VOCAB), None)
    verdict = Verdict(
        jnp.array([1]), jnp.array([3]), jnp.array([1]), jnp.full((1, 6), 2, jnp.int32)
    )
    caches = drafter.commit(RoundEnd(None, caches, row, verdict, forward))
    assert caches.draft.pool[0, :2].tolist() == [[5, 3, 1], [3, 4, 2]]
    assert caches.draft.window.tolist() == [[[4, 3], [2, 1]]]  # a level up, and one column on
    row = Prompt(jnp.array([[5, 3, 4, 5, 3]]), jnp.array([5]))
    draft, caches = drafter.propose(caches, row, [2])
    # of the n-gram 3 4 2
    assert draft.tokens[0, :2].tolist() == [4, 2] and draft.parent[0, :2].tolist() == [0, 1]
    # At most 2 deep were verified: the second column's end was not.
    caches = drafter.commit(
        RoundEnd(None, caches, row, verdict._replace(num_accepted=jnp.array([0])), forward)
    )
    assert caches.draft.pool[0].tolist() == [[-1, -1, -1], [3, 4, 2], [4, 2, 1]]
    assert caches.draft.window.tolist() == [[[2, 1], [1, 1]]]


def test_jacobi_drafts_what_the_target_found_further_ahead():
    drafter = Compiled(drafters.jacobi(longest=4).functions)
    row = Prompt(jnp.array([[5, 3]]), jnp.array([2]))
    caches = drafter.init(row)
    draft, caches = drafter.propose(caches, row, [2], gamma=3)
    assert draft.tokens.tolist() == [[5, 3, 5]] and draft.length.tolist() == [2]
    forward, ones = Forward(jax.nn.one_hot(jnp.array([[1, 2, 4, 6]]), VOCAB), None), jnp.array([1])
    caches = drafter.commit(RoundEnd(None, caches, row, Verdict(ones, 2 * ones, ones), forward))
    # after the accepted 5 and the 2 that came instead of 3
    assert caches.draft.tokens.tolist() == [[4, 6, 6, 6]]


def test_jacobi_after_draft_tokens_goes_on_at_their_end():
    """In a horizontal cascade: the iterate 4 6 1 2 is of the positions after the row, and the first
    one is drafted.
    """
    drafter = Compiled(drafters.jacobi(longest=4).functions)
    row, ones = Prompt(jnp.array([[5, 3, 0, 0, 0, 0, 0]]), jnp.array([2])), jnp.array([1])
    caches = drafter.init(row)
    forward = Forward(jax.nn.one_hot(jnp.array([[1, 4, 6, 1, 2]]), VOCAB), None)
    caches = drafter.commit(RoundEnd(None, caches, row, Verdict(0 * ones, 2 * ones, ones), forward))
    for drafted, expected in ((0, [4, 6, 1]), (1, [6, 1, 2]), (2, [1, 2]), (4, []), (5, [])):
        draft, _ = drafter.propose(caches, row._replace(length=row.length + drafted), [3], gamma=3)
        assert draft.tokens[0, : draft.length[0]].tolist() == expected


@pytest.mark.slow
def test_lookups_of_several_continuations():
    text = [1, 2, 3, 0, 1, 2, 4, 5, 1, 2, 3, 6, 1, 2]
    row = Prompt(jnp.array([text]), jnp.array([len(text)]))
    drafter = Compiled(drafters.prompt_lookup(candidates=2, length=2).functions)
    draft, _ = drafter.propose(
        drafter.init(Prompt(row.tokens[:, :1], row.length * 0 + 1)), row, [2], gamma=2
    )
    paths = {0: ()}
    for node, parent in enumerate(draft.parent[0].tolist()):
        paths[node + 1] = (*paths[parent], int(draft.tokens[0, node]))
    # 3 twice, with 6 most recently, then 0; 4 once.
    assert list(paths.values())[1:3] == [(3,), (4,)] and (3, 6) in paths.values()


# --- views


@pytest.mark.slow
def test_streamed_rounds_are_those_of_a_generation():
    prompt = Prompt(PROMPTS.tokens[:1], PROMPTS.length[:1])
    out = jaxspec.generate(TARGET, prompt, drafter=MADE["ragged"], max_new_tokens=NEW)
    rounds = trace.of_row(out.tokens[0, : out.lengths[0]].tolist(), out.trace, 0)
    before, seen = [], 0
    for piece, step in zip(
        jaxspec.stream(TARGET, prompt, drafter=MADE["ragged"], max_new_tokens=NEW),
        rounds,
        strict=True,
    ):
        streamed = trace.TracedRound(
            list(before), piece.tokens, piece.draft, piece.num_accepted, piece.parent, piece.path
        )
        assert trace.branches(streamed) == trace.branches(step) and trace.judge(
            streamed
        ) == trace.judge(step)
        before += piece.tokens
        fates = [fate for branch in trace.branches(streamed) for _, fate in branch.tokens]
        accepted, target_token = trace.judge(streamed).accepted, trace.judge(streamed).target
        assert fates.count("own") == (len(target_token) if piece.parent is not None else 0)
        if len(piece.tokens) > piece.num_accepted and piece.parent is not None:
            assert fates.count("accepted") == len(accepted)
        assert len(fates) == fates.count("own") + len(
            piece.draft if piece.parent is not None else []
        )
        seen += fates.count("rejected")
    assert seen > 0


@pytest.mark.slow
def test_a_dynamic_tree_of_fewer_nodes_than_levels():
    drafter = drafters.dynamic_tree(BLEND, nodes=2, depth=4, width=2)
    assert drafter.functions.tree == TreeSize(2, 2)
    plain, out = (
        jaxspec.generate(TARGET, PROMPTS, drafter=drafts_with, max_new_tokens=8)
        for drafts_with in (None, drafter)
    )
    np.testing.assert_array_equal(out.tokens, plain.tokens)


# --- bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: drafters.tree(BLEND, shape=[(0,), (1, 0)]),
            r"has the node \(1, 0\) and not its parent \(1,\): add it",
        ),
        (
            lambda: drafters.tree(BLEND, shape=[(0,), (2,)]),
            r"not its elder sibling \(1,\): add it, ranks have no gaps",
        ),
        (lambda: drafters.tree(BLEND, shape=[(0,), (0,)]), "each node once"),
        (lambda: drafters.tree(BLEND, shape=[]), "no nodes"),
        (lambda: drafters.tree(BLEND, (2,), shape=[(0,)]), "both a branching and a shape"),
        (lambda: drafters.tree(BLEND, ()), "at least one level"),
        (
            lambda: drafters.tree(BLEND, 4),
            "branching is 4: expected the children of a node for each level",
        ),
        (
            lambda: drafters.tree(BLEND, (1.5,)),
            "branching is 1.5: expected the children of a node for each level",
        ),
        (
            lambda: drafters.tree(BLEND, "42"),
            "branching is '42': expected the children of a node for each level",
        ),
        (lambda: drafters.tree(BLEND, shape=[0, 1]), "expected the ranks on the way to each node"),
        (
            lambda: drafters.tree(BLEND, shape=[(0,), (1.2,)]),
            "expected the ranks on the way to each node",
        ),
        (lambda: drafters.sequences(BLEND, k=1.5), "k is 1.5: expected an integer"),
        (lambda: drafters.dynamic_tree(BLEND, nodes=4.5), "nodes is 4.5: expected an integer"),
        (lambda: drafters.prompt_lookup(2.5), "longest is 2.5: expected an integer"),
        (lambda: drafters.token_recycling([0, 1]), "expected the ranks on the way to each node"),
        (lambda: drafters.tree(BLEND, (8,)), "has 8 children and the vocabulary 7 tokens"),
        (lambda: drafters.tree(BLEND, (2,), draw="best"), "draw is 'best': expected one of"),
        (lambda: drafters.sequences(BLEND, k=0), "k is 0: expected at least 1"),
        (lambda: drafters.sequences(BLEND, k=9), "9 children and the vocabulary 7"),
        (lambda: drafters.dynamic_tree(BLEND, depth=0), "depth is 0: expected at least 1"),
        (
            lambda: drafters.dynamic_tree(BLEND, width=8),
            "width is 8 and the vocabulary has 7 tokens",
        ),
        (
            lambda: drafters.dynamic_tree(BLEND, nodes=11, depth=3, width=2),
            "see 10: expected at most",
        ),
        (lambda: drafters.token_recycling([(0, 0)]), "not its parent"),
        (lambda: drafters.prompt_lookup(candidates=0), "candidates is 0"),
        (lambda: drafters.lookahead(window=0), "window is 0: expected at least 1"),
        (lambda: drafters.lookahead(ngram=1), "ngram is 1: expected at least 2"),
        (lambda: drafters.lookahead(9, 4, 5, pool=8), "pool is 8: expected at least 9"),
        (lambda: drafters.jacobi(0), "longest is 0"),
        (lambda: drafters.jacobi(2.5), "longest is 2.5: expected an integer"),
        (lambda: drafters.jacobi(True), "longest is True: expected an integer"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_models_and_rules_of_chains_are_refused():
    chains = BLEND._replace(lm=BLEND.lm._replace(select=None))
    for make in (drafters.tree, drafters.sequences, drafters.dynamic_tree):
        with pytest.raises(ValueError, match=r"takes chains only .* use drafters\.model"):
            make(chains)
    options = dict(drafter=MADE["recycling"], max_new_tokens=4)
    with pytest.raises(
        ValueError, match=r"the rule block.* takes chains only .*: use rules\.rejection"
    ):
        jaxspec.generate(
            TARGET, PROMPTS, rule=rules.block(), temperature=1.0, key=jax.random.key(0), **options
        )
    with pytest.raises(ValueError, match=r"policies\.adaptive\(\) or policies\.constant"):
        jaxspec.generate(TARGET, PROMPTS, policy=policies.entropy(), **options)
    with pytest.raises(ValueError, match="drafts trees: fallback takes drafters of chains"):
        drafters.fallback(MADE["recycling"], BLEND)
