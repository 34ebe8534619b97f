"""Mixtures of experts: a router sends each token to a few of many small feed-forward blocks.

A pass reads the experts that any of its tokens chose. Pairs (token, expert) are sorted by expert,
and blocks of pairs with one expert are multiplied in turn (`by_blocks`). Ragged products
(`jax.lax.ragged_dot_general`) were tried, but are not used: on a TPU they keep a second copy of all
experts, on a GPU they multiply every token with each.

The choice is made in float32, of a router that stays float32, so that a token's experts in a pass
over several tokens are those in a pass over it alone. A token's experts are summed in the order of
their numbers, in float32.

Shapes: B batch, T step, N = B T tokens, E experts, k of them for each token, M model dimension, F
hidden units.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core.checks import at_least, one_of
from jaxspec.nets import quantised
from jaxspec.nets.attention import ACTIVATIONS
from jaxspec.nets.dense import FEW, parameter, product
from jaxspec.nets.shapes import Block, DecoderConfig

CLAMPED = "clamped"  # gpt-oss' activation: see `ExpertsShape`
Projection = tuple[Any, Array | None]
"""Matrices [n, out, in], quantised or not, and biases [n, out] or None. A single one's lack the
first axis.
"""


@dataclasses.dataclass(frozen=True)
class ExpertsShape(Block):
    """A router, and the experts that it chooses among: gated feed-forward blocks.

    Attributes:
        count: number of experts.
        top: number of experts that each token is given to.
        dim: hidden units of an expert.
        activation: an activation of `FeedForwardShape`, or "clamped": for g the gate's output up to
            `limit`, and u the other projection's from -limit to limit, (u + 1) g sigmoid(alpha g)
            (gpt-oss).
        bias: whether the router and the experts' projections have biases.
        renormalised: whether the weights of a token's chosen experts add up to 1; if not, the
            weights of all experts do.
        alpha, limit: numbers of "clamped".
    """

    count: int
    top: int
    dim: int
    activation: str = "silu"
    bias: bool = False
    renormalised: bool = True
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self):
        one_of(self.activation, "activation", (*ACTIVATIONS, CLAMPED))
        at_least(1, top=self.top)
        if self.top > self.count:
            raise ValueError(
                f"each token is given to {self.top} experts of {self.count}: expected at most all"
            )

    @property
    def parts(self) -> Mapping[str, int]:
        return {"ff": self.dim}

    def share(self, path: str) -> float:
        if path.startswith("experts/"):
            return self.top / self.count
        return 1.0

    def module(self, config: DecoderConfig) -> Mixture:
        return Mixture(self, config.dim, jnp.dtype(config.dtype), parent=None)

    def act(self, gate: Float[Array, "n F"], up: Float[Array, "n F"]) -> Float[Array, "n F"]:
        """Makes the hidden units of the outputs of the gate and of the other projection."""
        if self.activation != CLAMPED:
            return ACTIVATIONS[self.activation](gate) * up
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


def choose(
    logits: Float[Array, "*shape E"], top: int, renormalised: bool = True
) -> tuple[Int[Array, "*shape k"], Float[Array, "*shape k"]]:
    """Chooses the experts of each token, and the weights that these have: a softmax, of theirs or
    of all.

    >>> ids, weights = choose(jnp.log(jnp.array([1.0, 5.0, 4.0])), top=2, renormalised=False)
    >>> ids.tolist(), [f"{x:.2f}" for x in weights]
    ([1, 2], ['0.50', '0.40'])
    """
    best, ids = jax.lax.top_k(logits, top)
    # To renormalise the largest entries of a softmax is to take the softmax of these alone.
    total = jax.nn.logsumexp(best if renormalised else logits, axis=-1, keepdims=True)
    return ids, jnp.exp(best - total)


class Router(nn.Module):
    """Computes a score of each expert for each token, in float32 whatever the stream is."""

    count: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T E"]:
        init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        # "matrix", and no "weight": it is never rounded to bfloat16 or int8.
        scores = product(
            x.astype(jnp.float32), parameter(self, "matrix", init, (self.count, x.shape[-1]))
        )
        if not self.use_bias:
            return scores
        return scores + parameter(self, "bias", nn.initializers.zeros, (self.count,))[None, None, :]


class Stacked(nn.Module):
    """Projections of one shape: matrices [n, out, in] and perhaps biases [n, out]."""

    count: int
    features: int
    use_bias: bool

    @nn.compact
    def __call__(self, width: int) -> Projection:
        init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
        matrices = parameter(self, "weight", init, (self.count, self.features, width))
        if not self.use_bias:
            return matrices, None
        return matrices, parameter(self, "bias", nn.initializers.zeros, (self.count, self.features))


class Experts(nn.Module):
    """The experts without a router: each token goes through those that it is given to."""

    shape: ExpertsShape
    dim: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T M"], ids: Int[Array, "B T k"], weights: Float[Array, "B T k"]
    ) -> Float[Array, "B T M"]:
        """Computes the weighted sum of the experts' outputs for each token."""
        count = self.shape.count
        hidden = self.shape.dim
        use_bias = self.shape.bias
        # Expert e has its gate at 2 e, and the other projection at 2 e + 1: a mesh cuts both alike.
        inwards = Stacked(2 * count, hidden, use_bias, name="inwards")(self.dim)
        outwards = Stacked(count, self.dim, use_bias, name="outwards")(hidden)
        flat = [
            array.reshape(-1, array.shape[-1]) for array in (x.astype(self.dtype), ids, weights)
        ]
        return _mix(self.shape.act, *flat, inwards, outwards).astype(self.dtype).reshape(x.shape)


class Mixture(nn.Module):
    """A router and its experts, as `ExpertsShape` describes them."""

    shape: ExpertsShape
    dim: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        scores = Router(self.shape.count, self.shape.bias, name="router")(x)
        ids, weights = choose(scores, self.shape.top, self.shape.renormalised)
        return Experts(self.shape, self.dim, self.dtype, name="experts")(x, ids, weights)


def _mix(act: Callable[[Array, Array], Array], *arrays: Any) -> Float[Array, "N M"]:
    skipping = functools.partial(by_blocks, act)
    # A GPU asks its host about each condition, which takes longer than it multiplies: it does all
    # blocks.
    without_conditions = functools.partial(by_blocks, act, skips=False)
    return jax.lax.platform_dependent(
        *arrays, cpu=skipping, tpu=skipping, default=without_conditions
    )


def by_blocks(
    act: Callable[[Array, Array], Array],
    x: Float[Array, "N M"],
    ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    inwards: Projection,
    outwards: Projection,
    skips: bool = True,
) -> Float[Array, "N M"]:
    """Multiplies block by block, each of at most `FEW` tokens of one expert; the sum is float32.

    Up to `FEW` tokens each expert that is used has one block: its matrices are read once, and no
    other's. Without conditions the number of blocks is the largest possible; blocks without tokens
    read the last expert again.

    Args:
        act: the activation between the two projections.
        x, ids, weights: tokens, their experts, and the weights of these.
        inwards: the gate of expert e at 2 e, and its other projection at 2 e + 1.
        outwards: the experts' projections back.
        skips: whether blocks without tokens are left out, by a condition.
    """
    (tokens, top), count = ids.shape, quantised.shape(outwards[0])[0]
    size = min(tokens, FEW)
    expert_of = ids.reshape(-1)
    order = jnp.argsort(expert_of, stable=True).astype(jnp.int32)  # pairs (token, expert) by expert
    sizes = jnp.bincount(expert_of, length=count).astype(jnp.int32)  # [E], each expert's pairs
    starts = jnp.cumsum(sizes) - sizes
    blocks = -(-sizes // size)
    ends = jnp.cumsum(blocks)
    # Each expert that is used adds at most one short block to the full ones.
    if tokens <= FEW:
        num_blocks = min(count, tokens * top)
    else:
        num_blocks = tokens * top // size + min(count, tokens * top)
    number = jnp.arange(num_blocks, dtype=jnp.int32)
    is_used = number < ends[-1]
    number = jnp.minimum(number, ends[-1] - 1)
    expert = jnp.minimum(jnp.searchsorted(ends, number, side="right"), count - 1).astype(jnp.int32)
    done = (number - (ends - blocks)[expert]) * size  # the expert's pairs in blocks before
    present = jnp.where(is_used, jnp.clip(sizes[expert] - done, 0, size), 0)

    def add(total: Array, expert: Array, first: Array, present: Array) -> Array:
        place_in = jnp.arange(size, dtype=jnp.int32)
        pairs = order[jnp.minimum(first + place_in, len(order) - 1)]
        token = pairs // top
        gate, up = (_project(x[token], *_entry(inwards, 2 * expert + half)) for half in (0, 1))
        outputs = _project(act(gate, up), *_entry(outwards, expert))
        weighted = outputs.astype(jnp.float32) * weights.reshape(-1)[pairs][:, None]
        # Chosen, not multiplied by 0: what overflows in an expert that a token did not choose is no
        # part of its sum.
        return total.at[token].add(jnp.where((place_in < present)[:, None], weighted, 0.0))

    def step(total: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
        if not skips:
            return add(total, *block), None
        return jax.lax.cond(block[2] > 0, add, lambda total, *block: total, total, *block), None

    fed = expert, starts[expert] + done, present
    return jax.lax.scan(step, jnp.zeros(x.shape, jnp.float32), fed)[0]


def _entry(stack: Projection, index: Int[Array, ""]) -> Projection:
    return jax.tree.map(
        lambda array: jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False), stack
    )


def _project(
    x: Float[Array, "n in"], matrix: Any, bias: Float[Array, " out"] | None
) -> Float[Array, "n out"]:
    y = product(x[None], matrix)[0]
    if bias is None:
        return y
    return y + bias.astype(x.dtype)[None, :]
