"""Chats: which prompts are conversations, and how a tokenizer's template writes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.core import Model, token_ids
from jaxspec.core.checks import check_model
from jaxspec.decode import shared_prefix

ANSWER = "leave it out: a conversation is written up to where the answer begins"
CUT = "leave it out; max_prompt_tokens and too_long of jaxspec.generate_many cut long prompts"
TOKENIZED = "leave it out: the ids are those of the whole conversation"
# arguments of the tokenizer's `apply_chat_template` and of what it calls: what to do
TEMPLATE_ARGUMENTS = {
    **dict.fromkeys(
        ("conversation", "conversations", "messages", "self"),
        "leave it out: messages are the prompt",
    ),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), ANSWER),
    **dict.fromkeys(("truncation", "max_length"), CUT),
    **dict.fromkeys(
        ("tokenize", "padding", "return_tensors", "return_dict", "tokenizer_kwargs"), TOKENIZED
    ),
    **dict.fromkeys(("return_assistant_tokens_mask", "sanitize_control_tokens"), TOKENIZED),
    "chat_template": "load the model with it, jaxspec.load(..., chat_template=...)",
}
# arguments that the template reads, too
TEMPLATE_VALUES = ("tools", "documents", "reasoning_effort")


def is_chat(prompt: Any) -> bool:
    """Says whether a prompt is a conversation: a list of messages, each with a role.

    >>> is_chat([{"role": "user", "content": "Hello"}]), is_chat("Hello"), is_chat([])
    (True, False, False)
    """
    return (
        isinstance(prompt, list | tuple)
        and bool(prompt)
        and isinstance(prompt[0], Mapping)
        and "role" in prompt[0]
    )


def chats_of(prompts: Any) -> list[Any] | None:
    """Returns the conversations among prompts, one or a list of them; None if the prompts are
    others.

    >>> chats_of([{"role": "user", "content": "Hello"}])
    [[{'role': 'user', 'content': 'Hello'}]]
    >>> chats_of(["Hello"])
    """
    if is_chat(prompts):
        return [prompts]
    if isinstance(prompts, list | tuple) and prompts and all(map(is_chat, prompts)):
        return list(prompts)
    return None


def chat_ids(
    target: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    answer: bool = True,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Writes a conversation in the chat template of the target's tokenizer, up to where an `answer`
    would begin.

    `template`: values of the template's own, such as enable_thinking=False.
    """
    from jinja2 import TemplateError  # which transformers needs for templates, and for nothing else

    check_template(target)
    template = template or {}
    name = target.name or "this model"
    check_template_values(template, target.tokenizer.apply_chat_template)
    for number, message in enumerate(messages):
        # Of a message without content a template would write the word None.
        if (
            isinstance(message, Mapping)
            and message.get("content") is None
            and not message.get("tool_calls")
        ):
            raise ValueError(
                f"message {number} of the chat, of the role {message.get('role')!r}, has no content"
            )
        token_ids.check_unicode(message, f"message {number} of the chat")
    token_ids.check_unicode(template, "chat_template_kwargs")
    for value in ("tools", "documents"):
        if template.get(value) and value not in str(target.tokenizer.chat_template):
            raise ValueError(f"the chat template of {name} does not read {value}: leave them out")
    messages = [_with_text(message, number) for number, message in enumerate(messages)]
    write = target.tokenizer.apply_chat_template
    try:
        written = write(messages, add_generation_prompt=answer, return_dict=True, **template)
    except TemplateError as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ValueError(
            f"the chat template of {name} refuses the conversation (of {roles}): {error}"
        ) from error
    return list(written["input_ids"])


def check_template_values(template: Mapping[str, Any], write: Callable[..., Any]) -> None:
    """Raises ValueError for values that a template would never read, since they are arguments of
    the function that writes it.

    Args:
        template: the values.
        write: the tokenizer's `apply_chat_template`, whose arguments differ between versions of
            transformers.

    >>> check_template_values(
    ...     {"truncation": True}, lambda conversation, **values: None
    ... )  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: chat_template_kwargs has 'truncation', which templates do not read: leave it out; ...
    """
    parameters = inspect.signature(write).parameters.values()
    arguments = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD} | {
        *TEMPLATE_ARGUMENTS
    }
    for name in template:
        if name in arguments and name not in TEMPLATE_VALUES:
            advice = TEMPLATE_ARGUMENTS.get(name, "leave it out")
            raise ValueError(
                f"chat_template_kwargs has {name!r}, which templates do not read: {advice}"
            )


def opening(
    target: Model, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any] | None
) -> list[int]:
    """Writes messages that conversations begin with.

    Templates without a system role write the system's message into the user's first one. So where
    messages end with the system's, two conversations that go on differently are written, and their
    common beginning is taken. Its last token is left out: a tokenizer may join that to what
    follows.
    """
    write = functools.partial(chat_ids, target, answer=False, template=template)
    if messages[-1].get("role") != "system":
        return write(messages)
    first, second = (
        write([*messages, {"role": "user", "content": content}]) for content in ("a", "1")
    )
    return first[: max(1, shared_prefix.common(first, second) - 1)]


def _with_text(message: Any, number: int) -> Any:
    """Returns a message whose content is text; parts of it are joined.

    >>> _with_text(
    ...     {
    ...         "role": "user",
    ...         "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    ...     },
    ...     0,
    ... )
    {'role': 'user', 'content': 'ab'}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list | tuple):
        return message
    parts = message["content"]
    for block in parts:
        if (
            not isinstance(block, Mapping)
            or block.get("type") != "text"
            or not isinstance(block.get("text"), str)
        ):
            if isinstance(block, Mapping):
                got = block.get("type")
            else:
                got = type(block).__name__
            raise ValueError(
                f'message {number} of the chat has a part of type {got!r}: expected {{"type": '
                f'"text", "text": "..."}}'
            )
    return {**message, "content": "".join(block["text"] for block in parts)}


def check_template(target: Model) -> None:
    """Raises ValueError for a model without a chat template."""
    check_model(target, "target")
    if getattr(target.tokenizer, "chat_template", None) is None:
        name = target.name or "this model"
        raise ValueError(
            f"{name} has no chat template: give text, or a model that is tuned to chat, or a "
            "template: "
            'jaxspec.load(..., chat_template="FILE"), on the command line --chat-template FILE'
        )
