"""Products with weights [out, in], the layout of PyTorch's: what a decoding step does most of the time.

Shapes: B batch, T step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import errors
from jaxtyping import Array, Float

from jaxspec.nets import quantised
from jaxspec.nets.quantised import Matrix

FEW = 64  # rows up to which a product on CPU is written with the weights first
LARGE = 1 << 24  # entries of a matrix above which a TPU must not recompute what it is multiplied with


class Dense(nn.Module):
    """`x @ weight.T + bias`; computed in `dtype`; parameters stay in the dtype they have.

    A weight may be given quantised (`jaxspec.weights.quantisation`), though never initialised so.

    Attributes:
        features: the width of the output.
        use_bias: whether there is a bias.
        weight_init: the initialiser of the weights, whose last axis is the input.
    """

    features: int
    use_bias: bool = False
    dtype: jnp.dtype = jnp.float32
    weight_init: nn.initializers.Initializer = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)

    @nn.compact
    def __call__(self, x: Float[Array, "B T in"]) -> Float[Array, "B T out"]:
        weight = parameter(self, "weight", self.weight_init, (self.features, x.shape[-1]))
        y = product(x.astype(self.dtype), weight)
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, (self.features,))
            y = y + bias.astype(self.dtype)[None, None, :]
        return y


def parameter(module: nn.Module, name: str, init: nn.initializers.Initializer, shape: tuple[int, ...]) -> Any:
    """Declares `module.param(name, init, shape)` in float32, a fifth faster to trace than Flax's own.

    Of a parameter that is there flax traces the initialiser again, in each program, to compare shapes. Here they are
    compared without that.

    Raises:
        flax.errors.ScopeParamShapeError: the parameter has another shape.
    """
    if not module.has_variable("params", name):
        return module.param(name, init, shape, jnp.float32)
    value = module.get_variable("params", name)
    stored_shape = quantised.shape(value)
    if stored_shape != shape:
        raise errors.ScopeParamShapeError(name, "/".join(module.path), stored_shape, shape)
    return value


def precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Returns the precision of products of a dtype: float32 is multiplied as float32 on every backend.

    By default a TPU multiplies float32 in bfloat16, and some GPUs in TF32, which both keep some three digits; a pass
    over one token and one over several would then differ by more than near ties, and text with them. Who wants that
    speed says so by jax's own name for it, which goes before: `jax.default_matmul_precision("bfloat16")` around
    calls, or the configuration option. Other dtypes are multiplied as they are.

    >>> str(precision(jnp.float32)), precision(jnp.bfloat16)
    ('HIGHEST', None)
    >>> with jax.default_matmul_precision("bfloat16"):
    ...     print(precision(jnp.float32))
    None
    """
    if dtype != jnp.float32 or jax.config.jax_default_matmul_precision is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    return jax.lax.Precision.HIGHEST


def product(x: Float[Array, "B T in"], weight: Matrix) -> Float[Array, "B T out"]:
    """Multiplies `x @ weight.T`, in the dtype of `x`; quantised weights as `jaxspec.nets.quantised` says.

    A pass over a few tokens should cost little more than a pass over one, whose cost is reading the weights once. On
    CPU that takes care: XLA's product of a few rows with a large matrix copies the matrix into its own layout, which
    was measured at two to three passes over one; with the matrix as the left factor it is not copied, which was
    measured at 1.1 to 1.5. (The barrier keeps the compiler from swapping the factors back.)

    On TPU one row takes care: its product is compiled as multiply-and-add on the vector unit, far slower than the
    memory. As one of 8 rows it goes to the matrix unit: a gated feed-forward block of 4096 by 10240 in bfloat16 is
    305,000 estimated cycles of a v5p, and 532,000 with one row.

    Of several rows the compiler may fuse the product before it into this one, and compute that again and again; for
    large matrices a barrier keeps it from that. With libtpu's own options, a verify pass over 6 tokens of Llama 3.1 8B
    is 17.4 million estimated cycles of a v5p with it, and 22.4 without; of T5-XXL 13.3 and 15.8. For a draft model's
    small matrices it would cost a fifth. A second barrier after the product keeps the norm that follows out of it: to
    sum a whole row, the product would be made by narrow blocks of columns, 158,000 cycles for 4096 by 14336, and
    124,000 by itself. The estimates are what `tests/scripts/tpu_programs.py` prints. Quantised matrices are treated
    alike.

    >>> product(jnp.array([[[1.0, 2.0]]]), jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])).tolist()
    [[[1.0, 2.0, 3.0]]]
    """
    rows = x.shape[0] * x.shape[1]
    if isinstance(weight, Mapping):
        multiply = functools.partial(quantised.product, precision=precision(x.dtype))
        return jax.lax.platform_dependent(
            x,
            weight,
            cpu=lambda x, weight: multiply(x, weight, how=quantised.by_blocks),
            tpu=_on_tpu,
            default=lambda x, weight: multiply(x, weight, how=quantised.apart_from_loops),
        )
    # Parameters keep their dtype; XLA fuses the conversion into the product.
    weight = weight.astype(x.dtype)
    if rows > FEW:
        return _plainly(x, weight)
    if rows == 1:
        return jax.lax.platform_dependent(x, weight, tpu=_on_tpu, default=_plainly)
    return jax.lax.platform_dependent(x, weight, cpu=_weight_first, tpu=_on_tpu, default=_plainly)


def _on_tpu(x: Float[Array, "B T in"], weight: Matrix) -> Float[Array, "B T out"]:
    rows, (features, width) = x.shape[0] * x.shape[1], quantised.shape(weight)
    if rows == 1:  # among eight. No barrier after the padding: the eight would go through the main memory
        return _plainly(jnp.pad(jax.lax.optimization_barrier(x), ((0, 0), (0, 7), (0, 0))), weight)[:, :1]
    if rows <= FEW and features * width > LARGE and features <= 8 * width:  # a large vocabulary's head gains nothing
        return jax.lax.optimization_barrier(_plainly(jax.lax.optimization_barrier(x), weight))
    return _plainly(x, weight)


def _plainly(x: Float[Array, "B T in"], weight: Matrix) -> Float[Array, "B T out"]:
    if isinstance(weight, Mapping):
        return quantised.product(x, weight, precision(x.dtype))
    return jax.lax.dot_general(x, weight, (((2,), (1,)), ((), ())), precision=precision(x.dtype))


def _weight_first(x: Float[Array, "B T in"], weight: Float[Array, "out in"]) -> Float[Array, "B T out"]:
    flat = x.reshape(-1, x.shape[-1])
    # The matrix comes first, so that it is not copied: `product` has the measurements.
    y = jax.lax.dot_general(weight, flat, (((1,), (1,)), ((), ())), precision=precision(x.dtype))
    return jax.lax.optimization_barrier(y).T.reshape(*x.shape[:-1], weight.shape[0])
