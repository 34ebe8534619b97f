"""The certificate on every exact rule, on chains and on trees of 1 to 3 children at each of two levels.

    JAX_PLATFORMS=cpu python tests/exactness_grid.py                          # all: some two hours of one core
    JAX_PLATFORMS=cpu python tests/exactness_grid.py rejection "(2, 2)" top   # those whose names have these words

Every rule × shape × way to draw siblings × plain and warped distributions × no end token and one inside, over 3 tokens:
the total variation from plain sampling, which must be below `EXACT`. Exits with 1 if one is not.
tests/exactness/test_trees.py has the cheap part.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

if __name__ == "__main__":  # as in conftest.py: compiling is most of the time
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

import jax
import jax.numpy as jnp

from jaxspec import accept, drafters
from jaxspec.base import Bound, Drafter, Model, Prompt, Rule
from jaxspec.decode.request import prepare
from jaxspec.drafters.tree import DrawName
from jaxspec.testing import certify_job, table_model, with_sampler
from jaxspec.warp import SamplingParams, sampling

EXACT = 1e-5  # total variation; float32 comes to some 1e-7
VOCAB, STEPS = 3, 3
TARGET, DRAFT = (table_model(jax.random.key(seed), VOCAB, order=1) for seed in (1, 2))
SHAPES = (None, *itertools.product((1, 2, 3), repeat=2))  # None: a chain of two
DRAWS = get_args(DrawName)
CHAINS = (accept.block(), accept.classical_rejection())  # which judge chains only
TREES = (accept.rejection(), accept.coupled(), accept.exact_match())
PROMPT = Prompt(jnp.array([[0]]), jnp.array([1]))
SAMPLER = sampling(VOCAB)  # one program for all distributions
WARPED = {  # temperature, top-k, and the drafter's temperature
    "plain": (1.0, VOCAB, 1.0),
    "warped": (0.7, 2, 1.5),
}
ENDS = {"no end": (), "an end": (1,)}


class Case(NamedTuple):
    """A rule and a drafter: one program, for all distributions and end tokens."""

    rule: Rule
    shape: tuple[int, ...] | None
    draw: str

    @property
    def name(self) -> str:
        return f"{self.rule.name} {'chain' if self.shape is None else self.shape} {self.draw}"


def cases(shapes: Any = SHAPES) -> Iterator[Case]:
    """All, by shape: trees of few nodes first."""
    for shape, rule in itertools.product(shapes, (*TREES, *CHAINS)):
        if shape is None:
            yield from (Case(rule, shape, draw) for draw in ("sampled", "top", *["coupled"] * rule.shares_noise))
        elif rule.trees:
            yield from (Case(rule, shape, draw) for draw in DRAWS)


def drafter_of(case: Case, draft: Model = DRAFT) -> Bound[Drafter]:
    if case.shape is not None:
        return drafters.tree(draft, case.shape, draw=case.draw)
    return drafters.greedy(draft) if case.draw == "top" else drafters.model(draft, coupled=case.draw == "coupled")


def total_variation(case: Case, warped: str, ends: str) -> float:
    """How far the first tokens are from plain sampling's."""
    temperature, top_k, draft_temperature = WARPED[warped]
    options = dict(drafter=drafter_of(case), accept=case.rule, gamma=2, temperature=1.0, key=jax.random.key(0))
    job = prepare(TARGET, PROMPT, eos_ids=ENDS[ends], max_new_tokens=STEPS, **options)
    one = SamplingParams(jnp.array([temperature]), jnp.array([top_k]))
    job = with_sampler(job, SAMPLER, one, one._replace(temperature=jnp.array([draft_temperature])))
    return certify_job(job, STEPS)


def main() -> None:
    """Prints a line for each, and the largest."""
    words, largest = sys.argv[1:], 0.0
    for case in cases():
        if not all(word in case.name for word in words):
            continue
        for warped, ends in itertools.product(WARPED, ENDS):
            started = time.monotonic()
            found = total_variation(case, warped, ends)
            largest = max(largest, found)
            print(f"{found:.1e} {case.name}, {warped}, {ends} ({time.monotonic() - started:.0f} s)", flush=True)
        jax.clear_caches()
    print(f"largest total variation: {largest:.1e}")
    sys.exit(largest >= EXACT)


if __name__ == "__main__":
    main()
