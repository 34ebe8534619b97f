"""Gemma 4: folders in both spellings, greedy text as transformers writes it, drafted text as plain
text.
"""

import functools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import drafters, nets, sharding
from jaxspec.nets import decoder
from jaxspec.testing import word_tokenizer
from jaxspec.weights import huggingface
from jaxspec.weights.hf_families import gemma4
from tests.marks import marked
from tests.small import prefill, random_params

LOCAL, GLOBAL = "sliding_attention", "full_attention"
KINDS = [LOCAL] * 2 + [GLOBAL] + [LOCAL] * 2 + [GLOBAL]
COMMON = {
    **{
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "layer_types": KINDS,
    },
    **{
        "num_attention_heads": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 5,
        "model_type": "gemma4_text",
    },
    **{
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 128,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
KEYS_ARE_VALUES = {
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
}
E2B = COMMON | {
    "num_key_value_heads": 1,
    "vocab_size_per_layer_input": 61,
    "hidden_size_per_layer_input": 8,
}
E2B |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
TABLES = {
    "E2B": E2B,
    "31B": COMMON | KEYS_ARE_VALUES | {"hidden_size_per_layer_input": 0},
    "26B-A4B": COMMON | KEYS_ARE_VALUES | EXPERTS | {"hidden_size_per_layer_input": 0},
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7]]  # one longer than the window, one shorter
LENGTH = 14


def peer(name, folder, **changes):
    """A model of transformers with random weights, the scalars and norms included, and its
    folder.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(1)
    kind = transformers.Gemma4ForCausalLM
    options = {key: value for key, value in (TABLES[name] | changes).items() if key != "model_type"}
    config = kind.config_class(**options, pad_token_id=0, eos_token_id=None, bos_token_id=None)
    model = kind._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        scalars = [x for name, x in model.named_buffers() if "layer_scalar" in name]
        for x in [*model.parameters(), *scalars]:
            x.normal_(0, 0.3)
        for x in [*scalars, *(x for name, x in model.named_parameters() if "norm" in name)]:
            x += 1
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders by name, made where they are asked for."""
    root = tmp_path_factory.mktemp("gemma4")
    return functools.cache(lambda name: (peer(name, root / name), root / name))


@functools.cache
def random(name, seed=0):
    """A random model of ours, whose norms and scalars are not one."""
    config = gemma4.read(TABLES[name])
    params = random_params(decoder.init, config, seed, 0.3)
    return jaxspec.core.Model(decoder.language_model(config), params, config=config)


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_greedy_text_is_that_of_transformers(name, folders):
    import torch

    theirs, folder = folders(name)
    model = jaxspec.load(folder)
    text = jaxspec.generate(model, PROMPTS, max_new_tokens=LENGTH)
    drafted = jaxspec.generate(
        model, PROMPTS, drafter=drafters.prompt_lookup(), gamma=3, max_new_tokens=LENGTH
    )
    np.testing.assert_array_equal(drafted.tokens, text.tokens)
    for prompt, row in zip(PROMPTS, np.asarray(text.tokens), strict=True):
        options = {"do_sample": False, "max_new_tokens": LENGTH, "eos_token_id": None}
        expected = theirs.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert row.tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(TABLES, exhaustive=("31B",)))  # E2B has all of its parts
def test_drafted_text_is_plain_text(name):
    """Another model of the family drafts a chain and a tree; a Gemma of fewer layers drafts for
    itself.
    """
    target, draft = random(name), random(name, 7)
    plain = jaxspec.generate(target, PROMPTS, max_new_tokens=LENGTH)
    for drafter in (draft, drafters.early_exit(target, 3), drafters.tree(target, (2, 1))):
        drafted = jaxspec.generate(target, PROMPTS, drafter=drafter, gamma=3, max_new_tokens=LENGTH)
        np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert drafted.stats.accepted.sum() > 0


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(name, tmp_path):
    import torch

    theirs = peer(name, tmp_path / name)
    tokens = np.random.RandomState(0).randint(1, 61, (1, 24))
    with torch.no_grad():
        wide = theirs(torch.tensor(tokens), use_cache=False).logits.numpy()
        narrow = (
            theirs.to(torch.bfloat16)(torch.tensor(tokens), use_cache=False).logits.float().numpy()
        )
    model = jaxspec.load(tmp_path / name, dtype="bfloat16")
    prompt = jaxspec.Prompt(jnp.asarray(tokens), jnp.array([24]))
    _, cache = model.lm.prefill(model.params, prompt, jaxspec.core.Room(25))
    read = model.lm.extend(model.params, model.lm.rewind(cache, jnp.array([0])), prompt.tokens)[0]
    off = {
        "ours": np.square(np.asarray(read.logits) - wide).mean(),
        "theirs": np.square(narrow - wide).mean(),
    }
    assert 0 < off["ours"] < 1.5 * off["theirs"]


@pytest.mark.parametrize("name", TABLES)
def test_both_spellings_of_sizes_are_read(name):
    """transformers writes sizes layer by layer; published files have those of global layers, in
    their text_config.
    """
    from transformers import Gemma4TextConfig

    published = {key: value for key, value in TABLES[name].items() if key != "model_type"}
    saved = Gemma4TextConfig(**published).to_dict()
    assert "global_head_dim" not in saved and set(saved["per_layer_config"]) & {"2", 2}
    config = gemma4.read(TABLES[name])
    assert gemma4.read(json.loads(json.dumps(saved))) == config
    assert (
        gemma4.read({"model_type": "gemma4", "text_config": TABLES[name], "vision_config": {}})
        == config
    )
    assert [layer.attention.head_dim for layer in config.layers] == [8, 8, 16, 8, 8, 16]


def test_null_in_the_sizes_of_a_layer_is_the_size_of_the_others():
    sizes = {"2": {"head_dim": 16, "num_key_value_heads": None}, "5": {"head_dim": 16}}
    assert gemma4.read(E2B | {"per_layer_config": sizes}) == gemma4.read(E2B)


def test_the_unified_wrapper_is_read():
    """A 12B: no embeddings per layer, whatever the defaults of others are."""
    text = {key: x for key, x in TABLES["31B"].items() if key != "hidden_size_per_layer_input"}
    wrapper = {
        "model_type": "gemma4_unified",
        "text_config": text | {"model_type": "gemma4_unified_text"},
    }
    assert gemma4.read(wrapper) == gemma4.read(TABLES["31B"])


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_transformers_reads_what_is_saved(name, tmp_path):
    import torch
    import transformers

    model = random(name)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        huggingface.save(model, tmp_path / "it"), **options
    )
    tokens = np.array(PROMPTS[:1])
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens), use_cache=False).logits.numpy()[:, -1:]
    prompt = jaxspec.Prompt(jnp.asarray(tokens), jnp.array([9]))
    logits = prefill(model, prompt, jaxspec.core.Room(9))[0].logits
    np.testing.assert_allclose(np.asarray(logits), expected, atol=1e-4 * np.abs(expected).max())


def test_vectors_that_are_no_tokens_have_the_row_of_padding():
    """Ids from the vocabulary's end on are lent by a drafter; the table of embeddings per layer has
    no row for them.
    """
    model = random("E2B")
    lent = jax.random.normal(jax.random.key(5), (2, 32))
    model = model._replace(
        params=model.params | {"embedding": model.params["embedding"] | {"more": lent}}
    )
    prompt = jaxspec.Prompt(jnp.array([[3, 1]]), jnp.array([2]))
    _, cache = prefill(model, prompt, jaxspec.core.Room(6))
    logits = jax.jit(model.lm.extend)(model.params, cache, jnp.array([[5, 61, 62]]))[0].logits
    assert bool(jnp.isfinite(logits).all())


def test_a_folder_that_also_sees_gives_its_text_half(tmp_path, caplog):
    """Its names have a prefix; its other parts are named and left out, as are keys of layers that
    share others'.
    """
    model = random("E2B")
    huggingface.save(model, tmp_path / "text")
    huggingface.save(model, tmp_path / "all")
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    renamed["model.vision_tower.patch_embedder.input_proj.weight"] = np.ones((2, 2), np.float32)
    renamed["model.embed_audio.embedding_projection.weight"] = np.ones((2, 2), np.float32)
    renamed["model.language_model.layers.4.self_attn.k_proj.weight"] = np.ones((8, 32), np.float32)
    save_file(renamed, tmp_path / "all" / "model.safetensors")
    table = json.loads((tmp_path / "text" / "config.json").read_text())
    (tmp_path / "all" / "config.json").write_text(
        json.dumps({"model_type": "gemma4", "text_config": table})
    )
    with caplog.at_level(logging.WARNING):
        loaded = jaxspec.load(tmp_path / "all")
    assert "the text half is read, and not embed_audio, vision_tower (2 tensors)" in caplog.text
    assert loaded.config == model.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", marked(["bfloat16", "int8", "int4"], exhaustive=["int8"]))
def test_narrow_weights_load(dtype, tmp_path):
    """Log-probabilities near those of float32: within what rounding every matrix leaves."""
    model = random("E2B")
    huggingface.save(model, tmp_path / "it")
    narrow = jaxspec.load(tmp_path / "it", dtype=dtype)
    prompt = jaxspec.Prompt(jnp.array(PROMPTS[:1]), jnp.array([9]))
    logits = [prefill(x, prompt, jaxspec.core.Room(9))[0].logits for x in (model, narrow)]
    of_float, of_narrow = (np.asarray(jax.nn.log_softmax(x.astype(jnp.float32))) for x in logits)
    off = np.abs(of_float - of_narrow).mean()
    assert 0 < off < {"bfloat16": 0.2, "int8": 0.2, "int4": 1.5}[dtype]


MARKS = [
    "<unk>",
    "<turn|>",
    "<bos>",
    "<|turn>",
    "<|channel>",
    "<channel|>",
    "<|think|>",
    "thought",
    "user",
    "model",
]
WORDS = [*MARKS, "system", *(f"w{i}" for i in range(50))]
# as the published template: thinking is switched on in the system's turn, and earlier thoughts are
# left out
THINKS = (
    "<bos> {% if enable_thinking %}<|turn> system <|think|> <turn|> {% endif %}{% for m in "
    "messages %}<|turn> {{ 'model' if m['role'] == 'assistant' else m['role'] }} {{ "
    "m['content'].split('<channel|>')[-1] }} <turn|> {% endfor %}<|turn> model"
)


@pytest.mark.slow
def test_thinking_is_switched_on_by_the_template_and_a_chat_forgets_thoughts():
    tokenizer = word_tokenizer(WORDS, end="<turn|>", chat_template=THINKS)
    target, options = (
        random("E2B")._replace(tokenizer=tokenizer),
        {"max_new_tokens": 8, "eos_ids": ["<turn|>"]},
    )
    thoughts = "<|channel> thought w2 <channel|> w3"
    conversation = [("user", "w1"), ("assistant", thoughts), ("user", "w4")]
    conversation = [{"role": role, "content": content} for role, content in conversation]
    expected = (
        "<bos> <|turn> system <|think|> <turn|> <|turn> user w1 <turn|> <|turn> model w3 <turn|> "
    )
    expected = tokenizer(expected + "<|turn> user w4 <turn|> <|turn> model")["input_ids"]
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    plain = jaxspec.generate(target, [expected], **options).tokens[0]
    out = jaxspec.generate(target, [conversation], **thinking, **options)
    np.testing.assert_array_equal(out.tokens[0], plain)
    # A chat whose last answer had thoughts reads on after what the template leaves of it, and
    # writes the same.
    talk = jaxspec.chat(target, **thinking, **options)
    list(talk.send("w1"))
    talk.messages[-1]["content"] = thoughts
    pieces = list(talk.send("w4"))
    assert talk.prompt_tokens == len(expected) and talk.reused_tokens > 0
    assert [token for piece in pieces for token in piece.tokens] == plain.tolist()


def test_matrices_are_split_over_a_mesh():
    """Heads and hidden units of every block are, and the table of embeddings per layer by its
    rows.
    """
    config = gemma4.read(
        TABLES["26B-A4B"] | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61}
    )
    axes = nets.axes_of(config)
    names = {path: sharding.logical(path, axes.layers) for path in gemma4.names(config)}
    assert names["layers_0/ff/dense/out/weight"] == ("dim", "ff") and names[
        "side/table/embedding"
    ] == ("vocab", "dim")
    assert axes.parts["heads"] == 4 and axes.parts["kv_heads"] == 1 and axes.parts["ff"] == 12


PUBLISHED = {"e2b": 4.63e9, "e4b": 7.46e9, "12b": 11.91e9, "31b": 30.70e9, "26b-a4b": 25.2e9}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_their_number_of_parameters(name):
    """Of the text half: 5.1, 8.0, 12, 30.7 and 25.2 thousand million with what sees and hears."""
    config = gemma4.SIZES[f"gemma-4-{name}"]
    network = nets.net_of(config)
    total = network.total(
        config, lambda small: sum(x.size for x in jax.tree.leaves(network.shapes(small)))
    )
    assert total == pytest.approx(PUBLISHED[name], rel=2e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention is 'all': only 'vision'",
        ),
        (
            {"num_kv_shared_layers": 6},
            "num_kv_shared_layers is 6, and there are 6 layers: expected fewer",
        ),
        (
            {"num_kv_shared_layers": 4},
            "layer 2 shares keys: expected an earlier full_attention layer",
        ),
        ({"layer_types": [LOCAL] * 5}, "layer_types has 5 layers, num_hidden_layers is 6"),
        (
            {"layer_types": ["chunked_attention"] * 6},
            "layer_types has chunked_attention: expected full_attention",
        ),
        (
            {"per_layer_config": {"2": {"hidden_size": 4}}},
            "per_layer_config has hidden_size: expected head_dim",
        ),
        (
            {"per_layer_config": {"2": {"head_dim": -4}}},
            "head_dim is -4: expected a positive integer",
        ),
        ({"per_layer_config": [8, 16]}, "per_layer_config is .*: expected an object of objects"),
        (
            {"hidden_size_per_layer_input": -8},
            "hidden_size_per_layer_input is -8: expected an integer from 0 on",
        ),
        (
            {"vocab_size_per_layer_input": 50},
            "vocab_size_per_layer_input is 50: expected an integer from 61 on",
        ),
        ({"enable_moe_block": True}, "it lacks 'num_experts'"),
        (
            {"rope_parameters": {GLOBAL: {"rope_type": "yarn", "rope_theta": 1e4}}},
            "lacks 'rope_theta'",
        ),
        (
            {
                "rope_parameters": {
                    kind: {"rope_type": "yarn", "rope_theta": 1e4} for kind in (LOCAL, GLOBAL)
                }
            },
            "the rotation of sliding_attention is 'yarn' for a share of 1.0: expected "
            "'proportional'",
        ),
    ],
)
def test_other_networks_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        gemma4.read(E2B | changes)
