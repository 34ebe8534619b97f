"""Languages: what the tokenizer puts before a text, and what a decoder's row begins with."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import MBartTokenizer, NllbTokenizer

import jaxspec
from jaxspec.core import Model, Prompt, Room, token_rows
from jaxspec.jobs.prompts import PromptReader, RowLimits
from jaxspec.nets import t5
from jaxspec.testing import table_model
from jaxspec.vocab import languages
from jaxspec.vocab.languages import language_id
from tests.small import random_params, slow_tokenizers, tiny_t5

WORDS = ["<s>", "<pad>", "</s>", "<unk>", "▁", "a", "b", "c", "▁a", "ab"]
CONFIG = dataclasses.replace(tiny_t5(256), start_token=2, end_tokens=(2,))


def model_of(config=CONFIG, seed=0) -> Model:
    words = {word: index for index, word in enumerate(WORDS)}
    tokenizer = NllbTokenizer(vocab=words, merges=[("▁", "a"), ("a", "b")], src_lang="eng_Latn")
    return Model(
        t5.language_model(config), t5.init(config, jax.random.key(seed)), tokenizer, config, "tiny"
    )


def test_each_language_has_its_token_before_the_source_and_at_the_rows_beginning():
    model = model_of()
    german = jaxspec.with_languages(model, source="fra_Latn", target="deu_Latn")
    french, new = language_id(model, "fra_Latn"), language_id(model, "deu_Latn")
    assert german.tokenizer("ab")["input_ids"][0] == french
    assert model.tokenizer("ab")["input_ids"][0] == language_id(model, "eng_Latn"), (
        "the model's own is as it was"
    )
    assert german.lm.limits.first_tokens == (2, new)
    assert model.lm.limits.first_tokens == (2,)


def test_a_language_that_starts_rows_is_replaced():
    """An mBART of 25 languages has no start token but the language."""
    tokenizer = MBartTokenizer(src_lang="en_XX")
    start = tokenizer.convert_tokens_to_ids("ro_RO")
    config = dataclasses.replace(tiny_t5(len(tokenizer)), start_token=start)
    model = Model(t5.language_model(config), {}, tokenizer, config)
    assert jaxspec.with_languages(model, target="de_DE").lm.limits.first_tokens == (
        language_id(model, "de_DE"),
    )


def test_languages_of_an_m2m_100_are_where_its_tokenizer_counts_them(tmp_path):
    """Whatever order a file lists their tokens in, and though it list none."""
    config = tiny_t5(256)
    for name, tokenizer in slow_tokenizers(tmp_path).items():
        if not name.startswith("m2m"):
            continue
        model = Model(t5.language_model(config), {}, tokenizer, config)
        assert (
            language_id(model, "fr") == tokenizer.get_lang_id("fr") == len(tokenizer.encoder) + 24
        ), name
        french = jaxspec.with_languages(model, source="de", target="fr")
        assert french.lm.limits.begin == (tokenizer.get_lang_id("fr"),)
        assert french.tokenizer("the dog")["input_ids"][0] == tokenizer.get_lang_id("de")
        with pytest.raises(
            ValueError, match="the language is 'xx': expected one of the tokenizer's 100, such as"
        ):
            language_id(model, "xx")


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (
            {"target": "deu"},
            "the language is 'deu': expected one of the tokenizer's 202, such as deu_Latn",
        ),
        ({"source": "english"}, "the language is 'english'"),
    ],
)
def test_an_unknown_language_is_refused_beside_those_that_are_spelled_nearly_so(named, words):
    with pytest.raises(ValueError, match=words):
        jaxspec.with_languages(model_of(), **named)


def test_a_model_without_languages_is_refused():
    with pytest.raises(ValueError, match="has no languages in its tokenizer"):
        jaxspec.with_languages(model_of()._replace(tokenizer=None), source="eng_Latn")
    small = jaxspec.trim_vocabulary(model_of(), size=200)
    with pytest.raises(ValueError, match="before its vocabulary is trimmed"):
        jaxspec.with_languages(small, target="deu_Latn")
    assert jaxspec.with_languages(small, source="fra_Latn").lm == small.lm


def test_a_shared_encoder_stays_shared():
    target = model_of()
    draft = jaxspec.drafters.share_encoder(target, target)
    german = jaxspec.with_languages(draft, target="deu_Latn")
    assert german.lm.encoder.is_shared and german.lm.limits.begin == (
        language_id(target, "deu_Latn"),
    )
    assert jaxspec.with_languages(draft, source="deu_Latn").lm == draft.lm


def test_scores_are_those_of_the_text_that_was_generated():
    """After a beginning of two tokens; each token's log probability is that of the row that
    generate has written.
    """
    model = model_of()
    german = model._replace(
        lm=t5.language_model(dataclasses.replace(CONFIG, begin_tokens=(40, 41)))
    )
    out = jaxspec.generate(german, [[5, 6, 7]], max_new_tokens=6, eos_ids=(), log_probs=True)
    (score,) = jaxspec.score(german, [([5, 6, 7], out.tokens[0].tolist())])
    np.testing.assert_allclose(score.log_probs, out.log_probs.raw[0], atol=1e-5)


@pytest.mark.slow
def test_a_drafter_of_another_tokenizer_is_refused_after_a_beginning():
    words = ["<unk>", "</s>", "ab", "a", "b"]
    names = {"target": words, "draft": [word for word in words if word != "ab"]}
    models = {
        name: Model(
            t5.language_model(config), t5.init(config, jax.random.key(0)), bpe(names[name]), config
        )
        for name, config in {name: tiny_t5(len(names[name])) for name in names}.items()
    }
    draft = jaxspec.share_vocabulary(models["draft"], models["target"])
    plain = jaxspec.generate(models["target"], [[3, 2, 4]], max_new_tokens=6, eos_ids=())
    out = jaxspec.generate(
        models["target"], [[3, 2, 4]], drafter=draft, gamma=2, max_new_tokens=6, eos_ids=()
    )
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    row = Prompt(
        jnp.array([[0, 3]]), jnp.array([2]), Prompt(jnp.array([[3, 2, 4]]), jnp.array([3]))
    )
    with pytest.raises(ValueError, match="expected a drafter with the target's tokenizer"):
        jaxspec.generate(
            models["target"], row, drafter=draft, gamma=2, max_new_tokens=6, eos_ids=()
        )


def bpe(words):
    """A tokenizer whose words are characters, and "ab"."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    merges = [("a", "b")] if "ab" in words else []
    raw = Tokenizer(
        models.BPE({word: index for index, word in enumerate(words)}, merges, unk_token="<unk>")
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")


def test_lines_of_a_job_choose_their_languages():
    """Each text is that of a model with these languages; a line without them keeps the job's."""
    model = model_of()
    lines = [
        {"prompt": "ab"},
        {"prompt": "ab", "target_language": "deu_Latn"},
        {"prompt": "ab", "source_language": "fra_Latn", "tgt_lang": "ron_Latn"},
        {"prompt": "ab", "target_language": "deu"},
        {"prompt": [5, 6], "source_language": "fra_Latn"},
    ]
    options = {"max_new_tokens": 6, "eos_ids": ()}
    rows = list(
        jaxspec.generate_many(model, lines, slots=3, in_order=True, on_error="yield", **options)
    )
    french = jaxspec.with_languages(model, source="fra_Latn")
    source = token_rows.pad([m.tokenizer("ab")["input_ids"] for m in (model, model, french)])
    begins = [[2], [2, language_id(model, "deu_Latn")], [2, language_id(model, "ron_Latn")]]
    out = jaxspec.generate(model, token_rows.pad(begins, 2)._replace(encoder=source), **options)
    assert [row.tokens for row in rows[:3]] == out.tokens.tolist()
    assert len({tuple(row.tokens) for row in rows[:3]}) == 3
    assert (
        "the field 'target_language' is not obeyed: the language is 'deu': expected one of"
        in rows[3].error
    )
    assert "source_language is 'fra_Latn', and the prompt is ids" in rows[4].error


def test_a_language_is_refused_where_the_model_has_none():
    plain = model_of()._replace(tokenizer=None)
    lines = [{"prompt": [5], "target_language": "de"}, {"prompt": [5], "src_lang": "de"}]
    for request in PromptReader(plain, lines, RowLimits(None, None, 1, "error"), 2).peek(2):
        assert "has no languages in its tokenizer: leave 'de' out" in request.error
    with pytest.raises(ValueError, match="is decoder-only, and its rows begin with the prompt"):
        languages.first_tokens(
            model_of()._replace(lm=table_model(jax.random.key(0), 256).lm), "deu_Latn"
        )
    (start,) = languages.first_tokens(
        model_of(dataclasses.replace(CONFIG, start_token=language_id(model_of(), "eng_Latn"))),
        "deu_Latn",
    )
    assert start == language_id(model_of(), "deu_Latn")


@pytest.mark.slow
def test_rows_of_several_languages_share_a_batch_and_drafters_follow_their_target():
    """One row begins with two tokens, the other with one: each is that of its own call, drafted or
    not.
    """
    target, draft = model_of(), model_of(tiny_t5(256), seed=1)
    source = Prompt(jnp.array([[5, 6, 7], [8, 9, 0]]), jnp.array([3, 2]))
    both = Prompt(jnp.array([[2, 40], [2, 0]]), jnp.array([2, 1]), source)
    options = {"max_new_tokens": 8, "eos_ids": ()}
    together = jaxspec.generate(target, both, **options)
    german = target._replace(lm=t5.language_model(dataclasses.replace(CONFIG, begin_tokens=(40,))))
    np.testing.assert_array_equal(
        jaxspec.generate(german, source, **options).tokens[0], together.tokens[0]
    )
    np.testing.assert_array_equal(
        jaxspec.generate(target, source, **options).tokens[1], together.tokens[1]
    )
    assert (
        together.tokens[0].tolist()
        != jaxspec.generate(target, source, **options).tokens[0].tolist()
    )
    for drafter in (draft, jaxspec.drafters.prompt_lookup()):
        drafted = jaxspec.generate(target, both, drafter=drafter, gamma=3, **options)
        np.testing.assert_array_equal(drafted.tokens, together.tokens)
    # A drafter of the same weights proposes what the target writes only if its rows begin as the
    # target's do.
    same = jaxspec.generate(german, source, drafter=target, gamma=3, **options)
    assert int(same.stats.rounds.max()) == 2


def test_prefill_of_a_beginning_is_extend_after_the_start_token():
    lm, params = t5.language_model(CONFIG), random_params(t5.init, CONFIG)
    source = Prompt(jnp.array([[5, 6, 7], [8, 9, 0]]), jnp.array([3, 2]))
    row = Prompt(jnp.array([[2, 40, 41], [2, 50, 0]]), jnp.array([3, 2]), source)
    prefill = jax.jit(lm.prefill, static_argnums=2)
    forward, cache = prefill(params, row, Room(6))
    _, begun = prefill(params, source, Room(6))
    rest, _ = jax.jit(lm.extend)(params, begun, row.tokens[:, 1:])
    np.testing.assert_allclose(
        forward.logits[:, 0], [rest.logits[0, 1], rest.logits[1, 0]], atol=1e-5
    )
    assert cache.decoder.length.tolist() == [3, 2]
    assert forward.features.shape == (2, 3, 16)


def test_a_wrong_encoder_part_is_refused():
    target = model_of()
    source = Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
    row = Prompt(jnp.array([[2], [2]]), jnp.array([1, 1]), source)
    with pytest.raises(
        ValueError, match=r"has the shapes \(1, 3\), \(1,\): expected 2 rows in each"
    ):
        jaxspec.generate(target, row)
    bad = Prompt(jnp.array([[2]]), jnp.array([1]), source._replace(tokens=jnp.array([[5, 6, 300]])))
    with pytest.raises(ValueError, match="token id 300: expected ids from 0 to 255"):
        jaxspec.generate(target, bad)
    for part, message in (
        (jnp.ones((1, 3)), "of type ArrayImpl: expected a jaxspec.Prompt of the ids"),
        (["text"], "of type list: expected a jaxspec.Prompt"),
        (bad, "has an encoder's part itself: leave that one out"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxspec.generate(target, bad._replace(encoder=part))
    from jaxspec.testing import table_model

    with pytest.raises(ValueError, match="decoder-only: leave `encoder` out"):
        jaxspec.generate(table_model(jax.random.key(0), vocab=256), bad)
