"""Recipes are strict, and every shipped one is valid."""

import json
from pathlib import Path

import pytest

from jaxspec.training import recipes, run
from jaxspec.weights import orbax

TABLE = {
    "name": "tiny",
    "model": dict(
        model_type="gpt2", vocab_size=32, n_embd=8, n_inner=8, n_layer=1, n_head=2, n_positions=1024
    ),
    "data": dict(train="a.jsonl", heldout="b.jsonl", tokenizer="tok", shapes=[[0, 8]]),
    "train": dict(steps=2, batch_tokens=16, learning_rate=1),
}

LLAMA = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "vocab_size": 32}

PAIRS = TABLE | {
    "model": dict(
        model_type="t5", vocab_size=32, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2
    ),
    "data": TABLE["data"] | {"shapes": [[8, 8]], "tasks": ["translation"]},
}

HEAD = {
    "name": "tiny",
    "family": "eagle",
    "target": "debian-gpt-base",
    "head": dict(ff_dim=8, heads=2),
    "data": dict(train="a.jsonl", heldout="b.jsonl", shapes=[[0, 8]]),
    "train": TABLE["train"],
}

COUNTED = {
    "name": "tiny",
    "family": "ngram",
    "data": dict(train="a.jsonl", heldout="b.jsonl"),
    "tables": dict(target="debian-t5-base", order=2),
}


def changed(section, **values):
    return TABLE | {section: TABLE[section] | values}


def test_a_whole_number_will_do_for_a_float():
    recipe = recipes.parse(TABLE)
    assert recipe.train.learning_rate == 1.0 and isinstance(recipe.train.learning_rate, float)
    assert recipe.data.shapes == ((0, 8),)
    assert recipe.distil is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            changed("train", learning_rat=1.0),
            r"\[train\] has an unknown key 'learning_rat': did you mean 'learning_rate'",
        ),
        (
            changed("model", n_heads=1),
            r"\[model\] has the key 'n_heads', which GPT-2 does not read: did you mean 'n_head'",
        ),
        (
            changed("model", rope_scaling={"factor": 2.0}),
            r"\[model\] has the key 'rope_scaling', which GPT-2 does not read$",
        ),
        (
            TABLE | {"model": LLAMA | {"rope_scaling": {"rope_type": "linear", "factr": 2.0}}},
            r"\[model\] cannot be used: it lacks 'factor'",
        ),
        (
            TABLE | {"model": LLAMA | {"rope_parameters": {"rope_theta": 1.0, "factr": 2.0}}},
            r"\[model\] has the key 'factr', which Llama does not read",
        ),
        (
            changed("model", n_layer="1"),
            r"\[model\] cannot be used: n_layer is '1': expected a pos",
        ),
        (changed("model", model_type="rnn"), r"\[model\] .* model_type is 'rnn': expected one of"),
        (
            TABLE | {"model": {"d_model": 8}},
            r"\[model\] lacks the key 'model_type': expected a con",
        ),
        (TABLE | {"model": 3}, r"\[model\] lacks the key 'model_type': expected a con"),
        (TABLE | {"fields": {"end_tokens": 3}}, r"\[fields\] end_tokens must be a list, got 3"),
        (TABLE | {"fields": {"layers": 3}}, r"\[fields\] has layers: expected some of dtype, end"),
        (TABLE | {"famly": "t5"}, "unknown key 'famly'"),
        (TABLE | {"family": "gpt"}, r"family is 'gpt': leave it out, since \[model\] has the"),
        (
            {key: x for key, x in (TABLE | {"family": "rnn"}).items() if key != "model"},
            r"family is 'rnn': expected one of .*'ngram'\], or a table \[model\] with a network's",
        ),
        ({k: v for k, v in TABLE.items() if k != "data"}, "lacks the key 'data'"),
        (changed("train", steps="many"), r"\[train\] steps must be of type int, got 'many'"),
        (changed("train", steps=True), "steps must be of type int, got True"),
        (changed("train", steps=0), r"recipe: \[train\] steps is 0: expected at least 1"),
        (changed("data", shapes=[[1, 2, 3]]), "must have 2 entries"),
        (
            TABLE | {"distil": dict(teacher="x", weight=2.0)},
            r"\[distil\] weight is 2.0: expected a number from 0 to 1",
        ),
        (
            TABLE | {"distil": dict(teacher="x", divergence="kld")},
            "divergence is 'kld': expected one of kl, ",
        ),
        (
            TABLE | {"distil": dict(teacher="x", own=0.5, weight=0.9)},
            "own is 0.5: expected a weight of 1, not 0.9",
        ),
        (
            changed("train", dtype="float16"),
            "dtype is 'float16': expected one of float32, bfloat16",
        ),
        (changed("train", average=1.0), "average is 1.0: expected a number from 0 to below 1"),
        (
            changed("data", tasks=["translation"]),
            r"data.tasks is \['translation'\]: a decoder-only model learns texts",
        ),
        (changed("data", repeat=[2, 1]), r"data.repeat is \[2, 1\]: expected a number for each"),
        (
            changed("data", shapes=[[0, 8], [4, 8]]),
            r"data.shapes has \[4, 8\]: expected \[0, target\]",
        ),
        (
            PAIRS | {"data": PAIRS["data"] | {"tasks": []}},
            "data.tasks is empty: an encoder-decoder learns tasks",
        ),
        (
            PAIRS | {"data": PAIRS["data"] | {"shapes": [[0, 8]]}},
            r"data.shapes has \[0, 8\]: expected \[source, target",
        ),
        (TABLE | {"distil": dict(teacher="x", texts=2)}, "texts is 2 and answers is missing"),
        (
            TABLE | {"distil": dict(teacher="x", temperatures=[1.0])},
            r"\[distil\] temperatures is \[1.0\] and answers is missing",
        ),
        (
            TABLE | {"distil": dict(teacher="x", beams=4)},
            r"beams is 4, answers \[\] .*: expected answers, and a temp",
        ),
        (TABLE | {"masks": dict(token=32)}, r"masks.token is 32: expected"),
        (TABLE | {"masks": dict(token=1, draft=1)}, r"\[masks\] draft is 1: expected at least 2"),
        (
            HEAD | {"train": HEAD["train"] | {"dropout": 0.1}},
            "train.dropout is 0.1, which would change",
        ),
        (
            HEAD | {"train": HEAD["train"] | {"stored": "int4"}},
            "train.stored is 'int4', which would change",
        ),
        (
            HEAD | {"head": HEAD["head"] | {"full_layers": [0]}},
            "full_layers has 0: expected a window, and layers from 0",
        ),
        (
            HEAD | {"head": HEAD["head"] | {"window": 4, "full_layers": [1]}},
            "full_layers has 1: .* from 0 to 0",
        ),
        (HEAD | {"head": HEAD["head"] | {"window": -4}}, "window is -4: expected at least 0"),
        (COUNTED | {"train": TABLE["train"]}, "unknown key 'train'"),
        (
            COUNTED | {"tables": dict(target="a", order=2, leest=1)},
            r"\[tables\] .* 'leest': did you mean 'least'",
        ),
        (
            COUNTED | {"tables": dict(target="a", order=0)},
            r"\[tables\] order is 0: expected at least 1",
        ),
        ({k: v for k, v in COUNTED.items() if k != "tables"}, "lacks the key 'tables'"),
    ],
)
def test_mistakes_are_named(table, message):
    with pytest.raises(recipes.RecipeError, match=message):
        recipes.parse(table)


def test_tables_are_counted_and_not_trained():
    recipe = recipes.parse(COUNTED)
    assert isinstance(recipe, recipes.TableRecipe)
    assert (recipe.data.field, recipe.tables.followers, recipe.tables.least) == ("text", 8, 1)


def test_a_recipe_that_is_missing_or_no_toml_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no recipe '.*none.toml'"):
        recipes.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(recipes.RecipeError, match="not valid TOML"):
        recipes.load(tmp_path / "bad.toml")


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted(ROOT.glob("models/*.toml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid(path):
    assert recipes.load(path).name == path.stem


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("checkpoints/*/manifest.toml")), ids=lambda p: p.parent.name
)
def test_a_shipped_checkpoint_has_the_network_of_its_recipe(path):
    manifest = orbax.read_manifest(path.parent)
    assert recipes.load(manifest.name).model == manifest.model


def test_a_run_that_began_when_recipes_named_a_family_goes_on(tmp_path):
    record = tmp_path / run.RECORD
    run.check_run(recipes.parse(PAIRS), tmp_path)
    record.write_text(json.dumps(json.loads(record.read_text()) | {"family": '"t5"'}))
    run.check_run(recipes.parse(PAIRS), tmp_path)
    wider = PAIRS | {"model": PAIRS["model"] | {"d_ff": 16}}
    with pytest.raises(ValueError, match=r"another recipe \(model\.ff_dim is 8 there and 16 here"):
        run.check_run(recipes.parse(wider), tmp_path)
