"""What a job costs beside its rounds, and what it saves to prefill prompts before a slot is free.

    python -m benchmarks.job_overhead --prompts 400 --slots 16 --limits 8,96

Any machine that nothing else uses: differences of times are printed. On two cores of a CPU some
minutes.

Of the same prompts there are, in turn: the job (`generate_many`), and the job with each group of
prompts prefilled when slots for it are free, not before. Beside them stand the rounds of the job as
one program: a program that decodes in all slots for as many rounds as the longest row has, of which
the time of one round is taken. The difference to the job, over its rounds and over its rows, is all
that is no round: prefill, putting rows into slots, reading prompts, looking at slots, making texts.
Prefill and putting rows into slots are also timed by themselves; what is left is the host's, which
may be less than nothing where the two overlap, as on an accelerator. What `jaxspec batch` takes to
put a row with its tokens into files, journal and chunks, is in a column of its own: no job here
writes any.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxspec
from benchmarks.jobs import prompts_and_limits
from benchmarks.synthetic import widened
from jaxspec.analysis import cost
from jaxspec.analysis.statistics import Spread
from jaxspec.core import Model
from jaxspec.decode.request import Prepared, prepare
from jaxspec.jobs import Completion, Progress, many
from jaxspec.jobs.chunks import Chunks
from jaxspec.jobs.files import InputShard, Output
from jaxspec.jobs.slots import Row, Slots


class Work(NamedTuple):
    """A job: models and prompts, and how they are decoded.

    Attributes:
        target, drafter: the models; without a drafter decoding is plain.
        prompts, limits: the ids of each row, and its number of new tokens.
        slots, gamma: options of `generate_many`.
    """

    target: Model
    drafter: Model | None
    prompts: list[list[int]]
    limits: np.ndarray
    slots: int
    gamma: int

    @property
    def options(self) -> dict[str, Any]:
        """What job and single program share."""
        most = int(self.limits.max())
        return dict(drafter=self.drafter, gamma=self.gamma, max_new_tokens=most, eos_ids=())

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))


class LateSlots(Slots):
    """Slots whose rows are prefilled when they are put into them, and not while others are
    decoded.
    """

    def prefill(self, rows: Any) -> Any:
        """Returns the rows as they are."""
        return rows

    def insert(self, new: Any, slots: Any) -> None:
        """Computes the state of rows, and puts it into slots."""
        super().insert(super().prefill(new), slots)


def run_job(work: Work, *, ahead: bool) -> Progress:
    """Runs the job, and returns its counts."""
    requests = [
        {"prompt": p, "max_new_tokens": int(n)}
        for p, n in zip(work.prompts, work.limits, strict=True)
    ]
    seen = [Progress()]
    with mock.patch.object(many, "Slots", Slots if ahead else LateSlots):
        job = jaxspec.generate_many(
            work.target,
            requests,
            slots=work.slots,
            max_prompt_tokens=work.longest,
            progress=seen.append,
            **work.options,
        )
        for _ in job:
            pass
    return seen[-1]


def seconds_of_a_round(work: Work, prepared: Prepared, repeats: int) -> float:
    """Times a round of all slots within one program that runs as many as the longest text needs;
    the least of some.
    """
    most, taken = int(work.limits.max()), []
    slots = Slots(prepared, prepared.widths(work.longest)[0], work.slots, work.slots, most)
    rows = rows_of(work, most)[: work.slots]
    for _ in range(repeats + 1):  # the first compiles
        slots.insert(slots.prefill(rows), range(len(rows)))
        jax.block_until_ready(slots._state)
        began = time.perf_counter()
        report = jax.block_until_ready(slots.run(work.slots))  # until all are done
        seconds = time.perf_counter() - began
        taken.append(seconds / int(np.any(np.asarray(report.rounds.committed) > 0, axis=1).sum()))
    return min(taken[1:])


def seconds_of_prefill(work: Work, prepared: Prepared, repeats: int) -> tuple[float, float]:
    """Times prefill of a group, and putting it into slots: the least of some, the mean over
    groups.
    """
    group = max(1, work.slots // 4)
    slots = Slots(prepared, prepared.widths(work.longest)[0], work.slots, group, many.ROUNDS)
    rows = rows_of(work)
    groups = [rows[first : first + group] for first in range(0, min(len(rows), 8 * group), group)]
    made = dict[int, Any]()

    def prefill(index: int) -> None:
        made[index] = jax.block_until_ready(slots.prefill(groups[index]))

    def insert(index: int) -> None:
        slots.insert(made.pop(index), range(len(groups[index])))
        jax.block_until_ready(slots._state)

    calls = [
        functools.partial(call, index) for index in range(len(groups)) for call in (prefill, insert)
    ]
    cost.interleave(calls, 1)  # compiles
    seconds = cost.interleave(calls, repeats).min(axis=1).reshape(-1, 2).mean(axis=0)
    return float(seconds[0]), float(seconds[1])


def seconds_of_files(work: Work, chunk: int = 256) -> float:
    """Times what it takes to put a row into its journal, and all into chunks in the end; the mean
    over the job's.
    """
    lengths = enumerate(zip(work.prompts, work.limits, strict=True))
    rows = [
        Completion(n, n, None, [9999] * int(new), "length", len(ids)).to_dict()
        for n, (ids, new) in lengths
    ]
    with tempfile.TemporaryDirectory() as folder:
        output = Output(Path(folder), InputShard(), chunk)
        with contextlib.closing(Chunks(output, len(rows))) as chunks:
            began = time.perf_counter()
            for row in rows:
                chunks.add(row)
            return (time.perf_counter() - began) / len(rows)


def rows_of(work: Work, limit: int | None = None) -> list[Row]:
    """Lists the job's rows, perhaps all with one limit."""
    pairs = enumerate(zip(work.prompts, work.limits, strict=True))
    return [
        Row(number, ids, int(its_limit) if limit is None else limit)
        for number, (ids, its_limit) in pairs
    ]


def measure(work: Work, repeats: int) -> dict[str, str]:
    """Times a job in both ways, and what it consists of; returns a row of a table."""
    prepared = prepare(work.target, [[0]], **work.options)
    counts = run_job(work, ahead=True)  # compiles
    a_round = seconds_of_a_round(work, prepared, repeats)
    prefill, put = seconds_of_prefill(work, prepared, repeats)
    ways = [functools.partial(run_job, work, ahead=ahead) for ahead in (True, False)]
    ways[1]()  # nothing new is compiled, but it is the first
    ahead, late = cost.interleave(ways, repeats)
    rounds, rows = (counts.rounds + counts.idle) // work.slots, len(work.prompts)
    beside = ahead - a_round * rounds
    groups = -(-rows // max(1, work.slots // 4))
    host, saved = beside - groups * (prefill + put), Spread.of(100 * (late / ahead - 1))
    shown = Spread.of(ahead)
    return {
        "rounds": f"{rounds:,}",
        "job, s": f"{shown.median:.2f} ({shown.min:.2f} to {shown.max:.2f})",
        "rounds alone, s": f"{a_round * rounds:.2f}",
        "beside them: μs a round": f"{1e6 * np.median(beside) / rounds:,.0f}",
        "μs a row": f"{1e6 * np.median(beside) / rows:,.0f}",
        "of a row: prefill": f"{1e6 * groups * prefill / rows:,.0f}",
        "into slots": f"{1e6 * groups * put / rows:,.0f}",
        "host": f"{1e6 * np.median(host) / rows:,.0f}",
        "into files": f"{1e6 * min(seconds_of_files(work) for _ in range(repeats)):,.0f}",
        "prefill when a slot is free": f"{saved.median:+.1f}% ({saved.min:+.1f}% to "
        f"{saved.max:+.1f}%)",
    }


def main(arguments: list[str] | None = None) -> None:
    """Prints a table with a line for each number of slots and kind of decoding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="debian-t5-large")
    parser.add_argument("--draft", default="debian-t5-draft")
    parser.add_argument(
        "--units", type=int, help="widen the target's feed-forward blocks to so many"
    )
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--slots", default="8,16")
    parser.add_argument(
        "--limits", default="8,96", help="smallest and largest number of new tokens"
    )
    parser.add_argument("--decoding", default="plain,speculative")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    settings = parser.parse_args(arguments)
    target, draft = (
        jaxspec.load(name, dtype="float32") for name in (settings.target, settings.draft)
    )
    if settings.units is not None:
        target = widened(target, settings.units)
    prompts, limits = prompts_and_limits(
        target, settings.prompts, *map(int, settings.limits.split(","))
    )
    table = Table("slots", "decoding")
    for slots, name in itertools.product(settings.slots.split(","), settings.decoding.split(",")):
        drafter = {"plain": None, "speculative": draft}[name]
        cells = measure(
            Work(target, drafter, prompts, limits, int(slots), settings.gamma), settings.repeats
        )
        if not table.rows:
            for head in cells:
                table.add_column(head)
        table.add_row(slots, name, *cells.values())
    Console(width=200).print(
        f"{len(prompts)} prompts, {int(limits.sum()):,} new tokens", table, sep="\n"
    )


if __name__ == "__main__":
    main()
