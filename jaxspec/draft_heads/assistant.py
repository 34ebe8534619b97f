"""Gemma 4's assistants: a few layers without keys, which attend to the target's cache.

Google publishes one beside each size of Gemma 4 (`google/gemma-4-E2B-it-assistant`). It joins the
embedding of a token with the target's hidden state of the position before, or with its last output
in place of that. Its layers project queries only. They attend to the keys and values of the
target's last local and last global layer that have any. So an assistant works without a cache: it
never reads the prompt, and never takes anything back. All draft tokens of a round attend to the
same entries, from the same position.

Large vocabularies are ordered by centroids. Only the tokens of the nearest centroids get a logit;
the others get -inf. The distribution of the drafts is then known, and the text exact. (transformers
fills in the least logit minus 1, and drafts the argmax.)

Shapes: B batch, T tokens, S slots of a cache, F fed draft tokens, K key-value heads, D head
dimension, H the target's width, M the layers' width, C centroids that are looked at, N their
tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec import core, nets
from jaxspec.core import token_rows
from jaxspec.core.checks import at_least
from jaxspec.draft_heads import formats
from jaxspec.draft_heads.formats import Format, Shapes, TargetShape
from jaxspec.draft_heads.kind import Kind
from jaxspec.draft_heads.target import HeadParts, SharedWithTarget, bind, zeros
from jaxspec.draft_heads.training import VOCABULARY
from jaxspec.drafters.hidden_states import DraftHead, TargetRequirements, last_features, on_path
from jaxspec.drafters.stepwise import NodeLogits, Parent, chain
from jaxspec.nets import decoder, stack
from jaxspec.nets.attention import LayerInputs, softcap
from jaxspec.nets.decoder import DecoderConfig, layer_of
from jaxspec.nets.dense import Dense, precision
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.shapes import AttentionShape
from jaxspec.rules.common import take_position
from jaxspec.weights.hf_families import decoders, gemma4
from jaxspec.weights.hf_families.common import FamilyError, count, flag, need, only


@dataclasses.dataclass(frozen=True)
class AssistantConfig:
    """The shape of an assistant.

    Attributes:
        layer: the shape of its layers, as if they had keys: head sizes and key-value heads equal
            the target's.
        hidden_size: the width of the target's hidden states.
        sources: for each layer, the number of the target's layer whose keys and values it attends
            to.
        centroids: the number of centroids by which its vocabulary is ordered, each with as many
            tokens; 0: an ordinary head.
        nearest: the number of centroids whose tokens get a logit.
        positions_back: the position of its queries, counted back from the row's length. 1 is the
            last committed token's, as in transformers. 2 is the position of the last token the
            target has read, as in vLLM.
    """

    layer: DecoderConfig
    hidden_size: int
    sources: tuple[int, ...]
    centroids: int = 0
    nearest: int = 32
    positions_back: int = 1

    def __post_init__(self):
        at_least(1, nearest=self.nearest, positions_back=self.positions_back)
        if min(self.sources, default=0) < 0:
            raise ValueError(
                f"sources is {self.sources}: expected layers of the target, counted from 0"
            )
        if len(self.sources) != len(self.layer.layers):
            raise ValueError(
                f"sources has {len(self.sources)} layers of the target: expected "
                f"{len(self.layer.layers)}"
            )
        if self.centroids and (
            self.layer.vocab_size % self.centroids or self.nearest > self.centroids
        ):
            ordered = (
                f"{self.centroids} centroids order {self.layer.vocab_size} tokens, and "
                f"{self.nearest} are nearest"
            )
            raise ValueError(
                f"{ordered}: expected as many tokens for each, and no more nearest ones than there "
                "are"
            )
        if not self.layer.tied_head:
            raise ValueError(
                "tied_head is False: expected an assistant whose head is its embedding"
            )


class TargetKeys(NamedTuple):
    """The keys and values of a layer of the target, as `Inside.keys_values` gives them."""

    keys: Float[Array, "B K S D"]
    values: Float[Array, "B K S D"]
    position: Int[Array, "B S"]  # position of each slot; -1: it is not to be read


class AssistantHead(NamedTuple):
    """An assistant as pure functions."""

    # (parameters, shared, tokens [B, T], hidden states [B, T, H], the keys of each layer's source,
    # the rows' lengths with the last committed token) -> the logits of what follows the tokens [B,
    # T, V], and the hidden states that stand for the target's there
    read: Callable[..., tuple[Float[Array, "B T V"], Float[Array, "B T H"]]]
    sources: tuple[int, ...]  # the target's layers whose keys it reads, one for each of its own
    # key-value heads of each of these layers, and their size
    key_sizes: tuple[tuple[int, int], ...]
    requirements: TargetRequirements  # its requirements of the target


# --- the network


class Assistant(nn.Module):
    """The network."""

    config: AssistantConfig

    def setup(self):
        config, c, dtype = self.config, self.config.layer, jnp.dtype(self.config.layer.dtype)
        self.embedding = Embedding(c.vocab_size, c.dim, dtype=dtype)
        self.joined = Dense(c.dim, dtype=dtype)
        self.fed_on = Dense(config.hidden_size, dtype=dtype)
        self.layers = [layer_of(c, i, without_keys=True) for i in range(len(c.layers))]
        self.norm = c.norm_module()
        if config.centroids:
            self.centers = Dense(config.centroids, dtype=dtype)
            # The ids of each centroid's tokens, one centroid after the other.
            self.vocabulary = self.param(
                VOCABULARY, lambda _: jnp.arange(c.vocab_size, dtype=jnp.int32)
            )

    def __call__(self, *arrays: Any) -> tuple[Float[Array, "B T V"], Float[Array, "B T H"]]:
        """Reads with an embedding of zeros for the target's: for initialisation."""
        return self.read(zeros(self.config.hidden_size, self.config.layer.vocab_size), *arrays)

    def read(
        self,
        shared: SharedWithTarget,
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T H"],
        memory: tuple[TargetKeys, ...],
        length: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T V"], Float[Array, "B T H"]]:
        """Computes `AssistantHead.read`."""
        config, c, dtype = self.config, self.config.layer, jnp.dtype(self.config.layer.dtype)
        # Gemma rounds the root to the stream's dtype, as with its own embeddings.
        embedded = shared.embed(tokens).astype(dtype) * jnp.asarray(config.hidden_size**0.5, dtype)
        x = self.joined(jnp.concatenate([embedded, hidden.astype(dtype)], axis=-1))
        position = (length - config.positions_back)[:, None]  # [B, 1], of all tokens of a round
        for layer, shape, source in zip(self.layers, c.layers, memory, strict=True):
            turn = shape.attention.rotation
            window = shape.attention.window
            is_read = source.position >= 0
            if window is not None:  # that of the last committed token
                is_read = is_read & (source.position >= length[:, None] - window)
            inputs = LayerInputs(
                is_read[:, None, None], turn and turn[0].at(position, turn[1]), None
            )
            x, _ = layer(x, functools.partial(_cached, source, dtype), inputs)
        x = self.norm(x)
        return self._logits(x), self.fed_on(x)

    def _logits(self, x: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        c = self.config.layer
        config = self.config
        if not config.centroids:
            logits = self.embedding.logits(x).astype(jnp.float32)
            if c.logits_cap is None:
                return logits
            return softcap(logits, c.logits_cap)
        _, nearest = jax.lax.top_k(self.centers(x), config.nearest)  # [B, T, C]
        # [B, T, N]
        ids = self.vocabulary.reshape(config.centroids, -1)[nearest].reshape(*x.shape[:2], -1)
        if ids.size < c.vocab_size:
            # The rows of N tokens are gathered, 4,096 of 262,144 in E2B's, and the matrix is not
            # read as a whole.
            rows = self.embedding(ids)  # [B, T, N, M]
            logits = jnp.einsum("btm,btnm->btn", x, rows, precision=precision(x.dtype)).astype(
                jnp.float32
            )
        else:  # so many that the whole matrix is less to read
            logits = jnp.take_along_axis(self.embedding.logits(x).astype(jnp.float32), ids, axis=-1)
        if c.logits_cap is not None:
            logits = softcap(logits, c.logits_cap)
        impossible = jnp.full((*x.shape[:2], c.vocab_size), -jnp.inf, jnp.float32)
        return jnp.put_along_axis(impossible, ids, logits, axis=-1, inplace=False)


def _cached(source: TargetKeys, dtype: Any) -> tuple[Array, Array]:
    """Reads the target's keys, as `stack.Read`; the layers have no new ones."""
    return source.keys.astype(dtype), source.values.astype(dtype)


@functools.lru_cache
def head(config: AssistantConfig) -> AssistantHead:
    """Makes an assistant's pure functions, for `drafters.assistant`."""
    read = stack.pure(Assistant(config), Assistant.read)
    mixers = [layer.attention for layer in config.layer.layers]
    key_sizes = tuple((mixer.kv_heads, mixer.head_dim) for mixer in mixers)
    requirements = TargetRequirements(config.layer.vocab_size, config.hidden_size)
    return AssistantHead(read, config.sources, key_sizes, requirements)


def init(config: AssistantConfig, key: Key[Array, ""]) -> core.Params:
    """Draws random parameters; tokens are ordered by their ids."""
    shapes = [layer.attention for layer in config.layer.layers]
    keys = [jnp.zeros((1, shape.kv_heads, 1, shape.head_dim), jnp.float32) for shape in shapes]
    memory = tuple(TargetKeys(k, k, jnp.zeros((1, 1), jnp.int32)) for k in keys)
    tokens = jnp.zeros((1, 2), jnp.int32)
    hidden = jnp.zeros((1, 2, config.hidden_size), jnp.float32)
    return stack.init_params(
        Assistant(config), key, tokens, hidden, memory, jnp.ones((1,), jnp.int32)
    )


# --- the drafter


class AssistantState(NamedTuple):
    """The state that an assistant drafts from."""

    hidden: Float[Array, "B H"]  # the target's, of the last token that it has read
    num_read: Int[Array, " B"]  # how many tokens of each row that are


def assistant(
    head: DraftHead[AssistantHead], target: core.Model, trimmed: core.Model | None = None
) -> core.BoundDrafter:
    """Drafts with an assistant of Gemma 4, whose layers attend to the target's cached keys and
    values.

    A draft token costs a pass of a few narrow layers. Nothing is read of the prompt and nothing
    after a verification, so a long prompt costs no more than a short one.

    Args:
        head: a network and its parameters: `draft_heads.assistant.head(config)` in a `DraftHead`;
            `jaxspec.load_drafter` reads published ones.
        target: the model whose text it drafts.
        trimmed: not for this drafter, whose head is not the target's.

    Raises:
        ValueError: the assistant is for another target, or the target's caches cannot be read.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.decoder_config(
        ...     32, dim=16, ff_dim=32, layers=3, heads=4, kv_heads=2, head_dim=4
        ... )
        >>> target = jaxspec.Model(
        ...     decoder.language_model(shape), decoder.init(shape, jax.random.key(0))
        ... )
        >>> narrow = decoder.decoder_config(
        ...     32, dim=8, ff_dim=16, layers=1, heads=2, kv_heads=2, head_dim=4
        ... )
        >>> config = AssistantConfig(
        ...     dataclasses.replace(narrow, tied_head=True), hidden_size=16, sources=(2,)
        ... )
        >>> drafter = assistant(DraftHead(head(config), init(config, jax.random.key(1))), target)
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Google, Gemma 4's assistants, https://huggingface.co/google/gemma-4-E2B-it-assistant.
    """
    drafter = bind(_drafter, head, target, trimmed, "an assistant", "assistant")
    inside = target.lm.inside
    layers = max(head.network.sources)
    assert inside is not None, "bind"
    if inside.keys_values is None or inside.layers is None or inside.layers.count <= layers:
        lacks = f"{target.name or 'the target'} has none to read (Inside.keys_values)"
        advice = "expected the target that it was made for"
        raise ValueError(f"an assistant reads the keys of layer {layers}, and {lacks}: {advice}")
    return drafter


def read_keys(
    head: AssistantHead, inside: core.Inside, cache: core.Cache
) -> tuple[TargetKeys, ...]:
    """Reads the keys and values of the target's layers that an assistant attends to.

    Raises:
        ValueError: they have other sizes than those that it was made for.
    """
    assert inside.keys_values is not None, "assistant"
    memory = tuple(TargetKeys(*inside.keys_values(cache, layer)) for layer in head.sources)
    for layer, (source, expected, read) in enumerate(
        zip(head.sources, head.key_sizes, memory, strict=True)
    ):
        heads = read.keys.shape[1]
        size = read.keys.shape[3]
        if (heads, size) != expected:
            made_for = "{} key-value heads of size {}".format(*expected)
            of_target = f"layer {source} of the target has {heads} of size {size}"
            advice = "expected the target that it was made for, or other sources"
            raise ValueError(
                f"layer {layer} of the assistant reads {made_for}, and {of_target}: {advice}"
            )
    return memory


@functools.lru_cache
def _drafter(head: AssistantHead, parts: HeadParts) -> core.Drafter:
    inside = parts.lm.inside
    assert inside is not None, "bind"

    def init(start: core.DraftStart, nodes: int) -> AssistantState:
        num_read = token_rows.decoder_prompt(parts.lm, start.prompt).length
        return AssistantState(last_features(parts.lm, start), num_read)

    def begin(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int | None
    ) -> core.Reading:
        (params, shared), row = parts(weights), context.row
        memory = read_keys(head, inside, caches.target)
        last = token_rows.window(row.tokens, row.length - 1, 1)  # [B, 1]

        def read(
            tokens: Int[Array, "B n"], before: Float[Array, "B n H"], hidden: Array, first: int
        ) -> NodeLogits:
            logits, output = head.read(params, shared, tokens, before, memory, row.length)
            return logits, jax.lax.dynamic_update_slice_in_dim(
                hidden, output.astype(hidden.dtype), first, axis=1
            )

        def root(hidden: Float[Array, "B F+1 H"]) -> NodeLogits:
            return read(last, hidden[:, :1], hidden, 0)

        def nodes(
            tokens: Int[Array, "B n"], parent: Parent, level: Any, hidden: Array
        ) -> NodeLogits:
            if parent is None:
                return read(tokens, hidden, hidden, 0)
            # `parent` counts draft tokens from 0, and is -1 after the last committed one, whose
            # output is in front.
            first = parent.shape[1] - tokens.shape[1]
            before = jnp.take_along_axis(hidden, parent[:, first:, None] + 1, axis=1)
            return read(tokens, before, hidden, first + 1)

        # [B, F + 1, H] for a tree, whose nodes look up their parents; a chain needs one only.
        hidden = jnp.pad(caches.draft.hidden[:, None], ((0, 0), (0, fed or 0), (0, 0)))
        return core.Reading(hidden, root, nodes)

    def commit(end: core.RoundEnd) -> core.Caches:
        state = end.caches.draft
        num_read = end.row.length - 1
        # The committed ones among the fed tokens; 0 in a finished row.
        count = num_read - state.num_read
        features = on_path(end.forward, end.verdict).features
        hidden = jnp.where(
            (count > 0)[:, None], take_position(features, jnp.maximum(count - 1, 0)), state.hidden
        ).astype(state.hidden.dtype)
        return end.caches._replace(draft=AssistantState(hidden, num_read))

    return chain(core.Steps(init, begin, commit, head.requirements.vocab_size))


# --- its files

ASSISTANT = "gemma4_assistant"
UNIFIED = "gemma4_unified_assistant"
# layers that read others' keys
WITHOUT = ("self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.")
OUTER = {
    "joined": "pre_projection",
    "fed_on": "post_projection",
    "centers": "masked_embedding.centroids",
    VOCABULARY: "masked_embedding.token_ordering",
}


def canonical(name: str) -> str | None:
    """Leaves out a copy of the tied head, and keys that no layer uses.

    >>> (
    ...     canonical("model.layers.0.self_attn.q_proj.weight"),
    ...     canonical("model.layers.0.self_attn.k_proj.weight"),
    ... )
    ('model.layers.0.self_attn.q_proj.weight', None)
    """
    if name == "lm_head.weight" or any(key in name for key in WITHOUT):
        return None
    return decoders.canonical(name)


def read(table: dict, shapes: Shapes, target: TargetShape) -> AssistantConfig:
    """Reads the network of a config.json, in either spelling, and finds the target's layers that it
    attends to.
    """
    text = decoders.text_half(table)
    only(text, hidden_size_per_layer_input=0, enable_moe_block=False, use_double_wide_mlp=False)
    only(text, tie_word_embeddings=True)
    count = need(text, "num_hidden_layers")
    shared = text.get("num_kv_shared_layers")
    if shared not in (None, 0, count):
        raise FamilyError(
            f"num_kv_shared_layers is {shared}, of {count} layers: expected all of them"
        )
    layer = gemma4.read({**text, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0})
    width = table.get("backbone_hidden_size") or (3840 if table["model_type"] == UNIFIED else 1536)
    formats.check_same(
        ("width of hidden states", width, target.hidden_size),
        ("vocabulary size", layer.vocab_size, target.vocab_size),
    )
    numbers = table.get("sources") or [None] * count
    sources = tuple(
        _source(x.attention, target, i) for x, i in zip(layer.layers, numbers, strict=True)
    )
    is_ordered = bool(table.get("use_ordered_embeddings", False))
    return AssistantConfig(
        layer,
        width,
        sources,
        centroids=int(table.get("num_centroids") or 2048) if is_ordered else 0,
        nearest=int(table.get("centroid_intermediate_top_k") or 32),
        positions_back=int(table.get("positions_back", 1)),
    )


def _source(attention: AttentionShape, target: TargetShape, number: int | None) -> int:
    """Returns the target's last layer with keys that is local, or global, as this layer is.

    A `number` chooses another of these layers.
    """
    if nets.find(target.config) != decoder.NETWORK:
        raise FamilyError(
            "its layers attend to the keys of a Gemma 4, and the target is another kind of network"
        )
    is_local = attention.window is not None
    mixers = [layer.attention for layer in target.config.layers]
    owners = [
        (i, x)
        for i, x in enumerate(mixers)
        if isinstance(x, AttentionShape) and x.shares is None and (x.window is not None) == is_local
        if number in (None, i)
    ]
    if not owners:
        if is_local:
            name = "sliding_attention"
        else:
            name = "full_attention"
        raise FamilyError(
            f"it attends to keys of {name}, and the target has no such layer: it was made for "
            "another"
        )
    number, source = owners[-1]
    formats.check_same(
        ("head size", attention.head_dim, source.head_dim),
        ("number of key-value heads", attention.kv_heads, source.kv_heads),
    )
    return number


def write(config: AssistantConfig, verifier: dict, tokens: int) -> dict:
    """Writes the config.json as transformers has it; keys of ours name the sources, and where
    queries stand.
    """
    text = gemma4.write(config.layer)
    reread = gemma4.read({**text, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0})
    if reread.layers != config.layer.layers:
        raise FamilyError(
            "transformers' format stores layers of Gemma 4 only, and the assistant has others"
        )
    text |= {"num_kv_shared_layers": len(config.sources), "vocab_size_per_layer_input": 0}
    table = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": ASSISTANT,
        "base_model_name_or_path": verifier["name_or_path"],
        "text_config": text,
        "backbone_hidden_size": config.hidden_size,
        "use_ordered_embeddings": bool(config.centroids),
        "num_centroids": config.centroids or 2048,
        "centroid_intermediate_top_k": config.nearest,
        "tie_word_embeddings": True,
        "sources": list(config.sources),
    }
    if config.positions_back == 1:
        return table
    return table | {"positions_back": config.positions_back}


# Sizes of E2B's, whose config.json alone is known; its target owns keys up to layers 13 (local) and
# 14 (global).
_E2B = {
    **{
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": 256,
        "intermediate_size": 2048,
    },
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
    **{"global_head_dim": 512, "sliding_window": 512, "hidden_size_per_layer_input": 0},
    "layer_types": [gemma4.LOCAL] * 3 + [gemma4.GLOBAL],
}
SIZES = {
    "gemma-4-e2b-assistant": AssistantConfig(
        gemma4.read(_E2B), 1536, (13, 13, 13, 14), centroids=2048
    )
}


KIND = Kind(
    name="assistant",
    config=AssistantConfig,
    init=init,
    head=head,
    drafter=assistant,
    format=Format(
        title="Gemma 4 assistant",
        canonical=canonical,
        matches=lambda table, shapes: table.get("model_type") in (ASSISTANT, UNIFIED),
        read=read,
        modules=lambda config: gemma4.modules(config.layer) | OUTER,
        write=write,
        stores_ids=True,
        keys=decoders.with_text(gemma4.KEYS)
        | dict.fromkeys(("backbone_hidden_size", "num_centroids"), count())
        | {"centroid_intermediate_top_k": count(), "use_ordered_embeddings": flag()},
    ),
    published=SIZES,
)
