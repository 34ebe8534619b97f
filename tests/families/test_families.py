"""Published config.json files, in full or in the parts that matter, give the sizes that the
families list.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import rules
from jaxspec.nets import decoder
from jaxspec.weights import hf_families, huggingface
from jaxspec.weights.hf_families import FAMILIES, FamilyError
from tests.marks import marked
from tests.small import random_params

LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu", "vocab_size": 128256}
LLAMA31 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 |= {"original_max_position_embeddings": 8192}
GEMMA3 = {
    "model_type": "gemma3_text",
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
}
PUBLISHED = {  # as the files on the hub have them, without what does not change the network
    "t5-small": {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": 512,
        "d_ff": 2048,
        "d_kv": 64,
        "num_heads": 8,
        "num_layers": 6,
        "n_positions": 512,
        "relative_attention_num_buckets": 32,
        "layer_norm_epsilon": 1e-06,
        "decoder_start_token_id": 0,
    },
    "t5-v1_1-xxl": {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": 4096,
        "d_ff": 10240,
        "d_kv": 64,
        "num_heads": 64,
        "num_layers": 24,
        "num_decoder_layers": 24,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "mt5-small": {
        "model_type": "mt5",
        "vocab_size": 250112,
        "d_model": 512,
        "d_ff": 1024,
        "d_kv": 64,
        "num_heads": 6,
        "num_layers": 8,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "umt5-small": {
        "model_type": "umt5",
        "vocab_size": 256384,
        "d_model": 512,
        "d_ff": 1024,
        "d_kv": 64,
        "num_heads": 6,
        "num_layers": 8,
        "num_decoder_layers": 8,
        "feed_forward_proj": "gated-gelu",
        "scalable_attention": True,
        "tie_word_embeddings": False,
    },
    "bart-large-cnn": {
        **{
            "model_type": "bart",
            "vocab_size": 50264,
            "d_model": 1024,
            "activation_function": "gelu",
        },
        **{"encoder_layers": 12, "encoder_ffn_dim": 4096, "encoder_attention_heads": 16},
        **{"decoder_layers": 12, "decoder_ffn_dim": 4096, "decoder_attention_heads": 16},
        **{"max_position_embeddings": 1024, "scale_embedding": False, "num_hidden_layers": 12},
        **{"add_final_layer_norm": False, "normalize_before": False, "normalize_embedding": True},
        **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
        **{"forced_bos_token_id": 0, "forced_eos_token_id": 2},
    },
    "mbart-large-50": {
        **{
            "model_type": "mbart",
            "vocab_size": 250054,
            "d_model": 1024,
            "activation_function": "relu",
        },
        **{"encoder_layers": 12, "encoder_ffn_dim": 4096, "encoder_attention_heads": 16},
        **{"decoder_layers": 12, "decoder_ffn_dim": 4096, "decoder_attention_heads": 16},
        **{"max_position_embeddings": 1024, "scale_embedding": True, "normalize_before": True},
        **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    },
    "opus-mt-en-de": {
        **{
            "model_type": "marian",
            "vocab_size": 58101,
            "d_model": 512,
            "activation_function": "swish",
        },
        **{"encoder_layers": 6, "encoder_ffn_dim": 2048, "encoder_attention_heads": 8},
        **{"decoder_layers": 6, "decoder_ffn_dim": 2048, "decoder_attention_heads": 8},
        **{
            "max_position_embeddings": 512,
            "scale_embedding": True,
            "static_position_embeddings": True,
        },
        **{
            "bos_token_id": 0,
            "pad_token_id": 58100,
            "eos_token_id": 0,
            "decoder_start_token_id": 58100,
        },
        **{"bad_words_ids": [[58100]], "num_beams": 6, "forced_eos_token_id": 0},
    },
    "nllb-200-distilled-600m": {
        **{
            "model_type": "m2m_100",
            "vocab_size": 256206,
            "d_model": 1024,
            "activation_function": "relu",
        },
        **{"encoder_layers": 12, "encoder_ffn_dim": 4096, "encoder_attention_heads": 16},
        **{"decoder_layers": 12, "decoder_ffn_dim": 4096, "decoder_attention_heads": 16},
        **{"max_position_embeddings": 1024, "scale_embedding": True, "max_length": 200},
        **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "n_ctx": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
    },
    "llama-2-7b": LLAMA
    | {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
    }
    | {
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rope_scaling": None,
    }
    | {"pretraining_tp": 1, "tie_word_embeddings": False},
    "llama-3.1-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0}
    | {"rope_scaling": LLAMA31 | {"factor": 8.0}, "attention_bias": False, "mlp_bias": False},
    "llama-3.2-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    }
    | {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    }
    | {"rope_scaling": LLAMA31 | {"factor": 32.0}, "tie_word_embeddings": True},
    "mistral-7b-v0.1": {
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
    }
    | {
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
    }
    | {"sliding_window": 4096, "rope_theta": 10000.0, "max_position_embeddings": 32768},
    "mistral-7b-v0.3": {
        "model_type": "mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
    }
    | {
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
    }
    | {"sliding_window": None, "rope_theta": 1000000.0, "max_position_embeddings": 32768},
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
    }
    | {
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    }
    | {
        "max_window_layers": 24,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
    }
    | {"rms_norm_eps": 1e-06, "tie_word_embeddings": True},
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
    }
    | {
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    | {
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": True,
    },
    "gemma-2-2b": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
    }
    | {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    | {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
    }
    | {"sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0}
    | {"max_position_embeddings": 8192, "cache_implementation": "hybrid"},
    "gemma-3-1b": GEMMA3
    | {
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "head_dim": 256,
    }
    | {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
    }
    | {"sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "attn_logit_softcapping": None},
    "gemma-3-4b": {  # a model that also sees; its text half says little, and relies on defaults
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
        }
        | {
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    },
}
SIZES = {name: (family, config) for family in FAMILIES for name, config in family.sizes.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_the_published_sizes(name):
    family, config = SIZES[name]
    assert hf_families.of(PUBLISHED[name]) is family
    assert family.read(PUBLISHED[name]) == config


def test_mimo_is_a_qwen_2():
    table = PUBLISHED["qwen2.5-0.5b"]
    mimo = table | {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1}
    family = hf_families.of(mimo)
    assert family is hf_families.of(table) and family.read(mimo) == family.read(table)


def test_names_of_sizes_are_used_once():
    assert len(SIZES) == sum(len(family.sizes) for family in FAMILIES)


@pytest.mark.parametrize("name", [name for name, (family, _) in SIZES.items() if family.write])
def test_what_is_written_is_read_as_it_was(name):
    family, config = SIZES[name]
    assert family.read(family.write(config)) == config


@pytest.mark.parametrize(
    "name", marked(SIZES, slow=SIZES.keys() - {next(iter(x.sizes), "") for x in FAMILIES})
)
def test_every_parameter_has_one_place(name):
    """No two parameters lie in the same part of a tensor; those of one tensor are of one layer."""
    family, config = SIZES[name]
    names = family.names(config)
    assert len(set(names.values())) == len(names)
    tensors: dict[str, set[str]] = {}
    for path, tensor in names.items():
        tensors.setdefault(tensor.name, set()).add(path.partition("/")[0])
    assert {len(layers) for layers in tensors.values()} == {1}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama-3.1-8b",
            {"model_type": "mamba"},
            "model_type is 'mamba': expected one of t5, mt5, .*, llama",
        ),
        ("llama-3.1-8b", {"quantization_config": {"bits": 4}}, "its weights are quantised"),
        (
            "llama-3.1-8b",
            {"rope_scaling": {"type": "su"}},
            "the rope scaling is 'su': expected one of default",
        ),
        ("llama-3.1-8b", {"rope_scaling": {"type": "yarn"}}, "it lacks 'factor'"),
        ("llama-3.1-8b", {"rope_scaling": {"rope_type": "linear"}}, "it lacks 'factor'"),
        (
            "llama-3.1-8b",
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
            "full_attention is .*: only None",
        ),
        ("llama-3.1-8b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: only 1.0"),
        ("llama-3.1-8b", {"hidden_size": None}, "it lacks 'hidden_size'"),
        (
            "llama-3.1-8b",
            {"hidden_act": "quick_gelu"},
            "the activation is 'quick_gelu': expected one of silu",
        ),
        (
            "llama-3.1-8b",
            {"num_key_value_heads": 5},
            "32 query heads cannot share 5 key-value heads",
        ),
        (
            "gemma-3-1b",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types has chunked_attention",
        ),
        (
            "gemma-3-1b",
            {"layer_types": ["full_attention"]},
            "layer_types has 1 layers, num_hidden_layers is 26",
        ),
        (
            "gemma-3-1b",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is True",
        ),
        ("gemma-3-1b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: only"),
        (
            "gemma-3-1b",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 4.0}}},
            "rope_type is 'linear': only 'default'",
        ),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"activation_function": "tanh"}, "the activation is 'tanh': expected one of silu"),
        (
            "t5-small",
            {"feed_forward_proj": "tanh"},
            "feed_forward_proj is 'tanh': expected one of relu",
        ),
        (
            "t5-small",
            {"relative_attention_num_buckets": 2},
            "2 buckets for distances up to 128: expected at least 4",
        ),
        (
            "t5-small",
            {"relative_attention_max_distance": 16},
            "32 buckets for distances up to 16: expected at least 4",
        ),
        (
            "t5-small",
            {"decoder_start_token_id": 32128},
            "the start of a row has 32128: expected ids from 0 to 32127",
        ),
        (
            "t5-small",
            {"decoder_start_token_id": None, "pad_token_id": None},
            "it lacks 'decoder_start_token_id'",
        ),
    ],
)
def test_what_would_compute_something_else_is_refused(name, changes, message):
    table = PUBLISHED[name] | changes
    with pytest.raises(ValueError, match=message):
        hf_families.of(table).read(table)


def test_local_rotary_positions_that_are_null_are_the_published_ones():
    table = PUBLISHED["gemma-3-1b"] | {
        "rope_parameters": {"full_attention": None, "sliding_attention": None}
    }
    assert hf_families.of(table).read(table) == SIZES["gemma-3-1b"][1]


@pytest.mark.slow
def test_a_shape_like_lamdas_is_sampled_with_top_40():
    """Speculative text, by the coupled rule, is token for token plain text; and no token is outside
    of the 40.
    """
    shape = {"activation": "gelu", "tied_head": True, "positions": "relative"}
    configs = [decoder.decoder_config(96, dim, 64, 1, 2, 2, 8, **shape) for dim in (24, 16)]
    target, draft = (
        jaxspec.Model(
            decoder.language_model(config),
            random_params(decoder.init, config, i),
            None,
            config,
            "lamda",
        )
        for i, config in enumerate(configs)
    )
    prompt = jaxspec.Prompt(jnp.array([[3, 1, 4], [1, 5, 0], [9, 2, 6]]), jnp.array([3, 2, 3]))
    options = {
        "temperature": 1.0,
        "top_k": np.array([40, 40, 96]),
        "key": jax.random.key(2),
        "max_new_tokens": 24,
    }
    fast = jaxspec.generate(target, prompt, drafter=draft, gamma=3, rule=rules.coupled(), **options)
    plain = jaxspec.generate(target, prompt, **options)
    assert fast.stats.accepted.sum() > 0 and fast.stats.rounds.min() < 24
    assert (fast.tokens == plain.tokens).all()

    # with full prompts
    rows = jnp.concatenate([prompt.tokens, jnp.asarray(fast.tokens)], axis=1)[jnp.array([0, 2])]
    logits = jax.jit(decoder.DecoderNet(target.config).apply)({"params": target.params}, rows)[
        :, 2:-1
    ]
    said = jnp.take_along_axis(logits, rows[:, 3:, None], axis=2)
    # how many tokens were likelier than one that was said
    ranks = (logits > said).sum(axis=2).max(axis=1)
    assert ranks[0] < 40 <= ranks[1]


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
SMALL |= {"vocab_size": 61, "num_key_value_heads": 2, "max_position_embeddings": 64}
NEWER = {  # as files have them that rely on defaults, or are older than transformers 5
    "cohere2": {
        "order_of_interleaved_layers": "local_attn_first",
        "rotary_pct": 1.0,
        "sliding_window": 8,
    },
    "hunyuan_v1_dense": {"add_classification_head": False, "org_vocab_size": 0, "head_dim": 8},
    "exaone4": {
        "sliding_window_pattern": None,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "starcoder2": {"norm_epsilon": None, "sliding_window": None},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0, 1, 1]},
    "phi3": {"rope_parameters": {"partial_rotary_factor": 0.5}},
    "gemma": {"hidden_act": "gelu", "head_dim": 8},
}


@pytest.mark.parametrize("model_type", NEWER)
def test_older_and_shorter_files_are_read(model_type):
    table = SMALL | NEWER[model_type] | {"model_type": model_type}
    config = hf_families.of(table).read(table)
    assert len(config.layers) == 4
    if model_type == "gemma":
        assert config.layers[0].ff.activation == "gelu"
    if model_type == "phi3":
        assert config.layers[0].attention.rotary.dims == 4
    if model_type in ("cohere2", "smollm3"):
        assert [layer.attention.rotary is None for layer in config.layers] == [False] * 3 + [True]


def test_the_first_context_beside_the_rotary_keys_counts_before_theirs():
    """As in transformers."""
    scaled = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for name, turns in (
        ("llama", scaled),
        ("phi3", longrope | {"original_max_position_embeddings": 32}),
    ):
        table = SMALL | {
            "model_type": name,
            "head_dim": 8,
            "rope_parameters": turns | {"rope_theta": 1e4},
        }
        for changes, first in (({}, 32), ({"original_max_position_embeddings": 16}, 16)):
            config = hf_families.of(table).read(table | changes)
            assert first == (
                config.max_positions
                if name == "phi3"
                else config.layers[0].attention.rotary.scaling.original
            )


BASES = {
    "cohere": 5e5,
    "cohere2": 1e4,
    "ernie4_5": 5e5,
    "olmo3": 5e5,
    "helium": 1e5,
    "smollm3": 2e6,
    "olmo2": 1e4,
}


@pytest.mark.parametrize("model_type", BASES)
def test_a_file_without_a_rotary_base_has_its_familys(model_type):
    table = SMALL | {"model_type": model_type, "head_dim": 8}
    assert hf_families.of(table).read(table).layers[0].attention.rotary.base == BASES[model_type]


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("granitemoehybrid", {}, "num_local_experts is 8: expected 0, a dense Granite 4"),
        (
            "granitemoehybrid",
            {"num_local_experts": 0},
            "layer_types has mamba: expected attention and full_attention",
        ),
        (
            "granitemoehybrid",
            {"num_local_experts": 0, "position_embedding_type": "alibi"},
            "position_embedding_type is 'alibi': expected 'rope' or 'nope'",
        ),
        ("qwen3_5_text", {"num_experts": 8}, "num_experts is 8: only 0 is supported"),
        ("qwen3_5_text", {"layer_types": 4}, "layer_types is 4: expected a list of names"),
        (
            "gemma4_text",
            {"layer_types": "full_attention"},
            "layer_types is 'full_attention': expected a list of names",
        ),
        (
            "olmo3",
            {"layer_types": [0, 1, 0, 1]},
            r"layer_types is \[0, 1, 0, 1\]: expected a list of names",
        ),
        ("mixtral", {"num_local_experts": 0}, "num_experts_per_tok is 2, and there are 0 experts"),
        (
            "phi3",
            {"rope_scaling": {"type": "yarn"}},
            "rope type is 'yarn': expected default or longrope",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope type is 'linear': expected default or longrope",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": "x"}},
            "alpha is 'x': expected a positive number",
        ),
        (
            "smollm3",
            {"no_rope_layers": [1, 1]},
            "no_rope_layers has 2 layers, num_hidden_layers is 4",
        ),
    ],
)
def test_what_a_newer_family_would_compute_otherwise_is_refused(model_type, changes, message):
    table = SMALL | changes | {"model_type": model_type}
    with pytest.raises(ValueError, match=message):
        hf_families.of(table).read(table)


def test_the_text_half_of_a_mistral_3(tmp_path, caplog):
    """Published files have its tensors under a prefix; a Ministral 3 scales its queries by their
    positions.
    """
    config = decoder.decoder_config(
        31,
        dim=16,
        ff_dim=24,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=4,
        epsilon=1e-5,
        max_positions=64,
    )
    params = decoder.init(config, jax.random.key(0))
    model = jaxspec.core.Model(decoder.language_model(config), params, config=config)
    folder = huggingface.save(model, tmp_path / "it")
    tensors = {
        f"language_model.{name}": x for name, x in load_file(folder / "model.safetensors").items()
    }
    tensors["vision_tower.patch_conv.weight"] = np.ones((2, 2), np.float32)
    tensors["multi_modal_projector.linear_1.weight"] = np.ones((2, 2), np.float32)
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text()) | {
        "model_type": "mistral",
        "sliding_window": None,
    }
    wrapper = {
        "model_type": "mistral3",
        "text_config": text,
        "vision_config": {"model_type": "pixtral"},
    }
    (folder / "config.json").write_text(json.dumps(wrapper))
    loaded = jaxspec.load(folder)
    assert (
        loaded.config == config
        and "not multi_modal_projector, vision_tower (2 tensors)" in caplog.text
    )
    jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)
    text = {**text, "model_type": "ministral3", "rope_theta": None, "tie_word_embeddings": None}
    newer = hf_families.of(wrapper).read(wrapper | {"text_config": text})
    assert newer.layers[0].attention.rotary.query_beta == 0.1 and newer.tied_head
    with pytest.raises(
        FamilyError,
        match=r"text_config\.model_type is 'llama': expected one of mistral, ministral3",
    ):
        hf_families.of(wrapper).read(wrapper | {"text_config": text | {"model_type": "llama"}})
