"""The paper's tables as settings: for a pair of one's own, and at the paper's sizes with simulated acceptance.

Models of random weights agree on nothing, so at the paper's sizes (T5-XXL with T5-small: some 60 GB of memory)
acceptance is simulated at the rates that the paper reports (`analysis.measure.synthetic`: the text is nonsense, the
time is not). Speeds are set beside the paper's, which were measured on a TPU v4, and beside Theorem 3.8 with c and v as
measured; plain decoding beside the memory's floor: the bytes that a token needs (decoder weights, caches, head) over
the bandwidth of a large copy on the same device.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Tables 2 to 5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import filesize

from jaxspec.analysis.bench.row import Row, Spread
from jaxspec.analysis.bench.setting import PLANNED, Setting, Task, dtype_of
from jaxspec.analysis.bench.table import Column
from jaxspec.analysis.measure import profile, synthetic
from jaxspec.analysis.measure.synthetic import random_verdicts_for_benchmarks
from jaxspec.analysis.measure.timing import interleave
from jaxspec.analysis.theory import formulas
from jaxspec.analysis.theory.roofline import load_of
from jaxspec.core import Model
from jaxspec.decode.request import prepare

SHAPES = ("t5-v1_1-xxl", "t5-v1_1-small")
SOURCE = 64  # tokens of a prompt
CHEAP = 0.02  # the paper's c of T5-small; above it, a profile is made
COPY = 4 * 10**9  # bytes of the copy that measures the bandwidth
OPTIONS: dict[int, dict[str, str]] = {  # what `jaxspec measure --table` asks for where one has not said otherwise
    2: {"temperature": "0,1", "gamma": PLANNED},
    3: {"temperature": "0,1", "gamma": "3"},
    5: {"temperature": "0,1", "gamma": PLANNED, "rule": "rejection,lenient=0.5,lenient=0.3,lenient=0.1"},
}
BESIDE = {3: "bigram,unigram"}  # drafters that a table has beside those of one's own
UNTIMED = (3,)


class Printed(NamedTuple):
    """A row of the paper's Tables 2 and 4: T5-XXL with T5-small.

    Attributes:
        task, temperature, gamma, alpha: as printed.
        speed: measured (EMP).
        expected: by Theorem 3.8 with v = 1 and c = 0.02 (EXP).
    """

    task: str
    temperature: float
    gamma: int
    alpha: float
    speed: float
    expected: float


TABLE_2 = (
    Printed("translation", 0.0, 7, 0.75, 3.4, 3.2),
    Printed("summarization", 0.0, 5, 0.65, 3.1, 2.4),
    Printed("translation", 1.0, 7, 0.62, 2.6, 2.3),
    Printed("summarization", 1.0, 5, 0.53, 2.3, 1.9),
)


def table_2(target: Model, draft: Model, *, texts: int = 8, new_tokens: int = 128) -> list[Setting]:
    """The four speed-ups of T5-XXL, with any two models in their places.

    Args:
        target, draft: of random weights.
        texts: of a timed run, each with verdicts of its own.
        new_tokens: of each text.
    """
    task = Task("random prompts", synthetic.random_prompt(target, texts, SOURCE), new_tokens, ends=False)
    return [
        Setting(
            task,
            draft,
            one.gamma,
            random_verdicts_for_benchmarks(one.alpha),
            sampling={"temperature": one.temperature},
            name=draft.name,
        )
        for one in TABLE_2
    ]


def printed(row: Row) -> Printed | None:
    """The paper's row that a row is of."""
    same = (one for one in TABLE_2 if (one.temperature, one.gamma) == (row.temperature, row.gamma))
    return None if row.is_plain else next(same, None)


def _theorem(row: Row, v: float | None = None) -> float | None:
    one = printed(row)
    if one is None or row.costs is None:
        return None
    taken = row.costs.v.median if v is None else v
    return float(formulas.improvement(one.alpha, row.gamma, row.costs.c.median, taken))


def _of_the_paper(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(printed(row), name, None)


BESIDE_THE_PAPER = (
    Column("task", _of_the_paper("task")),
    Column("α", _of_the_paper("alpha")),
    Column("paper", _of_the_paper("speed"), 1),
    Column("EXP", _of_the_paper("expected"), 1),
    Column("here", "speed"),
    Column("min..max", "speed", around=True),
    Column("no\nprefill", "speed_after_prefill"),
    Column("c", "costs.c", 3),
    Column("v", "costs.v"),
    Column("own\nrounds", "predicted.rounds"),
    Column("Thm 3.8", _theorem),
    Column("v = 1", functools.partial(_theorem, v=1.0)),
)


class Floor(NamedTuple):
    """What reading a token's bytes takes.

    Attributes:
        token_bytes, draft_bytes: that a token of the target, or of the drafter, needs.
        bytes_per_second: of a large copy.
    """

    token_bytes: float
    draft_bytes: float
    bytes_per_second: Spread

    @property
    def token_ms(self) -> float:
        """The least that a token of the target takes."""
        return 1e3 * self.token_bytes / self.bytes_per_second.median

    def sentence(self, plain: Row) -> str:
        """Plain decoding beside the floor."""
        if plain.token_ms is None:
            return ""
        share = self.token_ms / plain.token_ms.median
        return (
            f"Plain decoding, T = {plain.temperature:g}: {plain.token_ms.median:.3f} ms a token "
            f"({plain.token_ms.min:.3f}..{plain.token_ms.max:.3f}); the floor is {self.token_ms:.3f} ms "
            f"({filesize.decimal(int(self.token_bytes))} at {self.bytes_per_second.median / 1e12:.2f} TB/s, a copy): "
            f"{share:.0%} of the floor's speed is reached."
        )


def floor(target: Model, draft: Model, new_tokens: int, size: int = COPY, repeats: int = 5) -> Floor:
    """Bytes of a token, in the middle of a text, and the bandwidth of a copy of `size` bytes."""
    loads = [load_of(target.config, row=new_tokens // 2, prompt=SOURCE), load_of(draft.config)]
    of_target, of_draft = (
        load._replace(dtype=dtype_of(model)) for load, model in zip(loads, (target, draft), strict=True)
    )
    copied = Spread.of(copy_bandwidth(size, repeats))
    return Floor(of_target.weight_bytes + of_target.cache_bytes, of_draft.weight_bytes, copied)


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


def explained(rows: Sequence[Row], draft: Model, least: Floor) -> list[str]:
    """Plain decoding beside the floor; and, where the drafter's pass is dear, why, from a profile of it."""
    lines = [least.sentence(row) for row in rows if row.is_plain]
    for row in [row for row in rows if row.costs and row.costs.c.median > CHEAP][:1]:
        assert row.costs is not None
        options: dict[str, Any] = {"max_new_tokens": row.new_tokens, "key": jax.random.key(0)}
        prompt = synthetic.random_prompt(draft, 1, SOURCE)
        prepared = prepare(draft, prompt, temperature=row.temperature, **options)
        reading = 1e6 * least.draft_bytes / least.bytes_per_second.median
        target_us, c = 1e3 * row.costs.target_ms.median, row.costs.c.median
        lines.append(profile.advice(profile.passes(prepared), reading, target_us, c))
    return lines
