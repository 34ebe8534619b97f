"""A model that is not what decoding expects is named, with what is wrong, and does not decode as if
it were.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec.core import LanguageModel
from jaxspec.decode import causality
from jaxspec.nets import adapters, decoder, t5
from jaxspec.testing import check_model, table_model
from jaxspec.testing.model_check import WAYS

VOCAB, DIM = 11, 8
PROMPT = [[3, 1, 4], [1, 5]]


def params(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = {"embed": (VOCAB, DIM), "query": (DIM, DIM), "head": (DIM, VOCAB)}
    drawn = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return drawn | {"query": 0.1 * drawn["query"]}  # so that attention is spread out


def attend(params, x, memory, visible):
    scores = jnp.einsum("btd,bsd->bts", x @ params["query"], memory)
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1)
    return jnp.einsum("bts,bsd->btd", weights, memory) @ params["head"]


def without_cache(params, tokens, mask=lambda step: jnp.tri(step, dtype=bool)):
    x = params["embed"][tokens]
    return attend(params, x, x, mask(tokens.shape[1])[None])


def over_the_batch(params, tokens):
    logits = without_cache(params, tokens)
    return logits - jnp.mean(logits, axis=0, keepdims=True)


def cached(params, cache, tokens, positions, *, at=lambda x: x, last=lambda x: x, spread=1):
    """Attention with a cache: `at` says where entries are written, `last` which one a token sees
    last.
    """
    x = params["embed"][tokens] * spread
    cache = cache.at[jnp.arange(tokens.shape[0])[:, None], at(positions)].set(x)
    visible = jnp.arange(cache.shape[1])[None, None] <= last(positions)[:, :, None]
    return attend(params, x, cache, visible), cache


def by_width(params, cache, tokens, positions):
    return cached(
        params, cache, tokens, positions, spread=jnp.sqrt(tokens.shape[1]).astype(jnp.float32)
    )


def running_sum(params, cache, tokens, positions):
    total = cache[:, None] + jnp.cumsum(params["embed"][tokens], axis=1)
    return total @ params["head"], total[:, -1]


def empty(batch, capacity):
    return jnp.zeros((batch, capacity, DIM))


def last_of_the_pass(positions):
    return jnp.broadcast_to(positions[:, -1:], positions.shape)


def of_the_first_row(positions):
    return jnp.broadcast_to(positions[:1], positions.shape)


def everything_written(positions):
    return jnp.full_like(positions, 10_000)


def shifted(params, tokens):
    """Place t predicts token t, from those before it, as in flax's example lm1b."""
    return without_cache(params, jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1])


def read_ahead(params, tokens):
    return shifted(params, jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=1))[:, 1:]


WINDOW = 9


def windowed(params, cache, tokens, positions, *, in_the_pass):
    """Attention to the last WINDOW entries, which a pass of several tokens counts from its own
    beginning, or not.
    """
    x = params["embed"][tokens]
    cache = cache.at[jnp.arange(tokens.shape[0])[:, None], positions].set(x)
    entry = jnp.arange(cache.shape[1])[None, None]
    visible = entry <= positions[:, :, None]
    is_counted_in_pass = in_the_pass and tokens.shape[1] > 1  # Tunix' Gemma 3
    place = jnp.arange(tokens.shape[1])[None, :] if is_counted_in_pass else positions
    return attend(params, x, cache, visible & (entry > (place - WINDOW)[:, :, None])), cache


OWN = {
    "shifted": dict(apply=shifted),
    "read ahead": dict(apply=read_ahead),
    "a window": dict(apply=functools.partial(windowed, in_the_pass=False), empty_cache=empty),
    "a window of the pass": dict(
        apply=functools.partial(windowed, in_the_pass=True), empty_cache=empty
    ),
    "attention": dict(apply=without_cache),
    "cached attention": dict(apply=cached, empty_cache=empty),
    "both ways": dict(
        apply=functools.partial(without_cache, mask=lambda step: jnp.ones((step, step), bool))
    ),
    "one ahead": dict(
        apply=functools.partial(without_cache, mask=lambda step: jnp.tri(step, k=1, dtype=bool))
    ),
    "over the batch": dict(apply=over_the_batch),
    "the pass's last entry": dict(
        apply=functools.partial(cached, last=last_of_the_pass), empty_cache=empty
    ),
    "the first row's entry": dict(
        apply=functools.partial(cached, at=of_the_first_row, last=of_the_first_row),
        empty_cache=empty,
    ),
    "all entries": dict(
        apply=functools.partial(cached, last=everything_written), empty_cache=empty
    ),
    "by the width of a pass": dict(apply=by_width, empty_cache=empty),
    "a running sum": dict(
        apply=running_sum, empty_cache=lambda batch, capacity: jnp.zeros((batch, DIM))
    ),
}


def own(name):
    return jaxspec.Model(adapters.from_function(vocab_size=VOCAB, **OWN[name]), params())


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("attention", []),
        ("cached attention", []),
        ("shifted", ["own token"]),
        ("read ahead", []),
        ("a window", []),
        ("a window of the pass", ["windows"]),
        ("both ways", ["causality", "padding", "cache", "one pass"]),
        ("over the batch", ["batch"]),
        ("the first row's entry", ["ragged rows"]),
        ("a running sum", ["cache", "rewinds"]),
        pytest.param(
            "one ahead", ["causality", "padding", "cache", "one pass"], marks=pytest.mark.slow
        ),
        pytest.param(
            "the pass's last entry",
            ["causality", "padding", "cache", "one pass"],
            marks=pytest.mark.slow,
        ),
        pytest.param("all entries", ["causality", "padding", "rewinds"], marks=pytest.mark.slow),
        pytest.param("by the width of a pass", ["cache", "one pass"], marks=pytest.mark.slow),
    ],
)
def test_what_is_wrong_with_a_model_is_named(name, ways):
    if not ways:
        assert max(check_model(own(name), longest=32).values()) < 1e-6
        return
    with pytest.raises(ValueError, match="the model is not what decoding expects") as caught:
        check_model(own(name), longest=32)
    named = re.findall(r"^- (.*) \(logits differ by", str(caught.value), re.MULTILINE)
    assert named == sorted(named, key=list(WAYS).index) and set(ways) <= set(named)
    assert named[0] == ways[0]


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [False, True], ids=["decoder", "encoder-decoder"])
def test_a_table_model_is_what_decoding_expects(encoder):
    ways = check_model(table_model(jax.random.key(0), vocab=5, encoder=encoder))
    # no difference is measured: a network that shifts its input is refused
    refused_before = {"own token"}
    without = {"padding", "cache"} if encoder else set()
    assert max(ways.values()) == 0
    assert set(ways) == set(WAYS) - refused_before - without


@pytest.mark.slow
def test_a_tree_whose_nodes_see_their_siblings_is_named():
    model = table_model(jax.random.key(0), vocab=5, order=2)

    def extend(params, cache, tokens, parent=None, real=None):
        chain = (
            None
            if parent is None
            else jnp.broadcast_to(jnp.arange(parent.shape[1]) - 1, parent.shape)
        )
        return model.lm.extend(params, cache, tokens, chain)

    with pytest.raises(ValueError, match="expects:\n- trees"):
        check_model(model._replace(lm=model.lm._replace(extend=extend)))


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize(
    "name", ["both ways", "the pass's last entry", "all entries", "a running sum"]
)
def test_a_model_that_is_not_causal_does_not_decode(name, drafts):
    model = own(name)
    with pytest.raises(causality.NotCausal, match="is not causal: its logits after"):
        jaxspec.prepare(model, PROMPT, drafter=model if drafts else None, max_new_tokens=4)


def test_a_model_that_is_not_causal_is_not_scored():
    with pytest.raises(causality.NotCausal, match=r"is not causal: .*check_model\(model\)"):
        jaxspec.score(own("both ways"), [PROMPT[0]])


@pytest.mark.parametrize("name", ["attention", "cached attention"])
def test_a_causal_model_is_tried_once(name, monkeypatch):
    tries = []
    look_ahead = causality.look_ahead
    monkeypatch.setattr(
        causality, "look_ahead", lambda *given: tries.append(1) or look_ahead(*given)
    )
    causality._passed.cache_clear()
    prepared = jaxspec.prepare(own(name), PROMPT, drafter=own(name), max_new_tokens=4)
    prepared.replace(gamma=2)
    jaxspec.prepare(own(name), PROMPT, max_new_tokens=4)
    assert tries == [1]


def test_networks_of_jaxspec_are_not_tried(monkeypatch):
    monkeypatch.setattr(causality, "look_ahead", None)
    shape = dict(vocab_size=VOCAB, dim=DIM, ff_dim=DIM, heads=2)
    assert decoder.language_model(decoder.gpt_config(layers=1, **shape)).is_causal
    assert decoder.language_model(
        decoder.decoder_config(layers=1, kv_heads=1, head_dim=4, **shape)
    ).is_causal
    t5_shape = t5.T5Config(encoder_layers=1, decoder_layers=1, head_dim=4, **shape)
    assert t5.language_model(t5_shape).is_causal
    jaxspec.prepare(table_model(jax.random.key(0), vocab=VOCAB), PROMPT, max_new_tokens=4)


@pytest.mark.slow
def test_a_model_of_half_precision_is_not_refused_for_its_rounding():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    model = jaxspec.Model(adapters.from_function(without_cache, vocab_size=VOCAB), narrow)
    assert max(check_model(model).values()) < 2e-2
    jaxspec.prepare(model, PROMPT, max_new_tokens=4)


def functions(prefill, extend):
    return jaxspec.Model(LanguageModel(prefill, extend, lambda cache, length: cache, VOCAB), {})


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (
            functions(lambda *given: None, None),
            TypeError,
            r"prefill returned NoneType: expected \(core.Forward",
        ),
        (
            functions(
                lambda p, prompt, n: (
                    jaxspec.core.Forward(jnp.zeros((8, VOCAB)), None),
                    prompt.length,
                ),
                None,
            ),
            ValueError,
            r"prefill returned logits of shape \(8, 11\) for 8 rows: expected \[batch, step, vocab\] = \(8, 1, 11\)",
        ),
        (
            functions(
                lambda p, prompt, n: (
                    jaxspec.core.Forward(jnp.zeros((8, 1, VOCAB)), None),
                    prompt.length,
                ),
                lambda p, cache, tokens, real: (
                    jaxspec.core.Forward(jnp.zeros((8, 3, VOCAB)), None),
                    cache[:, None],
                ),
            ),
            ValueError,
            r"extend of the model returned a cache of shape \(8, 1\) and dtype int32: expected \(8,\)",
        ),
    ],
)
def test_wrong_shapes_of_own_functions_are_named(model, error, message):
    for use in (check_model, lambda model: jaxspec.prepare(model, PROMPT)):
        with pytest.raises(error, match=message):
            use(model)


def test_a_module_that_shifts_its_input_does_not_decode():
    with pytest.raises(
        causality.ShiftsInput,
        match=r"do not depend on it: the module shifts .*\)\[:, 1:\], vocab_size.*check_model",
    ):
        jaxspec.prepare(own("shifted"), PROMPT, max_new_tokens=4)
    jaxspec.prepare(own("read ahead"), PROMPT, max_new_tokens=4)


@pytest.mark.parametrize(
    "apply", [lambda params, tokens: jnp.zeros((*tokens.shape, VOCAB), jnp.float32) + params]
)
def test_a_model_that_ignores_everything_decodes(apply):
    """A unigram, or a head that is still zero: it shifts nothing."""
    model = jaxspec.Model(
        adapters.from_function(apply, vocab_size=VOCAB),
        jnp.arange(VOCAB, dtype=jnp.float32)[None, None],
    )
    jaxspec.prepare(model, PROMPT, max_new_tokens=4)
    check_model(model, longest=8)


def test_what_was_not_tried_is_said():
    assert check_model(own("a window")).not_tried == ["token trees: the model takes none"]
    windows, trees = check_model(own("cached attention"), longest=32).not_tried
    assert windows.startswith(
        "windows of 32 tokens and more: the first token of such a row still counts (longest=128"
    )
    limited = adapters.from_function(without_cache, vocab_size=VOCAB, max_positions=40)
    assert check_model(jaxspec.Model(limited, params())).not_tried == [trees]

    def of_sixteen(params, tokens):
        return without_cache(params, tokens) + jnp.zeros((1, 24, 1))[:, : tokens.shape[1]]

    undeclared = adapters.from_function(of_sixteen, vocab_size=VOCAB)
    failed, _ = check_model(jaxspec.Model(undeclared, params())).not_tried
    assert (
        failed.startswith("rows of more than 8 tokens: reading 32 raised")
        and "Give max_positions" in failed
    )


def test_a_sequence_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="length is 4: expected at least 5"):
        check_model(own("attention"), length=4)
    short = adapters.from_function(without_cache, vocab_size=VOCAB, max_positions=8)
    with pytest.raises(ValueError, match="length is 8, and the model has 8 positions"):
        check_model(jaxspec.Model(short, params()))
