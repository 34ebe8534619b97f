"""Fixtures that tests of several networks use."""

import jax
import pytest


@pytest.fixture(scope="session")
def compiled():
    """Makes of a model the same one with every function jitted: op by op, each shape is a
    compilation of its own.
    """

    def jitted(lm):
        prefill = jax.jit(lm.prefill)
        select = None if lm.select is None else jax.jit(lm.select)
        return lm._replace(
            prefill=prefill, extend=jax.jit(lm.extend), rewind=jax.jit(lm.rewind), select=select
        )

    return jitted
