"""Names parameters that do not belong to the network they are used with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.errors
import jax
from flax import traverse_util
from jaxtyping import Array, Key

from jaxspec.core import Params

Init = Callable[[Any, Key[Array, ""]], Params]
"""(configuration, key) -> the parameters of a network."""
SHOWN = 3  # parameters that an error names


@contextlib.contextmanager
def named_mismatch(
    params: Params, init: Init, config: Any, layers: Mapping[str, int]
) -> Iterator[None]:
    """Names the parameters that do not belong to a network, if running it fails or they have more
    layers.

    Args:
        params: the parameters that the network was given.
        init, config: the function that makes the network's parameters, called only after an error.
        layers: how many layers it has, by the name that their parameters begin with.

    >>> init = lambda config, key: {"weight": jax.random.normal(key, (config, 2))}
    >>> params = {"weight": jax.numpy.ones((4, 2))}
    >>> with named_mismatch(params, init, 3, {}):  # doctest: +ELLIPSIS
    ...     jax.numpy.ones((1, 3)) @ params["weight"]
    Traceback (most recent call last):
    ValueError: the parameters are not those of the model's network: weight is [4, 2], expected [3, 2]. A model's ...
    """
    try:
        if not isinstance(params, Mapping) or any(_is_past(name, layers) for name in params):
            raise TypeError(
                f"the parameters are of type {type(params).__name__}, or have too many layers"
            )
        yield
    except (flax.errors.FlaxError, TypeError, ValueError) as error:
        wrong = differences(
            jax.eval_shape(lambda key: init(config, key), jax.random.key(0)), params
        )
        if not wrong:
            raise
        if len(wrong) > SHOWN:
            more = f", and {len(wrong) - SHOWN} more"
        else:
            more = ""
        raise ValueError(
            "the parameters are not those of the model's network: "
            f"{', '.join(wrong[:SHOWN])}{more}. A model's lm, "
            "params and config belong together: load or make the other model whole"
        ) from error


def _is_past(name: str, layers: Mapping[str, int]) -> bool:
    stack, _, number = name.rpartition("_")
    return stack in layers and number.isdecimal() and int(number) >= layers[stack]


def differences(expected: Any, params: Any) -> list[str]:
    """Says which parameters are missing, unexpected or of another shape."""
    expected_shapes = _shapes(expected)
    shapes = _shapes(params if isinstance(params, Mapping) else {})
    # a quantised matrix has several leaves in the place of one
    parts = {name.rpartition("/")[0] for name in shapes}
    missing = [
        f"{name} is missing" for name in expected_shapes if name not in shapes and name not in parts
    ]
    unexpected = [
        f"{name} is unexpected"
        for name in shapes
        if name not in expected_shapes and name.rpartition("/")[0] not in expected_shapes
    ]
    wrong = [
        f"{name} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected_shapes.items()
        if shapes.get(name, shape) != shape
    ]
    return missing + unexpected + wrong


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    flat: dict[str, Any] = traverse_util.flatten_dict(tree, sep="/")
    return {name: tuple(getattr(x, "shape", ())) for name, x in flat.items()}
