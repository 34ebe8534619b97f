"""DFlash 2's walk: exact by every rule, in trees too, though most tokens are never proposed; and
what is refused.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Prompt
from jaxspec.draft_heads import dflash2
from jaxspec.draft_heads.training import DraftStep
from jaxspec.rules.catalogue import RULES
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import certify
from jaxspec.weights.tensors import CheckpointError
from tests.draft_heads.test_drafters import DFLASH, V, second, target_of
from tests.marks import marked
from tests.small import random_params

CONFIG = second(DFLASH)  # two candidates of three tokens
PROMPT = Prompt(jnp.array([[1, 0]]), jnp.array([2]))
RULES_FAST = ("rejection",)
RULES_ALL = [name for name, entry in RULES.items() if entry.rule.exact]


@functools.cache
def drafter():
    params = random_params(dflash2.init, CONFIG, 4, 0.6)
    network = jaxspec.DraftHead(dflash2.head(CONFIG), params)
    return drafters.block(network, target_of("decoder", CONFIG.taps))


def off(cold=False, **options):
    """The total variation of the text's distribution from the target's."""
    params = SamplingParams(jnp.zeros(1) if cold else jnp.ones(1), jnp.array([V]), jnp.ones(1))
    options = {
        "drafter": drafter(),
        "steps": 3,
        "sampler": at_temperature(V, True),
        "prompt": PROMPT,
        **options,
    }
    return certify(drafter().target, sampling_params=params, **options)


@pytest.mark.parametrize("name", marked(RULES_ALL, slow={*RULES_ALL} - {*RULES_FAST}))
def test_every_exact_rule_keeps_the_distribution(name):
    assert off(rule=RULES[name].rule, gamma=2) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["best first", "drawn"])
def test_trees_of_its_edges_keep_the_distribution(name):
    tree = {
        "best first": lambda: drafters.dynamic_tree(drafter(), nodes=3, depth=2, width=2),
        "drawn": lambda: drafters.tree(
            drafter(), shape=[(0,), (1,), (0, 0)], draw="without_replacement"
        ),
    }[name]()
    assert max(off(drafter=tree), off(True, drafter=tree)) < 1e-5


@pytest.mark.slow
def test_greedy_text_is_plain_text_by_chains_and_trees():
    rows = [[1, 2], [0], [2, 2, 1]]
    plain = jaxspec.generate(target_of("decoder"), rows, max_new_tokens=12, eos_ids=())
    for one in (drafter(), drafters.dynamic_tree(drafter(), nodes=4, depth=3, width=2)):
        options = {} if one.functions.tree else {"gamma": 3}
        out = jaxspec.generate(
            target_of("decoder"), rows, drafter=one, max_new_tokens=12, eos_ids=(), **options
        )
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        assert out.stats.accepted.sum() > 0


@pytest.mark.parametrize("hard", [True, False])
def test_the_walk_learns_among_its_candidates_and_the_targets_best_token(hard):
    """Its distribution is the walk's, but for a last candidate that gives way to a best token that
    was missing.
    """
    params = drafter().params
    features, ahead = (
        jax.random.normal(jax.random.key(1), (4, 2, 8)),
        jnp.array([[0, 1], [2, 2], [1, 0], [2, 1]]),
    )
    shared = jaxspec.draft_heads.target.shared_with(drafter().target.lm, drafter().target.params)
    at = DraftStep(features, ahead, 1)
    walk = np.exp(jax.nn.log_softmax(dflash2.draft_logits(CONFIG, params, shared, at)[0]))
    unary = jax.nn.log_softmax(dflash2.learned_logits(CONFIG, params, shared, at)[0])
    order = np.argsort(-np.asarray(unary), axis=1)  # the first two are candidates
    np.testing.assert_array_equal(np.take_along_axis(walk, order, 1)[:, 2], 0.0)
    # a candidate in two rows, none in the others
    best = np.where(np.arange(4) < 2, order[:, 1], order[:, 2])
    p = np.where(np.arange(V)[None] == best[:, None], 0.6, 0.2)
    labels, estimate = dflash2.walk_lesson(CONFIG, params, shared, at, jnp.log(p), unary, hard)
    np.testing.assert_allclose(
        np.exp(estimate)[:2], np.take_along_axis(walk, order[:, :2], 1)[:2], rtol=1e-5
    )
    # the best token is the last one in all rows
    expected = np.array([0.0, 1.0]) if hard else np.array([0.25, 0.75])
    np.testing.assert_allclose(np.exp(labels), np.broadcast_to(expected, (4, 2)), rtol=1e-5)
    # The injected token's score is its logit and its edge, as if it were a candidate.
    every = dataclasses.replace(CONFIG, candidates=V)
    full = np.asarray(dflash2.draft_logits(every, params, shared, at)[0])
    among = np.take_along_axis(full, np.stack([order[:, 0], best], axis=1), axis=1)
    np.testing.assert_allclose(estimate, jax.nn.log_softmax(among), rtol=1e-4, atol=1e-5)


REFUSED = {
    "selector_top_k": "expected a number from 1 to 13",
    "selector_rank": "unexpected|expected .13, 7.",
    "conv_group_size": "group is 3: expected a divisor",
}


@pytest.mark.needs_torch
@pytest.mark.parametrize("key", REFUSED)
def test_options_that_do_not_fit_the_tensors(key, published, folder, target, tmp_path):
    where = published["DFlash 2, speculators"].write(tmp_path / "it", folder)
    table = json.loads((where / "config.json").read_text())
    table[key] = {"selector_top_k": 14, "selector_rank": 7, "conv_group_size": 3}[key]
    (where / "config.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=REFUSED[key]):
        jaxspec.load_drafter(where, target=target)


@pytest.mark.needs_torch
def test_dflashs_reader_refuses_its_options_by_name(published, folder, target, tmp_path):
    """A folder that names convolutions, without their tensors, is not read as DFlash."""
    where = published["DFlash"].write(tmp_path / "it", folder)
    table = json.loads((where / "config.json").read_text())
    table["dflash_config"]["conv_kernel_size"] = 2
    (where / "config.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match="dflash_config has conv_kernel_size"):
        jaxspec.load_drafter(where, target=target)
