"""Compiled programs: which a process holds on to, and where they are stored for the next one.

Programs are kept for the decoders and models that were used last; older ones are freed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding

KEPT = 128  # combinations of static arguments, as `functools.lru_cache` keeps by default

# What one operation may take of the chip's own memory, where libtpu's limit is 16 MB: a product of
# few rows then reads its matrix in fewer and larger blocks, each of which costs some 2,000 cycles
# to begin. More leaves less room for matrices that are prefetched as a whole: hence 40 MB on v5p,
# 24 on v5e, and libtpu's own limit on v6e. The compiler of v4 makes no use of it. The optimiser of
# loops takes the layers of a pass over one token for a loop, and may prefetch their small matrices
# instead of the large ones; without it the compiler decides for each matrix. docs/tpu.md has the
# estimates.
_NO_LOOPS = {"xla_tpu_memory_bound_loop_optimizer_options": "enabled: false"}


def _limit(megabytes: int) -> dict[str, str]:
    return {"xla_tpu_scoped_vmem_limit_kib": str(1024 * megabytes), **_NO_LOOPS}


COMPILER_OPTIONS = {
    **dict.fromkeys(("TPU v5", "TPU v5p"), _limit(40)),
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), _limit(24)),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), _NO_LOOPS),
}
"""Options that `jaxspec.generate` gives to the compiler, by `jax.Device.device_kind` (a chip has
two names).

A program of your own, in which `jaxspec.rollout` is, has them by `jax.jit(...,
compiler_options=...)`.
"""

Returned = TypeVar("Returned")
ArrayTree = TypeVar("ArrayTree")
Given = ParamSpec("Given")


class Jitted(Generic[Returned]):
    """A function as `jax.jit` compiles it, that forgets the programs of static arguments that were
    not used for long.

    `jax.jit` holds on to every static argument, and so to each decoder or model that a long-lived
    process ever made, with its programs. Here each combination of static arguments has a separate
    jitted function, which is freed with them.
    """

    def __init__(
        self,
        function: Callable[..., Returned],
        static_argnames: Sequence[str],
        kept: int,
        options: Any,
    ):
        functools.update_wrapper(self, function)
        self.function = function
        self._signature = inspect.signature(function)
        self._static = tuple(static_argnames)
        self._alive = alive = weakref.WeakSet[Any]()

        @functools.lru_cache(kept)
        def program(device_kind: str, *static: Any) -> Any:
            bound = functools.partial(function, **dict(zip(static_argnames, static, strict=True)))
            devices = [
                device for device in jax.local_devices() if device.device_kind == device_kind
            ]
            chosen = accepted_options(devices[0]) if devices else None
            jitted = jax.jit(bound, compiler_options=chosen or None, **options)
            alive.add(jitted)
            return jitted

        self._program = program

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The static arguments, and the traced ones."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return [bound.arguments.pop(name) for name in self._static], bound.arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Returned:
        static, traced = self._split(args, kwargs)
        program = self._program(_kind(traced), *static)
        with without_context_mesh():
            return program(**automatic(traced))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the program, as `jax.jit(...).lower` does; compiler options are given where it is
        compiled.
        """
        static, traced = self._split(args, kwargs)
        return self._program("", *static).lower(**traced)

    def num_programs(self) -> int:
        """Counts the programs that are kept, compiled."""
        return sum(program._cache_size() for program in self._alive)


def automatic(arguments: ArrayTree) -> ArrayTree:
    """Returns arrays that lie on meshes with Explicit axes as arrays on the same devices, with Auto
    axes.

    Under Explicit axes JAX asks each operation for the layout of its result. Here axes are Auto, so
    the compiler chooses layouts. Nothing is copied.

    Raises:
        TypeError: an array with Explicit axes is traced, in a program of the caller's.
    """
    if jax.device_count() == 1:
        return arguments  # the most usual case costs nothing
    leaves, structure = jax.tree.flatten(arguments)
    if not any(map(_has_explicit_axes, leaves)):
        return arguments
    return jax.tree.unflatten(
        structure, [_automatic(x) if _has_explicit_axes(x) else x for x in leaves]
    )


def automatic_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh of the same devices and axes, all of them Auto; the same mesh if they are."""
    if all(axis_type == AxisType.Auto for axis_type in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names))


def has_explicit_context() -> bool:
    """Says whether `jax.set_mesh` has set a mesh with Explicit axes."""
    return any(
        axis_type != AxisType.Auto for axis_type in jax.sharding.get_abstract_mesh().axis_types
    )


def without_context_mesh() -> contextlib.AbstractContextManager[Any]:
    """Leaves the mesh of `jax.set_mesh`, if it has Explicit axes: the arguments say where
    everything lies.
    """
    if not has_explicit_context():
        return contextlib.nullcontext()
    try:
        return jax.set_mesh(Mesh(np.empty((), object), ()))
    except ValueError:  # JAX sets no mesh of devices while it traces, be it for jit, grad or vmap
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def outside_context_mesh(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Decorates a function of the host that works on arrays: see `without_context_mesh`. It may
    return an iterator.
    """

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        with without_context_mesh():
            returned = function(*args, **kwargs)
        # A generator's body runs later, and the caller's mesh holds between its items.
        if isinstance(returned, Generator):
            return _each_outside(returned)  # pyright: ignore[reportReturnType]
        return returned

    return run


def _each_outside(values: Generator[Any, None, None]) -> Iterator[Any]:
    try:
        while True:
            with without_context_mesh():
                try:
                    value = next(values)
                except StopIteration:
                    return
            yield value
    finally:
        values.close()


def _has_explicit_axes(x: Any) -> bool:
    if isinstance(x, Tracer):
        layout = jax.typeof(x).sharding
    else:
        layout = getattr(x, "sharding", None)
    return isinstance(layout, NamedSharding) and AxisType.Explicit in layout.mesh.axis_types


def _automatic(x: jax.Array) -> jax.Array:
    if isinstance(x, Tracer):
        raise TypeError(
            f"an array of shape {x.shape} lies on a mesh with Explicit axes and is traced (jit, "
            "grad, vmap): expected Auto axes, with which the compiler chooses layouts. Make the "
            "mesh with them, jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) "
            "* len(names)), or call through jax.sharding.auto_axes"
        )
    assert isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, Mesh)
    layout = NamedSharding(
        automatic_mesh(x.sharding.mesh), x.sharding.spec, memory_kind=x.sharding.memory_kind
    )
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.device_put(x, layout)
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, layout, parts)


def _kind(arguments: Any) -> str:
    """Names the kind of device that arguments lie on, if it has options; "" inside of another
    program, too.
    """
    default = jax.local_devices()[0].device_kind
    if default not in COMPILER_OPTIONS:
        return ""
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    if any(isinstance(array, Tracer) for array in (jnp.zeros((), jnp.float32), *arrays)):
        return ""  # the outermost program alone takes options
    kinds = {device.device_kind for array in arrays for device in array.devices()} or {default}
    if len(kinds) == 1:
        return kinds.pop()
    return ""


def accepted_options(device: Any) -> dict[str, str]:
    """Returns those of `COMPILER_OPTIONS` for a device that its compiler knows: another release may
    lack some.
    """
    options = COMPILER_OPTIONS.get(device.device_kind, {})
    return {name: value for name, value in options.items() if _is_known(device, name, value)}


@functools.lru_cache
def _is_known(device: Any, name: str, value: str) -> bool:
    lowered = jax.jit(
        lambda: jnp.zeros((), jnp.float32), out_shardings=SingleDeviceSharding(device)
    ).lower()
    try:
        lowered.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        device_kind = device.device_kind
        message = str(error).partition("\n")[0]
        warnings.warn(
            f"programs for {device_kind} are compiled without the option {name}: {message}",
            stacklevel=2,
        )
        return False
    return True


def jit(
    static_argnames: Sequence[str], *, kept: int = KEPT, **options: Any
) -> Callable[[Callable[..., Returned]], Jitted[Returned]]:
    """Decorates a function as `jax.jit` does, for static arguments that are functions, or hold
    some; see `Jitted`.

    Args:
        static_argnames: the static ones, by name.
        kept: the number of combinations whose programs are kept.
        **options: further ones of `jax.jit`.

    >>> import jax.numpy as jnp
    >>> @jit(static_argnames=("activation",), kept=2)
    ... def layer(activation, x):
    ...     return activation(2 * x)
    >>> [float(layer(f, jnp.array(1.0))) for f in (jnp.negative, jnp.sqrt, jnp.square, jnp.square)]
    [-2.0, 1.4142135381698608, 4.0, 4.0]
    >>> layer.num_programs()
    2
    """
    return lambda function: Jitted(function, static_argnames, kept, options)


def folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns where `keep` stores compiled programs: in the user's folder of caches.

    >>> folder({"XDG_CACHE_HOME": "/tmp/cache"}).as_posix()
    '/tmp/cache/jaxspec/programs'
    """
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "jaxspec" / "programs"


def keep(environment: Mapping[str, str] = os.environ, config: Any = jax.config) -> str:
    """Stores programs that take more than a tenth of a second to compile, so that the next process
    need not.

    It turns on jax's persistent compilation cache, in `folder`. The command line and the notebooks
    call it. A place that has been chosen is kept (`JAX_COMPILATION_CACHE_DIR`, or jax's option of
    that name), and `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off. Nothing is stored
    where the folder cannot be written.

    Args:
        environment: variables.
        config: jax's configuration.

    Returns:
        Why nothing is stored; empty if the cache is on, or is the caller's own.

    Example:
        >>> keep({"JAX_COMPILATION_CACHE_DIR": "/there"})  # chosen already: nothing changes
        ''
    """
    if "JAX_COMPILATION_CACHE_DIR" in environment or config.jax_compilation_cache_dir:
        return ""
    try:
        cache = folder(environment)
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(cache))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        if isinstance(error, OSError):
            reason = f"{error.filename}: {error.strerror}"
        else:
            reason = str(error)
        return (
            f"compiled programs are not stored for the next call ({reason}): set XDG_CACHE_HOME to "
            "a folder"
        )
    config.update("jax_compilation_cache_dir", str(cache))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return ""
