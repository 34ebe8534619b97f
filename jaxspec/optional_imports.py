"""Packages that only a part of jaxspec needs: how to install them, and transformers without its advice."""

from __future__ import annotations

import logging
import sys

ADVICE = "only tokenizers, configuration and file/data utilities can be used"  # which is all that is asked of it


def missing(package: str, extra: str) -> str:
    """Says that a package is not installed, and which command brings it.

    >>> missing("matplotlib", "figures")
    'matplotlib is not installed: pip install ".[figures]" in a checkout of jaxspec brings it'
    """
    return f'{package} is not installed: pip install ".[{extra}]" in a checkout of jaxspec brings it'


def import_transformers() -> None:
    """Imports transformers, whose notice that PyTorch was not found is left out; all else is logged as ever."""
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
