"""Random configurations of every family, saved by transformers with random weights: the same logits, or a refusal.

All have one set of shapes and nothing is jitted, so operations are compiled once for all of them.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Room
from jaxspec.weights import hf_families, huggingface
from tests.weights.folders import model_of

SEED, STEPS, FED = 21, 12, 6  # FED of the STEPS tokens are read from a cache: half, so that both passes have one shape
FRAMES = 10  # of Whisper's sound; its encoder has half as many positions
LENGTHS = {"vocab_size": 61, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = LENGTHS | SIZES | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
BUFFERS = ("layer_scalar", "act_fn.beta", "act_fn.eps", "final_logits_bias")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "gelu_fast")


def rope(draw: random.Random) -> dict:
    kind = draw.choice(["default", "linear", "llama3", "yarn", "yarn", "yarn", "dynamic"])
    scaling = {"rope_type": kind, "rope_theta": draw.choice([1e4, 1e3, 5e5])}
    if kind == "default":
        return scaling
    scaling["factor"] = draw.choice([2.0, 4.0, 8.0])
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = draw.choice([4, 8, 16])
        choices = {"attention_factor": 0.7, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}
        scaling |= {key: value for key, value in choices.items() if draw.random() < 0.4}
        if draw.random() < 0.3:
            scaling |= {"mscale": 0.7, "mscale_all_dim": 1.2}
    return scaling


def of_layers(scaling: dict) -> dict:
    """Of tables by kinds of layers transformers 5.24 looks for `truncate` one level too high, and ignores it."""
    return {key: value for key, value in scaling.items() if key != "truncate"}


def decoder(draw: random.Random) -> dict:
    return DECODER | {
        "hidden_act": draw.choice(ACTIVATIONS),
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-2]),
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": rope(draw),
    }


def llama(draw):
    return decoder(draw) | {"attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5}


def mistral(draw):
    return decoder(draw) | {"sliding_window": draw.choice([None, 3, 6])}


def ministral3(draw):
    """Queries of positions from `original_max_position_embeddings` on are scaled."""
    scaling = rope(draw) | {"original_max_position_embeddings": draw.choice([3, 4, 8])}
    scaling |= {"llama_4_scaling_beta": draw.choice([0.1, 0.7])}
    return decoder(draw) | {"sliding_window": draw.choice([None, 3, 6]), "rope_parameters": scaling}


def qwen(draw):
    windowed = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": draw.choice([0, 1])}
    return decoder(draw) | (windowed if draw.random() < 0.5 else {})


def qwen3_5(draw):
    table = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    table |= {"linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention"]}
    table = decoder(draw) | {"attention_bias": draw.random() < 0.5, "hidden_act": "silu"} | table
    share = {"partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])}
    return table | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | share}


def gemma2(draw):
    table = decoder(draw) | {"sliding_window": 3, "query_pre_attn_scalar": draw.choice([8, 12])}
    table |= {"hidden_activation": table.pop("hidden_act"), "attention_bias": draw.random() < 0.5}
    return table | {key: draw.choice([None, 3.0]) for key in ("attn_logit_softcapping", "final_logit_softcapping")}


def gemma3(draw):
    table = gemma2(draw) | {"attn_logit_softcapping": None, "sliding_window_pattern": 2}
    local = {"rope_type": "default", "rope_theta": 1e3}
    return table | {"rope_parameters": {"full_attention": of_layers(rope(draw)), "sliding_attention": local}}


def gemma(draw):
    return decoder(draw) | {"attention_bias": draw.random() < 0.5}


def ministral(draw):
    return decoder(draw) | {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}


def phi3(draw):  # no head_dim of its own
    share = draw.choice([0.5, 1.0])
    count = int(8 * share) // 2
    scaled = {"rope_type": "longrope", "short_factor": [1.0 + 0.3 * i for i in range(count)]}
    scaled |= {"long_factor": [2.0] * count, "original_max_position_embeddings": 16}
    table = decoder(draw) | {"rope_parameters": draw.choice([{"rope_type": "default"}, scaled]) | {"rope_theta": 1e4}}
    table["rope_parameters"]["partial_rotary_factor"] = share
    return table | {"sliding_window": draw.choice([None, 3])}


def olmo2(draw):
    return decoder(draw) | {"attention_bias": draw.random() < 0.5}


def olmo3(draw):
    table = decoder(draw) | {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    local = {"rope_type": "default", "rope_theta": draw.choice([1e3, 1e4])}
    return table | {"rope_parameters": {"full_attention": of_layers(rope(draw)), "sliding_attention": local}}


def exaone4(draw):
    windowed = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    return decoder(draw) | draw.choice([windowed, {"sliding_window": None, "layer_types": ["full_attention"] * 2}])


def granite(draw):
    factors = {"embedding_multiplier": 2.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2}
    return llama(draw) | factors | {"logits_scaling": 4.0}


def granite4(draw):
    table = {key: value for key, value in granite(draw).items() if key != "mlp_bias"}
    table |= {"num_local_experts": 0, "layer_types": ["full_attention"] * 2, "shared_intermediate_size": 40}
    return table | {"position_embedding_type": draw.choice(["rope", None]), "mamba_n_heads": 8}


def cohere(draw):
    normed = draw.random() < 0.5
    return without_head_norms(draw) | {"use_qk_norm": normed}


def without_head_norms(draw):
    table = {key: value for key, value in decoder(draw).items() if key not in ("rms_norm_eps", "head_dim")}
    return table | {"layer_norm_eps": draw.choice([1e-5, 1e-2]), "logit_scale": draw.choice([0.25, 1.5])}


def cohere2(draw):
    return without_head_norms(draw) | {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}


def glm(draw):
    turns = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": draw.choice([0.5, 1.0])}
    return decoder(draw) | {"attention_bias": draw.random() < 0.5, "rope_parameters": turns}


def smollm3(draw):
    table = llama(draw) | {"no_rope_layers": draw.choice([[1, 0], [0, 1], [1, 1]])}
    return table | draw.choice([{}, {"use_sliding_window": True, "sliding_window": 3}])


def seed_oss(draw):
    return llama(draw) | {"attention_out_bias": draw.random() < 0.5}


def hunyuan(draw):
    turns = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
    return decoder(draw) | {
        "rope_parameters": draw.choice([turns | {"mscale": 1.0, "mscale_all_dim": 1.0}, rope(draw)])
    }


def stablelm(draw):
    table = glm(draw) | {"layer_norm_eps": draw.choice([1e-5, 1e-2]), "use_qkv_bias": draw.random() < 0.5}
    return table | {"use_parallel_residual": draw.random() < 0.5, "qk_layernorm": draw.random() < 0.5}


def starcoder2(draw):
    table = decoder(draw) | {"norm_epsilon": draw.choice([1e-5, 1e-2]), "use_bias": draw.random() < 0.5}
    return table | {"sliding_window": draw.choice([None, 3])}


def nemotron(draw):
    return glm(draw) | {"norm_eps": draw.choice([1e-5, 1e-2]), "mlp_bias": draw.random() < 0.5, "hidden_act": "relu2"}


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
    """Of both widths of head, with and without shared layers, embeddings per layer, and values that are keys."""
    kinds = [["sliding_attention", "full_attention"] * 2, ["sliding_attention"] * 3 + ["full_attention"]]
    table = decoder(draw) | {"num_hidden_layers": 4, "layer_types": draw.choice(kinds), "sliding_window": 3}
    table |= {"hidden_activation": table.pop("hidden_act"), "attention_bias": draw.random() < 0.3}
    local = {"rope_type": "default", "rope_theta": draw.choice([1e3, 1e4])}
    turns = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": draw.choice([0.25, 0.5])}
    table |= {"rope_parameters": {"full_attention": turns, "sliding_attention": local}}
    table |= {"global_head_dim": draw.choice([8, 16]), "final_logit_softcapping": draw.choice([None, 3.0])}
    table |= {"hidden_size_per_layer_input": draw.choice([0, 4]), "vocab_size_per_layer_input": 61}
    if draw.random() < 0.5:
        table |= {"attention_k_eq_v": True, "num_global_key_value_heads": draw.choice([1, 2, 4])}
    if draw.random() < 0.5:
        table |= {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12}
    # transformers shares keys only where there are embeddings per layer.
    if table["layer_types"] == kinds[0] and table["hidden_size_per_layer_input"]:
        table |= {"num_kv_shared_layers": draw.choice([1, 2]), "use_double_wide_mlp": draw.random() < 0.5}
    return table


def qwen3_moe(draw):
    table = decoder(draw) | {"num_experts": draw.choice([4, 6]), "num_experts_per_tok": draw.choice([1, 2, 3])}
    table |= {"moe_intermediate_size": 20, "norm_topk_prob": draw.random() < 0.5, "attention_bias": draw.random() < 0.5}
    table |= draw.choice([{}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
    return table | draw.choice([{}, {"use_sliding_window": True, "sliding_window": draw.choice([3, 6])}])


def mixtral(draw):
    table = decoder(draw) | {"num_local_experts": draw.choice([4, 8]), "num_experts_per_tok": draw.choice([1, 2])}
    return table | {"sliding_window": draw.choice([None, 3, 6])}


def gpt_oss(draw):
    table = decoder(draw) | {"num_local_experts": draw.choice([4, 8]), "num_experts_per_tok": draw.choice([1, 2, 3])}
    kinds = draw.choice([["sliding_attention", "full_attention"], ["full_attention"] * 2])
    table |= {"hidden_act": "silu", "sliding_window": draw.choice([3, 6]), "layer_types": kinds}
    table |= {"swiglu_limit": draw.choice([0.5, 7.0]), "swiglu_alpha": draw.choice([1.0, 1.702])}
    return table | {"attention_bias": draw.random() < 0.7}


def gpt2(draw):
    return LENGTHS | {
        **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 48},
        "activation_function": draw.choice(ACTIVATIONS),
        "layer_norm_epsilon": draw.choice([1e-5, 1e-3, 1e-1]),
        "scale_attn_weights": draw.random() < 0.5,
        "scale_attn_by_inverse_layer_idx": draw.random() < 0.5,
        "tie_word_embeddings": draw.random() < 0.5,
    }


def t5(draw):
    return LENGTHS | {
        **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        "feed_forward_proj": draw.choice(["relu", "gelu", "silu", "gated-gelu", "gated-silu", "gated-relu"]),
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
        options = {"sliding_window": draw.choice([3, 4]), "query_pre_attn_scalar": draw.choice([8, 12])}
        options |= {"hidden_activation": draw.choice(ACTIVATIONS), "attention_bias": draw.random() < 0.5}
        caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": draw.choice([None, 3.0])}
        return sizes | options | caps | {"bos_token_id": 2}

    wide = {"hidden_size": draw.choice([32, 48])}
    tied = draw.random() < 0.5
    return {"encoder": side() | wide, "decoder": side(), "tie_word_embeddings": tied}


def bart(draw):
    sides = {"ffn_dim": 48, "layers": 2, "attention_heads": draw.choice([2, 4])}
    return LENGTHS | {
        **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in sides.items()},
        **{"d_model": 32, "max_position_embeddings": 32, "decoder_start_token_id": 2, "pad_token_id": 1},
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
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 1}
    mels = {"num_mel_bins": draw.choice([4, 6]), "max_source_positions": FRAMES // 2}
    activation = draw.choice(["gelu", "relu", "gelu_new"])
    return sizes | ids | mels | {"vocab_size": 61, "max_target_positions": 32, "activation_function": activation}


FAMILIES = {
    "LlamaForCausalLM": llama,
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
    "CohereForCausalLM": cohere,
    "Cohere2ForCausalLM": cohere2,
    "GlmForCausalLM": glm,
    "Glm4ForCausalLM": glm,
    "Ernie4_5ForCausalLM": ernie,
    "HeliumForCausalLM": llama,
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
OFTEN = (
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "GptOssForCausalLM",
)  # with more options than two configurations have


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_is_written_of_random_configurations_is_read_as_it_was(architecture):
    kind = getattr(pytest.importorskip("transformers"), architecture).config_class
    draw = random.Random(SEED)
    for _ in range(6):
        table = kind(**FAMILIES[architecture](draw)).to_dict()
        family = hf_families.of(table)
        config = family.read(table)
        unwritten = {name: vars(config)[name] for name in family.unwritten}
        assert dataclasses.replace(family.read(family.write(config)), **unwritten) == config


@pytest.mark.slow
def test_logits_of_random_configurations_are_those_of_transformers(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    draw, wrong = random.Random(SEED), []
    torch.manual_seed(SEED)
    tokens = np.random.RandomState(SEED).randint(1, 61, (1, STEPS))
    for number, architecture in enumerate([*FAMILIES, *FAMILIES, *(8 * OFTEN)]):
        kind = getattr(transformers, architecture)
        options = FAMILIES[architecture](draw)
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        peer = kind._from_config(kind.config_class(**options), **plain).eval()
        with torch.no_grad():
            for x in drawn(peer):
                x.normal_(0, 0.4)
            inputs = torch.tensor(tokens)
            fed = {"decoder_input_ids": inputs} if peer.config.is_encoder_decoder else {}
            read = torch.tensor(sound(peer.config.num_mel_bins)) if "Whisper" in architecture else inputs
            theirs = peer(read, use_cache=False, **fed).logits.numpy()
        peer.save_pretrained(tmp_path / str(number))
        ours = logits(jaxspec.load(tmp_path / str(number)), tokens)
        theirs = theirs[:, -ours.shape[1] :]
        if np.abs(ours - theirs).max() > 3e-5 * np.abs(theirs).max():
            wrong.append((architecture, options, np.abs(ours - theirs).max() / np.abs(theirs).max()))
    assert not wrong


MOST = {"bfloat16": 0.04, "int8": 0.06, "int4": 0.5}  # of the mean logit; measured: 0.024, 0.039, 0.39


@pytest.mark.slow
def test_every_family_is_read_in_every_dtype_within_its_rounding(tmp_path):
    """A matrix that is taken for another, or turned, is off by as much as the logits are."""
    transformers, wrong = pytest.importorskip("transformers"), []
    draw, tokens = random.Random(SEED), np.random.RandomState(SEED).randint(1, 61, (1, STEPS))
    for architecture, options in FAMILIES.items():
        table = getattr(transformers, architecture).config_class(**options(draw)).to_dict()
        model = model_of(hf_families.of(table).read(table))
        model = model._replace(params=jax.tree.map(lambda x: 0.3 * x, model.params))
        folder = huggingface.save(model, tmp_path / architecture)
        exact = logits(jaxspec.load(folder), tokens)
        for dtype, most in MOST.items():
            rounded = logits(jaxspec.load(folder, dtype=dtype), tokens)
            off = np.abs(rounded - exact).mean() / np.abs(exact).mean()
            if not 0 < off < most:
                wrong.append((architecture, dtype, off))
    assert not wrong


TEXTS = (  # families whose texts no other test compares with those of transformers
    *("Ministral3ForCausalLM", "GraniteMoeHybridForCausalLM", "ApertusForCausalLM", "CohereForCausalLM"),
    "StableLmForCausalLM",
)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TEXTS)
def test_texts_of_random_configurations_are_those_of_transformers(architecture, tmp_path):
    """Plain, drafted by a chain and by a tree; and transformers' own, also from a folder that was written here."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    kind, prompt = getattr(transformers, architecture), [3, 1, 4, 1, 5, 9, 2]
    changes = {"use_qk_norm": True, "qk_layernorm": True, "hidden_act": "silu"} | LENGTHS
    changes |= {"hidden_act": "xielu"} if "Apertus" in architecture else {}
    options = FAMILIES[architecture](random.Random(SEED)) | changes
    for size in (2, 1):  # target and draft
        peer = kind._from_config(kind.config_class(**options), attn_implementation="eager").eval()
        with torch.no_grad():
            for x in drawn(peer):
                x.normal_(0, 0.4)
        peer.save_pretrained(tmp_path / str(size))
    target, draft = (jaxspec.load(tmp_path / size) for size in ("2", "1"))
    huggingface.save(target, tmp_path / "ours")
    plain = jaxspec.generate(target, [prompt, [6, 5]], max_new_tokens=STEPS).tokens
    for drafter in (draft, drafters.tree(draft, (2, 1)), target):
        drafted = jaxspec.generate(target, [prompt, [6, 5]], drafter=drafter, gamma=3, max_new_tokens=STEPS)
        np.testing.assert_array_equal(drafted.tokens, plain)
    for folder in ("2", "ours"):
        peer = kind.from_pretrained(tmp_path / folder, attn_implementation="eager").eval()
        ids = peer.generate(torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False)
        np.testing.assert_array_equal(ids[0, len(prompt) :].numpy(), plain[0])


def drawn(peer) -> list:
    """Return all that is learned, and the buffers that files hold."""
    learned = [x for x in peer.parameters() if x.requires_grad]  # Marian's sinusoids are not
    return [*learned, *(x for name, x in peer.named_buffers() if name.endswith(BUFFERS))]


@jax.debug_key_reuse(False)  # there are no keys, and looking for them costs an eager operation most of its time
def logits(model: jaxspec.Model, tokens: np.ndarray) -> np.ndarray:
    """Return the logits after each of the last tokens, which are read from a cache."""
    lm, params, row = model.lm, model.params, jnp.asarray(tokens)
    if lm.prompt_vocab == 0:  # Whisper
        begin = jaxspec.Prompt(row[:, :1], jnp.array([1]), jnp.asarray(sound(model.config.mels)))
        _, cache = lm.prefill(params, begin, Room(STEPS + 1))
        return np.asarray(lm.extend(params, lm.rewind(cache, jnp.array([0])), row)[0].logits)
    if lm.limits.start_token is not None:
        _, cache = lm.prefill(params, jaxspec.Prompt(row, jnp.array([STEPS])), Room(STEPS + 1))
        return np.asarray(lm.extend(params, lm.rewind(cache, jnp.array([0])), row)[0].logits)
    first = STEPS - FED
    read, cache = lm.prefill(params, jaxspec.Prompt(row[:, :first], jnp.array([first])), Room(STEPS))
    after = lm.extend(params, cache, row[:, first:])[0].logits
    return np.concatenate([np.asarray(read.logits), np.asarray(after)], axis=1)


def sound(mels: int) -> np.ndarray:
    """Return features of sound for a Whisper."""
    return np.random.RandomState(SEED).normal(size=(1, mels, FRAMES)).astype(np.float32)
