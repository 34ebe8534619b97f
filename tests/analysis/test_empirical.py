"""Exact rules reach the target's distribution at the pace of plain sampling; an inexact one does not."""

import numpy as np
import pytest

from jaxspec import accept
from jaxspec.analysis.figures import sampling
from jaxspec.analysis.theory import divergence

P, Q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
ROUNDS = 20_000


def test_the_rejection_rule_approaches_the_targets_distribution():
    tokens = sampling.first_tokens(accept.rejection(), P, Q, ROUNDS, seed=1)
    near, far = sampling.l1_distance(tokens, P, [ROUNDS, 20])
    assert near < 4 * sampling.noise_distance(P, ROUNDS) < far


def test_a_lenient_rule_stays_away():
    """By the L1 distance of its own known distribution: what is accepted, plus what is not times the residual."""
    tokens = sampling.first_tokens(accept.lenient(0.5), P, Q, ROUNDS, seed=1)
    accepted = np.minimum(np.array(P) / 0.5, Q)
    own = accepted + (1 - accepted.sum()) * divergence.residual(P, Q)
    assert sampling.l1_distance(tokens, P, [ROUNDS])[0] == pytest.approx(np.abs(own - P).sum(), abs=0.02)


def test_noise_distance_is_the_mean_for_samples():
    rng = np.random.default_rng(0)
    found = [sampling.l1_distance(rng.choice(3, 400, p=P), P, [400])[0] for _ in range(200)]
    assert np.mean(found) == pytest.approx(sampling.noise_distance(P, 400), rel=0.1)


@pytest.mark.parametrize("counts", [[0, 1], [5]])
def test_counts_that_there_are_not(counts):
    with pytest.raises(ValueError, match="expected 1 to 4"):
        sampling.l1_distance(np.zeros(4, int), [1.0], counts)
