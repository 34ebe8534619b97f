"""What the names of drafters on a command line mean."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.cli import names
from jaxspec.cli.drafter_syntax import COUNTED, OWN_LAYERS, Written, parse, parts, refuse_misspelt
from jaxspec.cli.options import DRAFT, TARGET

if TYPE_CHECKING:
    from jaxspec.core import BoundDrafter, Model


def default(target: str) -> str:
    """The drafter of a target for which none is named: a model that is made for it, else a look-up, said in a line."""
    if (name := _sibling(target)) is not None:
        return name
    print(
        f"No model is known that drafts for {target}: prompt_lookup drafts, which copies from the prompt and the text "
        "so far (--draft NAME names another, --draft none decodes plainly).",
        file=sys.stderr,
    )
    return "prompt_lookup"


def default_model(target: str) -> str:
    """As `default`, where only a model will do.

    Raises:
        ValueError: there is none.
    """
    if (name := _sibling(target)) is not None:
        return name
    raise ValueError(
        f"--target {target} needs a --draft here: a smaller model with its vocabulary. `jaxspec bench` also measures "
        "drafters that are no models, such as prompt_lookup"
    )


def _sibling(target: str) -> str | None:
    """The shipped model that drafts for a target."""
    from jaxspec.weights import loading

    if target == TARGET:
        return DRAFT
    name = Path(target).name.removesuffix("-base") + "-small"
    return name if target.endswith("-base") and name in loading.shipped() else None


def check(name: str, dtype: str = "float32") -> None:
    """Refuses the name of a drafter that cannot be, before any model is loaded; the hub is not asked.

    Raises:
        ValueError: no such drafter, or one of its models or folders is not there.
    """
    from jaxspec.draft_heads import load
    from jaxspec.drafters.lookups import datastore
    from jaxspec.weights import loading

    for part in parts(name):
        if part in (*COUNTED, "retrieval"):
            continue
        if (written := parse(part)) is None:
            refuse_misspelt(part)
            names.check_model(part, dtype)
        elif written.kind == "retrieval":
            datastore.read_manifest(Path(written.inner[0]))
        elif written.kind == "head":
            if not loading.is_hub_id(written.inner[0]):
                load.find(written.inner[0])
        else:
            for inner in written.inner:
                check(inner, dtype)


def drafter(
    name: str,
    load: Callable[[str], Model],
    target: Model | None = None,
    references: Callable[[], Sequence[str]] | None = None,
) -> Model | BoundDrafter:
    """A drafter by its name, as `drafter_syntax` has them; several with + between: the first that has a draft.

    Args:
        name: a model's, or one of a drafter. A + in a path that exists belongs to the path.
        load: of the models among them.
        target: the model to draft for; if given, a datastore must have been built with its vocabulary.
        references: texts that n-grams are counted on, and a datastore without a folder is built of; None: both
            are refused.

    Raises:
        ValueError: no such drafter, a datastore that was built with another vocabulary, or no texts to count.
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
        refuse_misspelt(name)
        return model(name)
    kind, numbers, inner, draw, _ = written
    if kind in ("head", *OWN_LAYERS):
        return _of_target(name, written, target)
    if kind == "trim" and (own := parse(inner[0])) is not None and own.kind in ("head", *OWN_LAYERS):
        return _of_target(name, own, target, head_size=numbers[0])
    if kind == "retrieval":
        return drafters.retrieval(inner[0], target)
    if kind == "prompt_lookup":
        return drafters.prompt_lookup(max(3, *numbers), *numbers) if numbers else drafters.prompt_lookup()
    if kind == "cascade":
        middle = model(inner[0])  # for which the inner one drafts
        return drafters.cascade(middle, drafter(inner[1], load, middle, references), gamma=(*numbers, 3)[0])
    made = [drafter(part, load, target, references) for part in inner]
    if kind == "tree":
        options: dict[str, Any] = {"draw": draw} if draw else {}
        return drafters.tree(made[0], numbers or None, **options)
    if kind not in ("trim", "share", "without_backoff"):
        return getattr(drafters, kind)(*made, *numbers)
    (small,) = made
    if not isinstance(small, Model):
        raise ValueError(f"the drafter is {name!r}: expected a model after the colon")
    if kind == "trim":
        try:
            return trim.trim_vocabulary(small, size=numbers[0])
        except ValueError as error:
            raise ValueError(f"the drafter is {name!r}: {error}") from None
    if kind == "share":
        return small if target is None else cross_tokenizer.share_vocabulary(small, target)
    return drafters.without_backoff(small, *numbers)


def _of_target(name: str, written: Written, target: Model | None, head_size: int | None = None) -> BoundDrafter:
    """A drafter that reads the target's hidden states, or is made of its layers, with a head of `head_size` tokens."""
    from jaxspec import drafters
    from jaxspec.draft_heads.load import load_drafter
    from jaxspec.vocab import trim

    if written.kind == "head":
        if target is None:
            raise ValueError(f"the drafter is {name!r}: it reads a target's hidden states, and there is no target here")
        head = None if head_size is None else trim.trim_vocabulary(target, size=head_size)
        return load_drafter(written.inner[0], target=target, head=head)
    if target is None:
        raise ValueError(f"the drafter is {name!r}, which is made of the target's layers: expected a target")
    head = None if head_size is None else trim.trim_vocabulary(target, size=head_size)
    if written.kind == "early_exit":
        return drafters.early_exit(target, written.layers[0][0], head=head)
    return drafters.skip_layers(target, *written.layers, head=head)


def _counted(name: str, target: Model, references: Callable[[], Sequence[str]] | None) -> BoundDrafter | Model:
    """N-gram tables, or a datastore, of texts."""
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
    about = {"vocab_size": target.lm.vocab_size, "start_token": target.lm.start_token}
    rows, words = corpus.token_rows(texts, target.tokenizer), datastore.vocabulary_of(target.tokenizer)
    return drafters.retrieval(datastore.build(rows, vocabulary=words, **about), target)
