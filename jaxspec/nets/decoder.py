"""The decoder-only network of today's model families: norms, attention and feed-forward blocks,
layer by layer.

A configuration lists the parts of each layer (`nets.shapes`). Llama, Mistral, Qwen, Gemma and GPT-2
are values of it: see `jaxspec.weights.hf_families`. Layers with a window attend to it only, and
their caches are rings that hold little more (`core.kv_cache`), if rows may grow longer.

Shapes: B batch, T step, S cache capacity, H heads, D head dimension, M model dimension.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import LanguageModel, Limits, Params, Parts, Room
from jaxspec.core import kv_cache as kv
from jaxspec.nets import stack
from jaxspec.nets.attention import Bias, LayerInputs, Mask, QueryMask, for_queries, softcap
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.network import Network
from jaxspec.nets.relative import RelativeBias, biases, distances
from jaxspec.nets.shapes import DecoderConfig, LayerShape
from jaxspec.nets.uniform import decoder_config, gpt_config
from jaxspec.sharding import Axes

__all__ = ["DecoderConfig", "DecoderNet", "decoder_config", "gpt_config", "init", "language_model"]


def empty_cache(config: DecoderConfig, batch: int, room: Room) -> kv.KVCache:
    """Makes an empty cache for a configuration's layers."""
    return kv.empty(batch, room, [layer.attention.cache(config) for layer in config.layers])


class DecoderLayer(nn.Module):
    """A mixer, such as attention, and a feed-forward block, each after a norm.

    Attributes:
        attention: the mixer: the module of a `shapes.Mixer`.
        ff: the feed-forward block.
        norm: makes norms.
        post_norms, pre_norms, parallel, added_scale: the fields of `shapes.LayerShape`.
        has_ff_norm: its `ff_norm`.
        last: the block at the end; None for none.
        cross: the attention to an encoder's output; None without one.
        norms_after: whether a norm is applied to the sum of the stream and a block's output
            (Vaswani et al., arXiv 1706.03762), in place of the block's input.
        make_bias: makes the layer's table of position biases (umT5); None: it has none.
    """

    attention: Any
    ff: Any
    norm: Callable[[], Any]
    post_norms: bool = False
    pre_norms: bool = True
    parallel: bool = False
    added_scale: float = 1.0
    has_ff_norm: bool = True
    last: Any = None
    cross: Any = None
    norms_after: bool = False
    make_bias: Callable[[], Any] | None = None

    def setup(self):
        # Flax names parameters by these attributes, and checkpoints are written by those names.
        has_norms = self.pre_norms or self.norms_after
        if has_norms:
            self.attention_norm = self.norm()
        if has_norms and self.has_ff_norm and not self.parallel:
            self.ff_norm = self.norm()
        if self.post_norms:
            self.attention_post_norm = self.norm()
            self.ff_post_norm = self.norm()
        if self.cross is not None and has_norms:
            self.cross_norm = self.norm()
        if self.cross is not None and self.post_norms:
            self.cross_post_norm = self.norm()
        if self.make_bias is not None:
            self.bias = self.make_bias()

    def cross_keys_values(
        self, encoded: Float[Array, "B P M"]
    ) -> tuple[Float[Array, "B K P D"], ...]:
        """Computes the layer's keys and values of an encoder's output."""
        return (self.attention if self.cross is None else self.cross).keys_values(encoded)

    def __call__(
        self,
        x: Float[Array, "B T M"],
        read: stack.Read,
        inputs: LayerInputs,
        attention: bool = True,
        mlp: bool = True,
    ) -> tuple[Float[Array, "B T M"], Any]:
        """Computes the layer: see `stack.Layer`."""
        record = None
        if self.pre_norms:
            of_attention = self.attention_norm(x)
        else:
            of_attention = x
        if attention:
            added, record = self.attention.mix(of_attention, read, inputs)
            x = self._added("attention", x, added)
        if attention and self.cross is not None:
            # Keys and values of the prompt were made once, in prefill; only the query depends on
            # the row.
            x = self._added(
                "cross",
                x,
                self.cross.of_source(self.cross_norm(x) if self.pre_norms else x, inputs.source),
            )
        if mlp:
            if self.parallel:
                of_ff = of_attention
            elif self.pre_norms and self.has_ff_norm:
                of_ff = self.ff_norm(x)
            else:
                of_ff = x
            x = self._added("ff", x, self.ff(of_ff))
        return x if self.last is None else self.last(x, inputs.side), record

    def _added(
        self, block: str, x: Float[Array, "B T M"], added: Float[Array, "B T M"]
    ) -> Float[Array, "B T M"]:
        """Adds a block's output to the stream."""
        if self.post_norms:
            added = getattr(self, f"{block}_post_norm")(added)
        if self.added_scale != 1.0:
            # In float32, as PyTorch multiplies by a number: 0.22 is 0.2197 in bfloat16, in each of
            # many layers.
            added = (added.astype(jnp.float32) * self.added_scale).astype(added.dtype)
        if self.norms_after:
            return getattr(self, f"{block}_norm")(x + added)
        return x + added


def layer_of(
    config: DecoderConfig,
    index: int,
    layer_type: type[DecoderLayer] = DecoderLayer,
    without_keys: bool = False,
    **options: Any,
) -> Any:
    """Makes a layer of a configuration; `options` are for other kinds of layers.

    `without_keys`: its attention reads keys that its caller has, whichever layer they are of.
    """
    shape = config.layers[index]
    if without_keys:
        shape = dataclasses.replace(
            shape, attention=dataclasses.replace(shape.attention, shares=index)
        )
    blocks = {name: block.module(config) for name, block in shape.blocks.items()}
    norms = ("post_norms", "pre_norms", "parallel", "added_scale")
    attributes: dict[str, Any] = {name: getattr(shape, name) for name in norms} | blocks | options
    return layer_type(norm=config.norm_module, has_ff_norm=shape.ff_norm, **attributes)


def layers_of(config: DecoderConfig, **options: Any) -> list[DecoderLayer]:
    """Makes all layers of a configuration; `options` as `layer_of` takes them."""
    return [layer_of(config, i, **options) for i in range(len(config.layers))]


class DecoderNet(nn.Module):
    """The network. `__call__` is teacher forcing; `embed`, `run`, `features` and `logits` are the
    steps of decoding.
    """

    config: DecoderConfig
    taps: tuple[int, ...] = ()

    def setup(self):
        c = self.config
        dtype = jnp.dtype(self.config.dtype)
        self.embedding = Embedding(c.vocab_size, c.dim, dtype=dtype)
        self.layers = layers_of(c)
        self.norm = c.norm_module()
        if c.side is not None:
            self.side = c.side.module(c)
        if c.positions == "relative":
            heads = c.layers[0].attention.heads
            self.bias = RelativeBias(heads, c.buckets, c.max_distance, bidirectional=False)
        if c.positions == "learned":
            assert c.max_positions is not None
            self.position = Embedding(c.max_positions, c.dim, dtype=dtype)
        if not c.tied_head:
            # GPT-2 draws its head as its embedding, with which it is tied as a rule.
            as_gpt: dict[str, Any] = (
                {"weight_init": self.embedding.embedding_init} if c.positions == "learned" else {}
            )
            self.head = Dense(c.vocab_size, dtype=dtype, **as_gpt)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Computes the logits of each position of whole rows."""
        return self.logits(self.features(self.streams(tokens)[-1]), training=True)

    def streams(
        self, tokens: Int[Array, "B T"], runs: Bool[Array, "layers B"] | None = None
    ) -> list[Float[Array, "B T M"]]:
        """Computes the residual stream of whole rows after each layer; see
        `stack.without_cache`.
        """
        # Whole rows begin at 0, so one row's positions and masks broadcast over the batch.
        pass_ = kv.Pass(jnp.zeros((1,), jnp.int32), tokens.shape[1])
        empty = jax.eval_shape(lambda: empty_cache(self.config, 1, Room(pass_.step)))
        x, sides = self._split(
            self._embed(tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])
        )
        return stack.without_cache(
            self._layers(self._inputs(pass_, empty.views(pass_), sides)), x, runs, empty
        )

    def embed(
        self, cache: kv.KVCache, tokens: Int[Array, "B T"], parent: Int[Array, "B N"] | None = None
    ) -> Float[Array, "B T D"]:
        """Embeds tokens for all layers, at each row's own length: D = M, and P for each layer with
        a side input.
        """
        return self._embed(tokens, kv.positions(cache.length, tokens.shape[1], parent))

    def run(
        self,
        cache: kv.KVCache,
        x: Float[Array, "B T D"],
        parent: Int[Array, "B N"] | None = None,
        parts: Parts | None = None,
        real: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T M"], stack.Taps, kv.KVCache]:
        """Runs layers at each row's own length, as far as the final norm."""
        pass_ = kv.Pass(cache.length, x.shape[1], parent, real)
        x, sides = self._split(x)
        layers = self._layers(self._inputs(pass_, cache.views(pass_), sides))
        return stack.with_cache(layers, x, cache, self.taps, parts, pass_)

    def _layers(self, inputs: Sequence[LayerInputs]) -> list[stack.Layer]:
        return [
            functools.partial(layer, inputs=x) for layer, x in zip(self.layers, inputs, strict=True)
        ]

    def _split(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T M"], list[Float[Array, "B T P"] | None]]:
        """Splits what `embed` made: behind the stream, on its last axis, lie the layers' side
        inputs in order.
        """
        stream = x[..., : self.config.dim]
        sides = x[..., self.config.dim :]
        count = len(self.config.layers)
        return stream, [None] * count if self.config.side is None else [
            *jnp.split(sides, count, axis=-1)
        ]

    def _inputs(
        self, pass_: kv.Pass, views: Sequence[kv.View], sides: Sequence[Any]
    ) -> list[LayerInputs]:
        """Makes each layer's inputs; layers that read the same view, or rotate alike, share
        them.
        """
        position = pass_.positions()
        turns = [layer.attention.rotation for layer in self.config.layers]
        rotations = {turn: turn and turn[0].at(position, turn[1]) for turn in turns}

        def seen(view: kv.View) -> tuple[Mask | QueryMask, Bias]:
            by_distance = None
            if self.config.positions == "relative":
                by_distance = self.bias(distances(view.size))

            def mask_and_bias(first: int | Int[Array, ""], count: int) -> tuple[Mask, Bias]:
                # [B, 1, T, S]
                mask = view.mask(first, count)[:, None]
                start = pass_.length + first
                if by_distance is None:
                    return mask, None
                # [B, H, T, S]
                return mask, biases(by_distance, start, count, view.size, pass_.parent)

            return for_queries(pass_.step, mask_and_bias, pass_.parent)

        # A mask for each kind of cache, not for each layer: 60 layers of two kinds make two masks.
        masks: dict[Any, Any] = {
            view: (None, None) if view is None else seen(view) for view in dict.fromkeys(views)
        }
        return [
            LayerInputs(masks[view][0], rotations[turn], masks[view][1], side)
            for view, turn, side in zip(views, turns, sides, strict=True)
        ]

    def _embed(
        self, tokens: Int[Array, "B T"], position: Int[Array, "#B T"]
    ) -> Float[Array, "B T D"]:
        x = self.embedding(tokens)
        if self.config.positions == "learned":
            assert self.config.max_positions is not None
            # Padding may lie past the table; what it reads is never looked at.
            x = x + self.position(jnp.clip(position, 0, self.config.max_positions - 1))
        if self.config.scale_embedding:
            # Gemma rounds the factor to the stream's dtype, and so must we: 55.5, not 55.43, in
            # bfloat16.
            x = x * jnp.asarray(self.config.dim**0.5, x.dtype)
        if self.config.embedding_scale != 1.0:
            x = (x.astype(jnp.float32) * self.config.embedding_scale).astype(x.dtype)
        if self.config.side is None:
            return x
        side = self.side(tokens, x)  # [B, T, layers, P]
        return jnp.concatenate([x, side.reshape(*tokens.shape, -1)], axis=-1)

    def features(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Applies the final norm."""
        return self.norm(x)

    def logits(
        self, features: Float[Array, "B T M"], training: bool = False, *, raw: bool = False
    ) -> Float[Array, "B T V"]:
        """Applies the head; `raw` leaves out the scale and the cap of logits."""
        if self.config.tied_head:
            logits = self.embedding.logits(features, training)
        else:
            logits = self.head(features)
        logits = logits.astype(jnp.float32)
        if raw:
            return logits
        if self.config.logits_scale != 1.0:
            logits = logits * self.config.logits_scale
        if self.config.logits_cap is None:
            return logits
        return softcap(logits, self.config.logits_cap)


def language_model(config: DecoderConfig, taps: Sequence[int] = ()) -> LanguageModel:
    """Makes a decoder's pure functions of (params, ...), for `jaxspec.decode`.

    Args:
        config: its shape.
        taps: layers whose output `Forward.taps` is to hold; see `stack.check_taps`.

    >>> import jax, jaxspec
    >>> config = decoder_config(32, dim=16, ff_dim=32, layers=1, heads=4, kv_heads=2, head_dim=4)
    >>> lm = language_model(config)
    >>> prompt = jaxspec.Prompt(jnp.ones((2, 5), jnp.int32), jnp.array([5, 3]))
    >>> forward, cache = lm.prefill(init(config, jax.random.key(0)), prompt, Room(8))
    >>> forward.logits.shape, cache.keys[0].shape
    ((2, 1, 32), (2, 2, 8, 4))
    """
    return _language_model(config, stack.check_taps(taps, len(config.layers)))


@functools.lru_cache
def _language_model(config: DecoderConfig, taps: tuple[int, ...]) -> LanguageModel:
    c = config
    empty = functools.partial(empty_cache, config)
    lm = stack.decoder_only(DecoderNet(c, taps), init, c, empty, taps)
    assert lm.inside is not None
    inside = lm.inside._replace(has_slot_biases=c.positions == "relative")
    return lm._replace(
        limits=Limits(max_positions=c.max_positions, end_tokens=c.end_tokens), inside=inside
    )


def init(config: DecoderConfig, key: Key[Array, ""]) -> Params:
    """Draws random parameters: fan-in scaled matrices, embeddings of standard deviation 0.02."""
    return stack.init_params(DecoderNet(config), key, jnp.zeros((1, 2), jnp.int32))


def numbers_of(layers: Sequence[LayerShape]) -> list[int]:
    """Numbers the shapes of layers in the order of their first occurrence."""
    numbers = {shape: number for number, shape in enumerate(dict.fromkeys(layers))}
    return [numbers[shape] for shape in layers]


def _pieces(config: DecoderConfig) -> list[tuple[DecoderConfig, int]]:
    shapes = collections.Counter(config.layers)
    numbers = numbers_of(config.layers)

    def shallow(*layers: LayerShape) -> DecoderConfig:
        """Makes a configuration of some layers; those that share keys share them with the same
        shape's here.
        """
        moved = []
        for layer in layers:
            mixer = layer.attention
            source = layer.attention.shares
            if source is not None:
                # The layer whose keys are shared has another number among fewer layers.
                mixer = dataclasses.replace(mixer, shares=numbers[source])
            moved.append(dataclasses.replace(layer, attention=mixer))
        return dataclasses.replace(config, layers=tuple(moved))

    # Differences of small networks: one with each shape of layer once, and one with a shape twice.
    more = [(shallow(*shapes, shape), times - 1) for shape, times in shapes.items()]
    return [(shallow(*shapes), 1 - sum(times for _, times in more)), *more]


def _axes(config: DecoderConfig) -> Axes:
    """Layers are split alike: where an axis differs between them, into parts that divide all of its
    sizes.
    """
    parts = {"vocab": config.vocab_size}
    layouts = dict[str, tuple[str, ...]]()
    blocks = [block for layer in dict.fromkeys(config.layers) for block in layer.blocks.values()]
    for block in blocks if config.side is None else [*blocks, config.side]:
        # The greatest common divisor: an axis is cut into parts that fit every layer that has it.
        parts = (
            dict(block.parts)
            | parts
            | {x: math.gcd(parts.get(x, 0), n) for x, n in block.parts.items()}
        )
        layouts |= block.layouts
    return Axes({axis: parts[axis] for axis in sorted(parts, key=_AXES.index)}, layouts)


_AXES = ["heads", "kv_heads", "experts", "ff", "vocab"]  # in the order in which they are told of


def _share(config: DecoderConfig, path: str) -> float:
    """Positions are looked up, and so is an embedding that does not serve as the head."""
    # Blocks know their own matrices: an expert's is multiplied with few of the tokens.
    block = re.match(r"layers_(\d+)/(attention|cross|ff|last)/(.*)", path)
    if block:
        return config.layers[int(block[1])].blocks[block[2]].share(block[3])
    if config.side is not None and path.startswith("side/"):
        return config.side.share(path.removeprefix("side/"))
    unread = path.startswith("position") or path.endswith("table")
    if unread or (path.startswith("embedding") and not config.tied_head):
        return 0.0
    return 1.0


NETWORK = Network(
    "decoder",
    DecoderConfig,
    init,
    language_model,
    DecoderNet,
    lambda config: {"layers": len(config.layers)},
    _pieces,
    lambda config, batch, room, width: empty_cache(config, batch, room),
    _axes,
    _share,
    embedding_scale=lambda config: config.dim**0.5 if config.scale_embedding else 1.0,
    logits_cap=lambda config: config.logits_cap,
    trimmed=lambda config, tokens: (
        dataclasses.replace(config, vocab_size=tokens),
        ("embedding" if config.tied_head else "head",),
    ),
    alike=lambda config: {"layers": numbers_of(config.layers)},
)
