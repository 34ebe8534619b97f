"""The comparison with transformers, on tiny random models: its texts, its counts, what it reports and refuses."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest
import typer
from typer.testing import CliRunner

import jaxspec
from jaxspec.analysis import peer, peer_tables, peer_transformers
from jaxspec.analysis.measure.synthetic import widen
from jaxspec.nets import gpt, t5
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config

PROMPT = jaxspec.Prompt(jnp.array([[5, 17, 33, 2], [9, 5, 0, 0], [7, 7, 7, 0]]), jnp.array([4, 2, 3]))
DEEPER = T5Config(64, 16, 16, 2, 8, encoder_layers=1, decoder_layers=2)  # than its encoder
SHALLOW = T5Config(64, 16, 16, 2, 8, encoder_layers=1, decoder_layers=1)
GPTS = [GPTConfig(64, dim=16, ff_dim=16, layers=n, heads=2, max_positions=64) for n in (2, 1)]


def random(net, config, seed):
    return jaxspec.Model(
        net.language_model(config),
        jax.jit(net.init, static_argnums=0)(config, jax.random.key(seed)),
        config=config,
        name="tiny",
    )


@pytest.fixture
def measured(request):
    pytest.importorskip("torch")
    import torch

    threads = torch.get_num_threads()
    net, (target, draft) = request.param
    settings = peer.Settings(gammas=(3,), batches=(1, 2), new_tokens=9, repeats=2, threads=1)
    yield peer.compare(random(net, target, 0), widen(random(net, draft, 1), 24), PROMPT, settings)
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("measured", [(t5, (DEEPER, SHALLOW)), (gpt, GPTS)], indirect=True, ids=["t5", "gpt"])
def test_both_libraries_generate_the_same(measured):
    assert json.loads(json.dumps(measured))["environment"].keys() >= {"torch", "transformers", "torch_threads", "load"}
    assert peer_tables.disagreements(measured) == []
    one, two = measured["batches"]
    assert (one["prompts"], two["prompts"]) == (3, 2)
    passes = {(w["library"], w["how"]): w["target_passes"] for w in one["variants"]}
    assert passes["jaxspec", "plain"] == passes["transformers", "plain"] == 3 * 9
    for how in {how for _, how in passes} - {"plain"}:  # prefill and the first round are one pass of theirs
        assert abs(passes["jaxspec", how] - passes["transformers", how]) <= 3 * 2
    assert {w["how"] for w in two["variants"] if w["library"] == "transformers"} == {"plain"}
    over = {tuple(r["of"]): [tuple(o["over"]) for o in two["ratios"] if o["of"] == r["of"]] for r in two["ratios"]}
    assert over["jaxspec", "speculative", 3] == [("jaxspec", "plain", 0), ("transformers", "plain", 0)]
    assert all(r["min"] <= r["median"] <= r["max"] for r in one["ratios"])
    speeds, ratios = peer_tables.tables(measured)
    assert speeds.row_count == len(one["variants"]) + len(two["variants"])
    assert ratios.row_count == len(one["ratios"]) + len(two["ratios"])


def test_padding_is_on_the_side_that_a_model_wants():
    pytest.importorskip("torch")
    left, right = (peer_transformers.inputs(PROMPT, left=side) for side in (True, False))
    assert left["input_ids"].tolist() == [[5, 17, 33, 2], [0, 0, 9, 5], [0, 7, 7, 7]]
    assert left["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]]
    assert right["input_ids"].tolist()[1] == [9, 5, 0, 0] and right["attention_mask"].tolist()[1] == [1, 1, 0, 0]


def test_without_pytorch_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    model = random(gpt, GPTS[1], 0)
    with pytest.raises(ImportError, match="need PyTorch: pip install torch"):
        peer.compare(model, model, PROMPT, peer.Settings())


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({}, peer.Settings(batches=(4,)), "got 3 prompts for a batch of 4"),
        ({}, peer.Settings(ends=True), "the target has no tokenizer"),
        ({"dtype": "bfloat16"}, peer.Settings(), "expected a T5 or a GPT in float32"),
    ],
)
def test_what_cannot_be_compared(changed, settings, message, monkeypatch):
    monkeypatch.setattr(peer_transformers, "check", lambda: None)
    config = GPTConfig(64, dim=16, ff_dim=16, layers=1, heads=2, max_positions=64, **changed)
    model = jaxspec.Model(gpt.language_model(config), {}, config=config)
    with pytest.raises(ValueError, match=message):
        peer._check(model, model, PROMPT, settings)


def test_differences_and_a_busy_machine_are_reported():
    variant = {"library": "jaxspec", "how": "speculative", "gamma": 4, "same_text": 7}
    found = {"environment": {"load": 3.1, "cpus": 2}, "batches": [{"batch": 1, "prompts": 8, "variants": [variant]}]}
    (line,) = peer_tables.disagreements(found)
    assert line.startswith("batch 1, jaxspec speculative, γ = 4: 7 of 8 texts")
    assert "the load was 3.1 on 2 CPUs" in (peer_tables.busy(found) or "")
    assert peer_tables.busy({"environment": {"load": None, "cpus": 2}}) is None


def test_the_table_shows_the_passes_of_both_libraries_and_the_headline_their_versions():
    variant = dict(how="speculative", gamma=4, same_text=8, tokens_per_second=dict(median=9.0, min=8.0, max=9.5))
    variants = [
        variant | {"library": peer.OURS, "target_passes": 211},
        variant | {"library": peer.THEIRS, "target_passes": 223},
    ]
    about = dict(
        jaxspec="0.1", jax="0.10", transformers="5.23.1", torch="2.9.0+cpu", cpu="Z80", cpus=2, torch_threads=2
    )
    size = {"name": "tiny", "parameters": 2_900_000}
    found = {"environment": about | {"load": 0.1}, "target": size, "draft": size, "new_tokens": 64}
    found["batches"] = [{"batch": 1, "prompts": 8, "variants": variants, "ratios": []}]
    speeds, _ = peer_tables.tables(found)
    names, passes = (list(speeds.columns[i].cells) for i in (1, 4))
    assert dict(zip(names, passes, strict=True)) == {
        "jaxspec speculative, γ = 4": "211",
        "transformers speculative, γ = 4": "223",
    }
    assert speeds.columns[4].header == "target\npasses"
    assert "transformers 5.23.1, torch 2.9.0+cpu" in peer_tables.headline(found)


def test_both_models_of_a_pair_can_be_widened(monkeypatch):
    asked = []

    def compare(target, draft, prompt, settings):
        asked.extend([target, draft])
        return {"environment": {"load": None, "cpus": 2}, "target": {}, "draft": {}, "batches": []}

    pair = {"big": random(gpt, GPTS[0], 0), "small": random(gpt, GPTS[1], 1)}
    monkeypatch.setattr(peer_transformers, "check", lambda: None)
    monkeypatch.setattr(jaxspec, "load", pair.get)
    monkeypatch.setattr(peer.request, "encode", lambda target, texts: PROMPT)
    monkeypatch.setattr(peer, "compare", compare)
    app = typer.Typer()
    app.command()(peer.main)
    options = ["--target", "big", "--draft", "small", "--widen", "48", "--widen-draft", "24", "--json"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert [json.loads(result.stdout)[side]["widened_to"] for side in ("target", "draft")] == [48, 24]
    assert [model.config.ff_dim for model in asked] == [48, 24]
