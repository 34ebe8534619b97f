"""Equinox modules through the adapter: with a stand-in of the library, and with it where it is installed."""

import dataclasses
import importlib.util
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.nets import adapters

VOCAB, DIM = 24, 8
NEW = 9


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Network:
    """A mean up to each token; Equinox takes any pytree for a module."""

    embed: Any
    head: Any

    def __call__(self, tokens: Any) -> Any:  # [step] -> [step, VOCAB]
        x = jnp.cumsum(self.embed[tokens], axis=0)
        return jnp.tanh(x) @ self.head


def network(seed: int) -> Network:
    a, b = jax.random.split(jax.random.key(seed))
    return Network(jax.random.normal(a, (VOCAB, DIM)), jax.random.normal(b, (DIM, VOCAB)))


def own_text(module: Network, prompt: list[int]) -> list[int]:
    row = list(prompt)
    for _ in range(NEW):
        row.append(int(module(jnp.array(row))[-1].argmax()))
    return row[len(prompt) :]


@pytest.fixture
def equinox(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adapter uses of Equinox."""
    if importlib.util.find_spec("equinox"):
        return
    module = ModuleType("equinox")
    vars(module).update(
        is_array=lambda x: isinstance(x, jax.Array),
        partition=lambda tree, keep: (tree, None),  # all leaves of `Network` are arrays
        combine=lambda params, static: params,
    )
    monkeypatch.setitem(sys.modules, "equinox", module)


@pytest.mark.usefixtures("equinox")
def test_speculative_text_is_that_of_whole_passes():
    module = network(0)
    target = adapters.from_equinox(module, VOCAB)
    draft = adapters.from_equinox(network(1), VOCAB)
    rows = [[3, 1, 4], [2], [5, 5, 1, 9, 8], [7, 2]]
    for drafter in (None, draft, drafters.prompt_lookup()):
        for prompts in (rows, rows[:1]):
            options = {"gamma": 3, "max_new_tokens": NEW, "eos_ids": ()}
            out = jaxspec.generate(target, prompts, drafter=drafter, **options)
            assert [text.tolist() for text in out.tokens] == [own_text(module, p) for p in prompts]
    assert target.name == "Network"
