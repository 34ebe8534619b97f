"""Drafters as somebody has published them, and the target that they draft for.

The files hold random tensors, under the names and with the config.json that each format has.
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import Model
from jaxspec.core import Caches, DraftContext, DraftStart, Prompt, Room, Weights
from jaxspec.nets import decoder
from jaxspec.nets.decoder import decoder_config
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.weights import huggingface

V, D, FF, HEADS, KV, HD, LAYERS, EPS = 13, 16, 24, 4, 2, 4, 7, 1e-5
LLAMA = decoder_config(
    V, D, FF, LAYERS, HEADS, KV, HD, epsilon=EPS, rope_base=100.0, max_positions=64
)
PROMPT, FIRST, GAMMA = [3, 1, 4, 1, 5], 9, 3  # the row is the prompt, and the token after it
BASE = dict(
    hidden_size=D,
    intermediate_size=FF,
    num_attention_heads=HEADS,
    num_key_value_heads=KV,
    head_dim=HD,
    num_hidden_layers=1,
    vocab_size=V,
    rms_norm_eps=EPS,
    rope_theta=100.0,
    hidden_act="silu",
    tie_word_embeddings=False,
    model_type="llama",
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The target, as transformers loads it."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: decoder.init(LLAMA, jax.random.key(0)))
    params = jax.tree.map(
        lambda x: jnp.array(0.5 * rng.standard_normal(x.shape, np.float32)), shapes
    )
    model = Model(decoder.language_model(LLAMA), params, None, LLAMA, "org/target")
    return huggingface.save(model, tmp_path_factory.mktemp("target") / "llama")


@pytest.fixture(scope="session")
def target(folder):
    return jaxspec.load(folder)


def layer_shapes(name, width=D, qk_norms=False, bare=False):
    shapes = {
        "self_attn.q_proj.weight": (HEADS * HD, width),
        "self_attn.k_proj.weight": (KV * HD, width),
        "self_attn.v_proj.weight": (KV * HD, width),
        "self_attn.o_proj.weight": (D, HEADS * HD),
        "mlp.gate_proj.weight": (FF, D),
        "mlp.up_proj.weight": (FF, D),
        "mlp.down_proj.weight": (D, FF),
        "post_attention_layernorm.weight": (D,),
    }
    if not bare:
        shapes["input_layernorm.weight"] = (D,)
    if qk_norms:
        shapes |= {"self_attn.q_norm.weight": (HD,), "self_attn.k_norm.weight": (HD,)}
    return {f"{name}.{part}": shape for part, shape in shapes.items()}


def eagle3_shapes(name="midlayer", vocab=V, taps=3, **options):
    top = {
        "fc.weight": (D, taps * D),
        "norm.weight": (D,),
        "lm_head.weight": (vocab, D),
        f"{name}.hidden_norm.weight": (D,),
    }
    return layer_shapes(name, 2 * D, **options) | top


def dflash_shapes(qk_norms=True, taps=2):
    top = {"fc.weight": (D, taps * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    return (
        layer_shapes("layers.0", qk_norms=qk_norms)
        | layer_shapes("layers.1", qk_norms=qk_norms)
        | top
    )


def dflash2_shapes(rank=5, group=4, suffix=""):
    shapes = dflash_shapes() | {
        f"layers.{i}.{part}_conv.{name}": shape
        for i in range(2)
        for part in ("attention", "mlp")
        for name, shape in (
            ("base_kernel", (2, 2, D)),
            ("kernel_projection.weight", (2 * 2 * D // group, D)),
        )
    }
    shapes |= {
        f"candidate_selector.{x}_codebook{suffix}": (V, rank) for x in ("predecessor", "successor")
    }
    return shapes | {"candidate_selector.hidden_projection.weight": (rank, D)}


def mtp_shapes(layout, **options):
    fc, *norms, layer, style = layout
    shapes = (
        layer_shapes(layer, **options)
        | {f"{fc}.weight": (D, 2 * D)}
        | {f"{name}.weight": (D,) for name in norms}
    )
    return shapes | ({"model.layers.7.shared_head.head.weight": (V, D)} if style == "nextn" else {})


SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 6}
OFFSETS = [0, 0, 1, 1, 2, 4]  # of ids 0, 1, 3, 4, 6 and 9
MARKOV = {"markov_head.markov_w1.weight": (V, 5), "markov_head.markov_w2.weight": (V, 5)}
JOINT = {"markov_head.joint_proj.weight": (15, 10 + D), "markov_head.joint_proj.bias": (15,)}
QWEN = (
    "mtp.fc",
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.norm",
    "mtp.layers.0",
    "qwen",
)
MIMO = (
    *(
        f"model.mtp_layers.0.{x}"
        for x in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    ),
)
MIMO = (*MIMO, "model.mtp_layers.0", "mimo")
NEXTN = (
    *(f"model.layers.7.{x}" for x in ("eh_proj", "enorm", "hnorm", "shared_head.norm")),
    "model.layers.7",
    "nextn",
)
UNIFIED = (
    *(
        f"mtp_layers.0.{x}"
        for x in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    ),
)
UNIFIED = (*UNIFIED, "mtp_layers.0", "qwen")
QWEN3 = BASE | {"model_type": "qwen3"}


def unified(kind, layer=BASE, **options):
    """A config.json of `speculators`."""
    inner = {
        "algorithm": kind,
        "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
    }
    return {
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "speculators_config": inner,
        **options,
    }


@dataclasses.dataclass
class Published:
    """A drafter as somebody has published it: config.json, tensors, what a reference is told of
    them, and the file.
    """

    table: dict
    shapes: dict
    reference: dict
    file: str = "model.safetensors"
    fixed: dict = dataclasses.field(default_factory=dict)
    beside_target: bool = False

    def tensors(self):
        import torch

        generator = torch.Generator().manual_seed(3)
        tensors = {
            name: 0.4 * torch.randn(shape, generator=generator)
            for name, shape in self.shapes.items()
        }
        return tensors | {name: torch.tensor(x) for name, x in self.fixed.items()}

    def write(self, where, target_folder):
        import torch
        from safetensors.torch import load_file, save_file

        tensors = self.tensors()
        if self.beside_target:
            shutil.copytree(target_folder, where)
            table = json.loads((where / "config.json").read_text()) | self.table
            (where / "config.json").write_text(json.dumps(table))
            save_file(load_file(where / "model.safetensors") | tensors, where / "model.safetensors")
            return where
        where.mkdir()
        (where / "config.json").write_text(json.dumps(self.table))
        if self.file.endswith(".safetensors"):
            save_file({name: x.contiguous() for name, x in tensors.items()}, where / self.file)
        else:
            torch.save(tensors, where / self.file)
        return where


CASES = {
    "EAGLE": Published(
        BASE | {"architectures": ["LlamaForCausalLM"]},
        layer_shapes("layers.0", bare=True) | {"fc.weight": (D, 2 * D), "fc.bias": (D,)},
        {},
        "pytorch_model.bin",
    ),
    "EAGLE-3, its authors'": Published(
        BASE | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 6},
        eagle3_shapes(vocab=6) | {"embed_tokens.weight": (V, D)},
        dict(ids=(2, 3, 4)),
        "pytorch_model.bin",
        {"d2t": OFFSETS, "t2d": [i in (0, 1, 3, 4, 6, 9) for i in range(V)]},
    ),
    "EAGLE-3, SGLang's": Published(
        BASE
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [0, 2, 4],
            },
            "norm_before_fc": True,
        },
        eagle3_shapes() | {"input_norm.weight": (3 * D,)},
        dict(ids=(1, 3, 5)),  # transformers' hidden_states[l + 1]
    ),
    "EAGLE-3, DeepSpec's": Published(
        QWEN3
        | {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 2, 4, 5]}
        | {"num_target_layers": LAYERS},
        eagle3_shapes("layers.0", taps=5, qk_norms=True) | {"embed_tokens.weight": (V, D)},
        dict(ids=(1, 2, 3, 5, 6), name="layers.0"),  # transformers' hidden_states[l + 1]
    ),
    "EAGLE-3, speculators": Published(
        unified(
            "eagle3",
            QWEN3,
            eagle_aux_hidden_state_layer_ids=[1, 3, 5],
            draft_vocab_size=V,
            norm_before_residual=True,
            norm_output=True,
            fc_norm=True,
        ),
        eagle3_shapes("layers.0", qk_norms=True) | {f"fc_norm.{i}.weight": (D,) for i in range(3)},
        dict(ids=(1, 3, 5), name="layers.0"),
    ),
    "EAGLE-3, windows": Published(
        unified(
            "eagle3",
            QWEN3
            | {
                "num_hidden_layers": 2,
                "use_sliding_window": True,
                "sliding_window": 3,
                "max_window_layers": 0,
            }
            | {"layer_types": ["sliding_attention", "full_attention"]},
            eagle_aux_hidden_state_layer_ids=[1, 5],
            draft_vocab_size=V,
            norm_before_residual=True,
        ),
        eagle3_shapes("layers.0", taps=2, qk_norms=True) | layer_shapes("layers.1", qk_norms=True),
        dict(ids=(1, 5), name="layers.0", window=3, layers=2),
    ),
    "P-EAGLE": Published(
        unified(
            "peagle",
            QWEN3 | {"num_hidden_layers": 2},
            eagle_aux_hidden_state_layer_ids=[1, 3, 5],
            draft_vocab_size=6,
            mask_token_id=12,
            fc_norm=True,
        ),
        eagle3_shapes("layers.0", vocab=6, qk_norms=True)
        | layer_shapes("layers.1", qk_norms=True)
        | {f"fc_norm.{i}.weight": (D,) for i in range(3)}
        | {"embed_tokens.weight": (V, D), "mask_hidden": (1, 1, 3 * D)},
        dict(ids=(1, 3, 5), name="layers.0", layers=2),
        fixed={"d2t": OFFSETS, "t2d": [i in (0, 1, 3, 4, 6, 9) for i in range(V)]},
    ),
    "Medusa": Published(
        {
            "medusa_num_heads": 2,
            "medusa_num_layers": 2,
            "base_model_name_or_path": "org/target",
            "version": "2",
        },
        {f"{i}.{j}.linear.weight": (D, D) for i in range(3) for j in range(2)}
        | {f"{i}.{j}.linear.bias": (D,) for i in range(3) for j in range(2)}
        | {f"{i}.2.weight": (V, D) for i in range(3)},
        {},
        "medusa_lm_head.pt",
    ),
    "Medusa, vLLM's": Published(
        {
            "num_heads": 3,
            "num_hidden_layers": 1,
            "hidden_size": D,
            "vocab_size": V,
            "truncated_vocab_size": 4,
        },
        {f"blocks.{i}.layers.0.weight": (D, D) for i in range(3)}
        | {f"lm_heads.{i}.weight": (4, D) for i in range(3)},
        {},
        fixed={"token_map": [1, 4, 9, 12]},
    ),
    "MTP, Qwen's": Published(
        {"mtp_num_hidden_layers": 1}, mtp_shapes(QWEN), dict(layout=QWEN), beside_target=True
    ),
    "MTP, MiMo's": Published(
        {"num_nextn_predict_layers": 1}, mtp_shapes(MIMO), dict(layout=MIMO), beside_target=True
    ),
    "MTP, DeepSeek's": Published(
        {"num_nextn_predict_layers": 1}, mtp_shapes(NEXTN), dict(layout=NEXTN), beside_target=True
    ),
    "MTP, speculators": Published(
        unified("mtp", QWEN3, num_nextn_predict_layers=1),
        mtp_shapes(UNIFIED, qk_norms=True),
        dict(layout=UNIFIED),
    ),
    "DFlash": Published(
        QWEN3
        | {
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": 2,
            "block_size": 5,
            "num_target_layers": LAYERS,
            "dflash_config": {"mask_token_id": 12, "target_layer_ids": [1, 4]},
        },
        dflash_shapes(),
        dict(ids=(2, 5), slots=1, mask=12),
    ),
    # Qwen3Config drops a window that is not used, and speculators then hides nothing of a block.
    **{
        name: Published(
            unified(
                "dflash",
                QWEN3
                | {
                    "num_hidden_layers": 2,
                    "use_sliding_window": is_used,
                    "sliding_window": 3,
                    "max_window_layers": 0,
                }
                | {"layer_types": ["sliding_attention", "full_attention"]},
                aux_hidden_state_layer_ids=[2, 5],
                block_size=5,
                mask_token_id=12,
                draft_vocab_size=V,
            ),
            dflash_shapes(),
            dict(ids=(2, 5), slots=1, mask=12, **window),
        )
        for name, is_used, window in (
            ("DFlash, windows", True, {"window": 3}),
            ("DFlash, unused windows", False, {}),
        )
    },
    **{
        f"DFlash, z-lab's {name}": Published(
            QWEN3
            | {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "sliding_window": 3}
            | {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
                **table,
            }
            | {
                "dflash_config": {
                    "block_size": 5,
                    "mask_token_id": 12,
                    "target_layer_ids": [1, 4],
                    **options,
                }
            },
            dflash_shapes(),
            dict(
                ids=(2, 5),
                slots=1,
                mask=12,
                from_anchor=False,
                causal=causal,
                **{"window": 3, **windows},
            ),
        )
        for name, table, options, causal, windows in (
            ("windows", {}, {}, (True, False), {}),
            # transformers' Qwen3Config drops the window; the layer is still a sliding one, and
            # causal
            ("unused windows", {"use_sliding_window": False}, {}, (True, False), {"window": 99}),
            (
                "windows by number",
                {"layer_types": None, "max_window_layers": 1, "model_type": "gpt_oss"},
                {},
                (True, False),
                {"local": 1},
            ),
            ("causal layers", {"is_causal": True}, {"num_target_layers": LAYERS}, (True, True), {}),
            (
                "scales",
                {"is_causal": False, "input_embedding_scale": 9.0},
                {
                    "input_embedding_scale": 0.5,
                    "output_multiplier": 0.7,
                    "final_logit_softcapping": 4.0,
                },
                (False, False),
                {},
            ),
        )
    },
    **{
        f"DFlash, JetSpec's {name}": Published(
            QWEN3
            | {
                "architectures": ["DFlashDraftModel"],
                "num_hidden_layers": 2,
                "block_size": 5,
                "sliding_window": 3,
            }
            | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
            | {"num_target_layers": LAYERS}
            | {
                "dflash_config": {
                    "mask_token_id": 12,
                    "target_layer_ids": [1, 4],
                    "target_hidden_size": D,
                    **options,
                }
            },
            dflash_shapes(),
            dict(ids=(2, 5), mask=12, window=3, from_anchor=False, causal=causal, slots=slots),
        )
        for name, options, causal, slots in (
            ("causal head", {"causal_head": True}, (True, True), 1),
            ("bidirectional head", {"causal_head": False}, (False, False), 1),
            ("shifted head", {"causal_head": True, "draft_shift": True}, (True, True), 0),
        )
    },
    "DFlash 2": Published(
        QWEN3
        | {
            "architectures": ["DFlash2DraftModel"],
            "num_hidden_layers": 2,
            "is_causal": False,
            "sliding_window": 3,
        }
        | {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
        | {
            "dflash_config": {
                "block_size": 5,
                "mask_token_id": 12,
                "target_layer_ids": [1, 4],
                **SELECTOR,
            }
        },
        dflash2_shapes(suffix=".weight"),
        dict(ids=(2, 5), slots=1, mask=12, window=3, from_anchor=False, causal=(False, False)),
    ),
    "DFlash 2, speculators": Published(
        unified(
            "dflash2",
            QWEN3
            | {
                "num_hidden_layers": 2,
                "sliding_window": 3,
                "use_sliding_window": True,
                "max_window_layers": 0,
            }
            | {"layer_types": ["sliding_attention", "full_attention"]},
            aux_hidden_state_layer_ids=[2, 5],
            block_size=5,
            mask_token_id=12,
            draft_vocab_size=V,
            **SELECTOR,
        ),
        dflash2_shapes(),
        dict(ids=(2, 5), slots=1, mask=12, window=3, causal=(False, False)),
    ),
    "DSpark": Published(
        QWEN3
        | {
            "architectures": ["Qwen3DSparkModel"],
            "num_hidden_layers": 2,
            "block_size": 3,
            "mask_token_id": 12,
            "target_layer_ids": [1, 4],
            "markov_rank": 5,
            "markov_head_type": "rnn",
            "enable_confidence_head": True,
        },
        dflash_shapes()
        | MARKOV
        | JOINT
        | {"confidence_head.proj.weight": (1, D + 5), "confidence_head.proj.bias": (1,)}
        | {"embed_tokens.weight": (V, D), "lm_head.weight": (V, D)},
        dict(ids=(2, 5), slots=0, mask=12),
    ),
    "DSpark, speculators": Published(
        unified(
            "dspark",
            QWEN3 | {"num_hidden_layers": 2},
            aux_hidden_state_layer_ids=[2, 5],
            block_size=4,
            mask_token_id=12,
            sample_from_anchor=False,
            markov_rank=5,
            markov_head_type="gated",
            draft_vocab_size=V,
        ),
        dflash_shapes()
        | MARKOV
        | {"markov_head.gate_proj.weight": (5, D + 5), "markov_head.gate_proj.bias": (5,)},
        dict(ids=(2, 5), slots=1, mask=12),
    ),
    "DSpark, a memory": Published(
        unified(
            "dspark",
            QWEN3 | {"num_hidden_layers": 2},
            aux_hidden_state_layer_ids=[2, 5],
            block_size=4,
            mask_token_id=12,
            sample_from_anchor=False,
            markov_rank=5,
            markov_head_type="rnn",
            draft_vocab_size=V,
        ),
        dflash_shapes() | MARKOV | JOINT,
        dict(ids=(2, 5), slots=1, mask=12),
    ),
}


@pytest.fixture
def published():
    """Published drafters by name."""
    return CASES


@pytest.fixture
def draft_of():
    """Makes the first draft after the prompt and the token after it, at temperature 1, of one
    compiled program.
    """

    def draft(drafter):
        functions, lm = drafter.functions, drafter.target.lm
        gamma = min(GAMMA, functions.longest or GAMMA)
        prompt = Prompt(jnp.array([[*PROMPT, 0, 0]]), jnp.array([len(PROMPT)]))
        row = Prompt(jnp.array([[*PROMPT, FIRST] + [0] * 20]), jnp.array([len(PROMPT) + 1]))
        params = SamplingParams(jnp.ones(1))

        @jax.jit
        def run(weights, keys):
            forward, cache = lm.prefill(weights.target, prompt, Room(40))
            state = functions.init(DraftStart(weights, prompt, Room(40, 20), forward))
            context = DraftContext(
                keys,
                row,
                jnp.array([gamma]),
                gamma,
                False,
                lambda logits, *_: at_temperature()(params, logits, None),
            )
            draft, _ = functions.propose(weights, Caches(cache, state), context)
            return draft.tokens[0], draft.log_probs[0]

        tokens, log_probs = run(
            Weights(drafter.target.params, drafter.params), jax.random.split(jax.random.key(5), 1)
        )
        return tokens.tolist(), np.asarray(log_probs)

    return draft
