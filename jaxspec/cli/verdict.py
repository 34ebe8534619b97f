"""A comparison of speculative with plain decoding, as a table and in sentences."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from jaxspec.cli.compare import Comparison

IDLE = 1.25  # a check that costs less than so many one-token passes runs on compute that was idle


def table(found: Comparison) -> Table:
    """Both speeds, and the speed-up as measured and as predicted."""
    made, ratio = Table(box=box.ROUNDED), found.ratio
    made.add_column("")
    for head in ("tokens/s", "speed-up", "min..max"):
        made.add_column(head, justify="right")
    made.add_row("plain", f"{found.plain:.1f}", "1.00×")
    speeds = f"{found.speculative:.1f}", f"{ratio['median']:.2f}×", f"{ratio['min']:.2f}..{ratio['max']:.2f}"
    made.add_row(f"speculative, γ = {found.gamma}", *speeds)
    made.add_row("predicted by Theorem 3.8, with v", "", f"{found.predicted:.2f}×", style="dim")
    return made


def sentences(found: Comparison) -> list[Text]:
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
    ratio = found.ratio["median"]
    if ratio >= 1:
        return f"Speculative decoding is {ratio:.2f} times as fast here."
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
