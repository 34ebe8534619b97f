"""T5Gemma 1 and 2 against transformers: logits, text, drafters, shared encoders, and what is
written.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import Model, drafters
from jaxspec.core import Room
from jaxspec.nets import net_of
from jaxspec.weights import hf_families, huggingface
from jaxspec.weights.hf_families import t5gemma
from tests.marks import marked

VOCAB, NEW = 61, 24
PROMPT = np.array(
    [[9, 3, 11, 4, 25, 7, 8, 30, 12, 5, 6, 13], [8, 14, 15, 9, 2, 0, 0, 0, 0, 0, 0, 0]]
)
LENGTHS = np.array([12, 5])
IMAGE_END = 7  # a token of the prompt
SIDE = {
    "vocab_size": VOCAB,
    "head_dim": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "query_pre_attn_scalar": 12,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
WIDE = SIDE | {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
}
NARROW = SIDE | {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
ROPE = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
}
VISION |= {"num_attention_heads": 1, "image_size": 224, "patch_size": 14}


def t5gemma_1(window, **options):
    sides = {"encoder": WIDE | CAPS, "decoder": NARROW | CAPS}
    return {name: side | {"sliding_window": window} for name, side in sides.items()} | options


def t5gemma_2(window, **options):
    kinds = {
        "rope_parameters": ROPE,
        "sliding_window": window,
        "sliding_window_pattern": 2,
    } | options
    text = WIDE | {"hidden_size": 32} | kinds
    encoder = {"text_config": text, "vision_config": VISION, "eoi_token_index": IMAGE_END}
    return {"encoder": encoder, "decoder": NARROW | kinds}


CASES = {  # windows bite: prompts of 12 tokens, texts of 25
    "t5gemma": ("T5Gemma", t5gemma_1(3)),
    "t5gemma-untied": ("T5Gemma", t5gemma_1(4, tie_word_embeddings=False)),
    "t5gemma-biases": (
        "T5Gemma",
        {n: x | {"attention_bias": True} for n, x in t5gemma_1(96).items()},
    ),
    "t5gemma-2": ("T5Gemma2", t5gemma_2(5)),
    "t5gemma-2-even": ("T5Gemma2", t5gemma_2(4, final_logit_softcapping=3.0)),
}
EACH = ("t5gemma", "t5gemma-2")


def peer_of(case, folder, seed=0, near=0.0, **decoder):
    """transformers' model with random weights, saved in a folder; `near`: how far it is from the
    first one.
    """
    import torch
    import transformers

    torch.set_num_threads(1)
    name, options = CASES[case]
    options = options | {"decoder": options["decoder"] | decoder}
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    peer = kind._from_config(kind.config_class(**options), attn_implementation="eager").eval()
    rng = np.random.RandomState(seed)
    with torch.no_grad():
        for number, (key, x) in enumerate(sorted(peer.named_parameters())):
            # Small embeddings, so that the layers have a say and greedy text is not one token over
            # and over.
            scale = 0.1 if "embed" in key or "lm_head" in key else 0.5
            drawn = np.random.RandomState(1000 + number).normal(0, scale, x.shape)
            x.copy_(torch.tensor(drawn + rng.normal(0, near, x.shape)))
    peer.save_pretrained(folder)
    return peer


def prompts():
    return jaxspec.Prompt(jnp.array(PROMPT), jnp.array(LENGTHS))


def inputs():
    import torch

    mask = (np.arange(PROMPT.shape[1])[None] < LENGTHS[:, None]).astype(np.int64)
    return {"input_ids": torch.tensor(PROMPT), "attention_mask": torch.tensor(mask)}


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_and_texts_are_those_of_transformers(case, tmp_path):
    """Plain, and drafted by a model, by its tree and by look-ups: transformers' text, in ragged
    rows.
    """
    import torch

    peer = peer_of(case, tmp_path / "target")
    peer_of(case, tmp_path / "draft", seed=1, near=0.02, num_hidden_layers=2)
    target, draft = (jaxspec.load(tmp_path / name) for name in ("target", "draft"))
    with torch.no_grad():
        said = peer.generate(
            **inputs(), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        ).numpy()
        theirs = peer(**inputs(), decoder_input_ids=torch.tensor(said[:, :-1])).logits.numpy()
    first, cache = jax.jit(target.lm.prefill, static_argnums=2)(
        target.params, prompts(), Room(NEW + 1)
    )
    rest, _ = jax.jit(target.lm.extend)(target.params, cache, jnp.array(said[:, 1:-1]))
    ours = np.concatenate([first.logits, rest.logits], axis=1)
    assert np.abs(ours - theirs).max() < 1e-4 and np.abs(theirs).max() > 1
    assert len(set(said[:, 1:].ravel())) > 3
    options = {"max_new_tokens": NEW, "eos_ids": ()}
    several = (draft, drafters.tree(draft, (2, 1)), drafters.prompt_lookup(2, 1))
    for drafter in (None, *(several if case in EACH else several[:1])):
        out = jaxspec.generate(target, prompts(), drafter=drafter, gamma=3, **options)
        np.testing.assert_array_equal(out.tokens, said[:, 1:])
        assert drafter is not draft or 0 < out.stats.accepted.sum() < out.stats.drafted.sum()


def model_of(config, seed=0):
    """Random parameters that transformers has not seen, norms among them."""
    net = net_of(config)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda x: jnp.array(0.3 * rng.standard_normal(x.shape, np.float32)),
        jax.eval_shape(lambda: net.init(config, jax.random.key(0))),
    )
    return Model(net.language_model(config), params, config=config, name=f"it {seed}")


def table_of(case):
    """The config.json of a case that transformers writes."""
    import transformers

    name, options = CASES[case]
    return getattr(transformers, f"{name}Config")(**options).to_dict()


def config_of(case):
    """The network of a case."""
    table = table_of(case)
    return hf_families.of(table).read(table)


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("case", marked(CASES, exhaustive={*CASES} - {*EACH, "t5gemma-untied"}))
def test_what_is_saved_is_read_by_transformers_and_here(case, tmp_path):
    import torch
    import transformers

    table = table_of(case)
    model = model_of(hf_families.of(table).read(table))._replace(source={"config.json": table})
    huggingface.save(model, tmp_path / "ours")
    again = jaxspec.load(tmp_path / "ours")
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    kind = getattr(transformers, f"{CASES[case][0]}ForConditionalGeneration")
    peer, said = kind.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not said["unexpected_keys"] and not [
        x for x in said["missing_keys"] if "vision" not in x and "multi" not in x
    ]
    ids = torch.tensor(PROMPT[:1])
    theirs = (
        peer.eval()
        .generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        .numpy()[0, 1:]
    )
    ours = jaxspec.generate(model, PROMPT[:1].tolist(), max_new_tokens=NEW, eos_ids=())
    np.testing.assert_array_equal(ours.tokens[0], theirs)


@pytest.mark.slow
@pytest.mark.parametrize("case", EACH)
def test_drafters_read_the_targets_encoder_and_its_layers(case):
    """A shallower decoder over the same encoder; and the target's own first layer."""
    target = model_of(config_of(case))
    config = dataclasses.replace(target.config, layers=target.config.layers[:1])
    params = {name: x for name, x in target.params.items() if name != "layers_1"}
    draft = Model(net_of(config).language_model(config), params, config=config)
    shared = drafters.share_encoder(draft, target)
    assert shared.params["encoder_0"] is target.params["encoder_0"]
    options = {"max_new_tokens": NEW, "eos_ids": (), "gamma": 2}
    plain = jaxspec.generate(target, prompts(), **options).tokens
    for drafter in (draft, drafters.early_exit(target, layers=1)):
        out = jaxspec.generate(target, prompts(), drafter=drafter, **options)
        np.testing.assert_array_equal(out.tokens, plain)
        assert out.stats.drafted.sum() > 0


def test_older_files_of_a_t5gemma_2_name_the_encoders_text_half_otherwise(tmp_path, caplog):
    """And a head that repeats the embedding, and the decoder's copies of it, are left out."""
    table = table_of("t5gemma-2")
    model = model_of(hf_families.of(table).read(table))._replace(source={"config.json": table})
    folder = huggingface.save(model, tmp_path / "it")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("encoder.text_model.", "encoder."): x for name, x in tensors.items()}
    for part in ("weight", "eoi_embedding"):
        tensors[f"model.decoder.embed_tokens.{part}"] = tensors[
            f"model.encoder.embed_tokens.{part}"
        ]
    tensors["lm_head.out_proj.weight"] = tensors["model.encoder.embed_tokens.weight"]
    tensors["model.encoder.vision_tower.post_layernorm.bias"] = np.ones(2, np.float32)
    save_file(tensors, folder / "model.safetensors")
    again = jaxspec.load(folder)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    assert again.config == model.config and "not vision_tower (1 tensors)" in caplog.text
    tensors["model.decoder.embed_tokens.weight"] = tensors["model.decoder.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(jaxspec.weights.tensors.CheckpointError, match="which it should repeat"):
        jaxspec.load(folder)


# google/t5gemma-2-270m-270m, without its vision tower and what does not change the network
PUBLISHED_2 = {
    "model_type": "t5gemma2",
    "bos_token_id": 2,
    "eoi_token_index": 256000,
    "decoder": (
        SIDE_2 := {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
        }
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 32768,
        }
        | {
            "layer_types": ([*["sliding_attention"] * 5, "full_attention"]) * 3,
            "sliding_window": 512,
        }
        | {"query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "use_bidirectional_attention": False}
        | {
            "rope_parameters": ROPE | {"full_attention": LINEAR | {"factor": 8.0}},
            "attn_logit_softcapping": None,
        }
    ),
    "encoder": {"text_config": SIDE_2 | {"tie_word_embeddings": True}, "eoi_token_index": 256000},
}


def test_a_published_file_is_the_published_size():
    assert t5gemma.read_2(PUBLISHED_2) == t5gemma.SIZES_2["t5gemma-2-270m-270m"]


@pytest.mark.parametrize(
    ("case", "side", "changes", "message"),
    [
        (
            "t5gemma",
            "decoder",
            {"cross_attention_hidden_size": 32},
            "cross_attention_hidden_size is 32: only 48",
        ),
        ("t5gemma", "encoder", {"vocab_size": 60}, "the encoder's vocab_size is 60: expected 61"),
        (
            "t5gemma",
            "encoder",
            {"num_hidden_layers": "3"},
            "num_hidden_layers is '3': expected a positive integer",
        ),
        (
            "t5gemma",
            "decoder",
            {"bos_token_id": 61},
            "the start of a row has 61: expected ids from 0 to 60",
        ),
        (
            "t5gemma-2",
            "decoder",
            {"hidden_size": 40},
            "the encoder's hidden_size is 32: expected the decoder's, 40",
        ),
        (
            "t5gemma-2",
            "decoder",
            {"attn_logit_softcapping": 5.0},
            "attn_logit_softcapping is 5.0: only 0",
        ),
        (
            "t5gemma-2",
            None,
            {"tie_word_embeddings": False},
            "tie_word_embeddings is False: only True",
        ),
        ("t5gemma-2", None, {"encoder": None}, "it lacks 'encoder'"),
    ],
)
def test_what_would_compute_something_else_is_refused(case, side, changes, message):
    name, options = CASES[case]
    table = (
        options
        | ({side: options[side] | changes} if side else changes)
        | {"model_type": name.lower()}
    )
    with pytest.raises(ValueError, match=message):
        hf_families.of(table).read(table)
