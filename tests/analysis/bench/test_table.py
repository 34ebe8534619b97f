"""Rows as tables that fit a screen, and as sentences."""

import io

import pytest
from rich.console import Console

from jaxspec.analysis.bench import table
from jaxspec.analysis.bench.row import Costs, Latency, Memory, Predicted, Rate, Row, Spread
from jaxspec.analysis.measure import environment

ONE = Spread(1.5, 1.25, 1.75)
RATE = Rate(0.75, 0.02, 0.7, 0.8, 90)
PLAIN = Row("big", "text", tokens_per_second=ONE, texts=8, tokens=80, same_text=8, seconds=(8.0, 8.0), group="1")
SMALL = PLAIN._replace(
    drafter="debian-t5-small",
    rule="rejection",
    gamma=3,
    speed=ONE,
    speed_after_prefill=ONE,
    seconds=(4.0, 5.0),
    alpha=RATE,
    conditional=RATE,
    tokens_per_round=Rate(2.5, 0.1, 2.25, 2.75, 40),
    drafted=RATE,
    draft_tokens_per_round=3.0,
    longest_per_round=3.0,
    costs=Costs(Spread(0.01, 0.01, 0.02), ONE, 0.0, ONE, ONE, ONE),
    predicted=Predicted(2.5, 2.0, 1.5, 3.0),
    latency=Latency(ONE, ONE, ONE),
    memory=Memory(2_000_000, 500_000, 1_000_000, 250_000, 0),
)
COPIED = SMALL._replace(drafter="prompt_lookup", alpha=None, gamma=7)
EVERY = (*table.SPEED, *table.THEORY, *table.DRAFTS, *table.LATENCY, *table.MEMORY)


def printed(made, width):
    out = Console(file=io.StringIO(), width=width, highlight=False)
    for one in made:
        out.print(one)
    return out.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_a_screen(width):
    made = table.tables([PLAIN, SMALL, COPIED], EVERY, width)
    text = printed(made, width)
    assert len(made) > 1 and "…" not in text and max(map(len, text.splitlines())) <= width
    assert all(one.columns[0].header == "drafter" and one.columns[1].header == "γ" for one in made)
    heads = [column.header for one in made for column in one.columns[2:]]
    filled = [one for one in EVERY if any(one.cell(row) not in ("", "–") for row in (PLAIN, SMALL, COPIED))]
    assert heads == [column.head for column in filled]  # none is lost, and "on average" is not known of any


def test_a_document_has_one_table_and_settings_in_the_title():
    rows = [row._replace(sampling="top_k=5", temperature=1.0) for row in (PLAIN, SMALL)]
    (one,) = table.tables(rows, EVERY)
    assert one.title == "text, T = 1, top_k=5" and list(one.columns[0].cells) == ["plain", "debian-t5-small"]
    two = table.tables([PLAIN, PLAIN._replace(task="edit")], EVERY)
    assert [made.title for made in two] == ["text, T = 0", "edit, T = 0"]


def test_a_plan_is_marked_and_compared_with_the_sweep():
    planned = SMALL._replace(planned=True, speed_after_prefill=Spread(1.2, 1, 2))
    advice = COPIED._replace(planned=True, pays=False, predicted=None)
    rows = [PLAIN, SMALL, planned, advice]
    (made,) = table.tables(rows, table.SPEED)
    assert list(made.columns[1].cells) == ["plain", "3", "3*", f"{COPIED.gamma}*!"]
    assert "* the plan's γ" in made.title and "! its best" in made.title
    assert table.plan_shares(rows) == pytest.approx([0.8])
    lines = " ".join(table.notes(rows))
    assert (
        "has 0.80 of the best speed in the worst of 1 sweeps" in lines
        and "the plan is not to speculate; its best γ" in lines
    )


def test_there_is_no_best_speed_where_none_was_measured():
    untimed = SMALL._replace(speed=None, speed_after_prefill=None, speed_on_average=None, predicted=None)
    assert table.plan_shares([untimed, untimed._replace(planned=True)]) == []
    assert not any("best speed" in line for line in table.notes([untimed, untimed._replace(planned=True)]))


def test_tasks_are_put_together_at_one_temperature():
    """Greedy and sampled text of one task are no two tasks."""
    one = [PLAIN._replace(seconds=(4.0,)), SMALL._replace(seconds=(2.0,))]
    both = [row._replace(temperature=heat) for heat in (0.0, 1.0) for row in one]
    assert table.together(both) == []
    every = table.together([row._replace(task=task) for task in ("text", "edit") for row in both])
    assert sorted((row.temperature, row.drafter, row.passes) for row in every) == [
        (heat, row.drafter, 2 * row.passes) for heat in (0.0, 1.0) for row in one
    ]
    assert [made.title.split(", ")[:2] for made in table.tables(every, table.SPEED)] == [
        ["all together", f"T = {heat}"] for heat in (0, 1)
    ]


def test_notes_name_broken_promises_failures_and_a_busy_machine():
    failed = SMALL._replace(error="MemoryError: all of it")
    busy = environment.current()._replace(load=3.1, cpus=2)
    rows = [PLAIN._replace(environment=busy), SMALL._replace(same_text=7), failed]
    text = " ".join(table.notes(rows))
    for part in (
        "Measured over predicted: 0.75 in the median of 2 rows, 0.75 to 0.75.",
        "7 of 8 greedy texts",
        "FAILED: text, debian-t5-small: MemoryError: all of it",
        "The load was 3.1 on 2 CPUs",
    ):
        assert part in text
    assert table.notes([PLAIN]) == []


def test_policies_and_libraries_are_compared_within_a_group():
    adaptive = SMALL._replace(policy="adaptive", speed=Spread(1.2, 1.0, 1.3))
    (said,) = table.of_policies([PLAIN, SMALL, adaptive])
    assert said.endswith("adaptive has 0.80 of the speed of the best γ.") and table.of_policies([PLAIN, SMALL]) == []
    theirs = SMALL._replace(backend="transformers", seconds=(8.0, 20.0))
    (said,) = table.of_libraries([SMALL, theirs])
    assert said.endswith("jaxspec has 3.00 times the speed of transformers (2.00..4.00).")
    assert table.of_libraries([SMALL, theirs._replace(group="2")]) == []
