"""What the names of drafters on a command line mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.base import Bound, Model

COUNTED = {"unigram": 1, "bigram": 2, "trigram": 3, "4-gram": 4}  # tables of held-out references
MADE = {  # how drafters are written that are no model; numbers may be left out, but for that of trim
    "prompt_lookup": "prompt_lookup=NUMBER, the fewest tokens to match",
    "online_ngram": "online_ngram",
    "token_recycling": "token_recycling",
    "retrieval": "retrieval:FOLDER",
    "greedy": "greedy:NAME",
    "head": "head:FOLDER",
    "share": "share:NAME",
    "trim": "trim=NUMBER:NAME, the number of tokens to draft",
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


def drafter(
    name: str,
    load: Callable[[str], Model],
    target: Model | None = None,
    references: Callable[[], Sequence[str]] = tuple,
) -> Model | Bound:
    """A drafter by its name, as `MADE` and `COUNTED` have them; several with + between: the first that has a draft.

    Args:
        name: a model's, or one of a drafter. A + in a path that exists belongs to the path.
        load: of the models among them.
        target: the model to draft for; if given, a datastore must have been built with its vocabulary.
        references: texts that n-grams are counted on, and a datastore without a folder is built of.

    Raises:
        ValueError: no such drafter, or a datastore that was built with another vocabulary.
    """
    from jaxspec import drafters, heads, shared_vocabulary, trim
    from jaxspec.base import Model

    if len(several := parts(name)) > 1:
        return drafters.fallback(*[drafter(part, load, target, references) for part in several])
    head, colon, rest = name.partition(":")
    kind, _, given = head.partition("=")
    if name in (*COUNTED, "retrieval") and target is not None:
        return _counted(name, target, references())
    if kind in OWN_LAYERS:
        return _own_layers(name, kind, given + colon + rest, target)
    if kind not in MADE:
        return load(name)
    given, _, draw = given.partition("-") if kind == "tree" else (given, "", "")
    sizes: tuple[int, ...] = tuple(int(size) if size.isdecimal() else 0 for size in given.split("x")) if given else ()
    most = (9 if kind == "tree" else 1) if "=" in MADE[kind] else 0
    fits = 0 not in sizes and (kind == "trim") <= len(sizes) <= most
    if not fits or bool(colon) != (":" in MADE[kind]):
        raise ValueError(f"the drafter is {name!r}: expected {MADE[kind]}")
    if kind == "retrieval":
        return drafters.retrieval(rest, target)
    if kind == "prompt_lookup":
        return drafters.prompt_lookup(max(3, *sizes), *sizes) if sizes else drafters.prompt_lookup()
    if not colon:
        return getattr(drafters, kind)()
    if kind == "head":
        if target is None:
            raise ValueError(f"the drafter is {name!r}: it reads a target's hidden states, and there is no target here")
        return heads.load_drafter(rest, target=target)
    if kind == "greedy":
        return drafters.greedy(drafter(rest, load, target))
    if kind in ("cascade", "horizontal_cascade"):
        first, inner_colon, inner = rest.partition(":")
        if not inner_colon:
            raise ValueError(f"the drafter is {name!r}: expected {MADE[kind]}")
        if kind == "horizontal_cascade":
            before, after = (drafter(part, load, target) for part in (first, inner))
            return drafters.horizontal_cascade(before, after, *sizes)
        return drafters.cascade(load(first), drafter(inner, load, target), gamma=sizes[0] if sizes else 3)
    made = drafter(rest, load, target)
    if kind == "tree":
        options: Any = {"draw": draw} if draw else {}
        return drafters.tree(made, sizes or None, **options)
    if kind in ("dynamic_tree", "sequences"):
        return getattr(drafters, kind)(made, *sizes)
    if not isinstance(made, Model):
        raise ValueError(f"the drafter is {name!r}: expected a model after the colon")
    if kind == "trim":
        return trim.trim_vocabulary(made, size=next(iter(sizes)))
    if kind == "share":
        return made if target is None else shared_vocabulary.share_vocabulary(made, target)
    return drafters.without_backoff(made, *sizes)


def _own_layers(name: str, kind: str, layers: str, target: Model | None) -> Bound:
    """The target's own layers: "4" of an early exit, "5x7:6" of what is skipped."""
    from jaxspec import drafters

    sets = [part.split("x") if part else [] for part in layers.split(":")]
    good = any(sets) and all(number.isdecimal() for part in sets for number in part)
    if not good or (len(sets) > 2 if kind == "skip_layers" else sum(map(len, sets)) > 1):
        raise ValueError(f"the drafter is {name!r}: expected {OWN_LAYERS[kind]}")
    if target is None:
        raise ValueError(f"the drafter is {name!r}, which is made of the target's layers: expected a target")
    if kind == "early_exit":
        return drafters.early_exit(target, int(sets[0][0]))
    return drafters.skip_layers(target, *([int(number) for number in part] for part in sets))


def is_model(name: str) -> bool:
    """Whether a name is that of a model, and not of a drafter that is made of something.

    >>> is_model("debian-t5-small"), is_model("tree=4x2:debian-t5-small"), is_model("prompt_lookup+debian-t5-small")
    (True, False, False)
    """
    kind = name.partition(":")[0].partition("=")[0]
    return len(parts(name)) == 1 and kind not in {*MADE, *OWN_LAYERS, *COUNTED}


def parts(name: str) -> list[str]:
    """The drafters of a name, which + separates; but no + of a path that exists does.

    >>> parts("prompt_lookup+greedy:debian-t5-small")
    ['prompt_lookup', 'greedy:debian-t5-small']
    """
    found, pieces = [], name.split("+")
    while pieces:
        path = pieces[0].rpartition(":")[2]  # or the beginning of one: the longest that exists counts
        ends = (n for n in range(len(pieces), 1, -1) if Path("+".join([path, *pieces[1:n]])).expanduser().exists())
        end = next(ends, 1)
        found.append("+".join(pieces[:end]))
        pieces = pieces[end:]
    return found


def _counted(name: str, target: Model, texts: Sequence[str]) -> Bound | Model:
    """N-gram tables, or a datastore, of texts."""
    from jaxspec import corpus, datastore, drafters

    if not texts:
        raise ValueError(f"no held-out texts are left to make a {name} of: take fewer prompts")
    if name in COUNTED:
        return drafters.ngram(texts, target, order=COUNTED[name])._replace(name=name)
    about = {"vocab_size": target.lm.vocab_size, "start_token": target.lm.start_token}
    rows, words = corpus.token_rows(texts, target.tokenizer), datastore.vocabulary_of(target.tokenizer)
    return drafters.retrieval(datastore.build(rows, vocabulary=words, **about), target)
