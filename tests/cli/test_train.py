"""`jaxspec train`: from a recipe to a checkpoint that loads, resuming, and refusing early."""

import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import logging as absl
from typer.testing import CliRunner

import jaxspec
from jaxspec import drafters
from jaxspec.cli.main import app
from jaxspec.core import Room
from jaxspec.files.corpus import token_rows
from jaxspec.nets import decoder
from jaxspec.testing import word_tokenizer
from jaxspec.training import boosting, recipes, run
from jaxspec.vocab import trim
from jaxspec.weights import huggingface, loading, orbax
from tests.small import tiny_gpt

runner = CliRunner()
WORDS = ["<pad>", "</s>", "<unk>", "the", "old", "dog", "saw", "a", "new", "cat", "again", "today"]
RECIPE = """
name = "tiny"
[model]
model_type = "gpt2"
vocab_size = 12
n_embd = 8
n_inner = 8
n_layer = 1
n_head = 1
n_positions = 32
[data]
train = "train.jsonl"
heldout = "heldout.jsonl"
tokenizer = "words"
shapes = [[0, 16]]
[train]
steps = 4
batch_tokens = 32
learning_rate = 1e-2
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a recipe and its data, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAXSPEC_DEBUG", raising=False)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    word_tokenizer(WORDS, pad_token="<pad>").save_pretrained(tmp_path / "data" / "words")
    text = json.dumps({"text": "the old dog saw a new cat again today"}) + "\n"
    for name in ("train", "heldout"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(text * 4)
    return tmp_path


def call(*arguments):
    return runner.invoke(app, ["train", *arguments])


def refused(*arguments):
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    return result.stderr


@pytest.mark.slow
def test_a_run_is_interrupted_resumed_and_saved(project, monkeypatch, standard_dtype_promotion):
    train = run.train

    def interrupted(recipe, data, work):
        train(recipe, data, work, progress=False)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", interrupted)
    result = call("tiny.toml", "--steps", "2")
    assert result.exit_code == 130, result.output
    assert "the same command goes on" in result.stderr
    assert not (project / "trained").exists()

    monkeypatch.setattr(run, "train", train)
    result = call("tiny.toml", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "resumed at step 2" in result.stdout
    loaded = loading.load(project / "trained" / "tiny")
    assert (loaded.name, loaded.config.vocab_size) == ("tiny", 12)
    manifest = orbax.read_manifest(project / "trained" / "tiny")
    assert (manifest.dtype, manifest.about["steps"]) == ("bfloat16", 4)
    assert manifest.about["heldout_loss"] > 0
    assert "is there already" in refused("tiny.toml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected a RECIPE"),
        (["debian-t5-bas"], "did you mean 'debian-t5-base'"),
        (["other.toml"], "expected a .toml file, or one of"),
        (["tiny.toml", "--data", "elsewhere"], "`python -m data_prep.debian --data elsewhere`"),
        (["tiny.toml", "--steps", "0"], "steps is 0: expected at least 1"),
        (["tiny.toml", "--dtype", "float8"], "dtype is 'float8'"),
    ],
)
def test_what_cannot_work_is_refused_at_once(project, arguments, said, monkeypatch):
    monkeypatch.setattr(run, "train", lambda *_: pytest.fail("trained"))
    assert said in refused(*arguments)


def test_a_folder_of_another_recipe_is_refused_in_a_line(project, standard_dtype_promotion):
    """By what was written down when its run began; without that, by the shape of its state."""
    assert call("tiny.toml", "--steps", "1").exit_code == 0
    (project / "other.toml").write_text(
        RECIPE.replace("n_inner = 8", "n_inner = 16").replace("steps = 4", "steps = 8")
    )
    again = ("other.toml", "--out", "other", "--work", "runs/tiny")
    said = refused(*again)
    differ = "model.ff_dim is 8 there and 16 here"
    assert (
        f"runs/tiny holds the run of another recipe ({differ}): give another --work, or remove it"
        in said
    )
    assert said.count("\n") == 1
    (project / "runs" / "tiny" / run.RECORD).unlink()
    said = refused(*again)
    assert "runs/tiny/state holds the state of another model's training (layers_0/ff/" in said
    assert said.count("\n") == 1
    result = call("tiny.toml", "--overwrite")
    assert result.exit_code == 0 and "resumed at step 1" in result.stdout


def test_a_full_disk_is_told_in_a_line_and_its_half_of_a_state_removed(
    project, standard_dtype_promotion, monkeypatch, caplog
):
    def full(manager, step, args):
        absl.error("what Orbax logs of its threads")
        (project / "runs" / "tiny" / "state" / f"{step}.orbax-checkpoint-tmp").mkdir()
        raise ValueError("RESOURCE_EXHAUSTED: ... No space left on device")

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    result = call("tiny.toml", "--steps", "1")
    assert result.exit_code == 2
    assert result.stderr.endswith(
        "\nerror: runs/tiny/state: the disk is full, and the run has no saved state\n"
    )
    assert not list((project / "runs" / "tiny" / "state").iterdir()) and not caplog.records
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    said = refused("tiny.toml", "--steps", "1")  # before it is trained
    assert said.startswith("error: runs/tiny/state would take ") and said.endswith(
        "1.0 kB left: nothing was trained\n"
    )


@pytest.mark.parametrize("line", ['{"text": ', '{"input": "a"}', '["a"]', "[" * 100_000])
def test_a_bad_line_of_the_data_is_named(project, line):
    with (project / "data" / "train.jsonl").open("a") as file:
        file.write(line + "\n")
    said = refused("tiny.toml")
    assert (
        "data/train.jsonl: line 5 " in said
        and said.endswith(': expected {"text": "..."}\n')
        and said.count("\n") == 1
    )


COUNTED = """
name = "pairs"
family = "ngram"
[data]
train = "train.jsonl"
heldout = "heldout.jsonl"
[tables]
target = "trained/target"
order = 2
"""


@pytest.fixture
def target(project):
    """A checkpoint to draft for."""
    config = tiny_gpt(12)
    params = decoder.init(config, jax.random.key(0))
    options = dict(name="target", dtype="float32", description={})
    orbax.save(
        project / "trained" / "target", params, config, project / "data" / "words", **options
    )
    (project / "pairs.toml").write_text(COUNTED)


@pytest.mark.slow
def test_tables_are_counted_saved_loaded_and_drafted_with(target):
    result = call("pairs.toml")
    assert result.exit_code == 0, result.output
    assert (
        "trained/pairs: " in result.stdout
        and "contexts: 9 of 1 tokens; the first draft token is right for 90.0%"
        in (result.stdout.replace("\n", " "))
    )
    loaded, base = loading.load("trained/pairs"), loading.load("trained/target")
    out = jaxspec.generate(base, "the old", drafter=loaded, gamma=2, max_new_tokens=6)
    assert (out.tokens == jaxspec.generate(base, "the old", max_new_tokens=6).tokens).all()
    draft_token, _ = loaded.lm.prefill(
        loaded.params, jaxspec.Prompt(jnp.array([[3]]), jnp.array([1])), Room(2)
    )
    assert int(draft_token.logits.argmax()) == WORDS.index("old")
    description = orbax.read_manifest("trained/pairs").about
    assert (
        description.items()
        >= {"target": "trained/target", "order": 2, "texts": 4, "tokens": 40}.items()
    )
    assert "is there already" in refused("pairs.toml")


@pytest.mark.slow
def test_tables_learn_what_the_drafters_before_them_miss(target, project):
    (project / "pairs.toml").write_text(COUNTED.replace("order = 2", "order = 1"))
    assert call("pairs.toml").exit_code == 0
    recipe = (
        COUNTED.replace('"pairs"', '"boosted"') + 'after = ["trained/pairs"]\ntemperature = 1.0\n'
    )
    (project / "boosted.toml").write_text(recipe)
    result = call("boosted.toml")
    assert result.exit_code == 0, result.output
    said = result.stdout.replace("\n", " ")
    assert "are missed by trained/pairs at temperature 1, " in said and said.rstrip().endswith(
        " with the tables"
    )
    base, first, boosted = (
        loading.load(f"trained/{name}") for name in ("target", "pairs", "boosted")
    )
    texts = ["the old dog saw a new cat again today"] * 4
    rows = token_rows(texts, base.tokenizer, encoder=False)
    (expected,) = boosting.boosted_ngrams(rows, base, order=2, after=[first])
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), boosted.params, expected.params)
    )
    missed, remaining = orbax.read_manifest("trained/boosted").about["heldout_missed"]
    assert missed > remaining
    shares = [
        np.mean(boosting.missed(rows, base, drafters)[0][1:])
        for drafters in ([first], [first, boosted])
    ]
    assert [missed, remaining] == [round(float(share), 3) for share in shares]
    tree = drafters.tree([first, boosted], (2,))
    out = jaxspec.generate(base, "the old", drafter=tree, max_new_tokens=6)
    assert (out.tokens == jaxspec.generate(base, "the old", max_new_tokens=6).tokens).all()


def test_a_drafters_head_is_trimmed_to_the_most_frequent_tokens_of_the_answers(
    target, project, standard_dtype_promotion
):
    distil = (
        '[distil]\nteacher = "trained/target"\ndraft_vocab = 4\nweight = 0\nanswers = [2]\nprompt '
        "= 4\n"
    )
    (project / "tiny.toml").write_text(RECIPE + distil)
    result = call("tiny.toml", "--steps", "2")
    assert result.exit_code == 0, result.output
    assert "(its teacher's " in result.output and " at temperature 1" in result.output
    base = loading.load("trained/target")
    # texts begin with the end token
    text = [base.tokenizer.eos_token_id, *base.tokenizer("the old dog")["input_ids"]]
    answer = jaxspec.generate(base, [text], max_new_tokens=13)
    kept = trim.draft_tokens(loading.load("trained/tiny"))
    assert len(kept) == 4 and base.tokenizer.eos_token_id in kept
    count = np.bincount([*text, *answer.tokens[0, : answer.lengths[0]]], minlength=12)
    count[base.tokenizer.eos_token_id] = 100
    assert sorted(count[kept]) == sorted(count)[-4:]


def test_tables_may_be_counted_for_a_hugging_face_folder(target, project):
    """Nothing but its config.json and its tokenizer is read; the tables are those of the same
    target of ours.
    """
    huggingface.save(loading.load("trained/target"), project / "trained" / "theirs")
    (project / "trained" / "theirs" / "model.safetensors").unlink()
    (project / "other.toml").write_text(
        COUNTED.replace("trained/target", "trained/theirs").replace("pairs", "other")
    )
    assert call("pairs.toml").exit_code == 0
    result = call("other.toml")
    assert result.exit_code == 0, result.output
    ours, other = loading.load("trained/pairs"), loading.load("trained/other")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), ours.params, other.params))
    assert ours.config == other.config and ours.tokenizer.get_vocab() == other.tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--steps", "3"],
            "pairs, which is counted and not trained, does not read --steps: leave it out",
        ),
        (["--dtype", "int8"], "tables hold integers"),
        (["--data", "elsewhere"], "`python -m data_prep.debian --data elsewhere`"),
    ],
)
def test_what_counting_cannot_do_is_refused(target, arguments, said):
    assert said in refused("pairs.toml", *arguments)


def test_a_crash_while_counting_leaves_nothing(target, project, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(orbax, "_write_manifest", crash)
    assert call("pairs.toml").exit_code == 130
    assert [path.name for path in (project / "trained").iterdir()] == ["target"]


def test_an_unknown_key_of_a_recipe_is_named(project):
    (project / "tiny.toml").write_text(RECIPE + "learning_rat = 1\n")
    assert "did you mean 'learning_rate'" in refused("tiny.toml")


def test_the_projects_recipes_are_found_by_name():
    assert "debian-t5-base" in recipes.shipped()
    assert recipes.load("debian-t5-base").name == "debian-t5-base"
