"""EAGLE: one transformer layer (or a few) that continues the target's hidden states, token by
token.

EAGLE-1 (Li et al., arXiv 2401.15077; EAGLE-2 drafts trees with the same network) reads the target's
features and predicts the next one; the target's head makes logits of it. EAGLE-3 (Li et al., arXiv
2503.01840) fuses the outputs of several of the target's layers, has a separate head, and often a
smaller vocabulary. Its files come from the authors, from SpecForge and SGLang, or from
`speculators` (vLLM). One layer is called midlayer, layers.0 or model.layers.0; all other names are
the same.

Shapes: B batch, T step, D the width of the features that are paired with tokens, M the layers'
width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.core import BoundDrafter, Forward, Model, Params
from jaxspec.core.checks import in_range
from jaxspec.draft_heads import formats, recurrent
from jaxspec.draft_heads.formats import Format, Shapes, TargetShape
from jaxspec.draft_heads.kind import Kind, WindowedSizes, sizes_of
from jaxspec.draft_heads.recurrent import RecurrentHead, RecurrentNetwork
from jaxspec.draft_heads.target import SharedWithTarget, bind, requirements_of
from jaxspec.draft_heads.training import Training, logits_of_head
from jaxspec.drafters.hidden_states import DraftHead
from jaxspec.nets import stack
from jaxspec.nets.attention import LayerInputs
from jaxspec.nets.decoder import DecoderConfig, DecoderLayer, layer_of
from jaxspec.nets.dense import Dense
from jaxspec.nets.shapes import LayerShape
from jaxspec.weights.hf_families.common import flag


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The shape of an EAGLE head.

    Attributes:
        layer: the shape of its layers; its vocabulary is the target's.
        hidden_size: width of the target's hidden states; EAGLE-1's layers have the same.
        taps: EAGLE-3: the layers that it reads, counted as `language_model(config, taps)` does.
            Empty: EAGLE-1.
        draft_vocab: size of its vocabulary; None: the target's.
        own_embedding, own_head: whether it has these, or takes the target's.
        fc_bias: whether the projection of the features has a bias.
        norm_before_residual: whether the layer adds to the normalised hidden state.
        norm_before_fc: whether the features are normalised, all layers as one vector.
        norm_each_tap: whether the features are normalised, each layer by itself (EAGLE 3.1's
            `fc_norm`).
        norm_output: whether the next pair is given the normalised hidden state (EAGLE 3.1).
        mask_token: the id that is fed in place of every draft token, which are so drafted in one
            pass (P-EAGLE). None: one after the other.
    """

    layer: DecoderConfig
    hidden_size: int
    taps: tuple[int, ...] = ()
    draft_vocab: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_each_tap: bool = False
    norm_output: bool = False
    mask_token: int | None = None

    def __post_init__(self):
        c = self.layer
        if c.positions != "rotary" or any(x != LayerShape(x.attention, x.ff) for x in c.layers):
            raise ValueError(
                "expected an EAGLE head with Llama's kind of layers: rotary positions, pre-norms "
                "alone"
            )
        if not self.taps and (c.dim != self.hidden_size or self.draft_vocab is not None):
            eagle_1 = (
                f"without taps this is EAGLE-1, with the target's width ({self.hidden_size}) and "
                "vocabulary"
            )
            raise ValueError(f"{eagle_1}: got width {c.dim} and draft_vocab {self.draft_vocab}")
        formats.check_own_parts(self, c.dim, self.hidden_size)
        if self.norm_before_fc and self.norm_each_tap:
            raise ValueError("got norm_before_fc and norm_each_tap: expected one of them at most")
        if not self.taps and (self.norm_before_fc or self.norm_each_tap):
            raise ValueError(
                "got a norm of taps without taps: expected neither norm_before_fc nor norm_each_tap"
            )
        if self.mask_token is not None:
            in_range(0, c.vocab_size, below=True, mask_token=self.mask_token)
            if not self.taps:
                raise ValueError(
                    f"mask_token is {self.mask_token} without taps: expected None for EAGLE-1"
                )


# --- the network


class FirstLayer(DecoderLayer):
    """The first layer: EAGLE-1's attention reads its input as it is, EAGLE-3's the token and the
    hidden state.
    """

    joins: bool = False  # whether it joins these, as EAGLE-3's
    norm_before_residual: bool = False  # the option of `EagleConfig`

    def setup(self):
        super().setup()  # the norm before attention is not called, and so has no parameters
        if self.joins:
            self.embedding_norm = self.norm()
            self.hidden_norm = self.norm()

    def __call__(self, x, read: stack.Read, embedded: Float[Array, "B T M"], inputs: LayerInputs):
        y = x
        if self.joins:
            hidden = self.hidden_norm(x)
            # [B, T, 2 M]: the projections of EAGLE-3's first layer are twice as wide as those of
            # the others.
            y = jnp.concatenate([self.embedding_norm(embedded), hidden], axis=-1)
            if self.norm_before_residual:
                x = hidden
        added, record = self.attention.mix(y, read, inputs)
        x = x + added
        return x + self.ff(self.ff_norm(x)), record


class Eagle(RecurrentNetwork):
    """The network. EAGLE-1 reads the target's features, EAGLE-3 a projection of its taps."""

    config: EagleConfig

    def setup(self):
        super().setup()
        c = self.config.layer
        norm = self.config.layer.norm_module
        config = self.config
        self.fc = Dense(c.dim, config.fc_bias, jnp.dtype(c.dtype))
        options = {"joins": bool(config.taps), "norm_before_residual": config.norm_before_residual}
        first = layer_of(c, 0, FirstLayer, **options)
        self.layers = [first, *(layer_of(c, i) for i in range(1, len(c.layers)))]
        if config.taps:
            self.norm = norm()
            if config.norm_before_fc:
                self.taps_norm = norm()
            if config.norm_each_tap:
                self.tap_norms = [norm() for _ in config.taps]
        if config.mask_token is not None:
            shape = (1, 1, config.hidden_size * len(config.taps))
            self.mask_hidden = self.param("mask_hidden", nn.initializers.normal(1.0), shape)

    @property
    def mask_token(self) -> int | None:
        return self.config.mask_token

    def read(self, forward: Forward) -> Float[Array, "B T D"]:
        config = self.config
        taps = forward.taps
        if not config.taps:
            return forward.features
        assert taps is not None
        if config.norm_before_fc:
            taps = self.taps_norm(taps)
        if config.norm_each_tap:
            # Taps lie side by side on the last axis, [B, T, taps D], in the order in which they
            # were asked for.
            parts = jnp.split(taps, len(config.taps), axis=-1)
            taps = jnp.concatenate(
                [norm(tap) for norm, tap in zip(self.tap_norms, parts, strict=True)], axis=-1
            )
        return self.fc(taps)

    def joined(
        self,
        shared: SharedWithTarget,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        position: Int[Array, "#B T"],
        inputs: list[LayerInputs],
    ) -> tuple[Float[Array, "B T M"], list[stack.Layer]]:
        dtype = jnp.dtype(self.config.layer.dtype)
        embedded = self.embed(shared, tokens).astype(dtype)
        hidden = hidden.astype(dtype)
        if not self.config.taps:
            # EAGLE-1 joins pairs before its layers; EAGLE-3's first layer does so itself.
            hidden = self.fc(jnp.concatenate([embedded, hidden], axis=-1))
        first, *later = self.layers
        first = functools.partial(first, embedded=embedded)
        return hidden, [
            functools.partial(layer, inputs=x)
            for layer, x in zip((first, *later), inputs, strict=True)
        ]

    def slot(self) -> Float[Array, " D"]:
        return self.read(Forward(self.mask_hidden, self.mask_hidden, self.mask_hidden))[0, 0]

    def fed_on(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        if self.config.norm_output and self.config.taps:
            return self.norm(x)
        return x

    def logits(
        self, shared: SharedWithTarget, hidden: Float[Array, "B T M"]
    ) -> Float[Array, "B T V"]:
        # EAGLE-1's output is a prediction of features after the target's norm, so its head takes it
        # as it is.
        is_raw = self.config.taps and not self.config.norm_output
        return self.widened(self.draft_logits(shared, self.norm(hidden) if is_raw else hidden))


@functools.lru_cache
def head(config: EagleConfig) -> RecurrentHead:
    """Makes an EAGLE head's pure functions, for `drafters.eagle`."""
    requirements = requirements_of(config, config.hidden_size, config.taps)
    return recurrent.functions(Eagle(config), requirements, config.mask_token)


def init(config: EagleConfig, key: Key[Array, ""]) -> Params:
    """Draws random parameters; a smaller vocabulary is the target's first ids."""
    read = jnp.zeros((1, 2, config.hidden_size * max(len(config.taps), 1)), jnp.float32)
    return stack.init_params(
        Eagle(config), key, Forward(read, read, read), jnp.zeros((1, 2), jnp.int32)
    )


# --- the drafter


def eagle(
    head: DraftHead[RecurrentHead], target: Model, trimmed: Model | None = None
) -> BoundDrafter:
    """Drafts with one layer that continues the target's hidden states (EAGLE-1 and 3), sampling
    from its distributions.

    A draft token costs a pass of that layer and of a language-model head, a fraction of a pass of
    the target. The layer reads the target's own hidden states, so it predicts better than a model
    of its size.

    After each verification the layer reads the accepted tokens again, with the target's hidden
    states instead of predicted ones. gamma draft tokens cost gamma passes, one of them over gamma +
    1 tokens.

    Args:
        head: a network and its parameters: `draft_heads.eagle.head(config)` in a `DraftHead`;
            `jaxspec.load_drafter` reads published ones.
        target: the model whose text it drafts; with taps, if the head reads them
            (`jaxspec.with_taps`).
        trimmed: a model whose head is used in place of the target's:
            `jaxspec.trim_vocabulary(target, size=...)`.

    Raises:
        ValueError: the head is for another target, or the target lacks the taps or the functions
            that it needs.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec import nets
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.decoder_config(
        ...     32, dim=16, ff_dim=32, layers=4, heads=4, kv_heads=2, head_dim=4
        ... )
        >>> target = jaxspec.Model(
        ...     decoder.language_model(shape, taps=(0, 2)), decoder.init(shape, jax.random.key(0))
        ... )
        >>> config = EagleConfig(nets.replace(shape, layers=1), 16, taps=(0, 2), own_head=True)
        >>> drafter = eagle(
        ...     jaxspec.DraftHead(head(config), init(config, jax.random.key(1))), target
        ... )
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Li et al., EAGLE, ICML 2024, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840.
    """
    return bind(recurrent.drafter, head, target, trimmed, "an EAGLE head", "eagle")


# --- its files

MASK = "mask_hidden"  # which P-EAGLE has
FUSED = "layers.0.hidden_norm.weight"  # which EAGLE-3 has, and EAGLE-1 has not


def canonical(name: str) -> str | None:
    """Spells a name in one way.

    >>> canonical("midlayer.hidden_norm.weight")
    'layers.0.hidden_norm.weight'
    """
    without_model = formats.plain(name)
    return without_model and without_model.replace("midlayer.", "layers.0.", 1)


def matches(table: dict, shapes: Shapes) -> bool:
    """Tells whether these are EAGLE's tensors: a projection, and a layer that reads pairs."""
    # EAGLE-1's layer has no norm before attention, which tells it from a plain layer.
    bare = (
        "layers.0.self_attn.q_proj.weight" in shapes
        and "layers.0.input_layernorm.weight" not in shapes
    )
    return "fc.weight" in shapes and (FUSED in shapes or bare)


def read(table: dict, shapes: Shapes, target: TargetShape) -> EagleConfig:
    """Reads the network of a config.json."""
    layer = formats.layer_of(table, shapes, windows=True)
    formats.only(table, is_causal=True)
    formats.check_same(("vocabulary size", layer.vocab_size, target.vocab_size))
    parts = formats.own_parts(shapes) | {"fc_bias": "fc.bias" in shapes}
    if FUSED not in shapes:
        formats.check_same(
            ("width of hidden states", formats.axis_of(shapes, "fc.weight", 0), target.hidden_size)
        )
        return EagleConfig(layer, target.hidden_size, (), None, **parts)
    hidden = table.get("target_hidden_size") or layer.dim
    taps = _taps(table, target)
    formats.check_same(
        ("width of hidden states", hidden, target.hidden_size),
        ("width of all taps", formats.axis_of(shapes, "fc.weight", 1), len(taps) * hidden),
    )
    return EagleConfig(
        layer,
        hidden,
        taps,
        formats.draft_vocab(shapes, layer.vocab_size),
        norm_before_residual=bool(table.get("norm_before_residual", False)),
        norm_before_fc="input_norm.weight" in shapes,
        norm_each_tap="fc_norm.0.weight" in shapes,
        norm_output=bool(table.get("norm_output", False)),
        mask_token=_mask_token(table) if MASK in shapes else None,
        **parts,
    )


def _mask_token(table: dict) -> int:
    # The names of speculators, of vLLM, and of PARD, whose slots these are.
    options = {**table, **(table.get("eagle_config") or {})}
    ids = [
        options[key]
        for key in ("mask_token_id", "ptd_token_id", "pard_token")
        if options.get(key) is not None
    ]
    return int(ids[0] if ids else formats.need(table, "mask_token_id"))


def _taps(table: dict, target: TargetShape) -> tuple[int, ...]:
    # SGLang's key and DeepSpec's, the first two, number a layer's output; that of vLLM and
    # speculators its input.
    outputs = (table.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    ) or table.get("target_layer_ids")
    if outputs:
        return formats.taps_of(outputs, 0, target)
    # What the authors' code reads where config.json is silent: a low, a middle and a high layer.
    default = [2, target.layers // 2, target.layers - 3]
    return formats.taps_of(table.get("eagle_aux_hidden_state_layer_ids") or default, -1, target)


MODULES = formats.PARTS | {
    "fc": "fc",
    "norm": "norm",
    "taps_norm": "input_norm",
    "tap_norms_{}": "fc_norm.{}",
    "mask_hidden": MASK,
    "layers_{}/embedding_norm": "layers.{}.input_layernorm",
    "layers_{}/hidden_norm": "layers.{}.hidden_norm",
}


def write(config: EagleConfig, verifier: dict, tokens: int) -> dict:
    """Writes the config.json of EAGLE-3 and P-EAGLE, as `speculators` has it; of EAGLE-1, as its
    authors have it.
    """
    if not config.taps:
        return {
            **formats.written_layer(config.layer),
            "architectures": ["LlamaForCausalLM"],
            "bias": config.fc_bias,
        }
    formats.check_stored("the format of speculators", config, fc_bias=False)
    table = {
        "draft_vocab_size": config.draft_vocab or config.layer.vocab_size,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "embed_requires_grad": False,
        "fc_norm": config.norm_each_tap,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "target_hidden_size": None
        if config.hidden_size == config.layer.dim
        else config.hidden_size,
    }
    algorithm = "eagle3"
    architecture = "Eagle3Speculator"
    if config.mask_token is not None:
        algorithm = "peagle"
        architecture = "PEagleSpeculator"
        table |= {"mask_token_id": config.mask_token, "embed_requires_grad": config.own_embedding}
    layer = formats.written_layer(config.layer, types=("llama", "qwen3"))
    return formats.speculators(algorithm, architecture, layer, table, verifier, tokens)


KIND = Kind(
    name="eagle",
    config=EagleConfig,
    sizes=sizes_of(EagleConfig, layers=WindowedSizes),
    init=init,
    head=head,
    drafter=eagle,
    format=Format(
        title="EAGLE",
        canonical=canonical,
        matches=matches,
        read=read,
        modules=lambda config: MODULES | formats.layer_modules(config.layer),
        write=write,
        keys=formats.KEYS | dict.fromkeys(("norm_before_residual", "norm_output"), flag()),
    ),
    training=Training(
        hidden_states=recurrent.unrolled(Eagle),
        logits=logits_of_head(head),
        predicts_features=lambda config: not config.taps,
    ),
)
