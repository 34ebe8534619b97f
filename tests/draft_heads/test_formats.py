"""Published drafters compute what their formats say, and what is written is read again.

The references are written in PyTorch from the descriptions of the formats, over the tensors as the
files have them, and read the hidden states of transformers' own Llama; so names, numbers of layers,
and which token goes with which hidden state are tested together, through `load_drafter` and the
drafters' own functions.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import jaxspec
from jaxspec import nets
from jaxspec.core import Prompt
from jaxspec.draft_heads import formats
from jaxspec.draft_heads import medusa as medusa_kind
from jaxspec.draft_heads import mtp as mtp_kind
from jaxspec.draft_heads.block_config import BlockConfig
from jaxspec.draft_heads.dflash2 import DFlash2Config
from jaxspec.draft_heads.eagle import EagleConfig
from jaxspec.draft_heads.load import read_head
from jaxspec.draft_heads.medusa import HeadsConfig
from jaxspec.draft_heads.save import config_json, save
from jaxspec.weights.orbax import CheckpointError
from tests.marks import marked, optional

torch = optional("torch")
pytestmark = pytest.mark.needs_torch

V, D, HEADS, KV, HD, EPS = 13, 16, 4, 2, 4, 1e-5  # as in conftest.py
PROMPT, FIRST, GAMMA = [3, 1, 4, 1, 5], 9, 3


class Hidden:
    """The hidden states that transformers' model computes for the prompt, and the parts of it that
    drafters use.
    """

    def __init__(self, folder):
        self.model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            out = self.model(torch.tensor([PROMPT]), output_hidden_states=True)
        # [before layer 0, ..., after the last layer and its norm]
        self.states = [x[0] for x in out.hidden_states]
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


def attention(t, name, x, context=None, causal=True, hidden=None):
    """Return the attention of x to itself, causally; or to a context before it and to all of
    itself.

    `hidden` says which of these each position of x does not see.
    """
    read = x if context is None else torch.cat([context, x])
    positions = torch.arange(len(read))

    def heads_of(part, source, count):
        y = source @ t[f"{name}.{part}_proj.weight"].T + t.get(
            f"{name}.{part}_proj.bias", torch.zeros(())
        )
        y = y.reshape(len(source), count, HD)
        return norm(y, t[f"{name}.{part}_norm.weight"]) if f"{name}.{part}_norm.weight" in t else y

    q = rotate(heads_of("q", x, HEADS), positions[-len(x) :])
    k = rotate(heads_of("k", read, KV), positions).repeat_interleave(HEADS // KV, 1)
    v = heads_of("v", read, KV).repeat_interleave(HEADS // KV, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / HD**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(len(x), len(read)).triu(1).bool(), float("-inf"))
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v).reshape(len(x), HEADS * HD)
    return mixed @ t[f"{name}.o_proj.weight"].T


def mlp(t, name, x):
    gate, up, down = (t[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def block(t, name, x, context=None, causal=True):
    x = x + attention(
        t, f"{name}.self_attn", norm(x, t[f"{name}.input_layernorm.weight"]), context, causal
    )
    return x + mlp(t, f"{name}.mlp", norm(x, t[f"{name}.post_attention_layernorm.weight"]))


def token_by_token(step, features, hidden, draft):
    """Logits of each draft token: `step` makes hidden states of pairs, and logits of hidden states.

    What was fed before is fed again with every token, so nothing is taken from a cache.
    """
    tokens, log_probs = [*PROMPT[1:], FIRST], []
    for token in draft:
        output, logits = step(features, torch.tensor(tokens))
        log_probs.append(logits[-1])
        features, tokens = torch.cat([features, output[-1:]]), [*tokens, token]
    return torch.stack(log_probs)


def eagle1(t, table, hidden, draft):
    def step(features, tokens):
        x = torch.cat([hidden.embed(tokens), features], -1) @ t["fc.weight"].T + t["fc.bias"]
        x = x + attention(t, "layers.0.self_attn", x)
        x = x + mlp(t, "layers.0.mlp", norm(x, t["layers.0.post_attention_layernorm.weight"]))
        return x, hidden.head(x)

    return token_by_token(step, hidden.last, hidden, draft)


def eagle3(t, table, hidden, draft, ids, name="midlayer", window=None, layers=1):
    def fused(taps):
        if "input_norm.weight" in t:
            taps = norm(taps, t["input_norm.weight"])
        if "fc_norm.0.weight" in t:
            taps = torch.cat(
                [norm(x, t[f"fc_norm.{i}.weight"]) for i, x in enumerate(taps.split(D, -1))], -1
            )
        return taps @ t["fc.weight"].T

    def step(features, tokens):
        embedded = (
            t["embed_tokens.weight"][tokens] if "embed_tokens.weight" in t else hidden.embed(tokens)
        )
        g = norm(features, t[f"{name}.hidden_norm.weight"])
        x = torch.cat([norm(embedded, t[f"{name}.input_layernorm.weight"]), g], -1)
        position = torch.arange(len(x))
        behind = None if window is None else position[:, None] - position[None] >= window
        mixed = attention(t, f"{name}.self_attn", x, hidden=behind)
        x = (g if table.get("norm_before_residual") else features) + mixed
        x = x + mlp(t, f"{name}.mlp", norm(x, t[f"{name}.post_attention_layernorm.weight"]))
        for i in range(1, layers):
            x = block(t, f"layers.{i}", x)
        normed = norm(x, t["norm.weight"])
        logits = normed @ t["lm_head.weight"].T
        if "d2t" in t:
            wide = torch.full((len(logits), V), float("-inf"))
            wide[:, torch.arange(len(t["d2t"])) + t["d2t"]] = logits
            logits = wide
        return normed if table.get("norm_output") else x, logits

    features = fused(hidden.layers(ids))
    # all draft tokens in one pass: behind the text's pairs are those of a mask token
    if "mask_hidden" in t:
        slots = fused(t["mask_hidden"][0]).expand(GAMMA - 1, -1)
        tokens = [*PROMPT[1:], FIRST] + [table["mask_token_id"]] * (GAMMA - 1)
        return step(torch.cat([features, slots]), torch.tensor(tokens))[1][-GAMMA:]
    return token_by_token(step, features, hidden, draft)


def medusa(t, table, hidden, draft):
    logits = []
    for i in range(GAMMA):
        x = hidden.last[-1]
        for j in range(2):
            x = x + torch.nn.functional.silu(
                x @ t[f"{i}.{j}.linear.weight"].T + t[f"{i}.{j}.linear.bias"]
            )
        logits.append(x @ t[f"{i}.2.weight"].T)
    return torch.stack(logits)


def vllm_medusa(t, table, hidden, draft):
    logits = torch.full((GAMMA, V), float("-inf"))
    for i in range(GAMMA):
        x = hidden.last[-1]
        x = x + torch.nn.functional.silu(x @ t[f"blocks.{i}.layers.0.weight"].T)
        logits[i, t["token_map"]] = x @ t[f"lm_heads.{i}.weight"].T
    return logits


def mtp(t, table, hidden, draft, layout):
    fc, embedding_norm, hidden_norm, final, layer, style = layout

    def step(features, tokens):
        embedded = hidden.embed(tokens)
        if style != "qwen":
            embedded = torch.cat([torch.zeros(1, D), embedded[1:]])
        pair = (
            norm(embedded, t[f"{embedding_norm}.weight"]),
            norm(features, t[f"{hidden_norm}.weight"]),
        )
        x = torch.cat(pair[::-1] if style == "mimo" else pair, -1) @ t[f"{fc}.weight"].T
        x = block(t, layer, x)
        normed = norm(x, t[f"{final}.weight"])
        logits = (
            normed @ t["model.layers.7.shared_head.head.weight"].T
            if style == "nextn"
            else hidden.head(normed)
        )
        return x if style == "nextn" else normed, logits

    return token_by_token(step, hidden.last, hidden, draft)


def convolutions(t, name, y):
    """Return DFlash 2's two convolutions around a sublayer that reads y; of other drafters,
    nothing.
    """
    if f"{name}.base_kernel" not in t:
        return (lambda x: x,) * 2
    base, dynamic = t[f"{name}.base_kernel"], y @ t[f"{name}.kernel_projection.weight"].T
    # [positions, side, offset, D]
    dynamic = dynamic.reshape(len(y), 2, 2, -1).repeat_interleave(4, -1)

    def side(s):
        def convolve(x):
            shifted = torch.cat([torch.zeros(1, D), x[:-1]])
            return sum((base[s, o] + dynamic[:, s, o]) * (x, shifted)[o] for o in range(2))

        return convolve

    return side(0), side(1)


def walked(t, table, logits, features, draft):
    """Return the logits of each token of DFlash 2's walk: of the best of a position, scored by the
    token before.
    """
    books = [
        t[name]
        for x in ("predecessor", "successor")
        for name in t
        if name.startswith(f"candidate_selector.{x}_code")
    ]
    rows = []
    for unary, feature, previous in zip(logits, features, [FIRST, *draft[:-1]], strict=True):
        best = unary.topk(table["selector_top_k"]).indices
        hidden = t["candidate_selector.hidden_projection.weight"] @ feature
        rows.append(torch.full((V,), float("-inf")))
        rows[-1][best] = unary[best] + books[1][best] @ (books[0][previous] * hidden)
    return torch.stack(rows)


def dflash(
    t,
    table,
    hidden,
    draft,
    ids,
    slots,
    mask,
    window=None,
    from_anchor=True,
    causal=(True, False),
    local=0,
):
    table = {**table, **table.get("dflash_config", {})}
    context = norm(hidden.layers(ids) @ t["fc.weight"].T, t["hidden_norm.weight"])
    tokens = torch.tensor([FIRST] + [mask] * (table["block_size"] - 1))
    x = t["embed_tokens.weight"][tokens] if "embed_tokens.weight" in t else hidden.embed(tokens)
    x = x * table.get("input_embedding_scale", 1.0)
    for i in range(2):  # of two layers one, `local`, may have a window
        name = f"layers.{i}"
        y = norm(x, t[f"{name}.input_layernorm.weight"])
        key, query = (
            torch.arange(len(context) + len(x))[None] - len(context),
            torch.arange(len(x))[:, None],
        )
        here = window if i == local else None
        unseen = (key > query) & (causal[0] if here else causal[1])
        if here:  # its end is the block's first position, or it is each token's own
            unseen = unseen | (key < -here if from_anchor else (key - query).abs() >= here)
        before, after = convolutions(t, f"{name}.attention_conv", y)
        x = x + after(
            attention(t, f"{name}.self_attn", before(y), context, causal=False, hidden=unseen)
        )
        y = norm(x, t[f"{name}.post_attention_layernorm.weight"])
        before, after = convolutions(t, f"{name}.mlp_conv", y)
        x = x + after(mlp(t, f"{name}.mlp", before(y)))
    normed = norm(x, t["norm.weight"])
    features = normed[slots:][:GAMMA]
    logits = features @ t["lm_head.weight"].T if "lm_head.weight" in t else hidden.head(features)
    logits = logits * table.get("output_multiplier", 1.0)
    if cap := table.get("final_logit_softcapping"):
        logits = cap * torch.tanh(logits / cap)
    if "selector_top_k" in table:
        return walked(t, table, logits, features, draft)
    if "markov_head.markov_w1.weight" not in t:
        return logits
    memory, log_probs = torch.zeros(5), []
    # All of the block, in order: that of the last committed token, too, where it predicts none
    # (`slots` is 1).
    for feature, previous in zip(normed, [FIRST] * slots + [FIRST, *draft[:-1]], strict=False):
        z = t["markov_head.markov_w1.weight"][previous]
        if "markov_head.gate_proj.weight" in t:
            read = (
                torch.cat([feature, z]) @ t["markov_head.gate_proj.weight"].T
                + t["markov_head.gate_proj.bias"]
            )
            z = torch.sigmoid(read) * z
        if "markov_head.joint_proj.weight" in t:
            read = torch.cat([memory, z, feature]) @ t["markov_head.joint_proj.weight"].T
            gate, new, out = (read + t["markov_head.joint_proj.bias"]).chunk(3)
            memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(new)
            z = torch.tanh(out)
        log_probs.append(z @ t["markov_head.markov_w2.weight"].T)
    return logits + torch.stack(log_probs[slots:])


REFERENCES = {
    "EAGLE": eagle1,
    "EAGLE-3": eagle3,
    "P-EAGLE": eagle3,
    "Medusa": medusa,
    "Medusa, vLLM's": vllm_medusa,
    "MTP": mtp,
    "DFlash": dflash,
    "DFlash 2": dflash,
    "DSpark": dflash,
}
NAMES = [
    *(
        "EAGLE",
        "EAGLE-3, its authors'",
        "EAGLE-3, SGLang's",
        "EAGLE-3, DeepSpec's",
        "EAGLE-3, speculators",
    ),
    *("EAGLE-3, windows", "P-EAGLE", "Medusa", "Medusa, vLLM's"),
    *("MTP, Qwen's", "MTP, MiMo's", "MTP, DeepSeek's", "MTP, speculators"),
    *(
        "DFlash",
        "DFlash, windows",
        "DFlash, unused windows",
        "DSpark",
        "DSpark, speculators",
        "DSpark, a memory",
    ),
    *("DFlash 2", "DFlash 2, speculators"),
    *("DFlash, z-lab's windows", "DFlash, z-lab's causal layers", "DFlash, z-lab's scales"),
    *("DFlash, z-lab's unused windows", "DFlash, z-lab's windows by number"),
    *(f"DFlash, JetSpec's {head} head" for head in ("causal", "bidirectional", "shifted")),
]
FAST = {"P-EAGLE", "DFlash 2", "DSpark, a memory", "DFlash, windows", "DFlash, z-lab's scales"}
FAST |= {"DFlash, JetSpec's shifted head"}


def test_every_published_drafter_has_a_reference(published):
    assert set(NAMES) == set(published)


@pytest.mark.parametrize("name", marked(NAMES, slow={*NAMES} - FAST))
def test_computes_what_its_format_says(name, published, folder, target, hidden, draft_of, tmp_path):
    case = published[name]
    where = case.write(tmp_path / "it", folder)
    drafter = jaxspec.load_drafter(
        where, target=jaxspec.load(where) if case.beside_target else target
    )
    tokens, log_probs = draft_of(drafter)
    reference = REFERENCES.get(name) or REFERENCES[name.partition(",")[0]]
    expected = (
        reference(case.tensors(), case.table, hidden, tokens, **case.reference)
        .log_softmax(-1)
        .numpy()
    )
    np.testing.assert_allclose(log_probs, expected, rtol=1e-4, atol=1e-4)
    assert np.ptp(log_probs[np.isfinite(log_probs)]) > 1.0


# --- in and out


@pytest.mark.parametrize(
    "name",
    marked(
        [
            *(
                "EAGLE-3, its authors'",
                "EAGLE-3, speculators",
                "MTP, speculators",
                "DFlash",
                "DFlash, windows",
            ),
            *("EAGLE-3, windows", "P-EAGLE", "DFlash 2", "DFlash 2, speculators"),
            *(
                "DSpark",
                "DFlash, z-lab's windows",
                "DFlash, z-lab's causal layers",
                "DFlash, z-lab's scales",
            ),
            *(
                "DFlash, z-lab's unused windows",
                "DFlash, z-lab's windows by number",
                "DFlash, unused windows",
            ),
            *("DFlash, JetSpec's causal head", "DFlash, JetSpec's bidirectional head"),
        ],
        slow={"EAGLE-3, its authors'"},
    ),
)
def test_what_is_written_is_read_again(name, folder, target, tmp_path, published):
    """In the format of speculators, tensors bit for bit; what it was read from may have been
    another format.
    """
    case = published[name]
    config, params = read_head(case.write(tmp_path / "it", folder), target=target)
    written = save(config, params, tmp_path / "written", target=target, tokens=4)
    again, same = read_head(written, target=target)
    assert again == config
    assert jax.tree.structure(same) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    table = json.loads((written / "config.json").read_text())
    if "z-lab's" in name or name == "DFlash 2":
        assert table["architectures"] == case.table["architectures"]
        assert table["dflash_config"].items() >= case.table["dflash_config"].items()
        assert table.get("is_causal") == case.table.get("is_causal")
        return
    if "JetSpec's" in name:  # each reader finds the key that it knows
        options = table["dflash_config"]
        assert {table["is_causal"], options["causal"]} == {options["causal_head"]}
        assert options["causal_head"] == case.table["dflash_config"]["causal_head"]
        return
    said = table["speculators_config"]
    assert said["verifier"] == {"name_or_path": "llama", "architectures": ["LlamaForCausalLM"]}
    assert said["proposal_methods"][0]["speculative_tokens"] <= 4
    assert (
        said["algorithm"]
        == table["speculators_model_type"]
        in table["architectures"][0].lower() + "eagle3 mtp"
    )
    from safetensors.torch import load_file

    layers = transformers.AutoConfig.for_model(**table["transformer_layer_config"])
    assert (layers.hidden_size, layers.vocab_size, layers.num_hidden_layers) == (
        D,
        V,
        len(config.layer.layers),
    )
    if name == "EAGLE-3, its authors'":
        tensors = load_file(written / "model.safetensors")
        assert all(tensors[name].tolist() == case.fixed[name] for name in ("d2t", "t2d"))
        assert {x.split(".")[0] for x in tensors} >= {
            "layers",
            "fc",
            "norm",
            "lm_head",
            "embed_tokens",
        }
        assert table["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
        with pytest.raises(CheckpointError, match="give overwrite"):
            save(config, params, written, target=target)


def test_a_format_without_such_a_drafter(target, folder, tmp_path, published):
    config, params = read_head(
        published["MTP, MiMo's"].write(tmp_path / "it", folder), target=target
    )
    with pytest.raises(CheckpointError, match="hidden_first"):
        save(config, params, tmp_path / "out", target=target)
    plain = mtp_kind.MTPConfig(nets.replace(target.config, layers=1))
    with pytest.raises(
        CheckpointError,
        match=r"only modules with Qwen 3's layer.* head_norms=False: train it with head_norms",
    ):
        save(plain, mtp_kind.init(plain, jax.random.key(0)), tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def windowed(layers, *windows):
    """Layers with a window each; None: the whole row."""
    pairs = zip(layers.layers, windows, strict=True)
    changed = [
        dataclasses.replace(x, attention=dataclasses.replace(x.attention, window=w))
        for x, w in pairs
    ]
    return dataclasses.replace(layers, layers=tuple(changed))


EAGLE3 = dict(hidden_size=D, taps=(0, 2, 4), own_head=True)


@pytest.mark.parametrize("windows", [(3,), (3, None), (None, 3)])
@pytest.mark.parametrize("options", [EAGLE3, dict(hidden_size=D)], ids=["EAGLE-3", "EAGLE-1"])
def test_windows_without_head_norms_are_those_of_a_llama(windows, options, target):
    """Speculators knows the layers of Llama and Qwen 3 alone; it reads windows from the list of
    layers.
    """
    layer = windowed(nets.replace(target.config, layers=len(windows)), *windows)
    config = EagleConfig(layer, **options)
    table = config_json(config, target)
    layers = table.get("transformer_layer_config", table)
    assert (layers["model_type"], layers["sliding_window"], layers["use_sliding_window"]) == (
        "llama",
        3,
        True,
    )
    assert layers["layer_types"] == [
        "full_attention" if w is None else "sliding_attention" for w in windows
    ]
    # A layer's own tensors do not say of its window.
    again = formats.layer_of(table, {}, windows=True)
    assert [x.attention.window for x in again.layers] == [*windows]


@pytest.mark.parametrize(
    "change", [{}, {"markov_rank": 5, "from_anchor": True}, {"causal_full": True}, {"group": 4}]
)
def test_block_drafters_without_head_norms_are_refused(change, target):
    """In z-lab's format (`causal_full`), too: others would load them with norms that nobody
    trained.
    """
    kind = DFlash2Config if "group" in change else BlockConfig
    options = dict(
        layer=nets.replace(target.config, layers=2),
        hidden_size=D,
        taps=(0, 2),
        block=4,
        mask_token=12,
    )
    config = kind(**options | ({"candidates": 4} if "group" in change else {}) | change)
    with pytest.raises(
        CheckpointError,
        match=r"only block drafters with Qwen 3's .*False: train it with head_norms",
    ):
        config_json(config, target)
    normed = dataclasses.replace(config, layer=nets.replace(config.layer, head_norms=True))
    layers = config_json(normed, target)
    assert layers.get("transformer_layer_config", layers)["model_type"] == "qwen3"


def test_layers_that_readers_do_not_know_are_refused(target):
    one = nets.replace(target.config, layers=1)
    with pytest.raises(
        CheckpointError, match="are those of qwen2: the format has those of llama, qwen3"
    ):
        config_json(EagleConfig(nets.replace(one, qkv_bias=True), **EAGLE3), target)
    with pytest.raises(CheckpointError, match=r"windows of \[2, 3\]: the format stores one width"):
        config_json(EagleConfig(windowed(nets.replace(one, layers=2), 2, 3), **EAGLE3), target)


@pytest.mark.slow
def test_heads_are_written_as_vllm_has_medusas_and_eagle_as_its_authors(
    target, folder, tmp_path, published
):
    """Files have vLLM's or the authors' tensors, and ours for what those lack: all is read
    again.
    """
    blockwise = HeadsConfig(V, D, heads=2, block="feed_forward", ff_dim=6, own_head=False)
    hydra = HeadsConfig(V, D, heads=2, blocks=2, reads_tokens=True, draft_vocab=5)
    of_target = (
        HeadsConfig(V, D, heads=2, own_head=False),
        HeadsConfig(V, D, heads=2, own_head=False, reads_tokens=True),
    )
    heads = [
        (c, medusa_kind.init(c, jax.random.key(i)))
        for i, c in enumerate((blockwise, hydra, *of_target))
    ]
    for name in ("EAGLE", "Medusa", "Medusa, vLLM's"):
        heads.append(read_head(published[name].write(tmp_path / name, folder), target=target))
    for number, (config, params) in enumerate(heads):
        written = save(config, params, tmp_path / str(number), target=target)
        again, same = read_head(written, target=target)
        assert again == config
        jax.tree.map(np.testing.assert_array_equal, same, params)
    from safetensors.torch import load_file

    theirs, ours = (
        load_file(where / "model.safetensors") for where in (tmp_path / "Medusa, vLLM's", written)
    )
    assert {name: tuple(x.shape) for name, x in ours.items()} == {
        n: tuple(x.shape) for n, x in theirs.items()
    }
    table = json.loads((written / "config.json").read_text())
    assert {name: table[name] for name in published["Medusa, vLLM's"].table} == published[
        "Medusa, vLLM's"
    ].table


@pytest.mark.slow
def test_generate_runs_the_target_with_what_the_drafter_reads(folder, target, tmp_path, published):
    """The user's target has no taps, and needs none; the text is its own, in bfloat16, too."""
    where = published["EAGLE-3, speculators"].write(tmp_path / "it", folder)
    drafter = jaxspec.load_drafter(where, target=target)
    assert target.lm.inside.taps == () and drafter.target.lm.inside.taps == (0, 2, 4)
    prompt = Prompt(jnp.array([[3, 1, 4], [7, 0, 0]]), jnp.array([3, 1]))
    plain = jaxspec.generate(target, prompt, max_new_tokens=8)
    fast = jaxspec.generate(target, prompt, drafter=drafter, max_new_tokens=8)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    narrow = jaxspec.load(folder, dtype="bfloat16")
    kinds = {
        x.dtype.name for x in jax.tree.leaves(jaxspec.load_drafter(where, target=narrow).params)
    }
    assert kinds == {"bfloat16", "float32"}  # matrices, and scales of norms
    with pytest.raises(ValueError, match="the drafter reads the hidden states of llama"):
        jaxspec.generate(narrow, prompt, drafter=drafter)
