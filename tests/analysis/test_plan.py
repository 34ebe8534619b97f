"""Plans from numbers, and from a pair that is measured."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Prompt, drafters, rules
from jaxspec.analysis import cost, formulas
from jaxspec.analysis import plan as planning
from jaxspec.analysis.roofline import load_of
from jaxspec.analysis.statistics import Rate, Spread
from jaxspec.core import Room
from jaxspec.decode.request import prepare
from jaxspec.nets import net_of
from jaxspec.testing import prepared_table, table_model
from jaxspec.weights.hf_families.gpt import SIZES
from tests.small import tiny_gpt, tiny_llama, tiny_t5

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PROMPT = Prompt(jnp.array([[3, 1], [2, 0], [4, 4]]), jnp.array([2, 1, 2]))


@pytest.mark.parametrize(
    ("alpha", "c", "slope"), [(0.75, 0.02, 0.0), (0.9, 0.1, 0.05), (0.3, 0.2, 0.3)]
)
def test_a_plan_is_the_best_of_theory(alpha, c, slope):
    v = 1 + slope * np.arange(17)
    plan = planning.plan(alpha, c, v)
    assert plan.gamma == formulas.optimal_gamma(alpha, c, v)
    assert plan.improvement == pytest.approx(
        float(formulas.improvement(alpha, np.arange(17), c, v).max())
    )
    assert plan.best.operations == pytest.approx(float(formulas.operations(alpha, plan.gamma, c)))
    assert plan.break_even == pytest.approx(c + slope, abs=1e-6)
    assert (plan.gamma == 0) == bool(plan.obstacles)
    assert planning.sentence(plan).startswith("Speculate" if plan.gamma else "Do not")


def test_measured_tokens_go_before_equation_1():
    plan = planning.plan(0.75, 0.0, [1.0] * 4, tokens=[1.0, 1.5, 1.4, 1.4], c_hat=0.5)
    assert (plan.gamma, plan.best.tokens_per_round, plan.best.operations) == (
        1,
        1.5,
        pytest.approx(2.5 / 1.5),
    )
    none = planning.plan(0.75, 0.3, [1.0] * 3, tokens=[1.0, 1.1, 1.2])
    assert (
        none.gamma == 0
        and none.chain.gamma == 1
        and none.chain.improvement == pytest.approx(1.1 / 1.3)
    )
    assert "α = 0.75 promises" in planning.sentence(none) and "pay" not in planning.sentence(none)


@pytest.mark.parametrize(
    ("length", "obstacle", "words"),
    [
        (3, "short texts", "texts are short, so that"),
        (64, "clustered draft tokens", "right draft tokens cluster, so that"),
    ],
)
def test_short_texts_are_told_from_clustered_draft_tokens(length, obstacle, words):
    """Independent draft tokens at the same alpha, in texts as long: if these lose, too, no cluster
    is to blame.
    """
    alpha, c, counts = 0.5, 0.3, np.array([length] * 4)
    assert formulas.optimal_gamma(alpha, c, most=2) > 0
    independent = [1.0, *(formulas.independent_tokens(alpha, counts, gamma) for gamma in (1, 2))]
    plan = planning.plan(
        alpha, c, [1.0, 1.05, 1.1], tokens=[1.0, 1.1, 1.2], independent=independent
    )
    assert plan.gamma == 0 and plan.obstacles == (obstacle,)
    assert words in planning.sentence(plan)


def test_gammas_that_are_nearly_as_good_are_named():
    plan = planning.plan(0.75, 0.02, [1.0] * 17)
    speed = formulas.improvement(0.75, np.arange(17), 0.02)
    assert plan.near == tuple(
        g for g in range(17) if speed[g] >= 0.97 * speed.max() and g != plan.gamma
    )
    assert planning.sentence(plan).endswith("; within 3% of that: γ = 7, 8, 10..13.")
    assert planning.sentence(planning.plan(0.5, 0.0, [1.0, 1.49])).endswith(
        "; within 3% of that: plain decoding; larger γ were not tried."
    )
    slower = planning.sentence(planning.plan(0.5, 0.0, [1.0, 1.53]))
    assert slower.startswith(
        "Do not speculate: the best γ, 1, would have 0.98 times the speed of plain decoding"
    )


def test_a_plan_says_when_the_longest_draft_is_the_best():
    for alpha, c, largest, is_at_cap in (
        (0.8, 0.0, 16, True),
        (0.8, 0.02, 16, False),
        (0.8, 0.02, 5, True),
    ):
        plan = planning.plan(alpha, c, [1.0] * (largest + 1))
        assert plan.at_cap == is_at_cap == (plan.gamma == largest)
        assert planning.sentence(plan).endswith("; larger γ were not tried.") == is_at_cap
    assert not planning.plan(0.1, 0.5, [1.0]).at_cap  # plain decoding was all that was tried


def test_bytes_of_a_round_count_each_models_passes():
    """Section 3.4: the target is read once a round, and the drafter once a level."""
    chain = planning.price(((0,), (0, 0)), 2.5, c=0.1, v=[1.0] * 3, c_hat=0.1, c_bytes=0.25)
    assert chain.accesses == pytest.approx((1 + 2 * 0.25) / 2.5)
    star = planning.price(((0,), (1,)), 1.5, c=0.1, v=[1.0] * 3, c_hat=0.1)
    assert star.accesses == pytest.approx((1 + 0.1) / 1.5), (
        "c_hat by default; two siblings are drafted by one pass"
    )
    plan = planning.plan(0.75, 0.02, [1.0] * 17)
    assert plan.best.accesses == pytest.approx(
        float(formulas.memory_accesses(0.75, plan.gamma, 0.02))
    )
    assert plan.chains[0].accesses == 1
    sizes = planning.of_sizes(0.75, "11B", "1.1B", "tpu-v4", c=0.5)
    assert sizes.chains[2].accesses == pytest.approx(
        float(formulas.memory_accesses(0.75, 2, 0.1))
    ), "bytes, not times"
    block = planning.of_sizes(0.75, "11B", "1.1B", "tpu-v4", at_once=True)
    assert block.chains[4].accesses == pytest.approx(
        float(formulas.memory_accesses(0.75, 4, 0.1 / 4))
    )


def test_a_batch_waits_for_its_slowest_row():
    single, many = (
        planning.sentence(planning.plan(0.75, 0.02, [1.0] * 5, batch=batch)) for batch in (1, 8)
    )
    assert "slowest" not in single and "for each row; the batch waits for its slowest" in many


def test_v_is_timed_on_both_sides_of_a_step():
    assert {7, 8, 15, 16} < set(cost.gammas_up_to(16)) and cost.gammas_up_to(16)[-1] == 16


def test_what_it_would_take_is_stated():
    rare = planning.sentence(planning.plan(0.05, 0.1, [1.0] * 5))
    assert (
        "(α = 0.05; it would pay from α = 0.10 on), and the drafter takes too long (c = 0.10 passes"
        in rare
    )
    free = planning.sentence(planning.plan(0.0, 0.0, [1.0] * 5))
    assert "(α = 0.00; it would pay from α = 0.00 on)" in free
    busy = planning.sentence(planning.plan(0.9, 0.1, np.arange(1.0, 6.0)))
    assert busy.endswith("because checking 2 tokens takes the time of 2.00 passes over one (v).")


def test_no_gamma_but_zero():
    assert planning.plan(0.9, 0.1, [1.0]).gamma == 0


@pytest.mark.slow
def test_a_pair_that_is_one_model_accepts_everything():
    """A drafter that is its own target: everything is accepted, and tokens per round say so."""
    model, done = table_model(jax.random.key(1), vocab=5), []
    prepared = prepare(model, PROMPT, drafter=model, max_new_tokens=13)
    plans = list(planning.of_pair(prepared, batches=(1, 2), most=2, repeats=1, advance=done.append))
    assert [plan.batch for plan in plans] == [1, 2]
    assert len(done) == planning.steps((1, 2), 2)
    for plan in plans:
        assert plan.alpha == 1.0 and plan.c > 0 and plan.v > 0
        assert plan.measured.alpha[:4] == (1.0, 0.0, 1.0, 1.0)
        assert plan.c == plan.measured.c.median and set(plan.measured.v) == {1, 2}
        assert plan.v == plan.measured.v[plan.gamma or plan.chain.gamma].median
        assert plan.best.tokens_per_round == {0: 1.0, 1: 2.0, 2: 3.0}[plan.gamma]
        assert plan.improvement == pytest.approx(
            plan.best.tokens_per_round / (plan.gamma * plan.c + plan.v) if plan.gamma else 1.0
        )


def test_the_ratio_of_operations_counts_weights_that_tokens_meet():
    target = table_model(jax.random.key(1), vocab=5)
    bigram = drafters.ngram([[0, 1, 2, 1]], target, order=2)
    assert cost.operations_ratio(target, bigram) == 0
    half = target._replace(params=target.params[: len(target.params) // 2])
    assert cost.operations_ratio(target, half) == pytest.approx(
        half.params.size / target.params.size
    )
    big, small = (target._replace(config=SIZES[name]) for name in ("gpt-97m", "gpt-6m"))
    assert cost.operations_ratio(big, small) == pytest.approx(0.04, abs=0.005)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: planning.plan(1.5, 0.1, [1.0, 1.0]), "alpha is 1.5"),
        (
            lambda: planning.plan(0.5, 0.1, [1.0] * 3, tokens=[1.0]),
            "for 1 and 1 gammas and v for 3",
        ),
        (
            lambda: planning.plan(0.5, 0.1, [1.0] * 3, independent=[1.0]),
            "for 3 and 1 gammas and v for 3",
        ),
        (lambda: planning.plan(0.5, 0.1, [1.0, 0.0]), "expected costs"),
        (lambda: planning.plan([0.5], -0.1, [1.0, 1.0]), "expected costs"),
        (lambda: planning.plan([1.5], 0.1, [1.0, 1.0]), "expected probabilities by rank"),
        (lambda: next(planning.of_pair(None, most=0)), "most is 0"),
        (
            lambda: next(planning.of_pair(prepared_table(rule=rules.lenient(0.5)), trees=True)),
            "rejection rule, without top_k",
        ),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


TINY_T5 = tiny_t5(layers=2)
TINY_GPT = tiny_gpt(layers=2)
TINY_LLAMA = tiny_llama(layers=2)


@pytest.mark.parametrize("config", [TINY_T5, TINY_GPT, TINY_LLAMA], ids=["t5", "gpt", "llama"])
def test_load_of_counts_what_decoding_multiplies(config):
    """Against the shapes of the parameters, and of the cache."""
    net = net_of(config)
    params = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    count = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        absent = ["encoder", "position", "['cross']['key']", "['cross']['value']", "table"]
        absent += [] if config.tied_head else ["embedding"]  # looked up; the head is another matrix
        if leaf.ndim == 2 and not any(part in name for part in absent):
            count += leaf.size
    row, prompt = 16, 16
    load = load_of(config, row=row, prompt=prompt)
    assert load.parameters == count
    lm = net.language_model(config)
    prompts = Prompt(
        jax.ShapeDtypeStruct((1, prompt), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    )
    _, cache = jax.eval_shape(
        lambda params, prompt: lm.prefill(params, prompt, Room(row)), params, prompts
    )
    stored = [x for x in jax.tree.leaves(cache) if x.ndim == 4 and x.dtype == jnp.float32]
    assert load.cache_bytes == sum(4 * x.size for x in stored)


def test_a_measured_promise_is_qualified_by_what_whole_texts_had():
    """The factor is that of the pages of results: from the least to the largest of their
    medians.
    """
    pages = [page.read_text(encoding="utf-8") for page in RESULTS.glob("*.md")]
    medians = [
        float(x)
        for page in pages
        for x in re.findall(r"Measured over predicted: ([\d.]+) in the median", page)
    ]
    assert len(medians) > 5 and (round(min(medians), 1), round(max(medians), 1)) == planning.SHARE
    spread = Spread(1.0, 1.0, 1.0)
    measured = planning.Measured(Rate(0.6, 0.1, 0.5, 0.7, 9), spread, {1: spread}, {})
    for c, ending in (
        (0.0, "1.28 to 1.60 times."),
        (0.3, "0.98 to 1.23 times, so plain decoding may be as fast."),
    ):
        said = planning.sentence(planning.plan(0.6, c, [1.0, 1.0])._replace(measured=measured))
        assert "are at most" in said and said.endswith(
            f"Whole texts had 0.8 to 1 of what passes promised: {ending}"
        )
