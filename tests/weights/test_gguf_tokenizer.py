"""Tokenizers of GGUF files; ids and ends that are written out are those of llama.cpp for the same
vocabularies.
"""

import io
from pathlib import Path

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from transformers import AutoTokenizer

from jaxspec.weights import gguf_tokenizer
from jaxspec.weights.orbax import CheckpointError

CONTROL, USER_DEFINED = 3, 4
LETTERS = ["!", "Ġ", "a", "b", "h", "e", "l", "o", "w", "r", "d", "1", "2", "Ċ"]
BYTEWISE = {
    "model": "gpt2",
    "pre": "llama-bpe",
    "tokens": [*LETTERS, "ab", "hello", "Ġworld", "12", "<|begin|>", "<|end|>", "<user>"],
    "token_type": [1] * 18 + [CONTROL, CONTROL, USER_DEFINED],
    "merges": ["a b", "1 2"],
    "bos_token_id": 18,
}
SPELLED = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "ab", "▁a", "bc", "▁▁", "<tool>", "  "],
    "scores": [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -2.0, -3.0, -1.0, -4.0, 0.0, 0.0],
    "token_type": [2, CONTROL, CONTROL, *[1] * 8, CONTROL, USER_DEFINED],
}


def metadata(table: dict, **changes) -> dict:
    """A file's metadata; a change to None leaves the key out."""
    return {
        f"tokenizer.ggml.{key}": value
        for key, value in {**table, **changes}.items()
        if value is not None
    }


def ids(text: str, table: dict, **changes) -> list[int]:
    return gguf_tokenizer.tokenizer(Path("x.gguf"), metadata(table, **changes))(text)["input_ids"]


def ends(table: dict, **changes) -> set[int]:
    return set(gguf_tokenizer.end_ids(metadata(table, **changes)))


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        *((pre, [18, 15, 16]) for pre in ("llama-bpe", "llama3", "pixtral", "tekken")),
        *(
            (pre, [4, 5, 6, 6, 7, 1, 8, 7, 9, 6, 10])
            for pre in ("dbrx", "qwen2", "gpt-2", "smollm", "default")
        ),
    ],
)
def test_words_go_before_merges_and_bos_is_where_llama_cpp_has_it(pre, expected):
    assert ids("hello world", BYTEWISE, pre=pre) == expected
    assert (
        ids("hello world", BYTEWISE, pre=pre, add_bos_token=False) == expected[expected[0] == 18 :]
    )
    assert ids("ab", BYTEWISE, pre=pre, add_bos_token=True) == [18, 14]


def test_texts_are_cut_as_the_file_names_it():
    numbers = {
        "default": [11, 17, 11, 2],
        "gpt-2": [11, 17, 11, 2],
        "qwen2": [11, 11, 12, 11, 2],
        "smollm": [11, 11, 12, 11, 2],
    }
    for pre, expected in numbers.items():
        assert ids("1121a", BYTEWISE, pre=pre) == expected, pre
    assert ids("ab!\nab", BYTEWISE, pre="qwen2") == [14, 0, 13, 14]
    with pytest.raises(
        CheckpointError,
        match=r"x\.gguf: its tokenizer cuts text as 'new': expected one of default, gpt-2",
    ):
        ids("a", BYTEWISE, pre="new")


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-4o", ["It's", " html", "Text", " ", "123", "45", "!/\n", "x"]),
        ("hunyuan-dense", ["It", "'s", " htmlText", " ", "123", "45", "!/\n", "x"]),
        ("seed-coder", ["It", "'s", " htmlText", " ", "1", "2", "3", "4", "5", "!/", "\n", "x"]),
        ("glm4", ["It", "'s", " htmlText", " ", "123", "45", "!/\n", "x"]),
        ("stablelm2", ["It", "'s", " htmlText", " ", "1", "2", "3", "4", "5", "!/\n", "x"]),
        ("command-r", ["It", "'s", " htmlText", " ", "1", "2", "3", "4", "5", "!/", "\n", "x"]),
        ("exaone4", ["It", "'s", " htmlText", " 12345", "!/", "\n", "x"]),
    ],
)
def test_words_of_newer_models(pre, words):
    """By hand, from the expressions that llama.cpp has for each name."""
    backend = gguf_tokenizer.tokenizer(
        Path("x.gguf"), metadata(BYTEWISE, pre=pre)
    ).backend_tokenizer
    cut = backend.pre_tokenizer.pre_tokenize_str("It's htmlText 12345!/\nx")
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cut] == words


def test_a_file_that_does_not_say_how_text_is_cut_warns(caplog):
    assert ids("hello ab1234", BYTEWISE, pre=None) == ids("hello ab1234", BYTEWISE, pre="default")
    assert "x.gguf does not say how its tokenizer cuts text (tokenizer.ggml.pre)" in caplog.text
    caplog.clear()
    ids("a", SPELLED)
    assert not caplog.records


def test_ids_that_no_key_names_are_those_that_llama_cpp_assumes():
    assert ids("ab", SPELLED)[0] == 1
    assert ends(SPELLED) == {2}
    assert ids("ab", BYTEWISE, bos_token_id=None) == [11, 14]
    assert ids("ab", BYTEWISE, bos_token_id=99) == [11, 14]  # past the vocabulary
    assert ends(BYTEWISE) == {11, 19}
    # an assumed token is text like any other
    assert ids("1 ab", BYTEWISE, bos_token_id=None) == [11, 11, 1, 14]


@pytest.mark.parametrize(
    ("text", "expected", "without"),
    [
        ("ab", [1, 3, 7], [1, 7]),
        (" ab", [1, 10, 7], [1, 3, 7]),
        ("  ab", [1, 12, 3, 7], [1, 12, 7]),
        ("     ab", [1, 12, 12, 10, 7], [1, 12, 12, 3, 7]),
        ("a<tool>a", [1, 8, 11, 8], [1, 4, 11, 4]),
        ("a<tool> a", [1, 8, 11, 3, 8], [1, 4, 11, 8]),
        ("", [1], [1]),
    ],
)
def test_a_space_is_added_at_the_start_unless_the_file_says_not_to(text, expected, without):
    assert ids(text, SPELLED) == expected
    assert ids(text, SPELLED, add_space_prefix=False) == without


def test_merges_go_by_the_scores_of_what_they_make():
    assert ids("abc", SPELLED, add_space_prefix=False) == [1, 4, 9]
    better = [
        0.0 if token == "ab" else score
        for token, score in zip(SPELLED["tokens"], SPELLED["scores"], strict=True)
    ]
    assert ids("abc", SPELLED, add_space_prefix=False, scores=better) == [1, 7, 6]
    assert ids("abc", SPELLED, add_space_prefix=False, merges=["a b"]) == [1, 4, 9]


@pytest.fixture(scope="module")
def pieces() -> tuple[sentencepiece.SentencePieceProcessor, dict]:
    """A T5's sentencepiece model, and what a GGUF file of it says."""
    model = io.BytesIO()
    texts = [
        "the fine print of 1 2 3 in a half hour",
        "fine and plain A B C words",
        "what words are left",
    ] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())  # pyright: ignore[reportAttributeAccessIssue]
    table = {
        "model": "t5",
        "tokens": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "token_type": [piece.type for piece in proto.pieces],
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
        "precompiled_charsmap": list(proto.normalizer_spec.precompiled_charsmap),
    }
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), table


def test_characters_of_unigram_tokenizers_are_mapped_as_the_file_says(pieces):
    processor, table = pieces
    # as some files have them
    signed = [x - 256 if x > 127 else x for x in table["precompiled_charsmap"]]
    for text in ("ﬁne", "Ａ", "½", "  plain\twords\n", "", " ", "the　ﬁne print of ¹²³"):
        assert ids(text, table) == [*processor.encode(text), 1], text
        assert ids(text, table, precompiled_charsmap=signed) == [*processor.encode(text), 1], text
    assert 2 not in ids("ﬁne Ａ", table)
    assert 2 in ids("ﬁne Ａ", table, precompiled_charsmap=None)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "words▁▁are▁"),
        ({"add_space_prefix": True}, "▁words▁▁are▁"),
        ({"remove_extra_whitespaces": True}, "▁words▁are"),
        ({"add_space_prefix": True, "remove_extra_whitespaces": True}, "▁words▁are"),
    ],
)
def test_spaces_of_unigram_tokenizers(keys, text, pieces):
    table = {
        key: value
        for key, value in pieces[1].items()
        if key not in ("add_space_prefix", "remove_extra_whitespaces")
    }
    tokenizer = gguf_tokenizer.tokenizer(Path("x.gguf"), metadata(table, **keys))
    assert (
        "".join(tokenizer.convert_ids_to_tokens(tokenizer("words  are ")["input_ids"]))
        == f"{text}</s>"
    )
    assert (
        tokenizer("words", add_special_tokens=False)["input_ids"] + [1]
        == tokenizer("words")["input_ids"]
    )


@pytest.mark.parametrize(
    ("key", "value"), [("treat_whitespace_as_suffix", True), ("escape_whitespaces", False)]
)
def test_ways_with_spaces_that_unigram_tokenizers_here_lack_are_refused(key, value, pieces):
    assert (
        gguf_tokenizer.tokenizer(Path("x.gguf"), metadata(pieces[1], **{key: not value}))
        is not None
    )
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.{key} is {value}"):
        gguf_tokenizer.tokenizer(Path("x.gguf"), metadata(pieces[1], **{key: value}))


@pytest.mark.parametrize("kind", [1, CONTROL, USER_DEFINED])
@pytest.mark.parametrize(
    "token",
    [
        *sorted(gguf_tokenizer.END_TEXTS),
        *(x for texts in gguf_tokenizer.END_ROLES.values() for x in texts),
    ],
)
def test_tokens_whose_text_ends_a_chat_end_here_whatever_their_type(token, kind):
    table = {"tokens": ["<unk>", "<s>", "</end>", "a", token, "<|im_start|>"], "scores": [0.0] * 6}
    table |= {"model": "llama", "token_type": [2, 3, 3, 1, kind, 3]}
    assert ends(table) == {2, 4}


def test_tokens_that_keys_name_end_here():
    table = {"model": "llama", "tokens": [f"x{i}" for i in range(9)], "scores": [0.0] * 9}
    keys = {
        f"{role}_token_id": i
        for i, role in enumerate(("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
    }
    assert ends(table, **keys) == {0, 1, 2, 3, 4, 5}
    assert gguf_tokenizer.end_ids(metadata(table, eot_token_id=1, eos_token_id=7))[0] == 7
    assert ends(table, eos_token_id=99) == {2}
    tokens = ["<PAD>", *table["tokens"][1:]]
    assert ends(table, tokens=tokens) == {0, 2}
    assert ends(table, tokens=tokens, fim_pad_token_id=5) == {2, 5}  # a key goes before a text


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["<|return|>", "<|call|>", "<|end|>"], {0, 1}),
        (["<|flush|>", "<|calls|>", "<|end|>"], {0, 1}),
        (["<|return|>", "<|end|>", "x"], {0, 1}),
        (["<|tool_response>", "</s>", "x"], {0}),
    ],
)
def test_tokens_that_end_no_text_beside_certain_others(texts, expected):
    assert (
        ends({"model": "llama", "tokens": [*texts, "x9"], "scores": [0.0] * 4}, eos_token_id=0)
        == expected
    )


def test_ends_are_not_shown_and_a_file_without_a_tokenizer_has_none():
    table = BYTEWISE | {"token_type": [1] * 21}
    tokenizer = gguf_tokenizer.tokenizer(Path("x.gguf"), metadata(table))
    assert tokenizer("ab<|end|>ab")["input_ids"] == [18, 14, 19, 14]
    assert tokenizer.decode([14, 19], skip_special_tokens=True) == "ab"
    assert gguf_tokenizer.tokenizer(Path("x.gguf"), {}) is None
    assert gguf_tokenizer.end_ids({}) == ()


def test_a_saved_tokenizer_reads_as_before(pieces, tmp_path):
    tables = [
        BYTEWISE,
        BYTEWISE | {"pre": "default"},
        SPELLED,
        SPELLED | {"add_space_prefix": False},
        pieces[1],
    ]
    for number, table in enumerate(tables):
        tokenizer = gguf_tokenizer.tokenizer(Path("x.gguf"), metadata(table, add_eos_token=True))
        tokenizer.save_pretrained(tmp_path / str(number))
        again = AutoTokenizer.from_pretrained(tmp_path / str(number))
        for text in ("  ab<tool> ab<|end|> hello world", "ﬁne words", "1121"):
            assert again(text)["input_ids"] == tokenizer(text)["input_ids"], (number, text)


def test_tokenizers_that_cannot_be_made_are_refused_in_words():
    for changes, words in (
        ({"model": "rwkv"}, "is of the kind 'rwkv': expected one of llama, gpt2, t5"),
        ({"tokens": None}, "it lacks 'tokenizer.ggml.tokens'"),
        ({"merges": None}, "it lacks 'tokenizer.ggml.merges'"),
        ({"model": "llama"}, "it lacks 'tokenizer.ggml.scores'"),
    ):
        with pytest.raises(CheckpointError, match=words):
            ids("a", BYTEWISE, **changes)
