"""Which is best: any settings, interleaved with plain decoding on the same prompts, on this machine.

`setting` has a setting and products of axes, `runner` the one runner, `row` what it yields, `store` finished rows on
disk, `table` rows for a screen, markdown and CSV; `expected` what acceptance rates and costs promise, and `plan` the
gamma to take. `transformers` is the other library as a backend, `paper` has the settings of the paper's tables, also
at the paper's sizes, and `model_card` the numbers of a model card.
"""

from jaxspec.analysis.bench.row import Row, Spread, to_json
from jaxspec.analysis.bench.runner import Config, groups, run, run_groups
from jaxspec.analysis.bench.setting import Setting, Task, product
from jaxspec.analysis.bench.store import Store

__all__ = ["Config", "Row", "Setting", "Spread", "Store", "Task", "groups", "product", "run", "run_groups", "to_json"]
