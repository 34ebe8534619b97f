"""A draft model that drafts at mask tokens, beside passes over whole rows of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import Model, drafters, policies, trace
from jaxspec.core import BoundPolicy, Policy
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.nets import decoder
from jaxspec.nets.delta import DeltaShape
from jaxspec.nets.shapes import FeedForwardShape, LayerShape

MASK, GAMMA, NEW = 3, 4, 14
SIZES = dict(dim=16, ff_dim=16, layers=2, heads=2, kv_heads=1, head_dim=8, max_positions=96)
# a ring, and a layer that sees all
SHAPE = decoder.decoder_config(24, **SIZES, window=5, local=(True, False))
RECURRENT = dataclasses.replace(
    SHAPE,
    layers=(
        LayerShape(DeltaShape(2, 4, key_dim=8, value_dim=12), FeedForwardShape(6)),
        SHAPE.layers[1],
    ),
)
REST = 15  # rounds without a draft: more than a state can go back
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 4]]


@functools.cache
def model(seed, shape=SHAPE):
    return Model(
        decoder.language_model(shape), decoder.init(shape, jax.random.key(seed)), config=shape
    )


@functools.cache
def plain():
    return np.asarray(jaxspec.generate(model(1), PROMPTS, max_new_tokens=NEW, eos_ids=()).tokens)


def rests() -> BoundPolicy:
    """Makes a policy by which the first row drafts nothing in its first rounds, while the others
    draft.
    """

    def max_draft(params, state, gamma, left):
        rounds, row = state
        return jnp.where((row > 0) | (rounds >= REST), gamma, 0)

    def init(params, prompt):
        return jnp.zeros_like(prompt.length), jnp.arange(len(prompt.length))

    return BoundPolicy(
        Policy(init, max_draft, lambda params, state, *outcome: (state[0] + 1, state[1]))
    )


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (SHAPE, {}),
        pytest.param(RECURRENT, dict(policy=rests(), new=2 * REST), marks=pytest.mark.slow),
    ],
    ids=["a window", "a recurrence, rows that rest"],
)
def test_drafts_are_those_of_a_pass_over_the_row_and_masks(shape, options):
    """Ragged rows, round by round: a greedy draft token is the argmax at its place of [row, mask,
    mask, ...].
    """
    target, draft = model(1), model(2, shape)
    new, others = options.get("new", NEW), {name: x for name, x in options.items() if name != "new"}
    drafter = drafters.parallel(draft, MASK, longest=GAMMA)
    prepared = prepare(
        target, PROMPTS, drafter=drafter, gamma=GAMMA, max_new_tokens=new, eos_ids=(), **others
    )
    outcome = loop.run(prepared)
    net = jax.jit(decoder.NETWORK.teach(shape).apply)
    for row, prompt in enumerate(PROMPTS):
        text = np.asarray(outcome.tokens)[row, :new].tolist()
        assert text[:NEW] == plain()[row].tolist()
        rounds = trace.of_row(text, jax.device_get(outcome.trace), row)[1:]
        assert sum(len(step.draft) > 0 for step in rounds) > 3
        for step in rounds:
            committed = [*prompt, *step.before]
            ids = np.full((1, 64), MASK)
            ids[0, : len(committed)] = committed
            best = np.asarray(net({"params": draft.params}, jnp.asarray(ids)))[0].argmax(axis=-1)
            assert step.draft == best[len(committed) - 1 :][: len(step.draft)].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [dict(gamma=1), dict(gamma=6, policy=policies.heuristic(start=1, grow=1))],
    ids=["constant", "heuristic"],
)
def test_text_is_plain_text_whatever_is_drafted(options):
    """The target drafts for itself; with a policy, rounds without a draft leave tokens to be caught
    up with.
    """
    drafter = drafters.fallback(
        drafters.prompt_lookup(), drafters.parallel(model(1), MASK, longest=3)
    )
    out = jaxspec.generate(
        model(1), PROMPTS, drafter=drafter, max_new_tokens=NEW, eos_ids=(), **options
    )
    np.testing.assert_array_equal(out.tokens, plain())


@pytest.mark.parametrize("gamma", [1, 2])
def test_the_first_token_of_a_target_that_drafts_for_itself_is_always_accepted(gamma):
    """It is the model's own: what masks do begins behind it. Where all are accepted, a pass reads
    the most tokens.
    """
    out = jaxspec.generate(
        model(1),
        PROMPTS,
        drafter=drafters.parallel(model(1), MASK),
        gamma=gamma,
        max_new_tokens=NEW,
        eos_ids=(),
    )
    assert (np.asarray(out.stats.rounds) <= (NEW - 1 + 1) // 2).all()


def test_a_mask_token_that_the_model_lacks_is_refused():
    with pytest.raises(ValueError, match="mask_token is 24"):
        drafters.parallel(model(1), 24)
    with pytest.raises(ValueError, match="longest is 0"):
        drafters.parallel(model(1), MASK, longest=0)
    with pytest.raises(ValueError, match=r"mask_token is 3\.5: expected an integer"):
        drafters.parallel(model(1), 3.5)
    with pytest.raises(TypeError, match=r"draft is None: expected a jaxspec\.Model"):
        drafters.parallel(None, MASK)
