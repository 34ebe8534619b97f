"""The sentences of `jaxspec bench`."""

import pytest

from jaxspec.cli import results


@pytest.mark.parametrize(("cpus", "said"), [(1, "Xeon, 1 CPU ·"), (2, "Xeon, 2 CPUs ·")])
def test_the_headline_counts_cpus(cpus, said):
    environment = {"cpu": "Xeon", "device": "cpu", "cpus": cpus, "jax": "0.8"}
    target = {"name": "big", "parameters": 1_200_000, "dtype": "float32"}
    found = {"target": target, "draft": None, "environment": environment, "new_tokens": 9}
    line = results.headline(found).plain
    assert line.startswith("big (1.2M) · greedy, 9 new tokens, float32 · ")
    assert said in line
