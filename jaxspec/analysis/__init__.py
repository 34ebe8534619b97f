"""Numbers to decide by: acceptance rates, costs, the best gamma or tree, an honest benchmark, where
texts differ.

Theory: `formulas`, and `divergence` of two distributions, in NumPy alone; `roofline`, of a
network's work. Measured for a `decode.request.Prepared`: `acceptance`, `cost`, `replay`,
`numerics`, `memory`, with `statistics` and `environment`. Decisions: `plan` of a gamma or a tree,
and `bench`, which compares settings with each other and with promises; each has a `result`, and
all a `table`. `aot` compiles a generation ahead of time, and keeps the program.
"""

from jaxspec import optional_imports

__getattr__ = optional_imports.submodules(__name__)
