"""Random configurations of every family, saved by transformers with random weights: the same
logits, or a refusal.

All have one set of shapes and nothing is jitted, so operations are compiled once for all of them.
"""

import dataclasses
import functools
import json
import math
import os
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.models.auto import modeling_auto

import jaxspec
from jaxspec import drafters
from jaxspec.core import Room
from jaxspec.files import folders
from jaxspec.testing import word_tokenizer
from jaxspec.weights import hf_families, huggingface, source
from jaxspec.weights.hf_families import decoders, phi
from jaxspec.weights.source import DROPPED
from tests.weights.folders import model_of

# FED of the STEPS tokens are read from a cache: half, so that both passes have one shape
SEED, STEPS, FED = 21, 24, 12
ROWS = np.array([FED, 7])  # tokens of the two prompts, in one batch
# shorter than the prompts, longer than these but shorter than their rows, longer than all
WINDOWS = (3, 15, 28, 6)
WORDS = 61  # of the tokenizers; a vocabulary may have more ids
FRAMES = 10  # of Whisper's sound; its encoder has half as many positions
LENGTHS = {"vocab_size": WORDS, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DECODER = LENGTHS | SIZES | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
BUFFERS = ("layer_scalar", "act_fn.beta", "act_fn.eps", "final_logits_bias")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "gelu_fast")


class Draw(random.Random):
    """Draws the options of a configuration. The first two have between them what those of any ten
    have.
    """

    def __init__(self, architecture: str, number: int):
        super().__init__(f"{SEED} {architecture} {number}")
        self.is_first = number < 2
        self.is_tied, self.vocab = ((True, WORDS + 3), (False, WORDS))[number % 2]
        if not self.is_first:
            self.is_tied, self.vocab = self.random() < 0.5, self.choice([WORDS, WORDS + 3])
        self.window = WINDOWS[number] if number < len(WINDOWS) else self.choice(WINDOWS)

    def has_window(self) -> bool:
        """Draws whether there is one where there need not be."""
        return self.is_first or self.random() < 0.5

    def window_or_none(self) -> int | None:
        return self.window if self.has_window() else None


def rope(draw: Draw) -> dict:
    kind = draw.choice(["default", "linear", "llama3", "yarn", "yarn", "yarn", "dynamic"])
    scaling = {"rope_type": kind, "rope_theta": draw.choice([1e4, 1e3, 5e5])}
    if kind == "default":
        return scaling
    scaling["factor"] = draw.choice([2.0, 4.0, 8.0])
    if kind == "llama3":
        scaling |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        }
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = draw.choice([4, 8, 16])
        choices = {"attention_factor": 0.7, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}
        scaling |= {key: value for key, value in choices.items() if draw.random() < 0.4}
        if draw.random() < 0.3:
            scaling |= {"mscale": 0.7, "mscale_all_dim": 1.2}
    return scaling


def of_layers(scaling: dict) -> dict:
    """Of tables by kinds of layers transformers 5.24 looks for `truncate` one level too high, and
    ignores it.
    """
    return {key: value for key, value in scaling.items() if key != "truncate"}


def decoder(draw: Draw) -> dict:
    return DECODER | {
        "vocab_size": draw.vocab,
        "hidden_act": draw.choice(ACTIVATIONS),
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-2]),
        "tie_word_embeddings": draw.is_tied,
        "rope_parameters": rope(draw),
    }


def llama(draw):
    return decoder(draw) | {"attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5}


def mistral(draw):
    return decoder(draw) | {"sliding_window": draw.window_or_none()}


def ministral3(draw):
    """Queries of positions from `original_max_position_embeddings` on are scaled."""
    scaling = rope(draw) | {"original_max_position_embeddings": draw.choice([3, 4, 8])}
    scaling |= {"llama_4_scaling_beta": draw.choice([0.1, 0.7])}
    return decoder(draw) | {"sliding_window": draw.window_or_none(), "rope_parameters": scaling}


def qwen(draw):
    windowed = {
        "use_sliding_window": True,
        "sliding_window": draw.window,
        "max_window_layers": draw.choice([0, 1]),
    }
    return decoder(draw) | (windowed if draw.has_window() else {})


def qwen3_5(draw):
    table = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    table |= {"linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention"]}
    table = decoder(draw) | {"attention_bias": draw.random() < 0.5, "hidden_act": "silu"} | table
    share = {"partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])}
    return table | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | share}


def gemma2(draw):
    table = decoder(draw) | {
        "sliding_window": draw.window,
        "query_pre_attn_scalar": draw.choice([8, 12]),
    }
    table |= {"hidden_activation": table.pop("hidden_act"), "attention_bias": draw.random() < 0.5}
    return table | {
        key: draw.choice([None, 3.0])
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    }


def gemma3(draw):
    table = gemma2(draw) | {"attn_logit_softcapping": None, "sliding_window_pattern": 2}
    local = {"rope_type": "default", "rope_theta": 1e3}
    return table | {
        "rope_parameters": {"full_attention": of_layers(rope(draw)), "sliding_attention": local}
    }


def gemma(draw):
    return decoder(draw) | {"attention_bias": draw.random() < 0.5}


def ministral(draw):
    return decoder(draw) | {
        "sliding_window": draw.window,
        "layer_types": ["sliding_attention", "full_attention"],
    }


def phi3(draw):  # no head_dim of its own
    share = draw.choice([0.5, 1.0])
    count = int(8 * share) // 2
    scaled = {"rope_type": "longrope", "short_factor": [1.0 + 0.3 * i for i in range(count)]}
    scaled |= {"long_factor": [2.0] * count}
    table = decoder(draw) | {"original_max_position_embeddings": STEPS}
    table |= {
        "rope_parameters": draw.choice([{"rope_type": "default"}, scaled]) | {"rope_theta": 1e4}
    }
    table["rope_parameters"]["partial_rotary_factor"] = share
    return table | {"sliding_window": draw.window_or_none()}


def olmo2(draw):
    return decoder(draw) | {"attention_bias": draw.random() < 0.5}


def olmo3(draw):
    table = decoder(draw) | {
        "sliding_window": draw.window,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    local = {"rope_type": "default", "rope_theta": draw.choice([1e3, 1e4])}
    return table | {
        "rope_parameters": {"full_attention": of_layers(rope(draw)), "sliding_attention": local}
    }


def exaone4(draw):
    full = ["full_attention"] * 2
    windowed = {
        "sliding_window": draw.window,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return decoder(draw) | (
        windowed if draw.has_window() else {"sliding_window": None, "layer_types": full}
    )


def granite(draw):
    factors = {"embedding_multiplier": 2.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2}
    return llama(draw) | factors | {"logits_scaling": 4.0}


def granite4(draw):
    table = {key: value for key, value in granite(draw).items() if key != "mlp_bias"}
    table |= {
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 2,
        "shared_intermediate_size": 40,
    }
    return table | {"position_embedding_type": draw.choice(["rope", None]), "mamba_n_heads": 8}


def hyperclovax(draw):
    """With the usual scale of scores, too, and with norms before the blocks alone."""
    table = granite(draw) | {"logits_scaling": 0.25, "use_post_norm": draw.random() < 0.7}
    return table | {"attention_multiplier": draw.choice([None, 0.2])}


def cwm(draw):
    table = decoder(draw) | {"mlp_bias": draw.random() < 0.5, "sliding_window": draw.window}
    return table | {"layer_types": ["full_attention", "sliding_attention"], "bos_token_id": 2}


def cohere(draw):
    normed = draw.random() < 0.5
    return without_head_norms(draw) | {"use_qk_norm": normed}


def without_head_norms(draw):
    table = {
        key: value
        for key, value in decoder(draw).items()
        if key not in ("rms_norm_eps", "head_dim")
    }
    return table | {
        "layer_norm_eps": draw.choice([1e-5, 1e-2]),
        "logit_scale": draw.choice([0.25, 1.5]),
    }


def cohere2(draw):
    return without_head_norms(draw) | {
        "sliding_window": draw.window,
        "layer_types": ["sliding_attention", "full_attention"],
    }


def glm(draw):
    turns = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": draw.choice([0.5, 1.0]),
    }
    return decoder(draw) | {"attention_bias": draw.random() < 0.5, "rope_parameters": turns}


def smollm3(draw):
    table = llama(draw) | {"no_rope_layers": draw.choice([[1, 0], [0, 1], [1, 1]])}
    return table | (
        {"use_sliding_window": True, "sliding_window": draw.window} if draw.has_window() else {}
    )


def seed_oss(draw):
    return llama(draw) | {"attention_out_bias": draw.random() < 0.5}


def hunyuan(draw):
    turns = {
        "rope_type": "dynamic",
        "rope_theta": 1e4,
        "alpha": 50.0,
        "factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    return decoder(draw) | {
        "rope_parameters": draw.choice([turns | {"mscale": 1.0, "mscale_all_dim": 1.0}, rope(draw)])
    }


def stablelm(draw):
    table = glm(draw) | {
        "layer_norm_eps": draw.choice([1e-5, 1e-2]),
        "use_qkv_bias": draw.random() < 0.5,
    }
    return table | {
        "use_parallel_residual": draw.random() < 0.5,
        "qk_layernorm": draw.random() < 0.5,
    }


def starcoder2(draw):
    table = decoder(draw) | {
        "norm_epsilon": draw.choice([1e-5, 1e-2]),
        "use_bias": draw.random() < 0.5,
    }
    return table | {"sliding_window": draw.window_or_none()}


def nemotron(draw):
    return glm(draw) | {
        "norm_eps": draw.choice([1e-5, 1e-2]),
        "mlp_bias": draw.random() < 0.5,
        "hidden_act": "relu2",
    }


def arcee(draw):
    return llama(draw) | {"hidden_act": draw.choice(["relu2", "silu"])}


def apertus(draw):
    return decoder(draw) | {
        "attention_bias": draw.random() < 0.5,
        "hidden_act": draw.choice(["xielu", "xielu", "silu"]),
    }


def ernie(draw):
    return decoder(draw) | {"use_bias": draw.random() < 0.5}


def gemma4(draw):
    """Of both widths of head, with and without shared layers, embeddings per layer, and values that
    are keys.
    """
    kinds = [
        ["sliding_attention", "full_attention"] * 2,
        ["sliding_attention"] * 3 + ["full_attention"],
    ]
    table = decoder(draw) | {
        "num_hidden_layers": 4,
        "layer_types": draw.choice(kinds),
        "sliding_window": draw.window,
    }
    table |= {"hidden_activation": table.pop("hidden_act"), "attention_bias": draw.random() < 0.3}
    local = {"rope_type": "default", "rope_theta": draw.choice([1e3, 1e4])}
    turns = {
        "rope_type": "proportional",
        "rope_theta": 1e4,
        "partial_rotary_factor": draw.choice([0.25, 0.5]),
    }
    table |= {"rope_parameters": {"full_attention": turns, "sliding_attention": local}}
    table |= {
        "global_head_dim": draw.choice([8, 16]),
        "final_logit_softcapping": draw.choice([None, 3.0]),
    }
    table |= {
        "hidden_size_per_layer_input": draw.choice([0, 4]),
        "vocab_size_per_layer_input": draw.vocab,
    }
    if draw.random() < 0.5:
        table |= {"attention_k_eq_v": True, "num_global_key_value_heads": draw.choice([1, 2, 4])}
    if draw.random() < 0.5:
        table |= {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
        }
    # transformers shares keys only where there are embeddings per layer.
    if table["layer_types"] == kinds[0] and table["hidden_size_per_layer_input"]:
        table |= {
            "num_kv_shared_layers": draw.choice([1, 2]),
            "use_double_wide_mlp": draw.random() < 0.5,
        }
    return table


def qwen3_moe(draw):
    table = decoder(draw) | {
        "num_experts": draw.choice([4, 6]),
        "num_experts_per_tok": draw.choice([1, 2, 3]),
    }
    table |= {
        "moe_intermediate_size": 20,
        "norm_topk_prob": draw.random() < 0.5,
        "attention_bias": draw.random() < 0.5,
    }
    table |= draw.choice([{}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
    return table | (
        {"use_sliding_window": True, "sliding_window": draw.window} if draw.has_window() else {}
    )


def mixtral(draw):
    table = decoder(draw) | {
        "num_local_experts": draw.choice([4, 8]),
        "num_experts_per_tok": draw.choice([1, 2]),
    }
    return table | {"sliding_window": draw.window_or_none()}


def gpt_oss(draw):
    table = decoder(draw) | {
        "num_local_experts": draw.choice([4, 8]),
        "num_experts_per_tok": draw.choice([1, 2, 3]),
    }
    kinds = draw.choice([["sliding_attention", "full_attention"], ["full_attention"] * 2])
    table |= {"hidden_act": "silu", "sliding_window": draw.window, "layer_types": kinds}
    table |= {"swiglu_limit": draw.choice([0.5, 7.0]), "swiglu_alpha": draw.choice([1.0, 1.702])}
    return table | {"attention_bias": draw.random() < 0.7}


def gpt2(draw):
    return LENGTHS | {
        "vocab_size": draw.vocab,
        **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 48},
        "activation_function": draw.choice(ACTIVATIONS),
        "layer_norm_epsilon": draw.choice([1e-5, 1e-3, 1e-1]),
        "scale_attn_weights": draw.random() < 0.5,
        "scale_attn_by_inverse_layer_idx": draw.random() < 0.5,
        "tie_word_embeddings": draw.is_tied,
    }


def t5(draw):
    return LENGTHS | {
        "vocab_size": draw.vocab,
        "tie_word_embeddings": draw.is_tied,
        **{
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        "feed_forward_proj": draw.choice(
            ["relu", "gelu", "silu", "gated-gelu", "gated-silu", "gated-relu"]
        ),
        "layer_norm_epsilon": draw.choice([1e-6, 1e-3]),
        "relative_attention_num_buckets": draw.choice([8, 32]),
    }


def t5gemma(draw):
    def side() -> dict:
        sizes = decoder(draw) | {
            "num_hidden_layers": draw.choice([1, 2, 3]),
            "num_key_value_heads": draw.choice([1, 2]),
        }
        del sizes["hidden_act"]
        options = {"sliding_window": draw.window, "query_pre_attn_scalar": draw.choice([8, 12])}
        options |= {
            "hidden_activation": draw.choice(ACTIVATIONS),
            "attention_bias": draw.random() < 0.5,
        }
        caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": draw.choice([None, 3.0])}
        return sizes | options | caps | {"bos_token_id": 2}

    wide = {"hidden_size": draw.choice([32, 48])}
    return {"encoder": side() | wide, "decoder": side(), "tie_word_embeddings": draw.is_tied}


def bart(draw):
    sides = {"ffn_dim": 48, "layers": 2, "attention_heads": draw.choice([2, 4])}
    return LENGTHS | {
        "vocab_size": draw.vocab,
        **{
            f"{side}_{key}": value
            for side in ("encoder", "decoder")
            for key, value in sides.items()
        },
        **{
            "d_model": 32,
            "max_position_embeddings": 32,
            "decoder_start_token_id": 2,
            "pad_token_id": 1,
        },
        "activation_function": draw.choice(ACTIVATIONS),
        "scale_embedding": draw.random() < 0.5,
    }


def marian(draw):
    own = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 67}
    return bart(draw) | {"pad_token_id": 2} | (own if draw.random() < 0.5 else {})


def whisper(draw):
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": draw.choice([1, 3])}
    sizes |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")}
    ids = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    }
    mels = {"num_mel_bins": draw.choice([4, 6]), "max_source_positions": FRAMES // 2}
    activation = draw.choice(["gelu", "relu", "gelu_new"])
    return (
        sizes
        | ids
        | mels
        | {"vocab_size": draw.vocab, "max_target_positions": 32, "activation_function": activation}
    )


# A family without an entry has the options of a Llama, if it has its keys.
FAMILIES = {
    family.architecture: llama
    for family in hf_families.FAMILIES
    if family.keys.keys() >= decoders.KEYS.keys()
} | {
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen,
    "Qwen3ForCausalLM": qwen,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "GemmaForCausalLM": gemma,
    "Gemma4ForCausalLM": gemma4,
    "MinistralForCausalLM": ministral,
    "Ministral3ForCausalLM": ministral3,
    "Phi3ForCausalLM": phi3,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "Exaone4ForCausalLM": exaone4,
    "GraniteForCausalLM": granite,
    "GraniteMoeHybridForCausalLM": granite4,
    "HyperCLOVAXForCausalLM": hyperclovax,
    "CwmForCausalLM": cwm,
    "CohereForCausalLM": cohere,
    "Cohere2ForCausalLM": cohere2,
    "GlmForCausalLM": glm,
    "Glm4ForCausalLM": glm,
    "Ernie4_5ForCausalLM": ernie,
    "SmolLM3ForCausalLM": smollm3,
    "SeedOssForCausalLM": seed_oss,
    "HunYuanDenseV1ForCausalLM": hunyuan,
    "StableLmForCausalLM": stablelm,
    "Starcoder2ForCausalLM": starcoder2,
    "NemotronForCausalLM": nemotron,
    "ArceeForCausalLM": arcee,
    "ApertusForCausalLM": apertus,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "MixtralForCausalLM": mixtral,
    "GptOssForCausalLM": gpt_oss,
    "GPT2LMHeadModel": gpt2,
    "T5ForConditionalGeneration": t5,
    "UMT5ForConditionalGeneration": t5,
    "T5GemmaForConditionalGeneration": t5gemma,
    "BartForConditionalGeneration": bart,
    "MBartForConditionalGeneration": bart,
    "MarianMTModel": marian,
    "M2M100ForConditionalGeneration": bart,
    "WhisperForConditionalGeneration": whisper,
}
# With more options than two configurations have.
OFTEN = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM")
# Of log-probabilities. With the flags that let tests compile sooner a Gemma 4 is off by 1.4e-4,
# without them by 9e-6.
MOST_OFF = 2e-4 if os.environ.get("XLA_FLAGS") else 1e-4
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def options_of(architecture: str, number: int) -> dict:
    return FAMILIES[architecture](Draw(architecture, number))


@functools.cache
def config_class(architecture: str) -> Any:
    """Returns transformers' class of configurations for a class of models; PyTorch need not be
    installed.
    """
    names = vars(modeling_auto)
    tables = [
        table
        for name, table in names.items()
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")
    ]
    model_types = {
        model_type for table in tables for model_type, name in table.items() if name == architecture
    }
    # Others' configurations may be of the same class of models: Llama's has that of EXAONE 3 as
    # well. A model for text and images has the text's configuration inside of its own.
    name = architecture.lower().replace("_", "")
    named_so = {x for x in model_types if name.startswith(x.removesuffix("_text").replace("_", ""))}
    of_text = {x for x in named_so if x.endswith("_text")}
    return transformers.CONFIG_MAPPING[min(of_text or named_so or model_types)]


def saved_peer(architecture: str, options: dict, folder: Path, seed: int = SEED) -> Any:
    """Makes transformers' model with all that is learned drawn, and saves it with a tokenizer."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model_class = getattr(transformers, architecture)
    peer = model_class._from_config(model_class.config_class(**options), **EAGER).eval()
    with torch.no_grad():
        for x in drawn(peer):
            x.normal_(0, 0.4)
    peer.save_pretrained(folder)
    if options.get("num_mel_bins") is None:  # a Whisper's tokenizer has other files
        tokenizer().save_pretrained(folder)
    return peer


@functools.cache
def tokenizer() -> Any:
    return word_tokenizer(["<unk>", "</s>", *(f"w{i}" for i in range(2, WORDS))], pad_token="<unk>")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_is_written_of_random_configurations_is_read_as_it_was(architecture):
    """The config.json that each was read from, with what has changed; in a folder and a manifest."""
    for number in range(4):
        table = json.loads(json.dumps(config_of(architecture, number)))
        tables = {source.CONFIG: table}
        family, config = source.configured(tables)
        kept = source.written(config, tables, {})[1]
        assert kept == {source.CONFIG: {key: x for key, x in table.items() if key not in DROPPED}}
        for change in changes(config):
            changed = dataclasses.replace(config, **change)
            _, written = source.written(changed, tables, {})
            _, read = source.configured(written)
            beside = source.beside(family, read, changed)
            assert dataclasses.replace(read, **beside) == changed, (number, change)
            toml = tomllib.loads(folders.to_toml(source.to_toml(written, beside)))
            assert source.from_toml(toml) == (written, changed)


def config_of(architecture: str, number: int) -> dict:
    """Returns the config.json of a random configuration."""
    return config_class(architecture)(**options_of(architecture, number)).to_dict()


def changes(config: Any) -> Iterator[dict[str, Any]]:
    """Yields changes that loading, or who loads, makes to a configuration."""
    names = {field.name for field in dataclasses.fields(config)}
    yield {"end_tokens": (5, 6)}
    if "tied_head" in names:
        yield {"tied_head": not config.tied_head}
    if "start_token" in names:
        yield {"start_token": 7}
    if "begin_tokens" in names and "speech" not in names:
        yield {"begin_tokens": (7,)}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_number_that_a_family_reads_has_a_check_by_its_name(architecture):
    """Any number or flag of a config.json may be a text: it is refused by its name, or not read."""
    table = config_of(architecture, 0)
    config = hf_families.of(table).read(table)
    for path in numbers(table):
        wrong = changed(table, path, "much")
        try:
            assert hf_families.of(wrong).read(wrong) == config, path
        except hf_families.FamilyError as error:
            assert str(error).startswith(f"{path[-1]} is 'much': "), path


def numbers(table: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the places of the numbers and flags of a table, and of the tables in it."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from numbers(value, (*path, name))
        elif isinstance(value, int | float):
            yield (*path, name)


def changed(table: dict, path: tuple[str, ...], value: Any) -> dict:
    name, *below = path
    return table | {name: changed(table[name], tuple(below), value) if below else value}


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_log_probabilities_of_random_configurations_are_those_of_transformers(
    architecture, request, tmp_path
):
    """Of ragged batches; two of them, and with `--exhaustive` ten. `-s` shows the worst difference
    of each family.
    """
    import torch

    tokens, worst = np.random.RandomState(SEED).randint(2, WORDS, (2, STEPS)), 0.0
    for number in range(
        10 if architecture in OFTEN or request.config.getoption("exhaustive") else 2
    ):
        options = options_of(architecture, number)
        folder = tmp_path / str(number)
        peer = saved_peer(architecture, options, folder, number)
        inputs, given = torch.tensor(tokens), {}
        if peer.config.is_encoder_decoder:
            given = {
                "decoder_input_ids": inputs,
                "attention_mask": torch.tensor(np.arange(STEPS) < 2 * ROWS[:, None]),
            }
        if "Whisper" in architecture:
            inputs, given = (
                torch.tensor(sound(peer.config.num_mel_bins)),
                {"decoder_input_ids": inputs},
            )
        if "T5Gemma" not in architecture:  # it is NaN there
            # In float64: in float32 they are up to 6e-5 from that themselves.
            peer, inputs = peer.double(), inputs.double() if inputs.is_floating_point() else inputs
        with torch.no_grad():
            theirs = peer(inputs, use_cache=False, **given).logits.numpy()
        ours = logits(jaxspec.load(folder), tokens, ROWS)
        if not peer.config.is_encoder_decoder:
            theirs = np.stack(
                [row[first - 1 : first + FED] for row, first in zip(theirs, ROWS, strict=True)]
            )
        difference = np.abs(log_probs(ours) - log_probs(theirs)).max()
        assert difference < MOST_OFF, (number, options)
        worst = max(worst, difference)
    print(f"\n{architecture}: {worst:.1e}")


def log_probs(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return (
        wide
        - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - wide.max(-1, keepdims=True)
    )


# of the mean logit; measured: 0.024, 0.039, 0.39
MOST = {"bfloat16": 0.04, "int8": 0.06, "int4": 0.5}


@pytest.mark.slow
def test_every_family_is_read_in_every_dtype_within_its_rounding(tmp_path):
    """A matrix that is taken for another, or turned, is off by as much as the logits are."""
    wrong = []
    tokens = np.random.RandomState(SEED).randint(1, WORDS, (1, STEPS))
    for architecture in FAMILIES:
        tables = {source.CONFIG: config_of(architecture, 1)}
        model = model_of(source.configured(tables)[1])._replace(source=tables)
        model = model._replace(params=jax.tree.map(lambda x: 0.3 * x, model.params))
        folder = huggingface.save(model, tmp_path / architecture)
        exact = logits(jaxspec.load(folder), tokens)
        for dtype, most in MOST.items():
            rounded = logits(jaxspec.load(folder, dtype=dtype), tokens)
            off = np.abs(rounded - exact).mean() / np.abs(exact).mean()
            if not 0 < off < most:
                wrong.append((architecture, dtype, off))
    assert not wrong


# Families whose texts no other test compares with those of transformers.
TEXTS = (
    *(
        "GemmaForCausalLM",
        "MinistralForCausalLM",
        "Ministral3ForCausalLM",
        "Phi3ForCausalLM",
        "Olmo2ForCausalLM",
    ),
    *(
        "Olmo3ForCausalLM",
        "Exaone4ForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeHybridForCausalLM",
    ),
    *(
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "GlmForCausalLM",
        "Glm4ForCausalLM",
        "Ernie4_5ForCausalLM",
    ),
    *("HeliumForCausalLM", "SmolLM3ForCausalLM", "SeedOssForCausalLM", "HunYuanDenseV1ForCausalLM"),
    *(
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "NemotronForCausalLM",
        "ArceeForCausalLM",
        "ApertusForCausalLM",
    ),
)
# by another checkpoint of the family, of one layer; or by itself, which is always right
DRAFTED = {
    "tree": lambda target, draft: drafters.tree(draft, (2, 1)),
    "lookup": lambda target, draft: drafters.prompt_lookup(),
    "chain": lambda target, draft: draft,
    "itself": lambda target, draft: target,
}
NEW, PADDING = 16, [*range(WORDS, WORDS + 3)]


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TEXTS)), ids=TEXTS)
def test_texts_of_random_configurations_are_those_of_transformers(number, request, tmp_path):
    """Plain and drafted, of a ragged batch; with `--exhaustive` by each drafter, and from a folder
    written here.
    """
    import torch

    architecture, prompts = TEXTS[number], [[3, 1, 4, 1, 5, 9, 2], [6, 5]]
    changes = {
        "use_qk_norm": True,
        "qk_layernorm": True,
        "hidden_act": "silu",
        "eos_token_id": None,
    }
    changes |= {"hidden_act": "xielu"} if "Apertus" in architecture else {}
    options = options_of(architecture, 0) | changes
    peers = [saved_peer(architecture, options, tmp_path / "target")]
    shorter = {
        key: options[key][-1:] for key in ("layer_types", "no_rope_layers") if key in options
    }
    saved_peer(
        architecture, options | shorter | {"num_hidden_layers": 1}, tmp_path / "draft", SEED + 1
    )
    target, draft = (jaxspec.load(tmp_path / name) for name in ("target", "draft"))
    if everything := request.config.getoption("exhaustive"):
        huggingface.save(target, tmp_path / "ours")
        # By the name in its file: a dense Granite 4 whose layers are those of a Granite 3 is
        # written as one.
        peers.append(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **EAGER).eval()
        )
    greedy = dict(max_new_tokens=NEW, eos_ids=())
    texts = jaxspec.generate(target, prompts, **greedy).tokens
    for peer in peers:
        peer.generation_config.eos_token_id = None
        for prompt, text in zip(prompts, texts, strict=True):
            # No id that only pads the vocabulary is ever generated here.
            ids = peer.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, suppress_tokens=PADDING
            )
            np.testing.assert_array_equal(ids[0, len(prompt) :].numpy(), text)
    # By default each family has one of the first two: half of them a tree, half of them copies of
    # the prompt.
    for name in DRAFTED if everything else [("tree", "lookup")[number % 2]]:
        drafter = DRAFTED[name](target, draft)
        out = jaxspec.generate(
            target, prompts, drafter=drafter, **({} if name == "tree" else {"gamma": 3}), **greedy
        )
        np.testing.assert_array_equal(out.tokens, texts, err_msg=name)


@pytest.mark.needs_torch
@pytest.mark.slow
def test_longrope_has_short_factors_up_to_the_first_context_and_a_config_json_may_choose_the_long_ones(
    tmp_path, caplog
):
    """transformers takes the long ones as soon as a row is longer, and then for its first tokens,
    too.
    """
    import torch

    turns = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.3, 1.6, 2.0],
        "long_factor": [2.0, 3.0, 1.0, 4.0],
    }
    turns |= {"rope_theta": 1e4, "original_max_position_embeddings": 16}
    options = options_of("Phi3ForCausalLM", 1) | {"rope_parameters": turns, "sliding_window": None}
    options["original_max_position_embeddings"] = 16
    peer = saved_peer("Phi3ForCausalLM", options, tmp_path / "folder")
    tokens = np.random.RandomState(SEED).randint(2, WORDS, (2, STEPS))
    with torch.no_grad():
        short, long = (
            peer(torch.tensor(x), use_cache=False).logits.numpy() for x in (tokens[:, :16], tokens)
        )
    assert np.abs(log_probs(short) - log_probs(long)[:, :16]).max() > 0.01
    phi._tell.cache_clear()
    model = jaxspec.load(tmp_path / "folder")
    assert caplog.text.count("longrope: rows of at most 16 tokens are read, of 32") == 1
    difference = log_probs(logits(model, tokens[:, :16])) - log_probs(short)[:, 7:]
    assert np.abs(difference).max() < 1e-4
    with pytest.raises(ValueError, match=r"need 17 positions, but .* has 16"):
        jaxspec.generate(model, [list(range(2, 11))], max_new_tokens=8)
    # As docs/models.md says.
    file = tmp_path / "folder" / "config.json"
    table = json.loads(file.read_text())
    turns = table["rope_parameters"]
    turns |= {"short_factor": turns["long_factor"], "original_max_position_embeddings": 32}
    turns["attention_factor"] = math.sqrt(1 + math.log(32 / 16) / math.log(16))
    file.write_text(json.dumps(table | {"original_max_position_embeddings": 32}))
    caplog.clear()
    ours = logits(jaxspec.load(tmp_path / "folder"), tokens, ROWS)
    theirs = np.stack([row[first - 1 : first + FED] for row, first in zip(long, ROWS, strict=True)])
    assert np.abs(log_probs(ours) - log_probs(theirs)).max() < 1e-4
    assert "longrope" not in caplog.text


def drawn(peer) -> list:
    """Return all that is learned, and the buffers that files hold."""
    learned = [x for x in peer.parameters() if x.requires_grad]  # Marian's sinusoids are not
    return [*learned, *(x for name, x in peer.named_buffers() if name.endswith(BUFFERS))]


# there are no keys, and looking for them costs an eager operation most of its time
@jax.debug_key_reuse(False)
def logits(
    model: jaxspec.Model, tokens: np.ndarray, lengths: np.ndarray | None = None
) -> np.ndarray:
    """Returns the logits after the prompts and after each token that is fed then, by default half
    of the tokens.

    Of an encoder-decoder prompts have twice the lengths, and all tokens are fed.
    """
    lm, params, row, fed = model.lm, model.params, jnp.asarray(tokens), tokens.shape[1] // 2
    lengths = np.full(len(tokens), fed) if lengths is None else lengths
    if lm.limits.start_token is not None:
        prompt = jaxspec.Prompt(row, jnp.asarray(2 * lengths))
        if lm.prompt_vocab == 0:  # Whisper
            begin = jnp.ones(len(tokens), jnp.int32)
            prompt = jaxspec.Prompt(
                row[:, :1], begin, jnp.asarray(sound(model.config.mels)[: len(tokens)])
            )
        _, cache = lm.prefill(params, prompt, Room(tokens.shape[1] + 1))
        return np.asarray(
            lm.extend(params, lm.rewind(cache, jnp.zeros(len(tokens), jnp.int32)), row)[0].logits
        )
    read, cache = lm.prefill(
        params, jaxspec.Prompt(row[:, :fed], jnp.asarray(lengths)), Room(tokens.shape[1])
    )
    after = lm.extend(
        params,
        cache,
        jnp.stack([x[first : first + fed] for x, first in zip(row, lengths, strict=True)]),
    )
    return np.concatenate([np.asarray(read.logits), np.asarray(after[0].logits)], axis=1)


def sound(mels: int) -> np.ndarray:
    """Return features of sound for a Whisper."""
    return np.random.RandomState(SEED).normal(size=(2, mels, FRAMES)).astype(np.float32)
