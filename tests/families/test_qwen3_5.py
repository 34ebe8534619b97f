"""Qwen 3.5 is transformers': log probabilities, greedy text, files; and drafted text is plain
text.
"""

import dataclasses
import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import Model, drafters, nets, rules, sharding
from jaxspec.core import Prompt, Room
from jaxspec.nets import decoder
from jaxspec.nets.delta import DeltaShape
from jaxspec.testing import certify
from jaxspec.weights import hf_families, parameters
from jaxspec.weights.hf_families import qwen3_5
from tests.marks import marked
from tests.small import random_params

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "head_dim": 16,
}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SIZES |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "tie_word_embeddings": True}
SIZES |= {"bos_token_id": None, "eos_token_id": None}
LENGTHS, CONTINUED = [64, 128, 3, 150], (4, 1, 1, 20, 3)  # prompts of whole chunks, and of others
TABLE = {"model_type": "qwen3_5_text", **SIZES}
SMALL = TABLE | {
    "vocab_size": 4,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "head_dim": 8,
}
SMALL |= {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
SMALL |= {"linear_key_head_dim": 3, "linear_value_head_dim": 2, "full_attention_interval": 2}


def options(seed):
    """Options of a random configuration; that of seed 0 is SIZES."""
    if seed == 0:
        return SIZES
    draw = random.Random(seed)
    keys, layers = draw.choice([1, 2]), draw.choice([2, 4, 5])
    kinds = [draw.choice(list(qwen3_5.KINDS)) for _ in range(layers - 1)]
    return SIZES | {
        **{"vocab_size": draw.choice([96, 61]), "num_hidden_layers": layers},
        **{
            "num_key_value_heads": draw.choice([1, 2, 4]),
            "linear_conv_kernel_dim": draw.choice([4, 4, 2]),
        },
        **{
            "linear_key_head_dim": draw.choice([8, 12]),
            "linear_value_head_dim": draw.choice([12, 8]),
        },
        **{"linear_num_key_heads": keys, "linear_num_value_heads": keys * draw.choice([1, 2])},
        **{"tie_word_embeddings": draw.random() < 0.5, "attention_bias": draw.random() < 0.3},
        "rms_norm_eps": draw.choice([1e-6, 1e-3]),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([1e4, 1e7])}
        | {"partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])},
        "layer_types": draw.choice([None, [*kinds, "full_attention"]]),
    }


@functools.cache
def peer(seed=0):
    """A model of transformers whose every parameter is random."""
    import torch
    import transformers

    torch.set_num_threads(1)
    kind, draw = transformers.Qwen3_5ForCausalLM, torch.Generator().manual_seed(seed)
    model = kind._from_config(
        kind.config_class(**options(seed)), attn_implementation="eager"
    ).eval()
    for name, x in model.named_parameters():
        noise = torch.randn(x.shape, generator=draw)
        if "A_log" in name:
            noise = torch.log(0.1 + 2 * torch.rand(x.shape, generator=draw))
        elif "norm" in name:
            noise = 0.3 * noise + (1 if "linear_attn" in name else 0)
        else:
            noise = 0.2 * noise
        x.data.copy_(noise)
    return model


@functools.cache
def folder(seed, root):
    path = root / f"qwen3.5-{seed}"
    peer(seed).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("qwen3_5")


def rows_of(seed):
    return np.random.default_rng(seed).integers(0, 61, (4, 200))


def theirs(seed, rows):
    import torch

    with torch.no_grad():
        logits = [peer(seed)(torch.tensor(row[None]), use_cache=False).logits[0] for row in rows]
        return torch.log_softmax(torch.stack(logits), dim=-1).numpy()


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("seed", marked(range(12), exhaustive=range(6, 12)))
def test_log_probabilities_are_those_of_transformers(seed, root, monkeypatch):
    """Ragged prompts, then passes over few and many tokens.

    Transformers has two forms, too: where they differ by more, so may we.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    model, rows, length = jaxspec.load(folder(seed, root)), rows_of(seed), np.array(LENGTHS)
    reference = theirs(seed, rows)
    monkeypatch.setattr(
        modeling, "torch_chunk_gated_delta_rule", modeling.torch_recurrent_gated_delta_rule
    )
    spread = np.abs(theirs(seed, rows) - reference).max()
    prefill, extend = jax.jit(model.lm.prefill, static_argnums=2), jax.jit(model.lm.extend)
    prompt = Prompt(jnp.asarray(rows[:, : max(LENGTHS)]), jnp.asarray(LENGTHS))
    forward, cache = prefill(model.params, prompt, Room(200, rewind=6))
    logits, places = [forward.logits], [(length - 1)[:, None]]
    for step in CONTINUED:
        place = length[:, None] + np.arange(step)
        forward, cache = extend(
            model.params, cache, jnp.asarray(np.take_along_axis(rows, place, axis=1))
        )
        logits, places, length = [*logits, forward.logits], [*places, place], length + step
    ours = jax.nn.log_softmax(jnp.concatenate(logits, axis=1))
    expected = np.take_along_axis(reference, np.concatenate(places, axis=1)[:, :, None], axis=1)
    difference = np.abs(ours - expected).max()
    print(f"log probabilities differ by {difference:.1e}, transformers' two forms by {spread:.1e}")
    assert difference < max(1e-4, 2 * spread)


DRAFTERS = {
    "itself": lambda root: jaxspec.load(folder(0, root)),
    "another": lambda root: model(5),
    "prompt_lookup": lambda root: drafters.prompt_lookup(),
    "a chain": lambda root: drafters.fallback(drafters.prompt_lookup(2, 2), model(5)),
    "a model with attention": lambda root: attention_model(),
}


def random_model(table, seed, scale=0.3):
    config = hf_families.of(table).read(table)
    params = random_params(decoder.init, config, seed, scale)
    return Model(decoder.language_model(config), params, config=config, name=f"qwen3.5-{seed}")


@functools.cache
def model(seed=0, small=False):
    return random_model(
        SMALL if small else TABLE | {"num_hidden_layers": 2, "full_attention_interval": 2}, seed
    )


def attention_model():
    sizes = {key: value for key, value in SIZES.items() if not key.startswith("linear")}
    return random_model({"model_type": "qwen3", **sizes, "num_hidden_layers": 1}, 3)


@pytest.mark.needs_torch
@pytest.mark.slow
def test_greedy_text_is_that_of_transformers_with_any_drafter(root):
    """A prompt of several chunks, one of exactly one, and short ones; drafted text is plain
    text.
    """
    import torch

    target, rows = (
        jaxspec.load(folder(0, root)),
        [rows_of(0)[i, :n].tolist() for i, n in enumerate(LENGTHS)],
    )
    with torch.no_grad():
        expected = [
            peer(0)
            .generate(torch.tensor([row]), max_new_tokens=24, do_sample=False)[0, len(row) :]
            .tolist()
            for row in rows
        ]
    limits = dict(max_new_tokens=24, eos_ids=(), gamma=3)
    assert jaxspec.generate(target, rows, **limits).tokens.tolist() == expected
    for name, make in DRAFTERS.items():
        out = jaxspec.generate(target, rows, drafter=make(root), **limits)
        assert out.tokens.tolist() == expected, name
        if name == "itself":
            assert (out.stats.accepted == out.stats.drafted).all()


@pytest.mark.slow
def test_drafted_text_is_plain_text_on_many_seeds():
    """Widths of pass differ; one form for all of them gives one text."""
    rows = [rows_of(1)[0, :40].tolist(), rows_of(1)[1, :3].tolist()]
    for seed in range(4):
        target = model(0)._replace(params=model(seed).params)
        limits = dict(max_new_tokens=24, eos_ids=())
        plain = jaxspec.generate(target, rows, **limits).tokens.tolist()
        for gamma in (1, 5):
            assert (
                jaxspec.generate(
                    target, rows, drafter=model(11), gamma=gamma, **limits
                ).tokens.tolist()
                == plain
            )


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["itself", "another", "prompt_lookup"])
def test_the_certificate(drafter):
    target = model(0, small=True)
    draft = {
        "itself": target,
        "another": model(1, small=True),
        "prompt_lookup": drafters.prompt_lookup(),
    }[drafter]
    prompt = Prompt(jnp.array([[1, 2, 1]]), jnp.array([3]))
    assert (
        certify(target, drafter=draft, rule=rules.rejection(), gamma=2, steps=3, prompt=prompt)
        < 1e-4
    )


@pytest.mark.slow
def test_prefixes_slots_and_refusals():
    rows, limits = (
        [rows_of(2)[i, :n].tolist() for i, n in enumerate((70, 20, 90))],
        dict(max_new_tokens=12, eos_ids=()),
    )
    plain = jaxspec.generate(model(), rows, **limits).tokens.tolist()
    prefix = jaxspec.prefix(model(), rows[2][:66], drafter=model(5))
    out = jaxspec.generate(
        model(), [rows[2][66:]], prefix=prefix, drafter=model(5), gamma=3, **limits
    )
    assert out.tokens.tolist() == plain[2:]
    order = [0, 1, 2, 1, 0]
    job = jaxspec.generate_many(
        model(), [rows[i] for i in order], slots=2, in_order=True, drafter=model(5), **limits
    )
    assert [list(row.tokens) for row in job] == [plain[i] for i in order]
    for refused in (
        lambda: jaxspec.generate(model(), rows, drafter=drafters.token_recycling(), **limits),
        lambda: jaxspec.beam_search(model(), rows, beams=2, max_new_tokens=4),
    ):
        with pytest.raises(ValueError, match=r"takes chains only .*recurrent layers take no trees"):
            refused()


@pytest.mark.needs_torch
def test_of_a_model_that_also_sees_the_text_is_read(root, tmp_path):
    """Tensors of the picture's half and of the module for multi-token prediction are left to
    others.
    """
    from safetensors.numpy import load_file, save_file

    text = folder(0, root)
    table, tensors = (
        json.loads((text / "config.json").read_text()),
        load_file(text / "model.safetensors"),
    )
    whole = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "vision_config": {"depth": 2},
    }
    rope = table["rope_parameters"] | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    whole |= {
        "tie_word_embeddings": True,
        "text_config": table | {"rope_parameters": rope, "dtype": "bfloat16"},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    others = {
        "model.visual.blocks.0.norm1.weight": np.ones(3, np.float32),
        "mtp.norm.weight": np.ones(32, np.float32),
    }
    save_file(tensors | others, tmp_path / "model.safetensors")
    one, other = jaxspec.load(text, dtype="float32"), jaxspec.load(tmp_path, dtype="float32")
    assert one.config == other.config
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


@pytest.mark.needs_torch
@pytest.mark.slow
# measured: 0.042, 0.090
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.06), ("int8", 0.12)])
def test_rounded_weights_are_near(dtype, most, root):
    full, rounded = (jaxspec.load(folder(0, root), dtype=x) for x in ("float32", dtype))
    prompt = Prompt(jnp.asarray(rows_of(0)[:, :70]), jnp.full((4,), 70))
    logits = [
        jax.jit(x.lm.prefill, static_argnums=2)(x.params, prompt, Room(80, 4))[0].logits
        for x in (full, rounded)
    ]
    difference = np.abs(jax.nn.log_softmax(logits[0]) - jax.nn.log_softmax(logits[1]))
    assert 0 < difference.mean() < most and difference.max() < 10 * most


def test_amounts_count_states_and_no_cache_for_linear_layers():
    config = qwen3_5.SIZES["qwen3.5-4b"]
    network = nets.net_of(config)
    grown = network.cache_bytes(config, 2000, 4) - network.cache_bytes(config, 1000, 4)
    assert grown == 1000 * 8 * 2 * 4 * 256 * 4  # of the eight layers with attention, in float32
    delta = config.layers[0].attention
    assert (
        network.cache_bytes(config, 1000, 4)
        > 24 * delta.value_heads * delta.key_dim * delta.value_dim * 4
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3.5-0.8b", 0.75),
        ("qwen3.5-2b", 1.88),
        ("qwen3.5-4b", 4.2),
        ("qwen3.5-9b", 8.95),
        ("qwen3.5-27b", 26.9),
    ],
)
def test_published_sizes_have_their_parameters(name, billions):
    config = qwen3_5.SIZES[name]
    network = nets.net_of(config)
    count = network.total(
        config, lambda small: sum(x.size for x in jax.tree.leaves(network.shapes(small)))
    )
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


def test_heads_are_split_over_devices():
    config = qwen3_5.SIZES["qwen3.5-4b"]
    axes = nets.axes_of(config)
    assert axes.parts == {"heads": 16, "kv_heads": 4, "ff": 9216, "vocab": 248_320}
    mesh = jax.sharding.AbstractMesh((1, 4), (sharding.DATA, sharding.MODEL))
    small = dataclasses.replace(config, layers=config.layers[2:4])
    specs = parameters.flat(sharding.parameters(nets.net_of(config).shapes(small), axes, mesh))
    rows, columns = (
        jax.sharding.PartitionSpec("model", None),
        jax.sharding.PartitionSpec(None, "model"),
    )
    for name in ("query", "key", "value", "gate", "decay", "beta"):
        assert specs[f"layers_0/attention/{name}/weight"].spec == rows
    assert specs["layers_0/attention/out/weight"].spec == columns
    assert specs["layers_1/attention/query/weight"].spec == rows


def test_caches_are_split_by_rows():
    """Every leaf: states, logs and lengths, beside keys and values."""
    config = model().config  # a recurrent layer, and one with attention
    cache = jax.eval_shape(lambda: decoder.empty_cache(config, 4, Room(20, rewind=3)))
    mesh = jax.sharding.AbstractMesh((2, 2), (sharding.DATA, sharding.MODEL))
    specs = [x.spec for x in jax.tree.leaves(sharding.cache(cache, nets.axes_of(config), mesh))]
    assert len(specs) == 9 and {spec[0] for spec in specs} == {"data"}
    assert cache.layers[0].state["memory"].shape[1] == 4
    by_heads = sharding.cache(cache.layers[0].state["memory"], nets.axes_of(config), mesh).spec
    assert by_heads == jax.sharding.PartitionSpec("data", "model", None, None)


ON_TWO_DEVICES = """
import jax
from jaxspec import sharding
from jaxspec.decode import loop, request
from jaxspec.nets import axes_of
from tests.families.test_qwen3_5 import model

mesh, axes = sharding.mesh("data=2"), axes_of(model().config)
params = jax.device_put(model().params, sharding.parameters(model().params, axes, mesh))
prepared = request.prepare(model()._replace(params=params), [[3, 1, 4, 1], [5, 9]], max_new_tokens=4)
cache = loop.prefill(prepared).caches.target
places = sharding.cache(cache, axes, mesh)
assert all(jax.tree.leaves(jax.tree.map(lambda x, place: x.sharding.is_equivalent_to(place, x.ndim), cache, places)))
"""


@pytest.mark.slow
def test_the_compiler_splits_caches_so():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    root = str(Path(__file__).parents[2])
    subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES],
        check=True,
        cwd=root,
        env=environment | {"PYTHONPATH": root},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False: only True is supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu' is supported"),
        (
            {"full_attention_interval": 0},
            "full_attention_interval is 0: expected a positive integer",
        ),
        (
            {"layer_types": ["mamba"] * 4},
            "layer_types has mamba: expected linear_attention and full_attention",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers, num_hidden_layers is 4"),
        ({"linear_num_value_heads": 3}, "3 value heads cannot share 2 keys: expected a divisor"),
    ],
)
def test_what_would_compute_something_else_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        hf_families.of(TABLE | changes).read(TABLE | changes)


@pytest.mark.parametrize("kind", marked(["linear_attention", "full_attention"], slow=()))
def test_layers_are_of_the_kinds_that_the_file_says(kind):
    config = hf_families.of(TABLE).read(TABLE | {"layer_types": [kind] * 3 + ["full_attention"]})
    assert isinstance(config.layers[0].attention, DeltaShape) == qwen3_5.KINDS[kind]
