"""PaSS: vectors that, fed after a text, make the model itself predict tokens further ahead.

Monea, Joulin, Grave, arXiv 2311.13581. Only these vectors are trained; the model stays as it is.
Their authors publish none, nor a format: the one here is ours, a matrix and its sizes.

Shapes: B batch, T step, C draft tokens, M model dimension, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxspec import core, nets
from jaxspec.core import token_rows
from jaxspec.core.checks import at_least
from jaxspec.draft_heads import formats
from jaxspec.draft_heads.formats import Format, Shapes, TargetShape
from jaxspec.draft_heads.kind import Kind, sizes_of
from jaxspec.draft_heads.target import HeadParts, SharedWithTarget, bind
from jaxspec.draft_heads.training import DraftStarts, Frequencies, Training, logits_of_head
from jaxspec.drafters.common import no_commit, no_state
from jaxspec.drafters.hidden_states import DraftHead, TargetRequirements, inside_of
from jaxspec.drafters.stepwise import at_once, chain
from jaxspec.vocab import trim


@dataclasses.dataclass(frozen=True)
class LookAheadConfig:
    """The number of vectors, and the shape of the target that they are for.

    Attributes:
        vocab_size, dim: the target's vocabulary, and the width of its features.
        vectors: how many. Vector i predicts the token after i + 1 draft tokens: the first one is
            the target's own.
        dtype: the dtype of the target's computation.
    """

    vocab_size: int
    dim: int
    vectors: int
    dtype: str = "float32"

    def __post_init__(self):
        at_least(1, vectors=self.vectors)


class LookAheadEmbeddings(NamedTuple):
    """Such vectors as pure functions."""

    # (vectors, the target's `extend`, its parameters, cache, tokens, parent) -> what that `extend`
    # returns, where ids from the vocabulary's size on are the vectors
    extend: Callable[..., tuple[core.Forward, core.Cache]]
    # (vectors, shared, the target's features [B, T, M]) -> logits [B, T, V]
    logits: Callable[[core.Params, SharedWithTarget, Float[Array, "B T M"]], Float[Array, "B T V"]]
    count: int  # most draft tokens: one more than there are vectors
    requirements: TargetRequirements  # their requirements of the target


@functools.lru_cache
def head(config: LookAheadConfig) -> LookAheadEmbeddings:
    """Makes the vectors' pure functions, for `drafters.lookahead_embeddings`."""

    def extend(
        params: core.Params,
        run: Callable[..., Any],
        target: core.Params,
        cache: core.Cache,
        tokens: Array,
        parent,
    ):
        # Vectors are further rows of the target's embedding: ids from its vocabulary's size on.
        embedding = {**target["embedding"], "more": params["vectors"]}
        return run({**target, "embedding": embedding}, cache, tokens, parent)

    def logits(
        params: core.Params, shared: SharedWithTarget, hidden: Float[Array, "B T M"]
    ) -> Float[Array, "B T V"]:
        return shared.logits(hidden)

    requirements = TargetRequirements(config.vocab_size, config.dim, head=True)
    return LookAheadEmbeddings(extend, logits, config.vectors + 1, requirements)


def init(config: LookAheadConfig, key: Key[Array, ""]) -> core.Params:
    """Draws random vectors, of the size that embeddings begin with."""
    return {"vectors": 0.02 * jax.random.normal(key, (config.vectors, config.dim), jnp.float32)}


# --- the drafter


def lookahead_embeddings(
    head: DraftHead[LookAheadEmbeddings], target: core.Model, trimmed: core.Model | None = None
) -> core.BoundDrafter:
    """Drafts with the target itself, in one pass over the last committed token and trained
    look-ahead vectors (PaSS).

    The pass gives the target's own distribution of the next token, which is accepted with certainty
    (up to rounding), and a draft token more for each vector; these are independent of each other. A
    round is two passes of the target, which yield at least two tokens: it pays where the vectors
    are good for a third. Only the vectors are stored. gamma is cut to their number plus 1.

    Args:
        head: `draft_heads.lookahead_embeddings.head(config)` and the vectors, in a `DraftHead`;
            `jaxspec train` makes them, and `jaxspec.load_drafter` reads them.
        target: the model.
        trimmed: a model whose head is used in place of the target's:
            `jaxspec.trim_vocabulary(target, size=...)`.

    Raises:
        ValueError: the vectors are for another target, or the target is not a network of
            `jaxspec.nets`.

    Example:
        >>> import jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.gpt_config(32, dim=16, ff_dim=32, layers=1, heads=2, max_positions=48)
        >>> target = jaxspec.Model(
        ...     decoder.language_model(shape), decoder.init(shape, jax.random.key(0))
        ... )
        >>> config = LookAheadConfig(32, dim=16, vectors=2)
        >>> vectors = jaxspec.DraftHead(head(config), init(config, jax.random.key(1)))
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(
        ...     target, prompt, drafter=lookahead_embeddings(vectors, target), max_new_tokens=9
        ... )
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Monea, Joulin, Grave, PaSS, arXiv 2311.13581.
    """
    return bind(_drafter, head, target, trimmed, "the look-ahead vectors", "lookahead_embeddings")


@functools.lru_cache
def _drafter(head: LookAheadEmbeddings, parts: HeadParts) -> core.Drafter:
    lm = parts.lm

    def begin(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int | None
    ) -> core.Reading:
        (params, shared), row, count = parts(weights), context.row, context.gamma
        last = token_rows.window(row.tokens, row.length - 1, 1)

        def every_logits(cache: core.Cache) -> tuple[Float[Array, "B C V"], core.Cache]:
            ids = jnp.broadcast_to(
                lm.vocab_size + jnp.arange(count - 1, dtype=last.dtype), (len(last), count - 1)
            )
            # The target's own cache is used, and rewound again before the target's pass.
            cache = lm.rewind(cache, row.length - 1)
            tokens = jnp.concatenate([last, ids], axis=1)
            forward, cache = head.extend(params, lm.extend, weights.target, cache, tokens, None)
            return head.logits(params, shared, forward.features), cache

        return at_once(every_logits, caches.target, lambda cache: caches._replace(target=cache))

    return chain(core.Steps(no_state, begin, no_commit, head.requirements.vocab_size, head.count))


# --- in training


def begin(
    config: LookAheadConfig, params: core.Params, target: core.Model, often: Frequencies
) -> core.Params:
    """Begins with the vectors of frequent tokens."""
    tokens = jnp.asarray(trim.frequent_ids(target, config.vectors, often))
    return {"vectors": inside_of(target).embed(target.params, tokens[None])[0]}


def draft_states(
    config: LookAheadConfig, params: core.Params, shared: SharedWithTarget, starts: DraftStarts
):
    """Reads the token after each place, and the vectors after that, in one pass of the target over
    a tree.
    """
    size = starts.forward.features.shape[1]
    count = starts.depths - 1
    position = starts.place
    tokens = starts.tokens[:, :size]
    fed = jnp.tile(config.vocab_size + jnp.arange(count, dtype=tokens.dtype), position.shape[0])
    nodes = jnp.concatenate(
        [tokens, jnp.broadcast_to(fed, (tokens.shape[0], fed.shape[0]))], axis=1
    )
    # Nodes 0 to S - 1 are the text, a chain; each place has a branch of its own vectors after that.
    vector = size + jnp.arange(fed.shape[0], dtype=jnp.int32).reshape(-1, count)
    index = jnp.concatenate([position[:, None].astype(jnp.int32), vector], axis=1)
    # Each vector follows the one before it; the first of a branch follows the token at its place.
    parent = jnp.concatenate([jnp.arange(-1, size - 1, dtype=jnp.int32), index[:, :-1].reshape(-1)])
    extend = functools.partial(head(config).extend, params)
    return starts.read_tree(extend, nodes, jnp.broadcast_to(parent, nodes.shape)).features[:, index]


# --- their files

VECTORS = "lookahead_embeddings.weight"


def read(table: dict, shapes: Shapes, target: TargetShape) -> LookAheadConfig:
    """Reads as many vectors as the matrix has rows."""
    formats.check_same(
        ("vocabulary size", table.get("vocab_size"), target.vocab_size),
        ("width of hidden states", shapes[VECTORS][1], target.hidden_size),
    )
    dtype = nets.dtype_of(target.config)
    return LookAheadConfig(target.vocab_size, target.hidden_size, shapes[VECTORS][0], dtype)


def write(config: LookAheadConfig, verifier: dict, tokens: int) -> dict:
    """Writes the config.json."""
    return {
        "model_type": "lookahead_embeddings",
        "base_model_name_or_path": verifier["name_or_path"],
        "hidden_size": config.dim,
        "vocab_size": config.vocab_size,
        "num_lookahead_embeddings": config.vectors,
    }


KIND = Kind(
    name="lookahead_embeddings",
    config=LookAheadConfig,
    sizes=sizes_of(LookAheadConfig),
    init=init,
    head=head,
    drafter=lookahead_embeddings,
    format=Format(
        title="PaSS",
        canonical=lambda name: name,
        matches=lambda table, shapes: VECTORS in shapes,
        read=read,
        modules=lambda config: {"vectors": VECTORS},
        write=write,
    ),
    training=Training(draft_states, logits_of_head(head), lambda config: config.vectors + 1, begin),
)
