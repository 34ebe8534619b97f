"""Acceptance rules, one per file.

These are exact with every drafter:

- `rejection`: the paper's rule; multi-round rejection sampling on trees
- `block`: accepts the most draft tokens of a chain
- `traversal`: block verification for trees
- `k_seq`: for independent candidates
- `coupled`: gives the text of plain sampling with the same key
- `exact_match`, `classical_rejection`: baselines

`lenient` and `typical` are inexact; their pages state their guarantees. `trusting` is inexact
without one. `rule.exact` tells whether a rule is exact, `rule.trees` whether it judges token trees.
`catalogue` lists all of them with ordinary parameters, to measure or check them.
"""

from jaxspec import optional_imports
from jaxspec.rules.block import block
from jaxspec.rules.classical import classical_rejection
from jaxspec.rules.coupled import coupled
from jaxspec.rules.exact_match import exact_match
from jaxspec.rules.k_seq import k_seq
from jaxspec.rules.lenient import lenient
from jaxspec.rules.rejection import rejection
from jaxspec.rules.traversal import traversal
from jaxspec.rules.trusting import trusting
from jaxspec.rules.typical import typical

__all__ = [
    name for name, value in list(globals().items()) if callable(value) and not name.startswith("_")
]

__getattr__ = optional_imports.submodules(__name__)
