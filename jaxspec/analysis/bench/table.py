"""Rows for people and for other programs: tables that fit a screen, or are for a document; CSV; sentences."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.analysis.bench.row import Rate, Row, Spread, over, to_json

BUSY = 1.0  # load per CPU above which other programs slow down what is measured
MISSING = "–"
EVERYTHING = "all together"  # a task that is all others


class Column(NamedTuple):
    """A column of a table; where all of its cells are empty, it is left out.

    Attributes:
        head: above it.
        of: where a row has its values, such as "costs.c"; or a function of rows.
        digits: after the point.
        around: whether to show the least and the largest of a spread, and not its median.
    """

    head: str
    of: str | Callable[[Row], Any]
    digits: int = 2
    around: bool = False

    def cell(self, row: Row) -> str:
        """What it has for a row."""
        value: Any = row
        for name in self.of.split(".") if isinstance(self.of, str) else ():
            value = None if value is None else getattr(value, name)
        value = value if isinstance(self.of, str) else self.of(row)
        return around(value, self.digits) if self.around else words(value, self.digits)


def words(value: Any, digits: int = 2) -> str:
    """A value for people: of a spread the median, of a rate with how far its 95% interval reaches; a dash of None.

    >>> words(1.25, 1), words(None), words(Spread(2.0, 1.0, 3.0)), words(Rate(0.5, None, None, None, 2))
    ('1.2', '–', '2.00', '0.50')
    >>> words(Rate(0.98, 0.01, 0.94, 1.0, 9))  # that of a probability may be cut on one side
    '0.98±0.04'
    """
    if isinstance(value, Spread):
        value = value.median
    if isinstance(value, Rate):
        low, high, value = value.low, value.high, value.value
        reach = "" if low is None or high is None or value is None else f"±{max(value - low, high - value):.{digits}f}"
        return words(value, digits) + reach
    if value is None:
        return MISSING
    return f"{value:,.{digits}f}" if isinstance(value, float) else str(value)


def around(spread: Spread | None, digits: int = 2) -> str:
    """The least and the largest."""
    return MISSING if spread is None else f"{spread.min:,.{digits}f}..{spread.max:,.{digits}f}"


def _gamma(row: Row) -> str:
    return (str(row.gamma) if row.gamma else "plain") + ("*" if row.planned else "") + ("" if row.pays else "!")


def _mb(name: str) -> Callable[[Row], float | None]:
    def megabytes(row: Row) -> float | None:
        size = None if row.memory is None else getattr(row.memory, name)
        return None if size is None else size / 1e6

    return megabytes


def _times_needed(row: Row) -> float | None:
    memory = row.memory
    return None if memory is None or memory.program is None else memory.program / memory.needed


SETTINGS = {  # those that differ are columns, the others are in the title
    "task": Column("task", "task"),
    "temperature": Column("T", lambda row: f"{row.temperature:g}"),
    "sampling": Column("sampling", "sampling"),
    "batch": Column("batch", "batch"),
    "dtype": Column("dtype", "dtype"),
    "mesh": Column("mesh", lambda row: row.mesh or "one device"),
    "backend": Column("library", "backend"),
    "drafter": Column("drafter", lambda row: row.drafter or "plain"),
    "policy": Column("policy", "policy"),
    "rule": Column("rule", lambda row: row.rule + ("" if row.exact else ", inexact")),
}
GAMMA = Column("γ", _gamma)
SAME = Column("same\ntext", lambda row: None if row.same_text is None else f"{row.same_text} of {row.texts}")
PEERS = (
    Column("tokens/s", "tokens_per_second", 1),
    Column("min..max", "tokens_per_second", 1, around=True),
    Column("× plain", "speed"),
    Column("min..max", "speed", around=True),
    Column("passes", "passes"),
    SAME,
)
SPEED = (
    *PEERS[:4],
    Column("no\nprefill", "speed_after_prefill"),
    Column("on\naverage", "speed_on_average"),
    Column("× first", "speed_over_first"),
    Column("min..max", "speed_over_first", around=True),
    SAME,
)
THEORY = (
    Column("α", "alpha"),
    Column("c", "costs.c", 3),
    Column("v", "costs.v"),
    Column("tokens\na round", "tokens_per_round"),
    Column("Thm\n3.8", "predicted.theorem"),
    Column("pre-\ndicted", "predicted.independent"),
    Column("re-\nplayed", "predicted.replayed"),
    Column("own\nrounds", "predicted.rounds"),
)
MEASURED = (
    Column("meas-\nured", "speed_after_prefill"),
    Column("min..max", "speed_after_prefill", around=True),
    Column("on\naverage", "speed_on_average"),
)
TESTED = Column("accepted\nof tested", "conditional")
DRAFTS = (
    Column("α", "alpha"),
    TESTED,
    Column("rounds with\na draft", "drafted"),
    Column("draft\ntokens", "draft_tokens_per_round"),
    Column("in the\nlongest", "longest_per_round"),
    Column("tokens\na round", "tokens_per_round"),
    Column("re-\nplayed", "replayed_tokens"),
    Column("shared with\nthe first", "overlap", 4),
)
CANDIDATES = tuple(
    Column(f"one of\n{n}", lambda row, n=n: row.candidates[n - 1] if row.candidates else None) for n in (2, 4)
)
LATENCY = (
    Column("first\ntoken, ms", "latency.first"),
    Column("p50 a\ntoken, ms", "latency.p50"),
    Column("min..max", "latency.p50", around=True),
    Column("p95 a\ntoken, ms", "latency.p95"),
    Column("min..max", "latency.p95", around=True),
)
COMPILE = Column("first\ncall, s", "first_call", 1)
MEMORY = (
    Column("program,\nMB", _mb("program"), 1),
    Column("of it\ntemporary", _mb("temporaries"), 1),
    Column("weights", _mb("weights"), 1),
    Column("what it\nneeds", _mb("needed"), 1),
    Column("times\nthat", _times_needed),
)
BENCH = (  # the others are in `measure`, in JSON and in CSV
    PEERS[0],
    *PEERS[2:4],
    *SPEED[4:],
    THEORY[0],
    TESTED,
    *THEORY[1:4],
    Column("pre-\ndicted", "predicted.independent"),
    Column("re-\nplayed", "predicted.replayed"),
    *LATENCY,
    COMPILE,
    *MEMORY,
    DRAFTS[-1],
)


def tables(rows: Sequence[Row], columns: Sequence[Column], width: int | None = None, title: str = "") -> list[Table]:
    """Rows as tables, one for each task, temperature and batch size; with too many columns for `width`, some more.

    Args:
        rows: in their order.
        columns: after those of the settings that differ.
        width: characters of a line; None for a document.
        title: before the settings that all rows of a table share.
    """
    made = []
    for (task, heat, batch), some in _grouped(rows, lambda row: (row.task, row.temperature, row.batch)):
        parts = [
            title,
            task,
            f"T = {heat:g}",
            f"batch {batch}" if batch > 1 else "",
            *_shared(some),
        ]
        made += stacked(some, columns, width, ", ".join(filter(None, parts)))
    return made


def stacked(rows: Sequence[Row], columns: Sequence[Column], width: int | None, title: str) -> list[Table]:
    """One table, or several with some of the columns each, none wider than `width` if that can be."""
    drafting = [row for row in rows if not row.is_plain] or rows
    of = {"rule": drafting, "policy": drafting}  # plain decoding has none
    keys = [SETTINGS[name] for name in SETTINGS if len({getattr(row, name) for row in of.get(name, rows)}) > 1]
    keys.append(GAMMA)
    left = [column for column in columns if any(column.cell(row) not in ("", MISSING) for row in rows)]
    made, unlimited = [], Console(width=1000)
    while left:
        count = len(left)
        while width is not None and count > 1:
            if unlimited.measure(_table(rows, keys, left[:count])).maximum <= width:
                break
            count -= 1
            while count > 1 and left[count].head == "min..max":  # stays beside what it is of
                count -= 1
        made.append(_table(rows, keys, left[:count]))
        left = left[count:]
    for view in made[:1]:
        view.title = title
    return made


def _table(rows: Sequence[Row], keys: Sequence[Column], columns: Sequence[Column]) -> Table:
    view = Table(title_justify="left", title_style="bold", box=box.ROUNDED)
    for key in keys:
        view.add_column(key.head, no_wrap=True, justify="right" if key is GAMMA else "left", vertical="bottom")
    for column in columns:
        view.add_column(column.head, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        view.add_row(*(column.cell(row) for column in (*keys, *columns)))
    return view


def _shared(rows: Sequence[Row]) -> list[str]:
    """Settings that all rows have, and that are not as usual, in words."""
    drafting = [row for row in rows if not row.is_plain] or rows
    found = [rows[0].drafter] if len({row.drafter for row in rows}) == 1 else []
    if len({row.rule for row in drafting}) == 1 and drafting[0].rule not in ("", "rejection"):
        found.append(drafting[0].rule)
    found += [rows[0].sampling] if len({row.sampling for row in rows}) == 1 else []
    found += ["* the plan's γ"] if any(row.planned for row in rows) else []
    return found + (["! its best, but it is not to speculate"] if not all(row.pays for row in rows) else [])


def _grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[tuple[Any, list[Row]]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.items())


def together(rows: Sequence[Row]) -> list[Row]:
    """All tasks at one temperature as one workload: as much text of each as plain decoding generates.

    >>> plain = Row("big", "a", texts=1, tokens=10, passes=10, seconds=(4.0,), group="1")
    >>> fast = plain._replace(drafter="small", gamma=2, tokens=20, seconds=(2.0,), same_text=1)
    >>> both = [plain, fast, plain._replace(task="b"), fast._replace(task="b")]
    >>> [(row.task, row.drafter, row.passes, row.speed and row.speed.median) for row in together(both)]
    [('all together', '', 20, None), ('all together', 'small', 20, 4.0)]
    """
    timed = [row for row in rows if row.seconds]
    names = ("drafter", "policy", "rule", "gamma", "planned", "dtype", "mesh", "backend", "batch", "sampling")
    names += ("temperature",)
    by_setting = _grouped(timed, lambda row: tuple(getattr(row, name) for name in names))
    found: list[Row] = []
    for _, some in by_setting:
        tasks = {row.task for row in timed if row.temperature == some[0].temperature}
        plains = [_plain_of(row, timed) for row in some]
        if len(tasks) < 2 or len(some) < len(tasks) or None in plains:
            continue
        texts = [plain.tokens for plain in plains if plain is not None]
        parts = [text * np.array(row.seconds) / row.tokens for text, row in zip(texts, some, strict=True)]
        seconds = np.sum(parts, axis=0)
        before = np.sum([plain.seconds for plain in plains if plain is not None], axis=0)
        same = [row.same_text for row in some]
        row = Row(**{name: getattr(some[0], name) for name in ("target", *names)}, task=EVERYTHING)
        row = row._replace(
            texts=sum(row.texts for row in some),
            tokens=sum(texts),
            passes=sum(row.passes for row in some),
            same_text=None if None in same else sum(filter(None, same)),
            seconds=tuple(seconds.tolist()),
            tokens_per_second=Spread.of(sum(texts) / seconds),
            speed=None if row.is_plain else Spread.of(before / seconds),
        )
        found.append(row)
    return found


def _plain_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The plain decoding that a row was interleaved with."""
    alike = ("task", "temperature", "batch", "dtype", "mesh", "backend", "group", "sampling")
    return next((p for p in rows if p.is_plain and all(getattr(p, n) == getattr(row, n) for n in alike)), None)


def of_libraries(rows: Sequence[Row]) -> list[str]:
    """Our speed over another library's at the same setting, in sentences."""
    names = ("task", "temperature", "batch", "drafter", "gamma", "policy", "rule", "group")
    found = []
    for row, other in itertools.product(rows, rows):
        alike = all(getattr(row, name) == getattr(other, name) for name in names)
        if row.backend == rows[0].backend != other.backend and alike and (ratio := over(row, other)):
            found.append(
                f"{row.task}, batch {row.batch}, {row.drafter or 'plain'}: {row.backend} has {ratio.median:.2f} times "
                f"the speed of {other.backend} ({around(ratio)})."
            )
    return found


def of_policies(rows: Sequence[Row]) -> list[str]:
    """The speed of each policy over its drafter's best gamma without one, in the same group, in sentences."""
    found = []
    for row in rows:
        same = (r for r in rows if (r.group, r.drafter, r.policy) == (row.group, row.drafter, "") and r.speed)
        best = max((r.speed.median for r in same if r.speed), default=None)
        if row.policy and row.speed and best:
            found.append(
                f"{row.task}, T = {row.temperature:g}, {row.drafter}: {row.policy} has {row.speed.median / best:.2f} "
                "of the speed of the best γ."
            )
    return found


def notes(rows: Sequence[Row]) -> list[str]:
    """What the numbers mean, in sentences: promises kept or not, plans, texts that differ, a machine that was busy."""
    lines = []
    promises = {"independent": "predicted", "replayed": "replayed"}
    promises |= {"rounds": "what their own rounds promise", "theorem": "Theorem 3.8 in endless texts"}
    for name, what in promises.items():
        pairs = ((row.best_speed(), row.predicted and getattr(row.predicted, name)) for row in rows)
        shares = [speed.median / promise for speed, promise in pairs if speed and promise]
        if shares:
            rows_of = f"{len(shares)} rows" if len(shares) > 1 else "1 row"
            around_all = f"{min(shares):.2f} to {max(shares):.2f}"
            lines.append(f"Measured over {what}: {np.median(shares):.2f} in the median of {rows_of}, {around_all}.")
    shares = plan_shares(rows)
    if shares:
        lines.append(f"The plan's γ has {min(shares):.2f} of the best speed in the worst of {len(shares)} sweeps.")
    for row in rows:
        if not row.pays and row.speed:
            lines.append(
                f"{row.task}, T = {row.temperature:g}, {row.drafter}: the plan is not to speculate; its best γ, "
                f"{row.gamma}, has {row.speed.median:.2f} times the speed of plain decoding."
            )
    differ = [row for row in rows if row.same_text is not None and row.same_text < row.texts]
    for row in differ:
        lines.append(
            f"{row.task}, {row.dtype}, {row.drafter or 'plain'} ({row.backend}), γ = {row.gamma}: {row.same_text} of "
            f"{row.texts} greedy texts are those of plain decoding. Passes of other widths round otherwise: near ties?"
        )
    lines += [f"FAILED: {row.task}, {row.drafter or 'plain'}: {row.error}" for row in rows if row.error]
    about = rows[0].environment if rows else None
    if about is not None and (about.load or 0) > BUSY * (about.cpus or 1):
        lines.append(
            f"The load was {about.load} on {about.cpus} CPUs when this began: other programs ran, and speeds are rough."
        )
    return lines


def plan_shares(rows: Sequence[Row]) -> list[float]:
    """Speed with the plan's gamma over the best of a sweep, plain decoding included; sampled, on average.

    >>> row = Row("big", "text", drafter="small", gamma=3, group="1", speed_after_prefill=Spread(1.8, 1.8, 1.8))
    >>> plan_shares([row._replace(planned=True), row._replace(speed_after_prefill=Spread(2.0, 2.0, 2.0))])
    [0.9]
    >>> plan_shares([row._replace(planned=True)])
    []
    """
    found = []
    for _, sweep in _grouped(rows, lambda row: (row.group, row.drafter, row.policy, row.rule, row.dtype)):
        speeds: dict[bool, list[float]] = {}
        for row in sweep:
            if not row.is_plain and (best := row.best_speed()):
                speeds.setdefault(row.planned, []).append(best.median if row.pays else 1.0)
        if len(speeds) == 2:
            found.append(speeds[True][0] / max(1.0, *speeds[True], *speeds[False]))
    return found


def as_csv(rows: Sequence[Row]) -> str:
    """All rows as comma-separated values; a spread is three columns, and a list as many as it is long.

    >>> row = Row("big", "text", speed=Spread(1.5, 1.0, 2.0), seconds=(3.0, 4.0))
    >>> heads, cells = (line.split(",") for line in as_csv([row]).splitlines())
    >>> found = dict(zip(heads, cells))
    >>> found["task"], found["speed_median"], found["seconds_2"]
    ('text', '1.5', '4.0')
    """
    lines = [{head: value for name, of in to_json(row).items() for head, value in _columns(name, of)} for row in rows]
    heads = list(dict.fromkeys(head for line in lines for head in line))
    out = io.StringIO()
    writer = csv.DictWriter(out, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _columns(name: str, value: Any) -> list[tuple[str, Any]]:
    """What is within a value, each by a name of its own; an empty list, or dict, has nothing."""
    if not isinstance(value, dict | list):
        return [(name, value)]
    parts = value.items() if isinstance(value, dict) else enumerate(value, start=1)
    return [column for part, inner in parts for column in _columns(f"{name}_{part}", inner)]
