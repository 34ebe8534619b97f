"""Random weights at a published shape."""

import jax.numpy as jnp

from jaxspec.analysis.measure import synthetic
from jaxspec.families import t5
from jaxspec.nets.t5 import T5Config

TINY_T5 = T5Config(64, dim=16, ff_dim=16, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1)


def test_bfloat16_shapes(monkeypatch):
    monkeypatch.setitem(t5.SIZES, "tiny-t5", TINY_T5)
    model = synthetic.random_model("tiny-t5", "bfloat16", seed=0)
    assert model.config.dtype == "bfloat16"
    assert model.params["embedding"]["embedding"].dtype == jnp.bfloat16


def test_int8_shapes(monkeypatch):
    monkeypatch.setitem(t5.SIZES, "tiny-t5", TINY_T5)
    model = synthetic.random_model("tiny-t5", "int8", seed=0)
    assert model.config.dtype == "float32"
    assert model.params["embedding"]["embedding"]["int8"].shape == (64, 16)
