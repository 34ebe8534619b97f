"""A drafter that knows its logits after any token is one file: this one, used as chain, tree and
dynamic tree.

Its memory of a text fades: it halves with every token, and gains that token's row of a table. The
memory is the logits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, policies
from jaxspec.core import (
    BoundDrafter,
    Caches,
    Distribution,
    DraftContext,
    DraftStart,
    Forward,
    Reading,
    Room,
    Steps,
    Weights,
    noise,
    token_rows,
)
from jaxspec.drafters.common import no_commit
from jaxspec.testing import certify, table_model
from tests.marks import marked

VOCAB, EXACT = 3, 1e-5
TARGET = table_model(jax.random.key(1), VOCAB, order=1, sharpness=2.0)
ROWS = token_rows.pad([[1, 2], [0], [2, 0, 1, 1]], 4)


class Memory(NamedTuple):
    memory: jax.Array  # B V
    length: jax.Array  # B: tokens that it has read


def init(start, nodes):
    rows = len(start.prompt.length)
    return Memory(jnp.zeros((rows, VOCAB)), jnp.zeros((rows,), jnp.int32))


def begin(weights, caches, context, fed):
    table, row = weights.draft, context.row

    def read(state):
        token = jnp.take_along_axis(
            row.tokens, jnp.minimum(state.length, row.length - 1)[:, None], axis=1
        )[:, 0]
        is_new = state.length < row.length
        memory = jnp.where(is_new[:, None], state.memory / 2 + table[token], state.memory)
        return Memory(memory, jnp.where(is_new, state.length + 1, state.length))

    state = jax.lax.while_loop(lambda state: jnp.any(state.length < row.length), read, caches.draft)

    # The carry is the memory after the last committed token and, in a tree, after each draft token
    # that was fed.
    def root(memory):
        return memory[:, :1], memory

    def nodes(tokens, parent, level, memory):
        if parent is None:
            memory = memory / 2 + table[tokens]
            return memory, memory
        first = parent.shape[1] - tokens.shape[1]
        before = jnp.take_along_axis(memory, parent[:, first:, None] + 1, axis=1)
        new = before / 2 + table[tokens]
        return new, jax.lax.dynamic_update_slice_in_dim(memory, new, first + 1, axis=1)

    def end(memory, draft, slots):
        return caches._replace(draft=state)

    return Reading(
        jnp.pad(state.memory[:, None], ((0, 0), (0, fed or 0), (0, 0))), root, nodes, end
    )


TABLE = 1.5 * jax.random.normal(jax.random.key(2), (VOCAB, VOCAB))
CHAIN = BoundDrafter(drafters.chain(Steps(init, begin, no_commit, VOCAB)), TABLE, name="fading")
DRAFTERS = {
    "chain": CHAIN,
    "tree": drafters.tree(CHAIN, shape=[(0,), (1,), (0, 0), (1, 0)]),
    "tree of its best tokens": drafters.tree(CHAIN, (2, 1), draw="top"),
    "dynamic tree": drafters.dynamic_tree(CHAIN, nodes=4, depth=3, width=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_distribution_of_the_text_is_the_targets(name):
    assert certify(TARGET, drafter=DRAFTERS[name], gamma=2, steps=3) <= EXACT


PLAIN, ADAPTIVE = ("tree", "tree of its best tokens"), policies.adaptive(0.1, 0.1, pause=1)
PAIRS = [(name, policy) for name in DRAFTERS for policy in ("plain", "adaptive")]
SELDOM = {(name, policy) for name, policy in PAIRS if (policy == "plain") != (name in PLAIN)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), marked(PAIRS, exhaustive=SELDOM))
def test_greedy_text_is_plain_decodings(name, policy):
    """Rows of other lengths, with limits of their own; with the policy rounds without a draft,
    too.
    """
    options = dict(max_new_tokens=np.array([9, 4, 11]))
    plain = jaxspec.generate(TARGET, ROWS, **options)
    options |= dict(gamma=3, policy=None if policy == "plain" else ADAPTIVE)
    out = jaxspec.generate(TARGET, ROWS, drafter=DRAFTERS[name], **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.drafted.sum() > 0


@pytest.mark.parametrize("name", ["chain", "tree of its best tokens", "dynamic tree"])
def test_each_draft_token_is_one_of_the_best_after_its_path(name):
    """Against the memory that is walked by hand, token by token, to each node."""
    functions, table = DRAFTERS[name].functions, np.asarray(TABLE, np.float64)
    forward = Forward(jnp.zeros((3, 1, VOCAB)), jnp.zeros((3, 4, 0)))
    state = functions.init(DraftStart(Weights(None, TABLE), ROWS, Room(20), forward))
    greedy = lambda logits, *_: Distribution(tokens=jnp.argmax(logits, axis=-1), logits=logits)  # noqa: E731
    context = DraftContext(
        noise.row_keys(jax.random.key(0), 3), ROWS, jnp.full(3, 3), 3, False, greedy
    )
    draft = jax.jit(
        lambda table: functions.propose(Weights(None, table), Caches(None, state), context)[0]
    )(TABLE)
    depths = set()
    for row, text in enumerate(token_rows.to_lists(*ROWS[:2])):
        texts = {0: text}
        for node, token in enumerate(draft.tokens[row].tolist()):
            parent = node if draft.parent is None else int(draft.parent[row, node])
            memory = np.zeros(VOCAB)
            for before in texts[parent]:
                memory = memory / 2 + table[before]
            assert token in np.argsort(-memory)[: 1 if name == "chain" else 2].tolist()
            texts[node + 1] = [*texts[parent], token]
            depths.add(len(texts[node + 1]) - len(text))
    assert depths >= {1, 2}
