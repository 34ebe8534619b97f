"""Values of a command line: each once, in their order, or an error that names the option; options
of sampling.
"""

import pytest

from jaxspec.cli import main, options
from jaxspec.cli.options import integers, values
from jaxspec.sampling.params import OPTIONS


def test_each_number_once_in_the_order_given():
    assert integers("4, 7,4,64", "--batch") == (4, 7, 64)


def test_commas_inside_brackets_and_quotes_separate_nothing():
    text = "tree('a', (4, 2)), fallback('b,c', [1, 2]),none"
    assert values(text, "--draft") == ("tree('a', (4, 2))", "fallback('b,c', [1, 2])", "none")
    with pytest.raises(ValueError, match="expected values separated by commas"):
        values("tree('a', (4, 2)),,none", "--draft")


@pytest.mark.parametrize("text", ["", "4,", "0", "4,x", "-1", "1.5"])
def test_numbers_are_positive_integers(text):
    with pytest.raises(
        ValueError, match=f"--gamma is '{text}': expected positive integers separated by commas"
    ):
        integers(text, "--gamma")


def test_generate_has_every_sampling_option_with_its_help():
    """A new entry of `sampling.options` needs no change of the command line."""
    params = {param.name: param for param in main.command("generate").params}
    for name, option in OPTIONS.items():
        assert (name in params) == (option.kind is not None)
        if option.kind is not None:
            assert (
                params[name].help == option.help
                and params[name].opts[0] == f"--{name.replace('_', '-')}"
            )
    assert "-t" in params["temperature"].opts


def test_what_is_given_arrives_as_one_argument():
    @options.sampling_options
    def command(a: int = 1, *, sampling: dict) -> None:
        calls.append((a, sampling))

    calls = []
    command(a=2, temperature=0.0, top_k=None)
    command()
    assert calls == [(2, {"temperature": 0.0}), (1, {})]
