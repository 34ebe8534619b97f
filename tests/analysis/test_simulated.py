"""Simulated verdicts accept as many draft tokens as alpha, and only the benchmark that needs them has them."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxspec
from jaxspec import noise
from jaxspec.analysis.measure.synthetic import random_verdicts_for_benchmarks
from jaxspec.analysis.theory import formulas
from jaxspec.base import Distribution, Draft
from jaxspec.testing import table_model

ROWS, GAMMA = 20_000, 4


def verdict(alpha, distribution, length=GAMMA):
    draft = Draft(jnp.zeros((ROWS, GAMMA), jnp.int32), jnp.full((ROWS,), length, jnp.int32))
    keys = noise.row_keys(jax.random.key(7), ROWS)
    return random_verdicts_for_benchmarks(alpha).verify(keys, jnp.full((ROWS,), 3, jnp.int32), draft, distribution)


@pytest.mark.parametrize("alpha", [0.53, 0.75])
def test_rounds_accept_draft_tokens_with_the_distribution_behind_equation_1(alpha):
    """Of a target that would never generate what was drafted."""
    found = verdict(alpha, Distribution(tokens=jnp.ones((ROWS, GAMMA + 1), jnp.int32)))
    counts = np.bincount(np.asarray(found.num_accepted), minlength=GAMMA + 1)
    expected = [alpha**k * (1 - alpha) for k in range(GAMMA)] + [alpha**GAMMA]
    for count, share in zip(counts, expected, strict=True):
        low, high = scipy.stats.binom.interval(1 - 1e-6, ROWS, share)
        assert low <= count <= high
    mean = float(formulas.expected_tokens(alpha, GAMMA))
    assert np.mean(np.asarray(found.num_accepted) + 1) == pytest.approx(mean, rel=0.02)
    assert (found.next_token == 1).all()


def test_no_draft_token_beyond_the_real_ones_is_accepted():
    found = verdict(1.0, Distribution(tokens=jnp.ones((ROWS, GAMMA + 1), jnp.int32)), length=2)
    assert (found.num_accepted == 2).all()


def test_the_token_after_them_is_the_targets():
    distribution = Distribution(log_probs=jnp.broadcast_to(jnp.log(jnp.array([0.0, 0.3, 0.7])), (ROWS, GAMMA + 1, 3)))
    drawn = np.bincount(np.asarray(verdict(0.5, distribution).next_token), minlength=3)
    low, high = scipy.stats.binom.interval(1 - 1e-6, ROWS, 0.7)
    assert drawn[0] == 0 and low <= drawn[2] <= high


def test_what_it_decodes_is_called_inexact_and_no_public_name_leads_to_it():
    model = table_model(jax.random.key(1), vocab=5)
    prompt = jaxspec.Prompt(jnp.array([[3, 1]]), jnp.array([2]))
    rule = random_verdicts_for_benchmarks(0.5)
    out = jaxspec.generate(model, prompt, drafter=model, gamma=2, max_new_tokens=6, accept=rule)
    assert not out.exact and not rule.exact and out.lengths.tolist() == [6]
    assert not any("random" in name or "benchmark" in name for name in jaxspec.accept.__all__)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_is_a_probability(alpha):
    with pytest.raises(ValueError, match="expected a probability"):
        random_verdicts_for_benchmarks(alpha)


def test_only_the_benchmark_that_needs_it_imports_it():
    """No command, rule or name of the front door leads to it; a new user of it belongs in this list, or nowhere."""
    package = Path(jaxspec.__file__).parent
    names = ("simulated", "random_verdicts")
    users = [file.relative_to(package) for file in sorted(package.rglob("*.py")) if imports(file, names)]
    assert [user.as_posix() for user in users] == ["analysis/bench/paper.py"]


def imports(file: Path, names: tuple[str, ...]) -> bool:
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [f"{getattr(node, 'module', '')}.{alias.name}" for alias in node.names]
    return any(name in one for one in found for name in names)
