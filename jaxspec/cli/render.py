"""What the commands print, as pure functions from numbers and text to rich renderables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

ACCEPTED, REJECTED, TARGETS_OWN, COMMITTED = "green", "red strike", "blue", "dim"
HALF_CHARACTER = "\ufffd"
IDLE = 1.25  # a check that costs less than so many one-token passes runs on compute that was idle
SHORTEST_CONTEXT = 12  # columns of committed text that a trace line keeps on a narrow terminal


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


class Round(NamedTuple):
    """One round of one prompt, in token ids.

    Attributes:
        before: new tokens committed by earlier rounds.
        new: tokens that this round committed.
        draft: its guesses; none for the first token, which the target reads off the prompt.
        num_accepted: how many of them the rule kept.
    """

    before: list[int]
    new: list[int]
    draft: list[int]
    num_accepted: int


class Judged(NamedTuple):
    """A round's tokens by what became of them."""

    accepted: list[int]
    rejected: list[int]
    own: list[int]


def judge(step: Round) -> Judged:
    """Splits a round into accepted guesses, the rejected one, and the target's own token behind them.

    A round that was cut, at an end token or at the limit, has no token of the target's own.

    >>> judge(Round([], new=[5, 6, 9], draft=[5, 6, 7, 8], num_accepted=2))
    Judged(accepted=[5, 6], rejected=[7], own=[9])
    >>> judge(Round([], new=[5, 1], draft=[5, 1, 7], num_accepted=3))
    Judged(accepted=[5, 1], rejected=[], own=[])
    """
    n = step.num_accepted
    if len(step.new) <= n:
        return Judged(step.new, [], [])
    return Judged(step.new[:n], step.draft[n : n + 1], step.new[n:])


def spell(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """The text that each of `tokens` adds behind `before`; a special token is spelt by its name."""
    so_far, shown, pieces = list(before), _decode(tokenizer, before).rstrip(HALF_CHARACTER), []
    for token in tokens:
        so_far.append(token)
        whole = _decode(tokenizer, so_far)
        piece = whole[len(shown) :] if whole.startswith(shown) else ""
        pieces.append(piece or tokenizer.convert_ids_to_tokens(token))
        shown = whole.rstrip(HALF_CHARACTER)
    return pieces


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


def trace(tokenizer: Any, number: int, step: Round, *, width: int, colour: bool) -> Text:
    """One line for one round, as in the paper's Figure 1."""
    accepted, rejected, own = judge(step)
    kept = [*step.before, *accepted]
    return trace_line(
        number,
        _decode(tokenizer, step.before),
        "".join(spell(tokenizer, step.before, accepted)),
        "".join(spell(tokenizer, kept, rejected)),
        "".join(spell(tokenizer, kept, own)),
        width=width,
        colour=colour,
    )


def trace_line(number: int, before: str, accepted: str, rejected: str, own: str, *, width: int, colour: bool) -> Text:
    """Committed text (cut on the left to fit), accepted guesses, the rejected guess, the target's own token.

    Without colour, what colour would say is said by marks.

    >>> trace_line(3, "Das ist", " ein", " Haus", " Hund", width=60, colour=False).plain
    '  3  Das ist| ein[- Haus-]{+ Hund+}'
    """
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{number:>3}  ", "dim")
    tail = Text()
    for text, style, marks in (
        (accepted, ACCEPTED, ("|", "")),
        (rejected, REJECTED, ("[-", "-]")),
        (own, TARGETS_OWN, ("{+", "+}")),
    ):
        if text:
            _append(tail, _one_line(text), style, None if colour else marks)
    before = _one_line(before)
    room = max(SHORTEST_CONTEXT, width - cell_len(line.plain) - tail.cell_len)
    if cell_len(before) > room:
        before = "…" + _last_columns(before, room - 1)
    line.append(before, COMMITTED)
    return line.append_text(tail)


def legend(colour: bool) -> Text:
    """What the colours or marks of a trace mean."""
    if not colour:
        return Text("one line a round: committed|accepted guesses[-rejected guess-]{+the target's own token+}")
    said = [("committed", COMMITTED), ("accepted guess", ACCEPTED), ("rejected guess", REJECTED)]
    return Text("one line a round: ") + Text(" · ").join(
        Text(text, style) for text, style in [*said, ("the target's own token", TARGETS_OWN)]
    )


def _append(line: Text, text: str, style: str, marks: tuple[str, str] | None) -> None:
    if marks:
        line.append(f"{marks[0]}{text}{marks[1]}")
        return
    word = text.lstrip(" ")
    line.append(text[: len(text) - len(word)])  # a struck-through space would look like a dash
    line.append(word, style)


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", " ")


def _last_columns(text: str, columns: int) -> str:
    start = len(text)
    while start > 0 and cell_len(text[start - 1 :]) <= columns:
        start -= 1
    return text[start:]


def exchange(prompt: str, settled: str, fresh: str, continues: bool, note: Text | None = None) -> RenderableType:
    """A prompt and the text that answers it so far, the newest part of it lit up.

    Args:
        prompt, settled, fresh: the prompt, the older part of the text, the part that the last round brought.
        continues: whether the text goes on where the prompt ends (a decoder-only model) or answers it.
        note: a last line.
    """
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1)
    text = Text.assemble(settled, (fresh, "bold cyan"))
    if continues:
        grid.add_row("text", Text.assemble((prompt, "dim"), text))
    else:
        source, answer, body = labels(prompt)
        grid.add_row(source, Text(body, "dim"))
        grid.add_row(answer, text)
    if note is not None:
        grid.add_row("", note)
    return grid


def labels(prompt: str) -> tuple[str, str, str]:
    """What to call a prompt and its answer, and the prompt without its task prefix, if that is one of T5's.

    >>> labels("translate English to German: A new cat."), labels("summarize: A long story.")[:2]
    (('English', 'German', 'A new cat.'), ('text', 'summary'))
    """
    task = re.match(r"translate (\w+) to (\w+): ", prompt)
    if task:
        return task[1], task[2], prompt[task.end() :]
    if prompt.startswith("summarize: "):
        return "text", "summary", prompt.removeprefix("summarize: ")
    return "prompt", "answer", prompt


def counts_note(counts: Counts) -> Text:
    """The counts of one prompt in one dim line."""
    parts = [f"{counts.emitted} tokens", f"{counts.rounds} rounds"]
    if counts.drafted:
        parts += [f"{counts.tokens_per_round:.1f} tokens a round", f"{counts.acceptance_rate:.0%} accepted"]
    return Text(" · ".join([*parts, f"{counts.tokens_per_second:.0f} tokens/s"]), "dim italic")


def counts_table(counts: Counts) -> Table:
    """The counts of all prompts."""
    table = Table(box=box.ROUNDED)
    cells = {
        "rounds\n(target\ncalls)": f"{counts.rounds}",
        "drafted": f"{counts.drafted}",
        "accepted": f"{counts.accepted}",
        "emitted": f"{counts.emitted}",
        "acceptance\nrate": f"{counts.acceptance_rate:.1%}" if counts.drafted else "–",
        "tokens\nper round": f"{counts.tokens_per_round:.2f}",
        "tokens/s": f"{counts.tokens_per_second:.1f}",
    }
    for name in cells:
        table.add_column(name, justify="right", vertical="bottom")
    table.add_row(*cells.values())
    return table


def counts_sentence(counts: Counts, target: str, draft: str | None) -> str:
    """What the counts mean.

    >>> counts_sentence(Counts(1, rounds=4, drafted=20, accepted=12, emitted=17, seconds=0.5), "big", "small")
    "A round is one pass of big over small's guesses: 4 of them did the work of 16 passes of one token."
    """
    passes = counts.emitted - counts.prompts
    if draft is None:
        return f"Plain decoding: every token but a prompt's first takes one pass of {target}, {passes} in all."
    return (
        f"A round is one pass of {target} over {draft}'s guesses: {counts.rounds} of them did the work of "
        f"{passes} passes of one token."
    )


class Comparison(NamedTuple):
    """Speculative against plain decoding, as measured.

    Attributes:
        gamma: guesses a round.
        speculative, plain: tokens/s.
        identical: whether all texts were the same; None where they need not be (sampling).
        difference: where they first differ, if they do.
        alpha, c, v: acceptance rate; cost of a draft pass and of the check, in one-token passes.
        expected: tokens a round should yield at this alpha.
        predicted: speed-up by Theorem 3.8, expected / (gamma c + v).
        cached: whether the target is small enough to live in a CPU's cache, and on a CPU.
    """

    gamma: int
    speculative: float
    plain: float
    identical: bool | None
    difference: str | None
    alpha: float
    c: float
    v: float
    expected: float
    predicted: float
    cached: bool

    @property
    def ratio(self) -> float:
        """Speculative over plain speed."""
        return self.speculative / self.plain

    @property
    def round_cost(self) -> float:
        """gamma c + v: what a round costs, in one-token passes of the target."""
        return self.gamma * self.c + self.v


def comparison_table(found: Comparison) -> Table:
    """Both speeds, and the speed-up as measured and as predicted."""
    table = Table(box=box.ROUNDED)
    table.add_column("")
    table.add_column("tokens/s", justify="right")
    table.add_column("speed-up", justify="right")
    table.add_row("plain", f"{found.plain:.1f}", "1.00×")
    table.add_row(f"speculative, γ = {found.gamma}", f"{found.speculative:.1f}", f"{found.ratio:.2f}×")
    table.add_row("predicted by Theorem 3.8, with v", "", f"{found.predicted:.2f}×", style="dim")
    return table


def comparison_lines(found: Comparison) -> list[Text]:
    """The numbers behind the prediction, whether the texts agree, and what it comes to."""
    formula = Text(
        f"α = {found.alpha:.3f}, c = {found.c:.3f}, v = {found.v:.2f}: a round yields {found.expected:.2f} "
        f"tokens and costs γc + v = {found.round_cost:.2f} one-token passes of the target."
    )
    return [formula, _agreement(found), Text(_conclusion(found))]


def _agreement(found: Comparison) -> Text:
    if found.identical is None:
        return Text("The texts are samples: they have one law, and need not be the same.")
    if found.identical:
        return Text("Greedy texts: identical.", "green")
    return Text(f"Greedy texts: different. {found.difference}", "yellow")


def _conclusion(found: Comparison) -> str:
    if found.ratio >= 1:
        return f"Speculative decoding is {found.ratio:.2f} times as fast here."
    if found.predicted >= 1:
        return (
            f"Speculative decoding is slower here, though a round should give {found.expected:.2f} tokens in "
            f"the time of {found.round_cost:.2f} passes: reading prompts twice and short last rounds cost it."
        )
    busy = found.cached and found.v > IDLE
    why = ", for a model that fits a CPU's cache leaves no compute idle to check guesses with" if busy else ""
    return (
        f"Speculative decoding is slower here: a round yields {found.expected:.2f} tokens and takes the time "
        f"of {found.round_cost:.2f} one-token passes, {found.v:.2f} to check {found.gamma + 1} tokens (v) "
        f"and {found.gamma * found.c:.2f} to draft {found.gamma} (γc){why}."
    )


def sizes_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Networks and what they take: parameters, memory, cache."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
    table.add_column("name", no_wrap=True)
    heads = ("parameters", "float32", "bfloat16", "cache per token,\nfloat32", "cache per token,\nbfloat16")
    for head in heads:
        table.add_column(head, justify="right", vertical="bottom")
    for row in rows:
        memory, cache = row["memory_bytes"], row["cache_bytes_per_token"]
        sizes = [memory["float32"], memory["bfloat16"], cache["float32"], cache["bfloat16"]]
        table.add_row(row["name"], count(row["parameters"]), *map(size, sizes))
    return table


def count(number: int) -> str:
    """A number of parameters.

    >>> [count(n) for n in (999, 76_961_152, 11_135_332_352)]
    ['999', '77.0M', '11.1B']
    """
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def size(number: float) -> str:
    """A number of bytes.

    >>> [size(n) for n in (512, 73_728, 307_844_608)]
    ['512 B', '72.0 KiB', '293.6 MiB']
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:.0f} B"
