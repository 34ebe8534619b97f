"""Speculative execution of two functions: its law, by enumeration and whole; that it runs ahead; what may go wrong."""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxspec
from jaxspec import accept, execution
from jaxspec.base import Law, Prompt, Verdict, Weights
from jaxspec.decode import autoregressive, rounds
from jaxspec.testing import decoder_law, plain_law, table_model, total_variation
from jaxspec.warp import Controls, sampling

P, Q = np.array([0.5, 0.3, 0.0, 0.2]), np.array([0.2, 0.2, 0.6, 0.0])
TARGET = table_model(jax.random.key(1), 3, 1)
WARP, PLAIN = sampling(), Controls(jnp.ones(1), jnp.array([3]), jnp.ones(1))
PROMPT = Prompt(jnp.array([[1]]), jnp.array([1]))


def log(law):
    with np.errstate(divide="ignore"):
        return np.log(law)


def p_value(counts, law):
    """How likely counts as far from a law's as these are."""
    return stats.chisquare(counts, counts.sum() * law / law.sum()).pvalue


def decoder(count):
    """A decoder whose every token is the draw of a speculative execution, so that its law can be enumerated."""
    plain = autoregressive(TARGET.lm, WARP)

    def step(keys, weights, state):
        live, none = jnp.logical_not(state.done), rounds.no_draft(state.length)
        last = rounds.last_token(state)
        forward, cache = TARGET.lm.extend(weights.target, state.cache, last)
        law = WARP(state.request.controls, forward.logits)
        log_q = jax.nn.log_softmax(weights.draft[last[:, 0]], axis=-1)
        proposals = execution.propose(keys, state.length, log_q, count)
        choice = accept.iterated(keys, state.length, proposals, Law(law.log_probs[:, :1]))
        bad = rounds.not_finite(forward, none.length)
        state, kept = rounds.commit(state, choice.token[:, None], none.length + 1, bad)
        state = state._replace(cache=TARGET.lm.rewind(cache, state.length - 1))
        return rounds.count(state, live, none, Verdict(*choice), kept)

    return plain._replace(step=step)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_token_has_the_law_of_f(count):
    table = jax.random.normal(jax.random.key(2), (3, 3)).at[0, 1].set(-jnp.inf)  # an outcome never guessed
    got = decoder_law(decoder(count), Weights(TARGET.params, table), PROMPT, PLAIN, steps=2)
    assert total_variation(got, plain_law(TARGET, PROMPT, WARP, PLAIN, 2)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("guesses", [1, 3])
def test_the_whole_call_has_the_law_of_f(guesses):
    count = 400
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        options = dict(approximation=lambda x: log(Q), guesses=guesses, executor=executor)
        found = [
            jaxspec.speculate(lambda x: log(P), lambda token: -token, None, key=jax.random.key(i), **options)
            for i in range(count)
        ]
    assert all(one.value == -one.token for one in found)
    counts = np.bincount([one.token for one in found], minlength=4)
    assert counts[2] == 0 and p_value(counts[P > 0], P[P > 0]) > 1e-3
    kept = np.mean([one.accepted for one in found])
    if guesses == 1:
        assert kept == pytest.approx(np.minimum(P, Q).sum(), abs=4 * np.sqrt(0.25 / count))
    else:
        assert kept > 0.6
    assert all(one.runs == min(guesses, 3) + (not one.accepted) for one in found)  # q allows three outcomes


def test_g_runs_while_f_does():
    """f does not return before g has begun: one after the other, they would wait for ever."""
    begun = threading.Event()

    def f(x):
        assert begun.wait(30)
        return log(np.array([0.0, 1.0]))

    def g(token):
        begun.set()
        return token

    found = jaxspec.speculate(f, g, None, approximation=lambda x: log(np.array([0.0, 1.0])), key=jax.random.key(0))
    assert found == (1, 1, True, 1)


def test_nobody_waits_for_a_guess_that_is_not_kept():
    released = threading.Event()

    def g(token):
        if token == 0:
            assert released.wait(30)
        return token

    certain = [log(np.array(law)) for law in ([0.0, 1.0], [1.0, 0.0])]
    found = jaxspec.speculate(lambda x: certain[0], g, None, approximation=lambda x: certain[1], key=jax.random.key(0))
    released.set()
    assert found == (1, 1, False, 2)


def test_what_a_wrong_guess_raises_is_nobodys_business():
    certain = [log(np.array(law)) for law in ([0.0, 1.0], [1.0, 0.0])]
    asked = dict(approximation=lambda x: certain[1], key=jax.random.key(0))
    found = jaxspec.speculate(lambda x: certain[0], lambda token: 1 // token, None, **asked)
    assert found.value == 1
    with pytest.raises(ZeroDivisionError):
        jaxspec.speculate(lambda x: certain[1], lambda token: 1 // token, None, **asked)


def test_a_simulator():
    """A cart on a line, pushed by a policy that looks at where it is: where it ends has the law of doing it plainly.

    The slow policy weighs all pushes by what they lead to; the habit that stands in for it only looks which side it is
    on. The world is simulated from the state that the last push left, and so can begin before the policy has spoken.
    """
    pushes, steps, runs = (-1.0, 0.0, 1.0), 2, 150

    def policy(state):
        position, speed = state
        return np.array([-((position + speed + push) ** 2) for push in pushes])

    def habit(state):
        return np.array([1.0, 0.0, -1.0]) * np.sign(state[0])

    def world(state, push):
        position, speed = state
        speed = speed + pushes[push]
        return position + speed, speed

    def plainly(state, left):
        if not left:
            return {state: 1.0}
        law, found = np.exp(policy(state)) / np.exp(policy(state)).sum(), {}
        for push, probability in enumerate(law):
            for end, share in plainly(world(state, push), left - 1).items():
                found[end] = found.get(end, 0.0) + probability * share
        return found

    law, ends, kept = plainly((2.0, 0.0), steps), [], 0
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        for run in range(runs):
            state = (2.0, 0.0)
            for step in range(steps):
                key = jax.random.fold_in(jax.random.key(run), step)
                move = jaxspec.speculate(
                    policy,
                    lambda push, at=state: world(at, push),
                    state,
                    approximation=habit,
                    key=key,
                    executor=executor,
                )
                state, kept = move.value, kept + move.accepted
            ends.append(state)
    places = sorted(law)
    counts = np.array([ends.count(place) for place in places])
    assert counts.sum() == runs
    common = np.array([law[place] for place in places]) * runs >= 5
    grouped = [np.append(x[common], x[~common].sum()) for x in (counts, np.array([law[place] for place in places]))]
    assert p_value(*grouped) > 1e-3
    assert kept > runs * steps / 3


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (dict(guesses=0), ValueError, "guesses is 0"),
        (dict(approximation=lambda x: np.zeros((2, 2))), ValueError, r"approximation gave logits of shape \(2, 2\)"),
        (dict(approximation=lambda x: np.zeros(3)), ValueError, "f has 2 outcomes and its approximation 3"),
        (
            dict(approximation=lambda x: np.array([np.nan, 0.0])),
            FloatingPointError,
            "approximation gave logits that are",
        ),
        (dict(approximation=lambda x: np.full(2, -np.inf)), FloatingPointError, "-inf everywhere"),
    ],
)
def test_bad_arguments(changed, error, message):
    options = dict(approximation=lambda x: np.zeros(2), key=jax.random.key(0)) | changed
    with pytest.raises(error, match=message):
        jaxspec.speculate(lambda x: np.zeros(2), lambda token: token, None, **options)


def test_without_an_approximation_f_need_not_begin():
    """The caller's only thread is busy when the approximation fails: f is not left waiting for it."""
    released, begun = threading.Event(), []

    def fails(x):
        raise OSError("the sensor is gone")

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        busy = executor.submit(released.wait, 30)
        options = dict(approximation=fails, key=jax.random.key(0), executor=executor)
        with pytest.raises(OSError, match="sensor"):
            jaxspec.speculate(begun.append, lambda token: token, None, **options)
        released.set()
        assert busy.result()
    assert begun == []


def test_what_f_raises_is_raised():
    def f(x):
        raise OSError("the sensor is gone")

    with pytest.raises(OSError, match="sensor"):
        jaxspec.speculate(f, lambda t: t, None, approximation=lambda x: np.zeros(2), key=jax.random.key(0))
