"""Scores of given text are those of teacher forcing: transformers', those of `generate`, and those
of any batch.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

import jaxspec
from jaxspec.core import Limits
from jaxspec.decode import scoring
from jaxspec.nets import decoder
from jaxspec.testing import table_model, table_model_from, word_tokenizer
from tests.conftest import word_model
from tests.small import tiny_gpt, tiny_llama

VOCAB = 7
TABLE = table_model(jax.random.key(1), VOCAB, sharpness=2.0)
ROWS = [[3, 1, 4, 1, 5], [2, 6], [0, 0, 3], [5] * 20, [1, 2]]


def by_table(row):
    """The log probability of each token of a row but its first, read off the table."""
    logits = np.asarray(jax.nn.log_softmax(TABLE.params, axis=-1), np.float64)
    padded = [0, *row]
    return [logits[padded[i - 1], padded[i], padded[i + 1]] for i in range(1, len(row))]


def test_whole_texts_are_scored_from_their_second_token_on():
    scores = jaxspec.score(TABLE, ROWS, batch_size=2)
    for row, score in zip(ROWS, scores, strict=True):
        np.testing.assert_allclose(score.log_probs, by_table(row), atol=1e-5)
        assert score.tokens == row[1:] and score.num_bytes is None and score.bits_per_byte is None
        assert math.isclose(score.log_prob, sum(by_table(row)), rel_tol=1e-5)
        assert math.isclose(score.perplexity, math.exp(-np.mean(by_table(row))), rel_tol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_scores_do_not_depend_on_the_batch_and_come_in_order(batch_size):
    scores = jaxspec.score(TABLE, (row for row in ROWS), batch_size=batch_size)
    for row, score in zip(ROWS, scores, strict=True):
        np.testing.assert_allclose(score.log_probs, by_table(row), atol=1e-5)


def test_a_pair_scores_what_follows_the_prompt():
    whole = jaxspec.score(TABLE, ROWS)
    pairs = jaxspec.score(TABLE, [(row[:-1], row[-1:]) for row in ROWS])
    for row, one, pair in zip(ROWS, whole, pairs, strict=True):
        assert pair.tokens == row[-1:] and math.isclose(
            pair.log_prob, one.log_probs[-1], rel_tol=1e-5
        )


def test_a_token_may_be_put_before_texts():
    (with_start,) = jaxspec.score(TABLE, [ROWS[0]], start=2)
    assert with_start.tokens == ROWS[0]
    np.testing.assert_allclose(with_start.log_probs, by_table([2, *ROWS[0]]), atol=1e-5)
    (empty_prompt,) = jaxspec.score(TABLE, [([], ROWS[0])], start=2)
    np.testing.assert_allclose(empty_prompt.log_probs, with_start.log_probs, atol=1e-6)
    (begun,) = jaxspec.score(TABLE, [[2, *ROWS[0]]], start=2)  # it begins so already
    assert begun.tokens == ROWS[0]


@pytest.mark.parametrize("encoder", [False, True], ids=["decoder", "encoder-decoder"])
def test_scores_are_the_log_probs_that_generate_reports(encoder):
    model = table_model(jax.random.key(3), VOCAB, encoder=encoder)
    prompts = [[3, 1, 4], [2]]
    out = jaxspec.generate(
        model, prompts, max_new_tokens=6, temperature=1.0, key=jax.random.key(0), log_probs=True
    )
    scores = jaxspec.score(
        model, [(prompt, row.tolist()) for prompt, row in zip(prompts, out.tokens, strict=True)]
    )
    for row, score in enumerate(scores):
        np.testing.assert_allclose(score.log_probs, out.log_probs.raw[row], atol=1e-5)
    greedy = jaxspec.generate(model, prompts, max_new_tokens=6)
    pairs = [(prompt, row.tolist()) for prompt, row in zip(prompts, greedy.tokens, strict=True)]
    assert all(score.is_greedy for score in jaxspec.score(model, pairs))
    assert not all(score.is_greedy for score in scores)


@pytest.mark.slow
@pytest.mark.parametrize("head", [True, False])
def test_long_texts_are_read_in_chunks_with_few_logits_at_a_time(head, monkeypatch):
    config = tiny_gpt(11, max_positions=2048)
    lm = decoder.language_model(config)
    params = jax.jit(decoder.init, static_argnums=0)(config, jax.random.key(0))
    model = jaxspec.Model(lm if head else lm._replace(inside=None), params)
    row = np.random.default_rng(0).integers(0, 11, 1200)
    whole = jax.jit(decoder.DecoderNet(config).apply)({"params": params}, row[None])[0]
    expected = log_softmax(whole, axis=-1)[np.arange(1199), row[1:]]
    # of a hundred positions of two rows: no divisor of a chunk
    monkeypatch.setattr(scoring, "LOGITS", 2 * 11 * 100)
    for score in jaxspec.score(model, [row, row[:700]], batch_size=2):
        np.testing.assert_allclose(score.log_probs, expected[: len(score.tokens)], atol=1e-4)


@pytest.mark.needs_torch
@pytest.mark.slow
def test_scores_are_transformers_of_a_decoder():
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    model = loaded(theirs)
    rows = [np.random.default_rng(n).integers(3, 40, n).tolist() for n in (5, 17, 30)]
    for row, score in zip(rows, jaxspec.score(model, rows), strict=True):
        with torch.no_grad():
            output = theirs(torch.tensor([row]), labels=torch.tensor([row]))
        expected = torch.log_softmax(output.logits[0, :-1], -1)
        np.testing.assert_allclose(
            score.log_probs, expected[range(len(row) - 1), row[1:]].numpy(), atol=2e-4
        )
        assert math.isclose(score.perplexity, math.exp(float(output.loss)), rel_tol=1e-4)
        assert score.greedy.tolist() == (expected.argmax(-1).numpy() == row[1:]).tolist()


@pytest.mark.needs_torch
@pytest.mark.slow
def test_scores_are_transformers_of_an_encoder_decoder():
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2,
        decoder_start_token_id=0, initializer_factor=2.0,
    )  # fmt: skip
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    pairs = [([5, 6, 7, 1], [8, 9, 1]), ([5, 1], [10, 11, 12, 13, 1])]
    for (source, text), score in zip(pairs, jaxspec.score(loaded(theirs), pairs), strict=True):
        with torch.no_grad():
            output = theirs(input_ids=torch.tensor([source]), labels=torch.tensor([text]))
        expected = torch.log_softmax(output.logits[0], -1)[range(len(text)), text]
        np.testing.assert_allclose(score.log_probs, expected.numpy(), atol=2e-4)
        assert math.isclose(score.perplexity, math.exp(float(output.loss)), rel_tol=1e-4)


def loaded(theirs):
    import tempfile

    folder = tempfile.mkdtemp()
    theirs.save_pretrained(folder)
    return jaxspec.load(folder)


# --- texts


def test_prompt_and_continuation_are_encoded_together():
    """A space at the prompt's end belongs to the next word, and tokens that span the border to the
    continuation.
    """
    words = ["<unk>", "</s>", "ein", "Hund", "Hundehaus"]
    model = table_model(jax.random.key(0), len(words))._replace(tokenizer=word_tokenizer(words))
    by_space, spaced = jaxspec.score(model, [("ein ", "Hund"), ("ein", " Hund")])
    assert by_space.tokens == spaced.tokens == [3] and by_space.log_prob == spaced.log_prob
    assert (by_space.num_bytes, spaced.num_bytes) == (4, 5)
    (whole,) = jaxspec.score(model, ["ein Hund"])
    assert whole.tokens == [3] and whole.num_bytes == len(" Hund")
    assert math.isclose(whole.bits_per_byte, -whole.log_prob / math.log(2) / 5)
    (spanned,) = jaxspec.score(model, [("ein Hunde", "haus")])
    assert spanned.tokens == [4]


class Slow:
    """A tokenizer of Python's, which has no offsets."""

    is_fast = False

    def __init__(self, fast):
        self._fast = fast

    def __getattr__(self, name):
        return getattr(self._fast, name)

    def __len__(self):
        return len(self._fast)

    def __call__(self, text, add_special_tokens=True):
        return self._fast(text, add_special_tokens=add_special_tokens)


def of_bytes(byte_level):
    """A tokenizer with a token for each byte, as GPT-2's letters or as SentencePiece's `<0x..>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if byte_level:
        vocabulary = {
            letter: index
            for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
        }
        raw = Tokenizer(models.BPE(vocabulary, []))
        raw.pre_tokenizer, raw.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
    else:
        words = ["<unk>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b"]
        vocabulary = {word: index for index, word in enumerate(words)}
        raw = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("byte_level", [True, False])
def test_bytes_are_those_of_the_tokens_where_a_token_is_part_of_a_character(byte_level):
    tokenizer = of_bytes(byte_level)
    model = table_model(jax.random.key(0), 260)  # one program for both
    texts = ["é", "éa", "😀b", "中文", "aé", " é", "�b"]
    for each in (tokenizer, Slow(tokenizer)):
        scores = jaxspec.score(model._replace(tokenizer=each), texts)
        for text, score in zip(texts, scores, strict=True):
            num_bytes = len(text.encode()) - 1  # the first byte is not scored
            assert score.num_bytes == len(score.tokens) == num_bytes, text
            assert math.isclose(
                score.bits_per_byte,
                -sum(score.log_probs.tolist()) / math.log(2) / num_bytes,
                rel_tol=1e-5,
            )


def test_a_first_token_that_is_unknown_has_the_bytes_of_its_word():
    words = ["<unk>", "</s>", "a", "b"]
    model = table_model(jax.random.key(0), len(words))
    for tokenizer, num_bytes in ((word_tokenizer(words), 2), (Slow(word_tokenizer(words)), None)):
        (score,) = jaxspec.score(model._replace(tokenizer=tokenizer), ["café b"])
        assert score.tokens == [3] and score.num_bytes == num_bytes


def test_the_end_token_is_scored_if_asked_for():
    model = word_model("words", 1, encoder=True)
    pair = ("der Hund", "die Katze")
    (plain,), (ended,) = jaxspec.score(model, [pair]), jaxspec.score(model, [pair], end=True)
    assert ended.tokens == [*plain.tokens, 1] and np.allclose(ended.log_probs[:-1], plain.log_probs)
    # whose tokenizer puts </s> after each text
    decoder_only = word_model("words", 1, encoder=False)
    (plain,), (ended,) = (
        jaxspec.score(decoder_only, [pair]),
        jaxspec.score(decoder_only, [pair], end=True),
    )
    assert ended.tokens == [*plain.tokens, 1] and len(plain.tokens) == 2


def test_a_score_as_plain_values():
    score = scoring.Score([3, 1], np.array([-0.5, -np.inf]), np.array([True, False]), 4)
    assert score.to_dict(tokens=False) == {
        "log_prob": None, "is_greedy": False, "perplexity": None, "bits_per_byte": None, "num_bytes": 4, "num_tokens": 2
    }  # fmt: skip
    assert score.to_dict()["log_probs"] == [-0.5, None] and score.to_dict()["greedy"] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        (("a", "b"), TypeError, "a tuple of two texts: give"),
        (([1, 2], [3, 4]), TypeError, "a tuple of two texts: give"),
        ([[3]], ValueError, "text 0 has one token, and nothing before it: give start"),
        ([[1, 2], ([1], [])], TypeError, r"text 1 is \[\], of type list: expected a text"),
        ([([], [1, 2])], ValueError, "text 0 has an empty prompt: give start"),
        ([[1, 9]], ValueError, "text 0 has token id 9: expected ids from 0 to 6"),
        ([3.5], TypeError, "text 0 is 3.5, of type float"),
        ([(3.5, [1])], TypeError, "text 0 has the prompt 3.5, of type float"),
        (["text"], ValueError, "no tokenizer: give token ids"),
    ],
)
def test_what_cannot_be_scored_is_named(texts, error, message):
    with pytest.raises(error, match=message):
        jaxspec.score(TABLE, texts)


def test_models_that_cannot_score_say_why():
    with pytest.raises(
        ValueError, match=r"has no prompt, and .* is an encoder-decoder: give pairs"
    ):
        jaxspec.score(table_model(jax.random.key(1), VOCAB, encoder=True), [[1, 2]])
    with pytest.raises(ValueError, match=r"start is 3, and .* has a start token: leave start out"):
        jaxspec.score(table_model(jax.random.key(1), VOCAB, encoder=True), [([1], [2])], start=3)
    short = TABLE._replace(lm=TABLE.lm._replace(limits=Limits(max_positions=4)))
    with pytest.raises(ValueError, match="text 1 has 5 tokens, and the model has 4 positions"):
        jaxspec.score(short, [[1, 2], ROWS[0]])
    with pytest.raises(FloatingPointError, match="logits are not finite in text 1"):
        jaxspec.score(table_model_from(TABLE.params.at[0, 3].set(jnp.nan)), [[1, 2], [3, 1]])
    with pytest.raises(TypeError, match="target is of type dict"):
        jaxspec.score({}, [[1, 2]])
    with pytest.raises(ValueError, match="has no end-of-sequence token"):
        jaxspec.score(TABLE, [[1, 2]], end=True)


@pytest.mark.slow
def test_a_network_scores_what_its_own_generation_reports():
    config = tiny_llama(11)
    model = jaxspec.Model(
        decoder.language_model(config), decoder.init(config, jax.random.key(0)), config=config
    )
    row = [3, 1, 4, 1, 5]
    (score,) = jaxspec.score(model, [row])
    out = [
        jaxspec.generate(model, [row[:n]], max_new_tokens=1, top_log_probs=11, eos_ids=())
        for n in range(1, 5)
    ]
    for n, single in enumerate(out):
        tokens, values = single.log_probs.top_tokens[0, 0], single.log_probs.top_raw[0, 0]
        assert math.isclose(
            values[tokens.tolist().index(row[n + 1])], score.log_probs[n], abs_tol=1e-4
        )
