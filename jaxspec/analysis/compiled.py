"""A generation, compiled for devices that need not be here: the program, its sizes, and what it is good for.

`jaxspec.analysis.aot` estimates its times by it, and stores it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxspec import sharding
from jaxspec.analysis import chips
from jaxspec.analysis.program_text import Part, read
from jaxspec.core import Request, Weights
from jaxspec.core.programs import accepted_options
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared
from jaxspec.nets import axes_of

ENDS = 4  # end tokens that every compiled program has room for: published models have up to three


class Program(NamedTuple):
    """A generation, compiled for one chip of perhaps several.

    Attributes:
        compile_seconds: how long compiling took.
        arguments, outputs, temporaries, code: bytes of each chip; weights are arguments. A GPU's compiler does not say
            what its code takes, and has 0.
        collectives: number and bytes of each kind, in the whole program.
        parts: by name; those that the program has.
        copies: operations in the loop over rounds that copy a large array into another layout, with its bytes.
        widened: operations there that write a weight or a cache in a wider dtype, with the bytes of what they write.
    """

    compile_seconds: float
    arguments: int
    outputs: int
    temporaries: int
    code: int
    collectives: dict[str, tuple[int, int]]
    parts: dict[str, Part]
    copies: dict[str, int]
    widened: dict[str, int]

    memory = property(lambda self: self.arguments + self.outputs + self.temporaries + self.code, doc="Bytes of a chip.")


class Compiled(NamedTuple):
    """A compiled generation.

    Attributes:
        program: its sizes, parts and collectives.
        executable: the result of `jax.jit(...).lower(...).compile()`.
        fingerprint: the versions, options, devices, shapes and program that it was compiled from.
    """

    program: Program
    executable: Any
    fingerprint: dict[str, Any]


class DoesNotFit(ValueError):
    """A program takes more memory than the devices have that it is compiled for."""


def with_room(request: Request) -> Request:
    """Gives every row as many end tokens as a compiled program has room for; -1 is none.

    So a program that was compiled from a published shape, which names no end tokens, serves the checkpoints too.
    """
    missing = ENDS - request.eos.shape[1]
    if missing <= 0:
        return request
    padded = jnp.pad(request.eos, ((0, 0), (0, missing)), constant_values=-1)
    return request._replace(eos=jax.device_put(padded, request.eos.sharding))


def compile_generation(prepared: Prepared, devices: Sequence[Any], mesh: str | Mesh | None = None) -> Compiled:
    """Compiles the program that `jaxspec.generate` would run, for some devices, and reads what it takes.

    Args:
        prepared: a generation, as in `estimate`; only shapes and dtypes of its arrays are read.
        devices: devices of a topology, or of this machine.
        mesh: the mesh, as in `estimate`.

    Raises:
        DoesNotFit: the program does not fit the device's memory.
        ImportError: a package that the GPU's compiler calls is not installed.
    """
    place = None if mesh is None else sharding.mesh(mesh, devices)
    lowered = lower(prepared, place, devices[0])
    started = time.monotonic()
    try:
        with _without_cache():
            executable = lowered.compile(compiler_options=accepted_options(devices[0]) or ANEW)
    except jax.errors.JaxRuntimeError as error:
        if "No PTX compilation provider" in str(error):
            raise ImportError(f"ptxas, the assembler of GPUs, is not installed: {chips.how_to_get()}") from error
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = next((line for line in str(error).splitlines() if "Used" in line), str(error).splitlines()[0])
        raise DoesNotFit(f"the program does not fit {devices[0].device_kind}: {reason.strip()}") from error
    seconds, stats, text = time.monotonic() - started, executable.memory_analysis(), executable.as_text() or ""
    sizes = (
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes - stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
    )
    return Compiled(Program(seconds, *sizes, *read(text)), executable, fingerprint(lowered, devices[0], place))


# An option at its default. What was compiled with other options is not found again in this process, where a program may
# be one that the persistent cache gave.
ANEW = {"xla_embed_ir_in_executable": False}


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Compiles without the persistent cache, whose programs take no time to compile. A CPU's cannot be stored again."""
    from jax.experimental.compilation_cache import compilation_cache

    enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def lower(prepared: Prepared, mesh: Mesh | None, device: Any) -> Any:
    """Lowers the generation, with weights and rows where `jaxspec.load` and `prepare` would put them."""
    weights, prompt, request = prepared.weights, prepared.prompt, with_room(prepared.request)
    if prepared.before is not None:
        raise ValueError("a generation that goes on from a prefix is not compiled ahead: prepare it without prefix=")
    if mesh is None:
        places = jax.tree.map(lambda _: SingleDeviceSharding(device), (weights, prompt, request))
    else:
        drafting = prepared.drafter.models[0] if prepared.drafter and prepared.drafter.models else prepared.target
        places = (
            Weights(
                sharding.parameters(weights.target, axes_of(prepared.target.config), mesh),
                sharding.parameters(weights.draft, axes_of(drafting.config), mesh),
            ),
            sharding.rows(prompt, len(prompt.length), mesh),
            sharding.rows(request, len(request.max_new_tokens), mesh),
        )
    shapes = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (weights, prompt, request), places
    )
    return loop.generation.lower(prepared.decoder, *shapes, prepared.max_new_tokens)


def fingerprint(lowered: Any, device: Any, mesh: Mesh | None) -> dict[str, Any]:
    """Describes what a compiled program is good for; the program's own text stands for models and options."""
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
