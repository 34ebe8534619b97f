"""Acceptance rules, one per file.

Exact, whatever the drafter: `rejection` (the paper's), `block` (accepts the most), `coupled` (says what plain sampling
says), `exact_match` and `rejection_sampling` (baselines). Inexact, each with a guarantee of its own: `lenient`,
`typical`. A rule says which it is: `rule.exact`. `iterated` judges several proposals for one position.
`catalogue` lists them all, with ordinary parameters, for whoever measures or checks every one.
"""

from jaxspec.accept.block import block
from jaxspec.accept.common import Rule
from jaxspec.accept.coupled import coupled
from jaxspec.accept.exact_match import exact_match
from jaxspec.accept.iterated import Choice, Proposals, iterated
from jaxspec.accept.lenient import lenient
from jaxspec.accept.rejection import rejection
from jaxspec.accept.rejection_sampling import rejection_sampling
from jaxspec.accept.typical import typical

__all__ = [
    "Choice",
    "Proposals",
    "Rule",
    "block",
    "coupled",
    "exact_match",
    "iterated",
    "lenient",
    "rejection",
    "rejection_sampling",
    "typical",
]
