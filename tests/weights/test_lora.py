"""LoRA folders: merged into the model's matrices as it is loaded, or refused by name."""

import dataclasses
import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxspec
from jaxspec.core import Room
from jaxspec.weights import huggingface, quantisation
from jaxspec.weights.tensors import CheckpointError
from tests.weights.folders import GPT, LLAMA, model_of

QUERY = "model.layers.0.self_attn.q_proj"
TABLE = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "base"
    huggingface.save(model_of(LLAMA), folder)
    return folder


def random(*shape, seed=0):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def factors(module, rows, columns, rank=2, seed=0):
    names = (f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight")
    return dict(
        zip(
            names,
            (random(rank, columns, seed=seed), random(rows, rank, seed=seed + 1)),
            strict=True,
        )
    )


def written(folder, tensors, **changes):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(TABLE | changes))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def query_of(model):
    return np.asarray(model.params["layers_0"]["attention"]["query"]["weight"])


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"alpha_pattern": {"k_proj": 1, "layers.0.self_attn.q_proj": 4, "q_proj": 8}}, 2.0),
        ({"alpha_pattern": {"0.self_attn.q_pro": 4}}, 3.0),  # a key is matched up to the end
    ],
)
def test_a_product_of_factors_is_added(base, tmp_path, changes, factor):
    plain = jaxspec.load(base)
    rows, columns = query_of(plain).shape
    tensors = factors(QUERY, rows, columns)
    changed = jaxspec.load(base, adapter=written(tmp_path / "adapter", tensors, **changes))
    A, B = tensors.values()
    np.testing.assert_allclose(query_of(changed) - query_of(plain), factor * B @ A, atol=1e-5)
    others = [model.params["layers_0"]["attention"]["key"]["weight"] for model in (changed, plain)]
    np.testing.assert_array_equal(*others)


# PEFT saves what the last module had: of its classes, not of all
@pytest.mark.parametrize("said", [True, False])
def test_a_matrix_that_is_stored_transposed(tmp_path, said):
    huggingface.save(model_of(GPT), tmp_path / "base")
    plain = jaxspec.load(tmp_path / "base")
    rows, columns = plain.params["layers_0"]["ff"]["wi"]["weight"].shape
    tensors = factors("transformer.h.0.mlp.c_fc", rows, columns)
    changed = jaxspec.load(
        tmp_path / "base", adapter=written(tmp_path / "a", tensors, fan_in_fan_out=said)
    )
    A, B = tensors.values()
    matrices = [
        np.asarray(model.params["layers_0"]["ff"]["wi"]["weight"]) for model in (changed, plain)
    ]
    np.testing.assert_allclose(matrices[0] - matrices[1], 3 * B @ A, atol=1e-5)


def test_the_sum_is_rounded_once(tmp_path):
    """A base in bfloat16, as most are: what is loaded in float32 has all of the adapter, in
    bfloat16 its rounding.
    """
    narrow = model_of(dataclasses.replace(LLAMA, dtype="bfloat16"))
    folder = huggingface.save(
        narrow._replace(params=quantisation.quantise(narrow.params, "bfloat16")), tmp_path / "b"
    )
    plain = query_of(jaxspec.load(folder))
    tensors = factors(QUERY, *plain.shape)
    adapter = written(tmp_path / "adapter", tensors)
    A, B = tensors.values()
    exact = plain + 3 * B @ A
    np.testing.assert_allclose(query_of(jaxspec.load(folder, adapter=adapter)), exact, atol=1e-5)
    rounded = jaxspec.load(folder, adapter=adapter, dtype="bfloat16").params["layers_0"][
        "attention"
    ]["query"]["weight"]
    np.testing.assert_array_equal(rounded, jnp.asarray(exact).astype(jnp.bfloat16))


def test_a_quantised_base_is_refused_before_it_is_read(base, tmp_path):
    table = json.loads((base / "config.json").read_text())
    method = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
    folder = tmp_path / "quantised"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(table | {"quantization_config": method}))
    (folder / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    with pytest.raises(
        CheckpointError, match=r"is quantised, and .* changes it: load the full model"
    ):
        jaxspec.load(folder, adapter=written(tmp_path / "a", factors(QUERY, 16, 16)))


def test_saved_modules_replace_tensors(base, tmp_path):
    norm = random(LLAMA.dim)
    changed = jaxspec.load(
        base, adapter=written(tmp_path / "a", {"base_model.model.model.norm.weight": norm})
    )
    np.testing.assert_array_equal(changed.params["norm"]["scale"], norm)


def test_a_tied_head_that_is_changed_is_tied_no_more(tmp_path):
    """The embedding stays, and the head is it with the change; a change of the embedding alone is
    ambiguous.
    """
    huggingface.save(model_of(dataclasses.replace(LLAMA, tied_head=True)), tmp_path / "base")
    plain = jaxspec.load(tmp_path / "base")
    embedding = np.asarray(plain.params["embedding"]["embedding"])
    tensors = factors("lm_head", *embedding.shape)
    changed = jaxspec.load(tmp_path / "base", adapter=written(tmp_path / "head", tensors))
    assert plain.config.tied_head and not changed.config.tied_head
    np.testing.assert_array_equal(changed.params["embedding"]["embedding"], embedding)
    A, B = tensors.values()
    np.testing.assert_allclose(
        np.asarray(changed.params["head"]["weight"]) - embedding, 3 * B @ A, atol=1e-5
    )
    vocab, dim = embedding.shape
    names = [f"base_model.model.model.embed_tokens.lora_embedding_{part}" for part in "AB"]
    tensors = dict(zip(names, (random(2, vocab), random(dim, 2)), strict=True))
    with pytest.raises(
        CheckpointError, match="with which the head is tied, and not the head: merge it with peft"
    ):
        jaxspec.load(tmp_path / "base", adapter=written(tmp_path / "embedding", tensors))


def test_an_embedding_has_the_factors_of_its_transpose(base, tmp_path):
    plain = np.asarray(jaxspec.load(base).params["embedding"]["embedding"])
    names = [f"base_model.model.model.embed_tokens.lora_embedding_{part}" for part in "AB"]
    A, B = random(2, len(plain)), random(plain.shape[1], 2)
    changed = jaxspec.load(
        base, adapter=written(tmp_path / "a", dict(zip(names, (A, B), strict=True)))
    )
    np.testing.assert_allclose(
        np.asarray(changed.params["embedding"]["embedding"]) - plain, 3 * (B @ A).T, atol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora is True: only False is supported"),
        ({"bias": "all"}, "bias is 'all': only 'none'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3': only 'LORA'"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters is"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is"),
        ({"alpha_pattern": {"*q_proj": 4}}, "alpha_pattern has no regular expression"),
        ({"lora_alpha": "16"}, "alpha of lora_alpha is '16': expected a number"),
        ({"use_bdlora": True}, "use_bdlora is True"),
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights is 'pissa', which changes the model, too",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused(base, tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        jaxspec.load(base, adapter=written(tmp_path / "a", factors(QUERY, 8, 8), **changes))


def test_another_models_adapter_is_refused(base, tmp_path):
    rows, columns = query_of(jaxspec.load(base)).shape
    wide = factors(QUERY, rows + 1, columns)
    with pytest.raises(
        CheckpointError, match=rf"q_proj.weight by \[{rows + 1}, {columns}\], and the model's is"
    ):
        jaxspec.load(base, adapter=written(tmp_path / "wide", wide))
    deep = factors("model.layers.77.self_attn.q_proj", rows, columns)
    with pytest.raises(CheckpointError, match=r"changes model.layers.77.*, which the model lacks"):
        jaxspec.load(base, adapter=written(tmp_path / "deep", deep))
    half = {name: x for name, x in factors(QUERY, rows, columns).items() if "lora_A" in name}
    with pytest.raises(
        CheckpointError, match=r"one factor of .*q_proj: expected lora_A and lora_B"
    ):
        jaxspec.load(base, adapter=written(tmp_path / "half", half))
    magnitude = {f"base_model.model.{QUERY}.lora_magnitude_vector": random(rows)}
    with pytest.raises(
        CheckpointError, match="lora_magnitude_vector, which is not a factor of a matrix"
    ):
        jaxspec.load(base, adapter=written(tmp_path / "magnitude", magnitude))
    with pytest.raises(
        CheckpointError, match=r"expected a folder with an adapter_config\.json, or a hub id"
    ):
        jaxspec.load(base, adapter=tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match="a model in the format 'jaxspec': expected a Hugging Face folder"
    ):
        jaxspec.load("debian-t5-small", adapter=tmp_path / "wide")


def test_changes_of_what_is_not_read_are_named(tmp_path, caplog):
    """A Gemma 4 that also sees: an adapter of all its linear layers changes its vision tower,
    too.
    """
    from tests.families.test_gemma4 import random as gemma

    huggingface.save(model := gemma("E2B"), tmp_path / "base")
    rows, columns = query_of(model).shape
    tensors = factors("model.language_model.layers.0.self_attn.q_proj", rows, columns)
    tensors |= factors("model.vision_tower.encoder.layers.0.self_attn.q_proj", 4, 4)
    with caplog.at_level(logging.WARNING):
        changed = jaxspec.load(tmp_path / "base", adapter=written(tmp_path / "a", tensors))
    assert "what it changes of vision_tower (1 tensors) is left out" in caplog.text
    assert not np.array_equal(query_of(changed), query_of(model))


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
@pytest.mark.parametrize(
    "options", [{"r": 4}, {"r": 3, "use_rslora": True, "modules_to_save": ["norm", "lm_head"]}]
)
def test_logits_are_those_of_peft(base, tmp_path, options):
    import torch
    import transformers

    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    config = peft.LoraConfig(
        target_modules="all-linear", lora_alpha=5, alpha_pattern={"q_proj": 2}, **options
    )
    theirs = peft.get_peft_model(theirs, config).eval()
    tokens = np.array([[1, 4, 2, 7, 5]])
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                x.normal_(0, 0.2)
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    theirs.save_pretrained(tmp_path / "adapter")
    model = jaxspec.load(base, adapter=tmp_path / "adapter")
    _, cache = model.lm.prefill(
        model.params, jaxspec.Prompt(jnp.asarray(tokens), jnp.array([5])), Room(6)
    )
    logits = model.lm.extend(
        model.params, model.lm.rewind(cache, jnp.array([0])), jnp.asarray(tokens)
    )[0].logits
    np.testing.assert_allclose(np.asarray(logits), expected, atol=3e-5 * np.abs(expected).max())
