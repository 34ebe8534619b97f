"""Compiles a generation for TPUs that are not here, and reads from the program how long its parts should take.

libtpu, the compiler of TPUs, runs on any Linux machine. `estimate` hands it the program that `jaxspec.generate` would
run, made from shapes alone: no weights are loaded, and nothing runs. What it says of sizes (arguments, temporaries,
code) and of collectives is exact; a time is the compiler's own estimate, which it writes on every fused operation.

An operation belongs to the part of a generation that its name scope says (`jax.named_scope` in `decode` and `core`):

    prefill      whatever is outside of the loop over rounds
    draft        the drafter, outside of its own loop: for a chain, its first token of the round, with the catch-up
    draft step   the body of the drafter's loop, once
    target       the target's pass: the verify pass of a round, or the one-token pass of plain decoding
    accept, commit, rest    the verdict, the commit, and what has no scope

Every loop's body is counted once, and of the branches of a conditional the most expensive. What chips wait for each
other is not estimated. On v5e and v6e the compiler's estimate leaves out the time of the memory: the time of a part is
therefore the larger of its estimate and of the bytes it reads over the memory's bandwidth.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pickle
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from jaxspec import sharding
from jaxspec.analysis import formulas, roofline
from jaxspec.core import Model, Params, Weights, token_rows
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared
from jaxspec.drafters.lookups.ngram_model import NGramConfig
from jaxspec.nets import net_of
from jaxspec.weights import huggingface, int8, loading

SMALLEST = {"v4": "2x2x1", "v5p": "2x2x1", "v5e": "2x2", "v6e": "2x2"}  # shapes of the smallest hosts
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
ROUND = ("draft", "draft step", "target", "accept", "commit", "rest")
SUFFIX = ".executable"
LARGE = 1 << 20  # bytes above which a copy in the loop is one of a weight or a cache, not of a step's activations


class Part(NamedTuple):
    """A part of a program.

    Attributes:
        cycles: the compiler's estimate.
        bytes_read: from the chip's main memory, prefetches included.
    """

    cycles: int = 0
    bytes_read: int = 0

    def seconds(self, machine: roofline.Machine) -> float:
        """Computes the time: the larger of the estimate and of the memory's time for what is read."""
        assert machine.clock is not None
        return max(self.cycles / machine.clock, self.bytes_read / machine.bandwidth)


class Program(NamedTuple):
    """A generation, compiled for one chip of perhaps several.

    Attributes:
        compile_seconds: what compiling it took.
        arguments, outputs, temporaries, code: bytes of each chip; weights are arguments.
        collectives: number and bytes of each kind, in the whole program.
        parts: by name; those that the program has.
        copies: operations in the loop over rounds that copy a large array into another layout, with its bytes.
    """

    compile_seconds: float
    arguments: int
    outputs: int
    temporaries: int
    code: int
    collectives: dict[str, tuple[int, int]]
    parts: dict[str, Part]
    copies: dict[str, int]

    memory = property(lambda self: self.arguments + self.outputs + self.temporaries + self.code, doc="Bytes of a chip.")


class Compiled(NamedTuple):
    """A compiled generation.

    Attributes:
        program: what it takes.
        executable: as `jax.jit(...).lower(...).compile()` returns it.
        fingerprint: what it is good for: versions, devices, shapes, and the program itself.
    """

    program: Program
    executable: Any
    fingerprint: dict[str, Any]


class Expected(NamedTuple):
    """What an acceptance rate promises: tokens a round of each row, tokens/s of all rows, speed over plain decoding."""

    tokens_per_round: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speed_up: float


class Estimate(NamedTuple):
    """What the compiler makes of a generation and of plain decoding with the same target.

    Attributes:
        topology, chips, mesh: for which devices, and how many of them are used.
        machine: one of them, as the compiler sees it (of a v4 one of its two cores).
        batch, gamma: rows, and draft tokens a round (of a tree its depth).
        trees: whether the draft is one.
        plain, speculative: the programs; the latter is None where nothing drafts.
        floors: bytes that the target's and the drafter's weights and caches have on a chip, as far as a pass must read
            them: "target" and "draft".
        compiled: both programs by the names "plain" and "speculative", to be saved.
    """

    topology: str
    chips: int
    mesh: str
    machine: roofline.Machine
    batch: int
    gamma: int
    trees: bool
    plain: Program
    speculative: Program | None
    floors: dict[str, float]
    compiled: dict[str, Compiled]

    def seconds(self, name: str, program: Program | None = None) -> float:
        """Returns the time of a part of the speculative program, or of another one."""
        program = program or self.speculative or self.plain
        return program.parts.get(name, Part()).seconds(self.machine)

    @property
    def plain_seconds(self) -> float:
        """The time of a token of plain decoding: the pass and what is around it."""
        return sum(self.seconds(name, self.plain) for name in ROUND)

    @property
    def draft_seconds(self) -> float:
        """The time of a round's draft: of a chain, its first token and one step for each other token."""
        return self.seconds("draft") + max(self.gamma - 1, 0) * self.seconds("draft step")

    @property
    def rest_seconds(self) -> float:
        """The time of a round outside of both models' passes."""
        return sum(self.seconds(name) for name in ("accept", "commit", "rest"))

    @property
    def round_seconds(self) -> float:
        """The time of a round."""
        return self.draft_seconds + self.seconds("target") + self.rest_seconds

    @property
    def c(self) -> float:
        """The time of a draft token (of a tree, of a level) over that of the target's one-token pass."""
        return self.draft_seconds / max(self.gamma, 1) / self.seconds("target", self.plain)

    @property
    def v(self) -> float:
        """The time of the verify pass over that of the target's one-token pass."""
        return self.seconds("target") / self.seconds("target", self.plain)

    @property
    def fits(self) -> bool:
        """Whether the programs' bytes are fewer than the chip's memory."""
        programs = [self.plain, *([self.speculative] if self.speculative else [])]
        return self.machine.memory is None or all(program.memory <= self.machine.memory for program in programs)

    def expected(self, alpha: float) -> Expected:
        """Computes what an acceptance rate promises, if draft tokens are accepted independently.

        Raises:
            ValueError: the draft is a tree, whose tokens a round do not follow from one rate.
        """
        if self.trees or self.speculative is None:
            raise ValueError(
                "an acceptance rate tells the tokens a round of a chain only: estimate one, with a drafter"
            )
        tokens = float(formulas.expected_tokens(alpha, self.gamma))
        speed, plain = (self.batch * n / t for n, t in ((tokens, self.round_seconds), (1.0, self.plain_seconds)))
        return Expected(tokens, speed, plain, speed / plain)


def shape_model(name: str, dtype: str = "bfloat16") -> Model:
    """Makes a model without weights: its parameters are shapes, which is all that compiling needs.

    Args:
        name: a published shape (`jaxspec models` lists them), a checkpoint's folder, a config.json of Hugging Face's,
            or the name of a shipped checkpoint.
        dtype: of the matrices: "float32", "bfloat16" or "int8".

    Raises:
        ValueError: no such shape, file or dtype.

    >>> model = shape_model("t5-v1_1-xxl")
    >>> f"{int8.count(model.params):,}", model.params["decoder_0"]["ff"]["wi"]["weight"].shape
    ('11,135,332,352', (10240, 4096))
    """
    dtype, shapes, path = loading.dtype_name(dtype), roofline.published_shapes(), Path(name).expanduser()
    if name in shapes:
        config = shapes[name]
    elif path.is_file() and path.suffix == ".json":
        config = huggingface.read_config(path.parent)[1]
    elif (local := loading.local(name, loading.shipped())) is not None:
        config = loading.format_of(local).open(local).config()
    else:
        raise ValueError(
            f"no shape, folder or config.json {name!r}: expected one of {', '.join(shapes)}, or a path. The weights of "
            "a model of the hub are not needed: name its shape"
        )
    config = dataclasses.replace(config, dtype=int8.computation(dtype))

    def params() -> Params:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: int8.as_dtype(path, x, dtype), net_of(config).init(config, jax.random.key(0))
        )

    return Model(net_of(config).language_model(config), jax.eval_shape(params), config=config, name=name)


def estimate(
    prepared: Prepared,
    topology: str,
    *,
    mesh: str | Mesh | None = None,
    advance: Callable[[str], object] = lambda doing: None,
) -> Estimate:
    """Compiles a generation, and plain decoding with the same target, for a TPU, and estimates their times.

    Args:
        prepared: of `jaxspec.decode.request.prepare`; its models may be those of `shape_model`.
        topology: a kind of chip and how many of them, as "v5p:2x2x1"; "v5p" alone is the smallest host.
        mesh: how to split the models over them, as `jaxspec.load` takes it; by default they lie on one chip.
        advance: called with what is compiled next, before each of the two programs.

    Raises:
        ImportError: libtpu, the compiler, is not installed.
        ValueError: there is no such topology, or it has too few chips for the mesh.

    Example, some minutes for large models:
        >>> from jaxspec import Prompt
        >>> from jaxspec.decode.request import prepare
        >>> target, draft = shape_model("llama-3.1-8b"), shape_model("llama-3.2-1b")
        >>> prompt = Prompt(np.zeros((1, 64), np.int32), np.array([64]))
        >>> prepared = prepare(target, prompt, drafter=draft, gamma=5)
        >>> print(estimate(prepared, "v5p:2x2x1").v)  # doctest: +SKIP
        1.05
    """
    name, devices = tpu_devices(topology)
    machine, sizes = machine_of(name, devices), {"data": 1, "model": 1}
    compiled = {}
    for which, request in (("plain", prepared.plain()), ("speculative", prepared)):
        if which == "speculative" and prepared.drafter is None:
            continue
        advance(which)
        compiled[which] = compile_generation(request, devices, mesh)
    programs = {which: made.program for which, made in compiled.items()}
    if mesh is not None:
        sizes = dict(sharding.mesh(mesh, devices).shape)
    return Estimate(
        topology=name,
        chips=math.prod(sizes.values()),
        mesh=",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1),
        machine=machine,
        batch=len(prepared.request.max_new_tokens),
        gamma=prepared.decoder.gamma,
        trees=prepared.decoder.trees,
        plain=programs["plain"],
        speculative=programs.get("speculative"),
        floors=_floors(prepared, sizes.get("data", 1), sizes.get("model", 1)),
        compiled=compiled,
    )


def tpu_devices(topology: str) -> tuple[str, list[Any]]:
    """Returns the full name of a topology, and its devices, of which none is here.

    Raises:
        ImportError, ValueError: as `estimate`.
    """
    kind, _, shape = topology.partition(":")
    name = f"{kind}:{shape or SMALLEST.get(kind, '')}"
    if importlib.util.find_spec("libtpu") is None:
        wanted = [r.partition(";")[0].strip() for r in importlib.metadata.requires("jax") or () if "libtpu" in r]
        raise ImportError(
            "libtpu, the compiler of TPUs, is not installed (it needs no TPU): "
            f"pip install --no-deps '{(wanted or ['libtpu'])[0]}' brings the one that this jax names"
        )
    # There may be no TPU, and libtpu would look for one.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    from jax.experimental import topologies

    try:
        if kind not in SMALLEST:
            raise ValueError(f"no chip {kind!r} is in the table")
        return name, list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
    except Exception as error:  # of several kinds, from libtpu
        kinds = ", ".join(f"{kind}:{shape}" for kind, shape in SMALLEST.items())
        raise ValueError(f"topology is {topology!r}: expected one such as {kinds} ({error})") from error


def machine_of(topology: str, devices: Sequence[Any]) -> roofline.Machine:
    """Returns a device of a topology as a machine: of a chip that is two devices, each has half of it."""
    chip = roofline.machine(f"tpu-{topology.partition(':')[0]}")
    cores = len(devices) // len({tuple(device.coords) for device in devices})
    halved = {f: getattr(chip, f) / cores for f in ("bandwidth", "bfloat16", "memory") if getattr(chip, f)}
    return chip._replace(**halved)


def compile_generation(prepared: Prepared, devices: Sequence[Any], mesh: str | Mesh | None = None) -> Compiled:
    """Compiles the program that `jaxspec.generate` would run, for some devices, and reads what it takes.

    Args:
        prepared: as in `estimate`; of arrays only shapes and dtypes are read.
        devices: of a topology, or of this machine.
        mesh: as in `estimate`.
    """
    place = None if mesh is None else sharding.mesh(mesh, devices)
    lowered = _lower(prepared, place, devices[0])
    started = time.monotonic()
    executable = lowered.compile()
    seconds, memory, text = time.monotonic() - started, executable.memory_analysis(), executable.as_text() or ""
    sizes = (
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
    )
    return Compiled(Program(seconds, *sizes, *read(text)), executable, _fingerprint(lowered, devices[0], place))


def _lower(prepared: Prepared, mesh: Mesh | None, device: Any) -> Any:
    """Lowers the generation, with weights and rows where `jaxspec.load` and `prepare` would put them."""
    weights, prompt, request = prepared.weights, prepared.prompt, prepared.request
    if mesh is None:
        places = jax.tree.map(lambda _: SingleDeviceSharding(device), (weights, prompt, request))
    else:
        drafting = prepared.drafter.models[0] if prepared.drafter and prepared.drafter.models else prepared.target
        places = (
            Weights(
                sharding.parameters(weights.target, prepared.target.config, mesh),
                sharding.parameters(weights.draft, drafting.config, mesh),
            ),
            sharding.rows(prompt, len(prompt.length), mesh),
            sharding.rows(request, len(request.max_new_tokens), mesh),
        )
    shapes = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (weights, prompt, request), places
    )
    return loop.generation.lower(prepared.decoder, *shapes, prepared.max_new_tokens)


def _floors(prepared: Prepared, data: int, model: int) -> dict[str, float]:
    """Computes the bytes that a pass of each model must read on a chip: weights and the caches of its rows."""
    drafting = prepared.drafter.models[0] if prepared.drafter and prepared.drafter.models else None
    floors = {}
    for which, part in (("target", prepared.target), ("draft", drafting)):
        if part is None or part.config is None or isinstance(part.config, NGramConfig):
            continue
        width = prepared.prompt.tokens.shape[1]
        headroom = token_rows.headroom(prepared.max_new_tokens, prepared.decoder.nodes)
        row = headroom + token_rows.prefill_length(part.lm, prepared.prompt)
        load = roofline.load_of(part.config, row=row, prompt=width)
        matrices = [x for path, x in jax.tree_util.tree_leaves_with_path(part.params) if len(x.shape) == 2]
        each = sum(x.size * x.dtype.itemsize for x in matrices) / int8.count(matrices)
        heads = getattr(part.config, "kv_heads", part.config.heads)
        caches = len(prepared.request.max_new_tokens) * load.cache_bytes / data / (model if heads % model == 0 else 1)
        floors[which] = load.parameters * each / model + caches
    return floors


class Row(NamedTuple):
    """A part of a generation, for a table.

    Attributes:
        name: what it is.
        cycles: the compiler's estimate.
        seconds: the larger of that and of the memory's time for what is read.
        reads: bytes.
        floor: seconds that reading weights and caches once takes; None where a part has no such bytes.
    """

    name: str
    cycles: int
    seconds: float
    reads: int
    floor: float | None

    over_floor = property(lambda self: self.seconds / self.floor if self.floor else None, doc="How far it is above.")


def rows(found: Estimate) -> list[Row]:
    """Lists prefill, the steps, the passes, and the rest of a round."""

    def row(name: str, program: Program, parts: Sequence[str], floor: float | None) -> Row:
        chosen = [program.parts.get(part, Part()) for part in parts]
        seconds = sum(part.seconds(found.machine) for part in chosen)
        cycles, reads = sum(part.cycles for part in chosen), sum(part.bytes_read for part in chosen)
        return Row(name, cycles, seconds, reads, floor and floor / found.machine.bandwidth)

    plain, program, floors = found.plain, found.speculative, found.floors
    target, draft = floors.get("target"), floors.get("draft")
    listed = [
        row("plain: prefill", plain, ["prefill"], None),
        row("plain: pass over a token", plain, ["target"], target),
    ]
    listed += [row("plain: rest of a step", plain, ["accept", "commit", "rest"], None)]
    if program is not None:
        step = "draft step" if "draft step" in program.parts else "draft"
        called = "draft step" if step == "draft step" and not found.trees else "draft of a round"
        listed += [row("prefill", program, ["prefill"], None)]
        listed += [row("draft, first token", program, ["draft"], draft)] if called != "draft of a round" else []
        listed += [row(called, program, [step], draft if called == "draft step" else None)]
        listed += [row("verify pass", program, ["target"], target)]
        listed += [row("rest of a round", program, ["accept", "commit", "rest"], None)]
    return listed


def sentences(found: Estimate, alpha: float | None = None) -> list[str]:
    """Says in words whether it fits, what c and v are, and what an acceptance rate promises."""
    said = []
    if not found.fits:
        said += ["Does not fit: a chip has less memory than arguments, results, temporaries and code take."]
    if found.speculative is not None:
        said += [
            f"c = {found.c:.3f}, v = {found.v:.2f}; a round is {1e3 * found.round_seconds:.3f} ms, of which "
            f"{found.rest_seconds / found.round_seconds:.1%} are outside of both models."
        ]
    if alpha is not None:
        expected = found.expected(alpha)
        said += [
            f"With α = {alpha:g}: {expected.tokens_per_round:.2f} tokens a round, {expected.tokens_per_second:.0f} "
            f"tokens/s for {expected.plain_tokens_per_second:.0f} of plain decoding: {expected.speed_up:.2f} times."
        ]
    if found.topology.startswith(("v5e", "v6e")):
        said += ["Cycles of this chip leave out the memory: ms are the larger of cycles / clock and reads / bandwidth."]
    if found.plain.collectives:
        said += ["Cycles leave out what chips wait for each other."]
    for name, program in (("plain", found.plain), ("speculative", found.speculative)):
        if program is not None and program.copies:
            total = sum(program.copies.values())
            said += [f"The {name} loop copies {total / 1e6:.1f} MB into another layout in every round."]
    return said


def to_dict(found: Estimate) -> dict[str, Any]:
    """Returns an estimate as plain values, for JSON; without the executables."""
    report = {
        name: value for name, value in found._asdict().items() if name not in ("compiled", "plain", "speculative")
    }
    report |= {
        "fits": found.fits,
        "c": found.c if found.speculative else None,
        "v": found.v if found.speculative else None,
    }
    report["programs"] = {name: made.program for name, made in found.compiled.items()}
    report["fingerprints"] = {name: made.fingerprint for name, made in found.compiled.items()}
    return report | {"rows": [row._asdict() | {"over_floor": row.over_floor} for row in rows(found)]}


# The program's text.


class _Operation(NamedTuple):
    """A line of the program: `name = shape kind(written), attributes`; operands are the names in what is written."""

    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    written: str
    attributes: str


_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\](\{[^}]*\})?")
_Computations = dict[str, dict[str, _Operation]]
_SEEN_THROUGH = ("copy-start", "copy-done", "bitcast")  # a prefetch, or another name for the same bytes
_NO_READERS = (*_SEEN_THROUGH, "tuple", "get-tuple-element", "parameter", "constant", "while", "conditional", "call")
_LAYOUT_ONLY = {"parameter", "bitcast", "copy", "transpose", "convert", "reshape"}


def read(text: str) -> tuple[dict[str, tuple[int, int]], dict[str, Part], dict[str, int]]:
    """Reads a program as XLA prints it.

    Returns:
        Collectives, parts, and copies in the loop over rounds, as `Program` has them.
    """
    computations, entry = _parse(text)
    collectives: dict[str, tuple[int, int]] = {}
    for body in computations.values():
        for operation in body.values():
            kind = operation.kind.removesuffix("-start")
            if kind in COLLECTIVES:
                count, size = collectives.get(kind, (0, 0))
                moved = sum(_bytes(body[name].shape) for name in operation.operands if name in body)
                collectives[kind] = count + 1, size + moved
    copies: dict[str, int] = {}
    return collectives, _parts(computations, entry, "prefill", copies), copies


def _parse(text: str) -> tuple[_Computations, str]:
    """Splits a program into its computations, by name, and tells which one is run."""
    computations, entry, body = _Computations(), "", dict[str, _Operation]()
    for line in text.splitlines():
        if (head := _HEAD.match(line)) is not None:
            body = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif (found := _LINE.match(line)) is not None:
            operands, _, attributes = found[4].partition(")")
            names = tuple(re.findall(r"%([\w.\-]+)", operands))
            body[found[1]] = _Operation(found[1], found[2], found[3], names, operands, attributes)
    return computations, entry


def _parts(computations: _Computations, name: str, default: str, copies: dict[str, int]) -> dict[str, Part]:
    """Adds up a computation by parts; operations without a scope of their own belong to `default`."""
    totals: dict[str, Part] = {}
    body = computations.get(name, {})
    for operation in body.values():
        scope = _scope(operation)
        part = part_of(scope, "")
        if not part and operation.kind == "fusion":  # of several results has no scope, but what it consists of has
            fused = computations.get(_called(operation, "calls")[0], {})
            part = next((found for o in fused.values() if (found := part_of(_scope(o), ""))), "")
        part, inner = part or default, dict[str, Part]()
        if operation.kind == "while":
            is_rounds = default == "prefill" and scope.endswith(")/while")
            within = "rest" if is_rounds else "draft step" if part == "draft" else part
            inner = _parts(computations, _called(operation, "body")[0], within, copies)
        elif operation.kind == "conditional":
            branches = _called(operation, "branch_computations|true_computation|false_computation")
            choices = [_parts(computations, branch, part, copies) for branch in branches]
            inner = max(choices, key=lambda parts: sum(p.cycles for p in parts.values()), default={})
        elif operation.kind == "call":
            inner = _parts(computations, _called(operation, "to_apply")[0], part, copies)
        else:
            cycles = re.search(r'"estimated_cycles":"(\d+)"', operation.attributes)
            inner = {part: Part(int(cycles[1]) if cycles else 0, _bytes_read(operation, body, computations))}
            if default != "prefill" and _is_copy(operation, computations) and _bytes(operation.shape) >= LARGE:
                copies[operation.name] = _bytes(operation.shape)
        for which, more in inner.items():
            before = totals.get(which, Part())
            totals[which] = Part(before.cycles + more.cycles, before.bytes_read + more.bytes_read)
    return totals


def _scope(operation: _Operation) -> str:
    found = re.search(r'op_name="([^"]*)"', operation.attributes)
    return found[1] if found else ""


def part_of(scope: str, default: str) -> str:
    """Names the part of a generation that an operation belongs to.

    >>> part_of("jit(generation)/while/body/draft/while/body/add", "rest"), part_of("reduce_sum", "rest")
    ('draft step', 'rest')
    >>> part_of("jit(generation)/draft/Decoder.run/add", "prefill")
    'prefill'
    """
    found = re.match(r"jit\([^)]*\)/while/body/(\w+)/(.*)", scope)
    if found is None or found[1] not in ("draft", "target", "accept", "commit"):
        return default
    return "draft step" if found[1] == "draft" and found[2].startswith("while/body/") else found[1]


def _called(operation: _Operation, attribute: str) -> list[str]:
    found = re.findall(rf"\b(?:{attribute})=(\{{[^}}]*\}}|%[\w.\-]+)", operation.attributes)
    return [name for names in found for name in re.findall(r"%([\w.\-]+)", names)]


def _bytes(shape: str, of_main_memory: bool = False) -> int:
    """Adds up the bytes of an array or a tuple, or of what of it lies in the main memory.

    >>> _bytes("(bf16[2,8]{1,0:T(8,128)(2,1)S(1)}, f32[3]{0:T(128)})"), _bytes("bf16[2,8]{1,0:S(1)}", True)
    (44, 0)
    """
    total = 0
    for kind, bits, sizes, layout in _ARRAY.findall(shape):
        if not (of_main_memory and "S(" in layout):
            width = int(bits) if bits else 8 * (kind == "pred")
            total += math.prod(int(size) for size in sizes.split(",") if size) * width // 8
    return total


def _bytes_read(operation: _Operation, body: Mapping[str, _Operation], computations: _Computations) -> int:
    """Computes the bytes that an operation reads from the main memory; of what was prefetched, that of its origin."""
    if operation.kind in _NO_READERS:
        return 0
    total = 0
    for index, name in enumerate(operation.operands):
        source = body.get(name)
        while source is not None and source.kind in _SEEN_THROUGH and source.operands:
            source = body.get(source.operands[0])
        if source is not None and (size := _bytes(source.shape, of_main_memory=True)):
            total += min(size, _bytes_used(operation, index, computations))
    return total


def _bytes_used(operation: _Operation, index: int, computations: _Computations) -> float:
    """Computes how much of an operand is used: all of it, but where it is only sliced, looked up or written into."""
    if operation.kind in ("dynamic-slice", "gather", "slice") and index == 0:
        return _bytes(operation.shape)
    if operation.kind in ("dynamic-update-slice", "scatter") and index == 0:
        return 0
    if operation.kind != "fusion":
        return math.inf
    body = computations.get(_called(operation, "calls")[0], {})
    inside = [inner for inner in body.values() if inner.kind == "parameter" and inner.written == str(index)]
    return sum(_bytes_used_of(inner.name, body, computations) for inner in inside) if inside else math.inf


def _bytes_used_of(name: str, body: Mapping[str, _Operation], computations: _Computations) -> float:
    """Adds up what the operations of a computation use of one of its arrays; all of it, if it is the result."""
    uses = [(o, index) for o in body.values() for index, operand in enumerate(o.operands) if operand == name]
    used = [
        _bytes_used_of(o.name, body, computations) if o.kind == "bitcast" else _bytes_used(o, index, computations)
        for o, index in uses
    ]
    return sum(used) if used else math.inf


def _is_copy(operation: _Operation, computations: _Computations) -> bool:
    """Tells whether an operation does nothing but write an array in another layout or dtype."""
    if operation.kind == "fusion":
        body = computations.get(_called(operation, "calls")[0], {})
        return {inner.kind for inner in body.values()} <= _LAYOUT_ONLY
    return operation.kind in ("copy", "transpose")


# Programs that are kept.


def save(compiled: Mapping[str, Compiled], folder: str | Path) -> Path:
    """Stores compiled programs, to be run where their devices are; `load` reads one back.

    Args:
        compiled: by name, as `Estimate.compiled` has them; a name is a file's.
        folder: made if it is not there; programs of other names in it stay.

    Returns:
        The folder.
    """
    from jax.experimental import serialize_executable

    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in compiled.items():
        stored = {"fingerprint": made.fingerprint, "program": serialize_executable.serialize(made.executable)}
        (folder / f"{name}{SUFFIX}").write_bytes(pickle.dumps(stored))
        (folder / f"{name}.json").write_text(json.dumps(made.fingerprint, indent=1) + "\n", encoding="utf-8")
    return folder


def load(
    folder: str | Path, prepared: Prepared, name: str = "speculative", *, devices: Sequence[Any] | None = None
) -> Callable[[Prepared], loop.Outcome]:
    """Loads a stored program for a generation, in place of compiling it: lowering it again takes seconds.

    Args:
        folder: that `save` has written. It is unpickled, which may run any code: load none that you do not trust.
        prepared: the generation, with its weights on their devices; another prompt or key of the same shape will do.
        name: of the program.
        devices: by default all there are.

    Returns:
        A function that runs a generation of the same shape, as `jaxspec.decode.loop.run` does.

    Raises:
        FileNotFoundError: no such program.
        ValueError: it was compiled by another version, for other devices or shapes, or for another generation.
    """
    from jax.experimental import serialize_executable

    path = Path(folder).expanduser() / f"{name}{SUFFIX}"
    if not path.is_file():
        raise FileNotFoundError(f"no program at {path}: `jaxspec compile --save` and `aot.save` write them")
    devices, place = jax.devices() if devices is None else devices, sharding.mesh_of(prepared.weights)
    stored = pickle.loads(path.read_bytes())
    expected = _fingerprint(_lower(prepared, place, devices[0]), devices[0], place)
    for entry, value in stored["fingerprint"].items():
        if value != expected.get(entry):
            raise ValueError(
                f"{path} was compiled for another {entry}: {value}, and here it is {expected.get(entry)}. Compile it "
                "again, with the options and the versions of this run"
            )
    used = list(devices[:1]) if place is None else list(place.devices.flat)
    program = serialize_executable.deserialize_and_load(*stored["program"], execution_devices=used)
    return lambda request: program(request.weights, request.prompt, request.request)


def _fingerprint(lowered: Any, device: Any, mesh: Mesh | None) -> dict[str, Any]:
    """Describes what a compiled program is good for; the program's own text stands for models and options."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    if device.platform == "tpu":
        versions["libtpu"] = importlib.metadata.version("libtpu")
    arguments = jax.tree_util.tree_leaves_with_path(lowered.args_info)
    shapes = [f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}" for path, x in arguments]
    return versions | {
        "device": device.device_kind,
        "mesh": None if mesh is None else dict(mesh.shape),
        "shapes": hashlib.sha256("\n".join(shapes).encode()).hexdigest(),
        "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
    }
