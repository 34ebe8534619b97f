"""T5X checkpoints, written by T5X's description of its layouts and the names of its networks, not
by ours.
"""

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

import flax.serialization
import flax.traverse_util
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
QUICKLY = ts.Context({"file_io_sync": False})  # nothing here has to survive a power failure


class Network(NamedTuple):
    """T5X's own configuration of a T5: examples/t5/network.py, T5Config."""

    vocab_size: int = 24
    emb_dim: int = 8
    num_heads: int = 2
    num_encoder_layers: int = 2
    num_decoder_layers: int = 3
    head_dim: int = 3
    mlp_dim: int = 12
    mlp_activations: tuple = ("gelu", "linear")
    logits_via_embedding: bool = False


V11, V10 = Network(), Network(mlp_activations=("relu",), logits_via_embedding=True)
NETWORKS = pytest.mark.parametrize("network", [V11, V10], ids=["v1.1", "1.0"])


def shapes_of(network: Network) -> dict[str, tuple[int, ...]]:
    """Return the shapes that `init` of that network's modules makes, module by module."""
    n, shapes = network, {}
    inner = n.num_heads * n.head_dim

    def param(*shape, name):
        shapes[name] = shape

    def attention(name):
        for matrix in ("query", "key", "value"):
            param(n.emb_dim, inner, name=f"{name}/{matrix}/kernel")
        param(inner, n.emb_dim, name=f"{name}/out/kernel")

    def mlp(name):
        gated = len(n.mlp_activations) > 1
        for i in range(len(n.mlp_activations)):
            param(
                n.emb_dim, n.mlp_dim, name=f"{name}/wi_{i}/kernel" if gated else f"{name}/wi/kernel"
            )
        param(n.mlp_dim, n.emb_dim, name=f"{name}/wo/kernel")

    def norm(name):
        param(n.emb_dim, name=f"{name}/scale")

    param(n.vocab_size, n.emb_dim, name="token_embedder/embedding")
    param(n.num_heads, 32, name="encoder/relpos_bias/rel_embedding")
    for i in range(n.num_encoder_layers):
        norm(f"encoder/layers_{i}/pre_attention_layer_norm")
        attention(f"encoder/layers_{i}/attention")
        norm(f"encoder/layers_{i}/pre_mlp_layer_norm")
        mlp(f"encoder/layers_{i}/mlp")
    norm("encoder/encoder_norm")
    param(n.num_heads, 32, name="decoder/relpos_bias/rel_embedding")
    for i in range(n.num_decoder_layers):
        norm(f"decoder/layers_{i}/pre_self_attention_layer_norm")
        attention(f"decoder/layers_{i}/self_attention")
        norm(f"decoder/layers_{i}/pre_cross_attention_layer_norm")
        attention(f"decoder/layers_{i}/encoder_decoder_attention")
        norm(f"decoder/layers_{i}/pre_mlp_layer_norm")
        mlp(f"decoder/layers_{i}/mlp")
    norm("decoder/decoder_norm")
    if not n.logits_via_embedding:
        param(n.emb_dim, n.vocab_size, name="decoder/logits_dense/kernel")
    return shapes


def arrays_of(network: Network, seed: int = 0) -> dict[str, np.ndarray]:
    """Random numbers of these shapes, small enough for float32 to be within 2e-5 of float64."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32) / 2
        for name, shape in shapes_of(network).items()
    }


def scalable(
    arrays: dict[str, np.ndarray], network: Network, stacked: bool = True
) -> dict[str, np.ndarray]:
    """The same model as examples/scalable_t5 has it: biases in each layer, heads apart, layers
    along axis 1.
    """
    heads, renamed = (network.num_heads, network.head_dim), {}
    for side, layers in (
        ("encoder", network.num_encoder_layers),
        ("decoder", network.num_decoder_layers),
    ):
        layer_arrays = [{} for _ in range(layers)]
        for name, x in arrays.items():
            if name.startswith(f"{side}/layers_"):
                _, layer, rest = name.split("/", 2)
                if "attention/" in rest:
                    x = x.reshape(*heads, -1) if "/out/" in rest else x.reshape(-1, *heads)
                layer_arrays[int(layer.removeprefix("layers_"))][rest] = x
        for layer in layer_arrays:
            layer["relpos_bias/rel_embedding"] = arrays[f"{side}/relpos_bias/rel_embedding"]
        if stacked:
            renamed |= {
                f"{side}/{side}/{rest}": np.stack([layer[rest] for layer in layer_arrays], axis=1)
                for rest in layer_arrays[0]
            }
        else:
            renamed |= {
                f"{side}/layers_{i}/{rest}": x
                for i, layer in enumerate(layer_arrays)
                for rest, x in layer.items()
            }
    rest = (
        "token_embedder/",
        "encoder/encoder_norm",
        "decoder/decoder_norm",
        "decoder/logits_dense",
    )
    return renamed | {name: x for name, x in arrays.items() if name.startswith(rest)}


def tree(arrays: dict) -> dict:
    return flax.traverse_util.unflatten_dict(arrays, sep="/")


def write_zarr(folder: Path, x: np.ndarray) -> dict:
    """An array in zarr, in chunks of half its rows, and the spec that T5X keeps of it."""
    chunks = [x.shape[0] // 2 if x.shape[0] % 2 == 0 else x.shape[0], *x.shape[1:]]
    metadata = {"compressor": {"id": "gzip"}, "shape": x.shape, "chunks": chunks}
    spec = {"driver": "zarr", "dtype": x.dtype.name, "metadata": metadata}
    where = {"kvstore": {"driver": "file", "path": f"{folder}/"}}
    ts.open(spec | where, create=True, open=True, context=QUICKLY).result().write(x).result()
    return spec | {
        "kvstore": {"driver": "gfile", "path": f"{folder.name}/"},
        "metadata": json_like(metadata),
    }


def json_like(table):
    return json.loads(json.dumps(table))


def write_legacy(
    run: Path, step: int, arrays: dict, inside=("encoder_norm", "relpos"), version=3
) -> Path:
    """T5X's Checkpointer: arrays that are partitioned lie apart, the rest in msgpack, the folder
    gets its name last.
    """
    beside = run / f"checkpoint_{step}.tmp-1700000000"
    beside.mkdir(parents=True)

    def leaf(name, x):
        return (
            x
            if any(part in name for part in inside)
            else write_zarr(beside / f"target.{name.replace('/', '.')}", x)
        )

    target = {name: leaf(name, x) for name, x in arrays.items()}
    # Adafactor's state, which nothing here has a use for: its arrays are not even there.
    gone = {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": {"driver": "gfile", "path": "state.v/"},
    }
    state = {
        "step": np.int32(step),
        "param_states": {"token_embedder": {"v": gone | {"metadata": {"shape": [1]}}}},
    }
    content = {"version": version, "optimizer": {"target": tree(target), "state": state}}
    (beside / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(content))
    return beside.rename(run / f"checkpoint_{step}")


def write_orbax(run: Path, step: int, arrays: dict) -> Path:
    """T5X's OrbaxCheckpointManagerInterface: an item "state", in a key-value store."""
    state = {
        "target": tree(arrays),
        "state": {"step": np.int32(step), "param_states": {"none": None, "empty": {}}},
    }
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
    options = ocp.CheckpointManagerOptions(
        step_prefix="checkpoint", enable_async_checkpointing=False
    )
    with contextlib.closing(
        ocp.CheckpointManager(run, options=options, item_handlers={"state": handler})
    ) as manager:
        manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
    return run / f"checkpoint_{step}"


def write_early_orbax(run: Path, step: int, arrays: dict) -> Path:
    """Write the layout that Orbax had before: an index in msgpack with placeholders, and zarr
    beside it.
    """
    folder = run / f"checkpoint_{step}"
    folder.mkdir(parents=True)
    names = {name: f"target.{name.replace('/', '.')}" for name in arrays}
    for name, x in arrays.items():
        write_zarr(folder / names[name], x)
    target = {name: f"PLACEHOLDER://{stored}" for name, stored in names.items()}
    content = {
        "target": tree(target),
        "state": {"step": "PLACEHOLDER://state.step"},
        "flax_mutables": None,
    }
    (folder / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(content))
    return folder


def assert_holds(params, arrays: dict[str, np.ndarray]):
    """Some of ours against T5X's, by hand: a kernel, a bias, what is stored as it is."""
    f = arrays
    np.testing.assert_array_equal(
        params["decoder_2"]["cross"]["out"]["weight"],
        f["decoder/layers_2/encoder_decoder_attention/out/kernel"].T,
    )
    np.testing.assert_array_equal(
        params["encoder_bias"]["table"], f["encoder/relpos_bias/rel_embedding"].T
    )
    np.testing.assert_array_equal(params["embedding"]["embedding"], f["token_embedder/embedding"])
    np.testing.assert_array_equal(
        params["decoder_0"]["cross_norm"]["scale"],
        f["decoder/layers_0/pre_cross_attention_layer_norm/scale"],
    )


def rewrite(checkpoint: Path, change) -> None:
    """Changes what the index says of the model."""
    content = flax.serialization.msgpack_restore((checkpoint / "checkpoint").read_bytes())
    change(content["optimizer"]["target"])
    (checkpoint / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(content))
