"""Models, policies and acceptance rules by their names on a command line; options checked before
models are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.core import BoundPolicy, Model, Rule

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
