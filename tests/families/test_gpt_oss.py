"""A chat with a gpt-oss in harmony's form: channels, and which of its marks end a text."""

import json

import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.testing import word_tokenizer

RETURN, ENDOFTEXT, CALL, END = (f"<|{mark}|>" for mark in ("return", "endoftext", "call", "end"))
MARKS = [RETURN, ENDOFTEXT, CALL, END, "<|start|>", "<|message|>", "<|channel|>"]
WORDS = ["<unk>", *MARKS, "user", "assistant", "analysis", "commentary", "final"]
WORDS += ["one", "two", "three", "four", "five", "six", "seven", "eight"]
TEMPLATE = (
    "{% for m in messages %}<|start|> {{ m['role'] }} <|message|> {{ m['content'] }} <|end|> {% "
    "endfor %}<|start|> assistant"
)
# what a user says, and the whole answer: a thought and the answer proper, a call of a tool, a cut
# text
TURNS = {
    "one two": f"<|channel|> analysis <|message|> three four {END} <|start|> assistant "
    f"<|channel|> final <|message|> five {RETURN}",
    "six": f"<|channel|> commentary <|message|> seven {CALL}",
    "two one": f"<|channel|> final <|message|> eight {ENDOFTEXT}",
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
}
SIZES |= {
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
}


def conversations(tokenizer):
    """Yields the ids of each turn's conversation, and of its answer."""
    messages = []
    for content, answer in TURNS.items():
        messages.append({"role": "user", "content": content})
        yield (
            tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"],
            tokenizer(answer),
        )
        messages.append(
            {"role": "assistant", "content": tokenizer.decode(tokenizer(answer)["input_ids"], True)}
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A gpt-oss of random weights whose head is fitted to what its last layer has before each token
    of the answers.
    """
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("gpt_oss")
    tokenizer = word_tokenizer(
        WORDS, end=RETURN, pad_token=ENDOFTEXT, extra_special_tokens=MARKS[2:]
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(1)
    config = transformers.GptOssConfig(
        **SIZES, vocab_size=len(WORDS) + 3, eos_token_id=WORDS.index(RETURN)
    )
    peer = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    before, after = [], []
    with torch.no_grad():
        for x in peer.parameters():
            x.normal_(0, 0.4)
        for prompt, answer in conversations(tokenizer):
            ids = [*prompt, *answer["input_ids"]]
            before.append(
                peer.model(torch.tensor([ids])).last_hidden_state[0, len(prompt) - 1 : -1]
            )
            after += answer["input_ids"]
        scores = 8 * np.eye(config.vocab_size)[after]
        fitted = np.linalg.lstsq(torch.cat(before).double().numpy(), scores, rcond=None)[0].T
        peer.lm_head.weight.copy_(torch.tensor(fitted))
    peer.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ends = [WORDS.index(mark) for mark in (RETURN, ENDOFTEXT, CALL)]  # in the published order
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ends, "pad_token_id": ends[1]})
    )
    return folder


@pytest.mark.needs_torch
@pytest.mark.slow
def test_a_chat_goes_on_after_a_channel_and_ends_with_a_return_a_call_or_the_end_of_the_text(
    folder,
):
    target = jaxspec.load(folder)
    assert {WORDS[i] for i in target.config.end_tokens} == {RETURN, CALL, ENDOFTEXT}
    talk = jaxspec.chat(target, drafter=drafters.prompt_lookup(), gamma=3, max_new_tokens=32)
    texts = []
    for (prompt, answer), content in zip(conversations(target.tokenizer), TURNS, strict=True):
        pieces = list(talk.send(content))
        assert [token for piece in pieces for token in piece.tokens] == answer["input_ids"]
        assert talk.prompt_tokens == len(prompt)
        texts.append(talk.messages[-1]["content"].split())
    # Both channels are in the text, without their marks.
    assert texts[0] == ["analysis", "three", "four", "assistant", "final", "five"]
    assert texts[1:] == [["commentary", "seven"], ["final", "eight"]]
