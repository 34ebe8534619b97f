"""Decoders, and the two ways to run them."""

from jaxspec.decode.autoregressive import autoregressive
from jaxspec.decode.generate import Generation, Piece, generate, stream
from jaxspec.decode.speculative import speculative

__all__ = ["Generation", "Piece", "autoregressive", "generate", "speculative", "stream"]
