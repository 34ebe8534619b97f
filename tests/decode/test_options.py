"""The table of options: signatures, checks and defaults are made of it."""

import inspect

import jax
import pytest

import jaxspec
from benchmarks import option_list, pairs
from jaxspec.decode.options import OPTIONS, Options
from jaxspec.sampling import SamplingOptions
from jaxspec.testing import table_model

TARGET = table_model(jax.random.key(1), vocab=5)


def keywords(function):
    """Returns the names and defaults of a function's keyword arguments."""
    return {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def test_generate_has_the_options_of_the_table_with_their_defaults():
    sampling = SamplingOptions.__annotations__.keys()
    table = {name: option.default for name, option in OPTIONS.items() if name not in sampling}
    assert keywords(jaxspec.generate) == table | {"rule": None}  # None: the rule of the table
    assert OPTIONS.keys() - table.keys() == sampling
    assert jaxspec.prepare(TARGET, [[3]]).options.rule == OPTIONS["rule"].default


def test_help_and_completion_show_the_options_that_others_take_as_keywords():
    defaults = {name: option.default for name, option in OPTIONS.items()}
    assert keywords(jaxspec.stream) == defaults
    transcribed = keywords(jaxspec.transcribe)
    assert {name: transcribed[name] for name in transcribed.keys() & defaults.keys()} == {
        name: defaults[name] for name in transcribed.keys() & defaults.keys()
    }
    assert {"gamma", "key", "logit_bias"} < transcribed.keys()
    assert not {"regex", "num_samples", "prefix"} & transcribed.keys()


def test_a_prepared_generation_keeps_its_options_checked_and_by_name():
    policy = jaxspec.policies.heuristic().functions
    prepared = jaxspec.prepare(TARGET, [[3]], drafter=TARGET, policy=policy, top_k=2)
    assert prepared.options.gamma == OPTIONS["gamma"].default
    assert prepared.options.policy == jaxspec.core.BoundPolicy(policy)
    assert prepared.options.sampling == {"top_k": 2}
    assert prepared.options.keywords() == prepared.replace().options.keywords()
    assert prepared.replace(top_k=3).options.sampling == {"top_k": 3}
    assert {*Options._fields} - {"sampling"} < OPTIONS.keys()


@pytest.mark.parametrize("name", ["prefix", "chat_template_kwargs"])
def test_options_of_prompts_come_too_late_for_a_prepared_generation(name):
    with pytest.raises(ValueError, match=f"have their {name} already: give it to prepare"):
        jaxspec.prepare(TARGET, [[3]]).replace(**{name: {"a": 1}})


@pytest.mark.parametrize("name", ["num_samples", "trace_numbers", "prefix", "stop", "top_p"])
def test_a_search_names_the_options_of_generate_that_it_does_not_take(name):
    with pytest.raises(ValueError, match=f"does not sample, and got {name}: use jaxspec.generate"):
        jaxspec.beam_search(TARGET, [[3]], **{name: 1})


def test_the_page_lists_the_options_of_the_table():
    page = option_list.PAGE.read_text("utf-8")
    assert page == pairs.updated(page, option_list.BEGIN, option_list.sections()), (
        "run python -m benchmarks.option_list"
    )
