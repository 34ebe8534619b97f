"""Drafters, one per file."""

from jaxspec.drafters.first_of import first_of
from jaxspec.drafters.lookup import lookup
from jaxspec.drafters.model import model

__all__ = ["first_of", "lookup", "model"]
