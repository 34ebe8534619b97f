"""The acceptance of each exact rule along the target's own texts, by replay; and of one of several
candidates.

    python -m benchmarks.rule_acceptance --target debian-t5-base --draft debian-t5-small --gamma 7
    --count 64

Two cores, a few minutes. α is the probability that a round's first draft token is accepted; tokens
a round are the mean over all rounds that a text can be made of (`jaxspec.analysis.replay`); "one of
k" is the probability that one of k independent candidates for a token is accepted. Inexact rules,
whose text is another, are measured by `jaxspec bench --rule all --measure alpha`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.options import parser_of
from jaxspec.analysis import divergence, environment, replay
from jaxspec.analysis.statistics import Rate
from jaxspec.analysis.table import words
from jaxspec.cli import console, names
from jaxspec.cli.options import TARGET
from jaxspec.cli.prompts import prepared_pair
from jaxspec.rules import catalogue

CANDIDATES = (2, 4)


def alpha_of_candidates(trace: replay.LogitTrace, count: int) -> list[Rate]:
    """Averages the probability that one of the first 1, 2, ... `count` independent candidates for a
    token is accepted.

    The exact probability at each position (`divergence.beta_of_candidates`), with the distributions
    at the texts' own temperature; the texts only give the positions. At temperature 0 all
    candidates are one, and so are the ratios.
    """
    logits_to_probs = jax.jit(
        lambda logits: jnp.exp(replay.distribution(logits, jnp.float32(trace.temperature)))[:, 0]
    )
    chances = []
    for start in range(0, len(trace.tokens), replay.CHUNK):
        chunk = slice(start, start + replay.CHUNK)
        p, q = (
            np.asarray(logits_to_probs(side[chunk]), np.float64)
            for side in (trace.target, trace.draft)
        )
        chances.append(divergence.beta_of_candidates(p, q, count))
    by_position = np.concatenate(chances)
    return [replay.mean_of_rows(trace, by_position[:, k]) for k in range(count)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and measures."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", default="")
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--count", type=int, default=64, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    draft, out = (
        options.draft or names.default_draft_model(options.target),
        console.printer(options.markdown),
    )
    limits = {"gamma": options.gamma, "max_new_tokens": options.max_new_tokens}
    prepared = prepared_pair(options.target, draft, "float32", None, options.count, **limits)
    out.print(environment.line(environment.current()))
    for temperature in options.temperature:
        trace = replay.collect(prepared.replace(temperature=temperature))
        view = console.table(
            ["α", "tokens\na round"],
            first="rule",
            title=f"T = {temperature:g}, γ = {options.gamma}",
        )
        for name, entry in catalogue.RULES.items():
            if entry.rule.exact and entry.rule.acceptance_ratio is not None:
                ratios, shape = replay.chain_ratios(trace, entry.rule), replay.chain(options.gamma)
                tokens = replay.tokens_per_round(shape, ratios, trace.counts)
                alpha = replay.acceptance_rate(trace, entry.rule)
                view.add_row(name, words(alpha), words(tokens))
        by_count = alpha_of_candidates(trace, max(CANDIDATES))
        for count in CANDIDATES:
            view.add_row(f"rejection, one of {count}", words(by_count[count - 1]), "–")
        console.show(out, view, options.markdown)


if __name__ == "__main__":
    main()
