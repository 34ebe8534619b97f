"""Draws the paper's Figures 2 to 5, and a pair's place among them, as PNG and SVG.

    python -m benchmarks.figures --theory-only python -m benchmarks.figures --target debian-t5-base
    --draft debian-t5-small --gamma 3 --out pair jaxspec plan --tree --nodes 16 --json > plan.json;
    python -m benchmarks.figures --tree plan.json

figure-2, -3 and -4 are theory; distribution-distance shows that samples of speculative decoding
have the target's distribution: seconds. Measured, greedily, on held-out prompts: landscape
(speed-up over α and γ, with the pair marked), decomposition (one position's distribution as
accepted and residual mass, at temperature 1) and figure-5 (the passes of one generation): a minute
of two cores. --tree draws the tree of a plan. Needs matplotlib (the extra `figures`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from benchmarks.figures import sampling, spans, style, theory, timeline, tree
from benchmarks.options import parser_of
from jaxspec import rules
from jaxspec.analysis import acceptance, bench, cost, divergence, replay
from jaxspec.analysis.result import setting_of
from jaxspec.cli import names
from jaxspec.cli.options import TARGET
from jaxspec.cli.prompts import prepared_pair
from jaxspec.decode import batches
from jaxspec.decode.request import Prepared

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDS = 100_000  # of the empirical distribution
P_AND_Q = (0.45, 0.25, 0.15, 0.1, 0.05), (0.2, 0.2, 0.2, 0.2, 0.2)
# a position whose draft token is accepted about so often shows both parts of its distribution
TYPICAL = 0.6


def of_theory() -> Iterator[tuple[str, Figure]]:
    """Names and figures that need no models: Figures 2 to 4, and how samples approach the target's
    distribution.
    """
    yield "figure-2", theory.expected_tokens()
    yield "figure-3", theory.optimal_gamma()
    yield "figure-4", theory.trade_off()
    (p, q), counts = P_AND_Q, np.unique(np.geomspace(10, ROUNDS, 17).astype(int))
    distances = {}
    for name, rule in {
        "rejection rule": rules.rejection(),
        "lenient rule, l = 0.5": rules.lenient(0.5),
    }.items():
        tokens = sampling.first_tokens(rule, p, q, ROUNDS, seed=0)
        distances[name] = sampling.l1_distance(tokens, p, counts)
    yield (
        "distribution-distance",
        sampling.distribution_distance(counts, distances, sampling.noise_distance(p, counts)),
    )


def of_pair(prepared: Prepared, repeats: int) -> Iterator[tuple[str, Figure]]:
    """Names and figures of a greedy pair: the landscape with its place in it, one position, and
    Figure 5.
    """
    gamma, alpha, passes = (
        prepared.decoder.gamma,
        acceptance.measure(prepared).alpha,
        cost.measure(prepared, repeats=repeats),
    )
    slope = (passes.v - 1) / gamma  # v is known at one gamma; a line through it serves the others
    after = speedup_after_prefill(prepared, repeats)
    mark = theory.Mark(
        "measured: –" if after is None else f"measured: {after:.2f}×", min(alpha, 1.0), gamma
    )
    names = f"{prepared.target.name} with {acceptance.drafting_model(prepared).name}"
    title = f"{names}: c = {passes.c:.3f}, v = {passes.v:.2f} at γ = {gamma}"
    yield (
        "landscape",
        theory.landscape(
            passes.c, lambda drafted: max(0.1, 1 + slope * drafted), [mark], title=title
        ),
    )

    p, q, tokens = distributions(batches.take(prepared, range(min(4, len(prepared.prompt.length)))))
    yield "decomposition", sampling.decomposition(p, q, tokens)

    single = batches.take(prepared, [0])
    rows = {
        f"γ = {gamma}": spans.record(single.replace(gamma=gamma), repeats=repeats)
        for gamma in (7, 3)
    }
    rows["plain"] = spans.record(single.plain(), repeats=repeats)
    yield "figure-5", timeline.trace_diagram(rows)


def speedup_after_prefill(prepared: Prepared, repeats: int) -> float | None:
    """Speed over plain decoding without the time to the first token, as Theorem 3.8 has it; None if
    noise left none.
    """
    config = bench.Config(len(prepared.prompt.length), repeats)
    _, result = bench.run(prepared.target, [setting_of(prepared, "prompts", 1)], config=config)
    return None if result.speed_after_prefill is None else result.speed_after_prefill.median


def distributions(prepared: Prepared) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Both distributions at a typical position of the target's text at temperature 1, and the names
    of its tokens.
    """
    tokenizer = prepared.target.tokenizer
    trace = replay.collect(prepared.replace(temperature=1.0, key=jax.random.key(0)))
    p, q = (
        np.asarray(jax.nn.softmax(side.astype(np.float64), axis=-1))
        for side in (trace.target, trace.draft)
    )
    at = int(np.argmin(np.abs(divergence.beta(p, q) - TYPICAL)))
    words = tokenizer.convert_ids_to_tokens(range(p.shape[1])) if tokenizer else [None] * p.shape[1]
    return p[at], q[at], [word or str(index) for index, word in enumerate(words)]


def of_plan(file: Path) -> Iterator[tuple[str, Figure]]:
    """Yields the tree of a plan, as `jaxspec plan --tree --json` prints it."""
    (plan,) = json.loads(file.read_text(encoding="utf-8"))["plans"]
    planned = plan["tree"]
    yield (
        "tree",
        tree.tree_diagram(planned["shape"], plan["measured"]["acceptance"][planned["draw"]]),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to")
    parser.add_argument(
        "--format", default="png,svg", help="png, svg or both, separated by a comma"
    )
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", default="")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--count", type=int, default=16, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--theory-only", action="store_true", help="only what needs no models")
    parser.add_argument("--tree", type=Path, help="only the tree of this plan")
    options = parser.parse_args(arguments)
    formats = tuple(part.strip() for part in options.format.split(","))
    style.canvas()  # refuses at once where matplotlib is absent
    style.check_formats(formats)
    if options.tree is not None:
        drawn = of_plan(options.tree)
    elif options.theory_only:
        drawn = of_theory()
    else:
        draft = options.draft or names.default_draft_model(options.target)
        limits = {"gamma": options.gamma, "max_new_tokens": options.max_new_tokens}
        prepared = prepared_pair(options.target, draft, "float32", None, options.count, **limits)
        drawn = itertools.chain(of_theory(), of_pair(prepared, options.repeats))
    for name, figure in drawn:
        print(*style.save(figure, options.out, name, formats), sep="\n", flush=True)


if __name__ == "__main__":
    main()
