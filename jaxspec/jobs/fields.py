"""The fields of a job's prompts: one table, for dicts in Python and for the lines of files.

A field is obeyed, or refused by name; any other is the caller's own, and comes back with the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxspec.core.checks import integer
from jaxspec.decode import encoding, inputs
from jaxspec.decode.request import Prepared
from jaxspec.sampling.params import ALL, OPTIONS, is_set
from jaxspec.structured import patterns

CONTENT = ("prompt", "messages")
OTHER_NAMES = {  # in other libraries: here
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "num_samples": "n",
    "num_return_sequences": "n",
    "guided_choice": "choices",
    "guided_regex": "regex",
    "guided_json": "json_schema",
    "response_format": "json_schema",
}
OBEYED = (
    *("id", "number", *CONTENT, "max_new_tokens", "n", "seed", "stop", "tools", "chat_template_kwargs"),
    *(*OPTIONS, *patterns.NAMES),
)
CLOSE = {name for name in (*OBEYED, *OTHER_NAMES) if "_" in name or name in ("temperature", "stop", "seed")}
NOT_HERE = (*inputs.STRUCTURED, "length_penalty", "min_new_tokens", "no_repeat_ngram_size")  # other libraries' names
ALL_ROWS = "it holds for all of the job, and is an option of it"
OFFERED = "tools are offered, not forced"
PLAIN_TEXT = "a text ends before its stop string, and is without special tokens"


def _refused(why: str, *names: str, **neutral: Any) -> dict[str, tuple[str, Any]]:
    """Makes entries of `REFUSED`: names, and names with the value that asks for nothing, which is therefore fine."""
    return {name: (why, value) for name, value in (dict.fromkeys(names) | neutral).items()}


REFUSED = {  # name: why, or what to do; and the value that asks for nothing, as None does everywhere
    **_refused(ALL_ROWS, "drafter", "gamma", "rule", "policy", "eos_ids", "prefix", log_probs=False, top_log_probs=0),
    **_refused("log probabilities are an option of the job: log_probs", logprobs=False, top_logprobs=0),
    **_refused("end tokens are an option of the job: eos_ids", "eos_token_id", "stop_token_ids", ignore_eos=False),
    **_refused(OFFERED, "functions", "function_call", tool_choice="auto", parallel_tool_calls=True),
    **_refused("jaxspec.beam_search searches", num_beams=1, use_beam_search=False),
    **_refused("use banned, a list of ids", "suppress_tokens", "bad_words_ids"),
    **_refused("use banned, a list of the other ids", "allowed_token_ids"),
    **_refused("values for a template stand in chat_template_kwargs", "enable_thinking", "reasoning_effort"),
    **_refused("a job writes the answer to a conversation", add_generation_prompt=True, continue_final_message=False),
    **_refused(PLAIN_TEXT, include_stop_str_in_output=False, skip_special_tokens=True),
    **_refused("use top_k, top_p or min_p", "epsilon_cutoff", "eta_cutoff", "top_a", typical_p=1.0),
    **_refused("it holds for all of the job: load the model with it", "chat_template"),
    **_refused("jaxspec.score gives the log probabilities of texts", "prompt_logprobs"),
    **_refused("max_prompt_tokens and too_long are options of the job", "truncate_prompt_tokens"),
    **_refused("give seed, an integer", "key", "generator"),
    **_refused("temperature 0 is greedy, and a positive one samples", do_sample=False),
    **_refused("use max_new_tokens, which does not count the prompt", "max_length"),
    **_refused("use stop", "stop_strings"),
    **_refused("a job writes whole texts", stream=False),
    **_refused("a result has no prompt", echo=False),
    **{name: (inputs.NOT_HERE[name], None) for name in NOT_HERE if name not in OTHER_NAMES},
    **_refused(inputs.NOT_HERE["best_of"], best_of=1),
    **_refused(inputs.NOT_HERE["min_new_tokens"], min_tokens=0),
}


class Settings(NamedTuple):
    """The settings of one prompt; None where the job's own hold."""

    max_new_tokens: int | None  # its limit
    samples: int | None  # how many texts it gets
    seed: int | None  # the seed of its random key
    stop: Any  # strings that end its text
    template: dict[str, Any]  # values for the chat template, tools among them
    sampling: dict[str, Any]  # its `SamplingOptions`
    pattern: patterns.Pattern | None = None  # the text has to match it


def read(fields: Mapping[str, Any], most: int | None = None) -> Settings:
    """Reads the settings of a prompt among its fields; a field that is null says nothing.

    `most` is the job's limit of new tokens.

    >>> settings = read({"prompt": "a", "temperature": 0.5, "max_tokens": 7, "label": "x"})
    >>> settings.max_new_tokens, settings.sampling
    (7, {'temperature': 0.5})
    >>> read({"prompt": "a", "eos_token_id": 2})
    Traceback (most recent call last):
    ValueError: the field 'eos_token_id' is not obeyed: end tokens are an option of the job: eos_ids
    """
    values, names = dict[str, Any](), dict[str, str]()
    for name, value in {**fields, **_response_format(fields)}.items():
        option = OTHER_NAMES.get(name, name)
        if option in OBEYED:
            if value is None:
                continue
            if option in values:
                raise ValueError(f"the fields {names[option]!r} and {name!r} mean the same: give one of them")
            values[option], names[option] = value, name
        elif name in REFUSED:
            why, neutral = REFUSED[name]
            if value is not None and (type(value) is not type(neutral) or value != neutral):
                raise ValueError(f"the field {name!r} is not obeyed: {why}")
        elif (close := _snake(name)) in CLOSE and close not in fields:
            raise ValueError(f"the field {name!r} is spelled {close!r} here")
    template = values.get("chat_template_kwargs", {})
    if not isinstance(template, Mapping):
        raise ValueError(f"chat_template_kwargs is {template!r:.80}: expected an object of values for the template")
    if "tools" in values:
        if not isinstance(values["tools"], list | tuple) or not all(isinstance(x, Mapping) for x in values["tools"]):
            raise ValueError(f"tools is {values['tools']!r:.80}: expected a list of objects")
        template = {**template, "tools": list(values["tools"])} if values["tools"] else template
    if template and "messages" not in values and not encoding.is_chat(values.get("prompt")):
        name = "tools" if "tools" in values else "chat_template_kwargs"
        raise ValueError(f"the field {name!r} is for the template of a chat: give messages with it")
    return Settings(
        _whole(values, "max_new_tokens", names, 1, most),
        _whole(values, "n", names, 1, 2**16),
        _whole(values, "seed", names, 0, 2**32 - 1),
        values.get("stop"),
        dict(template),
        {name: _sampling(name, values[name]) for name in OPTIONS if name in values},
        patterns.pattern_of(values),
    )


def missing(prepared: Prepared, needs: Mapping[str, Any], bounded: bool) -> dict[str, Any]:
    """Returns the options that a generation must also have so that its program serves rows with some options.

    Their values are no row's, since rows bring their own. They say what the program can do: draw, and find so many of
    the largest logits.

    Args:
        needs: the options of a row.
        bounded: whether every row has a top_k, because the job has one.
    """
    options, vocab, added = prepared.options, prepared.target.lm.vocab_size, dict[str, Any]()
    temperature = options.get("temperature")
    for name, value in needs.items():
        old = options.get(name)
        if name == "temperature":
            if value and np.ndim(0.0 if temperature is None else temperature) == 0 and not temperature:
                added[name] = np.zeros(1, np.float32)  # one for each row: a program that draws
        elif name in ("logit_bias", "banned"):
            if not is_set(options.get("logit_bias")) and not is_set(options.get("banned")):
                added["logit_bias"] = np.zeros(vocab, np.float32)
        elif name == "top_k":
            if old is None or int(old) < value:
                added[name] = min(ALL, 1 << (int(value) - 1).bit_length())
        elif name in patterns.NAMES:
            if all(options.get(pattern) is None for pattern in patterns.NAMES):
                added[name] = [None]  # a program whose rows may have patterns
        elif not is_set(old):
            added[name] = value
    both = {**options, **added}
    top_k = both.get("top_k")
    if is_set(both.get("top_p")) and top_k is not None and not bounded and int(top_k) < vocab:
        added["top_k"] = ALL  # rows without a top_k look for their mass among all tokens
    return added


def _whole(values: Mapping[str, Any], name: str, names: Mapping[str, str], least: int, limit: int | None) -> int | None:
    if name not in values:
        return None
    expected = f"an integer, {least} or more" if limit is None else f"an integer from {least} to {limit}"
    expected += ", the job's own limit" if name == "max_new_tokens" and limit is not None else ""
    number = integer(values[name], names[name], expected)
    if number < least or (limit is not None and number > limit):
        raise ValueError(f"{names[name]} is {number}: expected {expected}")
    return number


def _response_format(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the schema in OpenAI's field for structured output; None: any text.

    >>> _response_format({"response_format": {"type": "json_object"}})
    {'response_format': {'type': 'object'}}
    """
    form = fields.get("response_format")
    if form is None:
        return {}
    form_type = form.get("type") if isinstance(form, Mapping) else None
    if form_type == "text":
        return {"response_format": None}
    if form_type == "json_object":
        return {"response_format": {"type": "object"}}
    described = form.get("json_schema") if form_type == "json_schema" else None
    if not isinstance(described, Mapping) or not isinstance(described.get("schema"), Mapping):
        raise ValueError(
            f"response_format is {form!r:.80}: expected a type among text, json_object and json_schema, with the last "
            'also json_schema={"schema": ...}'
        )
    return {"response_format": described["schema"]}


def _sampling(name: str, value: Any) -> Any:
    """Reads an option of sampling; JSON has ids as text where they are names of an object."""
    if name == "logit_bias" and isinstance(value, Mapping):
        return {int(key) if isinstance(key, str) and key.isdecimal() else key: bias for key, bias in value.items()}
    if name not in ("logit_bias", "banned") and np.ndim(value):
        raise ValueError(f"{name} is {value!r:.80}: expected a number")
    return value


def is_own(name: str) -> bool:
    """Says whether a field is the caller's own: it is neither obeyed nor refused."""
    return name not in OBEYED and name not in OTHER_NAMES and name not in REFUSED


def _snake(name: str) -> str:
    """Spells a name as Python would.

    >>> _snake("maxTokens"), _snake("top-p"), _snake("Temperature")
    ('max_tokens', 'top_p', 'temperature')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).replace("-", "_").lower()
