"""Streaming and stop strings: no character, word or stop string is ever cut in half."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import jaxspec
from jaxspec.core import Prompt
from jaxspec.decode import stopping
from jaxspec.nets import adapters

END, TURN, THINK = "</s>", "<|im_end|>", "<think>"  # special tokens


def fast(model, decoder, clean_up=False, **options):
    raw = Tokenizer(model)
    if decoder is not None:
        raw.decoder = decoder
    special = dict(eos_token=END, unk_token="<unk>", additional_special_tokens=[TURN, THINK])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, clean_up_tokenization_spaces=clean_up, **special, **options
    )


def byte_tokenizer(clean_up=False):
    """Every byte is a token, so that every character beyond ASCII takes several."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<unk>", END, TURN, THINK]
    forced = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": clean_up}
    tokenizer = fast(
        models.BPE({c: i for i, c in enumerate(tokens)}, []),
        decoders.ByteLevel(),
        clean_up,
        **forced,
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


TOKENIZER = byte_tokenizer()


def recite(params, cache, tokens, positions):
    ids, sharpness = params
    return sharpness * jax.nn.one_hot(ids[jnp.minimum(positions, len(ids) - 1)], SIZE), cache


SIZE = 260
RECITING = adapters.from_function(recite, SIZE, empty_cache=lambda batch, capacity: ())


def parrot(recited, sharpness: float = 9.0, tokenizer=TOKENIZER):
    """A model that, whatever its prompt, generates a text from the position at which its row
    stands; or these ids.
    """
    ids = tokenizer(recited)["input_ids"] if isinstance(recited, str) else recited
    return jaxspec.Model(RECITING, (jnp.array(ids), jnp.float32(sharpness)), tokenizer), len(ids)


START = Prompt(jnp.array([[0]]), jnp.array([1]))
TEXT = "grün ißt 日 qm.x"


@pytest.mark.parametrize("gamma", [0, 1, 2, 5])
def test_pieces_join_to_the_text_and_are_whole(gamma):
    model, count = parrot(TEXT)
    options = dict(drafter=model, gamma=gamma, max_new_tokens=count)
    pieces = list(jaxspec.stream(model, START, **options))
    assert (
        "".join(p.text for p in pieces)
        == jaxspec.generate(model, START, **options).texts[0]
        == TEXT
    )
    assert all("\ufffd" not in p.text for p in pieces)
    for piece in pieces[:-1]:
        assert piece.text == "" or piece.text[-1].isspace() or piece.text[-1] == "日"
    assert [p.done for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum(len(p.tokens) for p in pieces) == count == int(pieces[-1].stats.emitted[0])


@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("stop", [["ißt"], ["m.", "日"], ["zzz"], ["g"], "t 日"])
def test_text_ends_before_the_first_stop_string(gamma, stop):
    model, count = parrot(TEXT)
    strings = [stop] if isinstance(stop, str) else stop
    ends = [TEXT.find(s) for s in strings if s in TEXT]
    expected = TEXT[: min(ends)] if ends else TEXT
    options = dict(drafter=model, gamma=gamma, max_new_tokens=count, stop=stop)
    out = jaxspec.generate(model, START, **options)
    assert out.texts == [expected]
    assert out.stats.emitted.tolist() == out.lengths.tolist()
    # the first token is prefill's, and in no round
    assert 1 + out.trace.num_committed.sum() == out.lengths[0]
    if ends:  # the tokens end with the one that completes the stop string
        text = stopping.decode(TOKENIZER, out.tokens[0, : out.lengths[0]])
        assert any(text.endswith(s) for s in strings)
    pieces = list(jaxspec.stream(model, START, **options))
    assert "".join(p.text for p in pieces) == expected
    assert [t for p in pieces for t in p.tokens] == out.tokens[0, : out.lengths[0]].tolist()
    # counted to the stop string
    for streamed, text in zip(pieces[-1].stats, out.stats, strict=True):
        assert streamed.tolist() == text.tolist()
    assert (
        out.stats.accepted.sum()
        == np.minimum(out.trace.num_accepted, out.trace.num_committed).sum()
    )


def test_stop_is_per_row():
    model, count = parrot(TEXT)
    # the second begins in the middle
    rows = Prompt(jnp.zeros((2, 16), jnp.int32), jnp.array([1, 16]))
    out = jaxspec.generate(
        model, rows, drafter=model, gamma=3, max_new_tokens=[count, 3], stop=["ißt"]
    )
    assert out.texts == ["grün ", "qm."]
    assert out.lengths.tolist() == [10, 3]  # up to the byte that completes the stop string


def test_stream_takes_one_prompt():
    model, _ = parrot("ab")
    with pytest.raises(ValueError, match="stream takes one prompt and one sample of it, got 2"):
        jaxspec.stream(model, Prompt(jnp.array([[0], [1]]), jnp.array([1, 1])))


@pytest.mark.slow
def test_stream_equals_generate_when_sampling():
    model, _ = parrot(TEXT, sharpness=4.0)
    options = dict(
        drafter=model, gamma=3, max_new_tokens=30, temperature=1.0, key=jax.random.key(2)
    )
    pieces = [t for p in jaxspec.stream(model, START, **options) for t in p.tokens]
    assert pieces == jaxspec.generate(model, START, **options).tokens[0].tolist()
    assert len(set(pieces)) > 5


SENTENCEPIECE = [
    "<unk>",
    END,
    TURN,
    THINK,
    "▁I",
    "▁do",
    "▁n",
    "'",
    "t",
    "▁know",
    "▁it",
    "▁now",
    "▁we",
    "▁go",
    "▁",
    ".",
]
SENTENCEPIECE += [
    "▁'",
    "ve",
    "▁.",
    "n",
    "日",
    *(f"<0x{byte:02X}>" for byte in (*"日ü".encode(), 0xFF, 0x41)),
]
UNIGRAM = models.Unigram([(token, -1.0) for token in SENTENCEPIECE], unk_id=0)
# as those of T5 that transformers 4 saved
CLEANS = fast(UNIGRAM, decoders.Metaspace(), clean_up=True)


def ids_of(*tokens):
    return [SENTENCEPIECE.index(token) for token in tokens]


KNOW = ids_of("▁I", "▁do", "▁n", "'", "t", "▁know", "▁it", "▁now", "▁we", "▁go")


@pytest.mark.parametrize(
    ("stop", "expected"), [((), "I don't know it now we go"), ((" n",), "I do"), (("'t",), "I don")]
)
def test_cleaned_up_text_is_streamed_and_stopped_as_it_is_generated(stop, expected):
    """The text of "▁do ▁n" ends in " n", that of "▁do ▁n ' t" in "don't"."""
    model, count = parrot(KNOW, tokenizer=CLEANS)
    lengths = set()
    for gamma in (0, 5):
        options = dict(drafter=model, gamma=gamma, max_new_tokens=count, stop=stop)
        out = jaxspec.generate(model, START, **options)
        assert out.texts == [expected]
        assert "".join(piece.text for piece in jaxspec.stream(model, START, **options)) == expected
        lengths.add(int(out.lengths[0]))
    assert lengths == {{(): 10, (" n",): 3, ("'t",): 5}[stop]}


@pytest.mark.parametrize(
    ("stop", "expected", "length"),
    [
        (TURN, "grün ", 6 + 1),
        (f"ün {TURN}", "gr", 6 + 1),
        (f"{TURN}\n", "grün ", 6 + 2),
        (["zzz", f"n {TURN}\nj"], "grü", 6 + 3),
        (f"{THINK}k", "grün \nja ", 6 + 7),
        (f"{TURN}k", "grün \nja ko", 6 + 8),
    ],
)
def test_a_special_token_in_a_stop_string_ends_a_row(stop, expected, length):
    """It is in no text: "grün " is, then <|im_end|>, a line break, "ja ", <think>, and "ko"."""
    name = TOKENIZER.convert_tokens_to_ids
    spelled = [TOKENIZER(text)["input_ids"] for text in ("grün ", "\nja ", "ko")]
    model, count = parrot([*spelled[0], name(TURN), *spelled[1], name(THINK), *spelled[2]])
    for gamma in (0, 5):
        options = dict(drafter=model, gamma=gamma, max_new_tokens=count, stop=stop)
        out = jaxspec.generate(model, START, **options)
        assert (out.texts, out.lengths.tolist()) == ([expected], [length])
        pieces = list(jaxspec.stream(model, START, **options))
        assert "".join(piece.text for piece in pieces) == expected and pieces[-1].done


def test_the_name_of_a_special_token_may_be_spelt_by_other_tokens():
    model, count = parrot(f"ja {TURN} nein")
    assert jaxspec.generate(model, START, max_new_tokens=count, stop=TURN).texts == ["ja "]


FALLBACK = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
WORDS = [
    "<unk>",
    END,
    TURN,
    THINK,
    "I",
    "do",
    "n",
    "'t",
    "'",
    ".",
    "日",
    "##n",
    "##'t",
    "k",
    "ve",
    "?",
    " n",
    "'s",
]
SUFFIXED = [
    "<unk>",
    END,
    TURN,
    THINK,
    "do</w>",
    "n",
    "'t</w>",
    "'</w>",
    ".</w>",
    "k",
    "I</w>",
    "t</w>",
]
MAKERS = {  # how they make text of tokens
    "sentencepiece": (UNIGRAM, decoders.Metaspace()),
    "with bytes for what it lacks": (UNIGRAM, decoders.Sequence(FALLBACK)),
    "words": (models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"), None),
    "pieces": (
        models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"),
        decoders.WordPiece(),
    ),
    "ends of words": (
        models.WordLevel({word: i for i, word in enumerate(SUFFIXED)}, unk_token="<unk>"),
        decoders.BPEDecoder(suffix="</w>"),
    ),
}
TOKENIZERS = {
    "bytes": byte_tokenizer,
    **{name: functools.partial(fast, *parts) for name, parts in MAKERS.items()},
}
LETTERS = " .'ntmsverkI日ü"
STOPS = [
    (),
    ("n't",),
    (" n",),
    (TURN,),
    (f"k{TURN}",),
    (f"{TURN}t",),
    ("日",),
    ("' ",),
    (f"{TURN} do", ". "),
    ("<", "k"),
]


def read(stop, tokens, rounds):
    """Return the text shown of a row whose rounds commit so many tokens, and how many tokens it
    has.
    """
    shown, count = [""], 0
    for committed in rounds:
        end = min(count + committed, len(tokens))
        needed = stopping.tokens_needed(stop, tokens[:end], count)
        count = end if needed is None else needed
        done = needed is not None or count == len(tokens)
        shown.append((stopping.text_of if done else stopping.stable_text)(stop, tokens[:count]))
        assert shown[-1].startswith(shown[-2])
        if done:
            break
    return shown[-1], count


def test_bytes_of_a_run_that_turns_out_to_be_no_text_were_not_shown():
    """Then none of them is any text, however long ago they were a character; a special token does
    not end the run.
    """
    tokenizer = TOKENIZERS["with bytes for what it lacks"]()
    run = ids_of(*(f"<0x{byte:02X}>" for byte in "日".encode()))
    stop = stopping.stop_of(tokenizer, ())
    for between in ([], ids_of(TURN)):
        tokens = [*ids_of("▁do"), *run, *between, *ids_of("<0xFF>", "▁go")]
        assert read(stop, tokens, [1] * len(tokens)) == (
            "do\ufffd\ufffd\ufffd\ufffd go",
            len(tokens),
        )


@pytest.mark.parametrize("clean_up", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_what_is_shown_stays_and_is_the_text_whatever_the_rounds(name, clean_up, data):
    tokenizer = TOKENIZERS[name](clean_up=clean_up)
    ids = (
        [*tokenizer(LETTERS)["input_ids"], *range(256, SIZE)]
        if name == "bytes"
        else range(len(tokenizer))
    )
    tokens = data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=20))
    strings = data.draw(st.sampled_from(STOPS))
    stop = stopping.stop_of(tokenizer, strings)
    rounds = data.draw(st.lists(st.integers(1, 5), max_size=6))
    shown = read(stop, tokens, [1] * len(tokens))
    assert shown == read(stop, tokens, [*rounds, *[1] * len(tokens)])
    if not strings:
        assert shown == (tokenizer.decode(tokens, skip_special_tokens=True), len(tokens))


def test_a_tokenizer_that_changes_text_already_shown_is_named():
    class Backwards:
        added_tokens_decoder, eos_token_id = {}, None

        def __len__(self):
            return SIZE

        def get_vocab(self):
            return {f"{i} ": i for i in range(SIZE)}

        def convert_ids_to_tokens(self, token):
            return f"{token} "

        def decode(self, tokens, skip_special_tokens):
            return "".join(f"{token} " for token in reversed(tokens))

    model, _ = parrot([1, 2, 3], tokenizer=Backwards())
    pieces = jaxspec.stream(model, START, max_new_tokens=2)
    assert next(pieces).text == "1 "
    with pytest.raises(
        ValueError,
        match="'1 ' was yielded of a text that is '2 1 ': the tokenizer, of type Backwards",
    ):
        next(pieces)


def test_stop_strings_are_looked_for_in_each_rows_own_text():
    """A free row is searched as its text is shown, cleaned up; beside it a row that matches a
    pattern, as it is.
    """
    tokenizer = byte_tokenizer(clean_up=True)
    model, _ = parrot(
        [*tokenizer("go , on")["input_ids"], tokenizer.convert_tokens_to_ids(END)],
        tokenizer=tokenizer,
    )
    both = Prompt(jnp.array([[0], [0]]), jnp.array([1, 1]))
    out = jaxspec.generate(model, both, regex=[None, "go , on"], stop=["go,"], max_new_tokens=12)
    assert out.texts == ["", "go , on"] and list(out.finish) == ["stop", "eos"]
