"""Drafters by their names on the command line: NAME=NUMBERS:INNER, joined by +."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxspec.cli import names
from jaxspec.cli.options import DRAFT, TARGET

if TYPE_CHECKING:
    from jaxspec.core import BoundDrafter, Model

# orders of tables of held-out references
COUNTED = {"unigram": 1, "bigram": 2, "trigram": 3, "4-gram": 4}
# the roles of the names after a colon
MODEL = "model"
DRAFTER = "drafter"
HEAD = "head"
STORE = "store"


class Written(NamedTuple):
    """The parts of a drafter's name: kind, numbers after the =, names after the colon (for
    `skip_layers`, the layers on both sides of it), and how a tree draws children.
    """

    name: str
    kind: str
    numbers: tuple[int, ...] = ()
    inner: tuple[str, ...] = ()
    draw: str = ""


def parse(name: str) -> Written | None:
    """Parses a name; returns None for a model's. Raises ValueError on a misspelt drafter.

    >>> parse("tree=4x2-mixed:debian-t5-draft")[1:]
    ('tree', (4, 2), ('debian-t5-draft',), 'mixed')
    >>> parse("skip_layers=5x7:6").inner, parse("debian-t5-draft")
    (('5x7', '6'), None)
    >>> parse("prompt_lookp=2")
    Traceback (most recent call last):
    ValueError: there is no drafter 'prompt_lookp=2': did you mean 'prompt_lookup=2'? It is written ...
    """
    front, colon, inner_names = name.partition(":")
    form_name, _, written = front.partition("=")
    if form_name not in KINDS:
        _check_spelling(name, form_name)
        return None
    form = KINDS[form_name]
    wrong = ValueError(f"the drafter is {name!r}: expected {form.usage}")
    if form_name == "skip_layers":  # its layers stand on both sides of the colon
        sides = tuple(f"{written}{colon}{inner_names}".split(":"))
        if not _are_layers(sides):
            raise wrong
        return Written(name, form_name, inner=sides)
    draw = ""
    if form_name in TREES:
        written, _, draw = written.partition("-")
    numbers = ()
    if written:  # 0 marks a number that cannot be read
        numbers = tuple(int(number) if number.isdecimal() else 0 for number in written.split("x"))
    inner = ()
    if colon:
        inner = tuple(inner_names.split(":", len(form.inner) - 1))
    # A retrieval without a folder is built from held-out texts.
    is_counted = form_name == "retrieval" and not colon
    numbers_fit = form.least <= len(numbers) <= form.most and 0 not in numbers
    names_fit = (len(inner) == len(form.inner) and "" not in inner) or is_counted
    if not (numbers_fit and names_fit):
        raise wrong
    return Written(name, form_name, numbers, inner, draw)


def _check_spelling(name: str, form_name: str) -> None:
    """Raises ValueError if a name is empty, or does not exist and is nearly a kind of drafter."""
    if not name:
        raise ValueError("the drafter is '': expected the name of a model, or of another drafter")
    closest = difflib.get_close_matches(form_name, KINDS, n=1, cutoff=0.75)
    if closest and not Path(name).expanduser().exists():
        suggestion = closest[0] + name.removeprefix(form_name)
        usage = KINDS[closest[0]].usage
        form = "" if usage == suggestion else f" It is written {usage}"
        raise ValueError(f"there is no drafter {name!r}: did you mean {suggestion!r}?{form}")


def _are_layers(sides: Sequence[str]) -> bool:
    """Returns whether texts list layers, counted from 0, such as 5x7; one of the two may be empty.

    >>> _are_layers(["5x7", ""]), _are_layers(["", ""]), _are_layers(["5x"])
    (True, False, False)
    """
    are_lists = all(re.fullmatch(r"([0-9]+(x[0-9]+)*)?", side) for side in sides)
    return are_lists and any(sides) and len(sides) <= 2


def is_model(name: str) -> bool:
    """Returns whether a name means a model rather than a drafter made of something.

    >>> (
    ...     is_model("debian-t5-draft"),
    ...     is_model("tree=4x2:debian-t5-draft"),
    ...     is_model("prompt_lookup+debian-t5-draft"),
    ... )
    (True, False, False)
    """
    return len(parts(name)) == 1 and re.split("[=:]", name)[0] not in KINDS


def parts(name: str) -> list[str]:
    """Splits a name at each + into drafters, but never inside an existing path.

    >>> parts("prompt_lookup+greedy:debian-t5-draft")
    ['prompt_lookup', 'greedy:debian-t5-draft']
    """
    joined = []
    pieces = name.split("+")
    while pieces:
        # A path may contain +: join the most pieces that make an existing path.
        path = pieces[0].rpartition(":")[2]
        ends = (
            end
            for end in range(len(pieces), 1, -1)
            if Path("+".join([path, *pieces[1:end]])).expanduser().exists()
        )
        end = next(ends, 1)
        joined.append("+".join(pieces[:end]))
        pieces = pieces[end:]
    return joined


def default(target: str) -> str:
    """Returns the default drafter: the target's sibling, else prompt_lookup, with a notice."""
    name = _sibling(target)
    if name is not None:
        return name
    print(
        f"No model is known that drafts for {target}: prompt_lookup drafts, which copies from the "
        "prompt and the text so far (--draft NAME names another, --draft none decodes plainly).",
        file=sys.stderr,
    )
    return "prompt_lookup"


def default_model(target: str) -> str:
    """Returns the default drafter, a model. Raises ValueError if the target has no sibling."""
    name = _sibling(target)
    if name is not None:
        return name
    raise ValueError(
        f"--target {target} needs a --draft here, a smaller model; `jaxspec bench` measures "
        "others, too"
    )


def _sibling(target: str) -> str | None:
    from jaxspec.weights import loading

    if target == TARGET:
        return DRAFT
    name = Path(target).name.removesuffix("-base") + "-small"
    if target.endswith("-base") and name in loading.shipped():
        return name
    return None


def check(name: str, dtype: str = "float32") -> None:
    """Raises ValueError if a name, or a model or folder in it, does not exist. Skips hub ids."""
    from jaxspec.draft_heads import load
    from jaxspec.drafters.lookups import datastore
    from jaxspec.weights import loading

    for role, inner in _leaves(name):
        if role == MODEL:
            names.check_model(inner, dtype)
        elif role == STORE:
            datastore.read_manifest(Path(inner))
        elif not loading.is_hub_id(inner):
            load.find(inner)


def file_digests(name: str) -> dict[str, dict[str, str]]:
    """Returns the digests of the files of a model or a drafter, by the names of its parts.

    Random weights have no files; their name defines them.
    """
    from jaxspec.draft_heads import load
    from jaxspec.files import digests
    from jaxspec.weights import loading

    find = {MODEL: loading.find, STORE: Path, HEAD: load.find}
    leaves = [(role, inner) for role, inner in _leaves(name) if not inner.startswith(names.RANDOM)]
    return {inner: digests.of_files(find[role](inner)) for role, inner in leaves}


def _leaves(name: str) -> Iterator[tuple[str, str]]:
    """Yields the models, heads and datastores in a drafter's name, each with its role.

    >>> list(_leaves("tree=4x2:debian-t5-draft+cascade:debian-t5-small:prompt_lookup+head:a"))
    [('model', 'debian-t5-draft'), ('model', 'debian-t5-small'), ('head', 'a')]
    """
    for drafter_name in parts(name):
        written = parse(drafter_name)
        if written is None:
            yield MODEL, drafter_name
            continue
        for role, inner in zip(KINDS[written.kind].inner, written.inner, strict=False):
            yield from _leaves(inner) if role in (MODEL, DRAFTER) else [(role, inner)]


def drafter(
    name: str,
    load: Callable[[str], Model],
    target: Model | None = None,
    references: Callable[[], Sequence[str]] | None = None,
) -> Model | BoundDrafter:
    """Makes a drafter by its name; several names joined by + make a `fallback`."""
    return Maker(load, target, references).drafter(name)


class Maker(NamedTuple):
    """Makes drafters by their names."""

    load: Callable[[str], Model]  # loads the models among them
    # the model to draft for; a datastore must have its vocabulary
    target: Model | None
    # texts that n-grams are counted on; None rejects n-grams
    references: Callable[[], Sequence[str]] | None
    head: Any = None  # the target's trimmed head

    def drafter(self, name: str) -> Model | BoundDrafter:
        """Makes a drafter by its name."""
        from jaxspec import drafters
        from jaxspec.drafters.share_encoder import with_shared_encoder

        several = parts(name)
        if len(several) > 1:
            return drafters.fallback(*map(self.drafter, several))
        written = parse(name)
        if written is None:
            if self.target is None:
                return self.load(name)
            return with_shared_encoder(self.load(name), self.target)
        if KINDS[written.kind].of_target and self.target is None:
            raise ValueError(
                f"the drafter is {name!r}, which is made of the target: expected a target"
            )
        return KINDS[written.kind].make(drafters, self, written)

    def inner(self, written: Written, index: int = 0) -> Any:
        """Makes the drafter or model named after the colon."""
        from jaxspec.core import Model

        inner = self.drafter(written.inner[index])
        if KINDS[written.kind].inner[index] == MODEL and not isinstance(inner, Model):
            raise ValueError(f"the drafter is {written.name!r}: expected a model after the colon")
        return inner


def _usual(d: Any, m: Maker, w: Written) -> BoundDrafter:
    """Calls the factory of that name in `d` (`jaxspec.drafters`) with the parts and numbers."""
    return getattr(d, w.kind)(*(m.inner(w, index) for index in range(len(w.inner))), *w.numbers)


def _prompt_lookup(d: Any, m: Maker, w: Written) -> BoundDrafter:
    if w.numbers:  # the fewest tokens to match; the most is 3, or this
        return d.prompt_lookup(max(3, *w.numbers), *w.numbers)
    return d.prompt_lookup()


def _head(d: Any, m: Maker, w: Written) -> BoundDrafter:
    from jaxspec.draft_heads.load import load_drafter

    assert m.target is not None
    return load_drafter(w.inner[0], target=m.target, head=m.head)


def _retrieval(d: Any, m: Maker, w: Written) -> BoundDrafter | Model:
    if w.inner:
        return d.retrieval(w.inner[0], m.target)
    return _counted(d, m, w)


def _share(d: Any, m: Maker, w: Written) -> Model:
    from jaxspec.vocab import cross_tokenizer

    if m.target is None:
        return m.inner(w)
    return cross_tokenizer.share_vocabulary(m.inner(w), m.target)


def _trim(d: Any, m: Maker, w: Written) -> Model | BoundDrafter:
    from jaxspec.vocab import trim

    name = w.inner[0]
    form = parse(name)
    # These drafters use the target's head: trim that.
    if form is not None and form.kind in WITH_HEAD and m.target is not None:
        head = trim.trim_vocabulary(m.target, size=w.numbers[0])
        return m._replace(head=head).drafter(name)
    model = m.inner(w)
    try:
        return trim.trim_vocabulary(model, size=w.numbers[0])
    except ValueError as error:
        raise ValueError(f"the drafter is {w.name!r}: {error}") from None


def _tree(d: Any, m: Maker, w: Written) -> BoundDrafter:
    draw = {"draw": w.draw} if w.draw else {}
    return d.tree(m.inner(w), w.numbers or None, **draw)


def _tree_of_two(d: Any, m: Maker, w: Written) -> BoundDrafter:
    both = [m.inner(w, index) for index in range(2)]
    draw = {"draw": w.draw} if w.draw else {}
    return d.tree(both, w.numbers or None, **draw)


def _cascade(d: Any, m: Maker, w: Written) -> BoundDrafter:
    middle = m.inner(w)  # the inner drafter drafts for it
    return d.cascade(middle, m._replace(target=middle).inner(w, 1), gamma=(*w.numbers, 3)[0])


def _early_exit(d: Any, m: Maker, w: Written) -> BoundDrafter:
    return d.early_exit(m.target, w.numbers[0], head=m.head)


def _saturated_exit(d: Any, m: Maker, w: Written) -> BoundDrafter:
    return d.saturated_exit(m.target, *w.numbers, head=m.head)


def _quantised(d: Any, m: Maker, w: Written) -> Model:
    drafter = d.quantised(m.target, bits=(*w.numbers, 8)[0])
    return drafter.models[0]  # a Model, so that other drafters can be made of it


def _skip_layers(d: Any, m: Maker, w: Written) -> BoundDrafter:
    layers = [tuple(map(int, side.split("x"))) if side else () for side in w.inner]
    return d.skip_layers(m.target, *layers, head=m.head)


def _windowed(d: Any, m: Maker, w: Written) -> BoundDrafter:
    return d.windowed(m.target, *w.numbers)


def _counted(d: Any, m: Maker, w: Written) -> BoundDrafter | Model:
    """Makes n-gram tables, or a datastore, of texts."""
    from jaxspec.drafters.lookups import datastore
    from jaxspec.files import corpus

    name = w.kind
    target = m.target
    if m.references is None or target is None:
        expected = "the folder of a table, such as `jaxspec train debian-t5-bigram` writes"
        if name not in COUNTED:
            expected = "retrieval:FOLDER, a folder that `jaxspec datastore` wrote"
        raise ValueError(
            f"the drafter is {name!r}, made of held-out texts in bench and measure: expected "
            f"{expected}"
        )
    texts = m.references()
    if not texts:
        raise ValueError(f"no held-out texts are left to make a {name} of: take fewer prompts")
    if name in COUNTED:
        return d.ngram(texts, target, order=COUNTED[name])._replace(name=name)
    vocabulary = datastore.vocabulary_of(target.tokenizer)
    begin = target.lm.limits.first_tokens
    rows = corpus.token_rows(texts, target.tokenizer, encoder=bool(begin))
    store = datastore.build(
        rows, vocab_size=target.lm.vocab_size, begin=begin, vocabulary=vocabulary
    )
    return d.retrieval(store, target)


class DrafterSpelling(NamedTuple):
    """A kind of drafter, written NAME=NUMBERS:INNER."""

    usage: str  # the form, as messages say it
    inner: tuple[str, ...] = ()  # the role of each name after the colon
    least: int = 0  # how many numbers may follow the =
    most: int = 0
    # called with `jaxspec.drafters`, a maker and the parts of the name
    make: Callable[[Any, Maker, Written], Any] = _usual
    of_target: bool = False  # whether the target is a part of it


_TRIM = "trim=NUMBER:NAME, the number of tokens to draft; NAME may be early_exit=4 or head:FOLDER"
_TREE = "tree:NAME or tree=4x2x1:NAME, with how children are drawn tree=4x2x1-mixed:NAME"
_TREE_OF_TWO = (
    "tree_of_two:NAME:NAME or tree_of_two=4x2x1:NAME:NAME, with how children are drawn as in tree"
)
TREES = ("tree", "tree_of_two")  # kinds whose children are drawn as the name says
_SATURATED = (
    "saturated_exit, saturated_exit=2 (layers before the first head) or saturated_exit=2x5 (and "
    "the last)"
)
_HORIZONTAL = "horizontal_cascade:NAME:NAME or horizontal_cascade=2:NAME:NAME"
_WINDOWED = "windowed, windowed=512 (the last tokens) or windowed=512x4 (and the first)"
BARE = (
    "forced",
    "online_ngram",
    "token_recycling",
    "suffix",
    "lookahead",
    "jacobi",
    "uniform",
)  # kinds without parts
# kinds that use the target's head, which may be trimmed
WITH_HEAD = ("head", "early_exit", "saturated_exit", "skip_layers")
KINDS = {
    "prompt_lookup": DrafterSpelling(
        "prompt_lookup=NUMBER, the fewest tokens to match", most=1, make=_prompt_lookup
    ),
    **{name: DrafterSpelling(name) for name in BARE},
    **{name: DrafterSpelling(name, make=_counted, of_target=True) for name in COUNTED},
    "retrieval": DrafterSpelling("retrieval:FOLDER", (STORE,), make=_retrieval),
    "head": DrafterSpelling("head:FOLDER", (HEAD,), make=_head, of_target=True),
    "greedy": DrafterSpelling("greedy:NAME", (DRAFTER,)),
    "share": DrafterSpelling("share:NAME", (MODEL,), make=_share),
    "trim": DrafterSpelling(_TRIM, (MODEL,), least=1, most=1, make=_trim),
    "without_backoff": DrafterSpelling(
        "without_backoff:NAME or without_backoff=NUMBER:NAME", (MODEL,), most=1
    ),
    "tree": DrafterSpelling(_TREE, (DRAFTER,), most=9, make=_tree),
    "tree_of_two": DrafterSpelling(_TREE_OF_TWO, (DRAFTER, DRAFTER), most=9, make=_tree_of_two),
    "dynamic_tree": DrafterSpelling(
        "dynamic_tree:NAME or dynamic_tree=32:NAME", (DRAFTER,), most=1
    ),
    "sequences": DrafterSpelling("sequences:NAME or sequences=4:NAME", (DRAFTER,), most=1),
    "cascade": DrafterSpelling(
        "cascade:NAME:INNER or cascade=3:NAME:INNER", (MODEL, DRAFTER), most=1, make=_cascade
    ),
    "horizontal_cascade": DrafterSpelling(_HORIZONTAL, (DRAFTER, DRAFTER), most=1),
    "parallel": DrafterSpelling(
        "parallel=MASK_ID:NAME or parallel=MASK_IDxMOST:NAME", (MODEL,), least=1, most=2
    ),
    "early_exit": DrafterSpelling(
        "early_exit=4", least=1, most=1, make=_early_exit, of_target=True
    ),
    "saturated_exit": DrafterSpelling(_SATURATED, most=2, make=_saturated_exit, of_target=True),
    "quantised": DrafterSpelling(
        "quantised or quantised=4 (bits)", most=1, make=_quantised, of_target=True
    ),
    "skip_layers": DrafterSpelling(
        "skip_layers=5x7:6 (attention:mlp)", make=_skip_layers, of_target=True
    ),
    "windowed": DrafterSpelling(_WINDOWED, most=2, make=_windowed, of_target=True),
}
