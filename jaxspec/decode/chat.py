"""A chat whose models keep their caches from turn to turn and read only the new tokens."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.core import (
    BoundDrafter,
    Decoder,
    Drafter,
    Model,
    State,
    kv_cache,
    programs,
    token_rows,
)
from jaxspec.core.checks import key_of
from jaxspec.decode import loop, stopping
from jaxspec.decode.chat_templates import chat_ids, check_template
from jaxspec.decode.generate import pieces, prefix
from jaxspec.decode.output import Piece
from jaxspec.decode.request import Prepared, named, positions_left, prepare
from jaxspec.decode.shared_prefix import common

ANSWER = 512  # most tokens of an answer, by default
# tokens that the buffers of a chat have room for; they grow as the buckets of prompts do
SMALLEST = 512


@dataclasses.dataclass(eq=False, repr=False)
class Chat:
    """A conversation with a model; `jaxspec.chat` begins one.

    Attributes:
        target: the model that answers.
        options: `jaxspec.generate`'s options, for every answer.
        messages: the conversation so far, {"role": ..., "content": ...} each. It may be changed
            between two turns.
        prompt_tokens, reused_tokens: tokens of the conversation before the last answer, and how
            many of these were not read again.
        is_new_shape: whether programs of the last turn had not run in this chat before, and so had
            to be compiled.
    """

    target: Model
    options: Mapping[str, Any]
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    is_new_shape: bool = False

    def __post_init__(self):
        # A copy: what is taken out below stays in the caller's dict.
        self._options = dict(self.options)
        self._stop = self._options.pop("stop", ())
        self._template = self._options.pop("chat_template_kwargs", None)
        self._state: State | None = None  # after the last turn
        self._capacity = SMALLEST
        self._answering: Generator[Piece, None, None] | None = None
        self._empty = None
        self._attempt = 0  # answers to the last message before this one
        self._shapes = set[Any]()  # of the turns so far
        # Wrong options are refused at once.
        check_template(self.target)
        if self._options.get("prefix") is not None:
            raise ValueError(
                "got a prefix: a chat reads its own; what it begins with is given as system"
            )
        rows = len(prepare(self.target, [[0]], **self._options).request.max_new_tokens)
        if rows != 1:
            raise ValueError(f"num_samples is {rows}: a chat has one answer to each message")
        stopping.checked(self._stop, self.target)
        # an encoder reads each conversation as a whole
        if self.target.lm.limits.start_token is None:
            self._empty = prefix(self.target, [0], drafter=self._options["drafter"])

    def __repr__(self) -> str:
        """Its messages; the arrays are large."""
        return f"Chat with {self.target.name or 'a model'}: {self.messages}"

    def send(self, content: Any) -> Iterator[Piece]:
        """Streams the answer to a message; both are appended to `messages`.

        The conversation's tokens, as the template writes them, are compared with the cached ones
        and read from the first difference on. An answer that is not read to its end is kept as far
        as it was read.

        Raises:
            ValueError: the reasons of `jaxspec.stream`; the conversation is too long for the model.
        """
        self._end_answer()
        return self._answer_to([*self.messages, {"role": "user", "content": content}], 0)

    def retry(self) -> Iterator[Piece]:
        """Streams another answer to the last message, in place of the one that it has.

        Greedy answers are the same again. A sampled one has another key: the turn's, folded with
        the number of the attempt.

        Raises:
            ValueError: the conversation has no message to answer.
        """
        self._end_answer()
        users = [
            number for number, message in enumerate(self.messages) if message.get("role") == "user"
        ]
        if not users:
            raise ValueError("there is no message to answer again")
        return self._answer_to(self.messages[: users[-1] + 1], self._attempt + 1)

    def reset(self) -> None:
        """Begins anew: forgets everything but the system's message."""
        self._end_answer()
        self.messages[:] = [
            message for message in self.messages[:1] if message.get("role") == "system"
        ]
        self._state = None

    def _answer_to(
        self, messages: list[dict[str, Any]], attempt: int
    ) -> Generator[Piece, None, None]:
        """Begins an answer to a conversation, which takes the place of `messages` if it can be
        answered.
        """
        ids = chat_ids(self.target, messages, template=self._template)
        with programs.without_context_mesh():
            prepared, begin = self._prepared(
                ids, sum(message.get("role") == "user" for message in messages) - 1, attempt
            )
        self.messages[:], self._attempt = messages, attempt
        self._answering = self._answer(prepared, begin)
        return self._answering

    def _end_answer(self) -> None:
        """Ends an answer that is not read further."""
        if self._answering is not None:
            # A generator that never ran has no `finally`: the conversation would lack an answer.
            if inspect.getgeneratorstate(self._answering) == inspect.GEN_CREATED:
                self.messages.append({"role": "assistant", "content": ""})
            self._answering.close()
            self._answering = None

    @programs.outside_context_mesh
    def _answer(self, prepared: Prepared, begin: loop.Begin) -> Generator[Piece, None, None]:
        text = ""

        def keep(state: State) -> None:
            self._state = state

        try:
            for piece in pieces(prepared, self._stop, keep, begin):
                text += piece.text
                yield piece
        except BaseException as error:
            # a round that did not end has consumed the state
            if not isinstance(error, GeneratorExit):
                self._state = None
            raise
        finally:
            self.messages.append({"role": "assistant", "content": text})

    def _prepared(self, ids: list[int], turn: int, attempt: int) -> tuple[Prepared, loop.Begin]:
        """Prepares the generation that continues after the cached tokens, and its beginning."""
        key = self._options.get("key")
        options = dict(self._options)
        if key is not None:
            # Turns and attempts have keys of their own, which depend on their numbers alone: a
            # retry differs, a replay does not.
            key = jax.random.fold_in(key_of(key), turn)
            if attempt:
                options["key"] = jax.random.fold_in(key, attempt)
            else:
                options["key"] = key
        if options.get("max_new_tokens") is None:
            options["max_new_tokens"] = self._limit(ids)
        prepared = prepare(self.target, [ids], **options)
        self.prompt_tokens = len(ids)
        self.reused_tokens = 0
        if self._empty is None:
            self._note_shape(prepared.prompt.tokens.shape)
            return prepared, loop.prefill
        start = 0
        no_tokens = self._empty.caches
        if self._state is not None:
            (row,) = token_rows.to_lists(self._state.tokens, self._state.length)
            # The caches are one token behind, and drafters may be two.
            start = max(0, min(common(row, ids), len(row) - 1) - 1)
            if not kv_cache.can_rewind(self._state.caches, start):
                start = 0  # layers with a window have lost what comes before it
        # Only what follows the common beginning is read, in a bucket of its own.
        width = token_rows.bucket(len(ids) - start)
        headroom = token_rows.headroom(prepared.max_new_tokens, prepared.decoder.nodes)
        needed = start + width + headroom
        # Layers with a window must be able to take back a whole answer, which a template may
        # rewrite.
        if not kv_cache.states(self._empty.caches):
            prepared = prepared._replace(
                decoder=_taking_back(prepared.decoder, prepared.max_new_tokens)
            )
        # Buffers only grow: a turn in the same capacity runs the same program.
        if needed <= self._capacity:
            capacity = self._capacity
        else:
            capacity = token_rows.bucket(needed)
        prepared = prepared._replace(prompt=token_rows.pad([ids], capacity - headroom))
        loop.check_fits(prepared)
        self._capacity = capacity
        self.reused_tokens = start
        begins_anew = self._state is None or self._state.tokens.shape[1] < capacity
        self._note_shape((capacity, width, begins_anew))

        def begin(p: Prepared) -> State:
            # No reference is kept to the last turn's caches: they become the next ones, or are
            # freed after them.
            state = self._state
            self._state = None
            caches = no_tokens if state is None else state.caches
            before = caches.before(
                jnp.asarray([start + 1], jnp.int32), width, drafts=p.drafter is not None
            )
            first = loop.start if begins_anew else loop.go_on
            return first(p.decoder, p.weights, p.prompt, p.request, p.max_new_tokens, before)

        return prepared, begin

    def _limit(self, ids: list[int]) -> int:
        """Returns the most tokens of an answer where the caller has not said it."""
        positions = positions_left(self.target, self._options["drafter"], token_rows.pad([ids]), 1)
        if positions is None:
            return ANSWER
        room = int(positions[0])
        limits = [ANSWER, room]
        if self._empty is not None:  # a decoder's row also has to hold the next messages
            limits.append((len(ids) + room) // 4)
        return max(1, min(limits))

    def _note_shape(self, shape: Any) -> None:
        """Remembers the shapes and options that a turn's programs depend on."""
        self.is_new_shape = shape not in self._shapes
        self._shapes.add(shape)


@functools.lru_cache
def _taking_back(decoder: Decoder, tokens: int) -> Decoder:
    """Makes the decoder of a chat: the next turn may take back the last answer, where a template
    rewrites it.
    """
    return decoder._replace(init=functools.partial(decoder.init, spare=tokens))


def chat(
    target: Model,
    *,
    drafter: Model | Drafter | BoundDrafter | str | None = None,
    system: str | None = None,
    max_new_tokens: int | None = None,
    stop: Sequence[str] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Chat:
    """Begins a conversation, in the template of the model's tokenizer.

    Each answer has the text that `generate` gives the whole conversation, but the caches of the
    target and the drafter stay from turn to turn. A turn reads new tokens, and tokens that the
    template has changed. They have room for 512 tokens, and for a larger bucket
    (`token_rows.bucket`) when a conversation needs it. So a turn compiles nothing, unless that
    happens or its new tokens fall into a bucket that no turn had before. Layers with a sliding
    window keep little more than the window (`core.kv_cache`): where a template changes, or you do,
    what lies further back, the whole conversation is read again. Of an encoder-decoder nothing is
    kept: its encoder reads a prompt as a whole.

    Args:
        target: the model that answers.
        drafter: the drafter of every answer, as in `generate`.
        system: the system's message, if any.
        max_new_tokens: most tokens of an answer. By default 512, or fewer for a model with few
            positions: a quarter of a decoder's positions, and what the conversation leaves.
        stop: strings that end an answer, cut from it.
        chat_template_kwargs: values for the template, such as {"enable_thinking": False}.
        **options: the options of `generate`, with one value each. Each turn folds its number, from
            0 on, into `key`.

    Raises:
        ValueError, TypeError: the reasons of `generate`; also a model without a template.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model, word_tokenizer
        >>> words = ["<unk>", "</s>", "hello", "there", "old", "dog", "user", "assistant"]
        >>> template = (
        ...     "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\\n{% endfor %}assistant"
        ... )
        >>> tokenizer = word_tokenizer(words, chat_template=template)
        >>> target = table_model(jax.random.key(2), vocab=8)._replace(tokenizer=tokenizer)
        >>> talk = chat(target, drafter=jaxspec.drafters.prompt_lookup(), max_new_tokens=4)
        >>> for content in ("hello there", "old dog"):
        ...     answer = "".join(piece.text for piece in talk.send(content))
        ...     print(
        ...         talk.messages[-1]["content"] == answer, talk.prompt_tokens, talk.reused_tokens
        ...     )
        True 4 0
        True 12 6
    """
    options = dict(
        options,
        drafter=named(drafter, target),
        max_new_tokens=max_new_tokens,
        stop=stop,
        chat_template_kwargs=chat_template_kwargs,
    )
    messages = []
    if system is not None:
        messages = [{"role": "system", "content": system}]
    return Chat(target, options, messages)
