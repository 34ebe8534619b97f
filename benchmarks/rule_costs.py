"""The cost of each acceptance rule: one verdict, compiled and called by itself, beside a pass of a
model.

    python -m benchmarks.rule_costs --batch 1 32 --markdown

Two cores, some minutes. The model has random weights at a published shape (--shape); rules are
timed with its vocabulary, and with one of 256,000 if that is larger. Axis letters as in
`jaxspec.core`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key
from rich.table import Table

from benchmarks.options import parser_of
from jaxspec import sampling
from jaxspec.analysis import cost, environment
from jaxspec.analysis.cost import interleave
from jaxspec.analysis.random_model import random_model, random_prompt
from jaxspec.analysis.statistics import Spread
from jaxspec.cli import console
from jaxspec.core import Draft, Keys, Rule, noise
from jaxspec.decode.request import prepare
from jaxspec.rules import catalogue

SOURCE = 64  # tokens per prompt of the model whose pass is timed
LARGE = 256_000  # a vocabulary, as of Gemma


class Sizes(NamedTuple):
    """V, B and G of one verdict."""

    vocab: int
    batch: int
    gamma: int


class RuleCost(NamedTuple):
    """The time of a verdict of one rule.

    Attributes:
        usual_us, all_accepted_us: microseconds, where some draft tokens are rejected, and where
            none is.
        share: the slower of the two over the verify pass; None for another vocabulary than the
            model's.
    """

    usual_us: Spread
    all_accepted_us: Spread
    share: float | None


class RuleCosts(NamedTuple):
    """The times of verdicts at one batch size and vocabulary.

    Attributes:
        batch, vocab: rows, and tokens of the vocabulary.
        rules: by name.
        one_token_ms, verify_ms: milliseconds of the model's passes over one token and over gamma +
            1.
    """

    batch: int
    vocab: int
    rules: dict[str, RuleCost]
    one_token_ms: float
    verify_ms: float


def costs(
    rules: Sequence[Rule], sizes: Sizes, *, repeats: int, alike: bool = False
) -> dict[str, np.ndarray]:
    """Seconds of one verdict of each rule, compiled and called by itself, by name; "distributions":
    a softmax.

    Example:
        >>> from jaxspec import rules
        >>> taken = costs([rules.rejection()], Sizes(vocab=9, batch=2, gamma=3), repeats=4)
        >>> {name: seconds.shape for name, seconds in taken.items()}
        {'distributions': (4,), 'rejection': (4,)}
    """
    keys, position = (
        noise.row_keys(jax.random.key(0), sizes.batch),
        jnp.full(sizes.batch, 9, jnp.int32),
    )
    logits, draft_logits = _logits(jax.random.key(1), sizes, jnp.array(alike))
    sampling_params = sampling.SamplingParams(jnp.ones(sizes.batch))
    to_distribution = jax.jit(sampling.at_temperature())
    target, q = (
        to_distribution(sampling_params, logits),
        to_distribution(sampling_params, draft_logits).log_probs,
    )
    assert q is not None
    calls: dict[str, Callable[[], object]] = {
        "distributions": _call(to_distribution, sampling_params, logits)
    }
    for rule in rules:
        draft = _draft(keys, position, q, rule.shares_noise)
        calls[rule.name] = _call(jax.jit(rule.verify), keys, position, draft, target)
    return dict(zip(calls, interleave(list(calls.values()), repeats), strict=True))


def beside_passes(
    shape: str,
    batches: Sequence[int],
    gamma: int,
    *,
    repeats: int,
    doing: Callable[[str], object] = lambda what: None,
) -> list[RuleCosts]:
    """Microseconds of every rule, and of a pass of a model with random weights at a published
    shape.
    """
    doing(f"making {shape}")
    model, results = random_model(shape, "float32", seed=0), []
    every = [entry.rule for entry in catalogue.RULES.values()]
    for batch in batches:
        doing(f"{shape}, batch {batch}")
        prompt = random_prompt(model, batch, SOURCE)
        passes = cost.measure(
            prepare(model, prompt, drafter=model, gamma=gamma, max_new_tokens=64),
            repeats=5,
            inner=2,
        )
        for vocab in sorted({model.lm.vocab_size, max(model.lm.vocab_size, LARGE)}):
            doing(f"rules, batch {batch}, vocabulary {vocab}")
            sizes = Sizes(vocab, batch, gamma)
            usual, alike = (
                costs(every, sizes, repeats=repeats, alike=same) for same in (False, True)
            )
            lines = {}
            for name in usual:
                usual_us, alike_us = (Spread.of(1e6 * seconds[name]) for seconds in (usual, alike))
                share = max(usual_us.median, alike_us.median) / 1e3 / passes.verify_ms
                lines[name] = RuleCost(
                    usual_us, alike_us, share if vocab == model.lm.vocab_size else None
                )
            results.append(RuleCosts(batch, vocab, lines, passes.target_ms, passes.verify_ms))
    return results


def _call(function: Callable[..., object], *arguments: Any) -> Callable[[], object]:
    """A call that waits for its result; compiled."""

    def call() -> object:
        return jax.block_until_ready(function(*arguments))

    call()
    return call


@functools.partial(jax.jit, static_argnames=("sizes",))
def _logits(
    key: Key[Array, ""], sizes: Sizes, alike: Bool[Array, ""]
) -> tuple[Float[Array, "B G+1 V"], Float[Array, "B G V"]]:
    ours, theirs = jax.random.split(key)
    target = 3 * jax.random.normal(ours, (sizes.batch, sizes.gamma + 1, sizes.vocab))
    off = 0.7 * jax.random.normal(theirs, (sizes.batch, sizes.gamma, sizes.vocab))
    return target, target[:, :-1] + jnp.where(alike, 0.0, off)


@functools.partial(jax.jit, static_argnames=("shares_noise",))
def _draft(
    keys: Keys, position: Int[Array, " B"], log_probs: Float[Array, "B G V"], shares_noise: bool
) -> Draft:
    """Drafts as `drafters.model` does: tokens with their distributions, or with the noise that they
    were drawn with.
    """
    purpose, gamma = (
        noise.Purpose.TOKEN if shares_noise else noise.Purpose.DRAFT,
        log_probs.shape[1],
    )

    def noise_at(i: Int[Array, ""]) -> Float[Array, "B V"]:
        return noise.gumbel(noise.at(keys, position + i, purpose), log_probs.shape[2])

    gumbel = jnp.moveaxis(jax.lax.map(noise_at, jnp.arange(gamma, dtype=jnp.int32)), 0, 1)
    tokens, length = noise.first_largest(log_probs + gumbel), jnp.full_like(position, gamma)
    if shares_noise:
        return Draft(tokens, length, aux={"gumbel": gumbel})
    return Draft(tokens, length, log_probs=log_probs)


def table_of(size: RuleCosts, shape: str, gamma: int) -> Table:
    title = f"batch {size.batch}, V = {size.vocab:,}, γ = {gamma}; a pass of {shape} takes "
    title += f"{size.one_token_ms:.1f} ms over 1 token, {size.verify_ms:.1f} ms over {gamma + 1}"
    heads = ["µs", "min..max", "µs, all\naccepted", "min..max", "of the\nlong pass"]
    view = console.table(heads, first="", title=title)
    for name, rule in size.rules.items():
        cells = []
        for spread in (rule.usual_us, rule.all_accepted_us):
            cells += [f"{spread.median:,.0f}", f"{spread.min:,.0f}..{spread.max:,.0f}"]
        view.add_row(name, *cells, f"{rule.share:.1%}" if rule.share is not None else "–")
    return view


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and measures."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--shape", default="t5-v1_1-base", help="of the model whose pass verdicts are compared with"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    out = console.printer(options.markdown)
    out.print(environment.line(environment.current()))
    for size in beside_passes(options.shape, options.batch, options.gamma, repeats=options.repeats):
        console.show(out, table_of(size, options.shape, options.gamma), options.markdown)


if __name__ == "__main__":
    main()
