"""The README's Python is run."""

import re
from pathlib import Path

import pytest

from jaxspec.model import shipped

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL) if README.is_file() else []


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:30])
def test_python_of_the_readme_runs(block):
    if "jaxspec.load" in block and "debian-t5-base" not in shipped():
        pytest.skip("the checkpoints are not here")
    exec(compile(block, "README.md", "exec"), {})


def test_there_is_python_in_the_readme():
    if not README.is_file():
        pytest.skip("not in a checkout")
    assert len(BLOCKS) >= 2
