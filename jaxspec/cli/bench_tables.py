"""The measurements of `jaxspec bench` as tables and sentences."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from jaxspec.cli import console


def headline(found: dict[str, Any]) -> Text:
    """What was measured, and on what."""
    from jaxspec.analysis.measure import environment

    sides = [found[side] for side in ("target", "draft") if found[side]]
    names = " and ".join(f"{side['name']} ({console.count(side['parameters'])})" for side in sides)
    how = f"greedy, {found['new_tokens']} new tokens, {sides[0]['dtype']}"
    return Text(f"{names} · {how} · {environment.line(found['environment'])}", "bold")


def speed_table(found: dict[str, Any]) -> Table:
    """Speeds, and whether the texts are the same."""
    table = console.table(["batch", "γ", "tokens/s", "min..max", "speed-up", "min..max", "same text"])
    for row in found["results"]:
        speed = row["tokens_per_second"]
        cells = [*_which(row), f"{speed['median']:.1f}", f"{speed['min']:.1f}..{speed['max']:.1f}"]
        if "ratio" in row:
            ratio = row["ratio"]
            cells += [f"{ratio['median']:.2f}×", f"{ratio['min']:.2f}..{ratio['max']:.2f}"] if ratio else ["–", "–"]
            cells += [f"{row['same_text']} of {row['prompts']}"]
        table.add_row(*cells)
    return table


def theory_table(found: dict[str, Any]) -> Table:
    """What Theorem 3.8, which is about the time after prefill, makes of the measured costs."""
    heads = ["batch", "γ", "tokens\nper round", "c", "v", "predicted", "predicted\nfrom α", "measured,\nno prefill"]
    table = console.table(heads)
    for row in found["results"]:
        if "ratio" in row:
            after = row["ratio_after_prefill"]
            cells = [*_which(row), f"{row['tokens_per_round']:.2f}", f"{row['c']:.3f}", f"{row['v']:.2f}"]
            cells += [f"{row['predicted']:.2f}×", f"{row['predicted_from_alpha']:.2f}×"]
            table.add_row(*cells, f"{after['median']:.2f}×" if after else "–")
    return table


def latency_table(found: dict[str, Any]) -> Table:
    """Milliseconds of the first token, and of the others: the percentiles over all of a repeat's tokens."""
    heads = ["batch", "γ", "first\ntoken, ms", "p50 per\ntoken, ms", "min..max", "p95 per\ntoken, ms", "min..max"]
    table = console.table(heads)
    for row in found["results"]:
        cells = [*_which(row), f"{row['first_token_ms']['median']:.1f}"]
        for share in ("p50", "p95"):
            each = row["token_ms"][share] if row["token_ms"] else None
            cells += [f"{each['median']:.2f}", f"{each['min']:.2f}..{each['max']:.2f}"] if each else ["–", "–"]
        table.add_row(*cells)
    return table


def memory_table(found: dict[str, Any]) -> Table:
    """What the program takes, and what it needs at least."""
    table = console.table(["batch", "γ", "program", "what it\nneeds", "times\nthat"])
    for row in found["results"]:
        used = row["memory"]
        needs, taken = used["weights"] + used["caches"] + used["logits"], used["program"]
        cells = ["–", console.size(needs), "–"]
        if taken is not None:
            cells = [console.size(taken), console.size(needs), f"{taken / needs:.2f}"]
        table.add_row(*_which(row), *cells)
    return table


def notes(found: dict[str, Any]) -> list[Text]:
    """What the numbers mean, in sentences."""
    from jaxspec.analysis.measure.statistics import with_error

    alpha, process = found["alpha"], found["process"]
    lines: list[str] = []
    if alpha:
        about = f"{with_error(alpha['alpha'], alpha['stderr'])} over {alpha['positions']} positions"
        lines.append(f"α = {about}. Predicted: Theorem 3.8 with v, from the passes saved, and from α alone.")
    for row in found["results"]:
        if row.get("ratio") and row["ratio"]["median"] < 1:
            cost = row["gamma"] * row["c"] + row["v"]
            lines.append(
                f"Batch {row['batch']}, γ = {row['gamma']}: slower than plain decoding. A round costs "
                f"{cost:.2f} one-token passes of the target (γc + v) and does the work of "
                f"{row['passes_saved']:.2f}."
            )
    peaks = {
        "process": process["peak"],
        "before the models": process["before"],
        "device": process["device_peak"],
    }
    lines.append("A program needs its weights, its caches, and a block of logits [batch, γ + 1, vocabulary] per model.")
    lines.append("Peak memory: " + ", ".join(f"{name} {console.size(n)}" for name, n in peaks.items() if n))
    return [Text(line) for line in lines]


def _which(row: dict[str, Any]) -> list[str]:
    return [f"{row['batch']}", f"{row['gamma']}" if row["gamma"] else "plain"]
