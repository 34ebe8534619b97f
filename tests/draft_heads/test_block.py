"""Block drafters of targets with caps, scales, states and experts; and options of their files that
are refused.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import jaxspec
from jaxspec import drafters
from jaxspec.core import Prompt
from jaxspec.draft_heads import block, block_files
from jaxspec.draft_heads.formats import target_shape
from jaxspec.draft_heads.load import read_head
from jaxspec.draft_heads.save import save
from jaxspec.draft_heads.training import DraftStep
from jaxspec.nets import decoder
from jaxspec.sampling import at_temperature
from jaxspec.testing import certify
from jaxspec.training import head_loss
from jaxspec.weights.hf_families import common
from jaxspec.weights.tensors import CheckpointError
from tests.draft_heads import test_drafters as heads
from tests.draft_heads import test_formats as references
from tests.draft_heads.conftest import (
    EPS,
    FIRST,
    GAMMA,
    KV,
    PROMPT,
    QWEN3,
    D,
    Published,
    V,
    dflash_shapes,
)
from tests.marks import marked, optional

torch = optional("torch")
safetensors_torch = optional("safetensors.torch")
pytestmark = pytest.mark.needs_torch

SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
SIZES |= {
    "head_dim": 8,
    "num_key_value_heads": KV,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 64,
}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
FULL, LOCAL = "full_attention", "sliding_attention"
TARGETS = {
    "Gemma4ForCausalLM": {
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    }
    | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "sliding_window": 4}
    | {"final_logit_softcapping": 2.0, "layer_types": [LOCAL, LOCAL, FULL, FULL]},
    "Qwen3_5ForCausalLM": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
    }
    | {"linear_value_head_dim": 4, "tie_word_embeddings": True},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    | {"norm_topk_prob": True},
}


@functools.cache
def peer(name):
    """A model of transformers whose every parameter is random."""
    torch.set_num_threads(1)
    kind, draw = getattr(transformers, name), torch.Generator().manual_seed(1)
    model = kind._from_config(
        kind.config_class(**{**SIZES, **TARGETS[name]}),
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    scalars = [(name, x) for name, x in model.named_buffers() if "layer_scalar" in name]
    for parameter, x in [*model.named_parameters(), *scalars]:
        about_one = ("norm" in parameter or "scal" in parameter) and name != "Qwen3_5ForCausalLM"
        x.data.copy_(0.3 * torch.randn(x.shape, generator=draw) + about_one)
    return model


class Hidden(references.Hidden):
    """The hidden states of a peer, and the parts of it that drafters use: the matrix of its head
    alone.
    """

    def __init__(self, model, scale):
        self.model, self.scale = model, scale
        with torch.no_grad():
            out = model(torch.tensor([PROMPT]), output_hidden_states=True)
        self.states = [x[0] for x in out.hidden_states]

    def embed(self, tokens):
        return super().embed(tokens) * self.scale


@pytest.mark.slow
# as gpt-oss, with fewer parts
@pytest.mark.parametrize("name", marked(TARGETS, exhaustive=("Qwen3MoeForCausalLM",)))
def test_published_drafters_of_other_families_compute_what_their_code_does(
    name, tmp_path, draft_of
):
    """Gemma's drafter reads scaled embeddings, the head's matrix without its cap, and has a cap of
    its own.
    """
    model, gemma = peer(name), name.startswith("Gemma")
    model.save_pretrained(tmp_path / "target")
    target = jaxspec.load(tmp_path / "target")
    options = {"mask_token_id": 12, "target_layer_ids": [0, 2], "block_size": 5}
    table = QWEN3 | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "num_target_layers": 4,
    }
    if gemma:
        options |= {"final_logit_softcapping": 3.0}
        table |= {"layer_types": [LOCAL, FULL], "sliding_window": 3, "use_sliding_window": True}
    windows = dict(window=3, from_anchor=False) if gemma else {}
    case = Published(
        table | {"dflash_config": options},
        dflash_shapes(),
        dict(ids=(1, 3), slots=1, mask=12, **windows),
    )
    drafter = jaxspec.load_drafter(case.write(tmp_path / "it", None), target=target)
    tokens, log_probs = draft_of(drafter)
    hidden = Hidden(model, D**0.5 if gemma else 1.0)
    expected = references.dflash(case.tensors(), case.table, hidden, tokens, **case.reference)
    np.testing.assert_allclose(
        log_probs, expected.log_softmax(-1).detach().numpy(), rtol=1e-4, atol=1e-4
    )
    prompt = Prompt(jnp.array([PROMPT, [FIRST, 2, 0, 0, 0]]), jnp.array([len(PROMPT), 2]))
    plain = jaxspec.generate(target, prompt, max_new_tokens=8)
    fast = jaxspec.generate(target, prompt, drafter=drafter, gamma=GAMMA, max_new_tokens=8)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    assert fast.stats.drafted.sum() > 0


def changed(where, nested=(), **keys):
    """Changes a drafter's config.json, and its dflash_config."""
    table = json.loads((where / "config.json").read_text()) | keys
    table["dflash_config"] |= dict(nested)
    (where / "config.json").write_text(json.dumps(table))
    return where


REFUSED = {
    "dflash_config has projector: expected attention_mode,": {"nested": {"projector": "domino"}},
    "projector_type is 'domino': expected 'dflash' or 'dspark'": {
        "nested": {"projector_type": "domino"}
    },
    "attention_value_scale is 0.6: only 1.0 is supported": {"attention_value_scale": 0.6},
    "attention_sink_bias is True: only False is supported": {
        "nested": {"attention_sink_bias": True}
    },
    "use_gemma_norm is True": {"use_gemma_norm": True},
    "use_swa is True: only False is supported": {"nested": {"use_swa": True, "swa_window_size": 8}},
    "draft_shift is 'yes': expected true or false": {"nested": {"draft_shift": "yes"}},
    "causal is True: only False is supported": {
        "speculators_model_type": "dflash",
        "nested": {"causal": True},
    },
    "speculators_model_type is 'jetspec': expected one of": {"speculators_model_type": "jetspec"},
    "has is_causal False and causal_head True: expected one value": {
        "is_causal": False,
        "nested": {"causal_head": True},
    },
    "has sample_from_anchor True and draft_shift False": {
        "sample_from_anchor": True,
        "nested": {"draft_shift": False},
    },
    "causal is 1: expected true or false": {"nested": {"causal": 1}},
    "dflash_config is of type list: expected an object": {"dflash_config": []},
    "output_multiplier is -1": {"nested": {"output_multiplier": -1}},
    "is_causal is True: only False is supported": {
        "speculators_model_type": "dflash",
        "is_causal": True,
    },
    "use_sliding_window is 'false': expected true or false": {"use_sliding_window": "false"},
    "is_causal is 'no': expected true or false": {"is_causal": "no"},
    "sliding_window_non_causal is 'no': expected true or false": {
        "sliding_window_non_causal": "no"
    },
    "sample_from_anchor is 1: expected true or false": {"nested": {"sample_from_anchor": 1}},
    "rope_parameters is of type list: expected an object": {
        "transformer_layer_config": {"rope_parameters": [1]}
    },
    "transformer_layer_config is of type list: expected an object": {
        "transformer_layer_config": [1]
    },
    "speculators_model_type is 'xpress': expected one of eagle, eagle3": {
        "speculators_model_type": "xpress"
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_unknown_options_are_refused_by_name(message, published, folder, target, tmp_path):
    where, changes = published["DFlash"].write(tmp_path / "it", folder), dict(REFUSED[message])
    if "dflash_config" in changes:
        table = json.loads((where / "config.json").read_text()) | changes
        (where / "config.json").write_text(json.dumps(table))
    else:
        changed(where, **changes)
    with pytest.raises(CheckpointError, match=message):
        jaxspec.load_drafter(where, target=target)


def test_keys_that_were_copied_from_the_target_count_for_nothing_beside_the_rotated_width(
    published, folder, target, tmp_path
):
    where = published["DFlash"].write(tmp_path / "it", folder)
    whole, _ = read_head(where, target=target)
    copied = {"mrope_section": [1, 1], "partial_rotary_factor": 0.25, "rope_theta": 100.0}
    table = {
        "rope_parameters": {"rope_type": "default", "rope_dim": 4, **copied},
        "partial_rotary_factor": 0.25,
    }
    assert read_head(changed(where, **table), target=target)[0] == whole
    table["rope_parameters"]["rope_dim"] = 2
    half, _ = read_head(changed(where, **table), target=target)
    assert {layer.attention.rotary.dims for layer in half.layer.layers} == {2}


def test_values_that_are_read_where_the_file_is_silent(published, folder, target, tmp_path):
    where = published["DFlash"].write(tmp_path / "it", folder)
    whole, _ = read_head(where, target=target)
    null = {"output_multiplier": None, "sample_from_anchor": None, "attention_sink_bias": False}
    null |= {"final_logit_softcapping": 0}
    assert read_head(changed(where, null), target=target)[0] == whole
    silent, _ = read_head(
        changed(where, {"target_layer_ids": None, "block_size": None}), target=target
    )
    assert (silent.taps, silent.block) == ((1, 4), 16)
    # from layer 28 on
    windows = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": None}
    assert read_head(changed(where, **windows), target=target)[0].layer.windows == set()


def test_options_of_dspark_may_lie_in_dflash_config(published, folder, target, tmp_path):
    where = published["DFlash"].write(tmp_path / "it", folder)
    nested = {
        "projector_type": "dspark",
        "markov_head_type": "gated",
        "enable_confidence_head": False,
    }
    config, _ = read_head(changed(where, nested), target=target)
    assert config.from_anchor and config.markov == "gated"


def test_causal_and_shifted_blocks_have_a_key_in_each_format(published, target):
    """JetSpec has causal_head, z-lab is_causal; vLLM, ModelOpt and NeMo causal: in dflash_config or
    beside it.
    """
    case = published["DFlash, z-lab's windows"]

    def read(nested, **keys):
        table = case.table | keys | {"dflash_config": case.table["dflash_config"] | nested}
        common.check(table, block_files.with_options())
        return block_files.read(table, case.shapes, target_shape(target))

    silent = read({})
    assert (silent.causal_full, silent.causal_windows, silent.from_anchor) == (False, True, False)
    for value in (True, False):
        expected = dataclasses.replace(silent, causal_full=value, causal_windows=value)
        for key in ("is_causal", "causal", "causal_head"):
            assert read({key: value}) == read({}, **{key: value}) == expected
            assert read({key: value}, is_causal=value) == expected
        shifted = dataclasses.replace(silent, from_anchor=value)
        for key in ("draft_shift", "shift_label", "sample_from_anchor"):
            assert read({key: value}) == read({}, **{key: value}) == shifted
    assert read({"causal_head": None, "use_swa": False, "swa_window_size": 8}) == silent


def test_an_adapter_that_is_filled_at_random_is_refused(published, folder, target, tmp_path):
    where = published["DFlash, JetSpec's causal head"].write(tmp_path / "it", folder)
    weights = safetensors_torch.load_file(where / "model.safetensors")
    adapter = torch.zeros(D, 8)
    safetensors_torch.save_file(
        weights | {"hidden_dim_adapter.proj.weight": adapter}, where / "model.safetensors"
    )
    with pytest.raises(
        CheckpointError, match="which JetSpec fills at random for a target of another width"
    ):
        jaxspec.load_drafter(changed(where, {"target_hidden_size": 8}), target=target)


@pytest.mark.parametrize("scale", [None, 1.0, 3.0])
def test_a_scale_of_embeddings_is_that_of_the_rows(scale, published, folder, target, tmp_path):
    """Of a target that scales its embeddings: without a word the rows are taken as its first layer
    reads them.
    """
    where = changed(
        published["DFlash"].write(tmp_path / "it", folder), {"input_embedding_scale": scale}
    )
    config = dataclasses.replace(target.config, scale_embedding=True)
    scaled = target._replace(config=config, lm=decoder.language_model(config))
    head, params = read_head(where, target=scaled)
    assert head.embedding_scale == (4.0 if scale is None else scale)
    again, _ = read_head(save(head, params, tmp_path / "out", target=scaled), target=scaled)
    assert again.embedding_scale == head.embedding_scale


@pytest.mark.parametrize("option", ["from_anchor", "own_head"])
def test_a_drafter_that_no_format_can_store_says_why(option, published, folder, target, tmp_path):
    config, params = read_head(
        published["DFlash, z-lab's scales"].write(tmp_path / "it", folder), target=target
    )
    with pytest.raises(CheckpointError, match=f"cannot store {option}"):
        save(dataclasses.replace(config, **{option: True}), params, tmp_path / "out", target=target)


@functools.cache
def confident():
    """A drafter whose estimates lie on both sides of a half, as the tokens before them are."""
    config = heads.CONFIGS["dspark"]
    params, structure = jax.tree.flatten(block.init(config, jax.random.key(3)))
    keys = jax.random.split(jax.random.key(4), len(params))
    params = [
        x + 0.6 * jax.random.normal(key, x.shape) for x, key in zip(params, keys, strict=True)
    ]
    params = jax.tree.unflatten(structure, params)
    params["confidence"] = {"weight": 8 * params["confidence"]["weight"], "bias": jnp.zeros(1)}
    network = jaxspec.DraftHead(block.head(config), params)
    return drafters.block(network, heads.target_of("decoder", config.taps))


@pytest.mark.parametrize(
    ("params", "gamma"),
    marked([("PLAIN", 2), ("PLAIN", 3), ("COLD", 3)], slow=[("PLAIN", 3), ("COLD", 3)]),
)
def test_a_draft_that_ends_by_the_drafters_own_estimate_keeps_the_distribution(params, gamma):
    """By enumeration, beside a draft that is never ended: at T = 1 and 0."""
    params, prompt = getattr(heads, params), Prompt(jnp.array([[1, 0]]), jnp.array([2]))
    options = {"drafter": confident(), "sampler": at_temperature(3, True), "prompt": prompt}
    options |= {"gamma": gamma, "steps": gamma + 1}
    policy = jaxspec.policies.confidence(0.5)
    assert certify(confident().target, sampling_params=params, policy=policy, **options) < 1e-5


def test_the_estimate_learns_the_overlap_of_both_distributions():
    """The gradient of its logit is that of the binary cross-entropy: the estimate less the
    acceptance rate.
    """
    config, params = heads.CONFIGS["dspark"], confident().params
    at = DraftStep(
        jax.random.normal(jax.random.key(1), (3, 3, 8)),
        jnp.array([[0, 1, 2], [1, 0, 2], [2, 2, 0]]),
        1,
    )
    log_p, log_q = (
        jnp.log(jax.random.dirichlet(jax.random.key(i), jnp.ones(3), (3,))) for i in (2, 3)
    )

    def loss(params, log_q):
        lesson = block.confidence_lesson(config, params, None, at, log_p, log_q, False)
        return jnp.sum(head_loss.own_divergence(*lesson))

    by_params, by_log_q = jax.grad(loss, argnums=(0, 1))(params, log_q)
    estimate = block.head(config).estimate(params, at.ahead[:, 1:2], at.hidden[:, 1:2])
    rate = np.minimum(np.exp(log_p), np.exp(log_q)).sum(1)
    np.testing.assert_allclose(
        by_params["confidence"]["bias"], np.sum(estimate - rate)[None], rtol=1e-4
    )
    np.testing.assert_array_equal(by_log_q, 0.0)  # the draft does not learn to be judged well
    without = dataclasses.replace(config, confidence=False)
    assert block.confidence_lesson(without, params, None, at, log_p, log_q, False) is None


def test_the_estimate_is_of_the_features_and_the_token_before_and_ends_the_draft():
    config, params = heads.CONFIGS["dspark"], confident().params
    features, previous = jax.random.normal(jax.random.key(1), (3, 1, 8)), jnp.array([[0], [1], [2]])
    estimate = block.head(config).estimate(params, previous, features)
    rows = jnp.concatenate(
        [features[:, 0], params["markov"]["before"]["embedding"][previous[:, 0]]], axis=1
    )
    expected = jax.nn.sigmoid(
        rows @ params["confidence"]["weight"][0] + params["confidence"]["bias"]
    )
    np.testing.assert_allclose(estimate, expected, rtol=1e-5)
    drafted = []
    for bias in (20.0, 0.0, -20.0):
        surer = {**params, "confidence": {**params["confidence"], "bias": jnp.array([bias])}}
        drafter = confident()._replace(params=surer)
        options = {"policy": jaxspec.policies.confidence(0.9), "max_new_tokens": 12, "eos_ids": ()}
        stats = jaxspec.generate(
            drafter.target, [[1, 2], [0]], drafter=drafter, gamma=3, **options
        ).stats
        drafted.append(int(stats.drafted.sum()) / int(stats.rounds.sum()))
    assert drafted[0] > 2 and drafted[0] > drafted[1] > drafted[2] and drafted[2] <= 1
