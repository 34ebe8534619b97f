"""The digest of models: every bit counts, and where it stands; neither a mesh nor the use of a tokenizer does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import BoundDrafter
from jaxspec.jobs.files import digest
from jaxspec.testing import table_model
from tests.conftest import tokenizer

MODEL = table_model(jax.random.key(1), vocab=5)


def of(params):
    return digest(MODEL._replace(params={"a": params}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "int8", "int4", "uint32", "bool"])
def test_every_entry_and_its_place_count(dtype):
    entries = (jnp.arange(24) % 7 < 3).reshape(2, 3, 4).astype(dtype)
    others = [entries.at[-1, -1, -1].set(~entries[-1, -1, -1] if dtype == "bool" else 3), entries[::-1]]
    others += [jnp.swapaxes(entries, 0, 1), entries.reshape(6, 4), entries.at[0, 0, 0].set(entries[0, 0, 3])]
    assert len({of(array) for array in (entries, *others)}) == 6
    assert of(entries) == of(entries.copy())


def test_the_smallest_bit_counts():
    entries = jnp.full(3, 1.0)
    assert of(entries) != of(entries.at[2].set(np.nextafter(np.float32(1), np.float32(2))))
    assert of(jnp.zeros(3)) != of(-jnp.zeros(3))
    assert of(jax.random.key(0)) != of(jax.random.key(1))


def test_arrays_of_the_host_count_in_full():
    """An index of texts may have integers that no device has."""
    entries = np.arange(3) + 2**40
    assert of(entries) != of(entries % 2**32)


def test_a_drafter_has_the_digest_of_its_models():
    drafters = [
        BoundDrafter(None, params=None, models=(MODEL._replace(config=config, tokenizer=words),))
        for config in ("one", "another")
        for words in (None, tokenizer(), tokenizer([*"abcdef"]))
    ]
    assert len(set(map(digest, drafters))) == 6


def test_the_use_of_a_tokenizer_changes_nothing():
    model = MODEL._replace(tokenizer=tokenizer())
    before = digest(model)
    model.tokenizer(["das alte Hund", "das"], padding=True, truncation=True, max_length=2)
    assert digest(model) == before
    model.tokenizer.chat_template = "{{ messages }}"
    assert digest(model) != before
