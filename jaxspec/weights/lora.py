"""LoRA folders (Hu et al., arXiv 2106.09685), as PEFT writes them: changes that are added to a
model as it is loaded.

A folder has `adapter_config.json` and the factors A [r, in] and B [out, r] of some matrices, whose
sum with the model's own is W + s B A. Its other tensors replace the model's. Sums are made in
float32, row by row as they are read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.files.folders import some
from jaxspec.weights import tensors
from jaxspec.weights.hf_families.common import FamilyError, only, read_object
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
# keys that change what is computed, and the values at which they do not
NOT_MERGED: dict[str, Any] = {
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora", "use_bdlora"), False),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens", "trainable_token_indices")),
    **dict.fromkeys(
        ("target_parameters", "arrow_config", "kasa_config", "monteclora_config", "velora_config")
    ),
    "bias": "none",
    "peft_type": "LORA",
}
# Values of init_lora_weights; others change the model.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva", None)


class Change(NamedTuple):
    """A matrix's factors: `factor * B @ A` is added, or its transpose where the tensor is stored
    [in, out].
    """

    A: np.ndarray | Stored  # [r, in]
    B: np.ndarray | Stored  # [out, r]
    factor: float
    is_transposed: bool  # an embedding's factors are those of its transpose

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix that it changes; all axes of both for tensors that are not
        factors.
        """
        if len(self.A.shape) != 2 or len(self.B.shape) != 2 or self.A.shape[0] != self.B.shape[1]:
            return (*self.B.shape, *self.A.shape)
        shape = (self.B.shape[0], self.A.shape[1])
        if self.is_transposed:
            return shape[::-1]
        return shape

    def merged(self, matrix: np.ndarray | Stored) -> Stored:
        """Returns the sum in float32, which is made as its rows are read: who asked for a dtype
        rounds it once.
        """
        A, B = (np.asarray(x).astype(np.float32) for x in (self.A, self.B))
        tall, wide = (A.T, B.T) if self.is_transposed else (B, A)  # [out, r], [r, in]
        wide = wide * np.float32(self.factor)

        def rows(start: int, stop: int) -> np.ndarray:
            return np.asarray(matrix[start:stop]).astype(np.float32) + tall[start:stop] @ wide

        return Stored(tuple(matrix.shape), np.dtype(np.float32), rows)


class Adapter(NamedTuple):
    """An opened folder."""

    folder: Path
    # by the name of the tensor that they change, as transformers has it in memory
    changes: dict[str, Change]
    replaced: dict[str, np.ndarray | Stored]  # by the name of the tensor that they replace


def open_folder(folder: Path) -> Adapter:
    """Opens a LoRA folder.

    Raises:
        CheckpointError: it has no LoRA, is damaged, or has options that cannot be merged into the
            model's matrices.
    """
    try:
        table = {key: value for key, value in read_object(folder / CONFIG).items() if value != []}
        only(table, **NOT_MERGED)
        start = table.get("init_lora_weights")
        if start not in PLAIN_STARTS:
            raise FamilyError(
                f"init_lora_weights is {start!r}, which changes the model, too: convert it to "
                "plain LoRA"
            )
        alphas = _alphas(table)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} describes no adapter that can be merged: {error}"
        ) from error
    stored = {name: x for shard in tensors.shards(folder, FILES) for name, x in shard.read()}
    factors: dict[str, dict[str, Any]] = {}
    replaced: dict[str, np.ndarray | Stored] = {}
    for name, x in stored.items():
        module = name.removeprefix(PREFIX)
        end = next((end for end in FACTORS if module.endswith(end)), None)
        if end is not None:
            factors.setdefault(module.removesuffix(end), {"embeds": "embedding" in end})[
                FACTORS[end]
            ] = x
        elif "lora_" in name:
            raise CheckpointError(
                f"{folder} has {name}, which is not a factor of a matrix: merge the adapter with "
                "peft"
            )
        else:
            replaced[
                module.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
            ] = x
    changes = dict[str, Change]()
    for module, parts in factors.items():
        if not {"A", "B"} <= set(parts):
            raise CheckpointError(
                f"{folder} has one factor of {module}: expected lora_A and lora_B. Download it "
                "again"
            )
        # The rank is the factors' own: a rank_pattern need not be read.
        alpha = next(
            (value for key, value in alphas.items() if key.match(module)),
            table.get("lora_alpha", 8),
        )
        root = parts["A"].shape[0] ** (0.5 if table.get("use_rslora", False) else 1)
        changes[f"{module}.weight"] = Change(parts["A"], parts["B"], alpha / root, parts["embeds"])
    return Adapter(folder, changes, replaced)


def _alphas(table: dict[str, Any]) -> dict[re.Pattern[str], float]:
    """Returns the numbers of `alpha_pattern` by what modules' names match: their ends, as in PEFT.

    >>> [
    ...     bool(key.match("model.layers.0.q_proj"))
    ...     for key in _alphas({"alpha_pattern": {"q_proj": 2, "0.q": 4}})
    ... ]
    [True, False]
    """
    patterns = table.get("alpha_pattern") or {}
    for key, number in {"lora_alpha": table.get("lora_alpha", 8), **patterns}.items():
        if type(number) not in (int, float):
            raise FamilyError(f"alpha of {key} is {number!r}: expected a number")
    try:
        return {re.compile(rf"^(.*\.)?({key})$"): number for key, number in patterns.items()}
    except re.error as error:
        raise FamilyError(f"alpha_pattern has no regular expression: {error}") from error


def merge(
    shards: list[Shard],
    adapter: Adapter,
    canonical: Callable[[str], str | None],
    is_transposed: Callable[[str], bool],
    tied: tuple[str, str] | None,
) -> list[Shard]:
    """Returns a model's files as if the adapter had been merged into their tensors.

    Args:
        canonical: a tensor's name -> the name that all spellings of it have in common; None for one
            that is not read.
        is_transposed: whether a tensor of that name is stored [in, out], as GPT-2's are.
        tied: names of embedding and head if these are one matrix, which files may hold twice; None
            if not.

    Raises:
        CheckpointError: the adapter is another model's, or the model's files are quantised.
    """
    # Both sides by the name that all spellings of a tensor have in common.
    names = {name: canonical(name) for name in (*adapter.changes, *adapter.replaced)}
    _warn_of_unread(adapter, [name for name, key in names.items() if key is None])
    changes: dict[str, Change] = {}
    for name, change in adapter.changes.items():
        key = names[name]
        if key is not None:
            turned = change.is_transposed or is_transposed(key)
            changes[key] = change._replace(is_transposed=turned)
    replaced = {names[name]: x for name, x in adapter.replaced.items() if names[name] is not None}
    shapes = {canonical(name): shape for shard in shards for name, shape in shard.shapes.items()}
    both = {**changes, **replaced}
    if tied is not None:
        embedding, head = tied
        if embedding in both and head not in both:
            raise CheckpointError(
                f"{adapter.folder} changes {embedding}, with which the head is tied, and not the "
                "head: merge it with peft, which decides for one of two readings"
            )
        # A head that the adapter changes is no longer tied: it becomes a tensor of its own.
        if head in both and head not in shapes:
            shards = [*shards, _copy(shards, canonical, embedding, head)]
            shapes[head] = shapes[embedding]
    _check_fit(adapter, {name: tuple(x.shape) for name, x in both.items()}, shapes)
    return [_merged(shard, canonical, changes, replaced) for shard in shards]


def _merged(
    shard: Shard,
    canonical: Callable[[str], str | None],
    changes: Mapping[str, Change],
    replaced: Mapping[str | None, Any],
) -> Shard:
    """Returns a file whose tensors are replaced or changed as they are loaded."""

    def load(names: Collection[str]) -> Iterator[tuple[str, np.ndarray | Stored]]:
        for name, x in shard.load(names):
            key = canonical(name) or name
            x = replaced.get(key, x)
            if key in changes:
                x = changes[key].merged(x)
            yield name, x

    return shard._replace(load=load)


def _warn_of_unread(adapter: Adapter, names: list[str]) -> None:
    """Warns that changes of a model's other halves, which see or hear, are left out."""
    if not names:
        return
    parts = ", ".join(sorted({name.removeprefix("model.").split(".")[0] for name in names}))
    text = "%s: what it changes of %s (%d tensors) is left out: only the text half is read"
    logging.getLogger(__name__).warning(text, adapter.folder, parts, len(names))


def _check_fit(
    adapter: Adapter,
    changed: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str | None, Any],
) -> None:
    """Raises CheckpointError if an adapter's tensors are not the model's, or have other shapes."""
    of_experts = [
        name for name in changed if name.endswith((".experts.weight", ".experts.base_layer.weight"))
    ]
    if of_experts:
        text = f"{adapter.folder} changes {of_experts[0]}, the matrices of all experts"
        raise CheckpointError(f"{text}: merge it with peft")
    unknown = [name for name in changed if name not in shapes]
    if unknown:
        text = f"{adapter.folder} changes {some(sorted(unknown))}"
        raise CheckpointError(f"{text}, which the model lacks: is it another's?")
    for name, shape in changed.items():
        if shape != tuple(shapes[name]):
            text = (
                f"{adapter.folder} changes {name} by {list(shape)}, and the model's is "
                f"{list(shapes[name])}"
            )
            advice = "is it another model's? Of a vocabulary that was resized, merge it with peft"
            raise CheckpointError(f"{text}: {advice}")


def _copy(
    shards: list[Shard], canonical: Callable[[str], str | None], source: str, name: str
) -> Shard:
    """Returns a file with one tensor, which is another file's under another name."""
    shard, stored_name = next(
        (x, tensor) for x in shards for tensor in x.shapes if canonical(tensor) == source
    )

    def load(names: Collection[str]) -> Iterator[tuple[str, np.ndarray | Stored]]:
        return ((name, x) for _, x in shard.load({stored_name} if name in names else ()))

    return Shard(shard.path, {name: shard.shapes[stored_name]}, load)
