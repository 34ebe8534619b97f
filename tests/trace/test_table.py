"""Columns of a trace, for chains and trees."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np

import jaxspec
from jaxspec import drafters
from jaxspec.testing import table_model

TARGET, DRAFT = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
PROMPTS = [[3, 1], [2]]


def test_accepted_draft_tokens_stand_in_the_text_at_their_positions():
    for drafter in (drafters.model(DRAFT), drafters.tree(drafters.model(DRAFT), (2, 1))):
        options = {"gamma": 2, "max_new_tokens": 12, "temperature": 1.0, "key": jax.random.key(3)}
        out = jaxspec.generate(TARGET, PROMPTS, drafter=drafter, **options)
        columns = out.trace.table()
        assert len({len(column) for column in columns.values()}) == 1 and "q" not in columns
        assert len(columns["row"]) == out.stats.drafted.sum()
        accepted = {name: column[columns["accepted"]] for name, column in columns.items()}
        assert len(accepted["row"]) and (accepted["position"] < 12).all()
        assert (out.tokens[accepted["row"], accepted["position"]] == accepted["token"]).all()
        assert (columns["accepted"] <= columns["tested"]).all()
        for row in (0, 1):
            rounds = jaxspec.trace.of_row(out.tokens[row, : out.lengths[row]], out.trace, row)
            by_round = [
                [fate for fate in jaxspec.trace.fates(step) if fate != "none"] for step in rounds
            ]
            fates = [fate for of_round in by_round for fate in of_round]
            of_row = {name: column[columns["row"] == row] for name, column in columns.items()}
            assert [fate == "accepted" for fate in fates] == of_row["accepted"].tolist()
            assert [fate != "untried" for fate in fates] == of_row["tested"].tolist()
            assert [number for number, step in enumerate(by_round) for _ in step] == of_row[
                "round"
            ].tolist()


def test_a_tree_with_a_branch_that_was_cut_off():
    """Of 4 5 8 2 3 the third is cut off, and so what follows it: 5 was accepted, then nothing after
    it.
    """
    counts = {"draft_length": 3, "num_accepted": 1, "num_committed": 2, "num_tested": 2}
    trace = SimpleNamespace(
        draft=np.array([[[4, 5, 8, 2, 3]]]),
        parent=np.array([[[0, 0, -1, 3, 1]]]),
        path=np.array([[[1, 0]]]),
        numbers=None,
        **{name: np.array([[n]]) for name, n in counts.items()},
    )
    columns = jaxspec.trace.table(trace)
    assert {name: column.tolist() for name, column in columns.items()} == {
        "row": [0, 0, 0],
        "round": [1, 1, 1],
        "draft_tokens": [3, 3, 3],
        "position": [1, 1, 2],
        "parent": [0, 0, 1],
        "token": [4, 5, 3],
        "tested": [True, True, False],
        "accepted": [False, True, False],
    }


def test_a_trace_without_a_draft_has_empty_columns():
    columns = jaxspec.generate(TARGET, PROMPTS, max_new_tokens=3).trace.table()
    assert columns and all(column.shape == (0,) for column in columns.values())
