"""T5X checkpoints, written here by T5X's description of its layouts and the names of its networks, not by ours."""

import contextlib
import functools
import json
import pickle
import shutil
import weakref
from pathlib import Path
from typing import NamedTuple

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from safetensors.numpy import load_file
from typer.testing import CliRunner

import jaxspec
from jaxspec import sharding
from jaxspec.cli.main import app
from jaxspec.nets.t5 import T5, T5Config
from jaxspec.testing import word_tokenizer
from jaxspec.weights import orbax, t5x, t5x_arrays, t5x_names, vocabulary
from jaxspec.weights.hf_families import t5 as family
from jaxspec.weights.orbax import CheckpointError

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
    """What `init` of that network's modules makes, module by module."""
    n, found = network, {}
    inner = n.num_heads * n.head_dim

    def param(*shape, name):
        found[name] = shape

    def attention(name):
        for matrix in ("query", "key", "value"):
            param(n.emb_dim, inner, name=f"{name}/{matrix}/kernel")
        param(inner, n.emb_dim, name=f"{name}/out/kernel")

    def mlp(name):
        gated = len(n.mlp_activations) > 1
        for i in range(len(n.mlp_activations)):
            param(n.emb_dim, n.mlp_dim, name=f"{name}/wi_{i}/kernel" if gated else f"{name}/wi/kernel")
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
    return found


def arrays_of(network: Network, seed: int = 0) -> dict[str, np.ndarray]:
    """Random numbers of these shapes, small enough for float32 to be within 2e-5 of float64."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) / 2 for name, shape in shapes_of(network).items()}


def scalable(found: dict[str, np.ndarray], network: Network, stacked: bool = True) -> dict[str, np.ndarray]:
    """The same model as examples/scalable_t5 has it: biases in each layer, heads apart, layers along axis 1."""
    heads, made = (network.num_heads, network.head_dim), {}
    for side, layers in (("encoder", network.num_encoder_layers), ("decoder", network.num_decoder_layers)):
        each = [{} for _ in range(layers)]
        for name, x in found.items():
            if name.startswith(f"{side}/layers_"):
                _, layer, rest = name.split("/", 2)
                if "attention/" in rest:
                    x = x.reshape(*heads, -1) if "/out/" in rest else x.reshape(-1, *heads)
                each[int(layer.removeprefix("layers_"))][rest] = x
        for layer in each:
            layer["relpos_bias/rel_embedding"] = found[f"{side}/relpos_bias/rel_embedding"]
        if stacked:
            made |= {f"{side}/{side}/{rest}": np.stack([layer[rest] for layer in each], axis=1) for rest in each[0]}
        else:
            made |= {f"{side}/layers_{i}/{rest}": x for i, layer in enumerate(each) for rest, x in layer.items()}
    rest = ("token_embedder/", "encoder/encoder_norm", "decoder/decoder_norm", "decoder/logits_dense")
    return made | {name: x for name, x in found.items() if name.startswith(rest)}


def t5x_logits(found: dict[str, np.ndarray], network: Network, inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """What examples/t5/network.py computes of [batch, length] inputs (0 is padding) and decoder inputs, in NumPy."""

    def norm(x, name):
        return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) * found[f"{name}/scale"]

    def bias(side, queries, keys):
        table, distance = found[f"{side}/relpos_bias/rel_embedding"], np.arange(keys) - np.arange(queries)[:, None]
        buckets, start = (16, np.where(distance > 0, 16, 0)) if side == "encoder" else (32, 0)
        distance = np.abs(distance) if side == "encoder" else np.maximum(-distance, 0)
        exact = buckets // 2
        far = exact + np.log(np.maximum(distance, 1) / exact) / np.log(128 / exact) * (buckets - exact)
        bucket = start + np.where(distance < exact, distance, np.minimum(far.astype(int), buckets - 1))
        return table[:, bucket]

    def attention(x, memory, name, mask, added=0.0):
        def project(y, matrix):
            y = y @ found[f"{name}/{matrix}/kernel"]
            return y.reshape(*y.shape[:2], network.num_heads, network.head_dim)

        scores = np.einsum("bqhd,bkhd->bhqk", project(x, "query"), project(memory, "key")) + added
        scores = np.where(mask, scores, -1e10)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("bhqk,bkhd->bqhd", weights, project(memory, "value"))
        return mixed.reshape(*mixed.shape[:2], -1) @ found[f"{name}/out/kernel"]

    def mlp(x, name):
        if network.mlp_activations == ("relu",):
            hidden = np.maximum(x @ found[f"{name}/wi/kernel"], 0)
        else:
            gate, linear = (x @ found[f"{name}/wi_{i}/kernel"] for i in (0, 1))
            acts = {"gelu": lambda y: 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))}
            acts["silu"] = lambda y: y / (1 + np.exp(-y))
            hidden = acts[network.mlp_activations[0]](gate) * linear
        return hidden @ found[f"{name}/wo/kernel"]

    found = {name: x.astype(np.float64) for name, x in found.items()}
    length, steps = inputs.shape[1], outputs.shape[1]
    real = (inputs > 0)[:, None, None, :]
    x, added = found["token_embedder/embedding"][inputs], bias("encoder", length, length)
    for i in range(network.num_encoder_layers):
        name = f"encoder/layers_{i}"
        y = norm(x, f"{name}/pre_attention_layer_norm")
        x = x + attention(y, y, f"{name}/attention", real, added)
        x = x + mlp(norm(x, f"{name}/pre_mlp_layer_norm"), f"{name}/mlp")
    encoded = norm(x, "encoder/encoder_norm")
    x, added = found["token_embedder/embedding"][outputs], bias("decoder", steps, steps)
    causal = np.tril(np.ones((steps, steps), bool))
    for i in range(network.num_decoder_layers):
        name = f"decoder/layers_{i}"
        y = norm(x, f"{name}/pre_self_attention_layer_norm")
        x = x + attention(y, y, f"{name}/self_attention", causal, added)
        y = norm(x, f"{name}/pre_cross_attention_layer_norm")
        x = x + attention(y, encoded, f"{name}/encoder_decoder_attention", real)
        x = x + mlp(norm(x, f"{name}/pre_mlp_layer_norm"), f"{name}/mlp")
    x = norm(x, "decoder/decoder_norm")
    if network.logits_via_embedding:
        return x @ found["token_embedder/embedding"].T / np.sqrt(network.emb_dim)
    return x @ found["decoder/logits_dense/kernel"]


def tree(found: dict) -> dict:
    return flax.traverse_util.unflatten_dict(found, sep="/")


def write_zarr(folder: Path, x: np.ndarray) -> dict:
    """An array in zarr, in chunks of half its rows, and the spec that T5X keeps of it."""
    chunks = [x.shape[0] // 2 if x.shape[0] % 2 == 0 else x.shape[0], *x.shape[1:]]
    metadata = {"compressor": {"id": "gzip"}, "shape": x.shape, "chunks": chunks}
    spec = {"driver": "zarr", "dtype": x.dtype.name, "metadata": metadata}
    where = {"kvstore": {"driver": "file", "path": f"{folder}/"}}
    ts.open(spec | where, create=True, open=True, context=QUICKLY).result().write(x).result()
    return spec | {"kvstore": {"driver": "gfile", "path": f"{folder.name}/"}, "metadata": json_like(metadata)}


def json_like(table):
    return json.loads(json.dumps(table))


def write_legacy(run: Path, step: int, found: dict, inside=("encoder_norm", "relpos"), version=3) -> Path:
    """T5X's Checkpointer: arrays that are partitioned lie apart, the rest in msgpack, the folder gets its name last."""
    beside = run / f"checkpoint_{step}.tmp-1700000000"
    beside.mkdir(parents=True)

    def leaf(name, x):
        return x if any(part in name for part in inside) else write_zarr(beside / f"target.{name.replace('/', '.')}", x)

    target = {name: leaf(name, x) for name, x in found.items()}
    # Adafactor's state, which nothing here has a use for: its arrays are not even there.
    gone = {"driver": "zarr", "dtype": "float32", "kvstore": {"driver": "gfile", "path": "state.v/"}}
    state = {"step": np.int32(step), "param_states": {"token_embedder": {"v": gone | {"metadata": {"shape": [1]}}}}}
    content = {"version": version, "optimizer": {"target": tree(target), "state": state}}
    (beside / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(content))
    return beside.rename(run / f"checkpoint_{step}")


def write_orbax(run: Path, step: int, found: dict) -> Path:
    """T5X's OrbaxCheckpointManagerInterface: an item "state", in a key-value store."""
    state = {"target": tree(found), "state": {"step": np.int32(step), "param_states": {"none": None, "empty": {}}}}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
    options = ocp.CheckpointManagerOptions(step_prefix="checkpoint", enable_async_checkpointing=False)
    with contextlib.closing(ocp.CheckpointManager(run, options=options, item_handlers={"state": handler})) as manager:
        manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
    return run / f"checkpoint_{step}"


def write_early_orbax(run: Path, step: int, found: dict) -> Path:
    """As Orbax had it before: an index in msgpack with placeholders, and zarr beside it."""
    folder = run / f"checkpoint_{step}"
    folder.mkdir(parents=True)
    names = {name: f"target.{name.replace('/', '.')}" for name in found}
    for name, x in found.items():
        write_zarr(folder / names[name], x)
    target = {name: f"PLACEHOLDER://{stored}" for name, stored in names.items()}
    content = {"target": tree(target), "state": {"step": "PLACEHOLDER://state.step"}, "flax_mutables": None}
    (folder / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(content))
    return folder


LAYOUTS = {"legacy": write_legacy, "orbax": write_orbax, "early orbax": write_early_orbax}
EACH_LAYOUT = pytest.mark.parametrize("write", LAYOUTS.values(), ids=list(LAYOUTS))


def assert_holds(params, found: dict[str, np.ndarray]):
    """Some of ours against T5X's, by hand: a kernel, a bias, what is stored as it is."""
    f = found
    np.testing.assert_array_equal(
        params["decoder_2"]["cross"]["out"]["weight"], f["decoder/layers_2/encoder_decoder_attention/out/kernel"].T
    )
    np.testing.assert_array_equal(params["encoder_bias"]["table"], f["encoder/relpos_bias/rel_embedding"].T)
    np.testing.assert_array_equal(params["embedding"]["embedding"], f["token_embedder/embedding"])
    np.testing.assert_array_equal(
        params["decoder_0"]["cross_norm"]["scale"], f["decoder/layers_0/pre_cross_attention_layer_norm/scale"]
    )


@functools.cache
def program(config):
    return jax.jit(T5(config).apply)


def logits(model, inputs, outputs):
    prompt = jaxspec.Prompt(jnp.array(inputs), jnp.array((inputs > 0).sum(1)))
    return program(model.config)({"params": model.params}, prompt, jnp.array(outputs))


INPUTS = np.array([[5, 3, 9, 1, 7], [2, 8, 1, 0, 0]], np.int32)
OUTPUTS = np.array([[0, 4, 4, 17, 2, 6], [0, 9, 1, 23, 11, 3]], np.int32)


@pytest.mark.slow
@NETWORKS
def test_the_model_that_was_saved(network, tmp_path):
    """Both layouts of folders, and T5X's other network: one and the same model, and it is what T5X computes."""
    found = arrays_of(network)
    legacy = jaxspec.load(write_legacy(tmp_path / "t5", 1000, found))
    assert legacy.name == "t5/checkpoint_1000" and legacy.tokenizer is None
    expected = t5x_logits(found, network, INPUTS, OUTPUTS)
    got = logits(legacy, INPUTS, OUTPUTS)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    assert_holds(legacy.params, found)
    others = {
        "orbax": write_orbax(tmp_path / "orbax", 1000, found),
        "early": write_early_orbax(tmp_path / "early", 1000, found),
        "stacked": write_legacy(tmp_path / "stacked", 1, scalable(found, network)),
        "unrolled": write_orbax(tmp_path / "unrolled", 1, scalable(found, network, stacked=False)),
    }
    for folder in others.values():
        model = jaxspec.load(folder)
        assert model.config == legacy.config
        jax.tree.map(np.testing.assert_array_equal, model.params, legacy.params)


@NETWORKS
def test_the_network_is_read_off_the_arrays(network, tmp_path):
    n, gated = network, network == V11
    expected = T5Config(24, 8, 12, 2, 3, 2, 3, "gelu" if gated else "relu", gated, tied_head=not gated)
    assert jaxspec.load(write_early_orbax(tmp_path, 0, arrays_of(n))).config == expected


def test_published_sizes_are_told_by_their_shapes():
    """Names and shapes of T5X's configurations of the published models; nothing is read."""
    sizes = {"t5-small": (512, 8, 6, 6, 64, 2048), "t5-v1_1-xl": (2048, 32, 24, 24, 64, 5120)}
    sizes |= {"mt5-base": (768, 12, 12, 12, 64, 2048), "byt5-small": (1472, 6, 12, 4, 64, 3584)}
    vocabulary = {"mt5-base": 250_112, "byt5-small": 384}
    for name, numbers in sizes.items():
        small = Network(vocabulary.get(name, 32128), *numbers)
        network = small._replace(mlp_activations=("relu",), logits_via_embedding=True) if name == "t5-small" else small
        shapes = shapes_of(network)
        found = {key: t5x_arrays.Stored(shape, "float32", pytest.fail) for key, shape in shapes.items()}
        config, layout = t5x_names.infer(Path(name), found)
        assert config == (family.SIZES | family.MT5_SIZES)[name]
        assert {key: entry.shape for key, entry in t5x_names.entries(config, layout).items()} == shapes


@EACH_LAYOUT
def test_a_bfloat16_checkpoint_is_read_in_either_dtype(write, tmp_path):
    found = {name: x.astype(BFLOAT16) for name, x in arrays_of(V11).items()}
    folder = write(tmp_path / "t5", 5, found)
    narrow, wide = jaxspec.load(folder, dtype="bfloat16"), jaxspec.load(folder)
    assert narrow.config.dtype == "bfloat16" and t5x.stored_dtype(folder) == "bfloat16"
    assert narrow.params["head"]["weight"].dtype == jnp.bfloat16
    assert narrow.params["decoder_norm"]["scale"].dtype == jnp.float32
    assert_holds(narrow.params, found)
    assert_holds(wide.params, found)
    assert {x.dtype.name for x in jax.tree.leaves(wide.params)} == {"float32"}


def test_bfloat16_of_version_2_is_stored_as_its_bits(tmp_path):
    found = {name: x.astype(BFLOAT16) for name, x in arrays_of(V11).items()}
    bits = {name: x.view(np.uint16) for name, x in found.items()}
    folder = write_legacy(tmp_path / "t5", 5, bits, inside=(), version=2)
    assert_holds(jaxspec.load(folder, dtype="bfloat16").params, found)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with a legacy checkpoint."""
    return write_legacy(tmp_path_factory.mktemp("saved") / "t5", 1000, arrays_of(V11)).parent


@pytest.fixture
def run(saved, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "t5"))


@pytest.fixture
def checkpoint(run) -> Path:
    return run / "checkpoint_1000"


def rewrite(checkpoint: Path, change) -> None:
    """Changes what the index says of the model."""
    content = flax.serialization.msgpack_restore((checkpoint / "checkpoint").read_bytes())
    change(content["optimizer"]["target"])
    (checkpoint / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(content))


def test_a_run_is_its_newest_complete_checkpoint(run):
    newest = write_legacy(run, 1200, arrays_of(V11, seed=1))
    (run / "checkpoint_900").mkdir()
    (run / "checkpoint_1300").mkdir()  # a download that was cut short: the index is not there
    (run / "checkpoint_1400.tmp-1700000000").mkdir()
    (run / "config.gin").touch()
    model = jaxspec.load(run)
    assert model.name == "t5/checkpoint_1200"
    np.testing.assert_array_equal(
        model.params["head"]["weight"], arrays_of(V11, seed=1)["decoder/logits_dense/kernel"].T
    )
    (newest / "target.decoder.logits_dense.kernel" / ".zarray").unlink()
    with pytest.raises(CheckpointError, match="checkpoint_1200 is incomplete"):
        jaxspec.load(run)


@pytest.mark.parametrize("suffix", [".tmp-1700000000", ".orbax-checkpoint-tmp-1700000000", ".orbax-checkpoint-tmp"])
def test_what_was_never_finished_is_refused(checkpoint, suffix):
    left = checkpoint.rename(f"{checkpoint}{suffix}")
    with pytest.raises(CheckpointError, match=r"checkpoint_1000\..*tmp.* was never finished.* Load an earlier one"):
        jaxspec.load(left)
    with pytest.raises(CheckpointError, match=r"has no complete T5X checkpoint: .* there is checkpoint_1000\..*tmp"):
        jaxspec.load(left.parent)


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*nowhere: expected a folder that T5X wrote"):
        t5x.restore(tmp_path / "nowhere")


def test_a_checkpoint_without_its_index(checkpoint):
    (checkpoint / "checkpoint").unlink()
    with pytest.raises(CheckpointError, match=r"expected a file checkpoint or state/_METADATA.*; there is target\."):
        jaxspec.load(checkpoint)


def test_absent_arrays_are_listed(checkpoint):
    for name in ("encoder.layers_1.mlp.wo.kernel", "token_embedder.embedding"):
        shutil.rmtree(checkpoint / f"target.{name}")
    with pytest.raises(CheckpointError, match=r"of the \d+ arrays .* 2 are not there \(target\.encoder.*, target.*Fin"):
        jaxspec.load(checkpoint)


def test_an_absent_chunk_is_not_taken_for_zeros(checkpoint):
    (checkpoint / "target.token_embedder.embedding" / "1.0").unlink()
    with pytest.raises(CheckpointError, match=r"token_embedder\.embedding is damaged.*1\.0.* is missing"):
        jaxspec.load(checkpoint)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:10],
        lambda content: content[:-12],
        lambda content: content[:-6] + bytes([content[-6] ^ 4]) + content[-5:],  # gzip has a checksum
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
        (flax.serialization.msgpack_serialize({"version": 3, "optimizer": {"target": None}}), "lists no parameters"),
        (flax.serialization.msgpack_serialize({"version": 1, "optimizer": {}}), "is of version 1, expected 2 or 3"),
        (b'model_checkpoint_path: "model.ckpt-1000000"\n', "belongs to a TensorFlow checkpoint.*convert it"),
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
        (lambda state: (state / "_METADATA").write_text('{"tree_metadata": {'), "_METADATA is damaged"),
        (lambda state: (state / "_METADATA").write_text("{}"), "_METADATA is damaged"),
        (lambda state: (state / "manifest.ocdbt").write_bytes(b"?"), "is damaged"),
        (lambda state: (state / "manifest.ocdbt").unlink(), "is incomplete: of the .* Finish the download"),
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


def test_arrays_of_another_model_are_listed(checkpoint):
    def change(target):
        del target["decoder"]["layers_1"]["mlp"]["wi_1"]
        target["decoder"]["layers_1"]["mlp"]["wi_2"] = {"kernel": np.ones((8, 12), np.float32)}
        target["encoder"]["encoder_norm"]["scale"] = np.ones(9, np.float32)

    rewrite(checkpoint, change)
    with pytest.raises(CheckpointError) as caught:
        jaxspec.load(checkpoint)
    message = str(caught.value)
    assert "checkpoint_1000: the arrays are not those of the T5 of their names and shapes" in message
    assert "missing (1): decoder/layers_1/mlp/wi_1/kernel" in message
    assert "unexpected (1): decoder/layers_1/mlp/wi_2/kernel" in message
    assert "wrong (1): encoder/encoder_norm/scale is [9], expected [8]" in message


def test_no_t5_at_all(checkpoint):
    rewrite(checkpoint, lambda target: target.pop("token_embedder"))
    with pytest.raises(CheckpointError, match=r"holds no T5 of T5X's examples: token_embedder/embedding is absent. Th"):
        jaxspec.load(checkpoint)


def test_heads_that_do_not_fit(checkpoint):
    bias = {"rel_embedding": np.ones((5, 32), np.float32)}
    rewrite(checkpoint, lambda target: target["encoder"].update(relpos_bias=bias))
    with pytest.raises(CheckpointError, match=r"query/kernel is \[8, 6\], which is not made for the 5 heads"):
        jaxspec.load(checkpoint)


def test_integers_are_refused(checkpoint):
    rewrite(checkpoint, lambda target: target["encoder"]["encoder_norm"].update(scale=np.ones(8, np.int8)))
    with pytest.raises(CheckpointError, match=r"encoder/encoder_norm/scale is int8, expected one of float32, bfloat16"):
        jaxspec.load(checkpoint)


@pytest.mark.parametrize("stacked", [True, False])
def test_biases_of_each_layer_are_refused_where_they_differ(stacked, tmp_path):
    """As in umT5, which is another network."""
    found = scalable(arrays_of(V11), V11, stacked)
    name = f"decoder/{'decoder' if stacked else 'layers_1'}/relpos_bias/rel_embedding"
    found[name] = found[name].copy()
    found[name][0, -1] += 1
    with pytest.raises(CheckpointError, match=f"{name} differs from layer to layer, as in umT5"):
        jaxspec.load(write_legacy(tmp_path, 1, found, inside=("",)))


def spec_of(target) -> dict:
    return target["token_embedder"]["embedding"]


@pytest.mark.parametrize(
    "where",
    [
        {"driver": "gcs", "bucket": "t5x-dummy-bucket", "path": "target.token_embedder.embedding"},
        {"driver": "http", "base_url": "http://127.0.0.1:9", "path": "/a/target.token_embedder.embedding/"},
        {"driver": "file", "path": "../../elsewhere/target.token_embedder.embedding/"},
    ],
)
def test_of_a_spec_only_the_name_is_used(checkpoint, where):
    """No other folder is read, and no network; and specs that were written on Google Cloud are read from here."""
    elsewhere = checkpoint.parents[1] / "elsewhere" / "target.token_embedder.embedding"
    write_zarr(elsewhere, np.zeros((24, 8), np.float32))
    rewrite(checkpoint, lambda target: spec_of(target).update(kvstore=where))
    np.testing.assert_array_equal(
        jaxspec.load(checkpoint).params["embedding"]["embedding"], arrays_of(V11)["token_embedder/embedding"]
    )
    shutil.rmtree(checkpoint / elsewhere.name)
    with pytest.raises(CheckpointError, match="1 are not there"):
        jaxspec.load(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec.update(kvstore="file:///elsewhere/"), "the spec of token_embedder/embedding has no path"),
        (lambda spec: spec["kvstore"].pop("path"), "the spec of token_embedder/embedding has no path"),
        (lambda spec: spec["kvstore"].update(path="target/../.."), r"names an array '\.\.', expected a name like"),
        (lambda spec: spec["kvstore"].update(path="/"), "names an array '', expected a name like"),
        (lambda spec: spec.update(driver="json"), "expected an array, PLACEHOLDER://name, or the spec of a zarr array"),
        (lambda spec: spec["metadata"].update(shape=[24, 9]), r"its shape is \[24, 8\], the index says \[24, 9\]"),
    ],
)
def test_a_spec_that_cannot_be_used(checkpoint, change, message):
    rewrite(checkpoint, lambda target: change(spec_of(target)))
    with pytest.raises(CheckpointError, match=message):
        jaxspec.load(checkpoint)


def test_a_placeholder_stays_in_the_folder(tmp_path):
    found = arrays_of(V11)
    folder = write_early_orbax(tmp_path, 1, found)
    content = flax.serialization.msgpack_restore((folder / "checkpoint").read_bytes())
    content["target"]["token_embedder"]["embedding"] = "PLACEHOLDER://../elsewhere/target.token_embedder.embedding"
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
    with pytest.raises(CheckpointError, match=r"token_embedder\.embedding is damaged, or not what it is taken for"):
        jaxspec.load(checkpoint)
    packed = flax.serialization.msgpack_serialize(np.ones(2, np.float32)).replace(b"float32", b"object_")
    for data in (content, packed):
        (checkpoint / "checkpoint").write_bytes(data)
        with pytest.raises(CheckpointError, match="checkpoint is damaged, or not what it is taken for"):
            jaxspec.load(checkpoint)
    assert not mark.exists()


def test_a_config_json_goes_before_what_shapes_say(run):
    """Of the activation they say nothing."""
    network = V11._replace(mlp_activations=("silu", "linear"))
    table = family.write(T5Config(24, 8, 12, 2, 3, 2, 3, "silu", max_distance=128, start_token=2))
    (run / "config.json").write_text(json.dumps(table))
    model = jaxspec.load(run)
    assert (model.config.activation, model.config.start_token) == ("silu", 2)
    expected = t5x_logits(arrays_of(network), network, INPUTS, OUTPUTS)
    got = logits(model, INPUTS, OUTPUTS)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    (run / "config.json").write_text(json.dumps(table | {"tie_word_embeddings": True}))  # as transformers 5 has it
    assert jaxspec.load(run).config == model.config
    (run / "config.json").write_text(json.dumps(table | {"num_decoder_layers": 2}))
    with pytest.raises(CheckpointError, match=r"of the T5 of .*config\.json:\n  unexpected \(\d+\): decoder/layers_2/"):
        jaxspec.load(run)
    other = {"model_type": "gpt2", "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1, "vocab_size": 4}
    (run / "config.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match=r"config\.json is not a T5's, but beside a T5X checkpoint"):
        jaxspec.load(run)


def test_weights_of_hugging_face_go_first(run):
    """A file "checkpoint" beside them, as TensorFlow writes, changes nothing."""
    (run / "config.json").write_text("{}")
    (run / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"config\.json describes no model"):
        jaxspec.load(run)


def words():
    return word_tokenizer(["<pad>", "</s>", "<unk>", "the", "old", "dog"], pad_token="<pad>")


@pytest.mark.parametrize("where", ["", "checkpoint_1000"])
def test_a_tokenizer_beside(run, where):
    words().save_pretrained(run / where)
    for folder in (run, run / "checkpoint_1000"):
        assert jaxspec.load(folder).tokenizer("the old dog")["input_ids"] == [3, 4, 5]
        found = vocabulary.load(folder)
        assert (found.folder.name, found.size, found.start_token) == ("checkpoint_1000", 24, 0)
        assert found.tokenizer("the old dog")["input_ids"] == [3, 4, 5]


def test_a_vocabulary_needs_a_tokenizer(run):
    with pytest.raises(CheckpointError, match=r"checkpoint_1000 has no tokenizer: expected one of tokenizer\.json, "):
        vocabulary.load(run)


@pytest.mark.slow
def test_what_was_read_decodes(run):
    """Prompted with ids, it says what T5X's network would say."""
    row = [0]
    for _ in range(6):
        row.append(int(t5x_logits(arrays_of(V11), V11, INPUTS[:1], np.array([row]))[0, -1].argmax()))
    prompt = jaxspec.Prompt(jnp.array(INPUTS[:1]), jnp.array([5]))
    out = jaxspec.generate(jaxspec.load(run), prompt, eos_ids=(), max_new_tokens=6)
    assert out.tokens[0].tolist() == row[1:]


def test_placed_on_a_mesh(run):
    mesh = sharding.mesh("data=1,model=1")
    model, plain = jaxspec.load(run, mesh=mesh), jaxspec.load(run)
    found = sharding.parameters(plain.params, plain.config, mesh)
    assert jax.tree.all(jax.tree.map(lambda x, where: x.sharding == where, model.params, found))
    jax.tree.map(np.testing.assert_array_equal, model.params, plain.params)


def test_the_host_holds_an_array_at_a_time(saved, monkeypatch):
    """An array is let go of before the next but one is read."""
    alive, most = set(), [0]
    arrays = t5x_arrays.arrays

    def watched(name, stored):
        def read():
            x = stored.read()
            alive.add(name)
            weakref.finalize(x, alive.discard, name)
            most[0] = max(most[0], len(alive))
            return x

        return stored._replace(read=read)

    def found(folder):
        return {name: x if "norm" in name or "bias" in name else watched(name, x) for name, x in arrays(folder).items()}

    monkeypatch.setattr(t5x_arrays, "arrays", found)
    t5x.restore(saved)
    assert 1 <= most[0] <= 2


def converted(*arguments: object):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


@pytest.mark.slow
def test_a_checkpoint_is_converted_to_either_format(run, tmp_path):
    """To a Hugging Face folder unless it is said otherwise; back from there it is the same model."""
    result = converted(run, tmp_path / "theirs", "--json")
    assert result.exit_code == 0, result.output
    assert {"format": "huggingface", "dtype": "float32"}.items() <= json.loads(result.stdout).items()
    kernel = arrays_of(V11)["decoder/layers_1/mlp/wi_0/kernel"]
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    np.testing.assert_array_equal(theirs["decoder.block.1.layer.2.DenseReluDense.wi_0.weight"], kernel.T)
    result = converted(run, tmp_path / "ours", "--format", "jaxspec")
    assert result.exit_code == 2 and "t5/checkpoint_1000 has no tokenizer" in result.stderr
    assert "choose --format huggingface" in result.stderr
    words().save_pretrained(run)
    assert converted(run, tmp_path / "ours", "--format", "jaxspec").exit_code == 0
    assert orbax.read_manifest(tmp_path / "ours").about == {"converted_from": "t5/checkpoint_1000"}
    plain = jaxspec.load(run)
    for name in ("theirs", "ours"):
        jax.tree.map(np.testing.assert_array_equal, jaxspec.load(tmp_path / name).params, plain.params)


def test_convert_keeps_bfloat16(tmp_path):
    found = {name: x.astype(BFLOAT16) for name, x in arrays_of(V10).items()}
    result = converted(write_legacy(tmp_path / "t5", 3, found), tmp_path / "to", "--json")
    assert json.loads(result.stdout)["dtype"] == "bfloat16"
