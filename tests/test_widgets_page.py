"""docs/widgets.html: its script computes what the package computes, and it fetches nothing."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jaxspec.analysis import divergence, formulas

PAGE = Path(__file__).resolve().parents[1] / "docs" / "widgets.html"
ALPHAS = [0.0, 0.05, 0.3, 0.55, 0.7, 0.9, 0.99, 1.0]
GAMMAS = [1, 2, 5, 10, 16]
COSTS = [0.0, 0.02, 0.2, 1.0]
ROUNDS = 20_000
ASK = """
const all = (alphas, others, f) => alphas.map(a => others.map(x => f(a, x)))
const rounds = [1, 4].map(K => new Rounds(P, Q, K))
rounds.forEach(x => x.run(ROUNDS))
console.log(JSON.stringify({
  P, Q, overlap: overlap(P, Q), missing: missing(P, Q), byChance: byChance(P, ROUNDS),
  tokens: all(ALPHAS, GAMMAS, expectedTokens), cost: all(GAMMAS, COSTS, roundCost),
  best: all(ALPHAS, COSTS, bestK),
  speed: ALPHAS.map(a => all(GAMMAS, COSTS, (K, c) => speedUp(a, K, c))),
  rounds: rounds.map(x => ({counts: x.counts, accepted: x.accepted, path: x.path})),
}))
"""

if not PAGE.is_file():
    pytest.skip("not in a checkout", allow_module_level=True)


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def computed(page: str) -> dict:
    """What the page's functions give, run by Node.js."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js, which runs the page's script here, is not on the PATH")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    names = {"ALPHAS": ALPHAS, "GAMMAS": GAMMAS, "COSTS": COSTS, "ROUNDS": ROUNDS}
    constants = "".join(f"const {name} = {json.dumps(value)}\n" for name, value in names.items())
    done = subprocess.run(
        [node, "-"], input=script + constants + ASK, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_page_has_the_package_s_formulas(computed: dict):
    alpha, gamma, c = np.array(ALPHAS), np.array(GAMMAS), np.array(COSTS)
    np.testing.assert_allclose(
        computed["tokens"], formulas.expected_tokens(alpha[:, None], gamma), rtol=1e-12
    )
    np.testing.assert_allclose(computed["cost"], 1 + gamma[:, None] * c, rtol=1e-12)
    speed = formulas.improvement(alpha[:, None, None], gamma[:, None], c)
    np.testing.assert_allclose(computed["speed"], speed, rtol=1e-12)
    assert computed["best"] == formulas.optimal_gamma(alpha[:, None], c, most=16).tolist()
    p, q = np.array(computed["P"]), np.array(computed["Q"])
    np.testing.assert_allclose(sum(computed["overlap"]), divergence.beta(p, q), rtol=1e-12)
    missing = np.array(computed["missing"])
    np.testing.assert_allclose(missing / missing.sum(), divergence.residual(p, q), rtol=1e-12)


def test_the_page_s_rounds_are_unbiased(computed: dict):
    p, q = np.array(computed["P"]), np.array(computed["Q"])
    chance = np.sqrt(2 * p * (1 - p) / np.pi / ROUNDS).sum()
    assert np.isclose(computed["byChance"], chance)
    for gamma, rounds in zip((1, 4), computed["rounds"], strict=True):
        counts = np.array(rounds["counts"])
        assert counts.sum() == ROUNDS and rounds["path"][-1][0] == ROUNDS
        l1 = np.abs(counts / ROUNDS - p).sum()
        assert l1 < 2.5 * chance and np.isclose(rounds["path"][-1][1], l1)
        expected = formulas.expected_tokens(divergence.beta(p, q), gamma) - 1
        assert abs(rounds["accepted"] / ROUNDS - expected) < 5 * gamma / 2 / np.sqrt(ROUNDS)


def test_the_page_fetches_nothing_and_every_control_has_a_name(page: str):
    assert not re.findall(r"<link|<img|<iframe|@import|url\(|\bsrc=|\bfetch\(|\bimport\b", page)
    assert len(re.findall(r"<input", page)) == len(re.findall(r"<label>[^<]+<input", page)) == 4
    assert (
        len(re.findall(r"<button", page))
        == len(re.findall(r'<button type="button" name="\w+">[^<]+<', page))
        == 5
    )
    assert (
        len(re.findall(r"<svg viewBox", page))
        == len(re.findall(r'<svg [^>]*role="img" aria-label="[^"]+"', page))
        == 3
    )
