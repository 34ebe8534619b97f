"""Acceptance rules, one per file."""

from jaxspec.accept.rejection import rejection

__all__ = ["rejection"]
