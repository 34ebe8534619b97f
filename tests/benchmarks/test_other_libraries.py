"""The benchmark beside other libraries: its training and its timing always, a whole run where one is
installed.
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import other_libraries
from tests.marks import other_library


@pytest.fixture(autouse=True)
def plain_jax():
    """What the libraries and the script run with: ranks and dtypes are promoted."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def test_the_drafter_learns_the_target_and_both_are_put_back():
    """Bigram tables learn a text of two letters in turns."""
    stored = {}

    def network(name):
        params = {"table": jnp.zeros((other_libraries.VOCAB, other_libraries.VOCAB))}
        return other_libraries.Network(
            params,
            lambda params, tokens: params["table"][tokens],
            lambda trained: stored.update({name: trained["table"]}),
            *[lambda: None] * 3,
        )

    text = np.tile(np.array([65, 66], np.int32), 200)
    line = other_libraries.train([network("target"), network("draft")], text, steps=60)
    assert line.startswith("60 steps of 512 bytes in ")
    assert line.endswith(" 100% of places")
    for table in stored.values():
        assert table[65].argmax() == 66 and table[66].argmax() == 65


def test_runs_are_interleaved_and_the_first_is_not_timed():
    order = []
    ways = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = other_libraries.race(ways, 2, iter(range(99)).__next__)
    assert "".join(order) == "ababab"
    assert [times.tolist() for times in seconds.values()] == [[1, 1], [1, 1]]


def test_an_absent_library_is_named(monkeypatch, capsys):
    monkeypatch.setitem(
        other_libraries.LIBRARIES, "tunix", other_libraries.Library(None, "no_such", "google-tunix")
    )
    monkeypatch.setattr(sys, "argv", ["other_libraries", "tunix"])
    with pytest.raises(SystemExit):
        other_libraries.main()
    assert "tunix is not installed: pip install google-tunix" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", other_libraries.LIBRARIES)
def test_a_run(name, monkeypatch, capsys):
    """All five texts are the same, the converted network's too."""
    other_library(name, other_libraries.LIBRARIES[name].module)
    sizes = "other_libraries NAME --layers 2 --width 32 --steps 3 --repeats 1 --batches 1 3"
    monkeypatch.setattr(sys, "argv", sizes.replace("NAME", name).split())
    other_libraries.main()
    rows = re.findall(r"\| (\d) of (\d) \|", capsys.readouterr().out)
    assert rows == [("1", "1")] * 4 + [("3", "3")] * 4
