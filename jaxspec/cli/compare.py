"""`jaxspec generate --compare`: two results of `analysis.bench`, plain and speculative, and what they mean in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from jaxspec import trace

if TYPE_CHECKING:
    from jaxspec.analysis.bench import BenchResult
    from jaxspec.cli.session import Session

REPEATS = 5  # of each side, interleaved
CPU_CACHE = 100e6  # bytes of parameters that some cache of a CPU may hold
IDLE = 1.25  # a check that costs less than so many one-token passes runs on compute that was idle


def compare(session: Session) -> tuple[BenchResult, BenchResult]:
    """Plain and speculative decoding of a session's prompts, a batch at a time.

    Raises:
        FloatingPointError: logits were not finite.
    """
    from jaxspec.analysis import bench
    from jaxspec.analysis.setting import setting_of

    given = session.settings
    setting = setting_of(session.prepared, "prompts", min(given.batch, len(session.texts)))
    setting = setting._replace(name=given.draft or "", policy_name=given.policy)
    config = bench.Config(len(session.texts), REPEATS, given.seed, ("speed", "alpha", "costs"))
    plain, ours = bench.run(session.prepared.target, [setting], config=config)
    if ours.error is not None:
        raise FloatingPointError(ours.error)
    return plain, ours


def show(plain: BenchResult, ours: BenchResult, session: Session, out: Console) -> None:
    """Prints both speeds, what theory promises, whether the texts agree, and whether it pays."""
    import jax

    from jaxspec.analysis import environment, table

    size = sum(x.nbytes for x in jax.tree.leaves(session.prepared.weights.target))
    cached = jax.default_backend() == "cpu" and size < CPU_CACHE
    assert ours.environment is not None
    out.print("", Text(environment.line(ours.environment), "bold"), sep="\n")
    out.print(*table.tables([plain, ours], (table.SPEED, table.THEORY), out.width), sep="\n")
    out.print(agreement(ours, session.prepared.target.tokenizer), Text(conclusion(ours, cached)), sep="\n")


def agreement(ours: BenchResult, tokenizer: Any) -> Text:
    """Whether the texts are the same, and where they first differ."""
    if ours.same_text is None:
        why = "they are samples, and have one distribution" if ours.setting.exact else "the rule is inexact"
        return Text(f"The texts need not be the same: {why}.")
    if ours.difference is None:
        return Text("Greedy texts: identical.", "green")
    text, position, own, plain = ours.difference
    longest = max(len(own), len(plain))  # a text that has ended has nothing in that place
    ends = (tokens if len(tokens) == longest else () for tokens in (own, plain))
    names = [(trace.spell(tokenizer, list(x[:-1]), list(x[-1:])) or ["nothing"])[0] for x in ends]
    return Text(
        f"Greedy texts: different. {ours.texts - ours.same_text} of {ours.texts} prompts; first in prompt {text + 1}, "
        f"token {position + 1}: {names[0]!r} where plain decoding has {names[1]!r}. Passes of other widths round "
        "otherwise: is it a near tie?",
        "yellow",
    )


def conclusion(ours: BenchResult, cached: bool) -> str:
    """Whether it pays, and if not, why.

    Args:
        ours: the speculative row.
        cached: whether the target is small enough to live in a CPU's cache, and on a CPU.
    """
    assert ours.speed is not None
    promised = None if ours.predicted is None else ours.predicted.rounds
    if ours.speed.min < 1 <= ours.speed.median:
        return (
            f"Speculative decoding had {ours.speed.min:.2f} to {ours.speed.max:.2f} times the speed of plain decoding "
            "in these runs: that shows no difference."
        )
    if ours.speed.median >= 1:
        return f"Speculative decoding is {ours.speed.median:.2f} times as fast here."
    if ours.costs is None or ours.tokens_per_round is None or promised is None or ours.setting.policy:
        return "Speculative decoding is slower here."
    tokens, c, v = ours.tokens_per_round.value, ours.costs.c.median, ours.costs.v.median
    cost = ours.setting.gamma * c + v + ours.costs.search
    round_of = f"a round yields {tokens:.2f} tokens and takes the time of {cost:.2f} one-token passes"
    if promised >= 1:
        return f"Speculative decoding is slower here, though {round_of}: reading prompts twice and short texts cost it."
    why = ", for a model that fits a CPU's cache leaves no compute idle to check draft tokens with"
    return (
        f"Speculative decoding is slower here: {round_of}, {v:.2f} to check {ours.setting.gamma + 1} tokens (v) and "
        f"{ours.setting.gamma * c:.2f} to draft {ours.setting.gamma} (γc){why if cached and v > IDLE else ''}."
    )
