"""The acceptance rate of a setting, the costs of its passes, and the speed that these promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxspec import policies
from jaxspec.analysis import acceptance, cost, formulas, policy_cost
from jaxspec.analysis import plan as planning
from jaxspec.analysis.result import Costs, Spread
from jaxspec.analysis.setting import ADAPTIVE, PLANNED, Setting
from jaxspec.analysis.statistics import Ratio
from jaxspec.core import BoundPolicy, Model
from jaxspec.decode.loop import Outcome
from jaxspec.decode.request import Prepared

MOST = 16  # the largest gamma that a plan considers
AT_A_TIME = 3  # timings of each pass between two timed runs

Measured = TypeVar("Measured")


class NoPlanError(ValueError):
    """A setting whose gamma cannot be planned.

    Attributes:
        setting: the setting.
    """

    def __init__(self, setting: Setting):
        super().__init__(
            f"gamma is {PLANNED!r}, but no acceptance rate is known of {setting.drafter_name} with the rule "
            f"{setting.rule.name}: give a number of draft tokens"
        )
        self.setting = setting


def has_alpha(setting: Setting) -> bool:
    """Tells whether a setting has an acceptance rate: its drafter is a model, its rule exact or of a known lenience."""
    return isinstance(setting.drafter, Model) and (setting.rule.exact or setting.rule.lenience is not None)


class Predictor:
    """Measures rates, plans and costs of a group's settings, each once for all settings that it serves.

    Args:
        repeats: repeats of the costs for a plan or a policy.
    """

    def __init__(self, repeats: int):
        self._repeats = repeats
        self._measured: dict[tuple[Any, ...], Any] = {}

    def alpha(self, setting: Setting, prepared: Prepared) -> Ratio | None:
        """Measures the acceptance rate, over all positions of the target's own text; None if there is none.

        Args:
            setting: one of a group.
            prepared: the same, for all prompts.
        """
        if not has_alpha(setting):
            return None
        key = "alpha", setting.rule.lenience or 1.0
        return self._once(key, setting, lambda: acceptance.measure(prepared).rate)

    def plan(self, setting: Setting, prepared: Prepared) -> planning.Plan:
        """Plans gamma for a setting.

        Raises:
            NoPlanError: no acceptance rate is known of its drafter with its rule.
        """
        if not has_alpha(setting):
            raise NoPlanError(setting)
        options = {"batches": (setting.batch,), "most": MOST, "repeats": self._repeats}
        key = "plan", setting.rule.lenience or 1.0
        return self._once(key, setting, lambda: next(planning.of_pair(prepared, **options)))

    def policy(self, setting: Setting, part: Prepared) -> BoundPolicy | None:
        """Returns the setting's policy; in the place of `ADAPTIVE` one with c and v as measured, searches included."""
        if setting.policy != ADAPTIVE:
            return setting.policy  # type: ignore[return-value]
        key = "policy", part.decoder.gamma
        costs = self._once(key, setting, lambda: policy_cost.policy_costs(part, repeats=self._repeats))
        rows = len(part.request.max_new_tokens)
        together = policy_cost.agreement("batch", rows, part.is_sampled, part.options["rule"])
        return policies.adaptive(*costs, together=together)

    def theorem(self, setting: Setting, prepared: Prepared, costs: Costs | None) -> float | None:
        """Computes the speed by Theorem 3.8; None of trees, of policies, and where alpha is not known."""
        alpha = self.alpha(setting, prepared)
        if costs is None or alpha is None or setting.policy is not None or prepared.decoder.trees:
            return None
        gamma = prepared.decoder.gamma
        return float(formulas.improvement(min(alpha.value, 1.0), gamma, costs.c.median, costs.v.median))

    def _once(self, key: Any, setting: Setting, measure: Callable[[], Measured]) -> Measured:
        key = (key, id(setting.target), id(setting.drafter))
        if key not in self._measured:
            self._measured[key] = measure()
        return self._measured[key]


class PassTimer:
    """The costs of a drafter's passes, timed a little at a time, between the runs that they explain.

    Args:
        prepared: one batch, with the drafter.
        drafts: numbers of draft tokens that its passes judge.

    c is that of the model that drafts; of several, layers of the target and heads, a whole draft's over its tokens.
    """

    def __init__(self, prepared: Prepared, drafts: Sequence[int]):
        self._drafted_whole = prepared if cost.drafts_as_a_whole(prepared) else None
        self._model = cost.paid_model(prepared)
        self._pair = prepared.replace(drafter=self._model or prepared.target, policy=None, gamma=1, rule=None)
        self._drafts, self._repeats, self._per_draft_token = sorted(set(drafts)), [], list[float]()
        self._search = cost.search_cost(prepared)

    def time(self) -> None:
        """Times each pass a few times."""
        self._repeats.append(cost.measure_all(self._pair, self._drafts, repeats=AT_A_TIME))
        if (prepared := self._drafted_whole) is not None:
            self._per_draft_token.append(cost.draft_cost(prepared, AT_A_TIME) / prepared.decoder.gamma)

    def costs(self, drafts: int) -> Costs:
        """Summarises the timings, for rounds with `drafts` draft tokens."""
        repeats = [costs[self._drafts.index(drafts)] for costs in self._repeats]

        def spread(name: str) -> Spread:
            return Spread.of(np.array([getattr(repeat, name) for repeat in repeats]))

        c = spread("c") if self._model is not None else Spread.of(np.array(self._per_draft_token or [0.0]))
        draft = None if self._model is None else spread("draft_ms")
        return Costs(c, spread("v"), self._search, spread("target_ms"), spread("verify_ms"), draft)

    def passes(self, prepared: Prepared, outcomes: Sequence[Outcome], policy: bool) -> float | None:
        """Sums the costs of the rounds of some generations, in one-token passes; None of trees.

        A policy's draft has the length that it chose. Without one it is drawn whole, though what a row can no longer
        emit is cut; or not at all, by a drafter without a draft (of `fallback`, this charges the model where a look-up
        answered). In a batch a round is as long as its longest draft.
        """
        assert prepared.drafter is not None
        if prepared.decoder.trees:
            return None
        gamma, may_be_empty = prepared.decoder.gamma, prepared.drafter.functions.may_be_empty
        longest = np.concatenate([longest_drafts(outcome) for outcome in outcomes])
        if policy:
            v = cost.monotone_costs(gamma, {n: self.costs(n).v.median for n in cost.measured_drafts(gamma)})
        else:
            v = np.full(gamma + 1, self.costs(gamma).v.median)
            v[0] = 1.0 if may_be_empty else v[0]
            longest = np.where(longest > 0, gamma, 0 if may_be_empty else gamma)
        c = self.costs(self._drafts[0]).c.median
        return float(v[longest].sum() + c * longest.sum() + self._search * len(longest))


def draft_lengths(prepared: Prepared, policy: bool) -> tuple[int, ...]:
    """Lists the numbers of draft tokens that the passes of a decoder judge."""
    return cost.measured_drafts(prepared.decoder.gamma) if policy else (prepared.decoder.nodes,)


def longest_drafts(outcome: Outcome) -> np.ndarray:
    """Finds the longest draft of each round of a batch, over the rows that are not finished."""
    rounds = np.asarray(outcome.stats.rounds)
    drafted = np.asarray(outcome.trace.draft_length)
    live = np.arange(drafted.shape[1])[None, :] < rounds[:, None]
    return np.where(live, drafted, 0).max(axis=0)[: rounds.max()]
