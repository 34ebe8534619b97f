"""Hidden states for drafters: what a network requires of its target, and what it reads of a round."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core import Forward, Model, Params, Verdict

Network = TypeVar("Network")


class DraftHead(NamedTuple, Generic[Network]):
    """A network that reads hidden states, with its parameters.

    Attributes:
        network: its functions, as `head(config)` of a file in `draft_heads` returns them.
        params: its own parameters; what it shares with the target is not among them.
    """

    network: Network
    params: Params


class TargetRequirements(NamedTuple):
    """The properties of its target that a network expects; checked before anything runs.

    Attributes:
        vocab_size: number of token ids.
        hidden_size: width of the target's features, and of each tap.
        taps: layers whose output it reads (`Forward.taps`), counted as `language_model(config, taps)` does; empty:
            none.
        embedding, head: whether it takes these from the target.
    """

    vocab_size: int
    hidden_size: int
    taps: tuple[int, ...] = ()
    embedding: bool = False
    head: bool = False


def check_target(requirements: TargetRequirements, target: Model, kind: str) -> None:
    """Compares what a network expects with the target.

    Raises:
        ValueError: the target gives no features or not the taps, or is of another width or vocabulary.
    """
    lm, name = target.lm, target.name or "the target"
    if lm.feature_size == 0:
        raise ValueError(
            f"{kind} reads hidden states, and {name} gives none (LanguageModel.feature_size is 0): expected a network "
            "of jaxspec.nets"
        )
    if lm.feature_size != requirements.hidden_size:
        raise ValueError(
            f"{kind} reads hidden states of width {requirements.hidden_size}, and those of {name} have "
            f"{lm.feature_size}: it was made for another target"
        )
    if lm.vocab_size != requirements.vocab_size:
        raise ValueError(
            f"{kind} was made for {requirements.vocab_size} token ids, and {name} has {lm.vocab_size}: it was made for "
            "another target"
        )
    if requirements.taps and lm.taps != requirements.taps:
        have = f"has the outputs of layers {list(lm.taps)}" if lm.taps else "was built without taps"
        raise ValueError(
            f"{kind} reads the outputs of layers {list(requirements.taps)}, and {name} {have}: give it "
            f"jaxspec.with_taps(target, {list(requirements.taps)})"
        )
    for needed, function, part in ((requirements.embedding, lm.embed, "embed"), (requirements.head, lm.head, "head")):
        if needed and function is None:
            raise ValueError(f"{kind} uses its target's {part}, and the LanguageModel of {name} has none")


def on_path(forward: Forward, verdict: Verdict, depth: int | None = None) -> Forward:
    """Takes the target's features and taps at the last committed token and the accepted ones after it, in order.

    What follows these is garbage. Fed tokens of a chain are in order already.

    Args:
        forward: of the verification.
        verdict: of the rule.
        depth: most draft tokens of a path; None: all that were fed.
    """
    if verdict.path is None:
        return forward
    path = verdict.path if depth is None else verdict.path[:, :depth]
    fed = jnp.pad(path + 1, ((0, 0), (1, 0)))[:, :, None]  # B depth+1 1: the last committed token is fed token 0

    def along(hidden: Float[Array, "B N D"] | None) -> Float[Array, "B depth+1 D"] | None:
        return None if hidden is None else jnp.take_along_axis(hidden, fed, axis=1)

    return Forward(forward.logits, jnp.take_along_axis(forward.features, fed, axis=1), along(forward.taps))
