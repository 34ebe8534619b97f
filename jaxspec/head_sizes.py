"""The [head] tables of recipes: sizes of drafters that read hidden states, of which the target gives the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.base import Model
from jaxspec.draft_heads.eagle import EagleSizes
from jaxspec.draft_heads.mtp import MTPSizes
from jaxspec.nets.block import BlockConfig
from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.exit_adapter import ExitAdapterConfig
from jaxspec.nets.heads import HeadsConfig
from jaxspec.nets.lookahead_embeddings import LookAheadConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """Transformer layers of a drafter, as Llama's.

    Attributes:
        ff_dim, heads: width of the feed-forward block; attention heads.
        kv_heads, head_dim: 0: as many as heads, and the width over the heads.
        layers: how many.
        dim: their width; 0: the target's.
        rope_base: of rotary positions.
        head_norms: whether queries and keys are normalised.
    """

    ff_dim: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    layers: int = 1
    dim: int = 0
    rope_base: float = 10_000.0
    head_norms: bool = False

    def layer(self, target: Model) -> DecoderConfig:
        """The configuration of the layers."""
        dim = self.dim or target.lm.feature_size
        return DecoderConfig(
            vocab_size=target.lm.vocab_size,
            dim=dim,
            ff_dim=self.ff_dim,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim or dim // self.heads,
            head_norms=self.head_norms,
            rope_base=self.rope_base,
            max_positions=target.lm.max_positions,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitAdapterSizes(Layers):
    """An adapter of an early exit (Kangaroo).

    Attributes:
        exit: after how many of the target's layers.
        ff_dim: not read: there is no feed-forward block.
    """

    exit: int
    ff_dim: int = 1

    def config(self, target: Model) -> ExitAdapterConfig:
        """The adapter's configuration, for a target."""
        return ExitAdapterConfig(self.layer(target), self.exit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes(Layers):
    """A block drafter; attributes as `nets.block.BlockConfig` has them."""

    taps: tuple[int, ...]
    block: int
    mask_token: int
    from_anchor: bool = False
    markov_rank: int = 0
    markov: str = "vanilla"
    draft_vocab: int = 0
    own_embedding: bool = False
    own_head: bool = False

    def config(self, target: Model) -> BlockConfig:
        """The drafter's configuration, for a target."""
        return BlockConfig(self.layer(target), target.lm.feature_size, **_own(self, BlockConfig))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsSizes:
    """Heads on the target's features; attributes as `nets.heads.HeadsConfig` has them."""

    heads: int
    blocks: int = 1
    block: str = "residual"
    ff_dim: int = 0
    own_head: bool = True
    draft_vocab: int = 0
    reads_tokens: bool = False

    def config(self, target: Model) -> HeadsConfig:
        """The heads' configuration, for a target."""
        return HeadsConfig(target.lm.vocab_size, target.lm.feature_size, **_own(self, HeadsConfig))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookAheadSizes:
    """How many look-ahead vectors (PaSS)."""

    vectors: int

    def config(self, target: Model) -> LookAheadConfig:
        """The vectors' configuration, for a target."""
        return LookAheadConfig(target.lm.vocab_size, target.lm.feature_size, self.vectors)


HEADS = {
    "eagle": EagleSizes,
    "mtp": MTPSizes,
    "block": BlockSizes,
    "heads": HeadsSizes,
    "exit_adapter": ExitAdapterSizes,
    "lookahead_embeddings": LookAheadSizes,
}


def _own(sizes: Any, kind: type) -> dict[str, Any]:
    """The fields that a configuration has under the same names, but for those of its layers."""
    theirs = {field.name for field in dataclasses.fields(kind)}
    found = {field.name: getattr(sizes, field.name) for field in dataclasses.fields(sizes) if field.name in theirs}
    if found.get("draft_vocab") == 0:
        found["draft_vocab"] = None
    return found
