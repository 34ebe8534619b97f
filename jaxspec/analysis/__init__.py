"""What a user decides by: acceptance rates, costs, the best gamma or tree, an honest benchmark, where texts differ.

Theory (NumPy only): `formulas`, `divergence`, `expected_rounds`, `optimal_tree`, `roofline`. Measured for a
`decode.request.Prepared`: `acceptance`, `cost`, `replay`, `numerics`, `memory`, `timing`, `exactness`; with
`statistics` and `environment`. Decisions: `plan` and `tree_plan`; `bench` has what an experiment needs of `setting`,
`runner`, `result`, `store` and `table`; `layers` searches for layers to skip.
"""
