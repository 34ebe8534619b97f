"""Products with weights [out, in], the layout of PyTorch's: what a decoding step does most of the time.

Shapes: B batch, T step.
"""

from __future__ import annotations

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.nets import quantised
from jaxspec.nets.quantised import Matrix

FEW = 64  # rows up to which a product on CPU is written with the weights first


class Dense(nn.Module):
    """`x @ weight.T + bias`; computed in `dtype`; parameters stay in the dtype they have.

    A weight may be given as int8 (`jaxspec.weights.int8`), though never initialised so.

    Attributes:
        features: the width of the output.
        use_bias: whether there is a bias.
        weight_init: of the weights, whose last axis is the input.
    """

    features: int
    use_bias: bool = False
    dtype: jnp.dtype = jnp.float32
    weight_init: nn.initializers.Initializer = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)

    @nn.compact
    def __call__(self, x: Float[Array, "B T in"]) -> Float[Array, "B T out"]:
        weight = self.param("weight", self.weight_init, (self.features, x.shape[-1]), jnp.float32)
        y = product(x.astype(self.dtype), weight)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
            y = y + bias.astype(self.dtype)[None, None, :]
        return y


def product(x: Float[Array, "B T in"], weight: Matrix) -> Float[Array, "B T out"]:
    """`x @ weight.T`, in the dtype of `x`; int8 weights as `jaxspec.nets.quantised` says.

    A pass over a few tokens should cost little more than a pass over one, whose cost is reading the weights once. On
    CPU that takes care: XLA's product of a few rows with a large matrix copies the matrix into its own layout, which
    was measured at two to three passes over one; with the matrix as the left factor it is not copied, which was
    measured at 1.1 to 1.5. (The barrier keeps the compiler from swapping the factors back.)

    >>> product(jnp.array([[[1.0, 2.0]]]), jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])).tolist()
    [[[1.0, 2.0, 3.0]]]
    """
    if isinstance(weight, Mapping):
        return quantised.product(x, **weight)
    weight, rows = weight.astype(x.dtype), x.shape[0] * x.shape[1]
    if 1 < rows <= FEW:
        return jax.lax.platform_dependent(x, weight, cpu=_weight_first, default=_plainly)
    return _plainly(x, weight)


def _plainly(x: Float[Array, "B T in"], weight: Float[Array, "out in"]) -> Float[Array, "B T out"]:
    return jax.lax.dot_general(x, weight, (((2,), (1,)), ((), ())))


def _weight_first(x: Float[Array, "B T in"], weight: Float[Array, "out in"]) -> Float[Array, "B T out"]:
    y = jax.lax.dot_general(weight, x.reshape(-1, x.shape[-1]), (((1,), (1,)), ((), ())))
    return jax.lax.optimization_barrier(y).T.reshape(*x.shape[:-1], weight.shape[0])
