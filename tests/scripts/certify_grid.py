"""The whole grid of tests/exactness/test_trees.py: every exact rule × chain or tree × how it is
drawn × distribution.

    JAX_PLATFORMS=cpu python tests/scripts/certify_grid.py                      # an hour or two of one core
    JAX_PLATFORMS=cpu python tests/scripts/certify_grid.py coupled "(2, 2)"     # those whose names have these words

Prints a line for each certificate, and the largest total variation; exits with 1 if it is not
small.
"""

import itertools
import os
import sys
import time
from pathlib import Path


def main() -> None:
    # compiling is most of the time
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    sys.path.insert(0, str(Path(__file__).parents[1] / "exactness"))
    import jax
    from test_trees import DISTRIBUTIONS, END_TOKENS, EXACT, deviation, grid

    words, largest = sys.argv[1:], 0.0
    for case in grid():
        if not all(word in str(case) for word in words):
            continue
        for distribution, end_tokens in itertools.product(DISTRIBUTIONS, END_TOKENS):
            started = time.monotonic()
            distance = deviation(case, distribution, end_tokens)
            largest = max(largest, distance)
            print(
                f"{distance:.1e} {case}, {distribution}, {end_tokens} "
                f"({time.monotonic() - started:.0f} s)",
                flush=True,
            )
        jax.clear_caches()
    print(f"largest total variation: {largest:.1e}")
    sys.exit(largest >= EXACT)


if __name__ == "__main__":
    main()
