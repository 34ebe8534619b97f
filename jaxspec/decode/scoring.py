"""Scoring text that is given: the log probability of each of its tokens, after a prompt or by
itself.

Rows of one batch are about as long as each other. A row is read as a chat goes on with a
conversation, in chunks through the model's cache (`core.chunks`). So memory does not grow with the
square of its length. Logits are read off some positions at a time, and none are kept.

Shapes: B batch, T tokens that are fed, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core, sharding
from jaxspec.core import chunks, noise, programs, token_ids, token_rows
from jaxspec.core.checks import are_shapes, at_least, check_model, check_untraced, integer
from jaxspec.decode import causality, device_memory
from jaxspec.decode.chat_templates import chat_ids, is_chat
from jaxspec.decode.prompts import (
    check_has_tokenizer,
    check_reads_text,
    check_text,
    check_vocabulary,
    ids_by_name,
    is_ids,
)
from jaxspec.decode.shared_prefix import common

# rows of so many batches are sorted by their length before they are put into batches
SORTED_BATCHES = 32
LOGITS = 2**25  # that are made at a time: 128 MB
PAIR = (
    'expected a text, ids of tokens, or a pair (prompt, continuation) of these, such as ("2 + 2 '
    '=", " 4")'
)

Text = str | Sequence[int] | tuple[Any, Any]
"""A text or ids, or a pair of a prompt (text, ids, or a conversation) and what follows it (text or
ids).
"""


@dataclasses.dataclass(frozen=True)
class Score:
    """The log probabilities of one text, in nats.

    Attributes:
        tokens: the ids that were scored.
        log_probs: the log probability of each, given all tokens before it: the model's own, at
            temperature 1.
        greedy: whether each is the most probable token at its place.
        num_bytes: bytes of the text that these tokens spell, in UTF-8; None for a text that was
            given as ids.

    Example:
        >>> score = Score([3, 1], np.log([0.5, 0.25]), np.array([True, False]), num_bytes=3)
        >>> (
        ...     round(score.log_prob, 3),
        ...     score.is_greedy,
        ...     round(score.perplexity, 3),
        ...     score.bits_per_byte,
        ... )
        (-2.079, False, 2.828, 1.0)
    """

    tokens: list[int]
    log_probs: np.ndarray
    greedy: np.ndarray
    num_bytes: int | None = None

    @property
    def log_prob(self) -> float:
        """The log probability of the whole: the sum over its tokens."""
        return float(np.sum(self.log_probs, dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        """Says whether greedy decoding would have written exactly these tokens."""
        return bool(np.all(self.greedy))

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log probability of a token."""
        return float(np.exp(-self.log_prob / len(self.tokens)))

    @property
    def bits_per_byte(self) -> float | None:
        """The negative log probability in bits for each byte of the text; None where bytes are not
        known.
        """
        if self.num_bytes:
            return -self.log_prob / math.log(2) / self.num_bytes
        return None

    def to_dict(self, tokens: bool = True) -> dict[str, Any]:
        """Returns plain values for JSON; with `tokens` the ids, too, and the log probability of
        each.
        """
        names = ("log_prob", "is_greedy", "perplexity", "bits_per_byte", "num_bytes")
        values = {name: getattr(self, name) for name in names} | {"num_tokens": len(self.tokens)}
        values = {
            name: None if value in (math.inf, -math.inf) else value
            for name, value in values.items()
        }
        if tokens:
            finite = [
                None if value == -math.inf else value
                for value in np.asarray(self.log_probs).tolist()
            ]
            values |= {
                "tokens": self.tokens,
                "log_probs": finite,
                "greedy": np.asarray(self.greedy).tolist(),
            }
        return values


def score(
    target: core.Model,
    texts: Text | Iterable[Text],
    *,
    batch_size: int = 16,
    start: int | str | None = None,
    end: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Score]:
    """Computes the log probabilities that a model gives to texts: perplexities, and answers to
    choose among.

    A pair (prompt, continuation) scores the continuation. Text is encoded as evaluation harnesses
    do it: both together, and what prompt and whole have in common is the prompt's. A token that
    spans the border belongs to the continuation. A text by itself is scored from its second token
    on, or from its first one after a begin-of-sequence token: the tokenizer's, if it puts one
    there, or `start`. Of an encoder-decoder the prompt is the source, and the continuation its
    target text.

    Args:
        target: the model.
        texts: one or several, each a text, ids of tokens, or a pair (prompt, continuation). A
            prompt may be a list of messages for the model's chat template, too.
        batch_size: rows read at a time. Their number does not change the scores, except by
            rounding.
        start: a token that is put before texts and empty prompts, by id or name, such as
            "<|endoftext|>".
        end: whether the end-of-sequence token after each text is scored, too.
        chat_template_kwargs: values for the template of conversations.

    Returns:
        A `Score` for each text, in their order.

    Raises:
        ValueError, TypeError: a text cannot be read, has no token to score, or is longer than the
            model's positions.
        FloatingPointError: the model's logits are not finite.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> out = jaxspec.generate(model, [[3, 1]], max_new_tokens=4, log_probs=True)
        >>> (score,) = jaxspec.score(model, [([3, 1], out.tokens[0])])
        >>> score.is_greedy, bool(np.allclose(score.log_probs, out.log_probs.raw[0]))
        (True, True)
    """
    if (
        isinstance(texts, tuple)
        and len(texts) == 2
        and all(isinstance(text, str) or is_ids(text) for text in texts)
    ):
        raise TypeError(
            "texts is a tuple of two texts: give [(prompt, continuation)], or a list of two texts"
        )
    single = isinstance(texts, str) or (not isinstance(texts, Iterator) and is_ids(texts))
    all_texts: Any = [texts] if single else texts
    return list(iterate(target, all_texts, batch_size, start, end, chat_template_kwargs))


@programs.outside_context_mesh
def iterate(
    target: core.Model,
    texts: Iterable[Text],
    batch_size: int = 16,
    start: int | str | None = None,
    end: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[Score]:
    """Yields the score of each text, in their order, while further ones are read; see `score`."""
    for scored in outcomes(
        target, texts, batch_size, start, end, chat_template_kwargs, keeps_errors=False
    ):
        assert isinstance(scored, Score)
        yield scored


def outcomes(
    target: core.Model,
    texts: Iterable[Text | Exception],
    batch_size: int = 16,
    start: int | str | None = None,
    end: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    keeps_errors: bool = True,
) -> Iterator[Score | Exception]:
    """Yields the score of each text, in their order, and an exception in place of one that cannot
    be scored.

    An exception among the texts, of a line that could not be read, is yielded in its place. Without
    `keeps_errors` the first one is raised. What holds for all texts, such as a lack of memory, is
    raised in any case.
    """
    check_model(target, "target")
    check_reads_text(target)
    batch_size = integer(batch_size, "batch_size", "an integer, 1 or more")
    at_least(1, batch_size=batch_size)
    _check_parameters(target)
    first = _first_id(target, start)
    if end and not token_ids.ends(target):
        raise ValueError(
            f"end is True, and {target.name or 'the target'} has no end-of-sequence token"
        )

    def read_row(number: int, text: Text | Exception) -> _Row | Exception:
        try:
            if isinstance(text, Exception):
                raise text
            return _row(target, text, number, first, end, chat_template_kwargs)
        except (ValueError, TypeError) as error:
            if not keeps_errors:
                raise
            return error

    rows = (read_row(number, text) for number, text in enumerate(texts))
    begun = 0
    while chunk := list(itertools.islice(rows, SORTED_BATCHES * batch_size)):
        done = dict[int, Score | Exception]()
        done |= {index: row for index, row in enumerate(chunk) if isinstance(row, Exception)}
        for index, result in _scores(target, chunk, batch_size):
            done[index] = result
            # NaN, too; rounding may leave a little above 0
            if not np.all(result.log_probs <= 1e-3):
                error = FloatingPointError(
                    f"the target's logits are not finite in text {begun + index}"
                )
                if not keeps_errors:
                    raise error
                done[index] = error
        yield from (done[index] for index in range(len(chunk)))
        begun += len(chunk)


def _check_parameters(target: core.Model) -> None:
    """Raises ValueError for parameters that cannot score, or for a model that is not causal."""
    check_untraced(target.params)
    if are_shapes(target.params):
        raise ValueError(
            f"{target.name or 'the target'} has shapes in place of parameters: load it to score "
            "texts"
        )
    causality.check(target)


def _first_id(target: core.Model, start: int | str | None) -> int | None:
    """Returns the id of the token to begin texts with; None without `start`."""
    if start is None:
        return None
    if target.lm.limits.start_token is not None:
        raise ValueError(
            f"start is {start!r}, and {target.name or 'the target'} has a start token: leave start "
            "out"
        )
    return ids_by_name(start, target.tokenizer, "start")[0]


def _scores(
    target: core.Model, rows: Sequence[_Row | Exception], batch_size: int
) -> Iterator[tuple[int, Score]]:
    """Yields the index and the score of each row, leaving out exceptions, in batches by length.

    Rows of one length in a batch need little padding.
    """
    readable = {index: row for index, row in enumerate(rows) if isinstance(row, _Row)}
    order = sorted(
        readable, key=lambda index: (len(readable[index].ids), len(readable[index].source))
    )
    batch_rows = min(batch_size, len(order))
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        scores = _of_batch(target, [readable[index] for index in chosen], batch_rows)
        yield from zip(chosen, scores, strict=True)


class _Row(NamedTuple):
    """A text as ids."""

    # the part that prefill reads: an encoder's prompt, or a decoder's first token
    source: list[int]
    ids: list[int]  # the tokens that follow
    skipped: int  # how many of them belong to the prompt, and are not scored
    num_bytes: int | None  # see `Score`


def _row(
    target: core.Model,
    text: Text,
    number: int,
    first: int | None,
    end: bool,
    template: Mapping[str, Any] | None,
) -> _Row:
    """Reads a text. Raises ValueError or TypeError if the model cannot score it."""
    name = f"text {number}"
    prompt, scored = _prompt_and_scored(target, text, name)
    is_decoder = target.lm.limits.start_token is None
    before, ids = _encoded(target, prompt, scored, number, template)
    # A tokenizer may have put the beginning there already; it is not doubled.
    lacks_beginning = (prompt is None or not before) and ids[:1] != [first]
    if is_decoder and first is not None and lacks_beginning:
        before = [first, *before]
    if end:
        ids = [*ids, token_ids.ends(target)[0]]
    if prompt is not None and not before:
        raise ValueError(
            f"{name} has an empty prompt: give start, a token to begin with, such as "
            "'<|endoftext|>'"
        )
    _check_ids(target, name, before, ids)
    num_bytes = None
    if isinstance(scored, str):
        num_bytes = len(scored.encode(errors="surrogatepass"))
    if not is_decoder:
        return _Row(before, ids, 0, num_bytes)
    row = [*before, *ids]
    # A first token that nothing precedes is not scored, and its bytes do not count.
    if not before and isinstance(scored, str):
        num_bytes = _bytes_after_first(target, scored, row[0])
    return _Row(row[:1], row[1:], max(len(before) - 1, 0), num_bytes)


def _prompt_and_scored(target: core.Model, text: Text, name: str) -> tuple[Any, Any]:
    """Splits a pair into its prompt and the text to score; a single text has the prompt None."""
    is_pair = isinstance(text, tuple | list) and len(text) == 2 and not is_ids(text)
    prompt, scored = text if is_pair else (None, text)
    if not (isinstance(scored, str) or is_ids(scored)):
        raise TypeError(f"{name} is {scored!r:.80}, of type {type(scored).__name__}: {PAIR}")
    if prompt is None and target.lm.limits.start_token is not None:
        raise ValueError(
            f"{name} has no prompt, and {target.name or 'the target'} is an encoder-decoder: give "
            "pairs of a source and its target text"
        )
    return prompt, scored


def _bytes_after_first(target: core.Model, text: str, first: int) -> int | None:
    unscored = token_ids.num_bytes_of_first(target.tokenizer, text, first)
    if unscored is None:
        return None
    return len(text.encode()) - unscored


def _check_ids(target: core.Model, name: str, before: list[int], ids: list[int]) -> None:
    """Raises ValueError if a model cannot score `ids` after `before` (a prompt or a source)."""
    lm = target.lm
    is_decoder = lm.limits.start_token is None
    if not ids:
        raise ValueError(f"{name} has no token")
    if is_decoder and len(before) + len(ids) < 2:
        raise ValueError(
            f"{name} has one token, and nothing before it: give start, a token to begin with"
        )
    for tokens, vocab in ((before, lm.prompt_vocab), (ids, lm.vocab_size)):
        check_vocabulary(tokens, vocab, name)
    row_tokens = len(ids) + len(lm.limits.first_tokens)
    if is_decoder:
        row_tokens += len(before)
    positions = lm.limits.max_positions
    if positions is not None and row_tokens > positions:
        raise ValueError(
            f"{name} has {row_tokens} tokens, and the model has {positions} positions: cut it into "
            "parts"
        )
    longest = lm.limits.max_prompt
    if not is_decoder and longest is not None and len(before) > longest:
        raise ValueError(
            f"{name} has a source of {len(before)} tokens, and the model reads {longest}"
        )


def _encoded(
    target: core.Model, prompt: Any, scored: Any, number: int, template: Mapping[str, Any] | None
) -> tuple[list[int], list[int]]:
    """Returns the ids of a prompt, which may be empty, and the ids of the scored text."""
    for text in (prompt, scored):
        if isinstance(text, str):
            check_text(text, number)
            check_has_tokenizer(target)
    is_decoder = target.lm.limits.start_token is None
    if isinstance(prompt, str) and isinstance(scored, str) and is_decoder:
        # A tokenizer may join the prompt's end and the text's beginning into one token, which is
        # then scored.
        together = _ids_of(target, prompt + scored)
        alone = _ids_of(target, prompt)
        same = common(together, alone)
        return together[:same], together[same:]
    if not isinstance(scored, str):
        ids = [int(x) for x in scored]
    else:
        ids = _ids_of(target, scored, begins=prompt is None)
    if prompt is None:
        return [], ids
    if not isinstance(prompt, str) and is_chat(prompt):
        return chat_ids(target, prompt, template=template), ids
    if isinstance(prompt, str):
        return (
            _ids_of(target, prompt) if is_decoder else list(target.tokenizer(prompt)["input_ids"])
        ), ids
    if not (is_ids(prompt) or (hasattr(prompt, "__len__") and len(prompt) == 0)):
        raise TypeError(
            f"text {number} has the prompt {prompt!r:.80}, of type {type(prompt).__name__}: {PAIR}"
        )
    return [int(x) for x in prompt], ids


def _ids_of(target: core.Model, text: str, begins: bool = True) -> list[int]:
    """Encodes a text without the tokenizer's end token; `begins` keeps its beginning token."""
    # Some tokenizers of encoder-decoders write another vocabulary than they read (Marian's).
    if target.lm.limits.start_token is None:
        writes = {"text": text}
    else:
        writes = {"text_target": text}
    ids = list(target.tokenizer(**writes, add_special_tokens=begins)["input_ids"])
    if begins and ids and ids[-1] == getattr(target.tokenizer, "eos_token_id", None):
        # A text may itself end with the end token.
        if text.endswith(target.tokenizer.eos_token or "\0"):
            return ids
        return ids[:-1]
    return ids


def _of_batch(target: core.Model, rows: Sequence[_Row], batch: int) -> list[Score]:
    """Scores rows of about one length: a program for each bucket of lengths, and for each number of
    rows.
    """
    # The last batch repeats a row, so that it runs the program of the others.
    filled = [*rows, *[rows[-1]] * (batch - len(rows))]
    is_decoder = target.lm.limits.start_token is None
    prompt = token_rows.pad([row.source for row in filled], width=1 if is_decoder else None)
    fed = token_rows.pad([row.ids for row in filled])
    weights = core.Weights(target.params)
    if device_memory.is_large(batch, fed.tokens.shape[1], 0):
        # Shapes alone: memory is refused before anything is allocated.
        begin = functools.partial(
            target.lm.prefill, room=_room(target.lm, prompt, fed.tokens.shape[1])
        )
        parts = {"weights": device_memory.size_of(weights)}
        parts["caches"] = device_memory.size_of(
            jax.eval_shape(begin, programs.automatic(target.params), prompt)[1]
        )
        purpose = f"{batch} texts of up to {fed.tokens.shape[1]} tokens, padding included,"
        device_memory.check_memory(parts, purpose, "batch_size", device_memory.devices(weights))
    mesh = sharding.mesh_of(weights)
    if mesh is not None:
        prompt, fed = sharding.place((prompt, fed), batch, mesh)
    # Two numbers a token leave the device; logits never do.
    log_probs, greedy = sharding.fetch(read(target.lm, target.params, prompt, fed))
    return [
        Score(
            row.ids[row.skipped :],
            lp[row.skipped : len(row.ids)],
            best[row.skipped : len(row.ids)],
            row.num_bytes,
        )
        for row, lp, best in zip(rows, log_probs, greedy, strict=False)
    ]


def _room(lm: core.LanguageModel, prompt: core.Prompt, width: int) -> core.Room:
    size, count = chunks.split(width)
    return token_rows.reading_room(lm, prompt, size * count)


@programs.jit(static_argnames=("lm",))
def read(
    lm: core.LanguageModel, params: core.Params, prompt: core.Prompt, fed: core.Prompt
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Computes the log probability of each token that follows a prompt, and whether it is the most
    probable one.

    Prefill reads the prompt: one token of a decoder-only model, an encoder's text. Padding holds
    garbage.
    """
    width = fed.tokens.shape[1]
    room = _room(lm, prompt, width)
    forward, cache = lm.prefill(params, prompt, room)
    # A row's first token, or an encoder-decoder's beginning of it, is in the cache.
    begun = jnp.full_like(fed.length, token_rows.prefill_length(lm, prompt))
    # Prefill ends before the text, so its logits score the first token.
    first = _of_tokens(forward.logits, fed.tokens[:, :1])
    if width == 1:
        return first
    # Token i + 1 follows token i. The last one is fed in vain.
    following = jnp.concatenate([fed.tokens[:, 1:], jnp.zeros_like(fed.tokens[:, :1])], axis=1)

    def feed(
        cache: core.Cache,
        entries: tuple[Int[Array, "B C"], Int[Array, "B C"]],
        real: Int[Array, " B"],
    ) -> tuple[Any, core.Cache]:
        forward, cache = lm.extend(params, cache, entries[0], real=real)
        return _read_off(lm, params, forward, entries[1]), cache

    before = core.Before(cache, begun, width)
    shapes = jax.eval_shape(lambda: cache)
    later, _, _ = chunks.read(
        feed,
        lm.rewind,
        lambda *_: shapes,
        (fed.tokens, following),
        begun + fed.length,
        room,
        before,
    )
    return jax.tree.map(
        lambda begin, more: jnp.concatenate([begin, more[:, :-1]], axis=1), first, later
    )


def _read_off(
    lm: core.LanguageModel, params: core.Params, forward: core.Forward, following: Int[Array, "B C"]
) -> tuple[Float[Array, "B C"], Bool[Array, "B C"]]:
    """Scores the tokens that follow from a pass, with few logits at a time if the model has a
    separate head.
    """
    batch, step = following.shape
    # Features [B, C, M] are small; logits [B, size, V] exist for a few positions at a time.
    size = max(1, min(step, LOGITS // (batch * lm.vocab_size)))
    if lm.inside is None or size == step:
        return _of_tokens(forward.logits, following)
    head = lm.inside.head
    count = -(-step // size)

    def parts(x: Array) -> Array:  # [B, C, ..] -> [count, B, size, ..]
        padded = jnp.pad(x, [(0, 0), (0, size * count - step)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    def of_part(entries: tuple[Array, Array]) -> tuple[Array, Array]:
        return _of_tokens(head(params, entries[0]), entries[1])

    outputs = jax.lax.map(of_part, (parts(forward.features), parts(following)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :step], outputs)


def _of_tokens(
    logits: Float[Array, "B C V"], tokens: Int[Array, "B C"]
) -> tuple[Float[Array, "B C"], Bool[Array, "B C"]]:
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    # Padding is scored, too, and dropped by the host, which knows each row's length.
    chosen = jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
    return chosen, noise.first_largest(logits) == tokens
