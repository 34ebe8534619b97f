"""Loading a model, and where to find the shipped ones."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspec.base import Model
from jaxspec.weights import orbax
from jaxspec.weights.orbax import MANIFEST, CheckpointError

DTYPES = ("float32", "bfloat16")
_PACKAGE = Path(__file__).resolve().parent
SHIPPED = (_PACKAGE / "data" / "checkpoints", _PACKAGE.parent / "checkpoints")  # of a wheel; of a checkout
_OWN_ONLY = "this version of jaxspec reads its own checkpoints only"


def load(source: str | Path, *, dtype: str = "float32") -> Model:
    """Loads a model from a checkpoint; never from the network.

        target = jaxspec.load("checkpoints/debian-t5-base")
        draft = jaxspec.load("debian-t5-small", dtype="bfloat16")

    Args:
        source: a checkpoint folder, or the name of a shipped checkpoint, with or without "checkpoints/" in
            front. A folder that exists goes before a shipped checkpoint of the same name.
        dtype: of the computation and of the matrices in memory, "float32" or "bfloat16"; norm scales, biases
            and logits are float32 always.

    Returns:
        The model; each matrix of its parameters has the given dtype and lies on the default device.

    Raises:
        CheckpointError: there is no such checkpoint, it is not one of jaxspec's, or it is damaged.
        ValueError: the dtype is neither of the two.

    >>> load("debian-t5-base", dtype="float8")
    Traceback (most recent call last):
    ValueError: dtype is 'float8', expected one of ('float32', 'bfloat16')
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {DTYPES}")
    folder = find(source)
    params, config, manifest = orbax.restore(folder)
    if dtype == "bfloat16":
        params = orbax.cast(params, jnp.bfloat16)
    config = dataclasses.replace(config, dtype=dtype)
    tokenizer = tokenizer_of(folder)
    if len(tokenizer) > config.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {len(tokenizer)} ids, but the model only {config.vocab_size}: "
            "save the checkpoint again, with the tokenizer that the model was trained with"
        )
    return Model(orbax.NETS[manifest.family].language_model(config), params, tokenizer, config, manifest.name)


def shipped() -> dict[str, Path]:
    """The checkpoints that come with jaxspec, by name.

    >>> all((folder / "manifest.toml").is_file() for folder in shipped().values())
    True
    """
    found: dict[str, Path] = {}
    for folder in SHIPPED:
        for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
            found.setdefault(manifest.parent.name, manifest.parent)
    return found


def find(source: str | Path) -> Path:
    """The folder that `load` would read.

    Raises:
        CheckpointError: there is none, or it is not one of jaxspec's.
    """
    path = Path(source).expanduser()
    if (path / "config.json").is_file() and not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is a Hugging Face model (config.json, no {MANIFEST}): {_OWN_ONLY}. {_choices()}")
    if path.exists():
        return path
    names = shipped()
    bare = path.parts[-2:-1] in ((), ("checkpoints",)) and not path.is_absolute()
    if bare and path.name in names:
        return names[path.name]
    hub = ""
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(source)):
        hub = f" If you meant a model of the Hugging Face hub: {_OWN_ONLY}."
    near = orbax.suggest(path.name, names)
    raise CheckpointError(f"no checkpoint at {source}{near or '.'}{hub} {_choices()}")


def _choices() -> str:
    names = ", ".join(sorted(shipped())) or "none in this installation"
    return f"Expected a folder with a {MANIFEST}, or the name of a shipped checkpoint ({names})"


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of a checkpoint."""
    # AutoTokenizer would give the same, but imports torch where that is installed: seconds.
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
