"""The sentences of `jaxspec bench`."""

import pytest

from jaxspec.cli import bench_tables


@pytest.mark.parametrize(("cpus", "words"), [(1, "Xeon, 1 CPU ·"), (2, "Xeon, 2 CPUs ·")])
def test_the_headline_counts_cpus(cpus, words):
    environment = {"cpu": "Xeon", "device": "cpu", "cpus": cpus, "jax": "0.8", "jaxlib": "0.7", "jaxspec": "1.0"}
    target = {"name": "big", "parameters": 1_200_000, "dtype": "float32"}
    found = {"target": target, "draft": None, "environment": environment, "new_tokens": 9}
    line = bench_tables.headline(found).plain
    assert line.startswith("big (1.2M) · greedy, 9 new tokens, float32 · ")
    assert words in line and line.endswith(" · jax 0.8, jaxlib 0.7 · jaxspec 1.0")


def test_latencies_have_their_min_and_max(shown):
    spreads = [{"median": x, "min": x - 1, "max": x + 1} for x in (2.0, 4.0, 8.0)]
    row = {"batch": 1, "gamma": 0, "first_token_ms": spreads[2], "token_ms": {"p50": spreads[0], "p95": spreads[1]}}
    text = shown(bench_tables.latency_table({"results": [row, row | {"gamma": 3, "token_ms": None}]}))
    for part in ("plain", "8.0", "2.00", "1.00..3.00", "4.00", "3.00..5.00"):
        assert part in text
    assert text.count("–") == 4
    assert max(map(len, text.splitlines())) <= 80
