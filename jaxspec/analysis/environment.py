"""The machine, the versions and the command of a measurement."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax


class Environment(NamedTuple):
    """The machine, versions and command that go with every number that is reported."""

    jaxspec: str  # its version
    jax: str  # its version
    jaxlib: str  # its version
    python: str  # its version
    platform: str  # the operating system
    device: str  # the kind of accelerator, or "cpu"
    devices: int  # how many
    cpu: str
    cpus: int | None  # cores that this process may use
    load: float | None  # the load average of the last minute; None where the system does not tell
    date: str  # when, in UTC
    command: str  # with its options
    # a checkout's, ending in "-dirty" if files differ from it; None for an installation
    commit: str | None = None
    xla_flags: str | None = None
    cuda_plugin: str | None = None  # the version of jax's, if it is installed
    torch: str | None = None  # its version, if it has been imported
    transformers: str | None = None  # likewise


def current() -> Environment:
    """Describes this process, as it is now."""
    import jaxspec

    device = jax.devices()[0]
    return Environment(
        jaxspec=jaxspec.__version__,
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        python=platform.python_version(),
        platform=platform.platform(),
        device=device.device_kind if device.platform != "cpu" else "cpu",
        devices=jax.device_count(),
        cpu=_cpu_name(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        commit=_commit(Path(jaxspec.__file__).parents[1]),
        xla_flags=os.environ.get("XLA_FLAGS") or None,
        cuda_plugin=_installed("jax-cuda13-plugin") or _installed("jax-cuda12-plugin"),
        torch=_imported("torch"),
        transformers=_imported("transformers"),
    )


def line(environment: Environment) -> str:
    """Names the machine and the versions, for a screen: 'Xeon, 2 CPUs · jax 0.10.2, jaxlib 0.10.1 ·
    jaxspec 0.1.0'.
    """
    machine = environment.cpu
    if environment.device != "cpu":
        if environment.devices > 1:
            machine = f"{environment.devices} × {environment.device}"
        else:
            machine = environment.device
    if environment.cpus == 1:
        cpus = "1 CPU"
    else:
        cpus = f"{environment.cpus} CPUs"
    versions = f"jax {environment.jax}, jaxlib {environment.jaxlib} · jaxspec {environment.jaxspec}"
    return f"{machine}, {cpus} · {versions}"


@functools.lru_cache
def _commit(folder: Path) -> str | None:
    """Returns the commit of a checkout; None of any other folder, or without git."""
    if not (folder / ".git").exists():
        return None
    command = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--dirty",
        "--exclude=*",
        "--abbrev=12",
    ]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() or None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _imported(module: str) -> str | None:
    """Returns the version of a module if something has imported it: importing takes seconds."""
    version = getattr(sys.modules.get(module), "__version__", None)
    if version is None:
        return None
    return str(version)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
