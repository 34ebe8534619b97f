"""A network's parameters by path ("encoder_0/ff/wi/weight"): their shapes, and putting them in place one by one.

What every format needs: names and shapes are compared before any weights are read. From the formats of other libraries
each parameter goes straight to where it will be used, so that the host need not hold the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec import sharding
from jaxspec.base import Params
from jaxspec.folders import some
from jaxspec.recipes import net_of
from jaxspec.weights import int8

FLOATS = ("float32", "bfloat16", "float16", "float64")  # what stored weights may be

Shape = tuple[int, ...]


def shapes(config: Any) -> dict[str, Shape]:
    """The shape of each of a network's parameters.

    >>> from jaxspec.nets.gpt import GPTConfig
    >>> found = shapes(GPTConfig(32, dim=16, ff_dim=24, layers=1, heads=2, max_positions=8))
    >>> found["layers_0/ff/wi/weight"]
    (24, 16)
    """
    return {
        path: x.shape
        for path, x in flat(jax.eval_shape(lambda: net_of(config).init(config, jax.random.key(0)))).items()
    }


def place(path: str, x: np.ndarray, config: Any, mesh: Mesh | None, dtype: str) -> Any:
    """A parameter on its device, or its parts on those of a mesh.

    Args:
        path: of the parameter.
        x: the parameter, in any of `FLOATS`.
        config: of the network: says which axes are heads.
        mesh: as `jaxspec.sharding` has it; None for the default device.
        dtype: of a matrix: "float32", "bfloat16", or "int8", which makes it entries and scales (`weights.int8`). All
            other parameters are float32.

    Returns:
        The parameter; of an int8 matrix, a dict with both.
    """
    matrix = int8.is_matrix(tuple(map(jax.tree_util.DictKey, path.split("/"))), x)
    x = x.astype(jnp.dtype(int8.computation(dtype) if matrix else "float32"), copy=False)
    if matrix and dtype == "int8":
        made = jax.block_until_ready(int8.quantise_matrix(x))  # waited for, so that one matrix at a time is in float32
        return {kind: _put(f"{path}/{kind}", y, config, mesh) for kind, y in made.items()}
    return _put(path, x, config, mesh)


def _put(path: str, x: np.ndarray | jax.Array, config: Any, mesh: Mesh | None) -> jax.Array:
    """The file's own memory is let go of: what comes from NumPy is copied."""
    if mesh is not None:
        return sharding.put(x, sharding.of(path, x.shape, config, mesh))
    return x if isinstance(x, jax.Array) else jnp.array(x)


def flat(params: Params, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a tree by path; `is_leaf` as in `jax.tree.flatten`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def nested(by_path: dict[str, Any]) -> Params:
    """The tree of such leaves."""
    from flax import traverse_util

    return traverse_util.unflatten_dict(by_path, sep="/")


def differences(
    want: dict[str, Any], have: dict[str, Any], said: Callable[[Any], str] = lambda shape: str(list(shape))
) -> str:
    """What is missing, what is unexpected, what is wrong, a line each; empty if nothing.

    Args:
        want, have: by name, what is expected and what there is: shapes, or whatever `said` can say.
        said: a shape in words; two that are said alike are no difference.

    >>> differences({"a": (2,), "b": (3, 4)}, {"b": (4, 3)})
    '\\n  missing (1): a\\n  wrong (1): b is [4, 3], expected [3, 4]'
    """
    parts = {
        "missing": [name for name in want if name not in have],
        "unexpected": [name for name in have if name not in want],
        "wrong": [
            f"{name} is {said(have[name])}, expected {said(x)}"
            for name, x in want.items()
            if name in have and said(have[name]) != said(x)
        ],
    }
    return "".join(f"\n  {what} ({len(names)}): {some(names)}" for what, names in parts.items() if names)
