"""Keys of a recipe that its other keys make meaningless.

Such a recipe would not train what it says. A key has one default, whatever the other keys are, so
an unused default is no mistake. Only keys that the recipe's file spells out are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxspec.files.strict_tables import RecipeError


class UnusedKey(NamedTuple):
    """A key without effect."""

    table: str  # the table of the recipe that it belongs to
    key: str
    reason: str  # another key and its value, as in "curriculum is 'gradual'"


def check(recipe: Any, table: Mapping[str, Any], where: str) -> None:
    """Checks that a recipe's file has no key without effect.

    Args:
        recipe: the recipe that was read.
        table: the tables of its file.
        where: the file, for the message.

    Raises:
        RecipeError: it has one.
    """
    for unused in unused_keys(recipe):
        written = table.get(unused.table, {})
        if unused.key in written:
            got = f"{where}: [{unused.table}] {unused.key} is {written[unused.key]!r}"
            raise RecipeError(
                f"{got} and {unused.reason}: leave it out, since it would have no effect"
            )


def unused_keys(recipe: Any) -> Iterator[UnusedKey]:
    """Yields the keys that have no effect, given the values of the others.

    `recipe` is a dataclass of `training.recipes`, which imports this module.
    """
    has_sources = bool(recipe.data.tasks)  # which the texts of an encoder-decoder are
    learn = getattr(recipe, "learn", None)
    distil = getattr(recipe, "distil", None)
    early_exit = getattr(recipe, "early_exit", None)
    tables = getattr(recipe, "tables", None)
    if learn is not None:
        yield from of_answers("learn", learn, has_sources)
        yield from of_learn(learn, recipe.train.steps)
        if recipe.training.own is None:
            yield UnusedKey(
                "learn",
                "own",
                f"drafters of the family {recipe.family!r} have no lesson of that kind",
            )
    if distil is not None:
        yield from of_answers("distil", distil, has_sources, writes=distil.own > 0)
        if not distil.weight:
            yield UnusedKey("distil", "divergence", "weight is 0")
    if tables is not None and not tables.after:
        yield UnusedKey("tables", "temperature", "after is missing")
    if early_exit is not None and early_exit.curriculum != "rotating":
        yield UnusedKey("early_exit", "every", f"curriculum is {early_exit.curriculum!r}")


def of_answers(
    table: str, answers: Any, has_sources: bool, writes: bool = False
) -> Iterator[UnusedKey]:
    """Yields the keys of `recipes.Answers` that have no effect.

    Args:
        table: the table of the recipe that they stand in.
        answers: their values.
        has_sources: whether the model is an encoder-decoder.
        writes: whether the drafter writes texts itself, from prompts.

    >>> from jaxspec.training.recipes import Learn
    >>> [unused.key for unused in of_answers("learn", Learn(answers=(8,)), has_sources=True)]
    ['prompt']
    """
    if not answers.answers:
        for key in ("temperatures", "texts", "beams"):
            yield UnusedKey(table, key, "answers is missing")
    if has_sources:
        yield UnusedKey(
            table, "prompt", "the model reads sources: only a decoder-only model continues a text"
        )
    elif not answers.answers and not writes:
        yield UnusedKey(table, "prompt", "answers is missing")


def of_learn(learn: Any, steps: int) -> Iterator[UnusedKey]:
    """Yields the keys of `recipes.Learn` that have no effect.

    `training.heads.losses` gives each step its loss.

    >>> from jaxspec.training.recipes import Learn
    >>> [unused.key for unused in of_learn(Learn(target_rate=0.1), steps=8)]
    ['kl', 'divergence', 'own', 'regression']
    """
    # Heads learn from the target's distributions until a target that learns joins them. From then
    # on they learn the texts.
    joined = round(learn.heads_first * steps) if learn.target_rate else steps
    blended = round(learn.kl * steps)
    if joined == 0:
        reason = (
            f"target_rate is {learn.target_rate} without heads_first, so that all steps learn the "
            "texts' tokens"
        )
        for key in ("kl", "divergence", "own", "regression"):
            yield UnusedKey("learn", key, reason)
    elif blended >= joined:
        until = f"kl is {learn.kl}" + (
            f" and heads_first {learn.heads_first}" if learn.target_rate else ""
        )
        yield UnusedKey("learn", "divergence", f"{until}: the forward KL takes all of these steps")
    if learn.one_head:
        yield UnusedKey("learn", "decay", "one_head is true, which weighs all draft tokens alike")
        yield UnusedKey("learn", "heads_weight", "one_head is true, where both losses count alike")
    elif not learn.target_rate:
        yield UnusedKey("learn", "heads_weight", "target_rate is 0")
