"""Values of a command line: each once, in their order, or an error that names the option; options
of sampling.
"""

import pytest

from jaxspec.cli import main, options
from jaxspec.cli.options import integers, values
from jaxspec.decode.options import OPTIONS
from jaxspec.jobs.fields import JOB_OPTIONS


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


@pytest.mark.parametrize("command", ["generate", "batch", "chat"])
def test_commands_have_the_options_of_the_table_with_their_help(command):
    """A new entry of the table with a flag needs no change of the command line."""
    params = {param.name: param for param in main.command(command).params}
    without = {"chat": ["num_samples", "log_probs", "top_log_probs", "prefix"]}.get(command, [])
    flagged = {name: option for name, option in OPTIONS.items() if option.flag is not None}
    for name in flagged.keys() - without:
        assert params[name].help.startswith(flagged[name].help)
        assert f"--{name.replace('_', '-')}" in params[name].opts
        assert options.place(name)[0] == flagged[name].group
    assert not params.keys() & {*without, "banned", "logit_bias", "key"}
    assert "-t" in params["temperature"].opts


def test_batch_has_the_options_of_a_job_from_their_table():
    params = {param.name: param for param in main.command("batch").params}
    for name, option in JOB_OPTIONS.items():
        assert (params[name].help, params[name].default) == (option.help, option.default)


def test_what_is_given_arrives_as_one_argument():
    @options.sampling_options
    def command(a: int = 1, *, generation: dict) -> None:
        calls.append((a, generation))

    calls = []
    command(a=2, temperature=0.0, top_k=None)
    command()
    assert calls == [(2, {"temperature": 0.0}), (1, {})]
