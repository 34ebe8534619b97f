"""Block drafters: one pass over a block of mask tokens, whose attention also reads the target's hidden states.

DFlash (Chen et al., arXiv 2602.06036): the outputs of several of the target's layers, at every committed position, are
fused into one vector, of which each layer of the drafter makes keys and values. The block is the last committed token
and mask tokens; within it every position attends to every other one. DSpark adds to the logits of a token what a
low-rank matrix says of the token before it, so that the tokens of a block depend on each other. One of its forms has a
memory, which begins at the last committed token's position, whether that predicts a token or not: as `speculators` has
it.

Shapes: B batch, T step, S cache capacity, C draft tokens of a block, L positions before theirs that a memory has read
(`BlockConfig.lead`), M the layers' width, F what is read of the target, V vocabulary, R rank.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec import cache as kv
from jaxspec.base import BlockHead, Forward, Needs, Params, Shared
from jaxspec.nets import stack, unroll
from jaxspec.nets.attention import RMSNorm, softcap
from jaxspec.nets.decoder import AttentionInputs, DecoderConfig, DecoderLayer, rotation_of
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.target_parts import in_target_vocabulary, zeros

MARKOV = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """The shape of a block drafter.

    Attributes:
        layer: of its layers; its vocabulary is the target's.
        hidden_size: width of the target's hidden states.
        taps: the layers that it reads, counted as `language_model(config, taps)` does.
        block: fed tokens of a block: the last committed one, and mask tokens.
        mask_token: the id of these; it may lie past the target's vocabulary if the embedding is its own.
        from_anchor: whether the position of the last committed token predicts a token, too (DSpark). A block then has
            `block` draft tokens, otherwise one fewer.
        markov_rank: of DSpark's matrix; 0: none.
        markov: which of its three forms it has.
        draft_vocab: size of its own vocabulary; None: the target's.
        own_embedding, own_head: whether it has these, or takes the target's.
        embedding_scale, logits_scale, logits_cap: what embeddings and logits are multiplied by; a soft cap of logits,
            after that.
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
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None

    def __post_init__(self):
        c = self.layer
        if c.positions != "rotary" or any(c.local):
            raise ValueError("expected layers with rotary positions and no windows")
        if not self.taps:
            raise ValueError("taps is empty: a block drafter reads hidden states of at least one layer")
        if self.markov not in MARKOV:
            raise ValueError(f"markov is {self.markov!r}, expected one of {', '.join(MARKOV)}")
        if self.count < 1:
            raise ValueError(f"block is {self.block}: expected at least {1 if self.from_anchor else 2} tokens")
        if c.dim != self.hidden_size and not (self.own_embedding and self.own_head):
            raise ValueError(
                f"width {c.dim} is not the target's, {self.hidden_size}: expected own_embedding and own_head"
            )
        if self.draft_vocab is not None and not self.own_head:
            raise ValueError("the target's head has the target's vocabulary: a draft_vocab needs own_head")
        if not 0 <= self.mask_token < c.vocab_size:
            raise ValueError(f"the mask token is {self.mask_token}, expected an id from 0 to {c.vocab_size - 1}")

    @property
    def count(self) -> int:
        """Most draft tokens: 15 of a block of 16 without an anchor's."""
        return self.block - (not self.from_anchor)

    @property
    def lead(self) -> int:
        """How many positions a memory has read before the first draft token's: the last committed token's, or none."""
        return int(self.markov == "rnn" and self.markov_rank > 0 and not self.from_anchor)


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
            x = x * jax.nn.sigmoid(self.gate(jnp.concatenate([features, x], axis=-1)))
        if self.config.markov == "rnn":
            read = self.joint(jnp.concatenate([memory, x, features], axis=-1))
            gate, new, out = jnp.split(read, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            memory = gate * memory + (1 - gate) * jnp.tanh(new)
            x = jnp.tanh(out)
        return self.after(x).astype(jnp.float32), memory


class BlockDrafter(nn.Module):
    """The network, by parts: as `base.BlockHead` has them."""

    config: BlockConfig

    def setup(self):
        config, c = self.config, self.config.layer
        dtype = jnp.dtype(c.dtype)
        norm = functools.partial(RMSNorm, c.epsilon, c.norms_from_one, dtype)
        self.fc, self.hidden_norm, self.norm = Dense(c.dim, dtype=dtype), norm(), norm()
        self.layers = [DecoderLayer(c) for _ in range(c.layers)]
        if config.own_embedding:
            init = nn.initializers.normal(0.02)
            self.embedding = Embedding(c.vocab_size, c.dim, dtype=dtype, embedding_init=init)
        if config.own_head:
            self.head = Dense(config.draft_vocab or c.vocab_size, dtype=dtype)
        if config.draft_vocab is not None:
            self.vocabulary = self.param("vocabulary", lambda _: jnp.arange(config.draft_vocab, dtype=jnp.int32))
        if config.markov_rank:
            self.markov = Markov(config)

    def __call__(self, taps: Float[Array, "B T F"], last: Int[Array, " B"]) -> Float[Array, "B C V"]:
        """One block after whole rows, with an embedding and a head of zeros where the target's are used."""
        c, batch = self.config.layer, last.shape[0]
        shared = zeros(c.dim, c.vocab_size)
        capacity = taps.shape[1] + self.config.block
        cache = kv.empty(batch, c.layers, c.kv_heads, capacity, c.head_dim, jnp.dtype(c.dtype))
        features = self.block(shared, self.append(cache, self.fused(taps)), last, self.config.count)
        logits = self.logits(shared, features[:, self.config.lead :])
        if self.config.markov_rank:
            memory = jnp.zeros((batch, self.config.markov_rank))
            logits = logits + self.correct(last, features[:, 0], memory)[0][:, None]
        return logits

    def fused(self, taps: Float[Array, "B T F"]) -> Float[Array, "B T M"]:
        return self.hidden_norm(self.fc(taps))

    def append(self, cache: kv.KVCache, context: Float[Array, "B T M"]) -> kv.KVCache:
        """Keys and values of further positions."""
        length, step = cache.length, context.shape[1]
        rotary = rotation_of(self.config.layer, kv.positions(length, step))
        made = [layer.attention.keys_values(context, rotary) for layer in self.layers]
        keys = tuple(kv.write(old, new, length) for old, (new, _) in zip(cache.keys, made, strict=True))
        values = tuple(kv.write(old, new, length) for old, (_, new) in zip(cache.values, made, strict=True))
        return kv.KVCache(keys, values, length + jnp.asarray(step, length.dtype))

    def block(self, shared: Shared, cache: kv.KVCache, last: Int[Array, " B"], count: int) -> Float[Array, "B L+C M"]:
        """The last committed token is at position `cache.length`; the block's keys and values are dropped."""
        config, c, length = self.config, self.config.layer, cache.length
        slot = jnp.arange(cache.keys[0].shape[2], dtype=length.dtype)
        seen = (slot[None, :] < length[:, None] + config.block)[:, None, None, :]
        inputs = AttentionInputs(seen, rotation_of(c, kv.positions(length, config.block)), None)
        layers = [functools.partial(layer, inputs=inputs) for layer in self.layers]
        x, _, _ = stack.with_cache(layers, self._embedded(shared, last[:, None]), cache)
        first = config.block - config.count
        return self.norm(x[:, first - config.lead : first + count])

    def blocks(
        self, shared: Shared, context: Float[Array, "B T M"], last: Int[Array, "B A"], place: Int[Array, " A"]
    ) -> Float[Array, "B A L+C M"]:
        """Many blocks of each row, in training: block a follows the token at `place[a]` and reads what is before it.

        Args:
            shared: what is the target's.
            context: `fused` at the positions of the rows.
            last: the tokens at these places.
            place: positions in the rows, the same in each.
        """
        config, c, size = self.config, self.config.layer, self.config.block
        batch, anchors = last.shape
        x = self._embedded(shared, last.reshape(-1, 1)).reshape(batch, anchors * size, c.dim)
        slot = jnp.arange(size, dtype=place.dtype)
        position = (place[:, None] + slot[None, :]).reshape(1, -1)
        of = jnp.repeat(jnp.arange(anchors), size)
        before = jnp.arange(context.shape[1], dtype=place.dtype)[None, :] < jnp.repeat(place, size)[:, None]
        seen = jnp.concatenate([before, of[:, None] == of[None, :]], axis=1)[None, None]
        inputs = AttentionInputs(seen, rotation_of(c, position), None)
        rotary = rotation_of(c, jnp.arange(context.shape[1], dtype=place.dtype)[None])
        past = tuple(layer.attention.keys_values(context, rotary) for layer in self.layers)
        x, _ = unroll.with_past([functools.partial(layer, inputs=inputs) for layer in self.layers], x, past)
        return self.norm(x.reshape(batch, anchors, size, c.dim)[:, :, size - config.count - config.lead :])

    def _embedded(self, shared: Shared, last: Int[Array, "B 1"]) -> Float[Array, "B block M"]:
        """A block's tokens: the last one of what is before it, and mask tokens."""
        config, dtype = self.config, jnp.dtype(self.config.layer.dtype)
        tokens = jnp.pad(last, ((0, 0), (0, config.block - 1)), constant_values=config.mask_token)
        embedded = self.embedding(tokens) if config.own_embedding else shared.embed(tokens)
        return embedded.astype(dtype) * jnp.asarray(config.embedding_scale, dtype)

    def logits(self, shared: Shared, features: Float[Array, "B C M"]) -> Float[Array, "B C V"]:
        config = self.config
        logits = (self.head(features) if config.own_head else shared.logits(features)).astype(jnp.float32)
        logits = logits * config.logits_scale
        if config.logits_cap is not None:
            logits = softcap(logits, config.logits_cap)
        return self._wide(logits)

    def correct(self, previous: Int[Array, " B"], features: Float[Array, "B M"], memory: Float[Array, "B R"]):
        added, memory = self.markov(previous[:, None], features[:, None], memory[:, None])
        if self.config.draft_vocab is not None:
            # Where the drafter has no token the logits are -inf already: nothing is to be added there.
            added = self._wide(added)
            added = jnp.where(added == -jnp.inf, 0.0, added)
        return added[:, 0], memory[:, 0]

    def _wide(self, logits: Float[Array, "B C W"]) -> Float[Array, "B C V"]:
        if self.config.draft_vocab is None:
            return logits
        return in_target_vocabulary(logits, self.vocabulary, self.config.layer.vocab_size)


@functools.lru_cache
def head(config: BlockConfig) -> BlockHead:
    """A block drafter as pure functions, for `drafters.block`."""
    module, c = BlockDrafter(config), config.layer

    def call(params: Params, method):
        return nn.apply(method, module)({"params": params})

    def read(params: Params, forward: Forward) -> Float[Array, "B T M"]:
        return call(params, lambda net: net.fused(forward.taps))

    def append(params: Params, cache: kv.KVCache, context: Array) -> kv.KVCache:
        return call(params, lambda net: net.append(cache, context))

    def block(params: Params, shared: Shared, cache: kv.KVCache, last: Array, count: int) -> Array:
        return call(params, lambda net: net.block(shared, cache, last, count))

    def logits(params: Params, shared: Shared, hidden: Array) -> Array:
        return call(params, lambda net: net.logits(shared, hidden))

    def correct(params: Params, previous: Array, features: Array, memory: Array) -> tuple[Array, Array]:
        return call(params, lambda net: net.correct(previous, features, memory))

    def empty(batch: int, capacity: int) -> kv.KVCache:
        # A block may begin where a row ends, and is not cut: it has room of its own.
        return kv.empty(batch, c.layers, c.kv_heads, capacity + config.block, c.head_dim, jnp.dtype(c.dtype))

    needs = Needs(c.vocab_size, config.hidden_size, config.taps, not config.own_embedding, not config.own_head)
    correction = correct if config.markov_rank else None
    return BlockHead(
        *(read, empty, append, block, kv.rewind, logits, correction, config.markov_rank, config.count, needs)
    )


def blocks(
    config: BlockConfig,
    params: Params,
    shared: Shared,
    forward: Forward,
    last: Int[Array, "B A"],
    place: Int[Array, " A"],
) -> Float[Array, "B A L+C M"]:
    """Features of many blocks of each row, for training; see `BlockDrafter.blocks`. `forward` is of whole rows."""

    def run(net: BlockDrafter) -> Float[Array, "B A L+C M"]:
        assert forward.taps is not None
        return net.blocks(shared, net.fused(forward.taps), last, place)

    return nn.apply(run, BlockDrafter(config))({"params": params})


def init(config: BlockConfig, key: Key[Array, ""]) -> Params:
    """Random parameters."""
    taps = jnp.zeros((1, 1, config.hidden_size * len(config.taps)))
    return stack.init_params(BlockDrafter(config), key, taps, jnp.zeros((1,), jnp.int32))
