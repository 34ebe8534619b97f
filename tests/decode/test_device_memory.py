"""What does not fit in memory is refused before it is allocated, with the sum of what it takes."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxspec
from benchmarks.estimates import absent
from jaxspec.analysis.random_model import random_params
from jaxspec.core import Model, Prompt
from jaxspec.decode import batches, device_memory, loop
from jaxspec.decode.request import prepare
from jaxspec.nets import decoder
from tests.small import tiny_llama

TINY = tiny_llama()


def test_long_prompts_are_refused_with_the_sum_of_what_they_take():
    """Before anything is allocated: 1,024 rows of 8,192 tokens whose cache has 262 KB for each."""
    config = decoder.decoder_config(
        32, dim=8, ff_dim=8, layers=2, heads=64, kv_heads=64, head_dim=256
    )
    model = Model(
        decoder.language_model(config), decoder.init(config, jax.random.key(0)), None, config
    )
    prompt = Prompt(np.ones((1024, 8192), np.int32), np.full(1024, 8192, np.int32))
    said = r"1024 prompts of up to 8192 tokens, .* \(weights .*, caches and rows 2.2 TB, .*their number or their length"
    with pytest.raises(ValueError, match=said):
        jaxspec.generate(model, prompt, max_new_tokens=16)


def test_what_does_not_fit_is_refused_only_where_it_would_run(monkeypatch):
    """Long prompts and many of them; not programs of shapes, which are compiled for other devices,
    and not what is prepared as a whole and run in parts.
    """
    monkeypatch.setattr(
        device_memory.psutil, "virtual_memory", lambda: SimpleNamespace(total=10**6)
    )
    shape = absent.shape_model(TINY, "float32")
    here = shape._replace(params=random_params(TINY, "float32", jax.random.key(0)))
    long, many = (
        Prompt(np.zeros((rows, n), np.int32), np.full(rows, n))
        for rows, n in ((1, 8192), (900, 64))
    )
    for prompt, what in (
        (long, "1 prompts of up to 8192 tokens"),
        (many, "900 prompts of up to 64 tokens"),
    ):
        assert (
            prepare(shape, prompt, drafter=shape, max_new_tokens=16).prompt.tokens.shape
            == prompt.tokens.shape
        )
        with pytest.raises(
            ValueError,
            match=f"{what}.* take .*caches and rows .*what prefill makes .* there are 1.0 MB",
        ):
            jaxspec.generate(here, prompt, drafter=here, max_new_tokens=16)
    part = batches.take(prepare(here, many, drafter=here, max_new_tokens=16), [0, 1])
    assert loop.run(part).length.tolist() == [16, 16]
    with pytest.raises(
        ValueError, match=r"a prefix of 8192 tokens take .*caches .*: lower its length"
    ):
        jaxspec.prefix(here, [0] * 8192)
    with pytest.raises(
        ValueError, match=r"beams=8 with max_new_tokens=512 for 20 prompts .*caches "
    ):
        jaxspec.beam_search(here, jax.tree.map(lambda x: x[:20], many), beams=8, max_new_tokens=512)
    assert jaxspec.generate(here, [[1]], max_new_tokens=2).lengths.tolist() == [2]
