"""Networks of packages that need not be installed, through adapters, as docs/other_networks.md has
them.
"""

import re
from pathlib import Path

import jax
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "other_networks.md"
PACKAGES = {
    "gemma.transformer": "pip install --no-deps gemma==2.0.8",
    "tunix.models.llama3": "pip install google-tunix==0.1.7",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # theirs
@pytest.mark.skipif(not PAGE.is_file(), reason="not in a checkout")
@pytest.mark.parametrize("package", PACKAGES)
def test_speculative_text_is_that_of_its_own_greedy_decoding(
    package: str, capsys: pytest.CaptureFixture
):
    pytest.importorskip(package, reason=PACKAGES[package])
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (code,) = (block for block in blocks if f"from {package.partition('.')[0]}" in block)
    # their own code wants both
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(compile(code, PAGE.name, "exec"), {})
    assert "# > " + capsys.readouterr().out == code[code.rindex("# > ") :]
