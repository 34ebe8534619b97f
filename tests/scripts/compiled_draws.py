"""Tokens that are next to impossible, drawn by programs that are compiled as users compile them.

    XLA_FLAGS= python tests/scripts/compiled_draws.py     # a minute of one core

The tests compile without XLA's optimisation, which may compute a sum twice and round it differently
each time; and the certificate replaces draws by its own. Prints how many tokens of probability
below 1e-8 were drawn; exits with 1 if there are any.
"""

import itertools
import sys

import jax
import numpy as np

import jaxspec
from jaxspec.testing import table_model

VOCABS, TEMPERATURES, SEEDS = (5, 7, 8, 16, 33), (0.1, 0.3), 12
LEAST = -18.0  # log probability


def impossible(vocab: int, temperature: float, draft: bool, new: int) -> int:
    """Return the number of tokens in the texts that should not be there."""
    model, other = (table_model(jax.random.key(seed), vocab=vocab, order=1) for seed in (1, 2))
    log_p = np.asarray(jax.nn.log_softmax(model.params / temperature, axis=-1))
    count = 0
    for seed in range(SEEDS):
        options = dict(temperature=temperature, key=jax.random.key(seed), max_new_tokens=new)
        out = jaxspec.generate(
            model, [[1, 3]], drafter=other if draft else None, gamma=3, **options
        )
        count += sum(
            log_p[a, b] < LEAST for a, b in itertools.pairwise([3, *out.tokens[0].tolist()])
        )
    return count


def main() -> None:
    cases = itertools.product(VOCABS, TEMPERATURES, ((False, 1), (True, 8)))
    count = sum(impossible(vocab, temperature, *how) for vocab, temperature, how in cases)
    print(f"tokens that should not be there: {count}")
    sys.exit(int(count > 0))


if __name__ == "__main__":
    main()
