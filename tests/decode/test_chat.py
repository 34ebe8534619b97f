"""A chat: each turn has the text of the whole conversation, whatever was read before."""

import dataclasses
import gc

import jax
import numpy as np
import pytest

import jaxspec
from benchmarks.oracle import oracle
from jaxspec import nets
from jaxspec.core import token_rows
from jaxspec.decode.chat import ANSWER, _taking_back
from jaxspec.decode.generate import pieces as stream_of
from jaxspec.decode.request import prepare
from jaxspec.nets import decoder
from jaxspec.testing import word_tokenizer
from tests.draft_heads.test_drafters import LLAMA, drafter_of, target_of
from tests.small import random_params

WORDS = ["<unk>", "</s>", "one", "two", "three", "<think>", "user", "assistant", "system", "four"]
PLAIN = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}assistant"
# Of answers before the last message only what follows the last thought stays, as the templates of
# Qwen have it.
FORGETS = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] if loop.index0 >= messages|length - 2 "
    "else m['content'].split('<think>')[-1] }} </s> {% endfor %}assistant"
)
# Networks, in which everything depends on all that was read before.
TARGET, DRAFT = (
    jaxspec.Model(decoder.language_model(config), random_params(decoder.init, config, layers, 0.6))
    for layers in (2, 1)
    for config in [nets.replace(LLAMA, vocab_size=len(WORDS), layers=layers)]
)
MESSAGES = ["one two", "three one two four one", "two three two", "four four"]


def with_template(model, template=PLAIN):
    return model._replace(tokenizer=word_tokenizer(WORDS, chat_template=template))


def talk_through(target, drafter, contents=MESSAGES, capacity=64, system="four", **options):
    """Compares every turn of a chat with the text of its whole conversation; returns the chat and
    what it reused.

    The whole conversation is read into buffers of the chat's size: the rounds of both are one
    program.
    """
    options = dict(gamma=3, max_new_tokens=12, eos_ids=["</s>"], temperature=1.0) | options
    key, reused = jax.random.key(4), []
    talk = jaxspec.chat(target, drafter=drafter, system=system, key=key, **options)
    talk._capacity = capacity
    for turn, content in enumerate(contents):
        conversation = [*talk.messages, {"role": "user", "content": content}]
        ids = target.tokenizer.apply_chat_template(conversation, add_generation_prompt=True)[
            "input_ids"
        ]
        pieces = list(talk.send(content))
        turn_key = jax.random.fold_in(key, turn)
        prepared = prepare(target, [ids], drafter=drafter, key=turn_key, **options)
        headroom = token_rows.headroom(prepared.max_new_tokens, prepared.decoder.nodes)
        prompt = token_rows.pad([ids], talk._capacity - headroom)
        same_decoder = _taking_back(prepared.decoder, prepared.max_new_tokens)
        whole = list(stream_of(prepared._replace(decoder=same_decoder, prompt=prompt)))
        assert [piece.tokens for piece in pieces] == [piece.tokens for piece in whole]
        answer = {"role": "assistant", "content": "".join(piece.text for piece in pieces)}
        assert talk.messages == [*conversation, answer] and talk.prompt_tokens == len(ids)
        reused.append(talk.reused_tokens)
    return talk, reused


def test_every_turn_has_the_text_of_the_whole_conversation():
    """With a drafting model, whose cache a turn's last round leaves behind; buffers grow on the
    way.
    """
    talk, reused = talk_through(with_template(TARGET), DRAFT)
    assert reused[0] == 0 and reused == sorted(reused) and reused[-1] > 20 and talk._capacity > 64
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "four"}]
    list(talk.send("one"))
    assert talk.reused_tokens == 0


def test_caches_are_there_once():
    """A turn takes those of the last one, and nothing keeps these; buffers grow as buckets do."""
    gc.collect()  # chats of other tests
    talk, before, caches = (
        jaxspec.chat(with_template(TARGET), drafter=DRAFT, max_new_tokens=4),
        0,
        [],
    )
    for words in (4, 8, 500, 3, 300):
        list(talk.send("one " * words))
        assert all(leaf.is_deleted() for leaf in caches) or talk._capacity > before
        before, caches = (
            talk._capacity,
            [x for x in jax.tree.leaves(talk._state.caches) if x.ndim == 4],
        )
        alive = [
            x.shape[2]
            for x in jax.live_arrays()
            if x.ndim == 4 and x.shape[2] > 500 and not x.is_deleted()
        ]
        assert {*alive} == {before} and caches
    assert talk._capacity == 1024


def test_what_a_template_changes_is_read_again():
    """Thoughts are dropped from answers when the next turn begins."""
    _, reused = talk_through(with_template(TARGET, FORGETS), DRAFT)
    _, kept = talk_through(with_template(TARGET), DRAFT)
    assert kept != reused and reused[-1] > 0


def test_a_changed_history_and_an_answer_that_was_not_read_to_its_end():
    target = with_template(TARGET)
    talk = jaxspec.chat(target, drafter=DRAFT, gamma=3, max_new_tokens=12, eos_ids=())
    answer = talk.send("one two")
    first = next(answer).text + next(answer).text
    again = talk.send("two")  # ends the answer
    assert [message["content"] for message in talk.messages] == ["one two", first, "two"]
    text = "".join(piece.text for piece in again)
    assert talk.reused_tokens > 3 and list(answer) == []
    talk.messages[0]["content"] = "four two"
    del talk.messages[2:]
    assert (
        "".join(piece.text for piece in talk.send("two"))
        == jaxspec.generate(
            target,
            [
                {"role": "user", "content": "four two"},
                talk.messages[1],
                {"role": "user", "content": "two"},
            ],
            max_new_tokens=12,
            eos_ids=(),
        ).texts[0]
        != text
    )
    assert talk.reused_tokens <= 1
    talk.send("three")
    talk.send("one")  # the one before has no answer
    assert [message["role"] for message in talk.messages[-3:]] == ["user", "assistant", "user"]


def test_an_answer_that_is_tried_again_takes_the_place_of_the_last():
    target, key = with_template(TARGET), jax.random.key(4)
    options = dict(temperature=1.0, max_new_tokens=12, eos_ids=())
    talk = jaxspec.chat(target, drafter=DRAFT, gamma=3, key=key, system="four", **options)
    with pytest.raises(ValueError, match="there is no message to answer again"):
        talk.retry()
    for content in ("one", "two"):
        first = "".join(piece.text for piece in talk.send(content))
    before = talk.messages[:-1]
    turn = jax.random.fold_in(key, 1)
    for attempt in (1, 2):
        text = "".join(piece.text for piece in talk.retry())
        again = jax.random.fold_in(turn, attempt)
        alone = jaxspec.generate(
            target, [before], drafter=DRAFT, gamma=3, key=again, **options
        ).texts[0]
        assert first != text == alone and talk.messages == [
            *before,
            {"role": "assistant", "content": text},
        ]
    talk.messages[0] = {"role": "system", "content": "three"}
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "three"}]
    assert "".join(piece.text for piece in talk.send("one")) and not talk.is_new_shape


def test_bad_chats_are_refused():
    with pytest.raises(ValueError, match="has no chat template"):
        jaxspec.chat(TARGET._replace(tokenizer=word_tokenizer(WORDS)))
    with pytest.raises(TypeError, match="gama"):
        jaxspec.chat(with_template(TARGET), gama=3)
    talking = with_template(TARGET)
    for bad, what in (
        (dict(prefix=jaxspec.prefix(TARGET, [2])), "got a prefix: a chat reads its own"),
        (
            dict(num_samples=2, temperature=1.0, key=jax.random.key(0)),
            "num_samples is 2: a chat has one answer",
        ),
        (dict(stop=[""]), "stop has an empty string"),
    ):
        with pytest.raises(ValueError, match=what):
            jaxspec.chat(talking, **bad)
    refusing = with_template(TARGET, "{{ raise_exception('Conversation roles must alternate') }}")
    talk = jaxspec.chat(refusing)
    with pytest.raises(
        ValueError, match=r"refuses the conversation \(of user\): Conversation roles must alternate"
    ):
        talk.send("one")
    assert talk.messages == []


HALF = "one \ud83d"  # as a JSON escape that was cut leaves it


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": HALF},
        {"role": "user", "content": [{"type": "text", "text": HALF}]},
        {"role": "user", "content": "one", "name": HALF},
    ],
    ids=["content", "parts", "name"],
)
def test_half_a_character_is_refused_wherever_a_conversation_is_read(message):
    target = with_template(TARGET)
    for read in (
        lambda: jaxspec.generate(target, [message]),
        lambda: jaxspec.beam_search(target, [message]),
        lambda: jaxspec.prefix(target, [message]),
        lambda: list(jaxspec.generate_many(target, [[message]])),
        lambda: dataclasses.replace(jaxspec.chat(target), messages=[message]).send("one"),
    ):
        with pytest.raises(
            ValueError,
            match=r"message 0 of the chat has '.ud83d' at character 4, half of a surrogate",
        ):
            read()


def test_half_a_character_is_refused_in_other_texts():
    target = with_template(TARGET)
    with pytest.raises(ValueError, match=r"prompt 0 has .* half of a surrogate pair"):
        jaxspec.prefix(target, HALF)
    with pytest.raises(ValueError, match=r"message 0 of the chat has .* half of a surrogate pair"):
        jaxspec.chat(target).send(HALF)
    with pytest.raises(ValueError, match=r"chat_template_kwargs has .* half of a surrogate pair"):
        jaxspec.chat(target, chat_template_kwargs={"tools": [{"name": HALF}]}).send("one")


@pytest.mark.parametrize(
    "kind", ["eagle 3", pytest.param("dflash", marks=[pytest.mark.slow, pytest.mark.exhaustive])]
)
def test_drafters_on_hidden_states_go_on_from_a_turn(kind):
    """Prompts of three token ids, as their tiny target has them."""
    target, words = target_of("decoder"), ["one", "two", "three"]
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    target = target._replace(
        tokenizer=word_tokenizer(words, end="one", unknown="two", chat_template=template)
    )
    contents = ["one two", "three one two", "two"]
    _, reused = talk_through(target, drafter_of(kind, "decoder"), contents, system=None, eos_ids=())
    assert reused[0] == 0 and 0 < reused[1] <= reused[2]


@pytest.mark.parametrize("drafts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_answers_of_one_token_are_taken_back_from_the_smallest_rings(drafts):
    """A chat keeps room in rings for an answer, which its template rewrites: here for one token."""
    target, draft = (
        jaxspec.Model(
            decoder.language_model(config), random_params(decoder.init, config, layers, 0.6)
        )
        for layers in (2, 1)
        for config in [
            nets.replace(LLAMA, vocab_size=len(WORDS), layers=layers, window=4, local=(True, False))
        ]
    )
    contents = ["one two " * 12, "three", "two", "four one"]
    for template in (PLAIN, FORGETS):
        drafter = draft if drafts else None
        talk, reused = talk_through(
            with_template(target, template), drafter, contents, max_new_tokens=1
        )
        slots = {x.shape[2] for x in jax.tree.leaves(talk._state.caches) if x.ndim == 4}
        assert min(slots) < 32 < talk.prompt_tokens and min(reused[1:]) > 20
        list(talk.retry())
        assert talk.reused_tokens > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter", [None, jaxspec.drafters.prompt_lookup(2), jaxspec.drafters.tree(DRAFT, (2, 1))]
)
def test_so_it_has_with_other_drafters(drafter):
    talk_through(with_template(TARGET), drafter, capacity=128)


@pytest.mark.slow
def test_so_it_has_where_a_policy_has_kept_a_model_from_reading():
    """Rounds without a draft are not read by the drafter, so that it lacks more than the last
    tokens of a turn.
    """
    policy = oracle(np.array([[2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]]))
    talk_through(with_template(TARGET), DRAFT, capacity=128, policy=policy)


def test_the_default_limit_of_an_answer_leaves_room_for_others():
    """It is at most a quarter of a decoder's positions, and in the end what is left; 512 where
    nothing limits.
    """
    model = with_template(TARGET)
    limits = model.lm.limits._replace(max_positions=40)
    small = model._replace(lm=model.lm._replace(limits=limits))
    talk = jaxspec.chat(small, eos_ids=())
    assert [talk._limit([1] * count) for count in (3, 12, 36, 50)] == [10, 10, 4, 1]
    list(talk.send("one two"))
    assert len(talk.messages[-1]["content"].split()) <= 10
    with pytest.raises(
        ValueError, match=r"a prompt of \d+ tokens and 1 new ones need \d+ positions"
    ):
        talk.send("one " * 40)
    assert jaxspec.chat(model)._limit([1] * 3) == ANSWER
    # and not that 512 tokens are too many
    with pytest.raises(ValueError, match="has no chat template"):
        jaxspec.chat(small._replace(tokenizer=word_tokenizer(WORDS)), max_new_tokens=512)
