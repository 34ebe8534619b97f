"""`jaxspec generate --compare`: two results of `analysis.bench`, plain and speculative, and what they mean in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console
from rich.text import Text

from jaxspec import trace
from jaxspec.cli.pair import Pair
from jaxspec.decode.request import Prepared

if TYPE_CHECKING:
    from jaxspec.analysis.result import BenchResult

REPEATS = 5  # of each side, interleaved
CPU_CACHE = 100e6  # bytes of parameters that some cache of a CPU may hold
IDLE = 1.25  # a check that costs less than so many one-token passes runs on compute that was idle


def compare(
    prepared: Prepared, pair: Pair, batch: int, quantities: Sequence[str] = ("speed", "alpha", "costs")
) -> tuple[BenchResult, BenchResult]:
    """Times plain and speculative decoding of prompts, a batch at a time."""
    from jaxspec.analysis import bench
    from jaxspec.analysis.result import setting_of

    texts = len(prepared.prompt.length)
    setting = setting_of(prepared.replace(prefix=None), "prompts", min(batch, texts))  # of whole prompts
    setting = setting._replace(name=pair.draft or "", policy_name=pair.policy)
    config = bench.Config(texts, REPEATS, pair.seed, tuple(quantities))
    plain, speculative = bench.run(prepared.target, [setting], config=config)
    if speculative.error is not None:
        raise FloatingPointError(speculative.error)
    return plain, speculative


def in_a_sentence(prepared: Prepared, pair: Pair, batch: int) -> str:
    """Times speculative and plain decoding, interleaved, and reports their ratio."""
    _, result = compare(prepared, pair, batch, ["speed"])
    ratio = result.speed
    assert ratio is not None
    speed = f"{ratio.median:.2f} times the speed of plain decoding, interleaved ({ratio.min:.2f} to {ratio.max:.2f})"
    if result.same_text is None:
        return f"{speed}; the texts are samples of the same distribution." if result.setting.exact else f"{speed}."
    same = f"{result.same_text} of {result.texts} texts are the same"
    return f"{speed}; {'the same texts' if result.same_text == result.texts else same}."


def show(plain: BenchResult, speculative: BenchResult, prepared: Prepared, out: Console) -> None:
    """Prints both speeds, what theory promises, whether the texts agree, and whether it pays."""
    from jaxspec.analysis import environment, table

    size = sum(leaf.nbytes for leaf in jax.tree.leaves(prepared.weights.target))
    cached = jax.default_backend() == "cpu" and size < CPU_CACHE
    assert speculative.environment is not None
    out.print("", Text(environment.line(speculative.environment), "bold"), sep="\n")
    out.print(*table.tables([plain, speculative], (table.SPEED, table.THEORY), out.width), sep="\n")
    out.print(agreement(speculative, prepared.target.tokenizer), Text(conclusion(speculative, cached)), sep="\n")


def agreement(result: BenchResult, tokenizer: Any) -> Text:
    """Says whether the texts are the same, and where they first differ."""
    if result.same_text is None:
        why = "they are samples, and have one distribution" if result.setting.exact else "the rule is inexact"
        return Text(f"The texts need not be the same: {why}.")
    if result.difference is None:
        return Text("Greedy texts: identical.", "green")
    text, position, speculative, plain = result.difference
    longest = max(len(speculative), len(plain))  # a text that has ended has nothing in that place
    ends = (tokens if len(tokens) == longest else () for tokens in (speculative, plain))
    names = [(trace.spell(tokenizer, list(end[:-1]), list(end[-1:])) or ["nothing"])[0] for end in ends]
    return Text(
        f"Greedy texts: different. {result.texts - result.same_text} of {result.texts} prompts; first in prompt "
        f"{text + 1}, token {position + 1}: {names[0]!r} where plain decoding has {names[1]!r}. Passes of other widths "
        "round otherwise: is it a near tie?",
        "yellow",
    )


def conclusion(result: BenchResult, cached: bool) -> str:
    """Says whether speculation pays, and if not, why; `cached`: the target lives in a CPU's cache."""
    speed = result.speed
    assert speed is not None
    promised = None if result.predicted is None else result.predicted.rounds
    if speed.min < 1 <= speed.median:
        return (
            f"Speculative decoding had {speed.min:.2f} to {speed.max:.2f} times the speed of plain decoding in these "
            "runs: that shows no difference."
        )
    if speed.median >= 1:
        return f"Speculative decoding is {speed.median:.2f} times as fast here."
    if result.costs is None or result.tokens_per_round is None or promised is None or result.setting.policy:
        return "Speculative decoding is slower here."
    tokens, c, v = result.tokens_per_round.value, result.costs.c.median, result.costs.v.median
    cost = result.setting.gamma * c + v + result.costs.search
    round_of = f"a round yields {tokens:.2f} tokens and takes the time of {cost:.2f} one-token passes"
    if promised >= 1:
        return f"Speculative decoding is slower here, though {round_of}: reading prompts twice and short texts cost it."
    why = ", for a model that fits a CPU's cache leaves no compute idle to check draft tokens with"
    return (
        f"Speculative decoding is slower here: {round_of}, {v:.2f} to check {result.setting.gamma + 1} tokens (v) and "
        f"{result.setting.gamma * c:.2f} to draft {result.setting.gamma} (γc){why if cached and v > IDLE else ''}."
    )
