"""Log probabilities equal teacher forcing, whatever drafted a token and whatever accepted it; why
rows end.
"""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, rules
from jaxspec.core import Failure, Finish, Preceding, Prompt, Room, token_rows
from jaxspec.decode import batches, log_probs, loop
from jaxspec.decode import state as states
from jaxspec.decode.generate import complete
from jaxspec.decode.request import prepare
from jaxspec.nets import decoder, t5
from jaxspec.rules.catalogue import RULES
from jaxspec.testing import table_model, word_tokenizer
from tests.drafters.cases import CASES, LARGE_TARGET, TARGET
from tests.marks import marked
from tests.small import between, near, random_params, tiny_gpt, tiny_t5

NEAR = 1e-5
TOP = 2
NEW = [12, 9, 14]  # of each row: limits that lie inside of rounds
# Greedy, between, and the model's own distribution, with everything that makes the sampled law
# another than the raw.
SAMPLING = dict(
    temperature=[0.0, 0.7, 1.0],
    top_p=0.95,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    key=jax.random.key(3),
)


@functools.partial(jax.jit, static_argnames=("lm",))
def forced_logits(lm, params, prompt, new):
    """The target's logits after the prompt and 0, 1, ... of the new tokens [B, T]: one pass over
    the finished text.
    """
    first, cache = lm.prefill(
        params, prompt, Room(token_rows.prefill_length(lm, prompt) + new.shape[1])
    )
    return jnp.concatenate([first.logits, lm.extend(params, cache, new)[0].logits], axis=1)


@functools.partial(jax.jit, static_argnames=("sampler",))
def law(sampler, sampling_params, logits, preceding):
    return sampler(sampling_params, logits, preceding)


def forced(prepared, tokens):
    """Raw and sampled log probabilities of all tokens at each place of the new ones, [B, T, V]
    both.
    """
    # one program for all that have the same model
    lm, width = prepared.target.lm, prepared.max_new_tokens
    new = jnp.asarray(np.pad(tokens, ((0, 0), (0, width - tokens.shape[1]))))
    prompt = token_rows.repeat_rows(prepared.prompt, len(tokens) // len(prepared.prompt.length))
    logits = forced_logits(lm, prepared.weights.target, prompt, new)
    read = token_rows.decoder_prompt(lm, prompt)
    row = token_rows.append(jnp.pad(read.tokens, ((0, 0), (0, width))), read.length, new)
    sampled = []
    for place in range(tokens.shape[1]):
        preceding = Preceding(Prompt(row, read.length + place), read.length)
        here = law(
            prepared.sampler,
            prepared.request.sampling_params,
            logits[:, place : place + 1],
            preceding,
        )
        point = here.tokens is not None
        sampled.append(
            jnp.log(jax.nn.one_hot(here.tokens, lm.vocab_size)) if point else here.log_probs
        )
    return np.asarray(jax.nn.log_softmax(logits)), np.concatenate(sampled, axis=1)


def check(out, prepared, top=TOP):
    """Compares a generation's log probabilities with teacher forcing, and its reasons with its
    tokens.
    """
    raw, sampled = forced(prepared, out.tokens)
    ends, limits = np.asarray(prepared.request.eos), np.asarray(prepared.request.max_new_tokens)
    for row, n in enumerate(out.lengths):
        tokens, place = out.tokens[row, :n], np.arange(n)
        np.testing.assert_allclose(out.log_probs.raw[row, :n], raw[row, place, tokens], atol=NEAR)
        np.testing.assert_allclose(
            out.log_probs.sampled[row, :n], sampled[row, place, tokens], atol=NEAR
        )
        best = out.log_probs.top_tokens[row, :n]
        largest = -np.sort(-raw[row, :n], axis=-1)[:, :top]
        np.testing.assert_allclose(out.log_probs.top_raw[row, :n], largest, atol=NEAR)
        np.testing.assert_allclose(
            np.take_along_axis(raw[row, :n], best, axis=-1), largest, atol=NEAR
        )
        # nothing of tokens that were cut
        assert all(not rest[row, n:].any() for rest in out.log_probs)
        assert out.finish[row] == ("eos" if tokens[-1] in ends[row] else "length")
        assert n == limits[row] or out.finish[row] == "eos"
    assert out.log_probs.top_raw.shape == (*out.tokens.shape, top)


def case_of(name):
    """A drafter of the table, its target and three prompts."""
    case = CASES[name]
    if case.large is None:
        return TARGET, case.drafter, [[1, 0, 2], [2], [0, 1]]
    return LARGE_TARGET, case.large, [[1, 2, 3, 1], [4], [5, 0]]


USUAL = {("a model", "rejection"), ("n-gram argmax", "block"), ("a tree", "traversal")}
USUAL |= {("prompt_lookup", "coupled")}
FAST = USUAL - {("n-gram argmax", "block")}
ALL = [
    (name, rule)
    for name, case in CASES.items()
    for rule, entry in RULES.items()
    if case.drafter.functions.tree is None or entry.rule.trees
]
# What a round commits is recorded, whoever drafted it: drafters of each kind of rounds, rules of
# each kind of verdict.
PAIRS = [
    *USUAL,
    ("a model", "coupled"),
    ("a model", "typical"),
    ("a tree", "rejection"),
    ("a tree", "k_seq"),
]
PAIRS += [(name, "rejection") for name in ("fallback", "token_recycling", "a horizontal cascade")]


@pytest.mark.parametrize(
    ("name", "rule"), marked(ALL, slow={*ALL} - FAST, exhaustive={*ALL} - {*PAIRS})
)
def test_log_probs_equal_teacher_forcing(name, rule):
    target, drafter, prompts = case_of(name)
    options = dict(drafter=drafter, gamma=3, rule=RULES[rule].rule, max_new_tokens=NEW, eos_ids=[0])
    prepared = prepare(target, prompts, top_log_probs=TOP, **options, **SAMPLING)
    out = complete(prepared)
    check(out, prepared)
    assert (out.log_probs.sampled[0] == 0).all() or not out.exact  # at temperature 0 a point mass


VOCAB = 11


def network(kind):
    """A tiny network, and a drafter that is right at times: the same with other weights added."""
    if kind == "t5":
        config, seed = tiny_t5(VOCAB), 2  # with which texts vary
        lm, init = t5.language_model(config), t5.init
    else:
        config, seed = tiny_gpt(VOCAB), 0
        lm, init = decoder.language_model(config), decoder.init
    target, other = (
        jaxspec.Model(lm, random_params(init, config, number, 0.6)) for number in (seed, seed + 50)
    )
    return target, near(target, other, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "kind"),
    marked(
        itertools.product(("none", "chain", "adaptive chain", "tree"), ("gpt", "t5")),
        exhaustive={("none", "t5"), ("chain", "gpt"), ("adaptive chain", "t5"), ("tree", "gpt")},
    ),
)
def test_log_probs_of_networks_equal_teacher_forcing(kind, draft):
    """Passes over a round's tokens and over the whole text; a policy's narrow passes are padded
    with zeros.
    """
    target, other = network(kind)
    drafter = {"none": None, "tree": drafters.tree(other, (2, 1))}.get(draft, other)
    policy = jaxspec.policies.heuristic(start=1, grow=2) if draft == "adaptive chain" else None
    options = dict(drafter=drafter, gamma=3, policy=policy, max_new_tokens=NEW, eos_ids=[9])
    prepared = prepare(
        target, [[1, 2, 3], [4], [5, 6, 7, 8, 9]], top_log_probs=TOP, **options, **SAMPLING
    )
    out = complete(prepared)
    check(out, prepared)
    greedy = prepare(target, prepared.prompt, top_log_probs=TOP, **options)
    check(complete(greedy), greedy)


TABLE = table_model(jax.random.key(1), VOCAB, sharpness=2.0)
BLEND = between(TABLE, table_model(jax.random.key(2), VOCAB, sharpness=2.0), 0.7)
START = [[3, 1, 4], [5]]
GREEDY = dict(drafter=BLEND, gamma=4, max_new_tokens=16)


@pytest.fixture(scope="module")
def plain():
    return jaxspec.generate(TABLE, START, **GREEDY)


def test_greedy_text_is_unchanged(plain):
    prepared = prepare(TABLE, START, log_probs=True, **GREEDY)
    out = complete(prepared)
    assert out.tokens.tolist() == plain.tokens.tolist() and plain.log_probs is None
    check(out, prepared, top=0)
    assert not out.log_probs.sampled.any()


def test_an_end_inside_a_round_leaves_nothing_behind(plain):
    """Every token of the text in turn as the end token, the drafter always right: rounds are cut at
    every place.
    """
    options = dict(drafter=TABLE, gamma=4, max_new_tokens=16, top_log_probs=TOP)
    cut = 0
    for end in sorted({*plain.tokens[0].tolist()}):
        prepared = prepare(TABLE, START, eos_ids=[end], **options)
        out = complete(prepared)
        check(out, prepared)
        cut += int((out.trace.num_committed[0] < out.trace.num_accepted[0]).sum())
    assert cut > 0


def test_an_end_token_at_the_limit_is_an_end(plain):
    end = int(plain.tokens[0, 4])
    first = plain.tokens[0].tolist().index(end) + 1
    for limit, reason in ((first, "eos"), (first - 1, "length")):
        out = jaxspec.generate(
            TABLE, START[:1], eos_ids=[end], **GREEDY | dict(max_new_tokens=limit)
        )
        assert (out.finish, out.lengths.tolist()) == ([reason], [limit])
        assert out.records()[0]["finish"] == out.to_dict()["rows"][0]["finish"] == reason


def test_a_stream_reports_what_a_generation_does(plain):
    options = dict(top_log_probs=TOP, **GREEDY)
    whole = jaxspec.generate(TABLE, START[:1], **options)
    pieces = list(jaxspec.stream(TABLE, START[:1], **options))
    for joined, expected in zip(
        (
            np.concatenate(parts)
            for parts in zip(*(piece.log_probs for piece in pieces), strict=True)
        ),
        whole.log_probs,
        strict=True,
    ):
        np.testing.assert_allclose(joined, expected[0], atol=NEAR)
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(len(piece.log_probs.raw) == len(piece.tokens) for piece in pieces)


WORDS = word_tokenizer(["<unk>", "</s>", *(f"w{i}" for i in range(VOCAB - 2))])


def test_a_stop_string_leaves_nothing_behind(plain):
    """Rows that a stop string cuts inside a round; at the limit it is still the stop string that
    ended the row.
    """
    worded = TABLE._replace(tokenizer=WORDS)
    texts = [row.tolist() for row in plain.tokens]
    place = next(
        at for at in range(3, 16) if texts[0][at] > 1 and texts[0][at] not in texts[0][:at]
    )
    stop = WORDS.convert_ids_to_tokens(texts[0][place])
    options = GREEDY | dict(drafter=worded, eos_ids=[], top_log_probs=TOP)
    whole = jaxspec.generate(
        worded, jax.tree.map(jnp.asarray, prepare(TABLE, START).prompt), **options
    )
    for limit in (16, place + 1):
        options |= dict(max_new_tokens=[limit, 16])
        out = jaxspec.generate(worded, prepare(TABLE, START).prompt, stop=[stop], **options)
        assert out.finish[0] == "stop" and out.lengths[0] == place + 1 and stop not in out.texts[0]
        for report, expected in zip(out.log_probs, whole.log_probs, strict=True):
            np.testing.assert_allclose(report[0, : place + 1], expected[0, : place + 1], atol=NEAR)
            assert not report[0, place + 1 :].any()
    *_, last = jaxspec.stream(
        worded, START[0], stop=[stop], **options | dict(max_new_tokens=place + 1)
    )
    assert last.finish == "stop"


def test_a_rollout_returns_log_probs_and_reasons_as_arrays():
    """Under `vmap`, over keys, with weights that are traced."""
    options = dict(
        drafter=BLEND, gamma=3, temperature=0.8, max_new_tokens=6, num_samples=2, eos_ids=[2]
    )
    prepared = prepare(TABLE, START, log_probs=True, key=jax.random.key(0), **options)
    keys = jax.random.split(jax.random.key(5), 3)
    run = jax.jit(jax.vmap(lambda params, key: sample(prepared, params, key), in_axes=(None, 0)))
    outs = jax.device_get(run(TABLE.params, keys))
    for number in range(len(keys)):
        out = jax.tree.map(lambda x, number=number: x[number], outs)
        raw, sampled = forced(prepared, out.tokens)
        for row, n in enumerate(out.length):
            tokens, place = out.tokens[row, :n], np.arange(n)
            np.testing.assert_allclose(
                out.log_probs.raw[row, :n], raw[row, place, tokens], atol=NEAR
            )
            np.testing.assert_allclose(
                out.log_probs.sampled[row, :n], sampled[row, place, tokens], atol=NEAR
            )
            assert Finish(out.finish[row]) == (Finish.EOS if tokens[-1] == 2 else Finish.LENGTH)
    assert out.log_probs.raw.shape == out.tokens.shape and {*outs.finish.flat} == {
        Finish.EOS,
        Finish.LENGTH,
    }


def sample(prepared, params, key):
    return jaxspec.rollout(prepared, weights=prepared.weights._replace(target=params), key=key)


def test_a_row_that_fails_says_so_and_reports_what_it_had():
    params = (
        TABLE.params.at[:, :, 0].set(0.0).at[6].set(jnp.nan)
    )  # of a table: whatever follows two tokens, the first 6
    prepared = prepare(
        TABLE, START, log_probs=True, temperature=1.0, max_new_tokens=16, key=jax.random.key(0)
    )
    out = jax.device_get(
        jaxspec.rollout(prepared, weights=prepared.weights._replace(target=params))
    )
    failed = out.finish == Finish.FAILURE
    assert failed.any() and (failed == (out.failed == Failure.LOGITS)).all()
    for row, n in enumerate(out.length):
        assert np.isfinite(out.log_probs.raw[row]).all() and not out.log_probs.raw[row, n:].any()


def test_rows_of_a_state_are_taken_and_put_with_their_log_probs():
    prepared = prepare(TABLE, START, top_log_probs=1, **GREEDY)
    swapped = batches.take(prepared, [1, 0])
    halfway, others = (next(iter(loop.iterate_rounds(part)))[0] for part in (prepared, swapped))
    taken = token_rows.put_rows(
        halfway, jnp.array([0, 1]), token_rows.take_rows(others, jnp.array([1, 0]))
    )
    jax.tree.map(np.testing.assert_array_equal, taken.memory.log_probs, halfway.memory.log_probs)
    assert taken.memory.log_probs.top_raw.shape[0] == 2 and states.finish(taken).tolist() == [0, 0]


def test_without_log_probs_nothing_is_computed_for_them():
    """The programs of a greedy generation hold no logarithm; those that report one do."""

    def primitives(**options):
        prepared = prepare(TABLE, START, **GREEDY, **options)
        run = functools.partial(
            loop.generation, prepared.decoder, max_new_tokens=prepared.max_new_tokens
        )
        return str(jax.make_jaxpr(run)(prepared.weights, prepared.prompt, prepared.request))

    assert " log " not in primitives() and " log " in primitives(log_probs=True)
    assert (
        prepare(TABLE, START, **GREEDY).decoder
        is prepare(TABLE, START, log_probs=False, **GREEDY).decoder
    )


def test_plain_values_are_json_and_named():
    """Tokens of probability 0, which an inexact rule may accept, are None: JSON has no infinity."""
    out = jaxspec.generate(TABLE, START, top_log_probs=1, rule=rules.lenient(0.01), **GREEDY)
    report = json.loads(json.dumps(out.to_dict(), allow_nan=False))
    row = report["rows"][0]
    assert len(row["raw_log_probs"]) == len(row["sampled_log_probs"]) == len(row["tokens"]) == 16
    assert np.shape(row["top_tokens"]) == np.shape(row["top_log_probs"]) == (16, 1)
    assert None in row["sampled_log_probs"] and None not in row["raw_log_probs"]
    assert "top_tokens" not in jaxspec.generate(TABLE, START, log_probs=True, **GREEDY).records()[0]


def test_metrics_have_vllms_names(plain):
    """Of a drafter that is always right: three rounds of five tokens after prefill's for each
    row.
    """
    metrics = jaxspec.generate(TABLE, START, **GREEDY | dict(drafter=TABLE)).to_dict()["metrics"]
    assert metrics["speculative_decoding"] == {
        "mean_acceptance_length": 5.0,
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 0, 0, 0, 6],
        "num_spec_steps": 6,
        "num_accepted_draft_tokens": 24,
        "num_draft_tokens": 24,
        "num_spec_tokens": 4,
    }
    counts = plain.to_dict()["metrics"]["speculative_decoding"]
    histogram = counts["acceptance_histogram"]
    assert sum(histogram) == counts["num_spec_steps"] == plain.stats.rounds.sum()
    assert (
        np.dot(histogram, np.arange(5))
        == counts["num_accepted_draft_tokens"]
        == plain.stats.accepted.sum()
    )
    assert jaxspec.generate(TABLE, START, max_new_tokens=16).to_dict()["metrics"] == {}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            dict(log_probs=5),
            TypeError,
            "log_probs is 5: expected True or False; top_log_probs is the number",
        ),
        (dict(top_log_probs=-1), ValueError, "top_log_probs is -1: expected a number from 0 to 11"),
        (dict(top_log_probs=12), ValueError, "top_log_probs is 12: expected a number from 0 to 11"),
        (dict(top_log_probs=1.5), Exception, "top_log_probs is 1.5: expected an integer from 0"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        prepare(TABLE, START, **options)


def test_the_position_of_a_token_is_that_of_its_path():
    """After fed tokens 0, 2 and 1 of a pass over three; none is kept of tokens that were not
    committed.
    """
    logits = jnp.log(jnp.array([[[0.5, 0.5], [0.25, 0.75], [0.125, 0.875]]]))
    forward, certain = (
        jaxspec.core.Forward(logits, logits),
        jaxspec.core.Distribution(tokens=jnp.zeros((1, 3), int)),
    )
    report = log_probs.of_tokens(
        jnp.array([[0, 0, 0]]), forward, certain, 0, position=jnp.array([[0, 2, 1]])
    )
    np.testing.assert_allclose(np.exp(report.raw), [[0.5, 0.125, 0.25]], rtol=1e-6)
