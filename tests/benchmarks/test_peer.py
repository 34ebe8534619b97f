"""transformers as a backend, on tiny random models: its texts, its passes, and what it refuses."""

import sys

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from benchmarks import jobs, peer
from jaxspec import drafters, rules
from jaxspec.analysis.bench import Config, run
from jaxspec.analysis.result import Setting, Task, product
from jaxspec.decode.request import prepare
from jaxspec.drafters.uniform import uniform
from jaxspec.nets import decoder, t5
from jaxspec.vocab import trim
from tests.small import tiny_gpt, tiny_llama, tiny_t5

PROMPT = jaxspec.Prompt(jnp.array([[5, 17, 33, 2], [9, 5, 0, 0]]), jnp.array([4, 2]))
TASK = Task("ids", PROMPT, new_tokens=9, ends=False)
DEEPER = tiny_t5(64, layers=2)  # than its encoder
SHALLOW = tiny_t5(64)
GPTS = [tiny_gpt(64, layers=n) for n in (2, 1)]
LLAMAS = [tiny_llama(64, layers=n) for n in (2, 1)]
BOTH = [peer.GENERATE, peer.TRANSFORMERS]
NAMES = [backend.name for backend in BOTH]


def random(net, config, seed):
    params = jax.jit(net.init, static_argnums=0)(config, jax.random.key(seed))
    return jaxspec.Model(net.language_model(config), params, config=config, name=f"tiny {seed}")


@pytest.fixture
def one_thread(monkeypatch):
    import torch

    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("net", "configs"),
    [(t5, (DEEPER, SHALLOW)), (decoder, GPTS), (decoder, LLAMAS)],
    ids=["t5", "gpt", "llama"],
)
def test_both_libraries_generate_the_same(net, configs):
    target, draft = (random(net, config, i) for i, config in enumerate(configs))
    ways = {"small": draft} | (
        {"copy": drafters.prompt_lookup(peer.MATCH)} if net is not t5 else {}
    )
    rows = list(
        run(
            target,
            product(task=TASK, drafter=ways, backend=BOTH),
            config=Config(num_prompts=2, repeats=1),
        )
    )
    assert [row.setting.backend for row in rows] == NAMES * (1 + len(ways))
    assert all(row.same_text == row.texts == 2 and row.tokens == 18 for row in rows)
    passes = {(row.setting.drafter, row.setting.backend): row.passes for row in rows}
    assert passes["", NAMES[0]] == passes["", NAMES[1]] == 2 * 9
    for way in ways:  # prefill and the first round are one pass of theirs
        assert abs(passes[way, NAMES[0]] - passes[way, NAMES[1]]) <= 2 * 2
    assert [line.partition(":")[0] for line in peer.speeds(rows)] == [
        f"{TASK.name}, batch 1, {name}" for name in ("plain", *ways)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("net", "config"), [(t5, DEEPER), (decoder, GPTS[0])], ids=["t5", "gpt"])
def test_batches_with_limits_of_several_lengths_are_decoded_alike(net, config, tmp_path):
    """Each batch until its longest row is done, in both libraries; slots are left by rows that are
    done.
    """
    prepared = prepare(
        random(net, config, 0),
        [[5, 17, 33], [9], [4, 4], [7, 6], [8]],
        max_new_tokens=[3, 9, 5, 2, 7],
        eos_ids=(),
    )
    ours, theirs = jobs.fixed(prepared, 2), jobs.transformers(prepared, 2, tmp_path)
    assert ours == theirs and (ours.used, ours.idle) == (21, 2 * (8 + 4 + 6) - 21)
    assert jobs.refilled(prepared, 2, most=9, longest=3).rows == ours.rows


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_trimmed_draft_drafts_with_its_whole_head_there(tmp_path):
    import torch

    draft = random(t5, SHALLOW, 1)
    trimmed = trim.trim_vocabulary(draft, size=8)
    module = peer.exported(trimmed, tmp_path)
    inputs = peer.inputs(PROMPT, left=False)
    with torch.no_grad():
        theirs = module(**inputs, decoder_input_ids=torch.zeros((2, 1), dtype=torch.long)).logits[
            :, -1
        ]
    assert theirs.shape == (2, 64)
    settings = product(task=TASK, drafter={"trimmed": trimmed, "whole": draft}, backend=BOTH)
    (said,) = peer.whole_heads(settings)
    assert said == "trimmed: transformers drafts with the whole head, jaxspec with the trimmed one."


@pytest.mark.needs_torch
def test_padding_is_on_the_side_that_a_model_wants():
    left, right = (peer.inputs(PROMPT, left=side) for side in (True, False))
    assert left["input_ids"].tolist() == [[5, 17, 33, 2], [0, 0, 9, 5]]
    assert left["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert right["input_ids"].tolist()[1] == [9, 5, 0, 0] and right["attention_mask"].tolist()[
        1
    ] == [1, 1, 0, 0]


def test_without_pytorch_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="need PyTorch: pip install torch"):
        peer.check()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(batch=2), "one prompt at a time"),
        (dict(sampling={"temperature": 1.0}), "expected temperature 0"),
        (dict(rule=rules.block()), "the rejection rule"),
        (dict(policy="adaptive"), "no policy"),
        (dict(drafter=uniform()), "a model or prompt_lookup"),
        (dict(drafter="half"), "expected a network of jaxspec.nets in float32"),
    ],
)
def test_what_cannot_be_compared(changed, message):
    target, draft = random(decoder, GPTS[0], 0), random(decoder, GPTS[1], 1)
    half = draft._replace(config=tiny_gpt(64, dtype="bfloat16"))
    setting = Setting(TASK, draft, 2)._replace(
        **changed | ({"drafter": half} if "half" in changed.values() else {})
    )
    prepared = prepare(target, PROMPT, key=jax.random.key(0), max_new_tokens=9, **setting.sampling)
    with pytest.raises(ValueError, match=message):
        peer.refuse(setting, prepared)
