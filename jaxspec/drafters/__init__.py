"""Drafters, one per file. `stepwise` makes chains of those that know their logits, `trees` trees of
the same functions.

Those that draft with a network on the target's hidden states are files of `jaxspec.draft_heads`,
and handed on here; so is the int8 copy of a target, of `jaxspec.weights`. `by_name` makes any of
them from text.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxspec import optional_imports
from jaxspec.drafters.cascade import cascade
from jaxspec.drafters.fallback import fallback
from jaxspec.drafters.greedy import greedy
from jaxspec.drafters.horizontal_cascade import horizontal_cascade
from jaxspec.drafters.lookups.forced import forced
from jaxspec.drafters.lookups.lookahead import jacobi, lookahead
from jaxspec.drafters.lookups.ngram import bigram, ngram, unigram
from jaxspec.drafters.lookups.online_ngram import online_ngram
from jaxspec.drafters.lookups.prompt_lookup import prompt_lookup
from jaxspec.drafters.lookups.retrieval import retrieval
from jaxspec.drafters.lookups.suffix import suffix
from jaxspec.drafters.lookups.token_recycling import token_recycling
from jaxspec.drafters.lookups.without_backoff import without_backoff
from jaxspec.drafters.model import model
from jaxspec.drafters.parallel import parallel
from jaxspec.drafters.saturated_exit import saturated_exit
from jaxspec.drafters.self_speculative import early_exit, skip_layers
from jaxspec.drafters.share_encoder import share_encoder
from jaxspec.drafters.stepwise import chain
from jaxspec.drafters.trees.dynamic_tree import dynamic_tree
from jaxspec.drafters.trees.sequences import sequences
from jaxspec.drafters.trees.tree import tree
from jaxspec.drafters.uniform import uniform
from jaxspec.drafters.windowed import windowed

if TYPE_CHECKING:
    from jaxspec.draft_heads.assistant import assistant
    from jaxspec.draft_heads.block import block
    from jaxspec.draft_heads.by_name import by_name
    from jaxspec.draft_heads.eagle import eagle
    from jaxspec.draft_heads.lookahead_embeddings import lookahead_embeddings
    from jaxspec.draft_heads.medusa import heads
    from jaxspec.draft_heads.mtp import mtp
    from jaxspec.weights.quantised_drafter import quantised

# Imported when first asked for: drafting with other drafters needs no networks, and so no flax.
_ELSEWHERE = {
    "assistant": "jaxspec.draft_heads.assistant",
    "block": "jaxspec.draft_heads.block",
    "by_name": "jaxspec.draft_heads.by_name",
    "eagle": "jaxspec.draft_heads.eagle",
    "heads": "jaxspec.draft_heads.medusa",
    "lookahead_embeddings": "jaxspec.draft_heads.lookahead_embeddings",
    "mtp": "jaxspec.draft_heads.mtp",
    "quantised": "jaxspec.weights.quantised_drafter",
}
_FACTORIES = [
    name for name, value in list(globals().items()) if callable(value) and name[0].islower()
]
__all__ = sorted([*_ELSEWHERE, *_FACTORIES])


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        return optional_imports.submodules(__name__)(name)
    factory = getattr(importlib.import_module(_ELSEWHERE[name]), name)
    globals()[name] = factory
    return factory


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
