"""A network's head by itself gives what its passes give, and a drafter asks it for no more than it
needs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.core import Room
from jaxspec.nets import decoder, t5
from jaxspec.nets.attention import softcap
from tests.marks import marked
from tests.small import random_params

SIZES = dict(dim=16, ff_dim=24)
T5 = t5.T5Config(13, **SIZES, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1)
DECODER = decoder.decoder_config(13, **SIZES, layers=1, heads=2, kv_heads=1, head_dim=8)
NETS = {
    "gpt": (decoder, decoder.gpt_config(13, **SIZES, layers=1, heads=2, max_positions=32)),
    "t5": (t5, T5),
    "t5 1.0": (t5, dataclasses.replace(T5, tied_head=True, scaled_head=True)),
    "t5 tied": (t5, dataclasses.replace(T5, tied_head=True)),
    "t5 scaled": (t5, dataclasses.replace(T5, scaled_head=True)),
    "decoder": (decoder, DECODER),
    "capped": (decoder, dataclasses.replace(DECODER, tied_head=True, logits_cap=2.0)),
}
PROMPT = jaxspec.Prompt(jnp.array([[3, 1, 4], [1, 5, 0]], jnp.int32), jnp.array([3, 2], jnp.int32))


def model(name: str) -> jaxspec.Model:
    net, config = NETS[name]
    return jaxspec.Model(net.language_model(config), random_params(net.init, config, 1))


@pytest.mark.parametrize("name", marked(NETS, slow={*NETS} - {"t5 scaled"}))
def test_the_head_gives_what_a_pass_gives(name):
    """A pass over a prompt gives the features of all tokens, and the logits of the last token of
    each row.
    """
    lm, params = model(name)[:2]

    @jax.jit
    def run(params):
        forward, cache = lm.prefill(params, PROMPT, Room(8))
        wide, _ = lm.extend(params, cache, jnp.array([[2, 7], [1, 8]], jnp.int32))
        ends = jnp.zeros(2, jnp.int32) if lm.limits.start_token is not None else PROMPT.length - 1
        of_last = jnp.take_along_axis(forward.features, ends[:, None, None], axis=1)
        heads = [lm.inside.head(params, features) for features in (of_last, wide.features)]
        return heads, (forward.logits, wide.logits)

    heads, passes = run(params)
    for of_head, logits in zip(heads, passes, strict=True):
        np.testing.assert_allclose(of_head, logits, rtol=1e-5, atol=1e-5)
    assert np.ptp(passes[1]) > 0.1


def test_raw_logits_are_those_before_the_scale_and_the_cap():
    """A trimmed model's head leaves them out, too."""
    config = dataclasses.replace(DECODER, logits_cap=2.0, logits_scale=3.0)
    target = jaxspec.Model(
        decoder.language_model(config), random_params(decoder.init, config, 1), config=config
    )
    features = jax.random.normal(jax.random.key(2), (1, 2, 16))
    for net in (target, jaxspec.trim_vocabulary(target, ids=[2, 5, 7])):
        raw, logits = (net.lm.inside.head(net.params, features, raw=raw) for raw in (True, False))
        finite = jnp.isfinite(logits)
        np.testing.assert_allclose(
            jnp.where(finite, softcap(3 * raw, 2.0), 0), jnp.where(finite, logits, 0), rtol=1e-5
        )
        assert float(jnp.max(jnp.abs(jnp.where(finite, 3 * raw - logits, 0)))) > 0.1


@pytest.mark.slow
def test_a_drafter_asks_for_the_logits_of_one_position():
    """It feeds two tokens to catch up, and draft tokens what follows the second."""
    target, shapes = model("gpt"), []

    def head(params, features):
        shapes.append(features.shape)
        return target.lm.inside.head(params, features)

    draft = target._replace(lm=target.lm._replace(inside=target.lm.inside._replace(head=head)))
    fast = jaxspec.generate(target, PROMPT, drafter=draft, gamma=2, max_new_tokens=9)
    assert set(shapes) == {(2, 1, 16)}
    np.testing.assert_array_equal(
        fast.tokens, jaxspec.generate(target, PROMPT, max_new_tokens=9).tokens
    )
    assert (np.asarray(fast.stats.acceptance_rate) == 1).all()


@pytest.mark.slow
def test_a_model_without_a_head_of_its_own_drafts_the_same():
    target = model("gpt")
    draft = target._replace(lm=target.lm._replace(inside=None))
    options = dict(gamma=3, max_new_tokens=9)
    with_head, without = (
        jaxspec.generate(target, PROMPT, drafter=d, **options) for d in (target, draft)
    )
    np.testing.assert_array_equal(with_head.trace.draft, without.trace.draft)
