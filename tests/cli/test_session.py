"""Decoding at once and round by round: whole rounds, the same samples, and texts that end at a stop string."""

import jax
import numpy as np
import pytest

from jaxspec.analysis import cost
from jaxspec.cli import decoding, session
from jaxspec.weights import loading


@pytest.mark.parametrize("mode", [(), ("--batch", "2")])
def test_rounds_are_reported_whole(mode, report):
    found = report("--trace", "-t", "1", *mode)
    for rounds, tokens, count in zip(found["rounds"], found["tokens"], found["stats"]["rounds"], strict=True):
        assert [t for step in rounds for t in step["tokens"]] == tokens
        assert len(rounds) == count + 1
        for step in rounds[1:]:
            accepted = min(step["accepted"], len(step["tokens"]))
            assert step["tokens"][:accepted] == step["draft"][:accepted]


def test_a_samples_text_depends_on_the_seed_alone(report):
    one, batch, other = report("-t", "1"), report("-t", "1", "--batch", "2"), report("-t", "1", "--seed", "1")
    assert one["tokens"] == batch["tokens"]
    assert one["tokens"] != other["tokens"]


def test_text_ends_before_a_stop_string(report, run):
    wholes = report()["texts"]
    row, whole = next((i, text) for i, text in enumerate(wholes) if " " in text)
    stop = whole.split(" ")[1]
    cut = whole[: whole.index(stop)]
    assert report("--stop", stop)["texts"][row] == cut
    assert whole not in run("--stop", stop)


def test_a_stop_string_compiles_nothing_that_is_timed(zoo, loading, caplog):
    settings = session.Settings(draft="debian-t5-draft", stop=["Katze"], max_new_tokens=12)
    opened = session.open_session(settings, {}, [], 2, chat=False)
    session.warm_up(opened, by_rounds=False)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        decoded = list(decoding.decode_all(opened))
    assert {row.counts.rounds for row in decoded} != {0}
    assert [record.message for record in caplog.records if record.message.startswith("Compiling")] == []


@pytest.mark.parametrize("mode", [(), ("--batch", "2")])
def test_text_ends_before_a_stop_string_that_is_a_special_token(report, mode):
    """Which no text shows: <pad> is id 0 of these tokenizers."""
    wholes = report("-t", "1", "--seed", "3")["tokens"]
    cut = report("-t", "1", "--seed", "3", "--stop", "<pad>", *mode)["tokens"]
    assert any(0 in tokens[:-1] for tokens in wholes)
    assert cut == [tokens[: tokens.index(0) + 1] if 0 in tokens else tokens for tokens in wholes]


def test_adaptive_goes_by_what_passes_cost_here(report, monkeypatch):
    found = {}
    for price in (1.0, 50.0):
        priced = [cost.Cost(n, 1, np.ones(1), np.full(1, price), np.full(1, 0.01)) for n in (1, 3)]
        monkeypatch.setattr(cost, "measure_all", lambda prepared, gammas, priced=priced, **options: priced)
        found[price] = report("--policy", "adaptive")
    assert found[1.0]["texts"] == found[50.0]["texts"]
    assert sum(found[1.0]["stats"]["drafted"]) > 4 * sum(found[50.0]["stats"]["drafted"])


@pytest.mark.slow
def test_costs_are_measured_for_adaptive(report, monkeypatch):
    asked = []
    measure_all = cost.measure_all

    def measured(prepared, gammas, **options):
        asked.append((tuple(gammas), float(prepared.request.sampling_params.temperature[0])))
        return measure_all(prepared, gammas, **options)

    monkeypatch.setattr(cost, "measure_all", measured)
    assert report("--policy", "adaptive", "-t", "1")["texts"]
    assert asked == [((1, 3), 1.0)]


@pytest.mark.parametrize(
    ("options", "target", "draft"),
    [
        ((), "float32", "float32"),
        (("--dtype", "int8"), "int8", "int8"),
        (("--dtype", "int8", "--draft-dtype", "bfloat16"), "int8", "bfloat16"),
        (("--draft-dtype", "int8"), "float32", "int8"),
    ],
)
def test_the_drafter_is_of_the_targets_dtype_or_of_its_own(options, target, draft, run, zoo, monkeypatch):
    asked, passes, costs = [], [], cost.PolicyCosts(0.05, np.ones(4))
    monkeypatch.setattr(loading, "load", lambda name, dtype, mesh: asked.append((name, dtype)) or zoo[name])
    monkeypatch.setattr(cost, "policy_costs", lambda prepared, repeats: passes.append(prepared) or costs)
    shown = run("--policy", "adaptive", *options)
    assert asked == [("debian-t5-large", target), ("debian-t5-draft", draft)]
    assert [prepared.drafter.models for prepared in passes] == [(zoo["debian-t5-draft"],)]
    assert (f"in {draft} ·" in shown) == (draft != target)
