"""Whisper (Radford et al., arXiv 2212.04356) and distil-whisper: an encoder of sound, and a decoder
of text.

Two convolutions halve the frames of log-mel features; layers with pre-norms follow on both sides.
Positions are vectors of tables, the decoder's head is its embedding. All frames are attended to,
silence included. Keys have no biases.

Shapes: B batch, C mel bands, F frames, P positions of the encoder (F / 2), T step, M model
dimension, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import LanguageModel, Params, Prompt
from jaxspec.core.checks import check_ids
from jaxspec.nets import encoder_decoder
from jaxspec.nets.attention import ACTIVATIONS, LayerInputs, Norm, for_queries
from jaxspec.nets.dense import parameter, precision
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.encoder_decoder import EncoderDecoder
from jaxspec.nets.shapes import NormShape


@dataclasses.dataclass(frozen=True)
class Speech:
    """The tokens with which a Whisper model is told what to write; see `jaxspec.audio.windows`.

    Attributes:
        languages, language_tokens: codes such as "en", and the token of each; empty for an
            English-only model.
        tasks, task_tokens: "transcribe" and "translate", and the token of each; empty for an
            English-only model.
        no_timestamps: the token before a text without timestamps; ids above it are timestamps, 0.02
            s apart. None: the model has no timestamps.
        suppressed: ids that are never generated.
        suppressed_first: ids that are not generated as the first token of a text.
        latest_start: number of the latest timestamp that a text may begin with; None for any.
        language, task: the ones to use where a call names none; None: the detected one,
            "transcribe".
    """

    languages: tuple[str, ...] = ()
    language_tokens: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    task_tokens: tuple[int, ...] = ()
    no_timestamps: int | None = None
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    latest_start: int | None = None
    language: str | None = None
    task: str | None = None


@dataclasses.dataclass(frozen=True)
class WhisperConfig:
    """The shape of a Whisper.

    Attributes:
        vocab_size: rows of the decoder's embedding, which is its head, too.
        dim, ff_dim, heads: model and feed-forward sizes, and attention heads, of both sides.
        encoder_layers, decoder_layers: depth of either side.
        mels: mel bands of the features.
        source_positions: positions of the encoder's output; it reads twice as many frames.
        max_positions: longest row of the decoder, its beginning included.
        start_token: the id that the decoder's row begins with.
        activation: a name in `attention.ACTIVATIONS`.
        dtype: the dtype of the computation, "float32" or "bfloat16". Logits are float32 always.
        end_tokens: ids that end a row; empty for the tokenizer's end-of-sequence token.
        begin_tokens: ids after the start token, for prompts that do not say how rows begin.
        speech: the tokens of languages, tasks and timestamps.
    """

    vocab_size: int
    dim: int
    ff_dim: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    mels: int = 80
    source_positions: int = 1500
    max_positions: int = 448
    start_token: int = 50258
    activation: str = "gelu_erf"
    dtype: str = "float32"
    end_tokens: tuple[int, ...] = ()
    begin_tokens: tuple[int, ...] = ()
    speech: Speech = Speech()

    # No fields: there are no others.
    tied_head = True
    source_vocab = 0  # the encoder reads no ids

    def __post_init__(self):
        if self.dim % self.heads:
            raise ValueError(f"dim is {self.dim}: expected a multiple of the {self.heads} heads")
        check_ids([self.start_token], "the start of a row", self.vocab_size)

    @property
    def head_dim(self) -> int:
        """Width of a head: 64 in every published model."""
        return self.dim // self.heads


def _size(
    dim: int, heads: int, layers: int, decoder: int | None = None, vocab: int = 51865, **more
) -> WhisperConfig:
    return WhisperConfig(vocab, dim, 4 * dim, heads, layers, decoder or layers, **more)


SIZES = {
    **{
        f"whisper-{name}": _size(*sizes)
        for name, sizes in {"tiny": (384, 6, 4), "base": (512, 8, 6)}.items()
    },
    **{
        f"whisper-{name}": _size(*sizes)
        for name, sizes in {"small": (768, 12, 12), "medium": (1024, 16, 24)}.items()
    },
    "whisper-large-v2": _size(1280, 20, 32),
    "whisper-large-v3": _size(1280, 20, 32, vocab=51866, mels=128),
    "whisper-large-v3-turbo": _size(1280, 20, 32, 4, vocab=51866, mels=128),
    "distil-large-v2": _size(1280, 20, 32, 2),
    "distil-large-v3": _size(1280, 20, 32, 2, vocab=51866, mels=128),
}


class FrameConvolution(nn.Module):
    """A convolution over time of width 3, padded by 1; its kernel [out, in, 3] lies as PyTorch's
    does.
    """

    features: int
    stride: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B C F"]) -> Float[Array, "B M F"]:
        scaled = nn.initializers.variance_scaling(
            1.0, "fan_in", "normal", in_axis=(-2, -1), out_axis=-3
        )
        kernel = parameter(self, "kernel", scaled, (self.features, x.shape[1], 3))
        bias = parameter(self, "bias", nn.initializers.zeros, (self.features,))
        kernel = kernel.astype(self.dtype)
        x = x.astype(self.dtype)
        y = jax.lax.conv_general_dilated(
            x, kernel, (self.stride,), [(1, 1)], precision=precision(x.dtype)
        )
        return y + bias.astype(self.dtype)[None, :, None]


class Whisper(EncoderDecoder):
    """The network. `__call__` is teacher forcing; `encode`, `embed` and `run` are the steps of
    decoding.
    """

    config: WhisperConfig

    def setup(self):
        c = self.config
        dtype = jnp.dtype(self.config.dtype)
        self.encoder_conv1, self.encoder_conv2 = (
            FrameConvolution(c.dim, stride, dtype) for stride in (1, 2)
        )
        self.encoder_positions = Embedding(c.source_positions, c.dim, dtype=dtype)
        self.embedding = Embedding(c.vocab_size, c.dim, dtype=dtype)
        self.position = Embedding(c.max_positions, c.dim, dtype=dtype)
        blocks = *encoder_decoder.with_biases(c, key_bias=False), NormShape("layer", 1e-5)
        self.encoder = encoder_decoder.side(c, c.encoder_layers, *blocks, has_cross=False)
        self.decoder = encoder_decoder.side(c, c.decoder_layers, *blocks, has_cross=True)
        self.encoder_norm, self.decoder_norm = (
            Norm(1e-5, dtype=dtype, centred=True, has_bias=True) for _ in range(2)
        )

    @staticmethod
    def example(config: WhisperConfig, rows: int = 1) -> Float[Array, "rows C F"]:
        """Returns features for some rows."""
        return jnp.zeros((rows, config.mels, 2 * config.source_positions), jnp.float32)

    def real(self, source: Float[Array, "B C F"]) -> Bool[Array, "B 1 1 P"]:
        """Marks every position: a window's silence is attended to."""
        c = self.config
        if isinstance(source, Prompt):
            raise ValueError(
                "Whisper's encoder was given token ids: expected features of sound. Call "
                "jaxspec.transcribe, or give jaxspec.Prompt(tokens, length, features), where "
                "features are [batch, mel bands, frames]"
            )
        if source.shape[1:] != (c.mels, 2 * c.source_positions):
            expected = f"[batch, {c.mels}, {2 * c.source_positions}]"
            raise ValueError(
                f"the features' shape is {list(source.shape)}: expected {expected} (jaxspec.audio)"
            )
        return jnp.ones((source.shape[0], 1, 1, c.source_positions), bool)

    def encode(
        self, source: Float[Array, "B C F"], mask: Bool[Array, "B 1 1 P"]
    ) -> Float[Array, "B P M"]:
        """Computes the encoder's output; `mask` comes from `real`."""
        # whatever the layers' activation is
        c = self.config
        act = ACTIVATIONS["gelu_erf"]
        # [B, M, P] -> [B, P, M]
        x = act(self.encoder_conv2(act(self.encoder_conv1(source)))).swapaxes(1, 2)
        x = x + self.encoder_positions(jnp.arange(c.source_positions))[None]
        seen = for_queries(c.source_positions, lambda *_: (mask, None))[0]
        return self.encoder_norm(
            self.run_encoder(x, [LayerInputs(seen, None, None)] * c.encoder_layers)
        )

    def embed_at(
        self, tokens: Int[Array, "B T"], position: Int[Array, "#B T"]
    ) -> Float[Array, "B T M"]:
        """Adds the vectors of tokens and of positions; a finished row may be fed past the last
        one.
        """
        return self.embedding(tokens) + self.position(
            jnp.clip(position, 0, self.config.max_positions - 1)
        )

    def logits(
        self, features: Float[Array, "B T M"], training: bool = False, *, raw: bool = False
    ) -> Float[Array, "B T V"]:
        """Applies the head; `raw` changes nothing, since logits have neither scale nor cap."""
        return self.embedding.logits(features, training).astype(jnp.float32)


def speech_of(config: Any) -> Speech | None:
    """Returns the tokens of speech of a network's configuration; None of one that reads text."""
    if isinstance(config, WhisperConfig):
        return config.speech
    return None


def language_model(config: WhisperConfig, taps: Sequence[int] = ()) -> LanguageModel:
    """Makes a Whisper's pure functions of (params, ...), for `jaxspec.decode`.

    Args:
        config: its shape.
        taps: decoder layers whose output `Forward.taps` is to hold; see `stack.check_taps`.

    >>> import jax, jaxspec
    >>> config = WhisperConfig(
    ...     32, 16, 32, 2, 1, 1, mels=4, source_positions=6, max_positions=8, start_token=3
    ... )
    >>> lm, params = language_model(config), init(config, jax.random.key(0))
    >>> prompt = Prompt(jnp.array([[3, 5], [3, 0]]), jnp.array([2, 1]), jnp.zeros((2, 4, 12)))
    >>> forward, cache = lm.prefill(params, prompt, jaxspec.core.Room(8))
    >>> forward.logits.shape, cache.decoder.length.tolist()
    ((2, 1, 32), [2, 1])
    """
    return encoder_decoder.language_model(Whisper, config, taps)


def init(config: WhisperConfig, key: Key[Array, ""]) -> Params:
    """Draws random parameters: fan-in scaled matrices, small vectors of tokens and positions."""
    return encoder_decoder.init_params(Whisper, config, key)


NETWORK = encoder_decoder.network(
    "whisper",
    WhisperConfig,
    Whisper,
    language_model,
    init,
    # Cross-attention reads a window of one width, however long the prompt is.
    cache=lambda config, batch, room, _: encoder_decoder.cache(
        config, batch, room, config.source_positions
    ),
    source=Whisper.example,
)
