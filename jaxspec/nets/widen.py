"""A model of the same function and larger cost, for measuring what larger models would gain."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.base import Model
from jaxspec.nets import gpt, t5
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config

# Which axes of the leaves of a feed-forward block run over its hidden units.
_HIDDEN: dict[tuple[str, ...], int] = {
    ("gate", "weight"): 0,
    ("gate", "bias"): 0,
    ("wi", "weight"): 0,
    ("wi", "bias"): 0,
    ("out", "weight"): 1,
}


def widen(model: Model, ff_dim: int) -> Model:
    """The same function with feed-forward blocks of `ff_dim` hidden units, the new ones all zeros.

    Each new unit is act(0) = 0 and its weights out are 0 as well, so logits are the same up to the order in
    which a matrix product sums, and the cost of a pass is that of the larger model.

    Args:
        model: a T5 or a GPT; its matrices may be int8.
        ff_dim: hidden units of each feed-forward block, at least what they have.

    Raises:
        TypeError: the model is neither.
        ValueError: ff_dim is smaller than the model's.

    Example:
        >>> config = GPTConfig(32, dim=16, ff_dim=32, layers=1, heads=2, max_positions=16)
        >>> small = Model(gpt.language_model(config), gpt.init(config, jax.random.key(0)), config=config)
        >>> wide = widen(small, 64)
        >>> wide.config.ff_dim, wide.params["layers_0"]["ff"]["out"]["weight"].shape
        (64, (16, 64))
    """
    if not isinstance(model.config, T5Config | GPTConfig):
        kind = type(model.config).__name__
        raise TypeError(f"widen takes a model with a T5Config or a GPTConfig, got one with a {kind}")
    more = ff_dim - model.config.ff_dim
    if more < 0:
        raise ValueError(f"ff_dim is {ff_dim}: expected at least the model's own, {model.config.ff_dim}")
    config = dataclasses.replace(model.config, ff_dim=ff_dim)
    net: Any = t5 if isinstance(config, T5Config) else gpt

    def leaf(path: tuple[Any, ...], x: Array) -> Array:
        names = tuple(str(entry.key) for entry in path)
        stored = names[-1] if names[-2] == "weight" else ""  # "int8" or "scale" of an int8 matrix
        axis = _HIDDEN.get(names[-3:-1] if stored else names[-2:]) if "ff" in names else None
        if axis is None or (stored == "scale" and axis == 1):  # a scale is of an output
            return x
        new = 1 if stored == "scale" else 0
        return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=new)

    params = jax.tree_util.tree_map_with_path(leaf, model.params)
    return model._replace(lm=net.language_model(config), params=params, config=config)
