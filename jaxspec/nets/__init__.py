"""Networks, a file each, and the table of them: what recipes and manifests call them, and what is asked of each."""

from __future__ import annotations

from typing import Any

from jaxspec.nets import decoder, gpt, ngram, t5
from jaxspec.nets.network import Network
from jaxspec.sharding import WHOLE, Axes

NETWORKS = {network.name: network for network in (t5.NETWORK, gpt.NETWORK, decoder.NETWORK, ngram.NETWORK)}
_BY_CONFIG = {network.config: network for network in NETWORKS.values()}


def find(config: Any) -> Network | None:
    """Returns the network of a configuration; None if it is of none of these."""
    return _BY_CONFIG.get(type(config))


def net_of(config: Any) -> Network:
    """Returns the network of a configuration.

    Raises:
        TypeError: it is the configuration of none.

    >>> net_of(gpt.SIZES["gpt-6m"]).name
    'gpt'
    """
    if (network := find(config)) is None:
        names = ", ".join(network.config.__name__ for network in NETWORKS.values())
        raise TypeError(f"a {type(config).__name__} is no configuration of a network: expected one of {names}")
    return network


def decoder_layers(config: Any) -> int:
    """Counts a network's layers that generate; 0 where nothing is known of it.

    >>> decoder_layers(gpt.SIZES["gpt-6m"]), decoder_layers(t5.SIZES["t5-v1_1-xxl"]), decoder_layers(None)
    (2, 24, 0)
    """
    network = find(config)
    return 0 if network is None else network.depth(config)


def dtype_of(config: Any, otherwise: str = "float32") -> str:
    """Returns the dtype of a network's computation; `otherwise` where nothing is known of it."""
    return otherwise if find(config) is None else config.dtype


def axes_of(config: Any) -> Axes:
    """Returns how a network's parameters may be split over devices; whole where nothing is known of it."""
    network = find(config)
    return WHOLE if network is None else network.axes(config)


def logits_cap(config: Any) -> float | None:
    """Returns the soft cap that a network's head ends with; None if there is none, or nothing is known of it."""
    network = find(config)
    return None if network is None else network.logits_cap(config)
