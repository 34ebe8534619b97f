"""Deterministic automata over bytes: of regular expressions, by outlines-core, and of choices among strings."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxspec.optional_imports import missing
from jaxspec.structured.patterns import Pattern

END = 256  # the id of the end token in the vocabulary of single bytes


class ByteDfa(NamedTuple):
    """An automaton that reads a text's UTF-8 bytes. State 0 is the first.

    Attributes:
        step: the next state after each byte; -1: the byte may not stand there.
        accepting: states in which a text may end.
    """

    step: Int[np.ndarray, "states 256"]
    accepting: Bool[np.ndarray, " states"]


def of(pattern: Pattern) -> ByteDfa:
    """Returns a pattern's automaton, with as few states as there can be."""
    return from_choices(pattern.choices) if pattern.choices is not None else from_regex(pattern.regex or "")


@functools.lru_cache(maxsize=64)
def from_choices(choices: tuple[str, ...]) -> ByteDfa:
    """Returns the automaton of some strings.

    >>> from_choices(("ab", "b")).step.max(), from_choices(("ab", "b")).accepting.sum()
    (2, 1)
    """
    step, ends = [{}], set()  # a tree of the strings' beginnings
    for choice in choices:
        state = 0
        for byte in choice.encode():
            if byte not in step[state]:
                step[state][byte] = len(step)
                step.append({})
            state = step[state][byte]
        ends.add(state)
    return _minimal(_dense(step, 0), np.isin(np.arange(len(step)), sorted(ends)))


@functools.lru_cache(maxsize=64)
def from_regex(regex: str) -> ByteDfa:
    """Returns the automaton of a regular expression, which the whole text matches.

    Raises:
        ImportError: outlines-core is not installed.
        ValueError: the expression cannot be read.

    >>> dfa = from_regex("[0-9]{2}")
    >>> dfa.step.shape, dfa.step[0, ord("7")], dfa.step[0, ord("x")]
    ((3, 256), 1, -1)
    """
    try:
        from outlines_core import Index, Vocabulary
    except ImportError as error:
        raise ImportError(missing("outlines-core", "structured")) from error
    # Of a vocabulary of single bytes its index is the expression's own automaton.
    single_bytes: Any = {bytes([byte]): [byte] for byte in range(END)}
    try:
        index = Index(regex, Vocabulary(END, single_bytes))
    except Exception as error:  # outlines-core raises several kinds
        raise ValueError(f"regex is {regex!r:.200}: expected a regular expression ({str(error):.300})") from None
    transitions, first = index.get_transitions(), index.get_initial_state()
    states = [first, *(state for state in transitions if state != first)]
    number = {state: place for place, state in enumerate(states)}
    for state in {after for row in transitions.values() for after in row.values()} - set(number):
        number[state] = len(number)
        states.append(state)
    step = [
        {byte: number[after] for byte, after in transitions.get(state, {}).items() if byte < END} for state in states
    ]
    final = index.get_final_states()
    return _minimal(_dense(step, 0), np.array([state in final for state in states]))


def _dense(step: list[dict[int, int]], first: int) -> Int[np.ndarray, "states 256"]:
    table = np.full((len(step), 256), -1, np.int32)
    for state, row in enumerate(step):
        table[state, list(row)] = list(row.values())
    return table


def _minimal(step: Int[np.ndarray, "states 256"], accepting: Bool[np.ndarray, " states"]) -> ByteDfa:
    """Merges states from which the same texts follow, and leaves out those from which none does (Moore, 1956)."""
    # The last state stands for -1. States are told apart by what they accept, then by where their bytes lead.
    dead = len(step)
    step = np.concatenate([np.where(step < 0, dead, step), np.full((1, 256), dead, np.int32)])
    group = np.append(accepting, False).astype(np.int64)
    count = 0
    while True:
        rows = np.concatenate([group[:, None], group[step]], axis=1)
        _, group = np.unique(rows, axis=0, return_inverse=True)
        group = group.reshape(-1)
        if (new := int(group.max()) + 1) == count:
            break
        count = new
    order = [group[0], *(number for number in range(count) if number not in (group[0], group[dead]))]
    if group[0] == group[dead]:
        raise ValueError("the pattern matches no text: expected one that some text matches")
    place = np.full(count, -1, np.int32)
    place[order] = np.arange(len(order))
    member = np.zeros(count, np.int64)
    member[group] = np.arange(len(group))
    chosen = member[order]
    return ByteDfa(place[group[step[chosen]]].astype(np.int32), np.append(accepting, False)[chosen])
