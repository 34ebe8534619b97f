"""Padded token rows: buckets, capacity, append, cut at the end of a sequence, to lists."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from jaxspec.core import LanguageModel, Prompt, Room

SMALLEST_BUCKET = 16
FINER_BUCKETS = 1024  # tokens, beyond which buckets are closer
NO_TOKEN = -1  # stands where there is no token, and equals none
BEFORE_ROW = -2  # stands before a row's first token where that must not equal NO_TOKEN either


class AllRows(NamedTuple):
    """A value that all rows of a batch share, such as tables. It has no batch axis.

    `map_rows`, and what is made of it, hands it on as it is.
    """

    value: Any


def map_rows(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Maps the leaves of a tree that are batch-first; what rows share is that of the last tree.

    >>> map_rows(lambda x: x[1:], {"rows": np.arange(3), "table": AllRows(np.arange(2))})[
    ...     "table"
    ... ].value.tolist()
    [0, 1]
    """

    def each(leaf: Any, *leaves: Any) -> Any:
        if isinstance(leaf, AllRows):
            return (leaf, *leaves)[-1]
        return function(leaf, *leaves)

    return jax.tree.map(each, tree, *others, is_leaf=lambda node: isinstance(node, AllRows))


def take_out_shared(tree: Any) -> tuple[Any, list[Any]]:
    """Returns a tree all of whose leaves are batch-first, and what its rows share; `put_in_shared`
    undoes it.

    >>> rows, shared = take_out_shared({"rows": 1, "table": AllRows(2)})
    >>> rows, shared, put_in_shared(rows, shared)
    ({'rows': 1, 'table': AllRows(value=None)}, [2], {'rows': 1, 'table': AllRows(value=2)})
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, AllRows))
    shared = [leaf.value for leaf in leaves if isinstance(leaf, AllRows)]
    return jax.tree.unflatten(
        structure, [AllRows(None) if isinstance(x, AllRows) else x for x in leaves]
    ), shared


def put_in_shared(tree: Any, shared: Sequence[Any]) -> Any:
    """Puts values that rows share where `take_out_shared` took them from."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, AllRows))
    values = iter(shared)
    return jax.tree.unflatten(
        structure, [AllRows(next(values)) if isinstance(x, AllRows) else x for x in leaves]
    )


def bucket(length: int) -> int:
    """The padded length for `length` tokens: 16, 32, 48, 64, 96, 128, 192, ... 1024, 1280, 1536,
    1792, 2048, 2560, ...

    At most half of it is padding; beyond 1,024 tokens padding is at most a quarter of the tokens.
    Requests in one bucket share a compiled program.

    >>> [bucket(n) for n in (1, 16, 17, 33, 65, 130)]
    [16, 16, 32, 48, 96, 192]
    >>> [bucket(n) for n in (1024, 1025, 1281, 8000, 8193)]
    [1024, 1280, 1536, 8192, 10240]
    """
    size = SMALLEST_BUCKET
    while size * 2 < length:
        size *= 2
    if size >= length:
        return size
    # Small buckets are few, since each is a program; large ones are closer, since padding costs
    # passes. `steps` is the number of sizes from `size` up to twice as much.
    if size == SMALLEST_BUCKET:
        steps = 1
    elif size < FINER_BUCKETS:
        steps = 2
    else:
        steps = 4
    return size + -(-(length - size) * steps // size) * (size // steps)


def prefill_length(lm: LanguageModel, prompt: Prompt) -> int:
    """Tokens that prefill puts into a row: the padded prompt, or the beginning of an
    encoder-decoder's row.
    """
    begins = ()
    if prompt.encoder is None:
        begins = lm.limits.first_tokens
    return len(begins) or prompt.tokens.shape[1]


def decoder_prompt(lm: LanguageModel, prompt: Prompt) -> Prompt:
    """Returns a row after prefill: the prompt, or the beginning of an encoder-decoder's row."""
    if lm.limits.start_token is None:
        return prompt
    return encoder_and_row(prompt, lm.limits.first_tokens)[1]


def with_row(lm: LanguageModel, prompt: Prompt) -> Prompt:
    """Returns a prompt that says how its row begins, where the start token alone would not say it.

    A drafter is then prompted with its target's beginning in place of its own.
    """
    if not lm.limits.begin or prompt.encoder is not None:
        return prompt
    source, row = encoder_and_row(prompt, lm.limits.first_tokens)
    return row._replace(encoder=source)


def encoder_and_row(prompt: Prompt, first_tokens: Sequence[int]) -> tuple[Any, Prompt]:
    """Splits a prompt of either form into the encoder's input and the beginning of the decoder's
    row.

    Without a beginning of its own it is that of `Limits.first_tokens`.

    >>> source, row = encoder_and_row(Prompt(jnp.array([[5, 6]]), jnp.array([2])), (1, 4))
    >>> source.tokens.tolist(), row.tokens.tolist(), row.length.tolist()
    ([[5, 6]], [[1, 4]], [2])
    """
    if prompt.encoder is not None:
        return prompt.encoder, Prompt(prompt.tokens, prompt.length)
    tokens = jnp.asarray([*first_tokens], prompt.tokens.dtype)
    tokens = jnp.broadcast_to(tokens, (prompt.length.shape[0], len(first_tokens)))
    return prompt, Prompt(tokens, jnp.full_like(prompt.length, len(first_tokens)))


def headroom(max_new_tokens: int, nodes: int) -> int:
    """Counts the tokens by which a row's buffers must be able to grow so that no write is ever
    clamped.

    The last round begins at most one token before the limit, and feeds the last committed token and
    all draft tokens; a finished row goes on being fed, after its end, while others are busy.

    >>> headroom(max_new_tokens=32, nodes=4)
    37
    """
    return max_new_tokens + nodes + 1


def room(lm: LanguageModel, prompt: Prompt, headroom: int, nodes: int, spare: int = 0) -> Room:
    """Returns the room for rounds of at most `nodes` draft tokens, after prompts of one width.

    A round feeds the last committed token and all nodes, and a row that has ended takes them all
    back. A drafter may be two tokens behind. `spare`: tokens that may be taken back besides.
    """
    return Room(prefill_length(lm, prompt) + headroom, nodes + 2 + spare)


def reading_room(lm: LanguageModel, prompt: Prompt, count: int) -> Room:
    """Returns the room to read `count` tokens after prompts of one width; none is taken back."""
    return Room(prefill_length(lm, prompt) + count, rewind=0)


def pad(rows: Sequence[Sequence[int]], width: int | None = None) -> Prompt:
    """Lists of token ids as a Prompt, padded to a bucket.

    >>> pad([[5, 6, 7], [8]]).length.tolist()
    [3, 1]
    """
    if not rows:
        raise ValueError("got no prompts: expected at least one")
    for index, row in enumerate(rows):
        if len(row) == 0:
            raise ValueError(f"prompt {index} is empty: a prompt needs at least one token")
    longest = max(len(row) for row in rows)
    tokens: Any = np.zeros((len(rows), width or bucket(longest)), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    lengths: Any = np.array([len(row) for row in rows], np.int32)
    return on_device(Prompt(tokens, lengths))


def on_device(arrays: Any) -> Any:
    """Puts copies of the host's arrays on the device. `jnp.asarray` would compile a program for
    each shape.

    A CPU device takes over memory that it is given, where the address suits it. So it gets a copy:
    whoever called may write to the array again.

    >>> lengths = np.array([3, 5], np.int32)
    >>> copied = on_device({"length": lengths})
    >>> lengths[:] = 0
    >>> copied["length"].tolist()
    [3, 5]
    """
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else jax.device_put(np.array(x)), arrays
    )


def to_lists(tokens: Int[Array, "batch width"], length: Int[Array, " batch"]) -> list[list[int]]:
    """The real tokens of each row.

    >>> to_lists(jnp.array([[5, 6, 0], [7, 0, 0]]), jnp.array([2, 1]))
    [[5, 6], [7]]
    """
    return [row[:n].tolist() for row, n in zip(np.asarray(tokens), np.asarray(length), strict=True)]


def append(
    rows: Shaped[Array, "batch capacity *rest"],
    length: Int[Array, " batch"],
    new: Shaped[Array, "batch step *rest"],
) -> Shaped[Array, "batch capacity *rest"]:
    """Writes `step` tokens, or entries of any shape, after each row's own length.

    How many of them count is decided by the new length. With lengths (1, 2): before [[a . . .], [b
    c . .]], after [[a X Y .], [b c X Y]].
    """
    return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(
        rows, new, length
    )


def window(
    tokens: Int[Array, "batch capacity"], start: Int[Array, " batch"], width: int
) -> Int[Array, "batch width"]:
    """`width` tokens of each row from its own start.

    >>> window(jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]]), jnp.array([0, 2]), 2).tolist()
    [[1, 2], [7, 8]]
    """
    return jax.vmap(lambda row, begin: jax.lax.dynamic_slice(row, (begin,), (width,)))(
        tokens, start
    )


def tokens_at(
    tokens: Int[Array, "batch capacity"],
    position: Int[Array, " batch *positions"],
    before: int = NO_TOKEN,
) -> Int[Array, " batch *positions"]:
    """Reads the tokens at some positions of each row; `before` where a position is below 0.

    >>> tokens_at(jnp.array([[4, 5, 6], [7, 8, 9]]), jnp.array([[[-1, 0]], [[1, 2]]])).tolist()
    [[[-1, 4]], [[8, 9]]]
    """
    # One gather a row, whatever the shape of the positions.
    flat = jnp.maximum(position, 0).reshape(position.shape[0], -1)
    read = jnp.take_along_axis(tokens, flat, axis=1, mode="clip").reshape(position.shape)
    return jnp.where(position >= 0, read, before)


def num_to_commit(
    new: Int[Array, "batch step"],
    count: Int[Array, " batch"],
    remaining: Int[Array, " batch"],
    eos: Int[Array, "batch ends"],
) -> tuple[Int[Array, " batch"], Bool[Array, " batch"]]:
    """Counts how many of `count` new tokens of each row to commit, and says whether the row ends
    with them.

    A row is cut after its first end-of-sequence token, and gets no more than the tokens `remaining`
    to it. With eos (9,): new [a b 9 c], count 4, remaining 8 commits 3 and ends; new [a b c d],
    count 3, remaining 2 commits 2 and ends.

    >>> num_to_commit(jnp.array([[4, 9, 5]]), jnp.array([3]), jnp.array([8]), jnp.array([[9]]))[
    ...     0
    ... ].tolist()
    [2]
    """
    step = new.shape[1]
    # [B, step, ends] to [B, step]; without an end token the first one stands past the last new
    # token.
    is_end = jnp.any(new[:, :, None] == eos[:, None, :], axis=-1)
    first_end = jnp.where(jnp.any(is_end, axis=-1), jnp.argmax(is_end, axis=-1), step).astype(
        count.dtype
    )
    committed = jnp.minimum(jnp.minimum(count, first_end + 1), remaining)
    ended = (first_end < committed) | (committed >= remaining)
    return committed, ended


def repeat_rows(tree: Any, times: int) -> Any:
    """Repeats each row of every leaf of a pytree: before [a b], after [a a b b].

    >>> repeat_rows(jnp.array([3, 5]), 2).tolist()
    [3, 3, 5, 5]
    """
    if times == 1:
        return tree
    return map_rows(lambda x: jnp.repeat(x, times, axis=0), tree)


def where(rows: Bool[Array, " *rows"], new: Any, old: Any) -> Any:
    """Chooses between two trees of [*rows, ...], row by row.

    >>> where(jnp.array([True, False]), jnp.ones((2, 2)), jnp.zeros((2, 2))).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    return jax.tree.map(
        lambda a, b: jnp.where(jnp.expand_dims(rows, range(rows.ndim, a.ndim)), a, b), new, old
    )


def take(entries: Shaped[Array, "B T *k"], index: Int[Array, "B n"]) -> Shaped[Array, "B n *k"]:
    """Takes entries of each row.

    >>> take(jnp.array([[1, 2, 3], [4, 5, 6]]), jnp.array([[2, 0], [1, 1]])).tolist()
    [[3, 1], [5, 5]]
    """
    return jnp.take_along_axis(entries, jnp.expand_dims(index, range(2, entries.ndim)), axis=1)


def grow(leaf: Shaped[Array, "*shape"], shape: Sequence[int]) -> Shaped[Array, "*larger"]:
    """Returns an array that is at least as large as a shape on each axis, with zeros at their ends.

    >>> grow(jnp.ones((1, 2)), (1, 4)).tolist(), grow(jnp.ones((1, 2)), (1, 1)).tolist()
    ([[1.0, 1.0, 0.0, 0.0]], [[1.0, 1.0]])
    """
    more = [(0, max(0, larger - size)) for size, larger in zip(leaf.shape, shape, strict=True)]
    if any(after for _, after in more):
        return jnp.pad(leaf, more)
    return leaf


def take_rows(tree: Any, rows: Int[Array, " n"]) -> Any:
    """Takes some rows of a `core.State`, or of anything whose leaves are batch-first, in the given
    order.

    >>> take_rows({"length": jnp.array([5, 6, 7])}, jnp.array([2, 0]))["length"].tolist()
    [7, 5]
    """
    return map_rows(lambda x: x[rows], tree)


def put_rows(tree: Any, rows: Int[Array, " n"], new: Any) -> Any:
    """Replaces some rows of a state by another state's rows. Shapes agree but for the batch.

    >>> put_rows({"length": jnp.array([5, 6, 7])}, jnp.array([1]), {"length": jnp.array([9])})[
    ...     "length"
    ... ].tolist()
    [5, 9, 7]
    """
    return map_rows(lambda x, y: x.at[rows].set(y), tree, new)
