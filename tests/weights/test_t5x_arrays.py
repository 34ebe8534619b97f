"""The arrays of T5X checkpoints: their layouts, and files that are damaged or do harm."""

import dataclasses
import json
import pickle
import shutil
import weakref
from pathlib import Path

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.weights import t5x, t5x_arrays
from jaxspec.weights.orbax import CheckpointError
from tests.weights.t5x_files import (
    BFLOAT16,
    V11,
    arrays_of,
    assert_holds,
    rewrite,
    write_early_orbax,
    write_legacy,
    write_orbax,
    write_zarr,
)

LAYOUTS = {"legacy": write_legacy, "orbax": write_orbax, "early orbax": write_early_orbax}
EACH_LAYOUT = pytest.mark.parametrize("write", LAYOUTS.values(), ids=list(LAYOUTS))


@EACH_LAYOUT
def test_a_bfloat16_checkpoint_is_read_in_either_dtype(write, tmp_path):
    arrays = {name: x.astype(BFLOAT16) for name, x in arrays_of(V11).items()}
    folder = write(tmp_path / "t5", 5, arrays)
    narrow, wide = jaxspec.load(folder, dtype="bfloat16"), jaxspec.load(folder)
    assert narrow.config.dtype == "bfloat16" and t5x.open_model(folder).stored_dtype() == "bfloat16"
    assert narrow.params["head"]["weight"].dtype == jnp.bfloat16
    assert narrow.params["decoder_norm"]["scale"].dtype == jnp.float32
    assert_holds(narrow.params, arrays)
    assert_holds(wide.params, arrays)
    assert {x.dtype.name for x in jax.tree.leaves(wide.params)} == {"float32"}


def test_bfloat16_of_version_2_is_stored_as_its_bits(tmp_path):
    arrays = {name: x.astype(BFLOAT16) for name, x in arrays_of(V11).items()}
    bits = {name: x.view(np.uint16) for name, x in arrays.items()}
    folder = write_legacy(tmp_path / "t5", 5, bits, inside=(), version=2)
    assert_holds(jaxspec.load(folder, dtype="bfloat16").params, arrays)


def test_a_checkpoint_without_its_index(checkpoint):
    (checkpoint / "checkpoint").unlink()
    with pytest.raises(
        CheckpointError, match=r"expected a file checkpoint or state/_METADATA.*; there is target\."
    ):
        jaxspec.load(checkpoint)


def test_absent_arrays_are_listed(checkpoint):
    for name in ("encoder.layers_1.mlp.wo.kernel", "token_embedder.embedding"):
        shutil.rmtree(checkpoint / f"target.{name}")
    with pytest.raises(
        CheckpointError,
        match=r"of the \d+ arrays .* 2 are not there \(target\.encoder.*, target.*Fin",
    ):
        jaxspec.load(checkpoint)


def test_an_absent_chunk_is_not_taken_for_zeros(checkpoint):
    (checkpoint / "target.token_embedder.embedding" / "1.0").unlink()
    with pytest.raises(
        CheckpointError, match=r"token_embedder\.embedding is damaged.*1\.0.* is missing"
    ):
        jaxspec.load(checkpoint)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:10],
        lambda content: content[:-12],
        # gzip has a checksum
        lambda content: content[:-6] + bytes([content[-6] ^ 4]) + content[-5:],
    ],
)
def test_a_damaged_chunk(checkpoint, damage):
    chunk = checkpoint / "target.token_embedder.embedding" / "1.0"
    chunk.write_bytes(damage(chunk.read_bytes()))
    with pytest.raises(CheckpointError, match=r"token_embedder\.embedding is damaged"):
        jaxspec.load(checkpoint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "checkpoint is damaged"),
        (b"\x93\x01\x02\x03", "it holds a value of type list, expected a tree"),
        (
            flax.serialization.msgpack_serialize({"version": 3, "optimizer": {"target": None}}),
            "lists no parameters",
        ),
        (
            flax.serialization.msgpack_serialize({"version": 1, "optimizer": {}}),
            "is of version 1, expected 2 or 3",
        ),
        (
            b'model_checkpoint_path: "model.ckpt-1000000"\n',
            "belongs to a TensorFlow checkpoint.*convert it",
        ),
    ],
)
def test_an_index_that_cannot_be_used(checkpoint, content, message):
    (checkpoint / "checkpoint").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        jaxspec.load(checkpoint)


def test_a_truncated_index(checkpoint):
    index = checkpoint / "checkpoint"
    index.write_bytes(index.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="checkpoint is damaged, or not what it is taken for"):
        jaxspec.load(checkpoint)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda state: (state / "_METADATA").write_text('{"tree_metadata": {'),
            "_METADATA is damaged",
        ),
        (lambda state: (state / "_METADATA").write_text("{}"), "_METADATA is damaged"),
        (lambda state: (state / "manifest.ocdbt").write_bytes(b"?"), "is damaged"),
        (
            lambda state: (state / "manifest.ocdbt").unlink(),
            "is incomplete: of the .* Finish the download",
        ),
        (lambda state: [shutil.rmtree(x) for x in state.rglob("d")], "is damaged|is incomplete"),
    ],
)
def test_a_damaged_orbax_checkpoint(saved_orbax, tmp_path, damage, message):
    folder = shutil.copytree(saved_orbax, tmp_path / "checkpoint_7")
    damage(folder / "state")
    with pytest.raises(CheckpointError, match=message):
        jaxspec.load(folder)


@pytest.fixture(scope="module")
def saved_orbax(tmp_path_factory):
    return write_orbax(tmp_path_factory.mktemp("orbax") / "t5", 7, arrays_of(V11))


def spec_of(target) -> dict:
    return target["token_embedder"]["embedding"]


@pytest.mark.parametrize(
    "where",
    [
        {"driver": "gcs", "bucket": "t5x-dummy-bucket", "path": "target.token_embedder.embedding"},
        {
            "driver": "http",
            "base_url": "http://127.0.0.1:9",
            "path": "/a/target.token_embedder.embedding/",
        },
        {"driver": "file", "path": "../../elsewhere/target.token_embedder.embedding/"},
    ],
)
def test_of_a_spec_only_the_name_is_used(checkpoint, where):
    """No other folder is read, and no network; and specs that were written on Google Cloud are read
    from here.
    """
    elsewhere = checkpoint.parents[1] / "elsewhere" / "target.token_embedder.embedding"
    write_zarr(elsewhere, np.zeros((24, 8), np.float32))
    rewrite(checkpoint, lambda target: spec_of(target).update(kvstore=where))
    np.testing.assert_array_equal(
        jaxspec.load(checkpoint).params["embedding"]["embedding"],
        arrays_of(V11)["token_embedder/embedding"],
    )
    shutil.rmtree(checkpoint / elsewhere.name)
    with pytest.raises(CheckpointError, match="1 are not there"):
        jaxspec.load(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda spec: spec.update(kvstore="file:///elsewhere/"),
            "the spec of token_embedder/embedding has no path",
        ),
        (
            lambda spec: spec["kvstore"].pop("path"),
            "the spec of token_embedder/embedding has no path",
        ),
        (
            lambda spec: spec["kvstore"].update(path="target/../.."),
            r"names an array '\.\.', expected a name like",
        ),
        (lambda spec: spec["kvstore"].update(path="/"), "names an array '', expected a name like"),
        (
            lambda spec: spec.update(driver="json"),
            "expected an array, PLACEHOLDER://name, or the spec of a zarr array",
        ),
        (
            lambda spec: spec["metadata"].update(shape=[24, 9]),
            r"its shape is \[24, 8\], the index says \[24, 9\]",
        ),
    ],
)
def test_a_spec_that_cannot_be_used(checkpoint, change, message):
    rewrite(checkpoint, lambda target: change(spec_of(target)))
    with pytest.raises(CheckpointError, match=message):
        jaxspec.load(checkpoint)


def test_a_placeholder_stays_in_the_folder(tmp_path):
    arrays = arrays_of(V11)
    folder = write_early_orbax(tmp_path, 1, arrays)
    content = flax.serialization.msgpack_restore((folder / "checkpoint").read_bytes())
    content["target"]["token_embedder"]["embedding"] = (
        "PLACEHOLDER://../elsewhere/target.token_embedder.embedding"
    )
    (folder / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(content))
    with pytest.raises(CheckpointError, match=r"the index names an array '\.\./elsewhere"):
        jaxspec.load(folder)


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


def test_nothing_is_unpickled(checkpoint, tmp_path):
    mark = tmp_path / "was here"
    content = pickle.dumps(Malicious(mark))
    metadata = checkpoint / "target.token_embedder.embedding" / ".zarray"
    objects = {"dtype": "|O", "filters": [{"id": "pickle", "protocol": 5}]}
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | objects))
    (metadata.parent / "0.0").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"token_embedder\.embedding is damaged, or not what it is taken for"
    ):
        jaxspec.load(checkpoint)
    packed = flax.serialization.msgpack_serialize(np.ones(2, np.float32)).replace(
        b"float32", b"object_"
    )
    for data in (content, packed):
        (checkpoint / "checkpoint").write_bytes(data)
        with pytest.raises(
            CheckpointError, match="checkpoint is damaged, or not what it is taken for"
        ):
            jaxspec.load(checkpoint)
    assert not mark.exists()


def test_the_host_holds_an_array_at_a_time(saved_run, monkeypatch):
    """An array is let go of before the next but one is read."""
    alive, most = set(), [0]
    arrays = t5x_arrays.arrays

    def watched(name, stored):
        def rows(start, stop):
            x = stored[start:stop]
            alive.add(name)
            weakref.finalize(x, alive.discard, name)
            most[0] = max(most[0], len(alive))
            return x

        return dataclasses.replace(stored, rows=rows)

    def watched_arrays(folder):
        return {
            name: x if "norm" in name or "bias" in name else watched(name, x)
            for name, x in arrays(folder).items()
        }

    monkeypatch.setattr(t5x_arrays, "arrays", watched_arrays)
    jaxspec.load(saved_run)
    assert 1 <= most[0] <= 2
