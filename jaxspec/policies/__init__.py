"""Draft-length policies, which choose how many tokens to draft, one per file.

`generate(..., gamma=8, policy=policies.adaptive(c=0.05))`: gamma is then the most draft tokens of a
round. Policies look at one row at a time, so that text goes on being independent of batch mates; a
batch drafts as long as its longest row.
"""

from jaxspec import optional_imports
from jaxspec.policies.adaptive import adaptive
from jaxspec.policies.confidence import confidence
from jaxspec.policies.constant import constant
from jaxspec.policies.draft_exiting import draft_exiting
from jaxspec.policies.entropy import entropy
from jaxspec.policies.heuristic import heuristic

__all__ = [
    name for name, value in list(globals().items()) if callable(value) and not name.startswith("_")
]

__getattr__ = optional_imports.submodules(__name__)
