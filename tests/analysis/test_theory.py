"""What all of `analysis.theory` keeps to: it is arithmetic, and is there in an instant."""

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
from jaxspec.analysis import theory
for found in pkgutil.iter_modules(theory.__path__):
    importlib.import_module(f"{theory.__name__}.{found.name}")
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"flax", "jax", "jaxlib", "rich", "scipy"}))
"""


def test_theory_imports_neither_jax_nor_what_draws_tables():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []
