"""Drafters without a network: they look tokens up in the row, in a store, or in counts."""

from jaxspec import optional_imports

__getattr__ = optional_imports.submodules(__name__)
