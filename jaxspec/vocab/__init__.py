"""Vocabularies that differ: ids mapped, tokenizers bridged, heads trimmed."""

from jaxspec import optional_imports

__getattr__ = optional_imports.submodules(__name__)
