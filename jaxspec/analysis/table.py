"""Results for people and for other programs: tables for a screen or a document, and sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from jaxspec.analysis.fitting import RANGE, fitting
from jaxspec.analysis.result import BenchResult, Rate, Setting, Spread

BUSY = 1.0  # load per CPU above which other programs slow down what is measured
MISSING = "–"


class Column(NamedTuple):
    """A column of a table; where all of its cells are empty, it is left out."""

    head: str  # above it
    # where a result has its values, such as "costs.c"; or a function of results
    of: str | Callable[[BenchResult], Any]
    digits: int = 2  # after the point
    unit: float = 1.0  # by which numbers are divided

    def cell(self, result: BenchResult) -> str:
        """Formats what it has for a result."""
        value: Any = result if isinstance(self.of, str) else self.of(result)
        for name in self.of.split(".") if isinstance(self.of, str) else ():
            value = None if value is None else getattr(value, name)
        return words(value if self.unit == 1 or value is None else value / self.unit, self.digits)


def words(value: Any, digits: int = 2) -> str:
    """Formats a value for people: a spread by its median, a rate with how far its 95% interval
    reaches, None as a dash.

    >>> (
    ...     words(1.25, 1),
    ...     words(None),
    ...     words(Spread(2.0, 1.0, 3.0)),
    ...     words(Rate(0.5, *3 * [math.nan], 2)),
    ... )
    ('1.2', '–', '2.00', '0.50')
    >>> words(Rate(0.98, 0.01, 0.94, 1.0, 9))  # that of a probability may be cut on one side
    '0.98±0.04'
    """
    if isinstance(value, Spread):
        value = value.median
    if isinstance(value, Rate):
        reach = max(value.value - value.low, value.high - value.value)
        return words(value.value, digits) + ("" if math.isnan(reach) else f"±{reach:.{digits}f}")
    if value is None or value != value:  # NaN, the rate of nothing
        return MISSING
    if isinstance(value, float):
        return f"{value:,.{digits}f}"
    return str(value)


def runs(numbers: Sequence[int]) -> str:
    """Writes rising integers, three or more without a gap as the first and the last.

    >>> runs([1, 2, 4, 5, 6, 9])
    '1, 2, 4..6, 9'
    """
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(
        f"{a}..{b}" if b > a + 1 else ", ".join(map(str, range(a, b + 1)))
        for a, b in zip(starts, ends, strict=True)
    )


def around(spread: Spread | None, digits: int = 2) -> str:
    """Formats the least and the largest."""
    if spread is None:
        return MISSING
    return f"{spread.min:,.{digits}f}..{spread.max:,.{digits}f}"


def _gamma(result: BenchResult) -> str:
    setting = result.setting
    return (
        (str(setting.gamma) if setting.gamma else "plain")
        + ("*" if setting.planned else "")
        + "!" * (not setting.pays)
    )


SETTINGS = {  # those that differ are columns, the others are in the title
    "task": Column("task", "setting.task"),
    "temperature": Column("T", lambda result: f"{result.setting.temperature:g}"),
    "sampling": Column("sampling", "setting.sampling"),
    "batch": Column("batch", "setting.batch"),
    "dtype": Column("dtype", "setting.dtype"),
    "mesh": Column("mesh", lambda result: result.setting.mesh or "one device"),
    "backend": Column("library", "setting.backend"),
    "drafter": Column("drafter", lambda result: result.setting.drafter or "plain"),
    "policy": Column("policy", "setting.policy"),
    "rule": Column(
        "rule", lambda result: result.setting.rule + ("" if result.setting.exact else ", inexact")
    ),
}
_GAMMA = Column("γ", _gamma)
_SAME = Column(
    "same\ntext",
    lambda result: None if result.same_text is None else f"{result.same_text} of {result.texts}",
)
SPEED = (
    Column("tokens/s", "tokens_per_second", 1),
    Column("× plain", "speed"),
    Column(RANGE, lambda result: around(result.speed)),
    Column("no\nprefill", "speed_after_prefill"),
    Column("× first", "speed_over_first"),
    _SAME,
)
THEORY = (
    Column("α", "alpha"),
    Column("accepted\nof tested", "drafts.conditional"),
    Column("c", "costs.c", 3),
    Column("v", "costs.v"),
    Column("tokens\na round", "tokens_per_round"),
    Column("Thm\n3.8", "predicted.theorem"),
    Column("own\nrounds", "predicted.rounds"),
)
DRAFTS = (
    *THEORY[:2],
    Column("rounds with\na draft", "drafts.share_of_rounds"),
    Column("draft\ntokens", "drafts.tokens_per_round"),
    Column("in the\nlongest", "drafts.longest_per_round"),
    THEORY[4],
)
LATENCY = (
    Column("first\ntoken, ms", "latency.first"),
    Column("p50 a\ntoken, ms", "latency.p50"),
    Column("p95 a\ntoken, ms", "latency.p95"),
    Column("first\ncall, s", "first_call", 1),
)
MEMORY = (
    Column("program,\nMB", "memory.program", 1, 1e6),
    Column("of it\ntemporary", "memory.temporaries", 1, 1e6),
    Column("weights", "memory.weights", 1, 1e6),
    Column("what it\nneeds", "memory.needed", 1, 1e6),
)
Groups = Sequence[Sequence[Column]]
BENCH: Groups = (SPEED, THEORY, LATENCY, MEMORY)


def tables(
    results: Sequence[BenchResult], columns: Groups, width: int | None = None
) -> list[Table]:
    """Makes a table for each task, temperature and batch size; on a screen, some with a part of the
    columns each.

    Args:
        columns: groups of columns, after the columns of settings that differ.
        width: characters of a line, into which a table of each group is made to fit; None for a
            document, which has all columns in one table.
    """
    views = []
    if width is None:
        groups = [[column for group in columns for column in group]]
    else:
        groups = columns
    alike = dict[tuple[str, float, int], list[BenchResult]]()
    for result in results:
        alike.setdefault(
            (result.setting.task, result.setting.temperature, result.setting.batch), []
        ).append(result)
    for (task, heat, batch), grouped in alike.items():
        words = [task, f"T = {heat:g}", f"batch {batch}" if batch > 1 else "", *_shared(grouped)]
        beside = _settings_that_differ(grouped)
        filled = [
            [c for c in group if any(c.cell(r) not in ("", MISSING) for r in grouped)]
            for group in groups
        ]
        wide = [_table(grouped, beside, group) for group in filled if group] or [
            _table(grouped, beside, [])
        ]
        parts = [piece for view in wide for piece in fitting(view, width, len(beside))]
        parts[0].title = ", ".join(filter(None, words))
        views += parts
    return views


def _settings_that_differ(results: Sequence[BenchResult]) -> list[Column]:
    drafting = [result for result in results if not result.setting.is_plain] or list(results)
    of = {"rule": drafting, "policy": drafting}  # plain decoding has none
    differ = [
        name
        for name in SETTINGS
        if len({getattr(r.setting, name) for r in of.get(name, results)}) > 1
    ]
    return [*(SETTINGS[name] for name in differ), _GAMMA]


def _table(
    results: Sequence[BenchResult], beside: Sequence[Column], columns: Sequence[Column]
) -> Table:
    view = Table(title_justify="left", title_style="bold", box=box.ROUNDED)
    for column in beside:
        view.add_column(
            column.head,
            no_wrap=True,
            justify="right" if column is _GAMMA else "left",
            vertical="bottom",
        )
    for column in columns:
        view.add_column(column.head, justify="right", no_wrap=True, vertical="bottom")
    for result in results:
        view.add_row(*(column.cell(result) for column in (*beside, *columns)))
    return view


def _shared(results: Sequence[BenchResult]) -> list[str]:
    """Names settings that all results have, and that are not as usual, in words."""
    settings = [result.setting for result in results]
    drafting = [setting for setting in settings if not setting.is_plain] or settings
    words = []
    if len({setting.drafter for setting in settings}) == 1:
        words = [settings[0].drafter]
    if len({setting.rule for setting in drafting}) == 1 and drafting[0].rule not in (
        "",
        Setting._field_defaults["rule"].name,
    ):
        words.append(drafting[0].rule)
    words += [settings[0].sampling] if len({setting.sampling for setting in settings}) == 1 else []
    words += ["* the plan's γ"] if any(setting.planned for setting in settings) else []
    return words + (
        ["! its best, but it is not to speculate"] if not all(x.pays for x in settings) else []
    )


def of_policies(results: Sequence[BenchResult]) -> list[str]:
    """Compares each policy with its drafter's best gamma without one, in the same group, in
    sentences.
    """
    lines = []
    for result in results:
        setting = result.setting
        same = (
            r
            for r in results
            if (r.group, r.setting.drafter, r.setting.policy) == (result.group, setting.drafter, "")
        )
        best = max((r.speed.median for r in same if r.speed), default=None)
        if setting.policy and result.speed and best:
            share = result.speed.median / best
            lines.append(
                f"{setting.label}: {setting.policy} has {share:.2f} of the speed of the best γ."
            )
    return lines


def notes(results: Sequence[BenchResult]) -> list[str]:
    """Explains the numbers: promises kept or not, plans, texts that differ, a machine that was
    busy.
    """
    lines = _promises(results)
    for result in results:
        setting = result.setting
        if not setting.pays and result.speed:
            speed = f"{result.speed.median:.2f} times the speed of plain decoding"
            lines.append(
                f"{setting.label}: the plan is not to speculate; its best γ, {setting.gamma}, has "
                f"{speed}."
            )
    for result in results:
        if result.same_text is not None and result.same_text < result.texts:
            setting = result.setting
            lines.append(
                f"{setting.task}, {setting.dtype}, {setting.drafter or 'plain'} "
                f"({setting.backend}), γ = {setting.gamma}: {result.same_text} of {result.texts} "
                "greedy texts are those of plain decoding. Passes of other widths round "
                "otherwise: near ties?"
            )
    failed = [result for result in results if result.error]
    lines += [
        f"FAILED: {x.setting.task}, {x.setting.drafter or 'plain'}: {x.error}" for x in failed
    ]
    machine = results[0].environment if results else None
    if not machine or not any(result.seconds for result in results):
        return lines
    if (machine.load or 0) > BUSY * (machine.cpus or 1):
        load = f"The load was {machine.load} on {machine.cpus} CPUs when this began"
        lines.append(f"{load}: other programs ran, and speeds are rough.")
    return lines


def _promises(results: Sequence[BenchResult]) -> list[str]:
    """Compares measured speeds with those that Theorem 3.8 and the rounds promise."""
    lines = []
    promises = {"theorem": "Theorem 3.8", "rounds": "what their own rounds promise"}
    for name, label in promises.items():
        pairs = (
            (r.speed_after_prefill or r.speed, r.predicted and getattr(r.predicted, name))
            for r in results
        )
        shares = [speed.median / promise for speed, promise in pairs if speed and promise]
        if not shares:
            continue
        rows_of = "1 row" if len(shares) == 1 else f"{len(shares)} rows"
        around_all = f"{min(shares):.2f} to {max(shares):.2f}"
        lines.append(
            f"Measured over {label}: {np.median(shares):.2f} in the median of {rows_of}, "
            f"{around_all}."
        )
    return lines
