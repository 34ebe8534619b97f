"""Drafters by their names on a command line: NAME=NUMBERS:INNER, and several of these with + between them."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxspec.cli import names
from jaxspec.cli.options import DRAFT, TARGET

if TYPE_CHECKING:
    from jaxspec.core import BoundDrafter, Model

COUNTED = {"unigram": 1, "bigram": 2, "trigram": 3, "4-gram": 4}  # orders of tables of held-out references
OF_TARGET = ("head", "early_exit", "skip_layers")  # made of the target, whose head may be trimmed


class Kind(NamedTuple):
    """The form of a kind of drafter, NAME=NUMBERS:INNER.

    Attributes:
        usage: what messages say.
        inner: how many names follow the colon.
        models: how many of them, from the first on, must be models.
        least, most: how many numbers may follow the =.
    """

    usage: str
    inner: int = 0
    models: int = 0
    least: int = 0
    most: int = 0


_TRIM = "trim=NUMBER:NAME, the number of tokens to draft; NAME may be early_exit=4 or head:FOLDER"
_TREE = "tree:NAME or tree=4x2x1:NAME, with how children are drawn tree=4x2x1-mixed:NAME"
_HORIZONTAL = "horizontal_cascade:NAME:NAME or horizontal_cascade=2:NAME:NAME"
KINDS = {  # `jaxspec.drafters` has a factory of each name, which `drafter` calls with inner drafters and numbers
    "prompt_lookup": Kind("prompt_lookup=NUMBER, the fewest tokens to match", most=1),
    "online_ngram": Kind("online_ngram"),
    "token_recycling": Kind("token_recycling"),
    "suffix": Kind("suffix"),
    "lookahead": Kind("lookahead"),
    "jacobi": Kind("jacobi"),
    "retrieval": Kind("retrieval:FOLDER", inner=1),
    "head": Kind("head:FOLDER", inner=1),
    "greedy": Kind("greedy:NAME", inner=1),
    "share": Kind("share:NAME", inner=1, models=1),
    "trim": Kind(_TRIM, inner=1, models=1, least=1, most=1),
    "without_backoff": Kind("without_backoff:NAME or without_backoff=NUMBER:NAME", inner=1, models=1, most=1),
    "tree": Kind(_TREE, inner=1, most=9),
    "dynamic_tree": Kind("dynamic_tree:NAME or dynamic_tree=32:NAME", inner=1, most=1),
    "sequences": Kind("sequences:NAME or sequences=4:NAME", inner=1, most=1),
    "cascade": Kind("cascade:NAME:INNER or cascade=3:NAME:INNER", inner=2, models=1, most=1),
    "horizontal_cascade": Kind(_HORIZONTAL, inner=2, most=1),
    "early_exit": Kind("early_exit=4", least=1, most=1),
    "quantised": Kind("quantised or quantised=4 (bits)", most=1),
    "skip_layers": Kind("skip_layers=5x7:6 (attention:mlp)"),
}


class Written(NamedTuple):
    """A drafter's name in parts: its kind, numbers after the =, names after the colon (of `skip_layers` the layers on
    either side of it), and, of a tree, how children are drawn."""

    kind: str
    numbers: tuple[int, ...] = ()
    inner: tuple[str, ...] = ()
    draw: str = ""


def parse(name: str) -> Written | None:
    """Takes a name apart; returns None if it is that of a model, and refuses what is nearly another and no path.

    >>> parse("tree=4x2-mixed:debian-t5-draft")
    Written(kind='tree', numbers=(4, 2), inner=('debian-t5-draft',), draw='mixed')
    >>> parse("skip_layers=5x7:6").inner, parse("debian-t5-draft")
    (('5x7', '6'), None)
    >>> parse("prompt_lookp=2")
    Traceback (most recent call last):
    ValueError: there is no drafter 'prompt_lookp=2': did you mean prompt_lookup=NUMBER, the fewest tokens to match?
    """
    front, colon, rest = name.partition(":")
    kind, _, written = front.partition("=")
    if kind not in KINDS:
        if not name:
            raise ValueError("the drafter is '': expected the name of a model, or of another drafter")
        usages = {kind: form.usage for kind, form in KINDS.items()} | {counted: counted for counted in COUNTED}
        near = difflib.get_close_matches(kind, usages, n=1, cutoff=0.75)
        if near and not Path(name).expanduser().exists():
            raise ValueError(f"there is no drafter {name!r}: did you mean {usages[near[0]]}?")
        return None
    form = KINDS[kind]
    wrong = ValueError(f"the drafter is {name!r}: expected {form.usage}")
    if kind == "skip_layers":  # layers are counted from 0, and either side may be empty
        sides = tuple(f"{written}{colon}{rest}".split(":"))
        if len(sides) > 2 or not any(sides) or not all(re.fullmatch(r"([0-9]+(x[0-9]+)*)?", side) for side in sides):
            raise wrong
        return Written(kind, inner=sides)
    written, _, draw = written.partition("-") if kind == "tree" else (written, "", "")
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in written.split("x")) if written else ()
    inner = tuple(rest.split(":", form.inner - 1)) if colon else ()
    if 0 in numbers or not form.least <= len(numbers) <= form.most or len(inner) != form.inner or "" in inner:
        raise wrong
    return Written(kind, numbers, inner, draw)


def is_model(name: str) -> bool:
    """Tells the name of a model from that of a drafter that is made of something.

    >>> is_model("debian-t5-draft"), is_model("tree=4x2:debian-t5-draft"), is_model("prompt_lookup+debian-t5-draft")
    (True, False, False)
    """
    return len(parts(name)) == 1 and re.split("[=:]", name)[0] not in {*KINDS, *COUNTED}


def parts(name: str) -> list[str]:
    """Splits a name at each + into drafters; but no + of a path that exists separates.

    >>> parts("prompt_lookup+greedy:debian-t5-draft")
    ['prompt_lookup', 'greedy:debian-t5-draft']
    """
    joined, pieces = [], name.split("+")
    while pieces:
        path = pieces[0].rpartition(":")[2]  # or the beginning of one: the longest that exists counts
        ends = (n for n in range(len(pieces), 1, -1) if Path("+".join([path, *pieces[1:n]])).expanduser().exists())
        end = next(ends, 1)
        joined.append("+".join(pieces[:end]))
        pieces = pieces[end:]
    return joined


def default(target: str) -> str:
    """Names the drafter where none is chosen: the target's model, else a look-up, with a line on standard error."""
    if (name := _sibling(target)) is not None:
        return name
    print(
        f"No model is known that drafts for {target}: prompt_lookup drafts, which copies from the prompt and the text "
        "so far (--draft NAME names another, --draft none decodes plainly).",
        file=sys.stderr,
    )
    return "prompt_lookup"


def default_model(target: str) -> str:
    """Names the drafter where none is chosen and only a model will do; refuses a target that has none."""
    if (name := _sibling(target)) is not None:
        return name
    raise ValueError(
        f"--target {target} needs a --draft here: a smaller model with its vocabulary. `jaxspec bench` also measures "
        "drafters that are no models, such as prompt_lookup"
    )


def _sibling(target: str) -> str | None:
    """Names the shipped model that drafts for a target."""
    from jaxspec.weights import loading

    if target == TARGET:
        return DRAFT
    name = Path(target).name.removesuffix("-base") + "-small"
    return name if target.endswith("-base") and name in loading.shipped() else None


def check(name: str, dtype: str = "float32") -> None:
    """Refuses a name, or a model or folder in it, that is not there, before any is loaded; the hub is not asked."""
    from jaxspec.draft_heads import load
    from jaxspec.drafters.lookups import datastore
    from jaxspec.weights import loading

    for part in parts(name):
        if part in (*COUNTED, "retrieval"):
            continue
        if (written := parse(part)) is None:
            names.check_model(part, dtype)
        elif written.kind == "retrieval":
            datastore.read_manifest(Path(written.inner[0]))
        elif written.kind == "head":
            if not loading.is_hub_id(written.inner[0]):
                load.find(written.inner[0])
        elif written.kind != "skip_layers":
            for inner in written.inner:
                check(inner, dtype)


def drafter(
    name: str,
    load: Callable[[str], Model],
    target: Model | None = None,
    references: Callable[[], Sequence[str]] | None = None,
) -> Model | BoundDrafter:
    """Makes a drafter by its name, which `KINDS` has; of several with + between them, the first that has a draft.

    Args:
        name: a model's, or one of a drafter. A + in a path that exists belongs to the path.
        load: a function that loads the models among them.
        target: the model to draft for; if there is one, a datastore must have been built with its vocabulary.
        references: texts that n-grams are counted on, and a datastore without a folder is built of; None: both
            are refused.
    """
    from jaxspec import drafters
    from jaxspec.core import Model
    from jaxspec.drafters.share_encoder import with_shared_encoder
    from jaxspec.vocab import cross_tokenizer, trim

    def model(name: str) -> Model:
        return load(name) if target is None else with_shared_encoder(load(name), target)

    if len(several := parts(name)) > 1:
        return drafters.fallback(*[drafter(part, load, target, references) for part in several])
    if name in (*COUNTED, "retrieval") and target is not None:
        return _counted(name, target, references)
    written = parse(name)
    if written is None:
        return model(name)
    kind, numbers, inner, draw = written
    if kind in OF_TARGET:
        return _of_target(name, written, target)
    if kind == "trim" and (trimmed := parse(inner[0])) is not None and trimmed.kind in OF_TARGET:
        return _of_target(name, trimmed, target, head_size=numbers[0])
    if kind == "quantised":
        if target is None:
            raise ValueError(f"the drafter is {name!r}, a quantised copy of the target: expected a target")
        return drafters.quantised(target, bits=(*numbers, 8)[0]).models[0]  # the model, which others can be made of
    if kind == "retrieval":
        return drafters.retrieval(inner[0], target)
    if kind == "prompt_lookup":
        return drafters.prompt_lookup(max(3, *numbers), *numbers) if numbers else drafters.prompt_lookup()
    if kind == "cascade":
        middle = model(inner[0])  # for which the inner one drafts
        return drafters.cascade(middle, drafter(inner[1], load, middle, references), gamma=(*numbers, 3)[0])
    made_of: list[Any] = [drafter(part, load, target, references) for part in inner]
    if not all(isinstance(part, Model) for part in made_of[: KINDS[kind].models]):
        raise ValueError(f"the drafter is {name!r}: expected a model after the colon")
    if kind == "tree":
        how: dict[str, Any] = {"draw": draw} if draw else {}
        return drafters.tree(made_of[0], numbers or None, **how)
    if kind == "share":
        return made_of[0] if target is None else cross_tokenizer.share_vocabulary(made_of[0], target)
    if kind == "trim":
        try:
            return trim.trim_vocabulary(made_of[0], size=numbers[0])
        except ValueError as error:
            raise ValueError(f"the drafter is {name!r}: {error}") from None
    return getattr(drafters, kind)(*made_of, *numbers)


def _of_target(name: str, written: Written, target: Model | None, head_size: int | None = None) -> BoundDrafter:
    """Makes a drafter that reads the target's hidden states, or has its layers, with a head of `head_size` tokens."""
    from jaxspec import drafters
    from jaxspec.draft_heads.load import load_drafter
    from jaxspec.vocab import trim

    if target is None and written.kind == "head":
        raise ValueError(f"the drafter is {name!r}: it reads a target's hidden states, and there is no target here")
    if target is None:
        raise ValueError(f"the drafter is {name!r}, which is made of the target's layers: expected a target")
    head = None if head_size is None else trim.trim_vocabulary(target, size=head_size)
    if written.kind == "head":
        return load_drafter(written.inner[0], target=target, head=head)
    if written.kind == "early_exit":
        return drafters.early_exit(target, written.numbers[0], head=head)
    layers = [tuple(map(int, side.split("x"))) if side else () for side in written.inner]
    return drafters.skip_layers(target, *layers, head=head)


def _counted(name: str, target: Model, references: Callable[[], Sequence[str]] | None) -> BoundDrafter | Model:
    """Makes n-gram tables, or a datastore, of texts."""
    from jaxspec import drafters
    from jaxspec.drafters.lookups import datastore
    from jaxspec.files import corpus

    if references is None:
        if name in COUNTED:
            raise ValueError(
                f"the drafter is {name!r}: n-gram tables are counted from held-out texts in bench and measure; "
                "expected the folder of a counted table here, such as `jaxspec train debian-t5-bigram` writes"
            )
        raise ValueError(
            f"the drafter is {name!r}: a datastore is built from held-out texts in bench and measure; expected "
            "retrieval:FOLDER here, a folder that `jaxspec datastore` wrote"
        )
    if not (texts := references()):
        raise ValueError(f"no held-out texts are left to make a {name} of: take fewer prompts")
    if name in COUNTED:
        return drafters.ngram(texts, target, order=COUNTED[name])._replace(name=name)
    vocabulary = datastore.vocabulary_of(target.tokenizer)
    sizes = {"vocab_size": target.lm.vocab_size, "start_token": target.lm.limits.start_token}
    return drafters.retrieval(
        datastore.build(corpus.token_rows(texts, target.tokenizer), vocabulary=vocabulary, **sizes), target
    )
