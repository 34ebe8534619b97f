"""Drafters and policies by the names that the command line has for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxspec.base import Drafter, Model, Policy

POLICIES = ("fixed", "heuristic", "confidence", "entropy", "estimated")


def drafter(name: str, dtype: str, mesh: Mesh | None = None, target: Model | None = None) -> Model | Drafter:
    """A model by its name or folder; what needs no model; or several with + between them: the first that has a guess.

    "lookup" or "lookup=2" (matches of at least 2 tokens), "online_ngram", "retrieval:FOLDER" (of a datastore),
    "argmax:NAME" (a model's best guess, with certainty), "abstaining:NAME" or "abstaining=1:NAME" (n-gram tables, where
    the longest context, or one of 1 token, was counted). A + in a path that exists belongs to the path.

    Args:
        name: as above.
        dtype, mesh: of the models among them; see `jaxspec.load`.
        target: for whom they guess; if given, a datastore must have been built with its vocabulary.

    Raises:
        ValueError: no such drafter, or a datastore that was built with another vocabulary.
    """
    from jaxspec import drafters, model

    if len(names := parts(name)) > 1:
        return drafters.first_of(*[drafter(part, dtype, mesh, target) for part in names])
    kind, colon, rest = name.partition(":")
    if colon and kind == "retrieval":
        return drafters.retrieval(rest, target)
    if colon and kind == "argmax":
        return drafters.argmax(drafter(rest, dtype, mesh, target))
    option, _, least = kind.partition("=")
    if colon and option == "abstaining":
        if least and not least.isdecimal():
            raise ValueError(f"the drafter is {name!r}: expected abstaining:NAME or abstaining=NUMBER:NAME")
        return drafters.abstaining(model.load(rest, dtype=dtype, mesh=mesh), int(least) if least else None)
    if option == "lookup" and least:
        shortest = int(least) if least.isdecimal() else 0
        if not shortest:
            raise ValueError(f"the drafter is {name!r}: expected lookup=NUMBER, the fewest tokens to match")
        return drafters.lookup(max(3, shortest), shortest)
    if name in ("lookup", "online_ngram"):
        return getattr(drafters, name)()
    return model.load(name, dtype=dtype, mesh=mesh)


def parts(name: str) -> list[str]:
    """The drafters of a name, which + parts; but no + of a path that exists does.

    >>> parts("lookup+argmax:debian-t5-small")
    ['lookup', 'argmax:debian-t5-small']
    """
    found, pieces = [], name.split("+")
    while pieces:
        path = pieces[0].rpartition(":")[2]  # or the beginning of one: the longest that exists counts
        ends = (n for n in range(len(pieces), 1, -1) if Path("+".join([path, *pieces[1:n]])).expanduser().exists())
        end = next(ends, 1)
        found.append("+".join(pieces[:end]))
        pieces = pieces[end:]
    return found


def widened(target: Model, ff_dim: int) -> Model:
    """The same function at more cost (`jaxspec.nets.widen`), where `ff_dim` is not 0."""
    from jaxspec.nets import widen

    return widen.widen(target, ff_dim) if ff_dim else target


def policy(text: str, **costs: Any) -> Policy:
    """A policy by its name, or by its name and its first number: "estimated", "confidence=0.5".

    Args:
        text: name, or name=number.
        **costs: c and v, for `estimated`.

    >>> float(policy("confidence=0.5").params)
    0.5
    """
    from jaxspec import policies

    name, _, number = text.partition("=")
    if name not in POLICIES:
        raise ValueError(f"--policy is {text!r}: expected one of {', '.join(POLICIES)}, as NAME or NAME=NUMBER")
    if name == "fixed" and not number:
        raise ValueError("--policy fixed needs a number of guesses: fixed=3")
    options: dict[str, Any] = costs if name == "estimated" else {}
    if not number:
        return getattr(policies, name)(**options)
    try:
        value = int(number) if name == "fixed" else float(number)
    except ValueError:
        raise ValueError(f"--policy is {text!r}: {number!r} is not a number of the right kind") from None
    first = {"heuristic": "start", "confidence": "threshold", "entropy": "most", "estimated": "c", "fixed": "guesses"}
    return getattr(policies, name)(**options | {first[name]: value})
