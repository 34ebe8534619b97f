"""Decoders, and the ways to run them."""

from jaxspec.decode.autoregressive import autoregressive
from jaxspec.decode.beam_search import BeamSearch, beam_search
from jaxspec.decode.generate import Generation, Piece, generate, stream
from jaxspec.decode.request import prepare
from jaxspec.decode.rollout import rollout
from jaxspec.decode.speculative import speculative

__all__ = [
    "BeamSearch",
    "Generation",
    "Piece",
    "autoregressive",
    "beam_search",
    "generate",
    "prepare",
    "rollout",
    "speculative",
    "stream",
]
