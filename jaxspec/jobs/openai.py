"""OpenAI's batches: requests {"custom_id", "method", "url", "body"} in, responses out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.jobs import fields

COMPLETIONS = "/v1/completions"
URLS = {"/v1/chat/completions": "messages", COMPLETIONS: "prompt"}  # with their bodies' field
# Parameters of OpenAI's and vLLM's requests that do not change a text. They are returned among the
# line's fields.
WITHOUT_EFFECT = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *(
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "session_id",
        "priority",
        "cache_salt",
    ),
    *(
        "stream_options",
        "stream_interval",
        "kv_transfer_params",
        "ec_transfer_params",
        "return_mm_kwargs",
    ),
    *("use_cache", "skip_reading_prefix_cache", "extra_headers", "extra_query", "timeout", "url"),
}
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


def fields_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request's body and those beside it.

    Every field of a body is a setting, so an unknown name there is an error. The caller's data
    belong beside the body.

    >>> fields_of(
    ...     {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "one", "max_tokens": 7}}
    ... )
    {'url': '/v1/completions', 'prompt': 'one', 'max_tokens': 7}
    """
    method = row.get("method", "POST")
    url = row.get("url")
    body = row["body"]
    if method != "POST":
        raise ValueError(f"method is {method!r}: expected 'POST'")
    if url is not None and url not in URLS:
        raise ValueError(f"url is {url!r}: expected {' or '.join(map(repr, URLS))}")
    if not isinstance(body, Mapping):
        raise ValueError(f"body is {body!r:.80}: expected an object")
    if url is not None and URLS[url] not in body:
        raise ValueError(f"body has no {URLS[url]!r}, but {sorted(body)}: {url} expects it")
    for name in body:
        if name not in WITHOUT_EFFECT and fields.setting_of(name, {}) is None:
            raise ValueError(
                f"body has {name!r}, which is neither OpenAI's nor an option here: write data of "
                "your own beside body"
            )
    others = {
        name: value for name, value in row.items() if name not in ("custom_id", "method", "body")
    }
    return {**others, **body, **_one_prompt(body)}


def _one_prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the prompt of a body that puts it into a list.

    >>> _one_prompt({"prompt": ["Hello"]}), _one_prompt({"prompt": [5, 6]})
    ({'prompt': 'Hello'}, {})
    """
    prompts = body.get("prompt")
    if (
        not isinstance(prompts, list)
        or not prompts
        or not all(isinstance(x, str | list) for x in prompts)
    ):
        return {}
    if len(prompts) > 1:
        raise ValueError(
            f"prompt is a list of {len(prompts)} prompts: expected one; write a request for each"
        )
    return {"prompt": prompts[0]}


def response(rows: Sequence[Mapping[str, Any]], model: str) -> dict[str, Any]:
    """Returns the line for a request: a response whose choices are the texts of the prompt.

    Counts that the form has no place for are under "jaxspec". The time is left out, so that a
    resumed job writes the same lines.

    >>> row = dict(
    ...     id="a", number=4, text="One.", finish="eos", error=None, prompt_tokens=3, new_tokens=2
    ... )
    >>> line = response([row], "small")
    >>> (
    ...     line["custom_id"],
    ...     line["response"]["body"]["choices"][0]["message"]["content"],
    ...     line["error"],
    ... )
    ('a', 'One.', None)
    """
    first = rows[0]
    name = f"batch_req_{rows[0]['number']}"
    kept = [{key: value for key, value in row.items() if key not in ("id", "text")} for row in rows]
    line = {"id": name, "custom_id": first["id"], "response": None, "error": None, "jaxspec": kept}
    wrong = next((row["error"] for row in rows if row["error"] is not None), None)
    if wrong:
        return line | {"error": {"code": "failure", "message": wrong}}
    is_chat = first.get("fields", {}).get("url") != COMPLETIONS
    prompt_tokens = first["prompt_tokens"]
    new_tokens = sum(row["new_tokens"] for row in rows)
    body = {
        "id": name,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": [_choice(index, row, is_chat) for index, row in enumerate(rows)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
        },
    }
    return line | {"response": {"status_code": 200, "request_id": name, "body": body}}


def _choice(index: int, row: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
    content = {"text": row["text"]}
    if is_chat:
        content = {"message": {"role": "assistant", "content": row["text"]}}
    return {
        "index": index,
        **content,
        "logprobs": None,
        "finish_reason": FINISH[row["finish"]],
    }


def rows_of(line: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns the results in a line that a job wrote, in OpenAI's form or in jaxspec's."""
    return line.get("jaxspec", [line])
