"""Models, drafters, policies and acceptance rules by their names on a command line; options checked
before models are loaded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.cli.options import DRAFT, TARGET

if TYPE_CHECKING:
    from jaxspec.core import BoundDrafter, BoundPolicy, Model, Rule

RANDOM = "random:"  # before a published shape
POLICIES = {  # with the parameter that NAME=NUMBER sets
    "constant": "draft_tokens",
    "heuristic": "start",
    "confidence": "threshold",
    "draft_exiting": "goal",
    "entropy": "most",
    "adaptive": "c",
}


def model(
    name: str,
    dtype: str = "float32",
    mesh: Any = None,
    *,
    seed: int = 0,
    chat_template: str | None = None,
    **others: str | None,
) -> Model:
    """Loads a model by its name; "random:SHAPE" has random weights at a published shape.

    In a dtype such as "int8/bfloat16" the second part is the dtype of the computation. `others` are
    further options of `jaxspec.load`, which random weights do not have.
    """
    from jaxspec.analysis.random_model import random_model
    from jaxspec.weights import loading

    matrices, computed = _dtypes(dtype)
    if name.startswith(RANDOM):
        for option, value in others.items():
            if value is not None:
                spelt = f"--{option.replace('_', '-')}"
                raise ValueError(
                    f"{spelt} is {value}, and {name} has random weights: expected a folder or a "
                    "hub id"
                )
        return random_model(name.removeprefix(RANDOM), matrices, seed, computed)
    return loading.load(
        name,
        dtype=matrices,
        compute=computed,
        mesh=mesh,
        chat_template=None if chat_template is None else Path(chat_template),
        **others,
    )


def check_model(name: str, dtype: str = "float32") -> None:
    """Raises ValueError if a model does not exist, or the dtype is wrong. Skips hub ids."""
    from jaxspec.analysis import random_model
    from jaxspec.weights import loading

    loading.dtype_names(*_dtypes(dtype))
    if name.startswith(RANDOM):
        random_model.config_of(name.removeprefix(RANDOM))
    elif not loading.is_hub_id(name):
        loading.find(name)


def drafter(
    written: str,
    target: Model,
    references: Callable[[], Sequence[str]] | None = None,
    **options: Any,
) -> Model | BoundDrafter:
    """Makes a drafter by its name (`jaxspec.drafters.by_name`); `options` of `model` load models."""
    from jaxspec.draft_heads import by_name

    load = functools.partial(by_name.load_by_name, load=functools.partial(model, **options))
    return by_name.by_name(written, target, load=load, references=references)


def check_drafter(written: str, dtype: str = "float32") -> None:
    """Raises ValueError if a drafter's name, or a model or folder in it, does not exist. Skips hub
    ids.
    """
    from jaxspec.draft_heads import by_name
    from jaxspec.draft_heads.load import find_any
    from jaxspec.drafters.lookups import datastore
    from jaxspec.weights import loading

    loading.dtype_names(*_dtypes(dtype))
    for named in by_name.parts(by_name.parse(written)):
        if named.kind == "datastore":
            datastore.read_manifest(Path(named.name))
        elif named.name.startswith(RANDOM):
            check_model(named.name, dtype)
        elif not loading.is_hub_id(named.name):
            find_any(named.name)


def default_drafter(target: str) -> str:
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


def default_draft_model(target: str) -> str:
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


def file_digests(written: str) -> dict[str, dict[str, str]]:
    """Returns the digests of the files of a model or a drafter, by the names of its parts.

    Random weights have no files; their name defines them.
    """
    from jaxspec.draft_heads import by_name
    from jaxspec.draft_heads.load import find_any
    from jaxspec.files import digests

    names = [named.name for named in by_name.parts(by_name.parse(written))]
    return {name: digests.of_files(find_any(name)) for name in names if not name.startswith(RANDOM)}


def check_dtype(written: str, option: str) -> None:
    """Raises ValueError, with the name of the option, if the text is not a dtype."""
    from jaxspec.weights import loading

    loading.dtype_name(_dtypes(written)[0], option)


def _dtypes(written: str) -> tuple[str, str | None]:
    """Splits "int8/bfloat16" into the dtypes of matrices and of the computation, or None.

    >>> _dtypes("int8/bfloat16"), _dtypes("int8")
    (('int8', 'bfloat16'), ('int8', None))
    """
    dtype, slash, computed = written.partition("/")
    return dtype, computed if slash else None


def check_options(drafter: bool, **options: Any) -> None:
    """Raises ValueError if options of `jaxspec.generate` are wrong for every model.

    `options` has no token ids. `drafter` only says whether the generation will have a drafter.

    >>> check_options(True, gamma=-1)
    Traceback (most recent call last):
    ValueError: gamma is -1: expected at least 0
    """
    import jax.numpy as jnp

    from jaxspec.decode.options import OPTIONS
    from jaxspec.decode.request import prepare
    from jaxspec.structured import byte_dfa, patterns
    from jaxspec.testing import table_model_from

    (pattern,) = patterns.patterns_of(options, 1)
    if pattern is not None and pattern.regex is not None:  # the part that needs no tokenizer
        byte_dfa.from_regex(pattern.regex)
    table = table_model_from(jnp.zeros((2, 2), jnp.float32))
    others = {
        name: value
        for name, value in options.items()
        if name not in patterns.NAMES and OPTIONS[name].group != "Output"
    }
    prepare(table, [[0]], drafter=table if drafter else None, **others)


def policy(text: str, **costs: Any) -> BoundPolicy:
    """Makes a policy from NAME or NAME=NUMBER; `costs` are the options of `adaptive`.

    >>> float(policy("confidence=0.5").params)
    0.5
    """
    from jaxspec import policies

    def make(name: str, *number: float) -> BoundPolicy:
        if name == "constant" and not number:
            raise ValueError("expected a number of draft tokens, such as constant=3")
        arguments = dict(costs) if name == "adaptive" else {}
        if number:
            is_count = name == "constant" and number[0].is_integer()
            arguments[POLICIES[name]] = int(number[0]) if is_count else number[0]
        return getattr(policies, name)(**arguments)

    return _made("--policy", text, POLICIES, make)


def rule(text: str) -> Rule:
    """Makes an acceptance rule from NAME or NAME=NUMBER: "block", "lenient=0.3".

    >>> rule("lenient=0.3").name, rule("lenient=1").name
    ('lenient(0.3)', 'rejection')
    """
    from jaxspec import rules
    from jaxspec.rules import catalogue

    def make(name: str, *number: float) -> Rule:
        if number:
            return getattr(rules, name)(*number)
        return catalogue.RULES[name].rule

    return _made("--rule", text, catalogue.RULES, make)


def _made(option: str, text: str, expected: Iterable[str], make: Callable[..., Any]) -> Any:
    """Parses NAME or NAME=NUMBER, and calls `make` with the name and the optional number."""
    name, _, written = text.partition("=")
    if name not in expected:
        raise ValueError(
            f"{option} is {text!r}: expected one of {', '.join(expected)}, as NAME or NAME=NUMBER"
        )
    try:
        numbers = [float(written)] if written else []
    except ValueError:
        raise ValueError(f"{option} is {text!r}: {written!r} is not a number") from None
    try:
        return make(name, *numbers)
    except ValueError as error:
        raise ValueError(f"{option} is {text!r}: {error}") from None
