"""Compiles a generation ahead of time, for devices that need not be here: does it fit, and what
will a round read.

libtpu, the compiler for TPUs, and jax's CUDA plugin, with the compiler for GPUs, run on any Linux
machine. `compile_for` gives them the program that `jaxspec.generate` would run, made from shapes
alone: it loads no weights and runs nothing. Sizes and collectives are exact. `save` keeps a
program, and `load` runs it where its devices are. A checkout's `benchmarks.estimates` reads from
the same programs how long their parts should take.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding
from rich import filesize

from jaxspec import sharding
from jaxspec.analysis import chips, memory, random_model, roofline
from jaxspec.core import Model, Request, Weights, token_rows
from jaxspec.core.programs import accepted_options
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared
from jaxspec.nets import axes_of, decoder_layers, net_of, on_gpu
from jaxspec.weights import loading, quantisation

SUFFIX = ".executable"
ENDS = 4  # end tokens that every compiled program has room for: published models have up to three
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
# An option at its default. What was compiled with other options is not found again in this process,
# where a program may be one that the persistent cache gave.
ANEW = {"xla_embed_ir_in_executable": False}


class Program(NamedTuple):
    """The sizes of a compiled generation, on one chip of perhaps several."""

    compile_seconds: float  # seconds of compiling
    # these four: bytes of each chip; weights are arguments. A GPU's compiler does not say what its
    # code takes, and has 0.
    arguments: int
    outputs: int
    temporaries: int
    code: int
    collectives: dict[str, tuple[int, int]]  # number and bytes of each kind, in the whole program

    memory = property(
        lambda self: self.arguments + self.outputs + self.temporaries + self.code,
        doc="Bytes of a chip.",
    )


class Compiled(NamedTuple):
    """A compiled generation."""

    program: Program  # its sizes and collectives
    executable: Any  # the result of `jax.jit(...).lower(...).compile()`
    # the versions, options, devices, shapes and program that it was compiled from
    fingerprint: dict[str, Any]


class Programs(NamedTuple):
    """A generation and plain decoding with the same target, compiled for a topology."""

    topology: str  # the argument of `compile_for`; of its devices `chips` are used
    chips: int
    mesh: str
    machine: roofline.Machine  # one of them, as the compiler sees it (of a v4 one of its two cores)
    batch: int  # rows; and draft tokens a round (of a tree its depth)
    gamma: int
    trees: bool  # whether the draft is one
    # bytes on a chip that a pass must read, weights and caches: "target" and "draft"
    floors: dict[str, float]
    # both programs: "plain", and "speculative" where there is a drafter
    compiled: dict[str, Compiled]

    @property
    def fits(self) -> bool:
        """Tells whether the programs' bytes are fewer than the chip's memory."""
        room = self.machine.memory
        return room is None or all(kept.program.memory <= room for kept in self.compiled.values())

    @property
    def reads(self) -> dict[str, float]:
        """The least bytes that a chip reads in a step of plain decoding, a pass of the drafter, and
        a round.
        """
        target, draft = (self.floors.get(name, 0.0) for name in ("target", "draft"))
        of_round = {"pass of the drafter": draft, "round": target + self.gamma * draft}
        return {"step of plain decoding": target} | (
            of_round if "speculative" in self.compiled else {}
        )


class DoesNotFit(ValueError):
    """A program takes more memory than the devices have that it is compiled for."""


def shape_model(shape: Any, dtype: str = "bfloat16") -> Model:
    """Makes a model without weights: its parameters are shapes, which is all that compiling needs.

    Args:
        shape: a configuration of one of `jaxspec.nets`, or a name that `roofline.shape_of` takes,
            such as a published shape (`jaxspec models --all` lists them), a hub id or a folder.
        dtype: the dtype of the matrices: "float32", "bfloat16", "int8" or "int4".

    Raises:
        ValueError: no such shape, file or dtype.

    >>> model = shape_model("t5-v1_1-xxl")
    >>> (
    ...     f"{quantisation.count(model.params):,}",
    ...     model.params["decoder_0"]["ff"]["wi"]["weight"].shape,
    ... )
    ('11,135,332,352', (10240, 4096))
    """
    dtype = loading.dtype_name(dtype)
    config = dataclasses.replace(
        random_model.config_of(shape) if isinstance(shape, str) else shape,
        dtype=quantisation.computation(dtype, "bfloat16"),
    )

    network = net_of(config)
    name = shape if isinstance(shape, str) else ""
    params = jax.eval_shape(
        functools.partial(quantisation.quantise, dtype=dtype), network.shapes(config)
    )
    return Model(network.language_model(config), params, config=config, name=name)


def compile_for(
    prepared: Prepared,
    topology: str,
    *,
    mesh: str | Mesh | None = None,
    plain: Compiled | None = None,
    advance: Callable[[str], object] = lambda doing: None,
) -> Programs:
    """Compiles a generation, and plain decoding with the same target, for TPUs or GPUs that are not
    here.

    Args:
        prepared: a generation, from `jaxspec.decode.request.prepare`; its models may be those of
            `shape_model`.
        topology: a kind of chip and how many of them, as "v5p:2x2x1"; "v5p" alone is the smallest
            host. Of GPUs "h100", or "h100:8" for a host of eight; jax must then be kept from
            looking for one (JAX_PLATFORMS=cpu).
        mesh: how to split the models over them, as `jaxspec.load` takes it; by default they lie on
            one chip, on both devices of one that is two.
        plain: plain decoding that was compiled before for the same target, rows and topology.
        advance: called with what is compiled next, before each of the two programs.

    Raises:
        ImportError: the compiler is not installed; with the command that does.
        ValueError: there is no such topology, or it has too few chips for the mesh.
        DoesNotFit: nor do the programs; with what would.

    Example, some minutes for large models:
        >>> from jaxspec.core import Prompt
        >>> from jaxspec.decode.request import prepare
        >>> target, draft = shape_model("llama-3.1-8b"), shape_model("llama-3.2-1b")
        >>> prompt = Prompt(jnp.zeros((1, 64), jnp.int32), jnp.array([64]))
        >>> prepared = prepare(target, prompt, drafter=draft, gamma=5)
        >>> print(compile_for(prepared, "v5p:2x2x1").fits)  # doctest: +SKIP
        True
    """
    name, devices = chips.devices_of(topology)
    machine = chips.machine_of(name, devices)
    sizes = {"data": 1, "model": 1}
    if mesh is None and chips.cores(devices) > 1:
        mesh = f"model={chips.cores(devices)}"
    if mesh is not None:
        sizes = dict(sharding.mesh(mesh, devices).shape)
    compiled = {} if plain is None else {"plain": plain}
    for which, request in (("plain", prepared.plain()), ("speculative", prepared)):
        if which not in compiled and (which == "plain" or prepared.drafter is not None):
            advance(which)
            try:
                compiled[which] = compile_generation(request, devices, mesh)
            except DoesNotFit as error:
                raise DoesNotFit(
                    f"{error}. {what_fits(request, machine, math.prod(sizes.values()))}"
                ) from error
    return Programs(
        topology=name,
        chips=math.prod(sizes.values()),
        mesh=",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1),
        machine=machine,
        batch=len(prepared.request.max_new_tokens),
        gamma=prepared.decoder.gamma,
        trees=prepared.decoder.trees,
        floors=floors(prepared, sizes.get("data", 1), sizes.get("model", 1)),
        compiled=compiled,
    )


def what_fits(prepared: Prepared, machine: roofline.Machine, chips: int) -> str:
    """Says in words how long prompts may be, by the sum of what cannot be done without."""
    if machine.memory is None:
        return ""
    room = chips * machine.memory
    prompts = len(prepared.prompt.length)
    longest, *sizes = memory.longest_prompt(prepared, room)
    room_size, weights, token = map(filesize.decimal, (int(room), *sizes))
    return (
        f"Of {room_size} weights take {weights}, and caches and rows {token} for each token of "
        f"{prompts} prompts, so that prompts of up to {longest:,} tokens fit, less what passes make"
    )


def floors(prepared: Prepared, data: int, model: int) -> dict[str, float]:
    """Computes the bytes that a pass of each model must read on a chip: weights and the caches of
    its rows.
    """
    drafting = None
    if prepared.drafter and prepared.drafter.models:
        drafting = prepared.drafter.models[0]
    least = {}
    for which, network in (("target", prepared.target), ("draft", drafting)):
        if network is None or decoder_layers(network.config) == 0:
            continue
        width = prepared.prompt.tokens.shape[1]
        headroom = token_rows.headroom(prepared.max_new_tokens, prepared.decoder.nodes)
        row = headroom + token_rows.prefill_length(network.lm, prepared.prompt)
        load = roofline.load_of(network.config, row=row, prompt=width)
        params = network.params
        if "head" in params:  # else the embedding is it
            params = {name: layer for name, layer in params.items() if name != "embedding"}
        leaves = jax.tree.leaves(params, is_leaf=quantisation.is_quantised)
        matrices = [x for x in leaves if quantisation.is_quantised(x) or len(x.shape) > 1]
        weight_bytes = quantisation.nbytes(matrices) / quantisation.count(matrices)
        heads = axes_of(network.config).parts.get("kv_heads", 1)
        rows = len(prepared.request.max_new_tokens)
        # of experts, those that its rows use
        numbers = load.numbers * load.bytes_read(rows) / load.weight_bytes
        caches = rows * load.cache_bytes / data / (model if heads % model == 0 else 1)
        least[which] = numbers * weight_bytes / model + caches
    return least


def to_dict(programs: Programs) -> dict[str, Any]:
    """Returns plain values, for JSON, without the executables."""
    report = programs._asdict() | {"fits": programs.fits, "reads": programs.reads}
    compiled = report.pop("compiled")
    report["programs"] = {name: kept.program for name, kept in compiled.items()}
    return report | {"fingerprints": {name: kept.fingerprint for name, kept in compiled.items()}}


def compile_generation(
    prepared: Prepared, devices: Sequence[Any], mesh: str | Mesh | None = None
) -> Compiled:
    """Compiles the program that `jaxspec.generate` would run, for some devices, and reads what it
    takes.

    Args:
        prepared: a generation; only shapes and dtypes of its arrays are read.
        devices: devices of a topology, or of this machine.
        mesh: how to split the models over them.

    Raises:
        ValueError: the mesh cannot be made, or a GPU's kernels are on, which it cannot split.
    """
    if mesh is not None:
        on_gpu.refuse_mesh()
    layout = None
    if mesh is not None:
        layout = sharding.mesh(mesh, devices)
    lowered = lower(prepared, layout, devices[0])
    started = time.monotonic()
    try:
        with _without_cache():
            executable = lowered.compile(compiler_options=accepted_options(devices[0]) or ANEW)
    except jax.errors.JaxRuntimeError as error:
        if "No PTX compilation provider" in str(error):
            raise ImportError(
                f"ptxas, the assembler of GPUs, is not installed: {chips.how_to_get()}"
            ) from error
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = next(
            (line for line in str(error).splitlines() if "Used" in line), str(error).splitlines()[0]
        )
        raise DoesNotFit(
            f"the program does not fit {devices[0].device_kind}: {reason.strip()}"
        ) from error
    seconds = time.monotonic() - started
    stats = executable.memory_analysis()
    sizes = (
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes - stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
    )
    program = Program(seconds, *sizes, collectives(executable.as_text() or ""))
    return Compiled(program, executable, fingerprint(lowered, devices[0], layout))


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Compiles without the persistent cache, whose programs take no time to compile. A CPU's cannot
    be stored again.
    """
    from jax.experimental.compilation_cache import compilation_cache

    enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def with_room(request: Request) -> Request:
    """Gives every row as many end tokens as a compiled program has room for; -1 fills the rest.

    So a program that was compiled from a published shape, which names no end tokens, serves the
    checkpoints too.
    """
    missing = ENDS - request.eos.shape[1]
    if missing <= 0:
        return request
    padded = jnp.pad(request.eos, ((0, 0), (0, missing)), constant_values=-1)
    return request._replace(eos=jax.device_put(padded, request.eos.sharding))


def lower(prepared: Prepared, mesh: Mesh | None, device: Any) -> Any:
    """Lowers the generation, with weights and rows where `jaxspec.load` and `prepare` would put
    them.
    """
    weights = prepared.weights
    prompt = prepared.prompt
    request = with_room(prepared.request)
    if prepared.before is not None:
        raise ValueError(
            "a generation that goes on from a prefix is not compiled ahead: prepare it without "
            "prefix="
        )
    if mesh is None:
        places = jax.tree.map(lambda _: SingleDeviceSharding(device), (weights, prompt, request))
    else:
        if prepared.drafter and prepared.drafter.models:
            drafting = prepared.drafter.models[0]
        else:
            drafting = prepared.target
        places = (
            Weights(
                sharding.parameters(weights.target, axes_of(prepared.target.config), mesh),
                sharding.parameters(weights.draft, axes_of(drafting.config), mesh),
            ),
            sharding.rows(prompt, len(prompt.length), mesh),
            sharding.rows(request, len(request.max_new_tokens), mesh),
        )
    shapes = jax.tree.map(
        lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
        (weights, prompt, request),
        places,
    )
    return loop.generation.lower(prepared.decoder, *shapes, prepared.max_new_tokens)


# XLA prints an operation as `%name = shape kind(%operand, ...)`, and an array's shape as
# dtype[sizes]{layout}.
_OPERATION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)", re.MULTILINE)
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """Counts the collectives of a program as XLA prints it, and adds up the bytes of their
    operands.

    >>> text = "ENTRY e {\\n  %x = f32[2,8]{1,0} parameter(0)\\n  %y = f32[2,8]{1,0} all-reduce-start(%x), channel_id=1"
    >>> collectives(text)
    {'all-reduce': (1, 64)}
    """
    # an operand precedes the operation that reads it
    shapes = dict[str, str]()
    totals = dict[str, tuple[int, int]]()
    for name, shape, written, operands in _OPERATION.findall(text):
        shapes[name], operation = shape, written.removesuffix("-start")
        if operation in COLLECTIVES:
            count, size = totals.get(operation, (0, 0))
            moved = (
                array_bytes(shapes.get(operand, ""))
                for operand in re.findall(r"%([\w.\-]+)", operands)
            )
            totals[operation] = count + 1, size + sum(moved)
    return totals


def array_bytes(shape: str) -> int:
    """Adds up the bytes of an array or a tuple, from its shape as XLA prints it.

    >>> array_bytes("(bf16[2,8]{1,0:T(8,128)(2,1)S(1)}, f32[3]{0:T(128)}, pred[]{})")
    45
    """
    arrays = (
        (int(bits) if bits else 8 * (dtype == "pred"), sizes)
        for dtype, bits, sizes in _ARRAY.findall(shape)
    )
    return sum(
        math.prod(int(size) for size in sizes.split(",") if size) * bits // 8
        for bits, sizes in arrays
    )


# Programs that are kept.


def fingerprint(lowered: Any, device: Any, mesh: Mesh | None) -> dict[str, Any]:
    """Describes what a compiled program is good for; the program's own text stands for models and
    options.
    """
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    if device.platform == "tpu":
        versions["libtpu"] = importlib.metadata.version("libtpu")
    elif device.platform == "gpu" and (plugin := chips.plugin()) is not None:
        versions[plugin] = importlib.metadata.version(plugin)
    arguments = jax.tree_util.tree_leaves_with_path(lowered.args_info)
    shapes = [f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}" for path, x in arguments]
    return versions | {
        "options": accepted_options(device),
        "device": device.device_kind,
        "mesh": None if mesh is None else dict(mesh.shape),
        "shape": hashlib.sha256("\n".join(shapes).encode()).hexdigest(),
        "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
    }


def save(compiled: Mapping[str, Compiled], folder: str | Path) -> Path:
    """Stores compiled programs, to be run where their devices are; `load` reads one back.

    Args:
        compiled: programs by their files' names, as `Programs.compiled` has them.
        folder: a folder, new or with programs of other names.

    Returns:
        The folder.
    """
    from jax.experimental import serialize_executable

    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, kept in compiled.items():
        stored = {
            "fingerprint": kept.fingerprint,
            "program": serialize_executable.serialize(kept.executable),
        }
        (folder / f"{name}{SUFFIX}").write_bytes(pickle.dumps(stored))
        (folder / f"{name}.json").write_text(
            json.dumps(kept.fingerprint, indent=1) + "\n", encoding="utf-8"
        )
    return folder


def load(
    folder: str | Path,
    prepared: Prepared,
    name: str = "speculative",
    *,
    devices: Sequence[Any] | None = None,
) -> Callable[[Prepared], loop.Outcome]:
    """Loads a stored program for a generation, in place of compiling it: lowering it again takes
    seconds.

    Args:
        folder: a folder written by `save`. It is unpickled, which may run any code: load only
            folders that you trust.
        prepared: the generation, with its weights on their devices; another prompt or key of the
            same shape will do.
        name: the program's name.
        devices: by default all there are.

    Returns:
        A function that runs a generation of the same shape, as `jaxspec.decode.loop.run` does.

    Raises:
        FileNotFoundError: no such program.
        ValueError: it was compiled by another version, with other options, for other devices or
            shapes, or for another generation.
    """
    from jax.experimental import serialize_executable

    path = Path(folder).expanduser() / f"{name}{SUFFIX}"
    if not path.is_file():
        raise FileNotFoundError(
            f"no program at {path}: `jaxspec compile --save` and `aot.save` write them"
        )
    if devices is None:
        devices = jax.devices()
    layout = sharding.mesh_of(prepared.weights)
    stored = pickle.loads(path.read_bytes())
    expected = fingerprint(lower(prepared, layout, devices[0]), devices[0], layout)
    for entry, value in stored["fingerprint"].items():
        if value != expected.get(entry):
            both = f"{value}, and here it is {expected.get(entry)}"
            raise ValueError(
                f"{path} is of another {entry}: {both}. Compile it again, with this run's options"
            )
    if layout is None:
        used = list(devices[:1])
    else:
        used = list(layout.devices.flat)
    program = serialize_executable.deserialize_and_load(*stored["program"], execution_devices=used)
    return lambda argument: program(
        weights=argument.weights,
        prompt=argument.prompt,
        request=with_room(argument.request),
        before=None,
    )
