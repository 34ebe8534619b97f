"""Speculative execution of two functions: its distribution, by enumeration and whole; that it runs
ahead; what may go wrong.
"""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxspec
from jaxspec import rules, speculative_execution
from jaxspec.core import Caches, Distribution, Draft, Prompt, Verdict, Weights, noise
from jaxspec.core.round import unusable
from jaxspec.decode import autoregressive
from jaxspec.decode import state as states
from jaxspec.decode.request import prepare
from jaxspec.testing import decoder_distribution, plain_distribution, table_model, total_variation

P, Q = np.array([0.5, 0.3, 0.0, 0.2]), np.array([0.2, 0.2, 0.6, 0.0])
TARGET = table_model(jax.random.key(1), 3, 1)
PROMPT = Prompt(jnp.array([[1]]), jnp.array([1]))
PLAIN = prepare(TARGET, PROMPT, temperature=1.0, key=jax.random.key(0))


def log(distribution):
    with np.errstate(divide="ignore"):
        return np.log(distribution)


def p_value(counts, distribution):
    """Return the probability of counts as far from the distribution's as these are."""
    return stats.chisquare(counts, counts.sum() * distribution / distribution.sum()).pvalue


def candidates(keys, position, log_q, count):
    """Propose as `speculative_execution.propose` does, in every row of a batch."""
    tokens = noise.without_replacement(noise.at(keys, position, noise.Purpose.DRAFT), log_q, count)
    length = jnp.minimum(jnp.sum(log_q > -jnp.inf, axis=-1, dtype=jnp.int32), count)
    return Draft(tokens, length, parent=jnp.zeros_like(tokens), log_probs=log_q[:, None])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_candidates_are_drawn_without_replacement(count):
    """Candidates of one call are those of the decoder below; fewer where q allows fewer."""
    first = jnp.zeros(1, jnp.int32)
    for seed in range(3):
        key = jax.random.key(seed)
        draft = speculative_execution.propose(key, jnp.asarray(log(Q), jnp.float32), count)
        log_q = jax.nn.log_softmax(jnp.asarray(log(Q), jnp.float32))[None]
        again = candidates(noise.row_keys(jax.random.key(seed), 1), first, log_q, count)
        for x, y in zip(jax.tree.leaves(draft), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(x, y)
        n = int(draft.length[0])
        assert n == min(count, 3) and len(set(draft.tokens[0, :n].tolist()) - {3}) == n


def decoder(count):
    """A decoder whose every token is the draw of a speculative execution, so that its distribution
    can be enumerated.
    """
    plain = autoregressive(TARGET.lm, PLAIN.sampler)

    def step(weights, state):
        live, empty = jnp.logical_not(state.done), states.empty_draft(state.length)
        last = states.last_token(state)
        forward, cache = TARGET.lm.extend(weights.target, state.caches.target, last)
        distribution = PLAIN.sampler(state.request.sampling_params, forward.logits)
        # A key for the call, as the caller of `speculate` gives one: that of the row's position.
        keys, log_q = state.request.keys, jax.nn.log_softmax(weights.draft[last[:, 0]], axis=-1)
        draft = candidates(keys, state.length, log_q, count)
        wide = jnp.broadcast_to(
            distribution.log_probs, (len(live), count + 1, distribution.log_probs.shape[-1])
        )
        verdict = rules.rejection().verify(keys, state.length, draft, Distribution(wide))
        drafted = jnp.take_along_axis(draft.tokens, verdict.path[:, :1], axis=1)[:, 0]
        token = jnp.where(verdict.num_accepted > 0, drafted, verdict.next_token)
        bad = unusable(forward, distribution)[:, 0]
        state, committed = states.commit(state, token[:, None], empty.length + 1, bad)
        state = state._replace(caches=Caches(TARGET.lm.rewind(cache, state.length - 1)))
        return states.update_stats(
            state, live, empty, Verdict(empty.length, token, empty.length), committed
        )

    return plain._replace(step=step)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_token_has_the_distribution_of_f(count):
    # an outcome never drafted
    table = jax.random.normal(jax.random.key(2), (3, 3)).at[0, 1].set(-jnp.inf)
    prepared = PLAIN._replace(decoder=decoder(count), weights=Weights(TARGET.params, table))
    plain = plain_distribution(TARGET, PROMPT, PLAIN.sampler, PLAIN.request.sampling_params, 2)
    assert total_variation(decoder_distribution(prepared, steps=2), plain) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("candidates", [1, 3])
def test_the_whole_call_has_the_distribution_of_f(candidates):
    count = 400
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        options = dict(approximation=lambda x: log(Q), candidates=candidates, executor=executor)
        results = [
            jaxspec.speculate(
                lambda x: log(P), lambda token: -token, None, key=jax.random.key(i), **options
            )
            for i in range(count)
        ]
    assert all(result.value == -result.token for result in results)
    counts = np.bincount([result.token for result in results], minlength=4)
    assert counts[2] == 0 and p_value(counts[P > 0], P[P > 0]) > 1e-3
    accepted = np.mean([result.accepted for result in results])
    if candidates == 1:
        assert accepted == pytest.approx(np.minimum(P, Q).sum(), abs=4 * np.sqrt(0.25 / count))
    else:
        assert accepted > 0.6
    assert all(
        result.runs == min(candidates, 3) + (not result.accepted) for result in results
    )  # q allows three outcomes


@pytest.mark.slow
def test_g_runs_while_f_does():
    """f does not return before g has begun: one after the other, they would wait for ever."""
    begun = threading.Event()

    def f(x):
        assert begun.wait(30)
        return log(np.array([0.0, 1.0]))

    def g(token):
        begun.set()
        return token

    result = jaxspec.speculate(
        f, g, None, approximation=lambda x: log(np.array([0.0, 1.0])), key=jax.random.key(0)
    )
    assert result == (1, 1, True, 1)


def test_the_call_does_not_wait_for_a_draft_token_that_is_not_accepted():
    released = threading.Event()

    def g(token):
        if token == 0:
            assert released.wait(30)
        return token

    certain = [log(np.array(distribution)) for distribution in ([0.0, 1.0], [1.0, 0.0])]
    result = jaxspec.speculate(
        lambda x: certain[0], g, None, approximation=lambda x: certain[1], key=jax.random.key(0)
    )
    released.set()
    assert result == (1, 1, False, 2)


def test_what_is_raised_for_a_rejected_draft_token_is_not_raised():
    certain = [log(np.array(distribution)) for distribution in ([0.0, 1.0], [1.0, 0.0])]
    options = dict(approximation=lambda x: certain[1], key=jax.random.key(0))
    result = jaxspec.speculate(lambda x: certain[0], lambda token: 1 // token, None, **options)
    assert result.value == 1
    with pytest.raises(ZeroDivisionError):
        jaxspec.speculate(lambda x: certain[1], lambda token: 1 // token, None, **options)


@pytest.mark.slow
def test_a_simulator_on_a_shared_clock_gives_its_targets_tokens():
    """A cart on a line, pushed by a policy that looks at where it is: where it ends has the
    distribution of plain runs.

    The slow policy weighs all pushes by what they lead to; the habit that stands in for it only
    looks which side it is on. The world is simulated from the state that the last push left, and so
    can begin before the policy has decided.
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
        distribution, outcomes = np.exp(policy(state)) / np.exp(policy(state)).sum(), {}
        for push, probability in enumerate(distribution):
            for end, share in plainly(world(state, push), left - 1).items():
                outcomes[end] = outcomes.get(end, 0.0) + probability * share
        return outcomes

    distribution, ends, accepted = plainly((2.0, 0.0), steps), [], 0
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
                state, accepted = move.value, accepted + move.accepted
            ends.append(state)
    places = sorted(distribution)
    counts = np.array([ends.count(place) for place in places])
    assert counts.sum() == runs
    probability = np.array([distribution[place] for place in places])
    common = probability * runs >= 5
    grouped = [np.append(x[common], x[~common].sum()) for x in (counts, probability)]
    assert p_value(*grouped) > 1e-3
    assert accepted > runs * steps / 3


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (dict(candidates=0), ValueError, "candidates is 0"),
        (
            dict(approximation=lambda x: np.zeros((2, 2))),
            ValueError,
            r"returned logits of shape \(2, 2\)",
        ),
        (
            dict(approximation=lambda x: np.zeros(3)),
            ValueError,
            "f has 2 outcomes and its approximation 3",
        ),
        (
            dict(approximation=lambda x: np.array([np.nan, 0.0])),
            FloatingPointError,
            "approximation returned logits that make",
        ),
        (dict(approximation=lambda x: np.full(2, -np.inf)), FloatingPointError, "-inf everywhere"),
    ],
)
def test_bad_arguments_are_refused(changed, error, message):
    options = dict(approximation=lambda x: np.zeros(2), key=jax.random.key(0)) | changed
    with pytest.raises(error, match=message):
        jaxspec.speculate(lambda x: np.zeros(2), lambda token: token, None, **options)


def test_without_an_approximation_f_need_not_begin():
    """The caller's only thread is busy when the approximation fails: f is not left waiting for
    it.
    """
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
        jaxspec.speculate(
            f, lambda t: t, None, approximation=lambda x: np.zeros(2), key=jax.random.key(0)
        )
