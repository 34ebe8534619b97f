"""Functions, Linen modules and NNX modules as a `LanguageModel`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import errors, nnx
from jaxtyping import Array, Float, Int

from jaxspec.core import (
    Forward,
    LanguageModel,
    Limits,
    Params,
    Prompt,
    Room,
    Select,
    chunks,
    token_rows,
)
from jaxspec.core import kv_cache as kv

EmptyCache = Callable[[int, int], Any]
IN_TRAINING = (
    "draws random numbers or changes its state when it is called, as in training (dropout, batch "
    "statistics)"
)
COLLECTIONS = {"params", "cache", "batch_stats", "intermediates"}  # of Linen's variables


class AdapterCache(NamedTuple):
    """The user's cache (or, for a function without one, the row's tokens) and how much of it is
    real.
    """

    inner: Any
    length: Int[Array, " batch"]


@functools.lru_cache
def from_function(
    apply: Callable[..., Any],
    vocab_size: int,
    *,
    empty_cache: EmptyCache | None = None,
    select: Select | None = None,
    max_positions: int | None = None,
) -> LanguageModel:
    """Makes a decoder-only language model of a pure function; see `jaxspec.nets.adapters` for the two
    kinds.

    Args:
        apply: the function.
        vocab_size: the width of its logits.
        empty_cache: makes an empty cache for (batch, capacity); None for a function without a
            cache.
        select: moves entries of that cache; with it the model takes token trees. None: chains only.
        max_positions: longest row it can hold, None for no limit.

    Raises:
        ValueError: `select` without `empty_cache`. At trace time: the logits do not have the shape
            [batch, step, vocab], a leaf of the cache does not have the batch first, or a tree is
            fed to a model without `select`.

    Example:
        >>> import jax, jaxspec
        >>> def bigram(params, tokens):  # logits depend on the last token alone
        ...     return params[tokens]
        >>> lm = from_function(bigram, vocab_size=7)
        >>> model = jaxspec.Model(lm, jax.random.normal(jax.random.key(0), (7, 7)))
        >>> prompt = jaxspec.Prompt(jnp.array([[3, 1]]), jnp.array([2]))
        >>> jaxspec.generate(
        ...     model, prompt, drafter=model, gamma=3, max_new_tokens=9
        ... ).stats.rounds.tolist()
        [2]
    """
    if select is not None and empty_cache is None:
        raise ValueError(
            "got select without empty_cache: a function without a cache recomputes rows, and takes "
            "chains"
        )
    trees = select is not None
    if empty_cache is None:
        run = _without_cache(apply, vocab_size)
    else:
        run = _with_cache(apply, vocab_size, trees)

    def start(batch: int, room: Room) -> AdapterCache:
        size = room.tokens
        # Without a cache of the user's, the row's tokens are the cache, and each pass computes the
        # whole row.
        if empty_cache is None:
            inner = jnp.zeros((batch, size), jnp.int32)
        else:
            inner = empty_cache(batch, size)
        _check_batch_first(inner, batch)
        return AdapterCache(inner, jnp.zeros((batch,), jnp.int32))

    def extend(
        params: Params,
        cache: AdapterCache,
        tokens: Int[Array, "B T"],
        parent: Int[Array, "B N"] | None = None,
        real: Int[Array, " B"] | None = None,  # whoever gives it rewinds to it
    ) -> tuple[Forward, AdapterCache]:
        if parent is not None and select is None:
            raise ValueError(
                "this model takes chains, not token trees: make it with from_function(..., "
                "empty_cache=..., select=...), of a function that takes `length` and `parent` "
                "(see jaxspec.nets.adapters)"
            )
        logits, inner = run(params, cache, tokens, parent)
        _check_batch_first(inner, tokens.shape[0])
        return Forward(logits.astype(jnp.float32)), AdapterCache(
            inner, cache.length + tokens.shape[1]
        )

    def read_again(params: Params, prompt: Prompt, room: Room) -> tuple[Forward, AdapterCache]:
        """Reads the prompt in one pass, since each pass recomputes the row."""
        forward, cache = extend(params, start(prompt.tokens.shape[0], room), prompt.tokens)
        return forward._replace(logits=chunks.at(forward.logits, prompt.length - 1)), rewind(
            cache, prompt.length
        )

    def rewind(cache: AdapterCache, length: Int[Array, " B"]) -> AdapterCache:
        return cache._replace(length=length)

    def select_inner(
        cache: AdapterCache, start: Int[Array, " B"], path: Int[Array, "B D"]
    ) -> AdapterCache:
        assert select is not None
        return cache._replace(inner=select(cache.inner, start, path))

    return LanguageModel(
        read_again if empty_cache is None else chunks.prefill(extend, rewind, start),
        extend,
        rewind,
        vocab_size,
        None if select is None else select_inner,
        Limits(max_positions=max_positions),
    )


def from_linen(
    module: nn.Module,
    vocab_size: int,
    *,
    empty_cache: EmptyCache | None = None,
    select: Select | None = None,
    max_positions: int | None = None,
) -> LanguageModel:
    """Makes a language model of a Linen module; `params` is its "params" collection.

    Its `__call__` takes what `apply` of `jaxspec.nets.adapters` takes, without `params`.

    Raises:
        TypeError: the module is a class, or none of Linen's. At trace time: the parameters are not
            a dict.
        ValueError: at trace time: the parameters are not the module's, or all of its variables, or
            it is in training; as `from_function`.

    Example:
        >>> import jax, jaxspec
        >>> class Bigram(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, tokens):  # [batch, step] -> [batch, step, vocab]
        ...         return nn.Embed(7, 7)(tokens)
        >>> params = Bigram().init(jax.random.key(0), jnp.ones((1, 1), jnp.int32))["params"]
        >>> model = jaxspec.Model(from_linen(Bigram(), vocab_size=7), params)
        >>> jaxspec.generate(model, [[3, 1]], max_new_tokens=4).lengths.tolist()
        [4]
    """
    options = dict(empty_cache=empty_cache, select=select, max_positions=max_positions)
    return from_function(_apply_of(module), vocab_size, **options)


@functools.lru_cache
def _apply_of(module: nn.Module) -> Callable[..., Any]:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{_shown_module(module)}: expected a Linen module that was called, such as Network()"
        )
    return lambda params, *arguments, **named: _apply(
        module, {"params": params}, *arguments, **named
    )


def _apply(module: nn.Module, variables: Any, *arguments: Any, **named: Any) -> Any:
    """Calls a Linen module; errors about its parameters are put in the caller's words."""
    params = variables["params"]
    name = type(module).__name__
    way = f'expected what {name}.init(key, tokens)["params"] returns'
    if not isinstance(params, Mapping):
        raise TypeError(f"the parameters of {name} are of type {type(params).__name__}: {way}")
    # A common slip: init returns all collections, of which a model's parameters are one.
    if set(params) == {"params"} or ("params" in params and set(params) <= COLLECTIONS):
        raise ValueError(
            f'the parameters of {name} are all of its variables, {{"params": ...}}: {way}'
        )
    try:
        return module.apply(variables, *arguments, **named)
    except (
        errors.ScopeCollectionNotFound,
        errors.ScopeParamNotFoundError,
        errors.ScopeParamShapeError,
    ) as error:
        collections = ", ".join(map(str, params)) or "nothing"
        complaint = f"the parameters of {name} are not its own, they hold {collections}"
        raise ValueError(f"{complaint}: {way} ({error})") from error
    except errors.InvalidRngError as error:
        raise ValueError(
            f"{name} {IN_TRAINING}: make it with deterministic=True ({error})"
        ) from error


def _shown_module(module: Any) -> str:
    if isinstance(module, type):
        return f"the module is the class {module.__name__}"
    if isinstance(module, nnx.Module):
        return f"the module is {type(module).__name__}, of NNX, which adapters.from_nnx takes"
    if isinstance(module, nn.Module):
        return f"the module is {type(module).__name__}, of Linen, which adapters.from_linen takes"
    return f"the module is of type {type(module).__name__}"


def from_linen_cache(
    module: nn.Module,
    vocab_size: int,
    *,
    index: str = "cache_index",
    one_by_one: bool = False,
    max_positions: int | None = None,
) -> LanguageModel:
    """Makes a language model of a Linen module that keeps its cache in a "cache" collection, as
    T5X's do.

    Its `__call__` takes tokens [batch, step]. `module.init` of as many tokens as a row may hold
    makes the cache, zeros but for its shapes; each call writes entries from the index on, a scalar
    in the collection, and attends to what lies before. Here each row has an index, so that rows may
    accept different numbers of draft tokens.

    Args:
        module: in decoding mode.
        vocab_size: the width of its logits.
        index: the name of the index in the collection; there may be several, one per layer.
        one_by_one: whether it takes one token at a time only, as
            `nn.MultiHeadDotProductAttention(decode=True)`: passes over several are then loops,
            exact, but no faster than plain decoding.
        max_positions: longest row it can hold, None for no limit.

    Raises:
        TypeError: the module is a class, or none of Linen's.
        ValueError: at trace time: the collection has no such index; as `from_linen`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{_shown_module(module)}: expected a Linen module that was called, such as Network()"
        )

    def is_index(path: tuple[Any, ...]) -> bool:
        return jax.tree_util.keystr(path[-1:], simple=True) == index

    def empty(batch: int, capacity: int) -> Any:
        tokens = jax.ShapeDtypeStruct((1, capacity), jnp.int32)
        # A module in decoding mode makes its cache in init, of the capacity of the tokens that it
        # is shown.
        shapes = jax.eval_shape(module.init, jax.random.key(0), tokens).get("cache", {})
        names = {
            jax.tree_util.keystr(path[-1:], simple=True)
            for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
        }
        if index not in names:
            raise ValueError(
                f"{type(module).__name__} has {', '.join(sorted(names)) or 'nothing'} in its "
                'collection "cache": '
                f"expected {index}, the index of the next entry (index= gives it another name). A "
                "module keeps its "
                "cache there in decoding mode; from_linen takes one without a cache"
            )
        return jax.tree.map(lambda x: jnp.zeros((batch, *x.shape), x.dtype), shapes)

    def step(
        params: Params, cache: Any, tokens: Int[Array, "1 T"], length: Int[Array, ""]
    ) -> tuple[Array, Any]:
        cache = jax.tree_util.tree_map_with_path(
            lambda path, x: length.astype(x.dtype) if is_index(path) else x, cache
        )
        logits, changed = _apply(
            module, {"params": params, "cache": cache}, tokens, mutable=["cache"]
        )
        return logits, changed["cache"]

    return from_function(
        by_row(step, one_by_one), vocab_size, empty_cache=empty, max_positions=max_positions
    )


def by_row(step: Callable[..., Any], one_by_one: bool = False) -> Callable[..., Any]:
    """Makes what `from_function` takes, of a function of one row whose place in its cache is one
    number.

    Args:
        step: (params, cache, tokens [1, T], index) -> (logits [1, T, vocab], cache): writes entries
            from `index` on. The cache that it takes is one row of what `empty_cache` makes, without
            the batch.
        one_by_one: whether it takes one token at a time only.
    """

    def row(params: Params, cache: Any, tokens: Int[Array, " T"], positions: Int[Array, " T"]):
        if not one_by_one:
            logits, cache = step(params, cache, tokens[None], positions[0])
            return logits[0], cache

        def one(cache: Any, fed: tuple[Array, Array]):
            logits, cache = step(params, cache, fed[0][None, None], fed[1])
            return cache, logits[0, 0]

        cache, logits = jax.lax.scan(one, cache, (tokens, positions))
        return logits, cache

    return jax.vmap(row, in_axes=(None, 0, 0, 0))


def from_nnx(
    module: nnx.Module,
    vocab_size: int,
    *,
    empty_cache: EmptyCache | None = None,
    select: Select | None = None,
    max_positions: int | None = None,
) -> tuple[LanguageModel, Params]:
    """Makes a language model of an NNX module, and returns its parameters with it.

    The module is split once, here, and merged inside the traced body. Its `__call__` takes what
    `apply` of `jaxspec.nets.adapters` takes, without `params`; it must not keep state (dropout off, no
    nnx.Cache).

    Raises:
        TypeError: the module is not an `nnx.Module`.
        ValueError: at trace time: the parameters are not the module's, or it is in training; as
            `from_function`.
    """
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"{_shown_module(module)}: expected an NNX module, such as Network(nnx.Rngs(0))"
        )
    # NNX modules are split into a static graph and a tree of arrays, so that parameters stay an
    # argument.
    graph, params = nnx.split(module)
    shapes = list(map(jnp.shape, jax.tree.leaves(params)))
    name = type(module).__name__

    def apply(params: Params, *arguments: Any, **named: Any) -> Any:
        # merging looks at their number only
        if list(map(jnp.shape, jax.tree.leaves(params))) != shapes:
            way = (
                "expected those that from_nnx returned with the language model, "
                "Model(*from_nnx(module, vocab_size))"
            )
            raise ValueError(f"the parameters of {name} are not its own: {way}")
        try:
            return nnx.merge(graph, params)(*arguments, **named)
        except errors.TraceContextError as error:
            raise ValueError(
                f"{name} {IN_TRAINING}: call module.eval() before from_nnx ({error})"
            ) from error

    lm = from_function(
        apply, vocab_size, empty_cache=empty_cache, select=select, max_positions=max_positions
    )
    return lm, params


def _without_cache(apply: Callable[..., Any], vocab: int):
    def run(params: Params, cache: AdapterCache, tokens: Int[Array, "B T"], _: Any):
        rows = token_rows.append(cache.inner, cache.length, tokens)
        # Logits of all positions, [B, S, V], of which those of the fed tokens are taken.
        logits: Float[Array, "B S V"] = _checked_logits(apply(params, rows), rows, vocab)
        positions = kv.positions(cache.length, tokens.shape[1])
        return jnp.take_along_axis(logits, positions[..., None], axis=1), rows

    return run


def _with_cache(apply: Callable[..., Any], vocab: int, trees: bool):
    def run(
        params: Params,
        cache: AdapterCache,
        tokens: Int[Array, "B T"],
        parent: Int[Array, "B N"] | None,
    ):
        named = {}
        if trees:
            named = {"length": cache.length, "parent": parent}
        returned = apply(
            params,
            cache.inner,
            tokens,
            kv.positions(cache.length, tokens.shape[1], parent),
            **named,
        )
        if not (isinstance(returned, tuple | list) and len(returned) == 2):
            raise TypeError(
                f"the model returned {_described(returned)}: expected (logits, cache), as it has a "
                "cache"
            )
        logits, inner = returned
        return _checked_logits(logits, tokens, vocab), inner

    return run


def _checked_logits(logits: Any, tokens: Int[Array, "B T"], vocab: int) -> Float[Array, "B T V"]:
    expected = f"expected [batch, step, vocab] = {(*tokens.shape, vocab)}"
    if not hasattr(logits, "shape"):
        raise TypeError(f"the model gave {_described(logits)} in place of its logits: {expected}")
    if logits.shape != (*tokens.shape, vocab):
        complaint = (
            f"the model gave logits of shape {logits.shape} for tokens of shape {tokens.shape}"
        )
        raise ValueError(f"{complaint}: {expected}")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"the model gave logits of dtype {logits.dtype}: expected floats, not normalised"
        )
    return logits


def _described(returned: Any) -> str:
    """Describes a model's result: "one array", "a tuple of array, int"."""
    names = [
        "array" if hasattr(x, "shape") else type(x).__name__ for x in jax.tree.leaves(returned)
    ]
    if jax.tree.structure(returned) == jax.tree.structure(0):
        return f"one {names[0]}"
    return f"a {type(returned).__name__} of {', '.join(names) or 'nothing'}"


def _check_batch_first(inner: Any, batch: int) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(inner):
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] != batch:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"the cache{name} has the shape {list(jnp.shape(x))}: expected [batch, ...] = "
                f"[{batch}, ...]. Rows are taken out of a cache and put into it by "
                "jax.tree.map(lambda x: x[rows], cache): give each leaf the batch as its first "
                "axis, and make what all rows share a parameter"
            )
