"""What a generation took: rounds, draft tokens, tokens, seconds; as numbers, a line, a table and a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from jaxspec.cli import console


class Counts(NamedTuple):
    """What a generation took, over some prompts.

    >>> total = Counts(1, rounds=4, drafted=20, accepted=12, emitted=17, seconds=0.5)
    >>> total.acceptance_rate, total.tokens_per_round, total.tokens_per_second
    (0.6, 4.0, 34.0)
    """

    prompts: int
    rounds: int
    drafted: int
    accepted: int
    emitted: int
    seconds: float

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted."""
        return self.accepted / max(1, self.drafted)

    @property
    def tokens_per_round(self) -> float:
        """Each prompt's first token comes from reading the prompt, and costs no round."""
        return (self.emitted - self.prompts) / max(1, self.rounds)

    @property
    def tokens_per_second(self) -> float:
        """emitted / seconds."""
        return self.emitted / self.seconds if self.seconds > 0 else 0.0


def total(counts: Sequence[Counts]) -> Counts:
    """The sum."""
    return Counts(*(sum(column) for column in zip(*counts, strict=True)))


def note(counts: Counts) -> Text:
    """The counts of one prompt in one dim line."""
    parts = [f"{counts.emitted} tokens", f"{counts.rounds} rounds"]
    if counts.drafted:
        parts += [f"{counts.tokens_per_round:.1f} tokens a round", f"{counts.acceptance_rate:.0%} accepted"]
    return Text(" · ".join([*parts, f"{counts.tokens_per_second:.0f} tokens/s"]), "dim italic")


def table(counts: Counts) -> Table:
    """The counts of all prompts."""
    cells = {
        "rounds\n(target\ncalls)": f"{counts.rounds}",
        "drafted": f"{counts.drafted}",
        "accepted": f"{counts.accepted}",
        "emitted": f"{counts.emitted}",
        "acceptance\nrate": f"{counts.acceptance_rate:.1%}" if counts.drafted else "–",
        "tokens\nper round": f"{counts.tokens_per_round:.2f}",
        "tokens/s": f"{counts.tokens_per_second:.1f}",
    }
    made = console.table(list(cells))
    made.add_row(*cells.values())
    return made


def sentence(counts: Counts, target: str, draft: str | None) -> str:
    """What the counts mean.

    >>> sentence(Counts(1, rounds=4, drafted=20, accepted=12, emitted=17, seconds=0.5), "big", "small")
    "A round is one pass of big over small's draft tokens: 4 of them did the work of 16 passes of one token."
    """
    passes = counts.emitted - counts.prompts
    if draft is None:
        return f"Plain decoding: every token but a prompt's first takes one pass of {target}, {passes} in all."
    return (
        f"A round is one pass of {target} over {draft}'s draft tokens: {counts.rounds} of them did the work of "
        f"{passes} passes of one token."
    )
