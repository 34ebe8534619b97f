"""The script for the accelerator, on a tiny T5: what it measures is what it says."""

import json

import jax
import pytest
import typer
from typer.testing import CliRunner

from jaxspec.analysis import h200, theory
from jaxspec.analysis.roofline import load_of
from jaxspec.families import t5 as family
from jaxspec.nets.t5 import T5Config

TINY = T5Config(64, dim=16, ff_dim=16, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1)
LABELS = [(s.temperature, s.gamma, s.alpha, s.speedup) for s in h200.TABLE_2]


def test_settings_are_the_papers():
    assert LABELS == [(0, 7, 0.75, 3.4), (1, 7, 0.62, 2.6), (0, 5, 0.65, 3.1), (1, 5, 0.53, 2.3)]


@pytest.mark.slow
def test_the_command(monkeypatch):
    monkeypatch.setitem(family.SIZES, "tiny-t5", TINY)
    monkeypatch.setattr(h200, "TABLE_2", h200.TABLE_2[1:2])  # a program for each
    app = typer.Typer()
    app.command()(h200.main)
    options = "--shape tiny-t5 --draft-shape tiny-t5 --dtype float32 --new-tokens 16 --source-tokens 3 --copy-mb 1"
    result = CliRunner().invoke(app, [*options.split(), "--seeds", "4", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    plain = found["plain"]
    load = load_of(TINY, row=8, prompt=3)
    assert plain["bytes_per_token"] == load.weight_bytes + load.cache_bytes
    bandwidth = found["copy"]["bytes_per_second"]["median"]
    assert plain["floor_ms"] == pytest.approx(1e3 * plain["bytes_per_token"] / bandwidth)
    assert plain["of_floor"]["median"] == pytest.approx(plain["floor_ms"] / plain["token_ms"]["median"])
    (row,) = found["settings"]
    assert (row["alpha"], row["gamma"], row["paper"]) == (0.62, 7, 2.6)
    assert 1 < row["passes_saved"] <= 7 + 1 and 0.4 < row["alpha_drawn"] < 0.85
    assert row["theorem"] == pytest.approx(float(theory.improvement(0.62, 7, row["c"], row["v"])))
    assert row["predicted_of_these_rounds"] == pytest.approx(row["passes_saved"] / (7 * row["c"] + row["v"]))
    assert found["environment"]["jax"] == jax.__version__ and found["target"]["bytes"] > 0
    assert h200.table(found).row_count == 1
    assert any("of it is reached" in line for line in h200.notes(found))
