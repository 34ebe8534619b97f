"""Draft-length policies: they change what a text costs, never the text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from benchmarks.oracle import accepted_after, oracle, rounds_of
from jaxspec import drafters, policies, rules
from jaxspec.core import Distribution, Draft, Policy, Prompt, Verdict
from jaxspec.decode import loop, request
from jaxspec.drafters import prompt_lookup
from jaxspec.sampling import SamplingParams, at_temperature, greedy
from jaxspec.testing import certify, table_model, table_model_from, with_sampler
from tests.marks import marked
from tests.small import between, tiny_gpt

TARGET, RANDOM = table_model(jax.random.key(1), 7), table_model(jax.random.key(2), 7, sharpness=1.5)
GOOD = between(TARGET, RANDOM, 0.8)
PROMPT = Prompt(jnp.array([[1, 0, 2, 0], [5, 0, 0, 0], [3, 3, 6, 1]]), jnp.array([3, 1, 4]))
POLICIES = {
    "constant": policies.constant(2),
    "heuristic": policies.heuristic(start=2),
    "confidence": policies.confidence(0.35),
    "draft_exiting": policies.draft_exiting(0.8, 0.35, 0.1),
    "entropy": policies.entropy(1, 4, 0.5),
    "adaptive": policies.adaptive(0.1, 0.1, pause=2),
    "adaptive, slots": policies.adaptive(0.1, 0.1, pause=2, together="slots"),
    "adaptive, batch": policies.adaptive(0.1, 0.1, pause=2, together="batch"),
}
LEFT = jnp.array([9])
FEW = Prompt(jnp.array([[0]]), jnp.array([1]))  # a prompt, where nothing else matters
THREE, OTHER = table_model(jax.random.key(1), 3), table_model(jax.random.key(2), 3, sharpness=1.5)


def every(period: int) -> Policy:
    """gamma draft tokens in every `period`-th round, none in between."""
    return Policy(
        lambda params, prompt: jnp.zeros_like(prompt.length),
        lambda params, state, gamma, live: jnp.where((state + 1) % period == 0, gamma, 0),
        lambda params, state, draft, verdict, num_committed: state + 1,
    )


def decode(policy, drafter=GOOD, prompt=PROMPT, gamma=4, **options):
    options = dict(max_new_tokens=17) | options
    return jaxspec.generate(TARGET, prompt, drafter=drafter, gamma=gamma, policy=policy, **options)


# --- exact


TOGETHER = ("adaptive, slots", "adaptive, batch")  # one row is alone, whoever agrees


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(POLICIES, exhaustive=("constant", "entropy", *TOGETHER)))
def test_the_distribution_of_the_text_with_another_rule(name):
    """tests/drafters/test_conformance.py has the rejection rule, and every drafter."""
    assert (
        certify(THREE, drafter=OTHER, rule=rules.block(), gamma=2, policy=POLICIES[name], steps=4)
        < 1e-5
    )


@pytest.mark.slow
def test_rows_that_agree_on_what_of_a_look_up_is_verified_keep_their_distribution():
    """How much of a draft is verified depends on what was found, which is no draw."""
    policy = POLICIES["adaptive, slots"]
    prompt = Prompt(jnp.array([[0, 1, 0, 1, 0]]), jnp.array([5]))
    lookup = drafters.prompt_lookup()
    assert certify(THREE, drafter=lookup, gamma=3, policy=policy, prompt=prompt, steps=3) < 1e-5


@pytest.mark.slow
def test_a_policy_that_drops_tokens_for_their_own_value_is_caught():
    """The mistake of the list of traps: what is left of the draft has other frequencies than it
    declares.
    """
    honest = drafters.model(OTHER)

    def propose(weights, caches, context):
        draft, caches = honest.functions.propose(weights, caches, context)
        return draft._replace(length=jnp.where(draft.tokens[:, 0] == 1, 0, draft.length)), caches

    biased = honest._replace(functions=honest.functions._replace(propose=propose))
    with pytest.raises(ValueError, match=r"draft token 0 is 1 in 0\.000 of"):
        certify(THREE, drafter=biased, gamma=1, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", marked(POLICIES, exhaustive=("constant", "adaptive", "adaptive, slots"))
)
def test_greedy_text_is_that_of_plain_decoding(name):
    plain = jaxspec.generate(TARGET, PROMPT, max_new_tokens=17)
    for drafter in (GOOD, RANDOM):
        out = decode(POLICIES[name], drafter)
        assert out.tokens.tolist() == plain.tokens.tolist()
        assert out.stats.drafted.tolist() == out.trace.draft_length.sum(axis=1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_rows_do_not_depend_on_mates(name):
    """A row among others and among copies of itself: the same program, whose compilation is what
    takes time.
    """
    keys = jax.random.split(jax.random.key(3), 3)
    options = dict(temperature=1.0, eos_ids=[4])
    together = decode(POLICIES[name], key=keys, **options)
    for row in range(3):
        copies = np.full(3, row)
        among = decode(
            POLICIES[name],
            prompt=Prompt(PROMPT.tokens[copies], PROMPT.length[copies]),
            key=keys[copies],
            **options,
        )
        n = together.lengths[row]
        assert among.lengths.tolist() == [n] * 3
        assert (among.tokens == together.tokens[row, :n]).all()
        assert [x.tolist() for x in among.stats] == [[int(x[row])] * 3 for x in together.stats]


# --- cheaper


@pytest.mark.slow
def test_the_draft_really_stops():
    prompt, seen = Prompt(PROMPT.tokens[:1], PROMPT.length[:1]), []

    def extend(params, cache, tokens, parent=None, real=None):
        jax.debug.callback(lambda: seen.append(tokens.shape[1]))
        return GOOD.lm.extend(params, cache, tokens, parent, real)

    watched = GOOD._replace(lm=GOOD.lm._replace(extend=extend))

    def passes(policy):
        """The calls of the drafter after prefill, and what they were for."""
        seen.clear()
        out = decode(policy, watched, prompt=prompt)
        jax.effects_barrier()
        return seen, out

    for draft_tokens in (0, 1, 3):
        calls, out = passes(policies.constant(draft_tokens))
        assert len(calls) == int(out.stats.drafted[0])  # a pass for each draft token, and no other
        assert out.trace.draft_length.max() == draft_tokens
    calls, out = passes(policies.confidence(0.3))
    lengths = out.trace.draft_length[0, : out.stats.rounds[0]]
    assert len(calls) == int(out.stats.drafted[0]) and set(lengths.tolist()) >= {1, 2, 3}


def test_no_draft_token_is_made_that_the_limit_would_cut():
    out = decode(policies.constant(4), TARGET, max_new_tokens=3)
    assert out.stats.drafted.tolist() == [1] * 3 and out.stats.emitted.tolist() == [3] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter", [TARGET, drafters.tree(TARGET, (1, 1, 1))], ids=["chain", "tree"]
)
def test_what_was_committed_without_a_draft_is_read_before_the_next(drafter):
    """With the target as drafter a hole in its cache would show as a rejection."""
    for temperature in (0.0, 1.0):
        out = decode(
            every(6),
            drafter,
            gamma=2,
            max_new_tokens=40,
            temperature=temperature,
            key=jax.random.key(0),
        )
        assert out.stats.drafted.min() >= 8
        assert out.stats.accepted.tolist() == out.stats.drafted.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_what_was_committed_without_a_draft_is_read_by_a_network_too(tree):
    """Whose logits depend on every entry of its cache; that of a tree is left alone in rounds
    without one.
    """
    from jaxspec.nets import decoder

    config = tiny_gpt(7)
    params = jax.tree.map(lambda x: 3 * x, decoder.init(config, jax.random.key(3)))
    model = jaxspec.Model(decoder.language_model(config), params)
    drafter = drafters.tree(model, (1, 1, 1)) if tree else model
    options = dict(drafter=drafter, gamma=2, policy=every(6), max_new_tokens=40)
    plain = jaxspec.generate(model, PROMPT, max_new_tokens=40)
    out = jaxspec.generate(model, PROMPT, **options)
    assert out.tokens.tolist() == plain.tokens.tolist()
    assert (
        out.stats.drafted.min() >= 8 and out.stats.accepted.tolist() == out.stats.drafted.tolist()
    )
    out = jaxspec.generate(model, PROMPT, temperature=1.0, key=jax.random.key(4), **options)
    assert out.stats.acceptance_rate.min() > 0.99  # p and q differ in the last bits, by shape


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (policies.constant(2), policies.constant([0, 1, 3])),
        (policies.heuristic(start=2), policies.heuristic([1, 2, 3], grow=1.5, shrink=[0, 1, 2])),
        (policies.confidence(0.35), policies.confidence([0.0, 0.5, 1.0])),
        (
            policies.draft_exiting(0.8, 0.35, 0.1),
            policies.draft_exiting([0.1, 0.5, 0.9], [0.0, 0.5, 1.0]),
        ),
        (policies.entropy(1, 4, 0.5), policies.entropy(2, [2, 3, 9], 0.0)),
        (
            policies.adaptive(0.1, 0.1, pause=2),
            policies.adaptive([0.0, 0.1, 0.2], 0.3, alpha=0.9, pause=[1, 2, 9]),
        ),
        (
            policies.adaptive(0.1, 0.1, pause=2, together="slots"),
            policies.adaptive([0.0, 0.1, 0.2], 0.3, alpha=0.9, pause=[1, 2, 9], together="slots"),
        ),
        pytest.param(
            policies.adaptive(0.1, 0.1, pause=2, together="batch"),
            policies.adaptive(0.0, 0.3, alpha=0.9, together="batch"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            oracle(np.ones((3, 17), int)), oracle(np.zeros((1, 17), int)), marks=pytest.mark.slow
        ),
        (policies.adaptive(0.1, 0.1), policies.adaptive(0.1, [1.0, 1.4, 2.0])),
        (
            policies.adaptive(0.1, [1.0, 1.4, 2.0]),
            policies.adaptive(0.1, [1.0, 1.0, 1.1, 1.1, 1.2]),
        ),
    ],
    ids=[*POLICIES, "oracle", "a list for a number", "a longer list"],
)
def test_another_value_compiles_nothing(first, other):
    out = decode(first)
    before = loop.generation.num_programs()
    two = decode(other)
    assert loop.generation.num_programs() == before
    assert out.tokens.tolist() == two.tokens.tolist()
    assert out.trace.draft_length.tolist() != two.trace.draft_length.tolist()


# --- what each decides


@pytest.mark.slow
def test_a_threshold_that_adapts_settles_on_the_goal():
    """A threshold of 0 never ends a draft, and one of 1 ends it after its first token: the least
    share and the most.
    """
    options = dict(
        drafter=GOOD, gamma=6, max_new_tokens=2000, temperature=1.0, key=jax.random.key(0)
    )

    def share(policy):
        out = jaxspec.generate(TARGET, FEW, policy=policy, **options)
        rounds = int(out.stats.rounds[0])
        later = slice(rounds // 2, rounds)  # the first half, in which it adapts, is left out
        return out.trace.num_accepted[0, later].sum() / out.trace.draft_length[0, later].sum()

    least, most = (share(policies.confidence(threshold)) for threshold in (0.0, 1.0))
    goal = float(least + most) / 2
    adapted = share(policies.draft_exiting(goal, start=0.0, step=0.02))
    assert abs(adapted - goal) < (most - least) / 4


def test_heuristic_grows_and_shrinks_within_its_bounds():
    """Draft tokens of a round, accepted ones, draft tokens of the next: gamma is 6, 2 are added or
    1.4 taken away.
    """
    policy, params, *_ = policies.heuristic(start=2, grow=2, shrink=1.4)
    memory, limit = policy.init(params, FEW), 2
    rounds = [
        (2, 2, 4),  # all accepted: 2 + 2
        (4, 3, 3),  # one was not: 2.6
        (3, 0, 1),  # 1.2
        (1, 0, 1),  # never below 1,
        (1, 1, 3),  # from where it grows
        (3, 3, 5),
        (5, 5, 6),  # never above gamma,
        (6, 5, 5),  # from where it shrinks: 4.6
        (0, 0, 5),  # nothing is learnt of a round without a draft token
        (2, 2, 6),  # a draft that was cut short, or ended by itself, and was accepted
    ]
    for draft_tokens, accepted, then in rounds:
        assert draft_tokens <= limit
        draft = Draft(jnp.zeros((1, 6), jnp.int32), jnp.array([draft_tokens]))
        verdict = Verdict(jnp.array([accepted]), None, jnp.array([min(accepted + 1, draft_tokens)]))
        memory = policy.update(params, memory, draft, verdict, jnp.array([accepted + 1]))
        limit = int(policy.max_draft(params, memory, 6, LEFT)[0])
        assert limit == then


@pytest.mark.slow
def test_heuristic_counts_the_depth_of_a_tree_and_not_its_nodes():
    """A tree of 12 nodes in two levels, accepted ten times over: after one rejection it drafts one
    level less.
    """
    policy, params, *_ = policies.heuristic(start=1, grow=1, shrink=2)
    memory, two, ones = policy.init(params, FEW), jnp.array([2]), jnp.array([1])
    draft = Draft(
        jnp.zeros((1, 12), jnp.int32),
        jnp.array([12]),
        parent=jnp.array([[0, 0, 0] + [1, 2, 3] * 3]),
    )
    for _ in range(10):
        memory = policy.update(params, memory, draft, Verdict(two, None, two), two + 1)
    assert policy.max_draft(params, memory, 2, LEFT).tolist() == [2]
    memory = policy.update(params, memory, draft, Verdict(ones, None, two), two)
    assert policy.max_draft(params, memory, 2, LEFT).tolist() == [1]


ENTROPIES = {  # of four tokens, in units of log 4
    0.0: [0.0, 1.0, 0.0, 0.0],
    0.5: [0.5, 0.0, 0.0, 0.5],
    0.75: [0.25, 0.5, 0.25, 0.0],
    1.0: [0.25, 0.25, 0.25, 0.25],
}


@pytest.mark.parametrize(
    ("beta", "gamma", "rounds"),
    [
        # h: 0.25, as it was, 0.625, 0.6875
        (0.5, 20, [(0.5, 14), (None, None), (1.0, 8), (0.75, 7)]),
        (0.25, 20, [(1.0, 6), (0.0, 15), (0.0, 17)]),  # h: 0.75, 0.1875, 0.046875
        (0.0, 20, [(0.0, 18), (1.0, 2), (0.5, 10)]),  # this round alone, from least to most
        (0.0, 9, [(0.0, 9), (1.0, 2), (0.5, 9)]),  # gamma is the most in any case
    ],
)
def test_entropy_sets_the_number_of_draft_tokens(beta, gamma, rounds):
    """2 + 16 (1 - h), where h is the smoothed entropy; the draft tokens of a draft that nothing
    else ends.
    """
    policy, params, *_ = policies.entropy(least=2, most=18, beta=[beta])
    memory = policy.init(params, FEW)
    for entropy, expected in rounds:
        # of a look-up's draft tokens, which have no distribution
        confidences = jnp.full((1, gamma), jnp.nan)
        if entropy is not None:
            confidence = policy.confidence(
                Distribution(log_probs=jnp.log(jnp.array([[ENTROPIES[entropy]]])))
            )
            np.testing.assert_allclose(confidence, entropy, atol=1e-6)
            confidences = confidences.at[:, 0].set(confidence)
            limit, draft_tokens = int(policy.max_draft(params, memory, gamma, LEFT)), 1
            while (
                draft_tokens < limit
                and policy.should_continue(params, memory, draft_tokens - 1, confidences)[0]
            ):
                draft_tokens += 1
            assert draft_tokens == expected
        draft = Draft(
            jnp.zeros((1, gamma), jnp.int32), jnp.array([1]), aux={"confidence": confidences}
        )
        memory = policy.update(params, memory, draft, None, None)


@pytest.mark.slow
def test_adaptive_leaves_a_hopeless_drafter_alone():
    """After a few rejections it makes one draft token at a time, and waits twice as long for the
    next.
    """
    wrong = table_model_from(-TARGET.params)
    out = decode(policies.adaptive(0.3, 0.1, pause=3), wrong, max_new_tokens=200)
    for drafted, accepted in zip(out.trace.draft_length, out.trace.num_accepted, strict=True):
        draft_tokens, ahead = drafted[:199], np.flatnonzero(drafted[:199])
        assert draft_tokens[6:].max() == 1 and accepted.sum() == 0
        # the longest pause is 16 times the first
        assert np.diff(ahead)[-5:].tolist() == [13, 25, 49, 49, 49]


def test_adaptive_tries_again_soon_where_draft_tokens_have_been_accepted():
    """The pause is as short as at first once a draft token has been accepted."""
    policy, params, *_ = policies.adaptive(0.3, 0.1, pause=3)
    memory = policy.init(params, Prompt(jnp.zeros((1, 1), jnp.int32), jnp.array([1])))
    none, single = (Draft(jnp.zeros((1, 1), jnp.int32), jnp.array([n])) for n in (0, 1))
    pauses = []
    for draft, accepted in (
        (single, 0),
        (none, 0),
        (single, 0),
        (none, 0),
        (single, 0),
        (none, 0),
        (single, 1),
    ):
        verdict = Verdict(jnp.array([accepted]), jnp.array([0]), draft.length)
        memory = policy.update(params, memory, draft, verdict, jnp.array([accepted + 1]))
        pauses.append(int(memory.pause[0]))
    assert pauses == [3, 3, 6, 6, 12, 12, 3]


@pytest.mark.slow
def test_distributions_are_made_where_the_pass_has_read():
    """Softmax and warping of a vocabulary at positions that nobody reads would be a good part of a
    round.
    """
    positions = []

    def recorded(sampling_params, logits, preceding=None):
        jax.debug.callback(lambda: positions.append(logits.shape[1]))
        return at_temperature()(sampling_params, logits, preceding)

    options = dict(
        drafter=prompt_lookup(),
        gamma=4,
        policy=policies.constant(2),
        temperature=1.0,
        key=jax.random.key(3),
    )
    prepared = request.prepare(TARGET, PROMPT, max_new_tokens=60, **options)
    out = loop.run(with_sampler(prepared, recorded, prepared.request.sampling_params))
    jax.effects_barrier()
    longest = np.asarray(out.trace.draft_length)[:, : int(out.stats.rounds.max())].max(axis=0)
    assert set(longest) == {0, 1, 2}
    assert positions == [1, *({0: 1, 1: 2, 2: 4}[n] for n in longest)]  # the first is prefill's
    plain = jaxspec.generate(
        TARGET, PROMPT, max_new_tokens=60, **options | {"gamma": 2, "policy": None}
    )
    assert out.tokens[:, :60].tolist() == plain.tokens.tolist()


@pytest.mark.parametrize("knows", ["too much", "nothing"])
def test_adaptive_leaves_a_hopeless_look_up_alone(knows):
    """One that is always wrong is tried now and then; for one without draft tokens passes are over
    one token, too.
    """
    right = prompt_lookup(longest=2).functions

    def propose(weights, caches, context):
        draft, caches = right.propose(weights, caches, context)
        length = draft.length if knows == "too much" else jnp.zeros_like(draft.length)
        return draft._replace(tokens=(draft.tokens + 1) % 7, length=length), caches

    widths = []

    def extend(params, cache, tokens, parent=None, real=None):
        jax.debug.callback(lambda: widths.append(tokens.shape[1]))
        return TARGET.lm.extend(params, cache, tokens, parent, real)

    target = TARGET._replace(lm=TARGET.lm._replace(extend=extend))
    # the draft tokens cost nothing, their part of a pass does
    policy = policies.adaptive(0.0, 0.3, pause=7)
    plain = jaxspec.generate(TARGET, PROMPT, max_new_tokens=100)
    out = jaxspec.generate(
        target,
        PROMPT,
        drafter=right._replace(propose=propose),
        gamma=4,
        policy=policy,
        max_new_tokens=100,
    )
    jax.effects_barrier()
    assert out.tokens.tolist() == plain.tokens.tolist()
    draft_tokens = out.trace.draft_length[:, : int(out.stats.rounds.max())]
    assert widths == [
        next(width for width in (1, 2, 4, 5) if width > n) for n in draft_tokens.max(axis=0)
    ]
    late = draft_tokens[:, 20:].sum(axis=1)
    assert (late == 0).all() if knows == "nothing" else (late <= 10).all() and late.sum() > 0


def test_adaptive_comes_back_to_a_look_up_that_knows_again():
    """A look-up that was believed to be hopeless is tried again, and then used in full."""
    policy = policies.adaptive(0.0, 0.3, alpha=0.0, weight=2.0, pause=3)
    out = decode(policy, prompt_lookup(), max_new_tokens=100)
    draft_tokens = out.trace.draft_length
    assert (draft_tokens[:, 0] == 0).all() and draft_tokens.max() == 4
    assert (out.stats.rounds < 60).all()


@pytest.mark.slow
def test_adaptive_drafts_far_where_all_is_accepted():
    out = decode(policies.adaptive(0.05, 0.05), TARGET, gamma=8, max_new_tokens=100)
    assert out.trace.draft_length[:, 4].tolist() == [8] * 3


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_best_length_is_that_of_theory(alpha):
    from jaxspec.analysis import formulas
    from jaxspec.policies.adaptive import best_length, expected_tokens

    for c, extra in [(0.02, 0.0), (0.05, 0.06), (0.3, 0.1)]:
        best = best_length(
            expected_tokens(jnp.array([alpha]), 12), jnp.array([c]), jnp.array([[extra]])
        )
        speed = [formulas.expected_tokens(alpha, g) / (g * c + 1 + g * extra) for g in range(13)]
        assert np.isclose(speed[int(best[0])], max(speed), rtol=1e-5)


@pytest.mark.slow
def test_adaptive_fills_the_pass_that_it_pays_for():
    """Four tokens cost what two do, five cost twice that."""
    v = [1.0, 1.3, 1.3, 1.3, 2.6, 2.6, 2.6, 2.6, 2.6]
    out = decode(policies.adaptive(0.02, v, alpha=0.6, weight=1e6, forget=0), GOOD, gamma=8)
    assert out.trace.draft_length[:, 0].tolist() == [3] * 3


@pytest.mark.parametrize(
    ("v", "alpha", "gamma", "draft_tokens"),
    [
        # 1.75 / 1.3 tokens a pass; a third draft token costs 0.15: 1.875 / 1.45
        ([1.0, 1.3, 1.3], 0.5, 8, 2),
        ([1.0, *[2.0] * 64], 0.9, 200, 64),  # beyond any width
        ([1.0, *[2.0] * 80], 0.9, 200, 80),
        (np.linspace(1.0, 2.0, 9), 1.0, 200, 200),
    ],
)
def test_draft_tokens_beyond_the_costs_that_were_measured_are_not_free(
    v, alpha, gamma, draft_tokens
):
    policy, params, *_ = policies.adaptive(0.0, v, alpha=alpha, weight=1e6)
    assert policy.max_draft(params, policy.init(params, FEW), gamma, LEFT).tolist() == [
        draft_tokens
    ]


@pytest.mark.slow
def test_oracle_makes_no_draft_token_in_vain():
    accepted = accepted_after(request.prepare(TARGET, PROMPT, drafter=GOOD, max_new_tokens=17))
    out = decode(oracle(accepted), gamma=16)
    assert out.stats.accepted.tolist() == out.stats.drafted.tolist() and out.stats.drafted.sum() > 0
    most = decode(policies.constant(16), gamma=16)
    assert (
        out.stats.rounds.tolist() == most.stats.rounds.tolist()
        and out.stats.drafted[0] < most.stats.drafted[0]
    )


@pytest.mark.slow
def test_rounds_are_counted_as_they_are_decoded():
    """`benchmarks.oracle` counts rounds without decoding; decoding has as many."""
    prepared = request.prepare(TARGET, PROMPT, drafter=GOOD, max_new_tokens=17)
    accepted, counts = accepted_after(prepared), np.full(len(PROMPT.length), 17)
    for gamma, policy in (3, policies.constant(3)), (None, oracle(accepted)):
        out = decode(policy, gamma=16)
        rounds = rounds_of(accepted, counts, gamma)
        assert (rounds.rounds, rounds.drafted) == (
            out.stats.rounds.sum(),
            out.stats.drafted.sum(),
        ), gamma
        assert rounds.tokens == (counts - 1).sum()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: policies.constant(-1),
            "draft_tokens is -1: expected a finite number of at least 0",
        ),
        (lambda: policies.constant(1.5), "draft_tokens is 1.5"),
        (lambda: policies.confidence(1.2), "threshold is 1.2: expected a number from 0 to 1"),
        (lambda: policies.draft_exiting(goal=2), "goal is 2: expected a number from 0 to 1"),
        (lambda: policies.entropy(0), "least is 0"),
        (lambda: policies.adaptive(c=-0.1), "c is -0.1"),
        (lambda: policies.adaptive(v=[1.0, 1.2, 1.1]), "do not fall"),
        (lambda: policies.adaptive(v=[1.2, 1.3]), "begin with 1"),
        (lambda: policies.adaptive(alpha=float("nan")), "alpha is nan"),
        (
            lambda: policies.adaptive(pause=2**31),
            "pause is 2147483648: expected a number from 0 to 10000000",
        ),
        (
            lambda: policies.adaptive(together=True),
            "together is True: expected one of batch, slots",
        ),
        (
            lambda: policies.adaptive(weight=float("inf")),
            "weight is inf: expected a finite number of at least 0.001",
        ),
        (lambda: policies.adaptive(c=[0.1, 1e39]), "expected a finite number of at least 0"),
        (lambda: policies.adaptive(v=float("inf")), "v is inf"),
        (lambda: policies.adaptive(v=[1.0, float("inf")]), "v is"),
        (lambda: policies.heuristic(grow=float("inf")), "grow is inf"),
        (lambda: policies.heuristic(start=0), "start is 0"),
        (lambda: oracle(np.ones(3)), "expected counts"),
        (lambda: policies.entropy(least=8, most=2), "expected least <= most"),
        (lambda: decode(policies.constant(1), None), "a policy and no drafter"),
        (lambda: decode(policies.constant([1, 2])), "2 rows, but there are 3 prompts"),
        (
            lambda: decode("constant"),
            "policy is 'constant', a name: pass jaxspec.policies.constant",
        ),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_sampler_of_ones_own_that_gives_no_logits_is_refused():
    with pytest.raises(
        ValueError, match=r"reads logits, but the sampler returns none: set Distribution\.logits"
    ):
        POLICIES["confidence"].functions.confidence(
            Distribution(tokens=jnp.zeros((1, 1), jnp.int32))
        )


@pytest.mark.parametrize("name", ["confidence", "entropy"])
def test_a_distribution_at_temperature_0_is_read_alike_in_any_company(name):
    """A row at temperature 0 is read as at temperature 1, and another row's distribution as it
    is.
    """
    logits = jax.random.normal(jax.random.key(3), (3, 1, 7))
    sampling_params = SamplingParams(jnp.array([0.0, 1.0, 0.5]))
    confidence, distribution = (
        POLICIES[name].functions.confidence,
        at_temperature()(sampling_params, logits),
    )
    mixed, alone = confidence(distribution), confidence(greedy()(None, logits))
    assert mixed[0] == alone[0]
    np.testing.assert_allclose(
        mixed[1:], confidence(distribution._replace(greedy=None))[1:], rtol=1e-5
    )
    np.testing.assert_allclose(mixed[1], alone[1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [policies.adaptive(1.0, 0.1, pause=2), policies.heuristic(start=1, grow=2)]
)
def test_a_tree_of_one_branch_is_drafted_as_far_as_a_chain(policy):
    """Policies count depth: what a tree's padding and siblings are does not look like draft tokens
    to them.
    """
    from jaxspec.drafters import tree

    options = dict(policy=policy, max_new_tokens=40)
    chain = jaxspec.generate(TARGET, PROMPT, drafter=GOOD, gamma=3, **options)
    branch = jaxspec.generate(TARGET, PROMPT, drafter=tree(GOOD, (1, 1, 1)), **options)
    assert chain.trace.draft_length.tolist() == branch.trace.draft_length.tolist()
    assert chain.stats.accepted.tolist() == branch.stats.accepted.tolist()


def with_beliefs(alpha, v, together, **state):
    """The functions of a policy for three rows, of whose acceptance rates it is sure, their params
    and their state.
    """
    policy = policies.adaptive(c=0.1, v=v, alpha=alpha, weight=1e6, pause=4, together=together)
    params = jax.tree.map(
        lambda x: jnp.broadcast_to(jnp.asarray(x), (3, *np.shape(x)[1:])), policy.params
    )
    return policy.functions, params, policy.functions.init(params, PROMPT)._replace(**state)


def test_slots_agree_on_the_draft_that_is_best_for_all_of_them():
    """Two rows that guess badly outvote one that guesses well, until they have ended."""
    functions, params, state = with_beliefs([0.95, 0.05, 0.05], [1.0, 1.4, 1.8, 2.2], "slots")
    drafts = [
        functions.max_draft(params, state, 3, jnp.array(left)).tolist()
        for left in ([9, 9, 9], [9, 0, 0], [0, 9, 9])
    ]
    assert drafts == [[0, 0, 0], [3, 3, 3], [0, 0, 0]]
    # After a pause of no drafts, any live row's trial is all rows'.
    rested = state._replace(idle=jnp.array([4, 0, 0]))
    assert functions.max_draft(params, rested, 3, jnp.array([9, 9, 9])).tolist() == [1, 1, 1]
    assert functions.max_draft(params, rested, 3, jnp.array([0, 9, 9])).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("left", "slots", "batch"),
    [
        # two of three rows gain, and the third, which does not, has as much to do
        ([9, 9, 9], 3, 0),
        ([9, 9, 1], 3, 3),  # that one is almost done
        # some four rounds, whatever is drafted: with two tokens the others are done then
        ([9, 9, 4], 3, 2),
        ([0, 0, 9], 0, 0),
        ([0, 9, 0], 3, 3),
    ],
)
def test_a_batch_agrees_on_the_draft_that_ends_it_soonest(left, slots, batch):
    """Slots get a new row for each that ends; a batch waits for its slowest."""
    for together, expected in (("slots", slots), ("batch", batch)):
        functions, params, state = with_beliefs([0.9, 0.9, 0.05], [1.0, 1.1, 1.2, 1.3], together)
        assert functions.max_draft(params, state, 3, jnp.array(left)).tolist() == [expected] * 3


def test_a_gain_that_is_less_than_what_costs_are_known_to_is_none():
    for alpha, expected in ((0.22, 0), (0.26, 1)):  # expected: 1.22 and 1.26 tokens for 1.2 rounds
        functions, params, state = with_beliefs([alpha] * 3, [1.0, 1.1], "slots")
        assert (
            functions.max_draft(params, state, 1, jnp.array([9, 9, 9])).tolist() == [expected] * 3
        )


def test_a_trial_of_a_batch_is_in_vain_if_no_draft_follows():
    """Though some row's draft token was accepted: some row's always is."""
    functions, params, state = with_beliefs([0.05] * 3, [1.0, 1.9], "slots", idle=jnp.full(3, 4))
    draft, accepted = (
        Draft(jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32)),
        jnp.array([1, 0, 0]),
    )
    verdict = Verdict(accepted, jnp.zeros(3, jnp.int32), jnp.ones(3, jnp.int32))
    tried = functions.update(params, state, draft, verdict, accepted + 1)
    assert tried.pause.tolist() == [8] * 3 and tried.idle.tolist() == [0] * 3
    again = functions.update(params, tried, draft, verdict, accepted + 1)
    assert again.pause.tolist() == [4] * 3  # drafting has been found to pay


@pytest.mark.parametrize("together", ["slots", "batch"])
def test_a_row_that_comes_later_has_the_pause_of_the_others(together):
    """Or slots that are refilled would try again a few rounds after each refill."""
    fresh = dict(idle=jnp.array([60, 60, 0]), pause=jnp.array([64, 64, 4]))
    functions, params, state = with_beliefs([0.05] * 3, [1.0, 1.9], together, **fresh)
    draft, left = Draft(jnp.zeros((3, 1), jnp.int32), jnp.zeros(3, jnp.int32)), jnp.full(3, 99)
    verdict, drafts = Verdict(*[jnp.zeros(3, jnp.int32)] * 3), []
    for _ in range(5):
        drafts.append(functions.max_draft(params, state, 1, left).tolist()[0])
        state = functions.update(params, state, draft, verdict, jnp.ones(3, jnp.int32))
    assert drafts == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("together", ["slots", "batch"])
def test_rounds_in_which_nothing_is_found_are_no_pause(together):
    """What a look-up finds in every other round, and is accepted, is no trial."""
    functions, params, state = with_beliefs([0.9] * 3, [1.0, 1.1], together)
    for count in (0, 3) * 8:
        length = jnp.full(3, count)
        draft, verdict = (
            Draft(jnp.zeros((3, 3), jnp.int32), length),
            Verdict(length, length, length),
        )
        state = functions.update(params, state, draft, verdict, length + 1)
    assert state.pause.tolist() == [4] * 3


def test_never_is_a_pause():
    functions, params, state = with_beliefs([0.05] * 3, [1.0, 1.9], "slots")
    never = params._replace(pause=jnp.full(3, 10**7))
    state, draft = (
        functions.init(never, PROMPT),
        Draft(jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32)),
    )
    verdict = Verdict(*[jnp.zeros(3, jnp.int32)] * 3)
    for _ in range(9):
        state = functions.update(
            never, state._replace(idle=state.pause), draft, verdict, jnp.ones(3, jnp.int32)
        )
        assert (state.pause >= 10**7).all()


def test_rows_that_agree_have_the_texts_of_rows_that_do_not():
    """Greedily and with coupled noise; the last rows draft more once the others have ended."""
    options = dict(
        drafter=GOOD,
        gamma=4,
        max_new_tokens=np.array([4, 30, 12]),
        key=jax.random.key(2),
        eos_ids=(),
    )
    for sampling in (dict(), dict(temperature=1.0, rule=rules.coupled())):
        plain = jaxspec.generate(
            TARGET, PROMPT, policy=policies.adaptive(0.1, 0.1), **options, **sampling
        )
        agreed = jaxspec.generate(
            TARGET,
            PROMPT,
            policy=policies.adaptive(0.1, 0.1, together="slots"),
            **options,
            **sampling,
        )
        assert (plain.tokens == agreed.tokens).all()


@pytest.mark.parametrize(
    ("lengths", "alpha", "idle", "expected"),
    [
        ([3, 3, 3], 0.9, 0, 3),  # all rows have drafts that are mostly right
        # one token more for one row of three does not pay for a wider pass of all
        ([3, 0, 0], 0.9, 0, 0),
        ([3, 1, 1], 0.9, 0, 1),
        ([3, 0, 0], 0.9, 4, 1),  # but it is tried after a pause
        ([3, 3, 3], 0.1, 0, 0),
    ],
)
def test_a_batch_agrees_on_how_much_of_what_was_looked_up_is_verified(
    lengths, alpha, idle, expected
):
    functions, params, state = with_beliefs(
        alpha, [1.0, 1.4, 1.8, 2.2], "slots", idle=jnp.full(3, idle)
    )
    draft, left = Draft(jnp.zeros((3, 3), jnp.int32), jnp.array(lengths)), jnp.full(3, 9)
    assert functions.shorten(params, state, draft, left).tolist() == [expected] * 3
    drawn = draft._replace(log_probs=jnp.zeros((3, 3, 5)))  # whose length may tell what was drawn
    assert functions.shorten(params, state, drawn, left).tolist() == lengths
    ended = functions.shorten(params, state, draft, jnp.array([9, 0, 0]))
    assert ended.tolist() == [3 if alpha > 0.5 else int(idle > 0)] * 3


def test_what_is_verified_of_a_look_up_leaves_the_distribution_as_it_is():
    policy = policies.adaptive(0.0, 0.3, pause=1, together="slots")
    found = drafters.prompt_lookup(1, 1)
    assert certify(THREE, drafter=found, gamma=2, policy=policy, steps=4) < 1e-5
    options = dict(drafter=found, gamma=3, max_new_tokens=24)
    plain = jaxspec.generate(TARGET, PROMPT, max_new_tokens=24)
    whole = policy._replace(functions=policy.functions._replace(shorten=None))
    out, unshortened = (
        jaxspec.generate(TARGET, PROMPT, policy=p, **options) for p in (policy, whole)
    )
    assert (out.tokens == plain.tokens).all()
    widest = [x.trace.draft_length.max(axis=0) for x in (out, unshortened)]
    assert 0 < widest[0].mean() < widest[1].mean()
