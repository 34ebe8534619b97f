"""A TPU's compiler takes our programs, of chains and of trees: skipped where libtpu is absent."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "scripts" / "tpu_programs.py"

COMPILE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tpu_programs
for case in tpu_programs.cases(small=True):
    made = tpu_programs.compile_case(case)
    about = case.name, case.chips, made.collectives, made.temporaries, "bf16" in made.text
    print("compiled", json.dumps(about), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, a TPU's compiler, is not installed")
def test_a_tpus_compiler_needs_no_collective_but_all_reduce():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", COMPILE, str(PROGRAMS.parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [json.loads(line.removeprefix("compiled ")) for line in done.stdout.splitlines() if "compiled" in line]
    assert len(programs) == 5
    for name, chips, collectives, temporaries, rounds in programs:
        assert rounds == ("float32" not in name), "a float32 model is multiplied in float32"
        assert set(collectives) == (set() if chips == 1 else {"all-reduce"}), name
        assert temporaries < 64e6, name


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, a TPU's compiler, is not installed")
def test_int8_weights_are_not_widened_or_copied():
    """No array of a matrix's size is written, in any dtype, and temporaries are fewer than the largest's bytes."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, str(PROGRAMS.with_name("tpu_int8.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [json.loads(line.removeprefix("compiled ")) for line in done.stdout.splitlines() if "compiled" in line]
    assert [program["name"] for program in programs] == ["plain", "speculative"]
    for program in programs:
        assert program["large arrays"] == {}
        assert 200e6 < program["arguments"] < 300e6  # int8
        assert program["temporaries"] < 4096 * 14336
