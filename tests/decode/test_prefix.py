"""A prefix that is read once: text and counts are those of the whole prompts, for every drafter."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import Model, drafters, nets, rules
from jaxspec.core import BoundDrafter, Drafter, chunks, token_rows
from jaxspec.decode import loop
from jaxspec.decode.generate import complete
from jaxspec.decode.request import prepare
from jaxspec.nets import decoder
from jaxspec.testing import certify, table_model, word_tokenizer
from jaxspec.vocab.remap import map_vocabulary
from tests.draft_heads.test_drafters import LLAMA, NAMES, SELDOM, TRIMMED, drafter_of, target_of
from tests.drafters.cases import CASES, MODEL, TARGET
from tests.marks import marked
from tests.small import random_params

SHARED = [1, 0, 2, 2, 1]
ROWS = [[0], [2, 1, 1, 0, 2, 1, 0], [1, 1]]  # ragged, one of a single token
SOME = ("a model", "prompt_lookup", "token_recycling")
SOME_HEADS = ("eagle 3", "dflash", "kangaroo", "medusa")


@functools.cache
def networks():
    """Return a target and two drafters, in which everything depends on all that was read before.

    Tables look at two tokens.
    """
    configs = [
        (seed, nets.replace(LLAMA, layers=layers)) for seed, layers in ((1, 2), (7, 1), (8, 1))
    ]
    return [
        Model(
            decoder.language_model(config),
            random_params(decoder.init, config, seed, 0.6),
            None,
            config,
        )
        for seed, config in configs
    ]


NETWORKS = {
    "a model": lambda small, _: drafters.model(small),
    "a tree": lambda small, _: drafters.tree(small, (2, 1)),
    "a dynamic tree": lambda small, _: drafters.dynamic_tree(small, nodes=4, depth=3, width=2),
    "a cascade": lambda small, smaller: drafters.cascade(
        small, drafters.cascade(smaller, drafters.prompt_lookup(), gamma=1), gamma=2
    ),
    "a fallback": lambda small, _: drafters.fallback(drafters.prompt_lookup(2, 2), small),
    "a model that spells tokens": lambda small, _: drafters.model(
        map_vocabulary(small, [2, 0, 1], 3, [[1], [0, 1], [0]], first=(1,))
    ),
}


@functools.cache
def pair_of(name):
    """Return a target and a drafter: a network, none, or a head on the target's hidden states."""
    if name not in (*NETWORKS, "none"):
        return target_of("decoder"), drafter_of(name, "decoder")
    target, *drafting = networks()
    return target, None if name == "none" else NETWORKS[name](*drafting)


def both(target, drafter, shared=SHARED, rows=ROWS, **options):
    """Generates with a prefix and from whole prompts, cold and warm rows together; compares texts
    and counts.

    Both have buffers of one width, and so one program for their rounds.
    """
    options = (
        dict(gamma=3, max_new_tokens=14, temperature=[0.0, 1.0, 0.8], key=jax.random.key(5))
        | options
    )
    prefix = jaxspec.prefix(target, shared, drafter=drafter)
    with_prefix = prepare(target, rows, prefix=prefix, drafter=drafter, **options)
    prompts = token_rows.pad([shared + row for row in rows], with_prefix.prompt.tokens.shape[1])
    whole = prepare(target, prompts, drafter=drafter, **options)
    same(*(complete(prepared, begin=loop.prefill) for prepared in (with_prefix, whole)))


def same(left, right):
    """Compares texts and counts, and what was drafted on the way."""
    assert left.tokens.tolist() == right.tokens.tolist()
    jax.tree.map(np.testing.assert_array_equal, tuple(left.trace), tuple(right.trace))
    assert jax.tree.map(np.ndarray.tolist, left.stats) == jax.tree.map(
        np.ndarray.tolist, right.stats
    )


# Each factory's drafter once: how it goes on does not depend on its shape.
ALIKE = {name for name, case in CASES.items() if case.exhaustive} - {*SOME} | {
    "argmax without back-off",
    "uniform",
}
ALIKE |= {"suffix, a tree", "prompt_lookup, a tree", "lookahead with two levels"}


@pytest.mark.parametrize("name", marked(CASES, slow={*CASES} - {*SOME}, exhaustive=ALIKE))
def test_text_and_counts_are_those_of_whole_prompts(name):
    both(TARGET, CASES[name].drafter)


@pytest.mark.parametrize("name", marked(NETWORKS, slow={*NETWORKS} - {"a model"}))
def test_so_they_are_with_networks_that_draft(name):
    both(*pair_of(name))


# EAGLE-1 has two tests below, and Hydra goes on as Medusa does.
ALIKE_HEADS = {"eagle 1", "hydra", *SELDOM, *TRIMMED, "eagle 3, windows", "dspark"} - {
    *SOME_HEADS,
    "assistant",
}


@pytest.mark.parametrize(
    "name", marked(NAMES, slow={*NAMES} - {"eagle 3", "medusa"}, exhaustive=ALIKE_HEADS)
)
def test_so_they_are_with_drafters_on_hidden_states(name):
    both(*pair_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a tree", "eagle 1"])
def test_so_they_are_with_the_coupled_rule(name):
    both(*pair_of(name), rule=rules.coupled())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt"])
@pytest.mark.parametrize("drafter", [None, "eagle 1"])
def test_so_they_are_with_another_network(name, drafter):
    both(target_of(name), drafter and drafter_of(drafter, name))


@pytest.mark.parametrize("name", marked(["none", "a model"], slow={"a model"}))
def test_a_prefix_of_one_token_and_samples_that_share_it(name):
    """Nothing of it is kept but its id; plain decoding, too."""
    both(*pair_of(name), shared=[2], rows=[[0]], temperature=1.0, num_samples=3)


def test_a_prefix_whose_cache_is_larger_than_is_needed():
    """One token more than a bucket, and little to follow; as users call it, in whole programs."""
    target, drafter = pair_of("a model")
    shared, rows = np.random.default_rng(1).integers(0, 3, 129).tolist(), [[0], [2, 1]]
    prefix = jaxspec.prefix(target, shared, drafter=drafter)
    prepared = prepare(target, rows, prefix=prefix, drafter=drafter, max_new_tokens=4)
    assert (
        prefix.caches.target.capacity
        == 193
        > prepared.prompt.tokens.shape[1] + 16 + prepared.decoder.nodes + 1
    )
    options = dict(drafter=drafter, gamma=3, max_new_tokens=4, eos_ids=())
    out = jaxspec.generate(target, rows, prefix=prefix, **options)
    same(out, jaxspec.generate(target, [shared + row for row in rows], **options))
    job = jaxspec.generate_many(target, rows, prefix=prefix, **options)
    assert [row.tokens for row in job] == out.tokens.tolist()


@pytest.mark.parametrize(
    "name",
    [
        "a model",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("eagle 3", "kangaroo", "a cascade")
        ),
    ],
)
def test_long_prompts_are_read_on_in_chunks(name, monkeypatch):
    """Prefix and what follows it are of several chunks; some row ends in the first of these."""
    monkeypatch.setattr(chunks, "LONGEST", 16)
    target, drafter = pair_of(name)
    random = np.random.default_rng(0)
    rows = [random.integers(0, 3, size).tolist() for size in (5, 40, 23)]
    both(target, drafter, shared=random.integers(0, 3, 37).tolist(), rows=rows, max_new_tokens=9)


def test_the_caches_are_read():
    """With those of another prefix texts are others, so the comparisons above compare something."""
    target, rows = networks()[0], dict(prompts=ROWS, max_new_tokens=14)
    prefix, other = (jaxspec.prefix(target, ids) for ids in (SHARED, [2, 2, 0, 2, 1]))
    wrong = dataclasses.replace(prefix, caches=other.caches)
    texts = [jaxspec.generate(target, prefix=p, **rows).tokens.tolist() for p in (prefix, wrong)]
    assert texts[0] != texts[1]


def test_the_distribution_after_a_prefix_is_the_targets():
    prefix = jaxspec.prefix(TARGET, [1, 0, 2, 1], drafter=MODEL)
    options = dict(drafter=MODEL, gamma=2, steps=3, temperature=1.0)
    assert certify(TARGET, prompt=[[2]], prefix=prefix, **options) < 1e-6


def test_a_prepared_generation_keeps_it():
    """Replaced options, plain decoding, and a program of one's own."""
    target, drafter = pair_of("a model")
    prefix = jaxspec.prefix(target, SHARED, drafter=drafter)
    prepared = prepare(target, ROWS, prefix=prefix, drafter=drafter, gamma=2, max_new_tokens=9)
    assert prepared.before is not None and prepared.plain().before is not None
    out = jax.jit(lambda: jaxspec.rollout(prepared).tokens)()
    plain = jaxspec.generate(target, [SHARED + row for row in ROWS], max_new_tokens=9)
    assert out[:, :9].tolist() == plain.tokens.tolist()
    with pytest.raises(
        ValueError, match="prepared with a prefix, which belongs to its weights and prompts"
    ):
        jaxspec.rollout(prepared, weights=prepared.weights)


WORDS = ["<unk>", "</s>", "<s>", "user", "one", "two", "three"]
TEMPLATE = "<s> {% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"


def with_words(model):
    from tokenizers import processors

    tokenizer = word_tokenizer(WORDS, chat_template=TEMPLATE, bos_token="<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    return model._replace(tokenizer=tokenizer)


def test_texts_and_chats_follow_a_prefix():
    """Of texts the ids are joined, without a second begin-of-sequence token; a chat has the prefix
    in it.
    """
    model = with_words(table_model(jax.random.key(3), vocab=len(WORDS)))
    prefix = jaxspec.prefix(model, "one two")
    assert prefix.tokens == [2, 4, 5] and len(prefix) == 3
    rows = prepare(model, ["three", "two one"], prefix=prefix).prompt
    assert [row[:n].tolist() for row, n in zip(rows.tokens, rows.length, strict=True)] == [
        [2, 4, 5, 6],
        [2, 4, 5, 5, 4],
    ]
    begins = [{"role": "user", "content": "one"}]
    of_chat = jaxspec.prefix(model, begins)
    whole = [*begins, {"role": "user", "content": "two"}]
    rows = prepare(model, whole, prefix=of_chat).prompt
    ids = model.tokenizer.apply_chat_template(whole)["input_ids"]
    assert (
        rows.tokens[0, : rows.length[0]].tolist() == ids and ids[: len(of_chat)] == of_chat.tokens
    )
    with pytest.raises(ValueError, match="whose first 2 tokens are those of the prefix, which has"):
        prepare(model, [{"role": "user", "content": "two"}], prefix=of_chat)
    other = [{"role": "user", "content": "two"}]
    with pytest.raises(
        ValueError, match="prompt 7 is a chat whose first 2 tokens are those of the prefix"
    ):
        list(jaxspec.generate_many(model, [{"number": 7, "prompt": other}], prefix=of_chat))
    (row,) = jaxspec.generate_many(model, [whole], prefix=of_chat, max_new_tokens=5)
    assert row.tokens == jaxspec.generate(model, [ids], max_new_tokens=5).tokens[0].tolist()


def test_a_systems_message_is_shared_where_the_template_writes_it_with_the_first_other_one():
    """As Gemma's does; alone it is written as nothing."""
    model = with_words(table_model(jax.random.key(3), vocab=len(WORDS)))
    model.tokenizer.chat_template = (
        "<s> {% if messages[0].role == 'system' and messages|length > 1 %}user {{ "
        "messages[0].content }} two "
        "{{ messages[1].content }}{% endif %}"
    )
    system = [{"role": "system", "content": "one three"}]
    prefix = jaxspec.prefix(model, system)
    assert prefix.tokens == [2, 3, 4, 6, 5]  # <s> user one three two
    whole = [*system, {"role": "user", "content": "three"}]
    assert prepare(model, whole, prefix=prefix).prompt.length.tolist() == [6]


def test_conversations_are_prompts():
    """One, or several; the template's values; a message by itself is refused."""
    model = with_words(table_model(jax.random.key(3), vocab=len(WORDS)))
    talks = [[{"role": "user", "content": content}] for content in ("one", "two three")]
    ids = [model.tokenizer.apply_chat_template(talk)["input_ids"] for talk in talks]
    expected = jaxspec.generate(model, ids, max_new_tokens=5).tokens.tolist()
    assert jaxspec.generate(model, talks, max_new_tokens=5).tokens.tolist() == expected
    streamed = list(jaxspec.stream(model, talks[0], max_new_tokens=5))
    assert [token for piece in streamed for token in piece.tokens] == expected[0][: len(streamed)]
    model.tokenizer.chat_template = "{{ word }} {{ messages[0]['content'] }}"
    prompt = prepare(model, talks[0], chat_template_kwargs={"word": "three"}).prompt
    assert prompt.tokens[0, : prompt.length[0]].tolist() == [6, 4]


def careless_init(start):
    return start.prefilled.tokens


def test_what_does_not_fit_a_prefix_is_refused():
    target, other = networks()[0]._replace(name="decoder"), table_model(jax.random.key(9), 3)
    prefix = jaxspec.prefix(TARGET, SHARED, drafter=MODEL)
    for bad, match in (
        (dict(target=target), "read by the target table-3, and the target is decoder"),
        (
            dict(target=TARGET._replace(params=TARGET.params + 0)),
            "read by the target table-3, and the target has other parameters: read it again",
        ),
        (
            dict(target=table_model(jax.random.key(1), 3, order=1)),
            "and the target has other parameters",
        ),
        (dict(drafter=other), "read by the drafter table-3, and the drafter has other parameters"),
        (
            dict(drafter=drafters.prompt_lookup()),
            "read by the drafter table-3, and the drafter is prompt_lookup",
        ),
        (
            dict(prefix=jaxspec.prefix(TARGET, SHARED)),
            "read by the target alone, and table-3 is to draft",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            prepare(**dict(target=TARGET, prompts=ROWS, prefix=prefix, drafter=MODEL) | bad)
    for bad in ("one two", [1, 2], MODEL):
        with pytest.raises(
            TypeError, match=r"expected what jaxspec.prefix\(target, text\) returns"
        ):
            prepare(TARGET, ROWS, prefix=bad)
    for other in (prefix, 1):  # its rows begin with the first one's tokens
        with pytest.raises(ValueError, match="have their prefix already: give it to prepare"):
            prepare(TARGET, ROWS, prefix=prefix, drafter=MODEL).replace(prefix=other)
    with pytest.raises(
        ValueError, match="is an encoder-decoder, whose encoder reads each prompt as a whole"
    ):
        jaxspec.prefix(table_model(jax.random.key(1), 3, encoder=True), SHARED)
    with pytest.raises(ValueError, match="got 2 prefixes: expected one"):
        jaxspec.prefix(TARGET, [[1], [2]])
    own = BoundDrafter(Drafter(careless_init, None, None, resumes=False), name="mine")
    with pytest.raises(
        ValueError,
        match=r"drafter mine cannot go on from a prefix, .* \(Drafter.resumes is False\)",
    ):
        jaxspec.prefix(TARGET, SHARED, drafter=own)


@pytest.mark.parametrize("begin", ["a prefix", "a chat", "a prompt"])
def test_a_mistake_in_a_drafter_is_reported_as_it_is(begin):
    own = BoundDrafter(Drafter(careless_init, None, None), name="mine")
    with pytest.raises(AttributeError, match="'Forward' object has no attribute 'tokens'"):
        if begin == "a prefix":
            jaxspec.prefix(TARGET, SHARED, drafter=own)
        elif begin == "a chat":
            "".join(
                piece.text for piece in jaxspec.chat(with_words(TARGET), drafter=own).send("one")
            )
        else:
            jaxspec.generate(TARGET, [[1]], drafter=own)
