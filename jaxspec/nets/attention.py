"""Multi-head attention over a key-value cache, and the feed-forward block: what every network here
is made of.

Shapes: B batch, T step, S keys, H query heads, K key-value heads, D head dimension, M model
dimension.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import chunks
from jaxspec.core import kv_cache as kv
from jaxspec.nets import kernels
from jaxspec.nets.dense import Dense, parameter, precision
from jaxspec.nets.rotary import Rotation, pairs_apart, rotate

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
# finite: a fully masked row (a padded prompt position) averages garbage instead of becoming NaN
MASKED = -1e30
KEYS = 512  # of a block: scores of 512 queries and 32 heads are 34 MB
# from either on (scores of a head) keys are read by blocks
MANY_KEYS = 4096
MANY_SCORES = 512 * 2048


Mask = Bool[Array, "#B 1 #T S"]
Bias = Float[Array, "#B #H T S"] | None
Sinks = Float[Array, " H"] | None
QueryMask = Callable[[Any, int], tuple[Mask, Bias]]
"""(number of the first query in its pass, how many) -> the mask and the bias of so many queries
from that one on.
"""


def for_queries(
    step: int, make: QueryMask, parent: Array | None = None
) -> tuple[Mask | QueryMask, Bias]:
    """Returns the mask and the bias that `Attention` takes for a pass over `step` tokens: arrays,
    or how to make them.

    In a wide pass, as in training on long texts, masks, biases and scores are made for
    `chunks.LONGEST` queries at a time, so that no array of [step, step] is alive. A tree's mask
    (`parent` is not None) is made whole.

    >>> def make(first, count):
    ...     return jnp.ones((1, 1, count, 600), bool), None
    >>> for_queries(8, make)[0].shape, for_queries(600, make)[0] is make
    ((1, 1, 8, 600), True)
    """
    if step <= chunks.LONGEST or parent is not None:
        return make(0, step)
    return (make, None)


def attend(
    query: Float[Array, "B H T D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    mask: Mask,
    bias: Bias,
    scale: float,
    cap: float | None,
    sinks: Sinks = None,
) -> Float[Array, "B H T D"]:
    """Mixes values by the softmax of scores; `nets.kernels` puts a kernel of yours in its place.

    A sink is one more score of a head, of no key: its weight goes to nothing (Xiao et al., arXiv
    2309.17453; gpt-oss).

    Over few keys the scores are made whole. Over many they are made for KEYS keys at a time, and
    only from the first that any query may read to the last: the cost grows with the filled entries
    of a cache, or with a window. (On a TPU `jax.experimental.pallas.ops.tpu.splash_attention` would
    go here, for passes over a chunk without biases.)
    """
    arrays = (query, keys, values, mask, bias, sinks)
    step = query.shape[2]
    size = keys.shape[2]
    at_once = functools.partial(_whole, scale, cap)
    by_keys = functools.partial(_by_keys, scale, cap)
    # The scores of all keys at once, [B, H, T, S] in float32, would be larger than all weights of a
    # layer.
    if size > KEYS and step * size >= MANY_SCORES:
        return by_keys(*arrays)
    # A GPU asks its host whether a loop goes on, which takes longer than a step of few tokens reads
    # more keys.
    usual: dict[str, kernels.ArrayFunction] = {"default": at_once}
    if size >= MANY_KEYS:
        usual = {"cuda": at_once, "rocm": at_once, "default": by_keys}
    forms = usual | kernels.forms("attention", at_once, *arrays, scale=scale, cap=cap)
    if forms == {"default": at_once}:
        return at_once(*arrays)
    return jax.lax.platform_dependent(*arrays, **forms)


def _whole(
    scale: float,
    cap: float | None,
    query,
    keys,
    values,
    mask: Mask,
    bias: Bias,
    sinks: Sinks = None,
) -> Float[Array, "B H T D"]:
    B, H, T, D = query.shape
    K, S = keys.shape[1:3]
    # [B, K, G T, D]: a group's heads stand one after the other on the axis of steps; one product
    # serves them all.
    grouped = query.reshape(B, K, (H // K) * T, D)
    exact = precision(query.dtype)
    scores = jnp.einsum(
        "bktd,bksd->bkts", grouped, keys, precision=exact, preferred_element_type=jnp.float32
    )
    # Query heads stay in order: head h reads key-value head h // (H / K).
    scores = scores.reshape(B, H, T, S) * scale  # as mask and bias
    if cap is not None:
        scores = softcap(scores, cap)
    if bias is not None:
        scores = scores + bias
    # Softmax in float32; only the weights are rounded to the stream's dtype.
    scores = jnp.where(mask, scores, MASKED)
    if sinks is not None:  # [B, H, T, S + 1]
        of_none = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None, None], (B, H, T, 1))
        scores = jnp.concatenate([scores, of_none], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :S].astype(query.dtype)
    mixed = jnp.einsum(
        "bkts,bksd->bktd", weights.reshape(B, K, (H // K) * T, S), values, precision=exact
    )
    return mixed.reshape(B, H, T, D)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_keys(
    scale: float,
    cap: float | None,
    query,
    keys,
    values,
    mask: Mask,
    bias: Bias,
    sinks: Sinks = None,
) -> Float[Array, "B H T D"]:
    """Computes `_whole` block of keys by block, with the largest score and the sum of weights so
    far carried along.

    Its gradient is `_whole`'s. Reference: Milakov, Gimelshein, arXiv 1805.02867.
    """
    B, H, T, D = query.shape
    K, size = keys.shape[1:3]
    group = H // K
    exact = precision(query.dtype)
    grouped = query.reshape(B, K, group * T, D)
    # Blocks that no query sees are skipped at both ends: a long cache costs what is filled of it.
    visible = jnp.any(mask, axis=(0, 1, 2))  # [S]
    first = jnp.argmax(visible)
    last = size - 1 - jnp.argmax(visible[::-1])

    def block(x: Array, start: Int[Array, ""], axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, start, KEYS, axis)

    def add(index: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, mixed = carry  # [B, K, G T, 1] twice, [B, K, G T, D]
        # the last block begins earlier, and skips what it has had
        start = jnp.minimum(index * KEYS, size - KEYS)
        block_keys = block(keys, start, 2)
        block_values = block(values, start, 2)
        scores = jnp.einsum(
            "bktd,bksd->bkts",
            grouped,
            block_keys,
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        scores = scores * scale
        if cap is not None:
            scores = softcap(scores, cap)
        if bias is not None:
            heads = jnp.broadcast_to(block(bias, start, 3), (bias.shape[0], H, T, KEYS))
            scores = scores + heads.reshape(bias.shape[0], K, group * T, KEYS)
        new = (start + jnp.arange(KEYS, dtype=start.dtype) >= index * KEYS)[None, None, None, :]
        # A mask of the scores' own shape but for K: one that XLA must reshape after it is broadcast
        # costs as much as all the rest on a TPU.
        read = jnp.broadcast_to(block(mask, start, 3) & new, (mask.shape[0], 1, T, KEYS))
        scores = jnp.where(jnp.tile(read, (1, 1, group, 1)), scores, MASKED)
        # Online softmax: what was summed under a lower maximum is scaled down once a higher one is
        # found.
        higher = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        kept = jnp.exp(top - higher)
        weights = jnp.exp(scores - higher)
        added = jnp.einsum(
            "bkts,bksd->bktd",
            weights.astype(query.dtype),
            block_values,
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        return higher, total * kept + jnp.sum(weights, axis=-1, keepdims=True), mixed * kept + added

    zeros = jnp.zeros((B, K, group * T, 1), jnp.float32)
    top = zeros + MASKED
    total = zeros
    if sinks is not None:  # as if a key of that score and of a value of zeros had been read first
        by_group = jnp.repeat(sinks.astype(jnp.float32).reshape(K, group), T, axis=1)  # [K, G T]
        top = zeros + by_group[None, :, :, None]
        total = zeros + 1.0
    carry = top, total, jnp.zeros((B, K, group * T, D), jnp.float32)
    _, total, mixed = jax.lax.fori_loop(first // KEYS, last // KEYS + 1, add, carry)
    return (mixed / total).astype(query.dtype).reshape(B, H, T, D)


def _by_keys_forward(scale: float, cap: float | None, *arrays: Any) -> tuple[Array, Any]:
    return _by_keys(scale, cap, *arrays), arrays


def _by_keys_backward(scale: float, cap: float | None, arrays: Any, gradient: Array) -> Any:
    # A loop of unknown length has no reverse mode: gradients come from the product at once.
    return jax.vjp(functools.partial(_whole, scale, cap), *arrays)[1](gradient)


_by_keys.defvjp(_by_keys_forward, _by_keys_backward)


def causal(
    length: Int[Array, " B"], step: int, capacity: int, parent: Int[Array, "B N"] | None = None
):
    """Returns the mask of a pass over `step` tokens at each row's `length`, or how to make it; see
    `for_queries`.
    """

    def make(first: int | Int[Array, ""], count: int) -> tuple[Mask, Bias]:
        return kv.mask(length + first, count, capacity, parent)[:, None], None

    return for_queries(step, make, parent)[0]


def _by_queries(
    query: Float[Array, "B H T D"],
    keys,
    values,
    make: QueryMask,
    scale: float,
    cap: float | None,
    sinks: Sinks,
) -> Float[Array, "B H T D"]:
    """Computes `attend` for chunks of queries, one after the other, and again for their
    gradients.
    """
    B, H, T, D = query.shape
    size, count = chunks.split(T)

    @jax.checkpoint
    def one(
        keys, values, first: Int[Array, ""], queries: Float[Array, "B H C D"]
    ) -> Float[Array, "B H C D"]:
        return attend(queries, keys, values, *make(first, size), scale, cap, sinks)

    def step(_: None, fed: tuple[Array, Array]) -> tuple[None, Array]:
        return None, one(keys, values, *fed)

    # Queries past the end attend to garbage, which is cut off below.
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, size * count - T), (0, 0)))
    parts = padded.reshape(B, H, count, size, D).transpose(2, 0, 1, 3, 4)
    _, mixed = jax.lax.scan(step, None, (size * jnp.arange(count, dtype=jnp.int32), parts))
    return mixed.transpose(1, 2, 0, 3, 4).reshape(B, H, size * count, D)[:, :, :T]


def _with_source(mask: Mask, real: Bool[Array, "B 1 1 P"]) -> Mask:
    """Puts the positions that an encoder read behind the keys of a mask."""
    batch = max(mask.shape[0], real.shape[0])
    step = mask.shape[2]
    parts = (jnp.broadcast_to(x, (batch, 1, step, x.shape[3])) for x in (mask, real))
    return jnp.concatenate([*parts], axis=-1)


def _made_with_source(
    make: QueryMask, real: Bool[Array, "B 1 1 P"], first: int | Int[Array, ""], count: int
) -> tuple[Mask, Bias]:
    mask, bias = make(first, count)
    return _with_source(mask, real), bias


class EncoderKeys(NamedTuple):
    """A layer's keys and values of an encoder's output, and which of its P positions are real."""

    keys: Float[Array, "B K P D"]
    values: Float[Array, "B K P D"]
    mask: Bool[Array, "B 1 1 P"]


class LayerInputs(NamedTuple):
    """A layer's inputs beside the stream: attention's, by positions, and the layer's part of the
    side inputs.
    """

    mask: Mask | QueryMask
    rotary: Rotation | None
    bias: Bias
    side: Float[Array, "B T P"] | None = None
    source: EncoderKeys | None = None


class Attention(nn.Module):
    """The projections and the softmax between them; masks, biases and the cache are the caller's.

    Attributes:
        shape: the parts of the layer.
        dim: the model dimension.
        norm: makes the normalisation of queries and keys, by the number of heads that have a scale
            each; 0: one scale for all.
        epsilon: added to the mean square where a value head is normalised.
    """

    shape: Any  # `nets.shapes` imports this file
    dim: int
    norm: Callable[[int], nn.Module]
    epsilon: float = 1e-6
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        s = self.shape
        has_keys = self.shape.shares is None

        def dense(features: int, use_bias: bool, scale: float = 1.0):
            init = nn.initializers.variance_scaling(
                scale**2, "fan_in", "normal", in_axis=-1, out_axis=-2
            )
            return Dense(features, use_bias, self.dtype, init)

        # T5 does not scale its scores; its queries are initialised smaller in place of that.
        query_scale = 1.0 if s.scale != 1.0 else s.head_dim**-0.5
        self.query = dense((1 + s.gate) * s.heads * s.head_dim, s.qkv_bias, query_scale)
        if has_keys:
            self.key = dense(s.kv_heads * s.head_dim, s.qkv_bias and s.key_bias)
        if has_keys and not s.keys_are_values:
            self.value = dense(s.kv_heads * s.head_dim, s.qkv_bias)
        self.out = dense(self.dim, s.out_bias)
        by_head = s.norms_of == "each"
        if s.head_norms:
            self.query_norm = self.norm(s.heads if by_head else 0)
        if has_keys and s.head_norms:
            self.key_norm = self.norm(s.kv_heads if by_head else 0)
        if has_keys and s.value_norm:
            self.value_heads_norm = Norm(self.epsilon, dtype=self.dtype, scaled=False)
        if s.sinks:
            self.sinks = parameter(self, "sinks", nn.initializers.zeros, (s.heads,))

    def keys_values(
        self, x: Float[Array, "B T M"], rotary: Rotation | None = None
    ) -> tuple[Float[Array, "B K T D"], ...]:
        """Makes keys and values of `x`, in the cache's layout; keys are rotated by `rotary`. () if
        it has none.
        """
        s = self.shape
        if s.shares is not None:
            return ()
        projected = self.key(x)
        # Gemma 4's global layers have no value projection. Values are taken before keys are
        # normalised and rotated.
        values = self._split(projected if s.keys_are_values else self.value(x), s.kv_heads)
        if s.value_norm:
            values = self.value_heads_norm(values)
        return self._turned(
            projected, s.kv_heads, self.key_norm if s.head_norms else None, rotary
        ), values

    def _turned(
        self, x: Float[Array, "B T _"], heads: int, norm: nn.Module | None, rotary: Rotation | None
    ) -> Float[Array, "B heads T D"]:
        """Splits projected queries or keys into heads, which are normalised and rotated."""
        norms_of = self.shape.norms_of
        turn = self.shape.rotary
        x = self._split(x if norm is None or norms_of != "whole" else norm(x), heads)
        if norm is not None and norms_of in ("head", "each"):
            x = norm(x)
        if rotary is not None:
            turned = 2 * rotary.cos.shape[-1]
            x = rotate(pairs_apart(x, turned) if turn is not None and turn.adjacent else x, rotary)
        if norm is not None and norms_of == "rotated":
            return norm(x)
        return x

    def mix(
        self, x: Float[Array, "B T M"], read: Callable[..., Any], inputs: LayerInputs
    ) -> tuple[Float[Array, "B T M"], Any]:
        """Computes the layer's output and its cache's new entries; see `shapes.Mixer`."""
        (keys, values), mask, source = (
            read(*self.keys_values(x, inputs.rotary)),
            inputs.mask,
            inputs.source,
        )
        record = keys, values
        if self.shape.reads_source and source is not None:
            # One softmax over both: [own keys ; the encoder's].
            keys = jnp.concatenate([keys, source.keys], 2)
            values = jnp.concatenate([values, source.values], 2)
            if callable(mask):
                mask = functools.partial(_made_with_source, mask, source.mask)
            if not callable(mask):
                mask = _with_source(mask, source.mask)
        return self(x, keys, values, mask, inputs.bias, inputs.rotary), record

    def __call__(
        self,
        x: Float[Array, "B T M"],
        keys: Float[Array, "B K S D"],
        values: Float[Array, "B K S D"],
        mask: Bool[Array, "#B 1 #T S"] | QueryMask,
        bias: Float[Array, "#B #H T S"] | None = None,
        rotary: Rotation | None = None,
    ) -> Float[Array, "B T M"]:
        """Attends from `x` to the keys and values that `mask` allows; `bias` is added to the
        scores.

        A long text's mask and bias are a function, which is given as `mask`: see `for_queries`.

        Garbage in masked keys, NaN included, has no effect; garbage in masked values must be
        finite.
        """
        s = self.shape
        projected = self.query(x)
        gate = None
        if s.gate:  # each head has its query, then its gate
            parts = projected.reshape(*x.shape[:2], s.heads, 2, s.head_dim)
            projected, gate = (parts[:, :, :, i].reshape(*x.shape[:2], -1) for i in (0, 1))
        query = self._turned(projected, s.heads, self.query_norm if s.head_norms else None, rotary)
        if rotary is not None and rotary.query_scale is not None:
            query = query * rotary.query_scale.astype(query.dtype)[:, None, :, None]
        sinks = self.sinks if s.sinks else None
        if callable(mask):
            mixed = _by_queries(query, keys, values, mask, s.scale, s.cap, sinks)
        else:
            mixed = attend(query, keys, values, mask, bias, s.scale, s.cap, sinks)
        joined = mixed.transpose(0, 2, 1, 3).reshape(*x.shape[:2], s.heads * s.head_dim)
        return self.out(joined if gate is None else joined * jax.nn.sigmoid(gate))

    def of_source(self, x: Float[Array, "B T M"], source: EncoderKeys) -> Float[Array, "B T M"]:
        """Attends from `x` to an encoder's output: cross-attention."""
        return self(
            x,
            source.keys,
            source.values,
            for_queries(x.shape[1], lambda *_: (source.mask, None))[0],
        )

    def _split(self, x: Float[Array, "B T _"], heads: int) -> Float[Array, "B heads T D"]:
        return x.reshape(x.shape[0], x.shape[1], heads, self.shape.head_dim).transpose(0, 2, 1, 3)


def softcap(x: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """Squeezes values into (-cap, cap), nearly unchanged where small (Gemma 2, arXiv 2408.00118).

    >>> [f"{x:.2f}" for x in softcap(jnp.array([1.0, 10.0, 100.0]), 30.0)]
    ['1.00', '9.65', '29.92']
    """
    return cap * jnp.tanh(x / cap)


class FeedForward(nn.Module):
    """Two or, when gated, three projections: `out(act(wi(x)))` or `out(act(gate(x)) * wi(x))`.

    Attributes:
        shape: a `shapes.FeedForwardShape`.
        dim: the model dimension.
    """

    shape: Any  # `nets.shapes` imports this file
    dim: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        def dense(features: int, name: str):
            init = nn.initializers.variance_scaling(
                1.0, "fan_in", "normal", in_axis=-1, out_axis=-2
            )
            return Dense(features, s.bias, self.dtype, init, name=name)

        s = self.shape
        if s.activation == "xielu":
            act = XIELU(name="activation")
        else:
            act = ACTIVATIONS[s.activation]
        hidden = act(dense(s.dim, "gate" if s.gated else "wi")(x))
        if s.gated:
            hidden = hidden * dense(s.dim, "wi")(x)
        return dense(self.dim, "out")(hidden)


class XIELU(nn.Module):
    """An activation with parameters: a parabola above 0, and below an exponential beside a line
    (arXiv 2411.13010).
    """

    @nn.compact
    def __call__(self, x: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
        def number(name: str, start: float, shape: tuple[int, ...] = ()) -> Array:
            value = parameter(self, name, nn.initializers.constant(start), shape).astype(
                jnp.float32
            )
            return value.reshape((1,) * x.ndim)

        # Stored before a softplus, which keeps them positive: at first both are 0.8, of which beta
        # is a part below 0.
        above = jax.nn.softplus(number("alpha_p", math.log(math.expm1(0.8)), (1,)))
        below = jax.nn.softplus(number("alpha_n", math.log(math.expm1(0.3)), (1,)))
        beta = number("beta", 0.5)
        epsilon = number("eps", -1e-6)
        wide = x.astype(jnp.float32)
        # Where x > 0 the branch below is computed, too: of -epsilon at most, so that it stays
        # finite.
        curved = jnp.where(
            wide > 0,
            above * wide * wide,
            (jnp.expm1(jnp.minimum(wide, epsilon)) - wide) * (beta + below),
        )
        return (curved + beta * wide).astype(x.dtype)


class Norm(nn.Module):
    """Normalisation in float32 to a mean square of 1 (RMS norm); to mean 0 and variance 1 where it
    is centred.

    Attributes:
        epsilon: added to the mean square.
        unit_offset: whether the scale minus 1 is stored (Gemma, Nemotron).
        centred: whether the mean is subtracted first (LayerNorm).
        scaled, has_bias: whether the norm has a scale, and a bias.
        heads: number of heads [B, heads, T, M] with a scale each; 0 for one scale of all.
    """

    epsilon: float = 1e-6
    unit_offset: bool = False
    dtype: jnp.dtype = jnp.float32
    centred: bool = False
    scaled: bool = True
    has_bias: bool = False
    heads: int = 0

    @nn.compact
    def __call__(self, x: Float[Array, "*batch M"]) -> Float[Array, "*batch M"]:
        wide = x.astype(jnp.float32)
        if self.centred:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(
            jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon
        )
        if self.scaled:
            if self.unit_offset:
                start = nn.initializers.zeros
            else:
                start = nn.initializers.ones
            shape = x.shape[-1:]
            scale = parameter(self, "scale", start, (self.heads, *shape) if self.heads else shape)
            axes = (0, 2) if self.heads else range(x.ndim - 1)
            wide = wide * jnp.expand_dims(1.0 + scale if self.unit_offset else scale, axes)
        if self.has_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, (x.shape[-1],))
            wide = wide + jnp.expand_dims(bias, range(x.ndim - 1))
        return wide.astype(self.dtype)
