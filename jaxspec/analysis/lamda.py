"""The shapes of LaMDA, which Leviathan et al. (arXiv 2211.17192) drafted for: its weights were
never published.
"""

from __future__ import annotations

from typing import Any

from jaxspec.nets import decoder

VOCAB = 32_000  # SentencePiece
HEAD_DIM = 128
WIDER = 8  # times the model dimension: the hidden layer of a feed-forward block
SHAPES = {  # layers, model dimension, heads
    "lamda-137b": (64, 8192, 128),
    "lamda-8b": (16, 4096, 64),
    "lamda-2b": (10, 2560, 40),
    "lamda-100m": (4, 768, 6),  # ours: the paper drafts with one of 100M, and gives no shape
}


def sizes() -> dict[str, Any]:
    """Returns LaMDA's configurations, for random weights (`--target random:lamda-8b`), plans and
    estimates.

    It is a decoder with relative positions as T5's, gated GELU, and one matrix for embedding and
    head.

    >>> [config.vocab_size for config in sizes().values()]
    [32000, 32000, 32000, 32000]

    Reference: Thoppilan et al., "LaMDA: Language Models for Dialog Applications", arXiv 2201.08239,
    table 27.
    """
    facts: dict[str, Any] = {"activation": "gelu", "positions": "relative", "tied_head": True}
    return {
        name: decoder.decoder_config(
            VOCAB, dim, WIDER * dim, layers, heads, heads, HEAD_DIM, **facts
        )
        for name, (layers, dim, heads) in SHAPES.items()
    }
