"""The record of an option: its check, its default, its flag, its field and its row on the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_type_hints

from jaxspec.core.processor import LogitsProcessor, Processor

OF_JOB = "it holds for all of the job, and is an option of it"


class Sizes(NamedTuple):
    """The bounds of options: the number of rows, the width of the logits, and the tokenizer's
    largest id plus one.
    """

    batch: int
    vocab: int
    ids: int


class Flag(NamedTuple):
    """The spelling of an option on the command line, which is `--name`.

    Attributes:
        type: the type of the value; bool for a flag without one.
        metavar: the word for the value in help texts.
        short: a second spelling, such as "-t".
        least: the smallest value of a number. None: the option's own check has it.
    """

    type: type
    metavar: str = ""
    short: str = ""
    least: int | None = None


def as_given(value: Any, name: str, sizes: Sizes) -> Any:
    """Reads an option that is checked together with others, later."""
    return value


class Option(NamedTuple):
    """An option of `jaxspec.generate` or of a job.

    Attributes:
        help: one line for people, on the command line and on the page.
        read: (value, name, sizes) -> the value that programs take. Raises ValueError or TypeError
            for a value that it does not accept, in the user's words.
        group: the heading of the option in help texts.
        per: "prompt" if a line of a job may set it for its prompt, "job" if it holds for all.
        flag: its spelling on the command line; None: Python only, or a command spells it its way.
        ndim: dimensions of a value that all rows share. An array with one more has a value for each
            row. None: all rows share the value.
        changes_results: whether results depend on it. Then the manifest of a job has it, and a
            line cannot use its name for the caller's data.
        advice: the remedy where a line sets an option that holds for the whole job.
        page: the page that explains it, as a link from docs/front-door.md.
        field: the field of `SamplingParams` that a sampling option sets, by default the one of its
            name; the values of options with one field are added.
        processor: the logits processor that reads the field; they run in the order of the options.
        truncates: whether it takes tokens away after the temperature.
        neutral: the value of the field that changes nothing, for rows without the option in a
            program that has it. None: such rows take the target's value.
        name, default: name and default of its field in the class that declares it.
    """

    help: str
    read: Callable[[Any, str, Sizes], Any] = as_given
    group: str = "Sampling"
    per: Literal["job", "prompt"] = "job"
    flag: Flag | None = None
    ndim: int | None = None
    changes_results: bool = True
    advice: str = OF_JOB
    page: str = ""
    field: str = ""
    processor: LogitsProcessor | Processor | None = None
    truncates: bool = False
    neutral: float | None = 0.0
    name: str = ""
    default: Any = None


def declared(options: type) -> dict[str, Option]:
    """Lists the options that a NamedTuple or a TypedDict declares: annotations with an `Option`.

    >>> from jaxspec.sampling import SamplingOptions
    >>> option = declared(SamplingOptions)["top_k"]
    >>> option.name, option.default, option.help
    ('top_k', None, 'Keep the k most probable tokens.')
    """
    hints = get_type_hints(options, include_extras=True)
    defaults = getattr(options, "_field_defaults", {})
    return {
        name: hint.__metadata__[0]._replace(name=name, default=defaults.get(name))
        for name, hint in hints.items()
        if hasattr(hint, "__metadata__")
    }
