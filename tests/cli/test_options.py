"""Values of a command line: each once, in their order, or an error that names the option; options
of sampling.
"""

import pytest

from jaxspec import drafters
from jaxspec.cli import drafter_names, main, names, options
from jaxspec.cli.options import integers
from jaxspec.core import TreeSize
from jaxspec.decode.options import OPTIONS


def test_each_number_once_in_the_order_given():
    assert integers("4, 7,4,64", "--batch") == (4, 7, 64)


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


def test_what_is_given_arrives_as_one_argument():
    @options.sampling_options
    def command(a: int = 1, *, generation: dict) -> None:
        calls.append((a, generation))

    calls = []
    command(a=2, temperature=0.0, top_k=None)
    command()
    assert calls == [(2, {"temperature": 0.0}), (1, {})]


@pytest.mark.slow
def test_drafters_over_other_vocabularies():
    assert drafter_names.drafter(
        "trim=512:debian-t5-draft", names.model
    ).params.to_target.shape == (512,)
    target = names.model("debian-t5-large")
    shared = drafter_names.drafter("share:debian-t5-draft", names.model, target)
    assert shared.params.to_target.tolist() == list(range(target.lm.vocab_size))
    for name in ("trim=few:debian-t5-draft", "trim:debian-t5-draft"):
        with pytest.raises(ValueError, match="expected trim=NUMBER:NAME"):
            drafter_names.drafter(name, names.model)
    with pytest.raises(ValueError, match="expected a model after the colon"):
        drafter_names.drafter("share:prompt_lookup", names.model)


@pytest.mark.slow
def test_drafters_of_the_targets_own_layers_and_cascades_by_name():
    target = names.model("debian-gpt-base")
    assert drafter_names.drafter("early_exit=1", names.model, target).target is target
    assert drafter_names.drafter("skip_layers=1:", names.model, target).target is target
    assert drafter_names.drafter("windowed=512x4", names.model, target).name == "windowed(512, 4)"
    assert (
        drafter_names.drafter("saturated_exit=1x3", names.model, target).name
        == "saturated_exit(1 to 3)"
    )
    for name in ("trim=512:early_exit=1", "trim=512:saturated_exit", "trim=512:skip_layers=1:"):
        head = drafter_names.drafter(name, names.model, target).params.head.to_target
        assert head.shape == (512,)
    drafter = drafter_names.drafter(
        "cascade=2:debian-gpt-small:cascade:debian-gpt-small:prompt_lookup", names.model
    )
    assert len(drafter.models) == 2
    drafter = drafter_names.drafter(
        "horizontal_cascade=1:debian-gpt-small:prompt_lookup", names.model
    )
    assert len(drafter.models) == 1
    for name, message in (
        ("early_exit=a", "expected early_exit=4"),
        ("early_exit=1x2", "expected early_exit=4"),
        ("skip_layers=1:2:3", "expected skip_layers=5x7:6"),
        ("windowed=5x4x3", "expected windowed, windowed=512 "),
        ("cascade=0:debian-gpt-small:prompt_lookup", "expected cascade:NAME:INNER"),
        ("cascade:debian-gpt-small", "expected cascade:NAME:INNER"),
    ):
        with pytest.raises(ValueError, match=f"the drafter is '{name}': {message}"):
            drafter_names.drafter(name, names.model, target)
    with pytest.raises(ValueError, match="expected a target"):
        drafter_names.drafter("early_exit=1", names.model)


def test_ngram_tables_inside_other_drafters_are_counted_on_the_references():
    target = names.model("debian-gpt-base")
    for name in (
        *(
            "cascade=3:debian-gpt-small:bigram",
            "cascade:debian-gpt-small:cascade=1:debian-gpt-small:retrieval",
        ),
        *(
            "horizontal_cascade=1:debian-gpt-small:bigram",
            "greedy:bigram",
            "tree=2x1:trigram",
            "without_backoff:bigram+trigram",
        ),
    ):
        reads = []
        drafter_names.drafter(
            name, names.model, target, lambda reads=reads: reads.append(1) or ["A fast editor."]
        )
        assert reads, name
        with pytest.raises(
            ValueError, match=r"no held-out texts are left to make a .*: take fewer prompts"
        ):
            drafter_names.drafter(name, names.model, target, list)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bigram", "made of held-out texts in bench and measure: expected the folder of a"),
        ("cascade:debian-gpt-small:4-gram", "the drafter is '4-gram', made of held-out texts"),
        ("retrieval", "made of held-out texts in bench and measure: expected retrieval:FOLDER"),
    ],
)
def test_what_is_counted_is_refused_where_no_texts_are(name, message):
    with pytest.raises(ValueError, match=message):
        drafter_names.drafter(name, names.model, names.model("debian-gpt-base"))


def test_drafters_of_trees_by_name():
    """They take n-gram tables, or any model; what is no number is refused before anything is
    loaded.
    """
    assert drafter_names.drafter("token_recycling", names.model).functions.tree == TreeSize(32, 4)
    mixed = drafters.tree(names.model("debian-gpt-small"), (3, 1), draw="mixed")
    assert (
        drafter_names.drafter("tree=3x1-mixed:debian-gpt-small", names.model).functions
        == mixed.functions
    )
    both = drafters.tree([names.model("debian-gpt-small")] * 2, (2, 1), draw="mixed")
    name = "tree_of_two=2x1-mixed:debian-gpt-small:debian-gpt-small"
    assert drafter_names.drafter(name, names.model).functions == both.functions
    with pytest.raises(ValueError, match="draw is 'often'"):
        drafter_names.drafter("tree=3x1-often:debian-gpt-small", names.model)
    for name, expected in (
        ("tree=4x0:debian-gpt-small", "tree=4x2x1:NAME"),
        ("tree_of_two=2x1:debian-gpt-small", "tree_of_two=4x2x1:NAME:NAME"),
        ("dynamic_tree=3x2:debian-gpt-small", "dynamic_tree=32:NAME"),
        ("sequences=a:debian-gpt-small", "sequences=4:NAME"),
    ):
        with pytest.raises(ValueError, match=f"the drafter is '{name}': expected .* or {expected}"):
            drafter_names.drafter(name, names.model)
