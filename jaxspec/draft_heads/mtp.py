"""Multi-token prediction: a further layer that was trained with the model, to draft what follows
the next token.

DeepSeek-V3 (arXiv 2412.19437) and Qwen3-Next publish such modules beside their models' layers. A
module joins the target's features of a position with the token after it, runs a layer like the
model's, and uses the model's embedding and head. To draft several tokens it reads its last output.

Its tensors lie in the model's folder, or in a folder of `speculators`:

    Qwen3-Next, Qwen3.5    mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm, mtp.layers.0.*
    speculators            mtp_layers.0.{input_proj, token_layernorm, hidden_layernorm, final_layernorm, *}
    MiMo                   model.mtp_layers.0.*, with the same names
    DeepSeek-V3, GLM-4     model.layers.N.{eh_proj, enorm, hnorm, shared_head.*, embed_tokens, *} of N layers

A module's layer is read if `nets.decoder` has it, with gated attention (Qwen 3.5) or without. A
mixture of experts and latent attention are not read. Of several modules the first is read. Beside a
recurrent target (Qwen 3.5) a module drafts chains: the target takes no trees.

Shapes: B batch, T step, M model dimension, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec import nets
from jaxspec.core import BoundDrafter, Forward, Model, Params
from jaxspec.draft_heads import formats, recurrent
from jaxspec.draft_heads.formats import Format, Shapes, TargetShape
from jaxspec.draft_heads.kind import Kind, sizes_of
from jaxspec.draft_heads.recurrent import RecurrentHead, RecurrentNetwork
from jaxspec.draft_heads.target import SharedWithTarget, bind, requirements_of
from jaxspec.draft_heads.training import Training, logits_of_head
from jaxspec.drafters.hidden_states import DraftHead
from jaxspec.nets import decoder, stack
from jaxspec.nets.attention import LayerInputs
from jaxspec.nets.decoder import DecoderConfig, layer_of
from jaxspec.nets.dense import Dense
from jaxspec.nets.shapes import AttentionShape
from jaxspec.weights.hf_families import qwen3_5


@dataclasses.dataclass(frozen=True)
class MTPConfig:
    """The shape of a module, and where the families differ.

    Attributes:
        layer: the shape of its one layer, with the model's vocabulary and width.
        hidden_first: whether the hidden state comes before the token where the two are joined
            (MiMo).
        feeds_normed: whether the module is fed its normalised output (Qwen, MiMo), or what comes
            before the norm (DeepSeek).
        zero_first: whether the embedding of the first pair is zeros (DeepSeek, MiMo).
        own_embedding, own_head: whether it has copies of these (DeepSeek), or takes the target's.
    """

    layer: DecoderConfig
    hidden_first: bool = False
    feeds_normed: bool = True
    zero_first: bool = False
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab: ClassVar[None] = None  # always the target's

    def __post_init__(self):
        if self.layer.positions != "rotary" or self.layer.windows or len(self.layer.layers) != 1:
            raise ValueError("expected one layer, with rotary positions and no window")


# --- the network


class MTP(RecurrentNetwork):
    """The network."""

    config: MTPConfig

    def setup(self):
        super().setup()
        c = self.config.layer
        norm = self.config.layer.norm_module
        self.embedding_norm = norm()
        self.hidden_norm = norm()
        self.norm = norm()
        self.fc = Dense(c.dim, dtype=jnp.dtype(c.dtype))
        self.layer = layer_of(c, 0)

    def joined(
        self,
        shared: SharedWithTarget,
        hidden: Float[Array, "B T M"],
        tokens: Int[Array, "B T"],
        position: Int[Array, "#B T"],
        inputs: list[LayerInputs],
    ) -> tuple[Float[Array, "B T M"], list[stack.Layer]]:
        embedded = self.embed(shared, tokens)
        if self.config.zero_first:
            # DeepSeek's and MiMo's code zeroes it there, so the module was trained that way.
            embedded = jnp.where((position == 0)[..., None], 0.0, embedded)
        pair = self.embedding_norm(embedded), self.hidden_norm(hidden)
        x = self.fc(jnp.concatenate(pair[::-1] if self.config.hidden_first else pair, axis=-1))
        return x, [functools.partial(self.layer, inputs=inputs[0])]

    def fed_on(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        if self.config.feeds_normed:
            return self.norm(x)
        return x

    def logits(
        self, shared: SharedWithTarget, hidden: Float[Array, "B T M"]
    ) -> Float[Array, "B T V"]:
        return self.draft_logits(shared, hidden if self.config.feeds_normed else self.norm(hidden))


@functools.lru_cache
def head(config: MTPConfig) -> RecurrentHead:
    """Makes a module's pure functions, for `drafters.mtp`."""
    return recurrent.functions(MTP(config), requirements_of(config, config.layer.dim))


def init(config: MTPConfig, key: Key[Array, ""]) -> Params:
    """Draws random parameters."""
    features = jnp.zeros((1, 2, config.layer.dim), jnp.float32)
    return stack.init_params(
        MTP(config), key, Forward(features, features), jnp.zeros((1, 2), jnp.int32)
    )


# --- the drafter


def mtp(
    head: DraftHead[RecurrentHead], target: Model, trimmed: Model | None = None
) -> BoundDrafter:
    """Drafts with the module that a model's checkpoint brings along for predicting the token after
    the next.

    Such a module is one more of the model's layers, and reads the model's features. Its loop is the
    same as in `drafters.eagle`. After the first draft token it reads its last output, so later
    tokens are accepted less often, unless it was trained that way.

    Args:
        head: a network and its parameters: `draft_heads.mtp.head(config)` in a `DraftHead`;
            `jaxspec.load_drafter` reads both from a model's folder.
        target: the model.
        trimmed: a model whose head is used in place of the target's:
            `jaxspec.trim_vocabulary(target, size=...)`.

    Raises:
        ValueError: the module is of another model, or the target lacks the functions that it needs.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.decoder_config(
        ...     32, dim=16, ff_dim=32, layers=2, heads=4, kv_heads=2, head_dim=4
        ... )
        >>> target = jaxspec.Model(
        ...     decoder.language_model(shape), decoder.init(shape, jax.random.key(0))
        ... )
        >>> config = MTPConfig(nets.replace(shape, layers=1))
        >>> module = jaxspec.DraftHead(head(config), init(config, jax.random.key(1)))
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(
        ...     target, prompt, drafter=mtp(module, target), gamma=2, max_new_tokens=9
        ... )
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: DeepSeek-AI, DeepSeek-V3, arXiv 2412.19437, section 2.2; Gloeckle et al., arXiv
    2404.19737.
    """
    return bind(recurrent.drafter, head, target, trimmed, "an MTP module", "mtp")


# --- its files

# Prefixes of names, by the place of the module.
QWEN = "qwen."
SPECULATORS = "speculators."
MIMO = "mimo."
NEXTN = "nextn."
PARTS = {
    "fc": "fc",
    "pre_fc_norm_embedding": "embedding_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "norm": "norm",
    "input_proj": "fc",
    "token_layernorm": "embedding_norm",
    "hidden_layernorm": "hidden_norm",
    "final_layernorm": "norm",
    "eh_proj": "fc",
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}
WRITTEN = {
    PARTS[x]: f"mtp_layers.0.{x}"
    for x in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
}
PATTERNS = (
    (r"mtp\.layers\.0\.(.+)", QWEN),
    (r"mtp\.(.+)", QWEN),
    (r"mtp_layers\.0\.(.+)", SPECULATORS),
    (r"model\.mtp_layers\.0\.(.+)", MIMO),
    (r"model\.layers\.(\d+\..+)", NEXTN),
)


def canonical(name: str) -> str | None:
    """Says where a tensor lies, in one spelling; None for the rest of a model.

    >>> canonical("mtp.pre_fc_norm_hidden.weight"), canonical("mtp.layers.0.mlp.up_proj.weight")
    ('qwen.hidden_norm.weight', 'qwen.layers.0.mlp.up_proj.weight')
    >>> canonical("model.layers.61.eh_proj.weight"), canonical("model.embed_tokens.weight")
    ('nextn.61.fc.weight', None)
    """
    for pattern, root in PATTERNS:
        match = re.fullmatch(pattern, name)
        if match:
            number = ""
            suffix = match[1]
            if root == NEXTN:
                number, dot, suffix = suffix.partition(".")
                number += dot
            stem, _, last = suffix.rpartition(".")
            if stem in PARTS and not name.startswith("mtp.layers."):
                return f"{root}{number}{PARTS[stem]}.{last}"
            if stem.startswith("layers."):  # a second module's
                return None
            return f"{root}{number}layers.0.{suffix}"
    return None


def place_of(shapes: Shapes) -> str | None:
    """Returns the prefix of a module's names; with DeepSeek the first module's."""
    for root in (QWEN, SPECULATORS, MIMO):
        if f"{root}fc.weight" in shapes:
            return root
    numbers = [
        int(name.split(".")[1]) for name in shapes if re.fullmatch(r"nextn\.\d+\.fc\.weight", name)
    ]
    if numbers:
        return f"{NEXTN}{min(numbers)}."
    return None


def read(table: dict, shapes: Shapes, target: TargetShape) -> MTPConfig:
    """Reads the module beside a model, whose layer is as the model's are."""
    root = place_of(shapes)
    assert root is not None
    formats.check_same(
        ("width of hidden states", shapes[f"{root}fc.weight"][0], target.hidden_size)
    )
    if root == SPECULATORS:
        inner = table.get("transformer_layer_config") or {}
        is_gated = inner.get("model_type") in qwen3_5.TYPES
        # A module is one layer of full attention; keys on layers were copied from its model.
        alone = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        if is_gated:
            layer = qwen3_5.read(inner | alone)
        else:
            layer = formats.layer_of(table, shapes, f"{root}layers.0.")
        formats.check_same(("vocabulary size", layer.vocab_size, target.vocab_size))
    # Other folders hold no config.json of the module's: its layer is one more of the model's.
    elif nets.find(target.config) == decoder.NETWORK and target.config.positions == "rotary":
        layer = target.config
    else:
        without = "its layer has the target's shape, which has no rotary positions"
        raise formats.FamilyError(f"{without}: expected a target like Llama or Qwen")
    nextn = root.startswith(NEXTN)
    # A module attends to the whole row, though most layers of its model may have windows, or be
    # recurrent.
    with_attention = [x for x in layer.layers if isinstance(x.attention, AttentionShape)]
    if not with_attention:
        raise formats.FamilyError(
            "its layer has the target's shape, and no layer of the target has attention"
        )
    shape = next((x for x in with_attention if x.attention.window is None), with_attention[0])
    shape = dataclasses.replace(shape, attention=dataclasses.replace(shape.attention, window=None))
    return MTPConfig(
        dataclasses.replace(layer, layers=(shape,), tied_head=False),
        hidden_first=root == MIMO,
        feeds_normed=not nextn,
        zero_first=nextn or root == MIMO,
        **formats.own_parts(shapes, root),
    )


def modules(config: MTPConfig) -> dict[str, str]:
    """Names the modules of a network, but for the place (`place_of`)."""
    parts = {name: name for name in ("fc", "embedding_norm", "hidden_norm", "norm")}
    return formats.PARTS | parts | formats.layer_modules(config.layer, "layer", "layers.0")


def write(config: MTPConfig, verifier: dict, tokens: int) -> dict:
    """Writes the config.json, as `speculators` has it."""
    form = (
        "the format of speculators, in which a module like Qwen's uses its target's embedding and "
        "head,"
    )
    of_qwen = {"hidden_first": False, "feeds_normed": True, "zero_first": False}
    formats.check_stored(form, config, **of_qwen, own_embedding=False, own_head=False)
    formats.check_head_norms(config.layer, "modules")
    table = {"num_nextn_predict_layers": 1}
    layer = formats.written_layer(config.layer)
    return formats.speculators("mtp", "MTPDraftModel", layer, table, verifier, tokens)


# Of what is trained here: `write` stores modules like Qwen's.
UNTRAINED = ("hidden_first", "feeds_normed", "zero_first", "own_embedding", "own_head")
KIND = Kind(
    name="mtp",
    config=MTPConfig,
    sizes=sizes_of(MTPConfig, without=UNTRAINED, head_norms=True),
    init=init,
    head=head,
    drafter=mtp,
    format=Format(
        title="MTP",
        canonical=canonical,
        matches=lambda table, shapes: place_of(shapes) is not None,
        read=read,
        modules=modules,
        write=write,
        written=lambda config: (
            WRITTEN | formats.layer_modules(config.layer, "layer", "mtp_layers.0")
        ),
        root=lambda shapes: place_of(shapes) or "",
    ),
    training=Training(recurrent.unrolled(MTP), logits_of_head(head)),
)
