"""Programs compiled from shapes, kept and loaded again, on the CPU's compiler; tests/test_tpu.py
has the TPU's.
"""

import importlib.util
import json
import pickle
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxspec import Prompt
from jaxspec.analysis import aot, chips, roofline
from jaxspec.analysis.random_model import random_params
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.testing import prepared_table
from tests.small import tiny_llama

TINY = tiny_llama()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_shapes_are_those_of_a_loaded_model(dtype: str):
    model = aot.shape_model(TINY, dtype)
    loaded = random_params(model.config, dtype, jax.random.key(0))
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (model.params, loaded)]
    assert kinds[0] == kinds[1]
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(model.params))


def test_a_checkpoints_name_is_its_shape():
    assert aot.shape_model("debian-t5-draft").config.dtype == "bfloat16"
    with pytest.raises(
        ValueError, match=r"no shape, folder or config.json 'llama-9b': expected a .*: did you mean"
    ):
        aot.shape_model("llama-9b")


@pytest.fixture(scope="module")
def prepared():
    made = prepared_table(max_new_tokens=8)
    return made.replace(drafter=made.target, gamma=3)


@pytest.fixture(scope="module")
def stored(prepared, tmp_path_factory):
    made = aot.compile_generation(prepared, jax.devices())
    return made, aot.save({"speculative": made}, tmp_path_factory.mktemp("programs"))


def test_a_loaded_program_gives_the_text_of_generate(prepared, stored):
    made, folder = stored
    run = aot.load(folder, prepared)
    assert np.array_equal(run(prepared).tokens, loop.run(prepared).tokens)
    assert made.program.arguments > 0 and made.program.memory > made.program.arguments


def test_a_program_of_shapes_serves_models_with_several_end_tokens(prepared, stored):
    """A shape names no end tokens; those that a checkpoint's files name are arguments of the
    program.
    """
    _, folder = stored
    text = np.asarray(loop.run(prepared).tokens)
    ends = text[0, 3:6].tolist()
    ending = prepared.replace(eos_ids=ends)
    assert ending.request.eos.shape == (2, 3) and prepared.request.eos.shape == (2, 1)
    out, expected = aot.load(folder, prepared)(ending), loop.run(ending)
    assert np.array_equal(out.tokens, expected.tokens) and not np.array_equal(out.tokens, text)
    with pytest.raises(ValueError, match="is of another shape: "):
        aot.load(folder, prepared.replace(eos_ids=range(aot.ENDS + 1)))


def test_a_program_is_refused_for_another_shape_or_decoder(prepared, stored):
    _, folder = stored
    longer = prepared.replace(max_new_tokens=40)  # the same arguments, but another output
    with pytest.raises(ValueError, match=r"is of another program: .* Compile it again"):
        aot.load(folder, longer)
    more = Prompt(np.tile(prepared.prompt.tokens, (2, 1)), np.tile(prepared.prompt.length, 2))
    with pytest.raises(ValueError, match="is of another shape: "):
        aot.load(
            folder,
            prepare(prepared.target, more, drafter=prepared.target, gamma=3, max_new_tokens=8),
        )
    with pytest.raises(FileNotFoundError, match=r"no program at .*plain"):
        aot.load(folder, prepared, "plain")


def test_a_program_is_refused_by_another_version(prepared, stored, tmp_path):
    _, folder = stored
    held = pickle.loads((folder / "speculative.executable").read_bytes())
    held["fingerprint"]["jax"] = "0.0.1"
    (tmp_path / "speculative.executable").write_bytes(pickle.dumps(held))
    with pytest.raises(ValueError, match=r"another jax: 0.0.1, and here it is \d"):
        aot.load(tmp_path, prepared)
    assert json.loads((folder / "speculative.json").read_text())["jax"] == jax.__version__


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
