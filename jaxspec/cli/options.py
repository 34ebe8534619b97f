"""Options that commands share, declared once; a group of them arrives as one argument."""

from __future__ import annotations

import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from jaxspec.core.options import Option

# the default pair
TARGET = "debian-t5-large"
DRAFT = "debian-t5-draft"
NEW_TOKENS = "Most new tokens of each prompt; fewer than elsewhere (128), as runs are repeated."
# The groups of options in long help texts, by the names of their values, in order. A * stands for
# the other options of `jaxspec.generate`, whose groups are in `decode.options`.
GROUPS = {
    "Prompts": "input sounds field prompts count task language no_timestamps prefix system chat "
    "chat_template prompt start end",
    "Model": "target adapter source_language target_language dtype mesh topology device",
    "Drafting": "draft draft_dtype * gamma policy rule tree nodes check",
    "Sampling": "temperature * ban seed max_new_tokens stop beams length_penalty early_stopping",
    "Costs": "alpha c v c_hat row_tokens",
    "Running": "batch slots max_prompt_tokens too_long max_errors chunk shard num_shards rows "
    "full_length repeats measure resume",
    "Output": "output openai trace numbers compare stats * tokens markdown save overwrite "
    "as_json help",
}
MANY = 12  # the number of options from which help shows groups


def number(help: str, *names: str, least: int = 1, limit: int | None = None) -> Any:
    """Describes an option that is a whole number to typer."""
    return typer.Option(*names, help=help, min=least, max=limit, metavar="N")


def seed_number(help: str) -> Any:
    """Describes a seed to typer: at most 32 bits, since `jax.random.key` reads no more."""
    return number(help, least=0, limit=2**32 - 1)


def text(metavar: str, help: str, *names: str) -> Any:
    """Describes any other option that takes a value to typer."""
    return typer.Option(*names, help=help, metavar=metavar)


def flag(help: str, *names: str) -> Any:
    """Describes an option without a value to typer."""
    return typer.Option(*names, help=help)


NewTokens = Annotated[int, number(NEW_TOKENS, "--max-new-tokens", "-n", least=2)]
Batches = Annotated[str, text("N,N", "Prompts decoded at a time.")]
Prompts = Annotated[
    Path | None, text("FILE", "Prompts, one a line, or .jsonl with prompts; else held-out ones.")
]
Seed = Annotated[int, seed_number("Of the random numbers.")]
DTYPES = "float32, bfloat16, int8, int4, or int8/bfloat16."
Dtype = Annotated[str, text("DTYPE", DTYPES)]
DraftDtype = Annotated[str, text("DTYPE", "The drafter's dtype, if it is another.")]
Mesh = Annotated[str | None, text("MESH", "Devices to split the models over: data=2,model=4.")]
Resume = Annotated[
    bool, flag("Go on with the folder's job; what failed is not retried.", "--resume")
]
Overwrite = Annotated[bool, flag("Replace what is there.", "--overwrite")]
ChatTemplate = Annotated[str | None, text("FILE", "A Jinja template in place of the model's own.")]
Adapter = Annotated[str | None, text("FOLDER", "A LoRA folder or hub id, merged into the target.")]
Json = Annotated[bool, flag("Print one JSON object and nothing else.", "--json")]


class Languages(NamedTuple):
    """Options of models that translate, as `jaxspec.load` takes them."""

    source_language: Annotated[
        str | None, text("NAME", "The prompts' language, of a model that translates.")
    ] = None
    target_language: Annotated[
        str | None, text("NAME", "The language to write, such as deu_Latn.")
    ] = None


def spelling(name: str) -> str:
    """Spells an option by the name of its value."""
    if name == "as_json":
        return "--json"
    return f"--{name.replace('_', '-')}"


def place(name: str) -> tuple[str, int, int]:
    """Returns the group of an option, by the name of its value, and its place there.

    >>> place("draft"), place("top_log_probs")[0], place("unknown")
    (('Drafting', 0, 0), 'Output', ('Other', 0, 0))
    """
    groups = {title: names.split() for title, names in GROUPS.items()}
    for title, names in groups.items():
        if name in names:
            return title, names.index(name), 0
    from jaxspec.decode.options import OPTIONS  # here, since it imports JAX

    if name not in OPTIONS:
        return "Other", 0, 0
    title = OPTIONS[name].group
    return title, groups[title].index("*"), list(OPTIONS).index(name)


def typed(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Lists which of some options, by the names of their values, the user typed."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        name for name, source in sources.items() if source is not None and source.name != "DEFAULT"
    ]


def refuse(names: Sequence[str], mode: str) -> None:
    """Raises ValueError if a mode would ignore options, given by the names of their values."""
    if names:
        spelt = ", ".join(map(spelling, names))
        raise ValueError(
            f"{mode} does not read {spelt}: leave {'it' if len(names) == 1 else 'them'} out"
        )


def check_json_lines(paths: Iterable[Path], **option_values: tuple[Any, Any]) -> None:
    """Raises ValueError if options (value, default) for JSON lines are set without such files."""
    from jaxspec import files  # here, since it imports NumPy, which --help does without

    if not any(files.is_json_lines(path.name) for path in paths):
        names = [name for name, (value, default) in option_values.items() if value != default]
        refuse(names, "input without JSON lines (.jsonl, .ndjson)")


def values(
    text: str, option: str, read: Callable[[str], Any] = str, expected: str = "values"
) -> tuple[Any, ...]:
    """Splits values at commas outside of brackets and quotes, and drops repeats; `read` converts a
    value or raises ValueError.

    >>> values("tree('a,b', (4, 2)), forced", "--draft")
    ("tree('a,b', (4, 2))", 'forced')
    >>> (
    ...     values("a, b,a", "--draft"),
    ...     integers("1,4, 7,4", "--gamma"),
    ...     temperatures("0,0.7", "--temperature"),
    ... )
    (('a', 'b'), (1, 4, 7), (0.0, 0.7))
    """
    pieces: list[str] = []
    for piece in text.split(","):
        if pieces and _is_open(pieces[-1]):
            pieces[-1] += f",{piece}"
        else:
            pieces.append(piece)
    pieces = [piece.strip() for piece in pieces]
    wrong = ValueError(f"{option} is {text!r}: expected {expected} separated by commas")
    if "" in pieces:
        raise wrong
    try:
        return tuple(dict.fromkeys(map(read, pieces)))
    except ValueError:
        raise wrong from None


def _is_open(text: str) -> bool:
    """Tells whether a bracket or a quote in a text is not closed."""
    outside = re.sub("'[^']*'|\"[^\"]*\"", "", text)
    brackets = outside.count("(") + outside.count("[") - outside.count(")") - outside.count("]")
    return brackets > 0 or "'" in outside or '"' in outside


def positive(written: str) -> int:
    """Reads a positive integer. Raises ValueError for other text."""
    if written.isdecimal() and int(written):
        return int(written)
    raise ValueError(f"{written!r} is not a positive integer")


def _temperature(written: str) -> float:
    temperature = float(written)
    if 0 <= temperature < math.inf:
        return temperature
    raise ValueError(f"{written!r} is not a temperature")


integers = functools.partial(values, read=positive, expected="positive integers")
temperatures = functools.partial(values, read=_temperature, expected="numbers 0 or more,")


def group(
    name: str, members: Sequence[inspect.Parameter], join: Callable[[dict[str, Any]], Any]
) -> Callable[..., Any]:
    """Adds options to a command, which gets them as one argument, joined by `join`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        remaining = [parameter for parameter in parameters if parameter.name != name]

        @functools.wraps(command)
        def wrapper(**options: Any) -> None:
            group_values = {
                member.name: options.pop(member.name, member.default) for member in members
            }
            command(**options, **{name: join(group_values)})

        # typer makes options of a function's signature: give it one with the members in place of
        # the group. It would look through `__wrapped__` to the command.
        del wrapper.__wrapped__
        keywords = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in (*members, *remaining)
        ]
        wrapper.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
        return wrapper

    return decorate


def group_of(name: str, options_type: Any, **defaults: Any) -> Callable[..., Any]:
    """Adds an option for each field of a NamedTuple, described by its annotation, to typer or as an
    `Option` of the table.

    A field that is itself a NamedTuple adds its fields. A field without a default is a required
    option.
    """
    return group(
        name, _options_of(options_type, defaults), functools.partial(_joined, options_type)
    )


def _options_of(options_type: Any, defaults: Mapping[str, Any]) -> list[inspect.Parameter]:
    """Lists the options of a NamedTuple and of the ones inside it, in the order of fields."""
    defaults_by_field = options_type._field_defaults | defaults
    members = list[inspect.Parameter]()
    for field, hint in _hints(options_type).items():
        if hasattr(hint, "_fields"):
            members += _options_of(hint, defaults)
            continue
        (declaration,) = hint.__metadata__
        if hasattr(declaration, "flag"):  # an option of the table
            declaration = described(declaration._replace(name=field))
        default = defaults_by_field.get(field, inspect.Parameter.empty)
        members.append(_option(field, Annotated[hint.__origin__, declaration], default))
    return members


def _joined(options_type: Any, values: Mapping[str, Any]) -> Any:
    """Builds a NamedTuple, and the ones inside it, of the values of options."""
    parts = {
        field: _joined(hint, values)
        for field, hint in _hints(options_type).items()
        if hasattr(hint, "_fields")
    }
    return options_type(
        **{field: values[field] for field in options_type._fields if field not in parts}, **parts
    )


def _hints(options_type: Any) -> dict[str, Any]:
    return typing.get_type_hints(options_type, include_extras=True)


def flat(settings: Any) -> dict[str, Any]:
    """Returns the values of a NamedTuple of options, nested ones included, by their names."""
    names = dict[str, Any]()
    for name, value in settings._asdict().items():
        names |= flat(value) if hasattr(value, "_fields") else {name: value}
    return names


def described(option: Option, more: str = "") -> Any:
    """Describes an option of `jaxspec.generate` or a job to typer; `more` is added to its help."""
    assert option.flag is not None, option.name
    short = [option.flag.short] if option.flag.short else []
    is_number = option.flag.type in (int, float)
    return typer.Option(
        *[spelling(option.name), *short],
        help=f"{option.help} {more}".strip(),
        metavar=option.flag.metavar or None,
        min=option.flag.least if is_number else None,
    )


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the sampling options of `decode.options` that have a flag to a command.

    The command gets those that are set as one argument, `generation`: a dict of arguments for
    `jaxspec.generate`.

    >>> @sampling_options
    ... def command(prompt: str, generation: dict) -> None:
    ...     print(prompt, generation)
    >>> command(prompt="a", top_k=5, min_p=None, temperature=None)
    a {'top_k': 5}
    """
    from jaxspec.sampling import SamplingOptions

    return _table_options(command, SamplingOptions.__annotations__)


def generation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds sampling options, as `sampling_options` does, and those of what comes with a text."""
    from jaxspec.decode.options import OPTIONS
    from jaxspec.sampling import SamplingOptions

    output = [name for name, option in OPTIONS.items() if option.group == "Output"]
    return _table_options(command, [*SamplingOptions.__annotations__, *output])


def _table_options(command: Callable[..., None], names: Iterable[str]) -> Callable[..., None]:
    from jaxspec.decode.options import OPTIONS

    members = list[inspect.Parameter]()
    for name in names:
        option = OPTIONS[name]
        if option.flag is not None:
            value_type = option.flag.type if option.default is not None else option.flag.type | None
            members.append(_option(name, Annotated[value_type, described(option)], option.default))
    return group("generation", members, _given)(command)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are set, with patterns read as `generate` takes them."""
    options = {name: value for name, value in values.items() if value is not None}
    return options | {
        name: read(options[name]) for name, read in READERS.items() if name in options
    }


def _schema(written: str) -> str:
    """Reads a schema: JSON itself, or a file.

    >>> _schema('{"type": "null"}')
    '{"type": "null"}'
    """
    from jaxspec import files

    if written.lstrip().startswith("{"):
        return written
    return files.read_text(written)


# the readers of options that are not numbers
READERS: dict[str, Callable[[str], Any]] = {
    "choices": lambda written: list(values(written, "--choices")),
    "json_schema": _schema,
}


def _option(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
