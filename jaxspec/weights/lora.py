"""LoRA folders (Hu et al., arXiv 2106.09685), as PEFT writes them: changes that are added to a model as it is loaded.

A folder has `adapter_config.json` and the factors A [r, in] and B [out, r] of some matrices, whose sum with the model's
own is W + s B A. Its other tensors replace the model's. A matrix is merged in float32 when its turn comes to be read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.files.folders import some
from jaxspec.weights import tensors
from jaxspec.weights.hf_families.common import FamilyError, only, read_object
from jaxspec.weights.quantised_files import Quantised
from jaxspec.weights.tensors import CheckpointError, Shard, Stored

CONFIG = "adapter_config.json"
FILES = {
    "adapter_model.safetensors": tensors.FORMATS["model.safetensors"],
    "adapter_model.bin": tensors.FORMATS["pytorch_model.bin"],
}
PREFIX = "base_model.model."  # of all names; what follows is transformers' name of the module
FACTORS = {  # how the names of factors end
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
}
NOT_MERGED: dict[str, Any] = {  # keys that change what is computed, and the values at which they do not
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), False),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens", "trainable_token_indices"), None),
    "target_parameters": None,
    "bias": "none",
    "peft_type": "LORA",
}
PLAIN_STARTS = (True, False, "gaussian", None)  # of init_lora_weights; others change the model itself


class Change(NamedTuple):
    """A matrix's factors: `factor * B @ A` is added, or its transpose."""

    A: np.ndarray | Stored
    B: np.ndarray | Stored
    factor: float
    transposed: bool

    def merged(self, matrix: np.ndarray | Stored) -> np.ndarray:
        """Adds the change in float32; the sum has the matrix's dtype."""
        A, B = (np.asarray(x).astype(np.float32) for x in (self.A, self.B))
        added = B @ A * np.float32(self.factor)
        full = np.asarray(matrix)
        # Rounded once: in bfloat16 each of two roundings would lose as much as a small adapter adds.
        return (full.astype(np.float32) + (added.T if self.transposed else added)).astype(full.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix that it changes."""
        shape = (self.B.shape[0], self.A.shape[1])
        return shape[::-1] if self.transposed else shape


class Adapter(NamedTuple):
    """An opened folder.

    Attributes:
        folder: where it is.
        changes: the factors by the name of the tensor that they change, as transformers has it in memory.
        replaced: tensors by the names of those that they replace.
    """

    folder: Path
    changes: dict[str, Change]
    replaced: dict[str, np.ndarray | Stored]


def open_folder(folder: Path) -> Adapter:
    """Opens a LoRA folder.

    Raises:
        CheckpointError: it has no LoRA, is damaged, or has options that cannot be merged into the model's matrices.
    """
    try:
        table = read_object(folder / CONFIG)
        only(table, **NOT_MERGED)
        if (start := table.get("init_lora_weights")) not in PLAIN_STARTS:
            raise FamilyError(f"init_lora_weights is {start!r}, which changes the model, too: convert it to plain LoRA")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} describes no adapter that can be merged: {error}") from error
    stored = {name: x for shard in tensors.shards(folder, FILES) for name, x in shard.read()}
    factors: dict[str, dict[str, Any]] = {}
    replaced: dict[str, np.ndarray | Stored] = {}
    for name, x in stored.items():
        module = name.removeprefix(PREFIX)
        end = next((end for end in FACTORS if module.endswith(end)), None)
        if end is not None:
            factors.setdefault(module.removesuffix(end), {"embeds": "embedding" in end})[FACTORS[end]] = x
        elif "lora_" in name:
            raise CheckpointError(f"{folder} has {name}, which is no factor of a matrix: merge the adapter with peft")
        else:
            replaced[module.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")] = x
    changes = {f"{module}.weight": _change(folder, module, parts, table) for module, parts in factors.items()}
    return Adapter(folder, changes, replaced)


def _change(folder: Path, module: str, parts: dict[str, Any], table: dict[str, Any]) -> Change:
    if not {"A", "B"} <= set(parts):
        raise CheckpointError(f"{folder} has one factor of {module}: expected lora_A and lora_B. Download it again")
    A, B = parts["A"], parts["B"]
    if len(A.shape) != 2 or len(B.shape) != 2 or A.shape[0] != B.shape[1]:
        raise CheckpointError(
            f"{folder}: the factors of {module} are {A.shape} and {B.shape}: expected [r, in], [out, r]"
        )
    # The rank is the factors' own: a rank_pattern need not be read.
    alpha = _of_module(module, table.get("alpha_pattern"), table.get("lora_alpha", 8))
    root = A.shape[0] ** (0.5 if table.get("use_rslora", False) else 1)
    # An embedding's factors are those of its transpose; so are those of a matrix that is stored [in, out].
    return Change(A, B, alpha / root, parts["embeds"] or bool(table.get("fan_in_fan_out", False)))


def _of_module(module: str, patterns: dict[str, float] | None, otherwise: float) -> float:
    """Returns a module's value of a pattern table: the first whose key is the end of its name, as in PEFT.

    >>> _of_module("model.layers.0.q_proj", {"layers.0.q_proj": 4, "q_proj": 2}, 8)
    4
    """
    keys = (key for key in patterns or {} if re.match(rf"^(.*\.)?({key})$", module))
    return (patterns or {}).get(next(keys, ""), otherwise)


def merge(
    shards: list[Shard], adapter: Adapter, canonical: Callable[[str], str | None], embedding: str, head: str
) -> list[Shard]:
    """Returns a model's files as if the adapter had been merged into their tensors.

    Args:
        shards: the files of the model.
        adapter: the opened folder.
        canonical: a tensor's name -> the name that all spellings of it have in common; None for one that is not read.
        embedding, head: names of the two tensors of which files hold one where the head is tied.

    Raises:
        CheckpointError: the adapter is another model's, or the model's files are quantised.
    """
    # Both sides by the name that all spellings of a tensor have in common.
    named = {name: canonical(name) for name in (*adapter.changes, *adapter.replaced)}
    changes = {named[name]: change for name, change in adapter.changes.items() if named[name] is not None}
    replaced = {named[name]: x for name, x in adapter.replaced.items() if named[name] is not None}
    if unread := [name for name, key in named.items() if key is None]:  # of a model that also sees
        text = "%s: %d changes of what is not read are left out (%s)"
        logging.getLogger(__name__).warning(text, adapter.folder, len(unread), some(sorted(unread)))
    shapes = {canonical(name): shape for shard in shards for name, shape in shard.shapes.items()}
    is_tied = head not in shapes
    if is_tied and embedding in {*changes, *replaced} and head not in {*changes, *replaced}:
        text = f"{adapter.folder} changes {embedding}, with which the head is tied, and not the head"
        raise CheckpointError(f"{text}: merge it with peft, which decides for one of two readings")
    if is_tied and head in {*changes, *replaced}:  # the head becomes a tensor of its own
        shards = [*shards, _copy(shards, canonical, embedding, head)]
        shapes[head] = shapes[embedding]
    if unknown := [str(name) for name in {*changes, *replaced} if name not in shapes]:
        raise CheckpointError(
            f"{adapter.folder} changes {some(sorted(unknown))}, which the model lacks: is it another's?"
        )
    for name, shape in [(n, x.shape) for table in (changes, replaced) for n, x in table.items()]:
        if tuple(shape) != tuple(shapes[name]):
            text = f"{adapter.folder} changes {name} by {list(shape)}, and the model's is {list(shapes[name])}"
            raise CheckpointError(f"{text}: is it another model's?")

    def merged(shard: Shard) -> Shard:
        def load(names: Collection[str]) -> Iterator[tuple[str, np.ndarray | Stored]]:
            for name, x in shard.load(names):
                key = canonical(name)
                x = replaced.get(key, x)
                if key in changes and isinstance(x, Quantised):
                    raise CheckpointError(f"{name} is quantised, and {adapter.folder} changes it: load the full model")
                yield name, changes[key].merged(x) if key in changes else x

        return shard._replace(load=load)

    return [merged(shard) for shard in shards]


def _copy(shards: list[Shard], canonical: Callable[[str], str | None], source: str, name: str) -> Shard:
    """Returns a file with one tensor, which is another file's under another name."""
    shard, stored_name = next((x, other) for x in shards for other in x.shapes if canonical(other) == source)

    def load(names: Collection[str]) -> Iterator[tuple[str, np.ndarray | Stored]]:
        return ((name, x) for _, x in shard.load({stored_name} if name in names else ()))

    return Shard(shard.path, {name: shard.shapes[stored_name]}, load)
