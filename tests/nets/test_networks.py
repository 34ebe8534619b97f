"""The table of networks is the one place that knows configurations apart."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import nets
from jaxspec.core import Prompt, Room
from jaxspec.nets.network import Load
from jaxspec.nets.stack import init_params
from jaxspec.weights.hf_families import FAMILIES

PACKAGE = Path(jaxspec.__file__).parent
ASKED = ("isinstance", "getattr", "hasattr")


def questions(source: str) -> list[int]:
    """The lines that ask a configuration for its type, or for a field that it may lack.

    A file may tell apart what it defines itself.
    """
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
            named = {
                x.id
                for other in node.comparators
                for x in ast.walk(other)
                if isinstance(x, ast.Name)
            }
            lines += [node.lineno] * any(name.endswith("Config") for name in named - own)
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ASKED
            and node.args
        ):
            continue
        names = {x.id for arg in node.args[1:] for x in ast.walk(arg) if isinstance(x, ast.Name)}
        names |= {
            x.attr for arg in node.args[1:] for x in ast.walk(arg) if isinstance(x, ast.Attribute)
        }
        types = {name for name in names if name.endswith("Config")}
        subject = ast.unparse(node.args[0])
        fields = node.func.id in ("getattr", "hasattr") and subject.split(".")[-1].endswith(
            "config"
        )
        if (types - own) or fields:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("isinstance(config, T5Config)", [1]),
        ("x = 1\nisinstance(model.config, decoder.DecoderConfig | T5Config)", [2]),
        ('getattr(target.config, "dtype", "float32")', [1]),
        ('hasattr(config, "end_tokens")', [1]),
        ("class ToyConfig: ...\nisinstance(model.config, ToyConfig)", []),
        ('getattr(model.tokenizer, "eos", None)', []),
        ("config.dtype", []),
        ("type(config) is T5Config", [1]),
        ("class ToyConfig: ...\ntype(config) is ToyConfig", []),
    ],
)
def test_questions_are_found(source: str, expected: list[int]):
    assert questions(source) == expected


def test_nothing_outside_of_nets_asks_a_configuration_what_it_is():
    files = [
        file
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.relative_to(PACKAGE).parts[0] != "nets"
    ]
    asking = {
        str(file.relative_to(PACKAGE)): questions(file.read_text(encoding="utf-8"))
        for file in files
    }
    assert {name: lines for name, lines in asking.items() if lines} == {}


SIZES = {name: config for family in FAMILIES for name, config in family.sizes.items()}


@pytest.mark.parametrize("name", ["t5-small", "gpt-97m", "gemma-3-270m", "qwen2.5-0.5b"])
def test_amounts_are_those_of_the_whole_network(name):
    """`total` adds up small networks; parameters and caches of the whole one are traced here."""
    config = dataclasses.replace(SIZES[name], dtype="bfloat16")
    network, row = nets.net_of(config), 700
    params = jax.eval_shape(lambda: network.init(config, jax.random.key(0)))
    count = network.total(
        config,
        lambda piece: sum(math.prod(x.shape) for x in jax.tree.leaves(network.shapes(piece))),
    )
    assert count == sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    lm = network.language_model(config)
    arrays: Any = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 5), (1,))]
    _, cache = jax.eval_shape(
        lambda p, q: lm.prefill(p, q, Room(row, rewind=0)), params, Prompt(*arrays)
    )
    expected = sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(cache)
        if x.dtype == jnp.bfloat16
    )
    assert network.cache_bytes(config, row, 5, dtypes=jnp.floating) == expected
    assert network.load(config, row=0).cache_bytes == 0
    layers = [
        path for path in params if path.startswith(("layers_", "decoder_")) and path[-1].isdigit()
    ]
    assert network.depth(config) == len(layers)


def test_a_pass_reads_the_union_of_the_experts_that_its_tokens_chose():
    """Against the expectation by counting all choices: 2 tokens, each of 1 expert of 3."""
    load = Load(10, dtype="float32", experts=((1 / 3, 300),))
    chosen = [len({first, second}) for first in range(3) for second in range(3)]
    assert load.bytes_read(2) == pytest.approx(4 * (10 + 100 * sum(chosen) / 9))
    assert load.per_token == 110 and load.weight_bytes == 4 * 310


def test_configurations_of_others_are_of_no_network():
    assert (
        nets.find(None) is None
        and nets.decoder_layers("config") == 0
        and nets.logits_cap(None) is None
    )
    assert nets.dtype_of(None, "bfloat16") == "bfloat16" and nets.axes_of(None).parts == {}
    with pytest.raises(
        TypeError, match="a str is no configuration of a network: expected one of T5Config"
    ):
        nets.net_of("t5")


def test_parameters_are_arrays_drawn_from_shapes_of_inputs():
    class Mixed(nn.Module):
        of_values: bool = False

        @nn.compact
        def __call__(self, x):
            decay = self.param("decay", lambda key: np.linspace(0, 1, 3))
            mean = self.param("mean", lambda key: x.mean() if self.of_values else jnp.zeros(()))
            return nn.Dense(2)(x) + decay.sum() + mean

    x, key = jnp.ones((1, 3)), jax.random.key(0)
    params = init_params(Mixed(), key, x)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    expected = Mixed().init(key, x)["params"]
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    with pytest.raises(ValueError, match="a parameter of Mixed depends on values of its inputs"):
        init_params(Mixed(of_values=True), key, x)
