"""The parts of a target that draft heads share: its embedding, its head, its vocabulary.

Shapes: B batch, T step, M model dimension, V the target's vocabulary, W a drafter's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import BoundDrafter, Drafter, Head, LanguageModel, Model, Params, Weights
from jaxspec.drafters.hidden_states import DraftHead, TargetRequirements, check_target, inside_of
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.sampling import match_vocab


class SharedWithTarget(NamedTuple):
    """The functions of its target that a network may use, parameters filled in."""

    # tokens [B, T] -> rows of the target's embedding [B, T, M]: `Inside.embed`
    embed: Callable[[Int[Array, "B T"]], Float[Array, "B T M"]]
    # (features [B, T, M], raw=False) -> logits of the target's language-model head [B, T, V]:
    # `Inside.head`
    logits: Callable[..., Float[Array, "B T V"]]


def shared_with(lm: LanguageModel, params: Params) -> SharedWithTarget:
    """Fills in the target's parameters."""
    assert lm.inside is not None, "check_target"
    return SharedWithTarget(
        functools.partial(lm.inside.embed, params), functools.partial(lm.inside.head, params)
    )


def zeros(dim: int, vocab: int) -> SharedWithTarget:
    """Makes an embedding and a head of zeros, for initialisation, which needs shapes only."""
    return SharedWithTarget(
        lambda tokens: jnp.zeros((*tokens.shape, dim), jnp.float32),
        lambda features, raw=False: jnp.zeros((*features.shape[:2], vocab), jnp.float32),
    )


class PartlyShared(nn.Module):
    """A network whose `config` says whether embedding, head and vocabulary are its target's.

    `config` has `own_embedding`, `own_head` and `draft_vocab`, and a `layer`, whose `dim` and
    `vocab_size` these have.
    """

    config: Any

    def setup(self):
        c = self.config.layer
        config = self.config
        dtype = jnp.dtype(c.dtype)
        if config.own_embedding:
            self.embedding = Embedding(c.vocab_size, c.dim, dtype=dtype)
        if config.own_head:
            self.head = Dense(config.draft_vocab or c.vocab_size, dtype=dtype)
        if config.draft_vocab is not None:
            self.vocabulary = self.param(
                "vocabulary", lambda _: jnp.arange(config.draft_vocab, dtype=jnp.int32)
            )

    def embed(self, shared: SharedWithTarget, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        """Embeds tokens."""
        if self.config.own_embedding:
            return self.embedding(tokens)
        return shared.embed(tokens)

    def draft_logits(
        self, shared: SharedWithTarget, features: Float[Array, "B T M"], raw: bool = False
    ) -> Float[Array, "B T W"]:
        """Makes float32 logits of the ids that are drafted; `raw` leaves out the target's scale and
        cap of logits.
        """
        of_target = {"raw": True} if raw else {}
        return (
            self.head(features) if self.config.own_head else shared.logits(features, **of_target)
        ).astype(jnp.float32)

    def widened(self, logits: Float[Array, "B T W"]) -> Float[Array, "B T V"]:
        """Puts logits of the ids that are drafted into the target's vocabulary."""
        if self.config.draft_vocab is None:
            return logits
        return match_vocab(logits, self.config.layer.vocab_size, self.vocabulary)


def requirements_of(
    config: Any, hidden_size: int, taps: tuple[int, ...] = ()
) -> TargetRequirements:
    """Returns the shape that a `PartlyShared` network expects of its target, whose hidden states it
    reads.
    """
    return TargetRequirements(config.layer.vocab_size, hidden_size, taps, head=not config.own_head)


class TrimmedParams(NamedTuple):
    """A network's parameters, and the parameters of the model whose head it uses."""

    network: Params
    head: Params


class HeadParts(NamedTuple):
    """The parts that a network drafts with: (weights of a round) -> its parameters, and the shared
    ones.
    """

    lm: LanguageModel  # the target's
    # the head of another model, whose parameters are in `TrimmedParams`; None: the target's head
    head: Head | None = None

    def __call__(self, weights: Weights) -> tuple[Params, SharedWithTarget]:
        shared = shared_with(self.lm, weights.target)
        if self.head is None:
            return weights.draft, shared
        # A trimmed head is another model's: its parameters travel with the drafter's, not with the
        # target's.
        return weights.draft.network, shared._replace(
            logits=functools.partial(self.head, weights.draft.head)
        )


def bind(
    functions: Callable[[Any, HeadParts], Drafter],
    head: DraftHead[Any],
    target: Model,
    trimmed: Model | None,
    title: str,
    name: str,
) -> BoundDrafter:
    """Makes the drafter of a network that drafts for a target.

    With a `trimmed` model the network uses its smaller head in place of the target's (FR-Spec). The
    text keeps the target's distribution; tokens that the head leaves out are never drafted.

    Args:
        functions: (the network's functions, its parts) -> the drafter's functions.
        trimmed: `jaxspec.trim_vocabulary(target, size=...)`, or None.
        title: the network's name in errors.

    Raises:
        ValueError: the network is for another target. Or it has a separate head, or the trimmed
            model's head reads features of another width or writes another vocabulary.

    Reference: Zhao et al., FR-Spec, arXiv 2502.14856.
    """
    requirements = head.network.requirements
    check_target(requirements, target, title)
    if trimmed is None:
        return BoundDrafter(
            functions(head.network, HeadParts(target.lm)), head.params, target=target, name=name
        )
    if not requirements.head:
        raise ValueError(
            "the drafter has its own head, which can be trimmed only in training (draft_vocab)"
        )
    sizes = requirements.hidden_size, requirements.vocab_size
    inside = inside_of(trimmed, "the drafter", sizes, "expected jaxspec.trim_vocabulary(target)")
    parts = HeadParts(target.lm, inside.head)
    params = TrimmedParams(head.params, trimmed.params)
    return BoundDrafter(functions(head.network, parts), params, target=target, name=name)
