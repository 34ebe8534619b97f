"""A key that has no effect beside the others is refused where a recipe spells it out."""

import pytest

from jaxspec.training import recipes
from tests.training.test_recipes import COUNTED, HEAD, PAIRS, TABLE

LAYERS = TABLE["model"] | {"n_layer": 3}
MEDUSA = HEAD | {"family": "heads", "head": {"heads": 2}}
TASKS = PAIRS["data"]

UNUSED = [  # recipe, table, the key without effect, the others of the table
    (
        MEDUSA,
        "learn",
        {"divergence": "kl"},
        {"target_rate": 0.1},
        "target_rate is 0.1 without heads_first",
    ),
    (
        MEDUSA,
        "learn",
        {"divergence": "blend"},
        {"target_rate": 0.1},
        "target_rate is 0.1 without heads_first",
    ),
    (MEDUSA, "learn", {"kl": 0.5}, {"target_rate": 0.1}, "the texts' tokens: leave it out"),
    (
        MEDUSA,
        "learn",
        {"divergence": "kl"},
        {"target_rate": 0.1, "heads_first": 0.5, "kl": 1.0},
        "kl is 1.0 and ",
    ),
    (MEDUSA, "learn", {"divergence": "blend"}, {"kl": 1.0}, "kl is 1.0: the forward KL takes all"),
    (MEDUSA, "learn", {"decay": 0.8}, {"one_head": True}, "one_head is true"),
    (
        MEDUSA,
        "learn",
        {"heads_weight": 0.2},
        {"one_head": True, "target_rate": 0.1},
        "one_head is true",
    ),
    (MEDUSA, "learn", {"heads_weight": 0.5}, {}, "target_rate is 0"),
    (MEDUSA, "learn", {"own": 1.0}, {}, "family 'heads' have no lesson"),
    (MEDUSA, "learn", {"prompt": 16}, {}, "answers is missing"),
    (MEDUSA, "learn", {"texts": 0}, {}, "answers is missing"),
    (MEDUSA | {"data": TASKS}, "learn", {"prompt": 4}, {"answers": [4]}, "the model reads sources"),
    (TABLE, "distil", {"divergence": "kl"}, {"teacher": "x", "weight": 0.0}, "weight is 0"),
    (TABLE, "distil", {"prompt": 4}, {"teacher": "x"}, "answers is missing"),
    (PAIRS, "distil", {"prompt": 4}, {"teacher": "x", "own": 0.5}, "the model reads sources"),
    (COUNTED, "tables", {"temperature": 1.0}, COUNTED["tables"], "after is missing"),
    (
        TABLE | {"model": LAYERS},
        "early_exit",
        {"every": 4},
        {"curriculum": "gradual"},
        "curriculum is 'gradual'",
    ),
]

USED = [
    (MEDUSA, "learn", {"divergence": "kl", "kl": 0.25, "decay": 0.6, "stride": 2}),
    (
        MEDUSA,
        "learn",
        {
            "target_rate": 0.1,
            "heads_first": 0.5,
            "kl": 0.0,
            "divergence": "kl",
            "heads_weight": 0.2,
        },
    ),
    (MEDUSA, "learn", {"answers": [4], "prompt": 4, "temperatures": [0.0], "texts": 1, "beams": 2}),
    (TABLE, "distil", {"teacher": "x", "own": 0.5, "prompt": 4, "divergence": "kl"}),
    (COUNTED, "tables", COUNTED["tables"] | {"after": ["debian-gpt-small"], "temperature": 0.0}),
    (TABLE | {"model": LAYERS}, "early_exit", {"every": 2}),
]


def test_a_key_without_effect_is_refused_where_it_is_written_out():
    for recipe, table, key, others, reason in UNUSED:
        recipes.parse(recipe | {table: others})  # the key's default is no mistake
        (name,) = key
        with pytest.raises(
            recipes.RecipeError, match=rf"^recipe: \[{table}\] {name} is .* and .*"
        ) as refused:
            recipes.parse(recipe | {table: others | key})
        assert reason in str(refused.value)
    for recipe, table, values in USED:
        recipes.parse(recipe | {table: values})
