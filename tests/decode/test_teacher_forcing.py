"""The gradient of a rollout's log probabilities is that of a pass over the finished rows, whatever
drafted them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Preceding, Prompt, chunks, token_rows
from jaxspec.decode import loop
from jaxspec.draft_heads import medusa
from jaxspec.drafters.hidden_states import DraftHead
from jaxspec.nets import adapters, decoder, t5
from jaxspec.testing import table_model
from tests.decode.test_log_probs import forced_logits
from tests.small import between, characters, random_params, tiny_llama, tiny_t5

VOCAB, TOP, NEAR = 7, 2, 1e-4
TABLE = table_model(jax.random.key(1), VOCAB, order=1)
BLEND = between(TABLE, table_model(jax.random.key(2), VOCAB, order=1), 0.7)
WEIGHTS = jnp.array([1.0, -0.5, 0.25])  # of raw, sampled and top_raw in what is differentiated


def total(values, length):
    """A sum over real tokens that gives each its own weight, so that no error of one hides
    another's.
    """
    raw, sampled, top_raw = values
    place = jnp.arange(raw.shape[1])[None, :]
    weight = jnp.where(place < length[:, None], jnp.cos(1.0 + place.astype(jnp.float32)), 0.0)
    of_tokens = WEIGHTS[0] * raw + WEIGHTS[1] * sampled + WEIGHTS[2] * jnp.sum(top_raw, axis=-1)
    return jnp.sum(jnp.where(weight != 0, weight * of_tokens, 0.0))


def of_rollout(prepared, params):
    out = jaxspec.rollout(prepared, weights=prepared.weights._replace(target=params))
    reports = out.log_probs
    return total((reports.raw, reports.sampled, reports.top_raw), out.length)


@functools.partial(jax.jit, static_argnames=("lm", "sampler", "size"))
def by_hand(lm, sampler, size, params, prompt, sampling_params, new, length, top_tokens):
    """The same sum from logits of a plain pass, each place's distribution made by itself."""
    logits = forced_logits(lm, params, prompt, new)
    begun = token_rows.decoder_prompt(lm, prompt)
    row = token_rows.append(jnp.pad(begun.tokens, ((0, 0), (0, new.shape[1]))), begun.length, new)
    places = []
    for place in range(size):
        here, is_real = logits[:, place : place + 1], place < length
        after = Preceding(Prompt(row, begun.length + jnp.where(is_real, place, 0)), begun.length)
        distribution = sampler(sampling_params, jnp.where(is_real[:, None, None], here, 0.0), after)
        of_tokens = jax.nn.log_softmax(here[:, 0])
        raw = jnp.take_along_axis(of_tokens, new[:, place, None], axis=-1)[:, 0]
        best = jnp.take_along_axis(of_tokens, top_tokens[:, place], axis=-1)
        if distribution.tokens is not None:
            sampled = jnp.zeros_like(raw)  # a point mass does not move
        else:
            sampled = jnp.take_along_axis(
                distribution.log_probs[:, 0], new[:, place, None], axis=-1
            )[:, 0]
        places.append((raw, jnp.where(jnp.isfinite(sampled), sampled, 0.0), best))
    return total([jnp.stack(values, axis=1) for values in zip(*places, strict=True)], length)


def check(prepared):
    """Compares the two gradients; returns that of a rollout."""
    out = jaxspec.rollout(prepared)
    prompt = token_rows.repeat_rows(prepared.prompt, len(out.length) // len(prepared.prompt.length))
    arguments = (
        prompt,
        prepared.request.sampling_params,
        out.tokens,
        out.length,
        out.log_probs.top_tokens,
    )
    size = int(np.max(out.length))
    plain = functools.partial(by_hand, prepared.target.lm, prepared.sampler, size)
    value, expected = jax.value_and_grad(plain)(prepared.weights.target, *arguments)
    rollout_value, gradient = jax.value_and_grad(functools.partial(of_rollout, prepared))(
        prepared.weights.target
    )
    np.testing.assert_allclose(rollout_value, value, rtol=1e-4, atol=NEAR)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=NEAR), gradient, expected)
    size_of_gradient = sum(float(jnp.sum(jnp.abs(x))) for x in jax.tree.leaves(gradient))
    assert size_of_gradient > 1.0
    return gradient


SAMPLING = dict(max_new_tokens=[5, 8], top_log_probs=TOP, key=jax.random.key(3))
PENALTIES = dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, banned=[2])


@pytest.mark.parametrize(
    "options",
    [
        dict(drafter=BLEND, temperature=0.7, top_p=0.9),
        dict(drafter=drafters.tree(BLEND, (2, 1)), temperature=[0.0, 0.9], min_p=0.05, **PENALTIES),
        dict(drafter=None, temperature=0.0),
    ],
    ids=["truncated", "a tree, penalties, one row greedy", "greedy"],
)
def test_the_gradient_is_that_of_teacher_forcing(options):
    check(jaxspec.prepare(TABLE, [[3, 1], [2]], gamma=3, eos_ids=[6], **SAMPLING | options))


def test_several_samples_of_a_prompt_add_up_also_under_jit_and_vmap():
    options = dict(drafter=BLEND, gamma=3, temperature=1.0, num_samples=2, max_new_tokens=6)
    prepared = jaxspec.prepare(TABLE, [[3, 1], [2]], **SAMPLING | options)
    gradient = check(prepared)
    keys = jnp.stack([jax.random.key(3)] * 2)

    @jax.jit
    def mean(params):
        def of_key(key):
            out = jaxspec.rollout(
                prepared, weights=prepared.weights._replace(target=params), key=key
            )
            return total(
                (out.log_probs.raw, out.log_probs.sampled, out.log_probs.top_raw), out.length
            )

        return jnp.mean(jax.vmap(of_key)(keys))

    np.testing.assert_allclose(jax.grad(mean)(TABLE.params), gradient, atol=NEAR)


def test_of_networks_and_heads():
    config = tiny_llama(VOCAB, window=3)
    lm = decoder.language_model(config)
    target = jaxspec.Model(lm, random_params(decoder.init, config, 1, 0.6), config=config)
    heads = medusa.HeadsConfig(VOCAB, config.dim, heads=2)
    network = DraftHead(medusa.KIND.head(heads), random_params(medusa.KIND.init, heads, 4, 0.3))
    drafter = medusa.KIND.drafter(network, target, None)
    check(
        jaxspec.prepare(
            target, [[3, 1, 4, 2, 5], [2]], drafter=drafter, temperature=0.8, **SAMPLING
        )
    )


@pytest.mark.slow
def test_of_an_encoder_decoder():
    config = tiny_t5(VOCAB)
    target = jaxspec.Model(
        t5.language_model(config), random_params(t5.init, config, 2, 0.6), config=config
    )
    check(jaxspec.prepare(target, [[3, 1, 4], [2]], temperature=0.8, **SAMPLING, **PENALTIES))


@pytest.mark.slow
def test_of_prompts_that_are_read_in_chunks():
    config = tiny_llama(VOCAB, window=3)
    target = jaxspec.Model(
        decoder.language_model(config), random_params(decoder.init, config, 1, 0.6), config=config
    )
    long = np.random.default_rng(0).integers(0, VOCAB, chunks.LONGEST + 9).tolist()
    prepared = jaxspec.prepare(target, [long, [2]], temperature=0.8, **SAMPLING)
    out, row = jaxspec.rollout(prepared), jnp.asarray(long)

    def whole(params):
        """Of the long row alone, in one pass without chunks."""
        tokens = jnp.concatenate([row, out.tokens[0, : out.length[0]]])[None]
        logits = decoder_logits(config, params, tokens)[0, len(long) - 1 : -1]
        values = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.take_along_axis(values, tokens[0, len(long) :, None], axis=1))

    def of_row(params):
        report = jaxspec.rollout(
            prepared, weights=prepared.weights._replace(target=params)
        ).log_probs
        return jnp.sum(report.raw[0])

    expected, gradient = jax.grad(whole)(target.params), jax.grad(of_row)(target.params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-3), gradient, expected)


def decoder_logits(config, params, tokens):
    return decoder.DecoderNet(config).apply({"params": params}, tokens)


def test_of_structured_output_places_after_the_end_count_for_nothing():
    """A row whose automaton allows nothing after its end: garbage there must not make the gradient
    NaN.
    """
    tokenizer = characters()
    table = table_model(jax.random.key(5), len(tokenizer), order=1)._replace(tokenizer=tokenizer)
    options = dict(regex="[0-3]{2,4}", eos_ids=[1], temperature=1.0, max_new_tokens=8)
    check(jaxspec.prepare(table, [[3, 4], [5]], drafter=table, gamma=3, **SAMPLING | options))


def test_the_values_of_the_sampler_have_a_gradient_too():
    prepared = jaxspec.prepare(
        TABLE, [[3, 1], [2]], drafter=BLEND, gamma=3, temperature=0.7, **SAMPLING
    )

    def of_temperature(value):
        params = prepared.request.sampling_params._replace(temperature=jnp.full(2, value))
        request = prepared.request._replace(sampling_params=params)
        return jnp.sum(jaxspec.rollout(prepared._replace(request=request)).log_probs.sampled)

    near = 1e-2
    # of the same tokens
    slope = (of_temperature(0.7 + near) - of_temperature(0.7 - near)) / (2 * near)
    np.testing.assert_allclose(jax.grad(of_temperature)(0.7), slope, rtol=0.02)


def test_a_drafter_has_no_gradient_and_tokens_have_none():
    prepared = jaxspec.prepare(
        TABLE, [[3, 1], [2]], drafter=BLEND, gamma=3, temperature=0.7, **SAMPLING
    )

    def of_draft(params):
        report = jaxspec.rollout(
            prepared, weights=prepared.weights._replace(draft=params)
        ).log_probs
        return jnp.sum(report.sampled)

    assert not jax.grad(of_draft)(BLEND.params).any()


def test_a_target_that_cannot_be_differentiated_is_refused():
    def extend(params, tokens):
        start = (jnp.zeros((), jnp.int32), params)
        _, table = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 1.1 * c[1]), start)
        return table[tokens]

    target = jaxspec.Model(
        adapters.from_function(extend, vocab_size=VOCAB), TABLE.params.reshape(-1, VOCAB)[:VOCAB]
    )
    prepared = jaxspec.prepare(target, [[3, 1], [2]], temperature=1.0, **SAMPLING)
    assert jnp.isfinite(of_rollout(prepared, target.params))
    with pytest.raises(
        ValueError,
        match="the target's pass over the finished rows cannot be differentiated: Reverse",
    ):
        jax.grad(functools.partial(of_rollout, prepared))(target.params)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(functools.partial(of_rollout, prepared), (target.params,), (target.params,))


def test_without_a_gradient_nothing_is_computed_for_it():
    """The program of a rollout that is not differentiated is that of a generation."""
    prepared = jaxspec.prepare(
        TABLE, [[3, 1], [2]], drafter=BLEND, gamma=3, temperature=0.7, **SAMPLING
    )
    p = prepared

    def plain(weights):
        return loop.generation(p.decoder, weights, p.prompt, p.request, p.max_new_tokens, p.before)

    def rolled(weights):
        return jaxspec.rollout(prepared, weights=weights)

    operations = [
        jax.jit(function).lower(prepared.weights).compile().as_text().count(" = ")
        for function in (plain, rolled)
    ]
    assert operations[0] == operations[1] > 100
