"""Decoding with token trees: the text is plain decoding's, and everything around a round knows
paths.

The drafter here is a static tree with branches of different lengths, of which rows lose different
nodes; the shipped one (`drafters.tree`) goes through the drafters' conformance table.
"""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, policies, rules, trace
from jaxspec.core import (
    BoundDrafter,
    Distribution,
    Draft,
    Drafter,
    Reading,
    Rule,
    Steps,
    TreeSize,
    Verdict,
    Weights,
    token_rows,
    tree,
)
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.drafters.common import no_commit, no_state
from jaxspec.nets import decoder, t5
from jaxspec.testing import certify, table_model
from tests.marks import marked
from tests.small import between, tiny_gpt, tiny_llama, tiny_t5

VOCAB, NEW = 7, 20
CHOICES = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0, 0))
NODES, DEPTH = len(CHOICES), 4
PROMPTS = [[3, 1, 4], [1], [5, 2, 6, 5, 3], [0, 0]]
TARGET = table_model(jax.random.key(1), VOCAB, sharpness=2.0)
OTHER = table_model(jax.random.key(2), VOCAB, sharpness=2.0)
BLEND = between(TARGET, OTHER, 0.6)  # agrees with the target often, not always


def prompt(rows=PROMPTS, width=8):
    return token_rows.pad(rows, width)


def tokens_of(out):
    return [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]


class Letters:
    """A tokenizer, as far as decoding needs one: a token is a letter."""

    eos_token_id, added_tokens_decoder = None, {}

    def __len__(self):
        return VOCAB

    def get_vocab(self):
        return {"abcdefg"[token]: token for token in range(VOCAB)}

    def convert_ids_to_tokens(self, token):
        return "abcdefg"[token]

    def decode(self, tokens, skip_special_tokens):
        return "".join("abcdefg"[token] for token in tokens)


def test_a_tree_is_drafted_whatever_gamma():
    """A chain of gamma 0 is plain decoding; of a drafter of trees gamma is not read."""
    tree_drafter = drafters.tree(BLEND, (2, 1))
    batching = [
        prepare(TARGET, [[3, 1]], drafter=drafter, gamma=0) for drafter in (tree_drafter, BLEND)
    ]
    assert [(prepared.decoder.nodes, prepared.drafter is None) for prepared in batching] == [
        (4, False),
        (0, True),
    ]
    assert batching[0].replace(gamma=5).decoder._replace(init=None, step=None) == (
        batching[0].decoder._replace(init=None, step=None)
    )


@pytest.mark.parametrize(
    ("path", "drafter", "message"),
    [
        (
            lambda draft: None,
            drafters.tree(BLEND, (2, 1)),
            "the rule mine returned no path for a tree: expected",
        ),
        (
            lambda draft: draft.tokens[:, :1],
            drafters.tree(BLEND, (2, 1)),
            r"the rule mine returned path of shape \(1, 1\) and dtype int32: expected integers of shape \(1, 4\)",
        ),
        (
            lambda draft: draft.tokens,
            BLEND,
            "the rule mine returned a path for a chain: expected Verdict.path to be None",
        ),
    ],
)
def test_a_rule_whose_path_is_not_that_of_the_draft_is_named(path, drafter, message):
    def verify(keys, position, draft, target):
        return Verdict(jnp.zeros_like(draft.length), target.tokens[:, 0], draft.length, path(draft))

    rule = Rule(verify, "mine", exact=False, trees=True)
    with pytest.raises(ValueError, match=message):
        jaxspec.generate(TARGET, [[3, 1]], drafter=drafter, gamma=2, rule=rule, max_new_tokens=4)


class Grown(NamedTuple):
    """A cache, and how long its rows were when their trees were drafted."""

    cache: object
    start: jax.Array


def top_choices(model, ragged=True):
    """The children of a node are the model's most probable tokens after it: which of them,
    `CHOICES` says.

    All nodes are fed, level by level. Rows of odd length lose the branch of their second child's
    child; one row in three has its last node in the padding.
    """
    return BoundDrafter(_top_choices(model.lm, ragged), model.params, (model,))


@functools.cache
def _top_choices(lm, ragged):
    parents, ranks = (np.array(x, np.int32) for x in tree.of_choices(CHOICES))
    depth = np.array(tree.depth(tree.fed(jnp.asarray(parents)[None]))[0])  # of fed tokens
    fed_parents = np.asarray(tree.fed(jnp.asarray(parents)[None]))
    seen = np.asarray(tree.ancestors(jnp.asarray(fed_parents)))[:, :, 1:]

    def init(start):
        _, cache = lm.prefill(start.weights.draft, start.prompt, start.room)
        return Grown(cache, start.prompt.length)

    def propose(weights, caches, context):
        row = context.row
        batch, cache = len(row.length), lm.rewind(caches.draft.cache, row.length - 1)
        fed = (
            jnp.zeros((batch, NODES + 1), jnp.int32)
            .at[:, :1]
            .set(token_rows.window(row.tokens, row.length - 1, 1))
        )
        for level in range(DEPTH + 1):
            first, last = np.flatnonzero(depth == level)[[0, -1]]
            tree_parents = jnp.broadcast_to(
                jnp.asarray(fed_parents[:, : last + 1]), (batch, last + 1)
            )
            forward, cache = lm.extend(weights.draft, cache, fed[:, first : last + 1], tree_parents)
            before = jnp.asarray(seen[:, first : last + 1])
            distribution = context.to_distribution(forward.logits, fed[:, 1:], before)
            scores = (
                distribution.logits if distribution.log_probs is None else distribution.log_probs
            )
            best = jnp.argsort(-scores, axis=-1, stable=True).astype(jnp.int32)
            for node in np.flatnonzero(depth == level + 1):
                rank = ranks[node - 1]
                fed = fed.at[:, node].set(best[:, parents[node - 1] - first, rank])
        parent = jnp.broadcast_to(jnp.asarray(parents), (batch, NODES))
        length = jnp.full_like(row.length, NODES)
        if ragged:
            cut = jnp.logical_and(
                (row.length % 2 == 1)[:, None],
                (jnp.arange(NODES) == CHOICES.index((1, 0, 0)))[None],
            )
            parent, length = (
                jnp.where(cut, -1, parent),
                jnp.where(row.length % 3 == 0, length - 1, length),
            )
        return Draft(fed[:, 1:], length, parent), caches._replace(draft=Grown(cache, row.length))

    def commit(end):
        cache, start = end.caches.draft
        return end.caches._replace(
            draft=Grown(lm.select(cache, start, end.verdict.path[:, :DEPTH]), start)
        )

    return Drafter(init, propose, commit, lm, tree=TreeSize(NODES, DEPTH))


# --- greedy text


def near(model, scale=0.3):
    """The same with noise in its parameters: it agrees with it often."""
    leaves, structure = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    noisy = [
        x + scale * jax.random.normal(k, x.shape) * x.std()
        for k, x in zip(keys, leaves, strict=True)
    ]
    return model._replace(params=jax.tree.unflatten(structure, noisy))


def network(name):
    """Tiny, with caches and positions that count; the window ends inside of trees, the
    encoder-decoder's rows begin with one token.
    """
    if name == "gpt":
        net, config = decoder, tiny_gpt(VOCAB)
    elif name == "t5":
        net, config = t5, tiny_t5(VOCAB, buckets=4, max_distance=6)
    else:
        net = decoder
        config = tiny_llama(VOCAB, layers=2, window=3, local=(True, False))
    params = net.init(config, jax.random.key(4))
    return jaxspec.Model(
        net.language_model(config), jax.tree.map(lambda x: 2 * x, params), None, config, name
    )


def models():
    encoder = table_model(jax.random.key(1), VOCAB, encoder=True, sharpness=2.0)
    yield pytest.param(lambda: (TARGET, BLEND), id="table")
    yield pytest.param(lambda: (TARGET, OTHER), id="adversarial")
    yield pytest.param(lambda: (TARGET, TARGET), id="itself")
    yield pytest.param(lambda: (encoder, near(encoder)), id="encoder")
    for name, scale in (("gpt", 0.3), ("t5", 0.3), ("window", 0.5)):
        marks = [pytest.mark.exhaustive] * (name == "gpt")  # a window is a GPT's cache and more
        pair = functools.partial(
            lambda name, scale: (network(name), near(network(name), scale)), name, scale
        )
        yield pytest.param(pair, id=name, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(models()))
def test_greedy_text_is_plain_decodings(pair):
    target, draft = pair()
    plain = jaxspec.generate(target, prompt(), max_new_tokens=NEW)
    out = jaxspec.generate(target, prompt(), drafter=top_choices(draft), max_new_tokens=NEW)
    assert tokens_of(out) == tokens_of(plain)
    assert out.lengths.tolist() == [NEW] * 4
    check_trace(out)
    if draft is not OTHER:
        assert out.stats.accepted.sum() > 10
    if draft is TARGET:  # its best child is always right
        assert out.stats.rounds.max() <= 7 and (out.trace.num_accepted[:, 0] == 3).all()
    elif draft is not OTHER:
        first_nodes = out.trace.path[..., 0][out.trace.num_accepted > 0]
        assert set(first_nodes.tolist()) == {0, 1}, "the test saw one kind of path"


def check_trace(out, gamma=DEPTH):
    """Every round of every row: the path's tokens, then the correction or the bonus; and statistics
    add up.
    """
    shown, stats = out.trace, out.stats
    assert (
        stats.emitted.tolist() == out.lengths.tolist() == (1 + shown.num_committed.sum(1)).tolist()
    )
    assert (shown.num_committed > 0).sum(1).tolist() == stats.rounds.tolist()
    assert shown.draft_length.sum(1).tolist() == stats.drafted.tolist()
    assert (
        np.minimum(shown.num_accepted, shown.num_committed).sum(1).tolist()
        == stats.accepted.tolist()
    )
    assert (shown.num_accepted <= shown.num_tested).all() and (
        shown.num_tested <= shown.draft_length
    ).all()
    for row in range(len(out.lengths)):
        tokens = out.tokens[row, : out.lengths[row]].tolist()
        rounds = trace.of_row(tokens, shown, row)
        assert [token for step in rounds for token in step.new] == tokens
        for step in rounds[1:]:
            last = 0
            for node in step.path:
                assert step.parent[node] == last
                last = node + 1
            accepted, rejected, target_token = trace.judge(step)
            n = min(step.num_accepted, len(step.new))
            assert (
                accepted == [step.draft[node] for node in step.path][:n]
                and accepted + target_token == step.new
            )
            # greedy, or drawn from what the children left
            assert not set(target_token) & set(rejected)
    html = trace.html(trace.of_row(tokens, shown, row))
    assert "line-through" in html


@pytest.mark.slow
def test_a_model_that_drafts_trees_for_itself_is_always_accepted():
    """So its cache has followed each accepted path: siblings that were not accepted would be read
    in the next round.
    """
    model = network("t5")
    options = dict(
        drafter=drafters.tree(model, (2, 2, 1)), temperature=[0.0, 1.0, 0.0, 1.0], max_new_tokens=13
    )
    out = jaxspec.generate(model, prompt(), key=jax.random.key(7), **options)
    assert (
        out.trace.num_accepted[:, :3].tolist() == [[3, 3, 3]] * 4
        and out.stats.rounds.tolist() == [3] * 4
    )


@pytest.mark.parametrize("length", marked(range(1, DEPTH + 3), slow={1, 2}))
def test_every_limit_up_to_the_depth_and_two(length):
    plain = jaxspec.generate(TARGET, prompt(), max_new_tokens=length)
    out = jaxspec.generate(TARGET, prompt(), drafter=top_choices(TARGET), max_new_tokens=length)
    assert tokens_of(out) == tokens_of(plain)
    # No node is counted whose token could not be emitted: the last token comes with the pass.
    depth = np.array([len(choice) for choice in sorted(CHOICES, key=lambda c: (len(c), c))])
    assert (out.trace.draft_length[:, 0] <= (depth <= length - 2).sum()).all()
    assert out.stats.acceptance_rate.max() <= 1


def test_limits_per_row():
    limits = [1, 20, 7, 2]
    plain = jaxspec.generate(TARGET, prompt(), max_new_tokens=20)
    out = jaxspec.generate(TARGET, prompt(), drafter=top_choices(BLEND), max_new_tokens=limits)
    assert tokens_of(out) == [row[:n] for row, n in zip(tokens_of(plain), limits, strict=True)]
    check_trace(out)
    for row in json.loads(json.dumps(out.to_dict()))["rows"]:
        for step in row["trace"][1:]:
            accepted = [step["draft"][node] for node in step["path"]]
            assert accepted[: len(step["new"])] == step["new"][: len(accepted)]


@pytest.mark.slow
def test_text_that_is_streamed_and_stopped_round_by_round():
    """Rounds show the nodes of a tree that were verified, without padding and without those that
    rows have lost.
    """
    drafter = top_choices(BLEND)

    def propose(weights, caches, context):
        draft, caches = drafter.functions.propose(weights, caches, context)
        return draft._replace(length=draft.length - 1), caches

    padded = drafter._replace(functions=drafter.functions._replace(propose=propose))
    spelt, row = TARGET._replace(tokenizer=Letters()), prompt([[3, 1, 4]])
    options = dict(drafter=padded, max_new_tokens=NEW)
    plain = jaxspec.generate(spelt, row, max_new_tokens=NEW)
    pieces = list(jaxspec.stream(spelt, row, **options))
    assert [token for piece in pieces for token in piece.tokens] == tokens_of(plain)[0]
    assert "".join(piece.text for piece in pieces) == plain.texts[0]
    stats = pieces[-1].stats
    assert (
        sum(len(piece.draft) for piece in pieces)
        == int(stats.drafted[0])
        < NODES * int(stats.rounds[0])
    )
    stop = plain.texts[0][7:10]
    out = jaxspec.generate(spelt, row, stop=[stop], **options)
    assert out.texts == [plain.texts[0].partition(stop)[0]]
    check_trace(out)


@pytest.mark.slow
def test_every_token_in_turn_as_the_end_token():
    """An end inside an accepted path: cut after the first, drop the rest and the bonus, freeze the
    row.
    """
    plain, inside = tokens_of(jaxspec.generate(TARGET, prompt(), max_new_tokens=NEW)), 0
    for ends in [[t] for t in range(VOCAB)] + [[2, 5], [0, 1, 6]]:
        out = jaxspec.generate(
            TARGET, prompt(), drafter=top_choices(TARGET), max_new_tokens=NEW, eos_ids=ends
        )
        expected = []
        for row in plain:
            at = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            expected.append(row[:at])
        assert tokens_of(out) == expected, ends
        check_trace(out)
        inside += int((out.trace.num_accepted > out.trace.num_committed).sum())
    assert inside > 0


@pytest.mark.slow
def test_a_node_is_penalised_for_its_own_path():
    """The target, drafting for itself, counts what leads to each node: the best children are always
    accepted.
    """
    options = dict(
        repetition_penalty=1.4,
        presence_penalty=0.6,
        frequency_penalty=[0.5, 0.2, 0.0, -0.3],
        banned=[5],
    )
    plain = jaxspec.generate(TARGET, prompt(), max_new_tokens=NEW, **options)
    for draft in (BLEND, TARGET):
        out = jaxspec.generate(
            TARGET, prompt(), drafter=top_choices(draft), max_new_tokens=NEW, **options
        )
        assert tokens_of(out) == tokens_of(plain)
    # but for the last round
    full = out.trace.num_committed[:, :-1][out.trace.num_committed[:, 1:] > 0]
    assert (full == 4).all()


def test_finished_rows_are_frozen():
    prepared = prepare(TARGET, prompt(), drafter=top_choices(BLEND), max_new_tokens=[2, 17, 6, 3])
    frozen = {}
    for state, info in loop.iterate_rounds(prepared):
        now = jax.device_get((state.tokens, state.length, state.stats, state.done, info))
        tokens, length, stats, done, info = now
        for row in np.flatnonzero(done):
            held = [tokens[row, : length[row]].tolist(), *(int(count[row]) for count in stats)]
            if row in frozen:
                assert held == frozen[row]
                assert (
                    info.draft_length[row] == info.num_accepted[row] == info.num_committed[row] == 0
                )
            frozen[row] = held
    assert len(frozen) == 4


@pytest.mark.slow
def test_nodes_that_are_no_tokens_of_the_target_are_cut_off():
    right = top_choices(TARGET)

    def propose(weights, caches, context):
        draft, caches = right.functions.propose(weights, caches, context)
        return draft._replace(tokens=draft.tokens.at[:, 0].set(10**6)), caches

    drafter = right._replace(functions=right.functions._replace(propose=propose))
    plain = jaxspec.generate(TARGET, prompt(), max_new_tokens=NEW)
    out = jaxspec.generate(TARGET, prompt(), drafter=drafter, max_new_tokens=NEW)
    assert tokens_of(out) == tokens_of(plain)
    assert out.stats.accepted.sum() < 5 and (out.trace.draft_length <= 4).all()


def proposes(tokens, parent, dtype=jnp.int32):
    """A drafter that always proposes the same tree."""

    def propose(weights, caches, context):
        size = (len(context.row.length), len(tokens))
        draft = Draft(
            jnp.broadcast_to(jnp.array(tokens), size),
            jnp.full_like(context.row.length, len(tokens)),
        )
        return draft._replace(parent=jnp.broadcast_to(jnp.array(parent, dtype), size)), caches

    return Drafter(no_state, propose, no_commit, tree=TreeSize(len(tokens), len(tokens)))


def test_a_node_before_its_parent_is_cut_off():
    plain = jaxspec.generate(TARGET, prompt([[3, 1, 4]]), max_new_tokens=4)
    _, first, second, _ = plain.tokens[0].tolist()
    for tokens, parent, accepted in [((first, second), (0, 1), 2), ((second, first), (2, 0), 1)]:
        out = jaxspec.generate(
            TARGET, prompt([[3, 1, 4]]), drafter=proposes(tokens, parent), max_new_tokens=4
        )
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        assert out.stats.accepted.tolist() == [accepted]


def test_parents_that_are_no_integers_are_refused():
    with pytest.raises(TypeError, match="proposed parent of dtype float32: expected integers"):
        jaxspec.generate(
            TARGET, prompt(), drafter=proposes((1, 2), (0, 1), jnp.float32), max_new_tokens=4
        )


@pytest.mark.slow
def test_coupled_text_is_plain_samplings_whatever_the_tree():
    keys = jax.random.split(jax.random.key(5), 4)
    options = dict(temperature=1.0, max_new_tokens=NEW, key=keys)
    plain = tokens_of(jaxspec.generate(TARGET, prompt(), **options))
    for drafter in (top_choices(BLEND), top_choices(OTHER), drafters.tree(BLEND, (2, 2))):
        out = jaxspec.generate(TARGET, prompt(), drafter=drafter, rule=rules.coupled(), **options)
        assert tokens_of(out) == plain
    order = np.array([2, 0, 3, 1])
    moved = prompt([PROMPTS[i] for i in order], width=12)
    out = jaxspec.generate(
        TARGET,
        moved,
        drafter=top_choices(BLEND),
        rule=rules.coupled(),
        **options | {"key": keys[order]},
    )
    assert tokens_of(out) == [plain[i] for i in order]


@pytest.mark.slow
def test_rows_that_sample_do_not_depend_on_mates():
    keys = jax.random.split(jax.random.key(6), 4)
    options = dict(drafter=top_choices(BLEND), temperature=[1.0, 0.0, 0.7, 1.0], max_new_tokens=NEW)
    together = jaxspec.generate(TARGET, prompt(), key=keys, **options)
    check_trace(together)
    order = np.array([3, 1, 1, 0])
    among = options | dict(temperature=np.array(options["temperature"])[order])
    out = jaxspec.generate(TARGET, prompt([PROMPTS[i] for i in order]), key=keys[order], **among)
    assert tokens_of(out) == [tokens_of(together)[i] for i in order]


@pytest.mark.slow
def test_a_static_tree_of_point_masses_is_exact():
    target, draft = (
        table_model(jax.random.key(1), 4, order=1),
        table_model(jax.random.key(2), 4, order=1),
    )
    for ends in ((), (2,)):
        assert certify(target, drafter=top_choices(draft), steps=3, eos_ids=ends) < 1e-5


# --- programs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (drafters.tree(BLEND, (2, 1)), rules.traversal()),
        (drafters.dynamic_tree(BLEND, nodes=4, depth=2, width=2), rules.rejection()),
        (drafters.token_recycling([(0,), (1,)]), rules.coupled()),
    ],
    ids=["tree", "dynamic_tree", "token_recycling"],
)
def test_another_temperature_prompt_or_seed_compiles_nothing(drafter, rule):
    def run(rows, seed, temperature):
        options = dict(
            rule=rule, temperature=temperature, key=jax.random.key(seed), max_new_tokens=9
        )
        return jaxspec.generate(TARGET, prompt(rows), drafter=drafter, **options)

    run([[1, 2], [3]], 0, 1.0)
    programs = loop.generation.num_programs()
    run([[4, 4, 4, 1], [2, 2]], 5, 0.3)
    run([[2], [1, 0, 1]], 6, [0.5, 2.0])
    assert loop.generation.num_programs() == programs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tree", "dynamic_tree"])
def test_a_round_holds_few_arrays_of_all_nodes_and_tokens(kind):
    """The target's logits, their log probabilities, the drafter's; no distribution for each sibling
    or each rule.
    """
    vocab, nodes = 4096, 12
    target, draft = (table_model(jax.random.key(seed), vocab, order=1) for seed in (1, 2))
    programs = {
        "tree": drafters.tree(draft, (4, 1, 1), draw="mixed"),
        "dynamic_tree": drafters.dynamic_tree(draft, nodes=nodes, depth=3, width=4),
    }
    prepared = prepare(
        target,
        prompt(),
        drafter=programs[kind],
        temperature=1.0,
        key=jax.random.key(0),
        max_new_tokens=4,
    )
    begin = functools.partial(loop.start, prepared.decoder, max_new_tokens=4)
    state = jax.eval_shape(begin, prepared.weights, prepared.prompt, prepared.request)
    program = loop.advance.lower(prepared.decoder, prepared.weights, state).compile()
    array_bytes = len(prepared.prompt.length) * (nodes + 1) * vocab * 4
    # three, and what XLA holds of the draws
    assert program.memory_analysis().temp_size_in_bytes < 4 * array_bytes


# --- what takes no trees


@pytest.mark.parametrize(
    "rule", [rules.block(), rules.classical_rejection()], ids=lambda rule: rule.name
)
def test_a_rule_of_chains_is_refused(rule):
    with pytest.raises(
        ValueError,
        match=r"takes chains only \(Rule.trees is False\), and the drafter drafts token trees: use .*traversal\(\)",
    ):
        jaxspec.generate(TARGET, prompt(), drafter=top_choices(BLEND), rule=rule, max_new_tokens=4)


def test_a_target_of_chains_is_refused():
    chains = TARGET._replace(lm=TARGET.lm._replace(select=None))
    with pytest.raises(
        ValueError, match=r"the target takes chains only .* drafts token trees: use another model"
    ):
        jaxspec.generate(chains, prompt(), drafter=top_choices(BLEND), max_new_tokens=4)
    with pytest.raises(ValueError, match="takes chains only"):
        drafters.tree(chains, (2, 1))


@pytest.mark.parametrize(
    "policy", [policies.confidence(), policies.entropy()], ids=["confidence", "entropy"]
)
def test_a_policy_that_looks_at_each_token_is_refused(policy):
    with pytest.raises(
        ValueError, match="stops a draft token by token, and the drafter drafts trees"
    ):
        jaxspec.generate(
            TARGET, prompt(), drafter=top_choices(BLEND), policy=policy, max_new_tokens=4
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [policies.constant([0, 1, 2, 9]), policies.adaptive(0.1, 0.1, pause=1)],
    ids=["constant", "adaptive"],
)
def test_a_policy_cuts_a_tree_by_its_depth(policy):
    """A row that may draft n tokens has nodes of depth n at most, and the pass is no wider than it
    need be.
    """
    widths = []

    def extend(params, cache, tokens, parent=None, real=None):
        jax.debug.callback(lambda: widths.append(tokens.shape[1]))
        return TARGET.lm.extend(params, cache, tokens, parent, real)

    watched = TARGET._replace(lm=TARGET.lm._replace(extend=extend))
    plain = jaxspec.generate(TARGET, prompt(), max_new_tokens=NEW)
    out = jaxspec.generate(
        watched, prompt(), drafter=top_choices(BLEND), policy=policy, max_new_tokens=NEW
    )
    jax.effects_barrier()
    assert tokens_of(out) == tokens_of(plain)
    check_trace(out)
    if isinstance(policy.params, np.ndarray):
        assert (out.trace.num_accepted.max(axis=1) <= [0, 1, 2, 4]).all()
        assert out.trace.draft_length[0].max() == 0 and out.trace.draft_length[1].max() == 2
        assert max(widths) == NODES + 1
    assert set(widths) <= {1, 2, 4, 8, NODES + 1}


# --- a drafter that uses the target


def early_exit(model, share=0.6):
    """Drafts with the target's own weights and cache, in place of half a network: its logits, made
    less sure.
    """

    def init(start, nodes):
        assert start.prefilled.features.shape[:2] == (
            start.prompt.tokens.shape if model.lm.limits.start_token is None else (4, 1)
        )
        return ()

    def begin(weights, caches, context, fed):
        def nodes(tokens, parent, level, cache):
            forward, cache = model.lm.extend(weights.target, cache, tokens, parent)
            return share * forward.logits + (1 - share) * jnp.roll(
                forward.logits, 1, axis=-1
            ), cache

        last = token_rows.window(context.row.tokens, context.row.length - 1, 1)
        end = lambda cache, draft, slots: caches._replace(target=cache)  # noqa: E731
        return Reading(caches.target, lambda cache: nodes(last, None, 0, cache), nodes, end)

    return drafters.chain(Steps(init, begin, lambda end: end.caches, model.lm.vocab_size))


@pytest.mark.parametrize(
    "name", marked(["table", "encoder", "gpt", "t5"], slow={"table", "gpt", "t5"})
)
def test_a_drafter_may_use_the_targets_cache_and_weights(name):
    """The decoder rewinds it before it verifies: greedy text is plain decoding's, also after rounds
    without a draft.
    """
    tables = {
        "table": TARGET,
        "encoder": table_model(jax.random.key(1), VOCAB, encoder=True, sharpness=2.0),
    }
    model = tables[name] if name in tables else network(name)
    plain = jaxspec.generate(model, prompt(), max_new_tokens=NEW)
    options = dict(drafter=early_exit(model), gamma=3, max_new_tokens=NEW)
    for policy in (None, policies.adaptive(0.5, 0.3, pause=1)) if name == "table" else (None,):
        out = jaxspec.generate(model, prompt(), policy=policy, **options)
        assert tokens_of(out) == tokens_of(plain)
        assert out.stats.accepted.sum() > 0
    if name == "table":
        out = jaxspec.generate(
            model, prompt(), **options | dict(drafter=early_exit(model, share=1.0))
        )
        assert (
            tokens_of(out) == tokens_of(plain) and out.stats.acceptance_rate.tolist() == [1.0] * 4
        )


@pytest.mark.slow
def test_such_a_drafter_is_exact_when_it_samples():
    target = table_model(jax.random.key(1), 3)
    assert certify(target, drafter=early_exit(target), gamma=2, steps=3) < 1e-5


def test_a_drafter_is_given_the_features_of_the_prompt_and_of_every_node():
    """The row of the table that each position's logits were read from, all along the prompt and at
    each fed token.
    """
    seen = []

    def init(start):
        jax.debug.callback(
            lambda *x: seen.append(x), start.prompt.tokens, start.prefilled.features, ordered=True
        )
        return ()

    def propose(weights, caches, context):
        batch = len(context.row.length)
        tokens = jnp.broadcast_to(jnp.array([[1, 2, 3]], jnp.int32), (batch, 3))
        parent = jnp.broadcast_to(jnp.array([[0, 0, 1]], jnp.int32), (batch, 3))
        return Draft(tokens, jnp.full_like(context.row.length, 3), parent), caches

    def commit(end):
        jax.debug.callback(
            lambda *x: seen.append(x), end.row.tokens, end.forward.features, ordered=True
        )
        return end.caches

    drafter = Drafter(init, propose, commit, tree=TreeSize(3, 2))
    jaxspec.generate(
        TARGET, prompt([[3, 1, 4]]), drafter=drafter, max_new_tokens=4, rule=rules.exact_match()
    )
    jax.effects_barrier()
    (tokens, prefilled), *rounds = seen
    assert tokens[0, :3].tolist() == [3, 1, 4]
    assert prefilled[0, :3, 0].tolist() == [3, 3 * VOCAB + 1, VOCAB + 4]
    row, first = rounds[0]
    last = int(row[0, 3])
    assert first[0, :, 0].tolist() == [
        4 * VOCAB + last,
        last * VOCAB + 1,
        last * VOCAB + 2,
        VOCAB + 3,
    ]


def test_the_weights_of_a_drafter_without_parameters_are_none():
    prepared = prepare(TARGET, prompt(), drafter=early_exit(TARGET), gamma=2)
    assert prepared.weights == Weights(TARGET.params, None)
    assert isinstance(
        prepared.sampler(prepared.request.sampling_params, jnp.zeros((4, 1, VOCAB))), Distribution
    )
