"""Acceptance rules, one per file.

Exact, whatever the drafter: `rejection` (the paper's, and multi-round on trees), `block` (accepts the most of a chain),
`traversal` (block verification for trees), `k_seq` (for independent candidates), `coupled` (emits what plain sampling
emits), `exact_match` and `classical_rejection` (baselines). Inexact, each with a guarantee of its own: `lenient`,
`typical`. `rule.exact` and `rule.trees` tell whether a rule is exact, and whether it judges token trees.
`catalogue` lists them all, with ordinary parameters, for measuring or checking each of them.
"""

from jaxspec.rules.block import block
from jaxspec.rules.classical import classical_rejection
from jaxspec.rules.coupled import coupled
from jaxspec.rules.exact_match import exact_match
from jaxspec.rules.k_seq import k_seq
from jaxspec.rules.lenient import lenient
from jaxspec.rules.rejection import rejection
from jaxspec.rules.traversal import traversal
from jaxspec.rules.typical import typical

__all__ = [
    "block",
    "classical_rejection",
    "coupled",
    "exact_match",
    "k_seq",
    "lenient",
    "rejection",
    "traversal",
    "typical",
]
