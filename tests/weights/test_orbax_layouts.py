"""Folders of Orbax that other programs wrote are refused in words of what they hold."""

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

import jaxspec
from jaxspec.weights import orbax_layouts
from jaxspec.weights.tensors import CheckpointError

PARAMS = {"embedding": jnp.ones((8, 4)), "layers_0": {"kernel": jnp.ones((4, 4))}}
TREE = (
    r"a tree of 2 arrays, in one key-value store \(OCDBT\), that begins with embedding, layers_0\."
)


def test_orbax_folders_of_other_programs_are_described(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", PARAMS)
        checkpointer.save(tmp_path / "run" / "checkpoint_3", PARAMS)  # called as T5X calls its own
        checkpointer.save(tmp_path / "state", {"params": PARAMS, "step": 3})
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(tmp_path / "zarr", PARAMS)
    v1.save(tmp_path / "v1", PARAMS)
    for step in (9, 10):
        with ocp.CheckpointManager(tmp_path / "manager") as manager:
            manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(PARAMS)))
    said = {
        "tree": TREE,
        "run": TREE,
        "run/checkpoint_3": TREE,
        "state": "a tree of 3 arrays, .* that begins with params, step",
        "zarr": "a tree of 2 arrays, each a folder of zarr, that begins with embedding, layers_0",
        "v1": f"a step with state, of which state is {TREE}",
        "manager": "the folder of a CheckpointManager, with 10, 9; 10 is a step with state, of "
        f"which state is {TREE}",
        "manager/9": f"a step with state, of which state is {TREE}",
        "manager/9/state": TREE,
    }
    for name, words in said.items():
        with pytest.raises(
            CheckpointError, match=f"is an Orbax checkpoint of another program: {words}"
        ) as error:
            jaxspec.load(tmp_path / name)
        assert "Expected a tree with embedder and layer_0, as Gemma's have, " in str(error.value)
        assert "jaxspec.from_arrays takes its arrays if you map their names" in str(error.value)
        assert "jaxspec.nets.adapters.from_linen or from_nnx" in str(error.value)


def test_damaged_and_other_folders(tmp_path):
    assert orbax_layouts.complaint(tmp_path) is None
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    assert "a step without trees of arrays" in (orbax_layouts.complaint(tmp_path) or "")
    (tmp_path / "_METADATA").write_text("{")
    assert "whose _METADATA cannot be read" in (orbax_layouts.complaint(tmp_path) or "")
    (tmp_path / "flax").mkdir()
    (tmp_path / "flax" / "checkpoint_3").write_bytes(b"...")
    with pytest.raises(
        CheckpointError, match=r"has checkpoint_3, a file as flax\.training\.checkpoints writes it"
    ):
        jaxspec.load(tmp_path / "flax")
