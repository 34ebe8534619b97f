"""Randomness addressed by (row, position), so that text depends on the key, the row and the
position alone.

A row key is `fold_in(key, row)`: adding rows never changes the earlier ones. Within a row, every
draw is keyed by a position, which only grows, and by a purpose. So each draw is independent of all
others. Neither the other rows of the batch, nor padding, nor the device changes it.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import Keys, programs

FEW = 16  # largest values that are sought one by one
# how far below the largest value its own may be when computed once more, in parts of it
CLOSE = (1e-6, 1e-4, 1e-2)


class Purpose(enum.IntEnum):
    """The purpose of a draw; draws for different purposes at one position are independent."""

    TOKEN = 0  # plain sampling of the token at a position
    DRAFT = 1  # draft tokens
    ACCEPT = 2  # the uniform draws by which draft tokens are accepted
    RESIDUAL = 3  # the token after the accepted ones
    LATER = 4  # the row keys of a drafter that goes on with another one's draft


def row_keys(key: Key[Array, ""] | Keys, batch: int) -> Keys:
    """Makes one key per row: `fold_in(key, row)`, or the caller's own array of keys.

    >>> row_keys(jax.random.key(0), 3).shape
    (3,)
    """
    if key.ndim == 0:
        return _keys_of_rows(key, batch)
    if key.shape != (batch,):
        raise ValueError(
            f"got keys of shape {key.shape} for {batch} rows: give one key, or one for each row"
        )
    return key


@programs.jit(static_argnames=("batch",))  # one program, not one an operation
def _keys_of_rows(key: Key[Array, ""], batch: int) -> Keys:
    # Not `split`, whose keys would depend on the number of rows.
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))


def at(keys: Keys, position: Int[Array, " batch"], purpose: Purpose) -> Keys:
    """The key of each row's draw at a position."""

    def one(key: Key[Array, ""], position: Int[Array, ""]) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(key, position), int(purpose))

    return jax.vmap(one)(keys, position)


def split(keys: Keys, first: int, count: int) -> Key[Array, "batch count"]:
    """Independent keys of each row, number `first` to `first + count - 1`: each depends on its
    number alone.

    >>> split(row_keys(jax.random.key(0), 2), 0, 3).shape
    (2, 3)
    """
    return jax.vmap(
        lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(first, first + count))
    )(keys)


def uniform(keys: Keys, count: int) -> Float[Array, "batch count"]:
    """`count` independent draws from [0, 1) per row. Not a function of `count`: draw i is the same
    for any count.

    >>> keys = row_keys(jax.random.key(0), 2)
    >>> bool((uniform(keys, 3)[:, :2] == uniform(keys, 2)).all())
    True
    """

    def draw(key: Key[Array, ""]) -> Float[Array, " count"]:
        return jax.vmap(
            lambda i: jax.random.uniform(jax.random.fold_in(key, i), dtype=jnp.float32)
        )(jnp.arange(count))

    return jax.vmap(draw)(keys)


def gumbel(keys: Key[Array, "*shape"], vocab: int) -> Float[Array, "*shape vocab"]:
    """The noise that `categorical` draws with these keys, for callers that need it again."""

    def draw(key: Key[Array, ""]) -> Float[Array, " vocab"]:
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    for _ in keys.shape:
        draw = jax.vmap(draw)
    return draw(keys)


def categorical(
    keys: Key[Array, "*shape"],
    log_probs: Float[Array, "*shape vocab"],
    used: Bool[Array, "*shape"] | None = None,
    drawn: Float[Array, "*shape vocab"] | None = None,
) -> Int[Array, "*shape"]:
    """Draws once for each key by the Gumbel-max trick; tokens of probability 0 (-inf) are never
    drawn.

    `shape` is [batch], or [batch, nodes] for several draws of each row. With `used`, only those
    draws will be looked at; nothing is drawn where none will. `drawn` is what `gumbel` has given
    for these keys, if it was called.

    >>> log_probs = jnp.log(jnp.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
    >>> categorical(row_keys(jax.random.key(0), 2), log_probs).tolist()
    [1, 2]
    """

    def draw(keys: Key[Array, "*shape"]) -> Int[Array, "*shape"]:
        return first_largest(log_probs + gumbel(keys, log_probs.shape[-1]))

    if drawn is not None:
        return first_largest(log_probs + drawn)
    if used is None:
        return draw(keys)
    # As data, because under vmap a cond selects between copies of what goes into it, which reads as
    # using a key twice.
    data = jax.random.key_data(keys)
    impl = jax.random.key_impl(keys)
    return jax.lax.cond(
        jnp.any(used),
        lambda data: draw(jax.random.wrap_key_data(data, impl=impl)),
        lambda data: jnp.zeros(keys.shape, jnp.int32),
        data,
    )


def without_replacement(
    keys: Key[Array, "*shape"], log_probs: Float[Array, "*shape vocab"], count: int
) -> Int[Array, "*shape count"]:
    """`count` draws for each key, without replacement: the Gumbel-top-k trick.

    The tokens with the largest log probability plus Gumbel noise, the largest first, are
    distributed as draws one by one (Kool, van Hoof, Welling, arXiv 1903.06059). Where fewer than
    `count` tokens have a probability, some of probability 0 come last.

    >>> log_probs = jnp.log(jnp.array([[0.0, 0.5, 0.5]]))
    >>> sorted(without_replacement(row_keys(jax.random.key(0), 1), log_probs, 2)[0].tolist())
    [1, 2]
    """
    return largest(log_probs + gumbel(keys, log_probs.shape[-1]), count)


def first_largest(
    values: Float[Array, "*shape vocab"], free: Bool[Array, "*shape vocab"] | None = None
) -> Int[Array, "*shape"]:
    """argmax in two reductions: one over pairs, into which XLA fuses what goes before, is not
    vectorised on CPU.

    With `free`, of the tokens that are.

    >>> first_largest(jnp.array([[1.0, 3.0, 3.0], [-jnp.inf, -jnp.inf, 0.0]])).tolist()
    [1, 2]
    """
    vocab = values.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    if free is None:
        allowed = values
    else:
        allowed = jnp.where(free, values, -jnp.inf)
    best = jnp.max(allowed, axis=-1, keepdims=True)
    # XLA may compute the values once for each reduction, and round them otherwise: then none equals
    # the largest, and the first of the closest group takes its place. The groups share one
    # reduction: index + vocab * group. Group 0 equals the largest; group n lies within CLOSE[n - 1]
    # of it; the last group does not count.
    group = jnp.where(allowed == best, 0, len(CLOSE) + 1)
    scale = jnp.maximum(1.0, jnp.abs(best))
    for number, gap in reversed(list(enumerate(CLOSE, 1))):
        group = jnp.where((group > 0) & (allowed >= best - gap * scale), number, group)
    if free is not None:
        group = jnp.where(free, group, len(CLOSE) + 1)
    lowest = jnp.min(index + vocab * group, axis=-1)
    # NaN is close to nothing; the last index stands for it.
    return jnp.where(lowest < vocab * (len(CLOSE) + 1), lowest % vocab, vocab - 1)


def largest(values: Float[Array, "*shape vocab"], count: int) -> Int[Array, "*shape count"]:
    """The indices of the `count` largest values, the largest first, of equal ones the lowest.

    One argmax after the other for a few: over a vocabulary that is split over devices these are
    reductions, where a sort moves the vocabulary about.

    >>> largest(jnp.array([[1.0, 3.0, 3.0, 2.0]]), 3).tolist()
    [[1, 2, 3]]
    """
    # A sort of the whole vocabulary costs more than a few passes of maxima.
    if count > FEW or not count:
        return jax.lax.top_k(values, count)[1].astype(jnp.int32)
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    chosen = []
    free = jnp.ones(values.shape, bool)
    for _ in range(count):
        # Of tokens that are all -inf the lowest that is left: as with a sort, none comes twice.
        chosen.append(first_largest(values, free))
        free = free & (index != chosen[-1][..., None])
    return jnp.stack(chosen, axis=-1)
