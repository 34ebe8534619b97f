"""Products with weights [out, in], PyTorch's layout: most of the time of a decoding step.

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

from jaxspec.nets import kernels, on_cpu, quantised
from jaxspec.nets.quantised import Matrix, Precision, Quantised

FEW = on_cpu.FEW  # rows up to which backends differ
# entries of a matrix above which a TPU must not recompute its factor, and a GPU not convert it
LARGE = 1 << 24


class Dense(nn.Module):
    """`x @ weight.T + bias`; computed in `dtype`; parameters stay in the dtype they have.

    A weight may be given quantised (`jaxspec.weights.quantisation`), though never initialised so.

    Attributes:
        features: the width of the output.
        use_bias: whether a bias is added.
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


def parameter(
    module: nn.Module, name: str, init: nn.initializers.Initializer, shape: tuple[int, ...]
) -> Any:
    """Declares `module.param(name, init, shape)` in float32, a fifth faster to trace than Flax's
    own.

    Of a parameter that is there flax traces the initialiser again, in each program, to compare
    shapes. Here they are compared without that.
    """
    if not module.has_variable("params", name):
        return module.param(name, init, shape, jnp.float32)
    value = module.get_variable("params", name)
    stored_shape = quantised.shape(value)
    if stored_shape != shape:
        raise errors.ScopeParamShapeError(name, "/".join(module.path), stored_shape, shape)
    return value


def precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Returns the precision of products of a dtype: float32 is multiplied as float32 on every
    backend.

    By default a TPU multiplies float32 in bfloat16, and some GPUs in TF32. Both keep some three
    digits. A pass over one token and one over several would then differ by more than near ties, and
    so would the text. If you prefer that speed, use jax's own switch, which takes precedence:
    `jax.default_matmul_precision("bfloat16")` around calls, or the configuration option. Other
    dtypes are multiplied as they are.

    >>> str(precision(jnp.float32)), precision(jnp.bfloat16)
    ('HIGHEST', None)
    >>> with jax.default_matmul_precision("bfloat16"):
    ...     print(precision(jnp.float32))
    None
    """
    chosen = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if dtype != jnp.float32 or chosen is not None:
        return None
    return jax.lax.Precision.HIGHEST


def product(x: Float[Array, "B T in"], weight: Matrix) -> Float[Array, "B T out"]:
    """Multiplies `x @ weight.T`, in the dtype of `x`; quantised weights as `jaxspec.nets.quantised`
    says.

    A pass over a few tokens should cost little more than a pass over one, which reads the weights
    once.

    `nets.on_cpu` has the forms for a CPU. `nets.kernels` lets a kernel multiply with quantised
    matrices.

    On a TPU, the product of one row is compiled for the vector unit, which is far slower than the
    memory. Padded to 8 rows it goes to the matrix unit. A gated feed-forward block of 4096 by 10240
    in bfloat16 then takes 305,000 estimated cycles of a v5p, instead of 532,000.

    With several rows the compiler may fuse the product before this one into it, and compute that
    again and again. For large matrices a barrier prevents it. A verify pass over 6 tokens of Llama
    3.1 8B takes 17.4 million estimated cycles of a v5p with the barrier, and 22.4 without (libtpu's
    own options). T5-XXL takes 13.3 and 15.8. For a draft model's small matrices the barrier would
    cost a fifth. A second barrier, after the product, keeps the next norm out of it. The norm sums
    whole rows, so the fused product would be made by narrow blocks of columns: 158,000 cycles for
    4096 by 14336, and 124,000 by itself. `tests/scripts/tpu_programs.py` prints these estimates.
    Quantised matrices are treated alike.

    >>> product(jnp.array([[[1.0, 2.0]]]), jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])).tolist()
    [[[1.0, 2.0, 3.0]]]
    """
    if isinstance(weight, Mapping):
        multiply = functools.partial(quantised.product, precision=precision(x.dtype))
        on_cpus = functools.partial(multiply, how=on_cpu.quantised_product)
        on_gpus = functools.partial(multiply, how=_among_two)
        usual: dict[str, kernels.ArrayFunction] = {
            "cpu": on_cpus,
            "tpu": _on_tpu,
            "default": on_gpus,
        }
        forms = usual | kernels.forms("product", on_gpus, x, weight)
        return jax.lax.platform_dependent(x, weight, **forms)
    # Parameters keep their dtype; XLA fuses the conversion into the product.
    weight = weight.astype(x.dtype)
    rows = x.shape[0] * x.shape[1]
    # in training, too, where each backend's branch would keep arrays for the gradient
    if rows > FEW:
        return _plainly(x, weight)
    if rows == 1 and not on_cpu.is_narrow(x.dtype):
        return jax.lax.platform_dependent(x, weight, tpu=_on_tpu, default=_plainly)
    on_cpus = functools.partial(on_cpu.product, precision=precision(x.dtype))
    return jax.lax.platform_dependent(x, weight, cpu=on_cpus, tpu=_on_tpu, default=_plainly)


def _on_tpu(x: Float[Array, "B T in"], weight: Matrix) -> Float[Array, "B T out"]:
    rows, (features, width) = x.shape[0] * x.shape[1], quantised.shape(weight)
    # among eight. No barrier after the padding: the eight would go through the main memory
    if rows == 1:
        return _plainly(jnp.pad(jax.lax.optimization_barrier(x), ((0, 0), (0, 7), (0, 0))), weight)[
            :, :1
        ]
    # a large vocabulary's head gains nothing
    if rows <= FEW and features * width > LARGE and features <= 8 * width:
        return jax.lax.optimization_barrier(_plainly(jax.lax.optimization_barrier(x), weight))
    return _plainly(x, weight)


def _among_two(
    x: Float[Array, "B T in"], matrix: Quantised, precision: Precision
) -> Float[Array, "B T out"]:
    """Multiplies outside of loops. A single row with a large matrix with one scale per output is
    multiplied as two rows.

    A GPU's product of one row is compiled in float32 (TF32), and every entry is converted to it.
    Products of two rows stay in bfloat16 (docs/gpu.md). The padding may be a kernel, which a small
    matrix would not pay for.
    """
    alone = x.shape[0] * x.shape[1] == 1 and on_cpu.is_narrow(x.dtype)
    more = int(
        alone and matrix["scale"].shape[1] == 1 and quantised.entries_of(matrix).size > LARGE
    )
    return quantised.apart_from_loops(jnp.pad(x, ((0, 0), (0, more), (0, 0))), matrix, precision)[
        :, : x.shape[1]
    ]


def _plainly(x: Float[Array, "B T in"], weight: Matrix) -> Float[Array, "B T out"]:
    if isinstance(weight, Mapping):
        return quantised.product(x, weight, precision(x.dtype))
    return jax.lax.dot_general(x, weight, (((2,), (1,)), ((), ())), precision=precision(x.dtype))
