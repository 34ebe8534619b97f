"""Networks that take their cache as an argument and write at its `end_index`: Tunix's, gemma's.

Their index is one number for all rows. Here each row is run by itself under `vmap`, so each has its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from jaxspec.core import LanguageModel, Model, Params
from jaxspec.core import kv_cache as kv
from jaxspec.nets.adapters.functions import EmptyCache, by_row, from_function

# Fields of a Tunix config that give some layers a window.
WINDOWS = ("sliding_window_size", "sliding_window")


def from_end_index(
    call: Callable[..., tuple[Any, Any]],
    vocab_size: int,
    init_cache: EmptyCache,
    *,
    index: str = "end_index",
    one_by_one: bool = False,
    max_positions: int | None = None,
) -> LanguageModel:
    """Makes a language model of a network with keys, values and an `end_index` in each layer's
    cache.

    Args:
        call: (params, tokens [1, T], positions [1, T], cache, mask [1, T, S]) -> (logits [1, T,
            vocab], cache). It writes T entries from the index on, and attends to the entries that
            the mask shows, of S in the cache.
        vocab_size: the width of its logits.
        init_cache: (batch, capacity) -> the cache of so many rows: `index` in each layer, and
            arrays [batch, capacity, ...].
        index: the name of the index.
        one_by_one: whether it takes one token at a time only, as a network does that counts its
            window within the pass. Passes over several are then loops, exact, but no faster than
            plain decoding, and the model takes no token trees.
        max_positions: longest row it can hold; None for no limit.

    Raises:
        ValueError: at trace time: the cache has no such index, or a layer of it holds fewer than
            `capacity` entries (a ring); as `from_function`.

    Example: `from_tunix` and `from_gemma` are two.
    """

    def is_index(path: tuple[Any, ...]) -> bool:
        return jax.tree_util.keystr(path[-1:], simple=True) == index

    def empty(batch: int, capacity: int) -> Any:
        row = jax.eval_shape(lambda: init_cache(1, capacity))
        _check_cache(row, capacity, index, is_index)
        return jax.tree.map(lambda x: jnp.zeros((batch, *x.shape), x.dtype), row)

    def at(cache: Any, length: Int[Array, ""]) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: jnp.full(x.shape, length, x.dtype) if is_index(path) else x, cache
        )

    def capacity_of(cache: Any) -> int:
        """Counts the entries of a row's cache, whose arrays are [1, capacity, ...]."""
        leaves = jax.tree_util.tree_leaves_with_path(cache)
        return next(x.shape[1] for path, x in leaves if not is_index(path) and x.ndim > 1)

    def step(
        params: Params, cache: Any, token: Int[Array, "1 1"], length: Int[Array, ""]
    ) -> tuple[Array, Any]:
        seen = jnp.arange(capacity_of(cache)) <= length
        return call(params, token, length[None, None], at(cache, length), seen[None, None])

    def apply(
        params: Params,
        cache: Any,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        *,
        length: Int[Array, " B"],
        parent: Int[Array, "B N"] | None,
    ) -> tuple[Array, Any]:
        capacity = capacity_of(jax.tree.map(lambda x: x[0], cache))
        seen = kv.mask(length, tokens.shape[1], capacity, parent)
        seen = jnp.broadcast_to(seen, (len(tokens), *seen.shape[-2:]))

        def row(
            cache: Any,
            tokens: Int[Array, " T"],
            positions: Int[Array, " T"],
            length: Int[Array, ""],
            seen: Bool[Array, "T S"],
        ) -> tuple[Array, Any]:
            logits, cache = call(
                params, tokens[None], positions[None], at(cache, length), seen[None]
            )
            return logits[0], cache

        return jax.vmap(row)(cache, tokens, positions, length, seen)

    def select(cache: Any, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Any:
        def row(x: Array, start: Int[Array, ""], path: Int[Array, " D"]) -> Array:
            if x.ndim < 2:  # an index
                return x
            return jax.lax.dynamic_update_slice_in_dim(x, x[:, start + path], start, axis=1)

        return jax.tree.map(lambda x: jax.vmap(row)(x, start, path), cache)

    if one_by_one:
        return from_function(
            by_row(step, one_by_one=True),
            vocab_size,
            empty_cache=empty,
            max_positions=max_positions,
        )
    return from_function(
        apply, vocab_size, empty_cache=empty, select=select, max_positions=max_positions
    )


def _check_cache(
    row: Any, capacity: int, index: str, is_index: Callable[[tuple[Any, ...]], bool]
) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(row)
    if not any(is_index(path) for path, _ in leaves):
        names = sorted({jax.tree_util.keystr(path[-1:], simple=True) for path, _ in leaves})
        raise ValueError(
            f"the cache has {', '.join(names) or 'nothing'} in its layers: expected {index}, the "
            "index of the next entry (index= gives it another name)"
        )
    for path, x in leaves:
        if not is_index(path) and x.ndim > 1 and x.shape[:2] != (1, capacity):
            raise ValueError(
                f"the cache{jax.tree_util.keystr(path)} has the shape {list(x.shape)} for 1 row of "
                f"{capacity} entries: expected [1, {capacity}, ...]. A ring of fewer entries "
                "cannot be rewound: load the model with jaxspec.load or jaxspec.from_arrays"
            )


def from_tunix(
    module: nnx.Module, *, dtype: DTypeLike | None = None, one_by_one: bool | None = None
) -> Model:
    """Makes a model of a network of google-tunix's zoo: Llama 3, Qwen 2 and 3, Gemma 2 and 3.

    The model computes what Tunix computes, so it is the one for rollouts of a trainer. After a step
    of training, `model._replace(params=nnx.split(module)[1])` is the new policy; nothing is
    compiled again.

    Args:
        module: called as (tokens, positions, cache, attention_mask) -> (logits, cache).
        dtype: the dtype of keys and values; by default that of the parameters.
        one_by_one: whether it takes one token at a time only, see `from_end_index`. By default it
            is on for a network with a window: Tunix's Gemma counts the window within a pass.

    Raises:
        TypeError: the module is no NNX module with a config.
        ValueError: at trace time: see `from_end_index`.

    Example:
        >>> model = from_tunix(module)  # doctest: +SKIP
        >>> jaxspec.generate(model, [[2, 7, 1]], drafter="prompt_lookup")  # doctest: +SKIP
    """
    config = getattr(module, "config", None)
    if not isinstance(module, nnx.Module) or config is None:
        raise TypeError(
            f"the module is of type {type(module).__name__}: expected a network of google-tunix, "
            "an NNX module with a config"
        )
    graph, params = nnx.split(module)
    if dtype is None:
        floats = [x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
        dtype = floats[0]
    if one_by_one is None:
        one_by_one = any(getattr(config, name, None) is not None for name in WINDOWS)

    def call(params: Params, *arguments: Any) -> tuple[Any, Any]:
        logits, cache, *_ = nnx.merge(graph, params)(*arguments)
        return logits, cache

    def init_cache(batch: int, capacity: int) -> Any:
        make = getattr(module, "init_cache", None)
        if make is not None:
            return make(batch, capacity, dtype)
        entry = jnp.zeros((batch, capacity, config.num_kv_heads, config.head_dim), dtype)
        layer = {"k": entry, "v": entry, "end_index": jnp.zeros(batch, jnp.int32)}
        return {f"layer_{i}": layer for i in range(config.num_layers)}

    vocab_size = getattr(config, "vocab_size", None) or config.num_embed
    lm = from_end_index(call, vocab_size, init_cache, one_by_one=one_by_one)
    return Model(lm, params, name=type(module).__name__)


def from_gemma(module: Any, params: Params, *, dtype: DTypeLike = jnp.float32) -> Model:
    """Makes a model of a network of Google DeepMind's gemma, such as `gm.nn.Gemma3_1B()`.

    Args:
        module: the Linen module.
        params: its parameters, as `gm.ckpts.load_params` returns them.
        dtype: the dtype of keys and values.

    Raises:
        ValueError: at trace time: see `from_end_index`.

    Example:
        >>> params = gm.ckpts.load_params(path)  # doctest: +SKIP
        >>> model = from_gemma(gm.nn.Gemma3_1B(), params)  # doctest: +SKIP
    """

    def call(
        params: Params,
        tokens: Int[Array, "1 T"],
        positions: Int[Array, "1 T"],
        cache: Any,
        mask: Bool[Array, "1 T S"],
    ) -> tuple[Any, Any]:
        out = module.apply(
            {"params": params}, tokens, positions=positions, cache=cache, attention_mask=mask
        )
        return out.logits, out.cache

    def init_cache(batch: int, capacity: int) -> Any:
        return module.config.init_cache(batch, dtype, cache_length=capacity)

    lm = from_end_index(call, module.config.num_embed, init_cache)
    return Model(lm, params, name=type(module).__name__)
