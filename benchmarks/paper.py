"""The paper's tables beside ours: computed, for a pair of one's own, and at the paper's sizes.

    python -m benchmarks.paper 1                    computed, and 4
    python -m benchmarks.paper 2 --device h100      estimates of all twelve rows, by bytes; tpu-v4 by default
    python -m benchmarks.paper 2 --draft debian-t5-draft     its options for a pair: some minutes of two cores
    python -m benchmarks.paper 3 --target debian-t5-base --draft debian-t5-small
    python -m benchmarks.paper 5 --draft debian-t5-small --target debian-t5-base
    python -m benchmarks.paper sizes --dtype bfloat16 --max-new-tokens 128

`sizes` wants one device with some 60 GB of memory (or --target random:SHAPE --draft random:SHAPE):
T5-XXL with T5-small. Models of random weights agree on nothing, so acceptance is simulated at the
rates that the paper reports (`benchmarks.synthetic`: the text is nonsense, the time is not). Speeds
are set beside the paper's, which were measured on a TPU v4, and beside Theorem 3.8 with c and v as
measured; plain decoding beside the memory's floor: the bytes that a token needs (decoder weights,
caches, head) over the bandwidth of a large copy on the same device. Where c is above 0.02 the
drafter is profiled. All but 1, 4 and the estimates of 2 take the options of `jaxspec bench`. 3 and
5 add the tables unigram and bigram to the drafters.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Tables 1 to 5.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import filesize
from rich.table import Table

from benchmarks import paper_tables, profile
from benchmarks.options import parser_of, run, workload
from benchmarks.synthetic import random_verdicts_for_benchmarks
from jaxspec.analysis import formulas
from jaxspec.analysis.cost import interleave
from jaxspec.analysis.random_model import random_prompt
from jaxspec.analysis.result import PLANNED, BenchResult, Setting, Spread, Task, dtype_of
from jaxspec.analysis.roofline import MACHINES, load_of
from jaxspec.analysis.table import Column, around
from jaxspec.cli import bench, console, names, options
from jaxspec.cli.names import model
from jaxspec.core import Model
from jaxspec.decode.request import prepare

SHAPES = ("t5-v1_1-xxl", "t5-v1_1-small")
SOURCE = 64  # tokens of a prompt
CHEAP = 0.02  # the paper's c of T5-small; above it, a profile is made
COPY = 4 * 10**9  # bytes of the copy that measures the bandwidth
LENIENCES = "rejection,lenient=0.5,lenient=0.3,lenient=0.1"
TABLES: dict[str, dict[str, Any]] = {  # what `jaxspec bench` is given before one's own options
    "2": {"gamma": PLANNED, "repeats": 3},
    "3": {"gamma": "3", "measure": "alpha"},
    "5": {"gamma": "3", "measure": "alpha", "rule": LENIENCES},
}
SHARED: dict[str, Any] = {"temperature": "0,1", "count": 16}  # of all three
# drafters that Tables 3 and 5 have beside those of one's own
BESIDE = "bigram", "unigram", "uniform"


TABLE_2 = tuple(  # the rows that `sizes` measures
    sorted(
        (row for row in paper_tables.TABLE_4 if row.draft == paper_tables.SMALL),
        key=lambda row: row.temperature,
    )
)


def table_2(target: Model, draft: Model, *, texts: int = 8, new_tokens: int = 128) -> list[Setting]:
    """The four speed-ups of T5-XXL, with any two models in their places."""
    task = Task("random prompts", random_prompt(target, texts, SOURCE), new_tokens, ends=False)
    return [
        Setting(
            task,
            draft,
            row.gamma,
            random_verdicts_for_benchmarks(row.alpha),
            sampling={"temperature": row.temperature},
            name=draft.name,
        )
        for row in TABLE_2
    ]


def printed(result: BenchResult) -> paper_tables.Printed | None:
    """Finds the paper's row that a result is of."""
    setting = result.setting
    same = (x for x in TABLE_2 if (x.temperature, x.gamma) == (setting.temperature, setting.gamma))
    return None if setting.is_plain else next(same, None)


def _theorem(result: BenchResult, v: float | None = None) -> float | None:
    paper = printed(result)
    if paper is None or result.costs is None:
        return None
    verify = result.costs.v.median if v is None else v
    return float(formulas.improvement(paper.alpha, paper.gamma, result.costs.c.median, verify))


def _of_the_paper(name: str) -> Callable[[BenchResult], Any]:
    return lambda result: getattr(printed(result), name, None)


BESIDE_THE_PAPER = (
    Column("task", _of_the_paper("task")),
    Column("α", _of_the_paper("alpha")),
    Column("paper", _of_the_paper("speed"), 1),
    Column("EXP", _of_the_paper("expected"), 1),
    Column("here", "speed"),
    Column("min..max", lambda result: around(result.speed)),
    Column("no\nprefill", "speed_after_prefill"),
    Column("c", "costs.c", 3),
    Column("v", "costs.v"),
    Column("own\nrounds", "predicted.rounds"),
    Column("Thm 3.8", _theorem),
    Column("v = 1", functools.partial(_theorem, v=1.0)),
)


class Floor(NamedTuple):
    """The time of reading a token's bytes.

    Attributes:
        token_bytes, draft_bytes: the bytes that a token of the target, or of the drafter, needs.
        bytes_per_second: the speed of a large copy.
    """

    token_bytes: float
    draft_bytes: float
    bytes_per_second: Spread

    @property
    def token_ms(self) -> float:
        """The least that a token of the target takes."""
        return 1e3 * self.token_bytes / self.bytes_per_second.median

    def sentence(self, plain: BenchResult) -> str:
        """Sets plain decoding beside the floor."""
        if plain.prefill_seconds is None or plain.tokens <= plain.texts:
            return ""
        later = (
            1e3 * (np.array(plain.seconds) - plain.prefill_seconds) / (plain.tokens - plain.texts)
        )
        token = Spread.of(later)
        return (
            f"Plain decoding, T = {plain.setting.temperature:g}: {token.median:.3f} ms a token "
            f"({token.min:.3f}..{token.max:.3f}); the floor is {self.token_ms:.3f} ms "
            f"({filesize.decimal(int(self.token_bytes))} at "
            f"{self.bytes_per_second.median / 1e12:.2f} TB/s, a copy): "
            f"{self.token_ms / token.median:.0%} of the floor's speed is reached."
        )


def floor(
    target: Model, draft: Model, new_tokens: int, size: int = COPY, repeats: int = 5
) -> Floor:
    """Bytes of a token, in the middle of a text, and the bandwidth of a copy of `size` bytes."""
    loads = [load_of(target.config, row=new_tokens // 2, prompt=SOURCE), load_of(draft.config)]
    of_target, of_draft = (
        load._replace(dtype=dtype_of(model))
        for load, model in zip(loads, (target, draft), strict=True)
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
        # traced, or it would be one addition
        return jax.lax.fori_loop(0, count, lambda _, y: y + 1.0, x)

    def call() -> None:
        nonlocal state
        state = copies(state, jnp.asarray(inner, jnp.int32)).block_until_ready()

    call()
    return 2 * state.nbytes * inner / interleave([call], repeats)[0]


def explained(results: Sequence[BenchResult], draft: Model, least: Floor) -> list[str]:
    """Plain decoding beside the floor; and, where the drafter's pass is dear, why, from a profile
    of it.
    """
    lines = [least.sentence(result) for result in results if result.setting.is_plain]
    for result in [result for result in results if result.costs and result.costs.c.median > CHEAP][
        :1
    ]:
        assert result.costs is not None
        options: dict[str, Any] = {
            "max_new_tokens": result.setting.new_tokens,
            "key": jax.random.key(0),
        }
        prompt = random_prompt(draft, 1, SOURCE)
        prepared = prepare(draft, prompt, temperature=result.setting.temperature, **options)
        reading = 1e6 * least.draft_bytes / least.bytes_per_second.median
        target_us, c = 1e3 * result.costs.target_ms.median, result.costs.c.median
        lines.append(profile.advice(profile.passes(prepared), reading, target_us, c))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and prints a table or measures."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    table, options = arguments[:1], arguments[1:]
    if table in (["1"], ["4"]) and not options:
        return show(*(paper_tables.table_1() if table == ["1"] else paper_tables.table_4()))
    if table == ["2"] and (
        not options or any(option.split("=")[0] == "--device" for option in options)
    ):
        return estimates(options)
    if table and table[0] in TABLES:
        return of_own_pair(table[0], options)
    parser = parser_of(__doc__)
    parser.add_argument("table", choices=("1", "4", *TABLES, "sizes"))
    usual = {
        "target": f"random:{SHAPES[0]}",
        "draft": f"random:{SHAPES[1]}",
        "measure": "speed,costs",
    }
    work, chosen = workload(parser, arguments, usual)
    if chosen.table in ("1", "4"):
        parser.error(
            f"table {chosen.table} is arithmetic and takes no options: got {' '.join(options)}"
        )
    for name in (work.target, work.draft):
        if not name.startswith("random:"):
            parser.error(f"got {name}: expected random:SHAPE as --target and --draft")
    names = work.target, work.draft
    target, draft = (
        model(name, work.dtype, work.mesh, seed=work.seed + i) for i, name in enumerate(names)
    )
    settings = table_2(target, draft, texts=work.rows, new_tokens=work.max_new_tokens)
    least = floor(target, draft, work.max_new_tokens)
    more = lambda results: explained(results, draft, least)  # noqa: E731
    run(target, settings, work, (BESIDE_THE_PAPER,), more=more)


def show(view: Table, sentence: str, markdown: bool = False) -> None:
    """Prints a table and the sentence that says what differs."""
    out = console.printer(markdown)
    console.show(out, view, markdown)
    console.say(out, sentence)


def estimates(arguments: list[str]) -> None:
    """Prints Table 2 with estimates for a device."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--device", default=paper_tables.DEVICE, choices=tuple(MACHINES), help="estimate for it"
    )
    show(*paper_tables.table_2(parser.parse_args(arguments).device))


def of_own_pair(table: str, arguments: list[str]) -> None:
    """Measures a pair with a table's options before one's own, which win, and prints the paper's
    values beside.
    """
    work, _ = workload(parser_of(__doc__), arguments, SHARED | TABLES[table])
    if table != "2":
        drafts = options.values(work.draft or names.default_drafter(work.target), "--draft")
        work = work._replace(draft=",".join(dict.fromkeys([*drafts, *BESIDE])))
    results = run(*bench.settings_of(work), work)
    if table != "2" and not work.as_json:
        beside = paper_tables.table_3 if table == "3" else paper_tables.table_5
        show(*beside(results), markdown=work.markdown)


if __name__ == "__main__":
    main()
