"""Models of another vocabulary as drafters: the map, the smaller head, the tokens that two
tokenizers share.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Model, Prompt, Room
from jaxspec.nets import decoder, t5
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import certify, table_model, word_tokenizer
from jaxspec.training.top_tokens import log_probs_of
from jaxspec.vocab.cross_tokenizer import share_vocabulary
from jaxspec.vocab.remap import map_vocabulary
from jaxspec.vocab.trim import draft_tokens, trim_vocabulary
from jaxspec.weights import quantisation
from tests.marks import marked
from tests.small import prefill, tiny_gpt, tiny_llama, tiny_t5

EXACT = 1e-5
TARGET = table_model(jax.random.key(1), 3)
PROMPT = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))
FOUR = table_model(jax.random.key(2), 4, sharpness=1.5)
TWO = table_model(jax.random.key(3), 2, order=3, sharpness=1.5)
SPELLED = [[1], [0, 1], [1, 0, 0]]
MODELS = {  # a model that drafts for the target, whose ids are 0, 1 and 2
    "permuted": map_vocabulary(FOUR, [2, -1, 0, -1], 3, [[2], [3], [0]]),
    "spelled": map_vocabulary(TWO, [2, 0], 3, SPELLED),
    "spelled, with a beginning": map_vocabulary(TWO, [-1, 0], 3, SPELLED, first=[1, 1]),
}
EVERYTHING = at_temperature(3, True)
PLAIN = SamplingParams(jnp.ones(1), jnp.array([3]), jnp.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_exact_at_any_temperature(name):
    options = dict(drafter=MODELS[name], gamma=2, prompt=PROMPT, sampler=EVERYTHING)
    for params in (
        PLAIN,
        PLAIN._replace(temperature=jnp.zeros(1)),
        PLAIN._replace(top_k=jnp.array([2])),
    ):
        assert certify(TARGET, sampling_params=params, **options) < EXACT


@pytest.mark.slow
def test_exact_where_nothing_that_is_drafted_is_allowed():
    """The drafter's distribution is then no distribution at all."""
    assert (
        certify(TARGET, drafter=MODELS["permuted"], prompt=PROMPT, banned=[0, 2], steps=2) < EXACT
    )


@pytest.mark.slow
def test_exact_in_trees():
    assert (
        certify(TARGET, drafter=drafters.tree(MODELS["permuted"], (2,)), prompt=PROMPT, steps=3)
        < EXACT
    )


@pytest.mark.slow
def test_exact_in_an_encoder_decoder():
    target, draft = (table_model(jax.random.key(4), vocab, encoder=True) for vocab in (3, 2))
    # the start token is the drafter's, too
    spelled = map_vocabulary(draft, [2, 0], 3, [[0], [0, 1], [1, 0, 0]])
    assert certify(target, drafter=spelled, prompt=PROMPT, steps=3) < EXACT


@pytest.mark.slow
def test_a_spelled_row_is_what_the_model_reads():
    """Ragged rows, rewound and fed again: the logits are those of the model after the spelled
    row.
    """
    draft, length = MODELS["spelled, with a beginning"], jnp.array([3, 1])
    rows = np.array([[1, 0, 2, 2, 1, 0], [2, 1, 1, 0, 0, 0]])
    forward, cache = prefill(draft, Prompt(jnp.asarray(rows[:, :3], jnp.int32), length), Room(8))
    following = [forward.logits[:, 0]]
    for _ in range(2):
        cache = draft.lm.rewind(cache, length)
        new = np.stack([row[n : n + 3] for row, n in zip(rows, [3, 1], strict=True)])
        forward, cache = jax.jit(draft.lm.extend)(draft.params, cache, jnp.asarray(new, jnp.int32))
        following.append(forward.logits[:, 2])
    for row, ends in ((0, (3, 6, 6)), (1, (1, 4, 4))):
        for logits, end in zip(following, ends, strict=True):
            spelled = [1, 1] + [x for token in rows[row, :end] for x in SPELLED[token]]
            expected = TWO.params[tuple(spelled[-3:])]
            np.testing.assert_array_equal(logits[row], [expected[1], -np.inf, -np.inf])


# --- a smaller head

DECODER = tiny_llama(40, logits_cap=5.0)
NETS = {
    "own head": (decoder, DECODER),
    "tied": (decoder, dataclasses.replace(DECODER, tied_head=True, end_tokens=(39,))),
    "gpt": (decoder, tiny_gpt(40)),
    "t5": (t5, tiny_t5(40, tied_head=True, start_token=7)),
    "int8": (decoder, DECODER),
}


def network(name):
    net, config = NETS[name]
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    params = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32), shapes
    )
    return Model(
        net.language_model(config),
        quantisation.quantise(params) if name == "int8" else params,
        config=config,
    )


@pytest.mark.parametrize("name", marked(NETS, slow={*NETS} - {"gpt"}))
def test_a_smaller_head_has_the_same_logits(name):
    model = network(name)
    small = trim_vocabulary(model, ids=[3, 30, 5])
    kept = [3, 5, 30] + ([39] if name == "tied" else [])
    prompt = Prompt(jnp.array([[1, 30, 4, 2]] * 2, jnp.int32), jnp.array([4, 2]))

    def passes(lm, params):
        first, cache = lm.prefill(params, prompt, Room(8))
        second, _ = lm.extend(params, cache, prompt.tokens[:, :2])
        return first.logits, second.logits, lm.inside.head(params, second.features)

    full, part = (jax.jit(passes, static_argnums=0)(m.lm, m.params) for m in (model, small))
    for all_logits, logits in zip(full, part, strict=True):
        np.testing.assert_allclose(logits[..., kept], all_logits[..., kept], rtol=2e-5, atol=2e-5)
        assert np.isneginf(np.delete(logits, kept, axis=-1)).all()


def test_the_inside_of_a_mapped_model_takes_the_targets_ids():
    model, tokens, ids = network("gpt"), jnp.array([[0, 2, 1]], jnp.int32), [2, 0, 1] + [-1] * 37
    # features, too, are those of the last
    several = map_vocabulary(model, ids, 3, [[5, 1], [2], [7, 7, 0]])
    for mapped, read in (
        (trim_vocabulary(model, ids=[3]), [0, 2, 1]),
        (map_vocabulary(model, ids, 3), [1, 0, 2]),
        (several, [1, 0, 2]),
    ):
        rows = mapped.lm.inside.embed(mapped.params, tokens)
        np.testing.assert_array_equal(
            rows, model.lm.inside.embed(model.params, jnp.asarray([read], jnp.int32))
        )
        assert mapped.lm.inside.layers is None and (mapped.lm.inside.keys_values is None) == (
            mapped is several
        )


@pytest.mark.slow
def test_a_smaller_head_costs_less():
    """The compiled draft step no longer computes the whole product."""
    config = dataclasses.replace(DECODER, vocab_size=4096)
    model = Model(
        decoder.language_model(config), decoder.init(config, jax.random.key(0)), config=config
    )
    flops = {}
    for name, m in (("whole", model), ("trimmed", trim_vocabulary(model, size=512))):
        _, cache = prefill(m, Prompt(jnp.ones((1, 2), jnp.int32), jnp.array([2])), Room(4))

        def step(params, cache, lm=m.lm):
            forward, _ = lm.extend(params, cache, jnp.ones((1, 1), jnp.int32))
            return forward.logits

        flops[name] = jax.jit(step).lower(m.params, cache).compile().cost_analysis()["flops"]
    assert flops["whole"] - flops["trimmed"] > 0.9 * 2 * config.dim * (4096 - 512)


def test_which_tokens_are_drafted():
    model = network("tied")
    counts = np.zeros(40)
    counts[[4, 9, 2]] = 3, 8, 1
    assert trim_vocabulary(model, size=3).params.to_target.tolist() == [0, 1, 39]
    again = trim_vocabulary(trim_vocabulary(model, size=3), counts=counts, size=3)
    assert again.params.to_target.tolist() == [4, 9, 39]
    assert trim_vocabulary(model, counts=counts, size=3).params.to_target.tolist() == [4, 9, 39]
    assert trim_vocabulary(network("own head"), counts=counts).params.to_target.tolist() == [
        2,
        4,
        9,
    ]


@pytest.mark.slow
def test_a_smaller_head_is_exact():
    config = dataclasses.replace(NETS["tied"][1], vocab_size=4, end_tokens=())
    random = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    params = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32), shapes
    )
    small = trim_vocabulary(
        Model(decoder.language_model(config), params, config=config), ids=[0, 2]
    )
    target = table_model(jax.random.key(5), 4, order=1)
    for temperature in (0.0, 1.0):
        assert certify(target, drafter=small, gamma=1, temperature=temperature, steps=3) < EXACT


# --- two tokenizers

SENTENCE = ["<unk>", "</s>", "<s>", "▁", "▁the", "▁old", "dog", "d", "o", "g", "<0xC3>", "<0xA9>"]
BYTES = ["<|end|>", "Ġthe", "Ġold", "Ã©", "Ã", "dog", "Ġdog", "Ġcat"]


def model_with(words, key, **tokens):
    return table_model(jax.random.key(key), len(words))._replace(
        tokenizer=word_tokenizer(words, **tokens)
    )


def test_tokens_that_spell_the_same_are_shared():
    sentence = model_with(SENTENCE, 1, bos_token="<s>")
    byte_level = model_with(BYTES, 2, end="<|end|>", unknown="<|end|>")
    # drafts by bytes for a target of SentencePiece's
    shared = share_vocabulary(byte_level, sentence)
    assert shared.params.to_target.tolist() == [1, 4, 5, 12, 10, 6, 12, 12]
    mapped = map_vocabulary(byte_level, [1, 4, 5, -1, 10, 6, -1, -1], 12, [[0]] * 12)
    assert (shared.params.to_target == mapped.params.to_target).all()
    shared = share_vocabulary(sentence, byte_level)
    table, count = np.asarray(shared.params.to_draft), np.asarray(shared.params.count)
    spelled = {word: table[i, : count[i]].tolist() for i, word in enumerate(BYTES)}
    assert spelled == {
        "<|end|>": [1],
        "Ġthe": [4],
        "Ġold": [5],
        "Ã©": [10, 11],
        "Ã": [10],
        "dog": [6],
        "Ġdog": [3, 6],
        "Ġcat": [3],  # the letters of "cat" are no tokens
    }


def test_tokens_above_the_number_of_tokens_are_shared_too():
    """Ids with gaps between them, on both sides."""
    ours = word_tokenizer({"<unk>": 0, "the": 1, "old": 5, "dog": 6, "</s>": 9})
    theirs = word_tokenizer({"<unk>": 0, "dog": 4, "the": 7, "</s>": 8})
    target = table_model(jax.random.key(1), 10)._replace(tokenizer=ours)
    draft = table_model(jax.random.key(2), 9)._replace(tokenizer=theirs)
    shared = share_vocabulary(draft, target)
    assert shared.params.to_target.tolist() == [0, 10, 10, 10, 6, 10, 10, 1, 9]
    text = jaxspec.generate(target, "the old", drafter=shared, gamma=2, max_new_tokens=5).tokens
    assert text.tolist() == jaxspec.generate(target, "the old", max_new_tokens=5).tokens.tolist()


def test_an_end_that_the_model_lacks_is_no_token_to_draft():
    model = network("tied")
    lacking = model._replace(config=dataclasses.replace(model.config, end_tokens=(39, 40, -1)))
    assert draft_tokens(trim_vocabulary(lacking, size=4)).tolist() == [0, 1, 2, 39]


BAD = {
    "to_target has shape (3,): expected an id for each of the model's 4 tokens": lambda: (
        map_vocabulary(FOUR, [0, 1, 2], 3)
    ),
    "to_target has 0 to 3: expected ids from -1 to 2": lambda: map_vocabulary(
        FOUR, [0, 1, 2, 3], 3
    ),
    "has id 1 more than once": lambda: map_vocabulary(FOUR, [0, 1, 1, 2], 3),
    "id 1 matches no token": lambda: map_vocabulary(FOUR, [0, 2, -1, -1], 3),
    "to_draft has nothing for id 2": lambda: map_vocabulary(FOUR, [0, 1, 2, -1], 3, [[0], [1], []]),
    "to_draft has 1 entries": lambda: map_vocabulary(FOUR, [0, 1, 2, -1], 3, [[0]]),
    "to_draft has 0 to 9: expected ids from 0 to 3": lambda: map_vocabulary(
        FOUR, [0, 1, 2, -1], 3, [[0], [1], [9]]
    ),
    "first has 4 to 4": lambda: map_vocabulary(FOUR, [0, 1, 2, -1], 3, first=[4]),
    "(a TableConfig) cannot be trimmed": lambda: trim_vocabulary(FOUR, size=2),
    "takes ids, or size and counts": lambda: trim_vocabulary(network("gpt")),
    "size is 41": lambda: trim_vocabulary(network("gpt"), size=41),
    "ids has 3 to 40": lambda: trim_vocabulary(network("gpt"), ids=[3, 40]),
    "counts has shape (3,)": lambda: trim_vocabulary(network("gpt"), counts=[1, 2, 3]),
    "has a vocabulary map already": lambda: trim_vocabulary(
        map_vocabulary(network("gpt"), range(40), 40), size=4
    ),
    "the drafter (table-4) has no tokenizer": lambda: share_vocabulary(FOUR, TARGET),
    "share only special tokens": lambda: share_vocabulary(
        model_with(["a", "b"], 1, end="a", unknown="b"), model_with(["c"], 2, end="c", unknown="c")
    ),
    "takes chains only": lambda: drafters.tree(MODELS["spelled"], (2, 1)),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_mapped(message):
    with pytest.raises(ValueError) as error:
        BAD[message]()
    assert message in str(error.value)


def test_a_model_that_spells_can_be_trained():
    """Through `extend`, as `training.online` does."""
    prompt, tokens, top = (
        Prompt(jnp.array([[0, 1]]), jnp.array([2])),
        jnp.array([[2, 1]]),
        jnp.array([[[0], [1]]]),
    )
    model = map_vocabulary(table_model(jax.random.key(3), 2), [2, 0], 3, [[1], [0, 1], [0]])

    def loss(params):
        return jnp.sum(log_probs_of(model.lm, params, prompt, tokens, top))

    gradient = jax.grad(loss, allow_int=True)(model.params)
    leaves = [
        leaf for leaf in jax.tree.leaves(gradient) if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert any(jnp.any(leaf != 0) for leaf in leaves)
