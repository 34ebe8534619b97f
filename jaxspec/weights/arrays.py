"""A model of arrays in memory: what another library trains, converts or exports."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxspec import sharding
from jaxspec.core import Model
from jaxspec.weights import huggingface, loading, parameters, quantised_files, tensors, tied

DESCRIBED = "config"  # the table of a model in memory, as messages call it


def from_arrays(
    config: Any,
    arrays: Mapping[str, Any],
    *,
    tokenizer: Any = None,
    dtype: DTypeLike = "float32",
    compute: DTypeLike | None = None,
    mesh: Mesh | str | None = None,
    name: str = "arrays",
) -> Model:
    """Makes a model of arrays in memory under Hugging Face's names, as `jaxspec.load` makes one of
    a folder.

    The arrays are copied, one at a time, so what trains them may go on. A table of keras-hub's,
    levanter's or MaxText's exporters, a PyTorch model's `state_dict()` and one's own dict all do.

    Args:
        config: the model's config.json as a dict, or a `transformers.PretrainedConfig`.
        arrays: {the tensor's name in a Hugging Face folder: array}, of NumPy, JAX (on any devices
            that this process reaches) or PyTorch. Shapes as there: a linear layer is [out, in].
        tokenizer: the model's; None for prompts of token ids.
        dtype, compute, mesh: the options of `jaxspec.load`.
        name: the name of the model in messages.

    Returns:
        The model, on the default device or on the mesh.

    Raises:
        CheckpointError: the config is of a family that jaxspec does not have, or the names or
            shapes are not the family's: the message lists those that are missing and unexpected.
        TypeError: the config is neither a dict nor a PretrainedConfig.
        ValueError: another dtype; the mesh is impossible.

    Example:
        >>> import jaxspec
        >>> config = dict(model_type="gpt2", vocab_size=16, n_positions=12)
        >>> config |= dict(n_embd=8, n_layer=1, n_head=2)
        >>> wrong = {"wte.weight": np.zeros((16, 8), np.float32)}
        >>> from_arrays(config, wrong)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        jaxspec.weights.tensors.CheckpointError: arrays: the weights are not those of ...
    """
    dtype_name, computed = loading.dtype_names(dtype, compute)
    if mesh is not None:
        mesh = sharding.mesh(mesh)
    table = _table(config)
    where = Path(name)
    if table.get(quantised_files.CONFIG) is not None:
        raise tensors.CheckpointError(
            f"{name}: its config has a {quantised_files.CONFIG}: expected arrays in full. Load a "
            "quantised model from its folder with jaxspec.load, or give dtype='int8' or 'int4'"
        )
    source = {huggingface.CONFIG: table}
    family, network = huggingface.config_of(source, Path(f"the config of {name}"))
    names = huggingface.traced(where, DESCRIBED, family.names, network)
    files = [_shard(where, arrays)]
    files = tied.by_first_names(files, family, tied.repeated_names(family, network, names))
    params, network = huggingface.assemble(
        where, family, network, files, dtype_name, mesh, DESCRIBED
    )
    return loading.of_network(
        dataclasses.replace(network, dtype=computed), (), params, tokenizer, name, source
    )


def _table(described: Any) -> dict[str, Any]:
    """Returns a config as JSON has it."""
    if hasattr(described, "to_json_string"):  # of transformers: its dtype is not JSON
        return json.loads(described.to_json_string(use_diff=False))
    if not isinstance(described, Mapping):
        raise TypeError(
            f"config is of type {type(described).__name__}: expected a dict like a config.json, or "
            "a transformers.PretrainedConfig"
        )
    return dict(described)


def _shard(where: Path, arrays: Mapping[str, Any]) -> tensors.Shard:
    """Presents arrays as a file of weights; each is copied to the host when it is read."""
    for name, x in arrays.items():
        if not hasattr(x, "shape"):
            raise TypeError(f"{where}: {name} is of type {type(x).__name__}: expected an array")

    def load(names: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, _on_host(arrays[name])) for name in names)

    return tensors.Shard(where, {name: tuple(x.shape) for name, x in arrays.items()}, load)


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array):
        return np.asarray(parameters.apart(x))  # the caller's array keeps no copy on the host
    if type(x).__module__.partition(".")[0] == "torch":
        return tensors.of_torch(x)
    return np.asarray(x)
