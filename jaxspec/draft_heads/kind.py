"""The type of a kind of draft head: an entry of the table `jaxspec.draft_heads.KINDS`, made by one file."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Key

from jaxspec.core import BoundDrafter, Model, Params
from jaxspec.draft_heads.formats import Format
from jaxspec.draft_heads.training import Training
from jaxspec.drafters.hidden_states import DraftHead, inside_of
from jaxspec.nets.decoder import DecoderConfig, decoder_config


class Kind(NamedTuple):
    """A kind of draft head.

    A configuration is a frozen dataclass. Its `shape` has `vocab_size` and `dtype`: it is the `layer`, which describes
    transformer layers, or the configuration itself.
    """

    name: str  # its name in recipes, their family
    config: type  # type of the network's configuration
    init: Callable[[Any, Key[Array, ""]], Params]  # (configuration, key) -> random parameters
    # configuration -> the network as pure functions, whose `requirements` are what it expects of its target; the same
    # object for the same configuration
    head: Callable[[Any], Any]
    # (those functions and their parameters, target, a model with a trimmed head or None) -> the drafter
    drafter: Callable[[DraftHead[Any], Model, Model | None], BoundDrafter]
    format: Format  # how its files are recognised, read and written
    # these two: None for a kind that is not trained here
    # type of a recipe's [head] table: a frozen dataclass of what the target does not say, whose `config(target)` is the
    # configuration for a target
    sizes: type | None = None
    training: Training | None = None  # how it is trained
    published: Mapping[str, Any] = types.MappingProxyType({})  # configurations of published sizes by name


def in_dtype(config: Any, dtype: str) -> Any:
    """Returns a configuration with another dtype of its computation."""
    # A kind without transformer layers is its own shape.
    shape = dataclasses.replace(config.shape, dtype=dtype)
    return shape if config.shape is config else dataclasses.replace(config, layer=shape)


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
        return decoder_config(
            vocab_size=target.lm.vocab_size,
            dim=dim,
            ff_dim=self.ff_dim,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim or dim // self.heads,
            head_norms=self.head_norms,
            rope_base=self.rope_base,
            max_positions=target.lm.limits.max_positions,
        )


def same_fields(sizes: Any, config: type) -> dict[str, Any]:
    """Returns the sizes that a configuration has under the same names; a draft_vocab of 0 is the target's, None."""
    names = {field.name for field in dataclasses.fields(config)}
    values = {name: x for name, x in vars(sizes).items() if name in names}
    return values | ({"draft_vocab": None} if values.get("draft_vocab") == 0 else {})
