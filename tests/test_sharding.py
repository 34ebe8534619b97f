"""Placement on a mesh: the table, what it does to every parameter, and that text does not depend on
it.
"""

import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

import jaxspec
from jaxspec import nets, sharding
from jaxspec.decode import request
from jaxspec.nets import axes_of, decoder, t5
from jaxspec.testing import table_model
from jaxspec.weights import hf_families, parameters
from jaxspec.weights.hf_families.gpt import SIZES as GPT
from jaxspec.weights.loading import shipped

# of scripts/placement.py; int8 drafts by looking up
KINDS = ["encoder", "llama", "gpt", "int8", "speech"]
FAMILIES = ["gemma4_text", "qwen3_5_text", "qwen3_moe", "olmo2", "cohere"]  # likewise
SCRIPTS = Path(__file__).parent / "scripts"
GRID = AbstractMesh((2, 4), ("data", "model"))
LLAMA = decoder.decoder_config(
    96,
    dim=32,
    ff_dim=64,
    layers=1,
    heads=8,
    kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    out_bias=True,
    head_norms=True,
)
NETS = {
    "t5-v1_1-xxl": (
        t5,
        dataclasses.replace(t5.SIZES["t5-v1_1-xxl"], encoder_layers=1, decoder_layers=1),
    ),
    "t5-small": (t5, t5.SIZES["t5-small"]),
    "gpt-97m": (decoder, GPT["gpt-97m"]),
    "llama": (decoder, LLAMA),
    "relative": (decoder, nets.replace(LLAMA, positions="relative")),
}
PROMPT = jaxspec.Prompt(jnp.array([[1, 2]]), jnp.array([2]))


@functools.cache
def shapes(name):
    net, config = NETS[name]
    return jax.eval_shape(lambda: net.init(config, jax.random.key(0))), config


@pytest.mark.parametrize("name", NETS)
def test_every_matrix_has_axes_and_nothing_else_has(name):
    """A matrix that the table forgets would be whole on every device."""
    params, config = shapes(name)
    parts, form = axes_of(config).parts, nets.short_form(config)
    head_dim = form.dim // form.heads if name.startswith("gpt") else form.head_dim
    sizes = {
        "vocab": config.vocab_size,
        "dim": config.dim,
        "ff": form.ff_dim,
        "positions": config.max_positions,
    }
    sizes |= {axis: parts[axis] * head_dim for axis in ("heads", "kv_heads")}
    for path, x in parameters.flat(params).items():
        axes = sharding.logical(path)
        if path.endswith(("/weight", "/embedding", "/bias")) and "norm/" not in path:
            assert tuple(sizes[axis] for axis in axes) == x.shape, path
        else:
            assert axes == (), path


@pytest.mark.parametrize(
    "name", ["opus-mt-en-de", "whisper-tiny", "t5gemma-s-s", "t5gemma-2-270m-270m", "umt5-small"]
)
def test_no_large_matrix_of_an_encoder_decoder_is_whole(name):
    """Positions, relative biases and convolutions of sound are small; an encoder's own embedding is
    not.
    """
    config = next(family.sizes[name] for family in hf_families.FAMILIES if name in family.sizes)
    if name == "opus-mt-en-de":
        config = dataclasses.replace(config, source_vocab=60_000)
    axes = axes_of(config)
    for path, x in parameters.flat(nets.net_of(config).shapes(config)).items():
        logical = sharding.logical(path, axes.layers)
        assert x.ndim < 2 or x.size < 2**20 or any(sharding.TABLE[axis] for axis in logical), path


def test_projections_are_split_where_blocks_need_one_sum():
    params, config = shapes("llama")
    specs = {
        path: s.spec
        for path, s in parameters.flat(sharding.parameters(params, axes_of(config), GRID)).items()
    }
    replicated, split = PartitionSpec(None, None), ("model", None)
    layer = {
        path.removeprefix("layers_0/"): spec
        for path, spec in specs.items()
        if path.startswith("layers_0/")
    }
    assert (
        layer["attention/query/weight"]
        == layer["ff/gate/weight"]
        == layer["ff/wi/weight"]
        == PartitionSpec(*split)
    )
    assert (
        layer["attention/out/weight"] == layer["ff/out/weight"] == PartitionSpec(*reversed(split))
    )
    assert layer["attention/query/bias"] == PartitionSpec("model")
    # 16 outputs could be cut in 4, but not the 2 heads that they are.
    assert layer["attention/key/weight"] == layer["attention/value/weight"] == replicated
    assert layer["attention/out/bias"] == PartitionSpec(None)
    assert specs["embedding/embedding"] == specs["head/weight"] == PartitionSpec(*split)
    assert layer["attention_norm/scale"] == PartitionSpec()


def test_xxl_over_8_devices_is_an_eighth_of_itself():
    params, config = shapes("t5-v1_1-xxl")
    mesh = AbstractMesh((1, 8), ("data", "model"))
    places = sharding.parameters(params, axes_of(config), mesh)
    parts = jax.tree.map(lambda x, s: int(np.prod(s.shard_shape(x.shape))), params, places)
    per_device, all_of_them = (
        sum(jax.tree.leaves(parts)),
        sum(x.size for x in jax.tree.leaves(params)),
    )
    assert per_device * 8 == pytest.approx(all_of_them, rel=1e-3)  # norms are whole
    assert sharding.kept_whole(axes_of(config), mesh) == []


def test_groups_of_columns_are_split_as_columns_are():
    """Of int4 matrices [groups, outputs, width] outputs or groups, and scales [outputs, groups]
    with them.
    """
    specs = {
        ("wi", "int4", (4, 64, 8)): PartitionSpec(None, "model"),
        ("out", "int4", (8, 32, 8)): PartitionSpec("model", None),
        ("out", "int4", (2, 32, 32)): PartitionSpec(None, None),  # two groups for four devices
        ("out", "scale", (32, 8)): PartitionSpec(None, "model"),
        ("out", "zero", (32, 8)): PartitionSpec(None, "model"),
    }
    for (module, part, shape), spec in specs.items():
        assert (
            sharding.of(f"layers_0/ff/{module}/weight/{part}", shape, axes_of(LLAMA), GRID).spec
            == spec
        )


def test_what_does_not_divide_is_whole_and_reported():
    config = t5.T5Config(
        30, dim=16, ff_dim=32, heads=3, head_dim=8, encoder_layers=1, decoder_layers=1
    )
    params = jax.eval_shape(lambda: t5.init(config, jax.random.key(0)))
    specs = {
        path: s.spec
        for path, s in parameters.flat(sharding.parameters(params, axes_of(config), GRID)).items()
    }
    assert {spec for path, spec in specs.items() if "ff/" not in path} <= {
        PartitionSpec(None, None),
        PartitionSpec(),
    }
    assert specs["decoder_0/ff/wi/weight"] == PartitionSpec("model", None)
    numbers = {"heads": 3, "kv_heads": 3, "vocab": 30}
    reasons = [f"{axis} ({number} is no multiple of 4)" for axis, number in numbers.items()]
    assert sharding.kept_whole(axes_of(config), GRID) == reasons
    assert sharding.kept_whole(axes_of(LLAMA), GRID) == ["kv_heads (2 is no multiple of 4)"]
    assert sharding.rows(jnp.ones(3), 3, GRID).spec == PartitionSpec(None)


def test_a_mesh_may_lack_an_axis():
    data = AbstractMesh((4,), ("data",))
    params, config = shapes("llama")
    leaves = jax.tree.leaves(sharding.parameters(params, axes_of(config), data))
    assert all(s.is_fully_replicated for s in leaves)
    assert sharding.kept_whole(axes_of(config), data) == []
    assert sharding.rows(jnp.ones((8, 3)), 8, data).spec == PartitionSpec("data")


@pytest.mark.parametrize(
    "axes", ["", "model", "model=0", "rows=2", "model=-1", "model=1,model=1", "model=x", "=2"]
)
def test_descriptions_that_are_none(axes):
    with pytest.raises(
        ValueError, match=f"the mesh (is )?'?{axes}'?.*expected sizes, 1 or more, of the axes"
    ):
        sharding.mesh(axes)


def test_too_few_devices():
    with pytest.raises(
        ValueError, match=r"has 4096 devices, but jax sees \d+ .*device_count=4096 simulates them"
    ):
        jaxspec.load("debian-t5-small", mesh="data=64,model=64")


def test_a_mesh_with_explicit_axes_becomes_one_for_the_compiler():
    """Networks do not say where each product goes, as explicit axes ask them to."""
    explicit = jax.make_mesh(
        (1, 1), ("data", "model"), (AxisType.Explicit,) * 2, devices=jax.devices()[:1]
    )
    assert sharding.mesh(explicit) == sharding.mesh("data=1,model=1") != explicit


def test_a_mesh_of_other_axes():
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    with pytest.raises(
        ValueError, match="the mesh has the axes rows: expected data and model, or either"
    ):
        jaxspec.load("debian-t5-small", mesh=mesh)


def placed(model, mesh):
    return model._replace(params=sharding.place(model.params, None, mesh))


def test_target_and_drafter_on_different_meshes():
    model = table_model(jax.random.key(0), vocab=5)
    devices = np.array(jax.devices()[:1])
    flat, other = Mesh(devices, ("data",)), Mesh(devices[None], ("data", "model"))
    with pytest.raises(
        ValueError, match="different meshes, data=1 and data=1,model=1: load both with the same"
    ):
        jaxspec.generate(placed(model, flat), PROMPT, drafter=placed(model, other))


def test_what_goes_with_a_placed_target_is_placed():
    """Prompts, keys, and a drafter that is not on the mesh."""
    mesh = sharding.mesh("data=1")
    target, draft = (table_model(jax.random.key(i), vocab=5) for i in range(2))
    prepared = request.prepare(
        placed(target, mesh), PROMPT, drafter=draft, temperature=1.0, key=jax.random.key(3)
    )
    assert {
        x.sharding.mesh
        for x in jax.tree.leaves((prepared.weights, prepared.prompt, prepared.request))
    } == {mesh}
    assert {
        tuple(x.sharding.spec) for x in jax.tree.leaves((prepared.prompt, prepared.request))
    } == {("data",)}
    assert {tuple(x.sharding.spec) for x in jax.tree.leaves(prepared.weights)} == {()}


# --- in processes of their own


def start(count, *arguments):
    """`placement.py` with so many simulated devices. It compiles quickly, as `conftest.py` has
    it.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    cache = jax.config.jax_compilation_cache_dir or ""
    return subprocess.Popen(
        [sys.executable, SCRIPTS / "placement.py", *map(str, arguments)],
        env=os.environ
        | dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    # collectives report their connections on standard output
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    if "debian-t5-base" not in shipped():
        pytest.skip("there is no tokenizer to save with")
    return answer(start(8, "meshes", tmp_path_factory.mktemp("placement")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_text_on_a_mesh_is_that_on_one_device(report, kind):
    """Greedy rows and, with the coupled rule, sampled ones, on 2 x 4 devices."""
    assert report[kind]["split"] == report[kind]["one"]
    assert len({tuple(row) for row in report[kind]["one"]}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_text_of_a_family_on_a_mesh_is_that_on_one_device(report, kind):
    """Plain and drafted: one kv head for two devices, shared keys, delta layers, experts, norms of
    projections.
    """
    plain, on_mesh, drafted = report["families"][kind]
    assert plain == on_mesh == drafted
    assert len({tuple(row) for row in plain}) == 4


@pytest.mark.slow
def test_coupled_text_from_trees_does_not_depend_on_a_callers_mesh(report):
    """A batch that is split over 8 devices."""
    assert report["rows"]["shards"] == [2] * 8
    assert report["rows"]["split"] == report["rows"]["plain"]


@pytest.mark.slow
def test_explicit_axes_are_taken_as_automatic():
    """Parameters on a mesh as `jax.make_mesh` makes it, with `jax.set_mesh` and without; in jit
    they are refused.
    """
    report = answer(start(8, "explicit"))
    assert report["alone"] == report["one"]
    assert report["set_mesh"] == [report["one"][0], report["numbers"]]
    assert (
        "lies on a mesh with Explicit axes and is traced (jit, grad, vmap): expected Auto axes"
        in report["refused"]
    )
    assert report["advised"]
    assert (
        "have no gradient under jax.set_mesh with Explicit axes: take the gradient outside"
        in report["no_gradient"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_weights_are_gathered(report, kind):
    """Every device computes with its own part of each matrix; what is summed are activations."""
    assert [n for n in report[kind]["gathered"] if n >= report[kind]["part"]] == []
    assert report[kind]["sums"] > 0
    gathered, part = report["control"]  # a program that does gather a matrix is found out
    assert gathered == [part]


@pytest.mark.slow
def test_caches_follow_the_table(report):
    assert report["cache"] == {"llama": True, "encoder": True}


@pytest.mark.slow
def test_a_checkpoint_is_the_same_bits_on_another_mesh(report):
    assert report["restored"] == {"orbax": True, "int8": True, "huggingface": True}


@pytest.mark.slow
def test_saving_leaves_nothing_on_the_host(report):
    """A `jax.Array` keeps the copy that is made of all its parts; saving makes none that outlives
    it.
    """
    after, control, split = report["left"]
    assert after == 0 and control == split > 0


@pytest.mark.slow
def test_a_checkpoint_is_stored_in_the_parts_that_devices_have(report):
    assert report["parts"]


@pytest.mark.slow
def test_a_draft_learns_on_a_mesh_and_a_resumed_job_goes_on_alike(report):
    learns = report["learns"]
    assert learns["same"] and learns["moved"] and learns["compiled"] == 0
    greedy = report["llama"]["one"][:2]
    assert [text[:2] for text in learns["texts"]] == [greedy] * 2


@pytest.mark.slow
def test_a_stream_on_a_mesh_is_the_text_of_a_batch(report):
    assert report["streamed"] == report["llama"]["one"][0]
    # What prefill leaves may lie elsewhere than what a round leaves; from then on nothing is
    # compiled.
    assert report["programs"] <= 2


@pytest.mark.slow
def test_a_job_on_a_mesh_has_the_rows_of_one_device(report):
    assert report["many"]["mesh"] == report["many"]["one"]
    assert [len(tokens) for tokens, *_ in report["many"]["one"]] == [28, 12, 20, 4, 8, 24]


@pytest.mark.slow
def test_two_processes_generate_what_one_generates(report, tmp_path):
    """Under jax.distributed: batches split between processes, and parameters; each process has the
    whole text.

    And they save together: each what it has, or the first what it is sent.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [start(2, "process", port, index, tmp_path) for index in range(2)]
    expected = dict(processes=2, streamed=report["streamed"], encoder=report["encoder"]["one"])
    expected["many"] = report["many"]["one"]
    folders = ["huggingface", "int8", "orbax"]
    expected["saved"] = dict.fromkeys(folders, True) | {"files": folders}
    assert [answer(process) for process in both] == [expected] * 2
