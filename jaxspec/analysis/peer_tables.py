"""What `jaxspec.analysis.peer` has found, for a screen."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

WIDTH = 108  # columns that the tables take
BUSY = 0.5  # load per CPU above which a comparison is not to be trusted


def headline(found: dict[str, Any]) -> str:
    """What was compared, and on what."""
    about = found["environment"]
    sizes = " and ".join(f"{found[s]['name']} ({found[s]['parameters'] / 1e6:.1f}M)" for s in ("target", "draft"))
    versions = ", ".join(f"{name} {about[name]}" for name in ("jaxspec", "jax", "transformers", "torch"))
    cpus = f"{about['cpu']}, {about['cpus']} CPUs, {about['torch_threads']} threads of PyTorch, load {about['load']}"
    return f"{sizes} · greedy, float32, {found['new_tokens']} new tokens · {cpus} · {versions}"


def busy(found: dict[str, Any]) -> str | None:
    """A warning, if other programs were running when the comparison began.

    >>> busy({"environment": {"load": 0.2, "cpus": 2}})
    """
    load, cpus = found["environment"]["load"], found["environment"]["cpus"]
    if load is None or load <= BUSY * cpus:
        return None
    return (
        f"the load was {load} on {cpus} CPUs when this began: PyTorch's threads wait for each other in every product, "
        "so that a busy machine slows it down by far more than its share. Do not quote these numbers"
    )


def disagreements(found: dict[str, Any]) -> list[str]:
    """The variants whose text differs from transformers' plain decoding, in words."""
    return [
        f"batch {one['batch']}, {_named(variant)}: {variant['same_text']} of {one['prompts']} texts are those of "
        "transformers' plain decoding"
        for one in found["batches"]
        for variant in one["variants"]
        if variant["same_text"] < one["prompts"]
    ]


def tables(found: dict[str, Any]) -> list[Table]:
    """Speeds and ratios for a screen."""
    speeds = _table("batch", "variant", "tokens/s", "min..max", "target\npasses", "same text")
    ratios = _table("batch", "speed of", "over", "ratio", "min..max")
    for one in found["batches"]:
        for variant in one["variants"]:
            same, passes = f"{variant['same_text']} of {one['prompts']}", f"{variant['target_passes']}"
            speeds.add_row(f"{one['batch']}", _named(variant), *_cells(variant["tokens_per_second"], 1), passes, same)
        for ratio in one["ratios"]:
            of, over = (_words(*ratio[side]) for side in ("of", "over"))
            ratios.add_row(f"{one['batch']}", of, over, *_cells(ratio, 2))
    return [speeds, ratios]


def _table(*heads: str) -> Table:
    table = Table(box=box.ROUNDED)
    for head in heads:
        words = head in ("variant", "speed of", "over")
        table.add_column(head, justify="left" if words else "right", no_wrap=True, vertical="bottom")
    return table


def _cells(numbers: dict[str, float], digits: int) -> list[str]:
    median, low, high = (f"{numbers[name]:.{digits}f}" for name in ("median", "min", "max"))
    return [median, f"{low}..{high}"]


def _named(variant: dict[str, Any]) -> str:
    return _words(variant["library"], variant["how"], variant["gamma"])


def _words(library: str, how: str, gamma: int) -> str:
    return f"{library} {how}" + (f", γ = {gamma}" if gamma else "")
