"""Published shapes with random weights and random prompts: the cost of a model that nobody has trained here."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxspec.base import Model, Prompt


def random_model(shape: str, dtype: str, seed: int) -> Model:
    """A model of random weights at a published shape: the cost of the real one, and no sense.

    Raises:
        ValueError: no such shape or dtype.
    """
    import jax

    from jaxspec.analysis.random_weights import random_params
    from jaxspec.base import Model
    from jaxspec.families import FAMILIES
    from jaxspec.model import DTYPES
    from jaxspec.recipes import net_of
    from jaxspec.weights import int8, orbax

    sizes = {name: config for family in FAMILIES for name, config in family.sizes.items()}
    if shape not in sizes:
        raise ValueError(f"no shape {shape!r}{orbax.suggest(shape, sizes)} Expected one of {', '.join(sizes)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {DTYPES}")
    config = dataclasses.replace(sizes[shape], dtype=int8.computation(dtype))
    params = random_params(config, dtype, jax.random.key(seed))
    return Model(net_of(config).language_model(config), params, config=config, name=f"random {shape}")


def random_prompt(model: Model, rows: int, tokens: int) -> Prompt:
    """Rows of random token ids, all of one length."""
    from jaxspec import buffers

    ids = np.random.default_rng(0).integers(0, model.lm.vocab_size, (rows, tokens))
    return buffers.pad(ids.tolist())
