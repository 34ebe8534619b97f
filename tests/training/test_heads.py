"""Training drafters that read hidden states: they learn, resume exactly, and are read by
`load_drafter`.
"""

import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, nets
from jaxspec.draft_heads import kangaroo, kind_of
from jaxspec.draft_heads.check import TOO_LOW, check_acceptance
from jaxspec.draft_heads.save import config_json, save
from jaxspec.nets import decoder
from jaxspec.testing import word_tokenizer
from jaxspec.training import data, divergences, head_loss, heads, losses, recipes, run
from jaxspec.weights.hf_families import gemma
from jaxspec.weights.orbax import CheckpointError
from tests.marks import marked

SCRIPTS = Path(__file__).parents[1] / "scripts"
V = 12
SHAPE = decoder.decoder_config(
    V, dim=16, ff_dim=24, layers=4, heads=2, kv_heads=1, head_dim=8, max_positions=64
)
WORDS = ["</s>", "<unk>", *"abcdefghij"]
TABLE = {
    "name": "toy",
    "target": "toy",
    "data": dict(train="train.jsonl", heldout="heldout.jsonl", shapes=[[0, 20]]),
    "train": dict(
        steps=40, batch_tokens=160, learning_rate=0.1, warmup=5, evaluate_every=20, save_every=8
    ),
}
LAYER = dict(ff_dim=24, heads=2)
KINDS = {  # family, sizes, what is learnt
    "eagle 3": (
        "eagle",
        LAYER | dict(taps=[0, 1, 2], own_head=True, draft_vocab=9),
        dict(depths=3, answers=[24], prompt=2, kl=0.0),
    ),
    "eagle 1": ("eagle", LAYER, dict(depths=2, regression=1.0, divergence="minus_log_alpha", kl=0.0)),
    "medusa": ("heads", dict(heads=3), dict(stride=2, chunk=20)),
    "dspark": (
        "block",
        LAYER | dict(taps=[0, 2], block=3, mask_token=1, markov_rank=4, from_anchor=True, confidence=True),
        dict(kl=1.0),
    ),
    "dflash 2": (
        "dflash2",
        LAYER | dict(taps=[0, 2], block=3, mask_token=1, group=4, rank=4, candidates=4, window=6, causal_windows=False),
        dict(kl=1.0, hard=True),
    ),
    "p-eagle": (
        "eagle",
        LAYER | dict(taps=[0, 1, 2], own_embedding=True, mask_token=1),
        dict(depths=3, kl=1.0),
    ),
    "mtp": ("mtp", LAYER, dict(depths=2, decay=0.6, kl=1.0)),
    "kangaroo": ("exit_adapter", dict(heads=2, exit=2), dict(depths=2, stride=2, decay=1.0)),
    "pass": ("lookahead_embeddings", dict(vectors=3), dict(stride=2, chunk=20)),
}  # fmt: skip


SELDOM = ("eagle 1", "mtp")  # as EAGLE-3


@pytest.fixture
def promotion():
    """Optax's own bias correction multiplies a float by an int32 count, which strict promotion
    refuses.
    """
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def target():
    """A random network with sharp distributions: a language that its hidden states know more of
    than its tokens do.
    """
    params = decoder.init(SHAPE, jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    noise = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [x + 0.4 * jax.random.normal(k, x.shape) for x, k in zip(leaves, noise, strict=True)]
    lm = decoder.language_model(SHAPE)
    return jaxspec.Model(
        lm, jax.tree.unflatten(structure, leaves), word_tokenizer(WORDS), SHAPE, "toy"
    )


def write_texts(folder):
    random = np.random.default_rng(0)
    for name, count in (("train", 60), ("heldout", 20)):
        texts = [" ".join(random.choice(WORDS[2:], 18)) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_texts(tmp_path)


def recipe_of(kind):
    family, sizes, learn = KINDS[kind]
    train = TABLE["train"] | (dict(learning_rate=0.3) if kind == "pass" else {})
    return recipes.parse(TABLE | {"family": family, "head": sizes, "learn": learn, "train": train})


@pytest.fixture
def load_target(target, monkeypatch):
    monkeypatch.setattr(heads, "load", lambda name, **options: target)


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    """Whole runs of kinds, each trained once for all tests: the run, its held-out acceptance, and
    what was printed.
    """
    folder = write_texts(tmp_path_factory.mktemp("runs"))

    @functools.cache
    def run_of(kind):
        lines = []
        return *run.train(
            recipe_of(kind), folder, folder / kind, lines.append, progress=False
        ), lines

    return run_of


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.exhaustive if kind in SELDOM else ()) for kind in KINDS],
)
def test_a_head_learns_and_is_loaded(
    kind, target, folder, uncut, load_target, monkeypatch, promotion
):
    """It promises more tokens a round than at the beginning, and what is written is what was
    trained.
    """
    recipe = recipe_of(kind)
    trained, held_out, lines = uncut(kind)
    assert lines[1].startswith("untrained: T=0") and lines[-1].endswith(str(held_out))
    least = 0.03 if kind == "pass" else 0.1  # its three vectors are 48 numbers
    assert held_out.tokens_per_round[1] > float(lines[1].rsplit(" ")[-1]) + least, lines

    monkeypatch.setattr(run, "train", lambda *_: (trained, held_out))
    assert str(held_out) in run.checkpoint(recipe, folder, folder / "out", folder / "run")
    drafter = jaxspec.load_drafter(folder / "out", target=target)
    params = drafter.params.adapter if kind == "kangaroo" else drafter.params
    jax.tree.map(np.testing.assert_array_equal, params, {**trained.params, **trained.fixed})
    again = dataclasses.replace(
        recipe, train=dataclasses.replace(recipe.train, start=str(folder / "out"))
    )
    going_on = heads.start(again, target, np.ones(V, int))
    jax.tree.map(np.testing.assert_array_equal, going_on.params, trained.params)


@pytest.mark.slow
def test_the_lesson_of_confidence_and_of_the_walk_is_learnt(
    target, folder, uncut, load_target, promotion
):
    """A step's own lesson, measured on held-out texts, falls in training; with a weight of 0 it is
    not learnt.
    """
    for kind in ("dspark", "dflash 2"):
        recipe = recipe_of(kind)
        trained, *_ = uncut(kind)
        start = heads.start(recipe, target, np.ones(V, int))
        batch = next(
            iter(
                data.batches(
                    recipe, heads.texts(recipe, target, folder, "heldout", folder, False)
                ).once()
            )
        )
        lesson = head_loss.Lesson(batch, target.params)

        @jax.jit
        def own(params, task=start.task, lesson=lesson):
            drafted = head_loss.draft(task, params, lesson)
            part = jax.tree.map(lambda x: x[0], drafted.parts)
            every = head_loss.compare(
                task, lesson.target, params, drafted.hidden[0], part, learns=True
            )
            return sum(
                jnp.sum(x.lesson_kl * part.real[:, :, i]) for i, x in enumerate(every)
            ) / jnp.sum(part.real)

        assert own(trained.params) < 0.7 * own(start.params), kind


def test_logits_and_their_gradients_are_made_in_parts(promotion):
    """With a vocabulary of 4,096 a longer batch takes less memory for each further token than one
    row of logits.
    """
    vocab, shape = 4096, dataclasses.replace(SHAPE, vocab_size=4096)
    params = decoder.init(shape, jax.random.key(0))
    head = heads.start(
        recipe_of("medusa"),
        jaxspec.Model(decoder.language_model(shape), params, None, shape),
        np.ones(vocab),
    )
    loss = head_loss.head_loss(head.task, divergences.DIVERGENCES["kl"])

    def temporaries(rows):
        examples = [data.Example(np.zeros(0, np.int32), np.arange(33, dtype=np.int32))] * rows
        lesson = head_loss.Lesson(data.collate(examples, data.Bucket(0, 33, rows)), params)
        step = jax.jit(jax.grad(lambda learnt, lesson: loss(learnt, lesson)[0]))
        return step.lower(head.params, lesson).compile().memory_analysis().temp_size_in_bytes

    assert (temporaries(16) - temporaries(4)) / (12 * 32) < 4 * vocab


def test_a_batch_teaches_one_head_that_it_draws(target, folder, promotion):
    """The loss and the gradient of the drawn head are those that it has in the loss of all heads;
    others have none.
    """
    recipe = recipe_of("medusa")
    head = heads.start(recipe, target, np.ones(V, int))
    rows = data.examples(recipe.data, False, folder, target.tokenizer)["text"]
    batch = data.collate(rows[:8], data.Bucket(0, 20, 8))
    lesson = head_loss.Lesson(batch, target.params)

    @jax.jit
    def learnt(lesson):
        def gradient_of(**change):
            task = head.task._replace(learn=dataclasses.replace(recipe.learn, **change))
            loss = head_loss.head_loss(task, divergences.DIVERGENCES["kl"])
            return jax.grad(lambda params: loss(params, lesson)[0])(head.params)

        return (
            gradient_of(one_head=True),
            gradient_of(decay=1.0),
            head_loss.drawn_head(lesson.batch, 3),
        )

    alone, together, drawn = learnt(lesson)
    for index in range(3):
        expected = together[f"heads_{index}"]
        if index != drawn:
            expected = jax.tree.map(jnp.zeros_like, expected)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
            alone[f"heads_{index}"],
            expected,
        )
    assert np.abs(alone[f"heads_{drawn}"]["head"]["weight"]).max() > 0.1
    batches = (batch._replace(target=batch.target + number) for number in range(60))
    drawn_heads = [int(head_loss.drawn_head(other, 3)) for other in batches]
    assert min(np.bincount(drawn_heads, minlength=3)) > 8
    with pytest.raises(
        recipes.RecipeError, match=r"family is .eagle. and learn\.one_head is True: expected"
    ):
        recipes.parse(TABLE | {"family": "eagle", "head": LAYER, "learn": {"one_head": True}})


@pytest.mark.slow
def test_a_target_that_learns_has_its_own_loss_and_that_of_its_heads(target, folder, promotion):
    """Without weight of the heads its gradient is that of ordinary training; with it, heads' errors
    reach it.
    """
    recipe = recipe_of("medusa")
    learn = dataclasses.replace(recipe.learn, target_rate=0.5)
    head = heads.start(dataclasses.replace(recipe, learn=learn), target, np.ones(V, int))
    rows = data.examples(recipe.data, False, folder, target.tokenizer)["text"]
    batch = data.collate(rows[:7], data.Bucket(0, 20, 8))
    lesson = head_loss.Lesson(batch, {})

    @jax.jit
    def gradients(params):
        def gradient_of(weight):
            task = head.task._replace(learn=dataclasses.replace(learn, heads_weight=weight))
            loss = head_loss.combined_loss(task, divergences.DIVERGENCES["kl"])
            return jax.grad(lambda params: loss(params, lesson)[0])(params)

        def ordinary(params):
            total, count = losses.cross_entropy(SHAPE)(params, batch)
            return total / count

        return gradient_of(0.0), gradient_of(0.5), jax.grad(ordinary)(params[head_loss.TARGET])

    alone, together, expected = gradients(head.params)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5),
        alone[head_loss.TARGET],
        expected,
    )
    assert not np.abs(alone["heads_0"]["head"]["weight"]).any()
    assert np.abs(together["heads_0"]["head"]["weight"]).max() > 1e-3
    reached = jax.tree.map(
        lambda x, y: np.abs(x - y).max(), together[head_loss.TARGET], alone[head_loss.TARGET]
    )
    assert max(jax.tree.leaves(reached)) > 1e-3
    with pytest.raises(
        recipes.RecipeError, match=r"heads_first is 0\.5 and target_rate is 0: set both"
    ):
        recipes.parse(
            TABLE | {"family": "heads", "head": KINDS["medusa"][1], "learn": {"heads_first": 0.5}}
        )
    with pytest.raises(
        recipes.RecipeError, match=r"heads_weight is 0\.5 and target_rate is 0: leave it out"
    ):
        recipes.parse(
            TABLE | {"family": "heads", "head": KINDS["medusa"][1], "learn": {"heads_weight": 0.5}}
        )


@pytest.mark.slow
def test_a_target_that_has_learnt_is_written_with_its_heads(target, folder, load_target, promotion):
    """It is as it was while the heads learn alone. What is loaded drafts for the new target,
    exactly.
    """
    table = TABLE | {"family": "heads", "head": KINDS["medusa"][1]}
    table["train"] = TABLE["train"] | dict(steps=4, warmup=1, decay=0.0)
    table["learn"] = dict(target_rate=0.25, heads_first=0.5, one_head=True, kl=1.0)
    recipe = recipes.parse(table)
    short = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, steps=2, decay=0.0))
    short = dataclasses.replace(short, learn=dataclasses.replace(recipe.learn, heads_first=1.0))
    before, _ = run.train(short, folder, folder / "short", lambda line: None, progress=False)
    jax.tree.map(np.testing.assert_array_equal, before.params[head_loss.TARGET], target.params)
    line = run.checkpoint(recipe, folder, folder / "out", folder / "run")
    assert re.search(
        r"The target's own loss there: \d\.\d+ nats per token before, \d\.\d+ now$", line
    )
    trained = jaxspec.load(folder / "out" / "target")
    changed = jax.tree.map(lambda x, y: np.abs(x - y).max(), trained.params, target.params)
    assert min(jax.tree.leaves(changed)) > 0
    drafter = jaxspec.load_drafter(folder / "out" / "heads", target=trained)
    fast = jaxspec.generate(trained, [[2, 5, 3], [7, 4]], drafter=drafter, max_new_tokens=12)
    assert (
        fast.tokens == jaxspec.generate(trained, [[2, 5, 3], [7, 4]], max_new_tokens=12).tokens
    ).all()


def test_an_adapter_of_its_authors_does_not_say_where_it_belongs(target, tmp_path):
    """Tensors as they publish them, beside the config.json of a Llama of one layer."""
    config = recipe_of("kangaroo").head.config(target)
    params = kangaroo.init(config, jax.random.key(0))
    save(config, params, tmp_path / "adapter", target=target)
    path = tmp_path / "adapter" / "config.json"
    table = json.loads(path.read_text())
    assert table.pop("early_exit_layer") == 2 and table["num_hidden_layers"] == 1
    path.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"no early_exit_layer: pass taps=\[1\]"):
        jaxspec.load_drafter(tmp_path / "adapter", target=target)
    drafter = jaxspec.load_drafter(tmp_path / "adapter", target=target, taps=[1])
    assert drafter.target is not None and drafter.target.lm.inside.taps == (1,)
    jax.tree.map(np.testing.assert_array_equal, drafter.params.adapter, params)


class Killed(Exception):
    """The machine went away."""


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(target, folder, uncut, load_target, promotion):
    """From a step before the loss changes."""

    def kill(line):
        if line.startswith("step 20"):
            raise Killed

    recipe, lines = recipe_of("medusa"), []
    whole, held_out, _ = uncut("medusa")
    with pytest.raises(Killed):
        run.train(recipe, folder, folder / "cut", kill, progress=False)
    resumed, again = run.train(recipe, folder, folder / "cut", lines.append, progress=False)
    assert any(line.startswith("resumed at step 16") for line in lines)
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    assert str(held_out) == str(again)


@pytest.mark.slow
@pytest.mark.parametrize("devices", marked([1, 8], exhaustive=(1,)))
def test_a_process_that_was_killed_goes_on_bit_for_bit(devices, tmp_path):
    """By SIGKILL, in a process of its own: nothing of it is left but what lies on disk."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    if cache := jax.config.jax_compilation_cache_dir:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    command = [sys.executable, SCRIPTS / "killed_head.py", tmp_path]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "resumed.npz").exists()
    done = subprocess.run(
        [*command, "--go-on"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["devices"] == devices and any(
        line.startswith("resumed at step 4") for line in said["lines"]
    )
    with np.load(tmp_path / "whole.npz") as uncut, np.load(tmp_path / "resumed.npz") as resumed:
        assert set(uncut) == set(resumed) and len(uncut) > 2
        for name in uncut:
            np.testing.assert_array_equal(uncut[name], resumed[name])


def test_the_gradient_in_parts_is_that_of_the_sum():
    def function(fixed, params, hidden, part):
        return jnp.sum(jnp.sin(fixed * params["a"] * hidden) * part)

    key = jax.random.key(0)
    hidden, parts, params, fixed = (
        jax.random.normal(key, (3, 4)),
        jnp.arange(3.0),
        {"a": jnp.array(0.7)},
        jnp.array(2.0),
    )

    def plain(params, hidden):
        return 0.5 * sum(function(fixed, params, hidden[i], parts[i]) for i in range(3))

    def in_parts(params, hidden):
        return 0.5 * head_loss.in_parts(function, fixed, params, hidden, parts)

    for a, b in zip(
        *(jax.value_and_grad(f, (0, 1))(params, hidden) for f in (plain, in_parts)), strict=True
    ):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), a, b)
    assert float(in_parts(params, hidden)) == pytest.approx(float(plain(params, hidden)))


@pytest.mark.slow
def test_a_head_of_another_target_is_noticed(target, folder, uncut, load_target, promotion):
    """Measured on texts of the target's; a random head is warned of, one that drafts what the
    target draws is not.
    """
    recipe = recipe_of("medusa")
    head = heads.start(recipe, target, np.ones(V, int))
    config = head.task.config
    bad = jax.tree.map(lambda x: 30 * jax.random.normal(jax.random.key(1), x.shape), head.params)
    save(config, bad, folder / "bad", target=target)
    with pytest.warns(UserWarning, match="bad has .*% of its first draft tokens accepted"):
        jaxspec.load_drafter(folder / "bad", target=target, check=["a b c", "d"])
    good, *_ = uncut("medusa")
    save(config, good.params, folder / "good", target=target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter = jaxspec.load_drafter(folder / "good", target=target, check=["a b c", "d"])
        alone = check_acceptance(drafter, ["a b c", "d"])
        assert alone <= check_acceptance(drafters.tree(drafter, (2, 1)), ["a b c", "d"])
    assert TOO_LOW < alone < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "eagel"}, "family is 'eagel': expected one of"),
        ({"head": LAYER | {"tap": [1]}}, r"\[head\] has an unknown key 'tap': did you mean 'taps'"),
        ({"learn": {"divergence": "kld"}}, "divergence is 'kld': expected one of kl, "),
        ({"learn": {"stride": 0}}, r"\[learn\] stride is 0: expected at least 1"),
        ({"learn": {"kl": 2.0}}, "kl is 2.0: expected a number from 0 to 1"),
        ({"distil": {"teacher": "x"}}, "unknown key 'distil'"),
    ],
)
def test_mistakes_in_recipes_are_named(change, message):
    with pytest.raises(recipes.RecipeError, match=message):
        recipes.parse(TABLE | {"family": "eagle", "head": LAYER} | change)


def record(work, change, *without):
    """Writes what a run's record would be, had it begun with other values or without some
    fields.
    """
    path = work / run.RECORD
    fields = {
        name: text for name, text in json.loads(path.read_text()).items() if name not in without
    }
    path.write_text(json.dumps(fields | change))


@pytest.mark.parametrize("family", ["eagle", "heads", "block"])
def test_a_draft_vocabulary_of_0_is_the_targets_as_none_is(family, target, tmp_path):
    """In recipes, and in the records of runs, whichever of both they hold."""
    sizes = {
        "eagle": LAYER | dict(taps=[0, 1, 2]),
        "heads": KINDS["medusa"][1],
        "block": KINDS["dspark"][1],
    }[family]

    def recipe(**change):
        return recipes.parse(TABLE | {"family": family, "head": sizes | change})

    alike, other = (recipe(), recipe(draft_vocab=0)), recipe(draft_vocab=9, own_head=True)
    assert [x.head.config(target).draft_vocab for x in (*alike, other)] == [None, None, 9]
    run.check_run(alike[0], tmp_path)
    for text in ("0", "null"):
        record(tmp_path, {"head.draft_vocab": text})
        for same in alike:
            run.check_run(same, tmp_path)
        with pytest.raises(
            ValueError, match=f"draft_vocab is {text} there and 9 here.* --work, or remove it"
        ):
            run.check_run(other, tmp_path)


@pytest.mark.parametrize(
    ("kind", "sizes", "complaint"),
    [
        ("dspark", dict(reads_source=True, window=4), "got reads_source and layers with windows"),
        (
            "dspark",
            dict(windows_from_anchor=False),
            "windows_from_anchor is False, and no layer has a window",
        ),
        (
            "dspark",
            dict(head_norms=False),
            "the drafter cannot be written: .* block drafters .* head_norms = true",
        ),
        (
            "dflash 2",
            dict(head_norms=False),
            "the drafter cannot be written: .* block drafters .* head_norms = true",
        ),
        ("eagle 3", dict(fc_bias=True), r"the drafter cannot be written: .*cannot store fc_bias"),
    ],
)
def test_sizes_that_make_no_drafter_are_refused_before_training(kind, sizes, complaint, target):
    family, usual, _ = KINDS[kind]
    recipe = recipes.parse(TABLE | {"family": family, "head": usual | sizes})
    with pytest.raises(recipes.RecipeError, match=rf"^toy: \[head\] {complaint}"):
        heads.start(recipe, target, np.zeros(V, np.int32))


@pytest.mark.parametrize("kind", ["eagle 3", "dspark", "dflash 2"])
def test_a_window_is_that_of_all_layers_but_some(kind, target):
    family, sizes, _ = KINDS[kind]
    sizes = sizes | dict(layers=3, window=4, full_layers=[1])
    config = recipes.parse(TABLE | {"family": family, "head": sizes}).head.config(target)
    assert [layer.attention.window for layer in config.layer.layers] == [4, None, 4]


def test_a_run_that_is_older_than_a_field_goes_on_with_its_default(tmp_path):
    recipe = recipes.load("debian-t5-small")
    run.check_run(recipe, tmp_path)
    record(tmp_path, {}, "model.bias_by_layer", "model.begin_tokens", "train.dropout")
    run.check_run(recipe, tmp_path)
    other = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, bias_by_layer=True))
    with pytest.raises(ValueError, match=r"\(model.bias_by_layer is false there and true here\)"):
        run.check_run(other, tmp_path)
    record(tmp_path, {}, "model.ff_dim")  # it has no default
    with pytest.raises(ValueError, match=r"\(model.ff_dim is None there and \d+ here\)"):
        run.check_run(recipe, tmp_path)


def test_a_recipe_names_the_languages_of_its_target(tmp_path, monkeypatch):
    named = recipes.parse(TABLE | {"family": "eagle", "head": LAYER, "target_language": "deu_Latn"})

    def loaded(source, **options):
        raise RuntimeError(source, options["source_language"], options["target_language"])

    monkeypatch.setattr(heads, "load", loaded)
    with pytest.raises(RuntimeError) as raised:
        heads.prepare(named, tmp_path, tmp_path, False)
    assert raised.value.args == (named.target, None, "deu_Latn")
    with pytest.raises(recipes.RecipeError, match="target_language"):
        recipes.parse(TABLE | {"family": "eagle", "head": LAYER, "target_language": 3})


@pytest.mark.slow
def test_what_cannot_be_trained(target, folder, load_target):
    with pytest.raises(
        ValueError,
        match="dtype is 'int8': drafters that read hidden states are stored as float32 or",
    ):
        run.checkpoint(recipe_of("medusa"), folder, folder / "out", folder / "run", dtype="int8")
    hard = TABLE | {"family": "eagle", "head": LAYER, "learn": {"hard": True}}
    with pytest.raises(ValueError, match=r"learn\.hard: only DFlash 2 chooses"):
        heads.start(recipes.parse(hard), target, None)
    with pytest.raises(ValueError, match="expected own_embedding"):
        heads.start(
            recipes.parse(TABLE | {"family": "eagle", "head": LAYER | {"dim": 8, "taps": [0]}}),
            target,
            None,
        )


@pytest.mark.slow
def test_shipped_recipes_fit_their_targets():
    """Sizes, taps and mask tokens; no parameters are made."""
    shipped = [
        recipe
        for recipe in map(recipes.load, recipes.shipped())
        if isinstance(recipe, recipes.HeadRecipe)
    ]
    families = {"eagle", "heads", "block", "dflash2", "exit_adapter", "lookahead_embeddings"}
    assert {recipe.family for recipe in shipped} == families
    for recipe in shipped:
        name = recipe.target.rpartition("/")[2]
        config = gemma.SIZES_3[name] if name in gemma.SIZES_3 else jaxspec.load(name).config
        lm = nets.net_of(config).language_model(config)
        head = recipe.head.config(jaxspec.Model(lm, {}, None, config))
        requirements = kind_of(head).head(head).requirements
        # what is trained can be written
        config_json(head, jaxspec.Model(lm, {}, None, config, name))
        assert (requirements.vocab_size, requirements.hidden_size) == (
            lm.vocab_size,
            lm.inside.width,
        )
        layers = nets.decoder_layers(config)
        # The output of the last layer is not what others publish.
        assert all(0 <= tap < layers - 1 for tap in requirements.taps)
