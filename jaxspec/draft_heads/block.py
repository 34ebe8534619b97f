"""Block drafters: one pass over a block of mask tokens, whose attention also reads the target's hidden states.

DFlash (Chen et al., arXiv 2602.06036) fuses the outputs of several of the target's layers into one vector for each
committed position. Each layer of the drafter makes keys and values from it. The block is the last committed token and
mask tokens, and all its positions attend to each other. DSpark adds a low-rank function of the previous token to a
token's logits, so that the tokens of a block depend on each other. One of its forms has a memory. As in `speculators`,
the memory begins at the last committed token's position, even if that position predicts no token.

With `reads_source` a drafter also reads the output of an encoder-decoder's encoder. The context of a row then begins
with the source's positions, and the decoder's follow.

Shapes: B batch, T step, S cache capacity, M the layers' width. F width of the target's taps, V vocabulary, W the
drafter's, R rank. P source positions, A places where drafts begin, C draft tokens of a block, N drafts, K depths. L
positions before theirs that a memory has read (`BlockConfig.lead`).
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec import core
from jaxspec.core import chunks, token_rows
from jaxspec.core import kv_cache as kv
from jaxspec.core.checks import in_range, one_of
from jaxspec.draft_heads import formats
from jaxspec.draft_heads.formats import Format, Shapes, TargetShape
from jaxspec.draft_heads.kind import Kind, LayerSizes, same_fields
from jaxspec.draft_heads.target import HeadParts, PartlyShared, SharedWithTarget, bind, requirements_of, zeros
from jaxspec.draft_heads.training import DraftStarts, DraftStep, Training
from jaxspec.drafters.hidden_states import DraftHead, TargetRequirements, inside_of, on_path
from jaxspec.drafters.stepwise import NodeLogits, chain
from jaxspec.nets import stack
from jaxspec.nets.attention import LayerInputs, Mask, for_queries, softcap
from jaxspec.nets.decoder import DecoderConfig, DecoderLayer, empty_cache, layers_of, norm_of
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.rotary import Rotation
from jaxspec.nets.shapes import LayerShape
from jaxspec.weights.hf_families import decoders

MARKOV = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """The shape of a block drafter.

    Attributes:
        layer: the shape of its layers; its vocabulary is the target's.
        hidden_size: width of the target's hidden states.
        taps: the layers that it reads, counted as `language_model(config, taps)` does.
        block: fed tokens of a block: the last committed one, and mask tokens.
        mask_token: the id of these; it may lie past the target's vocabulary if the embedding is its own.
        from_anchor: whether the position of the last committed token predicts a token, too (DSpark). A block then has
            `block` draft tokens, otherwise one fewer.
        markov_rank: the rank of DSpark's matrix; 0 for none.
        markov: the name of one of its three forms.
        confidence: whether it estimates the probability that a draft token is accepted, for `policies.confidence`, from
            the features of its position, and if `confidence_reads_token` from the token before.
        confidence_reads_token: see there.
        draft_vocab: size of its own vocabulary; None: the target's.
        own_embedding, own_head: whether it has these, or takes the target's.
        causal_windows: whether a token of a block sees only those before it and itself, in layers with a window;
            otherwise it sees the whole block.
        causal_full: the same choice for layers without a window.
        windows_from_anchor: whether all tokens of a block see as far back as its first position does (speculators);
            otherwise a window of w ends w - 1 positions before, and if not causal after, each token (z-lab, SGLang).
        reads_source: whether it reads the output of the target's encoder.
        embedding_scale, logits_scale, logits_cap: the factors of embeddings and logits, then a soft cap of the logits.
            They replace those of the target's embedding and head.
    """

    layer: DecoderConfig
    hidden_size: int
    taps: tuple[int, ...]
    block: int
    mask_token: int
    from_anchor: bool = False
    markov_rank: int = 0
    markov: str = "vanilla"
    confidence: bool = False
    confidence_reads_token: bool = True
    draft_vocab: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    causal_windows: bool = True
    causal_full: bool = False
    windows_from_anchor: bool = True
    reads_source: bool = False
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None

    def __post_init__(self):
        c = self.layer
        if c.positions != "rotary":
            raise ValueError("expected layers with rotary positions")
        if not self.taps:
            raise ValueError("taps is empty: a block drafter reads hidden states of at least one layer")
        one_of(self.markov, "markov", MARKOV)
        if self.count < 1:
            raise ValueError(f"block is {self.block}: expected at least {1 if self.from_anchor else 2} tokens")
        formats.check_own_parts(self, c.dim, self.hidden_size)
        if self.confidence and self.confidence_reads_token and not self.markov_rank:
            raise ValueError("confidence_reads_token is True, and markov_rank is 0: expected vectors of tokens")
        in_range(0, c.vocab_size, below=True, mask_token=self.mask_token)
        if self.reads_source and c.windows:
            raise ValueError("got reads_source and layers with windows: a window would hide the source")

    @property
    def count(self) -> int:
        """Most draft tokens: 15 of a block of 16 without an anchor's."""
        return self.block - (not self.from_anchor)

    @property
    def is_sequential(self) -> bool:
        """Tells whether a token's logits depend on the draft token before it."""
        return self.markov_rank > 0

    @property
    def memory(self) -> int:
        """Width of the memory that passes from token to token of a block."""
        return self.markov_rank if self.markov == "rnn" else 0

    @property
    def lead(self) -> int:
        """The positions that a memory has read before the first draft token's: the last committed token's, 1, or 0."""
        return int(self.memory > 0 and not self.from_anchor)

    @property
    def shape(self) -> DecoderConfig:
        """The shape of the layers."""
        return self.layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes(LayerSizes):
    """A block drafter; attributes as `BlockConfig` has them, 0 tokens of draft_vocab: the target's."""

    taps: tuple[int, ...]
    block: int
    mask_token: int
    from_anchor: bool = False
    markov_rank: int = 0
    markov: str = "vanilla"
    draft_vocab: int = 0
    own_embedding: bool = False
    own_head: bool = False
    reads_source: bool = False

    def config(self, target: core.Model) -> BlockConfig:
        """Returns the drafter's configuration, for a target."""
        return BlockConfig(self.layer(target), inside_of(target).width, **same_fields(self, BlockConfig))


# --- the network


class Markov(nn.Module):
    """DSpark's sequential head: what the token before says of the logits of one."""

    config: BlockConfig

    def setup(self):
        c, rank = self.config, self.config.markov_rank
        dtype = jnp.dtype(c.layer.dtype)
        self.before = Embedding(c.layer.vocab_size, rank, dtype=dtype, embedding_init=nn.initializers.normal(0.02))
        self.after = Dense(c.draft_vocab or c.layer.vocab_size, dtype=dtype)
        if c.markov == "gated":
            self.gate = Dense(rank, True, dtype)
        if c.markov == "rnn":
            self.joint = Dense(3 * rank, True, dtype)

    def __call__(self, previous: Int[Array, "B n"], features: Float[Array, "B 1 M"], memory: Float[Array, "B 1 R"]):
        x = self.before(previous)
        features = jnp.broadcast_to(features, (*previous.shape, features.shape[-1]))
        if self.config.markov == "gated":
            # The gate sees the position's features: how much the token before says differs from place to place.
            x = x * jax.nn.sigmoid(self.gate(jnp.concatenate([features, x], axis=-1)))
        if self.config.markov == "rnn":
            read = self.joint(jnp.concatenate([memory, x, features], axis=-1))
            # A minimal recurrent unit; only its memory passes from token to token of a block.
            gate, new, out = jnp.split(read, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            memory = gate * memory + (1 - gate) * jnp.tanh(new)
            x = jnp.tanh(out)
        return self.after(x).astype(jnp.float32), memory


class BlockDrafter(PartlyShared):
    """The network, by the parts of `BlockHead`."""

    config: BlockConfig

    def setup(self):
        super().setup()
        c, norm = self.config.layer, norm_of(self.config.layer)
        self.fc, self.hidden_norm, self.norm = Dense(c.dim, dtype=jnp.dtype(c.dtype)), norm(), norm()
        self.layers = self._made_layers()
        if self.config.markov_rank:
            self.markov = Markov(self.config)
        if self.config.confidence:
            self.confidence = Dense(1, True, jnp.dtype(c.dtype))
        if self.config.reads_source:
            self.source_fc, self.source_norm = Dense(c.dim, dtype=jnp.dtype(c.dtype)), norm()

    def __call__(self, taps: Float[Array, "B T F"], last: Int[Array, " B"]) -> Float[Array, "B C V"]:
        """Drafts one block after whole rows, with an embedding and a head of zeros, for initialisation."""
        config, c, batch = self.config, self.config.layer, last.shape[0]
        shared, cache = zeros(c.dim, c.vocab_size), self.empty(batch, core.Room(2 * taps.shape[1]))
        if config.reads_source:
            cache = self.append(cache, self.source(taps[..., : config.hidden_size]))
        features = self.block(shared, self.append(cache, self.fused(taps)), last, config.count)
        logits = self.logits(shared, features[:, config.lead :])
        if config.is_sequential:
            first = jax.tree.map(lambda x: x[:, :1], logits)
            logits = self.next_logits(first, last[:, None], features[:, :1], jnp.zeros((batch, config.memory)))[0]
        if config.confidence:
            self.estimate(last[:, None], features[:, :1])
        return logits

    @nn.nowrap
    def _made_layers(self) -> list[DecoderLayer]:
        """Makes the layers, for `setup`."""
        return layers_of(self.config.layer)

    @nn.nowrap
    def empty(self, batch: int, room: core.Room) -> kv.KVCache:
        """Makes a cache; a block may begin where a row ends, and is not cut: it has room of its own."""
        return empty_cache(self.config.layer, batch, core.Room(room.tokens + self.config.block, room.rewind))

    def read(self, forward: core.Forward) -> Float[Array, "B T M"]:
        """Fuses the target's taps."""
        assert forward.taps is not None
        return self.fused(forward.taps)

    def fused(self, taps: Float[Array, "B T F"]) -> Float[Array, "B T M"]:
        """Fuses taps."""
        return self.hidden_norm(self.fc(taps))

    def source(self, encoded: Float[Array, "B P D"]) -> Float[Array, "B P M"]:
        """Makes context of the encoder's output."""
        return self.source_norm(self.source_fc(encoded))

    def append(
        self, cache: kv.KVCache, context: Float[Array, "B T M"], real: Int[Array, " B"] | None = None
    ) -> kv.KVCache:
        """Writes keys and values of further positions."""
        # Context positions only fill the cache; no query of theirs is computed, since their features are the target's.
        at, caches = kv.Pass(cache.length, context.shape[1], real=real), []
        for old, new in zip(cache.layers, self._keys_values(context, at.positions()), strict=True):
            caches.append(old.after(old.read(at, (), *new), at))
        return cache.grown(caches, at)

    def _keys_values(self, context: Float[Array, "B T M"], position: Int[Array, "#B T"]) -> list[tuple]:
        """Makes each layer's keys and values of committed positions."""
        layers = zip(self.layers, self._rotations(position), strict=True)
        return [layer.attention.keys_values(context, rotation) for layer, rotation in layers]

    def _rotations(self, position: Int[Array, "#B T"]) -> list[Rotation | None]:
        shapes = [layer.attention for layer in self.config.layer.layers]
        return [shape.rotary and shape.rotary.at(position, shape.head_dim) for shape in shapes]

    def block(
        self, shared: SharedWithTarget, cache: kv.KVCache, last: Int[Array, " B"], count: int
    ) -> Float[Array, "B L+C M"]:
        """Makes a block's features; the last committed token is at position `cache.length`.

        The block's keys and values are dropped.
        """
        config, length = self.config, cache.length
        at, slot = kv.Pass(length, config.block), jnp.arange(config.block, dtype=length.dtype)

        def mask(window: int | None, view: kv.View) -> Mask:
            # Bidirectional inside a block: all of its positions are visible, whatever their order, unless a window says
            # less.
            ahead = view.entries() - length[:, None]  # [B, S]: below 0 before the block, then its positions
            visible = jnp.logical_and((ahead < config.block)[:, None], self._in_window(window, ahead[:, None], slot))
            return visible[:, None]

        layers = self._layers([mask(*x) for x in zip(self._windows(), cache.views(at), strict=True)], at.positions())
        # The grown cache is dropped: mask tokens are no context, and the next block begins after other tokens.
        x, _, _ = stack.with_cache(layers, self._embedded(shared, last[:, None]), cache, at=at)
        # Slot 0 is the committed token. Unless drafts are made from this anchor, it predicts nothing, and they begin at
        # slot 1.
        first = config.block - config.count
        return self.norm(x[:, first - config.lead : first + count])

    def blocks(
        self, shared: SharedWithTarget, starts: DraftStarts, last: Int[Array, "B A"], position: Int[Array, " A"]
    ) -> Float[Array, "B A L+C M"]:
        """Makes the features of many blocks of each row, in training: block a reads what is before `place[a]`.

        Args:
            shared: the parts of the target that it uses.
            starts: the target's pass over whole rows, and the lengths of their sources.
            last: the tokens at these places.
            position: positions in the rows, the same in each.
        """
        config, c, size = self.config, self.config.layer, self.config.block
        context, (batch, anchors) = self.read(starts.forward), last.shape
        x = self._embedded(shared, last.reshape(-1, 1)).reshape(batch, anchors * size, c.dim)
        # All blocks of a row lie behind each other on one axis [A size]; the mask keeps them apart.
        block, slot = jnp.divmod(jnp.arange(anchors * size, dtype=position.dtype), size)  # of each position
        keys = jnp.arange(context.shape[1], dtype=position.dtype)
        # Positions of the context and of the blocks in the drafter's rows: what comes after a source counts on.
        offset, context_position, of_source = jnp.zeros((1, 1), position.dtype), keys[None], None
        if config.reads_source:
            assert starts.forward.encoded is not None and starts.source_length is not None
            source, offset = self.source(starts.forward.encoded), starts.source_length[:, None]  # [B, P, M], [B, 1]
            source_position = jnp.arange(source.shape[1], dtype=position.dtype)[None]
            of_source = (source_position < offset)[:, None]  # [B, 1, P]
            context = jnp.concatenate([source, context], axis=1)
            source_position = jnp.broadcast_to(source_position, source.shape[:2])
            context_position = jnp.concatenate([source_position, offset + keys[None]], axis=1)

        def mask(window: int | None, first: int | Int[Array, ""], count: int) -> tuple[Mask, None]:
            anchor, at = jnp.divmod(first + jnp.arange(count, dtype=position.dtype), size)  # of each query
            # [T, S] distances to the block's first position, and [T, A size] whether a key is of the same block.
            before, of_block = keys[None, :] - position[anchor][:, None], anchor[:, None] == block[None, :]
            visible = jnp.concatenate([before < 0, of_block], axis=1)
            # As in `block`: each query's keys, counted from its block.
            ahead = jnp.concatenate([before, jnp.broadcast_to(slot[None, :], of_block.shape)], axis=1)
            visible = jnp.logical_and(visible[None], self._in_window(window, ahead[None], at))  # [1, T, S + A size]
            if of_source is not None:
                # Every block reads the whole source, [B, T, P], in front of its row's context.
                seen = jnp.broadcast_to(of_source, (batch, count, of_source.shape[2]))
                visible = jnp.concatenate([seen, jnp.broadcast_to(visible, (batch, *visible.shape[1:]))], axis=2)
            return visible[:, None], None

        masks = [for_queries(anchors * size, functools.partial(mask, window))[0] for window in self._windows()]
        # Rotary positions are those in the text, not those on the axis of blocks.
        layers = self._layers(masks, offset + (position[block] + slot)[None])
        x, _ = stack.with_past(layers, x, tuple(self._keys_values(context, context_position)))
        return self.norm(x.reshape(batch, anchors, size, c.dim)[:, :, size - config.count - config.lead :])

    def _in_window(
        self, window: int | None, ahead: Int[Array, "#B #T S"], slot: Int[Array, " T"]
    ) -> Bool[Array, "#B #T S"]:
        """Says which keys positions of blocks see in a layer, besides those that nobody sees.

        `ahead`, of each key, and `slot`, of each position, count from the block's first.
        """
        config, slot = self.config, slot[None, :, None]
        causal = config.causal_full if window is None else config.causal_windows
        seen = ahead <= slot if causal else jnp.ones_like(ahead, bool)
        if window is None:
            return seen
        if config.windows_from_anchor:
            return jnp.logical_and(seen, ahead >= -window)
        return jnp.logical_and(seen, jnp.abs(slot - ahead) < window)

    def _windows(self) -> list[int | None]:
        return [layer.attention.window for layer in self.config.layer.layers]

    def _layers(self, masks: list[Any], position: Int[Array, "#B T"]) -> list[stack.Layer]:
        layers = zip(self.layers, masks, self._rotations(position), strict=True)
        return [functools.partial(layer, inputs=LayerInputs(mask, turn, None)) for layer, mask, turn in layers]

    def _embedded(self, shared: SharedWithTarget, last: Int[Array, "B 1"]) -> Float[Array, "B block M"]:
        """Embeds a block's tokens: the last one of what is before it, and mask tokens."""
        config, dtype = self.config, jnp.dtype(self.config.layer.dtype)
        # [last mask mask ...]: the network fills in all masks at once.
        tokens = jnp.pad(last, ((0, 0), (0, config.block - 1)), constant_values=config.mask_token)
        return self.embed(shared, tokens).astype(dtype) * jnp.asarray(config.embedding_scale, dtype)

    def logits(self, shared: SharedWithTarget, features: Float[Array, "B C M"]) -> Any:
        # The target's matrix alone: its own scale and cap are not part of the drafter.
        logits = self.draft_logits(shared, features, raw=True) * self.config.logits_scale
        cap = self.config.logits_cap
        return self.widened(logits if cap is None else softcap(logits, cap))

    def next_logits(
        self,
        logits: Any,
        previous: Int[Array, "B n"],
        features: Float[Array, "B 1 M"],
        memory: Float[Array, "B R"],
    ) -> tuple[Float[Array, "B n V"], Float[Array, "B R"]]:
        added, memory = self.markov(previous, features, memory[:, None])
        if self.config.draft_vocab is not None:
            # Where the drafter has no token the logits are -inf already: nothing is to be added there.
            added = self.widened(added)
            added = jnp.where(added == -jnp.inf, 0.0, added)
        return logits + added, memory[:, 0]

    def estimate(self, previous: Int[Array, "B 1"], features: Float[Array, "B 1 M"]) -> Float[Array, " B"]:
        """Estimates the probability that a position's token is accepted; what that token is, it does not know."""
        if self.config.confidence_reads_token:
            features = jnp.concatenate([features, self.markov.before(previous).astype(features.dtype)], axis=-1)
        return jax.nn.sigmoid(self.confidence(features)[:, 0, 0].astype(jnp.float32))


class BlockHead(NamedTuple):
    """Such a network as pure functions."""

    # (parameters, the target's pass) -> what is taken in of its taps [B, T, M]
    read: Callable[[core.Params, core.Forward], Float[Array, "B T M"]]
    # (parameters, the encoder's output [B, P, D]) -> what is taken in of it [B, P, M]; None: it reads none
    source: Callable[[core.Params, Float[Array, "B P D"]], Float[Array, "B P M"]] | None
    empty: Callable[[int, core.Room], core.Cache]  # (batch, room) -> a cache of rows without positions
    # (parameters, cache, what `read` made of further positions [B, T, M], how many of these are real [B] or None) ->
    # the cache, which grows by them
    append: Callable[..., core.Cache]
    # (parameters, shared, cache, the last committed tokens [B], count) -> the features of the `count` tokens after
    # these, all in one pass [B, L+C, M]. L positions that come before theirs and predict nothing may be returned in
    # front, if `next_logits` is to read them.
    block: Callable[[core.Params, SharedWithTarget, core.Cache, Int[Array, " B"], int], Float[Array, "B L+C M"]]
    rewind: core.Rewind  # forgets positions, as `LanguageModel.rewind` does
    # (parameters, shared, features of a block) -> logits in the target's vocabulary [B, C, V]; where there is
    # `next_logits`, any arrays [B, C, ...] that it reads
    logits: Callable[[core.Params, SharedWithTarget, Float[Array, "B C M"]], Any]
    # (parameters, what `logits` made for a position [B, 1, ...], previous tokens [B, n], the position's features
    # [B, 1, M], memory [B, R]) -> the position's logits after each of these tokens [B, n, V], and the memory for the
    # next position [B, R]. None: given the committed text, the tokens of a block are independent.
    next_logits: Callable[..., tuple[Float[Array, "B n V"], Float[Array, "B R"]]] | None
    memory: int  # R, the width of what `next_logits` passes on, at the beginning zeros; 0: nothing, and n may be over 1
    count: int  # most tokens of a block
    requirements: TargetRequirements  # its requirements of the target
    # (parameters, previous tokens [B, 1], a position's features [B, 1, M]) -> the estimated probability that the
    # position's draft token is accepted [B]; None: it estimates nothing
    estimate: Callable[..., Float[Array, " B"]] | None = None


@functools.lru_cache
def head(config: BlockConfig, network: type[BlockDrafter] = BlockDrafter) -> BlockHead:
    """Makes a block drafter's pure functions, for `drafters.block`."""
    net = network(config)
    return BlockHead(
        read=stack.pure(net, network.read),
        source=stack.pure(net, network.source) if config.reads_source else None,
        empty=net.empty,
        append=stack.pure(net, network.append),
        block=stack.pure(net, network.block),
        rewind=kv.rewind,
        logits=stack.pure(net, network.logits),
        next_logits=stack.pure(net, network.next_logits) if config.is_sequential else None,
        memory=config.memory,
        estimate=stack.pure(net, network.estimate) if config.confidence else None,
        count=config.count,
        requirements=requirements_of(config, config.hidden_size, config.taps)._replace(encoder=config.reads_source),
    )


def first_memory(
    head: BlockHead,
    params: core.Params,
    shared: SharedWithTarget,
    last: Int[Array, " B"],
    features: Float[Array, "B L M"],
) -> Float[Array, "B R"]:
    """Makes the memory that a block's first token is given: zeros, after the L positions that predict no token."""
    # Positions before the drafted ones still pass their memory on, as in training.
    memory = jnp.zeros((features.shape[0], head.memory), features.dtype)
    for i in range(features.shape[1]):
        assert head.next_logits is not None
        feature = features[:, i : i + 1]
        logits = head.logits(params, shared, feature)  # compiled away where the memory needs none
        _, memory = head.next_logits(params, logits, last[:, None], feature, memory)
    return memory


def init(config: BlockConfig, key: Key[Array, ""], network: type[BlockDrafter] = BlockDrafter) -> core.Params:
    """Draws random parameters."""
    taps = jnp.zeros((1, 1, config.hidden_size * len(config.taps)))
    return stack.init_params(network(config), key, taps, jnp.zeros((1,), jnp.int32))


# --- the drafter


def block(head: DraftHead[BlockHead], target: core.Model, trimmed: core.Model | None = None) -> core.BoundDrafter:
    """Drafts a whole block of tokens in one pass over mask tokens, conditioned on the target's hidden states (DFlash).

    The cost does not grow with the number of draft tokens, so they may be many. Given the committed text, DFlash's
    tokens are independent of each other. DSpark's are drawn one after the other; each adds a low-rank function of the
    token before to the logits of its position. gamma is cut to the tokens of a block.

    Args:
        head: a network and its parameters: `draft_heads.block.head(config)` in a `DraftHead`;
            `jaxspec.load_drafter` reads published ones.
        target: the model whose text it drafts, with the taps that it reads (`jaxspec.with_taps`).
        trimmed: a model whose head is used in place of the target's: `jaxspec.trim_vocabulary(target, size=...)`.

    Raises:
        ValueError: the network is for another target, or the target lacks the taps.

    Example:
        >>> import jaxspec
        >>> from jaxspec import nets
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.decoder_config(32, dim=16, ff_dim=32, layers=3, heads=4, kv_heads=2, head_dim=4)
        >>> target = jaxspec.Model(decoder.language_model(shape, taps=(0, 1)), decoder.init(shape, jax.random.key(0)))
        >>> config = BlockConfig(nets.replace(shape, layers=1), 16, taps=(0, 1), block=4, mask_token=31)
        >>> drafter = block(jaxspec.DraftHead(head(config), init(config, jax.random.key(1))), target)
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Chen, Liang, Liu, DFlash, arXiv 2602.06036.
    """
    return bind(_drafter, head, target, trimmed, "a block drafter", "block")


class Context(NamedTuple):
    """The keys and values of what a block reads."""

    cache: core.Cache
    first: Int[Array, " B"]  # the position there of each row's first token: the source's length, or 0


@functools.lru_cache
def _drafter(head: BlockHead, parts: HeadParts) -> core.Drafter:
    def init(start: core.DraftStart, nodes: int) -> Context:
        (params, _), row = parts(start.weights), token_rows.decoder_prompt(parts.lm, start.prompt)
        context, first = head.read(params, start.prefilled), jnp.zeros_like(row.length)
        if head.source is not None:
            encoded, first = start.prefilled.encoded, start.prompt.length
            assert encoded is not None
            cache = head.empty(len(first), dataclasses.replace(start.room, tokens=start.room.tokens + encoded.shape[1]))
            cache = head.rewind(head.append(params, cache, head.source(params, encoded)), first)
            return Context(head.append(params, cache, context), first)
        # There are no outputs to keep: only the cache of the prompt's context is wanted.
        before = start.before and start.before.of(start.before.state.cache)
        rows = context, row.length, start.room, before
        cache = chunks.read(lambda *new: ((), head.append(params, *new)), head.rewind, head.empty, *rows)[2]
        return Context(cache, first)

    def begin(weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int | None) -> core.Reading:
        (params, shared), row, count = parts(weights), context.row, context.gamma
        last = token_rows.window(row.tokens, row.length - 1, 1)

        def whole_block() -> tuple[Array, Any, Array, Array]:
            features = head.block(params, shared, caches.draft.cache, last[:, 0], count)
            lead = features.shape[1] - count
            memory = first_memory(head, params, shared, last[:, 0], features[:, :lead])
            logits = head.logits(params, shared, features[:, lead:])
            return features[:, lead:], logits, memory, jnp.zeros(last.shape[0], jnp.float32)

        def root(carry: Any) -> NodeLogits:
            return nodes(last, None, 0, whole_block())

        def nodes(tokens: Int[Array, "B n"], parent: Any, level: int | Int[Array, ""], carry: Any) -> NodeLogits:
            features, block_logits, memory, estimate = carry
            at_level = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=level, slice_size=1, axis=1)
            logits = jax.tree.map(at_level, block_logits)  # B 1 V
            if head.next_logits is not None:
                logits, memory = head.next_logits(params, logits, tokens, at_level(features), memory)
            if estimates is not None:
                estimate = estimates(params, tokens, at_level(features))
            carry = features, block_logits, memory, estimate
            return jnp.broadcast_to(logits, (*tokens.shape, logits.shape[-1])), carry

        # Trees have no policy that could ask for an estimate.
        estimates = head.estimate if fed is None else None
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(whole_block))
        return core.Reading(empty, root, nodes, estimate=None if estimates is None else lambda carry: carry[3])

    def commit(end: core.RoundEnd) -> core.Caches:
        (params, _), (cache, first) = parts(end.weights), end.caches.draft
        # The accepted path's hidden states become context; garbage after them is rewound at once.
        cache = head.append(params, cache, head.read(params, on_path(end.forward, end.verdict)))
        return end.caches._replace(draft=Context(head.rewind(cache, first + end.row.length - 1), first))

    steps = core.Steps(init, begin, commit, head.requirements.vocab_size, head.count)
    return chain(steps, trees=head.memory == 0)  # with a memory, logits depend on the whole path


# --- in training


def draft_states(
    config: BlockConfig,
    params: core.Params,
    shared: SharedWithTarget,
    starts: DraftStarts,
    network: type[BlockDrafter] = BlockDrafter,
) -> Float[Array, "B A L+C M"]:
    """Makes the features of the blocks that begin at the places, those of positions before their tokens in front."""
    blocks, position = stack.pure(network(config), network.blocks), starts.place
    features = blocks(params, shared, starts, starts.tokens[:, position], position + 1)
    return features[:, :, : config.lead + starts.depths]


def draft_logits(
    config: BlockConfig, params: core.Params, shared: SharedWithTarget, at: DraftStep
) -> tuple[Float[Array, "N V"], Float[Array, "N R"] | None]:
    """Makes the logits of the tokens of one number of blocks, given the text's tokens before them."""
    functions, index, memory = head(config), config.lead + at.depth, at.memory
    feature = at.hidden[:, index : index + 1]
    logits = functions.logits(params, shared, feature)
    if functions.next_logits is None:
        return logits[:, 0], None
    if memory is None:
        memory = first_memory(functions, params, shared, at.ahead[:, 0], at.hidden[:, : config.lead])
    logits, memory = functions.next_logits(params, logits, at.ahead[:, at.depth, None], feature, memory)
    return logits[:, 0], memory


# --- its files

BEFORE = "markov_head.markov_w1.weight"
CONFIDENCE = "confidence_head.proj"
OPTIONS = {  # of dflash_config
    *("block_size", "mask_token_id", "mask_token", "target_layer_ids", "num_target_layers"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
    *("sample_from_anchor", "markov_rank", "markov_head_type", "projector_type", "attention_mode"),
    *("enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"),
}
UNLIKE: dict[str, Any] = {  # options of drafters for MiMo, Gemma 3 and others, with the values that change nothing
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "use_gemma_norm": False,
    "rope_is_neox_style": True,
    "is_neox_style": True,
    "attention_mode": "gqa",
}
SOURCE = "encoder_fc.weight"  # ours: published drafters have targets without encoders


def canonical(name: str) -> str | None:
    """Spells a name in one way."""
    return formats.plain(name)


def matches(table: dict, shapes: Shapes) -> bool:
    """Tells whether there is one norm of all that is read, and layers that have none for it."""
    return {"fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"} <= shapes.keys()


def read(
    table: dict,
    shapes: Shapes,
    target: TargetShape,
    kind: type[BlockConfig] = BlockConfig,
    counts: Mapping[str, str] = types.MappingProxyType({}),
) -> BlockConfig:
    """Reads the network of a config.json: z-lab's, DeepSpec's or that of speculators.

    Args:
        table: the config.json.
        shapes: shapes of tensors by name.
        target: the target's.
        kind: the configuration's type.
        counts: further fields of it, which are integers, and their keys.
    """
    nested, of_speculators = table.get("dflash_config") or {}, "speculators_model_type" in table
    expected = OPTIONS.union(counts.values(), UNLIKE)
    if unknown := sorted(nested.keys() - expected):
        raise formats.FamilyError(f"dflash_config has {', '.join(unknown)}: expected {', '.join(sorted(expected))}")
    # They lie in dflash_config or beside it; null is no value.
    options = {name: value for name, value in {**table, **nested}.items() if value is not None}
    formats.only(options, **UNLIKE)
    if (projector := options.get("projector_type")) not in (None, "dflash", "dspark"):
        raise formats.FamilyError(f"projector_type is {projector!r}: expected 'dflash' or 'dspark'")
    layer = _layer(table, shapes)
    hidden = table.get("target_hidden_size") or layer.dim
    if options.get("aux_hidden_state_layer_ids") is not None:
        taps = formats.taps_of(options["aux_hidden_state_layer_ids"], -1, target)
    else:
        usual = usual_taps(options.get("num_target_layers") or target.layers, len(layer.layers))
        taps = formats.taps_of(options.get("target_layer_ids") or usual, 0, target)
    formats.check_same(
        ("vocabulary size", layer.vocab_size, target.vocab_size),
        ("number of target layers", options.get("num_target_layers"), target.layers),
        ("width of hidden states", hidden, target.hidden_size),
        ("width of all taps", formats.axis_of(shapes, "fc.weight", 1), len(taps) * hidden),
    )
    spark = "dspark" in (table.get("speculators_model_type"), options.get("projector_type"))
    spark = spark or "DSpark" in "".join(table.get("architectures") or ())
    more: dict[str, Any] = {field: int(formats.need(options, key)) for field, key in counts.items()}
    width = formats.axis_of(shapes, f"{CONFIDENCE}.weight", 1)
    parts, is_causal = formats.own_parts(shapes), table.get("is_causal")
    # Without a word on it, z-lab's code and SGLang's let tokens see ahead in layers without a window alone.
    causal_windows = is_causal is not False
    if of_speculators:
        formats.only(table, is_causal=False)
        causal_windows = not options.get("sliding_window_non_causal", kind is not BlockConfig)
    # Speculators trains on the rows of the target's matrix. So does z-lab where a factor of them is given; without one
    # the rows are taken as the target's first layer reads them.
    scale = 1.0 if of_speculators or parts["own_embedding"] else target.embedding_scale
    # z-lab's code has blocks of 16 where config.json is silent.
    defaults = {} if of_speculators or spark else {"block_size": 16}
    return kind(
        layer,
        hidden,
        taps,
        block=int(formats.need(defaults | options, "block_size")),
        mask_token=int(formats.need(options, "mask_token_id")),
        from_anchor=bool(options.get("sample_from_anchor", spark)),
        markov_rank=shapes[BEFORE][1] if BEFORE in shapes else 0,
        markov=options.get("markov_head_type") or "vanilla",
        confidence=width is not None,
        confidence_reads_token=width is None or width > layer.dim,
        draft_vocab=formats.draft_vocab(shapes, layer.vocab_size),
        causal_windows=causal_windows,
        causal_full=bool(is_causal),
        windows_from_anchor=of_speculators or not layer.windows,
        embedding_scale=float(options.get("input_embedding_scale", scale)),
        logits_scale=float(options.get("output_multiplier", 1.0)),
        logits_cap=options.get("final_logit_softcapping") or None,
        reads_source=SOURCE in shapes,
        **parts,
        **more,
    )


def usual_taps(target_layers: int, layers: int) -> list[int]:
    """Numbers the layers that z-lab's code reads where config.json is silent: evenly from the second to the last but 3.

    >>> usual_taps(36, 5)
    [1, 9, 17, 25, 33]
    """
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]


def _layer(table: dict, shapes: Shapes) -> DecoderConfig:
    """Reads the shape of the layers."""
    key = next((x for x in ("rope_parameters", "rope_scaling") if "rope_dim" in (table.get(x) or {})), None)
    if key is None:
        return formats.layer_of(table, shapes, windows=True)
    # The rotated width that it was trained with; other keys were copied from its target, and count for nothing.
    dims, copied = table[key]["rope_dim"], ("rope_dim", "mrope_section", "mrope_interleaved", decoders.PARTIAL)
    plain = {name: x for name, x in table.items() if name != decoders.PARTIAL}
    plain[key] = {name: x for name, x in table[key].items() if name not in copied}
    layer = formats.layer_of(plain, shapes, windows=True)

    def turned(index: int, shape: LayerShape) -> LayerShape:
        return decoders.change(shape, decoders.turned(shape, dims / shape.attention.head_dim))

    return decoders.with_layers(layer, turned)


def names(config: BlockConfig) -> dict[str, str]:
    """Says where each parameter lies."""
    where = {"fc/weight": "fc.weight", "hidden_norm/scale": "hidden_norm.weight", "norm/scale": "norm.weight"}
    where |= formats.layer_names(config.layer) | formats.part_names(config, config.draft_vocab)
    if config.reads_source:
        where |= {"source_fc/weight": SOURCE, "source_norm/scale": "encoder_norm.weight"}
    if config.markov_rank:
        where |= {"markov/before/embedding": BEFORE, "markov/after/weight": "markov_head.markov_w2.weight"}
        for form, layer, tensor in (("gated", "gate", "gate_proj"), ("rnn", "joint", "joint_proj")):
            if config.markov == form:
                where |= {f"markov/{layer}/{x}": f"markov_head.{tensor}.{x}" for x in ("weight", "bias")}
    if config.confidence:
        where |= {f"confidence/{x}": f"{CONFIDENCE}.{x}" for x in ("weight", "bias")}
    return where


def write(config: BlockConfig, verifier: dict, tokens: int) -> dict:
    """Writes the config.json as `speculators` has it, or as z-lab has it if the network differs from those."""
    scales = config.embedding_scale, config.logits_scale, config.logits_cap
    from_queries = bool(config.layer.windows) and not config.windows_from_anchor
    if scales != (1.0, 1.0, None) or config.causal_full or from_queries:
        return _zlabs(config, verifier)
    table: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab or config.layer.vocab_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "block_size": config.block,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.from_anchor,
        "sliding_window_non_causal": not config.causal_windows,
        "target_hidden_size": None if config.hidden_size == config.layer.dim else config.hidden_size,
    }
    kind, architecture = "dflash", "DFlashSpeculator"
    if config.markov_rank:
        kind, architecture = "dspark", "DSparkSpeculator"
        table |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov}
        reads_token = config.confidence_reads_token
        table |= {"enable_confidence_head": config.confidence, "confidence_head_with_markov": reads_token}
    return formats.speculators(kind, architecture, config.layer, table, verifier, min(tokens, config.count))


def _zlabs(config: BlockConfig, verifier: dict) -> dict:
    """Writes the config.json as z-lab's code and SGLang read it."""
    only_speculators = {
        "markov_rank": config.markov_rank > 0,
        "confidence": config.confidence,
        "from_anchor": config.from_anchor,
        "draft_vocab": config.draft_vocab is not None,
        "own_embedding": config.own_embedding,
        "own_head": config.own_head,
        "windows_from_anchor": bool(config.layer.windows) and config.windows_from_anchor,
        "causal_windows": config.causal_full and not config.causal_windows,
    }
    if lacking := [name for name, is_set in only_speculators.items() if is_set]:
        raise formats.FamilyError(
            f"z-lab's format, which has scales, caps and is_causal, cannot store {', '.join(lacking)}: expected one of "
            "both kinds of options"
        )
    table: dict[str, Any] = {
        "block_size": config.block,
        "mask_token_id": config.mask_token,
        "target_layer_ids": list(config.taps),
        "num_target_layers": verifier["layers"],
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": config.logits_scale,
        "final_logit_softcapping": config.logits_cap,
    }
    causal = {(True, False): {}, (True, True): {"is_causal": True}, (False, False): {"is_causal": False}}
    return {
        **formats.written_layer(config.layer),
        "architectures": ["DFlashDraftModel"],
        "dflash_config": table,
        "base_model_name_or_path": verifier["name_or_path"],
        **causal[config.causal_windows, config.causal_full],
    }


KIND = Kind(
    name="block",
    config=BlockConfig,
    sizes=BlockSizes,
    init=init,
    head=head,
    drafter=block,
    format=Format("block drafter", canonical, matches, read, names, write),
    training=Training(draft_states, draft_logits, longest=lambda config: config.count),
)
