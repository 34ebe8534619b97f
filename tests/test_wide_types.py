"""Under `jax_enable_x64` buffers keep their 32 bits, and text is what it is without."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.core import Draft
from jaxspec.core.round import in_32_bits
from tests.scripts import wide_types

PACKAGE = Path(jaxspec.__file__).parent
SCRIPT = Path(__file__).parent / "scripts" / "wide_types.py"
# the place of the dtype among the arguments
DTYPE_AT = {"zeros": 1, "ones": 1, "empty": 1, "full": 2}
DRAWN = {"uniform": 2, "gumbel": 2, "normal": 2}


def makers_without_a_dtype(source):
    """Yields calls such as jnp.zeros(3), whose dtype is float64 under `jax_enable_x64`."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        places = {"jnp": DTYPE_AT, "jax.random": DRAWN}.get(owner, {})
        if (
            name in places
            and len(node.args) <= places[name]
            and not any(x.arg == "dtype" for x in node.keywords)
        ):
            yield ast.unparse(node)


def test_every_array_that_is_made_names_its_dtype():
    assert [
        *makers_without_a_dtype(
            "x = jnp.zeros(3), jnp.full(3, 0.0), jnp.ones(3, int), jax.random.normal(key)"
        )
    ] == [
        "jnp.zeros(3)",
        "jnp.full(3, 0.0)",
        "jax.random.normal(key)",
    ]
    calls = {
        str(path.relative_to(PACKAGE)): [*makers_without_a_dtype(path.read_text())]
        for path in PACKAGE.rglob("*.py")
    }
    assert {path: found for path, found in calls.items() if found} == {}


def test_drafts_and_verdicts_are_narrowed():
    with jax.enable_x64(True):
        wide = Draft(
            jnp.array([[3]]),
            np.array([1]),
            log_probs=jnp.array([[[0.5, 0.5]]]),
            aux={"seen": jnp.array([1.0])},
        )
        assert {x.dtype for x in jax.tree.leaves(wide)} == {
            jnp.dtype("int64"),
            jnp.dtype("float64"),
        }
        narrow = in_32_bits(wide)
    assert [x.dtype for x in jax.tree.leaves(narrow)] == ["int32", "int32", "float32", "float32"]


def test_ids_that_do_not_fit_are_refused():
    model = jaxspec.testing.table_model(jax.random.key(1), vocab=5)
    with jax.enable_x64(True):
        prompt = jaxspec.Prompt(jnp.array([[2**32 + 1]]), jnp.array([1]))
        with pytest.raises(ValueError, match="token id 2147483647: expected ids from 0 to 4"):
            jaxspec.prepare(model, prompt)


@pytest.mark.slow
def test_every_public_function_under_x64():
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(SCRIPT.parents[2])])
    }
    command = [sys.executable, str(SCRIPT), *wide_types.CASES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    results = {case["name"]: case for case in map(json.loads, done.stdout.splitlines())}
    assert [*results] == [*wide_types.CASES]
    wrong = {name: case for name, case in results.items() if case["got"] != case["expected"]}
    assert not wrong
    # Draws are those of 32 bits, too: a text depends on its key alone.
    assert (
        results["sampled_by_coupled_noise"]["got"]
        == wide_types.CASES["sampled_by_coupled_noise"]()[0]
    )
