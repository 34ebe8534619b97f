"""Estimates from compiled programs, by hand and by a stand-in for the compiler; tests/test_tpu.py
has the TPU's own.
"""

import json
import math

import jax
import pytest

from benchmarks.estimates import __main__ as command
from benchmarks.estimates import absent, chips
from benchmarks.estimates import compile as compiling
from benchmarks.estimates import estimate as estimating
from benchmarks.estimates.program_text import Contents, Part
from jaxspec.analysis import aot, roofline
from jaxspec.analysis import plan as planning

PAIR = ("--target", "debian-t5-base", "--draft", "debian-t5-small", "--gamma", "3")


def contents(**parts: tuple[int, int]) -> Contents:
    return Contents({name.replace("_", " "): Part(*part) for name, part in parts.items()}, {}, {})


def estimate_by_hand() -> estimating.Estimate:
    """A machine of 10 cycles and 100 bytes a second: the drafter's step is bound by memory, all
    else by cycles.
    """
    machine = roofline.Machine(bandwidth=100.0, bfloat16=1.0, float32=None, memory=20.0, clock=10.0)
    plain = contents(prefill=(70, 10), target=(100, 10), rest=(10, 0))
    speculative = contents(
        prefill=(90, 10),
        draft=(20, 10),
        draft_step=(5, 100),
        target=(110, 10),
        accept=(2, 0),
        rest=(8, 0),
    )
    floors = {"target": 500.0, "draft": 50.0}
    compiled = dict.fromkeys(
        ("plain", "speculative"), aot.Compiled(aot.Program(1.0, 10, 0, 5, 1), None, {})
    )
    programs = absent.Programs("v5e:2x2", 1, "", machine, 2, 3, False, floors, compiled)
    return estimating.Estimate(programs, plain, speculative)


def test_a_round_adds_up():
    estimated = estimate_by_hand()
    assert estimated.draft_seconds == 2.0 + 2 * 1.0  # the first token, and two steps
    assert estimated.round_seconds == 4.0 + 11.0 + 1.0
    assert estimated.plain_seconds == 11.0
    assert math.isclose(estimated.c, 4.0 / 3 / 10) and math.isclose(estimated.v, 1.1)
    expected = estimated.expected(0.5)
    assert math.isclose(expected.tokens_per_round, 1.875)  # 1 + 1/2 + 1/4 + 1/8
    assert math.isclose(expected.tokens_per_second, 2 * 1.875 / 16)
    assert math.isclose(expected.speed_up, 1.875 / 16 * 11)


def test_rows_and_sentences_say_what_they_rest_on():
    estimated = estimate_by_hand()
    rows = {row.name: row for row in estimating.rows(estimated)}
    assert rows["draft step"].seconds == 1.0 and rows["draft step"].over_floor == 2.0
    assert rows["verify pass"].over_floor == 11.0 / 5.0 and rows["prefill"].over_floor is None
    said = " ".join(estimating.notes(estimated, alpha=0.5))
    assert "leave out the memory" in said and "1.29 times" in said
    with pytest.raises(ValueError, match="only for chains"):
        estimated._replace(programs=estimated.programs._replace(trees=True)).expected(0.5)


def test_of_a_gpu_it_is_said_what_jax_reserves():
    estimated = estimate_by_hand()
    estimated = estimated._replace(programs=estimated.programs._replace(topology="h100:1"))
    said = " ".join(estimating.notes(estimated))
    assert (
        "takes more than 75% of a GPU's memory" in said and "XLA_PYTHON_CLIENT_MEM_FRACTION" in said
    )
    widened = estimated._replace(plain=estimated.plain._replace(widened={"fusion.1": 3_000_000}))
    assert "The plain loop writes 3.0 MB of weights or caches in a wider dtype" in " ".join(
        estimating.notes(widened)
    )


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script with a compiler that makes of every program the same; returns its output."""
    parts = {
        "prefill": Part(9, 9),
        "draft": Part(3, 3, 2),
        "draft step": Part(2, 2, 2),
        "target": Part(10, 10, 2, 1),
    }
    program = aot.Compiled(aot.Program(1.0, 100, 20, 3, 1), None, {})

    def estimate(prepared, topology, *, mesh, advance):
        machine = roofline.machine("h100" if topology.startswith("h100") else "tpu-v5p")
        floors, names = (
            {"target": 5e6, "draft": 1e6},
            ["plain", "speculative"][: 1 + (prepared.drafter is not None)],
        )
        batch = len(prepared.prompt.length)
        compiled, moved = dict.fromkeys(names, program), {"all-reduce": (2, 64)}
        programs = absent.Programs(
            *(topology, 4, mesh or "", machine, batch, 3, False, floors, compiled),
            collectives=dict.fromkeys(names, moved),
        )
        read = Contents(parts, {}, {})
        return estimating.Estimate(programs, read, read if len(names) > 1 else None)

    monkeypatch.setattr(estimating, "estimate", estimate)
    monkeypatch.setattr(chips, "devices_of", lambda topology: (topology, []))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "160")

    def output(*options: str) -> str:
        command.main(options)
        return " ".join(capsys.readouterr().out.split())

    return output


def test_an_estimate_is_printed_as_one(run):
    said = run(*PAIR, "--mesh", "model=4", "--batch", "2", "--alpha", "0.5")
    for words in (
        "Estimates of the compiler, no measurement",
        "2 all-reduce (64 bytes)",
        "verify pass",
        "c = 0.2",
    ):
        assert words in said
    assert "With α = 0.5: 1.88 tokens a round" in said and "It fits" in said


def test_of_gpus_kernels_are_counted_and_timed(run):
    """Of each pass two kernels, of which a round has its draft's steps twice."""
    said = run(*PAIR, "--topology", "h100:4", "--alpha", "0.5")
    assert (
        "Estimates from kernels, no measurement" in said
        and "cycles" not in said
        and " kernels " in said
    )
    assert "kernels as measured on an H100" in said and "With α = 0.5: 1.88 tokens a round" in said
    assert (
        "A round of the speculative program runs 8 kernels, and the host waits for 1 condition"
        in said
    )


def test_json_has_programs_and_rows(run):
    report = json.loads(run(*PAIR, "--alpha", "0.5", "--json"))
    assert [row["name"] for row in report["rows"]][-2:] == ["verify pass", "rest of a round"]
    assert report["v"] == 1.0 and report["fits"] and report["expected"]["tokens_per_round"] == 1.875
    assert set(report["contents"]) == set(report["programs"]) == {"plain", "speculative"}


def test_plain_decoding_alone_can_be_estimated(run):
    assert "verify" not in run("--target", "debian-t5-base")


def test_what_counts_once_is_said(run):
    options = "--target", "llama-3.2-1b", "--max-new-tokens", "16", "--prompt"
    assert "counts once" not in run(*options, "64")
    assert "Prefill is a loop over 512 tokens" in run(*options, "600")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--alpha", "0.5"), "--alpha is of a drafter: add a --draft"),
        ((*PAIR, "--alpha", "1.5"), "--alpha is 1.5: expected a rate from 0 to 1"),
        (
            (*PAIR[:2], "--draft", "tree('debian-t5-small', (2, 1))", "--alpha", "0.5"),
            "--alpha is of a chain, and tree('debian-t5-small', (2, 1)) drafts trees: leave it out",
        ),
        ((*PAIR, "--plan"), "--plan needs an --alpha"),
        ((*PAIR[:2], "--draft", "nowhere.toml"), "no recipe 'nowhere.toml': expected a .toml file"),
        (
            ("--target", "gemma-3-270m", "--draft", "debian-gpt-eagle"),
            "debian-gpt-eagle cannot draft for gemma-3-270m: in [head], heads is 3 for layers of "
            "width 640",
        ),
        ((*PAIR, "--plan", "--alpha", "0.5", "--mesh", "model=4"), "--plan is of one chip"),
    ],
)
def test_what_cannot_be_estimated_is_refused(run, capsys, options, message):
    with pytest.raises(SystemExit):
        run(*options)
    assert message in capsys.readouterr().err


def test_a_missing_compiler_is_said_in_one_line(run, monkeypatch, capsys):
    def missing(topology):
        raise ImportError("the compiler of GPUs is not installed: pip install it")

    monkeypatch.setattr(chips, "devices_of", missing)
    with pytest.raises(SystemExit):
        run(*PAIR, "--topology", "h100")
    assert "error: the compiler of GPUs is not installed: pip install it" in capsys.readouterr().err


def test_a_tpus_compiler_tells_c_and_v(run, monkeypatch):
    """The compiler is a stand-in: a draft step of 10 cycles, a pass of 100 and 4 more for each
    draft token.
    """
    seen: list[tuple] = []

    def estimate(prepared, topology, *, plain, advance):
        gamma, batch = prepared.decoder.gamma, len(prepared.prompt.length)
        parts = {"draft": Part(10), "draft step": Part(10), "target": Part(100 + 4 * gamma)}
        seen.append((topology, gamma, batch, plain is None))
        kept = {"plain": plain or aot.Compiled(aot.Program(1.0, 1, 0, 0, 0), None, {})}
        programs = absent.Programs(
            topology, 1, "", roofline.machine("tpu-v5p"), batch, gamma, False, {}, kept
        )
        return estimating.Estimate(
            programs, Contents({"target": Part(100)}, {}, {}), Contents(parts, {}, {})
        )

    monkeypatch.setattr(estimating, "estimate", estimate)
    pair = (
        "--target",
        "t5-v1_1-base",
        "--draft",
        "t5-v1_1-small",
        "--topology",
        "v5p",
        "--alpha",
        "0.75",
        "--plan",
    )
    plan = json.loads(run(*pair, "--batch", "2", "--gamma", "8", "--json"))
    assert seen == [("v5p", 5, 2, True), ("v5p", 8, 2, False)]  # plain decoding is compiled once
    by_hand = planning.plan(0.75, 0.1, [1.0, *(1 + 0.04 * gamma for gamma in range(1, 9))])
    assert (plan["gamma"], plan["batch"]) == (by_hand.gamma, 2)
    assert plan["improvement"] == pytest.approx(by_hand.improvement)
    assert f"Speculate with γ = {by_hand.gamma}" in run(*pair, "--batch", "2", "--gamma", "8")


def test_a_published_head_is_a_drafter_of_shapes(monkeypatch):
    """Of docs/pairs.md, with a target by its published shape: nothing is downloaded, and nothing
    computed.
    """
    target, name = absent.shape_model("llama-3.1-8b"), "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    chain = command.head_of(name)(target)
    monkeypatch.setattr(chips, "devices_of", lambda topology: None)
    inputs = compiling.CompileInputs(draft=f"dynamic_tree('{name}', 60, 7, 10)")
    tree = compiling.start(inputs, command.head_of).drafter
    assert chain.functions.tree is None and tree.functions.tree.nodes == 60
    assert {type(leaf) for leaf in jax.tree.leaves(chain.params)} == {jax.ShapeDtypeStruct}
    assert command.head_of("llama-3.2-1b") is None


def test_the_recipe_of_a_head_is_a_drafter_of_shapes(tmp_path):
    target = absent.shape_model("debian-t5-large", "bfloat16")
    drafter = command.head_of("debian-t5-block")(target)
    assert drafter.functions.longest == 4
    assert {leaf.dtype.name for leaf in jax.tree.leaves(drafter.params)} <= {
        "bfloat16",
        "int32",
        "float32",
    }
    copy = tmp_path / "mine.toml"
    copy.write_text(
        command.recipes.shipped()["debian-t5-block"].read_text().replace("block = 4", "block = 3")
    )
    assert command.head_of(str(copy))(target).functions.longest == 3
    assert command.head_of("debian-t5-draft") is None
