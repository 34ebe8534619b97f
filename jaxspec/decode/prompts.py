"""Prompts: text, chats or token ids, read as checked and padded rows.

This module decides what a prompt may be. Scores and jobs, which read prompts one by one, call the
same functions. `chat_templates` writes conversations.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core import LanguageModel, Model, Prompt, token_ids, token_rows
from jaxspec.core.checks import check_type, is_here
from jaxspec.decode import shared_prefix
from jaxspec.decode.chat_templates import chat_ids, chats_of
from jaxspec.decode.shared_prefix import SharedPrefix
from jaxspec.sampling.params import as_list

Message = Mapping[str, Any]
Prompts = (
    str
    | Sequence[str]
    | Prompt
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Sequence[Message]
    | Sequence[Sequence[Message]]
    | np.ndarray
    | jax.Array
)
CHAT = "expected a conversation, a list of messages, or a list of nothing but conversations"


def encode(
    target: Model,
    prompts: Prompts | None,
    prefix: SharedPrefix | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """Strings, token ids or chats, as a checked Prompt in a bucket; with a `prefix` they follow
    it.
    """
    if getattr(prompts, "encoder", None) is None:
        check_reads_text(target)
    form, prompt = _encode(target, prompts, chat_template_kwargs)
    if prefix is None:
        return prompt
    check_type(
        prefix, SharedPrefix, "prefix", "what jaxspec.prefix(target, text) returns", "jaxspec"
    )
    # The prefix takes whole buckets of its own, so the width that is read depends on what follows
    # it alone.
    rows = token_rows.to_lists(prompt.tokens, prompt.length)
    rows = [prefix.followed_by(row, form, index) for index, row in enumerate(rows)]
    return token_rows.pad(rows, shared_prefix.widths(len(prefix) - 1, max(map(len, rows)))[0])


def _encode(
    target: Model, prompts: Prompts | None, template: Mapping[str, Any] | None
) -> tuple[str, Prompt]:
    """Returns the form of the prompts ("text", "ids" or "chat"), and their ids."""
    chats = chats_of(prompts)
    if chats is None and isinstance(rows := rows_of(prompts), Prompt):
        check_prompt(rows, target.lm)
        return "ids", _in_bucket(rows)
    if chats is not None:
        form = "chat"
        ids = [chat_ids(target, chat, template=template) for chat in chats]
    else:
        for index, text in enumerate(rows):
            check_text(text, index)
        check_has_tokenizer(target)
        form = "text"
        ids = target.tokenizer(rows)["input_ids"] if rows else []
    prompt = token_rows.pad(ids)
    check_prompt(prompt, target.lm)  # a tokenizer may have ids that a model was never given
    return form, prompt


def _in_bucket(prompt: Prompt) -> Prompt:
    """Pads rows of ids to the width of their bucket; beside an encoder's part only its ids are
    padded.
    """
    tokens = np.asarray(prompt.tokens, np.int32)
    length = np.asarray(prompt.length, np.int32)
    if isinstance(prompt.encoder, Prompt):
        encoder = _in_bucket(prompt.encoder)
    else:
        encoder = prompt.encoder
    if encoder is None:
        tokens = np.pad(tokens, ((0, 0), (0, token_rows.bucket(tokens.shape[1]) - tokens.shape[1])))
    return Prompt(*token_rows.on_device((tokens, length, encoder)))


def check_prompt(prompt: Prompt, lm: LanguageModel) -> None:
    """Raises ValueError for rows of token ids that cannot be read: their shapes and, where they are
    not traced, lengths and ids.
    """
    shape, lengths = jnp.shape(prompt.tokens), jnp.shape(prompt.length)
    if len(shape) != 2 or lengths != shape[:1]:
        raise ValueError(
            f"prompt tokens have shape {shape}, lengths {lengths}: expected [batch, prompt] and "
            "[batch]"
        )
    if shape[0] == 0:
        raise ValueError("got no prompts: expected at least one")
    for name, array in zip(("tokens", "lengths"), prompt, strict=False):
        if not jnp.issubdtype(jnp.result_type(array), jnp.integer):
            raise ValueError(
                f"prompt {name} have dtype {jnp.result_type(array)}: expected integers"
            )
    if prompt.encoder is not None:
        _check_source(prompt.encoder, lm, shape[0])
    if not all(map(is_here, prompt[:2])):
        return
    for index, (row, n) in enumerate(zip(*map(np.asarray, prompt[:2]), strict=True)):
        if n < 1:
            raise ValueError(f"prompt {index} is empty: a prompt needs at least one token")
        if n > len(row):
            raise ValueError(f"prompt {index} has length {n}, but its row holds {len(row)} tokens")
        if prompt.encoder is None:
            vocab = lm.prompt_vocab
        else:
            vocab = lm.vocab_size
        # one by one only if there are any: a batch may have many thousand ids
        outside = row[:n][(row[:n] < 0) | (row[:n] >= vocab)]
        check_vocabulary(outside, vocab, _name(index))


def check_vocabulary(ids: Iterable[int], vocab: int, name: str) -> None:
    """Raises ValueError for an id that a model lacks.

    >>> check_vocabulary([3, 9], 7, "the prompt")
    Traceback (most recent call last):
    ValueError: the prompt has token id 9: expected ids from 0 to 6
    """
    # The ids are not made an array: int64 cannot hold every integer of Python's.
    outside = [token for token in ids if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"{name} has token id {outside[0]}: expected ids from 0 to {vocab - 1}")


def check_has_tokenizer(target: Model) -> None:
    """Raises ValueError for a model that cannot read text."""
    if target.tokenizer is None:
        raise ValueError(
            "this model has no tokenizer: give token ids, such as a jaxspec.Prompt, instead of text"
        )


def _check_source(source: Any, lm: LanguageModel, rows: int) -> None:
    """Raises ValueError if an encoder cannot read a prompt beside the decoder's rows."""
    if lm.limits.start_token is None:
        raise ValueError(
            "the prompt has an encoder's part, and the target is decoder-only: leave `encoder` out"
        )
    if isinstance(source, Prompt) != (lm.prompt_vocab > 0):
        if isinstance(source, Prompt):
            got = "a Prompt of ids"
        else:
            got = f"of type {type(source).__name__}"
        if lm.prompt_vocab == 0:
            expected = "features of sound"
        else:
            expected = "a jaxspec.Prompt of the ids that it reads"
        raise ValueError(f"the encoder's part of the prompt is {got}: expected {expected}")
    if any(jnp.shape(x)[:1] != (rows,) for x in jax.tree.leaves(source)):
        shapes = ", ".join(str(jnp.shape(x)) for x in jax.tree.leaves(source))
        raise ValueError(
            f"the encoder's part of the prompt has the shapes {shapes}: expected {rows} rows in "
            "each"
        )
    if isinstance(source, Prompt):
        if source.encoder is not None:
            raise ValueError(
                "the encoder's part of the prompt has an encoder's part itself: leave that one out"
            )
        check_prompt(source, lm)


def check_reads_text(target: Model) -> None:
    """Raises ValueError for a model whose encoder reads no ids, where prompts are text."""
    if target.lm.prompt_vocab == 0:
        raise ValueError(
            f"{target.name or 'the target'} reads sound: call jaxspec.transcribe, or give "
            "jaxspec.generate a jaxspec.Prompt(tokens, length, features)"
        )


def arrays_of(prompt: Prompt) -> Prompt:
    """Returns the same rows as arrays of JAX's."""
    try:
        arrays = (x if isinstance(x, jax.Array) else np.asarray(x) for x in prompt[:2])
        tokens, length = (_narrowed(token_rows.on_device(x)) for x in arrays)
        if isinstance(prompt.encoder, Prompt):
            encoder = arrays_of(prompt.encoder)
        else:
            encoder = prompt.encoder
        return Prompt(tokens, length, encoder)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "the tokens of a Prompt are padded rows of one length, [batch, prompt], and its "
            f"lengths [batch]: give rows of several lengths as a list of lists ({error})"
        ) from None


def _narrowed(ids: jax.Array) -> jax.Array:
    """Returns ids as int32, where `jax_enable_x64` made them wider; ids that do not fit stay out of
    every range.
    """
    if ids.dtype not in (jnp.int64, jnp.uint64):
        return ids
    return jnp.clip(ids, -1, 2**31 - 1).astype(jnp.int32)


def rows_of(prompts: Any) -> Prompt | list[Any]:
    """Prompts as texts (see `check_text`), or as rows of ids.

    Taken are one text or several; a `Prompt`, of arrays or of lists; one row of ids, or several, as
    lists or an array, of any library.

    >>> rows_of([[5, 6, 7], [8]]).length.tolist()
    [3, 1]
    """
    if prompts is None:
        raise TypeError(
            "there are no prompts: give text, a list of texts, or token ids, as the second argument"
        )
    if isinstance(prompts, Prompt):
        return arrays_of(prompts)
    if isinstance(prompts, str):
        return [prompts]
    _check_kind(prompts, "prompts")
    # A data set or a data frame: one of its columns is meant.
    columns = getattr(prompts, "column_names", getattr(prompts, "columns", None))
    if columns is not None:
        names = ", ".join(map(repr, columns))
        raise TypeError(
            f"the prompts are a {type(prompts).__name__} with the columns {names}: expected one of "
            "these"
        )
    rows = _as_python(prompts)
    if isinstance(rows, numbers.Number) or not hasattr(rows, "__iter__"):
        raise TypeError(
            f"the prompts are of type {type(prompts).__name__}: expected text, a list of texts, or "
            "token ids"
        )
    rows = list(rows)
    # A row of ids alone is one prompt; integers of any library count, and JAX's are arrays without
    # axes.
    if rows and all(is_id(_as_python(x)) for x in rows):
        rows = [rows]
    if not rows or isinstance(rows[0], str):
        return rows
    return token_rows.pad([ids_of(row, index) for index, row in enumerate(rows)])


def _as_python(values: Any) -> Any:
    """The lists and numbers of an array of any library; other values as they are."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return values


def is_id(value: Any) -> bool:
    """Says whether a value is an integer, of any library."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_ids(value: Any) -> bool:
    """Says whether a value is a row of ids: a list, a tuple or an array of integers.

    >>> is_ids([3, 1]), is_ids(np.array([3])), is_ids([]), is_ids("3"), is_ids([[3]])
    (True, True, False, False, False)
    """
    values = _as_python(value)
    return isinstance(values, list | tuple) and bool(values) and all(map(is_id, values))


def ids_of(row: Any, index: int | None) -> list[int]:
    """Reads one prompt's ids; `index` is its place among several, None for one by itself."""
    ids = _as_python(row)
    name = _name(index)
    if isinstance(row, Prompt):
        raise TypeError(
            f"{name} is a jaxspec.Prompt, which has rows itself: expected it without a list"
        )
    if not isinstance(ids, list | tuple):
        check_text(ids, index)
        raise TypeError(f"{name} is text, and others are token ids: expected all of one kind")
    ids = [_as_python(x) for x in ids]
    for value in ids:
        if isinstance(value, Mapping):
            check_text(value, index)
        if not is_id(value):
            raise TypeError(
                f"{name} is a list of more than integers, it has {value!r:.80}: expected ids of "
                "tokens"
            )
    return ids


def check_text(text: Any, index: int | None) -> None:
    """Raises TypeError for a prompt that is not text; `index` is its place among several, None for
    one by itself.

    >>> check_text(3, None)
    Traceback (most recent call last):
    TypeError: the prompt is 3, of type int: expected text, a list of token ids or a list of messages
    """
    name = _name(index)
    _check_kind(text, name)
    if not isinstance(text, str):
        if index is None:
            expected = "text, a list of token ids or a list of messages"
        else:
            expected = "text, or all as token ids"
        raise TypeError(
            f"{name} is {text!r:.80}, of type {type(text).__name__}: expected {expected}"
        )
    token_ids.check_unicode(text, name)


def _name(index: int | None) -> str:
    """Names a prompt in messages, by its place among several."""
    if index is None:
        return "the prompt"
    return f"prompt {index}"


def _check_kind(value: Any, name: str) -> None:
    """Raises TypeError for bytes, a message without its conversation, and a row of a table or of a
    tokenizer's.
    """
    if isinstance(value, bytes | bytearray):
        variable = "prompts" if name == "prompts" else "prompt"
        raise TypeError(f"{name} is bytes: expected text, such as {variable}.decode()")
    if isinstance(value, Mapping) and "role" in value:
        raise TypeError(f"{name} is a chat message: {CHAT}")
    if isinstance(value, Mapping):
        raise TypeError(
            f"{name} is a {type(value).__name__} with {', '.join(map(repr, value))}: expected the "
            "text itself, or its "
            'ids, which a tokenizer returns as ["input_ids"]'
        )


def ids_by_name(tokens: Any, tokenizer: Any, name: str = "eos_ids") -> list[int]:
    """Reads tokens that are given by id or by name, one or several.

    Args:
        tokens: a token, or several; names are those of the tokenizer's vocabulary.
        tokenizer: the target's. None: only ids can be given.
        name: the name of the option, for errors.

    >>> ids_by_name([3, 5], None), ids_by_name(3, None)
    ([3, 5], [3])
    """
    ids = []
    for token in as_list(tokens):
        if isinstance(token, str):
            if tokenizer is None:
                raise ValueError(
                    f"{name} has {token!r}, and this model has no tokenizer: give its id"
                )
            vocabulary = tokenizer.get_vocab()
            if token not in vocabulary:
                raise ValueError(f"{name} has {token!r}, which is not a token of the target's")
            token = vocabulary[token]
        ids.append(token)
    return ids
