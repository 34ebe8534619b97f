"""An int8 or int4 copy of the target as its drafter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, sharding
from jaxspec.nets import axes_of, net_of
from jaxspec.weights import quantisation
from tests.drafters.test_self_speculative import V, target_of


def wide(name, dtype="float32"):
    target = target_of(name)
    config = dataclasses.replace(target.config, dtype=dtype)
    return target._replace(lm=net_of(config).language_model(config), config=config)


@pytest.mark.parametrize(("name", "bits"), [("decoder", 8), ("t5", 8), ("decoder", 4)])
def test_text_is_the_unrounded_targets(name, bits):
    """In greedy text most draft tokens are accepted, and those that the rounding changes are put
    right.
    """
    target = wide(name)
    drafter = drafters.quantised(target, bits=bits)
    prompt = jaxspec.Prompt(jnp.array([[1, 2, 1, 0], [2, 1, 0, 0]]), jnp.array([4, 2]))
    options = dict(
        max_new_tokens=12,
        temperature=np.array([0, 1], np.float32),
        key=jax.random.key(0),
        eos_ids=(),
    )
    plain = jaxspec.generate(target, prompt, **options)
    out = jaxspec.generate(target, prompt, drafter=drafter, rule=jaxspec.rules.coupled(), **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.accepted[0] > out.stats.drafted[0] / 2 > 0


def test_encoder_is_the_targets_and_nothing_else_is_float():
    """Of an encoder-decoder the decoder's matrices are int8, and the encoder's are the very arrays
    of the target.
    """
    target = wide("t5")
    copy = drafters.quantised(target).models[0]
    encoder = target.lm.encoder.params(target.params)
    ours = copy.lm.encoder.params(copy.params)
    assert all(a is b for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(encoder), strict=True))
    expected = {
        name: x for name, x in quantisation.quantise(target.params).items() if name not in encoder
    }
    rest = {name: copy.params[name] for name in expected}
    assert len(rest) + len(encoder) == len(copy.params) and quantisation.has_quantised(rest)
    jax.tree.map(np.testing.assert_array_equal, rest, expected)
    assert copy.lm.encoder.is_shared


def test_compute_mesh_and_a_name_on_the_command_line():
    target = wide("decoder")
    assert drafters.quantised(target, compute="bfloat16").models[0].config.dtype == "bfloat16"
    copy = drafters.by_name("quantised", target)
    assert copy.config == target.config and quantisation.has_quantised(copy.params)
    assert (
        quantisation.dtype_of(drafters.by_name("quantised(bits=4)", target).params, "float32")
        == "int4"
    )
    trimmed = drafters.by_name("trim_vocabulary(quantised, size=2)", target)
    assert trimmed.params.to_target.tolist() == [0, 1]
    mesh = sharding.mesh("data=1,model=1")
    placed = target._replace(
        params=jax.device_put(
            target.params, sharding.parameters(target.params, axes_of(target.config), mesh)
        )
    )
    params = drafters.quantised(placed).params
    assert [x.sharding for x in jax.tree.leaves(params)] == jax.tree.leaves(
        sharding.parameters(params, axes_of(target.config), mesh)
    )


def test_what_has_no_wider_matrices_is_refused():
    target = wide("decoder")
    with pytest.raises(ValueError, match="has int8 matrices already"):
        drafters.quantised(drafters.quantised(target).models[0])
    with pytest.raises(ValueError, match="no matrices to quantise: expected a network"):
        drafters.quantised(jaxspec.testing.table_model(jax.random.key(0), V))
    with pytest.raises(ValueError, match="bits is 3: expected 8 or 4"):
        drafters.quantised(target, bits=3)
    with pytest.raises(ValueError, match="compute is 'int8'"):
        drafters.quantised(target, compute="int8")
