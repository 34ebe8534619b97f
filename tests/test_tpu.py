"""A TPU's compiler takes our programs, and what it makes of them: skipped where libtpu is
absent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxspec.analysis import roofline
from tests.conftest import compiled_cases

SCRIPT = Path(__file__).parent / "scripts" / "tpu_programs.py"
# bytes: of the large pairs' matrices the least is the key projection of Llama 1B, 2.1 MB
LEAST_MATRIX = 2_000_000
# cycles of the pass over 6 tokens over those of the one over one; one product recomputed: 1.37
MOST_VERIFY = 1.15
# Of the same pass, in passes over the weights at the memory's speed. Llama with libtpu's own limit:
# 1.88.
MOST_OVER_FLOOR = {"T5, chain": 1.95, "Llama, chain": 1.72}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, a TPU's compiler, is not installed",
    ),
]


@pytest.fixture(scope="module")
def programs() -> dict[str, dict[str, Any]]:
    """The cases of the script, by name."""
    cases = compiled_cases(SCRIPT)
    assert len(cases) == 7
    return cases


@pytest.fixture(scope="module")
def one_width(programs) -> dict[str, dict[str, Any]]:
    """The cases of small caches, whose passes have one width."""
    return {name: case for name, case in programs.items() if name != "Llama, policy"}


def test_no_cache_is_copied_where_a_policy_chooses_the_width(programs):
    """By a conditional, each round copied all of them: 16 rows of 2,118 tokens, 8 heads of 128
    dimensions.
    """
    program = programs["Llama, policy"]["programs"]["speculative"]
    assert max(program["copies"].values()) < 16 * 2118 * 8 * 128 * 2 / 2


def test_chips_exchange_sums_alone(programs):
    for name, case in programs.items():
        for program in case["programs"].values():
            assert set(program["collectives"]) == ({"all-reduce"} if case["mesh"] else set()), name


def test_float32_is_multiplied_in_float32(programs):
    for name, case in programs.items():
        assert case["bf16"] == ("float32" not in name), name


def test_no_weight_is_copied_in_the_loop(one_width):
    """What is copied, caches, biases and activations, has no matrix's size; of large pairs it is
    smaller than any.
    """
    for name, case in one_width.items():
        for program in case["programs"].values():
            assert not set(program["copies"].values()) & set(case["matrices"]), name
            assert max(program["copies"].values(), default=0) < LEAST_MATRIX, name


def test_temporaries_are_few(one_width):
    """Both prefills and a round: less than a tenth of the weights, where these are large."""
    for name, case in one_width.items():
        for program in case["programs"].values():
            assert program["temporaries"] < max(64e6, program["arguments"] / 10), name


@pytest.mark.parametrize("pair", ["T5, chain", "Llama, chain"])
def test_no_product_is_computed_again_in_the_verify_pass(programs, pair: str):
    """It is estimated to take no longer than a pass over one token, and reads the weights as often:
    once.
    """
    plain, speculative = (programs[pair]["programs"][name] for name in ("plain", "speculative"))
    one, several = plain["parts"]["target"], speculative["parts"]["target"]
    assert several["cycles"] <= MOST_VERIFY * one["cycles"]
    assert several["bytes_read"] <= 1.05 * one["bytes_read"]
    machine = roofline.machine("tpu-v5p")
    floor = programs[pair]["read by a pass"] / machine.bandwidth * machine.clock
    assert several["cycles"] <= MOST_OVER_FLOOR[pair] * floor


def test_a_large_product_is_read_in_few_blocks():
    """As `jaxspec.generate` has it compiled, against libtpu's own limit."""
    code = (
        "from benchmarks.tpu_products import LIMITS, estimate\n"
        "for limit in (LIMITS[1], LIMITS[3]):\n"
        "    for rows in (8, 32):\n"
        "        found = estimate((14336, 4096), rows, limit, '[out, in]', 'v5p:2x2x1')\n"
        "        print('compiled', found.over_floor, found.blocks, found.prefetched)"
    )
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("compiled ")]
    assert [prefetched for _, _, prefetched in lines] == ["False"] * 4
    for own, ours in zip(lines[:2], lines[2:], strict=True):
        assert float(ours[0]) < min(1.55, 0.9 * float(own[0])) and int(ours[1]) < int(own[1])


def test_a_pass_over_one_token_prefetches_large_matrices_on_v5e():
    """Of int8, as `jaxspec.generate` has it compiled, against libtpu's own options: 0.65 of the
    cycles.
    """
    code = (
        "from benchmarks.tpu_options import cut, cycles\n"
        "from jaxspec.core.programs import COMPILER_OPTIONS\n"
        "plain = cut('llama-3.1-8b', 12, 'int8').plain()\n"
        "for options in ({}, COMPILER_OPTIONS['TPU v5 lite']):\n"
        "    print('compiled', cycles(plain, 'v5e', options)[0])"
    )
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    own, ours = (
        int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("compiled ")
    )
    assert ours < 0.8 * own


@pytest.mark.parametrize("pair", ["T5, chain", "Llama, chain"])
def test_a_round_is_passes_and_little_else(programs, pair: str):
    parts = programs[pair]["programs"]["speculative"]["parts"]
    rest = sum(parts[name]["cycles"] for name in ("accept", "commit", "rest") if name in parts)
    # of two layers; of all 24 or 32 it is a twelfth of that
    assert rest < 0.04 * parts["target"]["cycles"]


@pytest.mark.parametrize(
    ("topology", "name"), [("v5e --mesh model=2", "v5e:2x2"), ("v4", "v4:2x2x1")]
)
def test_the_command_keeps_programs_of_a_mesh(topology: str, name: str, tmp_path: Path):
    """The whole way of `benchmarks.estimates.compile`, on checkpoints that ship, of which only the
    shapes are read.

    One chip, which is what is used without a mesh, is two devices of a v4.
    """
    options = (
        f"--target debian-t5-base --draft debian-t5-small --gamma 2 --topology {topology} --json"
    )
    command = [
        sys.executable,
        "-m",
        "benchmarks.estimates.compile",
        *options.split(),
        "--save",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert (
        report["topology"] == name
        and report["mesh"] == "model=2"
        and report["chips"] == 2
        and report["fits"]
    )
    assert {path.name for path in tmp_path.glob("*.executable")} == {
        "plain.executable",
        "speculative.executable",
    }
    fingerprint = json.loads((tmp_path / "speculative.json").read_text())
    assert fingerprint["libtpu"] and fingerprint["mesh"] == {"data": 1, "model": 2}


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("int8", 200e6, 300e6), ("int4", 120e6, 160e6)]
)
def test_quantised_weights_are_not_widened_or_copied(dtype, least, most):
    """No array of a matrix's size is written, in any dtype, and temporaries are fewer than the
    largest's bytes.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, str(SCRIPT.with_name("tpu_int8.py")), "v5p:2x2x1", "bfloat16", dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [
        json.loads(line.removeprefix("compiled "))
        for line in done.stdout.splitlines()
        if "compiled" in line
    ]
    assert [program["name"] for program in programs] == ["plain", "speculative"]
    for program in programs:
        assert program["large arrays"] == {}
        assert least < program["arguments"] < most
        assert program["temporaries"] < 4096 * 14336


def test_experts_are_read_where_they_lie():
    """A ragged product had a second copy of all of them, or multiplied each token with every
    expert.
    """
    for case in compiled_cases(
        SCRIPT.with_name("expert_programs.py"), "v6e", "8", "72", "512"
    ).values():
        assert case["temporaries"] < 0.05 * case["weights"], case
