"""Results as tables and as sentences."""

import io

import pytest
from rich.console import Console

from jaxspec.analysis import environment, table
from jaxspec.analysis.result import (
    BenchResult,
    Costs,
    Drafts,
    Latency,
    MemoryUse,
    Predicted,
    Rate,
    SettingSummary,
    Spread,
)

ONE = Spread(1.5, 1.25, 1.75)
RATE = Rate(0.75, 0.02, 0.7, 0.8, 90)
PLAIN = BenchResult(
    SettingSummary("big", "text"),
    tokens_per_second=ONE,
    texts=8,
    tokens=80,
    same_text=8,
    seconds=(8.0, 8.0),
    group="1",
)


def changed(result, **settings):
    """A result of another setting."""
    return result._replace(setting=result.setting._replace(**settings))


SMALL = changed(PLAIN, drafter="debian-t5-small", rule="rejection", gamma=3)._replace(
    speed=ONE,
    speed_after_prefill=ONE,
    seconds=(4.0, 5.0),
    alpha=RATE,
    drafts=Drafts(RATE, 3.0, 3.0, RATE),
    tokens_per_round=Rate(2.5, 0.1, 2.25, 2.75, 40),
    costs=Costs(Spread(0.01, 0.01, 0.02), ONE, 0.0, ONE, ONE, ONE),
    predicted=Predicted(2.5, 3.0),
    latency=Latency(ONE, ONE, ONE),
    memory=MemoryUse(2_000_000, 500_000, 1_000_000, 250_000, 0),
)
COPIED = changed(SMALL, drafter="prompt_lookup", gamma=7)._replace(alpha=None)
EVERY = (*table.BENCH, table.DRAFTS)


def printed(views, width):
    out = Console(file=io.StringIO(), width=width, highlight=False)
    for view in views:
        out.print(view)
    return out.file.getvalue()


@pytest.mark.parametrize("width", [60, 100])
def test_tables_fit_a_screen(width):
    views = table.tables([PLAIN, SMALL, COPIED], EVERY, width)
    text = printed(views, width)
    assert len(views) >= 5 and "…" not in text and max(map(len, text.splitlines())) <= width
    assert all(
        view.columns[0].header == "drafter" and view.columns[1].header == "γ" for view in views
    )
    heads = [column.header for view in views for column in view.columns[2:]]
    columns = [column for group in EVERY for column in group]
    filled = [
        c
        for c in columns
        if any(c.cell(result) not in ("", "–") for result in (PLAIN, SMALL, COPIED))
    ]
    assert heads == [column.head for column in filled]


def test_a_document_has_one_table_and_settings_in_the_title():
    results = [changed(result, sampling="top_k=5", temperature=1.0) for result in (PLAIN, SMALL)]
    (view,) = table.tables(results, EVERY)
    assert view.title == "text, T = 1, top_k=5" and list(view.columns[0].cells) == [
        "plain",
        "debian-t5-small",
    ]
    two = table.tables([PLAIN, changed(PLAIN, task="edit")], EVERY)
    assert [view.title for view in two] == ["text, T = 0", "edit, T = 0"]


def test_a_plan_is_marked():
    planned = changed(SMALL, planned=True)
    advice = changed(COPIED, planned=True, pays=False)._replace(predicted=None)
    results = [PLAIN, SMALL, planned, advice]
    (view,) = table.tables(results, (table.SPEED,))
    assert list(view.columns[1].cells) == ["plain", "3", "3*", "7*!"]
    assert "* the plan's γ" in view.title and "! its best" in view.title
    assert "the plan is not to speculate; its best γ" in " ".join(table.notes(results))


def test_notes_name_broken_promises_failures_and_a_busy_machine():
    failed = SMALL._replace(error="MemoryError: all of it")
    busy = environment.current()._replace(load=3.1, cpus=2)
    text = " ".join(
        table.notes([PLAIN._replace(environment=busy), SMALL._replace(same_text=7), failed])
    )
    for part in (
        "Measured over Theorem 3.8: 0.60 in the median of 2 rows, 0.60 to 0.60.",
        "Measured over what their own rounds promise: 0.50 in the median of 2 rows, 0.50 to 0.50.",
        "7 of 8 greedy texts",
        "FAILED: text, debian-t5-small: MemoryError: all of it",
        "The load was 3.1 on 2 CPUs",
    ):
        assert part in text
    assert table.notes([PLAIN]) == []


def test_policies_are_compared_within_a_group():
    adaptive = changed(SMALL, policy="adaptive")._replace(speed=Spread(1.2, 1.0, 1.3))
    (said,) = table.of_policies([PLAIN, SMALL, adaptive])
    assert (
        said.endswith("adaptive has 0.80 of the speed of the best γ.")
        and table.of_policies([PLAIN, SMALL]) == []
    )
    assert table.of_policies([PLAIN, SMALL._replace(group="2"), adaptive]) == []
