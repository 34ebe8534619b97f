"""N-gram tables (`drafters.lookups.ngram_model`) as a network: they are loaded, converted and
listed as one.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.core import Room
from jaxspec.drafters.lookups.ngram_model import NGramCache, NGramConfig, init, language_model
from jaxspec.nets.network import Network
from jaxspec.sharding import WHOLE


def _cache(config: NGramConfig, batch: int, room: Room, width: int) -> NGramCache:
    zeros = jnp.zeros((batch,), jnp.int32)
    return NGramCache(jnp.zeros((batch, room.tokens), jnp.int32), zeros, zeros)


NETWORK = Network(
    "ngram",
    NGramConfig,
    init,
    language_model,
    teach=None,
    stacks=lambda config: {},
    pieces=lambda config: [(config, 1)],
    cache=_cache,
    axes=lambda config: WHOLE,
    share=lambda config, path: 0.0,
)
