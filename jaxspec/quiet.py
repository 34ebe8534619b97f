"""Importing transformers without its advice to install PyTorch, of which nothing is needed here."""

from __future__ import annotations

import logging
import sys

ADVICE = "only tokenizers, configuration and file/data utilities can be used"  # which is all that is asked of it


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
