"""Numbers to decide by: acceptance rates, costs, the best gamma or tree, an honest benchmark, where texts differ.

Theory (NumPy only): `formulas`, `divergence`, `optimal_tree`; `roofline`, of a network's work. Measured for a
`decode.request.Prepared`: `acceptance`, `cost`, `replay`, `numerics`, `memory`, `timing`, with `statistics` and
`environment`. Decisions: `plan` of a gamma or a tree, `layers` of layers to skip, and `bench`, which compares settings
(`setting`) with each other and with promises (`predict`); each has a `result`, and all a `table`.
"""
