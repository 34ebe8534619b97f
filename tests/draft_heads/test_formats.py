"""Published drafters: read by what their files say, and compared with what their formats say they compute.

The references are written in PyTorch from the descriptions of the formats, over the tensors as the files have them, and
read the hidden states of transformers' own Llama; so names, numbers of layers, and which token goes with which hidden
state are tested together, through `load_drafter` and the drafters' own functions.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import Model, trim
from jaxspec.base import Caches, DraftContext, Prompt, Weights
from jaxspec.draft_heads import kangaroo, lookahead_embeddings
from jaxspec.draft_heads import medusa as medusa_kind
from jaxspec.draft_heads import mtp as mtp_kind
from jaxspec.draft_heads.load import read_head
from jaxspec.draft_heads.medusa import HeadsConfig
from jaxspec.draft_heads.save import save
from jaxspec.nets import decoder, gpt
from jaxspec.nets.decoder import DecoderConfig
from jaxspec.testing import table_model, word_tokenizer
from jaxspec.warp import SamplingParams, sampling
from jaxspec.weights import huggingface
from jaxspec.weights.orbax import CheckpointError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
F = torch.nn.functional
safetensors_torch = pytest.importorskip("safetensors.torch")
load_file, save_file = safetensors_torch.load_file, safetensors_torch.save_file

V, D, FF, HEADS, KV, HD, LAYERS, EPS = 13, 16, 24, 4, 2, 4, 7, 1e-5
LLAMA = DecoderConfig(V, D, FF, LAYERS, HEADS, KV, HD, epsilon=EPS, rope_base=100.0, max_positions=64)
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The target, as transformers loads it."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: decoder.init(LLAMA, jax.random.key(0)))
    params = jax.tree.map(lambda x: jnp.array(0.5 * rng.standard_normal(x.shape, np.float32)), shapes)
    model = Model(decoder.language_model(LLAMA), params, None, LLAMA, "org/target")
    return huggingface.save(model, tmp_path_factory.mktemp("target") / "llama")


@pytest.fixture(scope="module")
def target(folder):
    return jaxspec.load(folder)


class Hidden:
    """What transformers' model makes of the prompt, and the parts of it that drafters use."""

    def __init__(self, folder):
        self.model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            out = self.model(torch.tensor([PROMPT]), output_hidden_states=True)
        self.states = [x[0] for x in out.hidden_states]  # [before layer 0, ..., after the last layer and its norm]
        self.last = self.states[-1]

    def embed(self, tokens):
        return self.model.model.embed_tokens.weight.detach()[tokens]

    def head(self, x):
        return x @ self.model.lm_head.weight.detach().T

    def layers(self, ids):
        return torch.cat([self.states[i] for i in ids], dim=-1)


@pytest.fixture(scope="module")
def hidden(folder):
    return Hidden(folder)


# --- references


def norm(x, weight):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rotate(x, positions):
    angle = positions[:, None].float() * 100.0 ** (-torch.arange(0, HD, 2).float() / HD)
    cos, sin = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
    a, b = x[..., : HD // 2], x[..., HD // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(t, name, x, context=None, causal=True):
    """Of x to itself, causally; or to a context before it and to all of itself."""
    read = x if context is None else torch.cat([context, x])
    positions = torch.arange(len(read))

    def heads_of(part, source, count):
        y = source @ t[f"{name}.{part}_proj.weight"].T + t.get(f"{name}.{part}_proj.bias", torch.zeros(()))
        y = y.reshape(len(source), count, HD)
        return norm(y, t[f"{name}.{part}_norm.weight"]) if f"{name}.{part}_norm.weight" in t else y

    q = rotate(heads_of("q", x, HEADS), positions[-len(x) :])
    k = rotate(heads_of("k", read, KV), positions).repeat_interleave(HEADS // KV, 1)
    v = heads_of("v", read, KV).repeat_interleave(HEADS // KV, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / HD**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(len(x), len(read)).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v).reshape(len(x), HEADS * HD)
    return mixed @ t[f"{name}.o_proj.weight"].T


def mlp(t, name, x):
    gate, up, down = (t[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def block(t, name, x, context=None, causal=True):
    x = x + attention(t, f"{name}.self_attn", norm(x, t[f"{name}.input_layernorm.weight"]), context, causal)
    return x + mlp(t, f"{name}.mlp", norm(x, t[f"{name}.post_attention_layernorm.weight"]))


def token_by_token(step, features, hidden, draft):
    """Logits of each draft token: `step` makes hidden states of pairs, and logits of hidden states.

    What was fed before is fed again with every token, so nothing is taken from a cache.
    """
    tokens, found = [*PROMPT[1:], FIRST], []
    for token in draft:
        made, logits = step(features, torch.tensor(tokens))
        found.append(logits[-1])
        features, tokens = torch.cat([features, made[-1:]]), [*tokens, token]
    return torch.stack(found)


def eagle1(t, table, hidden, draft):
    def step(features, tokens):
        x = torch.cat([hidden.embed(tokens), features], -1) @ t["fc.weight"].T + t["fc.bias"]
        x = x + attention(t, "layers.0.self_attn", x)
        x = x + mlp(t, "layers.0.mlp", norm(x, t["layers.0.post_attention_layernorm.weight"]))
        return x, hidden.head(x)

    return token_by_token(step, hidden.last, hidden, draft)


def eagle3(t, table, hidden, draft, ids, name="midlayer"):
    taps = hidden.layers(ids)
    if "input_norm.weight" in t:
        taps = norm(taps, t["input_norm.weight"])
    if "fc_norm.0.weight" in t:
        taps = torch.cat([norm(x, t[f"fc_norm.{i}.weight"]) for i, x in enumerate(taps.split(D, -1))], -1)

    def step(features, tokens):
        embedded = t["embed_tokens.weight"][tokens] if "embed_tokens.weight" in t else hidden.embed(tokens)
        g = norm(features, t[f"{name}.hidden_norm.weight"])
        x = torch.cat([norm(embedded, t[f"{name}.input_layernorm.weight"]), g], -1)
        x = (g if table.get("norm_before_residual") else features) + attention(t, f"{name}.self_attn", x)
        x = x + mlp(t, f"{name}.mlp", norm(x, t[f"{name}.post_attention_layernorm.weight"]))
        normed = norm(x, t["norm.weight"])
        logits = normed @ t["lm_head.weight"].T
        if "d2t" in t:
            wide = torch.full((len(logits), V), float("-inf"))
            wide[:, torch.arange(len(t["d2t"])) + t["d2t"]] = logits
            logits = wide
        return normed if table.get("norm_output") else x, logits

    return token_by_token(step, taps @ t["fc.weight"].T, hidden, draft)


def medusa(t, table, hidden, draft):
    found = []
    for i in range(GAMMA):
        x = hidden.last[-1]
        for j in range(2):
            x = x + F.silu(x @ t[f"{i}.{j}.linear.weight"].T + t[f"{i}.{j}.linear.bias"])
        found.append(x @ t[f"{i}.2.weight"].T)
    return torch.stack(found)


def vllm_medusa(t, table, hidden, draft):
    found = torch.full((GAMMA, V), float("-inf"))
    for i in range(GAMMA):
        x = hidden.last[-1]
        x = x + F.silu(x @ t[f"blocks.{i}.layers.0.weight"].T)
        found[i, t["token_map"]] = x @ t[f"lm_heads.{i}.weight"].T
    return found


def mtp(t, table, hidden, draft, layout):
    fc, embedding_norm, hidden_norm, final, layer, style = layout

    def step(features, tokens):
        embedded = hidden.embed(tokens)
        if style != "qwen":
            embedded = torch.cat([torch.zeros(1, D), embedded[1:]])
        pair = norm(embedded, t[f"{embedding_norm}.weight"]), norm(features, t[f"{hidden_norm}.weight"])
        x = torch.cat(pair[::-1] if style == "mimo" else pair, -1) @ t[f"{fc}.weight"].T
        x = block(t, layer, x)
        normed = norm(x, t[f"{final}.weight"])
        logits = normed @ t["model.layers.7.shared_head.head.weight"].T if style == "nextn" else hidden.head(normed)
        return x if style == "nextn" else normed, logits

    return token_by_token(step, hidden.last, hidden, draft)


def dflash(t, table, hidden, draft, ids, slots, mask):
    context = norm(hidden.layers(ids) @ t["fc.weight"].T, t["hidden_norm.weight"])
    tokens = torch.tensor([FIRST] + [mask] * (table["block_size"] - 1))
    x = t["embed_tokens.weight"][tokens] if "embed_tokens.weight" in t else hidden.embed(tokens)
    for i in range(2):
        name = f"layers.{i}"
        y = norm(x, t[f"{name}.input_layernorm.weight"])
        x = x + attention(t, f"{name}.self_attn", y, context, causal=False)
        x = x + mlp(t, f"{name}.mlp", norm(x, t[f"{name}.post_attention_layernorm.weight"]))
    normed = norm(x, t["norm.weight"])
    features = normed[slots:][:GAMMA]
    logits = features @ t["lm_head.weight"].T if "lm_head.weight" in t else hidden.head(features)
    if "markov_head.markov_w1.weight" not in t:
        return logits
    memory, found = torch.zeros(5), []
    # All of the block, in order: that of the last committed token, too, where it predicts none (`slots` is 1).
    for feature, previous in zip(normed, [FIRST] * slots + [FIRST, *draft[:-1]], strict=False):
        z = t["markov_head.markov_w1.weight"][previous]
        if "markov_head.gate_proj.weight" in t:
            read = torch.cat([feature, z]) @ t["markov_head.gate_proj.weight"].T + t["markov_head.gate_proj.bias"]
            z = torch.sigmoid(read) * z
        if "markov_head.joint_proj.weight" in t:
            read = torch.cat([memory, z, feature]) @ t["markov_head.joint_proj.weight"].T
            gate, new, out = (read + t["markov_head.joint_proj.bias"]).chunk(3)
            memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(new)
            z = torch.tanh(out)
        found.append(z @ t["markov_head.markov_w2.weight"].T)
    return logits + torch.stack(found[slots:])


# --- files


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


def eagle3_shapes(name="midlayer", vocab=V, **options):
    top = {
        "fc.weight": (D, 3 * D),
        "norm.weight": (D,),
        "lm_head.weight": (vocab, D),
        f"{name}.hidden_norm.weight": (D,),
    }
    return layer_shapes(name, 2 * D, **options) | top


def dflash_shapes(qk_norms=True, taps=2):
    top = {"fc.weight": (D, taps * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    return layer_shapes("layers.0", qk_norms=qk_norms) | layer_shapes("layers.1", qk_norms=qk_norms) | top


def mtp_shapes(layout, **options):
    fc, *norms, layer, style = layout
    shapes = layer_shapes(layer, **options) | {f"{fc}.weight": (D, 2 * D)} | {f"{name}.weight": (D,) for name in norms}
    return shapes | ({"model.layers.7.shared_head.head.weight": (V, D)} if style == "nextn" else {})


OFFSETS = torch.tensor([0, 0, 1, 1, 2, 4])  # of ids 0, 1, 3, 4, 6 and 9
MARKOV = {"markov_head.markov_w1.weight": (V, 5), "markov_head.markov_w2.weight": (V, 5)}
JOINT = {"markov_head.joint_proj.weight": (15, 10 + D), "markov_head.joint_proj.bias": (15,)}
QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.layers.0", "qwen")
MIMO = (*(f"model.mtp_layers.0.{x}" for x in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")),)
MIMO = (*MIMO, "model.mtp_layers.0", "mimo")
NEXTN = (*(f"model.layers.7.{x}" for x in ("eh_proj", "enorm", "hnorm", "shared_head.norm")), "model.layers.7", "nextn")
UNIFIED = (*(f"mtp_layers.0.{x}" for x in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")),)
UNIFIED = (*UNIFIED, "mtp_layers.0", "qwen")
QWEN3 = BASE | {"model_type": "qwen3"}


def unified(kind, layer=BASE, **own):
    """A config.json of `speculators`."""
    inner = {"algorithm": kind, "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}}
    return {"speculators_model_type": kind, "transformer_layer_config": layer, "speculators_config": inner, **own}


@dataclasses.dataclass
class Published:
    """A drafter as somebody has published it: config.json, tensors, file, and what they compute."""

    table: dict
    shapes: dict
    reference: object
    file: str = "model.safetensors"
    fixed: dict = dataclasses.field(default_factory=dict)
    beside_target: bool = False

    def tensors(self):
        generator = torch.Generator().manual_seed(3)
        made = {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}
        return made | self.fixed

    def write(self, where, target_folder):
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
        eagle1,
        "pytorch_model.bin",
    ),
    "EAGLE-3, its authors'": Published(
        BASE | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 6},
        eagle3_shapes(vocab=6) | {"embed_tokens.weight": (V, D)},
        functools.partial(eagle3, ids=(2, 3, 4)),
        "pytorch_model.bin",
        {"d2t": OFFSETS, "t2d": torch.tensor([i in (0, 1, 3, 4, 6, 9) for i in range(V)])},
    ),
    "EAGLE-3, SGLang's": Published(
        BASE
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
            "norm_before_fc": True,
        },
        eagle3_shapes() | {"input_norm.weight": (3 * D,)},
        functools.partial(eagle3, ids=(1, 3, 5)),  # transformers' hidden_states[l + 1]
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
        functools.partial(eagle3, ids=(1, 3, 5), name="layers.0"),
    ),
    "Medusa": Published(
        {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "org/target", "version": "2"},
        {f"{i}.{j}.linear.weight": (D, D) for i in range(3) for j in range(2)}
        | {f"{i}.{j}.linear.bias": (D,) for i in range(3) for j in range(2)}
        | {f"{i}.2.weight": (V, D) for i in range(3)},
        medusa,
        "medusa_lm_head.pt",
    ),
    "Medusa, vLLM's": Published(
        {"num_heads": 3, "num_hidden_layers": 1, "hidden_size": D, "vocab_size": V, "truncated_vocab_size": 4},
        {f"blocks.{i}.layers.0.weight": (D, D) for i in range(3)} | {f"lm_heads.{i}.weight": (4, D) for i in range(3)},
        vllm_medusa,
        fixed={"token_map": torch.tensor([1, 4, 9, 12])},
    ),
    "MTP, Qwen's": Published(
        {"mtp_num_hidden_layers": 1}, mtp_shapes(QWEN), functools.partial(mtp, layout=QWEN), beside_target=True
    ),
    "MTP, MiMo's": Published(
        {"num_nextn_predict_layers": 1}, mtp_shapes(MIMO), functools.partial(mtp, layout=MIMO), beside_target=True
    ),
    "MTP, DeepSeek's": Published(
        {"num_nextn_predict_layers": 1}, mtp_shapes(NEXTN), functools.partial(mtp, layout=NEXTN), beside_target=True
    ),
    "MTP, speculators": Published(
        unified("mtp", QWEN3, num_nextn_predict_layers=1),
        mtp_shapes(UNIFIED, qk_norms=True),
        functools.partial(mtp, layout=UNIFIED),
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
        functools.partial(dflash, ids=(2, 5), slots=1, mask=12),
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
        functools.partial(dflash, ids=(2, 5), slots=0, mask=12),
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
        dflash_shapes() | MARKOV | {"markov_head.gate_proj.weight": (5, D + 5), "markov_head.gate_proj.bias": (5,)},
        functools.partial(dflash, ids=(2, 5), slots=1, mask=12),
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
        functools.partial(dflash, ids=(2, 5), slots=1, mask=12),
    ),
}
for case in CASES.values():
    if "block_size" in case.table.get("dflash_config", {}):
        case.table["block_size"] = case.table["dflash_config"]["block_size"]


def draft_of(drafter):
    """The first draft after the prompt and the token after it, at temperature 1, of one compiled program."""
    functions, lm = drafter.functions, drafter.target.lm
    gamma = min(GAMMA, functions.longest or GAMMA)
    prompt = Prompt(jnp.array([[*PROMPT, 0, 0]]), jnp.array([len(PROMPT)]))
    row = Prompt(jnp.array([[*PROMPT, FIRST] + [0] * 20]), jnp.array([len(PROMPT) + 1]))
    one = SamplingParams(jnp.ones(1))

    @jax.jit
    def run(weights, keys):
        forward, cache = lm.prefill(weights.target, prompt, 40)
        state = functions.init(weights, prompt, 20, forward)
        context = DraftContext(
            keys, row, jnp.array([gamma]), gamma, False, lambda logits, *_: sampling()(one, logits, None)
        )
        draft, _ = functions.propose(weights, Caches(cache, state), context)
        return draft.tokens[0], draft.log_probs[0]

    tokens, log_probs = run(Weights(drafter.target.params, drafter.params), jax.random.split(jax.random.key(5), 1))
    return tokens.tolist(), np.asarray(log_probs)


@pytest.mark.parametrize("name", CASES)
def test_computes_what_its_format_says(name, folder, target, hidden, tmp_path):
    case = CASES[name]
    where = case.write(tmp_path / "it", folder)
    drafter = jaxspec.load_drafter(where, target=jaxspec.load(where) if case.beside_target else target)
    tokens, log_probs = draft_of(drafter)
    expected = case.reference(case.tensors(), case.table, hidden, tokens).log_softmax(-1).numpy()
    np.testing.assert_allclose(log_probs, expected, rtol=2e-4, atol=2e-4)
    assert np.ptp(log_probs[np.isfinite(log_probs)]) > 1.0


# --- in and out


@pytest.mark.parametrize(
    "name",
    [
        "EAGLE-3, its authors'",
        "EAGLE-3, speculators",
        "MTP, speculators",
        "DFlash",
        "DSpark",
    ],
)
def test_what_is_written_is_read_again(name, folder, target, tmp_path):
    """In the format of speculators, tensors bit for bit; what it was read from may have been another format."""
    case = CASES[name]
    config, params = read_head(case.write(tmp_path / "it", folder), target=target)
    written = save(config, params, tmp_path / "written", target=target, tokens=4)
    again, same = read_head(written, target=target)
    assert again == config
    assert jax.tree.structure(same) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    table = json.loads((written / "config.json").read_text())
    said = table["speculators_config"]
    assert said["verifier"] == {"name_or_path": "llama", "architectures": ["LlamaForCausalLM"]}
    assert said["proposal_methods"][0]["speculative_tokens"] <= 4
    assert said["algorithm"] == table["speculators_model_type"] in table["architectures"][0].lower() + "eagle3 mtp"
    layers = transformers.AutoConfig.for_model(**table["transformer_layer_config"])
    assert (layers.hidden_size, layers.vocab_size, layers.num_hidden_layers) == (D, V, config.layer.layers)
    if name == "EAGLE-3, its authors'":
        tensors = load_file(written / "model.safetensors")
        assert torch.equal(tensors["d2t"], OFFSETS) and torch.equal(tensors["t2d"], case.fixed["t2d"])
        assert {x.split(".")[0] for x in tensors} >= {"layers", "fc", "norm", "lm_head", "embed_tokens"}
        assert table["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
        with pytest.raises(CheckpointError, match="overwrite=True"):
            save(config, params, written, target=target)


def test_a_format_without_such_a_drafter(target, folder, tmp_path):
    config, params = read_head(CASES["MTP, MiMo's"].write(tmp_path / "it", folder), target=target)
    with pytest.raises(CheckpointError, match="hidden_first"):
        save(config, params, tmp_path / "out", target=target)
    plain = mtp_kind.MTPConfig(dataclasses.replace(LLAMA, layers=1))
    with pytest.raises(CheckpointError, match=r"Qwen 3's layer only.* head_norms=False: train it with head_norms"):
        save(plain, mtp_kind.init(plain, jax.random.key(0)), tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_heads_are_written_as_vllm_has_medusas_and_eagle_as_its_authors(target, folder, tmp_path):
    """What vLLM's or the authors' files hold, and with tensors of our own what they have not: all is read again."""
    some = HeadsConfig(V, D, heads=2, block="feed_forward", ff_dim=6, own_head=False)
    hydra = HeadsConfig(V, D, heads=2, blocks=2, reads_tokens=True, draft_vocab=5)
    of_target = (
        HeadsConfig(V, D, heads=2, own_head=False),
        HeadsConfig(V, D, heads=2, own_head=False, reads_tokens=True),
    )
    made = [(c, medusa_kind.init(c, jax.random.key(i))) for i, c in enumerate((some, hydra, *of_target))]
    for name in ("EAGLE", "Medusa", "Medusa, vLLM's"):
        made.append(read_head(CASES[name].write(tmp_path / name, folder), target=target))
    for number, (config, params) in enumerate(made):
        written = save(config, params, tmp_path / str(number), target=target)
        again, same = read_head(written, target=target)
        assert again == config
        jax.tree.map(np.testing.assert_array_equal, same, params)
    theirs, ours = (load_file(where / "model.safetensors") for where in (tmp_path / "Medusa, vLLM's", written))
    assert {name: tuple(x.shape) for name, x in ours.items()} == {n: tuple(x.shape) for n, x in theirs.items()}
    table = json.loads((written / "config.json").read_text())
    assert {name: table[name] for name in CASES["Medusa, vLLM's"].table} == CASES["Medusa, vLLM's"].table


def test_generate_runs_the_target_with_what_the_drafter_reads(folder, target, tmp_path):
    """The user's target has no taps, and needs none; the text is its own, in bfloat16, too."""
    where = CASES["EAGLE-3, speculators"].write(tmp_path / "it", folder)
    drafter = jaxspec.load_drafter(where, target=target)
    assert target.lm.taps == () and drafter.target.lm.taps == (0, 2, 4)
    prompt = Prompt(jnp.array([[3, 1, 4], [7, 0, 0]]), jnp.array([3, 1]))
    plain = jaxspec.generate(target, prompt, max_new_tokens=8)
    fast = jaxspec.generate(target, prompt, drafter=drafter, max_new_tokens=8)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    narrow = jaxspec.load(folder, dtype="bfloat16")
    kinds = {x.dtype.name for x in jax.tree.leaves(jaxspec.load_drafter(where, target=narrow).params)}
    assert kinds == {"bfloat16", "float32"}  # matrices, and scales of norms
    with pytest.raises(ValueError, match="the drafter reads the hidden states of llama"):
        jaxspec.generate(narrow, prompt, drafter=drafter)


# --- what does not fit

NARROW = DecoderConfig(V, 8, FF, LAYERS, HEADS, KV, HD, rope_base=100.0)
WORDS = DecoderConfig(V + 3, D, FF, LAYERS, HEADS, KV, HD, rope_base=100.0)
DEEPER = DecoderConfig(V, D, FF, LAYERS + 2, HEADS, KV, HD, rope_base=100.0)
SHALLOW = DecoderConfig(V, D, FF, 4, HEADS, KV, HD, rope_base=100.0)


def unloaded(config):
    """A model whose parameters nobody reads."""
    net = gpt if isinstance(config, gpt.GPTConfig) else decoder
    return Model(net.language_model(config), {}, None, config, "other")


@pytest.mark.parametrize(
    ("name", "other", "complaint"),
    [
        ("EAGLE", NARROW, "fc.weight is .* for the width 16, and the target's is 8"),
        ("EAGLE-3, its authors'", NARROW, "hidden states of width 16, and the target's have 8"),
        ("EAGLE-3, its authors'", WORDS, "vocabulary has 13 ids, and the target's 16"),
        ("EAGLE-3, SGLang's", SHALLOW, "it reads layers .* of its target, which has 4: 4 is none"),
        ("Medusa", NARROW, "for a width of 16, and the target's is 8"),
        ("Medusa", WORDS, "for a vocabulary of 13, and the target's is 16"),
        ("MTP, Qwen's", gpt.GPTConfig(V, D, FF, 2, 2), "the target is a GPTConfig"),
        ("MTP, Qwen's", DecoderConfig(V, D, FF, 2, 2, 2, 8), "k_proj.weight is .8, 16., expected .16, 16."),
        ("DFlash", NARROW, "hidden states of width 16"),
        ("DFlash", SHALLOW, "which has 4: 4 is none"),
        ("DFlash", DEEPER, f"made for a target of {LAYERS} layers, and the target has {LAYERS + 2}"),
    ],
)
def test_a_drafter_for_another_target(name, other, complaint, folder, tmp_path):
    where = CASES[name].write(tmp_path / "it", folder)
    with pytest.raises(CheckpointError, match=complaint):
        jaxspec.load_drafter(where, target=unloaded(other))


def test_look_ahead_vectors_are_read_again_and_not_for_another_target(target, tmp_path):
    config = lookahead_embeddings.LookAheadConfig(V, D, vectors=2)
    params = lookahead_embeddings.init(config, jax.random.key(0))
    where = save(config, params, tmp_path / "vectors", target=target)
    again, same = read_head(where, target=target)
    assert again == config
    np.testing.assert_array_equal(same["vectors"], params["vectors"])
    for other, complaint in (
        (NARROW, "width of 16, and the target's is 8"),
        (WORDS, "has 13 ids, and the target's 16"),
    ):
        with pytest.raises(CheckpointError, match=complaint):
            jaxspec.load_drafter(where, target=unloaded(other))


def test_a_drafter_that_names_another_model(target, tmp_path):
    """Of the same width and vocabulary: refused where the layers of the other are known to be more or fewer."""
    config = kangaroo.ExitAdapterConfig(dataclasses.replace(LLAMA, layers=1), exit=2)
    params = kangaroo.init(config, jax.random.key(0))
    folder = save(config, params, tmp_path / "it", target=target._replace(name="org/tiny-7b"))
    table = json.loads((folder / "config.json").read_text())
    assert table["base_model_name_or_path"] == "org/tiny-7b"
    with pytest.warns(UserWarning, match="made for org/tiny-7b, and the target is org/other: the text stays exact"):
        jaxspec.load_drafter(folder, target=target._replace(name="org/other"))
    for name in ("org/tiny-7b", "other/Tiny-7B-int8", "a-folder", ""):  # a copy, or nobody knows
        jaxspec.load_drafter(folder, target=target._replace(name=name))

    say(folder, base_model_name_or_path="debian-t5-large", num_target_layers=None)
    with pytest.raises(
        CheckpointError, match=r"debian-t5-large, a model of 9 layers, .* has 7: .*load\('debian-t5-large"
    ):
        jaxspec.load_drafter(folder, target=target._replace(name="debian-gpt-base"))
    say(folder, num_target_layers=LAYERS + 1)
    with pytest.raises(CheckpointError, match=f"made for a target of {LAYERS + 1} layers, and the target has {LAYERS}"):
        jaxspec.load_drafter(folder, target=target)


@pytest.mark.slow
def test_shipped_drafters_and_other_shipped_models():
    with pytest.raises(
        CheckpointError, match="made for debian-t5-base, a model of 5 layers, and debian-t5-large has 9"
    ):
        jaxspec.load_drafter("debian-t5-base-lookahead", target=jaxspec.load("debian-t5-large"))


def test_options_that_a_drafter_has_no_use_for(folder, target, tmp_path):
    medusa, eagle = (CASES[name].write(tmp_path / name, folder) for name in ("Medusa", "EAGLE"))
    for wrong in ("024", ("0", "2")):
        with pytest.raises(ValueError, match=r"taps (is the string|has) '0.*: expected numbers of layers"):
            jaxspec.load_drafter(eagle, target=target, taps=wrong)
        with pytest.raises(ValueError, match=r"taps (is the string|has) '0.*: expected numbers of layers"):
            jaxspec.with_taps(target, wrong)
    with pytest.raises(ValueError, match=r"taps is \[1\], and .* reads the last layer's output only"):
        jaxspec.load_drafter(medusa, target=target, taps=[1])
    few = jaxspec.trim_vocabulary(target, size=4)
    with pytest.raises(ValueError, match="the drafter has a head of its own, which is trimmed in training"):
        jaxspec.load_drafter(medusa, target=target, head=few)
    other = jaxspec.Model(lm=unloaded(NARROW).lm, params={})
    with pytest.raises(ValueError, match="the head is that of a model of width 8"):
        jaxspec.load_drafter(eagle, target=target, head=other)
    _, log_probs = draft_of(jaxspec.load_drafter(eagle, target=target, head=few))
    assert set(np.flatnonzero(np.isfinite(log_probs[0]))) == set(trim.draft_tokens(few).tolist())


def damaged_file(where: Path):
    file = where / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-200])


def change(where: Path, **tensors):
    """Tensors in place of others; None removes one."""
    file = where / "model.safetensors"
    have = load_file(file) | tensors
    save_file({name: x for name, x in have.items() if x is not None}, file)


def say(where: Path, **keys):
    table = json.loads((where / "config.json").read_text()) | keys
    (where / "config.json").write_text(json.dumps(table))


BAD = {
    "truncated": (damaged_file, "damaged"),
    "no weights": (lambda where: (where / "model.safetensors").unlink(), "has no weights"),
    "no config": (lambda where: (where / "config.json").unlink(), "No such file"),
    "a tensor is missing": (lambda where: change(where, **{"norm.weight": None}), "missing .1.: norm.weight"),
    "a tensor too many": (lambda where: change(where, **{"layers.0.conv": torch.ones(2)}), "unexpected .1.: layers"),
    "of another shape": (lambda where: change(where, **{"norm.weight": torch.ones(3)}), "norm.weight is .3., expected"),
    "both spellings": (
        lambda where: change(where, **{"midlayer.mlp.up_proj.weight": torch.ones(FF, D)}),
        "holds layers.0.mlp.up_proj.weight twice",
    ),
    "ids that no target has": (
        lambda where: change(where, d2t=torch.tensor([0] * 5 + [99]), **{"lm_head.weight": torch.ones(6, D)}),
        "d2t gives ids from 0 to 104",
    ),
    "a vocabulary without a head": (
        lambda where: change(where, d2t=torch.zeros(6).long(), **{"lm_head.weight": None}),
        "no lm_head for it",
    ),
    "integers": (lambda where: change(where, **{"norm.weight": torch.ones(D).long()}), "norm.weight is int64"),
    "windows": (
        lambda where: say(where, transformer_layer_config=QWEN3 | {"layer_types": ["sliding_attention"]}),
        "sliding_attention",
    ),
    "an unknown format": (lambda where: change(where, **{"fc.weight": None}), "no format that is known, expected"),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_and_unknown_drafters(name, folder, target, tmp_path):
    where = CASES["EAGLE-3, speculators"].write(tmp_path / "it", folder)
    spoil, complaint = BAD[name]
    spoil(where)
    with pytest.raises(CheckpointError, match=complaint):
        jaxspec.load_drafter(where, target=target)


def test_a_drafter_with_another_tokenizer(folder, target, tmp_path):
    where = CASES["EAGLE-3, speculators"].write(tmp_path / "it", folder)
    word_tokenizer(["</s>", "<unk>", "a", "b"]).save_pretrained(where)
    with_words = target._replace(tokenizer=word_tokenizer(["</s>", "<unk>", "a", "c"]))
    with pytest.raises(CheckpointError, match=r"another tokenizer than the target: id .* is 'c' .* and 'b'"):
        jaxspec.load_drafter(where, target=with_words)


def test_there_is_no_such_drafter(target):
    with pytest.raises(CheckpointError, match="no drafter at no/such/folder: expected a folder, the name of a ship"):
        jaxspec.load_drafter("no/such/folder", target=target)


def test_a_model_without_layers_has_no_taps():
    with pytest.raises(ValueError, match="no layers to tap"):
        jaxspec.with_taps(table_model(jax.random.key(0), 3), (0,))
