"""Google DeepMind's own Gemma, through an adapter, as docs/other_networks.md has it."""

import re
from pathlib import Path

import jax
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "other_networks.md"

pytest.importorskip("gemma.transformer", reason="pip install --no-deps gemma==2.0.8")


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.is_file(), reason="not in a checkout")
def test_speculative_text_is_that_of_its_own_greedy_decoding(capsys):
    (code,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # gemma's own code wants both
        exec(compile(code, PAGE.name, "exec"), {})
    assert "# > " + capsys.readouterr().out == code[code.rindex("# > ") :]
