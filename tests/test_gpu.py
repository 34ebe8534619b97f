"""A GPU's compiler takes our programs, and what it makes of them: skipped where jax's CUDA plugin
is absent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks.estimates import chips
from benchmarks.kernels import triton
from jaxspec.nets import dense, kernels
from tests.conftest import compiled_cases

SCRIPT = Path(__file__).parent / "scripts" / "gpu_programs.py"
# bytes: of the large pairs' matrices the least is the key projection of Llama 1B, 2.1 MB
LEAST_MATRIX = 2_000_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chips.plugin() is None, reason="jax's CUDA plugin, a GPU's compiler, is not installed"
    ),
]


@pytest.fixture(scope="module")
def programs() -> dict[str, dict[str, Any]]:
    """The cases of the script, by name."""
    cases = compiled_cases(SCRIPT)
    assert len(cases) == 6
    return cases


def test_no_weight_is_copied_or_widened_in_the_loop(programs):
    """Of int8 and int4, too: they are widened within the products."""
    for name, case in programs.items():
        for program in case["programs"].values():
            assert program["widened"] == {}, name
            assert not set(program["copies"].values()) & {
                size for size in case["matrices"] if size >= LEAST_MATRIX
            }, name


def test_no_cache_is_copied_in_the_loop(programs):
    """Of 16 rows of 2,118 tokens, 8 heads of 128 dimensions, where a policy chooses the width; else
    of one row.
    """
    for name, case in programs.items():
        most = 16 * 2118 * 8 * 128 * 2 / 2 if "policy" in name else LEAST_MATRIX
        for program in case["programs"].values():
            assert max(program["copies"].values(), default=0) < most, name


def test_temporaries_are_few(programs):
    """Both prefills and a round: less than a tenth of the weights, where these are large.

    Of int4 64 rows have sums of each group of 128 columns, in float32, which is as much as a matrix
    in bfloat16.
    """
    for name, case in programs.items():
        for program in case["programs"].values():
            of_groups = 2 * 4096 * 14336 if "int4" in name else 0
            if "policy" not in name:  # 16 rows, whose attention to 2,118 tokens is the most
                assert program["temporaries"] < max(64e6, program["arguments"] / 10) + of_groups, (
                    name
                )


def test_gpus_exchange_sums_alone(programs):
    """In a pass over one token, too, whose row of the embedding would be a slice of a table that is
    gathered whole.
    """
    for name, case in programs.items():
        for program in case["programs"].values():
            assert set(program["collectives"]) == ({"all-reduce"} if case["mesh"] else set()), name


def test_the_host_waits_once_a_round(programs):
    """For whether there is another: the drafter's steps are of a number that is known. A policy's
    choices are more.
    """
    for name, case in programs.items():
        for program in case["programs"].values():
            waits = {
                part: counts["host_reads"]
                for part, counts in program["parts"].items()
                if counts["host_reads"]
            }
            assert (sum(waits.values()) > 1) if "policy" in name else (waits == {"rest": 1}), name


def test_quantised_weights_are_read_as_they_are(programs):
    reads = {}
    for dtype in ("int8", "int4"):
        parts = programs[f"Llama, chain, {dtype}"]["programs"]["speculative"]["parts"]
        reads[dtype] = parts["target"]["bytes_read"]
    whole = programs["Llama, chain"]["programs"]["speculative"]["parts"]["target"]["bytes_read"]
    assert 0.45 < reads["int8"] / whole < 0.6 and 0.2 < reads["int4"] / whole < 0.4


def test_a_round_is_passes_and_little_else(programs):
    """Kernels of one layer of each model, with the head; what is around the passes does not grow
    with the layers.
    """
    parts = programs["Llama, chain"]["programs"]["speculative"]["parts"]
    assert all(parts[name]["kernels"] < 45 for name in ("draft", "draft step", "target"))
    assert sum(parts[name]["kernels"] for name in ("accept", "commit", "rest")) < 30


def test_attention_is_one_kernel(programs):
    """Scores, softmax and mixing were three in a layer of Llama's; and no byte more is read."""
    chain = compiled_cases(SCRIPT, "Llama, chain", "kernel=attention")["Llama, chain"]["programs"]
    for name, before in programs["Llama, chain"]["programs"].items():
        for part in {"target", "draft step"} & before["parts"].keys():
            fewer, more = chain[name]["parts"][part], before["parts"][part]
            assert fewer["kernels"] < more["kernels"], (name, part)
            assert fewer["bytes_read"] < 1.01 * more["bytes_read"], (name, part)


def test_a_quantised_product_is_a_kernel_of_ours(programs):
    """Groups of int4 are added up as they are read, so a pass over several tokens reads the
    matrices alone.
    """
    name = "Llama, chain, int4"
    chain = compiled_cases(SCRIPT, name, "kernel=product")[name]["programs"]["speculative"]["parts"]
    before = programs[name]["programs"]["speculative"]["parts"]
    for part in "target", "draft step":
        assert chain[part]["kernels"] <= before[part]["kernels"] - 3, part
    assert chain["target"]["bytes_read"] < 0.9 * before["target"]["bytes_read"]


def test_an_int8_product_is_compiled_as_our_kernel_where_it_is_on():
    """For one row, too; XLA's program has none of it."""
    device = SingleDeviceSharding(chips.devices_of("h100")[1][0])
    shapes = {
        "x": ((1, 1, 1024), jnp.bfloat16),
        "int8": ((512, 1024), jnp.int8),
        "scale": ((512, 1), jnp.float32),
    }
    arrays = {name: jax.ShapeDtypeStruct(*shape, sharding=device) for name, shape in shapes.items()}
    x = arrays.pop("x")
    for names, expected in ((), False), (("product",), True):
        with kernels.replaced(**triton.replacements(*names)):
            product = jax.jit(lambda *arguments: dense.product(*arguments))
            program = product.lower(x, arrays).compile()
        assert ("gpu.triton" in program.as_text()) == expected


def test_the_command_keeps_programs(tmp_path: Path):
    """The whole way of `benchmarks.estimates.compile`, on checkpoints that ship, of which only the
    shapes are read.
    """
    options = "--target debian-t5-base --draft debian-t5-small --gamma 2 --topology h100 --json"
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
    assert report["topology"] == "h100:1" and report["chips"] == 1 and report["fits"]
    assert report["reads"]["round"] > report["reads"]["step of plain decoding"] > 0
    fingerprint = json.loads((tmp_path / "speculative.json").read_text())
    assert fingerprint["device"] == "NVIDIA H100 80GB HBM3" and fingerprint[str(chips.plugin())]


def test_experts_are_read_where_they_lie():
    """A ragged product had a second copy of all of them, or multiplied each token with every
    expert.
    """
    for case in compiled_cases(
        SCRIPT.with_name("expert_programs.py"), "h100", "8", "72", "512"
    ).values():
        assert case["temporaries"] < 0.05 * case["weights"], case
