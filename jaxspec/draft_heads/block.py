"""Block drafters: one pass over a block of mask tokens, whose attention also reads the target's hidden states.

DFlash (Chen et al., arXiv 2602.06036) fuses the outputs of several of the target's layers into one vector for each
committed position. Each layer of the drafter makes keys and values from it. The block is the last committed token and
mask tokens, and all its positions attend to each other. DSpark adds a low-rank function of the previous token to a
token's logits, so that the tokens of a block depend on each other. One of its forms has a memory. As in `speculators`,
the memory begins at the last committed token's position, even if that position predicts no token.

Shapes: B batch, T step, S cache capacity, M the layers' width. F width of the target's taps, V vocabulary, W the
drafter's, R rank. A places where drafts begin, C draft tokens of a block, N drafts, K depths. L positions before theirs
that a memory has read (`BlockConfig.lead`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec import core, nets
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
from jaxspec.nets.decoder import DecoderConfig, empty_cache, layers_of, norm_of
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.rotary import Rotation

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
        draft_vocab: size of its own vocabulary; None: the target's.
        own_embedding, own_head: whether it has these, or takes the target's.
        causal_windows: whether in layers with a window a token of a block sees those before it and
            itself; if not, and in all other layers, it sees the whole block. What is before a block they see as far
            back as the window, counted from the block's first position.
        embedding_scale, logits_scale, logits_cap: the factors of embeddings and logits, then a soft cap of the logits.
    """

    layer: DecoderConfig
    hidden_size: int
    taps: tuple[int, ...]
    block: int
    mask_token: int
    from_anchor: bool = False
    markov_rank: int = 0
    markov: str = "vanilla"
    draft_vocab: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    causal_windows: bool = True
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
        in_range(0, c.vocab_size, below=True, mask_token=self.mask_token)

    @property
    def count(self) -> int:
        """Most draft tokens: 15 of a block of 16 without an anchor's."""
        return self.block - (not self.from_anchor)

    @property
    def lead(self) -> int:
        """The positions that a memory has read before the first draft token's: the last committed token's, 1, or 0."""
        return int(self.markov == "rnn" and self.markov_rank > 0 and not self.from_anchor)

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

    def __call__(self, previous: Int[Array, "B 1"], features: Float[Array, "B 1 M"], memory: Float[Array, "B 1 R"]):
        x = self.before(previous)
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
        self.layers = layers_of(c)
        if self.config.markov_rank:
            self.markov = Markov(self.config)

    def __call__(self, taps: Float[Array, "B T F"], last: Int[Array, " B"]) -> Float[Array, "B C V"]:
        """Drafts one block after whole rows, with an embedding and a head of zeros, for initialisation."""
        config, c, batch = self.config, self.config.layer, last.shape[0]
        shared, cache = zeros(c.dim, c.vocab_size), self.empty(batch, core.Room(taps.shape[1]))
        features = self.block(shared, self.append(cache, self.fused(taps)), last, config.count)
        logits = self.logits(shared, features[:, config.lead :])
        if config.markov_rank:
            memory = jnp.zeros((batch, config.markov_rank))
            logits = self.next_logits(logits[:, 0], last, features[:, 0], memory)[0][:, None]
        return logits

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
        self, shared: SharedWithTarget, forward: core.Forward, last: Int[Array, "B A"], position: Int[Array, " A"]
    ) -> Float[Array, "B A L+C M"]:
        """Makes the features of many blocks of each row, in training: block a reads what is before `place[a]`.

        Args:
            shared: the parts of the target that it uses.
            forward: the target's pass over whole rows.
            last: the tokens at these places.
            position: positions in the rows, the same in each.
        """
        config, c, size = self.config, self.config.layer, self.config.block
        context, (batch, anchors) = self.read(forward), last.shape
        x = self._embedded(shared, last.reshape(-1, 1)).reshape(batch, anchors * size, c.dim)
        # All blocks of a row lie behind each other on one axis [A size]; the mask keeps them apart.
        block, slot = jnp.divmod(jnp.arange(anchors * size, dtype=position.dtype), size)  # of each position
        keys = jnp.arange(context.shape[1], dtype=position.dtype)

        def mask(window: int | None, first: int | Int[Array, ""], count: int) -> tuple[Mask, None]:
            anchor, at = jnp.divmod(first + jnp.arange(count, dtype=position.dtype), size)  # of each query
            # [T, S] distances to the block's first position, and [T, A size] whether a key is of the same block.
            before, of_block = keys[None, :] - position[anchor][:, None], anchor[:, None] == block[None, :]
            visible = jnp.concatenate([before < 0, of_block], axis=1)
            # As in `block`: each query's keys, counted from its block.
            ahead = jnp.concatenate([before, jnp.broadcast_to(slot[None, :], of_block.shape)], axis=1)
            return jnp.logical_and(visible[None, None], self._in_window(window, ahead[None], at)[None]), None

        masks = [for_queries(anchors * size, functools.partial(mask, window))[0] for window in self._windows()]
        # Rotary positions are those in the text, not those on the axis of blocks.
        layers = self._layers(masks, (position[block] + slot)[None])
        x, _ = stack.with_past(layers, x, tuple(self._keys_values(context, keys[None])))
        return self.norm(x.reshape(batch, anchors, size, c.dim)[:, :, size - config.count - config.lead :])

    def _in_window(
        self, window: int | None, ahead: Int[Array, "#B #T S"], slot: Int[Array, " T"]
    ) -> Bool[Array, "#B #T S"]:
        """Says which keys positions of blocks see in a layer, besides those that nobody sees.

        `ahead`, of each key, and `slot`, of each position, count from the block's first.
        """
        if window is None:
            return jnp.ones_like(ahead, bool)
        seen = ahead >= -window
        return jnp.logical_and(seen, ahead <= slot[None, :, None]) if self.config.causal_windows else seen

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

    def logits(self, shared: SharedWithTarget, features: Float[Array, "B C M"]) -> Float[Array, "B C V"]:
        logits = self.draft_logits(shared, features) * self.config.logits_scale
        cap = self.config.logits_cap
        return self.widened(logits if cap is None else softcap(logits, cap))

    def next_logits(
        self,
        logits: Float[Array, "B V"],
        previous: Int[Array, " B"],
        features: Float[Array, "B M"],
        memory: Float[Array, "B R"],
    ) -> tuple[Float[Array, "B V"], Float[Array, "B R"]]:
        added, memory = self.markov(previous[:, None], features[:, None], memory[:, None])
        if self.config.draft_vocab is not None:
            # Where the drafter has no token the logits are -inf already: nothing is to be added there.
            added = self.widened(added)
            added = jnp.where(added == -jnp.inf, 0.0, added)
        return logits + added[:, 0], memory[:, 0]


class BlockHead(NamedTuple):
    """Such a network as pure functions."""

    # (parameters, the target's pass) -> what is taken in of its taps [B, T, M]
    read: Callable[[core.Params, core.Forward], Float[Array, "B T M"]]
    empty: Callable[[int, core.Room], core.Cache]  # (batch, room) -> a cache of rows without positions
    # (parameters, cache, what `read` made of further positions [B, T, M], how many of these are real [B] or None) ->
    # the cache, which grows by them
    append: Callable[..., core.Cache]
    # (parameters, shared, cache, the last committed tokens [B], count) -> the features of the `count` tokens after
    # these, all in one pass [B, L+C, M]. L positions that come before theirs and predict nothing may be returned in
    # front, if `next_logits` is to read them.
    block: Callable[[core.Params, SharedWithTarget, core.Cache, Int[Array, " B"], int], Float[Array, "B L+C M"]]
    rewind: core.Rewind  # forgets positions, as `LanguageModel.rewind` does
    # (parameters, shared, features of a block) -> logits in the target's vocabulary [B, C, V]
    logits: Callable[[core.Params, SharedWithTarget, Float[Array, "B C M"]], Float[Array, "B C V"]]
    # (parameters, logits [B, V], previous tokens [B], features [B, M], memory [B, R]) -> the logits of a token given
    # the draft tokens before it [B, V], and the memory for the next token [B, R]. `logits` are those of `logits`, which
    # know nothing of these tokens: DSpark adds to them. None: given the committed text, the tokens of a block are
    # independent.
    next_logits: Callable[..., tuple[Float[Array, "B V"], Float[Array, "B R"]]] | None
    memory: int  # R, the width of what `next_logits` passes on, at the beginning zeros
    count: int  # most tokens of a block
    requirements: TargetRequirements  # its requirements of the target


@functools.lru_cache
def head(config: BlockConfig) -> BlockHead:
    """Makes a block drafter's pure functions, for `drafters.block`."""
    net = BlockDrafter(config)
    return BlockHead(
        read=stack.pure(net, BlockDrafter.read),
        empty=net.empty,
        append=stack.pure(net, BlockDrafter.append),
        block=stack.pure(net, BlockDrafter.block),
        rewind=kv.rewind,
        logits=stack.pure(net, BlockDrafter.logits),
        next_logits=stack.pure(net, BlockDrafter.next_logits) if config.markov_rank else None,
        memory=config.markov_rank,
        count=config.count,
        requirements=requirements_of(config, config.hidden_size, config.taps),
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
        logits = head.logits(params, shared, features[:, i : i + 1])[:, 0]  # compiled away where the memory needs none
        _, memory = head.next_logits(params, logits, last, features[:, i], memory)
    return memory


def init(config: BlockConfig, key: Key[Array, ""]) -> core.Params:
    """Draws random parameters."""
    taps = jnp.zeros((1, 1, config.hidden_size * len(config.taps)))
    return stack.init_params(BlockDrafter(config), key, taps, jnp.zeros((1,), jnp.int32))


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


@functools.lru_cache
def _drafter(head: BlockHead, parts: HeadParts) -> core.Drafter:
    def init(start: core.DraftStart, nodes: int) -> core.Cache:
        (params, _), row = parts(start.weights), token_rows.decoder_prompt(parts.lm, start.prompt)
        rows = head.read(params, start.prefilled), row.length, start.room, start.before
        # There are no outputs to keep: only the cache of the prompt's context is wanted.
        return chunks.read(lambda *new: ((), head.append(params, *new)), head.rewind, head.empty, *rows)[2]

    def begin(weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int | None) -> core.Reading:
        (params, shared), row, count = parts(weights), context.row, context.gamma
        last = token_rows.window(row.tokens, row.length - 1, 1)

        def whole_block() -> tuple[Array, Array, Array]:
            features = head.block(params, shared, caches.draft, last[:, 0], count)
            lead = features.shape[1] - count
            memory = first_memory(head, params, shared, last[:, 0], features[:, :lead])
            return features[:, lead:], head.logits(params, shared, features[:, lead:]), memory

        def root(carry: Any) -> NodeLogits:
            return nodes(last, None, 0, whole_block())

        def nodes(tokens: Int[Array, "B n"], parent: Any, level: int | Int[Array, ""], carry: Any) -> NodeLogits:
            features, block_logits, memory = carry
            logits = jax.lax.dynamic_slice_in_dim(block_logits, level, 1, axis=1)  # B 1 V
            if head.next_logits is not None:
                feature = jax.lax.dynamic_index_in_dim(features, level, axis=1, keepdims=False)
                logits, memory = head.next_logits(params, logits[:, 0], tokens[:, 0], feature, memory)
                logits = logits[:, None]
            return jnp.broadcast_to(logits, (*tokens.shape, logits.shape[-1])), (features, block_logits, memory)

        return core.Reading(
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(whole_block)), root, nodes
        )

    def commit(end: core.RoundEnd) -> core.Caches:
        params, _ = parts(end.weights)
        # The accepted path's hidden states become context; garbage after them is rewound at once.
        cache = head.append(params, end.caches.draft, head.read(params, on_path(end.forward, end.verdict)))
        return end.caches._replace(draft=head.rewind(cache, end.row.length - 1))

    steps = core.Steps(init, begin, commit, head.requirements.vocab_size, head.count)
    return chain(steps, trees=head.next_logits is None)  # a sequential head's logits depend on the path


# --- in training


def draft_states(config: BlockConfig, params: core.Params, shared: SharedWithTarget, starts: DraftStarts):
    """Makes the features of the blocks that begin at the places, those of positions before their tokens in front."""
    blocks, position = stack.pure(BlockDrafter(config), BlockDrafter.blocks), starts.place
    features = blocks(params, shared, starts.forward, starts.tokens[:, position], position + 1)
    return features[:, :, : config.lead + starts.depths]


def draft_logits(
    config: BlockConfig, params: core.Params, shared: SharedWithTarget, at: DraftStep
) -> tuple[Float[Array, "N V"], Float[Array, "N R"] | None]:
    """Makes the logits of the tokens of one number of blocks, given the text's tokens before them."""
    functions, index, memory = head(config), config.lead + at.depth, at.memory
    logits = functions.logits(params, shared, at.hidden[:, index : index + 1])[:, 0]
    if functions.next_logits is None:
        return logits, None
    if memory is None:
        memory = first_memory(functions, params, shared, at.ahead[:, 0], at.hidden[:, : config.lead])
    return functions.next_logits(params, logits, at.ahead[:, at.depth], at.hidden[:, index], memory)


# --- its files

BEFORE = "markov_head.markov_w1.weight"


def canonical(name: str) -> str | None:
    """Spells a name in one way; what estimates confidences is not read."""
    without_model = formats.plain(name)
    return None if without_model is None or without_model.startswith("confidence_head.") else without_model


def matches(table: dict, shapes: Shapes) -> bool:
    """Tells whether there is one norm of all that is read, and layers that have none for it."""
    return {"fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"} <= shapes.keys()


def read(table: dict, shapes: Shapes, target: TargetShape) -> BlockConfig:
    """Reads the network of a config.json."""
    options = {**table, **(table.get("dflash_config") or {})}
    layer = formats.layer_of(table, shapes, windows=True)
    if options.get("aux_hidden_state_layer_ids") is not None:
        taps = formats.taps_of(options["aux_hidden_state_layer_ids"], -1, target)
    else:
        taps = formats.taps_of(formats.need(options, "target_layer_ids"), 0, target)
    hidden = table.get("target_hidden_size") or layer.dim
    formats.check_same(
        ("vocabulary size", layer.vocab_size, target.vocab_size),
        ("number of target layers", options.get("num_target_layers"), target.layers),
        ("width of hidden states", hidden, target.hidden_size),
        ("width of all taps", formats.axis_of(shapes, "fc.weight", 1), len(taps) * hidden),
    )
    spark = table.get("speculators_model_type") == "dspark" or "DSpark" in "".join(table.get("architectures") or ())
    parts, cap = formats.own_parts(shapes), options.get("final_logit_softcapping") or None
    target_cap = nets.logits_cap(target.config)
    if not parts["own_head"] and target_cap is not None:
        if cap != target_cap or options.get("output_multiplier", 1.0) != 1.0:
            raise formats.FamilyError(f"the target's head caps its logits at {target_cap}, and the drafter's at {cap}")
        cap = None  # the head does so
    return BlockConfig(
        layer,
        hidden,
        taps,
        block=int(formats.need(options, "block_size")),
        mask_token=int(formats.need(options, "mask_token_id")),
        from_anchor=bool(options.get("sample_from_anchor", spark)),
        markov_rank=shapes[BEFORE][1] if BEFORE in shapes else 0,
        markov=options.get("markov_head_type") or "vanilla",
        draft_vocab=formats.draft_vocab(shapes, layer.vocab_size),
        # Those of speculators, which its files name, see what is before them only, unless it says otherwise.
        causal_windows="speculators_model_type" in table and not table.get("sliding_window_non_causal", False),
        embedding_scale=float(options.get("input_embedding_scale", 1.0)),
        logits_scale=float(options.get("output_multiplier", 1.0)),
        logits_cap=cap,
        **parts,
    )


def names(config: BlockConfig) -> dict[str, str]:
    """Says where each parameter lies."""
    where = {"fc/weight": "fc.weight", "hidden_norm/scale": "hidden_norm.weight", "norm/scale": "norm.weight"}
    where |= formats.layer_names(config.layer) | formats.part_names(config, config.draft_vocab)
    if config.markov_rank:
        where |= {"markov/before/embedding": BEFORE, "markov/after/weight": "markov_head.markov_w2.weight"}
        for form, layer, tensor in (("gated", "gate", "gate_proj"), ("rnn", "joint", "joint_proj")):
            if config.markov == form:
                where |= {f"markov/{layer}/{x}": f"markov_head.{tensor}.{x}" for x in ("weight", "bias")}
    return where


def write(config: BlockConfig, verifier: dict, tokens: int) -> dict:
    """Writes the config.json, as `speculators` has it."""
    if (config.embedding_scale, config.logits_scale, config.logits_cap) != (1.0, 1.0, None):
        raise formats.FamilyError("the format of speculators cannot store scales or caps of embeddings and logits")
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
        table |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov, "enable_confidence_head": False}
    return formats.speculators(kind, architecture, config.layer, table, verifier, min(tokens, config.count))


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
