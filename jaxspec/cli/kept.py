"""What guesses are worth, without their time: the paper's Table 3 for any drafters, `jaxspec drafts --no-speed`.

A model's alpha is over all positions of the target's own text (`analysis.acceptance`). A look-up has no law where
nobody asked it: of its guesses the share is known that was kept among those that had a trial ("censored"), and in how
many rounds there was a guess ("guessed"). Both rates are of every drafter that has them, each under its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.cli import tables
from jaxspec.cli.cells import stated

if TYPE_CHECKING:
    from rich.table import Table

    from jaxspec.base import Drafter, Model

BATCH = 16  # prompts at a time


def measure(
    target: Model,
    drafter: Model | Drafter,
    prompts: Sequence[str],
    *,
    gammas: Sequence[int],
    temperature: float,
    new_tokens: int,
    seed: int = 0,
) -> dict[str, Any]:
    """What the guesses of a drafter are worth on a task.

    Args:
        target, drafter: a pair.
        prompts: of the task; the unit of the intervals.
        gammas: guesses a round, one run each.
        temperature: of both.
        new_tokens: most new tokens per prompt.
        seed: of the texts.

    Returns:
        "alpha", as value, stderr, low and high (95%), or None for what is no model; and "by_gamma", for each its
        "gamma", "censored", "censored_by_guess", "guessed" and "tokens_per_round".
    """
    import jax

    from jaxspec import noise
    from jaxspec.analysis import acceptance
    from jaxspec.analysis.estimate import Ratio
    from jaxspec.base import Model
    from jaxspec.decode import generate, request

    key = jax.random.key(seed)
    options: dict[str, Any] = dict(temperature=temperature, max_new_tokens=new_tokens)
    found: dict[str, Any] = {"alpha": None, "by_gamma": []}
    if isinstance(drafter, Model):
        found["alpha"] = acceptance.measure(target, drafter, prompts, key=key, batch=BATCH, **options).rate.to_dict()
    prompt = request.encode(target, prompts)
    keys = noise.row_keys(key, len(prompt.length))
    for gamma in gammas:
        runs = []
        for group in acceptance.in_batches(prompt, BATCH):
            asked: dict[str, Any] = dict(drafter=drafter, gamma=gamma, key=keys[group.rows], **options)
            out = generate(target, group.prompt, **asked)
            runs.append(jax.tree.map(lambda x, real=group.real: np.asarray(x)[:real], (out.stats, out.trace)))
        stats = jax.tree.map(lambda *parts: np.concatenate(parts), *(stats for stats, _ in runs))
        censored = acceptance.censored(*(trace for _, trace in runs))
        guessed = np.concatenate([(trace.draft_length * (trace.kept > 0) > 0).sum(axis=1) for _, trace in runs])
        found["by_gamma"].append(
            {
                "gamma": gamma,
                "censored": stated(censored.overall),
                "censored_by_guess": [stated(rate) for rate in censored.by_guess],
                "guessed": Ratio(guessed, stats.rounds, probability=True).to_dict(),
                "tokens_per_round": Ratio(stats.emitted - 1, stats.rounds).to_dict(),
            }
        )
    return found


def table(found: Sequence[dict[str, Any]], index: int) -> Table:
    """Drafters by task and temperature, at one of the gammas.

    Args:
        found: as `measure` has it, with "drafter", "task" and "temperature".
        index: of the gamma.
    """
    heads = list(dict.fromkeys(head(row) for row in found))
    rows: dict[str, dict[str, str]] = {}
    for row in found:
        rows.setdefault(row["drafter"], {})[head(row)] = cell(row["alpha"], row["by_gamma"][index])
    title = f"γ = {found[0]['by_gamma'][index]['gamma']}: α (or kept of tried, in rounds with a guess) · tokens a round"
    made = tables.table(heads, first="drafter", title=title)
    for name, cells in rows.items():
        made.add_row(name, *(cells[head] for head in heads))
    return made


def head(row: dict[str, Any]) -> str:
    """Of its column."""
    return f"{row['task']}, T = {row['temperature']:g}"


def cell(alpha: dict[str, Any] | None, run: dict[str, Any]) -> str:
    """Alpha, or what is known where there is none; and tokens a round.

    >>> run = {"censored": {"value": 0.6}, "guessed": {"value": 0.36}, "tokens_per_round": {"value": 1.35}}
    >>> cell(None, run), cell({"value": 0.64}, run)
    ('0.60 in 36% · 1.35', '0.64 · 1.35')
    >>> cell(None, run | {"censored": {"value": None}, "guessed": {"value": 0.0}, "tokens_per_round": {"value": 1.0}})
    '– · 1.00'
    """
    rate, tokens = run["censored"]["value"], run["tokens_per_round"]["value"]
    worth = "–" if rate is None else f"{rate:.2f} in {run['guessed']['value']:.0%}"
    said = worth if alpha is None else f"{alpha['value']:.2f}"
    return said if tokens is None else f"{said} · {tokens:.2f}"
