"""Training: batches that resume exactly, losses against direct computation, a run that survives a
kill.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import processors

import jaxspec
from jaxspec.core import Model
from jaxspec.nets import decoder, t5
from jaxspec.testing import table_model, word_tokenizer
from jaxspec.training import data, distil, loop, losses, networks, optimizer, recipes
from jaxspec.training.divergences import DIVERGENCES
from jaxspec.training.recipes import Data, RecipeError, Train
from tests.small import random_params, tiny_gpt, tiny_t5

CONFIG = tiny_gpt(17, max_positions=16)
ENCDEC = tiny_t5(17)


def texts(count=23, seed=0):
    random = np.random.default_rng(seed)
    empty = np.zeros((0,), np.int32)
    return [
        data.Example(empty, random.integers(1, 17, random.integers(3, 9)).astype(np.int32))
        for _ in range(count)
    ]


def pairs(count=19, seed=1):
    random = np.random.default_rng(seed)
    rows = [random.integers(2, 17, random.integers(2, 8)).astype(np.int32) for _ in range(count)]
    return [data.Example(row, np.append(row[::-1], 1).astype(np.int32)) for row in rows]


def test_an_epoch_visits_every_example():
    examples = pairs()
    batches = data.Batches(examples, data.buckets([(4, 5), (8, 9)], 50), seed=3)
    seen = set()
    for step in range(batches.per_epoch):
        batch = batches.at(step)
        for source, n in zip(batch.source, batch.source_length, strict=True):
            seen.add(tuple(source[:n]))
    assert seen == {tuple(e.source) for e in examples}
    once = sum(int((b.source_length > 0).sum()) for b in batches.once())
    assert once == len(examples)


def test_batches_depend_on_the_step_alone():
    a, b = (data.Batches(pairs(), data.buckets([(8, 9)], 70), seed=0) for _ in range(2))
    for step in (7, 0, 3, 11):
        for x, y in zip(a.at(step), b.at(step), strict=True):
            np.testing.assert_array_equal(x, y)
    other = data.Batches(pairs(), data.buckets([(8, 9)], 70), seed=1)
    assert not np.array_equal(a.at(0).source, other.at(0).source)


def test_too_long_an_example_is_named():
    with pytest.raises(ValueError, match="fits none of the batch shapes"):
        data.Batches(pairs(), data.buckets([(3, 3)], 30), seed=0)


@pytest.mark.slow
def test_cross_entropy_counts_real_tokens_only():
    for config, examples, net in ((CONFIG, texts(5), decoder), (ENCDEC, pairs(5), t5)):
        params = net.init(config, jax.random.key(0))
        loss = jax.jit(losses.cross_entropy(config))
        shape = data.Bucket(0 if config is CONFIG else 8, 10, 5)
        total, count = loss(params, data.collate(examples, shape))
        alone = [loss(params, data.collate([e], shape._replace(rows=1))) for e in examples]
        np.testing.assert_allclose(total, sum(t for t, _ in alone), rtol=1e-5)
        assert int(count) == sum(len(e.target) - (config is CONFIG) for e in examples)


@pytest.mark.slow
def test_cross_entropy_against_a_direct_computation():
    params = decoder.init(CONFIG, jax.random.key(0))
    row = jnp.array([[3, 5, 2, 9]])
    log_probs = jax.nn.log_softmax(
        jax.jit(decoder.DecoderNet(CONFIG).apply)({"params": params}, row[:, :-1])
    )
    expected = -sum(log_probs[0, i, row[0, i + 1]] for i in range(3))
    batch = data.collate(
        [data.Example(np.zeros((0,), np.int32), np.array(row[0]))], data.Bucket(0, 6, 1)
    )
    total, count = jax.jit(losses.cross_entropy(CONFIG))(params, batch)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert int(count) == 3


@pytest.mark.slow
def test_distillation_from_itself_is_zero():
    params = decoder.init(CONFIG, jax.random.key(0))
    teacher = Model(decoder.language_model(CONFIG), params, config=CONFIG)
    batch = data.collate(texts(4), data.Bucket(0, 10, 4))
    total, _ = jax.jit(distil.distillation(CONFIG, teacher, 1.0))(params, batch)
    np.testing.assert_allclose(total, 0.0, atol=1e-4)
    other = decoder.init(CONFIG, jax.random.key(1))
    both, plain, kl = (
        jax.jit(distil.distillation(CONFIG, teacher, w))(other, batch)[0] for w in (0.25, 0.0, 1.0)
    )
    np.testing.assert_allclose(both, 0.75 * plain + 0.25 * kl, rtol=1e-5)
    assert float(kl) > 0
    np.testing.assert_allclose(
        plain, jax.jit(losses.cross_entropy(CONFIG))(other, batch)[0], rtol=1e-5
    )


@pytest.mark.slow
def test_answers_are_the_teachers_own_and_made_once(tmp_path, monkeypatch):
    params = t5.init(ENCDEC, jax.random.key(0))
    teacher, path = Model(t5.language_model(ENCDEC), params, config=ENCDEC), tmp_path / "a.jsonl"
    examples = pairs(5)
    answers = distil.answers(teacher, examples[:3], path, 6, progress=False)
    assert [len(e.target) for e in answers] == [6] * 3
    assert [e.source.tolist() for e in answers] == [e.source.tolist() for e in examples[:3]]

    with path.open("a") as file:
        file.write('{"source": [1, 2], "tar')  # killed while it wrote
    sources, make = [], jaxspec.generate_many

    def counted(teacher, prompts, **options):
        sources.extend(prompt["prompt"] for prompt in prompts)
        return make(teacher, prompts, **options)

    monkeypatch.setattr(jaxspec, "generate_many", counted)
    more = distil.answers(teacher, examples, path, 6, progress=False)
    assert set(sources) == {tuple(e.source.tolist()) for e in examples[3:]}
    again = distil.answers(teacher, examples, path, 6, progress=False)
    assert len(sources) == 2
    assert [e.target.tolist() for e in again[:3]] == [e.target.tolist() for e in answers]
    assert [e.target.tolist() for e in again] == [e.target.tolist() for e in more]

    other = teacher._replace(params=jax.tree.map(lambda leaf: leaf + 1, params))
    with pytest.raises(ValueError, match=r"holds answers of .*, expected .*: move it away"):
        distil.answers(other, examples, path, 6, progress=False)
    german = teacher._replace(lm=teacher.lm._replace(limits=teacher.lm.limits._replace(begin=(3,))))
    # of the same weights, which write another language
    with pytest.raises(ValueError, match="'begins'"):
        distil.answers(german, examples, path, 6, progress=False)


@pytest.mark.slow
def test_sampled_answers_are_the_same_in_every_run(tmp_path):
    teacher = Model(t5.language_model(ENCDEC), t5.init(ENCDEC, jax.random.key(0)), config=ENCDEC)
    greedy, *sampled = (
        [
            e.target.tolist()
            for e in distil.answers(teacher, pairs(5), tmp_path / name, 6, False, temperature)
        ]
        for name, temperature in (("0", 0.0), ("1", 1.0), ("2", 1.0))
    )
    assert sampled[0] == sampled[1] != greedy


@pytest.mark.slow
def test_answers_of_a_beam_search_are_its_best_hypotheses(tmp_path):
    teacher = table_model(jax.random.key(1), vocab=5)
    sources = [
        data.Example(np.array(row, np.int32), np.zeros(0, np.int32))
        for row in ([1, 2], [3, 1], [2, 2])
    ]
    path = tmp_path / "a.jsonl"
    searched = distil.answers(teacher, sources, path, 6, progress=False, beams=3)
    best = jaxspec.beam_search(
        teacher, [e.source.tolist() for e in sources], beams=3, max_new_tokens=6
    ).tokens[:, 0]
    assert [e.target.tolist() for e in searched] == best.tolist()
    greedy = distil.answers(teacher, sources, tmp_path / "b.jsonl", 6, progress=False)
    assert [e.target.tolist() for e in greedy] != best.tolist()
    with pytest.raises(ValueError, match=r"'beams': 3.* expected .*: move it away"):
        distil.answers(teacher, sources, path, 6, progress=False)


def test_divergences_are_those_by_hand():
    """Two outcomes, by hand; and none from a distribution to itself."""
    log_p, log_q, real = (
        jnp.array([[x]])
        for x in (jnp.log(jnp.array([0.8, 0.2])), jnp.log(jnp.array([0.5, 0.5])), 1.0)
    )
    kl = 0.8 * np.log(0.8 / 0.5) + 0.2 * np.log(0.2 / 0.5)
    m = 0.65, 0.35
    expected = {
        "kl": kl,
        "reverse_kl": 0.5 * np.log(0.5 / 0.8) + 0.5 * np.log(0.5 / 0.2),
        "jensen_shannon": 0.5 * (0.8 * np.log(0.8 / m[0]) + 0.2 * np.log(0.2 / m[1]))
        + 0.5 * (0.5 * np.log(0.5 / m[0]) + 0.5 * np.log(0.5 / m[1])),
        "total_variation": 0.3,
        "minus_log_alpha": -np.log(0.7),
        "blend": np.exp(-2.1) * kl + (1 - np.exp(-2.1)) * 0.3,
    }
    assert set(expected) == set(DIVERGENCES)
    for name, divergence in DIVERGENCES.items():
        np.testing.assert_allclose(divergence(log_p, log_q, real), [[expected[name]]], rtol=1e-5)
        np.testing.assert_allclose(divergence(log_p, log_p, real), [[0.0]], atol=1e-6)


@pytest.mark.slow
def test_a_drafter_learns_from_its_teachers_answers_alone(tmp_path, monkeypatch):
    teacher = Model(t5.language_model(ENCDEC), t5.init(ENCDEC, jax.random.key(0)), config=ENCDEC)
    monkeypatch.setattr(networks, "load", lambda name, dtype: teacher)
    texts = recipes.Data("", "", ((8, 6),), "tokenizer", ("a",))
    recipe = recipes.Recipe("small", ENCDEC, None, texts, Train(1, 1, 1.0))
    tasks = {"one": pairs(6), "two": pairs(4, seed=2)}
    learnt = networks.answered(
        recipe, recipes.Distil("teacher", answers=(3, 0)), tasks, tmp_path, progress=False
    )
    assert {task: len(examples) for task, examples in learnt.items()} == {"one": 3, "two": 0}
    # never ends: its answers are as long as they may be
    assert all(len(e.target) == 6 for e in learnt["one"])
    examples = recipes.Distil("teacher", 1.0, answers=(3, 0), temperatures=(0.0, 1.0), texts=2)
    learnt = networks.answered(recipe, examples, tasks, tmp_path, progress=False)
    assert {task: len(examples) for task, examples in learnt.items()} == {
        "one": 2 * 6 + 2 * 3,
        "two": 2 * 4,
    }
    assert (
        networks.answered(recipe, recipes.Distil("teacher"), tasks, tmp_path, progress=False)
        is tasks
    )
    with pytest.raises(
        ValueError, match=r"answers is \[3\]: expected a number for each of \['one', 'two'\]"
    ):
        networks.answered(
            recipe, recipes.Distil("teacher", answers=(3,)), tasks, tmp_path, progress=False
        )


def test_a_drafter_with_its_teachers_encoder_learns_the_rest(monkeypatch):
    shape = dataclasses.replace(ENCDEC, encoder_layers=2, decoder_layers=2, tied_head=True)
    teacher = Model(t5.language_model(shape), random_params(t5.init, shape), config=shape)
    monkeypatch.setattr(networks, "load", lambda name, dtype=None: teacher)
    shape = dataclasses.replace(shape, decoder_layers=1, tied_head=False, scaled_head=False)
    share = recipes.Distil("teacher", share_encoder=True)
    recipe = recipes.Recipe(
        "small",
        shape,
        None,
        recipes.Data("", "", ((8, 6),), "tokenizer", ("a",)),
        Train(1, 1, 1.0),
        share,
    )
    fixed = networks.fixed_parameters(recipe)
    assert sorted(fixed) == ["embedding", "encoder_0", "encoder_1", "encoder_bias", "encoder_norm"]
    params = {name: x for name, x in random_params(t5.init, shape, 1).items() if name not in fixed}
    batch = data.collate(pairs(4), data.Bucket(8, 8, 4))
    loss = losses.cross_entropy(shape)
    held = losses.with_fixed(loss, fixed)
    expected = jax.jit(loss)(params | teacher.params | params, batch)[0]
    np.testing.assert_array_equal(jax.jit(held)(params, batch)[0], expected)
    assert sorted(jax.jit(jax.grad(lambda p: held(p, batch)[0]))(params)) == sorted(params)
    assert (
        networks.fixed_parameters(dataclasses.replace(recipe, distil=recipes.Distil("teacher")))
        == {}
    )
    with pytest.raises(
        recipes.RecipeError,
        match=r"small: distil.share_encoder, and the teacher teacher is T5Config",
    ):
        networks.fixed_parameters(
            dataclasses.replace(recipe, model=dataclasses.replace(shape, encoder_layers=1))
        )


def test_a_language_model_learns_from_its_teachers_continuations(tmp_path, monkeypatch):
    teacher = Model(
        decoder.language_model(CONFIG), decoder.init(CONFIG, jax.random.key(0)), config=CONFIG
    )
    monkeypatch.setattr(networks, "load", lambda name, dtype: teacher)
    recipe = recipes.Recipe(
        "small", CONFIG, None, recipes.Data("", "", ((0, 9),), "tokenizer"), Train(1, 1, 1.0)
    )
    rows = [e for e in texts(6) if len(e.target) > 3]
    learnt = networks.answered(
        recipe, recipes.Distil("t", answers=(6,), prompt=3), {"text": rows}, tmp_path, False
    )
    assert [e.target[:3].tolist() for e in learnt["text"]] == [e.target[:3].tolist() for e in rows]
    assert [(len(e.source), len(e.target)) for e in learnt["text"]] == [(0, 10)] * len(rows)


@pytest.mark.slow
def test_a_drafter_learns_on_texts_of_its_own():
    """Some rows are what `generate` samples, the others the data; the loss sees these, and no
    gradient the sampling.
    """
    for config, net, examples in ((CONFIG, decoder, texts(8)), (ENCDEC, t5, pairs(8))):
        batch = data.collate(examples, data.Bucket(0 if net is decoder else 8, 9, 9))
        lm, params = net.language_model(config), net.init(config, jax.random.key(1))
        likelihood = losses.cross_entropy(config)
        mixed = distil.on_policy(lambda p, b: (likelihood(p, b)[0], b), lm, 0.5, prompt=3, eos=(1,))  # noqa: B023
        gradient = jax.jit(jax.grad(mixed, has_aux=True) if net is decoder else mixed)
        changed, learnt = gradient(params, batch)
        if net is decoder:
            expected = jax.jit(jax.grad(lambda p: likelihood(p, learnt)[0]))(params)  # noqa: B023
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
                changed,
                expected,
            )

        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), int(batch.target.sum())), 0)
        tokens = batch.target[:, :3] if net is decoder else batch.source
        length = np.maximum(
            np.minimum(batch.target_length, 3) if net is decoder else batch.source_length, 1
        )
        options = dict(max_new_tokens=batch.target.shape[1] - 3 * (net is decoder), eos_ids=[1])
        prompts, student = jaxspec.Prompt(tokens, length), Model(lm, params, config=config)
        out = jaxspec.generate(student, prompts, temperature=1.0, key=key, **options)
        is_own = []
        for row in range(9):
            text, new = (
                learnt.target[row, : learnt.target_length[row]].tolist(),
                out.tokens[row, : out.lengths[row]],
            )
            of_data = batch.target[row, : batch.target_length[row]].tolist()
            is_own.append(text == [*tokens[row, : length[row]][: 3 * (net is decoder)], *new])
            assert is_own[-1] or text == of_data
        assert 0 < sum(is_own) < 8 and not is_own[8]  # the last row is padding
    with pytest.raises(ValueError, match="texts have 10 tokens, and the model is given 16 of them"):
        distil.samples(
            decoder.language_model(CONFIG),
            None,
            data.collate(texts(2), data.Bucket(0, 9, 2)),
            None,
            16,
            (1,),
        )


def test_a_language_models_rows_are_one_token_wider(tmp_path):
    """A row of N + 1 tokens gives N predictions: it fits the shape of N."""
    row = data.Example(np.zeros((0,), np.int32), np.arange(1, 10, dtype=np.int32))
    batches = data.Batches([row], [data.Bucket(0, 8, 2)], seed=0)
    assert batches.at(0).target.shape == (2, 9)
    assert batches.at(0).target[0].tolist() == row.target.tolist()
    with pytest.raises(ValueError, match="fits none of the batch shapes"):
        data.Batches([row], [data.Bucket(0, 7, 2)], seed=0)


def test_the_learning_rate_warms_up_stays_and_decays():
    rate = optimizer.schedule(
        Train(steps=100, batch_tokens=1, learning_rate=2.0, warmup=10, decay=0.5)
    )
    assert [float(rate(s)) for s in (0, 5, 10, 49, 75, 100)] == pytest.approx([0, 1, 2, 2, 1, 0])


@pytest.fixture
def promotion():
    """Optax's own bias correction multiplies a float by an int32 count, which strict promotion
    refuses.
    """
    with jax.numpy_dtype_promotion("standard"):
        yield


class Killed(Exception):
    """The machine went away."""


def run(folder, steps=9, log=lambda line: None, **options):
    train = Train(
        steps, batch_tokens=40, learning_rate=1e-2, warmup=2, evaluate_every=3, save_every=2
    )
    batches = data.Batches(texts(), data.buckets([(0, 9)], 40), seed=0)
    params = decoder.init(CONFIG, jax.random.key(0))
    loss = losses.cross_entropy(CONFIG)
    objective = loop.Objective(loss, batches, loop.mean_loss(loss), batches)
    return loop.fit(params, objective, train, folder, log=log, progress=False, **options)


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(tmp_path, promotion):
    uncut, held = run(tmp_path / "whole")

    def kill(line):
        if line.startswith("step 6"):
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "cut", log=kill)
    lines = []
    resumed, held_again = run(tmp_path / "cut", log=lines.append)
    assert lines[0].startswith("resumed at step 4")
    for a, b in zip(jax.tree.leaves(uncut), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    assert held == held_again
    first = losses.cross_entropy(CONFIG)(
        decoder.init(CONFIG, jax.random.key(0)), data.collate(texts(), data.Bucket(0, 9, 23))
    )
    assert held < float(first[0] / first[1])  # it learnt something


@pytest.mark.slow
def test_the_average_is_what_is_evaluated_and_returned(tmp_path, promotion):
    params, recipe = (
        decoder.init(CONFIG, jax.random.key(0)),
        Train(3, 40, 0.1, 1, 0.0, average=0.15),
    )
    batches = data.Batches(texts(), data.buckets([(0, 10)], 40), seed=0)
    loss, rule = losses.cross_entropy(CONFIG), optimizer.make(recipe)
    objective = loop.Objective(loss, batches, loop.mean_loss(loss), batches)
    averaged, held = loop.fit(
        params, objective, recipe, tmp_path, log=lambda _: None, progress=False
    )
    state, expected = (
        loop.TrainState(
            jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params), rule.init(params)
        ),
        params,
    )
    for step, decay in enumerate((0.1, 0.15, 0.15)):  # the first step's is limited
        state, _ = loop.make_step(loss, rule, recipe)(state, batches.at(step))
        expected = jax.tree.map(lambda a, b, d=decay: d * a + (1 - d) * b, expected, state.params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), averaged, expected
    )
    assert held == pytest.approx(loop.evaluate(jax.jit(loss), expected, batches.once()), rel=1e-4)


@pytest.mark.slow
def test_a_run_drops_entries_and_learns_what_will_be_stored(tmp_path, promotion):
    batches = data.Batches(texts(), data.buckets([(0, 10)], 40), seed=0)
    loss, params = losses.cross_entropy(CONFIG), decoder.init(CONFIG, jax.random.key(0))
    objective = loop.Objective(loss, batches, loop.mean_loss(loss), batches)

    def trained(**options):
        recipe = Train(4, 40, 1e-2, 1, 0.5, evaluate_every=1, **options)
        lines = []
        name = "-".join(options) or "plain"
        best, _ = loop.fit(
            params, objective, recipe, tmp_path / name, log=lines.append, progress=False
        )
        return best, [float(line.split("loss ")[1].split(",")[0]) for line in lines]

    plain, losses_plain = trained()
    dropped, losses_dropped = trained(dropout=0.5)
    _, losses_rounded = trained(stored="int4")
    # the same parameters, with half of what each block adds
    assert losses_dropped[0] != losses_plain[0]
    # the rate decays, and parameters are rounded, from step 2 on
    assert losses_rounded[:2] == losses_plain[:2]
    assert losses_rounded[2] != losses_plain[2]
    with pytest.raises(AssertionError):
        jax.tree.map(np.testing.assert_array_equal, dropped, plain)


@pytest.mark.slow
def test_a_diverging_run_says_so(tmp_path, promotion):
    def broken(params, batch):
        return jnp.sum(params["embedding"]["embedding"]) * jnp.nan, jnp.ones(())

    with pytest.raises(FloatingPointError, match="loss is nan at step 0: lower the learning rate"):
        batches = data.Batches(texts(), data.buckets([(0, 9)], 40), 0)
        objective = loop.Objective(broken, batches, loop.mean_loss(broken), batches)
        loop.fit(
            decoder.init(CONFIG, jax.random.key(0)),
            objective,
            Train(2, 1, 1e-3),
            tmp_path,
            progress=False,
        )


def test_missing_and_empty_data(tmp_path):
    with pytest.raises(FileNotFoundError, match="no training data"):
        data.read_pairs(tmp_path / "none.jsonl", None, ["a"], 8, 8)
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps({"task": "a", "input": "x", "output": "y"}) + "\n"
    )
    with pytest.raises(ValueError, match="no example of the tasks"):
        data.read_pairs(tmp_path / "pairs.jsonl", None, ["b"], 8, 8)


def test_a_source_is_cut_as_transformers_truncates(tmp_path):
    words = word_tokenizer(["<s>", "</s>", "<unk>", "a", "b", "c"])
    special = [("<s>", 0), ("</s>", 1)]
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=special
    )
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps({"task": "a", "input": "a b c a b", "output": "c"}) + "\n"
    )
    for most in (3, 5, 7):
        (example,) = data.read_pairs(tmp_path / "pairs.jsonl", words, ["a"], most, 8)
        assert (
            example.source.tolist()
            == words("a b c a b", truncation=True, max_length=most)["input_ids"]
        )


def test_a_recipe_may_train_on_several_files(tmp_path):
    def words(texts=None, text_target=None, **options):
        return {
            "input_ids": [[int(word) for word in text.split()] for text in texts or text_target]
        }

    def written(name, *outputs):
        rows = [
            json.dumps({"task": "a", "input": "2 1", "output": f"{output} 1"}) + "\n"
            for output in outputs
        ]
        (tmp_path / name).write_text("".join(rows))

    words.eos_token_id = 1
    written("first", 3, 4)
    written("second", 5)
    written("held", 6)
    options = Data("first", "held", ((4, 4),), tasks=("a",), also=("second", "second"))
    outputs = [int(e.target[0]) for e in data.examples(options, True, tmp_path, words)["a"]]
    assert outputs == [3, 4, 5, 5]
    assert [
        int(e.target[0]) for e in data.examples(options, True, tmp_path, words, heldout=True)["a"]
    ] == [6]


def test_a_decoder_only_model_learns_from_all_files_and_has_no_tasks(tmp_path):
    class Words:
        bos_token_id, eos_token_id = None, 1

        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [[int(word) for word in text.split()] for text in texts]}

    for name, first in (("first", 3), ("second", 5), ("held", 6)):
        (tmp_path / name).write_text(json.dumps({"text": f"{first} " * 9}) + "\n")
    options = Data("first", "held", ((0, 16),), also=("second", "second"))
    firsts = [int(e.target[1]) for e in data.examples(options, False, tmp_path, Words())["text"]]
    assert firsts == [3, 5, 5]
    # as a head's recipe may ask
    with pytest.raises(RecipeError, match=r"data.tasks is \['a'\]: a decoder-only model"):
        data.examples(dataclasses.replace(options, tasks=("a",)), False, tmp_path, Words())
