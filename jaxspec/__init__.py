"""Speculative decoding for JAX: exact, one jitted program per generation, any model, any drafter.

`load` a model, `generate` or `stream` from it; `drafters` and `accept` hold the alternatives, `base` the types.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxspec import accept, drafters
from jaxspec.base import Drafter, LanguageModel, Model, Prompt
from jaxspec.decode import Generation, autoregressive, generate, speculative, stream

if TYPE_CHECKING:
    from jaxspec.model import load

__version__ = "0.1.0"

__all__ = [
    "Drafter",
    "Generation",
    "LanguageModel",
    "Model",
    "Prompt",
    "accept",
    "autoregressive",
    "drafters",
    "generate",
    "load",
    "speculative",
    "stream",
]

_LAZY = {"load": "jaxspec.model"}  # these import flax, which the decoding core does without


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
