"""The script for the accelerator, on tiny models: what it says was measured, and nothing that was found is lost."""

import contextlib
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import typer
from typer.testing import CliRunner

from jaxspec.analysis.h200 import __main__ as command
from jaxspec.analysis.h200 import decoding, report, stages, training
from jaxspec.analysis.h200.results import Results
from jaxspec.analysis.measure import cost, environment, jobs, loading, profile
from jaxspec.analysis.theory import formulas
from jaxspec.analysis.theory.roofline import load_of
from jaxspec.base import Prompt
from jaxspec.cli.main import app as cli
from jaxspec.decode.request import prepare
from jaxspec.families import t5 as family
from jaxspec.nets.t5 import T5Config
from jaxspec.testing import table_model, word_tokenizer
from jaxspec.weights import huggingface

TINY = T5Config(64, dim=16, ff_dim=16, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1)
LABELS = [(s.temperature, s.gamma, s.alpha, s.speedup) for s in decoding.TABLE_2]
SETTINGS = decoding.Settings("tiny-t5", "tiny-t5", "float32", new_tokens=16, seeds=4, repeats=1, copy_mb=1)


def here(function, *arguments):
    """In this process, where sizes are patched."""
    return function(*arguments)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setitem(family.SIZES, "tiny-t5", TINY)
    pair = training.Settings("none.toml", "none.toml")
    return stages.Plan(SETTINGS, pair, tmp_path / "data", tmp_path / "work", tmp_path / "h200.json")


def test_settings_are_the_papers():
    assert LABELS == [(0, 7, 0.75, 3.4), (1, 7, 0.62, 2.6), (0, 5, 0.65, 3.1), (1, 5, 0.53, 2.3)]
    printed = [round(float(formulas.improvement(s.alpha, s.gamma, 0.02)), 1) for s in decoding.TABLE_2]
    assert printed == [s.expected for s in decoding.TABLE_2]
    assert {s.stage for s in decoding.TABLE_2} < set(stages.NAMES)


@pytest.mark.slow
def test_decoding_stages(plan, capsys):
    stages.run(stages.chosen("copy,plain,passes-sampled,translation-sampled"), plan, here)
    results = Results(plan.out)
    copied, plain, costs = (results.get(name) for name in ("copy", "plain", "passes-sampled"))
    load = load_of(TINY, row=8, prompt=decoding.SOURCE)
    assert plain["bytes_per_token"] == load.weight_bytes + load.cache_bytes
    assert plain["environment"]["jax"] == jax.__version__ and plain["target"]["bytes"] > 0
    (row,) = report.rows(results)
    assert (row["alpha"], row["gamma"], row["speedup"], row["expected"]) == (0.62, 7, 2.6, 2.3)
    found = results.get("translation-sampled")
    assert 1 < found["passes_saved"] <= 7 + 1 and 0.4 < found["alpha_drawn"] < 0.85
    c, v = costs["c"], costs["v"]["7"]
    assert costs["spreads"]["c"]["median"] == c and costs["spreads"]["v"]["7"]["median"] == v
    assert set(costs["spreads"]) == {"c", "v", "target_ms", "draft_ms", "verify_ms"} < set(costs)
    assert row["theorem"] == pytest.approx(float(formulas.improvement(0.62, 7, c, v)))
    assert row["theorem_v1"] == pytest.approx(float(formulas.improvement(0.62, 7, c)))
    assert row["of_these_rounds"] == pytest.approx(found["passes_saved"] / (7 * c + v))
    assert report.table([row]).row_count == 1
    said = "\n".join(report.notes(results))
    floor = 1e3 * plain["bytes_per_token"] / copied["bytes_per_second"]["median"]
    assert f"the floor is {floor:.3f} ms" in said and "of the floor's speed is reached" in said

    before = plan.out.read_text()
    stages.run(stages.chosen("models"), plan._replace(until=0.0), here)
    assert plan.out.read_text() == before
    err = capsys.readouterr().err
    assert "copy: done before" in err and "translation-greedy: left for another time" in err


def test_prefill_is_measured_with_the_program_of_the_whole():
    model = table_model(jax.random.key(0), vocab=5)
    job = prepare(model, Prompt(jnp.array([[1]]), jnp.array([1])), max_new_tokens=8)
    first = decoding.only_first(job)
    assert jax.tree.structure(job.request) == jax.tree.structure(first.request) and job.decoder is first.decoder
    assert jobs.run(first).length.tolist() == [1]
    assert jobs.run(first).tokens[0, 0] == jobs.run(job).tokens[0, 0]


def test_a_failed_stage_is_told_and_done_again(plan, monkeypatch):
    fails = [True]

    def copy(self):
        if fails:
            raise FloatingPointError("inf")
        return {"bytes": 1, "bytes_per_second": {"median": 1.0}}

    monkeypatch.setattr(decoding.Bench, "copy", copy)
    monkeypatch.setattr(decoding.Bench, "speedup", lambda self, row: {"fine": True})
    stages.run(stages.chosen("copy,translation-greedy"), plan, here)
    assert (
        Results(plan.out).error("copy") == "FloatingPointError: inf"
        and Results(plan.out).get("translation-greedy")["fine"]
    )
    assert report.notes(Results(plan.out))[-1:] == ["copy FAILED: FloatingPointError: inf"]
    fails.clear()
    stages.run(stages.chosen("copy"), plan, here)
    assert Results(plan.out).get("copy")["bytes"] == 1
    assert Results(plan.out).get("translation-greedy")["fine"]


def test_after_a_crash_another_process_does_the_rest(plan, monkeypatch):
    begun = []

    def crashing(function, *arguments):
        if function is environment.current:
            return function()
        names, plan, _ = arguments
        begun.append(names)
        if len(begun) > 1:
            return function(*arguments)
        Results(plan.out).put(names[0], {}, {"error": stages.UNFINISHED})
        raise RuntimeError("the process crashed")

    monkeypatch.setattr(decoding.Bench, "speedup", lambda self, row: {"fine": True})
    stages.run(stages.chosen("copy,translation-greedy"), plan, crashing)
    assert begun == [["copy", "translation-greedy"], ["translation-greedy"]]
    assert Results(plan.out).error("copy") == stages.UNFINISHED and Results(plan.out).get("translation-greedy")["fine"]


def test_apart_is_another_process():
    assert stages.apart(os.getpid) != os.getpid()
    with pytest.raises(RuntimeError, match="the process crashed"):
        stages.apart(os._exit, 3)
    with pytest.raises(ZeroDivisionError):
        stages.apart(divmod, 1, 0)


@pytest.mark.parametrize("changed", [{"device": "H200"}, {"jax": "9.9"}, {"xla_flags": "--xla_dump_to=here"}])
def test_another_machine_measures_again(plan, monkeypatch, changed):
    """What was found elsewhere is replaced; the same command here does nothing."""
    made = []
    monkeypatch.setattr(decoding.Bench, "copy", lambda self: made.append(1) or {"bytes": len(made)})
    about = environment.current()
    for now, bytes_found in ((about | {"date": "today"}, 1), (about, 1), (about | changed, 2), (about | changed, 2)):
        monkeypatch.setattr(environment, "current", lambda now=now: now)
        stages.run(stages.chosen("copy"), plan, here)
        found = Results(plan.out).get("copy")
        assert found["bytes"] == bytes_found == len(made)
    assert found["environment"] == about | changed


def test_every_stage_has_the_machine_where_it_was_found(plan, monkeypatch):
    monkeypatch.setattr(training, "train", lambda *_: {"steps": 4})
    monkeypatch.setattr(training, "measure", lambda *_: {"environment": {"jax": "its own"}, "cells": []})
    monkeypatch.setattr(loading, "write", lambda *_: {"files": {}})
    stages.run(stages.chosen("training,write"), plan, here)
    for name in ("train-target", "train-draft", "write"):
        assert Results(plan.out).get(name)["environment"]["jax"] == jax.__version__
    assert Results(plan.out).get("measure")["environment"] == {"jax": "its own"}


def test_other_settings_are_measured_again(tmp_path):
    results = Results(tmp_path / "a.json")
    results.put("copy", {"copy_mb": 1}, {"bytes": 1})
    assert results.done("copy", {"copy_mb": 1}) and not results.done("copy", {"copy_mb": 2})
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(ValueError, match="give another file"):
        Results(tmp_path / "b.json")
    with pytest.raises(ValueError, match="no stage 'copie'"):
        stages.chosen("copie")


# Of a GPU's profile: two streams, three passes of two kernels, a copy and a line that is no stream.
GPU = """
planes { name: "/host:CPU" }
planes {
  name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)" timestamp_ns: 100
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 }
    events { metadata_id: 2 offset_ps: 5000000 duration_ps: 2000000 } }
  lines { name: "Stream #14(MemcpyD2D)" timestamp_ns: 100
    events { metadata_id: 3 offset_ps: 6000000 duration_ps: 4000000 } }
  lines { name: "XLA Modules" events { metadata_id: 1 offset_ps: 0 duration_ps: 99000000 } }
  event_metadata { key: 1 value { id: 1 name: "gemm_fusion_dot_12" } }
  event_metadata { key: 2 value { id: 2 name: "gemm_fusion_dot_3" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyD2D" } }
}
"""


def test_kernels_of_a_gpu():
    data = jax.profiler.ProfileData
    ran = profile.kernels(data.from_serialized_xspace(data.text_proto_to_serialized_xspace(GPU)))
    assert [kernel.name for kernel in ran] == ["gemm_fusion_dot_12", "gemm_fusion_dot_3", "MemcpyD2D"]
    found = profile.summary(ran, count=1)
    assert (found["kernels_per_pass"], found["pass_us"], found["busy_us"]) == (3, 10.0, 9.0)
    assert found["largest"][0] == {
        "name": "gemm_fusion_dot",
        "per_pass": 2.0,
        "us_per_pass": 6.0,
        "us_each": 3.0,
        "share": 0.6,
    }


@pytest.mark.parametrize(
    ("busy", "floor_us", "said"),
    [(0.4, 40.0, "waiting for launches"), (0.9, 40.0, "small kernels"), (0.9, 80.0, "That is what its weights take")],
)
def test_advice_tells_gaps_from_kernels_from_weights(busy, floor_us, said):
    found = {"kernels_per_pass": 50.0, "pass_us": 100.0, "busy_us": 100 * busy, "busy": busy, "largest": []}
    assert said in profile.advice(found, floor_us, target_us=1000.0, c=0.1)


@pytest.fixture
def tiny_model(plan):
    return decoding.Bench(SETTINGS).draft


@pytest.mark.slow
def test_a_profile_is_taken_read_and_explained(plan, tiny_model):
    results = Results(plan.out)
    results.put("passes-greedy", {}, {"c": 0.01})
    assert stages.profiles(decoding.Bench(SETTINGS), plan) is None
    results.put("passes-greedy", {}, {"c": 0.3, "target_ms": 1.0})
    results.put("copy", {}, {"bytes_per_second": {"median": 1e9}})
    results.put("plain", {}, {"draft_bytes_per_token": 1e4})
    found = stages.profiles(decoding.Bench(SETTINGS), plan)
    for side in ("draft", "target"):
        assert found[side]["kernels_per_pass"] > 0 and 0 < found[side]["busy"] <= 1
        assert 5 < found[side]["instructions"] < 500
        assert sum(one["share"] for one in found[side]["largest"]) <= 1 + 1e-9
    assert "kernels in" in found["advice"]


def test_a_refused_profile_is_no_failure(plan, tiny_model, monkeypatch):
    def refuse(folder):
        raise RuntimeError("CUPTI is not to be had")

    monkeypatch.setattr(jax.profiler, "trace", refuse)
    prompt = decoding.Bench(SETTINGS).prompt
    found = profile.passes(prepare(tiny_model, prompt, max_new_tokens=16))
    assert found["refused"] == "RuntimeError: CUPTI is not to be had" and found["instructions"] > 5
    assert "No profile could be had" in profile.advice(found, 1.0, 10.0, 0.1)


def test_loading_gives_back_what_was_written(plan, monkeypatch):
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 5_000)
    stages.run(stages.chosen("load"), plan, here)
    assert "run the stage write before" in Results(plan.out).error("load")
    stages.run(stages.chosen("loading"), plan, here)
    written, found = (Results(plan.out).get(name) for name in ("write", "load"))
    assert found["bits"] == written["bits"] and found["files"] == len(written["files"]) > 1
    assert found["largest_file_bytes"] == max(written["files"].values())
    (said,) = report.notes(Results(plan.out))
    assert "the same parameters" in said
    assert ("within one file" in said) is (found["extra_bytes"] <= found["largest_file_bytes"])


def test_a_disk_too_small_is_refused_before_writing(plan, monkeypatch):
    monkeypatch.setattr(loading, "SPARE", 10**18)
    with pytest.raises(OSError, match="give another --work"):
        loading.write("tiny-t5", "float32", plan.work / "folder")
    assert not (plan.work / "folder").exists()


WORDS = ["<pad>", "</s>", "<unk>", "the", "old", "dog", "saw", "a", "new", "cat", "again", "today"]
RECIPE = """
name = "{name}"
family = "gpt"
[model]
vocab_size = 12
dim = 8
ff_dim = 8
layers = 1
heads = 1
max_positions = 512
dtype = "bfloat16"
[data]
train = "train.jsonl"
heldout = "heldout.jsonl"
tokenizer = "words"
shapes = [[0, 16]]
{distil}
[train]
steps = 4
batch_tokens = 32
learning_rate = 1e-2
"""


def in_this_process(arguments, work):
    """The command, at one temperature."""
    arguments = [*arguments, *(("--temperature", "0") if arguments[0] == "measure" else ())]
    with contextlib.chdir(work):
        ended = CliRunner().invoke(cli, arguments)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


@pytest.fixture
def pair(plan):
    """A plan with recipes and data of a pair."""
    folder = plan.data
    word_tokenizer(WORDS, pad_token="<pad>").save_pretrained(folder / "words")
    text = json.dumps({"text": "the old dog saw a new cat again today"}) + "\n"
    for name in ("train", "heldout"):
        (folder / f"{name}.jsonl").write_text(text * 4)
    distil = '[distil]\nteacher = "trained/big"\nweight = 0.9'
    for name, more in (("big", ""), ("little", distil)):
        (folder / f"{name}.toml").write_text(RECIPE.format(name=name, distil=more))
    settings = training.Settings(str(folder / "big.toml"), str(folder / "little.toml"), 1.0, "float32", 4, 2, 1)
    return plan._replace(pair=settings)


@pytest.mark.slow
def test_a_pair_is_trained_and_measured(pair, monkeypatch, standard_dtype_promotion):
    monkeypatch.setattr(training, "GAMMAS", "3")
    monkeypatch.setattr(training, "_jaxspec", in_this_process)
    stages.run(stages.chosen("training"), pair, here)
    results = Results(pair.out)
    big, little, measured = (results.get(name) for name in ("train-target", "train-draft", "measure"))
    assert big["recipe"] == "big" and big["steps"] == little["steps"] == 4
    assert 0 < little["heldout_loss"] < 3 and little["seconds_per_step"] > 0
    assert [cell["temperature"] for cell in measured["cells"]] == [0]
    assert any("held-out loss" in line for line in report.notes(results))


def test_steps_are_cut_to_the_minutes(pair, monkeypatch):
    asked = []
    monkeypatch.setattr(training, "_jaxspec", lambda arguments, work: asked.append(arguments) or "")
    monkeypatch.setattr(
        training.orbax, "read_manifest", lambda folder: pytest.fail("not trained") if not asked else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        training.train(pair.pair, "target", pair.data, pair.work, lambda *_: 12.0)
    assert asked[0][asked[0].index("--steps") + 1] == "2"  # 0.4 of a minute, at 12 s a step
    with pytest.raises(FileNotFoundError, match="--prepare-data"):
        training.train(pair.pair, "target", pair.work, pair.work, lambda *_: 12.0)


def test_the_command_prints_what_was_found(plan, monkeypatch):
    """Nothing is measured here: the stages are done."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/nowhere")
    results = Results(plan.out)
    settings = stages.settings_of(stages.NAMES["copy"], plan, environment.current())
    results.put("copy", settings, {"bytes": 1, "bytes_per_second": {"median": 1.0}})
    app = typer.Typer()
    app.command(help=command.HELP)(command.main)
    sizes = "--shape tiny-t5 --draft-shape tiny-t5 --dtype float32 --new-tokens 16 --seeds 4 --repeats 1 --copy-mb 1"
    given = ["--stages", "copy", "--out", str(plan.out), "--work", str(plan.work), *sizes.split()]
    ended = CliRunner().invoke(app, given)
    assert ended.exit_code == 0, ended.output
    results.put("plain", settings, {"error": "OSError: full"})
    assert "copy: done before" in ended.output
    ended = CliRunner().invoke(app, [*given, "--minutes", "0", "--stages", "copy,plain"])
    assert ended.exit_code == 1 and "plain FAILED: OSError: full" in ended.output
    said = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "160"}).output
    assert all(name in said for name in stages.NAMES)


@pytest.mark.slow
def test_the_command_as_a_process(tmp_path):
    options = ("--stages", "copy", "--copy-mb", "1", "--repeats", "1", "--out", "h200.json", "--work", "work")
    process = [sys.executable, "-m", "jaxspec.analysis.h200", *options]
    ended = subprocess.run(process, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "h200.json").read_text())["stages"]["copy"]["bytes"] == 10**6


def test_drafters_and_targets_passes_are_those_of_cost():
    """`timed_loops` is what both the costs and the profile time."""
    model = table_model(jax.random.key(0), vocab=5)
    loop = cost.timed_loops(model, Prompt(jnp.array([[3, 1]]), jnp.array([2])), 6, 2, sampled=False)(1)
    assert loop.passes == 2 and loop.call() is None
