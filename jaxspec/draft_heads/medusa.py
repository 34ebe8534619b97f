"""Further heads of a model, which each predict a token further ahead from the same features
(Medusa).

- Blockwise parallel decoding (Stern, Shazeer, Uszkoreit, arXiv 1811.03115): a feed-forward block
  each, and the model's head for all.
- Medusa (Cai et al., arXiv 2401.10774): residual blocks and a head each.
- Hydra (Ankner et al., arXiv 2402.05109): a head also reads the tokens before the one that it
  predicts.

Medusa's files are read as their authors publish them and as vLLM has them; all are written in
vLLM's format. Blockwise decoding's feed-forward blocks, heads without a vocabulary projection and
Hydra's projection of tokens are extra tensors in that format. Only jaxspec reads them.

Shapes: B batch, T step, C draft tokens, M model dimension, H heads, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec import core, nets
from jaxspec.core import token_rows
from jaxspec.core.checks import at_least, one_of
from jaxspec.draft_heads import formats
from jaxspec.draft_heads.formats import Format, Shapes, TargetShape
from jaxspec.draft_heads.kind import Kind, sizes_of
from jaxspec.draft_heads.target import HeadParts, SharedWithTarget, bind, zeros
from jaxspec.draft_heads.training import DraftStarts, DraftStep, Training
from jaxspec.drafters.hidden_states import DraftHead, TargetRequirements, last_features, on_path
from jaxspec.drafters.stepwise import NodeLogits, chain
from jaxspec.nets import stack
from jaxspec.nets.dense import Dense
from jaxspec.rules.common import take_position
from jaxspec.sampling import match_vocab

BLOCKS = ("residual", "feed_forward")


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """The number of heads, and their shape.

    Attributes:
        vocab_size, dim: the target's vocabulary, and the width of its features.
        heads: how many. Head i predicts the token after i draft tokens.
        blocks: how many blocks each head has, one after the other.
        block: "residual": x + silu(W x + b), Medusa's. "feed_forward": x + W2 relu(W1 x + b1) + b2,
            of blockwise decoding.
        ff_dim: width inside of a feed-forward block.
        bias: whether blocks have biases.
        own_head: whether each head has a vocabulary projection, or takes the target's.
        draft_vocab: size of the heads' vocabulary; None: the target's.
        reads_tokens: whether a head reads the last committed token and the earlier draft tokens
            (Hydra): the first block then takes all of them side by side, and adds a projection of
            them instead of x.
        dtype: the dtype of the computation.
    """

    vocab_size: int
    dim: int
    heads: int
    blocks: int = 1
    block: str = "residual"
    ff_dim: int = 0
    bias: bool = True
    own_head: bool = True
    draft_vocab: int | None = None
    reads_tokens: bool = False
    dtype: str = "float32"

    def __post_init__(self):
        one_of(self.block, "block", BLOCKS)
        at_least(1, heads=self.heads, blocks=self.blocks)
        if self.block == "feed_forward":
            at_least(1, ff_dim=self.ff_dim)
        formats.check_own_parts(self, self.dim, self.dim)


# --- the network


class HeadBlock(nn.Module):
    """One block of a head."""

    config: HeadsConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T in"]) -> Float[Array, "B T M"]:
        c = self.config
        dtype = jnp.dtype(self.config.dtype)
        zero = nn.initializers.zeros
        # Hydra's first block reads tokens beside the features, and is wider than what it adds to.
        if x.shape[-1] == c.dim:
            base = x
        else:
            base = Dense(c.dim, dtype=dtype, name="shortcut")(x)
        if c.block == "residual":
            return base + jax.nn.silu(Dense(c.dim, c.bias, dtype, zero, name="linear")(x))
        hidden = jax.nn.relu(Dense(c.ff_dim, c.bias, dtype, name="wi")(x))
        return base + Dense(c.dim, c.bias, dtype, zero, name="out")(hidden)


class MedusaHead(nn.Module):
    """A head: its blocks, and its vocabulary projection, should it have one."""

    config: HeadsConfig

    def setup(self):
        c = self.config
        dtype = jnp.dtype(self.config.dtype)
        self.blocks = [HeadBlock(c) for _ in range(c.blocks)]
        if c.own_head:
            self.head = Dense(c.draft_vocab or c.vocab_size, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T in"], shared: SharedWithTarget
    ) -> Float[Array, "B T V"]:
        for block in self.blocks:
            x = block(x)
        return (self.head(x) if self.config.own_head else shared.logits(x)).astype(jnp.float32)


class Heads(nn.Module):
    """The network: `__call__` applies all heads at each position, as in training; `logits_of`
    applies one head, in decoding.
    """

    config: HeadsConfig

    def setup(self):
        c = self.config
        self.heads = [MedusaHead(c) for _ in range(c.heads)]
        if c.draft_vocab is not None:
            self.vocabulary = self.param(
                "vocabulary", lambda _: jnp.arange(c.draft_vocab, dtype=jnp.int32)
            )

    def __call__(
        self, features: Float[Array, "B T M"], tokens: Int[Array, "B T H"], shared: SharedWithTarget
    ) -> Float[Array, "B T H V"]:
        """Makes all heads' logits; `tokens[:, t]`: one for each head after position t, for Hydra
        only.
        """
        levels = [
            self.logits_of(i, features, tokens[:, :, : i + 1], shared)
            for i in range(self.config.heads)
        ]
        return jnp.stack(levels, axis=2)

    def logits_of(
        self,
        index: int,
        features: Float[Array, "B T M"],
        tokens: Int[Array, "B T i"],
        shared: SharedWithTarget,
    ) -> Float[Array, "B T V"]:
        """Makes the logits of one head."""
        c = self.config
        x = features.astype(jnp.dtype(self.config.dtype))
        if c.reads_tokens:
            embedded = [
                shared.embed(tokens[:, :, i]).astype(x.dtype) for i in range(tokens.shape[2])
            ]
            x = jnp.concatenate([x, *embedded], axis=-1)
        logits = self.heads[index](x, shared)
        if c.draft_vocab is None:
            return logits
        return match_vocab(logits, c.vocab_size, self.vocabulary)


class ParallelHeads(NamedTuple):
    """Such heads as pure functions."""

    # (parameters, shared, number of the head, features [B, M], tokens [B, H]) -> logits of the
    # draft token of that number [B, V]. Features: the target's at the last position that it read.
    # Tokens: the last committed one and the draft tokens so far, which not every network looks at.
    logits: Callable[
        [core.Params, SharedWithTarget, int, Float[Array, "B M"], Int[Array, "B H"]],
        Float[Array, "B V"],
    ]
    count: int  # how many heads
    reads_tokens: bool  # whether heads look at the tokens before theirs
    requirements: TargetRequirements  # its requirements of the target


@functools.lru_cache
def head(config: HeadsConfig) -> ParallelHeads:
    """Makes the heads' pure functions, for `drafters.heads`."""
    logits_of = stack.pure(Heads(config), Heads.logits_of)

    def logits(
        params: core.Params, shared: SharedWithTarget, index: int, features: Array, tokens: Array
    ):
        return logits_of(params, index, features[:, None], tokens[:, None, : index + 1], shared)[
            :, 0
        ]

    requirements = TargetRequirements(config.vocab_size, config.dim, head=not config.own_head)
    return ParallelHeads(logits, config.heads, config.reads_tokens, requirements)


def init(config: HeadsConfig, key: Key[Array, ""]) -> core.Params:
    """Draws random parameters; blocks begin as the identity."""
    c = config
    inputs = jnp.zeros((1, 1, c.dim), jnp.float32), jnp.zeros((1, 1, c.heads), jnp.int32)
    return stack.init_params(Heads(c), key, *inputs, shared=zeros(c.dim, c.vocab_size))


# --- the drafter


def heads(
    head: DraftHead[ParallelHeads], target: core.Model, trimmed: core.Model | None = None
) -> core.BoundDrafter:
    """Drafts one token for each head, all from the features of the target's last pass (Medusa).

    Drafting needs no pass of a model: head i is a small block and a vocabulary projection, which
    predicts the token after i draft tokens. Medusa's and blockwise decoding's heads do not look at
    these, and so each token is drawn independently of those before it; Hydra's do. gamma is cut to
    the number of heads.

    Args:
        head: heads and their parameters: `draft_heads.medusa.head(config)` in a `DraftHead`;
            `jaxspec.load_drafter` reads Medusa's.
        target: the model whose features they read.
        trimmed: a model whose head is used in place of the target's:
            `jaxspec.trim_vocabulary(target, size=...)`.

    Raises:
        ValueError: the heads are for another target, or the target gives no features.

    Example:
        >>> import jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.gpt_config(32, dim=16, ff_dim=32, layers=1, heads=2, max_positions=48)
        >>> target = jaxspec.Model(
        ...     decoder.language_model(shape), decoder.init(shape, jax.random.key(0))
        ... )
        >>> config = HeadsConfig(32, dim=16, heads=3)
        >>> medusa = heads(jaxspec.DraftHead(head(config), init(config, jax.random.key(1))), target)
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=medusa, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Stern, Shazeer, Uszkoreit, NeurIPS 2018, arXiv 1811.03115. Cai et al., Medusa, ICML
    2024, arXiv 2401.10774. Ankner et al., Hydra, arXiv 2402.05109.
    """
    return bind(_drafter, head, target, trimmed, "the heads", "heads")


@functools.lru_cache
def _drafter(head: ParallelHeads, parts: HeadParts) -> core.Drafter:
    # The state is the target's features at the last position that it has read: that before the last
    # committed token.

    def init(start: core.DraftStart, nodes: int) -> Float[Array, "B M"]:
        return last_features(parts.lm, start)

    def begin(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int | None
    ) -> core.Reading:
        (params, shared), row, count = parts(weights), context.row, context.gamma
        last = token_rows.window(row.tokens, row.length - 1, 1)

        def logits_of(index: int, tokens: Int[Array, "B H"]) -> Float[Array, "B 1 V"]:
            return head.logits(params, shared, index, caches.draft, tokens)[:, None]

        def root(tokens: Int[Array, "B H"]) -> NodeLogits:
            return logits_of(0, tokens), tokens

        def nodes(
            new: Int[Array, "B n"], parent: Any, level: int | Int[Array, ""], tokens: Array
        ) -> NodeLogits:
            # in a tree one head makes the logits of all nodes of a level
            if isinstance(level, int):
                logits = logits_of(level, tokens)
                return jnp.broadcast_to(logits, (*new.shape, logits.shape[-1])), tokens
            # Each head reads a static number of tokens, so all draft tokens so far are kept in one
            # row, [B, H].
            tokens = jax.lax.dynamic_update_slice_in_dim(
                tokens, new.astype(tokens.dtype), level, axis=1
            )
            later = range(1, count) or (0,)  # of a single draft token this is traced, and never run
            # Heads differ in their parameters' names: a traced level can only switch between them.
            branches = [functools.partial(logits_of, index) for index in later]
            return jax.lax.switch(level - 1, branches, tokens), tokens

        # The carry is the last committed token, and the draft tokens so far.
        return core.Reading(jnp.pad(last, ((0, 0), (0, count - 1))), root, nodes)

    def commit(end: core.RoundEnd) -> core.Caches:
        features = on_path(end.forward, end.verdict).features
        return end.caches._replace(draft=take_position(features, end.verdict.num_accepted))

    steps = core.Steps(init, begin, commit, head.requirements.vocab_size, head.count)
    # heads that read tokens would need those of each path
    return chain(steps, trees=not head.reads_tokens)


# --- in training


def draft_states(
    config: HeadsConfig, params: core.Params, shared: SharedWithTarget, starts: DraftStarts
):
    """Takes the target's features, which all heads read."""
    return starts.forward.features[:, starts.place][:, :, None]


def draft_logits(config: HeadsConfig, params: core.Params, shared: SharedWithTarget, at: DraftStep):
    """Makes the logits of the head of a step's number."""
    return head(config).logits(
        params, shared, at.depth, at.hidden[:, 0], at.ahead[:, : at.depth + 1]
    ), None


# --- its files

MAP = "token_map"  # vLLM's: the target's ids of the heads' vocabulary


def canonical(name: str) -> str | None:
    """Spells a name in one way: "head.block" and "head.head".

    >>> (
    ...     canonical("2.0.linear.weight"),
    ...     canonical("2.1.weight"),
    ...     canonical("blocks.2.layers.0.weight"),
    ... )
    ('2.0.weight', '2.head.weight', '2.0.weight')
    """
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    match = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name)
    if match:
        return f"{match[1]}.{match[2]}.{match[3]}"
    match = re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(.+)", name)
    if match:
        return f"{match[1]}.{match[2]}.{match[3]}"
    match = re.fullmatch(r"(?:lm_heads\.(\d+)|(\d+)\.\d+)\.weight", name)
    if match:
        return f"{match[1] or match[2]}.head.weight"
    return name


def read(table: dict, shapes: Shapes, target: TargetShape) -> HeadsConfig:
    """Counts heads and blocks by their tensors; config.json is often wrong about the former."""
    heads, blocks = (
        len({name.split(".")[i] for name in shapes if re.match(r"\d+\.\d+\.", name)})
        for i in (0, 1)
    )
    ff_dim, *_ = shapes.get("0.0.wi.weight", (0,))
    # Hydra's first block takes tokens beside the features, and has a projection of both. The first
    # matrix that reads the features: its input axis is their width. Square ones show it on either
    # axis.
    first = next(
        name for name in ("0.0.shortcut.weight", "0.0.wi.weight", "0.0.weight") if name in shapes
    )
    hydra = first == "0.0.shortcut.weight"
    formats.check_same(
        ("width of hidden states", shapes[first][int(not hydra)], target.hidden_size)
    )
    draft_vocab = formats.axis_of(shapes, MAP, 0)
    vocab = formats.axis_of(shapes, "0.head.weight", 0)
    if draft_vocab is None:
        formats.check_same(("vocabulary size", vocab, target.vocab_size))
    elif vocab not in (None, draft_vocab):
        raise formats.FamilyError(f"{MAP} has {draft_vocab} ids, and the heads {vocab}")
    return HeadsConfig(
        vocab_size=target.vocab_size,
        dim=target.hidden_size,
        heads=heads,
        blocks=blocks,
        block="feed_forward" if ff_dim else "residual",
        ff_dim=ff_dim,
        bias="0.0.bias" in shapes or "0.0.wi.bias" in shapes,
        own_head="0.head.weight" in shapes,
        draft_vocab=draft_vocab,
        reads_tokens=hydra,
        dtype=nets.dtype_of(target.config),
    )


def modules(block: str, head: str) -> dict[str, str]:
    """Names the modules of a network, by the names of a block and of a head."""
    layers = {
        f"heads_{{}}/blocks_{{}}/{layer}": f"{block}.{layer}" for layer in ("wi", "out", "shortcut")
    }
    return {"vocabulary": MAP, "heads_{}/head": head, "heads_{}/blocks_{}/linear": block, **layers}


def write(config: HeadsConfig, verifier: dict, tokens: int) -> dict:
    """Writes the config.json, as vLLM has it."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": verifier["name_or_path"],
        "hidden_size": config.dim,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab or config.vocab_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.blocks,
        "medusa_fc_bias": config.bias,
    }


KIND = Kind(
    name="heads",
    config=HeadsConfig,
    sizes=sizes_of(HeadsConfig, without=("bias",)),
    init=init,
    head=head,
    drafter=heads,
    format=Format(
        title="Medusa",
        canonical=canonical,
        matches=lambda table, shapes: "0.0.wi.weight" in shapes or "0.0.weight" in shapes,
        read=read,
        modules=lambda config: modules("{}.{}", "{}.head"),
        write=write,
        written=lambda config: modules("blocks.{}.layers.{}", "lm_heads.{}"),
        stores_ids=True,
    ),
    training=Training(
        draft_states, draft_logits, longest=lambda config: config.heads, separate_heads=True
    ),
)
