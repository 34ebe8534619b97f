"""What a prompt may be: text, ids, chats; bad ones get a clear error."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import jaxspec
from jaxspec.analysis import acceptance
from jaxspec.core import Prompt
from jaxspec.decode import request
from jaxspec.decode.chat_templates import (
    TEMPLATE_ARGUMENTS,
    TEMPLATE_VALUES,
    check_template_values,
)
from jaxspec.decode.prompts import _in_bucket, arrays_of, encode, ids_by_name
from jaxspec.testing import table_model, word_tokenizer

WORDS = word_tokenizer(["<end>", "the", "cat", "sat", "on", "mat"], end="<end>", unknown="<end>")
TARGET, DRAFT = (
    table_model(jax.random.key(seed), 6)._replace(tokenizer=WORDS) for seed in range(2)
)
ONE = Prompt(jnp.array([[1, 2]]), jnp.array([2]))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts"),
        ("", "prompt 0 is empty"),
        (["the", " "], "prompt 1 is empty"),
        (Prompt(jnp.array([[1, 6]]), jnp.array([2])), "token id 6: expected ids from 0 to 5"),
        (Prompt(jnp.array([[1, -1]]), jnp.array([2])), "token id -1"),
        (Prompt(jnp.array([[1, 2]]), jnp.array([0])), "prompt 0 is empty"),
        (Prompt(jnp.array([[1, 2]]), jnp.array([3])), "length 3, but its row holds 2"),
        (Prompt(jnp.array([1, 2]), jnp.array([2])), r"expected \[batch, prompt\]"),
        (Prompt(jnp.array([[1.0, 2.0]]), jnp.array([2])), "dtype float32: expected integers"),
    ],
)
def test_bad_prompts_are_refused_with_what_is_wrong(prompts, message):
    with pytest.raises(ValueError, match=message):
        jaxspec.generate(TARGET, prompts)


@pytest.mark.parametrize("text", ["\n", "  ", "\u00a0", ""])
def test_the_tokens_of_a_prompt_say_whether_it_is_empty(text):
    """Not whether it is white space: this tokenizer has a token for each, and one that begins every
    text.
    """
    words = ["<end>", "\n", "  ", "\u00a0", "<begin>"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    raw.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 4)]
    )
    tokens = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", bos_token="<begin>")
    prompt = encode(TARGET._replace(tokenizer=tokens), [text])
    row = prompt.tokens[0, : prompt.length[0]].tolist()
    assert row == [4, words.index(text)] if text else row == [4]


def test_padding_is_not_checked():
    odd = Prompt(jnp.array([[1, 2, 99]]), jnp.array([2]))
    assert jaxspec.generate(TARGET, odd, max_new_tokens=4).tokens.tolist() == (
        jaxspec.generate(TARGET, ONE, max_new_tokens=4).tokens.tolist()
    )


def test_text_needs_a_tokenizer():
    bare = TARGET._replace(tokenizer=None)
    with pytest.raises(ValueError, match="has no tokenizer"):
        jaxspec.generate(bare, "the cat")
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        jaxspec.generate(bare, ONE, stop=["x"])


def test_prompts_are_read_once_by_a_generation_and_by_a_measurement(monkeypatch):
    read = []
    monkeypatch.setattr(
        request, "encode", lambda *arguments: read.append(arguments) or encode(*arguments)
    )
    options = dict(drafter=DRAFT, gamma=2, max_new_tokens=4)
    jaxspec.generate(TARGET, ["the cat"], **options)
    assert len(read) == 1
    acceptance.measure(jaxspec.prepare(TARGET, ["the cat"], **options))
    assert len(read) == 2


@pytest.mark.parametrize("encoded", [False, True])
def test_a_prepared_generation_keeps_no_memory_of_the_callers(encoded):
    """A CPU device takes over memory at some addresses; a loader of data writes to it again."""

    def aligned(values):
        memory = np.empty(4 * len(values) + 64, np.uint8)
        start = -memory.ctypes.data % 64
        array = memory[start : start + 4 * len(values)].view(np.int32)
        array[:] = values
        return array

    tokens, length = aligned([3] * 16).reshape(1, 16), aligned([16])
    own = Prompt(tokens, length, Prompt(tokens, length) if encoded else None)
    prompts = [arrays_of(own), _in_bucket(own)]
    tokens[:], length[:] = 0, 1
    for array in jax.tree.leaves(prompts):
        assert int(array.max()) in (3, 16) and int(array.min()) in (3, 16)


def test_only_values_that_a_template_may_read_reach_it():
    """`truncation` with `max_length` would cut the prompt without a word."""

    def write(conversation, tools=None, brand_new=None, **values):
        pass

    for name in (
        *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
        "messages",
        "brand_new",
    ):
        if name in TEMPLATE_VALUES or name == "kwargs":
            check_template_values({name: 1}, write)
        else:
            with pytest.raises(
                ValueError, match=f"chat_template_kwargs has '{name}', which templates do not read"
            ):
                check_template_values({name: 1}, write)
    assert set(TEMPLATE_ARGUMENTS) >= {
        "truncation",
        "max_length",
        "return_tensors",
        "tokenize",
    }


def test_a_token_may_be_named():
    assert ids_by_name(["cat", 4], WORDS) == [2, 4]
    with pytest.raises(ValueError, match="eos_ids has 'dog', which is not a token of the target's"):
        ids_by_name("dog", WORDS)
    with pytest.raises(ValueError, match="start has 'cat', and this model has no tokenizer"):
        ids_by_name("cat", None, "start")
