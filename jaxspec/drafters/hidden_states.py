"""Hidden states for drafters: the features and taps a network needs of its target, read from each
round.
"""

from __future__ import annotations

import functools
from typing import Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core import (
    DraftStart,
    Forward,
    Inside,
    LanguageModel,
    Model,
    Params,
    Verdict,
    checks,
    token_rows,
)
from jaxspec.core.round import fed_before
from jaxspec.rules.common import take_position

HeadNetwork = TypeVar("HeadNetwork")


class DraftHead(NamedTuple, Generic[HeadNetwork]):
    """A network that reads hidden states, with its parameters."""

    network: HeadNetwork  # its functions, as `head(config)` of a file in `draft_heads` returns them
    params: Params  # its own parameters; what it shares with the target is not among them


class TargetRequirements(NamedTuple):
    """The properties of its target that a network expects; checked before anything runs."""

    vocab_size: int  # number of token ids
    hidden_size: int  # width of the target's features, and of each tap
    # layers whose output it reads (`Forward.taps`), counted as `language_model(config, taps)` does;
    # empty: none
    taps: tuple[int, ...] = ()
    head: bool = False  # whether it takes its target's
    encoder: bool = False  # whether it reads the output of its target's encoder


def inside_of(
    model: Model,
    reader: str = "the drafter",
    sizes: tuple[int, int] | None = None,
    advice: str = "it was made for another target",
) -> Inside:
    """Returns the inside of a target, or of a model whose head is used in its place, that a reader
    can use.

    `sizes`: the width of features and the number of token ids that it expects; None: any. `advice`:
    what to do where they differ.
    """
    inside = model.lm.inside
    name = model.name or "the model"
    if inside is None:
        raise ValueError(
            f"{reader} reads hidden states, and {name} gives none (its LanguageModel.inside is "
            f"None): {checks.OWN_NETWORK}"
        )
    if sizes is not None and (inside.width, model.lm.vocab_size) != sizes:
        raise ValueError(
            f"{reader} expects hidden states of width {sizes[0]} and {sizes[1]} token ids, and "
            f"{name} has {inside.width} and {model.lm.vocab_size}: {advice}"
        )
    return inside


def check_target(requirements: TargetRequirements, target: Model, drafter: str) -> None:
    """Compares a network's expectations with the target."""
    inside = inside_of(target, drafter, (requirements.hidden_size, requirements.vocab_size))
    taps = inside.taps
    if requirements.encoder and inside.encoder is None:
        raise ValueError(
            f"{drafter} reads the output of an encoder, and {target.name or 'the target'} has "
            "none: it was made for another target"
        )
    if requirements.taps and taps != requirements.taps:
        if taps:
            state = f"has the outputs of layers {list(taps)}"
        else:
            state = "was built without taps"
        raise ValueError(
            f"{drafter} reads the outputs of layers {list(requirements.taps)}, and "
            f"{target.name or 'the target'} "
            f"{state}: give it jaxspec.with_taps(target, {list(requirements.taps)})"
        )


def last_features(lm: LanguageModel, start: DraftStart) -> Float[Array, "B D"]:
    """Takes the target's features at the last token that prefill has read of each row."""
    last = token_rows.decoder_prompt(lm, start.prompt).length - 1
    return take_position(
        start.prefilled.features, last if start.before is None else last - start.before.start
    )


def on_path(forward: Forward, verdict: Verdict) -> Forward:
    """Takes the target's features and taps at the last committed token and the accepted ones after
    it, in order.

    Garbage follows these. Fed tokens of a chain are in order already.
    """
    fed = fed_before(verdict, forward.logits.shape[1])
    if fed is None:
        return forward
    along = functools.partial(jnp.take_along_axis, indices=fed[:, :, None], axis=1)
    return Forward(
        forward.logits,
        along(forward.features),
        None if forward.taps is None else along(forward.taps),
    )
