"""Gemma 4's assistants: logits are those of transformers', drafted text is plain text, sampled text
is exact.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Model, Prompt
from jaxspec.draft_heads import assistant, formats
from jaxspec.draft_heads.load import read_head
from jaxspec.draft_heads.save import save
from jaxspec.drafters.hidden_states import DraftHead
from jaxspec.nets import decoder
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import certify
from jaxspec.weights.hf_families import gemma4
from jaxspec.weights.tensors import CheckpointError
from tests.families.test_gemma4 import COMMON, GLOBAL, LOCAL, TABLES, peer
from tests.marks import marked
from tests.small import random_params

PROMPT, FIRST, GAMMA = [3, 1, 4, 1, 5], 9, 3  # as in conftest.py
# longer than the window, shorter, and one token
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [59]]
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "layer_types": [LOCAL, LOCAL, GLOBAL],
}
SMALL |= {
    "num_attention_heads": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
SMALL |= {"final_logit_softcapping": None, "num_kv_shared_layers": 3}
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}
# By name: the target, what differs in the assistant's text_config, and its other keys. 60 ids are
# ordered by centroids.
GLOBALS = {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
CASES = {
    "E2B": ("E2B", {"num_key_value_heads": 1}, ORDERED),
    "31B": ("31B", GLOBALS, {}),
    "26B-A4B, one centroid": ("26B-A4B", GLOBALS, ORDERED | {"centroid_intermediate_top_k": 1}),
    "12B, unified": ("31B", GLOBALS | {"sliding_window": 4}, {}),
    "E2B, global layers alone": (
        "E2B",
        {"num_key_value_heads": 1, "layer_types": [GLOBAL] * 3},
        ORDERED,
    ),
}


def tables(name):
    """The config.json of a target, with 60 ids, and of an assistant for it."""
    of_target, text, outer = CASES[name]
    kind = "gemma4_unified_assistant" if "unified" in name else "gemma4_assistant"
    text = {**COMMON, **SMALL, "vocab_size": 60, **text}
    return TABLES[of_target] | words(of_target), {
        "model_type": kind, "text_config": text, "backbone_hidden_size": 32, **outer
    }  # fmt: skip


def words(of_target):
    """The keys of a target's config.json that have 60 ids."""
    return {"vocab_size": 60} | ({"vocab_size_per_layer_input": 60} if of_target == "E2B" else {})


@functools.cache
def gemma(name, **changes):
    """A random Gemma 4 of ours, whose norms and scalars are not one."""
    changes = {key: list(x) if isinstance(x, tuple) else x for key, x in changes.items()}
    config = gemma4.read(TABLES[name] | words(name) | changes)
    params = random_params(decoder.init, config, 1, 0.3)
    return Model(decoder.language_model(config), params, None, config, "gemma")


def bound(config, goal, seed=0):
    """A random assistant of ours, for a target, of a config.json."""
    config = assistant.read(config, {}, formats.target_shape(goal))
    params = random_params(assistant.init, config, seed + 1, 0.3)
    if "vocabulary" in params:  # tokens of centroids in a random order
        ids = np.random.default_rng(seed).permutation(params["vocabulary"].size)
        params["vocabulary"] = jnp.asarray(
            ids.reshape(params["vocabulary"].shape), params["vocabulary"].dtype
        )
    return drafters.assistant(DraftHead(assistant.head(config), params), goal)


@functools.cache
def theirs(name, root):
    """A target and an assistant of transformers with random parameters of every kind, and their
    folders.
    """
    import torch
    import transformers

    _, config = tables(name)
    folders = root / name / "target", root / name / "assistant"
    model = peer(CASES[name][0], folders[0], **words(CASES[name][0]))
    kind = "Gemma4UnifiedAssistant" if "unified" in config["model_type"] else "Gemma4Assistant"
    kind = getattr(transformers, f"{kind}ForCausalLM")
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    text = model.config.__class__(**text, pad_token_id=0, eos_token_id=None, bos_token_id=None)
    options = {
        key: value for key, value in config.items() if key not in ("model_type", "text_config")
    }
    helper = kind._from_config(
        kind.config_class(text_config=text, **options),
        attn_implementation="eager",
        dtype=torch.float32,
    ).eval()
    draw = torch.Generator().manual_seed(1)
    scalars = [(key, x) for key, x in helper.named_buffers() if "layer_scalar" in key]
    with torch.no_grad():
        for key, x in [*helper.named_parameters(), *scalars]:
            x.copy_(0.3 * torch.randn(x.shape, generator=draw) + ("norm" in key or "scalar" in key))
        if helper.masked_embedding is not None:
            helper.masked_embedding.token_ordering.copy_(torch.randperm(60, generator=draw))
    helper.save_pretrained(folders[1])
    return model, helper, *folders


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("assistants")


def their_logits(model, helper, draft, position):
    """The logits of each draft token, from transformers' keys and values of the prompt."""
    import torch

    rows, window = torch.tensor([PROMPT]), helper.config.text_config.sliding_window
    with torch.no_grad():
        out = model(rows, output_hidden_states=True, return_shared_kv_states=True)
        hidden, states = out.hidden_states[-1][:, -1:], dict(out.shared_kv_states)
        # Its own mask lets queries see two keys more than those of the target's layers: the
        # window's are given.
        states["sliding_attention"] = tuple(
            x[:, :, -(window - 1) :] for x in states["sliding_attention"]
        )
        logits = []
        for token in [FIRST, *draft[:-1]]:
            embedded = model.get_input_embeddings()(torch.tensor([[token]]))
            fed = torch.cat([embedded, hidden], dim=-1)
            step = helper(
                inputs_embeds=fed, position_ids=torch.tensor([[position]]), shared_kv_states=states
            )
            hidden = step.last_hidden_state
            logits.append(step.logits[0, 0])
    return torch.stack(logits).numpy()


@pytest.mark.needs_torch
@pytest.mark.parametrize("name", marked(CASES, slow={*CASES} - {"12B, unified"}))
def test_logits_are_those_of_transformers(name, root, draft_of):
    """Of a draft from our cache, rings included; tokens of other centroids get -inf, not the least
    logit minus 1.
    """
    model, helper, *folders = theirs(name, root)
    config, params = read_head(folders[1], target=(loaded := jaxspec.load(folders[0])))
    for back in (1, 2) if name == "31B" else (1,):
        moved = assistant.head(dataclasses.replace(config, positions_back=back))
        drafter = drafters.assistant(DraftHead(moved, params), loaded)
        tokens, log_probs = draft_of(drafter)
        reference = their_logits(model, helper, tokens, len(PROMPT) + 1 - back)
        possible = np.isfinite(log_probs)
        assert (
            possible.sum(axis=-1)
            == (config.nearest * 60 // config.centroids if config.centroids else 60)
        ).all()
        least = np.where(possible, reference, np.inf).min(axis=-1, keepdims=True)
        assert np.allclose(np.where(possible, least - 1, reference), least - 1)
        reference = np.where(possible, reference, -np.inf)
        expected = np.asarray(jax.nn.log_softmax(reference, axis=-1))
        assert np.abs(log_probs[possible] - expected[possible]).max() < 1e-4
        assert np.ptp(expected[possible]) > 1.0


@pytest.mark.needs_torch
@pytest.mark.slow
def test_a_cap_of_logits_is_applied(root, draft_of, tmp_path):
    """As servers do; transformers' assistants leave it out."""
    model, helper, *folders = theirs("31B", root)
    for file in folders[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    table = json.loads((tmp_path / "config.json").read_text())
    table["text_config"]["final_logit_softcapping"] = 3.0
    (tmp_path / "config.json").write_text(json.dumps(table))
    tokens, log_probs = draft_of(jaxspec.load_drafter(tmp_path, target=jaxspec.load(folders[0])))
    reference = 3.0 * np.tanh(their_logits(model, helper, tokens, len(PROMPT)) / 3.0)
    np.testing.assert_allclose(log_probs, jax.nn.log_softmax(reference, axis=-1), atol=1e-4)


# --- text


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", marked(CASES, exhaustive={*CASES} - {"E2B"}))
def test_drafted_text_is_plain_text(name):
    """Chains and trees for a ragged batch; in slots; from a prefix."""
    goal, limits = gemma(CASES[name][0]), dict(max_new_tokens=12, eos_ids=())
    drafter = bound(tables(name)[1], goal)
    plain = jaxspec.generate(goal, PROMPTS, **limits).tokens.tolist()
    trees = (
        drafters.tree(drafter, (2, 1)),
        drafters.dynamic_tree(drafter, nodes=4, depth=3, width=2),
    )
    for draft in (drafter, trees[0]) if name != "E2B" else (drafter, *trees):
        out = jaxspec.generate(goal, PROMPTS, drafter=draft, gamma=3, **limits)
        assert out.tokens.tolist() == plain and out.stats.drafted.sum() > 0
    if name == "E2B":
        order = [0, 1, 2, 1, 0]
        job = jaxspec.generate_many(
            goal,
            [PROMPTS[i] for i in order],
            slots=2,
            in_order=True,
            drafter=drafter,
            gamma=3,
            **limits,
        )
        assert [list(row.tokens) for row in job] == [plain[i] for i in order]
        prefix = jaxspec.prefix(goal, PROMPTS[0][:6], drafter=drafter)
        out = jaxspec.generate(
            goal, [PROMPTS[0][6:]], prefix=prefix, drafter=drafter, gamma=3, **limits
        )
        assert out.tokens.tolist() == plain[:1]


@pytest.mark.needs_torch
@pytest.mark.slow
def test_greedy_text_is_that_of_transformers_with_its_assistant(root):
    import torch

    model, helper, *folders = theirs("E2B, global layers alone", root)
    goal = jaxspec.load(folders[0])
    out = jaxspec.generate(
        goal,
        PROMPTS,
        drafter=jaxspec.load_drafter(folders[1], target=goal),
        gamma=GAMMA,
        max_new_tokens=14,
        eos_ids=(),
    )
    helper.generation_config.num_assistant_tokens = GAMMA
    for prompt, row in zip(PROMPTS, out.tokens.tolist(), strict=True):
        options = {
            "do_sample": False,
            "max_new_tokens": 14,
            "eos_token_id": None,
            "assistant_model": helper,
        }
        assert model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() == row


@pytest.mark.slow
def test_a_draft_that_the_target_would_have_written_is_accepted():
    """Layers that add nothing, in both: the logits are those of the last token, so the assistant
    has the target's.
    """
    goal = gemma("31B", num_hidden_layers=2, layer_types=(LOCAL, GLOBAL))
    silent = {
        "attention_post_norm": {"scale": jnp.zeros(32)},
        "ff_post_norm": {"scale": jnp.zeros(32)},
    }
    silent |= {"last": {"scalar": jnp.ones(1)}}
    layers = {name: goal.params[name] | silent for name in ("layers_0", "layers_1")}
    goal = goal._replace(params=goal.params | layers)
    config = assistant.AssistantConfig(goal.config, 32, (0, 1))
    params = assistant.init(config, jax.random.key(0))
    params = {name: params[name] | silent for name in layers} | {
        name: goal.params[name] for name in ("embedding", "norm")
    }
    params["joined"] = {"weight": jnp.concatenate([jnp.eye(32), jnp.zeros((32, 32))], axis=1)}
    params["fed_on"] = {"weight": jnp.eye(32)}
    drafter = drafters.assistant(DraftHead(assistant.head(config), params), goal)
    options = dict(max_new_tokens=9, temperature=1.0, key=jax.random.key(2), eos_ids=())
    out = jaxspec.generate(goal, PROMPTS[:2], drafter=drafter, gamma=3, **options)
    assert (np.asarray(out.stats.accepted) == np.asarray(out.stats.drafted)).all()
    assert (np.asarray(out.stats.rounds) == 2).all()


# --- sampled

TINY = (
    COMMON
    | SMALL
    | {"vocab_size": 4, "hidden_size": 8, "intermediate_size": 8, "num_key_value_heads": 1}
)
TINY |= {"sliding_window": 2, "head_dim": 4, "global_head_dim": 8}


def tiny(ordered=True):
    """A target with four tokens, and an assistant that gives two of them, or all, a logit."""
    config = gemma4.read(TINY | {"num_kv_shared_layers": 0})
    params = random_params(decoder.init, config, 1, 0.3)
    goal = Model(decoder.language_model(config), params, None, config, "tiny")
    table = {
        "model_type": "gemma4_assistant",
        "text_config": TINY,
        "backbone_hidden_size": 8,
        "num_centroids": 2,
    }
    return bound(
        table | {"use_ordered_embeddings": ordered, "centroid_intermediate_top_k": 1}, goal, seed=3
    )


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["ordered", "all", "a tree"])
def test_the_distribution_of_the_text_is_the_targets(draft):
    drafter = tiny(draft != "all")
    options = dict(
        steps=3,
        sampler=at_temperature(4, True),
        prompt=Prompt(jnp.array([[1, 0, 2]]), jnp.array([3])),
    )
    if draft == "a tree":
        drafter = drafters.tree(drafter, shape=[(0,), (1,), (0, 0)], draw="without_replacement")
    else:
        options["gamma"] = 2
    for temperature in (1.0, 0.0):
        params = SamplingParams(jnp.full(1, temperature), jnp.array([4]), jnp.ones(1))
        assert certify(drafter.target, drafter=drafter, sampling_params=params, **options) < 1e-5


@pytest.mark.needs_torch
def test_transformers_samples_another_distribution(root):
    """It accepts the argmax as if it were a sample of what it returns; samples of that are accepted
    rightly.

    These are its own generator of candidates and its own rule, at temperature 4.
    """
    import torch
    from transformers.generation.candidate_generator import (
        SinglePositionMultiTokenCandidateGenerator as Candidates,
    )
    from transformers.generation.utils import _speculative_sampling

    model, helper, *_ = theirs("E2B", root)
    helper.generation_config.num_assistant_tokens, runs, temperature = 1, 4000, 4.0
    config = model.generation_config.__class__(max_length=40)
    generator, row = (
        Candidates(helper, model.get_input_embeddings(), config),
        torch.tensor([[*PROMPT, FIRST]]),
    )
    with torch.no_grad():
        out = model(row[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
        ids, q = generator.get_candidates(row, {}, out, is_first_iteration=False, n_last_matches=0)
        p = model(ids, use_cache=False).logits[:, -2:] / temperature
    q, torch_random = q / temperature, torch.manual_seed(0)
    expected, off = p[0, 0].softmax(-1).numpy(), {}
    for name in ("their argmax", "a sample"):
        counts = np.zeros(60)
        for _ in range(runs):
            token = (
                ids[0, -1:]
                if name == "their argmax"
                else q[0, 0].softmax(-1).multinomial(1, generator=torch_random)
            )
            valid, _ = _speculative_sampling(torch.cat([row, token[None]], dim=1), q, 1, p)
            counts[int(valid[0, 0])] += 1
        off[name] = np.abs(counts / runs - expected).sum() / 2
    assert off["their argmax"] > 0.1 > 0.06 > off["a sample"], off


# --- files


@pytest.mark.needs_torch
@pytest.mark.parametrize("name", marked(CASES, slow={*CASES} - {"12B, unified"}))
def test_what_is_written_is_read_again(name, root, tmp_path):
    """By us, and by transformers: the same tensors bit for bit."""
    import transformers

    _, helper, *folders = theirs(name, root)
    goal = jaxspec.load(folders[0])
    config, params = read_head(folders[1], target=goal)
    for back in (1, 2):
        changed = dataclasses.replace(config, positions_back=back)
        written = save(changed, params, tmp_path / str(back), target=goal)
        again, same = read_head(written, target=goal)
        assert again == changed
        jax.tree.map(np.testing.assert_array_equal, same, params)
    read = transformers.Gemma4AssistantForCausalLM.from_pretrained(written).state_dict()
    for key, x in helper.state_dict().items():
        np.testing.assert_array_equal(read[key].numpy(), x.numpy(), err_msg=key)


def test_layers_of_another_kind_are_not_written_as_gemmas(tmp_path):
    narrow = decoder.decoder_config(60, dim=8, ff_dim=16, layers=1, heads=2, kv_heads=1, head_dim=8)
    config = assistant.AssistantConfig(
        dataclasses.replace(narrow, tied_head=True), hidden_size=32, sources=(2,)
    )
    with pytest.raises(CheckpointError, match="stores layers of Gemma 4 only"):
        save(
            config, assistant.init(config, jax.random.key(0)), tmp_path / "it", target=gemma("E2B")
        )


@pytest.mark.needs_torch
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 48}, "width of hidden states is 48, and the target's 32"),
        ({"vocab_size": 48}, "vocabulary size is 48, and the target's 60"),
        ({"head_dim": 4}, "head size is 4, and the target's 8"),
        ({"num_key_value_heads": 2}, "key-value heads is 2, and the target's 1"),
        (
            {"num_kv_shared_layers": 1},
            "num_kv_shared_layers is 1, of 3 layers: expected all of them",
        ),
        (
            {"hidden_size_per_layer_input": 8},
            "hidden_size_per_layer_input is 8: only 0 is supported",
        ),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False: only True is supported"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp is True: only False is supported"),
        ({"num_centroids": 7}, "7 centroids order 60 tokens, and 3 are nearest: expected as many"),
        ({"centroid_intermediate_top_k": 13}, "12 centroids order 60 tokens, and 13 are nearest"),
        ({"centroid_intermediate_top_k": -1}, "nearest is -1: expected"),
    ],
)
def test_assistants_that_do_not_fit(changes, message):
    """They are refused before weights are read."""
    _, config = tables("E2B")
    outer = {key: x for key, x in changes.items() if key in config or key in ORDERED}
    config |= outer | {
        "text_config": config["text_config"]
        | {key: x for key, x in changes.items() if key not in outer}
    }
    with pytest.raises(ValueError, match=message):
        assistant.read(config, {}, formats.target_shape(gemma("E2B")))


@pytest.mark.needs_torch
def test_targets_that_have_no_such_keys():
    _, config = tables("E2B")
    llama = decoder.decoder_config(60, 32, 24, 2, 4, 1, 16)
    goal = Model(decoder.language_model(llama), {}, None, llama, "llama")
    with pytest.raises(
        ValueError, match="keys of sliding_attention, and the target has no such layer"
    ):
        assistant.read(config, {}, formats.target_shape(goal))
    config = assistant.read(config, {}, formats.target_shape(gemma("E2B")))
    with pytest.raises(
        ValueError, match="an assistant reads the keys of layer 3, and llama has none to read"
    ):
        drafters.assistant(DraftHead(assistant.head(config), {}), goal)


@pytest.mark.parametrize(
    ("heads", "size", "expected"), [(2, 16, "2 key-value heads of size 16"), (1, 8, "1 .* size 8")]
)
def test_an_assistant_made_by_hand_has_the_key_sizes_of_its_target(heads, size, expected):
    """Its configuration names the target's layers without the target's sizes: they are compared
    when both meet.
    """
    shape = decoder.decoder_config(60, 32, 24, layers=2, heads=4, kv_heads=1, head_dim=16)
    goal = Model(
        decoder.language_model(shape), decoder.init(shape, jax.random.key(0)), None, shape, "llama"
    )
    narrow = decoder.decoder_config(60, 16, 24, layers=1, heads=2, kv_heads=heads, head_dim=size)
    config = assistant.AssistantConfig(dataclasses.replace(narrow, tied_head=True), 32, (1,))
    drafter = drafters.assistant(
        DraftHead(assistant.head(config), assistant.init(config, jax.random.key(1))), goal
    )
    message = (
        f"layer 0 of the assistant reads {expected}, and layer 1 of the target has 1 of size 16: "
        "expected"
    )
    with pytest.raises(ValueError, match=message):
        jaxspec.generate(goal, [[1, 2]], drafter=drafter, gamma=2, max_new_tokens=4)
