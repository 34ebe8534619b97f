"""How drafters are written on a command line: NAME=NUMBERS:NAME, and several of these with + between them."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import NamedTuple

COUNTED = {"unigram": 1, "bigram": 2, "trigram": 3, "4-gram": 4}  # tables of held-out references
MADE = {  # how drafters are written that are no model; numbers may be left out, but for that of trim
    "prompt_lookup": "prompt_lookup=NUMBER, the fewest tokens to match",
    "online_ngram": "online_ngram",
    "token_recycling": "token_recycling",
    "retrieval": "retrieval:FOLDER",
    "greedy": "greedy:NAME",
    "head": "head:FOLDER",
    "share": "share:NAME",
    "trim": "trim=NUMBER:NAME, the number of tokens to draft; NAME may be early_exit=4 or head:FOLDER",
    "without_backoff": "without_backoff:NAME or without_backoff=NUMBER:NAME",
    "tree": "tree:NAME or tree=4x2x1:NAME, with how children are drawn tree=4x2x1-mixed:NAME",
    "dynamic_tree": "dynamic_tree:NAME or dynamic_tree=32:NAME",
    "sequences": "sequences:NAME or sequences=4:NAME",
    "suffix": "suffix",
    "lookahead": "lookahead",
    "jacobi": "jacobi",
    "cascade": "cascade:NAME:INNER or cascade=3:NAME:INNER",
    "horizontal_cascade": "horizontal_cascade:NAME:NAME or horizontal_cascade=2:NAME:NAME",
}
OWN_LAYERS = {  # of the target
    "early_exit": "early_exit=4",
    "skip_layers": "skip_layers=5x7:6 (attention:mlp)",
}


class Written(NamedTuple):
    """A drafter's name in parts.

    Attributes:
        kind: of `MADE` or `OWN_LAYERS`.
        numbers: after the =.
        inner: names after the colon.
        draw: of a tree, how children are drawn.
        layers: of the target's own layers, between colons.
    """

    kind: str
    numbers: tuple[int, ...] = ()
    inner: tuple[str, ...] = ()
    draw: str = ""
    layers: tuple[tuple[int, ...], ...] = ()


def parse(name: str) -> Written | None:
    """A name in parts; None if it is that of a model.

    Raises:
        ValueError: the parts are not those of its kind.

    >>> parse("tree=4x2-mixed:debian-t5-draft")
    Written(kind='tree', numbers=(4, 2), inner=('debian-t5-draft',), draw='mixed', layers=())
    >>> parse("skip_layers=5x7:6").layers, parse("debian-t5-draft")
    (((5, 7), (6,)), None)
    """
    head, colon, rest = name.partition(":")
    kind, _, given = head.partition("=")
    usage = (MADE | OWN_LAYERS).get(kind)
    if usage is None:
        return None
    wrong = ValueError(f"the drafter is {name!r}: expected {usage}")
    if kind in OWN_LAYERS:
        sets = [part.split("x") if part else [] for part in (given + colon + rest).split(":")]
        good = any(sets) and all(number.isdecimal() for part in sets for number in part)
        if not good or len(sets) > 2 or (kind == "early_exit" and list(map(len, sets)) != [1]):
            raise wrong
        return Written(kind, layers=tuple(tuple(map(int, part)) for part in sets))
    given, _, draw = given.partition("-") if kind == "tree" else (given, "", "")
    numbers = tuple(int(size) if size.isdecimal() else 0 for size in given.split("x")) if given else ()
    names = usage.partition(" or ")[0].count(":")
    inner = tuple(rest.split(":", names - 1)) if colon else ()
    most = (9 if kind == "tree" else 1) if "=" in usage else 0
    if 0 in numbers or not (kind == "trim") <= len(numbers) <= most or len(inner) != names or "" in inner:
        raise wrong
    return Written(kind, numbers, inner, draw)


def refuse_misspelt(name: str) -> None:
    """Refuses what is nearly the name of a kind of drafter, and no path.

    >>> refuse_misspelt("prompt_lookp=2")
    Traceback (most recent call last):
    ValueError: there is no drafter 'prompt_lookp=2': did you mean prompt_lookup=NUMBER, the fewest tokens to match?
    """
    if not name:
        raise ValueError("the drafter is '': expected the name of a model, or of another drafter")
    kind, usages = name.partition(":")[0].partition("=")[0], MADE | OWN_LAYERS | {name: name for name in COUNTED}
    near = difflib.get_close_matches(kind, usages, n=1, cutoff=0.75)
    if near and not Path(name).expanduser().exists():
        raise ValueError(f"there is no drafter {name!r}: did you mean {usages[near[0]]}?")


def is_model(name: str) -> bool:
    """Whether a name is that of a model, and not of a drafter that is made of something.

    >>> is_model("debian-t5-draft"), is_model("tree=4x2:debian-t5-draft"), is_model("prompt_lookup+debian-t5-draft")
    (True, False, False)
    """
    kind = name.partition(":")[0].partition("=")[0]
    return len(parts(name)) == 1 and kind not in {*MADE, *OWN_LAYERS, *COUNTED}


def parts(name: str) -> list[str]:
    """The drafters of a name, which + separates; but no + of a path that exists does.

    >>> parts("prompt_lookup+greedy:debian-t5-draft")
    ['prompt_lookup', 'greedy:debian-t5-draft']
    """
    found, pieces = [], name.split("+")
    while pieces:
        path = pieces[0].rpartition(":")[2]  # or the beginning of one: the longest that exists counts
        ends = (n for n in range(len(pieces), 1, -1) if Path("+".join([path, *pieces[1:n]])).expanduser().exists())
        end = next(ends, 1)
        found.append("+".join(pieces[:end]))
        pieces = pieces[end:]
    return found
