"""The runner on table models: its counts, its texts and its arithmetic; never its speed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, policies, rules
from jaxspec.analysis import acceptance, bench, cost, result
from jaxspec.analysis.bench import Config, run
from jaxspec.analysis.result import (
    Backend,
    Costs,
    Setting,
    Spread,
    Task,
    product,
)
from jaxspec.core import Prompt, Stats
from jaxspec.decode import batches
from jaxspec.decode.loop import Outcome, Trace
from jaxspec.decode.request import prepare
from jaxspec.testing import table_model
from tests.small import between

PROMPT = Prompt(
    jnp.array([[3, 1, 2], [2, 0, 0], [5, 4, 0]], jnp.int32), jnp.array([3, 1, 2], jnp.int32)
)
TARGET = table_model(jax.random.key(1), 6)
DRAFT = between(TARGET, table_model(jax.random.key(2), 6), 0.6)._replace(name="small")
TASK = Task("ids", PROMPT, new_tokens=9)
LOOKUP = drafters.prompt_lookup(2)
ALL = ("speed", "latency", "compile", "memory", "alpha", "costs")


@pytest.fixture(autouse=True, scope="module")
def quickly():
    """Nothing is expected of the costs of a table model's passes; its programs serve other tests,
    too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "MIN_SECONDS", 0.0)
        patch.setattr(cost, "REPEATS", 1)
        patch.setattr(jax, "clear_caches", lambda: None)
        yield


@pytest.fixture(scope="module")
def results():
    settings = product(
        task=TASK, drafter={"small": DRAFT, "copy": drafters.prompt_lookup()}, gamma=2, batch=[1, 2]
    )
    settings += product(task=TASK, drafter=DRAFT, gamma=2, policy="adaptive")
    return list(run(TARGET, settings, config=Config(num_prompts=3, repeats=2, quantities=ALL)))


@pytest.mark.slow
def test_a_group_is_plain_decoding_and_its_settings(results):
    assert [
        (row.setting.batch, row.setting.drafter, row.setting.policy, row.setting.gamma)
        for row in results
    ] == [
        *((1, "", "", 0), (1, "small", "", 2), (1, "copy", "", 2), (1, "small", "adaptive", 2)),
        *((2, "", "", 0), (2, "small", "", 2), (2, "copy", "", 2)),
    ]
    assert len({row.group for row in results}) == 2
    for row in results:
        # whole batches only
        assert row.texts == row.same_text == (3 if row.setting.batch == 1 else 2)
        assert row.tokens == 9 * row.texts and len(row.seconds) == 2
        assert (
            0
            < row.tokens_per_second.min
            <= row.tokens_per_second.median
            <= row.tokens_per_second.max
        )
        assert (
            row.speed is None
        ) == row.setting.is_plain and row.environment.jax == jax.__version__
        half, most = row.latency.p50, row.latency.p95
        assert all(0 < half[i] <= most[i] for i in range(3)) and row.latency.first.min > 0
        assert row.first_call > 0


@pytest.mark.slow
def test_rounds_are_those_of_generate(results):
    for row in results:
        if row.setting.drafter == "small" and not row.setting.policy:
            prompts = Prompt(PROMPT.tokens[: row.texts], PROMPT.length[: row.texts])
            out = jaxspec.generate(TARGET, prompts, drafter=DRAFT, gamma=2, max_new_tokens=9)
            rounds = out.stats.rounds
            assert row.tokens_per_round.value == pytest.approx(
                (out.stats.emitted - 1).sum() / rounds.sum()
            )
            assert (
                row.tokens_per_round.count == rounds.sum()
                and row.drafts.share_of_rounds.value
                == pytest.approx((out.trace.draft_length > 0).sum() / rounds.sum())
            )
            assert row.drafts.conditional.value == acceptance.conditional(out.trace).overall.value
            assert [rate.count for rate in row.drafts.conditional_by_draft_token] == [
                rate.count for rate in acceptance.conditional(out.trace).by_draft_token
            ]
            assert row.passes == (rounds + 1).sum() if row.setting.batch == 1 else 1 + rounds.max()
    assert results[0].passes == 3 * 9 and results[4].passes == 9
    assert 0 < results[2].drafts.share_of_rounds.value < 1  # a look-up has no draft in some rounds


@pytest.mark.slow
def test_predictions_follow_theorem_3_8(results, tmp_path):
    plain, small, copied, adaptive = results[:4]
    prepared = prepare(TARGET, PROMPT, drafter=DRAFT, gamma=2, max_new_tokens=9)
    alpha = acceptance.measure(prepared).rate
    assert small.alpha.value == pytest.approx(alpha.value) and small.alpha.count == 27
    assert small.alpha.low == pytest.approx(alpha.interval[0]) and copied.alpha is None
    passes = 2 * small.costs.c.median + small.costs.v.median
    assert small.predicted.theorem == pytest.approx(sum(alpha.value**n for n in range(3)) / passes)
    saved = (plain.passes - 3) / (small.passes - 3)
    assert small.predicted.rounds == pytest.approx(saved / passes)
    assert (copied.costs.c.median, copied.costs.draft_ms) == (0, None) and copied.costs.search > 0
    assert adaptive.predicted.theorem is None and adaptive.predicted.rounds > 0


@pytest.mark.slow
def test_memory_is_accounted(results):
    plain, both = results[0].memory, results[5].memory
    assert plain.weights == TARGET.params.nbytes and plain.logits == 6 * 4
    assert both.weights == TARGET.params.nbytes + DRAFT.params.nbytes
    assert both.logits == 2 * 2 * 3 * 6 * 4  # models, rows, positions, ids, bytes
    assert both.program is None or both.program > both.weights


def test_speeds_are_taken_repeat_by_repeat(monkeypatch):
    """The machine is twice as slow in the second repeat, for both sides: medians alone would not
    tell.
    """
    passed = []

    def interleave(calls, repeats):
        passed.append(len(calls))
        # a call before for what prefill takes, then two for each repeat
        slow = 2.0 if len(passed) > 3 else 1.0
        seconds = [4.0, 2.0] * 3 if len(calls) == 6 else [1.0, 1.0]
        return slow * np.tile(np.array(seconds)[:, None], (1, repeats))

    monkeypatch.setattr(cost, "interleave", interleave)
    plain, ours = run(TARGET, [Setting(TASK, DRAFT, 2)], config=Config(num_prompts=3, repeats=2))
    assert passed == [2, 6, 2, 6, 2]
    assert plain.seconds == (12.0, 24.0) and ours.seconds == (6.0, 12.0)
    assert ours.speed == Spread(2.0, 2.0, 2.0) and plain.tokens_per_second == Spread(
        27 / 16, 27 / 24, 27 / 12
    )
    before = 1.5 * 3  # the median of prefill, in each of three batches
    assert ours.speed_after_prefill.max == pytest.approx((12 - before) / (6 - before))
    assert ours.costs is ours.alpha is ours.latency is ours.memory is None  # nobody asked


def test_the_rate_and_the_promise_of_a_lenient_rule_are_its_own():
    settings = product(
        task=TASK, drafter=DRAFT, gamma=2, sampling={"temperature": 1.0}, rule=[rules.rejection()]
    )
    settings += [
        settings[0]._replace(rule=rules.lenient(0.5)),
        settings[0]._replace(rule=rules.typical()),
    ]
    config = Config(num_prompts=3, repeats=1, quantities=("speed", "costs", "alpha"))
    _, exact, lenient, typical = run(TARGET, settings, config=config)
    assert exact.same_text is lenient.same_text is None and typical.alpha is None
    assert (
        lenient.alpha.value > exact.alpha.value
        and lenient.predicted.theorem > 0
        and not lenient.setting.exact
    )


def test_a_cascade_costs_what_its_whole_draft_does():
    """Neither nothing, as a look-up, nor what its innermost drafter does."""
    cascades = {
        "models": drafters.cascade(DRAFT, DRAFT, gamma=1),
        "look-up": drafters.cascade(DRAFT, LOOKUP, gamma=1),
    }
    config = Config(num_prompts=1, repeats=1, quantities=("speed", "costs"))
    _, *results = run(TARGET, product(task=TASK, drafter=cascades, gamma=2), config=config)
    for row in results:
        assert row.costs.c.median > 0 and row.costs.v.median > 0 and row.costs.draft_ms is None


def test_a_group_that_fails_takes_no_other_with_it():
    broken = TARGET._replace(params=TARGET.params * jnp.nan)
    settings = product(task=TASK, drafter=DRAFT, gamma=2, target=[broken]) + product(
        task=TASK, gamma=0, batch=3
    )
    plain, ours, other = run(TARGET, settings, config=Config(num_prompts=3, repeats=1))
    assert (
        "not finite" in plain.error
        and "FloatingPointError" in ours.error
        and ours.tokens_per_second is None
    )
    assert other.error is None and other.tokens == 27


@pytest.mark.slow
def test_untimed_rows_are_of_all_prompts():
    """The paper's Table 3 for any drafters: alpha of a model; of a look-up what was accepted of
    what was tested.
    """
    options = dict(temperature=1.0, max_new_tokens=9, key=jax.random.key(0))
    settings = product(
        task=TASK, drafter=[DRAFT, drafters.prompt_lookup()], gamma=2, sampling={"temperature": 1.0}
    )
    plain, small, copied = run(TARGET, settings, config=Config(quantities=("alpha",)))
    assert small.seconds == () and small.speed is None and small.texts == 3
    out = jaxspec.generate(TARGET, PROMPT, drafter=DRAFT, gamma=2, **options)
    assert small.tokens_per_round.value == pytest.approx(
        (out.stats.emitted - 1).sum() / out.stats.rounds.sum()
    )
    measured = acceptance.measure(prepare(TARGET, PROMPT, drafter=DRAFT, **options))
    assert small.alpha.value == pytest.approx(measured.alpha)
    assert (
        copied.alpha is None
        and copied.setting.drafter == "prompt_lookup"
        and copied.drafts.share_of_rounds.value < 1
    )
    assert plain.same_text is small.same_text is None


@pytest.mark.slow
def test_the_plan_chooses_gamma(monkeypatch):
    costs, unit = iter([0.01, 9.0]), np.ones(1)

    def measure_all(prepared, gammas, **options):
        c = next(costs)
        return [cost.Cost(gamma, 1, unit, unit, c * unit) for gamma in gammas]

    monkeypatch.setattr(cost, "measure_all", measure_all)
    config = Config(num_prompts=1, repeats=1, quantities=("speed", "alpha"))
    for pays in (True, False):
        _, row = run(TARGET, product(task=TASK, drafter=DRAFT, gamma="plan"), config=config)
        assert (
            row.setting.planned
            and row.setting.gamma > 0
            and row.setting.pays == pays
            and row.speed
            and row.alpha.value > 0
        )


def test_a_gamma_that_cannot_be_planned_is_refused():
    settings = [Setting(TASK, DRAFT, 2), Setting(TASK, LOOKUP, "plan", name="copy")]
    with pytest.raises(ValueError, match="no acceptance rate is known of copy with the rule rej"):
        next(run(TARGET, settings))


def test_a_backend_is_compared_with_its_own_plain_decoding_and_another_target_is_a_setting():
    other = TARGET._replace(params=TARGET.params * 1.01, name="other")

    def decode(setting, parts, folder):
        outcomes = [batches.run(part) for part in parts]
        calls = [functools.partial(batches.run, part) for part in parts]
        return calls, batches.texts(outcomes), sum(1 + int(x.stats.rounds.max()) for x in outcomes)

    again = Backend("again", decode)
    settings = [Setting(TASK, DRAFT, 2, backend=again), Setting(TASK, DRAFT, 2, target=other)]
    rows = list(
        run(
            TARGET,
            settings,
            config=Config(num_prompts=3, repeats=1, quantities=("speed", "compile")),
        )
    )
    assert [(row.setting.backend, row.setting.target, row.setting.gamma) for row in rows] == [
        ("again", TARGET.name, 0),
        ("jaxspec", "other", 0),
        ("again", TARGET.name, 2),
        ("jaxspec", "other", 2),
    ]
    assert [row.speed_over_first is None for row in rows] == [True, False, True, False]
    assert rows[2].same_text == rows[3].same_text == 3 and rows[2].tokens_per_round is None
    assert rows[2].first_call is rows[2].speed_after_prefill is None and rows[3].first_call > 0


@pytest.mark.slow
def test_a_tree_is_a_drafter_as_any():
    _, row = run(
        TARGET,
        [Setting(TASK, drafters.tree(DRAFT, (2, 2)))],
        config=Config(num_prompts=3, repeats=1),
    )
    assert (
        row.setting.drafter == "tree(6 nodes, small)"
        and row.same_text == 3
        and row.tokens_per_round.value > 1
    )


def test_texts_that_differ_are_noticed_where():
    outcome, other = (
        _outcome([[1, 2, 3], [4, 5, 0]], [3, 2]),
        _outcome([[1, 2, 3], [4, 6, 0]], [3, 2]),
    )
    settings = [Setting(TASK, None, 0), Setting(TASK, DRAFT, 2)]
    texts = [[[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 6]]]
    seconds = (2.0, 4.0), (1.0, 2.0)
    runs = [
        bench.Run(
            setting,
            bench.BenchResult(
                result.summary(setting, TARGET), texts=2, tokens=5, passes=5, seconds=times
            ),
            None,
            [None],
            [2],
            texts=text,
            outcomes=[out],
        )
        for setting, text, out, times in zip(
            settings, texts, (outcome, other), seconds, strict=True
        )
    ]
    plain = runs[1].plain_of(runs)
    row = bench._with_speeds(bench._with_texts(runs[1]._replace(outcomes=()), plain), plain.result)
    assert row.same_text == 1 and row.difference == (1, 1, (4, 6), (4, 5))
    assert row.speed == Spread(2.0, 2.0, 2.0) and row.speed_after_prefill is None


def test_unknown_quantities_and_gammas_are_refused():
    with pytest.raises(ValueError, match="quantity is 'sped': expected one of speed, latency"):
        next(run(TARGET, [Setting(TASK)], config=Config(quantities=("sped",))))
    with pytest.raises(ValueError, match="memory is measured in timed runs: add speed to alpha, m"):
        next(run(TARGET, [Setting(TASK)], Config(quantities=("alpha", "memory"))))
    with pytest.raises(ValueError, match="gamma is 'best': expected an integer"):
        next(run(TARGET, [Setting(TASK, DRAFT, "best")]))


def test_prefill_is_measured_with_the_program_of_the_whole():
    prepared = prepare(TARGET, PROMPT, max_new_tokens=9)
    first = cost.only_first(prepared)
    assert (
        jax.tree.structure(prepared.request) == jax.tree.structure(first.request)
        and prepared.decoder is first.decoder
    )
    assert batches.run(first).length.tolist() == [1, 1, 1]
    assert (batches.run(first).tokens[:, 0] == batches.run(prepared).tokens[:, 0]).all()


def _outcome(tokens, length, drafted=((1, 2),), rounds=(2,)):
    counts, drafted = np.array(length), np.array(drafted)
    trace = Trace(np.zeros((*drafted.shape, 2)), drafted, drafted, drafted, drafted)
    return Outcome(
        np.array(tokens),
        counts,
        counts > 9,
        Stats(np.array(rounds), counts, counts, counts),
        trace,
        counts,
    )


@pytest.mark.parametrize(
    ("drafted", "rounds", "policy", "may_be_empty", "expected"),
    [
        # v = 1, 1.5, 2 for 0, 1, 2 draft tokens, and c = 0.25 for each.
        ([[1, 2]], [2], True, False, 1.75 + 2.5),
        ([[1, 2]], [2], False, False, 2.5 + 2.5),  # a draft that is cut was drawn whole
        ([[0, 2]], [2], False, False, 2.5 + 2.5),
        ([[0, 2]], [2], False, True, 1.0 + 2.5),  # without a draft nothing was drawn
        # in a batch a round is as long as its longest draft
        ([[1, 1], [2, 0]], [2, 1], True, False, 2.5 + 1.75),
    ],
)
def test_what_rounds_take(drafted, rounds, policy, may_be_empty, expected, monkeypatch):
    drafter = drafters.model(DRAFT)
    drafter = drafter._replace(functions=drafter.functions._replace(may_be_empty=may_be_empty))
    prepared = prepare(
        TARGET, PROMPT, drafter=drafter, gamma=2, policy=policies.heuristic() if policy else None
    )
    passes = object.__new__(cost.PassTimer)
    passes._drafts = [1, 2]
    unit = Spread(1.0, 1.0, 1.0)

    def costs(drafts):
        v = 1 + drafts / 2
        return Costs(Spread(0.25, 0.25, 0.25), Spread(v, v, v), 0.0, unit, unit, unit)

    monkeypatch.setattr(passes, "costs", costs)
    outcome = _outcome([[0]], [1], drafted, rounds)
    assert passes.passes(prepared, [outcome], policy) == expected
