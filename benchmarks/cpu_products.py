"""Times products of few rows on this CPU: the forms of `jaxspec.nets.on_cpu` beside the one that
anybody would write.

    python -m benchmarks.cpu_products [--matrices 1536x384,8192x1536] [--rows 1,2,4,6,8,16]
    [--repeats 15]

Any CPU, a minute. A program has as many products of one matrix as make 100 MB in float32
(`--megabytes`), one after the other, as in a network: so they come from memory, not from a cache.
Each line is a matrix [out, in] in a dtype, and a number of rows. Times are over that of one row in
float32 with the same matrix: the median of the repeats, and in brackets the least and the most. All
forms of a line run in turn. "jaxspec" is `nets.dense.product`, "plain" is `dot_general(x, weight)`,
with quantised matrices widened first. Below 1 a dtype saves time, too, and not memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.options import parser_of
from jaxspec.analysis.cost import interleave
from jaxspec.nets import dense, quantised
from jaxspec.nets.quantised import Matrix

GROUP = 128  # columns of a group
FORMS = ("float32", "bfloat16", "int8", "int8, groups", "int4, groups")


def matrices(rows: int, columns: int, count: int) -> dict[str, list[Matrix]]:
    """Makes the same random matrices in each form."""
    random = np.random.default_rng(0)
    made: dict[str, list[Matrix]] = {form: [] for form in FORMS}
    for _ in range(count):
        entries = random.integers(-7, 8, (rows, columns)).astype(np.int8)
        scale = np.full((rows, 1), columns**-0.5 / 4, np.float32)
        wide = jnp.asarray(entries * scale)
        made["float32"].append(wide)
        made["bfloat16"].append(wide.astype(jnp.bfloat16))
        made["int8"].append({"int8": jnp.asarray(entries), "scale": jnp.asarray(scale)})
        if columns % GROUP == 0 and columns > GROUP:
            groups = jnp.asarray(entries.reshape(rows, -1, GROUP).swapaxes(0, 1))
            scales = jnp.asarray(np.repeat(scale, columns // GROUP, axis=1))
            made["int8, groups"].append({"int8": groups, "scale": scales})
            made["int4, groups"].append({"int4": groups.astype(jnp.int4), "scale": scales})
    return {form: several for form, several in made.items() if several}


def plainly(x: jax.Array, weight: Matrix) -> jax.Array:
    """The product as it is usually written."""
    if quantised.is_quantised(weight):
        weight = quantised.widen(weight)  # pyright: ignore[reportArgumentType]
    last: Any = (((2,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, last, dense.precision(x.dtype))


def program(
    product: Callable[[Any, Any], jax.Array], x: jax.Array, several: Sequence[Matrix]
) -> Callable[[], Any]:
    """Compiles products of `x` with each matrix, each of which waits for the one before."""

    def run(x: jax.Array, several: Sequence[Matrix]) -> jax.Array:
        total = jnp.zeros((), x.dtype)
        for weight in several:
            total = product(x + total[None, None, None], weight).ravel()[0] * jnp.asarray(
                1e-9, x.dtype
            )
        return total

    compiled = jax.jit(run).lower(x, several).compile()
    return lambda: jax.block_until_ready(compiled(x, several))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--matrices", default="1536x384,8192x1536", help="out x in, by commas")
    parser.add_argument("--rows", default="1,2,4,6,8,16", help="numbers of rows, by commas")
    parser.add_argument(
        "--megabytes", type=float, default=100, help="of a program's matrices in float32"
    )
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    print("| matrix | rows | dtype | jaxspec | plain |\n|---|---|---|---|---|")
    for size in options.matrices.split(","):
        out, columns = map(int, size.split("x"))
        made = matrices(out, columns, max(1, int(options.megabytes * 2**20 / (4 * out * columns))))
        for rows in map(int, options.rows.split(",")):
            programs = {"floor": program(plainly, jnp.ones((1, 1, columns)), made["float32"])}
            for form, several in made.items():
                x = jnp.ones((1, rows, columns), "bfloat16" if form == "bfloat16" else "float32")
                programs[form] = program(dense.product, x, several)
                programs[f"{form}, plain"] = program(plainly, x, several)
            interleave([*programs.values()], 1)  # warms up
            seconds = dict(
                zip(programs, interleave([*programs.values()], options.repeats), strict=True)
            )
            ratios = {name: took / seconds["floor"] for name, took in seconds.items()}
            words = {
                name: f"{np.median(x):.2f} ({x.min():.2f} to {x.max():.2f})"
                for name, x in ratios.items()
            }
            for form in made:
                print(
                    f"| {size} | {rows} | {form} | {words[form]} | {words[f'{form}, plain']} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
