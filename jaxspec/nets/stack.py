"""A stack of layers over a key-value cache, which is what decoding adds to a decoder.

Shapes: B batch, T step, P prompt, S cache capacity, K key-value heads, D head dimension, M model
dimension.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.interpreters import partial_eval
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import Forward, Inside, LanguageModel, Layers, Params, Parts, Prompt, Room, chunks
from jaxspec.core import kv_cache as kv
from jaxspec.nets.mismatch import Init, named_mismatch

PastLayer = tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]
Read = Callable[..., Any]
"""`layer_caches.LayerCache.read` of a pass: attention gives it the keys and values of this pass,
and gets all that it may attend to; other kinds have their own arguments.
"""
Layer = Callable[..., tuple[Any, ...]]
"""(x, read) -> (x, record), where the record is what `read` returned: keys and values, for
attention. A layer that can be run in part also takes `attention` and `mlp`, both True where it runs
as a whole; without its attention the record is None.
"""
Taps = Float[Array, "B T taps"] | None
Past = tuple[PastLayer, ...]


def init_params(module: nn.Module, key: Key[Array, ""], *inputs: Any, **more: Any) -> Params:
    """Draws a module's random parameters.

    Each is drawn by itself, so that parameters of one shape share a program: the draws of a deep
    network in one program take XLA minutes to compile. What the module computes is not.

    Args:
        key: the key of all draws.
        inputs: the module's arguments; only shapes and dtypes matter.
        more: its other arguments.

    Raises:
        ValueError: a parameter depends on the values of inputs.

    >>> init_params(nn.Dense(2), jax.random.key(0), jnp.zeros((1, 3)))["kernel"].shape
    (3, 2)
    """
    draw = lambda key, inputs: module.init(key, *inputs, **more)["params"]  # noqa: E731
    if isinstance(key, Tracer):  # only shapes are wanted
        return draw(key, inputs)
    # Parameters need the shapes of inputs alone: what the module computes with them is left out,
    # and not compiled.
    drawn, shapes = jax.make_jaxpr(draw, return_shape=True)(key, inputs)
    jaxpr, used = partial_eval.dce_jaxpr(drawn.jaxpr, True)
    if any(used[len(jax.tree.leaves(key)) :]):
        raise ValueError(
            f"a parameter of {type(module).__name__} depends on values of its inputs: expected "
            "shapes alone"
        )
    leaves = eval_jaxpr(
        jaxpr, drawn.consts, *itertools.compress(jax.tree.leaves((key, inputs)), used)
    )
    return jax.tree.unflatten(jax.tree.structure(shapes), map(jnp.asarray, leaves))


def with_cache(
    layers: Iterable[Layer],
    x: Float[Array, "B T M"],
    cache: kv.KVCache,
    taps: Sequence[int] = (),
    parts: Parts | None = None,
    pass_: kv.Pass | None = None,
) -> tuple[Float[Array, "B T M"], Taps, kv.KVCache]:
    """Runs layers over T tokens at each row's own length; the cache grows by them.

    Args:
        layers: one for each layer of the cache.
        x: the embedded tokens.
        cache: the cache before this pass.
        taps: numbers of layers whose output is wanted, too; see `check_taps`.
        parts: the parts to run; None: all. Layers that do not run leave the stream and their cache
            as they are.
        pass_: the pass; None: over a chain, whose tokens are all remembered.

    Returns:
        The residual stream after the last layer, the tapped streams and the cache. Tapped streams
        lie one after the other on the last axis, in the order of `taps`; None without taps.

    Example:
        >>> def running_sum(x, read):  # a "layer" whose keys are its inputs
        ...     keys, values = read(x[:, None], x[:, None])
        ...     return jnp.cumsum(keys[:, 0], axis=1)[:, -x.shape[1] :], (keys, values)
        >>> empty = kv.empty(1, Room(3), [kv.whole(kv_heads=1, head_dim=1)] * 2)
        >>> x, taps, cache = with_cache(
        ...     [running_sum, running_sum], jnp.ones((1, 3, 1)), empty, taps=(0,)
        ... )
        >>> x[0, :, 0].tolist(), taps[0, :, 0].tolist(), cache.length.tolist()
        ([1.0, 3.0, 6.0], [1.0, 2.0, 3.0], [3])
    """
    if pass_ is None:
        pass_ = kv.Pass(cache.length, x.shape[1])
    caches = []
    records = []
    after = []
    for i, (layer, old) in enumerate(zip(layers, cache.layers, strict=True)):
        # Layers that share keys read the records of earlier layers, so these are handed on.
        read = functools.partial(old.read, pass_, tuple(records))
        if parts is None or i in parts.attention:
            x, record = layer(x, read) if parts is None else layer(x, read, mlp=i in parts.mlp)
            records.append(record)
            caches.append(old.after(record, pass_))
        else:
            if i in parts.mlp:
                x = layer(x, read, attention=False)[0]
            # A later layer may share its keys, which an earlier call has written for these tokens.
            records.append(old.own)
            caches.append(old)
        after.append(x)
    tapped = None
    if taps:
        tapped = jnp.concatenate([after[layer] for layer in taps], axis=-1)
    return x, tapped, cache.grown(caches, pass_)


def check_numbers(taps: Sequence[int]) -> None:
    """Raises TypeError for taps that are not numbers of layers.

    >>> check_numbers("02")
    Traceback (most recent call last):
    ValueError: taps is the string '02': expected numbers of layers, such as (0, 2)
    """
    if isinstance(taps, str):
        raise ValueError(f"taps is the string {taps!r}: expected numbers of layers, such as (0, 2)")
    others = [
        layer
        for layer in taps
        if not isinstance(layer, int | np.integer) or isinstance(layer, bool)
    ]
    if others:
        raise ValueError(f"taps has {others[0]!r}: expected numbers of layers, such as (0, 2)")


def check_taps(taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """Checks the layers to tap: 0 is the residual stream after the first layer, layers - 1 that
    after the last.

    "After layer l" is transformers' `hidden_states[l + 1]`; but for the last layer, whose output
    transformers gives after the final norm, which is `Forward.features` here.

    >>> check_taps([2, 0], layers=4)
    (2, 0)
    """
    check_numbers(taps)
    taps = tuple(taps)
    outside = [layer for layer in taps if not 0 <= layer < layers]
    if outside:
        raise ValueError(
            f"taps has layer {outside[0]}: expected numbers from 0 to {layers - 1} (l is after "
            "layer l)"
        )
    if len(set(taps)) < len(taps):
        raise ValueError(f"taps is {taps}: expected each layer once")
    return taps


def without_cache(
    layers: Iterable[Layer],
    x: Float[Array, "B T M"],
    runs: Bool[Array, "layers B"] | None = None,
    empty: kv.KVCache | None = None,
) -> list[Float[Array, "B T M"]]:
    """Runs layers over whole rows, as in training; a layer attends to the rows' keys, or reads
    `empty`.

    Args:
        layers: the layers, as `with_cache` takes them.
        x: the embedded tokens.
        runs: the rows that run each layer, in training with layer dropout; the others' stream goes
            on as it is. None: all run all.
        empty: an empty cache, or its shapes, for layers that read more than the rows' keys; None:
            none do.

    Returns:
        The residual stream after each layer.
    """
    after = []
    records = []
    for i, layer in enumerate(layers):
        read = (
            (lambda *new: new)
            if empty is None
            else functools.partial(empty.layers[i].read_whole, tuple(records))
        )
        output, record = layer(x, read)
        records.append(record)
        # Layer dropout keeps shapes: a row that skips a layer computes it, and drops the output.
        if runs is None:
            x = output
        else:
            x = jnp.where(runs[i][:, None, None], output, x)
        after.append(x)
    return after


def with_past(
    layers: Iterable[Layer], x: Float[Array, "B S M"], past: Past
) -> tuple[Float[Array, "B S M"], Past]:
    """Runs layers over whole rows, whose keys and values follow `past`; it may be ()."""
    # Drafters in training append to their past [B, K, S, D]; there is no cache of a fixed size.
    grown: list[PastLayer] = []
    for index, layer in enumerate(layers):

        def read(k, v, before=past[index] if past else None):
            if before is None:
                return (k, v)
            return tuple(jnp.concatenate(pair, axis=2) for pair in zip(before, (k, v), strict=True))

        x, keys_values = layer(x, read)
        grown.append(keys_values)
    return x, tuple(grown)


def pure(module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method of a module's class a function of its parameters first."""
    apply = nn.apply(method, module)
    return lambda params, *arguments: apply({"params": params}, *arguments)


def inside(
    module: nn.Module,
    width: int,
    taps: tuple[int, ...],
    layers: int,
    sources: Sequence[tuple[int, int]] = (),
) -> Inside:
    """Makes the `LanguageModel.inside` of a decoder with an `embedding`, and the methods that
    `decoder_only` needs.
    """

    def applied(params: Params, method: Callable[[Any], Any]) -> Any:
        return nn.apply(method, module)({"params": params})

    def embed(params, tokens):
        return applied(params, lambda net: net.embedding(tokens))

    def head(params, features, raw=False):
        return applied(params, lambda net: net.logits(features, raw=raw))

    def embed_step(params, cache, tokens, parent=None):
        return applied(params, lambda net: net.embed(cache, tokens, parent))

    def run(params, cache, x, parts, parent=None):
        stream, _, cache = applied(params, lambda net: net.run(cache, x, parent, parts))
        # A run in parts hands the layers' side inputs on behind the stream.
        side = x[..., stream.shape[-1] :]  # for the layers that follow
        return (jnp.concatenate([stream, side], axis=-1) if side.size else stream), cache

    def features(params, x):
        return applied(params, lambda net: net.features(x[..., :width]))

    parts = Layers(layers, embed_step, run, features, tuple(sources))
    return Inside(width, head, embed, taps, parts, keys_values=kv.keys_values)


def read_row(
    module: nn.Module,
    params: Params,
    row: Prompt,
    room: Room,
    empty: Callable[[int, Room], Any],
    rewind: Callable[..., Any],
    encoded: Any = None,
) -> tuple[Forward, Any]:
    """Reads the tokens that a row begins with, chunk by chunk.

    Args:
        module: the network; see `decoder_only`.
        params: its parameters.
        row: the tokens.
        room: how many tokens the cache is to hold.
        empty: makes an empty cache for (batch, room).
        rewind: the function of this cache.
        encoded: an encoder's output for the prompt; None without one.
    """

    def read(cache: Any, tokens: Int[Array, "B T"], real: Int[Array, " B"]) -> tuple[Any, Any]:
        def run(net: Any) -> tuple[Any, Any, Any]:
            return net.run(cache, net.embed(cache, tokens), real=real)

        x, taps, grown = nn.apply(run, module)({"params": params})
        return (x, taps), grown

    def forward(net: Any) -> Forward:
        # The last token's are normalised apart, so that a program that reads no features computes
        # no others.
        return Forward(net.logits(net.features(last)), net.features(x), taps, encoded)

    (x, taps), (last, _), cache = chunks.read(read, rewind, empty, row.tokens, row.length, room)
    return nn.apply(forward, module)({"params": params}), cache


def extending(module: nn.Module) -> Callable[..., tuple[Forward, Any]]:
    """Makes the function that reads more tokens at each row's own length:
    `LanguageModel.extend`.
    """

    def extend(
        params: Params,
        cache: Any,
        tokens: Int[Array, "B T"],
        parent: Int[Array, "B N"] | None = None,
        real: Int[Array, " B"] | None = None,
    ) -> tuple[Forward, Any]:
        def feed(net: Any) -> tuple[Forward, Any]:
            x, taps, grown = net.run(cache, net.embed(cache, tokens, parent), parent, real=real)
            features = net.features(x)
            return Forward(net.logits(features), features, taps), grown

        return nn.apply(feed, module)({"params": params})

    return extend


def decoder_only(
    module: nn.Module,
    init: Init,
    config: Any,
    empty: Callable[[int, Room], kv.KVCache],
    taps: tuple[int, ...] = (),
) -> LanguageModel:
    """Makes the pure functions of a network.

    Args:
        module: the network, a Linen module with the methods `embed`, `run`, `features` and `logits`
            of `nets.decoder.DecoderNet`.
        init, config: the function that makes its parameters, and its argument.
        empty: makes a cache for (batch, room).
        taps: the layers whose outputs passes return, see `Inside`.
    """

    def prefill(params: Params, prompt: Prompt, room: Room) -> tuple[Forward, kv.KVCache]:
        with named_mismatch(params, init, config, {"layers": len(config.layers)}):
            return read_row(module, params, prompt, room, empty, kv.rewind)

    # Whether trees are taken follows from the kinds of cache: the smallest one is asked, and not
    # made.
    sizes = jax.eval_shape(lambda: empty(1, Room(2, rewind=1)))
    sources = [
        (i, layer.source) for i, layer in enumerate(sizes.layers) if layer.source is not None
    ]
    return LanguageModel(
        prefill,
        extending(module),
        kv.rewind,
        config.vocab_size,
        kv.select if sizes.takes_trees else None,
        inside=inside(module, config.dim, taps, len(config.layers), sources),
        is_causal=True,
    )
