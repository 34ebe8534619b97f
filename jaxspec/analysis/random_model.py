"""Models of random weights at published shapes: the cost of the real ones, and no sense."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from jaxspec.analysis import roofline
from jaxspec.core import Model, Params, Prompt, token_rows
from jaxspec.nets import net_of
from jaxspec.weights import loading, quantisation


def config_of(shape: str) -> Any:
    """Returns the configuration of a shape, as `roofline.shape_of` takes it."""
    config = roofline.shape_of(shape)
    if config is None:
        raise ValueError(
            f"no shape, folder or config.json {shape!r}: expected "
            f"{roofline.shapes_there_are(shape)}"
        )
    return config


def random_model(shape: str, dtype: str, seed: int, compute: str | None = None) -> Model:
    """Makes a model of random weights at a published shape: the cost of the real one, and no sense.

    The dtypes are those of `jaxspec.load`.
    """
    return of_config(config_of(shape), dtype, seed, compute)._replace(name=f"random {shape}")


def of_config(config: Any, dtype: str, seed: int, compute: str | None = None) -> Model:
    """Makes a model of random weights of a configuration, as `random_model`."""
    dtype, computed = loading.dtype_names(dtype, compute)
    config = dataclasses.replace(config, dtype=computed)
    params = random_params(config, dtype, jax.random.key(seed))
    return Model(net_of(config).language_model(config), params, config=config)


def random_prompt(model: Model, rows: int, tokens: int) -> Prompt:
    """Makes rows of random token ids, all of one length."""
    ids = np.random.default_rng(0).integers(0, model.lm.vocab_size, (rows, tokens))
    return token_rows.pad(ids.tolist())


def random_params(config: Any, dtype: str, key: Key[Array, ""]) -> Params:
    """Makes parameters of a network on the device, one by one, in the dtype that they are stored
    in.

    Matrices are normal, of a spread that keeps the size of their inputs; norms and biases do
    nothing. One small program draws all matrices of a shape: a network's own `init` is a program
    with a draw for every one of them, and makes them in float32.

    >>> from jaxspec.nets.decoder import gpt_config
    >>> params = random_params(gpt_config(32, 16, 64, 1, 2), "bfloat16", jax.random.key(0))
    >>> params["layers_0"]["ff"]["wi"]["weight"].dtype, float(params["norm"]["scale"][0])
    (dtype(bfloat16), 1.0)
    """

    network = net_of(config)

    def leaf(path: tuple[Any, ...], x: jax.ShapeDtypeStruct, key: Array) -> Any:
        names = [entry.key for entry in path]
        if len(x.shape) == 1:
            # scales, of whatever name
            return jnp.full(x.shape, float(not names[-1].endswith("bias")), jnp.float32)
        spread = x.shape[-1] ** -0.5 * network.spread(config, "/".join(names))
        if quantisation.is_matrix(path, x) and quantisation.kind_of(path, dtype) is None:
            stored = dtype
        else:
            stored = "float32"
        return quantisation.as_dtype(path, _draw(key, spread, x.shape, stored), dtype)

    leaves, tree = jax.tree_util.tree_flatten_with_path(network.shapes(config))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree, [leaf(path, x, key) for (path, x), key in zip(leaves, keys, strict=True)]
    )


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key: Array, spread: float, shape: tuple[int, ...], dtype: str) -> Float[Array, "*shape"]:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(spread, dtype)
