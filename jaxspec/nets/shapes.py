"""The shape of a decoder as values: a tuple of layers, each with its attention, its feed-forward
block and its norms.

A family of models is a way to fill these in. Layers may differ in anything; nothing here is a flag
of one family. A block of another kind is a class with the methods of `Block`, and of `Mixer` if it
reads other positions.

Shapes: B batch, T step, M model dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxspec.core import kv_cache as kv
from jaxspec.core.checks import number, one_of
from jaxspec.nets.attention import ACTIVATIONS, Attention, FeedForward, Norm
from jaxspec.nets.rotary import Rotary

POSITIONS = ("rotary", "relative", "learned")
NORMS = ("rms", "layer")
NORMED = ("head", "each", "rotated", "whole")  # what norms of queries and keys are of
NONE: Mapping[str, Any] = MappingProxyType({})


class Block:
    """A block of a layer: a frozen dataclass with these. By default no axis is cut."""

    @property
    def parts(self) -> Mapping[str, int]:
        """Into how many parts each of its logical axes may be cut (`sharding.Axes`)."""
        return NONE

    @property
    def layouts(self) -> Mapping[str, tuple[str, ...]]:
        """Axes of its matrices that `sharding.LAYERS` lacks, by the ends of their paths."""
        return NONE

    def module(self, config: DecoderConfig) -> Any:
        """Makes the Linen module, [B, T, M] -> [B, T, M], without a parent: the layer it is given
        to adopts it.

        `LayerShape.last` takes a second array, and `DecoderConfig.side` other ones: see there.
        """
        raise NotImplementedError(f"a {type(self).__name__} makes no module")

    def share(self, path: str) -> float:
        """The share of a matrix that each token is multiplied with; `path` is the matrix's, within
        the block.
        """
        return 1.0


class Mixer(Block):
    """A block that reads other positions, by a cache.

    Its module has the method `mix` of `nets.attention.Attention`: (x [B, T, M], read, inputs) ->
    (addition [B, T, M], record). The layer adds the first to its stream. The record is what `read`
    returned, for the cache.

    Attributes:
        window: number of positions that a query attends to; None for all, or in layers without
            queries.
        shares: number of the layer whose keys it reads; None: it stores keys, or reads none.
    """

    window: int | None = None
    shares: int | None = None

    @property
    def rotation(self) -> tuple[Rotary, int] | None:
        """The rotation of its inputs, and the rotated dimension; None without one."""
        return None

    def cache(self, config: DecoderConfig) -> kv.CacheMaker:
        """Makes empty caches of the layer."""
        raise NotImplementedError(f"a {type(self).__name__} has no cache")


@dataclasses.dataclass(frozen=True)
class AttentionShape(Mixer):
    """The attention of a layer.

    Attributes:
        heads, kv_heads, head_dim: query heads, key-value heads that groups of them share, and their
            dimension.
        window: number of positions that a query attends to, including itself; None for all.
        rotary: how queries and keys are rotated; None where they are not.
        query_scalar: scores are divided by its root; None for head_dim.
        cap: the soft cap of the scores; None for none.
        qkv_bias, out_bias: whether these projections have biases.
        key_bias: whether `qkv_bias` holds for keys, too (not in Whisper).
        head_norms: whether each query head and key head is normalised, before it is rotated (Qwen
            3, Gemma 3).
        norms_of: "head" for these. With "each" every head has a separate scale, without a bias
            (Command R+, StableLM 2 12B). With "rotated" heads are normalised after they are rotated
            (Hunyuan), with "whole" all heads together (OLMo 2).
        value_norm: whether each value head is normalised, without a scale (Gemma 4).
        keys_are_values: whether values are the projected keys, before their norm and rotation
            (Gemma 4).
        shares: the number of the layer whose keys and values it attends to instead of storing any;
            None: its own.
        gate: whether a gate of each head, projected beside its query, multiplies the head's output
            (Qwen 3.5).
        sinks: whether each head's softmax has one more score, without a key (gpt-oss).
        reads_source: whether it attends to an encoder's keys as well (T5Gemma 2).
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    rotary: Rotary | None = None
    query_scalar: float | None = None
    cap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    norms_of: str = "head"
    value_norm: bool = False
    keys_are_values: bool = False
    shares: int | None = None
    gate: bool = False
    sinks: bool = False
    reads_source: bool = False
    key_bias: bool = True

    def __post_init__(self):
        one_of(self.norms_of, "norms_of", NORMED)
        if self.heads % self.kv_heads:
            complaint = f"{self.heads} query heads cannot share {self.kv_heads} key-value heads"
            raise ValueError(f"{complaint}: expected a divisor")
        if self.rotary is None or self.rotary.dims is None:
            turned = self.head_dim
        else:
            turned = self.rotary.dims
        if self.rotary is not None and (turned % 2 or not 0 < turned <= self.head_dim):
            expected = f"an even number from 2 to {self.head_dim}"
            raise ValueError(
                f"{turned} of a head's {self.head_dim} dimensions are rotated: expected {expected}"
            )

    @property
    def rotation(self) -> tuple[Rotary, int] | None:
        if self.rotary is None:
            return None
        return (self.rotary, self.head_dim)

    @property
    def scale(self) -> float:
        """The factor of the scores: 0.125 for heads of 64 dimensions."""
        return (self.head_dim if self.query_scalar is None else self.query_scalar) ** -0.5

    @property
    def parts(self) -> Mapping[str, int]:
        return {"heads": self.heads, "kv_heads": self.kv_heads}

    def module(self, config: DecoderConfig) -> Attention:
        dtype = jnp.dtype(config.dtype)
        return Attention(
            self, config.dim, config.norm_module, config.norm.epsilon, dtype, parent=None
        )

    def cache(self, config: DecoderConfig) -> kv.CacheMaker:
        dtype = jnp.dtype(config.dtype)
        if self.shares is not None:
            return kv.shared(self.shares)
        if self.window is None:
            return kv.whole(self.kv_heads, self.head_dim, dtype)
        # Relative biases go by slots, so that entry i must lie in slot i.
        return kv.window(
            self.kv_heads, self.head_dim, self.window, dtype, ring=config.positions != "relative"
        )


@dataclasses.dataclass(frozen=True)
class FeedForwardShape(Block):
    """The feed-forward block of a layer.

    Attributes:
        dim: its hidden units.
        activation: "silu", "gelu" (by tanh), "gelu_erf" (the exact one), "relu", "relu2" (its
            square), or "xielu", which has parameters (Apertus).
        gated: whether a third projection is multiplied in.
        bias: whether its projections have biases.
    """

    dim: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self):
        one_of(self.activation, "activation", (*ACTIVATIONS, "xielu"))

    @property
    def parts(self) -> Mapping[str, int]:
        return {"ff": self.dim}

    def module(self, config: DecoderConfig) -> FeedForward:
        return FeedForward(self, config.dim, jnp.dtype(config.dtype), parent=None)


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """A layer: attention and a feed-forward block, by default each after a norm.

    Attributes:
        attention, ff: the two blocks: an `AttentionShape` and a `FeedForwardShape`, or classes with
            their methods.
        post_norms: whether a block's output is normalised (Gemma 2 and 3).
        pre_norms: whether a block's input is normalised; not in OLMo 2, which has post-norms alone.
        ff_norm: whether `pre_norms` holds of the feed-forward block; False for one that normalises
            its input itself.
        cross: the attention to an encoder's output, between these two blocks; None without one.
            Nothing in it is rotated.
        parallel: whether both blocks read the same stream, after one norm (Cohere).
        added_scale: a factor of what each block adds (Granite).
        last: a third block, (stream [B, T, M], the layer's side input [B, T, P] or None) -> stream;
            None for none.
    """

    attention: AttentionShape
    ff: FeedForwardShape
    post_norms: bool = False
    last: Block | None = None
    pre_norms: bool = True
    parallel: bool = False
    added_scale: float = 1.0
    ff_norm: bool = True
    cross: AttentionShape | None = None

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks by the names that their parameters have in a layer."""
        blocks = {
            "attention": self.attention,
            "cross": self.cross,
            "ff": self.ff,
            "last": self.last,
        }
        return {name: block for name, block in blocks.items() if block is not None}


@dataclasses.dataclass(frozen=True)
class NormShape:
    """The norms of a network.

    Attributes:
        kind: "rms" (no mean is taken, no bias is added) or "layer".
        epsilon: added to the mean square or to the variance.
        from_one: whether a norm stores its scale minus 1 (Gemma 2 and 3, Nemotron).
        bias: whether a "layer" norm adds one; Cohere's do not.
    """

    kind: str = "rms"
    epsilon: float = 1e-6
    from_one: bool = False
    bias: bool = True

    def __post_init__(self):
        one_of(self.kind, "norm", NORMS)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder.

    Attributes:
        vocab_size, dim: number of token ids, and width of the residual stream.
        layers: the layers, the first one first.
        norm: the kind of all norms.
        tied_head: whether the head is the embedding.
        scale_embedding: whether embeddings are multiplied by the root of dim (Gemma).
        logits_cap: the soft cap of the logits; None for none.
        embedding_scale, logits_scale: factors of embeddings and of logits, these before their cap
            (Granite, Cohere).
        positions: "rotary" where the layers say how, "relative" for T5's biases, "learned" for a
            table.
        buckets, max_distance: options of relative biases.
        max_positions: longest row to accept, and the size of a table of positions; None if nothing
            limits it.
        end_tokens: ids that end a row; empty for the tokenizer's end-of-sequence token.
        side: (ids [B, T], embedded ids [B, T, M]) -> a further input [B, T, layers, P] of each
            layer's last block (Gemma 4's embeddings per layer). None: the blocks read the stream
            alone.
        dtype: the dtype of the computation, "float32" or "bfloat16". Logits are float32 always.
    """

    vocab_size: int
    dim: int
    layers: tuple[LayerShape, ...]
    norm: NormShape = NormShape()
    tied_head: bool = False
    scale_embedding: bool = False
    logits_cap: float | None = None
    positions: str = "rotary"
    buckets: int = 32
    max_distance: int = 128
    max_positions: int | None = None
    end_tokens: tuple[int, ...] = ()
    side: Block | None = None
    dtype: str = "float32"
    embedding_scale: float = 1.0
    logits_scale: float = 1.0

    def __post_init__(self):
        one_of(self.positions, "positions", POSITIONS)
        # Records are handed from layer to layer: only an earlier layer's exist, and only if it made
        # them itself.
        sources = [layer.attention.shares for layer in self.layers]
        for i, source in enumerate(sources):
            if source is not None and not (0 <= source < i and sources[source] is None):
                raise ValueError(
                    f"layer {i} shares the keys of layer {source}: expected one before it with its "
                    "own"
                )
        if self.positions == "learned" and self.max_positions is None:
            raise ValueError(
                "positions are learned, and max_positions is None: expected the size of their table"
            )
        for name in ("embedding_scale", "logits_scale"):
            number(getattr(self, name), name, "a finite number above 0", above=0)

    def norm_module(self, heads: int = 0) -> Any:
        """Makes a norm; with `heads`, a norm with a scale for each head and without a bias."""
        centred = self.norm.kind == "layer"
        has_bias = centred and self.norm.bias and not heads
        return Norm(
            epsilon=self.norm.epsilon,
            unit_offset=self.norm.from_one,
            dtype=jnp.dtype(self.dtype),
            centred=centred,
            has_bias=has_bias,
            heads=heads,
        )

    @property
    def windows(self) -> set[int]:
        """The windows of layers that have one."""
        return {
            layer.attention.window for layer in self.layers if layer.attention.window is not None
        }
