"""Tensors that files hold expert by expert, or head by head: read as stacks of all of them, and
written apart.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from jaxspec.weights.quantised_files import Quantised
from jaxspec.weights.tensors import CheckpointError, Shard, Stored


def stacked(shards: list[Shard], names: tuple[str, ...], alternate: bool = False) -> list[Shard]:
    """Presents matrices of experts, and norms of heads, as the stacks that networks have.

    `mlp.experts.3.gate_proj.weight` and `mlp.experts.3.up_proj.weight` are entries 6 and 7 of
    `mlp.experts.gate_up_proj` [2 experts, out, in], and `mlp.experts.3.down_proj.weight` is entry 3
    of `mlp.experts.down_proj`. `q_layernorm.norms.3.weight` is entry 3 of
    `q_layernorm.norms.weight` [heads, dim]. A stack is read entry by entry where the file can be
    read by rows. Files may also hold `mlp.experts.gate_up_proj` as [experts, 2 out, in].

    Args:
        names: "gate_proj", "up_proj" and "down_proj", or other names for these; empty where no file
            is like that. For norms of heads one name, "".
        alternate: whether files hold both projections as [experts, in, 2 out], whose columns belong
            to either in turn.

    Raises:
        CheckpointError: a matrix is absent, or of another shape than those beside it.
    """
    shards = [_in_pairs(shard, alternate) for shard in shards]
    # stack -> (expert, index) -> (file, name)
    members: dict[str, dict[tuple[int, int], tuple[int, str]]] = {}
    pattern = re.compile(rf"(.*\.(?:experts|norms))\.(\d+)({'|'.join(map(_end, names))})")
    for number, shard in enumerate(shards if names else ()):
        for name in shard.shapes:
            match = pattern.fullmatch(name)
            if match:
                stack, index = _STACKS[len(names)][list(map(_end, names)).index(match[3])]
                members.setdefault(f"{match[1]}.{stack}", {})[int(match[2]), index] = number, name
    stacks = [_stack(shards, name, matrices) for name, matrices in members.items()]
    apart = {name for matrices in members.values() for _, name in matrices.values()}
    return [*(shard.keep(lambda name: name not in apart) for shard in shards), *stacks]


PAIRS = re.compile(r".*\.experts\.gate_up_proj(_bias)?")


_STACKS: dict[int, tuple[tuple[str, int], ...]] = {
    # By how many names there are, and in their order: stack, and which of each expert's entries.
    0: (),
    1: (("weight", 0),),
    3: (("gate_up_proj", 0), ("gate_up_proj", 1), ("down_proj", 0)),
}


def _end(name: str) -> str:
    if name:
        return f".{name}.weight"
    return ".weight"


def _stack(
    shards: list[Shard], stack: str, matrices: Mapping[tuple[int, int], tuple[int, str]]
) -> Shard:
    file, first = next(iter(matrices.values()))
    shape = shards[file].shapes[first]
    path = shards[file].path
    count = max(expert for expert, _ in matrices) + 1
    parts = 2 if stack.endswith("gate_up_proj") else 1
    # The number is compared, and no list of experts is made: a name may say 10**9.
    if len(matrices) != count * parts:
        counted = f"{len(matrices)} matrices of {count} experts, {first} among them"
        raise CheckpointError(
            f"{path}: {stack} has {counted}: expected {count * parts}. Download it again"
        )
    for number, name in matrices.values():
        got = shards[number].shapes[name]
        if got != shape:
            raise CheckpointError(
                f"{path}: {name} is {list(got)}, and {first} {list(shape)}: expected one shape"
            )

    def load(names: Collection[str]) -> Iterator[tuple[str, Stored]]:
        # Of safetensors these still lie in their files; of other formats they are in memory, a
        # stack at a time.
        arrays: dict[str, np.ndarray | Stored] = {}
        for number in dict.fromkeys(number for number, _ in matrices.values()):
            arrays |= shards[number].read(
                {name for shard, name in matrices.values() if shard == number}
            )

        dtype = np.result_type(*{x.dtype for x in arrays.values()})
        ordered = [
            arrays[matrices[expert, index][1]] for expert in range(count) for index in range(parts)
        ]
        yield from ((name, _joined(shapes[stack], dtype, ordered)) for name in names)

    shapes = {stack: (count * parts, *shape)}
    return Shard(
        path, shapes, load, frozenset(shapes) if first in shards[file].in_full else frozenset()
    )


def _joined(
    shape: tuple[int, ...], dtype: np.dtype, members: Sequence[np.ndarray | Stored]
) -> Stored:
    """Makes the stack of matrices; quantised ones stay so."""

    def stack(
        array_of: Callable[[np.ndarray | Stored], np.ndarray],
    ) -> Callable[[int, int], np.ndarray]:
        return lambda a, b: np.stack([array_of(x) for x in members[a:b]])

    rows = stack(np.asarray)
    layers = [x for x in members if isinstance(x, Quantised)]
    alike = {(x.bits, x.scale.shape, x.columns is None) for x in layers}
    if len(layers) < len(members) or len(alike) > 1:
        return Stored(shape, dtype, rows)
    # [n, out, in] entries and [n, out, G] scales: what the file has is multiplied with, not rounded
    # again.
    first = layers[0]
    count = len(members)
    int8 = np.dtype(np.int8)
    entries = Stored(shape, int8, stack(lambda x: np.asarray(x.entries)))  # pyright: ignore
    zeros = np.zeros(first.scale.shape, np.int8)
    zero = stack(lambda x: zeros if x.zero is None else x.zero)(0, count)  # pyright: ignore
    scale = stack(lambda x: x.scale)(0, count)  # pyright: ignore
    parts = {"entries": entries, "scale": scale, "zero": zero if zero.any() else None}
    return dataclasses.replace(first, shape=shape, dtype=dtype, rows=rows, **parts)


def _in_pairs(shard: Shard, alternate: bool) -> Shard:
    """Presents the two projections that share a matrix of each expert as two entries, one after the
    other.
    """
    axis = -1 if alternate else 1
    fused = {
        name
        for name, shape in shard.shapes.items()
        if PAIRS.fullmatch(name) and shape[axis] % 2 == 0
    }
    if not fused:
        return shard

    def load(names: Collection[str]) -> Iterator[tuple[str, np.ndarray | Stored]]:
        for name, x in shard.load(names):
            yield name, _pairs(x, axis, alternate) if name in fused else x

    shapes = {
        name: _in_two(shape, axis) if name in fused else shape
        for name, shape in shard.shapes.items()
    }
    return shard._replace(shapes=shapes, load=load)


def _in_two(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    halved = list(shape)
    halved[0], halved[axis] = 2 * shape[0], shape[axis] // 2
    return tuple(halved)


def _pairs(x: np.ndarray | Stored, axis: int, alternate: bool) -> Stored:
    """Presents [n, .., 2 out, ..], with 2 out along `axis`, as [2 n, .., out, ..]."""
    pairs = _stored_pairs(x, axis, alternate)
    if not isinstance(x, Quantised):
        return pairs
    # Entries and scales are [n, out, ..] in a file whose matrices are [n, in, out], too.
    return dataclasses.replace(
        x,
        shape=pairs.shape,
        rows=pairs.rows,
        entries=_stored_pairs(x.entries, 1, alternate),
        scale=_halves(x.scale, 1, alternate),
        zero=None if x.zero is None else _halves(x.zero, 1, alternate),
    )


def _stored_pairs(x: np.ndarray | Stored, axis: int, alternate: bool) -> Stored:
    """`_halves` of an array whose experts are read when they are needed."""

    def rows(start: int, stop: int) -> np.ndarray:
        # Entries 2 e and 2 e + 1 are the halves of expert e, which is read whole.
        first_expert = start // 2
        end_expert = (stop + 1) // 2
        entries = _halves(np.asarray(x[first_expert:end_expert]), axis, alternate)
        return entries[start - 2 * first_expert : stop - 2 * first_expert]

    return Stored(_in_two(x.shape, axis), x.dtype, rows)


def _halves(x: np.ndarray, axis: int, alternate: bool) -> np.ndarray:
    """Splits the matrix of each expert in two: [n, .., 2 out, ..] -> [2 n, .., out, ..].

    >>> _halves(np.array([[0, 1, 2, 3]]), 1, alternate=False).tolist()
    [[0, 1], [2, 3]]
    >>> _halves(np.array([[0, 1, 2, 3]]), 1, alternate=True).tolist()
    [[0, 2], [1, 3]]
    """
    x = np.moveaxis(x, axis, 1)  # [n, 2 out, ..]
    if alternate:
        parts = (x[:, 0::2], x[:, 1::2])
    else:
        parts = np.split(x, 2, axis=1)
    pairs = np.stack(parts, axis=1)  # [n, 2, out, ..]
    entries = pairs.reshape(2 * len(x), *pairs.shape[2:])  # [2 n, out, ..]
    return np.moveaxis(entries, 1, axis)


def unstacked(
    name: str, tensor: np.ndarray, names: tuple[str, ...], alternate: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields what `stacked` makes a stack of; any other tensor as it is.

    >>> [x for x, _ in unstacked("mlp.experts.down_proj", np.zeros((2, 3, 4)), ("w1", "w3", "w2"))]
    ['mlp.experts.0.w2.weight', 'mlp.experts.1.w2.weight']
    """
    layer, _, stack = name.rpartition(".")
    parts = _STACKS[len(names) if layer.endswith((".experts", ".norms")) else 0]
    ends = [
        _end(x) for x, (member_stack, _) in zip(names, parts, strict=False) if member_stack == stack
    ]
    if ends:
        for entry, matrix in enumerate(tensor):
            yield f"{layer}.{entry // len(ends)}{ends[entry % len(ends)]}", matrix
    elif PAIRS.fullmatch(name):
        axis = -1 if alternate else 1
        pairs = np.moveaxis(tensor.reshape(-1, 2, *tensor.shape[1:]), 1, axis if alternate else 1)
        shape = list(tensor.shape)
        shape[0], shape[axis] = shape[0] // 2, 2 * shape[axis]
        yield name, np.ascontiguousarray(pairs).reshape(shape)
    else:
        yield name, tensor
