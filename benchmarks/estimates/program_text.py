"""Reads a compiled program as XLA prints it: estimated cycles and bytes by part, copies.

An operation belongs to the part of a generation that its name scope says (`jax.named_scope` in
`decode` and `core`):

    prefill      whatever is outside of the loop over rounds
    draft        the drafter, outside of its own loop: for a chain, its first token of the round, with the catch-up
    draft step   the body of the drafter's loop, once
    target       the target's pass: the verify pass of a round, or the one-token pass of plain decoding
    accept, commit, rest    the verdict, the commit, and what has no scope

Every loop's body is counted once. Of a conditional's branches, or those of `core.branches.switch`,
the most expensive one is counted. If the compiler dropped a product's scope, as a GPU's does when
it splits one, the product belongs to the part that computed its inputs.

On a GPU each operation is a kernel, whose time follows from the bytes it reads and from measured
kernels (`roofline.Machine.kernel_seconds`). The host reads whether a loop of unknown length goes
on, and waits for that until the GPU has finished all its work. Its compiler's cycles are not read
(docs/gpu.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks.estimates.absent import array_bytes
from jaxspec.analysis import roofline

# bytes above which a copy in the loop is one of a weight or a cache, not of a step's activations
LARGE = 1 << 20


class Part(NamedTuple):
    """A part of a program.

    Attributes:
        cycles: the compiler's estimate.
        bytes_read: from the chip's main memory, prefetches included.
        kernels: operations; each is one on a GPU.
        host_reads: conditions of loops and conditionals that, on a GPU, the host reads.
        kernel_seconds: the kernels' times, on a machine for which these are known.
    """

    cycles: int = 0
    bytes_read: int = 0
    kernels: int = 0
    host_reads: int = 0
    kernel_seconds: float = 0.0

    def seconds(self, machine: roofline.Machine) -> float:
        """Computes the time: the larger of the estimate, if there is one, and of the memory's time
        for what is read.
        """
        return max(
            self.cycles / (machine.clock or math.inf),
            self.bytes_read / machine.bandwidth,
            self.kernel_seconds,
        )


class _Operation(NamedTuple):
    """A line of the program: `name = shape kind(written), attributes`; operands are the names in
    what is written.
    """

    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    written: str
    attributes: str


_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\](\{[^}]*\})?")
_ELSEWHERE = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\([^}]*\}")  # an array in the chip's own memory
_Computations = dict[str, dict[str, _Operation]]
# Prefetches, whole or in slices that are then joined, and other names for the same bytes.
_SEEN_THROUGH = ("copy-start", "copy-done", "slice-start", "slice-done", "bitcast")
_JOINED = 'custom_call_target="ConcatBitcast"'
_NOTHING = ("tuple", "get-tuple-element", "parameter", "constant")
_NO_READERS = (*_SEEN_THROUGH, *_NOTHING, "while", "conditional", "call")
_NOT_RUN = (
    *_NOTHING,
    "bitcast",
    "copy-done",
    "slice-done",
    "all-reduce-done",
    "all-gather-done",
    "after-all",
)
_LAYOUT_ONLY = {"parameter", "bitcast", "copy", "transpose", "convert", "reshape"}


class Contents(NamedTuple):
    """The counts that are read from a program.

    Attributes:
        parts: parts by name, those that the program has.
        copies: operations in the loop over rounds that copy a large array into another layout, with
            its bytes.
        widened: operations there that write a weight or a cache in a wider dtype, with the bytes
            that they write.
    """

    parts: dict[str, Part]
    copies: dict[str, int]
    widened: dict[str, int]


def read(text: str, machine: roofline.Machine | None = None) -> Contents:
    """Reads a program as XLA prints it, for a machine whose kernels' times are known or for another
    one.
    """
    computations, entry = _parse(text)
    contents = Contents({}, {}, {})
    seconds = None if machine is None or not machine.kernel else machine.kernel_seconds
    return contents._replace(parts=_parts(computations, entry, "prefill", contents, seconds))


def _parse(text: str) -> tuple[_Computations, str]:
    """Splits a program into its computations, by name, and tells which one is run."""
    computations, entry, body = _Computations(), "", dict[str, _Operation]()
    for line in text.splitlines():
        if (head := _HEAD.match(line)) is not None:
            body = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif (match := _LINE.match(line)) is not None:
            name, shape, kind, rest = match.groups()
            operands, _, attributes = rest.partition(")")
            body[name] = _Operation(
                name, shape, kind, tuple(_names(operands)), operands, attributes
            )
    return computations, entry


def _parts(
    computations: _Computations,
    name: str,
    default: str,
    contents: Contents,
    kernel_seconds: Callable[[int], float] | None,
) -> dict[str, Part]:
    """Adds up a computation by parts; operations without a scope of their own belong to
    `default`.
    """
    totals: dict[str, Part] = {}
    # of `core.branches.switch`: of these one is run
    alternatives = dict[str, list[dict[str, Part]]]()
    # origins: the parts of what was computed before
    body, origins = computations.get(name, {}), dict[str, str]()
    for operation in body.values():
        scope = _scope(operation)
        part = part_of(scope, "")
        fused = (
            computations.get(_called(operation, "calls")[0], {})
            if operation.kind == "fusion"
            else {}
        )
        if not part:  # a fusion of several results has no scope, but what it consists of has
            part = next(
                filter(None, (part_of(_scope(inside), "") for inside in fused.values())), ""
            )
        origin = part or next(
            filter(None, (origins.get(operand, "") for operand in operation.operands)), ""
        )
        origins[operation.name] = part if scope else origin
        if not scope and any(inside.kind == "dot" for inside in fused.values()):
            part = origin
        part, inner = part or default, dict[str, Part]()
        if operation.kind == "while":
            is_rounds = default == "prefill" and scope.endswith(")/while")
            is_step = part == "draft" and not scope.endswith("branch/while")
            within = "rest" if is_rounds else "draft step" if is_step else part
            inner = _parts(
                computations, _called(operation, "body")[0], within, contents, kernel_seconds
            )
            # its condition is read before each iteration
            if "known_trip_count" not in operation.attributes:
                _add(inner, {within: Part(kernels=1, host_reads=1)})
                if not is_rounds:  # and at the end
                    _add(totals, {part: Part(kernels=1, host_reads=1)})
            if scope.endswith("one_of/branch/while"):
                alternatives.setdefault(scope, []).append(inner)
                continue
        elif operation.kind == "conditional":
            branches = _called(operation, "branch_computations|true_computation|false_computation")
            inner = _most_expensive(
                [
                    _parts(computations, branch, part, contents, kernel_seconds)
                    for branch in branches
                ]
            )
            _add(inner, {part: Part(host_reads=1)})
        elif operation.kind == "call":
            inner = _parts(
                computations, _called(operation, "to_apply")[0], part, contents, kernel_seconds
            )
        else:
            estimate = re.search(r'"estimated_cycles":"(\d+)"', operation.attributes)
            cycles, is_run = int(estimate[1]) if estimate else 0, operation.kind not in _NOT_RUN
            bytes_read = _bytes_read(operation, body, computations)
            seconds = float(kernel_seconds(bytes_read)) if kernel_seconds and is_run else 0.0
            inner = {part: Part(cycles, bytes_read, int(is_run), kernel_seconds=seconds)}
            if default != "prefill" and is_run and _bytes(operation.shape) >= LARGE:
                if _is_copy(operation, computations):
                    contents.copies[operation.name] = _bytes(operation.shape)
                if _is_widened(operation, body):
                    contents.widened[operation.name] = _bytes(operation.shape)
        _add(totals, inner)
    for choices in alternatives.values():
        _add(totals, _most_expensive(choices))
    return totals


def _add(totals: dict[str, Part], parts: dict[str, Part]) -> None:
    for which, more in parts.items():
        before = totals.get(which, Part())
        totals[which] = Part(*map(sum, zip(before, more, strict=True)))


def _most_expensive(choices: list[dict[str, Part]]) -> dict[str, Part]:
    def cost(parts: dict[str, Part]) -> tuple[int, int]:
        return sum(part.cycles for part in parts.values()), sum(
            part.bytes_read for part in parts.values()
        )

    return max(choices, key=cost, default={})


def _scope(operation: _Operation) -> str:
    match = re.search(r'op_name="([^"]*)"', operation.attributes)
    return match[1] if match else ""


def part_of(scope: str, default: str) -> str:
    """Names the part of a generation that an operation belongs to.

    >>> (
    ...     part_of("jit(generation)/while/body/draft/while/body/add", "rest"),
    ...     part_of("reduce_sum", "rest"),
    ... )
    ('draft step', 'rest')
    >>> part_of("jit(generation)/draft/Decoder.run/add", "prefill")
    'prefill'
    """
    match = re.match(r"jit\([^)]*\)/while/body/(\w+)/(.*)", scope)
    if match is None or match[1] not in ("draft", "target", "accept", "commit"):
        return default
    return "draft step" if match[1] == "draft" and match[2].startswith("while/body/") else match[1]


def _names(text: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", text)


def _called(operation: _Operation, attribute: str) -> list[str]:
    lists = re.findall(rf"\b(?:{attribute})=(\{{[^}}]*\}}|%[\w.\-]+)", operation.attributes)
    return [name for names in lists for name in _names(names)]


def _bytes(shape: str, of_main_memory: bool = False) -> int:
    """Adds up the bytes of an array or a tuple, or of what of it lies in the main memory.

    >>> (
    ...     _bytes("(bf16[2,8]{1,0:T(8,128)(2,1)S(1)}, f32[3]{0:T(128)})"),
    ...     _bytes("bf16[2,8]{1,0:S(1)}", True),
    ... )
    (44, 0)
    """
    return array_bytes(_ELSEWHERE.sub("", shape) if of_main_memory else shape)


def _bytes_read(
    operation: _Operation, body: Mapping[str, _Operation], computations: _Computations
) -> int:
    """Computes the bytes that an operation reads from the main memory; of what was prefetched, that
    of its origin.
    """
    if operation.kind in _NO_READERS or _JOINED in operation.attributes:
        return 0
    total = 0
    for index, name in enumerate(operation.operands):
        if size := _bytes_at_origin(name, body):
            total += int(min(size, _bytes_used(operation, index, computations)))
    return total


def _bytes_at_origin(name: str, body: Mapping[str, _Operation]) -> int:
    """Computes the bytes of an array that lie, or lay before they were prefetched, in the main
    memory.
    """
    operation = body.get(name)
    if operation is None:
        return 0
    if _JOINED in operation.attributes:
        return sum(_bytes_at_origin(operand, body) for operand in operation.operands)
    if operation.kind not in _SEEN_THROUGH or not operation.operands:
        return _bytes(operation.shape, of_main_memory=True)
    size = _bytes_at_origin(operation.operands[0], body)
    return min(size, _bytes(operation.shape)) if operation.kind == "slice-done" else size


def _bytes_used(operation: _Operation, index: int, computations: _Computations) -> float:
    """Computes how much of an operand is used: all of it, but where it is only sliced, looked up or
    written into.
    """
    if operation.kind in ("dynamic-slice", "gather", "slice") and index == 0:
        return _bytes(operation.shape)
    if operation.kind in ("dynamic-update-slice", "scatter") and index == 0:
        return 0
    if operation.kind != "fusion":
        return math.inf
    body = computations.get(_called(operation, "calls")[0], {})
    inside = [
        inner
        for inner in body.values()
        if inner.kind == "parameter" and inner.written == str(index)
    ]
    return (
        sum(_bytes_used_of(inner.name, body, computations) for inner in inside)
        if inside
        else math.inf
    )


def _bytes_used_of(name: str, body: Mapping[str, _Operation], computations: _Computations) -> float:
    """Adds up what the operations of a computation use of one of its arrays; all of it, if it is
    the result.
    """
    uses = [
        (o, index)
        for o in body.values()
        for index, operand in enumerate(o.operands)
        if operand == name
    ]
    # A copy into another layout, inside of a fusion, is made of what is used of it: an expert of a
    # stack.
    passed_on = [o.kind == "bitcast" or _is_copy(o, computations) for o, _ in uses]
    used = [
        _bytes_used_of(o.name, body, computations)
        if passes
        else _bytes_used(o, index, computations)
        for (o, index), passes in zip(uses, passed_on, strict=True)
    ]
    return sum(used) if used else math.inf


def _is_copy(operation: _Operation, computations: _Computations) -> bool:
    """Tells whether an operation does nothing but write an array in another layout or dtype."""
    if operation.kind == "fusion":
        body = computations.get(_called(operation, "calls")[0], {})
        return {inner.kind for inner in body.values()} <= _LAYOUT_ONLY
    return operation.kind in ("copy", "transpose")


def _is_widened(operation: _Operation, body: Mapping[str, _Operation]) -> bool:
    """Tells whether an operation writes, in a wider dtype, an array that the loop was given: a
    weight or a cache.
    """
    written = _entries_and_bits(operation.shape)
    for name in operation.operands:
        origin = body.get(name)
        while origin is not None and origin.kind == "bitcast":
            origin = body.get(origin.operands[0])
        holder = (
            body.get(origin.operands[0])
            if origin is not None and origin.kind == "get-tuple-element"
            else origin
        )
        if origin is None or holder is None or holder.kind != "parameter":
            continue
        held = _entries_and_bits(origin.shape)
        if any(
            count == entries and bits < more for count, bits in held for entries, more in written
        ):
            return True
    return False


def _entries_and_bits(shape: str) -> list[tuple[int, int]]:
    """Lists of an array, or of each of a tuple, how many entries it has and of how many bits; of
    pred none.

    >>> _entries_and_bits("(bf16[2,8]{1,0}, s4[3]{0:E(4)}, pred[5]{0})")
    [(16, 16), (3, 4)]
    """
    arrays = ((bits, sizes) for _, bits, sizes, _ in _ARRAY.findall(shape) if bits)
    return [
        (math.prod(int(size) for size in sizes.split(",") if size), int(bits))
        for bits, sizes in arrays
    ]
