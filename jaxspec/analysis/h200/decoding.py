"""Plain and speculative decoding of random T5-XXL and T5-small, bfloat16, batch 1: `Bench` has a method for each stage.

Few programs serve them all, since compiling takes most of the time: prefill's part of a generation is measured with the
program of the whole, by asking it for one token.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Tables 2 and 4.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.analysis.measure import cost, jobs, synthetic
from jaxspec.analysis.measure.statistics import median_min_max
from jaxspec.analysis.measure.synthetic import random_verdicts_for_benchmarks
from jaxspec.analysis.measure.timing import interleave, run_all
from jaxspec.analysis.theory.roofline import load_of
from jaxspec.base import Model, Prompt
from jaxspec.decode.request import Job, prepare
from jaxspec.weights import int8

SOURCE = 64  # tokens of the prompt
KINDS = {0.0: "greedy", 1.0: "sampled"}  # how a temperature is called in the names of stages


class PaperRow(NamedTuple):
    """A row of the paper's Tables 2 and 4: T5-XXL with T5-small.

    Attributes:
        task, temperature, gamma, alpha: as printed.
        speedup: measured (EMP).
        expected: by Theorem 3.8 with v = 1 and c = 0.02 (EXP).
    """

    task: str
    temperature: float
    gamma: int
    alpha: float
    speedup: float
    expected: float

    @property
    def stage(self) -> str:
        """translation-greedy, for one."""
        return f"{self.task}-{KINDS[self.temperature]}"


TABLE_2 = (
    PaperRow("translation", 0.0, 7, 0.75, 3.4, 3.2),
    PaperRow("translation", 1.0, 7, 0.62, 2.6, 2.3),
    PaperRow("summarization", 0.0, 5, 0.65, 3.1, 2.4),
    PaperRow("summarization", 1.0, 5, 0.53, 2.3, 1.9),
)


class Settings(NamedTuple):
    """What to measure.

    Attributes:
        shape, draft_shape: published sizes of target and drafter.
        dtype: "bfloat16", "float32", or "int8" matrices in float32.
        new_tokens: tokens to generate.
        seeds: generations of a timed run, each with verdicts of its own.
        repeats: timed runs of each variant, of which the medians count.
        copy_mb: size of the copy that measures the bandwidth.
    """

    shape: str = "t5-v1_1-xxl"
    draft_shape: str = "t5-v1_1-small"
    dtype: str = "bfloat16"
    new_tokens: int = 128
    seeds: int = 8
    repeats: int = 5
    copy_mb: int = 4096


def copy_bandwidth(size: int, repeats: int, inner: int = 20) -> np.ndarray:
    """Bytes per second that are read and written when `size` bytes are copied [repeats].

    >>> bool((copy_bandwidth(1 << 20, repeats=2, inner=2) > 0).all())
    True
    """
    state = jnp.zeros(size // 4, jnp.float32)

    @functools.partial(jax.jit, donate_argnums=0)
    def copies(x, count):
        return jax.lax.fori_loop(0, count, lambda _, y: y + 1.0, x)  # traced, or it would be one addition

    def call() -> None:
        nonlocal state
        state = copies(state, jnp.asarray(inner, jnp.int32)).block_until_ready()

    call()
    return 2 * state.nbytes * inner / interleave([call], repeats)[0]


class Bench:
    """The two models, made when first needed, and what is measured on them."""

    def __init__(self, settings: Settings):
        self.settings = settings

    @functools.cached_property
    def target(self) -> Model:
        """Random weights."""
        return synthetic.random_model(self.settings.shape, self.settings.dtype, seed=0)

    @functools.cached_property
    def draft(self) -> Model:
        """Random weights, too: it agrees with the target on nothing."""
        return synthetic.random_model(self.settings.draft_shape, self.settings.dtype, seed=1)

    @functools.cached_property
    def prompt(self) -> Prompt:
        """One row."""
        return synthetic.random_prompt(self.target, 1, SOURCE)

    def copy(self) -> dict[str, Any]:
        """What a large copy reads and writes in a second."""
        size = self.settings.copy_mb * 10**6
        return {"bytes": size, "bytes_per_second": median_min_max(copy_bandwidth(size, self.settings.repeats))}

    def plain(self) -> dict[str, Any]:
        """Greedy decoding without a drafter, and the bytes that each of its tokens needs."""
        load = load_of(self.target.config, row=self.settings.new_tokens // 2, prompt=SOURCE)
        load = load._replace(dtype=dtype_of(self.target))
        job = self._jobs(0.0)[0]
        whole, first = interleave(_warm([job], [only_first(job)]), self.settings.repeats)
        draft = load_of(self.draft.config)._replace(dtype=dtype_of(self.draft))
        return {
            "target": _about(self.target),
            "draft": _about(self.draft),
            "bytes_per_token": load.weight_bytes + load.cache_bytes,
            "draft_bytes_per_token": draft.weight_bytes,
            "token_ms": median_min_max(1e3 * (whole - first) / (self.settings.new_tokens - 1)),
            "first_token_ms": median_min_max(1e3 * first),
            "device_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        }

    def passes(self, temperature: float) -> dict[str, Any]:
        """c, and v at the gammas of a temperature's rows, whose passes are interleaved; median, min and max of each."""
        gammas = sorted({row.gamma for row in TABLE_2 if row.temperature == temperature})
        found = cost.measure_all(self._job(temperature, drafter=self.draft), gammas, repeats=self.settings.repeats)
        first = found[0]  # one-token passes are the same in all
        return {
            "c": first.c,
            "v": {str(one.gamma): one.v for one in found},
            "target_ms": first.target_ms,
            "draft_ms": first.draft_ms,
            "verify_ms": {str(one.gamma): one.verify_ms for one in found},
            "spreads": {
                "c": median_min_max(first.c_each),
                "v": {str(one.gamma): median_min_max(one.v_each) for one in found},
                "target_ms": median_min_max(first.target),
                "draft_ms": median_min_max(first.draft),
                "verify_ms": {str(one.gamma): median_min_max(one.verify) for one in found},
            },
        }

    def speedup(self, row: PaperRow) -> dict[str, Any]:
        """Speculative decoding over plain, at a row of Table 2.

        Raises:
            FloatingPointError: random weights gave logits that are not finite.
        """
        rule = random_verdicts_for_benchmarks(row.alpha)
        plain = self._jobs(row.temperature)
        ours = self._jobs(row.temperature, drafter=self.draft, gamma=row.gamma, accept=rule)
        calls = _warm(plain, ours, *([only_first(job) for job in some] for some in (plain, ours)))
        outcomes = [jobs.run(job) for job in ours]
        if any(out.failed[0] or out.length[0] != self.settings.new_tokens for out in outcomes):
            raise FloatingPointError("random weights gave logits that are not finite: another shape or dtype may do")
        rounds = sum(int(out.stats.rounds[0]) for out in outcomes)
        accepted = sum(int(out.trace.num_accepted.sum()) for out in outcomes)
        rejected = sum(int((out.trace.num_accepted < out.trace.draft_length).sum()) for out in outcomes)
        whole, our_whole, first, our_first = interleave(calls, self.settings.repeats)
        return {
            "speedup": median_min_max(whole / our_whole),
            "speedup_after_prefill": median_min_max((whole - first) / (our_whole - our_first)),
            "alpha_drawn": accepted / max(accepted + rejected, 1),
            "passes_saved": self.settings.seeds * (self.settings.new_tokens - 1) / rounds,
            "seconds": {"plain": median_min_max(whole), "speculative": median_min_max(our_whole)},
        }

    def _job(self, temperature: float, **options: Any) -> Job:
        """Exactly `new_tokens` tokens."""
        job = prepare(
            self.target, self.prompt, max_new_tokens=self.settings.new_tokens, key=jax.random.key(0), eos_ids=()
        )
        return job.replace(temperature=temperature, **options)

    def _jobs(self, temperature: float, **options: Any) -> list[Job]:
        """The same prompt once for each seed."""
        job = self._job(temperature, **options)
        return [job.replace(key=jax.random.key(seed)) for seed in range(self.settings.seeds)]


def only_first(job: Job) -> Job:
    """The same program, which ends with the token that prefill yields."""
    return job._replace(request=job.request._replace(limit=jnp.ones_like(job.request.limit)))


def dtype_of(model: Model) -> str:
    """That of the matrices."""
    return int8.dtype_of(model.params, model.config.dtype)


def _warm(*variants: Sequence[Job]) -> list[functools.partial[None]]:
    """A call for each variant, made once: what it runs is compiled."""
    calls = [functools.partial(run_all, some) for some in variants]
    for call in calls:
        call()
    return calls


def _about(model: Model) -> dict[str, Any]:
    size = sum(x.nbytes for x in jax.tree.leaves(model.params))
    return {"name": model.name, "dtype": dtype_of(model), "parameters": int8.count(model.params), "bytes": size}
