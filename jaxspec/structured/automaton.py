"""Automata over the tokens of a vocabulary: a pattern's automaton over bytes, read token by token.

Tokens that lead to the same state from every state are one class. So a table [states, classes]
replaces a table [states, vocabulary]: a schema of some fields has hundreds of states and classes.

Reference: Willard, Louf, "Efficient Guided Generation for Large Language Models", arXiv 2307.09702.
"""

from __future__ import annotations

import functools
import hashlib
import io
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt

from jaxspec import progress
from jaxspec.core import programs, token_ids
from jaxspec.structured import byte_dfa, schemas, spelling
from jaxspec.structured.byte_dfa import ByteDfa
from jaxspec.structured.patterns import Pattern
from jaxspec.structured.spelling import Spelling

PAIRS = 2**23  # of a state and a token that are read at once
SHOWN = 2**27  # pairs from which on a bar is shown
FAR = 2**30  # a distance that no text has
SMALL = 2**14  # vocabularies whose automata are built in no time
STRAIGHT = 64  # bytes that are looked ahead for a likely token
VERSION = 2  # of what is kept on disk


class Automaton(NamedTuple):
    """An automaton that reads tokens. State 0 is the first; class 0 may stand nowhere."""

    classes: Int[np.ndarray, " vocab"]  # the class of each token
    # the next state after a token of each class; -1: it may not stand there
    step: Int[np.ndarray, "states classes"]
    accepting: Bool[np.ndarray, " states"]  # states in which a text may end
    # the token that a draft goes on with after each state, because the text does not branch there:
    # names, quotes and brackets. -1: there is none
    likely: Int[np.ndarray, " states"]

    def without(self, ids: tuple[int, ...]) -> Automaton:
        """Returns the automaton of texts without some tokens."""
        classes = self.classes.copy()
        classes[[index for index in ids if index < len(classes)]] = 0
        remaining = np.isin(np.arange(self.step.shape[1]), classes[classes > 0])
        likely = np.where(np.isin(self.likely, ids), -1, self.likely)
        return self._replace(
            classes=classes, step=np.where(remaining, self.step, -1), likely=likely
        )

    def distances(self) -> Int[np.ndarray, " states"]:
        """Counts the fewest tokens that follow from each state, the end token included; `FAR` where
        no text ends.

        >>> step = np.array([[-1, 1], [-1, 2], [-1, -1]])
        >>> Automaton(
        ...     np.array([0, 1]), step, np.array([False, False, True]), None
        ... ).distances().tolist()
        [3, 2, 1]
        """
        distance = np.where(self.accepting, 1, FAR)
        while True:
            after = np.where(self.step >= 0, distance[self.step], FAR)
            nearer = np.minimum(distance, np.min(after, axis=1) + 1)
            if np.array_equal(nearer, distance):
                return np.minimum(distance, FAR)
            distance = nearer


@functools.lru_cache(maxsize=64)
def of(pattern: Pattern, tokenizer: Any, vocab: int) -> Automaton:
    """Returns a pattern's automaton over the tokens of a tokenizer; built once, and kept in the
    user's cache folder.

    Raises:
        ValueError: the pattern cannot be read, has too many states, or matches no text of these
            tokens.

    >>> from jaxspec.testing import word_tokenizer
    >>> automaton = of(
    ...     Pattern(choices=("the old", "the")), word_tokenizer(["<unk>", "</s>", "the", "old"]), 4
    ... )
    >>> automaton.step.shape, automaton.classes.tolist(), automaton.accepting.tolist()
    ((3, 3), [0, 0, 2, 1], [False, True, True])
    """
    file = _file(pattern, tokenizer, vocab)
    if file is not None and (kept := _read(file)) is not None:
        return kept
    try:
        dfa = _read_bytes(pattern)
    except byte_dfa.TooManyStates:
        raise ValueError(
            f"{pattern} has more than {byte_dfa.MOST:,} states: {advice(pattern)}"
        ) from None
    spelled = spelling.of(tokenizer, vocab)
    automaton = build(dfa, spelled, functools.partial(_first_token, tokenizer))
    if automaton.distances()[0] >= FAR:
        raise ValueError(
            f"{pattern} matches no text of this tokenizer's tokens: expected one that some text "
            "matches"
        )
    if file is not None:
        _write(file, automaton)
    return automaton


def build(
    dfa: ByteDfa, spelled: Spelling, first_token: Callable[[str], int | None] = lambda text: None
) -> Automaton:
    """Reads every token from every state of an automaton over bytes.

    The new automaton's state 0 is before the first token, whose text may lack a space; the others
    are the bytes' own. `first_token` returns the first token of a text as the tokenizer writes it;
    None: it is not known.
    """
    texts = sorted({text for text in (*spelled.inside, *spelled.first) if text})
    number = {text: row for row, text in enumerate(texts)} | {None: len(texts), b"": len(texts) + 1}
    inside, first = (np.array([number[text] for text in column]) for column in spelled)
    trie = _trie(texts)
    states = len(dfa.step)
    # The first token's column is told by its own text; the others' by a hash of where the text
    # leads from each state.
    at_first = np.concatenate([_walk(dfa.step, trie, np.zeros(1, np.int64))[0], [-1, 0]])[first]
    hashes = np.zeros(len(texts) + 2, np.uint64)
    chunk = max(1, PAIRS // max(1, len(texts)))
    with progress.bar(states * len(texts) > SHOWN, transient=True) as bar:
        task = bar.add_task("reading every token from every state", total=states)
        for start in range(0, states, chunk):
            origins = np.arange(start, min(start + chunk, states))
            for origin, row in zip(origins, _walk(dfa.step, trie, origins), strict=True):
                hashes[:-2] += np.where(
                    row >= 0, byte_dfa.mixed(row + 1, int(origin) + 1), np.uint64(0)
                )
            bar.advance(task, len(origins))
    keys = np.where(at_first >= 0, byte_dfa.mixed(at_first + 1, 0), np.uint64(0)) + hashes[inside]
    keys[inside == len(texts)] = 0
    kinds, member, classes = np.unique(
        np.append(np.uint64(0), keys), return_index=True, return_inverse=True
    )
    classes = classes.reshape(-1)
    assert kinds[0] == 0  # the class of tokens that lead nowhere
    # Once more, for one token of each class: where it leads.
    members = member[1:] - 1
    chosen = sorted({texts[inside[token]] for token in members})
    row_of = {text: row for row, text in enumerate(chosen)}
    table = _walk(dfa.step, _trie(chosen), np.arange(states))[
        :, [row_of[texts[inside[token]]] for token in members]
    ]
    step = np.concatenate([at_first[members][None], table]).astype(np.int32)
    step = np.where(step >= 0, step + 1, -1)
    step = np.concatenate([np.full((states + 1, 1), -1, np.int32), step], axis=1)
    likely = _likely(dfa, spelled, first_token)
    return _reachable(
        Automaton(
            classes[1:].astype(np.int32), step, np.append(dfa.accepting[:1], dfa.accepting), likely
        )
    )


def _read_bytes(pattern: Pattern) -> ByteDfa:
    if pattern.choices is not None:
        return byte_dfa.from_choices(pattern.choices)
    return byte_dfa.from_regex(pattern.regex or "")


def _likely(
    dfa: ByteDfa, spelled: Spelling, first_token: Callable[[str], int | None]
) -> Int[np.ndarray, " states"]:
    """Finds the token with which the text goes on before the first token, and after each state.

    Several tokens may fit. The tokenizer's own first token of the text is taken if it fits, else
    the longest.
    """
    likely = np.full(len(dfa.step) + 1, -1, np.int32)
    # The token of each text; of several the last, since the first may be single bytes.
    tokens = [
        {text: token for token, text in enumerate(column) if text}
        for column in (spelled.first, spelled.inside)
    ]
    for index, (state, column) in enumerate(
        [(0, spelled.first), *((n, spelled.inside) for n in range(len(dfa.step)))]
    ):
        text = _straight(dfa, state)
        if not text:
            continue
        token = first_token(text.decode(errors="ignore"))
        if (
            token is not None
            and token < len(column)
            and (begins := column[token])
            and text.startswith(begins)
        ):
            likely[index] = token
            continue
        numbers = tokens[index > 0]
        sizes = (size for size in range(len(text), 0, -1) if text[:size] in numbers)
        size = next(sizes, None)
        if size is not None:
            likely[index] = numbers[text[:size]]
    return likely


def _straight(dfa: ByteDfa, state: int) -> bytes:
    """Returns the bytes that follow a state until the text may branch or end; of a space that may
    stand, it stands.
    """
    text = bytearray()
    while not dfa.accepting[state] and len(text) < STRAIGHT:
        after = np.flatnonzero(dfa.step[state] >= 0)
        if len(after) == 2 and after[0] == ord(" "):
            behind = dfa.step[dfa.step[state, after[0]]]
            is_optional = np.array_equal(np.flatnonzero(behind >= 0), after[1:])
            if is_optional and behind[after[1]] == dfa.step[state, after[1]]:
                after = after[:1]
        if len(after) != 1:
            break
        text.append(int(after[0]))
        state = int(dfa.step[state, after[0]])
    return bytes(text)


def _first_token(tokenizer: Any, text: str) -> int | None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if ids:
        return ids[0]
    return None


def _reachable(automaton: Automaton) -> Automaton:
    """Leaves out states that no text reaches, and ways to states from which no text ends."""
    may_end = automaton.distances() < FAR
    step = np.where((automaton.step >= 0) & may_end[automaton.step], automaton.step, -1)
    seen = np.zeros(len(step), bool)
    new = np.array([0])
    while len(new):
        seen[new] = True
        after = np.unique(step[new])
        new = after[(after >= 0) & ~seen[after]]
    renumbered = np.cumsum(seen) - 1
    step = np.where(step >= 0, renumbered[step], -1)[seen].astype(np.int32)
    likely = automaton.likely[seen]
    leads = step[np.arange(len(step)), automaton.classes[np.maximum(likely, 0)]] >= 0
    return Automaton(
        automaton.classes,
        step,
        automaton.accepting[seen],
        np.where(leads, likely, -1).astype(np.int32),
    )


class _Level(NamedTuple):
    """The nodes of a trie at one depth, by their texts in order."""

    byte: UInt[np.ndarray, " nodes"]  # byte that leads to each node
    first: Int[np.ndarray, " nodes"]  # the first of its children on the next level
    children: Int[np.ndarray, " nodes"]  # how many there are
    text: Int[np.ndarray, " nodes"]  # the number of the text that ends there; -1: none does


def _trie(texts: list[bytes]) -> tuple[int, list[_Level]]:
    """Makes a trie of texts, sorted and each there once; also says how many they are."""
    count = len(texts)
    longest = max(map(len, texts), default=0)
    letters = np.frombuffer(
        b"".join(text.ljust(longest, b"\0") for text in texts), np.uint8
    ).reshape(count, longest)
    length = np.array([len(text) for text in texts], np.int64)
    levels: list[_Level] = []
    same = np.zeros(count, bool)  # whether a text begins as the one before it, up to this depth
    same[1:] = True
    parents = None
    for depth in range(longest):
        is_longer = length > depth
        same[1:] &= (letters[1:, depth] == letters[:-1, depth]) & is_longer[:-1]
        begins = is_longer & ~same
        node = np.cumsum(begins) - 1  # of each text
        rows = np.flatnonzero(begins)
        ends = np.full(len(rows), -1, np.int64)
        last = length == depth + 1
        ends[node[last]] = np.flatnonzero(last)
        if parents is not None:
            children = np.bincount(parents[rows], minlength=len(levels[-1].byte))
            levels[-1] = levels[-1]._replace(
                first=np.cumsum(children) - children, children=children
            )
        none = np.zeros(len(rows), np.int64)
        levels.append(_Level(letters[rows, depth], none, none, ends))
        parents = node
    return count, levels


def _walk(
    step: Int[np.ndarray, "states 256"],
    trie: tuple[int, list[_Level]],
    origins: Int[np.ndarray, " origins"],
) -> Int[np.ndarray, "origins texts"]:
    """Reads all texts of a trie from some states: the state after each, or -1."""
    count, levels = trie
    ends = np.full((len(origins), count), -1, np.int32)
    if not levels:
        return ends
    # Of each way that is still open: where it began, its node on this level, the state before the
    # node's byte.
    origin = np.repeat(np.arange(len(origins)), len(levels[0].byte))
    node = np.tile(np.arange(len(levels[0].byte)), len(origins))
    state = origins[origin]
    for level in levels:
        state = step[state, level.byte[node]]
        is_open = state >= 0
        origin = origin[is_open]
        node = node[is_open]
        state = state[is_open]
        ending = level.text[node] >= 0
        ends[origin[ending], level.text[node[ending]]] = state[ending]
        # Every open way goes on to all children of its node.
        children = level.children[node]
        begin = np.cumsum(children) - children
        index = np.arange(int(children.sum())) - np.repeat(begin, children)
        origin = np.repeat(origin, children)
        state = np.repeat(state, children)
        node = np.repeat(level.first[node], children) + index
        if not len(node):
            break
    return ends


def advice(pattern: Pattern) -> str:
    """Says which part of a pattern makes it large."""
    if pattern.schema is None:
        return "bound its repetitions lower"
    sizes = {}
    for name, schema in schemas.parts_of(pattern.schema).items():
        try:
            sizes[name] = len(byte_dfa.from_regex(schemas.regex_of(schema)).step)
        except byte_dfa.TooManyStates:
            sizes[name] = byte_dfa.MOST + 1
    if not sizes:
        return "bound its lists and strings lower"
    largest = max(sizes, key=lambda name: sizes[name])
    if sizes[largest] > byte_dfa.MOST:
        size = f"more than {byte_dfa.MOST:,}"
    else:
        size = f"{sizes[largest]:,}"
    return f"its property {largest!r} alone has {size} states, so bound its lists and strings lower"


def _file(pattern: Pattern, tokenizer: Any, vocab: int) -> Path | None:
    """Returns where an automaton is kept, by pattern and tokens; None for a small one, which is
    built at once.
    """
    if vocab < SMALL:
        return None
    words = "\0".join(word or "" for word in token_ids.words(tokenizer))
    special = sorted(
        (index, token.content, token.special)
        for index, token in tokenizer.added_tokens_decoder.items()
    )
    content = repr((VERSION, pattern, vocab, special, words, spelling.decoders_of(tokenizer)))
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
    return programs.folder().parent / "structured" / f"{digest}.npz"


def _read(file: Path) -> Automaton | None:
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
            return Automaton(**{name: arrays[name] for name in Automaton._fields})
    # It is not there, or not whole: then it is built again.
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _write(file: Path, automaton: Automaton) -> None:
    """Keeps an automaton; a folder that cannot be written keeps none."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **automaton._asdict())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as unfinished:
            unfinished.write(buffer.getvalue())
        Path(unfinished.name).replace(file)
    except OSError:
        return
