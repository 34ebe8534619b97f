"""A job in refilled slots against fixed batches of the same size, on held-out prompts with limits of many lengths.

    python -m benchmarks.jobs --prompts 200 --slots 8,16

Any machine; ten minutes on two cores of a CPU.

Both sides decode the same prompts with the same limits, plainly and with the drafter, interleaved, so that a busy
machine slows both. Printed are new tokens a second (median and range over the repeats), the ratio, the share of the
rounds of slots that had no row to decode, and whether all texts are the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import jaxspec
from jaxspec.decode import batches
from jaxspec.decode.request import prepare
from jaxspec.files import corpus
from jaxspec.jobs import Progress


def fixed(
    target: Any, texts: list[str], limits: np.ndarray, size: int, **options: Any
) -> tuple[list[list[int]], float]:
    """Decodes in batches of a fixed size; returns the tokens and the share of idle rounds."""
    prepared = prepare(target, texts, max_new_tokens=limits, **options)
    rows, used, total = list[list[int]](), 0, 0
    for part in batches.in_batches(prepared, size):
        outcome = batches.run(part.prepared)
        rows += batches.texts([outcome])[: part.real]
        rounds = np.asarray(outcome.stats.rounds)
        used, total = used + int(rounds[: part.real].sum()), total + int(rounds.max()) * size
    return rows, 1 - used / total


def refilled(
    target: Any, texts: list[str], limits: np.ndarray, size: int, **options: Any
) -> tuple[list[list[int]], float]:
    """Decodes in slots; returns the tokens and the share of idle rounds."""
    seen = [Progress()]
    requests = [{"prompt": text, "max_new_tokens": int(limit)} for text, limit in zip(texts, limits, strict=True)]
    most = int(limits.max())
    job = jaxspec.generate_many(
        target, requests, slots=size, max_new_tokens=most, in_order=True, progress=seen.append, **options
    )
    rows = [row.tokens for row in job]
    return rows, seen[-1].idle / max(1, seen[-1].idle + seen[-1].rounds)


def main(arguments: list[str] | None = None) -> None:
    """Prints a table with a line for each number of slots, plainly and with the drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="debian-t5-large")
    parser.add_argument("--draft", default="debian-t5-draft")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--slots", default="8,16")
    parser.add_argument("--limits", default="8,96", help="smallest and largest number of new tokens")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    settings = parser.parse_args(arguments)
    target, draft = (jaxspec.load(name, dtype="float32") for name in (settings.target, settings.draft))
    texts = [row["input"] for row in corpus.heldout(corpus.tasks_of(target)[0])][: settings.prompts]
    least, most = map(int, settings.limits.split(","))
    # Long rows are few, as in data sets: the logarithm of a limit is uniform.
    limits = np.exp(np.random.default_rng(0).uniform(np.log(least), np.log(most), len(texts))).astype(np.int32)
    table = Table(*("slots", "decoding", "fixed batches", "idle", "refilled", "idle", "ratio", "same texts"))
    for size in map(int, settings.slots.split(",")):
        for name, drafter in (("plain", None), ("speculative", draft)):
            # No end tokens, so that both sides have the given lengths to decode.
            options = dict(drafter=drafter, gamma=settings.gamma, eos_ids=())
            ways = {"fixed": fixed, "refilled": refilled}
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            outcomes = {way: decode(target, texts, limits, size, **options) for way, decode in ways.items()}  # compiles
            for _ in range(settings.repeats):
                for way, decode in ways.items():
                    began = time.perf_counter()
                    decode(target, texts, limits, size, **options)
                    seconds[way].append(time.perf_counter() - began)
            tokens = sum(map(len, outcomes["fixed"][0]))
            rates = {way: sorted(tokens / s for s in seconds[way]) for way in ways}
            shown = {way: f"{statistics.median(r):,.0f} ({r[0]:,.0f} to {r[-1]:,.0f})" for way, r in rates.items()}
            ratios = sorted(a / b for a, b in zip(seconds["fixed"], seconds["refilled"], strict=True))
            table.add_row(
                *(str(size), name, shown["fixed"], f"{outcomes['fixed'][1]:.0%}"),
                *(shown["refilled"], f"{outcomes['refilled'][1]:.0%}"),
                *(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",),
                str(outcomes["fixed"][0] == outcomes["refilled"][0]),
            )
    Console().print(f"{len(texts)} prompts, {int(limits.sum()):,} new tokens; tokens a second", table, sep="\n")


if __name__ == "__main__":
    main()
