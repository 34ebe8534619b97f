"""The costs of passes, in one-token passes of the target: c is the drafter's one-token pass, v the
verify pass.

Compiled loops of passes, of drafts and of rounds are timed interleaved, so that other load falls on
all of them alike. `policy_costs` times whole rounds of a policy's own program: drafting, the pass
of the width that so many tokens need, the verdict and the commit.

Shapes: B batch, T step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import core, nets, policies
from jaxspec.analysis import acceptance
from jaxspec.analysis.result import Costs
from jaxspec.analysis.statistics import Spread
from jaxspec.core import kv_cache, noise, programs, token_rows
from jaxspec.core.checks import at_least
from jaxspec.core.round import bucket_widths
from jaxspec.decode import loop
from jaxspec.decode import state as states
from jaxspec.decode.loop import Outcome
from jaxspec.decode.request import Prepared
from jaxspec.drafters.common import as_drafter
from jaxspec.policies.adaptive import Together
from jaxspec.sampling import match_vocab
from jaxspec.weights import quantisation

REPEATS = 25  # timings of each pass: plans and policies are no better than these numbers
# Gammas whose verify pass is timed: those over 2, 3, 4, 5, 6, 8, 12, 16, ... tokens, where v has
# its steps, and over 9 and 17, after two of them. It is taken to be linear between them.
TIMED = (1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 23, 31, 47, 63)
# The least duration of a timed loop of rounds: a call with many arguments takes part of a
# millisecond itself.
ROUNDS_SECONDS = 0.15
AT_A_TIME = 3  # timings of each pass between two timed runs
FAR = 1e6  # a cost, or a weight of a belief, that nothing outweighs
WARMUP = 4  # passes, to learn how long one takes
# The least duration of a timed loop. Short loops see the same other work of the machine.
MIN_SECONDS = 0.03


def interleave(calls: Sequence[Callable[[], object]], repeats: int) -> np.ndarray:
    """Times calls, interleaved as a b c a b c, in seconds [calls, repeats]. Each call waits for its
    result.
    """
    seconds = np.zeros((len(calls), repeats))
    for repeat in range(repeats):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            seconds[index, repeat] = time.perf_counter() - start
    return seconds


@programs.jit(static_argnames=("lm",), donate_argnames=("cache",))
def passes(
    lm: core.LanguageModel,
    params: core.Params,
    cache: core.Cache,
    length: Int[Array, " B"],
    tokens: Int[Array, "B T"],
    inner: Int[Array, ""],
    keys: core.Keys | None = None,
) -> tuple[Int[Array, "B T"], core.Cache]:
    """Makes `inner` passes over T tokens, each at `length`: extend, argmax of all logits, rewind.

    With keys, one per row, the noise of one position is added before the argmax. That takes as long
    as a draw, or as a rule that looks at T distributions and draws one token. The number of passes
    is traced, so that the compiler, too, sees a loop. The cache is consumed.
    """

    def one_pass(index, carry):
        tokens, cache = carry
        forward, cache = lm.extend(params, cache, tokens)
        values = forward.logits  # [B, T, V]
        if keys is not None:
            position_keys = noise.at(keys, jnp.full_like(length, index), noise.Purpose.TOKEN)
            values = (
                jax.nn.log_softmax(values) + noise.gumbel(position_keys, lm.vocab_size)[:, None]
            )
        return noise.first_largest(values), lm.rewind(cache, length)

    return jax.lax.fori_loop(0, inner, one_pass, (tokens, lm.rewind(cache, length)))


@programs.jit(
    static_argnames=("drafter", "target", "gamma", "sampled"), donate_argnames=("caches",)
)
def drafts(
    drafter: core.Drafter,
    target: core.LanguageModel,
    gamma: int,  # draft tokens of each draft
    sampled: bool,  # whether they are drawn, at temperature 1
    weights: core.Weights,
    caches: core.Caches,
    row: core.Prompt,
    verified: core.Forward,  # zeros, in place of the target's outputs at every fed token
    inner: Int[Array, ""],
) -> tuple[core.Caches, core.Prompt]:
    """Drafts `inner` times, commits each draft whole, and puts its first token in the place of the
    last one.
    """

    def to_distribution(
        logits: Float[Array, "B T W"], draft_tokens: Any = None, seen: Any = None
    ) -> core.Distribution:
        logits = match_vocab(logits, target.vocab_size)
        if sampled:
            return core.Distribution(log_probs=jax.nn.log_softmax(logits), logits=logits)
        return core.Distribution(tokens=noise.first_largest(logits), logits=logits)

    keys = noise.row_keys(jax.random.key(0), row.length.shape[0])
    limit = jnp.full_like(row.length, gamma)
    # A tree's first gamma nodes stand for its accepted path: which entries of caches move does not
    # change the time.
    first_path = jnp.broadcast_to(jnp.arange(gamma, dtype=jnp.int32), (*row.length.shape, gamma))

    def draft_once(_, carry: tuple[core.Caches, core.Prompt]) -> tuple[core.Caches, core.Prompt]:
        caches, row = carry
        context = core.DraftContext(keys, row, limit, gamma, False, to_distribution)
        draft, caches = drafter.propose(weights, caches, context)
        first = draft.tokens[:, :1]
        logits = jnp.broadcast_to(jax.nn.one_hot(first, target.vocab_size), verified.logits.shape)
        length = jnp.minimum(draft.length, gamma)
        verdict = core.Verdict(
            length, first[:, 0], draft.length, None if draft.parent is None else first_path
        )
        caches = drafter.commit(
            core.RoundEnd(weights, caches, row, verdict, verified._replace(logits=logits))
        )
        return caches, row._replace(tokens=token_rows.append(row.tokens, row.length - 1, first))

    return jax.lax.fori_loop(0, inner, draft_once, (caches, row))


class TimedLoop(NamedTuple):
    """A call that makes a number of passes and waits for them, and that number."""

    call: Callable[[], None]
    passes: int


def pass_loops(
    model: core.Model, prepared: Prepared, most: int, inner: int | None
) -> Callable[..., TimedLoop]:
    """Returns a function from a number of tokens to a warm loop of a model's passes over so many;
    the loops share a cache.

    The generation's prompt is in the cache, with room for its new tokens and drafts of `most`. If
    it samples, each pass also draws a token. A recurrent layer does again in each pass what a round
    may take back. So each of its loops has a cache, made for drafts of one token less than a pass
    reads, or of `nodes` tokens.
    """
    lm = model.lm
    prompt = prepared.prompt
    headroom = token_rows.headroom(prepared.max_new_tokens, most)

    def read(nodes: int) -> tuple[core.Forward, core.Cache]:
        return _prefill(lm, model.params, prompt, token_rows.room(lm, prompt, headroom, nodes))

    has_states = bool(kv_cache.states(jax.eval_shape(lambda: read(headroom))[1]))
    # The log of `headroom` tokens would be the largest of all, and no loop reads it where there are
    # states.
    forward, cache = read(1 if has_states else headroom)
    shared = None if has_states else [cache]
    length = token_rows.decoder_prompt(lm, prompt).length
    first = jnp.argmax(forward.logits, axis=-1).astype(jnp.int32)
    keys = None
    if prepared.is_sampled:
        keys = noise.row_keys(jax.random.key(0), len(prompt.length))

    def loop_over(step: int, nodes: int | None = None) -> TimedLoop:
        tokens = jnp.repeat(first, step, axis=1)
        caches = shared or [read(step - 1 if nodes is None else nodes)[1]]
        return timed_loop(
            lambda cache, n: passes(lm, model.params, cache, length, tokens, n, keys)[1],
            caches,
            inner,
        )

    return loop_over


def seconds_per_pass(
    loops: Sequence[TimedLoop], repeats: int
) -> Float[np.ndarray, "loops repeats"]:
    """Times loops, interleaved, and divides by their passes."""
    return interleave([loop.call for loop in loops], repeats) / np.array(
        [[loop.passes] for loop in loops]
    )


def draft_loop(prepared: Prepared, inner: int | None) -> TimedLoop:
    """Makes a warm loop of whole drafts by a generation's drafter, which go on from the state after
    prefill.
    """
    assert prepared.drafter is not None and isinstance(prepared.drafter.functions, core.Drafter)
    lm = prepared.target.lm
    weights = prepared.weights
    state = loop.prefill(prepared)
    # caches are donated
    caches, row = jax.tree.map(jnp.copy, (state.caches, core.Prompt(state.tokens, state.length)))
    fed = jax.ShapeDtypeStruct((len(row.length), prepared.decoder.nodes + 1), jnp.int32)
    forward, _ = jax.eval_shape(lm.extend, weights.target, caches.target, fed)
    verified = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), forward)
    static = prepared.drafter.functions, lm, prepared.decoder.gamma, prepared.is_sampled
    return timed_loop(
        lambda carry, n: drafts(*static, weights, *carry, verified, n), [(caches, row)], inner
    )


def timed_loop(
    advance: Callable[[Any, Int[Array, ""]], Any],
    carry: list[Any],
    inner: int | None,
    least: float | None = None,
) -> TimedLoop:
    """Compiles and warms up a loop of passes, and settles on as many as take `least` seconds, or
    `MIN_SECONDS`.

    Args:
        advance: (state, number of passes) -> the state after them. It may consume the state that it
            is given.
        carry: the state, alone in a list that loops may share.
        inner: the number of passes, if it is fixed.
    """

    def call(count: int) -> None:
        carry[0] = jax.block_until_ready(advance(carry[0], jnp.asarray(count, jnp.int32)))

    call(inner or WARMUP)
    if inner is None:
        seconds = float(np.median(interleave([functools.partial(call, WARMUP)], 3))) / WARMUP
        inner = int(np.clip(round((least or MIN_SECONDS) / seconds), 1, 1000))
    return TimedLoop(functools.partial(call, inner), inner)


@programs.jit(static_argnames=("lm",))
def _prefill(lm: core.LanguageModel, params: core.Params, prompt: core.Prompt, room: core.Room):
    return lm.prefill(params, prompt, room)


def run_all(generations: Iterable[Prepared]) -> None:
    """Runs whole generations, one after the other, and leaves their texts on the device."""
    for prepared in generations:
        loop.run(prepared).tokens.block_until_ready()


def only_first(prepared: Prepared) -> Prepared:
    """Ends a generation with the token that prefill yields; the program stays the same."""
    return prepared._replace(
        request=prepared.request._replace(
            max_new_tokens=jnp.ones_like(prepared.request.max_new_tokens)
        )
    )


def timed_rounds(prepared: Prepared) -> Iterator[tuple[float, core.RoundInfo | None]]:
    """Yields the milliseconds of prefill (with None) and of each round, with its `RoundInfo`."""
    began = time.perf_counter()
    for state, info in loop.iterate_rounds(prepared):
        jax.block_until_ready((state, info))
        yield 1e3 * (time.perf_counter() - began), info
        began = time.perf_counter()


class Cost(NamedTuple):
    """Milliseconds per pass, one entry per repeat; the three were interleaved.

    >>> cost = Cost(
    ...     4, 1, np.array([10.0, 12.0]), verify=np.array([12.0, 14.4]), draft=np.array([1.0, 1.2])
    ... )
    >>> cost.target_ms, round(cost.c, 2), round(cost.v, 2)
    (11.0, 0.1, 1.2)
    """

    # these two: the verify pass feeds gamma + 1 tokens to each of `batch` rows
    gamma: int
    batch: int
    target: np.ndarray  # one-token passes of the target
    verify: np.ndarray  # (gamma + 1)-token passes of the target
    draft: np.ndarray  # one-token passes of the drafter

    target_ms = property(
        lambda self: float(np.median(self.target)), doc="Median of a one-token pass of the target."
    )
    verify_ms = property(
        lambda self: float(np.median(self.verify)), doc="Median of the verify pass."
    )
    draft_ms = property(
        lambda self: float(np.median(self.draft)), doc="Median of a one-token pass of the drafter."
    )
    c = property(lambda self: float(np.median(self.c_each)), doc="Median of `c_each`.")
    v = property(lambda self: float(np.median(self.v_each)), doc="Median of `v_each`.")

    # Repeat by repeat, since neighbours in time share the load: 1.2 / 12 is 0.1, and 14.4 / 12 is
    # 1.2.
    c_each = property(
        lambda self: self.draft / self.target, doc="The ratio draft / target, repeat by repeat."
    )
    v_each = property(
        lambda self: self.verify / self.target, doc="The ratio verify / target, repeat by repeat."
    )


def measure(prepared: Prepared, *, repeats: int = REPEATS, inner: int | None = None) -> Cost:
    """Measures c and v on the device, at the batch and the gamma of a generation, at the length
    that prefill leaves.

    Each figure is the time of one jitted loop of `inner` passes, divided by `inner`. Nothing is
    dispatched between passes, and the cache is carried in place, as in decoding. Each pass feeds
    the argmax of the last, or a draw if the generation samples: noise for a whole vocabulary is a
    good part of a small drafter's pass. The loops are compiled and warmed up first. They are short
    and interleaved, so that other load falls on all alike.

    Args:
        prepared: a generation with a target and a draft model. Its `max_new_tokens` sizes the
            caches, and a pass reads all of them.
        repeats: measurements of each pass; medians count.
        inner: passes per measurement; by default as many as take some 30 ms.

    Raises:
        TypeError: the drafter is not a Model.
        ValueError: repeats or inner < 1.

    Example:
        >>> from jaxspec.testing import prepared_table
        >>> cost = measure(prepared_table(gamma=4), repeats=2, inner=3)
        >>> cost.batch, cost.c > 0, len(cost.verify)
        (2, True, 2)

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Definition 3.7.
    """
    return measure_all(prepared, (prepared.decoder.gamma,), repeats=repeats, inner=inner)[0]


def measure_all(
    prepared: Prepared,
    gammas: Sequence[int],
    *,
    repeats: int = REPEATS,
    inner: int | None = None,
    advance: Callable[[int], object] = lambda gamma: None,
) -> list[Cost]:
    """Measures costs as `measure` does, for several gammas, whose passes are all interleaved, to be
    compared.

    Args:
        gammas: draft tokens a round.
        advance: called with each gamma when its pass is compiled, which takes longest; timing
            follows.

    Returns:
        A Cost for each gamma, in their order; those of one-token passes are the same in all of
        them.
    """
    at_least(1, repeats=repeats, inner=1 if inner is None else inner)
    draft = acceptance.drafting_model(prepared)
    if not gammas:
        return []
    at_least(0, gamma=min(gammas))
    most = max(gammas)
    target_loop = pass_loops(prepared.target, prepared, most, inner)
    loops = [target_loop(1), pass_loops(draft, prepared, most, inner)(1, most)]
    for gamma in gammas:
        loops.append(target_loop(gamma + 1))
        advance(gamma)
    target_ms, draft_ms, *verify_ms = 1e3 * seconds_per_pass(loops, repeats)
    batch = len(prepared.prompt.length)
    return [
        Cost(gamma, batch, target_ms, ms, draft_ms)
        for gamma, ms in zip(gammas, verify_ms, strict=True)
    ]


def gammas_up_to(most: int, among: Sequence[int] = TIMED) -> tuple[int, ...]:
    """Lists the gammas whose v is measured, up to `most`.

    >>> gammas_up_to(9), gammas_up_to(4, (5,)), gammas_up_to(16, (5,))
    ((1, 2, 3, 4, 5, 7, 8, 9), (4,), (5, 16))
    """
    return (*(gamma for gamma in among if gamma < most), most)


def interpolated_v(costs: Sequence[Any], most: int) -> np.ndarray:
    """Returns v by gamma, linear between those of some costs, or of other values that have a
    `gamma` and a `v`.

    >>> passes = np.ones(1)
    >>> costs = [
    ...     Cost(gamma, 1, passes, v * passes, 0.1 * passes) for gamma, v in ((1, 1.5), (3, 2.0))
    ... ]
    >>> interpolated_v(costs, 4).tolist()
    [1.0, 1.5, 1.75, 2.0, 2.0]
    """
    return np.interp(
        np.arange(most + 1),
        [0, *(timed.gamma for timed in costs)],
        [1.0, *(timed.v for timed in costs)],
    )


def drafts_as_a_whole(prepared: Prepared) -> bool:
    """Tells whether drafts are timed whole: they cost the target's layers, a head, or more than one
    model's passes.

    A drafter that is one model's alone has that model's parameters; those of cascades and fallbacks
    are of all parts.
    """
    bound = prepared.drafter
    if bound is None or (bound.target is None and not bound.models):
        return False
    return bound.target is not None or bound.params is not bound.models[0].params


def paid_model(prepared: Prepared) -> core.Model | None:
    """Returns the one model whose passes are what draft tokens cost; None if drafts are timed
    whole, or looked up.
    """
    bound = prepared.drafter
    if bound is None or not bound.models or drafts_as_a_whole(prepared):
        return None
    return bound.models[0]


def draft_cost(prepared: Prepared, repeats: int, inner: int | None = None) -> float:
    """Measures the cost of a whole draft, with the draws of its tokens where they are drawn, in
    passes of the target.

    Args:
        prepared: with a drafter (a look-up, the target's own layers, a head, a cascade), which
            draws its tokens if the generation samples.
    """
    target_loop = pass_loops(prepared.target, prepared, prepared.decoder.nodes, inner)(1)
    target, draft = seconds_per_pass([target_loop, draft_loop(prepared, inner)], repeats)
    return float(np.median(draft / target))


def measured_drafts(gamma: int) -> tuple[int, ...]:
    """Lists the numbers of draft tokens, 0 left out, that the passes of a policy of at most `gamma`
    can judge.

    >>> measured_drafts(7), measured_drafts(5)
    ((1, 3, 7), (1, 3, 5))
    """
    return tuple(width - 1 for width in bucket_widths(gamma, adaptive=True, may_be_empty=False)[1:])


def monotone_costs(gamma: int, v: dict[int, float]) -> np.ndarray:
    """Returns the cost of judging 0, 1, .. gamma draft tokens, in one-token passes [gamma + 1]:
    never falling.

    Args:
        gamma: most draft tokens.
        v: the cost of the pass that judges up to n draft tokens, by n; more than the largest n are
            `FAR` too many.

    >>> monotone_costs(5, {1: 1.25, 3: 1.5, 5: 1.4}).tolist(), monotone_costs(2, {1: 0.9}).tolist()
    ([1.0, 1.25, 1.5, 1.5, 1.5, 1.5], [1.0, 1.0, 1000000.0])
    """
    # noise makes some pass cheaper than a shorter one
    costs = np.maximum.accumulate([1.0, *v.values()])
    return np.append(costs, FAR)[np.searchsorted((0, *v), np.arange(gamma + 1))]


def operations_ratio(target: core.Model, drafter: core.Model) -> float:
    """Returns the operations per token of the drafter over the target's (c_hat of Theorem 3.11), by
    their weights.
    """

    def weights(model: core.Model) -> float:
        network = nets.find(model.config)
        if network is None:
            return quantisation.count(model.params)
        return network.load(model.config).per_token  # 0 of tables, which look up

    return weights(drafter) / weights(target)


class PassTimer:
    """The costs of a drafter's passes, timed a little at a time, between the runs that they
    explain.

    Args:
        prepared: one batch, with the drafter.
        drafts: numbers of draft tokens that its passes judge.

    c is that of the model that drafts; of several, layers of the target and heads, a whole draft's
    over its tokens. A look-up has no c, and a whole draft is a round's search.
    """

    def __init__(self, prepared: Prepared, drafts: Sequence[int]):
        self._prepared = prepared
        self._model = paid_model(prepared)
        self._pair = prepared.replace(
            drafter=self._model or prepared.target, policy=None, gamma=1, rule=None
        )
        self._drafts = sorted(set(drafts))
        self._repeats = []
        self._whole = list[float]()

    def time(self) -> None:
        """Times each pass a few times."""
        self._repeats.append(measure_all(self._pair, self._drafts, repeats=AT_A_TIME))
        if self._model is None:
            self._whole.append(draft_cost(self._prepared, AT_A_TIME))

    def costs(self, drafts: int) -> Costs:
        """Summarises the timings, for rounds with `drafts` draft tokens."""
        repeats = [costs[self._drafts.index(drafts)] for costs in self._repeats]

        def spread(name: str) -> Spread:
            return Spread.of(np.array([getattr(repeat, name) for repeat in repeats]))

        # What is no single model's is timed as whole drafts: a cost of each draft token, or of a
        # round's look-up.
        c = Spread(0.0, 0.0, 0.0)
        search = 0.0
        draft = None
        passes = np.array(self._whole)
        if self._model is not None:
            c = spread("c")
            draft = spread("draft_ms")
        elif drafts_as_a_whole(self._prepared):
            c = Spread.of(passes / self._prepared.decoder.gamma)
        else:
            search = float(np.median(passes))
        return Costs(c, spread("v"), search, spread("target_ms"), spread("verify_ms"), draft)

    def passes(self, prepared: Prepared, outcomes: Sequence[Outcome], policy: bool) -> float:
        """Sums the costs of the rounds of some generations of chains, in one-token passes.

        A policy's draft has the length that it chose. Without one it is drawn whole, though what a
        row can no longer emit is cut; or not at all, by a drafter without a draft (of `fallback`,
        this charges the model where a look-up answered). In a batch a round is as long as its
        longest draft.
        """
        assert prepared.drafter is not None
        gamma = prepared.decoder.gamma
        may_be_empty = prepared.drafter.functions.may_be_empty
        longest = np.concatenate([longest_drafts(outcome) for outcome in outcomes])
        if policy:
            v = monotone_costs(gamma, {n: self.costs(n).v.median for n in measured_drafts(gamma)})
        else:
            v = np.full(gamma + 1, self.costs(gamma).v.median)
            if may_be_empty:
                v[0] = 1.0
            longest = np.where(longest > 0, gamma, 0 if may_be_empty else gamma)
        costs = self.costs(self._drafts[0])
        return float(
            v[longest].sum() + costs.c.median * longest.sum() + costs.search * len(longest)
        )


def draft_lengths(prepared: Prepared, policy: bool) -> tuple[int, ...]:
    """Lists the numbers of draft tokens that the passes of a decoder judge."""
    if policy:
        return measured_drafts(prepared.decoder.gamma)
    return (prepared.decoder.nodes,)


def longest_drafts(outcome: Outcome) -> np.ndarray:
    """Finds the longest draft of each round of a batch, over the rows that are not finished."""
    rounds = np.asarray(outcome.stats.rounds)
    drafted = np.asarray(outcome.trace.draft_length)
    live = np.arange(drafted.shape[1])[None, :] < rounds[:, None]
    return np.where(live, drafted, 0).max(axis=0)[: rounds.max()]


class PolicyCosts(NamedTuple):
    """The first two arguments of `policies.adaptive`, in rounds without a draft."""

    c: float  # the cost of one draft token
    # the costs of rounds that judge 0, 1, .. gamma draft tokens, without their c [gamma + 1].
    v: np.ndarray


def policy_costs(
    prepared: Prepared,
    *,
    repeats: int = REPEATS,
    inner: int | None = None,
    begin: loop.Begin = loop.prefill,
) -> PolicyCosts:
    """Measures c and v of `policies.adaptive` for a generation.

    It times whole rounds over all rows, one after the other, with as many draft tokens as each
    width of the verify pass can judge. Look-ups count as successful, since their cost matters where
    they are. A search is a part of v, from one draft token on. c is the cost of drafting one token
    more at the same width. A tree's pass does not widen with its levels, so for trees c is 0 and v
    has everything.

    Args:
        prepared: with the drafter, and the most draft tokens as its gamma; `max_new_tokens` sizes
            the caches, which a pass reads whole. Drafts that it leaves no room for are not timed,
            and count as 10^6 rounds.
        begin: makes the state of the rows after prefill, each with a limit of `max_new_tokens`, by
            default from the generation's own prompts. For a job's slots it is
            `jobs.slots.Slots.fill`.

    Example:
        >>> from jaxspec.testing import prepared_table
        >>> costs = policy_costs(prepared_table(gamma=4), repeats=2, inner=3)
        >>> costs.c >= 0, costs.v.shape, float(costs.v[0]), bool(costs.v[2] == costs.v[3])
        (True, (5,), 1.0, True)

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192: c of Definition 3.7, and the
    verify pass of Theorem 3.8 at its real cost, both with the rest of a round.
    """
    gamma = prepared.decoder.gamma
    if prepared.options.drafter is None or not gamma:
        raise ValueError(
            "nothing is drafted: expected a generation with a drafter, and at least 1 draft token"
        )
    # prefill makes a token, and the last one is never drafted
    possible = prepared.max_new_tokens - 2
    # The most draft tokens that each width of the verify pass can judge; of a tree, all depths.
    if prepared.decoder.trees:
        all_ends = range(1, gamma + 1)
    else:
        all_ends = measured_drafts(gamma)
    ends = [n for n in all_ends if n <= possible]
    if not ends:
        return PolicyCosts(0.0, monotone_costs(gamma, {}))
    begins = [before + 1 for before in (0, *ends[:-1])]
    timed = sorted({0, *begins, *ends})
    loop_of = _round_loops(prepared, inner, begin)
    plain, *drafted = seconds_per_pass([loop_of(n) for n in timed], repeats)
    # What else the machine does makes a round longer, never shorter: the shortest is the one that
    # is compared.
    ratio = dict(
        zip(timed[1:], (float(seconds.min() / plain.min()) for seconds in drafted), strict=True)
    )
    widths = [(first, last) for first, last in zip(begins, ends, strict=True) if last > first]
    slopes = [(ratio[last] - ratio[first]) / (last - first) for first, last in widths]
    c = max(0.0, float(np.median(slopes))) if slopes else 0.0
    return PolicyCosts(c, monotone_costs(gamma, {end: ratio[end] - c * end for end in ends}))


def agreement(
    kind: Together, rows: int, is_sampled: bool, rule: core.Rule | None
) -> Together | None:
    """Says how rows agree on drafts in `policies.adaptive`: several of them, whose texts do not
    depend on drafts.

    >>> (
    ...     agreement("batch", 8, False, None),
    ...     agreement("batch", 8, True, None),
    ...     agreement("batch", 1, False, None),
    ... )
    ('batch', None, None)
    """
    if rows > 1 and (not is_sampled or (rule is not None and rule.shares_noise)):
        return kind
    return None


def _round_loops(
    prepared: Prepared, inner: int | None, begin: loop.Begin
) -> Callable[[int], TimedLoop]:
    """Returns a function from a number of draft tokens to a warm loop of rounds; all loops share a
    state.
    """
    assert prepared.options.drafter is not None
    bound = as_drafter(prepared.options.drafter, "drafter")
    full = bound._replace(functions=_full(bound.functions))
    gamma = prepared.decoder.gamma

    def forced(count: int) -> Prepared:
        return prepared.replace(drafter=full, policy=_always(count, gamma), eos_ids=())

    # One state for all numbers of draft tokens: the policy, whose values say how many, is an
    # argument of the program.
    first = forced(0)
    limit = jnp.full_like(first.request.max_new_tokens, first.max_new_tokens)
    carry = [begin(first._replace(request=first.request._replace(max_new_tokens=limit)))]
    row = jnp.copy(carry[0].tokens), jnp.copy(carry[0].length)

    def loop_of(count: int) -> TimedLoop:
        values = forced(count).request.policy
        advance = functools.partial(rounds, first.decoder, first.weights, row=row, policy=values)
        return timed_loop(
            lambda state, n: advance(state=state, count=n), carry, inner, ROUNDS_SECONDS
        )

    return loop_of


def _always(count: int, gamma: int) -> core.BoundPolicy:
    """Makes a policy that drafts `count` tokens a round: they are sure to be accepted, and more
    would cost too much.
    """
    v = [1.0] * (count + 1) + [FAR] * (gamma - count)
    return policies.adaptive(0.0, v, alpha=1.0, weight=FAR, pause=int(FAR))


@functools.lru_cache
def _full(drafter: core.Drafter) -> core.Drafter:
    """Makes a drafter that may find nothing find as many tokens as it may draft, whatever they
    are.
    """
    if not drafter.may_be_empty:
        return drafter

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> tuple[core.Draft, core.Caches]:
        draft, caches = drafter.propose(weights, caches, context)
        if draft.parent is None:
            return draft._replace(
                length=jnp.broadcast_to(context.max_draft, draft.length.shape)
            ), caches
        # All nodes of a tree are read as soon as there is a draft: here they all follow the last
        # committed token.
        drafts = (context.max_draft > 0)[:, None]
        parent = jnp.where(drafts, jnp.zeros_like(draft.parent), -1)
        return draft._replace(
            length=jnp.where(drafts[:, 0], draft.tokens.shape[1], 0), parent=parent
        ), caches

    return drafter._replace(propose=propose)


@programs.jit(static_argnames=("decoder",), donate_argnames=("state",))
def rounds(
    decoder: core.Decoder,
    weights: core.Weights,
    state: core.State,  # is consumed
    # the tokens and lengths of all rows at which they begin again
    row: tuple[Int[Array, "B S"], Int[Array, " B"]],
    policy: Any,  # values of the decoder's policy
    count: Int[Array, ""],  # how many rounds to run
) -> core.State:
    """Runs a number of rounds, as many as are asked for: where rows are full, what they have got is
    taken back.
    """
    tokens, length = row
    zeros = jnp.zeros_like(state.failed)
    state = state._replace(request=state.request._replace(policy=policy))

    def one_round(_: Int[Array, ""], state: core.State) -> core.State:
        # A round of all draft tokens has to fit, and one more token.
        is_full = jnp.any(states.tokens_left(state) < decoder.gamma + 2)
        state = state._replace(
            tokens=jnp.where(is_full, tokens, state.tokens),
            length=jnp.where(is_full, length, state.length),
        )
        return decoder.step(weights, state._replace(done=zeros > 0, failed=zeros))[0]

    return jax.lax.fori_loop(0, count, one_round, state)
