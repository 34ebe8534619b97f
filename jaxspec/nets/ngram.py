"""N-gram tables (`drafters.lookups.ngram_model`) as a network: they are loaded, converted and listed as one."""

from __future__ import annotations

from jaxspec.drafters.lookups.ngram_model import NGramConfig, init, language_model
from jaxspec.nets.network import Network
from jaxspec.sharding import WHOLE

NETWORK = Network(
    "ngram",
    NGramConfig,
    init,
    language_model,
    teach=None,
    stacks=lambda config: {},
    pieces=lambda config: [(config, 1)],
    axes=lambda config: WHOLE,
    share=lambda config, path: 0.0,
)
