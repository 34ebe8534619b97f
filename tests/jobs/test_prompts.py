"""The prompts of a job, read and cut."""

import jax
import pytest
from tokenizers import processors

import jaxspec
from jaxspec.core import token_ids
from jaxspec.jobs.prompts import PromptReader, RowLimits
from jaxspec.testing import table_model, word_tokenizer
from jaxspec.weights import tokenizers

WORDS = ["<s>", "</s>", "<unk>", "<de>", *"abcdefghijkl"]
AROUND = {  # what the tokenizer puts around a text
    "nothing": "$A",
    "a BOS": "<s> $A",
    "an end": "$A </s>",
    "both": "<s> $A </s>",
    "an end and a language": "$A </s> <de>",
    "a language, a BOS and an end": "<de> <s> $A </s>",
}
TEXT = " ".join("abcdefghijkl")
TEMPLATE = "<s>{% for message in messages %} {{ message['content'] }}{% endfor %}"


def tokenizer_of(around, **options):
    words = word_tokenizer(WORDS, bos_token="<s>", **options)
    special = [(word, WORDS.index(word)) for word in WORDS[:4]]
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=special
    )
    return words


def model_of(around, encoder=False, **options):
    table = table_model(jax.random.key(0), len(WORDS), encoder=encoder)
    return table._replace(tokenizer=tokenizer_of(around, **options))


def read(model, prompt, most, too_long="truncate", prefix=None):
    return PromptReader(
        model, [prompt], RowLimits(most, None, 4, too_long), 1, {"prefix": prefix}
    ).peek(1)[0]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("most", [4, 6, 14])
def test_a_text_is_cut_as_transformers_truncates(around, encoder, most):
    """A decoder's on the left, an encoder-decoder's on the right."""
    model = model_of(AROUND[around], encoder)
    whole = model.tokenizer(TEXT)["input_ids"]
    model.tokenizer.truncation_side = "right" if encoder else "left"
    expected = model.tokenizer(TEXT, truncation=True, max_length=most)["input_ids"]
    for prompt in (TEXT, whole):  # ids that a tokenizer made keep what it put around them, too
        request = read(model, prompt, most)
        assert request.row.tokens == expected and request.truncated == len(whole) - len(expected)


def test_text_that_has_no_room_is_an_error():
    """Special tokens alone would be a prompt that says nothing."""
    model = model_of("<s> $A </s>")
    assert read(model, TEXT, 3).row.tokens == [0, WORDS.index("l"), 1]
    request = read(model, TEXT, 2)
    advice = "Shorten it, or lower max_new_tokens"
    assert (
        request.error == f"the prompt has 14 tokens: expected at most 2, with 4 new ones. {advice}"
    )
    assert not request.truncated


@pytest.mark.parametrize("around", ["$A", "<s> $A"])
def test_a_chat_keeps_the_bos_that_its_template_writes(around):
    """Whether the tokenizer would add one itself or not."""
    model = model_of(around, chat_template=TEMPLATE)
    request = read(model, [{"role": "user", "content": TEXT}], 5)
    assert (
        request.row.tokens == [0, *(WORDS.index(word) for word in "ijkl")]
        and request.truncated == 8
    )


def test_what_follows_a_prefix_is_cut_after_it():
    model = model_of("<s> $A </s>")
    prefix = jaxspec.prefix(model, "a b")
    request = read(model, TEXT, 8, prefix=prefix)
    assert request.row.tokens == [*prefix.tokens, *(WORDS.index(word) for word in "jkl"), 1]


def test_the_shipped_tokenizer_keeps_its_end():
    words = tokenizers.load(jaxspec.weights.loading.shipped()["debian-t5-large"])
    frame, text = (
        token_ids.frame_of(words),
        "translate English to German: This package contains the documentation.",
    )
    assert (frame.before, frame.after) == ([], [words.eos_token_id])
    expected = words(text, truncation=True, max_length=9)["input_ids"]
    assert frame.cut(words(text)["input_ids"], 9, keeps_end=False) == expected


def test_a_row_that_was_cut_says_so():
    model = model_of("<s> $A")
    options = dict(
        max_prompt_tokens=6, too_long="truncate", max_new_tokens=3, eos_ids=(), in_order=True
    )
    long, short = jaxspec.generate_many(model, [TEXT, "a b"], **options)
    assert (long.truncated, long.prompt_tokens, short.truncated) == (7, 6, 0)
    assert long.to_dict()["truncated"] == 7
    kept = "<s> h i j k l"
    ids = model.tokenizer(kept, add_special_tokens=False)["input_ids"]
    assert (
        long.tokens
        == jaxspec.generate(model, [ids], max_new_tokens=3, eos_ids=()).tokens[0].tolist()
    )


def test_what_a_prompt_is_instead_of_a_prompt():
    """A line is one prompt: no message speaks of its place among others, or of all of them."""
    model = model_of("$A")
    expected = "expected text, a list of token ids or a list of messages"
    wrong = {
        f"the prompt is None, of type NoneType: {expected}": None,
        f"the prompt is 3.5, of type float: {expected}": 3.5,
        "the prompt is a list of more than integers, it has 'a': expected ids of tokens": [
            "a",
            "b",
        ],
        "the prompt is a dict with 'text': expected the text itself": {"text": "a"},
        "the prompt is bytes: expected text, such as prompt.decode()": b"a",
        "the prompt has '\\ud83d' at character 0, half of a surrogate pair": "\ud83d",
    }
    reader = PromptReader(
        model, [{"prompt": value} for value in wrong.values()], RowLimits(8, None, 4, "error"), 9
    )
    for request, message in zip(reader.peek(9), wrong, strict=True):
        assert request.error is not None and request.error.startswith(message), request.error
