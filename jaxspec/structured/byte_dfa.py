"""Deterministic automata over bytes, made from regular expressions as Python's `re` reads them, or
from choices.

`re`'s own parser reads an expression. What is not regular in it (back references, look-around) is
refused by name. We tried outlines-core in place of this file. Its automata lose ways past a text
that matches already, and some expressions keep it busy for ever.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from re import _constants, _parser  # type: ignore[attr-defined] # the same in Python 3.11 to 3.14
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt

MOST = 2**15  # states
MOST_PLACES = 2**19  # of an expression, once its repetitions are written out
SURROGATES = (0xD800, 0xDFFF)  # which UTF-8 has no bytes for
LAST = 0x10FFFF
REFUSED = re.IGNORECASE | re.LOCALE
CATEGORIES = {  # the names of classes in parsed expressions
    f"CATEGORY_{opposite}{name}": name[0] if opposite else name[0].lower()
    for name in ("DIGIT", "SPACE", "WORD")
    for opposite in ("", "NOT_")
}

Ranges = list[tuple[int, int]]  # first and last, both included


class TooManyStates(ValueError):
    """A pattern has more states than a table may have."""


class ByteDfa(NamedTuple):
    """An automaton that reads a text's UTF-8 bytes. State 0 is the first."""

    # the next state after each byte; -1: the byte may not stand there
    step: Int[np.ndarray, "states 256"]
    accepting: Bool[np.ndarray, " states"]  # states in which a text may end


@functools.lru_cache(maxsize=64)
def from_choices(choices: tuple[str, ...]) -> ByteDfa:
    """Returns the automaton of some strings.

    >>> dfa = from_choices(("ab", "b"))
    >>> dfa.step.shape, dfa.accepting.tolist().count(True)
    ((3, 256), 1)
    """
    # a tree of the strings' beginnings
    step = [{}]
    ends = set()
    for choice in choices:
        state = 0
        for byte in choice.encode():
            if byte not in step[state]:
                step[state][byte] = len(step)
                step.append({})
            state = step[state][byte]
        ends.add(state)
    return _minimal(_dense(step), np.isin(np.arange(len(step)), sorted(ends)))


@functools.lru_cache(maxsize=64)
def from_regex(regex: str, shown: str | None = None) -> ByteDfa:
    """Returns the automaton of the texts that an expression matches as a whole (`re.fullmatch`).

    Args:
        regex: the expression.
        shown: the text that errors show in its place, such as the pattern that it came from.

    Raises:
        ValueError: the expression cannot be read, is not regular, matches nothing, or has too many
            states.

    >>> dfa = from_regex("[0-9]{2}")
    >>> dfa.step.shape, (dfa.step[0, [ord("7"), ord("x")]] >= 0).tolist()
    ((3, 256), [True, False])
    """
    if shown is None:
        shown = regex
    inside = regex.removeprefix("^")  # the whole text matches in any case
    if ends_in_anchor(inside):
        inside = inside[:-1]
    try:
        parsed = _parser.parse(inside)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"regex is {shown!r:.200}: expected a regular expression of Python's ({error})"
        ) from None
    network = _Network(parsed.state.flags, shown)
    first = network.new_node()
    last = network.sequence(parsed, first)
    return _minimal(*network.subsets(first, last))


def ends_in_anchor(regex: str) -> bool:
    r"""Tells whether an expression ends in `$`. After an odd number of backslashes it is the dollar
    sign.

    >>> ends_in_anchor("a$"), ends_in_anchor("a\\$"), ends_in_anchor("a\\\\$")
    (True, False, True)
    """
    before = regex.removesuffix("$")
    num_backslashes = len(before) - len(before.rstrip("\\"))
    return before != regex and num_backslashes % 2 == 0


class _Network:
    """An automaton with several ways at once: edges by ranges of bytes, and free moves (Thompson,
    1968).
    """

    def __init__(self, flags: int, regex: str):
        self._flags = flags
        self._regex = regex
        # of each node: first and last byte, the node after it
        self._edges: list[list[tuple[int, int, int]]] = []
        self._free: list[list[int]] = []
        if flags & REFUSED:
            raise self._refused("the flags i and L")

    def new_node(self) -> int:
        """Makes a node."""
        self._edges.append([])
        self._free.append([])
        if len(self._free) > MOST_PLACES:
            raise TooManyStates(
                f"regex is {self._regex!r:.200}, which is too large: bound its repetitions lower"
            )
        return len(self._free) - 1

    def sequence(self, parsed: Any, start: int) -> int:
        """Adds the parts of an expression one after the other, and returns the node after them."""
        for name, value in parsed:
            start = self._part(str(name), value, start)
        return start

    def _part(self, name: str, value: Any, start: int) -> int:
        if name == "SUBPATTERN":
            _, added, removed, inner = value
            if added & ~re.ASCII or removed:
                raise self._refused("flags of a group")
            flags = self._flags
            self._flags = self._flags | added
            end = self.sequence(inner, start)
            self._flags = flags
            return end
        if name == "BRANCH":
            end = self.new_node()
            for branch in value[1]:
                self._free[self.sequence(branch, self._moved(start))].append(end)
            return end
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, limit, inner = value
            return self._repeated(least, limit, inner, start)
        return self._character(self._ranges(name, value), start)

    def _moved(self, start: int) -> int:
        """Makes a node that is reached from another for free."""
        node = self.new_node()
        self._free[start].append(node)
        return node

    def _repeated(self, least: int, limit: Any, inner: Any, start: int) -> int:
        for _ in range(least):
            start = self.sequence(inner, start)
        if limit is _constants.MAXREPEAT:
            start = self._moved(start)
            self._free[self.sequence(inner, self._moved(start))].append(start)
            return self._moved(start)
        end = self.new_node()
        for _ in range(limit - least):
            self._free[start].append(end)
            start = self.sequence(inner, start)
        self._free[start].append(end)
        return end

    def _ranges(self, name: str, value: Any) -> Ranges:
        """Returns the characters of a part that is one character."""
        if name == "LITERAL":
            return [(value, value)]
        if name == "NOT_LITERAL":
            return complement([(value, value)])
        if name == "ANY":
            if self._flags & re.DOTALL:
                return [(0, LAST)]
            return complement([(10, 10)])
        if name == "IN":
            negated = False
            ranges = Ranges()
            for node_type, entry in value:
                if str(node_type) == "NEGATE":
                    negated = True
                elif str(node_type) == "RANGE":
                    ranges.append(entry)
                elif str(node_type) == "CATEGORY":
                    ranges += category(CATEGORIES[str(entry)], bool(self._flags & re.ASCII))
                else:
                    ranges += self._ranges(str(node_type), entry)
            if negated:
                return complement(ranges)
            return ranges
        raise self._refused(
            {"AT": "an anchor within it", "GROUPREF": "a back reference"}.get(name, name.lower())
        )

    def _character(self, ranges: Ranges, start: int) -> int:
        """Adds one character: ways over its bytes, which share their ends."""
        end = self.new_node()
        nodes: dict[Any, int] = {(): end}
        for low, high in ranges:
            for steps in _bytes_of(low, high):
                for index in range(len(steps) - 1, 0, -1):
                    if steps[index:] not in nodes:
                        nodes[steps[index:]] = node = self.new_node()
                        self._edges[node].append((*steps[index], nodes[steps[index + 1 :]]))
                self._edges[start].append((*steps[0], nodes[steps[1:]]))
        return end

    def subsets(
        self, first: int, last: int
    ) -> tuple[Int[np.ndarray, "states 256"], Bool[np.ndarray, " states"]]:
        """Makes the automaton whose states are sets of nodes (Rabin and Scott, 1959)."""

        @functools.cache
        def reached(node: int) -> frozenset[int]:
            """The nodes that are reached for free and have an edge, and the last one."""
            seen = {node}
            new = [node]
            while new:
                further = [
                    after for before in new for after in self._free[before] if after not in seen
                ]
                seen.update(further)
                new = list(dict.fromkeys(further))
            return frozenset(end for end in seen if self._edges[end] or end == last)

        number = {reached(first): 0}
        order = [reached(first)]
        rows = list[Any]()
        for nodes in order:  # which grows
            row = np.full(256, -1, np.int32)
            edges = [edge for node in nodes for edge in self._edges[node]]
            cuts = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
            for low, end in itertools.pairwise(cuts):
                targets = {
                    after
                    for first_byte, last_byte, after in edges
                    if first_byte <= low <= last_byte
                }
                if targets:
                    after = frozenset().union(*map(reached, targets))
                    if after not in number:
                        number[after] = len(order)
                        order.append(after)
                    row[low:end] = number[after]
            rows.append(row)
            if len(order) > MOST:
                raise TooManyStates(
                    f"regex is {self._regex!r:.200}, with more than {MOST:,} states: bound its "
                    "repetitions lower"
                )
        return np.stack(rows), np.array([last in nodes for nodes in order])

    def _refused(self, feature: str) -> ValueError:
        return ValueError(
            f"regex is {self._regex!r:.200}, with {feature}: expected characters, groups, | and "
            "repetitions"
        )


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Returns all other characters.

    >>> complement([(5, 7), (0, 2)])
    [(3, 4), (8, 1114111)]
    """
    others = []
    after = 0
    for low, high in sorted(ranges):
        if low > after:
            others.append((after, low - 1))
        after = max(after, high + 1)
    if after <= LAST:
        return [*others, (after, LAST)]
    return others


@functools.lru_cache(maxsize=16)
def category(letter: str, is_ascii: bool = False) -> Ranges:
    r"""Returns the characters of `\d`, `\s`, `\w`, or of their opposites, as `re` reads them.

    >>> category("d", is_ascii=True), category("D", is_ascii=True)
    ([(48, 57)], [(0, 47), (58, 1114111)])
    """
    if letter.isupper():
        return complement(category(letter.lower(), is_ascii))
    everything = "".join(
        map(chr, (n for n in range(LAST + 1) if not SURROGATES[0] <= n <= SURROGATES[1]))
    )
    spans = [
        match.span()
        for match in re.finditer(rf"\{letter}+", everything, re.ASCII if is_ascii else 0)
    ]
    return [(ord(everything[start]), ord(everything[end - 1])) for start, end in spans]


def _bytes_of(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields the UTF-8 bytes of a range of characters, as ranges of each byte.

    >>> list(_bytes_of(0x7F, 0xFF))
    [((127, 127),), ((194, 195), (128, 191))]
    """
    for first, last in (
        (0, 0x7F),
        (0x80, 0x7FF),
        (0x800, 0xD7FF),
        (0xE000, 0xFFFF),
        (0x10000, LAST),
    ):
        if max(low, first) <= min(high, last):
            yield from between(chr(max(low, first)).encode(), chr(min(high, last)).encode())


def between(
    low: bytes, high: bytes, least: bytes = b"\x80", most: bytes = b"\xbf"
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields ranges of bytes between two of the same length. All bytes but the first go from
    `least` to `most`.

    >>> list(between(b"17", b"99", b"0", b"9"))  # 1[7-9] and [2-9][0-9]
    [((49, 49), (55, 57)), ((50, 57), (48, 57))]
    """
    further = len(low) - 1
    if not further:
        yield ((low[0], high[0]),)
        return
    if low[0] == high[0]:
        yield from (((low[0], low[0]), *steps) for steps in between(low[1:], high[1:], least, most))
        return
    first = low[0]
    last = high[0]
    if low[1:] != least * further:
        yield from (
            ((first, first), *steps) for steps in between(low[1:], most * further, least, most)
        )
        first += 1
    above = ()
    if high[1:] != most * further:
        above = between(least * further, high[1:], least, most)
    last -= high[1:] != most * further
    if first <= last:
        yield ((first, last), *[(least[0], most[0])] * further)
    yield from (((high[0], high[0]), *steps) for steps in above)


def mixed(values: Int[np.ndarray, "*shape"], salt: Any) -> UInt[np.ndarray, "*shape"]:
    """Mixes numbers with salts to 64 bits (splitmix64), so that sums tell rows of numbers apart."""
    salts = np.asarray(salt).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = values.astype(np.uint64) + salts
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _dense(step: list[dict[int, int]]) -> Int[np.ndarray, "states 256"]:
    table = np.full((len(step), 256), -1, np.int32)
    for state, row in enumerate(step):
        table[state, list(row)] = list(row.values())
    return table


def _minimal(
    step: Int[np.ndarray, "states 256"], accepting: Bool[np.ndarray, " states"]
) -> ByteDfa:
    """Merges states from which the same texts follow, and leaves out those from which none does
    (Moore, 1956).
    """
    # The last state stands for -1. States are told apart by what they accept, then by where their
    # bytes lead.
    dead = len(step)
    step = np.concatenate([np.where(step < 0, dead, step), np.full((1, 256), dead, np.int32)])
    group = np.append(accepting, False).astype(np.int64)
    # Bytes that lead to the same states from everywhere are looked at once, [states + 1, kinds of
    # bytes].
    by_kind = np.unique(step, axis=1)
    salts = np.arange(1, by_kind.shape[1] + 1)
    count = 0
    while True:
        rows = mixed(group[:, None], 0)[:, 0] + mixed(group[by_kind], salts).sum(axis=1)
        _, group = np.unique(rows, return_inverse=True)
        group = group.reshape(-1)
        new = int(group.max()) + 1
        if new == count:
            break
        count = new
    order = [
        group[0],
        *(number for number in range(count) if number not in (group[0], group[dead])),
    ]
    if group[0] == group[dead]:
        raise ValueError("the regex matches no text: expected one that some text matches")
    number = np.full(count, -1, np.int32)
    number[order] = np.arange(len(order))
    member = np.zeros(count, np.int64)
    member[group] = np.arange(len(group))
    chosen = member[order]
    return ByteDfa(
        number[group[step[chosen]]].astype(np.int32), np.append(accepting, False)[chosen]
    )
