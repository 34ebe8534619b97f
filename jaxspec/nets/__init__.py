"""Networks, a file each, and what recipes and manifests call them."""

from __future__ import annotations

from typing import Any

from jaxspec.drafters.lookups import ngram_model
from jaxspec.drafters.lookups.ngram_model import NGramConfig
from jaxspec.nets import decoder, gpt, t5
from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config

CONFIGS = {"t5": T5Config, "gpt": GPTConfig, "decoder": DecoderConfig, "ngram": NGramConfig}
NETS = {"t5": t5, "gpt": gpt, "decoder": decoder, "ngram": ngram_model}  # where each has `init` and `language_model`


def net_of(config: Any) -> Any:
    """Returns the module of a configuration's network.

    >>> net_of(gpt.SIZES["gpt-6m"]).__name__
    'jaxspec.nets.gpt'
    """
    return NETS[family_of(config)]


def decoder_layers(config: Any) -> int:
    """Counts a network's layers that generate; 0 where its configuration says nothing of them.

    >>> decoder_layers(gpt.SIZES["gpt-6m"]), decoder_layers(t5.SIZES["t5-v1_1-xxl"])
    (2, 24)
    """
    return getattr(config, "decoder_layers", getattr(config, "layers", 0))


def family_of(config: Any) -> str:
    """Returns what recipes and manifests call a configuration's network.

    Raises:
        TypeError: it is the configuration of none.
    """
    for name, kind in CONFIGS.items():
        if isinstance(config, kind):
            return name
    kinds = ", ".join(kind.__name__ for kind in CONFIGS.values())
    raise TypeError(f"a {type(config).__name__} is no configuration of a network: expected one of {kinds}")
