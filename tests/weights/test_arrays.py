"""Models of arrays in memory are those that a folder with the same tensors gives."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jaxspec
from jaxspec.analysis import random_model
from jaxspec.nets.decoder import gpt_config
from jaxspec.weights import huggingface
from jaxspec.weights.loading import shipped
from tests.weights.test_random_configurations import options_of, saved_peer

GPT2 = {"model_type": "gpt2", "vocab_size": 16, "n_positions": 12, "n_embd": 8}
GPT2 |= {"n_layer": 1, "n_head": 2}


def same_params(a: jaxspec.Model, b: jaxspec.Model) -> bool:
    return a.config == b.config and jax.tree.all(jax.tree.map(jnp.array_equal, a.params, b.params))


@pytest.mark.parametrize("name", ["debian-gpt-small", "debian-t5-small"])
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_arrays_of_a_folder_are_its_model(name: str, kind, tmp_path):
    if name not in shipped():
        pytest.skip("the checkpoints are not here")
    folder = huggingface.save(jaxspec.load(name), tmp_path / "saved")
    loaded = jaxspec.load(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    model = jaxspec.from_arrays(
        config, {n: kind(x) for n, x in arrays.items()}, tokenizer=loaded.tokenizer, name=name
    )
    assert same_params(model, loaded) and model.name == name
    assert model.lm == loaded.lm  # so that both run the same programs


def test_a_model_has_copies_and_the_dtype_that_it_is_asked_for(tmp_path):
    folder = small_gpt(tmp_path)
    arrays = {n: np.array(x) for n, x in safetensors.numpy.load_file(folder).items()}
    model = jaxspec.from_arrays(GPT2, arrays, dtype="bfloat16")
    before = jax.tree.map(np.array, model.params)
    for x in arrays.values():
        x += 1  # a step of training
    assert jax.tree.all(jax.tree.map(np.array_equal, before, model.params))
    assert {x.dtype.name for x in jax.tree.leaves(model.params) if x.ndim > 1} == {"bfloat16"}
    loaded = jaxspec.load(folder.parent, dtype="bfloat16")
    assert same_params(model, loaded)


def small_gpt(folder):
    """Writes a random GPT-2, and returns its file of weights."""
    config = gpt_config(16, dim=8, ff_dim=32, layers=1, heads=2, max_positions=12)
    saved = huggingface.save(random_model.of_config(config, "float32", 0), folder / "gpt")
    return saved / "model.safetensors"


@pytest.mark.needs_torch
@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM", "T5ForConditionalGeneration"],
)
def test_a_model_of_pytorch_and_its_config(architecture: str, tmp_path):
    peer = saved_peer(architecture, options_of(architecture, 0), tmp_path)
    model = jaxspec.from_arrays(peer.config, peer.state_dict())
    assert same_params(model, jaxspec.load(tmp_path))


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            GPT2,
            {"transformer.wte.weight": None},
            r"arrays: the weights are not those of the .*missing.*wte",
        ),
        (GPT2, {"other.weight": np.ones(3)}, "unexpected.*other.weight"),
        (GPT2, {"transformer.wte.weight": np.ones((16, 9))}, r"is \[16, 9\], expected \[16, 8\]"),
        (
            GPT2,
            {"transformer.wte.weight": np.ones((16, 8), int)},
            "wte.weight is int64: expected one of",
        ),
        ({**GPT2, "model_type": "gpt-5"}, {}, "gpt-5"),
        ({**GPT2, "quantization_config": {"bits": 4}}, {}, "expected arrays in full"),
    ],
)
def test_arrays_of_another_model_are_refused(config, change, message, tmp_path):
    arrays = safetensors.numpy.load_file(small_gpt(tmp_path)) | change
    arrays = {name: x for name, x in arrays.items() if x is not None}
    with pytest.raises(jaxspec.CheckpointError, match=message.replace(".*", "[\\s\\S]*")):
        jaxspec.from_arrays(config, arrays)


def test_what_is_no_table_and_no_array_is_refused():
    with pytest.raises(TypeError, match="config is of type str: expected a dict"):
        jaxspec.from_arrays("gpt2", {})
    with pytest.raises(TypeError, match=r"wte\.weight is of type list: expected an array"):
        jaxspec.from_arrays(GPT2, {"transformer.wte.weight": [1.0]})
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        jaxspec.from_arrays(GPT2, {}, dtype="float8")
