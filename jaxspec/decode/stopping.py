"""Stop strings and text as it appears: only the host can see them, so rows are cut between rounds.

The text of a row's first tokens need not be the beginning of its text: half a character, a run of
byte tokens, and spaces that are cleaned up are decoded to something else when more follows. So a
stop string is looked for after every token, however many a round commits; and text is given out in
whole words, once no token can change it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core import Decoder, Finish, Model, Request, RoundInfo, State, token_ids
from jaxspec.decode import log_probs, loop
from jaxspec.decode.request import Prepared
from jaxspec.decode.shared_prefix import common
from jaxspec.structured.tables import FREE

# the first of the characters that stand for special tokens: half surrogates, which no decoded text
# has
MARK = 0xD800
MARKED = re.compile("[\ud800-\udfff]")
# What `clean_up_tokenization_spaces` may still change: no string that it replaces has another
# character than these.
UNCLEANED = re.compile("[ .?!,'ntmsver\ud800-\udfff]+\\Z")
# how vocabularies of sentencepiece spell a token that is a byte
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class Stop(NamedTuple):
    """Stop strings, ready to be looked for in a tokenizer's text.

    Attributes:
        tokenizer: the target's. None if it has no tokenizer; `strings` is then empty.
        strings: the strings that end a row. One that names special tokens, which decoded text does
            not show, is there twice: as it is, and with a mark for each of these tokens.
        marks: the mark of each special token that they name, by id.
        special: ids of all special tokens.
        joins: whether the text is that of each token, put together, whatever the tokenizer would
            clean up of it: a text that matches a pattern.
    """

    tokenizer: Any
    strings: tuple[str, ...]
    marks: dict[int, str]
    special: frozenset[int]
    joins: bool = False


def stop_of(tokenizer: Any, strings: Sequence[str]) -> Stop:
    """Makes stop strings ready to be looked for.

    >>> from jaxspec.testing import word_tokenizer
    >>> text_of(stop_of(word_tokenizer(["<unk>", "</s>", "the", "old"]), ["</s>"]), [2, 3, 1, 2])
    'the old'
    """
    added = {}
    if tokenizer is not None:
        added = tokenizer.added_tokens_decoder
    special = {token.content: index for index, token in added.items() if token.special}
    marks = dict[int, str]()
    marked = list(strings)
    # of two names, one within the other, the longer
    for name in sorted(special, key=len, reverse=True):
        if any(name in string for string in marked):
            mark = marks[special[name]] = chr(MARK + len(marks))
            marked = [string.replace(name, mark) for string in marked]
    return Stop(
        tokenizer, tuple(dict.fromkeys([*strings, *marked])), marks, frozenset(special.values())
    )


def checked(stop: Any, target: Model) -> Stop:
    """Checks a user's stop strings (None, one, or several) and prepares the search for them."""
    if stop is None:
        strings = ()
    elif isinstance(stop, str):
        strings = (stop,)
    else:
        strings = stop
    if not isinstance(strings, Sequence | set) or not all(
        isinstance(string, str) for string in strings
    ):
        raise TypeError(f"stop is {stop!r}: expected a string, or a list of strings")
    strings = tuple(strings)
    if strings and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, which this model lacks: use eos_ids")
    if any(not string for string in strings):
        raise ValueError("stop has an empty string: it would end every row at once")
    token_ids.check_unicode(strings, "stop")
    return stop_of(target.tokenizer, strings)


def of_rows(stop: Stop, request: Request) -> list[Stop]:
    """Returns the stop strings of each row, whose text is put together of its tokens if it has a
    pattern.
    """
    structured = getattr(request.sampling_params, "structured", None)
    if structured is None:
        return [stop] * len(request.max_new_tokens)
    return [stop._replace(joins=state != FREE) for state in np.asarray(structured.state).tolist()]


def run(prepared: Prepared, stop: Stop, begin: loop.Begin | None = None) -> loop.Outcome:
    """`loop.run`, ending a row when its text holds a stop string."""
    infos = []
    for state, info in loop.iterate_rounds(
        prepared, edit(of_rows(stop, prepared.request)), begin or loop.prefill
    ):
        if info is not None:
            infos.append(info)
        last = state
    trace = _trace(infos, prepared.decoder, len(prepared.request.max_new_tokens))
    return loop.outcome(last, trace, prepared.max_new_tokens)


def edit(stops: Sequence[Stop]) -> loop.Edit:
    """Ends every row whose text holds one of its stop strings at the token that completes it.

    The tokens after the string were then never committed, nor counted.
    """
    return functools.partial(_cut, stops)


def _cut(
    stops: Sequence[Stop], state: State, info: RoundInfo | None
) -> tuple[State, RoundInfo | None]:
    tokens, length, start = (np.asarray(x) for x in (state.tokens, state.length, state.start))
    if info is None:
        committed = length - start
    else:
        committed = np.asarray(info.num_committed)
    stopped = np.zeros(length.shape, bool)
    over = np.zeros_like(length)
    for row, stop in enumerate(stops):
        new = tokens[row, start[row] : length[row]].tolist()
        needed = tokens_needed(stop, new, len(new) - int(committed[row]))
        if needed is not None:
            over[row] = len(new) - needed
            stopped[row] = True
    stats = state.stats._replace(emitted=state.stats.emitted - over)
    if info is not None:
        # A cut row gives back accepted tokens after the stop string, and only those that were
        # accepted.
        kept = info.num_committed - over
        lost = jnp.minimum(info.num_accepted, info.num_committed) - jnp.minimum(
            info.num_accepted, kept
        )
        stats = stats._replace(accepted=stats.accepted - lost)
        info = info._replace(num_committed=kept)
    done = state.done | stopped  # stays on the state's devices
    state = state._replace(length=state.length - over, done=done, stats=stats)
    return log_probs.forget_cut(state), info


def _trace(infos: Sequence[RoundInfo], decoder: Decoder, batch: int) -> loop.Trace:
    """The rounds that were run one by one, as `loop.run` reports them."""
    if infos:
        # on the host: on a device it would be a program, and a compilation, for each number of
        # rounds
        return loop.Trace(*jax.tree.map(lambda *x: np.stack(x, axis=1), *jax.device_get(infos)))
    return loop.Trace(*loop.empty_history(decoder, (batch, 0)))


def tokens_needed(stop: Stop, tokens: Sequence[int], settled: int) -> int | None:
    """Counts how many of a row's new tokens it takes until their text holds a stop string; None if
    none occurs.

    `settled` of them are known to be too few.
    """
    # Token by token, since a string may end within what a round committed.
    ends = range(settled + 1, len(tokens) + 1)
    return next(
        (end for end in ends if find_stop(_marked(stop, tokens[:end]), stop.strings) is not None),
        None,
    )


def finish(stop: Stop, reason: int, tokens: Sequence[int]) -> str:
    """Names why a row ended: "eos", "stop", "length" or "failure".

    A stop string that the last token completes is the reason, also where that token ends the row
    anyway.

    >>> finish(stop_of(None, []), Finish.EOS, [4, 1])
    'eos'
    """
    stopped = bool(stop.strings) and tokens_needed(stop, tokens, len(tokens) - 1) is not None
    return (Finish.STOP if stopped else Finish(reason)).name.lower()


def decode(tokenizer: Any, tokens: Sequence[int], joins: bool = False) -> str:
    """Text of token ids, without special tokens; `joins` as in `Stop`."""
    cleaning = {}
    if joins:
        cleaning = {"clean_up_tokenization_spaces": False}
    return tokenizer.decode(list(tokens), skip_special_tokens=True, **cleaning)


def text_of(stop: Stop, tokens: Sequence[int]) -> str:
    """A row's text, up to the first of the stop strings."""
    text = _marked(stop, tokens)
    return MARKED.sub("", text[: find_stop(text, stop.strings)])


def stable_text(stop: Stop, tokens: Sequence[int]) -> str:
    """The part of an unfinished row's text that later tokens can no longer change, nor cut at a
    stop string.

    Byte tokens at the end are left out: should the bytes of their run turn out to be no text, none
    of it is kept.
    """
    end = len(tokens)
    # A run of byte tokens may be the beginning of a character: it is shown once it is complete.
    while end and _is_open(stop, tokens[end - 1]):
        end -= 1
    text = _marked(stop, tokens[:end])
    if getattr(stop.tokenizer, "clean_up_tokenization_spaces", False) and not stop.joins:
        text = UNCLEANED.sub("", text)
    return MARKED.sub("", stable_prefix(text, stop.strings))


def _is_open(stop: Stop, token: int) -> bool:
    """Says whether a token may be a byte of a longer character, or is special, so that no run ends
    at it.
    """
    word = None
    if token not in stop.special:
        word = stop.tokenizer.convert_ids_to_tokens(token)
    return word is None or BYTE.fullmatch(word) is not None


def _marked(stop: Stop, tokens: Sequence[int]) -> str:
    """The text of tokens, with a mark where a special token stands that a stop string names."""
    text = decode(stop.tokenizer, tokens, stop.joins)
    places = [index for index, token in enumerate(tokens) if token in stop.marks]
    # Where a special token stands in the text is found by decoding what precedes it: decoders drop
    # it.
    before = [common(text, decode(stop.tokenizer, tokens[:index], stop.joins)) for index in places]
    # From the end, so that earlier positions stay where they are.
    for index, position in zip(reversed(places), reversed(before), strict=True):
        text = text[:position] + stop.marks[tokens[index]] + text[position:]
    return text


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Finds where the first of the stop strings begins, None if none occurs.

    >>> find_stop("one. two", [".", "two"])
    3
    """
    places = [position for position in (text.find(s) for s in stop) if position >= 0]
    if places:
        return min(places)
    return None


def stable_prefix(text: str, stop: Sequence[str] = ()) -> str:
    """The part of a growing text that later tokens can no longer change, nor turn into a stop
    string.

    A word is held back until a space or line break follows it: its next piece may still come, and
    some tokenizers change what stands before a piece. Half a character is held back, too, and so is
    what may begin a stop string. Each ideograph counts as a word.

    >>> (
    ...     stable_prefix("ein Beisp"),
    ...     stable_prefix("ein Beispiel "),
    ...     stable_prefix("a st", stop=["a stop"]),
    ... )
    ('ein ', 'ein Beispiel ', '')
    """
    # Text that may become a stop string is held back.
    beginnings = tuple({string[:size] for string in stop for size in range(1, len(string))})

    def is_stable(end: int) -> bool:
        return _ends_word(text[end - 1]) and not text.endswith(beginnings, 0, end)

    end = len(text)
    while end and not is_stable(end):
        end -= 1
    return text[:end]


def _ends_word(character: str) -> bool:
    """White space, and scripts written without it: kana, CJK ideographs, Hangul and full-width
    forms.
    """
    code = ord(character)
    wide = (
        0x3040 <= code <= 0x9FFF
        or 0xAC00 <= code <= 0xD7A3
        or 0xF900 <= code <= 0xFAFF
        or code >= 0x20000
    )
    return wide or character.isspace()
