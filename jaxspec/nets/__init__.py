"""Networks, a file each, and the table of their names."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec import optional_imports
from jaxspec.nets import bart, decoder, ngram, t5, t5gemma, uniform, whisper
from jaxspec.nets.network import Network
from jaxspec.sharding import WHOLE, Axes

_ALL = (t5.NETWORK, bart.NETWORK, t5gemma.NETWORK, whisper.NETWORK, decoder.NETWORK, ngram.NETWORK)
NETWORKS = {network.name: network for network in _ALL}
_BY_CONFIG = {network.config: network for network in NETWORKS.values()}


def find(config: Any) -> Network | None:
    """Returns the network of a configuration; None if it is of none of these."""
    return _BY_CONFIG.get(type(config))


def net_of(config: Any) -> Network:
    """Returns the network of a configuration.

    >>> net_of(t5.SIZES["t5-small"]).name
    't5'
    """
    network = find(config)
    if network is None:
        names = ", ".join(network.config.__name__ for network in NETWORKS.values())
        raise TypeError(
            f"a {type(config).__name__} is no configuration of a network: expected one of {names}"
        )
    return network


def decoder_layers(config: Any) -> int:
    """Counts a network's layers that generate; 0 where nothing is known of it.

    >>> decoder_layers(t5.SIZES["t5-v1_1-xxl"]), decoder_layers(None)
    (24, 0)
    """
    network = find(config)
    if network is None:
        return 0
    return network.depth(config)


def dtype_of(config: Any, otherwise: str = "float32") -> str:
    """Returns the dtype of a network's computation; `otherwise` where nothing is known of it."""
    if find(config) is None:
        return otherwise
    return config.dtype


def axes_of(config: Any) -> Axes:
    """Returns how a network's parameters may be split over devices; whole where nothing is known of
    it.
    """
    network = find(config)
    if network is None:
        return WHOLE
    return network.axes(config)


def embedding_scale(config: Any) -> float:
    """Returns the factor between rows of a network's embedding and its first layer's input; 1 if
    unknown.
    """
    network = find(config)
    if network is None:
        return 1.0
    return network.embedding_scale(config)


def logits_cap(config: Any) -> float | None:
    """Returns the soft cap at the end of a network's head; None without a cap, or for an unknown
    network.
    """
    network = find(config)
    if network is None:
        return None
    return network.logits_cap(config)


def short_form(config: Any) -> Any:
    """Returns the form of `nets.uniform` that says all of a configuration; itself if neither does.

    >>> short_form(decoder.gpt_config(32, dim=8, ff_dim=16, layers=2, heads=2)).layers
    2
    """
    if not isinstance(config, decoder.DecoderConfig):
        return config
    try:
        return uniform.short_form(config)
    except ValueError:
        return config


def replace(config: Any, **changes: Any) -> Any:
    """Returns a configuration with other values in its short form.

    >>> small = decoder.decoder_config(
    ...     32, dim=8, ff_dim=16, layers=2, heads=2, kv_heads=1, head_dim=4
    ... )
    >>> len(replace(small, layers=3).layers)
    3
    """
    changed = dataclasses.replace(short_form(config), **changes)
    if type(changed) is type(config):
        return changed
    return changed.config()


__getattr__ = optional_imports.submodules(__name__)
