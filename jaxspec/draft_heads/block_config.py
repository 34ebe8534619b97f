"""The shape of block drafters, which DFlash, DSpark and DFlash 2 are.

Shapes: L positions before the drafted ones that a memory has read.
"""

from __future__ import annotations

import dataclasses

from jaxspec.core.checks import at_least, in_range, one_of
from jaxspec.draft_heads import formats
from jaxspec.nets.decoder import DecoderConfig

MARKOV = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """The shape of a block drafter.

    Attributes:
        layer: the shape of its layers; its vocabulary is the target's.
        hidden_size: width of the target's hidden states.
        taps: the layers that it reads, counted as `language_model(config, taps)` does.
        block: fed tokens of a block: the last committed one, and mask tokens.
        mask_token: the id of these; it may lie past the target's vocabulary if the drafter has an
            embedding.
        from_anchor: whether the position of the last committed token predicts a token, too
            (DSpark). A block then has `block` draft tokens, otherwise one fewer.
        markov_rank: the rank of DSpark's matrix; 0 for none.
        markov: the name of its form, of three.
        confidence: whether it estimates the probability that a draft token is accepted, for
            `policies.confidence`, from the features of its position.
        confidence_reads_token: whether this estimate also reads the token before.
        draft_vocab: size of its vocabulary; None: the target's.
        own_embedding, own_head: whether it has these, or takes the target's.
        causal_windows: whether a token of a block sees only those before it and itself, in layers
            with a window; otherwise it sees the whole block.
        causal_full: the same choice for layers without a window.
        windows_from_anchor: whether all tokens of a block see as far back as its first position
            does (speculators); otherwise a window of w ends w - 1 positions before, and if not
            causal after, each token (z-lab, SGLang).
        reads_source: whether it reads the output of the target's encoder.
        embedding_scale, logits_scale, logits_cap: the factors of embeddings and logits, then a soft
            cap of the logits. They replace the target's embedding and head.
    """

    layer: DecoderConfig
    hidden_size: int
    taps: tuple[int, ...]
    block: int
    mask_token: int
    from_anchor: bool = False
    markov_rank: int = 0
    markov: str = "vanilla"
    confidence: bool = False
    confidence_reads_token: bool = True
    draft_vocab: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    causal_windows: bool = True
    causal_full: bool = False
    windows_from_anchor: bool = True
    reads_source: bool = False
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None

    def __post_init__(self):
        c = self.layer
        if c.positions != "rotary":
            raise ValueError("expected layers with rotary positions")
        if not self.taps:
            raise ValueError(
                "taps is empty: a block drafter reads hidden states of at least one layer"
            )
        one_of(self.markov, "markov", MARKOV)
        at_least(1 if self.from_anchor else 2, block=self.block)
        formats.check_own_parts(self, c.dim, self.hidden_size)
        if self.confidence and self.confidence_reads_token and not self.markov_rank:
            raise ValueError(
                "confidence_reads_token is True, and markov_rank is 0: expected vectors of tokens"
            )
        in_range(0, c.vocab_size, below=True, mask_token=self.mask_token)
        if self.reads_source and c.windows:
            raise ValueError(
                "got reads_source and layers with windows: a window would hide the source"
            )
        if not (self.windows_from_anchor or c.windows):
            raise ValueError(
                "windows_from_anchor is False, and no layer has a window: give one, or leave it out"
            )

    @property
    def count(self) -> int:
        """Most draft tokens: 15 of a block of 16 without an anchor's."""
        return self.block - (not self.from_anchor)

    @property
    def is_sequential(self) -> bool:
        """Tells whether a token's logits depend on the draft token before it."""
        return self.markov_rank > 0

    @property
    def memory(self) -> int:
        """Width of the memory that passes from token to token of a block."""
        if self.markov == "rnn":
            return self.markov_rank
        return 0

    @property
    def lead(self) -> int:
        """The positions that a memory has read before the first draft token's: the last committed
        token's, 1, or 0.
        """
        return int(self.memory > 0 and not self.from_anchor)
