"""A long job of short prompts: whether memory and throughput stay as they are, and whether anything
is compiled late.

    python -m benchmarks.long_job --prompts 100000

Any machine; half a minute on two cores. The models are tiny and random, which makes a prompt cheap:
what a job keeps of each prompt, if it keeps anything, is then as large beside the rest as it can
be.

A line is printed for every so many prompts: new tokens a second, and a second of the processor,
which other programs disturb less; the process' resident memory; the arrays that are alive on the
device, and their bytes; programs compiled since the process began. In the end each of these is
compared between the two halves of the job, the first line left out, in which all is compiled.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.monitoring
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

import jaxspec
from jaxspec import Model
from jaxspec.nets import decoder

MOST_PROMPT, MOST_NEW = 30, 16
GROWTH = 1.05  # of memory, from the first half to the second, that still counts as flat
SLOWER = 0.9  # tokens a second of the processor, in the same way


class Sample(NamedTuple):
    """A job at one moment.

    Attributes:
        done: prompts.
        tokens: new ones, since the last sample.
        seconds, processor_seconds: since the last sample.
        resident: bytes of the process.
        arrays, array_bytes: the arrays that are alive on the device, and their bytes.
        compiled: programs, since the process began.
    """

    done: int
    tokens: int
    seconds: float
    processor_seconds: float
    resident: int
    arrays: int
    array_bytes: int
    compiled: int

    @property
    def rate(self) -> float:
        """New tokens a second of the processor."""
        return self.tokens / max(self.processor_seconds, 1e-9)


def random_model(dim: int, seed: int, vocab: int = 256) -> Model:
    """Returns a small GPT with random weights."""
    config = decoder.gpt_config(
        vocab, dim, ff_dim=2 * dim, layers=1, heads=2, max_positions=MOST_PROMPT + MOST_NEW
    )
    return Model(
        decoder.language_model(config), decoder.init(config, jax.random.key(seed)), None, config
    )


def requests(count: int, vocab: int) -> Iterator[dict[str, Any]]:
    """Yields prompts of 1 to 30 tokens, for 1 to 16 new ones."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        length, new = rng.integers(1, MOST_PROMPT + 1), rng.integers(1, MOST_NEW + 1)
        yield {"prompt": rng.integers(0, vocab, length).tolist(), "max_new_tokens": int(new)}


def samples(
    target: Model, drafter: Model | None, count: int, every: int, **options: Any
) -> Iterator[Sample]:
    """Runs a job, and looks at it each time that so many prompts are done, and at its end.

    Args:
        target, drafter: the models.
        count: prompts.
        every: the number of prompts between two samples.
        **options: options of `generate_many`.
    """
    counter, process = compilations(), psutil.Process()
    prompts = requests(count, target.lm.vocab_size)
    sizes: dict[str, Any] = dict(max_new_tokens=MOST_NEW, max_prompt_tokens=MOST_PROMPT, eos_ids=())
    done, tokens, clocks = 0, 0, (time.perf_counter(), time.process_time())
    for row in jaxspec.generate_many(target, prompts, drafter=drafter, **sizes, **options):
        done, tokens = done + 1, tokens + len(row.tokens)
        if done % every and done < count:
            continue
        now = time.perf_counter(), time.process_time()
        seconds, processor_seconds = now[0] - clocks[0], now[1] - clocks[1]
        # not the arrays: they would then stay alive
        sizes_alive = [array.nbytes for array in jax.live_arrays()]
        yield Sample(
            done=done,
            tokens=tokens,
            seconds=seconds,
            processor_seconds=processor_seconds,
            resident=process.memory_info().rss,
            arrays=len(sizes_alive),
            array_bytes=sum(sizes_alive),
            compiled=counter["compiled"],
        )
        tokens, clocks = 0, now


@functools.cache
def compilations() -> dict[str, int]:
    """Counts, from the first call on, the programs that are compiled, or read from jax's cache on
    disk.
    """
    counter = {"compiled": 0}

    def listen(event: str, *_: Any, **__: Any) -> None:
        counter["compiled"] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counter


def verdicts(job: list[Sample]) -> list[tuple[str, bool, str]]:
    """Compares the second half of a job with the first, but for its first sample: what, whether it
    is flat, numbers.
    """
    steady = job[1:]
    if len(steady) < 2:
        raise ValueError(
            f"a job of {len(job)} samples has no two halves after the first: take more prompts"
        )
    earlier, later = steady[: len(steady) // 2], steady[len(steady) // 2 :]

    def largest(name: str) -> tuple[int, int]:
        first, last = (max(getattr(sample, name) for sample in half) for half in (earlier, later))
        return first, last

    rows = []
    for name, words, unit in (
        ("resident", "host memory", 10**6),
        ("arrays", "live arrays", 1),
        ("array_bytes", "device memory", 10**6),
    ):
        first, last = largest(name)
        shown = f"{first / unit:,.4g} and {last / unit:,.4g}" + (" MB" if unit > 1 else "")
        rows.append((words, last <= GROWTH * first, f"{shown} at most"))
    # other programs only make it lower
    rates = [max(sample.rate for sample in half) for half in (earlier, later)]
    words = f"{rates[0]:,.0f} and {rates[1]:,.0f} tokens a second of the processor at most"
    rows.append(("throughput", rates[1] >= SLOWER * rates[0], words))
    late = job[-1].compiled - job[0].compiled
    rows.append(("compilations", late == 0, f"{late} after the first {job[0].done:,} prompts"))
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Prints a table with a line for each sample, then whether each of its columns is flat; exits
    with 1 if not.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument(
        "--every", type=int, help="prompts to a line; by default a twentieth of them"
    )
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument(
        "--gamma", type=int, default=3, help="draft tokens a round; 0: plain decoding"
    )
    parser.add_argument(
        "--dim", type=int, default=32, help="of the target; the drafter has half of it"
    )
    settings = parser.parse_args(arguments)
    target = random_model(settings.dim, seed=0)
    drafter = random_model(max(2, settings.dim // 2), seed=1) if settings.gamma else None
    every = settings.every or max(1, settings.prompts // 20)
    options = dict(slots=settings.slots, gamma=settings.gamma)
    console, job = Console(highlight=False), []
    console.print("prompts  tokens/s  per processor s  host MB  arrays  device MB  compiled")
    for sample in samples(target, drafter, settings.prompts, every, **options):
        job.append(sample)
        console.print(
            f"{sample.done:7,}  {sample.tokens / sample.seconds:8,.0f}  {sample.rate:15,.0f}  "
            f"{sample.resident / 1e6:7,.0f}  {sample.arrays:6}  {sample.array_bytes / 1e6:9.2f}  "
            f"{sample.compiled:8}"
        )
    table = Table("", "flat", "first half, second half")
    results = verdicts(job)
    for words, is_flat, numbers in results:
        table.add_row(words, "yes" if is_flat else "NO", numbers)
    console.print(table)
    raise SystemExit(not all(is_flat for _, is_flat, _ in results))


if __name__ == "__main__":
    main()
