"""Changes what a training step sees of a network, so that it generalises and can be stored in few
bits.

Dropout (Srivastava et al., JMLR 15, 2014) sets random entries of what each block adds to the
residual stream to zero. Rounding computes the loss of the parameters as a checkpoint of int8 or
int4 would hold them. The gradient passes through unchanged (the straight-through estimator, Bengio
et al., arXiv 1308.3432; for quantisation, Jacob et al., arXiv 1712.05877). Neither touches the
networks: dropout intercepts their modules while the loss is traced.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxspec.core import Params
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.weights import quantisation

OUTPUT = "out"  # the name of the projections whose result is added to the residual stream


def dropout(rate: float, key: Key[Array, ""]) -> contextlib.AbstractContextManager[Any]:
    """Drops entries of embeddings and of every block's output in the networks that are applied
    within.

    A mask is shared by all positions of a row, as in T5X: masks of every position would take longer
    to draw than the products that they follow take to compute.

    Args:
        rate: the share of entries that become zero; the others grow by 1 / (1 - rate). 0 changes
            nothing.
        key: the noise of this step. Each module folds its own path into it.

    >>> layer = Dense(4, name="out")
    >>> params = layer.init(jax.random.key(0), jnp.ones((1, 3)))
    >>> with dropout(0.5, jax.random.key(1)):
    ...     dropped = layer.apply(params, jnp.ones((1, 2, 3)))
    >>> full = layer.apply(params, jnp.ones((1, 2, 3)))
    >>> bool(jnp.all((dropped == 0) | jnp.isclose(dropped, 2 * full)))
    True
    """

    def intercept(
        next_fun: Callable, args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        output = next_fun(*args, **kwargs)
        module = context.module
        adds = isinstance(module, Embedding) or (
            isinstance(module, Dense) and module.name == OUTPUT
        )
        if not adds or context.method_name != "__call__":
            return output
        module_key = jax.random.fold_in(
            key, zlib.crc32("/".join(map(str, module.path)).encode()) >> 1
        )
        mask = output.shape[0], *(1 for _ in output.shape[1:-1]), output.shape[-1]  # [B, 1, M]
        stays = jax.random.bernoulli(module_key, 1 - rate, mask)
        return jnp.where(
            stays, output / jnp.asarray(1 - rate, output.dtype), jnp.zeros((), output.dtype)
        )

    if rate:
        return nn.intercept_methods(intercept)
    return contextlib.nullcontext()


def rounded(params: Params, dtype: str) -> Params:
    """Returns parameters as a checkpoint of `dtype` holds them, with the gradient of the parameters
    themselves.

    Args:
        params: the tree of a network, matrices in float32.
        dtype: "int8" or "int4", as `weights.quantisation` says.

    >>> layer = {"weight": jnp.array([[0.5, -1.0, 0.26]])}
    >>> [f"{x:.3f}" for x in rounded(layer, "int8")["weight"][0]]
    ['0.504', '-1.000', '0.260']
    >>> jax.grad(lambda layer: rounded(layer, "int8")["weight"].sum())(layer)["weight"].tolist()
    [[1.0, 1.0, 1.0]]
    """
    stored = quantisation.dequantise(quantisation.quantise(jax.lax.stop_gradient(params), dtype))
    return jax.tree.map(
        lambda x, stored_value: x + jax.lax.stop_gradient(stored_value - x), params, stored
    )
