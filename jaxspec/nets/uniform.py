"""Decoders whose layers are alike, by one number each: the form that families read a config.json
into. `decoder_config` and `gpt_config` make shapes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from jaxspec.core.checks import one_of
from jaxspec.nets import rotary
from jaxspec.nets.rotary import RopeScaling, Rotary
from jaxspec.nets.shapes import (
    ACTIVATIONS,
    AttentionShape,
    DecoderConfig,
    FeedForwardShape,
    LayerShape,
    NormShape,
)

_Arguments = ParamSpec("_Arguments")


@dataclasses.dataclass(frozen=True)
class UniformDecoder:
    """A decoder with RMS norms and gated feed-forward blocks, whose layers differ in windows and
    rotary bases at most.

    Attributes:
        vocab_size, dim, ff_dim, layers: token ids, widths of stream and feed-forward blocks, number
            of layers.
        heads, kv_heads, head_dim: fields of `shapes.AttentionShape`, as are query_scalar, qkv_bias,
            out_bias and head_norms.
        activation, ff_bias: fields of `shapes.FeedForwardShape`.
        tied_head, scale_embedding, logits_cap, buckets, max_distance, max_positions, end_tokens,
            dtype: fields of `shapes.DecoderConfig`.
        epsilon, norms_from_one: fields of `shapes.NormShape`.
        post_norms: the field of `shapes.LayerShape`.
        attention_cap: the soft cap of the scores.
        window: number of positions that a local layer's token attends to, including itself.
        local: whether layer 0, 1, ... is local; repeated as often as needed. Empty: none is.
        positions: "rotary" or "relative".
        rope_base, local_rope_base: rotary bases of global layers, and of local ones (None: the
            same, and scaled alike).
        rope_scaling, rope_factor, rope_low, rope_high, rope_original, rope_whole: fields of
            `rotary.RopeScaling`.
        rope_magnitude: the field of `rotary.Rotary`.
    """

    vocab_size: int
    dim: int
    ff_dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str = "silu"
    tied_head: bool = False
    epsilon: float = 1e-6
    qkv_bias: bool = False
    out_bias: bool = False
    ff_bias: bool = False
    head_norms: bool = False
    post_norms: bool = False
    norms_from_one: bool = False
    scale_embedding: bool = False
    query_scalar: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    window: int | None = None
    local: tuple[bool, ...] = ()
    positions: str = "rotary"
    rope_base: float = 10_000.0
    local_rope_base: float | None = None
    rope_scaling: str = "default"
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_original: int = 8192
    rope_whole: bool = True
    rope_magnitude: float = 1.0
    buckets: int = 32
    max_distance: int = 128
    max_positions: int | None = None
    end_tokens: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self):
        if any(self.local) and self.window is None:
            raise ValueError(
                "some layers are local, but window is None: expected how many positions they "
                "attend to"
            )
        for name, options in (
            ("positions", ("rotary", "relative")),
            ("rope_scaling", rotary.SCALINGS),
        ):
            one_of(vars(self)[name], name, options)

    def config(self) -> DecoderConfig:
        """Makes the shapes of the layers."""
        rotary = Rotary(
            self.rope_base,
            scaling=RopeScaling(**_told(self, _SCALING)),
            magnitude=self.rope_magnitude,
        )
        # A base of their own is not scaled: within the window no distance is longer than in
        # training.
        if self.local_rope_base is None:
            local_rotary = rotary
        else:
            local_rotary = Rotary(self.local_rope_base)
        ff = FeedForwardShape(**_told(self, _FEED_FORWARD))

        def layer(is_local: bool) -> LayerShape:
            if self.positions != "rotary":
                turn = None
            elif is_local:
                turn = local_rotary
            else:
                turn = rotary
            window = self.window if is_local else None
            attention = AttentionShape(**_told(self, _ATTENTION), window=window, rotary=turn)
            return LayerShape(attention, ff, self.post_norms)

        kinds = {is_local: layer(is_local) for is_local in (False, True)}
        flags = self.local or (False,)
        layers = tuple(kinds[flags[i % len(flags)]] for i in range(self.layers))
        return DecoderConfig(
            layers=layers, norm=NormShape("rms", **_told(self, _NORM)), **_told(self, _DECODER)
        )


# Fields of `UniformDecoder`: those of the shapes that say the same.
_ATTENTION = {
    name: name for name in ("heads", "kv_heads", "head_dim", "query_scalar", "qkv_bias", "out_bias")
}
_ATTENTION |= {"head_norms": "head_norms", "attention_cap": "cap"}
_FEED_FORWARD = {"ff_dim": "dim", "activation": "activation", "ff_bias": "bias"}
_NORM = {"epsilon": "epsilon", "norms_from_one": "from_one"}
_SCALING = {"rope_scaling": "kind", "rope_factor": "factor", "rope_low": "low", "rope_high": "high"}
_SCALING |= {"rope_original": "original", "rope_whole": "truncate"}
_DECODER = {
    name: name
    for name in (
        *(
            "vocab_size",
            "dim",
            "tied_head",
            "scale_embedding",
            "logits_cap",
            "positions",
            "buckets",
            "max_distance",
        ),
        *("max_positions", "end_tokens", "dtype"),
    )
}


def _told(form: Any, fields: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of a shape that a form has."""
    return {field: getattr(form, name) for name, field in fields.items()}


def _read(shape: Any, fields: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of a form that a shape has."""
    return {name: getattr(shape, field) for name, field in fields.items()}


def nearest(config: DecoderConfig) -> UniformDecoder:
    """Returns the form with a configuration's numbers, whatever else the configuration says."""
    _check_blocks(config)
    attentions = [layer.attention for layer in config.layers]
    first = config.layers[0]
    flags = [x.window is not None for x in attentions]
    of_global = next((x for x in attentions if x.window is None), attentions[0])
    of_local = next((x for x in attentions if x.window is not None), of_global)
    rotating = sorted(
        (x for x in attentions if x.rotary is not None), key=lambda x: x.window is not None
    )
    turns = (rotating[0].rotary if rotating else None) or Rotary()
    return UniformDecoder(
        layers=len(config.layers),
        post_norms=first.post_norms,
        window=of_local.window,
        local=period(flags) if any(flags) else (),
        rope_base=turns.base,
        local_rope_base=None if of_local.rotary in (None, turns) else of_local.rotary.base,
        rope_magnitude=turns.magnitude,
        **_read(first.attention, _ATTENTION),
        **_read(first.ff, _FEED_FORWARD),
        **_read(config.norm, _NORM),
        **_read(turns.scaling, _SCALING),
        **_read(config, _DECODER),
    )


@dataclasses.dataclass(frozen=True)
class UniformGPT:
    """A decoder as GPT-2 and the paper's GPT (arXiv 2211.17192, section 4) are: LayerNorm, biases,
    learned positions.

    Attributes:
        vocab_size, dim, ff_dim, layers, heads: fields of `UniformDecoder`; a head has dim / heads
            dimensions.
        max_positions: rows of the position table: the longest row it can hold.
        dtype, tied_head, end_tokens: fields of `shapes.DecoderConfig`.
        activation: the field of `shapes.FeedForwardShape`.
        epsilon: added to the variance in every norm.
        scale_scores: whether scores are divided by the root of a head's dimension.
        scale_by_layer: whether they are also divided by the layer's number, counted from 1.
    """

    vocab_size: int
    dim: int
    ff_dim: int
    layers: int
    heads: int
    max_positions: int = 1024
    dtype: str = "float32"
    tied_head: bool = True
    activation: str = "gelu"
    epsilon: float = 1e-5
    scale_scores: bool = True
    scale_by_layer: bool = False
    end_tokens: tuple[int, ...] = ()

    def __post_init__(self):
        one_of(self.activation, "activation", ACTIVATIONS)

    def config(self) -> DecoderConfig:
        """Makes the shapes of the layers."""
        head_dim = self.dim // self.heads

        def layer(number: int) -> LayerShape:
            scalar = float(number**2 if self.scale_by_layer else 1) * (
                head_dim if self.scale_scores else 1
            )
            query_scalar = None if scalar == head_dim else scalar
            sizes = self.heads, self.heads, head_dim
            attention = AttentionShape(
                *sizes, query_scalar=query_scalar, qkv_bias=True, out_bias=True
            )
            return LayerShape(
                attention, FeedForwardShape(self.ff_dim, self.activation, gated=False, bias=True)
            )

        layers = tuple(layer(i + 1) for i in range(self.layers))
        norm = NormShape("layer", self.epsilon)
        return DecoderConfig(layers=layers, norm=norm, positions="learned", **_told(self, _GPT))


_GPT = {
    name: name
    for name in ("vocab_size", "dim", "tied_head", "max_positions", "end_tokens", "dtype")
}


def short_form(config: DecoderConfig) -> UniformDecoder | UniformGPT:
    """Returns the form that says all of a configuration.

    Raises:
        ValueError: neither does.

    >>> short_form(decoder_config(32, 16, 32, 4, 4, 2, 4, window=8, local=(True, False))).local
    (True, False)
    >>> short_form(gpt_config(32, dim=8, ff_dim=16, layers=2, heads=2)).layers
    2
    """
    form = _nearest_gpt(config) if config.positions == "learned" else nearest(config)
    # Compared, since a change of the form would otherwise lose what the form cannot say.
    if form.config() != config:
        raise ValueError(
            "the layers differ in more than windows and rotary bases, or have options of another "
            "form"
        )
    return form


def _nearest_gpt(config: DecoderConfig) -> UniformGPT:
    _check_blocks(config)
    first = config.layers[0]
    last = config.layers[-1]
    return UniformGPT(
        ff_dim=first.ff.dim,
        layers=len(config.layers),
        heads=first.attention.heads,
        activation=first.ff.activation,
        epsilon=config.norm.epsilon,
        scale_scores=first.attention.query_scalar is None,
        scale_by_layer=first.attention.scale != last.attention.scale,
        **_read(config, _GPT),
    )


def _check_blocks(config: DecoderConfig) -> None:
    """Raises ValueError for layers whose blocks are not attention and a dense feed-forward
    block.
    """
    for layer in config.layers:
        if type(layer.attention) is not AttentionShape or type(layer.ff) is not FeedForwardShape:
            kinds = type(layer.attention).__name__, type(layer.ff).__name__
            raise ValueError(
                f"a layer has the blocks {kinds}: expected AttentionShape and FeedForwardShape"
            )


def period(flags: list[bool]) -> tuple[bool, ...]:
    """Returns the shortest beginning that, repeated, gives the list.

    >>> period([True, True, False, True, True, False, True])
    (True, True, False)
    """
    for n in range(1, len(flags) + 1):
        if all(flag == flags[i % n] for i, flag in enumerate(flags)):
            return tuple(flags[:n])
    return ()


def configs(forms: Mapping[str, Any]) -> dict[str, DecoderConfig]:
    """Makes the configurations of forms, by the same names."""
    return {name: form.config() for name, form in forms.items()}


def _made(form: Callable[_Arguments, Any]) -> Callable[_Arguments, DecoderConfig]:
    def config(*values: _Arguments.args, **options: _Arguments.kwargs) -> DecoderConfig:
        return form(*values, **options).config()

    config.__doc__ = f"Makes a configuration of the arguments of `{form.__name__}`."
    return config


decoder_config = _made(UniformDecoder)
"""Makes a decoder's configuration of the arguments of `UniformDecoder`."""

gpt_config = _made(UniformGPT)
"""Makes a GPT-2's configuration of the arguments of `UniformGPT`."""
