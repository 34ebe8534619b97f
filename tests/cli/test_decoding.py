"""Decoding at once and round by round: whole rounds, the same samples, and texts that end at a stop
string.
"""

import io

import jax
import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

import jaxspec
from jaxspec.analysis import cost
from jaxspec.cli import generate, pair, prefill
from jaxspec.cli.pair import Pair
from jaxspec.core import chunks
from jaxspec.decode.batches import in_batches
from jaxspec.decode.request import prepare
from jaxspec.weights import loading


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), ("--batch", "2")])
def test_rounds_are_reported_whole(mode, report):
    reported = report("--trace", "-t", "1", *mode)
    for rounds, tokens, count in zip(
        reported["rounds"], reported["tokens"], reported["stats"]["rounds"], strict=True
    ):
        assert [t for step in rounds for t in step["tokens"]] == tokens
        assert len(rounds) == count + 1
        for step in rounds[1:]:
            accepted = min(step["accepted"], len(step["tokens"]))
            assert step["tokens"][:accepted] == step["draft"][:accepted]


@pytest.mark.slow
def test_a_samples_text_depends_on_the_seed_alone(report):
    single, batch, other = (
        report("-t", "1"),
        report("-t", "1", "--batch", "2"),
        report("-t", "1", "--seed", "1"),
    )
    assert single["tokens"] == batch["tokens"]
    assert single["tokens"] != other["tokens"]


def test_text_ends_before_a_stop_string(report, run):
    texts = report()["texts"]
    row, full = next((i, text) for i, text in enumerate(texts) if " " in text)
    stop = full.split(" ")[1]
    cut = full[: full.index(stop)]
    assert report("--stop", stop)["texts"][row] == cut
    assert full not in run("--stop", stop)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_stop_string_and_a_shorter_last_batch_compile_nothing_that_is_timed(
    zoo, loading, caplog, batch
):
    settings = generate.GenerateSettings(
        Pair(draft="debian-t5-draft", stop=["Katze"], max_new_tokens=12), batch=batch
    )
    _, prepared = generate._load(settings, pair.checked(settings.pair, {})[1], [], 3)
    generate._warm_up(prepared, settings, streamed=False)
    parts = [part.prepared for part in in_batches(prepared, batch)]
    with jax.log_compiles(), caplog.at_level("WARNING"):
        generations = [generate.complete(part, settings.pair.stop) for part in parts]
    assert sum(len(generation.texts) for generation in generations) >= 3
    assert any(generation.stats.rounds.any() for generation in generations)
    assert [
        record.message for record in caplog.records if record.message.startswith("Compiling")
    ] == []


@pytest.mark.parametrize("mode", [(), ("--batch", "2")])
def test_reading_and_decoding_are_reported_apart(mode, report, run):
    plain, reported = report(), report("--stats", *mode)
    assert reported["tokens"] == plain["tokens"] and "read_tokens" not in plain["stats"]
    total = reported["stats"]["total"]
    assert total["read_tokens"] == sum(reported["stats"]["read_tokens"]) > 0
    assert 0 < total["prefill_seconds"] == pytest.approx(sum(reported["stats"]["prefill_seconds"]))
    assert total["prefill_seconds"] + total["decode_seconds"] == pytest.approx(total["seconds"])
    assert total["decode_tokens_per_second"] == pytest.approx(
        (total["emitted"] - 2) / total["decode_seconds"]
    )
    shown = " ".join(run("--stats", *mode).split())
    assert f"Prefill: {total['read_tokens']} tokens in " in shown
    assert f"Decode: {total['emitted'] - 2} tokens in " in shown
    assert "Prefill:" not in run(*mode)


@pytest.mark.parametrize(
    ("target", "draft", "seen"),
    [
        ("debian-gpt-base", "debian-gpt-small", 4),
        ("debian-t5-large", "none", 0),
        ("debian-gpt-base", "none", 4),
    ],
)
def test_the_reading_of_a_long_prompt_is_watched(zoo, target, draft, seen, monkeypatch):
    """On a terminal the bar moves from chunk to chunk; the text is that of a program that reads
    them all.
    """
    monkeypatch.setattr(chunks, "LONGEST", 4)
    monkeypatch.setattr(prefill, "LONG", 8)
    moved = []
    monkeypatch.setattr(Progress, "update", lambda self, task, completed: moved.append(completed))
    settings = generate.GenerateSettings(Pair(target, draft, max_new_tokens=6))
    ids = [5, 6, 7, 8, 9, 10] * 2
    drafter = None if draft == "none" else zoo[draft]
    prepared = prepare(zoo[target], [ids], drafter=drafter, max_new_tokens=6)
    err = Console(file=io.StringIO(), force_terminal=True)
    begin = prefill.WatchedPrefill(prepared, err)
    assert (
        begin.is_watched
        and not prefill.WatchedPrefill(prepared, Console(file=io.StringIO())).is_watched
    )
    generate._warm_up(prepared, settings, False, begin.quietly)
    assert moved == []
    ((record,),) = generate._decoded(prepared, settings, True, False, err)
    out = jaxspec.generate(zoo[target], [ids], drafter=drafter, max_new_tokens=6)
    assert record["tokens"] == out.tokens[0, : out.lengths[0]].tolist()
    assert len(moved) == seen and moved[-1:] == [int(prepared.prompt.length[0])] * bool(seen)
    assert ("tokens of the prompt" in err.file.getvalue()) == (not seen)


@pytest.mark.parametrize("mode", [(), ("--batch", "2")])
def test_text_ends_before_a_stop_string_that_is_a_special_token(report, mode):
    """No text shows it: <pad> is id 0 of these tokenizers."""
    wholes = report("-t", "1", "--seed", "3")["tokens"]
    cut = report("-t", "1", "--seed", "3", "--stop", "<pad>", *mode)["tokens"]
    assert any(0 in tokens[:-1] for tokens in wholes)
    assert cut == [tokens[: tokens.index(0) + 1] if 0 in tokens else tokens for tokens in wholes]


def test_adaptive_goes_by_what_passes_cost_here(report, monkeypatch):
    reports = {}
    for price in (1.0, 50.0):
        costs = cost.PolicyCosts(0.01, np.array([1.0, price, price, price]))
        monkeypatch.setattr(cost, "policy_costs", lambda prepared, repeats, costs=costs: costs)
        reports[price] = report("--policy", "adaptive")
    assert reports[1.0]["texts"] == reports[50.0]["texts"]
    assert sum(reports[1.0]["stats"]["drafted"]) > 4 * sum(reports[50.0]["stats"]["drafted"])


@pytest.mark.slow
def test_costs_are_measured_for_adaptive(report, monkeypatch):
    measurements = []
    measure = cost.policy_costs

    def measured(prepared, repeats):
        measurements.append(
            (prepared.decoder.gamma, float(prepared.request.sampling_params.temperature[0]))
        )
        return measure(prepared, repeats=1, inner=1)

    monkeypatch.setattr(cost, "policy_costs", measured)
    assert report("--policy", "adaptive", "-t", "1")["texts"]
    assert measurements == [(3, 1.0)]


@pytest.mark.parametrize(
    ("options", "target", "draft"),
    [
        ((), "float32", "float32"),
        (("--dtype", "int8"), "int8", "int8"),
        (("--dtype", "int8", "--draft-dtype", "bfloat16"), "int8", "bfloat16"),
        (("--draft-dtype", "int8"), "float32", "int8"),
    ],
)
def test_the_drafter_is_of_the_targets_dtype_or_of_its_own(
    options, target, draft, run, zoo, monkeypatch
):
    loaded, passes, costs = [], [], cost.PolicyCosts(0.05, np.ones(4))
    monkeypatch.setattr(
        loading, "load", lambda name, dtype, **_: loaded.append((name, dtype)) or zoo[name]
    )
    monkeypatch.setattr(
        cost, "policy_costs", lambda prepared, repeats: passes.append(prepared) or costs
    )
    shown = run("--policy", "adaptive", *options)
    assert loaded == [("debian-t5-large", target), ("debian-t5-draft", draft)]
    assert [prepared.drafter.models for prepared in passes] == [(zoo["debian-t5-draft"],)]
    assert (f"in {draft} ·" in shown) == (draft != target)
