"""Batches of several sizes: plain decoding, a fixed gamma, and `policies.adaptive` with all rows
deciding together.

    python -m benchmarks.batch_sizes --target debian-t5-base --draft debian-t5-small --units 9216
    python -m benchmarks.batch_sizes --target debian-gpt-base --draft debian-gpt-small --units 24576

Any machine; some 8 minutes each on two quiet cores of a CPU. The policy is given what rounds over
that batch cost, measured before (`analysis.cost`). With `--units` the target's feed-forward blocks
are widened, since pairs as small as those shipped have nothing to gain on a CPU. Greedily, to the
full length, interleaved. Printed are new tokens a second of plain decoding and the others' speed
over it (median and range over the repeats), draft tokens and tokens of a round, and how many texts
are those of plain decoding.
"""

from __future__ import annotations

import argparse
import functools
import itertools

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxspec
from benchmarks.synthetic import widened
from jaxspec import policies
from jaxspec.analysis.cost import agreement, interleave, policy_costs, run_all
from jaxspec.analysis.statistics import Spread
from jaxspec.core import Model
from jaxspec.decode import batches
from jaxspec.decode.request import prepare
from jaxspec.files import corpus


def measure(
    target: Model,
    draft: Model,
    texts: list[str],
    gammas: list[int],
    most: int,
    new: int,
    repeats: int,
) -> list[tuple[str, ...]]:
    """Decodes one batch of texts in all ways; returns rows of a table."""
    prepared = prepare(target, texts, drafter=draft, gamma=most, max_new_tokens=new, eos_ids=())
    c, v = policy_costs(prepared, repeats=repeats)
    ways = {"plain": prepared.plain()}
    ways |= {f"γ = {gamma}": prepared.replace(gamma=gamma) for gamma in gammas}
    ways[f"adaptive, at most {most}"] = prepared.replace(
        policy=policies.adaptive(c, v, together=agreement("batch", len(texts), False, None))
    )
    outcomes = {way: batches.run(side) for way, side in ways.items()}  # compiles
    seconds = interleave([functools.partial(run_all, [side]) for side in ways.values()], repeats)
    expected, table = batches.texts([outcomes["plain"]]), []
    for (way, outcome), took in zip(outcomes.items(), seconds, strict=True):
        rate, ratio = Spread.of(new * len(texts) / took), Spread.of(seconds[0] / took)
        stats, rows = jax.tree.map(np.sum, outcome.stats), batches.texts([outcome])
        table.append(
            (
                str(len(texts)),
                way,
                f"{rate.median:,.0f}",
                f"{ratio.median:.2f} ({ratio.min:.2f} to {ratio.max:.2f})",
                f"{stats.drafted / stats.rounds:.2f}",
                f"{(stats.emitted - len(texts)) / stats.rounds:.2f}",
                f"{sum(a == b for a, b in zip(rows, expected, strict=True))} of {len(rows)}",
            )
        )
    costs = ", ".join(f"{value:.2f}" for value in v)
    return [*table, (str(len(texts)), f"c = {c:.3f}", "v:", costs, "", "", "")]


def main(arguments: list[str] | None = None) -> None:
    """Prints a table with some lines for each size of a batch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="debian-t5-base")
    parser.add_argument("--draft", default="debian-t5-small")
    parser.add_argument(
        "--units", type=int, help="widen the target's feed-forward blocks to so many"
    )
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--gammas", default="3", help="fixed ones")
    parser.add_argument(
        "--most", type=int, default=7, help="draft tokens a round that the policy may choose"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    settings = parser.parse_args(arguments)
    target, draft = (
        jaxspec.load(name, dtype="float32") for name in (settings.target, settings.draft)
    )
    if settings.units is not None:
        target = widened(target, settings.units)
    texts = [row["input"] for row in corpus.heldout(corpus.tasks_of(target)[0])]
    gammas = list(map(int, settings.gammas.split(",")))
    table = Table(
        "batch",
        "decoding",
        "tokens/s",
        "over plain",
        "drafted a round",
        "tokens a round",
        "same texts",
    )
    for batch in map(int, settings.batches.split(",")):
        rows = list(itertools.islice(itertools.cycle(texts), batch))
        for line in measure(
            target, draft, rows, gammas, settings.most, settings.max_new_tokens, settings.repeats
        ):
            table.add_row(*line)
    size = sum(leaf.size for leaf in jax.tree.leaves(target.params)) / 1e6
    Console().print(
        f"{settings.target}, {size:.0f}M parameters, and {settings.draft}; {jax.devices()[0]}",
        table,
        sep="\n",
    )


if __name__ == "__main__":
    main()
