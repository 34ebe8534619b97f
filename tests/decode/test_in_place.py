"""Caches are updated in place: XLA copies those of a conditional, and, on a CPU, what is written for two readers."""

import re

import jax
import pytest

import jaxspec
from jaxspec import drafters, policies
from jaxspec.core import Model
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.nets import gpt


def model(layers: int) -> Model:
    config = gpt.GPTConfig(17, dim=15, ff_dim=32, layers=layers, heads=3, max_positions=64)
    return Model(gpt.language_model(config), gpt.init(config, jax.random.key(layers)), config=config)


TARGET, DRAFT = model(2), model(1)
ADAPTIVE = policies.adaptive(together="slots")
SPELLS = jaxspec.map_vocabulary(DRAFT, range(17), 17, [*([n] for n in range(16)), [1, 2]])
CASES = {
    "plain": (None, None),
    "a model": (DRAFT, None),
    "a model, adaptive": (DRAFT, ADAPTIVE),
    "prompt_lookup": (drafters.prompt_lookup(), None),
    "a tree, adaptive": (drafters.tree(DRAFT, (2, 1)), ADAPTIVE),
    "early_exit, adaptive": (drafters.early_exit(TARGET, 1), ADAPTIVE),
    "a model that spells": (SPELLS, None),
    "cascade, adaptive": (drafters.cascade(DRAFT, drafters.prompt_lookup()), ADAPTIVE),
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_no_cache_is_copied(case, rows):
    drafter, policy = CASES[case]
    prompts = [[3, 1, 4]] * rows
    prepared = prepare(TARGET, prompts, drafter=drafter, policy=policy, gamma=3, max_new_tokens=8, eos_ids=())
    state = jax.eval_shape(lambda: loop.begin(prepared))
    lowered = loop.finish.lower(prepared.decoder, prepared.weights, state, prepared.max_new_tokens)
    text = lowered.compile().as_text()
    entry = text.index("ENTRY ")
    in_loops = text[:entry] + text[text.index("\n}", entry) :]
    caches = {leaf.shape for leaf in jax.tree.leaves(state.caches) if leaf.ndim == 4}
    copied = {tuple(map(int, sizes.split(","))) for sizes in re.findall(r"= f32\[([\d,]+)\]\S* copy\(", in_loops)}
    assert caches and not caches & copied
