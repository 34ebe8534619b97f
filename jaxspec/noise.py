"""Randomness addressed by (row, position), so that text depends on the key, the row and the position alone.

A row key is `fold_in(key, row)`: adding rows never changes the earlier ones. Within a row, every draw is keyed by a
position, which only grows, and by a purpose; so each draw of each round is fresh and independent of all others,
whatever else is in the batch, however it is padded and wherever it runs.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.base import Keys


class Purpose(enum.IntEnum):
    """What a draw is for; draws for different purposes at one position are independent."""

    TOKEN = 0  # plain sampling of the token at a position
    DRAFT = 1  # a drafter's guesses
    COIN = 2  # accept or reject
    RESIDUAL = 3  # the token after the accepted ones


def row_keys(key: Key[Array, ""] | Keys, batch: int) -> Keys:
    """One key per row: `fold_in(key, row)`, or the caller's own array of keys.

    Raises:
        ValueError: an array of keys whose length is not the batch's.

    >>> row_keys(jax.random.key(0), 3).shape
    (3,)
    """
    if key.ndim == 0:
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))
    if key.shape != (batch,):
        raise ValueError(f"got keys of shape {key.shape} for {batch} prompts: give one key, or one key per prompt")
    return key


def at(keys: Keys, position: Int[Array, " batch"], purpose: Purpose) -> Keys:
    """The key of each row's draw at a position."""

    def one(key: Key[Array, ""], at: Int[Array, ""]) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(key, at), int(purpose))

    return jax.vmap(one)(keys, position)


def uniform(keys: Keys, count: int) -> Float[Array, "batch count"]:
    """`count` independent draws from [0, 1) per row. Not a function of `count`: draw i is the same for any count.

    >>> keys = row_keys(jax.random.key(0), 2)
    >>> bool((uniform(keys, 3)[:, :2] == uniform(keys, 2)).all())
    True
    """

    def one(key: Key[Array, ""]) -> Float[Array, " count"]:
        return jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(jnp.arange(count))

    return jax.vmap(one)(keys)


def gumbel(keys: Keys, vocab: int) -> Float[Array, "batch vocab"]:
    """The noise that `categorical` draws with these keys: for whoever wants to keep it."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(keys)


def categorical(
    keys: Keys,
    log_probs: Float[Array, "batch vocab"],
    wanted: Bool[Array, " batch"] | None = None,
    drawn: Float[Array, "batch vocab"] | None = None,
) -> Int[Array, " batch"]:
    """One draw per row by the Gumbel-max trick; tokens of probability 0 (-inf) are never drawn.

    With `wanted`, only those rows' draws will be looked at; nothing is drawn where no row's will. `drawn` is what
    `gumbel` has given for these keys, if it has been asked.

    >>> log_probs = jnp.log(jnp.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
    >>> categorical(row_keys(jax.random.key(0), 2), log_probs).tolist()
    [1, 2]
    """

    def draw(keys: Keys) -> Int[Array, " batch"]:
        return first_largest(log_probs + gumbel(keys, log_probs.shape[-1]))

    if drawn is not None:
        return first_largest(log_probs + drawn)
    if wanted is None:
        return draw(keys)
    # As data, because under vmap a cond selects between copies of what goes into it, which reads as using a key twice.
    data, impl = jax.random.key_data(keys), jax.random.key_impl(keys)
    return jax.lax.cond(
        jnp.any(wanted),
        lambda data: draw(jax.random.wrap_key_data(data, impl=impl)),
        lambda data: jnp.zeros(data.shape[:1], jnp.int32),
        data,
    )


def first_largest(values: Float[Array, "*shape vocab"]) -> Int[Array, "*shape"]:
    """argmax in two reductions: one over pairs, into which XLA fuses what goes before, is not vectorised on CPU.

    >>> first_largest(jnp.array([[1.0, 3.0, 3.0], [-jnp.inf, -jnp.inf, 0.0]])).tolist()
    [1, 2]
    """
    vocab = values.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.min(jnp.where(values == jnp.max(values, axis=-1, keepdims=True), index, vocab - 1), axis=-1)
