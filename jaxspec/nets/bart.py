"""BART (Lewis et al., arXiv 1910.13461), mBART, Marian, M2M-100 and NLLB: one network with absolute
positions.

It is the first Transformer (Vaswani et al., arXiv 1706.03762) with a choice of norms and positions.
mBART, M2M-100 and NLLB normalise the input of each block, BART and Marian the sum after it.

Shapes: B batch, P prompt (encoder), T step (decoder), S cache capacity, M model dimension, V
vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import LanguageModel, Params, Prompt
from jaxspec.core.checks import check_ids, one_of
from jaxspec.nets import dense, encoder_decoder
from jaxspec.nets.attention import MASKED, LayerInputs, Norm, for_queries
from jaxspec.nets.decoder import DecoderLayer
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.encoder_decoder import EncoderDecoder
from jaxspec.nets.shapes import NormShape

POSITIONS = ("learned", "sinusoids", "inclusive sinusoids")


@dataclasses.dataclass(frozen=True)
class BartConfig:
    """The shape of a BART, an mBART, a Marian or an M2M-100.

    Attributes:
        vocab_size: rows of the decoder's embedding (and columns of the head).
        dim, ff_dim, heads: model and feed-forward sizes, and heads of dim / heads dimensions.
        encoder_layers, decoder_layers: depth of either side.
        source_vocab: rows of the encoder's own embedding; None: it shares the decoder's.
        activation: a name in `attention.ACTIVATIONS`.
        positions: "learned", "sinusoids" (Marian) or "inclusive sinusoids" (M2M-100), whose last
            frequency is 1/10000.
        offset: number of the row's first position (2 in BART and M2M-100).
        max_positions: longest prompt, and longest output.
        norms_after: whether blocks are normalised after they are added to the stream; False:
            before.
        embedding_norm: whether the first layer's input is normalised.
        final_norm: whether either side ends in a norm.
        scale_embedding: whether embedded tokens are multiplied by the root of `dim`.
        tied_head: whether the head is the decoder's embedding.
        logits_bias: whether a bias is added to the logits.
        start_token: the id that the decoder's row begins with.
        begin_tokens: ids that follow it in every row, such as a language.
        banned_tokens: ids that are never generated: their logits are -1e30.
        end_tokens: ids that end a row; empty for the tokenizer's end-of-sequence token.
        dtype: the dtype of the computation, "float32" or "bfloat16". Logits are float32 always.
        epsilon: added to the variance in every norm.
    """

    vocab_size: int
    dim: int
    ff_dim: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    source_vocab: int | None = None
    activation: str = "gelu_erf"
    positions: str = "learned"
    offset: int = 2
    max_positions: int = 1024
    norms_after: bool = True
    embedding_norm: bool = True
    final_norm: bool = False
    scale_embedding: bool = False
    tied_head: bool = True
    logits_bias: bool = True
    start_token: int = 2
    begin_tokens: tuple[int, ...] = ()
    banned_tokens: tuple[int, ...] = ()
    end_tokens: tuple[int, ...] = ()
    dtype: str = "float32"
    epsilon: float = 1e-5

    def __post_init__(self):
        one_of(self.positions, "positions", POSITIONS)
        if self.dim % self.heads:
            raise ValueError(f"dim is {self.dim}, which is no multiple of heads={self.heads}")
        if self.positions != "learned" and (self.dim % 2 or self.dim < 4):
            raise ValueError(
                f"dim is {self.dim}: expected an even number from 4 on, for sines and cosines"
            )
        check_ids((self.start_token, *self.begin_tokens), "the start of a row", self.vocab_size)
        check_ids(self.banned_tokens, "banned_tokens", self.vocab_size)

    @property
    def head_dim(self) -> int:
        """Size of a head: 64 where 512 dimensions have 8 heads."""
        return self.dim // self.heads


class LogitsBias(nn.Module):
    """The bias of a head that is otherwise the embedding."""

    @nn.compact
    def __call__(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
        bias = dense.parameter(self, "bias", nn.initializers.zeros, logits.shape[-1:])
        return logits + bias[None, None, :]


def sinusoids(position: Int[Array, "B T"], dim: int, inclusive: bool) -> Float[Array, "B T M"]:
    """Computes sines, then cosines, of positions times frequencies that fall from 1 to 1/10000.

    Args:
        position: the positions.
        dim: the width, an even number.
        inclusive: whether the last frequency is 1/10000, as in tensor2tensor; otherwise the one
            after it would be.

    >>> [f"{x:.3f}" for x in sinusoids(jnp.array([[1]]), dim=4, inclusive=False)[0, 0]]
    ['0.841', '0.010', '0.540', '1.000']
    """
    half = dim // 2
    step = math.log(10_000) / (half - 1 if inclusive else half)
    frequency = jnp.asarray(np.exp(-step * np.arange(half)), jnp.float32)
    angle = position.astype(jnp.float32)[:, :, None] * frequency[None, None, :]
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


class Bart(EncoderDecoder):
    """The network. `__call__` is teacher forcing; `encode`, `embed` and `run` are the steps of
    decoding.
    """

    config: BartConfig

    def setup(self):
        c = self.config
        self.embedding = self._table(c.vocab_size)
        if c.source_vocab is not None:
            self.encoder_embedding = self._table(c.source_vocab)
        # Flax names parameters by these attributes, and checkpoints are written by those names.
        for side in ("encoder", "decoder"):
            if c.positions == "learned":
                setattr(self, f"{side}_position", self._table(c.max_positions + c.offset))
            if c.embedding_norm:
                setattr(self, f"{side}_embedding_norm", self._norm())
            if c.final_norm:
                setattr(self, f"{side}_norm", self._norm())
        self.encoder = self._layers(c.encoder_layers, has_cross=False)
        self.decoder = self._layers(c.decoder_layers, has_cross=True)
        if not c.tied_head:
            self.head = Dense(c.vocab_size, c.logits_bias, jnp.dtype(c.dtype))
        elif c.logits_bias:
            self.head = LogitsBias()

    @nn.nowrap
    def _layers(self, depth: int, has_cross: bool) -> list[DecoderLayer]:
        c = self.config
        norm = NormShape("layer", self.config.epsilon)
        norms = dict(pre_norms=not c.norms_after, norms_after=c.norms_after)
        return encoder_decoder.side(
            c, depth, *encoder_decoder.with_biases(c), norm, has_cross=has_cross, **norms
        )

    @nn.nowrap
    def _norm(self) -> Norm:
        return Norm(
            self.config.epsilon, dtype=jnp.dtype(self.config.dtype), centred=True, has_bias=True
        )

    @nn.nowrap
    def _table(self, rows: int) -> Embedding:
        c = self.config
        # Embeddings that are multiplied by the root of dim begin that much smaller.
        scale = nn.initializers.normal(c.dim**-0.5 if c.scale_embedding else 0.02)
        return Embedding(rows, c.dim, scale, jnp.dtype(c.dtype))

    def _embedded(
        self, tokens: Int[Array, "B T"], position: Int[Array, "#B T"], table: Embedding, side: str
    ) -> Float[Array, "B T M"]:
        """Computes the input of a side's first layer."""
        c = self.config
        x = table(tokens)
        if c.scale_embedding:
            x = x * jnp.asarray(c.dim**0.5, x.dtype)
        position = position + c.offset
        if c.positions == "learned":
            # Padding may lie past the table; what it reads is never looked at.
            x = x + getattr(self, f"{side}_position")(
                jnp.minimum(position, c.max_positions + c.offset - 1)
            )
        else:
            x = x + sinusoids(position, c.dim, c.positions == "inclusive sinusoids").astype(x.dtype)
        if c.embedding_norm:
            return getattr(self, f"{side}_embedding_norm")(x)
        return x

    def encode(self, prompt: Prompt, mask: Bool[Array, "B 1 1 P"]) -> Float[Array, "B P M"]:
        """Computes the encoder's output; `mask` comes from `real`."""
        position = jnp.arange(prompt.tokens.shape[1], dtype=jnp.int32)[None]
        if self.config.source_vocab is None:
            table = self.embedding
        else:
            table = self.encoder_embedding
        x = self._embedded(prompt.tokens, position, table, "encoder")
        inputs = LayerInputs(for_queries(x.shape[1], lambda *_: (mask, None))[0], None, None)
        x = self.run_encoder(x, [inputs] * self.config.encoder_layers)
        if self.config.final_norm:
            return self.encoder_norm(x)
        return x

    def embed_at(
        self, tokens: Int[Array, "B T"], position: Int[Array, "#B T"]
    ) -> Float[Array, "B T M"]:
        """Embeds tokens with their positions."""
        return self._embedded(tokens, position, self.embedding, "decoder")

    def features(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Applies the decoder's final norm, if it has one."""
        if self.config.final_norm:
            return self.decoder_norm(x)
        return x

    def logits(
        self, features: Float[Array, "B T M"], training: bool = False, *, raw: bool = False
    ) -> Float[Array, "B T V"]:
        """Applies the head; `raw` leaves out the bans."""
        c = self.config
        if c.tied_head:
            logits = self.embedding.logits(features, training)
        else:
            logits = self.head(features)
        logits = logits.astype(jnp.float32)
        if c.tied_head and c.logits_bias:
            logits = self.head(logits)
        # Finite, so that a probability of 0 times its logarithm is 0.
        if raw or not c.banned_tokens:
            return logits
        return logits.at[..., jnp.array(c.banned_tokens)].set(MASKED)


def language_model(config: BartConfig, taps: Sequence[int] = ()) -> LanguageModel:
    """Makes a BART's pure functions of (params, ...), for `jaxspec.decode`.

    Args:
        config: its shape.
        taps: decoder layers whose output `Forward.taps` is to hold; see `stack.check_taps`.

    >>> import jax, jaxspec
    >>> config = BartConfig(32, dim=16, ff_dim=32, heads=2, encoder_layers=1, decoder_layers=1)
    >>> prompt = jaxspec.Prompt(jnp.ones((2, 5), jnp.int32), jnp.array([5, 3]))
    >>> lm = language_model(config)
    >>> forward, cache = lm.prefill(init(config, jax.random.key(0)), prompt, jaxspec.core.Room(8))
    >>> forward.logits.shape, cache.decoder.length.tolist()
    ((2, 1, 32), [1, 1])
    """
    return encoder_decoder.language_model(Bart, config, taps)


def init(config: BartConfig, key: Key[Array, ""]) -> Params:
    """Draws random parameters: fan-in scaled matrices, and embeddings of size 1 once they are
    scaled.
    """
    return encoder_decoder.init_params(Bart, config, key)


NETWORK = encoder_decoder.network("bart", BartConfig, Bart, language_model, init)
