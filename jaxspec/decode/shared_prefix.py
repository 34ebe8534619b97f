"""A prefix that prompts share, as target and drafter keep it, and the prompts after it."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import core
from jaxspec.core import programs, token_rows
from jaxspec.decode import inputs


@dataclasses.dataclass(frozen=True, eq=False)
class SharedPrefix:
    """The beginning of prompts, read once by the target and perhaps a drafter; `jaxspec.prefix` makes it.

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
        drafter = "" if self.drafter is None else f", drafter {self.drafter.name}"
        return f"SharedPrefix of {len(self)} tokens, target {self.target.name or 'without a name'}{drafter}"

    def followed_by(self, row: Sequence[int], kind: str, index: int = 0) -> list[int]:
        """Returns the ids of the whole prompt number `index`, which is a "text", "ids" or a "chat".

        `row` has the ids of what follows, of a text with what its tokenizer puts in front; of a chat it has all ids.
        """
        row = list(row)
        if kind == "chat":
            same = common(self.tokens, row)
            if same < len(self):
                raise ValueError(
                    f"prompt {index} is a chat whose first {same} tokens are those of the prefix, which has "
                    f"{len(self)}: give the whole conversation, with the messages that the prefix was made of in front"
                )
            return row
        first = getattr(self.target.tokenizer, "bos_token_id", None)
        return self.tokens + row[1 if kind == "text" and row[:1] == [first] else 0 :]

    def before(self, target: core.Model, drafter: core.BoundDrafter | None, width: int) -> core.Before:
        """Returns what decoders take, for whole prompts that are `width` wide.

        Raises:
            ValueError: it was read by another target or drafter.
        """
        check_same("target", self.target, target)
        if drafter is not None and self.drafter is None:
            raise ValueError(
                f"the prefix was read by the target alone, and {drafter.name or 'a drafter'} is to draft: make it with "
                "jaxspec.prefix(target, text, drafter=drafter)"
            )
        if drafter is not None and self.drafter is not None:
            check_same("drafter", self.drafter, drafter)
        rest = width - token_rows.bucket(len(self) - 1)  # see `widths`
        return self.caches.before(jnp.asarray([len(self)], jnp.int32), rest, drafts=drafter is not None)


def common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Counts the tokens with which both rows begin, or the characters of two texts.

    >>> common([5, 6, 7], [5, 6, 8, 9])
    2
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def opening(target: core.Model, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any] | None) -> list[int]:
    """Writes messages that conversations begin with.

    Templates without a system role write the system's message into the user's first one. So where messages end with
    the system's, two conversations that go on differently are written, and their common beginning is taken. Its last
    token is left out: a tokenizer may join that to what follows.
    """
    write = functools.partial(inputs.chat_ids, target, answer=False, template=template)
    if messages[-1].get("role") != "system":
        return write(messages)
    first, second = (write([*messages, {"role": "user", "content": content}]) for content in ("a", "1"))
    return first[: max(1, common(first, second) - 1)]


def check_same(role: str, old: core.Model | core.BoundDrafter, new: core.Model | core.BoundDrafter) -> None:
    """Refuses a prefix that was read by another party."""
    names, arrays = (old.name, new.name), [jax.tree.leaves(party.params) for party in (old, new)]
    if names[0] == names[1] and len(arrays[0]) == len(arrays[1]) and all(map(operator.is_, *arrays)):
        return
    is_other = f"is {new.name or 'without a name'}" if names[0] != names[1] else "has other parameters"
    raise ValueError(
        f"the prefix was read by the {role} {old.name or 'without a name'}, and the {role} {is_other}: read it again, "
        "jaxspec.prefix(target, text, drafter=drafter), with the models that you generate with"
    )


def widths(start: int, length: int) -> tuple[int, int]:
    """Returns how wide prompts of at most `length` tokens are padded, and their part from `start` on: buckets.

    >>> widths(100, 130)
    (160, 32)
    """
    rest = token_rows.bucket(max(1, length - start))
    return token_rows.bucket(start) + rest, rest


@programs.jit(static_argnames=("lm", "drafter"))
def read(
    lm: core.LanguageModel, drafter: core.Drafter | None, weights: core.Weights, prompt: core.Prompt
) -> core.Caches:
    """Reads rows: the caches of both parties after them."""
    room = token_rows.room(lm, prompt, 1, 0)  # the last token is read again
    forward, cache = lm.prefill(weights.target, prompt, room)
    return core.Caches(
        cache, None if drafter is None else drafter.init(core.DraftStart(weights, prompt, room, forward))
    )


def check_drafter(drafter: core.BoundDrafter) -> None:
    """Refuses a drafter that cannot go on from a state of the beginning of a prompt."""
    if not drafter.functions.resumes:
        raise ValueError(
            f"the drafter {drafter.name or 'without a name'} cannot go on from a prefix, or from turn to turn of a "
            "chat (Drafter.resumes is False): give whole prompts to jaxspec.generate"
        )
