"""The overlap of a model's distribution with that of the model in other dtypes, or of another one: E[sum min(p, q)].

    python -m benchmarks.overlap debian-t5-base --dtype bfloat16 int8
    python -m benchmarks.overlap debian-t5-base --others unrounded/debian-t5-base

A minute of two cores. At temperature 1, over all positions of the first one's own texts on held-out prompts: 1 if both
are the same. `benchmarks.synthetic` writes what a model may have been before it was rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from benchmarks.options import parser_of
from jaxspec.analysis import acceptance
from jaxspec.analysis.statistics import Rate
from jaxspec.analysis.table import words
from jaxspec.cli import names
from jaxspec.cli.prompts import heldout_for
from jaxspec.decode.request import prepare


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and measures."""
    parser = parser_of(__doc__)
    parser.add_argument("model", help="the first, in float32")
    parser.add_argument("--dtype", nargs="*", default=[], help="the same model in these")
    parser.add_argument("--others", nargs="*", default=[], help="other models, in float32")
    parser.add_argument("--count", type=int, default=16, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args(arguments)
    first = names.model(options.model)
    sampling = {"temperature": 1.0, "key": jax.random.key(0), "max_new_tokens": options.max_new_tokens}
    others = [(dtype, options.model, dtype) for dtype in options.dtype] + [(x, x, "float32") for x in options.others]
    for label, name, dtype in others:
        other = names.model(name, dtype)
        rate = acceptance.measure(prepare(first, heldout_for(first, options.count), drafter=other, **sampling)).rate
        print(f"{label}: {words(Rate.of(rate), 4)}", flush=True)


if __name__ == "__main__":
    main()
