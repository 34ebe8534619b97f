"""Drafters as others publish them: what config.json and the names of tensors mean here, a file a format."""

from __future__ import annotations

from typing import Any

from jaxspec.draft_heads import eagle as eagle_net
from jaxspec.draft_heads import mtp as mtp_net
from jaxspec.nets import block as block_net
from jaxspec.nets import exit_adapter as exit_adapter_net
from jaxspec.nets import heads as heads_net
from jaxspec.nets import lookahead_embeddings as lookahead_net
from jaxspec.published.block import BLOCK
from jaxspec.published.common import Format, TargetShape
from jaxspec.published.kangaroo import KANGAROO
from jaxspec.published.lookahead_embeddings import LOOKAHEAD_EMBEDDINGS
from jaxspec.published.medusa import MEDUSA

__all__ = ["Format", "TargetShape", "format_of", "net_of"]

FORMATS: tuple[Format, ...] = (
    eagle_net.KIND.format,
    BLOCK,
    MEDUSA,
    KANGAROO,
    LOOKAHEAD_EMBEDDINGS,
    mtp_net.KIND.format,
)
NETS = {  # configuration: where its network has `head` and `init`, and its format
    eagle_net.EagleConfig: (eagle_net, eagle_net.KIND.format),
    block_net.BlockConfig: (block_net, BLOCK),
    heads_net.HeadsConfig: (heads_net, MEDUSA),
    mtp_net.MTPConfig: (mtp_net, mtp_net.KIND.format),
    exit_adapter_net.ExitAdapterConfig: (exit_adapter_net, KANGAROO),
    lookahead_net.LookAheadConfig: (lookahead_net, LOOKAHEAD_EMBEDDINGS),
}


def net_of(config: Any) -> Any:
    """The module of a configuration's network."""
    return NETS[type(config)][0]


def format_of(config: Any) -> Format:
    """The format of a configuration's files."""
    return NETS[type(config)][1]
