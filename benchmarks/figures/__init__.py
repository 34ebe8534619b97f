"""Pictures: pure functions from numbers to a matplotlib Figure. They need the extra "figures".

`theory` draws the paper's Figures 2, 3 and 4 and the speed-up over alpha and gamma; `sampling`, how
two distributions make a third, and how fast samples show it; `timeline`, Figure 5: what a
generation spends its time on; `tree`, a token tree. `style` is their look.
"""

from benchmarks.figures.sampling import decomposition, distribution_distance
from benchmarks.figures.style import save
from benchmarks.figures.theory import expected_tokens, landscape, optimal_gamma, trade_off
from benchmarks.figures.timeline import trace_diagram
from benchmarks.figures.tree import tree_diagram

__all__ = [
    "decomposition",
    "distribution_distance",
    "expected_tokens",
    "landscape",
    "optimal_gamma",
    "save",
    "trace_diagram",
    "trade_off",
    "tree_diagram",
]
