"""Measures what speculation promises the settings of a benchmark: acceptance rates, plans, costs between the runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec import policies
from jaxspec.analysis import acceptance, cost
from jaxspec.analysis import plan as planning
from jaxspec.analysis import result as records
from jaxspec.analysis.result import ADAPTIVE, Setting
from jaxspec.analysis.statistics import Rate, Spread
from jaxspec.core import BoundPolicy, Model
from jaxspec.decode.loop import Outcome
from jaxspec.decode.request import Prepared

MOST = 16  # the largest gamma that a plan considers
AT_A_TIME = 3  # timings of each pass between two timed runs


def has_alpha(setting: Setting) -> bool:
    """Tells whether a setting has an acceptance rate: its drafter is a model, its rule exact or of a known lenience."""
    return isinstance(setting.drafter, Model) and (setting.rule.exact or setting.rule.lenience is not None)


class Predictor:
    """Measures rates, plans and costs of a group's settings, each once for all settings that it serves."""

    def __init__(self, repeats: int):
        self._repeats = repeats
        self._measured: dict[tuple[Any, ...], Any] = {}

    def alpha(self, setting: Setting, prepared: Prepared) -> Rate | None:
        """Measures the acceptance rate, over all positions of the target's own text; None if there is none."""
        if not has_alpha(setting):
            return None
        key = "alpha", setting.rule.lenience or 1.0
        return self._once(key, setting, lambda: acceptance.measure(prepared).rate)

    def plan(self, setting: Setting, prepared: Prepared) -> planning.Plan:
        """Plans gamma for a setting that has an acceptance rate."""
        options = {"batches": (setting.batch,), "most": MOST, "repeats": self._repeats}
        key = "plan", setting.rule.lenience or 1.0
        return self._once(key, setting, lambda: next(planning.of_pair(prepared, **options)))

    def policy(self, setting: Setting, part: Prepared) -> BoundPolicy | None:
        """Returns the setting's policy; in the place of `ADAPTIVE` one with c and v as measured, searches included."""
        if setting.policy != ADAPTIVE:
            return setting.policy  # type: ignore[return-value]
        key = "policy", part.decoder.gamma
        costs = self._once(key, setting, lambda: cost.policy_costs(part, repeats=self._repeats))
        rows = len(part.request.max_new_tokens)
        return policies.adaptive(*costs, together=cost.agreement("batch", rows, part.is_sampled, part.options["rule"]))

    def _once(self, key: Any, setting: Setting, measure: Callable[[], Any]) -> Any:
        key = (key, id(setting.target), id(setting.drafter))
        if key not in self._measured:
            self._measured[key] = measure()
        return self._measured[key]


class PassTimer:
    """The costs of a drafter's passes, timed a little at a time, between the runs that they explain.

    Args:
        prepared: one batch, with the drafter.
        drafts: numbers of draft tokens that its passes judge.

    c is that of the model that drafts; of several, layers of the target and heads, a whole draft's over its tokens. A
    look-up has no c, and a whole draft is a round's search.
    """

    def __init__(self, prepared: Prepared, drafts: Sequence[int]):
        self._prepared, self._model = prepared, cost.paid_model(prepared)
        self._pair = prepared.replace(drafter=self._model or prepared.target, policy=None, gamma=1, rule=None)
        self._drafts, self._repeats, self._whole = sorted(set(drafts)), [], list[float]()

    def time(self) -> None:
        """Times each pass a few times."""
        self._repeats.append(cost.measure_all(self._pair, self._drafts, repeats=AT_A_TIME))
        if self._model is None:
            self._whole.append(cost.draft_cost(self._prepared, AT_A_TIME))

    def costs(self, drafts: int) -> records.Costs:
        """Summarises the timings, for rounds with `drafts` draft tokens."""
        repeats = [costs[self._drafts.index(drafts)] for costs in self._repeats]

        def spread(name: str) -> Spread:
            return Spread.of(np.array([getattr(repeat, name) for repeat in repeats]))

        # What is no single model's is timed as whole drafts: a cost of each draft token, or of a round's look-up.
        c, search, draft, passes = Spread(0.0, 0.0, 0.0), 0.0, None, np.array(self._whole)
        if self._model is not None:
            c, draft = spread("c"), spread("draft_ms")
        elif cost.drafts_as_a_whole(self._prepared):
            c = Spread.of(passes / self._prepared.decoder.gamma)
        else:
            search = float(np.median(passes))
        return records.Costs(c, spread("v"), search, spread("target_ms"), spread("verify_ms"), draft)

    def passes(self, prepared: Prepared, outcomes: Sequence[Outcome], policy: bool) -> float:
        """Sums the costs of the rounds of some generations of chains, in one-token passes.

        A policy's draft has the length that it chose. Without one it is drawn whole, though what a row can no longer
        emit is cut; or not at all, by a drafter without a draft (of `fallback`, this charges the model where a look-up
        answered). In a batch a round is as long as its longest draft.
        """
        assert prepared.drafter is not None
        gamma, may_be_empty = prepared.decoder.gamma, prepared.drafter.functions.may_be_empty
        longest = np.concatenate([longest_drafts(outcome) for outcome in outcomes])
        if policy:
            v = cost.monotone_costs(gamma, {n: self.costs(n).v.median for n in cost.measured_drafts(gamma)})
        else:
            v = np.full(gamma + 1, self.costs(gamma).v.median)
            v[0] = 1.0 if may_be_empty else v[0]
            longest = np.where(longest > 0, gamma, 0 if may_be_empty else gamma)
        costs = self.costs(self._drafts[0])
        return float(v[longest].sum() + costs.c.median * longest.sum() + costs.search * len(longest))


def draft_lengths(prepared: Prepared, policy: bool) -> tuple[int, ...]:
    """Lists the numbers of draft tokens that the passes of a decoder judge."""
    return cost.measured_drafts(prepared.decoder.gamma) if policy else (prepared.decoder.nodes,)


def longest_drafts(outcome: Outcome) -> np.ndarray:
    """Finds the longest draft of each round of a batch, over the rows that are not finished."""
    rounds = np.asarray(outcome.stats.rounds)
    drafted = np.asarray(outcome.trace.draft_length)
    live = np.arange(drafted.shape[1])[None, :] < rounds[:, None]
    return np.where(live, drafted, 0).max(axis=0)[: rounds.max()]
