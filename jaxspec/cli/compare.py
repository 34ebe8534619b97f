"""`jaxspec generate --compare`: two rows of `analysis.bench`, plain and speculative, and what they mean in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from jaxspec import trace
from jaxspec.cli import console

if TYPE_CHECKING:
    from jaxspec.analysis.bench import Row
    from jaxspec.cli.session import Session

REPEATS = 5  # of each side, interleaved
CPU_CACHE = 100e6  # bytes of parameters that some cache of a CPU may hold
IDLE = 1.25  # a check that costs less than so many one-token passes runs on compute that was idle


def compare(session: Session, rows: int) -> tuple[Row, Row]:
    """Plain and speculative decoding of a session's prompts, `rows` at a time.

    Raises:
        FloatingPointError: logits were not finite.
    """
    from jaxspec.analysis import bench
    from jaxspec.analysis.bench.setting import setting_of

    setting = setting_of(session.job, "prompts", rows)._replace(name=session.settings.draft or "")
    setting = setting._replace(policy_name=session.settings.policy or "")
    quantities = ("speed", "alpha", "costs", "search")
    config = bench.Config(len(session.texts), REPEATS, session.settings.seed, quantities)
    plain, ours = bench.run(session.job.target, [setting], config=config)
    if ours.error is not None:
        raise FloatingPointError(ours.error)
    return plain, ours


def table(plain: Row, ours: Row) -> Table:
    """Both speeds, and the speed-up as measured and as promised."""
    assert plain.tokens_per_second is not None and ours.tokens_per_second is not None and ours.speed is not None
    made, speed = console.table(("tokens/s", "speed-up", "min..max"), first=""), ours.speed
    made.add_row("plain", f"{plain.tokens_per_second.median:.1f}", "1.00×")
    name = f"speculative, {ours.policy or f'γ = {ours.gamma}'}"
    measured = f"{speed.median:.2f}×", f"{speed.min:.2f}..{speed.max:.2f}"
    made.add_row(name, f"{ours.tokens_per_second.median:.1f}", *measured)
    if ours.predicted is not None and ours.predicted.theorem is not None:
        made.add_row("predicted by Theorem 3.8, with v", "", f"{ours.predicted.theorem:.2f}×", style="dim")
    if ours.predicted is not None and ours.predicted.rounds is not None:
        made.add_row("what its own rounds promise", "", f"{ours.predicted.rounds:.2f}×", style="dim")
    return made


def sentences(ours: Row, tokenizer: Any, cached: bool) -> list[Text]:
    """What a round yields and costs, whether the texts agree, and the conclusion.

    Args:
        ours: the speculative row.
        tokenizer: of the target.
        cached: whether the target is small enough to live in a CPU's cache, and on a CPU.
    """
    found = [agreement(ours, tokenizer), Text(conclusion(ours, cached))]
    if ours.costs is None or ours.tokens_per_round is None or ours.tokens_per_round.value is None:
        return found
    alpha = "" if ours.alpha is None else f"α = {ours.alpha.value:.3f}, "
    c, v = ours.costs.c.median, ours.costs.v.median
    formula = f"{alpha}c = {c:.3f}, v = {v:.2f}: a round yields {ours.tokens_per_round.value:.2f} tokens"
    cost = "." if ours.policy else f" and costs γc + v = {_cost(ours):.2f} one-token passes of the target."
    return [Text(formula + cost), *found]


def is_cached(session: Session) -> bool:
    """Whether the target may live in a CPU's cache, which leaves no compute idle."""
    import jax

    size = sum(x.nbytes for x in jax.tree.leaves(session.job.weights.target))
    return jax.default_backend() == "cpu" and size < CPU_CACHE


def agreement(ours: Row, tokenizer: Any) -> Text:
    """Whether the texts are the same, and where they first differ."""
    if ours.same_text is None:
        if ours.exact:
            return Text("The texts are samples: they have one distribution, and need not be the same.")
        return Text("The rule is inexact: the texts need not be the same.", "yellow")
    if ours.difference is None:
        return Text("Greedy texts: identical.", "green")
    text, position, own, plain = ours.difference
    names = [(trace.spell(tokenizer, list(x[:-1]), list(x[-1:])) or ["nothing"])[0] for x in _aligned(own, plain)]
    return Text(
        f"Greedy texts: different. {ours.texts - ours.same_text} of {ours.texts} prompts; first in prompt {text + 1}, "
        f"token {position + 1}: {names[0]!r} where plain decoding has {names[1]!r}. Passes of other widths round "
        "otherwise: is it a near tie?",
        "yellow",
    )


def _aligned(own: tuple[int, ...], plain: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Both texts up to where they differ; a text that has ended there has nothing in that place."""
    longest = max(len(own), len(plain))
    return [text if len(text) == longest else () for text in (own, plain)]


def conclusion(ours: Row, cached: bool) -> str:
    """Whether it pays, and if not, why."""
    assert ours.speed is not None
    ratio = ours.speed.median
    if ratio >= 1:
        return f"Speculative decoding is {ratio:.2f} times as fast here."
    rounds = None if ours.predicted is None else ours.predicted.rounds
    if ours.costs is None or ours.tokens_per_round is None or rounds is None or ours.policy:
        return "Speculative decoding is slower here."
    tokens, c, v = ours.tokens_per_round.value, ours.costs.c.median, ours.costs.v.median
    if rounds >= 1:
        return (
            f"Speculative decoding is slower here, though a round gives {tokens:.2f} tokens in the time of "
            f"{_cost(ours):.2f} passes: reading prompts twice and short texts cost it."
        )
    busy = cached and v > IDLE
    why = ", for a model that fits a CPU's cache leaves no compute idle to check draft tokens with" if busy else ""
    return (
        f"Speculative decoding is slower here: a round yields {tokens:.2f} tokens and takes the time of "
        f"{_cost(ours):.2f} one-token passes, {v:.2f} to check {ours.gamma + 1} tokens (v) and "
        f"{ours.gamma * c:.2f} to draft {ours.gamma} (γc){why}."
    )


def _cost(row: Row) -> float:
    """Gamma c + v, and a look-up's search: what a round costs."""
    assert row.costs is not None
    return row.gamma * row.costs.c.median + row.costs.v.median + (row.costs.search or 0.0)
