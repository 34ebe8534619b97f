"""The shape of LaMDA (arXiv 2201.08239): a decoder with gated GELU and T5's relative positions. No weights are public.

The shape of 137B is the paper's: 64 layers, 8,192 dimensions, 65,536 in the feed-forward block, 128 heads of 128. The
smaller ones keep its proportions at their published sizes, without the embedding. The 100M draft of the speculative
decoding paper has no published shape: ours is one of that size. The models were sampled from with top-40.
"""

from __future__ import annotations

from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.uniform import UniformDecoder, configs
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import Family, FamilyError


def read(table: dict) -> DecoderConfig:
    """Refuses: there are no files to read."""
    raise FamilyError("LaMDA has no published checkpoints")


def write(config: DecoderConfig) -> dict[str, Any]:
    """Refuses: there is no model in transformers that computes this."""
    raise FamilyError("transformers has no decoder with relative positions: save a jaxspec checkpoint instead")


def _lamda(dim: int, layers: int, heads: int, head_dim: int = 128) -> UniformDecoder:
    return UniformDecoder(
        32_000, dim, 8 * dim, layers, heads, heads, head_dim, "gelu", tied_head=True, positions="relative"
    )


SIZES = configs(
    {
        "lamda-100m": _lamda(768, 6, 12, 64),
        "lamda-2b": _lamda(2560, 10, 40),
        "lamda-8b": _lamda(4096, 16, 64),
        "lamda-137b": _lamda(8192, 64, 128),
    }
)

LAMDA = Family("LaMDA's shape", (), read, write, decoders.names, decoders.canonical, SIZES)
