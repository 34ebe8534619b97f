"""Imports transformers as jaxspec does, where there is no PyTorch: prints that it did, and logs a
line of its own.
"""

import importlib.util
import logging
import sys

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "torch" else find_spec(name, *more)

from jaxspec import optional_imports  # noqa: E402

optional_imports.import_transformers()
logging.getLogger("transformers").warning("another line")
assert not logging.getLogger("transformers").filters
print("imported" if "transformers" in sys.modules else "missing")
