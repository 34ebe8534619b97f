"""Long jobs: memory stays as it is, nothing is compiled after the first prompts, and the benchmark
would say if not.
"""

import jax
import numpy as np
import pytest

from benchmarks import long_job
from benchmarks.long_job import Sample


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0, 2], ids=["plain", "speculative"])
def test_a_job_of_many_prompts_compiles_and_retains_nothing(gamma):
    target, draft = (long_job.random_model(8, seed, vocab=32) for seed in (0, 1))
    job = list(long_job.samples(target, draft if gamma else None, 1200, 200, slots=8, gamma=gamma))
    assert [sample.done for sample in job] == list(range(200, 1201, 200))
    # A prompt that left one small array behind would add 200 from sample to sample.
    assert all(sample.arrays <= job[0].arrays + 20 for sample in job), [
        sample.arrays for sample in job
    ]
    assert {sample.compiled for sample in job} == {job[0].compiled}


def steady(count=9, **changes):
    """Samples of a job; a change adds so much to a column from sample to sample."""
    first = Sample(100, 1000, 1.0, 1.0, 10**8, 90, 10**6, 20)
    return [
        first._replace(
            done=100 * at + 100,
            **{name: getattr(first, name) + at * by for name, by in changes.items()},
        )
        for at in range(count)
    ]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"compiled": 1}, ["compilations"]),
        ({"arrays": 100}, ["live arrays"]),
        ({"array_bytes": 10**6}, ["device memory"]),
        ({"resident": 10**7}, ["host memory"]),
        ({"processor_seconds": 0.1}, ["throughput"]),
    ],
)
def test_what_grows_is_said_not_to_be_flat(changes, wrong):
    assert [
        what for what, is_flat, _ in long_job.verdicts(steady(**changes)) if not is_flat
    ] == wrong


def test_late_compilations_are_counted():
    """The count is of programs, not of calls."""
    doubled, counter = jax.jit(lambda values: 2 * values), long_job.compilations()
    doubled(np.ones(3, np.float32))
    before = counter["compiled"]
    doubled(np.zeros(3, np.float32))
    assert counter["compiled"] == before
    doubled(np.ones((3, 1), np.float32))
    assert counter["compiled"] == before + 1


def test_a_job_too_short_for_two_halves_is_refused():
    with pytest.raises(ValueError, match="take more prompts"):
        long_job.verdicts(steady(count=2))
