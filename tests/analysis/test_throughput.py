"""What `jaxspec bench` measures on tiny models: its counts, its texts and its arithmetic; never its speed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.analysis.bench import throughput
from jaxspec.analysis.measure import acceptance, timing
from jaxspec.base import Prompt, Stats
from jaxspec.cli import bench_tables
from jaxspec.decode.loop import Outcome
from jaxspec.decode.request import prepare
from jaxspec.testing import table_model

PROMPT = Prompt(jnp.array([[3, 1, 2], [2, 0, 0], [5, 4, 0]], jnp.int32), jnp.array([3, 1, 2], jnp.int32))
TARGET, DRAFT = table_model(jax.random.key(1), 6), table_model(jax.random.key(2), 6)


JOB = prepare(TARGET, PROMPT, drafter=DRAFT, max_new_tokens=9)


@pytest.fixture(scope="module")
def found():
    settings, done = throughput.Settings(gammas=(2, 3), batches=(1, 2), rows=3, repeats=2), []
    result = throughput.measure(JOB, settings, advance=done.append)
    assert len(done) == settings.steps == 7
    return result


def test_one_result_for_plain_and_each_gamma_at_each_batch_size(found):
    assert [(row["batch"], row["gamma"]) for row in found["results"]] == [(b, g) for b in (1, 2) for g in (0, 2, 3)]
    for row in found["results"]:
        assert row["prompts"] == (3 if row["batch"] == 1 else 2)  # whole batches only
        assert row["tokens"] == 9 * row["prompts"]
        for name in ("tokens_per_second", "first_token_ms"):
            assert 0 < row[name]["min"] <= row[name]["median"] <= row[name]["max"]
        half, most = row["token_ms"]["p50"], row["token_ms"]["p95"]
        assert all(0 < half[name] <= most[name] for name in ("median", "min", "max"))
        assert half["min"] <= half["median"] <= half["max"]


def test_alpha_is_over_the_prompts_that_there_are():
    """Eight rows are asked for, and three are there: copies would add nothing, and make the error look smaller."""
    found = throughput.measure(JOB, throughput.Settings(gammas=(2,), rows=8, repeats=1))
    assert found["alpha"] == acceptance.measure(JOB).to_dict()
    assert found["alpha"]["positions"] == 27
    assert found["results"][0]["prompts"] == 8


def test_one_prompt_has_no_error_and_json_has_no_nan():
    found = throughput.measure(JOB, throughput.Settings(gammas=(2,), rows=1, repeats=1))
    assert found["alpha"]["positions"] == 9 and found["alpha"]["stderr"] is None
    json.dumps(found, allow_nan=False)
    found["process"] = {"before": None, "peak": 1, "device_peak": None}
    line = bench_tables.notes(found)[0].plain
    assert line.startswith(f"α = {found['alpha']['alpha']:.3f} over 9 positions")


def test_latency_is_of_all_prompts_and_repeats_interleaved(monkeypatch):
    """A generation has two tokens; the first of a variant compiles, and does not count."""
    asked = []

    def token_ms(job):
        asked.append(job)
        return [float(len(asked)), 100.0 * (job[0] == "b")]

    monkeypatch.setattr(timing, "token_ms", token_ms)
    a, b = timing.latency([["a1", "a2"], ["b1", "b2"]], repeats=3)
    assert asked == ["a1", "b1", *["a1", "b1", "a2", "b2"] * 3]
    assert a["p50"] == {"median": 3.5, "min": 1.5, "max": 5.5}
    assert b["p95"]["median"] == 100.0
    monkeypatch.setattr(timing, "token_ms", lambda job: [])
    assert timing.latency([["a1"]], repeats=2) == [None]


def test_texts_agree_and_rounds_are_counted(found):
    prompt = Prompt(PROMPT.tokens[:2], PROMPT.length[:2])
    for row in found["results"]:
        if row["gamma"]:
            assert row["same_text"] == row["prompts"]
        if row["gamma"] and row["batch"] == 2:
            out = jaxspec.generate(TARGET, prompt, drafter=DRAFT, gamma=row["gamma"], max_new_tokens=9)
            expected = (out.stats.emitted - 1).sum() / out.stats.rounds.sum()
            assert row["tokens_per_round"] == pytest.approx(expected)
            assert row["passes_saved"] == pytest.approx(8 / out.stats.rounds.max())


def test_predictions_follow_theorem_3_8(found):
    alpha = found["alpha"]["alpha"]
    assert found["alpha"]["positions"] == 27
    for row in found["results"]:
        if row["gamma"]:
            cost = row["gamma"] * row["c"] + row["v"]
            expected = sum(alpha**n for n in range(row["gamma"] + 1))
            assert row["predicted_from_alpha"] == pytest.approx(expected / cost)
            assert row["predicted"] == pytest.approx(row["passes_saved"] / cost)


def test_memory_is_accounted(found):
    row = found["results"][-1]  # batch 2, gamma 3
    assert row["memory"]["weights"] == TARGET.params.nbytes + DRAFT.params.nbytes
    assert row["memory"]["logits"] == 2 * 2 * 4 * 6 * 4  # models, rows, positions, ids, bytes
    capacity = 16 + 16 + 3 + 1
    one = 2 * capacity * 4 + 2 * 4 + 2 * 4  # tokens, length and topic
    assert row["memory"]["caches"] == 2 * one + 2 * 4  # and what the drafter's cache is known to hold
    assert row["memory"]["program"] is None or row["memory"]["program"] > row["memory"]["weights"]
    plain = found["results"][0]["memory"]
    assert plain["weights"] == TARGET.params.nbytes and plain["logits"] == 6 * 4


def test_texts_that_disagree_are_noticed():
    one = _outcome([[1, 2, 3], [4, 5, 0]], [3, 2])
    other = _outcome([[1, 2, 3], [4, 6, 0]], [3, 2])
    seconds = np.array([2.0, 4.0])
    compared = throughput.against_plain([one], [other], seconds, seconds / 2)
    assert compared["same_text"] == 1
    assert compared["ratio"] == {"median": 2.0, "min": 2.0, "max": 2.0}


def _outcome(tokens, length):
    length = np.array(length)
    return Outcome(np.array(tokens), length, length > 9, Stats(length - 1, length, length, length), None)


@pytest.mark.slow
def test_batches_of_64_rows_of_fewer_prompts():
    """Largest of the batch sizes that are measured: rows begin again with the first prompt, and each is counted."""
    settings = throughput.Settings(gammas=(2,), batches=(64,), rows=8, repeats=1)
    plain, fast = throughput.measure(JOB.replace(max_new_tokens=6), settings)["results"]
    assert [row["batch"] for row in (plain, fast)] == [64, 64]
    assert plain["prompts"] == fast["prompts"] == fast["same_text"] == 64
    assert plain["tokens"] == fast["tokens"] == 64 * 6
    assert fast["memory"]["caches"] > plain["memory"]["caches"] > 0
    out = jaxspec.generate(TARGET, PROMPT, drafter=DRAFT, gamma=2, max_new_tokens=6)
    assert fast["passes_saved"] == pytest.approx(5 / out.stats.rounds.max())  # the slowest row's, as in a batch of 3
