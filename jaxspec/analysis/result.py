"""The numbers that are measured of a setting: a `BenchResult`; one that is not known is None. And stores of results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.analysis.environment import Environment
from jaxspec.analysis.memory import Memory
from jaxspec.analysis.statistics import Rate, Spread


class Costs(NamedTuple):
    """The costs of passes; c, v and search in one-token passes of the target.

    Attributes:
        c: a one-token pass of the model that drafts; 0 for a look-up.
        v: the pass that judges gamma draft tokens.
        search: a round's search of a look-up; 0 where a model drafts.
        target_ms, verify_ms, draft_ms: the passes, in milliseconds.
    """

    c: Spread
    v: Spread
    search: float
    target_ms: Spread
    verify_ms: Spread
    draft_ms: Spread | None


class Predicted(NamedTuple):
    """Speed over plain decoding that costs and draft tokens promise, after prefill.

    Attributes:
        theorem: Theorem 3.8 with c and v as measured: draft tokens are accepted independently of each other, in an
            endless text. Of chains without a policy.
        rounds: with the rounds that were run, each as long as its longest draft. Of chains.
    """

    theorem: float | None = None
    rounds: float | None = None


class SettingSummary(NamedTuple):
    """A setting in words and numbers; of plain decoding the drafter, policy and rule are empty.

    Attributes:
        target, task, drafter, policy, rule, backend: names.
        exact: whether the rule is.
        gamma: draft tokens a round, at most; 0 where nothing is drafted.
        planned, pays: whether gamma is the plan's choice, and whether its advice is to speculate; if not, gamma is the
            best all the same.
        temperature, sampling: the latter are the other options, in words.
        dtype, mesh, batch, new_tokens: the setting's.
    """

    target: str
    task: str
    drafter: str = ""
    policy: str = ""
    rule: str = ""
    exact: bool = True
    gamma: int = 0
    planned: bool = False
    pays: bool = True
    temperature: float = 0.0
    sampling: str = ""
    dtype: str = "float32"
    mesh: str = ""
    batch: int = 1
    new_tokens: int = 0
    backend: str = "jaxspec"

    @property
    def is_plain(self) -> bool:
        """True for plain decoding."""
        return not self.drafter


class Drafts(NamedTuple):
    """The draft tokens of a run.

    Attributes:
        share_of_rounds: in which there was a draft.
        tokens_per_round, longest_per_round: draft tokens a round of each row; and of the batch, whose rounds are as
            long as the longest row's.
        conditional, conditional_by_draft_token: the share of the tested draft tokens that was accepted, over all and
            by their place in the round. Of chains.
    """

    share_of_rounds: Rate
    tokens_per_round: float
    longest_per_round: float
    conditional: Rate | None = None
    conditional_by_draft_token: tuple[Rate, ...] = ()


class Latency(NamedTuple):
    """Milliseconds until a reader of the stream has the first token, and the percentiles over all others."""

    first: Spread
    p50: Spread | None
    p95: Spread | None


class Difference(NamedTuple):
    """The first difference from plain decoding: the text's number, the token's, and both texts' tokens up to it."""

    text: int
    position: int
    tokens: tuple[int, ...]
    plain: tuple[int, ...]


class BenchResult(NamedTuple):
    """A setting and what was measured.

    Attributes:
        setting: the setting that was measured.
        texts, tokens, passes: how many texts and tokens a run decodes, and the target's passes, with prefill's.
        tokens_per_round: tokens a round without each text's first token, which prefill yields.
        drafts: the draft tokens of a run; None for plain decoding.
        same_text: greedy texts that are plain decoding's; None for samples and inexact rules.
        difference: where the first that is not differs.
        seconds: the seconds of each timed run; empty if nothing was timed.
        prefill_seconds: the seconds of a run's prefills, the median; None if unknown.
        tokens_per_second: the speed of the runs.
        speed: over plain decoding by the same target and backend, repeat by repeat.
        speed_after_prefill: the same without what prefill takes.
        speed_over_first: over the group's first plain decoding, if that is of another dtype, mesh or backend.
        first_call: seconds of the first one, which compiles the program.
        latency, memory: the latency and the memory of the timed run.
        alpha: E[sum min(p, q)] over all positions of the target's own text, or with a lenient rule what it accepts.
        costs, predicted: the costs, and what theory predicts from them.
        group: the same for results that were interleaved.
        environment: machine, versions, command.
        error: why there are no numbers.
    """

    setting: SettingSummary
    texts: int = 0
    tokens: int = 0
    passes: int = 0
    tokens_per_round: Rate | None = None
    drafts: Drafts | None = None
    same_text: int | None = None
    difference: Difference | None = None
    seconds: tuple[float, ...] = ()
    prefill_seconds: float | None = None
    tokens_per_second: Spread | None = None
    speed: Spread | None = None
    speed_after_prefill: Spread | None = None
    speed_over_first: Spread | None = None
    first_call: float | None = None
    latency: Latency | None = None
    memory: Memory | None = None
    alpha: Rate | None = None
    costs: Costs | None = None
    predicted: Predicted | None = None
    group: str = ""
    environment: Environment | None = None
    error: str | None = None


def ratio(plain: np.ndarray, ours: np.ndarray, tokens: float = 1.0) -> Spread | None:
    """Divides plain decoding's time by another, repeat by repeat; None if noise leaves no time at all.

    >>> ratio(np.array([2.0, 4.0]), np.array([1.0, 1.0]))
    Spread(median=3.0, min=2.0, max=4.0)
    """
    return Spread.of(tokens * plain / ours) if (plain > 0).all() and (ours > 0).all() else None


def over(result: BenchResult, other: BenchResult) -> Spread | None:
    """Divides a result's speed by that of another which was interleaved with it, repeat by repeat."""
    if result.group != other.group or not (result.seconds and other.seconds and other.tokens):
        return None
    return ratio(np.array(other.seconds), np.array(result.seconds), result.tokens / other.tokens)


def to_json(value: Any) -> Any:
    """Turns a result, or a part of one, into what JSON has; numbers that are not finite become None.

    >>> to_json({"speed": Spread(2.0, 1.0, math.inf), "c": np.ones(2), "file": Path("rows.jsonl")})
    {'speed': {'median': 2.0, 'min': 1.0, 'max': None}, 'c': [1.0, 1.0], 'file': 'rows.jsonl'}
    """
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(name): to_json(part) for name, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, tuple | list | np.ndarray):
        return [to_json(part) for part in (value.tolist() if isinstance(value, np.ndarray) else value)]
    return str(value) if isinstance(value, Path) else value


def from_json(stored: dict[str, Any]) -> BenchResult:
    """Makes a result of what `to_json` made of it."""
    return _typed(BenchResult, stored)


def _typed(kind: Any, value: Any) -> Any:
    """Makes a value of a type, or of the first of a union, from what JSON has of it."""
    if value is None:
        return None
    if isinstance(kind, types.UnionType):
        return _typed(typing.get_args(kind)[0], value)
    if typing.get_origin(kind) is tuple:
        return tuple(_typed(typing.get_args(kind)[0], part) for part in value)
    if hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _typed(hints[name], part) for name, part in value.items()})
    return value


def fingerprint(settings: Any) -> str:
    """Returns a name for what JSON has, the same in any order of a dict.

    >>> fingerprint({"a": 1, "b": [2.0]}) == fingerprint({"b": [2.0], "a": 1}) != fingerprint({"a": 1, "b": [3.0]})
    True
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class Store:
    """Results by the fingerprint of their settings, so that a run that was interrupted goes on where it was.

    In memory only, if there is no file; else each is a line of JSON.

    Args:
        file: the file of an earlier run, or a new one.

    Raises:
        ValueError: a line of the file is no result. The last one may be cut: the run ended while it was written.
    """

    def __init__(self, file: Path | None):
        self._file = file
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._cut_at: int | None = None  # bytes before a last line that was cut; None: all lines are complete
        self._end = b""  # the line end that a last line lacks which is complete otherwise
        if file is None or not file.exists():
            return
        lines = file.read_bytes().split(b"\n")
        self._end = b"\n" if lines[-1] else b""
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line) if line.strip() else None
                if row is not None:
                    self._rows.setdefault(row["fingerprint"], []).append(row)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                if number < len(lines):
                    raise ValueError(f"{file}: line {number} is not a measurement; give another file") from error
                self._cut_at, self._end = sum(len(complete) + 1 for complete in lines[:-1]), b""

    def get(self, settings: dict[str, Any], group: str = "") -> dict[str, Any] | None:
        """Returns the result of a setting if it was measured: the group's, or else the latest."""
        results = [row["result"] for row in reversed(self._rows.get(fingerprint(settings), []))]
        return next((result for result in results if group == result.get("group")), (results or [None])[0])

    def put(self, settings: dict[str, Any], result: dict[str, Any], environment: dict[str, Any]) -> None:
        """Adds a result; it is on disk before this returns."""
        name = fingerprint(settings)
        row = {"fingerprint": name, "settings": settings, "result": result, "environment": environment}
        self._rows.setdefault(name, []).append(row)
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._cut_at is not None:
            os.truncate(self._file, self._cut_at)
            self._cut_at = None
        with open(self._file, "ab") as out:
            out.write(self._end + json.dumps(row, ensure_ascii=False).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())
        self._end = b""
