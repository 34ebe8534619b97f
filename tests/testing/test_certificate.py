"""The certificate's own correctness: tables behave as caches must, distributions are distributions,
wrong rules are caught. tests/testing/ has draws in loops, trees and the parts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer

from jaxspec.core import Draft, Drafter, Prompt, Room, Rule, Verdict, noise
from jaxspec.decode.request import prepare
from jaxspec.drafters import model as model_drafter
from jaxspec.rules import block, common, coupled, rejection
from jaxspec.sampling import SamplingParams, at_temperature, chain, greedy
from jaxspec.testing import (
    certify,
    certify_prepared,
    decoder_distribution,
    outcomes,
    plain_distribution,
    table_model,
    table_model_from,
    total_variation,
    with_sampler,
    word_tokenizer,
)
from tests.marks import marked

TARGET, DRAFT = table_model(jax.random.key(1), 3), table_model(jax.random.key(2), 3)
TOY = table_model_from(jnp.log(jnp.array([0.5, 0.3, 0.2])))
PLAIN = SamplingParams(jnp.ones(1))
PROMPT = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))


def stateless(propose):
    """A drafter that keeps nothing: propose(weights, context) -> Draft."""
    return Drafter(
        lambda *_: (),
        lambda weights, caches, context: (propose(weights, context), caches),
        lambda end: end.caches,
    )


def proposes(token):
    """A drafter that always proposes one token, with certainty."""

    def propose(weights, context):
        shape = context.max_draft.shape[0], context.gamma
        return Draft(
            jnp.full(shape, token, jnp.int32), jnp.full(shape[:1], context.gamma, jnp.int32)
        )

    return stateless(propose)


def rule(verify):
    return Rule(verify, "a test's", exact=True)


def nothing_accepted(position, token):
    zero = jnp.zeros_like(position)
    return Verdict(zero, token, zero)


def prepared(target=TARGET, **options):
    return prepare(
        target, PROMPT, **dict(key=jax.random.key(0), temperature=1.0, eos_ids=()) | options
    )


def plain(target, steps, **options):
    generation = prepared(target, **options)
    return plain_distribution(
        target, PROMPT, generation.sampler, generation.request.sampling_params, steps
    )


# --- table models


def jitted(model):
    lm = model.lm
    return jax.jit(lm.prefill), jax.jit(lm.extend), jax.jit(lm.rewind), model.params


@pytest.mark.parametrize(("order", "encoder"), [(0, False), (2, False), (3, False), (1, True)])
def test_extend_at_ragged_lengths_agrees_with_the_table(order, encoder):
    prefill, extend, rewind, table = jitted(
        table_model(jax.random.key(3), 3, order, encoder=encoder)
    )
    prompt = Prompt(jnp.array([[2, 1, 2, 1], [1, 2, 0, 0]]), jnp.array([4, 2]))
    forward, cache = prefill(table, prompt, Room(10))
    # to be forgotten, row by row
    _, cache = extend(table, cache, jnp.array([[1, 1, 2], [2, 2, 1]]))
    cache = rewind(cache, cache.length - jnp.array([1, 3]))
    forward, cache = extend(table, cache, jnp.array([[0, 2], [1, 0]]))
    topic = [6 % 3, 3 % 3]
    rows = [[0], [0]] if encoder else [[2, 1, 2, 1], [1, 2]]
    rows = [rows[0] + [1, 1, 0, 2], rows[1] + [1, 0]]
    for at, (row, which) in enumerate(zip(rows, topic, strict=True)):
        for back in range(2):
            context = ([0] * order + row[: len(row) - 1 + back])[::-1][:order][::-1]
            expected = np.asarray(table)[tuple([which] * encoder + context)]
            np.testing.assert_array_equal(forward.logits[at, back], expected)
    assert cache.length.tolist() == [len(row) for row in rows]


# a root with two children, a grandchild; and another tree
TREE = jnp.array([[-1, 0, 0, 2], [-1, 0, 1, 1]])
FED = jnp.array([[1, 0, 2, 1], [2, 0, 1, 0]])
TWO = Prompt(jnp.array([[1, 0, 2], [2, 0, 0]]), jnp.array([3, 1]))
# the last two tokens at each node
CONTEXTS = [[(2, 1), (1, 0), (1, 2), (2, 1)], [(2, 2), (2, 0), (0, 1), (0, 0)]]


def test_every_node_of_a_tree_sees_its_own_path():
    prefill, extend, _, table = jitted(TARGET)
    _, cache = prefill(table, TWO, Room(9))
    forward, after = extend(table, cache, FED, TREE)
    for row in range(2):
        for node, context in enumerate(CONTEXTS[row]):
            np.testing.assert_array_equal(forward.logits[row, node], table[context])
            assert forward.features[row, node].tolist() == [3 * context[0] + context[1]]
            assert forward.taps[row, node].tolist() == list(context)
    assert after.length.tolist() == [7, 5]


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_tree_may_be_fed_in_parts(first):
    prefill, extend, _, table = jitted(TARGET)
    _, cache = prefill(table, TWO, Room(9))
    at_once, _ = extend(table, cache, FED, TREE)
    first_part, cache = extend(table, cache, FED[:, :first], TREE[:, :first])
    two, cache = extend(table, cache, FED[:, first:], TREE)
    np.testing.assert_array_equal(
        jnp.concatenate([first_part.logits, two.logits], axis=1), at_once.logits
    )


def test_select_keeps_a_path():
    prefill, extend, rewind, table = jitted(TARGET)
    _, cache = prefill(table, TWO, Room(7))
    _, cache = extend(table, cache, FED, TREE)
    start = jnp.array([3, 1])
    cache = jax.jit(TARGET.lm.select)(cache, start, jnp.array([[0, 2, 3], [0, 1, 2]]))
    assert cache.tokens[0, :6].tolist() == [1, 0, 2, 1, 2, 1] and cache.tokens[1, :4].tolist() == [
        2,
        2,
        0,
        1,
    ]
    assert cache.length.tolist() == [7, 5]  # select moves, rewind forgets
    logits = extend(table, rewind(cache, start + 2), jnp.array([[0], [0]]))[0].logits
    np.testing.assert_array_equal(logits[:, 0], jnp.stack([table[2, 0], table[0, 0]]))


@pytest.mark.slow
def test_select_near_the_end_of_the_cache_moves_nothing_else():
    """A write of the whole path would not fit: it must not be shifted to the front."""
    _, cache = TARGET.lm.prefill(TARGET.params, PROMPT, Room(4))
    cache = cache._replace(tokens=jnp.array([[1, 0, 2, 1]]))
    assert TARGET.lm.select(cache, jnp.array([2]), jnp.array([[1, 1, 1]])).tokens.tolist() == [
        [1, 0, 1, 1]
    ]


@pytest.mark.slow
def test_prefill_gives_features_of_the_whole_row():
    forward, _ = TARGET.lm.prefill(TARGET.params, TWO, Room(4))
    assert forward.logits.shape == (2, 1, 3) and forward.features.shape == (2, 3, 1)
    assert forward.features[0, :, 0].tolist() == [1, 3, 2]  # the contexts 0 1, 1 0 and 0 2
    np.testing.assert_array_equal(
        forward.logits[:, 0], jnp.stack([TARGET.params[0, 2], TARGET.params[0, 2]])
    )
    encoder, _ = table_model(jax.random.key(3), 3, 1, encoder=True).lm.prefill(
        jnp.zeros((3, 3, 3)), TWO, Room(4)
    )
    # one token a row: topics 3 % 3 and 2, then the start token
    assert encoder.features.tolist() == [[[0]], [[6]]]


def test_a_row_that_outgrows_its_cache_is_not_clamped_silently():
    prefill, extend, _, table = jitted(TARGET)
    _, cache = prefill(table, PROMPT, Room(5))
    assert jnp.isfinite(extend(table, cache, jnp.array([[1, 1]]))[0].logits).all()
    assert jnp.isnan(extend(table, cache, jnp.array([[1, 1, 1]]))[0].logits).all()
    with pytest.raises(ValueError, match="capacity is 2"):
        prefill(table, PROMPT, Room(2))
    with pytest.raises(ValueError, match=r"shape \(3, 2\)"):
        table_model_from(jnp.zeros((3, 2)))


def test_models_of_one_kind_share_functions_and_so_programs():
    assert TARGET.lm == DRAFT.lm and TARGET.lm != TOY.lm


# --- distributions


def test_plain_distribution_by_hand():
    distribution = plain_distribution(TOY, PROMPT, at_temperature(), PLAIN, 2, eos=(2,))
    expected = {
        (0, 0): 0.25,
        (0, 1): 0.15,
        (0, 2): 0.1,
        (1, 0): 0.15,
        (1, 1): 0.09,
        (1, 2): 0.06,
        (2,): 0.2,
    }
    assert distribution.keys() == expected.keys() and total_variation(distribution, expected) < 1e-7
    assert plain_distribution(TOY, PROMPT, greedy(), None, 3) == {(0, 0, 0): 1.0}


@pytest.mark.parametrize("encoder", [False, True])
def test_plain_distribution_is_the_same_of_the_table_and_of_a_network(encoder):
    model = table_model(jax.random.key(4), 3, encoder=encoder)
    request = PROMPT, at_temperature(2), PLAIN._replace(top_k=jnp.array([2])), 4
    distribution = plain_distribution(model, *request, eos=(1,))
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-12)
    assert (
        total_variation(
            distribution, plain_distribution(model._replace(config=None), *request, eos=(1,))
        )
        < 1e-12
    )


def test_total_variation_is_half_the_sum_of_differences():
    assert total_variation({(0,): 0.5, (1,): 0.5}, {(0,): 0.25, (2,): 0.75}) == 0.75
    assert total_variation({}, {}) == 0


@pytest.mark.parametrize("eos", [(), (1,)])
def test_plain_decoding_is_exact(eos):
    assert certify(TARGET, prompt=PROMPT, steps=4, eos_ids=eos) < 1e-6


@pytest.mark.slow
def test_merging_and_a_limit_past_the_last_step_change_nothing():
    generation = prepared(drafter=DRAFT, gamma=1)
    merged, unmerged = (
        decoder_distribution(generation, steps=3, limit=8, merge=merge) for merge in (True, False)
    )
    assert (
        sum(unmerged.values()) == pytest.approx(1, abs=1e-7)
        and total_variation(merged, unmerged) < 1e-6
    )
    assert total_variation(merged, plain(TARGET, 3)) < 1e-6
    assert certify_prepared(generation, 3) == total_variation(
        merged, plain(TARGET, 3)
    )  # the generation's own limit and key do not matter


@pytest.mark.slow
def test_a_sampler_of_ones_own():
    def twice(sampling_params, logits, preceding):
        return 2 * logits

    twice_as_sure = chain(twice, to=at_temperature())
    half = certify(
        TARGET, drafter=DRAFT, gamma=1, steps=3, sampler=twice_as_sure, sampling_params=PLAIN
    )
    generation = with_sampler(prepared(drafter=DRAFT, gamma=1), twice_as_sure, PLAIN)
    assert half < 1e-6 and certify_prepared(generation, 2) < 1e-6
    assert (
        total_variation(
            decoder_distribution(generation, steps=2), plain(TARGET, 2, temperature=0.5)
        )
        < 1e-6
    )


P = np.array([0.5, 0.3, 0.2])  # of TOY


def two_tokens(second):
    """The distribution of a first token from P, and a second one from another distribution."""
    return {(a, b): P[a] * second[b] for a in range(3) for b in range(3)}


@pytest.mark.slow
def test_a_coin_may_decide_several_things():
    def verify(keys, position, draft, target):
        coin = noise.uniform(keys, 1)
        # 0 to 3, a quarter each
        count = jnp.sum(coin < jnp.array([[0.5, 0.25, 0.75]]), axis=1).astype(jnp.int32)
        return Verdict(count, noise.categorical(keys, target.log_probs[:, 0]), count)

    distribution = decoder_distribution(
        prepared(TOY, drafter=proposes(1), rule=rule(verify), gamma=3), steps=2
    )
    assert total_variation(distribution, two_tokens(0.25 * P + 0.75 * np.eye(3)[1])) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("opens", [0.25, 0.75], ids=["low", "high"])
def test_a_coin_may_matter_only_where_a_later_one_is_low_or_high(opens):
    """Draft token 0 is accepted if both uniforms are on their open sides: the first alone decides
    nothing.
    """

    def verify(keys, position, draft, target):
        first, second = noise.uniform(keys, 2).T
        open_side = second < opens if opens < 0.5 else second >= opens
        count = jnp.logical_and(first < 0.5, open_side).astype(jnp.int32)
        return Verdict(count, noise.categorical(keys, target.log_probs[:, 0]), count)

    distribution = decoder_distribution(
        prepared(TOY, drafter=proposes(1), rule=rule(verify), gamma=1), steps=2
    )
    assert total_variation(distribution, two_tokens(0.125 * np.eye(3)[1] + 0.875 * P)) < 1e-6


@pytest.mark.slow
def test_a_coin_may_matter_only_where_one_is_high_and_another_one_low():
    def verify(keys, position, draft, target):
        first, high, low = noise.uniform(keys, 3).T
        count = ((first < 0.5) & (high >= 0.75) & (low < 0.125)).astype(jnp.int32)
        return Verdict(count, noise.categorical(keys, target.log_probs[:, 0]), count)

    distribution = decoder_distribution(
        prepared(TOY, drafter=proposes(1), rule=rule(verify), gamma=1), steps=2
    )
    accepted = 0.5 * 0.25 * 0.125
    assert (
        total_variation(distribution, two_tokens(accepted * np.eye(3)[1] + (1 - accepted) * P))
        < 1e-6
    )


# --- what is wrong is caught


def counting(count):
    """The rejection rule, but for the number of draft tokens that it accepts."""

    def verify(keys, position, draft, target):
        verdict = rejection().verify(keys, position, draft, target)
        return verdict._replace(num_accepted=count(verdict.num_accepted, draft.length))

    return rule(verify)


def one_too_few_by_hand():
    """The total variation over two tokens, of which the second is drawn after a draft token that is
    then left out.
    """
    p, q = (np.asarray(jax.nn.softmax(model.params, axis=-1)) for model in (TARGET, DRAFT))
    first = p[0, 0]  # after the prompt, two tokens 0
    apart = 0.0
    for a in range(3):
        at_p, at_q = p[0, a], q[0, a]
        accepted = np.minimum(at_p, at_q)
        second = np.maximum(at_p - at_q, 0) + sum(accepted[x] * p[a, x] for x in range(3))
        apart += first[a] * np.abs(second - at_p).sum() / 2
    return apart


@pytest.mark.slow
def test_a_rule_that_is_off_by_one_gets_its_number():
    """A draft token that decides what another token is drawn from, and nothing else."""
    two_zeros = Prompt(jnp.array([[0, 0]]), jnp.array([2]))
    one_too_few = counting(lambda accepted, _: jnp.maximum(accepted - 1, 0))
    total = certify(TARGET, drafter=DRAFT, rule=one_too_few, gamma=1, prompt=two_zeros, steps=2)
    assert total > 1e-2 and abs(total - one_too_few_by_hand()) < 1e-6
    all_accepted = counting(lambda accepted, length: jnp.minimum(accepted + 1, length))
    assert (
        certify(TARGET, drafter=DRAFT, rule=all_accepted, gamma=1, prompt=two_zeros, steps=2) > 1e-2
    )


@pytest.mark.parametrize(
    "count", [lambda accepted, _: accepted + 1, lambda accepted, _: accepted - 1]
)
def test_a_verdict_that_is_impossible_is_named(count):
    with pytest.raises(
        ValueError, match=r"accepted more draft tokens than there were.*on a path of nonzero prob"
    ):
        certify(TOY, drafter=proposes(1), rule=counting(count), gamma=1, steps=2)


@pytest.mark.slow
def test_what_cannot_be_enumerated_says_so(monkeypatch):
    # as if no draw were found to matter
    monkeypatch.setattr(outcomes, "split", lambda runs, paths, contexts: paths)
    with pytest.raises(
        RuntimeError,
        match=r"cannot enumerate this decoder.* among a token drawn in .*Try gamma=1 and",
    ):
        certify(TARGET, drafter=DRAFT, gamma=1, steps=2)


def resamples_from_p(keys, position, draft, target):
    # its token has the same noise, and is not read
    kept = rejection().verify(keys, position, draft, target)
    return kept._replace(next_token=common.sample_residual(keys, position, target.log_probs[:, 0]))


def bonus_from_the_wrong_row(keys, position, draft, target):
    uniforms = common.uniforms(keys, position, draft)
    p, q = (jnp.exp(x) for x in (target.log_probs, draft.log_probs))
    p_x, q_x = (
        jnp.take_along_axis(x, draft.tokens[..., None], axis=-1)[..., 0] for x in (p[:, :-1], q)
    )
    count = common.count_accepted(uniforms * q_x < p_x, draft.length)
    # one too early if all were accepted
    at = jnp.minimum(count, draft.tokens.shape[1] - 1)[:, None, None]
    p, q = (jnp.take_along_axis(x, at, axis=1)[:, 0] for x in (p, q))
    q = jnp.where((count < draft.length)[:, None], q, 0.0)
    return Verdict(
        count, common.sample_residual(keys, position, jnp.log(common.residual(p, q))), count
    )


def argmax_scored_with_its_softmax():
    right = model_drafter(DRAFT)

    def propose(weights, caches, context):
        draft, caches = right.functions.propose(weights, caches, context)
        return draft._replace(tokens=jnp.argmax(draft.log_probs, axis=-1).astype(jnp.int32)), caches

    return right._replace(functions=right.functions._replace(propose=propose))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (DRAFT, rule(resamples_from_p)),
        (DRAFT, rule(bonus_from_the_wrong_row)),
    ],
    ids=["resampling from p", "bonus from the wrong row"],
)
def test_a_wrong_decoder_is_caught(drafter, rule):
    assert certify(TARGET, drafter=drafter, rule=rule, gamma=1, prompt=PROMPT, steps=3) > 1e-2


@pytest.mark.slow
def test_an_argmax_that_is_scored_with_its_softmax_is_named():
    with pytest.raises(
        ValueError, match="does not draw its tokens from the distributions that its draft declares"
    ):
        certify(TARGET, drafter=argmax_scored_with_its_softmax(), gamma=1, prompt=PROMPT, steps=3)


def by_inversion(uniforms_of):
    """The rejection rule, its token drawn by inverting the distribution function at a uniform
    number.

    uniforms_of: keys, position -> the number for the draft token, and the one for the token.
    """

    def verify(keys, position, draft, target):
        keeps, picks = uniforms_of(keys, position)
        p, q, x = jnp.exp(target.log_probs), jnp.exp(draft.log_probs[:, 0]), draft.tokens[:, :1]
        p_x, q_x = (jnp.take_along_axis(probs, x, axis=1)[:, 0] for probs in (p[:, 0], q))
        kept = keeps * q_x < p_x
        left = jnp.where(kept[:, None], p[:, 1], common.residual(p[:, 0], q))
        below = jnp.cumsum(left, axis=1) <= (picks * jnp.sum(left, axis=1))[:, None]
        count = kept.astype(jnp.int32)
        return Verdict(count, jnp.minimum(jnp.sum(below, axis=1), 2).astype(jnp.int32), count)

    return rule(verify)


def coin(keys, position, index):
    return noise.uniform(noise.at(keys, position, noise.Purpose.ACCEPT), 2)[:, index]


def one_number(keys, position):
    return [coin(keys, position, 0)] * 2


def one_number_asked_for_twice(keys, position):
    return coin(keys, position, 0), noise.uniform(
        noise.at(keys, position, noise.Purpose.ACCEPT), 1
    )[:, 0]


def the_same_numbers_in_every_round(keys, position):
    return coin(keys, 0 * position, 0), coin(keys, 0 * position + 1, 1)


def two_numbers(keys, position):
    return coin(keys, position, 0), coin(keys, position + 1000, 1)


ONE_TOKEN = dict(drafter=DRAFT, gamma=1, prompt=PROMPT, steps=3)


@pytest.mark.slow
def test_one_uniform_number_for_the_draft_token_and_the_token_is_caught():
    assert certify(TARGET, rule=by_inversion(two_numbers), **ONE_TOKEN) < 1e-6
    assert certify(TARGET, rule=by_inversion(one_number), **ONE_TOKEN) > 1e-2


# --- draws that share their noise are refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uniforms_of", "when"),
    [
        (one_number_asked_for_twice, "of the same round"),
        (the_same_numbers_in_every_round, "of an earlier round"),
    ],
)
def test_a_coin_that_is_drawn_twice_is_refused(uniforms_of, when):
    complaint = (
        rf"share their noise, a uniform drawn in test_certificate.py:.* and, {when}, "
        r"a uniform drawn in .*noise\.at\("
    )
    with pytest.raises(ValueError, match=complaint):
        certify(TARGET, rule=by_inversion(uniforms_of), **ONE_TOKEN)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [block(), rejection()], ids=["block", "rejection"])
def test_draft_tokens_keyed_by_their_own_positions(rule):
    """A position after a rejection is drafted again, with noise that the verdict of `block` has
    looked at: refused.

    The rejection rule has not looked at it, and stays exact.
    """

    def propose(weights, context):
        length, gamma = context.row.length, context.gamma
        distribution = jnp.log(jnp.broadcast_to(jnp.array([0.2, 0.2, 0.6]), (length.shape[0], 3)))
        at = (noise.at(context.keys, length + i, noise.Purpose.DRAFT) for i in range(gamma))
        tokens = jnp.stack([noise.categorical(keys_of, distribution) for keys_of in at], axis=1)
        return Draft(
            tokens,
            jnp.full_like(length, gamma),
            log_probs=jnp.stack([distribution] * gamma, axis=1),
        )

    options = dict(drafter=stateless(propose), rule=rule, gamma=2, steps=3)
    if rule.name == "rejection":
        assert certify(TOY, **options) < 1e-6
        return
    with pytest.raises(
        ValueError, match=r"a token drawn in .* \(propose\).* of an earlier round, a token"
    ):
        certify(TOY, **options)


@pytest.mark.slow
def test_a_token_that_is_drawn_twice_is_refused():
    """Unless one of them is not read, as in `resamples_from_p`."""

    def verify(keys, position, draft, target):
        verdict = rejection().verify(keys, position, draft, target)
        again = common.sample_residual(keys, position, target.log_probs[:, 0])
        return verdict._replace(next_token=jnp.where(again == 0, again, verdict.next_token))

    complaint = r"(for test_certificate.py:\d+ \(verify\)|\(residual_token\)) and, of the same round, a token drawn in"
    with pytest.raises(ValueError, match=complaint):
        certify(TARGET, rule=rule(verify), **ONE_TOKEN)


def test_a_key_that_all_rows_share_is_refused():
    def verify(keys, position, draft, target):
        same = noise.row_keys(jax.random.key(5), 1)[jnp.zeros(position.shape, jnp.int32)]
        return nothing_accepted(position, noise.categorical(same, target.log_probs[:, 0]))

    with pytest.raises(ValueError, match=r"\(verify\).* has the same key in every row"):
        certify(TOY, drafter=proposes(1), rule=rule(verify), gamma=1, steps=2)


COUPLED = dict(drafter=model_drafter(DRAFT, coupled=True), gamma=2, prompt=PROMPT, steps=3)


@pytest.mark.slow
def test_noise_is_shared_if_not_looked_at_or_if_text_is_plain_samplings():
    """Once a draft is rejected, `block` has looked at all its tokens, the rejection rule at none
    that it drafts again.

    With `coupled` every token is plain sampling's: tests/rules/test_coupled.py.
    """
    assert certify(TARGET, rule=rejection(), **COUPLED) < 1e-6
    with pytest.raises(ValueError, match="of an earlier round"):
        certify(TARGET, rule=block(), **COUPLED)


@pytest.mark.slow
def test_a_coupled_rule_with_tokens_of_another_distribution_is_caught():
    def colder(keys, position, draft, target):
        return coupled().verify(
            keys, position, draft, target._replace(log_probs=2 * target.log_probs)
        )

    assert certify(TARGET, rule=rule(colder), **COUPLED) > 1e-2


# --- what cannot be enumerated is refused


def test_noise_from_elsewhere_is_refused():
    def verify(keys, position, draft, target):
        return nothing_accepted(
            position, jax.vmap(lambda k: jax.random.randint(k, (), 0, 3, jnp.int32))(keys)
        )

    with pytest.raises(ValueError, match="depends on its keys"):
        certify(TOY, drafter=proposes(1), rule=rule(verify), gamma=1, steps=2)


@pytest.mark.slow
def test_noise_from_elsewhere_on_the_last_of_many_paths_is_refused(monkeypatch):
    """Behind token 2 only: with few paths to a run, they are in the last one."""

    def propose(weights, context):
        last = jnp.take_along_axis(context.row.tokens, context.row.length[:, None] - 1, axis=1)
        return Draft(last, jnp.ones_like(context.row.length))

    def verify(keys, position, draft, target):
        token = common.sample_residual(keys, position, target.log_probs[:, 0])
        elsewhere = jax.vmap(lambda key: jax.random.randint(key, (), 0, 3, jnp.int32))(keys)
        return nothing_accepted(position, jnp.where(draft.tokens[:, 0] == 2, elsewhere, token))

    monkeypatch.setattr(outcomes, "MEMORY", 1 << 14)
    with pytest.raises(ValueError, match="depends on its keys"):
        certify(TOY, drafter=stateless(propose), rule=rule(verify), gamma=1, steps=2)


def from_gumbel(pick):
    """A rule that accepts nothing, and takes its token from noise that it has asked for: pick(keys,
    distribution, noise).
    """

    def verify(keys, position, draft, target):
        at, distribution = noise.at(keys, position, noise.Purpose.RESIDUAL), target.log_probs[:, 0]
        return nothing_accepted(
            position, pick(at, distribution, noise.gumbel(at, distribution.shape[1]))
        )

    return rule(verify)


def own_argmax(keys, distribution, gumbel):
    return noise.first_largest(distribution + gumbel)


def noise_turned_round(keys, distribution, gumbel):
    return noise.categorical(keys, distribution, drawn=-gumbel)


@pytest.mark.parametrize(
    "pick", marked([own_argmax, noise_turned_round], slow={noise_turned_round})
)
def test_an_argmax_over_noise_is_refused(pick):
    with pytest.raises(
        ValueError, match=r"an argmax of its own over noise.gumbel.*: its distribution cannot be"
    ):
        certify(TOY, drafter=proposes(1), rule=from_gumbel(pick), gamma=1, steps=2)


@pytest.mark.slow
def test_noise_may_be_kept_for_a_draw():
    rule = from_gumbel(
        lambda keys, distribution, gumbel: noise.categorical(keys, distribution, drawn=gumbel)
    )
    assert certify(TOY, drafter=proposes(1), rule=rule, gamma=1, steps=3) < 1e-6


def test_a_state_that_rows_share_is_refused():
    counting = proposes(1)._replace(init=lambda *_: jnp.zeros((), jnp.int32))
    with pytest.raises(ValueError, match="has the batch"):
        certify(TOY, drafter=counting, gamma=1, steps=2)


def test_more_than_one_prompt_is_refused():
    two = Prompt(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32))
    with pytest.raises(
        ValueError, match="2 rows: expected the one whose distribution is asked for"
    ):
        certify(TOY, prompt=two)


@pytest.mark.slow
def test_logits_that_are_not_finite_are_an_error():
    broken = table_model_from(TARGET.params.at[0, 1].set(jnp.nan))
    with pytest.raises(FloatingPointError):
        certify(broken, steps=3)


def test_a_drafters_nan_that_matters_is_an_error():
    def verify(keys, position, draft, target):
        broken = jnp.where(draft.tokens[:, :1] == 1, jnp.nan, target.log_probs[:, 0])
        return nothing_accepted(
            position, noise.categorical(noise.at(keys, position, noise.Purpose.RESIDUAL), broken)
        )

    with pytest.raises(FloatingPointError, match="NaN in it"):
        certify(TOY, drafter=proposes(1), rule=rule(verify), gamma=1, steps=2)


@pytest.mark.slow
def test_a_round_that_commits_nothing_is_an_error():
    generation = prepared(TOY)
    decoder = generation.decoder

    def step(weights, state):
        return state, decoder.step(weights, state)[1]

    with pytest.raises(RuntimeError, match="2 rounds"):
        decoder_distribution(generation._replace(decoder=decoder._replace(step=step)), steps=2)


# --- words


def test_a_word_tokenizer_survives_being_saved(tmp_path):
    words = ["<pad>", "</s>", "<unk>", "der", "Hund"]
    word_tokenizer(words, pad_token="<pad>").save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("der Hund, der")["input_ids"] == [3, 2, 3]
    assert (again.eos_token_id, again.pad_token_id, len(again)) == (1, 0, 5)
    assert again.convert_ids_to_tokens(range(5)) == words


def test_words_that_make_no_tokenizer():
    with pytest.raises(ValueError, match="1 of 4 words are there twice"):
        word_tokenizer(["<unk>", "</s>", "a", "a"])
    with pytest.raises(
        ValueError, match=r"the words lack <unk>: expected the end token and the unknown one"
    ):
        word_tokenizer(["</s>", "a"])


@pytest.mark.parametrize("gamma", [1, 2])
def test_a_rule_with_a_key_of_its_own_is_named(gamma):
    def verify(keys, length, draft, target):
        own = noise.row_keys(jax.random.key(7), length.shape[0])
        return rejection().verify(own, length, draft, target)

    target, draft = (table_model(jax.random.key(seed), vocab=3) for seed in (1, 2))
    with pytest.raises(
        ValueError, match=r"makes keys of its own.* by noise\.at|same key in every row"
    ):
        certify(target, drafter=draft, rule=Rule(verify, "mine", exact=True), gamma=gamma, steps=2)
