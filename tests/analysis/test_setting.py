"""Settings, their products, and what tells one from another."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxspec import drafters, policies
from jaxspec.analysis.result import Setting, Task, product, setting_of
from jaxspec.core import Model, Prompt
from jaxspec.decode.request import prepare
from jaxspec.nets import decoder
from jaxspec.testing import table_model
from tests.small import tiny_gpt

TARGET = table_model(jax.random.key(1), 6)
TASK = Task("ids", Prompt(jnp.array([[3, 1]]), jnp.array([2])), 9)


def test_names_are_given_or_found():
    lookup = drafters.prompt_lookup()
    unnamed, named = product(task=TASK, drafter=[lookup]) + product(
        task=TASK, drafter={"copy": lookup}
    )
    assert (unnamed.drafter_name, named.drafter_name) == ("prompt_lookup", "copy")
    model = Setting(TASK, TARGET._replace(name="big"))
    assert (
        model.drafter_name == "big" and model.plain().drafter_name == "" and model.plain().is_plain
    )
    (policy,) = product(task=TASK, drafter=TARGET, policy={"sure": policies.confidence(0.5)})
    assert (
        policy.policy_label == "sure"
        and Setting(TASK, TARGET, policy="adaptive").policy_label == "adaptive"
    )
    with pytest.raises(TypeError, match="no field 'gama'"):
        product(task=TASK, gama=[1])


def test_drafters_of_different_factories_and_sizes_have_different_names():
    shape = tiny_gpt(layers=3)
    target = Model(
        decoder.language_model(shape),
        decoder.init(shape, jax.random.key(0)),
        config=shape,
        name="toy",
    )
    early = drafters.early_exit(target, 1)
    expected = {
        "early_exit(1)": early,
        "early_exit(2)": drafters.early_exit(target, 2),
        "skip_layers(attention=[1], mlp=[])": drafters.skip_layers(target, attention=[1]),
        "tree(6 nodes, early_exit(1))": drafters.tree(early, (2, 2)),
        "tree(6 nodes, toy)": drafters.tree(target, (2, 2)),
        "tree(12 nodes, toy)": drafters.tree(target, (4, 2)),
        "sequences(2 of 3 tokens, toy)": drafters.sequences(target, 2, 3),
        "dynamic_tree(6 nodes, toy)": drafters.dynamic_tree(target, 6, 2, 2),
        "prompt_lookup(2 candidates)": drafters.prompt_lookup(candidates=2),
        "prompt_lookup+toy": drafters.fallback(drafters.prompt_lookup(), target),
        "cascade(toy, prompt_lookup)": drafters.cascade(target, drafters.prompt_lookup()),
        "greedy(toy)": drafters.greedy(target),
        "toy": drafters.model(target),
        "unnamed": drafters.prompt_lookup().functions,
    }
    assert {name: Setting(TASK, drafter).drafter_name for name, drafter in expected.items()} == {
        n: n for n in expected
    }
    assert Setting(TASK, TARGET, policy=policies.confidence(0.5)).policy_label == "confidence"


def test_every_factory_names_its_drafter_and_policy():
    """A new factory whose result has no name would share a line of a table with all others of that
    kind.
    """
    for home, home_type in ((drafters, "Drafter"), (policies, "Policy")):
        for path in Path(home.__file__).parent.glob("*.py"):
            for call in [
                node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
            ]:
                if (
                    isinstance(call.func, ast.Name)
                    and call.func.id in ("BoundDrafter", "BoundPolicy")
                    and path.name != "common.py"
                ):
                    named = len(call.args) == 5 or any(
                        keyword.arg == "name" for keyword in call.keywords
                    )
                    assert named, f"{path.name}:{call.lineno}: a bound {home_type} without a name"


def test_a_drafter_of_trees_is_no_plain_decoding():
    tree = drafters.tree(TARGET, (2, 2))
    assert [
        Setting(TASK, drafter, 0).is_plain for drafter in (tree, tree.functions, TARGET, None)
    ] == [*(False, False, True, True)]


def test_what_is_prepared_is_a_setting():
    options = dict(
        drafter=TARGET, gamma=4, temperature=0.5, top_k=3, max_new_tokens=7, key=jax.random.key(0)
    )
    setting = setting_of(prepare(TARGET, TASK.prompts, eos_ids=(), **options), "mine", batch=2)
    assert (setting.drafter, setting.gamma, setting.batch, setting.rule.name) == (
        TARGET,
        4,
        2,
        "rejection",
    )
    assert setting.sampling == {"temperature": 0.5, "top_k": 3}
    assert (setting.task.name, setting.task.new_tokens, setting.task.ends) == ("mine", 7, False)
    with pytest.raises(ValueError, match="one max_new_tokens"):
        setting_of(prepare(TARGET, TASK.prompts, max_new_tokens=[7]), "mine", batch=1)
