"""Language models whose distribution is a table, and the distribution of plain sampling's
sequences.

Axis letters as in `jaxspec.core`; O is the order of a table (how many tokens it looks at), N a
number of rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxspec import core
from jaxspec.core import programs, token_rows

if TYPE_CHECKING:
    from jaxspec.decode.request import Prepared

# sequences of new tokens, and the probability of each
SequenceDistribution = dict[tuple[int, ...], float]


class TableConfig(NamedTuple):
    """The kind of table that a table model's parameters are."""

    vocab: int  # number of token ids
    order: int  # the number of tokens of the row that the next one depends on
    # whether it is an encoder-decoder; it knows its prompt by the sum of the tokens modulo vocab
    encoder: bool


class TableCache(NamedTuple):
    """The tokens of each row, their number, and the encoder's input (0 without an encoder)."""

    tokens: Int[Array, "batch capacity"]
    length: Int[Array, " batch"]
    topic: Int[Array, " batch"]


def table_model(
    key: Key[Array, ""],
    vocab: int,
    order: int = 2,
    *,
    sharpness: float = 1.0,
    encoder: bool = False,
) -> core.Model:
    """Makes a model whose next token depends on the last `order` tokens of its row, through a
    random table.

    It keeps its row in a cache as a network does: prefill, extend (token trees too), select and
    rewind at each row's own length, with garbage after it. A row that outgrows the cache gets NaN
    logits, not a clamped write. Its features are the number of the table's row that the logits are
    read from, its taps the tokens that were looked at.

    Args:
        key: the random key of the table.
        vocab: number of token ids.
        order: how many tokens it looks back; those before the beginning of the row count as token
            0.
        sharpness: standard deviation of the logits; 0 is the uniform distribution, 10 nearly
            deterministic.
        encoder: an encoder-decoder (start token 0), whose distribution depends on the prompt's sum
            modulo `vocab` too.

    Example:
        >>> model = table_model(jax.random.key(0), vocab=3, order=2)
        >>> prompt = core.Prompt(jnp.array([[1, 2, 1, 0], [1, 2, 0, 0]]), jnp.array([3, 2]))
        >>> forward, cache = model.lm.prefill(model.params, prompt, core.Room(6))
        >>> bool((forward.logits[0, 0] == model.params[2, 1]).all()), cache.length.tolist()
        (True, [3, 2])
    """
    shape = (vocab,) * (order + int(encoder) + 1)
    return table_model_from(sharpness * jax.random.normal(key, shape, jnp.float32), encoder=encoder)


def table_model_from(table: Float[Array, " ..."], *, encoder: bool = False) -> core.Model:
    """Makes a model of a table of logits; see `table_model`.

    Args:
        table: `table[t2, t1]` [V] are the logits of what follows the tokens t2 t1; as many axes
            before the last as the order, and with `encoder` one more in front, for the prompt's
            sum. -inf is probability 0. A table [V] is a model that looks at nothing.
        encoder: whether it has an encoder, as in `table_model`.

    Raises:
        ValueError: axes of different sizes.

    Example:
        >>> toy = table_model_from(jnp.log(jnp.array([0.5, 0.3, 0.2])))
        >>> toy.config
        TableConfig(vocab=3, order=0, encoder=False)
    """
    table = jnp.asarray(table, jnp.float32)
    if table.ndim < 1 + int(encoder) or len(set(table.shape)) != 1:
        raise ValueError(
            f"the table has shape {table.shape}: expected [vocab] for each token looked at, then "
            "[vocab]"
        )
    config = TableConfig(table.shape[-1], table.ndim - 1 - int(encoder), encoder)
    return core.Model(_language_model(config), table, None, config, f"table-{config.vocab}")


@functools.lru_cache
def _language_model(config: TableConfig) -> core.LanguageModel:
    vocab, order, encoder = config

    def read(
        table: Array, cache: TableCache, slot: Int[Array, "B T O"], last: Int[Array, "B K"]
    ) -> core.Forward:
        """Reads the logits after T tokens, whose O last ones lie at `slot`; only those after the K
        tokens `last`.
        """
        flat = jnp.maximum(slot, 0).reshape(slot.shape[0], -1)
        last_ids = jnp.take_along_axis(cache.tokens, flat, axis=1, mode="clip").reshape(slot.shape)
        context = jnp.where(slot >= 0, last_ids, 0)
        index = jnp.broadcast_to(cache.topic[:, None], slot.shape[:2])
        for token in range(order):
            index = index * vocab + context[:, :, token]
        logits = table.reshape(-1, vocab)[jnp.take_along_axis(index, last, axis=1)]
        return core.Forward(
            logits, index[..., None].astype(jnp.float32), context.astype(jnp.float32)
        )

    def prefill(
        params: Array, prompt: core.Prompt, room: core.Room
    ) -> tuple[core.Forward, TableCache]:
        capacity = room.tokens
        row, length, topic = prompt.tokens, prompt.length, jnp.zeros_like(prompt.length)
        if encoder:
            real = jnp.arange(row.shape[1], dtype=length.dtype)[None, :] < length[:, None]
            topic = jnp.sum(jnp.where(real, row, 0), axis=1).astype(length.dtype) % vocab
            row = jnp.zeros_like(row[:, :1])
            length = jnp.ones_like(length)
        if capacity < row.shape[1]:
            raise ValueError(
                f"capacity is {capacity}: too small for a row of {row.shape[1]} tokens"
            )
        cache = TableCache(jnp.pad(row, ((0, 0), (0, capacity - row.shape[1]))), length, topic)
        slot = _last_tokens(jnp.zeros_like(length), row.shape[1], order)
        return read(params, cache, slot, length[:, None] - 1), cache

    def extend(
        params: Array,
        cache: TableCache,
        tokens: Int[Array, "B T"],
        parent: Int[Array, "B N"] | None = None,
        real: Int[Array, " B"] | None = None,  # whoever gives it rewinds to it
    ) -> tuple[core.Forward, TableCache]:
        step = tokens.shape[1]
        capacity = cache.tokens.shape[1]
        written = cache._replace(
            tokens=token_rows.append(cache.tokens, cache.length, tokens.astype(cache.tokens.dtype))
        )
        positions = jnp.broadcast_to(jnp.arange(step, dtype=jnp.int32)[None, :], tokens.shape)
        forward = read(params, written, _last_tokens(cache.length, step, order, parent), positions)
        fits = (cache.length + step <= capacity)[:, None, None]
        forward = forward._replace(logits=jnp.where(fits, forward.logits, jnp.nan))
        return forward, written._replace(length=cache.length + step)

    def rewind(cache: TableCache, length: Int[Array, " B"]) -> TableCache:
        return cache._replace(length=length)

    def select(cache: TableCache, start: Int[Array, " B"], path: Int[Array, "B D"]) -> TableCache:
        slot = jnp.arange(cache.tokens.shape[1], dtype=jnp.int32)[None, :] - start[:, None]
        moved = jnp.take_along_axis(path, slot, axis=1, mode="clip").astype(jnp.int32)
        source = jnp.where((slot >= 0) & (slot < path.shape[1]), moved, slot) + start[:, None]
        return cache._replace(tokens=jnp.take_along_axis(cache.tokens, source, axis=1, mode="clip"))

    limits = core.Limits(start_token=0 if encoder else None)
    return core.LanguageModel(prefill, extend, rewind, vocab, select, limits, is_causal=True)


def _last_tokens(
    length: Int[Array, " B"], step: int, order: int, parent: Int[Array, "B N"] | None = None
) -> Int[Array, "B T O"]:
    """Finds the slots of the last `order` tokens of each fed token's path, oldest first; negative:
    before the row.

    Three tokens after a row of length 5, of order 2: a chain gives [[4 5], [5 6], [6 7]], a token
    with two children [[4 5], [5 6], [5 7]].
    """
    # nodes of the tree that were fed earlier
    before = 0 if parent is None else parent.shape[1] - step
    node = jnp.broadcast_to(
        jnp.arange(before, before + step, dtype=jnp.int32)[None, :], (length.shape[0], step)
    )
    path = jnp.zeros((*node.shape, 0), jnp.int32)
    for _ in range(order):
        path = jnp.concatenate([node[..., None], path], axis=-1)
        above = node - 1
        if parent is not None:  # whose nodes follow the tokens before the tree where it is -1
            above = jnp.where(
                node >= 0, jnp.take_along_axis(parent, jnp.maximum(node, 0), axis=1), above
            )
        node = above
    return path + (length - before)[:, None, None]


def plain_distribution(
    target: core.Model,
    prompt: core.Prompt,
    sampler: core.Sampler,
    sampling_params: Any,
    steps: int,
    eos: Sequence[int] = (),
) -> SequenceDistribution:
    """Computes the distribution of plain sampling's first `steps` tokens: the product of the
    next-token distributions.

    A table model's logits are read off its table in numpy, without its prefill and extend. Any
    other model gets whole sequences in one pass, without rewinding a cache. The sampler makes each
    next-token distribution separately, after a row assembled in numpy without draft tokens.
    Products are in float64.

    Args:
        target: a model with few enough tokens: every sequence is visited.
        prompt: one row.
        sampler, sampling_params: logits to distributions, and its parameters, which have one row.
        steps: tokens.
        eos: tokens that end a sequence; such sequences are shorter tuples.

    Example:
        >>> from jaxspec.sampling import SamplingParams, at_temperature
        >>> toy = table_model_from(jnp.log(jnp.array([0.5, 0.3, 0.2])))
        >>> one = SamplingParams(jnp.ones(1))
        >>> prompt = core.Prompt(jnp.array([[0]]), jnp.array([1]))
        >>> distribution = plain_distribution(toy, prompt, at_temperature(), one, steps=2, eos=(2,))
        >>> {
        ...     tokens: round(distribution[tokens], 3)
        ...     for tokens in sorted(distribution)
        ...     if tokens[0] != 1
        ... }
        {(0, 0): 0.25, (0, 1): 0.15, (0, 2): 0.1, (2,): 0.2}
    """
    vocab = target.lm.vocab_size
    contexts = np.array(list(itertools.product(range(vocab), repeat=steps - 1)), np.int32)
    if isinstance(target.config, TableConfig):
        read = _table_logits
    else:
        read = _network_logits
    logits = read(target, prompt, contexts)
    one_each = token_rows.map_rows(
        lambda x: np.repeat(np.asarray(x), len(contexts) * steps, axis=0), sampling_params
    )
    distribution = jax.jit(sampler)(
        one_each, logits.reshape(-1, 1, vocab), _preceding(target.lm, prompt, contexts)
    )
    next_probs = _probabilities(distribution, vocab).reshape(logits.shape)
    digit_weights = vocab ** np.arange(steps - 1)[::-1]

    ended: SequenceDistribution = {}
    live: SequenceDistribution = {(): 1.0}
    for done in range(steps):
        # The probability of x continued by zeros.
        probs = {x: next_probs[int(np.dot(x, digit_weights[:done])), done] for x in live}
        longer = {
            (*x, t): p * float(q) for x, p in live.items() for t, q in enumerate(probs[x]) if q > 0
        }
        ended |= {x: p for x, p in longer.items() if x[-1] in eos}
        live = {x: p for x, p in longer.items() if x[-1] not in eos}
    return ended | live


def _preceding(
    lm: core.LanguageModel, prompt: core.Prompt, new: Int[np.ndarray, "N t"]
) -> core.Preceding:
    """Makes the prefix of each of t + 1 tokens, the prompt and 0, 1, ... of the new ones, a row for
    each.
    """
    read = np.asarray(prompt.tokens)[0, : int(prompt.length[0])]
    if lm.limits.start_token is not None:
        read = np.array([lm.limits.start_token], np.int32)
    complete = np.concatenate([np.tile(read, (len(new), 1)), new], axis=1)
    rows = np.repeat(complete, new.shape[1] + 1, axis=0)
    length = np.tile(np.arange(new.shape[1] + 1, dtype=np.int32) + len(read), len(new))
    start = np.full_like(length, len(read))
    return core.Preceding(core.Prompt(jnp.asarray(rows), jnp.asarray(length)), jnp.asarray(start))


def _probabilities(distribution: core.Distribution, vocab: int) -> Float[np.ndarray, "N T V"]:
    if distribution.log_probs is None:
        return np.eye(vocab)[np.asarray(distribution.tokens)]
    probs = np.exp(np.asarray(distribution.log_probs, np.float64))
    return probs / probs.sum(axis=-1, keepdims=True)


def _table_logits(
    target: core.Model, prompt: core.Prompt, new: Int[np.ndarray, "N t"]
) -> Float[np.ndarray, "N t+1 V"]:
    """Reads the logits after the prompt and 0, 1, ... of the new tokens, straight from the
    table.
    """
    _, order, encoder = target.config
    table = np.asarray(target.params)
    read = np.asarray(prompt.tokens)[0, : int(prompt.length[0])]
    if encoder:
        table = table[read.sum() % table.shape[0]]
    row = np.zeros(1, np.int32) if encoder else read
    rows = np.concatenate(
        [np.tile(np.append(np.zeros(order, np.int32), row), (len(new), 1)), new], axis=1
    )
    ends = np.arange(new.shape[1] + 1) + order + row.size
    context = tuple(rows[:, ends - back] for back in range(order, 0, -1))
    return np.broadcast_to(table[context], (len(new), len(ends), table.shape[-1]))


def _network_logits(
    target: core.Model, prompt: core.Prompt, new: Int[np.ndarray, "N t"]
) -> Float[np.ndarray, "N t+1 V"]:
    """Computes the same for any model, from one prefill and one extend."""
    many = jax.tree.map(lambda x: np.repeat(np.asarray(x), len(new), axis=0), prompt)
    return np.asarray(_network(target.lm, target.params, many, jnp.asarray(new)), np.float32)


@programs.jit(static_argnames=("lm",))
def _network(
    lm: core.LanguageModel, params: Any, prompt: core.Prompt, new: Int[Array, "N t"]
) -> Float[Array, "N t+1 V"]:
    first, cache = lm.prefill(params, prompt, token_rows.reading_room(lm, prompt, new.shape[1]))
    if new.shape[1] == 0:
        return first.logits
    return jnp.concatenate([first.logits, lm.extend(params, cache, new)[0].logits], axis=1)


def prepared_table(**options: Any) -> Prepared:
    """Prepares a small generation for examples: two table models over five tokens, two prompts,
    greedy.

    `options` as in `prepare`.

    >>> prepared_table(gamma=2).prompt.length.tolist()
    [2, 1]
    """
    from jaxspec.decode.request import prepare

    target, draft = (table_model(jax.random.key(seed), vocab=5) for seed in (1, 2))
    prompt = core.Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))
    arguments: dict[str, Any] = {"drafter": draft, **options}
    return prepare(target, prompt, **arguments)
