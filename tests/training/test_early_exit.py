"""Training with layer dropout and a loss at every exit: early exits agree with the target; exact resume."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import recipes
from jaxspec.nets import decoder, gpt, t5
from jaxspec.recipes import EarlyExit, Train
from jaxspec.training import data, early_exit, loop, losses, optimizer

V = 9
CONFIG = gpt.GPTConfig(V, dim=16, ff_dim=16, layers=3, heads=2, max_positions=16)
CONFIGS = {
    "gpt": CONFIG,
    "decoder": decoder.DecoderConfig(V, dim=8, ff_dim=8, layers=3, heads=2, kv_heads=1, head_dim=4),
    "t5": t5.T5Config(V, dim=8, ff_dim=8, heads=2, head_dim=4, encoder_layers=1, decoder_layers=3),
}
TRAIN = Train(60, batch_tokens=160, learning_rate=0.1, warmup=5, evaluate_every=30, save_every=25)
LOSS = early_exit.loss(CONFIG, EarlyExit(scale=1.0, dropout=0.2, every=2), TRAIN)


def examples(config, count=40):
    """Each token is the sum of the two before it: what one layer cannot copy, and two can compute."""
    random, found = np.random.default_rng(0), []
    for _ in range(count):
        row = list(random.integers(1, V, 2))
        while len(row) < 9:
            row.append((row[-1] + row[-2]) % V)
        source = np.array(row[:2] if config is CONFIGS["t5"] else [], np.int32)
        found.append(data.Example(source, np.array(row, np.int32)))
    return found


START, LIKELIHOOD = gpt.init(CONFIG, jax.random.key(0)), losses.cross_entropy(CONFIG)


def batches_of(config):
    return data.Batches(examples(config), data.buckets([(2 if config is CONFIGS["t5"] else 0, 9)], 160), seed=0)


def fit(folder, log=lambda line: None):
    batches = batches_of(CONFIG)
    objective = loop.Objective(LOSS, early_exit.Steps(batches), LIKELIHOOD, batches)
    return loop.fit(START, objective, TRAIN, folder, log=log, progress=False)[0]


def without_exits():
    rule, batches = optimizer.make(TRAIN), batches_of(CONFIG)
    state, step = loop.TrainState(jnp.zeros((), jnp.int32), START, rule.init(START)), loop.make_step(LIKELIHOOD, rule)
    for i in range(TRAIN.steps):
        state, _ = step(state, batches.at(i))
    return state.params


@jax.jit
def alpha(params):
    """The acceptance rate of the exit after two of three layers, at temperature 1, after the texts' tokens."""
    rows, net = losses.rows_of(CONFIG, next(batches_of(CONFIG).once())), gpt.GPT(CONFIG).bind({"params": params})
    _, q, p = [jax.nn.softmax(net.logits(net.features(x))) for x in net.streams(*rows.inputs)]
    return jnp.sum(jnp.minimum(p, q)) / p[..., 0].size


@pytest.fixture
def promotion():
    """Optax's own bias correction multiplies a float by an int32 count, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Killed(Exception):
    """The machine went away."""


def test_more_of_an_early_exit_is_accepted_and_a_killed_run_resumes_exactly(tmp_path, promotion, monkeypatch):
    plain = without_exits()
    once = loop.make_step(LOSS, optimizer.make(TRAIN))
    monkeypatch.setattr(loop, "make_step", lambda *_: once)  # compiled once

    def kill(line):
        if line.startswith("step 30"):
            raise Killed

    trained = fit(tmp_path / "whole")
    found = float(alpha(trained)), float(alpha(plain))
    assert found[0] > found[1] + 0.1, found
    with pytest.raises(Killed):
        fit(tmp_path / "cut", kill)
    lines = []
    resumed = fit(tmp_path / "cut", lines.append)
    assert lines[0].startswith("resumed at step 25")
    jax.tree.map(np.testing.assert_array_equal, trained, resumed)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_is_the_weighted_mean_of_the_exits(name):
    """Against networks of fewer layers, without dropout; and a row that skips layers is another network's, too."""
    config, about = CONFIGS[name], EarlyExit(dropout=0.0, scale=0.5, every=2)
    layers, batch = recipes.decoder_layers(config), next(batches_of(config).once())
    params = recipes.net_of(config).init(config, jax.random.key(0))
    rows, module = losses.rows_of(config, batch), losses.module_of(config)

    @jax.jit
    def measured(params, step):
        streams = module.apply({"params": params}, *rows.inputs, method="streams")
        net = module.bind({"params": params})
        each = [losses.negative_log_likelihood(net.logits(net.features(x)), rows.labels) for x in streams]
        exits = jnp.stack([losses.over_real(x, rows.real)[0] for x in each])
        found, count = early_exit.loss(config, about, TRAIN)(params, early_exit.Numbered(batch, step))
        return found, count, jnp.sum(exits * early_exit.weights(about, TRAIN, layers, step)), exits

    for step in (0, 1):
        found, count, expected, exits = measured(params, jnp.array(step))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    total, of_all = jax.jit(losses.cross_entropy(config))(params, batch)
    np.testing.assert_allclose(exits[-1], total, rtol=1e-5)
    assert int(count) == int(of_all)
