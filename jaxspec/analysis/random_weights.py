"""Random parameters of any network, made where they are used: for measuring what large models cost."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxspec.base import Params
from jaxspec.nets.t5 import T5Config
from jaxspec.recipes import net_of
from jaxspec.weights import int8


def random_params(config: Any, dtype: str, key: Key[Array, ""]) -> Params:
    """Parameters of a network, made on the device one by one, in the dtype that they are stored in.

    Matrices are normal, of a spread that leaves the size of what they multiply; norms and biases do nothing. One small
    program draws all matrices of a shape: a network's own `init` is a program with a draw for every one of them, and
    makes them in float32.

    >>> from jaxspec.nets.gpt import GPTConfig
    >>> params = random_params(GPTConfig(32, 16, 64, 1, 2), "bfloat16", jax.random.key(0))
    >>> params["layers_0"]["ff"]["wi"]["weight"].dtype, float(params["norm"]["scale"][0])
    (dtype(bfloat16), 1.0)
    """

    def leaf(path: tuple[Any, ...], x: jax.ShapeDtypeStruct, key: Array) -> Any:
        names = [entry.key for entry in path]
        if len(x.shape) == 1:
            return jnp.full(x.shape, float(names[-1] == "scale"))
        spread = x.shape[-1] ** -0.5
        if isinstance(config, T5Config) and "query" in names:
            spread *= config.head_dim**-0.5  # its attention does not scale
        stored = dtype if int8.is_matrix(path, x) and dtype != "int8" else "float32"
        return int8.as_dtype(path, _draw(key, spread, x.shape, stored), dtype)

    abstract = jax.eval_shape(lambda: net_of(config).init(config, jax.random.key(0)))
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [leaf(path, x, key) for (path, x), key in zip(leaves, keys, strict=True)])


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key: Array, spread: float, shape: tuple[int, ...], dtype: str) -> Float[Array, "*shape"]:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(spread, dtype)
