"""Rows are reordered and replaced in mid-generation, for models × drafters × policies: the same
text.

Programs are shared: rows of one batch have drafters and policies of their own. A drafter that runs
them all takes each row's draft from the one that the first token of its prompt names; a policy that
runs them all takes each row's limit from the one that its values name. With a table model that is
every drafter with every policy; with each network all policies, and those drafters whose state
holds something of the network (the others hold tokens and tables alone). Other drafters are
permuted, each by itself, in drafters/test_conformance.py and draft_heads/test_drafters.py.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from benchmarks.oracle import oracle
from jaxspec import drafters, policies
from jaxspec.core import (
    BoundDrafter,
    BoundPolicy,
    Caches,
    Drafter,
    Policy,
    Reading,
    Steps,
    Weights,
    token_rows,
)
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.drafters.fallback import _choose
from jaxspec.drafters.lookups import datastore
from jaxspec.drafters.uniform import uniform
from jaxspec.nets import decoder, t5
from jaxspec.testing import table_model
from tests.marks import marked
from tests.small import tiny_gpt, tiny_llama, tiny_t5

VOCAB = 11
LIMITS, TEMPERATURES = (9, 16, 5, 13), (1.0, 0.0, 0.7, 1.0)
WRITTEN = [[1, 2, 3, 1, 2, 3, 4, 5], [4, 5, 0, 4, 5, 6], [0, 0, 1, 2, 6, 6, 3]]


NETWORKS = ("gpt", "t5", "window")


@functools.cache
def model(name, seed=1):
    """Tiny: what matters is what their states hold."""
    if name == "table":
        return table_model(jax.random.key(seed), VOCAB, sharpness=2.0)
    if name == "gpt":
        net, config = decoder, tiny_gpt(VOCAB)
    elif name == "t5":
        net, config = t5, tiny_t5(VOCAB, buckets=4, max_distance=6)
    else:  # with a sliding window
        net = decoder
        config = tiny_llama(VOCAB, window=3, local=(True,))
    params = jax.tree.map(lambda x: 3 * x, net.init(config, jax.random.key(seed)))
    return jaxspec.Model(net.language_model(config), params, None, config, name)


@functools.cache
def early_exit(target):
    """Uses the target's own cache and weights."""

    def begin(weights, caches, context, fed):
        def nodes(tokens, parent, level, cache):
            forward, cache = model(target).lm.extend(weights.target, cache, tokens, parent)
            return 0.5 * forward.logits, cache

        last = token_rows.window(context.row.tokens, context.row.length - 1, 1)
        end = lambda cache, draft, slots: caches._replace(target=cache)  # noqa: E731
        return Reading(caches.target, lambda cache: nodes(last, None, 0, cache), nodes, end)

    return drafters.chain(Steps(lambda *_: (), begin, lambda end: end.caches, VOCAB))


def tables(target):
    return drafters.ngram(WRITTEN, model(target), order=3)


CHAINS = {
    "a model": lambda target: drafters.model(model(target, 2)),
    "coupled": lambda target: drafters.model(model(target, 2), coupled=True),
    "greedy": lambda target: drafters.greedy(model(target, 2)),
    "n-grams": lambda target: drafters.model(tables(target)),
    "without_backoff": lambda target: drafters.without_backoff(tables(target)),
    "uniform": lambda target: uniform(),
    "prompt_lookup": lambda target: drafters.prompt_lookup(),
    "online_ngram": lambda target: drafters.online_ngram(3, top=2, slots=16),
    "retrieval": lambda target: drafters.retrieval(
        datastore.build(WRITTEN, vocab_size=VOCAB), shortest=1
    ),
    "fallback": lambda target: drafters.fallback(
        drafters.prompt_lookup(2, 2), drafters.without_backoff(tables(target)), model(target, 2)
    ),
    "early exit": lambda target: BoundDrafter(early_exit(target)),
}
TREES = {
    "a tree": lambda target: drafters.tree(model(target, 2), (2, 1)),
    "a tree of n-grams": lambda target: drafters.tree(tables(target), (2, 1), draw="mixed"),
}
LIMITING = {
    "constant": policies.constant(2),
    "heuristic": policies.heuristic(start=2, grow=1),
    "adaptive": policies.adaptive(0.1, 0.1, pause=1),
    "oracle": oracle(np.arange(16)[None] % 4),
}
# whose states hold the network's own caches
NESTED = {name: CHAINS[name] for name in ("a model", "early exit")}
CONFIDENCE = LIMITING | {"confidence": policies.confidence(0.3)}
PROGRAMS = {
    "all, policies": (CHAINS, CONFIDENCE),
    "nested, entropy": (NESTED, {"entropy": policies.entropy(1, 3, 0.5)}),
    "nested, policies": (NESTED, CONFIDENCE),
    "trees": (TREES, {}),
    "trees, policies": (TREES, LIMITING),
}
TABLE = ("all, policies", "nested, entropy", "trees", "trees, policies")
CASES = [("table", program) for program in TABLE]
CASES += list(itertools.product(NETWORKS, ("nested, policies", "trees, policies")))
SELDOM = {  # the same drafters with another network, or with policies
    ("table", "trees"),
    ("gpt", "trees, policies"),
    ("window", "nested, policies"),
}


def of_row(which, values):
    """Return for each row the value that it names."""
    return jnp.take_along_axis(jnp.stack(values, axis=1), which[:, None], axis=1)[:, 0]


@functools.cache
def each_its_own_drafter(parts):
    """Each row has the drafter whose number is the first token of its prompt."""

    def init(start):
        pairs = zip(parts, start.weights.draft, strict=True)
        states = tuple(
            part.init(start._replace(weights=Weights(start.weights.target, params)))
            for part, params in pairs
        )
        return start.prompt.tokens[:, 0], states

    def propose(weights, caches, context):
        (which, states), chosen, after = caches.draft, None, []
        for number, (part, params, state) in enumerate(
            zip(parts, weights.draft, states, strict=True)
        ):
            draft, used = part.propose(
                Weights(weights.target, params), Caches(caches.target, state), context
            )
            after.append(used.draft)
            if chosen is None:
                chosen = draft
            elif draft.parent is None:
                chosen = _choose(which == number, draft, chosen)
            else:
                row = which == number
                chosen = jax.tree.map(
                    lambda x, y, row=row: jnp.where(row.reshape(-1, *[1] * (x.ndim - 1)), x, y),
                    draft,
                    chosen,
                )
        return chosen, Caches(used.target, (which, tuple(after)))

    def commit(end):
        (which, states), after = end.caches.draft, []
        for part, params, state in zip(parts, end.weights.draft, states, strict=True):
            weights, caches = Weights(end.weights.target, params), Caches(end.caches.target, state)
            after.append(part.commit(end._replace(weights=weights, caches=caches)).draft)
        return end.caches._replace(draft=(which, tuple(after)))

    return Drafter(init, propose, commit, tree=parts[0].tree)


@functools.cache
def each_its_own_policy(parts):
    """Each row has the policy that its values name."""

    def init(params, prompt):
        return tuple(
            part.init(values, prompt) for part, values in zip(parts, params[1], strict=True)
        )

    def max_draft(params, state, gamma, left):
        limits = [
            part.max_draft(values, memory, gamma, left)
            for part, values, memory in zip(parts, params[1], state, strict=True)
        ]
        return of_row(params[0], limits)

    def update(params, state, *outcome):
        return tuple(
            part.update(values, memory, *outcome)
            for part, values, memory in zip(parts, params[1], state, strict=True)
        )

    def should_continue(params, state, index, confidences):
        decisions = [
            jnp.ones(params[0].shape, bool)
            if part.should_continue is None
            else part.should_continue(values, memory, index, confidences)
            for part, values, memory in zip(parts, params[1], state, strict=True)
        ]
        return of_row(params[0], decisions)

    (confidence,) = {part.confidence for part in parts} - {None} or {None}
    return Policy(init, max_draft, update, confidence, should_continue if confidence else None)


def prepared(target, factories, chosen, seed):
    """A row for each drafter and each policy, or two for each drafter; all that rows may have of
    their own differs.
    """
    random = np.random.default_rng(seed)
    count = len(chosen) or 2
    pairs = list(itertools.product(range(len(factories)), range(count)))
    rows = [[drafter, *random.integers(0, VOCAB, random.integers(0, 5))] for drafter, _ in pairs]
    parts = [make(target) for make in factories.values()]
    drafter = BoundDrafter(
        each_its_own_drafter(tuple(part.functions for part in parts)),
        tuple(part.params for part in parts),
    )
    policy = None
    if chosen:
        functions, values = zip(
            *((part.functions, part.params) for part in chosen.values()), strict=True
        )
        policy = BoundPolicy(
            each_its_own_policy(functions), (np.array([which for _, which in pairs]), values)
        )
    cycled = lambda values: np.resize(values, len(rows))  # noqa: E731
    return prepare(
        model(target),
        token_rows.pad(rows, 16),
        drafter=drafter,
        policy=policy,
        key=jax.random.split(jax.random.key(seed), len(rows)),
        gamma=3,
        temperature=cycled(TEMPERATURES),
        max_new_tokens=cycled(LIMITS),
        eos_ids=[6],
        repetition_penalty=1.1,
    )


def texts(state):
    """Return for each row its new tokens and its counts."""
    tokens, start, length, stats = jax.device_get(
        (state.tokens, state.start, state.length, state.stats)
    )
    assert not np.asarray(state.failed).any()
    return [
        (tokens[row, start[row] : length[row]].tolist(), [int(count[row]) for count in stats])
        for row in range(len(length))
    ]


def started(prepared):
    return loop.start(
        prepared.decoder,
        prepared.weights,
        prepared.prompt,
        prepared.request,
        prepared.max_new_tokens,
    )


def advanced(prepared, state, rounds=1000):
    for _ in range(rounds):
        if bool(state.done.all()):
            break
        state, _ = loop.advance(prepared.decoder, prepared.weights, state)
    return state


take, put = jax.jit(token_rows.take_rows), jax.jit(token_rows.put_rows)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "program"), marked(CASES, exhaustive=SELDOM))
def test_rows_may_be_reordered_and_replaced_in_mid_generation(target, program):
    """Permuted after two rounds and back after three more; and some replaced by rows of another
    generation.
    """
    old, new = (prepared(target, *PROGRAMS[program], seed) for seed in (5, 6))
    assert old.decoder is new.decoder
    expected, others = (
        texts(advanced(generation, started(generation))) for generation in (old, new)
    )
    count = len(expected)
    order = np.random.default_rng(7).permutation(count)

    state = take(advanced(old, started(old), 2), order)
    assert all(leaf.shape[:1] == (count,) for leaf in jax.tree.leaves(state))
    state = take(advanced(old, state, 3), np.argsort(order))
    assert texts(advanced(old, state)) == expected

    rows = np.arange(1, count, 2)  # of the other generation, in mid-generation like those they join
    mixed = put(advanced(old, started(old), 2), rows, take(advanced(new, started(new), 1), rows))
    assert texts(advanced(old, mixed)) == [
        (others if row % 2 else expected)[row] for row in range(count)
    ]


@pytest.mark.slow
def test_rows_may_be_dropped():
    """The remaining rows are a smaller batch."""
    generation = prepared("table", *PROGRAMS["trees, policies"], 5)
    expected = texts(advanced(generation, started(generation)))
    state = advanced(generation, started(generation), 2)
    remaining = advanced(generation, take(state, np.array([3, 1])))
    assert texts(remaining) == [expected[3], expected[1]]
