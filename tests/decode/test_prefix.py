"""A prefix that is read once: text and counts are those of the whole prompts, for every drafter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import rules
from jaxspec.core import BoundDrafter, Drafter, chunks
from jaxspec.testing import certify, table_model
from tests.draft_heads.test_drafters import NAMES, drafter_of, target_of
from tests.drafters.cases import CASES, MODEL, TARGET
from tests.marks import marked

SHARED = [1, 0, 2, 2, 1]
ROWS = [[0], [2, 1, 1, 0, 2, 1, 0], [1, 1]]
SOME = ("a model", "a tree", "a cascade", "prompt_lookup", "fallback", "a dynamic tree")
SOME_HEADS = ("eagle 3", "dflash", "kangaroo", "medusa")


def both(target, drafter, shared=SHARED, rows=ROWS, **options):
    """Generates with a prefix and from whole prompts, cold and warm rows together; compares texts and counts."""
    options = dict(gamma=3, max_new_tokens=14, temperature=[0.0, 1.0, 0.8], key=jax.random.key(5)) | options
    prefix = jaxspec.prefix(target, shared, drafter=drafter)
    with_prefix = jaxspec.generate(target, rows, prefix=prefix, drafter=drafter, **options)
    whole = jaxspec.generate(target, [shared + row for row in rows], drafter=drafter, **options)
    assert with_prefix.tokens.tolist() == whole.tokens.tolist()
    assert jax.tree.map(np.ndarray.tolist, with_prefix.stats) == jax.tree.map(np.ndarray.tolist, whole.stats)
    return with_prefix


@pytest.mark.parametrize("name", marked(CASES, slow={*CASES} - {*SOME}))
def test_text_and_counts_are_those_of_whole_prompts(name):
    both(TARGET, CASES[name].drafter)


@pytest.mark.parametrize("name", marked(NAMES, slow={*NAMES} - {*SOME_HEADS}))
def test_so_they_are_with_drafters_on_hidden_states(name):
    drafter = drafter_of(name, "decoder")
    both(target_of("decoder"), drafter)
