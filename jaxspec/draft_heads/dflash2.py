"""DFlash 2: a block drafter that mixes neighbouring positions, and walks through the best tokens of
each position.

It is DFlash with two additions (z-lab, `github.com/z-lab/dflash`). Before and after each sublayer,
a position's vector is added to the earlier positions' in the block, each times factors that depend
on the position. And each position names a few candidates, the most probable tokens by DFlash's
logits. A candidate's score is its logit plus a product of three vectors: the previous token's, the
position's, the candidate's. So the draft is a Markov chain with known conditional distributions,
which every acceptance rule can take.

Shapes: B batch, T step, M the layers' width, V vocabulary, R rank of the selector. C draft tokens
of a block, K candidates of a position, n tokens before, N drafts, O positions that a convolution
reads.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import core
from jaxspec.core.checks import in_range
from jaxspec.draft_heads import block, block_files, formats
from jaxspec.draft_heads.block_config import BlockConfig
from jaxspec.draft_heads.block_network import BlockDrafter
from jaxspec.draft_heads.formats import Format, Shapes, TargetShape
from jaxspec.draft_heads.kind import Kind, WindowedSizes, sizes_of
from jaxspec.draft_heads.target import SharedWithTarget
from jaxspec.draft_heads.training import DraftStep, Training
from jaxspec.nets import stack
from jaxspec.nets.attention import LayerInputs
from jaxspec.nets.decoder import DecoderLayer, layer_of
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.weights.hf_families.common import count


@dataclasses.dataclass(frozen=True)
class DFlash2Config(BlockConfig):
    """The shape of a DFlash 2 drafter: attributes of `BlockConfig`, and these.

    Attributes:
        reach: positions that a convolution reads: a position's own, and those before it.
        group: neighbouring entries of a vector that share the factors which depend on the position.
        rank: width of the selector's vectors.
        candidates: tokens that each position names.
    """

    reach: int = 2
    group: int = 16
    rank: int = 256
    candidates: int = 16

    def __post_init__(self):
        super().__post_init__()
        in_range(1, self.layer.vocab_size, candidates=self.candidates)
        in_range(1, self.block, reach=self.reach)
        in_range(1, self.layer.dim, group=self.group)
        if self.layer.dim % self.group:
            raise ValueError(
                f"group is {self.group}: expected a divisor of the layers' width, {self.layer.dim}"
            )
        if self.markov_rank or self.draft_vocab is not None:
            options = (
                f"markov_rank is {self.markov_rank} and draft_vocab {self.draft_vocab}: expected 0 "
                "and None"
            )
            raise ValueError(
                f"{options}, since the selector scores tokens of the target's vocabulary"
            )

    @property
    def is_sequential(self) -> bool:
        """Tells that a token's logits depend on the draft token before it."""
        return True


# --- the network


class Convolution(nn.Module):
    """Mixes each position with those before it in its block, before and after a sublayer."""

    config: DFlash2Config

    def setup(self):
        c = self.config
        dim = self.config.layer.dim
        # At first every position keeps its own vector, and nothing depends on it.
        is_first = jnp.arange(c.reach)[None, :, None] == 0
        self.base = self.param(
            "base", lambda _: jnp.broadcast_to(is_first, (2, c.reach, dim)).astype(jnp.float32)
        )
        dtype = jnp.dtype(c.layer.dtype)
        self.factors = Dense(
            2 * c.reach * dim // c.group, dtype=dtype, weight_init=nn.initializers.zeros
        )

    def kernels(self, x: Float[Array, "B T M"]) -> Float[Array, "2 B T O M"]:
        """Makes the factors before and after a sublayer, both from its input."""
        c = self.config
        by_group = self.factors(x).reshape(*x.shape[:2], 2, c.reach, -1)
        return jnp.moveaxis(
            self.base.astype(x.dtype)[None, None] + jnp.repeat(by_group, c.group, axis=-1), 2, 0
        )

    def mixed(
        self, kernel: Float[Array, "B T O M"], x: Float[Array, "B T M"]
    ) -> Float[Array, "B T M"]:
        """Adds up the vectors of neighbours, each times its factors; nothing crosses the border of
        a block.
        """
        c, (batch, step, dim) = self.config, x.shape
        # in training several follow each other
        blocks = x.reshape(batch, step // c.block, c.block, dim)
        shifted = [
            jnp.pad(blocks, ((0, 0), (0, 0), (i, 0), (0, 0)))[:, :, : c.block].reshape(x.shape)
            for i in range(c.reach)
        ]
        return functools.reduce(jnp.add, [kernel[:, :, i] * x for i, x in enumerate(shifted)])


class MixingLayer(DecoderLayer):
    """A layer with a convolution around its attention, and another around its feed-forward
    block.
    """

    drafter: Any = None  # the `DFlash2Config`

    def setup(self):
        super().setup()
        self.attention_mix = Convolution(self.drafter)
        self.ff_mix = Convolution(self.drafter)

    def __call__(self, x: Float[Array, "B T M"], read: stack.Read, inputs: LayerInputs):
        y = self.attention_norm(x)
        before, after = self.attention_mix.kernels(y)
        added, record = self.attention.mix(self.attention_mix.mixed(before, y), read, inputs)
        x = x + self.attention_mix.mixed(after, added)
        y = self.ff_norm(x)
        before, after = self.ff_mix.kernels(y)
        return x + self.ff_mix.mixed(after, self.ff(self.ff_mix.mixed(before, y))), record


class DraftCandidates(NamedTuple):
    """The best tokens of each position by DFlash's logits, and these logits."""

    ids: Int[Array, "B C K"]
    logits: Float[Array, "B C K"]


class DFlash2(BlockDrafter):
    """The network, by the parts of `BlockHead`."""

    config: DFlash2Config

    def setup(self):
        super().setup()
        c = self.config
        dtype = jnp.dtype(self.config.layer.dtype)
        self.before = Embedding(c.layer.vocab_size, c.rank, dtype=dtype)
        self.after = Embedding(c.layer.vocab_size, c.rank, dtype=dtype)
        self.here = Dense(c.rank, dtype=dtype)

    @nn.nowrap
    def _made_layers(self) -> list[DecoderLayer]:
        c = self.config
        return [layer_of(c.layer, i, MixingLayer, drafter=c) for i in range(len(c.layer.layers))]

    def logits(self, shared: SharedWithTarget, features: Float[Array, "B C M"]) -> DraftCandidates:
        logits, ids = jax.lax.top_k(self.all_logits(shared, features), self.config.candidates)
        return DraftCandidates(ids.astype(jnp.int32), logits)

    def next_logits(
        self,
        logits: DraftCandidates,
        previous: Int[Array, "B n"],
        features: Float[Array, "B 1 M"],
        memory: Float[Array, "B 0"],
    ) -> tuple[Float[Array, "B n V"], Float[Array, "B 0"]]:
        scores = logits.logits + self.edges(logits.ids[:, 0], previous, features)
        wide = jnp.full((*previous.shape, self.config.layer.vocab_size), -jnp.inf, jnp.float32)
        ids = jnp.broadcast_to(logits.ids, scores.shape)
        return jnp.put_along_axis(wide, ids, scores, axis=-1, inplace=False), memory

    def edges(
        self, ids: Int[Array, "B K"], previous: Int[Array, "B n"], features: Float[Array, "B 1 M"]
    ) -> Float[Array, "B n K"]:
        """Scores candidates of a position after each token before."""
        # From every token before to every candidate, one product: [B, n, R] and [B, K, R].
        pair = (self.before(previous) * self.here(features)).astype(jnp.float32)
        return jnp.einsum("bnr,bkr->bnk", pair, self.after(ids).astype(jnp.float32))

    def all_logits(
        self, shared: SharedWithTarget, features: Float[Array, "B C M"]
    ) -> Float[Array, "B C V"]:
        """Makes DFlash's logits; the best tokens become candidates."""
        return super().logits(shared, features)


# The functions of any block drafter, of this network.
head = functools.partial(block.head, network=DFlash2)
init = functools.partial(block.init, network=DFlash2)


# --- in training


def draft_logits(
    config: DFlash2Config, params: core.Params, shared: SharedWithTarget, at: DraftStep
) -> tuple[Float[Array, "N V"], None]:
    """Makes the walk's logits of the tokens of one number of blocks, given the text's token before
    each.
    """
    functions, (feature, previous) = head(config), _read(at)
    assert functions.next_logits is not None
    candidates = functions.logits(params, shared, feature)
    return functions.next_logits(
        params, candidates, previous, feature, jnp.zeros((len(feature), 0), jnp.float32)
    )[0][:, 0], None


def learned_logits(
    config: DFlash2Config, params: core.Params, shared: SharedWithTarget, at: DraftStep
) -> tuple[Float[Array, "N V"], None]:
    """Makes DFlash's logits of the tokens of one number of blocks."""
    return stack.pure(DFlash2(config), DFlash2.all_logits)(params, shared, _read(at)[0])[:, 0], None


def walk_lesson(
    config: DFlash2Config,
    params: core.Params,
    shared: SharedWithTarget,
    at: DraftStep,
    log_p: Float[Array, "N V"],
    log_q: Float[Array, "N V"],
    hard: bool,
) -> tuple[Float[Array, "N K"], Float[Array, "N K"]]:
    """Makes the target's distribution among the candidates, and the walk's.

    The target's most probable token replaces the last candidate if it is not a candidate, so that
    every position has a label. With hard labels this is the objective of `speculators`.
    """
    feature, previous = _read(at)
    best = jnp.argmax(log_p, axis=-1)[:, None]
    ids = jax.lax.top_k(log_q, config.candidates)[1]
    lacks = ~jnp.any(ids == best, axis=-1)
    ids = ids.at[:, -1].set(jnp.where(lacks, best[:, 0], ids[:, -1]))
    edges = stack.pure(DFlash2(config), DFlash2.edges)(params, ids, previous, feature)[:, 0]
    # Scores are normalised among the candidates, so log q serves as well as the logits.
    walk = jax.nn.log_softmax(jnp.take_along_axis(log_q, ids, axis=-1) + edges)
    if hard:
        among = jnp.where(ids == best, 0.0, -jnp.inf)
    else:
        among = jnp.take_along_axis(log_p, ids, axis=-1)
    return jax.nn.log_softmax(among), walk


def _read(step: DraftStep) -> tuple[Float[Array, "N 1 M"], Int[Array, "N 1"]]:
    """Returns the features of a step's positions, and the tokens before them."""
    return step.hidden[:, step.depth : step.depth + 1], step.ahead[:, step.depth, None]


# --- its files

FIELDS = {
    "reach": "conv_kernel_size",
    "group": "conv_group_size",
    "rank": "selector_rank",
    "candidates": "selector_top_k",
}
SELECTOR = "candidate_selector."
CONVOLUTIONS = {"attention": "attention", "ff": "mlp"}  # by the sublayer that they are around


def canonical(name: str) -> str | None:
    """Spells a name in one way: tables of vectors end in .weight only where z-lab's code has saved
    them again.

    >>> canonical("candidate_selector.successor_codebook.weight")
    'candidate_selector.successor_codebook'
    """
    spelled = formats.plain(name)
    return spelled and spelled.replace("_codebook.weight", "_codebook")


def matches(table: dict, shapes: Shapes) -> bool:
    """Tells whether the files have DFlash's tensors and a selector's."""
    return block_files.matches(table, shapes) and f"{SELECTOR}hidden_projection.weight" in shapes


def read(table: dict, shapes: Shapes, target: TargetShape) -> BlockConfig:
    """Reads the network of a config.json, z-lab's or speculators'."""
    return block_files.read(table, shapes, target, DFlash2Config, FIELDS)


MODULES = {
    "before/embedding": f"{SELECTOR}predecessor_codebook",
    "after/embedding": f"{SELECTOR}successor_codebook",
    "here": f"{SELECTOR}hidden_projection",
    **{
        f"layers_{{}}/{x}_mix/base": f"layers.{{}}.{y}_conv.base_kernel"
        for x, y in CONVOLUTIONS.items()
    },
    **{
        f"layers_{{}}/{x}_mix/factors": f"layers.{{}}.{y}_conv.kernel_projection"
        for x, y in CONVOLUTIONS.items()
    },
}


def modules(config: DFlash2Config) -> dict[str, str]:
    """Names the modules of a network."""
    return block_files.modules(config) | MODULES


def write(config: DFlash2Config, verifier: dict, tokens: int) -> dict:
    """Writes the config.json as `speculators` has it, or as z-lab has it if the network differs
    from those.
    """
    table = block_files.write(config, verifier, tokens)
    name = "DFlash2DraftModel"
    options = {key: vars(config)[field] for field, key in FIELDS.items()}
    if "dflash_config" in table:
        return table | {"architectures": [name], "dflash_config": table["dflash_config"] | options}
    algorithm = {"speculators_config": table["speculators_config"] | {"algorithm": "dflash2"}}
    return (
        table | algorithm | {"architectures": [name], "speculators_model_type": "dflash2"} | options
    )


KIND = Kind(
    name="dflash2",
    config=DFlash2Config,
    sizes=sizes_of(DFlash2Config, layers=WindowedSizes, head_norms=True),
    init=init,
    head=head,
    drafter=block.block,
    format=Format(
        title="DFlash 2 drafter",
        canonical=canonical,
        matches=matches,
        read=read,
        modules=modules,
        write=write,
        keys=block_files.with_options(dict.fromkeys(FIELDS.values(), count())),
    ),
    training=Training(
        hidden_states=functools.partial(block.draft_states, network=DFlash2),
        logits=draft_logits,
        longest=lambda config: config.count,
        learned=learned_logits,
        own=walk_lesson,
        names_candidates=True,
    ),
)
