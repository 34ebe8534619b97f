"""The decoders over models that are cheap to run: greedy equality, batches, ends, statistics,
compilation.
"""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, policies, rules, sampling
from jaxspec.core import (
    Caches,
    Draft,
    DraftContext,
    Drafter,
    DraftStart,
    Prompt,
    Room,
    Rule,
    Stats,
    Weights,
    noise,
    token_rows,
)
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.nets import decoder, t5
from jaxspec.testing import table_model, table_model_from
from tests.marks import marked
from tests.small import between, tiny_gpt, tiny_t5

VOCAB = 7
PROMPTS = [[3, 1, 4], [1], [5, 2, 6, 5, 3], [0, 0]]
TARGET = table_model(jax.random.key(1), VOCAB, sharpness=2.0)
DRAFT = table_model(jax.random.key(2), VOCAB, sharpness=2.0)
BLEND = between(TARGET, DRAFT, 0.7)  # agrees with the target often, not always


def prompt(rows=PROMPTS, width=8, fill=0):
    tokens = np.full((len(rows), width), fill, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return Prompt(jnp.asarray(tokens), jnp.asarray([len(r) for r in rows], jnp.int32))


def tokens_of(out):
    return [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]


def jaxpr_of(prepared):
    """The program of a whole generation."""
    run = functools.partial(
        loop.generation, prepared.decoder, max_new_tokens=prepared.max_new_tokens
    )
    return jax.make_jaxpr(run)(prepared.weights, prepared.prompt, prepared.request)


# --- greedy
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0, 1, 3, 7])
@pytest.mark.parametrize(
    "drafter", [DRAFT, BLEND, TARGET], ids=["adversarial", "similar", "itself"]
)
def test_greedy_equals_plain(drafter, gamma):
    plain = jaxspec.generate(TARGET, prompt(), max_new_tokens=21)
    fast = jaxspec.generate(TARGET, prompt(), drafter=drafter, gamma=gamma, max_new_tokens=21)
    assert tokens_of(fast) == tokens_of(plain)
    assert fast.lengths.tolist() == [21] * 4


@pytest.mark.parametrize("length", range(1, 8))
def test_every_limit_up_to_two_rounds(length):
    plain = jaxspec.generate(TARGET, prompt(), max_new_tokens=length)
    fast = jaxspec.generate(TARGET, prompt(), drafter=BLEND, gamma=4, max_new_tokens=length)
    assert tokens_of(fast) == tokens_of(plain)
    assert fast.lengths.tolist() == [length] * 4


def test_limits_per_row():
    plain = jaxspec.generate(TARGET, prompt(), max_new_tokens=20)
    fast = jaxspec.generate(TARGET, prompt(), drafter=BLEND, gamma=3, max_new_tokens=[1, 20, 7, 2])
    assert tokens_of(fast) == [
        row[:n] for row, n in zip(tokens_of(plain), [1, 20, 7, 2], strict=True)
    ]


@pytest.mark.slow
def test_every_token_in_turn_as_the_end_token():
    """An end inside an accepted block: cut after the first, drop the rest and the bonus, freeze the
    row.
    """
    plain = tokens_of(jaxspec.generate(TARGET, prompt(), max_new_tokens=20))
    for ends in [[t] for t in range(VOCAB)] + [[2, 5], [0, 1, 6]]:
        fast = jaxspec.generate(
            TARGET, prompt(), drafter=BLEND, gamma=5, max_new_tokens=20, eos_ids=ends
        )
        expected = []
        for row in plain:
            at = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            expected.append(row[:at])
        assert tokens_of(fast) == expected, ends


@pytest.mark.slow
def test_greedy_text_of_an_encoder_decoder_is_plain_decodings():
    target = table_model(jax.random.key(1), VOCAB, encoder=True, sharpness=2.0)
    draft = table_model_from(0.8 * target.params, encoder=True)
    plain = jaxspec.generate(target, prompt(), max_new_tokens=15)
    fast = jaxspec.generate(target, prompt(), drafter=draft, gamma=4, max_new_tokens=15)
    assert tokens_of(fast) == tokens_of(plain)
    assert fast.stats.acceptance_rate.min() == 1.0  # the same argmax


# --- penalties
# -------------------------------------------------------------------------------------------------------

PENALTIES = dict(
    repetition_penalty=1.4,
    presence_penalty=0.6,
    frequency_penalty=[0.5, 0.2, 0.0, -0.3],
    banned=[5],
)


def penalised(model, row, frequency, new, read=()):
    """Greedy decoding of an order-2 table in numpy, with PENALTIES."""
    table, row, start = np.asarray(model.params), list(row), len(row)
    table = table[sum(read) % VOCAB] if read else table
    for _ in range(new):
        logits = table[[0, *row][-2], row[-1]].copy()
        logits[5] = -np.inf
        for token in set(row):
            logits[token] *= 1.4 if logits[token] < 0 else 1 / 1.4
        for token in row[start:]:
            logits[token] -= frequency + 0.6 / row[start:].count(token)
        row.append(int(np.argmax(logits)))
    return row[start:]


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1, 4])
def test_each_draft_token_is_penalised_for_its_own_prefix(gamma):
    """Greedy: as plain decoding, and as numpy. The target, drafting for itself, counts its draft
    tokens too.
    """
    expected = [
        penalised(TARGET, *pair, 21)
        for pair in zip(PROMPTS, PENALTIES["frequency_penalty"], strict=True)
    ]
    assert tokens_of(jaxspec.generate(TARGET, prompt(), max_new_tokens=21, **PENALTIES)) == expected
    for drafter in (BLEND, TARGET):
        fast = jaxspec.generate(
            TARGET, prompt(), drafter=drafter, gamma=gamma, max_new_tokens=21, **PENALTIES
        )
        assert tokens_of(fast) == expected
    assert fast.stats.acceptance_rate.tolist() == [1.0] * 4


@pytest.mark.slow
def test_an_encoder_decoders_prompt_is_not_penalised():
    target = table_model(jax.random.key(1), VOCAB, encoder=True, sharpness=2.0)
    out = jaxspec.generate(
        target, prompt(), drafter=target, gamma=4, max_new_tokens=15, **PENALTIES
    )
    pairs = zip(PROMPTS, PENALTIES["frequency_penalty"], strict=True)
    assert tokens_of(out) == [
        penalised(target, [0], frequency, 15, row) for row, frequency in pairs
    ]


def test_a_program_without_penalties_counts_nothing():
    def program(**options):
        return str(
            jaxpr_of(
                prepare(TARGET, prompt(), drafter=DRAFT, gamma=3, max_new_tokens=16, **options)
            )
        )

    assert "scatter-add" not in program()
    counting = program(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    assert "scatter-add" in counting and not any(word in counting for word in ("exp ", "sort["))


@pytest.mark.parametrize("temperature", marked([0.0, 1.0], slow={1.0}))
def test_a_ban_of_all_that_the_target_allows_is_an_error(temperature):
    """The error names the second row only: the target allows nothing but 2 after a 1."""
    target = table_model_from(
        TARGET.params.at[:, 1].set(-jnp.inf).at[:, 1, 2].set(0.0).at[..., 1].set(-jnp.inf)
    )
    options = dict(
        drafter=DRAFT, gamma=2, max_new_tokens=12, temperature=temperature, key=jax.random.key(0)
    )
    assert jaxspec.generate(target, prompt(), banned=[3], **options).lengths.tolist() == [12] * 4
    with pytest.raises(
        FloatingPointError, match=r"for prompts \[1\], or all that they allow is banned"
    ):
        jaxspec.generate(target, prompt(), banned=[2], **options)


# --- the caches
# ------------------------------------------------------------------------------------------------------


@functools.cache
def small_network(name):
    net, config = (
        (decoder, tiny_gpt(VOCAB, layers=2)) if name == "gpt" else (t5, tiny_t5(VOCAB, layers=2))
    )
    return jaxspec.Model(net.language_model(config), net.init(config, jax.random.key(0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rounds"),
    marked(
        itertools.product(("gpt", "t5"), ("chain", "tree")),
        exhaustive={("gpt", "tree"), ("t5", "chain")},
    ),
)
def test_cache_holds_the_committed_tokens_but_the_last(name, rounds):
    """After every round, whatever it accepted, the cache is that of a fresh pass over
    committed[:-1].
    """
    model = small_network(name)
    leaves, tree = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    near = [x + 0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    near = model._replace(params=jax.tree.unflatten(tree, near))
    drafter = near if rounds == "chain" else drafters.tree(near, (2, 1, 1))
    options = dict(
        drafter=drafter, gamma=3, max_new_tokens=40, temperature=0.7, key=jax.random.key(0)
    )
    prepared = prepare(model, prompt(), **options)

    @jax.jit
    def fresh(tokens):
        """Prefill, then everything after the prompt in one pass; what lies past a row's length is
        garbage.
        """
        _, cache = model.lm.prefill(model.params, prepared.prompt, Room(80))
        return model.lm.extend(model.params, cache, tokens)[1]

    accepted = set()
    for number, (state, info) in enumerate(loop.iterate_rounds(prepared)):
        if number == 7:
            break
        accepted |= set() if info is None else set(np.asarray(info.num_accepted).tolist())
        new = token_rows.window(state.tokens, state.start, 40)
        ours, theirs = (
            c if hasattr(c, "keys") else c.decoder for c in (state.caches.target, fresh(new))
        )
        ours, theirs = jax.device_get((ours, theirs))
        assert ours.length.tolist() == (state.length - 1).tolist()
        for a, b in zip(ours.keys + ours.values, theirs.keys + theirs.values, strict=True):
            for row, held in enumerate(ours.length.tolist()):
                np.testing.assert_allclose(a[row, :, :held], b[row, :, :held], atol=1e-4)
    assert len(accepted) > 2, "the test saw too few kinds of rounds"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_drafter_equal_to_target_is_always_accepted(name):
    """Fails when the drafter's cache lacks the last accepted token: the next ones would be drawn
    after a hole.
    """
    model = small_network(name)
    out = jaxspec.generate(model, prompt(), drafter=model, gamma=3, max_new_tokens=33)
    assert out.stats.acceptance_rate.tolist() == [1.0] * 4
    assert out.stats.rounds.tolist() == [8] * 4  # 1 + 8 × 4 tokens
    key = jax.random.key(5)
    out = jaxspec.generate(
        model, prompt(), drafter=model, gamma=3, max_new_tokens=33, temperature=1.0, key=key
    )
    # float32: p and q differ in the last bits, by shape
    assert out.stats.acceptance_rate.min() > 0.98


@pytest.mark.slow
def test_draft_logits_equal_a_fresh_pass():
    """After a full acceptance the drafter is two behind; what it then drafts from equals a
    recomputation.
    """
    config = tiny_gpt(VOCAB)
    lm, params = decoder.language_model(config), decoder.init(config, jax.random.key(3))
    drafter, *_ = drafters.model(jaxspec.Model(lm, params))
    row = Prompt(jnp.array([[1, 2, 3, 4, 5, 6, 0, 0, 0, 0]]), jnp.array([6]))
    weights = Weights(None, params)
    state = drafter.init(
        DraftStart(weights, Prompt(row.tokens[:, :2], jnp.array([2])), Room(22, 20), None)
    )
    # fed up to 4, committed up to 6: two behind
    _, cache = lm.extend(params, state.cache, row.tokens[:, 2:4])
    state = state._replace(cache=cache)

    def to_distribution(logits, *prefix):
        return sampling.at_temperature()(sampling.SamplingParams(jnp.ones(1)), logits)

    context = DraftContext(
        noise.row_keys(jax.random.key(0), 1), row, jnp.array([3]), 3, False, to_distribution
    )
    draft, _ = drafter.propose(weights, Caches(None, state), context)
    row = jnp.concatenate([row.tokens[:, :6], draft.tokens], axis=1)
    full = jax.nn.log_softmax(decoder.DecoderNet(config).apply({"params": params}, row))
    np.testing.assert_allclose(draft.log_probs, full[:, 5:8], atol=1e-5)


@pytest.mark.slow
def test_draft_tokens_that_are_no_tokens_of_the_target_are_not_fed():
    """A datastore or a tokenizer with more ids: the network would answer with NaN."""

    def propose(weights, caches, context):
        tokens = jnp.broadcast_to(
            jnp.array([[1, 10**6, 2]], jnp.int32), (context.max_draft.shape[0], 3)
        )
        return Draft(tokens, jnp.full_like(context.max_draft, 3)), caches

    strange = Drafter(lambda *_: (), propose, lambda end: end.caches)
    for options in ({}, dict(temperature=1.0, key=jax.random.key(0))):
        options = dict(max_new_tokens=9) | options
        out = jaxspec.generate(
            TARGET, prompt(), drafter=strange, gamma=3, rule=rules.coupled(), **options
        )
        plain = jaxspec.generate(TARGET, prompt(), **options)
        assert out.tokens.tolist() == plain.tokens.tolist()
        assert (out.stats.drafted <= out.stats.rounds).all()


@pytest.mark.slow
def test_the_default_integers_may_have_64_bits():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        model = table_model(jax.random.key(1), 5)
        rows = jaxspec.Prompt(jnp.array([[3, 1]], jnp.int32), jnp.array([2], jnp.int32))
        out = jaxspec.generate(model, rows, drafter=model, gamma=2, max_new_tokens=6)
        assert out.stats.acceptance_rate.tolist() == [1.0]


# --- batches
# ---------------------------------------------------------------------------------------------------------


OTHERS = [
    rules.block(),
    rules.coupled(),
    rules.exact_match(),
    rules.classical_rejection(),
    rules.lenient(0.5),
    rules.typical(),
]
LATER = [  # one that reads q, one whose coin a row shares; the others with --exhaustive
    pytest.param(
        1.0,
        rule,
        marks=pytest.mark.slow if rule.name in ("block", "coupled") else pytest.mark.exhaustive,
        id=rule.name,
    )
    for rule in OTHERS
]


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "rule"), [(0.0, None), (1.0, None), *LATER])
def test_rows_do_not_depend_on_mates_padding_or_order(temperature, rule):
    options = dict(
        drafter=BLEND, gamma=3, rule=rule, max_new_tokens=12, temperature=temperature, eos_ids=[6]
    )
    keys = jax.random.split(jax.random.key(4), 4)
    together = tokens_of(jaxspec.generate(TARGET, prompt(), key=keys, **options))
    order = [2, 0, 3, 1]
    shuffled = prompt([PROMPTS[i] for i in order], width=30, fill=5)
    moved = tokens_of(jaxspec.generate(TARGET, shuffled, key=keys[jnp.array(order)], **options))
    assert [moved[order.index(i)] for i in range(4)] == together
    for i, row in enumerate(PROMPTS):
        alone = jaxspec.generate(TARGET, prompt([row]), key=keys[i : i + 1], **options)
        assert tokens_of(alone) == [together[i]]


@pytest.mark.slow
def test_more_rows_never_change_the_earlier_ones():
    options = dict(
        drafter=BLEND, gamma=3, max_new_tokens=12, temperature=1.0, key=jax.random.key(9)
    )
    few = tokens_of(jaxspec.generate(TARGET, prompt(PROMPTS[:2]), **options))
    assert tokens_of(jaxspec.generate(TARGET, prompt(), **options))[:2] == few


@pytest.mark.slow
def test_samples_are_those_of_repeated_prompts_and_share_a_prefill():
    options = dict(drafter=BLEND, gamma=3, max_new_tokens=12, key=jax.random.key(9))
    temperatures, read = [1.0, 0.5, 1.0, 0.0], []

    def prefill(params, prompt, room):
        read.append(prompt.tokens.shape[0])
        return TARGET.lm.prefill(params, prompt, room)

    shared = TARGET._replace(lm=TARGET.lm._replace(prefill=prefill))
    twice = prompt([PROMPTS[i] for i in (0, 0, 2, 2)])
    repeated = tokens_of(jaxspec.generate(TARGET, twice, temperature=temperatures, **options))
    once = prompt([PROMPTS[i] for i in (0, 2)])
    out = jaxspec.generate(shared, once, num_samples=2, temperature=temperatures, **options)
    assert tokens_of(out) == repeated and repeated[0] != repeated[1]
    assert read == [2]


@pytest.mark.slow
def test_per_row_temperatures_mix_greedy_and_sampling():
    key = jax.random.key(3)
    mixed = jaxspec.generate(
        TARGET,
        prompt(),
        drafter=BLEND,
        gamma=3,
        max_new_tokens=12,
        temperature=[0.0, 1.0, 0.0, 1.0],
        key=key,
    )
    plain = tokens_of(jaxspec.generate(TARGET, prompt(), max_new_tokens=12))
    rows = tokens_of(mixed)
    assert [rows[0], rows[2]] == [plain[0], plain[2]]
    hot = jaxspec.generate(
        TARGET, prompt(), drafter=BLEND, gamma=3, max_new_tokens=12, temperature=1.0, key=key
    )
    assert [rows[1], rows[3]] == [tokens_of(hot)[1], tokens_of(hot)[3]]


# --- statistics
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", marked([0, 1, 4], slow={1, 4}))
def test_statistics_add_up(gamma):
    limits = [1, 5, 20, 20]
    out = jaxspec.generate(
        TARGET, prompt(), drafter=BLEND, gamma=gamma, max_new_tokens=limits, eos_ids=[6], temperature=1.0,
        key=jax.random.key(0),
    )  # fmt: skip
    stats, trace = out.stats, out.trace
    assert stats.emitted.tolist() == out.lengths.tolist()
    assert (1 + trace.num_committed.sum(1)).tolist() == out.lengths.tolist()
    assert trace.draft_length.sum(1).tolist() == stats.drafted.tolist()
    committed = trace.num_committed
    # when the round began
    left = np.array(limits)[:, None] - 1 - np.cumsum(committed, axis=1) + committed
    assert (trace.draft_length == np.where(committed > 0, np.minimum(gamma, left - 1), 0)).all()
    assert (committed > 0).sum(1).tolist() == stats.rounds.tolist()  # finished rows count no rounds
    assert np.minimum(trace.num_accepted, committed).sum(1).tolist() == stats.accepted.tolist()
    assert (trace.num_tested == np.minimum(trace.num_accepted + 1, trace.draft_length)).all()
    assert np.isfinite(stats.acceptance_rate).all() and np.isfinite(stats.tokens_per_round).all()
    assert stats.tokens_per_round[0] == 0  # one token, from prefill: no round
    failed = Stats(*[np.zeros(1, np.int32)] * len(Stats._fields))  # in prefill
    assert failed.tokens_per_round[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rules.rejection(), rules.coupled()], ids=lambda rule: rule.name)
def test_a_policy_that_leaves_gamma_as_it_is_changes_nothing(rule):
    """A limit cuts the last drafts short, whoever decides on their length."""
    options = dict(
        drafter=BLEND,
        gamma=4,
        rule=rule,
        max_new_tokens=[2, 5, 9, 12],
        temperature=[0.0, 1.0, 1.0, 1.0],
    )
    options["key"] = jax.random.key(1)
    without = jaxspec.generate(TARGET, prompt(), **options)
    policy = jaxspec.generate(TARGET, prompt(), policy=policies.constant(4), **options)
    assert without.tokens.tolist() == policy.tokens.tolist()
    for ours, theirs in zip(without.stats, policy.stats, strict=True):
        assert ours.tolist() == theirs.tolist()
    assert without.trace.draft_length.tolist() == policy.trace.draft_length.tolist()
    assert (
        without.stats.emitted - 1 - without.stats.rounds
    ).tolist() == without.stats.accepted.tolist()
    assert without.stats.drafted[0] == 0  # the second token of two comes with the pass


def test_a_limit_does_not_lower_the_acceptance_rate():
    for limit in (2, 3, 4, 6):
        out = jaxspec.generate(TARGET, prompt(), drafter=TARGET, gamma=4, max_new_tokens=limit)
        assert out.stats.acceptance_rate.tolist() == [float(limit > 2)] * 4


def test_trace_replays_the_text():
    """Every round of every row: the accepted draft tokens, then the correction or the bonus."""
    out = jaxspec.generate(TARGET, prompt(), drafter=BLEND, gamma=4, max_new_tokens=20)
    for row in range(4):
        at = 1
        for draft, length, accepted, committed, tested in zip(
            *(part[row] for part in out.trace[:5]), strict=True
        ):
            new = out.tokens[row, at : at + committed]
            n = min(accepted, committed)
            assert new[:n].tolist() == draft[:n].tolist()
            if committed > accepted and accepted < length:
                # greedy: a correction differs from what it corrects
                assert new[accepted] != draft[accepted]
                assert tested == accepted + 1
            at += committed
        assert at == out.lengths[row]


@pytest.mark.slow
def test_a_generation_says_whether_its_text_has_the_targets_distribution():
    unknown = Rule(rules.rejection().verify, "of one's own", exact=False)

    def exact(gamma, rule):
        return jaxspec.generate(
            TARGET, prompt(), drafter=BLEND, gamma=gamma, rule=rule, max_new_tokens=2
        ).exact

    assert exact(1, None) and exact(1, rules.rejection()) and exact(0, rules.lenient(0.5))
    assert not exact(1, rules.lenient(0.5)) and not exact(1, unknown)


# --- programs
# --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_call_in_the_bucket_traces_and_compiles_nothing():
    target, draft = table_model(jax.random.key(11), 5), table_model(jax.random.key(12), 5)
    calls = {"traces": 0}

    def counting(function):
        def counted(*args, **kwargs):
            calls["traces"] += 1
            return function(*args, **kwargs)

        return counted

    target = target._replace(lm=target.lm._replace(extend=counting(target.lm.extend)))

    def run(rows, seed, temperature, top_p, limit, penalty=1.2, banned=(0,), bias=None):
        jaxspec.generate(
            target, prompt(rows), drafter=draft, gamma=2, temperature=temperature, top_k=3, top_p=top_p,
            min_p=penalty / 9, repetition_penalty=penalty, frequency_penalty=penalty - 1, logit_bias=bias,
            banned=banned, draft_temperature=penalty, max_new_tokens=limit, key=jax.random.key(seed),
        )  # fmt: skip

    run([[1, 2], [3]], 0, 1.0, 0.9, 10)
    programs, traces = loop.generation.num_programs(), calls["traces"]
    assert traces > 0
    run([[4, 4, 4, 1], [2, 2]], 5, 0.3, 0.5, 14, 0.8, [1, 3], {2: 0.5, 4: -1.0})
    run([[2], [1, 0, 1]], 6, [0.0, 2.0], [0.2, 1.0], [3, 16])
    assert (loop.generation.num_programs(), calls["traces"]) == (programs, traces)


def test_a_generation_is_one_program():
    """Prefill, all rounds and the statistics are in one jaxpr, with one loop over rounds."""
    jaxpr = jaxpr_of(prepare(TARGET, prompt(), drafter=DRAFT, gamma=3, max_new_tokens=16))
    inner = jaxpr.jaxpr.eqns[-1]
    assert len(jaxpr.jaxpr.eqns) == 1
    loops = [e for e in inner.params["jaxpr"].jaxpr.eqns if e.primitive.name == "while"]
    assert len(loops) == 1
    greedy = str(jaxpr)  # loops and calls included; the model itself has none of these
    assert not [
        word for word in (" exp ", " log ", "sort[", "top_k[", "random_bits") if word in greedy
    ]


# --- failures
# --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_non_finite_logits_are_one_clear_error():
    broken = table_model_from(TARGET.params.at[3].set(jnp.nan))
    with pytest.raises(FloatingPointError, match="not finite for prompts"):
        jaxspec.generate(
            broken,
            prompt(),
            drafter=DRAFT,
            gamma=2,
            max_new_tokens=20,
            temperature=1.0,
            key=jax.random.key(0),
        )
    with pytest.raises(FloatingPointError, match="not finite"):
        list(jaxspec.stream(broken, prompt([[3, 3]]), max_new_tokens=20))


@pytest.mark.slow
def test_non_finite_logits_after_a_rejected_draft_token_do_not_matter():
    """The target never generates 2 (its logit is -inf), but the drafter drafts it, and what follows
    it is NaN.
    """
    table = jnp.zeros((3, 3)).at[:, 2].set(-jnp.inf).at[2].set(jnp.nan)
    target, draft = table_model_from(table), table_model_from(jnp.zeros((3, 3)).at[:, 2].set(9.0))
    options = dict(max_new_tokens=8, temperature=1.0, key=jax.random.key(0))
    out = jaxspec.generate(target, prompt([[0]]), drafter=draft, gamma=3, **options)
    assert out.lengths.tolist() == [8] and out.tokens.max() < 2


def test_a_model_is_the_drafter_that_samples_from_it():
    drafter = drafters.model(BLEND)
    ours = jaxspec.generate(TARGET, prompt(), drafter=drafter, gamma=3, max_new_tokens=12)
    theirs = jaxspec.generate(TARGET, prompt(), drafter=BLEND, gamma=3, max_new_tokens=12)
    assert tokens_of(ours) == tokens_of(theirs)
    assert ours.stats.rounds.tolist() == theirs.stats.rounds.tolist()


def test_a_broken_drafter_does_no_harm():
    broken = table_model_from(DRAFT.params * jnp.nan)
    plain = jaxspec.generate(TARGET, prompt(), max_new_tokens=12)
    assert tokens_of(
        jaxspec.generate(TARGET, prompt(), drafter=broken, gamma=3, max_new_tokens=12)
    ) == tokens_of(plain)


def test_speculative_is_plain_at_gamma_zero():
    drafter = drafters.model(DRAFT).functions
    decoder = jaxspec.speculative(TARGET.lm, drafter, rules.rejection(), sampling.greedy(), 0)
    assert decoder is jaxspec.autoregressive(TARGET.lm, sampling.greedy())
    with pytest.raises(ValueError, match="gamma is -1"):
        jaxspec.speculative(TARGET.lm, drafter, rules.rejection(), sampling.greedy(), -1)


# --- draws of whole programs, which the certificate replaces by its own


@pytest.mark.slow
def test_optimised_programs_draw_nothing_that_is_next_to_impossible():
    script = Path(__file__).parents[1] / "scripts" / "compiled_draws.py"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("temperature", [1e-37, 1e-20, 1e-6])
def test_a_temperature_next_to_nothing_gives_greedy_text(temperature):
    model = table_model(jax.random.key(1), vocab=5)
    options = dict(temperature=temperature, key=jax.random.key(0), max_new_tokens=6)
    out = jaxspec.generate(model, [[1, 3]], **options)
    np.testing.assert_array_equal(
        out.tokens, jaxspec.generate(model, [[1, 3]], max_new_tokens=6).tokens
    )


# --- drafters of one's own that return something else


def nothing(*given):
    return None


def draft_alone(weights, caches, context):
    return Draft(jnp.zeros((1, 2), jnp.int32), jnp.full(1, 2, jnp.int32))


@pytest.mark.parametrize(
    ("propose", "commit", "message"),
    [
        (nothing, nothing, r"the drafter's propose returned NoneType: expected \(Draft, Caches\)"),
        (draft_alone, nothing, r"propose returned Draft: expected \(Draft, Caches\)"),
        (
            lambda *given: (draft_alone(*given), None),
            nothing,
            r"propose returned Draft, NoneType: expected",
        ),
        (
            lambda *given: (draft_alone(*given), given[1]),
            nothing,
            "commit returned NoneType: expected Caches",
        ),
    ],
)
def test_what_a_drafter_returns_is_named(propose, commit, message):
    with pytest.raises(TypeError, match=message):
        jaxspec.generate(
            TARGET, [[3]], drafter=Drafter(nothing, propose, commit), gamma=2, max_new_tokens=5
        )
