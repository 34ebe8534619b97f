"""Lazy and optional imports: packages of an extra, transformers without its advice, submodules."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

# part of that notice: jaxspec needs only its tokenizers
ADVICE = "only tokenizers, configuration and file/data utilities can be used"


def missing(package: str, extra: str) -> str:
    """Returns a message that a package is not installed, with the command that installs it.

    >>> missing("matplotlib", "figures")
    'matplotlib is not installed: pip install ".[figures]" in a checkout of jaxspec brings it'
    """
    return (
        f'{package} is not installed: pip install ".[{extra}]" in a checkout of jaxspec brings it'
    )


def submodules(package: str) -> Callable[[str], Any]:
    """Makes the `__getattr__` of a package that imports its modules on first use.

    So `jaxspec.nets.adapters` works after `import jaxspec` alone.

    >>> submodules("jaxspec.nets")("adapters").__name__
    'jaxspec.nets.adapters'
    """

    def attribute(name: str) -> Any:
        # Tools ask for private names; these are never modules here.
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute


def import_transformers() -> None:
    """Imports transformers, suppressing only its notice about a missing PyTorch."""
    if "transformers" in sys.modules:
        return

    def is_no_advice(record: logging.LogRecord) -> bool:
        return ADVICE not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(is_no_advice)
    try:
        import transformers  # noqa: F401
    finally:
        logger.removeFilter(is_no_advice)
