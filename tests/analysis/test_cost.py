"""The timed loops make the claimed passes, over the claimed number of tokens, at one length."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.analysis import cost
from jaxspec.analysis.cost import Cost, interleave, passes
from jaxspec.core import Forward, LanguageModel, Model, Prompt, Room, noise
from jaxspec.decode.request import prepare
from jaxspec.nets import decoder
from jaxspec.testing import table_model
from tests.marks import marked
from tests.small import tiny_gpt

PROMPT = Prompt(jnp.array([[3, 1, 2], [2, 0, 0]], jnp.int32), jnp.array([3, 1], jnp.int32))
VOCAB = 5


def measure(target, drafter, prompt, *, repeats=25, inner=None, **options):
    """Costs of a pair."""
    return cost.measure(
        prepare(target, prompt, drafter=drafter, **options), repeats=repeats, inner=inner
    )


def counting_model(seen: list) -> Model:
    """A model that counts its passes in its cache, and answers with the count (modulo the
    vocabulary).
    """

    def prefill(params, prompt, room):
        seen.append(("prefill", prompt.tokens.shape, room.tokens))
        batch = prompt.tokens.shape[0]
        logits = jnp.zeros((batch, 1, VOCAB))
        return Forward(logits, logits), {
            "length": prompt.length,
            "passes": jnp.zeros((), jnp.int32),
        }

    def extend(params, cache, tokens, parent=None, real=None):
        seen.append(("extend", tokens.shape))
        count = cache["passes"] + 1
        logits = (
            jnp.broadcast_to(jax.nn.one_hot(count % VOCAB, VOCAB), (*tokens.shape, VOCAB)) * params
        )
        return Forward(logits, logits), {
            "length": cache["length"] + tokens.shape[1],
            "passes": count,
        }

    def rewind(cache, length):
        return cache | {"length": length}

    return Model(
        LanguageModel(prefill, extend, rewind, VOCAB, is_causal=True), jnp.ones(()), name="counting"
    )


@pytest.mark.parametrize("inner", [1, 7])
@pytest.mark.parametrize("step", [1, 4])
def test_the_loop_makes_every_pass_and_uses_it(inner, step):
    seen = []
    model = counting_model(seen)
    _, cache = model.lm.prefill(model.params, PROMPT, Room(16))
    tokens, cache = passes(
        model.lm,
        model.params,
        cache,
        PROMPT.length,
        jnp.zeros((2, step), jnp.int32),
        jnp.asarray(inner),
    )
    assert int(cache["passes"]) == inner
    assert cache["length"].tolist() == PROMPT.length.tolist()
    assert tokens.tolist() == [[inner % VOCAB] * step] * 2
    assert ("extend", (2, step)) in seen


def test_sampled_passes_draw_from_the_distribution():
    """Ids of probability 0 are never drawn; of two that are equally probable, each pass draws its
    own.
    """
    model = counting_model([])
    half = jnp.where(jnp.arange(VOCAB) < 2, 0.0, -jnp.inf)

    def extend(params, cache, tokens):
        logits = jnp.broadcast_to(half, (*tokens.shape, VOCAB))
        cache = cache | {"passes": cache["passes"] + 1}
        return Forward(logits, logits), cache | {
            "drawn": cache["drawn"].at[cache["passes"]].set(tokens[:, 0])
        }

    lm = model.lm._replace(extend=extend)
    _, cache = model.lm.prefill(model.params, PROMPT, Room(16))
    keys = noise.row_keys(jax.random.key(0), 2)
    cache |= {"drawn": jnp.zeros((33, 2), jnp.int32)}
    _, cache = passes(
        lm, model.params, cache, PROMPT.length, jnp.zeros((2, 3), jnp.int32), jnp.asarray(32), keys
    )
    drawn = np.asarray(cache["drawn"])[1:32]  # what the second pass was fed, and so on
    assert set(drawn[:, 0]) == set(drawn[:, 1]) == {0, 1}  # passes have noise of their own
    assert (drawn[:, 0] != drawn[:, 1]).any()  # rows have noise of their own


def test_sampling_is_timed_where_it_is_asked_for(monkeypatch):
    seen = []
    monkeypatch.setattr(cost, "passes", lambda *a: (seen.append(a[-1]), passes(*a))[1])
    model = counting_model([])
    for sampled in (False, True):
        options = dict(temperature=float(sampled), key=jax.random.key(0))
        measure(model, model, PROMPT, gamma=1, repeats=1, inner=1, **options)
    assert [keys is not None for keys in seen] == [False] * 6 + [True] * 6


def test_the_number_of_passes_is_traced():
    seen = []
    lm = counting_model(seen).lm
    for inner in (2, 5):
        _, cache = lm.prefill(jnp.ones(()), PROMPT, Room(16))
        passes(
            lm, jnp.ones(()), cache, PROMPT.length, jnp.zeros((2, 1), jnp.int32), jnp.asarray(inner)
        )
    assert [what for what, *_ in seen].count("extend") == 1


def test_each_pass_is_measured_at_its_own_width_and_the_real_capacity():
    seen_target, seen_draft = [], []
    target, draft = counting_model(seen_target), counting_model(seen_draft)
    costs = measure(target, draft, PROMPT, gamma=3, repeats=2, inner=2, max_new_tokens=20)
    widths = {entry[1] for entry in seen_target if entry[0] == "extend"}
    assert widths == {(2, 1), (2, 4)}
    assert {entry[1] for entry in seen_draft if entry[0] == "extend"} == {(2, 1)}
    # the prompt's bucket of 16, the bucket of 20 new tokens, and gamma + 1 more, as `generate`
    # makes it
    assert {entry[2] for entry in seen_target if entry[0] == "prefill"} == {16 + 32 + 3 + 1}
    assert (costs.gamma, costs.batch) == (3, 2)


def test_figures_are_positive_and_complete():
    model = table_model(jax.random.key(1), VOCAB)
    costs = measure(
        model, table_model(jax.random.key(2), VOCAB), PROMPT, gamma=2, repeats=3, inner=2
    )
    for samples in (costs.target, costs.verify, costs.draft):
        assert samples.shape == (3,) and (samples > 0).all()
    assert min(costs.target_ms, costs.verify_ms, costs.draft_ms, costs.c, costs.v) > 0


def test_encoder_decoders_are_measured_after_their_start_token():
    model = table_model(jax.random.key(1), VOCAB, encoder=True)
    (costs,) = cost.measure_all(prepare(model, PROMPT, drafter=model), (0,), repeats=1, inner=1)
    assert costs.v > 0


def test_medians_and_ratios():
    costs = Cost(
        7, 1, np.array([10.0, 20.0, 30.0]), np.array([12.0, 30.0, 33.0]), np.array([1.0, 4.0, 3.0])
    )
    assert (costs.target_ms, costs.verify_ms, costs.draft_ms) == (20.0, 30.0, 3.0)
    # of 0.1, 0.2, 0.1: each repeat is compared with its own neighbours
    assert costs.c == pytest.approx(0.1)
    assert costs.v == pytest.approx(1.2)


def test_calls_are_timed_one_after_the_other_in_every_repeat():
    order = []
    seconds = interleave([lambda: order.append("a"), lambda: order.append("b")], repeats=3)
    assert order == ["a", "b"] * 3
    assert seconds.shape == (2, 3) and (seconds >= 0).all()


def test_loops_take_as_long_as_they_should(monkeypatch):
    """A pass of 10 ms is repeated 3 times, in each measurement of some 30 ms."""
    clock, counts = [0.0], []

    def slow(lm, params, cache, length, tokens, count, keys):
        counts.append(int(count))
        clock[0] += int(count) * 0.01
        return tokens, cache

    monkeypatch.setattr(cost, "passes", slow)
    monkeypatch.setattr(cost.time, "perf_counter", lambda: clock[0])
    model = table_model(jax.random.key(1), VOCAB)
    loop = cost.pass_loops(model, prepare(model, PROMPT), 1, None)(1)
    assert loop.passes == 3 and counts == [cost.WARMUP] * 4
    loop.call()
    assert counts[-1] == 3
    costs = measure(model, model, PROMPT, gamma=1, repeats=2)
    assert costs.target_ms == pytest.approx(10) and costs.c == pytest.approx(1)


def test_bad_arguments_are_refused():
    model = table_model(jax.random.key(1), VOCAB)
    with pytest.raises(ValueError, match="repeats is 0"):
        measure(model, model, PROMPT, gamma=1, repeats=0)
    with pytest.raises(ValueError, match="inner is 0"):
        measure(model, model, PROMPT, gamma=1, inner=0)
    with pytest.raises(ValueError, match="gamma is -1"):
        cost.measure_all(prepare(model, PROMPT, drafter=model), (-1,))
    with pytest.raises(TypeError, match="drafter is no model"):
        measure(model, jaxspec.drafters.prompt_lookup(), PROMPT, gamma=1)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [False, True])
def test_a_search_is_timed_draft_by_draft(encoder):
    """Each proposes and commits, after a row that ends with what the last one drafted."""
    target, calls = table_model(jax.random.key(1), VOCAB, encoder=encoder), ([], [])
    real = jaxspec.drafters.online_ngram(3)
    functions = real.functions

    def propose(weights, caches, context):
        row = context.row
        last = jnp.take_along_axis(row.tokens, row.length[:, None] - 1, axis=1)[:, 0]
        draft, caches = functions.propose(weights, caches, context)
        draft = draft._replace(tokens=(last[:, None] + 1) % VOCAB + jnp.zeros_like(draft.tokens))
        jax.debug.callback(lambda last: calls[0].append(last.tolist()), last)
        return draft, caches

    def commit(end):
        jax.debug.callback(lambda: calls[1].append(end.forward.logits.shape))
        return functions.commit(end)

    drafter = real._replace(functions=functions._replace(propose=propose, commit=commit))
    prepared = prepare(target, PROMPT, drafter=drafter, gamma=3)
    before = prepared.prompt.tokens.tolist()
    loop = cost.draft_loop(prepared, 3)
    jax.effects_barrier()
    first = calls[0][0]
    assert (
        sorted(calls[0]) == [[(x + i) % VOCAB for x in first] for i in range(3)]
        and len(calls[1]) == 3
    )
    loop.call()
    jax.effects_barrier()
    assert len(calls[0]) == 6 and set(calls[1]) == {(2, 4, VOCAB)}
    assert prepared.prompt.tokens.tolist() == before  # what is donated is a copy
    assert cost.draft_cost(prepared, repeats=2, inner=2) > 0


WHOLE = ("its own layers", "a cascade", "a cascade over a look-up", "a tree")
# Timed alike both ways.
OTHER_WAY = {("a cascade", 1.0), ("a cascade over a look-up", 0.0), ("a tree", 0.0)}


@pytest.mark.parametrize(
    ("kind", "temperature"), marked(itertools.product(WHOLE, (0.0, 1.0)), exhaustive=OTHER_WAY)
)
def test_draft_tokens_of_several_drafters_or_of_own_layers_have_a_cost(
    kind, temperature, monkeypatch
):
    shape = tiny_gpt(VOCAB, layers=2)
    target = jaxspec.Model(
        decoder.language_model(shape), decoder.init(shape, jax.random.key(0)), config=shape
    )
    small = table_model(jax.random.key(1), VOCAB)
    drafter = {
        "its own layers": lambda: jaxspec.drafters.early_exit(target, 1),
        "a cascade": lambda: jaxspec.drafters.cascade(small, small, gamma=1),
        "a cascade over a look-up": lambda: jaxspec.drafters.cascade(
            small, jaxspec.drafters.prompt_lookup(), gamma=1
        ),
        "a tree": lambda: jaxspec.drafters.tree(jaxspec.drafters.early_exit(target, 1), (2, 1)),
    }[kind]()
    options = dict(gamma=2, max_new_tokens=4, temperature=temperature, key=jax.random.key(0))
    prepared = prepare(target, PROMPT, drafter=drafter, **options)
    timed, loop = [], cost.draft_loop
    monkeypatch.setattr(
        cost,
        "draft_loop",
        lambda prepared, *sizes: timed.append(prepared) or loop(prepared, *sizes),
    )
    assert cost.draft_cost(prepared, repeats=1, inner=1) > 0 and cost.drafts_as_a_whole(prepared)
    # a whole draft, drawn as it is there
    assert [prepared.is_sampled for prepared in timed] == [temperature > 0]
