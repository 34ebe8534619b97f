"""The prompts of a job: any iterable, read ahead, each checked for itself."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxspec.core import Model, token_ids
from jaxspec.core.checks import integer, one_of
from jaxspec.decode import inputs
from jaxspec.decode.request import Prepared, drafter_lms
from jaxspec.decode.shared_prefix import SharedPrefix
from jaxspec.jobs.slots import Row

TOO_LONG = ("error", "truncate", "skip")
FIELDS = ("id", "number", "prompt", "messages", "max_new_tokens")  # of a prompt that is a dict


class Request(NamedTuple):
    """A prompt of a job, read and checked.

    Attributes:
        id: what the caller calls it; by default its number.
        row: its tokens and limit; without tokens if it is not to be decoded.
        error: why it is not; None if it is.
        place: among the prompts of the job that have a result.
        truncated: how many of the prompt's tokens were cut.
    """

    id: Any
    row: Row
    error: str | None = None
    place: int = 0
    truncated: int = 0


class Limits(NamedTuple):
    """The longest rows that a job takes.

    Attributes:
        prompt: most tokens of a prompt; None for any that has a position.
        positions: most tokens of a prompt and what is generated from it together; None for any.
        new: most new tokens of any prompt.
        too_long: what happens to a longer prompt: one of `TOO_LONG`.
    """

    prompt: int | None
    positions: int | None
    new: int
    too_long: str


def limits_of(prepared: Prepared, new: int, max_prompt_tokens: int | None, too_long: str) -> Limits:
    """Returns the limits of the models of a generation, and of the caller."""
    one_of(too_long, "too_long", TOO_LONG)
    lms = [prepared.target.lm, *(drafter_lms(prepared.drafter) if prepared.drafter is not None else ())]
    prompts = [lm.max_prompt for lm in lms if lm.start_token is not None and lm.max_prompt is not None]
    positions = [lm.max_positions for lm in lms if lm.start_token is None and lm.max_positions is not None]
    if max_prompt_tokens is not None:
        max_prompt_tokens = integer(max_prompt_tokens, "max_prompt_tokens", "an integer, 1 or more")
        if max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens is {max_prompt_tokens}: expected at least 1")
        prompts.append(max_prompt_tokens)
    if positions and prompts:  # and at least one new token
        prompts.append(min(positions) - 1)
    return Limits(min(prompts, default=None), min(positions, default=None), new, too_long)


class Reader:
    """Reads prompts ahead, a block at a time, which is tokenised at once.

    Args:
        target: whose tokenizer reads text.
        prompts: texts, rows of ids, chats (lists of messages), or dicts of one of these; see `generate_many`.
        limits: what is too long.
        block: prompts that are read at a time.
        prefix: what all prompts follow; None: nothing.
        template: values for the template of chats.
        skipped: called with the number of each prompt that is skipped.
    """

    def __init__(
        self,
        target: Model,
        prompts: Iterable[Any],
        limits: Limits,
        block: int,
        prefix: SharedPrefix | None = None,
        template: Mapping[str, Any] | None = None,
        skipped: Callable[[int], Any] | None = None,
    ):
        self._target, self._limits, self._block = target, limits, block
        self._prefix, self._template, self._skipped = prefix, template, skipped
        self._source = enumerate(prompts)
        self._read = deque[Request]()
        self._exhausted, self._places = False, itertools.count()
        self.error: Exception | None = None

    def peek(self, count: int) -> list[Request]:
        """Returns the next prompts, at most so many, without taking them.

        An error of the iterable ends the prompts; it is `error`, to be raised when those before it are done.
        """
        while len(self._read) < count and not self._exhausted:
            block = self._block_of(max(self._block, count))
            self._exhausted = not block
            self._read.extend(r._replace(place=next(self._places)) for r in self._requests(block))
        return list(itertools.islice(self._read, count))

    def _block_of(self, count: int) -> list[tuple[int, Any]]:
        block = list[tuple[int, Any]]()
        try:
            block.extend(itertools.islice(self._source, count))  # keeps those before an error
        except Exception as error:
            self.error, self._source = error, enumerate(())
        return block

    def take(self, chosen: Iterable[Request]) -> None:
        """Takes some of the prompts that `peek` returned."""
        chosen_ids = {id(request) for request in chosen}
        self._read = deque(request for request in self._read if id(request) not in chosen_ids)

    def _requests(self, block: list[tuple[int, Any]]) -> Iterator[Request]:
        requests = [self._described(place, value) for place, value in block]
        texts = [index for index, (_, content) in enumerate(requests) if isinstance(content, str)]
        encoded = dict(zip(texts, self._encoded([requests[i][1] for i in texts]), strict=True))
        for index, (request, content) in enumerate(requests):
            if request.error is not None:
                yield request
            else:
                kind = "text" if index in encoded else "ids"
                yield from self._checked(request, encoded.get(index, content), kind)

    def _described(self, place: int, value: Any) -> tuple[Request, Any]:
        """Returns a prompt without its tokens, and its content: text or ids."""
        fields: dict[str, Any] = (
            dict(value) if isinstance(value, Mapping) and "role" not in value else {"prompt": value}
        )
        number, limit = fields.get("number", place), fields.get("max_new_tokens", self._limits.new)
        # What is wrong with a prompt is the error of its own number, wherever among those read it stands.
        is_number = inputs.is_id(number) and 0 <= number < 2**31
        request = Request(fields.get("id", number), Row(int(number) if is_number else place, (), self._limits.new))
        try:
            if unknown := sorted(set(fields) - set(FIELDS)):
                raise ValueError(f"the prompt has the field {unknown[0]!r}: expected some of {', '.join(FIELDS)}")
            for name, wanted, least, most in (
                ("number", number, 0, 2**31 - 1),
                ("max_new_tokens", limit, 1, self._limits.new),
            ):
                if not inputs.is_id(wanted) or not least <= wanted <= most:
                    raise ValueError(f"{name} is {wanted!r}: expected an integer from {least} to {most}")
            request = request._replace(row=request.row._replace(number=int(number), max_new_tokens=int(limit)))
            if ("prompt" in fields) == ("messages" in fields):
                raise ValueError(f"the prompt has the fields {sorted(fields)}: expected either prompt or messages")
            return request, self._content(request.row.number, fields.get("prompt"), fields.get("messages"))
        except (ValueError, TypeError) as error:
            return request._replace(error=str(error)), None

    def _content(self, number: int, prompt: Any, messages: Any) -> Any:
        """Returns text that is to be tokenised, with others, or the ids of a chat; ids as they are."""
        if isinstance(prompt, Exception):  # of whoever read it
            raise prompt
        if messages is None and inputs.is_chat(prompt):
            messages = prompt
        if messages is not None:
            if not inputs.is_chat(messages) or not all(isinstance(message, Mapping) for message in messages):
                raise ValueError(f"the chat is {messages!r:.80}: expected a list of messages, each with a role")
            try:
                ids = inputs.chat_ids(self._target, messages, template=self._template)
            except ValueError:
                raise
            except Exception as error:  # the template is a program, and may end in any way
                raise ValueError(f"the chat cannot be written ({type(error).__name__}: {error})") from error
            return ids if self._prefix is None else self._prefix.followed_by(ids, "chat", number)[len(self._prefix) :]
        if isinstance(prompt, str):
            inputs.check_text(prompt, number)
            if self._target.tokenizer is None:
                raise ValueError("this model has no tokenizer: give token ids instead of text")
            return prompt
        return prompt

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        return self._target.tokenizer(texts)["input_ids"] if texts else []

    def _checked(self, request: Request, content: Any, kind: str) -> Iterator[Request]:
        """Yields the prompt with its tokens, or what is wrong with it; nothing if it is to be skipped."""
        try:
            row, shared = inputs.ids_of(content, request.row.number), 0
            if not row:
                raise ValueError("the prompt is empty: it needs at least one token")
            if self._prefix is not None:
                shared = len(self._prefix)
                row = self._prefix.followed_by(row, kind)
            vocab = self._target.lm.vocab_size
            if outside := [token for token in row if not 0 <= token < vocab]:  # an array has no larger than int64
                raise ValueError(f"the prompt has token id {outside[0]}: expected ids from 0 to {vocab - 1}")
        except (ValueError, TypeError) as error:
            yield request._replace(error=str(error))
            return
        most = self._longest(request.row.max_new_tokens)
        if most is not None and len(row) > most:
            if self._limits.too_long == "skip":
                if self._skipped is not None:
                    self._skipped(request.row.number)
                return
            # A decoder goes on with the end of its prompt; an encoder's task stands at the beginning.
            keeps_end = self._target.lm.start_token is None
            cut = self._limits.too_long == "truncate" and self._frame.cut(row, most, keeps_end=keeps_end, shared=shared)
            if not cut:
                new = request.row.max_new_tokens
                message = f"the prompt has {len(row)} tokens: expected at most {most}, with {new} new ones"
                yield request._replace(error=message)
                return
            request, row = request._replace(truncated=len(row) - len(cut)), cut
        yield request._replace(row=request.row._replace(tokens=row))

    @functools.cached_property
    def _frame(self) -> token_ids.Frame:
        return token_ids.frame_of(self._target.tokenizer)

    def _longest(self, new: int) -> int | None:
        """Most tokens of a prompt that so many new ones are generated from; None: any number."""
        limits = self._limits
        room = None if limits.positions is None else limits.positions - new
        return min((x for x in (limits.prompt, room) if x is not None), default=None)
