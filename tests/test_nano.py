"""Speculative decoding in one file (docs/nano.py): it is exact, and its greedy texts are the
package's.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.nets import adapters
from tests.small import module_at

SOURCE = Path(__file__).resolve().parents[1] / "docs" / "nano.py"


@pytest.fixture(scope="module")
def nano():
    return module_at(SOURCE)


@pytest.fixture(autouse=True)
def plain_jax():
    """A reader's settings: ranks are promoted."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def test_it_is_short_and_needs_jax_alone():
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 400
    imported = {re.split(r"[ .]", line)[1] for line in lines if re.match(r"(import|from) ", line)}
    assert imported == {"__future__", "functools", "typing", "jax", "numpy"}


@pytest.mark.parametrize(
    ("parents", "temperature"),
    [([0, 1], 1.0), ([0, 0], 0.5)],
    ids=["a chain", "two guesses for one place"],
)
def test_every_text_has_the_probability_that_plain_sampling_gives_it(nano, parents, temperature):
    target, drafter = nano.init(jax.random.key(0), vocab=3), nano.init(jax.random.key(1), vocab=3)
    tree = nano.Tree(parents)
    assert nano.certify(target, drafter, [0, 2, 1], tree, temperature=temperature) < 1e-6


def test_a_rule_without_the_residual_is_caught(nano, monkeypatch):
    """The same file with the mistake that is made most often: the target's own token is drawn from
    p itself.
    """
    source = SOURCE.read_text(encoding="utf-8")
    right = "scaled(jnp.maximum(wanted - offered, 0.0))"
    assert source.count(right) == 1
    namespace = {"__name__": "wrong"}
    monkeypatch.setitem(__import__("sys").modules, "wrong", type(nano)("wrong"))
    exec(compile(source.replace(right, "wanted"), "wrong", "exec"), namespace)
    target, drafter = nano.init(jax.random.key(0), vocab=3), nano.init(jax.random.key(1), vocab=3)
    assert namespace["certify"](target, drafter, [0, 2, 1], namespace["Tree"]([0])) > 1e-2


def test_the_package_finds_the_same_probabilities(nano):
    """The certificate of the package, over the same two networks, without their caches."""
    lm = without_cache(nano, vocab=3)
    target, drafter = (
        jaxspec.Model(lm, nano.init(jax.random.key(seed), vocab=3)) for seed in (0, 1)
    )
    assert (
        jaxspec.testing.certify(target, drafter=drafter, gamma=2, prompt=[0, 2, 1], steps=2) < 1e-6
    )


def without_cache(nano, vocab):
    def logits(params, tokens):
        return nano.read_text(params, nano.empty_cache(params, *tokens.shape), tokens)[0]

    return adapters.from_function(logits, vocab_size=vocab)


def test_200_greedy_texts_are_the_packages(nano):
    """Ragged prompts and ten pairs of networks: drafted with a tree here, decoded by the package
    there.
    """
    rows, width, new_tokens = 20, 6, 12
    lm = without_cache(nano, vocab=23)
    random = np.random.default_rng(0)
    tree = nano.Tree([0, 0, 1, 1, 2, 3])
    for seed in range(10):
        target = nano.init(jax.random.key(seed), vocab=23, layers=2)
        stranger = nano.init(jax.random.key(100 + seed), vocab=23, layers=2)
        drafter = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, target, stranger)
        lengths = random.integers(1, width + 1, rows)
        prompts = np.where(
            np.arange(width) < lengths[:, None], random.integers(0, 23, (rows, width)), 0
        )
        options = {"new_tokens": new_tokens, "tree": tree, "temperature": 0.0}
        state = nano.generate(
            target, drafter, jnp.asarray(prompts), jnp.asarray(lengths), nano.Best(), **options
        )
        ours = [
            text[n : n + new_tokens].tolist()
            for text, n in zip(np.asarray(state.tokens), lengths, strict=True)
        ]
        lists = [prompt[:n].tolist() for prompt, n in zip(prompts, lengths, strict=True)]
        pair = jaxspec.Model(lm, target), jaxspec.Model(lm, drafter)
        out = jaxspec.generate(pair[0], lists, drafter=pair[1], max_new_tokens=new_tokens)
        assert np.asarray(out.tokens).tolist() == ours
