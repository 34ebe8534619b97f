"""Heads that are tied, scaled, both or neither: what the weights hold decides, and none that
differs is dropped.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import Prompt, nets
from jaxspec.nets import decoder, net_of, t5
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import huggingface
from jaxspec.weights.hf_families import gemma
from jaxspec.weights.hf_families.common import HEAD
from jaxspec.weights.orbax import CheckpointError
from tests.marks import marked
from tests.small import tiny_gpt, tiny_llama, tiny_t5

T5 = tiny_t5(24, layers=2)
PLAIN = dataclasses.replace(T5, activation="relu", gated=False, tied_head=True, scaled_head=True)
LLAMA = tiny_llama(24, layers=2, max_positions=32, tied_head=True)
GPT = tiny_gpt(24, layers=2)
SMALL = {
    "dim": 16,
    "ff_dim": 24,
    "layers": 6,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 4,
    "vocab_size": 24,
}
TIED = {
    "T5": PLAIN,
    "Llama": LLAMA,
    "GPT-2": GPT,
    "Gemma 3": nets.replace(gemma.SIZES_3["gemma-3-1b"], **SMALL),
}
PROMPT = Prompt(jnp.array([[3, 4, 5, 1], [7, 1, 0, 0]]), jnp.array([4, 2]))
FED = jnp.array([[0, 3, 9], [0, 5, 2]])

ALL_FOUR = pytest.mark.parametrize("tied", [True, False], ids=["tied", "own"])
SCALED = pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])


def model_of(config, seed=0) -> jaxspec.Model:
    net = net_of(config)
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    params = jax.tree.map(lambda x: jnp.array(rng.standard_normal(x.shape, np.float32)), shapes)
    return jaxspec.Model(net.language_model(config), params, None, config, "it")


@functools.cache
def program(config):
    return jax.jit(t5.T5(config).apply)


def logits_of(model):
    return np.asarray(program(model.config)({"params": model.params}, PROMPT, FED))


def with_facts(tied: bool, scaled: bool, config: T5Config = T5) -> T5Config:
    return dataclasses.replace(config, tied_head=tied, scaled_head=scaled)


def change(folder: Path, **table) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | table))


def test_scaled_is_what_tied_is_unless_it_is_said():
    """T5 1.0 and v1.1 are so, and every checkpoint and recipe that has no word for it."""
    shape = (24, 16, 24, 2, 8, 1, 2)
    assert T5Config(*shape).scaled_head is False
    assert T5Config(*shape, tied_head=True).scaled_head is True
    assert T5Config(*shape, tied_head=True) == with_facts(True, True)
    facts = [(tied, scaled) for tied in (True, False) for scaled in (True, False)]
    assert len({with_facts(*both) for both in facts}) == 4


@ALL_FOUR
@SCALED
def test_what_the_facts_mean(tied, scaled):
    """Logits are the decoder's output, perhaps times dim ** -0.5, by the embedding or by the
    head.
    """
    config = with_facts(tied, scaled)
    model = model_of(with_facts(False, False))
    plain = logits_of(model)
    if tied:
        model.params["head"] = {"weight": model.params["embedding"]["embedding"]}
        plain = logits_of(model)
        del model.params["head"]
    expected = plain * 16**-0.5 if scaled else plain
    got = logits_of(model._replace(config=config))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@ALL_FOUR
@SCALED
@pytest.mark.parametrize(
    "said", [{}, {"tie_word_embeddings": True}], ids=["ours", "as transformers 5"]
)
def test_all_four_are_loaded_as_they_were_saved(tied, scaled, said, tmp_path):
    """transformers 5 says of every T5 that it is tied."""
    model = model_of(with_facts(tied, scaled))
    folder = huggingface.save(model, tmp_path / "it")
    table = json.loads((folder / "config.json").read_text())
    assert (table["tie_word_embeddings"], table["scale_decoder_outputs"]) == (tied, scaled)
    assert (HEAD in load_file(folder / "model.safetensors")) == (not tied)
    change(folder, **said)
    loaded = jaxspec.load(folder)
    assert loaded.config == model.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)


@pytest.mark.parametrize("name", marked(TIED, slow={"Gemma 3"}))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_head_that_config_json_calls_tied_is_compared(name, dtype, tmp_path):
    """A copy is left out; what differs in one place is the model's own head, and loaded."""
    tied = model_of(TIED[name])
    folder = huggingface.save(tied, tmp_path / "it")
    weights = load_file(folder / "model.safetensors")
    embedding = next(
        x for x in weights if x.endswith(("shared.weight", "wte.weight", "embed_tokens.weight"))
    )
    expected = jaxspec.load(folder, dtype=dtype)
    copy, head = weights[embedding].copy(), weights[embedding].copy()
    head[5, 3] += 0.5
    save_file(weights | {HEAD: copy}, folder / "model.safetensors")
    again = jaxspec.load(folder, dtype=dtype)
    assert again.config == expected.config and again.config.tied_head
    jax.tree.map(np.testing.assert_array_equal, again.params, expected.params)

    save_file(weights | {HEAD: head}, folder / "model.safetensors")
    untied = jaxspec.load(folder)
    assert untied.config == dataclasses.replace(tied.config, tied_head=False)
    np.testing.assert_array_equal(untied.params["head"]["weight"], head)
    np.testing.assert_array_equal(untied.params["embedding"]["embedding"], copy)


def test_a_head_of_another_shape_or_type_is_no_copy(tmp_path):
    folder = huggingface.save(model_of(LLAMA), tmp_path / "it")
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {HEAD: embedding[:20].copy()}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"wrong \(1\): lm_head.weight is \[20, 16\], expected \[24, 16\]"
    ):
        jaxspec.load(folder)
    rounded = embedding.astype(ml_dtypes.bfloat16)
    save_file(weights | {HEAD: rounded}, folder / "model.safetensors")
    np.testing.assert_array_equal(
        jaxspec.load(folder).params["head"]["weight"], rounded.astype(np.float32)
    )


def test_an_untied_model_without_a_head_is_incomplete(tmp_path):
    folder = huggingface.save(model_of(T5), tmp_path / "it")
    weights = load_file(folder / "model.safetensors")
    del weights[HEAD]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing \(1\): lm_head\.weight"):
        jaxspec.load(folder)


@pytest.mark.parametrize("copy", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"])
def test_a_second_embedding_is_not_dropped(copy, tmp_path):
    model = model_of(T5)
    folder = huggingface.save(model, tmp_path / "it")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {copy: weights["shared.weight"].copy()}, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, jaxspec.load(folder).params, model.params)
    save_file(weights | {copy: 2 * weights["shared.weight"]}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"{copy} differs from shared\.weight, which it should repeat"
    ):
        jaxspec.load(folder)


def test_a_parameter_under_two_names_is_refused(tmp_path):
    folder = huggingface.save(model_of(GPT), tmp_path / "it")
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {"ln_f.bias": weights["transformer.ln_f.bias"] + 1}, folder / "model.safetensors"
    )
    with pytest.raises(
        CheckpointError, match=r"transformer\.ln_f\.bias twice, as .*ln_f\.bias and as .*ln_f\.bias"
    ):
        jaxspec.load(folder)


def test_an_mt5_that_is_tied(tmp_path):
    """Made from scratch, transformers 5 ties an mT5 and never scales it."""
    model = model_of(with_facts(True, False))
    folder = huggingface.save(model, tmp_path / "it")
    path = folder / "config.json"
    table = json.loads(path.read_text())
    del table["scale_decoder_outputs"]
    path.write_text(
        json.dumps(table | {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"]})
    )
    assert jaxspec.load(folder).config == model.config


def peer_of(tied: bool, scaled: bool, gated: bool, seed: int = 0):
    """A tiny T5 of transformers'."""
    import torch
    import transformers

    config = transformers.T5Config(
        vocab_size=24,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu" if gated else "relu",
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    config.scale_decoder_outputs = scaled
    torch.manual_seed(seed)
    peer = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.normal_(0.0, 0.3)
        if not tied:
            peer.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn(24, 16))
    return peer


def logits_of_peer(peer):
    import torch

    real = np.arange(4)[None] < np.asarray(PROMPT.length)[:, None]
    with torch.no_grad():
        return peer(
            input_ids=torch.tensor(np.array(PROMPT.tokens)),
            attention_mask=torch.tensor(real.astype(np.int64)),
            decoder_input_ids=torch.tensor(np.array(FED)),
        ).logits.numpy()


@pytest.mark.needs_torch
@pytest.mark.slow
@ALL_FOUR
@SCALED
@pytest.mark.parametrize(
    ("gated", "form"),
    [
        pytest.param(True, "safetensors", id="gated-safetensors"),
        # the form of the file has nothing to do with what is in it
        pytest.param(False, "bin", id="relu-bin"),
        pytest.param(False, "safetensors", id="relu-safetensors", marks=pytest.mark.exhaustive),
        pytest.param(True, "bin", id="gated-bin", marks=pytest.mark.exhaustive),
    ],
)
def test_all_four_from_transformers_and_back(tied, scaled, gated, form, tmp_path):
    import torch
    import transformers

    peer = peer_of(tied, scaled, gated)
    expected = logits_of_peer(peer)
    peer.save_pretrained(tmp_path / "theirs")
    if form == "bin":  # every name of every tensor, copies included
        (tmp_path / "theirs" / "model.safetensors").unlink()
        state = peer.state_dict()
        assert {HEAD, "encoder.embed_tokens.weight"} <= set(state)
        torch.save(state, tmp_path / "theirs" / "pytorch_model.bin")
    loaded = jaxspec.load(tmp_path / "theirs")
    assert (loaded.config.tied_head, loaded.config.scaled_head) == (tied, scaled)
    np.testing.assert_allclose(logits_of(loaded), expected, atol=2e-5 * np.abs(expected).max())

    huggingface.save(loaded, tmp_path / "ours")
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    assert again.config.scale_decoder_outputs is scaled
    np.testing.assert_array_equal(logits_of_peer(again), expected)


@pytest.mark.needs_torch
@pytest.mark.slow
def test_an_mt5_of_transformers_from_scratch(tmp_path):
    import torch
    import transformers

    shape = dict(
        vocab_size=24,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    peer = transformers.MT5ForConditionalGeneration(
        transformers.MT5Config(**shape, dropout_rate=0.0)
    ).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.normal_(0.0, 0.3)
    peer.save_pretrained(tmp_path)
    loaded = jaxspec.load(tmp_path)
    assert (loaded.config.tied_head, loaded.config.scaled_head) == (True, False)
    expected = logits_of_peer(peer)
    np.testing.assert_allclose(logits_of(loaded), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("equal", [True, False])
def test_a_llama_of_transformers_that_says_it_is_tied(equal, tmp_path):
    """transformers, too, ties only what is equal."""
    import torch
    import transformers

    model = model_of(LLAMA)
    folder = huggingface.save(model, tmp_path / "it")
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"] + np.float32(0 if equal else 0.25)
    save_file(weights | {HEAD: head}, folder / "model.safetensors", metadata={"format": "pt"})
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = peer(torch.tensor(np.array(FED))).logits.numpy()
    loaded = jaxspec.load(folder)
    assert loaded.config.tied_head is equal
    got = decoder.DecoderNet(loaded.config).apply({"params": loaded.params}, FED)
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())
