"""What is printed: rounds by their colours or marks, counts and comparisons in true sentences."""

import io

import pytest
from rich.console import Console

from jaxspec.cli import render
from jaxspec.cli.render import Comparison, Counts, Judged, Round

END = 256


class Bytes:
    """A tokenizer whose tokens are bytes, and one special token."""

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return bytes(t for t in tokens if t != END).decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, token):
        return "<end>" if token == END else f"<{token}>"


def ids(text):
    return list(text.encode())


def styles(text):
    """The parts of a Text by the style that they have."""
    return {str(span.style): text.plain[span.start : span.end] for span in text.spans}


def shown(renderable, width=100):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (Round([], [7], [], 0), Judged([], [], [7])),  # off the prompt, or plain decoding
        (Round([7], [1, 2, 9], [1, 2, 3, 4], 2), Judged([1, 2], [3], [9])),
        (Round([7], [9], [1, 2], 0), Judged([], [1], [9])),
        (Round([7], [1, 2, 9], [1, 2], 2), Judged([1, 2], [], [9])),  # all accepted: a bonus token
        (Round([7], [1], [1, 2, 3], 2), Judged([1], [], [])),  # cut at an end token or the limit
        (Round([7], [1, 2], [1, 2, 3], 2), Judged([1, 2], [], [])),
    ],
)
def test_a_round_is_split_by_what_became_of_its_tokens(step, expected):
    assert render.judge(step) == expected


def test_tokens_are_spelt_in_context():
    assert render.spell(Bytes(), ids("Ab"), [*ids("c"), END]) == ["c", "<end>"]
    assert render.spell(Bytes(), [], []) == []


def test_half_a_character_is_completed_by_the_next_token():
    first, second = "ä".encode()
    assert render.spell(Bytes(), ids("B"), [first, second, *ids("r")]) == ["\ufffd", "ä", "r"]
    assert render.spell(Bytes(), [*ids("B"), first], [second]) == ["ä"]


def test_a_trace_line_has_the_colours_of_the_papers_figure():
    line = render.trace_line(4, "Das ist", " ein", " Haus", " Hund", width=60, colour=True)
    assert line.plain == "  4  Das ist ein Haus Hund"
    found = [(line.plain[s.start : s.end], str(s.style)) for s in line.spans]
    assert found[1:] == [("Das ist", "dim"), ("ein", "green"), ("Haus", "red strike"), ("Hund", "blue")]


def test_a_trace_line_without_colour_marks_the_same_things():
    bonus = render.trace_line(4, "Das ist", " ein Hund", "", ".", width=60, colour=False)
    assert bonus.plain == "  4  Das ist| ein Hund{+.+}"
    assert not [span for span in bonus.spans if str(span.style) != "dim"]


@pytest.mark.parametrize("text", ["ein langer Satz " * 20, "長い文" * 40])
def test_a_trace_line_fits_its_width_and_keeps_the_end(text):
    line = render.trace_line(12, text, " a", " b", " c\nd", width=40, colour=True)
    assert 38 <= line.cell_len <= 40
    assert line.plain.startswith(" 12  …")
    assert line.plain.endswith(text[-3:] + " a b c⏎d")


def test_a_trace_spells_the_rejected_token_behind_the_accepted_ones():
    step = Round(ids("x"), [*ids("ab"), END], ids("abc"), 2)
    assert render.trace(Bytes(), 1, step, width=80, colour=False).plain == "  1  x|ab[-c-]{+<end>+}"


def test_the_legend_explains_the_colours():
    assert styles(render.legend(True))["red strike"] == "rejected guess"
    assert "[-rejected guess-]" in render.legend(False).plain


def test_counts_add_up_and_give_rates():
    one, two = Counts(1, 4, 20, 12, 17, 0.5), Counts(1, 2, 10, 3, 6, 0.5)
    both = render.total([one, two])
    assert both == Counts(2, 6, 30, 15, 23, 1.0)
    assert (both.acceptance_rate, both.tokens_per_round, both.tokens_per_second) == (0.5, 21 / 6, 23.0)
    assert Counts(1, 0, 0, 0, 1, 0.0).tokens_per_second == 0


def test_the_counts_table_has_every_number_on_80_columns():
    text = shown(render.counts_table(Counts(8, 1234, 6170, 3210, 4452, 10.0)), width=80)
    for number in ("1234", "6170", "3210", "4452", "52.0%", "3.60", "445.2", "acceptance"):
        assert number in text


def test_plain_decoding_claims_no_guesses():
    counts = Counts(2, 20, 0, 0, 22, 1.0)
    assert render.counts_sentence(counts, "big", None).endswith("one pass of big, 20 in all.")
    assert "accepted" not in render.counts_note(counts).plain
    assert "–" in shown(render.counts_table(counts))


def test_a_translation_is_labelled_by_its_languages():
    text = shown(render.exchange("translate English to German: A [b]cat[/b].", "Eine", " Katze", False))
    lines = [line.split() for line in text.splitlines()]
    assert lines == [["English", "A", "[b]cat[/b]."], ["German", "Eine", "Katze"]]


def test_a_continuation_follows_its_prompt():
    assert "Once upon a time" in shown(render.exchange("Once upon", " a", " time", True))


def compared(**changed):
    found = Comparison(
        gamma=5,
        speculative=80.0,
        plain=100.0,
        identical=True,
        difference=None,
        alpha=0.7,
        c=0.2,
        v=2.1,
        expected=2.94,
        predicted=0.95,
        cached=True,
    )
    return found._replace(**changed)


def test_a_comparison_shows_both_speeds_their_ratio_and_the_prediction():
    text = shown(render.comparison_table(compared()))
    for part in ("100.0", "80.0", "0.80×", "0.95×", "γ = 5"):
        assert part in text
    assert "γc + v = 3.10" in render.comparison_lines(compared())[0].plain


def test_a_slow_down_is_owned_up_to_with_its_cost():
    said = render.comparison_lines(compared())[-1].plain
    assert "slower" in said
    assert "2.10 to check 6 tokens (v)" in said
    assert "1.00 to draft 5 (γc)" in said
    assert "CPU's cache" in said


@pytest.mark.parametrize("changed", [dict(cached=False), dict(v=1.1, c=0.5)])
def test_the_cache_is_blamed_only_where_it_is_to_blame(changed):
    assert "cache" not in render.comparison_lines(compared(**changed))[-1].plain


def test_a_slow_down_against_the_prediction_is_not_explained_by_it():
    said = render.comparison_lines(compared(predicted=1.2))[-1].plain
    assert "slower" in said
    assert "should" in said


def test_a_speed_up_is_stated():
    assert "1.80 times as fast" in render.comparison_lines(compared(speculative=180.0))[-1].plain


@pytest.mark.parametrize(
    ("identical", "said"), [(True, "identical"), (False, "different. at token 3"), (None, "samples")]
)
def test_whether_the_texts_agree_is_said(identical, said):
    lines = render.comparison_lines(compared(identical=identical, difference="at token 3"))
    assert said in lines[1].plain
