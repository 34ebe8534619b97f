"""What a generation took: sums, rates, and true sentences about them."""

from jaxspec.cli import counts
from jaxspec.cli.counts import Counts


def test_counts_add_up_and_give_rates():
    one, two = Counts(1, 4, 20, 12, 17, 0.5), Counts(1, 2, 10, 3, 6, 0.5)
    both = counts.total([one, two])
    assert both == Counts(2, 6, 30, 15, 23, 1.0)
    assert (both.acceptance_rate, both.tokens_per_round, both.tokens_per_second) == (0.5, 21 / 6, 23.0)
    assert Counts(1, 0, 0, 0, 1, 0.0).tokens_per_second == 0


def test_the_counts_table_has_every_number_on_80_columns(shown):
    text = shown(counts.table(Counts(8, 1234, 6170, 3210, 4452, 10.0)), width=80)
    for number in ("1234", "6170", "3210", "4452", "52.0%", "3.60", "445.2", "acceptance"):
        assert number in text


def test_plain_decoding_claims_no_draft_tokens(shown):
    plain = Counts(2, 20, 0, 0, 22, 1.0)
    assert counts.sentence(plain, "big", None).endswith("one pass of big, 20 in all.")
    assert "accepted" not in counts.note(plain).plain
    assert "–" in shown(counts.table(plain))
