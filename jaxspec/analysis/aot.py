"""Compiles a generation ahead of time, keeps the program in a folder, and runs it from there.

`compile_generation` compiles the program that `jaxspec.generate` would run, for devices of this
machine or of another. `save` keeps the program, and `load` runs it where its devices are. In a
checkout, `python -m benchmarks.estimates.compile` compiles for TPUs and GPUs that are not here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxspec import sharding
from jaxspec.core import Request, Weights
from jaxspec.core.programs import accepted_options
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared
from jaxspec.nets import axes_of

SUFFIX = ".executable"
ENDS = 4  # end tokens that every compiled program has room for: published models have up to three
# An option at its default. What was compiled with other options is not found again in this process,
# where a program may be one that the persistent cache gave.
ANEW = {"xla_embed_ir_in_executable": False}
PLUGINS = ("xla_cuda13", "xla_cuda12")  # of jax: the first that is installed is taken


class Program(NamedTuple):
    """The sizes of a compiled generation, on one chip of perhaps several."""

    compile_seconds: float  # seconds of compiling
    # these four: bytes of each chip; weights are arguments. A GPU's compiler does not say what its
    # code takes, and has 0.
    arguments: int
    outputs: int
    temporaries: int
    code: int

    memory = property(
        lambda self: self.arguments + self.outputs + self.temporaries + self.code,
        doc="Bytes of a chip.",
    )


class Compiled(NamedTuple):
    """A compiled generation."""

    program: Program  # its sizes
    executable: Any  # the result of `jax.jit(...).lower(...).compile()`
    # the versions, options, devices, shapes and program that it was compiled from
    fingerprint: dict[str, Any]


class DoesNotFit(ValueError):
    """A program takes more memory than the devices have that it is compiled for."""


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
        ValueError: the mesh cannot be made.
        DoesNotFit: nor does the program.
    """
    layout = None
    if mesh is not None:
        layout = sharding.mesh(mesh, devices)
    lowered = lower(prepared, layout, devices[0])
    started = time.monotonic()
    try:
        with _without_cache():
            executable = lowered.compile(compiler_options=accepted_options(devices[0]) or ANEW)
    except jax.errors.JaxRuntimeError as error:
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
    return Compiled(Program(seconds, *sizes), executable, fingerprint(lowered, devices[0], layout))


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


def fingerprint(lowered: Any, device: Any, mesh: Mesh | None) -> dict[str, Any]:
    """Describes what a compiled program is good for; the program's own text stands for models and
    options.
    """
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    if device.platform == "tpu":
        versions["libtpu"] = importlib.metadata.version("libtpu")
    elif device.platform == "gpu" and (package := plugin()) is not None:
        versions[package] = importlib.metadata.version(package)
    arguments = jax.tree_util.tree_leaves_with_path(lowered.args_info)
    shapes = [f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}" for path, x in arguments]
    return versions | {
        "options": accepted_options(device),
        "device": device.device_kind,
        "mesh": None if mesh is None else dict(mesh.shape),
        "shape": hashlib.sha256("\n".join(shapes).encode()).hexdigest(),
        "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
    }


def plugin() -> str | None:
    """Names the package of the CUDA plugin that is installed, if one is: its version is that of the
    compiler.
    """
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    installed = (
        name for name in PLUGINS if importlib.util.find_spec(f"jax_plugins.{name}") is not None
    )
    return next((f"jax-{name.removeprefix('xla_')}-pjrt" for name in installed), None)


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
        raise FileNotFoundError(f"no program at {path}: `aot.save` writes them")
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
