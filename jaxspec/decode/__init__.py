"""Decoders, and the ways to run them."""

from jaxspec import optional_imports
from jaxspec.decode.autoregressive import autoregressive
from jaxspec.decode.beam_search import beam_search
from jaxspec.decode.chat import Chat, chat
from jaxspec.decode.generate import generate, prefix, stream
from jaxspec.decode.output import BeamSearch, Generation, Piece
from jaxspec.decode.request import prepare
from jaxspec.decode.rollout import rollout
from jaxspec.decode.scoring import Score, score
from jaxspec.decode.shared_prefix import SharedPrefix
from jaxspec.decode.speculative import speculative

__all__ = [
    name for name, value in list(globals().items()) if callable(value) and not name.startswith("_")
]

__getattr__ = optional_imports.submodules(__name__)
