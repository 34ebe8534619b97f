"""A prefix that prompts share, as target and drafter keep it, and the prompts after it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import core
from jaxspec.core import programs, token_rows


@dataclasses.dataclass(frozen=True, eq=False)
class SharedPrefix:
    """The beginning of prompts, read once by the target and perhaps a drafter; `jaxspec.prefix`
    makes it.

    Attributes:
        tokens: its ids.
        target, drafter: the models that have read it.
        caches: both parties' caches of one row.
    """

    tokens: list[int]
    target: core.Model
    drafter: core.BoundDrafter | None
    caches: core.Caches

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        """Its length and its models; the arrays are large."""
        if self.drafter is None:
            drafter = ""
        else:
            drafter = f", drafter {self.drafter.name}"
        return (
            f"SharedPrefix of {len(self)} tokens, target "
            f"{self.target.name or 'without a name'}{drafter}"
        )

    def followed_by(self, row: Sequence[int], form: str, index: int = 0) -> list[int]:
        """Returns the ids of the whole prompt number `index`, which is a "text", "ids" or a "chat".

        `row` has the ids of a text that follows, with the tokenizer's beginning tokens, or all ids
        of a chat.
        """
        row = list(row)
        if form == "chat":
            same = common(self.tokens, row)
            if same < len(self):
                raise ValueError(
                    f"prompt {index} is a chat whose first {same} tokens are those of the prefix, "
                    f"which has {len(self)}: give the whole conversation, with the messages that "
                    "the prefix was made of in front"
                )
            return row
        first = getattr(self.target.tokenizer, "bos_token_id", None)
        return self.tokens + row[1 if form == "text" and row[:1] == [first] else 0 :]

    def before(
        self, target: core.Model, drafter: core.BoundDrafter | None, width: int
    ) -> core.Before:
        """Returns the `before` of decoders, for whole prompts that are `width` wide."""
        check_same("target", self.target, target)
        if drafter is not None and self.drafter is None:
            raise ValueError(
                f"the prefix was read by the target alone, and {drafter.name or 'a drafter'} is to "
                "draft: make it with jaxspec.prefix(target, text, drafter=drafter)"
            )
        if drafter is not None and self.drafter is not None:
            check_same("drafter", self.drafter, drafter)
        following = width - token_rows.bucket(len(self) - 1)  # see `widths`
        return self.caches.before(
            jnp.asarray([len(self)], jnp.int32), following, drafts=drafter is not None
        )


def common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Counts the tokens with which both rows begin, or the characters of two texts.

    >>> common([5, 6, 7], [5, 6, 8, 9])
    2
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def check_same(
    role: str, old: core.Model | core.BoundDrafter, new: core.Model | core.BoundDrafter
) -> None:
    """Raises ValueError for a prefix that was read by another party."""
    names = (old.name, new.name)
    arrays = [jax.tree.leaves(party.params) for party in (old, new)]
    if (
        names[0] == names[1]
        and len(arrays[0]) == len(arrays[1])
        and all(map(operator.is_, *arrays))
    ):
        return
    if names[0] != names[1]:
        is_other = f"is {new.name or 'without a name'}"
    else:
        is_other = "has other parameters"
    raise ValueError(
        f"the prefix was read by the {role} {old.name or 'without a name'}, and the {role} "
        f"{is_other}: read it again, jaxspec.prefix(target, text, drafter=drafter), with the "
        "models that you generate with"
    )


def widths(start: int, length: int) -> tuple[int, int]:
    """Returns how wide prompts of at most `length` tokens are padded, and their part from `start`
    on: buckets.

    >>> widths(100, 130)
    (160, 32)
    """
    after = token_rows.bucket(max(1, length - start))
    return token_rows.bucket(start) + after, after


@programs.jit(static_argnames=("lm", "drafter"))
def read(
    lm: core.LanguageModel, drafter: core.Drafter | None, weights: core.Weights, prompt: core.Prompt
) -> core.Caches:
    """Reads rows: the caches of both parties after them."""
    room = token_rows.room(lm, prompt, 1, 0)  # the last token is read again
    forward, cache = lm.prefill(weights.target, prompt, room)
    return core.Caches(
        cache,
        None if drafter is None else drafter.init(core.DraftStart(weights, prompt, room, forward)),
    )


def check_drafter(drafter: core.BoundDrafter) -> None:
    """Raises ValueError for a drafter that cannot go on from a state of the beginning of a
    prompt.
    """
    if not drafter.functions.resumes:
        raise ValueError(
            f"the drafter {drafter.name or 'without a name'} cannot go on from a prefix, or from "
            "turn to turn of a chat (Drafter.resumes is False): give whole prompts to "
            "jaxspec.generate"
        )
