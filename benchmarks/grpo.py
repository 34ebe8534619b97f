"""GRPO (docs/grpo.py) with and without speculation: steps an hour, and tokens a round as the policy
moves.

    python -m benchmarks.grpo

At every step the same policy answers the same prompts once by each way of drafting, one after the
other, so that all of them see the same machine and the same policy. The policy then learns from the
answers of the first way in `--ways`, with which the others are compared. The samples of all have
the same distribution. Ways of drafting:

- none: plain decoding;
- frozen: the draft model as it was before training;
- learns: the same, taught after each step by the step's answers (`jaxspec.training.online`);
- suffix: no model; it copies from the row and from the answers of the last steps.

It prints a line for each part of the run and the totals, as the page has them, and `--json FILE`
writes every step. Steps after the first of each way count: the first compiles.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import statistics
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax

import jaxspec
from jaxspec import drafters
from jaxspec.core import token_rows
from jaxspec.files import corpus
from jaxspec.training import online

SOURCE = Path(__file__).resolve().parents[1] / "docs" / "grpo.py"
WAYS = ("none", "frozen", "learns", "suffix")
EARLIER = 4096  # tokens of earlier answers that suffix searches


def grpo() -> ModuleType:
    """docs/grpo.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("grpo", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="debian-gpt-base")
    parser.add_argument("--draft", default="debian-gpt-small")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="answers of each prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-4, help="the policy's learning rate")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--parts", type=int, default=4, help="lines of the table")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class Drafting:
    """The four ways of drafting, and what they remember from step to step."""

    def __init__(self, draft: jaxspec.Model, options: argparse.Namespace):
        self._draft = draft
        self._earlier: collections.deque[list[int]] = collections.deque()
        self._learner = online(
            draft,
            optimizer=optax.adam(1e-3),
            max_prompt=options.prompt_tokens,
            max_new_tokens=options.new,
            steps=2,
        )
        self._learnt = self._learner.init()

    def drafter(self, way: str) -> Any:
        """Returns what `generate` takes as the drafter."""
        if way == "learns":
            return self._learner.drafter(self._learnt)
        if way == "suffix":
            return drafters.suffix(texts=list(self._earlier), room=2 * EARLIER)
        return self._draft if way == "frozen" else None

    def update(self, way: str, policy: jaxspec.Model, prompts: jaxspec.Prompt, out: Any) -> None:
        """Shows a step's answers to a way that learns from them."""
        if way == "learns":
            self._learnt = self._learner.update(self._learnt, policy, prompts, out)[0]
        if way == "suffix":
            texts = zip(out.tokens, out.lengths, strict=True)
            self._earlier.extend(row[:length].tolist() for row, length in texts)
            while sum(map(len, self._earlier)) > EARLIER:
                self._earlier.popleft()


def batches(policy: jaxspec.Model, options: argparse.Namespace) -> list[jaxspec.Prompt]:
    """Prompts of equal length, the beginnings of held-out descriptions."""
    texts = [entry["input"] for entry in corpus.heldout("text")]
    rows = [policy.tokenizer(text)["input_ids"][: options.prompt_tokens] for text in texts]
    rows = [row for row in rows if len(row) == options.prompt_tokens]
    count = len(rows) // options.prompts
    return [
        token_rows.pad(rows[i * options.prompts : (i + 1) * options.prompts]) for i in range(count)
    ]


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains; returns a row for each step: the reward, seconds of learning, and of each way its
    seconds and tokens a round.
    """
    module = grpo()
    policy, draft = jaxspec.load(options.policy), jaxspec.load(options.draft)
    optimizer = optax.adam(options.rate)
    state = optimizer.init(policy.params)
    drafting = Drafting(draft, options)
    prompts_of_steps = batches(policy, options)
    steps = []
    for step in range(options.steps):
        prompts = prompts_of_steps[step % len(prompts_of_steps)]
        row: dict[str, Any] = {"step": step}
        first = None
        # Each way is first as often as any other.
        shift = step % len(options.ways)
        for way in (*options.ways[shift:], *options.ways[:shift]):
            key = jax.random.fold_in(jax.random.key(step), WAYS.index(way))
            began = time.perf_counter()
            out = module.rollouts(
                policy, prompts, drafting.drafter(way), key, options.samples, options.new
            )
            drafting.update(way, policy, prompts, out)
            row[way] = time.perf_counter() - began
            emitted = out.stats.emitted.sum() - len(out.stats.emitted)  # prefill made one a row
            row[f"{way}, tokens"] = float(emitted / out.stats.rounds.sum())
            if way == options.ways[0]:
                first = out
        began = time.perf_counter()
        policy, state, row["reward"] = module.learn(
            policy, optimizer, state, prompts, first, options.samples
        )
        jax.block_until_ready(policy.params)
        row["learn"] = time.perf_counter() - began
        row["reward"] = float(row["reward"])
        steps.append(row)
    return steps


def table(steps: list[dict[str, Any]], ways: list[str], parts: int) -> str:
    """Formats a run as Markdown: rewards and tokens a round by part, then steps an hour."""
    lines = ["| steps | reward | " + " | ".join(f"{way}: tokens a round" for way in ways) + " |"]
    lines.append("|---" * (2 + len(ways)) + "|")
    for part in np.array_split(np.arange(len(steps)), parts):
        rows = [steps[i] for i in part]
        cells = [f"{part[0] + 1} to {part[-1] + 1}"]
        cells.append(f"{statistics.mean(row['reward'] for row in rows):.2f}")
        for way in ways:
            cells.append(f"{statistics.mean(row[f'{way}, tokens'] for row in rows):.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    compiled = steps[1:]
    plain = [row[ways[0]] + row["learn"] for row in compiled]
    lines += [
        "",
        f"| drafter | steps an hour | over {ways[0]} | rollouts alone |",
        "|---|---|---|---|",
    ]
    for way in ways:
        whole = [row[way] + row["learn"] for row in compiled]
        ratios = [a / b for a, b in zip(plain, whole, strict=True)]
        rollouts = [row[ways[0]] / row[way] for row in compiled]
        hourly = 3600 / statistics.median(whole)
        lines.append(f"| {way} | {hourly:.0f} | {spread(ratios)} | {spread(rollouts)} |")
    return "\n".join(lines)


def spread(ratios: list[float]) -> str:
    """The median of ratios, with their quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    options = arguments()
    steps = run(options)
    print(table(steps, list(options.ways), options.parts))
    if options.json is not None:
        options.json.write_text(json.dumps(steps), encoding="utf-8")


if __name__ == "__main__":
    main()
