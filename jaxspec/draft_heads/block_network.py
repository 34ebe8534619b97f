"""The network of block drafters: a block's positions attend to each other, and to the target's
hidden states.

Shapes: B batch, T step, S cache capacity, M the layers' width. F width of the target's taps, V
vocabulary, R rank. P source positions, A places where drafts begin, C draft tokens of a block. L
positions before theirs that a memory has read (`BlockConfig.lead`).
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core
from jaxspec.core import kv_cache as kv
from jaxspec.draft_heads.block_config import BlockConfig
from jaxspec.draft_heads.target import PartlyShared, SharedWithTarget, zeros
from jaxspec.draft_heads.training import DraftStarts
from jaxspec.nets import stack
from jaxspec.nets.attention import LayerInputs, Mask, for_queries, softcap
from jaxspec.nets.decoder import DecoderLayer, empty_cache, layers_of
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.rotary import Rotation


class Markov(nn.Module):
    """DSpark's sequential head: the previous token's contribution to a token's logits."""

    config: BlockConfig

    def setup(self):
        c = self.config
        rank = self.config.markov_rank
        dtype = jnp.dtype(c.layer.dtype)
        self.before = Embedding(c.layer.vocab_size, rank, dtype=dtype)
        self.after = Dense(c.draft_vocab or c.layer.vocab_size, dtype=dtype)
        if c.markov == "gated":
            self.gate = Dense(rank, True, dtype)
        if c.markov == "rnn":
            self.joint = Dense(3 * rank, True, dtype)

    def __call__(
        self,
        previous: Int[Array, "B n"],
        features: Float[Array, "B 1 M"],
        memory: Float[Array, "B 1 R"],
    ):
        x = self.before(previous)
        features = jnp.broadcast_to(features, (*previous.shape, features.shape[-1]))
        if self.config.markov == "gated":
            # The gate sees the position's features: how much the token before says differs from
            # place to place.
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
        c = self.config.layer
        norm = self.config.layer.norm_module
        self.fc = Dense(c.dim, dtype=jnp.dtype(c.dtype))
        self.hidden_norm = norm()
        self.norm = norm()
        self.layers = self._made_layers()
        if self.config.markov_rank:
            self.markov = Markov(self.config)
        if self.config.confidence:
            self.confidence = Dense(1, True, jnp.dtype(c.dtype))
        if self.config.reads_source:
            self.source_fc = Dense(c.dim, dtype=jnp.dtype(c.dtype))
            self.source_norm = norm()

    def __call__(
        self, taps: Float[Array, "B T F"], last: Int[Array, " B"]
    ) -> Float[Array, "B C V"]:
        """Drafts one block after whole rows, with an embedding and a head of zeros, for
        initialisation.
        """
        c = self.config.layer
        config = self.config
        batch = last.shape[0]
        shared = zeros(c.dim, c.vocab_size)
        cache = self.empty(batch, core.Room(2 * taps.shape[1]))
        if config.reads_source:
            cache = self.append(cache, self.source(taps[..., : config.hidden_size]))
        features = self.block(
            shared,
            self.append(cache, self.read(core.Forward(taps, taps, taps))),
            last,
            config.count,
        )
        logits = self.logits(shared, features[:, config.lead :])
        if config.is_sequential:
            first = jax.tree.map(lambda x: x[:, :1], logits)
            logits = self.next_logits(
                first,
                last[:, None],
                features[:, :1],
                jnp.zeros((batch, config.memory), jnp.float32),
            )[0]
        if config.confidence:
            self.estimate(last[:, None], features[:, :1])
        return logits

    @nn.nowrap
    def _made_layers(self) -> list[DecoderLayer]:
        """Makes the layers, for `setup`."""
        return layers_of(self.config.layer)

    @nn.nowrap
    def empty(self, batch: int, room: core.Room) -> kv.KVCache:
        """Makes a cache; it has room for a whole block after the end of a row."""
        return empty_cache(
            self.config.layer, batch, core.Room(room.tokens + self.config.block, room.rewind)
        )

    def read(self, forward: core.Forward) -> Float[Array, "B T M"]:
        """Fuses the target's taps."""
        assert forward.taps is not None
        return self.hidden_norm(self.fc(forward.taps))

    def source(self, encoded: Float[Array, "B P D"]) -> Float[Array, "B P M"]:
        """Makes context of the encoder's output."""
        return self.source_norm(self.source_fc(encoded))

    def append(
        self,
        cache: kv.KVCache,
        context: Float[Array, "B T M"],
        real: Int[Array, " B"] | None = None,
    ) -> kv.KVCache:
        """Writes keys and values of further positions."""
        # Context positions only fill the cache; no query of theirs is computed, since their
        # features are the target's.
        pass_ = kv.Pass(cache.length, context.shape[1], real=real)
        caches = []
        for old, new in zip(
            cache.layers, self._keys_values(context, pass_.positions()), strict=True
        ):
            caches.append(old.after(old.read(pass_, (), *new), pass_))
        return cache.grown(caches, pass_)

    def _keys_values(
        self, context: Float[Array, "B T M"], position: Int[Array, "#B T"]
    ) -> list[tuple]:
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
        config = self.config
        length = cache.length
        pass_ = kv.Pass(length, config.block)
        slot = jnp.arange(config.block, dtype=length.dtype)

        def mask(window: int | None, view: kv.View) -> Mask:
            # Bidirectional inside a block: all of its positions are visible, whatever their order,
            # unless a window says less. Offsets [B, S] are below 0 before the block, then its
            # positions.
            key_offset = view.entries() - length[:, None]
            visible = (key_offset < config.block)[:, None] & self._in_window(
                window, key_offset[:, None], slot
            )
            return visible[:, None]

        masks = [mask(*x) for x in zip(self._windows(), cache.views(pass_), strict=True)]
        layers = self._layers(masks, pass_.positions())
        # The grown cache is dropped: mask tokens are no context, and the next block begins after
        # other tokens.
        x, _, _ = stack.with_cache(
            layers, self._embedded(shared, last[:, None]), cache, pass_=pass_
        )
        # Slot 0 is the committed token. Unless drafts are made from this anchor, it predicts
        # nothing, and they begin at slot 1.
        first = config.block - config.count
        return self.norm(x[:, first - config.lead : first + count])

    def blocks(
        self,
        shared: SharedWithTarget,
        starts: DraftStarts,
        last: Int[Array, "B A"],
        position: Int[Array, " A"],
    ) -> Float[Array, "B A L+C M"]:
        """Makes the features of many blocks of each row, in training: block a reads the positions
        before `place[a]`.

        `last` has the tokens at these places, `position` their positions, the same in each row.
        """
        c = self.config.layer
        size = self.config.block
        config = self.config
        context, (batch, anchors) = self.read(starts.forward), last.shape
        x = self._embedded(shared, last.reshape(-1, 1)).reshape(batch, anchors * size, c.dim)
        # All blocks of a row lie one after the other on one axis [A size]; the mask keeps them
        # apart. These are the block of each position, and its slot there.
        block, slot = jnp.divmod(jnp.arange(anchors * size, dtype=position.dtype), size)
        keys = jnp.arange(context.shape[1], dtype=position.dtype)
        # Positions of the context and of the blocks in the drafter's rows: what comes after a
        # source counts on.
        offset = jnp.zeros((1, 1), position.dtype)
        context_position = keys[None]
        of_source = None
        if config.reads_source:
            assert starts.forward.encoded is not None and starts.source_length is not None
            # [B, P, M], [B, 1]
            source = self.source(starts.forward.encoded)
            offset = starts.source_length[:, None]
            source_position = jnp.arange(source.shape[1], dtype=position.dtype)[None]
            of_source = (source_position < offset)[:, None]  # [B, 1, P]
            context = jnp.concatenate([source, context], axis=1)
            source_position = jnp.broadcast_to(source_position, source.shape[:2])
            context_position = jnp.concatenate([source_position, offset + keys[None]], axis=1)

        def mask(window: int | None, first: int | Int[Array, ""], count: int) -> tuple[Mask, None]:
            # of each query
            anchor, query_slot = jnp.divmod(first + jnp.arange(count, dtype=position.dtype), size)
            # [T, S] distances to the block's first position, and [T, A size] whether a key is of
            # the same block.
            before = keys[None, :] - position[anchor][:, None]
            of_block = anchor[:, None] == block[None, :]
            visible = jnp.concatenate([before < 0, of_block], axis=1)
            # As in `block`: each query's keys, counted from its block.
            key_offset = jnp.concatenate(
                [before, jnp.broadcast_to(slot[None, :], of_block.shape)], axis=1
            )
            # [1, T, S + A size]
            visible = visible[None] & self._in_window(window, key_offset[None], query_slot)
            if of_source is not None:
                # Every block reads the whole source, [B, T, P], in front of its row's context.
                seen = jnp.broadcast_to(of_source, (batch, count, of_source.shape[2]))
                visible = jnp.concatenate(
                    [seen, jnp.broadcast_to(visible, (batch, *visible.shape[1:]))], axis=2
                )
            return visible[:, None], None

        masks = [
            for_queries(anchors * size, functools.partial(mask, window))[0]
            for window in self._windows()
        ]
        # Rotary positions are those in the text, not those on the axis of blocks.
        layers = self._layers(masks, offset + (position[block] + slot)[None])
        x, _ = stack.with_past(layers, x, tuple(self._keys_values(context, context_position)))
        return self.norm(
            x.reshape(batch, anchors, size, c.dim)[:, :, size - config.count - config.lead :]
        )

    def _in_window(
        self, window: int | None, key_offset: Int[Array, "#B #T S"], slot: Int[Array, " T"]
    ) -> Bool[Array, "#B #T S"]:
        """Says which keys positions of blocks see in a layer, besides those that nobody sees.

        `key_offset`, of each key, and `slot`, of each position, count from the block's first.
        """
        config = self.config
        slot = slot[None, :, None]
        if window is None:
            causal = config.causal_full
        else:
            causal = config.causal_windows
        if causal:
            seen = key_offset <= slot
        else:
            seen = jnp.ones_like(key_offset, bool)
        if window is None:
            return seen
        if config.windows_from_anchor:
            return seen & (key_offset >= -window)
        return seen & (jnp.abs(slot - key_offset) < window)

    def _windows(self) -> list[int | None]:
        return [layer.attention.window for layer in self.config.layer.layers]

    def _layers(self, masks: list[Any], position: Int[Array, "#B T"]) -> list[stack.Layer]:
        layers = zip(self.layers, masks, self._rotations(position), strict=True)
        return [
            functools.partial(layer, inputs=LayerInputs(mask, turn, None))
            for layer, mask, turn in layers
        ]

    def _embedded(
        self, shared: SharedWithTarget, last: Int[Array, "B 1"]
    ) -> Float[Array, "B block M"]:
        """Embeds a block's tokens: the last token before it, and mask tokens."""
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
            # Where the drafter has no token the logits are -inf already: nothing is to be added
            # there.
            added = self.widened(added)
            added = jnp.where(added == -jnp.inf, 0.0, added)
        return logits + added, memory[:, 0]

    def estimate(
        self, previous: Int[Array, "B 1"], features: Float[Array, "B 1 M"]
    ) -> Float[Array, " B"]:
        """Estimates the probability that a position's token is accepted; what that token is, it
        does not know.
        """
        if self.config.confidence_reads_token:
            features = jnp.concatenate(
                [features, self.markov.before(previous).astype(features.dtype)], axis=-1
            )
        return jax.nn.sigmoid(self.confidence(features)[:, 0, 0].astype(jnp.float32))
