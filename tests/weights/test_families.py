"""Every family against transformers' PyTorch implementation: logits, cached steps, greedy text.

tests/weights/golden/ holds, per case, the config.json, the names and shapes of the tensors, and
what transformers says of them. The tensors themselves are drawn anew (`weights`), so that the files
are small. Where PyTorch is installed, the files are checked against it;
`tests/scripts/golden_files.py` writes them again.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxspec
from jaxspec import Prompt
from jaxspec.core import Room
from jaxspec.weights import huggingface
from tests.marks import marked

GOLDEN = Path(__file__).parent / "golden"
VOCAB, GREEDY = 61, 64
# of a decoder; the prompt of an encoder-decoder
TOKENS = np.random.RandomState(7).randint(2, VOCAB, (2, 8))
LENGTHS = np.array([8, 5])  # of the prompts of encoder-decoders

DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
GEMMA = DECODER | {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 4}
GEMMA3_ROPE = {
    "full_attention": LINEAR | {"rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "eos_token_id": None,
    "decoder_start_token_id": 0,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}

CASES = {  # name: architecture and configuration in transformers
    "t5-1.0": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "relu"}),
    "t5-v1.1": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5-gated-silu": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-silu"}),
    # Not tied: with the tensors that a tied one draws, PyTorch's own float32 is 1e-4 from its
    # float64.
    "t5-gated-relu": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-relu", "tie_word_embeddings": False},
    ),
    "t5-silu": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "silu"}),
    "t5-buckets": (
        "T5ForConditionalGeneration",
        T5
        | {
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20,
            "decoder_start_token_id": 3,
        }
        | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": ("MT5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "umt5": (
        "UMT5ForConditionalGeneration",
        T5 | {"relative_attention_num_buckets": 8, "tie_word_embeddings": False},
    ),
    "gpt2": ("GPT2LMHeadModel", GPT2 | {"bos_token_id": None, "eos_token_id": None}),
    "gpt2-untied": (
        "GPT2LMHeadModel",
        GPT2
        | {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False, "n_inner": 48},
    ),
    "llama-3": ("LlamaForCausalLM", DECODER | {"rope_parameters": LLAMA3}),
    "llama-biases": (
        "LlamaForCausalLM",
        DECODER
        | {"rope_parameters": LINEAR | {"rope_theta": 1e4}, "num_key_value_heads": 4}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-multi-query": (
        "LlamaForCausalLM",
        DECODER | {"num_key_value_heads": 1, "hidden_act": "relu"},
    ),
    "mistral": ("MistralForCausalLM", DECODER | {"sliding_window": 4}),
    "mistral-head-dim": (
        "MistralForCausalLM",
        DECODER | {"head_dim": 12, "sliding_window": None, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        DECODER
        | {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", DECODER | {"head_dim": 16}),
    "qwen3-biases": ("Qwen3ForCausalLM", DECODER | {"head_dim": 16, "attention_bias": True}),
    "qwen3-window": (
        "Qwen3ForCausalLM",
        DECODER
        | {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        }
        | {"head_dim": 16},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2-biases": ("Gemma2ForCausalLM", GEMMA | {"attention_bias": True}),
    "gemma3": (
        "Gemma3ForCausalLM",
        GEMMA
        | {"num_hidden_layers": 3, "sliding_window_pattern": 3, "rope_parameters": GEMMA3_ROPE},
    ),
    "gemma3-biases": (
        "Gemma3ForCausalLM",
        GEMMA | {"num_hidden_layers": 3, "sliding_window_pattern": 2, "attention_bias": True},
    ),
    "gemma3-multi-query": (
        "Gemma3ForCausalLM",
        GEMMA
        | {"num_key_value_heads": 1, "sliding_window_pattern": 2, "final_logit_softcapping": 3.0},
    ),
}
SEQ2SEQ = tuple(case for case in CASES if "t5" in case)
# transformers 5 ties their heads unless the file says otherwise.
UNTIED = ("t5-v1.1", "t5-gated-relu", "t5-buckets", "mt5", "umt5")


# transformers 5.23 makes a T5's cache for as many layers as its encoder has, and refuses to
# speculate (or to use a cache at all) where the decoder has more. Nothing else is refused. One case
# of each kind of network, and of what its cache holds; greedy text by steps is compared in every
# case above.
KINDS = (
    "t5-1.0",
    "t5-buckets",
    "umt5",
    "gpt2",
    "llama-3",
    "mistral",
    "qwen3-window",
    "gemma2",
    "gemma3",
)
ASSISTED = {
    case: {"num_decoder_layers": T5["num_layers"]} if case in SEQ2SEQ else {} for case in KINDS
}


def weights(shapes: dict[str, list[int]], seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors: the same for ever, since RandomState's stream is frozen.

    Embeddings and biases are small, so that the layers have a say, and greedy text is not one token
    over and over.
    """
    rng = np.random.RandomState(seed)
    small = ("wte.weight", "wpe.weight", "embed_tokens.weight", "shared.weight", ".bias")
    scale = {name: 0.1 if name.endswith(small) else 0.6 for name in shapes}
    return {
        name: rng.normal(0, scale[name], shapes[name]).astype(np.float32) for name in sorted(shapes)
    }


def near(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Tensors of a drafter for `weights`: some of its draft tokens are right."""
    others = weights(shapes, seed=1)
    return {name: x + 0.15 * others[name] for name, x in weights(shapes).items()}


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def golden(case: str) -> dict:
    return json.loads((GOLDEN / f"{case}.json").read_text())


def relative(got, expected) -> float:
    """Largest difference, by the largest value."""
    return float(np.abs(np.asarray(got) - expected).max() / np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case, tmp_path):
    compare_with_transformers(case, tmp_path)


def compare_with_transformers(case, tmp_path, rewind=None):
    expected = golden(case)
    model = jaxspec.load(write(tmp_path / case, expected["config"], weights(expected["shapes"])))
    logits, greedy = np.array(expected["logits"]), np.array(expected["greedy"])
    count = greedy.shape[1]
    if case in SEQ2SEQ:  # feed the greedy tokens themselves
        prompt, fed = (
            Prompt(jnp.array(TOKENS), jnp.array(LENGTHS)),
            jnp.array(greedy[:, : logits.shape[1] - 1]),
        )
    else:
        prompt, fed = (
            Prompt(jnp.array(TOKENS[:, :1]), jnp.ones(2, jnp.int32)),
            jnp.array(TOKENS[:, 1:]),
        )
    extend = jax.jit(model.lm.extend)
    first, cache = jax.jit(model.lm.prefill)(
        model.params, prompt, Room(TOKENS.shape[1] + count, rewind)
    )
    following, _ = extend(model.params, cache, fed)
    following = jnp.concatenate([first.logits, following.logits], axis=1)
    assert relative(following, logits) < 2e-5

    said = [np.asarray(jnp.argmax(first.logits[:, 0], axis=-1))]  # after each token fed, one by one
    for step in range(fed.shape[1] + count - 1):
        token = fed[:, step] if step < fed.shape[1] else jnp.array(said[-1])
        forward, cache = extend(model.params, cache, token[:, None])
        if step < fed.shape[1]:
            assert relative(forward.logits[:, 0], np.asarray(following[:, step + 1])) < 2e-5
        said.append(np.asarray(jnp.argmax(forward.logits[:, 0], axis=-1)))
    new = said if case in SEQ2SEQ else said[fed.shape[1] :]  # a decoder is fed its prompt first
    np.testing.assert_array_equal(np.stack(new[:count], axis=1), greedy)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mistral", "gemma2", "gemma3", "qwen3-window"])
def test_rings_of_windows_give_what_transformers_gives(case, tmp_path):
    """Rings of seven slots, for windows of four and rows of 72 tokens."""
    compare_with_transformers(case, tmp_path, rewind=3)


def test_golden_files_are_small():
    assert sum(file.stat().st_size for file in GOLDEN.iterdir()) < 400e3


def peer_of(case: str, folder: Path, draw=weights, **changes):
    """transformers' model with our weights, read from a folder in the usual way; `changes` to its
    configuration.
    """
    import torch
    import transformers

    torch.set_num_threads(1)  # more only wait for each other, with models of this size
    architecture, options = CASES[case]
    kind = getattr(transformers, architecture)
    config = kind.config_class(**options | changes)
    with torch.device("meta"):
        empty = kind(config)
    aliases = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    if case not in UNTIED and config.tie_word_embeddings:
        aliases.add("lm_head.weight")
    shapes = {name: list(x.shape) for name, x in empty.state_dict().items() if name not in aliases}
    if case in UNTIED:
        shapes["lm_head.weight"] = [VOCAB, 32]
    table = config.to_dict() | {"architectures": [architecture]}
    write(folder, table, draw(shapes))
    return kind.from_pretrained(folder, attn_implementation="eager").eval(), shapes


def measure(case: str, folder: Path) -> dict:
    """Return the content of a golden file."""
    import torch

    peer, shapes = peer_of(case, folder)
    tokens = torch.tensor(TOKENS)
    mask = torch.tensor((np.arange(TOKENS.shape[1])[None] < LENGTHS[:, None]).astype(np.int64))
    inputs = {"attention_mask": mask if case in SEQ2SEQ else torch.ones_like(tokens)}
    with torch.no_grad():
        # transformers 5.23 makes a T5's cache for as many layers as the encoder has.
        said = peer.generate(
            tokens, **inputs, max_new_tokens=GREEDY, do_sample=False, use_cache=False
        ).numpy()
        greedy = said[:, 1:] if case in SEQ2SEQ else said[:, TOKENS.shape[1] :]
        if case in SEQ2SEQ:
            inputs["decoder_input_ids"] = torch.tensor(said[:, : TOKENS.shape[1]])
        logits = peer(tokens, **inputs).logits.numpy()
    config = {
        key: value
        for key, value in peer.config.to_dict().items()
        if key not in ("_name_or_path", "dtype")
    }
    rounded = [
        [[float(f"{x:.7g}") for x in position] for position in row] for row in logits.tolist()
    ]
    return {"config": config, "shapes": shapes, "greedy": greedy.tolist(), "logits": rounded}


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("case", marked(CASES, exhaustive={*CASES} - {*KINDS}))
def test_golden_files_are_what_transformers_says(case, tmp_path):
    now, then = measure(case, tmp_path / case), golden(case)
    assert now["shapes"] == then["shapes"]
    assert now["greedy"] == then["greedy"]
    assert relative(now["logits"], np.array(then["logits"])) < 2e-5
    _, before = huggingface.read_config(write(tmp_path / "then", then["config"], {}))
    assert huggingface.read_config(write(tmp_path / "now", now["config"], {}))[1] == before


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_equal(case, tmp_path):
    """transformers -> jaxspec -> transformers: the same tensors; and the same function, by
    transformers' account.
    """
    import torch
    import transformers

    peer, shapes = peer_of(case, tmp_path / "written")
    peer.save_pretrained(tmp_path / "theirs")
    huggingface.save(jaxspec.load(tmp_path / "theirs"), tmp_path / "ours")
    auto = (
        transformers.AutoModelForSeq2SeqLM if case in SEQ2SEQ else transformers.AutoModelForCausalLM
    )
    again = auto.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    state = again.state_dict()
    for name, x in weights(shapes).items():
        np.testing.assert_array_equal(state[name].numpy(), x, err_msg=name)
    tokens = torch.tensor(TOKENS)
    inputs = {"decoder_input_ids": tokens} if case in SEQ2SEQ else {}
    with torch.no_grad():
        assert torch.equal(again(tokens, **inputs).logits, peer(tokens, **inputs).logits)


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("case", ["t5-v1.1", "gpt2", "llama-3"])
def test_transformers_reads_what_was_saved_in_several_files(case, tmp_path, monkeypatch):
    import transformers

    _, shapes = peer_of(case, tmp_path / "written")
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)
    huggingface.save(jaxspec.load(tmp_path / "written"), tmp_path / "ours")
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 3
    auto = (
        transformers.AutoModelForSeq2SeqLM if case in SEQ2SEQ else transformers.AutoModelForCausalLM
    )
    again, said = auto.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(said.values())
    for name, x in weights(shapes).items():
        np.testing.assert_array_equal(again.state_dict()[name].numpy(), x, err_msg=name)


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("case", ["t5-v1.1", "gpt2", "llama-3"])
def test_a_bfloat16_folder_of_transformers(case, tmp_path):
    """In several files: the same numbers in either dtype."""
    import torch

    peer, _ = peer_of(case, tmp_path / "written")
    peer.to(torch.bfloat16).save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 3
    rounded = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16), jaxspec.load(tmp_path / "written").params
    )
    for dtype in ("float32", "bfloat16"):
        params = jaxspec.load(tmp_path / "theirs", dtype=dtype).params
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)), params, rounded
        )


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", marked(ASSISTED, exhaustive={*ASSISTED} - {"t5-buckets", "gpt2", "gemma3"})
)
def test_assisted_generation_of_transformers_gives_the_same_text(case, tmp_path):
    """Speculation of either, on the same two models: draft tokens are kept and refused, and the
    text is one.
    """
    import torch

    peers = [
        peer_of(case, tmp_path / draw.__name__, draw, **ASSISTED[case])[0]
        for draw in (weights, near)
    ]
    target, draft = (jaxspec.load(tmp_path / draw.__name__) for draw in (weights, near))
    prompt = Prompt(jnp.array(TOKENS), jnp.full(2, TOKENS.shape[1]))
    ours = jaxspec.generate(target, prompt, drafter=draft, gamma=3, max_new_tokens=GREEDY)
    assert 0 < ours.stats.accepted.sum() < ours.stats.drafted.sum()
    draft_tokens = peers[1].generation_config
    draft_tokens.num_assistant_tokens, draft_tokens.assistant_confidence_threshold = 3, 0.0
    for row, tokens in zip(torch.tensor(TOKENS), ours.tokens, strict=True):
        theirs = peers[0].generate(
            row[None], assistant_model=peers[1], max_new_tokens=GREEDY, do_sample=False
        )
        np.testing.assert_array_equal(
            theirs[0, 1 if case in SEQ2SEQ else len(row) :].numpy(), tokens
        )
