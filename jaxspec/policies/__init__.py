"""How many tokens to guess: draft-length policies, one per file.

`generate(..., gamma=8, policy=policies.estimated(c=0.05))`: gamma is then the most guesses of a round. Policies look
at one row at a time, so that text goes on being independent of batch mates; a batch drafts as long as its longest row.
"""

from jaxspec.policies.confidence import confidence
from jaxspec.policies.entropy import entropy
from jaxspec.policies.estimated import estimated
from jaxspec.policies.fixed import fixed
from jaxspec.policies.heuristic import heuristic
from jaxspec.policies.oracle import oracle

__all__ = ["confidence", "entropy", "estimated", "fixed", "heuristic", "oracle"]
