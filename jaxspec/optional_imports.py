"""Imports that only some need: packages of an extra, transformers without its advice,
submodules.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

# which is all that is asked of it
ADVICE = "only tokenizers, configuration and file/data utilities can be used"


def missing(package: str, extra: str) -> str:
    """Says that a package is not installed, and which command brings it.

    >>> missing("matplotlib", "figures")
    'matplotlib is not installed: pip install ".[figures]" in a checkout of jaxspec brings it'
    """
    return (
        f'{package} is not installed: pip install ".[{extra}]" in a checkout of jaxspec brings it'
    )


def submodules(package: str) -> Callable[[str], Any]:
    """Makes the `__getattr__` of a package whose modules are imported when they are first asked
    for.

    So `jaxspec.nets.adapters` works after `import jaxspec` alone.

    >>> submodules("jaxspec.nets")("adapters").__name__
    'jaxspec.nets.adapters'
    """

    def attribute(name: str) -> Any:
        # Tools ask modules for private names, which are no files here.
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute


def import_transformers() -> None:
    """Imports transformers, whose notice that PyTorch was not found is left out; all else is logged
    as ever.
    """
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
