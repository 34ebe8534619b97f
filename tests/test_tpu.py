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
