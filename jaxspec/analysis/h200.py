"""The paper's speed-ups at the paper's sizes, on one accelerator: random T5-XXL and T5-small, bfloat16, batch 1.

    python -m jaxspec.analysis.h200 --json > h200.json
    python -m jaxspec.analysis.h200 --shape t5-v1_1-small --new-tokens 8 --copy-mb 16 --seeds 1 --repeats 1

The first needs about 60 GB on the device; the second is a check of the script that a CPU can run. Plain decoding is set
against the memory's floor: the bytes that a token needs (decoder weights, caches, head) over the bandwidth of a large
copy on the same device. Models of random weights agree on nothing, so acceptance is simulated at the paper's rates
(`analysis.simulated`: the text is nonsense, the time is not), and speed-ups are set beside the paper's, which were
measured on a TPU v4, and beside Theorem 3.8 with c and v as measured here. Where c is large, `--profile DIR` says why.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Tables 2 and 4.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.analysis import cost, shapes, theory
from jaxspec.analysis.estimate import spread
from jaxspec.analysis.roofline import load_of
from jaxspec.analysis.simulated import random_verdicts_for_benchmarks
from jaxspec.base import Model, Prompt
from jaxspec.decode import loop, request
from jaxspec.decode.request import Job
from jaxspec.weights import int8

CHEAP = 0.02  # the paper's c of T5-small
WIDTH = 116  # columns that the table takes
Say = Callable[[str], object]


class Setting(NamedTuple):
    """A row of the paper's Table 2: T5-XXL with T5-small."""

    task: str
    temperature: float
    gamma: int
    alpha: float
    speedup: float


TABLE_2 = (
    Setting("translation", 0.0, 7, 0.75, 3.4),
    Setting("translation", 1.0, 7, 0.62, 2.6),
    Setting("summarization", 0.0, 5, 0.65, 3.1),
    Setting("summarization", 1.0, 5, 0.53, 2.3),
)


class Ask(NamedTuple):
    """What to measure.

    Attributes:
        new_tokens: tokens to generate.
        seeds: generations of a timed turn, each with verdicts of its own.
        repeats: timed turns of each way, of which the medians count.
    """

    new_tokens: int = 128
    seeds: int = 8
    repeats: int = 5


def copy_bandwidth(size: int, repeats: int, inner: int = 20) -> np.ndarray:
    """Bytes per second that are read and written when `size` bytes are copied [repeats].

    >>> bool((copy_bandwidth(1 << 20, repeats=2, inner=2) > 0).all())
    True
    """
    state = jnp.zeros(size // 4, jnp.float32)

    @functools.partial(jax.jit, donate_argnums=0)
    def copies(x, count):
        return jax.lax.fori_loop(0, count, lambda _, y: y + 1.0, x)  # traced, or it would be one addition

    def call() -> None:
        nonlocal state
        state = copies(state, jnp.asarray(inner, jnp.int32)).block_until_ready()

    call()
    return 2 * state.nbytes * inner / cost.take_turns([call], repeats)[0]


def against_floor(target: Model, prompt: Prompt, bandwidth: float, ask: Ask) -> dict[str, Any]:
    """Plain greedy decoding against the time in which a device of this bandwidth reads what a token needs."""
    load = load_of(target.config, row=ask.new_tokens // 2, prompt=int(prompt.length[0]))
    load = load._replace(dtype=_dtype(target))
    size = load.weight_bytes + load.cache_bytes
    jobs = _jobs(target, prompt, ask._replace(seeds=1))
    calls = [functools.partial(do, jobs) for do in (cost.run_all, cost.start_all)]
    whole, first = cost.take_turns(_warm(calls), ask.repeats)
    floor = 1e3 * size / bandwidth
    each = 1e3 * (whole - first) / (ask.new_tokens - 1)
    return {
        "bytes_per_token": size,
        "floor_ms": floor,
        "token_ms": spread(each),
        "first_token_ms": spread(1e3 * first),
        "of_floor": spread(floor / each),
    }


def speedup(target: Model, draft: Model, prompt: Prompt, setting: Setting, ask: Ask) -> dict[str, Any]:
    """Speculative decoding over plain, at a row of Table 2."""
    rule = random_verdicts_for_benchmarks(setting.alpha)
    plain = _jobs(target, prompt, ask, temperature=setting.temperature)
    options: dict[str, Any] = dict(drafter=draft, gamma=setting.gamma, accept=rule)
    ours = _jobs(target, prompt, ask, temperature=setting.temperature, **options)
    outcomes = [jax.tree.map(np.asarray, loop.run(*job)) for job in ours]  # compiles
    if any(out.failed[0] or out.length[0] != ask.new_tokens for out in outcomes):
        raise FloatingPointError("random weights gave logits that are not finite: another shape or dtype may do")
    rounds = sum(int(out.stats.rounds[0]) for out in outcomes)
    accepted = sum(int(out.trace.num_accepted.sum()) for out in outcomes)
    rejected = sum(int((out.trace.num_accepted < out.trace.draft_length).sum()) for out in outcomes)
    calls = [functools.partial(do, jobs) for do in (cost.run_all, cost.start_all) for jobs in (plain, ours)]
    whole, our_whole, first, our_first = cost.take_turns(_warm(calls), ask.repeats)
    saved = ask.seeds * (ask.new_tokens - 1) / rounds
    timed: dict[str, Any] = dict(repeats=ask.repeats, max_new_tokens=ask.new_tokens, sampled=setting.temperature > 0)
    costs = cost.measure(target, draft, prompt, gamma=setting.gamma, **timed)
    return setting._asdict() | {
        "paper": setting.speedup,
        "speedup": spread(whole / our_whole),
        "speedup_after_prefill": spread((whole - first) / (our_whole - our_first)),
        "alpha_drawn": accepted / max(accepted + rejected, 1),
        "passes_saved": saved,
        "c": costs.c,
        "v": costs.v,
        "pass_ms": {"target": costs.target_ms, "verify": costs.verify_ms, "draft": costs.draft_ms},
        "theorem": float(theory.improvement(setting.alpha, setting.gamma, costs.c, costs.v)),
        "predicted_of_these_rounds": saved / (setting.gamma * costs.c + costs.v),  # of which the last may be cut
    }


def report(target: Model, draft: Model, prompt: Prompt, ask: Ask, copy_bytes: int, say: Say = lambda _: None) -> dict:
    """Everything, for JSON: "environment", the models, "copy" (bandwidth), "plain", "settings" and "memory"."""
    found: dict[str, Any] = {"environment": cost.environment(), **ask._asdict()}
    for side, model in (("target", target), ("draft", draft)):
        leaves = jax.tree.leaves(model.params)
        size = {"parameters": int8.count(model.params), "bytes": sum(x.nbytes for x in leaves)}
        found[side] = {"name": model.name, "dtype": _dtype(model), **size}
    say(f"copies of {copy_bytes / 1e6:.0f} MB")
    bandwidth = copy_bandwidth(copy_bytes, ask.repeats)
    found["copy"] = {"bytes": copy_bytes, "bytes_per_second": spread(bandwidth)}
    say("plain decoding")
    found["plain"] = against_floor(target, prompt, float(np.median(bandwidth)), ask)
    draft_bytes = load_of(draft.config)._replace(dtype=_dtype(draft)).weight_bytes
    found["draft"]["floor_ms"] = 1e3 * draft_bytes / float(np.median(bandwidth))
    found["settings"] = []
    for setting in TABLE_2:
        say(f"{setting.task} at temperature {setting.temperature:g}")
        found["settings"].append(speedup(target, draft, prompt, setting, ask))
    found["memory"] = {"device_peak": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")}
    return found


def _jobs(target: Model, prompt: Prompt, ask: Ask, **options: Any) -> list[Job]:
    """The same prompt once for each seed."""
    options |= {"max_new_tokens": ask.new_tokens, "eos_ids": ()}
    return [request.prepare(target, prompt, key=jax.random.key(seed), **options) for seed in range(ask.seeds)]


def _warm(calls: Sequence[Callable[[], None]]) -> Sequence[Callable[[], None]]:
    """The calls, each made once: what they run is compiled."""
    for call in calls:
        call()
    return calls


def table(found: dict[str, Any]) -> Table:
    """Speed-ups for a screen; of the last two columns one predicts from the rounds that were needed, one from alpha."""
    heads = ("task", "T", "γ", "α", "c", "v", "paper", "measured", "min..max", "no prefill", "rounds", "theorem")
    view = Table(*heads, box=box.ROUNDED)
    for row in found["settings"]:
        whole, after = row["speedup"], row["speedup_after_prefill"]
        how = (row["task"], f"{row['temperature']:g}", f"{row['gamma']}", f"{row['alpha']:.2f}", f"{row['c']:.3f}")
        around = f"{whole['min']:.2f}..{whole['max']:.2f}"
        got = (f"{row['paper']}×", f"{whole['median']:.2f}×", around, f"{after['median']:.2f}×")
        theory_says = (f"{row['predicted_of_these_rounds']:.2f}×", f"{row['theorem']:.2f}×")
        view.add_row(*how, f"{row['v']:.2f}", *got, *theory_says)
    return view


def notes(found: dict[str, Any]) -> list[str]:
    """The rest, in sentences."""
    plain, about, draft = found["plain"], found["environment"], found["draft"]
    each, share, copied = plain["token_ms"], plain["of_floor"], found["copy"]["bytes_per_second"]
    lines = [
        f"{found['target']['name']} and {draft['name']}, {draft['dtype']} · {about['device']} · jax {about['jax']}",
        f"Plain: {each['median']:.3f} ms a token ({each['min']:.3f}..{each['max']:.3f}); the floor is "
        f"{plain['floor_ms']:.3f} ms ({plain['bytes_per_token'] / 1e9:.2f} GB at {copied['median'] / 1e12:.2f} TB/s, a "
        f"copy of {found['copy']['bytes'] / 1e6:.0f} MB): {100 * share['median']:.0f}% of it is reached.",
    ]
    dear = max(found["settings"], key=lambda row: row["c"])
    if dear["c"] > CHEAP:
        lines.append(
            f"c is {dear['c']:.3f}, above the paper's {CHEAP}: a drafter's pass takes "
            f"{dear['pass_ms']['draft']:.3f} ms, of which reading its weights is {draft['floor_ms']:.3f}; "
            "the rest is launches and small products "
            "(--profile DIR shows them)."
        )
    peak = found["memory"]["device_peak"]
    weights = (found["target"]["bytes"] + draft["bytes"]) / 1e9
    lines.append(f"Weights {weights:.1f} GB" + (f", peak of the device {peak / 1e9:.1f} GB." if peak else "."))
    return lines


def _dtype(model: Model) -> str:
    return int8.dtype_of(model.params, model.config.dtype)


def main(
    shape: Annotated[str, typer.Option(help="The target's published shape.")] = "t5-v1_1-xxl",
    draft_shape: Annotated[str, typer.Option(help="The drafter's.")] = "t5-v1_1-small",
    dtype: Annotated[str, typer.Option(help="bfloat16, float32, or int8 matrices in float32.")] = "bfloat16",
    source_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=2)] = 128,
    seeds: Annotated[int, typer.Option(help="Generations of a timed turn.", min=1)] = 8,
    repeats: Annotated[int, typer.Option(help="Timed turns.", min=1)] = 5,
    copy_mb: Annotated[int, typer.Option(help="Size of the copy that measures the bandwidth.", min=1)] = 4096,
    profile: Annotated[Path | None, typer.Option(help="Also write a profile of speculative decoding here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
) -> None:
    """Measures plain decoding against the memory's floor, and speed-ups at the paper's acceptance rates."""

    def say(doing: str) -> None:
        print(f"{doing} ...", file=sys.stderr, flush=True)

    say(f"random weights: {shape}, {draft_shape}")
    target, draft = shapes.random_model(shape, dtype, seed=0), shapes.random_model(draft_shape, dtype, seed=1)
    prompt = shapes.random_prompt(target, 1, source_tokens)
    ask = Ask(new_tokens, seeds, repeats)
    found = report(target, draft, prompt, ask, copy_mb * 10**6, say)
    if profile is not None:
        first = TABLE_2[0]
        rule = random_verdicts_for_benchmarks(first.alpha)
        jobs = _jobs(target, prompt, ask._replace(seeds=1), drafter=draft, gamma=first.gamma, accept=rule)
        with jax.profiler.trace(str(profile)):
            cost.run_all(jobs)
    if as_json:
        print(json.dumps(found))
        return
    screen = Console(highlight=False)
    screen.width = max(screen.width, WIDTH)
    screen.print(table(found), *notes(found), sep="\n")


if __name__ == "__main__":
    typer.run(main)
