"""Compiles a generation for devices that are not here: does it fit, and what will a round read.

libtpu, the compiler for TPUs, and jax's CUDA plugin, with the compiler for GPUs, run on any Linux
machine. `compile_for` gives them the program that `jaxspec.generate` would run, made from shapes
alone: it loads no weights and runs nothing. Sizes and collectives are exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich import filesize

from benchmarks.estimates import chips
from jaxspec import sharding
from jaxspec.analysis import aot, memory, random_model, roofline
from jaxspec.analysis.aot import Compiled, DoesNotFit
from jaxspec.core import Model, Prompt, token_rows
from jaxspec.decode import device_memory
from jaxspec.decode.request import Prepared
from jaxspec.nets import axes_of, decoder_layers, net_of
from jaxspec.weights import loading, quantisation

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")


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
    # number and bytes of each kind of collective, of each program
    collectives: Mapping[str, Mapping[str, tuple[int, int]]] = {}

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
                compiled[which] = aot.compile_generation(request, devices, mesh)
            except jax.errors.JaxRuntimeError as error:
                if "No PTX compilation provider" not in str(error):
                    raise
                raise ImportError(
                    f"ptxas, the assembler of GPUs, is not installed: {chips.how_to_get()}"
                ) from error
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
        collectives={
            name: collectives(kept.executable.as_text() or "") for name, kept in compiled.items()
        },
    )


def what_fits(prepared: Prepared, machine: roofline.Machine, chips: int) -> str:
    """Says in words how long prompts may be, by the sum of what cannot be done without."""
    if machine.memory is None:
        return ""
    room = chips * machine.memory
    prompts = len(prepared.prompt.length)
    longest, *sizes = longest_prompt(prepared, room)
    room_size, weights, token = map(filesize.decimal, (int(room), *sizes))
    return (
        f"Of {room_size} weights take {weights}, and caches and rows {token} for each token of "
        f"{prompts} prompts, so that prompts of up to {longest:,} tokens fit, less what passes make"
    )


def longest_prompt(prepared: Prepared, room: float) -> tuple[int, int, int]:
    """Says how long prompts may be for a generation to fit, by the sum of weights, caches and rows
    alone.

    Args:
        prepared: the generation; of arrays only shapes and dtypes are read, and of its prompts
            their number.
        room: bytes of all devices that share it.

    Returns:
        The largest bucket of prompts, 0 if none fits; bytes of the weights; and bytes for each
        token of the prompts.

    Example:
        >>> from jaxspec.testing import prepared_table
        >>> longest_prompt(prepared_table(), 10**6)[::2]  # two rows, in three buffers of int32
        (40960, 24)
    """

    def held(width: int) -> int:
        rows = prepared.prompt.length.shape
        arrays: Any = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((*rows, width), rows)]
        return device_memory.size_of(memory.state_shapes(prepared, Prompt(*arrays)))

    # where layers with windows have all that they will ever have
    few = 2**15
    many = 2**16
    at_few = held(few)
    weights = device_memory.size_of(prepared.weights)
    per_token = (held(many) - at_few) // (many - few)
    longest = few + (room - weights - at_few) // max(per_token, 1)
    width = 0
    while (wider := token_rows.bucket(width + 1)) <= longest:
        width = wider
    return width, weights, per_token


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
    moved = report.pop("collectives")
    report["programs"] = {
        name: kept.program._asdict() | {"collectives": moved.get(name, {})}
        for name, kept in compiled.items()
    }
    return report | {"fingerprints": {name: kept.fingerprint for name, kept in compiled.items()}}


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
