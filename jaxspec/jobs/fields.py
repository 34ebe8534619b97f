"""The fields of a job's prompts, for dicts in Python and lines of files alike.

A field is a setting if it has the name of an option of jaxspec or of another library
(`decode.option_names`). A setting is obeyed or rejected, never ignored. Any other field is the
caller's data and is returned with the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np

from jaxspec.core.checks import integer
from jaxspec.core.options import Flag, Option, declared
from jaxspec.decode import option_names
from jaxspec.decode.chat_templates import is_chat
from jaxspec.decode.option_names import OTHER_NAMES
from jaxspec.decode.options import OPTIONS
from jaxspec.decode.request import Prepared
from jaxspec.sampling.params import ALL, is_set
from jaxspec.sampling.params import OPTIONS as NUMBERS
from jaxspec.structured import patterns

CONTENT = ("prompt", "messages")
TEMPLATE = ("tools", "documents", "chat_template_kwargs")  # values for the template of a chat
LANGUAGES = ("source_language", "target_language")
SAMPLES = "num_samples"  # the job's name for "n"
OBEYED = (
    *("id", "number", *CONTENT, "tools", "documents", *LANGUAGES, "n", "seed"),
    *(name for name, option in OPTIONS.items() if option.per == "prompt" and name != SAMPLES),
)
# one-word names that are settings in any spelling, such as "Temperature"
SHORT = ("temperature", "seed", "stop")
EVERY_TOKEN = (0, -1)  # values of top_k that keep every token, as in vLLM and transformers


class JobOptions(NamedTuple):
    """Options of `generate_many`, which describes them, that a command and a manifest need, too."""

    slots: Annotated[
        int,
        Option("Rows decoded at a time.", flag=Flag(int, "N", least=1), changes_results=False),
    ] = 16
    max_prompt_tokens: Annotated[
        int | None,
        Option("Longest prompt; by default what models read.", flag=Flag(int, "N", least=1)),
    ] = None
    too_long: Annotated[
        str,
        Option("What becomes of longer prompts: error, truncate, skip.", flag=Flag(str, "WHAT")),
    ] = "error"


JOB_OPTIONS = declared(JobOptions)
WITH_MODELS = "it holds for all of the job: load the model with it"
REFUSED: Mapping[str, str] = {
    **{
        name: option.advice
        for name, option in (OPTIONS | JOB_OPTIONS).items()
        if option.per == "job" and option.changes_results
    },
    **dict.fromkeys(("dtype", "compute", "mesh", "revision", "adapter"), WITH_MODELS),
}
"""The options of jaxspec that a line cannot set, with what to do."""
DATA = "If it is data of your own, put it into the field metadata"


class Settings(NamedTuple):
    """The settings of one prompt; None where the job's own hold."""

    max_new_tokens: int | None  # its limit
    samples: int | None  # how many texts it gets
    seed: int | None  # the seed of its random key
    stop: Any  # strings that end its text
    template: dict[str, Any]  # values for the chat template, tools and documents among them
    sampling: dict[str, Any]  # its `SamplingOptions`
    pattern: patterns.Pattern | None = None  # the text has to match it
    source_language: str | None = None  # the language of its prompt
    target_language: str | None = None  # the language of its text


def read(fields: Mapping[str, Any], most: int | None = None) -> Settings:
    """Reads the settings among the fields of a prompt. Ignores fields that are null.

    `most` is the job's limit of new tokens.

    >>> settings = read(
    ...     {
    ...         "prompt": "a",
    ...         "temperature": 0.5,
    ...         "max_tokens": 7,
    ...         "label": "x",
    ...         "length_penalty": 1.0,
    ...     }
    ... )
    >>> settings.max_new_tokens, settings.sampling
    (7, {'temperature': 0.5})
    >>> read({"prompt": "a", "length_penalty": 0.6})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: the field 'length_penalty' is not obeyed: only jaxspec.beam_search has it. ...
    """
    values = dict[str, Any]()
    names = dict[str, str]()  # as which field each value was given, for messages
    for name, value in {**fields, **_response_format(fields)}.items():
        option = setting_of(name, fields)
        if option is None or _asks_for_nothing(option, value, fields):
            continue
        field = _field_of(option)
        if field is None:
            advice = REFUSED.get(option) or option_names.advice_for_line(option)
            raise ValueError(f"the field {name!r} is not obeyed: {advice}. {DATA}")
        if option != name:
            raise ValueError(f"the field {name!r} is spelled {option!r} here")
        if field in values:
            raise ValueError(
                f"the fields {names[field]!r} and {name!r} mean the same: give one of them"
            )
        values[field] = value
        names[field] = name
    if fields.get("do_sample") is False:  # as in transformers, whatever the temperature is
        values["temperature"] = 0.0
    return Settings(
        max_new_tokens=_whole(values, "max_new_tokens", names, 1, most),
        samples=_whole(values, "n", names, 1, 2**16),
        seed=_whole(values, "seed", names, 0, 2**32 - 1),
        stop=values.get("stop"),
        template=_template(values),
        sampling={name: _sampling(name, values[name]) for name in NUMBERS if name in values},
        pattern=patterns.pattern_of(values),
        source_language=_language(values, "source_language", names),
        target_language=_language(values, "target_language", names),
    )


def setting_of(name: str, fields: Mapping[str, Any]) -> str | None:
    """Returns the option that a field names, in Python's spelling; None for the caller's data.

    >>> setting_of("max_tokens", {}), setting_of("lengthPenalty", {}), setting_of("label", {})
    ('max_tokens', 'length_penalty', None)
    """
    if _is_known(name):
        return name
    spelled = _snake(name)
    if _is_known(spelled) and spelled not in fields and ("_" in spelled or spelled in SHORT):
        return spelled
    return None


def is_own(name: str) -> bool:
    """Returns whether a field is the caller's data, not the name of an option."""
    return not _is_known(name)


def _is_known(name: str) -> bool:
    return name in OBEYED or name in OTHER_NAMES or name in REFUSED or name == SAMPLES


def _field_of(option: str) -> str | None:
    """Returns the field that an option is read as; None if it is rejected."""
    if option == SAMPLES:
        return "n"
    if option in OBEYED:
        return option
    if option in OTHER_NAMES:
        return OTHER_NAMES[option].field or None
    return None


def _asks_for_nothing(option: str, value: Any, fields: Mapping[str, Any]) -> bool:
    """Returns whether a setting has a value that changes nothing."""
    if value is None:
        return True
    if option in REFUSED:
        return value is False and option in OPTIONS and OPTIONS[option].default is False
    if option == "choices":
        return option_names.is_empty(value)
    if option in OBEYED or option not in OTHER_NAMES:
        return False
    if option_names.is_empty(value):
        return True
    # Three options whose meaning depends on other fields.
    if option == "do_sample":
        temperature = fields.get("temperature")
        return value is False or (
            value is True and isinstance(temperature, int | float) and temperature > 0
        )
    if option == "tool_choice" and value == "none":
        return option_names.is_empty(fields.get("tools"))
    if option == "add_special_tokens":  # a chat template writes special tokens itself
        has_messages = fields.get("messages") is not None or is_chat(fields.get("prompt"))
        if isinstance(value, bool):
            return value is not has_messages
        return False
    return option_names.asks_for_nothing(option, value)


def _template(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values for the template of a chat."""
    template = values.get("chat_template_kwargs", {})
    if not isinstance(template, Mapping):
        raise ValueError(
            f"chat_template_kwargs is {template!r:.80}: expected an object of values for the "
            "template"
        )
    template = dict(template)
    for name in ("tools", "documents"):
        if name not in values:
            continue
        objects = values[name]
        if not isinstance(objects, list | tuple) or not all(
            isinstance(entry, Mapping) for entry in objects
        ):
            raise ValueError(f"{name} is {objects!r:.80}: expected a list of objects")
        if objects:
            template[name] = list(objects)
    if template and "messages" not in values and not is_chat(values.get("prompt")):
        name = next(name for name in TEMPLATE if name in values)
        raise ValueError(
            f"the field {name!r} is for the template of a chat: give messages with it. {DATA}"
        )
    return template


def _language(values: Mapping[str, Any], name: str, names: Mapping[str, str]) -> str | None:
    language = values.get(name)
    if language is not None and not isinstance(language, str):
        raise ValueError(f"{names[name]} is {language!r:.80}: expected the name of a language")
    return language


def missing(prepared: Prepared, needs: Mapping[str, Any], bounded: bool) -> dict[str, Any]:
    """Returns the options to add to a generation so that its program can serve rows with `needs`.

    The values only set what the program can do: whether it draws, and how many of the largest
    logits it finds. Each row brings its own values.

    Args:
        needs: the options of a row.
        bounded: whether every row has a top_k, because the job has one.
    """
    vocab = prepared.target.lm.vocab_size
    added = dict[str, Any]()
    for name, value in needs.items():
        if not is_neutral(name, value):
            added |= _addition(prepared.options.sampling, name, value, vocab)
    options = {**prepared.options.sampling, **added}
    top_k = options.get("top_k")
    is_bounded = bounded and needs.get("top_k") != ALL
    has_mass = is_set(options.get("top_p")) or is_set(options.get("draft_top_p"))
    if has_mass and top_k is not None and not is_bounded and int(top_k) < vocab:
        added["top_k"] = ALL  # rows without a top_k look for their mass among all tokens
    return added


def _addition(options: Mapping[str, Any], name: str, value: Any, vocab: int) -> dict[str, Any]:
    """Returns what a program with some options lacks for rows with one more; {} if nothing."""
    present = options.get(name)
    if name == "temperature":
        is_greedy = present is None or (np.ndim(present) == 0 and not present)
        # An array, one for each row, makes a program that draws.
        return {name: np.zeros(1, np.float32)} if value and is_greedy else {}
    if name in ("logit_bias", "banned"):  # both become one bias
        has_bias = is_set(options.get("logit_bias")) or is_set(options.get("banned"))
        is_needed = is_set(value) and not has_bias
        return {"logit_bias": np.zeros(vocab, np.float32)} if is_needed else {}
    if name in ("top_k", "draft_top_k"):
        if present is not None and int(present) >= value:
            return {}
        return {name: min(ALL, 1 << (int(value) - 1).bit_length())}  # the next power of two
    if name in patterns.NAMES:
        has_patterns = any(options.get(pattern) is not None for pattern in patterns.NAMES)
        return {} if has_patterns else {name: [None]}  # [None]: rows may have patterns
    return {} if is_set(present) else {name: value}


def is_neutral(name: str, value: Any) -> bool:
    """Returns whether a sampling option has its neutral value, which no program needs.

    >>> is_neutral("top_p", 1), is_neutral("top_p", 0.9), is_neutral("temperature", 1.0)
    (True, False, False)
    """
    return (
        name in NUMBERS
        and NUMBERS[name].neutral is not None
        and option_names.is_same(value, NUMBERS[name].neutral)
    )


def _whole(
    values: Mapping[str, Any], name: str, names: Mapping[str, str], least: int, limit: int | None
) -> int | None:
    if name not in values:
        return None
    expected = f"an integer, {least} or more"
    if limit is not None:
        expected = f"an integer from {least} to {limit}"
        if name == "max_new_tokens":
            expected += ", the job's own limit"
    number = integer(values[name], names[name], expected)
    if number < least or (limit is not None and number > limit):
        raise ValueError(f"{names[name]} is {number}: expected {expected}")
    return number


def _response_format(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the schema from OpenAI's field for structured output; None allows any text.

    >>> _response_format({"response_format": {"type": "json_object"}})
    {'response_format': {'type': 'object'}}
    """
    form = fields.get("response_format")
    if form is None or option_names.is_empty(form):
        return {}
    form_type = form.get("type") if isinstance(form, Mapping) else None
    if form_type == "text":
        return {"response_format": None}
    if form_type == "json_object":
        return {"response_format": {"type": "object"}}
    described = form.get("json_schema") if form_type == "json_schema" else None
    if not isinstance(described, Mapping) or not isinstance(described.get("schema"), Mapping):
        raise ValueError(
            f"response_format is {form!r:.80}: expected a type among text, json_object and "
            "json_schema, with the last "
            'also json_schema={"schema": ...}'
        )
    return {"response_format": described["schema"]}


def _sampling(name: str, value: Any) -> Any:
    """Reads a sampling option; converts the keys of a logit_bias, text in JSON, to ids."""
    if name in ("top_k", "draft_top_k") and any(
        option_names.is_same(value, number) for number in EVERY_TOKEN
    ):
        return ALL
    if name == "logit_bias" and isinstance(value, Mapping):
        return {
            int(key) if isinstance(key, str) and key.isdecimal() else key: bias
            for key, bias in value.items()
        }
    if OPTIONS[name].ndim == 0 and np.ndim(value):
        raise ValueError(f"{name} is {value!r:.80}: expected a number")
    return value


def _snake(name: str) -> str:
    """Spells a name as Python would.

    >>> _snake("maxTokens"), _snake("top-p"), _snake("Temperature")
    ('max_tokens', 'top_p', 'temperature')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).replace("-", "_").lower()
