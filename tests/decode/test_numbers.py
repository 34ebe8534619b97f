"""A trace with numbers has what the rule compared, and costs nothing where nobody asks for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, policies, rules
from jaxspec.core import Distribution, Draft, Draw, noise
from jaxspec.decode import numbers
from jaxspec.rules.catalogue import RULES
from jaxspec.testing import table_model_from

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
TARGET, DRAFT = (
    table_model_from(jnp.log(jnp.tile(jnp.array(x, jnp.float32), (3, 1)))) for x in (P, Q)
)
PROMPTS = jaxspec.Prompt(jnp.array([[1, 2], [0, 0]]), jnp.array([2, 1]))
SAMPLED = {
    "temperature": 1.0,
    "key": jax.random.key(5),
    "trace_numbers": True,
    "max_new_tokens": 24,
}
ENTROPY = -np.sum(Q * np.log(Q)) / np.log(3)


def table(rule="rejection", drafter=DRAFT, **options):
    out = jaxspec.generate(
        TARGET,
        PROMPTS,
        drafter=drafter,
        rule=RULES[rule].rule,
        **{"gamma": 3, **SAMPLED, **options},
    )
    return out, out.trace.table()


def test_numbers_are_those_of_the_tables_and_decide():
    out, columns = table()
    token, q, p, r = (columns[name] for name in ("token", "q", "p", "r"))
    np.testing.assert_allclose(q, Q[token], rtol=1e-5)
    np.testing.assert_allclose(p, P[token], rtol=1e-5)
    np.testing.assert_allclose(columns["ratio"], P[token] / Q[token], rtol=1e-5)
    np.testing.assert_allclose(columns["acceptance"], np.minimum(1, P[token] / Q[token]), rtol=1e-5)
    np.testing.assert_allclose(columns["entropy"], ENTROPY, rtol=1e-5)
    np.testing.assert_allclose(columns["residual_mass"], 0.3, rtol=1e-5)  # sum of max(p - q, 0)
    tested, accepted = columns["tested"], columns["accepted"]
    assert (
        (accepted == (tested & (r * q < p))).all() and accepted.any() and (tested & ~accepted).any()
    )
    # r is the draw at the row's length before the round, with the row's key.
    first = np.append(True, np.diff(columns["round"]) != 0) | np.append(
        True, np.diff(columns["row"]) != 0
    )
    rows, index = columns["row"], np.arange(len(token))
    index -= np.maximum.accumulate(np.where(first, index, 0))  # of the draft token in its round
    length = np.array([2, 1])[rows] + columns["position"] - index
    keys = noise.at(
        noise.row_keys(jax.random.key(5), 2)[rows], jnp.array(length), noise.Purpose.ACCEPT
    )
    np.testing.assert_array_equal(
        r, np.asarray(noise.uniform(keys, 3))[np.arange(len(token)), index]
    )
    assert out.stats.drafted.sum() == len(token)


def test_a_childs_q_is_that_of_the_drafter_that_drew_it():
    first, second = np.array([0.1, 0.2, 0.4, 0.3]), np.array([0.2, 0.6, 0.1, 0.1])
    log_p, log_first, log_second = (
        jnp.log(jnp.array([[x]])) for x in ([0.4, 0.3, 0.2, 0.1], first, second)
    )
    draft = Draft(
        jnp.array([[2, 1]]),
        jnp.array([2]),
        jnp.array([[0, 0]]),
        log_first,
        jnp.full((1, 2), Draw.WITH_REPLACEMENT),
        jnp.array([[0, 1]]),
        (log_second,),
    )
    np.testing.assert_allclose(numbers._of_drafter(draft), [[0.4, 0.6]], rtol=1e-6)
    entropies = [-np.sum(q * np.log(q)) / np.log(4) for q in (first, second)]
    np.testing.assert_allclose(numbers._entropies(draft), [entropies], rtol=1e-6)
    trials = rules.rejection().trials(
        noise.row_keys(jax.random.key(0), 1),
        jnp.array([3]),
        draft,
        Distribution(jnp.repeat(log_p, 3, axis=1)),
    )
    # The first leaves (.75 .25 0 0), of which the second takes min(.75, .2) + min(.25, .6).
    np.testing.assert_allclose(trials.acceptance, [[0.2 / 0.4, 0.25 / 0.6]], rtol=1e-6)
    np.testing.assert_allclose(trials.residual_mass, [[0.4, 0.55]], rtol=1e-6)


def judged(rule, *, parent=None):
    """Random distributions, drafts that were drawn from them, the rule's verdict and its
    numbers.
    """
    rows, nodes, vocab = 40, 4, 5
    keys = jax.random.split(jax.random.key(3), 3)
    log_p = jax.nn.log_softmax(1.5 * jax.random.normal(keys[0], (rows, nodes + 1, vocab)))
    log_q = jax.nn.log_softmax(1.5 * jax.random.normal(keys[1], (rows, nodes, vocab)))
    drawn = noise.without_replacement(jax.random.split(keys[2], (rows, nodes)), log_q, 2)
    draft = Draft(drawn[..., 0], jnp.full(rows, nodes), log_probs=log_q)
    if parent is not None:
        elder = [parent[:i].count(above) for i, above in enumerate(parent)]
        draft = draft._replace(
            tokens=drawn[:, parent, elder], parent=jnp.tile(jnp.array(parent), (rows, 1))
        )
    arguments = (
        noise.row_keys(jax.random.key(9), rows),
        jnp.full(rows, 7),
        draft,
        Distribution(log_p),
    )
    verdict, trials = jax.jit(lambda *x: (rule.verify(*x), rule.trials(*x)))(*arguments)
    return draft, verdict, trials


def test_numbers_repeat_the_verdict_of_every_rule_that_draws():
    """Where each token has a test of its own it ends at the first that fails; of joint ones the
    longest prefix wins.
    """
    silent = {name for name, entry in RULES.items() if entry.rule.trials is None}
    assert silent == {"coupled", "trusting", "typical"}
    for name in set(RULES) - silent:
        _, verdict, trials = judged(RULES[name].rule)
        passes = np.asarray(trials.r < trials.acceptance)
        count = np.cumprod(passes, axis=1).sum(axis=1)
        if name in ("block", "traversal"):
            count = np.max(np.where(passes, np.arange(1, 5), 0), axis=1)
        assert (np.asarray(verdict.num_accepted) == count).all() and 0 < count.mean() < 4, name


def test_numbers_repeat_the_verdict_on_trees():
    """From the last committed token each row goes to its first child that passes, until none
    does.
    """
    parent = [0, 0, 1, 1]
    for name in ("rejection", "lenient", "exact_match"):
        _, verdict, trials = judged(RULES[name].rule, parent=parent)
        passes = np.asarray(trials.r < trials.acceptance)
        for row, count in enumerate(verdict.num_accepted.tolist()):
            path, current = [], 0
            while children := [
                i for i, above in enumerate(parent) if above == current and passes[row, i]
            ]:
                path, current = [*path, children[0]], children[0] + 1
            assert verdict.path[row, :count].tolist() == path, (name, row)
    for name in ("traversal", "k_seq"):  # judged jointly: no node has a test of its own
        assert np.isnan(judged(RULES[name].rule, parent=parent)[2].r).all(), name


def test_siblings_are_judged_by_what_the_elder_ones_left():
    """p = .5 .3 .2 and q = .2 .3 .5: after 2 is rejected p is 1 0 0, and q without 2 is .4 .6 0."""
    log_q = jnp.log(jnp.array(Q, jnp.float32))[None, None]
    siblings = Draft(jnp.array([[2, 0, 1]]), jnp.array([3]), jnp.array([[0, 0, 0]]), log_q)
    target = Distribution(jnp.log(jnp.tile(jnp.array(P, jnp.float32), (1, 4, 1))))
    keys = noise.row_keys(jax.random.key(0), 1), jnp.array([4])
    trials = rules.rejection().trials(*keys, siblings, target)
    np.testing.assert_allclose(trials.acceptance[0, :2], [0.4, 1.0], atol=1e-6)
    np.testing.assert_allclose(trials.residual_mass[0, :2], [0.3, 0.6], atol=1e-6)
    # Two draws with replacement: q stays as it is, and after 0 is rejected p is 1 0 0 less it: .8
    # of the mass.
    independent = siblings._replace(draws=jnp.full((1, 3), int(Draw.WITH_REPLACEMENT)))
    trials = rules.rejection().trials(*keys, independent, target)
    np.testing.assert_allclose(trials.acceptance[0, :2], [0.4, 1.0], atol=1e-6)
    np.testing.assert_allclose(trials.residual_mass[0, :2], [0.3, 0.8], atol=1e-6)


def test_nodes_of_trees_have_numbers():
    out, columns = table(drafter=drafters.tree(drafters.model(DRAFT), (2, 1)))
    tested, accepted = columns["tested"], columns["accepted"]
    assert (accepted == (tested & (columns["r"] < columns["acceptance"]))).all() and accepted.any()
    np.testing.assert_allclose(columns["q"], Q[columns["token"]], rtol=1e-5)
    np.testing.assert_allclose(columns["p"], P[columns["token"]], rtol=1e-5)
    np.testing.assert_allclose(columns["entropy"], ENTROPY, rtol=1e-5)
    assert tested.sum() == np.asarray(out.trace.num_tested).sum()


def test_at_temperature_0_there_is_nothing_drawn():
    _, columns = table(temperature=0.0)
    assert np.isnan(columns["r"]).all() and np.isnan(columns["acceptance"]).all()
    assert set(columns["q"].tolist()) == {1.0} and (columns["p"] == (columns["token"] == 0)).all()
    # of what is drawn at temperature 1
    np.testing.assert_allclose(columns["entropy"], ENTROPY, rtol=1e-5)
    # Rows with and without a temperature stand in one program.
    _, columns = table("lenient", temperature=[0.0, 1.0])
    assert (
        np.isnan(columns["r"][columns["row"] == 0]).all()
        and not np.isnan(columns["r"][columns["row"] == 1]).any()
    )


def test_drafters_without_distributions_are_sure():
    _, columns = table(drafter=drafters.prompt_lookup())
    np.testing.assert_allclose(columns["q"], 1.0)
    np.testing.assert_allclose(columns["acceptance"], P[columns["token"]], rtol=1e-5)
    np.testing.assert_allclose(columns["residual_mass"], 1 - P[columns["token"]], rtol=1e-5)
    assert np.isnan(columns["entropy"]).all() and len(columns["q"])


def test_the_entropy_is_what_the_policy_decides_by():
    """1 + (1 - H) 4 draft tokens, with H = .937: 1; a sharp drafter has 4."""
    policy = policies.entropy(least=1, most=5, beta=0.0)
    sharp = table_model_from(jnp.log(jnp.tile(jnp.array([0.98, 0.01, 0.01]), (3, 1))))
    for drafter, temperature in ((DRAFT, 1.0), (sharp, 1.0), (sharp, 0.0)):
        _, columns = table(drafter=drafter, policy=policy, gamma=5, temperature=temperature)
        begins = columns["row"][1:] != columns["row"][:-1]
        is_first = np.append(True, begins | (columns["round"][1:] != columns["round"][:-1]))
        wanted = np.round(1 + (1 - columns["entropy"][is_first]) * 4)
        early = columns["position"][is_first] < 24 - 5  # the limit does not shorten these
        assert (columns["draft_tokens"][is_first] == wanted)[early].all() and early.any()


def test_streams_and_stop_strings_report_the_same():
    prompt = jaxspec.Prompt(PROMPTS.tokens[:1], PROMPTS.length[:1])
    out = jaxspec.generate(TARGET, prompt, drafter=DRAFT, gamma=3, **SAMPLED)
    rounds = jaxspec.trace.of_row(out.tokens[0, : out.lengths[0]], out.trace, 0)
    streamed = list(jaxspec.stream(TARGET, prompt, drafter=DRAFT, gamma=3, **SAMPLED))
    assert rounds[0].numbers is None and streamed[0].numbers is None
    for step, piece in zip(rounds[1:], streamed[1:], strict=True):
        assert jaxspec.trace.numbers_of(piece.numbers) == step.numbers
        assert len(step.numbers["q"]) == len(step.draft)
    assert out.to_dict()["rows"][0]["trace"][1]["numbers"] == rounds[1].numbers


def test_off_they_cost_nothing(monkeypatch):
    """Nothing is computed, nothing is reported, and the traced rounds are those of a decoder that
    knows no numbers.
    """
    asked = jaxspec.prepare(TARGET, PROMPTS, drafter=DRAFT, gamma=3, **SAMPLED)

    def rounds(prepared):
        p = prepared
        state = jax.eval_shape(
            lambda *arrays: p.decoder.init(*arrays, headroom=32), p.weights, p.prompt, p.request
        )
        return jax.make_jaxpr(p.decoder.step)(p.weights, state)

    with_numbers = rounds(asked)

    def refuse(*arguments):
        raise AssertionError("computed, and nobody asked")

    monkeypatch.setattr(numbers, "of_round", refuse)
    monkeypatch.setattr(numbers, "entropy", refuse)
    silent = asked.replace(trace_numbers=False, gamma=2)  # a decoder that was not made before
    without = rounds(silent)
    assert len(with_numbers.out_avals) == len(without.out_avals) + len(
        jaxspec.core.TraceNumbers._fields
    )
    assert len(with_numbers.eqns) > len(without.eqns)
    with pytest.raises(AssertionError, match="nobody asked"):
        rounds(asked.replace(gamma=2))
    assert (
        jaxspec.prepare(TARGET, PROMPTS, drafter=DRAFT).decoder
        is jaxspec.prepare(TARGET, PROMPTS, drafter=DRAFT, trace_numbers=False).decoder
    )


def test_plain_decoding_has_none_and_other_values_are_refused():
    out = jaxspec.generate(TARGET, PROMPTS, max_new_tokens=4, trace_numbers=True)
    assert out.trace.numbers is None and not len(out.trace.table()["token"])
    with pytest.raises(TypeError, match="trace_numbers"):
        jaxspec.generate(TARGET, PROMPTS, drafter=DRAFT, trace_numbers=2)
