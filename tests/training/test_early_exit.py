"""Training with layer dropout and a loss at every exit: early exits agree with the target; exact
resume.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import nets
from jaxspec.nets import decoder, decoder_layers
from jaxspec.training import data, early_exit, loop, losses, recipes
from jaxspec.training.recipes import EarlyExit, Train
from tests.small import tiny_gpt, tiny_llama, tiny_t5

V = 9
CONFIG = tiny_gpt(V, layers=3)
CONFIGS = {
    "gpt": CONFIG,
    "decoder": tiny_llama(V, layers=3),
    "t5": tiny_t5(V, layers=3),
}
GPT = {"model_type": "gpt2", "vocab_size": V, "n_embd": 8, "n_layer": 3, "n_head": 2}
GPT |= {"n_positions": 16}
TRAIN = Train(60, batch_tokens=160, learning_rate=0.1, warmup=5, evaluate_every=40, save_every=30)


def batches_of(config, count=40):
    """Texts in which each token is the sum of the two before it."""
    random, examples, source = np.random.default_rng(0), [], 2 if config is CONFIGS["t5"] else 0
    for _ in range(count):
        row = list(random.integers(1, V, 2))
        while len(row) < 9:
            row.append((row[-1] + row[-2]) % V)
        examples.append(data.Example(np.array(row[:source], np.int32), np.array(row, np.int32)))
    return data.Batches(examples, data.buckets([(source, 9)], 160), seed=0)


@jax.jit
def alpha(params):
    """The acceptance rate of the exit after two of three layers, at temperature 1, after the texts'
    tokens.
    """
    rows, net = (
        losses.rows_of(CONFIG, next(batches_of(CONFIG).once())),
        decoder.DecoderNet(CONFIG).bind({"params": params}),
    )
    _, q, p = [jax.nn.softmax(net.logits(net.features(x))) for x in net.streams(*rows.inputs)]
    return jnp.sum(jnp.minimum(p, q)) / p[..., 0].size


@pytest.fixture
def promotion():
    """Optax's own bias correction multiplies a float by an int32 count, which strict promotion
    refuses.
    """
    with jax.numpy_dtype_promotion("standard"):
        yield


class Killed(Exception):
    """The machine went away."""


@pytest.mark.slow
def test_more_of_an_early_exit_is_accepted_and_a_killed_run_resumes_exactly(
    tmp_path, promotion, monkeypatch
):
    loss = early_exit.loss(CONFIG, EarlyExit(scale=1.0, dropout=0.2, curriculum="gradual"), TRAIN)
    step, start = (
        loop.make_step(loss, loop.optimizer.make(TRAIN), TRAIN),
        decoder.init(CONFIG, jax.random.key(0)),
    )
    monkeypatch.setattr(loop, "make_step", lambda *_: step)  # one program for all runs

    def fit(name, inputs=early_exit.numbered, log=lambda line: None):
        batches = batches_of(CONFIG)
        objective = loop.Objective(
            loss, batches, lambda params, batches: 0.0, batches, inputs=inputs
        )
        return loop.fit(start, objective, TRAIN, tmp_path / name, log=log, progress=False)[0]

    def kill(line):
        if line.startswith("step 40"):
            raise Killed

    # In a gradual curriculum's first step the last exit learns alone, and no layer is dropped.
    trained, plain = fit("whole"), fit("plain", lambda batch, step: early_exit.numbered(batch, 0))
    rates = float(alpha(trained)), float(alpha(plain))
    assert rates[0] > rates[1] + 0.1, rates
    with pytest.raises(Killed):
        fit("cut", log=kill)
    lines = []
    resumed = fit("cut", log=lines.append)
    assert lines[0].startswith("resumed at step 30")
    jax.tree.map(np.testing.assert_array_equal, trained, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["t5", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("gpt", "decoder"))]
)
def test_the_loss_is_the_weighted_mean_of_the_exits(name):
    """Without dropout; and a row that skips a layer has the output of the one before it."""
    config, options = CONFIGS[name], EarlyExit(dropout=0.0, scale=0.5, every=2)
    layers, batch = decoder_layers(config), next(batches_of(config).once())
    params = nets.net_of(config).init(config, jax.random.key(0))
    rows, module = losses.rows_of(config, batch), losses.module_of(config)

    @jax.jit
    def measured(params, step):
        net = module.bind({"params": params})
        streams = net.streams(*rows.inputs)
        by_exit = [
            losses.negative_log_likelihood(net.logits(net.features(x)), rows.labels)
            for x in streams
        ]
        exits = jnp.stack([losses.over_real(x, rows.real)[0] for x in by_exit])
        actual, count = early_exit.loss(config, options, TRAIN)(
            params, early_exit.Numbered(batch, step)
        )
        expected = jnp.sum(exits * early_exit.weights(options, TRAIN, layers, step))
        runs = jnp.ones((layers, len(batch.target)), bool).at[-1, 0].set(False)
        last, skipped = streams[-1], net.streams(*rows.inputs, runs)[-1]
        right = jnp.concatenate([streams[-2][:1], last[1:]])
        return (
            actual,
            expected,
            count,
            exits[-1],
            losses.cross_entropy(config)(params, batch),
            skipped,
            right,
        )

    for step in (0, 1):
        actual, expected, count, last, (total, of_all), skipped, right = measured(
            params, jnp.array(step)
        )
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        np.testing.assert_allclose(last, total, rtol=1e-5)
        assert int(count) == int(of_all)
        np.testing.assert_allclose(skipped, right, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"early_exit": {"curriculum": "random"}},
            "curriculum is 'random': expected one of rotating, grad",
        ),
        (
            {"early_exit": {"dropout": 1.0}},
            r"\[early_exit\] dropout is 1.0: expected a number from 0 to below 1",
        ),
        ({"early_exit": {}, "distil": {"teacher": "x"}}, "distil.weight is 1.0: expected 0"),
        (
            {"early_exit": {}, "model": GPT | {"n_layer": 2}},
            "2 layers: .* least 3",
        ),
    ],
)
def test_mistakes_in_recipes_are_named(change, message):
    table = {
        "name": "toy",
        "model": GPT,
        "data": dict(train="a", heldout="b", tokenizer="c", shapes=[[0, 9]]),
        "train": dict(steps=4, batch_tokens=8, learning_rate=0.1),
    }
    with pytest.raises(recipes.RecipeError, match=message):
        recipes.parse(table | change)
