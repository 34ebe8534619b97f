"""The type of a kind of draft head: an entry of the table `jaxspec.draft_heads.KINDS`, made by one
file.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Key

from jaxspec.core import BoundDrafter, Model, Params
from jaxspec.core.checks import at_least
from jaxspec.draft_heads.formats import Format
from jaxspec.draft_heads.training import Training
from jaxspec.drafters.hidden_states import DraftHead, inside_of
from jaxspec.nets.decoder import DecoderConfig, decoder_config
from jaxspec.nets.uniform import period

# fields of configurations that a target says
OF_TARGET = ("layer", "vocab_size", "dim", "hidden_size", "dtype")


class Kind(NamedTuple):
    """A kind of draft head.

    A configuration is a frozen dataclass; transformer layers are its `layer`.
    """

    name: str  # its name in recipes, their family
    config: type  # type of the network's configuration
    init: Callable[[Any, Key[Array, ""]], Params]  # (configuration, key) -> random parameters
    # configuration -> the network as pure functions, whose `requirements` are what it expects of
    # its target; the same object for the same configuration
    head: Callable[[Any], Any]
    # (those functions and their parameters, target, a model with a trimmed head or None) -> the
    # drafter
    drafter: Callable[[DraftHead[Any], Model, Model | None], BoundDrafter]
    format: Format  # how its files are recognised, read and written
    # type of a recipe's [head] table: a frozen dataclass of what the target does not say, whose
    # `config(target)` is the configuration for a target; None for a kind that is not trained here
    sizes: type | None = None
    training: Training | None = None  # how it is trained; None for such a kind
    # configurations of published sizes by name
    published: Mapping[str, Any] = types.MappingProxyType({})


def shape_of(head: Any) -> Any:
    """Returns the part of a head's configuration with `vocab_size` and `dtype`: its transformer
    layers, if any.
    """
    return getattr(head, "layer", head)


def in_dtype(head: Any, dtype: str) -> Any:
    """Returns a head's configuration with another dtype of its computation."""
    shape = dataclasses.replace(shape_of(head), dtype=dtype)
    if hasattr(head, "layer"):
        return dataclasses.replace(head, layer=shape)
    return shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Transformer layers of a drafter, as Llama's."""

    # these two: width of the feed-forward block, attention heads
    ff_dim: int
    heads: int
    # these two, if 0: as many as heads, and the width over the heads
    kv_heads: int = 0
    head_dim: int = 0
    layers: int = 1  # how many
    dim: int = 0  # their width; 0: the target's
    rope_base: float = 10_000.0  # the base of rotary positions
    head_norms: bool = False  # whether queries and keys are normalised

    def layer(self, target: Model) -> DecoderConfig:
        """Returns the configuration of the layers."""
        dim = self.dim or inside_of(target).width
        if (head_dim := self.head_dim or dim // self.heads) % 2 or head_dim == 0:
            sizes = (
                f"heads is {self.heads} for layers of width {dim}, which makes head_dim {head_dim}"
            )
            raise ValueError(
                f"{sizes}: expected an even one, for rotary positions. Choose other heads, or a "
                "head_dim"
            )
        return decoder_config(
            vocab_size=target.lm.vocab_size,
            dim=dim,
            ff_dim=self.ff_dim,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=head_dim,
            head_norms=self.head_norms,
            rope_base=self.rope_base,
            max_positions=target.lm.limits.max_positions,
            **self._windows(),
        )

    def _windows(self) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowedSizes(LayerSizes):
    """Layers that may attend to a window."""

    window: int = 0  # positions that a layer attends to; 0: all
    # layers, counted from 0, that attend to all in spite of `window`
    full_layers: tuple[int, ...] = ()

    def __post_init__(self):
        at_least(0, window=self.window)
        unknown = [i for i in self.full_layers if not (self.window and 0 <= i < self.layers)]
        if unknown:
            raise ValueError(
                f"full_layers has {unknown[0]}: expected a window, and layers from 0 to "
                f"{self.layers - 1}"
            )

    def _windows(self) -> dict[str, Any]:
        if not self.window:
            return {}
        return {
            "window": self.window,
            "local": period([i not in self.full_layers for i in range(self.layers)]),
        }


def sizes_of(
    config: type,
    without: Collection[str] = (),
    layers: type[LayerSizes] = LayerSizes,
    **defaults: Any,
) -> type:
    """Makes the type of a recipe's [head] table: the fields of a configuration that a target does
    not say.

    It has the fields of `layers` if the configuration has layers, with these `defaults`, but lacks
    the fields `without`. A draft_vocab of 0 is the target's, as None is.
    """
    hints = typing.get_type_hints(config)
    named = {field.name: field for field in dataclasses.fields(config)}
    fields = [
        field for name, field in named.items() if name not in OF_TARGET and name not in without
    ]
    members = [
        (field.name, hints[field.name], dataclasses.field(default=field.default))
        for field in fields
    ]
    members += [
        (name, type(value), dataclasses.field(default=value)) for name, value in defaults.items()
    ]

    def of_target(sizes: Any, target: Model) -> Any:
        width = inside_of(target).width
        of_target = {"vocab_size": target.lm.vocab_size, "dim": width, "hidden_size": width}
        of_target |= {"layer": sizes.layer(target)} if "layer" in named else {}
        values = {field.name: getattr(sizes, field.name) for field in fields}
        values |= {"draft_vocab": values["draft_vocab"] or None} if "draft_vocab" in values else {}
        return config(
            **{name: value for name, value in of_target.items() if name in named}, **values
        )

    bases = (layers,) if "layer" in named else ()
    methods = {"config": of_target}
    name = f"{config.__name__}Sizes"
    options = {"frozen": True, "kw_only": True}
    return dataclasses.make_dataclass(name, members, bases=bases, namespace=methods, **options)
