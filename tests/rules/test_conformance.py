"""Every rule × drafter × gamma × sampling goes through the same properties.

In each cell of that table the distribution of the text is enumerated: exact rules are exact,
inexact ones keep their promise. Programs are what costs time here. So a rule's program is
enumerated for many tables and samplings, which are traced, and where rules are called by themselves
one program calls all of them.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import rules
from jaxspec.core import BoundDrafter, Distribution, Draft, Drafter, Prompt, noise
from jaxspec.decode import autoregressive
from jaxspec.decode.request import prepare
from jaxspec.drafters import model
from jaxspec.rules.catalogue import LENIENCE
from jaxspec.rules.catalogue import RULES as LISTED
from jaxspec.rules.typical import entropy
from jaxspec.sampling import SamplingParams, at_temperature, greedy
from jaxspec.testing import (
    certify,
    decoder_distribution,
    plain_distribution,
    table_model_from,
    total_variation,
    with_sampler,
)
from tests.drafters.cases import EVERYTHING, EXACT, PLAIN, SAMPLING, TARGET
from tests.drafters.cases import MODEL as RANDOM
from tests.marks import marked
from tests.small import between

STEPS = 3
TYPICAL = (0.3, 0.5)  # more of a bound to hit than the usual numbers
RULES = {
    rule.name: rule
    for rule in (
        rules.typical(*TYPICAL) if name == "typical" else entry.rule
        for name, entry in LISTED.items()
    )
}
INEXACT = {"lenient(0.5)", "typical(0.3, 0.5)", "trusting(0.5)"}
# rules that another one is there: see below
ON_CHAINS = {"traversal": "block", "k_seq": "rejection"}

GOOD = between(TARGET, RANDOM, 0.7)
NO_TWO = table_model_from(TARGET.params.at[..., 2].set(-jnp.inf))
ONLY_TWO = table_model_from(jnp.zeros((3, 3, 3)).at[..., :2].set(-jnp.inf))
PAIRS = {  # target, drafter: of one program
    "a good model": (TARGET, GOOD),
    "a random one": (TARGET, RANDOM),
    "p is q": (TARGET, TARGET),
    "disjoint": (NO_TWO, ONLY_TWO),
    "one-token support": (ONLY_TWO, RANDOM),
}
CERTAIN = {"disjoint", "one-token support"}  # where no rule has a choice


def table_drafter(ragged):
    """Proposes, with certainty, successors of the last token; all gamma of them, or any number up
    to it.
    """

    def propose(weights, caches, context):
        row, gamma = context.row, context.gamma
        last = jnp.take_along_axis(row.tokens, row.length[:, None] - 1, axis=1)
        length = (
            (row.length + last[:, 0]) % (gamma + 1) if ragged else jnp.full_like(row.length, gamma)
        )
        return Draft((last + 1 + jnp.arange(gamma, dtype=last.dtype)[None, :]) % 3, length), caches

    return Drafter(lambda *_: (), propose, lambda end: end.caches)


POINT_MASS = BoundDrafter(table_drafter(True))
DRAFTERS = {  # of a model
    "model": model,
    "point mass": lambda draft: POINT_MASS,
    "coupled model": functools.partial(model, coupled=True),
}
PROMPT = Prompt(jnp.array([[1, 0, 1]]), jnp.array([3]))


def programs():
    """(rule, drafter, gamma); what differs from a neighbour in little only at leisure.

    Draft tokens that are a point mass are any number up to gamma, so that 3 has what 1 would have.

    Enumeration takes noise that a coupled drafter shares with the rule for fresh. Under the coupled
    rule that is no matter, since the text does not depend on the draft tokens; other rules are
    sampled, in `test_coupled`.
    """
    for name in (name for name in RULES if name not in ON_CHAINS):
        kinds = ["model", "point mass", *(["coupled model"] if name == "coupled" else [])]
        for kind, gamma in itertools.product(kinds, (0, 1, 3)):
            if (kind, gamma) != ("point mass", 1):
                yield name, kind, gamma


def cells(kind, gamma):
    """(pair, sampling) of one program."""
    pairs = ["a random one"] if kind == "point mass" else ["a good model", "a random one"]
    corners = [pair for pair in PAIRS if pair not in pairs] if (kind, gamma) == ("model", 3) else []
    return [*itertools.product(pairs, SAMPLING), *((pair, "plain") for pair in corners)]


@functools.cache
def text_distribution(name, kind, gamma, pair, sampling):
    target, draft = PAIRS[pair]
    sampled = dict(temperature=1.0, key=jax.random.key(0))  # replaced on the next line
    prepared = prepare(
        target, PROMPT, drafter=DRAFTERS[kind](draft), rule=RULES[name], gamma=gamma, **sampled
    )
    prepared = with_sampler(prepared, EVERYTHING, SAMPLING[sampling])
    assert gamma > 0 or prepared.decoder is autoregressive(target.lm, EVERYTHING)
    return decoder_distribution(prepared, steps=STEPS)


@functools.cache
def true_distribution(pair, sampling):
    return plain_distribution(PAIRS[pair][0], PROMPT, EVERYTHING, SAMPLING[sampling], STEPS)


def conditionals(distribution):
    """Return the distribution after each prefix that has a probability: {prefix: probabilities
    [V]}.
    """
    following = {}
    for at in range(STEPS):
        for tokens, probability in distribution.items():
            following.setdefault(tokens[:at], np.zeros(3))[tokens[at]] += probability
    return {prefix: probs / probs.sum() for prefix, probs in following.items() if probs.sum() > 0}


def check_lenient(distribution, pair, sampling):
    """No token above p(x) / l given what precedes it; at temperature 0 none below l times the
    likeliest.
    """
    if sampling == "temperature 0":
        true = conditionals(true_distribution(pair, "plain"))
        for text in distribution:
            for at, token in enumerate(text):
                p = true[text[:at]]
                assert p[token] >= (LENIENCE - 1e-5) * p.max(), (text, p)
    else:
        true = conditionals(true_distribution(pair, sampling))
        for prefix, got in conditionals(distribution).items():
            assert (got <= true[prefix] / LENIENCE + 1e-4).all(), (prefix, got, true[prefix])


def check_typical(distribution, pair, sampling):
    """No token at or below the threshold above p(x), given what precedes it."""
    true = conditionals(true_distribution(pair, sampling))
    for prefix, got in conditionals(distribution).items():
        p = true[prefix]
        h = float(entropy(jnp.log(jnp.asarray(p, jnp.float32))[None, None])[0, 0])
        untypical = p <= min(TYPICAL[0], TYPICAL[1] * np.exp(-h))
        assert (got <= p + 1e-4)[untypical].all(), (prefix, got, p)


def check_trusting(distribution, pair, sampling):
    """No token that the target leaves out, given what precedes it."""
    true = conditionals(true_distribution(pair, sampling))
    for prefix, got in conditionals(distribution).items():
        assert (got <= 1e-6)[true[prefix] == 0].all(), (prefix, got, true[prefix])


PROMISES = {"lenient": check_lenient, "typical": check_typical, "trusting": check_trusting}
SHORT = {program for program in programs() if program[2] == 1}  # all but two have --exhaustive
LONG = {program for program in programs() if program[2] == 3}
KEPT = {("block", "model", 1), ("coupled", "model", 1)}


@pytest.mark.parametrize(
    ("name", "kind", "gamma"), marked(programs(), slow=LONG, exhaustive=SHORT - KEPT)
)
def test_the_distribution_of_the_text(name, kind, gamma):
    """Exact rules are exact in each cell; inexact ones keep their promise there, and use the room
    that they have.
    """
    rule, off = RULES[name], {}
    for cell in cells(kind, gamma):
        distribution = text_distribution(name, kind, gamma, *cell)
        off[cell] = total_variation(distribution, true_distribution(*cell))
        if name in INEXACT:
            PROMISES[name.partition("(")[0]](distribution, *cell)
    assert rule.exact == (name not in INEXACT)
    if rule.exact or gamma == 0 or (name.startswith("trusting") and kind == "point mass"):
        assert max(off.values()) < EXACT, off
        return
    assert off["a random one", "plain"] > 1e-2 and off["a random one", "warped"] > 1e-2, off
    assert all(distance < EXACT for (pair, _), distance in off.items() if pair in CERTAIN), off
    cold = max(distance for (_, sampling), distance in off.items() if sampling == "temperature 0")
    if name.startswith(("typical", "trusting")):
        assert cold < EXACT, off
    elif kind == "model":
        assert cold > 0.99, off  # another text than greedy decoding's


@pytest.mark.slow
def test_lenience_gains_what_it_may():
    """Some token is nearly twice as likely as it should be."""
    cell = ("a random one", "plain")
    true = conditionals(true_distribution(*cell))
    got = conditionals(text_distribution("lenient(0.5)", "model", 3, *cell))
    assert 1.2 < max((probs / true[prefix]).max() for prefix, probs in got.items()) < 2 + 1e-4


@pytest.mark.slow
def test_typical_acceptance_favours_what_is_typical():
    cell = ("a random one", "plain")
    true = conditionals(true_distribution(*cell))
    got = conditionals(text_distribution("typical(0.3, 0.5)", "model", 3, *cell))
    assert max((probs / true[prefix]).max() for prefix, probs in got.items()) > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block"])
def test_the_distribution_of_all_tokens_of_a_round(name):
    """One from prefill, three draft tokens at most, and the token after two."""
    options = dict(sampler=EVERYTHING, sampling_params=PLAIN, prompt=PROMPT)
    assert certify(TARGET, drafter=RANDOM, rule=RULES[name], gamma=3, steps=4, **options) < EXACT


# --- one program for all rules


def judge(keys, position, draft, target):
    return {name: rule.verify(keys, position, draft, target) for name, rule in RULES.items()}


# to compile, not to run
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
JUDGE = jax.jit(judge, compiler_options=QUICKLY)
ROWS, GAMMA, VOCAB = 24, 3, 5


def distributions(key, shape, zeros=0.3):
    """Random distributions, some probabilities of which are 0."""
    first, second = jax.random.split(key)
    keep = jax.random.bernoulli(first, 1 - zeros, shape).at[..., 0].set(True)
    logits = 2 * jax.random.normal(second, shape)
    return jax.nn.log_softmax(jnp.where(keep, logits, -jnp.inf), axis=-1)


def logits_too(log_probs):
    """A distribution as samplers give it, without a row at temperature 0."""
    return Distribution(log_probs, logits=log_probs, greedy=jnp.zeros(len(log_probs), bool))


@functools.partial(jax.jit, static_argnames=("rows", "gamma", "vocab", "zeros"))
def round_of(seed, rows=ROWS, gamma=GAMMA, vocab=VOCAB, zeros=0.3):
    """keys, positions, a draft that was drawn from its distribution, and a target."""
    p, q, x, n, k = jax.random.split(jax.random.key(seed), 5)
    log_q = distributions(q, (rows, gamma, vocab), zeros)
    tokens = jax.random.categorical(x, log_q).astype(jnp.int32)
    length = jax.random.randint(n, (rows,), 0, gamma + 1)
    draft = Draft(tokens, length, log_probs=log_q)
    target = logits_too(distributions(p, (rows, gamma + 1, vocab), zeros))
    return noise.row_keys(k, rows), 3 + jnp.arange(rows, dtype=jnp.int32), draft, target


def rows_of(tree, index):
    return jax.tree.map(lambda leaf: leaf[jnp.asarray(index)], tree)


def outcome(verdicts):
    return {
        name: np.stack([v.num_accepted, v.next_token], axis=1).tolist()
        for name, v in verdicts.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("certain", [False, True], ids=["model", "point mass"])
def test_rows_do_not_depend_on_mates_padding_or_order(certain):
    """A shuffled batch; and rows alone, with drafts padded by two garbage draft tokens."""
    keys, position, draft, target = round_of(0)
    wide = Draft(
        jnp.pad(draft.tokens, ((0, 0), (0, 2)), constant_values=1),
        draft.length,
        log_probs=jnp.pad(draft.log_probs, ((0, 0), (0, 2), (0, 0)), constant_values=jnp.nan),
    )
    padded = logits_too(
        jnp.pad(target.log_probs, ((0, 0), (0, 2), (0, 0)), constant_values=jnp.nan)
    )
    if certain:
        draft, wide = draft._replace(log_probs=None), wide._replace(log_probs=None)
    together = outcome(JUDGE(keys, position, draft, target))
    order = [(7 * i + 3) % ROWS for i in range(ROWS)]
    moved = outcome(JUDGE(*rows_of((keys, position, draft, target), order)))
    alone = [
        outcome(JUDGE(*rows_of((keys, position, wide, padded), [i]))) for i in range(0, ROWS, 2)
    ]
    for name in RULES:
        assert [moved[name][order.index(i)] for i in range(ROWS)] == together[name], name
        assert [verdict[name][0] for verdict in alone] == together[name][::2], name
    assert len({tuple(map(tuple, rows)) for rows in together.values()}) >= 3  # rules do differ here
    for name, same in ON_CHAINS.items():
        assert together[name] == together[same]


SOME_GREEDY = SamplingParams(jnp.arange(ROWS) % 3 / 2)
SAMPLERS = {"some rows at temperature 0": at_temperature(), "greedy": greedy()}


@pytest.mark.parametrize("certain", [False, True], ids=["model", "point mass"])
@pytest.mark.parametrize("name", marked(SAMPLERS, slow={"some rows at temperature 0"}))
def test_a_vmapped_rule_gives_the_verdicts_of_single_calls(name, certain):
    """Over drafts with distributions and over point masses, and over every kind of distribution."""
    rounds = []
    for seed in range(3):
        keys, position, draft, target = round_of(seed)
        draft = draft._replace(log_probs=None) if certain else draft
        rounds.append((keys, position, draft, SAMPLERS[name](SOME_GREEDY, target.log_probs)))
    stacked = jax.jit(jax.vmap(judge), compiler_options=QUICKLY)(
        *jax.tree.map(lambda *x: jnp.stack(x), *rounds)
    )
    for i, arguments in enumerate(rounds):
        assert outcome(rows_of(stacked, i)) == outcome(JUDGE(*arguments))


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 2**31 - 1), st.booleans())
def test_a_token_of_probability_0_is_never_emitted(seed, certain):
    """Accepted draft tokens and the token after them have a probability; no more are accepted than
    there are.
    """
    keys, position, draft, target = round_of(seed, zeros=0.6)
    if certain:
        draft = draft._replace(log_probs=None)
    p, draft_tokens, length = (
        np.asarray(x) for x in (target.log_probs, draft.tokens, draft.length)
    )
    slot = np.arange(GAMMA + 1)[None, :]
    for name, verdict in JUDGE(keys, position, draft, target).items():
        count, after = (np.asarray(x)[:, None] for x in (verdict.num_accepted, verdict.next_token))
        tested = np.asarray(verdict.num_tested)
        assert (tested >= count[:, 0]).all() and (tested <= length).all(), name
        assert ((count[:, 0] >= 0) & (count[:, 0] <= length)).all(), name
        emitted = np.where(slot < count, np.pad(draft_tokens, ((0, 0), (0, 1))), after)
        allowed = np.isfinite(np.take_along_axis(p, emitted[..., None], axis=-1)[..., 0])
        assert allowed[slot <= count].all(), name


def test_equal_distributions_accept_everything():
    """In float32, and after logits in bfloat16."""
    keys, position, draft, _ = round_of(0, zeros=0.0)
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = (3 * jax.random.normal(jax.random.key(5), (ROWS, GAMMA + 1, VOCAB))).astype(dtype)
        distribution = at_temperature()(SamplingParams(jnp.ones(ROWS)), logits)
        assert distribution.log_probs.dtype == jnp.float32
        log_q = distribution.log_probs[:, :-1]
        tokens = jax.random.categorical(jax.random.key(6), log_q).astype(jnp.int32)
        verdicts = JUDGE(keys, position, Draft(tokens, draft.length, log_probs=log_q), distribution)
        for name in ("rejection", "block", "traversal", "classical_rejection", "lenient(0.5)"):
            assert (verdicts[name].num_accepted == draft.length).all(), name


def test_a_distribution_of_nan_is_never_accepted():
    keys, position, draft, target = round_of(1)
    broken = draft._replace(log_probs=draft.log_probs.at[:, 1].set(jnp.nan))
    verdicts = JUDGE(keys, position, broken, target)
    for name in ("rejection", "block", "classical_rejection", "lenient(0.5)"):
        assert (verdicts[name].num_accepted <= 1).all(), name
        p = jnp.take_along_axis(
            target.log_probs, verdicts[name].num_accepted[:, None, None], axis=1
        )[:, 0]
        assert jnp.isfinite(
            jnp.take_along_axis(p, verdicts[name].next_token[:, None], axis=1)
        ).all(), name


@pytest.mark.slow
def test_a_vocabulary_of_one():
    """There is no wrong token, so everything is accepted."""
    keys, position, draft, target = round_of(2, vocab=1)
    for name, verdict in JUDGE(keys, position, draft, target).items():
        assert (verdict.num_accepted == draft.length).all() and (verdict.next_token == 0).all(), (
            name
        )


@pytest.mark.slow
def test_after_an_empty_draft_the_token_is_a_draw_from_p(monkeypatch):
    """The token is drawn once, from p itself."""
    keys, position, draft, target = round_of(3, gamma=0)
    for certain in (False, True):
        for name, rule in RULES.items():
            distributions = []

            def categorical(keys, log_probs, *_, distributions=distributions):
                distributions.append(log_probs)
                return position

            monkeypatch.setattr(noise, "categorical", categorical)
            with jax.disable_jit():
                verdict = rule.verify(
                    keys, position, draft._replace(log_probs=None) if certain else draft, target
                )
            monkeypatch.undo()
            assert len(distributions) == 1 and verdict.next_token.tolist() == position.tolist(), (
                name
            )
            np.testing.assert_allclose(
                jax.nn.softmax(distributions[0]), jnp.exp(target.log_probs[:, 0]), atol=1e-6
            )
            assert verdict.num_accepted.tolist() == [0] * ROWS, name


def test_greedy_is_exact_match_without_a_softmax_or_a_sort():
    draft = Draft(jnp.array([[4, 9], [4, 5], [4, 5], [9, 5]]), jnp.array([2, 2, 1, 2]))
    target = greedy()(None, 5.0 * jax.nn.one_hot(jnp.array([[4, 5, 6]] * 4), 10))
    keys, position = noise.row_keys(jax.random.key(0), 4), jnp.zeros(4, jnp.int32)
    for proposed in (draft, draft._replace(log_probs=jnp.zeros((4, 2, 10)))):
        for name, verdict in JUDGE(keys, position, proposed, target).items():
            assert verdict.num_accepted.tolist() == [1, 2, 1, 0], name
            assert verdict.next_token.tolist() == [5, 6, 5, 4], name
            assert verdict.num_tested.tolist() == [2, 2, 1, 1], name
    program = str(jax.make_jaxpr(judge)(keys, position, draft, target))
    assert not any(word in program for word in ("exp ", "log ", "sort[", "top_k"))

    def strict(target):  # all but the one rule that asks how far a token is from the best
        all_rules = [rule for name, rule in RULES.items() if name != "lenient(0.5)"]
        return [rule.verify(keys, position, draft, target) for rule in all_rules]

    # nothing floats at all
    assert "f32" not in str(jax.make_jaxpr(strict)(Distribution(tokens=target.tokens)))


def test_rules_are_made_once_so_that_programs_are_shared():
    for name in set(rules.__all__) - {"lenient", "trusting", "typical"}:
        assert getattr(rules, name)() is getattr(rules, name)()
    assert rules.lenient(0.5) is rules.lenient(0.5) and rules.typical(0.3, 0.5) is rules.typical(
        0.3, 0.5
    )
    assert rules.trusting(0.5) is rules.trusting(0.5)
