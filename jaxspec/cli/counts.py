"""What decoding prompts took: rounds, draft tokens, tokens, seconds; in numbers, in words, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from jaxspec.trace import Round

if TYPE_CHECKING:
    from jaxspec.analysis.bench import BenchResult
    from jaxspec.cli.session import Session


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

    acceptance_rate = property(lambda self: self.accepted / max(1, self.drafted), doc="accepted / drafted")
    tokens_per_round = property(
        lambda self: (self.emitted - self.prompts) / max(1, self.rounds),
        doc="Each prompt's first token comes from reading the prompt, and costs no round.",
    )
    tokens_per_second = property(lambda self: self.emitted / self.seconds if self.seconds > 0 else 0.0)

    @classmethod
    def total(cls, counts: Sequence[Counts]) -> Counts:
        """The sum."""
        return cls(*(sum(column) for column in zip(*counts, strict=True)))


class Decoded(NamedTuple):
    """What became of one prompt."""

    text: str
    tokens: list[int]
    rounds: list[Round]
    counts: Counts


def note(counts: Counts) -> Text:
    """The counts of one prompt in one dim line."""
    parts = [f"{counts.emitted} tokens", f"{counts.rounds} rounds"]
    if counts.drafted:
        parts += [f"{counts.tokens_per_round:.1f} tokens a round", f"{counts.acceptance_rate:.0%} accepted"]
    return Text(" · ".join([*parts, f"{counts.tokens_per_second:.0f} tokens/s"]), "dim italic")


def totals(decoded: Sequence[Decoded], target: str, draft: str | None) -> str:
    """What all prompts took, in sentences: where the tokens come from, and how fast."""
    counts = Counts.total([row.counts for row in decoded])
    later = counts.emitted - counts.prompts
    first = f"{counts.prompts} of them, each prompt's first, by reading the prompts" if counts.prompts > 1 else (
        "the first of them by reading the prompt"
    )  # fmt: skip
    speed = f"{counts.emitted} tokens at {counts.tokens_per_second:.1f} tokens/s: {first};"
    if draft is None:
        return f"{speed} the other {later} by one pass of {target} each (plain decoding)."
    return (
        f"{speed} the other {later} in {counts.rounds} rounds, {counts.tokens_per_round:.2f} tokens a round. A round "
        f"is one pass of {target} over {draft}'s draft tokens: of {counts.drafted} drafted, {counts.accepted} were "
        f"accepted ({counts.acceptance_rate:.1%})."
    )


def row_report(prompt: str, row: Decoded, trace: bool) -> dict[str, Any]:
    """What `jaxspec generate --json` prints of one prompt; `trace` adds the rounds."""
    counts = {field: getattr(row.counts, field) for field in ("rounds", "drafted", "accepted", "emitted")}
    made: dict[str, Any] = {"prompt": prompt, "text": row.text, "tokens": row.tokens, "stats": counts}
    if trace:
        made["rounds"] = [
            {"tokens": x.new, "draft": x.draft, "accepted": x.num_accepted}
            | ({} if x.parent is None else {"parent": x.parent, "path": x.path})
            for x in row.rounds
        ]
    return made


def totals_report(
    session: Session,
    sampling: dict[str, Any],
    decoded: Sequence[Decoded],
    found: tuple[BenchResult, BenchResult] | None,
) -> dict[str, Any]:
    """What `jaxspec generate --json` prints of all prompts together; `found` is of --compare."""
    from jaxspec.analysis import environment

    total, about = Counts.total([row.counts for row in decoded]), environment.current()
    rates = {name: getattr(total, name) for name in ("acceptance_rate", "tokens_per_round", "tokens_per_second")}
    made: dict[str, Any] = {
        "exact": session.prepared.decoder.exact,
        "stats": {"total": total._asdict() | rates},
        "settings": session.settings._asdict() | {"temperature": 0.0} | sampling,
        "versions": {name: getattr(about, name) for name in ("jaxspec", "jax", "jaxlib", "python")},
        "device": {name: getattr(about, name) for name in ("device", "devices", "cpu", "cpus", "platform")},
    }
    if found is not None:
        made["compare"] = dict(zip(("plain", "speculative"), found, strict=True))
    return made


def whole_report(rows: Sequence[dict[str, Any]], totals: dict[str, Any]) -> dict[str, Any]:
    """One object of the reports of some prompts, in lists, and that of all together."""
    lists = {f"{name}s": [row[name] for row in rows] for name in ("prompt", "text")} | {
        name: [row[name] for row in rows] for name in ("tokens", "rounds") if name in rows[0]
    }
    counts = {name: [row["stats"][name] for row in rows] for name in rows[0]["stats"]}
    return {**lists, **totals, "stats": counts | totals["stats"]}
