"""The tables of a batch: its automata put together, in sizes that batches of other patterns
share.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt
from rich import filesize

from jaxspec.core.token_rows import AllRows
from jaxspec.structured import automaton
from jaxspec.structured.automaton import FAR
from jaxspec.structured.patterns import Pattern
from jaxspec.structured.processor import Automata, Values

MOST = 2**29  # bytes of the tables of one batch
# Least sizes of the tables' first axes; the next ones are powers of two.
SIZES = Automata(2**12, 2**6, 2**6, 2**2, 2**6, 2**6, 2**6, 2**6, 2**6)
LEVELS = 4  # least number of distances that are told apart in a state
FREE = 0  # the state of a row whose text is free


class TooLarge(ValueError):
    """Automata do not fit into the tables of one batch."""


def _too_large(pattern: Pattern, size: int) -> TooLarge:
    return TooLarge(
        f"{pattern} makes tables of {filesize.decimal(size)}, expected at most "
        f"{filesize.decimal(MOST)}: "
        f"{automaton.advice(pattern)}; or give fewer patterns at once"
    )


class Pool:
    """Automata that share tables. Others may be added; states keep their numbers.

    Attributes:
        tables: the tables of those that were added, on the host.
    """

    def __init__(self, tokenizer: Any, vocab: int, ends: tuple[int, ...]):
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._ends = ends
        # The first state of each pattern, and the tokens of its shortest text.
        self._first = dict[tuple[Pattern, tuple[int, ...]], tuple[int, int]]()
        width = -(-vocab // 32)
        free = np.full((1, width), 2**32 - 1, np.uint32)
        zero = np.zeros(1, np.int32)
        # One state that every token leads back to, and a mask that allows all.
        classes = np.zeros((1, vocab), np.int32)
        none = zero - 1
        self._parts = [
            Automata(zero, zero, zero, classes, zero[None], zero[None], free, none, none)
        ]

    def add(self, pattern: Pattern | None, banned: tuple[int, ...], limit: int) -> int:
        """Returns the first state of a row, whose pattern is added if it is new; None: its text is
        free.

        Raises:
            ValueError: no text of `limit` tokens, none of them `banned`, matches; or the tables
                become too large.
        """
        if pattern is None:
            return FREE
        state, shortest = self._first.get((pattern, banned), (None, 0))
        if state is None:
            automata, shortest = _part(pattern, self._tokenizer, self._vocab, self._ends, banned)
        if shortest >= FAR:
            raise ValueError(
                f"{pattern} matches no text without the banned tokens: allow some of them"
            )
        if shortest > limit:
            raise ValueError(
                f"max_new_tokens is {limit}, and the shortest text for {pattern} has {shortest} "
                f"tokens with its end token: expected at least {shortest}"
            )
        if state is None:
            new = _numbered_on(automata, self._end)
            size = sum(x.nbytes for tables in (*self._parts, new) for x in tables)
            if size > MOST:
                raise _too_large(pattern, size)
            state = int(self._end.offset)
            self._first[pattern, banned] = state, shortest
            self._parts.append(new)
            self.__dict__.pop("tables", None)  # to be put together anew
        return state

    @functools.cached_property
    def tables(self) -> Automata:
        """The tables, each axis filled up to the next size."""
        levels = _size(max(automata.bound.shape[1] for automata in self._parts), LEVELS)
        bound, mask = (
            np.concatenate(
                [_wide(getattr(automata, name), levels, fill) for automata in self._parts]
            )
            for name, fill in (("bound", FAR), ("mask", 0))
        )
        joined = Automata(
            *(np.concatenate(column) for column in zip(*map(_one_width, self._parts), strict=True))
        )
        joined = joined._replace(bound=bound, mask=mask)
        return Automata(
            *(_long(x, _size(len(x), least)) for x, least in zip(joined, SIZES, strict=True))
        )

    @property
    def _end(self) -> Automata:
        """Counts the entries of each table; of `offset` the states, of `words` the masks."""
        return Automata(
            *(
                np.int64(sum(len(automata[index]) for automata in self._parts))
                for index in range(len(Automata._fields))
            )
        )


def values(pool: Pool, rows: Sequence[tuple[Pattern | None, tuple[int, ...], int]]) -> Values:
    """Returns the processor's values for some rows, on the host; a row's are the arguments of
    `Pool.add`.
    """
    states = np.array([pool.add(*row) for row in rows], np.int32)
    return Values(AllRows(pool.tables), states, np.array([limit for _, _, limit in rows], np.int32))


@functools.lru_cache(maxsize=64)
def _part(
    pattern: Pattern, tokenizer: Any, vocab: int, ends: tuple[int, ...], banned: tuple[int, ...]
) -> tuple[Automata, int]:
    """Makes the tables of one pattern, and says how many tokens its shortest text has."""
    reader = automaton.of(pattern, tokenizer, vocab).without((*ends, *banned))
    distance = reader.distances()
    states, kinds = reader.step.shape
    after = np.where(reader.step >= 0, distance[reader.step], FAR)
    # An end token stands where a text may end, and none follows it: class `kinds`.
    after = np.concatenate([after, np.where(reader.accepting, 0, FAR)[:, None]], axis=1)
    bounds = [np.unique(row[row < FAR]) for row in after]
    levels = max(1, *map(len, bounds))
    bound = np.stack([_wide(row[None], levels, FAR)[0] for row in bounds])
    # A mask for each distance of each state; equal ones are there once.
    allowed = after[:, None, :] <= np.minimum(bound, FAR - 1)[:, :, None]
    packed, mask = np.unique(
        np.packbits(allowed.reshape(states * levels, -1), axis=1), axis=0, return_inverse=True
    )
    width = -(-vocab // 32)
    if 4 * len(packed) * width > MOST:
        raise _too_large(pattern, 4 * len(packed) * width)
    of_token = reader.classes.copy()
    of_token[list(ends)] = kinds
    by_class = np.unpackbits(packed, axis=1, count=kinds + 1).astype(bool)
    words, certain = _packed(by_class, of_token)
    stays = np.arange(states)[:, None]  # after a token that may not stand there
    # After an end token the text is free (-1), so that nothing is certain there and no draft goes
    # on.
    edges = np.concatenate(
        [np.where(reader.step >= 0, reader.step, stays), np.full((states, 1), -1)], axis=1
    )
    tables = Automata(
        edges.reshape(-1).astype(np.int32),
        np.arange(states, dtype=np.int32) * (kinds + 1),
        np.zeros(states, np.int32),
        of_token[None].astype(np.int32),
        bound.astype(np.int32),
        mask.reshape(states, levels).astype(np.int32),
        words,
        certain,
        reader.likely,
    )
    return tables, int(distance[0])


def _numbered_on(automata: Automata, end: Automata) -> Automata:
    """Numbers the states, edges, automata and masks of a part on from those before it."""
    counts = dict(offset=end.edges, owner=end.classes, mask=end.words)
    edges = np.where(automata.edges < 0, FREE, automata.edges + np.int32(end.offset)).astype(
        np.int32
    )
    return automata._replace(
        edges=edges, **{name: getattr(automata, name) + np.int32(n) for name, n in counts.items()}
    )


def _packed(
    by_class: Bool[np.ndarray, "masks kinds"], of_token: Int[np.ndarray, " vocab"]
) -> tuple[UInt[np.ndarray, "masks words"], Int[np.ndarray, " masks"]]:
    """Packs masks over classes into bits over tokens, and finds the only token of each; -1 if
    several are allowed.

    >>> words, certain = _packed(np.array([[False, True], [True, True]]), np.array([0, 1, 0]))
    >>> words.tolist(), certain.tolist()  # one word: bit j is token j
    ([[2], [7]], [1, -1])
    """
    vocab = len(of_token)
    width = -(-vocab // 32)
    words = np.zeros((len(by_class), width), np.uint32)
    certain = np.full(len(by_class), -1, np.int32)
    for index, row in enumerate(by_class):
        tokens = np.zeros(32 * width, bool)
        tokens[:vocab] = row[of_token]
        shifted = (
            tokens.reshape(32, width).astype(np.uint32) << np.arange(32, dtype=np.uint32)[:, None]
        )
        words[index] = np.bitwise_or.reduce(shifted, axis=0)
        if np.count_nonzero(tokens) == 1:
            certain[index] = np.argmax(tokens)
    return words, certain


def _one_width(automata: Automata) -> Automata:
    """Leaves out the arrays whose width differs from part to part; they are joined separately."""
    return automata._replace(bound=automata.bound[:, :1], mask=automata.mask[:, :1])


def _size(count: int, least: int) -> int:
    """Returns the next power of two, but no less than `least`."""
    return max(least, 1 << (count - 1).bit_length())


def _wide(
    rows: Int[np.ndarray, "rows columns"], width: int, fill: int
) -> Int[np.ndarray, "rows width"]:
    """Fills rows up to a width with a value."""
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=fill)


def _long(rows: np.ndarray, length: int) -> np.ndarray:
    """Adds rows of zeros up to a length."""
    return np.pad(rows, [(0, length - len(rows))] + [(0, 0)] * (rows.ndim - 1))
