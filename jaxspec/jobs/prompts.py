"""The prompts of a job: any iterable, read ahead, each checked for itself."""

from __future__ import annotations

import collections
import functools
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxspec.core import Model, token_ids
from jaxspec.core.checks import integers, one_of
from jaxspec.decode import stopping
from jaxspec.decode.chat_templates import chat_ids, is_chat
from jaxspec.decode.prompts import check_has_tokenizer, check_text, check_vocabulary, ids_of, is_id
from jaxspec.decode.request import Prepared, check_judges, end_ids, readers
from jaxspec.decode.shared_prefix import SharedPrefix
from jaxspec.jobs import fields as job_fields
from jaxspec.jobs.slots import Row
from jaxspec.sampling.params import OPTIONS, is_set, pattern_rows, pool_of, sizes_of, values_of
from jaxspec.structured.patterns import pattern_of
from jaxspec.vocab import languages

IDS = 2**20  # most ids that are remembered
TOO_LONG = ("error", "truncate", "skip")


class Line(NamedTuple):
    """A line of a file as a prompt."""

    number: int  # its number in the whole input
    where: str  # the file and the line, for messages
    # the fields of a prompt, as in a dict, or the error of the line
    fields: Mapping[str, Any] | Exception
    # the caller's fields that only look like settings
    others: Mapping[str, Any] = MappingProxyType({})
    id: Any = None  # the line's name for it; None for its number


class JobPrompt(NamedTuple):
    """A prompt of a job, read and checked; several texts of one are several of these."""

    id: Any  # the caller's name for it; by default its number
    row: Row  # its tokens and settings; without tokens if it is not to be decoded
    error: str | None = None  # why it is not decoded; None if it is
    place: int = 0  # its place in the job, not counting skipped prompts
    truncated: int = 0  # how many of the prompt's tokens were cut
    stop: stopping.Stop | None = None  # the strings that end its text; None for the job's
    # options of sampling that its program must have
    needs: Mapping[str, Any] = MappingProxyType({})
    fields: Mapping[str, Any] = MappingProxyType({})  # the caller's own fields
    where: str = ""  # the file and the line that it comes from; empty if it comes from elsewhere
    samples: int = 1  # how many texts the prompt gets
    language: str | None = None  # the language of the prompt, if it is not the model's

    @property
    def at(self) -> str:
        """The beginning of messages about it."""
        if self.where:
            return f"{self.where}: "
        return ""

    def refused(self, error: str) -> JobPrompt:
        """Returns the prompt with an error, once for all of its texts."""
        return self._replace(error=self.at + error, samples=1)


class RowLimits(NamedTuple):
    """The longest rows that a job takes."""

    prompt: int | None  # most tokens of a prompt; None for any that has a position
    # most tokens of a prompt and its text together; None for any
    positions: int | None
    new: int  # most new tokens of any prompt
    too_long: str  # the treatment of longer prompts, in `TOO_LONG`


def limits_of(
    prepared: Prepared, new: int, max_prompt_tokens: int | None, too_long: str
) -> RowLimits:
    """Returns the limits of the models of a generation, and of the caller."""
    one_of(too_long, "too_long", TOO_LONG)
    prompt_limits = list[int]()
    position_limits = list[int]()
    for _, lm in readers(prepared.target, prepared.drafter):
        limits = lm.limits
        is_decoder = limits.start_token is None  # its positions hold the prompt, too
        if is_decoder and limits.max_positions is not None:
            position_limits.append(limits.max_positions)
        if not is_decoder and limits.max_prompt is not None:
            prompt_limits.append(limits.max_prompt)
    if max_prompt_tokens is not None:
        prompt_limits += integers(1, max_prompt_tokens=max_prompt_tokens)
    if position_limits and prompt_limits:  # and at least one new token
        prompt_limits.append(min(position_limits) - 1)
    return RowLimits(
        prompt=min(prompt_limits, default=None),
        positions=min(position_limits, default=None),
        new=new,
        too_long=too_long,
    )


class Numbers:
    """A set of numbers at one bit each, if they fill most of a range.

    >>> numbers = Numbers()
    >>> [numbers.add(number) for number in (5, 70_000, 5)]
    [True, True, False]
    """

    def __init__(self) -> None:
        self._pages = dict[int, int]()

    def add(self, number: int) -> bool:
        """Adds a number; returns whether it is new."""
        page = number >> 10  # 1024 numbers each
        bit = 1 << (number & 1023)
        present = self._pages.get(page, 0)
        self._pages[page] = present | bit
        return not present & bit


class PromptReader:
    """Reads prompts ahead, a block at a time, which is tokenised at once.

    Attributes:
        limits: the longest rows it accepts.
        defaults: the default values of sampling, in the form of `Row.sampling`.
        error: the error that the iterable raised, if it did.
    """

    def __init__(
        self,
        target: Model,  # the model whose tokenizer reads text
        prompts: Iterable[Any],  # `Line`s, or what `generate_many` takes
        limits: RowLimits,  # the longest rows to accept
        block: int,  # prompts that are read at a time
        # The job's options; only `prefix`, `key`, `num_samples`, `eos_ids` and sampling options are
        # read.
        options: Mapping[str, Any] = MappingProxyType({}),
        template: Mapping[str, Any] | None = None,  # values for the template of chats
        # called with the number of each skipped prompt
        skipped: Callable[[int], Any] | None = None,
    ):
        self._target = target
        self.limits = limits
        self._block = block
        self._prefix: SharedPrefix | None = options.get("prefix")
        self._template = dict(template or {})
        self._skipped = skipped
        self._samples = options.get("num_samples", 1)
        self._has_key = options.get("key") is not None
        self._options = {name: options[name] for name in OPTIONS if is_set(options.get(name))}
        self._rule = None if options.get("drafter") is None else options.get("rule")
        self._sizes = sizes_of(target, 1)
        self._numbers = Numbers()  # numbers of earlier prompts
        self._ids = set[int]()  # digests of earlier prompts' ids
        self.defaults = values_of(self._options, self._sizes)
        self._pattern = pattern_of(options)
        # A pattern is tried alone before its prompt is accepted.
        self._new_pool = functools.partial(pool_of, target, end_ids(target, options.get("eos_ids")))
        self._tried = set[Any]()
        self._frames = dict[str | None, token_ids.Frame]()  # by the language of prompts
        self._readers: dict[str | None, Model] = {None: target}  # by the language of prompts
        self._source = enumerate(prompts)
        self._read = deque[JobPrompt]()
        self._exhausted = False
        self._places = itertools.count()
        self.error: Exception | None = None

    def peek(self, count: int) -> list[JobPrompt]:
        """Returns at most `count` of the next prompts, without taking them.

        An error of the iterable ends the prompts; the caller raises `error` when they are done.
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
            self.error = error
            self._source = enumerate(())
        return block

    def take(self, chosen: Iterable[JobPrompt]) -> None:
        """Takes some of the prompts that `peek` returned."""
        chosen_ids = {id(request) for request in chosen}
        self._read = deque(request for request in self._read if id(request) not in chosen_ids)

    def _requests(self, block: list[tuple[int, Any]]) -> Iterator[JobPrompt]:
        requests = [self._described(order, value) for order, value in block]
        encoded = self._encoded(requests)
        for index, (request, content) in enumerate(requests):
            if request.error is None:
                content_form = "text" if index in encoded else "ids"
                request = self._with_tokens(request, encoded.get(index, content), content_form)
            if request is None:  # skipped
                continue
            if request.error is not None:
                yield request.refused(request.error)
            else:
                for sample in range(request.samples):
                    yield request._replace(row=request.row._replace(sample=sample))

    def _encoded(self, requests: list[tuple[JobPrompt, Any]]) -> dict[int, list[int]]:
        """Tokenises text contents, a language at a time; returns their ids by place."""
        places = collections.defaultdict[str | None, list[int]](list)
        for index, (request, content) in enumerate(requests):
            if isinstance(content, str):
                places[request.language].append(index)
        encoded = dict[int, list[int]]()
        for language, indices in places.items():
            texts = [requests[index][1] for index in indices]
            ids = self._reader(language).tokenizer(texts)["input_ids"]
            encoded |= zip(indices, ids, strict=True)
        return encoded

    def _reader(self, language: str | None) -> Model:
        """Returns the model with its tokenizer set to a language; None leaves it as it is."""
        if language not in self._readers:
            self._readers[language] = languages.with_languages(self._target, source=language)
        return self._readers[language]

    def _described(self, order: int, value: Any) -> tuple[JobPrompt, Any]:
        """Returns a prompt without its tokens, and its content: text or ids."""
        line = value if isinstance(value, Line) else _line_of(order, value)
        # An error is reported under the prompt's number, wherever it was read.
        number = line.number
        is_number = is_id(number) and 0 <= number < 2**31
        row = Row(int(number) if is_number else order, (), self.limits.new)
        request = JobPrompt(number if line.id is None else line.id, row, where=line.where)
        try:
            if isinstance(line.fields, Exception):
                raise line.fields
            fields = line.fields
            own_fields = {field: fields[field] for field in fields if job_fields.is_own(field)}
            request = request._replace(fields=own_fields | dict(line.others))
            if not is_number:
                raise ValueError(f"number is {number!r}: expected an integer from 0 to {2**31 - 1}")
            if not self._numbers.add(row.number):
                raise ValueError(
                    f"the number {number} is that of an earlier prompt, and so are its random "
                    "numbers"
                )
            if line is not value:  # `Source.survey` has checked the ids of files
                self._check_id(line.id, row.number)
            settings = job_fields.read(fields, self.limits.new)
            request = self._with_settings(request, settings)
            prompt = fields.get("prompt")
            messages = fields.get("messages")
            # Exactly one of them must be given; `_with_tokens` rejects a prompt of None.
            has_prompt = "prompt" in fields and messages is None
            if not has_prompt and (prompt is None) == (messages is None):
                raise ValueError(
                    f"the prompt has the fields {sorted(fields)}: expected either prompt or "
                    "messages"
                )
            template = self._template | settings.template
            return request, self._content(request, prompt, messages, template)
        except (ValueError, TypeError) as error:
            return request._replace(error=str(error)), None

    def _check_id(self, name: Any, number: int) -> None:
        """Warns of an id that an earlier prompt had, among the first `IDS` prompts."""
        digest = hash(repr(name))
        if name is not None and digest in self._ids:
            warnings.warn(
                f"the id {name!r} of prompt {number} is that of an earlier one, too", stacklevel=2
            )
        elif name is not None and len(self._ids) < IDS:
            self._ids.add(digest)

    def _with_settings(self, request: JobPrompt, settings: job_fields.Settings) -> JobPrompt:
        """Returns a prompt with its settings, by default the job's."""
        sampling = self._options | settings.sampling
        samples = self._samples if settings.samples is None else settings.samples
        row = request.row._replace(seed=settings.seed, begin=self._begin(settings))
        if settings.max_new_tokens is not None:
            row = row._replace(max_new_tokens=settings.max_new_tokens)
        temperature = sampling.get("temperature", 0.0)
        if settings.sampling:
            row = row._replace(sampling=values_of(sampling, self._sizes))
        if self._rule is not None:
            check_judges(self._rule, temperature)
        if not np.any(np.asarray(temperature) > 0):
            if samples > 1:
                raise ValueError(
                    f"n is {samples} at temperature 0: the texts would be the same. Set a "
                    "temperature"
                )
            # Greedy decoding needs only the options that change logits.
            sampling = {
                name: value
                for name, value in sampling.items()
                if OPTIONS[name].processor is not None
            }
        elif not self._has_key and settings.seed is None:
            raise ValueError(
                f"temperature is {temperature} and there is no key: give the job one, or the "
                "prompt a seed"
            )
        stop = None
        if settings.stop is not None:
            stop = stopping.checked(settings.stop, self._target)
        needs = sampling if settings.sampling else {}
        pattern = self._pattern if settings.pattern is None else settings.pattern
        if pattern is not None:
            row = row._replace(pattern=pattern)
            self._check_pattern(row)
            needs = {**needs, "regex": [None]}
        language = settings.source_language
        if language is not None:
            self._check_language("source_language", language)
        return request._replace(row=row, stop=stop, needs=needs, samples=samples, language=language)

    def _check_pattern(self, row: Row) -> None:
        """Raises ValueError if no text can match the pattern of a row."""
        values = self.defaults if row.sampling is None else row.sampling
        limit = np.array([row.max_new_tokens])
        (entry,) = pattern_rows([row.pattern], values.get("bias"), limit)
        if entry not in self._tried:
            self._new_pool().add(*entry)
            self._tried.add(entry)

    def _begin(self, settings: job_fields.Settings) -> tuple[int, ...]:
        """Returns the ids that a row begins with if the prompt chooses its language, else ()."""
        language = settings.target_language
        if language is None:
            return ()
        self._check_language("target_language", language)
        begin = languages.first_tokens(self._target, language)
        new = self.limits.new if settings.max_new_tokens is None else settings.max_new_tokens
        positions = self._target.lm.limits.max_positions
        if positions is not None and len(begin) + new > positions:
            raise ValueError(
                f"max_new_tokens is {new}: expected at most {positions - len(begin)} after "
                f"{language!r}"
            )
        return begin

    def _check_language(self, name: str, language: str) -> None:
        """Raises ValueError, with the name of the field, if the model does not have a language."""
        try:
            languages.language_id(self._target, language)
        except ValueError as error:
            raise ValueError(
                f"the field {name!r} is not obeyed: {error}. {job_fields.DATA}"
            ) from None

    def _content(
        self, request: JobPrompt, prompt: Any, messages: Any, template: Mapping[str, Any]
    ) -> Any:
        """Returns text to tokenise, the ids of a chat, or ids as they are."""
        if messages is None and is_chat(prompt):
            messages = prompt
        if messages is not None:
            ids = self._chat_ids(request, messages, template)
            if self._prefix is None:
                return ids
            # `_with_tokens` puts the prefix before all prompts.
            row = self._prefix.followed_by(ids, "chat", request.row.number)
            return row[len(self._prefix) :]
        if isinstance(prompt, str):
            check_text(prompt, None)
            check_has_tokenizer(self._target)
        elif request.language is not None:
            raise ValueError(
                f"source_language is {request.language!r}, and the prompt is ids: give it as text"
            )
        return prompt

    def _chat_ids(
        self, request: JobPrompt, messages: Any, template: Mapping[str, Any]
    ) -> list[int]:
        """Writes a chat by its template. Raises ValueError if that fails."""
        if not is_chat(messages) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(
                f"the chat is {messages!r:.80}: expected a list of messages, each with a role"
            )
        try:
            return chat_ids(self._reader(request.language), messages, template=template)
        except ValueError:
            raise
        except Exception as error:  # a template is a program, and may raise anything
            raise ValueError(
                f"the chat cannot be written ({type(error).__name__}: {error})"
            ) from error

    def _with_tokens(self, request: JobPrompt, content: Any, content_form: str) -> JobPrompt | None:
        """Returns the prompt with its tokens or its error; None if it is skipped."""
        try:
            row = ids_of(content, None)
            shared = 0
            if not row:
                raise ValueError("the prompt is empty: it needs at least one token")
            if self._prefix is not None:
                shared = len(self._prefix)
                row = self._prefix.followed_by(row, content_form)
            check_vocabulary(row, self._target.lm.prompt_vocab, "the prompt")
        except (ValueError, TypeError) as error:
            return request._replace(error=str(error))
        limit = self._limit_of(request)
        if limit is not None and len(row) > limit:
            if self.limits.too_long == "skip":
                if self._skipped is not None:
                    self._skipped(request.row.number)
                return None
            cut = None
            if self.limits.too_long == "truncate":
                # A decoder continues the end of its prompt; an encoder's begins with the task.
                keeps_end = self._target.lm.limits.start_token is None
                frame = self._frame(request.language)
                cut = frame.cut(row, limit, keeps_end=keeps_end, shared=shared)
            if not cut:
                return request._replace(
                    error=(
                        f"the prompt has {len(row)} tokens: expected at most {limit}, with "
                        f"{request.row.max_new_tokens} new ones. Shorten it, or lower "
                        "max_new_tokens"
                    )
                )
            request = request._replace(truncated=len(row) - len(cut))
            row = cut
        return request._replace(row=request.row._replace(tokens=row))

    def _limit_of(self, request: JobPrompt) -> int | None:
        """Returns the most tokens of a prompt, given its new tokens; None for any number."""
        limits = []
        if self.limits.prompt is not None:
            limits.append(self.limits.prompt)
        if self.limits.positions is not None:
            limits.append(self.limits.positions - request.row.max_new_tokens)
        return min(limits, default=None)

    def _frame(self, language: str | None) -> token_ids.Frame:
        """Returns the special tokens that the tokenizer puts around a text of a language."""
        if language not in self._frames:
            self._frames[language] = token_ids.frame_of(self._reader(language).tokenizer)
        return self._frames[language]


def _line_of(order: int, value: Any) -> Line:
    """Makes a line of what `generate_many` takes: a dict, or a text, ids or messages."""
    is_message = (
        isinstance(value, Mapping) and "role" in value and not value.keys() & {*job_fields.CONTENT}
    )
    fields: Any = {"prompt": value}
    if isinstance(value, Mapping) and not is_message:
        fields = value
    number = order if fields.get("number") is None else fields["number"]
    return Line(number, where="", fields=fields, id=fields.get("id"))
