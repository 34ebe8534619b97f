"""Models of shapes, and devices that are not here; tests/test_tpu.py and tests/test_gpu.py compile
for them.
"""

import doctest
import importlib.util
from types import SimpleNamespace

import jax
import pytest

from benchmarks.estimates import absent, chips
from benchmarks.kernels import triton
from jaxspec.analysis import roofline
from jaxspec.analysis.random_model import random_params
from tests.small import tiny_llama

TINY = tiny_llama()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_shapes_are_those_of_a_loaded_model(dtype: str):
    model = absent.shape_model(TINY, dtype)
    loaded = random_params(model.config, dtype, jax.random.key(0))
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (model.params, loaded)]
    assert kinds[0] == kinds[1]
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(model.params))


def test_a_checkpoints_name_is_its_shape():
    assert absent.shape_model("debian-t5-draft").config.dtype == "bfloat16"
    with pytest.raises(
        ValueError, match=r"no shape, folder or config.json 'llama-9b': expected a .*: did you mean"
    ):
        absent.shape_model("llama-9b")


def test_without_libtpu_the_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install --no-deps 'libtpu==\d"):
        chips.devices_of("v5p")


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (
            "h900",
            r"no chip 'h900' is in the table. Expected one such as v4:2x2x1, .*, b200, several as h100:8",
        ),
        ("h100:2x2", "expected how many GPUs of one host, as h100:8"),
        ("l4:0", "expected how many GPUs"),
    ],
)
def test_a_topology_that_is_none_is_refused(topology, message):
    with pytest.raises(ValueError, match=message):
        chips.devices_of(topology)


def test_a_gpu_is_described_by_the_numbers_of_its_maker():
    assert set(chips.GPUS) <= set(roofline.MACHINES)
    described = chips.description("l4")
    for line in (
        "core_count: 58",
        "memory_bandwidth: 300000000000",
        "shared_memory_per_block_optin: 101376",
    ):
        assert f"  {line}\n" in described
    assert "major: 8 minor: 9 feature_extension: NONE" in described and '"NVIDIA L4"' in described
    assert "ACCELERATED_FEATURES" in chips.description("h100")


def test_a_chip_that_is_two_devices_is_halved():
    devices = [SimpleNamespace(coords=[x, 0, 0]) for x in (0, 1, 2, 3)]
    chip, half = (
        chips.machine_of("v4:2x2x1", devices),
        chips.machine_of("v4:2x2x1", [*devices, *devices]),
    )
    assert chip == roofline.machine("tpu-v4")
    assert chips.cores(devices) == 1 and chips.cores([*devices, *devices]) == 2
    assert (
        half.bandwidth == chip.bandwidth / 2
        and half.memory == 16 * 2**30
        and half.clock == chip.clock
    )


def test_examples_of_docstrings():
    for module in absent, chips, triton:
        result = doctest.testmod(module)
        assert result.attempted > 0 and result.failed == 0, module.__name__
