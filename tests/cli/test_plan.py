"""`jaxspec plan`: three ways to ask, and what cannot be asked together."""

import json

import pytest
from typer.testing import CliRunner

from jaxspec.analysis import published
from jaxspec.cli.main import app
from jaxspec.cli.plan import READ, Inputs


@pytest.fixture
def run(loading):
    def run(*arguments):
        return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "120"})

    return run


@pytest.fixture
def report(run):
    def report(*arguments):
        result = run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return report


def test_a_plan_of_known_numbers_is_theorys(run, report):
    (plan,) = report("--alpha", "0.75", "--c", "0.02")["plans"]
    assert (plan["gamma"], round(plan["improvement"], 2), plan["obstacles"]) == (9, 3.2, [])
    result = run("--alpha", "0.75", "--c", "0.02", "--v", "0.05")
    assert "Speculate with γ = 6" in result.stdout and "1 + 0.05 γ" in result.stdout


def test_the_bound_of_an_oracle_and_the_cap_are_told(run):
    """Section 3.5: 1 / (alpha c + 1 - alpha) is 5.26, 53% above the 3.43 of the best fixed γ."""
    said = " ".join(run("--alpha", "0.9", "--c", "0.1").stdout.split())
    assert (
        "has at most 5.26 times" in said
        and said.endswith("+53% over this.")
        and "not tried" not in said
    )
    said = " ".join(
        run("--alpha", "0.9", "--c", "0.06", "--v", "0.04", "--gamma", "4").stdout.split()
    )
    assert (
        "has at most 5.26 times" in said
        and "larger γ were not tried. --gamma 8 tries γ up to 8." in said
    )
    said = " ".join(run("--alpha", "0.1", "--c", "0.5").stdout.split())
    assert said.startswith("α = 0.1") and "has at most 1.05 times" in said


def test_when_not_to_speculate(run, report):
    """No failure: the answer is to decode plainly."""
    options = ("--alpha", "0.1", "--c", "0.02", "--v", "1")
    result = run(*options)
    assert (
        result.exit_code == 0
        and "would have 0.54 times the speed of plain decoding, because checking 2 tokens takes"
        in result.stdout.replace("\n", " ")
    )
    (plan,) = report(*options)["plans"]
    assert (plan["gamma"], plan["break_even"], plan["obstacles"]) == (0, None, ["no spare compute"])


def test_sizes_on_a_machine(report, run):
    options = ("--alpha", "0.75", "--target", "11B", "--draft", "77m", "--device", "tpu-v4")
    plans = report(*options, "--batch", "1,512", "--c", "0.02", "--c-hat", "0")
    single, many = plans["plans"]
    assert (single["gamma"], single["c"], single["v"]) == (9, 0.02, 1.0)
    assert single["operations"] == pytest.approx(2.65, abs=0.01)
    assert many["gamma"] == 0 and many["obstacles"] == ["no spare compute"]
    assert plans["environment"]["command"]
    result = run(*options[:3], "t5-v1_1-xxl", *options[4:], "--batch", "1,32")
    assert "Batch 32: Speculate" in result.stdout


def test_a_pair_that_a_machine_has_no_room_for_is_not_recommended(report, run):
    llama = ("--alpha", "0.75", "--target", "llama-3.1-8b", "--draft", "llama-3.2-1b", "--device")
    (small,), (large,) = (report(*llama, device)["plans"] for device in ("tpu-v5e", "h100"))
    assert 0.15 < small["c"] < 0.18  # 1.24 of 7.5 billion parameters
    assert large["plain_seconds"] == pytest.approx(6.05e-3, rel=0.1), (
        "measured on an H100 (docs/gpu.md)"
    )
    assert large["c"] == pytest.approx(0.195, rel=0.1), "likewise"
    assert (small["gamma"], small["improvement"], small["obstacles"][0]) == (0, 1.0, "memory")
    assert (large["gamma"], large["obstacles"]) == (large["chain"]["gamma"], []) and large[
        "improvement"
    ] > 1.5
    # 8.03 and 1.24 billion parameters, and 256 tokens of 32 and 16 layers of 8 heads of 128 and 64,
    # keys and values
    weights, caches = (2 * 8.03e9, 2 * 1.236e9), (256 * 32 * 8 * 128 * 4, 256 * 16 * 8 * 64 * 4)
    for name, bytes_, cache in zip(("target", "draft"), weights, caches, strict=True):
        assert (
            small["memory"][name]
            == large["memory"][name]
            == pytest.approx(bytes_ + cache, rel=1e-3)
        )
    eight, many = report(*llama, "tpu-v6e", "--batch", "8,512")["plans"]
    assert eight["gamma"] and many["obstacles"][0] == "memory"  # of their caches
    said = " ".join(run(*llama, "tpu-v5e").stdout.split())
    assert (
        "take 16.1 GB (target) and 2.5 GB (drafter), and the machine has 16.0 GB, where not even "
        "the" in said
    )


def test_a_pair_that_cannot_exist_gets_no_plan(run):
    """`generate` refuses it, too."""
    options = ("--alpha", "0.8", "--device", "h100")
    for target, draft in (("llama-3.1-8b", "t5-small"), ("google/flan-t5-xl", "qwen3-0.6b")):
        result = run("--target", target, "--draft", draft, *options)
        assert result.exit_code == 2 and "expected two models of one kind" in " ".join(
            result.stderr.split()
        )
    other = " ".join(
        run("--target", "llama-3.1-8b", "--draft", "qwen3-0.6b", *options).stdout.split()
    )
    assert (
        "has 128,256 tokens and qwen3-0.6b 151,936: such a pair needs jaxspec.share_vocabulary"
        in other
    )
    for target, draft in (
        ("qwen2.5-14b", "qwen2.5-0.5b"),
        ("8B", "t5-small"),
        ("t5-v1_1-xxl", "t5-v1_1-small"),
    ):
        assert "share_vocabulary" not in run("--target", target, "--draft", draft, *options).stdout


def test_published_acceptance_is_taken_with_its_source(run, report):
    options = (
        "--target",
        "gpt-oss-20b",
        "--draft",
        "RedHatAI/gpt-oss-20b-speculator.eagle3",
        "--device",
        "h100",
    )
    planned = report(*options)
    (plan,) = planned["plans"]
    assert plan["chains"][3]["tokens_per_round"] == pytest.approx(2.56, abs=1e-3)
    assert (
        "2.56 on MT-Bench" in planned["note"]
        and "https://github.com/vllm-project" in planned["note"]
    )
    given = report(*options, "--alpha", "0.5")
    assert (
        given["plans"][0]["alpha"] == 0.5
        and "2.56" not in given["note"]
        and "a plain step takes" in given["note"]
    )
    result = run("--target", "qwen3-8b", *options[2:])
    assert "is published with openai/gpt-oss-20b: give that as --target" in " ".join(
        result.output.split()
    )
    unknown = run("--target", "8B", "--draft", "no/such", "--alpha", "0.5", *options[4:])
    assert "is published of no/such: give its size or shape and add an --alpha" in unknown.output
    assert "drafting 3, with RedHatAI" in " ".join(run(*options).stdout.split())


def test_hub_ids_of_known_shapes_are_taken(report, run):
    """Both of models and of what is published with them."""
    pair = (
        "--target",
        "meta-llama/Llama-3.1-8B-Instruct",
        "--draft",
        "meta-llama/Llama-3.2-1B",
        "--device",
        "h100",
    )
    shapes = ("--target", "llama-3.1-8b", "--draft", "llama-3.2-1b", "--device", "h100")
    assert report(*pair, "--alpha", "0.7")["plans"] == report(*shapes, "--alpha", "0.7")["plans"]
    published = ("--draft", "RedHatAI/gpt-oss-20b-speculator.eagle3", "--device", "h100")
    assert report("--target", "openai/gpt-oss-20b", *published)["plans"][0]["gamma"] > 0
    unknown = run("--target", "no/such-9b", "--draft", "1B", "--alpha", "0.7", "--device", "h100")
    assert "path of a config.json (hf download no/such-9b config.json)" in " ".join(
        unknown.output.split()
    )


@pytest.mark.parametrize(
    "row", {row.drafter: row for row in published.table()}.values(), ids=lambda row: row.drafter
)
def test_whatever_a_plan_recommends_it_can_plan(row, report, run):
    """With an --alpha, too: a module in its target's folder is not the target."""
    options = ("--target", row.target, "--device", "h200")
    if published.is_of(row.drafter, row.target):
        plans = [
            report(*options, "--draft", row.drafter, *alpha)["plans"][0]
            for alpha in ((), ("--alpha", "0.8"))
        ]
        assert all(0 < plan["c"] < 0.5 for plan in plans) and plans[1]["alpha"] == 0.8
    else:
        assert f"{row.drafter} (" not in run(*options).output


@pytest.mark.parametrize("name", ["~no-such-user/x", "x" * 5000])
def test_what_is_no_path_is_no_shape(name, run):
    for options in (("--target", name, "--draft", "1B"), ("--target", "8B", "--draft", name)):
        result = run(*options, "--alpha", "0.7", "--device", "h100")
        assert result.exit_code == 2
        assert "expected" in result.output or "no acceptance rate is published" in result.output


def test_without_a_drafter_the_published_ones_are_named(run):
    result = " ".join(run("--target", "google/gemma-4-31B-it", "--device", "h100").output.split())
    assert (
        "for google/gemma-4-31B-it one of z-lab/gemma-4-31B-it-DFlash (5.62" in result
        and "tokens a round)" in result
    )
    result = " ".join(run("--device", "h100").output.split())
    assert (
        "no acceptance is published with debian-t5-large: give the size or shape of another with"
        in result
    )


def test_a_block_drafter_drafts_in_one_pass(report):
    block = (
        "--target",
        "qwen3.5-4b",
        "--draft",
        "z-lab/Qwen3.5-4B-DFlash",
        "--device",
        "tpu-v5e",
        "--gamma",
        "16",
    )
    (plan,) = report(*block)["plans"]
    first, last = plan["chains"][1], plan["chains"][-1]
    assert last["gamma"] == 15, "its block drafts no more"
    assert last["drafting"] == pytest.approx(first["drafting"], rel=1e-2)


def test_a_pair_is_measured(run):
    result = run("--gamma", "2", "--count", "2", "--max-new-tokens", "12", "--repeats", "1")
    assert result.exit_code == 0, result.output
    assert "debian-t5-large with debian-t5-draft, temperature 0, measured here" in result.stdout
    assert "speculate" in result.stdout.lower()


@pytest.mark.slow
def test_how_sure_the_numbers_of_a_pair_are(report):
    (plan,) = report("--gamma", "2", "--count", "3", "--max-new-tokens", "12", "--repeats", "2")[
        "plans"
    ]
    alpha, c, v = (plan["measured"][name] for name in ("alpha", "c", "v"))
    assert 0 <= alpha["low"] <= alpha["value"] <= alpha["high"] <= 1
    assert c["min"] <= c["median"] == plan["c"] <= c["max"] and set(v) == {"1", "2"}
    (plan_of_numbers,) = report("--alpha", "0.75", "--c", "0.02")["plans"]
    assert plan_of_numbers["measured"] is None and 8 in plan_of_numbers["near"]


@pytest.mark.slow
def test_a_tree_is_planned(run, report):
    options = (
        "--tree",
        "--nodes",
        "3",
        "--count",
        "2",
        "--max-new-tokens",
        "12",
        "--repeats",
        "1",
    )
    (plan,) = report(*options)["plans"]
    assert 1 < len(plan["tree"]["shape"]) <= 3 and plan["chain"]["gamma"] == len(
        plan["chain"]["shape"]
    )
    assert plan["measured"]["acceptance"].keys() == {"top"} and plan["advice"]
    assert f"of {len(plan['tree']['shape'])}" in run(*options).stdout


def test_every_option_is_read_by_a_kind_of_plan():
    assert set().union(*READ.values()) == set(Inputs._fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--alpha", "0.5"], "--alpha needs --c, too"),
        (["--c", "0.5"], "--c needs --alpha, too"),
        (["--v", "0.5"], "a plan for a pair does not read --v: leave it out"),
        (["--alpha", "0.5", "--c", "0.1", "--v", "-1"], "--v is -1"),
        (["--alpha", "1.5", "--c", "0.1"], "alpha is 1.5"),
        (["--alpha", "0.5", "--c", "0.1", "--batch", "2"], "--alpha and --c does not read --batch"),
        (["--tree", "--alpha", "0.5", "--c", "0.1"], "--alpha and --c does not read --tree"),
        (
            ["--draft", "cascade('debian-t5-draft', prompt_lookup, gamma=2)"],
            "expected a model here; `jaxspec bench`",
        ),
        (["--draft", "none"], "--draft is 'none': expected a model here"),
        (["--nodes", "4"], "a plan for a pair does not read --nodes"),
        (
            ["--nodes", "4", "--alpha", "0.5", "--c", "0.1"],
            "--alpha and --c does not read --nodes: leave it out",
        ),
        (
            ["--alpha", "0.5", "--c", "0.1", "--prompts", "a.txt", "-t", "1"],
            "not read --temperature, --prompts: leave",
        ),
        (
            [
                "--alpha",
                ".5",
                "--target",
                "11B",
                "--draft",
                "1B",
                "--device",
                "h200",
                "--count",
                "3",
            ],
            "--count",
        ),
        (["--nodes", "4"], "a plan for a pair does not read --nodes"),
        (["--tree", "--gamma", "4"], "--tree does not read --gamma"),
        (["--target", "11B", "--draft", "1M", "--device", "h200"], "add an --alpha"),
        (
            ["--target", "11B", "--draft", "1M:", "--alpha", "0.5", "--device", "h200"],
            "size is '1M:': expected param",
        ),
        (
            ["--alpha", ".5", "--target", "11X", "--draft", "1M", "--device", "h200"],
            "size is '11X'",
        ),
        (
            ["--alpha", ".5", "--target", "11B", "--draft", "-1M", "--device", "h200"],
            "size is '-1M'",
        ),
        (
            ["--alpha", ".5", "--target", "11B", "--draft", "1M", "--device", "h20"],
            "did you mean 'h200'",
        ),
        (
            [
                "--alpha",
                ".5",
                "--target",
                "11B",
                "--draft",
                "1M",
                "--device",
                "a100",
                "--dtype",
                "int8",
            ],
            "dtype is 'int8'",
        ),
    ],
)
def test_bad_arguments_are_refused(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
