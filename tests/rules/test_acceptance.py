"""Acceptance on trees, computed and not sampled, from the shipped rules and drafters.

The drafter drafts all that it can, a row for each draft. Then the coins are integrated: whether a
node is accepted when it is judged depends on its coin alone, which has a threshold that is found by
bisection (with coins with which its ancestors pass, and nothing else does). What a rule accepts
follows from the thresholds of its nodes and from the order in which it judges them.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from scipy.special import log_softmax

from benchmarks.best_acceptance import rule_acceptance
from jaxspec import drafters, rules
from jaxspec.core import Distribution, Draft, Draw, Prompt, Rule, Verdict, noise, tree
from jaxspec.decode.request import prepare
from jaxspec.testing import table_model_from
from jaxspec.testing.paths import normalised
from jaxspec.testing.tape import Script, Tape

VOCAB, PROBLEMS, NOISES = 5, 6, (0.5, 1.0, 2.0)
IDS = VOCAB + PROBLEMS * len(NOISES)  # of the tables: a problem is the token of its prompt
NODES, INNER = 6, 3  # of all trees, which are padded to these
HALVINGS = 8  # a threshold is off by 1/512 at most, either way, and the mean of many by much less
QUICK = {"xla_backend_optimization_level": 2}  # to run, not to compile
if jaxlib.__version__.startswith("0.10."):  # later ones have no such option
    QUICK["xla_cpu_use_fusion_emitters"] = True
TOP, FAILS = 1 - 2.0**-23, 1.0  # a coin that passes where all do, and one that there is not

# Tokens a round: six problems each with a noise of the drafter's logits of 0.5, 1 and 2.
TABLE = {
    ((1, 1), "chain", "rejection"): (2.673, 2.524, 1.938),
    ((1, 1), "chain", "block"): (2.700, 2.557, 1.956),
    ((2, 1), "without_replacement", "rejection"): (2.826, 2.660, 2.334),
    ((2, 1), "without_replacement", "traversal"): (2.853, 2.698, 2.360),
    ((2, 1), "mixed", "rejection"): (2.889, 2.752, 2.399),
    ((2, 1), "mixed", "traversal"): (2.917, 2.812, 2.436),
    ((2, 2), "replacement", "rejection"): (2.802, 2.660, 2.193),
    ((2, 2), "without_replacement", "rejection"): (2.897, 2.790, 2.475),
    ((2, 2), "without_replacement", "traversal"): (2.910, 2.808, 2.501),
    ((2, 2), "top", "rejection"): (2.666, 2.448, 1.868),
    ((2, 2), "mixed", "rejection"): (2.997, 2.918, 2.583),
    ((2, 2), "mixed", "traversal"): (2.999, 2.923, 2.609),
}


# --- thresholds


@functools.partial(jax.jit, static_argnames="rule", compiler_options=QUICK)
def thresholds(rule: Rule, draft: Draft, target: Distribution):
    """The probability of each node to pass when it is judged, [rows, nodes]."""
    rows, nodes = draft.tokens.shape
    number = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32)[None, :], (rows, nodes))
    parent = number if draft.parent is None else draft.parent
    above, same = (
        tree.ancestors(tree.fed(parent))[:, 1:, 1:],
        tree.same_prefix(parent, draft.tokens)[:, 1:],
    )
    keys, position = noise.row_keys(jax.random.key(0), rows), jnp.zeros(rows, jnp.int32)

    def accepted(node, value):
        """Return whether each row accepts the node, whatever else it accepts, with this coin."""
        coins = jnp.where(above[:, node], 0.0, FAILS)
        coins = jnp.where(number == node, value[:, None], coins)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(noise, "uniform", lambda *_: coins)
            verdict = rule.verify(keys, position, draft, target)
        on_path = jnp.take_along_axis(
            same, number if verdict.path is None else verdict.path, axis=1
        )
        on_path = jnp.logical_and(
            on_path == same[:, node, None], number < verdict.num_accepted[:, None]
        )
        return jnp.any(on_path, axis=1)

    def of_node(node):
        def halve(_, bounds):
            low, high = bounds
            passes = accepted(node, (low + high) / 2)
            return jnp.where(passes, (low + high) / 2, low), jnp.where(
                passes, high, (low + high) / 2
            )

        low, high = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.zeros(rows), jnp.ones(rows)))
        threshold = jnp.where(accepted(node, jnp.full(rows, TOP)), 1.0, (low + high) / 2)
        return jnp.where(accepted(node, jnp.zeros(rows)), threshold, 0.0)

    return jax.lax.map(of_node, jnp.arange(nodes)).T


# --- one level, against the formulas


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [rules.rejection(), rules.traversal(), rules.k_seq()], ids=lambda rule: rule.name
)
def test_of_one_level_a_rule_accepts_what_the_formula_says(rule):
    random, rows = np.random.default_rng(0), []
    for case, draw in itertools.product(
        range(4), ("replacement", "without_replacement", "top", "mixed")
    ):
        logits = random.normal(size=4) * (1 + case)
        p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, logits + random.normal(size=4)))
        best = int(q.argmax())
        rest = np.where(np.arange(4) == best, 0, q) / (1 - q[best]) if draw == "mixed" else q
        kinds = {"replacement": [Draw.WITH_REPLACEMENT] * 2, "top": [Draw.FIXED] * 2}
        kinds["mixed"] = [Draw.WITHOUT_REPLACEMENT, Draw.FIXED]
        kind = kinds.get(draw, [Draw.WITHOUT_REPLACEMENT] * 2)
        for first, second in itertools.product(range(4), repeat=2):
            left = (
                q
                if draw == "replacement"
                else np.where(np.arange(4) == first, 0, q) / (1 - q[first])
            )
            probability = {
                "top": float([first, second] == np.argsort(-q)[:2].tolist()),
                "mixed": rest[first],
            }
            probability = probability.get(draw, q[first] * left[second])
            if draw == "mixed" and second != best:
                probability = 0.0
            rows.append(((case, draw), [first, second], kind, p, q, rest, probability))
    group, tokens, kind, p, q, rest, probability = zip(*rows, strict=True)
    with np.errstate(divide="ignore"):
        log_p, log_q = (jnp.asarray(np.log(np.stack(x)), jnp.float32)[:, None] for x in (p, rest))
    tokens, kind = (jnp.asarray(np.stack(x), jnp.int32) for x in (tokens, kind))
    draft = Draft(tokens, jnp.full(len(rows), 2), jnp.zeros_like(tokens), log_q, kind)
    passing = np.asarray(
        thresholds(rule, draft, Distribution(jnp.broadcast_to(log_p, (len(rows), 3, 4))))
    )
    rates = {}
    for row, which in enumerate(group):
        first_passes, other = passing[row]
        rates[which] = rates.get(which, 0.0) + probability[row] * (
            first_passes + (1 - first_passes) * other
        )
    for row, (case, draw) in enumerate(group):
        assert (
            abs(rates[case, draw] - rule_acceptance(rule.name, p[row], q[row], 2, draw)) < 4e-3
        ), (case, draw)


# --- the toy table


class Problem(NamedTuple):
    """Log probabilities by the tokens of a round so far."""

    p: dict[tuple[int, ...], np.ndarray]
    q: dict[tuple[int, ...], np.ndarray]


def problems():
    """Six for each noise; one generator for all of them."""
    random, pairs = np.random.default_rng(1), []
    for scale in np.repeat(NOISES, PROBLEMS):
        pairs.append(Problem({}, {}))
        for depth in range(4):
            for context in itertools.product(range(VOCAB), repeat=depth):
                logits = random.normal(size=VOCAB) * 2
                pairs[-1].p[context] = log_softmax(logits)
                pairs[-1].q[context] = log_softmax(logits + scale * random.normal(size=VOCAB))
    return pairs


@functools.cache
def models():
    """Target and drafter of all problems: the text is a problem's token, twice and once more, and
    then its tokens.
    """
    tables = np.full((2, *[IDS] * 4), -np.inf, np.float32)
    for number, problem in enumerate(problems(), VOCAB):
        tables[:, 0, number, number, number] = 0.0  # after the prompt
        for table, log_probs in zip(tables, problem, strict=True):
            for context, after in log_probs.items():
                if len(context) <= 2:
                    table[(number,) * (3 - len(context)) + context][:VOCAB] = after
    return tuple(table_model_from(table) for table in tables)


class Drafts(NamedTuple):
    """Every draft of every problem, a row for each, with level 2 the same after each token of level
    1.

    That is enough, as levels 2 are independent of each other.

    Attributes:
        draft, log_p: rows, and the target's log probabilities.
        first: the probability of a level 1 [problem, level 1].
        second: of a level 2 after each of its tokens [problem, level 1, level 2, branch].
    """

    draft: Draft
    log_p: np.ndarray
    first: np.ndarray
    second: np.ndarray

    def possible(self):
        """Return which rows have any weight."""
        return np.any(self.first[:, :, None, None] * self.second > 0, axis=-1).reshape(-1)


def tokens_of(count):
    return list(itertools.product(range(VOCAB), repeat=count))


@functools.cache
def drafts(shape, draw):
    """Return the drafts of a shipped drafter for every draw, with their probabilities."""
    target, model = models()
    drafter = drafters.model(model) if draw == "chain" else drafters.tree(model, shape, draw=draw)
    upper, lower = ({"mixed": 1, "top": 0}.get(draw, count) for count in shape)  # draws of a node
    nodes = np.array(
        [x + y * shape[0] for x in tokens_of(upper) for y in tokens_of(lower)], np.int32
    )
    played = np.tile(nodes.reshape(VOCAB ** (upper + lower), -1), (PROBLEMS * len(NOISES), 1))
    rows, draws = played.shape
    caught = {}

    def verify(keys, position, draft, target):
        caught["draft"], caught["target"] = draft, target.log_probs
        zero = jnp.zeros_like(draft.length)
        return Verdict(
            zero, zero, zero, None if draft.parent is None else jnp.zeros_like(draft.tokens)
        )

    tokens = np.repeat(np.arange(VOCAB, IDS, dtype=np.int32), rows // (PROBLEMS * len(NOISES)))
    prompt = Prompt(jnp.asarray(np.stack([tokens, tokens], axis=1)), jnp.full(rows, 2))
    options = dict(gamma=2, temperature=1.0, key=jax.random.key(0), max_new_tokens=4)
    prepared = prepare(
        target,
        prompt,
        drafter=drafter,
        rule=Rule(verify, "caught", exact=True, trees=True),
        **options,
    )

    @jax.jit
    def propose(weights, prompt, request, script):
        state, tape = prepared.decoder.init(weights, prompt, request, 16), Tape(script, IDS, [])
        with tape.playing():
            prepared.decoder.step(weights, state)
        return caught["draft"], caught["target"], tape.record()

    none = jnp.zeros((rows, max(draws, 1)), jnp.int32)
    keys, script = (
        jnp.zeros((*none.shape, 2), jnp.uint32),
        jnp.asarray(played) if draws else none - 1,
    )
    script = Script(keys, none - 1, none, none, none[:, 0], none[:, 0] > 0, script)
    draft, log_p, record = propose(prepared.weights, prepared.prompt, prepared.request, script)
    assert (np.asarray(record.count) == draws).all()
    share = np.take_along_axis(
        normalised(np.asarray(record.log_probs)), np.asarray(record.value)[..., None], axis=2
    )
    share = share[:, :draws, 0].reshape(PROBLEMS * len(NOISES), VOCAB**upper, VOCAB**lower, draws)
    second = share[..., upper:].reshape(*share.shape[:3], shape[0], lower).prod(axis=-1)
    return Drafts(draft, log_p[..., :VOCAB], share[:, :, 0, :upper].prod(axis=-1), second)


def as_tree(draft, log_p):
    """With as many nodes as the largest, so that there is one program."""
    rows, nodes = draft.tokens.shape
    log_q, draws = draft.log_probs, draft.draws
    if log_q is None:
        log_q, draws = np.zeros((rows, 1, VOCAB)), np.full((rows, nodes), Draw.FIXED)

    def wide(x, size, fill=0):
        return np.pad(
            x, ((0, 0), (0, size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)), constant_values=fill
        )

    tree = Draft(wide(draft.tokens, NODES), draft.length, wide(draft.parent, NODES, -1))
    log_q = wide(np.asarray(log_q, np.float32)[..., :VOCAB], INNER)
    return tree._replace(log_probs=log_q, draws=wide(draws, NODES).astype(np.int32)), wide(
        log_p, NODES + 1
    )


def tokens_a_round(shape, name, passing, drafts):
    """By noise: one token, and those of the first branch in which a node is accepted.

    A walk from the root accepts a token of level 1 before those that follow it, a traversal after
    them.
    """
    width, below = shape
    passing = passing.reshape(*drafts.second.shape[:3], -1)
    expected = 0.0
    for branch in reversed(range(width)):
        passes = passing[..., branch]
        # of level 2
        none = np.prod(1 - passing[..., width + branch * below :][..., :below], axis=-1)
        accepted, failed = passes * (2 - none), 1 - passes
        if name != "rejection":
            accepted, failed = 2 * (1 - none) + passes * none, (1 - passes) * none
        accepted, failed = (
            (drafts.second[..., branch] * x).sum(axis=2) for x in (accepted, failed)
        )
        expected = accepted + failed * expected
    return (1 + (drafts.first * expected).sum(axis=1)).reshape(len(NOISES), PROBLEMS).mean(axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
def test_tokens_a_round_of_the_toy_table(name):
    """The trees that a rule judges are rows of one program, chains of another."""
    rule, means = getattr(rules, name)(), {}
    for chain in (False, True):
        which = [key for key in TABLE if key[2] == name and (key[1] == "chain") == chain]
        if not which:
            continue
        drafted = [drafts(*key[:2]) for key in which]
        rows = (
            [(x.draft._replace(log_probs=x.draft.log_probs[..., :VOCAB]), x.log_p) for x in drafted]
            if chain
            else [as_tree(x.draft, x.log_p) for x in drafted]
        )
        draft, log_p = jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)
        possible = np.concatenate([x.possible() for x in drafted])
        used = jax.tree.map(lambda x, possible=possible: jnp.asarray(x[possible]), (draft, log_p))
        passing = np.zeros(draft.tokens.shape)
        passing[possible] = thresholds(rule, used[0], Distribution(used[1]))
        parts = np.split(passing, np.cumsum([len(x) for _, x in rows])[:-1])
        for key, part, x in zip(which, parts, drafted, strict=True):
            means[key] = tokens_a_round(key[0], name, part, x)
    for key, tokens in means.items():
        np.testing.assert_allclose(tokens, TABLE[key], atol=0.0025, err_msg=str(key))
    assert means
