"""Every kind of cache, one table: T tokens at once, one by one and as whole rows, and a rewind
forgets exactly itself.

A kind is a tiny network. The reference is the network over whole rows, without a cache. Rows are
ragged and longer than a window's ring, and rewinds have every length that there is room for.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import nets
from jaxspec.core import Forward, LanguageModel, Model, Prompt, Room, chunks, token_rows
from jaxspec.core import kv_cache as kv
from jaxspec.nets import decoder, t5
from jaxspec.vocab.remap import NONE, map_vocabulary
from tests.marks import marked
from tests.rehearsals import test_recurrent_family, test_shared_family
from tests.small import random_params

VOCAB, WINDOW, REWIND, CAPACITY, WIDTH = 11, 3, 6, 40, 32
WHOLE = decoder.decoder_config(VOCAB, dim=8, ff_dim=8, layers=2, heads=2, kv_heads=1, head_dim=4)
CONFIGS = {
    "whole": WHOLE,
    "window": nets.replace(WHOLE, window=WINDOW, local=(True,)),
    "both": nets.replace(WHOLE, window=WINDOW, local=(True, False)),
    "no ring": nets.replace(WHOLE, window=WINDOW, local=(True,), positions="relative"),
}
TREES = (*CONFIGS, "shared", "cross")
KINDS = (*TREES, "recurrent", "mapped both", "mapped recurrent")
COVERED = ("both", "no ring", "mapped both")  # other kinds have their parts: not in `core`
CROSS = t5.T5Config(
    VOCAB, dim=8, ff_dim=8, heads=2, head_dim=4, encoder_layers=1, decoder_layers=2, start_token=0
)
SPELLED = [[token] if token % 2 else [token, (3 * token + 1) % VOCAB] for token in range(VOCAB)]
FIRST = [4, 7]  # tokens before each row of a mapped model

START = Room(CAPACITY, REWIND)
RANDOM = np.random.default_rng(0)
LENGTH = np.array([17, 6, 1])
ROWS = RANDOM.integers(0, VOCAB, (3, WIDTH))
OTHER = RANDOM.integers(0, VOCAB, (3, WIDTH))
LONG = REWIND + 2  # tokens of a pass that is longer than what a ring takes back
ALL = [3] * len(ROWS)  # every token of a pass over three
PARENT = np.array([[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 3, 3]])
PATHS = [[1, 3, 4], [0, 1, 2, 3, 4], [2, 4]]  # accepted draft tokens: node n + 1 is draft token n


take_rows, put_rows = jax.jit(token_rows.take_rows), jax.jit(token_rows.put_rows)


class Kind(NamedTuple):
    """A network with one kind of cache.

    Attributes:
        lm, params: the network. An encoder-decoder reads a row's first token as the prompt of its
            encoder (`encoder_prompt`), and its start token in that place.
        whole_rows: (params, tokens [B, T]) -> logits [B, T, V], without a cache.
    """

    lm: LanguageModel
    params: Any
    whole_rows: Callable[[Any, Any], Any]

    def logits(self, rows) -> np.ndarray:
        """The reference for rows of any length up to WIDTH, at all of WIDTH positions."""
        padded = np.zeros((8, WIDTH), np.int32)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = row
        return np.asarray(self.whole_rows(self.params, jnp.asarray(padded)))


@pytest.fixture
def kinds(monkeypatch):
    """Makes kinds whose prompts are read four tokens at a time."""
    monkeypatch.setattr(chunks, "LONGEST", 4)
    monkeypatch.setattr(chunks, "MULTIPLE", 1)
    return _kind


@functools.cache
def _kind(name: str) -> Kind:
    if name.startswith("mapped "):
        return _mapped(_kind(name.removeprefix("mapped ")))
    if name in CONFIGS:
        config = CONFIGS[name]
        lm = decoder._language_model.__wrapped__(config, ())
        params = random_params(decoder.init, config, 1, 0.3)
        whole_rows = lambda params, rows: decoder.DecoderNet(config).apply({"params": params}, rows)  # noqa: E731
    elif name == "cross":
        lm, params = t5.language_model(CROSS), random_params(t5.init, CROSS, 1, 0.3)
        whole_rows = lambda params, rows: t5.T5(CROSS).apply(  # noqa: E731
            {"params": params}, encoder_prompt(rows), rows.at[:, 0].set(CROSS.start_token)
        )
    else:
        family = {"shared": test_shared_family, "recurrent": test_recurrent_family}[name]
        (lm, params), whole_rows = family.network(), family.whole_rows
    return _compiled(lm, params, whole_rows)


def _compiled(lm: LanguageModel, params: Any, whole_rows: Callable[[Any, Any], Any]) -> Kind:
    jitted = {
        name: jax.jit(getattr(lm, name))
        for name in ("extend", "rewind", "select")
        if getattr(lm, name)
    }
    return Kind(lm._replace(prefill=jax.jit(lm.prefill), **jitted), params, jax.jit(whole_rows))


def _mapped(inner: Kind) -> Kind:
    """A model that reads even tokens as two of its own (`SPELLED`), and is read at the last of
    them.
    """
    # those that a token of the target is
    own = np.array([token if token % 2 else NONE for token in range(VOCAB)])
    model = map_vocabulary(Model(inner.lm, inner.params), own, VOCAB, SPELLED, first=FIRST)

    def whole_rows(params, rows):
        parts = jnp.array([[*spelled, NONE][:2] for spelled in SPELLED])[rows].reshape(
            len(rows), -1
        )
        spelled = jnp.take_along_axis(
            parts, jnp.argsort(parts == NONE, axis=1, stable=True), axis=1
        )
        first = jnp.broadcast_to(jnp.array(FIRST), (len(rows), len(FIRST)))
        logits = inner.whole_rows(
            inner.params, jnp.concatenate([first, jnp.maximum(spelled, 0)], axis=1)
        )
        ends = (
            len(FIRST)
            - 1
            + jnp.cumsum(jnp.array([len(spelled) for spelled in SPELLED])[rows], axis=1)
        )
        return jnp.where(
            own == NONE, -jnp.inf, jnp.take_along_axis(logits, ends[:, :, None], axis=1)
        )

    return _compiled(model.lm, model.params, whole_rows)


def encoder_prompt(rows) -> Prompt:
    """The encoder's prompts, of one to four tokens, of rows that begin with different tokens."""
    first = jnp.asarray(rows, jnp.int32)[:, :1]
    return Prompt((first + jnp.arange(4, dtype=jnp.int32)[None]) % VOCAB, 1 + first[:, 0] % 4)


def start(kind: Kind, rows=ROWS, length=LENGTH, room=START):
    """The outputs at each row's last token, and the cache, after the beginning of some rows."""
    tokens, length = jnp.asarray(rows[:, : max(LENGTH)], jnp.int32), jnp.asarray(length, jnp.int32)
    if kind.lm.limits.start_token is None:
        return kind.lm.prefill(kind.params, Prompt(tokens, length), room)
    first, cache = kind.lm.prefill(kind.params, encoder_prompt(tokens), room)
    rest, cache = kind.lm.extend(kind.params, cache, tokens[:, 1:], None, length - 1)
    logits = jnp.concatenate([first.logits, rest.logits], axis=1)
    return Forward(chunks.at(logits, length - 1)), kind.lm.rewind(cache, length)


def feed(kind: Kind, cache, tokens, parent=None, real=None):
    parent, real = (None if x is None else jnp.asarray(x, jnp.int32) for x in (parent, real))
    forward, cache = kind.lm.extend(kind.params, cache, jnp.asarray(tokens), parent, real)
    return np.asarray(forward.logits), cache


def at(rows, length, step):
    """The next `step` tokens of each row."""
    return np.stack([row[n : n + step] for row, n in zip(rows, length, strict=True)])


def assert_after(logits, reference, length):
    """Logits [B, T, V] of tokens that were fed at `length` are the reference's."""
    expected = np.stack(
        [x[n : n + logits.shape[1]] for x, n in zip(reference, length, strict=False)]
    )
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", marked(KINDS, quick=COVERED, slow=("mapped recurrent",)))
def test_tokens_at_once_one_by_one_and_whole_rows_are_the_same(name, kinds):
    """Ragged prompts in chunks; then passes over more tokens than a ring takes back, and over
    one.
    """
    kind = kinds(name)
    reference = kind.logits(ROWS)
    assert np.ptp(reference, axis=-1).min() > 0.5
    forward, cache = start(kind)
    assert_after(np.asarray(forward.logits), reference, LENGTH - 1)
    length = LENGTH.copy()
    for step in (1, LONG, 1, 1):
        logits, cache = feed(kind, cache, at(ROWS, length, step))
        assert_after(logits, reference, length)
        length += step


@pytest.mark.parametrize(
    "passes", [(REWIND,), (1,) * REWIND, (LONG, 1)], ids=["at once", "singly", "more"]
)
@pytest.mark.parametrize("name", marked(KINDS, quick=COVERED, slow=("mapped recurrent",)))
def test_a_rewind_of_every_length_forgets_exactly_that(name, passes, kinds):
    """Wherever the passes before it began; then other tokens are fed, taken back in part, and fed
    again.
    """
    kind = kinds(name)
    _, cache = start(kind)
    length = LENGTH.copy()
    for step in passes:
        _, cache = feed(kind, cache, at(ROWS, length, step))  # all of them real, as a round's are
        length += step
    for back in range(REWIND + 1):
        short = length - back
        copy = kind.lm.rewind(cache, jnp.asarray(short, jnp.int32))
        mixed = np.stack(
            [np.concatenate([x[:n], y])[:WIDTH] for x, y, n in zip(ROWS, OTHER, short, strict=True)]
        )
        logits, copy = feed(kind, copy, at(mixed, short, 3), real=ALL)
        assert_after(logits, kind.logits(mixed), short)
        kept = short + back % 4  # of the three, some are taken back again
        copy = kind.lm.rewind(copy, jnp.asarray(kept, jnp.int32))
        again = np.stack(
            [np.concatenate([x[:n], y])[:WIDTH] for x, y, n in zip(mixed, ROWS, kept, strict=True)]
        )
        logits, _ = feed(kind, copy, at(again, kept, 3), real=ALL)
        assert_after(logits, kind.logits(again), kept)


@pytest.mark.parametrize("name", marked(KINDS, quick=COVERED, slow=("mapped recurrent",)))
def test_padding_leaves_no_trace(name, kinds):
    """Of a pass some rows keep all, some a part, and some nothing; every rewind is then as if
    nothing had been fed.
    """
    kind = kinds(name)
    _, cache = start(kind)
    length = LENGTH.copy()
    for step, real in ((3, [0, 2, 3]), (LONG, [7, 1, 8]), (3, [2, 0, 1]), (1, [1, 1, 0])):
        logits, cache = feed(kind, cache, at(ROWS, length, step), real=real)
        for row, count in enumerate(real):
            assert_after(
                logits[row : row + 1, :count],
                kind.logits(ROWS)[row : row + 1],
                length[row : row + 1],
            )
        length += real
        cache = kind.lm.rewind(cache, jnp.asarray(length, jnp.int32))
    for back in range(REWIND + 1):
        short = np.maximum(length - back, 1)
        mixed = np.stack(
            [np.concatenate([x[:n], y])[:WIDTH] for x, y, n in zip(ROWS, OTHER, short, strict=True)]
        )
        logits, _ = feed(
            kind,
            kind.lm.rewind(cache, jnp.asarray(short, jnp.int32)),
            at(mixed, short, 3),
            real=ALL,
        )
        assert_after(logits, kind.logits(mixed), short)


@pytest.mark.parametrize("name", marked(KINDS, quick=COVERED, slow=("mapped recurrent",)))
def test_a_cache_moves_into_another_room(name, kinds):
    """What was read with little to take back goes on with room for more, and the other way
    round.
    """
    kind, reference = kinds(name), kinds(name).logits(ROWS)
    for small in (Room(18, 2), Room(18, 20)):
        _, cache = start(kind, room=small)
        cache = chunks.enlarged(
            cache, lambda b, room: chunks.empty_cache(kind.lm, kind.params, b, room), 3, START
        )
        length = np.maximum(LENGTH - 1, 1)
        cache = kind.lm.rewind(cache, jnp.asarray(length, jnp.int32))
        for step in (1, LONG, 1):
            logits, cache = feed(kind, cache, at(ROWS, length, step))
            assert_after(logits, reference, length)
            length = length + step


def after_path(rows, length, other):
    """Rows that have committed the first node of a tree fed at `length`, and the nodes of PATHS;
    then other tokens.
    """
    pairs = zip(rows, length, PATHS, other, strict=True)
    return np.stack(
        [
            np.concatenate([x[:n], x[[n, *(n + 1 + np.array(path))]], y])[:WIDTH]
            for x, n, path, y in pairs
        ]
    )


def select(kind: Kind, cache, length):
    """Moves PATHS to the end of rows whose tree was fed at `length`; says how long the rows are
    then.
    """
    path = np.zeros((3, 5), np.int32)
    for row, accepted in enumerate(PATHS):
        path[row, : len(accepted)] = accepted
    assert kind.lm.select is not None
    cache = kind.lm.select(cache, jnp.asarray(length + 1, jnp.int32), jnp.asarray(path))
    return cache, length + 1 + [len(accepted) for accepted in PATHS]


def assert_nodes(kind: Kind, logits, rows, length):
    """Logits of the trees of PARENT, whose nodes are the rows' next tokens, are those of their
    paths.
    """
    for node in range(PARENT.shape[1]):
        paths = [[node] for _ in PARENT]
        for path, parent in zip(paths, PARENT, strict=True):
            while parent[path[0]] >= 0:
                path.insert(0, parent[path[0]])
        whole = [
            np.concatenate([x[:n], x[n + np.array(p)]])
            for x, n, p in zip(rows, length, paths, strict=True)
        ]
        last = [len(row) - 1 for row in whole]
        expected = kind.logits(whole)[np.arange(len(last)), last]
        np.testing.assert_allclose(logits[:, node], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", TREES)
def test_a_node_of_a_tree_is_its_path_and_a_committed_path_is_a_chain(name, kinds):
    kind = kinds(name)
    _, cache = start(kind)
    logits, cache = feed(kind, cache, at(ROWS, LENGTH, PARENT.shape[1]), PARENT)
    assert_nodes(kind, logits, ROWS, LENGTH)
    cache, length = select(kind, cache, LENGTH)
    committed = after_path(ROWS, LENGTH, OTHER)
    logits, _ = feed(
        kind,
        kind.lm.rewind(cache, jnp.asarray(length, jnp.int32)),
        at(committed, length, 3),
        real=ALL,
    )
    assert_after(logits, kind.logits(committed), length)


@pytest.mark.parametrize("name", TREES)
def test_a_rewind_of_every_length_after_trees_forgets_exactly_that(name, kinds):
    """Each row goes back to before its tree, token by token; a tree is fed there, and taken back in
    part.
    """
    kind = kinds(name)
    _, cache = start(kind)
    _, cache = feed(kind, cache, at(ROWS, LENGTH, PARENT.shape[1]), PARENT)
    cache, longest = select(kind, cache, LENGTH)
    committed = after_path(ROWS, LENGTH, OTHER)
    for back in range(REWIND + 1):
        # The nodes of the tree count: a row was REWIND tokens longer than it was when they were
        # fed.
        short = np.maximum(longest - back, LENGTH)
        copy = kind.lm.rewind(cache, jnp.asarray(short, jnp.int32))
        mixed = np.stack(
            [
                np.concatenate([x[:n], y])[:WIDTH]
                for x, y, n in zip(committed, OTHER, short, strict=True)
            ]
        )
        logits, copy = feed(kind, copy, at(mixed, short, PARENT.shape[1]), PARENT)
        assert_nodes(kind, logits, mixed, short)
        copy, length = select(kind, copy, short)
        kept, rows = np.maximum(length - back, short), after_path(mixed, short, ROWS)
        again = np.stack(
            [np.concatenate([x[:n], y])[:WIDTH] for x, y, n in zip(rows, ROWS, kept, strict=True)]
        )
        logits, _ = feed(
            kind, kind.lm.rewind(copy, jnp.asarray(kept, jnp.int32)), at(again, kept, 3), real=ALL
        )
        assert_after(logits, kind.logits(again), kept)


@pytest.mark.parametrize("name", marked(KINDS, quick=COVERED, slow=("mapped recurrent",)))
def test_a_refilled_row_is_its_own_and_the_others_stay(name, kinds):
    kind = kinds(name)
    _, cache = start(kind)
    _, cache = feed(kind, cache, at(ROWS, LENGTH, 3), real=ALL)
    _, new = start(kind, OTHER, np.array([2, 9, 5]))
    cache = put_rows(cache, np.array([0, 2]), take_rows(new, np.array([1, 0])))
    rows, length = np.stack([OTHER[1], ROWS[1], OTHER[0]]), np.array([9, LENGTH[1] + 3, 2])
    reference = kind.logits(rows)
    for step in (1, LONG, 1):
        logits, cache = feed(kind, cache, at(rows, length, step))
        assert_after(logits, reference, length)
        length += step


def test_padding_and_rewinds_leave_a_state_bit_for_bit():
    """The state that is kept depends on the tokens that count, and not on the passes that brought
    them.
    """
    entries = jax.random.normal(jax.random.key(0), (2, 40, 5))

    def step(state, entry):
        state = 0.9 * state + jnp.tanh(entry * state[:, ::-1] + entry)
        return state, jnp.cumsum(state, axis=1)

    @functools.partial(jax.jit, static_argnums=1)
    def feed(cache, count, start, real):
        at = kv.Pass(cache.length, count, real=real)
        (layer,), fed = cache.layers, jnp.take(entries, start + jnp.arange(count), axis=1)
        record = layer.read(at, (), step, fed)
        return record.outputs, cache.grown([layer.after(record, at)], at)

    def read(passes):
        shape = jax.ShapeDtypeStruct((5,), jnp.float32)
        cache, outputs = (
            kv.empty(2, Room(40, rewind=4), [kv.recurrent(shape, shape)]),
            np.zeros((2, 40, 5)),
        )
        for count, real, back in passes:
            start = int(cache.length[0])
            output, cache = feed(cache, count, start, jnp.full((2,), real, jnp.int32))
            outputs[:, start : start + real] = output[:, :real]
            cache = kv.rewind(cache, cache.length - back)
        return outputs[:, : start + real - back], cache

    first, once = read([(12, 12, 0)])
    for passes in ([(1, 1, 0)] * 12, [(4, 3, 2), (4, 4, 1), (6, 5, 4), (2, 2, 0), (5, 5, 0)]):
        outputs, parts = read(passes)
        assert (outputs == first).all() and parts.length.tolist() == [12, 12]
        assert (parts.layers[0].state == once.layers[0].state).all() and parts.layers[
            0
        ].base.tolist() == [8, 8]
    assert [kv.can_rewind(once, length) for length in (0, 7, 8, 12)] == [True, False, True, True]
