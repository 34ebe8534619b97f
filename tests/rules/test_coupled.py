"""The coupled rule emits, token for token, what plain sampling emits with the same key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxspec
from jaxspec import drafters, rules
from jaxspec.core import Distribution, Draft, Prompt, noise
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import certify, plain_distribution, table_model
from tests.small import between

VOCAB, ROWS = 7, 8
TARGET, RANDOM = (
    table_model(jax.random.key(1), VOCAB, sharpness=2.0),
    table_model(jax.random.key(2), VOCAB),
)
GOOD = between(TARGET, RANDOM, 0.8)
UNCOUPLED = drafters.model(GOOD)
PROMPT = Prompt(
    jax.random.randint(jax.random.key(3), (ROWS, 6), 0, VOCAB), jnp.array([1, 2, 3, 4, 5, 6, 3, 1])
)
KEYS = jax.random.split(jax.random.key(4), ROWS)


def run(prompt=PROMPT, keys=KEYS, **options):
    return jaxspec.generate(TARGET, prompt, key=keys, temperature=1.0, max_new_tokens=21, **options)


def texts(out):
    return [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]


@pytest.fixture(scope="module")
def plain():
    return texts(run())


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1, 4])
def test_text_is_plain_samplings_whatever_the_drafter(plain, gamma):
    rate = {}
    uncoupled = {"uncoupled": UNCOUPLED} if gamma > 1 else {}
    for name, drafter in {"good": GOOD, "random": RANDOM, **uncoupled}.items():
        out = run(drafter=drafter, gamma=gamma, rule=rules.coupled())
        assert texts(out) == plain, name
        rate[name] = float(out.stats.accepted.sum() / out.stats.drafted.sum())
    assert all(rate["good"] > other + 0.1 for name, other in rate.items() if name != "good")


@pytest.mark.slow
def test_noise_that_the_drafter_passes_on_is_the_rules_own():
    """The verdict is the same, and so cheaper: at most one draw over the vocabulary is left."""
    keys, position = noise.row_keys(jax.random.key(7), ROWS), 3 + jnp.arange(ROWS, dtype=jnp.int32)
    p, q = (
        jax.nn.log_softmax(jax.random.normal(jax.random.key(i), (ROWS, 4, VOCAB))) for i in (8, 9)
    )
    q = 0.7 * p + 0.3 * q
    at = [noise.at(keys, position + i, noise.Purpose.TOKEN) for i in range(3)]
    gumbel = jnp.stack([noise.gumbel(keys_of, VOCAB) for keys_of in at], axis=1)
    tokens = jnp.stack(
        [noise.categorical(keys_of, q[:, i], drawn=gumbel[:, i]) for i, keys_of in enumerate(at)],
        axis=1,
    )
    draft = Draft(tokens, jnp.array([3, 2, 1, 0, 3, 3, 2, 3]))
    passed_on = draft._replace(aux={"gumbel": gumbel})
    verify, target = rules.coupled().verify, Distribution(log_probs=p)
    drawn, again = verify(keys, position, draft, target), verify(keys, position, passed_on, target)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(drawn), strict=True):
        assert ours.tolist() == theirs.tolist()
    assert len(set(drawn.num_accepted.tolist())) >= 3
    program = jax.make_jaxpr(verify)(keys, position, passed_on, target)
    assert str(program).count("random_bits[") == 1


@pytest.mark.slow
def test_text_does_not_depend_on_batch_or_padding(plain):
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    wide = Prompt(jnp.pad(PROMPT.tokens, ((0, 0), (0, 9)), constant_values=5), PROMPT.length)
    moved = run(jax.tree.map(lambda x: x[jnp.array(order)], wide), KEYS[jnp.array(order)], drafter=GOOD, gamma=4,
                rule=rules.coupled())  # fmt: skip
    assert [texts(moved)[order.index(i)] for i in range(ROWS)] == plain
    for i in (0, 5):
        alone = run(jax.tree.map(lambda x, i=i: x[i : i + 1], PROMPT), KEYS[i : i + 1], drafter=GOOD, gamma=4,
                    rule=rules.coupled())  # fmt: skip
        assert texts(alone) == [plain[i]]


@pytest.mark.slow
def test_a_model_that_drafts_for_itself_is_always_accepted():
    out = run(drafter=TARGET, gamma=4, rule=rules.coupled())
    assert out.stats.acceptance_rate.min() == 1.0  # 1 + 4 × 5 tokens


def test_agreement_is_at_least_what_gumbel_coupling_promises():
    """P(agree) >= (1 - d) / (1 + d) for total variation d; and for an independent drafter it is
    sum_x p(x) q(x).
    """
    p, q = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.3, 0.3, 0.4])
    keys = jax.random.split(jax.random.key(5), 20_000)
    gumbel = jax.vmap(lambda key: jax.random.gumbel(key, (3,)))(keys)
    agree = float(
        jnp.mean(
            jnp.argmax(jnp.log(p)[None] + gumbel, 1) == jnp.argmax(jnp.log(q)[None] + gumbel, 1)
        )
    )
    assert agree > (1 - 0.2) / (1 + 0.2) > float(p @ q)


SMALL, DRAFT = table_model(jax.random.key(6), 3), table_model(jax.random.key(7), 3)
ONE = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))


@pytest.mark.slow
def test_the_coupled_drafter_is_exact_by_enumeration():
    options = dict(prompt=ONE, steps=3, gamma=2)
    assert (
        certify(SMALL, drafter=drafters.model(DRAFT, coupled=True), rule=rules.coupled(), **options)
        < 1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rules.block()], ids=lambda rule: rule.name)
def test_noise_that_a_coupled_drafter_meets_twice_biases_no_rule(rule):
    """The certificate refuses a path that draws twice with one key, so this one is sampled; the
    keys are fixed.
    """
    count, steps = 20_000, 3
    many = Prompt(jnp.tile(ONE.tokens, (count, 1)), jnp.full(count, 3, jnp.int32))
    drafter = drafters.model(DRAFT, coupled=True)
    out = jaxspec.generate(
        SMALL, many, drafter=drafter, gamma=2, rule=rule, temperature=1.0, max_new_tokens=steps + 2,
        # two tokens more, so that the limit cuts no draft before the last that counts
        key=jax.random.key(8),
    )  # fmt: skip
    distribution = plain_distribution(
        SMALL, ONE, at_temperature(), SamplingParams(jnp.ones(1)), steps
    )
    place = 3 ** np.arange(steps)[::-1]
    seen = np.bincount(out.tokens[:, :steps] @ place, minlength=3**steps)
    expected = np.zeros(3**steps)
    for tokens, probability in distribution.items():
        expected[int(np.dot(tokens, place))] = probability * count
    assert stats.chisquare(seen, expected * (seen.sum() / expected.sum())).pvalue > 0.01
