"""What is to be expected of a setting: its acceptance rate, what its passes cost, the speed that these promise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec import policies
from jaxspec.analysis.bench import plan as planning
from jaxspec.analysis.bench.row import Costs, Predicted, Rate, Spread
from jaxspec.analysis.bench.setting import ADAPTIVE, PLANNED, Setting
from jaxspec.analysis.measure import acceptance, cost, replay
from jaxspec.analysis.measure.statistics import Ratio
from jaxspec.analysis.theory import formulas, text_rounds
from jaxspec.core import Bound, Model, Policy
from jaxspec.decode.loop import Outcome
from jaxspec.decode.request import Prepared

MOST = 16  # the largest gamma that a plan considers
AT_A_TIME = 3  # timings of each pass between two timed runs


class NoPlanError(ValueError):
    """A setting whose gamma cannot be planned.

    Attributes:
        setting: the one.
    """

    def __init__(self, setting: Setting):
        super().__init__(
            f"gamma is {PLANNED!r}, but no acceptance rate is known of {setting.drafter_name} with the rule "
            f"{setting.rule.name}: give a number of draft tokens"
        )
        self.setting = setting


class Expected:
    """Measures what is expected of a group's settings; texts, rates and costs are found once, and serve all of them.

    Args:
        replays: whether rules are replayed along the target's texts; if not, alpha alone is measured.
        repeats: of costs that a plan or a policy is made of.
    """

    def __init__(self, replays: bool, repeats: int):
        self._replays, self._repeats = replays, repeats
        self._found: dict[tuple[Any, ...], Any] = {}

    def alpha(self, setting: Setting, prepared: Prepared) -> Ratio | None:
        """How often the rule accepts a draft token, over all positions of the target's own text; None if not known.

        Args:
            setting: of a group; of a drafter that is no model nothing is known where it was not asked.
            prepared: the same, for all prompts.
        """
        if not isinstance(setting.drafter, Model):
            return None
        trace, lenience = self.trace(setting, prepared), setting.rule.lenience
        if trace is None:
            measure = functools.partial(acceptance.measure, prepared)
            return self._once("alpha", setting, measure).rate if setting.rule.exact else None
        if lenience is not None:
            return self._once(("alpha", lenience), setting, lambda: replay.lenient_alpha(trace, lenience))
        return replay.evaluate(trace, setting.rule, gamma=1).alpha if _is_replayed(setting, trace) else None

    def replayed(self, setting: Setting, prepared: Prepared, gamma: int, rows: int | None = None) -> Ratio | None:
        """Tokens a round that the target's own texts yield; None of inexact rules, whose text is another.

        Args:
            gamma: draft tokens a round.
            rows: of greedy texts, so many; by default all.
        """
        trace = self.trace(setting, prepared)
        if trace is None or not setting.rule.exact or setting.policy is not None or not _is_replayed(setting, trace):
            return None
        own = trace if trace.temperature or rows is None else trace.first(rows)
        return replay.evaluate(own, setting.rule, gamma=gamma).tokens_per_round

    def trace(self, setting: Setting, prepared: Prepared) -> replay.LogitTrace | None:
        """The texts and their logits, where rules are replayed: of models, with a temperature and no other option."""
        if not self._replays or not isinstance(setting.drafter, Model) or set(setting.sampling) - {"temperature"}:
            return None
        return self._once("trace", setting, lambda: replay.collect(prepared.replace(gamma=1)))

    def plan(self, setting: Setting, prepared: Prepared, part: Prepared) -> tuple[int, bool]:
        """The plan's gamma, and whether it is to speculate; if not, the gamma is the best all the same.

        Args:
            part: one batch of it.

        Raises:
            NoPlanError: no acceptance rate is known of its drafter with its rule.
        """
        alpha = self.alpha(setting, prepared)
        if alpha is None:
            raise NoPlanError(setting)
        trace, value = self.trace(setting, prepared), min(alpha.value, 1.0)
        if trace is not None and setting.rule.lenience == 1:
            tokens = planning.tokens_by_gamma(trace, MOST)
        else:
            counts = None if trace is None else trace.counts
            tokens = [1.0, *(independent(value, counts, gamma) for gamma in range(1, MOST + 1))]
        costs = functools.partial(planning.costs, part, MOST, repeats=self._repeats)
        found = planning.plan(value, *self._once("costs", setting, costs), tokens=tokens)
        return found.best, found.gamma > 0

    def policy(self, setting: Setting, part: Prepared) -> Bound[Policy] | None:
        """The setting's own; `ADAPTIVE` with c and v as measured, searches included."""
        if setting.policy != ADAPTIVE:
            return setting.policy  # type: ignore[return-value]
        costs = functools.partial(cost.policy_costs, part, repeats=self._repeats)
        return policies.adaptive(*self._once(("policy", part.decoder.gamma), setting, costs))

    def predicted(
        self, setting: Setting, prepared: Prepared, gamma: int, lengths: np.ndarray, costs: Costs | None
    ) -> tuple[Predicted, Ratio | None]:
        """What is promised, but for `Predicted.rounds`; and replayed tokens a round.

        Args:
            lengths: of the texts that are timed.
            costs: of a round.
        """
        alpha, replayed = self.alpha(setting, prepared), self.replayed(setting, prepared, gamma, len(lengths))
        if costs is None or alpha is None or setting.policy is not None or prepared.decoder.trees:
            return Predicted(), replayed
        trace, value, c, v = self.trace(setting, prepared), min(alpha.value, 1.0), costs.c.median, costs.v.median
        counts = trace.counts if trace is not None and trace.temperature else lengths
        return Predicted(
            theorem=float(formulas.improvement(value, gamma, c, v)),
            independent=float(np.nan_to_num(independent(value, counts, gamma) / (gamma * c + v))),
            replayed=None if replayed is None else float(np.nan_to_num(replayed.value / (gamma * c + v))),
        ), replayed

    def _once(self, what: Any, setting: Setting, measure: Callable[[], Any]) -> Any:
        key = (what, id(setting.target), id(setting.drafter))
        if key not in self._found:
            self._found[key] = measure()
        return self._found[key]


class Passes:
    """The costs of a drafter's passes, timed a little at a time, between the runs that they explain.

    Args:
        prepared: one batch, with the drafter.
        drafts: numbers of draft tokens that its passes judge.
        searches: whether a look-up's search is timed, too.

    c is that of the model that drafts; of cascades, layers of the target and heads, a whole draft's over its tokens.
    """

    def __init__(self, prepared: Prepared, drafts: Sequence[int], searches: bool):
        self._whole = prepared if cost.drafts_as_a_whole(prepared) else None  # a cascade, layers of the target, a head
        self._model = None if self._whole else cost.paid_model(prepared)
        self._prepared = prepared.replace(drafter=self._model or prepared.target, policy=None, gamma=1, rule=None)
        self._drafts, self._found, self._each = sorted(set(drafts)), [], list[float]()
        self._search = cost.search_cost(prepared) if searches and self._model is None else None if not searches else 0.0

    def time(self) -> None:
        """Times each pass a few times."""
        self._found.append(cost.measure_all(self._prepared, self._drafts, repeats=AT_A_TIME))
        if self._whole is not None:
            self._each.append(cost.draft_cost(self._whole, AT_A_TIME) / self._whole.decoder.gamma)

    def costs(self, drafts: int) -> Costs:
        """Of rounds with so many draft tokens."""
        found = [some[self._drafts.index(drafts)] for some in self._found]

        def spread(name: str) -> Spread:
            return Spread.of(np.array([getattr(one, name) for one in found]))

        c = spread("c") if self._model is not None else Spread.of(np.array(self._each or [0.0]))
        draft = None if self._model is None else spread("draft_ms")
        return Costs(c, spread("v"), self._search, spread("target_ms"), spread("verify_ms"), draft)

    def passes(self, prepared: Prepared, outcomes: Sequence[Outcome], policy: bool) -> float | None:
        """What the rounds of some generations take, in one-token passes; None of trees.

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
        c, search = self.costs(self._drafts[0]).c.median, self._search or 0.0
        return float(v[longest].sum() + c * longest.sum() + search * len(longest))


def drafts_of(prepared: Prepared, policy: bool) -> tuple[int, ...]:
    """How many draft tokens the passes of a decoder judge."""
    return cost.measured_drafts(prepared.decoder.gamma) if policy else (prepared.decoder.nodes,)


def longest_drafts(outcome: Outcome) -> np.ndarray:
    """The longest draft of each round of a batch, of rows that are not finished."""
    rounds = np.asarray(outcome.stats.rounds)
    made = np.asarray(outcome.trace.draft_length)
    live = np.arange(made.shape[1])[None, :] < rounds[:, None]
    return np.where(live, made, 0).max(axis=0)[: rounds.max()]


def independent(alpha: float, counts: np.ndarray | None, gamma: int) -> float:
    """Tokens a round of draft tokens that are accepted independently of each other, in texts of some lengths."""
    if counts is None:
        return float(formulas.expected_tokens(alpha, gamma))
    return text_rounds.independent_tokens(alpha, np.asarray(counts), gamma)


def _is_replayed(setting: Setting, trace: replay.LogitTrace) -> bool:
    rule = setting.rule
    return rule.acceptance_ratio is not None and (trace.temperature > 0 or replay.matches_when_greedy(rule))


def overlap(prepared: Prepared, first: Model) -> Rate:
    """How much of their distributions a generation's target and the first one share, at temperature 1."""
    reference = prepared._replace(target=first)
    own = reference.replace(drafter=prepared.target, policy=None, rule=None, temperature=1.0)
    return Rate.of(acceptance.measure(own).rate)
