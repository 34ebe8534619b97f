"""Drafters, one per file."""

from jaxspec.drafters.lookup import lookup
from jaxspec.drafters.model import model

__all__ = ["lookup", "model"]
