"""The certificate's own correctness: tables behave as caches must, laws are laws, wrong rules are caught."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer

from jaxspec import noise
from jaxspec.accept import block, common, coupled, rejection
from jaxspec.base import Draft, Drafter, Prompt, Tree, Verdict, Weights
from jaxspec.decode import autoregressive, speculative
from jaxspec.drafters import model as model_drafter
from jaxspec.testing import (
    certify,
    decoder_law,
    outcomes,
    plain_law,
    table_model,
    table_model_from,
    total_variation,
    word_tokenizer,
)
from jaxspec.warp import Controls, greedy, sampling

TARGET, DRAFT = table_model(jax.random.key(1), 3), table_model(jax.random.key(2), 3)
TOY = table_model_from(jnp.log(jnp.array([0.5, 0.3, 0.2])))
PLAIN = Controls(jnp.ones(1), jnp.array([3]), jnp.ones(1))
PROMPT = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))


def proposes(token):
    """A drafter that always guesses one token, with certainty."""

    def propose(keys, params, state, context, gamma, to_law, budget=None):
        guesses = jnp.full((context.length.shape[0], gamma), token, jnp.int32)
        return Draft(guesses, None, jnp.full_like(context.length, gamma)), state

    return Drafter(lambda *_: (), propose, lambda params, state, *_: state)


# --- table models


def jitted(model):
    prefill, extend, rewind, *_ = model.lm
    return jax.jit(prefill, static_argnums=2), jax.jit(extend), jax.jit(rewind), model.params


@pytest.mark.parametrize(("order", "encoder"), [(0, False), (2, False), (3, False), (1, True)])
def test_extend_at_ragged_lengths_agrees_with_the_table(order, encoder):
    prefill, extend, rewind, table = jitted(table_model(jax.random.key(3), 3, order, encoder=encoder))
    prompt = Prompt(jnp.array([[2, 1, 2, 1], [1, 2, 0, 0]]), jnp.array([4, 2]))
    forward, cache = prefill(table, prompt, 10)
    _, cache = extend(table, cache, jnp.array([[1, 1, 2], [2, 2, 1]]))  # to be forgotten, row by row
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


def test_tree_nodes_see_their_own_path_and_rewind_keeps_it():
    prefill, extend, rewind, table = jitted(TARGET)
    _, cache = prefill(table, PROMPT, 9)  # 1 0 2; then a root 1 with the children 0 and 2, and 1 below the 2
    ancestors = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]) > 0
    tree = Tree(jnp.array([0, 1, 1, 2]), ancestors)
    forward, cache = extend(table, cache, jnp.array([[1, 0, 2, 1]]), tree)
    for node, context in enumerate([(2, 1), (1, 0), (1, 2), (2, 1)]):
        np.testing.assert_array_equal(forward.logits[0, node], table[context])
    cache = rewind(cache, jnp.array([6]), jnp.array([[3, 5, 6]]))
    assert cache.tokens[0, :6].tolist() == [1, 0, 2, 1, 2, 1]
    np.testing.assert_array_equal(extend(table, cache, jnp.array([[0]]))[0].logits[0, 0], table[1, 0])


def test_a_row_that_outgrows_its_cache_is_not_clamped_silently():
    prefill, extend, _, table = jitted(TARGET)
    _, cache = prefill(table, PROMPT, 5)
    assert jnp.isfinite(extend(table, cache, jnp.array([[1, 1]]))[0].logits).all()
    assert jnp.isnan(extend(table, cache, jnp.array([[1, 1, 1]]))[0].logits).all()
    with pytest.raises(ValueError, match="capacity is 2"):
        prefill(table, PROMPT, 2)
    with pytest.raises(ValueError, match=r"shape \(3, 2\)"):
        table_model_from(jnp.zeros((3, 2)))


def test_models_of_one_kind_share_their_functions_so_that_programs_are_shared():
    assert TARGET.lm == DRAFT.lm and TARGET.lm != TOY.lm


# --- laws


def test_plain_law_by_hand():
    law = plain_law(TOY, PROMPT, sampling(), PLAIN, 2, eos=(2,))
    expected = {(0, 0): 0.25, (0, 1): 0.15, (0, 2): 0.1, (1, 0): 0.15, (1, 1): 0.09, (1, 2): 0.06, (2,): 0.2}
    assert law.keys() == expected.keys() and total_variation(law, expected) < 1e-7
    assert plain_law(TOY, PROMPT, greedy(), None, 3) == {(0, 0, 0): 1.0}


@pytest.mark.parametrize("encoder", [False, True])
def test_plain_law_is_a_law_and_the_same_when_the_table_is_read_as_a_network(encoder):
    model = table_model(jax.random.key(4), 3, encoder=encoder)
    request = PROMPT, sampling(2), PLAIN._replace(top_k=jnp.array([2])), 4
    law = plain_law(model, *request, eos=(1,))
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert total_variation(law, plain_law(model._replace(config=None), *request, eos=(1,))) < 1e-12


def test_total_variation():
    assert total_variation({(0,): 0.5, (1,): 0.5}, {(0,): 0.25, (2,): 0.75}) == 0.75
    assert total_variation({}, {}) == 0


@pytest.mark.parametrize("eos", [(), (1,)])
def test_plain_decoding_is_exact(eos):
    assert certify(TARGET, prompt=PROMPT, steps=4, eos=eos) < 1e-6


def test_merging_and_a_limit_past_the_last_step_change_nothing():
    decoder = speculative(TARGET.lm, model_drafter(DRAFT.lm), rejection(), sampling(), 1)
    request = Weights(TARGET.params, DRAFT.params), PROMPT, PLAIN
    merged, whole = (decoder_law(decoder, *request, steps=3, limit=8, merge=merge) for merge in (True, False))
    assert sum(whole.values()) == pytest.approx(1, abs=1e-9) and total_variation(merged, whole) < 1e-7
    assert total_variation(merged, plain_law(TARGET, PROMPT, sampling(), PLAIN, 3)) < 1e-6


def test_a_coin_may_decide_several_things():
    def rule(keys, position, draft, target):
        coin = noise.uniform(keys, 1)
        count = jnp.sum(coin < jnp.array([[0.5, 0.25, 0.75]]), axis=1).astype(jnp.int32)  # 0 to 3, a quarter each
        return Verdict(count, noise.categorical(keys, target.log_probs[:, 0]))

    decoder = speculative(TOY.lm, proposes(1), rule, sampling(), 3)
    law = decoder_law(decoder, Weights(TOY.params), PROMPT, PLAIN, steps=2)
    p = np.array([0.5, 0.3, 0.2])
    second = 0.25 * p + 0.75 * np.eye(3)[1]
    assert total_variation(law, {(a, b): p[a] * second[b] for a in range(3) for b in range(3)}) < 1e-6


@pytest.mark.parametrize("opens", [0.25, 0.75], ids=["low", "high"])
def test_a_coin_may_matter_only_where_a_later_one_is_low_or_high(opens):
    """Guess 0 is kept if both coins are on their open sides: the first coin alone decides nothing."""

    def rule(keys, position, draft, target):
        first, second = noise.uniform(keys, 2).T
        open_side = second < opens if opens < 0.5 else second >= opens
        count = jnp.logical_and(first < 0.5, open_side).astype(jnp.int32)
        return Verdict(count, noise.categorical(keys, target.log_probs[:, 0]))

    decoder = speculative(TOY.lm, proposes(1), rule, sampling(), 1)
    law = decoder_law(decoder, Weights(TOY.params), PROMPT, PLAIN, steps=2)
    p = np.array([0.5, 0.3, 0.2])
    second = 0.125 * np.eye(3)[1] + 0.875 * p
    assert total_variation(law, {(a, b): p[a] * second[b] for a in range(3) for b in range(3)}) < 1e-6


# --- what is wrong is caught


def resamples_from_p(keys, position, draft, target):
    kept = rejection()(keys, position, draft, target).num_accepted  # its token has the same noise, and is not read
    return Verdict(kept, common.draw(keys, position, target.log_probs[:, 0]))


def bonus_from_the_wrong_row(keys, position, draft, target):
    coins = common.coins(keys, position, draft)
    p, q = (jnp.exp(x) for x in (target.log_probs, draft.log_probs))
    p_x, q_x = (jnp.take_along_axis(x, draft.tokens[..., None], axis=-1)[..., 0] for x in (p[:, :-1], q))
    count = common.count_accepted(coins * q_x < p_x, draft.length)
    at = jnp.minimum(count, draft.tokens.shape[1] - 1)[:, None, None]  # one too early if all were accepted
    p, q = (jnp.take_along_axis(x, at, axis=1)[:, 0] for x in (p, q))
    q = jnp.where((count < draft.length)[:, None], q, 0.0)
    return Verdict(count, common.draw(keys, position, jnp.log(common.residual(p, q))))


def argmax_scored_with_its_softmax():
    right = model_drafter(DRAFT.lm)

    def propose(keys, params, state, context, gamma, to_law, budget=None):
        draft, state = right.propose(keys, params, state, context, gamma, to_law)
        return draft._replace(tokens=jnp.argmax(draft.log_probs, axis=-1).astype(jnp.int32)), state

    return right._replace(propose=propose)


@pytest.mark.parametrize(
    ("drafter", "accept"),
    [
        (DRAFT, resamples_from_p),
        (DRAFT, bonus_from_the_wrong_row),
        (argmax_scored_with_its_softmax(), rejection()),
    ],
    ids=["resampling from p", "bonus from the wrong row", "argmax scored with its softmax"],
)
def test_a_wrong_decoder_is_caught(drafter, accept):
    options = dict(draft_params=DRAFT.params, gamma=1, prompt=PROMPT, steps=3)
    assert certify(TARGET, drafter=drafter, accept=accept, **options) > 1e-2


def by_inversion(coins_of):
    """The rejection rule, its token drawn by inverting the distribution function at a uniform number.

    coins_of: keys, position -> the number for the guess, and the one for the token.
    """

    def rule(keys, position, draft, target):
        keeps, picks = coins_of(keys, position)
        p, q = jnp.exp(target.log_probs), jnp.exp(draft.log_probs[:, 0])
        guess = draft.tokens[:, :1]
        kept = keeps * jnp.take_along_axis(q, guess, axis=1)[:, 0] < jnp.take_along_axis(p[:, 0], guess, axis=1)[:, 0]
        left = jnp.where(kept[:, None], p[:, 1], common.residual(p[:, 0], q))
        below = jnp.cumsum(left, axis=1) <= (picks * jnp.sum(left, axis=1))[:, None]
        return Verdict(kept.astype(jnp.int32), jnp.minimum(jnp.sum(below, axis=1), 2).astype(jnp.int32))

    return rule


def coin(keys, position, index):
    return noise.uniform(noise.at(keys, position, noise.Purpose.COIN), 2)[:, index]


def one_number(keys, position):
    return [coin(keys, position, 0)] * 2


def one_number_asked_for_twice(keys, position):
    return coin(keys, position, 0), noise.uniform(noise.at(keys, position, noise.Purpose.COIN), 1)[:, 0]


def the_same_numbers_in_every_round(keys, position):
    return coin(keys, 0 * position, 0), coin(keys, 0 * position + 1, 1)


def two_numbers(keys, position):
    return coin(keys, position, 0), coin(keys, position + 1000, 1)


ONE_GUESS = dict(drafter=DRAFT, gamma=1, prompt=PROMPT, steps=3)


def test_one_uniform_number_for_the_guess_and_the_token_is_caught():
    assert certify(TARGET, accept=by_inversion(two_numbers), **ONE_GUESS) < 1e-6
    assert certify(TARGET, accept=by_inversion(one_number), **ONE_GUESS) > 1e-2


# --- draws that share their noise are refused


@pytest.mark.parametrize(
    ("coins_of", "when"),
    [(one_number_asked_for_twice, "of the same round"), (the_same_numbers_in_every_round, "of an earlier round")],
)
def test_a_coin_that_is_drawn_twice_is_refused(coins_of, when):
    found = rf"share their noise, a coin drawn in test_testing.py:.* and, {when}, a coin drawn in .*noise\.at\("
    with pytest.raises(ValueError, match=found):
        certify(TARGET, accept=by_inversion(coins_of), **ONE_GUESS)


def test_guesses_keyed_by_their_own_positions_are_refused():
    """A position behind a rejection is guessed again, with the noise that the verdict of `block` has looked at."""

    def propose(keys, params, state, context, gamma, to_law, budget=None):
        law = jnp.log(jnp.broadcast_to(jnp.array([0.2, 0.2, 0.6]), (context.length.shape[0], 3)))
        at = (noise.at(keys, context.length + i, noise.Purpose.DRAFT) for i in range(gamma))
        tokens = jnp.stack([noise.categorical(each, law) for each in at], axis=1)
        return Draft(tokens, jnp.stack([law] * gamma, axis=1), jnp.full_like(context.length, gamma)), state

    drafter = Drafter(lambda *_: (), propose, lambda params, state, *_: state)
    with pytest.raises(ValueError, match=r"a token drawn in .* \(propose\).* of an earlier round, a token"):
        certify(TOY, drafter=drafter, accept=block(), gamma=2, steps=3)


def test_a_token_that_is_drawn_twice_is_refused():
    """Unless one of them is not read, as in `resamples_from_p`."""

    def rule(keys, position, draft, target):
        verdict = rejection()(keys, position, draft, target)
        again = common.draw(keys, position, target.log_probs[:, 0])
        return verdict._replace(next_token=jnp.where(again == 0, again, verdict.next_token))

    with pytest.raises(ValueError, match=r"for test_testing.py:\d+ \(rule\) and, of the same round, a token drawn in"):
        certify(TARGET, accept=rule, **ONE_GUESS)


def test_a_key_that_all_rows_share_is_refused():
    def rule(keys, position, draft, target):
        same = noise.row_keys(jax.random.key(5), 1)[jnp.zeros(position.shape, jnp.int32)]
        return Verdict(jnp.zeros_like(position), noise.categorical(same, target.log_probs[:, 0]))

    with pytest.raises(ValueError, match=r"\(rule\).* has the same key in every row"):
        certify(TOY, drafter=proposes(1), accept=rule, gamma=1, steps=2)


COUPLED = dict(drafter=model_drafter(DRAFT.lm, True), draft_params=DRAFT.params, gamma=2, prompt=PROMPT, steps=3)


def test_noise_is_shared_only_where_every_token_is_plain_samplings():
    """With `coupled` it is: tests/accept/test_coupled.py."""
    with pytest.raises(ValueError, match="of an earlier round"):
        certify(TARGET, accept=rejection(), **COUPLED)


def test_a_coupled_rule_that_takes_its_tokens_from_another_law_is_caught():
    def colder(keys, position, draft, target):
        return coupled()(keys, position, draft, target._replace(log_probs=2 * target.log_probs))

    assert certify(TARGET, accept=colder, **COUPLED) > 1e-2


# --- what cannot be enumerated is refused


def test_noise_from_elsewhere_is_refused():
    def rule(keys, position, draft, target):
        return Verdict(jnp.zeros_like(position), jax.vmap(lambda k: jax.random.randint(k, (), 0, 3))(keys))

    with pytest.raises(ValueError, match="depends on its keys"):
        certify(TOY, drafter=proposes(1), accept=rule, gamma=1, steps=2)


def test_noise_from_elsewhere_on_the_last_of_many_paths_is_refused(monkeypatch):
    """Behind token 2 only: with few paths to a run, they are in the last one."""

    def propose(keys, params, state, context, gamma, to_law, budget=None):
        last = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        return Draft(last, None, jnp.ones_like(context.length)), state

    def rule(keys, position, draft, target):
        token = common.draw(keys, position, target.log_probs[:, 0])
        elsewhere = jax.vmap(lambda key: jax.random.randint(key, (), 0, 3, jnp.int32))(keys)
        return Verdict(jnp.zeros_like(position), jnp.where(draft.tokens[:, 0] == 2, elsewhere, token))

    monkeypatch.setattr(outcomes, "MEMORY", 1 << 14)
    with pytest.raises(ValueError, match="depends on its keys"):
        drafter = Drafter(lambda *_: (), propose, lambda params, state, *_: state)
        certify(TOY, drafter=drafter, accept=rule, gamma=1, steps=2)


def from_gumbel(pick):
    """A rule that keeps nothing, and takes its token from noise that it has asked for: pick(keys, law, noise)."""

    def rule(keys, position, draft, target):
        at, law = noise.at(keys, position, noise.Purpose.RESIDUAL), target.log_probs[:, 0]
        return Verdict(jnp.zeros_like(position), pick(at, law, noise.gumbel(at, law.shape[1])))

    return rule


def own_argmax(keys, law, gumbel):
    return noise.first_largest(law + gumbel)


def noise_turned_round(keys, law, gumbel):
    return noise.categorical(keys, law, drawn=-gumbel)


@pytest.mark.parametrize("pick", [own_argmax, noise_turned_round])
def test_an_argmax_over_noise_is_refused(pick):
    with pytest.raises(ValueError, match=r"an argmax of its own over noise.gumbel.*: its law cannot be enumerated"):
        certify(TOY, drafter=proposes(1), accept=from_gumbel(pick), gamma=1, steps=2)


def test_noise_may_be_kept_for_a_draw():
    rule = from_gumbel(lambda keys, law, gumbel: noise.categorical(keys, law, drawn=gumbel))
    assert certify(TOY, drafter=proposes(1), accept=rule, gamma=1, steps=3) < 1e-6


def test_a_state_that_rows_share_is_refused():
    def propose(keys, params, state, context, gamma, to_law, budget=None):
        return Draft(jnp.ones((context.length.shape[0], gamma), jnp.int32), None, context.length), state + 1

    counting = Drafter(lambda *_: jnp.zeros((), jnp.int32), propose, lambda params, state, *_: state)
    with pytest.raises(ValueError, match="has the batch"):
        certify(TOY, drafter=counting, gamma=1, steps=2)


def test_more_than_one_prompt_is_refused():
    two = Prompt(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match="2 rows"):
        certify(TOY, prompt=two)


def test_logits_that_are_not_finite_are_an_error():
    broken = table_model_from(TARGET.params.at[0, 1].set(jnp.nan))
    with pytest.raises(FloatingPointError):
        certify(broken, steps=3)


def test_a_round_that_commits_nothing_is_an_error():
    decoder = autoregressive(TOY.lm, sampling())

    def step(keys, weights, state):
        return state, decoder.step(keys, weights, state)[1]

    with pytest.raises(RuntimeError, match="2 rounds"):
        decoder_law(decoder._replace(step=step), Weights(TOY.params), PROMPT, PLAIN, steps=2)


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
    with pytest.raises(ValueError, match=r"the words lack <unk>: expected the end token and the unknown one"):
        word_tokenizer(["</s>", "a"])
