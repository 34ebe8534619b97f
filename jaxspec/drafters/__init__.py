"""Drafters, one per file."""

from jaxspec.drafters.model import model

__all__ = ["model"]
