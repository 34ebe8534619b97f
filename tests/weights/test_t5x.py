"""T5X checkpoints are the models that T5X would run, written again as others, with their
tokenizers.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import jaxspec
from jaxspec import sharding
from jaxspec.cli.main import app
from jaxspec.nets import axes_of
from jaxspec.nets.t5 import T5, T5Config
from jaxspec.testing import word_tokenizer
from jaxspec.weights import orbax, t5x, vocabulary
from jaxspec.weights.hf_families import t5 as family
from jaxspec.weights.orbax import CheckpointError
from tests.weights.t5x_files import (
    BFLOAT16,
    NETWORKS,
    V10,
    V11,
    Network,
    arrays_of,
    assert_holds,
    scalable,
    write_early_orbax,
    write_legacy,
    write_orbax,
)


def t5x_logits(
    arrays: dict[str, np.ndarray], network: Network, inputs: np.ndarray, outputs: np.ndarray
) -> np.ndarray:
    """Compute examples/t5/network.py in NumPy, from [batch, length] inputs (0 is padding) and
    decoder inputs.
    """

    def norm(x, name):
        return (
            x
            / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6)
            * arrays[f"{name}/scale"]
        )

    def bias(side, queries, keys):
        table, distance = (
            arrays[f"{side}/relpos_bias/rel_embedding"],
            np.arange(keys) - np.arange(queries)[:, None],
        )
        buckets, start = (16, np.where(distance > 0, 16, 0)) if side == "encoder" else (32, 0)
        distance = np.abs(distance) if side == "encoder" else np.maximum(-distance, 0)
        exact = buckets // 2
        far = exact + np.log(np.maximum(distance, 1) / exact) / np.log(128 / exact) * (
            buckets - exact
        )
        bucket = start + np.where(
            distance < exact, distance, np.minimum(far.astype(int), buckets - 1)
        )
        return table[:, bucket]

    def attention(x, memory, name, mask, added=0.0):
        def project(y, matrix):
            y = y @ arrays[f"{name}/{matrix}/kernel"]
            return y.reshape(*y.shape[:2], network.num_heads, network.head_dim)

        scores = np.einsum("bqhd,bkhd->bhqk", project(x, "query"), project(memory, "key")) + added
        scores = np.where(mask, scores, -1e10)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("bhqk,bkhd->bqhd", weights, project(memory, "value"))
        return mixed.reshape(*mixed.shape[:2], -1) @ arrays[f"{name}/out/kernel"]

    def mlp(x, name):
        if network.mlp_activations == ("relu",):
            hidden = np.maximum(x @ arrays[f"{name}/wi/kernel"], 0)
        else:
            gate, linear = (x @ arrays[f"{name}/wi_{i}/kernel"] for i in (0, 1))
            acts = {
                "gelu": lambda y: (
                    0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
                )
            }
            acts["silu"] = lambda y: y / (1 + np.exp(-y))
            hidden = acts[network.mlp_activations[0]](gate) * linear
        return hidden @ arrays[f"{name}/wo/kernel"]

    arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
    length, steps = inputs.shape[1], outputs.shape[1]
    real = (inputs > 0)[:, None, None, :]
    x, added = arrays["token_embedder/embedding"][inputs], bias("encoder", length, length)
    for i in range(network.num_encoder_layers):
        name = f"encoder/layers_{i}"
        y = norm(x, f"{name}/pre_attention_layer_norm")
        x = x + attention(y, y, f"{name}/attention", real, added)
        x = x + mlp(norm(x, f"{name}/pre_mlp_layer_norm"), f"{name}/mlp")
    encoded = norm(x, "encoder/encoder_norm")
    x, added = arrays["token_embedder/embedding"][outputs], bias("decoder", steps, steps)
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
        return x @ arrays["token_embedder/embedding"].T / np.sqrt(network.emb_dim)
    return x @ arrays["decoder/logits_dense/kernel"]


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
    """Both layouts of folders, and T5X's other network: one and the same model, and it is what T5X
    computes.
    """
    arrays = arrays_of(network)
    legacy = jaxspec.load(write_legacy(tmp_path / "t5", 1000, arrays))
    assert legacy.name == "t5/checkpoint_1000" and legacy.tokenizer is None
    expected = t5x_logits(arrays, network, INPUTS, OUTPUTS)
    got = logits(legacy, INPUTS, OUTPUTS)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    assert_holds(legacy.params, arrays)
    others = {
        "orbax": write_orbax(tmp_path / "orbax", 1000, arrays),
        "early": write_early_orbax(tmp_path / "early", 1000, arrays),
        "stacked": write_legacy(tmp_path / "stacked", 1, scalable(arrays, network)),
        "unrolled": write_orbax(tmp_path / "unrolled", 1, scalable(arrays, network, stacked=False)),
    }
    for folder in others.values():
        model = jaxspec.load(folder)
        assert model.config == legacy.config
        jax.tree.map(np.testing.assert_array_equal, model.params, legacy.params)


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


@pytest.mark.parametrize(
    "suffix", [".tmp-1700000000", ".orbax-checkpoint-tmp-1700000000", ".orbax-checkpoint-tmp"]
)
def test_what_was_never_finished_is_refused(checkpoint, suffix):
    left = checkpoint.rename(f"{checkpoint}{suffix}")
    with pytest.raises(
        CheckpointError, match=r"checkpoint_1000\..*tmp.* was never finished.* Load an earlier one"
    ):
        jaxspec.load(left)
    with pytest.raises(
        CheckpointError, match=r"has no complete T5X checkpoint: .* there is checkpoint_1000\..*tmp"
    ):
        jaxspec.load(left.parent)


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"no checkpoint at .*nowhere: expected a folder that T5X wrote"
    ):
        t5x.open_model(tmp_path / "nowhere")


@pytest.mark.slow
def test_a_config_json_goes_before_what_shapes_say(run):
    """Shapes say nothing of the activation."""
    network = V11._replace(mlp_activations=("silu", "linear"))
    table = family.write(T5Config(24, 8, 12, 2, 3, 2, 3, "silu", max_distance=128, start_token=2))
    (run / "config.json").write_text(json.dumps(table))
    model = jaxspec.load(run)
    assert (model.config.activation, model.config.start_token) == ("silu", 2)
    expected = t5x_logits(arrays_of(network), network, INPUTS, OUTPUTS)
    got = logits(model, INPUTS, OUTPUTS)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    # as transformers 5 has it
    (run / "config.json").write_text(json.dumps(table | {"tie_word_embeddings": True}))
    assert jaxspec.load(run).config == model.config
    (run / "config.json").write_text(json.dumps(table | {"num_decoder_layers": 2}))
    with pytest.raises(
        CheckpointError,
        match=r"of the T5 of .*config\.json:\n  unexpected \(\d+\): decoder/layers_2/",
    ):
        jaxspec.load(run)
    other = {
        "model_type": "gpt2",
        "n_positions": 4,
        "n_embd": 4,
        "n_layer": 1,
        "n_head": 1,
        "vocab_size": 4,
    }
    (run / "config.json").write_text(json.dumps(other))
    with pytest.raises(
        CheckpointError, match=r"config\.json is not a T5's, but beside a T5X checkpoint"
    ):
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
        known_vocabulary = vocabulary.load(folder)
        read = known_vocabulary.folder.name, known_vocabulary.size, known_vocabulary.begin
        assert read == ("checkpoint_1000", 24, (0,))
        assert known_vocabulary.tokenizer("the old dog")["input_ids"] == [3, 4, 5]


def test_a_vocabulary_needs_a_tokenizer(run):
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint_1000 has no tokenizer: expected one of tokenizer\.json, ",
    ):
        vocabulary.load(run)


@pytest.mark.slow
def test_what_was_read_decodes(run):
    """Prompted with ids, it says what T5X's network would say."""
    row = [0]
    for _ in range(6):
        row.append(
            int(t5x_logits(arrays_of(V11), V11, INPUTS[:1], np.array([row]))[0, -1].argmax())
        )
    prompt = jaxspec.Prompt(jnp.array(INPUTS[:1]), jnp.array([5]))
    out = jaxspec.generate(jaxspec.load(run), prompt, eos_ids=(), max_new_tokens=6)
    assert out.tokens[0].tolist() == row[1:]


def test_placed_on_a_mesh(run):
    mesh = sharding.mesh("data=1,model=1")
    model, plain = jaxspec.load(run, mesh=mesh), jaxspec.load(run)
    places = sharding.parameters(plain.params, axes_of(plain.config), mesh)
    assert jax.tree.all(jax.tree.map(lambda x, where: x.sharding == where, model.params, places))
    jax.tree.map(np.testing.assert_array_equal, model.params, plain.params)


def converted(*arguments: object):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


@pytest.mark.slow
def test_a_checkpoint_is_converted_to_either_format(run, tmp_path):
    """To a Hugging Face folder unless it is said otherwise; back from there it is the same
    model.
    """
    result = converted(run, tmp_path / "theirs", "--json")
    assert result.exit_code == 0, result.output
    assert {"format": "huggingface", "dtype": "float32"}.items() <= json.loads(
        result.stdout
    ).items()
    kernel = arrays_of(V11)["decoder/layers_1/mlp/wi_0/kernel"]
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    np.testing.assert_array_equal(
        theirs["decoder.block.1.layer.2.DenseReluDense.wi_0.weight"], kernel.T
    )
    result = converted(run, tmp_path / "ours", "--format", "jaxspec")
    assert result.exit_code == 2 and "t5/checkpoint_1000 has no tokenizer" in result.stderr
    assert "give --format huggingface" in result.stderr
    words().save_pretrained(run)
    assert converted(run, tmp_path / "ours", "--format", "jaxspec").exit_code == 0
    assert orbax.read_manifest(tmp_path / "ours").about == {"converted_from": "t5/checkpoint_1000"}
    plain = jaxspec.load(run)
    for name in ("theirs", "ours"):
        jax.tree.map(
            np.testing.assert_array_equal, jaxspec.load(tmp_path / name).params, plain.params
        )


def test_convert_keeps_bfloat16(tmp_path):
    arrays = {name: x.astype(BFLOAT16) for name, x in arrays_of(V10).items()}
    result = converted(write_legacy(tmp_path / "t5", 3, arrays), tmp_path / "to", "--json")
    assert json.loads(result.stdout)["dtype"] == "bfloat16"
