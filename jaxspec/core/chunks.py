"""Reads long rows chunk by chunk through a model's own `extend`, in one loop with one compiled
body.

A pass over P tokens makes scores [batch, heads, P, P]. P / C passes over C tokens make scores
[batch, heads, C, P], one after the other in the same memory. The other intermediate arrays of a
pass, such as the hidden layers of feed-forward blocks, are C tokens wide, too.

Shapes: B batch, P prompt, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.core import kv_cache, token_rows
from jaxspec.core.language_model import (
    Before,
    Cache,
    Extend,
    Forward,
    LanguageModel,
    Params,
    Prefill,
    Prompt,
    Rewind,
    Room,
)

# A pass over 512 tokens is bound by arithmetic on every backend (one over few tokens is bound by
# reading the weights), so wider ones are not faster, and it is the least for which that holds with
# room to spare: a TPU v5e reads a byte of weights in the time of 240 operations on it, which is
# some 240 tokens of bfloat16.
LONGEST = 512
MULTIPLE = 16  # of tokens in a chunk, where that fills them: the rows of a TPU's tile in bfloat16

PassOutputs = Any
"""A pytree of arrays [B, T, ...]: what a pass makes at each of the T positions that it is fed."""


def split(length: int) -> tuple[int, int]:
    """Returns how many tokens a chunk has, and how many chunks hold `length` tokens: equal ones, of
    at most LONGEST.

    The chunks of a bucket (`token_rows.bucket`) are filled exactly, so they need no more room in a
    cache.

    >>> split(300), split(1280), split(8192), split(8191)
    ((300, 1), (320, 4), (512, 16), (512, 16))
    """
    fewest = max(1, -(-length // LONGEST))
    for count in range(fewest, 2 * fewest):
        if fewest == 1 or length % (count * MULTIPLE) == 0:
            return length // count, count
    size = -(-length // fewest)
    return size, -(-length // size)


def read(
    extend: Callable[[Cache, Any, Int[Array, " B"]], tuple[PassOutputs, Cache]],
    rewind: Rewind,
    empty: Callable[[int, Room], Cache],
    rows: Any,
    length: Int[Array, " B"],
    room: Room,
    before: Before | None = None,
) -> tuple[PassOutputs, PassOutputs, Cache]:
    """Feeds right-padded rows to an empty cache, in chunks if they are long, and in one pass if
    they are not.

    With `before` the cache is not empty, but holds what precedes them. Chunks that hold nothing but
    padding are not read. The loop cannot be differentiated in reverse; networks train on passes
    over whole rows.

    Args:
        extend: (cache, C further entries of each row, how many of them are real) -> (outputs,
            cache): a pass at each row's own length. See `core.Extend`.
        empty: makes an empty cache for (batch, room).
        rows: a pytree of arrays [B, P, ...], such as the tokens.
        length: how many entries of each row are real, at least 1; with `before` those that were
            read before count.
        room: the room of the cache, which may get a few entries more.
        before: a cache of what precedes `rows`; None: nothing does.

    Returns:
        The outputs at all P positions, garbage at padding; those at each row's last entry, [B, 1,
        ...]; and a cache of `length` entries. A compiled program keeps those at all positions only
        if they are read.

    Example:
        >>> def total(cache, tokens, real):  # the "cache" is the sum of a row and its length
        ...     sums = cache[0][:, None] + jnp.cumsum(tokens, axis=1)
        ...     return sums, (sums[:, -1], cache[1] + tokens.shape[1])
        >>> empty = lambda batch, room: (
        ...     jnp.zeros((batch,), jnp.int32),
        ...     jnp.zeros((batch,), jnp.int32),
        ... )
        >>> rewind = lambda cache, length: (cache[0], length)
        >>> tokens = jnp.ones((1, 1030), jnp.int32)
        >>> _, last, cache = read(total, rewind, empty, tokens, jnp.array([1025]), Room(1040))
        >>> last.tolist(), cache[1].tolist()
        ([[1025]], [1025])
    """
    batch, width = jax.tree.leaves(rows)[0].shape[:2]
    size, count = split(width)
    if before is None:
        begin = jnp.zeros_like(length)
        cache = empty(batch, Room(max(room.tokens, size * count), room.rewind))
    else:
        begin = before.start
        cache = rewind(enlarged(before.state, empty, batch, room), before.start)
    if count == 1:
        outputs, cache = extend(cache, rows, length - begin)
        return outputs, at(outputs, length - 1 - begin), rewind(cache, length)

    def part(start: Int[Array, ""]) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1), padded)

    padded = jax.tree.map(
        lambda x: jnp.pad(x, [(0, 0), (0, size * count - width)] + [(0, 0)] * (x.ndim - 2)), rows
    )
    # The loop's carry must keep its dtypes, and a model may widen its cache in the first pass.
    shapes, grown = jax.eval_shape(lambda: extend(cache, part(jnp.zeros((), jnp.int32)), length))
    cache = jax.tree.map(lambda x, shape: x.astype(shape.dtype), cache, grown)
    filled = jax.tree.map(lambda x: jnp.zeros((batch, size * count, *x.shape[2:]), x.dtype), shapes)
    last = jax.tree.map(lambda x: jnp.zeros((batch, 1, *x.shape[2:]), x.dtype), shapes)

    def body(
        index: Int[Array, ""], carry: tuple[PassOutputs, PassOutputs, Cache]
    ) -> tuple[PassOutputs, PassOutputs, Cache]:
        filled, last, cache = carry
        start = index * size
        # Rows that have ended stay at their length. They are fed padding there, which is before
        # `start + size`.
        outputs, cache = extend(cache, part(start), jnp.clip(length - begin - start, 0, size))
        cache = rewind(cache, jnp.minimum(length, begin + start + size))
        filled = jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, axis=1),
            filled,
            outputs,
        )
        offset = length - 1 - begin - start  # of a row's last entry in this chunk
        is_inside = (offset >= 0) & (offset < size)
        new = at(outputs, jnp.clip(offset, 0, size - 1))
        last = jax.tree.map(
            lambda old, x: jnp.where(jnp.expand_dims(is_inside, range(1, x.ndim)), x, old),
            last,
            new,
        )
        return filled, last, cache

    # Padding that no row reaches is not read: the loop ends with the longest row.
    needed = (jnp.max(length - begin) + (size - 1)) // size
    filled, last, cache = jax.lax.fori_loop(0, needed, body, (filled, last, cache))
    return jax.tree.map(lambda x: x[:, :width], filled), last, cache


def prefill(extend: Extend, rewind: Rewind, empty: Callable[[int, Room], Cache]) -> Prefill:
    """Makes the `prefill` of a decoder-only model of its other functions, which reads long prompts
    in chunks.

    `empty` makes an empty cache for (batch, room).

    Example:
        >>> from jaxspec.core import Forward, LanguageModel, Prompt
        >>> def extend(
        ...     params, cache, tokens, parent=None, real=None
        ... ):  # a bigram model; its "cache" is the length
        ...     return Forward(params[tokens]), cache + tokens.shape[1]
        >>> rewind, empty = (
        ...     lambda cache, length: length,
        ...     lambda batch, room: jnp.zeros((batch,), jnp.int32),
        ... )
        >>> lm = LanguageModel(prefill(extend, rewind, empty), extend, rewind, vocab_size=3)
        >>> forward, cache = lm.prefill(
        ...     jnp.eye(3), Prompt(jnp.array([[0, 2, 0]]), jnp.array([2])), Room(8)
        ... )
        >>> forward.logits.tolist(), cache.tolist()
        ([[[0.0, 0.0, 1.0]]], [2])
    """

    def read_prompt(params: Params, prompt: Prompt, room: Room) -> tuple[Forward, Cache]:
        def feed(
            cache: Cache, tokens: Int[Array, "B C"], real: Int[Array, " B"]
        ) -> tuple[Forward, Cache]:
            return extend(params, cache, tokens, real=real)

        forward, last, cache = read(feed, rewind, empty, prompt.tokens, prompt.length, room)
        return forward._replace(logits=last.logits), cache

    return read_prompt


def resume(
    lm: LanguageModel, params: Params, before: Before, prompt: Prompt, room: Room
) -> tuple[Forward, Cache]:
    """Continues prompts whose beginning was read before. Returns the same as `core.Prefill`
    returns.

    Features and taps are those of `before.width` positions from `before.start` on.

    Example:
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(0), vocab=3)
        >>> _, cache = model.lm.prefill(
        ...     model.params, Prompt(jnp.array([[1, 2]]), jnp.array([2])), Room(2)
        ... )
        >>> prompt = Prompt(jnp.array([[1, 2, 0, 0]]), jnp.array([3]))
        >>> forward, cache = resume(
        ...     model.lm, model.params, Before(cache, jnp.array([1]), width=2), prompt, Room(6)
        ... )
        >>> (
        ...     bool((forward.logits[0, 0] == model.params[2, 0]).all()),
        ...     cache.length.tolist(),
        ...     cache.tokens.tolist(),
        ... )
        (True, [3], [[1, 2, 0, 0, 0, 0]])
    """

    def feed(
        cache: Cache, tokens: Int[Array, "B C"], real: Int[Array, " B"]
    ) -> tuple[Forward, Cache]:
        forward, cache = lm.extend(params, cache, tokens, real=real)
        return (
            forward if lm.inside is None else forward._replace(logits=forward.features[..., :0])
        ), cache

    def empty(batch: int, room: Room) -> Cache:
        return empty_cache(lm, params, batch, room)

    tokens = token_rows.window(prompt.tokens, before.start, before.width)
    forward, last, cache = read(feed, lm.rewind, empty, tokens, prompt.length, room, before)
    if lm.inside is None:
        logits = last.logits
    else:
        logits = lm.inside.head(params, last.features)
    return forward._replace(logits=logits), cache


def empty_cache(lm: LanguageModel, params: Params, batch: int, room: Room) -> Cache:
    """Makes a cache that is to be looked at for its shapes alone: it holds a token."""
    prompt = Prompt(jnp.zeros((batch, 1), jnp.int32), jnp.ones((batch,), jnp.int32))
    return lm.prefill(params, prompt, room)[1]


def enlarged(cache: Cache, empty: Callable[[int, Room], Cache], batch: int, room: Room) -> Cache:
    """Returns a cache with at least some room: zeros at the end of leaves that depend on it.

    It is never made smaller. Entries past a row's length are never read, so zeros serve as well as
    an empty cache's entries.

    >>> enlarged(
    ...     jnp.ones((1, 2)),
    ...     lambda batch, room: jnp.zeros((batch, room.tokens)),
    ...     batch=1,
    ...     room=Room(4),
    ... ).tolist()
    [[1.0, 1.0, 0.0, 0.0]]
    """

    def enlarge(leaf: Any, shape: Any) -> Any:
        if isinstance(leaf, kv_cache.KVCache):
            return kv_cache.fitted(leaf, shape)
        return token_rows.grow(leaf, shape.shape)

    # Shapes alone: no second cache is made to find out how large one would be.
    larger = jax.eval_shape(lambda: empty(batch, room))
    return jax.tree.map(
        enlarge, cache, larger, is_leaf=lambda node: isinstance(node, kv_cache.KVCache)
    )


def at(outputs: PassOutputs, index: Int[Array, " B"]) -> PassOutputs:
    """Takes one position of each row: [B, 1, ...]."""
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, jnp.expand_dims(index, range(1, x.ndim)), axis=1), outputs
    )
