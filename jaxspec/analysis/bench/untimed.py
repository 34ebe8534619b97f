"""What draft tokens are worth, without their time: the paper's Table 3 for any drafters.

A model's alpha is over all positions of the target's own text (`measure.acceptance`). A look-up has no distribution
where nobody asked it: of its draft tokens the share is known that was accepted among those that had a trial
("conditional"), and in how many rounds there was a draft ("drafted"). Both rates are of every drafter that has them,
each under its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.analysis.bench.grid import with_count
from jaxspec.analysis.measure import acceptance, jobs
from jaxspec.analysis.measure.statistics import Ratio
from jaxspec.base import Model
from jaxspec.decode.generate import complete
from jaxspec.decode.request import Job


def measure(job: Job, gammas: Sequence[int]) -> dict[str, Any]:
    """What the draft tokens of a drafter are worth on a task.

    Args:
        job: with the drafter; its prompts are the unit of the intervals.
        gammas: draft tokens a round, one run each.

    Returns:
        "alpha", as value, stderr, low and high (95%), or None for what is no model; and "by_gamma", for each its
        "gamma", "conditional", "conditional_by_draft_token", "drafted" and "tokens_per_round".
    """
    found: dict[str, Any] = {"alpha": None, "by_gamma": []}
    if isinstance(job.options["drafter"], Model):
        found["alpha"] = acceptance.measure(job).rate.to_dict()
    for gamma in gammas:
        runs = []
        for part in jobs.in_batches(job.replace(gamma=gamma), acceptance.BATCH):
            out = complete(part.job)
            runs.append(jax.tree.map(lambda x, real=part.real: np.asarray(x)[:real], (out.stats, out.trace)))
        stats = jax.tree.map(lambda *parts: np.concatenate(parts), *(stats for stats, _ in runs))
        tested = acceptance.conditional(*(trace for _, trace in runs))
        drafted = [(trace.draft_length * (trace.num_committed > 0) > 0).sum(axis=1) for _, trace in runs]
        found["by_gamma"].append(
            {
                "gamma": gamma,
                "conditional": with_count(tested.overall),
                "conditional_by_draft_token": [with_count(rate) for rate in tested.by_draft_token],
                "drafted": Ratio(np.concatenate(drafted), stats.rounds, probability=True).to_dict(),
                "tokens_per_round": Ratio(stats.emitted - 1, stats.rounds).to_dict(),
            }
        )
    return found
