"""Equinox modules as a model."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxspec.core import Model, Params
from jaxspec.nets.adapters.functions import from_function


def from_equinox(module: Any, vocab_size: int, *, max_positions: int | None = None) -> Model:
    """Makes a model of an Equinox module that maps a row of tokens [step] to logits [step, vocab].

    It must be causal. Each pass computes the whole row again. The model's parameters are the
    module's arrays.

    Args:
        module: an `equinox.Module`, in inference mode (`equinox.nn.inference_mode`).
        vocab_size: the width of its logits.
        max_positions: longest row it can hold; None for no limit.

    Raises:
        ValueError: at trace time: see `from_function`.

    Example:
        >>> model = from_equinox(network, vocab_size=64)  # doctest: +SKIP
    """
    import equinox

    params, static = equinox.partition(module, equinox.is_array)

    def apply(params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        return jax.vmap(equinox.combine(params, static))(tokens)

    lm = from_function(apply, vocab_size, max_positions=max_positions)
    return Model(lm, params, name=type(module).__name__)
