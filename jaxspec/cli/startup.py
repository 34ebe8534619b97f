"""What happens before a command runs; --help needs none of it."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TERMINATED = 143  # exit code of kill, as shells have it


def show_anything() -> None:
    """Has what a terminal cannot show appear as an escape: \\u03b3 for γ in ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def prepare(environment: Mapping[str, str]) -> None:
    """Signals, libraries that would print, and the cache of compiled programs."""
    if threading.current_thread() is threading.main_thread():
        # so that what is half written is cleared away
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    # transformers, imported for its tokenizers only, would otherwise recommend PyTorch on every call.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import jax
    from absl import logging as absl

    absl.set_verbosity(absl.FATAL)  # of checkpoints that are written and read: what fails is raised, too
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # whose loop Ctrl-C leaves unfinished

    keep_programs(jax.config, environment)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where compiled programs are stored, unless JAX_COMPILATION_CACHE_DIR names a place.

    >>> cache_folder({"XDG_CACHE_HOME": "/tmp/cache"}).as_posix()
    '/tmp/cache/jaxspec/programs'
    """
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "jaxspec" / "programs"


def keep_programs(config: Any, environment: Mapping[str, str]) -> None:
    """Turns on the persistent compilation cache, unless its place has been chosen already."""
    if "JAX_COMPILATION_CACHE_DIR" not in environment and not config.jax_compilation_cache_dir:
        config.update("jax_compilation_cache_dir", str(cache_folder(environment)))
        config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
