"""Writing draft heads as vLLM and SGLang read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec import sharding
from jaxspec.core import Model, Params
from jaxspec.draft_heads import kind_of, shapes_of
from jaxspec.draft_heads.formats import FamilyError, Format, target_shape
from jaxspec.draft_heads.kind import shape_of
from jaxspec.draft_heads.load import PARD
from jaxspec.draft_heads.training import VOCABULARY
from jaxspec.drafters.parallel import parallel
from jaxspec.files import folders
from jaxspec.weights import huggingface, parameters, source
from jaxspec.weights.hf_families import common
from jaxspec.weights.huggingface import CONFIG
from jaxspec.weights.tensors import CheckpointError


def save(
    config: Any,
    params: Params,
    folder: str | Path,
    *,
    target: Model,
    tokens: int = 5,
    overwrite: bool = False,
) -> Path:
    """Writes a drafter: EAGLE-3, DFlash 1 and 2, DSpark and MTP as `speculators` has them, for vLLM
    and SGLang.

    DFlash with scales, caps or windows that count from each token is written as z-lab has it,
    EAGLE-1 as its authors publish it. Medusa is written as vLLM has it, with tensors of our own for
    blockwise and Hydra heads. Tensors of block drafters that read the source are our own, too.

    Block drafters and MTP modules without `head_norms` are refused: `speculators` and z-lab's code
    would load them with norms of queries and keys that nobody trained, and without an error.

    Args:
        config: the network's configuration, as `draft_heads.load.read_head` returns it.
        params: its parameters.
        folder: where to.
        target: the model that it drafts for, whose name becomes the verifier's.
        tokens: draft tokens a round, for who serves it.
        overwrite: whether a Hugging Face folder that is there already may be replaced.

    Raises:
        CheckpointError: `folder` exists already, or the format has no such drafter.
    """
    folder = Path(folder).expanduser().resolve()
    complaint = folders.occupied(folder, "Hugging Face folder", overwrite, marker=CONFIG)
    if complaint:
        raise CheckpointError(complaint)
    tables = {CONFIG: config_json(config, target, tokens)}
    return huggingface.write_folder(folder, tables, _theirs(config, params, kind_of(config).format))


def config_json(config: Any, target: Model, tokens: int = 5) -> dict[str, Any]:
    """Makes the config.json that `save` writes.

    Raises:
        CheckpointError: the format has no such drafter.
    """
    try:
        table = kind_of(config).format.write(config, _verifier(target), tokens)
    except ValueError as error:
        raise CheckpointError(f"the drafter cannot be written: {error}") from error
    return table | {"torch_dtype": shape_of(config).dtype}


def save_parallel(
    draft: Model, mask_token: int, folder: str | Path, *, overwrite: bool = False
) -> Path:
    """Writes a model that `drafters.parallel` drafts with, as PARD's are published: with
    `pard_token` in config.json.

    vLLM reads such a folder, and so does `load_drafter`.

    Args:
        draft: the model.
        mask_token: the id of its mask token.
        folder: where to.
        overwrite: whether a Hugging Face folder that is there already may be replaced.

    Raises:
        CheckpointError: the reasons of `jaxspec.weights.huggingface.save`.
        ValueError: the reasons of `drafters.parallel`, such as an id past the vocabulary.
    """
    parallel(draft, mask_token)  # checks both
    return huggingface.save(draft, folder, overwrite=overwrite, keys={PARD: int(mask_token)})


def _verifier(target: Model) -> dict[str, Any]:
    architectures = []
    with contextlib.suppress(FamilyError):  # of a network that transformers lacks
        _, tables = source.written(target.config, target.source, {})
        architectures = tables[source.CONFIG]["architectures"]
    names = {"name_or_path": target.name, "architectures": architectures}
    return names | {"layers": target_shape(target).layers}


def _theirs(config: Any, params: Params, form: Format) -> Iterator[tuple[str, np.ndarray]]:
    """Yields tensors by the names that they are written by."""
    flat = parameters.flat(params)
    shape = shape_of(config)
    modules = (form.written or form.modules)(config)
    for path, (name, *_) in common.named(shapes_of(config), modules).items():
        x = sharding.fetch(parameters.apart(flat[path]))
        if path != VOCABULARY:
            yield name, np.ascontiguousarray(x, jnp.dtype(shape.dtype))
        elif form.stores_ids:
            yield name, x.astype(np.int64)
        else:
            yield name, x.astype(np.int64) - np.arange(len(x))
            # vLLM wants the inverse, too, as a mask over the target's vocabulary.
            in_draft = np.zeros(shape.vocab_size, bool)
            in_draft[x] = True
            yield "t2d", in_draft
