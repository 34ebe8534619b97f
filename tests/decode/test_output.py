"""A generation as a notebook shows it, and as plain values."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.decode import Generation, loop, output
from jaxspec.testing import table_model

TARGET, DRAFT = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
PROMPT = jaxspec.Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))


class Letters:
    """A tokenizer whose tokens are characters that mean something in HTML, and a control
    character.
    """

    eos_token_id, added_tokens_decoder = None, {}
    characters = "<&>\0é"

    def __len__(self):
        return len(self.characters)

    def get_vocab(self):
        return {character: token for token, character in enumerate(self.characters)}

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces=False):
        return "".join(self.characters[token] for token in tokens)


@pytest.fixture(scope="module")
def out() -> Generation:
    return jaxspec.generate(
        TARGET._replace(tokenizer=Letters()), PROMPT, drafter=DRAFT, gamma=3, max_new_tokens=9
    )


def test_records_are_what_the_arrays_say(out):
    for row, record in enumerate(out.records()):
        assert record["row"] == row and record["text"] == out.texts[row]
        assert record["tokens"] == out.tokens[row, : out.lengths[row]].tolist()
        assert record["emitted"] == out.lengths[row] and record["rounds"] == out.stats.rounds[row]
        assert record["acceptance_rate"] == pytest.approx(record["accepted"] / record["drafted"])
        assert {type(value) for value in record.values()} <= {int, float, str, list}


def test_the_dict_is_json_and_its_rounds_make_the_tokens(out):
    table = json.loads(json.dumps(out.to_dict()))
    assert table == out.to_dict() and table["exact"] is True
    for row in table["rows"]:
        assert [token for step in row["trace"] for token in step["new"]] == row["tokens"]
        assert sum(len(step["draft"]) for step in row["trace"]) == row["drafted"]
        assert len(row["trace"]) == 1 + row["rounds"]


def test_a_page_shows_texts_counts_and_rounds(out, read):
    reader = read(out._repr_html_())
    for row in range(2):
        assert out.texts[row].replace("\0", "␀") in reader.said
        assert f"9 tokens, {out.stats.rounds[row]} pass" in reader.said
        assert (
            f"{out.stats.accepted[row]} of {out.stats.drafted[row]} draft tokens accepted"
            in reader.said
        )
    assert reader.tags.count("details") == 2
    assert (
        "\0" not in reader.said and "Inexact" not in reader.said and "more row" not in reader.said
    )


def test_the_trace_of_a_page_is_the_one_of_the_arrays(out):
    tokens = out.tokens[0, : out.lengths[0]].tolist()
    assert (
        jaxspec.trace.html(jaxspec.trace.of_row(tokens, out.trace, 0), Letters())
        in out._repr_html_()
    )


def test_plain_decoding_has_no_rounds_to_show_and_no_tokenizer_shows_ids(read):
    out = jaxspec.generate(TARGET, PROMPT, max_new_tokens=4)
    reader = read(out._repr_html_())
    assert "details" not in reader.tags and "draft token" not in reader.said
    assert " ".join(map(str, out.tokens[0].tolist())) in reader.said
    assert out.records()[0]["text"] is None and out.to_dict()["rows"][0]["trace"][0]["draft"] == []


def test_an_inexact_rule_is_marked():
    rule = jaxspec.rules.typical()
    out = jaxspec.generate(TARGET, PROMPT, drafter=DRAFT, gamma=3, max_new_tokens=4, rule=rule)
    assert out._repr_html_().count("<b>Inexact</b>") == 1 and out.to_dict()["exact"] is False


def test_a_long_batch_makes_a_small_page(read):
    """A thousand rows of 2,000 tokens in rounds of two."""
    rows, rounds = 1000, 1000
    draft = np.ones((rows, rounds, 1), np.int32)
    ones = np.ones((rows, rounds), np.int32)
    counts = np.full(rows, rounds)
    stats = jaxspec.core.Stats(
        rounds=counts, drafted=counts, accepted=counts, emitted=2 * counts + 1
    )
    tokens = np.ones((rows, 2 * rounds + 1), np.int32)
    trace = type(jaxspec.generate(TARGET, PROMPT, max_new_tokens=1).trace)(
        draft, ones, ones, 2 * ones, ones
    )
    long = Generation(
        ["<" * 100_000] * rows, tokens, 2 * counts + 1, stats, trace, True, ["length"] * rows
    )
    markup = long._repr_html_()
    assert len(markup) < 200_000
    said = read(markup).said
    assert f"{rows - output.ROWS} more rows" in said
    assert f"{100_000 - output.CHARACTERS} more characters" in said
    assert f"{1 + rounds - output.ROUNDS} more rounds" in said


def test_the_tokenizer_is_kept_out_of_sight(out):
    assert "Letters" not in repr(out)
    again = pickle.loads(pickle.dumps(out))
    assert again.records() == out.records()


def test_the_rounds_of_a_single_row_are_unfolded(out):
    prompt = jaxspec.Prompt(PROMPT.tokens[:1], PROMPT.length[:1])
    alone = jaxspec.generate(TARGET, prompt, drafter=DRAFT, gamma=3, max_new_tokens=9)
    assert alone._repr_html_().count("<details open>") == 1
    assert out._repr_html_().count("<details>") == 2


def test_a_trace_shows_its_own_rounds(out, read):
    markup, reader = out.trace._repr_html_(), read(out.trace._repr_html_())
    for row in range(2):
        tokens = out.tokens[row, : out.lengths[row]].tolist()
        assert jaxspec.trace.html(jaxspec.trace.of_row(tokens, out.trace, row), Letters()) in markup
        assert f"row {row}" in reader.said
    assert "&lt;" in markup and reader.tags.count("details") == 0
    again = pickle.loads(pickle.dumps(out))
    assert again.trace._repr_html_() == markup


def test_a_trace_without_a_tokenizer_shows_ids(read):
    out = jaxspec.generate(TARGET, PROMPT, drafter=DRAFT, gamma=3, max_new_tokens=9)
    shown = [text for text, _ in read(out.trace._repr_html_()).spans]
    first = jaxspec.trace.of_row(out.tokens[0], out.trace, 0)[1]
    for part in filter(None, jaxspec.trace.judge(first)):
        assert "".join(f" {token}" for token in part) in shown
    plain = jaxspec.generate(TARGET, PROMPT, max_new_tokens=4)
    assert f" {plain.tokens[0, 3]}" in [text for text, _ in read(plain.trace._repr_html_()).spans]


def test_a_trace_is_still_its_arrays_and_a_copy_of_them_is_shown_as_such(out):
    draft, *counts, parent, path, numbers = out.trace
    assert out.trace._fields == jaxspec.core.RoundInfo._fields
    assert (draft is out.trace.draft) and {x.shape for x in counts} == {draft.shape[:2]}
    assert parent is None and path is None  # of chains
    assert numbers is None  # nobody asked
    assert jax.tree.map(np.asarray, out.trace)._repr_html_() is None


def test_a_long_trace_makes_a_small_page(read):
    rows, rounds = 1000, 1000
    ones = np.ones((rows, rounds), np.int32)
    arrays = loop.Trace(np.ones((rows, rounds, 1), np.int32), ones, ones, 2 * ones, ones)
    tokens, lengths = np.ones((rows, 2 * rounds + 1), np.int32), np.full(rows, 2 * rounds + 1)
    markup = output.ShownTrace.of(arrays, tokens, lengths, None)._repr_html_()
    assert markup is not None and len(markup) < 200_000
    assert (
        f"{rows - output.ROWS} more rows" in markup
        and f"{1 + rounds - output.ROUNDS} more rounds" in markup
    )
