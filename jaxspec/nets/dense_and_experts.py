"""A dense feed-forward block beside a mixture of experts, both of the same stream (Gemma 4
26B-A4B).

Each has a norm before it and one after it, and the router has another norm: the block normalises
its input itself (`LayerShape.ff_norm` is False).

Shapes: B batch, T step, M model dimension, E experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.nets.attention import FeedForward, Norm
from jaxspec.nets.dense import parameter
from jaxspec.nets.experts import Experts, ExpertsShape, Router, choose
from jaxspec.nets.shapes import Block, DecoderConfig, FeedForwardShape


@dataclasses.dataclass(frozen=True)
class DenseAndExpertsShape(Block):
    """A gated dense block and experts, whose outputs are added.

    Attributes:
        dim: hidden units of the dense block.
        experts: the experts, which have its activation.
    """

    dim: int
    experts: ExpertsShape

    @property
    def parts(self) -> Mapping[str, int]:
        parts = dict(self.experts.parts)
        return parts | {"ff": math.gcd(self.dim, parts.get("ff", 0))}

    @property
    def layouts(self) -> Mapping[str, tuple[str, ...]]:
        inwards = dict.fromkeys(("dense/gate", "dense/wi"), ("ff", "dim"))
        return {**self.experts.layouts, **inwards, "dense/out": ("dim", "ff")}

    def share(self, path: str) -> float:
        return self.experts.share(path)

    def module(self, config: DecoderConfig) -> DenseAndExperts:
        return DenseAndExperts(
            self, config.dim, config.norm.epsilon, jnp.dtype(config.dtype), parent=None
        )


class DenseAndExperts(nn.Module):
    """Both blocks, their norms and the router."""

    shape: DenseAndExpertsShape
    dim: int
    epsilon: float
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        def norm(name: str, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
            return Norm(self.epsilon, dtype=self.dtype, name=name)(x)

        shape = self.shape.experts
        dense = FeedForward(
            FeedForwardShape(self.shape.dim, shape.activation), self.dim, self.dtype, name="dense"
        )
        of_dense = norm("dense_post_norm", dense(norm("dense_norm", x)))
        # The router reads the stream by a norm without weights, then a scale of its own.
        scale: Array = parameter(self, "router_scale", nn.initializers.ones, (self.dim,))
        routed = Norm(self.epsilon, dtype=jnp.dtype(jnp.float32), scaled=False)(x)
        routed = routed * (scale * self.dim**-0.5)[None, None, :]
        ids, weights = choose(
            Router(shape.count, name="router")(routed), shape.top, shape.renormalised
        )
        by_expert: Array = parameter(self, "expert_scale", nn.initializers.ones, (shape.count,))
        experts = Experts(shape, self.dim, self.dtype, name="experts")
        of_experts = experts(norm("experts_norm", x), ids, weights * by_expert[ids])
        return of_dense + norm("experts_post_norm", of_experts)
