"""Replay against enumeration of what a decoder does, and against decoders that run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import rules, sampling
from jaxspec.analysis import acceptance, divergence, formulas, replay
from jaxspec.analysis.statistics import Rate
from jaxspec.core import Processor, Prompt, token_rows
from jaxspec.decode.request import prepare
from jaxspec.testing import plain_distribution, table_model
from jaxspec.testing.outcomes import Outcomes
from jaxspec.testing.paths import take
from jaxspec.testing.script import init_program, step_program
from tests.small import between

RULES = [
    rules.rejection(),
    rules.block(),
    rules.exact_match(),
    rules.coupled(),
    rules.classical_rejection(),
    rules.lenient(0.5),
    rules.typical(0.3, 0.5),
]
EXACT = [rule for rule in RULES if rule.exact]
# the enumeration draws every noise afresh
INDEPENDENT = [rule for rule in RULES if not rule.shares_noise]


def named(all_rules, quick=("block", "coupled")):
    marked = [
        pytest.param(rule, marks=[] if rule.name in quick else [pytest.mark.slow])
        for rule in all_rules
    ]
    return pytest.mark.parametrize("rule", marked, ids=lambda rule: rule.name)


# --- by enumeration: three tokens, of three ids

STEPS, VOCAB = 4, 3
TARGET, DRAFT = (
    table_model(jax.random.key(1), VOCAB),
    table_model(jax.random.key(2), VOCAB, sharpness=1.5),
)
ONE = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))


def sampling_params(temperature):
    return sampling.SamplingParams(jnp.full(1, temperature))


def every_text(temperature):
    """A store whose rows are all texts, and the probability of each."""
    distribution = plain_distribution(
        TARGET, ONE, sampling.at_temperature(), sampling_params(temperature), STEPS
    )
    texts, chances = np.array(list(distribution)), np.array(list(distribution.values()))
    many = Prompt(jnp.tile(ONE.tokens, (len(texts), 1)), jnp.tile(ONE.length, len(texts)))
    logits = [
        acceptance.teacher_forced(m.lm, m.params, many, jnp.asarray(texts)) for m in (TARGET, DRAFT)
    ]
    flat = [np.asarray(side).reshape(-1, VOCAB) for side in logits]
    return replay.LogitTrace(
        temperature, np.full(len(texts), STEPS), texts.reshape(-1), *flat
    ), chances


def rounds_of(rule, gamma, temperature, all_rounds):
    """By enumeration: the expected number of draft tokens that the first round emits, and of rounds
    if asked for.
    """
    options = dict(drafter=DRAFT, rule=rule, gamma=gamma, eos_ids=())
    prepared = prepare(
        TARGET, ONE, temperature=temperature, key=jax.random.key(0), max_new_tokens=STEPS, **options
    )
    request = prepared.request._replace(keys=None)
    inputs = jax.tree.map(np.asarray, (Prompt(ONE.tokens, ONE.length), request))
    first = init_program(prepared.decoder, token_rows.headroom(STEPS, gamma), VOCAB)
    step = step_program(prepared.decoder, VOCAB)
    ends = Outcomes(first, ((prepared.weights, None), []), inputs).enumerate(np.ones(1))
    ends = Outcomes(step, (prepared.weights, []), ends.state).enumerate(ends.weight)
    rows, weight = ends.state, ends.weight
    accepted, rounds = float(weight @ rows.stats.accepted), 0.0
    while all_rounds:
        rounds += float(weight[rows.done] @ rows.stats.rounds[rows.done])
        rows, weight = take((rows, weight), ~rows.done)
        if not len(weight):
            break
        ends = Outcomes(step, (prepared.weights, []), rows).enumerate(weight)
        rows, weight = ends.state, ends.weight
    return accepted, rounds


@pytest.mark.slow
@named([rule for rule in INDEPENDENT if rule.exact])
def test_replayed_rounds_and_acceptance_equal_enumeration(rule, gamma=2):
    """The first round of every exact rule, and all rounds of one."""
    all_rounds = rule.name == "rejection"
    accepted, rounds = rounds_of(rule, gamma, 0.7, all_rounds)
    store, chances = every_text(0.7)
    ratios = replay.chain_ratios(store, rule)
    survives = [
        survives for survives, _ in replay._by_text(replay.chain(gamma), ratios, store.counts)
    ]
    assert np.sum(chances * [x[0].sum() for x in survives]) == pytest.approx(accepted, abs=1e-5)
    if all_rounds:
        replayed = np.array([formulas.expected_rounds(x) for x in survives])
        np.testing.assert_allclose(replayed @ chances, rounds, atol=1e-5)


@pytest.mark.slow
def test_coupled_draft_tokens_agree_as_often_as_gumbel_noise_makes_them():
    p, q = (
        jax.nn.log_softmax(1.5 * jax.random.normal(jax.random.key(i), (1, 1, 6))) for i in range(2)
    )
    p = p.at[0, 0, 2].set(-jnp.inf)
    noise = jax.random.gumbel(jax.random.key(3), (100_000, 6))
    ours, theirs = (jnp.argmax(distribution[0] + noise, axis=-1) for distribution in (p, q))
    every = jnp.arange(6)[None, :]
    ratio = rules.coupled().acceptance_ratio(
        *(jnp.tile(distribution, (1, 6, 1)) for distribution in (p, q)), every
    )[0]
    both = np.bincount(np.asarray(ours)[np.asarray(ours == theirs)], minlength=6) / len(noise)
    np.testing.assert_allclose(ratio * jnp.exp(p[0, 0]), both, atol=0.006)
    overlap = float(jnp.minimum(jnp.exp(p), jnp.exp(q)).sum() / jnp.exp(p).sum())
    assert both.sum() > overlap / (2 - overlap) - 0.006


# --- decoders that run

BIG, ROWS, NEW = 6, 96, 33
WORDS = table_model(jax.random.key(3), BIG, sharpness=1.5)
NEAR = between(WORDS, table_model(jax.random.key(4), BIG), 0.6)
PROMPTS = Prompt(jax.random.randint(jax.random.key(5), (ROWS, 3), 0, BIG), jnp.full(ROWS, 3))


@pytest.fixture(scope="module")
def stores():
    prepared = prepare(WORDS, PROMPTS, drafter=NEAR, max_new_tokens=NEW, key=jax.random.key(6))
    return {t: replay.collect(prepared.replace(temperature=t), batch=40) for t in (0.0, 0.7)}


def decoded(rule, temperature, prompts=PROMPTS, **others):
    options = dict(
        drafter=NEAR, gamma=4, rule=rule, temperature=temperature, max_new_tokens=NEW, **others
    )
    stats = jaxspec.generate(WORDS, prompts, key=jax.random.key(7), **options).stats
    return (stats.emitted - 1).reshape(-1, ROWS), stats.rounds.reshape(-1, ROWS)


@functools.cache
def decoded_at_both_temperatures(rule):
    """Temperatures 0.7 and 0, rows of one program."""
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), PROMPTS)
    rates = map(Rate.of, *decoded(rule, np.repeat([0.7, 0.0], ROWS), twice))
    return dict(zip((0.7, 0.0), rates, strict=True))


def replayed(trace, rule, gamma):
    """Tokens a round along texts."""
    return replay.tokens_per_round(
        replay.chain(gamma), replay.chain_ratios(trace, rule), trace.counts
    )


@pytest.mark.slow
@named(EXACT)
def test_replay_predicts_what_decoding_yields(rule, stores):
    predicted, ran = replayed(stores[0.7], rule, 4), decoded_at_both_temperatures(rule)[0.7]
    assert abs(predicted.value - ran.value) < 3 * np.hypot(predicted.stderr, ran.stderr)
    assert predicted.stderr < ran.stderr  # of the rounds, only the mean is left
    assert predicted.stderr < 0.08


@named(EXACT)
def test_at_temperature_0_replay_is_the_decoder(rule, stores):
    predicted, ran = replayed(stores[0.0], rule, 4), decoded_at_both_temperatures(rule)[0.0]
    # the error, too, is that of the same rounds in each text
    np.testing.assert_allclose(predicted[:4], ran[:4])
    assert predicted.count == ran.count


@pytest.mark.slow
def test_alpha_is_that_of_the_whole_distributions(stores):
    rate = replay.acceptance_rate(stores[0.7], rules.rejection())
    options = dict(temperature=0.7, max_new_tokens=NEW, key=jax.random.key(6))
    measured = acceptance.measure(prepare(WORDS, PROMPTS, drafter=NEAR, **options))
    assert abs(rate.value - measured.alpha) < 3 * rate.stderr
    assert rate.stderr < 0.01


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_rate_with_a_lenience_is_that_of_its_definition(stores, temperature, share):
    trace = stores[temperature]
    p, q = (
        np.asarray(jax.nn.softmax(side / (temperature or 1.0), axis=-1))
        for side in (trace.target, trace.draft)
    )
    if temperature:
        expected = divergence.alpha(p.astype(np.float64), q.astype(np.float64), share)
    else:
        expected = np.mean(p[np.arange(len(p)), q.argmax(axis=-1)] >= share * p.max(axis=-1))
    prepared = prepare(WORDS, PROMPTS, drafter=NEAR, max_new_tokens=NEW, key=jax.random.key(6))
    rate = acceptance.measure(
        prepared.replace(temperature=temperature, rule=rules.lenient(share))
    ).rate
    assert rate.value == pytest.approx(expected, rel=1e-5)
    assert rate.count == trace.counts.sum()


def test_rules_accept_more_in_their_known_order(stores):
    """Block accepts the most, then rejection, coupled, and the baselines."""
    tokens = {rule.name: replayed(stores[0.7], rule, 4).value for rule in EXACT}
    order = ["block", "rejection", "coupled", "exact_match"]
    assert sorted(order, key=tokens.__getitem__, reverse=True) == order
    assert tokens["classical_rejection"] < tokens["rejection"]


def forbid_last(values, logits, preceding):
    """Bans the token that the memory holds."""
    is_last = preceding.memory[..., None] == jnp.arange(logits.shape[-1])[None, None, :]
    return jnp.where(is_last, -jnp.inf, logits)


FORBID_LAST = Processor(
    forbid_last,
    init=lambda values, row, start, vocab: token_rows.tokens_at(row.tokens, row.length - 1),
    advance=lambda values, memory, token: token,
)


def test_replay_takes_bias_penalties_and_logits_processors():
    options = dict(repetition_penalty=1.3, logit_bias={2: 0.5}, logits_processors=FORBID_LAST)
    prepared = prepare(
        WORDS, PROMPTS, drafter=NEAR, max_new_tokens=NEW, key=jax.random.key(6), **options
    )
    trace = replay.collect(prepared.replace(temperature=0.0), batch=40)
    predicted, (ran,) = (
        replayed(trace, rules.rejection(), 4),
        map(Rate.of, *decoded(rules.rejection(), 0.0, **options)),
    )
    np.testing.assert_allclose(predicted[:4], ran[:4])
    texts = trace.tokens.reshape(ROWS, NEW)
    assert (texts[:, 1:] != texts[:, :-1]).all()


@pytest.mark.slow
def test_a_trace_is_the_targets_text_and_both_logits():
    options = dict(temperature=0.7, max_new_tokens=5, key=jax.random.key(6))
    trace = replay.collect(prepare(WORDS, PROMPTS, drafter=NEAR, **options), batch=40)
    assert (
        trace.temperature == 0.7
        and len(trace.tokens) == 5 * ROWS
        and isinstance(trace.target, np.memmap)
    )
    text = jaxspec.generate(WORDS, PROMPTS, **options).tokens
    np.testing.assert_array_equal(trace.tokens.reshape(ROWS, 5), text)
    last = PROMPTS.tokens[:, -2:]
    np.testing.assert_array_equal(trace.target[::5], WORDS.params[last[:, 0], last[:, 1]])
    np.testing.assert_array_equal(trace.draft[::5], NEAR.params[last[:, 0], last[:, 1]])


def test_what_cannot_be_answered(stores):
    with pytest.raises(ValueError, match="not in the text"):
        replay.chain_ratios(stores[0.0], rules.lenient(0.5))
    prepared = prepare(
        WORDS, PROMPTS, drafter=NEAR, temperature=1.0, top_k=2, key=jax.random.key(0)
    )
    with pytest.raises(ValueError, match="one temperature for all rows"):
        replay.collect(prepared)
    with pytest.raises(ValueError, match="acceptance_ratio"):
        replay.chain_ratios(stores[0.7], rules.rejection()._replace(acceptance_ratio=None))
