"""Draft heads in training: drafting at every position of a text at once, and the initial
parameters.

A draft that begins after token s + 1 has read the target's hidden states up to position s. Its
draft token number k (from 0) is to have the target's distribution after token s + 1 + k; the text's
tokens stand for the draft tokens before it. `jaxspec.training.head_loss` compares the two.

Shapes: B batch, S positions of a row, A places where drafts begin, K draft tokens. D hidden states,
N drafts, V vocabulary, R width of a sequential head's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import nets
from jaxspec.core import Forward, Model, Params
from jaxspec.draft_heads.target import SharedWithTarget
from jaxspec.drafters.hidden_states import inside_of
from jaxspec.vocab import trim

# the parameter with the target's ids of a drafter's own tokens, which is not trained
VOCABULARY = "vocabulary"
Frequencies = Int[np.ndarray, " V"]


class DraftStarts(NamedTuple):
    """The places where drafts begin in texts, and the positions that they may read."""

    forward: Forward  # the target's pass, at positions 0 to S - 1
    tokens: Int[Array, "B S+K-1"]  # token s is the one after position s
    place: Int[Array, " A"]  # last positions whose hidden states drafts have read
    depths: int  # K
    # (extend, nodes, parent) -> the target's pass over a tree after the first token of each row
    read_tree: Callable[..., Forward]
    # an encoder-decoder's: the tokens of each source, whose `forward.encoded` has every position
    source_length: Int[Array, " B"] | None = None


class DraftStep(NamedTuple):
    """The draft tokens of one number, in all drafts at once."""

    hidden: Float[Array, "N _ D"]  # the vectors of the drafts, from `Training.hidden_states`
    ahead: Int[Array, "N K"]  # the token before each draft, and the tokens after it
    depth: int  # the number of the draft tokens, from 0
    # what `Training.logits` returned for the draft tokens before; None for the first
    memory: Float[Array, "N R"] | None = None


def logits_of_head(head: Callable[[Any], Any]) -> Callable[..., tuple[Float[Array, "N V"], None]]:
    """Makes logits of a draft token from the hidden states at its depth, with
    `head(config).logits`.
    """

    def logits(
        config: Any, params: Params, shared: SharedWithTarget, step: DraftStep
    ) -> tuple[Array, None]:
        return head(config).logits(params, shared, step.hidden[:, step.depth : step.depth + 1])[
            :, 0
        ], None

    return logits


def begin_with_copies(config: Any, params: Params, target: Model, often: Frequencies) -> Params:
    """Gives random parameters the target's embedding and head where these fit.

    A drafter with a smaller vocabulary gets the tokens that occur most often.
    """
    inside = inside_of(target)
    ids = None
    if VOCABULARY in params:
        ids = jnp.asarray(trim.frequent_ids(target, config.draft_vocab, often))
        params = {**params, VOCABULARY: ids}
    rows: Float[Array, "V M"] | None = None
    if nets.logits_cap(target.config) is None:
        # The head of the identity is its matrix, whatever its parameters look like: quantised, tied
        # or trimmed.
        rows = inside.head(target.params, jnp.eye(inside.width, dtype=jnp.float32)[None])[0].T
        if ids is not None:
            rows = rows[ids]

    def copied(path: tuple, x: Array) -> Array:
        names = [getattr(key, "key", "") for key in path]
        if names[-2:] == ["head", "weight"] and rows is not None and rows.shape == x.shape:
            return rows.astype(x.dtype)
        if names[:2] == ["embedding", "embedding"] and x.shape[1] == inside.width:
            return inside.embed(target.params, jnp.arange(x.shape[0])[None])[0].astype(x.dtype)
        return x

    return jax.tree_util.tree_map_with_path(copied, params)


class OwnLesson(Protocol):
    def __call__(
        self,
        config: Any,
        params: Params,
        shared: SharedWithTarget,
        at: DraftStep,
        log_p: Float[Array, "N W"],
        log_q: Float[Array, "N W"],
        hard: bool,
    ) -> tuple[Float[Array, "N K"], Float[Array, "N K"]] | None:
        """Makes two distributions of something else than the draft token, whose forward KL is added
        to the loss.

        They are the labels and the drafter's estimate, as log-probabilities; None: this drafter has
        no such lesson.

        Args:
            config, params: the drafter's network.
            shared, at: the parts of the target that it uses, and the draft tokens.
            log_p: the target's distribution among the drafter's tokens; it sums to 1 only if these
                are all.
            log_q: the drafter's, by `Training.learned`.
            hard: whether labels are the most probable token alone.
        """
        ...


class Training(NamedTuple):
    """The functions that training asks of a kind of draft head.

    Attributes:
        hidden_states: (configuration, parameters, shared, starts) -> hidden states [B, A, _, D],
            from which the logits of each draft's tokens are made. The third axis is 1 if all draft
            tokens share one.
        logits: (configuration, parameters, shared, step) -> the logits that a step's tokens are
            drafted with, in the target's vocabulary [N, V], and the memory for the next ones.
        longest: configuration -> most draft tokens; None: it goes on as long as it is asked to.
        begin: (configuration, random parameters, target, how often tokens occur) -> parameters to
            begin with.
        predicts_features: configuration -> whether its hidden states are predictions of the
            target's features, whose distance can be a part of the loss (`learn.regression`).
        learned: logits that learn the target's distribution, in place of `logits`; None: the same.
        own: a further lesson, weighted by `learn.own`; None without one.
        names_candidates: whether that lesson is about candidates, whose labels `learn.hard`
            chooses.
        separate_heads: whether each draft token has a separate head on the target's features,
            without a memory. One head alone can then learn in a step (`learn.one_head`), and the
            target can learn with them (`learn.target_rate`).
    """

    hidden_states: Callable[[Any, Params, SharedWithTarget, DraftStarts], Float[Array, "B A _ D"]]
    logits: Callable[
        [Any, Params, SharedWithTarget, DraftStep],
        tuple[Float[Array, "N V"], Float[Array, "N R"] | None],
    ]
    longest: Callable[[Any], int | None] = lambda config: None
    begin: Callable[[Any, Params, Model, Frequencies], Params] = begin_with_copies
    predicts_features: Callable[[Any], bool] = lambda config: False
    learned: Callable[..., tuple[Float[Array, "N V"], Float[Array, "N R"] | None]] | None = None
    own: OwnLesson | None = None
    names_candidates: bool = False
    separate_heads: bool = False
