"""Token trees: their shapes, how a node's children are drawn, and the drafters that draft them."""

from jaxspec import optional_imports

__getattr__ = optional_imports.submodules(__name__)
