"""Drafters as earlier versions spelt them, NAME=NUMBERS:INNER joined by +: read for one release."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

COUNTED = {"trigram": "ngram(order=3)", "4-gram": "ngram(order=4)"}
OF_TWO = ("cascade", "horizontal_cascade", "tree_of_two")  # two names follow the colon
OLD = re.compile(
    "(early_exit|prompt_lookup|quantised|saturated_exit|skip_layers|windowed)=.*"
    "|(cascade|dynamic_tree|greedy|head|horizontal_cascade|parallel|retrieval|sequences|share|tree"
    "|tree_of_two|trim|without_backoff)(=[^:]*)?:.*"
)
RENAMED = {
    "head": "load_drafter",
    "share": "share_vocabulary",
    "tree_of_two": "tree",
    "trim": "trim_vocabulary",
}
KEYWORDS = {"cascade": "gamma=", "quantised": "bits=", "trim": "size="}  # of a number
WITH_HEAD = ("head", "early_exit", "saturated_exit", "skip_layers")  # trim: the head they use


def translated(old: str) -> str:
    """Returns a drafter's name as it is spelt now; a name that is not in the old spelling stays.

    >>> translated("tree=4x2-mixed:debian-t5-draft"), translated("prompt_lookup=2+head:a")
    ("tree('debian-t5-draft', (4, 2), draw='mixed')", "fallback(prompt_lookup(3, 2), load_drafter('a'))")
    >>> translated("trim=512:early_exit=1"), translated("debian-t5-draft")
    ('early_exit(1, head=trim_vocabulary(target, size=512))', 'debian-t5-draft')
    """
    from jaxspec.draft_heads import by_name  # here, since it imports flax

    if by_name.is_call(old) or os.path.exists(old):
        return old
    if "+" in old:
        return f"fallback({', '.join(map(_argument, old.split('+')))})"
    front, colon, inner = old.partition(":")
    name, _, numbers = front.partition("=")
    if OLD.fullmatch(old) is None:
        return COUNTED.get(old, old)
    if name == "trim" and inner.replace("=", ":").partition(":")[0] in WITH_HEAD:
        call = _argument(inner).removesuffix(")")
        separator = ", " if "(" in call else "("
        return f"{call}{separator}head=trim_vocabulary(target, size={numbers}))"
    arguments = [_argument(x) for x in inner.split(":", int(name in OF_TWO))] if inner else []
    if name == "skip_layers":  # the numbers stood on both sides of the colon
        arguments = [_tuple(side) for side in f"{numbers}{colon}{inner}".split(":")]
    elif name == "prompt_lookup":  # the fewest tokens to match; the most was 3, or this
        arguments = [str(max(3, int(numbers))) if numbers.isdecimal() else "3", numbers]
    elif name in ("tree", "tree_of_two"):
        shape, _, draw = numbers.partition("-")
        if name in OF_TWO:
            arguments = [f"[{', '.join(arguments)}]"]
        arguments += [_tuple(shape)] if shape else []
        arguments += [f"draw={draw!r}"] if draw else []
    elif numbers:
        arguments += [KEYWORDS.get(name, "") + number for number in numbers.split("x")]
    return f"{RENAMED.get(name, name)}({', '.join(arguments)})"


def _argument(old: str) -> str:
    from jaxspec.draft_heads import by_name

    new = translated(old)
    return new if by_name.is_call(new) else repr(new)


def _tuple(numbers: str) -> str:
    """Returns numbers such as 4x2 as a tuple.

    >>> _tuple("4x2"), _tuple("4"), _tuple("")
    ('(4, 2)', '(4,)', '()')
    """
    end = "," if numbers and "x" not in numbers else ""
    return f"({numbers.replace('x', ', ')}{end})"


def new_spelling(written: str) -> str:
    """Returns a drafter's name as it is spelt now, with a line on standard error if it changed."""
    new = translated(written)
    if new != written:
        until = "(the old spelling is read until the next release)"
        print(f'--draft {written} is now spelt --draft "{new}" {until}', file=sys.stderr)
    return new


def new_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns a job's manifest with today's spelling of the drafter's name."""
    if not {"models", "options"} <= manifest.keys():
        return manifest  # damaged: comparing it with the new one names what it lacks
    models = {translated(name): value for name, value in manifest["models"].items()}
    if "draft" in models:  # its name and digests
        models["draft"] = [translated(models["draft"][0]), *models["draft"][1:]]
    options = manifest["options"]
    if options.get("draft"):
        options = options | {"draft": translated(options["draft"])}
    return manifest | {"models": models, "options": options}
