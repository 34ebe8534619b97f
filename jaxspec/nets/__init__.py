"""Networks, a file each, and the table of their names in recipes and manifests."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec import optional_imports
from jaxspec.files import strict_tables
from jaxspec.nets import bart, blocks, decoder, ngram, t5, t5gemma, whisper
from jaxspec.nets.network import Form, Network
from jaxspec.sharding import WHOLE, Axes

PLACES = ("attention", "cross", "ff", "last")  # of a layer's blocks
_ALL = (t5.NETWORK, bart.NETWORK, t5gemma.NETWORK, whisper.NETWORK, decoder.NETWORK, ngram.NETWORK)
NETWORKS = {network.name: network for network in _ALL}
_BY_CONFIG = {network.config: network for network in NETWORKS.values()}


def _forms(network: Network) -> dict[str, Form]:
    return dict(network.forms) or {
        network.name: Form(network.config, lambda form: form, lambda config: config)
    }


FORMS = {family: form for network in NETWORKS.values() for family, form in _forms(network).items()}
"""How recipes and manifests of each family write a configuration."""


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


def form_of(config: Any) -> tuple[str, Any]:
    """Returns the family of a configuration, and the shortest form of it: the configuration, if
    none says all of it.

    >>> family, form = form_of(decoder.gpt_config(32, dim=8, ff_dim=16, layers=2, heads=2))
    >>> family, form.layers
    ('gpt', 2)
    """
    network = net_of(config)
    for family, form in _forms(network).items():
        try:
            return family, form.of(config)
        except ValueError:
            continue
    return network.name, config


def replace(config: Any, **changes: Any) -> Any:
    """Returns a configuration with other values in its form.

    >>> small = decoder.decoder_config(
    ...     32, dim=8, ff_dim=16, layers=2, heads=2, kv_heads=1, head_dim=4
    ... )
    >>> len(replace(small, layers=3).layers)
    3
    """
    family, form = form_of(config)
    changed = dataclasses.replace(form, **changes)
    if type(changed) is type(config):
        return changed
    return FORMS[family].config(changed)


def table_of(config: Any) -> dict[str, Any]:
    """Returns the table that `from_table` reads, in a configuration's shortest form."""
    form = form_of(config)[1]
    table = dataclasses.asdict(form)
    if isinstance(form, decoder.DecoderConfig):
        for shape, layer in zip(form.layers, table["layers"], strict=True):
            for role, block in shape.blocks.items():
                layer[role] |= _named(role, block)
        if form.side is not None:
            table["side"] |= _named("side", form.side)
    return table


def _named(role: str, block: Any) -> dict[str, str]:
    if blocks.STANDARD.get(role) is type(block):
        return {}
    names = [name for name, block_type in blocks.BLOCKS.items() if block_type is type(block)]
    if not names:
        block_type = type(block).__name__
        raise ValueError(
            f"{role} is a {block_type}, which no manifest can name: add it to "
            "jaxspec.nets.blocks.BLOCKS"
        )
    return {"block": names[0]}


def _block(table: Any, role: str, where: str) -> Any:
    """Builds a block of the kind that its table names."""
    if not isinstance(table, dict):
        return table
    block_type = blocks.STANDARD.get(role)
    name = table.get("block")
    if name is not None or block_type is None:
        if name not in blocks.BLOCKS:
            names = ", ".join(blocks.BLOCKS)
            raise strict_tables.RecipeError(
                f"{where} {role} has block {name!r}: expected one of {names}"
            )
        block_type = blocks.BLOCKS[name]
    return strict_tables.build(
        block_type, {key: x for key, x in table.items() if key != "block"}, f"{where} {role}"
    )


def from_table(family: str, table: dict[str, Any], where: str) -> Any:
    """Builds a configuration from a recipe's or a manifest's table, in its family's form or as a
    list of layers.

    >>> from_table(
    ...     "gpt", {"vocab_size": 32, "dim": 8, "ff_dim": 16, "layers": 2, "heads": 2}, "[model]"
    ... ).positions
    'learned'
    """
    if family == decoder.NETWORK.name and isinstance(table.get("layers"), list):
        layers = [
            {role: _block(x, role, where) if role in PLACES else x for role, x in layer.items()}
            if isinstance(layer, dict)
            else layer
            for layer in table["layers"]
        ]
        if "side" in table:
            side = {"side": _block(table["side"], "side", where)}
        else:
            side = {}
        return strict_tables.build(
            decoder.DecoderConfig, {**table, "layers": layers, **side}, where
        )
    form = FORMS[family]
    try:
        return form.config(strict_tables.build(form.kind, table, where))
    except strict_tables.RecipeError:
        raise
    except ValueError as error:
        raise strict_tables.RecipeError(f"{where}: {error}") from error


__getattr__ = optional_imports.submodules(__name__)
