"""A job in refilled slots against fixed batches of the same size, on held-out prompts with limits
of many lengths.

    python -m benchmarks.jobs --prompts 1000 --slots 8 --limits 8,400 --decoding plain
    --transformers

Any machine. On two quiet cores of a CPU some 8 minutes; half as many for `--decoding speculative`,
which transformers refuses for batches. A target that is wider (`--units 9216`, see
`benchmarks.synthetic`) is so much slower: fewer prompts will do.

`--decoding adaptive` compares other things: refilled slots that decode plainly, with a fixed gamma,
and with `policies.adaptive(together="slots")`, told what rounds over so many rows cost.

All sides decode the same prompts with the same limits and no end tokens: fixed batches, refilled
slots, and, with `--transformers`, that library's `generate` on the same batches, in PyTorch,
eagerly, as it is. A fixed batch ends with its longest row. The prompts are cut into parts, which
the sides decode in turn, so that a busy machine slows all. Printed are new tokens a second and the
ratio to fixed batches (median and range over the parts), the share of the rounds of rows or slots
that had nothing to decode, and how many texts are those of fixed batches. Where a limit is beyond
what a position table has, the prompt is left out.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxspec
from benchmarks import peer
from benchmarks.synthetic import widened
from jaxspec import policies
from jaxspec.analysis import environment
from jaxspec.analysis.cost import policy_costs
from jaxspec.analysis.statistics import Spread
from jaxspec.core import Model, token_rows
from jaxspec.decode import batches
from jaxspec.decode.request import Prepared, prepare
from jaxspec.files import corpus
from jaxspec.jobs import Progress


class Decoded(NamedTuple):
    """The texts of a job, the rounds of rows that made them, and those of rows or slots that had
    nothing to decode.
    """

    rows: list[list[int]]
    used: int
    idle: int


def fixed(prepared: Prepared, size: int) -> Decoded:
    """Decodes in batches of a fixed size."""
    rows, used, total = list[list[int]](), 0, 0
    for part in batches.in_batches(prepared, size):
        outcome = batches.run(part.prepared)
        rows += batches.texts([outcome])[: part.real]
        rounds = np.asarray(outcome.stats.rounds)
        used, total = used + int(rounds[: part.real].sum()), total + int(rounds.max()) * size
    return Decoded(rows, used, total - used)


def refilled(prepared: Prepared, size: int, most: int, longest: int) -> Decoded:
    """Decodes in slots, made for prompts and texts of at most so many tokens."""
    prompts = token_rows.to_lists(prepared.prompt.tokens, prepared.prompt.length)
    limits, seen = np.asarray(prepared.request.max_new_tokens).tolist(), [Progress()]
    requests = [
        {"prompt": ids, "max_new_tokens": limit} for ids, limit in zip(prompts, limits, strict=True)
    ]
    options = {
        name: getattr(prepared.options, name) for name in ("drafter", "gamma", "policy", "eos_ids")
    }
    job = jaxspec.generate_many(
        prepared.target,
        requests,
        slots=size,
        max_new_tokens=most,
        max_prompt_tokens=longest,
        in_order=True,
        progress=seen.append,
        **options,
    )
    return Decoded([row.tokens for row in job], seen[-1].rounds, seen[-1].idle)


def transformers(prepared: Prepared, size: int, folder: Path) -> Decoded:
    """Decodes batches with transformers, plainly: each until its longest row is done."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or environment.current().cpus or 1))
    module, left = (
        peer.exported(prepared.target, folder),
        prepared.target.lm.limits.start_token is None,
    )
    module.generation_config.eos_token_id = None
    rows, used, total = list[list[int]](), 0, 0
    for part in batches.in_batches(prepared, size):
        limits = np.asarray(part.prepared.request.max_new_tokens)[: part.real].tolist()
        texts = peer.decode_rows(module, peer.inputs(part.prepared.prompt, left), max(limits), dict)
        rows += [text[:limit] for text, limit in zip(texts, limits, strict=False)]
        used, total = used + sum(limits) - len(limits), total + (max(limits) - 1) * size
    return Decoded(rows, used, total - used)


def compare(
    prepared: Prepared, ways: dict[str, Callable[[Prepared], Decoded]], parts: int
) -> list[tuple[str, str, str, str, str]]:
    """Decodes part after part in all ways, the first of which the others are compared with; returns
    rows of a table.
    """
    # Limits of 1 but one, which keeps the sizes of buffers: programs are compiled for each width of
    # prompts, and run.
    limits = np.asarray(prepared.request.max_new_tokens)
    short = prepared._replace(
        request=prepared.request._replace(
            max_new_tokens=jnp.where(jnp.arange(len(limits)) == limits.argmax(), limits, 1)
        )
    )
    of_part = np.array_split(np.arange(len(limits)), parts)
    # gathering rows is compiled, too
    by_size = {len(rows): batches.take(short, rows) for rows in of_part}
    for decode, warm in itertools.product(ways.values(), (short, *by_size.values())):
        decode(warm)
    results = {way: list[Decoded]() for way in ways}
    seconds = {way: list[float]() for way in ways}
    for rows in of_part:
        part = batches.take(prepared, rows)
        for way, decode in ways.items():
            began = time.perf_counter()
            results[way].append(decode(part))
            seconds[way].append(time.perf_counter() - began)
    base, table = next(iter(ways)), []
    expected = [row for result in results[base] for row in result.rows]
    for way in ways:
        rows = [row for result in results[way] for row in result.rows]
        tokens = np.array([sum(map(len, result.rows)) for result in results[way]])
        idle, used = (
            sum(getattr(result, name) for result in results[way]) for name in ("idle", "used")
        )
        rate = Spread.of(tokens / np.array(seconds[way]))
        ratio = Spread.of(np.array(seconds[base]) / np.array(seconds[way]))
        same = sum(a == b for a, b in zip(rows, expected, strict=True))
        table.append(
            (
                way,
                f"{rate.median:,.0f} ({rate.min:,.0f} to {rate.max:,.0f})",
                f"{idle / max(1, idle + used):.0%}",
                f"{ratio.median:.2f} ({ratio.min:.2f} to {ratio.max:.2f})",
                f"{same} of {len(rows)}",
            )
        )
    return table


def prompts_and_limits(
    target: Model, count: int, least: int, most: int
) -> tuple[list[list[int]], np.ndarray]:
    """Takes held-out prompts of all tasks that the target is for, again from the beginning where
    there are too few.
    """
    texts = [row["input"] for task in corpus.tasks_of(target) for row in corpus.heldout(task)]
    ids = target.tokenizer(list(itertools.islice(itertools.cycle(texts), count)))["input_ids"]
    # Long rows are few, as in data sets: the logarithm of a limit is uniform.
    limits = np.exp(
        np.random.default_rng(0).uniform(np.log(least), np.log(most + 1), count)
    ).astype(np.int32)
    room = target.lm.limits.max_positions if target.lm.limits.start_token is None else None
    fits = [
        room is None or len(row) + limit <= room for row, limit in zip(ids, limits, strict=True)
    ]
    return [row for row, fit in zip(ids, fits, strict=True) if fit], limits[np.array(fits)]


def main(arguments: list[str] | None = None) -> None:
    """Prints a table with a line for each number of slots, kind of decoding and side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="debian-t5-large")
    parser.add_argument("--draft", default="debian-t5-draft")
    parser.add_argument(
        "--units", type=int, help="widen the target's feed-forward blocks to so many"
    )
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--slots", default="8,16")
    parser.add_argument(
        "--limits", default="8,96", help="smallest and largest number of new tokens"
    )
    parser.add_argument("--decoding", default="plain,speculative", help="also: adaptive")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument(
        "--parts", type=int, default=4, help="of the prompts, which the sides decode in turn"
    )
    parser.add_argument(
        "--transformers", action="store_true", help="decode plainly with that library, too"
    )
    settings = parser.parse_args(arguments)
    target, draft = (
        jaxspec.load(name, dtype="float32") for name in (settings.target, settings.draft)
    )
    if settings.units is not None:
        target = widened(target, settings.units)
    if settings.transformers:
        peer.check()
    ids, limits = prompts_and_limits(
        target, settings.prompts, *map(int, settings.limits.split(","))
    )
    table = Table("slots", "decoding", "side", "tokens/s", "idle", "over the first", "same texts")
    with tempfile.TemporaryDirectory() as folder:
        for slots, name in itertools.product(
            settings.slots.split(","), settings.decoding.split(",")
        ):
            size = int(slots)
            drafter = {"plain": None, "speculative": draft, "adaptive": draft}[name]
            prepared = prepare(
                target,
                ids,
                drafter=drafter,
                gamma=settings.gamma,
                max_new_tokens=limits,
                eos_ids=(),
            )
            refill = functools.partial(
                refilled, size=size, most=int(limits.max()), longest=max(map(len, ids))
            )
            ways = {"fixed batches": functools.partial(fixed, size=size), "refilled slots": refill}
            if name == "adaptive":
                costs = policy_costs(batches.take(prepared, np.arange(size)), repeats=5)
                together = policies.adaptive(*costs, together="slots")
                ways = {
                    "plain": lambda part, refill=refill: refill(part.plain()),
                    f"γ = {settings.gamma}": refill,
                    "adaptive": lambda part, refill=refill, policy=together: refill(
                        part.replace(policy=policy)
                    ),
                }
            if settings.transformers and drafter is None:
                ways["transformers"] = functools.partial(
                    transformers, size=size, folder=Path(folder)
                )
            for row in compare(prepared, ways, settings.parts):
                table.add_row(slots, name, *row)
    Console().print(
        f"{len(ids)} prompts, {int(limits.sum()):,} new tokens, {settings.parts} parts",
        table,
        sep="\n",
    )


if __name__ == "__main__":
    main()
