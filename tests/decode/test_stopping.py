"""Streaming and stop strings: no character, word or stop string is ever cut in half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import jaxspec
from jaxspec.base import Prompt
from jaxspec.decode import stopping
from jaxspec.nets import adapters


def byte_tokenizer():
    """Every byte is a token, so that every character beyond ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


TOKENIZER = byte_tokenizer()


def parrot(recited: str, sharpness: float = 9.0):
    """A model that, whatever its prompt, generates the text from the position at which its row stands."""
    ids = TOKENIZER(recited)["input_ids"]

    def recite(params, cache, tokens, positions):
        return sharpness * jax.nn.one_hot(params[jnp.minimum(positions, len(ids) - 1)], 256), cache

    lm = adapters.from_function(recite, 256, empty_cache=lambda batch, capacity: ())
    return jaxspec.Model(lm, jnp.array(ids), TOKENIZER), len(ids)


START = Prompt(jnp.array([[0]]), jnp.array([1]))
TEXT = "grün ißt 日 qm.x"


@pytest.mark.parametrize("gamma", [0, 1, 2, 5])
def test_pieces_join_to_the_text_and_are_whole(gamma):
    model, count = parrot(TEXT)
    options = dict(drafter=model, gamma=gamma, max_new_tokens=count)
    pieces = list(jaxspec.stream(model, START, **options))
    assert "".join(p.text for p in pieces) == jaxspec.generate(model, START, **options).texts[0] == TEXT
    assert all(stopping.REPLACEMENT not in p.text for p in pieces)
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
    assert 1 + out.trace.num_committed.sum() == out.lengths[0]  # the first token is prefill's, and in no round
    if ends:  # the tokens end with the one that completes the stop string
        whole = stopping.decode(TOKENIZER, out.tokens[0, : out.lengths[0]])
        assert any(whole.endswith(s) for s in strings)
    pieces = list(jaxspec.stream(model, START, **options))
    assert "".join(p.text for p in pieces) == expected
    assert [t for p in pieces for t in p.tokens] == out.tokens[0, : out.lengths[0]].tolist()
    for streamed, whole in zip(pieces[-1].stats, out.stats, strict=True):  # counted to the stop string
        assert streamed.tolist() == whole.tolist()
    assert out.stats.accepted.sum() == np.minimum(out.trace.num_accepted, out.trace.num_committed).sum()


def test_stop_is_per_row():
    model, count = parrot(TEXT)
    rows = Prompt(jnp.zeros((2, 16), jnp.int32), jnp.array([1, 16]))  # the second begins in the middle
    out = jaxspec.generate(model, rows, drafter=model, gamma=3, max_new_tokens=[count, 3], stop=["ißt"])
    assert out.texts == ["grün ", "qm."]
    assert out.lengths.tolist() == [10, 3]  # up to the byte that completes the stop string


def test_stream_takes_one_prompt():
    model, _ = parrot("ab")
    with pytest.raises(ValueError, match="stream takes one prompt and one sample of it, got 2"):
        jaxspec.stream(model, Prompt(jnp.array([[0], [1]]), jnp.array([1, 1])))


def test_stream_equals_generate_when_sampling():
    model, _ = parrot(TEXT, sharpness=4.0)
    options = dict(drafter=model, gamma=3, max_new_tokens=30, temperature=1.0, key=jax.random.key(2))
    pieces = [t for p in jaxspec.stream(model, START, **options) for t in p.tokens]
    assert pieces == jaxspec.generate(model, START, **options).tokens[0].tolist()
    assert len(set(pieces)) > 5
