"""Caches are updated in place: XLA copies those of a conditional, and, on a CPU, what is written
for two readers.
"""

import functools
import re

import jax
import pytest

from jaxspec import DraftHead, drafters, nets, policies
from jaxspec.core import BoundDrafter, Model
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.draft_heads import eagle, kind_of
from jaxspec.nets import decoder, t5
from tests.marks import marked


@functools.cache
def gpt_model(layers: int) -> Model:
    config = decoder.gpt_config(17, dim=15, ff_dim=32, layers=layers, heads=3, max_positions=64)
    return Model(
        decoder.language_model(config), decoder.init(config, jax.random.key(layers)), config=config
    )


def t5_model(seed: int) -> Model:
    config = t5.T5Config(17, 16, 32, 2, 8, 1, 1)
    return Model(t5.language_model(config), t5.init(config, jax.random.key(seed)), config=config)


def eagle_head() -> tuple[Model, BoundDrafter]:
    """A decoder with an EAGLE head, which feeds its own cache the pair that prefill leaves open."""
    shape = decoder.decoder_config(17, 16, ff_dim=32, layers=2, heads=2, kv_heads=2, head_dim=8)
    target = Model(
        decoder.language_model(shape), decoder.init(shape, jax.random.key(0)), config=shape
    )
    config = eagle.EagleConfig(nets.replace(shape, layers=1), 16)
    kind = kind_of(config)
    head = DraftHead(kind.head(config), kind.init(config, jax.random.key(1)))
    return target, kind.drafter(head, target, None)


def gpts(drafter_of=lambda target, draft: draft):
    """A target of two layers and a drafter that is made of it and of a model of one layer."""
    target = gpt_model(2)
    return target, drafter_of(target, gpt_model(1))


ADAPTIVE = policies.adaptive(together="slots")
CASES = {
    "plain": (lambda: gpts(lambda target, draft: None), None),
    "a model": (gpts, None),
    "a model, adaptive": (gpts, ADAPTIVE),
    "a model, adaptive, with an encoder": (lambda: (t5_model(seed=2), t5_model(seed=1)), ADAPTIVE),
    "prompt_lookup": (lambda: gpts(lambda target, draft: drafters.prompt_lookup()), None),
    "a tree, adaptive": (
        lambda: gpts(lambda target, draft: drafters.tree(draft, (2, 1))),
        ADAPTIVE,
    ),
    "early_exit, adaptive": (
        lambda: gpts(lambda target, draft: drafters.early_exit(target, 1)),
        ADAPTIVE,
    ),
    "cascade, adaptive": (
        lambda: gpts(lambda target, draft: drafters.cascade(draft, drafters.prompt_lookup())),
        ADAPTIVE,
    ),
    "EAGLE, adaptive": (eagle_head, ADAPTIVE),
}


QUICK = {("a model", 3), ("a model, adaptive", 1), ("a tree, adaptive", 3)}
PAIRS = [(case, rows) for case in CASES for rows in (1, 3)]
SELDOM = {(case, 1) for case in CASES} - QUICK  # a row alone is copied where three are


@pytest.mark.parametrize(("case", "rows"), marked(PAIRS, slow={*PAIRS} - QUICK, exhaustive=SELDOM))
def test_no_cache_is_copied(case, rows):
    models, policy = CASES[case]
    target, drafter = models()
    prompts = [[3, 1, 4]] * rows
    prepared = prepare(
        target, prompts, drafter=drafter, policy=policy, gamma=3, max_new_tokens=8, eos_ids=()
    )
    state = jax.eval_shape(lambda: loop.prefill(prepared))
    lowered = loop.finish.lower(prepared.decoder, prepared.weights, state, prepared.max_new_tokens)
    text = lowered.compile().as_text()
    entry = text.index("ENTRY ")
    in_loops = text[:entry] + text[text.index("\n}", entry) :]
    caches = {leaf.shape for leaf in jax.tree.leaves(state.caches) if leaf.ndim == 4}
    copied = {
        tuple(map(int, sizes.split(",")))
        for sizes in re.findall(r"= f32\[([\d,]+)\]\S* copy\(", in_loops)
    }
    assert caches and not caches & copied
