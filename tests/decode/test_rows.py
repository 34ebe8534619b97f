"""Rows are reordered and replaced in mid-generation, whatever the model, the drafter and the policy: the same text.

Each case is two programs, one for prefill and one for a round. All drafters and all policies go with a table model; the
networks go with drafters that have a cache of their own.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import buffers, datastore, drafters, policies
from jaxspec.base import Drafter, Prompt
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.drafters.sequential import sequential
from jaxspec.nets import decoder, gpt, t5
from jaxspec.testing import table_model

VOCAB = 7
OLD = [[3, 1, 4], [1], [5, 2, 6, 5, 3], [0, 2, 0, 2]]
NEW = [[2, 2], [6, 1, 6, 1, 6], [4], [5, 5, 1]]
LIMITS, TEMPERATURE = np.array([9, 16, 5, 13]), np.array([1.0, 0.0, 0.7, 1.0])
ORDER = np.array([2, 0, 3, 1])
WRITTEN = [[1, 2, 3, 1, 2, 3, 4, 5], [4, 5, 0, 4, 5, 6], [0, 0, 1, 2, 6, 6, 3]]


@functools.cache
def model(name, seed=1):
    """Tiny: what matters is what their states hold."""
    if name in ("table", "encoder"):
        return table_model(jax.random.key(seed), VOCAB, encoder=name == "encoder", sharpness=2.0)
    if name == "gpt":
        net, config = gpt, gpt.GPTConfig(VOCAB, 8, 8, 1, 2, max_positions=64)
    elif name == "t5":
        net, config = t5, t5.T5Config(VOCAB, 8, 8, 1, 8, 1, 1, buckets=4, max_distance=6)
    else:  # with a sliding window
        net = decoder
        config = decoder.DecoderConfig(
            VOCAB, dim=8, ff_dim=8, layers=1, heads=2, kv_heads=1, head_dim=4, window=3, local=(True,)
        )
    params = jax.tree.map(lambda x: 3 * x, net.init(config, jax.random.key(seed)))
    return jaxspec.Model(net.language_model(config), params, None, config, name)


@functools.cache
def early_exit(target):
    """Uses the target's own cache and weights."""

    def propose(weights, caches, context):
        def read(tokens, cache):
            forward, cache = model(target).lm.extend(weights.target, cache, tokens)
            return 0.5 * forward.logits[:, -1], None, cache

        last = buffers.window(context.row.tokens, context.row.length - 1, 1)
        following = lambda i, token, cache: read(token[:, None], cache)  # noqa: E731
        draft, used = sequential(lambda cache: read(last, cache), following, caches.target, context)
        return draft, caches._replace(target=used)

    return Drafter(lambda *_: (), propose, lambda weights, caches, *_: caches)


def tables(target):
    return drafters.ngram(WRITTEN, model(target), order=3)


DRAFTERS = {
    "a model": lambda target: drafters.model(model(target, 2)),
    "coupled": lambda target: drafters.model(model(target, 2), coupled=True),
    "greedy": lambda target: drafters.greedy(model(target, 2)),
    "n-grams": lambda target: drafters.model(tables(target)),
    "without_backoff": lambda target: drafters.without_backoff(tables(target)),
    "uniform": lambda target: drafters.uniform(),
    "prompt_lookup": lambda target: drafters.prompt_lookup(),
    "online_ngram": lambda target: drafters.online_ngram(3, top=2, slots=16),
    "retrieval": lambda target: drafters.retrieval(datastore.build(WRITTEN, vocab_size=VOCAB), shortest=1),
    "fallback": lambda target: drafters.fallback(
        drafters.prompt_lookup(2, 2), drafters.without_backoff(tables(target)), model(target, 2)
    ),
    "a tree": lambda target: drafters.tree(model(target, 2), (2, 1, 1)),
    "a tree of n-grams": lambda target: drafters.tree(tables(target), (2, 2), draw="mixed"),
    "early exit": early_exit,
    None: lambda target: None,
}
POLICIES = {
    None: None,
    "constant": policies.constant([1, 3, 2, 0]),
    "heuristic": policies.heuristic(start=[1, 2, 3, 1], grow=1),
    "confidence": policies.confidence([0.2, 0.4, 0.3, 0.5]),
    "entropy": policies.entropy(1, [2, 3, 3, 1], 0.5),
    "adaptive": policies.adaptive([0.1, 0.0, 0.3, 0.1], 0.1, pause=1),
    "oracle": policies.oracle(np.arange(64).reshape(4, 16) % 4),
}
CASES = [
    ("table", None, None),
    *[("table", "a model", policy) for policy in POLICIES],
    ("table", "coupled", "confidence"),
    ("table", "greedy", "entropy"),
    ("table", "n-grams", "heuristic"),
    ("table", "without_backoff", "adaptive"),
    ("table", "uniform", "constant"),
    ("table", "prompt_lookup", "adaptive"),
    ("table", "online_ngram", None),
    ("table", "retrieval", "heuristic"),
    ("table", "fallback", "entropy"),
    ("table", "a tree", "adaptive"),
    ("table", "a tree of n-grams", "heuristic"),
    ("table", "early exit", "constant"),
    ("encoder", "a tree", None),
    ("encoder", "fallback", "adaptive"),
    *[(net, "a model", "adaptive") for net in ("gpt", "t5", "window")],
    *[(net, "a tree", "constant") for net in ("gpt", "t5", "window")],
]
QUICK = {("table", "a model", "entropy"), ("table", "fallback", "entropy"), ("t5", "a tree", "constant")}


def job(names, rows, key):
    target, drafter, policy = names
    options = dict(temperature=TEMPERATURE, max_new_tokens=LIMITS, eos_ids=[6], repetition_penalty=1.1, gamma=3)
    keys = jax.random.split(jax.random.key(key), 4)
    found = DRAFTERS[drafter](target)
    return prepare(model(target), buffers.pad(rows, 16), drafter=found, policy=POLICIES[policy], key=keys, **options)


def texts(state):
    """Of each row its new tokens and its counts."""
    tokens, start, length, stats = jax.device_get((state.tokens, state.start, state.length, state.stats))
    assert not np.asarray(state.failed).any()
    return [
        (tokens[row, start[row] : length[row]].tolist(), [int(count[row]) for count in stats])
        for row in range(len(length))
    ]


def started(job):
    return loop.start(job.decoder, job.weights, job.prompt, job.request, job.max_new_tokens)


def advanced(job, state, rounds=1000):
    for _ in range(rounds):
        if bool(state.done.all()):
            break
        state, _ = loop.advance(job.decoder, job.weights, state)
    return state


take, put = jax.jit(buffers.take_rows), jax.jit(buffers.put_rows)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(map(str, case)))
        for case in CASES
    ],
)
def test_rows_may_be_reordered_and_replaced_in_mid_generation(names):
    """Permuted after two rounds and back after three more; and finished rows refilled with other prompts."""
    old, new = job(names, OLD, 5), job(names, NEW, 6)
    assert old.decoder is new.decoder
    expected, others = texts(advanced(old, started(old))), texts(advanced(new, started(new)))

    state = take(advanced(old, started(old), 2), ORDER)
    assert all(leaf.shape[:1] == (4,) for leaf in jax.tree.leaves(state))
    state = take(advanced(old, state, 3), np.argsort(ORDER))
    assert texts(advanced(old, state)) == expected

    state, waiting = started(old), [2, 0, 3]  # prompts of the other job, by number
    held = list(enumerate("old" for _ in OLD))
    seen = {}
    while True:
        done = np.asarray(state.done)
        for slot in np.flatnonzero(done):
            seen[held[slot][::-1]] = texts(state)[slot]
        free = np.flatnonzero(done)[: len(waiting)]
        if len(free):
            numbers = np.array([waiting.pop(0) for _ in free])
            # A program for each number of rows would be compiled: all four are put, the others as they are.
            whole, chosen = np.arange(4), np.zeros(4, int)
            chosen[free] = numbers
            fresh = take(started(new), chosen)
            kept = take(state, whole)
            mixed = put(kept, np.where(np.isin(whole, free), whole, 4), fresh)  # past the end: nothing is put
            state = mixed
            for slot, number in zip(free, numbers, strict=True):
                held[slot] = (int(number), "new")
            continue
        if done.all():
            break
        state = advanced(old, state, 1)
    assert seen == {("old", i): expected[i] for i in range(4)} | {("new", i): others[i] for i in (2, 0, 3)}


def test_rows_may_be_dropped():
    """What is left of a batch is a smaller batch."""
    names = ("table", "a tree", None)
    whole = job(names, OLD, 5)
    expected = texts(advanced(whole, started(whole)))
    state = advanced(whole, started(whole), 2)
    some = advanced(whole, buffers.take_rows(state, jnp.array([3, 1])))
    assert texts(some) == [expected[3], expected[1]]
    assert isinstance(whole.prompt, Prompt)
