"""Speculative decoding for JAX: exact, one jitted program per generation, any model, any drafter.

`load` a model, `generate` or `stream` from it, `score` texts or `transcribe` sound. `drafters`,
`rules` and `policies` hold the alternatives, `core` the types. `sharding` places models on several
devices; `testing` checks your models, rules and drafters. With `trim_vocabulary`,
`share_vocabulary` and `map_vocabulary` a model with another vocabulary can draft. `speculate`
applies speculative decoding to any two slow functions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec import drafters, policies, rules, sharding, testing
    from jaxspec.audio.transcribe import Transcript, transcribe
    from jaxspec.core import BoundDrafter, BoundPolicy, Drafter, LanguageModel, Model, Prompt
    from jaxspec.decode import (
        BeamSearch,
        Generation,
        Score,
        autoregressive,
        beam_search,
        chat,
        generate,
        prefix,
        prepare,
        rollout,
        score,
        speculative,
        stream,
    )
    from jaxspec.draft_heads.load import load_drafter
    from jaxspec.drafters.hidden_states import DraftHead
    from jaxspec.jobs import Completion, generate_many
    from jaxspec.speculative_execution import speculate
    from jaxspec.vocab.cross_tokenizer import share_vocabulary
    from jaxspec.vocab.languages import with_languages
    from jaxspec.vocab.remap import map_vocabulary
    from jaxspec.vocab.trim import trim_vocabulary
    from jaxspec.weights.arrays import from_arrays
    from jaxspec.weights.loading import load, with_taps
    from jaxspec.weights.tensors import CheckpointError

__version__ = "0.1.0"

# Imported when first asked for: jax takes a second, and `jaxspec --help` needs neither it nor flax.
_HOMES = {
    "jaxspec.audio.transcribe": "Transcript transcribe",
    "jaxspec.core": "BoundDrafter BoundPolicy Drafter LanguageModel Model Prompt",
    "jaxspec.decode": "BeamSearch Generation Score autoregressive beam_search chat generate "
    "prefix prepare rollout score speculative stream",
    "jaxspec.draft_heads.load": "load_drafter",
    "jaxspec.drafters.hidden_states": "DraftHead",
    "jaxspec.jobs": "Completion generate_many",
    "jaxspec.speculative_execution": "speculate",
    "jaxspec.vocab.cross_tokenizer": "share_vocabulary",
    "jaxspec.vocab.languages": "with_languages",
    "jaxspec.vocab.remap": "map_vocabulary",
    "jaxspec.vocab.trim": "trim_vocabulary",
    "jaxspec.weights.arrays": "from_arrays",
    "jaxspec.weights.loading": "load with_taps",
    "jaxspec.weights.tensors": "CheckpointError",
}
_PACKAGES = ("drafters", "policies", "rules", "sharding", "testing")
__all__ = sorted([*_PACKAGES, *" ".join(_HOMES.values()).split()])


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names.split()), None)
    if home is None:  # a `from` import of the helper would ask this function for it
        return importlib.import_module("jaxspec.optional_imports").submodules(__name__)(name)
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
