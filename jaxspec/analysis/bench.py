"""Which is best: any settings, interleaved with plain decoding on the same prompts, on this machine.

`setting` has a setting and products of axes, `runner` the one runner, `result` what it yields, `store` finished results
on disk, `table` tables for a screen, markdown and CSV, `predict` what acceptance rates and costs promise, and `plan`
the gamma to take. This file hands on what an experiment needs.
"""

from jaxspec.analysis.result import BenchResult, Spread, to_json
from jaxspec.analysis.runner import Config, groups, run, run_groups
from jaxspec.analysis.setting import Backend, Setting, Task, product
from jaxspec.analysis.store import Store

__all__ = [
    "Backend",
    "BenchResult",
    "Config",
    "Setting",
    "Spread",
    "Store",
    "Task",
    "groups",
    "product",
    "run",
    "run_groups",
    "to_json",
]
