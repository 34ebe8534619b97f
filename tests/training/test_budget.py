"""Steps that fit a time."""

import json

import pytest

from jaxspec import recipes
from jaxspec.training import budget

RECIPE = """
name = "big"
family = "gpt"
[model]
vocab_size = 12
dim = 8
ff_dim = 8
layers = 1
heads = 1
max_positions = 32
dtype = "float32"
[data]
train = "train.jsonl"
heldout = "heldout.jsonl"
tokenizer = "words"
shapes = [[0, 16]]
[train]
steps = 400
batch_tokens = 32
learning_rate = 1e-2
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "big.toml").write_text(RECIPE)
    return recipes.load(tmp_path / "big.toml")


def test_steps_are_cut_to_the_minutes_and_a_run_goes_on_with_its_own(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "seconds_per_step", lambda recipe: 12.0)
    assert budget.within(recipe, 1.0, tmp_path / "run").train.steps == 4  # 0.8 of a minute, at 12 s a step
    assert budget.within(recipe, 1e9, tmp_path / "run").train.steps == 4
    assert json.loads((tmp_path / "run" / "steps.json").read_text()) == {"steps": 4, "seconds_per_step": 12.0}
    assert budget.within(recipe, 1e9, tmp_path / "other") == recipe
    with pytest.raises(ValueError, match="minutes is 0"):
        budget.within(recipe, 0.0, tmp_path / "run")


@pytest.mark.slow
def test_a_step_is_timed(recipe, monkeypatch, standard_dtype_promotion):
    monkeypatch.setattr(budget, "TIMED", 1)
    assert budget.seconds_per_step(recipe) > 0
