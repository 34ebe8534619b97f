"""Tensors that files hold expert by expert, or head by head: read as stacks of all of them, and written apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from jaxspec.weights.quantised_files import Quantised
from jaxspec.weights.tensors import CheckpointError, Shard, Stored


def stacked(shards: list[Shard], names: tuple[str, ...]) -> list[Shard]:
    """Presents tensors that files hold expert by expert, or head by head, as stacks, which networks have.

    `mlp.experts.3.gate_proj.weight` and `mlp.experts.3.up_proj.weight` are the rows of entry 3 of
    `mlp.experts.gate_up_proj` [experts, out, in], and `mlp.experts.3.down_proj.weight` is that of
    `mlp.experts.down_proj`. `q_layernorm.norms.3.weight` is entry 3 of `q_layernorm.norms.weight` [heads, dim]. A
    stack is read entry by entry where the file can be read by rows.

    Args:
        shards: the files.
        names: "gate_proj", "up_proj" and "down_proj", or other names for these; empty where no file is like that. For
            norms of heads one name, "".

    Raises:
        CheckpointError: a matrix is absent, or of another shape than those beside it.
    """
    members: dict[str, dict[tuple[int, int], tuple[int, str]]] = {}  # stack -> (expert, part) -> (file, name)
    pattern = re.compile(rf"(.*\.(?:experts|norms))\.(\d+)({'|'.join(map(_end, names))})")
    for number, shard in enumerate(shards if names else ()):
        for name in shard.shapes:
            if match := pattern.fullmatch(name):
                stack, part = _STACKS[len(names)][list(map(_end, names)).index(match[3])]
                members.setdefault(f"{match[1]}.{stack}", {})[int(match[2]), part] = number, name
    stacks = [_stack(shards, name, matrices) for name, matrices in members.items()]
    apart = {name for matrices in members.values() for _, name in matrices.values()}
    return [*(shard.keep(lambda name: name not in apart) for shard in shards), *stacks]


_STACKS: dict[int, tuple[tuple[str, int], ...]] = {
    # By how many names there are, and in their order: stack, and part of each entry's rows.
    0: (),
    1: (("weight", 0),),
    3: (("gate_up_proj", 0), ("gate_up_proj", 1), ("down_proj", 0)),
}


def _end(name: str) -> str:
    return f".{name}.weight" if name else ".weight"


def _stack(shards: list[Shard], stack: str, matrices: Mapping[tuple[int, int], tuple[int, str]]) -> Shard:
    file, first = next(iter(matrices.values()))
    shape, path = shards[file].shapes[first], shards[file].path
    count = max(expert for expert, _ in matrices) + 1
    parts = 2 if stack.endswith("gate_up_proj") else 1
    # The number is compared, and no list of experts is made: a name may say 10**9.
    if len(matrices) != count * parts:
        counted = f"{len(matrices)} matrices of {count} experts, {first} among them"
        raise CheckpointError(f"{path}: {stack} has {counted}: expected {count * parts}. Download it again")
    for number, name in matrices.values():
        if (other := shards[number].shapes[name]) != shape:
            raise CheckpointError(f"{path}: {name} is {list(other)}, and {first} {list(shape)}: expected one shape")
    rows, *rest = shape

    def load(names: Collection[str]) -> Iterator[tuple[str, Stored]]:
        # Of safetensors these still lie in their files; of other formats they are in memory, a stack at a time.
        arrays: dict[str, np.ndarray | Stored] = {}
        for number in dict.fromkeys(number for number, _ in matrices.values()):
            arrays |= shards[number].read({name for other, name in matrices.values() if other == number})

        dtype = np.result_type(*{x.dtype for x in arrays.values()})
        ordered = [[arrays[matrices[expert, part][1]] for part in range(parts)] for expert in range(count)]
        yield from ((name, _joined(shapes[stack], dtype, ordered)) for name in names)

    shapes = {stack: (count, parts * rows, *rest)}
    return Shard(path, shapes, load, frozenset(shapes) if first in shards[file].in_full else frozenset())


def _joined(shape: tuple[int, ...], dtype: np.dtype, members: Sequence[Sequence[np.ndarray | Stored]]) -> Stored:
    """Makes the stack of matrices, for each expert those whose rows follow each other; quantised ones stay so."""

    def stack(part: Callable[[np.ndarray | Stored], np.ndarray]) -> Callable[[int, int], np.ndarray]:
        return lambda a, b: np.stack([np.concatenate([part(x) for x in rows]) for rows in members[a:b]])

    rows = stack(np.asarray)
    layers = [x for matrices in members for x in matrices if isinstance(x, Quantised)]
    alike = {(x.bits, x.scale.shape, x.columns is None) for x in layers}
    if len(layers) < sum(map(len, members)) or len(alike) > 1:
        return Stored(shape, dtype, rows)
    # [E, out, in] entries and [E, out, G] scales: what the file has is multiplied with, not rounded again.
    first, count = layers[0], len(members)
    entries = Stored(shape, np.dtype(np.int8), stack(lambda x: np.asarray(x.entries)))  # pyright: ignore
    zeros = np.zeros(first.scale.shape, np.int8)
    zero = stack(lambda x: zeros if x.zero is None else x.zero)(0, count)  # pyright: ignore
    scale = stack(lambda x: x.scale)(0, count)  # pyright: ignore
    return Quantised(shape, dtype, rows, entries, scale, zero if zero.any() else None, first.bits, first.columns)


def unstacked(name: str, tensor: np.ndarray, names: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields what `stacked` makes a stack of; any other tensor as it is.

    >>> [x for x, _ in unstacked("mlp.experts.down_proj", np.zeros((2, 3, 4)), ("w1", "w3", "w2"))]
    ['mlp.experts.0.w2.weight', 'mlp.experts.1.w2.weight']
    """
    layer, _, stack = name.rpartition(".")
    parts = _STACKS[len(names) if layer.endswith((".experts", ".norms")) else 0]
    ends = [_end(x) for x, (other, _) in zip(names, parts, strict=False) if other == stack]
    if not ends:
        yield name, tensor
        return
    for expert, rows in enumerate(tensor):
        for end, matrix in zip(ends, np.split(rows, len(ends)), strict=True):
            yield f"{layer}.{expert}{end}", matrix
