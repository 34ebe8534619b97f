"""A trained T5 as the start of a deeper, wider, shallower or narrower one.

A larger one begins as the same function. Steps of the smaller one cost a fraction, and nothing that
it has learned is lost (progressive stacking, Gong et al., ICML 2019; function-preserving growth,
Chen et al., arXiv 1511.05641). A smaller one is a part of it, from which a draft model learns
sooner than from random parameters.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from jaxspec.core import Params
from jaxspec.nets import t5
from jaxspec.nets.t5 import T5Config

_MAY_DIFFER = ("encoder_layers", "decoder_layers", "ff_dim", "tied_head", "scaled_head", "dtype")
# of a layer: they add to the residual stream
_OUTPUTS = (("attention", "out"), ("cross", "out"), ("ff", "out"))
# the axis of feed-forward matrices that runs over hidden units
_HIDDEN = {"gate": 0, "wi": 0, "out": 1}


def resize(params: Params, old: T5Config, new: T5Config, key: Key[Array, ""]) -> Params:
    """Makes parameters for a network of the shape `new`, from those of one of the shape `old`.

    More layers: a new layer copies the one below it, with output projections of zero, so it adds
    nothing yet. More hidden units in feed-forward blocks: random, their weights out zero. Fewer
    layers: evenly spaced ones, the last among them. Fewer hidden units: those with the largest
    weights out. A head of its own begins as the embedding that was the head before.

    Args:
        params: the parameters of a network of the shape `old`, matrices in float32.
        old, new: equal but for encoder_layers, decoder_layers and ff_dim; and the head, which may
            become untied.
        key: for what is random.

    Raises:
        ValueError: the networks differ in something else.

    Example:
        >>> old = T5Config(
        ...     32, dim=16, ff_dim=32, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1
        ... )
        >>> new = dataclasses.replace(old, ff_dim=48, decoder_layers=3)
        >>> grown = resize(t5.init(old, jax.random.key(0)), old, new, jax.random.key(1))
        >>> sorted(name for name in grown if name.startswith("decoder_"))
        ['decoder_0', 'decoder_1', 'decoder_2', 'decoder_bias', 'decoder_norm']
    """
    same = {name: getattr(new, name) for name in _MAY_DIFFER}
    untied = old.tied_head and not new.tied_head
    same_head = (old.tied_head, old.scaled_head) == (new.tied_head, new.scaled_head)
    if dataclasses.replace(old, **same) != new or not (untied or same_head):
        raise ValueError(
            f"{old} does not become {new}: they may differ in {', '.join(_MAY_DIFFER[:3])}, and in "
            "that the new head is one of its own"
        )
    if untied:
        # The factor that the tied head's input had moves into the new head's own matrix.
        scale = (old.dim**-0.5 if old.scaled_head else 1.0) / (
            new.dim**-0.5 if new.scaled_head else 1.0
        )
        params = params | {"head": {"weight": params["embedding"]["embedding"] * scale}}
    resized: dict[str, Any] = dict(t5.init(new, key))
    for name in resized:
        side, _, index = name.rpartition("_")
        if not index.isdigit():
            resized[name] = params[name]
            continue
        old_layers, new_layers = (getattr(config, f"{side}_layers") for config in (old, new))
        source, adds = _source(int(index), old_layers, new_layers)
        resized[name] = _layer(params[f"{side}_{source}"], resized[name], adds)
    return resized


def _source(index: int, old_layers: int, new_layers: int) -> tuple[int, bool]:
    """Returns which old layer a new layer is made of, and whether it is to add what that one adds.

    >>> [_source(i, 2, 3) for i in range(3)], [_source(i, 5, 2) for i in range(2)]
    ([(0, True), (0, False), (1, True)], [(1, True), (4, True)])
    """
    if new_layers < old_layers:
        return (index + 1) * old_layers // new_layers - 1, True
    source = index * old_layers // new_layers
    # Of several made of one layer, the lowest is that layer; the others add nothing yet.
    return source, index == -(-source * new_layers // old_layers)


def _layer(old: Params, new: Params, adds: bool) -> Params:
    """Resizes a layer to the size of `new`; it adds nothing to the residual stream if not
    `adds`.
    """
    kept = None
    ff_out = old["ff"]["out"]["weight"]
    if ff_out.shape[1] > new["ff"]["out"]["weight"].shape[1]:
        kept = _largest(ff_out, new["ff"]["out"]["weight"].shape[1])

    def leaf(path: tuple[Any, ...], x: Array, fresh: Array) -> Array:
        names = tuple(entry.key for entry in path)
        if names[:2] in _OUTPUTS:  # new hidden units add nothing yet, and a new layer as a whole
            fresh = jnp.zeros_like(fresh)
            if not adds:
                return fresh
        if kept is not None and names[0] == "ff":
            return jnp.take(x, kept, axis=_HIDDEN[names[1]])
        # The old matrix is a corner of the new one.
        return fresh.at[tuple(slice(0, n) for n in x.shape)].set(x)

    return jax.tree_util.tree_map_with_path(leaf, old, new)


def _largest(out: Array, count: int) -> Int[Array, " count"]:
    """Chooses the hidden units with the largest weights out, in their order."""
    return jnp.sort(jnp.argsort(jnp.sum(jnp.square(out), axis=0))[-count:])
