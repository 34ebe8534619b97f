"""Models of one's own as a `LanguageModel`: any function, a Linen module, an NNX module.

Two kinds of function will do, and the same two as a module's `__call__`:

    apply(params, tokens) -> logits
        a causal forward pass over whole rows: tokens [batch, step], logits [batch, step, vocab]. No cache is kept;
        each pass recomputes the row. Exact, and enough to try an idea out.

    apply(params, cache, tokens, positions) -> (logits, cache)
        tokens and positions [batch, step]: writes entry `positions[b, t]` of row b, and attends to all entries up to
        it, itself included. What lies behind is garbage, to be masked and overwritten, so rewinding is free. The
        cache is any pytree that `empty_cache(batch, capacity)` makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec import buffers
from jaxspec import cache as kv
from jaxspec.base import Forward, LanguageModel, Params, Prompt, Tree
from jaxspec.nets import stack

EmptyCache = Callable[[int, int], Any]


class AdapterCache(NamedTuple):
    """The user's cache (or, for a function without one, the row's tokens) and how much of it is real."""

    inner: Any
    length: Int[Array, " batch"]


@functools.cache
def from_function(
    apply: Callable[..., Any],
    vocab_size: int,
    *,
    empty_cache: EmptyCache | None = None,
    max_positions: int | None = None,
) -> LanguageModel:
    """A decoder-only language model from a pure function; see the top of this file for the two kinds.

    Args:
        apply: the function.
        vocab_size: the width of its logits.
        empty_cache: makes an empty cache for (batch, capacity); None for a function without a cache.
        max_positions: longest row it can hold, None for no limit.

    Raises:
        ValueError: at trace time, if the logits do not have the shape [batch, step, vocab].

    Example:
        >>> import jax, jaxspec
        >>> def bigram(params, tokens):  # logits depend on the last token alone
        ...     return params[tokens]
        >>> lm = from_function(bigram, vocab_size=7)
        >>> model = jaxspec.Model(lm, jax.random.normal(jax.random.key(0), (7, 7)))
        >>> prompt = jaxspec.Prompt(jnp.array([[3, 1]]), jnp.array([2]))
        >>> jaxspec.generate(model, prompt, drafter=model, gamma=3, max_new_tokens=9).stats.rounds.tolist()
        [2]
    """
    run = _without_cache(apply) if empty_cache is None else _with_cache(apply)

    def start(batch: int, capacity: int) -> AdapterCache:
        inner = jnp.zeros((batch, capacity), jnp.int32) if empty_cache is None else empty_cache(batch, capacity)
        return AdapterCache(inner, jnp.zeros((batch,), jnp.int32))

    def forward(params: Params, cache: AdapterCache, tokens: Int[Array, "B T"]) -> tuple[Forward, AdapterCache]:
        positions = kv.positions(cache.length, tokens.shape[1])
        logits, inner = run(params, cache, tokens, positions)
        if logits.shape != (*tokens.shape, vocab_size):
            raise ValueError(
                f"the model gave logits of shape {logits.shape} for tokens of shape {tokens.shape}: expected "
                f"[batch, step, vocab] = {(*tokens.shape, vocab_size)}"
            )
        made = Forward(logits.astype(jnp.float32), logits[..., :0].astype(jnp.float32))
        return made, AdapterCache(inner, cache.length + tokens.shape[1])

    def prefill(params: Params, prompt: Prompt, capacity: int) -> tuple[Forward, AdapterCache]:
        made, cache = forward(params, start(prompt.tokens.shape[0], capacity), prompt.tokens)
        return Forward(*(stack.last(x, prompt) for x in made)), cache._replace(length=prompt.length)

    def extend(params: Params, cache: AdapterCache, tokens: Int[Array, "B T"], tree: Tree | None = None):
        if tree is not None:
            raise ValueError("a model from jaxspec.nets.adapters takes chains, not token trees")
        return forward(params, cache, tokens)

    def rewind(cache: AdapterCache, length: Int[Array, " B"], path=None) -> AdapterCache:
        if path is not None:
            raise ValueError("a model from jaxspec.nets.adapters takes chains, not token trees")
        return cache._replace(length=length)

    return LanguageModel(prefill, extend, rewind, vocab_size, max_positions=max_positions)


def from_linen(
    module: nn.Module,
    vocab_size: int,
    *,
    empty_cache: EmptyCache | None = None,
    max_positions: int | None = None,
) -> LanguageModel:
    """A language model from a Linen module; `params` is its "params" collection.

    Its `__call__` takes what `apply` at the top of this file takes, without `params`.
    """
    return from_function(_apply_of(module), vocab_size, empty_cache=empty_cache, max_positions=max_positions)


@functools.cache
def _apply_of(module: nn.Module) -> Callable[..., Any]:
    return lambda params, *arguments: module.apply({"params": params}, *arguments)


def from_nnx(
    module: nnx.Module,
    vocab_size: int,
    *,
    empty_cache: EmptyCache | None = None,
    max_positions: int | None = None,
) -> tuple[LanguageModel, Params]:
    """A language model from an NNX module, and its parameters.

    The module is split once, here, and merged inside the traced body. Its `__call__` takes what `apply` at the top of
    this file takes, without `params`; it must not keep state of its own (dropout off, no nnx.Cache).
    """
    graph, params = nnx.split(module)

    def apply(params: Params, *arguments: Any) -> Any:
        return nnx.merge(graph, params)(*arguments)

    lm = from_function(apply, vocab_size, empty_cache=empty_cache, max_positions=max_positions)
    return lm, params


def _without_cache(apply: Callable[..., Any]):
    def run(params: Params, cache: AdapterCache, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]):
        rows = buffers.append(cache.inner, cache.length, tokens)
        logits: Float[Array, "B S V"] = apply(params, rows)
        return jnp.take_along_axis(logits, positions[..., None], axis=1), rows

    return run


def _with_cache(apply: Callable[..., Any]):
    def run(params: Params, cache: AdapterCache, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]):
        return apply(params, cache.inner, tokens, positions)

    return run
