"""The places where greedy texts differ, and the margins there."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import nets
from jaxspec.analysis import numerics
from jaxspec.core import Model, Prompt
from jaxspec.decode.request import prepare
from jaxspec.nets import decoder, t5
from jaxspec.testing import table_model, table_model_from, word_tokenizer
from jaxspec.weights import quantisation
from tests.small import random_params, tiny_gpt, tiny_llama, tiny_t5

PROMPT = Prompt(jnp.array([[0, 2], [1, 0]]), jnp.array([2, 1]))


def model_of(network, config):
    return Model(network.language_model(config), random_params(network.init, config), config=config)


def test_a_pair_that_is_exact_differs_nowhere():
    target, draft = (table_model(jax.random.key(seed), vocab=5) for seed in (1, 2))
    assert (
        numerics.mismatches(prepare(target, PROMPT, drafter=draft, gamma=3, max_new_tokens=16))
        == []
    )


@pytest.mark.slow
def test_a_pass_that_rounds_otherwise_is_seen_with_its_margin():
    """A target whose passes over several tokens see token 1 a little better: 0.01 after, it then
    wins.
    """
    target = table_model_from(jnp.array([1.0, 0.99, -3.0]))

    def extend(params, cache, tokens, parent=None, real=None):
        forward, cache = target.lm.extend(params, cache, tokens, parent, real)
        wide = 0.02 * (tokens.shape[1] > 1)
        return forward._replace(
            logits=forward.logits + wide * jnp.array([[[0.0, 1.0, 0.0]]])
        ), cache

    rounding = target._replace(lm=target.lm._replace(extend=extend))
    differences = numerics.mismatches(
        prepare(rounding, PROMPT, drafter=target, gamma=2, max_new_tokens=8)
    )
    assert [(d.row, d.position, d.plain, d.speculative) for d in differences] == [
        (0, 1, 0, 1),
        (1, 1, 0, 1),
    ]
    np.testing.assert_allclose([d.margin for d in differences], 0.01, atol=1e-6)
    np.testing.assert_allclose([d.top_two_margin for d in differences], 0.01, atol=1e-6)


def test_a_token_that_was_no_near_tie_shows_in_its_own_margin():
    """The second best is 0.01 after, and the token of a wrong pass 4: only one of the margins
    tells.
    """
    target = table_model_from(jnp.array([1.0, 0.99, -3.0]))

    def extend(params, cache, tokens, parent=None, real=None):
        forward, cache = target.lm.extend(params, cache, tokens, parent, real)
        wide = 9.0 * (tokens.shape[1] > 1)
        return forward._replace(
            logits=forward.logits + wide * jnp.array([[[0.0, 0.0, 1.0]]])
        ), cache

    wrong = target._replace(lm=target.lm._replace(extend=extend))
    (first, _) = numerics.mismatches(
        prepare(wrong, PROMPT, drafter=target, gamma=2, max_new_tokens=4)
    )
    assert (first.speculative, first.margin, first.top_two_margin) == (
        2,
        pytest.approx(4),
        pytest.approx(0.01),
    )


def test_the_summary_names_the_earliest_mismatch(monkeypatch):
    prepared = prepare(table_model(jax.random.key(1), vocab=5), PROMPT, max_new_tokens=4)
    late, early = numerics.Mismatch(1, 2, 1, 0, 0.5, 0.5), numerics.Mismatch(0, 7, 1, 0, 0.25, 0.75)
    for differences, first, largest in (([], None, None), ([early, late], late, 0.75)):
        monkeypatch.setattr(
            numerics, "mismatches", lambda prepared, differences=differences: differences
        )
        summary = numerics.summary(prepared)
        assert (summary.first, summary.largest_top_two_margin) == (first, largest)
        assert summary.same + len(differences) == summary.prompts == 2


@pytest.mark.parametrize("size", [1, 2])
def test_prompts_may_be_few(size):
    target = table_model(jax.random.key(1), vocab=5)
    prompts = Prompt(PROMPT.tokens[:size], PROMPT.length[:size])
    assert numerics.mismatches(prepare(target, prompts, drafter=target, max_new_tokens=4)) == []


def test_a_model_beside_itself_has_no_error():
    config = tiny_llama(layers=2)
    model = model_of(decoder, config)
    comparison = numerics.compare(model, model, [[3, 1], [5]], max_new_tokens=6)
    assert comparison.num_same == 2 and comparison.names == ("a, float32", "b, float32")
    assert [prompt.parting for prompt in comparison.prompts] == [None, None]
    assert {prompt.logits_error for prompt in comparison.prompts} == {0.0}
    assert comparison.layer_errors == dict.fromkeys(
        ["embedding", "layer 0", "layer 1", "final norm"], 0.0
    )


def plain_loops(a, b, prompt, count):
    """The same comparison of one prompt by passes over the whole row, without a cache."""
    net = nets.net_of(a.config).teach(a.config)
    is_decoder = a.lm.limits.start_token is None
    row = list(prompt) if is_decoder else [0]

    @jax.jit
    def states(params, row):
        def run(net):
            source = Prompt(jnp.array([[*prompt, 0, 0]]), jnp.array([len(prompt)]))
            streams = net.streams(row) if is_decoder else net.streams(source, row)
            return jnp.concatenate(streams), net.logits(net.features(streams[-1]))[0]

        return nn.apply(run, net)({"params": params})

    texts, margins, logits_error, squares = ([], []), None, 0.0, 0.0
    while len(texts[0]) < count and texts[0] == texts[1]:
        padded = jnp.array([row + [0] * (40 - len(row))])
        (of_a, logits_a), (of_b, logits_b) = (
            [np.asarray(x)[..., len(row) - 1, :] for x in states(model.params, padded)]
            for model in (a, b)
        )
        logits_error = max(logits_error, np.abs(logits_a - logits_b).max())
        squares = squares + np.array([((of_a - of_b) ** 2).sum(-1), (of_a**2).sum(-1)])
        in_a, in_b = int(logits_a.argmax()), int(logits_b.argmax())
        margins = (logits_a[in_a] - logits_a[in_b], logits_b[in_b] - logits_b[in_a])
        texts[0].append(in_a)
        texts[1].append(in_b)
        row.append(in_a)
    return texts, margins, logits_error, np.sqrt(squares[0] / squares[1])


@pytest.mark.parametrize("network", ["gpt", pytest.param("t5", marks=pytest.mark.slow)])
def test_int8_differs_where_plain_loops_say(network):
    if network == "gpt":
        a = model_of(decoder, tiny_gpt(vocab=48, layers=2))
    else:
        a = model_of(t5, tiny_t5(vocab=48, layers=2))
    b = a._replace(params=quantisation.quantise(a.params, "int8"))
    prompts = [[7, 3, 9], [11, 2], [5, 40, 21, 17]]
    comparison = numerics.compare(a, b, prompts, max_new_tokens=24)
    assert comparison.num_same < len(prompts)  # else the margins are not tested
    for prompt, result in zip(prompts, comparison.prompts, strict=True):
        texts, margins, logits_error, layer_errors = plain_loops(a, b, prompt, 24)
        read = len(texts[0])
        assert [text[:read] for text in result.texts] == list(texts)
        if texts[0] == texts[1]:
            assert result.parting is None
        else:
            assert result.parting.position == read - 1 and result.parting.words is None
            assert result.parting.tokens == (texts[0][-1], texts[1][-1])
            np.testing.assert_allclose(result.parting.margins, margins, atol=1e-4)
            assert sum(result.parting.margins) <= 2 * result.logits_error + 1e-5
        assert result.logits_error == pytest.approx(logits_error, rel=1e-3)
        named = dict(zip(comparison.layers, result.layer_errors, strict=True))
        of_layers = [named[f"layer {layer}"] for layer in range(2)]
        np.testing.assert_allclose(of_layers, layer_errors, rtol=1e-2)
    assert (network == "t5") == (comparison.layers[0] == "encoder")


@pytest.mark.parametrize(
    ("network", "path", "expected"),
    [
        ("llama", ("layers_1", "ff"), "layer 1"),
        ("t5", ("encoder_0", "attention"), "encoder"),
        ("t5", ("decoder_1", "cross"), "layer 1"),
        ("t5", ("decoder_norm",), "final norm"),
    ],
)
def test_the_layer_that_was_changed_is_the_first_with_an_error(network, path, expected):
    if network == "llama":
        a = model_of(decoder, tiny_llama(layers=3))
    else:
        a = model_of(t5, tiny_t5(layers=3))

    def changed(where, x):
        names = jax.tree_util.keystr(where, simple=True, separator="/").split("/")
        return x * 1.25 if tuple(names[: len(path)]) == path else x

    b = a._replace(params=jax.tree_util.tree_map_with_path(changed, a.params))
    errors = numerics.compare(a, b, [[3, 1], [5]], max_new_tokens=6).layer_errors
    assert next(name for name, error in errors.items() if error > 1e-5) == expected
    # what comes after it reads it
    names = list(errors)
    assert all(
        errors[name] > 1e-5 for name in names[names.index(expected) + 1 :] if name != "embedding"
    )


def test_a_comparison_is_shown_as_tables():
    words = word_tokenizer(["<unk>", "</s>", "[the]"])
    a, b = (
        table_model_from(jnp.array(row))._replace(tokenizer=words, name=name)
        for name, row in (("big", [1.0, 0.0, 0.5]), ("small", [1.0, 0.0, 1.25]))
    )
    comparison = numerics.compare(a, b, [[2]], max_new_tokens=4)
    assert comparison.prompts[0].parting == numerics.Parting(
        0, (0, 2), ("<unk>", "[the]"), (0.5, 0.25)
    )
    lines = str(comparison).splitlines()
    assert lines[0].strip() == "Greedy texts of a (big, float32) and b (small, float32)"
    cells = [cell.strip() for cell in lines[-3].strip("│").split("│")]
    assert cells == ["0", "4", "0", "<unk>", "[the]", "0.5", "0.25", "0.75"]
    assert lines[-1].startswith("0 of 1 texts are the same. The layers differ")


def test_models_of_other_vocabularies_are_refused():
    a = table_model_from(jnp.zeros(3))
    with pytest.raises(
        ValueError, match="the number of token ids is 3 for a and 4 for b: expected two"
    ):
        numerics.compare(a, table_model_from(jnp.zeros(4)), [[0]])
    words = [word_tokenizer(["<unk>", "</s>", word]) for word in ("der", "die")]
    a, b = (a._replace(tokenizer=tokenizer) for tokenizer in words)
    with pytest.raises(ValueError, match="token id 2 is 'der' for a and 'die' for b"):
        numerics.compare(a, b, [[0]])
    t5_model = model_of(t5, tiny_t5())
    with pytest.raises(
        ValueError, match="a is an encoder-decoder and b decoder-only: expected two"
    ):
        numerics.compare(t5_model, model_of(decoder, tiny_gpt()), [[0]])
