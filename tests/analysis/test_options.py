"""Numbers of a command line: each once, in their order, or an error that names the option."""

import pytest

from jaxspec.analysis.options import numbers


def test_each_number_once_in_the_order_given():
    assert numbers("4, 7,4,64", "--batch") == (4, 7, 64)


@pytest.mark.parametrize("text", ["", "4,", "0", "4,x", "-1", "1.5"])
def test_numbers_are_positive_integers(text):
    with pytest.raises(ValueError, match=f"--gamma is '{text}': expected positive integers separated by commas"):
        numbers(text, "--gamma")
