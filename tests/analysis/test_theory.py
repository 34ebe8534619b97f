"""The theory of `analysis` is arithmetic, and is imported in an instant."""

import subprocess
import sys

SCRIPT = """
import sys
from jaxspec.analysis import divergence, formulas
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"flax", "jax", "jaxlib", "rich", "scipy"}))
"""


def test_theory_imports_neither_jax_nor_what_draws_tables():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []
