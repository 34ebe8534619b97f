"""Which settings are fastest: whole generations with each, interleaved with plain decoding on the same prompts.

`throughput` is of gammas and batch sizes, `grid` of tasks, drafters, temperatures and leniences (the paper's Tables 2,
3 and 5), `variants` of drafters and policies, `untimed` of what drafters' tokens are worth without their time. `store`
holds finished results.
"""
